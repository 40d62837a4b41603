"""Safetensors file of a recording by name, beside the folder of its numbered files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_recorder.dumps import read_tensors, write_tensors
from lightning_recorder.errors import ArgumentError, DumpError
from lightning_recorder.records.tags import make_tag

__all__ = ["load_recording", "save_recording"]

FORMAT = "lightning_recorder.recording/1"


def save_recording(folder: Path, state: Mapping[str, Any], kind: str) -> None:
    """Write the result of ``Recorder.state_dict`` beside a folder, with its name and the suffix ``.safetensors``.

    Raises:
        OSError: If the file cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    layout: dict[str, Any] = {}
    for name, paths in state.items():
        layout[name] = {}
        for path, recorded in paths.items():
            keys = {}
            for part, tensor in recorded["state"].items():
                keys[part] = _unique(make_tag("", name, path, part), tensors)
                tensors[keys[part]] = tensor
            layout[name][path] = {**recorded, "state": keys}
    write_tensors(_file(folder), tensors, {"format": FORMAT, "kind": kind, "layout": json.dumps(layout)})


def load_recording(folder: Path, kind: str) -> dict[str, Any]:
    """Return the state that was saved beside a folder.

    Raises:
        ArgumentError: If the file was saved by another kind of recorder.
        DumpError: If the file is damaged or was not written by this package.
        FileNotFoundError: If there is no such file.
    """
    tensors, metadata = read_tensors(_file(folder), FORMAT)
    if metadata.get("kind") != kind:
        raise ArgumentError(f"{_file(folder)} was saved by a {metadata.get('kind')}, and cannot be loaded by a {kind}")
    try:
        state: dict[str, Any] = json.loads(metadata["layout"])
        for paths in state.values():
            for recorded in paths.values():
                recorded["state"] = {part: tensors[key] for part, key in recorded["state"].items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise DumpError(f"{_file(folder)} has metadata that do not match its tensors: {error!r}") from error
    return state


def _file(folder: Path) -> Path:
    folder = folder.resolve()
    return folder.with_name(f"{folder.name}.safetensors")


def _unique(key: str, taken: Mapping[str, Tensor]) -> str:
    """Return the key, with a suffix if a name with a slash or a path that looks like a part already produced it."""
    while key in taken:
        key += "~"
    return key
