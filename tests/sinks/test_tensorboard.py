"""Tests of the TensorBoard sink, its event files and its Custom Scalars page, with TensorBoard's own reader."""

from __future__ import annotations

import io
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util import tensor_util
from torch import nn, ones
from torch.utils.tensorboard import SummaryWriter

from lightning_recorder.graph import capture_graph, to_graph_def
from lightning_recorder.reductions import SCALAR_STATISTICS, Histogram, Statistics, to_histogram
from lightning_recorder.sinks import RankedScalars, TensorBoardSink, sink_for_logger
from lightning_recorder.sinks.tensorboard import PREFIX, frame_record, patch_crc32c
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


def written_by(writer: SummaryWriter) -> RecordWriter:
    """Return the TensorBoard object that writes the records of a writer."""
    records: RecordWriter = writer._get_file_writer().event_writer._async_writer._writer
    return records


@given(st.binary(max_size=5000))
def test_a_record_is_the_same_to_the_bit(data: bytes) -> None:
    """Any record is identical to the one that TensorBoard writes, in length, checksums and content."""
    theirs = io.BytesIO()
    RecordWriter(theirs).write(data)
    assert frame_record(data) == theirs.getvalue()


def test_only_the_writer_of_the_sink_is_quickened(tmp_path: Path) -> None:
    """Only the sink's own writer is patched, and its file can be read; another writer is unchanged."""
    other = SummaryWriter(str(tmp_path / "other"))
    with SummaryWriter(str(tmp_path / "ours")) as writer, TensorBoardSink(writer) as sink:
        sink.write_scalars(3, {"a": 1.0})
        writer.add_scalar("b", 2.0, 4)
        assert "write" in vars(written_by(writer))
        assert "write" not in vars(written_by(other))
    other.close()
    read = read_events(tmp_path / "ours")
    assert [(event.step, event.value) for tag in "ab" for event in read.Scalars(tag)] == [(3, 1.0), (4, 2.0)]


def test_without_the_library_all_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the library cannot be imported, the writer writes as TensorBoard does."""
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    with SummaryWriter(str(tmp_path)) as writer:
        assert not patch_crc32c(writer)
        with TensorBoardSink(writer) as sink:
            sink.write_scalars(3, {"a": 1.0})
    assert [event.value for event in read_events(tmp_path).Scalars("a")] == [1.0]


def test_a_writer_of_another_structure_is_not_patched() -> None:
    """A writer of another structure, such as that of a rank without a file, is not patched."""

    class Other:
        pass

    assert not patch_crc32c(Other())  # type: ignore[arg-type]


def layouts(folder: Path) -> list[dict[str, dict[str, list[str]]]]:
    """Return the layouts of a run in writing order: group to title to patterns."""
    events = read_events(folder)
    if "custom_scalars__config__" not in events.Tags()["tensors"]:
        return []
    found = []
    for event in events.Tensors("custom_scalars__config__"):
        layout = layout_pb2.Layout.FromString(tensor_util.make_ndarray(event.tensor_proto).item())
        found.append(
            {each.title: {chart.title: list(chart.multiline.tag) for chart in each.chart} for each in layout.category}
        )
    return found


TAGS = [
    "activations/encoder.conv1/rms",
    "activations/head/rms",
    "activations/lstm/out[1][0]/mean",
    "activations_validate/head/rms/dataloader_idx_1",
    "gradients/head/rms",
    "gradients/overflow_steps",
    "recorder/gradients/every_n_train_steps",
    "parameters/head/weight/rms",
    "parameters/head/weight.grad/rms",
    "parameters/attn/out_proj.weight.exp_avg/rms",
]


@pytest.mark.parametrize("prefix", ["", PREFIX])
def test_one_chart_for_each_statistic_of_a_group(prefix: str, tmp_path: Path) -> None:
    """Each chart matches the tags of all modules for one statistic, and no others."""
    with TensorBoardSink(tmp_path, prefix=prefix) as sink:
        sink.write_scalars(0, dict.fromkeys(TAGS, 1.0))
    (layout,) = layouts(tmp_path)
    written = {prefix + (tag.removeprefix("recorder/") if prefix else tag): tag for tag in TAGS}
    assert read_events(tmp_path).Tags()["scalars"] == [*written]
    lines = {
        (group, title): [tag for shown, tag in written.items() if any(re.match(pattern, shown) for pattern in patterns)]
        for group, charts in layout.items()
        for title, patterns in charts.items()
    }
    assert lines == {
        ("activations", "rms"): TAGS[:2],
        ("activations", "mean"): TAGS[2:3],
        ("activations_validate", "rms"): TAGS[3:4],
        ("gradients", "rms"): TAGS[4:5],
        ("parameters", "rms"): TAGS[7:8],
        ("parameters", "grad rms"): TAGS[8:9],
        ("parameters", "exp_avg rms"): TAGS[9:10],
    }


PARTS = ("norm", "mlp.fc1", "mlp.act")
MODULES = [f"activations/blocks.{block}.{part}" for block in range(24) for part in PARTS]


@settings(max_examples=12, deadline=None)
@given(st.integers(0, len(MODULES) - 1), st.sampled_from([0.0, 1e3, math.inf]), st.integers(0, 2))
def test_an_outlier_is_in_every_chart(place: int, value: float, since: int) -> None:
    """A chart of 72 modules has six lines, and a sick module is among them from the first step on that shows it."""
    with TemporaryDirectory() as folder:
        with TensorBoardSink(folder) as sink:
            for step in range(3):
                scalars = {
                    f"{module}/{name}": 1.0 + row % 3 for row, module in enumerate(MODULES) for name in ("rms", "std")
                }
                if step >= since:
                    scalars[f"{MODULES[place]}/rms"] = value
                sink.write_scalars(step, scalars)
        charts = layouts(Path(folder))[-1]["activations"]
        sick = MODULES[place].partition("/")[2]
        assert list(charts) == [f"rms: {sick} (6 of 72)", f"std: {sick} (6 of 72)"]
        for title, patterns in charts.items():
            assert len(patterns) == 6
            tag = f"{MODULES[place]}/{title[:3]}"
            assert sum(bool(re.match(pattern, tag)) for pattern in patterns) == 1
        assert len(layouts(Path(folder))) == (1 if since == 0 else 2)


def test_a_ranking_of_all_sites_chooses_the_lines_and_the_title(tmp_path: Path) -> None:
    """If few sites of a record are shown, what is known of all ranks them. The title has the one that is sick now."""
    tags = [f"{module}/rms" for module in MODULES]
    sick = [{tags[40]: 2.0}, {tags[40]: 2.1, tags[7]: 1.0}, {}, {tags[7]: 1.5}, {tags[7]: 1.5}]
    with TensorBoardSink(tmp_path) as sink:
        for step, degrees in enumerate(sick):
            sink.write_scalars(step, RankedScalars(dict.fromkeys(tags, 1.0).items(), degrees))
    written = [layout["activations"] for layout in layouts(tmp_path)]
    assert [title for charts in written for title in charts] == [
        "rms: blocks.13.mlp.fc1 (6 of 72)",
        "rms: blocks.13.mlp.fc1 (6 of 72)",
        "rms: blocks.2.mlp.fc1 (6 of 72)",
    ]
    for charts in written[1:]:
        (patterns,) = charts.values()
        assert all(any(re.match(pattern, tags[place]) for pattern in patterns) for place in (7, 40))


def test_the_first_update_of_a_zero_bias_is_not_unusual(tmp_path: Path) -> None:
    """The infinite relative updates of new biases do not take the places of a parameter that is not updated."""
    with TensorBoardSink(tmp_path) as sink:
        for step in range(2):
            ratios = {
                f"parameters/blocks.{row}.fc/bias/update_ratio": math.inf if step == 0 else 0.01 for row in range(24)
            }
            frozen = {"parameters/blocks.17.fc/bias/update_ratio": 0.0} if step else {}
            sink.write_scalars(step, ratios | frozen)
    (title,) = layouts(tmp_path)[-1]["parameters"]
    assert title == "update_ratio: blocks.17.fc bias (6 of 24)"


def test_several_sinks_of_one_writer_have_one_layout(tmp_path: Path) -> None:
    """The latest layout covers the tags of all sinks of a writer, and is written only when it changes."""
    writer = SummaryWriter(str(tmp_path))
    sinks = [TensorBoardSink(writer), TensorBoardSink(writer)]
    for step in range(3):
        sinks[0].write_scalars(step, {"activations/head/rms": 1.0})
        sinks[1].write_scalars(step, {"gradients/head/rms": 1.0})
    writer.close()
    assert [list(layout) for layout in layouts(tmp_path)] == [["activations"], ["activations", "gradients"]]


@pytest.mark.parametrize("tags", [{"loss": 1.0}, {}, {"gradients/overflow_steps": 2.0}])
def test_without_modules_there_is_no_layout(tags: dict[str, Any], tmp_path: Path) -> None:
    """Scalars without a module get no chart."""
    with TensorBoardSink(tmp_path) as sink:
        sink.write_scalars(0, tags)
    assert layouts(tmp_path) == []


def test_the_layout_of_somebody_else_stays(tmp_path: Path) -> None:
    """A layout that the user has written stays the only one."""
    writer = SummaryWriter(str(tmp_path))
    writer.add_custom_scalars({"mine": {"losses": ["Multiline", ["loss/.*"]]}})
    writer.flush()
    TensorBoardSink(writer).write_scalars(0, {"activations/head/rms": 1.0})
    writer.close()
    assert layouts(tmp_path) == [{"mine": {"losses": ["loss/.*"]}}]


def test_the_recorders_are_one_group_behind_the_metrics_of_the_user(tmp_path: Path) -> None:
    """All tags of a TensorBoardLogger's sink are below one prefix, which sorts after train and val."""
    logger = TensorBoardLogger(tmp_path)
    sink = sink_for_logger(logger)
    assert sink is not None
    sink.write_scalars(0, {"activations/fc/rms": 1.0, "recorder/activations/every_n_train_steps": 2.0})
    sink.write_histograms(0, {"gradients/fc/histogram": histogram()})
    sink.write_images(0, {"Unusual/activations": np.zeros((2, 3, 3), dtype=np.uint8)})
    sink.write_text(0, {"recorder/findings": "none"})
    found = read_events(Path(logger.log_dir, "recorder")).Tags()
    assert found["scalars"] == ["z_recorder/activations/fc/rms", "z_recorder/activations/every_n_train_steps"]
    assert found["histograms"] == ["z_recorder/gradients/fc/histogram"]
    assert found["images"] == ["z_recorder/Unusual/activations"]
    assert set(found["tensors"]) == {"z_recorder/findings/text_summary", "custom_scalars__config__"}
    assert max("train_loss", "train/loss", "val_loss", "validation/loss", "valid/acc", "test_acc") < PREFIX
