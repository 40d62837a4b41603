"""Tests of the W&B sink, based on the files of an offline run."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from PIL import Image

from lightning_recorder import ActivationRecorder, Graph, MemorySink, Outputs, open_recording
from lightning_recorder.reductions import Histogram
from lightning_recorder.sinks import WandbSink, sink_for_logger
from tests.callbacks.models import Classifier, fit
from tests.sinks.back_ends import wandb_run
from tests.sinks.events import read_events
from tests.sinks.samples import ODD_TAGS, empty_histogram, graph, histogram, histogram_of, picture, same_value
from tests.sinks.wandb_files import read_history, read_records, saved_files

pytestmark = pytest.mark.usefixtures("offline")

AXIS = "trainer/global_step"


@pytest.fixture
def logger(tmp_path: Path) -> Iterator[WandbLogger]:
    """Return Lightning's own logger with a key prefix."""
    logger = WandbLogger(save_dir=tmp_path, offline=True, prefix="mine")
    yield logger
    logger.experiment.finish()


def test_each_verb_is_one_row(tmp_path: Path) -> None:
    """Each call is one row of the history, with its step on the axis of Lightning's logger."""
    with wandb_run(tmp_path) as run, WandbSink(run) as sink:
        sink.write_scalars(3, {"activations/fc/mean": 0.1, "b": -2.0})
        sink.write_scalars(3, {"b": 1e-310})
        sink.write_histograms(1, {"h": histogram(), "none": empty_histogram(), "other": histogram()})
        sink.write_scalars(4, {})
    rows = read_history(tmp_path)
    assert rows[:2] == [{"activations/fc/mean": 0.1, "b": -2.0, AXIS: 3}, {"b": 1e-310, AXIS: 3}]
    drawn = {"_type": "histogram", "values": [1, 2, 1], "bins": [-2.0, 0.0, 1.0, 4.0]}
    assert rows[2:] == [{"h": drawn, "other": drawn, AXIS: 1}]


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    """NaN and infinities are read back unchanged."""
    values = {"a": math.nan, "b": math.inf, "c": -math.inf}
    with wandb_run(tmp_path) as run:
        WandbSink(run).write_scalars(3, values)
    (row,) = read_history(tmp_path)
    assert all(same_value(float(row[tag]), value) for tag, value in values.items())


def test_a_histogram_with_many_bins(tmp_path: Path) -> None:
    """A histogram with more bins is merged to 64; the cumulative count at each remaining edge is unchanged."""
    fine = histogram_of(np.random.default_rng(0).normal(size=100_000))
    with wandb_run(tmp_path) as run:
        WandbSink(run).write_histograms(3, {"h": fine})
    (row,) = read_history(tmp_path)
    assert len(row["h"]["values"]) == 64
    below = dict(zip(fine.edges[1:].tolist(), np.cumsum(fine.counts).tolist(), strict=True))
    assert row["h"]["bins"][0] == fine.edges[0]
    assert np.cumsum(row["h"]["values"]).tolist() == [below[edge] for edge in row["h"]["bins"][1:]]


def test_images(tmp_path: Path) -> None:
    """An image is a file of the run with the same pixels, and its row refers to it."""
    with wandb_run(tmp_path) as run:
        WandbSink(run).write_images(3, {"graph": picture(1), "maps/conv1": picture(2)})
    (row,) = read_history(tmp_path)
    saved = saved_files(tmp_path)
    assert row[AXIS] == 3
    (files,) = tmp_path.rglob("files")
    for tag, seed in (("graph", 1), ("maps/conv1", 2)):
        assert (row[tag]["_type"], row[tag]["width"], row[tag]["height"]) == ("image-file", 9, 6)
        assert row[tag]["path"] in saved
        with Image.open(files / row[tag]["path"]) as read:
            assert np.array_equal(np.asarray(read.convert("RGB")), picture(seed))


def test_texts(tmp_path: Path) -> None:
    """A text is a panel that shows its Markdown source, with any HTML escaped."""
    with wandb_run(tmp_path) as run:
        WandbSink(run).write_text(3, {"note": "# ünïcode\n| a | <b> |"})
    (row,) = read_history(tmp_path)
    page = saved_files(tmp_path)[row["note"]["path"]].decode()
    assert row["note"]["_type"] == "html-file"
    assert '<pre style="white-space: pre-wrap"># ünïcode\n| a | &lt;b&gt; |</pre>' in page
    assert "://" not in page


def test_files(tmp_path: Path) -> None:
    """A file is copied to the run byte for byte, even if it changes later; SVG and HTML are also panels."""
    svg, data = tmp_path / "a.svg", tmp_path / "b.bin"
    svg.write_text("<svg>ü</svg>", encoding="utf-8")
    data.write_bytes(bytes(range(256)))
    with wandb_run(tmp_path / "run") as run:
        WandbSink(run).write_files(3, {"pictures/graph[0].svg": svg, "b.bin": data})
        data.unlink()
    saved = saved_files(tmp_path)
    assert saved["recorder/pictures/graph[0].svg"] == svg.read_bytes()
    assert saved["recorder/b.bin"] == bytes(range(256))
    (row,) = read_history(tmp_path)
    assert set(row) == {"recorder/pictures/graph[0].svg", AXIS}
    assert "<svg>ü</svg>" in saved[row["recorder/pictures/graph[0].svg"]["path"]].decode()


def test_graphs(tmp_path: Path) -> None:
    """A graph is a JSON file of the run, from which it can be rebuilt."""
    with wandb_run(tmp_path) as run:
        WandbSink(run).write_graph(3, {"graph": graph()})
    assert Graph.from_json(json.loads(saved_files(tmp_path)["recorder/graphs/graph-step3.json"])) == graph()
    assert read_history(tmp_path) == []


def test_odd_tags(tmp_path: Path) -> None:
    """Scalars keep their tags as keys, and different images have different keys."""
    with wandb_run(tmp_path) as run:
        sink = WandbSink(run)
        sink.write_scalars(3, {tag: float(place) for place, tag in enumerate(ODD_TAGS)})
        sink.write_images(4, {tag: picture(place) for place, tag in enumerate(ODD_TAGS)})
    scalars, images = read_history(tmp_path)
    assert scalars == {**{tag: float(place) for place, tag in enumerate(ODD_TAGS)}, AXIS: 3}
    assert len(images) == len(ODD_TAGS) + 1
    (files,) = tmp_path.rglob("files")
    assert all(
        (files / each["path"]).resolve().is_relative_to(files.resolve()) for each in images.values() if each != 4
    )


def test_rows_of_threads_do_not_mix(tmp_path: Path) -> None:
    """While other threads write to the run, each row has the values of one call, and none is lost."""

    def write(name: str) -> None:
        for step in range(100):
            sink.write_scalars(step, {f"{name}/a": float(step), f"{name}/b": -float(step)})
            sink.write_histograms(
                step, {f"{name}/h": Histogram(np.array([0.0, 1.0]), np.array([step + 1]), 0, 1, 1, 1)}
            )

    with wandb_run(tmp_path) as run:
        sink = WandbSink(run)
        threads = [threading.Thread(target=write, args=(name,)) for name in ("x", "y", "z")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    rows = read_history(tmp_path)
    for name in ("x", "y", "z"):
        own = [row for row in rows if f"{name}/a" in row or f"{name}/h" in row]
        assert own[::2] == [{f"{name}/a": float(step), f"{name}/b": -float(step), AXIS: step} for step in range(100)]
        assert [(row[f"{name}/h"]["values"], row[AXIS]) for row in own[1::2]] == [
            ([step + 1], step) for step in range(100)
        ]
    assert len(rows) == 600


def test_closing_leaves_the_run_open(tmp_path: Path) -> None:
    """Closing the sink leaves the caller's run usable."""
    with wandb_run(tmp_path) as run:
        WandbSink(run).close()
        run.log({"loss": 0.5})
    assert read_history(tmp_path) == [{"loss": 0.5}]


@pytest.mark.parametrize("verb", ["argument", "environment"])
def test_a_disabled_run(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disabled W&B run writes nothing and returns False, so that the files sink takes over."""
    import wandb

    if verb == "environment":
        monkeypatch.setenv("WANDB_MODE", "disabled")
        wandb.teardown()  # it has read the environment before
    with wandb_run(tmp_path, **({"mode": "disabled"} if verb == "argument" else {})) as run:
        sink = WandbSink(run)
        assert not sink.write_scalars(3, {"a": 0.5})
        assert not sink.write_histograms(3, {"a": histogram()})
        assert not sink.write_images(3, {"a": picture()})
        assert not sink.write_text(3, {"a": "text"})
        assert not sink.write_files(3, {"a": Path(__file__)})
        assert not sink.write_graph(3, {"a": graph()})
        sink.close()
    wandb.teardown()
    assert list(tmp_path.rglob("*.wandb")) == []


def test_a_finished_run_raises(tmp_path: Path) -> None:
    """An error of W&B reaches the caller."""
    import wandb

    with wandb_run(tmp_path) as run:
        run.finish()
        with pytest.raises(wandb.Error, match="finished"):
            WandbSink(run).write_scalars(3, {"a": 0.5})


def test_as_the_logger_writes(logger: WandbLogger, tmp_path: Path) -> None:
    """The sink's rows have the same axis and prefix as the logger's own rows."""
    sink = sink_for_logger(logger)
    assert isinstance(sink, WandbSink)
    logger.log_metrics({"loss": 1.0}, step=3)
    sink.write_scalars(3, {"a": 0.5})
    sink.write_histograms(3, {"h": histogram()})
    logger.experiment.finish()
    own, scalars, histograms = read_history(tmp_path)
    assert own == {"mine-loss": 1.0, AXIS: 3}
    assert scalars == {"mine-a": 0.5, AXIS: 3}
    assert set(histograms) == {"mine-h", AXIS}
    metrics = [record.metric for record in read_records(tmp_path) if record.WhichOneof("record_type") == "metric"]
    assert AXIS in {metric.step_metric for metric in metrics if metric.glob_name == "*"}


@pytest.mark.slow
def test_in_a_fit(tmp_path: Path) -> None:
    """A fit writes the same numbers to W&B as to TensorBoard, and does not change ``self.log``."""
    wandb_logger = WandbLogger(save_dir=tmp_path, offline=True)
    memory, model = MemorySink(), Classifier()
    outputs = Outputs(curves="all")
    recorder = ActivationRecorder(every_n_train_steps=1, sinks=[memory], functions=False, outputs=outputs)
    board = TensorBoardLogger(tmp_path)
    fit(model, tmp_path, [recorder], logger=[board, wandb_logger])
    wandb_logger.experiment.finish()
    rows = read_history(tmp_path)
    read: dict[str, dict[int, Any]] = {}
    for row in rows:
        for tag in row:
            read.setdefault(tag, {})[row[AXIS]] = row[tag]
    assert len(memory.scalars) == 6 * 6
    assert {tag: read[tag] for tag in memory.scalars} == memory.scalars
    assert all(list(steps) == list(range(6)) for steps in memory.scalars.values())
    for tag, steps in memory.histograms.items():
        drawn = {step: each.coarsened(64) for step, each in steps.items()}
        assert {step: value["values"] for step, value in read[tag].items()} == {
            step: each.counts.tolist() for step, each in drawn.items()
        }
        assert all(value["bins"] == drawn[step].edges.tolist() for step, value in read[tag].items())
    assert read["train_loss"] == {step: model.losses[step].item() for step in (1, 3, 5)}
    # One row for the scalars and one for the histograms of a step.
    assert sum(any(tag.startswith("activations/") for tag in row) for row in rows) == 2 * 6
    found = {
        event.step: event.value
        for event in read_events(Path(board.log_dir, "recorder")).Scalars("z_recorder/activations/head/rms")
    }
    assert found == {step: np.float32(value).item() for step, value in memory.scalars["activations/head/rms"].items()}


def test_each_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    """Two runs of loggers that share a folder leave two recordings, each next to the checkpoints of its run."""
    folders = []
    for _ in range(2):
        logger = WandbLogger(save_dir=tmp_path, offline=True, project="mine")
        fit(
            Classifier(),
            tmp_path,
            [ActivationRecorder(outputs=Outputs(plots=False))],
            logger=logger,
            enable_checkpointing=True,
        )
        folders.append(tmp_path / "mine" / str(logger.version))
        logger.experiment.finish()
    assert sorted(open_recording(tmp_path)) == sorted(f"mine/{folder.name}" for folder in folders)
    assert [sorted(path.name for path in folder.iterdir()) for folder in folders] == [["checkpoints", "recorder"]] * 2
