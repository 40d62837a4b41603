"""The execution graph: captured from a real step, viewed, rendered."""

from lightning_recorder.graph.capture import GraphCapture, capture_graph
from lightning_recorder.graph.graphviz import Direction, GraphvizRenderer, GraphvizStyler
from lightning_recorder.graph.layout import Layout
from lightning_recorder.graph.model import Edge, Graph, Node, TensorMeta
from lightning_recorder.graph.render import BaseRenderer
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
    "Edge",
    "Graph",
    "GraphCapture",
    "GraphvizRenderer",
    "GraphvizStyler",
    "Layout",
    "Node",
    "TensorMeta",
    "capture_graph",
    "collapse",
    "drop_dead_ends",
    "drop_isolated",
    "fit",
    "fold_repeats",
    "hide",
    "truncate",
    "without",
]
