"""A view that closes densely connected blocks, in which each part uses the results of all parts before it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from lightning_recorder.graph.model import Graph, Node
from lightning_recorder.graph.views.collapse import close_calls

__all__ = ["DENSE", "close_dense"]

DENSE = "each takes all before it"
"""The end of the note of a closed block."""

_LEAST = 5  # minimum number of parts: with fewer, a reader can follow the edges
# Each part must use the results of at least this share of the parts before it. In a plain chain, even if all parts also
# use one common tensor, the share is smaller.
_SHARE = 0.7


def close_dense(graph: Graph) -> Graph:
    """Close the calls in which each part uses the results of nearly all parts before it, as in a DenseNet.

    The note of such a call has the number of its parts and :data:`DENSE`.

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
        # The results may be concatenated in the call itself, or inside each of its parts.
        inside |= {(one, goal) for one, cat in inside if cat in cats for start, goal in inside if start == cat}
        taken = Counter(target for source, target in inside if source in parts and target in parts)
        if len(parts) >= _LEAST and all(taken[part] >= _SHARE * before for before, part in enumerate(parts)):
            yield call, len(parts)
