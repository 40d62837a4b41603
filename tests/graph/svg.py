"""The visible contents of an SVG by Graphviz, measured with the package's own font."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree as ET

from PIL import ImageFont

from lightning_recorder import fonts

__all__ = ["Item", "Picture", "Text", "read_svg"]

_SVG = "{http://www.w3.org/2000/svg}"
_TITLE = "{http://www.w3.org/1999/xlink}title"
_NUMBER = r"-?\d+(?:\.\d+)?"
# The font is measured at this multiple of its size, since PIL rounds to whole pixels.
_ENLARGED = 32


@dataclass(frozen=True)
class Text:
    """A piece of text; positions and sizes are in units of the view box."""

    content: str
    left: float
    baseline: float
    size: float
    bold: bool

    @property
    def right(self) -> float:
        """The right end of the text in DejaVu Sans."""
        return self.left + _font(self.bold, self.size).getlength(self.content) / _ENLARGED


@dataclass(frozen=True)
class Item:
    """A node, frame or edge: its Graphviz name, its texts, and the bounding box of its outline."""

    kind: Literal["node", "cluster", "edge"]
    name: str
    tooltip: str
    texts: tuple[Text, ...]
    left: float
    top: float
    right: float
    bottom: float

    @property
    def lines(self) -> list[str]:
        """The texts in the order of the document."""
        return [text.content for text in self.texts]

    def contains(self, other: Item) -> bool:
        """Return True if the box of another item is inside this one's."""
        across = self.left <= other.left and other.right <= self.right
        return across and self.top <= other.top and other.bottom <= self.bottom


@dataclass(frozen=True)
class Picture:
    """A whole SVG."""

    items: tuple[Item, ...]
    texts: tuple[Text, ...]
    width: float
    height: float
    px_per_unit: float
    """CSS pixels per unit of the view box at the nominal size of the SVG."""

    def nodes(self) -> list[Item]:
        """The nodes only."""
        return [item for item in self.items if item.kind == "node"]

    def named(self, name: str) -> Item:
        """Return the only item with a Graphviz name."""
        (item,) = (item for item in self.items if item.name == name)
        return item


def read_svg(path: Path) -> Picture:
    """Parse a picture; raise an error if it is not well-formed XML."""
    root = ET.parse(path).getroot()
    left, top, width, height = (float(number) for number in root.attrib["viewBox"].split())
    assert (left, top) == (0.0, 0.0)
    points = re.fullmatch(rf"({_NUMBER})pt", root.attrib["width"])
    assert points is not None
    drawing = root.find(f"{_SVG}g")
    assert drawing is not None
    move = re.search(rf"scale\(1 1\) rotate\(0\) translate\(({_NUMBER}) ({_NUMBER})\)", drawing.attrib["transform"])
    assert move is not None
    moved = float(move[1]), float(move[2])
    items = tuple(
        _item(group, moved)
        for group in drawing.iter(f"{_SVG}g")
        # The invisible frames that keep the nodes of a column together have no outline.
        if group.get("class") in ("node", "cluster", "edge") and any(_outline(group))
    )
    return Picture(items, _texts(drawing, moved), width, height, float(points[1]) * 4 / 3 / width)


def _item(group: ET.Element, moved: tuple[float, float]) -> Item:
    title = group.find(f"{_SVG}title")
    link = group.find(f".//{_SVG}a")
    xs, ys = _outline(group)
    kind = group.attrib["class"]
    assert kind in ("node", "cluster", "edge")
    return Item(
        kind,  # type: ignore[arg-type]  # one of the three, as was just checked
        "" if title is None else title.text or "",
        "" if link is None else link.get(_TITLE, ""),
        _texts(group, moved),
        min(xs) + moved[0],
        min(ys) + moved[1],
        max(xs) + moved[0],
        max(ys) + moved[1],
    )


def _outline(group: ET.Element) -> tuple[list[float], list[float]]:
    xs: list[float] = []
    ys: list[float] = []
    for shape in group.iter():
        if shape.tag in (f"{_SVG}polygon", f"{_SVG}path"):
            numbers = [
                float(number)
                for number in re.findall(_NUMBER, shape.attrib["points" if "points" in shape.attrib else "d"])
            ]
            xs += numbers[::2]
            ys += numbers[1::2]
        elif shape.tag == f"{_SVG}ellipse":
            cx, cy, rx, ry = (float(shape.attrib[name]) for name in ("cx", "cy", "rx", "ry"))
            xs += [cx - rx, cx + rx]
            ys += [cy - ry, cy + ry]
    return xs, ys


def _texts(group: ET.Element, moved: tuple[float, float]) -> tuple[Text, ...]:
    return tuple(_text(each, moved) for each in group.iter(f"{_SVG}text"))


def _text(element: ET.Element, moved: tuple[float, float]) -> Text:
    content, bold = "".join(element.itertext()), element.get("font-weight") == "bold"
    across, down, size = (float(element.attrib[name]) for name in ("x", "y", "font-size"))
    anchor = element.get("text-anchor", "start")
    assert anchor in ("start", "middle")
    text = Text(content, across + moved[0], down + moved[1], size, bold)
    return replace(text, left=text.left - (text.right - text.left) / 2) if anchor == "middle" else text


@cache
def _font(bold: bool, size: float) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(fonts.BOLD if bold else fonts.REGULAR), size * _ENLARGED)
