"""Writing a dump and its line in the manifest."""

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
    """Write one dump and its line in the manifest beside it.

    A run that is killed leaves no half file under the name.

    Args:
        path: The file, ending in ``.safetensors``; its folder is made.
        tensors: What to write. Statistics are called ``<site>/<statistic>``, and a statistic has the same dtype at
            every site.
        samples: For each site the number of values that its statistics were computed from; of tensors that are no
            statistics ``None``.
        about: What the manifest says besides: ``step``, ``epoch``, ``stage``, ``rank``, ``checkpoint``, ``group``;
            numbers and strings.

    Returns:
        The bytes of the file.

    Raises:
        OSError: If the file cannot be written; what was there before stays.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Of a file that is replaced the line is older, until the new one is there: they know each other by this.
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
    """The kind of each statistic; of one whose shape is another one at each site, as that of channels, ``None``."""
    found: dict[str, dict[str, Any]] = {}
    for name, kind in kinds.items():
        known = found.setdefault(name.rpartition("/")[2], dict(kind))
        if known["shape"] != kind["shape"]:
            known["shape"] = None
    return found


def remove_dump(path: str | Path) -> None:
    """Remove a dump whose checkpoint is gone; one that is not there is no error."""
    Path(path).unlink(missing_ok=True)
