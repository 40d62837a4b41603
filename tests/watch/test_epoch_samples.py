"""Tests of the counts of samples in bounded memory."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler, TensorDataset

from lightning_recorder.insight.data_facts import DataFacts, LoaderFacts
from lightning_recorder.watch.epoch_samples import (
    BatchSamples,
    EpochSamples,
    RankEpoch,
    RankSamples,
    Sketch,
    StepSamples,
    compare_epochs,
    compare_ranks,
)
from tests.insight.records import Examination, record


def keys(count: int, seed: int = 0) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.random.default_rng(seed).integers(-(2**63), 2**63, count, dtype=np.int64)


def test_few_keys_are_counted_exactly() -> None:
    """Up to twice the size of the sketch, all keys are counted."""
    sketch = Sketch(100)
    for _ in range(3):
        sketch.add(keys(200))
    assert sketch.distinct == 200
    assert set(sketch.counts.values()) == {3}


def test_many_keys_are_estimated_within_the_stated_error() -> None:
    """At most twice the size of 300,000 keys are kept; number, counts and common part are right to three errors."""
    sketch, other = Sketch(), Sketch()
    many = keys(300_000)
    for part in np.split(many, 300):
        sketch.add(part)
    sketch.add(many[:150_000])
    other.add(np.concatenate([many[:100_000], keys(100_000, 1)]))
    assert len(sketch.counts) <= 2 * 4096
    assert sketch.distinct == pytest.approx(300_000, rel=3 * 0.016)
    twice = sum(count == 2 for count in sketch.counts.values()) / len(sketch.counts)
    assert twice == pytest.approx(0.5, abs=3 * 0.008)
    compared, common = sketch.common(other)
    assert common / compared == pytest.approx(1 / 3, abs=3 * 0.008)
    size = sum(map(sys.getsizeof, (sketch.counts, *sketch.counts))) + sum(map(sys.getsizeof, sketch.counts.values()))
    assert size < 1e6


@pytest.mark.parametrize("samples", [8, 1000])
def test_batches_are_counted_at_once(samples: int) -> None:
    """The facts do not depend on how often they are read, and few samples wait for it."""
    often, once = EpochSamples(0), EpochSamples(0)
    for step in range(50):
        each = keys(samples, step % 20)
        batch = BatchSamples(each, np.arange(samples) + samples * (step % 25), None, None, each % 3, each // 2)
        often.add(batch, step)
        often.facts()
        once.add(batch, step)
        assert (len(often._waiting), len(once._waiting)) == (0, (step + 1) % (16 if samples == 8 else 5))
    assert once.facts() == often.facts()
    assert (once.batches, once.samples, once.facts().last_step) == (50, 50 * samples, 49)


def test_classes_of_an_epoch() -> None:
    """The changes of the class are counted across batches, and the expected number is that of a random order."""
    epoch = EpochSamples(0)
    for step, classes in enumerate(([0, 0, 0], [0, 1, 1], [1, 1, 2])):
        epoch.add(BatchSamples(keys(3, step), classes=np.array(classes)), step)
    found = epoch.facts()
    assert (found.classes, found.changes, found.samples) == (3, 2, 9)
    assert found.random_changes == pytest.approx(9 * (1 - (4**2 + 4**2 + 1) / 81))


def ranks(*samples: set[int]) -> list[RankSamples]:
    return [RankSamples(rank, (3, 4), (frozenset(each), frozenset({99}))) for rank, each in enumerate(samples)]


def test_ranks_with_the_same_samples() -> None:
    """Two of three ranks have the same samples in both steps."""
    found = compare_ranks(ranks({1, 2, 3}, {4, 5, 6}, {1, 2, 3}))
    assert found is not None
    assert (found.ranks, found.steps, found.same, found.shared) == (3, 2, (0, 2), 1.0)
    assert compare_ranks(ranks({1})) is None


def test_ranks_of_one_group_are_compared_once() -> None:
    """Ranks of a tensor-parallel group have the same samples on purpose, and so the same number."""
    own = RankSamples(0, (3,), (frozenset({1, 2}),))
    assert compare_ranks([own, own]) is None


def test_both_of_two_ranks_that_share_most_samples_are_named() -> None:
    """A rank with 15 of the 16 samples of another one, and two of its own, is named like that one."""
    found = compare_ranks(
        [RankSamples(0, (3,), (frozenset(range(16)),)), RankSamples(1, (3,), (frozenset([*range(15), 18, 19]),))]
    )
    assert found is not None
    assert (found.same, found.shared) == ((0, 1), 15 / 16)


@pytest.mark.parametrize(
    ("contents", "classes", "shared", "equal"),
    [
        ("same", "same", 1.0, 1.0),
        ("other", "same", 1.0, 1.0),  # an augmentation
        ("other", "other", 0.0, 0.0),
        ("other", "one", 1.0, 0.0),
        ("none", "one", 1.0, 0.0),
    ],
)
def test_the_same_indices_of_two_data_sets_are_told_by_values_and_classes(
    contents: str, classes: str, shared: float, equal: float
) -> None:
    """Equal values or the same classes tell that ranks have the same samples, and equal indices alone do not."""
    found = []
    for rank in range(2):
        values = {"same": keys(16), "other": keys(16, rank), "none": keys(0)}[contents]
        labels = {"same": np.arange(16) % 3, "other": (np.arange(16) + rank) % 3, "one": np.zeros(16, np.int64)}[
            classes
        ]
        batch = BatchSamples(values, rows=np.arange(16), classes=labels)
        found.append(RankSamples.of(rank, {3: StepSamples.of(batch, batch.keys)}))
    facts = compare_ranks(found)
    assert facts is not None
    assert (facts.shared, facts.equal) == (shared, equal)


def test_other_samples() -> None:
    """Ranks without a common sample share nothing."""
    found = compare_ranks([RankSamples(rank, (3,), (frozenset({rank, rank + 10}),)) for rank in range(4)])
    assert found is not None
    assert (found.shared, found.same) == (0.0, ())


@pytest.mark.parametrize(("samples", "ranks", "seeds"), [(66, 8, False), (130, 64, False), (200, 8, True)])
def test_samples_that_make_the_parts_of_ranks_equal_are_no_overlap(samples: int, ranks: int, seeds: bool) -> None:
    """A DistributedSampler repeats some samples at the end; parts of another permutation have more in common."""
    contents, dataset, found = keys(samples), TensorDataset(torch.zeros(samples)), []
    for rank in range(ranks):
        seed = rank if seeds else 0
        sampler: DistributedSampler[Any] = DistributedSampler(dataset, ranks, rank, seed=seed)
        epoch = EpochSamples(0)
        epoch.add(BatchSamples(contents[list(sampler)]), 0)
        epoch.is_whole = True
        found.append(RankEpoch.of(rank, epoch))
    examination = Examination()
    examination.add(record("activations", 0, {("a", "out"): {"rms": 1.0}}))
    loader = LoaderFacts(is_divided=True, has_rows=True, samples=samples)
    examination.set_data(DataFacts(loader=loader, rank_epoch=compare_epochs(found)))
    assert [each.rule for each in examination.findings()] == (["same-samples-on-ranks"] if seeds else [])
