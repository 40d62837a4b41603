"""A sink that writes plain files to a folder, and functions for safe file names and keys."""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
import threading
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakValueDictionary

import numpy as np
from typing_extensions import override

from lightning_recorder.disk import append, attempt
from lightning_recorder.errors import ArgumentError
from lightning_recorder.records.histogram import Histogram
from lightning_recorder.sinks.base import Image, Sink
from lightning_recorder.temporary import copy_whole, write_whole

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

    from lightning_recorder.graph.model import Graph

__all__ = [
    "FilesSink",
    "SharedFiles",
    "copy_file",
    "digest",
    "histogram_to_json",
    "path_below",
    "path_of_tag",
    "safe_segment",
    "shortened",
    "to_pillow",
    "to_png",
]

# The compression level. The default level of 6 takes twice as long and makes the files smaller by a quarter.
_PNG_LEVEL = 3

_LONGEST_NAME = 80  # bytes; file systems allow 255, and a digest, a step and a suffix are appended


def path_below(folder: Path, name: str) -> Path:
    """Return the path of a file in a folder. ``name`` is relative and uses ``/``, as in :meth:`~.Sink.write_files`.

    Raises:
        ArgumentError: If the name points outside the folder on any operating system.
    """
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or any(char in name for char in "\\:\0"):
        raise ArgumentError(f"a file's name must stay inside the folder, got {name!r}")
    return folder.joinpath(*parts)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file to a target, unless source and target are the same file.

    Raises:
        OSError: If the file does not exist or its copy cannot be written.
    """
    if target.resolve() != Path(source).resolve():
        target.parent.mkdir(parents=True, exist_ok=True)
        copy_whole(source, target)


def path_of_tag(folder: Path, tag: str, step: int, suffix: str) -> Path:
    """Return the path of the file for a tag at a step, and create its folder.

    Each segment of the tag becomes a safe file name, never a path. So the file is always inside the folder.
    """
    *outer, last = [safe_segment(segment) for segment in tag.split("/")]
    path = folder.joinpath(*outer, f"{last}-step{step}{suffix}")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def safe_segment(segment: str, unwanted: str = r"[^\w.\-\[\]()]", longest: int = _LONGEST_NAME) -> str:
    """Return a tag segment unchanged if it is a safe file name. Otherwise return its safe characters and a digest.

    Different segments have different results, unless their 48-bit digests collide.

    Args:
        segment: The part of a tag between two slashes.
        unwanted: A pattern for the characters that are not allowed in the result.
        longest: The maximum number of UTF-8 bytes of the segment to keep.

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
    """Return a tag unchanged if it is short enough. Otherwise join its beginning, a digest and its end.

    The end is kept because it has the names of the module and the statistic.

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
    """Return a digest of a text as 12 hexadecimal digits."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


File = TypeVar("File")


class SharedFiles(Generic[File]):
    """A mapping from paths to file objects. While the object for a path is referenced, each lookup returns it."""

    def __init__(self, make: Callable[[Path], File]) -> None:
        self._make = make
        self._files: WeakValueDictionary[Path, File] = WeakValueDictionary()
        self._lock = threading.Lock()

    def __getitem__(self, path: str | Path) -> File:
        path = Path(path).absolute()
        with self._lock:
            file = self._files.get(path)
            if file is None:
                file = self._files[path] = self._make(path)
            return file


class FilesSink(Sink):
    """Write every kind of result to one folder.

    Each call appends one line to ``scalars.jsonl`` or ``histograms.jsonl``. Each line is a JSON object, so a killed run
    leaves at most one incomplete line, at the end. For each tag and step, ``images/`` has a PNG file, ``texts/`` a
    Markdown file and ``graphs/`` a JSON file. Files are copied to their target names. NaN and infinities are written as
    the strings ``"nan"``, ``"inf"`` and ``"-inf"``, because JSON has no such numbers.

    If the disk is full, results are skipped with one warning.

    Args:
        directory: The folder, created by the first result. A second run with the same folder appends.

    Raises:
        ArgumentError: From ``write_files``, if a name points outside the folder.
        OSError: From any verb, if the folder cannot be written.
    """

    any_thread = True

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.written_bytes: int = 0

    @override
    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> bool:
        self._append("scalars.jsonl", {"step": step, "scalars": {tag: _plain(value) for tag, value in scalars.items()}})
        return True

    @override
    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> bool:
        self._append(
            "histograms.jsonl",
            {"step": step, "histograms": {tag: histogram_to_json(each) for tag, each in histograms.items()}},
        )
        return True

    @override
    def write_images(self, step: int, images: Mapping[str, Image]) -> bool:
        for tag, pixels in images.items():
            self._write("images", tag, step, ".png", to_png(pixels))
        return True

    @override
    def write_text(self, step: int, texts: Mapping[str, str]) -> bool:
        for tag, text in texts.items():
            self._write("texts", tag, step, ".md", text.encode("utf-8"))
        return True

    @override
    def write_files(self, step: int, files: Mapping[str, Path]) -> bool:
        for name, source in files.items():
            target = path_below(self.directory, name)
            attempt(target, source.stat().st_size, partial(copy_file, source, target))
        return True

    @override
    def write_graph(self, step: int, graphs: Mapping[str, Graph]) -> bool:
        for tag, graph in graphs.items():
            self._write("graphs", tag, step, ".json", json.dumps(graph.to_json()).encode("utf-8"))
        return True

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        path = self.directory / name
        if attempt(path, len(line), partial(append, path, line, is_line=True)):
            self.written_bytes += len(line)

    def _write(self, folder: str, tag: str, step: int, suffix: str, data: bytes) -> None:
        def put() -> None:
            path = path_of_tag(self.directory / folder, tag, step, suffix)
            write_whole(path, lambda file: file.write(data))
            self.written_bytes += len(data)

        attempt(self.directory, len(data), put)


def _plain(value: float) -> float | str:
    return float(value) if math.isfinite(value) else repr(float(value))


def to_pillow(pixels: Image) -> Picture:
    """Return the pixels as a Pillow image."""
    from PIL import Image as Pictures

    return Pictures.fromarray(pixels)


def to_png(pixels: Image) -> bytes:
    """Return the pixels as the content of a PNG file.

    Pillow is not used: it tries five filters on each row, which takes longer than the compression and makes plots
    smaller by only 3 %. Pillow also holds the GIL, which zlib releases.
    """
    height, width, _ = pixels.shape
    rows = np.zeros((height, 1 + 3 * width), dtype=np.uint8)  # the first byte of each row is its filter: none
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, RGB
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.data, _PNG_LEVEL)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    )


def histogram_to_json(histogram: Histogram) -> dict[str, Any]:
    """Return a histogram as JSON-compatible data. NaN and infinities become strings."""
    return {
        "edges": histogram.edges.tolist(),
        "counts": histogram.counts.tolist(),
        **{name: _plain(getattr(histogram, name)) for name in ("min", "max", "sum", "sum_squares", "fraction")},
    }
