"""Tests of drawing on a canvas, and of shortened names and wrapped notes."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_recorder.plots import heat_map
from lightning_recorder.plots.canvas import Canvas, every_nth, fitted, literal, shortened, text_width, wrapped
from tests.plots.pixels import names_of


def test_a_picture_is_white_until_something_is_drawn() -> None:
    """A new canvas of 3 by 2 pixels is a white [2, 3, 3] uint8 array."""
    pixels = Canvas(3, 2).pixels()
    assert pixels.dtype == np.uint8
    assert pixels.tolist() == [[[255, 255, 255]] * 3] * 2


def test_pixels_are_laid_down_where_they_belong() -> None:
    """An image is pasted unchanged, with its upper left corner at the given position."""
    noise = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    canvas = Canvas(20, 20)
    canvas.image(4, 9, noise)
    assert (canvas.pixels()[9:14, 4:11] == noise).all()
    assert (canvas.pixels()[:9] == 255).all()


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("$x_1$ <b>&amp; \\N %s {}", "$x_1$ <b>&amp; \\N %s {}"),
        ("größe.β×2", "größe.β×2"),
        ("层.0", "\\u5c42.0"),
        ("a\nb\x1b\u202e", "a\\u000ab\\u001b\\u202e"),
        ("half \ud800", "half \\ud800"),
        ("\U0001f600", "\U0001f600"),
        ("\U000200d0", "\\U000200d0"),
    ],
)
def test_names_are_drawn_as_they_are(name: str, shown: str) -> None:
    """Markup is drawn literally; control characters, lone surrogates and characters missing in the font are escaped."""
    assert literal(name) == shown
    canvas = Canvas(300, 40)
    canvas.text(5, 20, name)
    canvas.upright_text(280, 20, name)
    assert (canvas.pixels() < 255).any()


def test_different_names_without_letters_look_different() -> None:
    """Two different Chinese names give different images."""
    pictures = []
    for name in ("层", "头"):
        canvas = Canvas(100, 30)
        canvas.text(5, 15, name)
        pictures.append(canvas.pixels())
    assert (pictures[0] != pictures[1]).any()


def test_a_text_is_as_wide_as_text_width_returns() -> None:
    """The drawn text starts at its anchor and is as wide as reported, within three pixels."""
    canvas = Canvas(400, 40)
    canvas.text(10, 20, "transformer.h.11.attn")
    (columns,) = np.nonzero((canvas.pixels() < 200).any(axis=(0, 2)))
    assert abs(columns[0] - 10) <= 3
    assert abs(columns[-1] - (10 + text_width("transformer.h.11.attn"))) <= 3


def test_the_line_below_a_curve_is_its_ground() -> None:
    """A filled curve covers the area down to its baseline and leaves the rest white."""
    canvas = Canvas(40, 40)
    box = np.array([[0.0, 30.0], [0.0, 10.0], [20.0, 10.0], [20.0, 30.0]])
    canvas.ridges(5, 5, 30, 30, [(box, "#102030", "#102030")])
    pixels = canvas.pixels()
    assert pixels[25, 15].tolist() == [0x10, 0x20, 0x30]
    assert (pixels[5:13, :] == 255).all()
    assert (pixels[:, 28:] == 255).all()


def test_curves_are_drawn_in_bands_without_seams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves across the edges of the bands look as if they were drawn at once."""
    generator = np.random.default_rng(0)
    x = np.repeat(np.linspace(0, 50, 21), 2)
    curves = []
    for row in range(30):
        heights = np.concatenate(([0.0], np.repeat(generator.uniform(0, 40, 20), 2), [0.0]))
        curves.append((np.stack((x, 30.5 + 20 * row - heights), axis=-1), "#3050a0", "#ffffff"))

    def drawn() -> bytes:
        canvas = Canvas(60, 640)
        canvas.ridges(5, 5, 50, 630, curves)
        return canvas.pixels().tobytes()

    monkeypatch.setattr("lightning_recorder.plots.canvas._BAND_PX", 1000)
    at_once = drawn()
    for size in (100, 256, 629):
        monkeypatch.setattr("lightning_recorder.plots.canvas._BAND_PX", size)
        in_bands = drawn()
        assert in_bands == at_once


def test_importing_the_plots_imports_no_library_that_draws() -> None:
    """Pillow is imported with the first image, not with the package."""
    code = (
        "import sys, lightning_recorder.plots as plots\n"
        "assert 'PIL' not in sys.modules\n"
        "plots.heat_map([0, 1], ['a'], [[1.0, 2.0]], statistic='rms', title='t')\n"
        "assert 'PIL' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_pictures_may_be_drawn_in_several_threads() -> None:
    """Images drawn in four threads equal those drawn one after the other."""

    def draw(seed: int) -> bytes:
        values = np.random.default_rng(seed).normal(size=(12, 30))
        names = [f"layer.{seed}.{row}" for row in range(12)]
        return heat_map(range(30), names, values, statistic="mean", title=f"t {seed}").tobytes()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(draw, range(16))) == [draw(seed) for seed in range(16)]


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


def test_the_number_in_the_name_of_a_block_is_kept() -> None:
    """Blocks that are named with words around their number are told by the number, as those of a list are."""
    parts = ("self_attention_output_first", "self_attention_output_second")
    blocks = [f"the_image_encoder.transformer_block_{number}_of_24.{part}" for number in range(24) for part in parts]
    shown = dict(zip([*blocks, "head"], fitted([*blocks, "head"], 134), strict=True))
    assert len(set(shown.values())) == len(shown)
    assert all(text_width(each, 11) <= 134 for each in shown.values())
    for name, each in shown.items():
        assert name == each or each.startswith(f"{name.split('_block_')[1].split('_')[0]}.self")
    one = fitted([blocks[35]], 134, among=blocks)
    assert one == [shown[blocks[35]]]


def test_names_with_two_kinds_of_numbers_keep_their_words() -> None:
    """Modules whose words tell them apart are not reduced to their numbers."""
    names = [f"a_long_name_of_an_encoder.{kind}_{number}.fc" for kind in ("query", "value") for number in range(3)]
    shown = fitted(names, 100)
    assert len(set(shown)) == len(names)
    assert {name[0] for each in shown for name in each.split(".")[:1]} == {"q", "v"}


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
