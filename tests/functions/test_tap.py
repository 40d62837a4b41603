"""The results of torch functions are recorded under the names that the graph gives them, and nothing else changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from lightning_recorder import RecordingError
from lightning_recorder.functions import (
    FUNCTIONS,
    ChosenFunctions,
    FunctionGradientTap,
    FunctionOutputTap,
    function_sites,
)
from lightning_recorder.graph import GraphCapture
from lightning_recorder.internals.autograd import current_function_mode
from lightning_recorder.taps import Site


class Block(nn.Module):
    """Calls the same function twice, as a function and as a method."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.two(F.relu(self.one(x))).relu()
        return found


class Net(nn.Module):
    """Two blocks, the first of which is called twice, an activation module, and functions of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.tanh = nn.Tanh()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](self.blocks[0](x)))
        logits: Tensor = self.head(torch.tanh(self.tanh(x)))
        return logits.softmax(-1)


@pytest.fixture
def net() -> Net:
    """Return the model, always with the same parameters."""
    torch.manual_seed(0)
    return Net()


def recorded(net: nn.Module, run: Callable[[], Any], kind: Any = FunctionOutputTap, **options: Any) -> Any:
    """Return the recorded tensors by the names of their sites, in order."""
    found: dict[str, list[Tensor]] = {}
    chosen = ChosenFunctions(net, options.pop("functions", FUNCTIONS), **options)
    with kind(chosen, lambda site, tensor: found.setdefault(site.name, []).append(tensor.clone()), strict=True):
        run()
    assert current_function_mode() is None
    return found


def test_sites_are_those_of_the_graph(net: Net) -> None:
    """A function has the name of the module that calls it; its second call in a call of the module has a number."""
    x = torch.randn(5, 4)
    with GraphCapture(net, x) as capture:
        net(x)
    found = recorded(net, lambda: net(x))
    assert list(found) == ["blocks.0.relu", "blocks.0.relu#2", "blocks.1.relu", "blocks.1.relu#2", "tanh()", "softmax"]
    assert {name: len(each) for name, each in found.items() if len(each) > 1} == {
        "blocks.0.relu": 2,
        "blocks.0.relu#2": 2,
    }
    # The graph also has the function inside of nn.Tanh, whose output is recorded as that of the module.
    assert {*function_sites(capture.graph()).values()} == {*found, "tanh.tanh"}


def test_a_module_that_is_made_where_it_is_called_is_a_function() -> None:
    """``nn.Softmax(dim=-1)(x)`` is a function of the module that calls it, in the graph as well."""

    class Made(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = nn.Softmax(dim=-1)(nn.ReLU()(nn.ReLU()(x.relu())) * self.weight)
            return found

    net, x = nn.Sequential(nn.Sequential(Made(), nn.Linear(4, 4)), nn.ReLU()), torch.randn(5, 4)
    with GraphCapture(net, x) as capture:
        net(x)
    found = recorded(net, lambda: nn.CrossEntropyLoss()(net(x), torch.arange(4).repeat(2)[:5] % 4))
    assert list(found) == ["0.0.relu", "0.0.relu#2", "0.0.relu#3", "0.0.softmax", "cross_entropy"]
    assert [*function_sites(capture.graph()).values()] == [*list(found)[:4], "1.relu"]


def test_outputs_are_those_of_the_functions(net: Net) -> None:
    """The recorded tensor is the result when the function returns, even if it is changed in place afterwards."""
    x = torch.randn(5, 4)

    def run() -> None:
        y = torch.relu(x)
        y += 1
        torch.sigmoid_(y)

    found = recorded(net, run)
    assert torch.equal(found["relu"][0], x.relu())
    assert torch.equal(found["sigmoid"][0], (x.relu() + 1).sigmoid())


@pytest.mark.parametrize("inplace", [False, True])
def test_gradients_are_those_of_the_outputs(net: Net, inplace: bool) -> None:
    """The recorded gradient is that of the result, also of a function in place."""
    x = torch.tensor([[1.0, -2.0]], requires_grad=True)

    def run() -> None:
        y = F.relu(x * 2, inplace=inplace)
        (y * torch.tensor([3.0, 5.0])).sum().backward()

    found = recorded(net, run, FunctionGradientTap)
    assert {name: each[0].tolist() for name, each in found.items()} == {"relu": [[3.0, 5.0]]}


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_count_once(net: Net, reentrant: bool) -> None:
    """Calls that a checkpoint repeats in the backward pass give no second output, and no second gradient.

    A reentrant checkpoint builds its graph inside the backward pass, where no mode is active.
    """
    x = torch.randn(5, 4, requires_grad=True)

    def run() -> None:
        checkpoint(net.blocks[0], x, use_reentrant=reentrant).sum().backward()

    for kind in (FunctionOutputTap, FunctionGradientTap):
        found = recorded(net, run, kind)
        is_seen = kind is FunctionOutputTap or not reentrant
        names = ["blocks.0.relu", "blocks.0.relu#2"] if is_seen else []
        assert {name: len(each) for name, each in found.items()} == dict.fromkeys(names, 1)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"functions": ["tanh"]}, ["tanh()"]),
        ({"names": ["blocks.*.relu"]}, ["blocks.0.relu", "blocks.0.relu#2", "blocks.1.relu", "blocks.1.relu#2"]),
        ({"names": ["blocks.0.relu#2", "softmax"]}, ["blocks.0.relu#2", "softmax"]),
        ({"exclude": ["blocks.**"]}, ["tanh()", "softmax"]),
        ({"types": [nn.Softmax, "torch.nn.Tanh"]}, ["tanh()", "softmax"]),
    ],
)
def test_selection(net: Net, options: Any, names: list[str]) -> None:
    """Functions are chosen by their own names, by those of their sites, and by the class that computes the same."""
    assert list(recorded(net, lambda: net(torch.randn(5, 4)), **options)) == names


def test_other_modes_and_classes_are_respected(net: Net) -> None:
    """A mode of the user sees every function, and a subclass stays one; transformed tensors are left out."""
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Tagged(Tensor):
        pass

    def run() -> None:
        with Mode():
            torch.relu(torch.ones(2))
        assert type(torch.relu(torch.ones(2).as_subclass(Tagged))) is Tagged
        torch.func.vmap(torch.tanh)(torch.ones(2, 3))
        torch.func.grad(lambda x: torch.sigmoid(x).sum())(torch.ones(2))
        torch.relu(torch.ones(2, device="meta"))

    found = recorded(net, run)
    assert seen.count(torch.relu) == 1
    assert [type(each) for each in found["relu"] + found["relu#2"]] == [Tensor, Tensor]
    assert "tanh" not in found
    assert "sigmoid" not in found


def test_modes_end_in_any_order(net: Net) -> None:
    """A tap that ends before a mode that was entered later leaves that mode in place, and the reverse."""

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    tap = FunctionOutputTap(ChosenFunctions(net, FUNCTIONS), lambda site, tensor: None)
    for is_first in (True, False):
        mode: Any = Mode()
        tap.attach()
        mode.__enter__()
        if is_first:
            tap.remove()
            assert id(current_function_mode()) == id(mode)
            mode.__exit__(None, None, None)
        else:
            mode.__exit__(None, None, None)
            tap.remove()
        assert current_function_mode() is None


def test_a_fused_transformer_is_left_alone() -> None:
    """A transformer in eval mode computes the same bits, which a function mode would change."""
    torch.manual_seed(0)
    net = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, batch_first=True)
    x = torch.randn(2, 3, 8)
    found: list[Site] = []
    tap = FunctionOutputTap(ChosenFunctions(net, FUNCTIONS), lambda site, _: found.append(site))
    with tap:
        net(x)
    assert [site.name for site in found] == ["self_attn.multi_head_attention_forward", "relu"]
    assert tap.unseen == ""
    net.eval()
    with torch.no_grad():
        expected = net(x)
        with tap:
            assert torch.equal(net(x), expected)
    assert len(found) == 2
    assert "fused path" in tap.unseen


def test_functions_of_custom_functions_are_no_sites(net: Net) -> None:
    """A custom ``autograd.Function`` is one node of the graph, so the functions in it are no sites."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return torch.relu(x) * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    double: Any = Double  # torch does not annotate apply
    assert recorded(net, lambda: double.apply(torch.ones(2, requires_grad=True))) == {}


def test_an_error_costs_the_function_alone(net: Net) -> None:
    """A receiver that raises gives one warning and no error in the model; with ``strict`` it raises."""

    def fail(site: Site, tensor: Tensor) -> None:
        raise ZeroDivisionError

    x = torch.randn(5, 4)
    expected = net(x)
    with (
        pytest.warns(match=r"could not record module 'blocks.1.relu#2' at 'out'"),
        FunctionOutputTap(ChosenFunctions(net, ["relu"], names=["blocks.1.relu#2"]), fail),
    ):
        assert torch.equal(net(x), expected)
    with (
        pytest.raises(RecordingError, match="ZeroDivisionError"),
        FunctionOutputTap(ChosenFunctions(net, ["relu"]), fail, strict=True),
    ):
        net(x)
    assert current_function_mode() is None


def test_compiled_code_stays_compiled() -> None:
    """With ``eager=False``, compiled code runs without the mode: it is not compiled again, and the tap says so."""
    net = nn.Sequential(Block(), nn.Linear(4, 2))
    compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    fast = torch.compile(net[0], backend=backend)
    found: list[str] = []
    tap = FunctionOutputTap(ChosenFunctions(net, FUNCTIONS), lambda site, _: found.append(site.name))
    tap.eager = False
    x = torch.randn(3, 4)
    fast(x)
    with tap:
        torch.tanh(fast(x))
    fast(x)
    torch.compiler.reset()
    assert len(compiled) == 1
    assert found == ["tanh"]
    assert tap.unseen == "compiled code, which stays compiled"


class Flex(nn.Module):
    """Has an attention whose function is called by no mode; a CPU cannot train it."""

    def forward(self, x: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        return flex_attention(x, x, x)


@pytest.mark.parametrize("functions", [["heads"], ["relu"]])
def test_flex_attention_is_named(functions: list[str]) -> None:
    """A model with ``flex_attention`` says that it has no scores, if they are wanted."""
    net = nn.ModuleDict({"first": Block(), "attention": Flex()})
    tap = FunctionOutputTap(ChosenFunctions(net, functions), lambda site, tensor: None)
    with tap:
        assert tap.unseen == "flex_attention, as in attention" * ("heads" in functions)


def test_copies_are_not_attached(net: Net) -> None:
    """A copy of a tap is not attached and may be removed."""
    tap = FunctionOutputTap(ChosenFunctions(net, FUNCTIONS), lambda site, tensor: None)
    with tap:
        other = copy.copy(tap)
        assert not other.attached
        other.remove()
        assert tap.attached
