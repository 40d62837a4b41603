"""``doctor``: show the findings of runs."""

from __future__ import annotations

import json
import os
import shlex
import textwrap
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from lightning_recorder.commands.terminal import counted, number, painted, printable, spark, width_of
from lightning_recorder.errors import ArgumentError, DumpError
from lightning_recorder.insight import Diagnosis, Finding, check_rules
from lightning_recorder.insight.exchange import ExaminedRun, to_junit, to_sarif
from lightning_recorder.recordings import WATCH, Run, open_recording
from lightning_recorder.recordings.diagnose import diagnose
from lightning_recorder.records.file import STATES

__all__ = ["bad_findings", "run"]

_MOST_LINES = 6  # the most lines after the first finding, which is printed in full
_FEW = 5  # the most modules in a list
_WIDTH = 110  # the most characters of a line
_INDENT, _LABEL = 2, 9  # the indentation of a row and the width of its label, in characters
_BARS = 40
_LONGEST = 10_000  # the most characters of a line or a name; only damaged files have longer ones


def run(arguments: Namespace, out: TextIO) -> int:
    """Print the findings of each run. Return 1 if any finding is not a note, else 0."""
    runs = open_recording(arguments.path).runs
    examined = {name: each for name, each in runs.items() if each.has_records}
    if not examined:
        hint = (
            "lightning-recorder view shows its check"
            if any(each.check for each in runs.values())
            else "nothing was recorded"
        )
        raise ArgumentError(f"{arguments.path!r} has no records to examine: {hint}")
    ignored = check_rules("--ignore", arguments.ignore)
    found = {name: diagnose(each, ignored) for name, each in examined.items()}
    if arguments.format == "json":
        out.write(json.dumps({"runs": [_about(examined[name], each) for name, each in found.items()]}, indent=1) + "\n")
    elif arguments.format == "sarif":
        out.write(json.dumps(to_sarif(_exchanged(runs, found, ignored)), indent=1) + "\n")
    elif arguments.format == "junit":
        out.write(to_junit(_exchanged(runs, found, ignored)))
    else:
        for place, (name, diagnosis) in enumerate(found.items()):
            # The first line of the output of a single run is its first finding.
            title = [painted(f"{printable(name, None)}:", "title", out)] if len(runs) > 1 else []
            lines = [*title, *_lines(diagnosis, examined[name], arguments, out)]
            out.write("\n" * bool(place) + "\n".join(lines) + "\n")
        for name in [each for each in runs if each not in examined]:
            what = "only a check: lightning-recorder view shows it" if runs[name].check else "nothing was recorded"
            out.write(f"\n{printable(name, None)}:\n{what}\n")
    return int(any(each.bad for each in found.values()))


def bad_findings(run: Run) -> list[Finding]:
    """Return the findings of a run except notes. If a file is damaged, return none, so that records are still shown."""
    with suppress(DumpError):
        return [each for each in run.findings if not each.is_note]
    return []


def _exchanged(runs: Mapping[str, Run], found: Mapping[str, Diagnosis], ignored: Sequence[str]) -> list[ExaminedRun]:
    return [
        ExaminedRun(name, run.directory, found.get(name), run.graph if name in found else None, ignored)
        for name, run in runs.items()
    ]


def _about(run: Run, found: Diagnosis) -> dict[str, Any]:
    return {"name": run.name, **found.to_json()}


def _lines(found: Diagnosis, run: Run, arguments: Namespace, out: TextIO) -> list[str]:
    in_full, findings = arguments.all, found.findings
    # Print commands with relative paths if the user gave a relative path.
    place: Callable[[Path], str] = str if Path(arguments.path).is_absolute() else os.path.relpath
    # Causes come first, so the first finding matters most. The output fits on a screen.
    shown = findings if in_full else findings[: 1 + _MOST_LINES]
    lines: list[str] = []
    for rank, each in enumerate(shown):
        lines += _sentence(each.severity, printable(each.line, _LONGEST).removeprefix(f"{each.severity}:"), out)
        if in_full or (rank == 0 and not each.is_note):
            lines += [f"  {line}" for line in _details(each, run, place, out)]
    if len(findings) > len(shown):
        lines.append(f"and {len(findings) - len(shown)} more; --all prints everything")
    for gap in found.gaps if in_full else found.open:
        kind = "note" if gap.is_expected else "warning"
        lines += _sentence("not examined", printable(gap.line, _LONGEST).removeprefix("not examined:"), out, kind)
        if in_full:
            lines += [f"  {line}" for line in _row("rules", ", ".join(gap.rules), out)]
    return [*lines, *_summary(found, run, out)]


def _sentence(title: str, text: str, out: TextIO, kind: str = "") -> list[str]:
    """Return lines with a colored title; a single line if the output is a pipe."""
    width = width_of(out)
    whole = f"{title}:{text}"
    options: dict[str, Any] = {"subsequent_indent": "  ", "break_long_words": False, "break_on_hyphens": False}
    lines = [whole] if width is None else textwrap.wrap(whole, min(width, _WIDTH), **options)
    return [painted(f"{title}:", kind or title, out) + lines[0].removeprefix(f"{title}:"), *lines[1:]]


def _summary(found: Diagnosis, run: Run, out: TextIO) -> list[str]:
    notes = len(found.findings) - len(found.bad)
    counts = ["healthy: no findings" if found.is_healthy else found.verdict]
    counts += [counted(notes, "note")] if notes else []
    text = f"{', '.join(counts)} in {_examined(run)}"
    is_unknown = found.is_healthy is None and any(label != WATCH for label in run)
    text += ", but too little was examined to call the run healthy" if is_unknown else ""
    width = width_of(out)
    lines = [text] if width is None else textwrap.wrap(text, min(width, _WIDTH), break_on_hyphens=False)
    kind = "healthy" if found.is_healthy else found.bad[0].severity if found.bad else "title"
    return [painted(each, kind, out) for each in lines]


def _examined(run: Run) -> str:
    series = [run[label] for label in run if label != WATCH]
    if not series:
        return f"the loss and the gradient norm of {counted(len(run[WATCH].steps), 'step')}; nothing else was recorded"
    steps = sorted({step for each in series for step in each.steps})
    sites = sum(len(each) for each in series)
    span = f", {_span(steps[0], steps[-1])}" if steps else ""
    return f"{counted(len(steps), 'record')} of {counted(sites, 'site')}{span}"


def _span(first: int | None, last: int | None) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _details(finding: Finding, run: Run, place: Callable[[Path], str], out: TextIO) -> list[str]:
    rows = [("measured", finding.measured)] if finding.measured else []
    rows += [("healthy", finding.usual), *_bars(finding, out)]
    rows += [("why", finding.why), ("next", finding.next)]
    steps = f"{_span(finding.first_step, finding.last_step)} ({counted(finding.records, 'record')})"
    others = [*finding.numbers.items()][bool(finding.measured) :]
    values = ", ".join(f"{printable(name)} {number(value)}" for name, value in others)
    rows.append(("rule", f"{finding.rule}, {steps}" + (f"; {values}" if values else "")))
    if finding.others:
        more = len(finding.others) - _FEW
        names = ", ".join(printable(each, _LONGEST) for each in finding.others[:_FEW])
        rows.append(("also", names + (f" and {more} more" if more > 0 else "")))
    rows.append(("show", _command(finding, run, place(run.log_dir))))
    script = run.directory / "incidents" / f"step-{finding.first_step}" / "replay.py"
    if finding.rule == "non-finite" and script.exists():
        command = printable(shlex.join(["python", place(script)]), None)
        if any((script.parent / each).exists() for each in STATES):
            rows.append(("again", f"{command}  (runs the step again)"))
        else:
            rows.append(("again", f"{command} CHECKPOINT  (runs the step again, from a checkpoint before it)"))
    return [line for name, text in rows for line in _row(name, printable(text, None), out)]


def _row(name: str, text: str, out: TextIO) -> list[str]:
    lines = [text]
    if name not in ("show", "again", "trend"):  # commands are not wrapped, so that they can be copied
        width = min(_WIDTH, (width_of(out) or _WIDTH) - _INDENT)
        lines = textwrap.wrap(text, width - _LABEL, break_long_words=False, break_on_hyphens=False)
    labels = [painted(f"{name:<{_LABEL}}", "quiet", out), *[" " * _LABEL] * len(lines)]
    return [label + line for label, line in zip(labels, lines, strict=False)]


def _bars(finding: Finding, out: TextIO) -> list[tuple[str, str]]:
    trace = finding.trace
    if trace is None or not trace.values:
        return []
    ends = f"{number(trace.values[0])} to {number(trace.values[-1])}"
    name, span = printable(trace.statistic), _span(trace.steps[0], trace.steps[-1])
    room = (width_of(out) or _WIDTH) - _INDENT - _LABEL - len(f"{name}  {ends}, {span}")
    return [("trend", f"{name} {spark(trace.values, max(1, min(_BARS, room)), out)} {ends}, {span}")]


def _command(finding: Finding, run: Run, log_dir: str) -> str:
    """Return the command that shows the records of a finding's module.

    If the module has no records, the command shows the records of the modules inside of it.
    """
    words = ["lightning-recorder", "show", log_dir]
    trace = finding.trace
    series = [run[label] for label in run if trace is None or label == trace.recorder]
    if finding.module and any(finding.module in each for each in series):
        words.append(finding.module)
    elif finding.module and any(site.name.startswith(f"{finding.module}.") for each in series for site in each):
        words.append(f"{finding.module}.*")
    if trace is not None and any(trace.statistic in each.statistics for each in series):
        words += ["--recorder", trace.recorder, "--statistic", trace.statistic]
    return printable(shlex.join([*words, "--details"]), None)
