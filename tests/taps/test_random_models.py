"""Tests of every tap on randomly composed modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_recorder.selection import Selection
from lightning_recorder.structure import iter_tensors
from lightning_recorder.taps import (
    InputGradientTap,
    InputTap,
    OutputGradientTap,
    OutputTap,
    ParameterGradientTap,
    ParameterTap,
    Site,
    Tap,
)
from tests.taps.inspection import hooks_on
from tests.taps.models import (
    PRECISIONS,
    Cube,
    Pair,
    pack_dict,
    pack_model_output,
    pack_record,
    unpack_dict,
    unpack_model_output,
    unpack_pair,
    unpack_record,
)
from tests.taps.references import Probe, Seen, assert_seen, copies_into, replaced

CONTAINERS: list[tuple[Callable[..., Any], Callable[[Any], tuple[Tensor, Tensor]]]] = [
    (lambda *parts: parts, lambda parts: parts),
    (lambda *parts: [[parts[0]], (None, parts[1])], lambda parts: (parts[0][0], parts[1][1])),
    (pack_dict, unpack_dict),
    (pack_record, unpack_record),
    (pack_model_output, unpack_model_output),
    (Pair, unpack_pair),
]


class Chain(nn.Sequential):
    """Modules in sequence, with an in-place multiplication of the last result."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__(*parts, nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mul_(0.5)  # type: ignore[no-any-return,no-untyped-call]  # torch is untyped here; a linear layer does not save its output


class Around(nn.Module):
    """A residual connection with an in-place addition."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return x.clone().add_(self.body(x.clone()))


class Twice(nn.Module):
    """A module that is called twice, the second time with a keyword argument."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.rest = Scaled()

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(x=self.rest(self.body(self.body(x.clone()) * 0.5)))  # type: ignore[no-any-return]


class Scaled(nn.Module):
    """A module with its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.5, 1.0, 1.5, 2.0]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Fork(nn.Module):
    """Returns the results of two modules in a container."""

    def __init__(self, left: nn.Module, right: nn.Module, pack: Callable[..., Any]) -> None:
        super().__init__()
        self.left = left
        self.right = right
        self.pack = pack

    def forward(self, x: Tensor) -> Any:
        return self.pack(self.left(x.clone()), self.right(x.clone()))


class Join(nn.Module):
    """Takes two tensors in a container and uses the second only on request."""

    def __init__(self, unpack: Callable[[Any], tuple[Tensor, Tensor]], both: bool) -> None:
        super().__init__()
        self.unpack = unpack
        self.both = both

    def forward(self, value: Any, *, factor: float) -> Tensor:
        left, right = self.unpack(value)
        return left * right * factor + left if self.both else left * factor


class Both(nn.Module):
    """A fork and a join."""

    def __init__(self, left: nn.Module, right: nn.Module, container: int, both: bool) -> None:
        super().__init__()
        pack, unpack = CONTAINERS[container]
        self.fork = Fork(left, right, pack)
        self.join = Join(unpack, both)

    def forward(self, x: Tensor) -> Tensor:
        return self.join(self.fork(x), factor=0.5)  # type: ignore[no-any-return]


class Cubes(nn.Module):
    """A custom function with an unused result."""

    def __init__(self) -> None:
        super().__init__()
        self.cube = Cube()

    def forward(self, x: Tensor) -> Tensor:
        return self.cube(F.tanh(x))[0]  # type: ignore[no-any-return]


KINDS: list[Callable[[], nn.Module]] = [
    nn.Tanh,
    nn.PReLU,
    Scaled,
    Cubes,
    lambda: nn.Linear(4, 4),
    lambda: Chain([]),
    lambda: Chain([nn.Linear(4, 4), nn.ReLU(inplace=True)]),
]
leaves = st.sampled_from(KINDS).map(lambda build: build())


def larger(parts: st.SearchStrategy[nn.Module]) -> st.SearchStrategy[nn.Module]:
    """Return modules composed of the given ones."""
    again = parts.map(lambda part: Both(part, part, 0, True))  # one module at two places
    both = st.builds(Both, parts, parts, st.integers(0, len(CONTAINERS) - 1), st.booleans())
    return st.lists(parts, max_size=3).map(Chain) | parts.map(Around) | parts.map(Twice) | both | again


trees = st.recursive(leaves, larger, max_leaves=6).map(lambda tree: Chain([tree]))


def batch(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.linspace(-1, 1, 12, dtype=dtype).reshape(3, 4).requires_grad_()


def seen_by(kind: type[Tap], module: nn.Module) -> Seen:
    """Return the tensors that a tap on all submodules records in a step."""
    seen: Seen = []
    with kind(Selection("**").resolve(module), copies_into(seen), strict=True):
        module(batch()).square().sum().backward()
    assert hooks_on(module) == []
    return seen


@settings(max_examples=40)
@given(trees)
def test_inputs_and_outputs_are_what_plain_hooks_copy(tree: nn.Module) -> None:
    """Arguments before each call and outputs after it are bitwise equal to copies of plain hooks, in call order."""
    torch.manual_seed(0)
    inputs: Seen = []
    outputs: Seen = []

    def note(name: str, module: nn.Module) -> None:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            replaced(args, "in", lambda path, tensor: inputs.append((Site(name, path), tensor.detach().clone())))
            replaced(kwargs, "in", lambda path, tensor: inputs.append((Site(name, path), tensor.detach().clone())))

        def after(module: nn.Module, args: Any, output: Any) -> None:
            replaced(output, "out", lambda path, tensor: outputs.append((Site(name, path), tensor.detach().clone())))

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)

    twin = copy.deepcopy(tree)
    for name, module in Selection("**").resolve(twin).items():
        note(name, module)
    twin(batch())
    for kind, expected in ((InputTap, inputs), (OutputTap, outputs)):
        seen = seen_by(kind, tree)
        assert [site for site, _ in seen] == [site for site, _ in expected]
        assert all(torch.equal(ours, theirs) for (_, ours), (_, theirs) in zip(seen, expected, strict=True))


@settings(max_examples=40)
@given(trees)
def test_gradients_are_those_of_copies(tree: nn.Module) -> None:
    """Input gradients equal those of copies that the module takes, output gradients those of copies it returns."""
    module = copy.deepcopy(tree).double()
    inputs: Seen = []
    outputs: Seen = []

    def probe(name: str) -> Callable[..., Any]:
        def after(module: nn.Module, args: Any, output: Any) -> Any:
            def give(path: str, tensor: Tensor) -> Tensor:
                outputs.append((Site(name, path), tensor.clone()))
                return outputs[-1][1].clone()

            return replaced(output, "out", give)

        return after

    for name, submodule in Selection("**").resolve(module).items():
        submodule.register_forward_pre_hook(Probe(name, inputs), with_kwargs=True)
        submodule.register_forward_hook(probe(name))
    loss = module(batch(torch.float64)).square().sum()
    for kind, probes in ((InputGradientTap, inputs), (OutputGradientTap, outputs)):
        grads: tuple[Tensor | None, ...] = torch.autograd.grad(
            loss, [each for _, each in probes], allow_unused=True, retain_graph=True
        )
        expected = [(site, grad.float()) for (site, _), grad in zip(probes, grads, strict=True) if grad is not None]
        assert_seen(seen_by(kind, tree), expected[::-1], PRECISIONS["float32"])


@settings(max_examples=40)
@given(trees)
def test_a_step_under_all_taps_is_the_same_to_the_bit(tree: nn.Module) -> None:
    """Loss and gradients equal those without taps, and all outputs are freed with the loss, with the taps attached."""

    def step(module: nn.Module) -> list[Tensor]:
        x = batch()
        loss = module(x).square().sum()
        loss.backward()
        grads = [x.grad, *(parameter.grad for parameter in module.parameters())]
        return [loss.detach(), *(torch.zeros(()) if grad is None else grad for grad in grads)]

    expected = step(copy.deepcopy(tree))
    kinds = (InputTap, OutputTap, InputGradientTap, OutputGradientTap, ParameterTap, ParameterGradientTap)
    outputs: list[Tensor] = []
    twin = copy.deepcopy(tree)
    for each in twin.modules():
        each.register_forward_hook(lambda _, args, output: outputs.extend(dict(iter_tensors(output)).values()))
    taps = [kind(Selection("**").resolve(twin), lambda *_: None, strict=True) for kind in kinds]
    for tap in taps:
        tap.attach()
    found = step(twin)
    for tap in taps:
        tap.remove()
    assert all(map(torch.equal, found, expected))
    assert [hook for hook in hooks_on(twin, outputs) if hook.__module__.startswith("lightning_recorder")] == []


@settings(max_examples=40)
@given(trees)
def test_parameters_are_seen_at_each_call_and_their_gradients_once(tree: nn.Module) -> None:
    """A parameter is recorded once per call of its module, and its whole gradient once."""
    calls: list[str] = []
    twin = copy.deepcopy(tree)
    for name, module in Selection("**").resolve(twin).items():
        module.register_forward_hook(lambda *_, name=name: calls.append(name))
    loss = twin(batch()).square().sum()
    owned = {
        name: dict(module.named_parameters(recurse=False)) for name, module in Selection("**").resolve(twin).items()
    }
    assert [site for site, _ in seen_by(ParameterTap, tree)] == [(name, path) for name in calls for path in owned[name]]
    shown = [(Site(name, path), each) for name, paths in owned.items() for path, each in paths.items()]
    grads: tuple[Tensor | None, ...] = torch.autograd.grad(loss, [each for _, each in shown], allow_unused=True)
    expected = [(site, grad) for (site, _), grad in zip(shown, grads, strict=True) if grad is not None]
    assert_seen(seen_by(ParameterGradientTap, tree), expected, PRECISIONS["float32"])
