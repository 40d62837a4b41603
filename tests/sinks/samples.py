"""One result of each kind, and what a sink answers to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import nn, ones

from lightning_recorder import Histogram, Sink
from lightning_recorder.graph import Graph, capture_graph

__all__ = ["VERBS", "graph", "histogram", "histogram_of", "picture", "write"]

VERBS = ("write_scalars", "write_histograms", "write_images", "write_text", "write_files", "write_graph")


def picture(seed: int = 0) -> NDArray[np.uint8]:
    """Noise, 6 pixels high and 9 wide."""
    return np.random.default_rng(seed).integers(0, 256, (6, 9, 3), dtype=np.uint8)


def histogram() -> Histogram:
    """The values -1.5, 0.5, 0.5 and 3 in three bins."""
    return Histogram(np.array([-2.0, 0.0, 1.0, 4.0]), np.array([1, 2, 1]), -1.5, 3.0, 2.5, 11.75)


def histogram_of(values: NDArray[np.float64], bins: int = 1000) -> Histogram:
    """Values in bins of equal width."""
    counts, edges = np.histogram(values, bins=bins)
    return Histogram(
        edges,
        counts.astype(np.int64),
        float(values.min()),
        float(values.max()),
        float(values.sum()),
        float((values * values).sum()),
    )


def graph() -> Graph:
    """The graph of a single layer."""
    return capture_graph(nn.Sequential(nn.Linear(2, 2)), ones(1, 2))


def write(sink: Sink, verb: str, step: int, tag: str, folder: Path) -> bool:
    """Write a result of the kind that a verb is for."""
    source = folder / "source.txt"
    source.write_text("from elsewhere")
    calls: dict[str, Callable[[], bool]] = {
        "write_scalars": lambda: sink.write_scalars(step, {tag: 0.5}),
        "write_histograms": lambda: sink.write_histograms(step, {tag: histogram()}),
        "write_images": lambda: sink.write_images(step, {tag: picture()}),
        "write_text": lambda: sink.write_text(step, {tag: "**text**"}),
        "write_files": lambda: sink.write_files(step, {tag: source}),
        "write_graph": lambda: sink.write_graph(step, {tag: graph()}),
    }
    return calls[verb]()
