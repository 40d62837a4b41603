"""Tests of the rules about classes: each fault, its repaired twin, and healthy designs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.nn import functional as F

from lightning_recorder.bins import BINS, FIRST_CLASS_BIN
from lightning_recorder.graph import capture_graph
from lightning_recorder.records.classes import class_scalars
from lightning_recorder.reductions import to_histogram
from tests.callbacks.test_functions import Net, fit, recorders
from tests.insight.records import Examination, brief, record
from tests.insight.rules.test_operations import Step, mlp, rows

NAMES = ("all-ignored", "constant-target", "one-class-predicted")
Counts = Mapping[int, int]
_STATISTICS = ("count", "mean", "std", "rms", "min", "max", "zero_fraction")


def run_of_classes(
    predicted: Sequence[Counts],
    meant: Sequence[Counts],
    *,
    ignored: float = 0.0,
    spread: float = 0.075,
    loss: Any = F.cross_entropy,
) -> Examination:
    """Return a run with the counts of the classes in each record, and the spread of the predictions."""
    graph = capture_graph(Step(mlp(5), loss), rows, torch.arange(8) % 3)
    found = Examination(graph)
    for number, sides in enumerate(zip(predicted, meant, strict=True)):
        sites: dict[tuple[str, str], dict[str, float]] = {("net.0", "out"): {}}
        sites["cross_entropy", "in.target.ignored"] = {"mean": ignored}
        sites["cross_entropy", "in.prediction"] = {"batch_spread": spread}
        histograms = {}
        for side, counts in zip(("prediction", "target"), sides, strict=True):
            bins = torch.zeros(BINS, dtype=torch.int64)
            for each, count in counts.items():
                bins[FIRST_CLASS_BIN + each] = count
            site = ("cross_entropy", f"in.{side}.classes")
            sites[site] = dict(zip(_STATISTICS, class_scalars(bins, _STATISTICS), strict=True))
            histograms[site] = to_histogram(sites[site], bins)
        found.add(record("activations", 10 * number, sites, histograms=histograms))
    return found


def named(examination: Examination) -> list[tuple[str, str, str]]:
    return brief([each for each in examination.findings() if each.rule in NAMES])


SEVERAL, ONE = {0: 20, 1: 20, 2: 24}, {1: 64}
PREDICTED = ("one-class-predicted", "cross_entropy")


def test_one_predicted_class() -> None:
    """The same class for all samples of many records is a finding; several classes are none."""
    examination = run_of_classes([ONE] * 16, [SEVERAL] * 16)
    assert named(examination) == [("warning", *PREDICTED)]
    assert "class 1 for all samples of each of the last 8 records; 31% of" in examination.findings()[-1].verdict
    assert named(run_of_classes([ONE, {0: 64}] * 8, [SEVERAL] * 16)) == [("warning", *PREDICTED)]
    assert named(run_of_classes([ONE] * 16, [SEVERAL] * 15 + [ONE])) == []  # as in batches of one sample
    assert named(run_of_classes([ONE] * 16, [SEVERAL] * 16, spread=0.5)) == [("note", *PREDICTED)]
    assert named(run_of_classes([SEVERAL] * 16, [SEVERAL] * 16)) == []
    assert named(run_of_classes([ONE] * 12, [SEVERAL] * 12)) == []  # a run that has only begun


@pytest.mark.parametrize("rest", [20, 1])
def test_a_class_that_most_targets_have(rest: int) -> None:
    """Predicting the most frequent class is a note, also if nearly all targets have it."""
    meant = {1: 64 - rest, 0: rest}
    assert [each[0] for each in named(run_of_classes([ONE] * 16, [meant] * 16))] == ["note"]


def test_all_targets_are_ignored() -> None:
    """A loss without a target is a finding, most of them ignored are none."""
    assert named(run_of_classes([SEVERAL] * 2, [{}] * 2, ignored=1.0)) == [("critical", "all-ignored", "cross_entropy")]
    assert named(run_of_classes([SEVERAL] * 2, [ONE] * 2, ignored=0.9)) == []


class Labels(Net):
    """A classifier whose labels or images are changed."""

    def __init__(self, change: Callable[[list[Tensor]], list[Tensor]]) -> None:
        super().__init__(F.relu)
        self.change = change

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return self.change(batch)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda batch: batch, []),
        (lambda batch: [batch[0], torch.full_like(batch[1], -100)], ["all-ignored"]),
        (lambda batch: [batch[0], batch[1] * 0 + 3], ["constant-target"]),
    ],
)
def test_real_runs(tmp_path: Path, change: Any, expected: list[str]) -> None:
    """Changed batches give the finding; the loss that is NaN without targets is its consequence."""
    seed_everything(3, verbose=False)
    findings = fit(tmp_path, Labels(change), *recorders(1), steps=24)[1]
    assert [each["rule"] for each in findings if each["rule"] in NAMES] == expected
    if expected == ["all-ignored"]:
        assert [each["rule"] for each in findings] == expected


@pytest.mark.parametrize(("factor", "expected"), [(1.0, "note"), (0.0, "warning")])
def test_predictions_without_the_input(tmp_path: Path, factor: float, expected: str) -> None:
    """A model that gets zeros predicts one class for all samples; the same model learns slowly from its images."""
    seed_everything(3, verbose=False)
    findings = fit(tmp_path, Labels(lambda batch: [batch[0] * factor, batch[1]]), *recorders(4), steps=90)[1]
    assert [each["severity"] for each in findings if each["rule"] == "one-class-predicted"] == [expected]


def test_statistics_of_no_class() -> None:
    """Without a counted class, the statistics are unknown."""
    found = class_scalars(torch.zeros(BINS, dtype=torch.int64), ("count", "mean", "min"))
    assert found[0] == 0
    assert np.isnan(found[1:]).all()


def of_an_ignored_class(
    ignored: int, share: float, target: Tensor | None = None, *, x: Tensor | None = None, records: int = 4
) -> Examination:
    """Return a run with a share of targets that have the number to ignore."""

    def loss(y: Tensor, classes: Tensor) -> Tensor:
        return F.cross_entropy(y.flatten(0, -2), classes.flatten(), ignore_index=ignored)

    target = torch.arange(8) % 3 if target is None else target
    found = Examination(capture_graph(Step(mlp(5), loss), rows if x is None else x, target))
    for number in range(records):
        sites: dict[tuple[str, str], dict[str, float]] = {("net.0", "out"): {}}
        sites["cross_entropy", "in.target.ignored"] = {"mean": share}
        found.add(record("activations", 10 * number, sites))
    return found


@pytest.mark.parametrize(
    ("ignored", "share", "target", "x", "is_wrong"),
    [
        (0, 0.1, None, None, True),
        (-100, 0.1, None, None, False),
        (7, 0.1, None, None, False),  # no class
        (0, 0.0, None, None, False),
        (0, 0.1, torch.arange(8).view(4, 2) % 3, None, False),  # of sequences
        (0, 0.1, None, rows.view(4, 2, 5), False),  # of sequences, one after the other
    ],
)
def test_a_class_that_is_ignored(
    ignored: int, share: float, target: Tensor | None, x: Tensor | None, is_wrong: bool
) -> None:
    """ignore_index must not be one of the classes of samples; in sequences it may be the padding."""
    run = of_an_ignored_class(ignored, share, target, x=x)
    found = [each for each in run.findings() if each.rule == "class-ignored"]
    names = [each.verdict.partition(" ignores ")[2] for each in found]
    assert names == ["class 0, one of 5 that the model predicts: 10% of the samples do not count"] * is_wrong


def run_of_weights(
    weights: Sequence[float], shares: Sequence[float], *, records: int = 8, targets: float = 32.0, ignored: float = 0.0
) -> Examination:
    """Return a run of a loss with weights of its classes, of which the targets have some shares."""
    examination, all_of = Examination(), np.array(weights)
    of_targets = float(all_of @ np.array(shares)) * (1 - ignored)
    for row in range(records):
        sites = {
            ("cross_entropy", "in.target"): {"count": targets},
            ("cross_entropy", "in.target.ignored"): {"count": targets, "mean": ignored},
            ("cross_entropy", "in.target.weights"): {
                "mean": float(all_of.mean()),
                "rms": float((all_of**2).mean() ** 0.5),
                "min": float(all_of.min()),
            },
            ("cross_entropy", "in.target.weight"): {"count": targets, "mean": of_targets},
            ("head", "out"): {},
        }
        examination.add(record("activations", row * 10, sites))
    return examination


@pytest.mark.parametrize("ignored", [0.0, 0.4])
@pytest.mark.parametrize("shares", [(0.95, 0.05), (0.8, 0.15, 0.05), (0.9, *[0.01] * 10)])
def test_weights_that_are_inverted(shares: tuple[float, ...], ignored: float) -> None:
    """Weights that are the shares of the classes are a finding, and their inverses are not."""
    (found,) = run_of_weights([3 * each for each in shares], shares, ignored=ignored).findings()
    assert brief([found]) == [("warning", "inverted-weights", "cross_entropy")]
    assert run_of_weights([0.1 / each for each in shares], shares, ignored=ignored).findings() == []


@pytest.mark.parametrize("share", [0.02, 0.1, 0.9])
def test_a_pos_weight_that_is_inverted(share: float) -> None:
    """The same for the weight of the second of two classes."""
    inverted = [1.0, share / (1 - share)]
    assert [each.rule for each in run_of_weights(inverted, [1 - share, share]).findings()] == ["inverted-weights"]
    assert run_of_weights([1.0, 1 / inverted[1]], [1 - share, share]).findings() == []


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ((1.0, 1.0, 0.1), (0.1, 0.1, 0.8)),  # the background counts less
        ((1.0, 1.0, 0.0), (0.6, 0.3, 0.1)),  # a class that does not count
        ((1.0, 0.5), (0.95, 0.05)),  # precision counts more than recall
        ((1.0, 2.0), (0.3, 0.7)),  # a frequent class that is worse to miss
        ((2.0, 1.0, 1.0), (0.4, 0.3, 0.3)),
        ((1.0, 1.0), (0.99, 0.01)),
        ((0.3, 3.0), (0.5, 0.5)),  # a sampler that draws all classes equally
    ],
)
def test_weights_that_are_meant(weights: tuple[float, ...], shares: tuple[float, ...]) -> None:
    """Weights that are not the shares of the classes may have a reason."""
    assert run_of_weights(weights, shares).findings() == []
