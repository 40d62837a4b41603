"""A switch per thread by which the package's own arithmetic stays out of its own recordings."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["is_unrecorded", "unrecorded"]


class _Depth(threading.local):
    value = 0


_depth = _Depth()


@contextmanager
def unrecorded() -> Iterator[None]:
    """Compute without autograd and without being seen by a graph capture of this thread.

    A reduction that runs inside a hook would otherwise appear as a part of the model whose graph is captured on the
    same step.
    """
    _depth.value += 1
    try:
        with torch.no_grad():
            yield
    finally:
        _depth.value -= 1


def is_unrecorded() -> bool:
    """Whether this thread is inside :func:`unrecorded`."""
    return _depth.value > 0
