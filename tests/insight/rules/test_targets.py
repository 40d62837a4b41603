"""Tests of the rules about what a loss compares: each fault, its repaired twin, and healthy designs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_recorder.graph import capture_graph
from lightning_recorder.graph.model import Graph
from lightning_recorder.insight import RULES, Finding
from lightning_recorder.records.histogram import EDGES
from lightning_recorder.reductions import Histogram
from tests.insight.records import Examination, Values, brief, examined, record, run
from tests.insight.rules.test_operations import Loss, Step, classes, mlp, of_batch, rows

FILES = (".targets", ".target_sources")
NAMES = {rule.name for rule in RULES if rule.function.__module__.endswith(FILES)}


def with_targets(
    loss: Loss, *last: nn.Module, outputs: int = 1, target: Tensor | None = None, **values: float
) -> list[Finding]:
    """Return the findings of a step with a loss of torch whose targets have some statistics."""
    target = torch.randn(8, outputs) if target is None else target
    graph = capture_graph(Step(mlp(outputs, *last), loss), rows, target)
    name = next(
        node.name for node in graph.nodes if node.name in ("cross_entropy", "mse_loss") or "binary" in node.name
    )
    targets: dict[str, Values] = {name: values}
    return [each for each in run({"net.0": {}}, targets=targets, graph=graph) if each.rule in NAMES]


@pytest.mark.parametrize(
    ("last", "least", "most", "is_wrong"),
    [
        (nn.Sigmoid(), 21.0, 82.0, True),
        (nn.Sigmoid(), 0.0, 1.0, False),
        (nn.Tanh(), -3.0, 3.0, True),
        (nn.Tanh(), -1.0, 1.1, False),
        (nn.ReLU(), -2.0, 4.0, True),
        (nn.ReLU(), 0.0, 90.0, False),
        (nn.Identity(), -3.0, 90.0, False),
    ],
)
def test_targets_out_of_the_range_of_the_outputs(last: nn.Module, least: float, most: float, is_wrong: bool) -> None:
    """Targets that the activation after the last layer cannot return are a finding with both ranges."""
    found = with_targets(F.mse_loss, last, min=least, max=most, rms=1.0)
    assert brief(found) == [("warning", "output-range", "net.3")] * is_wrong
    assert all(f"targets from {least:.3g} to {most:.3g}" in each.verdict for each in found)


def test_labels_that_are_no_probabilities() -> None:
    """Labels of -1 and 1, or 1 and 2, for a binary cross entropy are a finding, and smoothed ones are not."""
    loss = F.binary_cross_entropy_with_logits
    assert [each.rule for each in with_targets(loss, min=-1.0, max=1.0)] == ["output-range"]
    assert [each.rule for each in with_targets(loss, min=1.0, max=2.0)] == ["output-range"]
    assert with_targets(loss, min=0.0, max=1.05) == []


@pytest.mark.parametrize(("mean", "last", "is_wrong"), [(0.3, 0, True), (0.26, 0, False), (0.3, 1, False)])
def test_several_classes_of_a_sample_for_a_softmax(mean: float, last: int, is_wrong: bool) -> None:
    """Targets that add up to more than the outputs of a softmax do are a finding; with a sigmoid they are not."""
    activation = (nn.Softmax(-1), nn.Sigmoid())[last]
    target = torch.rand(8, 4)
    found = with_targets(F.binary_cross_entropy, activation, outputs=4, target=target, min=0.0, max=1.0, mean=mean)
    assert brief(found) == [("warning", "output-range", "net.3")] * is_wrong


def test_an_error_of_probabilities_and_classes() -> None:
    """A squared error of a softmax, or of one sigmoid, and 0 and 1 is a finding; one of other targets is not."""
    zeros_and_ones: dict[str, Any] = {"min": 0.0, "max": 1.0, "mean": 0.25, "rms": 0.5}
    (found,) = with_targets(F.mse_loss, nn.Softmax(-1), outputs=4, **zeros_and_ones)
    assert brief([found]) == [("warning", "classes-by-error", "net.3")]
    assert [each.rule for each in with_targets(F.mse_loss, nn.Sigmoid(), **zeros_and_ones)] == ["classes-by-error"]
    assert with_targets(F.mse_loss, nn.Sigmoid(), outputs=4, **zeros_and_ones) == []
    assert with_targets(F.mse_loss, nn.Softmax(-1), outputs=4, min=0.0, max=1.0, mean=0.25, rms=0.3) == []
    assert with_targets(F.mse_loss, outputs=4, **zeros_and_ones) == []


@pytest.mark.parametrize(("end", "severity"), [(0.3, "warning"), (0.2, "note")])
def test_an_error_of_probabilities_that_is_solved(end: float, severity: str) -> None:
    """If the squared error has fallen to less than 5 % of the first one, it has done no harm."""
    graph = capture_graph(Step(mlp(1, nn.Sigmoid()), F.mse_loss), rows, torch.rand(8, 1))
    values: dict[str, Values] = {"mse_loss": {"min": 0.0, "max": 1.0, "mean": 0.25, "rms": 0.5}}
    gradients: dict[str, Values] = {"net.3": {"rms": [1.0] * 4 + [end] * 4}}
    found = run({"net.3": {}}, gradients, targets=values, graph=graph)
    assert [each.severity for each in found if each.rule == "classes-by-error"] == [severity]


def test_a_binary_loss_of_a_softmax() -> None:
    """A binary cross entropy of a softmax over several classes is a finding; over two, or of sigmoids, it is not."""
    values: dict[str, Any] = {"min": 0.0, "max": 1.0, "mean": 0.25, "rms": 0.5}
    target = torch.rand(8, 4)
    (found,) = with_targets(F.binary_cross_entropy, nn.Softmax(-1), outputs=4, target=target, **values)
    assert brief([found]) == [("warning", "classes-by-error", "net.3")]
    assert "entry by entry" in found.verdict
    assert with_targets(F.binary_cross_entropy, nn.Sigmoid(), outputs=4, target=target, **values) == []
    half: dict[str, Any] = {**values, "mean": 0.5, "rms": 0.5**0.5}
    assert with_targets(F.binary_cross_entropy, nn.Softmax(-1), outputs=2, target=torch.rand(8, 2), **half) == []


def test_the_range_of_a_selected_column() -> None:
    """A column of the outputs has the range of their activation."""
    found = with_targets(lambda y, target: F.mse_loss(y[:, 0], target), nn.Sigmoid(), target=torch.rand(8), max=2.0)
    assert brief(found) == [("warning", "output-range", "net.3")]


def test_targets_that_are_all_equal() -> None:
    """Targets from the batch that are one class in every record are a finding; those that the step makes are not."""
    (found,) = with_targets(F.cross_entropy, outputs=3, target=classes, min=0.0, max=0.0)
    assert found.rule == "constant-target"
    assert found.verdict.endswith("are 0 in each of 8 records")

    def discriminated(y: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(y, torch.zeros(8, dtype=torch.long)) + 0 * target.sum()

    assert with_targets(discriminated, outputs=3, target=classes, min=0.0, max=0.0) == []

    def of_pairs(y: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(y @ y.T / 0.1, torch.zeros(8, dtype=torch.long)) + 0 * target.sum()

    def of_queue(y: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(y @ torch.randn(8, 3).T, torch.zeros(8, dtype=torch.long)) + 0 * target.sum()

    (found,) = with_targets(of_pairs, outputs=3, target=classes, min=0.0, max=0.0)
    assert found.rule == "constant-target"
    assert with_targets(of_pairs, outputs=3, target=classes, min=0.0, max=7.0) == []
    assert with_targets(of_queue, outputs=3, target=classes, min=0.0, max=0.0) == []
    assert with_targets(F.cross_entropy, outputs=3, target=classes, min=0.0, max=2.0) == []


def errors(error: float, outputs: int = 2, loss: Loss = F.mse_loss, *, flips: bool = False) -> list[Finding]:
    """Return the findings of a regression with predictions of rms 2 that are off by a mean error."""
    graph = capture_graph(Step(mlp(outputs), loss), rows, torch.randn(8, outputs))
    gradient = [2 * error / outputs] * 8
    mean = [each * (-1 if flips and row % 3 == 0 else 1) for row, each in enumerate(gradient)]
    bias: dict[str, Values] = {"net.2/bias": {}, "net.2/bias.grad": {"rms": gradient, "mean": mean}}
    shapes = {("net.2", "bias.grad"): (outputs,)}
    found = run({"net.2": {"rms": 2.0}}, None, bias, graph=graph, shapes=shapes)
    return [each for each in found if each.rule in NAMES]


@pytest.mark.parametrize("outputs", [1, 2])
def test_targets_that_are_far_away(outputs: int) -> None:
    """A mean error of more than ten times the predictions is a finding; the gradient of the last bias has it."""
    (found,) = errors(30.0, outputs)
    assert brief([found]) == [("warning", "target-scale", "net.2")]
    assert found.verdict == "the mean error of the predictions from net.2 is 30 at step 70, 15 × their rms (2)"
    assert errors(19.0, outputs) == []
    assert errors(30.0, 1, flips=True) == []  # the noise of small batches around predictions close to 0


@pytest.mark.parametrize(
    ("target", "prediction", "records", "is_wrong"),
    [(60.0, 5.0, 8, True), (60.0, 7.0, 8, False), (40.0, 0.1, 8, False), (60.0, 5.0, 7, False)],
)
def test_recorded_targets_that_are_far_away(target: float, prediction: float, records: int, is_wrong: bool) -> None:
    """Targets that are large, and ten times the predictions, are a finding for any error and reduction."""
    graph = capture_graph(Step(mlp(1), lambda y, t: F.l1_loss(y, t, reduction="sum")), rows, torch.randn(8, 1))
    sides: dict[str, Any] = {"targets": {"l1_loss": {"rms": target}}, "predictions": {"l1_loss": {"rms": prediction}}}
    layers: dict[str, Values] = {"net.2": {"rms": prediction}}
    found = [each for each in run(layers, **sides, graph=graph, records=records) if each.rule == "target-scale"]
    assert brief(found) == [("warning", "target-scale", "l1_loss")] * is_wrong
    assert all(each.verdict.endswith("rms 60 in the latest record, and the predictions 5") for each in found)


def test_the_error_is_not_known_if_the_gradient_has_other_parts() -> None:
    """Another reduction, a factor or a second term of the loss changes the gradient."""
    assert errors(30.0, loss=lambda y, target: F.mse_loss(y, target, reduction="sum")) == []
    assert errors(30.0, loss=lambda y, target: 2 * F.mse_loss(y, target)) == []
    assert errors(30.0, loss=lambda y, target: F.mse_loss(y, target) + y.abs().mean()) == []


def test_the_mean_error_is_that_of_torch() -> None:
    """The mean error that the rule derives is the one that the predictions have."""
    net = mlp(2)
    target = torch.randn(8, 2) + 5
    prediction = net(rows)
    F.mse_loss(prediction, target).backward()
    bias = net.get_submodule("2").bias
    assert isinstance(bias, nn.Parameter)
    assert bias.grad is not None
    torch.testing.assert_close(bias.grad * 2 / 2, (prediction - target).mean(0).detach())


@pytest.mark.parametrize(("least", "is_wrong"), [(0.0, True), (-1.0, False)])
def test_labels_of_pairs(least: float, is_wrong: bool) -> None:
    """A loss of pairs expects -1 and 1."""

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(3)

        def forward(self, x: Tensor, label: Tensor) -> Tensor:
            return F.cosine_embedding_loss(self.net(x), self.net(x + 1), label)

    graph = capture_graph(Pairs(), rows, torch.ones(8))
    found = run({"net.0": {}}, targets={"cosine_embedding_loss": {"min": least, "max": 1.0}}, graph=graph)
    assert [each.rule for each in found if each.rule in NAMES] == ["output-range"] * is_wrong


def test_a_range_in_a_loss_that_is_written_out() -> None:
    """The targets of a squared error that the step computes itself are those of the batch."""

    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(1, nn.Sigmoid())

        def forward(self, batch: list[Tensor]) -> Tensor:
            error: Tensor = batch[1] - self.net(batch[0])
            return error.square().mean(-1).mean()

    captured = capture_graph(Written(), [rows, rows[:, :1]])
    # The tensors of a training step are named after its batch.
    nodes = tuple(replace(node, name=node.name.replace("input", "batch")) for node in captured.nodes)
    graph = replace(captured, nodes=nodes)
    for low, high, rules in ((21.0, 82.0, ["output-range"]), (0.0, 0.9, [])):
        examination = Examination(graph)
        for row in range(4):
            sites = {("net.3", "out"): {}, ("", "batch[1]"): {"min": low, "max": high}}
            examination.add(record("activations", row * 10, sites))
        found = [each for each in examination.findings() if each.rule in NAMES]
        assert [each.rule for each in found] == rules
        assert all("mse_loss" in each.verdict for each in found)


@pytest.mark.parametrize(("share", "is_wrong"), [(0.2, True), (0.0, False)])
def test_labels_that_are_the_blank(share: float, is_wrong: bool) -> None:
    """Labels of ctc_loss must not be the blank."""
    examination = Examination(capture_graph(mlp(3), rows))
    for step in range(0, 40, 10):
        sites: dict[tuple[str, str], dict[str, float]] = {
            ("", "out"): {},
            ("ctc_loss", "in.target.blank"): {"mean": share},
        }
        examination.add(record("activations", step, sites))
    found = [each for each in examination.findings() if each.rule == "output-range"]
    assert [each.verdict for each in found] == ["20% of the labels that ctc_loss gets are the blank"] * is_wrong


def of_numbers(
    target: Tensor, largest: list[float], *, loss: Loss | None = None, outputs: int = 1, values: Sequence[float] = ()
) -> Examination:
    """Return a run of a regression whose targets are at most some numbers; their last values are in a histogram."""
    graph = capture_graph(Step(mlp(outputs), loss or as_numbers), rows, target)
    found = np.array(values)
    counts, edges = np.histogram(found, bins=EDGES)
    kept = Histogram(edges, counts, found.min(), found.max(), found.sum(), (found**2).sum()) if values else None
    return examined(
        {"net.2": {}},
        targets={"mse_loss": {"min": 0.0, "max": largest}},
        graph=graph,
        records=len(largest),
        histograms={("mse_loss", "in.target"): kept} if kept is not None else None,
    )


def as_numbers(y: Tensor, target: Tensor) -> Tensor:
    """Return the squared error of class numbers."""
    return F.mse_loss(y.squeeze(-1), target.float())


NUMBERED = "are 10 whole numbers, 0 to 9, and the prediction of each sample is one number"


def test_classes_as_numbers() -> None:
    """Class numbers as targets of a squared error are a note that says what was measured; one-hot targets are fine."""
    (found,) = of_numbers(torch.arange(8), [9.0] * 8).findings()
    assert brief([found]) == [("note", "classes-as-numbers", "")]
    assert found.verdict.endswith(NUMBERED)

    def one_hot(y: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(y, F.one_hot(target, 8).float())

    assert of_numbers(torch.arange(8), [1.0] * 8, loss=one_hot, outputs=8).findings() == []
    assert of_numbers(torch.arange(8), [9.0] * 8, loss=one_hot, outputs=8).findings() == []


@pytest.mark.parametrize(
    ("values", "is_whole"),
    [
        ([0, 1, 2, 3, 8, 9, 9], True),
        ([0, 1, 2, 3, 8, 8, 9.0], True),
        ([0, 1.125, 2, 9], False),
        ([0, 2, 8.5, 8.5, 9], False),
        ([0, 2, 8.5, 9], False),
    ],
)
def test_whole_numbers_of_a_float_target(values: list[float], is_whole: bool) -> None:
    """The histogram of floats shows if they are whole numbers, also in the bin that 8 and 9 share."""
    found = of_numbers(torch.randn(8), [9.0] * 8, values=values).findings()
    assert [each.rule for each in found] == ["classes-as-numbers"] * is_whole


def in_one_step(y: Tensor, target: Tensor) -> Tensor:
    """Return a target that follows from the prediction, as of a value of the next state."""
    return F.mse_loss(y.squeeze(-1), target.float() + y.detach().squeeze(-1).round())


@pytest.mark.parametrize(
    ("target", "largest", "options"),
    [
        (torch.arange(8), [5.0, 9.0, 4.0, 6.0, 5.0, 7.0, 3.0, 4.0], {}),  # counts
        (torch.arange(8), [1.0] * 8, {}),  # two classes
        (torch.arange(8), [87.0] * 8, {}),  # ages
        (torch.randn(8), [9.0] * 8, {}),  # floats without a histogram
        (torch.randn(8), [2.5] * 8, {"values": [0.0, 1.0, 2.5]}),  # ratings with halves
        (torch.arange(8), [3.0] * 8, {"loss": in_one_step}),  # values of actions
        (torch.arange(16).view(8, 2), [9.0] * 8, {"outputs": 2, "loss": F.mse_loss}),  # several numbers
    ],
)
def test_numbers_that_are_no_classes(target: Tensor, largest: list[float], options: dict[str, Any]) -> None:
    """Counts, ages, two classes, fractions, several outputs and targets of the model itself are fine."""
    found = of_numbers(target, largest, **options).findings()
    assert [each.rule for each in found if each.rule == "classes-as-numbers"] == []


def test_ratings_that_begin_at_one() -> None:
    """Ratings from 1 to 5 are fine, since classes begin at 0."""
    graph = capture_graph(Step(mlp(1), as_numbers), rows, torch.arange(8))
    assert run(targets={"mse_loss": {"min": 1.0, "max": 5.0}}, graph=graph) == []


def test_class_numbers_in_a_loss_that_is_written_out() -> None:
    """The square of a difference is a squared error, too."""
    graph = capture_graph(
        Step(mlp(1), lambda y, target: (y.squeeze(-1) - target).square().mean()), rows, torch.arange(8)
    )
    nodes = [replace(node, name="batch[1]") if node.name == "input[1]" else node for node in graph.nodes]
    examination = Examination(Graph(tuple(nodes), graph.edges))
    for row in range(8):
        sites = {("", "batch[1]"): {"min": 0.0, "max": 2.0}, ("net.2", "out"): {}}
        examination.add(record("activations", row * 10, sites))
    assert [each.rule for each in examination.findings()] == ["classes-as-numbers"]


class Adversaries(nn.Module):
    """A generator and a discriminator that also gets data."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.generator, self.discriminator = nn.Sequential(nn.Linear(5, 5), last), nn.Linear(5, 1)

    def forward(self, real: Tensor) -> Tensor:
        fake = self.generator(torch.randn_like(real))
        of_discriminator: Tensor = self.discriminator(fake.detach()).mean() - self.discriminator(real).mean()
        return of_discriminator - F.softplus(self.discriminator(fake)).mean()


class Repeated(nn.Module):
    """A layer that gets the data and then its own output."""

    def __init__(self) -> None:
        super().__init__()
        self.discriminator = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        mean: Tensor = self.discriminator(torch.tanh(self.discriminator(x))).mean()
        return mean


def of_generator(last: nn.Module, low: float, high: float, *, records: int = 4) -> Examination:
    """Return a run of a GAN whose data have a range, or of a :class:`Repeated`."""
    net = last if isinstance(last, Repeated) else Adversaries(last)
    examination = Examination(of_batch(capture_graph(net, torch.randn(8, 5))))
    for step in range(records):
        examination.add(record("activations", step, {("", "batch[0]"): {"min": low, "max": high}}, recorder="batch"))
        examination.add(record("activations", step, {("discriminator", "out"): {}}))
    return examination


@pytest.mark.parametrize(
    ("last", "low", "high", "is_wrong"),
    [
        (nn.Tanh(), 0.0, 255.0, True),
        (nn.Sigmoid(), -100.0, 1.0, True),
        (nn.Tanh(), -1.0, 1.0, False),
        (nn.Tanh(), -0.5, 2.8, False),  # standardized
        (nn.Identity(), 0.0, 255.0, False),
        (Repeated(), 0.0, 255.0, False),
    ],
)
def test_data_beyond_the_range_of_a_generator(last: nn.Module, low: float, high: float, is_wrong: bool) -> None:
    """Data that the last activation of the generator cannot return are a finding."""
    found = [each for each in of_generator(last, low, high).findings() if each.rule == "output-range"]
    assert brief(found) == [("warning", "output-range", "generator.1")] * is_wrong
