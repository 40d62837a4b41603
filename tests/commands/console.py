"""Command line runner for the tests, without a subprocess."""

from __future__ import annotations

import contextlib
import io
from typing import NamedTuple

from lightning_recorder.commands import main


class Said(NamedTuple):
    """The exit status and the output of a command."""

    status: int
    out: str
    err: str


def run(*arguments: object) -> Said:
    """Run the command line with the given arguments."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main([str(each) for each in arguments])
        except SystemExit as ended:  # raised by argparse
            status = int(ended.code or 0)
    return Said(status, out.getvalue(), err.getvalue())
