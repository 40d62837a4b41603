"""How many nodes of autograd graphs the taps of this process may look at while these graphs live."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["LIVING_NODES", "MOST_NODES", "LivingNodes"]

# torch frees the nodes of a graph that Python has looked at one inside the other, on the stack: with 45,000 in a row,
# as of a loop unrolled that often, the process ends (torch 2.13, 8 MiB of stack; ``tensor.grad_fn`` alone does it).
MOST_NODES = 20_000

# Counting what still lives takes time, so when it was too much, it is not counted again at once.
_REFUSALS = 1000


class LivingNodes:
    """Counts the nodes that were looked at, and forgets them when their graph is gone.

    One for all taps: it is one graph, whichever of them look at it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._looked_at: list[tuple[Callable[[], object], int]] = []
        self._count = 0
        self._refusals = 0

    def has_room(self, nodes: int) -> bool:
        """Whether that many nodes more may be looked at."""
        if self._count + nodes <= MOST_NODES:  # as nearly always; a number is read without the lock
            return True
        with self._lock:
            if self._count + nodes <= MOST_NODES:
                return True
            if self._refusals:
                self._refusals -= 1
                return False
            self._looked_at = [each for each in self._looked_at if each[0]() is not None]
            self._count = sum(number for _, number in self._looked_at)
            if self._count + nodes <= MOST_NODES:
                return True
            self._refusals = _REFUSALS
            return False

    def add(self, reference: Callable[[], object], nodes: int) -> None:
        """Note that nodes were looked at, which live as long as what the weak reference refers to."""
        with self._lock:
            self._looked_at.append((reference, nodes))
            self._count += nodes

    def expect_less(self) -> None:
        """Count again when there is no room the next time, as after a backward pass, when graphs are freed."""
        self._refusals = 0


LIVING_NODES = LivingNodes()
