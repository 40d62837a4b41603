"""Tests of the rules of settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_recorder.graph import GraphCapture, Unused, capture_graph
from lightning_recorder.insight import RunFacts
from tests.insight.records import Examination, Values, brief, chain, network, record, run, trained

NAN = float("nan")


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
    """A median update of over 15 %, or a first one of over 50 %, is named, with the learning rate if it is known."""
    weights = network(*"abc", **{name: trained(name, ratio=ratio) for name in "abc"})
    unknown = run(parameters=weights)  # a loop whose optimizer is none of torch
    assert [each.rule for each in unknown] == expected
    assert not any("learning rate" in each.verdict + each.why for each in unknown)
    known = {
        key: {**value, "learning_rate": 0.5} if key.endswith("weight") else value for key, value in weights.items()
    }
    found = run(parameters=known)
    assert [each.rule for each in found] == expected
    assert all("learning rate 0.5" in each.verdict for each in found)


@pytest.mark.parametrize(("later", "expected"), [(1e-3, []), (0.2, ["learning-rate-too-large"])])
def test_the_first_step_of_tiny_weights_is_large(later: float, expected: list[str]) -> None:
    """Weights that begin with a thousandth, as of an EGNN, grow many times with the first step."""
    ratios = [2.0, *[later] * 7]
    found = run(parameters=network(*"abc", **{name: trained(name, ratio=ratios, rms=1e-3) for name in "abc"}))
    assert [each.rule for each in found] == expected


@pytest.mark.parametrize(
    ("update", "rate", "gradient", "rules"),
    [
        (0.0, 0.1, None, ["nothing-moves"]),
        (0.0, NAN, None, ["nothing-moves"]),  # an older record file
        (0.0, 0.0, None, []),
        ([0.0] * 7 + [1e-9], 0.1, None, []),
        (0.0, 0.1, 1.0, ["does-not-move"]),
    ],
)
def test_nothing_moves(update: float | list[float], rate: float, gradient: float | None, rules: list[str]) -> None:
    """A loss that depends on no parameter is named, but not a learning rate of zero."""
    weights: dict[str, Values] = {
        "a/weight": {"rms": 0.5, "update_ratio": update, "learning_rate": rate},
        "a/weight.update": {"rms": update},
        **({} if gradient is None else {"a/weight.grad": {"rms": gradient}}),
    }
    found = run(parameters=weights)
    assert [each.rule for each in found] == rules
    assert all(each.module == "" for each in found if each.rule == "nothing-moves")


@pytest.mark.parametrize(("gradient", "cause"), [(0.1, "Gradients reach the outputs"), (0.0, "The loss does not")])
def test_nothing_moves_although_gradients_arrive(gradient: float, cause: str) -> None:
    """If the outputs of modules have gradients, the loss is not said to be independent of the parameters."""
    weights: dict[str, Values] = {
        "a/weight": {"rms": 0.5, "update_ratio": 0.0, "learning_rate": 0.1},
        "a/weight.update": {"rms": 0.0},
    }
    found = run(gradients={"a": {"rms": gradient}}, parameters=weights)
    assert [each.rule for each in found if each.why.startswith(cause)] == ["nothing-moves"]


@pytest.mark.parametrize(
    ("inner", "outer", "rules"),
    [
        (0.0, 0.1, ["nothing-moves"]),
        (0.0, 0.0, ["gradient-stops"]),
        ([0.0] * 7 + [0.1], 0.1, []),
    ],
)
def test_gradients_that_are_cleared_before_the_step(inner: float | list[float], outer: float, rules: list[str]) -> None:
    """Gradients of zero of all parameters are cleared ones if those of the outputs of their modules are not zero."""
    weights = network("a", "b", **{name: trained(name, grad=inner, update=1e-6) for name in "ab"})
    sizes: dict[str, Values] = {"a": {"rms": outer}, "b": {"rms": outer}}
    found = run({"a": {}, "b": {}}, sizes, weights, graph=chain("a", "b"))
    assert [each.rule for each in found] == rules
    assert all("zero_grad()" in each.next for each in found if each.rule == "nothing-moves")


def test_gradients_that_end_behind_the_last_parameter() -> None:
    """If the outputs of the modules with parameters have gradients of zero, nothing has cleared those of parameters."""
    weights = network("a", "b", **{name: trained(name, grad=0.0, update=1e-6) for name in "ab"})
    sizes: dict[str, Values] = {"a": {"rms": 0.0}, "b": {"rms": 0.0}, "act": {"rms": 1e-2}}
    found = run({"a": {}, "b": {}, "act": {}}, sizes, weights, graph=chain("a", "b", "act", act="Softmax"))
    assert found
    assert "nothing-moves" not in {each.rule for each in found}


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


@pytest.mark.parametrize(
    ("decay", "rate", "optimizer", "alarm"),
    [
        (10.0, 1e-2, "AdamW", True),
        (1.1, 1e-2, "AdamW", True),
        (0.9, 1e-2, "AdamW", False),
        (0.2, 0.1, "SGD", True),
        (5e-4, 0.1, "SGD", False),
        (10.0, 1e-2, "Adam", False),
    ],
)
def test_weight_decay_too_strong(decay: float, rate: float, optimizer: str, alarm: bool) -> None:
    """A decay of more than one percent of a weight per step is a finding, unless the optimizer normalizes it."""
    parameters = trained("fc")
    parameters["fc/weight"] = {**parameters["fc/weight"], "learning_rate": rate, "weight_decay": decay}
    found = run(parameters=parameters, about={"groups": [{"optimizer": optimizer, "lr": rate}]})
    assert brief(found) == [("warning", "weight-decay-too-strong", "fc")] * alarm
    if alarm:
        share = (
            f"weight decay {decay:.3g} removes {decay * rate:.1%} of fc.weight in every step (learning rate {rate:.3g})"
        )
        assert found[0].verdict == share


@pytest.mark.parametrize(
    ("limit", "optimizer", "severity"), [(1e-5, "SGD", "warning"), (1e-5, "AdamW", "note"), (1e-4, "SGD", "note")]
)
def test_clipping_far_below_the_norm_is_a_warning_for_sgd(limit: float, optimizer: str, severity: str) -> None:
    """Clipping that shrinks each gradient more than 1,000-fold is a warning if SGD alone uses the gradients."""
    about = {"gradient_clip_val": limit, "gradient_clip_algorithm": "norm", "groups": [{"optimizer": optimizer}]}
    (found,) = run(parameters=trained("fc"), about=about)
    assert (found.rule, found.severity) == ("always-clipped", severity)


@pytest.mark.parametrize(("limit", "rules"), [(1e-4, ["always-clipped"]), (1e-2, [])])
def test_always_clipped(limit: float, rules: list[str]) -> None:
    """Clipping that shrinks each gradient more than 50-fold is a note; the norm here is 1e-3 * sqrt(256)."""
    about = {"gradient_clip_val": limit, "gradient_clip_algorithm": "norm"}
    found = run(parameters=trained("fc"), about=about)
    assert [each.rule for each in found] == rules
    assert [round(each.numbers["factor"]) for each in found] == [160] * len(rules)


class Scaled(nn.Module):
    """A layer with a matrix that is made of a parameter."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        super().__init__()
        self.matrix, self.head = make(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(x @ self.matrix)
        return output


@pytest.mark.parametrize(
    ("make", "is_wrong"),
    [
        (lambda: nn.Parameter(torch.randn(4, 3)) * 0.1, 1),
        (lambda: nn.Parameter(torch.randn(4, 3, dtype=torch.float64)).float(), 1),
        (lambda: nn.Parameter(torch.randn(4, 3) * 0.1), 0),
        (lambda: torch.randn(4, 3), 0),
        (lambda: torch.randn(4, 3, requires_grad=True), 0),  # an optimizer may have it
    ],
)
def test_a_tensor_that_is_made_of_a_parameter(make: Callable[[], Tensor], is_wrong: int) -> None:
    """A parameter that is multiplied or cast is no parameter, so that it is not trained."""
    net = Scaled(make)
    x = torch.randn(5, 4)
    with GraphCapture(net, x) as capture:
        net(x).sum().backward()
        torch.optim.SGD(net.parameters(), 0.1).step()
    found = [each for each in run({"head": {"rms": 1.0}}, graph=capture.graph()) if each.rule == "not-registered"]
    assert brief(found) == [("warning", "not-registered", "")] * is_wrong
    assert all("uses a tensor [4, 3] that was made of a parameter" in each.verdict for each in found)


@pytest.mark.parametrize(
    ("names", "named"),
    [
        (["layers[0].weight", "layers[0].bias", "layers[1].weight"], "layers[0,1] ×2:"),
        ([f"{each}.weight" for each in ("a", "b", "c", "d")], "a, b, c and 1 more:"),
        ([], ""),
    ],
)
def test_not_registered(names: list[str], named: str) -> None:
    """Modules that the model does not register, although gradients reach their parameters, are one finding."""
    graph = replace(chain("fc"), unused=Unused(unregistered=tuple(names)))
    found = run({"fc": {"rms": 1.0}}, graph=graph)
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    assert brief(found) == [("warning", "not-registered", each) for each in modules[:1]]
    assert all(f"does not register {named}" in each.verdict for each in found)
    assert [name for each in found for name in each.others] == modules[1:]


@pytest.mark.parametrize(
    ("share", "training", "alarm"),
    [
        ("0.999", "True", 1),
        ("0.8", "True", 1),
        ("0.5", "True", 0),
        ("0.9", "False", 0),
        ("1.0", "True", 0),
        ("0.9", "", 1),
    ],  # torch's default is not recorded
)
@pytest.mark.parametrize("op", ["dropout", "alpha_dropout", "dropout2d"])
def test_strong_dropout(op: str, share: str, training: str, alarm: int) -> None:
    """A call of dropout in train mode that keeps a fifth of its inputs or less is a finding about its module."""
    graph = chain("fc1", "drop", "fc2", drop="Dropout")
    alarm = alarm if training or op != "alpha_dropout" else 0  # which is off by default
    arguments = (("p", share), *([("training", training)] if training else []))
    nodes = [replace(each, name=op, arguments=arguments) if each.id == 5 else each for each in graph.nodes]
    layers: dict[str, Values] = {name: {"rms": 1.0} for name in ("fc1", "drop", "fc2")}
    found = run(layers, graph=replace(graph, nodes=tuple(nodes)))
    assert brief(found) == [("warning", "strong-dropout", "drop")] * alarm
    if alarm:  # that nearly all outputs are zero is a consequence
        layers["drop"] = {"rms": 0.1, "zero_fraction": 1.0}
        (dead,) = run(layers, graph=replace(graph, nodes=tuple(nodes)))
        assert (dead.rule, dead.consequences) == ("strong-dropout", ("dead-output",))
        assert f"drops {100 * float(share):g}% of its inputs" in dead.verdict


@pytest.mark.parametrize(("smoothing", "alarm"), [("1.0", 1), ("0.6", 1), ("0.2", 0)])
def test_label_smoothing(smoothing: str, alarm: int) -> None:
    """A smoothing that makes the targets of all samples nearly the same is a finding."""
    graph = chain("fc")
    arguments = (("label_smoothing", smoothing),)
    nodes = [replace(each, name="cross_entropy", arguments=arguments) if each.id == 3 else each for each in graph.nodes]
    found = run({"fc": {}}, graph=replace(graph, nodes=tuple(nodes)))
    assert brief(found) == [("warning", "label-smoothing", "fc")] * alarm


@pytest.mark.parametrize(
    ("rates", "planned", "given", "alarm"),
    [
        ([1e-6 * (row + 1) for row in range(8)], 71, 1e-3, 1),
        ([1e-6 * (row + 1) for row in range(8)], 200, 1e-3, 0),  # the run has just begun
        ([1e-6 * (row + 1) for row in range(8)], None, 1e-3, 0),  # a run without a limit
        ([2e-5 * (row + 1) for row in range(8)], 71, 1e-3, 0),
        ([1e-6, 2e-6, 3e-6, 4e-6, 4e-6, 3e-6, 2e-6, 1e-6], 71, 1e-3, 0),  # another schedule
        ([1e-6] * 4 + [8e-6] * 4, 71, 1e-3, 1),  # one step in each epoch
        ([48**-0.5 * (10 * row + 1) * 400**-1.5 for row in range(8)], 71, 1.0, 0),  # a formula and its factor
    ],
)
def test_a_warm_up_that_is_longer_than_the_run(
    rates: list[float], planned: int | None, given: float, alarm: int
) -> None:
    """A learning rate that rises until the end of the run and is a tenth of the given one by then is a finding."""
    parameters = {"fc/weight": {**trained("fc")["fc/weight"], "learning_rate": rates}}
    about = {"groups": [{"initial_lr": given}], "planned_steps": planned}
    found = run({"fc": {"rms": 1.0}}, None, {**trained("fc"), **parameters}, about=about)
    assert brief(found) == [("warning", "warmup-too-long", "")] * alarm
    assert all("to 8e-06 at step 70 of 71: that is 0.008 × the 0.001 that" in each.verdict for each in found)


@pytest.mark.parametrize(
    ("rates", "about", "words"),
    [
        ([1e-6 * 0.9**row for row in range(8)], {"planned_steps": 71}, "the learning rate is at most 1e-06 in all 8 "),
        ([1e-6] * 8, {"planned_steps": 71}, "the learning rate is 1e-06 in all 8 records: that is 0.001 × the 0.001"),
        ([1e-6] * 8, {"planned_steps": 200}, ""),
        ([1e-6] * 8, {"epoch": 3}, "the learning rate is 1e-06 in all 8 records"),  # manual optimization
        ([1e-6] * 8, {"epoch": 1}, ""),
        ([1e-4] * 8, {"planned_steps": 71}, ""),
    ],
)
def test_a_learning_rate_far_below_the_given_one(rates: list[float], about: dict[str, int], words: str) -> None:
    """A rate that a schedule keeps far below the one of the optimizer is a finding, if the run ends like this."""
    parameters = {"fc/weight": {**trained("fc")["fc/weight"], "learning_rate": rates}}
    known = {"groups": [{"initial_lr": 1e-3}], **about}
    found = run({"fc": {"rms": 1.0}}, None, {**trained("fc"), **parameters}, about=known)
    assert brief(found) == [("warning", "warmup-too-long", "")] * bool(words)
    assert all(words in each.verdict for each in found)


@pytest.mark.parametrize(("first", "is_wrong"), [(0, True), (20, False)])
def test_a_learning_rate_of_a_resumed_training(first: int, is_wrong: bool) -> None:
    """Records that begin in the second half of a training do not show the begin of its schedule."""
    examination, about = Examination(), {"groups": [{"initial_lr": 1e-3}], "planned_steps": 28}
    for step in range(first, 28):
        examination.add(record("activations", step, {("fc", "out"): {"rms": 1.0}}))
        sites = {("fc", "weight"): {"rms": 0.25, "learning_rate": 1e-6}, ("fc", "weight.grad"): {"rms": 1e-3}}
        examination.add(record("parameters", step, sites, about=about))
    assert [each.rule for each in examination.findings()].count("warmup-too-long") == is_wrong


def test_weights_of_zero_are_no_gradients_that_were_cleared() -> None:
    """If all weights are zero, they stop the gradients of each other, and the loop is not blamed."""
    for value, rule in ((0.0, "constant-weight"), (1.0, "nothing-moves")):
        parameters = network(*"ab", **{name: trained(name, grad=0.0, rms=value, std=value) for name in "ab"})
        found = {each.rule for each in run(None, {"a": {"rms": 1.0}}, parameters)}
        assert rule in found
        assert not {"constant-weight", "nothing-moves"} - {rule} & found


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (
            ("OneCycleLR", "epoch", 300, 10, 300),
            "steps it 10 times, once in each epoch: the learning rate comes to 3.3% ",
        ),
        (("OneCycleLR", "epoch", 10, 10, 300), ""),
        (("CosineAnnealingLR", "epoch", 200, 10, 300), ""),  # longer than the fit, but no number of steps
        (
            ("CosineAnnealingLR", "step", 10, 300, 10),
            "steps it 300 times, once in each step: the learning rate falls and ",
        ),
        (("CosineAnnealingLR", "step", 300, 300, 10), ""),
        (("LinearLR", "step", 10, 300, 10), ""),  # a warm-up
    ],
)
def test_a_schedule_of_the_wrong_unit(schedule: tuple[str, str, int, int, int], words: str) -> None:
    """A schedule as long as the fit has steps that is stepped in each epoch is a finding, and so is the reverse."""
    about = dict(zip(("class", "interval", "length", "times", "unit"), schedule, strict=True))
    found = run({"fc": {"rms": 1.0}}, None, trained("fc"), about={"schedules": [about]})
    assert brief(found) == [("warning", "schedule-length", "")] * bool(words)
    assert all(words in each.verdict for each in found)


@pytest.mark.parametrize(
    ("rates", "text"),
    [
        ([1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-10], "from 0.001 to 1e-10: from step 30 on"),
        ([1e-3, 1e-4, 1e-5, 2e-6, 1e-7, 1e-8, 1e-9, 1e-10], "from 0.001 to 1e-10: from step 40 on"),
        # after three steps of a factor of a tenth
        ([0.1, 0.1, *[0.1 * 0.1 * 0.1 * 0.1] * 6], "from 0.1 to 0.0001: from step 20 on"),
        ([0.1, 0.1, *[1.1e-4] * 6], ""),
        ([1e-3 * (8 - step) / 8 for step in range(8)], ""),
        ([0.0, 0.0, 0.0, 1e-6, 1e-4, 1e-3, 1e-3, 1e-3], ""),
        ([1e-3] * 5 + [1e-4, 1e-6, 1e-7], ""),
        ([1e-3, NAN, NAN, 1e-3, NAN, NAN, 1e-3, NAN], ""),  # batches without an optimizer step
    ],
)
def test_a_learning_rate_that_vanishes(rates: list[float], text: str) -> None:
    """A learning rate that is tiny for a large part of the run is a finding; a warm-up or the end of a decay is not."""
    parameters = {"fc/weight": {**trained("fc")["fc/weight"], "learning_rate": rates}}
    found = run({"fc": {"rms": 1.0}}, None, {**trained("fc"), **parameters})
    assert brief(found) == [("warning", "learning-rate-vanishes", "")] * bool(text)
    assert all(text in each.verdict for each in found)


@pytest.mark.parametrize(
    ("name", "zeros", "types", "expected"),
    [
        ("net.dropout", 0.5, {}, [("warning", "dropout-in-evaluation", "net.dropout")]),
        ("net.dropout#2", 0.5, {}, [("warning", "dropout-in-evaluation", "net.dropout#2")]),
        ("net.dropout", 0.0, {}, []),  # it dropped nothing
        ("net.dropout", 0.5, {"net.dropout": "Dropout"}, []),  # a module after a ReLU
        ("net.relu", 0.5, {}, []),
    ],
)
def test_a_dropout_function_in_validation(
    name: str, zeros: float, types: dict[str, str], expected: list[tuple[str, str, str]]
) -> None:
    """A dropout function with zeros in validation is named; modules and other functions are not."""
    examination = Examination()
    examination.facts = RunFacts(types=types)
    for step in range(3):
        examination.add(record("activations", step, {("fc", "out"): {}}))
        examination.add(record("activations", step, {(name, "out"): {"zero_fraction": zeros}}, stage="validate"))
    assert brief(examination.findings()) == expected


@pytest.mark.parametrize(("zeros", "is_wrong"), [(0.3, True), (0.0, False)])
def test_a_dropout_module_in_validation(zeros: float, is_wrong: bool) -> None:
    """An nn.Dropout that returns more zeros than it gets in a validation is in train mode there."""
    validation: dict[str, Values] = {"relu": {"zero_fraction": 0.5}, "drop": {"zero_fraction": 0.5 + zeros / 2}}
    graph = chain("relu", "drop", "fc", relu="ReLU", drop="Dropout")
    layers: dict[str, Values] = {"relu": {}, "drop": {}, "fc": {}}
    found = run(layers, None, network("fc"), validation=validation, graph=graph)
    assert brief(found) == [("warning", "dropout-in-evaluation", "drop")] * is_wrong


@pytest.mark.parametrize(("names", "is_wrong"), [(("fc",), False), (("fc", "head"), True)])
def test_a_large_first_step_of_a_linear_model(names: tuple[str, ...], is_wrong: bool) -> None:
    """A model of a single layer may begin with a large step, as on targets far from zero; a deeper one may not."""
    fast: Values = {"rms": 0.25, "update_ratio": [0.8, *[0.01] * 7], "learning_rate": 0.1}
    parameters = {key: each for name in names for key, each in {**trained(name), f"{name}/weight": fast}.items()}
    layers: dict[str, Values] = {name: {} for name in names}
    found = [each.rule for each in run(layers, None, parameters, graph=chain(*names))]
    assert found == ["learning-rate-too-large"] * is_wrong


class Distilled(nn.Module):
    """A step of a student whose targets a teacher makes."""

    def __init__(self, *, drops: bool, is_copy: bool, is_frozen: bool) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.2))
        size = 3 if is_copy else 8
        layers = [nn.Linear(4, size), nn.Dropout(0.5)] + ([] if is_copy else [nn.Linear(size, 3)])
        self.teacher = nn.Sequential(*layers).train(drops).requires_grad_(not is_frozen)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x).softmax(1)
        return F.kl_div(self.student(x).log_softmax(1), target, reduction="batchmean")


@pytest.mark.parametrize(
    ("drops", "is_copy", "is_frozen", "is_wrong"),
    [(True, False, True, True), (False, False, True, False), (True, True, True, False), (True, False, False, False)],
)
def test_a_teacher_in_training_mode(drops: bool, is_copy: bool, is_frozen: bool, is_wrong: bool) -> None:
    """The dropout of a frozen teacher is a finding, unless the teacher may be a moving average of the student."""
    model, x = Distilled(drops=drops, is_copy=is_copy, is_frozen=is_frozen), torch.randn(5, 4)
    found = [each for each in Examination(capture_graph(model, x)).findings() if each.rule == "teacher-drops"]
    assert brief(found) == [("warning", "teacher-drops", "teacher.1")] * is_wrong
