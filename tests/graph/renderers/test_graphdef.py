"""The ``GraphDef`` for TensorBoard."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from torch import nn

from lightning_recorder import ArgumentError
from lightning_recorder.graph import Edge, Graph, Node, TensorMeta, capture_graph, collapse, fit_view, to_graph_def
from lightning_recorder.graph.views.fit import drawn_nodes
from tests.graph.nets import Net, X, linear
from tests.graph.random_nets import graphs
from tests.graph.sketch import HOSTILE, UNPRINTABLE, Sketch
from tests.sinks.events import parse_graph_def


def names(definition: Any) -> list[str]:
    return [node.name for node in definition.node]


def inputs(definition: Any) -> dict[str, list[str]]:
    return {node.name: list(node.input) for node in definition.node}


def attributes(node: Any) -> dict[str, Any]:
    """Return the attributes of a node as Python values, without the shapes."""
    found = {}
    for name, value in node.attr.items():
        field = value.WhichOneof("value")
        found[name] = getattr(value, field)
        if field == "s":
            found[name] = found[name].decode()
        if field == "list":
            found[name] = list(value.list.i)
    found.pop("_output_shapes", None)
    return found


def walk(graph: Graph, call: Node) -> list[int]:
    """Return the drawn contents of a call, in order."""
    parts = ((node, graph.children(node)) for node in graph.children(call))
    return [number for node, held in parts for number in (walk(graph, node) if held else [node.id])]


def test_names_lie_in_each_other() -> None:
    """A name is the path of the module calls, including lists of modules; an op is its function."""
    sketch = Sketch()
    x = sketch.add("input", "x")
    encoder = sketch.call("encoder", "Encoder")
    layer = sketch.call("encoder.layers.0", "Layer", inside=encoder)
    fc = sketch.call("encoder.layers.0.linear1", "Linear", inside=layer)
    weight = sketch.add("parameter", "encoder.layers.0.linear1.weight", inside=fc)
    mean = sketch.add("buffer", "encoder.layers.0.linear1.norm.mean", inside=fc)
    op = sketch.add("op", "linear", x, weight, mean, inside=fc)
    sketch.add("output", "output", op)
    definition = to_graph_def(sketch.graph())
    assert [(node.name, node.op, list(node.input)) for node in definition.node] == [
        ("x", "input", []),
        ("encoder/layers/0/linear1/weight", "Const(parameter)", []),
        ("encoder/layers/0/linear1/norm/mean", "Const(buffer)", []),
        (
            "encoder/layers/0/linear1/linear",
            "linear",
            ["x", "encoder/layers/0/linear1/weight", "encoder/layers/0/linear1/norm/mean"],
        ),
        ("output", "output", ["encoder/layers/0/linear1/linear"]),
    ]


def test_no_two_names_are_alike() -> None:
    """Later calls of a module have a number, equal functions are numbered, and folded nodes show their repetitions."""
    sketch = Sketch()
    sketch.add("op", "add")
    sketch.add("op", "add")
    for call in (1, 2):
        sketch.add("op", "add", inside=sketch.call("fc", "Linear", call=call))
    sketch.add("op", "add", inside=sketch.call("add", "Add"))
    sketch.add("op", "relu", inside=sketch.call("other", "Shared", call=3))
    sketch.add("op", "exp", inside=sketch.call("h.0", "Block", repeats=12))
    sketch.add("op", "tanh", inside=sketch.call("", "", repeats=3))
    sketch.add("op", "sin", inside=sketch.call("cell", "Net", repeats=4, shared=True))
    assert names(to_graph_def(sketch.graph())) == [
        "add",
        "add(2)",
        "fc/add",
        "fc(2)/add",
        "add(3)/add",
        "other(3)/relu",
        "h/0(x12)/exp",
        "(x3)/tanh",
        "cell(x4_same_weights)/sin",
    ]


def test_a_function_does_not_become_a_pile() -> None:
    """No name is another name with a number appended: the tab would merge five of them into one node."""
    sketch = Sketch()
    for _ in range(9):
        sketch.add("op", "add")
    assert [name for name in names(to_graph_def(sketch.graph())) if re.fullmatch(r"\D*\d+", name)] == []


def test_attributes() -> None:
    """A node has shapes, dtypes, device, autograd types, source line, module and size, and no empty attributes."""
    outputs = (TensorMeta((2, 3), "float32", "cuda:0"), TensorMeta((), "int64", "cuda:0"))
    call = Node(1, "module", "fc", 0, 1, "Linear", outputs=outputs[:1], parameters=15, repeats=2, parallel=True)
    op = Node(
        *(2, "op", "max", 0, 1),
        outputs=outputs,
        autograd=("MaxBackward0", "ViewBackward0"),
        scope="training_step",
        failed=True,
        source="net.py:4",
        duration_ms=0.5,
    )
    bare = Node(3, "op", "empty", 0, 1)
    definition = to_graph_def(Graph((Node(0, "module", "", None, 0, "Net"), call, op, bare), ()))
    closed, maximum, empty = definition.node
    assert (closed.op, closed.device) == ("Linear", "cuda:0")
    assert attributes(closed) == {
        "dtype": "float32",
        "module": "fc (Linear)",
        "parameters": 15,
        "repeats": 2,
        "parallel": True,
    }
    assert attributes(maximum) == {
        "dtype": "float32, int64",
        "autograd": "MaxBackward0, ViewBackward0",
        "source": "net.py:4",
        "scope": "training_step",
        "module": "(Net)",
        "failed": True,
        "duration_ms": 0.5,
    }
    shapes = [[dim.size for dim in shape.dim] for shape in maximum.attr["_output_shapes"].list.shape]
    assert shapes == [[2, 3], []]
    assert (empty.device, attributes(empty)) == ("", {"module": "(Net)"})


def test_the_shape_of_a_parameter_is_shown() -> None:
    """The attributes of a parameter, which is drawn as a dot without lines, include its shape."""
    sketch = Sketch()
    sketch.add("parameter", "weight", shapes=[(3, 4)])
    sketch.add("buffer", "mean", shapes=[(4,)])
    weight, mean = to_graph_def(sketch.graph()).node
    assert (attributes(weight)["shape"], attributes(mean)["shape"]) == ("3x4", "[4]")


def test_an_input_that_gives_several_tensors() -> None:
    """A source occurs once among the inputs, and an attribute lists the number of tensors for each input."""
    sketch = Sketch()
    x, y, z = (sketch.add("input", name) for name in "xyz")
    sketch.add("op", "cat", x, (y, 3), z)
    sketch.add("op", "mul", x, z)
    *_, cat, mul = to_graph_def(sketch.graph()).node
    assert (list(cat.input), attributes(cat)["multiplicity"]) == (["x", "y", "z"], [1, 3, 1])
    assert "multiplicity" not in attributes(mul)


def test_closed_calls_are_nodes() -> None:
    """In a view, a closed module call is a node with the class of the module."""
    net = nn.Sequential(nn.Sequential(linear(), nn.ReLU()))
    definition = to_graph_def(collapse(capture_graph(net, X)))
    assert [(node.name, node.op, list(node.input)) for node in definition.node] == [
        ("input", "input", []),
        ("0/0", "Linear", ["input"]),
        ("0/1", "ReLU", ["0/0"]),
        ("output", "output", ["0/1"]),
    ]


@given(graphs)
def test_the_same_graph(graph: Graph) -> None:
    """For any model there is one uniquely named node for each drawn node, and the edges are the same."""
    for view in (graph, fit_view(graph)):
        definition = to_graph_def(view)
        drawn = walk(view, view.root)
        place = dict(zip(names(definition), drawn, strict=True))
        assert len(place) == len(drawn) == len(drawn_nodes(view))
        edges = {
            (place[source.lstrip("^")], place[name]) for name, taken in inputs(definition).items() for source in taken
        }
        assert edges == {(edge.source, edge.target) for edge in view.edges}


# The characters that the tab can read.

TAKEN = ["constructor", "toString", "valueOf", "hasOwnProperty", "__proto__", "__root__", "__function_library__"]


@pytest.mark.parametrize("name", [*HOSTILE, *UNPRINTABLE, *TAKEN, ""], ids=lambda name: ascii(name)[:30])
def test_names_of_all_sorts(name: str) -> None:
    """Any name becomes a path of few characters, without empty parts, in a text that the tab's parser reads."""
    sketch = Sketch(name, scope=name)
    x = sketch.add("input", name)
    one = sketch.add("op", name, x, scope=name, autograd=(name,), source=name)
    call = sketch.call(name, name)
    two = sketch.add("parameter", f"{name}.{name}", inside=call)
    sketch.call(f"{name}.x", name, one, two, inside=call)
    definition = to_graph_def(sketch.graph())
    assert len(set(names(definition))) == 4
    for node in definition.node:
        assert re.fullmatch(r"[A-Za-z0-9_.()-]+(/[A-Za-z0-9_.()-]+)*", node.name)
        assert re.fullmatch(r"[A-Za-z0-9_.()-]+", node.op)
        assert not {node.op, node.name.partition("/")[0]} & set(TAKEN)
        assert set(node.input) <= set(names(definition))
    written = str(definition)
    assert written.isascii()
    assert parse_graph_def(written) == definition


def test_attributes_are_ascii() -> None:
    """Non-ASCII text, which the tab would show as octal UTF-8, is written as code points."""
    sketch = Sketch("é名")
    sketch.add("op", "relu", source="é.py:3")
    (node,) = to_graph_def(sketch.graph()).node
    assert attributes(node) == {"dtype": "float32", "module": r"(\xe9\u540d)", "source": r"\xe9.py:3"}


def test_names_that_differ_in_what_is_left_out() -> None:
    """Names that become equal without their unsupported characters are distinguished by a number."""
    sketch = Sketch()
    for name in ("a b", "a/b", "a_b", "名", "前"):
        sketch.add("op", name)
    assert names(to_graph_def(sketch.graph())) == ["a_b", "a_b(2)", "a_b(3)", "unnamed", "unnamed(2)"]


@pytest.mark.parametrize("type_name", ["ConstantPad2d", "Const", "MySummary"])
def test_no_class_is_drawn_as_a_constant_or_a_summary(type_name: str) -> None:
    """Only parameters and buffers have an op that the tab draws as a dot beside its users."""
    sketch = Sketch()
    sketch.call("pad", type_name)
    (node,) = to_graph_def(sketch.graph()).node
    assert node.op.lower() == type_name.lower()
    assert "Const" not in node.op
    assert "Summary" not in node.op


# Large graphs.


def test_a_scope_with_very_many_nodes_is_parted() -> None:
    """More than 500 siblings are split into scopes of 500, in the order of time, since the tab cannot lay out more."""
    sketch = Sketch()
    last = sketch.add("input", "x")
    call = sketch.call("loop", "Loop")
    for _ in range(1001):
        last = sketch.add("op", "add", last, inside=call)
    definition = to_graph_def(sketch.graph())
    scopes = [name.rpartition("/")[0] for name in names(definition)[1:]]
    assert scopes == [*["loop/1-500"] * 500, *["loop/501-1000"] * 500, "loop/1001-1001"]


def nested() -> Graph:
    """Return a graph of two blocks of two layers with three functions each."""
    sketch = Sketch()
    last = sketch.add("input", "x")
    for block in ("a", "b"):
        outer = sketch.call(block, "Block")
        for layer in (f"{block}.0", f"{block}.1"):
            inner = sketch.call(layer, "Layer", inside=outer)
            for op in ("f", "g", "h"):
                last = sketch.add("op", op, last, inside=inner)
    return sketch.graph()


@pytest.mark.parametrize(
    ("max_nodes", "expected"),
    [
        (13, ["x", *(f"{layer}/{op}" for layer in ("a/0", "a/1", "b/0", "b/1") for op in "fgh")]),
        (12, ["x", "a/0", "a/1", "b/0", "b/1"]),
        (5, ["x", "a/0", "a/1", "b/0", "b/1"]),
        (4, ["x", "a", "b"]),
        (3, ["x", "a", "b"]),
        (2, ["2_more", "b"]),
    ],
)
def test_too_large_a_graph_is_closed_from_within(max_nodes: int, expected: list[str]) -> None:
    """Too large a graph shows as many levels as fit; at the last level it shows the number of removed nodes."""
    assert names(to_graph_def(nested(), max_nodes)) == expected


def test_number_of_nodes() -> None:
    """A limit below 1 is rejected."""
    with pytest.raises(ArgumentError, match="max_nodes"):
        to_graph_def(nested(), 0)


def test_a_graph_of_nothing() -> None:
    """The graph of a model without calls has no nodes."""
    assert names(to_graph_def(Graph((Node(0, "module", "", None, 0),), ()))) == []


def test_a_captured_model() -> None:
    """The calls, parameters and functions of a captured model are named by their paths."""
    net = Net(lambda net, x: net.fc(net.fc(x).relu()), fc=linear())
    assert inputs(to_graph_def(capture_graph(net, X))) == {
        "input": [],
        "fc/weight": [],
        "fc/bias": [],
        "fc/linear": ["input", "fc/weight", "fc/bias"],
        "relu": ["fc/linear"],
        "fc(2)/linear": ["relu", "fc/weight", "fc/bias"],
        "output": ["fc(2)/linear"],
    }


def test_the_next_repetition_is_a_control_dependency() -> None:
    """An edge to the next repetition is a control dependency, after the other inputs; sizes that differ are unknown."""
    sketch = Sketch()
    start = sketch.add("op", "zeros")
    cell = sketch.call("cell", "GRUCell", repeats=5)
    sketch.edges += [Edge(cell, cell, 4, across=((cell, "next"),)), Edge(start, cell, 1, across=((cell, "first"),))]
    sizes = TensorMeta((2, 4), "float32", largest=(5, 4))
    sketch.nodes[cell] = replace(sketch.nodes[cell], outputs=(sizes,))
    node = to_graph_def(sketch.graph()).node[1]
    assert list(node.input) == ["zeros", "^cell(x5)"]
    assert [dim.size for dim in node.attr["_output_shapes"].list.shape[0].dim] == [-1, 4]
