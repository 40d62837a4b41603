"""The nodes and edges that module calls and torch functions add to a graph."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_recorder.graph.capture.builder import GraphBuilder, interned, meta_of, metas_of
from lightning_recorder.graph.capture.call_arguments import Given, plain_arguments
from lightning_recorder.graph.capture.called_modules import CalledModules
from lightning_recorder.graph.capture.fast_path import FastPath
from lightning_recorder.graph.capture.find_unused import find_unused
from lightning_recorder.graph.capture.function_calls import find_caller, function_name, tensors_in, writes
from lightning_recorder.graph.capture.gradients import Gradients
from lightning_recorder.graph.capture.modules import ModelNames, count, is_fused, is_opaque, note_used
from lightning_recorder.graph.capture.operation_costs import Costs
from lightning_recorder.graph.capture.origins import IGNORED, Call, TensorOrigins
from lightning_recorder.graph.capture.scopes import Scopes
from lightning_recorder.graph.model import VMAPPED, Graph, TensorMeta
from lightning_recorder.internals.autograd import in_transform, keywords_of, versions_of, vmap_numel
from lightning_recorder.internals.module_tree import class_name, parameters_of
from lightning_recorder.internals.storage import is_uninitialized
from lightning_recorder.structure import held_tensors, ignore_unknown, iter_tensors

__all__ = ["StepRecording"]

# Functions that use only the shape or dtype of their second tensor. An edge from that tensor would look like a skip
# connection.
_LIKE_ANOTHER = ("reshape_as", "view_as", "expand_as", "type_as")

# The functions with which optimizers reset gradients.
_ZEROES = ("zero", "foreach_zero")

# The functions that return the values of a tensor as numbers. Such a function is a node only if it reads an input of
# the model, which might have no other user. A loss that is read for logging is not part of the computation.
_READS = ("item", "tolist", "numpy", "array", "bool", "int", "float", "index", "complex")

_TENSORS = frozenset((Tensor, nn.Parameter, type(None)))

_GRADIENT = cast(Any, Tensor.grad).__get__
_SET_DATA = cast(Any, Tensor.data).__set__


@dataclass(frozen=True)
class _Failure:
    """A function that raised. It is still unknown whether the model handles the error."""

    name: str
    origins: list[tuple[int, TensorMeta]]
    parent: int
    source: str


class StepRecording:
    """Builds a graph from notifications, which come in execution order.

    The recording is notified at the beginning and end of each module call, and after each function. It finds the node
    that returned each tensor, without keeping any tensor alive.

    With ``times``, measure the time of each module call. With ``costs``, measure the costs of each function; see
    :class:`Costs`. With ``outermost``, leave out the callbacks that a trainer runs.
    """

    def __init__(self, root: nn.Module, *, times: bool = False, costs: bool = False, outermost: bool = False) -> None:
        self._times = times
        self._builder = GraphBuilder()
        self._calls = [Call(self._builder.add("module", "", None), root)]
        self._origins = TensorOrigins(self._builder, self._calls)
        self._counts: dict[str, int] = {}
        self._failure: _Failure | int | None = None  # an int is the id of an existing node
        self._failed_at = 0
        """The number of nodes when the failure was noted. If nodes were added since, the model handled the error."""
        self._known: dict[str, weakref.ref[nn.Module]] = {}
        self._trained: dict[str, bool] = {}
        """By parameter name: True if the parameter requires a gradient."""
        self._registered: set[str] = set()
        """The names of the registered modules."""
        self.gradients = Gradients(self._builder, self._origins, root)
        self._called = CalledModules(self._builder.nodes, self._calls)
        self._opaque: set[int] = set()
        """The calls whose inside was not observed."""
        self.costs = Costs(self._builder, self._origins, root) if costs else None
        self._outermost = outermost
        self._unobserved: set[int] = set()
        """The calls with an unobserved computation. The parameters that these calls used are unknown."""
        self._builder.nodes[0].type_name = class_name(type(root))
        self._with_gradients = torch.is_grad_enabled()
        """False if gradients were disabled when the recording began. Then no function can stop a gradient."""
        self.fast_path = FastPath(self._builder, self._origins, self._calls, outermost)

    def name_modules(self, registered: Mapping[str, nn.Module]) -> None:
        """Name the model's modules and tensors from now on; see :class:`ModelNames`."""
        self._origins.names = ModelNames(registered)

    def stop(self) -> None:
        """Record the outputs of the last custom ``autograd.Function``, if one is in progress."""
        self._origins.leave_custom()

    def forget(self) -> None:
        """Forget all tensors and modules, except for weak references to the modules."""
        self._read_model()
        self._origins.forget()

    def _read_model(self) -> None:
        """Read the properties of the model that are needed to finish the graph, unless the model was forgotten."""
        names = self._origins.names
        if names is not None:
            self._called.describe(names)
            self._known = names.references()
            self._trained, self._registered = names.trained(), names.registered()

    def finish(self, scope: str, *, ended: bool) -> Graph:
        """Return the graph recorded so far; see :meth:`GraphBuilder.finish`."""
        self._read_model()
        builder = self._builder
        note_used(builder, self._trained.keys(), self._unobserved)
        if self.costs is not None:
            self.costs.finish()
        scopes = Scopes(builder, scope).named()
        unused = find_unused(
            self._calls[0].module, self._registered, self._trained, builder, self._opaque, self.gradients
        )
        graph = builder.finish(scope, builder.nodes[0].total_parameters, scopes, unused, ended=ended)
        return replace(graph, modules=self._known)

    def note_inputs(self, inputs: Any, name: str) -> None:
        """Add an input node for each tensor that the model takes, named by its path."""
        given: dict[int, Tensor] = {}
        for path, tensor in iter_tensors(inputs, name, unknown=ignore_unknown):
            # A tensor that is passed twice is one input. For example, the tokens may also be the labels.
            if id(tensor) not in given:
                given[id(tensor)] = tensor
                metas = metas_of([tensor])
                self._origins.bind(tensor, self._builder.add("input", path, 0, metas), meta=metas[0])

    def note_outputs(self, outputs: Any, name: str) -> None:
        """Add an output node for each tensor that the model returned, named by its path."""
        self._origins.leave_custom()
        objects: dict[str, object] = {}

        def note_object(path: str, value: object, error: Exception | None) -> None:
            if error is None:  # if a container raises, only its tensors are missing
                objects[path] = value

        for path, tensor in iter_tensors(outputs, name, unknown=note_object, deep=True):
            self._note_output(path, [tensor])
        for path, value in objects.items():
            inside = [each for each in held_tensors(value) if self._origins.is_known(each)]
            if inside:
                self._note_output(path, inside, type(value).__name__)

    def _note_output(self, path: str, tensors: list[Tensor], type_name: str = "") -> None:
        """Add an output node for a tensor, or for an object of the class ``type_name`` that holds these tensors."""
        origins = self._origins.of_each(tensors)
        node = self._builder.add("output", path, 0, tuple(meta for _, meta, _ in origins))
        if type_name:
            self._builder.nodes[node].type_name = type_name
        for origin, meta, place in origins:
            self._origins.connect(origin, node, meta, output=place)

    # Module calls.

    def enter_call(self, module: nn.Module, args: tuple[Any, ...] = ()) -> None:
        """Record the beginning of a module call with these positional arguments."""
        self._origins.leave_custom()
        self._failure = None
        caller = find_caller(outermost=self._outermost and len(self._calls) == 1, skip=2)
        if caller.trainer and self._outermost and len(self._calls) == 1 and find_caller() != caller:
            return  # a callback calls the model
        names = self._origins.names
        name = None if names is None else names.of(module)
        registered = name is not None and not issubclass(type(module), torch.jit.ScriptModule)
        if name is None and names is not None and not caller.trainer:
            name = names.of_stranger(module)
        if name is None:
            return
        number = self._counts[name] = self._counts.get(name, 0) + 1
        node = self._builder.add("module", name, self._calls[-1].node, source=caller.source)
        if number > 1:
            self._builder.nodes[node].call = number
        if registered:
            self._called.note(node, module)
        if keywords := keywords_of(module):
            args = (*args, *keywords.values())
        if in_transform() and (times := vmap_numel((*tensors_in(args), *parameters_of(module)))) > 1:
            self._builder.nodes[node].note = f"{VMAPPED} ×{times}"
        is_plain = (not args[1:] and type(args[0]) in _TENSORS) if args else True  # the usual case, without a call
        given = None if is_plain or _TENSORS.issuperset(map(type, args)) else metas_of(tensors_in(args))
        self._calls.append(Call(node, module, self._clock() if self._times else 0.0, given))

    def note_recomputed(self, module: nn.Module) -> None:
        """Record that a checkpoint calls a module again, in a backward pass."""
        self._called.note_recomputed(module)

    def _clock(self) -> float:
        """Return the time in seconds, without the overhead of the recording if the overhead is measured."""
        return time.perf_counter() - (0.0 if self.costs is None else self.costs.overhead_s)

    def leave_call(self, module: nn.Module, inputs: Any, output: Any, failed: bool) -> None:
        """Record the end of the innermost call in progress of a module. ``failed`` is True if the call raised."""
        self._origins.leave_custom()
        calls = self._calls
        place = len(calls) - 1
        while place > 0 and calls[place].module is not module:
            place -= 1
        if place == 0:
            return
        call = calls[place]
        if failed:
            self.note_failed(len(calls) - place)
        # If a user's hook raised in an inner call, the hook that ends the inner call never ran. The inner call then
        # ends with this one.
        del calls[place + 1 :]
        given = [output] if type(output) is Tensor else tensors_in([output])
        taken = _arguments(inputs)
        node = call.node
        draft = self._builder.nodes[node]
        self._called.leave(node, module)
        draft.inputs, draft.outputs = metas_of(taken), metas_of(given)
        if call.inputs is not None:
            draft.inputs = call.inputs
        if self._times:
            draft.duration_ms = (self._clock() - call.start_s) * 1e3
        empty = node == len(self._builder.nodes) - 1
        if empty or not all(map(self._origins.is_bound, given)):
            self._note_unseen(node, module, taken, given, empty=empty)
        calls.pop()
        if call.passed:
            self._origins.leave_passed(call, calls[-1], given)

    def leave_opaque_root(self, inputs: Any, output: Any) -> None:
        """Record the call of the model itself if none of its computation was observed."""
        root = self._calls[0]
        given = tensors_in([output])
        if not all(map(self._origins.is_bound, given)):
            self._note_unseen(root.node, root.module, _arguments(inputs), given)

    def note_compiled(self, name: str, inputs: Any, result: Any) -> None:
        """Record a call of a compiled function as one node."""
        self._origins.leave_custom()
        taken = tensors_in([inputs])
        took = set(map(id, taken))
        given = [each for each in tensors_in([result]) if id(each) not in took and self._origins.known(each) is None]
        used = [each for each in self._origins.behind(given) if id(each) not in took]
        if given:
            self._opaque.add(self._calls[-1].node)
            if not used:
                self._unobserved.add(self._calls[-1].node)
            self._note(name, [*taken, *used], given, (), of_model=True)

    def _note_unseen(
        self, call: int, module: nn.Module, taken: list[Tensor], given: list[Tensor], *, empty: bool = False
    ) -> None:
        """Add a node for the unobserved outputs of a call.

        A fused function, TorchScript, or code outside of torch computed these outputs. ``empty`` is True if nothing was
        recorded in the call. An empty call that returns its inputs gets an ``identity`` node, too.
        """
        took = set(map(id, taken))
        unseen = [tensor for tensor in given if id(tensor) not in took and not self._origins.is_known(tensor)]
        if unseen:
            self._opaque.add(call)
            whole = is_opaque(module)
            used = list(parameters_of(module)) if whole else self._origins.behind(unseen)
            if whole:
                # No submodule calls are observed, so this call counts all parameters of the module.
                self._called.note_hidden(call, count(used))
            elif not used:
                self._unobserved.add(call)
            taken = [*taken, *(tensor for tensor in used if id(tensor) not in took)]
            self._note("fused" if is_fused(module) else "unseen", taken, unseen, (), of_model=True)
        elif empty and (passed := [tensor for tensor in given if id(tensor) in took]):
            self._origins.of_each(passed)
            node = len(self._builder.nodes)
            before = self._origins.passed(passed, node)
            if self._note("identity", passed, passed, (), of_model=True) == node:
                self._calls[-1].passed += before

    def _note(
        self,
        name: str,
        inputs: list[Tensor],
        outputs: list[Tensor],
        written: tuple[Tensor, ...],
        *,
        of_model: bool = False,
        start: int | None = None,
        given: Given | None = None,
    ) -> int | None:
        """Add a node for one operation with its edges, bind its outputs to it, and return its id.

        Return None for an operation that is not part of the model. With ``of_model``, the operation is part of the
        model even if the trainer called it. ``start`` is the sequence number of the backward graph before the function
        ran. ``given`` holds the function's non-tensor arguments.
        """
        tensors = self._origins
        # If no module call is in progress, the caller may also be a callback of the trainer.
        caller = find_caller(outermost=self._outermost and len(self._calls) == 1, skip=3)
        if caller.custom is None:
            tensors.leave_custom()
        changed = [*outputs, *written] if written else outputs
        sources, taken, places = tensors.of_inputs(inputs, written, outputs, -1 if start is None else start)
        if (caller.trainer and not of_model) or (sources and max(sources) == IGNORED):
            passed = sources[0] if sources else IGNORED
            tensors.claim(outputs, IGNORED)
            for tensor in outputs:
                tensors.bind(tensor, passed)
            return None
        self._failure = None
        # An index assignment returns nothing: its output is the tensor that it wrote to.
        metas = metas_of(outputs or written)
        inside = None if caller.custom is None else tensors.enter_custom(caller.custom, caller.source)
        if inside is not None:
            node = inside.node
            inside.results += map(weakref.ref, outputs)
            differentiable = tensors.connect_inside(node, sources, taken, inputs, places)
        else:
            node = self._builder.add("op", name, self._calls[-1].node, metas, caller.source, interned(taken))
            if given is not None:
                self._builder.given[node] = given
            differentiable = tensors.connect_inputs(node, sources, taken, inputs, places)
        tensors.claim(changed, node, start)
        if self.costs is not None and inside is None:
            self.costs.note_saved(node, changed)
        if differentiable and self._with_gradients and not torch.is_grad_enabled():
            self._builder.nodes[node].note = "no_grad"
        for place, (tensor, meta) in enumerate(zip(outputs, metas, strict=False)):
            tensors.bind(tensor, node, meta=meta, output=0 if inside else place)
        if written and inside is None:
            self._builder.in_place.append(node)
        for tensor in written:
            tensors.bind(tensor, node, wrote=True)
        return node

    @staticmethod
    def usual_name(func: Any) -> str:
        """Return the name of a function, or "" if the function needs special treatment."""
        name = function_name(func)
        special = name in _ZEROES or name in _LIKE_ANOTHER or name == "grad"
        return "" if special or func in (Tensor.backward, torch.autograd.backward, torch.autograd.grad) else name

    def note_function(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        inputs: list[Tensor],
        before: list[int | None],
        start: int,
        result: Any,
    ) -> int | None:
        """Record a call of a torch function. Return the id of its node, or None if it is not part of the model.

        ``before`` has the version counters of the inputs before the call. ``start`` is the sequence number of the
        backward graph before the call.
        """
        name = function_name(func)
        if name == "grad" and func == _GRADIENT:
            if result is not None:
                self._origins.bind(result, IGNORED)
            return None
        if name == "set" and func == _SET_DATA:
            return self._note_data(args[0], args[1], start)
        after = versions_of(inputs)
        written: tuple[Tensor, ...] = ()
        if after != before:
            written = tuple([each for each, old, new in zip(inputs, before, after, strict=True) if old != new])
        elif before and before[0] is None and not is_uninitialized(inputs[0]) and inputs[0].is_inference():
            # Inference tensors have no version counter.
            written = (inputs[0],) if kwargs.get("inplace") is True or writes(func) else ()
        # A function that neither returns a new tensor nor writes to one is not part of the computation. Examples are a
        # query of a shape, and ``contiguous`` or ``to`` if they return their input.
        old = set(map(id, inputs))
        if written:
            old.difference_update(map(id, written))
        given = [result] if type(result) is Tensor else tensors_in([result])
        outputs = [each for each in given if id(each) not in old]
        reads = name in _READS and bool(inputs) and self._origins.is_input(inputs[0])
        if not outputs and not written and not reads:
            return None
        if written and name in _ZEROES:
            self.gradients.note_zeroed(written)
        # If all arguments are tensors, there are no other arguments to record.
        only_tensors = not kwargs and _TENSORS.issuperset(map(type, args))
        plain = None if only_tensors else plain_arguments(func, args, kwargs)
        if name in _LIKE_ANOTHER:
            inputs = inputs[:1]
        return self._note(name, inputs, outputs, written, start=start, given=plain)

    def _note_data(self, target: Tensor, values: Tensor, start: int) -> int | None:
        """Record an assignment of ``target.data``."""
        # Moving a module to its own device assigns the same parameter. The initialization of a lazy parameter is not
        # recorded.
        same = values is target or is_uninitialized(target)
        if same or find_caller(outermost=self._outermost and len(self._calls) == 1, skip=3).trainer:
            return None
        # A parameter without a node is an input, too: the assignment uses the parameter, although not its values.
        first = [target] if type(target) is nn.Parameter and not self._origins.is_bound(target) else []
        return self._note("set_data", [*first, values], [target], (), start=start)

    def note_backward(self, losses: Any, given: Any = ()) -> int:
        """Record the beginning of a backward pass and return the id of its node.

        ``given`` has the gradients that were passed to ``backward``, if any.
        """
        self._origins.leave_custom()
        if self.costs is not None:
            self.costs.forget_saved()
        node = self._builder.add("backward", "backward", 0, source=find_caller().source)
        if tensors_in([given]):
            self._builder.nodes[node].arguments = (("gradient", "given"),)
        self.gradients.note_backward(node)
        for origin, meta, place in self._origins.of_each(tensors_in([losses])):
            self._origins.connect(origin, node, meta, output=place)
        return node

    def note_grad(self, inputs: list[Tensor], result: Any) -> None:
        """Record a call of ``torch.autograd.grad``, whose gradients the model uses."""
        self._origins.leave_custom()
        gradients = tensors_in([result])
        origins = self._origins.of_each(inputs)
        node = self._builder.add("backward", "grad", self._calls[-1].node, metas_of(gradients), find_caller().source)
        for origin, meta, place in origins:
            self._origins.connect(origin, node, meta, output=place)
        self._origins.claim(gradients, node)
        for place, tensor in enumerate(gradients):
            self._origins.bind(tensor, node, output=place)

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Record an optimizer step, after the backward passes whose gradients it used."""
        self.gradients.note_step(optimizer, find_caller().source)

    # Errors of the model.

    def backward_failed(self, node: int | None) -> None:
        """Record that the backward pass of a node raised."""
        self._failure, self._failed_at = node, len(self._builder.nodes)

    def suspect(self, func: Any, inputs: list[Tensor]) -> None:
        """Remember a function that raised, until it is known whether the model handles the error."""
        caller = find_caller()
        if caller.trainer:
            return
        if caller.custom is not None:
            self._failure = self._origins.enter_custom(caller.custom, caller.source).node
        else:
            origins = [(self._origins.of(tensor), meta_of(tensor)) for tensor in inputs]
            self._failure = _Failure(function_name(func), origins, self._calls[-1].node, caller.source)
        self._failed_at = len(self._builder.nodes)

    def note_failed(self, calls: int | None = None) -> None:
        """Mark the innermost ``calls`` calls, or all calls, as failed. Also mark the function that raised."""
        self._origins.leave_custom()
        failure, self._failure = self._failure, None
        if self._failed_at != len(self._builder.nodes):
            failure = None
        if isinstance(failure, _Failure):
            node = self._builder.add("op", failure.name, failure.parent, source=failure.source)
            for origin, meta in failure.origins:
                self._origins.connect(origin, node, meta)
            failure = node
        if failure is not None:
            self._builder.nodes[failure].failed = True
        for call in self._calls[-calls:] if calls else self._calls:
            self._builder.nodes[call.node].failed = True


def _arguments(inputs: Any) -> list[Tensor]:
    """Return the tensors among positional and keyword arguments."""
    if type(inputs[0]) is tuple and (len(inputs) == 1 or not inputs[1]):
        return tensors_in(inputs[0])
    return tensors_in(part for each in inputs for part in (each.values() if isinstance(each, dict) else each))
