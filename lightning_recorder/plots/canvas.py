"""A picture that is drawn on in pixels, the only file of the plots that knows the library which draws."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.Image import Image as Picture
    from PIL.ImageFont import FreeTypeFont

__all__ = ["DETAIL_PX", "GREY", "INK", "TEXT_PX", "TITLE_PX", "Canvas", "Image", "literal", "text_width"]

Image = NDArray[np.uint8]
"""A picture, ``[height, width, 3]``, RGB."""

# Heights of the letters' em, in pixels, as TensorBoard shows them: its pictures have the width of a card.
TITLE_PX, TEXT_PX, DETAIL_PX = 13, 12, 11

INK = "#222222"
GREY = "#8c8c8c"

# Letters have six shades and not 256: nobody sees it, and the file of a picture with many names has half the size.
_SHADES = [round(shade / 51) * 51 for shade in range(256)]

# How many dots of each direction a pixel of a curve is made of.
_FINE = 3


class Canvas:
    """An RGB picture, white at first, on which everything is placed in pixels from the upper left corner.

    Pillow draws, and not matplotlib: the plots are made in a background thread while a training runs, and Pillow has
    no state that two threads share, needs a tenth of the time in which the interpreter is held, and reads no markup
    in a text, so that a name such as ``$x_1$`` is drawn as it is. The letters are those of DejaVu, which matplotlib
    carries.

    Args:
        width: In pixels.
        height: In pixels.
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
        colour: str = INK,
        bold: bool = False,
    ) -> None:
        """Write a line.

        Args:
            x: Of the anchor.
            y: Of the anchor.
            text: Characters that cannot be drawn are written as :func:`literal` has them.
            px: Height of the letters' em.
            anchor: Which point of the text lies at ``(x, y)``: ``l``, ``m`` or ``r``, then ``a`` for the top, ``m`` for
                the middle, ``s`` for the base line.
            colour: As ``#222222``.
            bold: Whether in bold letters.
        """
        mask, left, top = _letters(text, px, bold, anchor)
        self._picture.paste(colour, (round(x) + left, round(y) + top), mask)

    def upright_text(self, x: float, y: float, text: str, *, px: int = TEXT_PX, colour: str = INK) -> None:
        """Write a line that runs upwards, around a point."""
        from PIL import Image as Pictures

        turned = _letters(text, px, False, "mm")[0].transpose(Pictures.Transpose.ROTATE_90)
        self._picture.paste(colour, (round(x - turned.width / 2), round(y - turned.height / 2)), turned)

    def image(self, left: int, top: int, pixels: Image) -> None:
        """Lay pixels down, ``[height, width, 3]``."""
        from PIL import Image as Pictures

        self._picture.paste(Pictures.fromarray(np.ascontiguousarray(pixels)), (left, top))

    def line(self, points: Sequence[tuple[float, float]], colour: str = INK, width: int = 1) -> None:
        """Draw a line from point to point, sharp; what is oblique belongs to :meth:`ridges`."""
        self._draw.line([(round(x), round(y)) for x, y in points], fill=colour, width=width)

    def frame(self, left: int, top: int, width: int, height: int, colour: str = GREY) -> None:
        """Draw a line of one pixel around an area."""
        self._draw.rectangle((left - 1, top - 1, left + width, top + height), outline=colour)

    def ridges(
        self, left: int, top: int, width: int, height: int, curves: Iterable[tuple[NDArray[np.float64], str, str]]
    ) -> None:
        """Fill the areas under curves, each before those that come earlier, with smooth edges.

        Args:
            left: Of the area that is drawn anew, white where no curve is.
            top: Of the area.
            width: Of the area.
            height: Of the area.
            curves: For each ``[k, 2]`` points ``(x, y)`` in pixels of the area, the first and the last on its ground
                line, with the colours of the inside and of the line.
        """
        from PIL import Image as Pictures
        from PIL import ImageDraw

        area = Pictures.new("RGB", (width * _FINE, height * _FINE), "white")
        draw = ImageDraw.Draw(area)
        for points, inside, outline in curves:
            corners = [(float(x), float(y)) for x, y in points * _FINE]
            draw.polygon(corners, fill=inside)
            draw.line(corners, fill=outline, width=_FINE + 1)
        self._picture.paste(area.reduce(_FINE), (left, top))

    def pixels(self) -> Image:
        """The picture, ``[height, width, 3]`` uint8, as a copy."""
        return np.array(self._picture, dtype=np.uint8)


def _letters(text: str, px: int, bold: bool, anchor: str) -> tuple[Picture, int, int]:
    """A line as what covers the ground, and how far right of and below its anchor that begins."""
    from PIL import Image as Pictures
    from PIL import ImageDraw

    text, font = literal(text), _font(px, bold)
    left, top, right, bottom = (round(end) for end in font.getbbox(text, anchor=anchor))
    mask = Pictures.new("L", (max(right - left, 1), max(bottom - top, 1)), 0)
    ImageDraw.Draw(mask).text((-left, -top), text, fill=255, font=font, anchor=anchor)
    return mask.point(_SHADES), left, top


def text_width(text: str, px: int = TEXT_PX, *, bold: bool = False) -> float:
    """How wide a line is, in pixels."""
    return float(_font(px, bold).getlength(literal(text)))


def literal(text: str) -> str:
    r"""A text as it can be drawn: what is no visible character, or has no letter in the font, as ``\u5c42``.

    Boxes in their place would make one of all names in Chinese.

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
    # Half of a surrogate pair is a valid attribute name in Python and no text.
    if 0xD800 <= ord(char) < 0xE000:
        return False
    font = _font(TEXT_PX, False)
    # No font has a letter for a character that Unicode promises never to give a meaning.
    return char == " " or bytes(font.getmask(char)) != bytes(font.getmask("\U0010ffff"))


@lru_cache(maxsize=16)
def _font(px: int, bold: bool) -> FreeTypeFont:
    from PIL import ImageFont

    # Not the layout of Raqm, which some builds of Pillow have and others lack: the pictures are to be the same.
    return ImageFont.truetype(str(_font_file(bold)), px, layout_engine=ImageFont.Layout.BASIC)


def _font_file(bold: bool) -> Path:
    # Found and not imported: that would take longer than all the pictures of a record.
    spec = importlib.util.find_spec("matplotlib")
    folder = Path(spec.origin).parent if spec is not None and spec.origin is not None else Path()
    return folder / "mpl-data" / "fonts" / "ttf" / f"DejaVuSans{'-Bold' if bold else ''}.ttf"
