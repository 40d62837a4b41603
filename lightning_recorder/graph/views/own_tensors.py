"""A view without the parameters and buffers of closed calls."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Set
from dataclasses import replace

from lightning_recorder.graph.model import Graph, Node
from lightning_recorder.graph.views.collapse import closed_calls
from lightning_recorder.graph.views.rebuild import rebuilt

__all__ = ["own_tensors", "with_copies"]

_MODEL_TENSORS = ("parameter", "buffer")
_FAR = 40  # number of nodes between two uses of a tensor, above which the uses are in different loops
_OF_LAYERS = ("weight", "bias", "running_mean", "running_var")


def own_tensors(graph: Graph, depth: int | None = None, opened: Set[int] = frozenset()) -> Graph:
    """Remove the parameters and buffers inside the calls that are closed at a depth, and inside layers.

    Tensors that an open call uses directly stay, such as the position embedding of a transformer. The weight and bias
    of a layer that calls other modules, such as a batch norm with an activation, are removed. They are added to the
    parameter count of the layer's function. If a call or op uses a parameter of another closed call, such as a tied
    weight, :attr:`Node.tied` lists the name of the parameter.

    Args:
        graph: A recorded graph, or a view of one, before its calls are closed.
        depth: The depth at which :func:`collapse` will close calls. With ``None``, it closes calls without inner calls.
        opened: The ids of calls that stay open at any depth.

    Example:
        >>> import torch
        >>> from lightning_recorder.graph import capture_graph
        >>> class Scaled(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.fc, self.scale = torch.nn.Linear(2, 2), torch.nn.Parameter(torch.ones(2))
        ...     def forward(self, x):
        ...         return self.fc(x) * self.scale
        >>> [node.name for node in own_tensors(capture_graph(Scaled(), torch.ones(1, 2))).nodes if not node.type_name]
        ['input', 'linear', 'scale', 'mul', 'output']
    """
    closed = closed_calls(graph, depth, opened=opened)
    around: dict[int, int] = {}
    for node in graph.nodes:
        # The outermost closed call around each node, or the node itself.
        outer = None if node.parent is None else around[node.parent]
        around[node.id] = outer if outer in closed and outer is not None else node.id
    gone = {node.id: node for node in graph.nodes if node.kind in _MODEL_TENSORS and around[node.id] != node.id}
    tied: dict[int, dict[str, None]] = {}
    for edge in graph.edges:
        user = around[edge.target]
        if edge.source not in gone or gone[edge.source].kind != "parameter":
            continue
        # In a later call of a module, the parameters of the module are no tied tensors, although they were recorded in
        # the first call.
        name = _name_inside(gone[edge.source], graph)
        own = graph[user].kind == "module" and f"{name}.".startswith(f"{graph[user].name}.")
        if around[edge.source] != user and not own:
            tied.setdefault(user, {})[name] = None
    layers = _layers(graph, gone)
    gone |= {tensor.id: tensor for tensors in layers.values() for tensor in tensors}
    kept = [replace(node, tied=tuple(tied[node.id])) if node.id in tied else node for node in graph.nodes]
    kept = [replace(node, parameters=_count(layers[node.id])) if node.id in layers else node for node in kept]
    kept = _before_users(graph, [node for node in kept if node.id not in gone])
    return rebuilt(graph, kept, {node.id: node.id for node in kept})


def with_copies(graph: Graph) -> Graph:
    """Copy parameters and buffers that two loops use, so that each loop can be folded on its own.

    A use belongs to a second loop if more than 40 nodes lie between it and the previous use of the tensor, and if other
    parameters or buffers are used in between. A copy has the name of its tensor. If no tensor is copied, the graph
    itself is returned.
    """
    targets: dict[int, set[int]] = {}
    for edge in graph.edges:
        if graph[edge.source].kind in _MODEL_TENSORS:
            targets.setdefault(edge.source, set()).add(edge.target)
    uses = sorted((target, source) for source, several in targets.items() if len(several) > 1 for target in several)
    place: dict[tuple[int, int], int] = {}
    before: dict[int, list[Node]] = {}
    latest: dict[int, tuple[int, int]] = {}  # the copy and the target of the latest use
    free = max(node.id for node in graph.nodes) + 1
    last = None
    for target, source in uses:
        copy, use = latest.get(source, (source, target))
        if last != source and target - use > _FAR:
            copy, free = free, free + 1
            around = graph[target]
            before.setdefault(target, []).append(
                replace(graph[source], id=copy, parent=around.parent, depth=around.depth)
            )
        latest[source], last = (copy, target), source
        place[source, target] = copy
    if not before:
        return graph
    edges = (replace(edge, source=place.get((edge.source, edge.target), edge.source)) for edge in graph.edges)
    nodes = (each for node in graph.nodes for each in (*before.get(node.id, ()), node))
    return replace(graph, nodes=tuple(nodes), edges=tuple(edges))


def _name_inside(tensor: Node, graph: Graph) -> str:
    """Return the name that a tied tensor has in the module of the surrounding call."""
    call = "" if tensor.parent is None else graph[tensor.parent].name
    return next((name for name in (tensor.name, *tensor.tied) if name.startswith(f"{call}.")), tensor.name)


def _layers(graph: Graph, gone: Collection[int]) -> dict[int, list[Node]]:
    """Map functions to the weights and statistics that only they use, in layers that also call other modules."""
    users: dict[int, set[int]] = {}
    for edge in graph.edges:
        users.setdefault(edge.source, set()).add(edge.target)
    layers: dict[int, list[Node]] = {}
    for node in graph.nodes:
        owner, _, key = node.name.rpartition(".")
        if node.kind not in _MODEL_TENSORS or key not in _OF_LAYERS or node.id in gone or not owner:
            continue
        (user, *others) = users.get(node.id, {node.id})
        if not others and graph[user].parent == node.parent and owner == graph[node.parent or 0].name:
            layers.setdefault(user, []).append(node)
    return {user: tensors for user, tensors in layers.items() if len(tensors) > 1}


def _count(tensors: Iterable[Node]) -> int:
    """Return the number of elements of the parameters among the tensors."""
    shapes = (tensor.outputs[0].shape for tensor in tensors if tensor.kind == "parameter" and tensor.outputs)
    return sum(map(math.prod, shapes))


def _before_users(graph: Graph, nodes: list[Node]) -> list[Node]:
    """Move each parameter and buffer before the first call that uses it.

    A tensor is recorded when a function uses it. So a tensor that is passed to a call is recorded after the call has
    begun.
    """
    place = {node.id: number for number, node in enumerate(nodes)}
    first: dict[int, int] = {}
    for edge in graph.edges:
        if edge.source in place and graph[edge.source].kind in _MODEL_TENSORS and edge.target in place:
            user = next(
                each
                for each in (graph[edge.target], *graph.ancestors(graph[edge.target]))
                if each.parent == graph[edge.source].parent or each.parent is None
            )
            first[edge.source] = min(first.get(edge.source, place[edge.source]), place[user.id] or place[edge.source])
    return sorted(nodes, key=lambda node: (first.get(node.id, place[node.id]), node.id not in first))
