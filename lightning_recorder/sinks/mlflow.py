"""A sink that writes to an MLflow run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_recorder.disk import has_room
from lightning_recorder.records.histogram import Histogram
from lightning_recorder.sinks.base import Image, Sink
from lightning_recorder.sinks.files import FilesSink, digest, histogram_to_json, safe_segment, shortened
from lightning_recorder.temporary import TemporaryFolder

if TYPE_CHECKING:
    from lightning_recorder.graph.model import Graph

__all__ = ["MlflowSink"]

_MOST_METRICS = 1000  # maximum number per request, a limit of MLflow
_LONGEST_KEY = 250  # maximum number of characters, a limit of MLflow
_LONGEST_IMAGE_KEY = 120  # for the file name, MLflow adds 100 bytes to the key; a file name has at most 255 bytes

# MLflow accepts non-ASCII letters in the keys of metrics, but not in the keys of images. Replace them in metrics, too:
# their escapes could make a request of 1000 metrics larger than the 1 MB that a server accepts.
_UNWANTED = r"[^A-Za-z0-9_. \-]"

_MAX_BINS = 64  # about twice as many as a plot can show

_FOLDER = "recorder"  # the folder among the artifacts of the run


class MlflowSink(Sink):
    """Write scalars as metrics, images as logged images, and everything else as artifacts under ``recorder/``.

    Images have a step slider in MLflow's UI and are also stored under ``recorder/images/``. The UI renders artifacts:
    texts as Markdown, SVG and HTML as pages, and JSON with line breaks. All histograms of a call go to one JSON file,
    ``recorder/histograms/<group>/step<step>-<tags>.json``, with the edges and counts of each tag in at most 64 bins.
    The counts are exact. ``mlflow.artifacts.load_dict`` reads the file. An image per histogram would need two
    artifacts per site and step, and minutes of rendering in a long run.

    In keys, characters that MLflow rejects are replaced by ``_``, and a digest is appended to the changed segment. For
    example, ``lstm/out[1]`` becomes ``lstm/out_1_-d5a985103d8a``. Keys of more than 250 characters are shortened. An
    MLflow store in a database stores infinities as the largest float64.

    Args:
        client: A ``mlflow.MlflowClient``, such as ``MLFlowLogger.experiment``.
        run_id: The ID of the run. The sink does not end the run.
        prefix: A prefix for the keys of metrics and images, joined with ``-`` as in the logger.

    Note:
        Thread-safe: the client opens a session or a request for each call. Calls wait for the store, about 0.2 ms per
        metric in SQLite, so that errors reach the caller.
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
            data = {tag: histogram_to_json(each.coarsened(_MAX_BINS)) for tag, each in histograms.items()}
            self._client.log_dict(self._run_id, data, f"{_FOLDER}/histograms/{_histogram_file_name(list(data), step)}")
        return True

    @override
    def write_images(self, step: int, images: Mapping[str, Image]) -> bool:
        for tag, pixels in images.items():
            key = self._key(tag, _LONGEST_IMAGE_KEY)
            self._client.log_image(self._run_id, pixels, key=key, step=step, synchronous=True)
        # Also write images as artifacts with plain names. The slider starts at step 0, where most tags have no image.
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
        """Log the files that a :class:`FilesSink` writes, under the same names."""
        if not has_room(gettempdir()):
            return True
        with TemporaryFolder() as folder:
            artifacts = folder.path / "artifacts"
            write(FilesSink(artifacts))
            if artifacts.exists():
                self._client.log_artifacts(self._run_id, str(artifacts), _FOLDER)
        return True

    def _key(self, tag: str, longest: int) -> str:
        parts = (safe_segment(part, _UNWANTED, longest) for part in f"{self._prefix}{tag}".split("/"))
        return shortened("/".join(parts), longest)


def _histogram_file_name(tags: list[str], step: int) -> str:
    """Return the file name for the histograms of these tags at a step. Different sets of tags have different names."""
    group = safe_segment(tags[0].split("/")[0], _UNWANTED)
    others = digest("\n".join(sorted(tags)))
    return f"{group}/step{step:08d}-{others}.json"
