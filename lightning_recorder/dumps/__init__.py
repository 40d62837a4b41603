"""Dumps: tensors in files next to the checkpoints, keyed by name and safe to load."""

from lightning_recorder.dumps.dump import Dump, read_dump, remove_dump, write_dump
from lightning_recorder.dumps.manifest import read_manifest
from lightning_recorder.dumps.tensor_file import can_hold, file_bytes, read_tensors, write_tensors

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
