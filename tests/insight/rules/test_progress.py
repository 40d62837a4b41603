"""Tests of the rules about the value of the loss over the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_recorder import Monitor, Outputs, open_recording
from lightning_recorder.bins import BINS, FIRST_CLASS_BIN
from lightning_recorder.graph import capture_graph
from lightning_recorder.records.classes import class_scalars
from lightning_recorder.reductions import to_histogram
from tests.insight.records import Examination, brief, record
from tests.insight.rules.test_operations import Step, mlp, rows

_STATISTICS = ("count", "mean", "std", "rms", "min", "max", "zero_fraction")
Sites = dict[tuple[str, str], dict[str, float]]
GUESS, FALLS = ("note", "loss-of-a-guess"), ("note", "still-falls")


def run_of_errors(
    losses: Sequence[float], *, every: int = 20, planned: int | None = None, columns: int = 1
) -> Examination:
    """Return a run with a squared error in each record, whose targets have the variance 4."""
    found = Examination(capture_graph(Step(mlp(columns), F.mse_loss), rows, torch.randn(8, columns)))
    sites: Sites = {("net.0", "out"): {}, ("mse_loss", "in.prediction"): {}, ("mse_loss", "in.target"): {"std": 2.0}}
    shapes = {("mse_loss", "in.target"): (8, columns), ("mse_loss", "out"): ()}
    for number, loss in enumerate(losses):
        found.add(record("activations", every * number, {**sites, ("mse_loss", "out"): {"mean": loss}}, shapes=shapes))
        about = {} if planned is None else {"planned_steps": planned}
        found.add(record("parameters", every * number, {("net.0", "weight"): {}}, about=about))
    return found


def run_of_shares(loss: float, counts: Sequence[int], records: int = 16, **options: Any) -> Examination:
    """Return a run with a cross-entropy, and the counts of classes in each record."""

    def compute(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits, target, **options)

    found = Examination(capture_graph(Step(mlp(5), compute), rows, torch.arange(8) % 3))
    bins = torch.zeros(BINS, dtype=torch.int64)
    bins[FIRST_CLASS_BIN : FIRST_CLASS_BIN + len(counts)] = torch.tensor(counts)
    site = ("cross_entropy", "in.target.classes")
    scalars = dict(zip(_STATISTICS, class_scalars(bins, _STATISTICS), strict=True))
    sites: Sites = {("net.0", "out"): {}, ("cross_entropy", "in.prediction"): {}, ("cross_entropy", "in.target"): {}}
    sites |= {site: scalars, ("cross_entropy", "out"): {"mean": loss}}
    for number in range(records):
        found.add(record("activations", 20 * number, sites, histograms={site: to_histogram(scalars, bins)}))
    return found


def named(examination: Examination) -> list[tuple[str, str]]:
    return [(severity, rule) for severity, rule, _ in brief(examination.findings())]


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([4.0] * 16, [GUESS]),
        ([8.0] * 4 + [4.0] * 12, [GUESS]),  # the first predictions are worse
        ([4.0] * 8 + [3.9] * 4 + [3.0] * 4, []),  # it learns late
        ([3.0] * 16, []),
        ([6.0] * 16, []),
        ([4.0] * 8, []),
    ],
)
def test_an_error_that_is_the_variance_of_the_targets(losses: list[float], expected: list[tuple[str, str]]) -> None:
    """A prediction of the mean has that error. Targets of several columns may have several means."""
    assert named(run_of_errors(losses)) == expected
    assert named(run_of_errors(losses, columns=3)) == []


def test_a_loss_that_is_the_entropy_of_the_classes() -> None:
    """The least loss without the input is a note, unless classes have weights or labels are smoothed."""
    entropy = 1.5 * np.log(2)
    found = run_of_shares(entropy, (50, 25, 25))
    assert named(found) == [GUESS]
    assert found.findings()[0].verdict == (
        "cross_entropy stays at 1.04, the loss of a guess: the entropy of its 3 classes is 1.04"
    )
    assert named(run_of_shares(np.log(3), (50, 25, 25))) == [GUESS]  # equal probabilities
    twins: list[tuple[float, dict[str, Any]]] = [
        (0.9 * entropy, {}),
        (entropy, {"label_smoothing": 0.1}),
        (entropy, {"weight": torch.ones(5)}),
    ]
    for loss, options in twins:
        assert named(run_of_shares(loss, (50, 25, 25), **options)) == []
    assert GUESS not in named(run_of_shares(0.0, (100,)))


def test_a_loss_that_still_falls() -> None:
    """A straight line at the end of a run is a note; a curve, the middle of a run, and a halved loss are none."""
    straight = [3.0 - 0.01 * number for number in range(32)]
    found = run_of_errors(straight)
    assert named(found) == [FALLS]
    assert found.findings()[0].verdict.endswith("a record: the means of the quarters are 2.97, 2.89, 2.81, 2.73")
    assert named(run_of_errors(straight, planned=625)) == [FALLS]
    assert named(run_of_errors(straight, planned=1000)) == []
    assert named(run_of_errors([3.0 + np.exp(-number / 8) for number in range(32)])) == []
    assert named(run_of_errors([3.0 - 0.09 * number for number in range(32)])) == []


def test_nothing_is_said_if_something_else_is_found() -> None:
    """A loss that does not fall is then a consequence."""
    found = run_of_errors([4.0] * 16)
    dead = {("net.1", "out"): {"zero_fraction": 1.0}}
    for number in range(16):
        found.add(record("activations", 20 * number, dead, recorder="activations-2"))
    assert ("warning", "dead-output") in named(found)
    assert GUESS not in named(found)


@pytest.mark.parametrize("shuffled", [True, False])
def test_targets_that_are_shuffled(shuffled: bool, tmp_path: Path) -> None:
    """A real run whose labels do not belong to its inputs stays at the loss of a guess, and its twin does not."""
    torch.manual_seed(0)
    inputs = torch.randn(2048, 5)
    labels = (inputs[:, 0] > -0.4).long() + (inputs[:, 0] > 0.4).long()
    labels = labels[torch.randperm(2048)] if shuffled else labels
    net = mlp(3)
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    outputs = Outputs(plots=False, report=False)
    with Monitor(net, optimizer, log_dir=tmp_path, every_n_steps=10, outputs=outputs) as monitor:
        for at in torch.randint(0, 2048, (300, 64)):
            with monitor.step((inputs[at], labels[at])):
                optimizer.zero_grad()
                loss = F.cross_entropy(net(inputs[at]), labels[at])
                loss.backward()
                optimizer.step()
                monitor.log(loss=loss)
    assert ("loss-of-a-guess" in [each.rule for each in open_recording(tmp_path).findings]) is shuffled


@pytest.mark.parametrize(
    ("loss", "options", "is_wrong"), [(20.0, {}, True), (4.0, {}, False), (20.0, {"reduction": "sum"}, False)]
)
def test_the_first_loss_is_that_of_a_guess(loss: float, options: dict[str, str], is_wrong: bool) -> None:
    """A mean cross-entropy of 12 times the logarithm of the classes before any training is a finding."""
    found = [
        each for each in run_of_shares(loss, (12, 12), records=4, **options).findings() if each.rule == "first-loss"
    ]
    assert brief(found) == [("warning", "first-loss", "")] * is_wrong
    assert [each.numbers["ratio"] for each in found] == pytest.approx([20 / np.log(5)] * is_wrong)


@pytest.mark.parametrize(("margin", "is_wrong"), [(0.0, True), (0.5, False)])
def test_a_margin_makes_the_first_loss_large(margin: float, is_wrong: bool) -> None:
    """A loss that lowers the logit of the target, as ArcFace, begins far above that of a guess."""

    class Margin(torch.nn.Module):
        def forward(self, cosines: Tensor, y: Tensor) -> Tensor:
            lowered = cosines - margin * F.one_hot(y, 5) if margin else cosines
            return F.cross_entropy(30 * lowered, y)

    examination = Examination(capture_graph(Step(mlp(5), Margin()), rows, torch.arange(8) % 3))
    for step in (0, 20):
        sites: Sites = {("net.0", "out"): {}, ("loss.cross_entropy", "out"): {"mean": 20.0}}
        examination.add(record("activations", step, sites))
    assert [each.rule for each in examination.findings() if each.rule == "first-loss"] == ["first-loss"] * is_wrong


def test_a_run_that_is_resumed_has_no_first_loss() -> None:
    """Its first record is of a later step."""
    late = Examination(capture_graph(Step(mlp(5), F.cross_entropy), rows, torch.arange(8) % 3))
    for step in (20, 40):
        late.add(record("activations", step, {("net.0", "out"): {}, ("cross_entropy", "out"): {"mean": 20.0}}))
    assert [each for each in late.findings() if each.rule == "first-loss"] == []
