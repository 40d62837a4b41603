"""Tests of the rules of parameters and their updates."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_recorder.graph import capture_graph
from lightning_recorder.graph.model import OTHER_PARAMETERS, Graph, Node, TensorMeta
from lightning_recorder.insight import Finding
from lightning_recorder.statistics import OptimizerRecorder
from tests.effort import lines_run
from tests.insight.records import Examination, Values, brief, chain, network, run, trained
from tests.insight.rules.test_operations import Step


def test_the_drift_of_weights() -> None:
    """Weights that decay quickly are a finding; weights that shrink slowly in all directions are not."""
    shrinking = [0.25 * 0.7**row for row in range(8)]
    decay = trained("a", rms=shrinking, update=[each * 0.035 for each in shrinking])
    assert [each.rule for each in run(None, None, decay)] == ["weight-drift"]
    decay["a/weight"] = {**decay["a/weight"], "weight_decay": 0.0}
    assert brief(run(None, None, decay | trained("b"), graph=chain("a", "b"))) == [("warning", "weight-drift", "a")]
    assert run(None, None, decay | trained("b"), graph=chain("b", "a")) == []  # targets that do not need the input
    decay["a/weight"] = {**decay["a/weight"], "weight_decay": 30.0}
    (found,) = run(None, None, decay)
    assert found.verdict.endswith(" in 70 steps, with weight decay 30")
    assert "learning rate" not in found.why + found.next
    noise = trained("a", rms=shrinking, update=0.2)
    assert run(None, None, noise) == []


def test_weights_that_grow() -> None:
    """Weights that grow eightfold are a finding if they become large for their number of inputs."""
    large = trained("a", rms=[0.25 * 1.5**row for row in range(8)])
    small = trained("a", rms=[0.02 * 1.5**row for row in range(8)])
    (found,) = run(None, None, large)
    assert (found.rule, "decay" in found.why + found.next) == ("weight-drift", False)
    assert run(None, None, small) == []


def tied(kind: str, mean: float = 0.1, head: str = "Linear", most: float = 1.0, **gradient: float) -> list[Finding]:
    """Return the findings of an embedding and of a last layer, which begin with nearly the same values."""
    ends = {"min": -1.0, "max": most}
    parameters: dict[str, Values] = {
        "a/weight": {"rms": [0.5, 0.6], "mean": 0.1, **ends},
        "b/weight": {"rms": [0.5, 0.7], "mean": mean, **ends},
        "a/weight.grad": {"rms": 1e-3},
        "b/weight.grad": {"rms": 1e-3, **gradient},
    }
    return run(None, None, parameters, graph=chain("a", "b", a=kind, b=head), records=2)


def test_weights_that_are_no_longer_tied() -> None:
    """A last layer that begins with the values of the embedding, and gets its own updates, is a finding."""
    (found,) = tied("Embedding")
    assert (brief([found]), found.others) == ([("warning", "no-longer-tied", "b")], ("a",))
    assert found.verdict == "b.weight begins with the values of a.weight, and is another tensor"
    for fine in (
        tied("Embedding", mean=0.11),
        tied("Linear"),
        tied("Embedding", head="Embedding"),
        tied("Embedding", most=-1.0),
    ):
        assert fine == []
    assert "no-longer-tied" not in [each.rule for each in tied("Embedding", rms=0.0)]  # it is meant to stay


@pytest.mark.parametrize(
    ("order", "grad", "alarm"),
    [
        (("body", "a"), [0.1, 0.1, *[0.02] * 6], 0),
        (("body", "a"), [0.1, 0.1, *[0.08] * 6], 1),
        (("a", "b"), [0.1, 0.1, *[0.02] * 6], 1),
    ],
)
def test_a_last_layer_that_grows(order: tuple[str, str], grad: list[float], alarm: int) -> None:
    """A new head may grow if its gradient shrinks, as the loss falls; other layers, and one whose does not, may not."""
    large = trained("a", rms=[0.25 * 1.5**row for row in range(8)], grad=grad)
    found = run(None, None, large | trained("b"), graph=chain(*order))
    assert brief(found) == [("warning", "weight-drift", "a")] * alarm


def test_a_weight_that_jumps() -> None:
    """A weight that changes between two records only is not said to grow."""
    (found,) = run(None, None, trained("a", rms=[0.25] * 5 + [10.0] * 3))
    assert (found.rule, found.first_step) == ("weight-drift", 50)
    assert found.verdict == "a.weight jumps from rms 0.25 to 10 between steps 40 and 50"


@pytest.mark.parametrize("adaptive", [True, False])
def test_the_learning_rate_of_a_layer(adaptive: bool) -> None:
    """A layer whose updates are 50 times those that the optimizer gives to the others is a finding.

    The ratio of its first update is infinite if it begins at zero.
    """
    ratios = [math.inf] + [0.05] * 7
    parameters = network("a", "b", "c", "d", c=trained("c", update=0.0125, ratio=ratios))
    if adaptive:
        parameters["a/weight.exp_avg_sq"] = {"rms": 1e-6}
    (found,) = run(None, None, parameters)
    assert (found.rule, found.module, found.numbers["factor"]) == ("learning-rate-outlier", "c", 50.0)
    assert found.verdict.startswith("a step changes c.weight by up to 5.0% of its size: ")


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


def test_a_few_slow_layers_do_not_make_the_others_fast() -> None:
    """Usual layers are not compared with one whose rate is far lower, as the first ones have in a fine-tuning."""
    parameters: dict[str, Values] = {"a/weight.exp_avg_sq": {"rms": 1e-6}}
    for name, rate in (("a", 1e-5), ("b", 1e-3), ("c", 1e-3), ("d", 1e-3)):
        layer = trained(name, update=0.25 * rate, ratio=20 * rate)
        layer[f"{name}/weight"] = {**layer[f"{name}/weight"], "learning_rate": rate}
        parameters |= layer
    assert [each.rule for each in run(None, None, parameters)] == []


def test_the_effort_grows_with_the_number_of_layers() -> None:
    """Four times as many layers take four times as long: the others are not compared with each one anew."""
    efforts = []
    for layers in (50, 200):
        names = [f"layer{number}" for number in range(layers)]
        parameters = {**network(*names, layer7=trained("layer7", update=0.0125, ratio=0.05))}
        rates = {f"{name}/weight": {**parameters[f"{name}/weight"], "learning_rate": 1e-3} for name in names}
        efforts.append(lines_run(partial(run, None, None, parameters | rates)))
        assert [each.module for each in run(None, None, parameters | rates)] == ["layer7"]
    assert efforts[1] < 4.5 * efforts[0]


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


@pytest.mark.parametrize("frozen", ["head", "body"])
def test_a_frozen_head(frozen: str) -> None:
    """The note says if the loss gets its prediction from a frozen layer behind trained ones."""

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
            getattr(self, frozen).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.head(self.body(x)), torch.arange(5) % 3)

    missing = {frozen: {"fired": False, "why": "frozen: none of its own parameters requires a gradient"}}
    other = "body" if frozen == "head" else "head"
    layers: dict[str, Values] = {"body": {}, "head": {}}
    graph = capture_graph(Step(), torch.randn(5, 4))
    found = run(layers, None, network(other), graph=graph, coverage={"parameters": {"modules": missing}})
    (note,) = [each for each in found if each.rule == "frozen"]
    assert (note.severity, "also head, from which the loss gets" in note.verdict) == ("note", frozen == "head")


def test_a_frozen_layer_behind_layers_without_a_gradient() -> None:
    """Layers that get no gradient are not trained, so that a frozen layer behind them is not between trained ones."""
    names = ("a", "b", "c", "d")
    missing = {"c": {"fired": False, "why": "frozen: none of its own parameters requires a gradient"}}
    parameters = {
        site: values for site, values in network("a", "b", "d").items() if site[-5:] != ".grad" or site[0] == "d"
    }
    layers: dict[str, Values] = {name: {} for name in names}
    found = run(layers, None, parameters, graph=chain(*names), coverage={"parameters": {"modules": missing}})
    assert ("note", "frozen", "c") in brief(found)


@pytest.mark.parametrize(("name", "severity"), [("c", "warning"), ("embed_positions", "note")])
def test_frozen_positions(name: str, severity: str) -> None:
    """Positions are often fixed sines."""
    names = ("a", "b", name, "d")
    missing = {name: {"fired": False, "why": "frozen: none of its own parameters requires a gradient"}}
    coverage = {"parameters": {"modules": missing}}
    layers: dict[str, Values] = {each: {} for each in names}
    found = run(layers, None, network("a", "b", "d"), graph=chain(*names), coverage=coverage)
    assert brief(found) == [(severity, "frozen", name)]


def test_a_frozen_layer_without_effect() -> None:
    """A layer whose result is not used may be frozen on purpose."""
    names = ("a", "b", "c", "d")
    missing = {"c": {"fired": False, "why": "frozen: none of its own parameters requires a gradient"}}
    graph = chain(*names)
    edges = tuple(replace(edge, source=5) if edge.source == 7 else edge for edge in graph.edges)  # from b to d
    found = run(
        {name: {} for name in names},
        None,
        network("a", "b", "d"),
        graph=replace(graph, edges=edges),
        coverage={"parameters": {"modules": missing}},
    )
    assert brief(found) == [("note", "frozen", "c")]


def test_a_layer_that_no_optimizer_has() -> None:
    """A layer that gets gradients but takes part in no step of an optimizer is a finding."""
    missing = {"b": {"fired": False, "why": "no step: no optimizer that stepped has its parameters"}}
    coverage = {"parameters": {"modules": missing}}
    found = run({"a": {}, "b": {}}, {"b": {"rms": 1e-3}}, network("a"), coverage=coverage)
    assert brief(found) == [("warning", "not-in-optimizer", "b")]


def test_a_layer_that_another_step_updates() -> None:
    """A layer that has taken part in a later step is no finding, although it took part in none at first."""
    missing = {"b": {"fired": False, "why": "no step: no optimizer that stepped has its parameters"}}
    coverage = {"parameters": {"modules": missing}}
    assert brief(run({"a": {}, "b": {}}, {"b": {"rms": 1e-3}}, network("a", "b"), coverage=coverage)) == []


def test_one_cause_in_many_modules_is_one_finding() -> None:
    """If the optimizer lacks ten modules, there is one finding, which lists the others."""
    names = [f"layer_{letter}" for letter in "abcdefghij"]
    missing = {name: {"fired": False, "why": "no step: no optimizer that stepped has its parameters"} for name in names}
    gradients: dict[str, Values] = {name: {"rms": 1e-3} for name in names}
    (found,) = run(None, gradients, network("head"), coverage={"parameters": {"modules": missing}})
    assert (found.rule, found.module, found.others) == ("not-in-optimizer", "layer_a", tuple(names[1:]))


def with_parameters(*names: str, note: str = "") -> Graph:
    """Return the graph of two layers that use these parameters, the last one with a note."""
    graph = chain("a", "b")
    shapes = [(TensorMeta((16,) if name.endswith("bias") else (16, 16), "float32"),) for name in names]
    nodes = [
        Node(10 + place, "parameter", name, 2, 2, outputs=shape)
        for place, (name, shape) in enumerate(zip(names, shapes, strict=True))
    ]
    nodes[-1] = replace(nodes[-1], note=note)
    return replace(graph, nodes=(*graph.nodes, *nodes))


def test_a_weight_that_is_in_no_optimizer() -> None:
    """A used parameter that is never updated, of a module whose other parameters are, is a finding."""
    parameters: dict[str, Values] = {**network("b"), "a/bias": {"rms": 0.1}, "a/bias.grad": {"rms": 1e-3}}
    found = run(None, None, parameters, graph=with_parameters("b.weight", "a.bias", "a.weight"))
    assert brief(found) == [("warning", "not-in-optimizer", "a")]
    assert found[0].verdict.startswith("a.weight is used, but no optimizer that stepped has it")
    tied = with_parameters("b.weight", "a.bias", "a.weight")
    tied = replace(tied, nodes=(*tied.nodes[:-1], replace(tied.nodes[-1], tied=("b.weight",))))
    assert run(None, None, parameters, graph=tied) == []


@pytest.mark.parametrize(
    ("note", "known", "rules"),
    [
        ("", 2, ["not-in-optimizer"]),
        ("", 3, []),  # the optimizer has it, and the records do not
        ("", None, []),
        ("frozen", 2, []),
    ],
)
def test_a_bias_that_is_in_no_optimizer(note: str, known: int | None, rules: list[str]) -> None:
    """A bias that is never updated is a finding if the optimizer has the recorded parameters only."""
    graph = with_parameters("b.weight", "a.weight", "a.bias", note=note)
    about = {} if known is None else {"groups": [{"optimizer": "Adam", "parameters": known}]}
    found = run(None, None, network("a", "b"), graph=graph, about=about)
    assert [each.rule for each in found] == rules
    assert all(each.verdict.startswith("a.bias is used, but no optimizer that stepped has it") for each in found)


def test_a_weight_that_is_frozen_alone() -> None:
    """A frozen weight beside a trained bias is a finding; it is a note if most weights are frozen."""
    layers: dict[str, Values] = {**network("b"), "a/bias": {"rms": 0.1}, "a/bias.grad": {"rms": 1e-3}}
    graph = with_parameters("b.weight", "a.bias", "a.weight", note="frozen")
    few: dict[str, Values] = {**layers, **network("c")}
    assert brief(run(None, None, few, graph=graph)) == [("warning", "frozen", "a")]
    biases: dict[str, Values] = {"a/bias": {"rms": 0.1}, "a/bias.grad": {"rms": 1e-3}}
    assert brief(run(None, None, biases, graph=graph)) == [("note", "frozen", "a")]
    more: dict[str, Values] = {f"norm_{each}/bias{part}": {"rms": 0.1} for each in "abcd" for part in ("", ".grad")}
    shapes = {(name.partition("/")[0], "bias"): (16,) for name in (*biases, *more)}
    assert brief(run(None, None, {**biases, **more}, graph=graph, shapes=shapes)) == [("note", "frozen", "a")]
    norm = with_parameters("b.weight", "a.bias", "a.weight_g", note="frozen")  # as in the head of DINO
    assert run(None, None, few, graph=norm) == []


@pytest.mark.parametrize(
    ("steps", "groups", "found"),
    [
        ((1, 1, 2, 2), (4, 2), [("note", "two-optimizers", "c")]),
        ((1, 1, 2, 2), (2, 2), []),  # two steps of the discriminator for one of the generator
        ((1, 1, 1, 1), (4, 4), []),  # one optimizer after the other
        ((2, 2, 2, 2), (4,), []),
        ((1, 1, 2, 3), (4, 2), []),
        ((1, 1, 2, 2), (), []),
    ],
)
def test_parameters_in_two_optimizers(
    steps: tuple[int, ...], groups: tuple[int, ...], found: list[tuple[str, str, str]]
) -> None:
    """A parameter is in two optimizers if it takes twice as many steps, and if the groups have so many more of them."""
    parameters: dict[str, Values] = {}
    for name, number in zip("abcd", steps, strict=True):
        parameters |= trained(name)
        parameters[f"{name}/weight"] = {**parameters[f"{name}/weight"], "count": 256.0 * number}
    about = {"groups": [{"optimizer": "Adam", "parameters": number} for number in groups]}
    assert brief(run(None, None, parameters, about=about)) == found


def test_an_optimizer_that_also_has_the_parameters_of_another_one() -> None:
    """The number of steps and the groups are those that the recorder of a real step writes."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    both = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)
    optimizers = [both, torch.optim.SGD(second.parameters(), 0.1)]
    examination = Examination()
    with OptimizerRecorder({"first": first, "second": second}, optimizers) as recorder:
        for step in range(3):
            second(first(torch.ones(2, 4))).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            found = recorder.collect()
            examination.add(
                found.having(about={**recorder.about(), "group": "parameters", "recorder": "parameters", "step": step})
            )
    (finding,) = [each for each in examination.findings() if each.rule == "two-optimizers"]
    assert finding.verdict == "two optimizers step second.weight and second.bias in the same training steps"


@pytest.mark.parametrize(("gradient", "rules"), [(1e-3, ["constant-weight"]), (None, [])])
def test_zeros_without_a_gradient_are_no_constant_weight(gradient: float | None, rules: list[str]) -> None:
    """The zeros of a LoRA stay zero if its gradient is lost; to initialize it with random values would be wrong."""
    parameters: dict[str, Values] = {"lora/weight": {"rms": 0.0, "std": 0.0}, **trained("head")}
    if gradient is not None:
        parameters["lora/weight.grad"] = {"rms": gradient}
    assert [each.rule for each in run(None, None, parameters) if each.rule == "constant-weight"] == rules


@pytest.mark.parametrize(("zeros", "rules"), [("abc", ["constant-weight"]), ("ab", [])])
def test_a_network_of_zeros(zeros: str, rules: list[str]) -> None:
    """More than half of the weights that stay zero, as their gradients do, are a finding with all their modules."""
    zero: Values = {"rms": 0.0, "std": 0.0}
    parameters = {f"{name}/weight{part}": zero for name in zeros for part in ("", ".grad")}
    others = network(*(name for name in "abcd" if name not in zeros))
    found = [each for each in run(None, None, {**parameters, **others}) if each.rule == "constant-weight"]
    assert [each.rule for each in found] == rules
    assert all((each.module, each.others) == ("a", ("b", "c")) for each in found)


class Student(nn.Module):
    """A network with a frozen copy, which a function moves towards it."""

    def __init__(self, follow: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)
        self.teacher, self.follow = copy.deepcopy(self.net).requires_grad_(False), follow

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mean, each in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                self.follow(mean, each)
        loss: Tensor = (self.net(x) - self.teacher(x)).pow(2).mean() + (self.teacher.bias - self.net.bias).norm()
        return loss


def by(share: float) -> Callable[[Tensor, Tensor], object]:
    return lambda mean, each: mean.lerp_(each, share)


def of_student(follow: Callable[[Tensor, Tensor], object]) -> Examination:
    return Examination(capture_graph(Student(follow), torch.randn(3, 4)))


@pytest.mark.parametrize(
    ("follow", "what"),
    [
        (by(0.0), "does not follow it"),
        (lambda mean, each: mean.mul_(1.0).add_(each, alpha=0.0), "does not follow it"),
        (lambda mean, each: mean.copy_(1.0 * mean + each.detach() * 0.0), "does not follow it"),
        (lambda mean, each: mean.add_(0.05 * (mean - each)), "moves away from it"),
        (by(0.01), ""),
        (lambda mean, each: mean.mul_(0.9).add_(each, alpha=0.1), ""),
        (lambda mean, each: mean.sub_(0.05 * (mean - each)), ""),
        (lambda mean, each: mean.copy_(each), ""),
        (lambda mean, each: None, ""),
    ],
)
def test_copies_that_do_not_follow(follow: Callable[[Tensor, Tensor], object], what: str) -> None:
    """An average that leaves a frozen copy where it is, or moves it away, is a finding; without one it may stay."""
    found = [each for each in of_student(follow).findings() if each.rule == "copy-does-not-follow"]
    assert [each.module for each in found] == ["teacher"] * bool(what)
    assert all(each.verdict.endswith(what) for each in found)


def test_a_weight_of_zeros_beside_a_trained_bias() -> None:
    """A weight that stays zero is a finding if the bias beside it has a gradient."""
    for gradient, expected in ((1e-3, [("warning", "constant-weight", "query")]), (0.0, [])):
        layer: dict[str, Values] = {
            "query/weight": {"rms": 0.0, "std": 0.0},
            "query/bias": {"update_ratio": 1e-3},
            "query/bias.grad": {"rms": gradient},
        }
        found = run(None, None, {**layer, **network("fc", "head")})
        assert [each for each in brief(found) if each[1] == "constant-weight"] == expected


@pytest.mark.parametrize("note", ["", OTHER_PARAMETERS])
def test_an_optimizer_that_is_none_of_the_training(note: str) -> None:
    """If an optimizer with parameters of the model steps, and none of the trainer's does, the finding says so."""
    graph = chain("a", "b")
    graph = replace(graph, nodes=(*graph.nodes, Node(20, "optimizer", "SGD", 0, 1, note=note)))
    missing = {name: {"fired": False, "why": "no step: no optimizer that stepped has its parameters"} for name in "ab"}
    layers: dict[str, Values] = {name: {"rms": 1e-3} for name in "ab"}
    (found,) = run(None, layers, {"a/weight": {}}, graph=graph, coverage={"parameters": {"modules": missing}})
    words = "a gets gradients, but no" if note else "the SGD that steps is none of the optimizers that the training was"
    assert found.verdict.startswith(words)


@pytest.mark.parametrize("is_evaluated", [False, True])
def test_a_frozen_normalization_in_training_mode(is_evaluated: bool) -> None:
    """The note about frozen modules says if one of them still changes its running statistics."""
    norm = nn.BatchNorm1d(5).requires_grad_(False)
    net = nn.Sequential(norm.eval() if is_evaluated else norm, nn.Linear(5, 3))
    missing = {"net.0": {"fired": False, "why": "frozen: none of its own parameters requires a gradient"}}
    graph = capture_graph(Step(net, F.cross_entropy), torch.randn(8, 5), torch.arange(8) % 3)
    coverage = {"parameters": {"modules": missing}}
    (found,) = (
        each for each in run(None, None, trained("net.1"), graph=graph, coverage=coverage) if each.rule == "frozen"
    )
    assert found.is_note
    assert ("net.0 normalizes with the statistics of the batch" in found.verdict) != is_evaluated
