"""The pictures of a group of sites: what is worth a look after a training."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np

from lightning_recorder.errors import check_integer
from lightning_recorder.plots.canvas import Image
from lightning_recorder.plots.frame import evenly
from lightning_recorder.plots.gradient_flow import gradient_flow
from lightning_recorder.plots.heat_map import heat_map
from lightning_recorder.plots.history import History
from lightning_recorder.plots.over_time import histogram_over_time
from lightning_recorder.plots.rebin import histogram_of
from lightning_recorder.plots.ridge import ridge
from lightning_recorder.reductions.binned import Histogram
from lightning_recorder.tags import make_tag

__all__ = ["overview"]


def overview(
    history: History,
    *,
    group: str,
    statistics: Sequence[str] = ("rms", "mean", "zero_fraction"),
    max_images: int = 8,
) -> dict[str, Image]:
    """Pictures of what a history holds, by tag.

    Those are ``<group>_plots/heat_map/<statistic>`` for each statistic, ``<group>_plots/ridge`` of the latest
    histograms, ``<group>_plots/over_time/<site>`` for some sites evenly spread and, of gradients,
    ``<group>_plots/flow`` of the latest step. Gradients of parameters have no pictures over time, since those of the
    parameters would stand beside them under the same names. A statistic that was never recorded has no picture, nor
    has what has no histogram.

    Args:
        history: What was recorded.
        group: As ``activations``; what begins with ``gradients`` has a picture of their flow, and what ends with
            ``_grad``, as the gradients of parameters do.
        statistics: Of which heat maps are made.
        max_images: The most pictures of single sites over time.

    Raises:
        ArgumentError: If the history does not hold a statistic.
    """
    check_integer("max_images", max_images, 0)
    steps, sites = history.steps, history.sites
    found: dict[str, Image] = {}
    if not len(steps) or not sites:
        return found
    of_parameters = group.endswith("_grad")
    # The group says already that they are gradients.
    names = [_name(site).removesuffix(".grad") if of_parameters else _name(site) for site in sites]
    for statistic in statistics:
        values = history.table(statistic)
        if not np.isnan(values).all():
            found[make_tag(f"{group}_plots", "heat_map", statistic)] = heat_map(
                steps, names, values, statistic=statistic, title=f"{group}: {statistic}", recorded=history.recorded
            )
    latest = {names[sites.index(site)]: histogram for site, histogram in _latest(history).items()}
    if latest:
        found[make_tag(f"{group}_plots", "ridge", "")] = ridge(
            list(latest), list(latest.values()), title=f"{group}: histograms", step=int(steps[-1])
        )
    if (group.startswith("gradients") or of_parameters) and {"rms", "min", "max"} <= set(history.statistics):
        found[make_tag(f"{group}_plots", "flow", "")] = _flow(history, names, group)
    places = [] if of_parameters else history.histogram_sites
    for place in evenly(len(places), max_images):
        name = _name(places[place])
        tag = _free(make_tag(f"{group}_plots", "over_time", name), found)
        found[tag] = histogram_over_time(steps, _over_time(history, places[place]), title=f"{group}: {name}")
    return found


def _name(site: Hashable) -> str:
    """What a site is called: its module, with the path where it is not the whole output."""
    if isinstance(site, tuple) and len(site) == 2:
        name, path = site
        return f"{name or '(root)'}" + (f" {path}" if path != "out" else "")
    return str(site) or "(root)"


def _free(tag: str, taken: dict[str, Image]) -> str:
    """The tag, with a number if another site's is the same once slashes are replaced."""
    number, free = 1, tag
    while free in taken:
        number += 1
        free = f"{tag} ({number})"
    return free


def _ends(history: History) -> tuple[np.ndarray, np.ndarray]:
    """The smallest and the largest values, ``[sites, steps]`` each; NaN where the history holds none."""
    unknown = np.full(history.recorded.shape, math.nan)
    low, high = (history.table(name) if name in history.statistics else unknown for name in ("min", "max"))
    return low, high


def _latest(history: History) -> dict[Hashable, Histogram]:
    """The latest histogram of each site; its ends are known if it was recorded at the latest step."""
    rows = {site: row for row, site in enumerate(history.sites)}
    low, high = _ends(history)
    return {
        site: histogram_of(counts, float(low[rows[site], -1]), float(high[rows[site], -1]))
        for site, counts in history.latest_counts().items()
    }


def _over_time(history: History, site: Hashable) -> list[Histogram]:
    row = history.sites.index(site)
    low, high = (ends[row] for ends in _ends(history))
    return [histogram_of(*each) for each in zip(history.counts(site), low, high, strict=True)]


def _flow(history: History, names: list[str], group: str) -> Image:
    """Of the sites that were recorded at the latest step, in their order."""
    rows = np.flatnonzero(history.recorded[:, -1])
    low, high = (ends[rows, -1] for ends in _ends(history))
    return gradient_flow(
        [names[row] for row in rows],
        history.table("rms")[rows, -1],
        np.maximum(np.abs(low), np.abs(high)),
        title=f"{group}: flow",
        step=int(history.steps[-1]),
        statistic="rms",
        largest="largest magnitude",
    )
