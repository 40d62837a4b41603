"""Tests of the Comet sink, based on the ZIP file of an offline experiment."""

from __future__ import annotations

import io
import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch.loggers import CometLogger, TensorBoardLogger
from PIL import Image

from lightning_recorder import ActivationRecorder, Graph, MemorySink, Outputs, RecorderWarning
from lightning_recorder.reductions import Histogram
from lightning_recorder.sinks import CometSink, sink_for_logger
from tests.callbacks.models import Classifier, fit
from tests.sinks.back_ends import COMET_QUIET, comet_experiment
from tests.sinks.comet_files import read_experiment
from tests.sinks.events import read_events
from tests.sinks.samples import ODD_TAGS, empty_histogram, graph, histogram, picture, same_value

pytestmark = pytest.mark.usefixtures("offline")


def bins_of(data: bytes) -> list[tuple[float, float, int]]:
    """Return the nonempty bins of a histogram: their edges from Comet's own table, and their counts."""
    from comet_ml import data_structure

    library: Any = data_structure
    read = json.loads(data)
    edges = library.Histogram(read["start"], read["stop"], read["step"], read["offset"]).values
    return [(edges[place], edges[place + 1], count) for place, count in read["index_values"]]


def test_scalars(tmp_path: Path) -> None:
    """Each scalar is a metric under its tag and step; a repeated one is added as a second entry."""
    with comet_experiment(tmp_path) as experiment, CometSink(experiment) as sink:
        sink.write_scalars(3, {"activations/fc/mean": 0.1, "b": -2.0, "epoch": 7.0})
        sink.write_scalars(3, {"b": 1e-310})
        sink.write_scalars(1, {"b": 0.5})
    assert read_experiment(tmp_path).metrics == {
        "activations/fc/mean": [(3, 0.1)],
        "b": [(3, -2.0), (3, 1e-310), (1, 0.5)],
        "epoch": [(3, 7.0)],
    }


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    """NaN and infinities are read back unchanged."""
    values = {"a": math.nan, "b": math.inf, "c": -math.inf}
    with comet_experiment(tmp_path) as experiment:
        CometSink(experiment).write_scalars(3, values)
    read = {key: value for key, ((_, value),) in read_experiment(tmp_path).metrics.items()}
    assert all(same_value(read[tag], value) for tag, value in values.items())


def test_a_histogram(tmp_path: Path) -> None:
    """The count of each bin goes to the Comet bin that contains its center, at the right step."""
    with comet_experiment(tmp_path) as experiment:
        CometSink(experiment).write_histograms(3, {"h": histogram(), "none": empty_histogram()})
    (file,) = read_experiment(tmp_path).files
    assert (file.kind, file.name, file.step) == ("histogram3d", "h", 3)
    bins = bins_of(file.data)
    assert [count for _, _, count in bins] == [1, 2, 1]
    # The outer bins are clipped to the smallest and the largest value.
    middles = (-0.75, 0.5, 2.0)
    assert all(lower <= middle <= upper for (lower, upper, _), middle in zip(bins, middles, strict=True))
    assert all(max(abs(lower), abs(upper)) < 1.11 * min(abs(lower), abs(upper)) for lower, upper, _ in bins)


def test_a_histogram_of_every_magnitude(tmp_path: Path) -> None:
    """No value is lost or changes its sign, however small or large it is."""
    magnitudes = np.array([1e-30, 1e-15, 1e-12, 2e-12, 1.0, 1e20, 1e30])
    edges = np.sort(np.outer([-1.01, -0.99, 0.99, 1.01], magnitudes).ravel())
    counts = np.arange(1, len(edges))
    fine = Histogram(edges, counts, float(edges[0]), float(edges[-1]), 0.0, 0.0)
    with comet_experiment(tmp_path) as experiment:
        CometSink(experiment).write_histograms(3, {"h": fine})
    (file,) = read_experiment(tmp_path).files
    bins = bins_of(file.data)
    centres = edges[:-1] / 2 + edges[1:] / 2
    assert sum(count for _, _, count in bins) == counts.sum()
    assert sum(count for _, upper, count in bins if upper <= 0) == counts[centres < -1e-12].sum()
    assert sum(count for lower, _, count in bins if lower >= 1e-12) == counts[centres > 1e-12].sum()


def test_images(tmp_path: Path) -> None:
    """An image is read back with the same pixels, including an image of a single color."""
    flat = np.full((6, 9, 3), 200, np.uint8)
    with comet_experiment(tmp_path) as experiment:
        CometSink(experiment).write_images(3, {"maps/conv1": picture(1), "flat": flat})
    images = read_experiment(tmp_path).files_of("visualization")
    assert {name: each.step for name, each in images.items()} == {"maps/conv1": 3, "flat": 3}
    for name, pixels in (("maps/conv1", picture(1)), ("flat", flat)):
        with Image.open(io.BytesIO(images[name].data)) as read:
            assert np.array_equal(np.asarray(read.convert("RGB")), pixels)


def test_texts(tmp_path: Path) -> None:
    """A text is a sample with its tag."""
    with comet_experiment(tmp_path) as experiment:
        CometSink(experiment).write_text(3, {"note": "# ünïcode"})
    (file,) = read_experiment(tmp_path).files
    assert (file.kind, file.step, file.metadata, file.data.decode()) == ("text-sample", 3, {"tag": "note"}, "# ünïcode")


def test_files_and_graphs(tmp_path: Path) -> None:
    """Files and graphs are assets of the recorder; SVG is also a graphic, and HTML also a page."""
    sources = {"graph.svg": b"<svg/>", "page.html": b"<p>hi</p>", "b.bin": bytes(range(256))}
    for name, data in sources.items():
        (tmp_path / name).write_bytes(data)
    with comet_experiment(tmp_path / "run") as experiment:
        sink = CometSink(experiment)
        sink.write_files(3, {f"pictures/{name}": tmp_path / name for name in sources})
        sink.write_graph(3, {"graph": graph()})
    read = read_experiment(tmp_path / "run")
    assets = read.files_of("asset")
    made = assets.pop("recorder/graphs/graph-step3.json")
    assert {name: each.data for name, each in assets.items()} == {
        f"recorder/pictures/{name}": data for name, data in sources.items()
    }
    assert Graph.from_json(json.loads(made.data)) == graph()
    assert {name: each.data for name, each in read.files_of("visualization").items()} == {
        "recorder/pictures/graph.svg": b"<svg/>"
    }
    assert read.pages == ["<p>hi</p>"]
    assert {each.step for each in read.files} == {3}


def test_odd_tags_are_keys_of_their_own(tmp_path: Path) -> None:
    """Different tags have different keys; a tag of at most 100 characters is its own key."""
    with comet_experiment(tmp_path) as experiment:
        CometSink(experiment).write_scalars(3, {tag: float(place) for place, tag in enumerate(ODD_TAGS)})
    metrics = read_experiment(tmp_path).metrics
    assert sorted(metrics.values()) == [[(3, float(place))] for place in range(len(ODD_TAGS))]
    assert all(metrics[tag] == [(3, float(place))] for place, tag in enumerate(ODD_TAGS) if len(tag) <= 100)
    assert [key for key in metrics if key.startswith("activations/") and key.endswith("layer.fc/mean")]
    assert max(map(len, metrics)) == 100


def test_a_disabled_experiment_gives_one_warning(tmp_path: Path) -> None:
    """Lightning's ``online=False`` disables the experiment: one warning says so, and the files sink takes over."""
    logger = CometLogger(online=False, offline_directory=str(tmp_path))
    with pytest.warns(
        RecorderWarning, match=r"disabled and writes nothing.*online=False.*COMET_START_ONLINE=0"
    ) as warned:
        sinks = [sink_for_logger(logger), sink_for_logger(logger)]
    assert len(warned) == 1
    for sink in sinks:
        assert isinstance(sink, CometSink)
        assert not sink.write_scalars(3, {"a": 0.5})
        assert not sink.write_histograms(3, {"a": histogram()})
        assert not sink.write_images(3, {"a": picture()})
        assert not sink.write_text(3, {"a": "text"})
        assert not sink.write_files(3, {"a": Path(__file__)})
        assert not sink.write_graph(3, {"a": graph()})
        sink.close()
    assert list(tmp_path.iterdir()) == []


def test_closing_leaves_the_experiment_open(tmp_path: Path) -> None:
    """Closing the sink leaves the caller's experiment usable."""
    with comet_experiment(tmp_path) as experiment:
        CometSink(experiment).close()
        experiment.log_metric("loss", 0.5, step=4)
    assert read_experiment(tmp_path).metrics == {"loss": [(4, 0.5)]}


def test_as_the_logger_writes(tmp_path: Path) -> None:
    """The workaround named in the warning gives a logger that writes to the disk, with its prefix before each key."""
    logger = CometLogger(offline_directory=str(tmp_path), prefix="mine", **COMET_QUIET)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sink = sink_for_logger(logger)
    assert isinstance(sink, CometSink)
    logger.log_metrics({"loss": 1.0}, step=3)
    sink.write_scalars(3, {"a": 0.5})
    sink.write_histograms(3, {"h": histogram()})
    logger.experiment.end()
    read = read_experiment(tmp_path)
    assert read.metrics == {"mine_loss": [(3, 1.0)], "mine_a": [(3, 0.5)]}
    assert list(read.files_of("histogram3d")) == ["mine_h"]


@pytest.mark.slow
def test_in_a_fit(tmp_path: Path) -> None:
    """A fit writes the same values to Comet as to TensorBoard, and does not change ``self.log``."""
    logger, board = CometLogger(offline_directory=str(tmp_path), **COMET_QUIET), TensorBoardLogger(tmp_path)
    memory, model = MemorySink(), Classifier()
    outputs = Outputs(curves="all")
    recorder = ActivationRecorder(every_n_train_steps=1, sinks=[memory], functions=False, outputs=outputs)
    fit(model, tmp_path, [recorder], logger=[board, logger])
    logger.experiment.end()
    read = read_experiment(tmp_path)
    assert len(memory.scalars) == 6 * 6
    assert {tag: read.metrics[tag] for tag in memory.scalars} == {
        tag: list(steps.items()) for tag, steps in memory.scalars.items()
    }
    assert read.metrics["train_loss"] == [(step, model.losses[step].item()) for step in (1, 3, 5)]
    histograms = [each for each in read.files if each.kind == "histogram3d"]
    assert {(each.name, each.step) for each in histograms} == {
        (tag, step) for tag, steps in memory.histograms.items() for step in steps
    }
    for file in histograms:
        recorded = memory.histograms[file.name][int(file.step or 0)]
        bins = bins_of(file.data)
        assert sum(count for _, _, count in bins) == recorded.count
        negative = recorded.counts[recorded.edges[1:] <= 0].sum()
        assert sum(count for _, upper, count in bins if upper <= 0) == negative
    found = {
        event.step: event.value
        for event in read_events(Path(board.log_dir, "recorder")).Scalars("z_recorder/activations/head/rms")
    }
    assert found == {step: np.float32(value).item() for step, value in memory.scalars["activations/head/rms"].items()}
