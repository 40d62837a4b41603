"""A graph as a Mermaid flowchart, which GitHub and many editors display."""

from __future__ import annotations

from typing_extensions import override

from lightning_recorder.graph.model import Edge, Graph, Kind, Node
from lightning_recorder.graph.renderers.base import BaseRenderer
from lightning_recorder.graph.renderers.escape import mermaid_label, yaml_string
from lightning_recorder.graph.renderers.graphviz import Direction, check_direction
from lightning_recorder.graph.renderers.labels import (
    class_and_size,
    is_needless,
    short_name,
    shown_across,
    shown_dilations,
    shown_shapes,
    shown_times,
    tied_to,
    times,
    title,
    with_all_times,
)

__all__ = ["MermaidRenderer", "to_mermaid"]

# For each kind: the brackets that define the shape, and the style. The hues are the same as in the Graphviz pictures.
# Mermaid has no ellipse that grows with its text, so tensors are pills, and parameters and buffers are cylinders.
_LOOKS: dict[Kind, tuple[str, str, str]] = {
    "module": ("(", ")", "fill:#dbe9f6,stroke:#0072b2"),
    "op": ("[", "]", "fill:#ffffff,stroke:#8c8c8c"),
    "input": ("([", "])", "fill:#d9f0e6,stroke:#009e73"),
    "output": ("([", "])", "fill:#ffffff,stroke:#009e73,stroke-width:2px"),
    "parameter": ("[(", ")]", "fill:#faedcc,stroke:#c98a00"),
    "buffer": ("[(", ")]", "fill:#f3e6ef,stroke:#b06a94"),
    "tensor": ("([", "])", "fill:#ffffff,stroke:#8c8c8c,stroke-dasharray:4 3"),
    "backward": ("[[", "]]", "fill:#fbe0d3,stroke:#d55e00"),
    "optimizer": ("{{", "}}", "fill:#ffffff,stroke:#d55e00,stroke-width:2px"),
    "port": ("((", "))", "fill:#5f5f5f,stroke:#5f5f5f"),
}
_FRAMES = ("fill:#f6f6f6,stroke:#bdbdbd", "fill:#ededed,stroke:#bdbdbd")
_REPEATED = "stroke:#0072b2,stroke-width:2px"
_FAILED = "stroke:#d4002a,stroke-width:3px"
# This grey is visible both on the frames and on a dark page.
_LINES = "linkStyle default stroke:#7f7f7f"
# By default Mermaid 11 wraps labels at 200 pixels, which is too narrow for a class name with its size.
_CONFIG = "config: {flowchart: {wrappingWidth: 600}}"
_TEXT = "color:#1f1f1f"  # set with each fill, since a dark page uses white text by default


class MermaidRenderer(BaseRenderer[list[str]]):
    """Renders a graph as the lines of a Mermaid flowchart.

    Args:
        graph: The graph to render. All its nodes are rendered.
        direction: The direction of the data flow: ``"TB"`` (down the page), ``"LR"``, ``"BT"`` or ``"RL"``.

    Raises:
        ArgumentError: If the direction is not one of the four.

    Note:
        Mermaid rejects flowcharts with more than 500 edges or 50,000 characters. These limits cannot be changed on
        GitHub. To stay below them, render a view made by :func:`fit_view`.
    """

    def __init__(self, graph: Graph, *, direction: Direction = "TB") -> None:
        super().__init__(graph)
        check_direction(direction)
        self.direction = direction

    @override
    def make_canvas(self) -> list[str]:
        return ["---", f"title: {yaml_string(title(self.graph))}", _CONFIG, "---", f"flowchart {self.direction}"]

    @override
    def render(self) -> list[str]:
        # The styles come last, so that a reader of the text sees the graph first.
        return [*super().render(), *(f"  {line}" for line in self._looks())]

    @override
    def render_node(self, canvas: list[str], node: Node) -> None:
        left, right, _ = _LOOKS[node.kind]
        what = class_and_size(node) if node.kind in ("module", "op") else node.type_name
        lines = [self._name(node), what, tied_to(node), shown_shapes(node)]
        self._put(canvas, node, f"n{node.id}{left}{mermaid_label(lines)}{right}:::{node.kind}")
        if node.failed:
            self._put(canvas, node, f"class n{node.id} failed")

    @override
    def render_recursive_node(self, canvas: list[str], node: Node) -> None:
        if is_needless(node, self.graph):
            self.render_contents(canvas, node)
            return
        words = " ".join(part for part in (self._name(node), class_and_size(node)) if part)
        self._put(canvas, node, f"subgraph n{node.id}[{mermaid_label([words])}]")
        self.render_contents(canvas, node)
        self._put(canvas, node, "end")
        marks = [f"frame{node.depth % 2}", *["repeated"] * (node.repeats > 1), *["failed"] * node.failed]
        for mark in marks:
            self._put(canvas, node, f"class n{node.id} {mark}")

    @override
    def render_edge(self, canvas: list[str], edge: Edge) -> None:
        number = times(edge, self.graph)
        words = " ".join(part for part in (shown_across(edge, self.graph), f"×{number}" if number > 1 else "") if part)
        label = f"|{mermaid_label([words])}|" if words else ""
        arrow = "-.->" if edge.relates("next") else "-->"
        canvas.append(f"  n{edge.source} {arrow}{label} n{edge.target}")

    def _looks(self) -> list[str]:
        kinds = {node.kind for node in self.graph.nodes[1:]}
        looks = [f"classDef {kind} {style},{_TEXT}" for kind, (*_, style) in _LOOKS.items() if kind in kinds]
        frames = [f"classDef frame{number} {style},{_TEXT}" for number, style in enumerate(_FRAMES)]
        marks = [f"classDef repeated {_REPEATED}", f"classDef failed {_FAILED}"]
        return [*looks, *frames, *marks, *([_LINES] if self.graph.edges else [])]

    def _name(self, node: Node) -> str:
        number = shown_times(with_all_times(node, self.graph))
        parts = ("✗" * node.failed, short_name(node, self.graph), number, shown_dilations(node, self.graph))
        return " ".join(part for part in parts if part)

    def _put(self, canvas: list[str], node: Node, line: str) -> None:
        canvas.append("  " * len(list(self.graph.ancestors(node))) + line)


def to_mermaid(graph: Graph, direction: Direction = "TB") -> str:
    r"""Convert a graph to the text of a Mermaid flowchart, for a ``mermaid`` code block in a Markdown file.

    Args:
        graph: The graph to render. All its nodes are rendered. See :class:`MermaidRenderer` for limits.
        direction: The direction of the data flow: ``"TB"``, ``"LR"``, ``"BT"`` or ``"RL"``.

    Raises:
        ArgumentError: If the direction is not one of the four.

    Example:
        >>> import torch
        >>> from lightning_recorder.graph import capture_graph, fit_view
        >>> view = fit_view(capture_graph(torch.nn.Sequential(torch.nn.Linear(4, 3)), torch.ones(2, 4)))
        >>> print("\n".join(to_mermaid(view).splitlines()[:10]))
        ---
        title: "Sequential.forward \u00b7 15 parameters"
        config: {flowchart: {wrappingWidth: 600}}
        ---
        flowchart TB
          n1(["input<br/>2×4"]):::input
          n2("0<br/>Linear · 15 parameters<br/>2×3"):::module
          n6(["output<br/>2×3"]):::output
          n1 --> n2
          n2 --> n6
    """
    return "\n".join(MermaidRenderer(graph, direction=direction).render()) + "\n"
