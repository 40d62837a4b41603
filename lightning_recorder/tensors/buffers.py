"""Pool of reusable memory for tensor copies."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["BufferPool"]

_KEPT_STEPS = 4  # steps that may be in use at the same time

Kind = tuple[tuple[int, ...], torch.dtype, torch.device]


class BufferPool:
    """A pool of tensors to copy into, which reuses returned tensors.

    The copies of consecutive steps have the same shapes, and on a CPU writing to new memory takes several times as long
    as the copy itself. Tensors that were not needed for several steps, for example because shapes vary, are freed.
    """

    def __init__(self) -> None:
        self._free: dict[Kind, list[tuple[int, Tensor]]] = {}
        self._given_back = 0  # number of calls of give_back
        self._lock = threading.Lock()

    def take(self, shape: Iterable[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor with undefined contents."""
        kind = (tuple(shape), dtype, device)
        with self._lock:
            free = self._free.get(kind)
            if free:
                return free.pop()[1]
        return torch.empty(kind[0], dtype=dtype, device=device)

    def give_back(self, tensors: Iterable[Tensor]) -> None:
        """Return the tensors of one step to the pool when they are no longer read."""
        with self._lock:
            self._given_back += 1
            for tensor in tensors:
                kind = (tuple(tensor.shape), tensor.dtype, tensor.device)
                self._free.setdefault(kind, []).append((self._given_back, tensor))
            oldest = self._given_back - _KEPT_STEPS
            fresh = {kind: [each for each in free if each[0] > oldest] for kind, free in self._free.items()}
            self._free = {kind: free for kind, free in fresh.items() if free}
