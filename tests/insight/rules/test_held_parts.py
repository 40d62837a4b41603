"""Findings about parts that no optimizer has: layers that were never trained, and copies of trained parts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_recorder.graph import capture_graph
from lightning_recorder.graph.model import Graph
from lightning_recorder.insight import Finding, RunFacts
from lightning_recorder.watch import Reading
from lightning_recorder.watch.verdict import finding_of_spike
from tests.insight.records import Examination, Values, brief, chain, examined, network, run

FROZEN = ("a", "b", "c", "d")


def of_layers(as_made: int, learned: int = 0, *, order: str = "abcdefgh", about: dict[str, Any] | None = None) -> Any:
    """Return the examination of frozen layers with a trained head; the first ones are as they were made."""
    frozen = [name for name in order if name != "h"][: as_made + learned]
    held = {"as_made": frozen[:as_made], "learned": frozen[as_made:]} if about is None else about
    names = [name for name in order if name in (*frozen, "h")]
    layers: dict[str, Values] = {name: {} for name in names}
    return examined(layers, None, network("h"), graph=chain(*names), about={"held": held})


@pytest.mark.parametrize(
    ("as_made", "learned", "found"),
    [
        (4, 0, [("warning", "never-trained", "a")]),
        (3, 0, []),
        (4, 1, []),
        (3, 3, [("warning", "never-trained", "a")]),
        (2, 3, []),
        (0, 0, []),
    ],
)
def test_frozen_layers_with_the_values_of_an_initialization(
    as_made: int, learned: int, found: list[tuple[str, str, str]]
) -> None:
    """Four layers that were never loaded before the trained head are a finding, as are three beside loaded ones."""
    assert brief(of_layers(as_made, learned).findings()) == found


@pytest.mark.parametrize("order", ["habcd", "abhcd"])
def test_random_features_behind_a_trained_layer(order: str) -> None:
    """With a trained layer before or between them, as adapters are, such layers are a note."""
    found = brief(of_layers(4, order=order).findings())
    assert [each for each in found if each[1] == "never-trained"] == [("note", "never-trained", "a")]


def test_layers_that_are_trained_later() -> None:
    """Layers that were frozen at first and are updated now are left out."""
    held = {"as_made": list(FROZEN), "learned": []}
    names = (*FROZEN, "h")
    layers: dict[str, Values] = {name: {} for name in names}
    assert run(layers, None, network(*names), graph=chain(*names), about={"held": held}) == []


def test_a_frozen_branch_beside_the_input() -> None:
    """A trained layer that gets the input, too, does not see random features only."""
    held = {"as_made": ["net.a", "net.b", "net.c", "net.d"], "learned": []}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.ModuleDict({name: nn.Linear(4, 4).requires_grad_(False) for name in FROZEN})
            self.h = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = x
            for each in self.net.values():
                y = each(y)
            found: Tensor = self.h(torch.cat([x, y], 1)).square().mean()
            return found

    layers: dict[str, Values] = {name: {} for name in (*held["as_made"], "h")}
    graph = capture_graph(Net(), torch.randn(5, 4))
    found = brief(run(layers, None, network("h"), graph=graph, about={"held": held}))
    assert [each for each in found if each[1] == "never-trained"] == [("note", "never-trained", "net.a")]


# Copies.


class Learner(nn.Module):
    """A network and a frozen copy of it, with a loss of both."""

    def __init__(self, loss: Callable[[Any, Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.head, self.loss = nn.Linear(4, 4), nn.Linear(4, 4), loss
        self.target = copy.deepcopy(self.net).requires_grad_(False)

    def forward(self, x: Tensor, reward: Tensor) -> Tensor:
        return self.loss(self, x, reward)


def of_two_views(model: Any, x: Tensor, reward: Tensor) -> Tensor:
    """Compare the views of two noises, as a teacher does."""
    found: Tensor = -F.cosine_similarity(model.head(model.net(x + torch.randn_like(x))), model.target(-x)).mean()
    return found


def of_one_input(model: Any, x: Tensor, reward: Tensor) -> Tensor:
    """Compare the outputs for the same input, as with a reference model."""
    return F.kl_div(model.head(model.net(x)).log_softmax(1), model.target(x).softmax(1), reduction="batchmean")


def of_rewards(model: Any, x: Tensor, reward: Tensor) -> Tensor:
    """Add the reward to the value of the next state, as Q-learning does."""
    with torch.no_grad():
        value = reward + 0.9 * model.target(x.flip(0)).amax(1)
    return F.mse_loss(model.head(model.net(x)).amax(1), value)


def of_the_net(model: Any, x: Tensor, reward: Tensor) -> Tensor:
    """Use the network alone: the copy is for evaluations."""
    found: Tensor = model.head(model.net(x)).square().mean()
    return found


def graph_of(loss: Callable[[Any, Any, Tensor], Tensor]) -> Graph:
    return capture_graph(Learner(loss), torch.randn(6, 4), torch.rand(6))


FACTS = {
    "copy": "target",
    "of": "net",
    "records": 20,
    "equal": 1,
    "begins_equal": True,
    "followed": 0,
    "moved": 0.2,
    "factors": 0,
    "factor": None,
    "lag": None,
    "buffers_followed": False,
    "buffers_moved": False,
    "evaluates": False,
    "is_as_made": True,
}


def of_copy(
    loss: Callable[[Any, Any, Tensor], Tensor] = of_two_views, *, length: int = 200, **facts: Any
) -> Examination:
    """Return the examination of a copy with these facts, in records over this number of steps."""
    about = {"held": {"copies": [{**FACTS, **facts}]}}
    layers: dict[str, Values] = {name: {} for name in ("net", "head", "target")}
    every = length // 20
    return examined(layers, None, network("net", "head"), graph=graph_of(loss), about=about, records=20, every=every)


def found_in(examination: Examination) -> list[tuple[str, str]]:
    return [(each.severity, each.rule) for each in examination.findings() if each.rule.startswith("copy-")]


STAYS = "copy-stays"


@pytest.mark.parametrize(
    ("loss", "facts", "found"),
    [
        (of_two_views, {}, [("warning", STAYS)]),
        (of_two_views, {"is_as_made": False}, [("note", STAYS)]),
        (of_two_views, {"begins_equal": False}, []),
        (of_two_views, {"followed": 20}, []),
        (of_two_views, {"followed": 1, "factor": 0.01}, [("warning", STAYS)]),
        (of_two_views, {"followed": 1, "factor": 1.0}, []),
        (of_two_views, {"moved": 1e-4}, []),
        (of_two_views, {"length": 60}, []),
        (of_one_input, {}, []),
        (of_the_net, {}, []),
        (of_rewards, {}, []),
        (of_rewards, {"length": 3000}, [("note", STAYS)]),
    ],
)
def test_copies_that_stay(loss: Any, facts: dict[str, Any], found: list[tuple[str, str]]) -> None:
    """A teacher that began as a copy of new weights and stays is a finding; a reference model stays on purpose."""
    assert found_in(of_copy(loss, **facts)) == found


WITHOUT_LAG = [("warning", "copy-without-lag")]


@pytest.mark.parametrize(
    ("loss", "facts", "found"),
    [
        (of_rewards, {"factor": 0.995, "lag": 0.005}, WITHOUT_LAG),
        (of_two_views, {"factor": 1.0, "lag": 0.0}, WITHOUT_LAG),
        (of_rewards, {"factor": 0.005, "lag": 90.0}, []),
        (of_rewards, {"factor": 1.0, "lag": 4.0}, []),
        (of_rewards, {"factor": 1.0, "lag": 0.0, "factors": 10}, []),
        (of_one_input, {"factor": 1.0, "lag": 0.0}, []),
    ],
)
def test_copies_without_lag(loss: Any, facts: dict[str, Any], found: list[tuple[str, str]]) -> None:
    """A copy that follows at once in each step is a finding, unless it is an old policy with the same inputs."""
    assert found_in(of_copy(loss, **{"followed": 20, "factors": 20, **facts})) == found


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        ({}, [("warning", "copy-statistics-stay")]),
        ({"is_as_made": False}, [("note", "copy-statistics-stay")]),
        ({"buffers_followed": True}, []),
        ({"buffers_moved": False}, []),
        ({"evaluates": False}, []),
        ({"followed": 2}, []),
    ],
)
def test_running_statistics_of_copies(facts: dict[str, Any], found: list[tuple[str, str]]) -> None:
    """A copy in evaluation mode whose running statistics never move, as its parameters do, is a finding."""
    usual = {"followed": 20, "factors": 20, "factor": 0.01, "lag": 60.0, "evaluates": True, "buffers_moved": True}
    assert found_in(of_copy(**{**usual, **facts})) == found


@pytest.mark.parametrize(
    ("moves", "steps"), [([[90, 100]], "90 and 100"), ([[10, 20], [99, 100]], "99 and 100"), ([[80, 90]], "80 and 90")]
)
def test_a_spike_after_a_copy_has_moved(moves: list[list[int]], steps: str) -> None:
    """A spike of the loss is a note if a target network has moved at the same time or in the ten steps before it."""
    (spike,) = spikes_with(moves)
    assert spike.severity == "note"
    assert spike.verdict.endswith(f"; target has moved between steps {steps}")


@pytest.mark.parametrize("moves", [[], [[10, 20]], [[79, 89]], [[101, 110]]])
def test_a_spike_without_a_move_of_a_copy(moves: list[list[int]]) -> None:
    """Another spike stays a warning."""
    (spike,) = spikes_with(moves)
    assert (spike.severity, "target" in spike.verdict) == ("warning", False)


def test_a_spike_after_a_copy_that_the_step_does_not_use() -> None:
    """An average of weights that the training does not read explains no spike."""
    (spike,) = spikes_with([[99, 100]], is_used=False)
    assert spike.severity == "warning"


def spikes_with(moves: list[list[int]], *, is_used: bool = True) -> list[Finding]:
    """Return the findings about a spike at step 100, with the steps between which a copy has moved."""
    spike = finding_of_spike([("loss", 30.0, 2.0)], Reading(100, 30, None, None, [], [100]), factor=10)
    examination = of_copy(followed=3, factor=1.0, moves=moves)
    examination.facts = RunFacts(watched=[spike])
    if not is_used:
        examination.graph = chain("net", "head")
    return [each for each in examination.findings() if each.rule == "spike"]
