"""One part of a graph with what it takes and gives."""

from __future__ import annotations

from dataclasses import replace

from lightning_recorder.errors import ArgumentError
from lightning_recorder.graph.model import Edge, Graph, Kind, Node
from lightning_recorder.names import closest_names

__all__ = ["focus"]


def focus(graph: Graph, name: str, call: int = 1) -> Graph:
    """The graph of one module call, with an input for each node outside that feeds it and an output for each it feeds.

    Args:
        graph: A recorded graph, or a view of one.
        name: The module's dotted name.
        call: Which of its calls, from 1.

    Returns:
        A graph whose root is that call. The inputs and outputs are named by the module call in which the node outside
        lies, or the function if it lies in the root alone; parameters and the tensors of the batch keep their names.
        Its number of parameters is that of the modules which are called in it.

    Raises:
        ArgumentError: If there is no such call; names the closest modules.

    Example:
        >>> import torch
        >>> from lightning_recorder.graph import capture_graph
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.ReLU()), torch.nn.Tanh())
        >>> [(node.kind, node.name) for node in focus(capture_graph(net, torch.ones(1, 2)), "1").nodes]
        [('module', '1'), ('input', '0'), ('module', '1.0'), ('op', 'relu'), ('output', '2')]
    """
    root = next((each for each in graph.module_calls() if (each.name, each.call) == (name, call)), None)
    if root is None:
        names = [each.name for each in graph.module_calls()]
        last = names.count(name)
        hint = f"the last one is call {last}" if last else closest_names(name, dict.fromkeys(names))
        raise ArgumentError(f"the graph has no call {call} of a module {name!r}; {hint}")
    inside = {root.id}
    for node in graph.nodes:
        if node.parent in inside:
            inside.add(node.id)
    free = max(node.id for node in graph.nodes) + 1
    inputs: dict[int, Node] = {}
    outputs: dict[int, Node] = {}
    edges: list[Edge] = []
    for edge in graph.edges:
        if edge.target in inside and edge.source not in inside:
            inputs.setdefault(edge.source, _border(graph, edge, edge.source, free + len(inputs), "input", root))
            edges.append(replace(edge, source=inputs[edge.source].id))
    free += len(inputs)
    for edge in graph.edges:
        if edge.source in inside:
            if edge.target not in inside:
                outputs.setdefault(edge.target, _border(graph, edge, edge.target, free + len(outputs), "output", root))
                edge = replace(edge, target=outputs[edge.target].id)
            edges.append(edge)
    nodes = [replace(node, depth=node.depth - root.depth) for node in graph.nodes if node.id in inside]
    nodes[0] = replace(nodes[0], parent=None)
    # A module that is called twice has its parameters once.
    parameters = sum({node.name: node.parameters for node in nodes if node.kind == "module"}.values())
    nodes = [nodes[0], *inputs.values(), *nodes[1:], *outputs.values()]
    return replace(graph, nodes=tuple(nodes), edges=tuple(edges), parameters=parameters)


def _border(graph: Graph, edge: Edge, outside: int, free: int, kind: Kind, root: Node) -> Node:
    """What stands for a node outside of the part."""
    node = graph[outside]
    named = next((each.name for each in (node, *graph.ancestors(node)) if each.kind == "module" and each.name), "")
    own = node.kind in ("parameter", "buffer", "input", "output", "backward", "optimizer") or not named
    # What lies in a call around the part is told by its own name: that of the call would say nothing.
    around = {each.id for each in graph.ancestors(root)}
    near = node.parent in around and node.kind != "module"
    tensor = (edge.tensor,) if edge.tensor is not None else ()
    return Node(free, kind, node.name if own or near else named, root.id, 1, outputs=tensor, source=node.source)
