"""Lightning's ``LitLogger`` with a stub for the network."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Series", "lit_logger"]


class Series:
    """A series of the experiment that keeps its values."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []

    def append(self, value: float, step: int) -> None:
        """Append a value."""
        self.points.append((step, value))


def lit_logger(folder: Path) -> Any:
    """Return the real logger class with a stub for the platform's experiment.

    ``litlogger.Experiment`` first asks the platform for a login, and ``log_file`` uploads a file; neither works
    offline. Logged files are in ``logged`` by path, with their contents at that time.
    """
    module = pytest.importorskip("lightning.pytorch.loggers.litlogger", reason="Lightning 2.6 is the first to have it")

    class Offline(module.LitLogger):  # type: ignore[name-defined,misc]  # known when the test runs
        @property
        def experiment(self) -> Any:
            return self._experiment

        def log_file(self, path: str) -> None:
            self.logged[path] = Path(path).read_bytes()

    logger: Any = Offline(root_dir=folder, name="run")
    logger._experiment = defaultdict(Series)
    logger.logged = {}
    return logger
