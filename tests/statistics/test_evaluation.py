"""Tests of the recording of an evaluation in a plain loop."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_recorder import StatisticsRecorder
from lightning_recorder.statistics import EvaluationRecorder, Record
from lightning_recorder.taps import Site


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_each_loader_has_its_record(mode: type) -> None:
    """All batches of a loader form one record per evaluation, including in inference mode."""
    module = nn.Identity()
    records: list[Record] = []
    evaluation = EvaluationRecorder(StatisticsRecorder({"m": module}), "validate", records.append)
    for step in (3, 8):
        with mode():
            for loader, values in enumerate([[1.0, 2.0], [4.0], []]):
                for value in values:
                    evaluation.start_batch(loader)
                    module(torch.tensor([value + step]))
                    evaluation.end_batch()
                    module(torch.tensor([1e9]))
        evaluation.finish(step, epoch=0, loaders=3)
    seen = [(each.step, each.loader, found(each)) for each in records]
    assert seen == [(3, 0, (2, 4.5)), (3, 1, (1, 7.0)), (3, 2, None), (8, 0, (2, 9.5)), (8, 1, (1, 12.0)), (8, 2, None)]
    assert {each.stage for each in records} == {"validate"}
    assert not module._forward_hooks


def found(record: Record) -> tuple[float, float] | None:
    seen = record.snapshot.statistics().get(Site("m", "out"))
    return None if seen is None else (seen.scalars["count"], seen.scalars["mean"])


def test_a_single_loader_has_no_number() -> None:
    """With a single loader, its record has no loader index."""
    module = nn.Identity()
    records: list[Record] = []
    evaluation = EvaluationRecorder(StatisticsRecorder({"m": module}), "test", records.append)
    evaluation.start_batch()
    module(torch.ones(2))
    evaluation.end_batch()
    evaluation.finish(0, 0)
    assert [(each.stage, each.loader, found(each)) for each in records] == [("test", None, (2, 1.0))]


def test_disabled_in_an_evaluation() -> None:
    """An evaluation in which recording is disabled has no record."""
    module = nn.Identity()
    records: list[Record] = []
    evaluation = EvaluationRecorder(StatisticsRecorder({"m": module}), "test", records.append)
    for step, enabled in enumerate([(True, False), (False, False), (False, True)]):
        for evaluation.enabled in enabled:
            evaluation.start_batch()
            module(torch.ones(2))
            evaluation.end_batch()
        evaluation.finish(step, 0)
    assert [(each.step, found(each)) for each in records] == [(0, (2, 1.0)), (2, (2, 1.0))]
