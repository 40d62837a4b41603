"""A graph as a text tree for terminals and READMEs."""

from __future__ import annotations

from collections import ChainMap
from itertools import pairwise

from typing_extensions import override

from lightning_recorder.graph.model import Edge, Graph, Node
from lightning_recorder.graph.renderers.base import BaseRenderer
from lightning_recorder.graph.renderers.escape import printable
from lightning_recorder.graph.renderers.labels import (
    class_and_size,
    full_name,
    short_name,
    shown_across,
    shown_dilations,
    shown_shapes,
    shown_times,
    tied_to,
    times,
    title,
)

__all__ = ["TextRenderer", "to_text"]

_MOST_SOURCES = 12


class TextRenderer(BaseRenderer[list[str]]):
    """Renders a graph as lines, one for each node in execution order, indented by the module calls around it.

    A line shows the name, the class and parameter count of a module, the shapes of the outputs, and the inputs after
    ``←``. An input is named by the sibling of the node, or of a call around the node, that returned it. The arrow is
    omitted if the only input is the result of the preceding node.

    For folded calls, ``(first)`` marks an input that only the first repetition takes, ``(next)`` a result of the
    preceding repetition, ``(all)`` the results of all repetitions, and ``(each)`` a result of the same repetition of
    another folded call. If several visible nodes have the same name, later nodes get a number, such as ``add#2``. The
    line of a failed node starts with ``✗``.

    Args:
        graph: The graph to render. All its nodes are rendered.
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
        """Record the position of each node in a call, and a name that is unique among the visible nodes."""
        children = self.graph.children(call)
        self._last.update(child.id for child in children[-1:])
        self._before.update({child.id: before.id for before, child in pairwise(children)})
        for child in children:
            # Only a frame of repeated nodes may have no name, since references name its contents instead.
            name = reference = short_name(child, self.graph) or ("" if self.graph.children(child) else child.kind)
            if child.kind == "module" and (name in in_sight or name.isdigit()):
                # The name also occurs in an enclosing call, or is a number, which would be unclear elsewhere.
                reference = full_name(child)
            if not name:  # nodes outside refer to the contents of the frame, so their names must be unique outside, too
                self._shown[child.id] = self._reference[child.id] = ""
                self._survey(child, in_sight)
                continue
            # Nodes inside a call never refer to the call itself, so its name can be used again inside.
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
        # In the views of this package, an open call has no edges itself. A graph built by hand may have some.
        sources = self._sources(node) if node.id in self._taken else ""
        canvas.append(self._indentation(node) + self._line(node) + sources)
        self.render_contents(canvas, node)

    @override
    def render_edge(self, canvas: list[str], edge: Edge) -> None:
        """Do nothing, because the line of a node already lists its inputs."""

    def _indentation(self, node: Node) -> str:
        calls = [call for call in self.graph.ancestors(node) if call.parent is not None]
        rails = ("   " if call.id in self._last else "│  " for call in reversed(calls))
        return "".join(rails) + ("└─ " if node.id in self._last else "├─ ")

    def _line(self, node: Node) -> str:
        name = " ".join(part for part in ("✗" * node.failed, self._shown[node.id], shown_times(node)) if part)
        kind = "" if node.kind == node.name else node.kind
        what = class_and_size(node) if node.kind in ("module", "op") else node.type_name or kind
        about = printable(what), printable(tied_to(node)), shown_dilations(node, self.graph), shown_shapes(node)
        return "  ".join(part for part in (name, *about) if part)

    def _sources(self, node: Node) -> str:
        taken = self._taken.get(node.id, [])
        if not taken:
            return "" if node.kind in ("input", "parameter", "buffer", "tensor") else "  ← nothing"
        sources: dict[tuple[int, str], int] = {}
        for edge in taken:
            source = self._beside(edge.source, node), shown_across(edge, self.graph)
            sources[source] = sources.get(source, 0) + times(edge, self.graph)
        if list(sources.items()) == [((self._preceding(node), ""), 1)]:
            return ""
        shown = [
            self._reference[source] + (f" ×{number}" if number > 1 else "") + (f" ({word})" if word else "")
            for (source, word), number in sources.items()
        ]
        more = [f"… {len(shown) - _MOST_SOURCES} more"] if len(shown) > _MOST_SOURCES else []
        return f"  ← {', '.join(shown[:_MOST_SOURCES] + more)}"

    def _beside(self, source: int, node: Node) -> int:
        """Return the outermost call that contains the source but not the given node, or the source itself."""
        around = {call.id for call in self.graph.ancestors(node)}
        seen = source
        for call in self.graph.ancestors(self.graph[source]):
            if call.id in around:
                break
            # A frame without a name cannot be referenced.
            seen = call.id if self._shown.get(call.id) else seen
        return seen

    def _preceding(self, node: Node) -> int | None:
        """Return the node before a node. For the first node in a call, return the node before the call."""
        while node.id not in self._before and node.parent is not None:
            node = self.graph[node.parent]
        before = self._before.get(node.id)
        # For a frame without a name, use its last node.
        while before is not None and not self._shown[before]:
            before = self.graph.children(self.graph[before])[-1].id
        return before


def to_text(graph: Graph) -> str:
    """Convert a graph to a text tree; see :class:`TextRenderer` for its contents.

    Args:
        graph: The graph to render. All its nodes are rendered. A view made by :func:`fit_view` is the most readable.

    The last lines list the modules and parameters that were not used or not trained, if there are any.

    Example:
        >>> import torch
        >>> from lightning_recorder.graph import capture_graph, fit_view
        >>> net = torch.nn.Sequential(torch.nn.Linear(784, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
        >>> print(to_text(fit_view(capture_graph(net, torch.ones(8, 784)))))
        Sequential.forward · 102 k parameters
        ├─ input  8×784
        ├─ 0  Linear · 100 k parameters  8×128
        ├─ 1  ReLU  8×128
        ├─ 2  Linear · 1290 parameters  8×10
        └─ output  8×10
    """
    unused = [printable(line) for line in str(graph.unused).splitlines()]
    return "\n".join([*TextRenderer(graph).render(), *unused])
