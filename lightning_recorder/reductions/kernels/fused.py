"""Tensor statistics in one pass through memory, computed by a small C file that is compiled at run time.

Separate torch passes take several times as long as the arithmetic. The file is plain C without torch headers, so a
compiler builds it in a third of a second, in the background. Without a compiler, the compiled code in the wheel for
this kind of machine is used. While there is no compiled code, torch computes the same statistics. Counts, extrema and
histograms are bitwise equal. Means and sums of squares differ by less than 1e-12 of the root mean square.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_recorder.bins import BIN_SHIFT, BINS
from lightning_recorder.disk import fits
from lightning_recorder.errors import describe_error
from lightning_recorder.internals.threads import compute_alone
from lightning_recorder.reductions.kernels.self_test import SPECIAL_VALUES, empty_row, missing_parts
from lightning_recorder.reductions.row import HISTOGRAM, SAMPLED_NUMEL, SLOTS, Part
from lightning_recorder.reductions.scalars import SPREAD_VALUES
from lightning_recorder.reductions.values import PLAIN_TYPES, Values, is_dense, sample_places
from lightning_recorder.temporary import TemporaryFolder

__all__ = [
    "add_spread",
    "add_statistics",
    "add_tensor",
    "build_for_wheel",
    "compact_states",
    "is_fast",
    "join_rows",
    "launch_function",
    "may_become_available",
    "norm_of",
    "prepare",
]

_log = logging.getLogger("lightning_recorder")

_SOURCE = Path(__file__).with_suffix(".c")
# Do not add -ffast-math: some compilers then make the whole process, also the training, flush subnormals to zero.
_OPTIONS = ("-O3", "-march=native", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros")
_PLACES = {"BINS": BINS, "BIN_SHIFT": BIN_SHIFT, "HISTOGRAM": HISTOGRAM, "SAMPLED_NUMEL": SAMPLED_NUMEL}
_SLOTS = {f"SLOT_{name.upper()}": place for place, name in enumerate(SLOTS)}
_FLAGS = (*_OPTIONS, *(f"-D{name}={number}" for name, number in (_PLACES | _SLOTS).items()))
# The code uses the threads of torch, whose OpenMP library is already in the process. The threads of a second OpenMP
# library would compete for the same cores. Compilers whose code needs another OpenMP library build without threads.
_THREADS = ("-fopenmp",)
_NO_THREADS = ("-fopenmp-simd",)
_TIMEOUT_S = 20
_SHIPPED = _SOURCE.parent
"""The folder of the compiled code in a wheel."""
_PORTABLE = {
    "x86_64": ("-march=x86-64-v3", {"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}),
    "aarch64": ("-march=armv8-a", {"asimd", "fp"}),
}
"""The compiler flag for each machine type of the wheels, and the processor features that this flag requires."""

_FLOATS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}
_KINDS = {
    **_FLOATS,
    torch.bool: 3,
    torch.uint8: 3,
    torch.int8: 4,
    torch.int16: 5,
    torch.int32: 6,
    torch.int64: 7,
}

_Kernel = Callable[[int, int, int, float, int, int, int, int], None]
_Compactor = Callable[[int, int, int, int], int]
_Norm = Callable[[int, int, int], float]
_Spread = Callable[[int, int, int, int, int, int, int], None]
_Join = Callable[[int, int, int, int, int, int, int, int, int, int, int, bool], None]
_Launch = Callable[[int, int, int, int, int, float, int, int], int]
_C_TYPES = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "i": ctypes.c_int, "d": ctypes.c_double}
_FUNCTIONS = {
    "kernel": ("add_statistics", "pnidpnip", None),
    "compactor": ("compact_states", "pnnp", "n"),
    "norm": ("norm_of_floats", "pni", "d"),
    "spread": ("add_spread", "pnnnnip", None),
    "join": ("join_rows", "piiipppnpnpi", None),
    "launch": ("launch_statistics", "ppnnndnn", "i"),
}
"""The C functions by their names in :class:`_Loaded`: name in C, argument types, result type."""


class _Loaded:
    """The compiled functions of this process."""

    lock = threading.Lock()
    process = 0
    """The id of the process that has tried to load or build the functions; 0 before any attempt."""
    thread: threading.Thread | None = None
    """The thread that builds the functions, if a build was necessary."""
    compiler: subprocess.Popen[bytes] | None = None
    """The running compiler process."""
    kernel: _Kernel | None = None
    compactor: _Compactor | None = None
    norm: _Norm | None = None
    spread: _Spread | None = None
    join: _Join | None = None
    launch: _Launch | None = None
    missing: tuple[Part, ...] = ()
    """The parts of a row that the compiled function does not compute."""


def prepare(*, wait: bool = False) -> bool:
    """Load the compiled function, and return True if it is available.

    If the function is not cached, a thread builds it, and torch computes the statistics until the build is done. A
    compiler that takes more than 20 seconds is stopped. The cache is ``$XDG_CACHE_HOME/lightning_recorder``
    (``~/.cache/lightning_recorder``), which only the user can write to. ``LIGHTNING_RECORDER_FUSED=0`` in the
    environment disables the function. This function never raises.

    Args:
        wait: Wait until the build is done.
    """
    with _Loaded.lock:
        # A forked process has no build thread, but keeps the functions that its parent has loaded.
        if _Loaded.process != os.getpid() and _Loaded.kernel is None:
            _Loaded.process, _Loaded.thread, _Loaded.compiler = os.getpid(), None, None
            if os.environ.get("LIGHTNING_RECORDER_FUSED") != "0":
                _load()
    thread = _Loaded.thread
    if wait and thread is not None:
        thread.join()
    return _Loaded.kernel is not None


def may_become_available() -> bool:
    """Return True if the compiled function is available or being built."""
    return _Loaded.kernel is not None or (_Loaded.thread is not None and _Loaded.thread.is_alive())


def add_statistics(row: Tensor, values: Values, sample: int | None) -> bool:
    """Add the statistics of values to a state of :class:`Statistics`, if the compiled function supports them.

    ``row`` is ``[width]`` float64 on the CPU, as :class:`Statistics` lays it out. At most ``sample`` values are counted
    in the histogram.

    Returns:
        True if the state was updated. False, without any change, if the function is unavailable or does not support
        the tensor. It supports plain dense CPU tensors of float32, float64, bfloat16 and integers.
    """
    if not _add(row, values.raw, values.factor, sample):
        return False
    for part in _Loaded.missing:
        part.add(row, values)
    return True


def launch_function() -> _Launch | None:
    """Return the function that launches the kernels on a GPU, or None if there is no compiled code.

    The arguments of this function are: the addresses of a plan (see ``fused.c``), of a stream and of a state; the
    address, number and factor of the values; the addresses of the parts and of the counts of all programs.
    """
    prepare(wait=True)
    return _Loaded.launch


def is_fast(tensor: Tensor) -> bool:
    """Return True if the compiled function supports the device, the dtype and the layout of a tensor."""
    return tensor.is_cpu and tensor.dtype in _KINDS and tensor.layout is torch.strided and not tensor.is_nested


def add_tensor(row: Tensor, tensor: Tensor, factor: float, sample: int | None) -> bool:
    """Add the statistics of a tensor times a factor to a state, as :func:`add_statistics` does.

    The tensor may be part of an autograd graph. No torch operation runs that autograd or a dispatch mode would see,
    unless the tensor must be copied to become contiguous. If the compiled function does not compute all statistics, the
    state does not change.
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
    if not pointer and numel:  # zeros without memory, as autograd creates, or a wrapper
        return False
    places, sampled = 0, -1
    if sample is not None:
        sampled = min(sample, numel)
        places = sample_places(numel, sample).ctypes.data if numel > sample else 0
    kernel(pointer, numel, kind, factor, places, sampled, torch.get_num_threads(), row.data_ptr())
    return True


def add_spread(state: Tensor, tensor: Tensor) -> bool:
    """Add the sums of squares of a matrix to a state of :class:`BatchSpread`, if the compiled function supports it.

    The state is ``[2]`` float64. Return True if the state was updated, otherwise False.
    """
    kind = _FLOATS.get(tensor.dtype)
    if _Loaded.spread is None or kind is None or type(tensor) not in PLAIN_TYPES:
        return False
    if not (tensor.is_cpu and state.is_cpu):
        return False
    if tensor.layout is not torch.strided or tensor.is_neg() or not tensor.is_contiguous():
        return False
    try:
        pointer = tensor.data_ptr()
    except RuntimeError:  # a tensor inside a transform of torch.func
        return False
    if not pointer:  # zeros without memory, which autograd creates
        return False
    rows, columns = tensor.shape
    down, along = (-(-size // most) for size, most in zip(tensor.shape, SPREAD_VALUES, strict=True))
    _Loaded.spread(pointer, rows, columns, down, along, kind, state.data_ptr())
    return True


def compact_states(states: Tensor) -> NDArray[np.float64] | None:
    """Return a copy of states without the empty bins of their histograms, or None if there is no compiled function.

    Args:
        states: The states, ``[rows, width]`` float64 on the CPU, contiguous, as :class:`Statistics` lays them out.

    Returns:
        One array with four parts: all slots but the bins, ``[rows, width - 2048]``; the number of nonempty bins of each
        row as int64 bits, ``[rows]``; the counts of the nonempty bins; and the indices of these bins as uint16 bits.
    """
    if _Loaded.compactor is None:
        return None
    rows, width = states.shape
    scratch, address = _scratch.of(rows * (width + 1 + BINS // 4))
    return scratch[: _Loaded.compactor(states.data_ptr(), rows, width, address)].copy()


def norm_of(tensors: Iterable[Tensor]) -> float | None:
    """Return the Euclidean norm of all values of some tensors, or None if the compiled function does not support them.

    The function supports plain dense float32 tensors on the CPU. It takes half the time of one torch kernel per tensor,
    because all threads share the values of all tensors, and no tensors are created for results. Each sum of 2,048
    squares is a float32, so it overflows and underflows as in torch.
    """
    if _Loaded.norm is None:
        return None
    arrays = array("q")
    for each in tensors:
        if type(each) is not Tensor or each.dtype is not torch.float32 or not each.is_cpu:
            return None
        # Channels-last gradients are dense, too. is_contiguous() comes first, because this runs for every gradient.
        if each.layout is not torch.strided or not (each.is_contiguous() or is_dense(each)):
            return None
        pointer, numel = each.data_ptr(), each.numel()
        if not pointer and numel:  # zeros without memory, which autograd creates
            return None
        arrays.append(pointer)
        arrays.append(numel)
    address, words = arrays.buffer_info()
    return _Loaded.norm(address, words // 2, torch.get_num_threads())


def join_rows() -> _Join | None:
    """Return the C function that joins the numbers of the rows of arrays (see ``fused.c`` for arguments), or None."""
    return _Loaded.join


class _Scratch(threading.local):
    """Memory for the results of :func:`compact_states`, one array per thread."""

    def __init__(self) -> None:
        self._array = np.empty(0)
        self._address = 0

    def of(self, size: int) -> tuple[NDArray[np.float64], int]:
        """Return an array of at least the given size, and its address."""
        if len(self._array) < size:  # memory that is never written is not allocated by the system
            self._array = np.empty(size)
            self._address = self._array.ctypes.data
        return self._array, self._address


_scratch = _Scratch()


def _load() -> None:
    """Load the functions from the cache, or begin to build them."""
    try:
        compiler = _compiler()
        if not compiler or ctypes.sizeof(ctypes.c_void_p) != 8:
            if not _use_shipped():
                _log.info("there is no C compiler; torch computes the statistics")
            return
        libraries = {flags: _library(compiler, flags) for flags in (_FLAGS + _THREADS, _FLAGS + _NO_THREADS)}
        if any(library.exists() and not _use(library) for library in libraries.values()):
            return
        thread = threading.Thread(target=_build, args=(compiler, libraries), name="lightning_recorder", daemon=True)
        thread.start()
        _Loaded.thread = thread
    except Exception as error:  # noqa: BLE001 - no home folder, an open quote in CC, no more threads
        _warn(describe_error(error))


def _compiler() -> list[str]:
    """Return the words of the compiler command; empty if there is no compiler.

    Raises:
        ValueError: If the variable ``CC`` has an open quote.
    """
    words = shlex.split(os.environ.get("CC", ""))  # split like a shell: "gcc -m64", "ccache gcc"
    return words or [name for name in ("cc", "gcc", "clang") if shutil.which(name)][:1]


def _build(compiler: Sequence[str], libraries: Mapping[tuple[str, ...], Path]) -> None:
    """Build the functions with the first flags that work, and use them."""
    compute_alone()  # leave the cores to the training
    deadline, why = time.monotonic() + _TIMEOUT_S, ""
    for flags, library in libraries.items():
        try:
            _compile(compiler, flags, library, deadline)
            why = _use(library)
        except subprocess.TimeoutExpired:
            why = f"it was stopped after {_TIMEOUT_S} s"
            break
        except Exception as error:  # noqa: BLE001 - an error in a background thread would stay unseen
            why = describe_error(error)
        if not why:
            return
    _warn(f"{shlex.join(compiler)} did not build it, {why}")


def build_for_wheel(compiler: Sequence[str], machine: str, folder: Path) -> list[Path]:
    """Build the compiled code of a wheel for ``"x86_64"`` or ``"aarch64"``, with and without threads. Return its files.

    Raises:
        RuntimeError: If the compiler fails.
    """
    made, option = [], _PORTABLE[machine][0]
    for name, threads in (("threads", _THREADS), ("plain", _NO_THREADS)):
        flags = [option if each == "-march=native" else each for each in (*_FLAGS, *threads)]
        made.append(folder / f"fused-{machine}-{name}.so")
        _compile(compiler, flags, made[-1], time.monotonic() + 5 * _TIMEOUT_S)
    return made


def _use_shipped() -> bool:
    """Use the compiled code of the wheel. Return False if there is none that works on this machine."""
    machine = platform.machine()
    _, needed = _PORTABLE.get(machine, ("", {""}))
    if not needed <= set(_features().split()):
        return False
    libraries = (_SHIPPED / f"fused-{machine}-{name}.so" for name in ("threads", "plain"))
    return any(library.exists() and not _use(library) for library in libraries)


def _warn(why: str) -> None:
    if _use_shipped():
        _log.info("the C code of the wheel computes the statistics on the CPU: %s", why)
        return
    if os.environ.get("LOCAL_RANK", "0") == "0":  # once per machine
        _log.warning(
            "torch computes the statistics on the CPU, which takes longer than the C code: %s. Set CC to a C compiler, "
            "or LIGHTNING_RECORDER_FUSED=0 to use torch without this line",
            why,
        )


def _use(library: Path) -> str:
    """Use the functions of a library. Return the reason if they cannot be used, otherwise an empty string."""
    try:
        found = _opened(library)
    except (OSError, AttributeError) as error:
        return describe_error(error)
    missing = _missing(found["kernel"])
    if missing is None:
        return "its code gives wrong results"
    _Loaded.missing = missing
    for name in reversed(found):  # set the kernel last, because other threads use the functions as soon as it is set
        setattr(_Loaded, name, found[name])
    return ""


def _library(compiler: Sequence[str], flags: Sequence[str]) -> Path:
    """Return the path of the library in the cache."""
    key = "\0".join([_SOURCE.read_text(), *compiler, *flags, _processor()])
    return _cache() / f"fused-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"


def _compile(compiler: Sequence[str], flags: Sequence[str], library: Path, deadline: float) -> None:
    """Build a library.

    Raises:
        OSError: If the compiler does not exist, or the disk has no space.
        RuntimeError: If the compiler fails.
        subprocess.TimeoutExpired: If the compiler takes too long.
    """
    folder, started = library.parent, time.monotonic()
    if not fits(folder):
        raise OSError(errno.ENOSPC, "the disk has no space for the library", str(folder))
    with TemporaryFolder(folder) as scratch:
        object_file, made = scratch.path / "fused.o", scratch.path / "fused.so"
        # Compile and link separately. If linked without -fopenmp, the library has no OpenMP runtime of its own and
        # uses the runtime that torch has loaded.
        for arguments in (
            [*flags, "-c", str(_SOURCE), "-o", str(object_file)],
            ["-shared", str(object_file), "-o", str(made), "-lm"],
        ):
            _run([*compiler, *arguments], scratch.path / "messages.txt", deadline)
        # Rename the file, which is atomic, because several processes may build at the same time.
        made.replace(library)
    _log.info("built %s in %.1f s", library, time.monotonic() - started)


def _run(command: list[str], messages: Path, deadline: float) -> None:
    # Use a file instead of a pipe, because child processes of a killed compiler would keep a pipe open.
    with messages.open("wb") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True)
    _Loaded.compiler = process
    try:
        status = process.wait(max(0.0, deadline - time.monotonic()))
        if _Loaded.compiler is not process:  # the compiler was stopped because this process ends
            raise SystemExit
    finally:
        _stop_compiler()
    if status:
        words = messages.read_text(errors="replace").strip()[-300:]
        raise RuntimeError(f"it ended with status {status}" + (f": {words}" if words else ""))


@atexit.register
def _stop_compiler() -> None:
    """Stop the compiler and its child processes if it is still running."""
    process, _Loaded.compiler = _Loaded.compiler, None
    if process is not None and _Loaded.process == os.getpid() and process.poll() is None:
        with suppress(OSError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(1.0)


def _cache() -> Path:
    """Return the cache folder. No other user may write to it, because code is loaded from it."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "lightning_recorder")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder} is writable by other users")
    return folder


def _processor() -> str:
    """Return a text that identifies the processor, because different machines may share a home folder."""
    return f"{platform.platform()} {platform.processor()} {_features()}"


def _features() -> str:
    """Return the line with the processor features; empty if unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _opened(library: Path) -> dict[str, Callable[..., Any]]:
    """Return the functions of a library by their names in :class:`_Loaded`."""
    code = ctypes.PyDLL(str(library), mode=os.RTLD_NOW)  # keeps the GIL: releasing it takes longer than a call
    found = {}
    for name, (symbol, arguments, result) in _FUNCTIONS.items():
        found[name] = getattr(code, symbol)
        found[name].argtypes = [_C_TYPES[each] for each in arguments]
        found[name].restype = None if result is None else _C_TYPES[result]
    return found


def _missing(kernel: _Kernel) -> tuple[Part, ...] | None:
    """Return the parts of a row that the kernel does not compute; ``None`` if it is wrong for at least one dtype."""
    missing: tuple[Part, ...] | None = ()
    for dtype, kind in _FLOATS.items():
        tensor, row = torch.tensor(SPECIAL_VALUES, dtype=dtype, device="cpu"), empty_row()
        kernel(tensor.data_ptr(), tensor.numel(), kind, 2.0, 0, -1, 1, row.data_ptr())
        missing = missing_parts(row, Values(tensor, 2.0))
        if missing is None:
            return None
    return missing
