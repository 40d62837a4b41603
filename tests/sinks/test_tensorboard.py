"""Tests of the TensorBoard sink, based on TensorBoard's own reader."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, ones
from torch.utils.tensorboard import SummaryWriter

from lightning_recorder.graph import capture_graph, to_graph_def
from lightning_recorder.reductions import SCALAR_STATISTICS, Histogram, Statistics, to_histogram
from lightning_recorder.sinks import TensorBoardSink
from tests.sinks.events import pixels_of, read_events, summaries
from tests.sinks.samples import graph, histogram, histogram_of, picture


def test_scalars(tmp_path: Path) -> None:
    """Each scalar is under its tag, with its step and its float32 value."""
    with TensorBoardSink(tmp_path) as sink:
        sink.write_scalars(3, {"activations/fc/mean": 0.1, "b": -2.0})
        sink.write_scalars(5, {"b": math.inf})
    read = read_events(tmp_path)
    assert sorted(read.Tags()["scalars"]) == ["activations/fc/mean", "b"]
    assert [(event.step, event.value) for event in read.Scalars("activations/fc/mean")] == [(3, np.float32(0.1).item())]
    assert [(event.step, event.value) for event in read.Scalars("b")] == [(3, -2.0), (5, math.inf)]


def test_a_histogram_with_few_bins(tmp_path: Path) -> None:
    """A histogram of at most 64 bins is written unchanged: right edges, counts and exact summary."""
    with TensorBoardSink(tmp_path) as sink:
        sink.write_histograms(3, {"h": histogram()})
    ((event),) = read_events(tmp_path).Histograms("h")
    value = event.histogram_value
    assert event.step == 3
    assert (value.min, value.max, value.num, value.sum, value.sum_squares) == (-1.5, 3.0, 4.0, 2.5, 11.75)
    assert list(value.bucket_limit) == [0.0, 1.0, 4.0]
    assert list(value.bucket) == [1.0, 2.0, 1.0]


def _measured(values: np.ndarray[Any, Any]) -> Histogram:
    statistics = Statistics()
    statistics.update(torch.from_numpy(values))
    summary = statistics.compute()
    return to_histogram({name: float(summary[name]) for name in SCALAR_STATISTICS}, summary["histogram"])


MANY = {
    "1000 bins of equal width": lambda: histogram_of(np.random.default_rng(0).normal(size=100_000)),
    "normal values, float bins": lambda: _measured(np.random.default_rng(0).normal(size=100_000)),
    "every magnitude": lambda: _measured(np.logspace(-37, 37, 50_000) * np.resize([-1.0, 1.0], 50_000)),
    "mostly zero": lambda: _measured(np.concatenate((np.zeros(90_000), np.linspace(-8, 8, 10_000)))),
}


@pytest.mark.parametrize("make", MANY.values(), ids=MANY)
def test_a_histogram_with_many_bins(make: Any, tmp_path: Path) -> None:
    """A histogram with more bins is merged to 64 bins and 1500 bytes, at existing edges and with all counts."""
    fine = make()
    assert len(fine.counts) > 64
    with TensorBoardSink(tmp_path) as sink:
        sink.write_histograms(3, {"activations/encoder.layer.0/histogram": fine})
    (summary,) = summaries(tmp_path).values()
    assert summary.ByteSize() <= 1500
    value = summary.histo
    assert len(value.bucket_limit) == len(value.bucket) <= 64
    assert (value.min, value.max) == (fine.min, fine.max)
    assert (value.num, value.sum, value.sum_squares) == (fine.count, fine.sum, fine.sum_squares)
    # The cumulative count at each remaining edge is unchanged.
    below = dict(zip(fine.edges[1:].tolist(), np.cumsum(fine.counts).tolist(), strict=True))
    assert np.cumsum(value.bucket).tolist() == [below[limit] for limit in value.bucket_limit]
    assert value.bucket_limit[-1] == fine.edges[-1]


def test_a_histogram_of_one_value(tmp_path: Path) -> None:
    """A constant tensor is one bin around its value."""
    with TensorBoardSink(tmp_path) as sink:
        sink.write_histograms(3, {"h": _measured(np.full(7, 0.3))})
    value = summaries(tmp_path)["h"].histo
    assert (value.min, value.max, value.num, list(value.bucket)) == (0.3, 0.3, 7.0, [7.0])
    assert value.bucket_limit[0] > 0.3


def test_a_histogram_without_a_finite_value(tmp_path: Path) -> None:
    """A histogram without a finite value is skipped, and the others are written."""
    with TensorBoardSink(tmp_path) as sink:
        answer = sink.write_histograms(3, {"none": _measured(np.array([np.nan, np.inf, np.nan])), "some": histogram()})
    assert answer
    assert read_events(tmp_path).Tags()["histograms"] == ["some"]


def test_images(tmp_path: Path) -> None:
    """An image is read back with the same pixels, upright and in RGB."""
    with TensorBoardSink(tmp_path) as sink:
        sink.write_images(3, {"graph": picture(1), "maps/conv1": picture(2)})
    read = read_events(tmp_path)
    for tag, seed in (("graph", 1), ("maps/conv1", 2)):
        (event,) = read.Images(tag)
        assert (event.step, event.width, event.height) == (3, 9, 6)
        assert np.array_equal(pixels_of(event), picture(seed))


def test_texts(tmp_path: Path) -> None:
    """A text is under the tag that TensorBoard's text page expects."""
    with TensorBoardSink(tmp_path) as sink:
        sink.write_text(3, {"note": "# ünïcode"})
    ((event),) = read_events(tmp_path).Tensors("note/text_summary")
    assert (event.step, event.tensor_proto.string_val[0].decode()) == (3, "# ünïcode")


def test_a_graph(tmp_path: Path) -> None:
    """A graph is the graph of the run in TensorBoard's format, without a profile."""
    with TensorBoardSink(tmp_path) as sink:
        assert sink.write_graph(3, {"graph": graph()})
    read = read_events(tmp_path)
    assert read.Graph() == to_graph_def(graph())
    assert read.Tags()["run_metadata"] == []
    assert summaries(tmp_path) == {}


def test_a_second_graph_replaces_the_first(tmp_path: Path) -> None:
    """TensorBoard shows the graph written last, regardless of its tag and step."""
    with TensorBoardSink(tmp_path) as sink:
        sink.write_graph(3, {"graph": capture_graph(nn.Tanh(), ones(1)), "other": graph()})
        assert read_after_flush(sink, tmp_path) == to_graph_def(graph())
        sink.write_graph(0, {"graph": capture_graph(nn.ReLU(), ones(1))})
        assert [node.name for node in read_after_flush(sink, tmp_path).node] == ["input", "relu", "output"]


def read_after_flush(sink: TensorBoardSink, folder: Path) -> Any:
    sink.flush()
    return read_events(folder).Graph()


def test_a_file_writes_no_event(tmp_path: Path) -> None:
    """Files are left to another sink."""
    with TensorBoardSink(tmp_path) as sink:
        assert not sink.write_files(3, {"a": Path(__file__)})
    assert summaries(tmp_path) == {}


def test_flush_makes_it_readable(tmp_path: Path) -> None:
    """Written results can be read after a flush, before the sink is closed."""
    sink = TensorBoardSink(tmp_path)
    sink.write_scalars(3, {"a": 1.0})
    sink.flush()
    assert [event.value for event in read_events(tmp_path).Scalars("a")] == [1.0]
    sink.close()


def test_a_writer_that_was_given_stays_open(tmp_path: Path) -> None:
    """Closing the sink flushes the caller's writer, which stays usable with the same file."""
    with SummaryWriter(str(tmp_path)) as writer:
        with TensorBoardSink(writer) as sink:
            sink.write_scalars(3, {"a": 1.0})
        assert [event.value for event in read_events(tmp_path).Scalars("a")] == [1.0]
        assert writer.all_writers is not None
        writer.add_scalar("a", 2.0, 4)
    assert [event.value for event in read_events(tmp_path).Scalars("a")] == [1.0, 2.0]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_remote_folder(tmp_path: Path) -> None:
    """A folder on a remote file system also has an event file, which is closed with the sink."""
    fsspec = pytest.importorskip("fsspec")
    with TensorBoardSink("memory://run") as sink:
        sink.write_scalars(3, {"a": 1.0})
    (path,) = fsspec.filesystem("memory").glob("/run/events.*")
    fsspec.filesystem("memory").get(path, str(tmp_path / Path(path).name))
    assert [event.value for event in read_events(tmp_path).Scalars("a")] == [1.0]
