"""Execution graph with modules colored by a statistic."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from statistics import median
from typing import Any

import numpy as np
from typing_extensions import override

from lightning_recorder.errors import ArgumentError
from lightning_recorder.graph.drawing import Drawing, draw
from lightning_recorder.graph.model import Graph, Node
from lightning_recorder.graph.renderers.escape import dot_label
from lightning_recorder.graph.renderers.graphviz_styler import GraphvizStyler, Shapes
from lightning_recorder.insight.module_edges import families
from lightning_recorder.insight.unusual import STANDS_OUT, unusualness
from lightning_recorder.names import closest_names
from lightning_recorder.plots.axes import number, scale_of
from lightning_recorder.plots.canvas import literal
from lightning_recorder.plots.frame import paint, table_for

__all__ = ["StatisticStyler", "color_graph"]

_STEPS = 5  # number of colors in the legend
_NOT_RECORDED = "#f0f0f0"
_NOT_FINITE = "#000000"
_LIGHT, _DARK = "#ffffff", "#000000"
_SIMILAR = 1 / 8  # colors are similar if their distance is below this fraction of the legend
_MOST_SIMILAR = 1 / 4  # the maximum of this fraction, for values that usually differ as much between neighboring blocks
_NOISE = 1 / 4  # values that differ from the median by at most this fraction of it count as similar to it
_LOOK_NOT_FINITE, _LOOK_STANDS_OUT, _LOOK_MISSING, _LOOK_FRAMED = 99, 100, 101, 102
_FRAMED = {"color": "#d4002a", "penwidth": "3"}
_LOOK = "statistic"  # name of the argument that keeps modules with different colors from being folded together


class StatisticStyler(GraphvizStyler):
    """Fills each module box with a color for the value of a statistic, and writes the value into the box.

    Modules without a value are light grey. A closed box without a value of its own shows the value and the name of the
    most unusual module inside it, or of a typical one if none is unusual. Functions and tensors keep their usual style.
    A legend below the title shows five values of the scale with their colors, and the meaning of grey and black. A box
    that represents several equal modules has the color of their median and shows their smallest and largest values.

    Args:
        values: The values by fully-qualified module name. For a module drawn as a frame, the value appears in its
            title.
        statistic: The name of the statistic, with a unit if it has one.
        caption: The description in the legend; by default the statistic.
        log: If True or False, force or forbid a logarithmic scale. By default, positive values that span more than a
            factor of 50 have a logarithmic scale. The scale of signed values is always symmetric around 0.
        framed: The names of modules with a red border, such as the modules of findings. They are not folded with other
            modules.
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
        framed: Collection[str] = (),
        shapes: Shapes = "nodes",
        **attributes: Any,
    ) -> None:
        super().__init__(shapes=shapes, **attributes)
        try:
            self.values = {name: float(value) for name, value in values.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise ArgumentError(f"values must be numbers by module name, got {error}") from error
        self.statistic = statistic
        self.caption = caption or statistic
        self.framed = frozenset(framed)
        self.scale = scale_of(np.array([*self.values.values()], dtype=np.float64), log=log)
        self._families = {name: group for group in families(dict.fromkeys(self.values), 2) for name in group}

    def looks(self, modules: Iterable[str]) -> dict[str, int]:
        """Return a number for each module. Equal modules with the same number have similar colors.

        The number is the distance between the module's value and the median of its family, in units of an eighth of the
        legend. A family is the corresponding modules of repeated blocks. The number is 0 if value and median differ
        by less than a quarter of the median. It is also 0 if they differ by less than twice the usual difference
        between neighbors, up to a quarter of the legend. Three sorts of modules always get a number of their own:
        modules that stand out, framed modules, and modules without a value in a family with values.

        Args:
            modules: The names of all modules.
        """
        found = dict.fromkeys(self.values, 0)
        for group in families(dict.fromkeys(modules), 2):
            missing = [name for name in group if name not in self.values]
            found |= dict.fromkeys(missing, _LOOK_MISSING if len(missing) < len(group) else 0)
        for group in {id(each): each for each in self._families.values()}.values():
            values = np.array([self.values[name] for name in group])
            places = self.scale.place(np.where(np.isfinite(values), values, np.nan))
            if np.isfinite(places).any():
                away = places - np.nanmedian(places)
                places = np.trunc(away / _SIMILAR)
                usual = np.nanmedian(np.abs(np.diff(away))) if np.isfinite(np.diff(away)).any() else 0.0
                places[np.abs(away) <= min(2 * usual, _MOST_SIMILAR)] = 0
                middle = _middle(values.tolist())
                # Ignore small differences: on a legend with a narrow range, noise would get many colors.
                places[np.abs(values - middle) <= _NOISE * abs(middle)] = 0
            for name, each in zip(group, places.tolist(), strict=True):
                found[name] = _LOOK_NOT_FINITE if math.isnan(each) else int(each)
        for name, degree in self._degrees.items():
            if degree >= STANDS_OUT:
                found[name] = found[name] or _LOOK_STANDS_OUT
        return found | dict.fromkeys(self.framed, _LOOK_FRAMED)

    @cached_property
    def _degrees(self) -> dict[str, float]:
        """How unusual each module is."""
        what = self.statistic if self.statistic == "zero_fraction" else "size"
        names = list(self.values)
        degrees = unusualness(names, {what: np.array([*self.values.values()])[:, None]})
        return dict(zip(names, degrees.tolist(), strict=True))

    def _inside(self, node: Node) -> str | None:
        """Return the inner module whose value a closed box shows: the most unusual one, or a typical one.

        This is for a box whose own module has no value. A box without any value would look as if nothing inside it was
        recorded. If a box represents several modules, the modules inside all of them are considered.
        """
        starts = tuple(f"{name}." if name else "" for name in node.members or (node.name,))
        names = [name for name in self.values if name.startswith(starts) and name != node.name]
        degrees = {name: self._degrees[name] if math.isfinite(self.values[name]) else math.inf for name in names}
        first = max(names, key=degrees.__getitem__, default=None)
        if first is None or degrees[first] >= STANDS_OUT:
            return first
        return sorted(names, key=self.values.__getitem__)[len(names) // 2]

    def color(self, value: float) -> str:
        """Return the color of a value, for example ``#21918c``; black if it is not finite."""
        if not math.isfinite(value):
            return _NOT_FINITE
        # On a logarithmic scale, 0 gets the color of the lower end.
        red, green, blue = paint(np.array(value), self.scale, table_for(self.scale)).tolist()
        return f"#{red:02x}{green:02x}{blue:02x}"

    @override
    def style_node(self, node: Node, graph: Graph) -> dict[str, str]:
        style = super().style_node(_unmarked(node), graph)
        if node.kind != "module":
            return style
        if any(name == node.name or name.startswith(f"{node.name}.") for name in self.framed):  # also inside
            style |= _FRAMED
        inner = None if node.name in self.values else self._inside(node)
        if node.name not in self.values and inner is None:
            return {**style, "fillcolor": _NOT_RECORDED, **self.attributes}
        if inner is None:
            value, words = _middle(self._values_of(node)), self._words(node)
        else:
            value = self.values[inner]
            where = inner.removeprefix(f"{node.name}." if node.name else "")
            words = f"{self.statistic} {number(value)} ({where})"
        fill = self.color(value)
        text = legible_on(fill)
        # Replace the grey of the details, which would be illegible on a dark box.
        label = re.sub(r'(<font [^>]*color=)"#[0-9a-f]{6}"', rf'\1"{text}"', style["label"])
        label = _with_row(label, f'<td><font color="{text}">{_text(words)}</font></td>')
        return {**style, "fillcolor": fill, "fontcolor": text, "label": label, **self.attributes}

    @override
    def style_frame(self, node: Node, graph: Graph) -> dict[str, str]:
        style = super().style_frame(_unmarked(node), graph)
        if node.name in self.framed:
            style |= _FRAMED
        if node.name not in self.values or not node.name:
            return style
        return {
            **style,
            "label": _with_row(style["label"], f'<td align="left">{_text(self._words(node))}</td>'),
        }

    def _words(self, node: Node) -> str:
        values = self._values_of(node)
        ends = dict.fromkeys((number(min(values)), number(max(values))))
        return f"{self.statistic} {' to '.join(ends)}" + (f" (×{len(values)})" if len(values) > 1 else "")

    def _values_of(self, node: Node) -> list[float]:
        """Return the values of the modules that a box represents."""
        return [self.values[name] for name in node.members or (node.name,) if name in self.values]

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
        known = [value for value in self.values.values() if math.isfinite(value)]
        kind = {"linear": "", "log": ", log scale", "symlog": ", symlog scale"}[self.scale.kind]
        cells = [f'<td border="0">{_text(self.caption + kind)}</td>']
        steps = self.scale.values(np.linspace(0, 1, _STEPS)).tolist() if known else []
        cells += [_cell(number(value), self.color(value)) for value in steps]
        cells += [_cell("not recorded", _NOT_RECORDED)]
        if len(known) < len(self.values):
            cells += [_cell("NaN or infinite", _NOT_FINITE)]
        if self.framed:
            cells += [f'<td color="{_FRAMED["color"]}">named by a finding</td>']
        return cells


def color_graph(
    graph: Graph,
    values: Mapping[str, float],
    *,
    statistic: str,
    caption: str = "",
    log: bool | None = None,
    framed: Collection[str] = (),
    **options: Any,
) -> Drawing:
    """Draw a recorded graph with modules colored by a statistic.

    Args:
        graph: The recorded graph, or a view of it.
        values: As for :class:`StatisticStyler`.
        statistic: As for :class:`StatisticStyler`.
        caption: As for :class:`StatisticStyler`.
        log: As for :class:`StatisticStyler`.
        framed: As for :class:`StatisticStyler`.
        options: As for :func:`~lightning_recorder.draw`, for example ``depth=2`` or ``max_nodes=60``. By default all
            calls are expanded, because statistics are recorded for leaf modules. Equal blocks are drawn once only if
            their colors are similar: their values differ by less than an eighth of the legend from the median.

    Raises:
        ArgumentError: If an argument is invalid, or if the graph contains none of the modules. The message lists the
            closest names.
    """
    calls = {node.name: None for node in graph.module_calls()}
    if values and calls.keys().isdisjoint(values):
        name = next(iter(values))
        raise ArgumentError(f"the graph has no module {name!r} nor another of values; {closest_names(name, calls)}")
    shapes: Shapes = "nodes" if options.pop("show_shapes", True) else "none"
    framed = calls.keys() & framed
    styler = StatisticStyler(values, statistic=statistic, caption=caption, log=log, framed=framed, shapes=shapes)
    looks = {name: look for name, look in styler.looks(calls).items() if look}
    marked = replace(graph, nodes=tuple(_marked(node, looks) for node in graph.nodes))
    drawing = draw(marked, styler=styler, **{"depth": None, **options})
    return replace(drawing, graph=graph, view=replace(drawing.view, nodes=tuple(map(_unmarked, drawing.view.nodes))))


def _marked(node: Node, looks: Mapping[str, int]) -> Node:
    """Add the color of a node to its arguments, so that only nodes of the same color are folded together."""
    if node.kind != "module" or node.name not in looks:
        return node
    return replace(node, arguments=(*node.arguments, (_LOOK, str(looks[node.name]))))


def _unmarked(node: Node) -> Node:
    if node.kind != "module":
        return node
    return replace(node, arguments=tuple(pair for pair in node.arguments if pair[0] != _LOOK))


def _middle(values: list[float]) -> float:
    """Return the median of the finite values; the first value if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return median(finite) if finite else values[0]


def legible_on(color: str) -> str:
    """Return white or black, whichever has the higher WCAG 2 contrast to a color. The contrast is at least 4.5."""
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
    """Escape text for an HTML-like label. Characters missing from the font are replaced by their codes."""
    return dot_label(literal(text))
