"""Copies of states, and compact copies that hold only the nonempty bins of the histograms."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_recorder.bins import BINS
from lightning_recorder.reductions.base import Reduction
from lightning_recorder.reductions.kernels.fused import compact_states
from lightning_recorder.reductions.row import HISTOGRAM

if TYPE_CHECKING:
    from lightning_recorder.reductions.bank import StateBank

__all__ = ["Collected", "CompactStates", "RecycledRows", "compacted"]

Key = TypeVar("Key", bound=Hashable)

_BLOCKS = 2
_ROWS = 64  # rows per block, 1 MiB


@dataclass(frozen=True)
class Collected(Generic[Key]):
    """The states of one kind on one device.

    Args:
        reduction: The kind of state.
        keys: The keys.
        copied: The states, ``[keys, width]`` float64.
        arrival: The CUDA event after which ``copied`` is complete; None if it is already complete.
    """

    reduction: Reduction
    keys: list[Key]
    copied: Tensor
    arrival: Any = None

    @property
    def states(self) -> Tensor:
        """The states, ``[keys, width]`` float64. Waits until they have arrived from a GPU."""
        if self.arrival is not None:
            self.arrival.synchronize()
        return self.copied

    @property
    def has_arrived(self) -> bool:
        """True if :attr:`states` does not wait for a GPU."""
        return self.arrival is None or bool(self.arrival.query())

    @property
    def nbytes(self) -> int:
        """The size of the states in bytes."""
        return self.copied.nbytes


class CompactStates(Collected[Key]):
    """The states of default statistics, in about a tenth of the memory of a :class:`Collected`.

    Args:
        reduction: The reduction, a :class:`~lightning_recorder.reductions.Statistics`.
        keys: The key of each state.
        blocks: The results of :func:`compact_states` and their numbers of rows.
    """

    blocks: list[tuple[NDArray[np.float64], int]]

    def __init__(self, reduction: Reduction, keys: list[Key], blocks: list[tuple[NDArray[np.float64], int]]) -> None:
        vars(self).update(reduction=reduction, keys=keys, blocks=blocks)  # the base class is frozen

    @property
    def nbytes(self) -> int:
        """The size of the states in bytes."""
        return sum(block.nbytes for block, _ in self.blocks)

    @property
    def parts(self) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.uint16], NDArray[np.float64]]:
        """The scalar slots, the sizes, the bins and the counts.

        The scalar slots are all slots but the histogram, ``[keys, width - 2048]``. The sizes are the numbers of
        nonempty bins per histogram, ``[keys]``. The bins are the indices of the nonempty bins, ascending, one histogram
        after the other. The counts are the counts of these bins.
        """
        columns = list(zip(*(_split(block, rows, self.reduction.width) for block, rows in self.blocks), strict=True))
        others, sizes, bins, counts = (each[0] if len(each) == 1 else np.concatenate(each) for each in columns)
        return others, sizes, bins, counts

    @cached_property
    def states(self) -> Tensor:
        """The full states, ``[keys, width]`` float64."""
        others, sizes, bins, counts = self.parts
        whole = np.zeros((len(self.keys), self.reduction.width))
        whole[:, :HISTOGRAM], whole[:, HISTOGRAM + BINS :] = np.split(others, [HISTOGRAM], axis=1)
        whole[np.repeat(np.arange(len(self.keys)), sizes), HISTOGRAM + bins.astype(np.int64)] = counts
        return torch.from_numpy(whole)


def _split(block: NDArray[np.float64], rows: int, width: int) -> tuple[NDArray[Any], ...]:
    slots = rows * (width - BINS)
    sizes = block[slots : slots + rows].view(np.int64)
    first, found = slots + rows, int(sizes.sum())
    bins = block[first + found :].view(np.uint16)[:found]
    return block[:slots].reshape(rows, width - BINS), sizes, bins, block[first : first + found]


def compacted(bank: StateBank[Key], further: RecycledRows[Key] | None = None) -> CompactStates[Key] | None:
    """Return a compact copy of default statistics, or None if only :meth:`StateBank.collect` can copy them.

    A compact copy takes a fraction of the time and of the memory traffic of a full copy. It requires one state per key,
    in host memory, and the compiled code.

    Args:
        bank: The bank of states.
        further: Rows with the states of additional keys.
    """
    found = bank.on_host()
    if found is None:
        return None
    reduction, states, keys = found
    blocks = []
    for each in states:
        block = compact_states(each)
        if block is None:
            return None
        blocks.append((block, len(each)))
    for block, theirs in () if further is None else further.blocks():
        blocks.append((block, len(theirs)))
        keys = keys + theirs
    return CompactStates(reduction, keys, blocks)


class RecycledRows(Generic[Key]):
    """States of any number of keys, of which only the latest 64 to 128 have a full row in memory.

    A key takes a free row when its first tensor arrives. When no row is free, the older half of the rows is copied
    without the empty bins of the histograms, and these rows become free. This is efficient for keys that receive one
    tensor, or a few consecutive tensors, between two resets, such as the sites of a model in a step.

    Requires host memory and the compiled code.
    """

    def __init__(self, reduction: Reduction) -> None:
        self._reduction = reduction
        self._initial = np.empty(0)
        self._taken: list[_Rows[Key]] = []  # oldest first
        self._spare: list[_Rows[Key]] = []
        self._packed: list[tuple[NDArray[np.float64], list[Key]]] = []
        self._rows: dict[Key, Tensor] = {}
        self._gone: set[Key] = set()  # the keys whose rows were copied and freed
        self._thread: int | None = None

    @property
    def is_allocated(self) -> bool:
        """True if rows have been allocated."""
        return bool(self._taken or self._spare)

    @property
    def keys(self) -> list[Key]:
        """The keys that have a state, in the order of their first tensors."""
        return [key for _, keys in self._packed for key in keys] + [*self._rows]

    @property
    def nbytes(self) -> int:
        """The size of the rows and of the copies in bytes."""
        copies = sum(block.nbytes for block, _ in self._packed)
        return copies + sum(rows.states.nbytes for rows in (*self._taken, *self._spare))

    def allocate(self) -> bool:
        """Allocate the rows. Return False if there is no compiled code. Must not be called in a dispatch mode."""
        initial = self._reduction.initial()
        if compact_states(initial[None]) is not None:
            self._initial = initial.numpy()
            self._spare = [_Rows(initial.repeat(_ROWS, 1)) for _ in range(_BLOCKS)]
        return self.is_allocated

    def take(self, key: Key) -> Tensor | None:
        """Return the row of a key, which the caller must update at once. No torch operation runs.

        Returns:
            The row, ``[width]`` float64. None if there are no rows, if the row of the key has been copied and freed, or
            if another thread takes rows.
        """
        row = self._rows.get(key)
        if row is None and key not in self._gone and self.is_allocated:
            if self._thread is None:
                self._thread = threading.get_ident()
            if self._thread == threading.get_ident():  # another thread might update a row during its copy
                row = self._rows[key] = self._next_row(key)
        return row

    def _next_row(self, key: Key) -> Tensor:
        rows = self._taken[-1] if self._taken else None
        if rows is None or len(rows.keys) == _ROWS:
            if not self._spare:
                self._pack(self._taken.pop(0))
            rows = self._spare.pop()
            self._taken.append(rows)
        rows.keys.append(key)
        return rows.rows[len(rows.keys) - 1]

    def _pack(self, rows: _Rows[Key]) -> None:
        """Copy the taken rows without their empty bins, and free them. If all are taken, no torch operation runs."""
        packed = rows.packed()
        if packed is not None:
            self._packed.append((packed, rows.keys))
        self._gone.update(rows.keys)
        for key in rows.keys:
            del self._rows[key]
        self._clear(rows)

    def _clear(self, rows: _Rows[Key]) -> None:
        rows.array[: len(rows.keys)] = self._initial
        rows.keys = []
        self._spare.append(rows)

    def blocks(self) -> Iterator[tuple[NDArray[np.float64], list[Key]]]:
        """Yield copies of all states without empty bins, in the format of :func:`compact_states`, with their keys."""
        yield from self._packed
        for rows in self._taken:
            packed = rows.packed()
            if packed is not None:
                yield packed, [*rows.keys]

    def pop(self, key: Key) -> Tensor | None:
        """Remove a key, and return its state, ``[width]`` float64; None if the key has no state."""
        if key not in self._gone and key not in self._rows:
            return None
        while self._taken:
            self._pack(self._taken.pop(0))
        place, (block, keys) = next((place, each) for place, each in enumerate(self._packed) if key in each[1])
        states = CompactStates(self._reduction, keys, [(block, len(keys))]).states
        row = keys.index(key)
        found = states[row].clone()
        rest = compact_states(torch.cat((states[:row], states[row + 1 :])))
        if rest is not None:
            self._packed[place] = rest, keys[:row] + keys[row + 1 :]
        self._gone.discard(key)
        return found

    def states(self) -> Iterator[tuple[Key, Tensor]]:
        """Yield each key with a copy of its state, ``[width]`` float64."""
        for block, keys in self.blocks():
            yield from zip(keys, CompactStates(self._reduction, keys, [(block, len(keys))]).states, strict=True)

    def reset(self) -> None:
        """Forget all keys and their states."""
        while self._taken:
            self._clear(self._taken.pop())
        self._packed, self._thread = [], None
        self._rows.clear()
        self._gone.clear()


class _Rows(Generic[Key]):
    """A block of rows, and the keys of its first rows, which are taken."""

    def __init__(self, states: Tensor) -> None:
        self.states = states
        self.array: NDArray[np.float64] = states.numpy()
        self.rows: list[Tensor] = [*states]
        self.keys: list[Key] = []

    def packed(self) -> NDArray[np.float64] | None:
        """Return a copy of the taken rows in the format of :func:`compact_states`."""
        return compact_states(self.states if len(self.keys) == len(self.rows) else self.states[: len(self.keys)])
