"""Tests of the rules of module outputs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_recorder.graph import capture_graph
from lightning_recorder.graph.model import Edge, Graph, Node
from lightning_recorder.records.histogram import EDGES
from lightning_recorder.reductions import Histogram
from tests.callbacks.test_functions import fit, recorders
from tests.insight.records import Examination, Values, brief, chain, network, record, run, trained
from tests.insight.rules.test_operations import Step, mlp, rows


@pytest.mark.parametrize(
    ("fraction", "kind", "expected"),
    [
        (1.0, "ReLU", [("warning", "dead-output", "act")]),
        (0.99, "Linear", [("warning", "dead-output", "act")]),
        (0.995, "Softmax", []),  # sure of one of 200
        (1.0, "Softmax", [("warning", "dead-output", "act")]),
        (0.96, "ReLU", [("note", "dead-output", "act")]),
        (0.96, "Linear", []),
        (0.9, "ReLU", []),
    ],
)
def test_dead_output(fraction: float, kind: str, expected: list[tuple[str, str, str]]) -> None:
    """99 % of zeros in the last two records is a finding, 95 % is a note for a ReLU."""
    layers: dict[str, Values] = {"fc": {"max": -3.0}, "act": {"zero_fraction": fraction}}
    assert brief(run(layers, graph=chain("fc", "act", act=kind))) == expected


def test_a_shared_relu_with_a_dead_call() -> None:
    """Behind a dead call of a ReLU that is called twice, the finding names what fed this call."""
    names = ("bn1", "act", "conv2", "bn2", "act", "head")
    nodes = [Node(0, "module", "", None, 0, "Net"), Node(1, "input", "x", 0, 1)]
    for number, name in enumerate(names, 1):
        kind = "ReLU" if name == "act" else "Conv2d"
        nodes += [Node(2 * number, "module", name, 0, 1, kind), Node(2 * number + 1, "op", "f", 2 * number, 2)]
    graph = Graph(tuple(nodes), tuple(Edge(2 * number - 1, 2 * number + 1) for number in range(1, 7)))
    layers: dict[str, Values] = {
        name: {"max": -12.0 if name == "bn1" else 3.0, "zero_fraction": 1.0 if name == "conv2" else 0.5}
        for name in dict.fromkeys(names)
    }
    (found,) = run(layers, graph=graph)
    assert found.verdict == "conv2 returns only zeros in every record: the input of act from bn1 is at most -12"


def test_the_first_step_of_a_dead_output() -> None:
    """The finding names the first step from which on the output is zero, and the input of the ReLU."""
    layers: dict[str, Values] = {"fc": {"max": -3.0}, "act": {"zero_fraction": [0.5] * 5 + [1.0] * 3}}
    (found,) = run(layers, graph=chain("fc", "act", act="ReLU"))
    assert found.verdict == "act returns only zeros from step 50 on: its input from fc is at most -3"
    assert (found.first_step, found.last_step, found.records) == (50, 70, 3)
    assert found.trace is not None
    assert found.trace.values == (0.5,) * 5 + (1.0,) * 3


@pytest.mark.parametrize(
    ("zeros", "high", "verdict"),
    [
        ([1.0] * 8, [-9.8, -8.4, -0.7, -2.3, -0.7, -2.7, -2.7, -2.8], "only zeros in every record: {} at most -0.7"),
        ([0.5] * 5 + [1.0] * 3, [2.0] * 5 + [-3.0, -2.0, -4.0], "only zeros from step 50 on: {} at most -2"),
        ([0.992] + [1.0] * 7, [0.2] + [-3.0] * 7, "at least 99.2% zeros in every record: {} at most 0.2"),
    ],
)
def test_a_dead_output_is_described_by_all_records(zeros: list[float], high: list[float], verdict: str) -> None:
    """The numbers are true for each record that shows the finding, not for the last one only."""
    layers: dict[str, Values] = {"fc": {"max": high}, "act": {"zero_fraction": zeros}}
    (found,) = run(layers, graph=chain("fc", "act", act="ReLU"))
    assert found.verdict == f"act returns {verdict.format('its input from fc is')}"


@pytest.mark.parametrize(
    ("largest", "high", "step", "named"),
    [(0.3, -3.0, 30, True), (0.3, 1.0, 30, True), (0.09, -3.0, 30, False), (0.3, -3.0, 60, False)],
)
def test_a_large_update_before_a_dead_output_is_named(largest: float, high: float, step: int, named: bool) -> None:
    """An update of a tenth of the weight before its ReLU died is part of the finding, with the learning rate."""
    layers: dict[str, Values] = {"fc": {"max": high}, "act": {"zero_fraction": [0.5] * 5 + [1.0] * 3}}
    ratios = [largest if 10 * place == step else 1e-3 for place in range(8)]
    parameters = network("fc", fc=trained("fc", ratio=ratios))
    parameters["fc/weight"] = {**parameters["fc/weight"], "learning_rate": 3.0}
    (found,) = run(layers, None, parameters, graph=chain("fc", "act", act="ReLU"))
    verdict = "act returns only zeros from step 50 on" + (": its input from fc is at most -3" if high < 0 else "")
    update = ", after step 30 changed fc.weight by 30% at learning rate 3" if named else ""
    assert found.verdict == verdict + update


@pytest.mark.parametrize(
    ("rms", "module", "named"),
    [(0.0, "fc", True), (0.0, "act", True), ([0.1] + [0.0] * 7, "fc", False), (0.5, "fc", False)],
)
def test_a_dead_output_of_a_zero_weight_names_the_weight(rms: float | list[float], module: str, named: bool) -> None:
    """Zeros of a layer whose weight is zero in all records, and of the ReLU behind it, are explained by the weight."""
    layers: dict[str, Values] = {"fc": {"max": 0.0}, "act": {}}
    layers[module] = {**layers[module], "zero_fraction": 1.0}
    parameters = {"fc/weight": {"rms": rms}, "fc/weight.grad": {"rms": 0.0}}
    (found,) = run(layers, None, parameters, graph=chain("fc", "act", act="ReLU"))
    assert found.rule == "dead-output"
    assert found.verdict.endswith("in every record: fc.weight is zero") is named
    assert ("The weight of the layer is zero" in found.why) is named


def test_a_dead_layer_is_one_finding() -> None:
    """Zeros behind a dead layer and missing gradients before it are merged into its finding."""
    names = ("a", "act", "c", "d", "head")
    layers: dict[str, Values] = {name: {"zero_fraction": float(name in ("act", "c"))} for name in names}
    gradients: dict[str, Values] = {name: {"rms": 1e-3 if name in ("d", "head") else 0.0} for name in names}
    parameters = network("a", "d", "head", a=trained("a", grad=0.0, update=0.0, ratio=0.0))
    (found,) = run(layers, gradients, parameters, graph=chain(*names, act="ReLU"))
    assert (found.rule, found.module, found.others) == ("dead-output", "act", ("c", "a"))
    assert found.consequences == ("gradient-stops",)


@pytest.mark.parametrize(("gains", "alarm"), [([10.0] * 8, True), ([7.0] * 8, False), ([1.0] * 4 + [20.0] * 4, False)])
def test_a_jump_in_scale(gains: list[float], alarm: bool) -> None:
    """An output more than eight times as large as the input is a finding, unless training has made it so."""
    layers: dict[str, Values] = {"a": {"rms": 1.0}, "b": {"rms": gains}, "c": {"rms": 1.0}}
    found = [each for each in run(layers, graph=chain("a", "b", "c")) if each.rule == "scale-jump"]
    assert [each.module for each in found] == (["b"] if alarm else [])


def test_the_ratio_of_a_jump_is_that_of_its_numbers() -> None:
    """The finding names the largest input, and the ratio of the two sizes that it has."""
    nodes = [Node(0, "module", "", None, 0, "Net"), Node(1, "input", "x", 0, 1)]
    for number, name in enumerate(("a", "small", "b", "c"), 1):
        nodes += [Node(2 * number, "module", name, 0, 1, "Linear"), Node(2 * number + 1, "op", "f", 2 * number, 2)]
    graph = Graph(tuple(nodes), tuple(Edge(*ends) for ends in ((1, 3), (1, 5), (3, 7), (5, 7), (7, 9))))
    large: Values = {"rms": [18.0, *[20.0] * 7], "std": 19.0}
    layers: dict[str, Values] = {"a": {"rms": 1.0}, "small": {"rms": 0.5}, "b": large, "c": {"rms": 1.0}}
    (found,) = (each for each in run(layers, graph=graph) if each.rule == "scale-jump")
    assert found.verdict == "the output of b has rms 20, 20 × that of its input from a"
    assert found.numbers == {"rms": 20.0, "gain": 20.0, "input": 1.0}


@pytest.mark.parametrize(("norm", "alarm"), [("backward", False), (None, True)])
def test_a_fourier_transform_is_no_jump(norm: str | None, alarm: bool) -> None:
    """Its output is a sum over all positions, which is large by definition; other modules have no such reason."""

    class Mix(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 20 if norm is None else torch.fft.fft(x, norm=norm).real

    graph = capture_graph(nn.Sequential(nn.Linear(5, 5), Mix(), nn.Linear(5, 2)), torch.randn(3, 5))
    layers: dict[str, Values] = {"0": {"rms": 1.0}, "1": {"rms": 20.0}, "2": {"rms": 1.0}}
    found = [each.module for each in run(layers, graph=graph) if each.rule == "scale-jump"]
    assert found == ["1"] * alarm


def test_a_large_bias_is_no_jump() -> None:
    """An output far from zero by its bias, as before the softplus of a state-space model, is not compared."""
    layers: dict[str, Values] = {"a": {"rms": 0.1}, "b": {"rms": 5.0, "mean": -4.9, "std": 1.0}, "c": {"rms": 1.0}}
    assert run(layers, graph=chain("a", "b", "c")) == []


def test_a_jump_in_the_first_output_of_several() -> None:
    """The output of a recurrent layer, which returns its state as well, is compared with its input."""
    examination = Examination(chain("embed", "rnn", "head"))
    for step in (0, 10, 20):
        sites = {("embed", "out"): {"rms": 1.0}, ("rnn", "out[0]"): {"rms": 90.0}, ("rnn", "out[1]"): {"rms": 90.0}}
        examination.add(record("activations", step, {**sites, ("head", "out"): {"rms": 90.0}}))
    (found,) = examination.findings()
    assert (found.rule, found.module) == ("scale-jump", "rnn")


def test_logits_may_be_large() -> None:
    """A module that nothing follows may have a large output."""
    layers: dict[str, Values] = {"a": {"rms": 1.0}, "head": {"rms": 100.0}}
    assert run(layers, graph=chain("a", "head")) == []


@pytest.mark.parametrize(
    ("kind", "values", "rule"),
    [
        ("Tanh", [1.0, -1.0, 1.0, 0.1], "saturation"),
        ("Tanh", [0.99, -0.5, 0.5, 0.1], ""),
        ("Sigmoid", [1.0, 1.0, 0.01, 0.5], "saturation"),
        ("Sigmoid", [0.6, 0.4, 0.3, 0.5], ""),
        ("Softmax", [0.95, 0.05, 0.01, 0.01], "attention-collapse"),
        ("Softmax", [0.5, 0.3, 0.1, 0.1], ""),
        ("Linear", [1.0, -1.0, 1.0, 0.1], ""),
    ],
)
def test_saturation(kind: str, values: list[float], rule: str) -> None:
    """Values at the ends of the range of an activation are counted in the histograms of the last two records."""
    counts, edges = np.histogram(values, bins=np.linspace(-1, 1, 81))
    squares = sum(value**2 for value in values)
    histogram = Histogram(edges, counts, min(values), max(values), sum(values), squares)
    found = run({"act": {}, "fc": {}}, graph=chain("act", "fc", act=kind), histograms={("act", "out"): histogram})
    assert brief(found) == ([("warning", rule, "act")] if rule else [])


@pytest.mark.parametrize(
    ("low", "high", "why", "look"),
    [
        (-26.0, -24.0, "All inputs of the activation are negative", "Look at the bias of a,"),
        (8.0, 30.0, "All inputs of the activation are positive", "Look at the bias of a,"),
        (-90.0, 90.0, "The inputs of the activation are large with both signs.", "Scale down the weights of a "),
    ],
)
def test_the_input_of_a_saturated_activation(low: float, high: float, why: str, look: str) -> None:
    """The finding has the range of the input and the layer it comes from, and names the cause that fits its sign."""
    counts, edges = np.histogram([1.0] * 4, bins=np.linspace(-1, 1, 81))
    layers: dict[str, Values] = {"a": {"min": low, "max": high}, "act": {}, "fc": {}}
    histograms = {("act", "out"): Histogram(edges, counts, 1.0, 1.0, 4.0, 4.0)}
    (found,) = run(layers, graph=chain("a", "act", "fc", act="Sigmoid"), histograms=histograms)
    assert found.verdict.endswith(f"at the ends of their range: its input from a is between {low:.3g} and {high:.3g}")
    assert (found.why.startswith(why), found.next.startswith(look)) == (True, True)


@pytest.mark.parametrize(("first", "rules"), [(0.3, ["attention-collapse"]), (0.18, [])])
def test_a_head_that_training_has_made_sharp(first: float, rules: list[str]) -> None:
    """Attention to single positions is a finding if it was as sharp in the first record, and not if it was learned."""
    counts, edges = np.histogram([0.95, 0.05, 0.01, 0.01], bins=np.linspace(-1, 1, 81))
    histogram = Histogram(edges, counts, 0.01, 0.95, 1.02, 0.9052)
    layers: dict[str, Values] = {"act": {"std": [first, *[0.3] * 7]}, "fc": {}}
    found = run(layers, graph=chain("act", "fc", act="Softmax"), histograms={("act", "out"): histogram})
    assert [each.rule for each in found] == rules


class Entropy(nn.Module):
    """A softmax whose entropy is a loss, or that weights the rows of the batch."""

    def __init__(self, *, is_entropy: bool) -> None:
        super().__init__()
        self.fc, self.act, self.out = nn.Linear(4, 8), nn.Softmax(-1), nn.Linear(8, 8)
        self.is_entropy = is_entropy

    def forward(self, x: Tensor) -> Tensor:
        p: Tensor = self.act(self.fc(x))
        return -(p * p.clamp(min=1e-5).log()).sum() if self.is_entropy else (p @ self.out(p)).sum()


@pytest.mark.parametrize("is_entropy", [False, True])
def test_a_softmax_whose_logarithm_is_taken(is_entropy: bool) -> None:
    """Sharp probabilities whose entropy is computed, as of the codes of a quantizer, are no attention."""
    counts, edges = np.histogram([0.95, 0.05, 0.01, 0.01], bins=np.linspace(-1, 1, 81))
    histogram = Histogram(edges, counts, 0.01, 0.95, 1.02, 0.9052)
    graph = capture_graph(Entropy(is_entropy=is_entropy), torch.ones(8, 4))
    found = run({"act": {}, "out": {}}, graph=graph, histograms={("act", "out"): histogram})
    assert [each.rule for each in found if each.module == "act"] == ([] if is_entropy else ["attention-collapse"])


@pytest.mark.parametrize(
    ("kind", "rms", "since"),
    [
        ("Tanh", [0.5, 0.6, 0.7, *[0.98] * 5], 30),
        ("Tanh", [0.98] * 8, 0),
        ("Tanh", [math.nan] * 8, 0),  # the rms was not recorded
        ("Sigmoid", [0.5, 0.1, *[0.01] * 6], 0),
    ],
)
def test_when_a_saturation_began(kind: str, rms: list[float], since: int) -> None:
    """The rms of the outputs of a tanh tells when they came to the ends of the range; a gate may be at either end."""
    counts, edges = np.histogram([1.0, -1.0, 1.0, 0.01], bins=np.linspace(-1, 1, 81))
    histogram = Histogram(edges, counts, -1.0, 1.0, 1.0, 3.0)
    layers: dict[str, Values] = {"act": {"rms": rms}, "fc": {}}
    (found,) = run(layers, graph=chain("act", "fc", act=kind), histograms={("act", "out"): histogram})
    assert (found.rule, found.first_step) == ("saturation", since)


@pytest.mark.parametrize(("kind", "low"), [("Tanh", -1.0), ("Sigmoid", 0.0)])
@pytest.mark.parametrize(
    ("inputs", "first", "alarm"),
    [((4.0, 0.5), 0.999, True), ((4.0, 0.5), 0.5, False), ((1.7, 0.1), 0.93, False), ((0.0, 1.0), 0.6, False)],
)
def test_saturation_below_one(inputs: tuple[float, float], first: float, alarm: bool, kind: str, low: float) -> None:
    """Values from 0.97 on are found in the bin from 0.875 to 1, but what training has made sure is no fault."""
    generator = np.random.default_rng(0)
    values = np.maximum(np.tanh(generator.normal(*inputs, 4000)), low + 0.05)
    counts, edges = np.histogram(values, bins=EDGES)
    histogram = Histogram(edges, counts, values.min(), values.max(), values.sum(), (values**2).sum())
    layers: dict[str, Values] = {"act": {"rms": [first, *(0.999 for _ in range(7))]}, "fc": {}}
    found = run(layers, graph=chain("act", "fc", act=kind), histograms={("act", "out"): histogram})
    assert brief(found) == [("warning", "saturation", "act")] * alarm
    assert run(layers, graph=chain("fc", "act", act=kind), histograms={("act", "out"): histogram}) == []


@pytest.mark.parametrize(
    ("spread", "gradient", "alarm"),
    [
        (0.97, 9e-6, True),
        (0.97, 2e-5, False),  # a fiftieth of the gradient passes
        (0.3, 9e-6, False),  # all values are at one end, like those of an open gate
    ],
)
def test_saturation_that_training_has_made(spread: float, gradient: float, alarm: bool) -> None:
    """A tanh that training drives to both ends is a finding if less than a hundredth of the gradient passes it."""
    values = [0.998, -0.998] * 50
    counts, edges = np.histogram(values, bins=EDGES)
    histogram = Histogram(edges, counts, -0.998, 0.998, 0.0, sum(value**2 for value in values))
    layers: dict[str, Values] = {"a": {}, "act": {"rms": [0.3, *[0.998] * 7], "std": spread}, "fc": {}}
    gradients: dict[str, Values] = {"a": {"rms": [1e-3, *[gradient] * 7]}, "act": {"rms": 1e-3}, "fc": {"rms": 1e-3}}
    graph = chain("a", "act", "fc", act="Tanh")
    found = run(layers, gradients, graph=graph, histograms={("act", "out"): histogram})
    assert brief(found) == [("warning", "saturation", "act")] * alarm
    assert [each.first_step for each in found] == [10] * alarm


def test_indices_may_be_zero() -> None:
    """A module may pass the indices of a batch on, such as those of the elements of atoms."""
    layers: dict[str, Values] = {"a": {"rms": 0.0, "zero_fraction": 1.0}, "b": {}}
    assert run(layers, graph=chain("a", "b"), dtype="int64") == []


@pytest.mark.parametrize(
    ("names", "shape"),
    [(("fc", "act"), (16, 16)), (("act", "fc"), (16, 4)), (("act", "fc"), (16, 2, 7))],
)
def test_probabilities_are_no_attention(names: tuple[str, ...], shape: tuple[int, ...]) -> None:
    """A softmax that nothing follows, or over a few entries as of experts or variables, may choose one of them."""
    counts, edges = np.histogram([0.95, 0.05, 0.01, 0.01], bins=np.linspace(-1, 1, 81))
    histogram = {("act", "out"): Histogram(edges, counts, 0.01, 0.95, 1.0, 1.0)}
    layers: dict[str, Values] = {name: {} for name in names}
    assert run(layers, graph=chain(*names, act="Softmax"), shapes={("act", "out"): shape}, histograms=histogram) == []


def test_a_scalar_zero_is_not_dead() -> None:
    """One of several losses that a module returns may be zero by design."""
    layers: dict[str, Values] = {"a": {"rms": 0.0, "zero_fraction": 1.0}, "b": {}}
    assert [each.rule for each in run(layers, graph=chain("a", "b"))] == ["dead-output"]
    assert run(layers, graph=chain("a", "b"), shapes={("a", "out"): ()}) == []


@pytest.mark.parametrize(
    ("mean", "shape", "over"),
    [
        (1 / 16, (16, 4, 10, 10), "the batch"),
        (1 / 4, (16, 4, 10, 10), "dimension 1"),
        (1 / 10, (16, 4, 10, 10), ""),
        (1 / 16, (16, 4, 16, 16), ""),
        (1 / 16, (16, 10), ""),
    ],
)
def test_the_dimension_of_a_softmax(mean: float, shape: tuple[int, ...], over: str) -> None:
    """A softmax of attention scores that adds up over the batch or the heads is a finding."""
    layers: dict[str, Values] = {"act": {"mean": mean, "rms": mean}, "fc": {}}
    found = run(layers, graph=chain("act", "fc", act="Softmax"), shapes={("act", "out"): shape})
    assert [(each.rule, over in each.verdict) for each in found] == ([("softmax-dimension", True)] if over else [])


def test_inputs_are_not_compared_with_outputs() -> None:
    """An input that is all zeros, huge or a mask of minus infinity is no finding, and its outputs are judged alone."""
    fine: dict[str, dict[str, float]] = {"a": {}, "b": {}, "c": {}}
    odd = {"b": {"zero_fraction": 1.0, "rms": 0.0}, "c": {"inf_count": 7.0, "rms": 1e4}}
    assert run(fine, inputs=odd, graph=chain("a", "b", "c")) == run(fine, graph=chain("a", "b", "c"))


@pytest.mark.parametrize(
    ("kind", "path", "high", "alarm"),
    [
        ("LSTM", "out[1][0]", 0.99, 1),
        ("LSTM", "out[1][1]", 0.99, 0),
        ("LSTMCell", "out[1]", 0.99, 0),
        ("RNN", "out[0]", 0.99, 1),
        ("RNN", "out[0]", 1.5, 0),  # with a ReLU
    ],
)
def test_outputs_without_bounds_are_not_saturated(kind: str, path: str, high: float, alarm: int) -> None:
    """Values near or beyond 1 are no saturation in the cell state of an LSTM, or in an RNN with a ReLU."""
    examination = Examination(chain("rnn", "head", rnn=kind))
    counts, edges = np.histogram([-1.0, 1.0], bins=np.linspace(-1, 1, 81))
    histogram = Histogram(edges, counts, -1.0, 1.0, 0.0, 2.0)
    values = {"rms": 1.0, "min": -0.99, "max": high}
    site = ("rnn", path)
    for step in (0, 10, 20):
        examination.add(record("activations", step, {site: values}, histograms={site: histogram}))
    assert [each.rule for each in examination.findings()] == ["saturation"] * alarm


def test_zeros_that_no_gradient_passes_are_not_dead() -> None:
    """A constant output of zeros without a gradient, such as the logarithm of a determinant, is no dead layer."""
    names = ("a", "act", "head")
    layers: dict[str, Values] = {name: {"zero_fraction": float(name == "act")} for name in names}
    gradients: dict[str, Values] = {name: {"rms": 1e-3} for name in ("a", "head")}
    assert run(layers, gradients, graph=chain(*names)) == []
    (found,) = run(layers, {**gradients, "act": {"rms": 1e-3}}, graph=chain(*names))
    assert (found.rule, found.module) == ("dead-output", "act")
    assert "ReLU that gets negative inputs only, or a factor" in found.why


class Siamese(LightningModule):
    """An encoder that gives two views of a sample the same embedding; a term for the variance keeps samples apart."""

    def __init__(self, variance: float) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))
        self.variance = variance

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0].flatten(1)
        one, other = (self.encoder(x + 0.1 * torch.randn_like(x)) for _ in range(2))
        return F.mse_loss(one, other) + self.variance * F.relu(1 - one.std(0)).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-2)


@pytest.mark.parametrize(("variance", "expected"), [(0.0, ["collapsed-embedding"]), (1.0, [])])
def test_embeddings_that_collapse(tmp_path: Path, variance: float, expected: list[str]) -> None:
    """Without anything that keeps embeddings apart, they become the same; a variance term repairs it."""
    seed_everything(3, verbose=False)
    findings = fit(tmp_path, Siamese(variance), *recorders(5), steps=150)[1]
    assert [each["rule"] for each in findings if each["severity"] != "note"] == expected


@pytest.mark.parametrize(("offset", "findings"), [(0.0, 1), (50.0, 0)])
def test_outputs_that_learn_a_large_mean(offset: float, findings: int) -> None:
    """Outputs of a regression that approach targets around 50 differ little, compared with their size."""
    graph = capture_graph(Step(mlp(16), F.mse_loss), rows, torch.randn(8, 16) + offset)
    targets: dict[str, Values] = {"mse_loss": {"std": 1.0, "rms": math.hypot(1.0, offset)}}
    spreads = [0.9, *[0.05] * 9]
    shapes = {("net.2", "out"): (8, 16)}
    found = run({"net.2": {"batch_spread": spreads}}, targets=targets, graph=graph, records=10, shapes=shapes)
    assert [each.rule for each in found if each.rule == "collapsed-embedding"] == ["collapsed-embedding"] * findings
