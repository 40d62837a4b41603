"""Examine a recorded run: read its files into a history and apply the rules, with the same findings as in the fit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import cache, partial
from typing import TYPE_CHECKING

from lightning_recorder.errors import ArgumentError, DumpError
from lightning_recorder.functions import SCORES
from lightning_recorder.insight import (
    Diagnosis,
    Finding,
    RunFacts,
    RunHistory,
    examine,
    findings_from_json,
)
from lightning_recorder.names import Site
from lightning_recorder.records.counts import to_histogram, unpacked
from lightning_recorder.records.file import WATCH, calls_of, is_inside
from lightning_recorder.records.histogram import Histogram
from lightning_recorder.records.table import Table
from lightning_recorder.untrusted import read_json

if TYPE_CHECKING:
    from lightning_recorder.recordings.recording import Run
    from lightning_recorder.recordings.series import Series

__all__ = ["diagnose", "records_of"]

_FOR_HISTOGRAM = ("count", "mean", "rms", "min", "max")


def diagnose(run: Run, ignored: Collection[str] = ()) -> Diagnosis:
    """Return the findings of a run, ranked, and the rules that could not run.

    Args:
        run: The run.
        ignored: The names of the rules to leave out. Consequences of their findings become separate findings.

    Raises:
        DumpError: If a file of the run is damaged.
    """
    history = RunHistory()
    # The watch on every step has examined its records during the run, so only its findings are read, below.
    records = (record for label in run if label != WATCH for record in records_of(label, run[label]))
    for record in sorted(records, key=lambda each: each.step):
        history.add(record)
    facts = RunFacts(run.receipt or {}, ignored=ignored, watched=_watched(run), data=run.data)
    return examine(history, run.graph, facts)


def _watched(run: Run) -> list[Finding]:
    """Return the findings of the watch, in the order of their steps."""
    found = []
    # Findings in incident folders belong to a step. The other findings of the watch are about the whole run.
    for path in (
        each for folder in ("incidents", "watched") for each in run.directory.glob(f"{folder}/*/finding.json")
    ):
        if is_inside(path, run.log_dir):
            try:
                found += findings_from_json(read_json(path))
            except ArgumentError as error:
                raise DumpError(f"{path} cannot be read: {error}") from error
    return sorted(found, key=lambda each: each.first_step)


def records_of(label: str, series: Series) -> Iterator[Table]:
    """Yield the records of a recorder as tables for the rules."""
    group = next((str(each.about.get("group", "")) for each in series.sessions), "") or label.partition("-")[0]
    for key, part in series.parts.items():
        if key.loader not in (None, 0):
            continue
        own = series.of(key.stage, key.loader)
        for step, entry in part.entries.items():
            about = {**entry.table.about, "group": group, "recorder": label}
            has_parts = any(site.path == SCORES for site in entry.table.sites)
            tensors = own.all_vectors(step) if has_parts else {}
            found = entry.table.having(about=about, histogram=_histograms(own, step), tensors=tensors)
            yield found.in_order(calls_of(entry.table))


def _histograms(series: Series, step: int) -> Callable[[Site], Histogram | None]:
    """Return a function that returns the histogram of a site in a record. The first call reads the record's line."""
    packed = cache(partial(series.packed_counts, step))

    def histogram(site: Site) -> Histogram | None:
        counts, scalars = packed()[site], series[site].scalars(step)
        if counts is None or any(name not in scalars for name in _FOR_HISTOGRAM):
            return None
        return to_histogram(scalars, unpacked(counts))

    return histogram
