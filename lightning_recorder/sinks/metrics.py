"""A sink for loggers that are known by ``log_metrics`` alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from typing_extensions import override

from lightning_recorder.sinks.base import Sink

__all__ = ["MetricsLogger", "MetricsSink"]


class MetricsLogger(Protocol):
    """Anything with the ``log_metrics`` of Lightning's loggers."""

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Take numbers by name."""


class MetricsSink(Sink):
    """Writes scalars through ``log_metrics``, which every Lightning logger has, and supports nothing else.

    Args:
        logger: The logger; it stays the trainer's.
    """

    def __init__(self, logger: MetricsLogger) -> None:
        self._logger = logger

    def __str__(self) -> str:
        return f"{type(self).__name__}({type(self._logger).__name__})"

    @override
    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> bool:
        self._logger.log_metrics(dict(scalars), step)
        return True

    @override
    def flush(self) -> None:
        # A CSV logger keeps its rows until it is told to save them; not every logger has that.
        save = getattr(self._logger, "save", None)
        if callable(save):
            save()
