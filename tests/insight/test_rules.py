"""Tests of each rule with records made by hand, on both sides of its threshold."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lightning_recorder.insight import RULES, Examination, Finding
from lightning_recorder.insight.examination import _ORDER
from lightning_recorder.reductions import Histogram
from tests.insight.records import Values, chain, record, run, trained

NAN = float("nan")


def brief(findings: list[Finding]) -> list[tuple[str, str, str]]:
    return [(each.severity, each.rule, each.module) for each in findings]


def network(*names: str, **changed: dict[str, Values]) -> dict[str, Values]:
    """Return the parameters of healthy layers, some of them replaced."""
    return {key: value for name in names for key, value in changed.get(name, trained(name)).items()}


def test_every_rule_is_complete() -> None:
    """Every rule states its statistic, threshold, usual values, cause, advice and false alarms, and has a rank."""
    for rule in RULES:
        assert all((rule.statistic, rule.usual, rule.why, rule.next, rule.false_alarms)), rule.name
        assert set(rule.explains) <= set(_ORDER), rule.name
    assert sorted(rule.name for rule in RULES) == sorted(_ORDER)


def test_a_healthy_run_has_no_findings() -> None:
    """Ordinary numbers give no finding."""
    names = ("a", "b", "c", "head")
    layers: dict[str, Values] = {name: {"rms": 1.0} for name in names}
    assert run(layers, {name: {"rms": 1e-3} for name in names}, network(*names), graph=chain(*names)) == []


@pytest.mark.parametrize(
    ("fraction", "kind", "expected"),
    [
        (1.0, "ReLU", [("warning", "dead-output", "act")]),
        (0.99, "Linear", [("warning", "dead-output", "act")]),
        (0.96, "ReLU", [("note", "dead-output", "act")]),
        (0.96, "Linear", []),
        (0.9, "ReLU", []),
    ],
)
def test_dead_output(fraction: float, kind: str, expected: list[tuple[str, str, str]]) -> None:
    """99 % of zeros in the last two records is a finding, 95 % is a note for a ReLU."""
    layers: dict[str, Values] = {"fc": {"max": -3.0}, "act": {"zero_fraction": fraction}}
    assert brief(run(layers, graph=chain("fc", "act", act=kind))) == expected


def test_the_first_step_of_a_dead_output() -> None:
    """The finding names the first step from which on the output is zero, and the input of the ReLU."""
    layers: dict[str, Values] = {"fc": {"max": -3.0}, "act": {"zero_fraction": [0.5] * 5 + [1.0] * 3}}
    (found,) = run(layers, graph=chain("fc", "act", act="ReLU"))
    assert found.verdict == "act returns only zeros from step 50 on: its input from fc is at most -3"
    assert (found.first_step, found.last_step, found.records) == (50, 70, 3)
    assert found.trace is not None
    assert found.trace.values == (0.5,) * 5 + (1.0,) * 3


def test_a_dead_layer_is_one_finding() -> None:
    """Zeros behind a dead layer and missing gradients before it are merged into its finding."""
    names = ("a", "act", "c", "d", "head")
    layers: dict[str, Values] = {name: {"zero_fraction": float(name in ("act", "c"))} for name in names}
    gradients: dict[str, Values] = {name: {"rms": 1e-3 if name in ("d", "head") else 0.0} for name in names}
    parameters = network("a", "d", "head", a=trained("a", grad=0.0, update=0.0, ratio=0.0))
    (found,) = run(layers, gradients, parameters, graph=chain(*names, act="ReLU"))
    assert (found.rule, found.module, found.others) == ("dead-output", "act", ("c", "a"))
    assert found.consequences == ("gradient-stops",)


def test_the_gradient_stops() -> None:
    """Modules without a gradient give one finding, which names the last of them on the way to the loss."""
    names = ("a", "b", "pool", "head")
    layers: dict[str, Values] = {name: {"rms": 1.0} for name in names}
    still = {f"{name}/weight": {"rms": 0.25, "update_ratio": 0.0} for name in ("a", "b")}
    (found,) = run(layers, {"head": {"rms": 1e-3}}, {**still, **trained("head")}, graph=chain(*names, pool="MaxPool2d"))
    assert found.verdict == "2 modules with parameters get no gradient: the gradient from head stops at pool"
    assert (found.rule, found.module, found.others) == ("gradient-stops", "pool", ("a", "b"))


def test_an_unused_module() -> None:
    """A module that is never called and never gets a gradient is unused."""
    layers: dict[str, Values] = {"a": {"rms": 1.0}, "head": {"rms": 1.0}}
    parameters: dict[str, Values] = {**network("a", "head"), "extra/weight": {"rms": 0.2, "update_ratio": 0.0}}
    assert brief(run(layers, None, parameters, graph=chain("a", "head"))) == [("warning", "unused-parameter", "extra")]


@pytest.mark.parametrize("loud", [False, True])
def test_experts_that_no_token_reaches(loud: bool) -> None:
    """Uncalled modules beside called ones are a finding of the list; a router with large outputs is their cause."""
    called = ("stem", "layers.0.router", "layers.0.experts.0.up", "layers.0.experts.0.down", "head")
    layers: dict[str, Values] = {name: {"rms": 20.0 if loud and "router" in name else 1.0} for name in called}
    starved = [f"layers.0.experts.{number}.{part}/weight" for number in (1, 2) for part in ("up", "down")]
    parameters: dict[str, Values] = {
        **network(*called),
        **{each: {"rms": 0.2, "update_ratio": 0.0} for each in starved},
    }
    (found,) = run(layers, None, parameters, graph=chain(*called))
    experts = ("layers.0.experts.1", "layers.0.experts.2")
    if loud:
        assert (found.module, found.others, found.consequences) == ("layers.0.router", experts, ("never-chosen",))
    else:
        assert (found.rule, found.module, found.others) == ("never-chosen", *experts[:1], experts[1:])


@pytest.mark.parametrize(("factor", "rule"), [(0.1, "vanishing-gradient"), (3.0, "exploding-gradient"), (0.7, "")])
def test_gradients_by_depth(factor: float, rule: str) -> None:
    """Gradients that change by more than 3.5 decades down, or 2.5 up, towards the input are a finding."""
    names = [f"layer_{letter}" for letter in "abcdefghij"]
    gradients: dict[str, Values] = {name: {"rms": 1e-2 * factor ** (9 - place)} for place, name in enumerate(names)}
    found = run(None, gradients, graph=chain(*names))
    assert [(each.rule, each.module) for each in found] == ([(rule, "layer_a")] if rule else [])


def test_a_single_module_that_stops_gradients() -> None:
    """If one module takes most of the gradient away, it is named."""
    names = [f"layer_{letter}" for letter in "abcdefgh"]
    gradients: dict[str, Values] = {
        name: {"rms": (1e-9 if place < 4 else 1e-3) * 1.1**place} for place, name in enumerate(names)
    }
    (found,) = run(None, gradients, graph=chain(*names))
    assert (found.rule, found.module) == ("vanishing-gradient", "layer_e")


@pytest.mark.parametrize(("rms", "alarm"), [(0.5, False), (1.9, False), (2.1, True)])
def test_weights_too_large(rms: float, alarm: bool) -> None:
    """A weight with 16 inputs and rms 2 scales its input eightfold, which is the limit."""
    found = run(None, None, network("a", "b", b=trained("b", rms=rms)), graph=chain("a", "b"))
    assert brief(found) == ([("warning", "weights-too-large", "b")] if alarm else [])


def test_the_scale_of_inputs() -> None:
    """The rms of the input of the first layer is estimated from its output and its weights."""
    layers: dict[str, Values] = {"a": {"rms": 50.0}, "b": {"rms": 50.0}}
    (found,) = run(layers, None, network("a", "b"), graph=chain("a", "b"))
    assert found.verdict == "the input of a has rms 50, estimated from its output and weights"  # 50 / (0.25 √16)
    assert run({"a": {"rms": 15.0}, "b": {"rms": 15.0}}, None, network("a", "b"), graph=chain("a", "b")) == []


@pytest.mark.parametrize(("gains", "alarm"), [([10.0] * 8, True), ([7.0] * 8, False), ([1.0] * 4 + [20.0] * 4, False)])
def test_a_jump_in_scale(gains: list[float], alarm: bool) -> None:
    """An output more than eight times as large as the input is a finding, unless training has made it so."""
    layers: dict[str, Values] = {"a": {"rms": 1.0}, "b": {"rms": gains}, "c": {"rms": 1.0}}
    found = [each for each in run(layers, graph=chain("a", "b", "c")) if each.rule == "scale-jump"]
    assert [each.module for each in found] == (["b"] if alarm else [])


def test_logits_may_be_large() -> None:
    """A module that nothing follows may have a large output."""
    layers: dict[str, Values] = {"a": {"rms": 1.0}, "head": {"rms": 100.0}}
    assert run(layers, graph=chain("a", "head")) == []


@pytest.mark.parametrize(
    ("kind", "values", "rule"),
    [
        ("Tanh", [0.99, -0.99, 0.99, 0.1], "saturation"),
        ("Tanh", [0.99, -0.5, 0.5, 0.1], ""),
        ("Sigmoid", [0.99, 0.01, 0.01, 0.5], "saturation"),
        ("Sigmoid", [0.6, 0.4, 0.3, 0.5], ""),
        ("Softmax", [0.95, 0.05, 0.01, 0.01], "attention-collapse"),
        ("Softmax", [0.5, 0.3, 0.1, 0.1], ""),
        ("Linear", [0.99, -0.99, 0.99, 0.1], ""),
    ],
)
def test_saturation(kind: str, values: list[float], rule: str) -> None:
    """Values at the ends of the range of an activation are counted in the histograms of the last two records."""
    counts, edges = np.histogram(values, bins=np.linspace(-1, 1, 81))
    histogram = Histogram(edges, counts, min(values), max(values), sum(values), 1.0)
    found = run({"act": {}, "fc": {}}, graph=chain("act", "fc", act=kind), histograms={("act", "out"): histogram})
    assert brief(found) == ([("warning", rule, "act")] if rule else [])


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


def test_a_sudden_change() -> None:
    """An output that changes more than eightfold against four records, and stays so, is a finding from that step on."""
    layers: dict[str, Values] = {"a": {"rms": [1.0] * 5 + [9.0] * 3}, "b": {"rms": 1.0}}
    (found,) = run(layers, graph=chain("a", "b"))
    assert (found.rule, found.module, found.first_step) == ("sudden-change", "a", 50)
    layers["a"] = {"rms": [1.0] * 5 + [9.0] + [1.0] * 2}
    assert run(layers, graph=chain("a", "b")) == []


def test_a_parameter_that_does_not_move() -> None:
    """A weight with a gradient but without updates is a finding."""
    found = run(None, None, network("a", "b", b=trained("b", ratio=0.0, update=0.0)))
    assert [(each.rule, each.module) for each in found] == [("does-not-move", "b")]
    assert "(dtype float32)" in found[0].verdict


def test_updates_lost_to_precision() -> None:
    """Updates of bfloat16 weights with more zeros than the gradients are lost to precision."""
    parts = {
        "a/weight": {"rms": 0.25, "update_ratio": 1e-3},
        "a/weight.grad": {"rms": 1e-3, "zero_fraction": 0.1},
        "a/weight.update": {"rms": 1e-4, "zero_fraction": 0.9},
    }
    assert [each.rule for each in run(None, None, parts, dtype="bfloat16")] == ["updates-lost"]
    assert run(None, None, parts, dtype="float32") == []  # an embedding of which a batch uses few rows


def test_the_drift_of_weights() -> None:
    """Weights that decay quickly are a finding; weights that shrink slowly in all directions are not."""
    shrinking = [0.25 * 0.7**row for row in range(8)]
    decay = trained("a", rms=shrinking, update=[each * 0.035 for each in shrinking])
    assert [each.rule for each in run(None, None, decay)] == ["weight-drift"]
    noise = trained("a", rms=shrinking, update=0.2)
    assert run(None, None, noise) == []


def test_weights_that_grow() -> None:
    """Weights that grow eightfold are a finding if they become large for their number of inputs."""
    large = trained("a", rms=[0.25 * 1.5**row for row in range(8)])
    small = trained("a", rms=[0.02 * 1.5**row for row in range(8)])
    assert [each.rule for each in run(None, None, large)] == ["weight-drift"]
    assert run(None, None, small) == []


@pytest.mark.parametrize("adaptive", [True, False])
def test_the_learning_rate_of_a_layer(adaptive: bool) -> None:
    """A layer whose updates are 50 times those that the optimizer gives to the others is a finding."""
    parameters = network("a", "b", "c", "d", c=trained("c", update=0.0125, ratio=0.05))
    if adaptive:
        parameters["a/weight.exp_avg_sq"] = {"rms": 1e-6}
    (found,) = run(None, None, parameters)
    assert (found.rule, found.module, found.numbers["factor"]) == ("learning-rate-outlier", "c", 50.0)


@pytest.mark.parametrize(("rate", "rules"), [(0.3, ["learning-rate-outlier"]), (1e-3, [])])
def test_the_learning_rate_of_a_scalar(rate: float, rules: list[str]) -> None:
    """A scalar whose group has a far higher rate is a finding; in the usual group, it may change as fast."""
    scale: Values = {"rms": 2.0, "update_ratio": 0.15, "learning_rate": rate}
    parameters: dict[str, Values] = {
        **{
            name: {**each, **({"learning_rate": 1e-3} if name.endswith("/weight") else {})}
            for name, each in network("a", "b", "c", "d").items()
        },
        "net/scale": scale,
        "net/scale.grad": {"rms": 1e-3},
        "net/scale.update": {"rms": 0.3},
        "a/weight.exp_avg_sq": {"rms": 1e-6},
    }
    found = run(None, None, parameters, shapes={("net", "scale"): ()})
    assert [each.rule for each in found] == rules


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


def test_the_own_parameters_of_a_container_are_no_finding_of_their_own() -> None:
    """A position embedding of the net loses its gradient at the same place as the modules inside."""
    layers: dict[str, Values] = {name: {"rms": 1.0} for name in ("net.a", "net.head", "net")}
    still = {f"{name}": {"rms": 0.25, "update_ratio": 0.0} for name in ("net.a/weight", "net/pos")}
    (found,) = run(
        layers, {"net.head": {"rms": 1e-3}}, {**still, **trained("net.head")}, graph=chain("net.a", "net.head")
    )
    assert (found.rule, found.module, found.others) == ("gradient-stops", "net.a", ("net",))


def test_a_fast_layer_is_not_compared_with_its_own_bias() -> None:
    """The weight of a layer in a fast group is a finding, although its bias is as fast."""
    parameters: dict[str, Values] = {}
    for name, rate in (("a", 1e-3), ("b", 1e-3), ("c", 0.3), ("d", 1e-3)):
        layer = trained(name, update=0.25 * rate, ratio=rate)
        layer[f"{name}/weight"] = {**layer[f"{name}/weight"], "learning_rate": rate}
        parameters |= layer
    parameters |= {
        "c/bias": {"rms": 0.25, "update_ratio": 0.3, "learning_rate": 0.3},
        "c/bias.grad": {"rms": 1e-3},
        "c/bias.update": {"rms": 0.075},
        "a/weight.exp_avg_sq": {"rms": 1e-6},
    }
    (found,) = run(None, None, parameters, shapes={("c", "bias"): (16,)})
    assert (found.rule, found.module, found.path) == ("learning-rate-outlier", "c", "weight")


@pytest.mark.parametrize(
    ("factor", "ratios", "rules"),
    [
        (100.0, (0.847, 0.2, 0.025), ["learning-rate-outlier"]),
        (100.0, (0.018, 0.018, 0.015), ["learning-rate-outlier"]),
        (10.0, (0.018, 0.018, 0.015), []),
        (10.0, (0.847, 0.2, 0.025), ["learning-rate-outlier"]),
    ],
)
def test_the_learning_rate_of_a_group(factor: float, ratios: tuple[float, ...], rules: list[str]) -> None:
    """Half of the layers in a far faster group are a finding; with ten times the rate, if the weights move fast."""
    parameters: dict[str, Values] = {"a/weight.exp_avg_sq": {"rms": 1e-6}}
    for name, rate in (("a", 1e-3), ("b", 1e-3), ("c", factor * 1e-3), ("d", factor * 1e-3)):
        layer = trained(name, update=0.25 * rate, ratio=1e-3)
        of_group: Values = {"update_ratio": [*ratios, *[ratios[-1]] * 5]} if rate > 1e-3 else {}
        layer[f"{name}/weight"] = {**layer[f"{name}/weight"], **of_group, "learning_rate": rate}
        parameters |= layer
    found = run(None, None, parameters)
    assert [each.rule for each in found] == rules
    for each in found:
        assert (each.module, each.others) == ("c", ("d",))
        assert f"up to {max(ratios):.1%}" in each.verdict
        assert f"{factor:.3g} × the median of the other layers, and its learning rate" in each.verdict
        assert f"{factor * 1e-3:.3g} instead of 0.001" in each.verdict


def test_equal_weights() -> None:
    """A weight whose values are all equal is a finding."""
    constant: dict[str, Values] = {**trained("a"), "a/weight": {"rms": 0.1, "std": 0.0, "update_ratio": 1e-3}}
    assert [each.rule for each in run(None, None, constant)] == ["constant-weight"]


def test_frozen_modules() -> None:
    """Frozen first layers are a note; a frozen layer between trained ones is a warning."""
    names = ("a", "b", "c", "d")
    layers: dict[str, Values] = {name: {} for name in names}
    for name, severity in (("a", "note"), ("c", "warning")):
        missing = {name: {"fired": False, "why": "frozen: none of its own parameters requires a gradient"}}
        found = run(
            layers,
            None,
            network(*(each for each in names if each != name)),
            graph=chain(*names),
            coverage={"parameters": {"modules": missing}},
        )
        assert brief(found) == [(severity, "frozen", name)]


def test_a_layer_that_no_optimizer_has() -> None:
    """A layer that gets gradients but takes part in no step of an optimizer is a finding."""
    missing = {"b": {"fired": False, "why": "no step: no optimizer that stepped has its parameters"}}
    coverage = {"parameters": {"modules": missing}}
    found = run({"a": {}, "b": {}}, {"b": {"rms": 1e-3}}, network("a"), coverage=coverage)
    assert brief(found) == [("warning", "not-in-optimizer", "b")]


def test_one_cause_in_many_modules_is_one_finding() -> None:
    """If the optimizer lacks ten modules, there is one finding, which lists the others."""
    names = [f"layer_{letter}" for letter in "abcdefghij"]
    missing = {name: {"fired": False, "why": "no step: no optimizer that stepped has its parameters"} for name in names}
    gradients: dict[str, Values] = {name: {"rms": 1e-3} for name in names}
    (found,) = run(None, gradients, network("head"), coverage={"parameters": {"modules": missing}})
    assert (found.rule, found.module, found.others) == ("not-in-optimizer", "layer_a", tuple(names[1:]))


def test_weights_that_hardly_move() -> None:
    """Weights that all move by less than a millionth per step are a finding."""
    found = run(None, None, network("a", "b", a=trained("a", ratio=1e-8), b=trained("b", ratio=3e-7)))
    assert [each.rule for each in found] == ["barely-moves"]


def test_low_precision() -> None:
    """Half-precision gradients below the smallest normal number are a finding."""
    values = [1e-6, 2e-6, 1e-5, 1e-4]
    histogram = Histogram(np.array([0, 1e-5, 5e-5, 1e-3]), np.array([2, 1, 1]), min(values), max(values), 1e-4, 1e-8)
    options = {"gradients": {"a": {"rms": 1e-5, "max": 1e-4, "min": 0.0}}, "histograms": {("a", "out"): histogram}}
    assert [each.rule for each in run(**options, dtype="float16")] == ["low-precision"]  # type: ignore[arg-type]  # mixed
    assert run(**options, dtype="float32") == []  # type: ignore[arg-type]  # mixed


def test_a_spike_of_the_gradients() -> None:
    """A norm of all gradients more than 20 times its median is a finding about that record alone."""
    parameters = network("a", "b", b=trained("b", grad=[1e-3] * 6 + [0.1, 1e-3]))
    (found,) = run(None, None, parameters)
    assert (found.rule, found.module, found.first_step, found.last_step) == ("gradient-spike", "b", 60, 60)


@pytest.mark.parametrize(("place", "factor", "alarm"), [(2, 10, True), (2, 5, False), (5, 10, False), (5, 30, True)])
def test_unlike_siblings(place: int, factor: float, alarm: bool) -> None:
    """A block is compared with the others: 8 × their median is too much, 24 × for the first and the last."""
    names = [f"blocks.{number}.fc" for number in range(6)]
    layers: dict[str, Values] = {name: {"rms": 0.1} for name in names}
    layers[names[place]] = {"rms": 0.1 * factor}
    found = run({**layers, "head": {"rms": 1.0}}, graph=chain(*names, "head"))
    assert [each.module for each in found if each.rule == "unlike-siblings"] == [names[place]] * alarm


def test_a_trend_over_blocks() -> None:
    """A statistic that doubles from each of six blocks to the next is a finding about the blocks."""
    names = [f"blocks.{number}.fc" for number in range(6)]
    (found,) = run({name: {"rms": 0.1 * 2.0**place} for place, name in enumerate(names)}, graph=chain(*names))
    assert (found.rule, found.module) == ("block-trend", "blocks.5")
    assert found.others == tuple(f"blocks.{number}" for number in range(5))


@pytest.mark.parametrize(
    ("growth", "found"),
    [
        ([1, 40], [("blocks.2", "grows 40-fold")]),
        ([1 / 40, 1, 1], [("blocks.1", "shrinks 40-fold")]),
        ([1, 1, 10], []),
        ([10, 40, 10], []),
        ([40], []),
        ([1, 40, 1 / 40, 1], []),
    ],
)
def test_a_gradient_that_changes_in_one_block(growth: list[float], found: list[tuple[str, str]]) -> None:
    """A gradient that grows or shrinks on its way back through one of several blocks is a finding about that block."""
    rms = [1e-3 * math.prod(growth[place:]) for place in range(len(growth) + 1)]
    gradients: dict[str, Values] = {
        f"blocks.{place}.{name}": {"rms": each} for place, each in enumerate(rms) for name in ("norm", "fc")
    }
    layers: dict[str, Values] = {name: {"rms": 1.0} for name in gradients}
    rules = run(layers, gradients, graph=chain(*gradients, norm="LayerNorm"))
    steps = [each for each in rules if each.rule == "gradient-step"]
    assert [each.module for each in steps] == [module for module, _ in found]
    for each, (module, words) in zip(steps, found, strict=True):
        assert each is rules[0]
        assert words in each.verdict
        assert each.verdict.endswith(f"at blocks.{int(module[-1]) - 1}.fc")


@pytest.mark.parametrize(("kind", "ratio", "alarm"), [("BatchNorm1d", 1.5, 1), ("Linear", 1.5, 0), ("Linear", 2.5, 1)])
def test_training_differs_from_validation(kind: str, ratio: float, alarm: int) -> None:
    """The first module whose output differs between training and validation is named."""
    layers: dict[str, Values] = {"a": {"rms": 1.0}, "norm": {"rms": 1.0}, "b": {"rms": 1.0}}
    other: dict[str, Values] = {"a": {"rms": 1.0}, "norm": {"rms": ratio}, "b": {"rms": ratio}}
    found = run(layers, validation=other, graph=chain("a", "norm", "b", norm=kind))
    assert brief(found) == [("warning", "train-differs", "norm")] * alarm


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (0.2, ["learning-rate-too-large"]),
        (0.1, []),
        ([0.6] + [1e-3] * 7, ["learning-rate-too-large"]),
        ([0.4] + [1e-3] * 7, []),
        ([math.inf] + [1e-3] * 7, []),  # a weight that begins at zero
    ],
)
def test_learning_rate_too_large(ratio: float | list[float], expected: list[str]) -> None:
    """A median update of over 15 %, or a first one of over 50 %, names the learning rate if it is known."""
    weights = network(*"abc", **{name: trained(name, ratio=ratio) for name in "abc"})
    assert brief(run(parameters=weights)) == []  # an older record file
    known = {
        key: {**value, "learning_rate": 0.5} if key.endswith("weight") else value for key, value in weights.items()
    }
    found = run(parameters=known)
    assert [each.rule for each in found] == expected
    assert all("learning rate 0.5" in each.verdict for each in found)


def test_a_learning_rate_of_zero_is_in_the_verdict() -> None:
    """A parameter that does not move is reported with the learning rate of its group."""
    weights = network("a", a=trained("a", ratio=0.0, update=0.0))
    weights["a/weight"] = {**weights["a/weight"], "learning_rate": 0.0}
    (found,) = run(parameters=weights)
    assert (found.rule, "(learning rate 0, dtype float32)" in found.verdict) == ("does-not-move", True)


@pytest.mark.parametrize(
    ("modes", "kind", "expected"),
    [
        ([NAN] * 2 + [1.0] * 6, "BatchNorm1d", [("warning", "eval-mode", "bn")]),
        ([NAN] * 2 + [1.0] * 6, "Linear", []),
        ([1.0] * 7 + [NAN], "BatchNorm1d", []),
        ([NAN] * 8, "BatchNorm1d", []),
    ],
)
def test_eval_mode(modes: list[float], kind: str, expected: list[tuple[str, str, str]]) -> None:
    """A BatchNorm in eval mode after a trained layer is a finding, from the first step on at which it was."""
    layers: dict[str, Values] = {"fc": {}, "bn": {"eval_mode": modes}}
    found = run(layers, parameters=trained("fc"), graph=chain("fc", "bn", bn=kind))
    assert brief(found) == expected
    assert [each.first_step for each in found] == [20] * len(expected)


def test_a_frozen_backbone_may_be_in_eval_mode() -> None:
    """A BatchNorm in eval mode is no finding if neither it nor the layer before it is trained."""
    layers: dict[str, Values] = {"fc": {}, "bn": {"eval_mode": 1.0}, "head": {}}
    assert brief(run(layers, parameters=trained("head"), graph=chain("fc", "bn", "head", bn="BatchNorm1d"))) == []


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


@pytest.mark.parametrize(("decay", "rules"), [(0.1, ["decayed-norm"]), (0.0, []), (1e-4, [])])
def test_decayed_norm(decay: float, rules: list[str]) -> None:
    """A norm whose weight shrinks is a note if weight decay explains a part of it."""
    norm: dict[str, Values] = {
        "norm/weight": {
            "mean": list(np.linspace(1.0, 0.6, 8)),
            "learning_rate": 0.1,
            "weight_decay": decay,
            "update_ratio": 1e-3,
        },
        "norm/weight.grad": {"rms": 1e-3},
    }
    shapes = {("norm", "weight"): (16,), ("norm", "weight.grad"): (16,)}
    found = run(parameters=norm, graph=chain("norm", norm="LayerNorm"), shapes=shapes)
    assert [each.rule for each in found] == rules
    assert all(each.is_note for each in found)


@pytest.mark.parametrize(("limit", "rules"), [(1e-4, ["always-clipped"]), (1e-2, [])])
def test_always_clipped(limit: float, rules: list[str]) -> None:
    """Clipping that shrinks each gradient more than 50-fold is a note; the norm here is 1e-3 * sqrt(256)."""
    about = {"gradient_clip_val": limit, "gradient_clip_algorithm": "norm"}
    found = run(parameters=trained("fc"), about=about)
    assert [each.rule for each in found] == rules
    assert [round(each.numbers["factor"]) for each in found] == [160] * len(rules)


def test_inputs_are_not_compared_with_outputs() -> None:
    """An input that is all zeros, huge or a mask of minus infinity is no finding, and its outputs are judged alone."""
    fine: dict[str, dict[str, float]] = {"a": {}, "b": {}, "c": {}}
    odd = {"b": {"zero_fraction": 1.0, "rms": 0.0}, "c": {"inf_count": 7.0, "rms": 1e4}}
    assert run(fine, inputs=odd, graph=chain("a", "b", "c")) == run(fine, graph=chain("a", "b", "c"))


def test_nan_in_an_input_is_named() -> None:
    """NaN in a recorded input is reported as that of the input, and outputs alone as that of the output."""
    bad = {"nan_count": [0, 0, 0, 0, 2, 2, 2, 2]}
    (found,) = run({"a": bad, "b": bad}, inputs={"a": bad, "b": bad}, graph=chain("a", "b"))
    assert (found.module, found.path, found.first_step) == ("a", "in[0]", 40)
    assert found.verdict.startswith("the input in[0] of a has 2 NaN at step 40")
    (found,) = run({"a": bad, "b": bad}, inputs={"a": {}, "b": bad}, graph=chain("a", "b"))
    assert found.verdict == "the output of a has 2 values that are not finite at step 40; its inputs (in[0]) are finite"
    (found,) = run(inputs={"a": {}, "b": bad})
    assert (found.module, found.path) == ("b", "in[0]")


def test_a_recorded_input_that_is_too_large_is_measured() -> None:
    """The scale of the data is that of the recorded input instead of an estimate."""
    findings = run({"a": {}}, inputs={"a": {"rms": 300.0}}, graph=chain("a"))
    (found,) = [each for each in findings if each.rule == "input-scale"]
    assert found.verdict == "the input in[0] of a has rms 300"
    assert found.path == "in[0]"


def test_the_first_site_with_nan_is_that_of_its_own_record() -> None:
    """If modules run in another order in the record with NaN, the first one in that record is named."""
    examination = Examination()
    for step, names in ((0, ("a", "b")), (10, ("b", "a"))):
        nan = {"nan_count": float(step > 0)}
        examination.add(record("activations", step, {(name, "out"): nan for name in names}))
    assert examination.findings()[0].module == "b"
