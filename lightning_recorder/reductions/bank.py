"""Where the states of all sites lie: packed, on their devices, and copied to the host in one transfer each."""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_recorder.reductions.base import Reduction
from lightning_recorder.reductions.scalar import merged_along
from lightning_recorder.reductions.values import Values

__all__ = ["Collected", "StateBank"]

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
    rows: list[_Row]
    """Those that are taken."""
    keys: list[Key]


@dataclass(frozen=True)
class Collected(Generic[Key]):
    """States of one kind, on the CPU."""

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

    def _allocate(self, key: Key, values: Values) -> _Row:
        seen_on = values.raw.device
        moves = seen_on.type in _WITHOUT_FLOAT64
        device = torch.device("cpu") if moves else seen_on
        # Validation may run in inference mode; a tensor made there could never be updated outside it again.
        with self._lock, torch.inference_mode(False), torch.no_grad():
            reduction = self.reduction.sized_for(values)
            blocks = self._blocks.setdefault((device, repr(reduction)), [])
            if not blocks and not self.reduction.is_sized:
                reduction.validate()
            if not blocks and reduction.nbytes > _MUCH:
                _log.info("%s are kept for each site: %s", f"{reduction.nbytes:,} bytes", reduction)
            if not blocks or len(blocks[-1].keys) == len(blocks[-1].states):
                rows = min(_MOST_ROWS, max(1, _BLOCK_WORDS // max(1, reduction.width)))
                blocks.append(_Block(reduction.initial().to(device).repeat(rows, 1), [], []))
            block = blocks[-1]
            row = _Row(reduction, block.states[len(block.keys)], moves, [])
            block.keys.append(key)
            block.rows.append(row)
            self._rows[key, seen_on] = row
            return row

    def collect(self) -> list[Collected[Key]]:
        """The states of all keys on the CPU, those of one key on several devices merged.

        Waits for the devices, once for all states of one kind on each.
        """
        groups: list[Collected[Key]] = []
        places: dict[Key, Tensor] = {}
        for blocks in self._blocks.values():
            rows = [row for block in blocks for row in block.rows]
            keys = [key for block in blocks for key in block.keys]
            _settle(rows)
            # A copy in any case, since the states go on; on a GPU a single one travels.
            states = torch.cat([block.states[: len(block.keys)] for block in blocks]).to("cpu")
            new = []
            for index, (key, row) in enumerate(zip(keys, rows, strict=True)):
                if key not in places:
                    new.append(index)
                    places[key] = states[index]
                elif len(places[key]) == len(states[index]):  # of another shape on another device: one is enough
                    row.reduction.merge_states(places[key], states[index])
            if len(new) < len(keys):
                states = states[new]
                places.update(zip([keys[index] for index in new], states, strict=True))
            if new:
                groups.append(Collected(rows[0].reduction, [keys[index] for index in new], states))
        return groups

    def reset(self) -> None:
        """Begin a new stream in every state."""
        for blocks in self._blocks.values():
            for block in blocks:
                for row in block.rows:
                    row.heads.clear()
                if block.rows:
                    block.rows[0].reduction.restart(block.states[: len(block.keys)])


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
