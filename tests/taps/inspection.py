"""Functions that find the hooks on a model and its tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

# All dictionaries in which torch stores the hooks of a module.
_MODULE = [name for name in vars(nn.Module()) if name.endswith(("_hooks", "_with_kwargs", "_always_called"))]
_TENSOR = ["_backward_hooks", "_post_accumulate_grad_hooks"]


def hooks_on(module: nn.Module, tensors: Iterable[Tensor] = ()) -> list[Any]:
    """Return the hooks on a module, its submodules, its parameters and additional tensors."""
    modules = [getattr(each, name) for each in module.modules() for name in _MODULE]
    parameters = [getattr(each, name) or {} for each in (*module.parameters(), *tensors) for name in _TENSOR]
    return [hook for hooks in (*modules, *parameters) for hook in hooks.values()]
