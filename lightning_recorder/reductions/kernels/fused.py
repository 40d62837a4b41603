"""Tensor statistics in one pass through memory, computed by a small C file that is compiled at run time.

Separate torch passes cost several times as much as the arithmetic. The file is plain C without torch headers, so a
compiler builds it in a third of a second. Without a compiler, or after any failure, torch computes the same statistics.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_recorder.bins import BIN_SHIFT, BINS
from lightning_recorder.disk import fits
from lightning_recorder.reductions.kernels.check import SPECIAL_VALUES, empty_row, missing_parts
from lightning_recorder.reductions.row import HISTOGRAM, SAMPLED_NUMEL, SLOTS, Part
from lightning_recorder.reductions.values import PLAIN_TYPES, Values, is_dense, sample_places
from lightning_recorder.temporary import TemporaryFolder

__all__ = ["add_statistics", "add_tensor", "compact_states", "is_fast", "norm_of", "prepare"]

_log = logging.getLogger("lightning_recorder")

_SOURCE = Path(__file__).with_suffix(".c")
# -ffast-math is rejected: some compilers then make the whole process flush subnormals to zero, including the training.
_OPTIONS = ("-O3", "-march=native", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros")
_PLACES = {"BINS": BINS, "BIN_SHIFT": BIN_SHIFT, "HISTOGRAM": HISTOGRAM, "SAMPLED_NUMEL": SAMPLED_NUMEL}
_SLOTS = {f"SLOT_{name.upper()}": place for place, name in enumerate(SLOTS)}
_FLAGS = (*_OPTIONS, *(f"-D{name}={number}" for name, number in (_PLACES | _SLOTS).items()))
# The threads are those of torch, whose OpenMP library is already in the process. The threads of a second OpenMP library
# would compete for the same cores. The build without threads is for compilers whose code needs another OpenMP library.
_THREADS = ("-fopenmp",)
_NO_THREADS = ("-fopenmp-simd",)
_TIMEOUT_S = 60

_KINDS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}

_Kernel = Callable[[int, int, int, float, int, int, int, int], None]
_Compactor = Callable[[int, int, int, int], int]
_Norm = Callable[[int, int, int], float]


class _Loaded:
    """The compiled functions of this process."""

    lock = threading.Lock()
    tried = False
    kernel: _Kernel | None = None
    compactor: _Compactor | None = None
    norm: _Norm | None = None
    missing: tuple[Part, ...] = ()
    """The parts of a row that the function does not compute."""


def prepare() -> bool:
    """Load the compiled function, and build it first if it is not cached. Return True if it is available.

    The cache is ``$XDG_CACHE_HOME/lightning_recorder`` (``~/.cache/lightning_recorder``), which only the user can write
    to. ``LIGHTNING_RECORDER_FUSED=0`` in the environment disables the function. This function never raises.
    """
    with _Loaded.lock:
        if not _Loaded.tried:
            _Loaded.tried = True
            if os.environ.get("LIGHTNING_RECORDER_FUSED") != "0":
                _load()
    return _Loaded.kernel is not None


def add_statistics(row: Tensor, values: Values, sample: int | None) -> bool:
    """Add the statistics of values to a state of :class:`Statistics`, if the compiled function supports them.

    Args:
        row: The state, ``[width]`` float64 on the CPU, as :class:`Statistics` lays it out.
        values: The values of any tensor.
        sample: The maximum number of values to count in the histogram; ``None`` for all.

    Returns:
        True if the state was updated. False without any change if the function is unavailable, or if the tensor is not
        on the CPU, is not float32, float64 or bfloat16, or is not a plain dense array.
    """
    if not _add(row, values.raw, values.factor, sample):
        return False
    for part in _Loaded.missing:
        part.add(row, values)
    return True


def is_fast(tensor: Tensor) -> bool:
    """Return True if the compiled function supports the device, the dtype and the layout of a tensor."""
    return tensor.is_cpu and tensor.dtype in _KINDS and tensor.layout is torch.strided and not tensor.is_nested


def add_tensor(row: Tensor, tensor: Tensor, factor: float, sample: int | None) -> bool:
    """Add the statistics of a tensor times a factor to a state, as :func:`add_statistics` does.

    The tensor may be part of an autograd graph. No torch operation runs that autograd or a dispatch mode would see,
    unless the tensor must be copied to become contiguous. The state does not change if the function does not compute
    all statistics.
    """
    return not _Loaded.missing and _add(row, tensor, factor, sample)


def _add(row: Tensor, tensor: Tensor, factor: float, sample: int | None) -> bool:
    kernel = _Loaded.kernel
    kind = _KINDS.get(tensor.dtype)
    if kernel is None or kind is None or type(tensor) not in PLAIN_TYPES:
        return False
    if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_neg() or tensor.is_nested:
        return False
    if not row.is_contiguous() or not row.is_cpu:
        return False
    # The order of the values matters only for a sample. Otherwise a dense tensor is read in memory order.
    if not tensor.is_contiguous() and (sample is not None or not is_dense(tensor)):
        tensor = tensor.contiguous()
    numel = tensor.numel()
    try:
        pointer = tensor.data_ptr()
    except RuntimeError:  # a tensor inside a transform of torch.func
        return False
    if not pointer and numel:  # zeros without memory, which autograd creates, or a wrapper
        return False
    places, sampled = 0, -1
    if sample is not None:
        sampled = min(sample, numel)
        places = sample_places(numel, sample).ctypes.data if numel > sample else 0
    kernel(pointer, numel, kind, factor, places, sampled, torch.get_num_threads(), row.data_ptr())
    return True


def compact_states(states: Tensor) -> NDArray[np.float64] | None:
    """Return a copy of states without the empty bins of their histograms, or None if there is no compiled function.

    Args:
        states: The states, ``[rows, width]`` float64 on the CPU, contiguous, as :class:`Statistics` lays them out.

    Returns:
        One array with four parts: the slots that are no bins, ``[rows, width - 2048]``; the number of nonempty bins of
        each row as the bits of int64, ``[rows]``; the counts of these bins; and the bins as the bits of uint16.
    """
    if _Loaded.compactor is None:
        return None
    rows, width = states.shape
    scratch, address = _scratch.of(rows * (width + 1 + BINS // 4))
    return scratch[: _Loaded.compactor(states.data_ptr(), rows, width, address)].copy()


def norm_of(tensors: Iterable[Tensor]) -> float | None:
    """Return the Euclidean norm of all values of some tensors, or None if the compiled function does not support them.

    It supports plain dense float32 tensors on the CPU. It takes half the time of a torch kernel for each tensor: all
    threads share the values of all tensors, and no result is a tensor. Each sum of 2,048 squares is a float32, so it
    overflows and underflows like that of torch.
    """
    if _Loaded.norm is None:
        return None
    arrays = array("q")
    for each in tensors:
        if type(each) is not Tensor or each.dtype is not torch.float32 or not each.is_cpu:
            return None
        if each.layout is not torch.strided or not is_dense(each):
            return None
        pointer, numel = each.data_ptr(), each.numel()
        if not pointer and numel:  # zeros without memory, which autograd creates
            return None
        arrays.append(pointer)
        arrays.append(numel)
    address, words = arrays.buffer_info()
    return _Loaded.norm(address, words // 2, torch.get_num_threads())


class _Scratch(threading.local):
    """Memory for the results of :func:`compact_states`, one array per thread."""

    def __init__(self) -> None:
        self._array = np.empty(0)
        self._address = 0

    def of(self, size: int) -> tuple[NDArray[np.float64], int]:
        """Return an array of at least this size, and its address."""
        if len(self._array) < size:  # the system provides only the memory that is written
            self._array = np.empty(size)
            self._address = self._array.ctypes.data
        return self._array, self._address


_scratch = _Scratch()


def _load() -> None:
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if compiler is None or ctypes.sizeof(ctypes.c_void_p) != 8:
        _log.info("there is no C compiler; torch computes the statistics")
        return
    if not _load_with(compiler, _FLAGS + _THREADS):
        _load_with(compiler, _FLAGS + _NO_THREADS)


def _load_with(compiler: str, flags: Sequence[str]) -> bool:
    """Load the function as built with these flags. Return True if it is available."""
    try:
        library = _built(compiler, flags)
        kernel = _opened(library)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: no home folder
        _log.info("%s with %s did not build: %s", compiler, flags[-1], error)
        return False
    missing = _missing(kernel)
    if missing is None:
        _log.warning("the C function built by %s gives wrong results and is not used", compiler)
        return False
    _Loaded.kernel, _Loaded.missing = kernel, missing
    _Loaded.compactor, _Loaded.norm = _opened_compactor(library), _opened_norm(library)
    return True


def _built(compiler: str, flags: Sequence[str]) -> Path:
    """Return the path of the library, from the cache or newly built."""
    folder = _cache()
    key = hashlib.sha256("\0".join([_SOURCE.read_text(), compiler, *flags, _processor()]).encode()).hexdigest()[:16]
    library = folder / f"fused-{key}.so"
    if library.exists():
        return library
    if not fits(folder):
        raise OSError(errno.ENOSPC, "the disk has no space for the library", str(folder))
    started = time.perf_counter()
    with TemporaryFolder(folder) as scratch:
        object_file, made = scratch.path / "fused.o", scratch.path / "fused.so"
        # Compile and link separately. Linked without -fopenmp, the library brings no OpenMP runtime of its own and
        # uses the one that torch has loaded.
        _run([compiler, *flags, "-c", str(_SOURCE), "-o", str(object_file)])
        _run([compiler, "-shared", str(object_file), "-o", str(made), "-lm"])
        # Atomic, because several processes may build at the same time.
        made.replace(library)
    _log.info("built %s in %.1f s", library, time.perf_counter() - started)
    return library


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=_TIMEOUT_S)


def _cache() -> Path:
    """Return the cache folder, which nobody else may write to because code is loaded from it."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "lightning_recorder")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder} is writable by other users")
    return folder


def _processor() -> str:
    """Return a text that identifies the processor, because machines of a cluster may share a home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.platform()} {platform.processor()} {features}"


def _opened(library: Path) -> _Kernel:
    # PyDLL holds the GIL: the call takes less time than releasing and reacquiring it.
    function = ctypes.PyDLL(str(library), mode=os.RTLD_NOW).add_statistics
    function.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int,
        ctypes.c_double,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int,
        ctypes.c_void_p,
    ]
    function.restype = None
    return function


def _opened_compactor(library: Path) -> _Compactor:
    function = ctypes.PyDLL(str(library), mode=os.RTLD_NOW).compact_states
    numbers, address = ctypes.c_int64, ctypes.c_void_p
    function.argtypes = [address, numbers, numbers, address]
    function.restype = numbers
    return function


def _opened_norm(library: Path) -> _Norm:
    function = ctypes.PyDLL(str(library), mode=os.RTLD_NOW).norm_of_floats
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    function.restype = ctypes.c_double
    return function


def _missing(kernel: _Kernel) -> tuple[Part, ...] | None:
    """Return the parts of a row that the function does not compute, or ``None`` if it is wrong for any dtype."""
    missing: tuple[Part, ...] | None = ()
    for dtype, kind in _KINDS.items():
        tensor, row = torch.tensor(SPECIAL_VALUES, dtype=dtype, device="cpu"), empty_row()
        kernel(tensor.data_ptr(), tensor.numel(), kind, 2.0, 0, -1, 1, row.data_ptr())
        missing = missing_parts(row, Values(tensor, 2.0))
        if missing is None:
            return None
    return missing
