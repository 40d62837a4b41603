"""Tests of the taps for output gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_recorder.selection import Selection
from lightning_recorder.taps import InputGradientTap, OutputGradientTap, Tap
from tests import forks
from tests.taps import references
from tests.taps.models import Checkpointed, Precision, each_model, each_precision, linear, make
from tests.taps.references import Seen, assert_seen, copies_into


def tap_on(module: nn.Module, seen: Seen) -> OutputGradientTap:
    """Return a tap on all submodules that copies each tensor into a list."""
    return OutputGradientTap(Selection("**").resolve(module), copies_into(seen))


@each_model
@each_precision
def test_gradients_are_those_of_autograd_grad(name: str, precision: Precision) -> None:
    """The gradient of each output that contributes to the loss is recorded, last call first."""
    module, x = make(name, precision.dtype)
    seen: Seen = []
    torch.manual_seed(1)
    with tap_on(module, seen):
        loss = precision.forward(module, x)
        seen.clear()  # discard the backward pass that "force" runs in its forward pass
        loss.backward()
    assert_seen(seen, references.output_gradients(name, precision), precision)


@pytest.mark.parametrize(
    ("name", "sites"),
    [
        ("attention", [("stem", "out"), ("attn", "out[0]")]),
        ("views", [("stem", "out"), ("split", "out[0]"), ("rows", "out[1]")]),
        ("frozen", [("act", "out"), ("head", "out")]),
        ("whole numbers", [("embed", "out"), ("norm", "out"), ("drop", "out")]),
        ("parameter", [("stem", "out"), ("weight", "out")]),
        ("reentrant checkpoint", [("stem", "out"), ("block.0", "out"), ("block.1", "out"), ("block", "out")]),
    ],
)
def test_what_has_no_gradient_is_no_site(name: str, sites: list[tuple[str, str]]) -> None:
    """Outputs that the loss does not use, frozen and integer outputs and buffers are not recorded; parameters are."""
    module, x = make(name)
    seen: Seen = []
    with tap_on(module, seen):
        module(x).backward()
    if name == "frozen":
        sites = [site for site in sites if site[0] != "act"]
    assert sorted({site for site, _ in seen}) == sorted(sites)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_autograd_there_is_nothing(mode: type[torch.no_grad] | type[torch.inference_mode]) -> None:
    """With no_grad and in inference mode, as in validation, nothing is recorded or raised."""
    module, x = make("in-place")
    seen: Seen = []
    with tap_on(module, seen), mode():
        module(x)
    assert seen == []


def test_a_frozen_model_has_no_gradients() -> None:
    """A model without trainable parameters runs without errors and without sites."""
    module, x = make("plain")
    module.requires_grad_(False)
    seen: Seen = []
    with tap_on(module, seen):
        module(x)
    assert seen == []


def test_each_backward_pass_hands_over_its_own_gradients() -> None:
    """With a gradient penalty both passes are recorded: torch.autograd.grad inside the step and the loss after it."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    x = torch.randn(3, 4)

    def outputs() -> tuple[Tensor, Tensor]:
        h = linear(module[0], x)
        return h, linear(module[1], h.tanh())

    def penalised(h: Tensor, y: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(y.square().sum(), h, create_graph=True)
        return y.sum() + slope.square().sum()

    h, y = outputs()
    first = torch.autograd.grad(y.square().sum(), [y, h], retain_graph=True)
    second = torch.autograd.grad(penalised(h, y), [y, h])

    seen: Seen = []
    taps = OutputGradientTap({"0": module[0], "1": module[1]}, copies_into(seen))
    with taps:
        h = module[0](x)
        penalised(h, module[1](h.tanh())).backward()
    assert [site.name for site, _ in seen] == ["1", "0", "1", "0"]
    for (_, ours), theirs in zip(seen, (*first, *second), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_two_losses_are_two_gradients() -> None:
    """Two backward passes through one graph record separate gradients, not their sum."""
    module = nn.Linear(2, 1)
    seen: Seen = []
    with OutputGradientTap({"m": module}, copies_into(seen)):
        y = module(torch.ones(1, 2))
        (y * 3).sum().backward(retain_graph=True)
        (y * 5).sum().backward()
    assert [(site.path, grad.tolist()) for site, grad in seen] == [("out", [[3.0]]), ("out", [[5.0]])]


def test_a_backward_pass_after_the_tap_is_not_seen() -> None:
    """A graph that was built while the tap was attached records nothing after its removal."""
    module, x = make("plain")
    seen: Seen = []
    with tap_on(module, seen):
        loss = module(x)
    loss.backward()
    assert seen == []


def test_a_backward_pass_after_the_tap_was_put_on_again_is_not_seen() -> None:
    """Removed hooks stay inactive when the tap is attached for another step."""
    module, x = make("plain")
    seen: Seen = []
    tap = tap_on(module, seen)
    with tap:
        loss = module(x)
    with tap:
        loss.backward()
    assert seen == []


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_step_can_be_repeated(use_reentrant: bool) -> None:
    """With gradient checkpointing each step records each gradient once, for any number of steps."""
    torch.manual_seed(0)
    module, x = Checkpointed(use_reentrant), torch.randn(3, 4)
    seen: Seen = []
    with tap_on(module, seen):
        for _ in range(3):
            module(x).backward()
    names = [site.name for site, _ in seen]
    assert names[: len(names) // 3] * 3 == names
    assert sorted(names[: len(names) // 3]) == ["block", "block.0", "block.1", "stem"]


def test_gradients_of_many_losses_at_once_are_skipped() -> None:
    """A backward pass of torch.autograd.grad with is_grads_batched is ignored, and the next one is recorded."""
    module = nn.Linear(2, 2)
    x = torch.ones(1, 2)
    seen: Seen = []
    with OutputGradientTap({"m": module}, copies_into(seen), strict=True):
        y = module(x)
        torch.autograd.grad(y[0], module.bias, torch.eye(2), is_grads_batched=True, retain_graph=True)
        y.sum().backward()
    assert [grad.tolist() for _, grad in seen] == [[[1.0, 1.0]]]


LONG = """
import torch, warnings
from torch import nn
from lightning_recorder.taps import InputGradientTap, OutputGradientTap

class Loop(nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x, length):
        for _ in range(length):
            x = self.cell(x)
        return x

net = Loop(nn.Tanh() if CALLS else torch.tanh)
x = torch.ones(1, requires_grad=True)
seen = []
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    with TAP(dict(net.named_modules()), lambda site, grad: seen.append(site)):
        for length, backward in (50_000, False), (50_000, True), (100, True):
            seen.clear()
            loss = net(x, length)
            if backward:
                loss.backward()
            del loss
            print(len(seen), flush=True)
print([str(each.message) for each in warned])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tap", "calls", "recorded", "later"),
    [
        ("OutputGradientTap", True, 20_000, 101),
        ("InputGradientTap", True, 20_000, 101),
        ("InputGradientTap", False, 0, 1),
    ],
    ids=["outputs of calls", "inputs of calls", "input of a loop"],
)
def test_a_long_chain_of_operations_is_recorded_in_part(
    tap: str, calls: bool, recorded: int, later: int, tmp_path: Path
) -> None:
    """For 50,000 operations in a row only the first 20,000 are recorded, with one warning, and the process survives.

    A graph after one that was not differentiated, and a short one after one that was, are recorded again.

    Without the limit, torch 2.13 ends the process from 45,000 operations on.

    A module with more than 20,000 operations has no gradient of its input.
    """
    code = LONG.replace("TAP(", f"{tap}(").replace("CALLS", str(calls))
    *counts, warned = forks.output_of("-c", code, folder=tmp_path).splitlines()
    assert list(map(int, counts)) == [0, recorded, later]
    assert warned.startswith(f"['{tap} follows 20,000 operations of the living graphs")
    assert warned.count(tap) == 1


SEVERAL = """
import torch, warnings
from torch import nn
from lightning_recorder import BackwardInput, BackwardOutput

class Block(nn.Module):
    def forward(self, x):
        for _ in range(5000):
            x = x.tanh()
        return x

blocks = nn.Sequential(*[Block() for _ in range(12)])
cells = nn.ModuleList([nn.Tanh() for _ in range(4)])
warnings.simplefilter("ignore")
recorder = BackwardInput(reduction=torch.add).children(blocks)
blocks(torch.zeros(1, requires_grad=True)).sum().backward()
print(sum(recorder.calls(name) for name in recorder.names))
recorder = BackwardOutput(reduction=torch.add).children(cells)
x = torch.zeros(1, requires_grad=True)
for step in range(60_000):
    x = cells[step % 4](x)
x.sum().backward()
print(sum(recorder.calls(name) for name in recorder.names))
"""


@pytest.mark.slow
def test_many_taps_on_one_graph_look_at_no_more_of_it_than_one(tmp_path: Path) -> None:
    """Recorders with one tap per module visit 20,000 operations together, and the process survives."""
    in_blocks, in_cells = map(int, forks.output_of("-c", SEVERAL, folder=tmp_path).split())
    assert in_blocks == 4  # of 5,000 operations each
    assert 19_000 <= in_cells <= 20_000  # a few nodes may remain from the previous graph


@pytest.mark.parametrize("kind", [OutputGradientTap, InputGradientTap])
def test_graphs_that_are_gone_do_not_count(kind: type[Tap]) -> None:
    """After any number of calls without a backward pass, such as rollouts, calls with one are still recorded."""
    module = nn.Linear(2, 2)
    seen: Seen = []
    x = torch.ones(1, 2, requires_grad=True)
    with kind({"m": module}, lambda site, grad: seen.append((site, grad))):
        for _ in range(21_000):
            module(x)
        for _ in range(5):
            module(x).sum().backward()
    assert len(seen) == 5
