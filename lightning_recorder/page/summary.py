"""The summary of a recording in a notebook: verdict, findings and loss, as HTML without scripts."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_recorder.page.data import curves, page_data
from lightning_recorder.page.html import PageDocument, page_html
from lightning_recorder.page.runs import FEWEST_RUNS, runs_table, table_row
from lightning_recorder.temporary import write_whole

if TYPE_CHECKING:
    from lightning_recorder.insight import Diagnosis, Finding
    from lightning_recorder.recordings import Run

__all__ = ["page_document", "summary_html"]

_MOST_FINDINGS = 5
_MOST_RUNS = 20
# Each color has a contrast of at least 4 on white and on black.
_COLORS = {"critical": "#d9463a", "warning": "#a86a10"}
_SIZE = (260, 60)


def page_document(runs: Mapping[str, Run], path: str | Path | None = None, **options: Any) -> PageDocument:
    """Return the page of some runs as one HTML file, and write the file if a path is given.

    Args:
        runs: The runs by name.
        path: The file; its folder is created if it does not exist.
        options: Further arguments of :func:`~lightning_recorder.page.page_data`.

    Raises:
        DumpError: If a file of a run is damaged.
        OSError: If the file cannot be written.
    """
    known = {name: run.diagnosis for name, run in runs.items()}
    rows = (
        runs_table({name: table_row(run, known[name]) for name, run in runs.items()})
        if len(runs) >= FEWEST_RUNS
        else ()
    )
    data = page_data(runs, table=rows, known=known, **options)
    html = PageDocument(page_html(data, f"{next(iter(runs))} · lightning_recorder"))
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_whole(Path(path), lambda file: file.write(html.encode()))
    return html


def summary_html(runs: Mapping[str, Run], hint: str) -> str:
    """Return a summary of some runs as HTML without scripts. All names are escaped.

    Args:
        runs: The runs by name.
        hint: The Python expression that shows the whole page.
    """
    shown = list(runs.items())
    if len(shown) == 1:
        parts = [_run(*shown[0])]
    else:
        parts = [f"<div>{_verdict(run, run.diagnosis)} <b>{escape(name)}</b></div>" for name, run in shown[:_MOST_RUNS]]
        parts += [f"<div>and {len(shown) - _MOST_RUNS} more runs</div>"] if len(shown) > _MOST_RUNS else []
    hint = f'<div style="opacity:.7">The page with the graph and all layers: <code>{escape(hint)}</code></div>'
    return f'<div style="font:13px/1.5 system-ui,sans-serif;max-width:900px">{"".join(parts)}{hint}</div>'


def _run(name: str, run: Run) -> str:
    found = run.diagnosis
    bad = found.bad
    items = "".join(map(_item, bad[:_MOST_FINDINGS]))
    more = f"<div>and {len(bad) - _MOST_FINDINGS} more</div>" if len(bad) > _MOST_FINDINGS else ""
    listed = f'<ol style="margin:4px 0;padding-left:22px">{items}</ol>{more}' if items else ""
    charts = "".join(_chart(title, steps, values) for title, steps, values in curves(run))
    series = [(escape(label), run[label]) for label in run]
    recorded = ", ".join(
        f"{label}: {len(each.steps)} record{'s' * (len(each.steps) != 1)} of {len(each)} tensors"
        for label, each in series
    )
    title = f"{_verdict(run, found)} <b>{escape(name)}</b> <small>{recorded}</small>"
    return f"<div>{title}</div>{listed}<div>{charts}</div>"


def _item(finding: Finding) -> str:
    color = _COLORS.get(finding.severity, "inherit")
    return (
        f'<li style="margin:3px 0"><b style="color:{color}">{escape(finding.severity)}</b> {escape(finding.verdict)}'
        f"<br><small>{escape(finding.why)} <b>Try</b> {escape(finding.next)}</small></li>"
    )


def _verdict(run: Run, found: Diagnosis) -> str:
    if found.bad:
        return f'<b style="color:#d9463a">⚠ {found.verdict}</b>'
    if not run.has_records:
        return "<b>nothing was recorded</b>"
    return '<b style="color:#1f8a3f">✓ healthy</b>' if found.is_healthy else f"<b>{found.verdict}</b>"


def _chart(title: str, steps: list[int], values: np.ndarray[Any, np.dtype[np.float64]]) -> str:
    """Return a curve as SVG, with its last value. Marks show non-finite values."""
    width, height = _SIZE
    finite = np.isfinite(values)
    if not steps:
        return ""
    low, high = (float(values[finite].min()), float(values[finite].max())) if finite.any() else (0.0, 0.0)
    x = (np.array(steps, dtype=np.float64) - steps[0]) / max(1, steps[-1] - steps[0]) * (width - 4) + 2
    y = height - 4 - (np.where(finite, values, low) - low) / ((high - low) or 1.0) * (height - 8)
    points = " ".join(f"{left:.1f},{up:.1f}" for left, up in zip(x[finite], y[finite], strict=True))
    marks = "".join(f'<rect x="{left:.1f}" width="2" height="{height}" fill="#e0148f"/>' for left in x[~finite][:200])
    return (
        f'<figure style="display:inline-block;margin:4px 14px 4px 0"><figcaption><small>{escape(title)}: '
        f"{values[0]:.4g} → {values[-1]:.4g}</small></figcaption>"
        f'<svg width="{width}" height="{height}" role="img" aria-label="{escape(title)} over steps">'
        f'<polyline points="{points}" fill="none" stroke="#1f77d8" stroke-width="1.5"/>{marks}</svg></figure>'
    )
