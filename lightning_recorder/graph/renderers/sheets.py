"""The division of a long picture, or of a U-Net into its two sides, into sheets beside each other."""

from __future__ import annotations

import html
import math
import re
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from itertools import pairwise

from lightning_recorder.graph.model import Edge, Graph, Node
from lightning_recorder.graph.views.sides import sides

__all__ = ["facing", "label_size", "rows", "sheets"]

_PAGE = 1800.0  # the length of a page in points; a shorter picture is one sheet
_RATIO = 3.3  # the largest aspect ratio of a picture that is one sheet
_GOAL = 1.7  # the wanted aspect ratio of several rows
_SHEETS_GOAL = 2.5  # the preferred maximum aspect ratio of several sheets; their estimated breadth leaves out frames
_MOST = 8  # the maximum number of sheets
_LONGEST_BLOCK = 1.5 * _PAGE  # in a picture longer than this, a repeated block may be divided between sheets
_SHORTEST = 0.15  # a sheet below this fraction of the longest sheet is joined with the next one
_WORTHWHILE = 0.66  # the longest sheet may have at most this fraction of the length of the undivided picture
_RANK_GAP, _NODE_GAP, _FRAME = 25.0, 18.0, 8.0  # points between ranks, between nodes, and around a frame
_BESIDE = 100.0  # points between the sides of a U-Net
_LANE = 14.0  # points that an edge needs beside a node
# The mean width of a character of DejaVu Sans and the height of a line, as fractions of the font size.
_REGULAR, _BOLD, _LINE = 0.6, 0.69, 1.17


def label_size(label: str, name_pt: float, detail_pt: float, *, ellipse: bool = False) -> tuple[float, float]:
    """Return the estimated width and height in points of a node with a label, which is text or Graphviz's HTML."""
    width = height = 0.0
    for row in re.split(r"</tr>|<br\s*/?>|\\n|\n", label):
        text = html.unescape(re.sub(r"<[^>]*>", "", row)).strip("<> ")
        if text:
            size = detail_pt if "point-size" in row else name_pt
            width = max(width, len(text) * size * (_BOLD if "<b>" in row else _REGULAR))
            height += size * _LINE + 2
    stretch = math.sqrt(2) if ellipse else 1.0
    return width * stretch + 20, height * stretch + 9


def sheets(graph: Graph, sizes: Mapping[int, tuple[float, float]], *, flat: bool) -> dict[int, int]:
    """Return the sheet number of each drawn node, starting at 0. A picture up to the length of a page is one sheet.

    No sheet uses a tensor of a later sheet, except tensors from the previous repetition. A frame of repeated blocks is
    on one sheet, unless it is nearly as long as a picture of several pages. A constant is on the sheet of the first
    node that uses it.

    ``sizes`` has the width and height of each drawn node and of the title of each frame, in points. ``flat`` is True if
    the data flows across the page.
    """
    return _Plan(graph, sizes, flat).sheets()


def facing(graph: Graph, sizes: Mapping[int, tuple[float, float]]) -> tuple[dict[int, int], list[Edge]] | None:
    """Return the result of :func:`~lightning_recorder.graph.views.sides.sides` if both sides fit on a page."""
    found, plan = sides(graph), _Plan(graph, sizes, flat=False)
    return found if found and plan.longest(found[0]) <= _RATIO * (plan.breadth(found[0]) + _BESIDE) else None


class _Plan:
    def __init__(self, graph: Graph, sizes: Mapping[int, tuple[float, float]], flat: bool) -> None:
        self._graph, self._sizes, self._flat = graph, sizes, flat
        self._nodes = [node for node in graph.nodes[1:] if not graph.children(node)]
        place = {node.id: number for number, node in enumerate(graph.nodes)}
        # In a view of merged calls, an edge may lead backwards.
        self._onward = [
            edge for edge in graph.edges if not edge.relates("next") and place[edge.source] < place[edge.target]
        ]
        self._atom = {node.id: self._block(node) for node in self._nodes}
        self._constants: set[int] = set()
        """The nodes that depend on no input and no module."""
        self._loose: set[int] = set()
        """The constants, and the inputs and functions that depend on no module, such as a shift of the labels."""
        into: dict[int, set[int]] = {}
        for edge in self._onward:
            into.setdefault(edge.target, set()).add(edge.source)
        for node in self._nodes:
            if node.kind not in ("input", "module") and into.get(node.id, set()) <= self._constants:
                self._constants.add(node.id)
            if node.kind != "module" and into.get(node.id, set()) <= self._loose:
                self._loose.add(node.id)
        if not any(node.kind == "module" for node in self._nodes):
            self._loose = self._constants
        self._start, self._end = self._places(in_turn=False)

    def _block(self, node: Node) -> int:
        """Return the outermost repeated call around a node, or the node itself."""
        around = [each.id for each in self._graph.ancestors(node) if each.repeats > 1]
        return around[-1] if around else node.id

    def _along(self, number: int) -> float:
        width, height = self._sizes.get(number, (0.0, 0.0))
        return width if self._flat else height

    def _places(self, *, in_turn: bool) -> tuple[dict[int, float], dict[int, float]]:
        """Return the beginning and the end of each node along the flow, in points.

        With ``in_turn``, each frame begins behind the frames that ran before it, even if it uses none of their tensors.
        An input is then near its users.
        """
        into: dict[int, list[int]] = {}
        users: dict[int, list[int]] = {}
        for edge in self._onward:
            into.setdefault(edge.target, []).append(edge.source)
            users.setdefault(edge.source, []).append(edge.target)
        start: dict[int, float] = {}
        end: dict[int, float] = {}
        last: dict[int, tuple[int, float, float]] = {}
        """For each call: its current frame, the end of the frames before this frame, and the end of this frame."""
        for node in self._nodes:
            before = [end[each] + _RANK_GAP + self._borders(each, node) for each in into.get(node.id, ())]
            frames = [*self._graph.ancestors(node)] if in_turn else []
            for frame, around in pairwise(frames):
                number, floor, bottom = last.get(around.id, (frame.id, 0.0, 0.0))
                last[around.id] = (frame.id, bottom if number != frame.id else floor, bottom)
                before.append(last[around.id][1])
            start[node.id] = max(before, default=0.0)
            end[node.id] = start[node.id] + self._along(node.id)
            for around in frames[1:]:
                number, floor, bottom = last[around.id]
                last[around.id] = number, floor, max(bottom, end[node.id])
        # Graphviz draws a node near its users if it has at least as many users as sources.
        for node in reversed(self._nodes):
            is_late = in_turn and node.id in users and node.id in self._loose
            if is_late or len(users.get(node.id, ())) >= max(1, len(into.get(node.id, ()))):
                after = min(start[each] - self._borders(node.id, self._graph[each]) for each in users[node.id])
                start[node.id] = max(start[node.id], after - self._along(node.id) - _RANK_GAP)
                end[node.id] = start[node.id] + self._along(node.id)
        return start, end

    def _borders(self, source: int, target: Node) -> float:
        """Return the space in points that borders and titles of frames need between two nodes."""
        around = {each.id for each in self._graph.ancestors(self._graph[source])}
        inside = [each.id for each in self._graph.ancestors(target)]
        entered = [each for each in inside if each not in around]
        left = len(around) - (len(inside) - len(entered))
        return sum(_FRAME + (0 if self._flat else self._along(each)) for each in entered) + _FRAME * left

    def extent(self) -> tuple[float, float]:
        """Return the length of the picture along the flow, and its breadth, in points."""
        return max(self._end.values(), default=0.0), self._across()

    def _across(self, inside: Container[int] | None = None) -> float:
        """Return the estimated breadth in points of the nodes ``inside``, or of all nodes."""
        inside = self._start if inside is None else inside
        changes: list[tuple[float, float]] = []
        for node in (each for each in self._nodes if each.id in inside):
            width, height = self._sizes.get(node.id, (0.0, 0.0))
            wide = (height if self._flat else width) + _NODE_GAP
            changes += [(self._start[node.id], wide), (self._end[node.id], -wide)]
        lanes: dict[int, float] = {}
        for edge in (each for each in self._onward if each.source in inside and each.target in inside):
            lanes[edge.source] = max(lanes.get(edge.source, 0.0), self._start[edge.target])
        for source, last in lanes.items():
            if last - self._end[source] > 3 * _RANK_GAP:
                changes += [(self._end[source], _LANE), (last, -_LANE)]
        now = most = 0.0
        for _, change in sorted(changes):
            now += change
            most = max(most, now)
        return most + 2 * _FRAME

    def sheets(self) -> dict[int, int]:
        long, broad = self.extent()
        if long <= _PAGE or long <= min(_RATIO * broad, 2 * _PAGE):
            return dict.fromkeys((node.id for node in self._nodes), 0)
        most = min(_MOST, math.ceil(2 * long / _PAGE))
        self._start, self._end = self._places(in_turn=True)
        long = max(self._end.values())
        one = dict.fromkeys((node.id for node in self._nodes), 0)
        nodes = {node: node for node in one}
        ways = [(self._atom, most)]
        if long > _LONGEST_BLOCK:
            # Before dividing blocks, try more sheets, so that a block that fits on a sheet stays whole.
            ways += [(self._atom, _MOST), (nodes, most)]
        for self._atom, parts in ways:
            options = [self._divided(long, number) for number in range(2, parts + 1)]
            # A block that is kept whole may be nearly as long as the picture. Then a division is not worthwhile.
            found = [each for each in options if self.longest(each) <= _WORTHWHILE * long]
            if found:
                fitting = [each for each in found if self.longest(each) <= _SHEETS_GOAL * self.breadth(each)]
                short = (each for each in fitting if self.longest(each) <= 2 * _PAGE)
                return next(short, next(iter(fitting), min(found, key=self.longest)))
        return one

    def breadth(self, sheet: Mapping[int, int]) -> float:
        """Return the estimated breadth of all sheets beside each other, in points. ``sheet`` maps nodes to sheets."""
        on: dict[int, set[int]] = {}
        for node, number in sheet.items():
            on.setdefault(number, set()).add(node)
        return sum(map(self._across, on.values()))

    def longest(self, sheet: Mapping[int, int]) -> float:
        """Return the length of the longest sheet, in points."""
        # Ignore constants, and nodes without an edge to another node of their sheet: they can be drawn anywhere.
        free = set(sheet)
        for edge in self._onward:
            if edge.source in sheet and sheet[edge.source] == sheet.get(edge.target):
                free -= {edge.source, edge.target} - self._constants
        ends: dict[int, list[float]] = {}
        for node in sheet.keys() - free:
            ends.setdefault(sheet[node], []).extend((self._start[node], self._end[node]))
        return max((max(each) - min(each) for each in ends.values()), default=0.0)

    def _divided(self, long: float, number: int) -> dict[int, int]:
        """Return the sheet of each node for a division into at most ``number`` sheets."""
        cuts = self._cuts(long, number)
        sheet = {node: sum(at >= cut for cut in cuts) for node, at in self._start.items()}
        first: dict[int, int] = {}
        for node, atom in self._atom.items():
            first[atom] = min(first.get(atom, sheet[node]), sheet[node])
        self._put_in_order(first)
        self._mend(first)
        self._put_near_users(first)
        return self._without_short({node: first[atom] for node, atom in self._atom.items()})

    def _without_short(self, sheet: dict[int, int]) -> dict[int, int]:
        """Join short sheets, such as a single input, with the next sheet. Number the sheets from 0."""
        parts = [{node for node, at in sheet.items() if at == number} for number in sorted(set(sheet.values()))]
        lengths = [self.longest(dict.fromkeys(part, 0)) for part in parts]
        whole = [length >= _SHORTEST * max(lengths) for length in lengths]
        # Short sheets at the end join the last sheet.
        before = [min(sum(whole[:place]), sum(whole) - 1) for place in range(len(parts))]
        return {node: number for part, number in zip(parts, before, strict=True) for node in part}

    def _put_in_order(self, sheet: dict[int, int]) -> None:
        """Move blocks and nodes to later sheets until no source is on a later sheet than its user."""
        changed = True
        while changed:
            changed = False
            for edge in self._onward:
                source, target = self._atom[edge.source], self._atom[edge.target]
                if sheet[target] < sheet[source]:
                    sheet[target], changed = sheet[source], True

    def _put_near_users(self, sheet: dict[int, int]) -> None:
        """Move constants, such as the queries of a DETR, and inputs to the sheet of their first user.

        A constant is not moved if the sheet of its first user has no other node of a frame around the constant. A
        constant moves back if several of its sources stay on earlier sheets.
        """
        users: dict[int, set[int]] = {}
        into: dict[int, set[int]] = {}
        for edge in self._onward:
            users.setdefault(edge.source, set()).add(self._atom[edge.target])
            into.setdefault(edge.target, set()).add(self._atom[edge.source])
        inside: dict[int, set[int]] = {}
        for node in self._nodes:
            for call in self._graph.ancestors(node):
                inside.setdefault(call.id, set()).add(self._atom[node.id])
        free = [each for each in self._nodes if each.id in self._loose and self._atom[each.id] == each.id]
        for node in reversed(free):
            first = min((sheet[each] for each in users.get(node.id, ())), default=sheet[node.id])
            around = (inside[call.id] - {node.id} for call in self._graph.ancestors(node))
            if all(any(sheet[each] == first for each in atoms) for atoms in around):
                sheet[node.id] = first
        for node in free:
            before = [sheet[each] for each in into.get(node.id, ()) if sheet[each] < sheet[node.id]]
            sheet[node.id] = max(before) if len(before) > 1 else sheet[node.id]

    def _mend(self, sheet: dict[int, int]) -> None:
        """If a frame was cut, move a small piece of it to the sheet with the rest, if the edges allow that."""
        into: dict[int, set[int]] = {}
        users: dict[int, set[int]] = {}
        for edge in self._onward:
            source, target = self._atom[edge.source], self._atom[edge.target]
            into.setdefault(target, set()).add(source)
            users.setdefault(source, set()).add(target)
        size = Counter(self._atom.values())
        inside: dict[int, set[int]] = {}
        for node in self._nodes:
            for call in self._graph.ancestors(node):
                inside.setdefault(call.id, set()).add(self._atom[node.id])
        for call in self._graph.module_calls():
            atoms = inside.get(call.id, set())
            on = sorted({sheet[each] for each in atoms})
            whole = sum(size[each] for each in atoms)
            for one, other in ((on[-1], on[-2]), (on[0], on[1])) if len(on) > 1 else ():
                part = {each for each in atoms if sheet[each] == one}
                beside = {each for at in part for each in (into if one > other else users).get(at, ())} - part
                within = all(sheet[each] <= other if one > other else sheet[each] >= other for each in beside)
                if within and sum(size[each] for each in part) <= max(2, whole // 6) < whole / 2:
                    sheet |= dict.fromkeys(part, other)

    def _cuts(self, long: float, number: int) -> list[float]:
        """Return the positions at which sheets begin, in points.

        The sheets are of similar length, and the cuts go through few tensors and frames.
        """
        starts = self._block_starts()
        cuts: list[float] = []
        for part in range(1, number):
            goal, near = long * part / number, 0.45 * long / number
            options = [at for at in starts if abs(at - goal) <= near and at > (cuts[-1] if cuts else 0.0)]
            if options:
                cuts.append(min(options, key=lambda at: self._cost(at) + 3 * ((at - goal) / near) ** 2))
        return cuts

    def _block_starts(self) -> list[float]:
        first: dict[int, float] = {}
        for node, atom in self._atom.items():
            first[atom] = min(first.get(atom, math.inf), self._start[node])
        return sorted(set(first.values()))

    def _cost(self, at: float) -> float:
        """Return the cost of a cut: half the number of tensors and frames that it goes through."""
        tensors = {e.source for e in self._onward if self._start[e.source] < at <= self._start[e.target]}
        before, after = set[int](), set[int]()
        for node in self._nodes:
            around = {each.id for each in self._graph.ancestors(node)}
            (before if self._start[node.id] < at else after).update(around)
        return len(tensors) / 2 + len(before & after) / 2


def rows(graph: Graph, sizes: Mapping[int, tuple[float, float]], *, flat: bool) -> list[tuple[int, int]]:
    """Arrange many parallel nodes in rows. Return pairs of nodes; the second is drawn in the row after the first.

    If the picture is not too broad, no pairs are returned.

    Args:
        graph: The graph that is drawn, with its ports.
        sizes: The width and height of each drawn node, in points.
        flat: True if the data flows across the page.
    """
    level: dict[int, int] = {}
    for edge in graph.edges:
        if not edge.relates("next"):
            level[edge.target] = max(level.get(edge.target, 0), level.get(edge.source, 0) + 1)
    found: dict[tuple[int | None, int], list[int]] = {}
    for node in graph.nodes[1:]:
        if not graph.children(node):
            found.setdefault((node.parent, level.get(node.id, 0)), []).append(node.id)
    abreast = max(found.values(), key=len, default=[])
    widths, heights = ([sizes.get(each, (0.0, 0.0))[side] for each in abreast] for side in (0, 1))
    broad, deep = (heights, widths) if flat else (widths, heights)
    across, along = sum(broad) + _NODE_GAP * len(abreast), max(deep, default=0.0) + _RANK_GAP
    whole = along * (1 + max(level.values(), default=0))
    if across <= max(_PAGE, _RATIO * whole):
        return []
    each = math.ceil(len(abreast) / max(2, round(math.sqrt(across / (_GOAL * along)))))
    return _pairs(abreast, each)


def _pairs(abreast: Sequence[int], each: int) -> list[tuple[int, int]]:
    return list(zip(abreast, abreast[each:], strict=False))
