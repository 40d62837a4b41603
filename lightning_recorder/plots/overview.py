"""The plots that summarize recorded statistics over time."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.errors import check_integer
from lightning_recorder.insight.finding import Finding
from lightning_recorder.insight.unusual import STANDS_OUT, choose, standing_out, unusualness
from lightning_recorder.names import site_title
from lightning_recorder.plots.axes import Floats
from lightning_recorder.plots.canvas import Image
from lightning_recorder.plots.frame import FoundAt, places_of, title_of
from lightning_recorder.plots.gradient_flow import gradient_flow
from lightning_recorder.plots.heat_map import heat_map
from lightning_recorder.plots.histograms import histogram_of, histogram_over_time, ridge
from lightning_recorder.plots.plot_history import PlotHistory
from lightning_recorder.plots.rebinning import Bins, bins_of_counts
from lightning_recorder.records.histogram import Histogram
from lightning_recorder.records.tags import make_tag

__all__ = ["overview", "pictures"]


def overview(
    history: PlotHistory,
    *,
    group: str,
    statistics: Sequence[str] = ("rms", "mean", "zero_fraction"),
    max_images: int = 8,
    findings: Sequence[Finding] = (),
) -> dict[str, Image]:
    """Draw the contents of a history. Return images by tag.

    The tags are ``<group>_plots/heat_map/<statistic>`` for each statistic, ``<group>_plots/ridge`` for the latest
    histograms, ``<group>_plots/over_time/<site>`` for some sites and, for gradients, ``<group>_plots/flow`` for the
    latest step. With more than 20 sites, ``Unusual/<group>`` is a heat map of 20 of the sites. It comes first on a page
    that sorts tags. It is drawn only if a site stands out or a finding names a site. Gradients of parameters have no
    plots over time, because their names would collide with the names of the parameters. Statistics and histograms that
    were never recorded have no plots. All images choose and mark the same sites: the sites of findings, the sites that
    stand out in any of the kept statistics, and an even selection of the others.

    Args:
        history: The recorded statistics.
        group: The group, for example ``activations``. A group has a flow plot if its name begins with ``gradients``, or
            ends with ``_grad``, the suffix for gradients of parameters.
        statistics: The statistics to draw as heat maps.
        max_images: The maximum number of plots of single sites over time.
        findings: The findings to mark in the heat maps and in the plots over time.

    Raises:
        ArgumentError: If the history does not keep a statistic.
    """
    return dict(pictures(history, group=group, statistics=statistics, max_images=max_images, findings=findings))


def pictures(
    history: PlotHistory, *, group: str, statistics: Sequence[str], max_images: int, findings: Sequence[Finding]
) -> Iterator[tuple[str, Image]]:
    """Draw the images of :func:`overview` one by one. Yield each image with its tag."""
    check_integer("max_images", max_images, 0)
    steps, sites = history.steps, history.sites
    if not len(steps) or not sites:
        return
    of_parameters = group.endswith("_grad")
    # The suffix is redundant, because the name of the group already contains it.
    names = [_name(site).removesuffix(".grad") if of_parameters else _name(site) for site in sites]
    degrees, marks, known = history.degrees, places_of(findings, sites), history.has_values
    ranked = degrees.copy()
    ranked[[each.row for each in marks if each.row is not None]] = np.inf
    for statistic in statistics:
        values = history.table(statistic)
        if not np.isnan(values).all():
            tag = make_tag(f"{group}_plots", "heat_map", "out", statistic)
            yield tag, _heat_map(history, names, statistic, f"{group}: {statistic}", degrees, marks, known)
    shown = _most_telling(history, ranked) if len(sites) > _FEW_LAYERS else None
    if shown:
        title = f"{group}: most unusual layers"
        tag = make_tag("Unusual", group, "out")
        yield tag, _heat_map(history, names, shown, title, degrees, marks, known, _FEW_LAYERS)
    rows = {site: row for row, site in enumerate(sites)}
    latest = {rows[site]: histogram for site, histogram in _latest_histograms(history).items()}
    if latest:
        histograms = ridge(
            [names[row] for row in latest],
            list(latest.values()),
            title=f"{group}: histograms",
            step=int(steps[-1]),
            degrees=degrees[list(latest)],
        )
        yield make_tag(f"{group}_plots", "ridge", ""), histograms
    if (group.startswith("gradients") or of_parameters) and {"rms", "min", "max"} <= set(history.statistics):
        yield make_tag(f"{group}_plots", "flow", ""), _flow(history, names, group, degrees)
    taken = set[str]()
    places = [] if of_parameters else history.histogram_sites_of(degrees)
    for place in choose(ranked[[rows[site] for site in places]], max_images):
        of_site = [each for each in marks if each.row in (None, rows[places[place]])]
        name = _name(places[place])
        tag = _free(make_tag(f"{group}_plots", "over_time", "out", name), taken)
        taken.add(tag)
        yield (
            tag,
            histogram_over_time(
                history.count_steps(places[place]),
                _over_time(history, places[place]),
                title=title_of(group, name, names),
                findings=of_site,
            ),
        )


_FEW_LAYERS = 20  # a heat map with this many rows fits on a screen


def _heat_map(
    history: PlotHistory,
    names: list[str],
    statistic: str,
    title: str,
    degrees: Floats,
    marks: Sequence[FoundAt],
    has_values: NDArray[np.bool_],
    max_layers: int = 260,
) -> Image:
    values, recorded = history.furthest(statistic)
    # Leave out sites without this statistic, such as buffers, which have no update ratio. But a site without any
    # statistic keeps its row, which shows that nothing was recorded.
    rows = np.flatnonzero(~np.isnan(values).all(axis=1) | ~has_values).tolist()
    places = {row: place for place, row in enumerate(rows)}
    return heat_map(
        history.steps,
        [names[row] for row in rows],
        values[rows],
        statistic=statistic,
        title=title,
        recorded=recorded[rows],
        undefined=_undefined(history, statistic, values, recorded)[rows],
        degrees=degrees[rows],
        max_layers=max_layers,
        findings=[
            each if each.row is None else each._replace(row=places[each.row])
            for each in marks
            if each.row is None or each.row in places
        ],
    )


def _undefined(history: PlotHistory, statistic: str, values: Floats, recorded: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return a mask of the update ratios that are undefined, because the weight is zero or had no update."""
    if statistic != "update_ratio" or "rms" not in history.statistics:
        return np.zeros(values.shape, dtype=bool)
    return recorded & ~np.isfinite(values) & np.isfinite(history.furthest("rms")[0])


def _most_telling(history: PlotHistory, degrees: Floats) -> str | None:
    """Return the statistic in which the most unusual site is most unusual; None if no site stands out."""
    sizes = [name for name in ("rms", "update_ratio", "zero_fraction") if name in history.statistics]
    known = [name for name in sizes if not np.isnan(history.table(name)).all()]
    first = standing_out(degrees)[:1]
    if not first:
        return None

    def degree(name: str) -> float:
        found = float(unusualness(history.sites, {name: history.table(name)})[first[0]])
        return found if found >= STANDS_OUT else 0.0

    return max(known, key=degree, default=None)


def _name(site: Hashable) -> str:
    """Return the display name of a site: its module, and the path inside the output unless it is the whole output."""
    if isinstance(site, tuple) and len(site) == 2:
        return site_title(*site)
    return str(site) or "(root)"


def _free(tag: str, taken: Collection[str]) -> str:
    """Return the tag, with a number appended if another site has the same tag after slashes are replaced."""
    number, free = 1, tag
    while free in taken:
        number += 1
        free = f"{tag} ({number})"
    return free


def _ends(history: PlotHistory) -> tuple[np.ndarray, np.ndarray]:
    """Return the smallest and the largest values, ``[sites, steps]`` each; NaN if the history does not keep them."""
    unknown = np.full(history.recorded.shape, math.nan)
    low, high = (history.table(name) if name in history.statistics else unknown for name in ("min", "max"))
    return low, high


def _latest_histograms(history: PlotHistory) -> dict[Hashable, Histogram]:
    """Return the latest histogram of each site. Its range is known if the site was recorded at the latest step."""
    rows = {site: row for row, site in enumerate(history.sites)}
    low, high = _ends(history)
    return {
        site: histogram_of(counts, float(low[rows[site], -1]), float(high[rows[site], -1]))
        for site, counts in history.latest_counts()
    }


def _over_time(history: PlotHistory, site: Hashable) -> Bins:
    row, columns = history.sites.index(site), np.searchsorted(history.steps, history.count_steps(site))
    low, high = (ends[row, columns] for ends in _ends(history))
    return bins_of_counts(history.counts(site), low, high)


def _flow(history: PlotHistory, names: list[str], group: str, degrees: Floats) -> Image:
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
        degrees=degrees[rows],
    )
