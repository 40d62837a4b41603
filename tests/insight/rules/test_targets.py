"""Tests of the rules about what a loss compares: each fault, its repaired twin, and healthy designs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_recorder import Outputs, default_recorders, open_recording
from lightning_recorder.graph import capture_graph
from lightning_recorder.graph.model import Graph
from lightning_recorder.insight import RULES, Finding
from lightning_recorder.records.histogram import EDGES
from lightning_recorder.reductions import Histogram
from tests.insight.records import Examination, Values, brief, examined, parts, record, run
from tests.insight.rules.test_operations import (
    Causal,
    Loss,
    Shaped,
    Step,
    classes,
    mlp,
    rows,
    tokens,
    trained_step,
)

NAMES = {rule.name for rule in RULES if rule.function.__module__.endswith(".targets")}


class Unshifted(nn.Module):
    """A step of a language model whose targets are its tokens."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.net(ids), ids)


def test_targets_that_are_not_shifted() -> None:
    """A causal model whose targets are its inputs is a finding; an autoencoder is not, also if it masks its padding."""
    graph = capture_graph(Unshifted(Causal(lambda ones: ones.triu(1), False)), tokens)
    for future, rules in ((0.0, ["copies-the-input"]), (0.3, [])):
        examination = parts({"net.softmax": [{"future": future}] * 2}, graph=graph)
        examination.add(record("activations", 0, {("net", "out"): {}}, recorder="layers"))
        assert [each.rule for each in examination.findings() if each.rule in NAMES] == rules
    assert [each.rule for each in Examination(graph).findings() if each.rule in NAMES] == []  # nothing is measured


class Tagger(nn.Module):
    """An embedding, a recurrence, and logits of each state, or of the last state for all positions."""

    def __init__(self, *, is_repeated: bool = False, length: int = 6) -> None:
        super().__init__()
        self.embedding, self.mix, self.head = nn.Embedding(16, 4), nn.GRU(4, 4, batch_first=True), nn.Linear(4, 16)
        self.is_repeated, self.length = is_repeated, length

    def forward(self, ids: Tensor) -> Tensor:
        states, last = self.mix(self.embedding(ids))
        states = last[0, :, None].expand(-1, self.length, -1) if self.is_repeated else states
        logits: Tensor = self.head(states.relu())
        return logits


class Repeats(nn.Module):
    """A step of a model of the tokens, which also makes the tokens that it should read."""

    def __init__(self, net: nn.Module, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.read = net, read

    def forward(self, ids: Tensor) -> Tensor:
        shifted = torch.cat([torch.zeros_like(ids[:, :1]), ids[:, :-1]], 1)
        del shifted
        return F.cross_entropy(self.net(self.read(ids)).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize(
    ("net", "read", "is_wrong"),
    [
        (Tagger(), lambda ids: ids, 1),
        (Tagger(is_repeated=True), lambda ids: ids, 0),  # an autoencoder
        (Tagger(), lambda ids: torch.cat([torch.zeros_like(ids[:, :1]), ids[:, :-1]], 1), 0),
        (Tagger(), lambda ids: ids.masked_fill(ids == 3, 0), 0),  # hidden tokens are to be found
    ],
)
def test_a_recurrence_that_reads_its_targets(net: nn.Module, read: Callable[[Tensor], Tensor], is_wrong: int) -> None:
    """A recurrence whose targets are the tokens that it reads learns to copy them."""
    examination = Examination(capture_graph(Repeats(net, read), torch.arange(48).view(8, 6) % 16))
    examination.add(record("activations", 0, {("net", "out"): {}}, recorder="layers"))
    assert [each.rule for each in examination.findings()].count("copies-the-input") == is_wrong


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


@pytest.mark.parametrize(("ignored", "zeros", "is_wrong"), [(-100, 0.6, True), (0, 0.6, False), (-100, 0.1, False)])
def test_padding_as_target(ignored: int, zeros: float, is_wrong: bool) -> None:
    """Targets most of which are the padding are a finding, unless they are ignored."""
    net = nn.Sequential(nn.Embedding(11, 8, padding_idx=0), nn.GRU(8, 8, batch_first=True), Shaped(lambda x: x[0]))
    net.append(nn.Linear(8, 11))

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, ids: Tensor) -> Tensor:
            logits = self.net(ids[:, :-1]).flatten(0, 1)
            return F.cross_entropy(logits, ids[:, 1:].flatten(), ignore_index=ignored)

    graph = capture_graph(Language(), tokens)
    found = run(
        {"net.1": {}}, targets={"cross_entropy": {"zero_fraction": zeros, "min": 0.0, "max": 10.0}}, graph=graph
    )
    assert [each.rule for each in found if each.rule in NAMES] == ["padding-as-target"] * is_wrong


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


class Adversaries(nn.Module):
    """A step of a discriminator and one of its generator, whose loss may be flat where the discriminator is sure."""

    def __init__(self, *last: nn.Module) -> None:
        super().__init__()
        self.g, self.d = nn.Linear(3, 5), mlp(1, *last)
        self.loss = F.binary_cross_entropy if last else F.binary_cross_entropy_with_logits

    def forward(self, x: Tensor) -> Tensor:
        fake, ones, zeros = self.g(torch.randn(8, 3)), torch.ones(8, 1), torch.zeros(8, 1)
        of_d = self.loss(self.d(x), ones) + self.loss(self.d(fake.detach()), zeros)
        loss: Tensor = of_d - self.loss(self.d(fake), zeros)
        return loss


def of_adversaries(
    *last: nn.Module, real: float, fake: float, fall: float, records: int = 8, recent: int = 8
) -> Examination:
    """Return the examination of a discriminator with the given mean predictions in the last records."""
    graph = capture_graph(Adversaries(*last), rows)
    name = "binary_cross_entropy" if last else "binary_cross_entropy_with_logits"
    since = records - recent
    sides: list[tuple[tuple[str, str], dict[str, list[float]]]] = []
    for place, (mean, target) in enumerate(((real, 1.0), (fake, 0.0), (fake, 0.0)), 1):
        site = name if place == 1 else f"{name}#{place}"
        targets = dict.fromkeys(("min", "max"), [target] * records)
        sides.append(((site, "in.prediction"), {"mean": [0.5] * since + [mean] * recent}))
        sides.append(((site, "in.target"), targets))
    examination = Examination(graph)
    gradients = [1.0] * max(since, 1) + [1 / fall] * (records - max(since, 1))
    for row in range(records):
        losses = {site: {key: value[row] for key, value in values.items()} for site, values in sides}
        examination.add(record("activations", row * 10, {("d.2", "out"): {}, **losses}))
        weights: dict[tuple[str, str], dict[str, float]] = {("g", "weight"): {}}
        examination.add(record("parameters", row * 10, weights | {("g", "weight.grad"): {"rms": gradients[row]}}))
    return examination


@pytest.mark.parametrize(
    ("last", "real", "fake", "fall", "is_wrong"),
    [
        ([nn.Sigmoid()], 0.999, 0.001, 100.0, True),
        ([], 6.0, -6.0, 100.0, True),
        ([nn.Sigmoid()], 0.999, 0.001, 2.0, False),
        ([nn.Sigmoid()], 0.6, 0.4, 100.0, False),
    ],
)
def test_a_discriminator_that_has_won(
    last: list[nn.Module], real: float, fake: float, fall: float, is_wrong: bool
) -> None:
    """A sure discriminator is a finding if the gradients of the generator have become small."""
    found = of_adversaries(*last, real=real, fake=fake, fall=fall).findings()
    assert [(each.rule, each.others) for each in found] == [("discriminator-wins", ("g",))] * is_wrong


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


def of_tokens(**shares: float) -> Examination:
    """Return the examination of a language model with these shares of targets that are later tokens."""
    examination = Examination()
    for row in range(2):
        sites: dict[tuple[str, str], dict[str, float]] = {("net", "out"): {}}
        sites |= {("loss", f"in.target.{name}"): {"mean": share} for name, share in shares.items()}
        examination.add(record("activations", row * 10, sites))
    return examination


@pytest.mark.parametrize(
    ("following", "after", "rules"), [(0.1, 1.0, ["shifted-twice"]), (1.0, 0.1, []), (1.0, 1.0, []), (0.1, 0.5, [])]
)
def test_tokens_that_are_shifted_twice(following: float, after: float, rules: list[str]) -> None:
    """Targets that are the token after the next one are a finding, unless others are the next one."""
    found = of_tokens(next=following, after_next=after).findings()
    assert [each.rule for each in found] == rules


@pytest.mark.parametrize(("label", "sign", "is_wrong"), [(0.0, 1, True), (1.0, 1, False), (0.0, -1, False)])
def test_a_generator_that_helps_the_discriminator(label: float, sign: int, is_wrong: bool) -> None:
    """The loss of the generator must have the label of real samples, or be that of the discriminator with a minus."""

    class Step(Adversaries):
        def forward(self, x: Tensor) -> Tensor:
            fake, ones, zeros = self.g(torch.randn(8, 3)), torch.ones(8, 1), torch.zeros(8, 1)
            (self.loss(self.d(x), ones) + self.loss(self.d(fake.detach()), zeros)).backward()
            loss: Tensor = self.loss(self.d(fake), zeros + label) * sign
            loss.backward()
            return loss

    graph = capture_graph(Step(), rows)
    name = "binary_cross_entropy_with_logits"
    targets: dict[str, Values] = {
        site: {"min": value, "max": value} for site, value in ((name, 1.0), (f"{name}#2", 0.0), (f"{name}#3", label))
    }
    found = [each for each in run({"d.2": {}}, targets=targets, graph=graph) if each.rule in NAMES]
    assert [(each.rule, each.module, each.others) for each in found] == [("generator-helps", "d.2", ("g",))] * is_wrong


@pytest.mark.parametrize(
    ("sign", "gradient", "is_wrong"), [(1, None, True), (-1, None, False), (1, torch.tensor(-1.0), False)]
)
def test_a_generator_that_helps_the_critic(sign: int, gradient: Tensor | None, is_wrong: bool) -> None:
    """The generator must make those scores larger that the critic makes smaller, also by a given gradient."""

    class Step(Adversaries):
        def forward(self, x: Tensor) -> Tensor:
            fake = self.g(torch.randn(8, 3))
            (self.d(fake.detach()).mean() - self.d(x).mean()).backward()
            loss: Tensor = sign * self.d(fake).mean()
            loss.backward(gradient)
            return loss

    found = [each for each in run({"d.2": {}}, graph=capture_graph(Step(), rows)) if each.rule in NAMES]
    assert [(each.rule, each.module, each.others) for each in found] == [("generator-helps", "d.2", ("g",))] * is_wrong


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


def of_ends(ends: float | list[float], *, after: float = 1.0, records: int = 8) -> Examination:
    """Return a run of a language model with the share of ends that are targets, and that of next tokens."""
    examination = Examination()
    for row in range(records):
        sites = {
            ("cross_entropy", "in.target.next"): {"mean": after},
            ("cross_entropy", "in.target.ends"): {"mean": ends if isinstance(ends, float) else ends[row]},
            ("head", "out"): {},
        }
        examination.add(record("activations", row * 10, sites))
    return examination


@pytest.mark.parametrize(
    ("ends", "after", "rules"),
    [
        (0.0, 1.0, ["no-end-as-target"]),
        (1.0, 1.0, []),
        ([0.0] * 7 + [0.02], 1.0, []),
        ([0.0] * 7 + [-1.0], 1.0, []),  # a text that does not end, so that the end token may be padding alone
        (-1.0, 1.0, []),
        (0.0, 0.5, []),  # other targets than the next tokens
    ],
)
def test_ends_that_are_ignored_like_padding(ends: float | list[float], after: float, rules: list[str]) -> None:
    """An end token that each text has, and that is never a target of a language model, is a finding."""
    assert [each.rule for each in of_ends(ends, after=after).findings()] == rules


@pytest.mark.parametrize(("kept", "rules"), [(0, ["no-end-as-target"]), (1, [])])
def test_ends_of_a_model_of_transformers(kept: int, rules: list[str], tmp_path: Path) -> None:
    """The end token is read from the configuration of a model, and its labels from its loss."""
    transformers = pytest.importorskip("transformers")
    lengths = torch.arange(64) % 5 + 2
    places = torch.arange(8).expand(64, 8)
    tokens = torch.where(places < lengths[:, None], torch.randint(2, 12, (64, 8)), 1)
    labels = torch.where(places < lengths[:, None] + kept, tokens, -100)
    config = transformers.GPT2Config(vocab_size=12, n_positions=8, n_embd=8, n_layer=1, n_head=2, eos_token_id=1)

    class Language(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = transformers.GPT2LMHeadModel(config)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss: Tensor = self.net(batch[0], attention_mask=(batch[1] != -100).long(), labels=batch[1]).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01)

    Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        max_epochs=2,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*default_recorders(outputs=Outputs(plots=False, dumps=False))],
    ).fit(Language(), DataLoader(TensorDataset(tokens, labels), 16))
    found = open_recording(tmp_path).run.findings
    assert [each.rule for each in found if each.rule == "no-end-as-target"] == rules


class Diffusion(nn.Module):
    """A step of a diffusion model; ``target`` chooses from the data, the noise and their sum."""

    def __init__(self, target: Callable[[Tensor, Tensor, Tensor], Tensor], *, share: float | None = None) -> None:
        super().__init__()
        self.net, self.time, self.target, self.share = nn.Linear(10, 5), nn.Embedding(10, 5), target, share

    def forward(self, x: Tensor) -> Tensor:
        time, noise = torch.randint(0, 10, (8,)), torch.randn_like(x)
        share = (time[:, None] + 1) / 11 if self.share is None else self.share
        noisy = (1 - share) * x + share * noise
        return F.mse_loss(self.net(torch.cat([noisy, self.time(time)], 1)), self.target(x, noise, noisy))


@pytest.mark.parametrize(
    ("target", "share", "words"),
    [
        (lambda x, noise, noisy: noise, None, ""),
        (lambda x, noise, noisy: x, None, ""),
        (lambda x, noise, noisy: noise - x, None, ""),
        (lambda x, noise, noisy: noisy, None, "it learns to return its input"),
        (lambda x, noise, noisy: torch.randn_like(x), None, "nothing else uses"),
        (lambda x, noise, noisy: torch.randn(8, 5), None, "nothing else uses"),
        (lambda x, noise, noisy: noisy, 0.1, ""),  # an augmentation
        (lambda x, noise, noisy: x + 0.1 * torch.randn_like(x), None, ""),
    ],
)
def test_noise_as_target(target: Callable[[Tensor, Tensor, Tensor], Tensor], share: float | None, words: str) -> None:
    """The target is the noise that was added, or the data; neither other noise nor the sum."""
    found = trained_step(Diffusion(target, share=share), rows)
    assert brief(found) == [("warning", "unknown-noise", "")] * bool(words)
    assert all(words in each.verdict for each in found)


class QLearning(nn.Module):
    """A step of Q learning."""

    def __init__(self, predicted: Callable[[Tensor, Tensor], Tensor], *, has_next: bool = True) -> None:
        super().__init__()
        self.net, self.late, self.predicted, self.has_next = mlp(3), mlp(3), predicted, has_next

    def forward(self, x: Tensor, actions: Tensor, rewards: Tensor, following: Tensor) -> Tensor:
        with torch.no_grad():
            target = rewards + 0.9 * self.late(following).max(1).values if self.has_next else rewards
        return F.smooth_l1_loss(self.predicted(self.net(x), actions), target)


@pytest.mark.parametrize(
    ("predicted", "has_next", "is_wrong"),
    [
        (lambda values, actions: values.max(1).values, True, True),
        (lambda values, actions: values.amax(1), True, True),
        (lambda values, actions: values.gather(1, actions[:, None])[:, 0], True, False),
        (lambda values, actions: values.max(1).values, False, False),  # a pooling
    ],
)
def test_the_largest_value_is_fitted(
    predicted: Callable[[Tensor, Tensor], Tensor], has_next: bool, is_wrong: bool
) -> None:
    """The reward belongs to the action that was taken, not to the one with the largest value."""
    found = trained_step(QLearning(predicted, has_next=has_next), rows, classes, torch.randn(8), torch.randn(8, 5))
    assert brief(found) == [("warning", "largest-value", "")] * is_wrong


class Masked(nn.Module):
    """A step of a masked language model."""

    def __init__(self, targets: Callable[[Tensor, Tensor], Tensor], *, is_random: bool = True) -> None:
        super().__init__()
        self.embedding, self.head, self.targets, self.is_random = nn.Embedding(11, 5), mlp(11), targets, is_random

    def forward(self, ids: Tensor) -> Tensor:
        hidden = torch.rand(ids.shape) < 0.15 if self.is_random else ids == 3
        logits = self.head(self.embedding(ids.masked_fill(hidden, 0)))
        return F.cross_entropy(logits.transpose(1, 2), self.targets(ids, hidden))


@pytest.mark.parametrize(
    ("targets", "is_random", "is_wrong"),
    [
        (lambda ids, hidden: ids, True, True),
        (lambda ids, hidden: ids.masked_fill(~hidden, -100), True, False),
        (lambda ids, hidden: torch.where(hidden, ids, -100), True, False),
        (lambda ids, hidden: ids, False, False),  # another number for the padding
    ],
)
def test_targets_that_the_model_sees(
    targets: Callable[[Tensor, Tensor], Tensor], is_random: bool, is_wrong: bool
) -> None:
    """The loss of a masked language model counts the tokens that are hidden; that of all tokens has a note."""
    found = trained_step(Masked(targets, is_random=is_random), tokens)
    assert brief(found) == [("note", "seen-targets", "")] * is_wrong
