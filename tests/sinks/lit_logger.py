"""Lightning's LitLogger as far as it goes without a network."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Series", "lit_logger"]


class Series:
    """A series of the experiment, which keeps what it is given."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []

    def append(self, value: float, step: int) -> None:
        """Take a number."""
        self.points.append((step, value))


def lit_logger(folder: Path) -> Any:
    """The real class, with all that it does to metrics, where the experiment of the platform would begin replaced.

    ``litlogger.Experiment`` asks the platform for a login before anything else, and ``log_file`` hands a file to it;
    neither can be run offline. The files that are logged are in ``logged``, by path, with their contents at that time.
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
