"""The text that all renderers show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_recorder.graph import Edge, Graph, GraphvizRenderer, GraphvizStyler, Node, capture_graph, fit_view
from lightning_recorder.graph.model import Kind
from lightning_recorder.graph.renderers.labels import (
    class_and_size,
    full_name,
    in_bracket,
    same_weights,
    short_count,
    short_name,
    shown_across,
    shown_dilations,
    shown_part,
    shown_shapes,
    shown_times,
    size,
    tied_to,
    times,
    title,
    unused,
)
from tests.graph.nets import Net, X, linear, stack
from tests.graph.sketch import Sketch


@pytest.mark.parametrize(
    ("type_name", "scope", "parameters", "shown"),
    [
        ("Net", "forward", 0, "Net.forward"),
        ("Net", "training_step", 12_345, "Net.training_step · 12.3 k parameters"),
        ("", "forward", 1, "forward · 1 parameter"),
    ],
)
def test_title(type_name: str, scope: str, parameters: int, shown: str) -> None:
    """The title has the model's class, the recorded method, and the number of parameters, if there are any."""
    root = Node(0, "module", "", None, 0, type_name=type_name)
    assert title(Graph((root,), (), scope, parameters)) == shown


@pytest.mark.parametrize(
    ("parameters", "used", "shown"),
    [(80, 20, "80 parameters, 20 used"), (22_416, 22_400, "22.4 k parameters, 16 unused"), (80, 80, "80 parameters")],
)
def test_used_parameters(parameters: int, used: int, shown: str) -> None:
    """The number of used parameters is given if it differs, or that of the others if it is the same when rounded."""
    node = Node(1, "module", "fc", 0, 1, total_parameters=parameters, used_parameters=used)
    assert size(node) == shown


def test_names() -> None:
    """A module, parameter or buffer is named relative to the nearest named call around it; others keep their names."""
    sketch = Sketch()
    one = sketch.call("a.b", "B")
    frame = sketch.call("", "", inside=one)
    named = [
        sketch.call("a.b.c.0", "C", inside=frame, call=2),
        sketch.add("parameter", "a.b.weight", inside=one),
        sketch.add("buffer", "other.mean", inside=one),
        sketch.add("op", "a.b.op", inside=one),
        sketch.call("a.bc", "D", inside=one),
        sketch.add("input", "", inside=one),
    ]
    graph = sketch.graph()
    shown = [short_name(graph[number], graph) for number in (one, frame, *named)]
    assert shown == ["a.b", "", "c.0 (call 2)", "weight", "other.mean", "a.b.op", "a.bc", "input"]
    assert full_name(graph[named[0]]) == "a.b.c.0 (call 2)"


def test_a_long_name() -> None:
    """The first and the last 30 of more than 60 characters are kept, with the number of the call."""
    sketch = Sketch()
    exact, longer = sketch.call("x" * 60, "X"), sketch.call(f"{'a' * 31}{'b' * 30}", "X", call=3)
    graph = sketch.graph()
    assert short_name(graph[exact], graph) == "x" * 60
    assert short_name(graph[longer], graph) == f"{'a' * 30}…{'b' * 30} (call 3)"


def test_class_shapes_and_times() -> None:
    """A class is shown with its own parameters, at most two shapes are shown, and only repeated nodes have a number."""
    sketch = Sketch()
    sketch.call("a", "Linear", parameters=9_999, shapes=[(2, 3), (), (4,)])
    sketch.call("b", "ReLU", shapes=[(7,)], repeats=3)
    sketch.call("c", "Head", shapes=[], repeats=4, parallel=True)
    _, *nodes = sketch.graph().nodes
    assert [class_and_size(node) for node in nodes] == ["Linear · 9999 parameters", "ReLU", "Head"]
    assert [shown_shapes(node) for node in nodes] == ["2×3, scalar, …", "[7]", ""]
    assert [shown_times(node) for node in nodes] == ["", "×3", "×4 side by side"]


def test_tensors_of_an_edge() -> None:
    """An edge into repeated nodes counts the tensors of a single repetition, and an edge out of them those of all."""
    sketch = Sketch()
    x = sketch.add("input", "x")
    call = sketch.call("h.0", "Block", repeats=4)
    inner = sketch.call("h.0.part", "Part", (x, 4), inside=call, repeats=3)
    leaf = sketch.add("op", "relu", inner, inside=call)
    sketch.add("op", "add", (leaf, 8), (x, 2))
    graph = sketch.graph()
    assert [(edge.source, edge.target, times(edge, graph)) for edge in graph.edges] == [
        (x, inner, 1),
        (inner, leaf, 1),
        (leaf, 5, 8),
        (x, 5, 2),
    ]
    assert times(Edge(leaf, 5, 8, across=((call, "all"),)), graph) == 2
    assert times(Edge(x, inner, 24), graph) == 2


@pytest.mark.parametrize("blocks", [1, 2, 3, 4])
def test_tensors_of_an_edge_out_of_folded_blocks(blocks: int) -> None:
    """A function that takes the result of the last block three times says so, however many blocks there are."""
    net = Net(lambda net, x: torch.cat([net.blocks(x)] * 3), blocks=stack(blocks))
    view = fit_view(capture_graph(net, X))
    (into,) = (edge for edge in view.edges if view[edge.target].name == "cat")
    assert (times(into, view), shown_across(into, view)) == (3, "")


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (0, "0"),
        (9_999, "9999"),
        (10_000, "10 k"),
        (999_499, "999 k"),
        (999_999, "1 M"),
        (1_234_567, "1.23 M"),
        (999_999_999, "1 G"),
        (7 * 10**11, "700 G"),
    ],
)
def test_large_numbers_are_short(number: int, shown: str) -> None:
    """A number has at most four digits."""
    assert short_count(number) == shown


@pytest.mark.parametrize(
    ("kind", "shown"), [("parameter", "tied to a.weight"), ("op", "uses a.weight"), ("backward", "uses a.weight")]
)
def test_tied_tensors(kind: Kind, shown: str) -> None:
    """A function, or a call of ``torch.autograd.grad``, uses the parameter of another module."""
    assert tied_to(Node(1, kind, "grad", 0, 1, tied=("a.weight",))) == shown


def test_a_module_of_another_call_has_its_whole_name() -> None:
    """Inside a call that does not contain it, a module has a name that no part of the call has."""
    shared, stranger = linear(), nn.Tanh()

    def forward(net: Any, x: Tensor) -> Tensor:
        return stranger(net.get_submodule("1")(shared(x)))  # type: ignore[no-any-return]

    around = Net(forward)
    around.add_module("1", nn.ReLU())
    graph = capture_graph(nn.Sequential(nn.ReLU(), shared, around), X)
    inside = [node for node in graph.module_calls() if node.depth == 2]
    assert [short_name(node, graph) for node in inside] == ["Sequential.1 (call 2)", "1", "Tanh"]


def test_a_module_inside_a_later_call_is_numbered_once() -> None:
    """Only the outermost call has its number and says that its weights are those of call 1."""

    def forward(net: Any, x: Tensor) -> Tensor:
        y: Tensor = net.encoder(net.encoder(x))
        return net.encoder[0](y)  # type: ignore[no-any-return]  # the attributes of a Net are not declared

    view = fit_view(capture_graph(Net(forward, encoder=nn.Sequential(linear(), nn.ReLU())), X), fold=False)
    shown = [(short_name(call, view), same_weights(call, view)) for call in view.module_calls()]
    again = "same weights as call 1"
    first, second = [("encoder", ""), ("0", ""), ("1", "")], [("encoder (call 2)", again), ("0", ""), ("1", "")]
    assert shown == [*first, *second, ("encoder.0 (call 3)", again)]


@pytest.mark.parametrize(
    ("joined", "shown"),
    [
        ("2", ""),
        ("6 | 12 | 18", "dilation 6, 12, 18"),
        ("1 | 2 | 4 | 8 | 16", "dilation 1, 2, 4, …, 16"),
        ("1 | 2 | 1 | 2 | 1 | 2", "dilation 1, 2, 3 times"),
        ("2 | 4 | 1 | 2 | 4", "dilation 2, 4, 1, 2, 4"),
    ],
)
def test_dilations_of_folded_blocks(joined: str, shown: str) -> None:
    """The outermost call that has several dilations says them, those that recur once."""
    block = Node(1, "module", "block", 0, 1, arguments=(("dilation", joined),))
    inner = Node(2, "module", "block.conv", 1, 2, arguments=(("dilation", joined),))
    graph = Graph((Node(0, "module", "", None, 0), block, inner), ())
    assert [shown_dilations(node, graph) for node in (block, inner)] == [shown, ""]


def test_a_class_is_not_repeated() -> None:
    """A module that has the name of its class does not show the class."""
    named = {"bert.LayerNorm": "LayerNorm", "Softmax#2": "Softmax", "norm": "LayerNorm"}
    modules = [Node(1, "module", name, 0, 1, type_name=kind) for name, kind in named.items()]
    assert [class_and_size(each) for each in modules] == ["", "", "LayerNorm"]


def test_functions_in_place_are_marked() -> None:
    """A function that writes into its argument ends with ``_``, a sum in place is ``+=``, and a module says so."""

    def forward(net: Any, x: Tensor) -> Tensor:
        y = net.one(x).relu_()
        y += x
        return net.two(y)  # type: ignore[no-any-return]  # the attributes of a Net are not declared

    view = fit_view(capture_graph(Net(forward, one=linear(), two=nn.ReLU(inplace=True)), X))
    styled = [GraphvizStyler().style_node(node, view)["label"] for node in view.nodes]
    assert [word for word in ("relu_<", ">+=<", "ReLU · in place") if any(word in each for each in styled)] == [
        "relu_<",
        ">+=<",
        "ReLU · in place",
    ]
    unmarked = fit_view(
        capture_graph(Net(lambda net, x: net.two(net.one(x).relu() + x), one=linear(), two=nn.ReLU()), X)
    )
    assert {node.note for node in unmarked.nodes} == {""}
    assert view.structural_hash() == unmarked.structural_hash()


def test_a_result_that_nothing_takes_is_marked() -> None:
    """A module whose result reaches no output says so; one whose result is used does not."""

    def forward(net: Any, x: Tensor) -> Tensor:
        net.spare(x)
        return net.used(x)  # type: ignore[no-any-return]  # the attributes of a Net are not declared

    view = fit_view(capture_graph(Net(forward, spare=linear(), used=linear()), X))
    assert {node.name: unused(node, view) for node in view.module_calls() if node.name} == {
        "spare": "not used for the output",
        "used": "",
    }


def test_consecutive_notes_are_one_bracket() -> None:
    """Several calls that a checkpoint repeats have one frame that says so, and a single one says it itself."""
    calls = [Node(at, "module", f"part{at}", 0, 1, note="recomputed" if at != 3 else "") for at in range(1, 6)]
    view = Graph((Node(0, "module", "", None, 0), *calls[:3], *calls[3:4]), ())
    assert [in_bracket(each, view) for each in view.nodes[1:]] == [True, True, False, False]
    document = GraphvizRenderer(view).render().source
    assert document.count("cluster_bracket_1") == document.count(">recomputed<") - 1 == 1


def test_parts_of_a_tensor_are_named() -> None:
    """Edges that take different parts of one tensor name them; those that take the same part do not."""

    def forward(net: Any, x: Tensor) -> Any:
        one, other = net.fc(x).chunk(2, dim=-1)
        return one.tanh() * other.sigmoid() + x[..., 2:].relu()

    view = fit_view(capture_graph(Net(forward, fc=linear(), act=nn.ReLU()), X))
    shown = {view[edge.target].name: shown_part(edge, view) for edge in view.edges}
    assert {name: shown[name] for name in ("tanh", "sigmoid", "relu", "mul")} == {
        "tanh": "0",
        "sigmoid": "1",
        "relu": "[2:]",
        "mul": "",
    }


def test_steps_of_a_loop_have_no_part() -> None:
    """An edge of a folded loop names no part if each step takes another one."""

    def forward(net: Any, x: Tensor) -> Any:
        y, steps = x, net.fc(x).relu()
        for at in range(4):
            y = net.cell(y + steps[:, at : at + 1]).tanh()
        return y + steps[:, 0:1]

    view = fit_view(capture_graph(Net(forward, fc=linear(), cell=linear()), X))
    assert 4 in {node.repeats for node in view.nodes}
    assert [edge.part for edge in view.edges if view[edge.source].name == "relu"] == ["", "[:, 0:1]"]
