"""Tests of the counters of a model and its hooks, which a step that is run again must see as they were."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import Trainer
from torch import Tensor, nn

from lightning_recorder import StepWatch
from lightning_recorder.watch.kept import Counters
from tests.watch.nets import Planted
from tests.watch.test_planted import fit

AT = 5
Reader = Callable[[], int]
calls = 0


def spoiled(output: Tensor, count: int) -> Tensor:
    return output * math.nan if count == AT + 1 else output


def closure(module: nn.Module) -> Reader:
    count = 0

    def hook(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return spoiled(output, count)

    module.register_forward_hook(hook)
    return lambda: count


def container(module: nn.Module) -> Reader:
    counts = {"calls": [0]}

    def hook(counts: dict[str, list[int]], _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        counts["calls"][0] += 1
        return spoiled(output, counts["calls"][0])

    module.register_forward_hook(partial(hook, counts))
    return lambda: counts["calls"][0]


def callable_object(module: nn.Module) -> Reader:
    class Hook:
        def __init__(self) -> None:
            self.state = SimpleNamespace(count=0)

        def __call__(self, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
            self.state.count += 1
            return spoiled(output, self.state.count)

    hook = Hook()
    module.register_forward_hook(hook)
    return lambda: hook.state.count


def replaced_forward(module: Any) -> Reader:
    forward = module.forward
    count = [0]

    def counted(x: Tensor) -> Tensor:
        count[0] += 1
        return spoiled(forward(x), count[0])

    module.forward = counted
    return lambda: count[0]


def global_variable(module: nn.Module) -> Reader:
    global calls  # noqa: PLW0603 - such a variable is what is tested
    calls = 0

    def hook(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        global calls  # noqa: PLW0603 - such a variable is what is tested
        calls += 1
        return spoiled(output, calls)

    module.register_forward_hook(hook)
    return lambda: calls


def attribute(module: Any) -> Reader:
    net: Any = module.owner[0]
    net.calls = 0

    def hook(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        net.calls += 1
        return spoiled(output, net.calls)

    module.register_forward_hook(hook)
    return lambda: int(net.calls)


KINDS = (closure, container, callable_object, replaced_forward, global_variable, attribute)


@pytest.mark.parametrize("plant", KINDS)
def test_a_fault_at_a_counted_call_is_named(plant: Callable[[nn.Module], Reader], tmp_path: Path) -> None:
    """A module that fails at its n-th call fails again when the step is run again, and its count is not changed."""
    model, watch = Planted("mlp"), StepWatch(strict=True, incidents=False)
    module: Any = model.get_submodule("net.1")
    module.owner = [model]
    count = plant(module)
    trainer: Trainer = fit(model, tmp_path, watch)
    line = spoiled.__code__.co_firstlineno + 1
    where = f"step {AT} (batch {AT} of epoch 0): mul at watch/test_counters.py:{line}; its inputs are finite"
    found = [re.sub(r" \([^()]* to [^()]*\)$", "", each.verdict.partition(" first ")[2]) for each in watch.found]
    assert found == [f"in the forward pass of net.1 at {where}"]
    assert count() == trainer.global_step


def test_only_numbers_that_change_are_kept() -> None:
    """The first batch keeps all numbers; from the second one on, those that have changed since."""
    model: Any = Planted("mlp")
    model.fixed, model.moving, model.history = 3, 1, [0.5, 1.5]
    counters = Counters(model.modules())
    assert len(counters.keep()) >= 4
    model.moving, model.history[1] = 2, 2.5
    assert [value for _, value in counters.keep()] == [2, 2.5]
    model.moving = 7
    kept = counters.keep()
    assert [value for _, value in kept] == [7, 2.5]
    model.moving, model.history = 9, [4.0, 4.0]
    for slot, value in kept:
        slot.write(value)
    assert model.moving == 7
    assert model.history == [4.0, 4.0]


def test_what_is_gone_is_ignored() -> None:
    """A number that was removed has the value None, and writing it back does nothing."""
    model: Any = Planted("mlp")
    model.counts = {"calls": 1}
    kept = Counters(model.modules()).keep()
    model.counts.clear()
    for slot, value in kept:
        slot.write(value)
    assert model.counts == {}


@pytest.mark.parametrize(("lists", "is_found"), [(1, True), (6, True), (7, False)])
def test_numbers_in_six_lists_are_found(lists: int, is_found: bool) -> None:
    """The search ends there, so that a large structure costs little."""
    model: Any = nn.Identity()
    model.counts = [3.25]
    for _ in range(lists - 1):
        model.counts = [model.counts]
    assert (3.25 in [value for _, value in Counters(model.modules()).keep()]) is is_found
