"""Tests of the disk usage of the TensorBoard sink."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lightning_recorder.reductions import Histogram
from lightning_recorder.sinks import TensorBoardSink
from tests.sinks.samples import histogram_of

TAG = "activations/encoder.layers.11.attention.output.dense/histogram"


def of_edges(
    edges: np.ndarray[tuple[int], np.dtype[np.float64]], counts: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> Histogram:
    return Histogram(edges, counts, float(edges[0]), float(edges[-1]), 0.1, 0.1)


def wide(bins: int) -> Histogram:
    """Return bins whose edges use all bits of a double, with counts up to 2**53."""
    draw = np.random.default_rng(0)
    edges = np.sort(draw.normal(size=bins + 1) * 10.0 ** draw.integers(-30, 30, bins + 1))
    return of_edges(edges, draw.integers(1, 2**53, bins))


HARD: dict[str, Callable[[], Histogram]] = {
    "64 bins of any doubles": lambda: wide(64),
    "2048 bins of any doubles": lambda: wide(2048),
    "normal values": lambda: histogram_of(np.random.default_rng(1).normal(size=100_000)),
    "as many in each bin": lambda: of_edges(np.linspace(-1, 1, 2049), np.full(2048, 2**40 + 1)),
    "one bin": lambda: of_edges(np.array([0.1, 0.2]), np.array([3])),
}


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


@pytest.mark.parametrize("make", HARD.values(), ids=HARD)
def test_a_histogram_takes_at_most_one_and_a_half_kilobytes(make: Callable[[], Histogram], tmp_path: Path) -> None:
    """A histogram takes at most 1536 bytes in the event file, whatever its edges and counts are."""
    hard = make()
    with TensorBoardSink(tmp_path) as sink:
        for step in range(10):
            sink.write_histograms(step, {f"{TAG}/{place}": hard for place in range(20)})
    assert size_of(tmp_path) / 200 <= 1536


@pytest.mark.parametrize("tags", [1, 100])
def test_the_bytes_are_counted(tags: int, tmp_path: Path) -> None:
    """The sink's ``written_bytes`` is within 20 % of the growth of the file."""
    with TensorBoardSink(tmp_path) as sink:
        sink.flush()
        before = size_of(tmp_path)
        for step in range(20):
            sink.write_scalars(step, {f"activations/layer.{place}/mean": 0.1 for place in range(tags)})
            sink.write_histograms(step, {f"{TAG}/{place}": wide(64) for place in range(tags)})
        sink.flush()
        assert sink.written_bytes == pytest.approx(size_of(tmp_path) - before, rel=0.2)


def test_the_bytes_of_scalars_alone(tmp_path: Path) -> None:
    """The bytes of single scalars are counted with the same accuracy."""
    with TensorBoardSink(tmp_path) as sink:
        sink.flush()
        before = size_of(tmp_path)
        for step in range(200):
            sink.write_scalars(step, {"a": 0.1})
        sink.flush()
        assert sink.written_bytes == pytest.approx(size_of(tmp_path) - before, rel=0.2)
