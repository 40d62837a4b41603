"""The statistics that are recorded by default, as one reduction over one prepared tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from typing_extensions import override

from lightning_recorder.reductions.base import Reduction
from lightning_recorder.reductions.extrema import Extrema
from lightning_recorder.reductions.fused import add_statistics, prepare
from lightning_recorder.reductions.histogram import ExponentHistogram, Histogram
from lightning_recorder.reductions.moments import RunningMoments
from lightning_recorder.reductions.tallies import Tallies
from lightning_recorder.reductions.values import Values

__all__ = ["SCALAR_STATISTICS", "Statistics", "to_histogram"]

SCALAR_STATISTICS = ("count", "mean", "std", "rms", "min", "max", "zero_fraction", "nan_count", "inf_count")
"""Names of the statistics that are one number each."""


class Statistics(Reduction):
    """Moments, extrema, tallies and the exact histogram, side by side in one row of 2057 words (16.5 KB).

    Statistics: those of :class:`RunningMoments`, :class:`Extrema`, :class:`Tallies` and :class:`ExponentHistogram`,
    under the same names. On a CPU with a C compiler they are computed in one pass; see :func:`prepare`.

    Example:
        >>> statistics = Statistics()
        >>> statistics.update(torch.tensor([0.0, 1.0, 2.0, float("nan")]))
        >>> {name: round(float(value), 4) for name, value in statistics.compute().items() if name != "histogram"}
        {'count': 3.0, 'mean': 1.0, 'std': 0.8165, 'rms': 1.291, 'min': 0.0, 'max': 2.0, 'zero_fraction': 0.25,
        'nan_count': 1.0, 'inf_count': 0.0}
    """

    parts: tuple[type[Reduction], ...] = (RunningMoments, Extrema, Tallies, ExponentHistogram)
    width = sum(part.width for part in (RunningMoments, Extrema, Tallies, ExponentHistogram))

    def __init__(self, state: Tensor | None = None, *, device: torch.device | str | None = None) -> None:
        super().__init__(state, device=device)
        prepare()

    @classmethod
    def _split(cls, state: Tensor) -> list[tuple[type[Reduction], Tensor]]:
        return list(zip(cls.parts, state.split([part.width for part in cls.parts], dim=-1), strict=True))

    @classmethod
    @override
    def initial(cls) -> Tensor:
        return torch.cat([part.initial() for part in cls.parts])

    @classmethod
    @override
    def update_state(cls, state: Tensor, values: Values) -> None:
        # A subclass may have other parts than those that are computed in one pass.
        if cls is Statistics and add_statistics(state, values.tensor, values.factor):
            return
        for part, own in cls._split(state):
            part.update_state(own, values)

    @classmethod
    @override
    def merge_states(cls, state: Tensor, other: Tensor) -> None:
        for (part, own), (_, others) in zip(cls._split(state), cls._split(other), strict=True):
            part.merge_states(own, others)

    @classmethod
    @override
    def summarize(cls, state: Tensor) -> dict[str, Tensor]:
        return {name: value for part, own in cls._split(state) for name, value in part.summarize(own).items()}


def to_histogram(statistics: Mapping[str, Tensor]) -> Histogram:
    """The histogram of one site's statistics, on the host, as sinks take it.

    Args:
        statistics: What :meth:`Statistics.compute` gave, on the CPU.
    """
    edges, counts = ExponentHistogram.to_edges(statistics["histogram"].numpy())
    count, mean, rms = (float(statistics[name]) for name in ("count", "mean", "rms"))
    empty = math.isnan(mean)
    return Histogram(
        edges=edges,
        counts=counts,
        min=float(statistics["min"]),
        max=float(statistics["max"]),
        sum=0.0 if empty else mean * count,
        sum_squares=0.0 if empty else rms * rms * count,
    )
