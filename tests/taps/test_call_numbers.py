"""Tests of the numbers of gradients, which are those of the calls in the forward pass."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_recorder.taps import InputGradientTap, InputTap, OutputGradientTap, OutputTap, Tap
from tests.taps.references import Seen, copies_into

Calls = Callable[[nn.Module, Tensor], list[Tensor]]


def plain(module: nn.Module, x: Tensor) -> list[Tensor]:
    return [module(x), module(2 * x), module(3 * x)]


def after_target(module: nn.Module, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        module(x)
    return [module(2 * x), module(3 * x)]


def before_target(module: nn.Module, x: Tensor) -> list[Tensor]:
    first = reentrant(module, x)
    with torch.no_grad():
        module(2 * x)
    return [first, module(3 * x)]


def reentrant(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    result: Tensor = checkpoint(function, x, use_reentrant=True)
    return result


def in_turns(module: nn.Module, x: Tensor) -> list[Tensor]:
    return [reentrant(module, x), module(2 * x), reentrant(module, 3 * x), reentrant(module, 4 * x), module(5 * x)]


def several(module: nn.Module, x: Tensor) -> list[Tensor]:
    def run(x: Tensor) -> Tensor:
        return torch.cat([module(x), module(2 * x)])

    return [reentrant(run, x), reentrant(run, 3 * x), module(7 * x)]


def nested(module: nn.Module, x: Tensor) -> list[Tensor]:
    def run(x: Tensor) -> Tensor:
        return torch.cat([module(x), reentrant(module, 2 * x), module(3 * x), reentrant(module, 4 * x)])

    return [module(9 * x), reentrant(run, x), module(11 * x), reentrant(run, 5 * x)]


def recomputed(module: nn.Module, x: Tensor) -> list[Tensor]:
    def run(x: Tensor) -> Tensor:
        result: Tensor = checkpoint(module, x, use_reentrant=False)
        return result

    return [run(x), module(2 * x), run(3 * x)]


def in_two_passes(module: nn.Module, x: Tensor) -> list[Tensor]:
    """Run a backward pass between the calls, as a GAN does."""
    for first in (1, 4):
        loss(several(module, first * x)).backward()
    return in_turns(module, 9 * x)


def loss(outputs: list[Tensor]) -> Tensor:
    """Return a loss with respect to which the gradient of each output is the output itself."""
    return torch.stack([output.square().sum() / 2 for output in outputs]).sum()


def same(module: nn.Linear) -> nn.Linear:
    """Let a layer return its input."""
    nn.init.eye_(module.weight)
    return module


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # of a nested checkpoint
@pytest.mark.parametrize("in_thread", [False, True])  # as on a GPU, whose thread has sequence numbers of its own
@pytest.mark.parametrize("kinds", [(InputTap, InputGradientTap), (OutputTap, OutputGradientTap)])
@pytest.mark.parametrize(
    ("calls", "target"),
    [
        (plain, None),
        (after_target, 1),
        (before_target, 2),
        (in_turns, None),
        (several, None),
        (nested, None),
        (recomputed, None),
        (in_two_passes, None),
    ],
)
def test_a_gradient_has_the_number_of_its_call(
    calls: Calls, target: int | None, kinds: tuple[type[Tap], type[Tap]], in_thread: bool
) -> None:
    """The gradient of each call, which equals its output here, has the path of that output, except for a target."""
    module = same(nn.Linear(2, 2, bias=False))
    found: tuple[Seen, Seen] = ([], [])
    taps = [kind({"m": module}, copies_into(seen)) for kind, seen in zip(kinds, found, strict=True)]
    for tap in taps:
        tap.per_call = True
    for _ in range(2):  # numbers start anew when a tap is attached
        for seen in found:
            seen.clear()
        with taps[0], taps[1]:
            backward: Callable[[], None] = loss(calls(module, torch.tensor([[1.0, -1.0]], requires_grad=True))).backward
            if in_thread:
                thread = threading.Thread(target=backward)
                thread.start()
                thread.join()
            else:
                backward()
        expected = {site: tensor.tolist() for number, (site, tensor) in enumerate(found[0], 1) if number != target}
        assert len(found[1]) == len(expected)
        assert {site: tensor.tolist() for site, tensor in found[1]} == expected


def test_a_repeated_backward_pass_has_the_same_numbers() -> None:
    """A checkpoint that repeats its calls twice gives them the same numbers both times."""
    module = same(nn.Linear(2, 2, bias=False))
    seen: list[tuple[str, float]] = []
    tap = OutputGradientTap({"m": module}, lambda site, grad: seen.append((site.path, grad[0, 0].item())))
    tap.per_call = True
    with tap:
        total = loss(in_turns(module, torch.ones(1, 2, requires_grad=True)))
        total.backward(retain_graph=True)
        total.backward()
    paths = {"out": 1.0, "out#2": 2.0, "out#3": 3.0, "out#4": 4.0, "out#5": 5.0}
    assert sorted(seen) == sorted([*paths.items()] * 2)


class Raising(nn.Module):
    """Calls itself once, and raises in every third call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor, depth: int = 1) -> Tensor:
        self.calls += 1
        if self.calls % 3 == 0:
            raise ValueError("every third call")
        return self(2 * x, depth - 1) if depth else 3 * x


@pytest.mark.parametrize("after", [False, True])
def test_calls_that_raise_or_call_the_module_again_are_counted(after: bool) -> None:
    """The inputs, the outputs and their gradients of a call have one number, in the order in which the calls begin."""
    module = Raising()
    seen: list[dict[str, float]] = []

    def keep(tap: Callable[..., Tap], **options: bool) -> Tap:
        found: dict[str, float] = {}
        seen.append(found)
        made = tap({"m": module}, lambda site, tensor: found.update({site.path: tensor.item()}), **options)
        made.per_call = True
        return made

    results = []
    with keep(InputTap, after=after), keep(OutputTap), keep(OutputGradientTap), keep(InputGradientTap):
        for number in (1.0, 10.0, 100.0, 1000.0):
            with suppress(ValueError):
                results.append(module(torch.tensor(number, requires_grad=True)))
        torch.stack(results).sum().backward()
    raised = {} if after else {"in[0]#3": 10.0, "in[0]#6": 1000.0}
    assert seen == [
        {"in[0]": 1.0, "in[0]#2": 2.0, "in[0]#4": 100.0, "in[0]#5": 200.0, **raised},
        {"out": 6.0, "out#2": 6.0, "out#4": 600.0, "out#5": 600.0},
        {"out": 1.0, "out#2": 1.0, "out#4": 1.0, "out#5": 1.0},
        {"in[0]": 6.0, "in[0]#2": 3.0, "in[0]#4": 6.0, "in[0]#5": 3.0},
    ]
