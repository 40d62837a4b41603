"""Tests of the gradients of outputs and inputs that in-place operations change, compared with those of copies."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_recorder.taps import InputGradientTap, OutputGradientTap


class Attention(nn.MultiheadAttention):
    """Self-attention that returns only its output."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # the signature in torch has three tensors
        return super().forward(x, x, x)[0]


class Chunks(nn.Module):
    """Returns the halves of the output of a linear layer as views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y[..., :4], y[..., 4:]


def first(output: Any) -> Tensor:
    """Return the first output of a module."""
    return output if isinstance(output, Tensor) else output[0]


class Whole(nn.Module):
    """Returns integers from 0 to 4."""

    def forward(self, x: Tensor) -> Tensor:
        return x.detach().abs().mul(3).long().clamp(max=4)


class Transposed(nn.Module):
    """Returns its input with two dimensions swapped."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear 2-D": (lambda: nn.Linear(4, 4), (3, 4)),
    "linear 3-D": (lambda: nn.Linear(4, 4), (2, 3, 4)),
    "linear 4-D": (lambda: nn.Linear(4, 4), (2, 2, 3, 4)),
    "layer norm": (lambda: nn.LayerNorm(4), (2, 3, 4)),
    "embedding": (lambda: nn.Sequential(Whole(), nn.Embedding(5, 4)), (2, 3)),
    "conv": (lambda: nn.Conv1d(3, 3, 1), (2, 3, 4)),
    "conv of one": (lambda: nn.Conv1d(3, 3, 1), (3, 4)),
    "attention": (lambda: Attention(4, 2), (2, 3, 4)),
    "batched attention": (lambda: Attention(4, 2, batch_first=True), (2, 3, 4)),
    "flatten": (lambda: nn.Flatten(1), (2, 3, 4)),
    "transposed": (Transposed, (2, 3, 4)),
    "chunks": (Chunks, (2, 3, 4)),
}


def in_half(y: Tensor) -> Tensor:
    half = y[:, 0]
    half.mul_(3)
    y[:, 0] += 1
    return y


def through_base(y: Tensor) -> Tensor:
    if y._base is None:
        return y.mul_(2)
    y._base.mul_(2)
    return y


def indexed(y: Tensor) -> Tensor:
    y[y.detach() > 0] = 0.5
    return y


def gated(y: Tensor) -> Tensor:
    gate = y.sigmoid()
    y += gate
    return y


def dropped(y: Tensor) -> Tensor:
    torch.manual_seed(2)
    return F.dropout(y, 0.5, training=True, inplace=True)


def copied(y: Tensor) -> Tensor:
    return y.copy_(y.detach() * 2)


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda y: y,
    "+=": lambda y: y.add_(torch.linspace(0, 1, y.numel()).view(y.shape)),
    "mul_": lambda y: y.mul_(torch.linspace(0.5, 2, y.numel()).view(y.shape)),
    "ReLU(inplace)": lambda y: F.relu(y, inplace=True),
    "dropout(inplace)": dropped,
    "masked_fill_": lambda y: y.masked_fill_(y.detach() > 0, 0.0),
    "index": indexed,
    "slice": in_half,
    "base": through_base,
    "two in a row": lambda y: y.mul_(2).tanh_(),
    "gate": gated,
    "copy_": copied,
}


def step(
    layer: nn.Module, shape: tuple[int, ...], change: Callable[[Tensor], Tensor], how: str
) -> tuple[list[Tensor], list[Tensor]]:
    """Run a step, and return the gradients of the first output and of the parameters.

    Args:
        layer: The layer, which is copied.
        shape: The shape of its input.
        change: The in-place operation on its output.
        how: ``"tap"``, ``"clone"`` or ``"bare"``.
    """
    layer = copy.deepcopy(layer)
    torch.manual_seed(1)
    scale = torch.ones((), requires_grad=True)
    seen: list[Tensor] = []

    def run() -> None:
        y = first(layer(torch.randn(shape) * scale))
        if how == "clone":
            y = y.clone()
            y.register_hook(lambda grad: seen.append(grad.clone()))
        change(y).sin().sum().backward()

    if how == "tap":

        def receive(site: Any, grad: Tensor) -> None:
            if site.path in ("out", "out[0]"):
                seen.append(grad.clone())

        with OutputGradientTap({"layer": layer}, receive, strict=True):
            run()
    else:
        run()
    return seen, [each.grad for each in (scale, *layer.parameters()) if each.grad is not None]


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("change", CHANGES)
def test_an_output_has_the_gradient_of_a_copy(layer: str, change: str) -> None:
    """The gradient is bitwise that of the original output, and the parameter gradients equal those without the tap."""
    make, shape = LAYERS[layer]
    torch.manual_seed(0)
    module = make()
    seen, grads = step(module, shape, CHANGES[change], "tap")
    expected, _ = step(module, shape, CHANGES[change], "clone")
    _, bare = step(module, shape, CHANGES[change], "bare")
    assert len(seen) == len(expected) == 1
    assert torch.equal(seen[0], expected[0])
    assert len(grads) == len(bare)
    assert all(map(torch.equal, grads, bare))


@pytest.mark.parametrize(
    "change",
    [lambda y: y.detach().mul_(2), lambda y: torch.no_grad()(y.mul_)(2)],
    ids=["detached", "no_grad"],
)
@pytest.mark.parametrize("before", [False, True])
def test_a_change_outside_autograd_leaves_the_gradient(change: Callable[[Tensor], object], before: bool) -> None:
    """An output that is written to without autograd has the gradient of all its uses, before and after."""

    def loss(y: Tensor) -> Tensor:
        sum_before = y.sum() if before else 0
        change(y)
        return (y * 3).sum() + sum_before

    seen: list[Tensor] = []
    with OutputGradientTap({"m": (layer := nn.Linear(2, 2))}, lambda _, grad: seen.append(grad.clone()), strict=True):
        loss(layer(torch.ones(2, 2, 2))).backward()
    assert [grad.unique().tolist() for grad in seen] == [[4.0 if before else 3.0]]


def test_other_uses_of_the_base_do_not_count() -> None:
    """The gradient of a flattened tensor excludes other uses of its base, before and after the change."""
    seen: list[list[list[float]]] = []
    x = torch.ones(1, 2, 1, requires_grad=True) * 1
    flatten = nn.Flatten()
    with OutputGradientTap({"m": flatten}, lambda _, grad: seen.append(grad.tolist()), strict=True):
        beside = (x * 100).sum()
        y = flatten(x)
        beside = beside + (x * 1000).sum()
        y.mul_(2)
        loss = (y * 3).sum()
        del y
        (loss + beside).backward()
    assert seen == [[[6.0, 6.0]]]


def test_an_error_in_compiled_code_loses_no_later_gradient() -> None:
    """After an error in compiled code, gradients are recorded as before.

    torch then evaluates Python calls in another way, which adds a reference to each argument.
    """

    def recorded() -> Tensor:
        seen: list[Tensor] = []
        with OutputGradientTap({"linear": linear}, lambda site, grad: seen.append(grad), strict=True):
            rows = linear(x)
            flat = rows.flatten(1)
            flat[:, :4].mul_(2)
            flat.sum().backward()
        return seen[0]

    torch.manual_seed(0)
    linear, x = nn.Linear(4, 4), torch.randn(2, 3, 4)
    before = recorded()
    failing = torch.compile(lambda x: x @ torch.ones(3, 1), backend="eager")
    with pytest.raises(RuntimeError):
        failing(torch.ones(2, 2))
    assert torch.equal(recorded(), before)


def test_a_change_of_the_base_after_the_last_use_does_not_count() -> None:
    """In ``x += branch(view(x))`` the view has only the gradient through the branch."""
    seen: list[list[list[float]]] = []
    x = torch.ones(1, 2, 1, requires_grad=True) * 1
    flatten = nn.Flatten()
    with OutputGradientTap({"m": flatten}, lambda _, grad: seen.append(grad.tolist()), strict=True):
        x += (flatten(x) * 5).unsqueeze(-1)
        (x * 3).sum().backward()
    assert seen == [[[15.0, 15.0]]]


def test_what_is_not_found_is_named() -> None:
    """After a change through a view of the output, nothing is recorded, and ``changed_in_place`` names the module."""
    seen: list[Tensor] = []
    x = torch.ones(1, 2, 1, requires_grad=True) * 1
    flatten = nn.Flatten()
    tap = OutputGradientTap({"m": flatten}, lambda _, grad: seen.append(grad), strict=True)
    with tap:
        flatten(x)[:, 0].mul_(3).sum().backward()
    assert (seen, tap.changed_in_place, tap.without_gradient) == ([], {"m"}, set())


@pytest.mark.parametrize("change", [False, True])
def test_hooks_of_others_are_called(change: bool) -> None:
    """A hook of the model on an output runs and can be removed, before and after a change."""
    seen: list[str] = []
    flatten = nn.Flatten()
    modules: dict[str, nn.Module] = {"flatten": flatten, "around": nn.Sequential(flatten)}
    with OutputGradientTap(modules, lambda site, _: seen.append(site.name), strict=True):
        x = torch.ones(1, 2, 1, requires_grad=True) * 1
        y = modules["around"](x)
        y.register_hook(lambda _: seen.append("early"))
        y.register_hook(lambda _: seen.append("never")).remove()
        if change:
            y.mul_(2)
            y.register_hook(lambda _: seen.append("late"))
        y.sum().backward()
    assert sorted(seen) == (["late"] if change else ["around", "early", "flatten"])


def test_two_modules_that_return_one_view_have_a_gradient_each() -> None:
    """The gradient is recorded both for a module and for a parent that returns the same view."""
    seen: list[tuple[str, list[list[float]]]] = []
    flatten = nn.Flatten()
    modules: dict[str, nn.Module] = {"flatten": flatten, "around": nn.Sequential(flatten)}
    with OutputGradientTap(modules, lambda site, grad: seen.append((site.name, grad.tolist())), strict=True):
        x = torch.ones(1, 2, 1, requires_grad=True) * 1
        y = modules["around"](x)
        z = y * 5
        y.mul_(2)
        (y.sum() + z.sum()).backward()
    assert seen == [("flatten", [[7.0, 7.0]]), ("around", [[7.0, 7.0]])]


def test_two_backward_passes_have_a_gradient_each() -> None:
    """Each backward pass through a retained graph records its own gradient."""
    seen: list[float] = []
    layer = nn.Linear(2, 2)
    with OutputGradientTap({"m": layer}, lambda _, grad: seen.append(grad.mean().item()), strict=True):
        y = layer(torch.ones(2, 2, 2))
        y.mul_(2)
        (y * 3).sum().backward(retain_graph=True)
        (y * 5).sum().backward()
    assert seen == [6.0, 10.0]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_block_has_the_gradient_once(use_reentrant: bool) -> None:
    """With gradient checkpointing the gradient of an output changed in place is recorded once per step."""
    seen: list[float] = []
    layer = nn.Linear(2, 2)
    x = torch.ones(2, 2, 2, requires_grad=True)
    with OutputGradientTap({"m": layer}, lambda _, grad: seen.append(grad.mean().item()), strict=True):
        for _ in range(2):
            y = checkpoint(lambda x: layer(x).mul_(3), x, use_reentrant=use_reentrant)
            y.sum().backward()
    assert seen == [3.0, 3.0]


def test_a_scaled_loss_under_autocast() -> None:
    """With autocast and a scaled loss the gradient equals that of a copy, in the dtype of the output."""
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 4), torch.randn(2, 3, 4)
    seen: list[Tensor] = []
    with torch.autocast("cpu", torch.bfloat16):
        copied = layer(x).clone()
        copied.retain_grad()
        (F.relu(copied * 1) * 1024).sum().backward()
        with OutputGradientTap({"m": layer}, lambda _, grad: seen.append(grad.clone()), strict=True):
            (F.relu(layer(x), inplace=True) * 1024).sum().backward()
    assert copied.grad is not None
    assert [grad.dtype for grad in seen] == [torch.bfloat16]
    assert torch.equal(seen[0], copied.grad)


@pytest.mark.parametrize("kind", [OutputGradientTap, InputGradientTap])
@pytest.mark.parametrize("backward", [False, True])
def test_nothing_outlives_the_graph(kind: type[OutputGradientTap] | type[InputGradientTap], backward: bool) -> None:
    """Views, bases and their nodes are freed with the graph, without garbage collection, even with the tap attached."""
    layers = (nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Linear(2, 2), nn.Flatten(), nn.ELU(1.0, inplace=True))
    modules: dict[str, nn.Module] = {str(number): layer for number, layer in enumerate(layers)}
    alive: list[weakref.ref[Any]] = []
    gc.collect()
    gc.disable()
    try:
        with kind(modules, lambda *_: None, strict=True):
            y = torch.ones(2, 2, 2, requires_grad=True) * 1
            for module in modules.values():
                y = module(y)
                alive += [weakref.ref(y), weakref.ref(y._base if y._base is not None else y)]
            loss = y.sum()
            if backward:
                loss.backward()
            del y, loss
            assert [each() for each in alive] == [None] * len(alive)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("change", "slope"),
    [
        (lambda x: x.mul_(3), 3.0),
        (lambda x: F.relu(x, inplace=True) * 2, 2.0),
        (lambda x: (x * 5) + x.mul_(3), 8.0),
        (lambda x: x.add_(x), 2.0),
        (lambda x: (x.mul_(2), x.add_(1), x * x)[2], 12.0),
        (lambda x: (torch.no_grad()(x.mul_)(2), x * 7)[1], 7.0),
    ],
    ids=["mul_", "relu_", "a use before", "add_ of itself", "three operations", "no_grad"],
)
def test_an_input_that_is_a_view_has_the_gradient_of_what_it_was(
    change: Callable[[Tensor], Tensor], slope: float
) -> None:
    """The gradient of a view that a module changes in place excludes other uses of the base."""

    class Changes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return change(x)

    module = Changes()
    seen: list[tuple[str, list[float]]] = []
    base = torch.ones(3, requires_grad=True) * 1
    beside = (base * 100).sum()
    with InputGradientTap({"m": module}, lambda site, grad: seen.append((site.path, grad.tolist())), strict=True):
        (module(base[1:]).sum() + beside).backward()
    assert seen == [("in[0]", [slope, slope])]


OPERATIONS: list[Callable[[Tensor], Tensor]] = [
    lambda y: y.mul_(1.5),
    lambda y: F.relu(y, inplace=True),
    lambda y: y + 0.25,
    lambda y: y.transpose(0, 1),
    lambda y: y.transpose(0, 1).mul_(0.5).transpose(0, 1),
    lambda y: y.add_(y.sin()),
    lambda y: (y[0].add_(1.0), y)[1],
    lambda y: (y[..., 1:].mul_(2.0), y)[1],
    lambda y: y[..., :2].exp_(),
    lambda y: (y.flatten().tanh_() if y.is_contiguous() else y.tanh_(), y)[1],
    lambda y: y.chunk(2, dim=-1)[0] * 2,
    lambda y: y.sigmoid_(),
]


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["linear 3-D", "linear 4-D", "conv of one"]),
    st.lists(st.sampled_from(OPERATIONS), max_size=6),
)
def test_random_programs_have_the_gradient_of_a_copy(layer: str, operations: list[Callable[[Tensor], Tensor]]) -> None:
    """For any views and in-place operations the gradient equals that of a copy, and the parameters have theirs."""
    make, shape = LAYERS[layer]
    torch.manual_seed(0)
    module = make()

    def change(y: Tensor) -> Tensor:
        for operation in operations:
            y = operation(y)
        return y

    try:
        _, bare = step(module, shape, change, "bare")
    except RuntimeError:  # the next operation overwrites a tensor that the gradient of this one needs
        reject()
    seen, grads = step(module, shape, change, "tap")
    expected, _ = step(module, shape, change, "clone")
    torch.testing.assert_close(seen, expected)
    assert all(map(torch.equal, grads, bare))
