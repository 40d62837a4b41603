"""Recording the execution graph of what a model really does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from lightning_recorder.autograd import current_function_mode, in_backward, remove_hook, without_functions
from lightning_recorder.errors import ForwardError, RecordingError, describe_error, tell
from lightning_recorder.graph.functions import versions
from lightning_recorder.graph.model import Graph
from lightning_recorder.graph.recording import Recording, is_fused, is_opaque
from lightning_recorder.hooks import ModuleHook
from lightning_recorder.names import named_submodules
from lightning_recorder.stance import EagerStance
from lightning_recorder.unrecorded import is_unrecorded, unrecorded

__all__ = ["GraphCapture", "capture_graph"]

# What wraps a model in order to train it in parallel, or compiled, and where it keeps it; its own call computes nothing
# of the model's.
_WRAPPERS = {"DataParallel": "module", "DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}

_BACKWARD = (Tensor.backward, torch.autograd.backward)
Result = TypeVar("Result")


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
        Compiled modules run eagerly meanwhile. Leaving the context takes every hook off. An error in the recording ends
        it with one warning, and the graph has what was seen before. When the model raises, the graph has what was done
        until then; the function that raised, and the calls around it, are marked as ``failed``.

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
        self._is_compiled = any(type(each).__name__ == "OptimizedModule" for each in module.modules())
        while isinstance(inner := getattr(module, _WRAPPERS.get(type(module).__name__, ""), None), nn.Module):
            module = inner
        self.module = module
        self._scope = scope
        self._recording = Recording(module, times=times)
        self._handles: list[RemovableHandle] = []
        self._mode: _CaptureMode | None = None
        self._thread = 0
        self._active = False
        self._paused_in: nn.Module | None = None
        self._stance = EagerStance()
        self._broken = False
        with unrecorded():
            self._guarded(self._recording.note_inputs, inputs, name)

    def __enter__(self) -> Self:
        if self._mode is not None:
            raise RecordingError("this capture is entered already: make one for each block that is recorded")
        self._thread = threading.get_ident()
        self._stance.hold()
        if not self._broken:
            self._guarded(self._begin)
        if not self._broken:
            self._mode = _CaptureMode(self)
            self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch has no annotations there
            self._active = True
        return self

    def _begin(self) -> None:
        self._recording.name_modules(self.module)
        for handle in self._put_on_hooks():
            # One by one, so that those before one that fails come off again.
            self._handles.append(handle)

    def _put_on_hooks(self) -> Iterator[RemovableHandle]:
        """Hooks on all modules of the process, of which this thread's calls are taken.

        They are on no module itself: it may be copied, pickled or scripted meanwhile, TorchScript modules are seen too,
        and fused modules, which look for hooks on themselves, stay on their path. torch warns of such hooks where a
        compiled module is called, so a model that has one gets a hook on each of its modules instead.
        """
        yield register_optimizer_step_post_hook(self._after_step)
        if not self._is_compiled:
            yield register_module_forward_pre_hook(self._before_call)
            yield register_module_forward_hook(self._after_call, with_kwargs=True, always_call=True)
            return
        for name, each in named_submodules(self.module).items():
            if name and not isinstance(each, torch.jit.ScriptModule):
                yield each.register_forward_pre_hook(_CaptureHook(self._before_call))
                after = _CaptureHook(self._after_call)
                yield each.register_forward_hook(after, with_kwargs=True, always_call=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._active:
            self._guarded(self._recording.note_failed)
        self.stop()
        self._stance.release()
        self._resume()
        while self._handles:
            remove_hook(self._handles.pop())
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch has no annotations there

    def stop(self) -> None:
        """See nothing any more, though the hooks stay on until the context is left."""
        if self._active:
            self._guarded(self._recording.stop)
        self._active = False
        self._recording.forget()

    def add_outputs(self, outputs: Any, name: str = "output") -> None:
        """Add a node for each tensor that the model gave back, named by its path.

        Args:
            outputs: Tensors in any nesting.
            name: The path under which the paths grow.

        Note:
            Only before the context is left is it known where they come from.
        """
        if self._active:
            self._guarded(self._recording.note_outputs, outputs, name)

    def graph(self) -> Graph:
        """What was recorded so far."""
        return self._recording.finish(self._scope)

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
            self._active = False
            self._broken = True
            self.stop()
            tell(f"the graph could not be recorded to its end: {describe_error(error)}")
            return None

    def _is_part(self, module: nn.Module) -> bool:
        # The root's own call is left alone: under DDP it wraps the training step, on one device it lies inside it.
        # What a fused module does inside is one function.
        inside = self._paused_in is not None and self._paused_in is not module
        return not inside and module is not self.module and self._watching()

    def _before_call(self, module: nn.Module, args: Any) -> None:
        if self._is_part(module):
            self._guarded(self._recording.enter_call, module)
        if is_fused(module) and self._watching():
            self._pause(module)

    def _after_call(self, module: nn.Module, *inputs_and_output: Any) -> None:
        # After a forward that raised, torch leaves the keyword arguments out.
        failed = len(inputs_and_output) == 2
        *inputs, output = inputs_and_output
        if is_fused(module) and self._watching() and module is self._paused_in:
            self._resume()
        if module is self.module and not failed and is_opaque(module) and self._watching():
            self._guarded(self._recording.leave_opaque_root, inputs, output)
        if self._is_part(module):
            self._guarded(self._recording.leave_call, module, inputs, output, failed)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._watching():
            self._guarded(self._recording.note_step, optimizer)

    def _pause(self, module: nn.Module) -> None:
        """Take the function mode off for a module's call, if no other mode lies above it."""
        if self._mode is not None and current_function_mode() is self._mode:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch has no annotations there
            self._paused_in = module
            # A capture around this one, which could not do so when it was asked before.
            below = current_function_mode()
            if isinstance(below, _CaptureMode):
                below._owner._pause(module)

    def _resume(self) -> None:
        """Put the function mode on again after :meth:`_pause`."""
        if self._paused_in is not None and self._mode is not None:
            self._paused_in = None
            self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch has no annotations there


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
        if any(func is each for each in _BACKWARD):
            node = owner._guarded(owner._recording.note_backward, args[:1] or kwargs.get("tensors"))
            try:
                return func(*args, **kwargs)
            except Exception:
                owner._recording.backward_failed(node)
                raise
        before = owner._guarded(versions, args, kwargs)
        try:
            result = func(*args, **kwargs)
        except Exception:
            if before is not None:
                owner._guarded(owner._recording.suspect, func, before)
            raise
        if before is None:
            return result
        if func is torch.autograd.grad:
            owner._guarded(owner._recording.note_grad, before, result)
        else:
            owner._guarded(owner._recording.note_function, func, before, result, kwargs.get("inplace") is True)
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
