"""The order of execution as constraints on a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

from lightning_recorder.graph.model import Graph, Node

__all__ = ["constraints"]


def constraints(graph: Graph) -> list[tuple[int, int]]:
    """Return pairs of drawn nodes of which the first one must not be drawn behind the second one.

    They keep a module call from being drawn before one that ran earlier, and a frame from being stretched by a tensor
    that it takes from an early node beside its main input. Pairs that follow from the edges are left out.

    Args:
        graph: The graph that is drawn, with its ports.
    """
    order = _Order(graph)
    pairs = dict.fromkeys(pair for call in graph.nodes for pair in order.pairs(call))
    return list(pairs)


class _Order:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._onward = [edge for edge in graph.edges if not edge.relates("next") and edge.source != edge.target]
        self._place = {node.id: number for number, node in enumerate(graph.nodes)}
        self._behind = self._reachable()
        self._depth: dict[int, int] = {}
        for edge in sorted(self._onward, key=lambda each: self._place[each.target]):
            self._depth[edge.target] = max(self._depth.get(edge.target, 0), self._depth.get(edge.source, 0) + 1)
        self._inside: dict[int, list[int]] = {}
        for node in graph.nodes:
            if not graph.children(node):
                for around in (node, *graph.ancestors(node)):
                    self._inside.setdefault(around.id, []).append(node.id)
        self._entries: dict[int, int | None] = {}

    def _reachable(self) -> Mapping[int, int]:
        """Return the places of the nodes that depend on each node, as the bits of a number."""
        users: dict[int, list[int]] = {}
        for edge in self._onward:
            users.setdefault(edge.source, []).append(edge.target)
        behind: dict[int, int] = {}
        for node in reversed(self._graph.nodes):
            behind[node.id] = 1 << self._place[node.id]
            for user in users.get(node.id, ()):
                behind[node.id] |= behind.get(user, 0)
        return behind

    def pairs(self, call: Node) -> Iterator[tuple[int, int]]:
        """Yield the pairs of one call."""
        children = self._graph.children(call)
        if not children:
            return
        entries = [self._entry(child) for child in children if child.kind == "module"]
        wanted = list(pairwise(entries))
        if call.parent is not None:
            first = self._entry(call)
            # A constant is drawn near its users.
            wanted += [(first, each) for each in self._starts(call) if each != first and self._depth.get(each)]
        for one, other in wanted:
            if one is not None and other is not None and not self._related(one, other):
                yield one, other

    def _related(self, one: int, other: int) -> bool:
        """Return True if one of two nodes depends on the other."""
        return bool(self._behind[one] >> self._place[other] & 1 or self._behind[other] >> self._place[one] & 1)

    def _starts(self, call: Node) -> list[int]:
        """Return the drawn nodes inside a call that take nothing from other nodes inside it."""
        inside = self._inside.get(call.id, [])
        known = set(inside)
        fed = {edge.target for edge in self._onward if edge.target in known and edge.source in known}
        return [number for number in inside if number not in fed]

    def _entry(self, call: Node) -> int | None:
        """Return the drawn node at which the data enters a call: the start that the most steps lead to."""
        if call.id not in self._entries:
            self._entries[call.id] = max(self._starts(call), key=lambda each: self._depth.get(each, 0), default=None)
        return self._entries[call.id]
