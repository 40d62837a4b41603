"""Reductions with one or more numbers for each element of a tensor or of a sample."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor
from typing_extensions import override

from lightning_recorder.reductions.shaped import ShapedReduction, check_dim, check_unsharded, dimension
from lightning_recorder.reductions.values import Values

__all__ = ["BatchMax", "BatchMean", "BatchMin", "BatchSum", "Change", "LastValue"]


class _BatchReduction(ShapedReduction):
    """Base class of elementwise statistics, with the number of samples and one number per element as the state."""

    def __init__(self, dim: int = 0) -> None:
        super().__init__()
        self.dim = check_dim(dim)

    @override
    def shape_of(self, values: Values) -> tuple[int, ...]:
        if values.sharded_dims:
            check_unsharded(values.sharded_dims - {dimension(self.dim, values)})
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
        """Update the numbers, ``[*shape]`` float64, with samples, ``[samples, *shape]``, in place."""

    @override
    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        return {self.statistics[0]: self._kept(state)}

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
    _merge: Callable[..., Tensor] = staticmethod(torch.minimum)
    _reduce: Callable[..., Tensor] = staticmethod(torch.amin)

    @override
    def initial(self) -> Tensor:
        state = torch.full((self.width,), self._empty, dtype=torch.float64, device="cpu")
        state[: self.lead] = 0
        return state

    @override
    def _take(self, kept: Tensor, samples: Tensor) -> None:
        kept.copy_(self._merge(kept, self._reduce(samples, 0)))

    @override
    def merge_states(self, state: Tensor, other: Tensor) -> None:
        state[..., 0] += other[..., 0]
        state[..., 1:] = self._merge(state[..., 1:], other[..., 1:])


class BatchMax(BatchMin):
    """Elementwise maximum over all samples, otherwise identical to :class:`BatchMin`.

    Statistic: ``batch_max``, ``[*shape]``; NaN for an empty stream and for elements with a NaN.

    Args:
        dim: The sample dimension.
    """

    statistics: tuple[str, ...] = ("batch_max",)
    _empty = -torch.inf
    _merge = staticmethod(torch.maximum)
    _reduce = staticmethod(torch.amax)


class LastValue(ShapedReduction):
    """The last tensor of the stream, or its last sample.

    State: the number of updates and the values, 8 bytes each. The reduction is ordered: ``a.merge(b)`` takes the last
    tensor of ``b`` unless ``b`` is empty. Statistic: ``last``, in the shape of the tensor, NaN for an empty stream.

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
        check_unsharded(values.sharded_dims)
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


class Change(ShapedReduction):
    """Direction and size of each tensor relative to the previous one, such as a gradient from step to step.

    State: ``[pairs, sum of cosines, sum of ratios, updates, carried]``, followed by the first and the last tensor, 16
    bytes per element. The reduction is ordered: ``a.merge(b)`` also counts the last tensor of ``a`` and the first
    tensor of ``b`` as a pair. When a recorder starts a new stream after a result, it keeps the last tensor as the
    predecessor of the next tensor, so that no pair is lost between results. When ranks are merged, the pairs of all
    ranks count, but tensors of different ranks are never paired. Each rank compares its own shard of a sharded tensor.
    Nonfinite values count as zero.

    Statistics, as means over all pairs of consecutive tensors ``p``, ``x``: ``cosine_to_previous`` is
    ``x . p / (|x| * |p|)``, between -1 and 1; ``ratio_to_previous`` is ``|x| / |p|``. Pairs with a zero norm are
    ignored. Both statistics are NaN if there is no pair. The squares of norms above 1e150 or below 1e-150 exceed the
    range of float64.
    """

    statistics: tuple[str, ...] = ("cosine_to_previous", "ratio_to_previous")
    additive = False
    ordered = True
    lead = 5
    blocks = 2

    @override
    def shape_of(self, values: Values) -> tuple[int, ...]:
        return tuple(values.shaped.shape)

    @override
    def update_shaped(self, lead: Tensor, blocks: Tensor, values: Values) -> None:
        single = torch.zeros_like(lead)
        single[3] = 1
        self._follow(lead, blocks.view(2, -1), single, values.doubles.expand(2, -1))

    @override
    def merge_states(self, state: Tensor, other: Tensor) -> None:
        self._follow(*self._flat(state), *self._flat(other))

    @override
    def merge_ranks(self, state: Tensor, other: Tensor) -> None:
        is_empty = state[..., 3:5].sum(-1, keepdim=True) == 0
        pairs = state[..., :4] + other[..., :4]
        state.copy_(torch.where(is_empty, other, state))  # keep the first and the last tensor of the lowest rank
        state[..., :4] = pairs

    @override
    def restart(self, state: Tensor) -> None:
        lead, (first, last) = self._flat(state)[0], self._flat(state)[1].unbind(-2)
        carried = (lead[..., 3:].sum(-1) > 0).double()
        lead.zero_()
        lead[..., 4] = carried
        first.copy_(last)

    @override
    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        pairs, cosines, ratios = state[..., :3].unbind(-1)
        return {"cosine_to_previous": cosines / pairs, "ratio_to_previous": ratios / pairs}

    def _flat(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of the lead, ``[..., 5]``, and of the first and last tensor, ``[..., 2, numel]``."""
        return state[..., : self.lead], state[..., self.lead :].unflatten(-1, (2, -1))

    @staticmethod
    def _follow(lead: Tensor, ends: Tensor, next_lead: Tensor, next_ends: Tensor) -> None:
        """Append the next stream to a stream, in place."""
        (_, last), (first, _) = ends.unbind(-2), next_ends.unbind(-2)
        there = (lead[..., 3:].sum(-1) > 0).double()
        there_next = (next_lead[..., 3:].sum(-1) > 0).double()
        norm, next_norm = (torch.linalg.vector_norm(each, dim=-1) for each in (last, first))
        # A carried tensor is the last tensor of the previous stream, so it must not be paired with itself.
        joined = (there > 0) & (next_lead[..., 3] > 0) & (next_lead[..., 4] == 0) & (norm > 0) & (next_norm > 0)
        cosine = ((last * first).sum(-1) / (norm * next_norm)).clamp(-1, 1)
        ratio = next_norm / norm
        pair = torch.stack((torch.ones_like(cosine), cosine, ratio), dim=-1)
        begin = torch.where(there[..., None] > 0, ends[..., 0, :], next_ends[..., 0, :])
        end = torch.where(there_next[..., None] > 0, next_ends[..., 1, :], ends[..., 1, :])
        ends.copy_(torch.stack((begin, end), dim=-2))
        carried = torch.where(there > 0, lead[..., 4], next_lead[..., 4])
        lead[..., :4] += next_lead[..., :4]
        lead[..., :3] += torch.where(joined[..., None], pair, 0)
        lead[..., 4] = carried
