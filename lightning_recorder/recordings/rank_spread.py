"""Differences between the ranks of one run."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lightning_recorder.errors import ArgumentError
from lightning_recorder.names import Site
from lightning_recorder.recordings.divergence import Divergence
from lightning_recorder.recordings.recording import Run
from lightning_recorder.recordings.series import Series

__all__ = ["RankComparison", "compare_ranks"]

_LOW, _HIGH = "rank_mean_min", "rank_mean_max"


@dataclass(frozen=True)
class RankComparison:
    """The differences between the ranks of one run."""

    ranks: int  # the number of ranks
    steps: int  # the number of records with values of several ranks
    # the replicated parameters and gradients that differ between ranks, ordered by step
    diverged: list[Divergence]
    # For each site, the step with the largest distance between the means of two ranks, relative to the standard
    # deviation of the site. The largest distance comes first. Ranks have different batches, so activations differ.
    spreads: list[Divergence]

    @property
    def same(self) -> bool:
        """True if the replicated parameters and gradients are equal on all ranks."""
        return not self.diverged

    @property
    def sentence(self) -> str:
        """The result in one sentence."""
        if self.diverged:
            first = self.diverged[0]
            name = ".".join(filter(None, first.site))
            more = len({each.site for each in self.diverged}) - 1
            also = f" and {more} more" if more else ""
            verb = "differ" if more else "differs"
            return f"the {self.ranks} ranks have diverged: {name}{also} {verb} between ranks from step {first.step}"
        records = "the only record" if self.steps == 1 else f"all {self.steps} records"
        text = f"the {self.ranks} ranks have equal replicated parameters and gradients in {records}"
        if self.spreads:
            first = self.spreads[0]
            name = (first.site.name or "(root)") + ("" if first.site.path == "out" else f" {first.site.path}")
            text += f"; the means differ most in {name}, by {first.distance:.2g} standard deviations"
        return text


def compare_ranks(run: Run) -> RankComparison:
    """Compare the ranks of a run, as far as its merged records distinguish them.

    Raises:
        ArgumentError: If the run has no records of several ranks.
        DumpError: If a file cannot be read.
    """
    diverged: list[Divergence] = []
    spreads: list[Divergence] = []
    ranks, steps = 1, set()
    for label in run:
        series = run[label]
        for step in series.steps:
            about = series.about(step)
            ranks = max(ranks, int(about.get("ranks", 1)))
            diverged += _diverged(label, series, step, about.get("diverged"))
            if about.get("ranks", 1) > 1:
                steps.add((label, step))
        spreads += _spreads(label, series)
    if ranks < 2:
        raise ArgumentError(f"{run.name!r} has no records of several ranks")
    diverged.sort(key=lambda each: each.step)
    spreads.sort(key=lambda each: -each.distance)
    return RankComparison(ranks, len(steps), diverged, spreads)


def _diverged(label: str, series: Series, step: int, sites: object) -> list[Divergence]:
    known = set(series.sites)
    found = [Site(*each) for each in sites if len(each) == 2] if isinstance(sites, list) else []
    where = step, label, series.stage, series.loader
    return [Divergence(*where, site, "mean", math.nan, math.nan, math.nan) for site in found if site in known]


def _spreads(label: str, series: Series) -> list[Divergence]:
    if not {_LOW, _HIGH, "std"} <= set(series.statistics):
        return []
    low, high, std = (series.numbers(name) for name in (_LOW, _HIGH, "std"))
    with np.errstate(all="ignore"):
        distance = np.nan_to_num((high - low) / std, nan=-1.0, posinf=-1.0)
    found = []
    for place, site in enumerate(series.sites):
        row = int(distance[:, place].argmax())
        if distance[row, place] >= 0:
            ends = low[row, place].item(), high[row, place].item()
            where = series.steps[row], label, series.stage, series.loader
            found.append(Divergence(*where, site, "mean", *ends, distance[row, place].item()))
    return found
