"""Accumulation of the gradient of one tensor within one backward pass."""

from __future__ import annotations

from torch import Tensor

from lightning_recorder.internals.autograd import graph_task

__all__ = ["Total"]


class Total:
    """The sum of the parts of a gradient that one backward pass has computed so far."""

    def __init__(self) -> None:
        self._task = -1
        self._sum: Tensor | None = None

    def add(self, part: Tensor) -> None:
        """Add a part of the gradient."""
        # Parts that remain from a backward pass that raised do not belong to this one.
        if self._task != graph_task():
            self._task, self._sum = graph_task(), None
        # Adding a dense tensor to a sparse one is not supported, only the reverse.
        if self._sum is not None and self._sum.is_sparse:
            part, self._sum = self._sum, part
        self._sum = part if self._sum is None else self._sum + part

    def take(self) -> Tensor | None:
        """Return the sum of this backward pass and clear it; ``None`` if there is none."""
        total, self._sum = self._sum, None
        return total if self._task == graph_task() else None
