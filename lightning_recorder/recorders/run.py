"""What is recorded of a training run, step by step, and what becomes one record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import device as Device

from lightning_recorder.errors import describe_error, tell
from lightning_recorder.recorders.budget import Budget
from lightning_recorder.recorders.exchange import Merged
from lightning_recorder.recorders.record import Record
from lightning_recorder.recorders.siterecorder import SiteRecorder
from lightning_recorder.recorders.worker import Worker
from lightning_recorder.schedule import Reduce, Sampling, ends_window
from lightning_recorder.stopwatch import Stopwatch

__all__ = ["RunRecorder"]


class RunRecorder(Worker):
    """Records the sampled steps of a training run and puts them together to records.

    Whoever trains says when a batch begins and ends; nothing here knows a trainer. A step is an optimiser step, of one
    batch or of several whose gradients are accumulated.

    Args:
        recorder: What brings the tensors.
        sampling: Which steps are recorded, with a cadence.
        conclude: Called with each record, on rank zero.
        reduce: What becomes one record.
        announce: Called behind the first recorded step, if that is no record yet, with the step and the milliseconds
            that its hooks took; on rank zero.
        budget: Widens the cadence of the sampling.
        device: Where the tensors of the model are.
        options: As for :class:`Worker`.

    Note:
        The calls in which a record ends, the same on all ranks, are those that merge. A state that is saved in between
        lets another run go on to the bit, on one process; on several, what is saved is merged, and goes on as the first
        rank's share.
    """

    def __init__(
        self,
        recorder: SiteRecorder,
        sampling: Sampling,
        conclude: Callable[[Record], None],
        *,
        reduce: Reduce = "step",
        announce: Callable[[int, float], None] | None = None,
        budget: Budget | None = None,
        device: Device | None = None,
        **options: Any,
    ) -> None:
        super().__init__(recorder, **options)
        self.sampling = sampling
        self.reduce = reduce
        self.overflow_steps = 0
        """How many recorded steps had gradients that overflowed."""
        self._conclude = conclude
        self._announce = announce
        self._budget = budget
        self._device = device or Device("cpu")
        self._watch = Stopwatch(self._device, clock=self._clock)
        self.recorder.watch(self._watch)
        self._step: int | None = None  # that is being recorded
        self._open_steps = 0  # recorded ones that are in no record yet
        self._untold_overflows = False
        self._next_step = 0
        self._epoch = 0
        self._before: list[Any] | None = None
        self._batch_began = 0.0
        self._step_ms = 0.0
        self._timed_steps = 0  # recorded ones whose time was not taken yet
        self._timed_ms = 0.0
        self._is_mute = False
        self._has_recorded = False
        self._has_share_of_all = False  # of what the ranks recorded before a checkpoint, which this one goes on from
        self._kept: dict[str, Any] | None = None

    @property
    def every_n_train_steps(self) -> int:
        """The cadence as it is now."""
        return self.sampling.every_n_train_steps or 0

    @property
    def records(self) -> bool:
        """Whether a step is being recorded."""
        return self._step is not None

    @property
    def has_recorded(self) -> bool:
        """Whether any step was recorded."""
        return self._has_recorded

    @property
    def last_step(self) -> int:
        """The step that has ended last."""
        return max(0, self._next_step - 1)

    # A batch.

    def start_batch(self, step: int, epoch: int, prepare: Callable[[], None] | None = None) -> None:
        """Record the batch that begins, if its step is due.

        Args:
            step: The 0-based optimiser step.
            epoch: The epoch.
            prepare: Called before a batch whose step is due, also where this rank records nothing.
        """
        self._batch_began = self._clock()
        self._kept = None
        if self._step != step:  # the batch before had a start and no end
            self._drop_step()
        self._next_step, self._epoch = step, epoch
        is_due = self.sampling(step, epoch)
        if is_due and self._step is None:
            self._begin_step(step)
        with self.contained():
            if is_due and prepare is not None:
                prepare()
            if is_due and self.works:
                self.recorder.attach()
            else:
                self.recorder.remove()

    def end_batch(self, *, stepped: bool, overflowed: bool = False) -> None:
        """End a batch.

        Args:
            stepped: Whether it ended with an optimiser step.
            overflowed: Whether the optimiser passed the step over, since gradients were not finite.
        """
        step = self._next_step
        with self.contained():
            if self.works and self._may_be_due(step + stepped):
                self.recorder.pause()
            else:
                self.recorder.remove()
        self._step_ms += 1000 * (self._clock() - self._batch_began)
        if not stepped:
            return
        self._next_step = step + 1
        step_ms, self._step_ms = self._step_ms, 0.0
        if self._step is not None:
            self._timed_steps += 1
            self._timed_ms += step_ms
        elif self._budget is not None:
            self._budget.add_step(step_ms)
        self._end_step(overflowed=overflowed)
        if self._has_news and ends_window(self.reduce, step):
            self._flush(step)

    def _may_be_due(self, step: int) -> bool:
        """Whether the step will be recorded; an error of the schedule is told when it begins."""
        try:
            return self.sampling(step, self._epoch)
        except Exception:  # noqa: BLE001 - it will raise again
            return False

    def end_epoch(self, step: int) -> None:
        """End an epoch, whose last step is given."""
        self.interrupt()
        self._drop_step()
        if self._has_news and (self.reduce == "epoch" or ends_window(self.reduce, self._next_step - 1)):
            self._flush(step)

    def finish(self) -> None:
        """End the run: what is in no record yet becomes one, and stays in the state as well."""
        self.interrupt()
        self._drop_step()
        kept = self.merged_state_dict()
        if self._has_news:
            self._flush(self.last_step)
        self._kept = kept

    def abort(self) -> None:
        """End a run that has failed: what there is becomes a record, without the other ranks.

        The state is then that before the step which was being recorded, since that will be repeated.
        """
        self.interrupt()
        if self._kept is not None:
            return
        is_torn = self._step is not None
        record = None
        if self._open_steps or is_torn:
            steps = self._open_steps + is_torn
            record = self._record(self._next_step - (not is_torn), self.merged(alone=True), steps)
        self._step = None
        if is_torn:
            self._put_back()
        self._kept = self._state(None)
        with self.contained():
            self._kept = self._local_state()
        if record is not None and not self._is_mute:
            with self.contained():
                self._hand_out(record)

    def _begin_step(self, step: int) -> None:
        self._step = step
        self._has_recorded = True
        self._before = None
        if self.works and (self._open_steps or self.recorder.states.carries):
            with self.contained():
                self._before = self.recorder.states.saved()

    def _end_step(self, *, overflowed: bool) -> None:
        if self._step is None:
            return
        step, self._step = self._step, None
        if not overflowed:
            self._open_steps += 1
            announce, self._announce = self._announce, None
            if announce is not None and self.reduce != "step" and self._is_first:
                with self.contained():
                    announce(step, self._watch.host_ms)
        else:
            self.overflow_steps += 1
            self._untold_overflows = True
            if self.reduce == "step":
                self._flush(step, overflowed=True)
            else:
                self._put_back()
        self._before = None

    @property
    def _has_news(self) -> bool:
        """Whether there is something for a record; the same on all ranks."""
        return self._open_steps > 0 or self._untold_overflows

    def _drop_step(self) -> None:
        """Forget a step that has begun and will not end, as where an epoch is cut off: it comes again."""
        if self._step is not None:
            self._step, self._step_ms = None, 0.0
            self._put_back()
            self._before = None

    def _put_back(self) -> None:
        """Forget what was recorded of the last step."""
        with self.contained():
            if self._before is None:
                self.recorder.states.reset()
            else:
                self.recorder.states.restore(self._before)

    # A record.

    def _flush(self, step: int, *, overflowed: bool = False) -> None:
        """Make a record of what was recorded since the last one."""
        steps, self._open_steps, self._untold_overflows = self._open_steps, 0, False
        began = self._clock()
        with self._watch:
            now = self.every_n_train_steps
            wanted = now if self._budget is None else self._budget.interval(now)
            merged = self.merged(words=(float(wanted),))
            self._widen(int(merged.words[0][0]))
            with self.contained():
                self.recorder.states.reset()
        flush_ms = 1000 * (self._clock() - began)
        recording_ms = max(0.0, self._watch.take_ms() - flush_ms)
        if self._budget is not None and self._timed_steps:
            self._budget.add_recorded(self._timed_steps, self._timed_ms + flush_ms, recording_ms + flush_ms)
        self._timed_steps, self._timed_ms = 0, 0.0
        steps += overflowed
        record = self._record(step, merged, steps, overflowed=overflowed, ms=(recording_ms, flush_ms))
        if record is not None and not self._is_mute:
            began = self._clock()
            with self._watch, self.contained():
                self._hand_out(record)
            self._timed_ms += 1000 * (self._clock() - began)
        if self._budget is None:
            self.recorder.watch(None)

    def _hand_out(self, record: Record) -> None:
        self._is_mute = True  # if it raises; who cannot write this record is not given another one
        self._conclude(record)
        self._is_mute = False

    def _record(
        self,
        step: int,
        merged: Merged,
        steps: int,
        *,
        overflowed: bool = False,
        ms: tuple[float, float] = (0.0, 0.0),
    ) -> Record | None:
        snapshot = merged.snapshot
        if snapshot is None:
            return None
        if self._has_share_of_all:  # what the first rank has is not its own, and says nothing of how ranks differ
            self._has_share_of_all = False
            snapshot = replace(snapshot, rank_means={}, apart=frozenset())
        return Record(
            step,
            self._epoch,
            snapshot,
            steps,
            overflowed=overflowed,
            overflow_steps=self.overflow_steps,
            recording_ms=ms[0],
            flush_ms=ms[1],
            every_n_train_steps=self.every_n_train_steps,
            ranks=merged.ranks,
        )

    def _widen(self, cadence: int) -> None:
        if cadence != self.every_n_train_steps:
            self.sampling = self.sampling.widened(cadence)

    # What is saved.

    @property
    def holds_states(self) -> bool:
        """Whether something is in no record yet, or is carried from one record to the next; the same on all ranks."""
        return self._open_steps > 0 or self._step is not None or self.recorder.states.carries

    def state_dict(self) -> dict[str, Any]:
        """What is in no record yet, of this rank, as plain Python and tensors."""
        return self._local_state() if self._kept is None else self._kept

    def _local_state(self) -> dict[str, Any]:
        holds = self.holds_states and not self.failed
        return self._state(self.recorder.states.state_dict() if holds else None)

    def merged_state_dict(self) -> dict[str, Any]:
        """The same of all ranks, on rank zero; every rank must call it."""
        if self._kept is not None or not self.holds_states or self.exchange is None or not self.exchange.is_open:
            return self.state_dict()
        snapshot = self.merged(words=(float(self.every_n_train_steps),)).snapshot
        return self._state(None if snapshot is None else snapshot.state_dict())

    def _state(self, states: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "open_steps": self._open_steps + (self._step is not None),
            "every_n_train_steps": self.every_n_train_steps,
            "overflow_steps": self.overflow_steps,
            **({} if states is None else {"states": states}),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], step: int, epoch: int) -> None:
        """Go on from a state; on all ranks, of which the first one takes the statistics.

        Args:
            state_dict: As :meth:`state_dict` gives it.
            step: The step that the run goes on with.
            epoch: Its epoch.

        Raises:
            KeyError, TypeError, ValueError: If it is no such state.
        """
        open_steps, of_epoch = int(state_dict["open_steps"]), int(state_dict["epoch"])
        cadence, overflow_steps = int(state_dict["every_n_train_steps"]), int(state_dict["overflow_steps"])
        self.overflow_steps = overflow_steps
        if self._budget is not None:
            self._widen(max(self.every_n_train_steps, cadence))
        # On all ranks alike, since what a record waits for depends on it.
        self._open_steps = open_steps
        if self._is_first and "states" in state_dict:
            self._load(state_dict["states"])
        # What was saved behind the last batch of an epoch was saved before the epoch had ended.
        if self._open_steps and self.reduce == "epoch" and of_epoch != epoch:
            self._next_step, self._epoch = step, of_epoch
            self._flush(self.last_step)

    def _load(self, states: Any) -> None:
        self._has_share_of_all = True
        try:
            self.recorder.states.load_state_dict(states, self._device)
        except Exception as error:  # noqa: BLE001 - whatever a file has in it
            # The other ranks go on with the window, and so does this one, with nothing in it.
            tell(f"{self.name} begins anew, the saved statistics cannot be read: {describe_error(error)}")
            with self.contained():
                self.recorder.states.forget()
