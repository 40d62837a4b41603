"""Tensors by name in one safetensors file, which is there whole or not at all."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lightning_recorder.errors import DumpError

__all__ = ["can_hold", "file_bytes", "read_metadata", "read_tensors", "temporary_name", "write_tensors"]

# What safetensors calls the types of torch; of complex ones it has this one, from release 0.7 on.
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
_METADATA = "__metadata__"
_MOST_HEADER_BYTES = 100_000_000  # as safetensors itself has it
_ALIGNMENT = 8  # of the first tensor in the file, so that it can be mapped into memory


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors under a temporary name, bring the file to the disk and rename it.

    So a run that is killed leaves no half file under the name. The tensors are written one after another: of those that
    are on a device one at a time is brought to the host, and none is copied that lies there.

    Args:
        path: The file, in a folder that is there.
        tensors: On any device.
        metadata: What is kept beside them; ``format`` says what wrote it.

    Raises:
        OSError: If the file cannot be written; what was there before stays.

    Note:
        ``safetensors`` can only write what it has copied as a whole, hence its format is written here.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise OSError(f"{path} could not be written: safetensors has no {tensor.dtype}, which {name!r} is of")
        if name == _METADATA:
            raise OSError(f"{path} could not be written: safetensors keeps the name {name!r} for itself")
    # Those with the largest numbers first, so that each begins at a multiple of the size of its numbers.
    ordered = dict(sorted(tensors.items(), key=lambda each: -each[1].dtype.itemsize))

    def write(file: BinaryIO) -> None:
        file.write(_header(ordered, metadata))
        for tensor in ordered.values():
            file.write(_bytes(tensor))

    _write_whole(path, write)


def can_hold(dtype: torch.dtype) -> bool:
    """Whether tensors of that type can be written."""
    return dtype in _DTYPES


def temporary_name(name: str) -> str:
    """What a file is called while it is written; the same each time, so that what a killed run left is replaced."""
    return f".{name}.tmp"


def file_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, object]) -> int:
    """How many bytes a file will have, but for what whoever writes it puts beside the metadata."""
    return len(_header(tensors, metadata)) + sum(each.numel() * each.dtype.itemsize for each in tensors.values())


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, object]) -> bytes:
    """What the file begins with: the length of a JSON object, and the object."""
    about: dict[str, object] = {_METADATA: {key: str(value) for key, value in metadata.items()}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.dtype.itemsize
        about[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(about).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _bytes(tensor: Tensor) -> memoryview:
    """What a tensor holds, row by row."""
    host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return host.reshape(-1).view(torch.uint8).numpy().data


def _write_whole(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Write a file that is there whole or not at all."""
    temporary = path.with_name(temporary_name(path.name))
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_metadata(path: Path) -> dict[str, str] | None:
    """What is kept beside the tensors of a file, which are not read; ``None`` where it is no such file."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = json.loads(file.read(length)) if length <= _MOST_HEADER_BYTES else {}
        metadata = header[_METADATA]
        return {key: str(value) for key, value in metadata.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, struct.error):
        return None


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
