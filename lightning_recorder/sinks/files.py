"""A sink that writes plain files into a folder."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_recorder.reductions.binned import Histogram
from lightning_recorder.sinks.base import Image, Sink
from lightning_recorder.sinks.naming import file_of_tag, keep_file, path_below

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

    from lightning_recorder.graph.model import Graph

__all__ = ["FilesSink", "histogram_as_json", "picture_of"]


class FilesSink(Sink):
    """Writes every kind of result into one folder.

    ``scalars.jsonl`` and ``histograms.jsonl`` get a line per step and tag group; a line is one JSON object, so a run
    that was killed leaves at worst a torn last line. ``images/`` gets a PNG per tag and step, ``texts/`` a Markdown
    file, ``graphs/`` a JSON file; files are copied to the name that they are given. Numbers that JSON lacks are the
    strings ``"nan"``, ``"inf"`` and ``"-inf"``.

    Args:
        directory: The folder; made when the first result is written. A second run into the same folder appends.

    Raises:
        ArgumentError: From ``write_files``, if a name leads out of the folder.
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
            {"step": step, "histograms": {tag: histogram_as_json(each) for tag, each in histograms.items()}},
        )
        return True

    @override
    def write_images(self, step: int, images: Mapping[str, Image]) -> bool:
        for tag, pixels in images.items():
            path = self._place("images", tag, step, ".png")
            picture_of(pixels).save(path)
            self.written_bytes += path.stat().st_size
        return True

    @override
    def write_text(self, step: int, texts: Mapping[str, str]) -> bool:
        for tag, text in texts.items():
            self._place("texts", tag, step, ".md").write_text(text, encoding="utf-8")
        return True

    @override
    def write_files(self, step: int, files: Mapping[str, Path]) -> bool:
        for name, source in files.items():
            keep_file(source, path_below(self.directory, name))
        return True

    @override
    def write_graph(self, step: int, graphs: Mapping[str, Graph]) -> bool:
        for tag, graph in graphs.items():
            self._place("graphs", tag, step, ".json").write_text(json.dumps(graph.to_json()), encoding="utf-8")
        return True

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        with (self.directory / name).open("ab") as file:
            file.write(line)
        self.written_bytes += len(line)

    def _place(self, folder: str, tag: str, step: int, suffix: str) -> Path:
        return file_of_tag(self.directory / folder, tag, step, suffix)


def _plain(value: float) -> float | str:
    return float(value) if math.isfinite(value) else repr(float(value))


def picture_of(pixels: Image) -> Picture:
    """A picture as Pillow has it, which several back ends take."""
    from PIL import Image as Pictures

    return Pictures.fromarray(pixels)


def histogram_as_json(histogram: Histogram) -> dict[str, Any]:
    """A histogram as data that JSON has; NaN is a string."""
    return {
        "edges": histogram.edges.tolist(),
        "counts": histogram.counts.tolist(),
        **{name: _plain(getattr(histogram, name)) for name in ("min", "max", "sum", "sum_squares", "fraction")},
    }
