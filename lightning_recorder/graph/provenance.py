"""Which node gave a tensor its present values."""

from __future__ import annotations

import weakref

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_recorder.autograd import address_of, unwrapped
from lightning_recorder.storage import storage_of

__all__ = ["Provenance"]


_SWEEP_AFTER = 16  # storages


class _Known(weakref.ref[Tensor]):
    """A tensor, which may be gone, with the node that gave it, and when."""

    __slots__ = ("node", "time")

    node: int
    time: int


class Provenance:
    """Remembers for each tensor the node that gave it, and keeps none of them alive.

    A tensor is known by a weak reference, because the ids of tensors are used again at once, and by its storage,
    because views and in-place operations write to one tensor and read from another.
    """

    def __init__(self) -> None:
        self._time = 0
        self._tensors: dict[int, _Known] = {}
        # By its address, which the weak reference keeps from being used again, and nothing of its memory.
        self._storages: dict[int, StorageWeakRef] = {}
        self._writers: dict[int, tuple[int, int]] = {}
        self._young: list[int] = []
        self._sweep_all_at = 4 * _SWEEP_AFTER

    def __len__(self) -> int:
        """How many pieces of memory are known."""
        return len(self._storages)

    def bind(self, tensor: Tensor, node: int, *, wrote: bool = False) -> None:
        """Remember which node gave a tensor; with ``wrote``, all that share its memory have their values from there."""
        self._time += 1
        known = self._tensors[id(tensor)] = _Known(tensor)
        known.node, known.time = node, self._time
        storage = storage_of(unwrapped(tensor))
        if storage is not None and (wrote or address_of(storage) not in self._storages):
            address = address_of(storage)
            self._storages[address] = StorageWeakRef(storage)
            self._writers[address] = node, self._time
            self._young.append(address)
            if len(self._young) >= 2 * _SWEEP_AFTER:
                self._sweep()

    def _sweep(self) -> None:
        """Let go of storages whose memory is gone.

        What is left of them lies between the memory of others, which the allocator then cannot join: the peak of a step
        was a tenth higher. What dies before the backward pass dies young, so each is looked at twice, and all of them
        only when they have become twice as many.
        """
        self._forget_the_dead(self._young)
        self._young = self._young[_SWEEP_AFTER:]
        if len(self._storages) >= self._sweep_all_at:
            self._forget_the_dead(list(self._storages))
            self._sweep_all_at = 2 * len(self._storages) + 2 * _SWEEP_AFTER

    def _forget_the_dead(self, addresses: list[int]) -> None:
        for address in addresses:
            storage = self._storages.get(address)
            if storage is not None and storage.expired():
                del self._storages[address], self._writers[address]

    def of(self, tensor: Tensor, *, own: bool = False) -> int | None:
        """The node that gave the tensor its present values; ``None`` when none was seen.

        Args:
            tensor: Any tensor.
            own: Ask for the tensor alone and not for its memory while it was not bound, as for a parameter, whose
                memory may be known from its making.
        """
        known = self._tensors.get(id(tensor))
        if known is not None and known() is not tensor:
            known = None
        if known is None and own:
            return None
        storage = storage_of(unwrapped(tensor))
        writer = None if storage is None else self._writers.get(address_of(storage))
        if known is None:
            return None if writer is None else writer[0]
        return known.node if writer is None or writer[1] <= known.time else writer[0]

    def clear(self) -> None:
        """Forget all tensors."""
        self._tensors.clear()
        self._storages.clear()
        self._writers.clear()
