"""Dumps: safetensors files with named tensors, next to the checkpoints and listed in a manifest."""

from __future__ import annotations

import json
import os
import re
import struct
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO

from lightning_recorder.disk import append
from lightning_recorder.errors import DumpError, describe_missing
from lightning_recorder.temporary import write_whole

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = [
    "Dump",
    "can_hold",
    "file_bytes",
    "read_dump",
    "read_manifest",
    "read_tensors",
    "remove_dump",
    "write_dump",
    "write_tensors",
]

# The safetensors names of the torch dtypes. complex64 is the only complex dtype, supported since safetensors 0.7.
_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}
_METADATA = "__metadata__"
_MOST_HEADER_BYTES = 100_000_000  # the limit in safetensors
_ALIGNMENT = 8  # alignment of the first tensor in the file, so that the file can be memory-mapped


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors to a temporary file, flush the file to the disk and rename it.

    A killed run therefore leaves no incomplete file under the final name. The tensors are written one after another:
    device tensors are copied to the host one at a time, and host tensors are not copied.

    Args:
        path: The file, in an existing folder.
        tensors: The tensors by name, on any device.
        metadata: The metadata of the file. The entry ``format`` identifies the writer.

    Raises:
        OSError: If the file cannot be written. An existing file is left unchanged.

    Note:
        This function writes the format itself, because ``safetensors`` copies all tensors before it writes them.
    """
    for name, tensor in tensors.items():
        if not can_hold(tensor.dtype):
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
    """Return True if tensors of the dtype can be written."""
    return _name_of(dtype) in _DTYPES


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def file_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, object]) -> int:
    """Return the size of the file in bytes, without any metadata that the writer adds."""
    return len(_header(tensors, metadata)) + sum(each.numel() * each.dtype.itemsize for each in tensors.values())


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, object]) -> bytes:
    """Return the header of the file: the length of a JSON object, followed by the object."""
    about: dict[str, object] = {_METADATA: {key: str(value) for key, value in metadata.items()}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.dtype.itemsize
        about[name] = {
            "dtype": _DTYPES[_name_of(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(about).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _bytes(tensor: Tensor) -> memoryview:
    """Return the contents of a tensor in row-major order."""
    import torch

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


MANIFEST = "recorder-manifest.jsonl"

ID = "id"
"""The key of a unique identifier, which is in the dump and in its manifest line."""

_PLACES = (".", "checkpoints", "recorder/dumps", "dumps")
"""The folders that may contain manifests, relative to the ``log_dir`` of a run or to its folder ``recorder``."""

_OF_RANK = re.compile(r"recorder-manifest(-rank\d+)?\.jsonl")


def append_line(directory: Path, line: dict[str, Any], rank: int = 0) -> None:
    """Append a line to the manifest, atomically. Call this after the dump is complete, so that each line has a dump.

    Each rank has its own manifest, because network file systems do not append atomically.
    """
    name = MANIFEST if rank == 0 else f"recorder-manifest-rank{rank}.jsonl"
    append(directory / name, json.dumps(line).encode() + b"\n", is_line=True)


def manifests(directory: Path) -> list[Path]:
    """Return the manifests of a folder in rank order."""
    if not directory.is_dir():
        return []
    return sorted((path for path in directory.iterdir() if _OF_RANK.fullmatch(path.name)), key=_rank)


def _rank(path: Path) -> int:
    return int("0" + re.sub(r"\D", "", path.name))


def read_manifest(path: str | Path) -> list[dict[str, Any]]:
    """Return the dumps that are listed in a folder and still exist, by rank and then in the order of the first write.

    A dump that was overwritten, such as the dump next to ``last.ckpt``, appears once, with its newest line. A dump that
    was removed together with its checkpoint is omitted. A dump is also omitted if the run was killed before the line of
    the dump was written. An incomplete last line, which a killed run may leave, is ignored.

    Args:
        path: The ``log_dir`` of a run, for the dumps next to its checkpoints and in ``recorder/dumps``; or one of these
            folders, the folder ``recorder``, or a manifest file.

    Returns:
        One dictionary per dump with ``file``, the path relative to the given folder (or to the folder of the given
        manifest), ``kind``, ``bytes``, ``step``, ``epoch``, ``stage``, ``rank``, ``checkpoint`` if the dump is next to
        a checkpoint, and ``group``. A dump of the kind ``"statistics"`` has ``statistics``, which maps each statistic
        to its ``dtype`` and ``shape`` (``None`` if the shape differs between sites), and ``sites``, which maps each
        site to the number of values that its statistics cover. A dump of the kind ``"tensors"`` has ``tensors``, which
        maps each tensor to its ``dtype`` and ``shape``.

    Raises:
        FileNotFoundError: If the folder or file does not exist, or if manifests exist only in folders further below.
            The message names one of those folders.
    """
    path = Path(path)
    if path.is_file():
        return dumps_in(path.parent, [path])
    if not path.is_dir():
        raise FileNotFoundError(f"no manifest can be read from {str(path)!r}: {describe_missing(path)}")
    found = []
    for place in _PLACES:
        for line in dumps_in(path / place):
            line["file"] = (PurePosixPath(place) / line["file"]).as_posix()
            found.append(line)
    if not found and not any(manifests(path / place) for place in _PLACES):
        below = (each.parent for depth in ("*/", "*/*/", "*/*/*/") for each in path.glob(f"{depth}{MANIFEST}"))
        run = next(below, None)
        if run is not None:
            raise FileNotFoundError(
                f"there is no {MANIFEST} in {str(path)!r}, but there is one in {str(run)!r}: "
                f"read_manifest({str(run)!r}) reads it"
            )
    return found


def dumps_in(directory: Path, files: Sequence[Path] | None = None) -> list[dict[str, Any]]:
    """Return the dumps that are listed in one folder and still exist."""
    lines: dict[str, dict[str, Any]] = {}
    for path in manifests(directory) if files is None else files:
        for line in _lines(path):
            name = line.get("file")
            # A name from a file is untrusted and must not lead to another folder.
            if isinstance(name, str) and _is_plain(name):
                lines[name] = line
    return [line for name, line in lines.items() if _is_of(directory / name, line.pop(ID, None))]


def _is_of(path: Path, known_as: object) -> bool:
    """Return True if the file exists and is the dump of this manifest line, not a later file of the same name."""
    if known_as is None:
        return path.is_file()
    return path.is_file() and (read_metadata(path) or {}).get(ID) == known_as


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a manifest."""
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict):
            yield line


def _is_plain(name: str) -> bool:
    """Return True if the name is a plain file name, without a folder."""
    return "\0" not in name and Path(name).name == name


_FORMAT = "lightning_recorder.dump/1"


def write_dump(
    path: str | Path, tensors: Mapping[str, Tensor], samples: Mapping[str, int] | None = None, **about: Any
) -> int:
    """Write one dump and append its line to the manifest in the same folder.

    A killed run leaves no incomplete file under the final name.

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
    # When a file is replaced, its old line remains until the new line is written. The ID tells which line is valid.
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
        FileNotFoundError: If the file does not exist. The message names the first missing folder or file.
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
    return {"dtype": _name_of(tensor.dtype), "shape": list(tensor.shape)}


def _by_statistic(kinds: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the dtype and shape of each statistic. The shape is ``None`` if it differs between sites."""
    found: dict[str, dict[str, Any]] = {}
    for name, kind in kinds.items():
        known = found.setdefault(name.rpartition("/")[2], dict(kind))
        if known["shape"] != kind["shape"]:
            known["shape"] = None
    return found
