"""``show``: the statistics of sites over the steps, and the sites that meet a condition."""

from __future__ import annotations

import operator
import re
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import NamedTuple, TextIO

import torch
from torch import Tensor

from lightning_recorder.commands.terminal import module, number, printable, spark, table
from lightning_recorder.errors import ArgumentError
from lightning_recorder.names import closest_names, compile_glob
from lightning_recorder.recordings import Run, Series, SiteSeries, open_recording

__all__ = ["run"]

_FEWEST_ROWS = 5
_AROUND = 4  # lines around the rows: title, column names, prompt


_SUMMARY = ("rms", "min", "max", "zero_fraction", "nan_count", "inf_count", "update_ratio")
_OPERATORS: dict[str, Callable[[Tensor, float], Tensor]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_CONDITION = re.compile(r"\s*([^\s<>=!]+)\s*(>=|<=|==|!=|>|<)\s*(\S+)\s*")


class _Found(NamedTuple):
    run: Run
    label: str
    site: SiteSeries


class _Condition(NamedTuple):
    statistic: str
    holds: Callable[[Tensor, float], Tensor]
    limit: float


def run(arguments: Namespace, out: TextIO) -> int:
    """Print the statistics of each matching site, or a list of the sites."""
    conditions = [_condition(text) for text in arguments.where or ()]
    runs = open_recording(arguments.path).runs
    chosen = [(run, label, series) for run in runs.values() for label, series in _chosen(run, arguments)]
    if not chosen:
        labels = dict.fromkeys(label for run in runs.values() for label in run)
        there = ", ".join(map(printable, labels)) or "none"
        raise ArgumentError(f"there is no such recorder or stage; the recorders are {there}")
    found = _matching(chosen, arguments.site)
    if conditions:
        lines = _where(found, conditions, several=len(runs) > 1)
        out.write("\n".join(lines or [f"no site has {' and '.join(map(printable, arguments.where))}"]) + "\n")
    elif not arguments.site:
        out.write("\n".join(_summary(found, arguments.statistic, several=len(runs) > 1)) + "\n")
    else:
        for place, each in enumerate(found):
            lines = [_title(each, several=len(runs) > 1), *_lines(each.site, arguments.statistic, out)]
            out.write("\n" * bool(place) + "\n".join(lines) + "\n")
    return 0


def _matching(chosen: list[tuple[Run, str, Series]], patterns: list[str]) -> list[_Found]:
    """Return the sites that match any of the patterns, or all sites without a pattern.

    Raises:
        ArgumentError: If a pattern matches nothing.
    """
    sites = [_Found(run, label, series[site.name, site.path]) for run, label, series in chosen for site in series.sites]
    matched: set[int] = set()
    for pattern in patterns:
        glob = compile_glob(pattern)
        places = {
            place for place, each in enumerate(sites) if each.site.name == pattern or glob.fullmatch(each.site.name)
        }
        if not places:
            names = dict.fromkeys(each.site.name for each in sites)
            raise ArgumentError(f"no site matches {pattern!r}; {closest_names(pattern, names)}")
        matched |= places
    return [each for place, each in enumerate(sites) if place in matched or not patterns]


def _title(found: _Found, *, several: bool) -> str:
    site = found.site
    where = [*([printable(found.run.name)] if several else []), printable(found.label), *_kind(site)]
    return f"{module(site.name)} {printable(site.path)} ({', '.join(where)})"


def _condition(text: str) -> _Condition:
    matched = _CONDITION.fullmatch(text)
    try:
        if matched is None:
            raise ValueError("it has no comparison")
        return _Condition(matched[1], _OPERATORS[matched[2]], float(matched[3]))
    except ValueError as error:
        raise ArgumentError(
            f"--where takes a statistic, one of {' '.join(_OPERATORS)} and a number, as 'nan_count>0', got {text!r}"
        ) from error


def _where(found: list[_Found], conditions: list[_Condition], *, several: bool) -> list[str]:
    """List the sites with a record in which all conditions hold."""
    wanted = [condition.statistic for condition in conditions]
    known = {name for each in found for name in each.site.series.statistics}
    for name in wanted:
        if name not in known:
            raise ArgumentError(f"there is no statistic {name!r}; there are {', '.join(sorted(known)) or 'none'}")
    rows = [["run", "site", "recorder", "records", "steps", *map(printable, wanted)]]
    for each in found:
        if set(wanted) <= set(each.site.series.statistics):
            rows += _matches(each, conditions)
    if not several:
        rows = [row[1:] for row in rows]
    return table(rows, right=(3, 4) if several else (2, 3)) if len(rows) > 1 else []


def _matches(found: _Found, conditions: list[_Condition]) -> list[list[str]]:
    """Return the row of a site; no row if no record meets all conditions."""
    site = found.site
    columns = [site.statistic(condition.statistic) for condition in conditions]
    holds = torch.ones(len(site.steps), dtype=torch.bool)
    for condition, column in zip(conditions, columns, strict=True):
        holds &= condition.holds(column, condition.limit) & ~column.isnan()
    steps = [step for step, each in zip(site.steps, holds.tolist(), strict=True) if each]
    if not steps:
        return []
    span = str(steps[0]) if len(steps) == 1 else f"{steps[0]}-{steps[-1]}"
    ends = [f"{number(column[holds].min().item())} to {number(column[holds].max().item())}" for column in columns]
    name = f"{module(site.name)} {printable(site.path)}"
    return [
        [printable(found.run.name), name, printable(found.label), f"{len(steps)} of {len(site.steps)}", span, *ends]
    ]


def _summary(found: list[_Found], wanted: list[str] | None, *, several: bool) -> list[str]:
    """List all sites with their latest statistics, one table for each recorder."""
    lines: list[str] = []
    for (name, label), group in groupby(found, key=lambda each: (each.run.name, each.label)):
        sites = [each.site for each in group]
        series = sites[0].series
        columns = wanted or [name for name in _SUMMARY if name in series.statistics]
        for column in columns:
            series.check_statistic(column)
        rows = [["site", "records", "step", *map(printable, columns)]]
        for site in sites:
            last = site.scalars(site.steps[-1])
            values = [number(value) if (value := last.get(column)) == value else "" for column in columns]
            rows.append(
                [f"{module(site.name)} {printable(site.path)}", str(len(site.steps)), str(site.steps[-1]), *values]
            )
        where = [*([printable(name)] if several else []), printable(label), printable(series.stage)]
        lines += [*([""] if lines else []), ", ".join(where), *table(rows, right=range(1, len(rows[0])))]
    return lines


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
