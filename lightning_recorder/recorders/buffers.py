"""Memory for copies that is used again."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["BufferPool"]

_KEPT_STEPS = 4  # those that may be in use at a time

Kind = tuple[tuple[int, ...], torch.dtype, torch.device]


class BufferPool:
    """Gives tensors to copy into, those that were given back before new ones.

    The copies of a step have the shapes of those of the one before, and on a CPU writing to memory that is new costs
    several times as much as the copy. What was not wanted for some steps, as where shapes differ, is let go of.
    """

    def __init__(self) -> None:
        self._free: dict[Kind, list[tuple[int, Tensor]]] = {}
        self._given_back = 0  # how many times
        self._lock = threading.Lock()

    def take(self, shape: Iterable[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of unknown contents."""
        kind = (tuple(shape), dtype, device)
        with self._lock:
            free = self._free.get(kind)
            if free:
                return free.pop()[1]
        return torch.empty(kind[0], dtype=dtype, device=device)

    def give_back(self, tensors: Iterable[Tensor]) -> None:
        """Take back what nobody reads any more, that of one step."""
        with self._lock:
            self._given_back += 1
            for tensor in tensors:
                kind = (tuple(tensor.shape), tensor.dtype, tensor.device)
                self._free.setdefault(kind, []).append((self._given_back, tensor))
            oldest = self._given_back - _KEPT_STEPS
            fresh = {kind: [each for each in free if each[0] > oldest] for kind, free in self._free.items()}
            self._free = {kind: free for kind, free in fresh.items() if free}
