"""Text fitted to the available space in an image: shortened names and wrapped lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lightning_recorder.plots.canvas import DETAIL_PX, literal, text_width

__all__ = ["every_nth", "fitted", "shortened", "wrapped"]

# The fractions of the kept characters that precede the ellipsis, in the order in which they are tried.
_SPLITS = (0.3, 0.5, 0.1, 0.7, 0.9)


def shortened(name: str, room: float, *, px: int = DETAIL_PX, head: float = _SPLITS[0], ending: str = "") -> str:
    """Return a name that fits, shortened in the middle if it is too long, because names differ at their ends.

    Args:
        name: The name.
        room: The available width in pixels.
        px: The font size in pixels.
        head: The fraction of the kept characters that precede the ellipsis.
        ending: A suffix to append.
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


def fitted(names: Sequence[str], room: float, *, px: int = DETAIL_PX) -> list[str]:
    """Return names that fit and stay distinct: if shortening makes two equal, move the ellipsis or append a number.

    Example:
        >>> fitted(["encoder.layers.11.attention", "head"], 120)
        ['encod….11.attention', 'head']
    """
    shown = [shortened(name, room, px=px) for name in names]
    for head in (*_SPLITS[1:], None):
        same = {each for each, times in Counter(shown).items() if times > 1}
        if not same:
            break
        for row, name in enumerate(names):
            if shown[row] in same and text_width(name, px) > room:
                ending = "" if head is not None else f" #{row}"
                shown[row] = shortened(name, room, px=px, head=_SPLITS[0] if head is None else head, ending=ending)
    return shown


def wrapped(text: str, room: float, *, px: int = DETAIL_PX) -> list[str]:
    """Break a text between words into lines that fit; shorten a word that is too long for a line.

    Example:
        >>> wrapped("each channel has its own scale", 120)
        ['each channel has its', 'own scale']
    """
    lines: list[str] = []
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and text_width(longer, px) <= room:
            lines[-1] = longer
        else:
            lines.append(shortened(word, room, px=px))
    return lines


def every_nth(count: int, distance: float, needed: float) -> range:
    """Return the rows that get a label, if each row takes ``distance`` pixels and a label needs ``needed``."""
    return range(0, count, max(1, -int(-needed // distance)))
