"""The history that the rules read: the records of one kind of tensor, with the statistics that the rules need."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_recorder.records.history import Floats, History

__all__ = ["STATISTICS", "Floats", "Table"]

STATISTICS = (
    "count",
    "mean",
    "std",
    "rms",
    "min",
    "max",
    "zero_fraction",
    "nan_count",
    "inf_count",
    "update_ratio",
    "learning_rate",
    "weight_decay",
    "eval_mode",
)
"""The statistics and settings that the rules read."""


class Table(History):
    """A history of :data:`STATISTICS`."""

    def __init__(self, statistics: Sequence[str] = STATISTICS) -> None:
        super().__init__(statistics)
