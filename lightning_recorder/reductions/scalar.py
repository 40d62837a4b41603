"""Reductions whose state is a few numbers that are computed of each tensor alone and then merged."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from lightning_recorder.reductions.base import Reduction
from lightning_recorder.reductions.values import Values

__all__ = ["ScalarReduction", "merged_along", "words_of_all"]


class ScalarReduction(Reduction):
    """Base of the reductions of which each word is one number of the values."""

    piecewise = True

    @abstractmethod
    def words_of(self, values: Values) -> Sequence[Tensor]:
        """The state of these values alone, ``width`` tensors, 0-d."""

    @override
    def update_state(self, state: Tensor, values: Values) -> None:
        if values.numel:
            self.merge_states(state, _stacked(self.words_of(values)))

    @override
    def begin(self, state: Tensor, values: Values) -> Tensor | None:
        return words_of_all([self], values)

    @property
    @override
    def head(self) -> Reduction | None:
        return self


def words_of_all(reductions: Iterable[ScalarReduction], values: Values) -> Tensor | None:
    """The states of several reductions, one behind the other, of these values; ``None`` if there are none of either."""
    words = [word for reduction in reductions for word in reduction.words_of(values)] if values.numel else []
    return _stacked(words) if words else None


def _stacked(words: Sequence[Tensor]) -> Tensor:
    """The numbers as one float64 tensor, ``[k]``."""
    # All float32 ones widened together: stacking different types takes several times as long.
    narrow = [word for word in words if word.dtype != torch.float64]
    if narrow:
        widened = iter(torch.stack(narrow).double().unbind())
        words = [word if word.dtype == torch.float64 else next(widened) for word in words]
    return torch.stack(tuple(words))


def merged_along(reduction: Reduction, states: Tensor) -> Tensor:
    """Merge states, ``[..., k, width]``, along the last dimension but one, ``[..., width]``.

    In pairs, so that few operations do for many states; the states given are overwritten.
    """
    while (count := states.shape[-2]) > 1:
        half = count // 2
        reduction.merge_states(states[..., :half, :], states[..., half : 2 * half, :])
        if count % 2:
            reduction.merge_states(states[..., :1, :], states[..., -1:, :])
        states = states[..., :half, :]
    return states[..., 0, :]
