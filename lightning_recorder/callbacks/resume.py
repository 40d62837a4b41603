"""The hooks of a recorder around checkpoints: saving and loading its state, and dumps beside them."""

from __future__ import annotations

import weakref
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_recorder.callbacks.arguments import in_words
from lightning_recorder.callbacks.base import fixed_in_run
from lightning_recorder.callbacks.checkpoints import CheckpointWatch
from lightning_recorder.callbacks.evaluation import EvaluationCallback
from lightning_recorder.callbacks.guard import guarded
from lightning_recorder.callbacks.output_options import Outputs
from lightning_recorder.callbacks.state import ResumeState
from lightning_recorder.errors import warn
from lightning_recorder.outputs import Event, RecordPipeline, StatisticsDumps, check_dumps
from lightning_recorder.schedule import Reduce
from lightning_recorder.selection import Selection
from lightning_recorder.statistics import RunRecorder

__all__ = ["ResumingCallback"]


class ResumingCallback(EvaluationCallback):
    """Base class that saves unwritten statistics in checkpoints, and dumps the latest record beside them."""

    keeps_state = True

    selection: Selection
    reduce: Reduce
    outputs: Outputs
    _settings: str
    _kept: ResumeState
    _results: RecordPipeline
    _dumps: StatisticsDumps
    _checkpoints: CheckpointWatch
    _run: RunRecorder | None

    @override
    def idle(self) -> dict[str, Any]:
        condition = self.outputs.dump_when
        event = None if condition is None else Event(condition, "dump_when", name=str(self), strict=self.strict)
        saved, removed = self.checkpoint_saved, self.checkpoint_removed
        return {
            **super().idle(),
            "_kept": ResumeState(self._settings),
            "_dumps": StatisticsDumps(check_dumps(self.outputs.dumps), event),
            "_checkpoints": CheckpointWatch(saved, removed, self._no_more, name=str(self)),
            "_run": None,
        }

    @property
    def waits_for_checkpoints(self) -> bool:
        """True if ``dumps`` was given as ``"checkpoints"`` only and no dump has been written."""
        folder = self._dumps.folder
        is_alone = self._dumps.at == ("checkpoints",) and not self._dumps.has_event
        is_asked_for = not isinstance(self.outputs.dumps, bool)
        return is_asked_for and is_alone and folder is not None and not (folder.written or folder.is_full)

    def checkpoint_saved(self, path: Path) -> None:
        """Dump the latest record beside a checkpoint."""
        job = partial(self._dumps.write_beside, path)
        if self._run is None:  # a checkpoint for an exception is saved after the run has ended
            job()
            return
        with self._run.contained():
            self._results.submit(self._dumps, job)

    def checkpoint_removed(self, path: Path) -> None:
        """Remove the dump beside a removed checkpoint."""
        job = partial(self._dumps.remove_beside, path)
        job() if self._run is None else self._results.remove(job)

    def _no_more(self) -> None:
        if self._run is None:  # the run failed, and the checkpoint for its exception is saved
            self._dumps.end()

    @fixed_in_run
    def state_key(self) -> str:
        """The key of this callback's state in a checkpoint."""
        chosen = {"name": self.name, **vars(self.selection), **vars(self.sampling), "reduce": self.reduce}
        del chosen["when"], chosen["max_overhead"]
        named = {key: in_words(value) for key, value in chosen.items() if value not in (None, "", 0)}
        return self._generate_state_key(**named, stages=list(self.stages))

    @guarded
    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # Does not use state_dict: Lightning raises an error at construction of the trainer if two callbacks have the
        # same state_key, and its message cannot name the argument that distinguishes them.
        self._checkpoints.expect()
        state: dict[str, Any] = {}
        if self._run is not None:
            self._results.wait()
            with self._run.contained():
                state = self._run.state_dict()  # in case the next line fails
                state = self._state_of(self._run, trainer)
        packed = {**self._kept.packed(state, self._results.report), "label": self.label(trainer)}
        states = checkpoint.setdefault("callbacks", {})
        states[self.state_key] = {**states.get(self.state_key, {}), **packed}

    def _state_of(self, run: RunRecorder, trainer: Trainer) -> dict[str, Any]:
        """Return the merged state of all ranks, or that of this rank after an exception."""
        if not trainer.interrupted:
            return run.merged_state_dict()
        # The other ranks are out of step and cannot be reached.
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
