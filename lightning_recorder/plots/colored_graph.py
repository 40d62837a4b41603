"""Execution graph with modules colored by a statistic."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from typing_extensions import override

from lightning_recorder.errors import ArgumentError
from lightning_recorder.graph.drawing import Drawing, draw
from lightning_recorder.graph.model import Graph, Node
from lightning_recorder.graph.renderers.escape import dot_label
from lightning_recorder.graph.renderers.graphviz_styler import GraphvizStyler, Shapes
from lightning_recorder.names import closest_names
from lightning_recorder.plots.axes import number, scale_of
from lightning_recorder.plots.canvas import literal
from lightning_recorder.plots.frame import paint, table_for

__all__ = ["StatisticStyler", "color_graph"]

_STEPS = 5  # number of colors in the legend
_NOT_RECORDED = "#f0f0f0"
_NOT_FINITE = "#000000"
_LIGHT, _DARK = "#ffffff", "#000000"


class StatisticStyler(GraphvizStyler):
    """Fills module boxes with the color of a statistic and writes the value into them.

    Modules without a value are light grey. Functions and tensors keep their usual style. A legend below the title shows
    five values of the scale with their colors, and the meaning of grey and black. A box that represents several equal
    modules shows the value of the first one, with a note.

    Args:
        values: The values by fully-qualified module name. For a module drawn as a frame, the value appears in its
            title.
        statistic: The name of the statistic, with a unit if it has one.
        caption: The description in the legend; by default the statistic.
        log: If True or False, force or forbid a logarithmic scale. By default, positive values that span more than a
            factor of 50 have a logarithmic scale. The scale of signed values is always symmetric around 0.
        shapes: As for :class:`~lightning_recorder.graph.GraphvizStyler`.
        attributes: As for :class:`~lightning_recorder.graph.GraphvizStyler`.

    Raises:
        ArgumentError: If the values are not a mapping from names to numbers.

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

    def color(self, value: float) -> str:
        """Return the color of a value, for example ``#21918c``; black if it is not finite."""
        if not math.isfinite(value):
            return _NOT_FINITE
        # On a logarithmic scale, 0 lies below the lower end and has its color.
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
        fill = self.color(value)
        text = legible_on(fill)
        # The grey details of a label would be illegible on a dark box.
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
        return {
            **style,
            "label": _with_row(style["label"], f'<td align="left">{_text(self._words(node, graph))}</td>'),
        }

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
        """Return the cells of the legend."""
        known = [value for value in self.values.values() if math.isfinite(value)]
        kind = {"linear": "", "log": ", log scale", "symlog": ", symlog scale"}[self.scale.kind]
        cells = [f'<td border="0">{_text(self.caption + kind)}</td>']
        steps = self.scale.values(np.linspace(0, 1, _STEPS)).tolist() if known else []
        cells += [_cell(number(value), self.color(value)) for value in steps]
        cells += [_cell("not recorded", _NOT_RECORDED)]
        if len(known) < len(self.values):
            cells += [_cell("NaN or infinite", _NOT_FINITE)]
        return cells


def color_graph(
    graph: Graph,
    values: Mapping[str, float],
    *,
    statistic: str,
    caption: str = "",
    log: bool | None = None,
    **options: Any,
) -> Drawing:
    """Draw a recorded graph with modules colored by a statistic.

    Args:
        graph: The recorded graph, or a view of it.
        values: As for :class:`StatisticStyler`.
        statistic: As for :class:`StatisticStyler`.
        caption: As for :class:`StatisticStyler`.
        log: As for :class:`StatisticStyler`.
        options: As for :func:`~lightning_recorder.draw`, for example ``depth=2`` or ``max_nodes=60``. By default all
            calls are expanded, because statistics are recorded for leaf modules.

    Raises:
        ArgumentError: If an argument is invalid, or if the graph contains none of the modules; the message lists the
            closest names.
    """
    calls = {node.name: None for node in graph.module_calls()}
    if values and calls.keys().isdisjoint(values):
        name = next(iter(values))
        raise ArgumentError(f"the graph has no module {name!r} nor another of values; {closest_names(name, calls)}")
    shapes: Shapes = "nodes" if options.pop("show_shapes", True) else "none"
    styler = StatisticStyler(values, statistic=statistic, caption=caption, log=log, shapes=shapes)
    return draw(graph, styler=styler, **{"depth": None, **options})


def legible_on(color: str) -> str:
    """Return white or black, whichever has the higher WCAG 2 contrast to a color; it is always at least 4.5."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return _LIGHT if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else _DARK


def _cell(text: str, color: str) -> str:
    return f'<td bgcolor="{color}"><font color="{legible_on(color)}">{_text(text)}</font></td>'


def _with_row(label: str, cell: str) -> str:
    """Append a row with one cell to a label."""
    head, end, tail = label.rpartition("</table>")
    return f"{head}<tr>{cell}</tr>{end}{tail}" if end else label


def _text(text: str) -> str:
    """Escape text for an HTML-like label; characters missing from the font are shown as their code."""
    return dot_label(literal(text))
