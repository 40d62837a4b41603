"""Tests of the origin of values that are not finite."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_recorder import capture_graph
from lightning_recorder.graph.model import Graph
from lightning_recorder.insight import Finding
from tests.effort import lines_run
from tests.insight.records import Values, chain, run, trained

NAMES = ("a", "b", "c", "head")


def bad(*names: str, at: int = 4, of: Sequence[str] = NAMES) -> dict[str, Values]:
    """Return outputs or gradients of which some have NaN from a record on."""
    return {name: {"nan_count": [7.0 * (name in names and row >= at) for row in range(8)]} for name in of}


def first(findings: list[Finding]) -> Finding:
    (found,) = (each for each in findings if each.rule == "non-finite")
    assert (found.rule, found.severity) == ("non-finite", "critical")
    return found


def weights(*names: str, at: int = 5) -> dict[str, Values]:
    """Return weights that have NaN from a record on, as after a step with a bad gradient."""
    found = {key: value for name in NAMES for key, value in trained(name).items()}
    for name in names:
        found[f"{name}/weight"] = {**found[f"{name}/weight"], "nan_count": [float(row >= at) for row in range(8)]}
    return found


def test_a_forward_call() -> None:
    """The first module with a NaN whose inputs are finite is named, with its step."""
    found = first(run(bad("b", "c", "head"), bad(*NAMES), weights(*NAMES), graph=chain(*NAMES)))
    assert found.verdict == (
        "the output of b has 7 values that are not finite at step 40; the modules before it (a) are finite, "
        "so it arose in this module or in an operation before it"
    )
    assert (found.module, found.first_step) == ("b", 40)


def test_a_forward_call_without_a_graph() -> None:
    """Without a graph the order of execution decides."""
    assert first(run(bad("c", "head"), None, weights("a", "c"))).module == "c"


def test_a_parallel_branch() -> None:
    """A module in a parallel branch that executes earlier is not blamed."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.head = (nn.Linear(2, 2) for _ in range(4))

        def forward(self, inputs: Tensor) -> Tensor:
            out: Tensor = self.head(self.a(inputs) + self.c(self.b(inputs)))
            return out

    graph = capture_graph(Net(), torch.ones(1, 2))
    assert first(run(bad("c", "head"), None, weights("a"), graph=graph)).module == "c"
    assert first(run(bad("a", "head"), None, weights("a"), graph=graph)).module == "a"


class Shared(nn.Module):
    """One ReLU that is called after each of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.act, self.head = nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.head(self.act(self.fc2(self.act(self.fc1(inputs)))))
        return out


def shared() -> tuple[Graph, Sequence[str]]:
    """Return the graph of :class:`Shared`, and its modules by their first call."""
    return capture_graph(Shared(), torch.ones(1, 2)), ("fc1", "act", "fc2", "head")


def test_a_shared_module() -> None:
    """A ReLU that is called twice is not blamed for the NaN of the layer before its second call."""
    graph, names = shared()
    assert first(run(bad("act", "fc2", "head", of=names), None, weights("a"), graph=graph)).module == "fc2"
    assert first(run(bad("fc1", "act", "fc2", "head", of=names), None, weights("a"), graph=graph)).module == "fc1"
    assert first(run(bad("act", "head", of=names), None, weights("a"), graph=graph)).module == "act"


def test_a_module_that_calls_others() -> None:
    """A block that makes a NaN of its own is named, not the module after it."""
    names = ("block.fc", "block", "head")
    assert first(run(bad("block", "head", of=names), None, weights("a"))).module == "block"


def test_a_backward_pass() -> None:
    """The module whose output has a finite gradient, and whose input has none, is named."""
    found = first(run(bad(), bad("a", "b"), weights(*NAMES), graph=chain(*NAMES)))
    assert found.module == "c"
    assert found.verdict == (
        "the backward pass of c makes a gradient that is not finite at step 40: the gradient of its output is finite, "
        "that of its input from b is not"
    )


def test_the_loss() -> None:
    """If the gradient of the last module is bad already, it arose in the loss."""
    found = first(run(bad(), bad(*NAMES), weights(*NAMES), graph=chain(*NAMES)))
    assert found.module == "head"
    assert "it arose after this module, in the loss or in a function without a module" in found.verdict


def test_between_two_records() -> None:
    """If the parameters are bad already, only an interval is known, and the arguments to record it are given."""
    found = first(run(bad(*NAMES), bad(*NAMES), weights(*NAMES, at=4), graph=chain(*NAMES)))
    assert found.module == ""
    assert found.verdict == (
        "a value that is not finite arose between the steps 30 and 40: at step 40, 4 of 4 parameters have one"
    )
    assert "every_n_train_steps=1, schedule=Schedule(step_window=(30, 41))" in found.next


def test_the_only_bad_parameter() -> None:
    """A single parameter with a NaN is named."""
    assert first(run(bad("b", "c", "head"), None, weights("b", at=4), graph=chain(*NAMES))).module == "b"


def test_infinities_are_a_note() -> None:
    """Infinities that no NaN follows, as of an attention mask, leave the run healthy."""
    layers: dict[str, Values] = {"a": {"inf_count": 3.0}, "b": {}}
    (found,) = run(layers, graph=chain("a", "b"))
    assert (found.severity, found.module) == ("note", "a")


def test_a_nan_without_consequences() -> None:
    """A NaN in an output that reaches neither gradients nor parameters is a warning."""
    parameters = {key: value for name in NAMES for key, value in trained(name).items()}
    (found,) = run(bad("b", at=3), bad(), parameters, graph=chain(*NAMES))
    assert (found.severity, found.module) == ("warning", "b")


def test_what_follows_is_not_reported() -> None:
    """Other rules only see the records before the first NaN."""
    layers = bad("b", "c", "head")
    layers["a"] = {**layers["a"], "zero_fraction": [0.5] * 4 + [1.0] * 4}
    assert first(run(layers, None, weights(*NAMES), graph=chain(*NAMES))).module == "b"


def test_the_search_is_linear_if_all_modules_are_bad() -> None:
    """With four times the modules, all of which are bad, at most five times the lines run."""

    def effort(modules: int) -> int:
        names = [f"layer{number}" for number in range(modules)]
        records, graph = bad(*names, of=names), chain(*names)
        return lines_run(lambda: first(run(records, graph=graph)))

    assert effort(400) < 5 * effort(100)
