"""Tensor storage, including tensors that are not initialized yet."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

__all__ = ["StorageReference", "is_expired", "is_uninitialized", "storage_of"]

# Fast path for the common classes, since this check runs for every tensor in a capture.
_WITH_VALUES = (Tensor, Parameter)


# Returns True if the memory of the storage at an address is freed. A reference to the storage must exist. torch's own
# method calls this one through two others, and it is called for each storage several times.
# Fallback: no storage counts as freed before the end of the capture.
is_expired: Callable[[int], bool] = getattr(UntypedStorage, "_expired", lambda address: False)


class StorageReference(StorageWeakRef):
    """A weak reference to a storage with the node that wrote into it last. Its address is not reused meanwhile.

    Unlike torch's own class it creates no method for each object: a capture creates thousands of references.
    """

    __slots__ = ("node", "time")

    node: int
    time: int

    if hasattr(UntypedStorage, "_weak_ref") and hasattr(UntypedStorage, "_free_weak_ref"):
        _free = staticmethod(UntypedStorage._free_weak_ref)

        def __init__(self, storage: UntypedStorage) -> None:
            self.cdata = storage._weak_ref()

        def __del__(self) -> None:
            self._free(self.cdata)


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
