"""Tests of the rules of normalization layers."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_recorder.graph import capture_graph
from tests.insight.records import Examination, Values, brief, chain, examined, run, trained


def test_a_normalization_without_effect() -> None:
    """The output of a BatchNorm has the rms of its weight; a LayerNorm may differ within the range of its weight."""
    weight: dict[str, Values] = {"norm/weight": {"rms": 1.0, "min": 0.2, "max": 3.0, "update_ratio": 1e-3}}
    for kind, rms, alarm in (
        ("BatchNorm2d", 1.1, 0),
        ("BatchNorm2d", 2.0, 1),
        ("LayerNorm", 2.0, 0),
        ("LayerNorm", 5.0, 1),
    ):
        found = run({"norm": {"rms": rms}, "fc": {}}, None, weight, graph=chain("norm", "fc", norm=kind))
        assert brief(found) == [("warning", "norm-ineffective", "norm")] * alarm, (kind, rms)


@pytest.mark.parametrize(("rms", "alarm"), [(0.0, 0), (0.3, 1), (1.0, 0), (2.5, 1)])
def test_a_normalization_whose_weight_is_an_offset_from_one(rms: float, alarm: int) -> None:
    """Some classes multiply by 1 + weight."""
    weight: dict[str, Values] = {"norm/weight": {"rms": 0.01, "min": -0.02, "max": 0.02, "update_ratio": 1e-3}}
    graph = chain("a", "norm", "fc", norm="LayerNorm")
    found = run({"a": {}, "norm": {"rms": rms}, "fc": {}}, None, weight, graph=graph)
    assert [each.rule for each in found] == ["norm-ineffective"] * alarm


@pytest.mark.parametrize(("zeros", "alarm"), [(0.0, 1), (0.75, 0)])
def test_a_normalization_of_embeddings_of_padding(zeros: float, alarm: int) -> None:
    """Rows of zeros, as those of padding, stay zero and make the rms of the whole output smaller."""
    weight: dict[str, Values] = {"norm/weight": {"rms": 1.0, "min": 1.0, "max": 1.0, "update_ratio": 1e-3}}
    graph = chain("embed", "norm", "fc", norm="LayerNorm")
    layers: dict[str, Values] = {"embed": {"zero_fraction": zeros}, "norm": {"rms": 0.5}, "fc": {}}
    found = run(layers, None, weight, graph=graph)
    assert [each.rule for each in found] == ["norm-ineffective"] * alarm


@pytest.mark.parametrize(
    ("most", "weight", "why"),
    [
        ([0.25] * 8, None, ["The weight of the normalization is zero, or"]),  # frozen, so it is not recorded
        ([0.25] * 8, 1.0, ["The weight of the normalization is zero, or"]),
        ([0.25] * 8, 0.0, ["The weight of the normalization is zero, so"]),
        ([0.25] * 7 + [0.5], None, []),
    ],
)
def test_a_normalization_that_returns_its_bias(most: list[float], weight: float | None, why: list[str]) -> None:
    """If the output has the values of the bias in the last records, the weight is the cause if it is known as zero."""
    values: Values = {"mean": 0.01, "min": -0.5, "rms": 0.2}
    bias: dict[str, Values] = {"norm/bias": {**values, "max": 0.25}}
    if weight is not None:
        bias["norm/weight"] = {"rms": weight, "min": weight, "max": weight, "update_ratio": 1e-3}
    graph = chain("a", "norm", "fc", norm="LayerNorm")
    found = run({"a": {}, "norm": {**values, "max": most}, "fc": {}}, None, bias, graph=graph)
    found = [each for each in found if each.rule == "norm-ineffective"]
    assert [each.why[:43] for each in found] == why
    assert all(each.verdict.endswith("; its weight is zero") == (weight == 0) for each in found)


@pytest.mark.parametrize(
    ("variance", "expected"),
    [
        ([25.0] * 8, [("warning", "running-statistics", "bn")]),
        ([1.5] * 8, []),
        (list(np.geomspace(400.0, 25.0, 8)), []),  # it follows slowly
    ],
)
def test_running_statistics(variance: list[float], expected: list[tuple[str, str, str]]) -> None:
    """Running statistics whose rms is four times that of the inputs, and stays so, are a finding."""
    parameters: dict[str, Values] = {
        **trained("fc"),
        "bn/running_mean": {"rms": 0.1, "mean": 0.0},
        "bn/running_var": {"rms": variance, "mean": variance},
    }
    layers: dict[str, Values] = {"fc": {"rms": 1.0}, "bn": {"rms": 1.0}}
    assert brief(run(layers, parameters=parameters, graph=chain("fc", "bn", bn="BatchNorm1d"))) == expected


def test_running_statistics_behind_a_layer_that_is_called_more_often() -> None:
    """The outputs of a shared layer are those of all its calls, and the norm gets those of one of them."""

    class Shared(nn.Module):
        def __init__(self, calls: int) -> None:
            super().__init__()
            self.fc, self.bn, self.head, self.calls = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), calls

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(self.calls - 1):
                x = self.fc(x).relu()
            output: torch.Tensor = self.head(self.bn(self.fc(x)))
            return output

    parameters: dict[str, Values] = {
        **trained("fc"),
        **trained("head"),
        "bn/running_mean": {"rms": 0.1, "mean": 0.0},
        "bn/running_var": {"rms": 25.0, "mean": 25.0},
    }
    layers: dict[str, Values] = {"fc": {"rms": 1.0}, "bn": {"rms": 1.0}, "head": {"rms": 1.0}}
    for calls, expected in ((1, ["running-statistics"]), (2, [])):
        graph = capture_graph(Shared(calls), torch.randn(8, 4))
        found = [each.rule for each in run(layers, parameters=parameters, graph=graph)]
        assert [each for each in found if each == "running-statistics"] == expected


@pytest.mark.parametrize(
    ("variances", "mode", "expected"),
    [
        ([[1.0] * 8, [1.0, 1.1] * 4], {}, ["bn0"]),
        ([[1.0] * 8, [1.0, 1.1] * 4], {"eval_mode": 1.0}, []),  # the backbone is frozen, with its statistics
        ([[1.0] * 8, [1.0, 1.1] * 4], {"rms": [1.0] * 2 + [math.nan] * 6}, []),  # it is called at the beginning only
        ([[1.0] * 8, [1.0] * 8], {}, []),
        ([[1.0] * 7 + [1.1], [1.0, 1.1] * 4], {}, []),
        ([[math.nan] * 8, [1.0, 1.1] * 4], {}, []),
    ],
)
def test_running_statistics_that_do_not_change(variances: list[list[float]], mode: Values, expected: list[str]) -> None:
    """In train mode, running statistics that stay bitwise equal while others change are a finding."""
    parameters: dict[str, Values] = trained("fc")
    layers: dict[str, Values] = {"fc": {"rms": 1.0}}
    for place, values in enumerate(variances):
        parameters |= {
            f"bn{place}/running_mean": {"rms": 0.1, "mean": 0.0},
            f"bn{place}/running_var": {"rms": values, "mean": values},
        }
        layers[f"bn{place}"] = {"rms": 1.0, **(mode if place == 0 else {})}
    graph = chain("fc", "bn0", "bn1", bn0="BatchNorm1d", bn1="BatchNorm1d")
    found = [each for each in run(layers, parameters=parameters, graph=graph) if each.rule == "running-statistics"]
    assert [each.module for each in found] == expected
    assert all(each.verdict.endswith("do not change, but those of 1 others do") for each in found)


def momentum_of(
    momentum: float | None, *, every: int = 20, variance: float = 1.0, training: bool = True
) -> Examination:
    """Return the examination of a run whose BatchNorm has a momentum."""
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=momentum)).train(training)
    known: dict[str, Values] = {
        **trained("0"),
        "1/running_mean": {"rms": 0.01},
        "1/running_var": {"mean": variance, "std": 0.01, "rms": variance},
    }
    layers: dict[str, Values] = {"0": {"rms": 1.0}, "1": {"rms": 1.0}}
    return examined(layers, parameters=known, graph=capture_graph(net, torch.randn(4, 3)), every=every)


@pytest.mark.parametrize("momentum", [0.1, 0.01, 1.0, None])
def test_usual_momentum(momentum: float | None) -> None:
    """The default, small ones, 1 and the mean of all batches are fine."""
    assert momentum_of(momentum).findings() == []


def test_momentum_that_means_the_opposite() -> None:
    """Running statistics of the last batch, and those that stay as they began, are a finding in train mode."""
    (found,) = momentum_of(0.99).findings()
    assert brief([found]) == [("warning", "norm-momentum", "1")]
    assert "consist to 99% of the last batch: momentum is 0.99" in found.verdict
    (found,) = momentum_of(1e-4).findings()
    assert "after 141 steps, the running statistics of 1 are to 99% still the ones that it began with" in found.verdict
    assert momentum_of(0.99, training=False).findings() == []
    assert momentum_of(1e-4, variance=3.0).findings() == []  # of a pretrained model


@pytest.mark.parametrize(("rows", "is_wrong"), [(2, True), (3, False), (16, False)])
def test_a_normalization_over_two_values(rows: int, is_wrong: bool) -> None:
    """Two values become 1 and -1, whatever they are."""
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    found = Examination(capture_graph(net, torch.randn(rows, 3))).findings()
    assert [(each.rule, each.module, each.others) for each in found] == [("norm-of-two", "1", ("3",))] * is_wrong


def test_a_normalization_over_two_values_beside_others() -> None:
    """A BatchNorm behind a pooling may have two values if others have more."""
    net = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(3))
    assert Examination(capture_graph(net, torch.randn(2, 3, 4, 4))).findings() == []


@pytest.mark.parametrize(
    ("norm", "is_wrong"),
    [
        (nn.GroupNorm(6, 6), True),
        (nn.GroupNorm(3, 6), False),
        (nn.LayerNorm(6), False),
        (nn.Sequential(nn.Unflatten(1, (6, 1)), nn.LayerNorm(1), nn.Flatten()), True),
    ],
)
def test_a_normalization_of_single_values(norm: nn.Module, is_wrong: bool) -> None:
    """A value that is normalized by itself is zero."""
    net = nn.Sequential(nn.Linear(3, 6), norm, nn.Linear(6, 3))
    found = Examination(capture_graph(net, torch.randn(5, 3))).findings()
    assert [each.rule for each in found] == ["norm-of-two"] * is_wrong


class OffsetNorm(nn.LayerNorm):
    """A normalization whose weight is an offset from 1."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, self.normalized_shape, 1 + self.weight, self.bias)


class Branch(nn.Module):
    """A normalization before a layer, or at the end of a residual branch."""

    def __init__(self, size: int, *, ends: bool, is_offset: bool) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(size, size), nn.Linear(size, 3)
        self.norm = OffsetNorm(size) if is_offset else nn.LayerNorm(size)
        self.ends = ends

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.fc(x))
        output: Tensor = self.head(x + h if self.ends else h)
        return output


def of_a_norm(weight: float, *, size: int = 8, ends: bool = False, is_offset: bool = False) -> Examination:
    """Return a run whose normalization begins with a weight of some size."""
    known: dict[str, Values] = {
        **trained("fc"),
        "norm/weight": {"rms": [weight + 0.01 * row for row in range(8)]},
        "norm/bias": {"rms": 0.0},
        **trained("head"),
    }
    shapes = {("norm", path): (size,) for path in ("weight", "bias")}
    graph = capture_graph(Branch(size, ends=ends, is_offset=is_offset), torch.randn(4, size))
    return examined({}, parameters=known, graph=graph, shapes=shapes)


@pytest.mark.parametrize(
    ("weight", "options", "is_wrong"),
    [(0.0, {}, True), (1.0, {}, False), (0.0, {"ends": True}, False), (0.0, {"is_offset": True}, False)],
)
def test_a_normalization_that_begins_at_zero(weight: float, options: dict[str, bool], is_wrong: bool) -> None:
    """A weight of zero before a layer is a finding; one that ends a residual branch, or is an offset, is not."""
    run = of_a_norm(weight, **options)
    found = [each for each in run.findings() if each.rule == "zero-norm"]
    assert brief(found) == [("warning", "zero-norm", "norm")] * is_wrong


class Shared(nn.Module):
    """Layers with one or several BatchNorms."""

    def __init__(self, norms: Callable[[], list[nn.Module]], *, is_repeated: bool = False) -> None:
        super().__init__()
        layers = [nn.Linear(8, 8)] * 3 if is_repeated else [nn.Linear(8, 8) for _ in range(3)]
        self.layers, self.norms = nn.ModuleList(layers), nn.ModuleList(norms())

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = torch.relu(norm(layer(x)))
        return x.sum()


class EncodedAgain(nn.Module):
    """An autoencoder whose encoder, which ends with a BatchNorm, also gets the output."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        code = self.encoder(x)
        loss: Tensor = (self.encoder(self.decoder(code)) - code).square().sum()
        return loss


@pytest.mark.parametrize(
    ("model", "is_wrong"),
    [
        (EncodedAgain(), False),
        (Shared(lambda: [nn.BatchNorm1d(8)] * 3), True),
        (Shared(lambda: [nn.BatchNorm1d(8) for _ in range(3)]), False),
        (Shared(lambda: [nn.LayerNorm(8)] * 3), False),
        (Shared(lambda: [nn.BatchNorm1d(8)] * 3, is_repeated=True), False),  # a recurrence
        (Shared(lambda: [nn.BatchNorm1d(8, track_running_stats=False)] * 3), False),
    ],
)
def test_one_normalization_for_several_layers(model: nn.Module, is_wrong: bool) -> None:
    """Running statistics that are a mixture of several layers are a finding."""
    found = Examination(capture_graph(model, torch.randn(4, 8))).findings()
    found = [each for each in found if each.rule == "shared-norm"]
    assert brief(found) == [("warning", "shared-norm", "norms.0")] * is_wrong
    assert all("called 3 times in a step, behind layers.0, layers.1, layers.2" in each.verdict for each in found)
