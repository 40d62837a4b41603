"""Queries about a graph."""

from __future__ import annotations

from typing import get_args

from lightning_recorder.graph import Graph, Node
from lightning_recorder.graph.model import Kind

__all__ = ["assert_sound", "into_steps", "joined", "only", "reaches", "sources_of"]


def only(graph: Graph, name: str) -> Node:
    """Return the only node with a name."""
    (node,) = (node for node in graph.nodes if node.name == name)
    return node


def joined(graph: Graph) -> set[tuple[str, str]]:
    """Return the names at the two ends of each edge."""
    return {(graph[edge.source].name, graph[edge.target].name) for edge in graph.edges}


def sources_of(graph: Graph, goal: int) -> set[int]:
    """Return all nodes with a path to the goal, regardless of the order of the edges."""
    found = {goal}
    todo = [goal]
    while todo:
        reached = todo.pop()
        new = {edge.source for edge in graph.edges if edge.target == reached} - found
        found |= new
        todo.extend(new)
    return found


def reaches(graph: Graph, source: str, target: str) -> bool:
    """Return True if there is a path from one named node to another."""
    return only(graph, source).id in sources_of(graph, only(graph, target).id)


def into_steps(graph: Graph) -> list[str]:
    """Return the backward passes that each optimizer step uses, named by their losses."""
    given = {
        node.id: " and ".join(graph[edge.source].name for edge in graph.edges if edge.target == node.id)
        for node in graph.nodes
        if node.kind == "backward"
    }
    return [
        f"{node.name} <- {', '.join(given[edge.source] for edge in graph.edges if edge.target == node.id)}"
        for node in graph.nodes
        if node.kind == "optimizer"
    ]


def assert_sound(view: Graph) -> None:
    """Check that a view that keeps the order of time is consistent: ids, parents, depths, edges and kinds."""
    place = {node.id: position for position, node in enumerate(view.nodes)}
    assert len(place) == len(view.nodes)
    assert view.root.parent is None
    for node in view.nodes[1:]:
        assert node.parent is not None
        assert place[node.parent] < place[node.id]
        # The frames around repeated siblings have no class; they are not calls and do not add to the depth.
        assert node.depth == sum(bool(around.type_name) for around in view.ancestors(node))
    # Views draw a tensor of the model before the call that uses it first.
    tensors = ("parameter", "buffer")
    recorded = [
        node.id for node in view.nodes if (node.type_name or node.kind != "module") and node.kind not in tensors
    ]
    assert recorded == sorted(recorded)
    assert len({(edge.source, edge.target, edge.across) for edge in view.edges}) == len(view.edges)
    ends = [(edge.source, edge.target) for edge in view.edges if not edge.relates("next")]
    # A parameter that a part borrows from its parent is first used inside that part, so it comes after the part.
    computed = [(source, target) for source, target in ends if view[source].kind in ("module", "op", "input")]
    assert [(source, target) for source, target in computed if place[source] >= place[target]] == []
    assert [edge for edge in view.edges if edge.multiplicity < 1] == []
    assert all(node.kind in get_args(Kind) for node in view.nodes)
