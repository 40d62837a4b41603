"""Writing tensors by name, so that a reader finds either a whole file or none."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_recorder.dumps.manifest import append_line

__all__ = ["remove_dump", "write_dump"]

FORMAT = "lightning_recorder.dump/1"


def write_dump(path: str | Path, tensors: Mapping[str, Tensor], samples: Mapping[str, int], **about: Any) -> None:
    """Write one dump and its line in the manifest beside it.

    The file is written under a temporary name, brought to the disk and renamed, so a run that is killed leaves no half
    file under the name.

    Args:
        path: The file, ending in ``.safetensors``; its folder is made.
        tensors: What to write, as ``<site>/<statistic>``; a statistic has the same shape and dtype at every site.
        samples: For each site the number of values that its statistics were computed from.
        about: What the manifest says besides: ``step``, ``epoch``, ``stage``, ``rank``, ``checkpoint``, ``group``;
            numbers and strings.

    Raises:
        OSError: If the file cannot be written; what was there before stays.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    # safetensors makes its files readable by their owner alone; a dump is as readable as the checkpoint beside it.
    mode = 0o666 & ~_umask()
    # Cloned, since safetensors refuses tensors that share memory.
    host = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    try:
        save_file(
            host, str(temporary), metadata={"format": FORMAT, **{key: str(value) for key, value in about.items()}}
        )
        temporary.chmod(mode)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    append_line(path.parent, {"file": path.name, **about, "statistics": dict(_kinds(host)), "sites": samples})


def _kinds(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What each statistic looks like; it is the same for every site."""
    for name, tensor in tensors.items():
        yield name.rpartition("/")[2], {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def remove_dump(path: str | Path) -> None:
    """Remove a dump whose checkpoint is gone; one that is not there is no error."""
    Path(path).unlink(missing_ok=True)
