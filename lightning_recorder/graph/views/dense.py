"""A view that closes blocks that a reader could not follow: densely connected ones, and ones with many functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from lightning_recorder.graph.model import Graph, Node
from lightning_recorder.graph.views.collapse import close_calls
from lightning_recorder.graph.views.drop import PLUMBING

__all__ = ["DENSE", "close_dense"]

DENSE = "each takes all before it"
"""The end of the note of a closed block."""

_LEAST = 5  # minimum number of parts: with fewer, a reader can follow the edges
# Each part must use the results of at least this share of the parts before it. In a plain chain, even if all parts also
# use one common tensor, the share is smaller.
_SHARE = 0.7
_MOST_FUNCTIONS = 80  # a call with more functions, such as an attention with sparse blocks, is closed


def close_dense(graph: Graph) -> Graph:
    """Close the calls in which each part uses the results of nearly all parts before it, as in a DenseNet.

    The note of such a call has the number of its parts and :data:`DENSE`. Calls that directly contain more than 80
    functions are closed, too, except for modules with at least half of the parameters.

    Args:
        graph: A view.
    """
    dense = {call.id: number for call, number in _dense_calls(graph)}
    unclear = dense.keys() | _full_calls(graph)
    if not unclear:
        return graph
    closed = close_calls(graph, unclear)
    nodes = (
        replace(node, note=f"{dense[node.id]} parts, {DENSE}") if node.id in dense else node for node in closed.nodes
    )
    return replace(closed, nodes=tuple(nodes))


def _full_calls(graph: Graph) -> set[int]:
    """Return the calls with many functions, which are a small part of the model."""
    functions = Counter(node.parent for node in graph.nodes if node.kind == "op" and node.name not in PLUMBING)
    small = (call for call in graph.module_calls() if 2 * call.total_parameters < graph.parameters)
    return {call.id for call in small if functions[call.id] > _MOST_FUNCTIONS}


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
