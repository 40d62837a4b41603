"""A graph under construction: its nodes and the edges between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache

import torch
from torch import Tensor

from lightning_recorder.graph.model import Edge, Graph, Kind, Node, TensorMeta
from lightning_recorder.internals.storage import is_uninitialized

__all__ = ["Draft", "GraphBuilder", "meta_of", "metas_of"]

_REENTRANT = "CheckpointFunctionBackward"


@dataclass(slots=True)
class Draft:
    """A mutable node; see :class:`Node` for its fields.

    A recording creates few objects that Python's garbage collector has to traverse. With ten objects for each function,
    the collections alone took as long as the recording.
    """

    kind: Kind
    name: str
    parent: int | None
    depth: int
    type_name: str = ""
    call: int = 1
    outputs: tuple[TensorMeta, ...] = ()
    parameters: int = 0
    total_parameters: int = 0
    used_parameters: int | None = None
    tied: tuple[str, ...] = ()
    autograd: tuple[str, ...] = ()
    failed: bool = False
    source: str = ""
    duration_ms: float | None = None


_FIELDS = tuple(each.name for each in fields(Draft))


class GraphBuilder:
    """Collects nodes in the order of time, identified by their position, and the edges between them."""

    def __init__(self) -> None:
        self.nodes: list[Draft] = []
        self._edges: dict[tuple[int, int], int] = {}
        """The number of tensors on each edge, by source and target."""
        self._first: dict[tuple[int, int], TensorMeta | None] = {}
        """The first tensor of each edge."""

    def add(
        self, kind: Kind, name: str, parent: int | None, outputs: tuple[TensorMeta, ...] = (), source: str = ""
    ) -> int:
        """Add a node inside a module call and return its id."""
        depth = 0 if parent is None else self.nodes[parent].depth + 1
        self.nodes.append(Draft(kind, name, parent, depth, outputs=outputs, source=source))
        return len(self.nodes) - 1

    def connect(self, source: int, target: int, tensor: TensorMeta | None) -> None:
        """Record a tensor that is an output of one node and an input of another."""
        ends = source, target
        times = self._edges.get(ends)
        if times is None:
            self._first[ends] = tensor
        self._edges[ends] = (times or 0) + 1

    def is_connected(self, source: int, target: int) -> bool:
        """Return True if there is an edge from one node to another."""
        return (source, target) in self._edges

    def sources(self) -> dict[int, list[int]]:
        """Return the sources of all edges into each node."""
        before: dict[int, list[int]] = {}
        for source, target in self._edges:
            before.setdefault(target, []).append(source)
        return before

    def reached_by_gradient(self, start: int, before: Mapping[int, list[int]]) -> set[int]:
        """Return the nodes that the gradient of a backward pass reaches, from its start back to the leaves.

        Args:
            start: The node of the backward pass.
            before: The result of :meth:`sources`.
        """
        found = {(start, False)}
        todo = list(found)
        while todo:
            number, inside = todo.pop()
            names = self.nodes[number].autograd
            # torch's backward graph contains only the last node of what a reentrant checkpoint computes.
            inside = _REENTRANT in names or (inside and not names)
            # Any other node without autograd nodes, such as ``detach``, stops the gradient; an identity passes it on.
            if number == start or names or inside or self.nodes[number].name == "identity":
                new = [(source, inside) for source in before.get(number, ()) if (source, inside) not in found]
                found.update(new)
                todo.extend(new)
        return {number for number, _ in found}

    @property
    def ends(self) -> Iterable[tuple[int, int]]:
        """The source and the target of each edge."""
        return self._edges.keys()

    def finish(self, scope: str, parameters: int, scopes: Mapping[int, str]) -> Graph:
        """Return the graph recorded so far.

        Args:
            scope: The recorded method of the model.
            parameters: The number of parameters of the model.
            scopes: The scope of each node; empty for a node that is missing.
        """
        nodes = tuple(
            Node(number, scope=scopes.get(number, ""), **{name: getattr(draft, name) for name in _FIELDS})
            for number, draft in enumerate(self.nodes)
        )
        edges = (Edge(*ends, times, self._first[ends]) for ends, times in self._edges.items())
        return Graph(nodes, tuple(edges), scope, parameters)


def meta_of(tensor: Tensor) -> TensorMeta:
    """Return the shape, dtype and device of a tensor; the shape is empty if it is unknown or not made of integers."""
    return _meta(_shape(tensor), tensor.dtype, tensor.device)


def metas_of(tensors: Iterable[Tensor]) -> tuple[TensorMeta, ...]:
    """Return the shape, dtype and device of each of several tensors."""
    found = tuple([meta_of(each) for each in tensors])
    return _tuples.setdefault(found, found) if len(_tuples) < _MOST_TUPLES else found


# Equal tuples are interned to save memory.
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
    # A nested tensor has sizes that are not integers. Reading a symbolic size as an integer would specialize it.
    return sizes if all(type(size) is int for size in sizes) else ()
