"""Tensor storage, including tensors that are not initialized yet."""

from __future__ import annotations

import sys
from collections.abc import Callable
from operator import attrgetter

from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

__all__ = [
    "address_of",
    "hold_address",
    "is_expired",
    "is_uninitialized",
    "reference_counts",
    "release_address",
    "storage_of",
]

# Fast path for the common classes, since this check runs for every tensor in a capture.
_WITH_VALUES = (Tensor, Parameter)

# Returns the address by which torch identifies a storage.
# Fallback: create a weak reference and return its address, which takes several times as long.
address_of: Callable[[UntypedStorage], int] = (
    attrgetter("_cdata") if hasattr(UntypedStorage, "_cdata") else lambda storage: StorageWeakRef(storage).cdata
)

# Weak references to storages as plain addresses. A capture creates thousands of references, and torch's own class would
# create a method for each. ``hold_address`` returns the address of a storage, and prevents its reuse without keeping
# the memory alive. Each hold must be released once. ``is_expired`` returns True if the memory at a held address is
# freed.
# Fallback: addresses may be reused during a capture, and no storage counts as freed.
hold_address: Callable[[UntypedStorage], int] = getattr(UntypedStorage, "_weak_ref", address_of)
release_address: Callable[[int], object] = getattr(UntypedStorage, "_free_weak_ref", lambda address: None)
is_expired: Callable[[int], bool] = getattr(UntypedStorage, "_expired", lambda address: False)


def is_uninitialized(value: object) -> bool:
    """Return True for a parameter or buffer of a lazy module that has no shape yet."""
    return type(value) not in _WITH_VALUES and isinstance(value, Tensor) and bool(is_lazy(value))


def reference_counts(tensor: Tensor) -> tuple[int, int]:
    """Return the reference counts of a tensor in C++ and in Python.

    Fallback: -1 for C++, which equals no real count, so no tensor is considered unshared.
    """
    count = getattr(tensor, "_use_count", None)
    return (-1 if count is None else int(count())), sys.getrefcount(tensor)


def storage_of(tensor: Tensor) -> UntypedStorage | None:
    """Return the storage of a tensor; ``None`` for a tensor without a storage, such as a sparse tensor."""
    if type(tensor) not in _WITH_VALUES and is_uninitialized(tensor):
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # the exception depends on the layout or the wrapper
        return None
