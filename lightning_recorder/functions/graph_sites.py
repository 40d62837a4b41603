"""The sites of the functions in a recorded graph."""

from __future__ import annotations

from collections import Counter

from lightning_recorder.functions.table import FUNCTIONS, TYPES, site_name
from lightning_recorder.graph.model import Graph, Node

__all__ = ["function_sites", "is_of_loss"]


def function_sites(graph: Graph) -> dict[int, str]:
    """Return the name of the site of each function that can be recorded, by the id of its node."""
    taken = {node.name for node in graph.nodes if node.kind == "module"}
    counts: Counter[tuple[int, str]] = Counter()
    found = {}
    for node in graph.nodes:
        if node.kind == "op" and node.name in FUNCTIONS and node.parent is not None:
            around = graph[node.parent]
            # A module of torch that is made where it is called has the name of its class.
            if around.parent is not None and around.name == around.type_name and around.name in TYPES:
                around = graph[around.parent]
            counts[around.id, node.name] += 1
            found[node.id] = site_name(around.name, node.name, counts[around.id, node.name], taken)
    return found


def is_of_loss(node: Node) -> bool:
    """Return True for a function that belongs to the computation of the loss, and not to a layer of the model."""
    return FUNCTIONS[node.name].kind == "losses" or node.scope.startswith("loss")
