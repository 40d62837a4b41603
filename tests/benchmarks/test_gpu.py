"""Tests of the command that measures everything on a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmarks.gpu import LIMIT_S, PARTS, Options, Part, Report, Row, markdown, run_all, run_part, take_over

TINY = Options("cpu", tiny=True)


_RATIOS = ["bare step", "every step", "1 in 50", "watch"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own use
@pytest.mark.parametrize("name", [name for name in PARTS if name != "tests"])  # its tests are among ours
def test_a_part_runs_without_a_gpu(name: str) -> None:
    """With tiny sizes on the CPU, a part gives all its numbers."""
    rows = {row.what: row.value for row in PARTS[name][1](TINY)}
    if name == "planted NaN":
        assert rows == {"planted NaN named, of 1": 1, "planted NaN named, of 2": 2}
    elif name == "host time":
        assert len(rows) == 4
    elif name == "bits in four formats":
        assert rows.keys() >= {"passed", "failed"}
    else:
        assert list(rows) == _RATIOS


def test_the_parts_fit_into_eight_minutes() -> None:
    """The limits of the parts with the most important figures fit into the time; only the last part may be cut."""
    assert LIMIT_S == 480
    assert sum(seconds for seconds, _ in list(PARTS.values())[:-1]) <= LIMIT_S


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing fails with a GPU")
def test_a_part_that_fails_ends_no_other(tmp_path: Path) -> None:
    """The table has the reason of a failing part, and the numbers of the next one."""
    report = Report("a device", {})
    run_all(report, ["host time"], Options("cuda", tiny=True), 10_000, tmp_path / "gpu")
    run_all(report, ["host time"], TINY, 10_000, tmp_path / "gpu")
    first, second = report.parts
    assert "CUDA" in first.error or "NVIDIA" in first.error
    assert first.rows == []
    assert (len(second.rows), second.error) == (4, "")
    assert (tmp_path / "gpu.md").read_text() == markdown(report)
    assert len(json.loads((tmp_path / "gpu.json").read_text())["parts"]) == 2
    assert f"| host time | *not complete* | {first.error} | |" in (tmp_path / "gpu.md").read_text()


def test_a_part_that_takes_too_long_is_ended() -> None:
    """A part is ended when its time is over."""
    part = run_part("MLP", TINY, 0.5)
    assert (part.error, part.rows) == ("ended after 0 s", [])
    assert part.seconds < 60


def test_no_part_begins_after_the_time(tmp_path: Path) -> None:
    """Without time, each part has a row that says so."""
    report = Report("a device", {})
    run_all(report, ["MLP", "tests"], TINY, 0, tmp_path / "gpu")
    assert [(part.name, part.error) for part in report.parts] == [
        ("MLP", "no time was left"),
        ("tests", "no time was left"),
    ]


def report_of(value: float) -> Report:
    rows = [Row("every step", value, "×", 1.35), Row("passed", 12, "tests"), Row("more memory", 1234.5, "MiB")]
    return Report("NVIDIA X", {"torch": "2.13"}, [Part("MLP", rows), Part("tests", error="a | b")])


def test_the_table_has_goals_and_reasons() -> None:
    """A missed goal is bold, units are those of the rows, and an error cannot break the table."""
    assert markdown(report_of(1.5)).splitlines() == [
        "Measured on one NVIDIA X (torch 2.13).",
        "",
        "| part | what | value | goal |",
        "|---|---|---|---|",
        "| MLP | every step | **1.500 ×** | ≤ 1.35 |",
        "| MLP | passed | 12 tests |  |",
        "| MLP | more memory | 1,234.5 MiB |  |",
        "| tests | *not complete* | a \\| b | |",
    ]


def test_a_page_takes_the_table_over(tmp_path: Path) -> None:
    """The table stands at the end of the page, and a later one of the same device replaces it."""
    page = tmp_path / "cost.md"
    page.write_text("# Cost\n\nText.\n")
    take_over(page, report_of(1.5))
    other: Any = report_of(1.1)
    other.device = "NVIDIA Y"
    take_over(page, other)
    first = page.read_text()
    assert first.startswith("# Cost\n\nText.\n\n<!-- measured on: NVIDIA X -->\n\nMeasured on one NVIDIA X")
    take_over(page, report_of(1.2))
    assert page.read_text() == first.replace("**1.500 ×**", "1.200 ×")
