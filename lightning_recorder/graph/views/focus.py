"""A view of one module call with its inputs and outputs."""

from __future__ import annotations

from dataclasses import replace

from lightning_recorder.errors import ArgumentError
from lightning_recorder.graph.model import Edge, Graph, Kind, Node
from lightning_recorder.names import closest_names

__all__ = ["focus"]


def focus(graph: Graph, name: str, call: int = 1) -> Graph:
    """Return the graph of one module call. Outer nodes with edges into or out of the call become inputs and outputs.

    Args:
        graph: A recorded graph, or a view of one.
        name: The module's dotted name.
        call: The number of the call, starting at 1.

    Returns:
        A graph whose root is the call. An input or output has the name of the innermost named module call around the
        outer node. Outer functions directly in the root, or in a call around the focused call, keep their own names.
        Parameters and the model's inputs and outputs also keep their names. The parameter count includes the
        submodules.

    Raises:
        ArgumentError: If there is no such call. The message names the closest modules.

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
    # If the graph has no totals, add the parameters of the modules called here, each module once.
    called = sum({node.name: node.parameters for node in nodes if node.kind == "module"}.values())
    parameters = root.total_parameters or called
    nodes = [nodes[0], *inputs.values(), *nodes[1:], *outputs.values()]
    return replace(graph, nodes=tuple(nodes), edges=tuple(edges), parameters=parameters)


def _border(graph: Graph, edge: Edge, outside: int, free: int, kind: Kind, root: Node) -> Node:
    """Return the input or output node that replaces an outer node."""
    node = graph[outside]
    named = next((each.name for each in (node, *graph.ancestors(node)) if each.kind == "module" and each.name), "")
    own = node.kind in ("parameter", "buffer", "input", "output", "backward", "optimizer") or not named
    # A function directly in a call around the focused call keeps its own name. The name of the surrounding call would
    # not identify the function.
    around = {each.id for each in graph.ancestors(root)}
    near = node.parent in around and node.kind != "module"
    tensor = (edge.tensor,) if edge.tensor is not None else ()
    return Node(free, kind, node.name if own or near else named, root.id, 1, outputs=tensor, source=node.source)
