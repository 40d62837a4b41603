"""``scale``: the coordinate check, which fits the growth of each site's values with the width of the model."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from typing import TextIO

from lightning_recorder.commands.terminal import counted, module, printable, table
from lightning_recorder.recordings import open_recording
from lightning_recorder.recordings.scaling import Scaling, SiteScaling, check_scaling
from lightning_recorder.records.file import json_values

__all__ = ["run"]

_MOST_SITES = 14
_LONGEST = 600  # the most characters of a sentence


def run(arguments: Namespace, out: TextIO) -> int:
    """Print the exponents of the sites. Return 1 if any exponent is off, else 0."""
    runs = [run for path in arguments.runs for run in open_recording(path).runs.values()]
    found = check_scaling(runs, arguments.widths, recorder=arguments.recorder, tolerance=arguments.tolerance)
    if arguments.json:
        about = {"same": not found.off, "sentence": found.sentence, "advice": found.advice, **asdict(found)}
        out.write(json.dumps(json_values(about), indent=1) + "\n")
    else:
        out.write("\n".join(_lines(found, is_long=arguments.all)) + "\n")
    return 1 if found.off else 0


def _lines(found: Scaling, *, is_long: bool) -> list[str]:
    lines = [printable(found.sentence, _LONGEST), *([found.advice] if found.advice else [])]
    chosen = list(found.sites) if is_long else found.off or sorted(found.sites, key=lambda each: -abs(each.exponent))
    shown = chosen if is_long else chosen[:_MOST_SITES]
    more = len(chosen) - len(shown)
    hidden = [f"and {counted(more, 'more site')}; --all prints them"] if more else []
    return [*lines, "", *_table(found, shown), *hidden]


def _table(found: Scaling, sites: Sequence[SiteScaling]) -> list[str]:
    widths = list(dict.fromkeys(found.widths))
    head = ["site", "exponent", "±", "at step", "expected", *(f"width {width:g}" for width in widths), ""]
    rows = [head]
    for each in sites:
        error = each.errors[found.steps.index(each.step)]
        expected = "-0.5 to 0" if each.is_readout else "0"
        numbers = [f"{each.exponent:.2f}", "" if math.isnan(error) else f"{error:.2f}", str(each.step), expected]
        name = module(each.site.name) + ("" if each.site.path == "out" else f" {printable(each.site.path)}")
        values = list(zip(found.widths, each.values, strict=True))
        sizes = (_mean([value for width, value in values if width == size]) for size in widths)
        rows.append([name, *numbers, *(f"{size:.3g}" for size in sizes), "off" * each.is_off])
    return [f"{found.statistic} of each site:", *table(rows, right=range(1, len(head) - 1))]


def _mean(values: Sequence[float]) -> float:
    """Return the mean over the runs of one width."""
    return math.fsum(values) / len(values)
