"""A view that draws all calls of a module as one call."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from lightning_recorder.graph.model import Edge, Graph, Node
from lightning_recorder.graph.views.rebuild import redirected

__all__ = ["roll"]

_Key = tuple[object, ...]

# The kinds of nodes that do not depend on any call, even if they are inside a call.
_GIVEN = ("input", "parameter", "buffer", "tensor")


def roll(graph: Graph) -> Graph:
    """Merge all calls of a module into one call, with the number of calls.

    Calls are merged if they are inside the same call, or inside calls that are merged themselves. Their contents are
    merged in order: the first ``linear`` of each call becomes one node, then the second. If one call passes a tensor to
    a later call, such as the state of a recurrent cell, the edge leads backwards or from a node to itself. Such an edge
    has the relation ``next`` to the merged call; see :class:`Edge`. If a later call takes a tensor from a node that
    does not depend on an earlier call, this node is moved before the merged call.

    Args:
        graph: A recorded graph, or a view of one.

    Example:
        >>> import torch
        >>> from lightning_recorder.graph import capture_graph
        >>> class Thrice(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.cell = torch.nn.Linear(2, 2)
        ...     def forward(self, x):
        ...         return self.cell(self.cell(self.cell(x)))
        >>> view = roll(capture_graph(Thrice(), torch.ones(1, 2)))
        >>> [(node.name, node.repeats) for node in view.module_calls()]
        [('cell', 3)]
        >>> [(view[edge.source].name, view[edge.target].name, edge.multiplicity) for edge in view.edges if edge.across]
        [('linear', 'linear', 2)]
    """
    first: dict[_Key, int] = {}
    target: dict[int, int] = {}
    counts: dict[_Key, int] = {}
    calls: dict[int, int] = {}
    failed: set[int] = set()
    for node in graph.nodes:
        key = _key(node, target, counts)
        target[node.id] = first.setdefault(key, node.id)
        calls[target[node.id]] = calls.get(target[node.id], 0) + 1
        if node.failed:
            failed.add(target[node.id])
    kept = [
        replace(_rolled(node, target, calls), failed=node.id in failed)
        for node in graph.nodes
        if target[node.id] == node.id
    ]
    rolled = replace(graph, nodes=tuple(kept))
    later = _later(graph, target)
    edges = (_to_next(edge, later[edge], rolled) if edge in later else edge for edge in graph.edges)
    return _in_order(replace(rolled, edges=redirected(edges, target)))


def _later(graph: Graph, target: Mapping[int, int]) -> dict[Edge, int]:
    """Map the edges whose source depends on an earlier call of the target's module to the merged call of this module.

    If the source or the target is inside another call, that call is compared instead.
    """
    calls = Counter((node.parent, target[node.id]) for node in graph.nodes)
    entering: dict[int, list[tuple[int, Edge]]] = {}
    for edge in graph.edges:
        if edge.across or graph[edge.source].kind in _GIVEN:
            continue
        source, goal = _siblings(graph, edge.source, edge.target)
        if source != goal:
            entering.setdefault(goal, []).append((source, edge))
    place = {node.id: number for number, node in enumerate(graph.nodes)}
    # For each node: the merged calls among its siblings that the node depends on, and the node itself if it is merged.
    known: dict[int, frozenset[int]] = {}
    later: dict[Edge, int] = {}
    for node in graph.nodes:
        merged = target[node.id]
        before = [(edge, source, known.get(source, frozenset())) for source, edge in entering.get(node.id, ())]
        own = {merged} if calls[node.parent, merged] > 1 else set[int]()
        known[node.id] = frozenset(own.union(*(each for _, _, each in before)))
        for edge, source, each in before:
            if merged in each and place[target[source]] >= place[merged]:
                later[edge] = merged
    return later


def _to_next(edge: Edge, call: int, graph: Graph) -> Edge:
    """Mark an edge as leading to the next call of a merged call, or of the innermost merged call around it."""
    around = (graph[call], *graph.ancestors(graph[call]))
    group = next((node.id for node in around if node.repeats > 1), call)
    return replace(edge, across=((group, "next"),))


def _siblings(graph: Graph, one: int, other: int) -> tuple[int, int]:
    """Return the ancestors of two nodes that are siblings. A node counts as its own ancestor."""
    around = {call.id: inside for inside, call in pairwise((graph[one], *graph.ancestors(graph[one])))}
    for inside, call in pairwise((graph[other], *graph.ancestors(graph[other]))):
        if call.id in around:
            return around[call.id].id, inside.id
    return one, other


def _in_order(graph: Graph) -> Graph:
    """Sort the nodes so that the source of each edge precedes its target, except for edges to the next call."""
    place = {node.id: number for number, node in enumerate(graph.nodes)}
    if all(edge.across or place[edge.source] < place[edge.target] for edge in graph.edges):
        return graph
    sources: dict[int, dict[int, None]] = {}
    for edge in graph.edges:
        if not edge.across:
            source, goal = _siblings(graph, edge.source, edge.target)
            sources.setdefault(goal, {})[source] = None
    order: list[Node] = []
    todo = [graph.root]
    while todo:
        node = todo.pop()
        order.append(node)
        todo += reversed(_sources_first(graph.children(node), sources))
    return replace(graph, nodes=tuple(order))


def _sources_first(nodes: Sequence[Node], sources: Mapping[int, Iterable[int]]) -> list[Node]:
    """Sort siblings so that each follows the siblings whose results it takes. Otherwise the order is kept."""
    place = {node.id: number for number, node in enumerate(nodes)}
    waiting = {node.id: {place[each] for each in sources.get(node.id, ())} for node in nodes}
    users: dict[int, list[int]] = {}
    for node in nodes:
        for number in waiting[node.id]:
            users.setdefault(number, []).append(place[node.id])
    free = [place[node] for node, before in waiting.items() if not before]
    order: dict[int, None] = {}
    for first in range(len(nodes)):
        # If merged calls take each other's results, no node is free. Then continue with the first remaining node.
        free = free or [first] * (first not in order)
        while free:
            number = heapq.heappop(free)
            order[number] = None
            for user in users.get(number, ()):
                before = waiting[nodes[user].id]
                before.discard(number)
                if not before and user not in order:
                    heapq.heappush(free, user)
    return [nodes[number] for number in order]


def _key(node: Node, target: dict[int, int], counts: dict[_Key, int]) -> _Key:
    """Return a key that is equal for all nodes that are merged into one."""
    around = None if node.parent is None else target[node.parent]
    if node.kind == "module" and node.name:
        return around, "module", node.name
    # The ordinal number of the node among the nodes of the same kind and name in this call.
    same = node.parent, node.kind, node.name
    counts[same] = counts.get(same, 0) + 1
    return around, node.kind, node.name, counts[same]


def _rolled(node: Node, target: dict[int, int], calls: dict[int, int]) -> Node:
    if node.parent is None:
        return node
    # A node that occurs only in a later call is moved into the merged call.
    around = target[node.parent]
    times, rest = divmod(calls[node.id], calls[around])
    repeats = max(1, node.repeats * times if node.kind == "module" and not rest else node.repeats)
    # The calls of a module have the same parameters.
    again = repeats > node.repeats and bool(node.total_parameters or node.parameters)
    return replace(node, parent=around, repeats=repeats, shared=node.shared or again)
