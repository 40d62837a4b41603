"""Tests of record files that are growing, resumed, torn or damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_recorder import DumpError
from lightning_recorder.recordings import RecordWriter, open_recording, records_path
from tests.recordings.runs import site_of, write_simple


def add(writer: RecordWriter, step: int, value: float) -> None:
    writer.write({"step": step}, [site_of("fc", "out", {"rms": value})])


def test_a_run_that_continues(tmp_path: Path) -> None:
    """A refresh reads only new lines, and finds new recorders and sites."""
    writer = write_simple(tmp_path, {0: 1.0})
    recording = open_recording(tmp_path)
    series = recording["activations"]
    assert series.steps == [0]
    add(writer, 1, 2.0)
    writer.write({"step": 2}, [site_of("new", "out", {"mean": 3.0})])
    assert series.steps == [0]
    assert series.refresh() == 2
    assert (series.steps, [site.name for site in series.sites]) == ([0, 1, 2], ["fc", "new"])
    assert series.statistics == ["rms", "mean"]
    write_simple(tmp_path, {0: 1.0}, "gradients")
    add(writer, 3, 4.0)
    assert recording.recorders == ["activations"]
    assert recording.refresh() == 1
    assert recording.recorders == ["activations", "gradients"]
    assert recording["activations"] is series
    assert series.refresh() == 0


def test_a_line_that_is_being_written(tmp_path: Path) -> None:
    """An incomplete last line is not counted as damaged, and is read once it is complete."""
    writer = write_simple(tmp_path, {0: 1.0, 1: 2.0})
    whole = writer.path.read_bytes()
    writer.path.write_bytes(whole[:-5])
    series = open_recording(tmp_path)["activations"]
    assert (series.steps, series.skipped) == ([0], 0)
    writer.path.write_bytes(whole)
    assert (series.refresh(), series.steps) == (1, [0, 1])


def test_a_run_that_was_killed_and_resumes(tmp_path: Path) -> None:
    """The torn line of a killed run is skipped and counted; all other records are read."""
    writer = write_simple(tmp_path, {0: 1.0, 1: 2.0})
    writer.path.write_bytes(writer.path.read_bytes()[:-5])
    write_simple(tmp_path, {1: 3.0, 2: 4.0})
    series = open_recording(tmp_path)["activations"]
    assert (series.steps, series.skipped, series.replaced) == ([0, 1, 2], 1, 0)
    assert series.values("rms").flatten().tolist() == [1.0, 3.0, 4.0]


def test_a_run_that_was_resumed(tmp_path: Path) -> None:
    """Records of a resumed run replace earlier ones of the same steps; records of earlier steps are kept."""
    write_simple(tmp_path, {0: 1.0, 1: 2.0, 2: 3.0})
    write_simple(tmp_path, {1: 20.0, 2: 30.0, 3: 40.0})
    series = open_recording(tmp_path)["activations"]
    assert series.steps == [0, 1, 2, 3]
    assert series.values("rms").flatten().tolist() == series["fc"].statistic("rms").tolist() == [1.0, 20.0, 30.0, 40.0]
    assert [series.session(step) for step in series.steps] == [1, 2, 2, 2]
    assert [session.about["session"] for session in series.sessions] == [1, 2]
    assert series.replaced == 2


def test_a_stage_again(tmp_path: Path) -> None:
    """A record replaces only a record of the same stage and dataloader."""
    writer = RecordWriter(records_path(tmp_path / "recorder", "activations"))
    writer.begin(label="activations", group="activations")
    for stage, loader in (("train", None), ("validate", None), ("validate", 0), ("validate", 1), ("validate", 1)):
        writer.write({"step": 5, "stage": stage, "loader": loader}, [site_of("a", "out", {"rms": 1.0})])
    series = open_recording(tmp_path)["activations"]
    parts = [series, *(series.of("validate", loader) for loader in (0, 1))]
    assert [part.replaced for part in parts] == [0, 0, 1]


DAMAGE = [
    "no JSON",
    "null",
    "3",
    "[]",
    "{}",
    '{"step": 1}',
    '{"step": 1, "columns": [], "sites": 3}',
    '{"step": true, "columns": [], "sites": []}',
    '{"step": 1.5, "columns": [], "sites": []}',
    '{"step": 1e400, "columns": [], "sites": []}',
    '{"step": 99999999999999999999, "columns": [], "sites": []}',
    '{"step": 1, "loader": "0", "columns": [], "sites": []}',
    '{"step": 1, "stage": ["train"], "columns": [], "sites": []}',
    '{"step": 1, "columns": ["rms"], "sites": [["fc", "out", null, null, [], null]]}',
    '{"step": 1, "columns": ["rms"], "sites": [["fc", "out", null, null, ["much"], null]]}',
    '{"step": 1, "columns": ["rms"], "sites": [["fc", "out", null, null, [NaN], null]]}',
    '{"step": 1, "columns": ["rms"], "sites": [["fc", "out", null, null, [[1]], null]]}',
    '{"step": 1, "columns": ["rms"], "sites": [["fc", "out", null, null, "1", null]]}',
    '{"step": 1, "columns": ["rms"], "sites": [["fc", "out", 3, null, [1], null]]}',
    '{"step": 1, "columns": ["rms"], "sites": [["fc", "out", null, ["a"], [1], null]]}',
    '{"step": 1, "columns": ["rms"], "sites": [["fc", "out", null, null, [1' + "0" * 400 + "], null]]}",
    '{"step": 1, "columns": ["rms"], "sites": [["fc", "out", null, null, [1], null, 3]]}',
    '{"step": 1, "columns": [], "sites": [["fc", "out", null, null, [], null], ["fc", "out", null, null, [], null]]}',
    '{"step": 1, "columns": ["a", "a"], "sites": []}',
    '{"step": 1, "columns": [], "sites": [], "held": 3}',
    '{"step": 1, "columns": [], "sites": [], "held": {"as_made": [3]}}',
    '{"step": 1, "columns": [], "sites": [], "held": {"copies": [{"copy": "a", "of": "b"}]}}',
    '{"format": "another"}',
    '{"format": 3}',
    "[" * 100_000,
    '{"step":' * 100_000,
    "1" * 5000,
    "\udcff\udcfe",
]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: ascii(damage)[:60])
def test_a_damaged_line(damage: str, tmp_path: Path) -> None:
    """An invalid line is skipped and counted; the lines after it are read."""
    writer = write_simple(tmp_path, {0: 1.0})
    with writer.path.open("ab") as file:
        file.write(damage.encode("utf-8", "surrogateescape") + b"\n")
    add(writer, 2, 3.0)
    series = open_recording(tmp_path)["activations"]
    assert (series.steps, series.values("rms").flatten().tolist(), series.skipped) == ([0, 2], [1.0, 3.0], 1)


def test_a_damaged_header(tmp_path: Path) -> None:
    """If the header is damaged, the records are still read, and the label is the file name."""
    writer = write_simple(tmp_path, {0: 1.0, 1: 2.0})
    first, rest = writer.path.read_bytes().split(b"\n", 1)
    writer.path.write_bytes(first[:-9] + b"\n" + rest)
    recording = open_recording(tmp_path)
    series = recording["activations"]
    assert (series.steps, series.skipped, series.sessions, series.session(1)) == ([0, 1], 1, [], 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"format": "lightning_recorder.records/4"}', "records/4'; the supported formats"),
        ("text", "no line of the format"),
    ],
)
def test_another_format(content: str, message: str, tmp_path: Path) -> None:
    """A file with another format or a later version raises an error for that recorder only."""
    write_simple(tmp_path, {0: 1.0})
    records_path(tmp_path / "recorder", "other").write_text(content + "\n")
    recording = open_recording(tmp_path)
    with pytest.raises(DumpError, match=message):
        _ = recording["other"].steps
    assert recording["activations"].steps == [0]


def test_an_empty_file(tmp_path: Path) -> None:
    """A run without records has a recorder whose properties are empty."""
    writer = write_simple(tmp_path, {})
    series = open_recording(tmp_path)["activations"]
    assert (series.steps, series.sites, series.stages, series.statistics, series.keys) == ([], [], [], [], [])
    assert (series.stage, len(series.sessions), list(series.seen().shape)) == ("train", 1, [0, 0])
    writer.path.write_bytes(b"")
    assert open_recording(tmp_path)["activations"].steps == []


def test_a_file_that_was_written_anew(tmp_path: Path) -> None:
    """A file that became shorter is treated as a new file, and all old records are dropped."""
    writer = write_simple(tmp_path, {0: 1.0, 1: 2.0, 2: 3.0})
    series = open_recording(tmp_path)["activations"]
    assert series.steps == [0, 1, 2]
    writer.path.unlink()
    write_simple(tmp_path, {7: 8.0})
    assert series.refresh() == 1
    assert (series.steps, len(series.sessions)) == ([7], 1)


def test_a_histogram_of_a_file_that_has_changed(tmp_path: Path) -> None:
    """A histogram raises an error if its line has changed since it was read."""
    writer = write_simple(tmp_path, {0: 1.0, 1: 2.0})
    series = open_recording(tmp_path)["activations"]
    assert series.steps == [0, 1]
    writer.path.write_bytes(writer.path.read_bytes().replace(b'"step":1', b'"step":3'))
    with pytest.raises(DumpError, match="has changed since it was read"):
        series["fc"].bins(1)
