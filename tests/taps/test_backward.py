"""Gradients of the outputs of modules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_recorder.selection import Selection
from lightning_recorder.taps import OutputGradientTap, Site
from tests.taps.models import MODELS, Checkpointed, linear, make

Seen = list[tuple[Site, Tensor]]


def tap_on(module: nn.Module, seen: Seen) -> OutputGradientTap:
    """A tap on all submodules that copies what it hands over into a list."""
    return OutputGradientTap(Selection("**").resolve(module), lambda site, grad: seen.append((site, grad.clone())))


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_autograd_grad(name: str) -> None:
    """Each output tensor that takes part in the loss has its gradient handed over, that of the last call first."""
    module, x = make(name)
    shown: Seen = []

    def see(name: str, path: str, tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            shown.append((Site(name, path), tensor))
        return tensor

    torch.manual_seed(1)
    loss = module.reference(x, see)
    grads: tuple[Tensor | None, ...] = torch.autograd.grad(loss, [tensor for _, tensor in shown], allow_unused=True)
    expected = [(site, grad) for (site, _), grad in zip(shown, grads, strict=True) if grad is not None]

    seen: Seen = []
    torch.manual_seed(1)
    with tap_on(module, seen):
        module(x).backward()
    assert sorted(site for site, _ in seen) == sorted(site for site, _ in expected)
    for site in {site for site, _ in expected}:
        ours, theirs = ([grad for each, grad in stream if each == site] for stream in (seen, expected))
        torch.testing.assert_close(ours[::-1], theirs, rtol=1e-5, atol=1e-6)


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
    """Outputs that the loss does not use, frozen and integer ones and buffers are never handed over; a parameter is."""
    module, x = make(name)
    seen: Seen = []
    with tap_on(module, seen):
        module(x).backward()
    if name == "frozen":
        sites = [site for site in sites if site[0] != "act"]
    assert sorted({site for site, _ in seen}) == sorted(sites)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_autograd_there_is_nothing(mode: type[torch.no_grad] | type[torch.inference_mode]) -> None:
    """Under no_grad and in inference mode, as in validation, nothing is handed over and nothing raises."""
    module, x = make("in-place")
    seen: Seen = []
    with tap_on(module, seen), mode():
        module(x)
    assert seen == []


def test_a_frozen_model_has_no_gradients() -> None:
    """A model without trainable parameters is run without error and without a site."""
    module, x = make("plain")
    module.requires_grad_(False)
    seen: Seen = []
    with tap_on(module, seen):
        module(x)
    assert seen == []


def test_each_backward_pass_hands_over_its_own_gradients() -> None:
    """A gradient penalty sees both passes: that of autograd.grad inside the step and that of the loss after it."""
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
    taps = OutputGradientTap({"0": module[0], "1": module[1]}, lambda site, grad: seen.append((site, grad.clone())))
    with taps:
        h = module[0](x)
        penalised(h, module[1](h.tanh())).backward()
    assert [site.name for site, _ in seen] == ["1", "0", "1", "0"]
    for (_, ours), theirs in zip(seen, (*first, *second), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_two_losses_are_two_gradients() -> None:
    """Two backward passes through one graph hand over one gradient each and not their sum."""
    module = nn.Linear(2, 1)
    seen: Seen = []
    with OutputGradientTap({"m": module}, lambda site, grad: seen.append((site, grad.clone()))):
        y = module(torch.ones(1, 2))
        (y * 3).sum().backward(retain_graph=True)
        (y * 5).sum().backward()
    assert [(site.path, grad.tolist()) for site, grad in seen] == [("out", [[3.0]]), ("out", [[5.0]])]


def test_a_backward_pass_after_the_tap_is_not_seen() -> None:
    """A graph that was built under the tap hands over nothing when it is run after the tap was taken off."""
    module, x = make("plain")
    seen: Seen = []
    with tap_on(module, seen):
        loss = module(x)
    loss.backward()
    assert seen == []


def test_a_backward_pass_after_the_tap_was_put_on_again_is_not_seen() -> None:
    """Hooks that were taken off stay off when the tap is attached for another step."""
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
    """Under gradient checkpointing each step hands over each gradient once, however many steps there are."""
    torch.manual_seed(0)
    module, x = Checkpointed(use_reentrant), torch.randn(3, 4)
    seen: Seen = []
    with tap_on(module, seen):
        for _ in range(3):
            module(x).backward()
    names = [site.name for site, _ in seen]
    assert names[: len(names) // 3] * 3 == names
    assert sorted(names[: len(names) // 3]) == ["block", "block.0", "block.1", "stem"]


def test_transforms_are_passed_over() -> None:
    """Inside vmap and func.grad nothing is handed over, nothing raises, and the results stay as they are."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    x = torch.randn(3, 2)

    def loss(x: Tensor) -> Tensor:
        return net(x).sum()  # type: ignore[no-any-return]

    def transform() -> list[Tensor]:
        return [torch.func.grad(loss)(x[0]), torch.func.vmap(torch.func.grad(loss))(x), torch.func.jacrev(net)(x[0])]

    expected = transform()
    seen: Seen = []
    with tap_on(net, seen):
        assert all(torch.equal(*pair) for pair in zip(transform(), expected, strict=True))
    assert seen == []
