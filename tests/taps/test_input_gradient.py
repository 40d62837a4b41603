"""Tests of the gradients of module inputs through these modules."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_recorder.selection import Selection
from lightning_recorder.taps import InputGradientTap
from tests.taps import references
from tests.taps.inspection import hooks_on
from tests.taps.models import MODELS, Cube, Precision, Slope, each_precision, make
from tests.taps.references import Seen, assert_seen, copies_into

# Excluded here: a copy of an input is not the tensor that these modules return or change.
OTHERS = {"identity", "base of a view"}


@pytest.mark.parametrize("name", [name for name in MODELS if name not in OTHERS])
@each_precision
def test_gradients_are_those_through_the_module_alone(name: str, precision: Precision) -> None:
    """The gradient of each input through the module is recorded if it contributes to the loss, last call first."""
    module, x = make(name, precision.dtype)
    seen: Seen = []
    torch.manual_seed(1)
    with InputGradientTap(Selection("**").resolve(module), copies_into(seen)):
        loss = precision.forward(module, x)
        seen.clear()  # discard the backward pass that "force" runs in its forward pass
        loss.backward()
    assert_seen(seen, references.input_gradients(name, precision), precision)


class Calls(nn.Module):
    """Calls a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def seen_at(module: nn.Module, step: Callable[[], object]) -> list[tuple[str, Any]]:
    """Return the paths and gradients that a tap on this module records in a step, which must not warn."""
    seen: Seen = []
    with InputGradientTap({"m": module}, copies_into(seen), strict=True):
        step()
    assert hooks_on(module) == []
    return [(site.path, grad.tolist()) for site, grad in seen]


def numbers(*values: float) -> Tensor:
    """Return a tensor that is not a leaf."""
    return torch.tensor(values, dtype=torch.float32, requires_grad=True).clone()


def test_a_use_beside_the_module_is_left_out() -> None:
    """In x + branch(x) the input of the branch has only the gradient through the branch."""
    module = Calls(lambda x: x * 3)
    x = numbers(1, 2)
    assert seen_at(module, lambda: (x + module(x)).sum().backward()) == [("in[0]", [3.0, 3.0])]


def test_a_leaf_is_an_input_too() -> None:
    """The gradient of a leaf input, such as a batch that requires gradients, is recorded and still accumulated."""
    module = Calls(lambda x: x * x + x)
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    assert seen_at(module, lambda: (module(x) + 10 * x).sum().backward()) == [("in[0]", [3.0, 5.0])]
    assert x.grad is not None
    assert x.grad.tolist() == [13.0, 15.0]


def test_a_parameter_is_an_input_too() -> None:
    """The gradient of a weight that is passed to a module, such as a parametrization, is recorded."""
    module = Calls(lambda weight: weight * 2)
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    assert seen_at(module, lambda: module(weight).sum().backward()) == [("in[0]", [2.0, 2.0])]


def test_a_frozen_module_passes_gradients_on() -> None:
    """A module without trainable parameters, such as the frozen part of an adapter, has gradients of its inputs."""
    module = nn.Linear(2, 1, bias=False).requires_grad_(False)
    module.weight.copy_(torch.tensor([[2.0, 3.0]]))
    x = numbers(1, 1)
    assert seen_at(module, lambda: module(x).sum().backward()) == [("in[0]", [2.0, 3.0])]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_autograd_there_is_nothing(mode: type[torch.no_grad] | type[torch.inference_mode]) -> None:
    """With no_grad and in inference mode, as in validation, nothing is recorded or raised."""
    module = nn.Sequential(nn.ReLU(), nn.Identity())
    x = numbers(1, 1)

    def step() -> None:
        with mode():
            module(x)

    assert seen_at(module, step) == []


def test_an_unused_output_adds_nothing() -> None:
    """For a module with two outputs the gradient flows through the one that the loss uses."""
    module = Calls(lambda x: (x * 2, x * x))
    x = numbers(1, 2)
    assert seen_at(module, lambda: module(x)[0].sum().backward()) == [("in[0]", [2.0, 2.0])]


def test_an_output_made_without_the_input_gives_it_no_gradient() -> None:
    """An input that does not affect the outputs is not recorded."""
    module = Calls(lambda x, y: y * 2)
    assert seen_at(module, lambda: module(numbers(1), numbers(1)).sum().backward()) == [("in[1]", [2.0])]


def test_functions_of_one_input_are_summed_where_they_reach_the_loss() -> None:
    """If the loss uses two of three functions of an input, their gradients are summed."""
    module = Calls(lambda x: (x * 2, x * x, x * 100))
    x = numbers(1, 2)

    def step() -> None:
        double, square, _ = module(x)
        (double.sum() + square.sum()).backward()

    assert seen_at(module, step) == [("in[0]", [4.0, 6.0])]


def test_some_outputs_alone_run_some_functions_alone() -> None:
    """Each torch.autograd.grad of one of the outputs records the gradient through that output once."""
    module = Calls(lambda x: (x * 2, x * x, x * x * x))
    x = numbers(1, 2)

    def step() -> None:
        for output in module(x):
            torch.autograd.grad(output.sum(), x, retain_graph=True)

    assert seen_at(module, step) == [("in[0]", [2.0, 2.0]), ("in[0]", [2.0, 4.0]), ("in[0]", [3.0, 12.0])]


def test_a_gradient_that_was_not_requested_is_not_computed() -> None:
    """If torch.autograd.grad only requests parameter gradients, no input gradient is computed or recorded."""
    module = nn.Linear(2, 1)
    x = numbers(1, 2)
    assert seen_at(module, lambda: torch.autograd.grad(module(x).sum(), module.weight)) == []


def test_each_backward_pass_hands_over_its_own() -> None:
    """Two passes through one graph record two separate gradients."""
    module = Calls(lambda x: x * x + 3 * x)
    x = numbers(1, 2)

    def step() -> None:
        y = module(x)
        y.sum().backward(retain_graph=True)
        (2 * y).sum().backward()

    assert seen_at(module, step) == [("in[0]", [5.0, 7.0]), ("in[0]", [10.0, 14.0])]


class Stumbles(torch.autograd.Function):
    """The zero function, whose backward pass fails the first time."""

    failed = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        if not Stumbles.failed:
            Stumbles.failed = True
            raise ZeroDivisionError("no luck")
        return grads[0]


def test_a_backward_pass_that_raises_leaves_nothing_for_the_next() -> None:
    """After a pass that failed halfway through two functions, the next pass records the correct sum once."""
    Stumbles.failed = False
    module = Calls(lambda x: Stumbles.apply(x) * 2 + x * x)  # type: ignore[no-untyped-call]  # torch is untyped here
    x = numbers(1, 2)

    def step() -> None:
        loss = module(x).sum()
        with pytest.raises(ZeroDivisionError):
            loss.backward(retain_graph=True)
        loss.backward()

    assert seen_at(module, step) == [("in[0]", [4.0, 6.0])]


def test_a_penalty_inside_the_forward_pass_is_a_pass_of_its_own() -> None:
    """A derivative of its own energy that a module computes is recorded first, and then the gradient of the loss."""
    torch.manual_seed(0)
    module = Slope()
    x = torch.randn(3, 4, requires_grad=True).clone()
    weight = module.energy.weight
    hessian = 2 * weight.T @ weight
    first = 2 * F.linear(x, weight, module.energy.bias) @ weight
    second = torch.ones(3, 4) @ hessian
    seen: Seen = []
    with InputGradientTap({"slope": module, "energy": module.energy}, copies_into(seen), strict=True):
        module(x).sum().backward()
    assert [site.name for site, _ in seen] == ["energy", "energy", "slope"]
    for (_, ours), theirs in zip(seen, (first, second, second), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-6)


def test_one_tensor_as_several_arguments_has_one_gradient() -> None:
    """The gradients of a tensor that is passed three times, as to self-attention, are summed under the first path."""
    module = Calls(lambda query, key, *, value: query * 2 + key * 3 + value * 5)
    x = numbers(1, 2)
    assert seen_at(module, lambda: module(x, x, value=x).sum().backward()) == [("in[0]", [10.0, 10.0])]


def test_several_tensors_have_a_gradient_each() -> None:
    """Each tensor in containers among the arguments has its own gradient under its path."""
    module = Calls(lambda pair, *, more: pair[0] * pair[1]["b"] + more)
    a, b, c = numbers(2), numbers(3), numbers(4)
    assert sorted(seen_at(module, lambda: module([a, {"b": b}], more=c).sum().backward())) == [
        ("in.more", [1.0]),
        ("in[0][0]", [3.0]),
        ("in[0][1].b", [2.0]),
    ]


def test_two_outputs_of_one_function_are_two_inputs() -> None:
    """The chunks of a tensor come from one function, and each has its own gradient."""
    module = Calls(lambda left, right: left * 2 + right * 3)
    x = numbers(1, 2, 3, 4)
    assert sorted(seen_at(module, lambda: module(*x.chunk(2)).sum().backward())) == [
        ("in[0]", [2.0, 2.0]),
        ("in[1]", [3.0, 3.0]),
    ]


def test_a_returned_input_has_the_gradient_of_the_tensor() -> None:
    """An input that a module returns unchanged is one tensor with the output, so its gradient covers all uses."""
    identity = nn.Identity()
    x = numbers(1, 2)
    assert seen_at(identity, lambda: (identity(x) * 2 + x * x).sum().backward()) == [("in[0]", [4.0, 6.0])]
    module = Calls(lambda x: (x, x * 3))
    y = numbers(1, 2)
    assert seen_at(module, lambda: sum(module(y)).sum().backward()) == [("in[0]", [4.0, 4.0])]


def test_a_view_that_shows_a_later_value_has_no_gradient() -> None:
    """If the base of a view is changed after the call, autograd bypasses the module, so no gradient is recorded."""
    module, x = make("base of a view")
    seen: Seen = []
    with InputGradientTap(Selection("**").resolve(module), copies_into(seen), strict=True):
        module(x).backward()
    assert [site.name for site, _ in seen] == ["stem"]


@pytest.mark.parametrize(
    ("change", "slope"),
    [
        (lambda x: x.mul_(3), 3.0),
        (lambda x: F.relu(x, inplace=True), 1.0),
        (lambda x: x.add_(x), 2.0),
        (lambda x: (x[:1].mul_(3), x)[1] * 1, 3.0),
        (lambda x: (x.mul_(2), x.add_(1), x * x)[2], 12.0),
    ],
    ids=["mul_", "relu_", "add_ of itself", "a part", "three operations"],
)
def test_an_input_that_is_changed_in_place_has_the_gradient_of_what_it_was(
    change: Callable[[Tensor], Tensor], slope: float
) -> None:
    """The recorded gradient is that of the original value, before the module overwrites it."""
    module = Calls(change)
    x = numbers(1)
    assert seen_at(module, lambda: module(x).sum().backward()) == [("in[0]", [slope])]


def test_a_change_after_the_call_does_not_matter() -> None:
    """In-place changes of an input and an output after the call do not affect the recorded gradient."""
    module = Calls(lambda x: x * 3)
    x = numbers(1)

    def step() -> None:
        y = module(x)
        x.mul_(5)
        y.mul_(7)
        (x + y).sum().backward()

    assert seen_at(module, step) == [("in[0]", [21.0])]


def test_a_custom_function_has_gradients_at_the_right_arguments() -> None:
    """Arguments of an autograd.Function that are not tensors do not shift the gradients of the others."""
    module = Cube()
    x = numbers(2)
    assert seen_at(module, lambda: module(x)[0].sum().backward()) == [("in[0]", [12.0])]


def test_a_module_inside_itself_has_each_call() -> None:
    """For a module that calls itself, the gradients of the inner and the outer call are recorded."""
    module = Calls(lambda x, depth: module(x * 2, depth - 1) * 3 if depth else x * 5)
    x = numbers(1)
    assert seen_at(module, lambda: module(x, 2).sum().backward()) == [
        ("in[0]", [45.0]),
        ("in[0]", [90.0]),
        ("in[0]", [180.0]),
    ]


def test_a_module_under_two_names_is_seen_under_both() -> None:
    """A module under two names is recorded under both."""
    module = Calls(lambda x: x * 3)
    x = numbers(1)
    seen: list[str] = []
    with InputGradientTap({"a": module, "b": module}, lambda site, _: seen.append(site.name)):
        module(x).sum().backward()
    assert sorted(seen) == ["a", "b"]


@pytest.mark.parametrize("sparse_first", [False, True])
def test_a_sparse_part_is_added_to_a_dense_one(sparse_first: bool) -> None:
    """For a weight that a module uses both sparsely and densely, the sum of both gradients is recorded."""

    def both(weight: Tensor) -> Tensor:
        if sparse_first:  # of the backward pass, so last in the forward pass
            return (weight * 5).sum() + F.embedding(torch.tensor([0, 0]), weight, sparse=True).sum()
        return F.embedding(torch.tensor([0, 0]), weight, sparse=True).sum() + (weight * 5).sum()

    module = Calls(both)
    weight = torch.ones(2, 1, requires_grad=True)
    assert seen_at(module, lambda: module(weight).backward()) == [("in[0]", [[7.0], [5.0]])]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_no_gradient(use_reentrant: bool) -> None:
    """If the forward pass is repeated and ends early, each gradient equals that without checkpoints, recorded once."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4)), nn.Sequential(nn.Identity()))
    start, end = nn.Linear(4, 4), nn.Linear(4, 4)
    model = nn.ModuleList([start, block, end])
    x = torch.randn(3, 4)

    def seen(apply: Callable[[Tensor], Any]) -> dict[str, list[Any]]:
        found: Seen = []
        with InputGradientTap(Selection("**").resolve(model), copies_into(found), strict=True):
            for _ in range(2):
                end(apply(start(x)) * 2).square().sum().backward()
        names = {site.name for site, _ in found}
        return {name: [grad.tolist() for site, grad in found if site.name == name] for name in names}

    found = seen(lambda h: checkpoint(block, h, use_reentrant=use_reentrant))
    assert found == seen(block)
    assert {len(grads) for grads in found.values()} == {2}


def test_gradients_of_many_losses_at_once_are_skipped() -> None:
    """A backward pass of torch.autograd.grad with is_grads_batched is ignored, and the next one is recorded."""
    module = Calls(lambda x: x * x)
    x = numbers(1, 2)

    def step() -> None:
        y = module(x)
        torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True, retain_graph=True)
        y.sum().backward()

    assert seen_at(module, step) == [("in[0]", [2.0, 4.0])]


def test_a_view_made_without_autograd_has_no_gradient() -> None:
    """One of several views that were created under no_grad is ignored, and the next call is recorded."""
    inner = nn.Linear(2, 2)

    def forward(x: Tensor) -> Tensor:
        with torch.no_grad():
            half, _ = x.chunk(2, -1)
            inner(half)
        return inner(x[:, :2])  # type: ignore[no-any-return]

    seen: list[str] = []
    with InputGradientTap({"inner": inner}, lambda site, _: seen.append(site.name), strict=True):
        forward(torch.ones(1, 4, requires_grad=True) * 1).sum().backward()
    assert seen == ["inner"]


def test_an_interrupted_call_is_forgotten() -> None:
    """A KeyboardInterrupt inside a module leaves nothing alive once the module is called again."""
    interrupt = [True]

    def forward(x: Tensor) -> Tensor:
        if interrupt[0]:
            raise KeyboardInterrupt
        return x * 2

    module = Calls(forward)
    seen: Seen = []
    with InputGradientTap({"m": module}, copies_into(seen)):
        x = numbers(1) * 1
        reference = weakref.ref(x)
        with pytest.raises(KeyboardInterrupt):
            module(x)
        del x
        interrupt[0] = False
        for _ in range(2):
            module(numbers(1)).sum().backward()
        gc.collect()
        assert reference() is None
    assert len(seen) == 2


def test_an_interrupted_call_is_forgotten_with_its_tap() -> None:
    """A KeyboardInterrupt that also ends the tap leaves nothing alive."""

    def interrupt(x: Tensor) -> Tensor:
        raise KeyboardInterrupt

    module, x = Calls(interrupt), numbers(1) * 1
    reference = weakref.ref(x)
    with pytest.raises(KeyboardInterrupt), InputGradientTap({"m": module}, copies_into([])):
        module(x)
    del x
    gc.collect()
    assert reference() is None
