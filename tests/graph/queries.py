"""Queries about a graph."""

from __future__ import annotations

from lightning_recorder.graph import Graph, Node

__all__ = ["into_steps", "joined", "only", "reaches", "sources_of"]


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
