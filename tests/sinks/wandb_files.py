"""What lies in the folder of an offline run of Weights & Biases."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

__all__ = ["read_history", "read_records", "saved_files"]

# The format is that of LevelDB's log: blocks, in which a record is whole or in parts, each part with a checksum, its
# length and what part it is; before the first block seven bytes say what the file is.
_HEADER_BYTES = 7
_BLOCK_BYTES = 32768
_PART = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def _parts(data: bytes) -> Iterator[tuple[int, bytes]]:
    place = _HEADER_BYTES
    while place + _PART.size <= len(data):
        left = _BLOCK_BYTES - place % _BLOCK_BYTES
        if left < _PART.size:
            place += left
            continue
        _, length, kind = _PART.unpack_from(data, place)
        if place + _PART.size + length > len(data):
            return  # more is to come
        yield kind, data[place + _PART.size : place + _PART.size + length]
        place += _PART.size + length


def read_records(folder: Path) -> list[Any]:
    """The records of the only run below a folder, which has been finished, as they were written."""
    (path,) = folder.rglob("run-*.wandb")
    # wandb's process may answer that the run is finished before it has written the last of its file.
    for _ in range(200):
        records = _records(path)
        if records and records[-1].WhichOneof("record_type") == "exit":
            return records
        time.sleep(0.05)
    raise AssertionError(f"{path} has no end")


def _records(path: Path) -> list[Any]:
    data = path.read_bytes()
    messages: Any = wandb_internal_pb2  # made by protoc, without types
    records, begun = [], b""
    for kind, part in _parts(data):
        begun = part if kind in (_FULL, _FIRST) else begun + part
        if kind in (_FULL, _LAST):
            records.append(messages.Record.FromString(begun))
    return records


def _value(item: Any) -> Any:
    """A value of a row, which is JSON or, of a number, one of the typed fields."""
    if item.value_json:
        return json.loads(item.value_json)
    fields = {field.name: value for field, value in item.ListFields() if field.name not in ("key", "nested_key")}
    ((kind, value),) = fields.items()
    return json.loads(value) if kind == "json" else value


def read_history(folder: Path) -> list[dict[str, Any]]:
    """The rows of the history by key, without those of wandb itself."""
    rows = [record.history for record in read_records(folder) if record.WhichOneof("record_type") == "history"]
    read = []
    for row in rows:
        values: dict[str, Any] = {}
        for item in row.item:
            *outer, last = item.nested_key or [item.key]
            inside = values
            for key in outer:
                inside = inside.setdefault(key, {})
            inside[last] = _value(item)
        read.append({key: value for key, value in values.items() if not key.startswith("_")})
    return read


def saved_files(folder: Path) -> dict[str, bytes]:
    """The files that the run asks to be uploaded, by their path among its files."""
    names: dict[str, None] = {}
    for record in read_records(folder):
        if record.WhichOneof("record_type") == "files":
            names.update(dict.fromkeys(file.path for file in record.files.files))
    (files,) = folder.rglob("run-*.wandb")
    there = {name: files.parent / "files" / name for name in names}
    return {name: path.read_bytes() for name, path in there.items() if path.is_file()}
