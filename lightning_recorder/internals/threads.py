"""The threads in which torch computes."""

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
    """Let the torch operations of the current thread run without further threads.

    The threads that operations of a background thread start cost the training more than these operations: with more
    OpenMP threads than cores, those of the training sleep instead of spin at the end of each parallel part. Other
    threads keep their number of threads, which ``torch.set_num_threads`` would change for new ones. There is no effect
    if torch uses neither OpenMP nor MKL.
    """
    torch.get_num_threads()  # torch sets the number when a thread uses it for the first time
    for library in _libraries():
        for name in _SETTERS:
            if hasattr(library, name):
                getattr(library, name)(1)


def _libraries() -> Iterator[ctypes.CDLL]:
    """Return the libraries of the process that may have the functions."""
    with suppress(OSError, TypeError):  # Windows has no handle for all libraries
        yield ctypes.CDLL(None)
    # MKL is a part of this library, whose names are not visible to others.
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if hasattr(os, "RTLD_NOLOAD"):
        with suppress(OSError):
            yield ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_NOLOAD)
