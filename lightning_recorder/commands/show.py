"""``show``: print the statistics of sites over the steps, or list the sites that meet a condition."""

from __future__ import annotations

import json
import math
import operator
import re
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TextIO

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.commands.doctor import bad_findings
from lightning_recorder.commands.terminal import counted, module, number, printable, spark, table
from lightning_recorder.errors import ArgumentError
from lightning_recorder.insight import Finding
from lightning_recorder.insight.finding import rows_of
from lightning_recorder.insight.unusual import compared, standing_out, unusualness
from lightning_recorder.names import closest_names, compile_glob, is_batch
from lightning_recorder.recordings import Run, Series, SiteSeries, open_recording
from lightning_recorder.records.file import json_values
from lightning_recorder.records.table import Floats

__all__ = ["run"]

_FEWEST_ROWS = 5
_MISSING = "-"
_NAMED = 1e9  # the degree of a site that a finding names, above all other degrees
_NARROWEST = 6  # the least width of a bar chart, in characters
_NUMBERS = 30  # the width of the last, the smallest and the largest value, in characters
_AROUND = 4  # the number of lines beside the rows: title, column names, prompt

_OPERATORS: dict[str, Callable[[Floats, float], NDArray[np.bool_]]] = {
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
    holds: Callable[[Floats, float], NDArray[np.bool_]]
    limit: float


def run(arguments: Namespace, out: TextIO) -> int:
    """Print a line for each matching site, all records of these sites, or the sites that meet a condition."""
    conditions = [_condition(text) for text in arguments.where or ()]
    runs = open_recording(arguments.path).runs
    chosen = [(run, label, series) for run in runs.values() for label, series in _chosen(run, arguments)]
    if not chosen:
        labels = dict.fromkeys(label for run in runs.values() for label in run)
        if not labels:
            raise ArgumentError(f"{arguments.path!r} has no records to show")
        there = ", ".join(map(printable, labels))
        raise ArgumentError(f"there is no such recorder or stage; the recorders are {there}")
    if not any(len(series) for _, _, series in chosen):
        empty = ", ".join(dict.fromkeys(printable(label) for _, label, _ in chosen))
        raise ArgumentError(f"{arguments.path!r} has no records to show: nothing was recorded by {empty}")
    found = _matching(chosen, arguments.site)
    if conditions:
        _check(found, conditions)
    if arguments.json:
        out.write(json.dumps({"runs": _plain(found, conditions, arguments.statistic)}, indent=1) + "\n")
    elif conditions:
        lines = _where(found, conditions, several=len(runs) > 1)
        out.write("\n".join(lines or [f"no site has {' and '.join(map(printable, arguments.where))}"]) + "\n")
    elif arguments.details:
        for place, each in enumerate(found):
            lines = [_title(each, several=len(runs) > 1), *_lines(each.site, arguments.statistic, out)]
            out.write("\n" * bool(place) + "\n".join(lines) + "\n")
    else:
        out.write("\n".join(_summary(found, arguments, out, several=len(runs) > 1)) + "\n")
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
        places = {place for place, name in enumerate(map(_name, sites)) if name == pattern or glob.fullmatch(name)}
        if not places:
            names = dict.fromkeys(map(_name, sites))
            raise ArgumentError(f"no site matches {pattern!r}; {closest_names(pattern, names)}")
        matched |= places
    return [each for place, each in enumerate(sites) if place in matched or not patterns]


def _name(found: _Found) -> str:
    """Return the module name of a site; for a tensor of the batch, its path."""
    name, path = found.site.site
    return path if is_batch(name, path) else name


def _title(found: _Found, *, several: bool) -> str:
    site = found.site
    where = [*([printable(found.run.name)] if several else []), printable(found.label), *_kind(site)]
    title = printable(site.path) if is_batch(*site.site) else f"{module(site.name)} {printable(site.path)}"
    return f"{title} ({', '.join(where)})"


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


def _plain(found: list[_Found], conditions: list[_Condition], wanted: list[str] | None) -> list[dict[str, Any]]:
    """Return the runs as JSON values; NaN and infinities become strings, as in the record files."""
    plain = []
    for name, of_run in groupby(found, key=lambda each: each.run.name):
        all_chosen = list(of_run)
        findings, recorders = bad_findings(all_chosen[0].run), []
        for label, group in groupby(all_chosen, key=lambda each: each.label):
            chosen = list(group)
            series = chosen[0].site.series
            unusual = _unusual(series, findings)
            for statistic in wanted or ():
                series.check_statistic(statistic)
            sites = [_values_of(each.site, conditions, wanted, unusual) for each in chosen]
            about = {"label": label, "stage": series.stage, "loader": series.loader}
            recorders.append({**about, "sites": [each for each in sites if each["steps"]]})
        plain.append({"name": name, "recorders": recorders})
    return plain


def _unusual(series: Series, findings: Sequence[Finding]) -> dict[tuple[str, str], int]:
    """Number the sites that stand out in a series, starting from 1. Sites of findings come first."""
    degrees = _degrees(series, findings)
    keys = list(degrees)
    return {keys[row]: place for place, row in enumerate(standing_out(np.array(list(degrees.values()))), 1)}


def _values_of(
    site: SiteSeries, conditions: list[_Condition], wanted: list[str] | None, unusual: dict[tuple[str, str], int]
) -> dict[str, Any]:
    """Return the statistics of a site at the steps where the conditions hold. Statistics with only NaN are left out."""
    kept = _holds(site, conditions).tolist()
    names = site.statistics if wanted is None else [name for name in wanted if name in site.statistics]
    columns = {
        name: [value for value, keep in zip(site.numbers(name).tolist(), kept, strict=True) if keep] for name in names
    }
    return {
        "module": site.name,
        "path": site.path,
        "dtype": site.dtype,
        "shape": None if site.shape is None else list(site.shape),
        "unusual": unusual.get((site.name, site.path)),
        "steps": [step for step, keep in zip(site.steps, kept, strict=True) if keep],
        "statistics": {
            name: json_values(values)
            for name, values in columns.items()
            if wanted is not None or not all(map(math.isnan, values))
        },
    }


def _check(found: list[_Found], conditions: list[_Condition]) -> None:
    """Raise an error if the statistic of a condition was not recorded."""
    known = {name for each in found for name in each.site.series.statistics}
    for name, _, _ in conditions:
        if name not in known:
            raise ArgumentError(f"there is no statistic {name!r}; there are {', '.join(sorted(known)) or 'none'}")


def _where(found: list[_Found], conditions: list[_Condition], *, several: bool) -> list[str]:
    """List the sites with a record in which all conditions hold."""
    wanted = [condition.statistic for condition in conditions]
    rows = [["run", "site", "recorder", "records", "steps", *map(printable, wanted)]]
    for each in found:
        if set(wanted) <= set(each.site.series.statistics):
            rows += _matches(each, conditions)
    if not several:
        rows = [row[1:] for row in rows]
    return table(rows, right=(3, 4) if several else (2, 3)) if len(rows) > 1 else []


def _matches(found: _Found, conditions: list[_Condition]) -> list[list[str]]:
    """Return the table row of a site in a list; an empty list if no record meets all conditions."""
    site = found.site
    columns = [site.numbers(condition.statistic) for condition in conditions]
    holds = _holds(site, conditions)
    steps = [step for step, each in zip(site.steps, holds.tolist(), strict=True) if each]
    if not steps:
        return []
    span = str(steps[0]) if len(steps) == 1 else f"{steps[0]}-{steps[-1]}"
    ends = [f"{number(float(column[holds].min()))} to {number(float(column[holds].max()))}" for column in columns]
    name = f"{module(site.name)} {printable(site.path)}"
    return [
        [printable(found.run.name), name, printable(found.label), f"{len(steps)} of {len(site.steps)}", span, *ends]
    ]


def _holds(site: SiteSeries, conditions: list[_Condition]) -> NDArray[np.bool_]:
    """Return True for each record of a site in which all conditions hold."""
    holds = np.ones(len(site.steps), dtype=np.bool_)
    for condition in conditions:
        if condition.statistic not in site.series.statistics:
            return np.zeros_like(holds)
        column = site.numbers(condition.statistic)
        holds &= condition.holds(column, condition.limit) & ~np.isnan(column)
    return holds


class _Part(NamedTuple):
    """A group of columns in a line, for one of the tensors of a site."""

    title: str
    statistic: str
    suffix: str


_PARTS = (_Part("value", "rms", ""), _Part("gradient", "rms", ".grad"), _Part("update", "update_ratio", ""))
"""The groups of columns for a parameter. The update is relative to the parameter."""


def _summary(found: list[_Found], arguments: Namespace, out: TextIO, *, several: bool) -> list[str]:
    """List the sites with one line each, unusual sites first, in one table for each recorder."""
    lines: list[str] = []
    runs = {each.run.name: each.run for each in found}
    findings = {name: bad_findings(run) for name, run in runs.items()}
    tables = [list(group) for _, group in groupby(found, key=lambda each: (each.run.name, each.label))]
    most = max(shutil.get_terminal_size().lines // len(tables) - _AROUND, _FEWEST_ROWS)
    for group in tables:
        (name, label), sites = (group[0].run.name, group[0].label), [each.site for each in group]
        where = [*([printable(name)] if several else []), printable(label), printable(sites[0].series.stage)]
        lines += [""] if lines else []
        wanted = arguments.statistic
        if wanted is None and label.partition("-")[0] == "parameters":
            known = {(site.name, site.path) for site in sites}
            sites = [site for site in sites if (site.name, site.path.rpartition(".")[0]) not in known]
            parts = list(_PARTS)
        else:
            for statistic in wanted or ():
                sites[0].series.check_statistic(statistic)
            parts = [_Part(statistic, statistic, "") for statistic in wanted or _default_statistics(sites[0].series)]
            if wanted is not None:  # the update ratio, for example, exists for parameters but not for their gradients
                sites = [site for site in sites if any(_values(site, part) for part in parts)] or sites
        lines += _lines_of(sites, parts, findings[name], ", ".join(where), out, len(sites) if arguments.all else most)
    return lines


def _default_statistics(series: Series) -> list[str]:
    return ["rms"] if "rms" in series.statistics else series.statistics[:1]


def _lines_of(
    sites: list[SiteSeries], parts: list[_Part], findings: Sequence[Finding], where: str, out: TextIO, most: int
) -> list[str]:
    """Return a table with a line for each of at most ``most`` sites of a series. Sites of findings come first."""
    series = sites[0].series
    degrees = _degrees(series, findings)
    # The degree of a parameter is the largest degree of its tensors.
    paths = [[site.path + part.suffix for part in parts] for site in sites]
    own = [max(degrees.get((site.name, path), 0.0) for path in some) for site, some in zip(sites, paths, strict=True)]
    ranked = standing_out(np.array(own))
    order = list(dict.fromkeys([*ranked, *range(len(sites))]))
    longest = max(len(site.name) + len(site.path) for site in sites)
    width = max((shutil.get_terminal_size().columns - longest - 6) // len(parts) - _NUMBERS, _NARROWEST)
    ends = ("last", "min", "max", "")
    several = len(parts) > 1
    heads = [f"{part.title} {end}" if end and several else end for part in parts for end in ends]
    what = "" if several else f"{printable(parts[0].title)}, "
    rows = [["", "site", *map(printable, heads)]]
    for rank, place in enumerate(order[:most], 1):
        site = sites[place]
        cells = [cell for part in parts for cell in _cells(site, part, width, out)]
        rows.append([str(rank) if rank <= len(ranked) else "", f"{module(site.name)} {printable(site.path)}", *cells])
    numeric = [place for place in range(2, len(heads) + 2) if place % 4 != 1]
    title = f"{where}: {what}{counted(len(series.steps), 'record')}, {_span(series.steps)}"
    lines = [title, *table(rows, right=[0, *numeric])]
    if ranked:
        has_named = any(degrees.get((site.name, site.path), 0.0) > _NAMED / 2 for site in sites)
        why = "named by a finding, or " if has_named else ""
        lines.append(
            f"{len(ranked)} of {len(sites)} stand out: {why}unlike neighboring or equal modules, or their own past"
        )
    if len(order) > most:
        lines.append(f"{len(order) - most} more; --all lists them")
    return lines


def _cells(site: SiteSeries, part: _Part, width: int, out: TextIO) -> list[str]:
    """Return the last, the smallest and the largest value and a bar chart; empty cells if no value is known.

    The last value is a hyphen if the site is not in the last record.
    """
    by_step = _values(site, part)
    known = [value for value in by_step.values() if not math.isnan(value)]
    if not known:
        return [""] * 4
    steps = site.series.steps
    last = by_step.get(steps[-1])
    return [
        _MISSING if last is None else number(last),
        number(min(known)),
        number(max(known)),
        spark([by_step.get(step, math.nan) for step in steps], width, out),
    ]


def _values(site: SiteSeries, part: _Part) -> dict[int, float]:
    """Return the values of a statistic by step; empty if there are none or all of them are NaN."""
    series, key = site.series, (site.name, site.path + part.suffix)
    if key not in series or part.statistic not in series.statistics:
        return {}
    recorded = series[key]
    by_step = dict(zip(recorded.steps, recorded.numbers(part.statistic).tolist(), strict=True))
    return {} if all(map(math.isnan, by_step.values())) else by_step


def _span(steps: list[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}" if steps else "no steps"


def _degrees(series: Series, findings: Sequence[Finding]) -> dict[tuple[str, str], float]:
    """Return how unusual each site of a series is. Sites that a finding names get the highest degrees."""
    known = [name for name in compared(series.statistics) if name not in ("rank_mean_min", "rank_mean_max")]
    values = {name: series.numbers(name).T for name in known}
    degrees = unusualness(series.sites, values)
    found = {(site.name, site.path): float(degree) for site, degree in zip(series.sites, degrees, strict=True)}
    # Earlier findings are more severe, so they get higher degrees.
    named = dict.fromkeys(series.sites[row] for _, row in rows_of(findings, series.sites) if row is not None)
    return found | {(site.name, site.path): _NAMED - place for place, site in enumerate(named)}


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
    columns = {name: site.numbers(name).tolist() for name in names}
    if wanted is None:  # leave out statistics without known values, such as the minimum of only NaN
        columns = {name: values for name, values in columns.items() if not all(map(math.isnan, values))}
        names = list(columns)
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
