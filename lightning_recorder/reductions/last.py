"""The last value of a stream."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from lightning_recorder.reductions.shaped import ShapedReduction, check_dim, dimension
from lightning_recorder.reductions.values import Values

__all__ = ["LastValue"]


class LastValue(ShapedReduction):
    """The last tensor of the stream, or its last sample.

    State: the number of updates and the values, 8 bytes each. The reduction is ordered: ``a.merge(b)`` has the last
    value of ``b``, if ``b`` is not empty. Statistic: ``last``, in the shape of the tensor, NaN for an empty stream.

    Args:
        dim: The dimension along which to record the last slice, which allows batches of any size. By default the whole
            tensor is recorded.
    """

    statistics: tuple[str, ...] = ("last",)
    additive = False
    ordered = True

    def __init__(self, dim: int | None = None) -> None:
        super().__init__()
        self.dim = None if dim is None else check_dim(dim)

    @override
    def shape_of(self, values: Values) -> tuple[int, ...]:
        shape = list(values.shaped.shape)
        if self.dim is not None:
            del shape[dimension(self.dim, values)]
        return tuple(shape)

    @override
    def update_shaped(self, lead: Tensor, blocks: Tensor, values: Values) -> None:
        last = values.shaped
        if self.dim is not None:
            dim = dimension(self.dim, values)
            if not last.shape[dim]:
                return
            last = last.select(dim, -1)
        lead += 1
        blocks[0] = last

    @override
    def merge_states(self, state: Tensor, other: Tensor) -> None:
        count = state[..., :1] + other[..., :1]
        state.copy_(torch.where(other[..., :1] > 0, other, state))
        state[..., :1] = count

    @override
    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        kept = torch.where(state[..., :1] > 0, state[..., 1:], torch.nan)
        return {"last": kept.reshape((*state.shape[:-1], *(self.shape or ())))}
