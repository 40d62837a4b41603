"""Named tensors in one safetensors file that is written atomically."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lightning_recorder.errors import DumpError
from lightning_recorder.temporary import write_whole

__all__ = ["can_hold", "file_bytes", "read_metadata", "read_tensors", "write_tensors"]

# The safetensors names of the torch dtypes. complex64 is the only complex dtype, supported since safetensors 0.7.
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
_MOST_HEADER_BYTES = 100_000_000  # the limit of safetensors itself
_ALIGNMENT = 8  # of the first tensor in the file, so that the file can be memory-mapped


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors to a temporary file, flush it to the disk and rename it.

    A run that is killed therefore leaves no incomplete file under the final name. The tensors are written one after
    another: device tensors are copied to the host one at a time, and host tensors are not copied.

    Args:
        path: The file, in an existing folder.
        tensors: The tensors by name, on any device.
        metadata: The metadata of the file. The entry ``format`` identifies the writer.

    Raises:
        OSError: If the file cannot be written. An existing file is left unchanged.

    Note:
        The format is written here because ``safetensors`` can only write tensors after copying them all.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise OSError(
                f"{path} could not be written: safetensors does not support {tensor.dtype}, the dtype of {name!r}"
            )
        if name == _METADATA:
            raise OSError(f"{path} could not be written: safetensors reserves the name {name!r}")
    # Tensors with the largest item size come first, so that each tensor is aligned to its item size.
    ordered = dict(sorted(tensors.items(), key=lambda each: -each[1].dtype.itemsize))

    def write(file: BinaryIO) -> None:
        file.write(_header(ordered, metadata))
        for tensor in ordered.values():
            file.write(_bytes(tensor))
        file.flush()
        os.fsync(file.fileno())

    write_whole(path, write)


def can_hold(dtype: torch.dtype) -> bool:
    """Return True if tensors of that dtype can be written."""
    return dtype in _DTYPES


def file_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, object]) -> int:
    """Return the size of the file in bytes, without any metadata that the writer adds."""
    return len(_header(tensors, metadata)) + sum(each.numel() * each.dtype.itemsize for each in tensors.values())


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, object]) -> bytes:
    """Return the header of the file: the length of a JSON object, followed by the object."""
    about: dict[str, object] = {_METADATA: {key: str(value) for key, value in metadata.items()}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.dtype.itemsize
        about[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(about).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _bytes(tensor: Tensor) -> memoryview:
    """Return the contents of a tensor in row-major order."""
    host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return host.reshape(-1).view(torch.uint8).numpy().data


def read_metadata(path: Path) -> dict[str, str] | None:
    """Return the metadata of a file without reading its tensors, or ``None`` if it is not a safetensors file."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = json.loads(file.read(length)) if length <= _MOST_HEADER_BYTES else {}
        metadata = header[_METADATA]
        return {key: str(value) for key, value in metadata.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, struct.error):
        return None


def read_tensors(path: Path, expected: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read tensors and metadata back. Nothing in the file is executed.

    Args:
        path: The file.
        expected: The expected ``format`` entry of the metadata.

    Raises:
        DumpError: If the file is damaged or has a different format.
        FileNotFoundError: If the file does not exist.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - the file is not a mapping
    except SafetensorError as error:
        raise DumpError(f"{path} is not a readable safetensors file: {error}") from error
    found = metadata.pop("format", None)
    if found != expected:
        what = f"has the format {found!r}" if found else "was not written by lightning_recorder"
        raise DumpError(f"{path} {what}; the supported format is {expected!r}")
    return tensors, metadata
