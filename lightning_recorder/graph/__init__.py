"""The execution graph: capture, views, diffs and renderers."""

from lightning_recorder.graph.capture.capture_call import capture_graph
from lightning_recorder.graph.capture.graph_capture import GraphCapture
from lightning_recorder.graph.diff import GraphDiff, NodeChange, diff
from lightning_recorder.graph.drawing import Drawing, draw, make_dot, render_network
from lightning_recorder.graph.layout import Layout
from lightning_recorder.graph.model import Edge, Graph, Node, TensorMeta
from lightning_recorder.graph.picture import GraphPicture
from lightning_recorder.graph.record import record
from lightning_recorder.graph.renderers.base import BaseRenderer
from lightning_recorder.graph.renderers.graphdef import to_graph_def
from lightning_recorder.graph.renderers.graphviz import Direction, GraphvizRenderer
from lightning_recorder.graph.renderers.graphviz_styler import GraphvizStyler
from lightning_recorder.graph.renderers.mermaid import MermaidRenderer, to_mermaid
from lightning_recorder.graph.renderers.model_explorer import to_model_explorer, to_node_data
from lightning_recorder.graph.renderers.text import TextRenderer, to_text
from lightning_recorder.graph.unused import Unused
from lightning_recorder.graph.views.collapse import collapse
from lightning_recorder.graph.views.drop import drop_dead_ends, drop_isolated, hide, without
from lightning_recorder.graph.views.fit import fit_view, truncate
from lightning_recorder.graph.views.focus import focus
from lightning_recorder.graph.views.fold import fold_repeats
from lightning_recorder.graph.views.gather import gather
from lightning_recorder.graph.views.own_tensors import own_tensors
from lightning_recorder.graph.views.roll import roll
from lightning_recorder.graph.views.show_tensors import show_tensors
from lightning_recorder.graph.views.show_unused import show_unused

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
    "Unused",
    "capture_graph",
    "collapse",
    "diff",
    "draw",
    "drop_dead_ends",
    "drop_isolated",
    "fit_view",
    "focus",
    "fold_repeats",
    "gather",
    "hide",
    "make_dot",
    "own_tensors",
    "record",
    "render_network",
    "roll",
    "show_tensors",
    "show_unused",
    "to_graph_def",
    "to_mermaid",
    "to_model_explorer",
    "to_node_data",
    "to_text",
    "truncate",
    "without",
]
