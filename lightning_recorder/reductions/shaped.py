"""Reductions with a state whose size depends on the shape of the tensor, and per-channel statistics."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self, override

from lightning_recorder.errors import ArgumentError, check_integer, check_number
from lightning_recorder.reductions.base import Reduction
from lightning_recorder.reductions.scalars import merged_moments
from lightning_recorder.reductions.values import Values, finite_or_zero

__all__ = [
    "ChannelExtrema",
    "ChannelMoments",
    "DeadChannels",
    "ShapedReduction",
    "check_dim",
    "check_unsharded",
    "dimension",
    "whole_dimension",
]


class ShapedReduction(Reduction):
    """Base class of reductions that keep numbers for each channel or element.

    The first tensor determines the shape of the state, and later tensors must match it. The state consists of leading
    numbers, usually one count, and one or more blocks of that shape. A ``DTensor`` is rejected if it is sharded along a
    dimension whose indices have separate numbers, because each rank has different indices.
    """

    blocks: ClassVar[int] = 1
    """Number of blocks: the number of values to keep for each element."""
    lead: ClassVar[int] = 1
    """Number of slots before the blocks."""

    def __init__(self) -> None:
        self.shape: tuple[int, ...] | None = None

    @abstractmethod
    def shape_of(self, values: Values) -> tuple[int, ...]:
        """Return the shape of one block of the state for the given values."""

    @abstractmethod
    def update_shaped(self, lead: Tensor, blocks: Tensor, values: Values) -> None:
        """Update the state, ``[lead]`` and ``[blocks, *shape]``, with values in place."""

    @property
    @override
    def width(self) -> int:  # type: ignore[override]  # read-only here, because the width follows from the shape
        """Number of float64 slots in the state; 0 before the first tensor."""
        return 0 if self.shape is None else self.lead + self.blocks * torch.Size(self.shape).numel()

    def parts(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of the lead, ``[..., lead]``, and of the blocks, ``[..., blocks, *shape]``, of states."""
        blocks = state[..., self.lead :]
        return state[..., : self.lead], blocks.unflatten(-1, (self.blocks, *(self.shape or ())))

    @property
    @override
    def is_sized(self) -> bool:
        return self.shape is not None

    @override
    def sized_for(self, values: Values) -> Self:
        if self.shape is not None:
            return self
        sized = copy.copy(self)
        sized.shape = self.shape_of(values)
        return sized

    @override
    def check(self, values: Values) -> None:
        shape = self.shape_of(values)
        if shape != self.shape:
            raise ArgumentError(
                f"{type(self).__name__} has numbers of shape {self.shape}, but the new shape is {shape}"
            )

    @override
    def update_state(self, state: Tensor, values: Values) -> None:
        self.check(values)
        self.update_shaped(*self.parts(state), values)

    @override
    def state_dict(self) -> dict[str, Tensor]:
        # Empty until the first tensor.
        return {} if self.shape is None else {**super().state_dict(), "shape": torch.tensor(self.shape, device="cpu")}

    @override
    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        if not state_dict:
            self.reset()
            return
        if "shape" not in state_dict:
            raise ArgumentError(f"the saved state of {self} must have a part 'shape', got {sorted(state_dict)}")
        shape = tuple(map(int, state_dict["shape"].tolist()))
        if self.shape not in (None, shape):
            raise ArgumentError(
                f"{type(self).__name__} has numbers of shape {self.shape}, but the saved ones have {shape}"
            )
        self._check_kind(state_dict)
        self.shape = shape
        super().load_state_dict(state_dict)

    @property
    @override
    def choices(self) -> dict[str, Any]:
        return {name: value for name, value in self.settings.items() if name != "shape"}

    def __repr__(self) -> str:
        kept = "" if self.shape is None else f" ({self.nbytes:,} bytes)"
        return super().__repr__() + kept


def check_dim(dim: object) -> int:
    """Return the dimension if it is an integer. Raise ArgumentError if ``dim`` is not an integer."""
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise ArgumentError(f"dim must be the number of a dimension, got {dim!r}")
    return dim


def dimension(dim: int, values: Values) -> int:
    """Return the non-negative index of a dimension.

    Raises:
        ArgumentError: If the tensor has no such dimension.
    """
    dims = values.plain.dim()
    if not -dims <= dim < dims:
        raise ArgumentError(f"a tensor of shape {tuple(values.plain.shape)} has no dimension {dim}; choose another dim")
    return dim % dims


def whole_dimension(dim: int, values: Values) -> int:
    """Return the non-negative index of a dimension whose indices must be the same on all ranks.

    Raises:
        ArgumentError: If the tensor has no such dimension, or if the dimension is sharded across ranks.
    """
    place = dimension(dim, values)
    check_unsharded(values.sharded_dims & {place})
    return place


def check_unsharded(dims: frozenset[int]) -> None:
    """Check that there are no sharded dimensions, because each rank has only some indices of a sharded dimension.

    Raises:
        ArgumentError: If there are sharded dimensions.
    """
    if dims:
        raise ArgumentError(f"each rank has other indices of dimension {min(dims)}, along which the tensor is sharded")


class _ChannelReduction(ShapedReduction):
    """Base class of statistics for each index of one dimension."""

    lead = 0
    additive = False

    def __init__(self, dim: int = 1, groups: int | None = None) -> None:
        super().__init__()
        self.dim = check_dim(dim)
        if groups is not None:
            check_integer("groups", groups, 1)
        self.groups = groups

    @override
    def shape_of(self, values: Values) -> tuple[int, ...]:
        channels = values.shaped.shape[whole_dimension(self.dim, values)]
        if self.groups is None:
            return (channels,)
        if channels % self.groups:
            raise ArgumentError(f"{channels} channels cannot be divided into {self.groups} equal groups")
        return (self.groups,)

    def _rows(self, values: Values) -> Tensor:
        """Return the values as ``[channels or groups, values per channel or group]``."""
        rows = values.shaped.movedim(dimension(self.dim, values), 0)
        rows = rows.reshape(len(rows), rows[:1].numel())
        return rows if self.groups is None else rows.reshape(self.groups, len(rows) // self.groups * rows.shape[1])


class ChannelMoments(_ChannelReduction):
    """Mean, standard deviation and root mean square of the finite values of each channel, in float64.

    State: ``[3, channels]`` with the count, the mean and the sum of squared deviations, 24 bytes per channel. States
    are merged as in :class:`~lightning_recorder.reductions.RunningMoments`, with the same error bounds. Statistics,
    each ``[channels]``: ``channel_mean``, ``channel_std`` (correction 0) and ``channel_rms``, which are NaN for a
    channel without a finite value.

    Args:
        dim: The channel dimension: 1 for convolutions and for linear layers on ``[batch, channels]``, -1 for the
            features of a transformer.
        groups: The number of equal groups of neighboring channels that are summarized together, such as the heads of
            an attention layer. The statistics then have the shape ``[groups]``. By default, each channel is a group.
    """

    blocks = 3
    statistics: tuple[str, ...] = ("channel_mean", "channel_std", "channel_rms")

    @override
    def update_shaped(self, lead: Tensor, blocks: Tensor, values: Values) -> None:
        rows = self._rows(values).double()
        count = rows.isfinite().sum(1).double()
        mean = finite_or_zero(rows).sum(1) / count.clamp(min=1)
        m2 = finite_or_zero(rows - mean[:, None]).square_().sum(1)
        blocks.copy_(torch.stack(merged_moments(blocks.unbind(-2), (count, mean, m2)), dim=-2))

    @override
    def merge_states(self, state: Tensor, other: Tensor) -> None:
        _, blocks = self.parts(state)
        _, others = self.parts(other)
        blocks.copy_(torch.stack(merged_moments(blocks.unbind(-2), others.unbind(-2)), dim=-2))

    @override
    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        count, mean, m2 = self.parts(state)[1].unbind(-2)
        variance = m2 / count
        mean = torch.where(count > 0, mean, torch.nan)
        return {
            "channel_mean": mean,
            "channel_std": variance.sqrt(),
            "channel_rms": (mean.square() + variance).sqrt(),
        }


class ChannelExtrema(_ChannelReduction):
    """Smallest and largest finite value of each channel.

    State: ``[2, channels]`` with the negated minimum and the maximum, -inf before the first finite value; 16 bytes per
    channel. States are merged by the maximum, which is exact in any order. Statistics, each ``[channels]``:
    ``channel_min``, ``channel_max`` and ``channel_abs_max``, the largest magnitude; NaN for a channel without a finite
    value. Channels with outliers make activations hard to quantize: `LLM.int8() <https://arxiv.org/abs/2208.07339>`_.

    Args:
        dim: The channel dimension, as for :class:`ChannelMoments`.
        groups: The number of groups of channels, as for :class:`ChannelMoments`.
    """

    blocks = 2
    statistics: tuple[str, ...] = ("channel_min", "channel_max", "channel_abs_max")

    @override
    def initial(self) -> Tensor:
        return torch.full((self.width,), -torch.inf, dtype=torch.float64, device="cpu")

    @override
    def update_shaped(self, lead: Tensor, blocks: Tensor, values: Values) -> None:
        rows = self._rows(values).double()
        if rows.shape[1]:
            known = rows.isfinite()
            found = torch.stack([torch.where(known, each, -torch.inf).amax(1) for each in (-rows, rows)])
            blocks.copy_(torch.maximum(blocks, found))

    @override
    def merge_states(self, state: Tensor, other: Tensor) -> None:
        state.copy_(torch.maximum(state, other))

    @override
    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        low, high = self.parts(state)[1].unbind(-2)
        is_known = high > -torch.inf
        low, high = (torch.where(is_known, each, torch.nan) for each in (-low, high))
        return {"channel_min": low, "channel_max": high, "channel_abs_max": torch.maximum(low.abs(), high.abs())}


class DeadChannels(_ChannelReduction):
    """Fraction of the channels that are always zero, such as those of a ``ReLU`` whose inputs are all negative.

    State: ``[channels]`` with the largest magnitude of each channel, -inf before the first value, 8 bytes per channel.
    States are merged by the maximum, which is exact in any order. Statistic: ``dead_fraction``, the fraction of the
    channels in which no magnitude in the whole stream exceeds the threshold; NaN for an empty stream. A channel with a
    NaN is not dead.

    Args:
        dim: The channel dimension, as for :class:`ChannelMoments`.
        threshold: The largest magnitude that a dead channel may have.
    """

    statistics: tuple[str, ...] = ("dead_fraction",)

    def __init__(self, dim: int = 1, threshold: float = 0.0) -> None:
        super().__init__(dim)
        check_number("threshold", threshold, 0.0)
        self.threshold = threshold

    @override
    def initial(self) -> Tensor:
        return torch.full((self.width,), -torch.inf, dtype=torch.float64, device="cpu")

    @override
    def update_shaped(self, lead: Tensor, blocks: Tensor, values: Values) -> None:
        rows = self._rows(values)
        if rows.shape[1]:
            # Replace NaN with infinity, because some maximum reductions across ranks drop NaN.
            sizes = torch.nan_to_num(rows.abs(), nan=torch.inf, posinf=torch.inf).amax(1)
            blocks[0] = torch.maximum(blocks[0], sizes)

    @override
    def merge_states(self, state: Tensor, other: Tensor) -> None:
        state.copy_(torch.maximum(state, other))

    @override
    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        seen = (state >= 0).sum(-1)
        dead = ((state >= 0) & (state <= self.threshold)).sum(-1)
        return {"dead_fraction": dead.double() / seen}
