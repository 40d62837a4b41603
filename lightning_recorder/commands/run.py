"""``run``: run a Python program and record its trainers, without a change to the program."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace
from importlib.metadata import entry_points
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TextIO

from lightning_recorder.errors import ArgumentError, describe_missing
from lightning_recorder.switch import FACTORY_GROUPS, VARIABLE

__all__ = ["run", "start"]

_SITE = Path(__file__).parents[1] / "site"
"""The folder with the module that Python imports at the start of a program."""


def run(arguments: Namespace, out: TextIO) -> int:
    """Replace this process by ``python PROGRAM ARGS`` with the environment variable that turns recording on.

    Arguments, ``__main__``, signals, tracebacks and the exit status are therefore the same as without recording.

    Raises:
        ArgumentError: If there is no program, if the configuration file cannot be used, or if Lightning would not find
            the recorders.
    """
    return start(arguments, "on" if arguments.config is None else _checked(Path(arguments.config)), out)


def start(arguments: Namespace, value: str, out: TextIO) -> int:
    """Replace this process by the program of a command, with ``value`` in the variable that turns recording on.

    Raises:
        ArgumentError: If there is no program, or if Lightning would not find the callbacks.
    """
    program: list[str] = arguments.program[arguments.program[:1] == ["--"] :]
    if not program:
        name = f"lightning-recorder {arguments.command}"
        raise ArgumentError(f"give a program: {name} train.py, or {name} -m package.train")
    os.environ[VARIABLE] = value
    _check_installed()
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_SITE), *filter(None, [before])])
    command = [sys.executable, *_interpreter_options(), *(["-m"] if arguments.module else []), *program]
    out.flush()
    if os.name != "nt":  # on Windows, exec returns to the shell before the program ends
        os.execv(sys.executable, command)
    return subprocess.call(command)


def _checked(path: Path) -> str:
    """Return the absolute path of the configuration file, since the program may change the current folder."""
    if not path.is_file():
        raise ArgumentError(
            f"--config: {describe_missing(path)}" if not path.exists() else f"--config: {path} is no file"
        )
    if find_spec("jsonargparse") is None:
        raise ArgumentError("--config needs jsonargparse: pip install 'lightning-recorder[yaml]'")
    return str(path.resolve())


def _check_installed() -> None:
    """Check that the package is installed with the entry points through which Lightning finds the recorders."""
    if any(each.module == "lightning_recorder.entry_point" for each in entry_points(group=FACTORY_GROUPS[0])):
        return
    raise ArgumentError("this package has no entry points here, so Lightning cannot find it: install it with pip")


def _interpreter_options() -> list[str]:
    """Return the interpreter options before ``-m``, such as ``-X dev`` in ``python -X dev -m lightning_recorder``."""
    given = sys.orig_argv[1:]
    for place, pair in enumerate(pairwise(given)):
        if pair == ("-m", "lightning_recorder"):
            return given[:place]
    return []
