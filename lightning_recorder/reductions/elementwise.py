"""Elementwise statistics over all samples."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor
from typing_extensions import override

from lightning_recorder.reductions.shaped import ShapedReduction, check_dim, dimension
from lightning_recorder.reductions.values import Values

__all__ = ["BatchMax", "BatchMean", "BatchMin", "BatchSum"]


class _BatchReduction(ShapedReduction):
    """Base class of elementwise statistics, with the number of samples and one number per element as the state.

    Args:
        dim: The sample dimension.
    """

    def __init__(self, dim: int = 0) -> None:
        super().__init__()
        self.dim = check_dim(dim)

    @override
    def shape_of(self, values: Values) -> tuple[int, ...]:
        return tuple(self._samples(values).shape[1:])

    def _samples(self, values: Values) -> Tensor:
        """Return the values as ``[samples, *shape]``. A 0-d tensor is one sample."""
        if values.plain.dim() == 0:
            return values.shaped[None]
        return values.shaped.movedim(dimension(self.dim, values), 0)

    @override
    def update_shaped(self, lead: Tensor, blocks: Tensor, values: Values) -> None:
        samples = self._samples(values)
        if len(samples):
            lead += len(samples)
            self._take(blocks[0], samples)

    @abstractmethod
    def _take(self, kept: Tensor, samples: Tensor) -> None:
        """Update ``[*shape]`` float64 with ``[samples, *shape]``, in place."""

    def _kept(self, state: Tensor) -> Tensor:
        """Return the number of each element, ``[..., *shape]``; NaN if there was no sample."""
        kept = torch.where(state[..., :1] > 0, state[..., 1:], torch.nan)
        return kept.reshape((*state.shape[:-1], *(self.shape or ())))


class BatchSum(_BatchReduction):
    """Elementwise sum over all samples, in float64.

    State: the number of samples and ``[*shape]`` sums, 8 bytes per element. States are merged by addition. Statistic:
    ``batch_sum``, ``[*shape]``, where ``shape`` is the shape of one sample; NaN for an empty stream. NaN and infinities
    propagate to the sum of their element.

    Args:
        dim: The sample dimension.
    """

    statistics: tuple[str, ...] = ("batch_sum",)

    @override
    def _take(self, kept: Tensor, samples: Tensor) -> None:
        kept += samples.sum(0, dtype=torch.float64)

    @override
    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        return {"batch_sum": self._kept(state)}


class BatchMean(BatchSum):
    """Elementwise mean over all samples, in float64. Every sample has the same weight, whatever its batch size.

    State: the same as for :class:`BatchSum`. Statistic: ``batch_mean``, ``[*shape]``, the sums divided by the number of
    samples; NaN for an empty stream. NaN and infinities propagate to the mean of their element.

    Args:
        dim: The sample dimension.

    Example:
        >>> mean = BatchMean()
        >>> mean.update(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> mean.update(torch.tensor([[8.0, 9.0]]))
        >>> mean.compute()["batch_mean"].tolist()
        [4.0, 5.0]
    """

    statistics: tuple[str, ...] = ("batch_mean",)

    @override
    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        samples = state[..., 0].reshape(state.shape[:-1] + (1,) * len(self.shape or ()))
        return {"batch_mean": self._kept(state) / samples}


class BatchMin(_BatchReduction):
    """Elementwise minimum over all samples.

    State: the number of samples and ``[*shape]`` minima, 8 bytes per element. States are merged by the minimum, which
    is exact in any order. Statistic: ``batch_min``, ``[*shape]``; NaN for an empty stream and for elements with a NaN.

    Args:
        dim: The sample dimension.
    """

    statistics: tuple[str, ...] = ("batch_min",)
    additive = False
    _empty = torch.inf

    @override
    def initial(self) -> Tensor:
        state = torch.full((self.width,), self._empty, dtype=torch.float64)
        state[: self.lead] = 0
        return state

    @override
    def _take(self, kept: Tensor, samples: Tensor) -> None:
        kept.copy_(torch.minimum(kept, samples.amin(0)))

    @override
    def merge_states(self, state: Tensor, other: Tensor) -> None:
        state[..., 0] += other[..., 0]
        state[..., 1:] = torch.minimum(state[..., 1:], other[..., 1:])

    @override
    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        return {"batch_min": self._kept(state)}


class BatchMax(BatchMin):
    """Elementwise maximum over all samples, otherwise identical to :class:`BatchMin`.

    Statistic: ``batch_max``, ``[*shape]``; NaN for an empty stream and for elements with a NaN.

    Args:
        dim: The sample dimension.
    """

    statistics: tuple[str, ...] = ("batch_max",)
    _empty = -torch.inf

    @override
    def _take(self, kept: Tensor, samples: Tensor) -> None:
        kept.copy_(torch.maximum(kept, samples.amax(0)))

    @override
    def merge_states(self, state: Tensor, other: Tensor) -> None:
        state[..., 0] += other[..., 0]
        state[..., 1:] = torch.maximum(state[..., 1:], other[..., 1:])

    @override
    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        return {"batch_max": self._kept(state)}
