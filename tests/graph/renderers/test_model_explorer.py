"""The JSON for Google's Model Explorer, read by the classes of its own package if it is installed."""

from __future__ import annotations

import importlib
import json
from dataclasses import fields
from typing import Any

import pytest
from torch import nn

from lightning_recorder.graph import Graph, capture_graph, fit_view, to_model_explorer, to_node_data
from tests.graph.nets import Net, X, linear, stack

# The documented keys of a collection, a graph, a node, an edge and the metadata of an output.
COLLECTION = {"label", "graphs", "graphSorting"}
GRAPH = {"id", "nodes", "groupNodeAttributes"}
NODE = {"id", "label", "namespace", "attrs", "incomingEdges", "outputsMetadata"}
EDGE = {"sourceNodeId", "sourceNodeOutputId", "targetNodeInputId"}


def collection_of(graph: Graph) -> Any:
    """Return the collection after a round trip through JSON text."""
    return json.loads(json.dumps(to_model_explorer(graph)))


def test_a_small_graph() -> None:
    """A call is a layer, a function a node inside it, and each edge names the output and the input that it joins."""
    net = nn.Sequential(linear())
    (graph,) = collection_of(capture_graph(net, X))["graphs"]
    shown = [(node["label"], node["namespace"], len(node["incomingEdges"])) for node in graph["nodes"]]
    assert graph["id"] == "Sequential.forward"
    assert shown == [
        ("input", "", 0),
        ("weight", "0 (Linear)", 0),
        ("bias", "0 (Linear)", 0),
        ("linear", "0 (Linear)", 3),
        ("output", "", 1),
    ]
    assert graph["groupNodeAttributes"] == {
        "": {"scope": "forward", "size": "20 parameters"},
        "0 (Linear)": {"name": "0", "class": "Linear", "size": "20 parameters"},
    }
    linear_node = graph["nodes"][3]
    assert linear_node["outputsMetadata"][0]["attrs"][:2] == [
        {"key": "shape", "value": "2×4"},
        {"key": "dtype", "value": "float32"},
    ]
    assert [edge["targetNodeInputId"] for edge in linear_node["incomingEdges"]] == ["0", "1", "2"]


def test_an_edge_names_the_output() -> None:
    """An edge from the second of two outputs with one shape names the second one."""
    (graph,) = collection_of(capture_graph(Net(lambda _, x: x.chunk(2, dim=1)[1].exp()), X))["graphs"]
    (node,) = (node for node in graph["nodes"] if node["label"] == "exp")
    assert [edge["sourceNodeOutputId"] for edge in node["incomingEdges"]] == ["1"]


@pytest.mark.parametrize("view", [lambda graph: graph, fit_view], ids=["whole", "fitted"])
def test_the_documented_schema(view: Any) -> None:
    """All keys are documented ones, ids are unique strings, edges join nodes that exist, and each edge occurs once."""
    graph = view(capture_graph(stack(4), X))
    collection = collection_of(graph)
    assert set(collection) == COLLECTION
    (data,) = collection["graphs"]
    assert set(data) == GRAPH
    ids = [node["id"] for node in data["nodes"]]
    assert len(set(ids)) == len(ids)
    ends = set()
    for node in data["nodes"]:
        assert set(node) == NODE
        assert all(set(pair) == {"key", "value"} and type(pair["value"]) is str for pair in node["attrs"])
        for edge in node["incomingEdges"]:
            assert set(edge) == EDGE
            assert edge["sourceNodeId"] in ids
            ends.add((int(edge["sourceNodeId"]), int(node["id"])))
    assert ends == {(edge.source, edge.target) for edge in graph.edges}


def test_equal_names_are_different_layers() -> None:
    """Two calls of one module are two layers, since Model Explorer merges layers of one path."""
    layer = linear()
    (graph,) = collection_of(capture_graph(nn.Sequential(layer, layer), X))["graphs"]
    paths = dict.fromkeys(node["namespace"] for node in graph["nodes"])
    assert list(paths) == ["", "0 (Linear)", "0 (call 2) (Linear)"]


def test_values_of_nodes() -> None:
    """The node data names the graph, and gives the functions and closed calls of a module its value."""
    graph = capture_graph(nn.Sequential(linear(), nn.ReLU()), X)
    data = json.loads(json.dumps(to_node_data(graph, {"0": 0.5, "1": 2}, "rms")))
    ids = {node["id"]: node["label"] for node in to_model_explorer(graph)["graphs"][0]["nodes"]}
    (found,) = data.values()
    assert list(data) == ["Sequential.forward"]
    assert found["name"] == "rms"
    assert {ids[number]: result for number, result in found["results"].items()} == {
        "linear": {"value": 0.5},
        "relu": {"value": 2.0},
    }
    assert [each["stop"] for each in found["gradient"]] == [0, 1]


def test_the_classes_of_model_explorer() -> None:
    """The keys are fields of the classes of the package ``ai-edge-model-explorer``."""
    pytest.importorskip("model_explorer", reason="ai-edge-model-explorer is not installed")
    builder = importlib.import_module("model_explorer.graph_builder")
    data = importlib.import_module("model_explorer.node_data_builder")
    classes = {"GraphCollection": COLLECTION, "Graph": GRAPH, "GraphNode": NODE, "IncomingEdge": EDGE}
    for name, keys in classes.items():
        assert keys <= {field.name for field in fields(getattr(builder, name))}
    assert {"name", "results", "gradient"} <= {field.name for field in fields(data.GraphNodeData)}
