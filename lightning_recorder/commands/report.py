"""``report``: write the verdict, graph, charts and settings of a run for a review."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TextIO

from lightning_recorder.commands.terminal import printable
from lightning_recorder.errors import ArgumentError
from lightning_recorder.page.report import write_report
from lightning_recorder.recordings import open_recording

__all__ = ["run"]

_FORMATS = (".md", ".markdown", ".html", ".htm")


def run(arguments: Namespace, out: TextIO) -> int:
    """Write the report of a run, and print the paths of its files."""
    path = Path(arguments.output)
    if path.suffix.lower() not in _FORMATS:
        raise ArgumentError(
            f"the file must end in {' or '.join(_FORMATS)}, got {path.name!r}; a browser prints .html as PDF"
        )
    recorded = open_recording(arguments.path).run
    if not recorded.has_records and recorded.graph is None and recorded.check is None:
        raise ArgumentError(f"{arguments.path!r} has no records to report: nothing was recorded")
    for each in write_report(recorded, path):
        out.write(f"{printable(str(each), None)}\n")
    return 0
