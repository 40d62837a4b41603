"""The execution graph: capture, views, diffs and renderers."""

from lightning_recorder.graph.capture import GraphCapture, capture_graph
from lightning_recorder.graph.containers import gather
from lightning_recorder.graph.diff import GraphDiff, NodeChange, diff
from lightning_recorder.graph.drawing import Drawing, draw, make_dot, render_network
from lightning_recorder.graph.focus import focus
from lightning_recorder.graph.graphdef import to_graph_def
from lightning_recorder.graph.graphviz import Direction, GraphvizRenderer, GraphvizStyler
from lightning_recorder.graph.layout import Layout
from lightning_recorder.graph.mermaid import MermaidRenderer, to_mermaid
from lightning_recorder.graph.model import Edge, Graph, Node, TensorMeta
from lightning_recorder.graph.picture import GraphPicture
from lightning_recorder.graph.record import record
from lightning_recorder.graph.render import BaseRenderer
from lightning_recorder.graph.roll import roll
from lightning_recorder.graph.tensors import show_tensors
from lightning_recorder.graph.text import TextRenderer, to_text
from lightning_recorder.graph.views import (
    collapse,
    drop_dead_ends,
    drop_isolated,
    fit,
    fold_repeats,
    hide,
    truncate,
    without,
)

__all__ = [
    "BaseRenderer",
    "Direction",
    "Drawing",
    "Edge",
    "Graph",
    "GraphCapture",
    "GraphDiff",
    "GraphPicture",
    "GraphvizRenderer",
    "GraphvizStyler",
    "Layout",
    "MermaidRenderer",
    "Node",
    "NodeChange",
    "TensorMeta",
    "TextRenderer",
    "capture_graph",
    "collapse",
    "diff",
    "draw",
    "drop_dead_ends",
    "drop_isolated",
    "fit",
    "focus",
    "fold_repeats",
    "gather",
    "hide",
    "make_dot",
    "record",
    "render_network",
    "roll",
    "show_tensors",
    "to_graph_def",
    "to_mermaid",
    "to_text",
    "truncate",
    "without",
]
