"""Tests of the choice of sinks for Lightning's real loggers."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]  # it has no annotations
import pytest
import torch
import yaml  # type: ignore[import-untyped]  # its stubs are another package
from lightning.fabric.loggers.tensorboard import TensorBoardLogger as FabricTensorBoardLogger
from lightning.pytorch.loggers import CometLogger, CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger
from typing_extensions import override

from lightning_recorder import MemorySink, Sink, register_sink
from lightning_recorder.sinks import (
    CometSink,
    CsvSink,
    DeferredSink,
    LitLoggerSink,
    MetricsSink,
    MlflowSink,
    TensorBoardSink,
    WandbSink,
    loggers,
    sink_for_logger,
    sinks_for_loggers,
)
from tests.callbacks.models import fit
from tests.callbacks.test_copies import COPIES, KINDS, configured
from tests.sinks.back_ends import COMET_QUIET
from tests.sinks.events import read_events
from tests.sinks.lit_logger import lit_logger
from tests.sinks.samples import histogram


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo the registrations of a test."""
    monkeypatch.setattr(loggers, "_SINKS", dict(loggers._SINKS))


class Mine(Logger):
    """A logger that is known only by ``log_metrics``."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[tuple[dict[str, float], int | None]] = []

    @property
    @override
    def name(self) -> str:
        return "mine"

    @property
    @override
    def version(self) -> int:
        return 0

    @override
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.metrics.append((metrics, step))

    @override
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""


def test_tensorboard_logger(tmp_path: Path) -> None:
    """The recorder writes its own event file next to a TensorBoardLogger's, in a folder that is shown as a run."""
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({"loss": 1.0}, step=3)
    sink = sink_for_logger(logger)
    assert isinstance(sink, TensorBoardSink)
    sink.write_scalars(3, {"a": 0.5})
    sink.write_histograms(3, {"h": histogram()})
    sink.close()
    logger.log_metrics({"loss": 0.5}, step=4)
    logger.finalize("success")
    own = read_events(Path(logger.log_dir))
    assert [event.value for event in own.Scalars("loss")] == [1.0, 0.5]
    assert own.Tags()["histograms"] == []
    read = read_events(Path(logger.log_dir, "recorder"))
    assert read.Tags()["scalars"] == ["z_recorder/a"]
    assert [event.value for event in read.Scalars("z_recorder/a")] == [0.5]
    assert read.Histograms("z_recorder/h")[0].histogram_value.num == 4


def test_the_sinks_of_a_logger_share_an_event_file(tmp_path: Path) -> None:
    """All recorders of a run share one event file, since TensorBoard follows only one; a later run has another."""
    logger = TensorBoardLogger(tmp_path)
    folder = Path(logger.log_dir, "recorder")
    for run in range(2):
        sinks = [sink_for_logger(logger) for _ in range(3)]
        for place, sink in enumerate(sinks):
            assert sink is not None
            sink.write_scalars(run, {f"a{place}": 0.5})
        del sinks, sink
        assert len(list(folder.glob("events.*"))) == run + 1
    read = read_events(folder)
    assert [[event.step for event in read.Scalars(f"z_recorder/a{place}")] for place in range(3)] == [[0, 1]] * 3


@pytest.mark.parametrize("kind", [TensorBoardLogger, CSVLogger])
def test_a_remote_folder(kind: Any, tmp_path: Path) -> None:
    """A logger on a remote file system receives the supported kinds in its own file."""
    remote = fsspec.filesystem("memory")
    logger = kind(f"memory://{tmp_path}")
    sink = sink_for_logger(logger)
    assert sink is not None
    sink.write_scalars(3, {"a": 0.5})
    sink.flush()
    logger.finalize("success")
    paths = [path for path in remote.find(str(tmp_path)) if "events" in path or path.endswith(".csv")]
    (path,) = paths
    if kind is CSVLogger:
        assert remote.cat(path).split() == [b"a,step", b"0.5,3"]
    else:
        remote.get(path, str(tmp_path / Path(path).name))
        assert [event.value for event in read_events(tmp_path).Scalars("z_recorder/a")] == [0.5]


@pytest.mark.parametrize("base", [TensorBoardLogger, FabricTensorBoardLogger], ids=["pytorch", "fabric"])
def test_a_class_derived_from_a_known_one(base: type[Any], tmp_path: Path) -> None:
    """A logger is identified by its base classes, in both Lightning packages."""
    derived = type("OurLogger", (base,), {})
    assert isinstance(sink_for_logger(derived(tmp_path)), TensorBoardSink)


def test_csv_logger(tmp_path: Path) -> None:
    """A CSVLogger receives the scalars and nothing else."""
    logger = CSVLogger(tmp_path)
    sink = sink_for_logger(logger)
    assert isinstance(sink, CsvSink)
    assert sink.write_scalars(3, {"a": 0.5})
    assert not sink.write_histograms(3, {"h": histogram()})
    logger.finalize("success")
    assert Path(logger.log_dir, "recorder", "metrics.csv").read_text().split() == ["step,a", "3,0.5"]


def test_any_other_logger() -> None:
    """An unknown logger receives the scalars through ``log_metrics``."""
    logger = Mine()
    sink = sink_for_logger(logger)
    assert sink is not None
    assert sink.write_scalars(3, {"a": 0.5})
    assert logger.metrics == [({"a": 0.5}, 3)]


def other_loggers(folder: Path, database: str) -> dict[str, Any]:
    """Return the options for Lightning's loggers of services, set to write to the disk."""
    return {
        "WandbLogger": {"save_dir": folder, "mode": "disabled"},
        "MLFlowLogger": {"tracking_uri": database, "artifact_location": folder.as_uri()},
        "CometLogger": {"offline_directory": str(folder), **COMET_QUIET},
    }


@pytest.mark.parametrize("package", ["lightning.pytorch.loggers", "pytorch_lightning.loggers"])
@pytest.mark.parametrize(
    ("name", "kind"), [("WandbLogger", WandbSink), ("MLFlowLogger", MlflowSink), ("CometLogger", CometSink)]
)
def test_loggers_of_services(package: str, name: str, kind: type[Sink], tmp_path: Path, database: str) -> None:
    """The loggers of both packages and their subclasses have the sink of their service."""
    base = getattr(importlib.import_module(package), name)
    logger = type("Derived", (base,), {})(**other_loggers(tmp_path, database)[name])
    assert type(sink_for_logger(logger)) is kind
    if name == "CometLogger":
        logger.experiment.end()
    elif name == "WandbLogger":
        logger.experiment.finish()


def test_lit_logger(tmp_path: Path) -> None:
    """A LitLogger has its own sink."""
    assert type(sink_for_logger(lit_logger(tmp_path))) is LitLoggerSink


def test_a_neptune_logger() -> None:
    """A logger class named NeptuneLogger receives the scalars like any other; Lightning's own cannot be created."""
    logger = type("NeptuneLogger", (Mine,), {})()
    assert type(sink_for_logger(logger)) is MetricsSink


def test_dummy_logger() -> None:
    """The dummy logger of a fast_dev_run receives nothing."""
    assert sink_for_logger(DummyLogger()) is None
    assert sinks_for_loggers([DummyLogger(), DummyLogger()]) == []


def test_several_loggers(tmp_path: Path) -> None:
    """Each logger that is written to has a sink, in logger order."""
    sinks = sinks_for_loggers([CSVLogger(tmp_path), DummyLogger(), TensorBoardLogger(tmp_path), Mine()])
    assert [type(each.sink) for each in sinks] == [CsvSink, TensorBoardSink, DeferredSink]
    assert all(each.sink.any_thread for each in sinks)
    assert [each.folder for each in sinks] == [None, None, Path()]
    assert sinks_for_loggers([]) == []


class Ours(Sink):
    """A sink for a user-defined logger."""

    def __init__(self, logger: Any) -> None:
        self.logger = logger

    @override
    def write_text(self, step: int, texts: Mapping[str, str]) -> bool:
        return True


def test_a_registered_sink() -> None:
    """A registered logger class and its subclasses use the registered sink."""
    register_sink("Mine", Ours)
    logger = type("Derived", (Mine,), {})()
    sink = sink_for_logger(logger)
    assert isinstance(sink, Ours)
    assert sink.logger is logger


def test_the_nearest_class_counts(tmp_path: Path) -> None:
    """If a class and its base are both registered, the class wins."""
    memory = MemorySink()
    register_sink("OurTensorBoard", lambda logger: memory)
    derived = type("OurTensorBoard", (TensorBoardLogger,), {})
    assert sink_for_logger(derived(tmp_path)) is memory
    assert isinstance(sink_for_logger(TensorBoardLogger(tmp_path)), TensorBoardSink)


def test_registering_again_replaces(tmp_path: Path) -> None:
    """A built-in registration can be replaced, and a logger can be silenced."""
    register_sink("CSVLogger", lambda logger: None)
    assert sinks_for_loggers([CSVLogger(tmp_path)]) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("library", ["wandb", "mlflow", "comet"])
def test_callbacks_in_hyperparameters_survive_copies(
    library: str, kind: str, offline: Path, database: str, tmp_path: Path
) -> None:
    """In a fit with each library's logger, each callback in the hyperparameters can be copied in every way."""
    logger: Logger
    if library == "wandb":
        logger = WandbLogger(save_dir=tmp_path, offline=True)
    elif library == "mlflow":
        logger = MLFlowLogger(str(tmp_path), tracking_uri=database, artifact_location=(tmp_path / "files").as_uri())
    else:
        logger = CometLogger(offline_directory=str(tmp_path), **COMET_QUIET)
    callback, fresh = KINDS[kind](), yaml.dump(KINDS[kind]())
    copies: list[Any] = []
    model = configured([callback], lambda: copies.extend(duplicate(callback) for duplicate in COPIES.values()))
    fit(model, tmp_path, [callback], logger=logger, enable_checkpointing=True)
    logger.finalize("success")
    if library == "wandb":
        logger.experiment.finish()
    elif library == "comet":
        logger.experiment.end()
    assert len(copies) >= len(COPIES)
    assert {yaml.dump(each) for each in copies} == {fresh}
    bare = configured([])
    fit(bare, tmp_path / "bare", logger=False)
    assert torch.equal(torch.stack(model.losses), torch.stack(bare.losses))
