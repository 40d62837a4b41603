"""The report of a run has verdict, graph, charts and settings."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from lightning_recorder.page import report
from lightning_recorder.page.report import _chart, report_html, report_markdown
from lightning_recorder.recordings import open_recording
from tests.commands.console import run as command
from tests.page.test_data import written


def test_a_report_has_verdict_charts_graph_and_settings(runs: Path) -> None:
    """Markdown names the finding and the settings, and its pictures are the charts and the graph."""
    text, pictures = report_markdown(open_recording(runs / "sick").run)
    lines = text.splitlines()
    assert lines[0].endswith(": 1 finding")
    assert any("encoder.relu returns only zeros" in line for line in lines)
    assert any("*Measured* zero fraction 1. *Usual* at most 0.8" in line for line in lines)
    assert "| optimizer | Adam |" in lines
    assert [*pictures] == [
        "report-1-loss.svg",
        "report-2-gradient-norm.svg",
        "report-3-encoder-relu-zero-fraction.svg",
        "report-4-train-loss.svg",
        "report-5-learning-rate.svg",
        "report-graph.svg",
    ]
    for name, picture in pictures.items():
        assert f"({name})" in text
        assert ET.fromstring(picture).tag.endswith("svg")


def test_the_command_writes_one_html_file(runs: Path, tmp_path: Path) -> None:
    """An HTML report is complete; another suffix and a run without anything are errors."""
    path = tmp_path / "report.html"
    said = command("report", runs / "healthy", "--output", path)
    assert (said.status, said.out.split()) == (0, [str(path)])
    assert path.read_text().count("<svg") >= 5
    assert command("report", runs / "healthy", "--output", tmp_path / "report.pdf").status == 2
    assert "a browser prints .html as PDF" in command("report", runs / "healthy", "--output", "report.pdf").err


def test_a_report_is_text_whatever_the_names_are(tmp_path: Path) -> None:
    """Names with marks of HTML and Markdown are shown as they are."""
    run = written(tmp_path / "<b>[x](y)", [[float("nan")]], ["<script>"])
    html = report_html(run)
    assert "&lt;b&gt;[x](y)" in html
    assert "<b>[x]" not in html
    text, _ = report_markdown(run)
    assert "\\<b\\>\\[x\\](y)" in text


def test_the_axis_of_a_constant_has_two_ends() -> None:
    """The axis of a constant begins or ends with 0."""
    for value, ends in ((1.0, ["1", "0"]), (-2.0, ["0", "-2"]), (0.0, ["1", "0"])):
        picture = ET.fromstring(_chart("norm", [0, 1], np.array([value, value])))
        texts = [each.text for each in picture.iter("{http://www.w3.org/2000/svg}text")]
        assert texts[1:3] == ends


def test_a_learning_rate_that_changes_has_its_range(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings do not have the rate of the first step alone; a constant rate is one number."""
    run = open_recording(runs / "sick").run
    for values, shown in (([0.1, 0.4, 0.2], "from 0.1 to 0.4"), ([0.1, 0.1], "0.01")):
        curve = ("learning rate", [*range(len(values))], np.array(values))
        monkeypatch.setattr(report, "logged_curves", lambda _, curve=curve: [curve])
        assert f"| lr | {shown} |" in report_markdown(run)[0].splitlines()
