"""What is recorded of a validation, a test or a prediction: one record for each of its loaders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_recorder.recorders.record import Record
from lightning_recorder.recorders.siterecorder import SiteRecorder
from lightning_recorder.recorders.sites import SiteStates
from lightning_recorder.recorders.worker import Worker

__all__ = ["EvaluationRecorder"]


class EvaluationRecorder(Worker):
    """Records all batches of an evaluation, and merges those of a loader to one record when it ends.

    Args:
        recorder: What brings the tensors.
        stage: ``"validate"``, ``"test"`` or ``"predict"``.
        conclude: Called with each record, on rank zero.
        options: As for :class:`Worker`.

    Note:
        The ranks are merged when the evaluation ends and never between its loaders, since a rank may have no batch of
        one of them.
    """

    def __init__(self, recorder: SiteRecorder, stage: str, conclude: Callable[[Record], None], **options: Any) -> None:
        super().__init__(recorder, **options)
        self.stage = stage
        self._conclude = conclude
        self._states: dict[int, SiteStates] = {0: recorder.states}

    def start_batch(self, loader: int = 0) -> None:
        """Record the batch of a loader that begins."""
        with self.contained():
            self.recorder.states = self._of(loader)
            if self.works:
                self.recorder.attach()
            else:
                self.recorder.remove()

    def end_batch(self) -> None:
        """Record nothing until the next one begins."""
        with self.contained():
            self.recorder.pause()

    def finish(self, step: int, epoch: int, loaders: int = 1) -> None:
        """Make the records.

        Args:
            step: Where they stand on the axis of steps.
            epoch: The epoch.
            loaders: How many loaders there are, the same number on all ranks.
        """
        self.interrupt()
        for loader in range(loaders):
            self.recorder.states = self._of(loader)
            merged = self.merged(scope=f"{self.stage} {loader}")
            place = loader if loaders > 1 else None
            with self.contained():
                self.recorder.states.forget()  # the last batch of an evaluation does not come before the next one
                if merged.snapshot is not None:
                    record = Record(step, epoch, merged.snapshot, stage=self.stage, loader=place, ranks=merged.ranks)
                    self._conclude(record)

    def _of(self, loader: int) -> SiteStates:
        if loader not in self._states:
            self._states[loader] = self.recorder.states.fresh()
        return self._states[loader]
