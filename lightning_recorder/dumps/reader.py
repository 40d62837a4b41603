"""Reading a dump back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from lightning_recorder.dumps.manifest import ID
from lightning_recorder.dumps.tensors import read_tensors
from lightning_recorder.dumps.writer import FORMAT

__all__ = ["Dump", "read_dump"]


@dataclass(frozen=True)
class Dump:
    """A dump in memory.

    Args:
        tensors: By name, on the CPU: ``conv1/mean``, 0-d float64, and so on; ``conv1/histogram``, ``[2048]`` int64.
        about: Step, epoch, checkpoint and the like, as strings.
    """

    tensors: dict[str, Tensor]
    about: dict[str, str]


def read_dump(path: str | Path) -> Dump:
    """Read a dump; nothing in the file is executed.

    Raises:
        DumpError: If the file is damaged or is not a dump of ours.
        FileNotFoundError: If there is no such file.
    """
    tensors, about = read_tensors(Path(path), FORMAT)
    about.pop(ID, None)
    return Dump(tensors, about)
