"""Which sink serves which of the trainer's loggers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from lightning_recorder.sinks.base import Sink
from lightning_recorder.sinks.metrics import MetricsSink
from lightning_recorder.sinks.tensorboard import TensorBoardSink

__all__ = ["register_sink", "sink_for_logger", "sinks_for_loggers"]

# By the name of a class and not by the class: `lightning` and `pytorch_lightning` have different ones, and importing a
# logger imports its back end.
_SINKS: dict[str, Callable[[Any], Sink | None]] = {
    "TensorBoardLogger": lambda logger: TensorBoardSink(logger.experiment),
    # Stands in for the loggers in a fast_dev_run, which is to leave nothing behind.
    "DummyLogger": lambda logger: None,
}


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
