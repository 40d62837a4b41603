"""Tests of ``lightning-recorder run``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands.console import run
from tests.entry_points import ROOT, write_entry_points

PROGRAM = """
import os, sys
print(sys.argv, __name__, __file__, sys.path[0], os.environ.get("LIGHTNING_RECORDER"), sys.flags.dev_mode)
if "exit" in sys.argv:
    sys.exit(7)
if "raise" in sys.argv:
    raise ValueError("the program's own")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a program, beside the entry points."""
    write_entry_points(tmp_path / "site")
    here = tmp_path / "here"
    (here / "package").mkdir(parents=True)
    (here / "train.py").write_text(PROGRAM)
    (here / "package" / "train.py").write_text(PROGRAM)
    (here / "recorder.yaml").write_text("- GraphRecorder")
    return here


def python(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder."""
    path = os.pathsep.join([str(folder.parent / "site"), str(ROOT)])
    variables = {name: value for name, value in os.environ.items() if name != "LIGHTNING_RECORDER"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**variables, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["train.py", "--config", "x", "-m", "y"],
        ["train.py", "exit"],
        ["train.py", "raise"],
        ["nowhere.py"],
        ["-m", "package.train", "--lr", "3"],
        ["-m", "package.train", "raise"],
        ["-m", "nowhere"],
    ],
    ids=" ".join,
)
def test_it_is_the_same_as_python(arguments: list[str], folder: Path) -> None:
    """Arguments, ``__main__``, output, traceback and status are those of Python with the variable."""
    command = python(folder, "-m", "lightning_recorder", "run", *arguments)
    expected = python(folder, *arguments, LIGHTNING_RECORDER="on")
    assert (command.returncode, command.stdout, command.stderr) == (
        expected.returncode,
        expected.stdout,
        expected.stderr,
    )


def test_options_of_python_are_kept(folder: Path) -> None:
    """``python -X dev -m lightning_recorder run`` runs the program with ``-X dev``."""
    options = ("-X", "dev", "-W", "ignore")
    command = python(folder, *options, "-m", "lightning_recorder", "run", "train.py")
    assert command.stdout == python(folder, *options, "train.py", LIGHTNING_RECORDER="on").stdout
    assert command.stdout.endswith(" on True\n")


def test_the_path_of_the_file_is_absolute(folder: Path) -> None:
    """The program sees the absolute path of the file, and the command replaces a value of the variable."""
    command = ("-m", "lightning_recorder", "run", "--config", "recorder.yaml", "train.py")
    out = python(folder, *command, LIGHTNING_RECORDER="off").stdout
    assert out.split()[-2] == str(folder / "recorder.yaml")


def test_no_program_is_an_error() -> None:
    """Without a program, the command says how to write one."""
    said = run("run")
    assert said.status == 2
    assert said.err.startswith("lightning-recorder run: give a program: lightning-recorder run train.py")


def test_a_missing_file_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing configuration file ends the command before the program, and the closest name is suggested."""
    monkeypatch.chdir(folder)
    said = run("run", "--config", "record.yaml", "train.py")
    assert said.status == 2
    assert "--config: there is no 'record.yaml' in the current folder: did you mean 'recorder.yaml'?" in said.err


def test_a_copy_that_is_not_installed_is_an_error(folder: Path) -> None:
    """If Lightning would not find the recorders, the command says so instead of recording nothing."""
    paths = [str(ROOT), *(path for path in sys.path if path)]
    about = f"import sys; sys.path[:0] = {paths!r}; import importlib.metadata as m; m.entry_points = lambda **_: ()"
    code = f"{about}; from lightning_recorder.commands import main; sys.exit(main(['run', 'train.py']))"
    done = python(folder, "-c", code)
    assert done.returncode == 2
    assert "has no entry points here" in done.stderr


def test_a_sitecustomize_of_the_environment_is_run(tmp_path: Path) -> None:
    """The module that Python would import at its start is imported, too, and the folder of ours is on no path."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("print('own')")
    (tmp_path / "train.py").write_text("import sys; print([each for each in sys.path if each.endswith('site')])")
    site = write_entry_points(tmp_path / "entry")
    path = os.pathsep.join(map(str, [tmp_path / "own", site, ROOT]))
    done = python(tmp_path, "-m", "lightning_recorder", "run", "train.py", PYTHONPATH=path)
    assert (done.stdout.splitlines()[-2:], done.stderr) == (["own", "[]"], "")
