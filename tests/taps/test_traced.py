"""The tap whose hooks torch.compile traces."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters

from lightning_recorder.errors import RecordingError
from lightning_recorder.internals import compiled_operators
from lightning_recorder.taps import InputTap, OutputGradientTap, OutputTap, Site, Tap, TracedTap

# Torch reads .grad of tensors that are not leaves while it traces, and ignores the warning.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Reset compilation before and after a test, and check that all recordings are switched off."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    gc.collect()
    assert compiled_operators.ACTIVE == ""


class Pair(NamedTuple):
    """A named output."""

    first: Tensor
    rest: dict[str, Tensor]


class Nested(nn.Module):
    """Returns and takes nested values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, scale: Tensor) -> Pair:
        y = self.linear(x)
        return Pair(y * scale, {"twice": y * 2, "a b": y.detach()})


class Model(nn.Module):
    """Calls modules with nested values, and an identity."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Nested()
        self.identity = nn.Identity()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        pair = self.inner(x, scale=torch.ones(1))
        y = self.act(pair.first + pair.rest["twice"])
        total: Tensor = (y + self.identity(y)).sum()
        return total


def recorded(like: type[Tap], *, traced: bool) -> dict[Site, list[float]]:
    """Return the sum of each tensor of each site, with compiled or with eager code."""
    torch.manual_seed(0)
    model = Model()
    found: dict[Site, list[float]] = {}

    def receive(site: Site, tensor: Tensor) -> None:
        found.setdefault(site, []).append(tensor.double().sum().item())

    modules = {name: getattr(model, name) for name in ("inner", "identity", "act")}
    tap = (
        TracedTap(modules, receive, like=like, key="k", strict=True) if traced else like(modules, receive, strict=True)
    )
    if isinstance(tap, TracedTap):
        assert tap.install()
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if traced else model
    for _ in range(2):
        with tap:
            call(torch.arange(8.0).view(2, 4)).backward()
    if isinstance(tap, TracedTap):
        tap.uninstall()
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())
    return found


@pytest.mark.parametrize("like", [InputTap, OutputTap, OutputGradientTap])
def test_sites_and_values_are_those_of_the_eager_tap(like: type[Tap]) -> None:
    """Nested inputs and outputs are recorded under the same paths, also those of a module that returns its input."""
    assert recorded(like, traced=True) == recorded(like, traced=False)
    assert counters["stats"]["unique_graphs"] == 1


class Outputs(dict[str, Tensor]):
    """A dictionary with a class of its own, such as the outputs of transformers."""


@dataclass
class Fields:
    """An output with fields."""

    logits: Tensor
    hidden: list[Tensor]


class Branches(nn.Module):
    """Returns tensors that it also uses, and has modules that return their inputs: an input, a result, a parameter."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.between, self.last, self.of_parameter = (nn.Identity() for _ in range(4))
        self.linear = nn.Linear(4, 4)
        self.bias = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Any:
        early = x.tanh()
        hidden = self.linear(self.first(x))
        between = self.between(hidden)
        y = between.sigmoid() * hidden + between * between + early + x + self.of_parameter(self.bias)
        y = self.last(y.view(2, 2, 4)).view(4, 4)
        if self.kind == "dict":
            return Outputs(logits=y, hidden=hidden.view(4, 2, 2))
        return Fields(y, [hidden]) if self.kind == "dataclass" else (y, hidden, x)


class Around(nn.Module):
    """Uses each output of a module, and its input, twice."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.branches = Branches(kind)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        output = self.branches(x)
        if isinstance(output, Outputs):
            y, hidden = output["logits"], output["hidden"].view(4, 4)
        elif isinstance(output, Fields):
            y, hidden = output.logits, output.hidden[0]
        else:
            y, hidden, x = output
        return ((y + hidden.cos()) * (y + hidden) + x * x).square().mean()


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("kind", "backend"), [("dict", "eager"), ("dataclass", "aot_eager"), ("tuple", "eager"), ("tuple", "aot_eager")]
)
def test_gradients_of_returned_inputs_and_of_other_containers(kind: str, backend: str) -> None:
    """They are those of eager code, and the gradients of the parameters are bitwise those without a tap."""
    found: dict[str, tuple[list[Tensor], dict[Site, list[Tensor]]]] = {}
    for how in ("bare", "eager", "inside"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, grads = Around(kind), dict[Site, list[Tensor]]()
        modules = {name: each for name, each in model.named_modules() if name}

        def receive(site: Site, grad: Tensor, into: dict[Site, list[Tensor]] = grads) -> None:
            into.setdefault(site, []).append(grad.clone())

        inside = TracedTap(modules, receive, like=OutputGradientTap, key="k", strict=True)
        tap = inside if how == "inside" else OutputGradientTap(modules, receive, strict=True)
        assert how != "inside" or inside.install()
        call = model if how == "eager" else torch.compile(model, backend=backend, fullgraph=True)
        for _ in range(2):
            with nullcontext() if how == "bare" else tap:
                call(torch.rand(4, 4)).backward()
        inside.uninstall()
        found[how] = [each.grad for each in model.parameters() if each.grad is not None], grads
    assert all(map(torch.equal, found["inside"][0], found["bare"][0]))
    assert not model.branches.bias._backward_hooks
    eager, traced = found["eager"][1], found["inside"][1]
    assert set(traced) == set(eager)
    assert len(traced) == (9 if kind == "tuple" else 8)
    for site, expected in eager.items():
        torch.testing.assert_close(traced[site], expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_gradient_of_an_input_of_the_compiled_code(backend: str) -> None:
    """A module that returns the input of the compiled code has the gradient of all its uses, as in eager code."""
    found = []
    for kind in (OutputGradientTap, TracedTap):
        torch.manual_seed(0)
        model, sums = Around("tuple"), list[float]()
        options: dict[str, Any] = {"like": OutputGradientTap, "key": "k"} if kind is TracedTap else {}
        modules = {"first": model.branches.first}
        tap = kind(modules, lambda site, grad: sums.append(grad.sum().item()), strict=True, **options)  # noqa: B023
        if isinstance(tap, TracedTap):
            assert tap.install()
            model.branches.compile(backend=backend)
        for _ in range(2):
            with tap:
                model(torch.rand(4, 4)).backward()
        found.append(sums)
    assert len(found[1]) == 2
    assert found[1] == pytest.approx(found[0])


def test_receiver_errors_name_the_module() -> None:
    """An error of the receiver is raised from the compiled code if the tap is strict."""

    def fail(site: Site, tensor: Tensor) -> None:
        raise ValueError("injected")

    net = nn.Sequential(nn.Linear(2, 2))
    tap = TracedTap({"0": net[0]}, fail, like=OutputTap, key="k", strict=True)
    tap.install()
    call = torch.compile(net, backend="eager")
    with (
        pytest.raises(RecordingError, match="TracedTap could not record module '0' at 'out': ValueError: injected"),
        tap,
    ):
        call(torch.ones(1, 2))
    tap.uninstall()


def test_copies_of_a_module_are_not_recorded() -> None:
    """The hooks of copies and pickles do nothing, and a tap keeps no model alive."""
    seen: list[Site] = []
    net: Any = nn.Sequential(nn.Linear(2, 2))
    tap = TracedTap({"0": net[0]}, lambda site, tensor: seen.append(site), like=OutputTap, key="k")
    tap.install()
    copies = [copy.deepcopy(net), pickle.loads(pickle.dumps(net))]
    with tap:
        for each in copies:
            call: Any = torch.compile(each, backend="eager")
            call(torch.ones(1, 2))
    assert seen == []
    tap.uninstall()
    gone = weakref.ref(net)
    del net, tap
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None


def test_two_taps_with_one_key_are_switched_together() -> None:
    """A key stays on until all its taps are off, so that two taps of a recorder need one graph."""
    taps = [TracedTap({}, lambda site, tensor: None, like=like, key="k") for like in (InputTap, OutputTap)]
    for tap in taps:
        tap.attach()
    assert compiled_operators.ACTIVE == "|k|"
    taps[0].remove()
    assert compiled_operators.ACTIVE == "|k|"
    taps[1].remove()
