"""The mapping from Lightning loggers to sinks.

A logger is identified by the name of its class or of a base class, from `lightning.pytorch` or `pytorch_lightning`. For
an unknown logger, only ``log_metrics`` is used. ``NeptuneLogger`` has no sink of its own, because the service has been
shut down and Lightning's class raises on creation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lightning_recorder.sinks.background import for_any_thread
from lightning_recorder.sinks.base import Sink
from lightning_recorder.sinks.comet import CometSink
from lightning_recorder.sinks.csv import CsvSink
from lightning_recorder.sinks.metrics import LitLoggerSink, MetricsSink
from lightning_recorder.sinks.mlflow import MlflowSink
from lightning_recorder.sinks.multi import Destination
from lightning_recorder.sinks.tensorboard import PREFIX, TensorBoardSink
from lightning_recorder.sinks.wandb import WandbSink

__all__ = ["register_sink", "sink_for_logger", "sinks_for_loggers"]

_FOLDER = "recorder"  # the folder inside the folder of a run


def _tensorboard_sink(logger: Any) -> Sink:
    folder = _own_folder(logger)
    return TensorBoardSink(logger.experiment if folder is None else folder, prefix=PREFIX)


def _csv_sink(logger: Any) -> Sink:
    folder = _own_folder(logger)
    return CsvSink(logger if folder is None else folder / "metrics.csv")


def _own_folder(logger: Any) -> Path | None:
    """Return the recorder's folder inside the logger's ``log_dir``, or ``None`` on a remote file system.

    If possible, a sink writes to this folder instead of the logger's own file. In the logger's own file, the first disk
    error would end the thread of TensorBoard's writer. Then the user's ``self.log`` would raise.
    """
    log_dir = str(logger.log_dir)
    return None if "://" in log_dir else Path(log_dir, _FOLDER).absolute()


# Keyed by class name, because `lightning` and `pytorch_lightning` have different classes, and importing a logger class
# imports its back end. The Trainer has already read the attributes used here, so creating a sink starts no run.
_SINKS: dict[str, Callable[[Any], Sink | None]] = {
    "CSVLogger": _csv_sink,
    "CometLogger": lambda logger: CometSink(logger.experiment, prefix=_prefix(logger)),
    "LitLogger": LitLoggerSink,
    "MLFlowLogger": lambda logger: MlflowSink(logger.experiment, logger.run_id, prefix=_prefix(logger)),
    "TensorBoardLogger": _tensorboard_sink,
    "WandbLogger": lambda logger: WandbSink(logger.experiment, log=logger.log_metrics),
    # DummyLogger replaces the loggers in a fast_dev_run, which must not leave any output.
    "DummyLogger": lambda logger: None,
}


def _prefix(logger: Any) -> str:
    """Return the key prefix of a logger. The attribute is private because there is no public one."""
    return getattr(logger, "_prefix", None) or ""


def register_sink(logger_class: str, make: Callable[[Any], Sink | None]) -> None:
    """Register a sink factory for a logger class and the classes derived from it.

    Args:
        logger_class: The name of the class, such as ``"WandbLogger"``.
        make: A factory that takes the logger and returns the sink, or ``None`` to write nothing to the logger.
    """
    _SINKS[logger_class] = make


def sink_for_logger(logger: Any, *, known: bool = False) -> Sink | None:
    """Return the registered sink for a Lightning logger, or a :class:`MetricsSink` if there is none.

    Args:
        logger: The logger.
        known: If True, return ``None`` for a logger without a registered sink.
    """
    for base in type(logger).__mro__:
        if base.__name__ in _SINKS:
            return _SINKS[base.__name__](logger)
    return None if known else MetricsSink(logger)


def sinks_for_loggers(loggers: Iterable[Any], *, known: bool = False) -> list[Destination]:
    """Return a destination for each logger that has a sink. Any thread may write to these sinks.

    Args:
        loggers: The loggers.
        known: If True, leave out loggers without a registered sink, such as a logger that a program uses to keep its
            own results.

    Note:
        A sink that writes through its logger is skipped while the disk of the logger's ``save_dir`` is full.
    """
    sinks = [(logger, sink) for logger in loggers if (sink := sink_for_logger(logger, known=known)) is not None]
    return [Destination(for_any_thread(sink), _guarded_folder(sink, logger)) for logger, sink in sinks]


def _guarded_folder(sink: Sink, logger: Any) -> Path | None:
    """Return the local folder that the logger writes to.

    Return ``None`` if the folder is remote, or if the sink checks the free disk space itself.
    """
    if isinstance(sink, (TensorBoardSink, CsvSink)) and _own_folder(logger) is not None:
        return None  # the sink knows its path and the sizes of its writes
    save_dir = str(getattr(logger, "save_dir", None) or Path())
    return None if "://" in save_dir else Path(save_dir)
