"""Tensor statistics on a GPU in one or two launches, computed by Triton kernels that are compiled at run time.

Separate torch passes need about 45 launches, which take longer than the arithmetic for most tensors. PyTorch for CUDA
and ROCm includes Triton. If it is missing, or after any failure, torch computes the same statistics.

Each dtype is prepared when its first tensor arrives: the kernels are compiled, unless the Triton cache has them, and
compared with torch on a few numbers. From then on, one call of the code in ``fused.c`` launches them through the CUDA
driver. Without this code, Triton launches the compiled kernels directly, which skips its slow selection of a kernel.
"""

from __future__ import annotations

import ctypes
import logging
import os
import struct
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_recorder.bins import BIN_SHIFT, BINS
from lightning_recorder.errors import describe_error
from lightning_recorder.reductions.kernels import fused
from lightning_recorder.reductions.kernels.self_test import SPECIAL_VALUES, empty_row, missing_parts
from lightning_recorder.reductions.row import HISTOGRAM, Part
from lightning_recorder.reductions.values import PLAIN_TYPES, Values, is_dense, sample_places

__all__ = ["add_statistics_on_device", "add_tensor_on_device", "launch", "prepare_device"]

_log = logging.getLogger("lightning_recorder")

_SWITCH = "LIGHTNING_RECORDER_TRITON"

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Several programs need a second launch. Up to this many tiles, a single program ends before that launch would start.
_FEW_TILES = 8
# A multiprocessor has registers for a few programs at a time, so all programs finish in a few rounds.
_PROGRAMS_PER_MULTIPROCESSOR = 12
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}  # rounds each product, as torch does

_DRIVER = "libcuda.so.1"
# The sizes in bytes of the arguments that are not constants, in the order in which fused.c passes them.
_REDUCED = (8, 8, 8, 8, 4, 8, 8, 8, 8, 8)
_MERGED = (8, 8, 4, 8, 8, 8)
_MOST_OF_TRITON = 2  # pointer arguments that Triton appends: one since Triton 3.3, two since 3.5

_Kind = tuple[int, torch.dtype, bool]
"""The device index, the dtype, and True if the histogram counts a sample of the values."""


class _Prepared:
    """The kernels that this process has prepared."""

    lock = threading.Lock()
    tried: ClassVar[set[_Kind]] = set()
    failed: ClassVar[set[int]] = set()
    """The devices for which no kernel can be compiled."""
    most_programs: ClassVar[dict[_Kind, int]] = {}
    """The maximum number of programs for each kind that is ready."""
    launchers: ClassVar[dict[tuple[int, torch.dtype], _Launcher]] = {}
    kernels: ClassVar[ModuleType]
    missing: ClassVar[tuple[Part, ...]] = ()
    """The parts of a row that the kernels do not compute."""


def prepare_device(device: torch.device) -> bool:
    """Prepare the kernels for float32 on a GPU. Return True if they are available.

    The kernels are compiled, unless the Triton cache has them, and checked on a few numbers. Other dtypes are prepared
    when their first tensor arrives. A process tries this only once per device and dtype.
    ``LIGHTNING_RECORDER_TRITON=0`` in the environment disables the kernels. This function never raises.

    Note:
        The first call synchronizes the device and takes seconds if the cache is empty, so call this function before
        training starts. It is a no-op while a CUDA graph is captured.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    number: int | None = device.index  # torch's annotations wrongly exclude None
    return _is_ready((torch.cuda.current_device() if number is None else number, torch.float32, False))


def _is_ready(kind: _Kind) -> bool:
    """Return True if the kernels of a kind can be used. The first call prepares them."""
    if kind in _Prepared.most_programs:
        return True
    if kind[0] in _Prepared.failed or kind in _Prepared.tried or os.environ.get(_SWITCH) == "0":
        return False
    with _Prepared.lock:
        try:
            if kind not in _Prepared.tried and not torch.cuda.is_current_stream_capturing():
                _Prepared.tried.add(kind)
                _load(kind)
        except Exception as error:  # noqa: BLE001 - a compiler, a driver or a missing library may raise anything
            _Prepared.failed.add(kind[0])
            _log.info("statistics on cuda:%d are computed by torch: %s", kind[0], describe_error(error))
    return kind in _Prepared.most_programs


def add_statistics_on_device(row: Tensor, values: Values, sample: int | None) -> bool:
    """Add the statistics of values to a state on their device, if the kernels support them.

    The arguments are as for :func:`~lightning_recorder.reductions.kernels.fused.add_statistics`.

    Returns:
        True if the state was updated. False, without any change, if the kernels are unavailable, or if the tensor has
        integers or is a tensor subclass. The local shard of a ``DTensor`` is supported.

    Note:
        Never synchronizes the device, except to prepare the kernels for the first tensor of a dtype. The work is
        enqueued in the current stream of the device, or added to the CUDA graph that this stream captures. A tensor
        that is not contiguous is copied. Apart from this copy and the sampled indices, at most 368 KiB are allocated.
    """
    if not values.raw.is_cuda:
        return False
    if add_tensor_on_device(row, values.raw, values.factor, sample):
        return True
    tensor = values.real
    if row.device != tensor.device or not row.is_contiguous() or not _is_array(tensor):
        return False
    kind = tensor.get_device(), tensor.dtype, sample is not None and values.numel > sample
    if not _is_ready(kind):
        return False
    with torch.cuda.device(row.device):
        launch(_Prepared.kernels, row, values, sample, _Prepared.most_programs[kind])
    for part in _Prepared.missing:
        part.add(row, values)
    return True


def add_tensor_on_device(row: Tensor, tensor: Tensor, factor: float, sample: int | None) -> bool:
    """Add the statistics of a tensor times a factor to a state, as :func:`add_statistics_on_device` does.

    The tensor may be part of an autograd graph. No torch operation runs that autograd or a dispatch mode would see.

    Returns:
        True if the state was updated. False, without any change, if a sample is requested, if no tensor of this dtype
        was reduced before on the current device, if the tensor is not a plain dense tensor on this device, or while a
        CUDA graph is captured.
    """
    index = tensor.get_device()
    launcher = _Prepared.launchers.get((index, tensor.dtype))
    if launcher is None or sample is not None or type(tensor) not in PLAIN_TYPES:
        return False
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_neg() or not is_dense(tensor):
        return False
    if row.get_device() != index or torch.cuda.current_device() != index or not row.is_contiguous():
        return False
    numel = tensor.numel()
    # Memory allocated during the capture of a graph belongs to that graph, so later launches cannot use it.
    if not numel or torch.cuda.is_current_stream_capturing():
        return False
    try:
        pointer = tensor.data_ptr()
    except RuntimeError:  # a tensor inside a transform of torch.func
        return False
    if not pointer:  # zeros without memory, which autograd creates
        return False
    launcher.launch(index, row.data_ptr(), pointer, numel, factor)
    return True


def _is_array(tensor: Tensor) -> bool:
    """Return True if the kernels can read the memory of the tensor or of a contiguous copy of it."""
    if type(tensor) not in PLAIN_TYPES or tensor.dtype not in _DTYPES or tensor.is_neg():
        return False
    try:  # wrappers, and zeros that autograd creates, have no memory
        return tensor.data_ptr() != 0 or tensor.numel() == 0
    except RuntimeError:  # a tensor inside a transform of torch.func
        return False


class _Memory(threading.local):
    """Memory for the results of the programs of a launch, per thread, device and stream."""

    def __init__(self) -> None:
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._addresses: dict[tuple[int, int], tuple[int, int]] = {}

    def of(self, index: int, stream: int, kernels: ModuleType, most_programs: int) -> tuple[int, int]:
        """Return the addresses of the parts and of the counts. Every launch resets the counts to zero."""
        addresses = self._addresses.get((index, stream))
        if addresses is None:
            with torch.inference_mode(False):
                parts, counts = _results(kernels, most_programs, torch.device("cuda", index))
            self._kept.append((parts, counts))
            addresses = self._addresses[index, stream] = parts.data_ptr(), counts.data_ptr()
        return addresses


def _results(kernels: ModuleType, programs: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return memory for the results of a number of programs: the parts, and the counts, which are zero."""
    parts = torch.empty(kernels.RESULTS * programs, dtype=torch.float64, device=device)
    return parts, torch.zeros(kernels.COPIES * BINS, dtype=torch.int32, device=device)


class _Launcher:
    """Launches the compiled kernels for one dtype on one device, without a sample.

    Args:
        kernels: The module :mod:`triton_kernels`.
        compiled: The compiled ``reduce_share`` and ``merge_shares``.
        most_programs: The maximum number of shares that the values are divided into.
        stream_of: Returns the address of the current stream of a device, given its index.
        with_constants: True if Triton expects the constants of a kernel among the arguments of a launch, as since
            Triton 3.3.
        direct: Launch the kernels through the CUDA driver.

    Raises:
        RuntimeError: If the kernels cannot be launched through the driver.
    """

    def __init__(
        self,
        kernels: ModuleType,
        compiled: tuple[Any, Any],
        most_programs: int,
        stream_of: Callable[[int], int],
        *,
        with_constants: bool = False,
        direct: bool = False,
    ) -> None:
        self._reduce, self._merge = compiled
        self._kernels, self._most_programs = kernels, most_programs
        self._tile = kernels.ROWS * kernels.COLUMNS
        self._stream_of = stream_of
        self._memory = _Memory()
        self._constants: tuple[Any, ...] = ()
        self._constants_of_merge: tuple[Any, ...] = ()
        if with_constants:
            self._constants = (False, HISTOGRAM, BINS, BIN_SHIFT, kernels.ROWS, kernels.COLUMNS, kernels.COPIES)
            self._constants_of_merge = (HISTOGRAM, BINS, kernels.MOST_PROGRAMS, kernels.COPIES)
        self._launch = self._launch_by_triton
        if direct:
            self._plan = array("q", _plan(compiled, self._tile, most_programs))  # keeps the memory of the plan
            self._address = self._plan.buffer_info()[0]
            function = fused.launch_function()
            if function is None:
                raise RuntimeError("there is no compiled code")
            self._function = function
            self._launch = self._launch_by_driver

    def launch(self, index: int, row: int, data: int, numel: int, factor: float) -> None:
        """Add the statistics of values to a state on the current device, given their addresses."""
        stream = self._stream_of(index)
        parts, counts = self._memory.of(index, stream, self._kernels, self._most_programs)
        self._launch(stream, row, data, numel, factor, parts, counts)

    def _launch_by_driver(
        self, stream: int, row: int, data: int, numel: int, factor: float, parts: int, counts: int
    ) -> None:
        status = self._function(self._address, stream, row, data, numel, factor, parts, counts)
        if status:
            raise RuntimeError(f"the CUDA driver returned the error {abs(status)}")

    def _launch_by_triton(
        self, stream: int, row: int, data: int, numel: int, factor: float, parts: int, counts: int
    ) -> None:
        programs, share = _shares(numel, self._tile, self._most_programs)
        if programs == 1:
            parts = counts = row
        scaled = int(factor != 1.0)
        self._reduce[programs, 1, 1](
            data, numel, share, _bits(factor), scaled, row, -1, parts, counts, row, *self._constants, stream=stream
        )
        if programs > 1:
            self._merge[1, 1, 1](parts, counts, programs, numel, -1, row, *self._constants_of_merge, stream=stream)


def _plan(compiled: tuple[Any, Any], tile: int, most_programs: int) -> list[int]:
    """Return the fields of the plan in ``fused.c``.

    Raises:
        RuntimeError: If the kernels have unexpected arguments, or require a special launch.
        OSError: If the driver cannot be loaded.
        AttributeError: If the driver cannot report the arguments of a kernel, as before CUDA 12.4, or if this release
            of Triton describes a kernel differently.
    """
    if torch.version.hip:
        raise RuntimeError("the device has no CUDA driver")
    driver = ctypes.CDLL(_DRIVER)
    launch = ctypes.cast(driver.cuLaunchKernel, ctypes.c_void_p).value
    kernels, sizes = [], []
    for kernel, expected in zip(compiled, (_REDUCED, _MERGED), strict=True):
        about = kernel.metadata
        special = [about.num_ctas - 1, getattr(about, "launch_cooperative_grid", 0), getattr(about, "launch_pdl", 0)]
        special += [getattr(about, "global_scratch_size", 0), getattr(about, "profile_scratch_size", 0)]
        found = _sizes_of_arguments(driver, kernel.function)
        more = len(found) - len(expected)
        if any(special) or not 0 <= more <= _MOST_OF_TRITON or found != (*expected, *[8] * more):
            raise RuntimeError(f"the arguments of {about.name} have the sizes {found}")
        kernels.append(kernel.function)
        sizes += [32 * about.num_warps, about.shared]
    return [launch or 0, *kernels, *sizes, tile, _FEW_TILES, most_programs]


def _sizes_of_arguments(driver: Any, function: int) -> tuple[int, ...]:
    """Return the size in bytes of each argument of a kernel."""
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    found: list[int] = []
    while len(found) < 64 and not driver.cuFuncGetParamInfo(
        ctypes.c_void_p(function), ctypes.c_size_t(len(found)), ctypes.byref(offset), ctypes.byref(size)
    ):
        found.append(size.value)
    return tuple(found)


def _shares(numel: int, tile: int, most_programs: int) -> tuple[int, int]:
    """Return the number of programs and the number of values per program."""
    tiles = -(-numel // tile)
    tiles_each = tiles if tiles <= _FEW_TILES else -(-tiles // most_programs)
    return -(-tiles // tiles_each), tiles_each * tile


def launch(
    kernels: ModuleType, row: Tensor, values: Values, sample: int | None, most_programs: int
) -> tuple[Any, Any] | None:
    """Launch the kernels on the current device, and return both compiled kernels if both were launched.

    :attr:`Values.real` must be a plain tensor. In the Triton interpreter, the kernels accept CPU tensors. The values
    are divided into at most ``most_programs`` shares. The other arguments are as for :func:`add_statistics_on_device`.
    """
    numel = values.numel
    if not numel:
        return None
    programs, share = _shares(numel, kernels.ROWS * kernels.COLUMNS, min(most_programs, kernels.MOST_PROGRAMS))
    # Any tensor of the right dtype can be passed for unused arguments of a kernel.
    parts, counts = row, row.view(torch.int32)
    if programs > 1:
        parts, counts = _results(kernels, programs, row.device)
    places, gathered = row, False
    if sample is not None and numel > sample:
        # A blocking copy would synchronize the device.
        places, gathered = torch.from_numpy(sample_places(numel, sample)).to(row.device, non_blocking=True), True
    sampled = -1 if sample is None else sample
    reduce = kernels.reduce_share[(programs,)](
        _in_memory(values.real, ordered=sample is not None),
        numel,
        share,
        _bits(values.factor),
        int(values.factor != 1.0),
        places,
        sampled,
        parts,
        counts,
        row,
        gathered=gathered,
        first_bin=HISTOGRAM,
        bin_count=BINS,
        bin_shift=BIN_SHIFT,
        rows=kernels.ROWS,
        columns=kernels.COLUMNS,
        most_copies=kernels.COPIES,
        **_OPTIONS,
    )
    if programs == 1:
        return None
    merge = kernels.merge_shares[(1,)](
        parts,
        counts,
        programs,
        numel,
        sampled,
        row,
        first_bin=HISTOGRAM,
        bin_count=BINS,
        most_programs=kernels.MOST_PROGRAMS,
        most_copies=kernels.COPIES,
        **_OPTIONS,
    )
    return reduce, merge


def _in_memory(tensor: Tensor, *, ordered: bool) -> Tensor:
    """Return the tensor, or a copy with contiguous memory. If ``ordered`` is true, the values are in index order."""
    return tensor if tensor.is_contiguous() or (not ordered and is_dense(tensor)) else tensor.contiguous()


@lru_cache(maxsize=64)
def _bits(number: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def _load(kind: _Kind) -> None:
    """Compile and check the kernels of a kind, and mark it as ready if their results are correct."""
    started = time.perf_counter()
    import triton

    from lightning_recorder.reductions.kernels import triton_kernels

    if not isinstance(triton_kernels.reduce_share, triton.JITFunction):
        raise RuntimeError("TRITON_INTERPRET is set, and interpreted kernels synchronize with the device")
    index, dtype, gathered = kind
    device = torch.device("cuda", index)
    most = _PROGRAMS_PER_MULTIPROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
    most = min(most, triton_kernels.MOST_PROGRAMS)
    with torch.cuda.device(device), torch.inference_mode(False), torch.no_grad():
        for count in _counts(triton_kernels):  # with one program and with several programs
            tensor, found = _numbers(count, dtype), empty_row(_SAMPLE if gathered else None).to(device)
            values = Values(tensor.to(device), 2.0)
            compiled = launch(triton_kernels, found, values, _SAMPLE if gathered else None, most)
            missing = missing_parts(found.cpu(), Values(tensor, 2.0), _SAMPLE if gathered else None)
            if missing is None:
                _log.warning("the kernels that Triton compiled for %s give wrong results and are not used", device)
                return
            _Prepared.missing = missing
        if compiled is not None and not gathered and not missing:
            launcher = _quick_launcher(triton_kernels, compiled, most, device, dtype)
            if launcher is not None:
                _Prepared.launchers[index, dtype] = launcher
    _Prepared.kernels, _Prepared.most_programs[kind] = triton_kernels, most
    _log.info("prepared the kernels for %s on %s in %.1f s", dtype, device, time.perf_counter() - started)


def _quick_launcher(
    kernels: ModuleType, compiled: tuple[Any, Any], most_programs: int, device: torch.device, dtype: torch.dtype
) -> _Launcher | None:
    """Return a launcher of the compiled kernels, or None if this release of Triton launches kernels differently."""
    from triton.runtime import driver

    stream_of = driver.active.get_current_stream
    for options in _WAYS_TO_LAUNCH:
        try:
            launcher = _Launcher(kernels, compiled, most_programs, stream_of, **options)
        except (RuntimeError, OSError, AttributeError) as error:
            _log.debug("the driver does not launch the kernels for %s: %s", device, describe_error(error))
            continue
        if all(_is_right(launcher, _numbers(count, dtype), device) for count in _counts(kernels)):
            return launcher
    return None


_WAYS_TO_LAUNCH: Sequence[dict[str, bool]] = ({"direct": True}, {"with_constants": True}, {})


def _is_right(launcher: _Launcher, tensor: Tensor, device: torch.device) -> bool:
    """Return True if a launch computes the same statistics of some numbers as the host."""
    there, found = tensor.to(device), empty_row().to(device)
    try:
        launcher.launch(there.get_device(), found.data_ptr(), there.data_ptr(), there.numel(), 2.0)
        return missing_parts(found.cpu(), Values(tensor, 2.0)) == ()
    except Exception as error:  # noqa: BLE001 - another release of Triton may raise anything
        _log.debug("no quick launch for %s: %s", device, describe_error(error))
        return False


_SAMPLE = 5


def _counts(kernels: ModuleType) -> tuple[int, int]:
    """Return a number of values for one program, and a number of values for several programs."""
    return 9, (_FEW_TILES + 1) * kernels.ROWS * kernels.COLUMNS + 1


def _numbers(count: int, dtype: torch.dtype) -> Tensor:
    few = torch.tensor(SPECIAL_VALUES, dtype=dtype, device="cpu")
    return few.repeat(-(-count // len(few)))[:count]
