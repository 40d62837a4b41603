"""A graph under construction: its nodes and the edges between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_recorder.graph.capture.call_arguments import Given, describe_arguments
from lightning_recorder.graph.model import Edge, Graph, Kind, Node, TensorMeta
from lightning_recorder.graph.unused import Unused
from lightning_recorder.internals.storage import is_uninitialized

__all__ = ["Draft", "GraphBuilder", "interned", "meta_of", "metas_of"]

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
    autograd: tuple[str, ...] = ()
    failed: bool = False
    source: str = ""
    duration_ms: float | None = None
    inputs: tuple[TensorMeta, ...] = ()
    given: Given | None = None
    """The function and its arguments that are not tensors."""
    arguments: tuple[tuple[str, str], ...] = ()
    saved_bytes: int | None = None
    flops: int | None = None
    note: str = ""
    total_parameters: int = 0
    used_parameters: int | None = None
    tied: tuple[str, ...] = ()


class GraphBuilder:
    """Collects nodes in the order of time, identified by their position, and the edges between them."""

    def __init__(self) -> None:
        self.nodes: list[Draft] = []
        # The key is a number and not a pair, since Python's garbage collector need not traverse numbers.
        self._edges: dict[int, int] = {}
        """The number of tensors on each edge, by source × 2³² + target."""
        self._first: dict[int, TensorMeta | None] = {}
        """The first tensor of each edge."""
        self._detached: set[int] = set()
        """The edges that pass no gradient back, since no tensor on them requires one."""

    def add(
        self,
        kind: Kind,
        name: str,
        parent: int | None,
        outputs: tuple[TensorMeta, ...] = (),
        source: str = "",
        inputs: tuple[TensorMeta, ...] = (),
        given: Given | None = None,
    ) -> int:
        """Add a node inside a module call and return its id."""
        depth = 0 if parent is None else self.nodes[parent].depth + 1
        self.nodes.append(Draft(kind, name, parent, depth, "", 1, outputs, 0, (), False, source, None, inputs, given))
        return len(self.nodes) - 1

    def connect(self, source: int, target: int, tensor: TensorMeta | None, *, differentiable: bool = True) -> None:
        """Record a tensor that is an output of one node and an input of another."""
        ends = (source << 32) + target
        times = self._edges.get(ends)
        if times is None:
            self._edges[ends] = 1
            self._first[ends] = tensor
            if not differentiable:
                self._detached.add(ends)
            return
        self._edges[ends] = times + 1
        if differentiable:
            self._detached.discard(ends)

    def is_connected(self, source: int, target: int) -> bool:
        """Return True if there is an edge from one node to another."""
        return (source << 32) + target in self._edges

    def sources(self) -> dict[int, list[int]]:
        """Return the sources of all edges into each node."""
        before: dict[int, list[int]] = {}
        for source, target in self.ends:
            before.setdefault(target, []).append(source)
        return before

    def reached_by_gradient(self, starts: Iterable[int], before: Mapping[int, list[int]]) -> set[int]:
        """Return the nodes that the gradients of backward passes reach, from their starts back to the leaves.

        Args:
            starts: The nodes of the backward passes.
            before: The result of :meth:`sources`.
        """
        begins = set(starts)
        found = {(start, False) for start in begins}
        todo = list(found)
        while todo:
            number, inside = todo.pop()
            names = self.nodes[number].autograd
            # torch's backward graph contains only the last node of what a reentrant checkpoint computes.
            inside = _REENTRANT in names or (inside and not names)
            # Any other node without autograd nodes, such as ``detach``, stops the gradient; an identity passes it on.
            if number in begins or names or inside or self.nodes[number].name == "identity":
                new = [
                    (source, inside)
                    for source in before.get(number, ())
                    if (source, inside) not in found and self._passes(source, number, inside)
                ]
                found.update(new)
                todo.extend(new)
        return {number for number, _ in found}

    def leading(self, before: Mapping[int, list[int]]) -> set[int]:
        """Return the nodes that lead to a backward pass or to a result of the model."""
        todo = [number for number, node in enumerate(self.nodes) if node.kind in ("backward", "output")]
        found = set(todo)
        while todo:
            new = [source for source in before.get(todo.pop(), ()) if source not in found]
            found.update(new)
            todo.extend(new)
        return found

    def is_differentiable(self, source: int, target: int) -> bool:
        """Return True if a tensor on an edge requires a gradient."""
        return (source << 32) + target not in self._detached

    def _passes(self, source: int, target: int, inside: bool) -> bool:
        """Return True if an edge passes a gradient back."""
        # Inside a reentrant checkpoint no intermediate result requires a gradient, but the parameters do.
        return (source << 32) + target not in self._detached or (inside and self.nodes[source].kind != "parameter")

    @property
    def ends(self) -> Iterable[tuple[int, int]]:
        """The source and the target of each edge."""
        return [(key >> 32, key & 0xFFFFFFFF) for key in self._edges]

    def finish(self, scope: str, parameters: int, scopes: Mapping[int, str], unused: Unused) -> Graph:
        """Return the graph recorded so far.

        Args:
            scope: The recorded method of the model.
            parameters: The number of parameters of the model.
            scopes: The scope of each node; empty for a node that is missing.
            unused: The parts of the model that were not used.
        """
        nodes = tuple([_node(number, draft, scopes.get(number, "")) for number, draft in enumerate(self.nodes)])
        counts, first = self._edges.values(), self._first.values()
        edges = [Edge(*ends, times, meta) for ends, times, meta in zip(self.ends, counts, first, strict=True)]
        return Graph(nodes, tuple(edges), scope, parameters, unused=unused)


def _node(number: int, draft: Draft, scope: str) -> Node:
    return Node(
        number,
        draft.kind,
        draft.name,
        draft.parent,
        draft.depth,
        draft.type_name,
        draft.call,
        draft.outputs,
        draft.parameters,
        draft.total_parameters,
        draft.used_parameters,
        draft.tied,
        draft.autograd,
        scope,
        draft.failed,
        draft.source,
        draft.duration_ms,
        inputs=draft.inputs,
        arguments=draft.arguments if draft.given is None else describe_arguments(draft.given),
        flops=draft.flops,
        saved_bytes=draft.saved_bytes,
        note=draft.note,
    )


def meta_of(tensor: Tensor) -> TensorMeta:
    """Return the shape, dtype and device of a tensor; the shape is empty if it is unknown or not made of integers."""
    return _meta(_shape(tensor), tensor.dtype, tensor.device)


def metas_of(tensors: Iterable[Tensor]) -> tuple[TensorMeta, ...]:
    """Return the shape, dtype and device of each of several tensors."""
    return interned(tuple([meta_of(each) for each in tensors]))


def interned(found: tuple[TensorMeta, ...]) -> tuple[TensorMeta, ...]:
    """Return an equal tuple that is shared with other nodes, to save memory."""
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
    if type(tensor) is Parameter:
        return tuple(tensor.shape)
    try:
        sizes = () if is_uninitialized(tensor) else tuple(tensor.shape)
    except (RuntimeError, TypeError):
        return ()
    # A nested tensor has sizes that are not integers. Reading a symbolic size as an integer would specialize it.
    return sizes if all(type(size) is int for size in sizes) else ()
