"""A script that lays out a Graphviz document and moves the titles of frames away from edges.

It runs in a process of its own and imports neither torch nor this package, so it starts in 0.1 s. Its arguments are the
path of ``dot``, or the folder of ``pygraphviz``, then the document, and then the paths of the pictures.

The title of a frame lies between two empty cells, ``left`` and ``right``, whose widths decide where it is. After a
layout the widths are changed so that the title is in a gap between the edges that enter the frame. A frame without such
a gap is made wider, which needs another layout.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

_PART = re.compile(
    r'subgraph "?(?P<name>cluster_\w+)"? \{|<td port="(?P<side>left|right)" width="(?P<width>\d+)"></td>'
)
_COLUMN = re.compile(r"subgraph cluster_column_(?P<call>\d+)_")
_DETOUR = re.compile(r"((?P<top>top_\w+) -> bottom_\w+ \[[^\]]*weight=)\d+")
_HEADS = re.compile(r"(?:top_(?P<call>\d+)_\d+|top_\d+) -> (?P<next>top_\w+) \[style=invis\]")
_ENDS = re.compile(r"^\s*(?:top_(\d+)_\d+ -> n\d+|n\d+ -> bottom_(\d+)_\d+) \[style=invis weight=\d+\]\n", re.MULTILINE)
_ANGLE = re.compile(r"^(\s*(\w+ -> \w+) \[[^\n]*labelangle=)(-?\d+)", re.MULTILINE)
# The angles, in degrees, between an edge and the labels at its ends; the earlier ones are preferred.
_ANGLES = (15, -15, 35, -35, 55, -55, 75, -75)
# The number of equal edges to the heads and ends of columns that outweigh the edges which cross the columns.
_STRONG = 20
# A picture in which only the lines between columns are in another order may be larger by this factor.
_MORE_ROOM = 1.25
_ROUNDS = 10
_MARGIN = 6.0  # points between a title and an edge, or the border of its frame
_WIDER = 1.05  # Without the font, Graphviz takes a text for up to 4 % narrower than it is.
_REMEDY = "install Graphviz, on Debian and Ubuntu with apt-get install graphviz; its dot is then used"
_QUICK_S = 10.0  # No further layout is made that would probably end after this time of the processor.


def worked_s() -> float:
    """Return the processor time of this process and of those that it ran, whatever else runs on the machine."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def weights_at(place: float) -> tuple[float, float, float, float]:
    """Return the weights of the control points of a piece of a spline, at a place from 0 to 1 along it."""
    return (1 - place) ** 3, 3 * place * (1 - place) ** 2, 3 * place**2 * (1 - place), place**3


_WEIGHTS = [weights_at(k / 24) for k in range(25)]

Interval = tuple[float, float]
Point = tuple[float, float]
Box = tuple[float, float, float, float]
"""The left, lower, right and upper border, in points."""
Line = list[tuple[Point, ...]]
"""The pieces of a spline: four control points each, or the point of an arrowhead."""
Widths = dict[str, dict[str, int]]


@dataclass
class Frame:
    """A frame in a layout, in points; y goes up.

    Args:
        left: The left border.
        right: The right border.
        middle: The horizontal center of the title with its cells.
        width: The width of the title with its cells.
        bottom: The lower end of the title.
        top: The upper end of the title.
    """

    left: float
    right: float
    middle: float
    width: float
    bottom: float
    top: float


def main(renderer: str, document: str, *pictures: str) -> None:
    """Write the pictures of a document."""
    source = Path(document).read_text(encoding="utf-8")
    start = worked_s()
    for attempt in range(_ROUNDS):
        before = worked_s()
        layout = json.loads(draw(renderer, source, ["json0"])[0])
        if not attempt:
            source, layout = with_columns_in_order(renderer, source, layout)
        widths = widths_of(source)
        lines = lines_of(layout)
        moved = {
            name: place(frame, widths[name], lines, attempt) for name, frame in frames_of(layout) if name in widths
        }
        if moved == widths:
            break
        source = with_widths(source, {**widths, **moved})
        now = worked_s()
        if now - start + (now - before) > _QUICK_S:
            break
    if _ANGLE.search(source):
        source = with_free_labels(source, json.loads(draw(renderer, source, ["json0"])[0]))
    made = draw(renderer, source, [path.rpartition(".")[2] for path in pictures])
    for path, picture in zip(pictures, made, strict=True):
        Path(path).write_bytes(picture)


def draw(renderer: str, source: str, formats: list[str]) -> list[bytes]:
    """Return the pictures of a document in each format."""
    if Path(renderer).is_dir():
        sys.path.append(renderer)
        try:
            import pygraphviz
        except ImportError as error:
            sys.exit(f"pygraphviz cannot be loaded ({error}): {_REMEDY}")
        try:
            graph = pygraphviz.AGraph(string=source)
            return [graph.draw(format=each, prog="dot") for each in formats]
        except Exception as error:  # noqa: BLE001 - the other process shows any error in one line
            # The context may have the reason.
            sys.exit(f"{error} {error.__context__ or ''}".strip())
    made = []
    for each in formats:
        done = subprocess.run([renderer, f"-T{each}"], input=source.encode(), stdout=subprocess.PIPE, check=False)
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
    """Return the document with other widths."""
    name = ""

    def changed(part: re.Match[str]) -> str:
        nonlocal name
        name = part["name"] or name
        side = part["side"]
        return f'<td port="{side}" width="{widths[name][side]}"></td>' if side else part[0]

    return _PART.sub(changed, source)


def with_columns_in_order(renderer: str, source: str, layout: Any) -> tuple[str, Any]:
    """Return a document, and its layout, in which each column is to the right of the one before, if dot succeeds.

    The lines that are led around are then between the columns. dot orders columns by the edges that cross, more than by
    the order of the nodes at their heads. It is left more choice if these lines need not be straight, and still more
    without the frames of the columns. At last, the edges between the columns and their heads outweigh those that cross,
    and further edges are added.
    """
    calls = set[str]().union(*calls_out_of_order(source, layout))
    if not calls:
        return source, layout
    bent = with_bent_detours(source, calls)
    strong, free = with_strong_ends(bent, calls), without_column_frames(bent, calls)
    fans = [with_fans(each, layout, calls, number) for each, number in ((strong, 4), (strong, 8), (free, 8))]
    best = tuple(map(len, calls_out_of_order(source, layout)))
    room = _MORE_ROOM * area_of(layout)
    start = worked_s()
    for other in (bent, free, strong, *fans):
        changed = json.loads(draw(renderer, other, ["json0"])[0])
        faults = tuple(map(len, calls_out_of_order(other, changed)))
        is_better = faults < best and (faults[0] < best[0] or area_of(changed) <= room)
        # For some graphs, dot then finds no way for an edge.
        if is_better and all("pos" in edge for edge in changed.get("edges", ())):
            best, source, layout = faults, other, changed
        if best == (0, 0) or worked_s() - start > _QUICK_S:
            break
    return source, layout


def area_of(layout: Any) -> float:
    """Return the area of a picture, in square points."""
    left, bottom, right, top = map(float, layout["bb"].split(","))
    return (right - left) * (top - bottom)


def calls_out_of_order(source: str, layout: Any) -> tuple[set[str], set[str]]:
    """Return the calls with a column that is to the left of the one before, and those with a line beside the wrong one.

    Both are empty if the data flows across the page.
    """
    if layout.get("rankdir", "TB") in ("LR", "RL"):
        return set(), set()
    objects = layout.get("objects", ())
    places = {each["name"]: float(each["pos"].split(",")[0]) for each in objects if "pos" in each}
    for each in objects:
        if (column := re.search(r"column_(\d+_\d+)$", each["name"])) and each.get("nodes"):
            inside = [places[objects[node]["name"]] for node in each["nodes"]]
            places[f"top_{column[1]}"] = sum(inside) / len(inside)
    columns, lines = set(), set()
    for call, heads in heads_of(source).items():
        at = [places[head] for head in heads]
        of_columns = [place for head, place in zip(heads, at, strict=True) if head.startswith(f"top_{call}_")]
        if of_columns != sorted(of_columns):
            columns.add(call)
        if at != sorted(at):
            lines.add(call)
    return columns, lines


def heads_of(source: str) -> dict[str, list[str]]:
    """Return the nodes at the heads of the columns of each call, and of the lines between them, from left to right."""
    found: dict[str, list[str]] = {}
    call = ""
    for heads in _HEADS.finditer(source):
        # A row of heads begins with that of the first column.
        call = heads["call"] or call
        found.setdefault(call, [f"top_{call}_0"]).append(heads["next"])
    return found


def with_bent_detours(source: str, calls: Container[str]) -> str:
    """Return the document in which the lines that are led around the columns of some calls need not be straight."""
    bent = {head for call, heads in heads_of(source).items() if call in calls for head in heads}
    return _DETOUR.sub(lambda part: f"{part[1]}1" if part["top"] in bent else part[0], source)


def with_strong_ends(source: str, calls: Container[str]) -> str:
    """Return the document in which the edges at both ends of the columns of some calls are repeated."""
    return _ENDS.sub(lambda part: part[0] * (_STRONG if (part[1] or part[2]) in calls else 1), source)


def without_column_frames(source: str, calls: Container[str]) -> str:
    """Return the document without the invisible frames of some columns, which then have the order of their nodes."""
    return _COLUMN.sub(lambda part: part[0].replace("cluster_", "") if part["call"] in calls else part[0], source)


def with_fans(source: str, layout: Any, calls: Container[str], number: int) -> str:
    """Return the document with invisible edges from the head of each column of some calls to a number of its nodes."""
    objects = layout.get("objects", ())
    edges = []
    for each in objects:
        column = re.search(r"column_(\d+)_\d+$", each["name"])
        if column and column[1] in calls:
            inside = [objects[node]["name"] for node in each.get("nodes", ())]
            step = max(1, len(inside) // number)
            head = "top" + column[0].removeprefix("column")
            edges += [f"\t{head} -> {name} [style=invis weight=0 constraint=false]\n" for name in inside[::step]]
    body, end, _ = source.rpartition("}")
    return f"{body}{''.join(edges)}{end}\n"


def with_free_labels(source: str, layout: Any) -> str:
    """Return the document with angles at which the labels at the ends of edges cover as little as possible."""
    objects = layout.get("objects", ())
    taken = [
        _box(each["pos"], 72 * float(each["width"]), 72 * float(each["height"]))
        for each in objects
        if "pos" in each and "width" in each and each.get("style") != "invis"
    ]
    titled = [each for each in (*objects, layout) if "lp" in each]
    taken += [_box(each["lp"], 72 * float(each["lwidth"]), 72 * float(each["lheight"])) for each in titled]
    edges = layout.get("edges", ())
    taken += [_box(edge["lp"], *_label_size(edge, edge.get("label", ""))) for edge in edges if "lp" in edge]
    angles: dict[str, int] = {}
    for edge in edges:
        if "labelangle" not in edge or "pos" not in edge:
            continue
        options = {angle: end_labels(edge, angle) for angle in _ANGLES}
        covered = {
            angle: sum(_common(one, other) for one in boxes for other in taken) for angle, boxes in options.items()
        }
        best = min(covered, key=lambda angle: covered[angle])
        taken += options[best]
        angles[f"{objects[edge['tail']]['name']} -> {objects[edge['head']]['name']}"] = best
    return _ANGLE.sub(lambda part: f"{part[1]}{angles.get(part[2], part[3])}", source)


def end_labels(edge: Any, angle: float) -> list[Box]:
    """Return the boxes of the labels at the tail and the head of an edge, as dot places them at an angle to it."""
    line = line_of(edge["pos"])
    tips = [piece[0] for piece in line if len(piece) == 1]
    pieces = [piece for piece in line if len(piece) == 4]
    ends = {"taillabel": (pieces[0][0], _point(pieces[0], 0.1))}
    last = pieces[-1]
    ends["headlabel"] = (tips[0], last[3]) if tips else (last[3], _point(last, 0.9))
    found = []
    for name, (end, before) in ends.items():
        turn = math.atan2(before[1] - end[1], before[0] - end[0]) + math.radians(angle)
        away = 10 * float(edge.get("labeldistance", 1))
        center = end[0] + away * math.cos(turn), end[1] + away * math.sin(turn)
        if name in edge:
            found.append(_box(center, *_label_size(edge, edge[name])))
    return found


def _point(piece: tuple[Point, ...], at: float) -> Point:
    """Return the point of a piece of a spline at a place from 0 to 1."""
    x, y = (sum(weight * point[axis] for weight, point in zip(weights_at(at), piece, strict=True)) for axis in (0, 1))
    return x, y


def _label_size(edge: Any, label: str) -> tuple[float, float]:
    """Return the estimated width and height of a label of an edge, in points."""
    size = float(edge.get("fontsize", 10))
    return 0.6 * size * len(label), 1.2 * size


def _box(center: str | Point, width: float, height: float) -> Box:
    x, y = map(float, center.split(",")[:2]) if isinstance(center, str) else center
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def _common(one: Box, other: Box) -> float:
    """Return the area that two boxes have in common."""
    across, up = (min(one[axis + 2], other[axis + 2]) - max(one[axis], other[axis]) for axis in (0, 1))
    return max(across, 0.0) * max(up, 0.0)


def frames_of(layout: Any) -> Iterator[tuple[str, Frame]]:
    """Yield the name and position of each frame that has a title."""
    for each in layout.get("objects", ()):
        if each["name"].startswith("cluster") and "lp" in each and "bb" in each:
            left, _, right, _ = map(float, each["bb"].split(","))
            x, y = map(float, each["lp"].split(","))
            width, height = float(each["lwidth"]) * 72, float(each["lheight"]) * 72
            yield each["name"], Frame(left, right, x, width, y - height / 2, y + height / 2)


def place(frame: Frame, widths: dict[str, int], lines: Sequence[Line], attempt: int) -> dict[str, int]:
    """Return the widths of the two cells for a title that no edge crosses.

    A frame gets wider with each attempt, since its contents may move with it.
    """
    text = frame.width - widths["left"] - widths["right"]
    start = frame.middle - frame.width / 2
    crossed = [each for line in lines for each in crossings(line, frame)]
    now = start + widths["left"] - 1, start + widths["left"] + _WIDER * text + 1
    if all(right <= now[0] or left >= now[1] for left, right in crossed):
        return widths
    gaps = list(gaps_between(crossed, frame.left + _MARGIN, frame.right - _MARGIN))
    free = [gap for gap in gaps if gap[1] - gap[0] >= text + 2 * _MARGIN]
    if free:
        left = round(free[0][0] + _MARGIN - start) if free[0][0] > frame.left + _MARGIN else 1
        total = widths["left"] + widths["right"]
        return {"left": max(1, left), "right": max(1, total - left)}
    widest = max((right - left for left, right in gaps), default=0.0)
    inner = frame.right - frame.left - 2 * _MARGIN
    if inner > 4 * text + 10 * _MARGIN and widest < text / 2:
        # Edges run along the title, and more room would not help.
        return widths
    # The new room may be divided by an edge, so it is generous.
    more = 2 * (text - widest) + 4 * _MARGIN + attempt * text / 4
    return {"left": 1, "right": round(max(inner - text, 0) + more)}


def lines_of(layout: Any) -> list[Line]:
    """Return the lines of all visible edges. An edge may consist of several."""
    edges = [edge for edge in layout.get("edges", ()) if edge.get("style") != "invis"]
    return [line_of(spline) for edge in edges for spline in edge.get("pos", "").split(";")]


def line_of(spline: str) -> Line:
    """Return the pieces of a spline; an arrowhead is a piece of a single point."""
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
    """Yield points along the pieces of a line that may be between two heights."""
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
    """Yield the horizontal intervals in which a line lies at the height of a title."""
    bottom, top = frame.bottom - 1, frame.top + 1
    for piece in line:
        points = list(points_of([piece], bottom, top))
        # The points of a long piece may be farther apart than a title is high, so the sections between them count.
        for (x, y), (end_x, end_y) in pairwise(points if len(points) > 1 else points * 2):
            if max(y, end_y) < bottom or min(y, end_y) > top:
                continue
            shares = [(height - y) / (end_y - y) if end_y != y else height - bottom for height in (bottom, top)]
            xs = [x + (end_x - x) * min(max(share, 0.0), 1.0) for share in shares]
            yield min(xs) - 2, max(xs) + 2


def gaps_between(taken: list[Interval], left: float, right: float) -> Iterator[Interval]:
    """Yield the free intervals between two borders, from left to right."""
    for start, end in sorted(taken):
        if start > left:
            yield left, min(start, right)
        left = max(left, end)
    if left < right:
        yield left, right


if __name__ == "__main__":
    main(*sys.argv[1:])
