"""Tests of the commands on real runs."""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_recorder import capture_graph
from lightning_recorder.dumps import write_dump
from lightning_recorder.page import page_data
from lightning_recorder.recordings import RecordWriter, open_recording, records_path
from tests.commands.console import run
from tests.recordings.runs import make_net, record_run, site_of, write_simple
from tests.recordings.test_comparison import poke

HOSTILE = "=cmd|'/C calc'!A0\x1b[31m\u202e\n<b>,\"x\""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs; in the second, one weight is changed before step 2."""
    folder = tmp_path_factory.mktemp("runs")
    record_run(folder / "version_0")
    record_run(folder / "version_1", change=poke, at=2)
    recorder = folder / "version_0" / "recorder"
    (recorder / "graph.json").write_text(json.dumps(capture_graph(make_net(), torch.ones(1, 6)).to_json()))
    write_dump(recorder / "dumps" / "a.safetensors", {"fc/out": torch.ones(3)}, {}, step=1)
    return folder


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A run with names that could act as terminal codes, spreadsheet formulas or HTML."""
    writer = RecordWriter(records_path(tmp_path / "recorder", HOSTILE))
    writer.begin(label=HOSTILE, group="activations")
    for step in (0, 1):
        site = site_of(HOSTILE, HOSTILE, {"rms": -1.5, HOSTILE: math.nan, "\ud800": math.inf}, dtype=HOSTILE)
        writer.write({"step": step, "stage": HOSTILE}, [site])
    return tmp_path


def test_ls(runs: Path) -> None:
    """``ls`` lists the recorders of each run with sites, records and steps, and its dumps and graph."""
    logged = run("ls", runs)
    lines = [" ".join(line.split()) for line in logged.out.splitlines()]
    activations = (runs / "version_0/recorder/records/activations.jsonl").stat().st_size
    assert lines[1:3] == [
        "recorder stage sites records steps size",
        f"activations train 3 4 0-3 {activations / 1000:.1f} KB",
    ]
    dump = (runs / "version_0/recorder/dumps/a.safetensors").stat().st_size
    assert lines[4] == f"dumps: 1, {dump} bytes"
    assert lines[5].startswith("graph: Sequential, ")
    assert [line.split()[0] for line in lines if line.startswith("version_")] == ["version_0", "version_1"]
    assert logged.status == 0


def test_ls_as_json(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``ls --json`` prints the same contents as JSON, in the same order, by default those of the current folder."""
    monkeypatch.chdir(runs)
    found = json.loads(run("ls", "--json").out)["runs"]
    assert [each["name"] for each in found] == ["version_0", "version_1"]
    assert found[0]["recorders"][1]["label"] == "gradients"
    stage = {"stage": "train", "loader": None, "sites": 3, "records": 4, "first": 0, "last": 3}
    assert found[0]["recorders"][1]["stages"] == [stage]
    assert (found[0]["dumps"]["count"], found[1]["graph"]) == (1, None)


def test_ls_of_what_is_damaged(tmp_path: Path) -> None:
    """``ls`` reports unreadable recorders, unreadable graphs and damaged lines, and still lists everything else."""
    writer = write_simple(tmp_path, {0: 1.0})
    records_path(tmp_path / "recorder", "other").write_text("text\n")
    (tmp_path / "recorder" / "graph.json").write_text("[]")
    with writer.path.open("a") as file:
        file.write("text\n")
    logged = run("ls", tmp_path)
    assert logged.status == 0
    assert "  activations: 1 damaged line was skipped\n" in logged.out
    assert "  other: " in logged.out
    assert "graph.json is not a graph written by lightning_recorder" in logged.out


def test_show(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``show --details`` prints one row per step and a bar chart of each statistic."""
    monkeypatch.setenv("LINES", "40")
    series = open_recording(runs / "version_0")["activations"]
    logged = run("show", runs / "version_0", "head", "--recorder", "activations", "--statistic", "rms", "--details")
    lines = logged.out.splitlines()
    assert lines[0] == "head out (activations, train, float32 [16, 3])"
    assert lines[1].split() == ["step", "rms"]
    values = series["head"].statistic("rms").tolist()
    assert [line.split() for line in lines[2:6]] == [[str(step), f"{value:.4g}"] for step, value in enumerate(values)]
    name, bars, low, to, high = lines[6].split()
    assert (name, len(bars), low, to, high) == ("rms", 4, f"{min(values):.4g}", "to", f"{max(values):.4g}")


def test_show_a_glob(runs: Path) -> None:
    """``show --details`` with a glob prints all matching sites of all recorders and runs."""
    out = run("show", runs, "encoder.*", "--details").out
    titles = [line for line in out.splitlines() if line.startswith("encoder.")]
    assert len(titles) == 2 * 2 * 2
    assert titles[0] == "encoder.fc out (version_0, activations, train, float32 [16, 5])"


@pytest.mark.parametrize(("lines", "rows"), [("16", 11), ("9", 5), ("300", 200)])
def test_show_is_thinned(lines: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--details`` prints at most as many rows as a terminal has lines, with the first and last step, and says so."""
    monkeypatch.setenv("LINES", lines)
    write_simple(tmp_path, {step: float(step) for step in range(200)})
    shown = run("show", tmp_path, "fc", "--details").out.splitlines()
    steps = [int(line.split()[0]) for line in shown if line.split()[0].isdigit() and "of" not in line]
    assert (len(steps), steps[0], steps[-1]) == (rows, 0, 199)
    assert ("of 200 steps" in " ".join(shown)) is (rows < 200)


def test_show_has_a_line_for_each_site(runs: Path) -> None:
    """A line has the last, the smallest and the largest value of a site, and a bar for each record."""
    series = open_recording(runs / "version_0")["activations"]
    lines = run("show", runs / "version_0", "--recorder", "activations").out.splitlines()
    assert lines[0] == "activations, train: rms, 4 records, steps 0 to 3"
    assert lines[1].split() == ["site", "last", "min", "max"]
    assert [line.split()[0] for line in lines[2:]] == [site.name for site in series.sites]
    for line, site in zip(lines[2:], series.sites, strict=True):
        values = series[site.name].statistic("rms").tolist()
        *_, last, low, high, bars = line.split()
        assert [last, low, high] == [f"{value:.4g}" for value in (values[-1], min(values), max(values))]
        assert len(bars) == 4


def write_blocks(folder: Path, change: Callable[[int, dict[str, float]], dict[str, float]]) -> None:
    """Write a run of 24 equal blocks; ``change`` gets the block and the scalars of its output."""
    writer = RecordWriter(records_path(folder / "recorder", "activations"))
    writer.begin(label="activations", group="activations")
    for step in range(4):
        usual = {"rms": 1.0 + step / 100, "min": -2.0, "max": 2.0, "zero_fraction": 0.1, "nan_count": 0.0}
        sites = [site_of(f"blocks.{block}.fc", "out", change(block, dict(usual))) for block in range(24)]
        writer.write({"step": step, "stage": "train"}, sites)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 23), st.sampled_from(["rms", "max", "zero_fraction", "nan_count"]))
def test_show_begins_with_the_unusual(place: int, name: str) -> None:
    """The sick one of 24 blocks is the first line with its rank, also if another statistic is shown."""
    with TemporaryDirectory() as folder:
        sick = {"rms": 99.0, "max": 1e4, "zero_fraction": 1.0, "nan_count": 1.0}
        write_blocks(Path(folder), lambda block, scalars: {**scalars, name: sick[name]} if block == place else scalars)
        for arguments in ([], ["--statistic", "rms"]):
            with patch.dict(os.environ, {"LINES": "12"}):
                lines = run("show", folder, *arguments).out.splitlines()
            assert lines[2].split()[:2] == ["1", f"blocks.{place}.fc"]
            rest = [f"blocks.{block}.fc" for block in range(24) if block != place]
            assert [line.split()[0] for line in lines[3:10]] == rest[:7]
            assert lines[10].startswith("1 of 24 stand out")
            assert lines[11] == "16 more; --all lists them"
            assert len(run("show", folder, "--all").out.splitlines()) == 2 + 24 + 1


def test_show_has_a_parameter_its_gradient_and_its_update_beside_each_other(tmp_path: Path) -> None:
    """A parameter has one line; a parameter without a gradient has empty columns, and no NaN.

    The one that a finding names comes first.
    """
    writer = RecordWriter(records_path(tmp_path / "recorder", "parameters"))
    writer.begin(label="parameters", group="parameters")
    for step in range(3):
        sites = [
            site_of("fc", "weight", {"rms": 2.0 + step, "update_ratio": 0.5}),
            site_of("fc", "weight.grad", {"rms": 0.25}),
            site_of("fc", "weight.exp_avg", {"rms": 9.0}),
            site_of("frozen", "weight", {"rms": 1.0}),
        ]
        writer.write({"step": step, "stage": "train"}, sites)
    lines = run("show", tmp_path).out.splitlines()
    ends = ("last", "min", "max")
    assert lines[1].split() == [
        "site",
        *(word for part in ("value", "gradient", "update") for end in ends for word in (part, end)),
    ]
    bars = ["▁▅█", "▅▅▅", "▅▅▅"]
    assert lines[2].split() == ["1", "frozen", "weight", "1", "1", "1", "▅▅▅"]
    assert lines[3].split() == ["fc", "weight", "4", "2", "4", bars[0], *["0.25"] * 3, bars[1], *["0.5"] * 3, bars[2]]
    assert lines[4].startswith("1 of 2 stand out: named by a finding, or")
    assert len(lines) == 5


def test_show_leaves_out_sites_that_cannot_have_a_statistic(tmp_path: Path) -> None:
    """With ``--statistic``, a site without any value of it has no line, and is not counted."""
    writer = RecordWriter(records_path(tmp_path / "recorder", "parameters"))
    writer.begin(label="parameters", group="parameters")
    for step in (0, 1):
        ratio = {"update_ratio": 0.5}
        sites = [
            site_of(f"fc{number}", path, {"rms": 2.0, **(ratio if path == "weight" else {})})
            for number in range(7)
            for path in ("weight", "weight.grad")
        ]
        writer.write({"step": step}, sites)
    lines = run("show", tmp_path, "--statistic", "update_ratio", "--all").out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == [f"fc{number}" for number in range(7)]
    lines = run("show", tmp_path, "--statistic", "update_ratio").out.splitlines()
    assert not [line for line in lines if ".grad" in line]


def test_show_says_that_a_site_is_not_recorded_any_more(tmp_path: Path) -> None:
    """A site that is not in the last record has a hyphen as its last value and an x for each missing record."""
    writer = RecordWriter(records_path(tmp_path / "recorder", "gradients"))
    writer.begin(label="gradients", group="gradients")
    for step in range(3):
        sites = [site_of(name, "out", {"rms": 1.0 + step}) for name in "abc" if step < 2 or name != "b"]
        writer.write({"step": step, "stage": "train"}, sites)
    lines = [line.split() for line in run("show", tmp_path).out.splitlines()]
    assert lines[2] == ["1", "b", "out", "-", "1", "2", "▁█x"]
    assert lines[3] == ["a", "out", "3", "1", "3", "▁▅█"]


def test_details_have_no_statistic_that_cannot_exist(tmp_path: Path) -> None:
    """A statistic that is NaN in all records is left out unless it is asked for."""
    writer = RecordWriter(records_path(tmp_path / "recorder", "activations"))
    writer.begin(label="activations", group="activations")
    writer.write({"step": 0, "stage": "train"}, [site_of("fc", "out", {"rms": 1.0, "min": math.nan})])
    assert "nan" not in run("show", tmp_path, "fc", "--details").out
    assert "nan" in run("show", tmp_path, "fc", "--details", "--statistic", "min").out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["encoder.f"], "no site matches 'encoder.f'; the closest names are 'encoder.fc'"),
        (["head", "--recorder", "activation"], "the recorders are activations, gradients"),
        (["head", "--stage", "test"], "there is no such recorder or stage"),
        (["head", "--statistic", "norm"], "there is no statistic 'norm'; there are 'count'"),
    ],
)
def test_show_what_is_not_there(arguments: list[str], message: str, runs: Path) -> None:
    """An unknown site, recorder, stage or statistic gives a one-line error that lists the available ones."""
    logged = run("show", runs / "version_0", *arguments)
    assert (logged.status, logged.out, logged.err.count("\n")) == (2, "", 1)
    assert message in logged.err


@pytest.mark.parametrize("options", [[], ["--recorder", "activations"], ["--stage", "train"]])
def test_a_run_without_records(options: list[str], tmp_path: Path) -> None:
    """If a run has only a receipt, ``show`` and ``diff`` say that it has no records, and name its folder."""
    (tmp_path / "recorder").mkdir()
    (tmp_path / "recorder" / "receipt.json").write_text("{}")
    path = str(tmp_path)
    expected = f"lightning-recorder show: {path!r} has no records to show\n"
    assert run("show", path, *options) == (2, "", expected)
    expected = f"lightning-recorder diff: neither run has records to compare: {path!r} and {path!r}\n"
    assert run("diff", path, path, *options) == (2, "", expected)


@pytest.mark.parametrize("is_cut", [False, True], ids=["no sites", "empty files"])
def test_a_run_that_crashed_in_its_first_step(is_cut: bool, tmp_path: Path) -> None:
    """If no record has a tensor, each command says that nothing was recorded, and none calls the run healthy."""
    for label in ("activations", "watch"):
        path = records_path(tmp_path / "recorder", label)
        writer = RecordWriter(path)
        writer.begin(label=label, group=label)
        writer.write({"step": 0, "stage": "train"}, [])
        if is_cut:
            path.write_bytes(b"")
    for arguments in (
        ["doctor", tmp_path],
        ["show", tmp_path],
        ["show", tmp_path, "fc", "--recorder", "activations"],
        ["view", tmp_path, "--output", tmp_path / "page.html"],
        ["export", tmp_path, tmp_path / "table.csv"],
    ):
        said = run(*arguments)
        assert (said.status, said.out, said.err.count("\n")) == (2, "", 1)
        assert f"{str(tmp_path)!r} has no records" in said.err
    page_data({"run": open_recording(tmp_path).run})  # the page of a run in progress waits for records
    assert "<b>nothing was recorded</b>" in (shown := open_recording(tmp_path)._repr_html_())
    assert "healthy" not in shown


def test_a_port_that_does_not_exist(runs: Path) -> None:
    """A port out of range gives a one-line error."""
    said = run("view", runs, "--port", 99999, "--no-browser")
    assert (said.status, said.err.count("\n")) == (2, 1)
    assert "the port must be a number from 0 (any free one) to 65535, got 99999" in said.err


def test_export_csv(runs: Path, tmp_path: Path) -> None:
    """A CSV file has one line per run, recorder, step and site, and its numbers are exact to the bit."""
    assert run("export", runs, tmp_path / "x.csv") == (0, f"{tmp_path / 'x.csv'}\n", "")
    with (tmp_path / "x.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * 4 * 3
    assert list(rows[0])[:9] == ["run", "recorder", "step", "epoch", "stage", "loader", "module", "path", "dtype"]
    series = open_recording(runs)["version_1"]["gradients"]
    found = [float(row["std"]) for row in rows if (row["run"], row["recorder"]) == ("version_1", "gradients")]
    assert found == series.values("std").flatten().tolist()


def test_export_csv_of_hostile_names(hostile: Path) -> None:
    """A CSV file contains no formulas, invisible characters or line breaks from names; numbers stay numbers."""
    assert run("export", hostile, hostile / "x.csv").status == 0
    text = (hostile / "x.csv").read_text(encoding="utf-8")
    assert all(char.isprintable() or char == "\n" for char in text)
    rows = list(csv.reader(text.splitlines()))
    assert [len(row) for row in rows] == [12] * 3
    texts = [cell for row in rows for cell in row if not cell.replace(".", "").replace("-", "").isdigit()]
    assert not [cell for cell in texts if cell.startswith(("=", "+", "-", "@"))]
    assert rows[1][6] == "'" + HOSTILE.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e").replace("\n", "\\n")
    assert rows[1][9:] == ["-1.5", "nan", "inf"]


def test_export_tensors(runs: Path, hostile: Path, tmp_path: Path) -> None:
    """A .pt file loads with ``weights_only=True`` and contains exact numbers and unchanged names."""
    assert run("export", runs, tmp_path / "x.pt").status == 0
    (part,) = torch.load(tmp_path / "x.pt", weights_only=True)["runs"]["version_0"]["activations"]
    series = open_recording(runs)["version_0"]["activations"]
    assert torch.equal(part["values"][..., part["statistics"].index("rms")], series.values("rms"))
    assert (part["steps"].tolist(), part["stage"], part["loader"]) == ([0, 1, 2, 3], "train", None)
    assert part["sites"] == [["encoder.fc", "out"], ["encoder.act", "out"], ["head", "out"]]
    assert part["dtypes"] == ["float32"] * 3
    assert run("export", hostile, tmp_path / "y.pt").status == 0
    assert list(torch.load(tmp_path / "y.pt", weights_only=True)["runs"][hostile.name]) == [HOSTILE]


def test_export_parquet(runs: Path, hostile: Path, tmp_path: Path) -> None:
    """A Parquet file has the same rows, including names that are not valid Unicode."""
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    assert run("export", runs, tmp_path / "x.parquet").status == 0
    frame = pandas.read_parquet(tmp_path / "x.parquet")
    series = open_recording(runs)["version_0"]["activations"]
    chosen = frame[(frame["run"] == "version_0") & (frame["recorder"] == "activations")]
    assert chosen["rms"].tolist() == series.values("rms").flatten().tolist()
    assert run("export", hostile, tmp_path / "y.parquet").status == 0
    assert pandas.read_parquet(tmp_path / "y.parquet")["module"].tolist() == [HOSTILE] * 2


def test_export_into_nowhere(runs: Path) -> None:
    """A missing output folder gives a one-line error in every format."""
    for suffix in ("csv", "pt", "parquet"):
        logged = run("export", runs, runs / "nowhere" / f"x.{suffix}")
        assert (logged.status, logged.err.count("\n")) == (2, 1)


@pytest.mark.parametrize(("form", "begin"), [("text", "Sequential"), ("mermaid", "flowchart"), ("dot", "digraph")])
def test_graph_as_text(form: str, begin: str, runs: Path) -> None:
    """``graph`` prints text formats to the terminal."""
    logged = run("graph", runs / "version_0", "--format", form)
    assert logged.status == 0
    assert any(line.startswith(begin) for line in logged.out.splitlines())


def test_graph_at_a_depth(runs: Path) -> None:
    """At depth 1 the encoder is a single node; at depth 2 it is expanded."""
    shallow, deep = (run("graph", runs / "version_0", "--format", "text", "--depth", depth).out for depth in (1, 2))
    assert ("fc" in shallow, "fc" in deep) == (False, True)


def test_graph_as_a_picture(runs: Path, tmp_path: Path) -> None:
    """The suffix of the output file determines the format."""
    logged = run("graph", runs / "version_0", "--direction", "LR", "--output", tmp_path / "x.svg")
    assert logged == (0, f"{tmp_path / 'x.svg'}\n", "")
    assert "<svg" in (tmp_path / "x.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "step", "statistic"),
    [(["activations/mean"], 3, "mean"), (["activations"], 3, "rms"), (["activations/rms", "--step", "1"], 1, "rms")],
)
def test_graph_with_the_colors_of_a_statistic(arguments: list[str], step: int, statistic: str, runs: Path) -> None:
    """Each module shows its value at the step, by default the latest, and the legend names the statistic."""
    logged = run("graph", runs / "version_0", "--format", "dot", "--color", *arguments)
    assert logged.status == 0
    assert f"activations {statistic} at step {step}" in logged.out
    series = open_recording(runs / "version_0")["activations"]
    for name in ("encoder.fc", "head"):
        assert f"{statistic} {series[name].scalars(step)[statistic]:.3g}" in logged.out


@pytest.mark.parametrize(("depth", "count"), [(1, 2), (2, 3)])
def test_the_colored_modules_are_counted(depth: int, count: int, runs: Path, tmp_path: Path) -> None:
    """A closed box that has the value of a module inside counts as colored; an open one without a value does not."""
    options = ["--color", "activations/rms", "--depth", depth, "--output", tmp_path / "x.svg"]
    said = run("graph", runs / "version_0", *options).out.splitlines()[-1]
    total = {1: 2, 2: 4}[depth]
    assert said == f"{count} of the {total} modules that are drawn are colored by activations rms at step 3"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["version_0", "--color", "activations/rmx"], "there is no statistic 'rmx'"),
        (["version_0", "--colour", "activation"], "activations"),
        (["version_0", "--color", "activations/rms", "--step", "77"], "step 77 was not recorded"),
        (["version_1"], "has no graph.json"),
        (["."], "there are 2 runs; choose one of 'version_0', 'version_1'"),
        (["version_0", "--depth", "-1"], "depth must be an integer of at least 0"),
        (["version_0", "--format", "png", "--output", "x.svg"], "contradict each other"),
        (["version_0", "--color", "activations/rms", "--output", "x.mmd"], "the format 'mmd' has no colors"),
    ],
)
def test_graph_errors(arguments: list[str], message: str, runs: Path) -> None:
    """A graph that cannot be drawn gives a one-line error."""
    logged = run("graph", runs / arguments[0], *arguments[1:])
    assert (logged.status, logged.out, logged.err.count("\n")) == (2, "", 1)
    assert message in logged.err


@pytest.mark.parametrize("command", [["show"], ["graph", "--format", "dot", "--color", "activations"]])
def test_a_damaged_receipt_costs_only_the_findings(command: list[str], runs: Path, tmp_path: Path) -> None:
    """The records are shown, although no findings can be made from them."""
    copied = shutil.copytree(runs / "version_0", tmp_path / "run")
    (copied / "recorder" / "receipt.json").write_text("{")
    assert run("doctor", copied).status == 2
    logged = run(command[0], copied, *command[1:])
    assert (logged.status, logged.err) == (0, "")
    assert "encoder.fc" in logged.out


def test_diff_of_equal_runs(runs: Path) -> None:
    """A run compared with itself is the same, with exit status 0."""
    logged = run("diff", runs / "version_0", runs / "version_0")
    assert (logged.status, logged.out.splitlines()[2:]) == (0, ["bitwise equal in all 4 steps"])
    exact = run("diff", "--exact", runs / "version_0", runs / "version_0")
    assert (exact.status, exact.out.splitlines()[2:]) == (0, ["bitwise equal, histograms too, in all 4 steps"])


def test_diff_of_one_weight(runs: Path) -> None:
    """``diff`` prints the first divergence and a table of sites, with exit status 1."""
    logged = run("diff", runs / "version_0", runs / "version_1")
    one, other = (
        open_recording(runs)[name]["activations"]["head"].statistic("rms")[2].item()
        for name in ("version_0", "version_1")
    )
    assert logged.status == 1
    lines = logged.out.splitlines()
    assert lines[2].startswith("same until step 1, then head is the first output that differs; its parameters are not ")
    assert lines[3] == f"first difference: step 2, head (activations, rms {one:.3g} vs {other:.3g})"
    assert lines[5].split()[:3] == ["site", "recorder", "stage"]
    assert {line.split()[0] for line in lines[6:]} == {"head", "encoder.act", "encoder.fc"}
    assert len(lines) <= 20


def test_histograms_in_the_table_of_differences(tmp_path: Path) -> None:
    """Their numbers of values, which are mostly equal, are left out."""
    bins = torch.zeros(2, 2048, dtype=torch.int64)
    bins[0, 500] = bins[1, 501] = 16
    for name, counts in zip("ab", bins, strict=True):
        writer = RecordWriter(records_path(tmp_path / name / "recorder", "activations"))
        writer.begin(label="activations", group="activations")
        writer.write({"step": 0, "stage": "train"}, [site_of("fc", "out", {"rms": 1.0}, counts)])
    lines = run("diff", "--exact", tmp_path / "a", tmp_path / "b").out.splitlines()
    assert lines[-1].split()[-3:] == ["1", "0", "histogram"]


def test_small_words(tmp_path: Path) -> None:
    """One record is not called records, and the usage of ``show`` names only PATH as required."""
    write_simple(tmp_path, {0: 1.0})
    assert run("show", tmp_path).out.splitlines()[0].endswith("rms, 1 record, step 0")
    assert "bitwise equal in the only step" in run("diff", tmp_path, tmp_path).out
    assert "the following arguments are required: PATH (see --help)" in run("show").err


def test_diff_of_dtypes(tmp_path: Path) -> None:
    """If the dtype of the first site that differs is another, ``diff`` reports it as the cause."""
    record_run(tmp_path / "a")
    record_run(tmp_path / "b", dtype=torch.bfloat16)
    sentence, first = run("diff", tmp_path / "a", tmp_path / "b").out.splitlines()[2:4]
    assert sentence == "the dtype of encoder.fc is float32 in A and bfloat16 in B"
    assert first.startswith("first difference: step 0, encoder.fc (activations, ")


def test_diff_of_many_shapes(tmp_path: Path) -> None:
    """At most three lines are about differences of one kind; ``--all`` prints every one."""
    for width in (4, 8):
        writer = RecordWriter(records_path(tmp_path / str(width) / "recorder", "activations"))
        writer.begin(label="activations", group="activations")
        rows = [site_of(f"fc{place}", "out", {"rms": 1.0}, shape=(place, width)) for place in range(5)]
        writer.write({"step": 0}, rows)
    lines = run("diff", tmp_path / "4", tmp_path / "8").out.splitlines()
    assert [line for line in lines[2:] if "shape" in line] == [
        *(f"shape of fc{place} (activations): [{place}, 4] in A, [{place}, 8] in B" for place in range(3)),
        "and 2 more lines about a shape; --all prints them",
    ]
    everything = run("diff", tmp_path / "4", tmp_path / "8", "--all").out.splitlines()
    assert len([line for line in everything if line.startswith("shape of")]) == 5


def test_diff_of_several_runs(runs: Path, tmp_path: Path) -> None:
    """Several runs are compared with the first, each with its sentence; one that differs gives the exit status 1."""
    paths = [runs / f"version_{number}" for number in (0, 0, 1)]
    logged = run("diff", *paths)
    lines = logged.out.splitlines()
    assert (logged.status, lines[2], lines[-1]) == (
        1,
        "   bitwise equal in all 4 steps",
        "1 of 2 runs are the same as A",
    )
    assert [line.strip()[:30] for line in lines[4:6]] == [
        "same until step 1, then head i",
        "first difference: step 2, head",
    ]
    found = json.loads(run("diff", *paths, "--json").out)
    assert (found["same"], [each["same"] for each in found["runs"].values()]) == (False, [True, False])
    assert run("diff", paths[0]).err == (
        "lightning-recorder diff: diff compares two or more runs, or with --ranks, the ranks of one run\n"
    )


def test_diff_with_a_map_of_names(tmp_path: Path) -> None:
    """``--map`` compares modules under different names, and a wrong rule is an error."""
    write_simple(tmp_path / "a", {0: 1.0}, site="layers.0.fc")
    write_simple(tmp_path / "b", {0: 1.0}, site="blocks.0.fc")
    paths = tmp_path / "a", tmp_path / "b"
    plain = run("diff", *paths)
    assert (plain.status, plain.out.splitlines()[2][:19]) == (1, "nothing to compare:")
    assert run("diff", *paths, "--map", "layers.*=blocks.*").status == 0
    useless = run("diff", *paths, "--map", "layers.*=blocks.*", "--map", "heads=tails")
    assert "--map 'heads=tails' matches no module in A" in useless.out
    wrong = run("diff", *paths, "--map", "layers.*=blocks")
    assert (wrong.status, "with as many * on both sides" in wrong.err) == (2, True)


def test_diff_with_repeated_runs(tmp_path: Path) -> None:
    """A difference within the spread of the runs of ``--noise`` is no difference."""
    for name, value in {"a": 1.0, "n1": 1.1, "n2": 0.9, "b": 1.05, "c": 9.0}.items():
        writer = RecordWriter(records_path(tmp_path / name / "recorder", "activations"))
        writer.begin(label="activations", group="activations")
        writer.write({"step": 0}, [site_of(f"layers.{place}", "out", {"rms": value}) for place in range(8)])
    noise = "--noise", tmp_path / "n1", tmp_path / "n2"
    assert run("diff", tmp_path / "a", tmp_path / "b").status == 1
    assert run("diff", tmp_path / "a", tmp_path / "b", *noise).status == 0
    assert run("diff", tmp_path / "a", tmp_path / "c", *noise).status == 1


def test_diff_of_the_ranks_of_a_run(tmp_path: Path) -> None:
    """``--ranks`` names the replicated parameters that differ between ranks, and the sites with the largest spread."""
    writer = RecordWriter(records_path(tmp_path / "a" / "recorder", "parameters"))
    writer.begin(label="parameters", group="parameters", ranks=2)
    spread = {"rms": 1.0, "std": 1.0, "rank_mean_min": 0.25, "rank_mean_max": 0.75}
    sites = [site_of("fc", "weight", {**spread, "rank_mean_min": 0.5}), site_of("head", "weight", spread)]
    writer.write({"step": 0, "ranks": 2}, sites)
    logged = run("diff", tmp_path / "a", "--ranks")
    assert (logged.status, logged.out.splitlines()[0].split("; ")) == (
        0,
        [
            "the 2 ranks have equal replicated parameters and gradients in the only record",
            "the means differ most in head weight, by 0.5 standard deviations",
        ],
    )
    writer.write({"step": 9, "ranks": 2, "diverged": [["fc", "weight"]]}, sites)
    logged = run("diff", tmp_path / "a", "--ranks")
    assert (logged.status, logged.out.splitlines()[0]) == (
        1,
        "the 2 ranks have diverged: fc.weight differs between ranks from step 9",
    )
    assert json.loads(run("diff", tmp_path / "a", "--ranks", "--json").out)["diverged"][0]["step"] == 9
    write_simple(tmp_path / "b", {0: 1.0})
    assert run("diff", tmp_path / "b", "--ranks").err.endswith("has no records of several ranks\n")


def test_diff_within_the_tolerance(tmp_path: Path) -> None:
    """Runs that differ only in the last bits are the same, and ``diff`` reports the first bit-level difference."""
    write_simple(tmp_path / "a", {0: 1.0, 1: 1.0})
    write_simple(tmp_path / "b", {0: 1.0, 1: 1.0 + 2**-50})
    logged = run("diff", tmp_path / "a", tmp_path / "b")
    warned = f"the same in all 2 steps, but not bitwise from step 1, fc (activations, rms 1 vs {1 + 2**-50!r})"
    assert (logged.status, logged.out.splitlines()[2]) == (0, warned.replace(repr(1 + 2**-50), f"{1 + 2**-50:.17g}"))
    assert run("diff", tmp_path / "a", tmp_path / "b", "--exact").status == 1
    assert run("diff", tmp_path / "a", tmp_path / "b", "--rtol", "0", "--atol", "0").status == 1


def test_diff_of_what_only_one_has(tmp_path: Path) -> None:
    """``diff`` lists recorders, sites and steps of only one run on one line per kind, with exit status 1."""
    write_simple(tmp_path / "a", dict.fromkeys(range(12), 1.0))
    write_simple(tmp_path / "a", {0: 1.0}, "gradients")
    write_simple(tmp_path / "b", {0: 1.0})
    logged = run("diff", tmp_path / "a", tmp_path / "b")
    assert logged.status == 1
    assert logged.out.splitlines()[2:] == [
        "bitwise equal in the only step that both have",
        "",
        "recorders only in A: gradients",
        "steps (activations) only in A: 1, 2, 3, 4, 5, 6, 7, 8 and 3 more",
    ]


def test_diff_as_json(runs: Path) -> None:
    """``diff --json`` prints the result, the first divergence and each site as JSON."""
    logged = run("diff", runs / "version_0", runs / "version_1", "--json")
    found = json.loads(logged.out)
    assert (logged.status, found["same"], found["last_same"], found["steps"]) == (1, False, 1, 4)
    first = found["first"]
    assert (first["step"], first["module"], first["path"], first["recorder"]) == (2, "head", "out", "activations")
    # The changed weight affects the output of its layer and the gradients of the layers before it.
    sites = {(each["first"]["recorder"], each["first"]["module"]) for each in found["sites"]}
    assert sites == {("activations", "head"), ("gradients", "encoder.act"), ("gradients", "encoder.fc")}


@pytest.mark.parametrize("arguments", [["ls"], ["ls", "--json"], ["show", "**"], ["diff"], ["diff", "--json"]])
def test_hostile_names(arguments: list[str], hostile: Path, tmp_path: Path) -> None:
    """A name from a file cannot move the cursor, reverse text or start a new line."""
    write_simple(tmp_path / "other", {0: 1.0}, HOSTILE)
    first, *rest = arguments
    paths = [hostile, tmp_path / "other"] if first == "diff" else [hostile]
    logged = run(first, *paths, *rest, *(["--stage", HOSTILE] if first == "show" else []))
    assert logged.status == (1 if first == "diff" else 0)
    assert all(line.isprintable() for line in logged.out.splitlines())
    assert "\n<b>" not in logged.out
