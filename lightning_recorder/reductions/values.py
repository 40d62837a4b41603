"""A tensor made ready to be reduced, with the intermediate results that several reductions share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_recorder.reductions.plain import as_plain

__all__ = [
    "BINS",
    "BIN_SHIFT",
    "Values",
    "bins_of",
    "count_bins",
    "count_where",
    "finite_or_zero",
    "finite_or_zero_",
    "sample_places",
]

_FLOAT32_MAX = torch.finfo(torch.float32).max
BIN_SHIFT = 21
"""Drops all but sign, exponent and the first two bits of the mantissa of a float32."""
BINS = 1 << (32 - BIN_SHIFT)
# Values of which the temporaries of the passes fit into a cache of a CPU, and on a GPU into 128 MiB.
_PIECE = {"cpu": 1 << 18}
_LARGE_PIECE = 1 << 24
# Most values of a tensor fall into a hundred bins, and threads of a GPU that add to the same number wait for each
# other.
_COPIES = {"cuda": 64}


class Values:
    """The real values of one tensor: widened, flat, and each shared pass over them made at most once.

    Args:
        raw: Any tensor. Half precision is widened to float32 first; integers and booleans become float64, which holds
            them exactly up to 2**53; a complex tensor counts as its real and imaginary parts. Of a ``DTensor`` the
            local part counts, and sparse, quantised and nested tensors as :func:`as_plain` makes them dense.
        factor: A number by which the values are multiplied, such as the inverse of a loss scale.

    Note:
        Nothing here waits for the device or has a shape that depends on data, so it runs on ``meta`` tensors and inside
        a CUDA graph.
    """

    def __init__(self, raw: Tensor, factor: float = 1.0) -> None:
        self.raw = raw
        self.factor = factor

    @cached_property
    def plain(self) -> Tensor:
        """The tensor as a plain dense one, of its own type."""
        return as_plain(self.raw)

    @cached_property
    def real(self) -> Tensor:
        """The tensor as a plain dense one of real numbers, of its own type; a complex one has ``[..., 2]``."""
        tensor = self.plain
        return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor

    @cached_property
    def shaped(self) -> Tensor:
        """The values in the shape of :attr:`real`, widened and multiplied, float32 or float64."""
        return self._widened(self.real)

    def _widened(self, tensor: Tensor) -> Tensor:
        tensor = tensor.resolve_neg()
        if not tensor.is_floating_point():
            tensor = tensor.double()
        elif tensor.dtype not in (torch.float32, torch.float64):
            tensor = tensor.float()
        return tensor if self.factor == 1.0 else tensor * self.factor

    @cached_property
    def flat(self) -> Tensor:
        """The values of :attr:`shaped`, ``[numel]`` float32 or float64."""
        return self.shaped.reshape(-1)

    @cached_property
    def numel(self) -> int:
        """How many real values there are."""
        return self.real.numel()

    def pieces(self) -> Iterator[Values]:
        """The values in pieces, in order, so small that what a pass needs beside them stays bounded."""
        size = _PIECE.get(self.raw.device.type, _LARGE_PIECE)
        if self.raw.numel() <= size:
            yield self
            return
        for piece in self.real.reshape(-1).split(size):
            yield Values(piece, self.factor)

    def sampled(self, most: int) -> Tensor:
        """No more than ``most`` of the values of :attr:`flat`: all, or those at :func:`sample_places`."""
        if self.numel <= most:
            return self.flat
        # Without waiting for what the device is doing, as a plain copy to it would.
        return self.at(torch.from_numpy(sample_places(self.numel, most)).to(self.real.device, non_blocking=True))

    def at(self, places: Tensor) -> Tensor:
        """The values at those places of :attr:`flat`, ``[k]``."""
        return self._widened(self.real.reshape(-1).index_select(0, places))

    @cached_property
    def finite(self) -> Tensor:
        """The values with zero in place of every NaN and infinity, ``[numel]``."""
        return finite_or_zero(self.flat)

    @cached_property
    def doubles(self) -> Tensor:
        """The finite values as float64, ``[numel]``, with zero in place of the others."""
        return self.finite.double()

    @cached_property
    def nan_count(self) -> Tensor:
        """Number of NaN, 0-d."""
        return self._count(torch.ne, self.flat)

    @cached_property
    def zero_count(self) -> Tensor:
        """Number of values equal to zero, of either sign, 0-d."""
        return self._count(torch.eq, 0)

    @cached_property
    def finite_count(self) -> Tensor:
        """Number of the other values, 0-d."""
        return torch.rsub(self.nonfinite_count, self.numel)

    @cached_property
    def nonfinite_count(self) -> Tensor:
        """Number of NaN and infinities, 0-d."""
        return self._count(torch.ne, self.finite)

    def _count(self, comparison: Callable[..., Tensor], other: Tensor | float) -> Tensor:
        return count_where(comparison, self.flat, other, self._scratch)

    @cached_property
    def _scratch(self) -> Tensor:
        return torch.empty_like(self.flat)


def sample_places(numel: int, most: int) -> NDArray[np.int64]:
    """Places of a sample of values, ascending, ``[most]``: one in each of as many parts, by chance, always the same.

    Places at equal distances would meet the same channels again and again.

    Args:
        numel: Number of the values, more than ``most``.
        most: Positive.
    """
    return (_kept_places if most <= _FEW_PLACES else _places)(numel, most)


def _places(numel: int, most: int) -> NDArray[np.int64]:
    bounds = np.arange(most + 1, dtype=np.int64) * numel // most
    return bounds[:-1] + (np.random.default_rng(0).random(most) * np.diff(bounds)).astype(np.int64)


# The same sizes come again at each step; for 64 of them no more than 8 MiB are kept.
_kept_places = lru_cache(maxsize=64)(_places)
_FEW_PLACES = 1 << 14


def count_bins(counts: Tensor, values: Tensor, *, copies: int | None = None) -> None:
    """Add the number of values per bin to counts.

    Args:
        counts: ``[2048 or more]`` float64.
        values: ``[numel]`` float32 or float64.
        copies: Into how many copies of the bins neighbouring values are counted; by default one, on a GPU several.
    """
    index = bins_of(values)
    if copies is None:
        copies = _COPIES.get(values.device.type, 1)
    # index_add_ and not bincount: bincount looks at the largest value first, which makes a GPU wait and fails on meta
    # tensors. Whole numbers are exact in whatever order they are added.
    one = counts.new_ones(1).expand(values.numel())
    if copies == 1:
        counts.index_add_(0, index, one)
        return
    index += (torch.arange(values.numel(), dtype=torch.int32, device=values.device) % copies) * BINS
    several = counts.new_zeros(copies * BINS).index_add_(0, index, one)
    counts[:BINS].add_(several.view(copies, BINS).sum(0))


def bins_of(values: Tensor) -> Tensor:
    """The bins of values, ``[numel]`` int32: the upper eleven bits of each as a float32.

    A finite float64 beyond the range of float32 goes to the end bin of its sign and one too small for it to the bin of
    its signed zero.

    Args:
        values: ``[numel]`` float32 or float64.
    """
    if values.dtype == torch.float64:
        values = torch.where(values.isfinite(), values.clamp(-_FLOAT32_MAX, _FLOAT32_MAX), values).float()
    return (values.contiguous().view(torch.int32) >> BIN_SHIFT) & (BINS - 1)


def finite_or_zero(values: Tensor) -> Tensor:
    """The values with zero in place of every NaN and infinity."""
    return torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)


def finite_or_zero_(values: Tensor) -> Tensor:
    """The same in place."""
    return torch.nan_to_num_(values, nan=0.0, posinf=0.0, neginf=0.0)


def count_where(
    comparison: Callable[..., Tensor], values: Tensor, other: Tensor | float, scratch: Tensor | None = None
) -> Tensor:
    """For how many values the comparison with the other ones holds, 0-d.

    Args:
        comparison: One of torch's, such as ``torch.ne``.
        values: ``[numel]`` floats.
        other: What they are compared with, value by value.
        scratch: ``[numel]`` of the same type, which is overwritten.
    """
    # Into floats, since comparisons into booleans are not vectorised on the CPU and take four times as long.
    holds = comparison(values, other, out=torch.empty_like(values) if scratch is None else scratch)
    # Whole numbers up to there are exact in float32, in whatever order they are added.
    return holds.dot(holds) if holds.numel() <= 1 << 24 else holds.sum(dtype=torch.float64)
