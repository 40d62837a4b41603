"""Statistics of CPU tensors in few torch passes, where each pass may depend on the result of the previous one.

On a GPU, reading a result would synchronize the device, so every tensor goes through all passes. On the CPU, reading a
result is free, so the extra passes for NaN and infinities only run when such values occur.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_recorder.bins import BIN_SHIFT, BINS
from lightning_recorder.reductions.row import HISTOGRAM, LAYOUT, SAMPLED_NUMEL
from lightning_recorder.reductions.values import PLAIN_TYPES, Values, bins_of, sample_places

__all__ = ["add_statistics_on_host"]

# The temporaries for this many values stay in the caches and leave room for the data that the training needs next.
# With this many values, the relative error of a BLAS dot product with one huge and many small squares is below 1e-12.
_PIECE = 1 << 16
_MOST_VIEWS = 64


@dataclass
class _Head:
    """The slots computed in this module: the first slots of a row, in the same order."""

    count: float
    mean: float
    m2: float
    min: float
    max: float
    numel: float
    zeros: float
    nans: float
    infinities: float


_COMPUTED = len(_Head.__dataclass_fields__)
_MISSING = tuple(part for part in LAYOUT if part.slots.stop > _COMPUTED)


def add_statistics_on_host(row: Tensor, values: Values, sample: int | None) -> bool:
    """Add the statistics of values to a state, if the values are in host memory. Otherwise return False.

    The arguments are as for :func:`~lightning_recorder.reductions.kernels.fused.add_statistics`.
    """
    raw = values.raw
    if not (raw.is_cpu and row.is_cpu and (type(raw) in PLAIN_TYPES or type(values.real) in PLAIN_TYPES)):
        return False
    try:
        state = row.numpy()
        values.real.data_ptr()
    except RuntimeError:  # a tensor inside a transform of torch.func
        return False
    head = _Head(*state[:_COMPUTED].tolist())
    for x in _pieces(values):
        head.numel += x.numel()
        if x.numel():
            _take(head, x)
        if sample is None:
            state[HISTOGRAM:] += torch.bincount(bins_of(x), minlength=BINS).numpy()
    if sample is not None:
        state[HISTOGRAM:SAMPLED_NUMEL] += _sampled_counts(values, sample)
        state[SAMPLED_NUMEL] += values.numel
    state[:_COMPUTED] = tuple(vars(head).values())
    for part in _MISSING:
        part.add(row, values)
    return True


def _pieces(values: Values) -> Iterable[Tensor]:
    """Return the values, widened and flat, in pieces of ``[numel]``."""
    if _is_ready(values):
        x = values.raw.view(-1)
        return (x,) if x.numel() <= _PIECE else x.split(_PIECE)
    return (part for piece in values.pieces() for part in piece.flat.split(_PIECE))


def _is_ready(values: Values) -> bool:
    """Return True if the values can be read without any preparation, which is the common case."""
    raw = values.raw
    return (
        raw.dtype is torch.float32
        and type(raw) in PLAIN_TYPES
        and raw.layout is torch.strided
        and not raw.is_nested
        and raw.is_contiguous()
        and not (raw.is_neg() or raw.requires_grad)
        and values.factor == 1.0
    )


def _take(head: _Head, x: Tensor) -> None:
    """Update the slots in ``head`` with values, ``[numel]`` float32 or float64."""
    low, high = (end.item() for end in torch.aminmax(x))
    if not (math.isfinite(low) and math.isfinite(high)):
        x = _finite(head, x)
        if not x.numel():
            return
        low, high = (end.item() for end in torch.aminmax(x))
    head.min, head.max = min(head.min, low), max(head.max, high)
    count = x.numel()
    if low <= 0 <= high:
        # Compare into floats: comparisons into booleans are not vectorized and take four times as long.
        nonzero = torch.ne(x, 0, out=_scratch.of(x.dtype, count))
        head.zeros += count - torch.dot(nonzero, nonzero).item()
    wide = _scratch.of(torch.float64, count).copy_(x)
    mean: float = wide.sum().item() / count
    square = torch.dot(wide, wide).item()
    spread = square - mean * mean * count
    if not square <= 16 * spread:  # the mean is too large to compute the spread from the squares with enough precision
        wide.sub_(mean)
        spread = torch.dot(wide, wide).item()
    _merge(head, count, mean, spread)


def _finite(head: _Head, x: Tensor) -> Tensor:
    """Count the values that are not finite and return the finite ones."""
    array = x.detach().numpy()
    finite = array[np.isfinite(array)]
    nans = int(np.count_nonzero(np.isnan(array)))
    head.nans += nans
    head.infinities += len(array) - len(finite) - nans
    return torch.from_numpy(finite)


def _merge(head: _Head, count: int, mean: float, m2: float) -> None:
    """Merge the moments of more values (Chan, Golub & LeVeque, 1979)."""
    total = head.count + count
    share = count / total
    delta = mean - head.mean
    head.m2 += m2 + delta * delta * head.count * share
    head.mean += delta * share
    head.count = total


def _sampled_counts(values: Values, sample: int) -> NDArray[np.int64]:
    """Return the number of sampled values in each bin."""
    if not _is_ready(values):
        return torch.bincount(bins_of(values.sampled(sample)), minlength=BINS).numpy()
    # For so few values, NumPy is twice as fast as torch.
    x = values.raw.view(-1).numpy()
    if len(x) > sample:
        x = x[sample_places(len(x), sample)]
    return np.bincount(x.view(np.uint32) >> BIN_SHIFT, minlength=BINS)


class _Scratch(threading.local):
    """Scratch memory of each thread for the temporaries of a piece. Reusing memory is faster than allocating it."""

    def __init__(self) -> None:
        with torch.inference_mode(False):
            self._words = torch.empty(_PIECE, dtype=torch.float64, device="cpu")
        self._views: dict[tuple[torch.dtype, int], Tensor] = {}

    def of(self, dtype: torch.dtype, count: int) -> Tensor:
        """Return a tensor of a dtype, ``[count]``. All returned tensors share the same memory."""
        view = self._views.get((dtype, count))
        if view is None:
            if len(self._views) == _MOST_VIEWS:
                self._views.clear()
            with torch.inference_mode(False):  # an inference tensor could not be written outside inference mode
                view = self._views[dtype, count] = self._words.view(dtype)[:count]
        return view


_scratch = _Scratch()
