"""A sink that writes to a run of Weights & Biases."""

from __future__ import annotations

import glob
import html
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_recorder.reductions.binned import Histogram
from lightning_recorder.sinks.base import Image, Sink
from lightning_recorder.sinks.naming import file_of_tag, keep_file, path_below, shortened

if TYPE_CHECKING:
    from lightning_recorder.graph.model import Graph

__all__ = ["WandbSink"]

# What wandb.Histogram itself makes of values. It takes up to 512, which would be eight times the bytes of each row for
# a picture that shows a bin in less than a pixel.
_MAX_BINS = 64

# wandb puts the key of a picture into a path, whose parts have at most 255 bytes, and adds 40 bytes of its own.
_LONGEST_PART_BYTES = 200
_BYTES_OF_A_CHARACTER = 4

_FOLDER = "recorder"  # in the files of the run
_SHOWN_AS_PAGE = (".svg", ".html")

Log = Callable[[dict[str, Any], int], object]


class WandbSink(Sink):
    """Writes scalars, histograms, images and texts as rows of a run's history, files and graphs among its files.

    What a verb gets is one row, and its step is in ``trainer/global_step``, which is the x axis of Lightning's
    ``WandbLogger``. A histogram is joined to at most 64 bins; one without a finite value is left out. A text is a panel
    with its Markdown as it was written. Files and the JSON of graphs are copied to ``recorder/`` among the run's files
    and uploaded at once; of files the SVG and HTML are panels as well. A disabled run shows nothing.

    Args:
        run: A ``wandb.Run``, such as ``WandbLogger.experiment``, which stays the caller's and is not finished.
        log: Writes values by key at a step, such as ``WandbLogger.log_metrics``, which adds the logger's prefix;
            without it ``run.log`` with the step in ``trainer/global_step``.

    Note:
        For any thread: each row is one message to the process of wandb, so that rows of two threads do not mix. Only a
        row that one's own code has begun with ``commit=False`` is ended by the next one, as by any row of Lightning.
    """

    any_thread = True

    def __init__(self, run: Any, log: Log | None = None) -> None:
        self._run = run
        self._log = log or (lambda values, step: run.log({**values, "trainer/global_step": step}))

    @override
    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> bool:
        return self._write_row(step, scalars)

    @override
    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> bool:
        import wandb

        drawn = {tag: each.coarsened(_MAX_BINS) for tag, each in histograms.items() if each.count}
        return self._write_row(
            step, {tag: wandb.Histogram(np_histogram=each.np_histogram) for tag, each in drawn.items()}
        )

    @override
    def write_images(self, step: int, images: Mapping[str, Image]) -> bool:
        import wandb

        return self._write_row(step, {_media_key(tag): wandb.Image(pixels) for tag, pixels in images.items()})

    @override
    def write_text(self, step: int, texts: Mapping[str, str]) -> bool:
        # wandb renders no Markdown outside of reports; as it was written it can be read, in a table of one cell hardly.
        return self._write_pages(
            step, {tag: f'<pre style="white-space: pre-wrap">{html.escape(text)}</pre>' for tag, text in texts.items()}
        )

    @override
    def write_files(self, step: int, files: Mapping[str, Path]) -> bool:
        if self._run.disabled:
            return False
        pages = {}
        for name, source in files.items():
            target = path_below(self._folder, name)
            keep_file(source, target)
            self._upload(target)
            if target.suffix.lower() in _SHOWN_AS_PAGE:
                pages[f"{_FOLDER}/{name}"] = target.read_text(encoding="utf-8")
        return self._write_pages(step, pages)

    @override
    def write_graph(self, step: int, graphs: Mapping[str, Graph]) -> bool:
        if self._run.disabled:
            return False
        for tag, graph in graphs.items():
            path = file_of_tag(self._folder / "graphs", tag, step, ".json")
            path.write_text(json.dumps(graph.to_json()), encoding="utf-8")
            self._upload(path)
        return True

    @property
    def _folder(self) -> Path:
        return Path(self._run.dir) / _FOLDER

    def _upload(self, path: Path) -> None:
        self._run.save(glob.escape(str(path)), base_path=self._run.dir, policy="now")

    def _write_pages(self, step: int, pages: Mapping[str, str]) -> bool:
        import wandb

        # Nothing injected: that is a stylesheet from wandb's server.
        return self._write_row(step, {_media_key(tag): wandb.Html(page, inject=False) for tag, page in pages.items()})

    def _write_row(self, step: int, values: Mapping[str, Any]) -> bool:
        if self._run.disabled:
            return False
        if values:
            self._log(dict(values), step)
        return True


def _media_key(tag: str) -> str:
    parts = tag.split("/")
    long = _LONGEST_PART_BYTES // _BYTES_OF_A_CHARACTER
    return "/".join(each if len(each.encode()) <= _LONGEST_PART_BYTES else shortened(each, long) for each in parts)
