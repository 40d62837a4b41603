"""The node that returned each tensor of a recording."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn
from torch.autograd.graph import Node as AutogradNode
from torch.nn import Parameter

from lightning_recorder.graph.capture.builder import REENTRANT, GraphBuilder, meta_of, metas_of
from lightning_recorder.graph.capture.function_calls import CustomCall, tensors_in
from lightning_recorder.graph.capture.known_tensors import KnownTensor, KnownTensors
from lightning_recorder.graph.capture.modules import ModelNames
from lightning_recorder.graph.capture.ownership import AutogradOwners
from lightning_recorder.graph.model import Kind, TensorMeta
from lightning_recorder.internals.autograd import function_behind, in_transform, is_view, sequence_number, unwrapped
from lightning_recorder.internals.storage import is_uninitialized

__all__ = ["IGNORED", "Call", "CustomNode", "TensorOrigins"]

IGNORED = -1
"""The node id of tensors that are not tracked, such as a gradient passed to the optimizer."""

_MOST_STEPS_BACK = 16  # maximum number of autograd nodes between a tensor and its parameters, such as a cast


@dataclass(frozen=True, slots=True)
class PassedTensor:
    """An input that a module call returned unchanged, as a dropout in eval mode does."""

    node: int  # the ``identity`` node inside the call
    before: KnownTensor  # the entry of the tensor before the call


@dataclass(slots=True)
class Call:
    """A module call in progress."""

    node: int
    module: nn.Module
    start_s: float = 0.0
    inputs: tuple[TensorMeta, ...] | None = None
    """The tensors in the arguments before the call. Only set if the call may change containers in its arguments."""
    passed: list[PassedTensor] = field(default_factory=list)
    """The tensors that inner calls returned unchanged."""


@dataclass
class CustomNode:
    """A call of an ``autograd.Function`` that is in progress or has just ended. The end of a call is not observable."""

    node: int
    call: CustomCall
    results: list[weakref.ref[Tensor]] = field(default_factory=list)


class TensorOrigins:
    """Finds the node that returned a tensor, and adds a node for an unknown tensor.

    A tensor is identified by its object, by its memory, by its ``grad_fn``, or as a parameter or buffer of the model.
    This class also tracks the results of custom ``autograd.Function`` calls. Only functions inside these calls can be
    observed, not the calls themselves.
    """

    def __init__(self, builder: GraphBuilder, calls: list[Call]) -> None:
        self._builder = builder
        self._calls = calls
        self.known_tensors = KnownTensors()
        self.owners = AutogradOwners()
        self.custom: CustomNode | None = None
        """The last custom call, until an event outside of the call is recorded."""
        self._customs: dict[int, int] = {}
        self._custom_nodes: set[int] = set()
        self._buffers: dict[int, int] = {}
        """The nodes of the model's buffers, by the id of the tensor."""
        self.names: ModelNames | None = None
        self.bind = self.known_tensors.bind
        self.is_bound = self.known_tensors.is_bound

    def forget(self) -> None:
        """Forget all tensors and modules."""
        self.custom = None
        self.known_tensors.clear()
        self.names = None

    def is_known(self, tensor: Tensor) -> bool:
        """Return True if the node that computed a tensor's values was observed."""
        return self.is_bound(tensor) or self.known(tensor) is not None

    def is_input(self, tensor: Tensor) -> bool:
        """Return True if a tensor is an input of the model and has not been written to since the recording began."""
        node = self.known_tensors.of(tensor)
        return node is not None and node >= 0 and self._builder.nodes[node].kind == "input"

    def of_inputs(
        self, tensors: list[Tensor], written: tuple[Tensor, ...], outputs: list[Tensor], start: int
    ) -> tuple[list[int], list[TensorMeta], list[int]]:
        """Return three lists about the inputs of a function: their source nodes, shapes, and output indices.

        The source node of a tensor computed its values. The output index is the index of the tensor among the outputs
        of this node. ``start`` is the sequence number of the backward graph before the function ran.
        """
        complete = self.owners.complete_until == start
        nodes: list[int] = []
        metas: list[TensorMeta] = []
        places: list[int] = []
        new: set[int] | None = None
        differentiable = False
        find = self.known_tensors.find
        for tensor in tensors:
            known = find(tensor) if complete else None
            if known is not None:
                nodes.append(known.node)
                metas.append(known.meta)
                places.append(known.output)
                continue
            if complete and type(tensor) is Parameter and (node := self.first_use(tensor)) is not None:
                nodes.append(node)
                metas += self._builder.nodes[node].outputs
                places.append(0)
                continue
            if new is None:
                # The grad_fn of a tensor that was written to is new and does not belong to the tensor's source. The
                # grad_fn of a view outside of the backward graph is not read: reading it would make torch regenerate it
                # out of order.
                new = set(map(id, written))
                differentiable = any(unwrapped(each).requires_grad for each in (*outputs, *written))
            settled = id(tensor) not in new and (differentiable or not is_view(tensor))
            nodes.append(self.of(tensor, settled=settled))
            metas.append(meta_of(tensor))
            places.append(self.known_tensors.output(tensor))
        return nodes, metas, places

    def connect_inputs(
        self, node: int, sources: list[int], metas: list[TensorMeta], inputs: list[Tensor], places: list[int]
    ) -> bool:
        """Add the incoming edges of a function. Return True if an input requires a gradient."""
        if in_transform():
            inputs = [unwrapped(each) if not each.requires_grad else each for each in inputs]
        passing = [each.requires_grad for each in inputs]
        self._builder.connect_all(node, sources, metas, passing)
        if any(places):
            self._builder.note_outputs(node, sources, places)
        for source, each in zip(sources, inputs, strict=True):
            if type(each) is Parameter and source >= 0 and self._builder.nodes[source].kind != "parameter":
                own = self.model_tensor(each)
                if own is not None:
                    self._builder.written.setdefault(own[1], []).append(node)
        return True in passing

    def connect_inside(
        self, node: int, sources: list[int], metas: list[TensorMeta], inputs: list[Tensor], places: list[int]
    ) -> bool:
        """Add edges into a custom call for the inputs of a function inside the call; see :meth:`connect_inputs`."""
        # Skip the results of the custom call itself, and its arguments, which are connected already.
        kept = [
            (source, meta, tensor, place)
            for source, meta, tensor, place in zip(sources, metas, inputs, places, strict=True)
            if source < node and not self._builder.is_connected(source, node)
        ]
        nodes = self._builder.nodes
        # If a source is in a module and not an argument of the custom call, the custom call has called this module.
        for source, *_ in kept:
            before = nodes[source]
            if before.kind == "op" and not before.autograd and before.parent != nodes[node].parent:
                self._builder.compound.add(node)
        columns = [list(each) for each in zip(*kept, strict=True)] or [[], [], [], []]
        return self.connect_inputs(node, *columns)

    def behind(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return the leaf tensors of the unobserved part of the tensors' backward graph."""
        return self.owners.sources(tensors)[0]

    def passed(self, tensors: Iterable[Tensor], node: int) -> list[PassedTensor]:
        """Return the entries of tensors that an ``identity`` node is about to return unchanged.

        ``node`` is the id that the ``identity`` node will have. Tensors without an entry are left out.
        """
        known = map(self.known_tensors.entry, tensors)
        return [PassedTensor(node, each) for each in known if each is not None]

    def leave_passed(self, call: Call, around: Call, outputs: Iterable[Tensor]) -> None:
        """At the end of a call, restore the source nodes of tensors that inner calls returned unchanged.

        Tensors that the call itself returns are not restored. After the call, the restored tensors have the same source
        nodes as before the call. For example, three projections take the same input, and the first projection begins
        with a dropout. The other two projections must not seem to take the result of this dropout.
        """
        returned = set(map(id, outputs))
        for each in reversed(call.passed):
            tensor = each.before()
            if tensor is None:
                continue
            if id(tensor) in returned:
                around.passed.append(each)
            elif self.known_tensors.of(tensor) == each.node:  # otherwise the tensor was written to since
                self.known_tensors.restore(tensor, each.before)

    def enter_custom(self, call: CustomCall, source: str) -> CustomNode:
        """Return the node of the custom call around a function; add the node if the custom call is new."""
        last = self.custom
        if last is not None and last.call.frame == call.frame and not call.new:
            return last
        self.leave_custom()
        given = tensors_in([call.arguments])
        origins = self.of_each(given)
        node = self._builder.add("op", call.function.__name__, self._calls[-1].node, source=source)
        for origin, meta, place in origins:
            self.connect(origin, node, meta, output=place)
        if not call.new:
            # A module call inside the custom call has returned. The nodes of this module call are recorded as usual.
            self._builder.compound.add(node)
        self.custom = CustomNode(node, replace(call, arguments=None))
        # A custom call first creates its backward node, so the latest sequence numbers belong to nested custom calls.
        self._customs[sequence_number() - call.depth + 1] = node
        self._custom_nodes.add(node)
        return self.custom

    def leave_custom(self) -> None:
        """Record the outputs of the last custom call. Called when an event outside of the custom call is recorded."""
        left, self.custom = self.custom, None
        if left is None:
            return
        alive = _distinct(tensor for reference in left.results if (tensor := reference()) is not None)
        given = [tensor for tensor in alive if function_behind(tensor) is left.call.function] or alive[-1:]
        if given:
            self._builder.nodes[left.node].outputs = metas_of(given)
            for place, tensor in enumerate(given):
                self.known_tensors.move(tensor, place)
        self.claim(given, left.node)

    def of_each(self, tensors: Iterable[Tensor]) -> list[tuple[int, TensorMeta, int]]:
        """Return the source node, shape, and output index of each tensor; see :meth:`of_inputs`."""
        return [(self.of(each), meta_of(each), self.known_tensors.output(each)) for each in tensors]

    def connect(
        self, source: int, target: int, meta: TensorMeta | None, *, differentiable: bool = True, output: int = 0
    ) -> None:
        """Add an edge for a tensor if its source is tracked. ``output`` is its index among the source's outputs."""
        if source == IGNORED:
            return
        if meta is not None and not self._builder.nodes[source].outputs:
            # The outputs of this custom call were not observed, or were observed before a transform wrapped them.
            self._builder.nodes[source].outputs = (meta,)
        self._builder.connect(source, target, meta, differentiable, output)

    def of(self, tensor: Tensor, *, settled: bool = True) -> int:
        """Return the node that computed the tensor's values. Add a node if there is none.

        ``settled`` is True if the current ``grad_fn`` of the tensor belongs to this node.
        """
        known = self.known(tensor)
        if known is None:
            known = self.owners.of(tensor)
            if known is not None:
                self._add_result(tensor, known)
            else:
                inner = unwrapped(tensor)
                own = self.model_tensor(inner)
                if self.owners.is_new(tensor):
                    known = self._add_unseen(tensor)
                else:  # a parameter may be wrapped as the argument of a transform
                    known = self._add_from_outside(tensor if own is None else inner, own)
        elif settled and self.owners.is_new(tensor):
            # The grad_fn was created after the function was observed: by an enclosing custom call, by a checkpoint, or
            # when a view was used.
            function = function_behind(tensor)
            if function is not None and self._is_result_of_layer(known, function):
                return self._add_custom_result(tensor, known, function)
            self.claim([tensor], known)
        return known

    def _is_result_of_layer(self, node: int, function: type) -> bool:
        """Return True if a custom function returns the output of a layer that it called, as in a reversible network."""
        if node < 0 or f"{function.__name__}Backward" == REENTRANT:
            return False
        draft = self._builder.nodes[node]
        return draft.kind == "op" and not draft.autograd and node not in self._custom_nodes

    def _add_custom_result(self, tensor: Tensor, inner: int, function: type) -> int:
        """Return the node of a custom function that returned a tensor computed by a layer inside of it."""
        node = self._customs.get(self.owners.number(tensor) + 1)
        if node is None:
            sources = self._sources([tensor])
            node = self._builder.add("op", function.__name__, self._calls[-1].node, (meta_of(tensor),))
            for source, meta in sources:
                self.connect(source, node, meta)
        if inner < node:
            self.connect(inner, node, meta_of(tensor), differentiable=False)
        self._builder.compound.add(node)
        self.claim([tensor], node)
        self.known_tensors.bind(tensor, node)
        return node

    def known(self, tensor: Tensor) -> int | None:
        """Return the node that last computed the tensor's values, or None if it was not observed."""
        if is_uninitialized(tensor):
            # An uninitialized tensor has neither shape nor values; its initialization is not recorded.
            return IGNORED
        own = self.model_tensor(tensor)
        node = self.known_tensors.of(tensor, own=own is not None)
        if own is not None and node is not None and (buffer := self._buffers.get(id(tensor), node)) != node:
            # Running statistics that an earlier call of the module has updated are state, not data flow: return the
            # node of the buffer, unless the module is still being called.
            return node if self._is_inside(node, own[2]) else buffer
        return node

    def _is_inside(self, node: int, owner: int) -> bool:
        """Return True if a node is inside a call in progress of the module with the id ``owner``, or of the root."""
        call = next((each.node for each in reversed(self._calls) if id(each.module) == owner), 0)
        around: int | None = node
        while around is not None and around != call:
            around = self._builder.nodes[around].parent
        return around == call

    def _add_unseen(self, tensor: Tensor) -> int:
        """Add a node for the unobserved computation of a tensor, based on torch's backward graph."""
        function = function_behind(tensor)
        if function is not None and (known := self._customs.get(self.owners.number(tensor) + 1)) is not None:
            # Functions inside this custom call were observed, but not the one that computed this output.
            self.claim([tensor], known)
            self._add_result(tensor, known)
            return known
        name = function.__name__ if function is not None else "unseen"
        sources = self._sources([tensor])
        node = self._builder.add("op", name, self._calls[-1].node, (meta_of(tensor),))
        for source, meta in sources:
            self.connect(source, node, meta)
        self.claim([tensor], node)
        self.known_tensors.bind(tensor, node)
        return node

    def _add_result(self, tensor: Tensor, node: int) -> None:
        """Add a tensor to the outputs of a node that was recorded without it."""
        place = 0
        if self.custom is not None and self.custom.node == node:
            self.custom.results.append(weakref.ref(tensor))
        elif node != IGNORED:
            place = len(self._builder.nodes[node].outputs)
            self._builder.nodes[node].outputs += (meta_of(tensor),)
        self.known_tensors.bind(tensor, node, output=place)

    def first_use(self, parameter: Parameter) -> int | None:
        """Add the node of a model parameter at its first use and return its id. Return ``None`` for other tensors."""
        if parameter.grad_fn is not None or self.names is None or self.is_bound(parameter):
            return None
        own = self.names.tensor(parameter)
        return None if own is None else self._add_from_outside(parameter, own)

    def _add_from_outside(self, tensor: Tensor, own: tuple[Kind, str, int] | None) -> int:
        kind, name, owner = own or ("tensor", "", None)
        call = self._calls[-1]
        others = () if owner is None or self.names is None else self.names.aliases(tensor)
        parent = call.node if owner is None or id(call.module) == owner else self._owning_call((name, *others), owner)
        metas = metas_of([tensor])
        node = self._builder.add(kind, name, parent, metas)
        if kind == "buffer":
            self._buffers[id(tensor)] = node
        self._builder.nodes[node].tied = others
        if owner is None and self._is_made_of_others(tensor):
            self._builder.nodes[node].note = "made of a parameter that is not registered"
        self.known_tensors.bind(tensor, node, meta=metas[0])
        return node

    def _is_made_of_others(self, tensor: Tensor) -> bool:
        """Return True if a tensor was computed before the step from leaf tensors that do not belong to the model."""
        todo = [tensor.grad_fn] if self.names is not None else []
        leaves = []
        for node in todo:
            leaf = getattr(node, "variable", None)  # only the node of a leaf tensor has it
            leaves += [] if leaf is None else [leaf]
            todo += [before for before, _ in node.next_functions if before is not None] if node is not None else []
            if len(todo) > _MOST_STEPS_BACK:
                return False
        return bool(leaves) and all(self.model_tensor(leaf) is None for leaf in leaves)

    def _owning_call(self, names: Sequence[str], owner: int) -> int:
        """Return the innermost call in progress of a module that owns a tensor or contains an owner.

        The owner itself may not be called: a ``ParameterList`` is never called, and a layer is not called if only its
        weight is used.
        """
        for call in reversed(self._calls):
            if id(call.module) == owner:
                return call.node
            called = self._builder.nodes[call.node].name
            if not called or any(name.startswith(f"{called}.") for name in names):
                return call.node
        return self._calls[-1].node

    def model_tensor(self, tensor: Tensor) -> tuple[Kind, str, int] | None:
        """Return the kind of a parameter or buffer, its name, and the id of the module that owns it."""
        return None if self.names is None else self.names.tensor(tensor)

    def claim(self, tensors: Sequence[Tensor], node: int, start: int | None = None) -> None:
        """Assign new autograd nodes behind the tensors to a recorded node.

        For the results of a function, ``start`` is the sequence number of the backward graph before the function ran.
        """
        owners = self.owners
        names = owners.claim(tensors, node) if start is None else owners.claim_new(tensors, node, start)
        if names and node >= 0:
            draft = self._builder.nodes[node]
            draft.autograd = draft.autograd + names if draft.autograd else names

    def autograd_nodes(self, tensors: Iterable[Tensor], node: int) -> Iterator[AutogradNode]:
        """Yield the autograd nodes behind the tensors that were assigned to a recorded node."""
        return self.owners.owned(tensors, node)

    def _sources(self, tensors: Iterable[Tensor]) -> list[tuple[int, TensorMeta | None]]:
        """Return the inputs of the unobserved computation of the tensors, based on torch's backward graph."""
        leaves, owners = self.owners.sources(tensors)
        found = [(self.of(leaf), meta_of(leaf)) for leaf in leaves]
        # It is unknown which output of an owner was used. Assume the first.
        return [*((owner, next(iter(self._builder.nodes[owner].outputs), None)) for owner in owners), *found]


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())
