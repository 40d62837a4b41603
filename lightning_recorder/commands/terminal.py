"""Terminal output: text without control characters, width and colors, aligned tables, bar charts."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TextIO

__all__ = ["counted", "module", "number", "painted", "printable", "spark", "table", "width_of"]

_BARS = "▁▂▃▄▅▆▇█"
_PLAIN_BARS = "_.-=+*#@"  # fallback for a terminal that cannot encode block characters
_LONGEST = 200  # the most characters of a shown text
_COLORS = {"critical": "1;31", "warning": "1;33", "note": "36", "healthy": "1;32", "title": "1", "quiet": "2"}
_LEAST_WIDTH = 40


def printable(text: str, longest: int | None = _LONGEST) -> str:
    r"""Escape every invisible character in a text: control characters, direction overrides, lone surrogates.

    A name read from a file can therefore neither move the cursor nor imitate another line. A long text is shortened in
    the middle. With ``longest=None``, it is never shortened, as commands and paths require.

    Example:
        >>> printable("conv" + chr(27) + "[31m")
        'conv\\x1b[31m'
    """
    cut = text if longest is None or len(text) <= longest else f"{text[: longest // 2]}…{text[-longest // 2 :]}"
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode() for char in cut
    )


def module(name: str) -> str:
    """Return the display name of a module."""
    return printable(name) or "(root)"


def width_of(out: TextIO) -> int | None:
    """Return the number of columns of a terminal, at least 40; None for a file or a pipe, which gets whole lines."""
    return max(_LEAST_WIDTH, shutil.get_terminal_size().columns) if out.isatty() else None


def painted(text: str, kind: str, out: TextIO) -> str:
    """Return a text in the color of a kind, such as ``"warning"``, if the output is a terminal with colors.

    The variable ``NO_COLOR`` switches colors off (https://no-color.org).
    """
    is_old = os.environ.get("TERM") == "dumb" or (os.name == "nt" and "WT_SESSION" not in os.environ)
    if not text or not out.isatty() or is_old or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{_COLORS[kind]}m{text}\x1b[0m"


def counted(count: int, noun: str) -> str:
    """Format a number of things.

    Example:
        >>> counted(1, "record"), counted(12, "more site")
        ('1 record', '12 more sites')
    """
    return f"{count} {noun}" + ("s" if count != 1 else "")


def number(value: float | None) -> str:
    """Format a number with four significant digits, or in full if it is an integer below a million.

    Example:
        >>> number(0.123456), number(512.0), number(float("nan")), number(1e-9)
        ('0.1235', '512', 'nan', '1e-09')
    """
    if value is None:
        return ""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.4g}"


def table(rows: Iterable[Sequence[str]], *, right: Iterable[int] = ()) -> list[str]:
    """Format rows as lines with aligned columns.

    Args:
        rows: The cells of each row; all rows have the same length.
        right: The indices of the right-aligned columns.
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
    """Draw values as bars, scaled from the smallest to the largest finite value. ``x`` marks a non-finite bar.

    If there are more values than ``width``, each bar is the mean of several values. The encoding of ``out`` determines
    the characters.
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
