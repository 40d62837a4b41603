"""Text in a terminal."""

from __future__ import annotations

import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_recorder.commands.text import module, number, printable, size, spark, table


@given(text=st.text(st.characters()))
def test_printable_text(text: str) -> None:
    """Whatever a text holds, what is shown of it is printable and can be written; what is seen stays as it is."""
    shown = printable(text)
    assert shown.isprintable()
    shown.encode()
    if text.isprintable() and len(text) <= 200:
        assert shown == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[2Jb", "a\\x1b[2Jb"),
        ("a\r\nb", "a\\r\\nb"),
        ("a\u202eb", "a\\u202eb"),
        ("a\ud800", "a\\ud800"),
        ("é名", "é名"),
        ("x" * 300, "x" * 100 + "…" + "x" * 100),
    ],
    ids=ascii,
)
def test_what_is_not_seen(text: str, shown: str) -> None:
    """Controls, what turns the direction and half surrogates are escaped, and a long text is cut in its middle."""
    assert printable(text) == shown


def test_the_root() -> None:
    """The module without a name is called the root."""
    assert (module(""), module("fc")) == ("(root)", "fc")


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0"), (-2.0, "-2"), (1e6, "1e+06"), (123456.0, "123456"), (0.00012345, "0.0001234"), (math.inf, "inf")],
)
def test_numbers(value: float, shown: str) -> None:
    """Four digits that count; whole numbers in full up to a million."""
    assert number(value) == shown


def test_sizes() -> None:
    """Bytes in the unit that suits them."""
    assert [size(each) for each in (999, 1000, 2_500_000, 10**9)] == ["999 bytes", "1.0 KB", "2.5 MB", "1.0 GB"]


def test_a_table() -> None:
    """Columns are aligned, to the right where it is asked for, and no line ends with spaces."""
    assert table([["a", "b"], ["long", "1"], ["", ""]], right=[1]) == ["a     b", "long  1", ""]
    assert table([]) == []


class Terminal(io.StringIO):
    """A terminal that says what it can show."""

    encoding = "utf-8"


@pytest.mark.parametrize(
    ("values", "bars"),
    [
        ([], ""),
        ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], "▁▂▃▄▅▆▇█"),
        ([0.0] * 10 + [1.0] * 10, "▁▁▁▁▁█████"),
        ([1.0, 1.0], "▅▅"),
        ([0.0, math.nan, 1.0, math.inf], "▁x█x"),
        ([math.nan], "x"),
        ([1e308, -1e308], "▅▅"),
    ],
)
def test_sparks(values: list[float], bars: str) -> None:
    """Bars go from the smallest to the largest finite value; many values share one; ``x`` is no number."""
    assert spark(values, 10, Terminal()) == bars
