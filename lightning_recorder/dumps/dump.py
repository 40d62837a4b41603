"""One dump: tensors and metadata in a file, with a line in the manifest of its folder."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_recorder.dumps.manifest import ID, append_line
from lightning_recorder.dumps.tensor_file import read_tensors, write_tensors
from lightning_recorder.errors import describe_missing

__all__ = ["Dump", "read_dump", "remove_dump", "write_dump"]

_FORMAT = "lightning_recorder.dump/1"


def write_dump(
    path: str | Path, tensors: Mapping[str, Tensor], samples: Mapping[str, int] | None = None, **about: Any
) -> int:
    """Write one dump and append its line to the manifest in the same folder.

    A run that is killed leaves no incomplete file under the final name.

    Args:
        path: The file, ending in ``.safetensors``. Its folder is created if necessary.
        tensors: The tensors to write. Statistics are named ``<site>/<statistic>``, and a statistic has the same dtype
            at every site.
        samples: The number of values that the statistics of each site cover; ``None`` for tensors that are not
            statistics.
        about: Additional entries of the manifest line, as numbers and strings: ``step``, ``epoch``, ``stage``,
            ``rank``, ``checkpoint``, ``group``.

    Returns:
        The size of the file in bytes.

    Raises:
        OSError: If the file cannot be written. An existing file is left unchanged.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # When a file is replaced, its old line remains until the new one is written. The shared ID tells the lines apart.
    own = {ID: uuid.uuid4().hex}
    write_tensors(path, tensors, {"format": _FORMAT, **{key: str(value) for key, value in (own | about).items()}})
    size = path.stat().st_size
    kinds = {name: _kind(tensor) for name, tensor in tensors.items()}
    what = {"tensors": kinds} if samples is None else {"statistics": _by_statistic(kinds), "sites": dict(samples)}
    kind = "tensors" if samples is None else "statistics"
    line = {"file": path.name, "kind": kind, "bytes": size, **about, **what, **own}
    append_line(path.parent, line, int(about.get("rank", 0)))
    return size


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
    tensors, about = read_tensors(path, _FORMAT)
    about.pop(ID, None)
    return Dump(tensors, about)


def remove_dump(path: str | Path) -> None:
    """Remove a dump whose checkpoint was removed. A no-op if the dump does not exist."""
    Path(path).unlink(missing_ok=True)


def _kind(tensor: Tensor) -> dict[str, Any]:
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def _by_statistic(kinds: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the kind of each statistic. The shape is ``None`` if it differs between sites, as for channels."""
    found: dict[str, dict[str, Any]] = {}
    for name, kind in kinds.items():
        known = found.setdefault(name.rpartition("/")[2], dict(kind))
        if known["shape"] != kind["shape"]:
            known["shape"] = None
    return found
