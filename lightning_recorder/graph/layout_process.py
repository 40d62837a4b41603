"""A script that lays out a Graphviz document and moves the titles of frames away from edges.

It runs in a process of its own and imports neither torch nor this package, so it starts in 0.1 s. Its arguments are the
path of ``dot``, or the folder of ``pygraphviz``, then the document, and then the paths of the pictures.

The title of a frame lies between two empty cells, ``left`` and ``right``, whose widths decide where it is. After a
layout the widths are changed so that the title is in a gap between the edges that enter the frame. A frame without such
a gap is made wider, which needs another layout.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PART = re.compile(
    r'subgraph "?(?P<name>cluster_\w+)"? \{|<td port="(?P<side>left|right)" width="(?P<width>\d+)"></td>'
)
_ROUNDS = 6
_MARGIN = 6.0  # points between a title and an edge, or the border of its frame
_QUICK_S = 10.0  # No further layout is made after this time.
_SAMPLES = 24  # points for each piece of a spline

Interval = tuple[float, float]
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
    start = time.monotonic()
    for _ in range(_ROUNDS):
        layout = json.loads(draw(renderer, source, ["json0"])[0])
        widths = widths_of(source)
        moved = {name: place(frame, widths[name], layout) for name, frame in frames_of(layout) if name in widths}
        if moved == widths:
            break
        source = with_widths(source, {**widths, **moved})
        if time.monotonic() - start > _QUICK_S:
            break
    made = draw(renderer, source, [path.rpartition(".")[2] for path in pictures])
    for path, picture in zip(pictures, made, strict=True):
        Path(path).write_bytes(picture)


def draw(renderer: str, source: str, formats: list[str]) -> list[bytes]:
    """Return the pictures of a document in each format."""
    if Path(renderer).is_dir():
        sys.path.append(renderer)
        import pygraphviz

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


def frames_of(layout: Any) -> Iterator[tuple[str, Frame]]:
    """Yield the name and position of each frame that has a title."""
    for each in layout.get("objects", ()):
        if each["name"].startswith("cluster") and "lp" in each and "bb" in each:
            left, _, right, _ = map(float, each["bb"].split(","))
            x, y = map(float, each["lp"].split(","))
            width, height = float(each["lwidth"]) * 72, float(each["lheight"]) * 72
            yield each["name"], Frame(left, right, x, width, y - height / 2, y + height / 2)


def place(frame: Frame, widths: dict[str, int], layout: Any) -> dict[str, int]:
    """Return the widths of the two cells for a title that no edge crosses."""
    text = frame.width - widths["left"] - widths["right"]
    start = frame.middle - frame.width / 2
    crossed = [each for edge in layout.get("edges", ()) for each in crossings(edge, frame)]
    now = start + widths["left"] - 1, start + widths["left"] + text + 1
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
    if inner > 4 * text + 10 * _MARGIN:
        # Edges run along the title, and more room would not help.
        return widths
    # The new room may be divided by an edge, so it is generous.
    return {"left": 1, "right": round(max(inner - text, 0) + 2 * (text - widest) + 4 * _MARGIN)}


def crossings(edge: Any, frame: Frame) -> Iterator[Interval]:
    """Yield the horizontal intervals in which an edge lies at the height of a title."""
    if edge.get("style") == "invis":
        return
    for spline in edge.get("pos", "").split(";"):
        xs = [x for x, y in points_of(spline) if frame.bottom - 1 <= y <= frame.top + 1]
        if xs:
            yield min(xs) - 2, max(xs) + 2


def points_of(spline: str) -> Iterator[tuple[float, float]]:
    """Yield points along a spline, including its arrowheads."""
    knots = []
    for part in spline.split():
        point = part.lstrip("se,")
        x, y = point.split(",")[:2]
        if part[0] in "se":
            yield float(x), float(y)
            continue
        knots.append((float(x), float(y)))
    for first in range(0, len(knots) - 3, 3):
        for step in range(_SAMPLES + 1):
            at = step / _SAMPLES
            weights = ((1 - at) ** 3, 3 * at * (1 - at) ** 2, 3 * at**2 * (1 - at), at**3)
            piece = knots[first : first + 4]
            yield (
                sum(weight * knot[0] for weight, knot in zip(weights, piece, strict=True)),
                sum(weight * knot[1] for weight, knot in zip(weights, piece, strict=True)),
            )


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
