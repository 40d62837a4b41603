"""A checksum that identifies a batch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_recorder.internals.autograd import without_functions
from lightning_recorder.internals.pause_recording import pause_recording
from lightning_recorder.structure import ignore_unknown, iter_tensors

__all__ = ["batch_fingerprint"]

_MOST_SAMPLES = 1024
_MOST_VALUES = 64  # of a sample
_MOST_TENSORS = 8
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MIX = 0x1E3779B97F4A7C15  # odd, so that multiplication modulo 2**64 loses nothing
_HALF = 31  # bits


@torch.no_grad()
def batch_fingerprint(batch: Any) -> Tensor | None:
    """Return two checksums of the tensors in a batch, ``[2]`` int64 on the device of the first one; None without any.

    The first checksum depends on the order of the samples, the second does not. Both are exact integer sums, so they do
    not depend on the order in which the device adds. Of each tensor, at most 1024 samples with 64 values each are read,
    at regular distances. A tensor of a class of its own that cannot be read as a plain one is left out.

    Note:
        Does not synchronize the device, and leaves the batch and the random number generators unchanged.

    Example:
        >>> one = batch_fingerprint(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> other = batch_fingerprint(torch.tensor([[3.0, 4.0], [1.0, 2.0]]))
        >>> (one == other).tolist()
        [False, True]
    """
    # The methods of subclasses may need attributes that a new tensor of theirs does not have.
    with pause_recording(), without_functions():
        found = None
        for place, (_, tensor) in enumerate(iter_tensors(batch, unknown=ignore_unknown)):
            if place == _MOST_TENSORS:
                break
            if not _is_readable(tensor):
                continue
            try:
                array = _as_array(tensor)
                own = _of_tensor(tensor.detach()) if array is None else torch.from_numpy(_of_array(array))
            except Exception:
                if type(tensor) is Tensor:
                    raise
                continue
            # The place matters, so that two tensors that are exchanged give another checksum.
            found = own if found is None else found * 31 + own.to(found.device)
        return found


def _is_readable(tensor: Tensor) -> bool:
    """Return False for a tensor without values in the usual form, such as one that wraps another one."""
    if type(tensor) is not Tensor and type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return False
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized and tensor.numel() > 0


def _of_tensor(tensor: Tensor) -> Tensor:
    values = _integers(_some(tensor)).flatten(1)
    samples, width = values.shape
    places = torch.arange(max(samples, width), dtype=torch.int64, device=values.device) * 2 + 1
    rows = (values * (places[:width] * _MIX)).sum(1)
    rows = (rows ^ (rows >> _HALF)) * _MIX  # otherwise sums of rows would be equal for equal sums of values
    return torch.stack([(rows * places[:samples]).sum(), rows.sum()])


def _as_array(tensor: Tensor) -> NDArray[Any] | None:
    """Return a view of a CPU tensor, with the bits of floats as integers; None if there is none."""
    if type(tensor) is not Tensor or not tensor.is_cpu or tensor.is_complex() or tensor.is_neg():
        return None
    tensor = tensor.detach()
    return (tensor.view(_INTEGERS[tensor.element_size()]) if tensor.is_floating_point() else tensor).numpy()


def _of_array(array: NDArray[Any]) -> NDArray[np.int64]:
    """Return the checksums like :func:`_of_tensor`. For few values, numpy takes much less time than torch."""
    some = array.reshape(1, 1) if not array.ndim else array[_selection(array.shape)]
    values = some.reshape(len(some), -1).astype(np.int64)
    samples, width = values.shape
    rows = (values * (_odd_numbers(width) * _MIX)).sum(1)
    rows = (rows ^ (rows >> _HALF)) * _MIX
    return np.array([(rows * _odd_numbers(samples)).sum(), rows.sum()])


@lru_cache(maxsize=32)
def _odd_numbers(count: int) -> NDArray[np.int64]:
    return np.arange(count, dtype=np.int64) * 2 + 1


def _some(tensor: Tensor) -> Tensor:
    """Return a regular selection of the samples and of their values."""
    if not tensor.dim():
        return tensor.reshape(1, 1)
    return tensor[_selection(tensor.shape)]


@lru_cache(maxsize=32)
def _selection(shape: tuple[int, ...]) -> tuple[slice, ...]:
    inner = len(shape) - 1
    most = max(1, int(_MOST_VALUES ** (1 / inner) + 1e-9)) if inner else 1
    steps = [-(-size // most) for size in shape[1:]]
    return tuple(slice(None, None, step) for step in (-(-shape[0] // _MOST_SAMPLES), *steps))


def _integers(tensor: Tensor) -> Tensor:
    """Return the bits of the values as int64."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.is_floating_point():
        tensor = tensor.contiguous().view(_INTEGERS[tensor.element_size()])
    return tensor.reshape(len(tensor), -1).to(torch.int64)
