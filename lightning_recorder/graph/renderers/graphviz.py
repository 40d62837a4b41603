"""A graph as a Graphviz document."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, get_args

from typing_extensions import override

from lightning_recorder.errors import ArgumentError
from lightning_recorder.graph.model import Edge, Graph, Kind, Node
from lightning_recorder.graph.renderers.base import BaseRenderer
from lightning_recorder.graph.renderers.columns import Columns, label_size, split
from lightning_recorder.graph.renderers.escape import dot_attribute
from lightning_recorder.graph.renderers.graphviz_styler import (
    DETAIL_PT,
    FONT,
    LOOKS,
    LOSS,
    NAME_PT,
    GraphvizStyler,
    small,
)
from lightning_recorder.graph.renderers.labels import short_name, shown_times
from lightning_recorder.graph.renderers.order import constraints
from lightning_recorder.graph.views.fit import drawn_nodes
from lightning_recorder.graph.views.ports import with_ports
from lightning_recorder.signatures import with_replacements

if TYPE_CHECKING:
    from graphviz import Digraph

__all__ = ["Direction", "GraphvizRenderer"]

_TORCHRECORDER = {
    "render_depth": "GraphvizRenderer(collapse(graph, render_depth, leaves=False))",
    "styler_cls": "GraphvizRenderer(graph, styler_cls())",
    "rec": "GraphvizRenderer(collapse(rec, render_depth, leaves=False))",
}
"""The code to write instead of the arguments of torchrecorder's renderer."""

Direction = Literal["TB", "LR", "BT", "RL"]

_NOT_IN_FILES = r'[\x00-\x1f<>:"/\\|?*]'

# The weight of edges on the main path; dot keeps edges with a larger weight straighter and shorter.
_MAIN_WEIGHT = "12"

# The colors of edges between columns, which are dark on white and differ for color-blind readers.
_LINES = ("#00795a", "#a8478a", "#a35c00", "#5e4fa2")

_INVISIBLE = {"style": "invis", "shape": "point", "width": "0.01", "height": "0.01", "label": ""}

_HIDDEN = {"style": "invis", "weight": "8"}

_MEANINGS: dict[Kind, str] = {
    "module": "module",
    "op": "function",
    "input": "input",
    "output": "output",
    "parameter": "parameter",
    "buffer": "buffer",
    "tensor": "other tensor",
    "backward": "backward pass",
    "optimizer": "optimizer step",
}


class GraphvizRenderer(BaseRenderer["Digraph"]):
    """Renders a graph as a ``graphviz.Digraph``.

    Args:
        graph: The graph to render; it is not reduced further.
        styler: The styler that decides how nodes and edges look.
        direction: The direction of the data flow: ``"TB"``, down the page, ``"LR"``, ``"BT"`` or ``"RL"``.
        frames: Draw a frame around the contents of an open module call.
        legend: Add a legend that explains the colors and shapes.
        wrap: Divide a long chain into columns, and a broad row into several, if the sides of the picture would differ
            by more than a factor of about 3.

    Raises:
        ArgumentError: If the direction is not one of the four, or the styler is not a :class:`GraphvizStyler`.

    Example:
        >>> import torch
        >>> from lightning_recorder.graph import capture_graph, fit_view
        >>> view = fit_view(capture_graph(torch.nn.Sequential(torch.nn.ReLU()), torch.ones(2)))
        >>> [line.split("[")[0].strip() for line in GraphvizRenderer(view).render().body[-5:]]
        ['n1', 'n2', 'n4', 'n1 -> n2', 'n2 -> n4']
    """

    @with_replacements(_TORCHRECORDER)
    def __init__(
        self,
        graph: Graph,
        styler: GraphvizStyler | None = None,
        *,
        direction: Direction = "TB",
        frames: bool = True,
        legend: bool = False,
        wrap: bool = True,
    ) -> None:
        super().__init__(graph)
        self.view = graph
        """The graph without the ports of the picture."""
        check_direction(direction)
        if styler is not None and not isinstance(styler, GraphvizStyler):
            raise ArgumentError(f"styler must be an instance of GraphvizStyler, got {_instead(styler)}")
        self.styler = styler or GraphvizStyler()
        self._omits_graph = len(inspect.signature(self.styler.style_node).parameters) == 1
        if tuple(inspect.signature(self.styler.style_edge).parameters) == ("fnode", "tnode"):
            raise self._edge_error("")
        self.direction = direction
        self.frames = frames
        self.legend = legend
        if frames:
            self.graph = graph = with_ports(graph)
        self._main = main_path(graph)
        self._styles = {node.id: self._style(node) for node in drawn_nodes(graph)}
        self._around: list[tuple[str, str, dict[str, str]]] = []
        self._entries: dict[tuple[int, int], str] = {}
        """The invisible node through which an edge into a divided call is led; dot would draw it around the columns."""
        self._colors: dict[int, str] = {}
        """The color of the edges that leave a node and cross columns."""
        self._columns = self._divided() if wrap else Columns()
        loops = {edge.source: edge for edge in reversed(graph.edges) if edge.source == edge.target}
        self._further_loops = {edge for edge in graph.edges if edge.source == edge.target} - set(loops.values())
        """The loops of nodes that have another one, which dot would draw at the same place."""

    @property
    def crossing(self) -> int:
        """The number of edges across the columns of the picture, whose ends are hard to find."""
        return sum((e.source, e.target) in self._columns.crossing and not e.relates("next") for e in self.graph.edges)

    @override
    def make_canvas(self) -> Digraph:
        from graphviz import Digraph

        # The name of the file that the document's own methods write.
        canvas = Digraph("graph", filename=f"{re.sub(_NOT_IN_FILES, '_', self.graph.title) or 'graph'}.gv")
        canvas.attr(
            "graph",
            rankdir=self.direction,
            # One ranking of all nodes: that of each frame by itself may place a node above its sources.
            newrank="true",
            ranksep="0.35",
            nodesep="0.25",
            pad="{:.2f},{:.2f}".format(*self._columns.padding),
            fontname=FONT,
            fontsize=str(NAME_PT),
        )
        canvas.attr("graph", labeljust="l", labelloc="t", style="rounded", **self.styler.style_title(self.graph))
        canvas.attr("node", fontname=FONT, fontsize=str(NAME_PT), margin="0.12,0.06", height="0.3")
        canvas.attr("edge", fontname=FONT, fontsize=str(DETAIL_PT), color="#5f5f5f", arrowsize="0.6")
        return canvas

    @override
    def render_node(self, canvas: Digraph, node: Node) -> None:
        canvas.node(f"n{node.id}", **self._styles[node.id])

    def _style(self, node: Node) -> dict[str, str]:
        if node.kind == "port":
            # Not by a method of the user, which expects nodes with outputs.
            return GraphvizStyler.style_node(self.styler, node, self.graph)
        if not self._omits_graph:
            return self.styler.style_node(node, self.graph)
        self.styler.graph = self.graph
        try:
            style: dict[str, str] = self.styler.style_node(node)  # type: ignore[call-arg]  # an override of the user
        except AttributeError as error:
            if error.name == "fn" and error.obj is node:
                is_module = node.kind == "module"
                instead = "self.graph.module(node), which is its module" if is_module else "node.outputs[0].shape"
                raise ArgumentError(f"a node has no fn: write {instead}") from error
            raise
        return style

    def _style_edge(self, edge: Edge) -> dict[str, str]:
        try:
            return self.styler.style_edge(edge, self.graph)
        except AttributeError as error:
            if error.obj is edge or error.obj is self.graph:
                raise self._edge_error(f", and {error}") from error
            raise

    def _edge_error(self, why: str) -> ArgumentError:
        return ArgumentError(
            f"{type(self.styler).__name__}.style_edge takes an edge and the graph{why}: write style_edge(self, edge, "
            "graph), where graph[edge.source] and graph[edge.target] are the nodes"
        )

    @override
    def render_recursive_node(self, canvas: Digraph, node: Node) -> None:
        if not self.frames:
            self.render_contents(canvas, node)
            return
        with canvas.subgraph(name=f"cluster_{node.id}") as frame:
            frame.attr(**_movable(self.styler.style_frame(node, self.graph)))
            self.render_contents(frame, node)

    def _divided(self) -> Columns:
        """Return the division of the picture, based on estimated sizes."""
        ports = {node.id for node in self.graph.nodes if node.kind == "port"}
        sizes = {
            number: (6.0, 6.0)
            if number in ports
            else label_size(style.get("label", ""), NAME_PT, DETAIL_PT, ellipse=style.get("shape") == "ellipse")
            for number, style in self._styles.items()
        }
        for call in self.graph.module_calls() if self.frames else ():
            if call.id not in sizes:
                label = self.styler.style_frame(call, self.graph).get("label", "")
                sizes[call.id] = label_size(label, NAME_PT, DETAIL_PT)
        title = label_size(self.styler.style_title(self.graph).get("label", ""), NAME_PT, DETAIL_PT)
        return split(self.graph, sizes, title, flat=self.direction in ("LR", "RL"))

    def _render_columns(self, canvas: Digraph, call: Node) -> None:
        """Add what keeps the columns of a call side by side: invisible nodes at their heads, and the detours."""
        ends = self._columns.within(self.graph, call)
        if ends is None:
            return
        tops: list[str] = []
        for number in range(ends.number):
            tops += [f"top_{call.id}_{number}"]
            tops += [f"top_{source}" for source, column in ends.detours.items() if column == number]
        bottoms = [name.replace("top", "bottom") for name in tops]
        for names in (tops, bottoms):
            with canvas.subgraph() as row:
                row.attr(rank="same")
                for name in names:
                    row.node(name, **_INVISIBLE)
                for one, other in pairwise(names):
                    row.edge(one, other, style="invis")
        for around in (call, *self.graph.ancestors(call)):
            if (column := self._columns.column.get(around.id)) is not None:  # inside a column of another call
                canvas.edge(f"top_{around.parent}_{column}", tops[0], **_HIDDEN)
                canvas.edge(bottoms[0], f"bottom_{around.parent}_{column}", **_HIDDEN)
                break
        # From outside, an edge into the middle of a column would be led around all columns.
        entries = {
            edge: f"top_{call.id}_{number}" for edge, number in ends.entries.items() if edge not in self._entries
        }
        self._entries |= entries
        for source, top in dict.fromkeys((source, top) for (source, _), top in entries.items()):
            is_main = any(one == source and self._entries.get((one, other)) == top for one, other in self._main)
            weight = _MAIN_WEIGHT if is_main else "8" if top == tops[0] else "1"
            self._around.append((f"n{source}", top, {"dir": "none", "headclip": "false", "weight": weight}))
        for node, number in ends.first:
            canvas.edge(f"top_{call.id}_{number}", f"n{node}", style="invis", weight="24")
        for node, number in ends.last:
            canvas.edge(f"n{node}", f"bottom_{call.id}_{number}", **_HIDDEN)
        for source in ends.detours:
            line = {"dir": "none", "headclip": "false", **self._detour(source)}
            canvas.edge(f"n{source}", f"bottom_{source}", weight="8", **line)
            canvas.edge(f"top_{source}", f"bottom_{source}", tailclip="false", weight="50", **line)
        # Outside of the frame, since Graphviz would move the other node into it.
        led = {source for (source, _), top in entries.items() if top == tops[0]}
        self._around += [(f"n{source}", tops[0], _HIDDEN) for source in ends.before if source not in led]
        bottom = f"bottom_{call.id}_{ends.number - 1}"
        self._around += [(bottom, f"n{target}", _HIDDEN) for target in ends.after]

    @override
    def render_contents(self, canvas: Digraph, node: Node) -> None:
        self._render_columns(canvas, node)
        columns: dict[int, list[Node]] = {}
        for child in self.graph.children(node):
            columns.setdefault(self._columns.column.get(child.id, 0), []).append(child)
        for number, children in columns.items():
            if len(columns) == 1:
                self._render_part(canvas, node, children)
                continue
            # An invisible frame keeps the nodes of a column together.
            with canvas.subgraph(name=f"cluster_column_{node.id}_{number}") as column:
                column.attr(label="", bgcolor="transparent", peripheries="0", margin="2")
                self._render_part(column, node, children, f"_{number}" if number else "")

    def _render_part(self, canvas: Digraph, call: Node, children: list[Node], suffix: str = "") -> None:
        """Add children of a call to the canvas, those of a loss in a frame of their own."""
        scopes = dict.fromkeys(child.scope for child in children if child.scope.startswith(LOSS))
        if call is not self.graph.root or not self.frames or not scopes:
            self.render_nodes(canvas, children)
            return
        for scope in ("", *scopes):
            part = [child for child in children if (child.scope if child.scope in scopes else "") == scope]
            if not scope:
                self.render_nodes(canvas, part)
                continue
            with canvas.subgraph(name=f"cluster_{scope.replace(' ', '_')}{suffix}") as frame:
                frame.attr(**_movable(self.styler.style_scope(scope)))
                self.render_nodes(frame, part)

    @override
    def render_edge(self, canvas: Digraph, edge: Edge) -> None:
        ends = edge.source, edge.target
        further = {"weight": _MAIN_WEIGHT} if ends in self._main else {}
        start = f"n{edge.source}"
        if ends in self._columns.detours:
            start, further = f"top_{edge.source}", {"weight": "2", "tailclip": "false", **self._detour(edge.source)}
        elif ends in self._entries:
            start, further = self._entries[ends], {**further, "tailclip": "false"}
        elif ends in self._columns.crossing:
            further = {"constraint": "false", **({} if edge.relates("next") else self._marks(edge))}
        elif edge in self._further_loops:
            side = "w" if self.direction in ("TB", "BT") else "s"
            further = {"tailport": side, "headport": side}
        canvas.edge(start, f"n{edge.target}", **{**further, **self._style_edge(edge)})

    def _detour(self, source: int) -> dict[str, str]:
        """Return the color of the edges of a node that are led around, unless one continues the main path."""
        main = any(one == source and (one, other) in self._columns.detours for one, other in self._main)
        return {} if main else self._colored(source)

    def _colored(self, source: int) -> dict[str, str]:
        """Return the color of the edges between columns that leave a node."""
        color = self._colors.setdefault(source, _LINES[len(self._colors) % len(_LINES)])
        return {"color": color, "fontcolor": color, "penwidth": "1.5"}

    def _marks(self, edge: Edge) -> dict[str, str]:
        """Return the labels of an edge that crosses columns; each end names the other one."""
        source, target = (self._place(number) for number in self._columns.places[edge.source, edge.target])
        marks = {"taillabel": f"to {target}", "headlabel": f"from {source}"}
        # In units of 10 points: far enough that the longer label, which is centered there, lies beside the node.
        away = label_size(max(marks.values(), key=len), DETAIL_PT, DETAIL_PT)[0] / 20
        place = {"labeldistance": f"{away:.1f}", "labelangle": "15"}
        return {**self._colored(edge.source), **{name: dot_attribute(text) for name, text in marks.items()}, **place}

    def _place(self, number: int) -> str:
        node = self.graph[number]
        return short_name(node, self.graph) or shown_times(node) or node.kind

    @override
    def render(self) -> Digraph:
        canvas = super().render()
        for one, other, line in self._around:
            canvas.edge(one, other, **line)
        for first, second in self._columns.below:
            canvas.edge(f"n{first}", f"n{second}", style="invis", weight="0")
        for first, second in constraints(self.graph):
            if self._columns.together(self.graph, first, second):
                canvas.edge(f"n{first}", f"n{second}", style="invis", weight="0", minlen="0")
        if self.legend:
            with canvas.subgraph(name="cluster_legend") as frame:
                frame.attr(label=f"<{small('legend')}>", color="#bdbdbd", tooltip=" ")
                for kind in _kinds(self.graph):
                    label = f"<{small(_MEANINGS[kind])}>"
                    frame.node(f"legend_{kind}", **LOOKS[kind], label=label, tooltip=" ")
        return canvas


def _instead(styler: object) -> str:
    """Return the end of a message about a value that is no styler: the value and the code to write instead."""
    if isinstance(styler, type) and issubclass(styler, GraphvizStyler):
        return f"the class: write {styler.__name__}()"
    if isinstance(styler, (int, float)):
        return f"{styler!r}: write GraphvizRenderer(collapse(graph, {styler!r}, leaves=False)) for a depth"
    return repr(styler)


def main_path(graph: Graph) -> set[tuple[int, int]]:
    """Return the edges of the longest path through a graph, which a reader follows first."""
    place = {node.id: number for number, node in enumerate(graph.nodes)}
    length: dict[int, int] = {}
    before: dict[int, int] = {}
    # Sorted by time, so that the path to a node is complete before the edges that leave it.
    for edge in sorted(graph.edges, key=lambda each: place[each.target]):
        if place[edge.source] < place[edge.target] and length.get(edge.source, 0) + 1 > length.get(edge.target, 0):
            length[edge.target] = length.get(edge.source, 0) + 1
            before[edge.target] = edge.source
    end = max(length, key=lambda each: length[each], default=-1)
    path = set()
    while end in before:
        path.add((before[end], end))
        end = before[end]
    return path


def _kinds(graph: Graph) -> Iterable[Kind]:
    parents = {node.parent for node in graph.nodes}
    there = {node.kind for node in graph.nodes if node.kind != "module" or node.id not in parents}
    return [kind for kind in _MEANINGS if kind in there]


def check_direction(direction: str, name: str = "direction") -> None:
    """Raise an error for a direction that Graphviz does not support.

    Raises:
        ArgumentError: If the direction is not one of the four. The message lists them.
    """
    if direction not in get_args(Direction):
        raise ArgumentError(f"{name} must be one of {', '.join(get_args(Direction))}, got {direction!r}")


def _movable(style: dict[str, str]) -> dict[str, str]:
    """Return the style of a frame with empty cells on both sides of its title, by which the layout moves the title."""
    # A frame inside a column would inherit these from it.
    style = {"peripheries": "1", "margin": "8", **style}
    label = style.get("label", "")
    if not (label.startswith("<") and label.endswith(">")):
        return style
    cells = f'<td port="left" width="1"></td><td>{label[1:-1]}</td><td port="right" width="16"></td>'
    table = f'<<table border="0" cellborder="0" cellspacing="0" cellpadding="0"><tr>{cells}</tr></table>>'
    return {**style, "label": table}
