"""The list of the dumps in a folder, one line per dump."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

__all__ = ["MANIFEST", "append_line", "read_manifest"]

MANIFEST = "recorder-manifest.jsonl"


def append_line(directory: Path, line: dict[str, Any]) -> None:
    """Add a line, in one piece; to be called when the dump is in place, so that no line speaks of one that is not."""
    with (directory / MANIFEST).open("a+b") as file:
        # A run that was killed may have left half a line, which is not to take this one with it.
        torn = file.seek(0, os.SEEK_END) > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
        file.write(b"\n" * torn + json.dumps(line).encode() + b"\n")


def read_manifest(directory: str | Path) -> list[dict[str, Any]]:
    """The dumps of a folder that are still there, in the order in which they were first written.

    A dump that was written again, as beside ``last.ckpt``, appears once, with its newest line; one that was pruned with
    its checkpoint not at all; a torn last line, as a killed run leaves it, is passed over.

    Args:
        directory: The folder of the checkpoints.

    Returns:
        For each dump ``file``, ``step``, ``epoch``, ``stage``, ``rank``, ``checkpoint``, ``group``; ``statistics``,
        which maps each statistic to its ``dtype`` and ``shape``; and ``sites``, which maps each site to the number of
        values that it stands for.
    """
    directory = Path(directory)
    if not (directory / MANIFEST).exists():
        return []
    lines: dict[str, dict[str, Any]] = {}
    for text in (directory / MANIFEST).read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
            name = line["file"]
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
        # A name from a file is data: it may not lead to another folder.
        if isinstance(name, str) and Path(name).name == name and (directory / name).is_file():
            lines[name] = line
    return list(lines.values())
