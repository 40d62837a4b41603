"""Norms of a stream as one long vector."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from lightning_recorder.reductions.moments import sum_of_products
from lightning_recorder.reductions.scalar import ScalarReduction
from lightning_recorder.reductions.values import Values

__all__ = ["Norms"]


class Norms(ScalarReduction):
    """Largest magnitude, sum of magnitudes and Euclidean norm of the finite values, in float64.

    State: ``[abs_max, sum |x|, sum x**2]``, or ``[-inf, 0, 0]`` for an empty stream. Statistics: ``abs_max``, NaN for a
    stream without a finite value; ``l1_norm``, ``sum |x|``; ``l2_norm``, ``sqrt(sum x**2)``. The ``l2_norm`` is
    infinite with values above 1e154 and ignores values below 1e-154. The norms cover all values of the stream, so they
    grow with the number of batches. The ``rms`` of :class:`~lightning_recorder.reductions.RunningMoments` is the norm
    per value. The sums have a relative error of at most 1e-12, for any order of merging.
    """

    width = 3
    statistics: tuple[str, ...] = ("abs_max", "l1_norm", "l2_norm")
    additive = False

    @override
    def initial(self) -> Tensor:
        return torch.tensor([-torch.inf, 0, 0], dtype=torch.float64)

    @override
    def slots_of(self, values: Values) -> Sequence[Tensor]:
        sizes = values.finite.abs()
        # Zero replaces values that are not finite, which would be wrong only if there is no finite value.
        largest = torch.where(values.finite_count > 0, sizes.amax().double(), -torch.inf)
        return largest, sizes.sum(dtype=torch.float64), sum_of_products(values.doubles, values.doubles)

    @override
    def merge_states(self, state: Tensor, other: Tensor) -> None:
        state[..., 0] = torch.maximum(state[..., 0], other[..., 0])
        state[..., 1:] += other[..., 1:]

    @override
    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        largest, total, squares = state.unbind(-1)
        return {
            "abs_max": torch.where(largest >= 0, largest, torch.nan),
            "l1_norm": total,
            "l2_norm": squares.sqrt(),
        }
