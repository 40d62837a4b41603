"""Recorders of evaluations: one records all batches, the other records only the first batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from typing_extensions import override

from lightning_recorder.statistics.rank_merging import Merged, PendingMerge, RankMergingRecorder
from lightning_recorder.statistics.recorder import BaseStatisticsRecorder
from lightning_recorder.statistics.sites import SiteStates
from lightning_recorder.statistics.snapshot import NOTHING, Record

__all__ = ["EvaluationRecorder", "EvaluationSampler"]


class EvaluationRecorder(RankMergingRecorder):
    """Record all batches of an evaluation. At its end, make one record per data loader.

    Args:
        recorder: The recorder that provides the tensors.
        stage: ``"validate"``, ``"test"`` or ``"predict"``.
        on_record: A callback that receives each record, on rank zero.
        options: The arguments of :class:`RankMergingRecorder`.

    Note:
        Ranks are merged when the evaluation ends, not after each data loader, because a loader may have no batch on
        some rank.
    """

    def __init__(
        self, recorder: BaseStatisticsRecorder, stage: str, on_record: Callable[[Record], None], **options: Any
    ) -> None:
        super().__init__(recorder, **options)
        self.stage = stage
        self._on_record = on_record
        self._states: dict[int, SiteStates] = {0: recorder.states}
        self._is_covered = False  # True if the hooks were registered in a batch of the current evaluation

    def start_batch(self, loader: int = 0) -> None:
        """Begin and record a batch of a data loader."""
        with self.contained():
            self.recorder.states = self._states_of(loader)
            if self.is_active:
                self._is_covered = True
                self.recorder.attach()
            else:
                self.recorder.remove()

    def end_batch(self) -> None:
        """Stop recording until the next batch begins."""
        with self.contained():
            self.recorder.pause()

    def finish(self, step: int, epoch: int, loaders: int = 1) -> None:
        """Make one record per data loader, unless recording was disabled in all batches.

        Args:
            step: The position of the records on the step axis.
            epoch: The epoch.
            loaders: The number of data loaders, the same on all ranks.
        """
        self.interrupt()
        is_covered, self._is_covered = self._is_covered, False
        for loader in range(loaders):
            self.recorder.states = self._states_of(loader)
            pending = self.submit(f"{self.stage} {loader}")
            merged = self.alone() if pending is None else Merged(NOTHING)
            later = None if pending is None else partial(self._completed, pending, is_covered)
            place = loader if loaders > 1 else None
            with self.contained():
                self.recorder.states.reset_all()  # the next evaluation starts from empty states
                if merged.snapshot is not None and self._is_first and (is_covered or pending is not None):
                    self._on_record(Record(step, epoch, merged.snapshot, stage=self.stage, loader=place, pending=later))

    def _completed(self, pending: PendingMerge, is_covered: bool, record: Record) -> Record | None:
        """Return the record with the merged states, or None if nothing was recorded. Called in the writer thread."""
        merged = self.finished(pending)
        if merged.snapshot is None or (not is_covered and merged.snapshot.is_empty):
            return None
        return replace(record, snapshot=merged.snapshot, ranks=merged.ranks)

    def _states_of(self, loader: int) -> SiteStates:
        if loader not in self._states:
            self._states[loader] = self.recorder.states.new_empty()
        return self._states[loader]


class EvaluationSampler(EvaluationRecorder):
    """Record the first batches of each evaluation, up to 1 % of all evaluation batches of the run.

    The limit counts batches, not time: recording makes a batch slower, in small models several times slower. The choice
    of batches depends only on the numbers of batches and not on the clock, so repeating a run gives the same records.
    The first batch of the first evaluation is always recorded. Only the first data loader is recorded, on rank zero.

    Args:
        recorder: The recorder that provides the tensors.
        stage: The stage.
        on_record: A callback that receives each record.
        options: The arguments of :class:`RankMergingRecorder`.
    """

    SHARE = 0.01
    """The maximum fraction of the evaluation batches of a run to record."""

    def __init__(
        self, recorder: BaseStatisticsRecorder, stage: str, on_record: Callable[[Record], None], **options: Any
    ) -> None:
        super().__init__(recorder, stage, self._on_sample, **options)
        self._receive = on_record
        self._batches = self._recorded = 0
        self._left = 0  # batches still to record in the current evaluation
        self._has_record = False
        self.is_recording = False
        """True until the last sampled batch ends. A plain attribute, because the loop reads it for every batch."""

    def begin(self, batches: float) -> None:
        """Begin an evaluation.

        Args:
            batches: The number of batches of the first data loader, possibly infinite.
        """
        known = int(batches) if batches < float("inf") else 1
        self._batches += known
        due = int(self.SHARE * self._batches) if self._recorded else max(1, int(self.SHARE * known))
        self._left = max(0, min(known, due - self._recorded))
        self._has_record, self.is_recording = False, self._left > 0

    @override
    def start_batch(self, loader: int = 0) -> None:
        if loader or not self._left:
            self._stop()
            return
        self._left -= 1
        self._recorded += 1
        self._has_record = True
        super().start_batch(loader)

    @override
    def end_batch(self) -> None:
        if self._left:
            super().end_batch()
        else:
            self._stop()

    def _stop(self) -> None:
        """Remove the hooks until the next evaluation."""
        self.is_recording = False
        self.interrupt()

    @override
    def finish(self, step: int, epoch: int, loaders: int = 1) -> None:
        if self._has_record:
            # Write only one record: records of several loaders have the same step, and readers use only the first one.
            super().finish(step, epoch)
        else:
            self.interrupt()

    def _on_sample(self, record: Record) -> None:
        self._receive(replace(record, is_sample=True))
