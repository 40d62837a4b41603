"""Tests of the in-memory sink."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from lightning_recorder import MemorySink
from tests.sinks.samples import graph, histogram, picture


def test_values_are_kept_by_tag_and_step() -> None:
    """Each kind is stored by tag and step."""
    sink, bars, pixels, calls = MemorySink(), histogram(), picture(), graph()
    sink.write_scalars(3, {"a": 0.5, "b": -1.0})
    sink.write_scalars(5, {"a": math.inf})
    sink.write_histograms(3, {"h": bars})
    sink.write_images(3, {"i": pixels})
    sink.write_text(3, {"t": "text"})
    sink.write_files(3, {"f": Path("x.txt")})
    sink.write_graph(3, {"g": calls})
    assert sink.scalars == {"a": {3: 0.5, 5: math.inf}, "b": {3: -1.0}}
    assert sink.histograms == {"h": {3: bars}}
    assert list(sink.images) == ["i"]
    assert np.array_equal(sink.images["i"][3], pixels)
    assert sink.texts == {"t": {3: "text"}}
    assert sink.files == {"f": {3: Path("x.txt")}}
    assert sink.graphs == {"g": {3: calls}}


def test_the_last_value_of_a_step_stays() -> None:
    """Writing a tag again at a step replaces the value."""
    sink = MemorySink()
    for value in (1.0, 2.0):
        sink.write_scalars(3, {"a": value})
    assert sink.scalars == {"a": {3: 2.0}}


def test_sinks_do_not_share() -> None:
    """Two sinks share no values."""
    one, other = MemorySink(), MemorySink()
    one.write_scalars(3, {"a": 1.0})
    assert other.scalars == {}


def test_closing_keeps_what_was_written() -> None:
    """The values can still be read after closing."""
    with MemorySink() as sink:
        sink.write_text(3, {"t": "text"})
    assert sink.texts == {"t": {3: "text"}}
