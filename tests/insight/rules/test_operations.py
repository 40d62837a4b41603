"""Tests of the rules about the operations of the recorded step: each fault, its repaired twin, and healthy designs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_recorder.graph import GraphCapture, capture_graph
from lightning_recorder.graph.model import Graph
from lightning_recorder.insight import RULES, Finding
from tests.insight.records import Examination, brief

FILES = ("losses", "loss_terms", "own_targets", "operations", "sequences", "wiring")
NAMES = {rule.name for rule in RULES if rule.function.__module__.rpartition(".")[2] in FILES}
TORCH_WARNS = pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")
Loss = Callable[[Tensor, Tensor], Tensor]
Function = Callable[[Tensor], Tensor]
rows, classes = torch.randn(8, 5), torch.arange(8) % 3
series = torch.randn(8, 6, 5)
tokens = torch.arange(48).view(8, 6) % 11


class Step(nn.Module):
    """A step of training: a network and its loss."""

    def __init__(self, net: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.net(x), target)


class Shaped(nn.Module):
    """A module that applies a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def examine(net: nn.Module, loss: Loss, x: Tensor, target: Tensor) -> list[Finding]:
    """Return the findings about the operations of one step."""
    found = Examination(capture_graph(Step(net, loss), x, target)).findings()
    return [each for each in found if each.rule in NAMES]


def trained_step(model: nn.Module, *inputs: Tensor) -> list[Finding]:
    """Return the findings about the operations of a model that returns its loss, with the backward pass."""
    with GraphCapture(model, inputs) as capture:
        model(*inputs).backward()
    names = NAMES | {"unknown-noise", "largest-value", "seen-targets", "mean-before-weights"}
    return [each for each in Examination(capture.graph()).findings() if each.rule in names]


def of_batch(graph: Graph) -> Graph:
    """Return the graph with the names that the inputs have in a fit."""
    inputs = [node for node in graph.nodes if node.kind == "input"]
    names = {node: f"batch[{place}]" for place, node in enumerate(inputs)}
    return replace(graph, nodes=tuple(replace(each, name=names.get(each, each.name)) for each in graph.nodes))


def mlp(out: int, *last: nn.Module) -> nn.Sequential:
    """Return a network with one hidden layer."""
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, out), *last)


def test_layers_without_an_activation() -> None:
    """Three linear layers in a row are a finding, with dropout between them, too."""
    net = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 7), nn.Dropout(0.1), nn.Linear(7, 3))
    (found,) = examine(net, F.cross_entropy, rows, classes)
    assert brief([found]) == [("warning", "no-activation", "net.1")]
    assert "net.1 directly follows net.0 (weights [7, 5] and [7, 7]); 2 pairs" in found.verdict


class Residual(nn.Module):
    """Two linear layers, of which the inner one has another reader."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        output: Tensor = h + self.outer(h)
        return output


class Mixer(nn.Module):
    """Two linear layers along different dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.channels, self.places = nn.Linear(5, 5), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.places(self.channels(x).mT).mT.mean(1)
        return output


def frozen(layer: nn.Module) -> nn.Module:
    """Return the layer without gradients."""
    return layer.requires_grad_(False)


class Tied(nn.Module):
    """A projection before a last layer that has the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.projection = nn.Embedding(7, 5), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.embedding(x.mean(2).long().abs() % 7))
        output: Tensor = self.projection(hidden.flatten(1)[:, :6]) @ self.embedding.weight.T
        return output


@pytest.mark.parametrize(
    ("net", "x"),
    [
        (mlp(3), rows),
        (Tied(), series),
        (nn.Sequential(nn.Linear(5, 2), nn.Linear(2, 5)), rows),  # a low rank
        (nn.Sequential(frozen(nn.Linear(5, 9)), nn.Linear(9, 3)), rows),  # a fixed transform
        (nn.Sequential(*[nn.Linear(5, 5)] * 3), rows),  # a recurrence
        (Residual(), rows),
        (Mixer(), series),
    ],
)
def test_layers_that_follow_each_other_for_a_reason(net: nn.Module, x: Tensor) -> None:
    """Low ranks, fixed and repeated layers, residual connections and exchanged dimensions are fine."""
    assert examine(net, F.cross_entropy, x, classes) == []


def test_one_pair_in_a_network_with_activations_is_a_note() -> None:
    """A single pair of layers without an activation between them does little harm."""
    net = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 7), nn.ReLU(), nn.Linear(7, 7), nn.Linear(7, 3))
    assert brief(examine(net, F.cross_entropy, rows, classes)) == [("note", "no-activation", "net.5")]


class Rows(nn.Module):
    """A recurrent layer and the last state of each sequence."""

    def __init__(self, kind: Callable[..., nn.Module], batch_first: bool) -> None:
        super().__init__()
        self.rnn, self.head = kind(5, 4, batch_first=batch_first), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.rnn(x)[0][:, -1])
        return output


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrence_over_the_batch(kind: Callable[..., nn.Module]) -> None:
    """A recurrence over the samples is a finding if the step has one target for each sample."""
    (found,) = examine(Rows(kind, False), F.cross_entropy, series, classes)
    assert brief([found]) == [("warning", "along-batch", "net.rnn")]
    assert "runs over dimension 0 of [8, 6, 5], which has the 8 samples" in found.verdict
    assert examine(Rows(kind, True), F.cross_entropy, series, classes) == []


class Encoded(nn.Module):
    """A layer of attention and the mean over the positions."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.mix, self.head = nn.TransformerEncoderLayer(4, 2, 8, batch_first=batch_first), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.mix(x).mean(1))
        return output


@pytest.mark.parametrize("positions", [6, 1, 8, 16])
def test_attention_over_the_batch(positions: int) -> None:
    """Attention between samples is a finding if the step has one target for each sample.

    A single sequence of samples, sequences as long as the batch and parts of samples are left out.
    """
    found = examine(Encoded(False), F.cross_entropy, torch.randn(8, positions, 4), classes)
    assert brief(found) == [("warning", "along-batch", "net.mix.self_attn")] * (positions == 6)
    assert all("runs over dimension 0 of [8, 6, 4], which has the 8 samples" in each.verdict for each in found)
    assert examine(Encoded(True), F.cross_entropy, torch.randn(8, positions, 4), classes) == []


class TimeFirst(nn.Module):
    """A language model of sequences that begin with the time, as in the tutorials of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.rnn, self.head = nn.Embedding(11, 4), nn.LSTM(4, 4), nn.Linear(4, 11)
        self.register_buffer("places", torch.randn(32, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.rnn(self.embedding(x) + self.get_buffer("places")[: len(x)])[0]).flatten(0, 1)
        return output


def test_sequences_that_begin_with_the_time() -> None:
    """Recurrence and positions along the first dimension are right if each step in time has a target."""
    assert examine(TimeFirst(), F.cross_entropy, tokens, tokens.flatten()) == []
    assert examine(TimeFirst(), lambda y, target: F.cross_entropy(y, target.flatten()), tokens, tokens) == []


@pytest.mark.parametrize(("dim", "findings"), [(0, 1), (1, 0), (-1, 0), (-2, 1)])
def test_a_softmax_over_the_samples(dim: int, findings: int) -> None:
    """A softmax of predictions over the samples is a finding."""
    found = examine(mlp(3, nn.LogSoftmax(dim)), F.nll_loss, rows, classes)
    assert brief(found) == [("warning", "along-batch", "net.3")] * findings


def test_similarities_of_pairs_are_compared_along_both_dimensions() -> None:
    """The square logits of a contrastive loss may be normalized over the samples."""

    def contrast(y: Tensor, _: Tensor) -> Tensor:
        logits, target = y @ y.mT, torch.arange(8)
        return F.nll_loss(logits.log_softmax(0), target) + F.nll_loss(logits.log_softmax(1), target)

    assert examine(mlp(3), contrast, rows, classes) == []


class Places(nn.Module):
    """Tokens with positions that are added along a dimension."""

    def __init__(self, along_batch: bool) -> None:
        super().__init__()
        self.along_batch = along_batch
        self.embedding, self.head = nn.Embedding(11, 4), nn.Linear(4, 3)
        self.places = nn.Parameter(torch.randn(32, 4))

    def forward(self, x: Tensor) -> Tensor:
        places = self.places[: len(x), None] if self.along_batch else self.places[None, : x.shape[1]]
        output: Tensor = self.head((self.embedding(x) + places).mean(1))
        return output


def test_positions_along_the_batch() -> None:
    """Positions that differ between samples and not between tokens are a finding."""
    (found,) = examine(Places(True), F.cross_entropy, tokens, classes)
    assert brief([found]) == [("warning", "along-batch", "net")]
    assert "adds [8, 1, 4] of the model to [8, 6, 4]" in found.verdict
    assert examine(Places(False), F.cross_entropy, tokens, classes) == []


def test_positions_of_a_sequence_as_long_as_the_batch() -> None:
    """If there are as many positions as samples, the first dimension may have the positions."""
    assert examine(Places(True), F.cross_entropy, torch.arange(64).view(8, 8) % 11, classes) == []


@pytest.mark.parametrize(
    ("function", "is_wrong"),
    [
        (lambda x: x.mean(0)[:1].expand(8, 5), True),
        (lambda x: x.mean(1), False),
        (lambda x: (x - x.mean(0)).mean(1), False),  # a normalization along the batch
    ],
)
def test_a_mean_over_the_samples(function: Callable[[Tensor], Tensor], is_wrong: bool) -> None:
    """A mean over the samples that takes the place of each sample is a finding."""
    net = nn.Sequential(Shaped(function), nn.Linear(5, 3))
    found = examine(net, F.cross_entropy, series, classes)
    assert [each.rule for each in found] == ["along-batch"] * is_wrong


def whole(x: Tensor) -> Tensor:
    return (x - x.mean()) / (x.std() + 1e-5)


def of_each(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / x.var(-1, keepdim=True).sqrt()


@pytest.mark.parametrize("normalize", [whole, lambda x: F.normalize(x, dim=0)])
def test_a_normalization_before_the_model_runs_again(normalize: Function) -> None:
    """Advantages are normalized over the batch between two calls of the model, as in PPO, and no layer takes them."""
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            advantages = normalize(self.net(x)[:, :1])
            return self.net(x), advantages

    def loss(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        y, advantages = outputs
        return (F.cross_entropy(y, target, reduction="none") * advantages.detach()[:, 0]).mean()

    assert examine(Repeated(), loss, rows, classes) == []  # type: ignore[arg-type]  # a step with two outputs


@pytest.mark.parametrize(("first", "second", "is_wrong"), [(None, whole, True), (whole, of_each, False)])
def test_a_normalization_over_the_samples(first: Function | None, second: Function, is_wrong: bool) -> None:
    """A normalization of all values between two layers is a finding; one of the batch, or of each sample, is not."""
    net = nn.Sequential(Shaped(first or nn.Identity()), nn.Linear(5, 7), Shaped(second), nn.Linear(7, 3))
    found = examine(net, lambda y, target: F.cross_entropy(whole(y) if first else y, target), rows, classes)
    assert [each.rule for each in found] == ["along-batch"] * is_wrong


def test_a_softmax_along_the_batch_before_a_logarithm() -> None:
    """A softmax over the samples is found behind a logarithm and a small number, too."""
    found = [
        examine(mlp(3), lambda y, target, dim=dim: F.nll_loss((y.softmax(dim) + 1e-8).log(), target), rows, classes)  # type: ignore[misc]  # mypy infers no lambda with defaults
        for dim in (0, 1)
    ]
    assert [[each.rule for each in one] for one in found] == [["along-batch"], []]


@pytest.mark.parametrize(("dim", "is_wrong"), [(0, True), (2, True), (1, False)])
def test_a_softmax_over_another_dimension_than_the_classes(dim: int, is_wrong: bool) -> None:
    """nll_loss takes dimension 1 for the classes, whatever the batch is."""
    x, target = torch.randn(4, 5, 6, 6), torch.zeros(4, 6, 6, dtype=torch.long)
    found = examine(nn.Conv2d(5, 3, 1), lambda y, target: F.nll_loss(y.log_softmax(dim), target), x, target)
    assert [each.rule for each in found] == ["along-batch"] * is_wrong
    assert all(f"over dimension {dim} of [4, 3, 6, 6]" in each.verdict for each in found)


def own_entropy(x: Tensor, y: Tensor, dim: int = 1) -> Tensor:
    """Return the cross entropy without a function of torch."""
    return -(F.one_hot(y, 3) * x.log_softmax(dim)).sum(1).mean()


def test_a_softmax_before_a_loss_of_the_step_itself() -> None:
    """A softmax along the batch, or over one entry, is found before a product with targets, too."""
    (found,) = examine(mlp(3), lambda x, y: own_entropy(x, y, 0), rows, classes)
    assert brief([found]) == [("warning", "along-batch", "")]
    assert examine(mlp(3), own_entropy, rows, classes) == []
    single = examine(mlp(1), lambda x, y: -(y[:, None] * x.log_softmax(1)).sum(), rows, classes)
    assert [each.rule for each in single] == ["one-class"]


@pytest.mark.parametrize(
    ("dim", "is_wrong"),
    [(0, True), (1, False)],
)
def test_a_normalization_along_the_batch(dim: int, is_wrong: bool) -> None:
    """Features that are divided by their norm over the samples are a finding; samples divided by theirs are not."""
    net = nn.Sequential(nn.Linear(5, 7), Shaped(lambda x: F.normalize(x, dim=dim)), nn.Linear(7, 3))
    found = examine(net, F.cross_entropy, rows, classes)
    assert brief(found) == [("warning", "along-batch", "net.1")] * is_wrong


@pytest.mark.parametrize(
    ("dimension", "is_turned", "is_wrong"), [(0, False, True), (1, False, False), (0, True, False)]
)
def test_embeddings_normalized_over_the_samples(dimension: int, is_turned: bool, is_wrong: bool) -> None:
    """Products of samples need a norm of each sample; correlations of features have one of each feature."""

    def loss(y: Tensor, other: Tensor) -> Tensor:
        one, two = (F.normalize(each, dim=dimension) for each in (y, y + other))
        products = one.T @ two if is_turned else one @ two.T
        return F.cross_entropy(products / 0.1, torch.arange(len(products)))

    found = [each.rule for each in examine(mlp(7), loss, rows, torch.randn(8, 1))]
    assert found.count("along-batch") == is_wrong


class Squeezed(nn.Module):
    """A network of which one layer has a single output, with other ways around it if there are any."""

    def __init__(self, between: Callable[[Tensor, Tensor], Tensor], *, inputs: int = 1, outputs: int = 3) -> None:
        super().__init__()
        self.narrow, self.wide, self.head = nn.Linear(5, 1), nn.Linear(inputs, 6), nn.Linear(6, outputs)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.wide(self.between(self.narrow(x), x)).relu())
        return output


class LastState(nn.Module):
    """A recurrence with one unit, whose last state gives all outputs."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.mix, self.head = nn.GRU(5, units, batch_first=True), nn.Linear(units, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.mix(x)[0][:, -1])
        return output


def test_a_hidden_layer_of_a_single_unit() -> None:
    """One number between two layers from which several outputs follow is a finding; two numbers are none."""
    (found,) = examine(Squeezed(lambda one, _: one.relu()), F.cross_entropy, rows, classes)
    assert brief([found]) == [("warning", "single-unit", "net.narrow")]
    assert found.verdict == "net.narrow returns one number for each sample, from which the 3 outputs follow"
    wider = nn.Sequential(nn.Linear(5, 2), nn.ReLU(), nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 3))
    assert examine(wider, F.cross_entropy, rows, classes) == []


@pytest.mark.parametrize(("units", "rules"), [(1, ["single-unit"]), (2, [])])
def test_a_recurrence_of_a_single_unit(units: int, rules: list[str]) -> None:
    """The last state of a recurrence with one unit is one number, too."""
    assert [each.rule for each in examine(LastState(units), F.cross_entropy, series, classes)] == rules


@pytest.mark.parametrize(
    ("net", "loss", "target"),
    [
        (Squeezed(lambda one, x: torch.cat([one, x], 1), inputs=6), F.cross_entropy, classes),  # beside others
        (Squeezed(lambda one, x: one.sigmoid() * x, inputs=5), F.cross_entropy, classes),  # a gate
        (Squeezed(lambda one, x: one + x[:, :1]), F.cross_entropy, classes),  # another way from the input
        (Squeezed(lambda one, _: one.relu(), outputs=1), F.mse_loss, torch.randn(8, 1)),  # one output
        (Squeezed(lambda one, _: one.relu(), outputs=2), F.cross_entropy, classes % 2),  # two classes
        (Squeezed(lambda _, x: x[:, :1]), F.cross_entropy, classes),  # one feature of the input
        (Squeezed(lambda one, _: one.relu(), outputs=5), F.mse_loss, rows),  # the latent of an autoencoder
        (Squeezed(lambda one, _: one.relu(), outputs=5), F.mse_loss, rows + 1.0),  # whose target is another tensor
        (Shaped(nn.Conv1d(6, 1, 1)), lambda y, _: y.square().mean(), classes),  # one channel of several places
    ],
)
def test_single_units_that_are_meant(net: nn.Module, loss: Loss, target: Tensor) -> None:
    """Gates, numbers beside others, one output, one feature and the latent of an autoencoder are fine."""
    x = series if isinstance(net, Shaped) else rows
    found = examine(net, loss, x, x if target is rows else target)
    assert [each.rule for each in found if each.rule == "single-unit"] == []


class Pooled(nn.Module):
    """A step of a graph network that joins the nodes of each sample, or those of all samples."""

    def __init__(self, graphs: int) -> None:
        super().__init__()
        self.net, self.head, self.graphs = nn.Linear(5, 7), nn.Linear(7, 3), graphs

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        nodes = F.relu(self.net(x)).reshape(48, 7)
        places = torch.arange(8).repeat_interleave(6) * (self.graphs > 1)
        pooled = torch.zeros(self.graphs, 7).index_add(0, places, nodes)
        return F.cross_entropy(self.head(pooled).expand(8, 3), y)


@pytest.mark.parametrize(("graphs", "is_wrong"), [(1, True), (8, False)])
def test_nodes_of_all_graphs_that_are_joined(graphs: int, is_wrong: bool) -> None:
    """The nodes of several graphs must not become one row that stands for all samples."""
    found = trained_step(Pooled(graphs), series, classes)
    assert brief(found) == [("warning", "along-batch", "")] * is_wrong
    assert all("index_add" in each.verdict and "[48, 7]" in each.verdict for each in found)


class Unassigned(nn.Module):
    """Two layers, and a module whose result is thrown away, or is not."""

    def __init__(self, act: nn.Module, is_assigned: bool) -> None:
        super().__init__()
        self.first, self.act, self.last, self.is_assigned = nn.Linear(5, 7), act, nn.Linear(7, 3), is_assigned

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        other = self.act(h)
        output: Tensor = self.last(other if self.is_assigned else h)
        return output


@pytest.mark.parametrize(
    ("act", "is_assigned", "rules"),
    [
        (nn.ReLU(), False, ["result-not-used"]),
        (nn.BatchNorm1d(7), False, ["result-not-used", "no-activation"]),
        (nn.ReLU(), True, []),
        (nn.ReLU(inplace=True), False, []),  # writes into its input
    ],
)
def test_a_result_that_nothing_reads(act: nn.Module, is_assigned: bool, rules: list[str]) -> None:
    """A call without an assignment is a finding, if the next layer gets the input of the module instead."""
    found = examine(Unassigned(act, is_assigned), F.cross_entropy, rows, classes)
    assert {each.rule for each in found} <= set(rules)
    assert [each.module for each in found if each.rule == "result-not-used"] == ["net.act"] * bool(rules)
    assert all("net.last gets its input instead" in each.verdict for each in found if each.rule == "result-not-used")


def test_a_head_whose_result_nothing_reads() -> None:
    """A layer behind the function, of which the loss reads nothing, either, shows that a branch is not used."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = mlp(7), nn.Linear(7, 3)

        def forward(self, x: Tensor) -> Tensor:
            h: Tensor = self.body(x)
            F.relu(self.head(h))
            return h

    assert examine(Branches(), F.cross_entropy, rows, classes) == []
