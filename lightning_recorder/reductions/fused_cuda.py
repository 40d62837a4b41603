"""The statistics of a tensor on a GPU in one launch or two, by kernels of Triton that are compiled where they run.

Separate passes of torch are some 45 launches, which for most tensors take longer than the arithmetic. PyTorch for CUDA
and ROCm brings Triton; where it is missing, or anything else is not as it should be, the passes of torch do the same.
"""

from __future__ import annotations

import itertools
import logging
import os
import struct
import threading
import time
from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor

from lightning_recorder.errors import describe_error
from lightning_recorder.reductions.plain import PLAIN_TYPES
from lightning_recorder.reductions.values import BINS, Values, count_bins, sample_places

__all__ = ["add_statistics_on_device", "launch", "prepare_device"]

_log = logging.getLogger("lightning_recorder")

_SWITCH = "LIGHTNING_RECORDER_TRITON"

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# One program alone is done with so many tiles before a second launch, which several need, would have begun.
_FEW_TILES = 4
# A multiprocessor has registers for two or three at once; so all are done after two rounds or three.
_PROGRAMS_PER_MULTIPROCESSOR = 6


class _Prepared:
    """The devices of this process, by index."""

    lock = threading.Lock()
    tried: ClassVar[set[int]] = set()
    most_programs: ClassVar[dict[int, int]] = {}
    """Of those that are ready."""
    kernels: ClassVar[ModuleType]


def prepare_device(device: torch.device) -> bool:
    """Have the kernels ready on a GPU; answers whether they are.

    Those for all types of values are compiled at once, unless Triton's cache has them, and each is tried on a few
    numbers. A process does this once for each device, also where it fails. The kernels are tested in Triton's
    interpreter, and have not been run on a GPU yet: so they are used only with ``LIGHTNING_RECORDER_TRITON=1`` in the
    environment. Nothing is raised.

    Note:
        The first call waits for the device, and takes seconds where the cache is empty: call it before training starts.
        While a CUDA graph is captured nothing is done.
    """
    if device.type != "cuda" or os.environ.get(_SWITCH) != "1" or not torch.cuda.is_available():
        return False
    with _Prepared.lock:
        try:
            number: int | None = device.index  # which torch says is never None
            index = torch.cuda.current_device() if number is None else number
            if index not in _Prepared.tried and not torch.cuda.is_current_stream_capturing():
                _Prepared.tried.add(index)
                _load(torch.device("cuda", index))
            return index in _Prepared.most_programs
        except Exception as error:  # noqa: BLE001 - of a compiler, of a driver, of a library that is missing
            _log.info("statistics on %s are computed by torch: %s", device, describe_error(error))
            return False


def add_statistics_on_device(row: Tensor, values: Values, sample: int | None) -> bool:
    """Add the statistics of values to a state of :class:`Statistics`, if the kernels can.

    Args:
        row: The state, ``[2057]`` float64, on the device of the values; with a sample ``[2058]``.
        values: Of any tensor.
        sample: The most values that go to the histogram; ``None`` for all.

    Returns:
        Whether it was done. If not, nothing has changed: the device was not prepared, or the tensor has integers or is
        of a class of its own, the local part of a ``DTensor`` excepted.

    Note:
        Never waits for the device. Goes into the device's current stream, or into the graph that is captured there. A
        tensor that is not contiguous is copied; beside that and the places of a sample 56 KiB are taken at most.
    """
    if not values.raw.is_cuda:
        return False
    most_programs = _Prepared.most_programs.get(values.raw.device.index)
    if (
        most_programs is None
        or row.device != values.raw.device
        or not row.is_contiguous()
        or not _is_array(values.real)
    ):
        return False
    with torch.cuda.device(row.device):
        launch(_Prepared.kernels, row, values, sample, most_programs)
    return True


def _is_array(tensor: Tensor) -> bool:
    """Whether the kernels can read the memory of a tensor, or of a contiguous copy."""
    if type(tensor) not in PLAIN_TYPES or tensor.dtype not in _DTYPES or tensor.is_neg():
        return False
    try:  # zeros as autograd gives them have no memory, nor have wrappers
        return tensor.data_ptr() != 0 or tensor.numel() == 0
    except RuntimeError:  # a tensor inside a transform of torch.func
        return False


def launch(kernels: ModuleType, row: Tensor, values: Values, sample: int | None, most_programs: int) -> None:
    """Launch the kernels on the current device.

    Args:
        kernels: The module :mod:`triton_kernels`; interpreted by Triton, it takes tensors on a CPU.
        row: As for :func:`add_statistics_on_device`.
        values: Of which :attr:`Values.real` is a plain array.
        sample: As there.
        most_programs: Into how many shares the values are divided at most.
    """
    numel = values.numel
    if not numel:
        return
    tile = kernels.ROWS * kernels.COLUMNS
    tiles = -(-numel // tile)
    tiles_each = tiles if tiles <= _FEW_TILES else -(-tiles // min(most_programs, kernels.MOST_PROGRAMS))
    programs = -(-tiles // tiles_each)
    # What a kernel does not need is any tensor of its type.
    parts = row if programs == 1 else torch.empty(7 * programs, dtype=torch.float64, device=row.device)
    places, gathered = row, False
    if sample is not None and numel > sample:
        # Without waiting for what the device is doing, as a plain copy to it would.
        places, gathered = torch.from_numpy(sample_places(numel, sample)).to(row.device, non_blocking=True), True
    sampled = -1 if sample is None else sample
    options = {"num_warps": 4, "enable_fp_fusion": False}  # each product is rounded, as by torch
    kernels.reduce_share[(programs,)](
        _in_memory(values.real, ordered=sample is not None),
        numel,
        tiles_each * tile,
        _bits(values.factor),
        int(values.factor != 1.0),
        places,
        sampled,
        parts,
        row,
        gathered=gathered,
        rows=kernels.ROWS,
        columns=kernels.COLUMNS,
        **options,
    )
    if programs > 1:
        most = kernels.MOST_PROGRAMS
        kernels.merge_shares[(1,)](parts, programs, numel, sampled, row, most_programs=most, **options)


def _in_memory(tensor: Tensor, *, ordered: bool) -> Tensor:
    """The tensor, or a copy, whose values lie one behind the other; in the order of its indices if that matters."""
    dense = tensor.is_contiguous() or (
        not ordered and tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    )
    return tensor if dense else tensor.contiguous()


def _bits(number: float) -> int:
    """The bits of a float64, as an integer."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def _load(device: torch.device) -> None:
    """Compile the kernels and try them; the device is ready if they are right."""
    started = time.perf_counter()
    import triton

    from lightning_recorder.reductions import triton_kernels

    if not isinstance(triton_kernels.reduce_share, triton.JITFunction):
        raise RuntimeError("TRITON_INTERPRET is set, and interpreted kernels wait for the device")
    most = _PROGRAMS_PER_MULTIPROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
    # Each kernel is run for each type, alone and with several programs.
    several = (_FEW_TILES + 1) * triton_kernels.ROWS * triton_kernels.COLUMNS + 1
    with torch.cuda.device(device), torch.no_grad():
        for dtype, count, sample in itertools.product(_DTYPES, (9, several), (None, 5)):
            tensor, row = _numbers(count, dtype), _empty_row()
            found = row.to(device)
            launch(triton_kernels, found, Values(tensor.to(device), 2.0), sample, most)
            if not _is_right(found.cpu(), Values(tensor, 2.0), sample):
                _log.warning("the kernels that Triton compiled for %s are wrong, and not used", device)
                return
    _Prepared.kernels, _Prepared.most_programs[device.index] = triton_kernels, most
    _log.info("prepared the kernels for %s in %.1f s", device, time.perf_counter() - started)


def _numbers(count: int, dtype: torch.dtype) -> Tensor:
    few = [0.0, -0.0, 1.5, -2.0, 4e-39, float("nan"), float("inf"), float("-inf"), 3.0]  # 4e-39 is subnormal
    return torch.tensor(few, dtype=dtype, device="cpu").repeat(-(-count // len(few)))[:count]


def _empty_row() -> Tensor:
    row = torch.zeros(10 + BINS, dtype=torch.float64, device="cpu")
    row[3], row[4] = float("inf"), float("-inf")
    return row


def _is_right(found: Tensor, values: Values, sample: int | None) -> bool:
    """Whether a state that was empty, on the CPU, is that of a few values."""
    doubles = values.flat.double()
    finite = doubles[doubles.isfinite()]
    moments = torch.stack([finite.mean(), finite.var(correction=0) * len(finite), finite.min(), finite.max()])
    tallies = torch.stack([(doubles == 0).sum(), doubles.isnan().sum(), doubles.isinf().sum()]).double()
    chosen = doubles if sample is None or len(doubles) <= sample else values.sampled(sample).double()
    bins = torch.zeros(BINS, dtype=torch.float64, device="cpu")
    count_bins(bins, chosen[chosen.isfinite()])
    of_finite = torch.arange(BINS, device="cpu") % 1024 < 1020  # in which bin a NaN is, devices need not agree upon
    found_bins = found[9 : 9 + BINS]
    checks = (
        found[0] == len(finite),
        torch.allclose(found[1:5], moments, rtol=1e-9, atol=0),
        found[5] == len(doubles),
        torch.equal(found[6:9], tallies),
        torch.equal(found_bins[of_finite], bins[of_finite]),
        found_bins.sum() == len(chosen),
        found[9 + BINS] == (0 if sample is None else len(doubles)),
    )
    return all(checks)
