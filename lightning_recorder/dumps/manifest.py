"""The list of the dumps in a folder, one line per dump."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_recorder.dumps.tensors import read_metadata

__all__ = ["ID", "MANIFEST", "append_line", "manifests", "read_manifest"]

MANIFEST = "recorder-manifest.jsonl"

ID = "id"
"""What a dump and its line have in common, and no other one."""

_LOCK = threading.Lock()
_OF_RANK = re.compile(r"recorder-manifest(-rank\d+)?\.jsonl")


def append_line(directory: Path, line: dict[str, Any], rank: int = 0) -> None:
    """Add a line, in one piece; to be called when the dump is in place, so that no line speaks of one that is not.

    Each rank has a manifest of its own, as file systems that are shared by machines do not append in one piece.
    """
    name = MANIFEST if rank == 0 else f"recorder-manifest-rank{rank}.jsonl"
    # Recorders write in threads of their own, and a buffer would write a long line in parts.
    with _LOCK, (directory / name).open("a+b", buffering=0) as file:
        # A run that was killed may have left half a line, which is not to take this one with it.
        torn = file.seek(0, os.SEEK_END) > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
        file.write(b"\n" * torn + json.dumps(line).encode() + b"\n")


def manifests(directory: Path) -> list[Path]:
    """The manifests of a folder, that of the first rank first."""
    if not directory.is_dir():
        return []
    return sorted((path for path in directory.iterdir() if _OF_RANK.fullmatch(path.name)), key=_rank)


def _rank(path: Path) -> int:
    return int("0" + re.sub(r"\D", "", path.name))


def read_manifest(directory: str | Path) -> list[dict[str, Any]]:
    """The dumps of a folder that are still there, in the order in which they were first written, by each rank.

    A dump that was written again, as beside ``last.ckpt``, appears once, with its newest line; one that was pruned with
    its checkpoint not at all; a torn last line, as a killed run leaves it, is passed over, and so is a dump that a run
    was killed behind before it could write the line.

    Args:
        directory: The folder of the checkpoints, or ``recorder/dumps`` of a run.

    Returns:
        For each dump ``file``, ``kind``, ``bytes``, ``step``, ``epoch``, ``stage``, ``rank``, ``checkpoint`` where it
        lies beside one, and ``group``. One of the kind ``"statistics"`` has ``statistics``, which maps each statistic
        to its ``dtype`` and ``shape`` (``None`` if that differs from site to site), and ``sites``, which maps each site
        to the number of values that it stands for; one of the kind ``"tensors"`` has ``tensors``, which maps each
        tensor to its ``dtype`` and ``shape``.
    """
    directory = Path(directory)
    lines: dict[str, dict[str, Any]] = {}
    for path in manifests(directory):
        for line in _lines(path):
            name = line.get("file")
            # A name from a file is data: it may not lead to another folder.
            if isinstance(name, str) and _is_plain(name):
                lines[name] = line
    return [line for name, line in lines.items() if _is_of(directory / name, line.pop(ID, None))]


def _is_of(path: Path, known_as: object) -> bool:
    """Whether a file is there and is the one that its line speaks of, and not one that has come after it."""
    if known_as is None:
        return path.is_file()
    return path.is_file() and (read_metadata(path) or {}).get(ID) == known_as


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a manifest."""
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict):
            yield line


def _is_plain(name: str) -> bool:
    """Whether it is the name of a file in the same folder."""
    return "\0" not in name and Path(name).name == name
