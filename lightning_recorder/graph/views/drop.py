"""Views without some of the nodes: those of a kind, functions with certain names, unused results."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import get_args

from lightning_recorder.errors import ArgumentError
from lightning_recorder.graph.model import Graph, Kind
from lightning_recorder.graph.views.rebuild import rebuilt

__all__ = ["PLUMBING", "drop_dead_ends", "drop_empty_calls", "drop_isolated", "hide", "without"]

PLUMBING = frozenset(
    (
        "view",
        "reshape",
        "transpose",
        "permute",
        "contiguous",
        "getitem",
        "unsqueeze",
        "squeeze",
        "expand",
        "expand_as",
        "flatten",
        "unflatten",
        "T",
        "mT",
        "chunk",
        "split",
        "to",
        "type_as",
        "float",
        "detach",
        "clone",
        "data",
        "requires_grad",
        "t",
        "long",
        "int",
        "half",
        "double",
        "bfloat16",
    )
)
"""Functions that move or rename values without computing any."""


def without(graph: Graph, kinds: Kind | Collection[Kind]) -> Graph:
    """Remove the nodes of some kinds, with their edges.

    Raises:
        ArgumentError: If a kind does not exist.
    """
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    if unknown := [kind for kind in kinds if kind not in get_args(Kind)]:
        raise ArgumentError(f"the kinds of nodes are {', '.join(get_args(Kind))}; got {unknown[0]!r}")
    kept = [node for node in graph.nodes if node.kind not in kinds]
    return rebuilt(graph, kept, {node.id: node.id for node in kept})


def hide(graph: Graph, names: Collection[str] = PLUMBING) -> Graph:
    """Remove the ops with certain names and connect their input directly to their users.

    An op that takes several tensors stays, such as ``getitem`` with a computed index, since each of its inputs matters.
    An op of a folded view that passes a tensor from one repetition to another stays as well.
    """
    names = (names,) if isinstance(names, str) else names
    sources: dict[int, list[int]] = {}
    for edge in graph.edges:
        sources.setdefault(edge.target, []).append(edge.source)
    past: dict[int, int] = {}
    related = {end for edge in graph.edges if edge.across for end in (edge.source, edge.target)}
    for node in graph.nodes:
        entering = sources.get(node.id, [])
        if node.kind == "op" and node.name in names and len(entering) == 1 and node.id not in related:
            past[node.id] = past.get(entering[0], entering[0])
    kept = [node for node in graph.nodes if node.id not in past]
    edges = [
        replace(edge, source=past.get(edge.source, edge.source)) for edge in graph.edges if edge.target not in past
    ]
    return rebuilt(graph, kept, {node.id: node.id for node in kept}, edges)


def drop_isolated(graph: Graph) -> Graph:
    """Remove tensors that nothing uses, and ops without any edges."""
    joined = {edge.source for edge in graph.edges} | {edge.target for edge in graph.edges}
    kept = [node for node in graph.nodes if node.kind == "module" or node.id in joined]
    return rebuilt(graph, kept, {node.id: node.id for node in kept})


def drop_dead_ends(graph: Graph) -> Graph:
    """Remove the ops with unused results: metrics, copies for logging, unused masks.

    Only ops are removed; a module call stays, used or not. In a graph without outputs and without a backward pass
    nothing is removed, since every result may be a result of the model.
    """
    if not any(node.kind in ("backward", "output") for node in graph.nodes):
        return graph
    # The next repetition of a folded call uses a result although its nodes come first.
    todo = [node.id for node in graph.nodes if node.kind != "op"]
    todo += [edge.source for edge in graph.edges if edge.relates("next")]
    used = set(todo)
    while todo:
        new = {edge.source for edge in graph.into(graph[todo.pop()])} - used
        used |= new
        todo += new
    kept = [node for node in graph.nodes if node.id in used]
    return rebuilt(graph, kept, {node.id: node.id for node in kept})


def drop_empty_calls(graph: Graph) -> Graph:
    """Remove expanded calls whose contents have all been dropped."""
    joined = {edge.source for edge in graph.edges} | {edge.target for edge in graph.edges}
    while True:
        parents = {node.parent for node in graph.nodes}
        kept = [
            node
            for node in graph.nodes
            if node.kind != "module" or node.id in parents or node.id in joined or node.parent is None
        ]
        if len(kept) == len(graph.nodes):
            return graph
        graph = rebuilt(graph, kept, {node.id: node.id for node in kept})
