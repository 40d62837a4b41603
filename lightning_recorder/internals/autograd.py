"""Access to private PyTorch APIs for autograd graphs and module calls.

No other file of the package uses these APIs. Each docstring documents the fallback for PyTorch versions without the
private name. If a PyTorch release renames a private name, recording degrades but the run does not fail.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import cache
from operator import attrgetter
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from lightning_recorder.errors import RecordingError
from lightning_recorder.internals.module_tree import stored_attribute
from lightning_recorder.internals.storage import is_uninitialized

__all__ = [
    "CALL_OF_FUNCTION",
    "CALL_OF_MODULE",
    "LEAF_NUMBER",
    "MODULE_CALLS",
    "adds_to",
    "base_of",
    "counted_version",
    "current_function_mode",
    "current_node",
    "fake_mode",
    "function_behind",
    "graph_task",
    "has_accumulate_hooks",
    "hooks_of",
    "hooks_of_leaf",
    "in_backward",
    "in_transform",
    "is_compiled",
    "is_tracing",
    "is_transformed",
    "is_view",
    "is_wrapped_for_backward",
    "keywords_of",
    "register_hooks",
    "remove_function_mode",
    "remove_hook",
    "running_calls",
    "saved_tensors",
    "schemas_of",
    "sequence_number",
    "sequence_number_of",
    "set_grad_enabled",
    "set_hooks",
    "unwrapped",
    "version_counter",
    "version_of",
    "versions_of",
    "vmap_numel",
    "without_class",
    "without_functions",
]

try:
    from torch._C import _current_graph_task_id
except ImportError:

    def _current_graph_task_id() -> int:
        return -1


try:
    from torch._C import _current_autograd_node
except ImportError:

    def _current_autograd_node() -> Any:  # type: ignore[misc]  # torch always returns a node
        return None


try:
    from torch._C import DisableTorchFunction
except ImportError:
    DisableTorchFunction = contextlib.nullcontext


_function_modes: Any = getattr(torch.overrides, "_get_current_function_mode_stack", None)
_pop_mode: Any = getattr(torch.overrides, "_pop_mode", None)
_push_mode: Any = getattr(torch.overrides, "_push_mode", None)

_will_execute: Callable[[Node], bool] = getattr(torch._C, "_will_engine_execute_node", lambda _: True)

try:
    from torch._C._autograd import _top_saved_tensors_default_hooks
except ImportError:

    def _top_saved_tensors_default_hooks(ignore_is_tracing: bool) -> Any:  # type: ignore[misc]  # torch returns a pair
        return True


_is_tracing: Any = getattr(torch._C, "_is_tracing", None) or torch.jit.is_tracing  # type: ignore[attr-defined]  # no stub

try:
    from torch._C._autograd import _get_sequence_nr
except ImportError:

    def _get_sequence_nr() -> int:
        return 0


try:
    from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
except ImportError:

    def is_functorch_wrapped_tensor(tensor: Tensor) -> bool:
        return False

    def is_legacy_batchedtensor(tensor: Tensor) -> bool:
        return False


try:
    from torch import _is_functional_tensor
except ImportError:

    def _is_functional_tensor(t: Tensor) -> bool:
        return False


try:
    from torch._C._functorch import get_unwrapped
except ImportError:

    def get_unwrapped(tensor: Tensor) -> Tensor:
        return tensor


try:
    from torch._C._functorch import maybe_get_bdim, maybe_get_level
except ImportError:

    def maybe_get_bdim(tensor: Tensor) -> int:
        return -1

    def maybe_get_level(tensor: Tensor) -> int:
        return -1


try:
    from torch._C._functorch import peek_interpreter_stack
except ImportError:

    def peek_interpreter_stack() -> Any:  # type: ignore[misc]  # torch returns a private class
        return None


try:
    from torch.overrides import _get_current_function_mode
except ImportError:

    def _get_current_function_mode() -> Any:
        return None


# The code objects of the torch functions that call a module's forward and the forward of an ``autograd.Function``.
# Fallback: ``None``; functions that are called inside them are not recorded.
CALL_OF_MODULE: CodeType | None = getattr(getattr(nn.Module, "_call_impl", None), "__code__", None)
CALL_OF_FUNCTION: CodeType | None = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)

# Names of the functions that torch compiles for a module call. The last name is used for torch's own modules. Fallback:
# the message about compiled code shows torch's internal name.
MODULE_CALLS = ("__call__", "_call_impl", "_wrapped_call_impl", "inner")

# The sequence number that torch assigns to leaf nodes, so that the engine runs them first.
_LEAF = 2**64 - 1
LEAF_NUMBER = -1


def fake_mode() -> Any:
    """Return a context in which tensors have shapes but no values. Its ``from_tensor`` converts real tensors.

    Raises:
        RecordingError: If this torch version has no ``FakeTensorMode``.
    """
    try:
        from torch._subclasses.fake_tensor import FakeTensorMode
    except ImportError as error:
        raise RecordingError(f"this torch has no fake tensors: {error}; record without device='meta'") from error
    # Allow real inputs: tensors in plain attributes of a module are real, and are converted when they are used.
    return FakeTensorMode(allow_non_fake_inputs=True)


def base_of(tensor: Tensor) -> Tensor | None:
    """Return the base of a view, or ``None`` if the tensor is not a view.

    Fallback: ``None``; an output that is later changed in place may have no gradient record.
    """
    return getattr(tensor, "_base", None)


def current_function_mode() -> object:
    """Return the innermost ``TorchFunctionMode`` of this thread, or ``None``.

    Fallback: ``None``; the mode stays active for fused modules, whose results may then differ in the last bits in eval
    mode.
    """
    return _get_current_function_mode()


def current_node() -> Node | None:
    """Return the autograd node that is running in this thread, or ``None`` outside of a backward pass.

    Fallback: ``None``; operations of the backward pass are attributed to no module.
    """
    node: Node | None = _current_autograd_node()
    return node


def function_behind(tensor: Tensor) -> type | None:
    """Return the ``autograd.Function`` that created a tensor, or ``None``.

    Fallback: ``None``; the output of such a function is attributed to the last torch function called inside it.
    """
    made_by = tensor.grad_fn if tensor.requires_grad else None
    return getattr(made_by, "_forward_cls", None)


# The id of the backward pass that is running in this thread, or -1 outside of a backward pass.
# Fallback: -1; partial gradients of an interrupted backward pass may be counted in the next backward pass.
graph_task: Callable[[], int] = _current_graph_task_id


def adds_to(parameter: Tensor) -> bool:
    """Return True if the backward pass that is running in this thread accumulates into ``.grad`` of a parameter.

    Fallback: ``True``; gradients from ``torch.autograd.grad`` are mistaken for gradients of the loss.
    """
    try:
        with torch.enable_grad():  # required for the edge of a leaf
            return parameter.requires_grad and _will_execute(get_gradient_edge(parameter).node)
    except RuntimeError:  # torch.autograd.grad returns the gradient instead
        return False


def has_accumulate_hooks(parameter: Tensor) -> bool:
    """Return True if the parameter has post-accumulate-grad hooks, which may, for example, run an optimizer step.

    Fallback: ``False``; the hooks run when a step with reentrant checkpointing is repeated.
    """
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def in_backward() -> bool:
    """Return True if this thread is inside a backward pass.

    A forward hook that fires there belongs to a recomputation by ``torch.utils.checkpoint``, not to a second forward
    pass. torch's own ``ModuleTracker`` uses the same test. Fallback: ``False``; recomputed activations are counted
    twice.
    """
    return bool(_current_graph_task_id() != -1)


# Returns an object inside a ``torch.func`` transform, from which values cannot escape, and None outside.
# Fallback: None; inside a transform, only wrapper tensors are skipped.
in_transform: Callable[[], object] = peek_interpreter_stack


# True if this thread is inside ``torch.jit.trace``. Takes half as long as ``torch.jit.is_tracing``.
# Fallback: ``torch.jit.is_tracing``.
is_tracing: Callable[[], bool] = _is_tracing


def is_transformed(tensor: Tensor) -> bool:
    """Return True for a wrapper tensor of ``torch.func`` or of a batched backward pass, whose value cannot escape.

    Fallback: ``False``; recording such a tensor raises an error, which becomes a warning.
    """
    return bool(is_functorch_wrapped_tensor(tensor) or is_legacy_batchedtensor(tensor) or _is_functional_tensor(tensor))


set_grad_enabled: Callable[[bool], object] = getattr(torch._C, "_set_grad_enabled", torch.set_grad_enabled)
"""Enable or disable autograd in this thread, twenty times as fast as ``torch.set_grad_enabled``.

Fallback: ``torch.set_grad_enabled``.
"""


def is_view(tensor: Tensor) -> bool:
    """Return True if the tensor is a view. torch may create the ``grad_fn`` of a view only on access.

    Fallback: ``True``; nodes that no other code has accessed may be attributed to no module.
    """
    return bool(getattr(tensor, "_is_view", lambda: True)())


def saved_tensors(node: Node) -> list[Tensor]:
    """Return the tensors that an autograd node has saved; empty if a hook packs saved tensors.

    Fallback: empty. Reading a tensor that a hook has packed would run the hook, which may recompute a checkpoint.
    """
    if _top_saved_tensors_default_hooks(True) is not None:
        return []
    found: list[Tensor] = []
    for name in _saved_names(type(node)):
        try:
            value = getattr(node, name)
        except (RuntimeError, AttributeError):  # freed, or changed in place after saving
            continue
        found += [each for each in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(each, Tensor)]
    return found


@cache
def _saved_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_saved_") or name == "saved_tensors")


def register_hooks(tensor: Tensor) -> None:
    """Register the tensor's dictionary of hooks with its autograd node, so that the node calls them.

    Fallback: no-op; the hooks are not called.
    """
    register = getattr(tensor.grad_fn, "_register_hook_dict", None)
    if register is not None:
        register(tensor)


def remove_hook(handle: RemovableHandle) -> None:
    """Remove a hook, including its entries in two dictionaries that torch does not clean up for global hooks.

    A stale entry would disable the fast path of every module call and make torch warn about every compiled module.
    Fallback: only ``handle.remove()``.
    """
    handle.remove()
    for name in ("_global_forward_hooks_always_called", "_global_forward_hooks_with_kwargs"):
        getattr(torch.nn.modules.module, name, {}).pop(handle.id, None)


def set_hooks(tensor: Tensor, hooks: OrderedDict[int, object] | None) -> None:
    """Replace the tensor's dictionary of hooks. The node does not call them until :func:`register_hooks`.

    Fallback: no-op; in-place operations are not detected.
    """
    if hasattr(tensor.grad_fn, "_register_hook_dict"):
        tensor._backward_hooks = hooks  # type: ignore[assignment]  # declared as a plain dictionary of functions


# The sequence number of the next autograd node created in this thread.
# Fallback: 0; a search for the nodes of one module call also visits all earlier nodes.
sequence_number: Callable[[], int] = _get_sequence_nr


def sequence_number_of(node: Node) -> int:
    """Return the sequence number of a node, or -1 for a leaf. Nodes created later have larger numbers.

    Fallback: 0, as for :func:`sequence_number`.
    """
    try:
        number: int = node._sequence_nr()
    except AttributeError:
        return 0
    return LEAF_NUMBER if number == _LEAF else number


def hooks_of(tensor: Tensor) -> OrderedDict[int, object] | None:
    """Return the dictionary of hooks on a tensor, or ``None`` if there is none.

    Fallback: ``None``.
    """
    return getattr(tensor, "_backward_hooks", None)


def hooks_of_leaf(tensor: Tensor) -> list[object]:
    """Return the hooks on a leaf tensor; empty for any other tensor.

    Fallback: empty; hooks that are registered at every step are registered again.
    """
    return list((hooks_of(tensor) or {}).values()) if tensor.is_leaf else []


def schemas_of(name: str) -> list[list[Any]]:
    """Return the parameters of each overload of a torch function that takes or returns tensors.

    Overloads with ``out`` are excluded, because they have the same parameters as other overloads.

    Fallback: empty; arguments get the names in ``torch.overrides``, and all other arguments are numbered.
    """
    try:
        schemas = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
        return [
            list(each.arguments)
            for each in schemas
            if not any(part.is_out for part in each.arguments)
            and any("Tensor" in str(part.type) for part in (*each.arguments, *each.returns))
        ]
    except (AttributeError, RuntimeError):
        return []


def running_calls(module: nn.Module) -> int:
    """Return the number of calls of the module that are running in this thread.

    Fallback: 1, which is correct for modules that do not call themselves.
    """
    frame, number = inspect.currentframe(), 0
    while frame is not None:
        number += frame.f_code is CALL_OF_MODULE and frame.f_locals.get("self") is module
        frame = frame.f_back
    return max(1, number)


def keywords_of(module: nn.Module) -> dict[str, Any]:
    """Return the keyword arguments of the module call whose hooks are running.

    torch does not pass keyword arguments to global forward pre-hooks. Fallback: empty; container arguments are
    described in their state after the call.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not CALL_OF_MODULE:
        frame = frame.f_back
    found = {} if frame is None else frame.f_locals
    return found["kwargs"] if "kwargs" in found and "self" in found and found["self"] is module else {}


def unwrapped(tensor: Tensor) -> Tensor:
    """Return the tensor inside the wrappers of ``torch.func`` transforms.

    Fallback: the tensor itself; operations inside a transform are not connected to operations outside of it.
    """
    if not in_transform():
        return tensor
    while is_functorch_wrapped_tensor(tensor) and (inner := get_unwrapped(tensor)) is not tensor:
        tensor = inner
    return tensor


def vmap_numel(tensors: Iterable[Tensor]) -> int:
    """Return the number of calls that one call of a function with these tensors represents under ``torch.vmap``.

    Fallback: 1.
    """
    sizes: dict[int, int] = {}
    if not in_transform():
        return 1
    for each in tensors:
        tensor = each
        while is_functorch_wrapped_tensor(tensor) and (inner := get_unwrapped(tensor)) is not tensor:
            dimension = maybe_get_bdim(tensor)
            if dimension >= 0:
                sizes[maybe_get_level(tensor)] = inner.shape[dimension]
            tensor = inner
    return math.prod(sizes.values())


# Creates a context that disables ``__torch_function__`` of modes and tensor subclasses. Under a function mode, even
# reading a shape is a Python call. This is an alias and no function, since it is entered twice per recorded function.
# Fallback: a null context; recording takes several times as long.
without_functions: Callable[[], contextlib.AbstractContextManager[Any]] = DisableTorchFunction


def version_counter(tensor: Tensor) -> Tensor | None:
    """Return an empty tensor whose version counts each in-place operation on the memory of the given tensor.

    The empty tensor shares the version counter but not the memory, so it keeps no memory alive. Fallback: ``None``;
    later in-place operations are not detected.
    """
    try:
        counter = tensor.detach()
        counter.data = _nothing_on(tensor.device)
    except (RuntimeError, TypeError):
        return None
    return counter


@cache
def _nothing_on(device: torch.device) -> Tensor:
    return torch.empty(0, device=device)


def version_of(tensor: Tensor) -> int | None:
    """Return the number of in-place writes to the tensor, or ``None`` if they are not counted, as in inference mode.

    Fallback: ``None``; in-place operations are recognized only by their names.
    """
    try:
        return None if is_uninitialized(tensor) else tensor._version
    except (RuntimeError, AttributeError):
        return None


# Returns the number of in-place writes to a tensor. Raises a RuntimeError for tensors that do not count them.
# No fallback is needed, since torch documents this attribute and every tensor has it.
counted_version: Callable[[Tensor], int] = attrgetter("_version")


def versions_of(tensors: Iterable[Tensor]) -> list[int | None]:
    """Return the result of :func:`version_of` for each tensor."""
    try:
        return [each._version if type(each) in _WITH_VERSION else version_of(each) for each in tensors]
    except (RuntimeError, AttributeError):
        return [version_of(each) for each in tensors]


_WITH_VERSION = (Tensor, nn.Parameter)


def without_class(tensor: Tensor) -> Tensor:
    """Convert an instance of a user's tensor subclass to a plain tensor, without calling methods of the class.

    These methods may need attributes that new tensors of the class do not have. Tensors of a class that implements the
    operations itself, such as ``DTensor``, are returned unchanged, because their values differ from their memory.
    """
    kind = type(tensor)
    if kind in _WITH_VERSION or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return tensor
    with DisableTorchFunction():
        return Tensor.as_subclass(tensor, Tensor)


def is_compiled(module: nn.Module) -> bool:
    """Return True if ``torch.compile(module)`` or ``module.compile()`` was applied to this module itself."""
    return any(stored_attribute(module, name) is not None for name in ("_orig_mod", "_compiled_call_impl"))


def is_wrapped_for_backward(module: nn.Module) -> bool:
    """Return True if torch wraps the inputs and outputs of a module, because the module has backward hooks."""
    return any(stored_attribute(module, name) for name in ("_backward_hooks", "_backward_pre_hooks"))


def remove_function_mode(mode: Any) -> None:
    """Remove a ``TorchFunctionMode`` of this thread, wherever it is in the stack.

    ``mode.__exit__`` removes the innermost mode, which is a different mode if modes do not end in reverse order. If
    the exit of another mode has removed this mode, the other mode is still on the stack and is removed. Fallback: the
    innermost mode is removed.
    """
    is_known = _function_modes is not None and _pop_mode is not None and _push_mode is not None
    stack = _function_modes() if is_known else ()
    if not any(each is mode for each in stack):
        if stack or not is_known:
            mode.__exit__(None, None, None)
        return
    others = []
    while (top := _pop_mode()) is not mode:
        others.append(top)
    for each in reversed(others):
        _push_mode(each)
