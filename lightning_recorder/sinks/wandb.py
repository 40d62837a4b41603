"""A sink that writes to a Weights & Biases run."""

from __future__ import annotations

import glob
import html
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_recorder.records.histogram import Histogram
from lightning_recorder.sinks.base import Image, Sink
from lightning_recorder.sinks.files import copy_file, path_below, path_of_tag, shortened

if TYPE_CHECKING:
    from lightning_recorder.graph.model import Graph

__all__ = ["WandbSink"]

# The default number of bins of wandb.Histogram. The maximum of 512 would make each row eight times larger, although the
# plot would draw each bin narrower than a pixel.
_MAX_BINS = 64

# wandb uses the key of an image in a path and adds 40 bytes. A component of a path has at most 255 bytes.
_LONGEST_PART_BYTES = 200
_BYTES_OF_A_CHARACTER = 4

_FOLDER = "recorder"  # the folder among the files of the run
_SHOWN_AS_PAGE = (".svg", ".html")

Log = Callable[[dict[str, Any], int], object]


class WandbSink(Sink):
    """Write scalars, histograms, images and texts as rows of the run's history, and files and graphs as run files.

    Each call of a verb writes one row with the step in ``trainer/global_step``, which is the x-axis of Lightning's
    ``WandbLogger``. A histogram is merged to at most 64 bins. A histogram without a finite value is skipped. A text is
    shown as a panel with its Markdown source. Files and the JSON of graphs are copied to ``recorder/`` in the run's
    files and uploaded immediately. SVG and HTML files are also shown as panels. A disabled run writes nothing.

    Args:
        run: A ``wandb.Run``, such as ``WandbLogger.experiment``. The sink does not finish the run.
        log: A callable that takes values by key and a step and writes them, such as ``WandbLogger.log_metrics``, which
            adds the logger's prefix. By default ``run.log`` is called with the step in ``trainer/global_step``.

    Note:
        Thread-safe: each row is one message to the wandb process, so rows of two threads do not mix. If the user's code
        has begun a row with ``commit=False``, the sink's next row commits it, as any row of Lightning does.
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
        # wandb renders Markdown only in reports, so show the Markdown source as an HTML page. In a table with one cell,
        # the source would hardly be readable.
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
            copy_file(source, target)
            self._upload(target)
            if target.suffix.lower() in _SHOWN_AS_PAGE:
                pages[f"{_FOLDER}/{name}"] = target.read_text(encoding="utf-8")
        return self._write_pages(step, pages)

    @override
    def write_graph(self, step: int, graphs: Mapping[str, Graph]) -> bool:
        if self._run.disabled:
            return False
        for tag, graph in graphs.items():
            path = path_of_tag(self._folder / "graphs", tag, step, ".json")
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

        # inject=True would load a stylesheet from wandb's server.
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
