"""Sample results of each kind for all sinks."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import nn, ones

from lightning_recorder import Sink
from lightning_recorder.graph import Graph, capture_graph
from lightning_recorder.reductions import Histogram

__all__ = [
    "ODD_TAGS",
    "OUTSIDE",
    "VERBS",
    "empty_histogram",
    "graph",
    "histogram",
    "histogram_of",
    "picture",
    "same_value",
    "write",
]

VERBS = ("write_scalars", "write_histograms", "write_images", "write_text", "write_files", "write_graph")

ODD_TAGS = (
    "activations/lstm/out[1][0]/mean",
    "activations/lstm/out_1__0_/mean",
    "activations/lstm/out(1)(0)/mean",
    "a b/c  d",
    "a//b",
    "/a",
    "a/",
    "..",
    "../../outside",
    "a/../../../outside",
    ".hidden",
    "größe/層/mean",
    "50%/#1/a?b:c=d&e~f+g,h;i",
    "quote\"s'/<b>/**bold**/`code`/$HOME/{0}",
    "new\nline",
    "x" * 300,
    "x" * 301,
    "層" * 300,
    "activations/" + "layer." * 48 + "fc/mean",
    "activations/" + "layer." * 48 + "fc/std",
    "step",
    "epoch",
)
"""Tags that module names may lead to, all different."""

OUTSIDE = ("/etc/x", "../x", "a/../../x", "..", "a/..", "", ".", "C:x", "..\\x", "a\\b", "nul\0")
"""File names that are not inside a folder, or that some operating system treats as such."""


def picture(seed: int = 0) -> NDArray[np.uint8]:
    """Return noise, 6 pixels high and 9 wide."""
    return np.random.default_rng(seed).integers(0, 256, (6, 9, 3), dtype=np.uint8)


def histogram() -> Histogram:
    """Return a histogram of the values -1.5, 0.5, 0.5 and 3 in three bins."""
    return Histogram(np.array([-2.0, 0.0, 1.0, 4.0]), np.array([1, 2, 1]), -1.5, 3.0, 2.5, 11.75)


def empty_histogram() -> Histogram:
    """Return the histogram of a tensor without a finite value."""
    return Histogram(np.array([0.0, 0.0]), np.array([0]), math.nan, math.nan, 0.0, 0.0)


def same_value(one: float, other: float) -> bool:
    """Return True if two numbers are equal. NaN equals NaN."""
    return one == other or (math.isnan(one) and math.isnan(other))


def histogram_of(values: NDArray[np.float64], bins: int = 1000) -> Histogram:
    """Return a histogram of values in bins of equal width."""
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
    """Return the graph of a single layer."""
    return capture_graph(nn.Sequential(nn.Linear(2, 2)), ones(1, 2))


def write(sink: Sink, verb: str, step: int, tag: str, folder: Path) -> bool:
    """Write a result of the kind of a verb."""
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
