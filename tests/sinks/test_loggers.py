"""Which sink serves which logger, with Lightning's real ones."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.loggers.tensorboard import TensorBoardLogger as FabricTensorBoardLogger
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from typing_extensions import override

from lightning_recorder import MemorySink, Sink, TensorBoardSink, register_sink
from lightning_recorder.sinks import (
    CometSink,
    CsvSink,
    LitLoggerSink,
    MetricsSink,
    MlflowSink,
    WandbSink,
    loggers,
    sink_for_logger,
    sinks_for_loggers,
)
from tests.sinks.back_ends import COMET_QUIET
from tests.sinks.events import read_events
from tests.sinks.lit_logger import lit_logger
from tests.sinks.samples import histogram


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(loggers, "_SINKS", dict(loggers._SINKS))


class Mine(Logger):
    """A logger of which nobody knows more than ``log_metrics``."""

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
        """Nothing."""


def test_tensorboard_logger(tmp_path: Path) -> None:
    """A TensorBoardLogger's own writer is written to, so that all is in its event file."""
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({"loss": 1.0}, step=3)
    sink = sink_for_logger(logger)
    assert isinstance(sink, TensorBoardSink)
    sink.write_scalars(3, {"a": 0.5})
    sink.write_histograms(3, {"h": histogram()})
    sink.close()
    logger.log_metrics({"loss": 0.5}, step=4)
    logger.finalize("success")
    read = read_events(Path(logger.log_dir))
    assert [event.value for event in read.Scalars("loss")] == [1.0, 0.5]
    assert [event.value for event in read.Scalars("a")] == [0.5]
    assert read.Histograms("h")[0].histogram_value.num == 4
    assert len(list(Path(logger.log_dir).glob("events.*"))) == 1


@pytest.mark.parametrize("base", [TensorBoardLogger, FabricTensorBoardLogger], ids=["pytorch", "fabric"])
def test_a_class_derived_from_a_known_one(base: type[Any], tmp_path: Path) -> None:
    """A logger is known by the classes that it is derived from, of whichever part of Lightning."""
    derived = type("OurLogger", (base,), {})
    assert isinstance(sink_for_logger(derived(tmp_path)), TensorBoardSink)


def test_csv_logger(tmp_path: Path) -> None:
    """A CSVLogger gets the scalars, and nothing that it cannot show."""
    logger = CSVLogger(tmp_path)
    sink = sink_for_logger(logger)
    assert isinstance(sink, CsvSink)
    assert sink.write_scalars(3, {"a": 0.5})
    assert not sink.write_histograms(3, {"h": histogram()})
    logger.finalize("success")
    assert Path(logger.log_dir, "metrics.csv").read_text().split() == ["a,step", "0.5,3"]


def test_any_other_logger() -> None:
    """A logger of which nothing is known gets the scalars through ``log_metrics``."""
    logger = Mine()
    sink = sink_for_logger(logger)
    assert sink is not None
    assert sink.write_scalars(3, {"a": 0.5})
    assert logger.metrics == [({"a": 0.5}, 3)]


def other_loggers(folder: Path, database: str) -> dict[str, Any]:
    """The options for Lightning's loggers of services, to write to the disk."""
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
    """The loggers of both packages, and those derived from them, have the sink of their service."""
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
    """Lightning's own cannot be made any more; a class of that name gets the scalars, like any other."""
    logger = type("NeptuneLogger", (Mine,), {})()
    assert type(sink_for_logger(logger)) is MetricsSink


def test_dummy_logger() -> None:
    """The stand-in of a fast_dev_run gets nothing."""
    assert sink_for_logger(DummyLogger()) is None
    assert sinks_for_loggers([DummyLogger(), DummyLogger()]) == []


def test_several_loggers(tmp_path: Path) -> None:
    """Each logger that shows anything has its sink, in the order of the loggers."""
    sinks = sinks_for_loggers([CSVLogger(tmp_path), DummyLogger(), TensorBoardLogger(tmp_path), Mine()])
    assert [type(sink) for sink in sinks] == [CsvSink, TensorBoardSink, MetricsSink]
    assert sinks_for_loggers([]) == []


class Ours(Sink):
    """A sink for a logger of one's own."""

    def __init__(self, logger: Any) -> None:
        self.logger = logger

    @override
    def write_text(self, step: int, texts: Mapping[str, str]) -> bool:
        return True


def test_a_registered_sink() -> None:
    """A logger of a registered class, or of one derived from it, is served by what was registered."""
    register_sink("Mine", Ours)
    logger = type("Derived", (Mine,), {})()
    sink = sink_for_logger(logger)
    assert isinstance(sink, Ours)
    assert sink.logger is logger


def test_the_nearest_class_counts(tmp_path: Path) -> None:
    """Where both a class and its base are known, the class decides."""
    memory = MemorySink()
    register_sink("OurTensorBoard", lambda logger: memory)
    derived = type("OurTensorBoard", (TensorBoardLogger,), {})
    assert sink_for_logger(derived(tmp_path)) is memory
    assert isinstance(sink_for_logger(TensorBoardLogger(tmp_path)), TensorBoardSink)


def test_registering_again_replaces(tmp_path: Path) -> None:
    """What the package registers can be replaced, and a logger silenced."""
    register_sink("CSVLogger", lambda logger: None)
    assert sinks_for_loggers([CSVLogger(tmp_path)]) == []
