"""A sink that writes to an experiment of Comet."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
from typing_extensions import override

from lightning_recorder.errors import tell
from lightning_recorder.reductions.binned import Histogram
from lightning_recorder.sinks.base import Image, Sink
from lightning_recorder.sinks.files import picture_of
from lightning_recorder.sinks.naming import path_below, shortened

if TYPE_CHECKING:
    from lightning_recorder.graph.model import Graph

__all__ = ["CometSink"]

_LONGEST_KEY = 100  # characters; Comet cuts what is beyond, with a line on the console for each
_FOLDER = "recorder"  # among the assets of the experiment

# The experiments that are known to write nothing, which is said once of each.
_TOLD: WeakSet[Any] = WeakSet()


class CometSink(Sink):
    """Writes scalars as metrics, histograms, images and texts as Comet has them, files and graphs as assets.

    A histogram has Comet's own bins, each 10 % wide: the values of each of our bins are counted where its middle lies,
    with no more than that bin's width between. One without a finite value is left out. Assets lie under ``recorder/``;
    SVG files are shown among the graphics, too, and HTML files under HTML. Keys of more than 100 characters are
    shortened. Tags of texts are in their metadata.

    A disabled experiment shows nothing, which is told once; Lightning's ``CometLogger(online=False)`` makes such a one.

    Args:
        experiment: A ``comet_ml.CometExperiment``, such as ``CometLogger.experiment``; it stays the caller's.
        prefix: Stands before each key of a metric, a histogram or an image, with a ``_`` between, as in the logger.

    Note:
        Not for any thread: Comet puts the step on the experiment and reads it from there for each number, so that of
        two threads each could take the other's. What it is given it sends in a thread of its own.
    """

    def __init__(self, experiment: Any, prefix: str | None = None) -> None:
        self._experiment = experiment
        self._prefix = f"{prefix}_" if prefix else ""
        if experiment.disabled and experiment not in _TOLD:
            _TOLD.add(experiment)
            tell(
                "the Comet experiment is disabled and writes nothing: CometLogger(online=False) of Lightning makes it "
                "so; to write to the disk instead, leave online out and set COMET_START_ONLINE=0 in the environment"
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
                self._experiment.log_histogram_3d(self._in_its_bins(histogram), self._key(tag), step=step)
        return self._is_enabled

    @override
    def write_images(self, step: int, images: Mapping[str, Image]) -> bool:
        for tag, pixels in self._items(images):
            self._experiment.log_image(picture_of(pixels), name=self._key(tag), step=step)
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
            Path(source).stat()  # Comet logs an error where there is none, and goes on
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
        """Nothing: Comet sends by itself, and waiting for the network belongs to the end, where the logger does it."""

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
        """Comet's empty histogram. It takes a millisecond to make, and is read as soon as it is logged."""
        from comet_ml import data_structure

        library: Any = data_structure  # typed, but for what is called here
        return library.Histogram()

    def _in_its_bins(self, histogram: Histogram) -> Any:
        """The same counts in Comet's bins."""
        occupied = histogram.counts > 0
        edges = np.clip(histogram.edges, histogram.min, histogram.max)
        middles = (edges[:-1] / 2 + edges[1:] / 2)[occupied]
        # Comet counts what is nearer to zero than its first edge on the other side of it, what is beyond its last not.
        middles[np.abs(middles) <= self._bins.start] = 0.0
        last = np.nextafter(self._bins.stop, 0.0)
        self._bins.clear()
        self._bins.add(np.clip(middles, -last, last), counts=histogram.counts[occupied])
        return self._bins
