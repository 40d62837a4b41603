"""Reader of dumps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from lightning_recorder.dumps.manifest import ID
from lightning_recorder.dumps.tensors import read_tensors
from lightning_recorder.dumps.writer import FORMAT
from lightning_recorder.errors import describe_missing

__all__ = ["Dump", "read_dump"]


@dataclass(frozen=True)
class Dump:
    """A dump in memory.

    Args:
        tensors: The tensors by name, on the CPU, such as ``conv1/mean``, 0-d float64, and ``conv1/histogram``,
            ``[2048]`` int64.
        about: The metadata, such as step, epoch and checkpoint, as strings.
    """

    tensors: dict[str, Tensor]
    about: dict[str, str]


def read_dump(path: str | Path) -> Dump:
    """Read a dump. Nothing in the file is executed.

    Raises:
        DumpError: If the file is damaged or was not written by lightning_recorder.
        FileNotFoundError: If the file does not exist. The message names the first missing part of the path.
    """
    path = Path(path)
    if path.is_dir():
        raise FileNotFoundError(f"{str(path)!r} is a folder, not a dump: read_manifest({str(path)!r}) lists its dumps")
    if not path.exists():
        raise FileNotFoundError(f"no dump can be read from {str(path)!r}: {describe_missing(path)}")
    tensors, about = read_tensors(path, FORMAT)
    about.pop(ID, None)
    return Dump(tensors, about)
