"""Questions that a test asks of a graph."""

from __future__ import annotations

from lightning_recorder.graph import Graph, Node

__all__ = ["into_steps", "joined", "only", "reaches", "sources_of"]


def only(graph: Graph, name: str) -> Node:
    """The one node of a name."""
    (node,) = (node for node in graph.nodes if node.name == name)
    return node


def joined(graph: Graph) -> set[tuple[str, str]]:
    """The names at the two ends of each edge."""
    return {(graph[edge.source].name, graph[edge.target].name) for edge in graph.edges}


def sources_of(graph: Graph, goal: int) -> set[int]:
    """All nodes from which a path leads to the goal, in whatever order the edges are."""
    found = {goal}
    todo = [goal]
    while todo:
        reached = todo.pop()
        new = {edge.source for edge in graph.edges if edge.target == reached} - found
        found |= new
        todo.extend(new)
    return found


def reaches(graph: Graph, source: str, target: str) -> bool:
    """Whether a path leads from the one named node to the other."""
    return only(graph, source).id in sources_of(graph, only(graph, target).id)


def into_steps(graph: Graph) -> list[str]:
    """For each step of an optimiser the backward passes that it uses, by what they were given."""
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
