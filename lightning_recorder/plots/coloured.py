"""The execution graph with its modules coloured by a statistic."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from typing_extensions import override

from lightning_recorder.errors import ArgumentError
from lightning_recorder.graph.drawing import Drawing, draw
from lightning_recorder.graph.graphviz import GraphvizStyler, Shapes
from lightning_recorder.graph.model import Graph, Node
from lightning_recorder.names import closest_names
from lightning_recorder.plots.canvas import literal
from lightning_recorder.plots.colours import paint, table_for
from lightning_recorder.plots.scale import number, scale_of

__all__ = ["StatisticStyler", "colour_graph"]

_STEPS = 5  # of the scale, in the legend
_NOT_RECORDED = "#f0f0f0"
_NOT_FINITE = "#000000"
_LIGHT, _DARK = "#ffffff", "#000000"


class StatisticStyler(GraphvizStyler):
    """Fills the boxes of modules with the colour of a number, which is written into them.

    Modules without a number are light grey; functions and tensors are as ever. The legend stands below the title: five
    numbers of the scale with their colours, and what grey and black mean. Of a box that stands for several equal
    modules, the number is that of the first, and the box says so.

    Args:
        values: By the modules' dotted names; the numbers of modules that are drawn as frames stand in their titles.
        statistic: What they are, with a unit if there is one.
        caption: What the legend says of them; by default the statistic.
        log: Whether the scale is logarithmic; by default it is for positive numbers that span more than a factor of 50,
            and around 0 for signed ones.
        shapes: As for :class:`~lightning_recorder.GraphvizStyler`.
        attributes: As for :class:`~lightning_recorder.GraphvizStyler`.

    Raises:
        ArgumentError: If the values are not numbers by name.

    Example:
        >>> styler = StatisticStyler({"0": 0.5, "1": 2.0}, statistic="rms")
        >>> node = Node(1, "module", "1", 0, 1, type_name="ReLU")
        >>> styler.style_node(node, Graph((Node(0, "module", "", None, 0), node), ()))["fillcolor"]
        '#fde725'
    """

    def __init__(
        self,
        values: Mapping[str, float],
        *,
        statistic: str,
        caption: str = "",
        log: bool | None = None,
        shapes: Shapes = "nodes",
        **attributes: str,
    ) -> None:
        super().__init__(shapes=shapes, **attributes)
        try:
            self.values = {name: float(value) for name, value in values.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise ArgumentError(f"values must be numbers by module name, got {error}") from error
        self.statistic = statistic
        self.caption = caption or statistic
        self.scale = scale_of(np.array([*self.values.values()], dtype=np.float64), log=log)

    def colour(self, value: float) -> str:
        """The colour of a number, as ``#21918c``; black if it is not finite."""
        if not math.isfinite(value):
            return _NOT_FINITE
        # On a logarithmic scale 0 lies below the low end and has its colour.
        red, green, blue = paint(np.array(value), self.scale, table_for(self.scale)).tolist()
        return f"#{red:02x}{green:02x}{blue:02x}"

    @override
    def style_node(self, node: Node, graph: Graph) -> dict[str, str]:
        style = super().style_node(node, graph)
        if node.kind != "module":
            return style
        if node.name not in self.values:
            return {**style, "fillcolor": _NOT_RECORDED, **self.attributes}
        value = self.values[node.name]
        fill = self.colour(value)
        text = legible_on(fill)
        # The details of a label have a grey of their own, which a dark box would swallow.
        label = re.sub(r'(<font [^>]*color=)"#[0-9a-f]{6}"', rf'\1"{text}"', style["label"])
        return {
            **style,
            "fillcolor": fill,
            "fontcolor": text,
            "label": _with_row(label, f'<td><font color="{text}">{_text(self._words(node, graph))}</font></td>'),
            **self.attributes,
        }

    @override
    def style_frame(self, node: Node, graph: Graph) -> dict[str, str]:
        style = super().style_frame(node, graph)
        if node.name not in self.values or not node.name:
            return style
        return {**style, "label": _with_row(style["label"], f'<td align="left">{_text(self._words(node, graph))}</td>')}

    def _words(self, node: Node, graph: Graph) -> str:
        several = node.repeats * math.prod(call.repeats for call in graph.ancestors(node))
        first = f" (first of {several})" if several > 1 else ""
        return f"{self.statistic} {number(self.values[node.name])}{first}"

    @override
    def style_title(self, graph: Graph) -> dict[str, str]:
        style = super().style_title(graph)
        title = style["label"].removeprefix("<").removesuffix(">")
        cells = "".join(self._legend())
        legend = (
            f'<table border="0" cellborder="1" cellspacing="3" cellpadding="4" color="#8c8c8c"><tr>{cells}</tr></table>'
        )
        rows = "".join(f'<tr><td align="left">{each}</td></tr>' for each in (title, legend))
        return {**style, "label": f'<<table border="0" cellborder="0" cellspacing="0">{rows}</table>>'}

    def _legend(self) -> list[str]:
        """The cells of the legend."""
        known = [value for value in self.values.values() if math.isfinite(value)]
        kind = {"linear": "", "log": ", log scale", "symlog": ", symlog scale"}[self.scale.kind]
        cells = [f'<td border="0">{_text(self.caption + kind)}</td>']
        steps = self.scale.values(np.linspace(0, 1, _STEPS)).tolist() if known else []
        cells += [_cell(number(value), self.colour(value)) for value in steps]
        cells += [_cell("not recorded", _NOT_RECORDED)]
        if len(known) < len(self.values):
            cells += [_cell("NaN or infinite", _NOT_FINITE)]
        return cells


def colour_graph(
    graph: Graph,
    values: Mapping[str, float],
    *,
    statistic: str,
    caption: str = "",
    log: bool | None = None,
    **options: Any,
) -> Drawing:
    """A recorded graph with its modules coloured by a statistic.

    Args:
        graph: What was recorded, or a view of it.
        values: As for :class:`StatisticStyler`.
        statistic: As for :class:`StatisticStyler`.
        caption: As for :class:`StatisticStyler`.
        log: As for :class:`StatisticStyler`.
        options: As for :func:`~lightning_recorder.draw`, as ``depth=2`` or ``max_nodes=60``; by default all calls are
            opened, since it is leaves of which there are statistics.

    Raises:
        ArgumentError: If an argument is not understood, or the graph has none of the modules; names those nearest.
    """
    calls = {node.name: None for node in graph.module_calls()}
    if values and calls.keys().isdisjoint(values):
        name = next(iter(values))
        raise ArgumentError(f"the graph has no module {name!r} nor another of values; {closest_names(name, calls)}")
    shapes: Shapes = "nodes" if options.pop("show_shapes", True) else "none"
    styler = StatisticStyler(values, statistic=statistic, caption=caption, log=log, shapes=shapes)
    return draw(graph, styler=styler, **{"depth": None, **options})


def legible_on(colour: str) -> str:
    """White or black, whichever has the greater contrast by WCAG 2; it is never less than 4.5."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return _LIGHT if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else _DARK


def _cell(text: str, colour: str) -> str:
    return f'<td bgcolor="{colour}"><font color="{legible_on(colour)}">{_text(text)}</font></td>'


def _with_row(label: str, cell: str) -> str:
    """A label with one more row, of one cell, at its end."""
    head, end, tail = label.rpartition("</table>")
    return f"{head}<tr>{cell}</tr>{end}{tail}" if end else label


def _text(text: str) -> str:
    """Text inside an HTML-like label."""
    # Two backslashes for one: in a label \\N would become the name of the node.
    return html.escape(literal(text)).replace("\\", "\\\\")
