"""Checksums that identify a batch and its samples."""

from __future__ import annotations

import math
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_recorder.internals.autograd import without_functions
from lightning_recorder.internals.pause_recording import pause_recording
from lightning_recorder.reductions.kernels.fused import join_rows
from lightning_recorder.structure import held_tensors, ignore_unknown, iter_tensors

__all__ = [
    "batch_fingerprint",
    "different_values",
    "exact_checksum",
    "odd_numbers",
    "sample_fingerprints",
    "sample_numbers",
    "signed_sums",
    "values_of_each",
]

_MOST_SAMPLES = 1024
_MOST_VALUES = 64  # values read per sample
_MOST_TENSORS = 8
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 22  # values read at once
_SIGNS = 1 << 20
_MIX = 0x1E3779B97F4A7C15  # odd, so that multiplication modulo 2**64 loses nothing
_HALF = 31  # bits
_FEWEST_VALUES = 8  # values read per sample of a large batch
_WIDE = 4  # a tensor with at least this many values per sample is an input, not a target or weight
_MOST_OF_BATCH = 1 << 14  # values read per tensor to identify its samples
_FINAL = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # the multipliers of splitmix64 as int64


@torch.no_grad()
def batch_fingerprint(batch: Any) -> Tensor | None:
    """Return two checksums of a batch, ``[2]`` int64 on the device of its first tensor, or None without tensors.

    The first checksum depends on the order of the samples, the second does not. Both are exact integer sums, so they do
    not depend on the order in which the device adds. At most 1024 samples of each tensor are read, with 64 values
    each, at regular distances. Instances of tensor subclasses that cannot be read as plain tensors are ignored.

    Note:
        Does not synchronize the device, and leaves the batch and the random number generators unchanged.

    Example:
        >>> one = batch_fingerprint(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> other = batch_fingerprint(torch.tensor([[3.0, 4.0], [1.0, 2.0]]))
        >>> (one == other).tolist()
        [False, True]
    """
    # Disable the methods of tensor subclasses, which may need attributes that new tensors of the subclass do not have.
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
            # The result depends on the order of the tensors, so that swapping two tensors changes the checksum.
            found = own if found is None else found * 31 + own.to(found.device)
        return found


@torch.no_grad()
def exact_checksum(tensor: Tensor) -> Tensor:
    """Return a checksum of all bits of a tensor and their order, 0-d int64 on the device of the tensor.

    Note:
        Does not synchronize the device. Needs 64 MB of memory for a large tensor, and reads the tensor once.

    Example:
        >>> zeros = torch.zeros(3)
        >>> bool(exact_checksum(zeros) == exact_checksum(-zeros)), bool(exact_checksum(zeros) == exact_checksum(zeros))
        (False, True)
    """
    flat = tensor.detach().reshape(-1)
    found = torch.full((), flat.numel(), dtype=torch.int64, device=flat.device)
    for part in flat.split(_CHUNK):
        if part.numel():
            bits = _integers(part.unsqueeze(0)).flatten()
            places = torch.arange(1, 2 * len(bits), 2, dtype=torch.int64, device=flat.device)
            # Without this step, equal changes of all values could cancel each other.
            bits = (bits ^ (bits >> _HALF)) * _MIX
            found = found * 31 + ((bits ^ (bits >> _HALF)) * places).sum()
    return found


@torch.no_grad()
def signed_sums(tensor: Tensor, count: int) -> Tensor:
    """Return sums of the values of a tensor with fixed pseudorandom signs, ``[count]`` float32.

    The L2 norm of the sums estimates the L2 norm of the tensor, with a standard error of 25 % for eight sums. The sums
    are linear, so their differences estimate the difference of two tensors. Tensors of up to ``count`` values are
    returned unchanged, padded with zeros.

    Note:
        Does not synchronize the device. Caches 4 MB of signs, needs 8 MB of memory for a large tensor, and reads the
        tensor once.

    Example:
        >>> signed_sums(torch.tensor([2.0, 3.0]), 3).tolist()
        [2.0, 3.0, 0.0]
    """
    flat = tensor.detach().reshape(-1)
    found = torch.zeros(count, dtype=torch.float32, device=flat.device)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.numel() <= count:
        found[: flat.numel()] = flat
        return found
    signs = _signs(flat.device)
    for place, part in enumerate(flat.split((len(signs) // count - 1) * count)):
        # The signs differ between chunks. With equal signs, a constant difference would accumulate over the chunks.
        own = signs[place % count :][: len(part)] * signs[place % len(signs)]
        found += (
            torch.nn.functional.pad(part * own, (0, -len(part) % count)).view(-1, count).sum(0, dtype=torch.float32)
        )
    return found


@lru_cache(maxsize=2)
def _signs(device: torch.device) -> Tensor:
    found = np.random.default_rng(0x5EED).integers(0, 2, _SIGNS, dtype=np.int8)
    return torch.from_numpy(found.astype(np.float32) * 2 - 1).to(device)


def sample_fingerprints(batch: Any, values: int = _MOST_VALUES) -> Tensor | None:
    """Return a 64-bit fingerprint of each sample in a batch, ``[samples]`` int64 on the device of the first tensor.

    Sample ``i`` consists of row ``i`` of every tensor in the batch. If the tensors have different numbers of rows, rows
    are not samples and the result is None.

    Args:
        batch: The batch.
        values: The number of values to read from each row of a tensor, at regular distances. Fingerprints computed with
            different ``values`` cannot be compared.

    Note:
        Does not synchronize the device, and leaves the batch and the random number generators unchanged. Values are
        multiplied by pseudorandom factors that depend on their position, so collisions are as rare as among random
        64-bit numbers: for a million samples, one colliding pair in about 10⁷ runs.
    """
    found = sample_numbers(batch, values)
    return None if found is None else found[0]


def sample_numbers(batch: Any, values: int = _MOST_VALUES) -> Tensor | None:
    """Return two fingerprints of each sample, ``[2, samples]``: of all its tensors, and of its inputs alone.

    The inputs are the tensors with at least four values per sample. If there are no inputs, the second row is 0 to
    n - 1. See :func:`sample_fingerprints`.
    """
    with pause_recording(), without_functions():
        tensors = _readable(batch)
        if len(set(map(len, tensors))) != 1:
            return _numbers_of_graphs(batch, values)
        if (joined := _joined_in_c(tensors, values)) is not None:
            return joined
        wide = [place for place, each in enumerate(tensors) if each.numel() >= _WIDE * len(each)]
        arrays = [array for each in tensors if (array := _as_array(each)) is not None]
        if len(arrays) == len(tensors):  # for few values, NumPy is much faster than torch
            found = [_rows_of_array(each, values) for each in arrays]
            inputs = _joined([found[place] for place in wide]) if wide else np.arange(len(found[0]))
            return torch.from_numpy(np.stack([_scrambled(_joined(found)), inputs]))
        rows = [_rows_of_tensor(each.detach(), values) for each in tensors]
        rows = [each.to(rows[0].device) for each in rows]
        own = _joined([rows[place] for place in wide]) if wide else torch.arange(len(rows[0]), device=rows[0].device)
        return torch.stack([_scrambled(_joined(rows)), own])


def _numbers_of_graphs(batch: Any, values: int) -> Tensor | None:
    """Return the fingerprints of the graphs in a PyTorch Geometric batch; None for any other batch."""
    known = {path: tensor for path, tensor in iter_tensors(batch, "", unknown=ignore_unknown) if tensor.dim()}
    place, ends = known.pop(".batch", None), known.pop(".ptr", None)
    if place is None or ends is None or place.dtype != torch.int64:
        return None
    found = torch.zeros(2, len(ends) - 1, dtype=torch.int64, device=place.device)
    for each in known.values():
        if not _is_readable(each) or len(each) not in (len(place), len(ends) - 1):  # such as edges
            continue
        rows = _scrambled(_rows_of_tensor(each.detach(), values))
        own = found.new_zeros(len(ends) - 1).index_add_(0, place, rows) if len(each) == len(place) else rows
        found[0] = found[0] * _MIX + own
        if each.numel() >= _WIDE * len(each):
            found[1] = found[1] * _MIX + own
    return torch.stack([_scrambled(found[0]), found[1]])


@torch.no_grad()
def different_values(batch: Any) -> Tensor | None:
    """Return the number of distinct values in the first input of each sample, ``[samples]``; None without an input.

    At most 64 values of each sample are read. Two samples with few distinct values may be equal by chance.
    """
    with pause_recording(), without_functions():
        first = next((each for each in _readable(batch) if each.numel() >= _WIDE * len(each)), None)
        if first is None:
            return None
        read = _integers(first.detach()[_selection(first.shape, len(first))]).flatten(1).sort(1).values
        return (read[:, 1:] != read[:, :-1]).sum(1) + 1


def values_of_each(samples: int) -> int:
    """Return the number of values to read per sample in batches of about this size. It limits the time per batch."""
    return max(_FEWEST_VALUES, min(_MOST_VALUES, _MOST_OF_BATCH // max(1, samples)))


def _readable(batch: Any) -> list[Tensor]:
    """Return the first plain tensors with rows in a batch, including tensors inside objects of unknown classes."""
    if type(batch) in (list, tuple) and all(type(each) is Tensor for each in batch):
        found = batch
    else:
        found = []
        for _, tensor in iter_tensors(batch, unknown=lambda path, value, error: found.extend(held_tensors(value))):
            found.append(tensor)
    return [each for each in found[:_MOST_TENSORS] if type(each) is Tensor and each.dim() and _is_readable(each)]


def _rows_of_tensor(tensor: Tensor, most: int) -> Tensor:
    values = _integers(tensor[_selection(tensor.shape, len(tensor), most)]).flatten(1)
    values = values ^ (values >> 4 * tensor.element_size())
    return (values * torch.from_numpy(_factors(values.shape[1])).to(values.device, non_blocking=True)).sum(1)


def _rows_of_array(array: NDArray[Any], most: int) -> NDArray[np.int64]:
    some = array[_selection(array.shape, len(array), most)]
    values = some.reshape(len(some), -1).astype(np.int64)
    # Mix high bits into the low bits, which are zero for round floats and would then be zero in their products, too.
    values ^= values >> 4 * array.itemsize
    found: NDArray[np.int64] = values @ _factors(values.shape[1])
    return found


def _joined_in_c(tensors: list[Tensor], values: int) -> Tensor | None:
    """Compute :func:`sample_numbers` in compiled code, ten times as fast. Return None if there is no compiled code."""
    join = join_rows()
    if join is None or not all(map(_IS_CPU, tensors)) or not _KINDS.keys() >= set(map(_DTYPE, tensors)):
        return None
    samples = len(tensors[0])
    found = torch.empty(2, samples, dtype=torch.int64, device="cpu")
    everything = found.data_ptr()
    scale = scale_of_inputs = 0
    for left, each in enumerate(tensors, 1 - len(tensors)):
        plan = _plan(each.dtype, each.shape, each.stride(), values)
        address = each.data_ptr()
        if each.is_neg() or not address or plan is None:
            return None
        inputs = everything + 8 * samples if each.numel() >= _WIDE * samples else 0
        join(address, *plan.arguments, scale, everything, scale_of_inputs, inputs, not left)
        scale, scale_of_inputs = _MIX, _MIX if inputs else scale_of_inputs
    if not scale_of_inputs:
        found[1] = torch.arange(samples, device="cpu")
    return found


_IS_CPU, _DTYPE = attrgetter("is_cpu"), attrgetter("dtype")
_MOST_DIMENSIONS = 64
_KINDS = {  # the kinds of ``read_integer``; floats are read as their bits
    torch.bool: 0,
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.float16: 2,
    torch.bfloat16: 2,
    torch.int32: 3,
    torch.float32: 3,
    torch.int64: 4,
    torch.float64: 4,
}


class _Plan(NamedTuple):
    """A description of how to read a tensor: all arguments of the compiled function but the first and the scales."""

    arguments: tuple[int, int, int, int, int, int]
    kept: tuple[Any, ...]
    """The objects that own the memory that the arguments point to."""


@lru_cache(maxsize=64)
def _plan(dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...], values: int) -> _Plan | None:
    if len(shape) > _MOST_DIMENSIONS:
        return None
    chosen, size = _selection(shape, shape[0], values), dtype.itemsize
    sizes = [-(-length // each.step) for length, each in zip(shape, chosen, strict=True)]
    steps = [step * each.step * size for step, each in zip(stride, chosen, strict=True)]
    kept = np.array(sizes), np.array(steps), _factors(math.prod(sizes[1:]))
    of_sizes, of_steps, of_factors = (each.ctypes.data for each in kept)
    return _Plan((_KINDS[dtype], 4 * size, len(sizes), of_sizes, of_steps, of_factors), kept)


def _joined(rows: list[Any]) -> Any:
    """Combine the numbers of several tensors into one number per row."""
    found = rows[0]
    for each in rows[1:]:
        found = found * _MIX + each
    return found


def _scrambled(values: Any) -> Any:
    """Hash the numbers so that they are spread evenly over 64 bits."""
    for shift, factor in zip((30, 27), _FINAL, strict=True):
        values = (values ^ (values >> shift)) * factor
    return values ^ (values >> _HALF)


@lru_cache(maxsize=32)
def _factors(count: int) -> NDArray[np.int64]:
    """Return fixed pseudorandom odd numbers, one per position."""
    found: NDArray[np.int64] = np.random.default_rng(0x5EED).integers(-(2**63), 2**63, count, dtype=np.int64) | 1
    return found


def _is_readable(tensor: Tensor) -> bool:
    """Return False for a tensor whose values are not in ordinary memory, such as a wrapper around another tensor."""
    if type(tensor) is not Tensor and type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return False
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized and tensor.numel() > 0


def _of_tensor(tensor: Tensor) -> Tensor:
    values = _integers(_some(tensor)).flatten(1)
    samples, width = values.shape
    places = torch.arange(max(samples, width), dtype=torch.int64, device=values.device) * 2 + 1
    rows = (values * (places[:width] * _MIX)).sum(1)
    rows = (rows ^ (rows >> _HALF)) * _MIX  # without this, equal sums of values would give equal sums of rows
    return torch.stack([(rows * places[:samples]).sum(), rows.sum()])


def _as_array(tensor: Tensor) -> NDArray[Any] | None:
    """Return a NumPy view of a CPU tensor, with the bits of floats as integers; None if a view is impossible."""
    if type(tensor) is not Tensor or not tensor.is_cpu or tensor.is_complex() or tensor.is_neg():
        return None
    tensor = tensor.detach()
    return (tensor.view(_INTEGERS[tensor.element_size()]) if tensor.is_floating_point() else tensor).numpy()


def _of_array(array: NDArray[Any]) -> NDArray[np.int64]:
    """Return the same checksums as :func:`_of_tensor`. For few values, NumPy is much faster than torch."""
    some = array.reshape(1, 1) if not array.ndim else array[_selection(array.shape)]
    values = some.reshape(len(some), -1).astype(np.int64)
    samples, width = values.shape
    rows = (values * (odd_numbers(width) * _MIX)).sum(1)
    rows = (rows ^ (rows >> _HALF)) * _MIX
    return np.array([(rows * odd_numbers(samples)).sum(), rows.sum()])


@lru_cache(maxsize=32)
def odd_numbers(count: int) -> NDArray[np.int64]:
    """Return the first ``count`` odd numbers."""
    return np.arange(count, dtype=np.int64) * 2 + 1


def _some(tensor: Tensor) -> Tensor:
    """Return samples and values of a tensor at regular distances."""
    if not tensor.dim():
        return tensor.reshape(1, 1)
    return tensor[_selection(tensor.shape)]


@lru_cache(maxsize=64)
def _selection(shape: tuple[int, ...], samples: int = _MOST_SAMPLES, values: int = _MOST_VALUES) -> tuple[slice, ...]:
    inner = len(shape) - 1
    most = max(1, int(values ** (1 / inner) + 1e-9)) if inner else 1
    steps = [-(-size // most) for size in shape[1:]]
    return tuple(slice(None, None, step) for step in (-(-shape[0] // samples), *steps))


def _integers(tensor: Tensor) -> Tensor:
    """Return the bits of the values as int64."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.is_floating_point():
        tensor = tensor.contiguous().view(_INTEGERS[tensor.element_size()])
    return tensor.reshape(len(tensor), -1).to(torch.int64)
