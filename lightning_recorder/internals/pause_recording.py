"""A per-thread switch that excludes the package's own arithmetic from its recordings."""

from __future__ import annotations

import threading

import torch

from lightning_recorder.internals.autograd import set_grad_enabled, without_functions

__all__ = ["PAUSES", "is_paused", "pause_recording"]


class _Pauses(threading.local):
    value = 0


PAUSES = _Pauses()
"""``value`` is the number of :class:`pause_recording` contexts that this thread has entered."""


class pause_recording:  # noqa: N801 - reads like a verb: with pause_recording()
    """Disable autograd and graph capture in this thread.

    Without this context, a reduction inside a hook would appear in a graph that is captured in the same step. A class
    has less overhead than a generator, which matters because the context is entered for every recorded tensor.
    """

    __slots__ = ("_had_grad",)

    def __enter__(self) -> None:
        PAUSES.value += 1
        self._had_grad = torch.is_grad_enabled()
        if self._had_grad:
            with without_functions():  # otherwise, this would call the active function mode
                set_grad_enabled(False)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        PAUSES.value -= 1
        if self._had_grad:
            with without_functions():
                set_grad_enabled(True)


def is_paused() -> bool:
    """Return True if this thread is inside :class:`pause_recording`."""
    return PAUSES.value > 0
