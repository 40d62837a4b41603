"""How many values of a stream are zero, NaN or infinite."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from lightning_recorder.reductions.base import Reduction
from lightning_recorder.reductions.values import Values

__all__ = ["Tallies"]


class Tallies(Reduction):
    """Share of zeros and number of NaN and infinities among all values.

    State: ``[numel, zeros, nans, infinities]``. Statistics: ``zero_fraction``, zeros of either sign over all values,
    NaN for an empty stream; ``nan_count``; ``inf_count``, of either sign. Merging is addition of integers, exact in any
    order.
    """

    width = 4

    @classmethod
    @override
    def initial(cls) -> Tensor:
        return torch.zeros(cls.width, dtype=torch.float64)

    @classmethod
    @override
    def update_state(cls, state: Tensor, values: Values) -> None:
        nans = values.nan_count
        state[0] += values.numel
        state[1:] += torch.stack((values.zero_count, nans, values.nonfinite_count - nans))

    @classmethod
    @override
    def merge_states(cls, state: Tensor, other: Tensor) -> None:
        state += other

    @classmethod
    @override
    def summarize(cls, state: Tensor) -> dict[str, Tensor]:
        numel, zeros, nans, infinities = state.unbind(-1)
        return {"zero_fraction": zeros / numel, "nan_count": nans, "inf_count": infinities}
