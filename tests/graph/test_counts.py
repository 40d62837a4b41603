"""The numbers of parameters in a picture, compared with ``numel`` on many architectures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_recorder.graph import Graph, capture_graph, collapse, draw, fit_view, own_tensors, to_text
from lightning_recorder.graph.renderers.labels import tied_to
from tests.graph.architectures import ARCHITECTURES, Case
from tests.graph.nets import Net, X, linear
from tests.graph.queries import only

pytestmark = pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")


def numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def captured(case: Case) -> Graph:
    net, batch, keywords = case
    with torch.no_grad():
        return capture_graph(net, *batch, **keywords)


def test_there_are_forty_architectures() -> None:
    """The laws of this file are tested on at least 40 architectures."""
    assert len(ARCHITECTURES) >= 40


@pytest.mark.parametrize("make", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_counts_of_every_box(make: Callable[[], Case]) -> None:
    """At every depth, boxes and frames count each parameter below their module once, and the boxes sum to the title."""
    torch.manual_seed(0)
    case = make()
    net = case[0]
    graph = captured(case)
    # A module that the model keeps outside of its registered ones, such as a function of Mamba, has no parameters here.
    modules = {**{call.name: nn.Module() for call in graph.module_calls()}, **dict(net.named_modules())}
    sizes = {name: numel(module) for name, module in modules.items()}
    assert graph.parameters == graph.root.total_parameters == numel(net)
    for call in graph.module_calls():
        assert call.total_parameters == sizes[call.name], call.name
    parameters = dict(net.named_parameters())
    used = {graph[edge.source].name for edge in graph.edges if graph[edge.source].kind == "parameter"}
    assert graph.root.used_parameters == sum(parameters[name].numel() for name in used)
    for depth in (1, 2, None):
        view = collapse(own_tensors(graph, depth), depth)
        open_calls = {node.parent for node in view.nodes}
        closed = [node for node in view.module_calls() if node.id not in open_calls]
        assert all(node.parameters == sizes[node.name] for node in closed)
        # Each parameter is in one box, or is a node; a tied one is in several boxes but counts once.
        inside = {id(each): each for node in closed for each in modules[node.name].parameters()}
        inside |= {id(parameters[node.name]): parameters[node.name] for node in view.nodes if node.kind == "parameter"}
        drawn = sum(each.numel() for each in inside.values())
        # The weights of a layer that calls others count for its function.
        drawn += sum(node.parameters for node in view.nodes if node.kind == "op")
        unused = {id(each): each for name, each in parameters.items() if name not in used}
        hidden = sum(each.numel() for key, each in unused.items() if key not in inside)
        assert drawn + hidden == graph.parameters


@pytest.mark.parametrize(
    ("make", "name", "size"),
    [("attention", "", 1088), ("encoder layer", "", 2224), ("encoder layer", "self_attn", 1088)],
)
def test_counts_of_attention(make: str, name: str, size: int) -> None:
    """The output projection counts, although it is not called as a module."""
    graph = captured(ARCHITECTURES[make]())
    node = next(node for node in (graph.root, *graph.module_calls()) if node.name == name)
    assert (node.total_parameters, node.used_parameters) == (size, size)


def test_used_and_defined() -> None:
    """The title tells the used parameters from all of them; a used weight of a layer that is not called counts."""
    text = to_text(fit_view(captured(ARCHITECTURES["experts that are not called"]())))
    # Five layers of 16 × 16 + 16, of which one is used, and the weight of another one.
    assert text.splitlines()[0] == "Net.forward · 1360 parameters, 528 used"
    assert "├─ e.weight  parameter  16×16" in text


def test_layers_in_a_python_list() -> None:
    """They count for themselves, but not for the model, which does not register them."""
    net: Any = Net(lambda net, x: net.blocks[0](net.one(x)), one=linear(), two=linear())
    net.blocks = [linear(4, 50)]
    graph = capture_graph(net, X)
    numbers = {node.name: (node.total_parameters, node.used_parameters) for node in graph.module_calls()}
    assert numbers == {"one": (20, 20), "blocks[0]": (250, 250)}
    assert (graph.root.total_parameters, graph.root.used_parameters) == (40, 20)


def test_a_frame_shows_its_total() -> None:
    """An open frame has the number of the parameters below it, and of the used ones if they are fewer."""
    inner = Net(lambda net, x: net.one(x).exp(), one=linear(), two=linear())
    text = to_text(fit_view(capture_graph(Net(lambda net, x: net.inner(x), inner=inner), X)))
    assert "├─ inner  Net · 40 parameters, 20 used" in text


def test_tied_weights_are_marked() -> None:
    """A layer with the weight of another one names it; so does a function that uses the weight of a closed layer."""
    text = to_text(fit_view(captured(ARCHITECTURES["tied pair"]())))
    assert "head  Linear · 80 parameters  tied to table.weight  2×4×20" in text
    assert text.startswith("Net.forward · 100 parameters\n")
    net = Net(lambda net, x: F.linear(net.fc(x), net.fc.weight), fc=linear())
    assert "linear  uses fc.weight  2×4" in to_text(fit_view(capture_graph(net, X)))


def test_a_computation_that_is_not_observed() -> None:
    """If the used parameters cannot be known, as in compiled or foreign code, nothing is said about them."""

    class Foreign(nn.Linear):
        @override
        def forward(self, x: Tensor) -> Tensor:
            return torch.from_numpy(x.numpy() + self.bias.numpy())

    with torch.no_grad():
        graph = capture_graph(nn.Sequential(Foreign(4, 4), linear()), X)
    assert (graph.root.total_parameters, graph.root.used_parameters) == (40, None)
    assert only(graph, "1").used_parameters == 20


def test_own_tensors_of_a_vision_transformer() -> None:
    """The class token and the position embedding of a ViT are drawn with edges to their users.

    The ``expand`` of the token changes its shape alone, and is left out.
    """
    view = fit_view(captured(ARCHITECTURES["ViT"]()))
    users = {
        view[edge.source].name.rpartition(".")[2]: view[edge.target].name
        for edge in view.edges
        if view[edge.source].kind == "parameter"
    }
    assert users == {"cls_token": "cat", "position_embeddings": "add"}
    assert "parameter" in [view[edge.source].kind for edge in view.into(only(view, "cat"))]


@pytest.mark.parametrize(
    ("make", "expected"),
    [("Mamba", {"A_log", "D"}), ("CLIP", {"logit_scale", "class_embedding", "position_ids"})],
)
def test_own_tensors_of_other_models(make: str, expected: set[str]) -> None:
    """Mamba's A and D and CLIP's scale are drawn and used, and so are buffers with positions."""
    view = fit_view(captured(ARCHITECTURES[make]()))
    used = {edge.source for edge in view.edges}
    drawn = {node.name.rpartition(".")[2] for node in view.nodes if node.kind in ("parameter", "buffer")}
    assert expected <= drawn
    assert all(node.id in used for node in view.nodes if node.kind in ("parameter", "buffer"))


@pytest.mark.parametrize(
    ("order", "calls"),
    [
        ("a", ["a (20)"]),
        ("b", ["b (20)"]),
        ("ab", ["a (20)", "b (20), tied to a.fc.weight"]),
        ("ba", ["b (20)", "a (20), tied to b.fc.weight"]),
    ],
)
def test_the_first_call_contains_a_tied_weight(order: str, calls: list[str]) -> None:
    """A weight belongs to the first called one of its owners, although another one registers it first."""

    def forward(net: Any, x: Tensor) -> Tensor:
        for name in order:
            x = getattr(net, name)(x)
        return x

    net = Net(forward, **{name: Net(lambda block, x: block.fc(x).tanh(), fc=linear()) for name in "ab"})
    net.b.fc.weight = net.a.fc.weight  # type: ignore[union-attr]  # both are layers
    view = collapse(own_tensors(capture_graph(net, X), 1), 1)
    assert not [node.name for node in view.nodes if node.kind == "parameter"]
    found = [node for node in view.module_calls() if node.name]
    assert [f"{each.name} ({each.total_parameters}){', ' * bool(each.tied)}{tied_to(each)}" for each in found] == calls


def test_a_later_call_is_not_tied_to_itself() -> None:
    """The second call of a module uses the module's own parameters, which are not marked as tied."""
    text = to_text(fit_view(captured(ARCHITECTURES["shared layer"]()), fold=False))
    assert "fc (call 2)  Linear · 272 parameters  2×16" in text


def test_the_weights_of_a_layer_that_calls_others() -> None:
    """The function of such a layer counts its weights, which are not drawn; those of one inside it are its own."""
    net, batch, keywords = ARCHITECTURES["norm with activation"]()
    graph = captured((net.eval(), batch, keywords))
    lines = to_text(fit_view(graph)).splitlines()
    assert lines[2:7] == [
        "├─ 0  Conv2d · 112 parameters  1×4×14×14",
        "├─ 1  NormWithActivation · 8 parameters  1×4×14×14",
        "│  ├─ batch_norm  8 parameters  1×4×14×14",
        "│  ├─ drop  Identity  1×4×14×14",
        "│  └─ act  ReLU  1×4×14×14",
    ]
    assert draw(graph).visual_graph.source.count("8 parameters") == 2
    assert "running_mean" in to_text(fit_view(graph, parameters=True))


def test_weights_of_a_layer_with_another_use_stay() -> None:
    """A weight that a layer uses twice, or that is the only one of its function, is drawn."""

    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.act = nn.ReLU()

        @override
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.act(super().forward(x)) * self.weight.norm()
            return y

    shown = to_text(fit_view(capture_graph(nn.Sequential(Scaled()), X)))
    assert [line.split()[1:3] for line in shown.splitlines() if " parameter " in line] == [
        ["├─", "weight"], ["├─", "bias"]
    ]  # fmt: skip
