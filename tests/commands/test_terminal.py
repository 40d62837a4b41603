"""Tests of text for the terminal."""

from __future__ import annotations

import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_recorder.commands.terminal import module, number, printable, spark, table


@given(text=st.text(st.characters()))
def test_printable_text(text: str) -> None:
    """The result is always printable and encodable, and short printable text is unchanged."""
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
    """Control characters, direction overrides and lone surrogates are escaped; long text is shortened in the middle."""
    assert printable(text) == shown
    assert printable(text, None) == (text if len(text) == 300 else shown)


def test_the_root() -> None:
    """The module with the empty name is shown as the root."""
    assert (module(""), module("fc")) == ("(root)", "fc")


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0"), (-2.0, "-2"), (1e6, "1e+06"), (123456.0, "123456"), (0.00012345, "0.0001234"), (math.inf, "inf")],
)
def test_numbers(value: float, shown: str) -> None:
    """Numbers have four significant digits; integers below a million are printed in full."""
    assert number(value) == shown


def test_a_table() -> None:
    """Columns are aligned left or right, and lines have no trailing spaces."""
    assert table([["a", "b"], ["long", "1"], ["", ""]], right=[1]) == ["a     b", "long  1", ""]
    assert table([]) == []


class Terminal(io.StringIO):
    """A terminal with a settable encoding."""

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
    """Bars span the range of finite values; long inputs share bars; ``x`` marks values that are not finite."""
    assert spark(values, 10, Terminal()) == bars
