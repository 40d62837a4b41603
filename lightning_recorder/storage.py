"""Whether a tensor has memory yet, and which."""

from __future__ import annotations

from torch import Tensor, UntypedStorage
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

__all__ = ["is_uninitialized", "storage_of"]

# Of these a look at the class is enough, which is made for every tensor that a capture meets.
_WITH_VALUES = (Tensor, Parameter)


def is_uninitialized(value: object) -> bool:
    """Whether this is a parameter or buffer of a lazy module that has no shape yet."""
    return type(value) not in _WITH_VALUES and isinstance(value, Tensor) and bool(is_lazy(value))


def storage_of(tensor: Tensor) -> UntypedStorage | None:
    """The memory in which the values of a tensor lie; ``None`` where it has none of its own, as a sparse one."""
    if is_uninitialized(tensor):
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # whichever torch raises for the layout or the wrapper
        return None
