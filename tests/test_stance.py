"""Compiled modules run eagerly on the steps that are recorded, and compiled on the others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

import lightning_recorder
from lightning_recorder.selection import Selection
from lightning_recorder.stance import EagerStance
from lightning_recorder.taps import OutputGradientTap, OutputTap, Tap

X = torch.ones(3, 2)


class Counter:
    """A backend that counts how often something is compiled and how often the compiled code runs."""

    def __init__(self) -> None:
        self.compiled = 0
        self.runs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.compiled += 1

        def run(*args: Any) -> Any:
            self.runs += 1
            return graph.forward(*args)

        return run


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing is compiled before or after a test, and no stance is left by one."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    assert stance() == "default"


def stance() -> str:
    """The stance of the process, found out by what a compiled function does."""
    counter = Counter()

    def double(x: Tensor) -> Tensor:
        return x * 2

    compiled = torch.compile(double, backend=counter)
    try:
        compiled(X)
    except RuntimeError:  # "Detected recompile when torch.compile stance is 'fail_on_recompile'"
        return "fail_on_recompile"
    return "default" if counter.runs else "force_eager"


def make() -> tuple[nn.Sequential, Any, Counter]:
    """A model, its compiled form and the counter of its compilations."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    counter = Counter()
    return net, torch.compile(net, backend=counter), counter


# Holding and releasing


def test_a_hold_runs_compiled_functions_eagerly() -> None:
    """Under a hold a compiled function runs as it is written, and after it compiled as before."""
    hold = EagerStance()
    found = [stance()]
    hold.hold()
    found.append(stance())
    hold.release()
    assert [*found, stance()] == ["default", "force_eager", "default"]


def test_holders_release_in_any_order() -> None:
    """Of several holders the last one to go restores the stance, in whatever order they come and go."""
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        holds = [EagerStance() for _ in range(3)]
        for hold in holds:
            hold.hold()
        found = []
        for position in order:
            found.append(stance())
            holds[position].release()
        assert [*found, stance()] == ["force_eager"] * 3 + ["default"]


def test_the_users_own_stance_is_restored() -> None:
    """A stance that the user has set comes back when two holders have gone in the order in which they came."""
    with torch.compiler.set_stance("fail_on_recompile"):
        first, second = EagerStance(), EagerStance()
        first.hold()
        second.hold()
        first.release()
        held = stance()
        second.release()
        assert [held, stance()] == ["force_eager", "fail_on_recompile"]


def test_a_hold_counts_once() -> None:
    """Holding twice is holding once, a release without a hold is nothing, and a hold can be taken again."""
    hold, other = EagerStance(), EagerStance()
    other.release()
    for _ in range(2):
        hold.hold()
        hold.hold()
        other.release()
        held = stance()
        hold.release()
        hold.release()
        assert [held, stance()] == ["force_eager", "default"]


def test_without_dynamo_nothing_is_done() -> None:
    """Where nothing has imported torch._dynamo a hold does not import it, which would take seconds."""
    code = (
        "import sys; from lightning_recorder.stance import EagerStance; hold = EagerStance(); hold.hold(); "
        "hold.release(); print('torch._dynamo' in sys.modules)"
    )
    root = Path(lightning_recorder.__file__).parents[1]
    assert subprocess.check_output([sys.executable, "-c", code], cwd=root, text=True) == "False\n"


# Taps on compiled models


@pytest.mark.parametrize("kind", [OutputTap, OutputGradientTap])
def test_hooks_on_a_compiled_model_fire_under_the_hold_only(kind: type[Tap]) -> None:
    """Hooks that are put on after the first compiled call fire under a hold and are silent without it."""
    net, compiled, _ = make()
    compiled(X).sum().backward()
    seen: list[str] = []
    tap = kind(Selection().resolve(net), lambda site, _: seen.append(site.name))
    with tap:
        compiled(X).sum().backward()
    assert seen == []
    hold = EagerStance()
    hold.hold()
    with tap:
        compiled(X).sum().backward()
    hold.release()
    assert sorted(seen) == ["0", "1", "2"]


def test_the_compiled_code_is_used_again() -> None:
    """After recorded steps the compiled code runs again, compiled once, with the results that it gave before."""
    net, compiled, counter = make()
    hold = EagerStance()
    seen: list[str] = []
    tap = OutputTap(Selection().resolve(net), lambda site, _: seen.append(site.name))
    results = []
    for step in range(6):
        recorded = step in (2, 4)
        if recorded:
            hold.hold()
            tap.attach()
        results.append(compiled(X))
        if recorded:
            tap.remove()
            hold.release()
    assert (counter.compiled, counter.runs, seen) == (1, 4, ["0", "1", "2"] * 2)
    assert all(torch.equal(result, results[0]) for result in results)


class Block(nn.Module):
    """Two layers with a forward of their own, since Module.compile passes over torch's own modules."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.act = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.inner(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["torch.compile", "Module.compile"])
def test_a_compiled_part_is_recorded_under_its_own_name(how: str) -> None:
    """The modules inside a compiled part are seen once each, under the names that they have without compilation."""
    counter = Counter()
    net = nn.Sequential(Block(), nn.Linear(2, 1))
    if how == "torch.compile":
        net = nn.Sequential(cast(nn.Module, torch.compile(net[0], backend=counter)), net[1])
    else:
        net[0].compile(backend=counter)
    net(X)
    seen: list[str] = []
    hold = EagerStance()
    hold.hold()
    with OutputTap(Selection("**").resolve(net), lambda site, _: seen.append(site.name)):
        net(X)
    hold.release()
    net(X)
    assert seen == ["0.inner", "0.act", "0", "1"]
    assert (counter.compiled, counter.runs) == (1, 2)


@pytest.mark.parametrize("kind", [OutputTap, OutputGradientTap])
def test_hooks_that_are_compiled_with_the_model_hand_over_nothing(kind: type[Tap]) -> None:
    """A tap that is on while a model is compiled records nothing of it, breaks no graph and changes no result."""
    net, compiled, counter = make()
    expected = net(X)
    seen: list[str] = []
    with kind(Selection().resolve(net), lambda site, _: seen.append(site.name)):
        result = compiled(X)
        result.sum().backward()
    assert torch.equal(result, expected)
    assert (counter.compiled, seen) == (1, [])
