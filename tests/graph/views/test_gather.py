"""Many tensors of one container as one node, and checks of the drawing functions for such graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_recorder import ArgumentError
from lightning_recorder.graph import (
    BaseRenderer,
    Graph,
    GraphvizRenderer,
    GraphvizStyler,
    capture_graph,
    collapse,
    draw,
    fit_view,
    focus,
    gather,
    hide,
    record,
    without,
)
from tests.graph.nets import Net, X, linear
from tests.graph.outline import outline, text


def _cached(_: Any, x: Tensor) -> dict[str, Any]:
    return {"logits": x.exp(), "states": [(x + layer, x * layer) for layer in range(3)], "few": [x.cos(), x.sin()]}


def test_a_long_container_is_one_output() -> None:
    """More than four outputs of one container become one node with all of their tensors; fewer stay separate."""
    graph = capture_graph(Net(_cached), X)
    view = gather(graph)
    outputs = {node.name: len(node.outputs) for node in view.nodes if node.kind == "output"}
    assert outputs == {"output.logits": 1, "output.states": 6, "output.few[0]": 1, "output.few[1]": 1}
    (states,) = (node for node in view.nodes if node.name == "output.states")
    assert sum(edge.multiplicity for edge in view.into(states)) == 6
    assert Graph.from_json(view.to_json()) == view
    assert [node.name for node in fit_view(graph).nodes if node.kind == "output"] == list(outputs)


@pytest.mark.parametrize(
    ("number", "drawn"), [(9, ["input[0]", "input[1…9]"]), (8, [f"input[{each}]" for each in range(9)])]
)
def test_many_numbered_inputs_are_one(number: int, drawn: list[str]) -> None:
    """More than eight arguments of the same kind, such as the categories of a recommender, become one node."""
    first, others = torch.ones(2, 3), [torch.ones(2, dtype=torch.int64) for _ in range(number)]
    graph = capture_graph(Net(lambda _, x, *rest: x.sum() + sum(each.sum() for each in rest)), first, *others)
    view = gather(graph)
    assert [node.name for node in view.nodes if node.kind == "input"] == drawn
    assert sum(len(node.outputs) for node in view.nodes if node.kind == "input") == 1 + number
    assert len(view.edges) == len(graph.edges)


def test_the_states_of_two_layers_are_one_output() -> None:
    """Tensors in containers inside a container are one node if there are more than two, so that the layers fold."""

    def forward(net: Any, x: Tensor) -> dict[str, Any]:
        cache = []
        for layer in net.children():
            x, keys, values = layer(x)
            cache.append({"keys": keys, "values": values})
        return {"logits": x, "states": cache, "one": [{"keys": x.sin(), "values": x.cos()}]}

    def layer() -> nn.Module:
        return Net(lambda net, x: (net.fc(x), x + 1, x * 2), fc=linear())

    view = fit_view(capture_graph(Net(forward, layer0=layer(), layer1=layer()), X))
    outputs = [node.name for node in view.nodes if node.kind == "output"]
    assert outputs == ["output.logits", "output.states", "output.one[0].keys", "output.one[0].values"]
    assert [(node.name, node.repeats) for node in view.module_calls()] == [("layer0", 2), ("layer0.fc", 1)]


def test_without_large_containers_nothing_changes() -> None:
    """A graph with few inputs and outputs is unchanged."""
    graph = capture_graph(nn.Sequential(linear()), X)
    assert gather(graph) is graph


def test_a_focus_can_be_fitted() -> None:
    """A view of a focused part keeps its inputs and outputs."""
    net = nn.Sequential(linear(), nn.Sequential(nn.ReLU(), linear()), nn.Tanh())
    assert outline(fit_view(focus(capture_graph(net, X), "1")), outputs=True) == text(
        """
        0
        1.0: ReLU <- 0
        1.1: Linear <- 1.0
        2 <- 1.1
        """
    )


def test_the_order_of_a_container_does_not_keep_layers_apart() -> None:
    """Layers fold although the cache that they fill lists the first tensors of all of them before the second ones."""

    def forward(net: Any, x: Tensor) -> dict[str, Any]:
        pairs = []
        for layer in net.children():
            x = layer(x)
            pairs.append((x, x.exp()))
        return {"last": x, "states": [tensor for each in zip(*pairs, strict=True) for tensor in each]}

    view = fit_view(capture_graph(Net(forward, a0=linear(), a1=linear(), a2=linear()), X))
    assert outline(view, outputs=True) == text(
        """
        input
        (module) [3 times]
          a0: Linear <- input first, a0 ×2 next
          exp <- a0 ×3
        output.last <- a0
        output.states <- a0 ×3 all, exp ×3 all
        """
    )


def test_a_graph_can_be_drawn() -> None:
    """A recorded graph, or a view of one, can be drawn like a model."""
    net = nn.Sequential(linear(), nn.Sequential(nn.ReLU()))
    graph = record(net, "mine", input_data=X)
    assert draw(graph, depth=1).view == draw(net, X, graph_name="mine", depth=1).view
    assert draw(focus(graph, "1"), graph_name="part").graph.title == "part"
    assert repr(graph) == "<graph of mine: 10 nodes, 5 edges>"
    assert repr(draw(graph)) == "<drawing of mine: 6 nodes, 3 edges>"


def test_a_name_is_no_part_of_the_structure() -> None:
    """Graphs with different names have the same structural hash."""
    one, other = (record(linear(), name, (2, 4)) for name in ("one", "other"))
    assert one.structural_hash() == other.structural_hash()
    assert (one.title, record(linear(), input_shapes=(2, 4)).title) == ("one", "Linear")


def test_parameters_of_a_module_that_is_called_many_times_count_once() -> None:
    """A closed call has the parameters of the modules inside, counted once however often they are called."""
    net = Net(
        lambda net, x: net.inner(x), inner=Net(lambda inner, x: inner.cell(inner.cell(inner.cell(x))), cell=linear())
    )
    view = collapse(capture_graph(net, X), 1)
    assert [node.parameters for node in view.module_calls()] == [20] == [view.parameters]


def test_one_name_or_kind_instead_of_several() -> None:
    """A single name or kind is accepted as a string, and an unknown kind is rejected."""
    graph = capture_graph(Net(lambda _, x: x.t().transpose(0, 1).relu()), X)
    assert [node.name for node in hide(graph, "transpose").nodes if node.kind == "op"] == ["t", "relu"]
    assert without(graph, "output") == without(graph, ["output"])
    with pytest.raises(ArgumentError, match=r"the kinds of nodes are module, op, .*; got 'params'"):
        without(graph, ["params"])  # type: ignore[list-item]  # deliberately invalid


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # scripted models are still in use
def test_a_scripted_model_joins_its_input_with_its_output() -> None:
    """A model that TorchScript runs as a whole is one node between its input and its output."""
    net: Any = torch.jit.script(nn.Sequential(linear(), nn.ReLU()))
    ops = [node.name for node in capture_graph(net, X).nodes if node.kind == "op"]
    view = capture_graph(net, X)
    (output,) = (node for node in view.nodes if node.kind == "output")
    assert ops
    assert {view[edge.source].kind for edge in view.into(output)} == {"op"}


MISTAKEN: Any = {"class": nn.Linear, "function": abs, "model": nn.ReLU(), "styler class": GraphvizStyler}


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (
            lambda: draw(MISTAKEN["class"], X),
            "the model must be an nn.Module, got the class Linear: create an instance first",
        ),
        (
            lambda: record(MISTAKEN["function"], input_data=X),
            "the model must be an nn.Module, got <built-in function abs>",
        ),
        (
            lambda: GraphvizRenderer(MISTAKEN["model"]),
            "a renderer takes a Graph, such as the result of record.. or of a view, got ReLU",
        ),
        (
            lambda: GraphvizRenderer(capture_graph(nn.ReLU(), X), MISTAKEN["styler class"]),
            "styler must be an instance of GraphvizStyler, got the class: write GraphvizStyler",
        ),
    ],
)
def test_wrong_arguments_are_named(call: Any, told: str) -> None:
    """The error for an argument that is not a model, graph or styler names the argument."""
    assert issubclass(GraphvizRenderer, BaseRenderer)
    with pytest.raises(ArgumentError, match=told):
        call()
