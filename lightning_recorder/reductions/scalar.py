"""Reductions with a state of a few numbers that are computed for each tensor separately and then merged."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from lightning_recorder.reductions.base import Reduction
from lightning_recorder.reductions.values import Values

__all__ = ["ScalarReduction", "merged_along", "slots_of_all"]


class ScalarReduction(Reduction):
    """Base class of reductions in which each slot is one number that is computed from the values."""

    piecewise = True

    @abstractmethod
    def slots_of(self, values: Values) -> Sequence[Tensor]:
        """Return the state of these values alone as ``width`` 0-d tensors."""

    @override
    def update_state(self, state: Tensor, values: Values) -> None:
        if values.numel:
            self.merge_states(state, _stacked(self.slots_of(values)))

    @override
    def update_deferred(self, state: Tensor, values: Values) -> Tensor | None:
        return slots_of_all([self], values)

    @property
    @override
    def partial(self) -> Reduction | None:
        return self


def slots_of_all(reductions: Iterable[ScalarReduction], values: Values) -> Tensor | None:
    """Return the concatenated states of several reductions for values, or ``None`` without reductions or values."""
    slots = [slot for reduction in reductions for slot in reduction.slots_of(values)] if values.numel else []
    return _stacked(slots) if slots else None


def _stacked(slots: Sequence[Tensor]) -> Tensor:
    """Stack the numbers to one float64 tensor, ``[k]``."""
    # Widen all float32 numbers in one operation: stacking different dtypes takes several times as long.
    narrow = [slot for slot in slots if slot.dtype != torch.float64]
    if narrow:
        widened = iter(torch.stack(narrow).double().unbind())
        slots = [slot if slot.dtype == torch.float64 else next(widened) for slot in slots]
    return torch.stack(tuple(slots))


def merged_along(reduction: Reduction, states: Tensor) -> Tensor:
    """Merge states, ``[..., k, width]``, along the second to last dimension and return ``[..., width]``.

    States are merged in pairs to keep the number of operations small. The given states are overwritten.
    """
    while (count := states.shape[-2]) > 1:
        half = count // 2
        reduction.merge_states(states[..., :half, :], states[..., half : 2 * half, :])
        if count % 2:
            reduction.merge_states(states[..., :1, :], states[..., -1:, :])
        states = states[..., :half, :]
    return states[..., 0, :]
