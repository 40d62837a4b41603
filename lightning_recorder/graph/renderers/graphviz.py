"""A graph as a Graphviz document."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Literal, get_args

from typing_extensions import override

from lightning_recorder.errors import ArgumentError, RenderError
from lightning_recorder.graph.model import Edge, Graph, Kind, Node
from lightning_recorder.graph.renderers.base import BaseRenderer
from lightning_recorder.graph.renderers.escape import dot_label
from lightning_recorder.graph.renderers.graphviz_styler import (
    DETAIL_PT,
    FONT,
    LOOKS,
    LOSS,
    NAME_PT,
    GraphvizStyler,
    small,
)
from lightning_recorder.graph.renderers.labels import in_bracket, is_needless, short_name, shown_shapes, shown_times
from lightning_recorder.graph.renderers.order import constraints
from lightning_recorder.graph.renderers.sheets import facing, label_size, rows, sheets
from lightning_recorder.graph.views.fit import drawn_nodes
from lightning_recorder.graph.views.ports import CHAIN, with_ports
from lightning_recorder.signatures import with_replacements

if TYPE_CHECKING:
    from graphviz import Digraph

__all__ = ["Direction", "GraphvizRenderer"]

_TORCHRECORDER = {
    "render_depth": "GraphvizRenderer(collapse(graph, render_depth, leaves=False))",
    "styler_cls": "GraphvizRenderer(graph, styler_cls())",
    "rec": "GraphvizRenderer(collapse(rec, render_depth, leaves=False))",
}
"""For arguments of torchrecorder's renderer: the code to write instead."""

Direction = Literal["TB", "LR", "BT", "RL"]

_NOT_IN_FILES = r'[\x00-\x1f<>:"/\\|?*]'

# The weight of edges on the main path. dot keeps edges with a larger weight straighter and shorter. dot narrows frames
# with a weight of 128. A main path with a smaller weight would bend at each frame.
_MAIN_WEIGHT = "500"

# The colors of edges between sheets. They are dark on white, and color-blind readers can distinguish them.
_LINES = ("#00795a", "#a8478a", "#a35c00", "#5e4fa2", "#0072b2", "#8c564b", "#c0392b", "#556b2f")

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
        graph: The graph to render. All its nodes are rendered.
        styler: The styler that decides how nodes and edges look.
        direction: The direction of the data flow: ``"TB"`` (down the page), ``"LR"``, ``"BT"`` or ``"RL"``.
        frames: Draw a frame around the contents of an open module call.
        legend: Add a legend that explains the colors and shapes.
        wrap: Divide a picture that is longer than a page into sheets. They are beside each other, or below each other
            if the data flows across the page. A tensor that continues on another sheet has the same number on both.

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
            self.graph = graph = with_ports(_with_late_inputs(graph))
        self._main = main_path(graph)
        self._styles = {node.id: self._style(node) for node in drawn_nodes(graph)}
        self._sizes = self._estimated()
        flat = direction in ("LR", "RL")
        drawn = [node.id for node in drawn_nodes(graph)]
        self._sheet = sheets(graph, self._sizes, flat=flat) if wrap else dict.fromkeys(drawn, 0)
        self._between: list[Edge] = []
        """The edges from the first side of a U-Net to the second side, which is drawn beside the first, upwards."""
        if wrap and direction == "TB" and (sides := facing(graph, self._sizes)):
            self._sheet, self._between = sides
        self._rows = rows(graph, self._sizes, flat=flat) if wrap else []
        self._sheets_of: dict[int, set[int]] = {}
        """By node: the sheets on which the node or a node inside it is drawn."""
        for number in drawn:
            for around in (graph[number], *graph.ancestors(graph[number])):
                self._sheets_of.setdefault(around.id, set()).add(self._sheet[number])
        self._numbers: dict[tuple[int, tuple[int, ...]], int] = {}
        """The number of each tensor that continues on another sheet."""
        for edge in graph.edges:
            if self._crosses(edge):
                self._numbers.setdefault(self._origin(edge), len(self._numbers) + 1)
        self._now = 0
        """The number of the sheet to which nodes are being added."""
        loops = {edge.source: edge for edge in reversed(graph.edges) if edge.source == edge.target}
        self._further_loops = {edge for edge in graph.edges if edge.source == edge.target} - set(loops.values())
        """Second and further edges from a node to itself. dot would draw all of them at the same position."""

    @override
    def make_canvas(self) -> Digraph:
        try:
            from graphviz import Digraph
        except ImportError as error:
            raise RenderError(
                f"the package graphviz is missing, `pip install graphviz` installs it: {error}"
            ) from error

        # The name of the file that the document's own methods write.
        canvas = Digraph("graph", filename=f"{re.sub(_NOT_IN_FILES, '_', self.graph.title) or 'graph'}.gv")
        canvas.attr(
            "graph",
            rankdir=self.direction,
            # Rank all nodes together. If each frame was ranked separately, a node could be above its sources.
            newrank="true",
            ranksep="0.35",
            nodesep="0.25",
            pad="0.20,0.20",
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
            # Do not call a user's override, which expects nodes with outputs.
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
        if not self.frames or is_needless(node, self.graph):
            self.render_contents(canvas, node)
            return
        style = self.styler.style_frame(node, self.graph)
        first = min(self._sheets_of[node.id])
        if self._now > first:
            style = {**style, "label": style.get("label", "").replace("</b>", "</b> (continued)", 1)}
        with canvas.subgraph(name=f"cluster_{node.id}{f'_{self._now}' if self._now > first else ''}") as frame:
            frame.attr(**_movable(style))
            self.render_contents(frame, node)

    def _estimated(self) -> dict[int, tuple[float, float]]:
        """Return the estimated width and height of each node and of the title of each frame, in points."""
        sizes = {
            number: label_size(style.get("label", ""), NAME_PT, DETAIL_PT, ellipse=style.get("shape") == "ellipse")
            for number, style in self._styles.items()
        }
        sizes |= {node.id: (6.0, 6.0) for node in self.graph.nodes if node.kind == "port"}
        for call in self.graph.module_calls() if self.frames else ():
            if call.id not in sizes and not is_needless(call, self.graph):
                label = self.styler.style_frame(call, self.graph).get("label", "")
                sizes[call.id] = label_size(label, NAME_PT, DETAIL_PT)
        return sizes

    @override
    def render_contents(self, canvas: Digraph, node: Node) -> None:
        if node is not self.graph.root or max(self._sheet.values(), default=0) == 0:
            self._render_part(canvas, node, self._here(node))
            return
        order = range(max(self._sheet.values()) + 1)
        # If the data flows across the page, Graphviz stacks the sheets from the bottom up.
        for number in reversed(order) if self.direction in ("LR", "RL") else order:
            self._now = number
            # An invisible frame keeps the nodes of a sheet together.
            with canvas.subgraph(name=f"cluster_sheet_{self._now}") as sheet:
                sheet.attr(label="", bgcolor="transparent", peripheries="0", margin="10")
                self._render_part(sheet, node, self._here(node), f"_{self._now}" if self._now else "")
                self._render_connectors(sheet)

    def _crosses(self, edge: Edge) -> bool:
        """Return True if an edge is drawn as two pieces on two sheets."""
        return self._sheet[edge.source] != self._sheet[edge.target] and edge not in self._between

    def _origin(self, edge: Edge) -> tuple[int, tuple[int, ...]]:
        """Return the node that computes the tensor of an edge, and the indices of its outputs.

        Ports are followed back to their source, except the port of a chain, since it passes a different tensor in each
        repetition.
        """
        while self.graph[edge.source].kind == "port" and self.graph[edge.source].name != CHAIN:
            edge = self.graph.into(self.graph[edge.source])[0]
        return edge.source, edge.outputs

    def _here(self, call: Node) -> list[Node]:
        """Return the children of a call that are on the current sheet."""
        return [child for child in self.graph.children(call) if self._now in self._sheets_of[child.id]]

    def _render_connectors(self, canvas: Digraph) -> None:
        """Add a box for each tensor that leaves the current sheet for another sheet, or enters it from there."""
        for tensor, number in self._numbers.items():
            users = [edge for edge in self.graph.edges if self._crosses(edge) and self._origin(edge) == tensor]
            color = self._color(number)
            look = {"shape": "box", "style": "rounded", "color": color, "fontcolor": color, "height": "0.2"}
            if self._sheet[tensor[0]] == self._now:
                places = dict.fromkeys(self._place(e.target, tensor[0]) for e in users)
                canvas.node(f"out_{number}", **look, label=_connector(number, f"to {', '.join(places)}"))
            elif any(self._sheet[e.target] == self._now for e in users):
                place = next(self._place(tensor[0], e.target) for e in users if self._sheet[e.target] == self._now)
                canvas.node(f"in_{number}_{self._now}", **look, label=_connector(number, f"from {place}"))

    def _color(self, number: int) -> str:
        """Return the color of the edges of a tensor that continues on another sheet."""
        return "#000000" if self.styler.paper else _LINES[(number - 1) % len(_LINES)]

    def _place(self, number: int, other: int) -> str:
        """Return a short name of a node, or of the largest call around it that is on one sheet without ``other``."""
        around = {each.id for each in self.graph.ancestors(self.graph[other])}
        path = [self.graph[number], *self.graph.ancestors(self.graph[number])]
        node = next(each for each, outer in pairwise(path) if outer.id in around or len(self._sheets_of[outer.id]) > 1)
        if node.kind == "port":
            return f"start of {self._name(self.graph[node.parent or self.graph.root.id])}"
        name = self._name(node)
        alike = [each for each in self._styles if self.graph[each].kind == "op" and self.graph[each].name == node.name]
        if node.kind != "op" or len(alike) == 1:
            return name
        # Several functions have the same name, such as the concatenations of a U-Net.
        behind = self._module_behind(node)
        return f"{name} before {self._name(behind)}" if behind else f"{name} {shown_shapes(node)}".strip()

    def _name(self, node: Node) -> str:
        name = short_name(node, self.graph) or shown_times(node) or node.kind
        return ".".join(node.name.split(".")[-2:]) if node.kind == "module" and name.isdecimal() else name

    def _module_behind(self, node: Node) -> Node | None:
        """Return the largest named call that takes the result of a function and does not contain the function."""
        around = {each.id for each in self.graph.ancestors(node)}
        for edge in self.graph.edges:
            if edge.source == node.id and not edge.relates("next"):
                target = self.graph[edge.target]
                outer = [each for each in (target, *self.graph.ancestors(target)) if each.id not in around]
                if outer and outer[-1].kind == "module" and outer[-1].name:
                    return outer[-1]
        return None

    @override
    def render_nodes(self, canvas: Digraph, nodes: Iterable[Node]) -> None:
        for note, run in groupby(nodes, lambda each: each.note if in_bracket(each, self.graph) else ""):
            part = list(run)
            if not note or not self.frames:
                super().render_nodes(canvas, part)
                continue
            with canvas.subgraph(name=f"cluster_bracket_{part[0].id}") as frame:
                frame.attr(**_movable(self.styler.style_scope(note)))
                super().render_nodes(frame, part)

    def _render_part(self, canvas: Digraph, call: Node, children: list[Node], suffix: str = "") -> None:
        """Add children of a call to the canvas. The nodes of a loss get a frame of their own.

        A function without a gradient, such as one that computes a target with a second network, is outside of it.
        """
        scopes: dict[int, str] = {}
        if call is self.graph.root and self.frames:
            trained = {child.scope for child in self.graph.children(call) if child.autograd}
            for child in children:
                is_part = child.kind != "op" or child.autograd or child.scope not in trained
                if child.scope.startswith(LOSS) and is_part:
                    scopes[child.id] = child.scope
        if not scopes:
            self.render_nodes(canvas, children)
            return
        for scope in ("", *dict.fromkeys(scopes.values())):
            part = [child for child in children if scopes.get(child.id, "") == scope]
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
        if edge in self._between:
            number = len(self._between) - 1 - self._between.index(edge)
            further = {"constraint": "false", **({"color": self._color(number)} if number else {})}
        elif self._crosses(edge):
            number = self._numbers[self._origin(edge)]
            start, further = f"in_{number}_{self._sheet[edge.target]}", {**further, "color": self._color(number)}
        elif edge in self._further_loops:
            side = "w" if self.direction in ("TB", "BT") else "s"
            further = {"tailport": side, "headport": side}
        canvas.edge(start, f"n{edge.target}", **{**further, **self._style_edge(edge)})

    @override
    def render(self) -> Digraph:
        canvas = super().render()
        for (source, _), number in self._numbers.items():
            weight = _MAIN_WEIGHT if any(one == source for one, _ in self._main) else "2"
            canvas.edge(f"n{source}", f"out_{number}", weight=weight, color=self._color(number))
        for first, second in self._rows:
            canvas.edge(f"n{first}", f"n{second}", style="invis", weight="0")
        # With a weight of 0, dot does not keep the order of nodes at the same height.
        weight = "1" if self._rows else "0"
        for first, second in constraints(self.graph):
            if self._sheet[first] == self._sheet[second]:
                # A frame begins below an input, not at the same height.
                least = "1" if self.graph[first].kind == "input" else "0"
                canvas.edge(f"n{first}", f"n{second}", style="invis", weight=weight, minlen=least)
        if self.legend:
            with canvas.subgraph(name="cluster_legend") as frame:
                frame.attr(label=f"<{small('legend')}>", color="#bdbdbd", tooltip=" ")
                for kind in _kinds(self.graph):
                    label = f"<{small(_MEANINGS[kind])}>"
                    frame.node(f"legend_{kind}", **LOOKS[kind], label=label, tooltip=" ")
        return canvas


def _instead(styler: object) -> str:
    """Return the end of the message about a value that is no styler: the value, and the code to write instead."""
    if isinstance(styler, type) and issubclass(styler, GraphvizStyler):
        return f"the class: write {styler.__name__}()"
    if isinstance(styler, (int, float)):
        return f"{styler!r}: write GraphvizRenderer(collapse(graph, {styler!r}, leaves=False)) for a depth"
    return repr(styler)


def main_path(graph: Graph) -> set[tuple[int, int]]:
    """Return the edges of the longest path through a graph. A reader follows this path first."""
    place = {node.id: number for number, node in enumerate(graph.nodes)}
    length: dict[int, int] = {}
    before: dict[int, int] = {}
    # Visit the edges in execution order, so that the path to a node is known before its outgoing edges are visited.
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


def _with_late_inputs(graph: Graph) -> Graph:
    """Move inputs, such as the labels of a model that computes its loss, into the frame in which they are first used.

    Such a frame computes something before it takes the input. Outside of the frame, the input would be beside it, far
    from the node that uses it. An input is not moved into a repeated frame.
    """
    users: dict[int, list[int]] = {}
    for edge in graph.edges:
        if edge.target not in users.setdefault(edge.source, []):
            users[edge.source].append(edge.target)
    behind: dict[int, set[int]] = {}
    """By node: the frames with a closed call that the node depends on."""
    place = {node.id: number for number, node in enumerate(graph.nodes)}
    parents = {node.parent for node in graph.nodes}
    for node in graph.nodes:
        found = behind.setdefault(node.id, set())
        for edge in graph.into(node):
            source = graph[edge.source]
            if place[source.id] < place[node.id]:
                found |= behind[source.id]
                is_layer = source.kind == "module" and source.id not in parents
                found.update(each.id for each in graph.ancestors(source) if is_layer)
    moved: dict[int, list[Node]] = {}
    """By node inside a frame: the inputs to put before it."""
    for node in graph.nodes:
        if node.kind != "input" or not users.get(node.id):
            continue
        first = min(users[node.id], key=place.__getitem__)
        common = [{each.id for each in graph.ancestors(graph[user])} for user in users[node.id]]
        frames = [each for each in graph.ancestors(graph[first]) if all(each.id in one for one in common)]
        whole = [each for at, each in enumerate(frames) if all(outer.repeats == 1 for outer in frames[at:])]
        frame = next((each for each in whole if each.id in behind[first]), graph.root)
        if frame is not graph.root:
            path = (graph[first], *graph.ancestors(graph[first]))
            user = next(each for each in path if each.parent == frame.id)
            moved.setdefault(user.id, []).append(replace(node, parent=frame.id, depth=frame.depth + 1))
    gone = {node.id for nodes in moved.values() for node in nodes}
    kept = [each for node in graph.nodes if node.id not in gone for each in (*moved.get(node.id, ()), node)]
    return replace(graph, nodes=tuple(kept)) if gone else graph


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


def _connector(number: int, text: str) -> str:
    return f'<<font point-size="{DETAIL_PT}"><b>{number}</b> {dot_label(text)}</font>>'


def _movable(style: dict[str, str]) -> dict[str, str]:
    """Add empty cells on both sides of a frame's title. The layout moves the title by changing their widths."""
    # Set these explicitly, since a frame would inherit other values from the invisible frame of its sheet.
    style = {"peripheries": "1", "margin": "8", **style}
    label = style.get("label", "")
    if not (label.startswith("<") and label.endswith(">")):
        return style
    cells = f'<td port="left" width="1"></td><td>{label[1:-1]}</td><td port="right" width="16"></td>'
    table = f'<<table border="0" cellborder="0" cellspacing="0" cellpadding="0"><tr>{cells}</tr></table>>'
    return {**style, "label": table}
