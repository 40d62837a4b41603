"""The traversal shared by all renderers, shown with a renderer for another format."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from typing_extensions import override

from lightning_recorder.graph import BaseRenderer, Edge, Graph, Node, capture_graph, fit_view
from tests.graph.nets import Net, X, linear
from tests.graph.outline import text


class MermaidRenderer(BaseRenderer[list[str]]):
    """Renders a Mermaid flowchart as lines."""

    @override
    def make_canvas(self) -> list[str]:
        return ["flowchart TB"]

    @override
    def render_node(self, canvas: list[str], node: Node) -> None:
        canvas.append(f"n{node.id}[{node.type_name or node.name}]")

    @override
    def render_recursive_node(self, canvas: list[str], node: Node) -> None:
        canvas.append(f"subgraph n{node.id}[{node.name}]")
        self.render_contents(canvas, node)
        canvas.append("end")

    @override
    def render_edge(self, canvas: list[str], edge: Edge) -> None:
        canvas.append(f"n{edge.source} --> n{edge.target}")


def test_another_format() -> None:
    """A renderer gets each node, frame and edge once, the edges after the nodes."""
    inner = nn.Sequential(linear(), nn.ReLU())
    graph = fit_view(capture_graph(Net(lambda net, x: x + net.inner(x).exp(), inner=inner), X))
    assert "\n".join(MermaidRenderer(graph).render()) == text(
        """
        flowchart TB
        n1[input]
        subgraph n2[inner]
        n3[Linear]
        n7[ReLU]
        end
        n9[exp]
        n10[add]
        n11[output]
        n1 --> n3
        n3 --> n7
        n7 --> n9
        n1 --> n10
        n9 --> n10
        n10 --> n11
        """
    )


def test_nested_frames() -> None:
    """Frames are nested like the calls."""
    net = nn.Sequential(nn.Sequential(nn.Sequential(linear(), nn.ReLU())))
    assert MermaidRenderer(fit_view(capture_graph(net, X))).render() == [
        "flowchart TB",
        "n1[input]",
        "subgraph n2[0]",
        "subgraph n3[0.0]",
        "n4[Linear]",
        "n8[ReLU]",
        "end",
        "end",
        "n10[output]",
        "n1 --> n4",
        "n4 --> n8",
        "n8 --> n10",
    ]


def test_a_graph_of_nothing() -> None:
    """A model without calls is an empty canvas."""
    assert MermaidRenderer(Graph((Node(0, "module", "", None, 0),), ())).render() == ["flowchart TB"]


def test_a_renderer_must_say_everything() -> None:
    """A renderer that lacks one of the four methods cannot be instantiated."""

    class Half(BaseRenderer[list[str]]):
        @override
        def make_canvas(self) -> list[str]:
            return []

    renderer: Any = Half
    with pytest.raises(TypeError, match=r"render_edge.*render_node.*render_recursive_node"):
        renderer(Graph((), ()))
