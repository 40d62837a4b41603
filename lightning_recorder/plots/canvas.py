"""Pixel canvas for plots, with text fitted to the available space. Only this file uses the drawing library."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.fonts import BOLD, REGULAR

if TYPE_CHECKING:
    from PIL.Image import Image as Picture
    from PIL.ImageFont import FreeTypeFont

__all__ = [
    "DETAIL_PX",
    "GREY",
    "INK",
    "TEXT_PX",
    "TITLE_PX",
    "Canvas",
    "Image",
    "every_nth",
    "fitted",
    "literal",
    "shortened",
    "text_width",
    "wrapped",
]

Image = NDArray[np.uint8]
"""An RGB image, ``[height, width, 3]``."""

# Font sizes (em) in pixels. TensorBoard shows the images unscaled, because they are exactly as wide as its cards.
TITLE_PX, TEXT_PX, DETAIL_PX = 13, 12, 11

INK = "#222222"
GREY = "#8c8c8c"

# Text is drawn in six shades instead of 256. The difference is not visible, and the file of an image with many names
# has half the size.
_SHADES = np.array([round(shade / 51) * 51 for shade in range(256)], dtype=np.uint8)

# Supersampling factor for smooth curves, in each direction.
_FINE = 3
_BAND_PX = 256


class Canvas:
    """An RGB image, initially white, with coordinates in pixels from the upper left corner.

    Images are drawn in a background thread during training, so they are drawn with Pillow instead of a plotting
    library. Pillow has no state shared between threads and holds the GIL for a tenth of the time. It does not interpret
    markup, so a name such as ``$x_1$`` is drawn literally. The font ships with the package, so images are identical on
    every machine.
    """

    def __init__(self, width: int, height: int) -> None:
        from PIL import Image as Pictures
        from PIL import ImageDraw

        self.width, self.height = width, height
        self._picture = Pictures.new("RGB", (width, height), "white")
        self._draw = ImageDraw.Draw(self._picture)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        px: int = TEXT_PX,
        anchor: str = "lm",
        color: str = INK,
        bold: bool = False,
    ) -> None:
        """Draw a line of text. Characters that cannot be drawn are escaped; see :func:`literal`.

        ``anchor`` selects the point of the text that is placed at ``(x, y)``. Its first letter is ``l``, ``m`` or ``r``
        for left, middle or right. Its second letter is ``a`` for the top, ``m`` for the middle or ``s`` for the
        baseline. ``px`` is the font size (em) in pixels.
        """
        mask, left, top = _letters(text, px, bold, anchor)
        self._picture.paste(color, (round(x) + left, round(y) + top), mask)

    def upright_text(self, x: float, y: float, text: str) -> None:
        """Draw a line of text rotated by 90°, reading upwards and centered on a point."""
        from PIL import Image as Pictures

        turned = _letters(text, TEXT_PX, False, "mm")[0].transpose(Pictures.Transpose.ROTATE_90)
        self._picture.paste(INK, (round(x - turned.width / 2), round(y - turned.height / 2)), turned)

    def image(self, left: int, top: int, pixels: Image) -> None:
        """Paste pixels, ``[height, width, 3]``."""
        from PIL import Image as Pictures

        self._picture.paste(Pictures.fromarray(np.ascontiguousarray(pixels)), (left, top))

    def line(self, points: Sequence[tuple[float, float]], color: str = INK, width: int = 1) -> None:
        """Draw a polyline without antialiasing. Use :meth:`ridges` for oblique lines."""
        self._draw.line([(round(x), round(y)) for x, y in points], fill=color, width=width)

    def frame(self, left: int, top: int, width: int, height: int, color: str = GREY) -> None:
        """Draw a border of one pixel around an area."""
        self._draw.rectangle((left - 1, top - 1, left + width, top + height), outline=color)

    def ridges(
        self, left: int, top: int, width: int, height: int, curves: Iterable[tuple[NDArray[np.float64], str, str]]
    ) -> None:
        """Draw filled curves with antialiased edges. Each curve is in front of the earlier curves.

        The whole area is redrawn on a white background. A curve is a tuple of points, fill color and line color. The
        points are an array ``[k, 2]`` of ``(x, y)`` in pixels relative to the area. The first and the last point are on
        the baseline.
        """
        from PIL import Image as Pictures
        from PIL import ImageDraw

        # Round down here, since Pillow rounds towards 0, which would move negative coordinates in the other direction.
        shown = [(np.floor(points * _FINE), inside, outline) for points, inside, outline in curves]
        # Draw in bands: a supersampled picture of the whole area would take nine times as much memory as the image.
        for begin in range(0, height, _BAND_PX):
            end = min(begin + _BAND_PX, height)
            area = Pictures.new("RGB", (width * _FINE, (end - begin) * _FINE), "white")
            draw = ImageDraw.Draw(area)
            for points, inside, outline in shown:
                if points[:, 1].min() > (end + 1) * _FINE or points[:, 1].max() < (begin - 1) * _FINE:
                    continue
                corners = [(float(x), float(y)) for x, y in points - (0, begin * _FINE)]
                draw.polygon(corners, fill=inside)
                draw.line(corners, fill=outline, width=_FINE + 1)
            self._picture.paste(area.reduce(_FINE), (left, top + begin))

    def pixels(self) -> Image:
        """Return a copy of the image, ``[height, width, 3]`` uint8."""
        return np.array(self._picture, dtype=np.uint8)


@lru_cache(maxsize=512)  # the plots of a run repeat most of their names and numbers
def _letters(text: str, px: int, bold: bool, anchor: str) -> tuple[Picture, int, int]:
    """Return a line of text as a coverage mask, and the x and y offset of the mask from the anchor."""
    from PIL import Image as Pictures
    from PIL import ImageDraw

    text, font = literal(text), _font(px, bold)
    left, top, right, bottom = (round(end) for end in font.getbbox(text, anchor=anchor))
    mask = Pictures.new("L", (max(right - left, 1), max(bottom - top, 1)), 0)
    ImageDraw.Draw(mask).text((-left, -top), text, fill=255, font=font, anchor=anchor)
    return Pictures.fromarray(_SHADES[np.asarray(mask)]), left, top


@lru_cache(maxsize=4096)
def text_width(text: str, px: int = TEXT_PX, *, bold: bool = False) -> float:
    """Return the width of a line of text in pixels."""
    return float(_font(px, bold).getlength(literal(text)))


def literal(text: str) -> str:
    r"""Escape all invisible characters, and all characters missing from the font, like ``\u5c42``.

    Without the escapes, all Chinese names would be drawn as identical boxes.

    Example:
        >>> print(literal("a $x_1$ <b>"), literal("层.0"))
        a $x_1$ <b> \u5c42.0
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(char if char.isprintable() and _has_letter(char) else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    code = ord(char)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


@lru_cache(maxsize=4096)
def _has_letter(char: str) -> bool:
    # A Python attribute name may contain a lone surrogate, which cannot be encoded.
    if 0xD800 <= ord(char) < 0xE000:
        return False
    font = _font(TEXT_PX, False)
    # U+10FFFF is a noncharacter, so a font draws it with its glyph for missing characters.
    return char == " " or bytes(font.getmask(char)) != bytes(font.getmask("\U0010ffff"))


@lru_cache(maxsize=16)
def _font(px: int, bold: bool) -> FreeTypeFont:
    from PIL import ImageFont

    # Do not use Raqm layout: only some builds of Pillow have it, and images must be identical on every machine.
    path = BOLD if bold else REGULAR
    return ImageFont.truetype(str(path), px, layout_engine=ImageFont.Layout.BASIC)


# The fractions of the kept characters before the ellipsis, in the order in which they are tried.
_SPLITS = (0.3, 0.5, 0.1, 0.7, 0.9)

_NUMBERED = re.compile(r"^(?:[^.\s]+\.)+?(?=[0-9]+(?:\.|\s|$))")  # the parts of a name before the number of a block
_WITH_NUMBER = re.compile(r"^(?:[^.\s]+\.)*?[0-9]+\.")  # the parts of a name up to the number of a block
# The maximum lengths of the parts of a name before and after the last number, in the order in which they are tried.
_PART_LENGTHS = ((99, 99), (6, 99), (4, 99), (3, 99), (3, 6), (3, 4), (2, 4), (1, 4), (1, 2), (1, 1))


def shortened(name: str, room: float, *, px: int = DETAIL_PX, head: float = _SPLITS[0], ending: str = "") -> str:
    """Shorten a name to at most ``room`` pixels. An ellipsis replaces the middle, because names differ at their ends.

    ``head`` is the fraction of the kept characters before the ellipsis. ``ending`` is appended.
    """
    name = literal(name)
    if text_width(name + ending, px) <= room:
        return name + ending
    few, many = 0, len(name)
    while many - few > 1:
        kept = (few + many) // 2
        if text_width(_cut(name, kept, head) + ending, px) <= room:
            few = kept
        else:
            many = kept
    return _cut(name, few, head) + ending


def _cut(name: str, kept: int, head: float) -> str:
    first = round(kept * head)
    return f"{name[:first]}…{name[len(name) - (kept - first) :]}"


def fitted(names: Sequence[str], room: float, *, px: int = DETAIL_PX, among: Sequence[str] = ()) -> list[str]:
    """Shorten names to at most ``room`` pixels each, so that they stay distinct.

    If a name is too long, the names are shortened in this order. A block such as ``block_17`` is replaced by its
    number. Parts that all names begin with are left out. Parts before the number of a block are left out, unless they
    distinguish it from another block. Parts other than the number are shortened, equally for all tensors of a module.
    As a last resort, an ellipsis replaces some of the text after the number.

    ``among`` are the names of all layers, if only some are drawn. No two of them get the same shortened name.

    Example:
        >>> fitted(["model.layers.11.attention.qkv", "model.layers.12.mlp", "model.head"], 120)
        ['11.attention.qkv', '12.mlp', 'head']
        >>> fitted(["encoder.layers.11.attention.qkv", "decoder.layers.11.attention.qkv"], 120)
        ['enc.11.attention.qkv', 'dec.11.attention.qkv']
    """
    names = [literal(name) for name in names]
    if all(text_width(name, px) <= room for name in names):
        return names
    others = [literal(name) for name in among] or names
    numbers = _numbers(others)
    names = [_with_numbers(name, numbers) for name in names]
    prefixes = _prefixes(tuple(_with_numbers(name, numbers) for name in others))
    return _distinct(_abbreviated(_unless_equal([prefixes.shorter(name) for name in names], names), room, px), room, px)


def _numbers(names: Sequence[str]) -> dict[str, str]:
    """Return the number of each block such as ``encoder.block_17``, if its siblings differ only in this number."""
    blocks: dict[str, dict[str, set[str]]] = {}  # by enclosing module, then by pattern: the names of the blocks
    for name in names:
        parts = _module_parts(name)
        for place, part in enumerate(parts[:-1]):
            if any(char.isdigit() for char in part):
                beside = blocks.setdefault(".".join(parts[:place]), {})
                beside.setdefault(re.sub("[0-9]+", "#", part), set()).add(part)
    found: dict[str, str] = {}
    for around, beside in blocks.items():
        several, *others = beside.values()
        split = {part: re.findall("[0-9]+", part) for part in several}
        changing = [place for place, each in enumerate(zip(*split.values(), strict=True)) if len(set(each)) > 1]
        if not others and len(changing) == 1:
            start = f"{around}." if around else ""
            found |= {start + part: numbers[changing[0]] for part, numbers in split.items()}
    return found


def _with_numbers(name: str, numbers: Mapping[str, str]) -> str:
    parts = _module_parts(name)
    blocks = (numbers.get(".".join(parts[: place + 1]), part) for place, part in enumerate(parts))
    return ".".join(blocks) + name[len(".".join(parts)) :]


def _unless_equal(shorter: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the shorter names, except that equal shorter names are replaced by the whole names."""
    times = Counter(shorter)
    return [each if times[each] == 1 else name for each, name in zip(shorter, names, strict=True)]


class _Prefixes:
    """The beginnings of names that may be left out."""

    def __init__(self, names: tuple[str, ...]) -> None:
        shared = [set(parts) for parts in zip(*(_module_parts(name)[:-1] for name in names), strict=False)]
        self._shared = 0  # the number of parts that all names begin with; the last part of a name stays
        if len(names) > 1:
            self._shared = next((place for place, parts in enumerate(shared) if len(parts) > 1), len(shared))
        parts = [self._split(name) for name in dict.fromkeys(names)]
        times = Counter(rest for _, rest in parts)
        self._kept = _telling({prefix for prefix, rest in parts if prefix and times[rest] > 1})

    def _split(self, name: str) -> tuple[str, str]:
        """Return the text before the number of a block, without the shared parts, and the rest of the name."""
        name = name.split(".", self._shared)[-1] if self._shared else name
        rest = _NUMBERED.sub("", name)
        return name[: len(name) - len(rest)], rest

    def shorter(self, name: str) -> str:
        """Return a name without the parts that need not be drawn."""
        prefix, rest = self._split(name)
        last = prefix.rstrip(".").rpartition(".")[2]
        # A number alone would be unclear.
        nothing = f"{last}." if prefix and _module_parts(rest)[0] == rest.partition(" ")[0] else ""
        return (self._kept.get(prefix) or nothing) + rest


def _telling(prefixes: set[str]) -> dict[str, str]:
    """Return the parts of each prefix that differ from the other prefixes."""
    split = [prefix.rstrip(".").split(".") for prefix in sorted(prefixes)]
    if not split:
        return {}
    least = min(map(len, split)) - 1
    first = next((place for place in range(least) if len({parts[place] for parts in split}) > 1), least)
    least -= first
    last = next((place for place in range(least) if len({parts[-1 - place] for parts in split}) > 1), least)
    return {
        prefix: ".".join(parts[first : len(parts) - last]) + "."
        for prefix, parts in zip(sorted(prefixes), split, strict=True)
    }


_prefixes = lru_cache(maxsize=16)(_Prefixes)  # the pictures of a run have the same names


def _module_parts(name: str) -> list[str]:
    return name.partition(" ")[0].split(".")


def _abbreviated(names: Sequence[str], room: float, px: int) -> list[str]:
    """Shorten the parts of names, except numbers and the last part. Parts before a number are shortened more."""
    needed: dict[str, int] = {}  # by module: the index in _PART_LENGTHS
    for name in names:
        module = name.partition(" ")[0]
        fits = (level for level in range(len(_PART_LENGTHS)) if text_width(_at_level(name, level), px) <= room)
        needed[module] = max(needed.get(module, 0), next(fits, len(_PART_LENGTHS) - 1))
    return _unless_equal([_at_level(name, needed[name.partition(" ")[0]]) for name in names], names)


def _at_level(name: str, level: int) -> str:
    module, space, path = name.partition(" ")
    *parts, last = module.split(".")
    number = max((place for place, part in enumerate(parts) if part.isdigit()), default=-1)
    lengths = _PART_LENGTHS[level]
    shorter = [part if part.isdigit() else part[: lengths[place > number]] for place, part in enumerate(parts)]
    return ".".join([*shorter, last]) + space + path


def _distinct(names: list[str], room: float, px: int) -> list[str]:
    """Shorten names after the number of a block. If two become equal, move the ellipsis or append a row number."""
    shown = [_shortened_after_number(name, room, px=px) for name in names]
    for head in (*_SPLITS[1:], None):
        same = {each for each, times in Counter(shown).items() if times > 1}
        if not same:
            break
        for row, name in enumerate(names):
            if shown[row] in same and text_width(name, px) > room:
                ending = "" if head is not None else f" #{row}"
                share = _SPLITS[0] if head is None else head
                shown[row] = _shortened_after_number(name, room, px=px, head=share, ending=ending)
    return shown


def _shortened_after_number(name: str, room: float, *, px: int, head: float = _SPLITS[0], ending: str = "") -> str:
    """Shorten a name like :func:`shortened`, but keep the part up to the number of a block."""
    found = _WITH_NUMBER.match(name)
    kept = found.group() if found is not None else ""
    width = text_width(kept, px)
    if text_width(name + ending, px) <= room or not 0 < width < room / 2:
        return shortened(name, room, px=px, head=head, ending=ending)
    return kept + shortened(name[len(kept) :], room - width, px=px, head=head, ending=ending)


def wrapped(text: str, room: float) -> list[str]:
    """Break a text between words into lines that fit. Shorten a word that is too long for a line.

    Example:
        >>> wrapped("each channel has its own scale", 120)
        ['each channel has its', 'own scale']
    """
    lines: list[str] = []
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and text_width(longer, DETAIL_PX) <= room:
            lines[-1] = longer
        else:
            lines.append(shortened(word, room))
    return lines


def every_nth(count: int, distance: float, needed: float) -> range:
    """Return the rows that get a label, if rows are ``distance`` pixels apart and a label needs ``needed`` pixels."""
    return range(0, count, max(1, -int(-needed // distance)))
