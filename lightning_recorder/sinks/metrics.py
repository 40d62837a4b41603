"""A sink for loggers that support only ``log_metrics``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from typing_extensions import override

from lightning_recorder.sinks.base import Sink

__all__ = ["MetricsLogger", "MetricsSink"]


class MetricsLogger(Protocol):
    """Any object with the ``log_metrics`` method of Lightning's loggers."""

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Log numbers by name."""


class MetricsSink(Sink):
    """Write scalars through ``log_metrics``, which every Lightning logger has. Other kinds are not supported.

    Args:
        logger: The logger. The sink does not close it.
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
        # A CSV logger buffers its rows until save() is called; not every logger has that method.
        save = getattr(self._logger, "save", None)
        if callable(save):
            save()
