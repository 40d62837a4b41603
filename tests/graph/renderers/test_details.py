"""Costs, arguments and notes of nodes in labels, tooltips and colors."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch import nn

from lightning_recorder.errors import ArgumentError, UnknownArgumentError
from lightning_recorder.graph import Graph, GraphvizStyler, Node, TensorMeta, draw, make_dot, record
from lightning_recorder.graph.renderers.details import describe_detail
from tests.graph.nets import X

OUT = (TensorMeta((2, 500), "float32"),)
NODE = Node(
    1, "op", "conv", 0, 1, outputs=OUT, inputs=(*OUT, *OUT), arguments=(("", "3"), ("stride", "2")),
    duration_ms=1.2345, flops=48_000_000, saved_bytes=0, note="stops the gradient: detach",
)  # fmt: skip


@pytest.mark.parametrize(
    ("detail", "text"),
    [
        ("arguments", "3, stride=2"),
        ("inputs", "takes 2×500, 2×500"),
        ("duration_ms", "1.23 ms"),
        ("flops", "48 MFLOP"),
        ("output_bytes", "returns 4000 B"),
        ("saved_bytes", ""),
        ("note", "stops the gradient: detach"),
    ],
)
def test_details_as_text(detail: str, text: str) -> None:
    """A detail has its unit; one that is missing or 0 has no text."""
    assert describe_detail(NODE, detail) == text


def _measured() -> Graph:
    net = nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 4))
    net[2].requires_grad_(False)
    return record(net, input_data=X, costs=True)


def _attributes(styler: GraphvizStyler, name: str) -> dict[str, str]:
    view = draw(_measured(), depth=1).view
    (node,) = (node for node in view.nodes if node.name == name)
    return styler.style_node(node, view)


def test_tooltips_have_all_details() -> None:
    """The tooltip has the arguments, the inputs and the costs, whatever the label shows."""
    tooltip = _attributes(GraphvizStyler(), "0")["tooltip"]
    for text in (
        "in_features=4, out_features=2, bias=True",
        "takes 2×4",
        "32 FLOP",
        "returns 16 B",
        "saves 32 B",
        " ms",
    ):
        assert text in tooltip


def test_labels_on_request() -> None:
    """A label has the details that are asked for, and no others."""
    assert "FLOP" not in _attributes(GraphvizStyler(), "0")["label"]
    label = _attributes(GraphvizStyler(details=("flops", "arguments")), "0")["label"]
    assert "32 FLOP" in label
    assert "in_features=4" in label
    assert "saves" not in label


def test_colors_by_a_number() -> None:
    """The largest value is orange, zero is white, and a node without a value keeps the color of its kind."""
    styler = GraphvizStyler(color_by="flops")
    assert [_attributes(styler, name)["fillcolor"] for name in ("0", "1", "2", "input")] == [
        "#f0965a", "#ffffff", "#f0965a", GraphvizStyler().style_node(_measured().nodes[1], _measured())["fillcolor"],
    ]  # fmt: skip


def test_colors_by_note() -> None:
    """Frozen parameters are grey; trained ones keep their color."""
    styler, graph = GraphvizStyler(color_by="note"), _measured()
    colors = {node.name: styler.style_node(node, graph)["fillcolor"] for node in graph.nodes}
    assert (colors["2.weight"], colors["0.weight"]) == ("#d9d9d9", "#faedcc")


@pytest.mark.parametrize("options", [{"details": ("time",)}, {"color_by": "speed"}, {"details": "label"}])
def test_unknown_details(options: dict[str, Any]) -> None:
    """An unknown detail is an error that lists the known ones."""
    with pytest.raises(ArgumentError, match="arguments, inputs, duration_ms, flops"):
        GraphvizStyler(**options)


def test_unknown_attributes() -> None:
    """A misspelt attribute, which Graphviz would ignore, is an error with the closest one, also in a subclass."""

    class Own(GraphvizStyler):
        pass

    for kind in (GraphvizStyler, Own):
        with pytest.raises(
            UnknownArgumentError, match=rf"^{kind.__name__} has no argument filcolor, .*mean fillcolor\?"
        ):
            kind(filcolor="red")
    with pytest.raises(UnknownArgumentError, match=r"has no argument colour_by, .*: did you mean color_by\?$"):
        GraphvizStyler(colour_by="flops")
    with pytest.raises(UnknownArgumentError, match=r"has no argument qqq, nor has Graphviz .* of nodes$"):
        make_dot(_measured(), qqq="1")
    assert _attributes(GraphvizStyler(fontname="Lato", URL="a"), "0")["fontname"] == "Lato"


def test_an_older_graph_opens() -> None:
    """A graph of version 2, which lacks the details, is read without them."""
    data = json.loads(json.dumps(_measured().to_json()))
    for node in data["nodes"]:
        for key in ("inputs", "arguments", "flops", "saved_bytes", "note", "output_bytes"):
            del node[key]
    del data["unused"]
    old = Graph.from_json({**data, "version": 2})
    assert [node.name for node in old.nodes] == [node.name for node in _measured().nodes]
    assert all(not node.arguments and node.flops is None for node in old.nodes)
