"""Tests of the rules of gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_recorder.graph import GraphCapture, Unused, capture_graph
from lightning_recorder.insight import Finding
from lightning_recorder.insight.data_facts import DataFacts, EpochFacts
from lightning_recorder.reductions import Histogram
from tests.insight.records import Values, brief, chain, examined, network, run, trained


def test_the_gradient_stops() -> None:
    """Modules without a gradient give one finding, which names the last of them on the way to the loss."""
    names = ("a", "b", "pool", "head")
    layers: dict[str, Values] = {name: {"rms": 1.0} for name in names}
    still = {f"{name}/weight": {"rms": 0.25, "update_ratio": 0.0} for name in ("a", "b")}
    (found,) = run(layers, {"head": {"rms": 1e-3}}, {**still, **trained("head")}, graph=chain(*names, pool="MaxPool2d"))
    assert found.verdict == "2 modules with parameters get no gradient: the gradient from head stops at pool"
    assert (found.rule, found.module, found.others) == ("gradient-stops", "pool", ("a", "b"))


@pytest.mark.parametrize(
    ("stop", "is_near"),
    [("net/detach (detach) at net.py:42", True), ("other/detach (detach) at net.py:7", False), ("argmax (…)", False)],
)
def test_the_place_in_the_recorded_graph(stop: str, is_near: bool) -> None:
    """The finding names the line at which the gradient of the recorded step stops, if it is in a module around it."""
    names = ("net.a", "net.b", "head")
    graph = replace(chain(*names), unused=Unused(stops=(stop,)))
    still = {f"net.{name}/weight": {"rms": 0.25, "update_ratio": 0.0} for name in "ab"}
    layers: dict[str, Values] = {name: {"rms": 1.0} for name in names}
    (found,) = run(layers, {"head": {"rms": 1e-3}}, {**still, **trained("head")}, graph=graph)
    assert found.rule == "gradient-stops"
    assert found.next.startswith(f"Look at {stop}") == is_near


@pytest.mark.parametrize("with_outputs", [True, False])
def test_a_forgotten_parameter_of_the_model_is_named(with_outputs: bool) -> None:
    """A parameter without a gradient in a module that is trained is named, and hides no module that is never called."""
    still: Values = {"rms": 1.0, "update_ratio": 0.0}
    layers: dict[str, Values] = {"a": {"rms": 1.0}, "head": {"rms": 1.0}}
    parameters: dict[str, Values] = {"/temperature": still, **network("a", "head")}
    graph = chain("a", "head")
    (found,) = run(layers if with_outputs else None, None, parameters, graph=graph)
    assert (found.rule, found.module, found.path) == ("forgotten-parameter", "", "temperature")
    assert found.verdict == "the parameter temperature of the model is not used by the loss, so it is not trained"
    both = run(layers, None, {**parameters, "extra/weight": still}, graph=graph)
    assert brief(both) == [("warning", "unused-parameter", "extra"), ("warning", "forgotten-parameter", "")]


def test_forgotten_parameters_of_called_modules_are_named() -> None:
    """They may belong to a layer, or to a block around layers. A block without any gradient has one finding."""
    names = ("blocks.0.fc", "blocks.1.fc", "head")
    still: Values = {"rms": 1.0, "update_ratio": 0.0}
    unused = {f"blocks.{number}/scale": still for number in range(2)} | {"head/bias": still}
    layers: dict[str, Values] = {name: {"rms": 1.0} for name in names}
    (found,) = run(layers, None, {**network(*names), **unused}, graph=chain(*names))
    assert found.verdict == (
        "3 parameters are not used by the loss, so they are not trained: head.bias, blocks.0.scale, blocks.1.scale"
    )
    assert (found.module, found.path, found.others) == ("head", "bias", ("blocks.0", "blocks.1"))
    stopped = {"blocks.0.fc/weight": still, "blocks.0/scale": still}
    found_rules = [each.rule for each in run(layers, None, {**stopped, **network(*names[1:])}, graph=chain(*names))]
    assert found_rules == ["gradient-stops"]


def test_parameters_alone_do_not_tell_where_a_gradient_stops() -> None:
    """If only parameters are recorded, it is unknown whether a module without a gradient was called."""
    (found,) = run(None, None, {**network("a", "head"), "extra/weight": {"rms": 0.2, "update_ratio": 0.0}})
    assert found.verdict == "extra gets no gradient: not called, or without effect on the loss"


def test_an_output_that_nothing_uses() -> None:
    """The gradient stops at a module whose output no operation takes, and the finding says so."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.memory, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            memory = self.memory(x)
            output: torch.Tensor = self.head(x if self.training else memory)
            return output

    still: Values = {"rms": 0.25, "update_ratio": 0.0}
    for net, where in (
        (Net(), "nothing uses the output of memory"),
        (Net().eval(), "the gradient from head stops at memory"),
    ):
        graph = capture_graph(net, torch.randn(3, 4))
        layers: dict[str, Values] = {"memory": {}, "head": {}}
        found = run(layers, {"head": {"rms": 1e-3}}, {"memory/weight": still, **network("head")}, graph=graph)
        assert [each.verdict.partition(": ")[2] for each in found if each.rule == "gradient-stops"] == [where]


class Block(nn.Module):
    """A block with a result for the next block, as the coordinates of an EGNN."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.side, self.main = nn.Identity(), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, extra: Tensor, *, detach: bool) -> tuple[Tensor, Tensor]:
        side = self.norm(self.side(extra + x))
        return torch.relu(self.main(x + extra)), side.detach() if detach else side


class Blocks(nn.Module):
    """Two blocks. The loss depends on the side of the last one if ``is_used``; it may get no gradient."""

    def __init__(self, *, is_used: bool) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(4, 4), nn.ModuleList([Block(), Block()])
        self.head, self.is_used = nn.Linear(4, 1), is_used

    def forward(self, x: Tensor) -> None:
        x, extra = self.stem(x), torch.zeros_like(x)
        for place, block in enumerate(self.blocks):
            x, extra = block(x, extra, detach=self.is_used and place == 1)
        loss = self.head(x + extra if self.is_used else x).square().mean()
        loss.backward()


@pytest.mark.parametrize(
    ("is_used", "earlier", "severity"), [(False, 1, "note"), (True, 1, "warning"), (False, 0, "warning")]
)
def test_a_branch_that_the_last_block_does_not_need(is_used: bool, earlier: int, severity: str) -> None:
    """It is a note if no loss depends on it and that of the block before is trained; a detached one is a warning."""
    graph = capture_graph(Blocks(is_used=is_used), torch.randn(3, 4))
    names = ["stem", "blocks.0.main", "blocks.1.main", "head", *["blocks.0.side"] * earlier]
    layers: dict[str, Values] = {name: {} for name in (*names, "blocks.1.side")}
    still: Values = {"rms": 0.25, "update_ratio": 0.0}
    parameters = {"blocks.1.side/weight": still, **network(*names)}
    found = run(layers, {name: {"rms": 1e-3} for name in names}, parameters, graph=graph)
    found = [each for each in found if each.rule == "gradient-stops"]
    assert brief(found) == [(severity, "gradient-stops", "blocks.1.side")]
    assert ("blocks.0.side of an earlier block is trained" in found[0].verdict) is (severity == "note")


class Library(nn.Module):
    """A model with a head that nothing uses, a layer that is never called, and a parameter that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.extra, self.pooler = (nn.Linear(4, 4) for _ in range(4))
        self.token, self.fixed = (nn.Parameter(torch.ones(4, 4), requires_grad=each) for each in (True, False))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.body(x)) @ self.fixed
        self.pooler(h)
        return h


@pytest.mark.parametrize(
    ("packages", "is_trained", "severity"),
    [(("tests",), True, "note"), ((), True, "warning"), (("timm",), True, "warning"), (("tests",), False, "warning")],
)
def test_parts_of_a_model_of_an_installed_package(packages: tuple[str, ...], is_trained: bool, severity: str) -> None:
    """What the code of a package does not need is a note, if the rest of its model is trained."""
    graph = replace(capture_graph(nn.Sequential(Library(), nn.Linear(4, 2)), torch.randn(3, 4)), packages=packages)
    still: Values = {"rms": 0.25, "update_ratio": 0.0}
    names = ("0.body", "1")[not is_trained :]
    parameters = {"0/token": still, "0.extra/weight": still, "0.pooler/weight": still, **network(*names)}
    layers: dict[str, Values] = {name: {} for name in (*names, "0.pooler")}
    found = run(layers, {name: {"rms": 1e-3} for name in names}, parameters, graph=graph)
    kinds = {each.rule: each.severity for each in found}
    assert kinds["unused-parameter"] == kinds["gradient-stops"] == severity
    assert not is_trained or kinds["forgotten-parameter"] == severity


@pytest.mark.parametrize("packages", [("tests",), ()])
def test_a_parameter_that_a_class_of_a_package_fixes(packages: tuple[str, ...]) -> None:
    """A frozen parameter of a class of a package is a note; weights and biases are usually trained."""
    graph = replace(capture_graph(nn.Sequential(Library(), nn.Linear(4, 2)), torch.randn(3, 4)), packages=packages)
    own = {name.replace("weight", "token"): each for name, each in trained("0").items()}
    parameters = {**own, **network("0.body", "1")}
    layers: dict[str, Values] = {name: {} for name in ("0.body", "1")}
    found = run(layers, {name: {"rms": 1e-3} for name in layers}, parameters, graph=graph)
    (frozen,) = (each for each in found if each.rule == "frozen")
    assert frozen.verdict.startswith("0.fixed is frozen")
    assert frozen.severity == ("note" if packages else "warning")


def test_a_branch_that_no_loss_depends_on_is_no_task() -> None:
    """A gradient there, as of an identity whose input has other uses, does not make the last layer of it a head."""
    names = ["stem", "blocks.0.main", "blocks.1.main", "head", "blocks.0.side", "blocks.1.norm"]
    layers: dict[str, Values] = {name: {} for name in names}
    gradients: dict[str, Values] = {name: {"rms": 1e-6 if name.endswith("norm") else 1.0} for name in names}
    for is_used in (True, False):
        graph = capture_graph(Blocks(is_used=is_used), torch.randn(3, 4))
        assert "loss-imbalance" not in [each.rule for each in run(layers, gradients, network(*names), graph=graph)]


def test_the_own_parameters_of_a_container_are_no_finding_of_their_own() -> None:
    """A position embedding of the net loses its gradient at the same place as the modules inside."""
    layers: dict[str, Values] = {name: {"rms": 1.0} for name in ("net.a", "net.head", "net")}
    still = {f"{name}": {"rms": 0.25, "update_ratio": 0.0} for name in ("net.a/weight", "net/pos")}
    (found,) = run(
        layers, {"net.head": {"rms": 1e-3}}, {**still, **trained("net.head")}, graph=chain("net.a", "net.head")
    )
    assert (found.rule, found.module, found.others) == ("gradient-stops", "net.a", ("net",))


def test_no_gradient_stops_at_a_container_whose_modules_all_train() -> None:
    """A mask token of the encoder that this step does not use is forgotten; the gradient passes through the encoder."""
    layers: dict[str, Values] = {name: {"rms": 1.0} for name in ("net.a", "net", "head")}
    parameters: dict[str, Values] = {"net/token": {"rms": 0.25, "update_ratio": 0.0}, **network("net.a", "head")}
    (found,) = run(layers, {"head": {"rms": 1e-3}}, parameters, graph=chain("net.a", "head"))
    assert (found.rule, found.module, found.path) == ("forgotten-parameter", "net", "token")


def test_low_precision() -> None:
    """Half-precision gradients below the smallest normal number are a finding."""
    values = [1e-6, 2e-6, 1e-5, 1e-4]
    histogram = Histogram(np.array([0, 1e-5, 5e-5, 1e-3]), np.array([2, 1, 1]), min(values), max(values), 1e-4, 1e-8)
    options = {"gradients": {"a": {"rms": 1e-5, "max": 1e-4, "min": 0.0}}, "histograms": {("a", "out"): histogram}}
    assert [each.rule for each in run(**options, dtype="float16")] == ["low-precision"]
    assert run(**options, dtype="float32") == []


def test_a_spike_of_the_gradients() -> None:
    """A norm of all gradients more than 20 times its median is a finding about that record alone."""
    parameters = network("a", "b", b=trained("b", grad=[1e-3] * 6 + [0.1, 1e-3]))
    (found,) = run(None, None, parameters)
    assert (found.rule, found.module, found.first_step, found.last_step) == ("gradient-spike", "b", 60, 60)
    assert [*found.numbers] == ["factor", "norm"]
    assert found.numbers["factor"] == pytest.approx(70.7, abs=0.05)
    words = "the norm of all gradients at step 60 is 70.7 × its median in the 5 records before, most of it in b"
    assert found.verdict == words


def test_a_spike_of_the_gradients_at_the_end_of_an_epoch() -> None:
    """A step that ends an epoch is named as such, since its batch may be smaller than the others."""
    parameters = network("a", "b", b=trained("b", grad=[1e-3] * 6 + [0.1, 1e-3]))
    for is_whole, words in ((True, "at step 60, the last of epoch 2, is 70.7 ×"), (False, "at step 60 is 70.7 ×")):
        epoch = EpochFacts(2, 41, 60, 40, 80, 80.0, 40.0, is_whole=is_whole)
        examination = examined(None, None, parameters)
        examination.set_data(DataFacts(epochs=(epoch,)))
        (found,) = examination.findings()
        assert words in found.verdict


def test_the_gradients_of_a_low_loss_grow_without_a_finding() -> None:
    """A norm many times as large as those before is none if it was as large at the beginning, before the loss fell."""
    fallen = [1e-3] * 6 + [0.1, 1e-3]
    assert (
        run(
            None,
            None,
            network("a", "b", a=trained("a", grad=[0.2, *fallen]), b=trained("b", grad=[0.2, *fallen])),
            records=9,
        )
        == []
    )
    (found,) = run(
        None,
        None,
        network("a", "b", a=trained("a", grad=[0.05, *fallen]), b=trained("b", grad=[0.05, *fallen])),
        records=9,
    )
    assert (found.rule, found.first_step) == ("gradient-spike", 70)


def test_gradients_that_stop_in_all_blocks_are_one_finding() -> None:
    """Layers at the same place of several blocks that get no gradient, unlike those behind them, are one finding."""
    names = [f"blocks.{place}.{name}" for place in range(4) for name in ("query", "out")]
    parameters = network(*names, **{name: trained(name, grad=0.0) for name in names if name.endswith("query")})
    gradients: dict[str, Values] = {name: {"rms": 1e-3 if name.endswith("out") else 0.0} for name in names}
    layers: dict[str, Values] = {name: {"rms": 1.0} for name in names}
    (found,) = [
        each for each in run(layers, gradients, parameters, graph=chain(*names)) if each.rule == "gradient-stops"
    ]
    assert found.verdict == (
        "4 modules with parameters get a gradient of zero: the gradient from blocks.0.out stops at blocks.0.query and "
        "at 3 modules like it"
    )
    assert found.others == ("blocks.1.query", "blocks.2.query", "blocks.3.query")


def test_a_loss_times_zero_is_named() -> None:
    """If the gradient of the last output is zero, too, the loss is the cause, and no module stops the gradient."""
    names = ("a", "b", "head")
    layers: dict[str, Values] = {name: {} for name in names}
    gradients: dict[str, Values] = {name: {"rms": 0.0} for name in names}
    parameters = {key: value for name in names for key, value in trained(name, grad=0.0, update=0.0, ratio=0.0).items()}
    found = next(
        each for each in run(layers, gradients, parameters, graph=chain(*names)) if each.rule == "gradient-stops"
    )
    assert found.verdict == (
        "3 modules with parameters get a gradient of zero: "
        "the gradient of the loss for the output of head is zero already"
    )
    assert "multiplied with zero" in found.why


class First(nn.Module):
    """A recurrence whose first or last output is used."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(3, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.rnn(x)[0][:, 0]
        return found


@pytest.mark.parametrize(("steps", "gradient", "is_wrong"), [(6, 0.0, True), (6, 1e-4, False), (1, 0.0, False)])
def test_a_recurrence_of_which_the_first_step_is_used(steps: int, gradient: float, is_wrong: bool) -> None:
    """The weight between the steps gets no gradient if the loss depends on the first step only."""
    parameters: dict[str, Values] = {}
    for name, grad in (("weight_ih_l0", 1e-3), ("weight_hh_l0", gradient)):
        parameters |= {f"rnn/{name}": {"rms": 0.1, "update_ratio": 1e-3}, f"rnn/{name}.grad": {"rms": grad}}
    graph = capture_graph(First(), torch.randn(5, steps, 3))
    found = run({"rnn": {}}, parameters=parameters, graph=graph)
    assert [each.module for each in found if each.rule == "first-step-only"] == ["rnn"] * is_wrong


def of_recurrence(zeros: tuple[str, ...], *, is_bidirectional: bool = False, layers: int = 2) -> list[Finding]:
    """Return the findings about a recurrent module some of whose parameters get a gradient of zero."""
    ways = ("", "_reverse") if is_bidirectional else ("",)
    paths = [f"{kind}_l{layer}{way}" for layer in range(layers) for way in ways for kind in ("weight_ih", "weight_hh")]
    parameters: dict[str, Values] = {}
    for path in paths:
        parameters |= {f"rnn/{path}": {"rms": 0.1}, f"rnn/{path}.grad": {"rms": 0.0 if path in zeros else 0.01}}
    found = run({"rnn": {"rms": 1.0}}, None, {**parameters, **network("head")}, graph=chain("rnn", "head"))
    return [each for each in found if each.rule == "forgotten-parameter"]


def test_a_recurrent_layer_that_the_loss_does_not_read() -> None:
    """If the last layer gets gradients of zero and the first one does not, the loss reads the first one."""
    (found,) = of_recurrence(("weight_ih_l1", "weight_hh_l1"))
    assert (found.module, found.path) == ("rnn", "weight_ih_l1")
    assert "the gradients of layer 1 of rnn are zero in each record" in found.verdict
    assert of_recurrence(()) == []
    assert of_recurrence(("weight_hh_l0", "weight_hh_l1")) == []  # sequences of one step


def test_a_backward_direction_that_has_read_one_step() -> None:
    """Its recurrent weight gets a gradient of zero, while that of the forward direction does not."""
    (found,) = of_recurrence(("weight_hh_l1_reverse",), is_bidirectional=True)
    assert (found.module, found.path) == ("rnn", "weight_hh_l1_reverse")
    assert of_recurrence((), is_bidirectional=True) == []
    both = ("weight_hh_l0", "weight_hh_l0_reverse")
    assert of_recurrence(both, is_bidirectional=True, layers=1) == []


@pytest.mark.parametrize(("function", "is_flat"), [(torch.round, True), (torch.sign, True), (torch.tanh, False)])
def test_a_function_with_steps_before_the_loss(function: Callable[[torch.Tensor], torch.Tensor], is_flat: bool) -> None:
    """If the gradient of the loss is zero, a function with steps between the last layer and the loss is named."""

    class Rounded(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (function(self.head(x).sigmoid()) - 1).abs().mean()

    model, x = Rounded(), torch.randn(3, 4)
    with GraphCapture(model, x) as capture:
        model(x).backward()
    zero: Values = {"rms": 0.25, "update_ratio": 0.0}
    parameters: dict[str, Values] = {"head/weight": zero, "head/weight.grad": {"rms": 0.0}}
    other: dict[str, Values] = {"/scale": {"rms": 1.0}, "/scale.grad": {"rms": 0.1}}
    found = run({"head": {"rms": 1.0}}, {"head": {"rms": 0.0}}, parameters | other, graph=capture.graph())
    (stopped,) = [each for each in found if each.rule == "gradient-stops"]
    assert ("has a gradient of zero everywhere" in stopped.verdict) is is_flat
