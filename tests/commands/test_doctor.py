"""Tests of ``doctor``, and of the parts of ``show`` that answer which sites."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
import termios
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from torch import nn

from lightning_recorder.graph.model import Edge, Graph, Node
from lightning_recorder.insight import RULES, Finding, findings_from_json, findings_to_json
from lightning_recorder.recordings import RecordWriter, open_recording, records_path
from lightning_recorder.watch import StepSeries
from tests.commands.console import run
from tests.recordings.runs import record_run, site_of


def kill(net: nn.Module) -> None:
    """Make the ReLU of the net return zeros."""
    nn.init.constant_(net.get_submodule("encoder.fc").bias, -100.0)  # type: ignore[arg-type]  # a parameter


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a healthy run and one whose ReLU dies at step 2."""
    folder = tmp_path_factory.mktemp("runs")
    record_run(folder / "healthy", steps=range(6))
    record_run(folder / "sick", steps=range(6), change=kill, at=2)
    return folder


def test_the_first_line_names_the_culprit(runs: Path) -> None:
    """The output begins with the worst finding; the details and the command that shows more follow."""
    said = run("doctor", runs / "sick")
    lines = said.out.splitlines()
    assert said.status == 1
    assert lines[0].startswith(
        "warning: encoder.act returns only zeros from step 2 on: its input from encoder.fc is at"
    )
    assert lines[1] == "  measured zero fraction 1"
    assert lines[2] == "  healthy  at most 0.8, for a ReLU about 0.5"
    words = lines[3].split()
    assert (words[:2], len(words[2]), words[4:]) == (
        ["trend", "zero_fraction"],
        6,
        ["to", "1,", "steps", "0", "to", "5"],
    )
    options = "encoder.act --recorder activations --statistic zero_fraction --details"
    assert "  rule     dead-output, steps 2 to 5 (4 records)" in lines
    assert f"  show     lightning-recorder show {runs / 'sick'} {options}" in lines
    assert lines[-1] == "1 finding in 6 records of 6 sites, steps 0 to 5"
    assert len(lines) <= 20


def test_the_command_that_shows_more_works(runs: Path) -> None:
    """The printed command shows the statistic of the finding."""
    line = next(each for each in run("doctor", runs / "sick").out.splitlines() if each.startswith("  show"))
    said = run(*line.split()[2:])
    assert said.status == 0
    assert said.out.splitlines()[1].split() == ["step", "zero_fraction"]


def test_long_names_stay_whole(tmp_path: Path) -> None:
    """A line has the whole name of its module, and the command works, however long the name and the path are."""
    folder, name = tmp_path.joinpath(*["experiment-with-a-long-name"] * 9), ".".join(["backbone"] * 40)
    writer = RecordWriter(records_path(folder / "recorder", "activations"))
    writer.begin(label="activations", group="activations")
    for step in range(4):
        writer.write({"step": step}, [site_of(name, "out", {"rms": 0.0, "zero_fraction": 1.0, "count": 9.0})])
    lines = run("doctor", folder).out.splitlines()
    assert name in lines[0]
    said = run(*shlex.split(next(each for each in lines if each.startswith("  show")))[2:])
    assert (said.status, said.err) == (0, "")


def test_a_relative_path_stays_relative(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command has a relative path if the argument is one."""
    monkeypatch.chdir(runs)
    for path in ("sick", "sick/recorder", "."):
        lines = run("doctor", path).out.splitlines()
        assert [each.split()[3] for each in lines if each.startswith("  show")] == ["sick"]


def test_a_healthy_run(runs: Path) -> None:
    """A healthy run has one line and the exit status 0."""
    assert run("doctor", runs / "healthy") == (0, "healthy: no findings in 6 records of 6 sites, steps 0 to 5\n", "")


def test_a_rule_can_be_left_out(runs: Path) -> None:
    """``--ignore`` leaves out the findings of a rule; an unknown rule is an error that lists all rules."""
    assert run("doctor", runs / "sick", "--ignore", "dead-output").status == 0
    said = run("doctor", runs / "sick", "--ignore", "dead-outputs")
    assert said.status == 2
    assert "did you mean 'dead-output'?" in said.err
    assert not [rule.name for rule in RULES if repr(rule.name) not in said.err]


def test_many_findings_fit_on_a_screen(tmp_path: Path) -> None:
    """The first finding is printed in full and six more in one line each; ``--all`` prints everything."""
    names = [f"act_{letter}" for letter in "abcdefghij"]
    nodes = [Node(0, "module", "", None, 0), Node(1, "input", "input", 0, 1)]
    for number, name in enumerate(names, 1):  # all of them take the input of the model
        nodes += [Node(2 * number, "module", name, 0, 1, "ReLU"), Node(2 * number + 1, "op", "relu", 2 * number, 2)]
    graph = Graph(tuple(nodes), tuple(Edge(1, node.id) for node in nodes if node.kind == "op"))
    writer = RecordWriter(records_path(tmp_path / "recorder", "activations"))
    writer.begin(label="activations", group="activations")
    for step in range(4):
        writer.write({"step": step}, [site_of(name, "out", {"rms": 0.0, "zero_fraction": 1.0}) for name in names])
    (tmp_path / "recorder" / "graph.json").write_text(json.dumps(graph.to_json()))
    lines = run("doctor", tmp_path).out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("warning")] == names[:7]
    assert (len(lines) <= 20, lines[-2]) == (True, "and 3 more; --all prints everything")
    everything = run("doctor", tmp_path, "--all").out.splitlines()
    assert len([line for line in everything if line.startswith("  show")]) == 10


def test_a_finding_about_a_block(tmp_path: Path) -> None:
    """The command that shows more works if the module of the finding is not recorded itself, and a step is singular."""
    writer = RecordWriter(records_path(tmp_path / "recorder", "gradients"))
    writer.begin(label="gradients", group="gradients")
    rms = {"blocks.0.fc": 40.0, "blocks.1.fc": 1.0, "blocks.2.fc": 1.0}
    sites = [site_of(name, "out", {"rms": each, "count": 9.0}, shape=(9,)) for name, each in rms.items()]
    writer.write({"step": 7}, sites)
    lines = run("doctor", tmp_path).out.splitlines()
    assert lines[0].startswith("warning: the gradient grows 40-fold on its way back through blocks.1")
    assert any(each.startswith("  rule     gradient-step, step 7 (1 record); first ") for each in lines)
    said = run(*shlex.split(next(each for each in lines if each.startswith("  show")))[2:])
    assert said.status == 0
    assert "blocks.1.fc" in said.out


def test_a_finding_of_the_watch(tmp_path: Path) -> None:
    """The command for a module that is not recorded shows those in it; the script that runs the step again is named."""
    record_run(tmp_path, steps=range(6))
    folder = tmp_path / "recorder" / "incidents" / "step-3"
    folder.mkdir(parents=True)
    finding = Finding("non-finite", "critical", "encoder", "", 3, 3, 1, "NaN first in the encoder", "", "", "finite")
    (folder / "finding.json").write_text(json.dumps(findings_to_json([finding])))
    assert "  again" not in run("doctor", tmp_path).out
    (folder / "replay.py").touch()
    lines = run("doctor", tmp_path).out.splitlines()
    command = f"python {folder / 'replay.py'}"
    assert f"  again    {command} CHECKPOINT  (runs the step again, from a checkpoint before it)" in lines
    (folder / "parameters.safetensors").touch()
    lines = run("doctor", tmp_path).out.splitlines()
    assert lines[0] == "critical: NaN first in the encoder"
    assert f"  again    {command}  (runs the step again)" in lines
    said = run(*shlex.split(next(each for each in lines if each.startswith("  show")))[2:])
    assert (said.status, "encoder.fc" in said.out) == (0, True)


def test_several_runs(runs: Path) -> None:
    """Each of several runs is examined under its name; one with findings decides the exit status."""
    said = run("doctor", runs)
    assert (said.status, [line for line in said.out.splitlines() if line in ("healthy:", "sick:")]) == (
        1,
        ["healthy:", "sick:"],
    )


def test_one_of_several_runs_has_no_records(runs: Path, tmp_path: Path) -> None:
    """A run without records is named beside the others."""
    shutil.copytree(runs / "healthy", tmp_path / "healthy")
    RecordWriter(records_path(tmp_path / "crashed" / "recorder", "activations")).begin(label="activations", group="")
    said = run("doctor", tmp_path)
    assert (said.status, said.out.splitlines()[0]) == (0, "healthy:")
    assert said.out.endswith("\n\ncrashed:\nnothing was recorded\n")
    (tmp_path / "crashed" / "recorder" / "check.json").write_text('{"answers": []}')
    assert run("doctor", tmp_path).out.endswith("\n\ncrashed:\nonly a check: lightning-recorder view shows it\n")


def test_doctor_as_json(runs: Path) -> None:
    """``--json`` prints the findings of ``open_recording(…).findings`` in the form of ``findings.json``."""
    (one, other) = json.loads(run("doctor", runs, "--json").out)["runs"]
    assert (one["name"], one["healthy"], one["findings"]) == ("healthy", True, [])
    assert findings_from_json(other) == open_recording(runs / "sick").findings


def test_nothing_to_examine(tmp_path: Path) -> None:
    """A run without records is an error, not a healthy run."""
    (tmp_path / "recorder").mkdir()
    (tmp_path / "recorder" / "receipt.json").write_text("{}")
    said = run("doctor", tmp_path)
    assert (said.status, said.out) == (2, "")
    assert "has no records to examine" in said.err


def test_nothing_but_the_loss_to_examine(tmp_path: Path) -> None:
    """A run whose steps were watched without any record says so."""
    series = StepSeries(tmp_path / "recorder", None, label="watch", is_logged=bool)
    for step in range(3):
        series.add(step, 0, 1.0, 0.5)
    series.end()
    said = run("doctor", tmp_path)
    assert said.status == 0
    first, *_, last = said.out.splitlines()
    assert first.startswith("not examined: activations, gradients and parameters, because no record of training has ")
    assert last == "no findings in the loss and the gradient norm of 3 steps; nothing else was recorded"


def test_hostile_names(tmp_path: Path) -> None:
    """A name cannot move the cursor, nor add a line or a command to the output."""
    name = "a\x1b[31m\n; rm -rf x"
    writer = RecordWriter(records_path(tmp_path / "recorder", "activations"))
    writer.begin(label="activations", group="activations")
    for step in range(3):
        writer.write({"step": step}, [site_of(name, "out", {"zero_fraction": 1.0, "rms": 0.0})])
    folder = tmp_path / "recorder" / "incidents" / "step-3"
    folder.mkdir(parents=True)
    texts = "\x1b[2Jwhy", "\x1b[2Jnext", "below 3\x1b[2J"
    finding = Finding("non-finite", "critical", name, "", 3, 3, 1, "NaN \x1b[2J", *texts, {"\x1b[2J": 1.0, name: 2.0})
    (folder / "finding.json").write_text(json.dumps(findings_to_json([finding])))
    said = run("doctor", tmp_path, "--all")
    assert said.status == 1
    assert "\x1b" not in said.out
    assert not any(line.lstrip().startswith("; rm") for line in said.out.splitlines())


def test_show_several_patterns(runs: Path) -> None:
    """Several patterns show the sites that match any of them, in the order of execution."""
    said = run("show", runs / "sick", "head", "encoder.f*", "--recorder", "activations", "--statistic", "rms")
    names = [line.split()[0] for line in said.out.splitlines()[2:]]
    assert names == ["encoder.fc", "head"]
    wrong = run("show", runs / "sick", "head", "nothing")
    assert (wrong.status, "no site matches 'nothing'" in wrong.err) == (2, True)


def test_show_all_sites(runs: Path) -> None:
    """Without a site, ``show`` lists all sites of each recorder, the unusual ones first; here a dead activation."""
    said = run("show", runs / "sick", "--recorder", "activations", "--statistic", "zero_fraction")
    lines = [line.split() for line in said.out.splitlines()]
    assert lines[0][:3] == ["activations,", "train:", "zero_fraction,"]
    assert lines[1] == ["site", "last", "min", "max"]
    assert lines[2][:4] == ["1", "encoder.act", "out", "1"]
    assert [line[0] for line in lines[3:5]] == ["encoder.fc", "head"]


def test_show_where(runs: Path) -> None:
    """``--where`` lists the sites that meet a condition, with the steps and the values."""
    said = run("show", runs / "sick", "--where", "zero_fraction>=0.9", "--recorder", "activations")
    lines = [line.split() for line in said.out.splitlines()]
    assert lines == [
        ["site", "recorder", "records", "steps", "zero_fraction"],
        ["encoder.act", "out", "activations", "4", "of", "6", "2-5", "1", "to", "1"],
    ]


@pytest.mark.parametrize(
    ("conditions", "sites"),
    [
        (["nan_count>0"], []),
        (["count == 80"], ["encoder.fc", "encoder.act"]),
        (["count!=80"], ["head"]),
        (["rms<0.001", "count>1"], ["encoder.act"]),
        (["rms<0.001", "zero_fraction<0.5"], []),
    ],
)
def test_conditions(conditions: list[str], sites: list[str], runs: Path) -> None:
    """All conditions must hold in the same record."""
    options = [word for each in conditions for word in ("--where", each)]
    said = run("show", runs / "sick", *options, "--recorder", "activations")
    assert [line.split()[0] for line in said.out.splitlines()[1:]] == sites
    assert (said.out == f"no site has {' and '.join(conditions)}\n") is (not sites)


@pytest.mark.parametrize(
    ("condition", "message"),
    [("nan_count", "takes a statistic"), ("rms>much", "takes a statistic"), ("norm>1", "there is no statistic 'norm'")],
)
def test_wrong_conditions(condition: str, message: str, runs: Path) -> None:
    """A condition that cannot be read, or with an unknown statistic, is an error."""
    said = run("show", runs / "sick", "--where", condition)
    assert (said.status, said.out, message in said.err) == (2, "", True)


def in_terminal(columns: int, *arguments: object, **variables: str) -> str:
    """Return the output of a command in a terminal with a number of columns."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    known = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    command = [sys.executable, "-m", "lightning_recorder", *map(str, arguments)]
    with subprocess.Popen(command, stdout=theirs, env={**known, "TERM": "xterm-256color", **variables}):
        os.close(theirs)
        out = bytearray()
        with contextlib.suppress(OSError):  # Linux raises it at the end
            while part := os.read(ours, 1 << 16):
                out += part
    os.close(ours)
    return out.decode().replace("\r\n", "\n")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no pseudoterminals")
def test_a_terminal_gets_lines_of_its_width_and_colors(runs: Path) -> None:
    """In a terminal, lines are wrapped at its width and severities have colors; a pipe has whole lines without any."""
    piped = run("doctor", runs / "sick").out
    for columns in (60, 100):
        out = in_terminal(columns, "doctor", runs / "sick")
        assert out.startswith("\x1b[1;33mwarning:\x1b[0m encoder.act returns only zeros")
        plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
        assert [line for line in plain.splitlines() if len(line) > columns and "  show" not in line] == []
        assert plain.split() == piped.split() or columns < 80  # narrow bars
    assert "\x1b" not in piped
    assert "\x1b" not in in_terminal(100, "doctor", runs / "sick", NO_COLOR="1")
    assert "\x1b" not in in_terminal(100, "doctor", runs / "sick", TERM="dumb")


@pytest.mark.parametrize("form", ["text", "json", "sarif", "junit"])
def test_the_status_is_the_same_in_each_format(runs: Path, form: str) -> None:
    """A healthy run has status 0, one with a finding 1, and the output names the module of the finding."""
    assert run("doctor", runs / "healthy", "--format", form).status == 0
    said = run("doctor", runs / "sick", "--format", form)
    assert (said.status, said.err) == (1, "")
    assert "encoder.act" in said.out
    assert run("doctor", runs / "sick", "--format", form, "--ignore", "dead-output").status == 0


def test_json_is_short_for_a_format(runs: Path) -> None:
    """``--json`` is ``--format json``, and the two do not go together."""
    assert run("doctor", runs, "--json") == run("doctor", runs, "--format", "json")
    assert run("doctor", runs, "--json", "--format", "sarif").status == 2


def test_the_formats_of_other_tools(runs: Path) -> None:
    """SARIF has a result for each finding, and JUnit a suite for each run with one failure."""
    (found,) = json.loads(run("doctor", runs, "--format", "sarif").out)["runs"]
    assert [(each["ruleId"], each["properties"]["run"]) for each in found["results"]] == [("dead-output", "sick")]
    suites = ET.fromstring(run("doctor", runs, "--format", "junit").out)
    assert [(each.get("name"), each.get("failures")) for each in suites] == [("healthy", "0"), ("sick", "1")]
    (failure,) = suites.iter("failure")
    assert str(failure.get("message")).startswith("encoder.act returns only zeros from step 2 on")
