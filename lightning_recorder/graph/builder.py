"""A graph while it grows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from lightning_recorder.graph.model import Edge, Graph, Kind, Node, TensorMeta
from lightning_recorder.graph.provenance import is_lazy

__all__ = ["Draft", "GraphBuilder", "meta_of", "metas_of"]

_REENTRANT = "CheckpointFunctionBackward"


@dataclass(slots=True)
class Draft:
    """A node that may still change; see :class:`Node`.

    A recording makes few objects that Python's garbage collector has to go through: with ten for each function the
    collections alone took as long as the recording.
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

    def reached_by_gradient(self, start: int) -> set[int]:
        """The nodes to which the gradient of a backward pass gets: from what it starts at back to the leaves."""
        before: dict[int, list[int]] = {}
        for source, target in self._edges:
            before.setdefault(target, []).append(source)
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
        scopes = _Scopes(self.nodes, self._edges, scope).named()
        nodes = tuple(
            Node(
                number,
                draft.kind,
                draft.name,
                draft.parent,
                draft.depth,
                draft.type_name,
                draft.call,
                draft.outputs,
                draft.parameters,
                draft.autograd,
                scopes.get(number, ""),
                draft.failed,
                draft.source,
                draft.duration_ms,
            )
            for number, draft in enumerate(self.nodes)
        )
        edges = (Edge(*ends, times, self._first[ends]) for ends, times in self._edges.items())
        return Graph(nodes, tuple(edges), scope, parameters)


class _Scopes:
    """The parts of a training step: what leads to each backward pass, and what of that is the loss."""

    def __init__(self, nodes: list[Draft], edges: Iterable[tuple[int, int]], scope: str) -> None:
        self._nodes = nodes
        self._edges = edges
        self._scope = scope

    def named(self) -> dict[int, str]:
        """The scope of each node but the root; of none where there is no backward pass."""
        passes = [number for number, node in enumerate(self._nodes) if _is_backward(node)]
        if not passes:
            return {}
        leading = self._leading()
        loss = self._loss(leading)
        ends = self._ends(passes, leading)
        named: dict[int, str] = {}
        turn = 0
        for number, node in enumerate(self._nodes):
            if node.parent is None:
                continue
            turn += turn < len(ends) and number > ends[turn]
            own = "loss" if number in loss else self._scope
            # What lies in a call belongs to what the call belongs to, though a backward pass may lie in between.
            named[number] = named.get(node.parent) or (f"{own} {turn + 1}" if turn else own)
        return named

    def _leading(self) -> set[int]:
        """What leads to a backward pass, by what it gives or by something inside it."""
        targets: dict[int, list[int]] = {}
        for source, target in self._edges:
            targets.setdefault(source, []).append(target)
        found: set[int] = set()
        # What uses a tensor comes after what gave it, so going backwards it is decided before.
        for number in range(len(self._nodes) - 1, -1, -1):
            node = self._nodes[number]
            if number in found or _is_backward(node) or any(target in found for target in targets.get(number, ())):
                found.add(number)
                if node.parent is not None and not _is_backward(node):
                    found.add(node.parent)
        return found

    def _ends(self, passes: list[int], leading: set[int]) -> list[int]:
        """The last node of each part but the last: a backward pass or a step, behind which another loss is computed."""
        ends = []
        for one, other in pairwise(passes):
            end = max(number for number in range(one, other) if _is_boundary(self._nodes[number]))
            if any(number in leading for number in range(end + 1, other)):
                ends.append(end)
        return ends

    def _loss(self, leading: set[int]) -> set[int]:
        """What lies between the last layer with parameters and a backward pass, with all that it holds."""
        place: dict[int, int] = {}  # of each node the one directly in the root in which it lies
        layers: set[int] = set()
        for number, node in enumerate(self._nodes):
            if node.parent is not None:
                place[number] = place.get(node.parent, number)
                # A buffer makes no layer: weights of classes are one.
                if node.kind == "parameter" or node.parameters:
                    layers.add(place[number])
        layers |= self._layers_of_the_root()
        targets: dict[int, set[int]] = {}
        for source, target in self._edges:
            if target in leading and place[source] != place[target]:
                targets.setdefault(place[source], set()).add(place[target])
        found: set[int] = set()
        for number in sorted(set(place.values()), reverse=True):
            node, following = self._nodes[number], targets.get(number)
            behind = node.kind in ("op", "module") and number not in layers and following and following <= found
            if _is_backward(node) or behind:
                found.add(number)
        trained = {place[number] for number in self._trained()}
        # What is made of the targets alone, before they meet what the model gave, is no loss yet.
        found = found & trained or found
        return {number for number, root in place.items() if root in found and not _is_backward(self._nodes[root])}

    def _trained(self) -> set[int]:
        """What was computed with a parameter."""
        targets: dict[int, list[int]] = {}
        for source, target in self._edges:
            targets.setdefault(source, []).append(target)
        todo = [number for number, node in enumerate(self._nodes) if node.kind == "parameter"]
        found = set(todo)
        while todo:
            new = [target for target in targets.get(todo.pop(), ()) if target not in found]
            found.update(new)
            todo.extend(new)
        return found

    def _layers_of_the_root(self) -> set[int]:
        """The functions directly in the root that join a parameter with another tensor, but for scaled losses."""
        kinds: dict[int, set[bool]] = {}
        for source, target in self._edges:
            kinds.setdefault(target, set()).add(self._nodes[source].kind == "parameter")
        # What takes parameters alone is their norm, say, which is added to the loss.
        return {number for number, both in kinds.items() if len(both) == 2 and _is_large(self._nodes[number])}


def _is_large(node: Draft) -> bool:
    return node.parent == 0 and node.kind == "op" and any(meta.shape for meta in node.outputs)


def _is_backward(node: Draft) -> bool:
    return node.kind == "backward" and node.name == "backward"


def _is_boundary(node: Draft) -> bool:
    return node.kind == "optimizer" or _is_backward(node)


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
        sizes = () if is_lazy(tensor) else tuple(tensor.shape)
    except (RuntimeError, TypeError):
        return ()
    # Of a nested tensor some sizes are no numbers, nor are symbols, which would be fixed by being asked for one.
    return sizes if all(type(size) is int for size in sizes) else ()
