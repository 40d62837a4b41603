"""The parts of a model that a recorded step did not use or train."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_recorder.graph import Graph, Unused, capture_graph, draw, show_unused, to_text
from tests.graph.nets import Net, X, linear, record_step
from tests.graph.svg import read_svg


class Lora(nn.Module):
    """A frozen linear layer with a trained update of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = linear().requires_grad_(False)
        self.down, self.up = nn.Linear(4, 1, bias=False), nn.Linear(1, 4, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.base(x) + self.up(self.down(x))


class _Reversible(torch.autograd.Function):
    """Calls layers without gradients, and again in the backward pass, as reversible networks do to save memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: nn.ModuleList) -> Tensor:
        ctx.layers, x = layers, x.clone()
        for layer in layers:
            x = x + layer(x)
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            for layer in ctx.layers:
                layer(x).sum().backward()
        return gradient, None


class _LayersOnly(torch.autograd.Function):
    """A function that returns what its last layer returns, as the reversible networks of several packages."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: nn.ModuleList) -> Tensor:
        ctx.layers = layers
        ctx.save_for_backward(x)
        for layer in layers:
            x = layer(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = x
            for layer in ctx.layers:
                y = layer(y)
            y.backward(gradient)
        return x.grad, None


class _LayersFirst(_Reversible):
    """Calls the layers before any function of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: nn.ModuleList) -> Tensor:
        ctx.layers = layers
        ctx.save_for_backward(X)
        y: Tensor = layers[1](layers[0](x))
        return y.relu()


def _trained(net: nn.Module) -> Graph:
    return record_step(net, lambda net, x: net(x).sum().backward())


def test_a_head_that_is_never_called() -> None:
    """A module that is never called is listed with its parameters, but not with its submodules."""
    heads = nn.ModuleList([nn.Sequential(linear(), nn.ReLU()), nn.Sequential(linear(), nn.Tanh())])
    graph = _trained(Net(lambda net, x: net.heads[0](net.body(x)), body=linear(), heads=heads))
    assert graph.unused == Unused(modules=("heads.1",), parameters=("heads.1.0.weight", "heads.1.0.bias"))


def test_everything_used() -> None:
    """A model that uses and trains everything has no unused parts."""
    graph = _trained(Net(lambda net, x: net.attention(x, x, x)[0], attention=nn.MultiheadAttention(4, 2)))
    assert graph.unused == Unused()
    assert not graph.unused


def test_lora() -> None:
    """The frozen layers are listed as modules; the trained update around them is not."""
    graph = _trained(nn.Sequential(Lora(), nn.ReLU(), Lora()))
    assert graph.unused == Unused(frozen=("0.base", "2.base"))
    notes = {node.name: node.note for node in graph.nodes if node.kind == "parameter" and "0." in node.name}
    assert notes == {"0.base.weight": "frozen", "0.base.bias": "frozen", "0.down.weight": "", "0.up.weight": ""}


def test_a_frozen_parameter_beside_a_trained_one() -> None:
    """A single frozen parameter is listed by its own name."""
    layer = linear()
    layer.bias.requires_grad_(False)
    net = Net(lambda net, x: net.fc(x), fc=layer)
    assert _trained(net).unused == Unused(frozen=("fc.bias",))


def test_a_whole_frozen_model() -> None:
    """In a model without trained parameters, its outermost modules are listed."""
    net = nn.Sequential(nn.Sequential(linear(), linear()), linear()).requires_grad_(False)
    assert capture_graph(net, X).unused == Unused(frozen=("0", "1"))


def _without_gradients(net: Any, x: Tensor) -> Any:
    with torch.no_grad():
        found = net.one(x)
    return net.other(found)


@pytest.mark.parametrize(
    ("forward", "stop"),
    [
        pytest.param(lambda net, x: net.other(net.one(x).detach()), "detach (detach)", id="detach"),
        pytest.param(_without_gradients, "one/linear (no_grad)", id="no_grad"),
        pytest.param(lambda net, x: net.other((net.one(x) > 0).float()),
                     "gt (bool result)", id="comparison"),
        pytest.param(lambda net, x: net.other(x[net.one(x).argmax(1) % 2]), "argmax (int64 result)", id="index"),
        pytest.param(lambda net, x: net.other(x[net.one(x).max(1).indices % 2]), "max (int64 result)", id="one result"),
    ],
)  # fmt: skip
def test_where_a_gradient_stops(forward: Any, stop: str) -> None:
    """The function that stops the gradient is listed with its reason, and the parameters before it get none."""
    unused = _trained(Net(forward, one=linear(), other=linear())).unused
    assert [line.partition(" at ")[0] for line in unused.stops] == [stop]
    assert unused.parameters == ("one.weight", "one.bias")
    assert (unused.modules, unused.frozen) == ((), ())


@pytest.mark.parametrize(
    ("at_first", "after_that", "notes"),
    [
        (True, False, ["", "frozen here"]),
        (True, True, ["", ""]),
        (False, False, ["", ""]),  # the parameters are frozen altogether
    ],
)
def test_a_function_whose_parameters_are_frozen_for_it(at_first: bool, after_that: bool, notes: list[str]) -> None:
    """A part that is frozen for one loss and trained by another one is known, as a critic in the loss of an actor."""

    def step(net: Any, x: Tensor) -> None:
        net.one.requires_grad_(at_first)
        loss = net.one(x).sum()
        net.one.requires_grad_(after_that)
        (loss + net.one(net.other(x)).sum()).backward()

    graph = record_step(Net(lambda net, x: net.one(x), one=linear(), other=linear()), step)
    assert [
        each.note for each in graph.nodes if each.name == "linear" and graph[each.parent or 0].name == "one"
    ] == notes


def test_a_function_whose_other_results_are_only_logged() -> None:
    """Only results that lead to the loss count."""

    def step(net: Any, x: Tensor) -> None:
        values, indices = net.one(x).topk(1)
        values.mean().exp()
        net.other(x[indices[:, 0] % 2]).sum().backward()

    graph = record_step(Net(lambda net, x: net.one(x), one=linear(), other=linear()), step)
    assert [line.partition(" at ")[0] for line in graph.unused.stops] == ["topk (int64 result)"]


@pytest.mark.parametrize(
    "like",
    [
        torch.zeros_like,
        torch.randn_like,
        lambda y: torch.full_like(y, 2.0),
        lambda y: y.new_ones(y.shape),
        lambda y: y.new_tensor(1.0),
        lambda y: torch.ones(4).expand_as(y),
        lambda y: torch.ones(8).view_as(y),
    ],
)
def test_the_shape_of_a_tensor_is_no_stop(like: Callable[[Tensor], Tensor]) -> None:
    """A function that takes only the shape and dtype of a tensor stops no gradient."""

    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.fc(x)
        return torch.add(y, like(y))

    assert _trained(Net(forward, fc=linear())).unused == Unused()


def test_a_stop_without_effect() -> None:
    """A detached copy that nothing uses, such as a logged loss, stops no gradient of the model."""

    def step(net: Any, x: Tensor) -> None:
        loss = net(x).sum()
        loss.detach().exp()
        loss.backward()

    assert record_step(linear(), step).unused == Unused()


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_a_checkpoint_is_no_stop(reentrant: bool) -> None:
    """A checkpoint passes gradients, although its forward pass may run without them."""
    net = Net(
        lambda net, x: net.other(checkpoint(lambda y: net.fc(y).tanh(), net.one(x), use_reentrant=reentrant)),
        one=linear(), fc=linear(), other=linear(),
    )  # fmt: skip
    assert _trained(net).unused == Unused()


@pytest.mark.parametrize("function", [_Reversible, _LayersFirst, _LayersOnly])
def test_a_function_that_calls_layers_is_no_stop(function: Any) -> None:
    """The layers that a custom function calls without gradients may get them in its backward pass."""
    net = Net(lambda net, x: net.out(function.apply(net.fc(x), net.layers)), fc=linear(), out=linear())
    net.layers = nn.ModuleList(linear() for _ in range(2))
    graph = _trained(net)
    assert graph.unused == Unused()
    assert capture_graph(net, X).unused == Unused()
    names = [node.name for node in graph.nodes if node.kind == "op"]
    last = max(place for place, name in enumerate(names) if name == function.__name__)
    assert names[last + 1] == "linear"
    if function is _LayersOnly:
        (around,) = (node for node in graph.nodes if node.name == function.__name__)
        before = [graph[graph[edge.source].parent or 0].name for edge in graph.into(around)]
        assert before == ["fc", "layers.1"]


def test_gradients_that_no_recorded_function_passes() -> None:
    """A parameter that gets a gradient in the backward pass is trained, however the gradient reaches it."""
    net: Any = Net(lambda net, x: net.one(x), one=linear(), other=linear())

    @torch.enable_grad()
    def train_the_other(gradient: Tensor) -> None:
        net.other(X).sum().backward()

    def step(net: nn.Module, x: Tensor) -> None:
        y = net(x)
        y.register_hook(train_the_other)
        y.sum().backward()

    assert record_step(net, step).unused == Unused()


def test_gradients_that_the_model_uses_itself() -> None:
    """Layers behind the forces of an energy, which are a gradient, are trained as well."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (forces,) = torch.autograd.grad(net.energy(x).tanh().sum(), x, create_graph=True)
        result: Tensor = net.later(net.head(forces))
        return result

    net = Net(forward, energy=linear(4, 1), head=linear(), later=linear())
    assert capture_graph(net, X).unused == Unused()


def test_gradients_without_a_graph_of_their_own() -> None:
    """Forces that were computed without create_graph stop the gradient, and the layers before them are not trained."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (forces,) = torch.autograd.grad(net.energy(x).tanh().sum(), x)
        result: Tensor = net.head(forces)
        return result

    net = Net(forward, energy=linear(4, 1), head=linear())
    for graph in (capture_graph(net, X), record_step(net, lambda net, x: net(x).sum().backward())):
        assert graph.unused.parameters == ("energy.weight", "energy.bias")
        assert any(each.startswith("grad (without create_graph)") for each in graph.unused.stops)


def test_gradients_that_are_only_looked_at() -> None:
    """A gradient that is logged stops nothing."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y: Tensor = net.fc(x)
        net.seen = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return y

    assert capture_graph(Net(forward, fc=linear()), X).unused == Unused()


def test_an_old_gradient_is_none_of_this_step() -> None:
    """A gradient that is left from an earlier step does not count, nor one that is filled with zeros."""
    net: Any = Net(lambda net, x: net.one(x), one=linear(), other=linear())
    (net.one(X) + net.other(X)).sum().backward()

    def step(net: nn.Module, x: Tensor) -> None:
        net.zero_grad(set_to_none=False)
        net(x).sum().backward()

    assert record_step(net, step).unused.parameters == ("other.weight", "other.bias")


def test_without_gradients() -> None:
    """A recording without any gradients lists the parameters that nothing used."""
    net = Net(lambda net, x: net.one(x), one=linear(), other=linear())
    with torch.no_grad():
        graph = capture_graph(net, X)
    assert graph.unused == Unused(modules=("other",), parameters=("other.weight", "other.bias"))


def test_fused_modules_use_their_contents() -> None:
    """The layers inside a fused encoder are not listed, although their calls are not observed."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    net = nn.TransformerEncoder(layer, 2).eval()
    with torch.no_grad():
        assert capture_graph(net, X[None]).unused == Unused()


def _with_a_spare_head() -> Graph:
    return _trained(Net(lambda net, x: net.body(x), body=nn.Sequential(Lora()), head=linear()))


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["h.0.drop", "h.1.drop", "h.2.norm", "fc1", "fc2"], "h.0,1.drop ×2, h.2.norm, fc1, fc2"),
        ([f"h.{place}.drop" for place in range(12)], "h.0…11.drop ×12"),
        (["h.2.fc.weight", "h.5.fc.weight"], "h.2,5.fc.weight ×2"),
        ([f"h.{place}.drop" for place in range(0, 20, 2)], "h.*.drop ×10"),
        ([f"h.{one}.heads.{two}.q" for one in range(3) for two in (0, 4)], "h.0…2.heads.0,4.q ×6"),
        (["h.0.heads.1.q", "h.1.heads.2.q"], "h.*.heads.*.q ×2"),
        (["h.3.heads.1.q", "h.3.heads.2.q"], "h.3.heads.1,2.q ×2"),
        (["s.01.fc.0.w", "s.01.fc.1.w"], "s.01.fc.0,1.w ×2"),
    ],
)
def test_names_that_differ_in_a_number(names: list[str], text: str) -> None:
    """In text, names that differ only in their numbers are one entry with their numbers and their count."""
    assert str(Unused(modules=tuple(names))) == f"modules never called: {text}"


def test_json_and_text() -> None:
    """The JSON form has the unused parts, and the text lists them at its end."""
    graph = _with_a_spare_head()
    assert Graph.from_json(json.loads(json.dumps(graph.to_json()))).unused == graph.unused
    assert graph.to_json()["unused"] == {
        "modules": ("head",),
        "parameters": ("head.weight", "head.bias"),
        "frozen": ("body.0.base",),
        "stops": (),
        "unregistered": (),
    }
    assert to_text(graph).splitlines()[-3:] == [
        "modules never called: head",
        "parameters without a gradient: head.weight, head.bias",
        "frozen: body.0.base",
    ]


def test_drawn_on_request() -> None:
    """A picture has a node without edges for a module that was never called, if it is asked for."""
    graph = _with_a_spare_head()
    assert [node.name for node in draw(graph, depth=1).view.module_calls()] == ["body"]
    assert [node.name for node in draw(graph, depth=1, unused=True).view.module_calls()] == ["body", "head"]
    view = show_unused(graph)
    assert {node.name: node.note for node in view.module_calls()} == {
        "body": "", "body.0": "", "body.0.base": "frozen", "body.0.down": "", "body.0.up": "", "head": "never called",
    }  # fmt: skip


def test_a_module_that_was_never_called_is_named_in_the_picture(tmp_path: Path) -> None:
    """Its box has a dashed border, its name, its class while the model lives, and the words ``never called``."""
    net = Net(lambda net, x: net.body(x), body=linear(), head=linear())
    drawing = draw(net, X, depth=1, unused=True)
    path = drawing.save(tmp_path / "graph.svg")
    (spare,) = (node for node in read_svg(path).nodes() if "head" in node.lines)
    assert spare.lines == ["head", "Linear", "never called"]
    (line,) = (line for line in drawing.visual_graph.body if "never called</font>" in line)
    assert 'style="filled,rounded,dashed"' in line


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    "project",
    [
        lambda weight: weight.data.renorm_(2, 0, 1.0),
        lambda weight: weight.data.clamp_(-1, 1).mul_(0.5),
        lambda weight: (weight.data.clamp_(-1, 1), weight.data.mul_(0.5)),
        torch.no_grad()(lambda weight: weight.clamp_(-1, 1)),
        lambda weight: setattr(weight, "data", weight.data.sign()),
    ],
    ids=["renorm", "chain", "twice", "no_grad", "assigned"],
)
def test_a_weight_that_is_projected_is_trained(project: Callable[[Tensor], object], backward: bool) -> None:
    """A layer that changes its weight before it uses it, without autograd, still gets a gradient."""

    def forward(net: Any, x: Tensor) -> Tensor:
        project(net.fc.weight)
        result: Tensor = net.fc(net.first(x))
        return result

    net = Net(forward, first=linear(), fc=linear())
    assert (_trained(net) if backward else capture_graph(net, X)).unused == Unused()


def test_a_copy_of_a_weight_that_is_projected_is_not_trained() -> None:
    """If the layer uses a detached copy instead, its weight gets no gradient."""

    def forward(net: Any, x: Tensor) -> Tensor:
        return F.linear(net.first(x), net.fc.weight.detach().clone().clamp_(-1, 1), net.fc.bias)

    unused = capture_graph(Net(forward, first=linear(), fc=linear()), X).unused
    assert unused.parameters == ("fc.weight",)
    assert len(unused.stops) == 1


def _in_list(step: Callable[[Any, Tensor], object]) -> Graph:
    """Record a step of a model with two layers in a Python list."""
    net: Any = Net(lambda net, x: net.blocks[1](net.blocks[0](net.fc(x))), fc=linear())
    net.blocks = [linear(), linear()]
    return record_step(net, step)


def _update(net: Any, x: Tensor, *others: Tensor) -> None:
    net(x).sum().backward()
    torch.optim.SGD([*net.parameters(), *others], 0.1).step()


def _update_frozen(net: Any, x: Tensor) -> None:
    for each in net.blocks:
        each.requires_grad_(False)
    _update(net, x)


def test_layers_in_a_python_list_are_not_trained() -> None:
    """Their parameters get a gradient, but ``parameters()`` and so the optimizer do not have them."""
    graph = _in_list(_update)
    names = [f"blocks[{number}].{name}" for number in range(2) for name in ("weight", "bias")]
    assert graph.unused == Unused(unregistered=tuple(names))
    assert str(graph.unused) == (
        "not registered in the model, so not trained: blocks[0,1].weight ×2, blocks[0,1].bias ×2"
    )
    notes = {node.name: node.note for node in graph.nodes if node.kind == "parameter"}
    assert notes == {**dict.fromkeys(("fc.weight", "fc.bias"), ""), **dict.fromkeys(names, "not registered")}
    assert Graph.from_json(graph.to_json()).unused == graph.unused


def _update_copy(net: Any, x: Tensor) -> None:
    copied = copy.deepcopy(net.blocks[0])
    copied(net.fc(x)).sum().backward()
    torch.optim.SGD(net.parameters(), 0.1).step()


@pytest.mark.parametrize(
    "step",
    [
        lambda net, x: _update(net, x, *net.blocks[0].parameters(), *net.blocks[1].parameters()),
        _update_frozen,
        _update_copy,
        lambda net, x: (net.fc(net.blocks[0](x).detach()).sum().backward(), torch.optim.SGD(net.parameters()).step()),
        lambda net, x: net(x).sum().backward(),
    ],
    ids=["trained", "frozen", "copied", "detached", "no step"],
)
def test_layers_in_a_python_list_on_purpose(step: Callable[[Any, Tensor], object]) -> None:
    """Layers that the optimizer was given, those without a gradient, and a copy, are no mistake."""
    graph = _in_list(step)
    assert graph.unused.unregistered == ()
    assert all(node.note == "" for node in graph.nodes if node.name.startswith("blocks") and node.kind == "parameter")
