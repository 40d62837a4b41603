"""A recorder of a training run that combines recorded steps into records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

from torch import device as Device

from lightning_recorder.errors import describe_error, warn
from lightning_recorder.schedule import Reduce, Sampling, ends_window
from lightning_recorder.statistics.overhead import OverheadLimit, StepTiming
from lightning_recorder.statistics.rank_merging import Merged, PendingMerge, RankMergingRecorder
from lightning_recorder.statistics.recorder import BaseStatisticsRecorder
from lightning_recorder.statistics.snapshot import NOTHING, Record

__all__ = ["RunPhase", "RunRecorder"]


class RunPhase(Enum):
    """The phases of a :class:`RunRecorder`, which documents the transitions."""

    IDLE = "idle"
    """The current step is not recorded, and there are no unwritten statistics. :meth:`RunRecorder.end_batch` is not
    needed.
    """
    WAITING = "waiting"
    """No step is being recorded, and there are no hooks. :meth:`RunRecorder.end_batch` must still be called, because
    the window may have unwritten statistics and end with this step.
    """
    ARMED = "armed"
    """No step is being recorded, but the next one is due. The hooks may still be registered, but are paused."""
    RECORDING = "recording"
    """A step is being recorded. There are hooks if this rank records."""
    ENDED = "ended"
    """The run has ended, and its state is final."""


@dataclass
class RunWindow:
    """The recorded steps since the last record."""

    steps: int = 0
    """The number of steps whose statistics are in the states. The same on all ranks."""
    has_overflow: bool = False
    """True if a step of the window overflowed. The same on all ranks."""
    is_covered: bool = False
    """True if the hooks were registered in a step of the window."""
    is_merged: bool = False
    """True if this rank holds the statistics of all ranks, from a checkpoint."""

    @property
    def has_states(self) -> bool:
        """True if this rank may hold statistics; False if recording was disabled in all steps."""
        return self.is_covered or self.is_merged

    @property
    def is_empty(self) -> bool:
        """True if the window has nothing to write as a record. The same on all ranks."""
        return not self.steps and not self.has_overflow


class RunRecorder(RankMergingRecorder):
    """Record the sampled steps of a training run and combine them into records.

    The training loop reports when a batch begins and ends; this class does not depend on a trainer. A step is an
    optimizer step, with one batch or with several if gradients are accumulated. The window is the recorded steps since
    the last record.

    The phases and their transitions are::

        phase          event                                       action                        next phase
        -------------  ------------------------------------------  ----------------------------  ----------------
        IDLE, WAITING  skip_batch, the step is not due             none                          IDLE or WAITING
        ARMED          start_batch, the step is due                save the states, resume       RECORDING
        any other      start_batch, the step is due                save the states, attach       RECORDING
        not RECORDING  start_batch, the step is not due            remove the hooks              WAITING
        RECORDING      end_batch without an optimizer step         pause                         RECORDING
        RECORDING      end_batch with an optimizer step            add the step to the window    ARMED or WAITING
        RECORDING      end_batch with a step that overflowed       discard or write the step     ARMED or WAITING
        WAITING        end_batch with an optimizer step            write the window if it ends   ARMED or WAITING
        RECORDING      another step, end_epoch or finish           discard the step              WAITING
        any            finish                                      write the window              ENDED
        not ENDED      abort                                       write the window of the rank  ENDED

    After a step, the phase is ARMED if the next step is due. After a skipped batch, it is WAITING if the window has
    unwritten statistics. A window ends with a step or an epoch, and is then written as a record unless recording was
    disabled in all of its steps.

    Args:
        recorder: The recorder that provides the tensors.
        sampling: The schedule of the recorded steps, including the interval.
        on_record: A callback that receives each record, on rank zero.
        reduce: The steps that form a record.
        announce: A callback on rank zero that receives the first recorded step and the time of its hooks in
            milliseconds, unless this step is written as a record at once.
        budget: The overhead limit that widens the interval of the sampling.
        device: The device of the model's tensors.
        options: The arguments of :class:`RankMergingRecorder`.

    Note:
        The ranks are merged in the calls that complete a record, which are the same calls on all ranks. With one
        process, a run that resumes from a saved state continues bit-exactly. With several processes, the saved state is
        merged, and rank zero resumes with all of it.
    """

    def __init__(
        self,
        recorder: BaseStatisticsRecorder,
        sampling: Sampling,
        on_record: Callable[[Record], None],
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
        self.phase = RunPhase.WAITING
        """The current phase. An attribute, because the training loop reads it in every step."""
        self.overflow_steps = 0
        """The number of recorded steps whose gradients overflowed."""
        self.has_recorded = False
        """True if the hooks were registered in any step."""
        self.requested_step = -1
        """A step to record in addition to the sampled steps. The same on all ranks."""
        self._on_record: Callable[[Record], None] | None = on_record
        self._announce = announce
        self._device = device or Device("cpu")
        self._timing = StepTiming(self._device, self._clock, budget)
        self.recorder.watch(self._timing.stopwatch)
        self._step = 0  # the current step; between two steps, the next step
        self._epoch = 0
        self._window = RunWindow()
        self._savepoint: Any = None  # the states before the current step; None if they were empty
        self._final_state: dict[str, Any] | None = None  # set when the run has ended

    @property
    def every_n_train_steps(self) -> int:
        """The current interval, in steps."""
        return self.sampling.every_n_train_steps or 0

    @property
    def is_covered(self) -> bool:
        """True if the hooks were registered in a step of the current record; False while recording is disabled."""
        return self._window.is_covered

    @property
    def last_step(self) -> int:
        """The most recently completed step."""
        return max(0, self._step - 1)

    # Transitions

    def skip_batch(self, step: int, epoch: int) -> bool:
        """Try to begin a batch that is not recorded, at little cost.

        Args:
            step: The 0-based optimizer step.
            epoch: The epoch.

        Returns:
            False if the batch needs :meth:`start_batch` instead.
        """
        is_unhooked = self.phase is RunPhase.IDLE or self.phase is RunPhase.WAITING
        # _is_due inlined, because this runs for every batch.
        if not is_unhooked or self._timing.limit is not None or step == self.requested_step:
            return False
        if self.recorder.waits_for_batch:
            return False
        if self.sampling(step, epoch):
            return False
        self._step, self._epoch = step, epoch
        is_open = self._window.steps or self._window.has_overflow
        self.phase = RunPhase.WAITING if is_open else RunPhase.IDLE
        return True

    def start_batch(self, step: int, epoch: int, prepare: Callable[[], None] | None = None) -> None:
        """Begin a batch, and record it if its step is due.

        Args:
            step: The 0-based optimizer step.
            epoch: The epoch.
            prepare: A callback that runs before a batch whose step is due, even if this rank records nothing.
        """
        self._timing.start_batch()
        self._final_state = None
        if step != self._step:  # the step of the previous batch was not ended
            self._drop_step()
        self._step, self._epoch = step, epoch
        is_due = self._is_due(step, epoch)
        if self.phase is not RunPhase.RECORDING:
            if is_due:
                self._save_states()
            self.phase = RunPhase.RECORDING if is_due else RunPhase.WAITING
        with self.contained():
            if self.recorder.waits_for_batch:
                self.recorder.look(step)
            if is_due and prepare is not None:
                prepare()
            if is_due and self.is_active:
                self.has_recorded = self._window.is_covered = True
                self._attach()
            else:
                self.recorder.remove()

    def end_batch(self, *, stepped: bool, overflowed: bool = False) -> None:
        """End a batch.

        Args:
            stepped: True if the batch ended with an optimizer step.
            overflowed: True if the optimizer skipped the step because gradients were not finite.
        """
        is_armed = self._pause(self._step + stepped)
        self._timing.end_batch()
        if stepped:
            self._end_step(RunPhase.ARMED if is_armed else RunPhase.WAITING, overflowed=overflowed)

    def _end_step(self, next_phase: RunPhase, *, overflowed: bool) -> None:
        """End a step, recorded or not."""
        step, self._step = self._step, self._step + 1
        was_recorded, self.phase = self.phase is RunPhase.RECORDING, next_phase
        self._timing.end_step(recorded=was_recorded)
        if was_recorded and overflowed:
            self._add_overflow(step)
        elif was_recorded:
            self._window.steps += 1
            self._announce_first(step)
        self._savepoint = None
        if not self._window.is_empty and ends_window(self.reduce, step):
            self._write_record(step)

    def end_epoch(self, step: int) -> None:
        """End an epoch.

        Args:
            step: The last step of the epoch.
        """
        self.interrupt()
        self._drop_step()
        if not self._window.is_empty and (self.reduce == "epoch" or ends_window(self.reduce, self._step - 1)):
            self._write_record(step)

    def abandon_step(self) -> None:
        """Discard the current step, because its batch failed and the training loop continues."""
        self.interrupt()
        self._drop_step()

    def finish(self) -> None:
        """Write the remaining statistics as a record. A checkpoint saved later contains these statistics, too."""
        self.interrupt()
        self._drop_step()
        final_state = self.merged_state_dict()
        if not self._window.is_empty:
            self._write_record(self.last_step)
        self._final_state = final_state
        self.phase = RunPhase.ENDED

    def abort(self) -> None:
        """End a failed run: write the remaining statistics of this rank as a record, without the other ranks.

        The saved state is the state before the interrupted step, because a resumed run repeats that step.
        """
        self.interrupt()
        if self._final_state is not None:
            return
        is_interrupted = self.phase is RunPhase.RECORDING
        steps = self._window.steps + is_interrupted
        record = None
        if steps:
            step = self._step if is_interrupted else self._step - 1
            record = self._record(step, self.alone(), steps)
        if is_interrupted:
            self._roll_back()
        self.phase = RunPhase.ENDED
        self._final_state = self._state(None)
        with self.contained():
            self._final_state = self._local_state()
        if record is not None:
            with self.contained():
                self._deliver(record)

    # Steps

    def _pause(self, next_step: int) -> bool:
        """Pause recording and return True if the next batch will probably be recorded; otherwise remove the hooks."""
        is_paused = False
        self._collector.release()
        with self.contained():
            is_paused = self.is_active and self._may_be_due(next_step)
            if is_paused:
                self.recorder.pause()
            else:
                self.recorder.remove()
        return is_paused

    def _is_due(self, step: int, epoch: int) -> bool:
        return step == self.requested_step or self.sampling(step, epoch)

    def _may_be_due(self, step: int) -> bool:
        """Return True if the step will be recorded. An error of the schedule is reported when the step begins."""
        try:
            return self._is_due(step, self._epoch)
        except Exception:  # noqa: BLE001 - the schedule raises again when the step begins
            return False

    def _save_states(self) -> None:
        """Save the states at the beginning of a step, so that the step can be discarded."""
        self._savepoint = None
        if self.is_active and (self._window.steps or self.recorder.states.survives_reset):
            with self.contained():
                self._savepoint = self.recorder.states.saved()

    def _roll_back(self) -> None:
        """Restore the states from before the current step."""
        with self.contained():
            if self._savepoint is None:
                self.recorder.states.reset()
            else:
                self.recorder.states.restore(self._savepoint)

    def _drop_step(self) -> None:
        """Discard a step that will not end, for example because its epoch was cut off. The step will be repeated."""
        if self.phase is RunPhase.RECORDING:
            self.phase = RunPhase.WAITING
            self._timing.drop_step()
            self._roll_back()
            self._savepoint = None

    def _add_overflow(self, step: int) -> None:
        """Count a step that the optimizer skipped. Discard its statistics, or write them as a separate record."""
        self.overflow_steps += 1
        self._window.has_overflow = True
        if self.reduce == "step":
            self._write_record(step, overflowed=True)
        else:
            self._roll_back()

    def _announce_first(self, step: int) -> None:
        """Announce the first recorded step, unless it is written as a separate record."""
        announce = self._announce
        if announce is not None and self.reduce != "step" and self._is_first and self._window.is_covered:
            self._announce = None
            with self.contained():
                announce(step, self._timing.stopwatch.host_ms)

    # Records

    def _write_record(self, step: int, *, overflowed: bool = False) -> None:
        """Write the window as a record, and open a new window."""
        steps = self._window.steps + overflowed
        self._window.steps, self._window.has_overflow = 0, False
        with self._timing.flush():
            self._agree_on_interval()
            pending = self.submit()
            merged = Merged(NOTHING) if pending is not None else self.alone()
            if overflowed:
                self._roll_back()  # ordered statistics must not compare the next step with the skipped step
            times = self.recorder.states.take_ms_of_options()
            with self.contained():
                self.recorder.states.reset()
        about: dict[str, Any] = {"recording_ms": self._timing.recording_ms, "flush_ms": self._timing.flush_ms}
        about["option_ms"] = {name: round(spent / steps, 3) for name, spent in times.items()}
        if pending is not None:
            about["pending"] = partial(self._completed, pending, self._window)
        record = self._record(step, merged, steps, overflowed=overflowed, **about)
        if record is not None and self._is_first:
            with self._timing.delivery(), self.contained():
                self._deliver(record)
        self._window = RunWindow()
        if self._timing.limit is None:
            self.recorder.watch(None)

    def _deliver(self, record: Record) -> None:
        on_record, self._on_record = self._on_record, None  # a callback that raises is not called again
        if on_record is not None:
            on_record(record)
        self._on_record = on_record

    def _record(self, step: int, merged: Merged, steps: int, **about: Any) -> Record | None:
        snapshot = merged.snapshot
        if snapshot is None or not (self._window.has_states or "pending" in about):
            return None
        snapshot = snapshot.without_ranks() if self._window.is_merged else snapshot
        of_step: dict[str, Any] = {}
        with self.contained():
            settings, of_step = self.recorder.settings(), self.recorder.about()
            if settings:
                snapshot = replace(snapshot, settings=settings)
        return Record(
            step,
            self._epoch,
            snapshot,
            steps,
            overflow_steps=self.overflow_steps,
            every_n_train_steps=self.every_n_train_steps,
            ranks=merged.ranks,
            about=of_step,
            **about,
        )

    def _completed(self, pending: PendingMerge, window: RunWindow, record: Record) -> Record | None:
        """Return the record with the merged states, or None if nothing was recorded. Called in the writer thread."""
        merged = self.finished(pending)
        if merged.snapshot is None or (not window.has_states and merged.snapshot.is_empty):
            return None
        snapshot = merged.snapshot.without_ranks() if window.is_merged else merged.snapshot
        return replace(record, snapshot=replace(snapshot, settings=record.snapshot.settings), ranks=merged.ranks)

    def _agree_on_interval(self) -> None:
        """Use the interval of rank zero on all ranks, if the interval can change."""
        wanted = self._timing.interval(self.every_n_train_steps)
        if self._timing.limit is not None and self.exchange is not None and self.exchange.is_open:
            wanted = int(self.exchange.from_first(wanted))
        self._widen(wanted)

    def _widen(self, every_n_train_steps: int) -> None:
        if every_n_train_steps != self.every_n_train_steps:
            self.sampling = self.sampling.widened(every_n_train_steps)

    # State

    @property
    def holds_states(self) -> bool:
        """True if there are unwritten statistics, or states that a reset keeps. The same on all ranks."""
        return self._open_steps > 0 or self.recorder.states.survives_reset

    @property
    def _open_steps(self) -> int:
        """The number of steps in the states, including the current one."""
        return self._window.steps + (self.phase is RunPhase.RECORDING)

    def state_dict(self) -> dict[str, Any]:
        """Return the unwritten statistics of this rank as plain Python objects and tensors."""
        return self._local_state() if self._final_state is None else self._final_state

    def _local_state(self) -> dict[str, Any]:
        holds = self.holds_states and not self.failed
        return self._state(self.recorder.states.state_dict() if holds else None)

    def merged_state_dict(self) -> dict[str, Any]:
        """Return the unwritten statistics merged across ranks, on rank zero. Every rank must call this."""
        pending = self.submit() if self._final_state is None and self.holds_states else None
        if pending is None:
            return self.state_dict()
        snapshot = self.finished(pending).snapshot
        return self._state(None if snapshot is None else snapshot.state_dict())

    def _state(self, states: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "open_steps": self._open_steps,
            "every_n_train_steps": self.every_n_train_steps,
            "overflow_steps": self.overflow_steps,
            **({} if states is None else {"states": states, "step_settings": self.recorder.settings_state()}),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], step: int, epoch: int) -> None:
        """Load a state on all ranks. Only rank zero loads the statistics.

        Args:
            state_dict: The result of :meth:`state_dict`.
            step: The first step of the resumed run.
            epoch: The first epoch of the resumed run.

        Raises:
            KeyError, TypeError, ValueError: If the state is invalid.
        """
        open_steps, of_epoch = int(state_dict["open_steps"]), int(state_dict["epoch"])
        interval, overflow_steps = int(state_dict["every_n_train_steps"]), int(state_dict["overflow_steps"])
        self.overflow_steps = overflow_steps
        if self._timing.limit is not None:
            self._widen(max(self.every_n_train_steps, interval))
        # This number must be the same on all ranks, because it determines when a record is due.
        self._window.steps = open_steps
        if self._is_first and "states" in state_dict:
            self._load(state_dict["states"], state_dict.get("step_settings", {}))
        # A checkpoint after the last batch of an epoch is saved before end_epoch() writes the record of the epoch.
        if open_steps and self.reduce == "epoch" and of_epoch != epoch:
            self._step, self._epoch = step, of_epoch
            self._write_record(self.last_step)

    def _load(self, states: Any, settings: Any) -> None:
        self._window.is_merged = True
        try:
            self.recorder.load_settings(settings)
            self.recorder.states.load_state_dict(states, self._device)
        except Exception as error:  # noqa: BLE001 - a file may contain anything
            # Resume the window with empty statistics, because the other ranks resume it, too.
            warn(f"{self.name} starts without the saved statistics, which cannot be read: {describe_error(error)}")
            with self.contained():
                self.recorder.states.reset_all()
