"""The layout of a row, which is the state of the default statistics of one site.

A row begins with the states of :data:`PARTS`, followed by the counts of the histogram. If the histogram counts a sample
only, the last slot is the number of all values.

To add a default statistic, append a :class:`ScalarReduction` to :data:`PARTS` with the names of its slots. Recorders,
callbacks, record files, heat maps and loggers then include its statistics. Torch computes the new slots after a kernel
has computed the other slots. To make the new statistic as fast as the others, compute its slots in ``kernels/fused.c``
(for a CPU, as ``SLOT_<NAME>``) and in ``kernels/triton_kernels.py`` (for a GPU). When a kernel is loaded, its results
are compared with torch to find the parts that it does not compute.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from lightning_recorder.bins import BINS
from lightning_recorder.reductions.base import Reduction, ScalarReduction
from lightning_recorder.reductions.exponent_histogram import ExponentHistogram
from lightning_recorder.reductions.scalars import Extrema, RunningMoments, Tallies
from lightning_recorder.reductions.values import Values

__all__ = [
    "COUNT",
    "DEFAULT_STATISTICS",
    "DERIVED_STATISTICS",
    "HISTOGRAM",
    "LAYOUT",
    "M2",
    "MAX",
    "MEAN",
    "MIN",
    "PARTS",
    "SAMPLED_NUMEL",
    "SCALAR_STATISTICS",
    "SLOTS",
    "Part",
    "row_reductions",
]

PARTS: dict[type[ScalarReduction], tuple[str, ...]] = {
    RunningMoments: ("count", "mean", "m2"),
    Extrema: ("min", "max"),
    Tallies: ("numel", "zeros", "nans", "infinities"),
}
"""The reductions whose states form the first slots of a row, in order, with the names of their slots."""

DERIVED_STATISTICS = ("sum", "variance")
"""Statistics that are not recorded, because they can be computed from recorded statistics."""

_COUNTS = ("count", "nan_count", "inf_count")

SCALAR_STATISTICS = tuple(name for part in PARTS for name in part.statistics if name not in DERIVED_STATISTICS)
"""The names of the scalar statistics that recorders write by default."""

DEFAULT_STATISTICS = tuple(name for name in SCALAR_STATISTICS if name not in _COUNTS)
"""The statistics that callbacks show by default. Counts of NaN and infinities are shown once they are not zero."""

SLOTS = tuple(itertools.chain.from_iterable(PARTS.values()))
"""The names of the slots before the histogram, in order."""
COUNT, MEAN, M2, MIN, MAX = (SLOTS.index(name) for name in ("count", "mean", "m2", "min", "max"))
HISTOGRAM = len(SLOTS)
"""The first slot of the histogram."""
SAMPLED_NUMEL = HISTOGRAM + BINS
"""The slot for the number of all values, in rows whose histogram counts a sample."""


class Part(NamedTuple):
    """A reduction and its slots in a row."""

    reduction: ScalarReduction
    slots: slice

    def add(self, row: Tensor, values: Values) -> None:
        """Update the slots of a row with values in place."""
        self.reduction.add(row[self.slots], values)


LAYOUT = tuple(
    Part(part(), slice(SLOTS.index(names[0]), SLOTS.index(names[0]) + len(names))) for part, names in PARTS.items()
)
"""The reductions of :data:`PARTS` with their slots."""


def row_reductions(*, sample: int | None = None, quantiles: Iterable[float] = ()) -> list[Reduction]:
    """Return the reductions whose states form a row, with the arguments of :class:`ExponentHistogram`."""
    return [*(part() for part in PARTS), ExponentHistogram(sample=sample, quantiles=quantiles)]
