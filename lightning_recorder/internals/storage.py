"""Tensor storage, including tensors that are not initialized yet."""

from __future__ import annotations

from torch import Tensor, UntypedStorage
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

__all__ = ["is_uninitialized", "storage_of"]

# Fast path for the common classes, since this check runs for every tensor in a capture.
_WITH_VALUES = (Tensor, Parameter)


def is_uninitialized(value: object) -> bool:
    """Return True for a parameter or buffer of a lazy module that has no shape yet."""
    return type(value) not in _WITH_VALUES and isinstance(value, Tensor) and bool(is_lazy(value))


def storage_of(tensor: Tensor) -> UntypedStorage | None:
    """Return the storage of a tensor; ``None`` if it has none of its own, such as a sparse tensor."""
    if is_uninitialized(tensor):
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # the exception depends on the layout or the wrapper
        return None
