"""Names: what is left of those that are too long."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_recorder.plots.canvas import text_width
from lightning_recorder.plots.words import every_nth, fitted, shortened, wrapped
from tests.plots.pixels import names_of


def test_a_name_that_fits_stays() -> None:
    """Nothing is cut where there is room."""
    assert shortened("transformer.h.11.attn.c_attn", 300) == "transformer.h.11.attn.c_attn"


def test_the_ends_of_a_long_name_stay() -> None:
    """A third of what is kept stands before the gap, the rest behind it, and the room is used up."""
    name = names_of(1)[0]
    short = shortened(name, 200)
    head, tail = short.split("…")
    assert name.startswith(head)
    assert name.endswith(tail)
    assert len(head) / (len(head) + len(tail)) == pytest.approx(0.3, abs=0.03)
    assert 185 < text_width(short, 11) <= 200


@given(st.lists(st.text("ab.", min_size=1, max_size=60), min_size=1, max_size=8, unique=True))
def test_different_names_stay_different(names: list[str]) -> None:
    """Also where what tells them apart is in the middle; and all of them fit."""
    shown = fitted(names, 120)
    assert len(set(shown)) == len(names)
    assert all(text_width(each, 11) <= 120 for each in shown)


def test_names_that_differ_in_their_middle_move_the_gap() -> None:
    """The number of the layer, which the gap would hide, is shown."""
    names = [f"{'encoder.' * 6}{layer}{'.linear' * 6}" for layer in (1, 2)]
    shown = fitted(names, 250)
    assert shown[0] != shown[1]


@given(st.lists(st.text("ab.", min_size=1, max_size=30), min_size=1, max_size=12), st.integers(60, 300))
def test_a_note_is_broken_between_its_words(words: list[str], room: int) -> None:
    """All lines fit, words that fit are whole and in their order, and no line has room for the word after it."""
    lines = wrapped(" ".join(words), room)
    assert " ".join(lines).split(" ") == [shortened(word, room) for word in words]
    assert all(text_width(line, 11) <= room for line in lines)
    for line, after in pairwise(lines):
        assert text_width(f"{line} {after.split(' ')[0]}", 11) > room


@pytest.mark.parametrize(
    ("count", "distance", "rows"), [(3, 15.0, [0, 1, 2]), (5, 7.0, [0, 2, 4]), (7, 5.0, [0, 3, 6]), (0, 5.0, [])]
)
def test_labels_never_touch(count: int, distance: float, rows: list[int]) -> None:
    """Of rows that are closer than 14 pixels only every second, third, … has one."""
    assert list(every_nth(count, distance, 14)) == rows
