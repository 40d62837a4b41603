"""Packed storage for the reduction states of all sites, copied to the host in one transfer per device."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_recorder.reductions.base import Reduction, merged_along
from lightning_recorder.reductions.compact import Collected
from lightning_recorder.reductions.values import Values

__all__ = ["StateBank", "begin_copy", "row_state"]

Key = TypeVar("Key", bound=Hashable)

# A block is never moved, because reductions hold views of its rows. If a block is full, another block is allocated.
# A block holds 64 rows of the default statistics (1 MiB), or a single very long row.
_MOST_ROWS = 64
_BLOCK_SLOTS = 1 << 18
_MOST_DEFERRED = 64
_MUCH = 20_480  # bytes per site; log the size of larger states

_log = logging.getLogger("lightning_recorder")


# Devices without float64. Their states are on the CPU. Each tensor is copied to the CPU, which synchronizes the device.
_WITHOUT_FLOAT64 = ("mps",)

_CPU = torch.device("cpu")


class _Row(NamedTuple):
    reduction: Reduction
    state: Tensor
    """``[width]`` float64."""
    moves: bool
    """True if the tensors are on a device that cannot hold the state."""
    deferred: list[Tensor]
    """States that have not been merged into the first slots of the state yet."""


@dataclass(frozen=True)
class _Block(Generic[Key]):
    states: Tensor
    """``[rows, width]`` float64."""
    initial: Tensor
    """The state of an empty stream, ``[width]``, on the same device."""
    rows: list[_Row]
    """The rows in use."""
    keys: list[Key]
    free: list[Tensor]
    """The states of the unused rows, the next row last."""


_DEFERRED = attrgetter("deferred")


class StateBank(Generic[Key]):
    """A bank with one row of state per key and device, allocated in blocks of rows.

    Args:
        reduction: The kind of state. If its width depends on the shape of the tensor, each key gets its own width.

    Raises:
        ArgumentError: If the reduction violates the contract. For a reduction that depends on the shape, :meth:`add`
            raises this error instead of the constructor.

    Note:
        Rows are allocated under a lock, because forward and backward hooks run in different threads on a GPU. Updating
        a row needs no lock, because each key is updated by one thread.
    """

    def __init__(self, reduction: Reduction) -> None:
        # Compute both once, since a model may have thousands of sites.
        self._is_sized, self._kind = reduction.is_sized, repr(reduction)
        if self._is_sized:
            reduction.validate()
        self.reduction = reduction
        self._rows: dict[tuple[Key, torch.device], _Row] = {}
        self._blocks: dict[tuple[torch.device, str], list[_Block[Key]]] = {}
        self._seen_on: set[torch.device] = set()
        self._host: tuple[Reduction, list[Tensor], list[Key]] | None = None
        self._lock = threading.Lock()

    @property
    def keys(self) -> list[Key]:
        """Keys that have a state."""
        return list(dict.fromkeys(key for key, _ in self._rows))

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        """Size of the states on all devices, in bytes."""
        return sum(block.states.nbytes for blocks in self._blocks.values() for block in blocks)

    def add(self, key: Key, values: Values) -> None:
        """Update the state of a key with values. A new key starts with the initial state.

        Raises:
            ArgumentError: If the reduction depends on the shape and earlier values of the key had a different shape.
        """
        row = self._rows.get((key, values.raw.device)) or self._allocate(key, values)
        if row.moves:
            values = Values(values.raw.to(row.state.device), values.factor)
        part = row.reduction.update_deferred(row.state, values)
        if part is not None:
            row.deferred.append(part)
            if len(row.deferred) == _MOST_DEFERRED:
                _settle([row])

    def row(self, key: Key, device: torch.device) -> Tensor | None:
        """Return the state of a key as a view of the bank, or ``None`` if the key has no state on the device."""
        row = self._rows.get((key, device))
        return None if row is None or row.moves else row.state

    def put(self, key: Key, state: Tensor) -> None:
        """Set the CPU state, ``[width]`` float64, of a key without a state."""
        with self._lock:
            self._place(key, _CPU, self.reduction).state.copy_(state)

    def _allocate(self, key: Key, values: Values) -> _Row:
        seen_on = values.raw.device
        with self._lock:
            return self._place(key, seen_on, self.reduction if self._is_sized else self.reduction.sized_for(values))

    def _place(self, key: Key, seen_on: torch.device, reduction: Reduction) -> _Row:
        """Allocate a row for a key whose values are on the device ``seen_on``."""
        moves = seen_on.type in _WITHOUT_FLOAT64
        device = torch.device("cpu") if moves else seen_on
        kind = self._kind if reduction is self.reduction else repr(reduction)
        blocks = self._blocks.get((device, kind), [])
        if not blocks or not blocks[-1].free:
            blocks.append(self._new_block(reduction, device, is_first=not blocks))
            self._blocks[device, kind] = blocks  # only now, since the above may fail
        block = blocks[-1]
        row = _Row(reduction, block.free.pop(), moves, [])
        block.keys.append(key)
        block.rows.append(row)
        self._rows[key, seen_on] = row
        self._seen_on.add(seen_on)
        self._host = None
        return row

    def _new_block(self, reduction: Reduction, device: torch.device, *, is_first: bool) -> _Block[Key]:
        if is_first and reduction.nbytes > _MUCH:
            _log.info("%s are kept for each site: %s", f"{reduction.nbytes:,} bytes", reduction)
        rows = min(_MOST_ROWS, max(1, _BLOCK_SLOTS // max(1, reduction.width)))
        # Tensors created in inference mode could not be updated outside of it, so leave this mode. Name the CPU,
        # because the program may have set another default device.
        with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
            if is_first and not self._is_sized:
                reduction.validate()
            initial = reduction.initial().to(device)
            states = initial.repeat(rows, 1)
            if type(states) is not Tensor:
                raise RuntimeError(f"a mode of the program creates {type(states).__name__} instead of tensors")
            return _Block(states, initial, [], [], [states[row] for row in reversed(range(rows))])

    def collect(self, device: torch.device | str = "cpu") -> list[Collected[Key]]:
        """Copy the states of all keys to one device and merge the states that a key has on several devices.

        Copies from a GPU to the host do not wait for the GPU, but :attr:`Collected.states` does. Copies from other
        devices wait.
        """
        if len(self._seen_on) == 1:  # the common case: each key has one row
            return [_copied(blocks, device) for blocks in self._blocks.values()]
        groups: list[Collected[Key]] = []
        places: dict[Key, tuple[Tensor, int]] = {}
        for blocks in self._blocks.values():
            rows = [row for block in blocks for row in block.rows]
            copied = _copied(blocks, device)
            keys, states = copied.keys, copied.states
            new = []
            for index, (key, row) in enumerate(zip(keys, rows, strict=True)):
                if key not in places:
                    places[key] = states, index
                    new.append(index)
                    continue
                there, place = places[key]
                if there.shape[1] == states.shape[1]:  # states of other shapes cannot be merged, so keep the first
                    row.reduction.merge_states(there[place], states[index])
            if len(new) < len(keys):
                states = states[new]
                places.update({keys[index]: (states, place) for place, index in enumerate(new)})
            if new:
                groups.append(Collected(copied.reduction, [keys[index] for index in new], states))
        return groups

    def on_host(self) -> tuple[Reduction, list[Tensor], list[Key]] | None:
        """Return the reduction, the states of each block and all keys, without copying the states.

        Return None unless each key has exactly one state, on the CPU.
        """
        if self._host is None and self._seen_on == {_CPU} and len(self._blocks) == 1 and self.reduction.is_sized:
            (blocks,) = self._blocks.values()
            keys = [key for block in blocks for key in block.keys]
            self._host = blocks[0].rows[0].reduction, [block.states[: len(block.keys)] for block in blocks], keys
        return None if any(map(_DEFERRED, self._rows.values())) else self._host

    def saved(self) -> list[tuple[_Block[Key], Tensor, list[list[Tensor]]]]:
        """Return a copy of all states on their own devices, for :meth:`restore`. Does not synchronize."""
        return [
            (block, block.states[: len(block.keys)].clone(), [list(row.deferred) for row in block.rows])
            for blocks in self._blocks.values()
            for block in blocks
        ]

    def restore(self, saved: Iterable[tuple[_Block[Key], Tensor, list[list[Tensor]]]]) -> None:
        """Restore states from :meth:`saved`, and discard updates since then."""
        kept = {id(block): (states, deferred) for block, states, deferred in saved}
        for blocks in self._blocks.values():
            for block in blocks:
                states, deferred = kept.get(id(block), (block.states[:0], []))
                for row in block.rows[len(deferred) :]:
                    row.deferred.clear()
                    row.state.copy_(row.reduction.initial())
                for row, there in zip(block.rows, deferred, strict=False):
                    row.deferred[:] = there
                block.states[: len(states)] = states

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the states as plain tensors on the CPU, one mapping per row.

        Deferred states, which are not merged yet, are saved separately, so that a resumed stream is bitwise identical
        to a stream that was never interrupted.
        """
        return [
            {
                "key": list(key) if isinstance(key, tuple) else key,
                "device": seen_on.type,
                "state": row_state(row.reduction, row.state),
                **({"heads": torch.stack(row.deferred).to("cpu", copy=True)} if row.deferred else {}),
            }
            for (key, seen_on), row in self._rows.items()
        ]

    def load_state_dict(self, rows: Iterable[Mapping[str, Any]], key_of: Any, device: torch.device) -> None:
        """Continue from a saved state.

        Args:
            rows: The rows from :meth:`state_dict`.
            key_of: A function that converts a saved key to a key of this bank.
            device: The device for rows that were not on a CPU.

        Raises:
            ArgumentError: If a row was saved by another reduction or with different settings.
        """
        for saved in rows:
            reduction = copy.copy(self.reduction)
            reduction._state = None
            reduction.load_state_dict(saved["state"])
            state, reduction._state = reduction.state, None
            seen_on = torch.device("cpu") if saved["device"] == "cpu" else device
            key = key_of(saved["key"])
            row = self._rows.get((key, seen_on)) or self._place(key, seen_on, reduction)
            row.state.copy_(state)
            row.deferred[:] = saved["heads"].to(row.state.device).unbind() if "heads" in saved else ()

    def reset(self) -> None:
        """Start a new stream in every state."""
        for blocks in self._blocks.values():
            for block in blocks:
                for row in block.rows:
                    row.deferred.clear()
                states = block.states[: len(block.keys)]
                if block.rows and self.reduction.ordered:
                    block.rows[0].reduction.restart(states)
                else:
                    states.copy_(block.initial)


def _copied(blocks: Sequence[_Block[Key]], device: torch.device | str) -> Collected[Key]:
    """Return a copy of the states in the blocks. States on a GPU are copied in one transfer."""
    _settle([row for block in blocks for row in block.rows])
    first = blocks[0]
    keys = [key for block in blocks for key in block.keys]
    if len(blocks) == 1:
        states, is_copy = first.states[: len(first.keys)], False
    else:
        states, is_copy = torch.cat([block.states[: len(block.keys)] for block in blocks]), True
    if states.is_cuda and torch.device(device).type == "cpu":
        return Collected(first.rows[0].reduction, keys, *begin_copy(states))
    return Collected(first.rows[0].reduction, keys, states.to(device, copy=not is_copy))


def begin_copy(states: Tensor) -> tuple[Tensor, Any]:
    """Begin to copy values, such as states, from a GPU to the host.

    Returns:
        The copy, and the CUDA event after which the copy is complete, or None if it is already complete.
    """
    try:
        copy = torch.empty(states.shape, dtype=states.dtype, device="cpu", pin_memory=True)
    except RuntimeError:  # the amount of pinned memory is limited
        return states.to("cpu"), None
    with torch.cuda.device(states.device):
        copy.copy_(states, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    return copy, event


def row_state(reduction: Reduction, state: Tensor) -> dict[str, Tensor]:
    """Return the state dict of a reduction for one state row, ``[width]``, on the CPU."""
    return {name: tensor.to("cpu") for name, tensor in reduction.on(state).state_dict().items()}


def _settle(rows: Sequence[_Row]) -> None:
    """Merge the deferred states of all rows in one batch."""
    rows = [row for row in rows if row.deferred]
    reduction = rows[0].reduction.partial if rows else None
    if reduction is None:
        return
    most = max(len(row.deferred) for row in rows)
    padded = [list(row.deferred) for row in rows]
    if any(len(deferred) < most for deferred in padded):  # a single row skips this copy to the device
        none = reduction.initial().to(rows[0].state.device)
        padded = [deferred + [none] * (most - len(deferred)) for deferred in padded]
    merged = merged_along(
        reduction, torch.stack([part for deferred in padded for part in deferred]).unflatten(0, (len(rows), most))
    )
    own = torch.stack([row.state[: reduction.width] for row in rows])
    reduction.merge_states(own, merged)
    for row, slots in zip(rows, own, strict=True):
        row.state[: reduction.width] = slots
        row.deferred.clear()
