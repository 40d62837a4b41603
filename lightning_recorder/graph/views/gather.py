"""A view that draws many inputs or outputs in one container as one node."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import replace

from lightning_recorder.graph.model import Edge, Graph, Node
from lightning_recorder.graph.views.forms import span, without_numbers
from lightning_recorder.graph.views.rebuild import redirected

__all__ = ["gather"]

_FEW = 4
_FEW_INSIDE = 2
_FEW_NUMBERED = 8  # the maximum number of separate inputs, such as ``input[1]`` and ``input[2]``, that stay nodes
# The first part of a path and the key that follows it: ``output.past_key_values``, ``input[0]``.
_CONTAINER = re.compile(r"[^.\[]*(?:\.[^.\[]+|\[[^\]]*\])?")
# Two further keys, as in ``output.past_key_values[0][1]``.
_INSIDE = re.compile(r"(?:\.[^.\[]+|\[[^\]]*\]){2}")


def gather(graph: Graph, few: int = _FEW) -> Graph:
    """Draw the inputs or outputs in one container as a single node if there are more than ``few``.

    As separate nodes, the keys and values of a cache, two for each layer, would fill the picture. The single node has
    the path of the container and lists all of its tensors. If all tensors are in nested containers, such as the entries
    of a cache for each layer, more than two tensors become a single node.

    Args:
        graph: A recorded graph, or a view of one.
        few: The maximum number of tensors that stay separate nodes. In nested containers, at most two tensors do.

    Example:
        >>> import torch
        >>> from lightning_recorder.graph import capture_graph
        >>> class Cached(torch.nn.Module):
        ...     def forward(self, x):
        ...         return {"logits": x.exp(), "cache": [x + number for number in range(6)]}
        >>> [node.name for node in gather(capture_graph(Cached(), torch.ones(2))).nodes if node.kind == "output"]
        ['output.logits', 'output.cache']
    """
    members: dict[tuple[str, str], list[Node]] = {}
    for node in graph.nodes:
        if node.kind in ("input", "output") and (match := _CONTAINER.match(node.name)) is not None:
            members.setdefault((node.kind, match[0]), []).append(node)
    groups: list[tuple[str, list[Node]]] = []
    for (_, path), nodes in members.items():
        inside = all(_INSIDE.match(node.name, len(path)) for node in nodes)
        if len(nodes) > (min(few, _FEW_INSIDE) if inside else few):
            groups.append((path, nodes))
    known = {node.id for _, nodes in groups for node in nodes}
    alike: dict[tuple[object, ...], list[Node]] = {}
    for node in graph.nodes:
        if node.kind in ("input", "output") and node.id not in known and len(node.outputs) == 1:
            meta = node.outputs[0]
            key = node.kind, without_numbers(node.name), len(meta.shape), meta.dtype
            alike.setdefault(key, []).append(node)
    groups += [(span([node.name for node in nodes]), nodes) for nodes in alike.values() if len(nodes) > _FEW_NUMBERED]
    if not groups:
        return graph
    target = {node.id: nodes[0].id for _, nodes in groups for node in nodes}
    gathered: dict[int, Node] = {}
    for path, nodes in groups:
        metas = tuple(meta for node in nodes for meta in node.outputs)
        gathered[nodes[0].id] = replace(nodes[0], name=path, outputs=metas)
    kept = [gathered.get(node.id, node) for node in graph.nodes if target.get(node.id, node.id) == node.id]
    return replace(graph, nodes=tuple(kept), edges=_in_time(redirected(graph.edges, target), graph, set(gathered)))


def _in_time(edges: Iterable[Edge], graph: Graph, gathered: Collection[int]) -> tuple[Edge, ...]:
    """Move the edges into gathered outputs to the end, in the execution order of their sources.

    Before, they are in the order of the paths of the outputs. A cache may list the keys of all layers before the
    values. In this order, the layers would not fold.
    """
    place = {node.id: number for number, node in enumerate(graph.nodes)}
    return tuple(sorted(edges, key=lambda edge: place[edge.source] + 1 if edge.target in gathered else 0))
