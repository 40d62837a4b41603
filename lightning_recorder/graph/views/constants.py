"""A view in which functions that compute a constant are one node."""

from __future__ import annotations

from dataclasses import replace

from lightning_recorder.graph.model import Graph, Node
from lightning_recorder.graph.views.rebuild import rebuilt

__all__ = ["CONSTANT", "join_constants"]

CONSTANT = "functions, no input"
"""The end of the note of a node that stands for several functions."""

_LEAST = 4  # functions; fewer are shown


def join_constants(graph: Graph) -> Graph:
    """Draw four or more functions that compute one tensor from no other, such as a table of positions, as one node.

    Its name has those of the first and the last function, and its note has their number. Functions in different calls
    stay apart, and so do those that draw random numbers. A buffer of one number, such as a stride, is a constant too.

    Args:
        graph: A view that is not folded.
    """
    users: dict[int, set[int]] = {}
    constant: set[int] = set()
    for node in graph.nodes:
        sources = {edge.source for edge in graph.into(node)}
        for source in sources:
            users.setdefault(source, set()).add(node.id)
        is_plain = node.kind == "op" and not (node.remark or node.failed or node.parameters or _is_random(node))
        is_setting = node.kind == "buffer" and not any(meta.shape for meta in node.outputs)
        if is_setting or (is_plain and sources <= constant):
            constant.add(node.id)
    target = {node.id: node.id for node in graph.nodes}
    names: dict[int, list[str]] = {}
    for last in reversed(graph.nodes):
        is_free = last.kind == "op" and last.id in constant and target[last.id] == last.id
        if is_free and not users.get(last.id, set()) <= constant:
            inside = _only_for(last, graph, users, constant)
            functions = [node.name for node in inside if node.kind == "op"]
            if len(functions) >= _LEAST:
                target |= dict.fromkeys((node.id for node in inside), last.id)
                names[last.id] = functions
    if not names:
        return graph
    nodes = [
        replace(node, name=f"{names[node.id][0]} … {node.name}", note=f"{len(names[node.id])} {CONSTANT}", arguments=())
        if node.id in names
        else node
        for node in graph.nodes
        if target[node.id] == node.id
    ]
    return rebuilt(graph, nodes, target)


def _only_for(last: Node, graph: Graph, users: dict[int, set[int]], constant: set[int]) -> list[Node]:
    """Return a function with those beside it whose results are only used to compute its own, in the order of time."""
    inside = {last.id}
    beside = graph.children(graph[last.parent]) if last.parent is not None else []
    for node in reversed(beside):
        used = users.get(node.id, set())
        if node.id in constant and node.scope == last.scope and used and used <= inside:
            inside.add(node.id)
    return [node for node in beside if node.id in inside]


def _is_random(node: Node) -> bool:
    return any(word in node.name for word in ("rand", "normal", "bernoulli", "uniform", "dropout", "exponential"))
