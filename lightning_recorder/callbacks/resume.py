"""The base class with the recorders of a run, their state in checkpoints, and dumps beside checkpoints."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import override

from lightning_recorder.callbacks.arguments import in_words
from lightning_recorder.callbacks.base import fixed_in_run
from lightning_recorder.callbacks.checkpoints import CheckpointWatch, why_no_checkpoint
from lightning_recorder.callbacks.evaluation_hooks import EvaluationCallback
from lightning_recorder.callbacks.guard import guarded
from lightning_recorder.callbacks.lightning import LightningModule, Trainer
from lightning_recorder.callbacks.messages import Silence, why_no_due_validation, why_no_files
from lightning_recorder.callbacks.output_options import Outputs
from lightning_recorder.errors import describe_error, warn
from lightning_recorder.outputs import Event, RecordPipeline, SinkFormatter, StatisticsDumps, check_dumps
from lightning_recorder.schedule import Reduce
from lightning_recorder.selection import Selection
from lightning_recorder.statistics import RankMergingRecorder, RunRecorder
from lightning_recorder.taps import Site

__all__ = ["ResumeState", "ResumingCallback"]

_VERSION = 1
_EVALUATIONS = {"validate": "validation", "test": "test", "predict": "prediction"}


class ResumeState:
    """Holds statistics that were not yet written to a record when a fit ended or was saved, until the next fit resumes.

    The statistics are restored at the first batch. Before that batch, the trainer does not know its step, and the ranks
    have not yet agreed on the recording.

    Args:
        settings: A description of the settings. It must equal the description in a saved state.
    """

    def __init__(self, settings: str) -> None:
        self._settings = settings
        self._state: dict[str, Any] | None = None
        self.waits = False
        """True while there is a state that no run has restored."""
        self._global_step: int | None = None  # the step at which the state was kept; None for a state from a checkpoint

    def packed(self, run: Mapping[str, Any], formatter: SinkFormatter) -> dict[str, Any]:
        """Return the state for a checkpoint: the pending state if there is one, otherwise the state of the run.

        The formatter adds the shown tags and the sites that had NaN or infinities. The state is empty without a run.
        """
        if self._state is not None and self._global_step is None:
            return self._state
        return {
            "version": _VERSION,
            "settings": self._settings,
            "nonfinite": [list(site) for site in sorted(formatter.nonfinite)],
            "tags": formatter.state_dict(),
            **(run if self._state is None else self._state),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a state from a checkpoint, as returned by :meth:`packed`."""
        self._state, self._global_step, self.waits = dict(state), None, True

    def keep(self, run: Mapping[str, Any], global_step: int) -> None:
        """Keep the state of a run that ended at this step, for the next fit of the same trainer."""
        self._state, self._global_step, self.waits = dict(run), global_step, True

    def forget(self) -> None:
        """Discard the pending state."""
        self._state = self._global_step = None
        self.waits = False

    def hand_over(self, run: RunRecorder, formatter: SinkFormatter, *, global_step: int, step: int, epoch: int) -> str:
        """Restore the pending state into a run and its formatter, unless it was kept at another ``global_step``.

        Must be called on each rank. The run resumes at ``step``, as counted by ``self.log``, and at ``epoch``.

        Returns:
            The reason why the state could not be restored, or an empty string.
        """
        state, kept_at = self._state, self._global_step
        self.forget()
        if state is None or kept_at not in (None, global_step):
            return ""
        try:
            if kept_at is None:
                if (state["version"], state["settings"]) != (_VERSION, self._settings):
                    return "its state in the checkpoint has other settings or another version"
                formatter.nonfinite |= {Site(*site) for site in state["nonfinite"]}
                formatter.load_state_dict(state.get("tags", {}))
                if not state.keys() - {"version", "settings", "nonfinite", "tags", "label"}:
                    return ""
            else:
                formatter.load_state_dict(state.get("tags", {}))
            run.load_state_dict(state, step, epoch)
        except (KeyError, TypeError, ValueError) as error:
            return f"its state in the checkpoint cannot be read: {describe_error(error)}"
        return ""


class ResumingCallback(EvaluationCallback):
    """Base class that saves unwritten statistics in checkpoints, and writes dumps beside checkpoints."""

    _keeps_state = True

    selection: Selection
    reduce: Reduce
    outputs: Outputs
    _settings: str
    _kept: ResumeState
    _pipeline: RecordPipeline
    _dumps: StatisticsDumps
    _checkpoints: CheckpointWatch
    _run: RunRecorder | None

    @override
    def _idle(self) -> dict[str, Any]:
        condition = self.outputs.dump_when
        event = None if condition is None else Event(condition, "dump_when", name=str(self), strict=self.strict)
        saved, removed = self._note_saved_checkpoint, self._note_removed_checkpoint
        return {
            **super()._idle(),
            "_kept": ResumeState(self._settings),
            "_dumps": StatisticsDumps(check_dumps(self.outputs.dumps), event),
            "_checkpoints": CheckpointWatch(saved, removed, self._saving_ended, name=str(self)),
            "_run": None,
        }

    @property
    def _workers(self) -> list[RankMergingRecorder]:
        return [*self.evaluations.values(), *([] if self._run is None else [self._run])]

    @property
    @override
    def _has_failure(self) -> bool:
        return any(worker.failed or worker.recorder.failed for worker in self._workers)

    @override
    def _give_up(self) -> bool:
        is_news = not any(worker.failed for worker in self._workers)
        if any(worker.exchange is not None and worker.exchange.is_open for worker in self._workers):
            # Keep the channel open: the other ranks still wait for responses from this rank, although it records
            # nothing more.
            for worker in self._workers:
                worker.fail()
        else:
            self._release(None)
        return is_news

    @override
    def _before_evaluation(self, trainer: Trainer) -> None:
        if self._run is not None:
            self._run.interrupt()

    @override
    def _abandon_batch(self, trainer: Trainer, exception: Exception | None) -> None:
        if self._run is not None:
            self._run.abandon_step()

    @property
    def _waits_for_checkpoints(self) -> bool:
        """True if ``dumps`` was given as only ``"checkpoints"``, and no dump has been written."""
        folder = self._dumps.folder
        is_alone = self._dumps.at == ("checkpoints",) and not self._dumps.has_event
        is_asked_for = not isinstance(self.outputs.dumps, bool)
        return is_asked_for and is_alone and folder is not None and not (folder.written or folder.is_full)

    def _evaluation_silences(self, trainer: Trainer, function: str, *, is_trained: bool) -> Iterator[Silence]:
        """Return the reason why an evaluation recorded nothing."""
        stage = "validate" if function == "fit" else function
        if stage not in self.evaluations or self._pipeline.recorded[stage]:
            return
        noun = _EVALUATIONS[stage]
        what = "recorded nothing" + (f" in the {noun}" if self._pipeline.recorded["train"] else "")
        if self._pipeline.empty[stage]:
            yield Silence(f"the selected modules produced no tensor in the {noun}", "Select others.", what)
        elif not self.enabled:
            yield Silence("it is disabled", "", what)
        elif function == "fit" and is_trained:
            yield why_no_due_validation(trainer, self.sampling, self._began)._replace(what=what)

    def _dump_silences(self, trainer: Trainer) -> Iterator[Silence]:
        """Return the reason why no dump was written beside a checkpoint although dumps were requested."""
        if self._pipeline.recorded["train"] and self._waits_for_checkpoints:
            no_files = why_no_files(trainer, self._directory)
            fix = "" if no_files else "Save checkpoints, or pass outputs=Outputs(dumps='records')."
            yield Silence(no_files or why_no_checkpoint(trainer), fix, "dumped nothing")

    def _note_saved_checkpoint(self, path: Path) -> None:
        """Dump the latest record beside a checkpoint."""
        job = partial(self._dumps.write_beside, path)
        if self._run is None:  # a checkpoint for an exception is saved after the run has ended
            job()
            return
        with self._run.contained():
            self._pipeline.submit(self._dumps, job)

    def _note_removed_checkpoint(self, path: Path) -> None:
        """Remove the dump beside a removed checkpoint."""
        job = partial(self._dumps.remove_beside, path)
        job() if self._run is None else self._pipeline.remove(job)

    def _saving_ended(self) -> None:
        if self._run is None:  # the run failed, and this is the checkpoint for its exception
            self._dumps.end()

    def _keep_state(self, run: RunRecorder, trainer: Trainer) -> None:
        """Keep the state of a run that ends, for the next fit."""
        if not self._kept.waits:
            self._pipeline.wait()  # the last records may add modules to the shown tags
            self._kept.keep({**run.state_dict(), "tags": self._pipeline.formatter.state_dict()}, trainer.global_step)

    def _resume(self, run: RunRecorder, trainer: Trainer, step: int) -> None:
        """Restore the kept state into a run that resumes with this step."""
        formatter, at = self._pipeline.formatter, trainer.global_step
        why_not = self._kept.hand_over(run, formatter, global_step=at, step=step, epoch=trainer.current_epoch)
        if why_not and trainer.is_global_zero:
            warn(f"{self} starts without saved statistics: {why_not}")

    @fixed_in_run
    def state_key(self) -> str:
        """The key of this callback's state in a checkpoint."""
        chosen = {"name": self.name, **vars(self.selection), **vars(self.sampling), "reduce": self.reduce}
        del chosen["when"], chosen["max_overhead"], chosen["stages"]
        named = {key: in_words(value) for key, value in chosen.items() if value not in (None, "", 0)}
        return self._generate_state_key(**named, stages=list(self.stages), **self._kept_apart)

    @property
    def _kept_apart(self) -> dict[str, object]:
        """Further settings that distinguish the state of this callback; empty if all have their defaults."""
        return {}

    @guarded
    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # Does not use state_dict: Lightning raises an error at construction of the trainer if two callbacks have the
        # same state_key, and its message cannot name the argument that would distinguish the callbacks.
        self._checkpoints.expect()
        state: dict[str, Any] = {}
        if self._run is not None:
            self._pipeline.wait()
            with self._run.contained():
                state = self._run.state_dict()  # used if the next line fails: it communicates with other ranks
                state = self._state_of(self._run, trainer)
        packed = {**self._kept.packed(state, self._pipeline.formatter), "label": self.label(trainer)}
        states = checkpoint.setdefault("callbacks", {})
        states[self.state_key] = {**states.get(self.state_key, {}), **packed}

    def _state_of(self, run: RunRecorder, trainer: Trainer) -> dict[str, Any]:
        """Return the merged state of all ranks. After an exception, return the state of this rank."""
        if not trainer.interrupted:
            return run.merged_state_dict()
        # The other ranks are out of step and cannot be reached, so their statistics cannot be merged.
        if trainer.world_size > 1 and trainer.is_global_zero and run.holds_states:
            warn(f"{self}: a checkpoint that is saved after an exception has the statistics of rank 0 only")
        run.abort()
        return run.state_dict()

    @guarded
    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._kept.forget()
        state = checkpoint.get("callbacks", {}).get(self.state_key)
        if state:
            self._kept.load(deepcopy(state))
            self._resumed = weakref.ref(trainer), str(state.get("label", ""))
        elif trainer.state.fn == "fit" and trainer.is_global_zero:
            warn(
                f"{self} starts without saved statistics: the checkpoint has none, or was saved with another selection "
                "or interval"
            )
