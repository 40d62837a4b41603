"""Read the learning rates and the user's own metrics of a fit from Lightning."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_recorder.callbacks.lightning import Trainer
from lightning_recorder.callbacks.trainer import logged_step
from lightning_recorder.internals.pause_recording import pause_recording
from lightning_recorder.watch import LoggedReading, ReadingQueue

__all__ = ["LoggedValues"]

_FIRST_STEPS = 16  # the number of first steps that are all read, so that a short run has curves
_MOST_NAMES = 256


class LoggedValues:
    """Reads the values that the user logs with ``self.log``, and the learning rates, without waiting for the device.

    The first 16 steps are read, and then the steps that Lightning logs. Metrics of an epoch or a validation are read at
    its end. Values on a device are copied in one transfer, like the loss. Lightning has computed all values; this class
    computes nothing.
    """

    def __init__(
        self,
        trainer: Trainer,
        device: torch.device,
        write: Callable[[int, int, Mapping[str, float]], object],
        *,
        is_on_host: bool,
    ) -> None:
        self._trainer, self._write = trainer, write
        self._queue: ReadingQueue[LoggedReading] = ReadingQueue(device)
        self._is_on_host = is_on_host
        self._seen: dict[str, Callable[[], object]] = {}
        self._rates: dict[str, float] = {}
        self.ended: int | None = None
        """The ended step that is still to be read. Lightning has its values only after the last hook of the batch."""
        self._first: int | None = None
        self.is_due = False
        """True if the current step is to be read."""
        self.next_due: float = 0
        """The first step that may be read next."""
        every: Any = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set in Trainer.__init__
        self._every = int(every)

    def before_step(self, step: int) -> None:
        """Keep the learning rates of the step, because a scheduler changes them before the batch ends."""
        if self._first is None:
            self._first = step
        self.is_due = step < self._first + _FIRST_STEPS or (self._every > 0 and (step + 1) % self._every == 0)
        following = step + 1
        if following >= self._first + _FIRST_STEPS:
            self.next_due = following + -(following + 1) % self._every if self._every > 0 else math.inf
        if self.is_due:
            self._rates = dict(_rates(self._trainer))

    def settle(self) -> None:
        """Read the values of the ended step, if it is due. Must be called before later values are logged."""
        step, self.ended = self.ended, None
        if step is not None:
            if self._rates:
                self._write(step, self._trainer.current_epoch, self._rates)
            self._read(step)

    def read(self) -> None:
        """Read the metrics of an epoch or a validation that has ended."""
        self.settle()
        self._read(logged_step(self._trainer))

    def _read(self, step: int) -> None:
        tensors, epoch = dict(self._new()), self._trainer.current_epoch
        if not tensors:
            return
        with pause_recording():
            reading = LoggedReading(step, epoch, tensors)
            if self._is_on_host:
                reading.set_values([float(each) for each in tensors.values()])
                self._write(step, epoch, reading.values)
            else:
                self._queue.add(reading)
                self.arrive()

    def arrive(self, *, wait: bool = False) -> None:
        """Write the values that have arrived from the device."""
        for each in self._queue.take(wait=wait):
            self._write(each.step, each.epoch, each.values)

    def _new(self) -> Iterator[tuple[str, Tensor]]:
        # The public properties compute the metrics again, so read a private attribute. Lightning makes a new tensor for
        # each value, so a known tensor is not read again.
        logger_connector: Any = getattr(self._trainer, "_logger_connector", None)
        found: Any = getattr(logger_connector, "_logged_metrics", None)
        for name, value in list(found.items())[:_MOST_NAMES] if isinstance(found, dict) else ():
            if type(value) is not Tensor or value.numel() != 1 or value.is_complex():
                continue
            known = self._seen.get(name)
            if known is None or known() is not value:
                self._seen[name] = weakref.ref(value)
                yield str(name), value.detach()


def _rates(trainer: Trainer) -> Iterator[tuple[str, float]]:
    """Yield the largest learning rate of each optimizer, if it is known on the host."""
    for place, optimizer in enumerate(trainer.optimizers):
        found = [group["lr"] for group in optimizer.param_groups if "lr" in group]
        known = [float(each) for each in found if not isinstance(each, Tensor) or each.device.type == "cpu"]
        if known:
            of = f" of optimizer {place}" if len(trainer.optimizers) > 1 else ""
            yield f"learning rate{of}", max(known)
