"""A view that draws the tensors between functions as nodes."""

from __future__ import annotations

from dataclasses import replace

from lightning_recorder.graph.model import Edge, Graph, Node, TensorMeta

__all__ = ["show_tensors"]

_COMPUTED = ("module", "op", "backward")


def show_tensors(graph: Graph) -> Graph:
    """Insert a tensor node between each function or closed module call and the users of its outputs.

    Outputs of one function with the same shape and dtype share a node.

    Args:
        graph: A recorded graph, or a view of one.

    Example:
        >>> import torch
        >>> from lightning_recorder.graph import capture_graph
        >>> view = show_tensors(capture_graph(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh()), torch.ones(2)))
        >>> [(node.kind, node.name) for node in view.nodes[3:]]
        [('op', 'relu'), ('tensor', 'relu'), ('module', '1'), ('op', 'tanh'), ('output', 'output')]
    """
    free = max(node.id for node in graph.nodes) + 1
    shown: dict[tuple[int, TensorMeta | None], Node] = {}
    edges: list[Edge] = []
    for edge in graph.edges:
        source = graph[edge.source]
        if source.kind not in _COMPUTED or edge.tensor is None or graph[edge.target].kind == "output":
            edges.append(edge)
            continue
        key = edge.source, edge.tensor
        if key not in shown:
            name = source.name.rpartition(".")[2] or source.type_name
            parent = source.parent if source.parent is not None else graph.root.id
            shown[key] = Node(free + len(shown), "tensor", name, parent, source.depth, outputs=(edge.tensor,))
            edges.append(Edge(edge.source, shown[key].id, 1, edge.tensor))
        edges.append(replace(edge, source=shown[key].id))
    behind: dict[int, list[Node]] = {}
    for (source_id, _), node in shown.items():
        behind.setdefault(source_id, []).append(node)
    nodes: list[Node] = []
    for node in graph.nodes:
        nodes += [node, *behind.get(node.id, [])]
    return replace(graph, nodes=tuple(nodes), edges=tuple(edges))
