"""A graph under construction: its nodes and the edges between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from copy import copy
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_recorder.graph.capture.call_arguments import Given, describe_arguments
from lightning_recorder.graph.capture.function_calls import installed_packages
from lightning_recorder.graph.model import IN_PLACE, Edge, Graph, Kind, Node, TensorMeta
from lightning_recorder.graph.unused import Unused
from lightning_recorder.internals.autograd import without_class
from lightning_recorder.internals.storage import is_uninitialized

__all__ = ["REENTRANT", "Draft", "GraphBuilder", "described", "interned", "meta_of", "metas_of"]

Frozen = TypeVar("Frozen", Node, Edge)

_PLAIN = (Tensor, Parameter)

REENTRANT = "CheckpointFunctionBackward"


class Draft:
    """A mutable node with the fields of :class:`Node`. It becomes a :class:`Node` when the recording ends.

    A recording must create few objects that Python's garbage collector has to traverse. With ten such objects for each
    function, garbage collection took as long as the recording itself. Fields with a default value are class attributes
    until they are set, as in :class:`Node`.
    """

    type_name: str = ""
    call: int = 1
    parameters: int = 0
    total_parameters: int = 0
    used_parameters: int | None = None
    tied: tuple[str, ...] = ()
    autograd: tuple[str, ...] = ()
    scope: str = ""
    failed: bool = False
    duration_ms: float | None = None
    repeats: int = 1
    parallel: bool = False
    arguments: tuple[tuple[str, str], ...] = ()
    flops: int | None = None
    saved_bytes: int | None = None
    note: str = ""

    def __init__(
        self,
        number: int,
        kind: Kind,
        name: str,
        parent: int | None,
        depth: int,
        outputs: tuple[TensorMeta, ...],
        source: str,
        inputs: tuple[TensorMeta, ...],
    ) -> None:
        self.id, self.kind, self.name, self.parent, self.depth = number, kind, name, parent, depth
        self.outputs, self.source, self.inputs = outputs, source, inputs


class _DraftEdge:
    """An edge that becomes an :class:`Edge`; see :class:`Draft`."""

    outputs: tuple[int, ...] = ()

    def __init__(self, source: int, target: int, multiplicity: int, tensor: TensorMeta | None) -> None:
        self.source, self.target, self.multiplicity, self.tensor = source, target, multiplicity, tensor


class GraphBuilder:
    """Collects the nodes of a graph in execution order, and its edges. The id of a node is its position."""

    def __init__(self) -> None:
        self.nodes: list[Draft] = []
        self._of_kind: dict[Kind, list[int]] = {}
        """The node ids of each kind except ``op``."""
        self.given: dict[int, Given] = {}
        """The function of each node and its arguments that are not tensors, by node id."""
        # The key is a number instead of a pair, since Python's garbage collector does not traverse numbers.
        self._edges: dict[int, TensorMeta | None] = {}
        """The first tensor of each edge, by source × 2³² + target."""
        self._repeated: dict[int, int] = {}
        """The number of tensors of each edge that has more than one."""
        self._outputs: dict[int, tuple[int, ...]] = {}
        """The output indices of the tensors of each edge, unless all are the first output of the source."""
        self.compound: set[int] = set()
        """The nodes of custom ``autograd.Function`` calls that call modules."""
        self.written: dict[str, list[int]] = {}
        """By parameter name: the functions that use the parameter after another function has written to it."""
        self.in_place: list[int] = []
        """The functions that wrote to one of their inputs."""
        self._detached: set[int] = set()
        """The edges that pass no gradient back, because no tensor of the edge requires a gradient."""

    def add(
        self,
        kind: Kind,
        name: str,
        parent: int | None,
        outputs: tuple[TensorMeta, ...] = (),
        source: str = "",
        inputs: tuple[TensorMeta, ...] = (),
    ) -> int:
        """Add a node inside a module call and return its id."""
        nodes = self.nodes
        number = len(nodes)
        depth = 0 if parent is None else nodes[parent].depth + 1
        nodes.append(Draft(number, kind, name, parent, depth, outputs, source, inputs))
        if kind != "op":
            self._of_kind.setdefault(kind, []).append(number)
        return number

    def add_op(
        self, name: str, parent: int, outputs: tuple[TensorMeta, ...], source: str, inputs: tuple[TensorMeta, ...]
    ) -> Draft:
        """Add the node of a function inside a module call and return it. Faster than :meth:`add`."""
        nodes = self.nodes
        draft = Draft(len(nodes), "op", name, parent, nodes[parent].depth + 1, outputs, source, inputs)
        nodes.append(draft)
        return draft

    def of_kind(self, kind: Kind) -> Sequence[int]:
        """Return the node ids of a kind other than ``op``, in execution order."""
        return self._of_kind.get(kind, ())

    def connect(
        self, source: int, target: int, tensor: TensorMeta | None, differentiable: bool = True, output: int = 0
    ) -> None:
        """Add an edge for one tensor. ``output`` is the index of the tensor among the outputs of the source."""
        ends = (source << 32) + target
        if output or ends in self._outputs:
            before = self._repeated.get(ends, 1) if ends in self._edges else 0
            self._outputs[ends] = (*self._outputs.get(ends, (0,) * before), output)
        if ends not in self._edges:
            self._edges[ends] = tensor
            if not differentiable:
                self._detached.add(ends)
            return
        self._repeated[ends] = self._repeated.get(ends, 1) + 1
        if differentiable:
            self._detached.discard(ends)

    def connect_all(self, target: int, sources: list[int], tensors: list[TensorMeta], passing: list[bool]) -> None:
        """Add the edges of all inputs of a function. Negative sources are ignored.

        ``passing`` is True for the inputs that require a gradient.
        """
        nodes, edges = self.nodes, self._edges
        for source, tensor, passes in zip(sources, tensors, passing, strict=True):
            if source < 0:
                continue
            if not nodes[source].outputs:
                # The outputs of this custom call were not observed, or were observed before a transform wrapped them.
                nodes[source].outputs = (tensor,)
            ends = (source << 32) + target
            if ends in edges:
                self.connect(source, target, tensor, passes)
                continue
            edges[ends] = tensor
            if not passes:
                self._detached.add(ends)

    def note_outputs(self, target: int, sources: list[int], outputs: list[int]) -> None:
        """Record the output index of each input of a function: its index among the outputs of its source."""
        places: dict[int, tuple[int, ...]] = {}
        for source, output in zip(sources, outputs, strict=True):
            ends = (source << 32) + target
            places[ends] = (*places.get(ends, ()), output)
        self._outputs.update((ends, each) for ends, each in places.items() if any(each) and ends in self._edges)

    def is_connected(self, source: int, target: int) -> bool:
        """Return True if there is an edge from one node to another."""
        return (source << 32) + target in self._edges

    def used(self) -> set[int]:
        """Return the nodes with an outgoing edge."""
        return {key >> 32 for key in self._edges}

    def sources(self) -> dict[int, list[int]]:
        """Return the sources of the incoming edges of each node."""
        before: dict[int, list[int]] = {}
        for key in self._edges:
            before.setdefault(key & _TARGET, []).append(key >> 32)
        return before

    def reached_by_gradient(self, starts: Iterable[int]) -> set[int]:
        """Return the nodes that gradients reach when backward passes begin at ``starts``."""
        begins = set(starts)
        nodes, detached = self.nodes, self._detached
        if self.compound or any(REENTRANT in names for names in {node.autograd for node in nodes}):
            return self._reached_through_checkpoints(begins)
        found = set(begins)
        passed = set[int]()
        target = -1
        # The incoming edges of a node are contiguous and precede its outgoing edges. So one pass in reverse order is
        # enough.
        for ends in reversed(self._edges):
            number = ends & _TARGET
            if number != target:
                target = number
                passed.add(number)
                node = nodes[number]
                passes = number in found and (node.autograd or _passes_gradient(node, number in begins))
            if passes and ends not in detached:
                source = ends >> 32
                if source not in found:
                    if source in passed:
                        return self._reached_through_checkpoints(begins)
                    found.add(source)
        return found

    def _reached_through_checkpoints(self, begins: set[int]) -> set[int]:
        """Return the result of :meth:`reached_by_gradient` for a recording with reentrant checkpoints.

        Also handles custom ``autograd.Function`` classes that call modules, as in a reversible network. The backward
        method of such a function may compute the gradients of the modules' parameters.
        """
        before = self.sources()
        found = dict.fromkeys(begins, False)
        """The reached nodes. The value is True inside a reentrant checkpoint or a custom function."""
        nodes, detached = self.nodes, self._detached
        todo = list(found)
        while todo:
            number = todo.pop()
            node = nodes[number]
            names = node.autograd
            # For a reentrant checkpoint, torch's backward graph contains only the last node.
            inside = REENTRANT in names or number in self.compound or (found[number] and not names)
            if not (inside or _passes_gradient(node, number in begins)):
                continue
            for source in before.get(number, ()):
                # Inside a reentrant checkpoint no intermediate result requires a gradient, but the parameters do.
                passes = (source << 32) + number not in detached or (inside and nodes[source].kind != "parameter")
                if passes and found.get(source, -1) < inside:
                    found[source] = inside
                    todo.append(source)
        return set(found)

    def backward_passes(self) -> list[int]:
        """Return the backward passes that compute gradients of parameters.

        A ``torch.autograd.grad`` call with a parameter among its arguments is a backward pass. Any other such call is a
        function of the model.
        """
        passes = self.of_kind("backward")
        if all(self.nodes[number].name != "grad" for number in passes):
            return list(passes)
        before = self.sources()
        return [
            number
            for number in passes
            if self.nodes[number].name != "grad"
            or any(self.nodes[each].kind == "parameter" for each in before.get(number, ()))
        ]

    def leading(self) -> set[int]:
        """Return the nodes that lead to a backward pass or to a result of the model."""
        before = self.sources()
        todo = [*self.backward_passes(), *self.of_kind("output")]
        found = set(todo)
        while todo:
            new = [source for source in before.get(todo.pop(), ()) if source not in found]
            found.update(new)
            todo.extend(new)
        return found

    def taking_gradients(self) -> set[int]:
        """Return the nodes with an input that requires a gradient."""
        return {key & _TARGET for key in self._edges if key not in self._detached}

    def partly_frozen(self) -> set[int]:
        """Return the nodes with a gradient that take a parameter without one, which another node gives a gradient."""
        trained = {key >> 32 for key in self._edges if key not in self._detached}
        taking = self.taking_gradients()
        found = {(key >> 32, key & _TARGET) for key in self._detached}
        return {
            user for node, user in found if node in trained and user in taking and self.nodes[node].kind == "parameter"
        }

    def without_gradient(self, users: Set[int]) -> dict[int, TensorMeta | None]:
        """Return the nodes that feed ``users`` only tensors that require no gradient, with the first such tensor."""
        passing = {key >> 32 for key in self._edges if key not in self._detached and key & _TARGET in users}
        found: dict[int, TensorMeta | None] = {}
        for key, meta in self._edges.items():
            if key & _TARGET in users and key >> 32 not in passing:
                found.setdefault(key >> 32, meta)
        return found

    @property
    def ends(self) -> Iterable[tuple[int, int]]:
        """The source and the target of each edge."""
        return [(key >> 32, key & _TARGET) for key in self._edges]

    def finish(self, scope: str, parameters: int, scopes: Mapping[int, str], unused: Unused, *, ended: bool) -> Graph:
        """Return the graph recorded so far.

        ``scope`` is the recorded method of the model. ``scopes`` maps node ids to scopes, such as ``loss``; a missing
        node has the scope "". With ``ended``, the drafts themselves become the nodes, so the recording cannot go on.
        """
        drafts = self.nodes if ended else [copy(each) for each in self.nodes]
        for number, given in self.given.items():
            drafts[number].arguments = describe_arguments(given)
        for number, named in scopes.items():
            drafts[number].scope = named
        edges = [
            _DraftEdge(key >> 32, key & _TARGET, self._repeated.get(key, 1), meta) for key, meta in self._edges.items()
        ]
        for place, key in enumerate(self._edges) if self._outputs else ():
            if key in self._outputs:
                edges[place].outputs = self._outputs[key]
        self._note_in_place(drafts, edges)
        used = {each.source for each in edges}
        # A tensor that only callbacks used has no edge.
        drafts = [each for each in drafts if each.id in used or each.kind not in _FROM_OUTSIDE]
        packages = installed_packages({each.source for each in drafts})
        nodes, arrows = tuple(_frozen(Node, drafts)), tuple(_frozen(Edge, edges))
        return Graph(nodes, arrows, scope, parameters, unused=unused, packages=packages)

    def _note_in_place(self, drafts: Sequence[Draft], edges: Iterable[_DraftEdge]) -> None:
        """Mark functions that wrote to one of their inputs, and module calls that consist of one such function.

        A function that stops a gradient keeps that note, unless only such functions take its result: then its purpose
        is to write.
        """
        writing = set(self.in_place)
        used = {edge.source for edge in edges if edge.target not in writing} if writing else set()
        for number in self.in_place:
            around = drafts[number].parent or 0
            alone = number == around + 1 and (number + 1 == len(drafts) or drafts[number + 1].parent != around)
            for each in (number, around) if alone and around else (number,):
                is_update = drafts[each].note == "no_grad" and each not in used
                drafts[each].note = IN_PLACE if is_update else drafts[each].note or IN_PLACE


_TARGET = 0xFFFFFFFF
_FROM_OUTSIDE = ("parameter", "buffer", "tensor")


def _passes_gradient(node: Draft, begins: bool) -> bool:
    # An identity passes the gradient on. Any other node without autograd nodes, such as ``detach``, stops it.
    return bool(node.autograd) or begins or node.name == "identity"


def _frozen(kind: type[Frozen], drafts: list[Any]) -> list[Frozen]:
    """Turn drafts into instances of a frozen dataclass with the same fields. Creating new objects takes 8 × as long."""
    for each in drafts:
        each.__class__ = kind
    return drafts


def meta_of(tensor: Tensor) -> TensorMeta:
    """Return the shape, dtype and device of a tensor; the shape is empty if it is unknown."""
    if type(tensor) not in _PLAIN:
        tensor = without_class(tensor)
    return described(_shape(tensor), tensor.dtype, tensor.device)[0]


def metas_of(tensors: Sequence[Tensor]) -> tuple[TensorMeta, ...]:
    """Return the shape, dtype and device of each tensor."""
    if len(tensors) == 1:
        tensor = tensors[0] if type(tensors[0]) in _PLAIN else without_class(tensors[0])
        shape = tensor.shape if type(tensor) is Tensor and not tensor.is_nested else _shape(tensor)
        return described(shape, tensor.dtype, tensor.device)
    return interned([meta_of(each) for each in tensors])


def interned(metas: list[TensorMeta]) -> tuple[TensorMeta, ...]:
    """Return the descriptions as a tuple that nodes share, to save memory."""
    key = tuple(map(id, metas))
    known = _tuples.get(key)
    if known is None:
        known = tuple(metas)
        if len(_tuples) < _MOST_TUPLES:
            _tuples[key] = known
    return known


# Keyed by ids, since hashing a TensorMeta takes several times as long. The values keep the objects alive, so no id is
# reused.
_tuples: dict[tuple[int, ...], tuple[TensorMeta, ...]] = {(): ()}
_MOST_TUPLES = 1024


@lru_cache(1024)
def described(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[TensorMeta]:
    """Return a one-element tuple with a tensor's description. Equal tensors share the tuple."""
    return (TensorMeta(tuple(shape), str(dtype).removeprefix("torch."), str(device)),)


def _shape(tensor: Tensor) -> tuple[int, ...]:
    if type(tensor) is Parameter or (type(tensor) is Tensor and not tensor.is_nested):
        return tensor.shape
    try:
        sizes = () if is_uninitialized(tensor) else tuple(tensor.shape)
    except (RuntimeError, TypeError):
        return ()
    # The sizes of a nested tensor are not all integers. Reading a symbolic size as an integer would specialize it.
    return tuple([size if type(size) is int else -1 for size in sizes])
