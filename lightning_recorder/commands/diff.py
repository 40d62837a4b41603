"""``diff``: show why runs differ, and the first step and site with a difference."""

from __future__ import annotations

import json
from argparse import Namespace
from collections import Counter
from dataclasses import asdict
from itertools import groupby
from operator import attrgetter
from typing import Any, TextIO

from lightning_recorder.commands.terminal import counted, module, printable, table
from lightning_recorder.errors import ArgumentError
from lightning_recorder.names import site_title
from lightning_recorder.recordings import Comparison, Difference, Divergence, Tolerance, compare, open_recording
from lightning_recorder.recordings.explanation import explain, place, site_name, written_apart
from lightning_recorder.recordings.rank_spread import RankComparison, compare_ranks
from lightning_recorder.recordings.run_changes import Change
from lightning_recorder.records.file import json_values

__all__ = ["run"]

_MOST_LINES = 20  # the most lines of output, so that it fits on a screen
_FEWEST_SITES = 3
_FEW = 8
_MOST_ALIKE = 3  # the most lines about one kind of difference
_LONGEST = 600  # the most characters of a sentence


def run(arguments: Namespace, out: TextIO) -> int:
    """Compare the runs and print the result; return 0 if they are the same and 1 otherwise."""
    if arguments.ranks:
        return _run_ranks(arguments, out)
    if len(arguments.runs) < 2:
        raise ArgumentError("diff compares two or more runs, or with --ranks, the ranks of one run")
    found = _compared(arguments)
    if arguments.json:
        plain = {
            path: _plain(each, exact=arguments.exact) for path, each in zip(arguments.runs[1:], found, strict=True)
        }
        several = {"same": all(each.same for each in found), "reference": arguments.runs[0], "runs": plain}
        out.write(json.dumps(several if len(found) > 1 else next(iter(plain.values())), indent=1) + "\n")
    elif len(found) > 1:
        out.write("\n".join(_several(found, arguments)) + "\n")
    else:
        names = [f"{letter}  {printable(path, None)}" for letter, path in zip("AB", arguments.runs, strict=True)]
        lines = _lines(found[0], exact=arguments.exact, is_long=arguments.all)
        out.write("\n".join([*names, *lines]) + "\n")
    return 0 if all(each.same for each in found) else 1


def _compared(arguments: Namespace) -> list[Comparison]:
    """Compare the first run with each of the others."""
    one, *others = (open_recording(path).run for path in arguments.runs)
    tolerance = Tolerance(arguments.rtol, arguments.atol, exact=arguments.exact)
    noise = [open_recording(path).run for path in arguments.noise]
    options = {"recorder": arguments.recorder, "stage": arguments.stage, "names": arguments.map, "noise": noise}
    return [compare(one, other, tolerance, **options) for other in others]


def _several(found: list[Comparison], arguments: Namespace) -> list[str]:
    """Format the comparisons of several runs with the first run, A. Each of the other runs is called B."""
    lines = [f"A  {printable(arguments.runs[0], None)}"]
    for path, each in zip(arguments.runs[1:], found, strict=True):
        lines += [f"B  {printable(path, None)}", f"   {printable(explain(each, exact=arguments.exact), _LONGEST)}"]
        lines += [f"   {_first(each.first)}"] if each.first is not None else []
    same = sum(each.same for each in found)
    return [*lines, f"{same} of {len(found)} runs are the same as A"]


def _lines(found: Comparison, *, exact: bool, is_long: bool) -> list[str]:
    lines = [printable(explain(found, exact=exact), _LONGEST)]
    if found.first is not None:
        lines.append(_first(found.first))
    facts = [*_differences(found.differences, is_long=is_long), *_changes(found.changes, lines[0])]
    lines += ["", *facts] if facts else []
    notes = [*map(printable, found.notes), *_rounding(found)]
    if found.sites:
        left = _MOST_LINES - len(lines) - len(notes) - 5  # blank lines, the names of the runs, the head of the table
        lines += ["", *_table(found, len(found.sites) if is_long else max(_FEWEST_SITES, left))]
    return [*lines, *([""] if notes else []), *notes]


def _first(first: Divergence) -> str:
    return f"first difference: step {first.step}, {printable(place(first))}"


def _changes(changes: list[Change], sentence: str) -> list[str]:
    """Format the differences of models and settings that the explanation in ``sentence`` does not mention."""
    texts = [text for text in (printable(str(each)) for each in changes) if text not in sentence]
    more = f" and {len(texts) - _FEW} more" if len(texts) > _FEW else ""
    return [f"also different: {', '.join(texts[:_FEW])}{more}"] if texts else []


def _rounding(found: Comparison) -> list[str]:
    if not found.rounding:
        return []
    names = ", ".join(dict.fromkeys(printable(site_name(site)) for site in found.rounding[:1]))
    if len(found.rounding) == 1:
        return [f"1 site is left out, which is only rounding noise: {names}"]
    return [f"{len(found.rounding)} sites are left out, which are only rounding noise, such as {names}"]


def _stage(divergence: Divergence) -> str:
    return printable(divergence.stage) + ("" if divergence.loader is None else f"/{divergence.loader}")


def _site(divergence: Divergence) -> str:
    name, path = divergence.site
    return module(name) + printable(site_title("", path).removeprefix("(root)"))


def _table(found: Comparison, most: int) -> list[str]:
    rows = [["site", "recorder", "stage", "from step", "steps", "distance", "at step", "statistic", "A", "B"]]
    for each in found.sites[:most]:
        first, worst = each.first, each.furthest
        where = [_site(first), printable(first.recorder), _stage(first), str(first.step), str(each.steps)]
        # For a histogram, the two values are only counts, which do not show the difference.
        values = ("", "") if worst.statistic == "histogram" else written_apart(worst.one, worst.other)
        rows.append([*where, f"{worst.distance:.2g}", str(worst.step), printable(worst.statistic), *values])
    more = len(found.sites) - most
    return [
        *table(rows, right=(3, 4, 5, 6, 8, 9)),
        *([f"and {counted(more, 'more site')}; --all prints them"] if more > 0 else []),
    ]


def _differences(differences: list[Difference], *, is_long: bool) -> list[str]:
    """Format the differences that are not numerical. Equal differences of several sites share a line."""
    lines: list[str] = []
    counts: Counter[str] = Counter()
    for (kind, recorder, one, other), group in groupby(differences, attrgetter("kind", "recorder", "one", "other")):
        names = [printable(each.what) for each in group]
        counts[kind] += 1
        if counts[kind] > _MOST_ALIKE and not is_long:
            continue
        shown = ", ".join(names[:_FEW]) + (f" and {len(names) - _FEW} more" if len(names) > _FEW else "")
        of = f" ({printable(recorder)})" if recorder else ""
        if (one, other) in (("yes", "no"), ("no", "yes")):
            lines.append(f"{kind}s{of} only in {'A' if one == 'yes' else 'B'}: {shown}")
        elif one or other:
            lines.append(f"{kind} of {shown}{of}: {printable(one)} in A, {printable(other)} in B")
        else:
            lines.append(f"{kind}s: {shown}")
    for kind, count in counts.items():
        if count > _MOST_ALIKE and not is_long:
            lines.append(f"and {counted(count - _MOST_ALIKE, 'more line')} about a {kind}; --all prints them")
    return lines


def _run_ranks(arguments: Namespace, out: TextIO) -> int:
    if len(arguments.runs) != 1:
        raise ArgumentError(f"--ranks compares the ranks of one run, got {len(arguments.runs)} runs")
    found = compare_ranks(open_recording(arguments.runs[0]).run)
    if arguments.json:
        plain = {
            "same": found.same,
            "sentence": found.sentence,
            "diverged": [_divergence(each) for each in found.diverged],
            "spreads": [_divergence(each) for each in found.spreads],
        }
        out.write(json.dumps(plain, indent=1) + "\n")
    else:
        out.write("\n".join(_rank_lines(found, is_long=arguments.all)) + "\n")
    return 0 if found.same else 1


def _rank_lines(found: RankComparison, *, is_long: bool) -> list[str]:
    lines = [printable(found.sentence, _LONGEST)]
    spreads = found.spreads if is_long else found.spreads[:_FEW]
    if spreads:
        rows = [["site", "recorder", "at step", "distance", "lowest mean", "highest mean"]]
        for each in spreads:
            values = written_apart(each.one, each.other)
            rows.append([_site(each), printable(each.recorder), str(each.step), f"{each.distance:.2g}", *values])
        lines += ["", *table(rows, right=(2, 3, 4, 5))]
    return lines


def _plain(found: Comparison, *, exact: bool) -> dict[str, Any]:
    """Convert a comparison to JSON values; NaN and infinities become strings, as in the record files."""
    return {
        "same": found.same,
        "sentence": explain(found, exact=exact),
        "steps": found.steps,
        "compared": found.compared,
        "last_same": found.last_same,
        "first": _divergence(found.first),
        "first_bits": _divergence(found.first_bits),
        "sites": [
            {"first": _divergence(each.first), "furthest": _divergence(each.furthest), "steps": each.steps}
            for each in found.sites
        ],
        "differences": [asdict(each) for each in found.differences],
        "changes": [
            {"what": each.what, "aspect": each.aspect, "one": each.one, "other": each.other, "others": each.others}
            for each in found.changes
        ],
        "rounding": [list(site) for site in found.rounding],
        "map": list(found.rules),
        "notes": found.notes,
    }


def _divergence(divergence: Divergence | None) -> dict[str, Any] | None:
    if divergence is None:
        return None
    about = {**asdict(divergence), "module": divergence.site.name, "path": divergence.site.path}
    del about["site"]
    return dict(json_values(about))
