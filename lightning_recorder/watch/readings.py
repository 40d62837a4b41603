"""Read the loss and the gradient norm of every step from the device, without waiting for it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from lightning_recorder.watch.flags import StepFlags
from lightning_recorder.watch.kept import KeptBatch

__all__ = ["LoggedReading", "Reading", "ReadingQueue"]

_KIND = attrgetter("dtype", "shape", "requires_grad", "device")

_MOST_WAITING = 16
"""The number of steps after which values are read from a device without events. Reading them waits for the device."""


class _Readable(Protocol):
    """Values that come from the device in one tensor."""

    step: int

    def row(self) -> Tensor | None: ...

    def set_values(self, values: Sequence[float], /) -> None: ...

    def forget(self) -> None: ...


_Any = TypeVar("_Any", bound=_Readable)


@dataclass
class LoggedReading:
    """The values that the user has logged at a step."""

    step: int  # the step, as counted by ``self.log``
    epoch: int
    tensors: dict[str, Tensor]  # the tensors with one element each, by name
    values: dict[str, float] = field(default_factory=dict)  # the values by name, once they are read

    def row(self) -> Tensor:
        """Return the values as one tensor on the device, ``[values]``."""
        device = next(iter(self.tensors.values())).device
        return torch.stack([each.to(device, torch.float32).reshape(()) for each in self.tensors.values()])

    def set_values(self, values: Sequence[float]) -> None:
        """Set the values from the device, and drop the tensors."""
        self.values = dict(zip(self.tensors, values, strict=True))
        self.tensors = {}

    def forget(self) -> None:
        """Do nothing, because the tensors have only one element each."""


@dataclass
class Reading:
    """The values of one optimizer step."""

    step: int  # the step, as counted by ``self.log``
    epoch: int
    # the mean of the losses of the batches, as a tensor without dimensions; with manual optimization, the sum of all
    # losses that had a backward pass; None without a loss
    loss: Tensor | None
    # the norm of all gradients that the optimizers used: a tensor without dimensions, a number if the norm is already
    # on the host, or None
    norm: Tensor | float | None
    # For each optimizer that stepped, the parameters with a gradient and the norms of these gradients, as tensors
    # without dimensions. They are not divided by a loss scale. There are none if ``norm`` is known to be finite.
    norms: list[tuple[list[torch.nn.Parameter], list[Tensor]]]
    indices: list[int]  # the indices of the step's batches in the epoch
    flags: StepFlags | None = None  # the flags of the step's modules, if they are computed
    batches: list[KeptBatch] = field(default_factory=list)  # the batches of the step; empty if they are no longer kept
    # the loss and the norm, once they are read; NaN for a missing one
    values: tuple[float, float] = (math.nan, math.nan)

    @property
    def rows(self) -> int:
        """The number of samples of the step; 0 if its batches are no longer kept."""
        return sum(each.rows for each in self.batches) if len(self.batches) == len(self.indices) else 0

    @property
    def is_bad(self) -> bool:
        """True if there is a loss or a norm that is not finite."""
        return self.has_bad_loss or (self.norm is not None and not math.isfinite(self.values[1]))

    @property
    def has_bad_loss(self) -> bool:
        """True if there is a loss that is not finite."""
        return self.loss is not None and not math.isfinite(self.values[0])

    def row(self) -> Tensor | None:
        """Return the loss and the norm as one tensor on the device, ``[2]``, or None if there is neither."""
        found = self.norm if isinstance(self.norm, Tensor) else self.loss
        if found is None:
            return None
        one, other = parts = self.loss, self.norm
        are_tensors = isinstance(one, Tensor) and isinstance(other, Tensor)
        if are_tensors and _KIND(one) == _KIND(other) == (torch.float32, torch.Size(()), False, found.device):
            return torch.stack(parts)  # type: ignore[arg-type]  # as just checked; the usual case, without further calls
        tensors = [each if isinstance(each, Tensor) else found.new_zeros(()) for each in parts]
        return torch.stack([each.detach().to(found.device, torch.float32).reshape(()) for each in tensors])

    def read(self) -> bool:
        """Read the values, waiting for the device, and return True if one is not finite."""
        row = self.row() if isinstance(self.norm, Tensor) else None
        if row is not None:
            self.set_values(row.tolist())
        else:
            loss = math.nan if self.loss is None else float(self.loss.float())
            self.values = loss, math.nan if self.norm is None else float(self.norm)
        # Same as is_bad, with two fewer Python calls in each step.
        loss, norm = map(math.isfinite, self.values)
        return not ((loss or self.loss is None) and (norm or self.norm is None))

    def set_values(self, values: Sequence[float]) -> None:
        """Set the values from the device."""
        loss, norm = values
        self.values = math.nan if self.loss is None else loss, math.nan if self.norm is None else norm

    def forget(self) -> None:
        """Drop the batches."""
        self.batches = []


class ReadingQueue(Generic[_Any]):
    """Readings whose values are on their way from the device.

    Each reading is copied to pinned memory without waiting, and an event marks the end of the copy. A device without
    events is read once every 16 steps, in one transfer, which waits for the device.

    Only the latest ``most_batches`` readings keep their batches, so that memory is bounded.
    """

    def __init__(self, device: torch.device, most_batches: int = _MOST_WAITING) -> None:
        module = torch.get_device_module(device) if device.type not in ("cpu", "meta") else None
        # On other devices, nothing shows that a non-blocking copy to the host is incomplete, so their values are copied
        # by a blocking read.
        self._event: Any = getattr(module, "Event", None) if device.type in ("cuda", "xpu") else None
        self._pins = self._event is not None
        self._most_batches = most_batches
        self._waiting: deque[tuple[_Any, Tensor, Any]] = deque()
        self._used: list[tuple[Tensor, Any]] = []  # pinned memory and events of arrived readings, for reuse

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def oldest(self) -> int | None:
        """The step of the first reading that has not arrived; None if all readings have arrived."""
        return self._waiting[0][0].step if self._waiting else None

    def add(self, reading: _Any) -> None:
        """Add a reading. Does not wait for the device."""
        row = reading.row()
        if row is None:
            return
        event = None
        if self._event is not None:
            if self._used and self._used[-1][0].shape == row.shape:
                host, event = self._used.pop()
            else:
                host = torch.empty(row.shape, dtype=row.dtype, pin_memory=self._pins, device="cpu")
                event = self._event()
            row = host.copy_(row, non_blocking=True)
            event.record()
        self._waiting.append((reading, row, event))
        if len(self._waiting) > self._most_batches:
            self._waiting[-1 - self._most_batches][0].forget()

    def take(self, *, wait: bool = False) -> list[_Any]:
        """Return the readings that have arrived, in order. With ``wait``, wait until all have arrived."""
        if self._event is None and (wait or len(self._waiting) >= _MOST_WAITING):
            return self._read_all()
        found = []
        while self._waiting and self._event is not None:
            reading, row, event = self._waiting[0]
            if wait:
                event.synchronize()
            elif not event.query():
                break
            self._waiting.popleft()
            reading.set_values(row.tolist())
            found.append(reading)
            if len(self._used) < _MOST_WAITING:
                self._used.append((row, event))
        return found

    def _read_all(self) -> list[_Any]:
        waiting, self._waiting = list(self._waiting), deque()
        if not waiting:
            return []
        values = torch.cat([row for _, row, _ in waiting]).tolist()
        for reading, row, _ in waiting:
            reading.set_values(values[: len(row)])
            del values[: len(row)]
        return [reading for reading, _, _ in waiting]
