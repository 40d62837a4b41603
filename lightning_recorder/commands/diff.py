"""``diff``: the first divergence of two runs."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import asdict
from itertools import groupby
from typing import Any, TextIO

from lightning_recorder.commands.terminal import module, printable, table
from lightning_recorder.names import site_title
from lightning_recorder.recordings import Comparison, Difference, Divergence, Tolerance, compare, open_recording

__all__ = ["run"]

_MOST_SITES = 30
_FEW = 8


def run(arguments: Namespace, out: TextIO) -> int:
    """Compare the runs and print the result; return 0 if they are the same and 1 otherwise."""
    one, other = (open_recording(path).run for path in (arguments.one, arguments.other))
    tolerance = Tolerance(arguments.rtol, arguments.atol, exact=arguments.exact)
    found = compare(one, other, tolerance, recorder=arguments.recorder, stage=arguments.stage)
    if arguments.json:
        out.write(json.dumps(_plain(found), indent=1) + "\n")
    else:
        names = [f"A  {printable(arguments.one)}", f"B  {printable(arguments.other)}"]
        out.write("\n".join([*names, *_lines(found, exact=arguments.exact)]) + "\n")
    return 0 if found.same else 1


def _lines(found: Comparison, *, exact: bool) -> list[str]:
    lines = [_headline(found, exact=exact)]
    if found.differences:
        lines += ["", *_differences(found.differences)]
    if found.sites:
        lines += ["", *_table(found)]
    return [*lines, *([""] if found.notes else []), *map(printable, found.notes)]


def _headline(found: Comparison, *, exact: bool) -> str:
    if found.first is None:
        if not found.steps:
            return "they have no common step"
        what = "the same" if found.first_bits is not None else "bitwise equal"
        what += ", histograms too," if exact else ""
        text = f"{what} in all {found.steps} steps" + (" that both have" if found.differences else "")
        if found.first_bits is not None:
            text += f", but not bitwise from step {found.first_bits.step}, {_place(found.first_bits)}"
        return text
    until = "" if found.last_same is None else f"same until step {found.last_same}, "
    return f"{until}part at step {found.first.step} in {_place(found.first)}{_cause(found, found.first)}"


def _place(divergence: Divergence) -> str:
    one, other = _written_apart(divergence.one, divergence.other)
    values = "" if divergence.statistic == "histogram" else f" {one} vs {other}"
    stage = "" if divergence.stage == "train" else f" {_stage(divergence)}"
    return f"{_site(divergence)} ({printable(divergence.recorder)}{stage}, {printable(divergence.statistic)}{values})"


def _written_apart(one: float, other: float) -> tuple[str, str]:
    """Format two numbers with enough digits to distinguish them."""
    for digits in (3, 4, 6, 9, 17):
        texts = f"{one:.{digits}g}", f"{other:.{digits}g}"
        if texts[0] != texts[1]:
            break
    return texts


def _stage(divergence: Divergence) -> str:
    return printable(divergence.stage) + ("" if divergence.loader is None else f"/{divergence.loader}")


def _site(divergence: Divergence) -> str:
    name, path = divergence.site
    return module(name) + printable(site_title("", path).removeprefix("(root)"))


def _cause(found: Comparison, first: Divergence) -> str:
    """Return a note about the dtype of the first diverging site, if it differs between the runs."""
    what = site_title(*first.site)
    for each in found.differences:
        if (each.kind, each.recorder, each.what) == ("dtype", first.recorder, what):
            return f": its dtype is {printable(each.one)} in A and {printable(each.other)} in B"
    return ""


def _table(found: Comparison) -> list[str]:
    rows = [["site", "recorder", "stage", "from step", "steps", "distance", "at step", "statistic", "A", "B"]]
    for each in found.sites[:_MOST_SITES]:
        first, worst = each.first, each.furthest
        where = [_site(first), printable(first.recorder), _stage(first), str(first.step), str(each.steps)]
        values = _written_apart(worst.one, worst.other)
        rows.append([*where, f"{worst.distance:.2g}", str(worst.step), printable(worst.statistic), *values])
    more = len(found.sites) - _MOST_SITES
    return [*table(rows, right=(3, 4, 5, 6, 8, 9)), *([f"and {more} more sites"] if more > 0 else [])]


def _differences(differences: list[Difference]) -> list[str]:
    """Format the differences that are not numerical, with one line per kind."""
    lines = []
    for (kind, recorder, one, other), group in groupby(
        differences, key=lambda each: (each.kind, each.recorder, each.one, each.other)
    ):
        names = [printable(each.what) for each in group]
        shown = ", ".join(names[:_FEW]) + (f" and {len(names) - _FEW} more" if len(names) > _FEW else "")
        of = f" ({printable(recorder)})" if recorder else ""
        if (one, other) in (("yes", "no"), ("no", "yes")):
            lines.append(f"{kind}s{of} only in {'A' if one == 'yes' else 'B'}: {shown}")
        elif one or other:
            lines.append(f"{kind} of {shown}{of}: {printable(one)} in A, {printable(other)} in B")
        else:
            lines.append(f"{kind}s: {shown}")
    return lines


def _plain(found: Comparison) -> dict[str, Any]:
    """Convert a comparison to JSON values; NaN and infinities become strings, as in the record files."""
    return {
        "same": found.same,
        "steps": found.steps,
        "last_same": found.last_same,
        "first": _divergence(found.first),
        "first_bits": _divergence(found.first_bits),
        "sites": [
            {"first": _divergence(each.first), "furthest": _divergence(each.furthest), "steps": each.steps}
            for each in found.sites
        ],
        "differences": [asdict(each) for each in found.differences],
        "notes": found.notes,
    }


def _divergence(divergence: Divergence | None) -> dict[str, Any] | None:
    if divergence is None:
        return None
    about = {**asdict(divergence), "module": divergence.site.name, "path": divergence.site.path}
    del about["site"]
    return {key: _number(value) if isinstance(value, float) else value for key, value in about.items()}


def _number(value: float) -> float | str:
    return value if value - value == 0 else repr(value)
