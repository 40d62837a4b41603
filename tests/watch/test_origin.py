"""Tests of the trace that finds the operation from which a bad value came."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but missing from the stubs

from lightning_recorder.watch import CommunicationError, ModuleFlags, Origin, OriginTrace
from lightning_recorder.watch.readings import Reading
from lightning_recorder.watch.verdict import finding_of_origin

INF = math.inf


class Net(nn.Module):
    """Two layers with a function between them."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 1)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.function(self.first(x)))
        return out


def origin_of(net: nn.Module, x: Tensor, loss_of: Callable[[Tensor], Tensor] = Tensor.sum) -> Origin | None:
    known = {"batch": x, **{f"parameter {name}": each for name, each in net.named_parameters()}}
    with OriginTrace(dict(net.named_modules()), known) as trace:
        loss = loss_of(net(x))
        gradients = torch.autograd.grad(loss, list(net.parameters()), allow_unused=True)
    assert trace.errors == []
    return trace.origin([loss, *gradients])


def line_of(function: Callable[..., Any]) -> str:
    return f"{__file__}:{inspect.getsourcelines(function)[1]}"


def causal(x: Tensor) -> Tensor:
    return x.masked_fill(torch.ones(3, 3, dtype=torch.bool).triu(1), -INF)


CASES: dict[str, tuple[Callable[[Tensor], Tensor], str, bool, str]] = {
    "log of a negative number": (lambda x: torch.log(-x.abs() - 1), "log", False, "NaN"),
    "log of zero": (lambda x: torch.log(x * 0), "log", False, "inf"),
    "exp overflows": (lambda x: torch.exp(x.abs() + 100), "exp", False, "inf"),
    "gradient of the root of zero": (lambda x: torch.sqrt(x * 0), "sqrt", True, "inf"),
    "a branch that where does not choose": (lambda x: torch.where(x > INF, 1 / (x * 0), x), "reciprocal", False, "inf"),
    "a row that is masked entirely": (lambda x: x.masked_fill(x == x, -INF).softmax(-1), "softmax", False, "NaN"),
    "a bad value beside a mask": (lambda x: causal(x).softmax(-1) + torch.log(-x.abs()), "log", False, "NaN"),
    "a factor of infinity behind a mask": (lambda x: (causal(x) * INF).softmax(-1), "mul", False, "inf"),
    "a mask of where": (
        lambda x: torch.where(causal(x) == -INF, -INF, x).softmax(-1) + torch.log(-x.abs()),
        *("log", False, "NaN"),
    ),
    "a row that where masks entirely": (lambda x: torch.where(x == x, -INF, x).softmax(-1), "softmax", False, "NaN"),
    "a bad value beside the logarithm of a mask": (
        lambda x: (torch.tril(x * 0 + 1).log() + torch.log(-x.abs())).softmax(-1),
        *("log", False, "NaN"),
    ),
    "a bad value behind a mask": (lambda x: torch.log(causal(x).softmax(-1) - 2), "log", False, "NaN"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_operation_is_named(name: str) -> None:
    """The origin is the operation that made the value, in its direction, with the line that calls it."""
    function, operation, backward, kind = CASES[name]
    x = torch.ones(3, 3)
    found = origin_of(Net(function), x)
    assert found is not None
    assert (found.operation, found.backward, found.kind, found.module) == (operation, backward, kind, "")
    assert found.line == line_of(function)
    assert found.call == 1


def test_the_inputs_of_the_operation_have_their_ranges() -> None:
    """A quotient has the ranges of both sides; an operation in place has none, since its input is overwritten."""
    x = torch.tensor([[1.0, 2.0, 3.0]])
    for divide, ranges in (
        (lambda y: torch.full_like(y, 2.5) / (y * 0), "first input 2.5, second input 0"),
        (lambda y: (y * 0).log_(), ""),
    ):
        found = origin_of(Net(divide), x)
        assert found is not None
        assert found.ranges == ranges


def test_masks_alone_are_fine() -> None:
    """Infinities of a mask that reach neither the loss nor a gradient are no origin."""
    assert origin_of(Net(lambda x: causal(x).softmax(-1)), torch.ones(3, 3)) is None
    mask = torch.full((3, 3), -INF).triu(1)
    assert origin_of(Net(lambda x: (x + mask).softmax(-1)), torch.ones(3, 3)) is None


def test_what_was_bad_before_is_named() -> None:
    """A bad batch and a bad parameter are named by their descriptions."""
    net = Net(torch.relu)
    found = origin_of(net, torch.tensor([[1.0, math.nan, 1.0]]))
    assert found is not None
    assert (found.source, found.module, found.count) == ("batch", "", 1)
    with torch.no_grad():
        net.last.bias.fill_(INF)
    found = origin_of(net, torch.ones(1, 3))
    assert found is not None
    assert (found.source, found.module) == ("parameter last.bias", "last")


def test_a_value_of_a_function_that_cannot_be_seen_belongs_to_its_module() -> None:
    """A bad output that no traced operation made is that of the module that returns it."""

    class Hidden(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.utils._python_dispatch._disable_current_modes():
                return x * math.nan

    net = nn.Sequential(nn.Linear(3, 3), Hidden(), nn.Linear(3, 1))
    found = origin_of(net, torch.ones(1, 3))
    assert found is not None
    assert (found.module, found.call, found.operation, found.backward) == ("1", 1, "", False)


class Doubled(torch.autograd.Function):
    """Twice its input, with a bad gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] / 0


def test_the_backward_pass_of_a_custom_function_is_named() -> None:
    """The origin is the custom function, in the module that called it."""

    class Custom(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = Doubled.apply(x)  # type: ignore[no-untyped-call]  # torch has no annotations there
            return out

    found = origin_of(nn.Sequential(nn.Linear(3, 3), Custom(), nn.Linear(3, 1)), torch.ones(1, 3))
    assert found is not None
    assert (found.module, found.operation, found.backward) == ("1", "doubled", True)


@pytest.mark.parametrize("kind", ["module", "first module", "output", "parameter"])
def test_a_backward_hook_is_named(kind: str) -> None:
    """A hook that spoils a gradient belongs to its module, not to the operation before it."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Linear(3, 1))
    owner: Any = net.get_submodule("2" if kind == "first module" else "2.0")
    if kind in ("module", "first module"):
        owner.register_full_backward_hook(lambda _module, inputs, _outputs: (inputs[0] * math.nan,))
    elif kind == "output":
        owner.register_full_backward_pre_hook(lambda _module, outputs: (outputs[0] * math.nan,))
    else:
        owner.weight.register_hook(lambda grad: grad * math.nan)
    found = origin_of(net, torch.ones(2, 3))
    assert found is not None
    assert (found.module, found.backward, found.operation) == (
        "2" if kind == "first module" else "2.0",
        True,
        "hook",
    )
    assert (found.line != "") is (kind == "parameter")


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: torch.log(x * 0), "A logarithm of zero"),
        (lambda x: torch.sqrt(x * 0), "A root of a negative number, or one of zero"),
        (lambda x: torch.sqrt(x - 2), "power of a negative number"),
        (lambda x: torch.log(x - 2), "power of a negative number"),
        (lambda x: (x - 2) ** 0.5, "power of a negative number"),
        (lambda x: x.norm(dim=1, keepdim=True) * 0 / (x * 0), "A division by zero"),
        (lambda x: (x * 1e38).exp(), "too large"),
        (lambda x: x * INF, "a number that this operation uses is infinite"),
        (lambda x: x * math.nan, "A number that this operation uses"),
        (lambda x: x.abs() * 3e38 * 10, "too large"),
        (lambda x: x.masked_fill(x == x, -INF).softmax(-1), "a softmax over minus infinity alone"),
        (lambda x: x + torch.from_numpy(np.full(1, math.nan)).float(), "before the operation"),
    ],
)
def test_the_cause_is_one_that_the_operation_can_have(function: Callable[[Tensor], Tensor], why: str) -> None:
    """The reason that a finding gives fits the operation: a product of finite numbers divides by nothing."""
    origin = origin_of(Net(function), torch.ones(1, 3))
    assert origin is not None
    found = finding_of_origin(origin, Reading(1, 0, None, None, [], [1]), 1)
    assert why in found.why
    assert ("division" in found.why) == (why == "A division by zero")


class Spoiled(torch.autograd.Function):
    """Its input, with a constant written to its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        grad = grads[0].clone()
        grad[0] = math.nan
        return grad


@pytest.mark.parametrize("backward", [False, True])
def test_a_constant_belongs_to_the_module_that_uses_it(backward: bool) -> None:
    """The operation that writes a NaN from a constant is named, not the code outside of all modules."""

    class Custom(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = x + torch.from_numpy(np.full(1, math.nan)).float()
            if backward:
                out = Spoiled.apply(x)  # type: ignore[no-untyped-call]  # torch has no annotations there
            return out

    found = origin_of(nn.Sequential(nn.Linear(3, 3), Custom(), nn.Linear(3, 1)), torch.ones(1, 3))
    assert found is not None
    assert (found.module, found.kind, found.backward, found.has_constant) == ("1", "NaN", backward, True)
    assert found.operation == ("spoiled" if backward else "to_copy")
    assert found.line.startswith(f"{__file__}:")


def test_running_statistics_are_no_origin() -> None:
    """The running statistics that the same operation has spoiled are not the origin, but its bad input."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Identity(), nn.BatchNorm1d(3), nn.Linear(3, 1))
    net[1].register_forward_hook(lambda module, args, output: output + torch.tensor(INF) - torch.tensor(INF))
    known = dict(net.named_buffers())
    with OriginTrace(dict(net.named_modules()), known) as trace:
        loss = net(torch.rand(4, 3)).sum()
    found = trace.origin(loss)
    assert found is not None
    assert (found.module, found.operation, found.source) == ("1", "sub", "")


def test_an_infinite_loss_without_nan_has_an_origin() -> None:
    """If infinities are all there is, the first of them that leads to the loss is the origin."""
    found = origin_of(Net(lambda x: x), torch.ones(1, 3), lambda out: (out * 0).sum() + torch.log(out.sum() * 0).abs())
    assert found is not None
    assert (found.operation, found.kind, found.backward) == ("log", "inf", False)


def test_uninitialized_memory_is_ignored() -> None:
    """Memory that was allocated and then written to is no origin, whatever it contained."""

    def through_buffer(x: Tensor) -> Tensor:
        torch.full((100,), math.nan)  # freed, so that new memory may contain it
        out = torch.empty(3, 3)
        out.copy_(x)
        return out

    assert origin_of(Net(through_buffer), torch.ones(3, 3)) is None


def test_a_repaired_value_is_no_origin() -> None:
    """A NaN that is replaced in place leads nowhere."""

    def repaired(x: Tensor) -> Tensor:
        return torch.log(-x.detach().abs()).nan_to_num_(0.0) + x

    assert origin_of(Net(repaired), torch.ones(3, 3)) is None


def test_communication_is_refused() -> None:
    """A collective operation raises before it waits for other processes."""
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(CommunicationError), OriginTrace({}, {}):
            torch.distributed.all_reduce(torch.ones(1))
    finally:
        torch.distributed.destroy_process_group()


def test_no_hook_is_left() -> None:
    """After the trace, also after an error in it, the modules have no hooks."""
    net = Net(lambda x: x.view(-1, 100))
    with pytest.raises(RuntimeError):
        origin_of(net, torch.ones(3, 3))
    assert not [each for each in net.modules() if each._forward_hooks or each._forward_pre_hooks]


@pytest.mark.parametrize(
    ("factor", "masked", "name", "kind"),
    [(math.nan, False, "1", "NaN"), (INF, False, "1", "inf"), (math.nan, True, "1", "NaN")],
)
def test_flags_name_the_container_whose_own_code_is_at_fault(factor: float, masked: bool, name: str, kind: str) -> None:
    """A positive infinity right before the first NaN is the origin; the negative ones of a mask are not."""

    class Block(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.norm, self.mask, self.factor = nn.LayerNorm(4), nn.Threshold(-1e9, -INF if masked else 0), factor

        def forward(self, x: Tensor) -> Tensor:
            x = self.mask(self.norm(x) - 1e10) if masked else x
            x = torch.nan_to_num(x, neginf=0.0)
            return x * torch.tensor([self.factor, 1, 1, 1])

    net = nn.Sequential(Block(1.0), Block(factor), Block(1.0))
    flags = ModuleFlags({name: each for name, each in net.named_modules() if name})
    flags.begin_batch()
    net(torch.ones(2, 4))
    flags.end_batch()
    found = flags.flags().origin()
    flags.remove()
    assert found is not None
    assert (found[0].module, found[0].kind) == (name, kind)


@pytest.mark.parametrize("kind", ["NaN", "inf"])
@pytest.mark.parametrize("is_conjugate", [False, True])
@pytest.mark.parametrize("part", ["real", "imag"])
def test_flags_see_complex_outputs(part: str, is_conjugate: bool, kind: str) -> None:
    """A bad real or imaginary part names the module, although the modules after it hide it."""

    class Spectrum(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.complex(x, x)
            getattr(x, part)[0] = float(kind)
            return x.conj() if is_conjugate else x

    class Finite(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nan_to_num(torch.view_as_real(x.resolve_conj()), posinf=0.0, neginf=0.0)

    net = nn.Sequential(nn.Identity(), Spectrum(), Finite())
    flags = ModuleFlags({name: each for name, each in net.named_modules() if name})
    flags.begin_batch()
    net(torch.ones(4))
    flags.end_batch()
    found = flags.flags().origin()
    flags.remove()
    assert found is not None
    assert (found[0].module, found[0].kind) == ("1", kind)
