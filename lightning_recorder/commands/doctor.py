"""``doctor``: what is wrong in a run."""

from __future__ import annotations

import json
import os
import shlex
import textwrap
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from lightning_recorder.commands.terminal import counted, number, printable, spark
from lightning_recorder.errors import ArgumentError, DumpError
from lightning_recorder.insight import Finding, check_rules, findings_to_json
from lightning_recorder.recordings import WATCH, Run, open_recording
from lightning_recorder.recordings.examine import examine

__all__ = ["bad_findings", "run"]

_MOST_LINES = 6  # after the first finding, which is printed in full
_FEW = 5  # modules in a list
_WIDTH = 110  # characters
_BARS = 40
_LONGEST = 10_000  # characters of a line or a name; only those of a damaged file are longer


def run(arguments: Namespace, out: TextIO) -> int:
    """Print the findings of each run; return 1 if there is one that is no note, else 0."""
    runs = open_recording(arguments.path).runs
    examined = {name: each for name, each in runs.items() if each.has_records}
    if not examined:
        raise ArgumentError(f"{arguments.path!r} has no records to examine: nothing was recorded")
    ignored = check_rules("--ignore", arguments.ignore)
    found = {name: examine(each, ignored) for name, each in examined.items()}
    if arguments.json:
        out.write(json.dumps({"runs": [_about(examined[name], each) for name, each in found.items()]}, indent=1) + "\n")
    else:
        for place, (name, findings) in enumerate(found.items()):
            # The first line of the output of a single run is its first finding.
            title = [f"{printable(name, None)}:"] if len(runs) > 1 else []
            lines = [*title, *_lines(findings, examined[name], arguments, out)]
            out.write("\n" * bool(place) + "\n".join(lines) + "\n")
        for name in [each for each in runs if each not in examined]:
            out.write(f"\n{printable(name, None)}:\nnothing was recorded\n")
    return int(any(not each.is_note for findings in found.values() for each in findings))


def bad_findings(run: Run) -> list[Finding]:
    """Return the findings of a run without notes; none if one of its files is damaged, as its records may not be."""
    with suppress(DumpError):
        return [each for each in run.findings if not each.is_note]
    return []


def _about(run: Run, findings: list[Finding]) -> dict[str, Any]:
    return {"name": run.name, **findings_to_json(findings)}


def _lines(findings: list[Finding], run: Run, arguments: Namespace, out: TextIO) -> list[str]:
    in_full = arguments.all
    # The commands have relative paths if the user works with them.
    place: Callable[[Path], str] = str if Path(arguments.path).is_absolute() else os.path.relpath
    # Causes come first, so the first finding matters most. The output fits on a screen.
    shown = findings if in_full else findings[: 1 + _MOST_LINES]
    lines: list[str] = []
    for rank, each in enumerate(shown):
        lines.append(printable(each.line, _LONGEST))
        if in_full or (rank == 0 and not each.is_note):
            lines += [f"  {line}" for line in _details(each, run, place, out)]
    if len(findings) > len(shown):
        lines.append(f"and {len(findings) - len(shown)} more; --all prints everything")
    notes = sum(each.is_note for each in findings)
    count = [counted(len(findings) - notes, "finding") if len(findings) > notes else "healthy: no findings"]
    count += [counted(notes, "note")] if notes else []
    return [*lines, f"{', '.join(count)} in {_examined(run)}"]


def _examined(run: Run) -> str:
    series = [run[label] for label in run if label != WATCH]
    if not series:
        return f"the loss and the gradient norm of {counted(len(run[WATCH].steps), 'step')}; nothing else was recorded"
    steps = sorted({step for each in series for step in each.steps})
    sites = sum(len(each) for each in series)
    span = f", {_span(steps[0], steps[-1])}" if steps else ""
    return f"{counted(len(steps), 'record')} of {sites} sites{span}"


def _span(first: int | None, last: int | None) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _details(finding: Finding, run: Run, place: Callable[[Path], str], out: TextIO) -> list[str]:
    values = ", ".join(f"{printable(name)} {number(value)}" for name, value in finding.numbers.items())
    steps = f"{_span(finding.first_step, finding.last_step)} ({counted(finding.records, 'record')})"
    rows = [("rule", f"{finding.rule}, {steps}" + (f"; {values}" if values else ""))]
    rows += [("healthy", finding.usual), *_bars(finding, out)]
    rows += [("why", finding.why), ("next", finding.next)]
    if finding.others:
        more = len(finding.others) - _FEW
        names = ", ".join(printable(each, _LONGEST) for each in finding.others[:_FEW])
        rows.append(("also", names + (f" and {more} more" if more > 0 else "")))
    rows.append(("show", _command(finding, run, place(run.log_dir))))
    script = run.directory / "incidents" / f"step-{finding.first_step}" / "replay.py"
    if finding.rule == "non-finite" and script.exists():
        rows.append(("again", printable(shlex.join(["python", place(script)]), None) + "  (runs the step again)"))
    return [line for name, text in rows for line in _row(name, text)]


def _row(name: str, text: str) -> list[str]:
    if name in ("show", "again", "trend"):  # a command is copied as a whole
        return [f"{name:<8}{text}"]
    options: dict[str, Any] = {"initial_indent": f"{name:<8}", "subsequent_indent": " " * 8}
    return textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False, **options)


def _bars(finding: Finding, out: TextIO) -> list[tuple[str, str]]:
    trace = finding.trace
    if trace is None or not trace.values:
        return []
    bars = spark(trace.values, _BARS, out)
    ends = f"{number(trace.values[0])} to {number(trace.values[-1])}"
    span = _span(trace.steps[0], trace.steps[-1])
    return [("trend", f"{printable(trace.statistic)} {bars} {ends}, {span}")]


def _command(finding: Finding, run: Run, log_dir: str) -> str:
    """Return the command that shows the statistics of the module, or of the modules in it if it is not recorded."""
    words = ["lightning-recorder", "show", log_dir]
    trace = finding.trace
    series = [run[label] for label in run if trace is None or label == trace.recorder]
    if finding.module and any(finding.module in each for each in series):
        words.append(finding.module)
    elif finding.module and any(site.name.startswith(f"{finding.module}.") for each in series for site in each):
        words.append(f"{finding.module}.*")
    if trace is not None:
        words += ["--recorder", trace.recorder, "--statistic", trace.statistic]
    return printable(shlex.join([*words, "--details"]), None)
