"""A view in which a block whose parts are all connected with each other is one node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from lightning_recorder.graph.model import Graph, Node
from lightning_recorder.graph.views.collapse import close_calls

__all__ = ["DENSE", "close_dense"]

DENSE = "each takes all before it"
"""The end of the note of a closed block."""

_LEAST = 5  # parts; the edges of fewer can be followed
_SHARE = 0.7  # of the parts before each part: a chain with one tensor for all of its parts has fewer


def close_dense(graph: Graph) -> Graph:
    """Close the calls in which nearly every part takes the results of all parts before it, as in a DenseNet.

    The note of such a call says so, with the number of its parts.

    Args:
        graph: A view.
    """
    dense = {call.id: number for call, number in _dense_calls(graph)}
    if not dense:
        return graph
    closed = close_calls(graph, dense.keys())
    nodes = (
        replace(node, note=f"{dense[node.id]} parts, {DENSE}") if node.id in dense else node for node in closed.nodes
    )
    return replace(closed, nodes=tuple(nodes))


def _dense_calls(graph: Graph) -> Iterator[tuple[Node, int]]:
    """Yield the calls to close, with the number of their parts."""
    around = {node.id: [node.id, *(each.id for each in graph.ancestors(node))] for node in graph.nodes}
    pairs: dict[int, set[tuple[int, int]]] = {}
    for edge in graph.edges:
        source = dict(zip(around[edge.source][1:], around[edge.source], strict=False))
        for part, parent in zip(around[edge.target], around[edge.target][1:], strict=False):
            if parent in source:
                pairs.setdefault(parent, set()).add((source[parent], part))
                break
    for call in graph.module_calls():
        parts = [child.id for child in graph.children(call) if child.kind == "module"]
        inside = pairs.get(call.id, set())
        cats = {child.id for child in graph.children(call) if child.name == "cat"}
        # The results are joined in the call itself, or in each of its parts.
        inside |= {(one, goal) for one, cat in inside if cat in cats for start, goal in inside if start == cat}
        taken = Counter(target for source, target in inside if source in parts and target in parts)
        if len(parts) >= _LEAST and all(taken[part] >= _SHARE * before for before, part in enumerate(parts)):
            yield call, len(parts)
