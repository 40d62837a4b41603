"""Construction of a view from the remaining nodes, with redirected edges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from lightning_recorder.graph.model import Edge, Graph, Node

__all__ = ["joined_outputs", "rebuilt", "redirected"]


def rebuilt(graph: Graph, nodes: list[Node], target: Mapping[int, int], edges: Iterable[Edge] | None = None) -> Graph:
    """Return a graph of the given nodes and redirected edges, without dangling edges.

    Edges from a node to itself are removed, unless they lead from one repetition of a folded node to the next.

    Args:
        graph: The original graph.
        nodes: The nodes of the new graph.
        target: Maps each node to the node that replaces it. A node that is missing here is removed with its edges.
        edges: The edges to redirect; by default all edges of the graph.
    """
    there = {node.id for node in nodes}
    find = target.get
    kept = []
    for edge in graph.edges if edges is None else edges:
        source, goal = find(edge.source), find(edge.target)
        if source in there and goal in there and (source != goal or edge.relates("next")):
            # If a closed call replaces the source, the output indices stay valid only if both have the same outputs, as
            # in an LSTM.
            same = not edge.outputs or graph[edge.source].outputs == graph[source].outputs
            kept.append(edge if same else replace(edge, outputs=()))
    return replace(graph, nodes=tuple(nodes), edges=redirected(kept, target))


def redirected(edges: Iterable[Edge], target: Mapping[int, int]) -> tuple[Edge, ...]:
    """Replace the ends of edges and join edges with equal ends. Their multiplicities are added.

    Edges with different relations to the repetitions of folded nodes are not joined.

    Args:
        edges: The edges.
        target: Maps each node to the node that replaces it. A node that is missing here is not replaced.
    """
    joined: dict[tuple[object, ...], Edge] = {}
    for edge in edges:
        ends = target.get(edge.source, edge.source), target.get(edge.target, edge.target)
        key = (*ends, edge.across)
        before = joined.get(key)
        if before is not None:
            number = edge.multiplicity + before.multiplicity
            part = ", ".join(dict.fromkeys(each for each in (before.part, edge.part) if each))
            joined[key] = replace(before, multiplicity=number, outputs=joined_outputs(before, edge), part=part)
        elif ends == (edge.source, edge.target):
            joined[key] = edge
        else:
            joined[key] = replace(edge, source=ends[0], target=ends[1])
    return tuple(joined.values())


def joined_outputs(one: Edge, other: Edge) -> tuple[int, ...]:
    """Return the union of the output indices of two edges from the same source."""
    places = dict.fromkeys((*(one.outputs or (0,)), *(other.outputs or (0,))))
    return () if places.keys() == {0} else tuple(places)
