"""The manifest of a folder, which lists its dumps with one line per dump."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from lightning_recorder.disk import append
from lightning_recorder.dumps.tensor_file import read_metadata
from lightning_recorder.errors import describe_missing

__all__ = ["ID", "MANIFEST", "append_line", "dumps_in", "manifests", "read_manifest"]

MANIFEST = "recorder-manifest.jsonl"

ID = "id"
"""The key of the unique identifier that a dump shares with its manifest line."""

_PLACES = (".", "checkpoints", "recorder/dumps", "dumps")
"""The folders that may contain manifests, relative to the ``log_dir`` of a run or to its folder ``recorder``."""

_OF_RANK = re.compile(r"recorder-manifest(-rank\d+)?\.jsonl")


def append_line(directory: Path, line: dict[str, Any], rank: int = 0) -> None:
    """Append a line atomically. Call this after the dump is complete, so that no line refers to a missing dump.

    Each rank has its own manifest, because file systems that are shared between machines do not append atomically.
    """
    name = MANIFEST if rank == 0 else f"recorder-manifest-rank{rank}.jsonl"
    append(directory / name, json.dumps(line).encode() + b"\n", is_line=True)


def manifests(directory: Path) -> list[Path]:
    """Return the manifests of a folder, starting with that of the first rank."""
    if not directory.is_dir():
        return []
    return sorted((path for path in directory.iterdir() if _OF_RANK.fullmatch(path.name)), key=_rank)


def _rank(path: Path) -> int:
    return int("0" + re.sub(r"\D", "", path.name))


def read_manifest(path: str | Path) -> list[dict[str, Any]]:
    """Return the dumps that are listed in a folder and still exist, by rank and then in the order of the first write.

    A dump that was overwritten, such as one next to ``last.ckpt``, appears once, with its newest line. A dump that was
    removed together with its checkpoint is omitted. An incomplete last line, which a killed run can leave, is ignored,
    and so is a dump if the run was killed before its line was written.

    Args:
        path: The ``log_dir`` of a run, for the dumps next to its checkpoints and those in ``recorder/dumps``; one of
            these folders; the folder ``recorder``; or a manifest file.

    Returns:
        One dictionary per dump with ``file``, the path relative to the given folder (or to the folder of the given
        manifest), ``kind``, ``bytes``, ``step``, ``epoch``, ``stage``, ``rank``, ``checkpoint`` if the dump is next to
        one, and ``group``. A dump of the kind ``"statistics"`` has ``statistics``, which maps each statistic to its
        ``dtype`` and ``shape`` (``None`` if the shape differs between sites), and ``sites``, which maps each site to
        the number of values that its statistics cover. A dump of the kind ``"tensors"`` has ``tensors``, which maps
        each tensor to its ``dtype`` and ``shape``.

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
        below = [
            each.relative_to(path) for depth in ("*/", "*/*/", "*/*/*/") for each in path.glob(f"{depth}{MANIFEST}")
        ]
        if below:
            run = path / next(iter(below)).parent
            raise FileNotFoundError(
                f"there is no {MANIFEST} in {str(path)!r}, but there is one in {str(run)!r}: "
                f"read_manifest({str(run)!r}) reads it"
            )
    return found


def dumps_in(directory: Path, files: Sequence[Path] | None = None) -> list[dict[str, Any]]:
    """Return the dumps that are listed in one folder and still exist.

    Args:
        directory: The folder.
        files: The manifests of the folder to read; all by default.
    """
    lines: dict[str, dict[str, Any]] = {}
    for path in manifests(directory) if files is None else files:
        for line in _lines(path):
            name = line.get("file")
            # A name from a file is untrusted: it must not lead to another folder.
            if isinstance(name, str) and _is_plain(name):
                lines[name] = line
    return [line for name, line in lines.items() if _is_of(directory / name, line.pop(ID, None))]


def _is_of(path: Path, known_as: object) -> bool:
    """Return True if the file exists and is the one that its line describes, not a later file of the same name."""
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
    """Return True if this is the name of a file in the same folder."""
    return "\0" not in name and Path(name).name == name
