"""A script that lays out each sheet of a Graphviz document separately and moves titles of frames away from edges.

If Graphviz laid out all sheets together, it would align their nodes, and a tall node on one sheet would make a gap on
all others. Each sheet is laid out several times, with its statements in different orders. The best layout has the
fewest edge crossings. It also has the fewest pairs of modules, inputs or outputs beside each other in the wrong order,
with the later one on the left. Among equally good layouts, the narrowest one is the best.

The script runs in its own process and imports neither torch nor this package, so it starts in 0.1 s. Its arguments are
the path of ``dot`` or the folder of ``pygraphviz``, the document, and the paths of the pictures.

The title of a frame is between two empty cells, ``left`` and ``right``, whose widths determine the position of the
title. After a layout, the widths are changed so that the title is in a gap between the edges that enter the frame. A
frame without such a gap is made wider, and the sheet is laid out again.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

_PART = re.compile(
    r'subgraph "?(?P<name>cluster_\w+)"? \{|<td port="(?P<side>left|right)" width="(?P<width>\d+)"></td>'
)
_POINT = re.compile(r"(-?[\d.]+(?:e[-+]\d+)?),(-?[\d.]+(?:e[-+]\d+)?)")
ENDS = re.compile(r"(\w+) -> (\w+)")
_BOLD = "<b>"  # labels of modules, inputs and outputs have bold text, labels of functions do not
_OURS, _SHEET = "newrank=true", "cluster_sheet_"
_BETWEEN, _SKIPS = 24.0, 80.0  # points between two sheets, and between the sides of a U-Net
_BEND, _ARROW = 6.0, 6.0  # length of a bend and of an arrowhead, in points
_TITLES = 18.0, 84.0  # assumed height of the title in points: on a broad page, and on a tall page with a caption
_LONGEST = 5000.0  # a page longer than this, in points, gets no margins
_NARROW = 3.0  # the largest aspect ratio of a page with margins
_ROUNDS = 10
_MARGIN = 6.0  # points between a title and an edge, or the border of its frame
_INSIDE = 3.0  # points between a line inside a frame and the border of the frame
_LETTER = 6.0  # width of a letter of a label, in points
_WIDER = 1.05  # without the font, Graphviz underestimates the width of a text by up to 4 %
_REMEDY = "install Graphviz, on Debian and Ubuntu with apt-get install graphviz; its dot is then used"
_QUICK_S = 10.0  # no further layout is started that would probably end after this many seconds of CPU time


def worked_s() -> float:
    """Return the CPU time of this process and its finished child processes, in seconds."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def weights_at(place: float) -> tuple[float, float, float, float]:
    """Return the weights of the four control points of a cubic Bézier curve at the parameter ``place``, from 0 to 1."""
    return (1 - place) ** 3, 3 * place * (1 - place) ** 2, 3 * place**2 * (1 - place), place**3


_WEIGHTS = [weights_at(k / 24) for k in range(25)]

Interval = tuple[float, float]
Point = tuple[float, float]
Section = tuple[Point, Point]
Line = list[tuple[Point, ...]]
"""The pieces of a spline. A piece has four control points, or one point for an arrowhead."""
Widths = dict[str, dict[str, int]]


@dataclass
class Frame:
    """The position of a frame and its title in a layout, in points. The y axis points upwards."""

    left: float  # the left border
    right: float  # the right border
    middle: float  # the horizontal center of the title with its cells
    width: float  # the width of the title with its cells
    bottom: float  # the lower end of the title
    top: float  # the upper end of the title


def main(renderer: str, document: str, *pictures: str) -> None:
    """Write the pictures of a document."""
    source = Path(document).read_text(encoding="utf-8")
    start = worked_s()
    # Documents that were not made by GraphvizRenderer are drawn unchanged.
    engine = "dot"
    if _OURS in source:
        source, engine = beside_each_other(renderer, sheets_of(source), start)
    made = draw(renderer, source, [path.rpartition(".")[2] for path in pictures], engine)
    for path, picture in zip(pictures, made, strict=True):
        Path(path).write_bytes(picture)


def arranged(renderer: str, source: str, start: float) -> tuple[str, Any]:
    """Return the document with titles moved so that no edge crosses them, if possible, and its layout.

    ``start`` is the CPU time at which the first layout of the picture began.
    """
    for attempt in range(_ROUNDS):
        before = worked_s()
        layout = json.loads(draw(renderer, source, ["json0"])[0])
        widths = widths_of(source)
        lines = lines_of(layout)
        moved = {
            name: place(frame, widths[name], lines, attempt) for name, frame in frames_of(layout) if name in widths
        }
        now = worked_s()
        if moved == widths or now - start + (now - before) > _QUICK_S:
            break
        source = with_widths(source, {**widths, **moved})
    return source, layout


@dataclass
class Sheets:
    """The statements of a document, divided into sheets. A statement is one line, or several for a multi-line label."""

    settings: list[str]  # the statements with attributes of the graph, all nodes and all edges
    parts: list[list[str]]  # the statements of each sheet, without its frame; the last entry has the rest, if any
    edges: list[list[str]]  # the edges of each entry of ``parts``
    between: list[str]  # the edges from one side of a U-Net to the other


def sheets_of(source: str) -> Sheets:
    """Divide a document into its sheets, in order, and the statements outside of all sheets."""
    opening, *inner = source.rstrip().removesuffix("}").rstrip().split("\n\t")
    settings, edges = [opening], list[str]()
    rest: list[str] = []
    numbered: dict[int, list[str]] = {}
    part = rest
    for statement in inner:
        if beginning := re.match(rf"subgraph {_SHEET}(\d+) \{{", statement):
            part = numbered.setdefault(int(beginning[1]), [])
        elif statement == "}" and part is not rest:
            part = rest
        elif part is rest and re.match(r"(graph|node|edge) \[", statement):
            settings.append(statement)
        elif part is rest and ENDS.match(statement):
            edges.append(statement)
        # Leave out the attributes of the invisible frame around a sheet.
        elif part is rest or not re.match(r"\t[\w]+=", statement):
            part.append(statement)
    parts = [numbered[number] for number in sorted(numbered)] + ([rest] if rest else [])
    where = {name: at for at, each in enumerate(parts) for name in re.findall(r"(?m)^\t*(\w+) \[", "\n".join(each))}
    divided: list[list[str]] = [[] for _ in parts]
    between: list[str] = []
    for edge in edges:
        tail, head = ENDS.match(edge).groups()  # type: ignore[union-attr]  # each is an edge
        side = where.get(tail, 0)
        (divided[side] if side == where.get(head, side) else between).append(edge)
    return Sheets(settings, parts, divided, between)


def beside_each_other(renderer: str, sheets: Sheets, start: float) -> tuple[str, str]:
    """Lay out the sheets one by one. Return a document with all positions, and the engine that draws it.

    The engine is ``nop2``, which keeps the positions. It is ``dot`` if there is only one sheet with statements that
    this package did not write, such as a node that the user has added.

    The sheets are beside each other, or below each other if the data flows across the page. The second side of a U-Net
    is drawn upwards.
    """
    direction = (re.findall(r"\brankdir=(\w\w)", "\n".join(sheets.settings)) or ["TB"])[-1]
    gap = _SKIPS if sheets.between else _BETWEEN
    made: list[tuple[list[str], Any]] = []
    for part, edges in zip(sheets.parts, sheets.edges, strict=True):
        # dot ignores the attribute ``_no``. It distinguishes edges with the same ends in the layout.
        marked = [_with(edge, _no=str(number)) for number, edge in enumerate(edges)]
        upwards = ["graph [rankdir=BT]"] if sheets.between and len(made) == 1 else []
        settings = [*sheets.settings, 'graph [label=""]', *upwards]
        flat = direction in ("LR", "RL")
        orders = Orders(renderer, settings, part, marked, flat=flat, narrow=not sheets.between)
        source, layout = arranged(renderer, orders.source(orders.best(start)), start)
        source = mirror(source, layout) if orders.is_mirrored(layout) else source
        keep_inside(layout)
        leave_out_unseen(layout)
        made.append((source.rstrip().removesuffix("}").rstrip().split("\n\t")[len(settings) :], layout))
    if sheets.between:
        align(made[0][1], made[1][1], sheets.between)
    document: list[str] = []
    moves: list[Point] = []
    along = at = 0.0
    for statements, layout in made:
        left, bottom, right, top = map(float, layout["bb"].split(","))
        flat = direction in ("LR", "RL")
        along = max(along, right - left if flat else top - bottom)
        if not flat:
            moves.append((at - left, 0.0 if sheets.between else -(top if direction == "TB" else bottom)))
            at += right - left + gap
        else:
            moves.append((-(left if direction == "LR" else right), at - top))
            at -= top - bottom + gap
        document += placed(statements, layout, moves[-1])
    if sheets.between:
        ends = [[float(each[1]["bb"].split(",")[side]) for each in made] for side in (1, 3)]
        along = max(ends[1]) - min(ends[0])
        document += lines_between(made[0][1], made[1][1], moves, sheets.between)
    across = abs(at) - gap
    width, height = (along, across) if direction in ("LR", "RL") else (across, along)
    settings = [with_margins("\n\t".join(sheets.settings), width, height + _TITLES[height > width])]
    known = sum(" pos=" in each or "[pos=" in each for each in document)
    things = sum("pos" in each for _, layout in made for key in ("objects", "edges") for each in layout.get(key, ()))
    if len(made) == 1 and known != things:
        return "\n\t".join([*settings, *made[0][0]]) + "\n}\n", "dot"
    return "\n\t".join([*settings, *document]) + "\n}\n", "nop2"


class Orders:
    """Lays out a sheet with its statements in different orders, to find the best one.

    Graphviz has no attribute to place one frame to the left of another. But the order of the statements affects where
    the contents of a frame are placed. With ``narrow``, the narrowest of equally good layouts is the best one. One side
    of a U-Net is not made narrow, since its edges could then lie between the two sides.
    """

    def __init__(
        self, renderer: str, settings: list[str], part: list[str], edges: list[str], *, flat: bool, narrow: bool
    ) -> None:
        self._renderer, self._settings, self._part, self._edges = renderer, settings, part, edges
        self._flat, self._narrow = flat, narrow
        self._turn = children_of(part, only_named=True)

    def best(self, start: float) -> list[str]:
        """Return the statements in the best order. The CPU time since ``start`` limits the search."""
        best = self._part
        layout = self._layout(best)
        faults = self._faults(layout)
        for change in (self._backwards, self._put_in_turn, self._put_in_turn):
            before = worked_s()
            is_good = not faults[0] and (change != self._backwards or not self._narrow)
            if is_good or before - start > _QUICK_S / 4:
                break
            other = change(best, layout)
            changed = self._layout(other)
            if (fewer := self._faults(changed)) < faults:
                best, layout, faults = other, changed, fewer
        return best

    def source(self, part: list[str]) -> str:
        """Return the document of the sheet with its statements in the given order."""
        return "\n\t".join([*self._settings, *part, *self._edges]) + "\n}\n"

    def is_mirrored(self, layout: Any) -> bool:
        """Return True if most pairs of modules beside each other have the later module on the left."""
        return not self._flat and len(self._beside(layout)) < 2 * len(self._reversed(layout))

    def _layout(self, part: list[str]) -> Any:
        return json.loads(draw(self._renderer, self.source(part), ["json0"])[0])

    def _faults(self, layout: Any) -> tuple[int, int]:
        """Return the number of faults of a layout, and its size across the flow if a narrow layout is wanted."""
        turned = len(self._reversed(layout))
        turned = turned if self._flat else min(turned, len(self._beside(layout)) - turned)
        box = [float(each) for each in layout["bb"].split(",")][int(self._flat) :]
        return 2 * crossed(layout) + turned, round(box[2] - box[0]) if self._narrow else 0

    def _beside(self, layout: Any) -> list[tuple[str, str]]:
        """Return the pairs of named nodes and frames that are beside each other in a frame, in execution order."""
        boxes = {**boxes_of(layout), **frame_boxes_of(layout)}
        low = 0 if self._flat else 1
        found = []
        for names in self._turn.values():
            for one, other in combinations([each for each in names if each in boxes], 2):
                first, second = boxes[one], boxes[other]
                common = min(first[low + 2], second[low + 2]) - max(first[low], second[low])
                if common > min(box[low + 2] - box[low] for box in (first, second)) / 2:
                    found.append((one, other))
        return found

    def _reversed(self, layout: Any) -> list[tuple[str, str]]:
        at = self._places(layout)
        return [(one, other) for one, other in self._beside(layout) if at[other] < at[one]]

    def _places(self, layout: Any) -> dict[str, float]:
        """Return the position of each node and frame across the flow. Positions increase in reading order."""
        boxes = {**boxes_of(layout), **frame_boxes_of(layout)}
        return {name: -box[3] if self._flat else box[0] for name, box in boxes.items()}

    def _backwards(self, part: list[str], _: Any) -> list[str]:
        return reordered(part, {name: inside[::-1] for name, inside in children_of(part).items()})

    def _put_in_turn(self, part: list[str], layout: Any) -> list[str]:
        """Reorder the statements of nodes and frames that are in the wrong order.

        The new order is right if Graphviz keeps the positions in the layout and only exchanges the nodes.
        """
        at = self._places(layout)
        wrong = [each for pair in self._reversed(layout) for each in pair]
        now = children_of(part, only_named=True)
        orders = {}
        for frame, names in self._turn.items():
            row = [each for each in names if each in wrong]
            stated = [each for each in now[frame] if each in row]
            wanted = dict(zip(sorted(row, key=at.__getitem__), row, strict=True))
            orders[frame] = [wanted[each] for each in stated]
        return reordered(part, orders)


def blocks_of(statements: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the statements of each node or frame. Other statements have an empty name."""
    block: list[str] = []
    depth = 0
    for statement in statements:
        block.append(statement)
        depth += statement.lstrip().startswith("subgraph ") - (statement.strip() == "}")
        if depth == 0:
            named = re.match(r'\t*(?:subgraph "?)?(\w+)"? [\[{]', block[0])
            yield named[1] if named else "", block
            block = []


def children_of(statements: Sequence[str], frame: str = "", *, only_named: bool = False) -> dict[str, list[str]]:
    """Return the names of the nodes and frames directly inside each frame, in the order of their statements."""
    found: dict[str, list[str]] = {}
    for name, block in blocks_of(statements):
        is_named = re.fullmatch(r"cluster_[\d_]+", name) or (re.fullmatch(r"n\d+", name) and _BOLD in block[0])
        if name and (is_named or not only_named):
            found.setdefault(frame, []).append(name)
        found |= children_of(block[1:-1], name, only_named=only_named) if len(block) > 1 else {}
    return found


def reordered(statements: Sequence[str], orders: Mapping[str, Sequence[str]], frame: str = "") -> list[str]:
    """Reorder the statements of nodes and frames. ``orders`` has the new order of names for each frame."""
    blocks = dict(enumerate(blocks_of(statements)))
    inside = {
        name: block if len(block) == 1 else [block[0], *reordered(block[1:-1], orders, name), block[-1]]
        for name, block in blocks.values()
        if name
    }
    moving = iter(orders.get(frame, ()))
    moved = {*orders.get(frame, ())}
    each = (inside[next(moving) if name in moved else name] if name else block for name, block in blocks.values())
    return [statement for block in each for statement in block]


def crossed(layout: Any) -> int:
    """Return the number of pairs of edges that cross each other and have no common node."""
    sections: list[tuple[float, int, tuple[int, int], Section]] = []
    for number, edge in enumerate(layout.get("edges", ())):
        spline = "" if edge.get("style") == "invis" else edge.get("pos", "").partition(";")[0]
        pieces = [piece for piece in line_of(spline) if len(piece) > 1]
        points = [each for piece in pieces for each in (piece[0], list(points_of([piece]))[len(_WEIGHTS) // 2])]
        for one, other in pairwise([*points, *(piece[-1] for piece in pieces[-1:])]):
            sections.append((min(one[0], other[0]), number, (edge["tail"], edge["head"]), (one, other)))
    found = set()
    near: list[tuple[float, int, tuple[int, int], Section]] = []
    for section in sorted(sections):
        left, number, ends, line = section
        near = [each for each in near if max(x for x, _ in each[3]) >= left]
        for _, before, others, other_line in near:
            pair = min(before, number), max(before, number)
            if pair not in found and set(ends).isdisjoint(others) and _cross(line, other_line):
                found.add(pair)
        near.append(section)
    return len(found)


def _cross(one: Section, other: Section) -> bool:
    def side(line: Section, point: Point) -> float:
        (x, y), (to_x, to_y) = line
        return (to_x - x) * (point[1] - y) - (to_y - y) * (point[0] - x)

    return all(side(a, b[0]) * side(a, b[1]) < 0 for a, b in ((one, other), (other, one)))


def mirror(source: str, layout: Any) -> str:
    """Mirror a layout horizontally. Return the document with the titles of frames moved between the edges again."""
    ends = [float(each) for each in layout["bb"].split(",")]
    widths, frames = widths_of(source), dict(frames_of(layout))

    def reflected(point: re.Match[str]) -> str:
        return f"{ends[0] + ends[2] - float(point[1]):.2f},{point[2]}"

    for each in (*layout.get("objects", ()), *layout.get("edges", ())):
        for key in {"pos", "lp"} & each.keys():
            each[key] = _POINT.sub(reflected, each[key])
        if "bb" in each:
            left, bottom, right, top = map(float, each["bb"].split(","))
            each["bb"] = f"{ends[0] + ends[2] - right:.2f},{bottom},{ends[0] + ends[2] - left:.2f},{top}"
    lines, mirrored = lines_of(layout), dict(frames_of(layout))
    for each in layout.get("objects", ()):
        if each["name"] not in widths.keys() & frames.keys():
            continue
        old, new, cells = frames[each["name"]], mirrored[each["name"]], widths[each["name"]]
        # Start at the same distance from the left border as before, with all free space after the title.
        first = {"left": 1, "right": sum(cells.values()) - 1}
        found = place(replace(new, middle=new.left + old.middle - old.left), first, lines, 0)
        text = new.width - sum(cells.values())
        start = new.left + old.middle - old.left - old.width / 2
        width = text + sum(found.values())
        titled = replace(new, middle=start + width / 2, width=width)
        # Without a gap for the title, mirror the title, too: it was placed between the edges.
        if start + found["left"] + text < new.right and is_free(titled, found, lines):
            widths[each["name"]] = found
            each["lp"] = f"{titled.middle:.2f},{each['lp'].partition(',')[2]}"
        else:
            widths[each["name"]] = {"left": cells["right"], "right": cells["left"]}
    return with_widths(source, widths)


def frame_boxes_of(layout: Any) -> dict[str, tuple[float, ...]]:
    """Return the bounding box of each frame as left, bottom, right, top."""
    return {
        each["name"]: tuple(map(float, each["bb"].split(",")))
        for each in layout.get("objects", ())
        if "bb" in each and "pos" not in each
    }


def align(first: Any, second: Any, between: Sequence[str]) -> None:
    """Move both ends of each skip connection of a U-Net to the same height, by widening gaps below the nodes."""
    sides = {name: box for layout in (first, second) for name, box in boxes_of(layout).items()}
    low = [min(bottom for _, bottom, _, _ in boxes_of(each).values()) for each in (first, second)]
    gaps: tuple[list[tuple[float, float, float]], ...] = ([], [])
    shift = [-low[0], -low[1]]
    ends = [match.groups() for match in map(ENDS.match, between) if match]
    # The lowest edge leads from the end of the first side to the beginning of the second.
    _, *skips = sorted(ends, key=lambda pair: sum(sides[pair[0]][1::2]))
    for number, pair in enumerate(skips):
        heights = [sum(sides[name][1::2]) / 2 for name in pair]
        lower = int(heights[0] + shift[0] > heights[1] + shift[1])
        wider = abs(heights[0] + shift[0] - heights[1] - shift[1])
        boxes = boxes_of((first, second)[lower]).values()
        bottom = min(box[1] for box in boxes if abs(sum(box[1::2]) / 2 - heights[lower]) < 1)
        top = max((box[3] for box in boxes if sum(box[1::2]) / 2 < heights[lower] - 1), default=bottom - 6)
        # Widen the gap where the edges begin, since an arrowhead must not become longer.
        start = top + 1 if lower else bottom - 5
        if number:
            gaps[lower].append((start, start + 4, wider))
        else:
            low[lower] -= wider
        shift[lower] += wider
    for layout, least, wide in zip((first, second), low, gaps, strict=True):
        stretch(layout, least, wide)


def boxes_of(layout: Any) -> dict[str, tuple[float, float, float, float]]:
    """Return the bounding box of each node as left, bottom, right, top."""
    found = {}
    for each in layout.get("objects", ()):
        if "pos" in each:
            (x, y), width, height = map(float, each["pos"].split(",")), float(each["width"]), float(each["height"])
            found[each["name"]] = x - 36 * width, y - 36 * height, x + 36 * width, y + 36 * height
    return found


def stretch(layout: Any, least: float, gaps: Sequence[tuple[float, float, float]]) -> None:
    """Stretch a layout vertically at the gaps. A title keeps its distance from the border of its frame.

    The height ``least`` becomes zero. A gap is a range of heights without nodes: its lower end, its upper end, and the
    height to add.
    """

    def height(y: float) -> float:
        shares = ((min(max((y - start) / (end - start), 0.0), 1.0), size) for start, end, size in gaps)
        return y - least + sum(share * size for share, size in shares)

    def higher(point: re.Match[str]) -> str:
        return f"{point[1]},{height(float(point[2])):.2f}"

    for each in (*layout.get("objects", ()), *layout.get("edges", ()), layout):
        if "bb" in each:
            left, bottom, right, top = map(float, each["bb"].split(","))
            each["bb"] = f"{left},{height(bottom):.2f},{right},{height(top):.2f}"
            if "lp" in each:
                x, y = map(float, each["lp"].split(","))
                border = top if top - y < y - bottom else bottom
                each["lp"] = f"{x},{y + height(border) - border:.2f}"
            continue
        for key in ("pos", "lp"):
            if key in each:
                each[key] = _POINT.sub(higher, each[key])


def lines_between(first: Any, second: Any, moves: Sequence[Point], between: Sequence[str]) -> list[str]:
    """Return the edges from one side of a U-Net to the other, led below the nodes in their way."""
    sides = [
        {name: (left + x, low + y, right + x, high + y) for name, (left, low, right, high) in boxes_of(layout).items()}
        for layout, (x, y) in zip((first, second), moves, strict=False)
    ]
    boxes = [box for side in sides for box in side.values()]
    found = []
    for edge in between:
        tail, head = ENDS.match(edge).groups()  # type: ignore[union-attr]  # each is an edge
        (begin, low, left, high), (right, bottom, end, top) = sides[0][tail], sides[1][head]
        y, goal = (low + high) / 2, (bottom + top) / 2
        passed = [box[1] for box in boxes if left < box[0] and box[2] < right and box[1] - 2 < y < box[3] + 2]
        if goal < low:
            x = (begin + left) / 2
            path = [(x, low), (x, goal), (right, goal)]
        elif y < bottom:
            x = (right + end) / 2
            path = [(left, y), (x, y), (x, bottom)]
        elif passed:
            under = min([low, *passed]) - _INSIDE
            path = [(left, y), (left + _BEND, y), (left + _BEND, under), (right - 2 * _BEND, under)]
            path += [(right - 2 * _BEND, y), (right, y)]
        else:
            path = [(left, y), (right, y)]
        found.append(_with(edge, pos=straight(path)))
    return found


def straight(path: Sequence[Point]) -> str:
    """Return the spline of an arrow that follows straight lines between the points of a path."""
    (x, y), tip = path[-2:]
    long = math.hypot(tip[0] - x, tip[1] - y)
    base = tuple(to - (to - at) * _ARROW / long for at, to in zip((x, y), tip, strict=True))
    knots = [path[0]] + [each for point in (*path[1:-1], base) for each in (point, point, point)]
    knots[1] = path[0]
    return f"e,{tip[0]:.2f},{tip[1]:.2f} " + " ".join(f"{x:.2f},{y:.2f}" for x, y in knots)


def keep_inside(layout: Any) -> None:
    """Move edges between two nodes of a frame into the frame. Graphviz may draw a skip connection outside of it."""
    frames = [
        (set(each.get("nodes", ())), [float(side) for side in each["bb"].split(",")])
        for each in layout.get("objects", ())
        if each["name"].startswith("cluster") and "bb" in each
    ]
    for edge in layout.get("edges", ()):
        around = [box for nodes, box in frames if edge["tail"] in nodes and edge["head"] in nodes]
        if not around or "pos" not in edge:
            continue
        left, bottom = (max(box[side] for box in around) + _INSIDE for side in (0, 1))
        right, top = (min(box[side] for box in around) - _INSIDE for side in (2, 3))

        def inside(point: re.Match[str], x: Interval = (left, right), y: Interval = (bottom, top)) -> str:
            at = min(max(float(point[1]), x[0]), x[1]), min(max(float(point[2]), y[0]), y[1])
            return f"{at[0]:.2f},{at[1]:.2f}"

        # A curve lies inside the convex hull of its control points.
        edge["pos"] = _POINT.sub(inside, edge["pos"])
        if "lp" in edge:
            # Nothing is between an edge and its label, so the label may follow the edge up to the border.
            x, y = map(float, edge["lp"].split(","))
            half = _LETTER / 2 * len(re.sub("<[^>]*>|>", "", edge.get("label", "")))
            edge["lp"] = f"{min(max(x, left - half), right + half):.2f},{y}"


def leave_out_unseen(layout: Any) -> None:
    """Remove the invisible edges, which only order the nodes, and the space at the borders that only they need."""
    edges = layout["edges"] = [each for each in layout.get("edges", ()) if each.get("style") != "invis"]
    boxes = [*boxes_of(layout).values(), *frame_boxes_of(layout).values()]
    for edge in edges:
        # A curve lies inside the convex hull of its control points.
        boxes += [(float(x), float(y)) * 2 for x, y in _POINT.findall(edge.get("pos", ""))]
        if "lp" in edge:
            x, y = map(float, edge["lp"].split(","))
            half = _LETTER / 2 * len(re.sub("<[^>]*>|>", "", edge.get("label", "")))
            boxes.append((x - half, y - _LETTER, x + half, y + _LETTER))
    if boxes:
        left, bottom, right, top = zip(*boxes, strict=True)
        layout["bb"] = f"{min(left):.2f},{min(bottom):.2f},{max(right):.2f},{max(top):.2f}"


def with_margins(source: str, width: float, height: float) -> str:
    """Add margins so that no side of the page is longer than three times the other side.

    A very long page gets no margins, since they would make a bitmap very large. The width and the height of the
    contents are in points.
    """
    found = re.search(r'\bpad="([\d.]+),([\d.]+)"', source)
    if found is None or max(width, height) > _LONGEST:
        return source
    least = float(found[1]), float(found[2])  # inches
    sides = width / 72 + 2 * least[0], height / 72 + 2 * least[1]
    x, y = (
        pad + max(0.0, other / _NARROW - own) / 2 for pad, own, other in zip(least, sides, sides[::-1], strict=True)
    )
    return f'{source[: found.start()]}pad="{x:.2f},{y:.2f}"{source[found.end() :]}'


def placed(statements: list[str], layout: Any, move: Point) -> list[str]:
    """Add the positions of a layout to the statements, all moved by the same distance."""
    nodes = {each["name"]: each for each in layout.get("objects", ())}
    edges = {each["_no"]: each for each in layout.get("edges", ())}
    found = []
    for statement in statements:
        if frame := re.match(r"(\t*)subgraph \"?([^\"]+)\"? \{", statement):
            at = {key: moved(nodes[frame[2]][key], move) for key in ("bb", "lp") if key in nodes[frame[2]]}
            found += [statement, f"{frame[1]}\t" + " ".join(f'{key}="{value}"' for key, value in at.items())]
            continue
        number, name = re.search(r"\b_no=(\d+)\]$", statement), re.match(r"\t*(\w+) \[", statement)
        if number and number[1] not in edges:
            continue  # an invisible edge
        each = edges[number[1]] if number else nodes.get(name[1], {}) if name else {}
        found.append(_with(statement, **{key: moved(each[key], move) for key in ("pos", "lp") if key in each}))
    return found


def moved(places: str, move: Point) -> str:
    """Move points, a spline or a box in Graphviz's text form by a distance."""
    if " " not in places and places.count(",") == 3:  # a frame: left, bottom, right, top
        numbers = [float(each) + move[side % 2] for side, each in enumerate(places.split(","))]
        return ",".join(f"{each:.2f}" for each in numbers)

    def further(point: re.Match[str]) -> str:
        return f"{float(point[1]) + move[0]:.2f},{float(point[2]) + move[1]:.2f}"

    return _POINT.sub(further, places)


def _with(statement: str, **attributes: str) -> str:
    """Add attributes to the statement of a node or an edge."""
    if not attributes:
        return statement
    words = " ".join(f'{key}="{value}"' if key != "_no" else f"{key}={value}" for key, value in attributes.items())
    return f"{statement[:-1]} {words}]" if statement.endswith("]") else f"{statement} [{words}]"


def draw(renderer: str, source: str, formats: list[str], engine: str = "dot") -> list[bytes]:
    """Return a picture of the document in each format."""
    if Path(renderer).is_dir():
        sys.path.append(renderer)
        try:
            import pygraphviz
        except ImportError as error:
            sys.exit(f"pygraphviz cannot be loaded ({error}): {_REMEDY}")
        try:
            graph = pygraphviz.AGraph(string=source)
            return [graph.draw(format=each, prog=engine) for each in formats]
        except Exception as error:  # noqa: BLE001 - the other process shows any error in one line
            # The context of the error may have the reason.
            sys.exit(f"{error} {error.__context__ or ''}".strip())
    made = []
    for each in formats:
        done = subprocess.run(
            [renderer, f"-K{engine}", f"-T{each}"], input=source.encode(), stdout=subprocess.PIPE, check=False
        )
        if done.returncode:
            sys.exit(done.returncode if done.returncode > 0 else 1)
        made.append(done.stdout)
    return made


def widths_of(source: str) -> Widths:
    """Return the widths of the two cells beside the title of each frame."""
    found: Widths = {}
    name = ""
    for part in _PART.finditer(source):
        name = part["name"] or name
        if part["side"]:
            found.setdefault(name, {})[part["side"]] = int(part["width"])
    return found


def with_widths(source: str, widths: Widths) -> str:
    """Return the document with new widths of the cells."""
    name = ""

    def changed(part: re.Match[str]) -> str:
        nonlocal name
        name = part["name"] or name
        side = part["side"]
        return f'<td port="{side}" width="{widths[name][side]}"></td>' if side else part[0]

    return _PART.sub(changed, source)


def frames_of(layout: Any) -> Iterator[tuple[str, Frame]]:
    """Yield the name and position of each frame that has a title."""
    for each in layout.get("objects", ()):
        if each["name"].startswith("cluster") and "lp" in each and "bb" in each:
            left, _, right, _ = map(float, each["bb"].split(","))
            x, y = map(float, each["lp"].split(","))
            width, height = float(each["lwidth"]) * 72, float(each["lheight"]) * 72
            yield each["name"], Frame(left, right, x, width, y - height / 2, y + height / 2)


def place(frame: Frame, widths: dict[str, int], lines: Sequence[Line], attempt: int) -> dict[str, int]:
    """Return widths of the two cells that move the title to where no edge crosses it.

    If the frame has no such gap, the widths make the frame wider. They increase with each attempt, since the contents
    may move when the frame becomes wider.
    """
    if is_free(frame, widths, lines):
        return widths
    text = frame.width - widths["left"] - widths["right"]
    start = frame.middle - frame.width / 2
    crossed = [each for line in lines for each in crossings(line, frame)]
    gaps = list(gaps_between(crossed, frame.left + _MARGIN, frame.right - _MARGIN))
    free = [gap for gap in gaps if gap[1] - gap[0] >= text + 2 * _MARGIN]
    if free:
        left = round(free[0][0] + _MARGIN - start) if free[0][0] > frame.left + _MARGIN else 1
        total = widths["left"] + widths["right"]
        return {"left": max(1, left), "right": max(1, total - left)}
    widest = max((right - left for left, right in gaps), default=0.0)
    inner = frame.right - frame.left - 2 * _MARGIN
    if inner > 4 * text + 10 * _MARGIN and widest < text / 2:
        # Edges run along the title, so a wider frame would not help.
        return widths
    # Add generous space, since an edge may divide the new space.
    more = 2 * (text - widest) + 4 * _MARGIN + attempt * text / 4
    return {"left": 1, "right": round(max(inner - text, 0) + more)}


def is_free(frame: Frame, widths: dict[str, int], lines: Sequence[Line]) -> bool:
    """Return True if no edge crosses the title of a frame."""
    start = frame.middle - frame.width / 2 + widths["left"]
    end = start + _WIDER * (frame.width - widths["left"] - widths["right"]) + 1
    crossed = (each for line in lines for each in crossings(line, frame))
    return all(right <= start - 1 or left >= end for left, right in crossed)


def lines_of(layout: Any) -> list[Line]:
    """Return the lines of all visible edges. An edge may consist of several lines."""
    edges = [edge for edge in layout.get("edges", ()) if edge.get("style") != "invis"]
    return [line_of(spline) for edge in edges for spline in edge.get("pos", "").split(";")]


def line_of(spline: str) -> Line:
    """Return the pieces of a spline in Graphviz's text form. An arrowhead is a piece with a single point."""
    heads: Line = []
    knots: list[Point] = []
    for part in spline.split():
        x, y = part.lstrip("se,").split(",")[:2]
        point = float(x), float(y)
        if part[0] in "se":
            heads.append((point,))
        else:
            knots.append(point)
    return [*heads, *(tuple(knots[first : first + 4]) for first in range(0, len(knots) - 3, 3))]


def points_of(line: Line, bottom: float = -math.inf, top: float = math.inf) -> Iterator[Point]:
    """Yield points along a line. Pieces that are entirely outside of a range of heights are left out."""
    for piece in line:
        heights = [y for _, y in piece]
        # A Bézier curve lies inside the convex hull of its control points.
        if max(heights) < bottom or min(heights) > top:
            continue
        if len(piece) == 1:
            yield piece[0]
            continue
        for weights in _WEIGHTS:
            yield (
                sum(weight * x for weight, (x, _) in zip(weights, piece, strict=True)),
                sum(weight * y for weight, (_, y) in zip(weights, piece, strict=True)),
            )


def crossings(line: Line, frame: Frame) -> Iterator[Interval]:
    """Yield the horizontal intervals in which a line is at the height of a frame's title."""
    bottom, top = frame.bottom - 1, frame.top + 1
    for piece in line:
        points = list(points_of([piece], bottom, top))
        # The points of a long piece may be farther apart than the height of a title. So check the lines between them.
        for (x, y), (end_x, end_y) in pairwise(points if len(points) > 1 else points * 2):
            if max(y, end_y) < bottom or min(y, end_y) > top:
                continue
            shares = [(height - y) / (end_y - y) if end_y != y else height - bottom for height in (bottom, top)]
            xs = [x + (end_x - x) * min(max(share, 0.0), 1.0) for share in shares]
            yield min(xs) - 2, max(xs) + 2


def gaps_between(taken: list[Interval], left: float, right: float) -> Iterator[Interval]:
    """Yield the intervals between two borders that are not taken, from left to right."""
    for start, end in sorted(taken):
        if start > left:
            yield left, min(start, right)
        left = max(left, end)
    if left < right:
        yield left, right


if __name__ == "__main__":
    main(*sys.argv[1:])
