"""A sink that writes to a run of MLflow."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_recorder.reductions.binned import Histogram
from lightning_recorder.sinks.base import Image, Sink
from lightning_recorder.sinks.files import FilesSink, histogram_as_json
from lightning_recorder.sinks.naming import digest, harmless, shortened

if TYPE_CHECKING:
    from lightning_recorder.graph.model import Graph

__all__ = ["MlflowSink"]

_MOST_METRICS = 1000  # in a request, by MLflow's own limit
_LONGEST_KEY = 250  # characters, likewise
_LONGEST_IMAGE_KEY = 120  # it becomes a part of a file's name, of 255 bytes, beside 100 of MLflow's own

# MLflow takes letters of other scripts in metrics, not in the keys of images. Escaped they could make a request of
# 1000 metrics larger than the megabyte that a server takes.
_UNWANTED = r"[^A-Za-z0-9_. \-]"

_MAX_BINS = 64  # twice as many as can be told apart in a picture of one

_FOLDER = "recorder"  # among the artifacts of the run


class MlflowSink(Sink):
    """Writes scalars as metrics, images as logged images, everything else as artifacts under ``recorder/``.

    Images have a slider over the steps in MLflow's page, and lie under ``recorder/images/`` as well. Artifacts are
    shown there as they are: texts as Markdown, SVG and HTML as pages, JSON with its lines. The histograms of a call are
    one JSON file, ``recorder/histograms/<group>/step<step>-<tags>.json``, with the edges and counts of each tag in at
    most 64 bins: exact, and read by ``mlflow.artifacts.load_dict``. A picture of each would be two artifacts a site and
    step, and minutes of drawing in a long run.

    In keys, characters that MLflow refuses become ``_`` and the part that had them gets a digest, so that
    ``lstm/out[1]`` is ``lstm/out_1_-d5a985103d8a``; keys of more than 250 characters are shortened. A database keeps
    infinities as the largest float64.

    Args:
        client: A ``mlflow.MlflowClient``, such as ``MLFlowLogger.experiment``.
        run_id: The run, which stays the caller's and is not ended.
        prefix: Stands before each key of a metric or an image, with a ``-`` between, as in the logger.

    Note:
        For any thread: the client opens a session or a request for each call. Calls wait for the store, about 0.2 ms
        for each metric in SQLite, so that errors reach the caller.
    """

    any_thread = True

    def __init__(self, client: Any, run_id: str, prefix: str = "") -> None:
        self._client = client
        self._run_id = run_id
        self._prefix = f"{prefix}-" if prefix else ""

    @override
    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> bool:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        metrics = (Metric(self._key(tag, _LONGEST_KEY), float(value), now_ms, step) for tag, value in scalars.items())
        while batch := list(islice(metrics, _MOST_METRICS)):
            self._client.log_batch(self._run_id, metrics=batch, synchronous=True)
        return True

    @override
    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> bool:
        if histograms:
            data = {tag: histogram_as_json(each.coarsened(_MAX_BINS)) for tag, each in histograms.items()}
            self._client.log_dict(self._run_id, data, f"{_FOLDER}/histograms/{_name_of(list(data), step)}")
        return True

    @override
    def write_images(self, step: int, images: Mapping[str, Image]) -> bool:
        for tag, pixels in images.items():
            key = self._key(tag, _LONGEST_IMAGE_KEY)
            self._client.log_image(self._run_id, pixels, key=key, step=step, synchronous=True)
        # The page's slider begins at step 0, where most have none; among the artifacts they have plain names.
        return self._write_artifacts(lambda files: files.write_images(step, images))

    @override
    def write_text(self, step: int, texts: Mapping[str, str]) -> bool:
        return self._write_artifacts(lambda files: files.write_text(step, texts))

    @override
    def write_files(self, step: int, files: Mapping[str, Path]) -> bool:
        return self._write_artifacts(lambda folder: folder.write_files(step, files))

    @override
    def write_graph(self, step: int, graphs: Mapping[str, Graph]) -> bool:
        return self._write_artifacts(lambda files: files.write_graph(step, graphs))

    def _write_artifacts(self, write: Callable[[FilesSink], bool]) -> bool:
        """Log what a sink of files makes of something, under the names that it gives."""
        with TemporaryDirectory(prefix="lightning_recorder-") as folder:
            write(FilesSink(folder))
            if any(Path(folder).iterdir()):
                self._client.log_artifacts(self._run_id, folder, _FOLDER)
        return True

    def _key(self, tag: str, longest: int) -> str:
        parts = (harmless(part, _UNWANTED, longest) for part in f"{self._prefix}{tag}".split("/"))
        return shortened("/".join(parts), longest)


def _name_of(tags: list[str], step: int) -> str:
    """The file of some tags' histograms at a step: other tags at the same step are in a file of their own."""
    group = harmless(tags[0].split("/")[0], _UNWANTED)
    others = digest("\n".join(sorted(tags)))
    return f"{group}/step{step:08d}-{others}.json"
