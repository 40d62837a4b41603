from .capture.graph_capture import GraphCapture, capture_graph
from .diff import GraphDiff, NodeChange, diff
from .drawing import Drawing, draw, make_dot, render_network
from .layout import Layout
from .model import Edge, Graph, Node, TensorMeta
from .picture import GraphPicture
from .record_model import record
from .renderers.base import BaseRenderer
from .renderers.graphdef import to_graph_def
from .renderers.graphviz import Direction, GraphvizRenderer
from .renderers.graphviz_styler import GraphvizStyler
from .renderers.mermaid import MermaidRenderer, to_mermaid
from .renderers.model_explorer import to_model_explorer, to_node_data
from .renderers.text import TextRenderer, to_text
from .unused import Unused
from .views.collapse import collapse
from .views.drop import drop_dead_ends, drop_isolated, hide, without
from .views.fit import fit_view, truncate
from .views.focus import focus
from .views.fold import fold_repeats
from .views.gather import gather
from .views.own_tensors import own_tensors
from .views.roll import roll
from .views.show_tensors import show_tensors
from .views.show_unused import show_unused

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
