"""Tests of the MLflow sink, read back by the client from a store in SQLite and from a real server."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger
from PIL import Image

from lightning_recorder import ActivationRecorder, Graph, MemorySink, Outputs
from lightning_recorder.sinks import MlflowSink, sink_for_logger
from tests.callbacks.models import Classifier, fit
from tests.sinks.back_ends import mlflow_run
from tests.sinks.events import read_events
from tests.sinks.samples import ODD_TAGS, empty_histogram, graph, histogram, histogram_of, picture, same_value

Run = tuple[Any, str]


@pytest.fixture
def run(database: str, tmp_path: Path) -> Iterator[Run]:
    """Return a client and a run, whose artifacts are stored in ``artifacts``."""
    with mlflow_run(database, tmp_path / "artifacts") as run:
        yield run


def read_metrics(run: Run) -> dict[str, list[tuple[int, float]]]:
    client, run_id = run
    keys = client.get_run(run_id).data.metrics
    return {key: [(each.step, each.value) for each in client.get_metric_history(run_id, key)] for key in keys}


def artifacts(folder: Path) -> dict[str, bytes]:
    """Return the artifacts by their path in the run."""
    (root,) = folder.glob("artifacts/*/artifacts")
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def read_histograms(files: dict[str, bytes]) -> dict[str, dict[int, Any]]:
    """Return the histograms of all files by tag and step."""
    read: dict[str, dict[int, Any]] = {}
    for name, data in files.items():
        if found := re.fullmatch(r"recorder/histograms/[^/]+/step(\d{8})-[0-9a-f]{12}\.json", name):
            for tag, each in json.loads(data).items():
                read.setdefault(tag, {})[int(found[1])] = each
    return read


def test_scalars(run: Run) -> None:
    """Each scalar is a float64 metric under its tag and step; a repeated one is added as a second entry."""
    sink = MlflowSink(*run)
    sink.write_scalars(3, {"activations/fc/mean": 0.1, "b": -2.0})
    sink.write_scalars(3, {"b": 1e-310})
    sink.write_scalars(1, {"b": float(np.float32(0.1))})
    assert read_metrics(run)["activations/fc/mean"] == [(3, 0.1)]
    assert sorted(read_metrics(run)["b"]) == [(1, np.float32(0.1).item()), (3, -2.0), (3, 1e-310)]


def test_numbers_that_are_not_finite(run: Run) -> None:
    """NaN is read back as NaN, and an infinity as the largest float, as MLflow's database stores it."""
    MlflowSink(*run).write_scalars(3, {"a": math.nan, "b": math.inf, "c": -math.inf})
    largest = sys.float_info.max
    read = {key: value for key, ((_, value),) in read_metrics(run).items()}
    assert all(same_value(read[key], value) for key, value in {"a": math.nan, "b": largest, "c": -largest}.items())


def test_more_than_a_request_takes(run: Run) -> None:
    """More metrics than a request may have are written, with keys of the maximum length."""
    values = {f"activations/{'layer.' * 38}{place:04d}": float(place) for place in range(2345)}
    assert {len(tag) for tag in values} == {244}
    MlflowSink(*run).write_scalars(3, values)
    client, run_id = run
    assert client.get_run(run_id).data.metrics == values


def test_odd_tags_are_keys_of_their_own(run: Run, tmp_path: Path) -> None:
    """Every tag is accepted, different tags have different keys, and a tag that MLflow accepts is its own key."""
    sink = MlflowSink(*run)
    sink.write_scalars(3, {tag: float(place) for place, tag in enumerate(ODD_TAGS)})
    sink.write_images(3, {tag: picture(place) for place, tag in enumerate(ODD_TAGS)})
    read = read_metrics(run)
    assert sorted(points for points in read.values()) == [[(3, float(place))] for place in range(len(ODD_TAGS))]
    for tag in ("activations/lstm/out_1__0_/mean", "a b/c  d", "step"):
        assert read[tag] == [(3, float(ODD_TAGS.index(tag)))]
    assert read["activations/lstm/out_1__0_-ce91dbe7ee59/mean"] == [(3, 0.0)]
    assert all(re.fullmatch(r"[A-Za-z0-9_. \-/]{1,250}", key) for key in read)
    images = [name for name in artifacts(tmp_path) if name.startswith("images/") and name.endswith(".png")]
    assert len({name.partition("+")[0] for name in images}) == len(ODD_TAGS)


def test_the_prefix_of_the_logger(run: Run) -> None:
    """The prefix precedes each key, as in the logger."""
    MlflowSink(*run, prefix="mine").write_scalars(3, {"a": 0.5})
    assert read_metrics(run) == {"mine-a": [(3, 0.5)]}


def test_histograms(run: Run, tmp_path: Path) -> None:
    """The histograms of a call are one file with the edges and counts of each tag."""
    sink = MlflowSink(*run)
    sink.write_histograms(3, {"activations/h": histogram(), "activations/none": empty_histogram()})
    sink.write_histograms(3, {"activations/other": histogram()})
    sink.write_histograms(12, {"gradients/h[0]": histogram()})
    files = artifacts(tmp_path)
    assert sorted(name.rpartition("/")[0] for name in files) == ["recorder/histograms/activations"] * 2 + [
        "recorder/histograms/gradients"
    ]
    read = read_histograms(files)
    assert {tag: list(steps) for tag, steps in read.items()} == {
        "activations/h": [3],
        "activations/none": [3],
        "activations/other": [3],
        "gradients/h[0]": [12],
    }
    assert read["activations/h"][3] == {
        "edges": [-2.0, 0.0, 1.0, 4.0],
        "counts": [1, 2, 1],
        "min": -1.5,
        "max": 3.0,
        "sum": 2.5,
        "sum_squares": 11.75,
        "fraction": 1.0,
    }
    assert read["activations/none"][3]["min"] == "nan"


def test_a_histogram_with_many_bins(run: Run, tmp_path: Path) -> None:
    """A histogram with more bins is merged to 64; the cumulative count at each remaining edge is unchanged."""
    fine = histogram_of(np.random.default_rng(0).normal(size=100_000))
    MlflowSink(*run).write_histograms(3, {"h": fine})
    read = read_histograms(artifacts(tmp_path))["h"][3]
    below = dict(zip(fine.edges[1:].tolist(), np.cumsum(fine.counts).tolist(), strict=True))
    assert len(read["counts"]) == 64
    assert np.cumsum(read["counts"]).tolist() == [below[edge] for edge in read["edges"][1:]]


def test_images(run: Run, tmp_path: Path) -> None:
    """An image is a logged image with a step slider and the same pixels, and also a file with its name."""
    sink = MlflowSink(*run)
    sink.write_images(3, {"maps/conv1": picture(1)})
    sink.write_images(4, {"maps/conv1": picture(2)})
    plain = tmp_path.glob("artifacts/**/recorder/images/maps/*.png")
    assert sorted(path.name for path in plain) == ["conv1-step3.png", "conv1-step4.png"]
    files = sorted(path for path in tmp_path.glob("artifacts/**/*+*.png"))
    assert [path.name.split("+")[:3] for path in files] == [["maps~conv1", "step", "3"], ["maps~conv1", "step", "4"]]
    for path, seed in zip(files, (1, 2), strict=True):
        with Image.open(path) as read:
            assert np.array_equal(np.asarray(read), picture(seed))
    client, run_id = run
    assert client.get_run(run_id).data.tags["mlflow.loggedImages"] == "True"


def test_texts_files_and_graphs(run: Run, tmp_path: Path) -> None:
    """Texts, files and graphs are artifacts in folders of the recorder, byte for byte."""
    source = tmp_path / "source.bin"
    source.write_bytes(bytes(range(256)))
    sink = MlflowSink(*run)
    sink.write_text(3, {"group/note": "# ünïcode"})
    sink.write_files(3, {"pictures/graph.svg": source, "b.bin": source})
    sink.write_graph(3, {"graph": graph()})
    files = artifacts(tmp_path)
    assert set(files) == {
        "recorder/texts/group/note-step3.md",
        "recorder/pictures/graph.svg",
        "recorder/b.bin",
        "recorder/graphs/graph-step3.json",
    }
    assert files["recorder/texts/group/note-step3.md"].decode() == "# ünïcode"
    assert files["recorder/b.bin"] == files["recorder/pictures/graph.svg"] == bytes(range(256))
    assert Graph.from_json(json.loads(files["recorder/graphs/graph-step3.json"])) == graph()


def test_two_threads(run: Run) -> None:
    """While the training thread logs, all writes of both threads arrive."""
    client, run_id = run
    sink = MlflowSink(client, run_id)

    def write() -> None:
        for step in range(25):
            sink.write_scalars(step, {f"a/{place}": float(step) for place in range(20)})

    thread = threading.Thread(target=write)
    thread.start()
    for step in range(25):
        client.log_metric(run_id, "loss", -float(step), step=step)
    thread.join()
    read = read_metrics(run)
    assert sorted(read["loss"]) == [(step, -float(step)) for step in range(25)]
    assert all(sorted(read[f"a/{place}"]) == [(step, float(step)) for step in range(25)] for place in range(20))
    assert len(read) == 21


def test_what_the_store_raises(database: str, tmp_path: Path) -> None:
    """An error of the store reaches the caller."""
    from mlflow.exceptions import MlflowException

    with mlflow_run(database, tmp_path / "artifacts") as (client, _):
        sink = MlflowSink(client, "0" * 32)
        with pytest.raises(MlflowException, match="not found"):
            sink.write_scalars(3, {"a": 0.5})


def test_closing_leaves_the_run_open(run: Run) -> None:
    """Closing the sink leaves the caller's run usable."""
    client, run_id = run
    MlflowSink(client, run_id).close()
    assert client.get_run(run_id).info.status == "RUNNING"


def check_a_fit(logger: MLFlowLogger, folder: Path) -> dict[str, dict[int, Any]]:
    """Train with the logger and TensorBoard, check that each number is there once, and return the histograms."""
    memory, model = MemorySink(), Classifier()
    outputs = Outputs(curves="all")
    recorder = ActivationRecorder(every_n_train_steps=1, sinks=[memory], functions=False, outputs=outputs)
    board = TensorBoardLogger(folder)
    fit(model, folder, [recorder], logger=[logger, board])
    assert isinstance(sink_for_logger(logger), MlflowSink)
    read = read_metrics((logger.experiment, str(logger.run_id)))
    assert len(memory.scalars) == 6 * 6
    assert {tag: read[tag] for tag in memory.scalars} == {
        tag: list(steps.items()) for tag, steps in memory.scalars.items()
    }
    assert read["train_loss"] == [(step, model.losses[step].item()) for step in (1, 3, 5)]
    assert set(read) == {*memory.scalars, "watch/loss", "watch/grad_norm", "train_loss", "epoch"}
    found = {
        event.step: event.value
        for event in read_events(Path(board.log_dir, "recorder")).Scalars("z_recorder/activations/head/rms")
    }
    assert found == {step: np.float32(value).item() for step, value in memory.scalars["activations/head/rms"].items()}
    return {tag: dict(steps) for tag, steps in memory.histograms.items()}


def check_histograms(recorded: dict[str, dict[int, Any]], read: dict[str, dict[int, Any]]) -> None:
    drawn = {tag: {step: each.coarsened(64) for step, each in steps.items()} for tag, steps in recorded.items()}
    assert {
        tag: {step: (each["edges"], each["counts"]) for step, each in sorted(steps.items())}
        for tag, steps in read.items()
    } == {
        tag: {step: (each.edges.tolist(), each.counts.tolist()) for step, each in steps.items()}
        for tag, steps in drawn.items()
    }


@pytest.mark.slow
def test_in_a_fit(database: str, tmp_path: Path) -> None:
    """A fit writes the same numbers to MLflow as to TensorBoard, and does not change ``self.log``."""
    location = (tmp_path / "artifacts").as_uri()
    logger = MLFlowLogger(str(tmp_path), tracking_uri=database, artifact_location=location)
    recorded = check_a_fit(logger, tmp_path)
    check_histograms(recorded, read_histograms(artifacts(tmp_path)))


def wait_for(address: str, server: subprocess.Popen[bytes]) -> None:
    for _ in range(1200):
        assert server.poll() is None, "the server has ended"
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.1)
    raise AssertionError("the server does not answer")


@pytest.fixture
def server(database: str, tmp_path: Path) -> Iterator[str]:
    """Return the URL of a server that stores everything in the folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", database, "--workers", "1"]
    command += ["--artifacts-destination", str(tmp_path / "artifacts"), "--host", "127.0.0.1", "--port", port]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # saves seven processes
    with (tmp_path / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=tmp_path, env=environment, start_new_session=True
        )
        try:
            wait_for(f"http://127.0.0.1:{port}", process)
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # including its workers, which are in the same process group
            process.wait(timeout=30)


@pytest.mark.slow
def test_over_http(server: str, tmp_path: Path) -> None:
    """A real server receives the same as SQLite: numbers, odd tags, images and artifacts."""
    import mlflow

    logger = MLFlowLogger("over http", tracking_uri=server)
    recorded = check_a_fit(logger, tmp_path)
    run_id = str(logger.run_id)
    sink = MlflowSink(logger.experiment, run_id)
    sink.write_scalars(3, {tag: float(place) for place, tag in enumerate(ODD_TAGS)})
    sink.write_scalars(4, {f"many/{'layer.' * 40}{place:04d}": float(place) for place in range(1500)})
    sink.write_histograms(3, dict.fromkeys(ODD_TAGS, histogram()))
    sink.write_images(3, dict.fromkeys(ODD_TAGS, picture(1)))
    sink.write_text(3, dict.fromkeys(ODD_TAGS, "**text**"))
    sink.write_graph(3, dict.fromkeys(ODD_TAGS, graph()))
    source = tmp_path / "source.bin"
    source.write_bytes(bytes(range(256)))
    sink.write_files(3, {"pictures/graph.svg": source})

    found = logger.experiment.get_run(run_id).data.metrics
    assert sum(key.startswith("many/") for key in found) == 1500
    assert set(map(float, range(len(ODD_TAGS)))) <= set(found.values())
    folder = Path(
        mlflow.artifacts.download_artifacts(run_id=run_id, dst_path=str(tmp_path / "read"), tracking_uri=server)
    )
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    read = read_histograms(files)
    assert set(read) == {*recorded, *ODD_TAGS}
    check_histograms(recorded, {tag: read[tag] for tag in recorded})
    assert files["recorder/pictures/graph.svg"] == bytes(range(256))
    texts = [name for name in files if name.startswith("recorder/texts/")]
    receipts = [name for name in texts if "receipt" in name]
    assert len(receipts) == 2, receipts  # after the first record and after the fit
    assert len(texts) == len(ODD_TAGS) + len(receipts)
    assert sum(name.startswith("recorder/graphs/") for name in files) == len(ODD_TAGS)
    assert sum("+step+3+" in name and name.endswith(".png") for name in files) == len(ODD_TAGS)
