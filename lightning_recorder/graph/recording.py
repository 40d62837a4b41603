"""A recording of module calls and functions: what each of them adds to the graph."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_recorder.autograd import function_behind, is_view, sequence_number, unwrapped, version_of
from lightning_recorder.graph.builder import GraphBuilder, meta_of, metas_of
from lightning_recorder.graph.caller import CustomCall, find_caller
from lightning_recorder.graph.functions import function_name, tensors_in, writes
from lightning_recorder.graph.model import Graph, Kind, TensorMeta
from lightning_recorder.graph.modules import ModelNames
from lightning_recorder.graph.ownership import AutogradOwners
from lightning_recorder.graph.provenance import Provenance, is_lazy
from lightning_recorder.structure import iter_tensors

__all__ = ["Recording", "Versions", "is_fused", "is_opaque"]

# In eval mode these compute everything in one fused function, unless a function mode is on: then they take another way,
# whose last bits, and rows of padding, differ. So the mode is taken off while one of them runs.
_FUSED = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)

_GRADIENT = cast(Any, Tensor.grad).__get__

_IGNORED = -1
"""In place of a node's id: a tensor that is followed no further, such as a gradient on its way to the optimiser."""

Versions = list[tuple[Tensor, int | None]]
"""Tensors that a function takes, with the number of times that each was written to before."""


@dataclass
class _Call:
    """A module call that is going on."""

    node: int
    module: nn.Module | None
    start_s: float = 0.0


@dataclass
class _CustomNode:
    """A call of an ``autograd.Function`` that is going on, or was a moment ago: nobody tells when it ends."""

    node: int
    call: CustomCall
    results: list[weakref.ref[Tensor]] = field(default_factory=list)


@dataclass(frozen=True)
class _Failure:
    """A function that raised, of which nobody knows yet whether the model will go on."""

    name: str
    origins: list[tuple[int, TensorMeta]]
    parent: int
    source: str


class Recording:
    """The graph of what is told to it, in the order of time.

    It is told of each call of a module when it begins and when it ends, and of each function when it has been computed;
    it finds out which of them gave each tensor, and keeps none alive.

    Args:
        root: The model.
        times: Whether the time of each module's call is measured.
    """

    def __init__(self, root: nn.Module, *, times: bool = False) -> None:
        self._times = times
        self._builder = GraphBuilder()
        self._counts: dict[str, int] = {}
        self._names: ModelNames | None = None
        self._provenance = Provenance()
        self._owners = AutogradOwners()
        self._custom: _CustomNode | None = None
        self._customs: dict[int, int] = {}
        self._failure: _Failure | int | None = None  # or the node of one that is there already
        self._stepped: dict[int, int] = {}
        node = self._builder.add("module", "", None)
        self._describe(node, root)
        self._calls = [_Call(node, root)]

    def name_modules(self, root: nn.Module) -> None:
        """Know the modules and tensors of the model by their names from now on."""
        self._names = ModelNames(root)

    def forget(self) -> None:
        """Know nothing any more of the tensors and modules that were met."""
        self._custom = None
        self._provenance.clear()
        if self._names is not None:
            self._names.clear()

    def finish(self, scope: str, parameters: Iterable[Tensor]) -> Graph:
        """The graph so far."""
        return self._builder.finish(scope, _parameters(parameters))

    def note_inputs(self, inputs: Any, name: str) -> None:
        """Tensors that are fed to the model, each named by its path."""
        given: dict[int, Tensor] = {}
        for path, tensor in iter_tensors(inputs, name):
            # A tensor that is given twice, as tokens that are their own labels, is one input.
            if id(tensor) not in given:
                given[id(tensor)] = tensor
                self._provenance.bind(tensor, self._builder.add("input", path, 0, (meta_of(tensor),)))

    def note_outputs(self, outputs: Any, name: str) -> None:
        """Tensors that the model has given back, each named by its path."""
        self.leave_custom()
        for path, tensor in iter_tensors(outputs, name):
            origin = self._origin(tensor)
            self._connect(origin, self._builder.add("output", path, 0, (meta_of(tensor),)), meta_of(tensor))

    # Calls of modules.

    def enter_call(self, module: nn.Module) -> None:
        """A module is called."""
        self.leave_custom()
        self._failure = None
        caller = find_caller()
        name = None if self._names is None else self._names.of(module)
        if name is None and self._names is not None and not caller.trainer:
            name = self._names.of_stranger(module)
        if name is None:
            return
        self._counts[name] = self._counts.get(name, 0) + 1
        node = self._builder.add("module", name, self._calls[-1].node, source=caller.source)
        self._describe(node, module)
        self._builder.nodes[node].call = self._counts[name]
        self._calls.append(_Call(node, module, time.perf_counter() if self._times else 0.0))

    def _describe(self, node: int, module: nn.Module) -> None:
        draft = self._builder.nodes[node]
        draft.type_name = type(module).__name__
        draft.parameters = _parameters(_own(module))

    def leave_call(self, module: nn.Module, inputs: Any, output: Any, failed: bool) -> None:
        """The call of a module ends.

        Args:
            module: Of its calls that are going on the innermost is meant.
            inputs: Its arguments, and its keyword arguments where they are known.
            output: What it gave.
            failed: Whether it raised.
        """
        self.leave_custom()
        place = next((at for at in range(len(self._calls) - 1, 0, -1) if self._calls[at].module is module), None)
        if place is None:
            return
        call = self._calls[place]
        if failed:
            self.note_failed(len(self._calls) - place)
        # A call whose own hook never came, because a hook of the user raised before it, is left together with the one
        # around it.
        del self._calls[place + 1 :]
        given = tensors_in([output])
        draft = self._builder.nodes[call.node]
        if draft.type_name != type(module).__name__:
            # A lazy module has become another class, with parameters, since it was entered.
            self._describe(call.node, module)
        draft.outputs = metas_of(given)
        if self._times:
            draft.duration_ms = (time.perf_counter() - call.start_s) * 1e3
        empty = call.node == len(self._builder.nodes) - 1
        self._note_unseen(call.node, module, _arguments(inputs), given, empty=empty)
        self._calls.pop()

    def leave_opaque_root(self, inputs: Any, output: Any) -> None:
        """The model itself was called, and has computed all where nobody looks."""
        root = self._calls[0]
        if root.module is not None:
            self._note_unseen(root.node, root.module, _arguments(inputs), tensors_in([output]))

    def _note_unseen(
        self, call: int, module: nn.Module, taken: list[Tensor], given: list[Tensor], *, empty: bool = False
    ) -> None:
        """A node for what a call gave unseen: computed by a fused function, by TorchScript, outside of torch."""
        passed = [tensor for tensor in given if _is_among(tensor, taken)]
        unseen = [tensor for tensor in given if not _is_among(tensor, taken) and self._known(tensor) is None]
        if unseen:
            whole = is_opaque(module)
            used = list(module.parameters()) if whole else self._owners.sources(unseen)[0]
            if whole:
                # No call of a submodule is seen that would own its part of them.
                self._builder.nodes[call].parameters = _parameters(used)
            taken = [*taken, *(tensor for tensor in used if not _is_among(tensor, taken))]
            self._note("fused" if is_fused(module) else "unseen", taken, unseen, (), of_model=True)
        elif empty and passed:
            self._note("identity", passed, passed, (), of_model=True)

    def _note(
        self,
        name: str,
        inputs: list[Tensor],
        outputs: list[Tensor],
        written: tuple[Tensor, ...],
        *,
        of_model: bool = False,
    ) -> None:
        """A node for one operation with the edges into it, and its outputs bound to it."""
        caller = find_caller()
        # What is written to has got a new part of the backward graph by now, which is not its origin's. And a view that
        # takes no part in it is not looked at: it would be told anew how it came to be, out of its turn.
        differentiable = any(unwrapped(tensor).requires_grad for tensor in (*outputs, *written))
        new = set(map(id, written))
        origins = [
            (
                self._origin(tensor, settled=id(tensor) not in new and (differentiable or not is_view(tensor))),
                meta_of(tensor),
            )
            for tensor in inputs
        ]
        if (caller.trainer and not of_model) or (origins and all(origin == _IGNORED for origin, _ in origins)):
            passed = origins[0][0] if origins else _IGNORED
            self._owners.claim(outputs, _IGNORED)
            for tensor in outputs:
                self._provenance.bind(tensor, passed)
            return
        self._failure = None
        inside = self._enter_custom(caller.custom, caller.source) if caller.custom is not None else None
        if inside is None:
            self.leave_custom()
            # What assigns to an index gives nothing but what it wrote into.
            given = metas_of(outputs or written)
            node = self._builder.add("op", name, self._calls[-1].node, given, caller.source)
        else:
            node = inside.node
            inside.results += map(weakref.ref, outputs)
        for origin, meta in origins:
            # Inside a function of the user's its own results go nowhere, and what it was called with is known.
            if inside is None or (origin < node and not self._builder.is_connected(origin, node)):
                self._connect(origin, node, meta)
        self._claim([*outputs, *written], node)
        for tensor in outputs:
            self._provenance.bind(tensor, node)
        for tensor in written:
            self._provenance.bind(tensor, node, wrote=True)

    def _claim(self, tensors: Iterable[Tensor], node: int) -> None:
        """Give a node what torch's backward graph has got behind some tensors."""
        names = self._owners.claim(tensors, node)
        if node >= 0:
            self._builder.nodes[node].autograd += names

    def _sources(self, tensors: Iterable[Tensor]) -> list[tuple[int, TensorMeta | None]]:
        """What went into tensors whose computing nobody saw, as torch's backward graph tells it."""
        leaves, owners = self._owners.sources(tensors)
        found = [(self._origin(leaf), meta_of(leaf)) for leaf in leaves]
        # Which of its results went there is not known.
        return [*((owner, next(iter(self._builder.nodes[owner].outputs), None)) for owner in owners), *found]

    def note_function(self, func: Any, before: Versions, result: Any, inplace: bool) -> None:
        """A function of torch was computed.

        Args:
            func: The function.
            before: What it took.
            result: What it gave.
            inplace: Whether it was told to write into its first argument.
        """
        if func == _GRADIENT:
            if result is not None:
                self._provenance.bind(result, _IGNORED)
            return
        inputs = [tensor for tensor, _ in before]
        outputs = tensors_in([result])
        written = tuple(tensor for tensor, version in before if version_of(tensor) != version)
        if not written and inputs and _is_inference(inputs[0]) and (inplace or writes(func)):
            # Tensors of inference mode do not count how often they are written to.
            written = (inputs[0],)
        # What gives no new tensor and writes into none is no part of the computation: asking for a shape, or
        # ``contiguous`` and ``to`` of what is so already, which give back the tensor that they took.
        old = set(map(id, inputs)) - set(map(id, written))
        outputs = [tensor for tensor in outputs if id(tensor) not in old]
        if outputs or written:
            self._note(function_name(func), inputs, outputs, written)

    def note_backward(self, losses: Any) -> int:
        """A backward pass begins; the answer is its node."""
        self.leave_custom()
        node = self._builder.add("backward", "backward", 0, source=find_caller().source)
        for loss in tensors_in([losses]):
            self._connect(self._origin(loss), node, meta_of(loss))
        return node

    def note_grad(self, before: Versions, result: Any) -> None:
        """A backward pass that the model asks for itself, whose gradients it goes on with."""
        self.leave_custom()
        gradients = tensors_in([result])
        origins = [(self._origin(tensor), meta_of(tensor)) for tensor, _ in before]
        node = self._builder.add("backward", "grad", self._calls[-1].node, metas_of(gradients), find_caller().source)
        for origin, meta in origins:
            self._connect(origin, node, meta)
        self._claim(gradients, node)
        for tensor in gradients:
            self._provenance.bind(tensor, node)

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """A step, behind the backward passes since the last one of the same optimiser that reach its parameters."""
        nodes = self._builder.nodes
        start = self._stepped.get(id(optimizer), 0)
        self._stepped[id(optimizer)] = len(nodes)
        passes = [number for number in range(start, len(nodes)) if nodes[number].kind == "backward"]
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        own = {known[1] for each in parameters if (known := self._model_tensor(each)) is not None}
        reaching = [
            number
            for number in passes
            if any(
                nodes[each].kind == "parameter" and nodes[each].name in own
                for each in self._builder.reached_by_gradient(number)
            )
        ]
        node = self._builder.add("optimizer", type(optimizer).__name__, 0, source=find_caller().source)
        for number in reaching or passes[-1:]:
            self._builder.connect(number, node, None)

    # Calls of an ``autograd.Function``, of which only what happens inside is seen.

    def _enter_custom(self, call: CustomCall, source: str) -> _CustomNode:
        """The node of the call in which a function was called, which may be a new one."""
        last = self._custom
        if last is not None and last.call.frame == call.frame and not call.new:
            return last
        self.leave_custom()
        given = tensors_in([call.arguments])
        origins = [(self._origin(tensor), meta_of(tensor)) for tensor in given]
        node = self._builder.add("op", call.function.__name__, self._calls[-1].node, source=source)
        for origin, meta in origins:
            self._connect(origin, node, meta)
        self._custom = _CustomNode(node, replace(call, arguments=None))
        # Each of the nested calls has made a node of the backward graph before anything else.
        self._customs[sequence_number() - call.depth + 1] = node
        return self._custom

    def leave_custom(self) -> None:
        """Say of the last such call what it gave, now that something outside of it happens."""
        left, self._custom = self._custom, None
        if left is None:
            return
        alive = _distinct(tensor for reference in left.results if (tensor := reference()) is not None)
        given = [tensor for tensor in alive if function_behind(tensor) is left.call.function] or alive[-1:]
        if given:
            self._builder.nodes[left.node].outputs = metas_of(given)
        self._claim(given, left.node)

    # Where tensors come from.

    def _connect(self, source: int, target: int, meta: TensorMeta | None) -> None:
        if source == _IGNORED:
            return
        draft = self._builder.nodes[source]
        if meta is not None and not draft.outputs:
            # A call of the user's own whose results were not seen inside it, or not as what comes out of a transform.
            draft.outputs = (meta,)
        self._builder.connect(source, target, meta)

    def _origin(self, tensor: Tensor, *, settled: bool = True) -> int:
        """The node that gave the tensor its values.

        Args:
            tensor: What is taken.
            settled: Whether all of torch's backward graph behind the tensor is there because of this node.
        """
        known = self._known(tensor)
        if known is None:
            known = self._owners.of(tensor)
            if known is not None:
                self._add_result(tensor, known)
            else:
                known = self._add_unseen(tensor) if self._owners.is_new(tensor) else self._add_from_outside(tensor)
        elif settled and self._owners.is_new(tensor):
            # Made after the function was seen: around a call of the user's own, by a checkpoint, by a look at a view.
            self._claim([tensor], known)
        return known

    def _known(self, tensor: Tensor) -> int | None:
        """The node that gave the tensor its present values, as far as was seen."""
        if is_lazy(tensor):
            # It has neither a shape nor values yet; what is done to it is its making.
            return _IGNORED
        return self._provenance.of(tensor, own=self._model_tensor(tensor) is not None)

    def _add_unseen(self, tensor: Tensor) -> int:
        """A node for what computed a tensor where nobody looks, as its part of the backward graph tells it."""
        function = function_behind(tensor)
        if function is not None and (known := self._customs.get(self._owners.number(tensor) + 1)) is not None:
            # Of this one something was seen inside, which is not what it gave.
            self._claim([tensor], known)
            self._add_result(tensor, known)
            return known
        name = function.__name__ if function is not None else "unseen"
        sources = self._sources([tensor])
        node = self._builder.add("op", name, self._calls[-1].node, (meta_of(tensor),))
        for source, meta in sources:
            self._connect(source, node, meta)
        self._claim([tensor], node)
        self._provenance.bind(tensor, node)
        return node

    def _add_result(self, tensor: Tensor, node: int) -> None:
        """Say that a node gave a tensor, too, which was not seen when it did."""
        if self._custom is not None and self._custom.node == node:
            self._custom.results.append(weakref.ref(tensor))
        elif node != _IGNORED:
            self._builder.nodes[node].outputs += (meta_of(tensor),)
        self._provenance.bind(tensor, node)

    def _add_from_outside(self, tensor: Tensor) -> int:
        kind, name, owner = self._model_tensor(tensor) or ("tensor", "", None)
        around = (call.node for call in reversed(self._calls) if id(call.module) == owner)
        parent = next(around, self._calls[-1].node)
        node = self._builder.add(kind, name, parent, (meta_of(tensor),))
        self._provenance.bind(tensor, node)
        return node

    def _model_tensor(self, tensor: Tensor) -> tuple[Kind, str, int] | None:
        return None if self._names is None else self._names.tensor(tensor)

    # When the model raises.

    def backward_failed(self, node: int | None) -> None:
        """The backward pass of a node raised."""
        self._failure = node

    def suspect(self, func: Any, before: Versions) -> None:
        """Remember a function that raised, until it is known whether the model lives with that."""
        caller = find_caller()
        if caller.trainer:
            return
        if caller.custom is not None:
            self._failure = self._enter_custom(caller.custom, caller.source).node
        else:
            origins = [(self._origin(tensor), meta_of(tensor)) for tensor, _ in before]
            self._failure = _Failure(function_name(func), origins, self._calls[-1].node, caller.source)

    def note_failed(self, calls: int | None = None) -> None:
        """Mark the innermost calls, or all of them, as failed, with the function that raised in them."""
        self.leave_custom()
        failure, self._failure = self._failure, None
        if isinstance(failure, _Failure):
            node = self._builder.add("op", failure.name, failure.parent, source=failure.source)
            for origin, meta in failure.origins:
                self._connect(origin, node, meta)
            failure = node
        if failure is not None:
            self._builder.nodes[failure].failed = True
        for call in self._calls[-calls:] if calls else self._calls:
            self._builder.nodes[call.node].failed = True


def _parameters(parameters: Iterable[Tensor]) -> int:
    """The number of elements, without parameters that have no shape yet."""
    return sum(parameter.numel() for parameter in parameters if not is_lazy(parameter))


def _own(module: nn.Module) -> Iterable[Tensor]:
    """The module's own parameters, whatever its class has made of ``parameters``."""
    if isinstance(module, torch.jit.ScriptModule):
        return module.parameters(recurse=False)
    return [parameter for parameter in module._parameters.values() if parameter is not None]


def is_fused(module: nn.Module) -> bool:
    """Whether a module may compute everything in one fused function."""
    return isinstance(module, _FUSED) and not module.training


def is_opaque(module: nn.Module) -> bool:
    """Whether what a module computes inside is not seen at all."""
    return is_fused(module) or isinstance(module, torch.jit.ScriptModule)


def _arguments(inputs: Any) -> list[Tensor]:
    """The tensors among positional and keyword arguments."""
    return tensors_in(part for each in inputs for part in (each.values() if isinstance(each, dict) else each))


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _is_among(tensor: Tensor, others: Iterable[Tensor]) -> bool:
    return any(tensor is other for other in others)


def _is_inference(tensor: Tensor) -> bool:
    return not is_lazy(tensor) and tensor.is_inference()
