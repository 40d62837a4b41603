"""The division of long chains into columns, so that a picture is neither too long nor too wide."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from lightning_recorder.graph.model import Edge, Graph, Node

__all__ = ["Columns", "Size", "label_size", "split"]

_RATIO = 3.1  # of the longer to the shorter side, from which a picture is divided; the sizes are estimates
# Rows of parallel nodes, and pictures whose data flows across the page, get longer than estimated.
_BROAD = 2.2
_ROUNDS = 24
_WORTHWHILE = 0.9  # of the length that is left; a further column that saves less comes after one in the longest child
# A picture whose longer side is shorter than this, in points, is shown in full anyway, and gets wider margins instead.
_PAGE, _NARROW, _PAD = 1800.0, 3.2, 0.2
_RANK_GAP, _NODE_GAP, _COLUMN_GAP = 25.0, 18.0, 44.0  # points
_FRAME_MARGIN = 16.0
_LANE = 36.0
_OUTSIDE = -1  # in place of the id of a node
_MOST_CUT = 3  # edges between two columns that are led around; further ones cross the picture

# The mean width of a character of DejaVu Sans and the height of a line, as fractions of the font size.
_REGULAR, _BOLD, _LINE = 0.6, 0.69, 1.17


@dataclass(frozen=True)
class Size:
    """A size in points, along the flow of the data and across it."""

    along: float
    across: float


@dataclass(frozen=True)
class Columns:
    """The division of a picture.

    Args:
        column: The column of each child of a call that is divided, starting at 0, by the id of the child.
        below: Pairs of the last node of a child and the first node of another that is drawn behind it, although there
            is no edge between them.
        detours: The edges from one column to the next that are led around.
        crossing: The other edges between columns.
        places: The children of a divided call that contain the two ends, by edge between columns.
        padding: The margins of the page to the left and right, and above and below, in inches.
    """

    column: Mapping[int, int] = field(default_factory=dict)
    below: Sequence[tuple[int, int]] = ()
    detours: frozenset[tuple[int, int]] = frozenset()
    crossing: frozenset[tuple[int, int]] = frozenset()
    places: Mapping[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    padding: tuple[float, float] = (_PAD, _PAD)

    def together(self, graph: Graph, one: int, other: int) -> bool:
        """Return True if two nodes are in the same column of each call."""
        ends = lifted(graph, Edge(one, other))
        return all(self.column.get(first, 0) == self.column.get(second, 0) for _, first, second in ends)

    def within(self, graph: Graph, call: Node) -> Ends | None:
        """Return the nodes at the ends of the columns of a call; ``None`` if the call is not divided."""
        column: dict[int, int] = {}
        for child in graph.children(call):
            if child.id in self.column:
                column.update((number, self.column[child.id]) for number in drawn_inside(graph, child))
        if not column:
            return None
        inner = [edge for edge in graph.edges if edge.source in column and edge.target in column]
        # An edge back to the next repetition does not place its target below its source.
        same = [edge for edge in inner if column[edge.source] == column[edge.target] and not edge.relates("next")]
        fed, used = {edge.target for edge in same}, {edge.source for edge in same}
        first = [(number, at) for number, at in column.items() if number not in fed]
        # An edge from another column of a call around this one does not place its target below its source.
        beside = self.detours | self.crossing
        other = [edge for edge in graph.edges if (edge.source, edge.target) not in beside]
        entering = [edge for edge in other if edge.target in column and edge.source not in column]
        entries: dict[tuple[int, int], int] = {}
        for number in range(1 + max(column.values())):
            into = [e for e in entering if column[e.target] == number and not e.relates("next")]
            sources = {edge.source for edge in into if (edge.target, number) in first} if not number else set()
            sources = sources or {edge.source for edge in into}
            if len(sources) == 1:
                entries |= {(edge.source, edge.target): number for edge in into if edge.source in sources}
        return Ends(
            number=1 + max(column.values()),
            first=first,
            last=[(number, at) for number, at in column.items() if number not in used],
            # Not those between the columns of a call inside this one.
            detours={
                edge.source: column[edge.source]
                for edge in inner
                if (edge.source, edge.target) in self.detours and column[edge.source] != column[edge.target]
            },
            entries=entries,
            before=list(dict.fromkeys(edge.source for edge in entering)),
            after=list(dict.fromkeys(e.target for e in other if e.source in column and e.target not in column)),
        )


@dataclass(frozen=True)
class Ends:
    """The ends of the columns of a call.

    Args:
        number: The number of columns.
        first: The nodes without a source in their column, and their columns.
        last: The nodes without a user in their column, and their columns.
        detours: The sources of the edges that are led around, and their columns.
        entries: The edges from outside that enter a column by its head, with the column. They have the same source:
            that of the first nodes of the first column if there is one, else the only one of the column.
        before: The sources outside of the call, but not those in other columns of a call around it.
        after: The users outside of the call, but not those in other columns of a call around it.
    """

    number: int
    first: Sequence[tuple[int, int]]
    last: Sequence[tuple[int, int]]
    detours: Mapping[int, int]
    entries: Mapping[tuple[int, int], int]
    before: Sequence[int]
    after: Sequence[int]


def label_size(label: str, name_pt: float, detail_pt: float, *, ellipse: bool = False) -> tuple[float, float]:
    """Return the estimated width and height of a node with a label of text or of Graphviz's HTML, in points."""
    width = height = 0.0
    for row in re.split(r"</tr>|<br\s*/?>|\\n|\n", label):
        text = html.unescape(re.sub(r"<[^>]*>", "", row)).strip("<> ")
        if text:
            size = detail_pt if "point-size" in row else name_pt
            width = max(width, len(text) * size * (_BOLD if "<b>" in row else _REGULAR))
            height += size * _LINE + 2
    stretch = math.sqrt(2) if ellipse else 1.0
    return width * stretch + 20, height * stretch + 9


def split(graph: Graph, sizes: Mapping[int, tuple[float, float]], title: tuple[float, float], *, flat: bool) -> Columns:
    """Return the division of a picture whose sides differ by more than a factor of about 3.

    A chain is divided into columns, and a row of parallel nodes into several rows, in the call that is longest.

    Args:
        graph: The view that is drawn.
        sizes: The width and height of each node that is drawn, and of the title of each frame, in points.
        title: The width and height of the title of the picture.
        flat: True if the data flows across the page.
    """
    return _Plan(graph, sizes, title, flat).columns()


class _Plan:
    """The estimated layout of a picture, and its division so far."""

    def __init__(
        self, graph: Graph, sizes: Mapping[int, tuple[float, float]], title: tuple[float, float], flat: bool
    ) -> None:
        self._graph, self._sizes, self._title, self._flat = graph, sizes, title, flat
        self._parts: dict[int, int] = {}
        """The number of columns of each divided call."""
        self._rows: dict[int, int] = {}
        """The number of rows of parallel children in a call."""
        self._inside: dict[int, list[tuple[int, int]]] = {}
        """The edges between the children of each call, between the nodes or anything inside them."""
        self._entered: set[int] = set()
        """The nodes with an edge from outside of the call around them, into them or into anything inside them."""
        self._passing: dict[int, list[tuple[int, int]]] = {}
        """The edges out of each call and into it, between a child and the outside."""
        for edge in graph.edges:
            for call, source, target in lifted(graph, edge):
                self._inside.setdefault(call, []).append((source, target))
                for node in _below(graph, edge.source, source):
                    self._passing.setdefault(node.parent or 0, []).append((node.id, _OUTSIDE))
                for node in _below(graph, edge.target, target):
                    self._passing.setdefault(node.parent or 0, []).append((_OUTSIDE, node.id))
                    self._entered.add(node.id)
        self._known: dict[int, Size] = {}

    def columns(self) -> Columns:
        root = self._graph.root
        whole = self._size(root)
        if max(whole.along, whole.across) < _PAGE:
            return Columns(padding=self._padding())
        best = self._ratio(), dict(self._parts), dict(self._rows)
        for _ in range(_ROUNDS):
            ratio = self._ratio()
            if 1 / _BROAD <= ratio <= (_BROAD if self._flat else _RATIO) or not self._divide(root, long=ratio > 1):
                break
            self._known.clear()
            if _excess(self._ratio()) < _excess(best[0]):
                best = self._ratio(), dict(self._parts), dict(self._rows)
        _, self._parts, self._rows = best
        return self._result()

    def _padding(self) -> tuple[float, float]:
        """Return the margins of the page, in inches, with which a small picture is not too narrow."""
        size = self._size(self._graph.root)
        width, height = (size.along, size.across) if self._flat else (size.across, size.along)
        width, height = max(width, self._title[0]), height + self._title[1]

        def margin(own: float, other: float) -> float:
            return max(_PAD, (other / _NARROW - own) / 144 + _PAD)

        return margin(width, height), margin(height, width)

    def _ratio(self) -> float:
        """Return the length of the picture along the flow divided by its breadth."""
        size = self._size(self._graph.root)
        width, height = self._title
        if self._flat:
            return max(size.along, width) / (size.across + height)
        return (size.along + height) / max(size.across, width)

    def _divide(self, call: Node, *, long: bool) -> bool:
        """Divide the call that contributes most to the length, or to the breadth; return False if there is none."""
        # A block that is drawn once for several is read from top to bottom.
        inner = [child for child in self._graph.children(call) if self._graph.children(child) and child.repeats == 1]
        extents = {child.id: self._extent(child, long) for child in inner}
        largest = max(inner, key=lambda child: extents[child.id], default=None)
        number = len(self._graph.children(call))
        counts = self._parts if long else self._rows
        own = counts.get(call.id, 1)
        if largest is not None and extents[largest.id] > 0.6 * self._extent(call, long) and own == 1:
            return self._divide(largest, long=long)
        before = self._extent(call, long)
        for share in (_WORTHWHILE, 1.0):
            # Three columns for four equal parts are as long as two.
            for more in range(own + 1, min(own + 2, number) + 1):
                counts[call.id] = more
                self._known.clear()
                if self._extent(call, long) < share * before:
                    return True
            counts[call.id] = own
            self._known.clear()
            if largest is not None and share < 1 and self._divide(largest, long=long):
                return True
        return False

    def _extent(self, node: Node, long: bool) -> float:
        size = self._size(node)
        return size.along if long else size.across

    def _size(self, node: Node) -> Size:
        known = self._known.get(node.id)
        if known is None:
            known = self._known[node.id] = self._measured(node)
        return known

    def _measured(self, node: Node) -> Size:
        children = self._graph.children(node)
        width, height = self._sizes.get(node.id, (0.0, 0.0))
        if not children:
            return Size(width, height) if self._flat else Size(height, width)
        parts = [self._chain(node, part)[0] for part in self._divided(node)]
        along = max(part.along for part in parts)
        across = sum(part.across for part in parts) + _COLUMN_GAP * (len(parts) - 1)
        along += 2 * _RANK_GAP if len(parts) > 1 else 0
        if node.parent is None:
            return Size(along, across)
        if self._flat:
            return Size(max(along, width) + _FRAME_MARGIN, across + height + _FRAME_MARGIN)
        return Size(along + height + _FRAME_MARGIN, max(across, width) + _FRAME_MARGIN)

    def _chain(self, call: Node, children: Sequence[Node]) -> tuple[Size, dict[int, float]]:
        """Return the size of some children of a call, and the place of each along the flow."""
        there = {child.id for child in children}
        before: dict[int, list[int]] = {}
        stacked = self._stacked(call)
        for source, target in [*self._inside.get(call.id, []), *stacked]:
            if source in there and target in there:
                before.setdefault(target, []).append(source)
        start: dict[int, float] = {}
        end: dict[int, float] = {}
        for child in children:
            known = [end[each] + _RANK_GAP for each in before.get(child.id, ()) if each in end]
            start[child.id] = max(known, default=0.0)
            end[child.id] = start[child.id] + self._size(child).along
        in_rows = {number for pair in stacked for number in pair}
        after: dict[int, list[int]] = {}
        for target, sources in before.items():
            for source in sources:
                after.setdefault(source, []).append(target)
        # Graphviz draws a node far from its sources rather than from its users, if it has no fewer of these.
        for child in reversed(children):
            users = after.get(child.id, ())
            if len(users) >= max(1, len(before.get(child.id, ()))) and child.id not in in_rows:
                along = self._size(child).along
                start[child.id] = max(start[child.id], min(start[user] for user in users) - along - _RANK_GAP)
                end[child.id] = start[child.id] + along
        for early, users in self._early(call, there).items():
            if early in in_rows:
                continue
            along = self._size(self._graph[early]).along
            start[early] = max(0.0, min(start[user] for user in users) - along - _RANK_GAP)
            end[early] = start[early] + along
        across = 0.0
        parts = [(start[child.id], end[child.id], self._size(child).across + _NODE_GAP) for child in children]
        bottom = max(end.values(), default=0.0)
        # An edge beside a child takes the room of a narrow column.
        leaves, enters = {**end, _OUTSIDE: 0.0}, {**start, _OUTSIDE: bottom}
        for source, target in [*self._inside.get(call.id, []), *self._passing.get(call.id, [])]:
            if source in leaves and target in enters:
                first, last = leaves[source], enters[target]
                if not 0 <= last - first <= 2 * _RANK_GAP:
                    parts.append((min(first, last), max(first, last), _LANE))
        # The breadth changes only where a child or an edge begins.
        changes = sorted([(first, 1, wide) for first, _, wide in parts] + [(last, 0, -wide) for _, last, wide in parts])
        now = 0.0
        for _, _, change in changes:
            now += change
            across = max(across, now)
        return Size(bottom, max(across - _NODE_GAP, 0.0)), start

    def _divided(self, call: Node) -> list[list[Node]]:
        """Return the children of a call in each of its columns."""
        children = self._graph.children(call)
        number = self._parts.get(call.id, 1)
        if number == 1:
            return [children]
        size, start = self._chain(call, children)
        cuts: list[float] = []
        for place in range(1, number):
            goal = size.along * place / number
            near = 0.35 * size.along / number
            options = {at for at in start.values() if abs(at - goal) <= near and at > (cuts[-1] if cuts else 0.0)}
            options = options or {at for at in start.values() if at > (cuts[-1] if cuts else 0.0)}
            if options:
                cuts.append(min(options, key=lambda at: self._cost(call, start, at, goal, near)))
        column = {number: sum(at >= cut for cut in cuts) for number, at in start.items()}
        for early, users in self._early(call, column).items():
            column[early] = min(column[user] for user in users)
        return [[child for child in children if column[child.id] == number] for number in range(len(cuts) + 1)]

    def _early(self, call: Node, there: Container[int]) -> dict[int, list[int]]:
        """Return the users of each child that is not computed from other children, the last child first.

        Such a child is an input, a parameter, or a function of parameters only. It is drawn beside its users.
        """
        users: dict[int, list[int]] = {}
        sources: dict[int, list[int]] = {}
        for source, target in self._inside.get(call.id, []):
            if source in there and target in there:
                users.setdefault(source, []).append(target)
                sources.setdefault(target, []).append(source)
        early: dict[int, list[int]] = {}
        for child in self._graph.children(call):
            known = all(each in early and self._graph[each].kind != "input" for each in sources.get(child.id, ()))
            if known and child.id not in self._entered:
                early[child.id] = users.get(child.id, [])
        return {child: early[child] for child in reversed(early) if early[child]}

    def _cost(self, call: Node, start: Mapping[int, float], at: float, goal: float, near: float) -> float:
        """Return the cost of a cut: the sources of the edges across it, and the distance from the goal."""
        across = {source for source, target in self._inside.get(call.id, []) if start[source] < at <= start[target]}
        return len(across) / 4 + abs(at - goal) / near

    def _stacked(self, call: Node) -> list[tuple[int, int]]:
        """Return pairs of parallel children of a call of which the second one is drawn behind the first one."""
        rows = self._rows.get(call.id, 1)
        if rows == 1:
            return []
        abreast = self._abreast(call)
        each = math.ceil(len(abreast) / rows)
        return [(first, second) for first, second in zip(abreast, abreast[each:], strict=False)]

    def _abreast(self, call: Node) -> list[int]:
        """Return the children of a call in its broadest row."""
        level: dict[int, int] = {}
        before: dict[int, list[int]] = {}
        for source, target in self._inside.get(call.id, []):
            before.setdefault(target, []).append(source)
        for child in self._graph.children(call):
            level[child.id] = max((level[each] + 1 for each in before.get(child.id, ()) if each in level), default=0)
        rows: dict[int, list[int]] = {}
        for number, at in level.items():
            rows.setdefault(at, []).append(number)
        return max(rows.values(), key=lambda row: sum(self._size(self._graph[each]).across for each in row))

    def _result(self) -> Columns:
        column: dict[int, int] = {}
        for call in self._parts:
            for number, part in enumerate(self._divided(self._graph[call])):
                column.update((child.id, number) for child in part)
        detours: dict[tuple[int, int], set[int]] = {}
        led: set[tuple[int, int]] = set()
        crossing: set[tuple[int, int]] = set()
        places: dict[tuple[int, int], tuple[int, int]] = {}
        around: dict[int, int] = {}
        for edge in self._graph.edges:
            for call, source, target in lifted(self._graph, edge):
                distance = column.get(target, 0) - column.get(source, 0)
                if not distance:
                    continue
                places[edge.source, edge.target] = source, target
                sources = detours.setdefault((call, column[source]), set())
                # The line of a node is led around the columns of one call only.
                if (
                    around.get(edge.source, call) == call
                    and distance == 1
                    and (edge.source in sources or len(sources) < _MOST_CUT)
                ):
                    sources.add(edge.source)
                    around[edge.source] = call
                    led.add((edge.source, edge.target))
                else:
                    crossing.add((edge.source, edge.target))
        below = [
            (drawn_inside(self._graph, self._graph[first])[-1], drawn_inside(self._graph, self._graph[second])[0])
            for call in self._rows
            for first, second in self._stacked(self._graph[call])
        ]
        return Columns(column, below, frozenset(led), frozenset(crossing), places)


def _excess(ratio: float) -> float:
    return max(ratio, 1 / ratio)


def lifted(graph: Graph, edge: Edge) -> Iterator[tuple[int, int, int]]:
    """Yield the innermost call around both ends of an edge, with its children that contain the two ends."""
    path = [graph[edge.source], *graph.ancestors(graph[edge.source])]
    around = {node.parent: node.id for node in path}
    for node in (graph[edge.target], *graph.ancestors(graph[edge.target])):
        if node.parent is not None and node.parent in around:
            if around[node.parent] != node.id:
                yield node.parent, around[node.parent], node.id
            return


def _below(graph: Graph, number: int, around: int) -> Iterator[Node]:
    """Yield a node and the calls around it that are inside another call."""
    return takewhile(lambda node: node.id != around, (graph[number], *graph.ancestors(graph[number])))


def drawn_inside(graph: Graph, node: Node) -> list[int]:
    """Return the nodes inside a call that are drawn as nodes, in the order of time; or the node itself."""
    inside = graph.children(node)
    return [number for child in inside for number in drawn_inside(graph, child)] if inside else [node.id]
