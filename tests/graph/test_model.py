"""The graph as plain data."""

from __future__ import annotations

import copy
import gc
import json
import pickle
from collections.abc import Callable
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import jsonschema  # type: ignore[import-untyped]  # it has no types
import pytest
import torch
from torch import nn

from lightning_recorder import ArgumentError
from lightning_recorder.graph import (
    Edge,
    Graph,
    GraphCapture,
    Node,
    TensorMeta,
    capture_graph,
    collapse,
    draw,
    fold_repeats,
    make_dot,
    record,
)
from lightning_recorder.graph.model import Kind, Repetition
from tests.graph.nets import Net, X, linear, stack
from tests.graph.queries import only


def nested() -> Graph:
    """Return a graph of block(inner(linear, relu), linear) followed by a backward pass."""
    net = nn.Sequential(nn.Sequential(nn.Sequential(linear(), nn.ReLU()), linear()))
    with GraphCapture(net, {"a text <&>": X}, name="batch", scope="training_step") as recording:
        net(X).sum().backward()
    return recording.graph()


def test_json_gives_the_graph_back() -> None:
    """A graph is equal after a round trip through JSON text, including its scope and size."""
    graph = nested()
    assert Graph.from_json(json.loads(json.dumps(graph.to_json()))) == graph


def test_json_is_self_describing() -> None:
    """The JSON form has the fields of nodes and edges under their names."""
    graph = Graph(
        (
            Node(0, "module", "", None, 0, type_name="Net"),
            Node(
                1,
                "op",
                "relu",
                0,
                1,
                outputs=(TensorMeta((2, 3), "bfloat16"),),
                autograd=("ReluBackward0",),
                scope="loss",
                source="net.py:3",
            ),
        ),
        (Edge(0, 1, 2),),
        "training_step",
    )
    data = graph.to_json()
    assert (data["version"], data["scope"]) == (3, "training_step")
    assert json.loads(json.dumps(data))["nodes"][1] == {
        "id": 1,
        "kind": "op",
        "name": "relu",
        "parent": 0,
        "depth": 1,
        "type_name": "",
        "call": 1,
        "outputs": [{"shape": [2, 3], "dtype": "bfloat16", "device": "cpu", "largest": []}],
        "parameters": 0,
        "total_parameters": 0,
        "used_parameters": None,
        "tied": [],
        "autograd": ["ReluBackward0"],
        "scope": "loss",
        "failed": False,
        "source": "net.py:3",
        "duration_ms": None,
        "repeats": 1,
        "parallel": False,
        "shared": False,
        "members": [],
        "inputs": [],
        "arguments": [],
        "flops": None,
        "saved_bytes": None,
        "note": "",
        "output_bytes": 12,
    }
    assert json.loads(json.dumps(data["edges"])) == [
        {"source": 0, "target": 1, "multiplicity": 2, "tensor": None, "across": [], "outputs": []}
    ]


def test_json_of_recorded_graphs() -> None:
    """The JSON of a graph is what ``dataclasses.asdict`` returns, with all fields in their order."""
    for graph in (nested(), collapse(nested(), 1), fold_repeats(capture_graph(stack(4), X))):
        data = graph.to_json()
        nodes = [{**asdict(node), "output_bytes": node.output_bytes} for node in graph.nodes]
        edges = [{key: value for key, value in asdict(edge).items() if value or key != "part"} for edge in graph.edges]
        assert json.dumps(data["nodes"]) == json.dumps(nodes)
        assert json.dumps(data["edges"]) == json.dumps(edges)
        assert json.dumps(data["unused"]) == json.dumps(asdict(graph.unused))


ROOT = {"id": 0, "kind": "module", "name": "", "parent": None, "depth": 0, "outputs": []}
SOUND: dict[str, Any] = {"version": 3, "scope": "forward", "parameters": 0, "nodes": [ROOT], "edges": []}


def test_the_smallest_json() -> None:
    """A graph may consist of the root only."""
    assert Graph.from_json(SOUND).root.kind == "module"


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"version": 4}, id="later version"),
        pytest.param({"version": None}, id="no version"),
        pytest.param({"version": "2"}, id="version as text"),
        pytest.param({"nodes": 5}, id="nodes are a number"),
        pytest.param({"nodes": "abc"}, id="nodes are text"),
        pytest.param({"nodes": []}, id="no root"),
        pytest.param({"nodes": [[0, "module"]]}, id="node is a list"),
        pytest.param({"nodes": [{"id": 0}]}, id="node without outputs"),
        pytest.param({"nodes": [{**ROOT, "color": "red"}]}, id="node with another field"),
        pytest.param({"nodes": [{**ROOT, "kind": "ottput"}]}, id="node of an unknown kind"),
        pytest.param({"nodes": [{**ROOT, "outputs": [3]}]}, id="output without a shape"),
        pytest.param({"nodes": [ROOT, {**ROOT, "id": 1, "parent": 7, "depth": 1}]}, id="parent that is not there"),
        pytest.param({"edges": None}, id="no edges"),
        pytest.param({"edges": [{"source": 0}]}, id="edge without an end"),
        pytest.param(
            {"edges": [{"source": 0, "target": 7, "multiplicity": 1, "tensor": None}]}, id="edge into nowhere"
        ),
        pytest.param(
            {"edges": [{"source": 0, "target": 0, "multiplicity": 1, "tensor": 4}]}, id="edge with an odd tensor"
        ),
    ],
)
def test_json_of_something_else(change: dict[str, Any]) -> None:
    """Data that is not a graph of this version is rejected."""
    with pytest.raises(ArgumentError):
        Graph.from_json({**SOUND, **change})


@pytest.mark.parametrize("data", [[], None, "graph", 3], ids=["list", "null", "text", "number"])
def test_json_that_is_no_object(data: Any) -> None:
    """A JSON value that is not an object is rejected."""
    with pytest.raises(ArgumentError):
        Graph.from_json(data)


def test_a_graph_is_read_from_its_file(tmp_path: Path) -> None:
    """``from_json`` reads a file; where a path is given instead of a graph, the error says so."""
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(SOUND))
    assert Graph.from_json(path) == Graph.from_json(str(path)) == Graph.from_json(SOUND)
    functions: tuple[Callable[..., Any], ...] = (draw, make_dot, record, Graph)
    for function in functions:
        with pytest.raises(ArgumentError, match=r"got a path: write Graph\.from_json\('.*graph\.json'\) to read"):
            function(path)


def test_the_schema_describes_every_graph() -> None:
    """The published schema accepts recorded graphs and their views, has every field, and rejects wrong values."""
    schema = json.loads(resources.files("lightning_recorder").joinpath("schemas/files/graph.json").read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    costs = record(nn.Sequential(linear(), linear(), linear(), nn.Tanh()), input_data=X, costs=True)
    for graph in (nested(), collapse(nested(), 1), fold_repeats(costs), fold_repeats(capture_graph(stack(4), X))):
        data = json.loads(json.dumps(graph.to_json()))
        validator.validate(data)
        assert data["nodes"][0].keys() == schema["$defs"]["node"]["properties"].keys()
        # Only a view has parts of tensors.
        assert {*data["edges"][0], "part"} == schema["$defs"]["edge"]["properties"].keys()
        assert data["unused"].keys() == schema["properties"]["unused"]["properties"].keys()
        assert data.keys() == schema["properties"].keys()
        wrongs: list[dict[str, Any]] = [
            {"version": 4},
            {"nodes": []},
            {"nodes": [{**data["nodes"][0], "kind": "layer"}]},
        ]
        for wrong in wrongs:
            assert not validator.is_valid({**data, **wrong})
    assert set(schema["$defs"]["node"]["properties"]["kind"]["enum"]) == set(get_args(Kind))
    words = schema["$defs"]["edge"]["properties"]["across"]["items"]["prefixItems"][1]["enum"]
    assert set(words) == set(get_args(Repetition))


def test_lookup_by_id() -> None:
    """Nodes are found by id even if the ids have gaps, and an unknown id is a KeyError."""
    graph = Graph((Node(0, "module", "", None, 0), Node(5, "op", "relu", 0, 1)), ())
    assert graph[5].name == "relu"
    with pytest.raises(KeyError):
        graph[1]


def test_children_in_the_order_of_time() -> None:
    """The children of a call are the nodes directly inside it, in the order of time."""
    graph = nested()
    assert [node.name for node in graph.children(graph.root)] == ["batch['a text <&>']", "0", "sum", "backward"]
    assert [node.name for node in graph.children(only(graph, "0"))] == ["0.0", "0.1"]
    assert [node.name for node in graph.children(only(graph, "0.0.0"))] == ["0.0.0.weight", "0.0.0.bias", "linear"]
    assert graph.children(only(graph, "relu")) == []


def test_ancestors_from_the_inside_out() -> None:
    """The ancestors of a node are the calls around it, ending with the root; their number is the depth of the node."""
    graph = nested()
    assert [node.name for node in graph.ancestors(only(graph, "relu"))] == ["0.0.1", "0.0", "0", ""]
    assert list(graph.ancestors(graph.root)) == []
    assert all(len(list(graph.ancestors(node))) == node.depth for node in graph.nodes)


def test_module_calls() -> None:
    """All calls except the root are listed in the order of time, including repeated calls of a module."""
    net = Net(lambda net, x: net.a(net.b(net.a(x))), a=linear(), b=nn.ReLU())
    assert [(node.name, node.call) for node in capture_graph(net, X).module_calls()] == [("a", 1), ("b", 1), ("a", 2)]


def test_recorded_ids_ascend_in_time() -> None:
    """The ids of a recording count from 0, and no edge goes back in time."""
    graph = nested()
    assert [node.id for node in graph.nodes] == list(range(len(graph.nodes)))
    assert [edge for edge in graph.edges if edge.source >= edge.target] == []


def test_number_of_parameters() -> None:
    """The number of parameters counts tied parameters once and includes unused ones."""
    tied = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    tied[1].weight = tied[0].weight
    assert capture_graph(tied, torch.tensor([1])).parameters == 20
    # The output projection of an attention, 4 * 4 + 4 of its parameters, is never called as a module.
    attention = Net(lambda net, x: net.attention(x, x, x)[0], attention=nn.MultiheadAttention(4, 2), unused=linear())
    assert capture_graph(attention, X[None]).parameters == (12 * 4 + 12) + (4 * 4 + 4) + 20


@pytest.mark.parametrize(("shape", "shown"), [((), "scalar"), ((7,), "[7]"), ((2, 3, 4), "2×3×4"), ((0, 5), "0×5")])
def test_shapes_are_written_with_crosses(shape: tuple[int, ...], shown: str) -> None:
    """Shapes are written with crosses; a shape of a single size has brackets."""
    assert str(TensorMeta(shape, "float32")) == shown


def test_a_graph_is_plain_data() -> None:
    """A graph can be compared and pickled, and holds no tensor."""
    graph = nested()
    assert pickle.loads(pickle.dumps(graph)) == graph
    assert graph == nested()
    assert graph != capture_graph(nn.Sequential(linear()), X)


def test_nodes_lead_to_their_modules() -> None:
    """A node leads to the module that it is a call of or that is around it, also in a view, while the module lives."""
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    for graph in (capture_graph(net, X), collapse(capture_graph(net, X))):
        assert [graph.module(node) for node in graph.module_calls()] == list(net)
        assert graph.module(graph.root) is net
    graph = capture_graph(net, X)
    (function,) = [node for node in graph.nodes if node.name == "linear"]
    assert graph.module(function) is net[0]
    for copied in (pickle.loads(pickle.dumps(graph)), copy.deepcopy(graph), Graph.from_json(graph.to_json())):
        assert copied == graph
        assert copied.module(copied.root) is None
    del net
    gc.collect()
    assert graph.module(graph.root) is None
