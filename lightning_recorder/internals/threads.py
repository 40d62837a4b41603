"""The number of threads that torch operations use."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

__all__ = ["compute_alone"]

_SETTERS = ("omp_set_num_threads", "MKL_Set_Num_Threads_Local")


def compute_alone() -> None:
    """Let the torch operations of the current thread use this thread only.

    If the operations of a background thread started more threads, these would slow down the training more than the
    operations themselves: with more OpenMP threads than cores, the training's threads sleep instead of spin at the end
    of each parallel region. The settings of other threads do not change. ``torch.set_num_threads`` would change the
    setting of new threads, too. No effect if torch uses neither OpenMP nor MKL.
    """
    torch.get_num_threads()  # torch sets the number at its first use in a thread, so cause this first use now
    for library in _libraries():
        for name in _SETTERS:
            if hasattr(library, name):
                getattr(library, name)(1)


def _libraries() -> Iterator[ctypes.CDLL]:
    """Yield the libraries of the process that may contain the functions."""
    with suppress(OSError, TypeError):  # Windows has no handle for all libraries
        yield ctypes.CDLL(None)
    # This library contains MKL, whose symbols are not visible globally.
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if hasattr(os, "RTLD_NOLOAD"):
        with suppress(OSError):
            yield ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_NOLOAD)
