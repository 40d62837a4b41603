"""``show``: the statistics of a site over the steps."""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Iterator
from typing import TextIO

from lightning_recorder.commands.terminal import module, number, printable, spark, table
from lightning_recorder.errors import ArgumentError
from lightning_recorder.names import closest_names, compile_glob
from lightning_recorder.recordings import Run, Series, SiteSeries, open_recording

__all__ = ["run"]

_FEWEST_ROWS = 5
_AROUND = 4  # lines around the rows: title, column names, prompt


def run(arguments: Namespace, out: TextIO) -> int:
    """Print the statistics of each matching site."""
    runs = open_recording(arguments.path).runs
    chosen = [(run, label, series) for run in runs.values() for label, series in _chosen(run, arguments)]
    if not chosen:
        labels = dict.fromkeys(label for run in runs.values() for label in run)
        there = ", ".join(map(printable, labels)) or "none"
        raise ArgumentError(f"there is no such recorder or stage; the recorders are {there}")
    glob = compile_glob(arguments.site)
    found = [
        (run, label, series[site.name, site.path])
        for run, label, series in chosen
        for site in series.sites
        if glob.fullmatch(site.name) or site.name == arguments.site
    ]
    if not found:
        names = dict.fromkeys(site.name for _, _, series in chosen for site in series.sites)
        raise ArgumentError(f"no site matches {arguments.site!r}; {closest_names(arguments.site, names)}")
    for place, (each, label, site) in enumerate(found):
        title = f"{module(site.name)} {printable(site.path)}"
        where = ", ".join([*([printable(each.name)] if len(runs) > 1 else []), printable(label), *_kind(site)])
        out.write(
            "\n" * bool(place) + "\n".join([f"{title} ({where})", *_lines(site, arguments.statistic, out)]) + "\n"
        )
    return 0


def _chosen(run: Run, arguments: Namespace) -> Iterator[tuple[str, Series]]:
    for label in run:
        if arguments.recorder in (None, label):
            series = run[label]
            if arguments.stage is None:
                yield label, series
            elif arguments.stage in series.stages:
                yield label, series.of(arguments.stage)


def _kind(site: SiteSeries) -> list[str]:
    shape = "" if site.shape is None else f" {list(site.shape)}"
    kind = f"{printable(site.dtype or '')}{shape}".strip()
    return [printable(site.series.stage), *([kind] if kind else [])]


def _lines(site: SiteSeries, wanted: list[str] | None, out: TextIO) -> list[str]:
    names = site.statistics if wanted is None else wanted
    columns = {name: site.statistic(name).tolist() for name in names}
    steps = site.steps
    terminal = shutil.get_terminal_size()
    kept = _thinned(len(steps), max(terminal.lines - _AROUND - len(names), _FEWEST_ROWS))
    rows = [["step", *map(printable, names)]]
    rows += [[str(steps[place]), *(number(values[place]) for values in columns.values())] for place in kept]
    lines = table(rows, right=range(len(rows[0])))
    if len(kept) < len(steps):
        lines.append(f"{len(kept)} of {len(steps)} steps; `lightning-recorder export` writes all")
    return [*lines, *_sparks(columns, max(terminal.columns // 2, 10), out)]


def _sparks(columns: dict[str, list[float]], width: int, out: TextIO) -> list[str]:
    rows = []
    for name, values in columns.items():
        finite = [each for each in values if each - each == 0]
        ends = [number(min(finite, default=None)), number(max(finite, default=None))]
        rows.append([printable(name), spark(values, width, out), " to ".join(ends) if finite else ""])
    return table(rows)


def _thinned(count: int, most: int) -> list[int]:
    """Return at most ``most`` evenly spaced indices, including the first and the last."""
    if count <= most:
        return list(range(count))
    return [round(place * (count - 1) / (most - 1)) for place in range(most)]
