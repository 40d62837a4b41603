"""Recording the execution graph of what a model really does."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from lightning_recorder.autograd import (
    current_function_mode,
    function_behind,
    in_backward,
    remove_hook,
    sequence_number,
    version_of,
    without_functions,
)
from lightning_recorder.errors import ForwardError, describe_error, tell
from lightning_recorder.graph.builder import GraphBuilder, meta_of, metas_of
from lightning_recorder.graph.caller import CustomCall, find_caller
from lightning_recorder.graph.functions import function_name, tensors_in, versions, writes
from lightning_recorder.graph.model import Graph, Kind, TensorMeta
from lightning_recorder.graph.ownership import AutogradOwners
from lightning_recorder.graph.provenance import Provenance, is_lazy
from lightning_recorder.hooks import ModuleHook
from lightning_recorder.names import named_submodules
from lightning_recorder.structure import iter_tensors
from lightning_recorder.unrecorded import is_unrecorded, unrecorded

__all__ = ["GraphCapture", "capture_graph"]

# In eval mode these compute everything in one fused function, unless a function mode is on: then they take another way,
# whose last bits, and rows of padding, differ. So the mode is taken off while one of them runs.
_FUSED = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)

# What wraps a model in order to train it in parallel; its own call computes nothing of the model's.
_WRAPPERS = ("DataParallel", "DistributedDataParallel")

_BACKWARD = (Tensor.backward, torch.autograd.backward)
_GRADIENT = cast(Any, Tensor.grad).__get__

Result = TypeVar("Result")

_IGNORED = -1
"""In place of a node's id: a tensor that is followed no further, such as a gradient on its way to the optimiser."""


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


class GraphCapture:
    """Records the module calls and torch functions of this thread while it is entered.

    Module calls are seen by module hooks, functions by a ``TorchFunctionMode``; neither changes a value, a gradient or
    a random number, and no tensor is kept alive. Inside a backward pass and a step of an optimiser nothing is recorded;
    each is a node.

    What a function of torch's own does inside is not taken apart: ``cross_entropy`` is one node. So is a call of an
    ``autograd.Function`` of the user's.

    Args:
        module: The model. Its submodules' calls become nodes; it is itself the root. Of a model that is wrapped for
            training in parallel the inner one counts. Modules that are called without being registered, because they
            lie in a plain list or belong to somebody else, get the name of where they lie or of their class.
        inputs: What is fed to the model: tensors in any nesting, each an input node named by its path.
        name: The path under which the paths of the inputs grow.
        scope: Which method of the model is recorded.
        times: Measure the wall time of each module's call, ``duration_ms``. On a GPU it is that of starting its work.

    Note:
        Leaving the context takes every hook off. An error in the recording ends it with one warning, and the graph has
        what was seen before. When the model raises, the graph has what was done until then; the function that raised,
        and the calls around it, are marked as ``failed``.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3))
        >>> optimizer = torch.optim.SGD(net.parameters())
        >>> x = torch.ones(1, 2)
        >>> with GraphCapture(net, x, scope="training_step") as recording:
        ...     net(x).sum().backward()
        ...     optimizer.step()
        >>> [(node.kind, node.name, node.scope) for node in recording.graph().nodes[5:]]
        [('op', 'linear', 'training_step'), ('op', 'sum', 'loss'), ('backward', 'backward', 'training_step'),
        ('optimizer', 'SGD', 'training_step')]
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: Any = None,
        *,
        name: str = "input",
        scope: str = "forward",
        times: bool = False,
    ) -> None:
        while type(module).__name__ in _WRAPPERS:
            module = cast(nn.Module, module.module)
        self.module = module
        self._scope = scope
        self._times = times
        self._builder = GraphBuilder()
        self._calls: list[_Call] = []
        self._counts: dict[str, int] = {}
        self._provenance = Provenance()
        self._owners = AutogradOwners()
        self._handles: list[RemovableHandle] = []
        self._mode: _CaptureMode | None = None
        self._thread = 0
        self._active = False
        self._paused_in: nn.Module | None = None
        self._custom: _CustomNode | None = None
        self._customs: dict[int, int] = {}
        self._failure: _Failure | int | None = None  # or the node of one that is there already
        self._stepped: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._strangers: list[nn.Module] = []  # kept, so that their ids stay theirs
        self._model_tensors: dict[int, tuple[Kind, str, nn.Module]] = {}
        root = self._builder.add("module", "", None)
        self._describe(root, module)
        self._calls.append(_Call(root, module))
        with unrecorded():
            given: list[Tensor] = []
            for path, tensor in iter_tensors(inputs, name):
                # A tensor that is given twice, as tokens that are their own labels, is one input.
                if not _is_among(tensor, given):
                    given.append(tensor)
                    self._provenance.bind(tensor, self._builder.add("input", path, root, (meta_of(tensor),)))

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        for name, each in named_submodules(self.module).items():
            self._introduce(name, each)
        for name, each in list(_in_plain_containers(self.module)):
            if id(each) not in self._names:
                self._welcome(name, each)
        self._handles = [*self._put_on_hooks(), register_optimizer_step_post_hook(self._after_step)]
        self._mode = _CaptureMode(self)
        self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch has no annotations there
        self._active = True
        return self

    def _introduce(self, name: str, module: nn.Module) -> None:
        """Know a module and its own tensors by their names."""
        self._names[id(module)] = name
        for kind, tensors in (
            ("parameter", module.named_parameters(name, False)),
            ("buffer", module.named_buffers(name, False)),
        ):
            for path, tensor in tensors:
                self._model_tensors.setdefault(id(tensor), (kind, path, module))  # type: ignore[arg-type]  # a Kind

    def _welcome(self, name: str, module: nn.Module) -> None:
        """Know a module that is not registered, and its submodules, under a name that no other has."""
        taken = set(self._names.values())
        unique, number = name, 1
        while unique in taken:
            number += 1
            unique = f"{name}#{number}"
        self._strangers.append(module)
        for path, each in named_submodules(module).items():
            if id(each) not in self._names:
                self._introduce(f"{unique}.{path}" if path else unique, each)

    def _put_on_hooks(self) -> list[RemovableHandle]:
        """Hooks on all modules of the process, of which this thread's calls are taken.

        They are on no module itself: it may be copied, pickled or scripted meanwhile, TorchScript modules are seen too,
        and fused modules, which look for hooks on themselves, stay on their path. torch warns of such hooks where a
        compiled module is called, so a model that has one gets a hook on each of its modules instead.
        """
        if not any(type(each).__name__ == "OptimizedModule" for each in self.module.modules()):
            return [
                register_module_forward_pre_hook(self._before_call),
                register_module_forward_hook(self._after_call, with_kwargs=True, always_call=True),
            ]
        handles = []
        for name, each in named_submodules(self.module).items():
            if name and not isinstance(each, torch.jit.ScriptModule):
                handles.append(each.register_forward_pre_hook(_CaptureHook(self._before_call)))
                after = _CaptureHook(self._after_call)
                handles.append(each.register_forward_hook(after, with_kwargs=True, always_call=True))
        return handles

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._active:
            self._guarded(self._note_failed, len(self._calls))
        self.stop()
        self._resume()
        while self._handles:
            remove_hook(self._handles.pop())
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch has no annotations there

    def stop(self) -> None:
        """See nothing any more, though the hooks stay on until the context is left."""
        if self._active:
            self._guarded(self._leave_custom)
        self._active = False
        self._provenance.clear()
        self._model_tensors.clear()
        self._names.clear()
        self._strangers.clear()

    def add_outputs(self, outputs: Any, name: str = "output") -> None:
        """Add a node for each tensor that the model gave back, named by its path.

        Args:
            outputs: Tensors in any nesting.
            name: The path under which the paths grow.

        Note:
            Only before the context is left is it known where they come from.
        """
        if self._active:
            self._guarded(self._note_outputs, outputs, name)

    def graph(self) -> Graph:
        """What was recorded so far."""
        return self._builder.finish(self._scope, _parameters(self.module.parameters()))

    # What the mode and the hooks call.

    def _watching(self) -> bool:
        return (
            self._active
            and threading.get_ident() == self._thread
            and not is_unrecorded()
            and not in_backward()
            # torch.jit.trace runs the model to record it itself, with tensors for shapes.
            and not torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]  # public, though not declared so
        )

    def _guarded(self, function: Callable[..., Result], *args: Any) -> Result | None:
        try:
            # Of what is looked at here nothing is to be recorded, and it is looked at often.
            with without_functions():
                return function(*args)
        except Exception as error:  # noqa: BLE001 - whatever fails in the recording must not fail in the model
            self._custom = None
            self.stop()
            tell(f"the graph could not be recorded to its end: {type(error).__name__}: {error}")
            return None

    def _is_part(self, module: nn.Module) -> bool:
        # The root's own call is left alone: under DDP it wraps the training step, on one device it lies inside it.
        # What a fused module does inside is one function.
        inside = self._paused_in is not None and self._paused_in is not module
        return not inside and module is not self.module and self._watching()

    def _before_call(self, module: nn.Module, args: Any) -> None:
        if self._is_part(module):
            self._guarded(self._enter_call, module)
        if _is_fused(module) and self._watching():
            self._pause(module)

    def _after_call(self, module: nn.Module, *inputs_and_output: Any) -> None:
        # After a forward that raised, torch leaves the keyword arguments out.
        failed = len(inputs_and_output) == 2
        *inputs, output = inputs_and_output
        if _is_fused(module) and self._watching() and module is self._paused_in:
            self._resume()
        if self._is_part(module):
            self._guarded(self._leave_call, module, inputs, output, failed)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._watching():
            self._guarded(self._note_step, optimizer)

    def _enter_call(self, module: nn.Module) -> None:
        self._leave_custom()
        self._failure = None
        caller = find_caller()
        if id(module) not in self._names and not self._is_stranger(module, by_trainer=caller.trainer):
            return
        name = self._names[id(module)]
        self._counts[name] = self._counts.get(name, 0) + 1
        node = self._builder.add("module", name, self._calls[-1].node, source=caller.source)
        self._describe(node, module)
        self._builder.nodes[node].call = self._counts[name]
        self._calls.append(_Call(node, module, time.perf_counter() if self._times else 0.0))

    def _is_stranger(self, module: nn.Module, *, by_trainer: bool) -> bool:
        """Whether a module that has no name is one of somebody else's, which then gets one."""
        # A wrapper has no name beside that of what it wraps; of TorchScript submodules each look gives other objects.
        inside = {id(each) for each in module.modules()} - {id(module)}
        if by_trainer or isinstance(module, torch.jit.ScriptModule) or inside & self._names.keys():
            return False
        self._welcome(type(module).__name__, module)
        return True

    def _describe(self, node: int, module: nn.Module) -> None:
        draft = self._builder.nodes[node]
        draft.type_name = type(module).__name__
        draft.parameters = _parameters(module.parameters(recurse=False))

    def _pause(self, module: nn.Module) -> None:
        """Take the function mode off for a module's call, if no other mode lies above it."""
        if self._mode is not None and current_function_mode() is self._mode:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch has no annotations there
            self._paused_in = module

    def _resume(self) -> None:
        """Put the function mode on again after :meth:`_pause`."""
        if self._paused_in is not None and self._mode is not None:
            self._paused_in = None
            self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch has no annotations there

    def _leave_call(self, module: nn.Module, inputs: Any, output: Any, failed: bool) -> None:
        self._leave_custom()
        place = next((at for at in range(len(self._calls) - 1, 0, -1) if self._calls[at].module is module), None)
        if place is None:
            return
        call = self._calls[place]
        if failed:
            self._note_failed(len(self._calls) - place)
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
        taken = tensors_in(part for each in inputs for part in (each.values() if isinstance(each, dict) else each))
        empty = call.node == len(self._builder.nodes) - 1
        passed = [tensor for tensor in given if _is_among(tensor, taken)]
        unseen = [tensor for tensor in given if not _is_among(tensor, taken) and self._known(tensor) is None]
        if unseen:
            # Computed where nobody looks: in a fused function, in TorchScript, outside of torch.
            whole = _is_fused(module) or isinstance(module, torch.jit.ScriptModule)
            used = list(module.parameters()) if whole else self._owners.sources(unseen)[0]
            if whole:
                # No call of a submodule is seen that would own its part of them.
                draft.parameters = _parameters(used)
            taken += [tensor for tensor in used if not _is_among(tensor, taken)]
            self._note("fused" if _is_fused(module) else "unseen", taken, unseen, (), of_model=True)
        elif empty and passed:
            self._note("identity", passed, passed, (), of_model=True)
        self._calls.pop()

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
        # What is written to has got a new part of the backward graph by now, which is not its origin's.
        origins = [(self._origin(tensor, settled=not _is_among(tensor, written)), meta_of(tensor)) for tensor in inputs]
        if (caller.trainer and not of_model) or (origins and all(origin == _IGNORED for origin, _ in origins)):
            passed = origins[0][0] if origins else _IGNORED
            self._owners.claim(outputs, _IGNORED)
            for tensor in outputs:
                self._provenance.bind(tensor, passed)
            return
        self._failure = None
        inside = self._enter_custom(caller.custom, caller.source) if caller.custom is not None else None
        if inside is None:
            self._leave_custom()
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

    def _note_function(self, func: Any, before: list[tuple[Tensor, int | None]], result: Any, inplace: bool) -> None:
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
        outputs = [tensor for tensor in outputs if _is_among(tensor, written) or not _is_among(tensor, inputs)]
        if outputs or written:
            self._note(function_name(func), inputs, outputs, written)

    def _note_backward(self, losses: Any) -> int:
        self._leave_custom()
        node = self._builder.add("backward", "backward", 0, source=find_caller().source)
        for loss in tensors_in([losses]):
            self._connect(self._origin(loss), node, meta_of(loss))
        return node

    def _note_grad(self, before: list[tuple[Tensor, int | None]], result: Any) -> None:
        """A backward pass that the model asks for itself, whose gradients it goes on with."""
        self._leave_custom()
        gradients = tensors_in([result])
        origins = [(self._origin(tensor), meta_of(tensor)) for tensor, _ in before]
        node = self._builder.add("backward", "grad", self._calls[-1].node, metas_of(gradients), find_caller().source)
        for origin, meta in origins:
            self._connect(origin, node, meta)
        self._claim(gradients, node)
        for tensor in gradients:
            self._provenance.bind(tensor, node)

    def _note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """A step, behind the backward passes since the last one of the same optimiser that reach its parameters."""
        nodes = self._builder.nodes
        start = self._stepped.get(id(optimizer), 0)
        self._stepped[id(optimizer)] = len(nodes)
        passes = [number for number in range(start, len(nodes)) if nodes[number].kind == "backward"]
        own = {
            self._model_tensors[id(each)][1]
            for group in optimizer.param_groups
            for each in group["params"]
            if id(each) in self._model_tensors
        }
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

    def _note_outputs(self, outputs: Any, name: str) -> None:
        self._leave_custom()
        for path, tensor in iter_tensors(outputs, name):
            origin = self._origin(tensor)
            self._connect(origin, self._builder.add("output", path, 0, (meta_of(tensor),)), meta_of(tensor))

    # Calls of an ``autograd.Function``, of which only what happens inside is seen.

    def _enter_custom(self, call: CustomCall, source: str) -> _CustomNode:
        """The node of the call in which a function was called, which may be a new one."""
        last = self._custom
        if last is not None and last.call.frame == call.frame and not call.new:
            return last
        self._leave_custom()
        given = tensors_in([call.arguments])
        origins = [(self._origin(tensor), meta_of(tensor)) for tensor in given]
        node = self._builder.add("op", call.function.__name__, self._calls[-1].node, source=source)
        for origin, meta in origins:
            self._connect(origin, node, meta)
        self._custom = _CustomNode(node, replace(call, arguments=None))
        # Each of the nested calls has made a node of the backward graph before anything else.
        self._customs[sequence_number() - call.depth + 1] = node
        return self._custom

    def _leave_custom(self) -> None:
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
        return self._provenance.of(tensor, own=id(tensor) in self._model_tensors)

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
        kind, name, owner = self._model_tensors.get(id(tensor), ("tensor", "", None))
        parent = next((call.node for call in reversed(self._calls) if call.module is owner), self._calls[-1].node)
        node = self._builder.add(kind, name, parent, (meta_of(tensor),))  # type: ignore[arg-type]  # a Kind
        self._provenance.bind(tensor, node)
        return node

    # When the model raises.

    def _suspect(self, func: Any, before: list[tuple[Tensor, int | None]]) -> None:
        """Remember a function that raised, until it is known whether the model lives with that."""
        caller = find_caller()
        if caller.trainer:
            return
        if caller.custom is not None:
            self._failure = self._enter_custom(caller.custom, caller.source).node
        else:
            origins = [(self._origin(tensor), meta_of(tensor)) for tensor, _ in before]
            self._failure = _Failure(function_name(func), origins, self._calls[-1].node, caller.source)

    def _note_failed(self, calls: int) -> None:
        """Mark the innermost calls as failed, with the function that raised in them."""
        self._leave_custom()
        failure, self._failure = self._failure, None
        if isinstance(failure, _Failure):
            node = self._builder.add("op", failure.name, failure.parent, source=failure.source)
            for origin, meta in failure.origins:
                self._connect(origin, node, meta)
            failure = node
        if failure is not None:
            self._builder.nodes[failure].failed = True
        for call in self._calls[-calls:]:
            self._builder.nodes[call.node].failed = True


class _CaptureMode(TorchFunctionMode):
    """Shows the capture every function of torch that is called from outside of torch."""

    def __init__(self, owner: GraphCapture) -> None:
        super().__init__()
        self._owner = owner

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        owner = self._owner
        if not owner._watching():
            return func(*args, **kwargs)
        # Inside this function no mode is on, so nothing that func does itself is seen: neither the parts of a composite
        # nor a backward pass.
        if func in _BACKWARD:
            node = owner._guarded(owner._note_backward, args[:1] or kwargs.get("tensors"))
            try:
                return func(*args, **kwargs)
            except Exception:
                owner._failure = node
                raise
        before = owner._guarded(versions, args, kwargs)
        try:
            result = func(*args, **kwargs)
        except Exception:
            if before is not None:
                owner._guarded(owner._suspect, func, before)
            raise
        if before is None:
            return result
        if func is torch.autograd.grad:
            owner._guarded(owner._note_grad, before, result)
        else:
            owner._guarded(owner._note_function, func, before, result, bool(kwargs.get("inplace")))
        return result


class _CaptureHook(ModuleHook):
    """A hook of a capture on one module."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        self._function(*args)


def capture_graph(module: nn.Module, /, *args: Any, **kwargs: Any) -> Graph:
    """Call a module once and give the graph of the call.

    The module runs as it is, in its train or eval mode, under the caller's grad mode and autocast.

    Args:
        module: The model.
        args: Its arguments; a single tensor becomes the input node ``input``, several ``input[0]``, ``input[1]``, ….
        kwargs: Its keyword arguments; a tensor becomes the input node ``input.<keyword>``.

    Raises:
        ForwardError: From the model's own error; names the module that raised it, and has the graph up to there.

    Example:
        >>> graph = capture_graph(nn.Linear(2, 3), torch.ones(1, 2))
        >>> [node.name for node in graph.nodes]
        ['', 'input', 'weight', 'bias', 'linear', 'output']
    """
    single = len(args) == 1 and not kwargs
    inputs: Any = args[0] if single else dict[Any, Any]([*enumerate(args), *kwargs.items()])
    recording = GraphCapture(module, inputs)
    try:
        with recording:
            recording.add_outputs(module(*args, **kwargs))
    except Exception as error:
        graph = recording.graph()
        raise ForwardError(f"{_where_it_failed(graph)} raised {describe_error(error)}", graph) from error
    return recording.graph()


def _where_it_failed(graph: Graph) -> str:
    failed = [node for node in graph.nodes if node.failed and node.kind == "module"]
    inner = failed[-1] if failed else graph.root
    return f"module {inner.name!r} ({inner.type_name})" if inner.name else f"the model itself ({inner.type_name})"


def _parameters(parameters: Iterable[Tensor]) -> int:
    """The number of elements, without parameters that have no shape yet."""
    return sum(parameter.numel() for parameter in parameters if not is_lazy(parameter))


def _is_fused(module: nn.Module) -> bool:
    return isinstance(module, _FUSED) and not module.training


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _is_among(tensor: Tensor, others: Iterable[Tensor]) -> bool:
    return any(tensor is other for other in others)


def _is_inference(tensor: Tensor) -> bool:
    return not is_lazy(tensor) and tensor.is_inference()


def _in_plain_containers(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that lie in lists, tuples and dictionaries among the attributes of registered ones."""
    for name, module in named_submodules(root).items():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        for attribute, value in vars(module).items():
            if attribute in nn.Module.__dict__ or attribute in _OWN:
                continue
            for suffix, each in _modules_in(value):
                yield f"{name}.{attribute}{suffix}".removeprefix("."), each


# Where a module keeps what is registered, hooks among it.
_OWN = frozenset(vars(nn.Module()))


# What is longer holds the data of a model, not its layers.
_MOST_NESTED = 1000


def _modules_in(value: object, *, nested: bool = True) -> Iterator[tuple[str, nn.Module]]:
    pairs: Iterable[tuple[object, object]] = ()
    if isinstance(value, (list, tuple)):
        pairs = enumerate(value)
    elif isinstance(value, dict):
        pairs = value.items()
    nested = nested and isinstance(value, Sized) and len(value) <= _MOST_NESTED
    for key, each in pairs:
        if isinstance(each, nn.Module):
            yield f"[{key!r}]", each
        elif nested and isinstance(each, (list, tuple, dict)) and len(each) <= _MOST_NESTED:
            yield from ((f"[{key!r}]{suffix}", module) for suffix, module in _modules_in(each, nested=False))
