"""Safe file names and keys for tags and file names, which are untrusted data."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path, PurePosixPath

from lightning_recorder.errors import ArgumentError
from lightning_recorder.temporary import copy_whole

__all__ = ["copy_file", "digest", "path_below", "path_of_tag", "safe_segment", "shortened"]

_LONGEST_NAME = 80  # bytes; file systems allow 255, and a digest, a step and a suffix are appended


def path_below(folder: Path, name: str) -> Path:
    """Return the path of a file with this name in a folder.

    Args:
        folder: The folder.
        name: A relative name with ``/``, as in :meth:`~lightning_recorder.Sink.write_files`.

    Raises:
        ArgumentError: If the name points outside the folder on any operating system.
    """
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or any(char in name for char in "\\:\0"):
        raise ArgumentError(f"a file's name must stay inside the folder, got {name!r}")
    return folder.joinpath(*parts)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file to its target, unless it is already there.

    Raises:
        OSError: If the file does not exist or its copy cannot be written.
    """
    if target.resolve() != Path(source).resolve():
        target.parent.mkdir(parents=True, exist_ok=True)
        copy_whole(source, target)


def path_of_tag(folder: Path, tag: str, step: int, suffix: str) -> Path:
    """Return the path of the file for a tag at a step, and create its folder.

    Each segment of the tag becomes a safe file name, never a path, so the file is always below the folder.
    """
    *outer, last = [safe_segment(segment) for segment in tag.split("/")]
    path = folder.joinpath(*outer, f"{last}-step{step}{suffix}")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def safe_segment(segment: str, unwanted: str = r"[^\w.\-\[\]()]", longest: int = _LONGEST_NAME) -> str:
    """Return a tag segment unchanged if it is safe; otherwise return its safe characters and a digest.

    Different segments have different results, up to collisions of the 48-bit digest.

    Args:
        segment: The part of a tag between two slashes.
        unwanted: A pattern of the characters that are not allowed in the result.
        longest: The number of UTF-8 bytes of the segment to keep.

    Example:
        >>> safe_segment("conv1"), safe_segment("a b"), safe_segment("..")
        ('conv1', 'a_b-c8687a08aa5d', '-5ec1f7e700f3')
    """
    kept = re.sub(unwanted, "_", segment).strip(".")
    encoded = kept.encode(errors="replace")
    if kept == segment and 0 < len(encoded) <= longest:
        return segment
    return f"{encoded[:longest].decode(errors='ignore')}-{digest(segment)}"


def shortened(tag: str, longest: int) -> str:
    """Return a tag unchanged if it is short enough; otherwise join its beginning, a digest and its end.

    The end is kept because it names the module and the statistic.

    Example:
        >>> shortened("activations/" + "a.very." * 10 + "deep/mean", 50)
        'activations/a.very-bd2b5a58ee32-y.a.very.deep/mean'
    """
    if len(tag) <= longest:
        return tag
    middle = f"-{digest(tag)}-"
    head = (longest - len(middle)) // 2
    return tag[:head] + middle + tag[head + len(middle) - longest :]


def digest(text: str) -> str:
    """Return a digest of 12 hexadecimal digits."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
