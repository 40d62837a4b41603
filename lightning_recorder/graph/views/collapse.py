"""A view with closed module calls."""

from __future__ import annotations

from dataclasses import replace

from lightning_recorder.errors import check_integer
from lightning_recorder.graph.model import Edge, Graph
from lightning_recorder.graph.views.rebuild import rebuilt

__all__ = ["closed_calls", "collapse"]


def collapse(graph: Graph, depth: int | None = None, *, leaves: bool = True) -> Graph:
    """Close the module calls at a depth, and the calls that contain no other call at any depth.

    A closed call is a single node in place of its contents. It takes over the edges of its contents; edges inside it
    are removed. It counts the parameters of its module and of all submodules, called or not, each parameter once.

    Args:
        graph: Any graph.
        depth: The greatest depth that is shown. The root has depth 0, so 1 shows its children closed. ``None`` sets no
            limit.
        leaves: Also close the calls that contain no other call; otherwise the functions inside them are shown.

    Raises:
        ArgumentError: If the depth is below 1.
    """
    if depth is not None:
        check_integer("depth", depth, 1)
    closed = closed_calls(graph, depth, leaves=leaves)
    target: dict[int, int] = {}
    parameters: dict[int, int] = {}
    counted: set[tuple[int, str]] = set()
    for node in graph.nodes:
        inside = target.get(node.parent) if node.parent is not None else None
        if inside in closed:
            target[node.id] = inside
            # The parameters of a module that is called several times count once.
            if node.parameters and (inside, node.name) not in counted:
                counted.add((inside, node.name))
                parameters[inside] = parameters.get(inside, 0) + node.parameters
        else:
            target[node.id] = node.id
    # A graph built by hand, or written by an earlier release, has only the numbers of each module's own parameters.
    kept = [
        replace(node, parameters=node.total_parameters or node.parameters + parameters.get(node.id, 0))
        if node.id in closed
        else node
        for node in graph.nodes
        if target[node.id] == node.id
    ]
    # The multiplicity of an edge into a closed call is the number of tensors that enter it, not the number of reads
    # inside. It is at most the number of outputs of the source.
    entering: dict[tuple[int, int], Edge] = {}
    for edge in graph.edges:
        goal = target[edge.target]
        if goal in closed and target[edge.source] != goal:
            most = max(1, len(graph[edge.source].outputs))
            before = entering.get((edge.source, goal))
            times = min(most, edge.multiplicity + (before.multiplicity if before else 0))
            entering[edge.source, goal] = replace(before or edge, target=goal, multiplicity=times)
        else:
            entering.setdefault((edge.source, edge.target), edge)
    return rebuilt(graph, kept, target, entering.values())


def closed_calls(graph: Graph, depth: int | None, *, leaves: bool = True) -> set[int]:
    """Return the calls that :func:`collapse` closes, with those inside of them."""
    open_calls = {child.parent for child in graph.module_calls()} | {graph.root.id}
    return {
        node.id
        for node in graph.module_calls()
        if (leaves and node.id not in open_calls) or (depth is not None and node.depth >= depth)
    }
