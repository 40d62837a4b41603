"""Tests of help, errors and pipes of the command line."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_recorder.commands.main import _parser
from lightning_recorder.recordings import WATCH, RecordWriter, records_path
from tests.commands.console import run
from tests.recordings.runs import site_of, write_simple

COMMANDS = (
    *(
        "run",
        "check",
        "ls",
        "show",
        "doctor",
        "view",
        "report",
        "export",
        "graph",
        "diff",
        "scale",
        "precision",
        "submit",
    ),
)


def process(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lightning_recorder", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload,no-any-return]  # options of run


def test_the_commands_are_those_of_the_parser() -> None:
    """The tests of this file cover every command."""
    (commands,) = (each for each in _parser()._actions if isinstance(each, argparse._SubParsersAction))
    assert tuple(commands.choices) == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str) -> None:
    """The help of each command exits with status 0 and contains an example."""
    logged = run(command, "--help")
    assert logged.status == 0
    assert f"example:\n  lightning-recorder {command} " in logged.out


def test_help_of_diff_states_the_tolerance() -> None:
    """The help of ``diff`` states the default tolerances and their reason."""
    logged = run("diff", "--help")
    assert "by default 1e-3" in logged.out
    assert "by default 1e-7" in logged.out
    assert "another number of threads" in logged.out


def imports_of(*arguments: str) -> tuple[str, set[str]]:
    """Return the output of a command, and the modules that it has imported."""
    code = f"import sys; from lightning_recorder.commands import main; main({arguments!r})"
    found = subprocess.run([sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True, check=True)
    return found.stdout, {line.rpartition("|")[2].strip() for line in found.stderr.splitlines()}


def test_help_does_not_wait_for_torch() -> None:
    """The help is printed without importing torch."""
    out, modules = imports_of("--help")
    assert "diff" in out
    assert not {"torch", "numpy"} & modules


def test_a_page_does_not_wait_for_torch(tmp_path: Path) -> None:
    """The page of a run, and that of several with their table, is written without importing torch."""
    for name in ("a", "b", "c"):
        write_simple(tmp_path / name, {0: 1.0, 1: 2.0})
        writer = RecordWriter(records_path(tmp_path / name / "recorder", WATCH))
        writer.begin(label=WATCH, group=WATCH)
        writer.write({"step": 0}, [site_of("loss", "", {"value": 1.0})])
    for runs in (str(tmp_path / "a"), str(tmp_path)):
        out, modules = imports_of("view", runs, "--output", str(tmp_path / "page.html"))
        assert "page.html" in out
        assert "numpy" in modules
        assert "torch" not in modules


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["ls"],
        ["run"],
        ["ls", "nowhere\x1b[31m\nsecond"],
        ["show", "nowhere", "*"],
        ["show", "nowhere", "--where", "nan_count"],
        ["doctor", "nowhere"],
        ["export", "nowhere", "x.csv"],
        ["export", "nowhere", "x.xlsx"],
        ["graph", "nowhere"],
        ["graph", "nowhere", "--depth", "deep"],
        ["diff", "nowhere", "nowhere"],
        ["diff", "nowhere", "nowhere", "--rtol", "much"],
    ],
    ids=lambda arguments: " ".join(arguments)[:20].encode("unicode_escape").decode(),
)
def test_errors_are_one_line(arguments: list[str]) -> None:
    """Every error is a single printable line, with exit status 2."""
    logged = run(*arguments)
    assert (logged.status, logged.out, logged.err.count("\n")) == (2, "", 1)
    assert logged.err.startswith("lightning-recorder")
    assert logged.err[:-1].isprintable()


def test_as_a_module(tmp_path: Path) -> None:
    """``python -m lightning_recorder`` runs the command line and returns its exit status."""
    write_simple(tmp_path / "a", {0: 1.0})
    write_simple(tmp_path / "b", {0: 2.0})
    assert process("ls", str(tmp_path)).stdout == run("ls", tmp_path).out
    assert process("diff", str(tmp_path / "a"), str(tmp_path / "b")).returncode == 1


def test_a_pipe_that_is_closed(tmp_path: Path) -> None:
    """A closed pipe ends the program without an error message."""
    writer = write_simple(tmp_path, {})
    for site in range(40):
        writer.write({"step": site}, [])
    write_simple(tmp_path, {0: 1.0}, site="x" * 100)
    command = [sys.executable, "-m", "lightning_recorder", "show", str(tmp_path), "*"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.close()
    assert child.stderr.read() == b""
    child.stderr.close()
    assert child.wait() == 141


def test_a_terminal_without_bars(tmp_path: Path) -> None:
    """On an ASCII terminal, all output is ASCII."""
    write_simple(tmp_path, {step: float(step) for step in range(8)}, site="名前")
    environment = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PYTHONPATH": ":".join(sys.path)}
    done = process("show", str(tmp_path), "*", env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\u540d\\u524d out " in done.stdout
    assert "_.-=+*#@" in done.stdout
