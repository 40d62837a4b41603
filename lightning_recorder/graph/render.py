"""The walk over a graph that every renderer makes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Generic, TypeVar

from lightning_recorder.errors import ArgumentError
from lightning_recorder.graph.model import Edge, Graph, Node

__all__ = ["BaseRenderer"]

Canvas = TypeVar("Canvas")


class BaseRenderer(ABC, Generic[Canvas]):
    """Turns a graph, or a view of one, into some form of output.

    A new format is a subclass which says how a node, a module call with its contents, and an edge are put on a canvas;
    what a canvas is, is up to the format.

    Args:
        graph: What to render, as it is: depth and contents are chosen before, by a view.

    Raises:
        ArgumentError: If it is no graph.

    Example:
        >>> import torch
        >>> from lightning_recorder.graph import capture_graph
        >>> class Names(BaseRenderer[list[str]]):
        ...     def make_canvas(self):
        ...         return []
        ...     def render_node(self, canvas, node):
        ...         canvas.append(node.name)
        ...     def render_recursive_node(self, canvas, node):
        ...         canvas.append(f"{node.name}:")
        ...         self.render_contents(canvas, node)
        ...     def render_edge(self, canvas, edge):
        ...         canvas.append(f"{self.graph[edge.source].name} -> {self.graph[edge.target].name}")
        >>> Names(capture_graph(torch.nn.Sequential(torch.nn.ReLU()), torch.ones(2))).render()
        ['input', '0:', 'relu', 'output', 'input -> relu', 'relu -> output']
    """

    def __init__(self, graph: Graph) -> None:
        given: object = graph
        if not isinstance(given, Graph):
            raise ArgumentError(f"what is rendered is a Graph, as of record() or a view, got {type(given).__name__}")
        self.graph = graph

    @abstractmethod
    def make_canvas(self) -> Canvas:
        """An empty canvas."""

    @abstractmethod
    def render_node(self, canvas: Canvas, node: Node) -> None:
        """Put a node that holds nothing on the canvas."""

    @abstractmethod
    def render_recursive_node(self, canvas: Canvas, node: Node) -> None:
        """Put a module call on the canvas together with what it holds, by :meth:`render_contents`."""

    @abstractmethod
    def render_edge(self, canvas: Canvas, edge: Edge) -> None:
        """Put an edge on the canvas; its ends are there."""

    def render_contents(self, canvas: Canvas, node: Node) -> None:
        """Put what a module call holds on the canvas, in the order of time."""
        self.render_nodes(canvas, self.graph.children(node))

    def render_nodes(self, canvas: Canvas, nodes: Iterable[Node]) -> None:
        """Put nodes on the canvas, each with what it holds."""
        for child in nodes:
            if self.graph.children(child):
                self.render_recursive_node(canvas, child)
            else:
                self.render_node(canvas, child)

    def render(self) -> Canvas:
        """The rendered graph."""
        canvas = self.make_canvas()
        self.render_contents(canvas, self.graph.root)
        for edge in self.graph.edges:
            self.render_edge(canvas, edge)
        return canvas
