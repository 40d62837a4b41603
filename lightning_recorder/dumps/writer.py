"""Writer of dumps, each with a line in the manifest."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_recorder.dumps.manifest import ID, append_line
from lightning_recorder.dumps.tensors import write_tensors

__all__ = ["remove_dump", "write_dump"]

FORMAT = "lightning_recorder.dump/1"


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
    write_tensors(path, tensors, {"format": FORMAT, **{key: str(value) for key, value in (own | about).items()}})
    size = path.stat().st_size
    kinds = {name: _kind(tensor) for name, tensor in tensors.items()}
    what = {"tensors": kinds} if samples is None else {"statistics": _by_statistic(kinds), "sites": dict(samples)}
    kind = "tensors" if samples is None else "statistics"
    line = {"file": path.name, "kind": kind, "bytes": size, **about, **what, **own}
    append_line(path.parent, line, int(about.get("rank", 0)))
    return size


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


def remove_dump(path: str | Path) -> None:
    """Remove a dump whose checkpoint was removed. A no-op if the dump does not exist."""
    Path(path).unlink(missing_ok=True)
