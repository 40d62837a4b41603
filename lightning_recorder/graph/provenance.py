"""Which node gave a tensor its present values."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_recorder.autograd import unwrapped

__all__ = ["Provenance", "is_lazy"]


@dataclass(frozen=True)
class _Origin:
    """Which node gave a tensor or wrote into a storage, and when."""

    node: int
    time: int


class Provenance:
    """Remembers for each tensor the node that gave it, and keeps none of them alive.

    A tensor is known by a weak reference, because the ids of tensors are used again at once, and by its storage,
    because views and in-place operations write to one tensor and read from another.
    """

    def __init__(self) -> None:
        self._time = 0
        self._tensors: dict[int, tuple[weakref.ref[Tensor], _Origin]] = {}
        self._storages: dict[int, tuple[StorageWeakRef, _Origin]] = {}

    def bind(self, tensor: Tensor, node: int, *, wrote: bool = False) -> None:
        """Remember which node gave a tensor; with ``wrote``, all that share its memory have their values from there."""
        self._time += 1
        origin = _Origin(node, self._time)
        self._tensors[id(tensor)] = (weakref.ref(tensor), origin)
        storage = _storage(tensor)
        # The weak reference keeps the address of the storage from being used again, and nothing of its memory.
        if storage is not None and (wrote or storage.cdata not in self._storages):
            self._storages[storage.cdata] = (storage, origin)

    def of(self, tensor: Tensor, *, own: bool = False) -> int | None:
        """The node that gave the tensor its present values; ``None`` when none was seen.

        Args:
            tensor: Any tensor.
            own: Ask for the tensor alone and not for its memory while it was not bound, as for a parameter, whose
                memory may be known from its making.
        """
        reference, origin = self._tensors.get(id(tensor), (None, None))
        bound = origin if reference is not None and reference() is tensor else None
        if bound is None and own:
            return None
        storage = _storage(tensor)
        _, written = self._storages.get(storage.cdata, (None, None)) if storage is not None else (None, None)
        seen = [each for each in (bound, written) if each is not None]
        return max(seen, key=lambda each: each.time).node if seen else None

    def clear(self) -> None:
        """Forget all tensors."""
        self._tensors.clear()
        self._storages.clear()


def _storage(tensor: Tensor) -> StorageWeakRef | None:
    try:
        return None if is_lazy(tensor) else StorageWeakRef(unwrapped(tensor).untyped_storage())
    except (NotImplementedError, RuntimeError):  # of torch: sparse tensors have none
        return None


def is_lazy(tensor: Tensor) -> bool:
    """Whether the tensor is a parameter or buffer of a lazy module that has no shape yet."""
    return bool(nn.parameter.is_lazy(tensor))
