"""Tests of the rules about batches, losses and kept gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import nan

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from lightning_recorder.graph import GraphCapture, capture_graph
from lightning_recorder.graph.model import Edge, Graph, Kind, Node
from lightning_recorder.insight import Finding
from tests.insight.records import Values, brief, chain, network, run, trained

LAYERS: dict[str, Values] = {"fc1": {"rms": 1.0}, "fc2": {"rms": 1.0}}


def loss_graph(*ops: str, targets: str = "input") -> Graph:
    """Return the graph of a layer, of ops that follow it, the first one in a module ``act``, and of a target."""
    nodes = [
        Node(0, "module", "", None, 0, "Net"),
        Node(1, "input", "x", 0, 1),
        Node(2, "module", "fc1", 0, 1, "Linear"),
        Node(3, "op", "linear", 2, 2),
        Node(4, "module", "act", 0, 1, "Softmax"),
        Node(5, "op" if targets != "input" else "input", targets, 0, 1),
        *(Node(6 + place, "op", name, 4 if not place else 0, 2) for place, name in enumerate(ops)),
    ]
    last = 5 + len(ops)
    edges = [Edge(1, 3), Edge(3, 6), *(Edge(place, place + 1) for place in range(6, last)), Edge(5, last)]
    return Graph(tuple(nodes), tuple(edges))


@pytest.mark.parametrize(
    ("ops", "words"),
    [
        (("softmax", "cross_entropy"), "applied twice"),
        (("softmax", "view", "float", "cross_entropy"), "applied twice"),
        (("sigmoid", "getitem", "binary_cross_entropy_with_logits"), "applied twice"),
        (("softmax", "nll_loss"), "expects logarithms"),
        (("exp", "poisson_nll_loss"), "applies exp itself"),
        (("linear", "poisson_nll_loss"), ""),
        (("log_softmax", "nll_loss"), ""),
        (("softmax", "linear", "cross_entropy"), ""),
        (("softmax", "mse_loss"), ""),
        (("sigmoid", "binary_cross_entropy"), ""),
    ],
)
def test_a_loss_that_gets_an_activation(ops: tuple[str, ...], words: str) -> None:
    """An activation that the loss function applies itself is a finding about the module that applied it first."""
    found = run(LAYERS, graph=loss_graph(*ops))
    assert brief(found) == [("warning", "double-activation", "act")] * bool(words)
    assert all(words in each.verdict and ops[-1] in each.verdict for each in found)


@pytest.mark.parametrize(("given", "is_wrong"), [("probabilities", 1), ("logits", 0), ("probs", 0)])
def test_probabilities_as_the_logits_of_a_distribution(given: str, is_wrong: int) -> None:
    """A distribution that gets probabilities must get them as such."""

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.act = nn.Linear(4, 3), nn.Softmax(-1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.head(x) if given == "logits" else self.act(self.head(x))
            chosen = Categorical(probs=y) if given == "probs" else Categorical(logits=y)
            loss: Tensor = -chosen.log_prob(torch.zeros(len(x))).mean()
            return loss

    found = run(LAYERS, graph=capture_graph(Policy(), torch.randn(8, 4)))
    found = [each for each in found if each.rule == "double-activation"]
    assert brief(found) == [("warning", "double-activation", "act")] * is_wrong


def test_rates_of_counts() -> None:
    """A Poisson loss with log_input=False expects the exponential."""
    graph = loss_graph("exp", "poisson_nll_loss")
    nodes = [
        replace(each, arguments=(("log_input", "False"),)) if "poisson" in each.name else each for each in graph.nodes
    ]
    assert run(LAYERS, graph=replace(graph, nodes=tuple(nodes))) == []


def test_an_activation_of_the_step_itself() -> None:
    """An activation outside of all modules belongs to the training step; its line is named."""
    graph = loss_graph("softmax", "cross_entropy")
    nodes = [replace(each, parent=0, source="train.py:7") if each.name == "softmax" else each for each in graph.nodes]
    (found,) = run(LAYERS, graph=replace(graph, nodes=tuple(nodes)))
    assert found.module == ""
    assert found.verdict.startswith("cross_entropy gets the output of the softmax in training_step (line train.py:7):")


@pytest.mark.parametrize(("kind", "findings"), [("Softmax", 1), ("Net", 2)])
def test_an_activation_that_is_called_twice(kind: str, findings: int) -> None:
    """Several calls of one activation module are one finding; functions in two lines of a module are two."""
    graph = loss_graph("softmax", "cross_entropy")
    nodes = [
        replace(each, type_name=kind) if each.name == "act" else replace(each, source=f"net.py:{each.id}")
        for each in graph.nodes
    ]
    nodes += [
        Node(8, "module", "act", 0, 1, kind, call=2),
        Node(9, "op", "softmax", 8, 2, source="net.py:9"),
        Node(10, "op", "cross_entropy", 0, 1),
    ]
    edges = (*graph.edges, Edge(3, 9), Edge(9, 10), Edge(5, 10))
    found = run(LAYERS, graph=Graph(tuple(nodes), edges))
    assert brief(found) == [("warning", "double-activation", "act")] * findings


def test_probabilities_may_be_the_target() -> None:
    """A softmax in the target of a loss, as in distillation, is right."""
    assert run(LAYERS, graph=loss_graph("linear", "cross_entropy", targets="softmax")) == []


def first_layer(weight: list[float], bias: list[float], zeros: float = 0.0) -> dict[str, Values]:
    return {
        **network("fc2"),
        **trained("fc1", grad=weight),
        "fc1/weight.grad": {"rms": weight, "zero_fraction": zeros},
        "fc1/bias": {"rms": 0.1},
        "fc1/bias.grad": {"rms": bias, "count": 16.0},
    }


VARYING = [0.3, 0.1, 0.2, 0.4, 0.2, 0.3, 0.1, 0.2]
OTHERS = [0.2, 0.15, 0.2, 0.3, 0.25, 0.2, 0.12, 0.2]


@pytest.mark.parametrize(
    ("kind", "weight", "bias", "words"),
    [
        ("Linear", [0.5 * each for each in VARYING], VARYING, "is the same for all samples"),
        ("Linear", OTHERS, VARYING, ""),
        ("Linear", [0.0] * 8, VARYING, "consists of zeros"),
        ("Conv2d", [0.0] * 8, VARYING, "consists of zeros"),
        ("Conv2d", [0.5 * each for each in VARYING], VARYING, ""),
    ],
)
def test_a_constant_input(kind: str, weight: list[float], bias: list[float], words: str) -> None:
    """An input of zeros, or one that is the same in all records, shows in the gradients of the first layer."""
    found = run(LAYERS, None, first_layer(weight, bias), graph=chain("fc1", "fc2", fc1=kind))
    assert brief(found) == [("warning", "constant-input", "fc1")] * bool(words)
    assert all(words in each.verdict for each in found)


def test_one_varying_input_is_enough() -> None:
    """A constant input of one layer is fine if another first layer has an input that varies."""
    nodes = [Node(0, "module", "", None, 0, "Net"), Node(1, "input", "x", 0, 1), Node(2, "input", "z", 0, 1)]
    for number, name in ((3, "fc1"), (5, "fc2")):
        nodes += [Node(number, "module", name, 0, 1, "Linear"), Node(number + 1, "op", "linear", number, 2)]
    graph = Graph(tuple(nodes), (Edge(1, 4), Edge(2, 6)))
    constant = first_layer([0.5 * each for each in VARYING], VARYING)
    bias: dict[str, Values] = {"fc2/bias": {"rms": 0.1}, "fc2/bias.grad": {"rms": VARYING, "count": 16.0}}
    varying: dict[str, Values] = {**trained("fc2", grad=OTHERS), **bias}
    assert run(LAYERS, None, {**constant, **varying}, graph=graph) == []
    same: dict[str, Values] = {**trained("fc2", grad=VARYING), **bias}
    found = run(LAYERS, None, {**constant, **same}, graph=graph)
    assert [(each.module, each.others) for each in found] == [("fc1", ("fc2",))]


@pytest.mark.parametrize(("rows", "zeros", "alarm"), [(16, 15 / 16, 1), (16, 14 / 16, 0), (4, 3 / 4, 0)])
def test_a_single_token(rows: int, zeros: float, alarm: int) -> None:
    """An embedding of which all records use one row only is a finding, unless it has few rows, as that of segments."""
    parameters = first_layer(VARYING, VARYING, zeros)
    parameters["fc2/weight"] = {**parameters["fc2/weight"], "rms": 0.3}  # not a copy of the embedding
    graph = chain("fc1", "fc2", fc1="Embedding")
    found = run(LAYERS, None, parameters, graph=graph, shapes={("fc1", "weight"): (rows, 16)})
    assert brief(found) == [("warning", "constant-input", "fc1")] * alarm


def kept(factors: list[float], steps: int = 1, kinds: Sequence[Kind] = ()) -> list[Finding]:
    """Return the findings of three layers whose bias has a gradient of so many times the largest possible norm.

    The optimizer makes so many steps in each record. The kinds are those of further nodes of the graph.
    """
    names = [f"fc{place}" for place in range(3)]
    outputs: dict[str, Values] = {name: {"rms": 0.01, "count": 512.0} for name in names}
    rms = [0.32 * each for each in factors]  # the largest rms of one step is 0.01 × 512 / 16
    biases: dict[str, Values] = {f"{name}/bias": {"rms": 0.1} for name in names}
    biases |= {f"{name}/bias.grad": {"rms": rms, "count": 16.0 * steps} for name in names}
    layers: dict[str, Values] = {name: {"rms": 1.0} for name in names}
    shapes = {(name, path): (16,) for name in names for path in ("bias", "bias.grad")}
    graph = chain(*names)
    more = tuple(Node(len(graph.nodes) + place, kind, kind, 0, 1) for place, kind in enumerate(kinds))
    graph = replace(graph, nodes=(*graph.nodes, *more))
    return run(layers, outputs, {**network(*names), **biases}, graph=graph, shapes=shapes)


def test_two_steps_with_the_same_gradient() -> None:
    """An optimizer that steps twice in a batch, such as that of a generator, has the gradient of that batch alone."""
    assert [each.rule for each in kept([0.9] * 8, steps=2)].count("gradients-accumulate") == 0


@pytest.mark.parametrize(
    ("factors", "alarm"),
    [([0.3, 0.5, 0.9, 1.0, 1.0, 1.0, 0.9, 1.0], 0), ([0.3, 0.6, 1.2, 2.0, 3.0, 2.5, 0.5, 4.0], 1)],
)
def test_gradients_of_earlier_steps(factors: list[float], alarm: int) -> None:
    """A gradient that is larger than one step can make it has those of earlier steps in it."""
    found = kept(factors)
    assert brief(found)[:1] == [("warning", "gradients-accumulate", "")] * alarm
    if alarm:
        assert found[0].verdict.endswith("4 × as large as the last batch alone can make it. Is zero_grad() missing?")
        assert found[0].others == ("fc0", "fc1", "fc2")


@pytest.mark.parametrize(("every", "alarm"), [(1, 1), (2, 0), (4, 0)])
def test_gradients_that_a_loop_accumulates(every: int, alarm: int) -> None:
    """A loop that steps once in several batches keeps the gradients of all of them on purpose."""
    found = kept([3.0 if step % every == 0 else nan for step in range(8)])
    assert [each.rule for each in found].count("gradients-accumulate") == alarm


@pytest.mark.parametrize(("kinds", "alarm"), [((), 1), (("backward", "optimizer"), 1), (("backward",), 0)])
def test_a_first_batch_without_a_step(kinds: tuple[Kind, ...], alarm: int) -> None:
    """If no optimizer steps in the first batch, the loop accumulates, also if it steps in each recorded batch."""
    assert [each.rule for each in kept([3.0] * 8, kinds=kinds)].count("gradients-accumulate") == alarm


def heads(*, common: bool = True) -> Graph:
    """Return the graph of two heads behind a common trunk, or each with an input of its own."""
    nodes = [Node(0, "module", "", None, 0, "Net"), Node(1, "input", "x", 0, 1), Node(2, "input", "z", 0, 1)]
    for number, name in ((3, "trunk"), (5, "one"), (7, "two")):
        nodes += [Node(number, "module", name, 0, 1, "Linear"), Node(number + 1, "op", "linear", number, 2)]
    return Graph(tuple(nodes), (Edge(1, 4), Edge(4, 6), Edge(4 if common else 2, 8)))


@pytest.mark.parametrize(
    ("one", "common", "alarm"),
    [(1.0, True, 1), (0.1, True, 0), (1.0, False, 0), ([1e-3, *[1.0] * 7], True, 0)],
)
def test_a_loss_that_outweighs_another_one(one: float | list[float], common: bool, alarm: int) -> None:
    """Two heads on a common trunk whose gradients differ by far, from the first record on, are a finding."""
    layers: dict[str, Values] = {name: {"rms": 1.0} for name in ("trunk", "one", "two")}
    gradients: dict[str, Values] = {"trunk": {"rms": 1.0}, "one": {"rms": one}, "two": {"rms": 1e-3}}
    found = run(layers, gradients, graph=heads(common=common))
    assert brief(found) == [("warning", "loss-imbalance", "one")] * alarm
    assert all(each.others == ("two",) for each in found)


class Policy(nn.Module):
    """A step of a policy whose actions have returns."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.loss = nn.Linear(4, 3), loss

    def forward(self, x: Tensor, actions: Tensor, returns: Tensor) -> Tensor:
        return self.loss(Categorical(logits=self.net(x)).log_prob(actions), returns)


@pytest.mark.parametrize(
    ("loss", "is_wrong"),
    [
        (lambda logs, returns: -(logs.mean() * returns).mean(), True),
        (lambda logs, returns: -(logs.mean() * (returns - returns.mean())).sum(), True),
        (lambda logs, returns: (-logs.mean() * returns).mean(), True),
        (lambda logs, returns: -(logs * returns).mean(), False),
        (lambda logs, returns: -logs.mean() * returns.mean(), False),
        (lambda logs, returns: -(logs * returns).mean() - 0.01 * logs.mean(), False),
    ],
)
def test_a_mean_before_the_weights_of_samples(loss: Callable[[Tensor, Tensor], Tensor], is_wrong: bool) -> None:
    """The numbers of the samples have no effect on a mean that is taken before."""
    model, inputs = Policy(loss), (torch.randn(8, 4), torch.arange(8) % 3, torch.randn(8))
    with GraphCapture(model, inputs) as capture:
        model(*inputs).backward()
    found = [each for each in run(LAYERS, graph=capture.graph()) if each.rule == "mean-before-weights"]
    assert brief(found) == [("warning", "mean-before-weights", "")] * is_wrong
