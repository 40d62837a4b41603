"""Which sink serves which of the trainer's loggers.

A logger is known by its class or one that it is derived from, of `lightning.pytorch` or `pytorch_lightning`; of one
that is not known nothing but ``log_metrics`` is used. That is also what serves a ``NeptuneLogger``, where there is one:
the service has ended, and Lightning's own class raises when it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from lightning_recorder.sinks.base import Sink
from lightning_recorder.sinks.comet import CometSink
from lightning_recorder.sinks.csv import CsvSink
from lightning_recorder.sinks.litlogger import LitLoggerSink
from lightning_recorder.sinks.metrics import MetricsSink
from lightning_recorder.sinks.mlflow import MlflowSink
from lightning_recorder.sinks.tensorboard import TensorBoardSink
from lightning_recorder.sinks.wandb import WandbSink

__all__ = ["register_sink", "sink_for_logger", "sinks_for_loggers"]

# By the name of a class and not by the class: `lightning` and `pytorch_lightning` have different ones, and importing a
# logger imports its back end. What is asked of a logger here the Trainer has asked before: no run begins for a sink.
_SINKS: dict[str, Callable[[Any], Sink | None]] = {
    "CSVLogger": CsvSink,
    "CometLogger": lambda logger: CometSink(logger.experiment, prefix=_prefix(logger)),
    "LitLogger": LitLoggerSink,
    "MLFlowLogger": lambda logger: MlflowSink(logger.experiment, logger.run_id, prefix=_prefix(logger)),
    "TensorBoardLogger": lambda logger: TensorBoardSink(logger.experiment),
    "WandbLogger": lambda logger: WandbSink(logger.experiment, log=logger.log_metrics),
    # Stands in for the loggers in a fast_dev_run, which is to leave nothing behind.
    "DummyLogger": lambda logger: None,
}


def _prefix(logger: Any) -> str:
    """What a logger puts before its keys: known to it alone, hence the private name."""
    return getattr(logger, "_prefix", None) or ""


def register_sink(logger_class: str, make: Callable[[Any], Sink | None]) -> None:
    """Serve loggers of a class, or of one derived from it, by a sink of one's own.

    Args:
        logger_class: The class's name, as ``"WandbLogger"``.
        make: Takes the logger and gives the sink, or ``None`` to write nothing to it.
    """
    _SINKS[logger_class] = make


def sink_for_logger(logger: Any) -> Sink | None:
    """The sink for one Lightning logger: the registered one, else its ``log_metrics``."""
    for base in type(logger).__mro__:
        if base.__name__ in _SINKS:
            return _SINKS[base.__name__](logger)
    return MetricsSink(logger)


def sinks_for_loggers(loggers: Iterable[Any]) -> list[Sink]:
    """One sink for each logger that shows anything."""
    return [sink for sink in map(sink_for_logger, loggers) if sink is not None]
