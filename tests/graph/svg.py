"""What an SVG of Graphviz shows, measured with a font of its own."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree as ET

import matplotlib as mpl
from PIL import ImageFont

__all__ = ["Item", "Picture", "Text", "read_svg"]

_SVG = "{http://www.w3.org/2000/svg}"
_TITLE = "{http://www.w3.org/1999/xlink}title"
_FONTS = Path(mpl.get_data_path(), "fonts", "ttf")
_NUMBER = r"-?\d+(?:\.\d+)?"
# The font is measured this many times as large, since PIL rounds to whole pixels.
_ENLARGED = 32


@dataclass(frozen=True)
class Text:
    """A piece of text; positions and sizes are in the units of the view box."""

    content: str
    left: float
    baseline: float
    size: float
    bold: bool

    @property
    def right(self) -> float:
        """Where it ends in DejaVu Sans."""
        return self.left + _font(self.bold, self.size).getlength(self.content) / _ENLARGED


@dataclass(frozen=True)
class Item:
    """A node, frame or edge: its Graphviz name, its texts, and the box around its outline."""

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
        """The texts, as they stand."""
        return [text.content for text in self.texts]

    def contains(self, other: Item) -> bool:
        """Whether the box of another lies inside this one's."""
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
    """CSS pixels that a unit of the view box takes at the size that the SVG asks for."""

    def nodes(self) -> list[Item]:
        """The nodes alone."""
        return [item for item in self.items if item.kind == "node"]

    def named(self, name: str) -> Item:
        """The one item of a Graphviz name."""
        (item,) = (item for item in self.items if item.name == name)
        return item


def read_svg(path: Path) -> Picture:
    """Parse a picture; whatever is not well-formed XML raises."""
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
        _item(group, moved) for group in drawing.iter(f"{_SVG}g") if group.get("class") in ("node", "cluster", "edge")
    )
    return Picture(items, _texts(drawing, moved), width, height, float(points[1]) * 4 / 3 / width)


def _item(group: ET.Element, moved: tuple[float, float]) -> Item:
    title = group.find(f"{_SVG}title")
    link = group.find(f".//{_SVG}a")
    xs, ys = _outline(group)
    kind = group.attrib["class"]
    assert kind in ("node", "cluster", "edge")
    return Item(
        kind,  # type: ignore[arg-type]  # one of the three, as was just seen
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
    return tuple(
        Text(
            "".join(each.itertext()),
            float(each.attrib["x"]) + moved[0],
            float(each.attrib["y"]) + moved[1],
            float(each.attrib["font-size"]),
            each.get("font-weight") == "bold",
        )
        for each in group.iter(f"{_SVG}text")
        if each.get("text-anchor") == "start"
    )


@cache
def _font(bold: bool, size: float) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(_FONTS / f"DejaVuSans{'-Bold' if bold else ''}.ttf"), size * _ENLARGED)
