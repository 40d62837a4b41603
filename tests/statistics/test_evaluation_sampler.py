"""Tests of the choice of sampled batches."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_recorder.statistics import EvaluationSampler, Record, StatisticsRecorder
from lightning_recorder.taps import Site


def recorded(evaluations: list[float], batches: int | None = None) -> list[list[int]]:
    """Return the recorded batches of each evaluation, whose number of batches is given."""
    net, records = nn.Linear(2, 2), list[Record]()
    sampler = EvaluationSampler(StatisticsRecorder({"net": net}), "validate", records.append)
    found = []
    for step, announced in enumerate(evaluations):
        chosen = []
        sampler.begin(announced)
        for batch in range(int(announced) if batches is None else batches):
            sampler.start_batch()
            if sampler.recorder.attached:
                chosen.append(batch)
            net(torch.full((1, 2), float(batch)))
            sampler.end_batch()
        sampler.finish(step, 0)
        found.append(chosen)
        assert len(records) == sum(map(bool, found))
    assert all(record.is_sample and record.stage == "validate" and record.loader is None for record in records)
    return found


@pytest.mark.parametrize(
    ("evaluations", "chosen"),
    [
        ([10, 10, 10], [[0], [], []]),
        ([100] * 3, [[0], [0], [0]]),
        ([50] * 5, [[0], [], [], [0], []]),
        ([300, 300], [[0, 1, 2], [0, 1, 2]]),
        ([0, 3], [[], [0]]),
    ],
)
def test_one_of_a_hundred_batches_is_recorded(evaluations: list[float], chosen: list[list[int]]) -> None:
    """The very first batch is recorded, and then at most one batch in a hundred."""
    assert recorded(evaluations) == chosen


def test_an_iterable_loader_counts_as_one_batch() -> None:
    """If the number of batches is unknown, each evaluation counts as one batch."""
    found = recorded([float("inf")] * 3, batches=5)
    assert found == [[0], [], []]


def test_only_the_first_loader_is_recorded() -> None:
    """Batches of a further data loader are not recorded."""
    net, records = nn.Linear(2, 2), list[Record]()
    sampler = EvaluationSampler(StatisticsRecorder({"net": net}), "validate", records.append)
    sampler.begin(200)
    for loader in (1, 0, 0, 0):
        sampler.start_batch(loader)
        net(torch.ones(1, 2))
        sampler.end_batch()
    sampler.finish(0, 0, 2)
    (record,) = records
    assert record.snapshot.statistics()[Site("net", "out")].scalars["count"] == 4  # two batches of two values
