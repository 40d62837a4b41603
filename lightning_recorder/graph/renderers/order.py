"""The order of execution as constraints on a picture."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence

from lightning_recorder.graph.model import Graph, Node

__all__ = ["constraints"]

_NEAR, _EARLY = 3, 5  # steps


def constraints(graph: Graph) -> list[tuple[int, int]]:
    """Return pairs of drawn nodes of which the first one must not be drawn behind the second one.

    They keep a module call from being drawn before one that ran earlier, and a frame from being stretched by a tensor
    that it takes from an early node beside its main input. Pairs that follow from the edges are left out.
    """
    order = _Order(graph)
    return [pair for call in graph.nodes for pair in order.pairs(call) if order.add(*pair)]


class _Order:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._onward = [edge for edge in graph.edges if not edge.relates("next") and edge.source != edge.target]
        self._place = {node.id: number for number, node in enumerate(graph.nodes)}
        self._users: dict[int, list[int]] = {}
        for edge in self._onward:
            self._users.setdefault(edge.source, []).append(edge.target)
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
        # The places of the inputs and random tensors that each node depends on, as the bits of a number.
        self._data = {node.id: 0 for node in graph.nodes}
        fed = {edge.target for edge in self._onward}
        for node in graph.nodes:
            if node.id not in fed and node.kind in ("input", "op"):
                self._data[node.id] = 1 << self._place[node.id]
        for edge in sorted(self._onward, key=lambda each: self._place[each.target]):
            self._data[edge.target] |= self._data[edge.source]

    def _reachable(self) -> dict[int, int]:
        """Return the places of the nodes that depend on each node, as the bits of a number."""
        behind: dict[int, int] = {}
        for node in reversed(self._graph.nodes):
            behind[node.id] = 1 << self._place[node.id]
            for user in self._users.get(node.id, ()):
                behind[node.id] |= behind.get(user, 0)
        return behind

    def add(self, one: int, other: int) -> bool:
        """Put a node before another one; return False if that is known, or contradicts what is known."""
        if self._follows(one, other) or self._follows(other, one):
            return False
        for node, behind in self._behind.items():
            if behind >> self._place[one] & 1:
                self._behind[node] = behind | self._behind[other]
        return True

    def _follows(self, one: int, other: int) -> bool:
        return bool(self._behind[one] >> self._place[other] & 1)

    def pairs(self, call: Node) -> Iterator[tuple[int, int]]:
        """Yield the pairs of one call."""
        children = self._graph.children(call)
        if not children:
            return
        calls = [child for child in children if child.kind == "module"]
        wanted = [(self._before(calls[: at + 1], each), self._entry(each)) for at, each in enumerate(calls[1:])]
        first = self._entry(call)
        if call.parent is not None and first is not None:
            starts = [each for each in self._starts(call) if each != first]
            # The input of the model is drawn above the first frame that takes it, not beside it.
            inputs = [each.source for each in self._onward if each.target == first]
            wanted += [(one, each) for one in inputs if self._graph[one].kind == "input" for each in starts]
            # At the beginning, a constant is drawn near its users, unless many steps lead from it to the data.
            late = self._depth.get(first, 0) > _EARLY
            wanted += [
                (first, each) for each in starts if late or self._depth.get(each) or self._lead(each, first) > _NEAR
            ]
        for one, other in wanted:
            if one is not None and other is not None:
                yield one, other

    def _before(self, calls: Sequence[Node], after: Node) -> int | None:
        """Return the entry of the call that must not be drawn behind the next one: the last call before it.

        A call that has no data in common with the last one and those that it depends on, such as the second tower of
        two, stands beside the first one of them.
        """
        before = last = self._entry(calls[-1])
        entry = self._entry(after)
        for call in reversed(calls):
            each = self._entry(call)
            if each is None or last is None or entry is None or self._data_in(call) & self._data[entry]:
                break
            is_tower = self._data[entry] and self._follows(each, last)
            before = each if is_tower else before
        return before

    def _data_in(self, call: Node) -> int:
        """Return the inputs and random tensors that the nodes inside a call depend on, as the bits of a number."""
        return functools.reduce(operator.or_, (self._data[each] for each in self._inside.get(call.id, ())), 0)

    def _lead(self, start: int, entry: int) -> int:
        """Return the number of steps from a constant to the data that enters a call at another node."""
        steps = {start: 0}
        for node in self._graph.nodes[self._place[start] :]:
            if node.id in steps and not self._follows(entry, node.id):
                for user in self._users.get(node.id, ()):
                    steps[user] = max(steps.get(user, 0), steps[node.id] + 1)
        return max(steps.values())

    def _starts(self, call: Node) -> list[int]:
        """Return the drawn nodes inside a call that take nothing from other nodes inside it."""
        inside = self._inside.get(call.id, [])
        known = set(inside)
        fed = {edge.target for edge in self._onward if edge.target in known and edge.source in known}
        return [number for number in inside if number not in fed]

    def _entry(self, call: Node) -> int | None:
        """Return the drawn node at which the data enters a call: the start that is used first and is no constant."""
        if call.id not in self._entries:
            starts = self._starts(call)
            starts = [each for each in starts if self._depth.get(each)] or starts
            self._entries[call.id] = min(starts, key=self._first_use, default=None)
        return self._entries[call.id]

    def _first_use(self, start: int) -> int:
        """Return the place of a node in time, for a port that of its first user."""
        if self._graph[start].kind != "port":
            return self._place[start]
        return min(map(self._first_use, self._users.get(start, ())), default=self._place[start])
