"""A sink that writes to a Comet experiment."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
from typing_extensions import override

from lightning_recorder.errors import warn
from lightning_recorder.records.histogram import Histogram
from lightning_recorder.sinks.base import Image, Sink
from lightning_recorder.sinks.files import path_below, shortened, to_pillow

if TYPE_CHECKING:
    from lightning_recorder.graph.model import Graph

__all__ = ["CometSink"]

_LONGEST_KEY = 100  # characters; Comet truncates a longer key and logs a line to the console
_FOLDER = "recorder"  # the folder among the assets of the experiment

# Disabled experiments that the user has been warned about, to warn only once.
_WARNED: WeakSet[Any] = WeakSet()


class CometSink(Sink):
    """Write scalars as metrics, histograms, images and texts as their Comet types, and files and graphs as assets.

    A histogram is converted to Comet's bins, each of which is 10 % wide. The count of each source bin is added at the
    center of that bin, so a value moves by at most the width of its source bin. A histogram without a finite value is
    skipped. Assets are stored under ``recorder/``. SVG files also appear among the graphics, HTML files under HTML.
    Keys of more than 100 characters are shortened. The tag of a text is stored in its metadata.

    A disabled experiment writes nothing and causes one warning. Lightning's ``CometLogger(online=False)`` creates a
    disabled experiment.

    Args:
        experiment: A ``comet_ml.CometExperiment``, such as ``CometLogger.experiment``. The sink does not end it.
        prefix: A prefix for the keys of metrics, histograms and images, joined with ``_`` as in the logger.

    Note:
        Not thread-safe: Comet stores the current step in the experiment and reads it for each value, so two threads
        could mix up their steps. Comet uploads in its own thread.
    """

    def __init__(self, experiment: Any, prefix: str | None = None) -> None:
        self._experiment = experiment
        self._prefix = f"{prefix}_" if prefix else ""
        if experiment.disabled and experiment not in _WARNED:
            _WARNED.add(experiment)
            warn(
                "the Comet experiment is disabled and writes nothing: CometLogger(online=False) causes this; to "
                "write to the disk, omit online and set COMET_START_ONLINE=0 in the environment"
            )

    @override
    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> bool:
        if scalars and self._is_enabled:
            self._experiment.log_metrics({self._key(tag): value for tag, value in scalars.items()}, step=step)
        return self._is_enabled

    @override
    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> bool:
        for tag, histogram in self._items(histograms):
            if histogram.count:
                self._experiment.log_histogram_3d(self._to_comet_bins(histogram), self._key(tag), step=step)
        return self._is_enabled

    @override
    def write_images(self, step: int, images: Mapping[str, Image]) -> bool:
        for tag, pixels in self._items(images):
            self._experiment.log_image(to_pillow(pixels), name=self._key(tag), step=step)
        return self._is_enabled

    @override
    def write_text(self, step: int, texts: Mapping[str, str]) -> bool:
        for tag, text in self._items(texts):
            self._experiment.log_text(text, step=step, metadata={"tag": tag})
        return self._is_enabled

    @override
    def write_files(self, step: int, files: Mapping[str, Path]) -> bool:
        for name, source in self._items(files):
            asset = path_below(Path(_FOLDER), name).as_posix()
            Path(source).stat()  # raises for a missing file, which Comet would only log
            self._experiment.log_asset(str(source), file_name=asset, step=step)
            if asset.lower().endswith(".svg"):
                self._experiment.log_image(str(source), name=shortened(asset, _LONGEST_KEY), step=step)
            elif asset.lower().endswith(".html"):
                self._experiment.log_html(Path(source).read_text(encoding="utf-8"))
        return self._is_enabled

    @override
    def write_graph(self, step: int, graphs: Mapping[str, Graph]) -> bool:
        for tag, graph in self._items(graphs):
            name = f"{_FOLDER}/graphs/{shortened(tag, _LONGEST_KEY)}-step{step}.json"
            self._experiment.log_asset_data(json.dumps(graph.to_json()), name=name, step=step)
        return self._is_enabled

    @override
    def flush(self) -> None:
        """Do nothing, because Comet uploads on its own. :meth:`close` waits for the upload."""

    @override
    def close(self) -> None:
        self._experiment.flush()

    @property
    def _is_enabled(self) -> bool:
        return not self._experiment.disabled

    def _items(self, values: Mapping[str, Any]) -> Any:
        return values.items() if self._is_enabled else ()

    def _key(self, tag: str) -> str:
        return shortened(f"{self._prefix}{tag}", _LONGEST_KEY)

    @cached_property
    def _bins(self) -> Any:
        """A Comet histogram, reused because creating one takes 1 ms. Comet reads the counts during the logging call."""
        from comet_ml import data_structure

        library: Any = data_structure  # its annotations do not cover the calls made here
        return library.Histogram()

    def _to_comet_bins(self, histogram: Histogram) -> Any:
        """Return the histogram's counts in Comet's bins."""
        occupied = histogram.counts > 0
        edges = np.clip(histogram.edges, histogram.min, histogram.max)
        middles = (edges[:-1] / 2 + edges[1:] / 2)[occupied]
        # Comet counts values closer to zero than its first edge with the wrong sign, so set them to 0. Comet drops
        # values beyond its last edge, so clip them.
        middles[np.abs(middles) <= self._bins.start] = 0.0
        last = np.nextafter(self._bins.stop, 0.0)
        self._bins.clear()
        self._bins.add(np.clip(middles, -last, last), counts=histogram.counts[occupied])
        return self._bins
