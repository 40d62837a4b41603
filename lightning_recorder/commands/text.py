"""Text that is safe and aligned in a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TextIO

__all__ = ["module", "number", "printable", "size", "spark", "table"]

_BARS = "▁▂▃▄▅▆▇█"
_PLAIN_BARS = "_.-=+*#@"  # where the terminal has no others
_LONGEST = 200  # characters


def printable(text: str) -> str:
    r"""The text with every character escaped that is not seen: controls, what turns the direction, half surrogates.

    So a name from a file can neither move the cursor nor look like another line. A long one is cut.

    Example:
        >>> printable("conv" + chr(27) + "[31m")
        'conv\\x1b[31m'
    """
    cut = text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}…{text[-_LONGEST // 2 :]}"
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode() for char in cut
    )


def module(name: str) -> str:
    """A module's name as it is shown."""
    return printable(name) or "(root)"


def number(value: float | None) -> str:
    """A number with four digits that count; a whole one below a million in full.

    Example:
        >>> number(0.123456), number(512.0), number(float("nan")), number(1e-9)
        ('0.1235', '512', 'nan', '1e-09')
    """
    if value is None:
        return ""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.4g}"


def size(numbytes: int) -> str:
    """Bytes, in the unit that suits them."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if numbytes >= factor:
            return f"{numbytes / factor:.1f} {unit}"
    return f"{numbytes} bytes"


def table(rows: Iterable[Sequence[str]], *, right: Iterable[int] = ()) -> list[str]:
    """Rows as lines whose columns are aligned.

    Args:
        rows: The texts, as many in each.
        right: The columns that end, instead of begin, below each other.
    """
    rows = [list(row) for row in rows]
    right = set(right)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            text.rjust(width) if place in right else text.ljust(width)
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def spark(values: Sequence[float], width: int, out: TextIO) -> str:
    """Values as bars, from the smallest to the largest that is finite; ``x`` where none is.

    Args:
        values: Over time; where there are more than ``width``, each bar is the mean of several.
        width: Of bars at most.
        out: Where it is shown, which may have no bars.
    """
    if not values:
        return ""
    width = min(width, len(values))
    bounds = [place * len(values) // width for place in range(width + 1)]
    parts = [[each for each in values[a:b] if math.isfinite(each)] for a, b in pairwise(bounds)]
    means = [math.fsum(part) / len(part) if part else math.nan for part in parts]
    finite = [each for each in means if math.isfinite(each)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    bars = _bars(out)
    span = high - low
    if not 0 < span < math.inf:
        return "".join("x" if math.isnan(each) else bars[len(bars) // 2] for each in means)
    return "".join("x" if math.isnan(each) else bars[round((each - low) / span * (len(bars) - 1))] for each in means)


def _bars(out: TextIO) -> str:
    try:
        _BARS.encode(out.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return _PLAIN_BARS
    return _BARS
