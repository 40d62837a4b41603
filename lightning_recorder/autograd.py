"""What torch knows of its graphs and calls, asked through its private names.

Nothing else in the package touches them. Each function says what it answers where torch does not
offer that name, so that a release of torch that renames one costs a detail of the recording and not the run.
"""

from __future__ import annotations

import contextlib
import inspect
from types import CodeType
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle

from lightning_recorder.errors import RecordingError
from lightning_recorder.storage import is_uninitialized

__all__ = [
    "CALL_OF_FUNCTION",
    "CALL_OF_MODULE",
    "LEAF_NUMBER",
    "address_of",
    "current_function_mode",
    "fake_mode",
    "function_behind",
    "graph_task",
    "hooks_of_leaf",
    "in_backward",
    "in_transform",
    "is_compiled",
    "is_tracing",
    "is_transformed",
    "is_view",
    "remove_hook",
    "running_calls",
    "sequence_number",
    "sequence_number_of",
    "set_grad_enabled",
    "unwrapped",
    "version_of",
    "without_functions",
]

try:
    from torch._C import _current_graph_task_id
except ImportError:

    def _current_graph_task_id() -> int:
        return -1


try:
    from torch._C import DisableTorchFunction
except ImportError:
    DisableTorchFunction = contextlib.nullcontext


try:
    from torch._C import _set_grad_enabled
except ImportError:
    _set_grad_enabled = torch.set_grad_enabled  # type: ignore[assignment]  # a class that is called for its effect


try:
    from torch._C import _is_tracing
except ImportError:
    _is_tracing = torch.jit.is_tracing  # type: ignore[attr-defined]  # public, though not declared so


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
    from torch._C._functorch import peek_interpreter_stack
except ImportError:

    def peek_interpreter_stack() -> Any:  # type: ignore[misc]  # torch names a class of its own
        return None


try:
    from torch.overrides import _get_current_function_mode
except ImportError:

    def _get_current_function_mode() -> Any:
        return None


# The code of the frames in which torch calls a module's forward, and a forward of an ``autograd.Function``. Fallback:
# ``None``, and such a function is not recorded as one.
CALL_OF_MODULE: CodeType | None = getattr(getattr(nn.Module, "_call_impl", None), "__code__", None)
CALL_OF_FUNCTION: CodeType | None = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)

# What torch gives to the nodes of leaves, so that the engine runs them first.
_LEAF = 2**64 - 1
LEAF_NUMBER = -1


def fake_mode() -> Any:
    """A context in which tensors have shapes and no values, made of real ones by its ``from_tensor``.

    Raises:
        RecordingError: Where torch does not offer it under this name.
    """
    try:
        from torch._subclasses.fake_tensor import FakeTensorMode
    except ImportError as error:
        raise RecordingError(f"this torch has no fake tensors: {error}; record without device='meta'") from error
    # What a module keeps in plain attributes is real, and becomes fake where it is used.
    return FakeTensorMode(allow_non_fake_inputs=True)


def address_of(storage: UntypedStorage) -> int:
    """The address by which torch knows a piece of memory, the one that a weak reference to it has.

    Fallback: that of such a reference, which takes several times as long to make.
    """
    address = getattr(storage, "_cdata", None)
    return StorageWeakRef(storage).cdata if address is None else int(address)


def current_function_mode() -> object:
    """The innermost ``TorchFunctionMode`` of this thread, or ``None``.

    Fallback: ``None``, and a mode is not taken off for fused modules, whose last bits may then differ in eval mode.
    """
    return _get_current_function_mode()


def function_behind(tensor: Tensor) -> type | None:
    """The ``autograd.Function`` that made a tensor, if one did.

    Fallback: ``None``, and what it gave counts as made by the last function that was seen inside it.
    """
    made_by = tensor.grad_fn if tensor.requires_grad else None
    return getattr(made_by, "_forward_cls", None)


def graph_task() -> int:
    """The number of the backward pass in which this thread is, -1 outside of one.

    Fallback: -1, and the parts that a backward pass left unfinished may be counted into the next.
    """
    return _current_graph_task_id()


def in_backward() -> bool:
    """Whether this thread is inside a backward pass.

    A forward hook that fires there belongs to a recomputation by ``torch.utils.checkpoint``, not to a second forward
    pass. torch's own ``ModuleTracker`` makes the same test. Fallback: ``False``, and recomputed activations are counted
    twice.
    """
    return bool(_current_graph_task_id() != -1)


def in_transform() -> bool:
    """Whether this thread is inside a transform of ``torch.func``, whose values cannot leave it.

    Fallback: ``False``, and only tensors that are themselves wrappers are passed over.
    """
    return peek_interpreter_stack() is not None


def is_tracing() -> bool:
    """Whether this thread is inside ``torch.jit.trace``, in half the time of ``torch.jit.is_tracing``.

    Fallback: that.
    """
    return bool(_is_tracing())


def is_transformed(tensor: Tensor) -> bool:
    """Whether the tensor is a wrapper of ``torch.func``, or of a batched backward pass, whose values cannot leave it.

    Fallback: ``False``, and the update that then raises becomes a warning.
    """
    return bool(is_functorch_wrapped_tensor(tensor) or is_legacy_batchedtensor(tensor) or _is_functional_tensor(tensor))


def set_grad_enabled(enabled: bool) -> None:
    """Switch autograd of this thread on or off, in a twentieth of the time of ``torch.set_grad_enabled``.

    Fallback: that.
    """
    _set_grad_enabled(enabled)


def is_view(tensor: Tensor) -> bool:
    """Whether the tensor is a view, whose place in the graph torch may determine only when it is asked for.

    Fallback: ``True``, and a node that nobody else has asked for may have no owner.
    """
    return bool(getattr(tensor, "_is_view", lambda: True)())


def remove_hook(handle: RemovableHandle) -> None:
    """Remove a hook, also from the two lists out of which torch forgets to take a hook on all modules.

    Left there it would keep every call of a module off its quick path, and torch would warn of it at every compiled
    module. Fallback: just that.
    """
    handle.remove()
    for name in ("_global_forward_hooks_always_called", "_global_forward_hooks_with_kwargs"):
        getattr(torch.nn.modules.module, name, {}).pop(handle.id, None)


def sequence_number() -> int:
    """The number that the next node of the autograd graph of this thread will get.

    Fallback: 0, and a search for the nodes of one module call goes through all that came before it as well.
    """
    return _get_sequence_nr()


def sequence_number_of(node: Node) -> int:
    """The number of a node, -1 for that of a leaf. Nodes made later have greater ones.

    Fallback: 0, as for :func:`sequence_number`.
    """
    number = getattr(node, "_sequence_nr", int)()
    return LEAF_NUMBER if number == _LEAF else number


def hooks_of_leaf(tensor: Tensor) -> list[object]:
    """The hooks on a tensor that is a leaf of the graphs, none for any other.

    Fallback: none, and what is put on such a tensor at each step is put on again.
    """
    return list((getattr(tensor, "_backward_hooks", None) or {}).values()) if tensor.is_leaf else []


def running_calls(module: nn.Module) -> int:
    """How many calls of the module are going on in this thread.

    Fallback: 1, which is right for modules that do not call themselves.
    """
    frame, number = inspect.currentframe(), 0
    while frame is not None:
        number += frame.f_code is CALL_OF_MODULE and frame.f_locals.get("self") is module
        frame = frame.f_back
    return max(1, number)


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor inside the wrappers that transforms of ``torch.func`` have put around it.

    Fallback: the tensor itself, and what happens inside a transform is not joined to what is outside of it.
    """
    while is_functorch_wrapped_tensor(tensor) and (inner := get_unwrapped(tensor)) is not tensor:
        tensor = inner
    return tensor


def without_functions() -> contextlib.AbstractContextManager[Any]:
    """A context in which no ``__torch_function__`` is asked, neither a mode's nor a tensor class's.

    Under a mode even a look at a shape is a call of Python. Fallback: a context that does nothing, and a recording that
    takes several times as long.
    """
    return DisableTorchFunction()


def version_of(tensor: Tensor) -> int | None:
    """How often the tensor was written to, ``None`` if that is not counted, as in inference mode.

    Fallback: ``None``, and what writes into a tensor is told by its name alone.
    """
    try:
        return None if is_uninitialized(tensor) else tensor._version
    except (RuntimeError, AttributeError):
        return None


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of this very module run compiled code, by ``torch.compile(module)`` or ``module.compile()``."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
