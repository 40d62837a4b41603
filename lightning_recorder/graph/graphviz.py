"""A graph as a Graphviz document."""

from __future__ import annotations

import html
from typing import Literal, get_args

import graphviz
from typing_extensions import override

from lightning_recorder.errors import ArgumentError
from lightning_recorder.graph.model import Edge, Graph, Kind, Node
from lightning_recorder.graph.render import BaseRenderer

__all__ = ["Direction", "GraphvizRenderer", "GraphvizStyler"]

Direction = Literal["TB", "LR", "BT", "RL"]

# DejaVu is what matplotlib carries, so it can be had on a machine without fonts; it is also wider than its
# replacements, so that a label which was measured with it fits its box wherever the SVG is shown.
_FONT = "DejaVu Sans,Verdana,sans-serif"
_NAME_PT = 12
_DETAIL_PT = 10
_LONGEST_NAME = 60

# Fill, border and shape by kind: the hues are those of Okabe and Ito, told apart by the colour-blind; the shapes differ
# for print in grey.
_LOOKS: dict[Kind, dict[str, str]] = {
    "module": {"fillcolor": "#dbe9f6", "color": "#0072b2", "shape": "box", "style": "filled,rounded"},
    "op": {"fillcolor": "#ffffff", "color": "#8c8c8c", "shape": "box", "style": "filled"},
    "input": {"fillcolor": "#d9f0e6", "color": "#009e73", "shape": "ellipse", "style": "filled"},
    "output": {"fillcolor": "#ffffff", "color": "#009e73", "shape": "ellipse", "style": "filled", "penwidth": "2"},
    "parameter": {"fillcolor": "#faedcc", "color": "#c98a00", "shape": "ellipse", "style": "filled"},
    "buffer": {"fillcolor": "#f3e6ef", "color": "#b06a94", "shape": "ellipse", "style": "filled"},
    "tensor": {"fillcolor": "#ffffff", "color": "#8c8c8c", "shape": "ellipse", "style": "filled,dashed"},
    "backward": {"fillcolor": "#fbe0d3", "color": "#d55e00", "shape": "box", "style": "filled", "peripheries": "2"},
    "optimizer": {"fillcolor": "#ffffff", "color": "#d55e00", "shape": "box", "style": "filled", "penwidth": "2"},
}
_FRAMES = ("#f6f6f6", "#ededed")


class GraphvizStyler:
    """Decides how nodes and edges look; a subclass may decide otherwise.

    Args:
        attributes: Graphviz attributes for all nodes, over those of the kind.
    """

    def __init__(self, **attributes: str) -> None:
        self.attributes = attributes

    def style_node(self, node: Node, graph: Graph) -> dict[str, str]:
        """The Graphviz attributes of a node, its label included."""
        return {
            **_LOOKS[node.kind],
            "label": _label(node, graph),
            "tooltip": _plain(_describe(node)),
            **self.attributes,
        }

    def style_title(self, graph: Graph) -> dict[str, str]:
        """The Graphviz attributes of the whole: the model's class and size."""
        size = f" · {_count(graph.parameters)} parameters" if graph.parameters else ""
        return {
            "label": f"<{_bold(graph.root.type_name)}{_detail(f'.{graph.scope}{size}')}>",
            "tooltip": _plain(graph.root.type_name),
        }

    def style_frame(self, node: Node, graph: Graph) -> dict[str, str]:
        """The Graphviz attributes of the cluster around what a module call holds."""
        return {
            # The number before the class: an edge that comes in from above crosses what is written further right.
            "label": f"<{_bold((_short_name(node, graph) + _times(node)).strip())}{_detail(' ' + node.type_name)}>",
            "tooltip": _plain(_describe(node)),
            "bgcolor": _FRAMES[node.depth % 2],
            "color": "#0072b2" if node.repeats > 1 else "#bdbdbd",
            "penwidth": "2" if node.repeats > 1 else "1",
        }

    def style_edge(self, edge: Edge, graph: Graph) -> dict[str, str]:
        """The Graphviz attributes of an edge: a number where several tensors go the same way."""
        # Inside a frame that is drawn once for twelve, an edge that was recorded twelve times is one.
        expected = max(_repeats(graph[edge.source], graph), _repeats(graph[edge.target], graph))
        times = edge.multiplicity // expected
        style = {"tooltip": _plain(str(edge.tensor or ""))}
        return {**style, "label": f"<{_detail(f' ×{times} ')}>"} if times > 1 else style


class GraphvizRenderer(BaseRenderer[graphviz.Digraph]):
    """Renders a graph as a ``graphviz.Digraph``.

    Args:
        graph: What to render, as it is.
        styler: How it is to look.
        direction: Where the data flows: ``"TB"``, down the page, ``"LR"``, ``"BT"`` or ``"RL"``.

    Raises:
        ArgumentError: If the direction is none of the four.

    Example:
        >>> import torch
        >>> from lightning_recorder.graph import capture_graph, fit
        >>> dot = GraphvizRenderer(fit(capture_graph(torch.nn.Sequential(torch.nn.ReLU()), torch.ones(2)))).render()
        >>> [line.split("[")[0].strip() for line in dot.body[-5:]]
        ['n1', 'n2', 'n4', 'n1 -> n2', 'n2 -> n4']
    """

    def __init__(self, graph: Graph, styler: GraphvizStyler | None = None, *, direction: Direction = "TB") -> None:
        super().__init__(graph)
        check_direction(direction)
        self.styler = styler or GraphvizStyler()
        self.direction = direction

    @override
    def make_canvas(self) -> graphviz.Digraph:
        canvas = graphviz.Digraph("graph")
        canvas.attr(
            "graph",
            rankdir=self.direction,
            ranksep="0.35",
            nodesep="0.25",
            pad="0.2",
            fontname=_FONT,
            fontsize=str(_NAME_PT),
        )
        canvas.attr("graph", labeljust="l", labelloc="t", style="rounded", **self.styler.style_title(self.graph))
        canvas.attr("node", fontname=_FONT, fontsize=str(_NAME_PT), margin="0.12,0.06", height="0.3")
        canvas.attr("edge", fontname=_FONT, fontsize=str(_DETAIL_PT), color="#5f5f5f", arrowsize="0.6")
        return canvas

    @override
    def render_node(self, canvas: graphviz.Digraph, node: Node) -> None:
        canvas.node(f"n{node.id}", **self.styler.style_node(node, self.graph))

    @override
    def render_recursive_node(self, canvas: graphviz.Digraph, node: Node) -> None:
        with canvas.subgraph(name=f"cluster_{node.id}") as frame:
            frame.attr(**self.styler.style_frame(node, self.graph))
            self.render_contents(frame, node)

    @override
    def render_edge(self, canvas: graphviz.Digraph, edge: Edge) -> None:
        canvas.edge(f"n{edge.source}", f"n{edge.target}", **self.styler.style_edge(edge, self.graph))


def check_direction(direction: str) -> None:
    """Refuse a direction that Graphviz does not know.

    Raises:
        ArgumentError: Naming the four that it does.
    """
    if direction not in get_args(Direction):
        raise ArgumentError(f"direction must be one of {', '.join(get_args(Direction))}, got {direction!r}")


def _label(node: Node, graph: Graph) -> str:
    lines = [
        _bold(_short_name(node, graph) + _times(node))
        if node.kind in ("module", "input", "backward")
        else _text(_short_name(node, graph))
    ]
    if node.kind == "module":
        lines.append(_detail(_class_line(node)))
    if node.outputs:
        shown = ", ".join(map(str, node.outputs[:2])) + (", …" if len(node.outputs) > 2 else "")
        lines.append(_detail(shown))
    # A table and not line breaks, for some air between the lines.
    rows = "".join(f"<tr><td>{line}</td></tr>" for line in lines)
    return f'<<table border="0" cellborder="0" cellspacing="0" cellpadding="1">{rows}</table>>'


def _short_name(node: Node, graph: Graph) -> str:
    """A module's name without that of the frame around it, with the number of its call; anything else's own name."""
    if node.kind == "backward":
        return "loss → backward"
    # A module call without a name is the frame around several siblings that repeat together.
    name = node.name or ("" if node.kind == "module" else node.kind)
    if node.kind == "module":
        around = next((call.name for call in graph.ancestors(node) if call.name), "")
        name = name.removeprefix(around + ".") if around else name
    if len(name) > _LONGEST_NAME:
        # Both ends, since names differ in their beginnings or their ends; the whole name is in the tooltip.
        name = f"{name[: _LONGEST_NAME // 2]}…{name[-_LONGEST_NAME // 2 :]}"
    return name + (f" (call {node.call})" if node.call > 1 else "")


def _class_line(node: Node) -> str:
    return node.type_name + (f" · {_count(node.parameters)} parameters" if node.parameters else "")


def _times(node: Node) -> str:
    return f" ×{node.repeats}" + (" side by side" if node.parallel else "") if node.repeats > 1 else ""


def _count(number: int) -> str:
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= 10 * size or (number >= size and unit != "k"):
            return f"{number / size:.3g} {unit}"
    return str(number)


def _describe(node: Node) -> str:
    """What the pointer shows in an SVG: the full name and everything else that the label leaves out."""
    outputs = ", ".join(f"{meta.dtype} {meta}" for meta in node.outputs[:8])
    return " · ".join(
        part
        for part in (node.name or node.kind, node.type_name, f"call {node.call}" if node.call > 1 else "", outputs)
        if part
    )


def _repeats(node: Node, graph: Graph) -> int:
    """How many recorded nodes a drawn one stands for, the folding around it included."""
    total = node.repeats
    for call in graph.ancestors(node):
        total *= call.repeats
    return total


# Everything that is written into a document goes through one of these.


def _text(text: str) -> str:
    """Text inside an HTML-like label; of a name that cannot be printed, what can."""
    # Two backslashes for one: in a label \\N would become the name of the node.
    return html.escape(_printable(text)).replace("\\", "\\\\")


def _plain(text: str) -> str:
    """Text as the value of an attribute."""
    # Entities are read in attributes as well as in labels, and backslashes twice over, of which the library knows once.
    return graphviz.escape(html.escape(_printable(text), quote=False).replace("\\", "\\\\")) or " "


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "�" for char in text)


def _bold(text: str) -> str:
    return f"<b>{_text(text)}</b>"


def _detail(text: str) -> str:
    return f'<font point-size="{_DETAIL_PT}" color="#4d4d4d">{_text(text)}</font>'
