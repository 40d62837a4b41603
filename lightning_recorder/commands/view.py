"""``view``: serve the page of a run, or write it to a file."""

from __future__ import annotations

import webbrowser
from argparse import Namespace
from pathlib import Path
from typing import TextIO

from lightning_recorder.commands.terminal import printable
from lightning_recorder.errors import ArgumentError
from lightning_recorder.page import page_document
from lightning_recorder.page.live import PageServer
from lightning_recorder.recordings import open_recording

__all__ = ["run"]


def run(arguments: Namespace, out: TextIO) -> int:
    """Write the page to a file, or serve it until Ctrl-C."""
    if arguments.output is not None:
        return _write(arguments, out)
    server = PageServer(arguments.paths, arguments.port, limit=arguments.limit * 1_000_000)
    out.write(f"{server.address}\nThe page follows the run; Ctrl-C ends the server.\n")
    out.flush()
    if not arguments.no_browser:
        webbrowser.open(server.address_to_open_once())
    server.serve()
    return 0


def _write(arguments: Namespace, out: TextIO) -> int:
    runs = {
        (name if len(arguments.paths) == 1 else str(run.log_dir)): run
        for path in arguments.paths
        for name, run in open_recording(path).runs.items()
    }
    if not any(run.graph is not None or run.has_records or run.check is not None for run in runs.values()):
        raise ArgumentError(f"{' and '.join(map(repr, arguments.paths))} has no records to show: nothing was recorded")
    path = Path(arguments.output)
    page_document(runs, path, limit=arguments.limit * 1_000_000)
    out.write(f"{printable(str(path), None)}\n")
    return 0
