"""The tensors of a recording, each with the node that last computed its values."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, UntypedStorage
from torch.nn import Parameter

from lightning_recorder.graph.model import TensorMeta
from lightning_recorder.internals.autograd import in_transform, unwrapped
from lightning_recorder.internals.storage import address_of, hold_address, is_expired, release_address, storage_of

__all__ = ["KnownTensor", "KnownTensors"]


_SWEEP_AFTER = 16  # number of new storages
_LEAST_NODE = -1  # the smallest node id, which marks a tensor that is not tracked
_WITH_SHAPES = (Tensor, Parameter)


class KnownTensor(weakref.ref[Tensor]):
    """A weak reference to a tensor, with the node that returned it, the time of this event, and the shape and dtype.

    ``has_meta`` is False if the shape may not be a tuple of integers. ``output`` is the index of the tensor among the
    outputs of the node.
    """

    __slots__ = ("dtype", "has_meta", "meta", "node", "output", "time")

    node: int
    output: int
    time: int
    has_meta: bool
    meta: TensorMeta
    dtype: torch.dtype


class KnownTensors:
    """Remembers the node that returned each tensor, without keeping any tensor alive.

    A tensor is identified by a weak reference, because Python reuses ids at once. It is also identified by its storage,
    because a write to one tensor changes all tensors with the same storage, such as views.
    """

    def __init__(self) -> None:
        self._time = 0
        self._last_write = 0
        self._tensors: dict[int, KnownTensor] = {}
        # Keyed by the address of the storage. The address is held, so it is not reused. A value is time × 2³² + node,
        # since Python's garbage collector need not traverse numbers.
        self._storages: dict[int, int] = {}
        self._young: list[int] = []
        self._sweep_all_at = 4 * _SWEEP_AFTER

    def __len__(self) -> int:
        """Return the number of known storages."""
        return len(self._storages)

    def bind(
        self, tensor: Tensor, node: int, *, wrote: bool = False, meta: TensorMeta | None = None, output: int = 0
    ) -> None:
        """Remember the node that returned a tensor. With ``wrote``, also remember it for tensors with the same memory.

        ``output`` is the index of the tensor among the outputs of the node. :meth:`find` returns ``meta``.
        """
        self._time = time = self._time + 1
        known = self._tensors[id(tensor)] = KnownTensor(tensor)
        known.node, known.output, known.time, known.has_meta = node, output, time, False
        # The shape of a tensor of another class may not be a tuple of integers. For a nested tensor, ``meta.shape`` is
        # empty.
        if meta is not None and type(tensor) in _WITH_SHAPES and (meta.shape or not tensor.is_nested):
            known.has_meta, known.meta, known.dtype = True, meta, tensor.dtype
        if wrote:
            self._last_write = time
        storage = storage_of(unwrapped(tensor) if in_transform() else tensor)
        if storage is None:
            return
        address = address_of(storage)
        if address not in self._storages:
            self._hold(storage, address, (time << 32) + node)
        elif wrote:
            self._storages[address] = (time << 32) + node

    def bind_plain(self, tensor: Tensor, node: int, meta: TensorMeta) -> None:
        """Remember the node that returned a tensor. Like :meth:`bind`, for plain tensors outside of transforms."""
        self._time = time = self._time + 1
        known = self._tensors[id(tensor)] = KnownTensor(tensor)
        known.node, known.output, known.time, known.meta, known.dtype = node, 0, time, meta, tensor.dtype
        known.has_meta = bool(meta.shape) or not tensor.is_nested
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a sparse tensor or a wrapper has no storage
            return
        address = address_of(storage)
        if address not in self._storages:
            self._hold(storage, address, (time << 32) + node)

    def _hold(self, storage: UntypedStorage, address: int, value: int) -> None:
        hold_address(storage)
        self._storages[address] = value
        self._young.append(address)
        if len(self._young) >= 2 * _SWEEP_AFTER:
            self._sweep()

    def _sweep(self) -> None:
        """Release the held addresses of storages whose memory is freed.

        A held address keeps a small block between other allocations, so the allocator cannot merge the free blocks
        around it. This raised the peak memory of a step by a tenth. Most storages that are freed before the backward
        pass are freed early. So each new storage is checked twice soon after its creation, and all storages are checked
        only when their number has doubled.
        """
        self._forget_the_dead(self._young)
        self._young = self._young[_SWEEP_AFTER:]
        if len(self._storages) >= self._sweep_all_at:
            self._forget_the_dead(list(self._storages))
            self._sweep_all_at = 2 * len(self._storages) + 2 * _SWEEP_AFTER

    def _forget_the_dead(self, addresses: list[int]) -> None:
        for address in filter(is_expired, filter(self._storages.__contains__, addresses)):
            del self._storages[address]
            release_address(address)

    def find(self, tensor: Tensor) -> KnownTensor | None:
        """Return the entry of a tensor; None if its shape is unknown, or if the tensor was changed after the entry."""
        known = self._tensors.get(id(tensor))
        if known is None or not known.has_meta or known.time < self._last_write or known() is not tensor:
            return None
        # Compare shape and dtype, since the tensor may have been resized, or its ``data`` may have been assigned.
        return known if known.meta.shape == tensor.shape and known.dtype is tensor.dtype else None

    def is_bound(self, tensor: Tensor) -> bool:
        """Return True if this tensor object was bound to a node. Other tensors with the same memory do not count."""
        known = self._tensors.get(id(tensor))
        return known is not None and known() is tensor

    def output(self, tensor: Tensor) -> int:
        """Return the index of a tensor among the outputs of its node; 0 if this tensor object was not bound."""
        known = self._tensors.get(id(tensor))
        return known.output if known is not None and known() is tensor else 0

    def entry(self, tensor: Tensor) -> KnownTensor | None:
        """Return the entry of a bound tensor for :meth:`restore`, or None."""
        known = self._tensors.get(id(tensor))
        return known if known is not None and known() is tensor else None

    def restore(self, tensor: Tensor, known: KnownTensor) -> None:
        """Bind a tensor again to the node that it was bound to before."""
        self._tensors[id(tensor)] = known

    def move(self, tensor: Tensor, output: int) -> None:
        """Change the index of a bound tensor among the outputs of its node."""
        known = self._tensors.get(id(tensor))
        if known is not None and known() is tensor:
            known.output = output

    def of(self, tensor: Tensor, *, own: bool = False) -> int | None:
        """Return the node that last computed the tensor's values; ``None`` if it was not observed.

        With ``own``, return ``None`` for a tensor object that was not bound, even if its memory is known. The memory of
        a parameter may be known from its initialization.
        """
        known = self._tensors.get(id(tensor))
        if known is not None and known() is not tensor:
            known = None
        if known is None and own:
            return None
        inner = unwrapped(tensor)
        if known is None and inner is not tensor and self.is_bound(inner):
            known = self._tensors[id(inner)]  # an argument of a transform may be a view of an earlier tensor
        storage = storage_of(inner)
        writer = None if storage is None else self._storages.get(address_of(storage))
        if writer is None:
            return None if known is None else known.node
        time = (writer - _LEAST_NODE) >> 32
        return writer - (time << 32) if known is None or time > known.time else known.node

    def clear(self) -> None:
        """Forget all tensors."""
        self._tensors.clear()
        for address in self._storages:
            release_address(address)
        self._storages.clear()
        self._young.clear()

    def __del__(self) -> None:
        self.clear()
