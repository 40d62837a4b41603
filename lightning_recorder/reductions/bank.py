"""Where the states of all sites lie: packed, on their devices, and copied to the host in one transfer each."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_recorder.reductions.base import Reduction
from lightning_recorder.reductions.scalar import merged_along
from lightning_recorder.reductions.values import Values

__all__ = ["Collected", "StateBank", "row_state"]

Key = TypeVar("Key", bound=Hashable)

# A block is never moved, because reductions hold views of its rows; a model with more sites on one device gets further
# blocks. Of rows of the default statistics it has 64 (1 MiB), of very long ones a single one.
_MOST_ROWS = 64
_BLOCK_WORDS = 1 << 18
_MOST_HEADS = 64
_MUCH = 20_480  # bytes for each site; more is told

_log = logging.getLogger("lightning_recorder")


# They hold their states on the CPU, and each tensor is copied there, which waits.
_WITHOUT_FLOAT64 = ("mps",)

_CPU = torch.device("cpu")


class _Row(NamedTuple):
    reduction: Reduction
    state: Tensor
    """``[width]`` float64."""
    moves: bool
    """Whether the tensors are on a device that the state cannot be on."""
    heads: list[Tensor]
    """What is still to be merged into the first words of the state."""


@dataclass(frozen=True)
class _Block(Generic[Key]):
    states: Tensor
    """``[rows, width]`` float64."""
    initial: Tensor
    """That of an empty stream, ``[width]``, on the same device."""
    rows: list[_Row]
    """Those that are taken."""
    keys: list[Key]


@dataclass(frozen=True)
class Collected(Generic[Key]):
    """States of one kind, on one device."""

    reduction: Reduction
    keys: list[Key]
    states: Tensor
    """``[keys, width]`` float64."""


class StateBank(Generic[Key]):
    """One row of state per key and device, in blocks of rows.

    Args:
        reduction: The kind of state; of one whose width depends on the shape of the tensor, each key gets its own.

    Raises:
        ArgumentError: If the reduction does not keep the contract; of one that depends on the shape, from :meth:`add`.

    Note:
        Rows are handed out under a lock, because on a GPU forward and backward hooks run in different threads; updating
        a row takes none, as each key is updated by one thread.
    """

    def __init__(self, reduction: Reduction) -> None:
        if reduction.is_sized:
            reduction.validate()
        self.reduction = reduction
        self._rows: dict[tuple[Key, torch.device], _Row] = {}
        self._blocks: dict[tuple[torch.device, str], list[_Block[Key]]] = {}
        self._lock = threading.Lock()

    @property
    def keys(self) -> list[Key]:
        """The keys that have a state."""
        return list(dict.fromkeys(key for key, _ in self._rows))

    @property
    def nbytes(self) -> int:
        """Bytes of state on all devices."""
        return sum(block.states.nbytes for blocks in self._blocks.values() for block in blocks)

    def add(self, key: Key, values: Values) -> None:
        """Take values into the state of a key, which is initial when it is new.

        Raises:
            ArgumentError: If the reduction depends on the shape, and earlier values of the key had another.
        """
        row = self._rows.get((key, values.raw.device)) or self._allocate(key, values)
        if row.moves:
            values = Values(values.raw.to(row.state.device), values.factor)
        head = row.reduction.begin(row.state, values)
        if head is not None:
            row.heads.append(head)
            if len(row.heads) == _MOST_HEADS:
                _settle([row])

    def row(self, key: Key) -> Tensor | None:
        """The state of what a key has seen on the CPU, where it lies; ``None`` if there is none."""
        row = self._rows.get((key, _CPU))
        return None if row is None else row.state

    def _allocate(self, key: Key, values: Values) -> _Row:
        seen_on = values.raw.device
        with self._lock:
            return self._place(key, seen_on, self.reduction.sized_for(values))

    def _place(self, key: Key, seen_on: torch.device, reduction: Reduction) -> _Row:
        """A new row for what is seen of a key on a device."""
        moves = seen_on.type in _WITHOUT_FLOAT64
        device = torch.device("cpu") if moves else seen_on
        # Validation may run in inference mode; a tensor made there could never be updated outside it again.
        with torch.inference_mode(False), torch.no_grad():
            blocks = self._blocks.setdefault((device, repr(reduction)), [])
            if not blocks and not self.reduction.is_sized:
                reduction.validate()
            if not blocks and reduction.nbytes > _MUCH:
                _log.info("%s are kept for each site: %s", f"{reduction.nbytes:,} bytes", reduction)
            if not blocks or len(blocks[-1].keys) == len(blocks[-1].states):
                rows = min(_MOST_ROWS, max(1, _BLOCK_WORDS // max(1, reduction.width)))
                initial = reduction.initial().to(device)
                blocks.append(_Block(initial.repeat(rows, 1), initial, [], []))
            block = blocks[-1]
            row = _Row(reduction, block.states[len(block.keys)], moves, [])
            block.keys.append(key)
            block.rows.append(row)
            self._rows[key, seen_on] = row
            return row

    def collect(self, device: torch.device | str = "cpu") -> list[Collected[Key]]:
        """Copies of the states of all keys on one device, those of one key on several devices merged.

        Waits for the devices, once for all states of one kind on each; on the device itself for nothing.
        """
        groups: list[Collected[Key]] = []
        places: dict[Key, tuple[Tensor, int]] = {}
        for blocks in self._blocks.values():
            rows = [row for block in blocks for row in block.rows]
            keys = [key for block in blocks for key in block.keys]
            _settle(rows)
            # A copy in any case, since the states go on; on a GPU a single one travels.
            states = torch.cat([block.states[: len(block.keys)] for block in blocks]).to(device)
            new = []
            for index, (key, row) in enumerate(zip(keys, rows, strict=True)):
                if key not in places:
                    places[key] = states, index
                    new.append(index)
                    continue
                there, place = places[key]
                if there.shape[1] == states.shape[1]:  # of another shape on another device: one is enough
                    row.reduction.merge_states(there[place], states[index])
            if len(new) < len(keys):
                states = states[new]
                places.update({keys[index]: (states, place) for place, index in enumerate(new)})
            if new:
                groups.append(Collected(rows[0].reduction, [keys[index] for index in new], states))
        return groups

    def saved(self) -> list[tuple[_Block[Key], Tensor, list[list[Tensor]]]]:
        """A copy of all states where they lie, for :meth:`restore`; waits for nothing."""
        return [
            (block, block.states[: len(block.keys)].clone(), [list(row.heads) for row in block.rows])
            for blocks in self._blocks.values()
            for block in blocks
        ]

    def restore(self, saved: Iterable[tuple[_Block[Key], Tensor, list[list[Tensor]]]]) -> None:
        """Put back what was saved; what was recorded since is forgotten."""
        kept = {id(block): (states, heads) for block, states, heads in saved}
        for blocks in self._blocks.values():
            for block in blocks:
                states, heads = kept.get(id(block), (block.states[:0], []))
                for row in block.rows[len(heads) :]:
                    row.heads.clear()
                    row.state.copy_(row.reduction.initial())
                for row, there in zip(block.rows, heads, strict=False):
                    row.heads[:] = there
                block.states[: len(states)] = states

    def state_dict(self) -> list[dict[str, Any]]:
        """The states as plain tensors on the CPU, a mapping for each row.

        What is still to be merged is given apart, so that a stream goes on to the bit as if it had not been saved.
        """
        return [
            {
                "key": list(key) if isinstance(key, tuple) else key,
                "device": seen_on.type,
                "state": row_state(row.reduction, row.state),
                **({"heads": torch.stack(row.heads).to("cpu", copy=True)} if row.heads else {}),
            }
            for (key, seen_on), row in self._rows.items()
        ]

    def load_state_dict(self, rows: Iterable[Mapping[str, Any]], key_of: Any, device: torch.device) -> None:
        """Go on from a state.

        Args:
            rows: As :meth:`state_dict` gives them.
            key_of: Makes the key of what ``state_dict`` gives for it.
            device: Where the rows go that were not on a CPU.

        Raises:
            ArgumentError: If a row is that of another reduction, or one with other settings.
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
            row.heads[:] = saved["heads"].to(row.state.device).unbind() if "heads" in saved else ()

    def reset(self) -> None:
        """Begin a new stream in every state."""
        for blocks in self._blocks.values():
            for block in blocks:
                for row in block.rows:
                    row.heads.clear()
                states = block.states[: len(block.keys)]
                if block.rows and self.reduction.ordered:
                    block.rows[0].reduction.restart(states)
                else:
                    states.copy_(block.initial)


def row_state(reduction: Reduction, state: Tensor) -> dict[str, Tensor]:
    """The state dict of a reduction whose state is a row, ``[width]``, on the CPU."""
    return {name: tensor.to("cpu") for name, tensor in reduction.on(state).state_dict().items()}


def _settle(rows: Sequence[_Row]) -> None:
    """Merge what was left to be merged, of all rows at once."""
    rows = [row for row in rows if row.heads]
    reduction = rows[0].reduction.head if rows else None
    if reduction is None:
        return
    most = max(len(row.heads) for row in rows)
    padded = [list(row.heads) for row in rows]
    if any(len(heads) < most for heads in padded):  # a copy to the device, for which one row alone need not wait
        none = reduction.initial().to(rows[0].state.device)
        padded = [heads + [none] * (most - len(heads)) for heads in padded]
    merged = merged_along(
        reduction, torch.stack([head for heads in padded for head in heads]).unflatten(0, (len(rows), most))
    )
    own = torch.stack([row.state[: reduction.width] for row in rows])
    reduction.merge_states(own, merged)
    for row, words in zip(rows, own, strict=True):
        row.state[: reduction.width] = words
        row.heads.clear()
