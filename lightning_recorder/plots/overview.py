"""Plots that summarize a group of sites after training."""

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
from lightning_recorder.reductions.histogram import Histogram
from lightning_recorder.tags import make_tag

__all__ = ["overview"]


def overview(
    history: History,
    *,
    group: str,
    statistics: Sequence[str] = ("rms", "mean", "zero_fraction"),
    max_images: int = 8,
) -> dict[str, Image]:
    """Draw the contents of a history; return images by tag.

    The tags are ``<group>_plots/heat_map/<statistic>`` for each statistic, ``<group>_plots/ridge`` for the latest
    histograms, ``<group>_plots/over_time/<site>`` for some evenly spaced sites and, for gradients,
    ``<group>_plots/flow`` for the latest step. Gradients of parameters have no plots over time, because their names
    would collide with those of the parameters. Statistics and histograms that were never recorded have no plots.

    Args:
        history: The recorded statistics.
        group: The group, for example ``activations``. A group that begins with ``gradients`` has a flow plot, and so
            has a group that ends with ``_grad``, the suffix for gradients of parameters.
        statistics: The statistics to draw as heat maps.
        max_images: The maximum number of plots of single sites over time.

    Raises:
        ArgumentError: If the history does not keep a statistic.
    """
    check_integer("max_images", max_images, 0)
    steps, sites = history.steps, history.sites
    found: dict[str, Image] = {}
    if not len(steps) or not sites:
        return found
    of_parameters = group.endswith("_grad")
    # The suffix is redundant, because the group already says that these are gradients.
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
    """Return the display name of a site: its module, with the path unless it is the whole output."""
    if isinstance(site, tuple) and len(site) == 2:
        name, path = site
        return f"{name or '(root)'}" + (f" {path}" if path != "out" else "")
    return str(site) or "(root)"


def _free(tag: str, taken: dict[str, Image]) -> str:
    """Return the tag, with a number appended if another site has the same tag after slashes are replaced."""
    number, free = 1, tag
    while free in taken:
        number += 1
        free = f"{tag} ({number})"
    return free


def _ends(history: History) -> tuple[np.ndarray, np.ndarray]:
    """Return the smallest and the largest values, ``[sites, steps]`` each; NaN if the history does not keep them."""
    unknown = np.full(history.recorded.shape, math.nan)
    low, high = (history.table(name) if name in history.statistics else unknown for name in ("min", "max"))
    return low, high


def _latest(history: History) -> dict[Hashable, Histogram]:
    """Return the latest histogram of each site; its range is known if the site was recorded at the latest step."""
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
    """Draw the gradient flow of the sites recorded at the latest step, in order."""
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
