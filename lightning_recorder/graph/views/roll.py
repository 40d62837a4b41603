"""A view that draws all calls of a module as one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lightning_recorder.graph.model import Edge, Graph, Node
from lightning_recorder.graph.views.rebuild import redirected

__all__ = ["roll"]

_Key = tuple[object, ...]


def roll(graph: Graph) -> Graph:
    """Draw all calls of one module as one, with the number of calls.

    Calls are merged if they are inside the same call, or inside calls that are merged themselves. Their contents are
    merged as well: the functions that are called first in each of them become one node. A tensor that is passed from
    one call to a later one, such as the state of a recurrent cell, becomes an edge backwards or from a node to itself,
    with the relation ``next`` to the merged call; see :class:`Edge`.

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
        >>> [(view[edge.source].name, view[edge.target].name, edge.multiplicity) for edge in view.edges][-2:]
        [('linear', 'linear', 2), ('linear', 'output', 1)]
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
    rolled = replace(graph, nodes=tuple(kept), edges=redirected(graph.edges, target))
    place = {node.id: number for number, node in enumerate(kept)}
    return replace(rolled, edges=redirected((_onward(edge, rolled, place) for edge in rolled.edges), {}))


def _onward(edge: Edge, graph: Graph, place: Mapping[int, int]) -> Edge:
    """Return an edge; one that does not go forward in time goes to the next call."""
    if edge.across or place[edge.source] < place[edge.target]:
        return edge
    around = (graph[edge.target], *graph.ancestors(graph[edge.target]))
    own = {edge.source, *(call.id for call in graph.ancestors(graph[edge.source]))}
    merged = [node.id for node in around if node.repeats > 1]
    group = next((node for node in merged if node in own), merged[0] if merged else edge.target)
    return replace(edge, across=((group, "next"),))


def _key(node: Node, target: dict[int, int], counts: dict[_Key, int]) -> _Key:
    """Return a key that is equal for all nodes that are merged into one."""
    around = None if node.parent is None else target[node.parent]
    if node.kind == "module" and node.name:
        return around, "module", node.name
    # The ordinal number of the node among those of the same kind and name in this call.
    same = node.parent, node.kind, node.name
    counts[same] = counts.get(same, 0) + 1
    return around, node.kind, node.name, counts[same]


def _rolled(node: Node, target: dict[int, int], calls: dict[int, int]) -> Node:
    if node.parent is None:
        return node
    # A node that occurs only in a later call is moved into the call that represents all of them.
    around = target[node.parent]
    times, rest = divmod(calls[node.id], calls[around])
    repeats = max(1, node.repeats * times if node.kind == "module" and not rest else node.repeats)
    # The calls of a module have the same parameters.
    again = repeats > node.repeats and bool(node.total_parameters or node.parameters)
    return replace(node, parent=around, repeats=repeats, shared=node.shared or again)
