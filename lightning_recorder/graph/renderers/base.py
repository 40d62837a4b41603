"""The traversal of a graph that all renderers share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Generic, TypeVar

from lightning_recorder.errors import ArgumentError
from lightning_recorder.graph.model import Edge, Graph, Node

__all__ = ["BaseRenderer"]

Canvas = TypeVar("Canvas")


class BaseRenderer(ABC, Generic[Canvas]):
    """Converts a graph, or a view of one, to an output format.

    A new format is a subclass that defines how a node, a module call with its contents, and an edge are added to a
    canvas. Each format defines the type of its canvas.

    Args:
        graph: The graph to render. All its nodes are rendered. To select depth and contents, pass a view.

    Raises:
        ArgumentError: If the argument is not a graph.

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
            raise ArgumentError(
                f"a renderer takes a Graph, such as the result of record() or of a view, got {type(given).__name__}"
            )
        self.graph = graph

    @abstractmethod
    def make_canvas(self) -> Canvas:
        """Return an empty canvas."""

    @abstractmethod
    def render_node(self, canvas: Canvas, node: Node) -> None:
        """Add a node without contents to the canvas."""

    @abstractmethod
    def render_recursive_node(self, canvas: Canvas, node: Node) -> None:
        """Add a module call with contents to the canvas. Call :meth:`render_contents` to add the contents."""

    @abstractmethod
    def render_edge(self, canvas: Canvas, edge: Edge) -> None:
        """Add an edge to the canvas. Both nodes of the edge were added before."""

    def render_contents(self, canvas: Canvas, node: Node) -> None:
        """Add the contents of a module call to the canvas, in execution order."""
        self.render_nodes(canvas, self.graph.children(node))

    def render_nodes(self, canvas: Canvas, nodes: Iterable[Node]) -> None:
        """Add nodes and their contents to the canvas."""
        for child in nodes:
            if self.graph.children(child):
                self.render_recursive_node(canvas, child)
            else:
                self.render_node(canvas, child)

    def render(self) -> Canvas:
        """Render the graph and return the canvas."""
        canvas = self.make_canvas()
        self.render_contents(canvas, self.graph.root)
        for edge in self.graph.edges:
            self.render_edge(canvas, edge)
        return canvas
