"""Compiled modules run eagerly on the steps that are recorded, and compiled on the others."""

from __future__ import annotations

import copy
import gc
import pickle
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
    gc.collect()  # of taps that other tests have left on
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
def test_a_tap_on_a_compiled_model_sees_it(kind: type[Tap]) -> None:
    """Hooks that are put on after the first compiled call, which would never fire, do: the tap holds the stance."""
    net, compiled, _ = make()
    compiled(X).sum().backward()
    seen: list[str] = []
    with kind(Selection().resolve(net), lambda site, _: seen.append(site.name)):
        compiled(X).sum().backward()
    compiled(X).sum().backward()
    assert sorted(seen) == ["0", "1", "2"]


def test_the_compiled_code_is_used_again() -> None:
    """After recorded steps the compiled code runs again, compiled once, with the results that it gave before."""
    net, compiled, counter = make()
    seen: list[str] = []
    tap = OutputTap(Selection().resolve(net), lambda site, _: seen.append(site.name))
    results = []
    for step in range(6):
        if step in (2, 4):
            tap.attach()
        results.append(compiled(X))
        tap.remove()
    assert (counter.compiled, counter.runs, seen) == (1, 4, ["0", "1", "2"] * 2)
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_hold_that_is_forgotten_is_released() -> None:
    """When a hold, or a tap that was never taken off, is gone, compiled functions run compiled again."""
    hold = EagerStance()
    hold.hold()
    del hold
    assert stance() == "default"
    net, _, _ = make()
    OutputTap(Selection().resolve(net), print).attach()
    assert stance() == "force_eager"
    del net
    gc.collect()
    assert stance() == "default"


def test_a_forgotten_hold_may_be_collected_at_any_moment() -> None:
    """A hold that the garbage collector finds while another one is being taken does not wait for that one for ever."""
    code = (
        "import gc, torch, torch._dynamo\n"
        "from lightning_recorder.stance import EagerStance, _Shared\n"
        "other, forgotten = EagerStance(), EagerStance()\n"
        "other.hold(), forgotten.hold()\n"
        "cycle = [forgotten]\n"
        "cycle.append(cycle)\n"
        "del forgotten, cycle\n"
        "with _Shared.lock:\n"
        "    gc.collect()\n"
        "print(_Shared.holders)\n"
    )
    root = Path(lightning_recorder.__file__).parents[1]
    # Another process, which can be ended where it hangs.
    assert subprocess.check_output([sys.executable, "-c", code], cwd=root, text=True, timeout=120) == "1\n"


def test_a_tap_that_is_on_when_the_program_ends_says_nothing() -> None:
    """A program that ends with a tap still on ends in silence."""
    code = (
        "import torch, torch._dynamo\n"
        "from lightning_recorder import OutputTap\n"
        "tap = OutputTap({'m': torch.nn.ReLU()}, print)\n"
        "tap.attach()\n"
    )
    root = Path(lightning_recorder.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_a_copy_of_a_hold_holds_nothing() -> None:
    """A hold that was copied or pickled is released once."""
    hold = EagerStance()
    hold.hold()
    for twin in (copy.deepcopy(hold), pickle.loads(pickle.dumps(hold))):
        twin.release()
        del twin
    assert stance() == "force_eager"
    hold.release()


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
    with OutputTap(Selection("**").resolve(net), lambda site, _: seen.append(site.name)):
        net(X)
    net(X)
    assert seen == ["0.inner", "0.act", "0", "1"]
    assert (counter.compiled, counter.runs) == (1, 2)


@pytest.mark.parametrize("kind", [OutputTap, OutputGradientTap])
def test_a_model_that_is_to_be_compiled_under_a_tap_is_compiled_after_it(kind: type[Tap]) -> None:
    """A first call under a tap is recorded in eager mode, and the model is compiled at the first call without one."""
    net, compiled, counter = make()
    expected = net(X)
    seen: list[str] = []
    with kind(Selection().resolve(net), lambda site, _: seen.append(site.name)):
        result = compiled(X)
        result.sum().backward()
    assert torch.equal(result, expected)
    assert (counter.compiled, sorted(seen)) == (0, ["0", "1", "2"])
    compiled(X)
    assert (counter.compiled, len(seen)) == (1, 3)
