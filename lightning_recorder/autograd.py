"""The state of torch's engine, asked through its private names.

Nothing else in the package touches them. Each function says what it answers where torch does not
offer that name, so that a release of torch that renames one costs a detail of the recording and not the run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

__all__ = ["current_function_mode", "in_backward", "is_transformed", "remove_hook"]

try:
    from torch._C import _current_graph_task_id
except ImportError:

    def _current_graph_task_id() -> int:
        return -1


try:
    from torch._C._functorch import is_functorch_wrapped_tensor
except ImportError:

    def is_functorch_wrapped_tensor(tensor: Tensor) -> bool:
        return False


try:
    from torch.overrides import _get_current_function_mode
except ImportError:

    def _get_current_function_mode() -> Any:
        return None


def current_function_mode() -> object:
    """The innermost ``TorchFunctionMode`` of this thread, or ``None``.

    Fallback: ``None``, and a mode is not taken off for fused modules, whose last bits may then differ in eval mode.
    """
    return _get_current_function_mode()


def in_backward() -> bool:
    """Whether this thread is inside a backward pass.

    A forward hook that fires there belongs to a recomputation by ``torch.utils.checkpoint``, not to a second forward
    pass. torch's own ``ModuleTracker`` makes the same test. Fallback: ``False``, and recomputed activations are counted
    twice.
    """
    return bool(_current_graph_task_id() != -1)


def is_transformed(tensor: Tensor) -> bool:
    """Whether the tensor is a wrapper of ``torch.func`` (``vmap``, ``grad``), whose values cannot leave the transform.

    Fallback: ``False``, and the update that then raises becomes a warning.
    """
    return bool(is_functorch_wrapped_tensor(tensor))


def remove_hook(handle: RemovableHandle) -> None:
    """Remove a hook, also from the two lists out of which torch forgets to take a hook on all modules.

    Left there it would keep every call of a module off its quick path, and torch would warn of it at every compiled
    module. Fallback: just that.
    """
    handle.remove()
    for name in ("_global_forward_hooks_always_called", "_global_forward_hooks_with_kwargs"):
        getattr(torch.nn.modules.module, name, {}).pop(handle.id, None)
