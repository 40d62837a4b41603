"""Tests of shortened names and wrapped notes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_recorder.plots.canvas import text_width
from lightning_recorder.plots.fitted_text import every_nth, fitted, shortened, wrapped
from tests.plots.pixels import names_of


def test_a_name_that_fits_stays() -> None:
    """A name that fits is unchanged."""
    assert shortened("transformer.h.11.attn.c_attn", 300) == "transformer.h.11.attn.c_attn"


def test_the_ends_of_a_long_name_stay() -> None:
    """A shortened name keeps 30 % of its characters from the start, the rest from the end, and fills the space."""
    name = names_of(1)[0]
    short = shortened(name, 200)
    head, tail = short.split("…")
    assert name.startswith(head)
    assert name.endswith(tail)
    assert len(head) / (len(head) + len(tail)) == pytest.approx(0.3, abs=0.03)
    assert 185 < text_width(short, 11) <= 200


@given(st.lists(st.text("ab.", min_size=1, max_size=60), min_size=1, max_size=8, unique=True))
def test_different_names_stay_different(names: list[str]) -> None:
    """Distinct names stay distinct and fit, even if they differ only in the middle."""
    shown = fitted(names, 120)
    assert len(set(shown)) == len(names)
    assert all(text_width(each, 11) <= 120 for each in shown)


def test_names_that_differ_in_their_middle_move_the_gap() -> None:
    """If shortening hides the layer number, the ellipsis moves so that it is visible."""
    names = [f"{'encoder.' * 6}{layer}{'.linear' * 6}" for layer in (1, 2)]
    shown = fitted(names, 250)
    assert shown[0] != shown[1]


@given(st.lists(st.text("ab.", min_size=1, max_size=30), min_size=1, max_size=12), st.integers(60, 300))
def test_a_note_is_broken_between_its_words(words: list[str], room: int) -> None:
    """Notes are wrapped between words: all lines fit, and no line has space for the next word."""
    lines = wrapped(" ".join(words), room)
    assert " ".join(lines).split(" ") == [shortened(word, room) for word in words]
    assert all(text_width(line, 11) <= room for line in lines)
    for line, after in pairwise(lines):
        assert text_width(f"{line} {after.split(' ')[0]}", 11) > room


@pytest.mark.parametrize(
    ("count", "distance", "rows"), [(3, 15.0, [0, 1, 2]), (5, 7.0, [0, 2, 4]), (7, 5.0, [0, 3, 6]), (0, 5.0, [])]
)
def test_labels_never_touch(count: int, distance: float, rows: list[int]) -> None:
    """If rows are closer than 14 pixels, only every n-th row has a label."""
    assert list(every_nth(count, distance, 14)) == rows
