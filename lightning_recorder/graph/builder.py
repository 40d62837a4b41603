"""A graph while it grows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import lru_cache

import torch
from torch import Tensor

from lightning_recorder.graph.draft import Draft
from lightning_recorder.graph.model import Edge, Graph, Kind, Node, TensorMeta
from lightning_recorder.graph.scopes import Scopes
from lightning_recorder.storage import is_uninitialized

__all__ = ["GraphBuilder", "meta_of", "metas_of"]

_REENTRANT = "CheckpointFunctionBackward"
_FIELDS = tuple(each.name for each in fields(Draft))


class GraphBuilder:
    """Nodes in the order of time, each known by its place among them, and the edges between them."""

    def __init__(self) -> None:
        self.nodes: list[Draft] = []
        self._edges: dict[tuple[int, int], int] = {}
        """How many tensors go from one node into another."""
        self._first: dict[tuple[int, int], TensorMeta | None] = {}
        """The first of them."""

    def add(
        self, kind: Kind, name: str, parent: int | None, outputs: tuple[TensorMeta, ...] = (), source: str = ""
    ) -> int:
        """Add a node inside a module call and give its id."""
        depth = 0 if parent is None else self.nodes[parent].depth + 1
        self.nodes.append(Draft(kind, name, parent, depth, outputs=outputs, source=source))
        return len(self.nodes) - 1

    def connect(self, source: int, target: int, tensor: TensorMeta | None) -> None:
        """Add a tensor that goes from one node into another."""
        ends = source, target
        times = self._edges.get(ends)
        if times is None:
            self._first[ends] = tensor
        self._edges[ends] = (times or 0) + 1

    def is_connected(self, source: int, target: int) -> bool:
        """Whether a tensor goes from one node into another."""
        return (source, target) in self._edges

    def sources(self) -> dict[int, list[int]]:
        """Of each node those from which tensors go into it."""
        before: dict[int, list[int]] = {}
        for source, target in self._edges:
            before.setdefault(target, []).append(source)
        return before

    def reached_by_gradient(self, start: int, before: Mapping[int, list[int]]) -> set[int]:
        """The nodes to which the gradient of a backward pass gets: from what it starts at back to the leaves.

        Args:
            start: The node of the backward pass.
            before: :meth:`sources`.
        """
        found = {(start, False)}
        todo = list(found)
        while todo:
            number, inside = todo.pop()
            names = self.nodes[number].autograd
            # What a reentrant checkpoint computes has no part in torch's backward graph but for the last of it.
            inside = _REENTRANT in names or (inside and not names)
            # What has none otherwise, as ``detach``, is the end; an identity is the tensor that goes in.
            if number == start or names or inside or self.nodes[number].name == "identity":
                new = [(source, inside) for source in before.get(number, ()) if (source, inside) not in found]
                found.update(new)
                todo.extend(new)
        return {number for number, _ in found}

    def finish(self, scope: str, parameters: int) -> Graph:
        """The graph as it is now."""
        scopes = Scopes(self.nodes, self._edges, scope).named()
        nodes = tuple(
            Node(number, scope=scopes.get(number, ""), **{name: getattr(draft, name) for name in _FIELDS})
            for number, draft in enumerate(self.nodes)
        )
        edges = (Edge(*ends, times, self._first[ends]) for ends, times in self._edges.items())
        return Graph(nodes, tuple(edges), scope, parameters)


def meta_of(tensor: Tensor) -> TensorMeta:
    """Shape, dtype and device of a tensor; no shape where it has none that is all numbers."""
    return _meta(_shape(tensor), tensor.dtype, tensor.device)


def metas_of(tensors: Iterable[Tensor]) -> tuple[TensorMeta, ...]:
    """The same of several."""
    found = tuple([meta_of(each) for each in tensors])
    return _tuples.setdefault(found, found) if len(_tuples) < _MOST_TUPLES else found


# Of equal ones a single object is kept.
_tuples: dict[tuple[TensorMeta, ...], tuple[TensorMeta, ...]] = {}
_MOST_TUPLES = 1024


@lru_cache(1024)
def _meta(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> TensorMeta:
    return TensorMeta(shape, str(dtype).removeprefix("torch."), str(device))


def _shape(tensor: Tensor) -> tuple[int, ...]:
    if type(tensor) is Tensor and not tensor.is_nested:
        return tuple(tensor.shape)
    try:
        sizes = () if is_uninitialized(tensor) else tuple(tensor.shape)
    except (RuntimeError, TypeError):
        return ()
    # Of a nested tensor some sizes are no numbers, nor are symbols, which would be fixed by being asked for one.
    return sizes if all(type(size) is int for size in sizes) else ()
