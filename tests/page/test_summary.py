"""The summary of a recording in a notebook."""

from __future__ import annotations

import html
from pathlib import Path

from lightning_recorder.page import page_data, page_html
from lightning_recorder.recordings import Recording, open_recording
from tests.page.test_data import written


def test_a_recording_shows_its_verdict(runs: Path) -> None:
    """A run is shown with its findings, its curves and what was recorded; several runs with a line for each."""
    recording = open_recording(runs / "sick")
    sick = recording._repr_html_()
    assert "⚠" in sick
    assert "encoder.relu returns only zeros" in sick
    tensors = len(recording.run["activations"].sites)
    assert tensors > 11  # with the batch and both sides of the loss
    assert f"activations: 12 records of {tensors} tensors" in sick
    assert sick.count("<polyline") == 2
    both = open_recording(runs)._repr_html_()
    assert both.count("✓ healthy") == 1
    assert both.count("⚠") == 1
    assert len(sick) < 20_000


def test_a_summary_runs_nothing(tmp_path: Path) -> None:
    """Names are text, and there is no script."""
    name = "<img src=x onerror=alert(1)>"
    run = written(tmp_path, [[1.0], [float("nan")]], [name])
    shown = Recording({name: run})._repr_html_()
    assert "<img" not in shown
    assert "<script" not in shown


def test_the_page_is_a_document(runs: Path, tmp_path: Path) -> None:
    """``page()`` returns the document, writes it if there is a path, and shows it in a frame without rights."""
    recording = open_recording(runs / "sick")
    (name,) = recording.runs
    path = tmp_path / "new" / "page.html"
    document = recording.page(path)
    assert document == path.read_text(encoding="utf-8")
    assert document == page_html(page_data(recording.runs), f"{name} · lightning_recorder")
    assert recording.run.page() == document
    assert len(repr(document)) < 100
    frame = document._repr_html_()  # type: ignore[attr-defined]  # a str with a method
    assert html.unescape(frame.partition('srcdoc="')[2].rpartition('"')[0]) == document
    assert "allow-same-origin" not in frame
