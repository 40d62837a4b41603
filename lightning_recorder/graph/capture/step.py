"""The nodes and edges that module calls and torch functions add to a graph."""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_recorder.graph.capture.builder import GraphBuilder, meta_of, metas_of
from lightning_recorder.graph.capture.function_calls import Versions, find_caller, function_name, tensors_in, writes
from lightning_recorder.graph.capture.modules import ModelNames
from lightning_recorder.graph.capture.origins import IGNORED, Call, TensorOrigins
from lightning_recorder.graph.capture.parameters import ParameterCounts, count, count_below, note_used, own_parameters
from lightning_recorder.graph.capture.scopes import Scopes
from lightning_recorder.graph.model import Graph, TensorMeta
from lightning_recorder.internals.autograd import is_view, unwrapped, version_of
from lightning_recorder.internals.storage import is_uninitialized
from lightning_recorder.structure import iter_tensors

__all__ = ["StepRecording", "is_fused", "is_opaque"]

# In eval mode these modules compute everything in one fused function, unless a function mode is active. Then they take
# another path, whose results differ in the last bits and in padded rows. So the mode is removed while one of them runs.
_FUSED = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)

_GRADIENT = cast(Any, Tensor.grad).__get__


@dataclass(frozen=True)
class _Failure:
    """A function that raised, while it is unknown whether the model handles the error."""

    name: str
    origins: list[tuple[int, TensorMeta]]
    parent: int
    source: str


class StepRecording:
    """Builds a graph from notifications, in the order of time.

    The recording is notified at the beginning and end of each module call, and after each function. It finds the node
    that returned each tensor, without keeping any tensor alive.

    Args:
        root: The model.
        times: Measure the time of each module call.
    """

    def __init__(self, root: nn.Module, *, times: bool = False) -> None:
        self._times = times
        self._builder = GraphBuilder()
        self._calls = [Call(self._builder.add("module", "", None), root)]
        self._origins = TensorOrigins(self._builder, self._calls)
        self._counts: dict[str, int] = {}
        self._failure: _Failure | int | None = None  # an int is the id of an existing node
        self._stepped: dict[int, int] = {}
        self._counts_below = ParameterCounts()
        self._unobserved: set[int] = set()
        """The calls in which a computation was not observed, so that the parameters that it used are unknown."""
        self._describe(0, root)

    def name_modules(self, root: nn.Module) -> None:
        """Use the names of the model's modules and tensors from now on."""
        self._origins.names = ModelNames(root)

    def stop(self) -> None:
        """Record the outputs of the last custom ``autograd.Function``, if one is in progress."""
        self._origins.leave_custom()

    def forget(self) -> None:
        """Forget all tensors and modules."""
        self._origins.forget()

    def finish(self, scope: str) -> Graph:
        """Return the graph recorded so far."""
        root = self._calls[0].module
        # A shared parameter counts once.
        for call in self._calls:
            self._builder.nodes[call.node].total_parameters = self._counts_below.of(call.module)
        note_used(self._builder.nodes, self._builder.ends, self._unobserved)
        scopes = Scopes(self._builder.nodes, self._builder.ends, scope).named()
        return self._builder.finish(scope, count_below(root), scopes)

    def note_inputs(self, inputs: Any, name: str) -> None:
        """Add an input node for each tensor that the model takes, named by its path."""
        given: dict[int, Tensor] = {}
        for path, tensor in iter_tensors(inputs, name):
            # A tensor that is passed twice is one input, for example tokens that are also the labels.
            if id(tensor) not in given:
                given[id(tensor)] = tensor
                self._origins.bind(tensor, self._builder.add("input", path, 0, (meta_of(tensor),)))

    def note_outputs(self, outputs: Any, name: str) -> None:
        """Add an output node for each tensor that the model returned, named by its path."""
        self._origins.leave_custom()
        for path, tensor in iter_tensors(outputs, name):
            origin = self._origins.of(tensor)
            self._origins.connect(origin, self._builder.add("output", path, 0, (meta_of(tensor),)), meta_of(tensor))

    # Module calls.

    def enter_call(self, module: nn.Module) -> None:
        """Record the beginning of a module call."""
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
        draft.parameters = count(own_parameters(module))

    def leave_call(self, module: nn.Module, inputs: Any, output: Any, failed: bool) -> None:
        """Record the end of a module call.

        Args:
            module: The module. If several of its calls are in progress, the innermost one ends.
            inputs: Its arguments, and its keyword arguments if they are known.
            output: The return value of the call.
            failed: True if the call raised.
        """
        self._origins.leave_custom()
        place = next((at for at in range(len(self._calls) - 1, 0, -1) if self._calls[at].module is module), None)
        if place is None:
            return
        call = self._calls[place]
        if failed:
            self.note_failed(len(self._calls) - place)
        # If a hook of the user raised, the hook that ends an inner call never ran; that call ends with the one around
        # it.
        del self._calls[place + 1 :]
        given = tensors_in([output])
        draft = self._builder.nodes[call.node]
        if draft.type_name != type(module).__name__:
            # A lazy module has changed its class and created its parameters during the call.
            self._describe(call.node, module)
        draft.total_parameters = self._counts_below.of(module)
        draft.outputs = metas_of(given)
        if self._times:
            draft.duration_ms = (time.perf_counter() - call.start_s) * 1e3
        empty = call.node == len(self._builder.nodes) - 1
        self._note_unseen(call.node, module, _arguments(inputs), given, empty=empty)
        self._calls.pop()

    def leave_opaque_root(self, inputs: Any, output: Any) -> None:
        """Record a call of the model itself, if its computation is not observed at all."""
        root = self._calls[0]
        if root.module is not None:
            self._note_unseen(root.node, root.module, _arguments(inputs), tensors_in([output]))

    def note_compiled(self, name: str, inputs: Any, result: Any) -> None:
        """Record a call of a compiled function as one node."""
        self._origins.leave_custom()
        taken = tensors_in([inputs])
        took = set(map(id, taken))
        given = [each for each in tensors_in([result]) if id(each) not in took and self._origins.known(each) is None]
        used = [each for each in self._origins.behind(given) if id(each) not in took]
        if given:
            if not used:
                self._unobserved.add(self._calls[-1].node)
            self._note(name, [*taken, *used], given, (), of_model=True)

    def _note_unseen(
        self, call: int, module: nn.Module, taken: list[Tensor], given: list[Tensor], *, empty: bool = False
    ) -> None:
        """Add a node for unobserved outputs of a call: from a fused function, TorchScript, or code outside of torch."""
        took = set(map(id, taken))
        passed = [tensor for tensor in given if id(tensor) in took]
        unseen = [tensor for tensor in given if id(tensor) not in took and self._origins.known(tensor) is None]
        if unseen:
            whole = is_opaque(module)
            used = list(module.parameters()) if whole else self._origins.behind(unseen)
            if whole:
                # No submodule calls are observed, so this call counts all of the parameters.
                self._builder.nodes[call].parameters = count(used)
            elif not used:
                self._unobserved.add(call)
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
        """Add a node for one operation with the edges into it, and bind its outputs to it."""
        caller = find_caller()
        # A tensor that was written to already has a new part of the backward graph, which does not belong to its
        # origin. A view outside of the backward graph is not inspected, since torch would regenerate its grad_fn out of
        # order.
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
            # An index assignment has no output except the tensor that it wrote into.
            given = metas_of(outputs or written)
            node = self._builder.add("op", name, self._calls[-1].node, given, caller.source)
        else:
            node = inside.node
            inside.results += map(weakref.ref, outputs)
        for origin, meta in origins:
            # Inside a custom function, its own results add no edges, and its arguments are connected already.
            if inside is None or (origin < node and not self._builder.is_connected(origin, node)):
                self._origins.connect(origin, node, meta)
        self._origins.claim([*outputs, *written], node)
        for tensor in outputs:
            self._origins.bind(tensor, node)
        for tensor in written:
            self._origins.bind(tensor, node, wrote=True)

    def note_function(self, func: Any, before: Versions, result: Any, inplace: bool) -> None:
        """Record a call of a torch function.

        Args:
            func: The function.
            before: The tensors that it took, with their version counters before the call.
            result: The return value.
            inplace: True if the call had the argument ``inplace=True``.
        """
        if func == _GRADIENT:
            if result is not None:
                self._origins.bind(result, IGNORED)
            return
        inputs = [tensor for tensor, _ in before]
        outputs = tensors_in([result])
        written = tuple(tensor for tensor, version in before if version_of(tensor) != version)
        if not written and inputs and _is_inference(inputs[0]) and (inplace or writes(func)):
            # Inference tensors have no version counter.
            written = (inputs[0],)
        # A function that returns no new tensor and writes into none is not part of the computation, such as a query of
        # a shape, or ``contiguous`` and ``to`` if they return the tensor that they took.
        old = set(map(id, inputs)) - set(map(id, written))
        outputs = [tensor for tensor in outputs if id(tensor) not in old]
        if outputs or written:
            self._note(function_name(func), inputs, outputs, written)

    def note_backward(self, losses: Any) -> int:
        """Record the beginning of a backward pass and return the id of its node."""
        self._origins.leave_custom()
        node = self._builder.add("backward", "backward", 0, source=find_caller().source)
        for loss in tensors_in([losses]):
            self._origins.connect(self._origins.of(loss), node, meta_of(loss))
        return node

    def note_grad(self, before: Versions, result: Any) -> None:
        """Record a call of ``torch.autograd.grad``, whose gradients the model uses."""
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
        """Record an optimizer step, after the backward passes since its last step that reach its parameters."""
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

    # Errors of the model.

    def backward_failed(self, node: int | None) -> None:
        """Record that the backward pass of a node raised."""
        self._failure = node

    def suspect(self, func: Any, before: Versions) -> None:
        """Remember a function that raised, until it is known whether the model handles the error."""
        caller = find_caller()
        if caller.trainer:
            return
        if caller.custom is not None:
            self._failure = self._origins.enter_custom(caller.custom, caller.source).node
        else:
            origins = [(self._origins.of(tensor), meta_of(tensor)) for tensor, _ in before]
            self._failure = _Failure(function_name(func), origins, self._calls[-1].node, caller.source)

    def note_failed(self, calls: int | None = None) -> None:
        """Mark the innermost calls, or all of them, as failed, together with the function that raised."""
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


def is_fused(module: nn.Module) -> bool:
    """Return True if a module may compute everything in one fused function."""
    return isinstance(module, _FUSED) and not module.training


def is_opaque(module: nn.Module) -> bool:
    """Return True if the computation inside a module is not observed at all."""
    return is_fused(module) or isinstance(module, torch.jit.ScriptModule)


def _arguments(inputs: Any) -> list[Tensor]:
    """Return the tensors among positional and keyword arguments."""
    return tensors_in(part for each in inputs for part in (each.values() if isinstance(each, dict) else each))


def _is_inference(tensor: Tensor) -> bool:
    return not is_uninitialized(tensor) and tensor.is_inference()
