"""Tags and names, which are data, as the file names and keys that a back end takes."""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path, PurePosixPath

from lightning_recorder.errors import ArgumentError

__all__ = ["digest", "file_of_tag", "harmless", "keep_file", "path_below", "shortened"]

_LONGEST_NAME = 80  # bytes; file systems allow 255, and a digest, a step and a suffix are added


def path_below(folder: Path, name: str) -> Path:
    """Where a file of that name lies in a folder.

    Args:
        folder: The folder.
        name: Relative and with ``/``, as :meth:`~lightning_recorder.Sink.write_files` takes it.

    Raises:
        ArgumentError: If the name leads out of the folder, on whichever operating system.
    """
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or any(char in name for char in "\\:\0"):
        raise ArgumentError(f"a file's name must stay inside the folder, got {name!r}")
    return folder.joinpath(*parts)


def keep_file(source: Path, target: Path) -> None:
    """Copy a file to its place, unless that is where it lies.

    Raises:
        OSError: If the file is not there, or its copy cannot be written.
    """
    if target.resolve() != Path(source).resolve():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def file_of_tag(folder: Path, tag: str, step: int, suffix: str) -> Path:
    """The file of a tag at a step; its folder is made.

    Each segment of the tag becomes a harmless file name and never a path, so that the file lies below the folder.
    """
    *outer, last = [harmless(segment) for segment in tag.split("/")]
    path = folder.joinpath(*outer, f"{last}-step{step}{suffix}")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def harmless(segment: str, unwanted: str = r"[^\w.\-\[\]()]", longest: int = _LONGEST_NAME) -> str:
    """A part of a tag itself where it is harmless, else what is harmless of it and a digest.

    Two that differ stay different, up to a collision of 48 bits.

    Args:
        segment: What stands between two slashes.
        unwanted: A pattern of the characters that may not be in the result.
        longest: Bytes of the segment, in UTF-8, that are kept.

    Example:
        >>> harmless("conv1"), harmless("a b"), harmless("..")
        ('conv1', 'a_b-c8687a08aa5d', '-5ec1f7e700f3')
    """
    kept = re.sub(unwanted, "_", segment).strip(".")
    encoded = kept.encode(errors="replace")
    if kept == segment and 0 < len(encoded) <= longest:
        return segment
    return f"{encoded[:longest].decode(errors='ignore')}-{digest(segment)}"


def shortened(tag: str, longest: int) -> str:
    """A tag itself where it is short enough, else its beginning, a digest and its end, which says what it is of.

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
    """Twelve digits by which two texts are told apart."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
