"""A recorder of a training run that turns steps into records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import device as Device

from lightning_recorder.errors import describe_error, warn
from lightning_recorder.internals.stopwatch import Stopwatch
from lightning_recorder.schedule import Reduce, Sampling, ends_window
from lightning_recorder.statistics.base import BaseStatisticsRecorder
from lightning_recorder.statistics.exchange import Merged
from lightning_recorder.statistics.overhead import OverheadLimit
from lightning_recorder.statistics.rank_merging import RankMergingRecorder
from lightning_recorder.statistics.record import Record

__all__ = ["RunRecorder"]


class RunRecorder(RankMergingRecorder):
    """Record the sampled steps of a training run and combine them into records.

    The training loop reports when a batch begins and ends; this class does not depend on a trainer. A step is an
    optimizer step, with one batch or with several if gradients are accumulated.

    Args:
        recorder: The recorder that provides the tensors.
        sampling: The schedule of the recorded steps, including the interval.
        conclude: A callback that receives each record, on rank zero.
        reduce: The steps that form a record.
        announce: A callback that receives the first recorded step and the time its hooks took, in milliseconds, if that
            step is not a record yet; on rank zero.
        budget: The overhead limit that widens the interval of the sampling.
        device: The device of the model's tensors.
        options: The arguments of :class:`RankMergingRecorder`.

    Note:
        The ranks are merged in the calls that complete a record, which are the same calls on all ranks. On one
        process, a run that resumes from a saved state continues bit-exactly. On several, the saved state is merged, and
        the first rank resumes with all of it.
    """

    def __init__(
        self,
        recorder: BaseStatisticsRecorder,
        sampling: Sampling,
        conclude: Callable[[Record], None],
        *,
        reduce: Reduce = "step",
        announce: Callable[[int, float], None] | None = None,
        budget: OverheadLimit | None = None,
        device: Device | None = None,
        **options: Any,
    ) -> None:
        super().__init__(recorder, **options)
        self.sampling = sampling
        self.reduce = reduce
        self.overflow_steps = 0
        """The number of recorded steps whose gradients overflowed."""
        self._conclude = conclude
        self._announce = announce
        self._budget = budget
        self._device = device or Device("cpu")
        self._watch = Stopwatch(self._device, clock=self._clock)
        self.recorder.watch(self._watch)
        self.is_idle = False
        """True if the batch is not recorded and there are no unwritten statistics; then the batch need not be ended."""
        self._step: int | None = None  # the step that is being recorded
        self._may_have_hooks = False
        self._open_steps = 0  # recorded steps that are not part of a record yet
        self._unreported_overflows = False
        self._next_step = 0
        self._epoch = 0
        self._before: list[Any] | None = None
        self._batch_began = 0.0
        self._step_ms = 0.0
        self._timed_steps = 0  # recorded steps whose time has not been passed to the budget yet
        self._timed_ms = 0.0
        self._is_mute = False
        self._has_recorded = False
        self.is_covered = False
        """True if the hooks were registered in a step of the current record; False while recording is disabled."""
        self._has_share_of_all = False  # True after loading a checkpoint with the merged states of all ranks
        self._kept: dict[str, Any] | None = None

    @property
    def every_n_train_steps(self) -> int:
        """The current interval, in steps."""
        return self.sampling.every_n_train_steps or 0

    @property
    def records(self) -> bool:
        """True while a step is being recorded."""
        return self._step is not None

    @property
    def has_recorded(self) -> bool:
        """True if the hooks were registered in any step."""
        return self._has_recorded

    @property
    def last_step(self) -> int:
        """The step that ended last."""
        return max(0, self._next_step - 1)

    # Batches

    def pass_over(self, step: int, epoch: int) -> bool:
        """Begin a batch that is not recorded, at little cost.

        Args:
            step: The 0-based optimizer step.
            epoch: The epoch.

        Returns:
            False if the batch needs :meth:`start_batch` instead.
        """
        self.is_idle = False
        if self._step is not None or self._may_have_hooks or self._budget is not None or self.sampling(step, epoch):
            return False
        self._kept = None
        self._next_step, self._epoch = step, epoch
        self.is_idle = not self._open_steps and not self._unreported_overflows
        return True

    def start_batch(self, step: int, epoch: int, prepare: Callable[[], None] | None = None) -> None:
        """Begin a batch, and record it if its step is due.

        Args:
            step: The 0-based optimizer step.
            epoch: The epoch.
            prepare: A callback that is called before a batch whose step is due, even if this rank records nothing.
        """
        self._batch_began = self._clock()
        self._kept = None
        self.is_idle = False
        if self._step != step:  # the previous batch was started but not ended
            self._drop_step()
        self._next_step, self._epoch = step, epoch
        is_due = self.sampling(step, epoch)
        if is_due and self._step is None:
            self._begin_step(step)
        with self.contained():
            if is_due and prepare is not None:
                prepare()
            if is_due and self.works:
                self._has_recorded = self.is_covered = True
                self._may_have_hooks = True
                self.recorder.attach()
            else:
                self.recorder.remove()
                self._may_have_hooks = False

    def end_batch(self, *, stepped: bool, overflowed: bool = False) -> None:
        """End a batch.

        Args:
            stepped: True if the batch ended with an optimizer step.
            overflowed: True if the optimizer skipped the step because gradients were not finite.
        """
        step = self._next_step
        with self.contained():
            if self.works and self._may_be_due(step + stepped):
                self.recorder.pause()
            else:
                self.recorder.remove()
                self._may_have_hooks = False
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
        """Return True if the step will be recorded. An error of the schedule is reported when the step begins."""
        try:
            return self.sampling(step, self._epoch)
        except Exception:  # noqa: BLE001 - it will raise again
            return False

    def end_epoch(self, step: int) -> None:
        """End an epoch.

        Args:
            step: The last step of the epoch.
        """
        self.interrupt()
        self._drop_step()
        if self._has_news and (self.reduce == "epoch" or ends_window(self.reduce, self._next_step - 1)):
            self._flush(step)

    def finish(self) -> None:
        """End the run: write the remaining statistics as a record, and also keep them in the state."""
        self.interrupt()
        self._drop_step()
        kept = self.merged_state_dict()
        if self._has_news:
            self._flush(self.last_step)
        self._kept = kept

    def abort(self) -> None:
        """End a failed run: make a record of the remaining statistics without the other ranks.

        The state is then the one before the interrupted step, because a resumed run repeats that step.
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
            announce = self._announce
            if announce is not None and self.reduce != "step" and self._is_first and self.is_covered:
                self._announce = None
                with self.contained():
                    announce(step, self._watch.host_ms)
        else:
            self.overflow_steps += 1
            self._unreported_overflows = True
            if self.reduce == "step":
                self._flush(step, overflowed=True)
            else:
                self._put_back()
        self._before = None

    @property
    def _has_news(self) -> bool:
        """True if there is something to write in a record. The same on all ranks."""
        return self._open_steps > 0 or self._unreported_overflows

    def _drop_step(self) -> None:
        """Discard a step that will not end, for example because its epoch was cut off. It will be repeated."""
        if self._step is not None:
            self._step, self._step_ms = None, 0.0
            self._put_back()
            self._before = None

    def _put_back(self) -> None:
        """Discard what was recorded in the last step."""
        with self.contained():
            if self._before is None:
                self.recorder.states.reset()
            else:
                self.recorder.states.restore(self._before)

    # Records

    def _flush(self, step: int, *, overflowed: bool = False) -> None:
        """Make a record from the statistics since the last one."""
        steps, self._open_steps, self._unreported_overflows = self._open_steps, 0, False
        began = self._clock()
        with self._watch:
            now = self.every_n_train_steps
            wanted = now if self._budget is None else self._budget.interval(now)
            merged = self.merged(numbers=(float(wanted),))
            self._widen(int(merged.numbers[0][0]))
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
        self.is_covered = False
        if self._budget is None:
            self.recorder.watch(None)

    def _hand_out(self, record: Record) -> None:
        self._is_mute = True  # if the callback raises: do not call it again
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
        if self._has_share_of_all:  # the first rank holds merged states, so per-rank differences are meaningless
            self._has_share_of_all = False
            snapshot = replace(snapshot, rank_means={}, diverged=frozenset())
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

    # State

    @property
    def holds_states(self) -> bool:
        """True if there are unwritten statistics, or states that survive a reset. The same on all ranks."""
        return self._open_steps > 0 or self._step is not None or self.recorder.states.carries

    def state_dict(self) -> dict[str, Any]:
        """Return the unwritten statistics of this rank as plain Python objects and tensors."""
        return self._local_state() if self._kept is None else self._kept

    def _local_state(self) -> dict[str, Any]:
        holds = self.holds_states and not self.failed
        return self._state(self.recorder.states.state_dict() if holds else None)

    def merged_state_dict(self) -> dict[str, Any]:
        """Return the unwritten statistics merged across ranks, on rank zero. Every rank must call this."""
        if self._kept is not None or not self.holds_states or self.exchange is None or not self.exchange.is_open:
            return self.state_dict()
        snapshot = self.merged(numbers=(float(self.every_n_train_steps),)).snapshot
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
        """Load a state on all ranks. The first rank loads the statistics.

        Args:
            state_dict: The result of :meth:`state_dict`.
            step: The step that the run resumes with.
            epoch: The epoch that the run resumes with.

        Raises:
            KeyError, TypeError, ValueError: If the state is invalid.
        """
        open_steps, of_epoch = int(state_dict["open_steps"]), int(state_dict["epoch"])
        cadence, overflow_steps = int(state_dict["every_n_train_steps"]), int(state_dict["overflow_steps"])
        self.overflow_steps = overflow_steps
        if self._budget is not None:
            self._widen(max(self.every_n_train_steps, cadence))
        # The same on all ranks, because it determines when a record is due.
        self._open_steps = open_steps
        if self._is_first and "states" in state_dict:
            self._load(state_dict["states"])
        # A state saved after the last batch of an epoch was saved before the epoch ended.
        if self._open_steps and self.reduce == "epoch" and of_epoch != epoch:
            self._next_step, self._epoch = step, of_epoch
            self._flush(self.last_step)

    def _load(self, states: Any) -> None:
        self._has_share_of_all = True
        try:
            self.recorder.states.load_state_dict(states, self._device)
        except Exception as error:  # noqa: BLE001 - a file may contain anything
            # The other ranks resume the window, so this one does, too, with empty statistics.
            warn(f"{self.name} begins anew, the saved statistics cannot be read: {describe_error(error)}")
            with self.contained():
                self.recorder.states.forget()
