"""Extrema: the smallest and the largest value of a stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from lightning_recorder.reductions.scalar import ScalarReduction
from lightning_recorder.reductions.values import Values

__all__ = ["Extrema"]

_INF = float("inf")


class Extrema(ScalarReduction):
    """Minimum and maximum of the finite values.

    State: ``[min, max]``, or ``[inf, -inf]`` for an empty stream. Statistics: ``min`` and ``max``, both NaN for a
    stream without a finite value. States are merged by ``minimum`` and ``maximum``, which is exact in any order.
    """

    width = 2
    statistics: tuple[str, ...] = ("min", "max")
    additive = False

    @override
    def initial(self) -> Tensor:
        return torch.tensor([_INF, -_INF], dtype=torch.float64)

    @override
    def slots_of(self, values: Values) -> Sequence[Tensor]:
        low = torch.nan_to_num(values.flat, nan=_INF, posinf=_INF, neginf=_INF).amin()
        high = torch.nan_to_num(values.flat, nan=-_INF, posinf=-_INF, neginf=-_INF).amax()
        return low, high

    @override
    def merge_states(self, state: Tensor, other: Tensor) -> None:
        state[..., 0] = torch.minimum(state[..., 0], other[..., 0])
        state[..., 1] = torch.maximum(state[..., 1], other[..., 1])

    @override
    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        finite = torch.where(state.isfinite(), state, torch.nan)
        return {"min": finite[..., 0], "max": finite[..., 1]}
