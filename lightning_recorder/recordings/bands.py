"""Insignificant differences between two runs: the spread of repeated runs, and rounding noise."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from lightning_recorder.names import Site
from lightning_recorder.recordings.divergence import SeriesPair
from lightning_recorder.recordings.series import Series
from lightning_recorder.records.table import Floats

__all__ = ["lower_median", "noise_bands", "rounding_sites"]

_NORMAL_QUANTILE = 5.0  # in standard deviations; repeated runs exceed it once in 1.7 million comparisons
_LEAST_FRACTION = 0.05
_EXTREMES = ("min", "max", "abs_max", "rank_mean_min", "rank_mean_max")
_GRADIENT = ".grad"
_ROUNDINGS = 64
_EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
_LARGEST_SHARE = 0.02  # the upper bound of the result of _limit, for dtypes of low precision


def noise_bands(pair: SeriesPair, reference: Series, repeats: Iterable[Series]) -> dict[str, Floats]:
    """Return the bands within which repeated runs of one configuration differ.

    The band of a site at a step is a quantile of Student's t-distribution times the standard deviation of the repeated
    runs. The standard deviation is the largest of all steps up to that step. A few repeats may agree by chance, so the
    variance is at least the mean variance of a family: all sites with the same path and about the same number of
    elements. The size of the family also determines the degrees of freedom. The band is at least the standard deviation
    of the median site. Minima, maxima and quantiles are not compared. The band of fractions is at least 0.05.

    Args:
        pair: The pair to which the bands apply, without bands.
        reference: The series of the first run, which is one of the repeats.
        repeats: The same series in further runs of the configuration.

    Returns:
        The band of each statistic, divided by :meth:`SeriesPair.scale`, ``[steps, sites]`` float64;
        infinite for minima, maxima and quantiles.
    """
    pairs = [SeriesPair(pair.recorder, reference, each, group=pair.group) for each in repeats]
    families = _families(pair)
    found: dict[str, Floats] = {}
    for name in pair.statistics:
        values = [_placed(pair, each, name) for each in pairs if name in each.statistics]
        if not values or not pair.steps:
            continue
        table = np.stack([pair.values(name)[0], *values])
        if name in _EXTREMES or name.startswith("quantile_"):
            found[name] = np.full_like(table[0], np.inf)
            continue
        with np.errstate(all="ignore"):
            variance = _variance(table) / np.square(pair.scale(name))
        variance = np.maximum.accumulate(np.nan_to_num(variance, nan=0.0, posinf=0.0), axis=0)
        # Some values hardly vary at first, such as the first updates of Adam, but may vary later. Their bands would be
        # too narrow, so the median site is the lower limit.
        band = np.broadcast_to(np.sqrt(lower_median(variance))[:, None], variance.shape).copy()
        for places in families:
            least = variance[:, places].mean(1, keepdims=True)
            # The difference of two runs has twice the variance of one run.
            factor = math.sqrt(2) * _student(len(places) * len(values))
            own = factor * np.sqrt(np.fmax(variance[:, places], least))
            band[:, places] = np.fmax(band[:, places], own)
        found[name] = np.maximum(band, _LEAST_FRACTION) if name.endswith("_fraction") else band
    return found


def _student(freedom: int) -> float:
    """Return the quantile of Student's t-distribution with the probability of five standard deviations of a normal one.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5.
    """
    x = _NORMAL_QUANTILE
    terms = (
        x,
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
        (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92160,
    )
    return math.fsum(term / freedom**power for power, term in enumerate(terms))


def _families(pair: SeriesPair) -> list[list[int]]:
    """Group the sites with the same path and about the same number of elements; return the indices of each group."""
    found: dict[tuple[str, int], list[int]] = {}
    for place, site in enumerate(pair.sites):
        size = math.prod(pair.one[site].shape or (1,))
        found.setdefault((site.path, size.bit_length() // 3), []).append(place)
    return list(found.values())


def _variance(table: Floats) -> Floats:
    """Return the variance over the runs that have a value; 0 with fewer than two."""
    known = ~np.isnan(table)
    count = known.sum(0)
    mean = np.nan_to_num(table, nan=0.0).sum(0) / count
    squares = np.where(known, np.square(table - mean), 0.0).sum(0)
    return np.where(count > 1, squares / (count - 1), 0.0)


def lower_median(values: Floats) -> Floats:
    """Return the median along the last dimension; for an even number of values, the lower of the middle two."""
    found: Floats = np.sort(values, axis=-1)[..., (values.shape[-1] - 1) // 2]
    return found


def _placed(pair: SeriesPair, repeat: SeriesPair, name: str) -> Floats:
    """Return a statistic of a repeated run at the steps and sites of a pair; NaN where it is unknown."""
    found = np.full((len(pair.steps), len(pair.sites)), np.nan)
    steps = {step: place for place, step in enumerate(repeat.steps)}
    sites = {site: place for place, site in enumerate(repeat.sites)}
    rows = [place for place, step in enumerate(pair.steps) if step in steps]
    columns = [place for place, site in enumerate(pair.sites) if site in sites]
    if rows and columns:
        values = repeat.values(name)[1]
        picked = values[[steps[pair.steps[row]] for row in rows]][:, [sites[pair.sites[place]] for place in columns]]
        found[np.ix_(rows, columns)] = picked
    return found


def rounding_sites(pair: SeriesPair, dtypes: Sequence[Mapping[str, str]]) -> frozenset[Site]:
    """Return the sites whose values are only rounding noise, or follow from rounding noise.

    The gradient of some parameters is zero by construction. Examples are a bias before a normalization, and the key
    bias of an attention, which the softmax cancels. The computed gradient is then only the rounding error of its terms,
    but an optimizer such as Adam divides the gradient by its own magnitude, so the updates are not small. A gradient
    counts as rounding noise if it is smaller than 64 rounding errors of the largest gradient of its module, in all
    records of both runs.

    Args:
        pair: The series of parameters, or of gradients.
        dtypes: For each run, the output dtype of each module. The gradients of a float32 parameter have the rounding
            error of the dtype in which the module computes.
    """
    if "rms" not in pair.statistics or not pair.steps:
        return frozenset()
    suffix = _GRADIENT if pair.group == "parameters" else ""
    sites = {
        site: place
        for place, site in enumerate(pair.sites)
        if site.path.endswith(suffix) and (suffix or not site.path.startswith(("in", "out")))
    }
    found: set[str] = set()
    by_module: dict[str, list[Site]] = {}
    for site in sites:
        by_module.setdefault(site.name, []).append(site)
    rms = pair.values("rms") if by_module else ()
    for name, parts in by_module.items():
        places = [sites[site] for site in parts]
        sizes = np.stack([values[:, places] for values in rms])  # [2, steps, parts]
        largest = sizes.max(2)
        for index, site in enumerate(parts):
            own = (pair.one[site].dtype, dtypes[0]), (pair.other[pair.counterparts[site]].dtype, dtypes[1])
            limits = np.array([_limit(dtype, known.get(name)) for dtype, known in own])
            is_small = sizes[..., index] <= limits[:, None] * largest
            if bool(is_small.all()) and bool((largest > 0).any()):
                found.add(f"{name}\n{site.path.removesuffix(suffix)}")
    return frozenset(
        site for site in pair.sites if any(f"{site.name}\n{path}" in found for path in _prefixes(site.path))
    )


def _limit(*dtypes: str | None) -> float:
    """Return the threshold for rounding noise in the least precise of some dtypes; 0 without a dtype.

    It is a fraction of the largest gradient of the module.
    """
    return min(_ROUNDINGS * max(_EPS.get(dtype or "", 0.0) for dtype in dtypes), _LARGEST_SHARE)


def _prefixes(path: str) -> Iterable[str]:
    """Yield a path and the path of the parameter that it may belong to, such as ``weight`` for ``weight.update``."""
    yield path
    yield path.rpartition(".")[0]
