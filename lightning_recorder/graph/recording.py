"""A recording of module calls and functions: what each of them adds to the graph."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_recorder.autograd import is_view, unwrapped, version_of
from lightning_recorder.graph.builder import GraphBuilder, meta_of, metas_of
from lightning_recorder.graph.caller import find_caller
from lightning_recorder.graph.functions import Versions, function_name, tensors_in, writes
from lightning_recorder.graph.model import Graph, TensorMeta
from lightning_recorder.graph.modules import ModelNames
from lightning_recorder.graph.origins import IGNORED, Call, TensorOrigins
from lightning_recorder.storage import is_uninitialized
from lightning_recorder.structure import iter_tensors

__all__ = ["Recording", "is_fused", "is_opaque"]

# In eval mode these compute everything in one fused function, unless a function mode is on: then they take another way,
# whose last bits, and rows of padding, differ. So the mode is taken off while one of them runs.
_FUSED = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)

_GRADIENT = cast(Any, Tensor.grad).__get__


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
        self._calls = [Call(self._builder.add("module", "", None), root)]
        self._origins = TensorOrigins(self._builder, self._calls)
        self._counts: dict[str, int] = {}
        self._failure: _Failure | int | None = None  # or the node of one that is there already
        self._stepped: dict[int, int] = {}
        self._describe(0, root)

    def name_modules(self, root: nn.Module) -> None:
        """Know the modules and tensors of the model by their names from now on."""
        self._origins.names = ModelNames(root)

    def stop(self) -> None:
        """Say of the last call what it gave, if it is one of the user's own."""
        self._origins.leave_custom()

    def forget(self) -> None:
        """Know nothing any more of the tensors and modules that were met."""
        self._origins.forget()

    def finish(self, scope: str) -> Graph:
        """The graph so far."""
        root = self._calls[0].module
        # A shared one counts once.
        parameters = {id(each): each for module in root.modules() for each in _own(module)}
        return self._builder.finish(scope, _parameters(parameters.values()))

    def note_inputs(self, inputs: Any, name: str) -> None:
        """Tensors that are fed to the model, each named by its path."""
        given: dict[int, Tensor] = {}
        for path, tensor in iter_tensors(inputs, name):
            # A tensor that is given twice, as tokens that are their own labels, is one input.
            if id(tensor) not in given:
                given[id(tensor)] = tensor
                self._origins.bind(tensor, self._builder.add("input", path, 0, (meta_of(tensor),)))

    def note_outputs(self, outputs: Any, name: str) -> None:
        """Tensors that the model has given back, each named by its path."""
        self._origins.leave_custom()
        for path, tensor in iter_tensors(outputs, name):
            origin = self._origins.of(tensor)
            self._origins.connect(origin, self._builder.add("output", path, 0, (meta_of(tensor),)), meta_of(tensor))

    # Calls of modules.

    def enter_call(self, module: nn.Module) -> None:
        """A module is called."""
        self._origins.leave_custom()
        self._failure = None
        caller = find_caller()
        names = self._origins.names
        name = None if names is None else names.of(module)
        if name is None and names is not None and not caller.trainer:
            name = names.of_stranger(module)
        if name is None:
            return
        self._counts[name] = self._counts.get(name, 0) + 1
        node = self._builder.add("module", name, self._calls[-1].node, source=caller.source)
        self._describe(node, module)
        self._builder.nodes[node].call = self._counts[name]
        self._calls.append(Call(node, module, time.perf_counter() if self._times else 0.0))

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
        self._origins.leave_custom()
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
        took = set(map(id, taken))
        passed = [tensor for tensor in given if id(tensor) in took]
        unseen = [tensor for tensor in given if id(tensor) not in took and self._origins.known(tensor) is None]
        if unseen:
            whole = is_opaque(module)
            used = list(module.parameters()) if whole else self._origins.behind(unseen)
            if whole:
                # No call of a submodule is seen that would own its part of them.
                self._builder.nodes[call].parameters = _parameters(used)
            taken = [*taken, *(tensor for tensor in used if id(tensor) not in took)]
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
                self._origins.of(tensor, settled=id(tensor) not in new and (differentiable or not is_view(tensor))),
                meta_of(tensor),
            )
            for tensor in inputs
        ]
        if (caller.trainer and not of_model) or (origins and all(origin == IGNORED for origin, _ in origins)):
            passed = origins[0][0] if origins else IGNORED
            self._origins.claim(outputs, IGNORED)
            for tensor in outputs:
                self._origins.bind(tensor, passed)
            return
        self._failure = None
        inside = self._origins.enter_custom(caller.custom, caller.source) if caller.custom is not None else None
        if inside is None:
            self._origins.leave_custom()
            # What assigns to an index gives nothing but what it wrote into.
            given = metas_of(outputs or written)
            node = self._builder.add("op", name, self._calls[-1].node, given, caller.source)
        else:
            node = inside.node
            inside.results += map(weakref.ref, outputs)
        for origin, meta in origins:
            # Inside a function of the user's its own results go nowhere, and what it was called with is known.
            if inside is None or (origin < node and not self._builder.is_connected(origin, node)):
                self._origins.connect(origin, node, meta)
        self._origins.claim([*outputs, *written], node)
        for tensor in outputs:
            self._origins.bind(tensor, node)
        for tensor in written:
            self._origins.bind(tensor, node, wrote=True)

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
                self._origins.bind(result, IGNORED)
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
        self._origins.leave_custom()
        node = self._builder.add("backward", "backward", 0, source=find_caller().source)
        for loss in tensors_in([losses]):
            self._origins.connect(self._origins.of(loss), node, meta_of(loss))
        return node

    def note_grad(self, before: Versions, result: Any) -> None:
        """A backward pass that the model asks for itself, whose gradients it goes on with."""
        self._origins.leave_custom()
        gradients = tensors_in([result])
        origins = [(self._origins.of(tensor), meta_of(tensor)) for tensor, _ in before]
        node = self._builder.add("backward", "grad", self._calls[-1].node, metas_of(gradients), find_caller().source)
        for origin, meta in origins:
            self._origins.connect(origin, node, meta)
        self._origins.claim(gradients, node)
        for tensor in gradients:
            self._origins.bind(tensor, node)

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """A step, behind the backward passes since the last one of the same optimiser that reach its parameters."""
        nodes = self._builder.nodes
        start = self._stepped.get(id(optimizer), 0)
        self._stepped[id(optimizer)] = len(nodes)
        passes = [number for number in range(start, len(nodes)) if nodes[number].kind == "backward"]
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        own = {known[1] for each in parameters if (known := self._origins.model_tensor(each)) is not None}
        before = self._builder.sources()
        reaching = [
            number
            for number in passes
            if any(
                nodes[each].kind == "parameter" and nodes[each].name in own
                for each in self._builder.reached_by_gradient(number, before)
            )
        ]
        node = self._builder.add("optimizer", type(optimizer).__name__, 0, source=find_caller().source)
        for number in reaching or passes[-1:]:
            self._builder.connect(number, node, None)

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
            self._failure = self._origins.enter_custom(caller.custom, caller.source).node
        else:
            origins = [(self._origins.of(tensor), meta_of(tensor)) for tensor, _ in before]
            self._failure = _Failure(function_name(func), origins, self._calls[-1].node, caller.source)

    def note_failed(self, calls: int | None = None) -> None:
        """Mark the innermost calls, or all of them, as failed, with the function that raised in them."""
        self._origins.leave_custom()
        failure, self._failure = self._failure, None
        if isinstance(failure, _Failure):
            node = self._builder.add("op", failure.name, failure.parent, source=failure.source)
            for origin, meta in failure.origins:
                self._origins.connect(origin, node, meta)
            failure = node
        if failure is not None:
            self._builder.nodes[failure].failed = True
        for call in self._calls[-calls:] if calls else self._calls:
            self._builder.nodes[call.node].failed = True


def _parameters(parameters: Iterable[Tensor]) -> int:
    """The number of elements, without parameters that have no shape yet."""
    return sum(parameter.numel() for parameter in parameters if not is_uninitialized(parameter))


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


def _is_inference(tensor: Tensor) -> bool:
    return not is_uninitialized(tensor) and tensor.is_inference()
