"""Writing a dump and its line in the manifest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_recorder.dumps.manifest import append_line
from lightning_recorder.dumps.tensors import write_tensors

__all__ = ["remove_dump", "write_dump"]

FORMAT = "lightning_recorder.dump/1"


def write_dump(path: str | Path, tensors: Mapping[str, Tensor], samples: Mapping[str, int], **about: Any) -> None:
    """Write one dump and its line in the manifest beside it.

    A run that is killed leaves no half file under the name.

    Args:
        path: The file, ending in ``.safetensors``; its folder is made.
        tensors: What to write, as ``<site>/<statistic>``; a statistic has the same shape and dtype at every site.
        samples: For each site the number of values that its statistics were computed from.
        about: What the manifest says besides: ``step``, ``epoch``, ``stage``, ``rank``, ``checkpoint``, ``group``;
            numbers and strings.

    Raises:
        OSError: If the file cannot be written; what was there before stays.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(path, tensors, {"format": FORMAT, **{key: str(value) for key, value in about.items()}})
    append_line(path.parent, {"file": path.name, **about, "statistics": dict(_kinds(tensors)), "sites": samples})


def _kinds(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What each statistic looks like; it is the same for every site."""
    for name, tensor in tensors.items():
        yield name.rpartition("/")[2], {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def remove_dump(path: str | Path) -> None:
    """Remove a dump whose checkpoint is gone; one that is not there is no error."""
    Path(path).unlink(missing_ok=True)
