"""The report of a run for a review: verdict, graph, five charts and settings, as Markdown or HTML."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.graph import draw
from lightning_recorder.page.data import curves, logged_curves
from lightning_recorder.recordings import Run
from lightning_recorder.recordings.run_changes import settings_of
from lightning_recorder.temporary import TemporaryFolder, write_whole

if TYPE_CHECKING:
    from lightning_recorder.insight import Diagnosis

__all__ = ["report_html", "report_markdown", "write_report"]

_MOST_CHARTS = 5
_MOST_NODES = 60
_WIDTH, _HEIGHT, _LEFT, _TOP = 640, 130, 76, 26  # the size of a chart and its left and top margins, in pixels
_COLOR, _BAD = "#0072b2", "#d6008b"

Curve = tuple[str, list[int], NDArray[np.float64]]


@dataclass(frozen=True)
class _Report:
    title: str
    diagnosis: Diagnosis
    steps: str
    check: list[tuple[str, str]]
    charts: list[tuple[str, str]]
    graph: str
    settings: dict[str, str]


def write_report(run: Run, path: Path) -> list[Path]:
    """Write the report of a run, and return the written files: one HTML file, or a Markdown file and its pictures.

    Args:
        run: The run.
        path: The file; HTML if it ends in ``.html``, otherwise Markdown.

    Raises:
        DumpError: If a file of the run is damaged.
        OSError: If a file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix.lower() in (".html", ".htm"):
        files = {path: report_html(run)}
    else:
        text, pictures = report_markdown(run, path.stem)
        files = {path: text, **{path.with_name(name): picture for name, picture in pictures.items()}}
    for place, content in files.items():
        write_whole(place, lambda file, content=content: file.write(content.encode()))  # type: ignore[misc]  # a default
    return [*files]


def report_markdown(run: Run, stem: str = "report") -> tuple[str, dict[str, str]]:
    """Return the report as Markdown, and its pictures as SVG by file name.

    Args:
        run: The run.
        stem: The prefix of the picture names.
    """
    found = _contents(run)
    pictures = {f"{stem}-{name}.svg": svg for name, (_, svg) in zip(_numbered(found.charts), found.charts, strict=True)}
    lines = [f"# {_plain(found.title)}: {found.diagnosis.verdict}", "", found.steps, ""]
    for each in found.diagnosis.findings:
        lines += [f"- **{each.severity}**: {_plain(each.verdict)}"]
        measured = f"*Measured* {_plain(each.measured)}. " if each.measured else ""
        usual = f"*Usual* {_plain(each.usual)}. " if each.usual else ""
        more = f"  {measured}{usual}*Why* {_plain(each.why)} *Try* {_plain(each.next)}"
        lines += [more] if not each.is_note else []
    lines += ["- no findings"] if not found.diagnosis.findings else []
    lines += [f"- {_plain(each.line)}" for each in found.diagnosis.open]
    if found.check:
        lines += ["", "## Check before the training", ""]
        lines += [f"- **{verdict}**: {_plain(text)}" for verdict, text in found.check]
    lines += ["", "## Curves", ""] if pictures else []
    lines += [f"![{_plain(title)}]({_address(name)})" for (title, _), name in zip(found.charts, pictures, strict=True)]
    if found.graph:
        pictures[f"{stem}-graph.svg"] = found.graph
        lines += ["", "## Graph", "", f"![graph]({_address(f'{stem}-graph.svg')})"]
    if found.settings:
        lines += ["", "## Settings", "", "| setting | value |", "|---|---|"]
        lines += [f"| {_plain(name)} | {_plain(value)} |" for name, value in found.settings.items()]
    return "\n".join([*lines, ""]), pictures


def report_html(run: Run) -> str:
    """Return the report as one HTML file without scripts, which can be printed."""
    found = _contents(run)
    parts = [f"<h1>{escape(found.title)}: {escape(found.diagnosis.verdict)}</h1><p>{escape(found.steps)}</p><ul>"]
    for each in found.diagnosis.findings:
        measured = f"<b>Measured</b> {escape(each.measured)}. " if each.measured else ""
        usual = f"<b>Usual</b> {escape(each.usual)}. " if each.usual else ""
        following = f"<b>Why</b> {escape(each.why)} <b>Try</b> {escape(each.next)}"
        more = "" if each.is_note else f"<br>{measured}{usual}{following}"
        parts.append(f"<li><b>{escape(each.severity)}</b> {escape(each.verdict)}{more}</li>")
    parts += ["<li>no findings</li>"] if not found.diagnosis.findings else []
    parts += [*(f"<li>{escape(each.line)}</li>" for each in found.diagnosis.open), "</ul>"]
    if found.check:
        answers = "".join(f"<li><b>{escape(verdict)}</b> {escape(text)}</li>" for verdict, text in found.check)
        parts.append(f"<h2>Check before the training</h2><ul>{answers}</ul>")
    if found.charts:
        parts.append("<h2>Curves</h2>" + "".join(f"<figure>{svg}</figure>" for _, svg in found.charts))
    if found.graph:
        parts.append(f'<h2>Graph</h2><figure class="graph">{found.graph}</figure>')
    if found.settings:
        rows = "".join(
            f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in found.settings.items()
        )
        parts.append(f"<h2>Settings</h2><table>{rows}</table>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        'img-src data:; font-src data:">'
        f"<title>{escape(found.title)}</title><style>{_STYLE}</style></head><body><main>\n{chr(10).join(parts)}\n</main></body></html>\n"
    )


_STYLE = (
    "body{font:14px/1.5 system-ui,sans-serif;max-width:820px;margin:24px auto;padding:0 16px;color:#1b1f24}"
    "h1{font-size:20px}h2{font-size:16px;break-after:avoid}li{margin:4px 0;overflow-wrap:anywhere}"
    "figure{margin:8px 0;break-inside:avoid}svg{max-width:100%;height:auto}.graph svg{max-height:240mm}"
    "th,td{text-align:left;padding:2px 16px 2px 0;font-weight:normal;vertical-align:top}th{color:#57606a}"
    "@media print{body{margin:0;max-width:none}}"
)


def _settings(run: Run) -> dict[str, str]:
    """Return the settings. A changing learning rate is shown as a range: its first value may be from a warm-up."""
    found = settings_of(run)
    rates = [values[np.isfinite(values)] for name, _, values in logged_curves(run) if name.startswith("learning rate")]
    if "lr" in found and any(each.size and each.min() < each.max() for each in rates):
        every = np.concatenate(rates)
        found["lr"] = f"from {every.min():.4g} to {every.max():.4g}"
    return found


def _contents(run: Run) -> _Report:
    steps = sorted({step for label in run for step in run[label].steps})
    span = f"steps {steps[0]} to {steps[-1]}" if steps else "no records"
    return _Report(
        "/".join(run.log_dir.parts[-2:]),
        run.diagnosis,
        f"{run.log_dir.name}, {span}",
        [*_check(run)],
        [(title, _chart(title, steps, values)) for title, steps, values in _chosen(run)],
        _graph(run),
        _settings(run),
    )


def _check(run: Run) -> Iterator[tuple[str, str]]:
    for each in (run.check or {}).get("answers", ()):
        if each.get("verdict") in ("look", "wrong"):
            place = f" ({each['line']})" if each.get("line") else ""
            yield str(each["verdict"]), f"{each.get('asks', '')} {each.get('text', '')}{place}"


def _chosen(run: Run) -> list[Curve]:
    """Return at most five curves: loss, gradient norm, the statistic of the first finding with one, and logged metrics.

    Among the logged metrics, validation metrics come first. A metric with the name of the loss is left out.
    """
    logged = [each for each in logged_curves(run) if len(each[1]) > 1]
    logged.sort(key=lambda each: (each[0].startswith("learning rate"), not re.match("val", each[0])))
    rate = [each for each in logged if each[0].startswith("learning rate")][:1]
    watched = [*curves(run)]
    for finding in run.diagnosis.findings:
        trace = finding.trace
        if trace is not None and len(trace.steps) > 1:
            title = f"{trace.module or finding.module} {trace.statistic}".strip()
            watched.append((title, [*trace.steps], np.array(trace.values)))
            break
    known = {each[0] for each in watched}
    others = [each for each in logged if each not in rate and each[0] not in known]
    return [*watched, *others[: _MOST_CHARTS - len(watched) - len(rate)], *rate]


def _graph(run: Run) -> str:
    """Return the graph picture that the run drew, or else draw it; an empty string if there is no graph."""
    drawn = run.directory / "graph.svg"
    if drawn.is_file() and not drawn.is_symlink():
        text = drawn.read_text(encoding="utf-8")
    elif run.graph is not None:
        with TemporaryFolder() as folder:
            picture = draw(run.graph, max_nodes=_MOST_NODES).save(folder.path / "graph.svg")
            text = picture.read_text(encoding="utf-8")
    else:
        return ""
    return text[max(0, text.find("<svg")) :]


def _chart(title: str, steps: list[int], values: NDArray[np.float64]) -> str:
    """Return a curve with axes as SVG. Marks show non-finite values."""
    finite = np.isfinite(values)
    low, high = (float(values[finite].min()), float(values[finite].max())) if finite.any() else (0.0, 0.0)
    right, bottom = _WIDTH - 12, _HEIGHT - 24
    x = _LEFT + (np.array(steps, dtype=np.float64) - steps[0]) / max(1, steps[-1] - steps[0]) * (right - _LEFT)
    if low == high:  # the axis of a constant curve ends at 0 on one side
        low, high = min(low, 0.0), max(high, 0.0) or float(low == 0)
    y = bottom - (np.where(finite, values, low) - low) / (high - low) * (bottom - _TOP)
    points = " ".join(f"{left:.1f},{up:.1f}" for left, up in zip(x[finite], y[finite], strict=True))
    marks = "".join(
        f'<rect x="{left - 1:.1f}" y="{_TOP}" width="2" height="{bottom - _TOP}" fill="{_BAD}"/>' for left in x[~finite]
    )
    labels = [(_LEFT - 6, _TOP + 4, "end", f"{high:.4g}"), (_LEFT - 6, bottom, "end", f"{low:.4g}")]
    labels += [(_LEFT, _HEIGHT - 8, "start", f"step {steps[0]}"), (right, _HEIGHT - 8, "end", str(steps[-1]))]
    texts = "".join(
        f'<text x="{at}" y="{up}" text-anchor="{end}">{escape(text)}</text>' for at, up, end, text in labels
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'font-family="sans-serif" font-size="12" role="img" aria-label="{escape(title)} over steps">'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>'
        f'<text x="{_LEFT}" y="16" font-weight="600">{escape(title)}: {values[0]:.4g} → {values[-1]:.4g}</text>'
        f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="#888"/>'
        f'<polyline points="{points}" fill="none" stroke="{_COLOR}" stroke-width="1.5"/>{marks}{texts}</svg>'
    )


def _numbered(charts: list[tuple[str, Any]]) -> list[str]:
    return [
        f"{place + 1}-{re.sub(r'[^A-Za-z0-9]+', '-', title).strip('-')[:40]}" for place, (title, _) in enumerate(charts)
    ]


def _plain(text: str) -> str:
    """Escape the special characters of Markdown and HTML in a text."""
    return re.sub(r"([\\`*_{}\[\]<>|#!&~])", r"\\\1", " ".join(str(text).split()))


def _address(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", lambda found: f"%{ord(found[0]):02X}" if ord(found[0]) < 128 else found[0], name)
