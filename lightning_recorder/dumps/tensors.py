"""Tensors by name in one safetensors file, which is there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from lightning_recorder.errors import DumpError

__all__ = ["read_tensors", "write_tensors"]


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors under a temporary name, bring the file to the disk and rename it.

    So a run that is killed leaves no half file under the name.

    Args:
        path: The file, in a folder that is there.
        tensors: On any device.
        metadata: What is kept beside them; ``format`` says what wrote it.

    Raises:
        OSError: If the file cannot be written; what was there before stays.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    # Cloned, since safetensors refuses tensors that share memory.
    host = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    # safetensors makes its files readable by their owner alone; a dump is as readable as the checkpoint beside it.
    mode = 0o666 & ~_umask()
    try:
        save_file(host, str(temporary), metadata=dict(metadata))
        temporary.chmod(mode)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except (SafetensorError, KeyError) as error:  # a KeyError for a dtype that the format does not have, as complex128
        raise OSError(f"{path} could not be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def read_tensors(path: Path, expected: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read tensors and metadata back; nothing in the file is executed.

    Args:
        path: The file.
        expected: What its ``format`` must be.

    Raises:
        DumpError: If the file is damaged or has another format.
        FileNotFoundError: If there is no such file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - the file object is no mapping
    except SafetensorError as error:
        raise DumpError(f"{path} is no readable safetensors file: {error}") from error
    found = metadata.pop("format", None)
    if found != expected:
        what = f"has the format {found!r}" if found else "was not written by lightning_recorder"
        raise DumpError(f"{path} {what}; what is read here has the format {expected!r}")
    return tensors, metadata


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
