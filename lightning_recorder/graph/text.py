"""A graph as a tree of text, for terminals and READMEs."""

from __future__ import annotations

from collections import ChainMap
from itertools import pairwise

from typing_extensions import override

from lightning_recorder.graph.labels import (
    class_and_size,
    full_name,
    printable,
    short_name,
    shown_shapes,
    shown_times,
    times,
    title,
)
from lightning_recorder.graph.model import Edge, Graph, Node
from lightning_recorder.graph.render import BaseRenderer

__all__ = ["TextRenderer", "to_text"]

_MOST_SOURCES = 12


class TextRenderer(BaseRenderer[list[str]]):
    """Renders a graph as lines, one for each node in the order of time, indented by the module calls around it.

    A line has the name, a module's class and parameters, the shapes of what it gave, and after ``←`` what it takes:
    the nodes beside it or beside a call around it. A node that takes just the result of what stands before it has no
    arrow. Of several nodes with one name in sight the later have a number, as ``add#2``. What was left by an exception
    begins with ``✗``.

    Args:
        graph: What to render, as it is.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self._last: set[int] = set()
        self._before: dict[int, int] = {}
        self._shown: dict[int, str] = {}
        self._reference: dict[int, str] = {}
        self._taken: dict[int, list[Edge]] = {}
        for edge in graph.edges:
            self._taken.setdefault(edge.target, []).append(edge)
        self._survey(graph.root, ChainMap())

    def _survey(self, call: Node, in_sight: ChainMap[str, int]) -> None:
        """Note of what a call holds where it stands, and a name that tells it from all that can be seen from there."""
        children = self.graph.children(call)
        self._last.update(child.id for child in children[-1:])
        self._before.update({child.id: before.id for before, child in pairwise(children)})
        for child in children:
            # Only a frame can do without a name: nothing but what it holds is spoken of.
            name = reference = short_name(child, self.graph) or ("" if self.graph.children(child) else child.kind)
            if child.kind == "module" and (name in in_sight or name.isdigit()):
                # Calls around it hold the same name; and a number says nothing away from its place.
                reference = full_name(child)
            # Nothing inside a call takes the call itself, so its name is free there.
            self._survey(child, in_sight.new_child())
            in_sight[reference] = number = in_sight.get(reference, 0) + 1
            if number > 1:
                name = reference = f"{name}#{number}"
            self._shown[child.id], self._reference[child.id] = printable(name), printable(reference)

    @override
    def make_canvas(self) -> list[str]:
        return [printable(title(self.graph))]

    @override
    def render_node(self, canvas: list[str], node: Node) -> None:
        canvas.append(self._indentation(node) + self._line(node) + self._sources(node))

    @override
    def render_recursive_node(self, canvas: list[str], node: Node) -> None:
        # What goes into an open call goes into what it holds, in all views that we make.
        sources = self._sources(node) if node.id in self._taken else ""
        canvas.append(self._indentation(node) + self._line(node) + sources)
        self.render_contents(canvas, node)

    @override
    def render_edge(self, canvas: list[str], edge: Edge) -> None:
        """Nothing: what a node takes stands in its line."""

    def _indentation(self, node: Node) -> str:
        calls = [call for call in self.graph.ancestors(node) if call.parent is not None]
        rails = ("   " if call.id in self._last else "│  " for call in reversed(calls))
        return "".join(rails) + ("└─ " if node.id in self._last else "├─ ")

    def _line(self, node: Node) -> str:
        name = " ".join(part for part in ("✗" * node.failed, self._shown[node.id], shown_times(node)) if part)
        if node.kind == "module":
            what = node.type_name if self.graph.children(node) else class_and_size(node)
        else:
            what = "" if node.kind in ("op", node.name) else node.kind
        return "  ".join(part for part in (name, printable(what), shown_shapes(node)) if part)

    def _sources(self, node: Node) -> str:
        taken = self._taken.get(node.id, [])
        if not taken:
            return "" if node.kind in ("input", "parameter", "buffer", "tensor") else "  ← nothing"
        sources: dict[int, int] = {}
        for edge in taken:
            source = self._beside(edge.source, node)
            sources[source] = sources.get(source, 0) + times(edge, self.graph)
        if list(sources.items()) == [(self._preceding(node), 1)]:
            return ""
        shown = [self._reference[source] + (f" ×{number}" if number > 1 else "") for source, number in sources.items()]
        more = [f"… {len(shown) - _MOST_SOURCES} more"] if len(shown) > _MOST_SOURCES else []
        return f"  ← {', '.join(shown[:_MOST_SOURCES] + more)}"

    def _beside(self, source: int, node: Node) -> int:
        """What stands for a source as it is seen from a node: the outermost call around it that is not around both."""
        around = {call.id for call in self.graph.ancestors(node)}
        seen = source
        for call in self.graph.ancestors(self.graph[source]):
            if call.id in around:
                break
            # A frame without a name is nothing to speak of.
            seen = call.id if self._shown.get(call.id) else seen
        return seen

    def _preceding(self, node: Node) -> int | None:
        """What stands before a node, or before the calls that begin with it."""
        while node.id not in self._before and node.parent is not None:
            node = self.graph[node.parent]
        before = self._before.get(node.id)
        # Of a frame without a name the last node.
        while before is not None and not self._shown[before]:
            before = self.graph.children(self.graph[before])[-1].id
        return before


def to_text(graph: Graph) -> str:
    """A graph as a tree of text; :class:`TextRenderer` says what is in it.

    Args:
        graph: What to render, as it is; a view made by :func:`fit` is the one to read.

    Example:
        >>> import torch
        >>> from lightning_recorder.graph import capture_graph, fit
        >>> net = torch.nn.Sequential(torch.nn.Linear(784, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
        >>> print(to_text(fit(capture_graph(net, torch.ones(8, 784)))))
        Sequential.forward · 102 k parameters
        ├─ input  8×784
        ├─ 0  Linear · 100 k parameters  8×128
        ├─ 1  ReLU  8×128
        ├─ 2  Linear · 1290 parameters  8×10
        └─ output  8×10
    """
    return "\n".join(TextRenderer(graph).render())
