"""The values of one tensor, prepared for reductions, with cached intermediate results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_recorder.bins import BIN_SHIFT, BINS
from lightning_recorder.errors import ArgumentError

__all__ = [
    "PLAIN_TYPES",
    "Values",
    "as_plain",
    "bins_of",
    "count_bins",
    "count_where",
    "finite_or_zero",
    "finite_or_zero_",
    "is_dense",
    "sample_places",
]

PLAIN_TYPES = (Tensor, nn.Parameter)
"""The tensor classes that store their values in their own memory. Subclasses may store them differently."""

_MOST_DENSE = 1 << 28  # the largest numel of a sparse tensor that is made dense: 1 GiB of float32


def as_plain(tensor: Tensor) -> Tensor:
    """Return the values of a tensor as a dense strided tensor, which shares its memory if possible.

    A ``DTensor`` is replaced by its local shard. A nested tensor is replaced by its concatenated values. A quantized
    tensor is dequantized. A sparse tensor is converted to a dense tensor, zeros included.

    Raises:
        ArgumentError: If a sparse tensor is so large that its dense copy could take memory that the training needs.
    """
    # A DTensor is recognized without importing torch.distributed.tensor.
    if type(tensor) not in PLAIN_TYPES and hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.is_nested:
        # If there are gaps between the nested parts, as after torch.nested.narrow, values() includes the gaps.
        lengths: Any = getattr(tensor, "lengths", lambda: None)()
        tensor = torch.cat([part.flatten() for part in tensor.unbind()]) if lengths is not None else tensor.values()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout != torch.strided:
        if tensor.numel() > _MOST_DENSE:
            size = "×".join(map(str, tensor.shape))
            raise ArgumentError(f"a sparse tensor of {size} would become dense; exclude it")
        tensor = tensor.to_dense()
    return tensor


_FLOAT32_MAX = torch.finfo(torch.float32).max
# The temporaries for this many values fit into a CPU cache, or into 128 MiB on a GPU.
_PIECE = {"cpu": 1 << 18}
_LARGE_PIECE = 1 << 24
# The number of copies of the bins. Most values of a tensor fall into about a hundred bins, and GPU threads that add to
# the same bin wait for each other.
_COPIES = {"cuda": 64}


class Values:
    """The real values of one tensor, widened and flat. Intermediate results that reductions share are computed once.

    Args:
        raw: Any tensor. Half precision is widened to float32. Integers and booleans become float64, which is exact up
            to 2**53. A complex tensor is treated as its real and imaginary parts. A ``DTensor`` is replaced by its
            local shard. Sparse, quantized and nested tensors are made dense by :func:`as_plain`.
        factor: A number by which the values are multiplied, such as the inverse of a loss scale.

    Note:
        No operation synchronizes the device or has a data-dependent shape, so ``meta`` tensors and CUDA graphs are
        supported.
    """

    def __init__(self, raw: Tensor, factor: float = 1.0) -> None:
        self.raw = raw
        self.factor = factor

    @cached_property
    def plain(self) -> Tensor:
        """The tensor as a plain dense tensor of its own dtype."""
        return as_plain(self.raw)

    @cached_property
    def real(self) -> Tensor:
        """The tensor as a plain dense tensor of real numbers. A complex tensor gets the shape ``[..., 2]``."""
        tensor = self.plain
        return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor

    @cached_property
    def shaped(self) -> Tensor:
        """The values in the shape of :attr:`real`, widened to float32 or float64 and multiplied by the factor."""
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
    def sharded_dims(self) -> frozenset[int]:
        """The dimensions of a ``DTensor`` that are sharded across processes."""
        raw: Any = self.raw
        if type(raw) in PLAIN_TYPES or not hasattr(raw, "placements"):
            return frozenset()
        ranks = zip(raw.placements, raw.device_mesh.shape, strict=True)
        return frozenset(each.dim for each, size in ranks if each.is_shard() and size > 1)

    @cached_property
    def numel(self) -> int:
        """Number of real values."""
        return self.real.numel()

    def pieces(self) -> Iterator[Values]:
        """Yield the values in order, in pieces small enough to bound the memory for temporaries."""
        size = _PIECE.get(self.raw.device.type, _LARGE_PIECE)
        if self.raw.numel() <= size:
            yield self
            return
        for piece in self.real.reshape(-1).split(size):
            yield Values(piece, self.factor)

    def sampled(self, most: int) -> Tensor:
        """Return at most ``most`` values of :attr:`flat`: all values, or the values at :func:`sample_places`."""
        if self.numel <= most:
            return self.flat
        # A blocking copy would synchronize the device.
        return self.at(torch.from_numpy(sample_places(self.numel, most)).to(self.real.device, non_blocking=True))

    def at(self, places: Tensor) -> Tensor:
        """Return the values at the given places of :attr:`flat`, ``[k]``."""
        return self._widened(self.real.reshape(-1).index_select(0, places))

    @cached_property
    def finite(self) -> Tensor:
        """The values with every NaN and infinity replaced by zero, ``[numel]``."""
        return finite_or_zero(self.flat)

    @cached_property
    def doubles(self) -> Tensor:
        """The values as float64 with every NaN and infinity replaced by zero, ``[numel]``."""
        return self.finite.double()

    @cached_property
    def nan_count(self) -> Tensor:
        """Number of NaN values, 0-d."""
        return self._count(torch.ne, self.flat)

    @cached_property
    def zero_count(self) -> Tensor:
        """Number of values equal to zero, of either sign, 0-d."""
        return self._count(torch.eq, 0)

    @cached_property
    def finite_count(self) -> Tensor:
        """Number of finite values, 0-d."""
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


def is_dense(tensor: Tensor) -> bool:
    """Return True if a tensor is contiguous in index order, or with the channels last."""
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


def sample_places(numel: int, most: int) -> NDArray[np.int64]:
    """Return the ascending indices of a sample of values, ``[most]``: one random index in each of ``most`` equal parts.

    The result is the same for every call. Equidistant indices would always hit the same channels.

    ``numel`` must be greater than ``most``, which must be positive.
    """
    return (_kept_places if most <= _FEW_PLACES else _places)(numel, most)


def _places(numel: int, most: int) -> NDArray[np.int64]:
    bounds = np.arange(most + 1, dtype=np.int64) * numel // most
    return bounds[:-1] + (np.random.default_rng(0).random(most) * np.diff(bounds)).astype(np.int64)


# The same sizes recur at each step. Caching 64 of them takes at most 8 MiB.
_kept_places = lru_cache(maxsize=64)(_places)
_FEW_PLACES = 1 << 14


def count_bins(counts: Tensor, values: Tensor, *, copies: int | None = None) -> None:
    """Count values, ``[numel]`` float32 or float64, per bin, and add the numbers to counts, ``[2048 or more]`` float64.

    Neighboring values are counted in different copies of the bins. ``copies`` is the number of copies: by default one
    on a CPU and several on a GPU.
    """
    index = bins_of(values)
    if copies is None:
        copies = _COPIES.get(values.device.type, 1)
    # bincount is not used, because it reads the largest value, which synchronizes a GPU and fails on meta tensors.
    # Integer sums in float64 are exact in any order.
    one = counts.new_ones(1).expand(values.numel())
    if copies == 1:
        counts.index_add_(0, index, one)
        return
    index += (torch.arange(values.numel(), dtype=torch.int32, device=values.device) % copies) * BINS
    several = counts.new_zeros(copies * BINS).index_add_(0, index, one)
    counts[:BINS].add_(several.view(copies, BINS).sum(0))


def bins_of(values: Tensor) -> Tensor:
    """Return the bins of values, ``[numel]`` int32: the upper eleven bits of each value as a float32.

    A finite float64 beyond the range of float32 is in the end bin of its sign. A float64 too small for float32 is in
    the bin of its signed zero.
    """
    if values.dtype == torch.float64:
        values = torch.where(values.isfinite(), values.clamp(-_FLOAT32_MAX, _FLOAT32_MAX), values).float()
    return (values.contiguous().view(torch.int32) >> BIN_SHIFT) & (BINS - 1)


def finite_or_zero(values: Tensor) -> Tensor:
    """Return the values with every NaN and infinity replaced by zero."""
    return torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)


def finite_or_zero_(values: Tensor) -> Tensor:
    """Replace every NaN and infinity by zero, in place."""
    return torch.nan_to_num_(values, nan=0.0, posinf=0.0, neginf=0.0)


def count_where(
    comparison: Callable[..., Tensor], values: Tensor, other: Tensor | float, scratch: Tensor | None = None
) -> Tensor:
    """Return the number of values, ``[numel]``, for which a comparison such as ``torch.ne`` is true, 0-d.

    ``scratch`` is a buffer, ``[numel]`` of the same dtype, which is overwritten.
    """
    # Compare into floats: comparisons into booleans are not vectorized on the CPU and take four times as long.
    holds = comparison(values, other, out=torch.empty_like(values) if scratch is None else scratch)
    # Integers up to 2**24 are exact in float32, in any order of addition.
    return holds.dot(holds) if holds.numel() <= 1 << 24 else holds.sum(dtype=torch.float64)
