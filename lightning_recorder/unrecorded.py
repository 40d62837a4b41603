"""A switch per thread by which the package's own arithmetic stays out of its own recordings."""

from __future__ import annotations

import threading

import torch

from lightning_recorder.autograd import set_grad_enabled

__all__ = ["is_unrecorded", "unrecorded"]


class _Depth(threading.local):
    value = 0


_depth = _Depth()


class unrecorded:  # noqa: N801 - read as a verb: with unrecorded()
    """Compute without autograd and without being seen by a graph capture of this thread.

    A reduction that runs inside a hook would otherwise appear as a part of the model whose graph is captured on the
    same step. A class and no generator, since it is entered for every tensor that is recorded.
    """

    __slots__ = ("_had_grad",)

    def __enter__(self) -> None:
        _depth.value += 1
        self._had_grad = torch.is_grad_enabled()
        if self._had_grad:
            set_grad_enabled(False)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        _depth.value -= 1
        if self._had_grad:
            set_grad_enabled(True)


def is_unrecorded() -> bool:
    """Whether this thread is inside :func:`unrecorded`."""
    return _depth.value > 0
