"""Tensor statistics on a GPU in one or two launches, computed by Triton kernels that are compiled at run time.

Separate torch passes need about 45 launches, which take longer than the arithmetic for most tensors. PyTorch for CUDA
and ROCm includes Triton. If it is missing, or after any failure, torch computes the same statistics.
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

from lightning_recorder.bins import BIN_SHIFT, BINS
from lightning_recorder.errors import describe_error
from lightning_recorder.reductions.kernels.check import SPECIAL_VALUES, empty_row, missing_parts
from lightning_recorder.reductions.row import HISTOGRAM, SAMPLED_NUMEL, Part
from lightning_recorder.reductions.values import PLAIN_TYPES, Values, sample_places

__all__ = ["add_statistics_on_device", "launch", "prepare_device"]

_log = logging.getLogger("lightning_recorder")

_SWITCH = "LIGHTNING_RECORDER_TRITON"

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# A single program finishes this many tiles before the second launch, which several programs need, would have started.
_FEW_TILES = 4
# A multiprocessor has registers for two or three programs at a time, so all programs finish in two or three rounds.
_PROGRAMS_PER_MULTIPROCESSOR = 6


class _Prepared:
    """The prepared devices of this process, by index."""

    lock = threading.Lock()
    tried: ClassVar[set[int]] = set()
    most_programs: ClassVar[dict[int, int]] = {}
    """The maximum number of programs for each device that is ready."""
    kernels: ClassVar[ModuleType]
    missing: ClassVar[tuple[Part, ...]] = ()
    """The parts of a row that the kernels do not compute."""


def prepare_device(device: torch.device) -> bool:
    """Prepare the kernels on a GPU. Return True if they are available.

    The kernels for all dtypes are compiled in advance, unless the Triton cache has them, and each is checked on a few
    numbers. A process does this once per device, even if it fails. The kernels are tested in the Triton interpreter and
    have not been run on a GPU yet. Therefore they are used only with ``LIGHTNING_RECORDER_TRITON=1`` in the
    environment. This function never raises.

    Note:
        The first call synchronizes the device and takes seconds if the cache is empty, so call it before training
        starts. It is a no-op while a CUDA graph is captured.
    """
    if device.type != "cuda" or os.environ.get(_SWITCH) != "1" or not torch.cuda.is_available():
        return False
    with _Prepared.lock:
        try:
            number: int | None = device.index  # the annotations of torch say that it is never None
            index = torch.cuda.current_device() if number is None else number
            if index not in _Prepared.tried and not torch.cuda.is_current_stream_capturing():
                _Prepared.tried.add(index)
                _load(torch.device("cuda", index))
            return index in _Prepared.most_programs
        except Exception as error:  # noqa: BLE001 - a compiler, a driver or a missing library may raise anything
            _log.info("statistics on %s are computed by torch: %s", device, describe_error(error))
            return False


def add_statistics_on_device(row: Tensor, values: Values, sample: int | None) -> bool:
    """Add the statistics of values to a state of :class:`Statistics`, if the kernels support them.

    Args:
        row: The state, ``[width]`` float64 on the device of the values, as :class:`Statistics` lays it out.
        values: The values of any tensor.
        sample: The maximum number of values to count in the histogram; ``None`` for all.

    Returns:
        True if the state was updated. False without any change if the device was not prepared, or if the tensor has
        integers or is a tensor subclass. The local part of a ``DTensor`` is supported.

    Note:
        Never synchronizes the device. The work goes to the current stream of the device, or to the CUDA graph that is
        captured there. A tensor that is not contiguous is copied. Apart from that copy and the sampled places, at most
        56 KiB are allocated.
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
    for part in _Prepared.missing:
        part.add(row, values)
    return True


def _is_array(tensor: Tensor) -> bool:
    """Return True if the kernels can read the memory of a tensor or of a contiguous copy."""
    if type(tensor) not in PLAIN_TYPES or tensor.dtype not in _DTYPES or tensor.is_neg():
        return False
    try:  # the zeros that autograd creates have no memory, nor do wrappers
        return tensor.data_ptr() != 0 or tensor.numel() == 0
    except RuntimeError:  # a tensor inside a transform of torch.func
        return False


def launch(kernels: ModuleType, row: Tensor, values: Values, sample: int | None, most_programs: int) -> None:
    """Launch the kernels on the current device.

    Args:
        kernels: The module :mod:`triton_kernels`. In the Triton interpreter it accepts CPU tensors.
        row: The state, as for :func:`add_statistics_on_device`.
        values: Values whose :attr:`Values.real` is a plain array.
        sample: The sample size, as for :func:`add_statistics_on_device`.
        most_programs: The maximum number of shares that the values are divided into.
    """
    numel = values.numel
    if not numel:
        return
    tile = kernels.ROWS * kernels.COLUMNS
    tiles = -(-numel // tile)
    tiles_each = tiles if tiles <= _FEW_TILES else -(-tiles // min(most_programs, kernels.MOST_PROGRAMS))
    programs = -(-tiles // tiles_each)
    # Arguments that a kernel does not use may be any tensor of the right type.
    parts = row if programs == 1 else torch.empty(kernels.RESULTS * programs, dtype=torch.float64, device=row.device)
    places, gathered = row, False
    if sample is not None and numel > sample:
        # A plain copy to the device would synchronize it.
        places, gathered = torch.from_numpy(sample_places(numel, sample)).to(row.device, non_blocking=True), True
    sampled = -1 if sample is None else sample
    options = {"num_warps": 4, "enable_fp_fusion": False}  # rounds each product, as torch does
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
        first_bin=HISTOGRAM,
        bin_count=BINS,
        bin_shift=BIN_SHIFT,
        rows=kernels.ROWS,
        columns=kernels.COLUMNS,
        **options,
    )
    if programs > 1:
        most = kernels.MOST_PROGRAMS
        kernels.merge_shares[(1,)](
            parts, programs, numel, sampled, row, sampled_numel=SAMPLED_NUMEL, most_programs=most, **options
        )


def _in_memory(tensor: Tensor, *, ordered: bool) -> Tensor:
    """Return the tensor, or a copy, with contiguous memory. The values are in index order if ``ordered`` is true."""
    dense = tensor.is_contiguous() or (
        not ordered and tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    )
    return tensor if dense else tensor.contiguous()


def _bits(number: float) -> int:
    """Return the bits of a float64 as an integer."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def _load(device: torch.device) -> None:
    """Compile and check the kernels, and mark the device as ready if their results are correct."""
    started = time.perf_counter()
    import triton

    from lightning_recorder.reductions.kernels import triton_kernels

    if not isinstance(triton_kernels.reduce_share, triton.JITFunction):
        raise RuntimeError("TRITON_INTERPRET is set, and interpreted kernels synchronize with the device")
    most = _PROGRAMS_PER_MULTIPROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
    # Run each kernel for each dtype, with one program and with several.
    several = (_FEW_TILES + 1) * triton_kernels.ROWS * triton_kernels.COLUMNS + 1
    with torch.cuda.device(device), torch.no_grad():
        for dtype, count, sample in itertools.product(_DTYPES, (9, several), (None, 5)):
            tensor, found = _numbers(count, dtype), empty_row(sample).to(device)
            launch(triton_kernels, found, Values(tensor.to(device), 2.0), sample, most)
            missing = missing_parts(found.cpu(), Values(tensor, 2.0), sample)
            if missing is None:
                _log.warning("the kernels that Triton compiled for %s give wrong results and are not used", device)
                return
            _Prepared.missing = missing
    _Prepared.kernels, _Prepared.most_programs[device.index] = triton_kernels, most
    _log.info("prepared the kernels for %s in %.1f s", device, time.perf_counter() - started)


def _numbers(count: int, dtype: torch.dtype) -> Tensor:
    few = torch.tensor(SPECIAL_VALUES, dtype=dtype, device="cpu")
    return few.repeat(-(-count // len(few)))[:count]
