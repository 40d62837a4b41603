"""A limit on the autograd graph nodes that the taps of this process visit while the graphs are alive."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["GRAPH_NODE_LIMIT", "MOST_NODES", "GraphNodeLimit"]

# torch frees nodes that Python has visited recursively. With 45,000 of them in a row, such as from an unrolled loop,
# the stack overflows and the process ends (torch 2.13, 8 MiB of stack; ``tensor.grad_fn`` alone is enough).
MOST_NODES = 20_000

# Counting the live nodes takes time, so after a refusal the next count waits for this many requests.
_REFUSALS = 1000


class GraphNodeLimit:
    """A counter of visited nodes that drops them when their graph is freed.

    All taps share one counter, because they visit the same graph.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._looked_at: list[tuple[Callable[[], object], int]] = []
        self._count = 0
        self._refusals = 0

    def has_room(self, nodes: int) -> bool:
        """Return True if that many more nodes may be visited."""
        if self._count + nodes <= MOST_NODES:  # the common case; reading a number needs no lock
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
        """Count visited nodes that live as long as the target of the weak reference."""
        with self._lock:
            self._looked_at.append((reference, nodes))
            self._count += nodes

    def expect_less(self) -> None:
        """Recount at the next request without room. Called after a backward pass, when graphs are freed."""
        self._refusals = 0


GRAPH_NODE_LIMIT = GraphNodeLimit()
