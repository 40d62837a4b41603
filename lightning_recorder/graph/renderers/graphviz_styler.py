"""The look of the nodes, edges and frames of a Graphviz document."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal, TypeVar, cast, get_args

from lightning_recorder.errors import ArgumentError, UnknownArgumentError, closest
from lightning_recorder.fonts import FAMILY
from lightning_recorder.graph.model import IN_PLACE, Edge, Graph, Kind, Node
from lightning_recorder.graph.renderers import labels
from lightning_recorder.graph.renderers.details import (
    SOURCE_LINK,
    Detail,
    check_details,
    describe_detail,
    detail_color,
    source_link,
)
from lightning_recorder.graph.renderers.escape import dot_attribute, dot_label
from lightning_recorder.graph.views.constants import CONSTANT, UPDATE, UPDATED
from lightning_recorder.graph.views.dense import DENSE
from lightning_recorder.graph.views.ports import CHAIN
from lightning_recorder.graph.views.show_unused import NEVER_CALLED

__all__ = ["DETAIL_PT", "FONT", "LOOKS", "LOSS", "NAME_PT", "GraphvizStyler", "Shapes", "small"]

Shapes = Literal["nodes", "edges", "none"]


# The package includes DejaVu for machines without fonts. DejaVu is wider than the fonts that a viewer may use instead.
# So a label that was measured with DejaVu fits its box wherever the SVG is shown.
FONT = f"{FAMILY},Verdana,sans-serif"
NAME_PT = 12
DETAIL_PT = 10
SIGN_PT = 16

# Fill, border and shape by kind. Color-blind readers can distinguish the hues, which are from Okabe and Ito. The shapes
# differ for greyscale print.
LOOKS: dict[Kind, dict[str, str]] = {
    "module": {"fillcolor": "#dbe9f6", "color": "#0072b2", "shape": "box", "style": "filled,rounded"},
    "op": {"fillcolor": "#ffffff", "color": "#8c8c8c", "shape": "box", "style": "filled"},
    "input": {"fillcolor": "#d9f0e6", "color": "#009e73", "shape": "ellipse", "style": "filled"},
    "output": {"fillcolor": "#ffffff", "color": "#009e73", "shape": "ellipse", "style": "filled", "penwidth": "2"},
    "parameter": {"fillcolor": "#faedcc", "color": "#c98a00", "shape": "ellipse", "style": "filled"},
    "buffer": {"fillcolor": "#f3e6ef", "color": "#b06a94", "shape": "ellipse", "style": "filled"},
    "tensor": {"fillcolor": "#ffffff", "color": "#8c8c8c", "shape": "ellipse", "style": "filled,dashed"},
    "backward": {"fillcolor": "#fbe0d3", "color": "#d55e00", "shape": "box", "style": "filled", "peripheries": "2"},
    "optimizer": {"fillcolor": "#ffffff", "color": "#d55e00", "shape": "box", "style": "filled", "penwidth": "2"},
    "port": {"fillcolor": "#5f5f5f", "color": "#5f5f5f", "shape": "circle", "style": "filled"},
}
_CHAIN = {"fillcolor": "#0072b2", "color": "#0072b2"}
_CHAIN_ON_PAPER = {"fillcolor": "#ffffff", "width": "0.11", "height": "0.11"}
_FRAMES = ("#f6f6f6", "#ededed")
_FAILED = {"color": "#d4002a", "penwidth": "3"}
_UNUSED = {"color": "#8c8c8c", "fillcolor": "#ffffff", "style": "filled,rounded,dashed"}
# The look of an edge to the next repetition. The layout ignores the edge, which would pull its source above its target.
_NEXT = {"style": "dashed", "constraint": "false", "color": "#0072b2"}

# From https://graphviz.org/docs/nodes. dot silently ignores any other attribute.
_ATTRIBUTES = frozenset(
    (
        *("area", "class", "color", "colorscheme", "comment", "distortion", "fillcolor", "fixedsize", "fontcolor"),
        *("fontname", "fontsize", "gradientangle", "group", "height", "href", "id", "image", "imagepos", "imagescale"),
        *("label", "labelloc", "layer", "margin", "nojustify", "ordering", "orientation", "penwidth", "peripheries"),
        *("pin", "pos", "rects", "regular", "root", "samplepoints", "shape", "shapefile", "showboxes", "sides", "skew"),
        *("sortv", "style", "target", "tooltip", "URL", "vertices", "width", "xlabel", "xlp", "z"),
    )
)

# Black on white, for print.
PAPER: dict[Kind, dict[str, str]] = {
    kind: {**look, "fillcolor": {"port": "#000000", "module": "#f2f2f2"}.get(kind, "#ffffff"), "color": "#000000"}
    for kind, look in LOOKS.items()
}
# The signs for the sum and the product of two tensors.
_SIGNS = {"add": "+", "mul": "×"}
_ALWAYS_IN_PLACE = ("setitem", "set_data")
_SIGN = {"shape": "circle", "width": "0.28", "fixedsize": "true"}
_WIDE = {"shape": "ellipse", "width": "0.46", "height": "0.28"}

LOSS = "loss"  # prefix of the scopes of losses


Method = TypeVar("Method", bound=Callable[..., Any])


def _with_graph(method: Method) -> Method:
    """Decorate a method of a styler so that its ``graph`` argument may be omitted during rendering."""

    @functools.wraps(method)
    def wrapper(self: GraphvizStyler, part: Any, graph: Graph | None = None) -> Any:
        return method(self, part, graph or self.graph)

    return cast("Method", wrapper)


class GraphvizStyler:
    """Decides how nodes and edges look. Subclasses may override its methods.

    A method ``style_node(self, node)`` without the graph is accepted, too. ``self.graph`` is then the rendered graph.

    Args:
        shapes: Where to show tensor shapes: ``"nodes"`` (in the node that returned the tensor), ``"edges"`` or
            ``"none"``. Tooltips always show shapes.
        details: Fields to write into the nodes, such as ``("arguments", "flops")``: any of ``arguments``, ``inputs``,
            ``duration_ms``, ``flops``, ``output_bytes``, ``saved_bytes`` and ``note``. Tooltips always show all fields.
        color_by: The field that decides the fill color: any field of ``details`` except ``arguments`` and ``inputs``.
            Numbers are colored from white to orange by their ratio to the largest value. With ``note``, frozen and
            unused modules are grey, parameters without a gradient are yellow, and functions that stop a gradient are
            orange.
        link: The address that a node of an SVG opens, with ``{path}`` for the absolute path of its file, ``{file}`` for
            the path relative to the working directory or the installed packages, and ``{line}``. By default VS Code
            opens the line. ``None`` makes no links. With ``{path}``, files that do not exist here are not linked.
        paper: Draw in black and white, for print.
        attributes: Graphviz attributes for all nodes. They override the attributes of the node's kind.

    Raises:
        ArgumentError: If ``shapes``, ``details`` or ``color_by`` has an invalid value.
        UnknownArgumentError: If Graphviz has no such attribute of nodes.
    """

    def __init__(
        self,
        *,
        shapes: Shapes = "nodes",
        details: Collection[str] = (),
        color_by: str | None = None,
        link: str | None = SOURCE_LINK,
        paper: bool = False,
        **attributes: str,
    ) -> None:
        details = (details,) if isinstance(details, str) else tuple(details)
        check_details("details", details)
        check_details("color_by", [color_by] if color_by else [])
        if shapes not in get_args(Shapes):
            raise ArgumentError(f"shapes must be one of {', '.join(get_args(Shapes))}, got {shapes!r}")
        for name in attributes.keys() - _ATTRIBUTES:
            near = closest(name, (*_ATTRIBUTES, "shapes", "details", "color_by", "link", "paper"))
            raise UnknownArgumentError(
                f"{type(self).__name__} has no argument {name}, nor has Graphviz such an attribute of nodes"
                + (f": did you mean {near}?" if near else "")
            )
        self.shapes = shapes
        self.details = details
        self.color_by = color_by
        self.link = link
        self.paper = paper
        self.attributes = attributes
        self.graph: Graph | None = None

    @_with_graph
    def style_node(self, node: Node, graph: Graph) -> dict[str, str]:
        """Return the Graphviz attributes of a node, including its label."""
        looks = PAPER if self.paper else LOOKS
        if node.kind == "port":
            size = {"label": "", "width": "0.08", "height": "0.08", "fixedsize": "true", "tooltip": " "}
            chain = _CHAIN_ON_PAPER if self.paper else _CHAIN
            return {**looks["port"], **size, **(chain if node.name == CHAIN else {})}
        color = detail_color(node, graph, self.color_by) if self.color_by else None
        return {
            **looks[node.kind],
            **(_UNUSED if node.note == NEVER_CALLED else {}),
            **({"fillcolor": color} if color else {}),
            **(_FAILED if node.failed else {}),
            **(_SIGN if (sign := "" if self.details else _sign(node, graph)) else {}),
            **(_WIDE if sign and node.note == IN_PLACE else {}),
            "label": sign or _label(node, graph, shapes=self.shapes == "nodes", details=self.details),
            "tooltip": dot_attribute(_describe(node)),
            **self._address(node),
            **self.attributes,
        }

    def _address(self, node: Node) -> dict[str, str]:
        address = source_link(node.source, self.link) if self.link is not None else ""
        return {"URL": dot_attribute(address)} if address else {}

    def style_title(self, graph: Graph) -> dict[str, str]:
        """Return the Graphviz attributes of the whole graph. Its title shows the model's class and size."""
        name = graph.title
        lines = (f"{_bold(name)}{small(labels.title(graph).removeprefix(name))}", small(labels.caption(graph)))
        return {
            "label": _stacked(lines if graph.left_out else lines[:1]),
            "tooltip": dot_attribute(name),
        }

    def style_frame(self, node: Node, graph: Graph) -> dict[str, str]:
        """Return the Graphviz attributes of the cluster around the contents of a module call."""
        name = f"{labels.short_name(node, graph)} {labels.shown_times(node)}".strip()
        about = (labels.shown_dilations(node, graph), labels.shown_class(node), labels.size(node))
        lines = (*about, labels.same_weights(node, graph), _repetition(node, graph), labels.tied_to(node))
        return {
            # Keep the lines of the title short: the layout moves the title into a gap between the edges from above.
            "label": _stacked([*([_bold(name)] if name else []), *(small(line) for line in lines if line)]),
            "tooltip": dot_attribute(_describe(node)),
            **self._address(node),
            "bgcolor": "#ffffff" if self.paper else _FRAMES[node.depth % 2],
            "color": "#000000" if self.paper else "#0072b2" if node.repeats > 1 else "#bdbdbd",
            "penwidth": "2" if node.repeats > 1 else "1",
            **(_FAILED if node.failed else {}),
        }

    def style_scope(self, scope: str) -> dict[str, str]:
        """Return the Graphviz attributes of the cluster around a loss, or around recomputed or vmapped nodes."""
        return {
            "label": f"<{small(scope)}>",
            "tooltip": dot_attribute(scope),
            "color": "#000000" if self.paper else "#d55e00" if scope.startswith(LOSS) else "#5f5f5f",
            "style": "rounded,dashed",
        }

    def style_edge(self, edge: Edge, graph: Graph) -> dict[str, str]:
        """Return the Graphviz attributes of an edge.

        The label shows the number of tensors if the edge represents several, or the part of the source's output if
        other edges take other parts. If the target takes the outputs in another order, such as the swapped states of an
        LSTM cell, the label shows the indices of the outputs. An edge to the next repetition of a call is dashed.
        """
        times, across = labels.times(edge, graph), labels.shown_across(edge, graph)
        words = [str(edge.tensor)] if self.shapes == "edges" and edge.tensor is not None else []
        words += [across] if across else []
        part = labels.shown_part(edge, graph)
        words += [part] if part else [f"×{times}"] if times > 1 else []
        places = ", ".join(map(str, edge.outputs))
        words += [f"outputs {places}"] if list(edge.outputs) != sorted(edge.outputs) else []
        about = f"{edge.tensor.dtype} {edge.tensor}" if edge.tensor else ""
        about += f", output {places}" if places else ""
        style = {"tooltip": dot_attribute(about)}
        style |= _NEXT if edge.relates("next") else {}
        style |= {"color": "#000000"} if self.paper else {}
        return {**style, "label": f"<{small(' '.join(['', *words, '']))}>"} if words else style


def _repetition(node: Node, graph: Graph) -> str:
    return "" if labels.in_bracket(node, graph) else labels.repetition(node, graph)


def _sign(node: Node, graph: Graph) -> str:
    """Return a label with ``+`` or ``×`` for a plain addition or multiplication of tensors, else ""."""
    into = graph.into(node)
    several = len(into) > 1 or any(edge.relates("all") or labels.times(edge, graph) > 1 for edge in into)
    is_plain = node.kind == "op" and several and node.repeats == 1 and not (node.parameters or node.remark)
    text = _SIGNS.get(node.name, "") if is_plain else ""
    text += "=" if text and node.note == IN_PLACE else ""
    return text and f'<<font point-size="{SIGN_PT}">{text}</font>>'


def _label(node: Node, graph: Graph, *, shapes: bool, details: Iterable[str] = ()) -> str:
    name = "loss → backward" if node.name == node.kind == "backward" else labels.short_name(node, graph)
    if name.startswith(f"{node.type_name}#") and not node.total_parameters:
        name = node.type_name  # an unregistered module without parameters needs no number
    # torch names in-place functions with an underscore at the end.
    name += "_" if node.kind == "op" and node.note == IN_PLACE and node.name not in _ALWAYS_IN_PLACE else ""
    name = f"{name} {labels.shown_times(labels.with_all_times(node, graph))}".strip()
    lines = [_bold(name) if node.kind in _PROMINENT else dot_label(name)] if name else []
    if about := labels.class_and_size(node) if node.kind in ("module", "op") else node.type_name:
        lines.append(small(about))
    if node.note.endswith((NEVER_CALLED, DENSE, CONSTANT, UPDATE, UPDATED)) and "note" not in details:
        lines.append(small(node.note))
    further = labels.same_weights(node, graph), labels.unused(node, graph), labels.shown_dilations(node, graph)
    lines += [small(each) for each in further if each]
    if (again := _repetition(node, graph)) and "note" not in details:
        lines.append(small(again))
    lines += [small(each) for each in ("failed here" if node.failed else "", labels.tied_to(node)) if each]
    if shapes and node.outputs:
        lines.append(small(labels.shown_shapes(node)))
    lines += [small(text) for detail in details if (text := describe_detail(node, detail))]
    # A table instead of line breaks adds some space between the lines.
    rows = "".join(f"<tr><td>{line}</td></tr>" for line in lines)
    return f'<<table border="0" cellborder="0" cellspacing="0" cellpadding="1">{rows}</table>>'


def _stacked(lines: Iterable[str]) -> str:
    """Return an HTML-like label of left-aligned lines."""
    rows = "".join(f'<tr><td align="left">{line}</td></tr>' for line in lines)
    return f'<<table border="0" cellborder="0" cellspacing="0" cellpadding="0">{rows}</table>>' if rows else ""


_PROMINENT = ("module", "input", "output", "backward", "optimizer")


def _describe(node: Node) -> str:
    """Return the tooltip of a node: the full name and the details that the label omits."""
    outputs = ", ".join(f"{meta.dtype} {meta}" for meta in node.outputs[:8])
    parts = (
        node.name or node.kind,
        node.type_name,
        f"call {node.call}" if node.call > 1 else "",
        outputs,
        ", ".join(node.autograd[:8]),
        node.source,
        *(describe_detail(node, detail) for detail in get_args(Detail)),
    )
    return " · ".join(part for part in parts if part)


def _bold(text: str) -> str:
    return f"<b>{dot_label(text)}</b>"


def small(text: str) -> str:
    """Return a line of a label in the small font."""
    return f'<font point-size="{DETAIL_PT}" color="#4d4d4d">{dot_label(text)}</font>'
