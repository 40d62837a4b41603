"""Recording the execution graph of the calls that a model makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import get_ident
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from lightning_recorder.errors import ForwardError, RecordingError, describe_error, warn
from lightning_recorder.graph.capture.capture_mode import CaptureMode
from lightning_recorder.graph.capture.modules import is_fused, is_opaque
from lightning_recorder.graph.capture.step import StepRecording
from lightning_recorder.graph.model import Graph
from lightning_recorder.internals.autograd import (
    current_function_mode,
    graph_task,
    is_tracing,
    remove_function_mode,
    remove_hook,
    without_functions,
)
from lightning_recorder.internals.compiled import (
    EagerStance,
    compiled_modules,
    compiled_owner,
    describe_compiled,
    observe_compiled_calls,
    stop_observing,
)
from lightning_recorder.internals.garbage_collection import RareCollections
from lightning_recorder.internals.hooks import ModuleHook
from lightning_recorder.internals.module_tree import (
    ModuleSet,
    class_name,
    hookable,
    is_scripted,
    named_modules_of,
    stored_attribute,
)
from lightning_recorder.internals.pause_recording import PAUSES, pause_recording
from lightning_recorder.module_names import named_submodules, without_wrappers

__all__ = ["GraphCapture", "capture_call", "capture_graph"]

# Wrappers for parallel training or compilation, with the attribute that holds the wrapped model. The wrapper itself is
# not part of the model's computation.
_WRAPPERS = {"DataParallel": "module", "DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}
Result = TypeVar("Result")


class GraphCapture:
    """Records the module calls and torch functions of the current thread while the context is entered.

    Module hooks observe module calls, and a ``TorchFunctionMode`` observes functions. Neither changes values, gradients
    or random numbers, and no tensor is kept alive. A backward pass or an optimizer step is a single node. A torch
    function such as ``cross_entropy`` is a single node, too. So is a call of a custom ``autograd.Function``; modules
    that it calls have nodes of their own.

    Args:
        module: The model. It is the root of the graph, and the calls of its submodules become nodes. If the model is
            wrapped for parallel training, the wrapped model is used. An unregistered module, such as one in a plain
            list or of another object, is named by its location or its class.
        inputs: The inputs of the model: tensors in any nesting. Each is an input node named by its path.
        name: The prefix of the paths of the inputs.
        scope: The method of the model that is recorded.
        times: Measure the wall time of each module call as ``duration_ms``. On a GPU this is the time to launch its
            work.
        costs: Also measure three costs of each function: its wall time without the overhead of the recording, the
            estimated number of floating-point operations (``flops``), counted by torch on tensors without values, and
            the bytes that autograd keeps for the backward pass (``saved_bytes``). The recording then takes longer.
        eager: Run compiled code eagerly during the capture, so that its functions are recorded. Otherwise each call of
            a compiled module or function is one node.

    Note:
        Leaving the context removes every hook. If the recording fails, it stops with one warning, and the graph holds
        the nodes recorded until then. If the model raises, the graph also ends there. The function that raised and the
        calls around it are marked as ``failed``.

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
        costs: bool = False,
        eager: bool = True,
    ) -> None:
        self._is_compiled = False
        self._left_out = ModuleSet() if eager else compiled_modules(module)
        while isinstance(inner := stored_attribute(module, _WRAPPERS.get(class_name(type(module)), "")), nn.Module):
            self._is_compiled = self._is_compiled or _is_compiled(type(module))
            module = inner
        self.module = module
        self._scope = scope
        self._recording = StepRecording(module, times=times or costs, costs=costs, outermost=scope != "forward")
        self._handles: list[RemovableHandle] = []
        self._hooks: list[RemovableHandle] = []  # the hooks on modules
        self._mode: CaptureMode | None = None
        self._thread = 0
        self._active = False
        self._paused_in: nn.Module | None = None
        self._in_compiled = False
        self._eager = eager
        self._stance, self._collector = EagerStance(), RareCollections()
        self.is_broken = False
        """True after an internal error. The graph is then incomplete."""
        self._ended = False
        self._graph: Graph | None = None  # the result of graph(), cached after the capture has ended
        with pause_recording():
            self._guarded(self._recording.note_inputs, inputs, name)

    def __enter__(self) -> Self:
        if self._mode is not None:
            raise RecordingError("this capture is already active: create one for each block to record")
        self._thread = get_ident()
        self._collector.hold()
        if self._eager:
            self._stance.hold()
        if not self.is_broken:
            self._guarded(self._begin)
        if not self.is_broken:
            self._mode = CaptureMode(self._recording, self._watching, self._guarded, self._break, self._pause)
            self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch has no annotations there
            self._active = True
        return self

    @property
    def ran_eagerly(self) -> tuple[str, ...]:
        """Names of the compiled functions that the capture ran eagerly."""
        return self._stance.ran

    def _begin(self) -> None:
        self._handles.append(register_optimizer_step_pre_hook(self._before_step))
        self._handles.append(register_optimizer_step_post_hook(self._after_step))
        found = dict(named_modules_of(self.module))
        self._is_compiled = self._is_compiled or any(map(_is_compiled, map(type, found.values())))
        self._recording.name_modules(without_wrappers(found))
        # If torch._dynamo is not imported, nothing is compiled yet.
        if not self._eager and not observe_compiled_calls(self._enter_compiled) and self._left_out:
            raise RecordingError("this version of torch does not report calls of compiled code")
        self._put_on_hooks()

    def _put_on_hooks(self) -> None:
        for handle in self._make_hooks():
            # Append one at a time: if a registration raises, the earlier hooks are in the list and will be removed.
            self._hooks.append(handle)

    def _take_off_hooks(self) -> None:
        while self._hooks:
            remove_hook(self._hooks.pop())

    def _make_hooks(self) -> Iterator[RemovableHandle]:
        """Register global module hooks where possible, else a hook on each module. Yield the handles.

        Global hooks leave the modules themselves unchanged. So a module may be copied, pickled or scripted during the
        capture, and calls of TorchScript modules are observed. Fused modules keep their fast path, which hooks on the
        modules themselves would disable. Models with compiled modules get a hook on each module instead: torch warns
        about global hooks when a compiled module is called. With ``eager=False`` the hooks are on each module, too,
        since a global hook would cause a recompilation.
        """
        if not self._is_compiled and self._eager:
            yield register_module_forward_pre_hook(self._before_call)
            yield register_module_forward_hook(self._after_call, with_kwargs=True, always_call=True)
            return
        for name, each in named_submodules(self.module).items():
            if name and each not in self._left_out and not is_scripted(each):
                yield hookable(each).register_forward_pre_hook(_CaptureHook(self._before_call))
                after = _CaptureHook(self._after_call)
                yield hookable(each).register_forward_hook(after, with_kwargs=True, always_call=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._active:
            self._guarded(self._recording.note_failed)
        self.stop()
        stop_observing(self._enter_compiled)
        self._stance.release()
        self._resume()
        self._take_off_hooks()
        while self._handles:
            remove_hook(self._handles.pop())
        mode, self._mode = self._mode, None
        if mode is not None and not self._in_compiled:
            remove_function_mode(mode)
        self._ended = True
        self._collector.release()

    def stop(self) -> None:
        """Stop recording. The hooks stay registered until the context is left."""
        if self._active:
            self._guarded(self._recording.stop)
        self._active = False
        with without_functions():
            self._recording.forget()

    def add_outputs(self, outputs: Any, name: str = "output") -> None:
        """Add an output node for each tensor that the model returned, named by its path.

        Args:
            outputs: Tensors in any nesting.
            name: The prefix of the paths.

        Note:
            Call this before the context is left; afterwards the origin of the tensors is unknown.
        """
        if self._active:
            self._guarded(self._recording.note_outputs, outputs, name)

    def graph(self) -> Graph:
        """Return the graph recorded so far."""
        if self._graph is not None:
            return self._graph
        collector = RareCollections()
        collector.hold()
        try:
            graph = self._recording.finish(self._scope, ended=self._ended)
        finally:
            collector.release()
        if self._ended:
            self._graph = graph
        return graph

    # Callbacks of the function mode and the hooks.

    def _watching(self) -> bool:
        return (
            self._active
            and get_ident() == self._thread
            and not PAUSES.value
            and graph_task() == -1
            # torch.jit.trace runs the model for its own recording, with tensors instead of shapes.
            and not is_tracing()
        )

    def _guarded(self, function: Callable[..., Result], *args: Any) -> Result | None:
        try:
            # The torch functions that inspect tensors here must not be recorded.
            with without_functions():
                return function(*args)
        except Exception as error:  # noqa: BLE001 - an error of the recording must not fail the model
            self._break(error)
            return None

    def _break(self, error: Exception) -> None:
        """Stop recording after an internal error, and warn."""
        self._active = False
        self.is_broken = True
        self.stop()
        warn(f"the graph is incomplete: {describe_error(error)}")

    def _is_part(self, module: nn.Module) -> bool:
        # Ignore the call of the root module, since it may enclose the training step (under DDP) or be inside it (on a
        # single device). Ignore calls inside a fused module, which is recorded as one function.
        inside = (self._paused_in is not None and self._paused_in is not module) or self._in_compiled
        return not inside and module is not self.module

    def _before_call(self, module: nn.Module, args: Any) -> None:
        if not self._watching():
            if self._active and graph_task() != -1:
                self._recording.note_recomputed(module)
            return
        try:
            if self._is_part(module):
                self._recording.enter_call(module, args)
        except Exception as error:  # noqa: BLE001 - an error of the recording must not fail the model
            self._break(error)
        if self._active and is_fused(module):
            self._pause(module)

    def _after_call(self, module: nn.Module, *inputs_and_output: Any) -> None:
        if not self._watching():
            return
        # If forward raised, torch calls the hook without keyword arguments.
        failed = len(inputs_and_output) == 2
        *inputs, output = inputs_and_output
        if module is self._paused_in:
            self._resume()
        if module is self.module and not failed and is_opaque(module):
            self._guarded(self._recording.leave_opaque_root, inputs, output)
        if self._is_part(module):
            self._guarded(self._recording.leave_call, module, inputs, output, failed)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._watching():
            self._guarded(self._recording.gradients.begin_step, optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._watching():
            self._guarded(self._recording.note_step, optimizer)

    # Calls of compiled code, which neither the function mode nor the hooks observe.

    def _enter_compiled(self, function: Callable[..., Any], /) -> Callable[[Any, Any, Any], object] | None:
        if self._in_compiled or self._paused_in is not None or not self._watching():
            return None
        if current_function_mode() is not self._mode or self._mode is None:
            return None  # another function mode is on top of this one: the compiled code already expects function modes
        owner = compiled_owner(function)
        module = owner if isinstance(owner, nn.Module) and owner is not self.module else None
        name = describe_compiled(function)
        if module is not None:
            self._guarded(self._recording.enter_call, module)
        remove_function_mode(self._mode)
        self._in_compiled = True
        self._guarded(self._take_off_hooks)  # code compiled with a hook would be recompiled once the hook is removed
        return lambda args, kwargs, result: self._leave_compiled(name, module, [args, kwargs], result)

    def _leave_compiled(self, name: str, module: nn.Module | None, inputs: list[Any], result: Any) -> None:
        self._in_compiled = False
        if self._mode is None:  # the context of the capture was left during the call
            return
        self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch has no annotations there
        self._guarded(self._put_on_hooks)
        if not self._watching():
            return
        if module is not None:
            self._guarded(self._recording.leave_call, module, inputs, result, False)
        else:
            self._guarded(self._recording.note_compiled, name, inputs, result)

    def _pause(self, module: nn.Module) -> None:
        """Remove the function mode during a module's call, unless another mode is on top of it."""
        if self._mode is not None and current_function_mode() is self._mode:
            remove_function_mode(self._mode)
            self._paused_in = module
            # An enclosing capture could not pause until now, because this mode was on top of its mode.
            below = current_function_mode()
            if isinstance(below, CaptureMode):
                below.pause(module)

    def _resume(self) -> None:
        """Restore the function mode after :meth:`_pause`."""
        if self._paused_in is not None and self._mode is not None:
            self._paused_in = None
            self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch has no annotations there


def _is_compiled(kind: type) -> bool:
    return class_name(kind) == "OptimizedModule"


class _CaptureHook(ModuleHook):
    """A hook that a capture registers on a single module."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        self._function(*args)


def capture_graph(module: nn.Module, /, *args: Any, **kwargs: Any) -> Graph:
    """Call a module once and return the graph of the call.

    The module keeps its train or eval mode and runs under the caller's grad mode and autocast.

    Args:
        module: The model.
        args: The positional arguments of the call. A single tensor becomes the input node ``input``, several become
            ``input[0]``, ``input[1]``, ….
        kwargs: The keyword arguments of the call. A tensor becomes the input node ``input.<keyword>``.

    Raises:
        ForwardError: If the model raises. The error names the module that raised and holds the graph recorded so far.

    Example:
        >>> import torch
        >>> graph = capture_graph(nn.Linear(2, 3), torch.ones(1, 2))
        >>> [node.name for node in graph.nodes]
        ['', 'input', 'weight', 'bias', 'linear', 'output']
    """
    return capture_call(module, args, kwargs)


def capture_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, costs: bool = False) -> Graph:
    """Call a module once and return the graph of the call; see :func:`capture_graph` and :class:`GraphCapture`."""
    single = len(args) == 1 and not kwargs
    inputs: Any = args[0] if single else dict[Any, Any]([*enumerate(args), *kwargs.items()])
    recording = GraphCapture(module, inputs, costs=costs)
    try:
        with recording:
            recording.add_outputs(module(*args, **kwargs))
    except Exception as error:
        graph = recording.graph()
        raise ForwardError(f"{_where_it_failed(graph)} raised {describe_error(error)}", graph) from error
    return recording.graph()


def _where_it_failed(graph: Graph) -> str:
    inner = [graph.root, *(node for node in graph.nodes if node.failed and node.kind == "module")][-1]
    return f"module {inner.name!r} ({inner.type_name})" if inner.name else f"the model itself ({inner.type_name})"
