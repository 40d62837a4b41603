"""Tests of the rules about connections: each fault, its repaired twin, and healthy designs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_recorder.graph import capture_graph
from tests.insight.records import Examination, brief, run
from tests.insight.rules.test_operations import (
    Function,
    Shaped,
    Step,
    classes,
    examine,
    mlp,
    rows,
    series,
    trained_step,
)


@pytest.mark.parametrize(
    ("function", "is_wrong"),
    [
        (lambda x: x.view(6, 8, 5), True),
        (lambda x: x.reshape(8, 5, 6), True),
        (lambda x: x.transpose(0, 1), False),
        (lambda x: x.view(8, 6, 1, 5), False),
        (lambda x: x.view(8, 30), False),
        (lambda x: x.view(8, 5, 6)[:, 1:], True),
        (lambda x: x[:, :-2].reshape(8, 5, 4), True),
        # Scores of relative positions are shifted by a column that is added, or by a row that is cut off.
        (lambda x: F.pad(x, (0, 0, 0, 1)).view(8, 5, 7)[..., :-1], False),
        (lambda x: F.pad(x, (2, 0)).view(8, 7, 6)[:, 1:].reshape(8, 6, 6), False),
        (lambda x: x.reshape(8, 5, 6)[:, 1:].reshape(8, 6, 4), False),
    ],
)
def test_a_view_that_exchanges_dimensions(function: Callable[[Tensor], Tensor], is_wrong: bool) -> None:
    """A view to the same sizes in another order mixes them; a transpose and a view that joins sizes do not."""
    found = examine(Shaped(function), lambda y, target: (y.mean() - target.mean()).square(), series, rows)
    assert [each.rule for each in found] == ["exchanged-by-view"] * is_wrong


@pytest.mark.parametrize(
    ("channels", "rows_of", "is_wrong"),
    [
        (3, lambda y: y.view(-1, 3), True),
        (3, lambda y: y.permute(0, 2, 3, 1).reshape(-1, 3), False),
        (6, lambda y: y.view(-1, 6), False),  # the last dimension may have the classes, too
    ],
)
def test_a_view_that_makes_rows_of_images(channels: int, rows_of: Function, is_wrong: bool) -> None:
    """The classes of an image are in dimension 1, so that a view does not make one row for each place."""
    net, images = nn.Sequential(nn.Conv2d(1, channels, 1), Shaped(rows_of)), torch.randn(8, 1, 5, 6)
    found = examine(net, lambda y, target: F.cross_entropy(y, target.flatten()), images, torch.zeros(8, 5, 6).long())
    assert brief(found) == [("warning", "exchanged-by-view", "net.1")] * is_wrong
    assert all("makes [240, 3] of [8, 3, 5, 6], whose dimension 1 has the classes" in each.verdict for each in found)


@pytest.mark.parametrize(
    ("function", "is_wrong"),
    [
        (lambda x: x.view(8, 3, 6, 2), True),
        (lambda x: x.view(8, 6, 3, 2), False),
        (lambda x: x.view(8, 6, 3, 2).transpose(1, 2).contiguous().view(8, 6, 6), True),
        (lambda x: x.view(8, 6, 3, 2).transpose(1, 2).transpose(1, 2).reshape(8, 6, 6), False),
        (lambda x: x.view(8, 6, 6, 1), False),
        (lambda x: x.view(8, 36), False),
    ],
)
def test_a_view_instead_of_an_exchange_of_heads_and_positions(function: Function, is_wrong: bool) -> None:
    """Heads that are split or joined without the exchange are a finding, although the number of dimensions changes."""
    net = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), Shaped(lambda x: function(x).flatten(1)), nn.Linear(36, 3))
    found = examine(net, F.cross_entropy, series, classes)
    assert [each.rule for each in found] == ["exchanged-by-view"] * is_wrong


@pytest.mark.parametrize(
    ("function", "is_wrong"),
    [
        (lambda h: h.view(8, -1), True),
        (lambda h: h.transpose(0, 1).reshape(8, -1), False),
        (lambda h: h.repeat(4, 1, 1).view(8, 8, 4), False),
    ],
)
def test_a_view_that_joins_samples(function: Function, is_wrong: bool) -> None:
    """A view of the states of a recurrence to one row for each sample is a finding; behind a transpose it is not."""
    lstm = nn.LSTM(5, 4, bidirectional=True, batch_first=True)
    net = nn.Sequential(lstm, Shaped(lambda x: function(x[1][0]).flatten(1)), nn.LazyLinear(3))
    net(series)
    found = examine(net, F.cross_entropy, series, classes)
    assert [each.rule for each in found] == ["exchanged-by-view"] * is_wrong


def test_views_of_installed_packages_are_meant() -> None:
    """The code of a package that is in use is tried, so that a view in it is no mistake."""
    net = nn.Sequential(nn.Linear(5, 4), Shaped(lambda x: x.view(8, 4, 6).flatten(1)), nn.Linear(24, 3))
    graph = capture_graph(Step(net, F.cross_entropy), series, classes)
    found = [Examination(replace(graph, packages=each)).findings() for each in ((), ("tests",))]
    assert [[each.rule for each in one] for one in found] == [["exchanged-by-view"], []]


class MadeAnew(nn.Module):
    """A network whose second layer is made in ``__init__``, or in each call."""

    def __init__(self, is_faulty: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), None if is_faulty else nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        layer = self.second or nn.Linear(5, 3)
        output: Tensor = layer(self.first(x).relu())
        return output


def test_a_layer_that_is_made_in_forward() -> None:
    """A layer with new weights in each step is a finding; a layer of the model, and a random projection, are not."""
    (found,) = examine(MadeAnew(True), F.cross_entropy, rows, classes)
    assert found.rule == "made-in-forward"
    assert found.verdict.startswith("the weight of the linear in ")
    assert "test_wiring.py:" in found.verdict
    assert examine(MadeAnew(False), F.cross_entropy, rows, classes) == []
    projected = nn.Sequential(nn.Linear(5, 5), Shaped(lambda x: x @ torch.randn(5, 3)))
    assert examine(projected, F.cross_entropy, rows, classes) == []


class Codes(nn.Module):
    """Samples are replaced by the nearest row of a code book."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(40, 5)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.codes(torch.cdist(x, self.codes.weight).argmin(1))
        return output


@pytest.mark.parametrize(("used", "samples", "findings"), [(2, 64, 1), (3, 64, 0), (1, 16, 0)])
def test_a_code_book_of_which_few_rows_are_used(used: int, samples: int, findings: int) -> None:
    """A batch that could use 40 rows and uses 2 in each record is a finding; a small batch cannot use many."""
    x = torch.randn(samples, 5)
    graph = capture_graph(Step(Codes(), F.mse_loss), x, x)
    values = {"net.codes/weight": {"rms": 1.0}, "net.codes/weight.grad": {"zero_fraction": 1 - used / 40}}
    found = run(None, None, values, graph=graph, shapes={("net.codes", "weight"): (40, 5)})
    assert [each.module for each in found if each.rule == "unused-codes"] == ["net.codes"] * findings


class Quantized(nn.Module):
    """A step of an autoencoder whose decoder gets the nearest rows of a code book."""

    def __init__(self, passed: Callable[[Tensor, Tensor], Tensor], *, is_frozen: bool = False) -> None:
        super().__init__()
        self.encoder, self.codes, self.decoder = mlp(5).requires_grad_(not is_frozen), nn.Embedding(16, 5), mlp(5)
        self.passed = passed

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        code = self.codes(torch.cdist(z, self.codes.weight).argmin(1))
        of_codes = F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())
        return F.mse_loss(self.decoder(self.passed(z, code)), x) + of_codes


class TwoDecoders(Quantized):
    """An autoencoder that decodes the encoded samples and their codes, as SOM-VAE."""

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        code = self.codes(torch.cdist(z, self.codes.weight).argmin(1))
        return F.mse_loss(self.decoder(code), x) + F.mse_loss(self.decoder(z), x) + F.mse_loss(z, code)


def test_an_encoder_that_another_loss_trains() -> None:
    """A loss of the decoded samples trains the encoder, so that the codes need not."""
    assert trained_step(TwoDecoders(lambda _, code: code), rows) == []


@pytest.mark.parametrize(
    ("passed", "is_frozen", "is_wrong"),
    [
        (lambda z, code: code, False, True),
        (lambda z, code: z.detach() + (code - z.detach()), False, True),
        (lambda z, code: z + (code - z).detach(), False, False),
        (lambda z, code: code + z - z.detach(), False, False),
        (lambda z, code: code, True, False),
    ],
)
def test_codes_that_cut_off_the_encoder(
    passed: Callable[[Tensor, Tensor], Tensor], is_frozen: bool, is_wrong: bool
) -> None:
    """The gradient must pass the choice of the code, unless the encoder is frozen; the loss of the codes is no way."""
    found = trained_step(Quantized(passed, is_frozen=is_frozen), rows)
    assert brief(found) == [("warning", "encoder-cut-off", "codes")] * is_wrong
    assert all("depends on the encoder through the argmin" in each.verdict for each in found)


class Exchanged(nn.Module):
    """A step whose model may get the samples in another order."""

    def __init__(self, given: Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.net, self.given = mlp(3), given

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(*self.given(self.net, x, y))


def back(net: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    places = x[:, 0].sort()[1]
    return net(x[places])[places.argsort()], y


def of_both(net: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    places = torch.randperm(8)
    return net(x[places]), y[places]


def mixed(net: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return net(0.7 * x + 0.3 * x[torch.randperm(8)]), y


@pytest.mark.parametrize(
    ("given", "is_wrong"),
    [
        (lambda net, x, y: (net(x[x[:, 0].sort(descending=True)[1]]), y), True),
        (lambda net, x, y: (net(x[torch.randperm(8)]), y), True),
        (lambda net, x, y: (net(x.index_select(0, x[:, 0].argsort())), y), True),
        (back, False),
        (of_both, False),
        (mixed, False),
        (lambda net, x, y: (net(x[:, torch.randperm(5)]), y), False),  # the features
        (lambda net, x, y: (net(x[torch.randperm(8), :]), y), True),
        (lambda net, x, y: (net(x), y), False),
    ],
)
def test_samples_that_are_exchanged_before_the_model(
    given: Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]], is_wrong: bool
) -> None:
    """Outputs of exchanged samples must go back to their places, or the targets be exchanged, too."""
    found = trained_step(Exchanged(given), rows, classes)
    assert brief(found) == [("warning", "exchanged-samples", "")] * is_wrong


class Skip(nn.Module):
    """The decoder of a U-Net, which joins two tensors along a dimension."""

    def __init__(self, join: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.down, self.up, self.head, self.join = nn.Conv1d(6, 4, 1), nn.Conv1d(4, 4, 1), nn.LazyConv1d(3, 1), join

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        output: Tensor = self.head(self.join(self.up(F.relu(skip)), skip)).mean(2)[:8]
        return output


@pytest.mark.parametrize(
    ("join", "is_wrong"),
    [
        (lambda up, skip: torch.cat([up, up], 1), True),
        (lambda up, skip: torch.cat([up, skip], 1), False),
        (lambda up, skip: torch.cat([up, up], 0), False),  # twice the samples
        (lambda up, skip: torch.cat([up[:, :1], up[:, :1]], 1), False),
        (lambda up, skip: torch.cat([torch.ones(8, 2, 5)] * 2, 1), False),
        (lambda up, skip: torch.cat(up.split(2, 1), 1), False),  # two parts of one output
        (lambda up, skip: torch.relu(torch.cat([up, up], 1)), True),
        (lambda up, skip: torch.cat([up, up], 1) + torch.cat([skip, up], 1), False),  # a wider residual connection
        (lambda up, skip: sum(torch.cat([up, up], 1).chunk(2, 1)), False),  # two streams
    ],
)
def test_a_tensor_that_is_joined_with_itself(join: Callable[[Tensor, Tensor], Tensor], is_wrong: bool) -> None:
    """The output of a layer beside itself is a finding; copies of samples, single channels and constants are not."""
    net = Skip(join)
    net(series)
    found = [each for each in examine(net, F.cross_entropy, series, classes) if each.rule == "joined-with-itself"]
    assert brief(found) == [("warning", "joined-with-itself", "net")] * is_wrong
    assert all("the output [8, 4, 5] of the conv1d in net.up" in each.verdict for each in found)


@pytest.mark.parametrize(
    ("shape", "function", "is_wrong"),
    [
        ((8, 3, 8, 8), lambda x: x.view(8, 4, 48), True),
        ((8, 3, 8, 8), lambda x: x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(8, 4, 48), False),
        ((8, 3, 8, 8), lambda x: x.view(8, 24, 8), False),  # rows of pixels
        ((8, 1, 8, 8), lambda x: x.view(8, 4, 16), False),  # runs of two rows of pixels
        ((8, 2, 8, 8), lambda x: x.view(8, 16, 8), False),  # the steps of two series
    ],
)
def test_patches_that_a_view_makes(shape: tuple[int, ...], function: Function, is_wrong: bool) -> None:
    """A view of an image does not make patches: its rows are runs of pixels of one channel."""
    found = examine(Shaped(function), lambda y, target: (y.mean() - target.mean()).square(), torch.randn(shape), rows)
    assert brief(found) == [("warning", "exchanged-by-view", "net")] * is_wrong
    assert all("no patches of 4 × 4 pixels" in each.verdict for each in found)
