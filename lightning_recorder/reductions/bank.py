"""Where the states of all sites lie: packed, on their devices, and copied to the host in one transfer each."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from lightning_recorder.reductions.base import Reduction

__all__ = ["StateBank"]

Key = TypeVar("Key", bound=Hashable)

# Rows per block. A block is never moved, because reductions hold views of its rows; a model with more sites on one
# device gets further blocks.
_ROWS = 64


class StateBank(Generic[Key]):
    """One row of state per key and device, in blocks of rows.

    Args:
        reduction: The kind of state.

    Note:
        Rows are handed out under a lock, because on a GPU forward and backward hooks run in different threads; updating
        a row takes none, as each key is updated by one thread.
    """

    def __init__(self, reduction: type[Reduction]) -> None:
        self.reduction = reduction
        self._rows: dict[tuple[Key, torch.device], Tensor] = {}
        self._blocks: dict[torch.device, list[tuple[Tensor, list[Key]]]] = {}
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of state on all devices."""
        return sum(block.nbytes for blocks in self._blocks.values() for block, _ in blocks)

    def row(self, key: Key, device: torch.device) -> Tensor:
        """The state of a key on a device, ``[width]`` float64; initial when it is new."""
        row = self._rows.get((key, device))
        return row if row is not None else self._allocate(key, device)

    def _allocate(self, key: Key, device: torch.device) -> Tensor:
        # Validation may run in inference mode; a tensor made there could never be updated outside it again.
        with self._lock, torch.inference_mode(False):
            blocks = self._blocks.setdefault(device, [])
            if not blocks or len(blocks[-1][1]) == len(blocks[-1][0]):
                blocks.append((self.reduction.initial().to(device).repeat(_ROWS, 1), []))
            block, keys = blocks[-1]
            row = block[len(keys)]
            keys.append(key)
            self._rows[key, device] = row
            return row

    def collect(self) -> dict[Key, Tensor]:
        """The states by key on the CPU, ``[width]`` each, those of one key on several devices merged.

        Waits for the devices, once for each block of rows.
        """
        states: dict[Key, Tensor] = {}
        for blocks in self._blocks.values():
            for block, keys in blocks:
                for key, state in zip(keys, block[: len(keys)].cpu(), strict=True):
                    if key in states:
                        self.reduction.merge_states(states[key], state)
                    else:
                        states[key] = state.clone() if block.device.type == "cpu" else state
        return states

    def reset(self) -> None:
        """Make every state initial again."""
        for blocks in self._blocks.values():
            for block, _ in blocks:
                block.copy_(self.reduction.initial())
