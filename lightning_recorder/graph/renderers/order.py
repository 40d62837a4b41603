"""Constraints on a picture that keep the order of execution."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence

from lightning_recorder.graph.model import Graph, Node

__all__ = ["constraints"]

_NEAR, _EARLY = 3, 5  # the maximum number of edges on a path to a near node, and to an early node


def constraints(graph: Graph) -> list[tuple[int, int]]:
    """Return pairs of drawn nodes. The first node of a pair must not be drawn after the second node.

    The pairs keep module calls in the order in which they ran. Other pairs prevent a long frame: without them, a tensor
    that the frame takes from an early node, in addition to its main input, would stretch the frame. Pairs that follow
    from the edges are left out.
    """
    order = _Order(graph)
    return [pair for call in graph.nodes for pair in order.pairs(call) if order.add(*pair)]


class _Order:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._onward = [edge for edge in graph.edges if not edge.relates("next") and edge.source != edge.target]
        self._place = {node.id: number for number, node in enumerate(graph.nodes)}
        self._users: dict[int, list[int]] = {}
        self._sources: dict[int, set[int]] = {}
        for edge in self._onward:
            self._users.setdefault(edge.source, []).append(edge.target)
            self._sources.setdefault(edge.target, set()).add(edge.source)
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
        # For each node, a bit mask of the positions of the inputs and random tensors that it depends on.
        self._data = {node.id: 0 for node in graph.nodes}
        fed = {edge.target for edge in self._onward}
        for node in graph.nodes:
            if node.id not in fed and node.kind in ("input", "op"):
                self._data[node.id] = 1 << self._place[node.id]
        self._constants: set[int] = set()
        """The nodes that depend on no input and no module."""
        for node in graph.nodes:
            if node.kind not in ("input", "module") and self._sources.get(node.id, set()) <= self._constants:
                self._constants.add(node.id)
        for edge in sorted(self._onward, key=lambda each: self._place[each.target]):
            self._data[edge.target] |= self._data[edge.source]

    def _reachable(self) -> dict[int, int]:
        """Return for each node a bit mask of the positions of the nodes that depend on it."""
        behind: dict[int, int] = {}
        for node in reversed(self._graph.nodes):
            behind[node.id] = 1 << self._place[node.id]
            for user in self._users.get(node.id, ()):
                behind[node.id] |= behind.get(user, 0)
        return behind

    def add(self, one: int, other: int) -> bool:
        """Put a node before another node. Return False if their order is already known, in either direction."""
        if self._follows(one, other) or self._follows(other, one):
            return False
        for node, behind in self._behind.items():
            if behind >> self._place[one] & 1:
                self._behind[node] = behind | self._behind[other]
        return True

    def _follows(self, one: int, other: int) -> bool:
        return bool(self._behind[one] >> self._place[other] & 1)

    def pairs(self, call: Node) -> Iterator[tuple[int, int]]:
        """Yield the wanted pairs for the contents of one call."""
        children = self._graph.children(call)
        if not children:
            return
        yield from self._updates(children)
        calls = [child for child in children if child.kind == "module"]
        wanted = [(self._before(calls[: at + 1], each), self._entry(each)) for at, each in enumerate(calls[1:])]
        first = self._entry(call)
        if call.parent is not None and first is not None:
            starts = [each for each in self._starts(call) if each != first]
            # Draw an input of the model before the first frame that takes it, not beside the frame.
            inputs = [each.source for each in self._onward if each.target == first]
            wanted += [(one, each) for one in inputs if self._graph[one].kind == "input" for each in starts]
            # In an early frame, draw a constant near its users, unless a long path leads from it to the data.
            late = self._depth.get(first, 0) > _EARLY
            wanted += [
                (first, each) for each in starts if late or self._depth.get(each) or self._lead(each, first) > _NEAR
            ]
        for one, other in wanted:
            if one is not None and other is not None:
                yield one, other

    def _updates(self, children: Sequence[Node]) -> Iterator[tuple[int, int]]:
        """Yield a pair for each function without edges, an update of parameters. The function before it comes first."""
        last: int | None = None
        for child in children:
            is_alone = child.kind == "op" and not (self._graph.into(child) or self._graph.out_of(child))
            if is_alone and last is not None:
                yield last, child.id
            last = child.id if child.kind in ("op", "backward", "optimizer") else last

    def _before(self, calls: Sequence[Node], after: Node) -> int | None:
        """Return the entry of one of the earlier ``calls``, which must not be drawn after the call ``after``.

        This is usually the entry of the last earlier call. If that call and ``after`` depend on different inputs, as in
        two towers, ``after`` may be drawn beside the first call of the other tower.
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
        """Return the length of the longest path from a constant to a node that depends on the entry of a call."""
        steps = {start: 0}
        for node in self._graph.nodes[self._place[start] :]:
            if node.id in steps and not self._follows(entry, node.id):
                for user in self._users.get(node.id, ()):
                    steps[user] = max(steps.get(user, 0), steps[node.id] + 1)
        return max(steps.values())

    def _starts(self, call: Node) -> list[int]:
        """Return the drawn nodes inside a call that take no tensor from other nodes inside the call."""
        inside = self._inside.get(call.id, [])
        known = set(inside)
        fed = {edge.target for edge in self._onward if edge.target in known and edge.source in known}
        return [number for number in inside if number not in fed]

    def _entry(self, call: Node) -> int | None:
        """Return the drawn node where data enters a call: the start that is used first. Constants are a last resort."""
        if call.id not in self._entries:
            starts = self._starts(call)
            fed = [each for each in starts if self._depth.get(each)] or self._fed(call)
            starts = fed or starts
            self._entries[call.id] = min(starts, key=self._first_use, default=None)
        return self._entries[call.id]

    def _fed(self, call: Node) -> list[int]:
        """Return the drawn nodes inside a call that take tensors from outside, and only constants from inside."""
        inside = set(self._inside.get(call.id, []))
        taken = {number: self._sources.get(number, set()) for number in sorted(inside)}
        return [
            each for each, sources in taken.items() if not sources <= inside and sources & inside <= self._constants
        ]

    def _first_use(self, start: int) -> int:
        """Return the position of a node in execution order; for a port, the position of its first user."""
        if self._graph[start].kind != "port":
            return self._place[start]
        return min(map(self._first_use, self._users.get(start, ())), default=self._place[start])
