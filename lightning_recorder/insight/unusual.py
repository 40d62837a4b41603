"""Rank sites by how unusual they are, for pages and pictures that cannot show all sites."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.functions import function_of
from lightning_recorder.insight.module_edges import families
from lightning_recorder.records.table import Floats, is_of_data

__all__ = [
    "STANDS_OUT",
    "are_of_losses",
    "choose",
    "compared",
    "compared_steps",
    "known_median",
    "standing_out",
    "unusualness",
]

Logs = NDArray[np.float32]
AnyFloat = TypeVar("AnyFloat", np.float32, np.float64)

STANDS_OUT = 1.0
"""The smallest degree of a site that stands out."""

_WORTH_A_PLACE = 0.5  # from this degree on, sites are chosen before evenly spread ones, for up to half of the selection

_FEWEST = 4  # the smallest number of sites with a meaningful median
_AROUND = 8  # the number of neighbors in depth that a block is compared with
_MOST_STEPS = 64
_MOST_VALUES = 2**17  # the most values of neighbors that are compared at once, which bounds the memory
_MOSTLY_ZERO = 0.9

# For each comparison: the least distance from the median, in powers of ten, at which a size stands out, and a factor.
# The distance must also exceed the factor times the median distance. Corresponding modules of repeated blocks are
# similar, while arbitrary modules of a healthy network may differ by a power of ten or more.
_AMONG_EQUALS, _AMONG_ALL, _OVER_TIME = (0.6, 6.0), (1.5, 6.0), (0.6, 8.0)
_AT_THE_END = 1.5  # larger distances are normal in the first and the last block, which have other neighbors
_MISSING = 2.0  # the degree of a site that is no longer recorded
_NOT_FINITE = 1e6  # the degree of a site with NaN or infinities, above all other degrees
_EARLIER = 0.5  # the weight of earlier steps: a recovered layer ranks below a layer that is unusual now
_BELOW = 3.0  # zero counts as this many powers of ten below the smallest value

_SQUARES = ("exp_avg_sq", "square_avg")  # the path suffixes of optimizer states that are means of squares
_NOT_SIZES = ("count", "mean", "std", "min", "max", "zero_fraction", "nan_count", "inf_count", "batch_spread")


def unusualness(sites: Sequence[Hashable], values: Mapping[str, Floats], *, is_latest: bool = False) -> Floats:
    """Return the degree of each site, ``[sites]`` float64: how unusual the site is. A degree of at least 1 stands out.

    The logarithm of each size is compared with the logarithms for the corresponding tensors of neighboring blocks, and
    with earlier steps of the same site. A site outside of repeated blocks is compared with all sites of the same path.
    Distances are divided by the median distance of the compared values, so a noisy statistic needs a larger distance.
    Degrees at earlier steps count half. Changes and zeros that most sites share are not unusual. A site stands out if
    it is no longer recorded while most similar sites are. Sites with NaN or infinities have the highest degrees; the
    earlier the first such value, the higher the degree.

    Args:
        sites: The sites in the order of execution: pairs of name and path, or display names such as ``"fc weight"``.
        values: The statistics by name, ``[sites, steps]``; NaN if a site was not recorded. ``nan_count`` and
            ``inf_count`` mark sites with such values. The largest magnitude is computed from ``min`` and ``max``, and
            the share of non-zero values from ``zero_fraction``. All other positive statistics are sizes.
        is_latest: Compare only the last step with other sites and with the earlier steps, because the degrees of the
            earlier steps are known. For eight steps this takes a quarter less time.

    Example:
        >>> sites = [(f"blocks.{place}.fc", "out") for place in range(8)]
        >>> rms = np.array([1.0, 1.1, 0.9, 30.0, 1.0, 1.2, 1.1, 0.9])
        >>> unusualness(sites, {"rms": rms[:, None]}).round(1).tolist()
        [0.0, 0.1, 0.1, 2.5, 0.1, 0.1, 0.1, 0.1]
    """
    degrees = np.zeros(len(sites))
    tables = {name: _thinned(np.asarray(table, dtype=np.float64)) for name, table in values.items()}
    tables = {name: table for name, table in tables.items() if not np.isnan(table).all()}
    if not sites or not tables:
        return degrees
    groups = _groups(tuple(sites))
    with np.errstate(all="ignore"):
        if sizes := _sizes(tables):
            stacked = np.stack(sizes, axis=1)
            stacked[groups.squares] **= 0.5
            degrees = _degrees(*_log10(stacked), groups, is_latest=is_latest)
        if "zero_fraction" in tables:
            degrees = np.maximum(degrees, _empty(tables["zero_fraction"][:, -1], groups))
        degrees = np.maximum(degrees, _missing(list(tables.values()), groups))
        for name in ("nan_count", "inf_count"):
            if name in tables:
                degrees = np.maximum(degrees, _not_finite(tables[name]))
    return np.where(are_of_losses(tuple(sites)), 0.0, degrees)


@lru_cache(maxsize=8)
def are_of_losses(sites: tuple[Hashable, ...]) -> NDArray[np.bool_]:
    """Return a mask, ``[sites]``: True for losses, their predictions and targets, and for batches.

    The values of these sites differ in scale from the values of layers. If all sites are of this kind, the mask is
    False everywhere.
    """
    found = np.array([isinstance(site, tuple) and _is_of_loss(*map(str, site)) for site in sites], dtype=bool)
    return found & (not found.all())


def _is_of_loss(name: str, path: str) -> bool:
    function = function_of(name)
    return is_of_data(name, path) or (function is not None and function.kind == "losses")


def _not_finite(counts: Floats) -> Floats:
    """Return the degree of sites with non-finite values, higher if the values began earlier; 0 for other sites."""
    is_bad = counts > 0
    began = np.argmax(is_bad, axis=1) / counts.shape[1]
    return np.where(is_bad.any(axis=1), _NOT_FINITE * (2 - began), 0.0)


def compared(statistics: Collection[str]) -> tuple[str, ...]:
    """Return the names among ``statistics`` that :func:`unusualness` reads."""
    return tuple(name for name in statistics if name not in ("count", "mean", "std", "batch_spread"))


def compared_steps(count: int) -> list[int]:
    """Return the indices of the steps that :func:`unusualness` reads: at most 64 of ``count``, with the last one."""
    return [int(place) for place in np.linspace(0, count - 1, min(count, _MOST_STEPS)).round()]


def standing_out(degrees: Floats) -> list[int]:
    """Return the indices of the sites that stand out, the most unusual first."""
    order = np.argsort(-degrees, kind="stable")
    return [int(place) for place in order if degrees[place] >= STANDS_OUT]


def choose(degrees: Floats, most: int, sites: Sequence[Hashable] = ()) -> list[int]:
    """Return at most ``most`` site indices in ascending order: sites that stand out, and evenly spread others.

    Sites that nearly stand out take up to half of the selection.

    Args:
        degrees: The degree of each site, ``[sites]``; infinite for a site that a finding names.
        most: The maximum number of indices.
        sites: The sites, as for :func:`unusualness`. If given, the two nearest corresponding sites of other blocks are
            also chosen for each site that stands out, as far as there is room, so that the sites can be compared.

    Example:
        >>> choose(np.array([0.0, 0.1, 3.0, 0.0, 0.0, 0.2, 0.0]), 4)
        [0, 2, 3, 6]
    """
    if len(degrees) <= most:
        return list(range(len(degrees)))
    order = np.argsort(-degrees, kind="stable")
    outstanding = int((degrees >= STANDS_OUT).sum())
    first = max(min(outstanding, most), min(int((degrees >= _WORTH_A_PLACE).sum()), most // 2))
    nearest = _groups(tuple(sites)).nearest if sites else {}
    taken: set[int] = set()
    for place in order[:first].tolist():
        taken.update([place][: most - len(taken)])
        if np.isinf(degrees[place]):  # neighbors of a site that a finding names come before other sites that stand out
            taken.update(nearest.get(place, ())[: most - len(taken)])
    for place in order[: min(outstanding, first)].tolist():
        taken.update(nearest.get(place, ())[: most - len(taken)])
    rest = [place for place in range(len(degrees)) if place not in taken]
    spread = np.linspace(0, len(rest) - 1, most - len(taken)).round().astype(int)
    return sorted({*taken, *(rest[place] for place in spread)})


class _Groups:
    """The groups of sites that are compared with each other."""

    def __init__(self, names: tuple[tuple[str, str], ...]) -> None:
        by_path: dict[str, dict[str, int]] = defaultdict(dict)
        for place, (name, path) in enumerate(names):
            by_path[path].setdefault(name, place)
        self.paths = [np.array(list(places.values())) for places in by_path.values()]
        """The indices of the sites with each path."""
        by_length: dict[int, list[list[int]]] = defaultdict(list)
        for places in by_path.values():
            for family in families(dict.fromkeys(places), _FEWEST):
                by_length[len(family)].append([places[name] for name in family])
        self.equal = [np.array(group).T for group in by_length.values()]
        """The corresponding sites of repeated blocks, ``[blocks, families]``, one array for each number of blocks."""
        self.squares = np.array([place for place, (_, path) in enumerate(names) if path.endswith(_SQUARES)], dtype=int)
        self.is_single = np.ones(len(names), dtype=bool)
        """True for the sites without corresponding sites in repeated blocks."""
        for group in self.equal:
            self.is_single[group] = False

    @cached_property
    def nearest(self) -> dict[int, list[int]]:
        """The two nearest corresponding sites of other blocks, for each site."""
        found: dict[int, list[int]] = {}
        for group in self.equal:
            for family in group.T.tolist():
                for row, place in enumerate(family):
                    first = min(max(row - 1, 0), len(family) - 3)
                    found.setdefault(place, [each for each in family[first : first + 3] if each != place])
        return found

    def like(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
        """Yield groups of similar sites, with a mask that is True for sites without a closer group."""
        for group in self.equal:
            yield from ((family, np.ones(len(family), dtype=bool)) for family in group.T)
        yield from ((group, self.is_single[group]) for group in self.paths)


@lru_cache(maxsize=64)  # the same sites recur in every record
def _groups(sites: tuple[Hashable, ...]) -> _Groups:
    return _Groups(tuple(map(_parts, sites)))


def _parts(site: Hashable) -> tuple[str, str]:
    if isinstance(site, tuple) and len(site) == 2:
        return str(site[0]), str(site[1])
    name, _, path = str(site).partition(" ")
    return name, path


def _thinned(table: Floats) -> Floats:
    table = table[:, None] if table.ndim == 1 else table
    return table if table.shape[1] <= _MOST_STEPS else table[:, compared_steps(table.shape[1])]


def _sizes(tables: Mapping[str, Floats]) -> list[Floats]:
    """Return the sizes to compare, ``[sites, steps]`` each."""
    found = [table for name, table in tables.items() if name not in _NOT_SIZES and not (table < 0).any()]
    if "min" in tables and "max" in tables:
        found.append(np.maximum(np.abs(tables["min"]), np.abs(tables["max"])))
    if "zero_fraction" in tables:
        found.append(1 - tables["zero_fraction"])
    return found


def _log10(sizes: Floats) -> tuple[Logs, Logs]:
    """Return the base-10 logarithms of sizes, and the logarithm used for zero; -inf if no size is zero.

    The logarithm used for zero is below all others. The logarithms are float32, which is precise enough and saves
    memory. The sizes, ``[sites, statistics, steps]``, are overwritten.
    """
    zero = sizes == 0
    sizes[zero | np.isinf(sizes)] = np.nan
    logs = np.log10(sizes, out=sizes).astype(np.float32)
    lowest = np.fmin.reduce(logs, axis=(0, 2))
    floor = np.where(np.isnan(lowest), np.float32(0), lowest - np.float32(_BELOW))
    np.copyto(logs, floor[:, None], where=zero)
    return logs, np.where(zero.any(axis=(0, 2)), floor, -np.float32(np.inf))[:, None]


def _degrees(logs: Logs, floor: Logs, groups: _Groups, *, is_latest: bool) -> Floats:
    """Return the largest degree of each site, ``[sites]``, from the logarithms, ``[sites, statistics, steps]``.

    ``floor`` is the logarithm of zero, ``[statistics, 1]``. With ``is_latest``, only the last step is compared with the
    neighbors.
    """
    found = np.zeros(len(logs))
    for group in groups.equal:
        steps = logs[..., -1:] if is_latest else logs
        at_once = max(1, _MOST_VALUES // (group.size * logs.shape[1] * _AROUND))
        parts = [steps[..., first : first + at_once][group] for first in range(0, steps.shape[-1], at_once)]
        each = np.concatenate([_among_equals(part, floor) for part in parts], axis=-1)
        np.maximum.at(found, group, _over_steps(each))  # since a site may be in several families
    for group in groups.paths:
        some = logs[group]
        last = some[..., -1:]
        apart = _unless_common_zero(last, known_median(last), floor)
        each = _in_units(apart, known_median(np.abs(apart)), _AMONG_ALL)
        each[:, ~(np.isfinite(last).sum(axis=0) >= _FEWEST)] = 0.0
        is_zero = last <= floor
        each[is_zero & (is_zero.sum(axis=0) > _FEWEST)] = 0.0  # such as all new biases of norms
        each[~groups.is_single[group]] = 0.0  # their family may differ from all others, such as key biases
        found[group] = np.maximum(found[group], _over_steps(each))
        found[group] = np.maximum(found[group], _against_the_past(some))
    return found


def _among_equals(logs: Logs, floor: Logs) -> Logs:
    """Return the largest degree of any statistic among the nearest blocks, ``[blocks, families, 1, steps]``."""
    apart = _unless_common_zero(logs, _around(logs), floor)
    each = _in_units(apart, known_median(np.abs(apart)), _AMONG_EQUALS)
    each[[0, -1]] /= _AT_THE_END
    found: Logs = np.fmax.reduce(each, axis=-2, keepdims=True)
    return found


def _in_units(apart: Logs, usual: Logs, least_and_times: tuple[float, float]) -> Logs:
    least, times = least_and_times
    found: Logs = np.abs(apart) / np.fmax(least, times * usual)
    return found


def _unless_common_zero(values: Logs, middle: Logs, floor: Logs) -> Logs:
    """Return the distances of logarithms from their median; 0 if the median itself stands for a size of zero."""
    return np.where(middle <= floor + _BELOW / 2, 0.0, values - middle)


def _around(values: Logs) -> Logs:
    """Return the median over the nearest blocks of each block, in the shape of the values: blocks come first."""
    return known_median(np.swapaxes(values[_nearest(len(values))], 0, 1))


@lru_cache(maxsize=64)
def _nearest(count: int) -> NDArray[np.int64]:
    """Return the indices of the nearest blocks of each block, ``[blocks, neighbors]``."""
    near = min(_AROUND, count - 1)
    rows = np.arange(count)
    start = np.clip(rows - near // 2, 0, count - 1 - near)
    window = start[:, None] + np.arange(near + 1)
    others: NDArray[np.int64] = window[window != rows[:, None]].reshape(count, near)
    return others


def _over_steps(degrees: Logs) -> Logs:
    """Reduce ``[…, statistics, steps]`` to the largest degree at the last step, or half of the largest at any step."""
    known = np.where(np.isnan(degrees), 0.0, degrees)
    found: Logs = np.maximum(known[..., -1].max(axis=-1), _EARLIER * known.max(axis=(-2, -1)))
    return found


def _against_the_past(logs: Logs) -> Logs:
    """Return the degree of the last change of each site: the smaller of its change and its change relative to others.

    The others are all sites of the same path, represented by their median change.
    """
    if logs.shape[-1] <= _FEWEST:
        return np.zeros(len(logs), dtype=np.float32)
    moved = logs - known_median(np.moveaxis(logs[..., :-1], -1, 0))[..., None]
    relative = moved - known_median(moved) if len(logs) >= _FEWEST else moved
    # A site that stays constant while the others change is not unusual.
    last = np.minimum(np.abs(moved[..., -1]), np.abs(relative[..., -1]))
    degrees = _in_units(last, known_median(np.abs(np.moveaxis(relative[..., :-1], -1, 0))), _OVER_TIME)
    return _over_steps(degrees[..., None])


def _empty(zero_fraction: Floats, groups: _Groups) -> Floats:
    """Return 1 for sites whose values are nearly all zero, unless most similar sites are like this; 0 for other sites.

    A site outside of repeated blocks also gets 0 if several sites of its path have nearly only zeros.
    """
    found = np.zeros(len(zero_fraction))
    for group, chosen in groups.like():
        empty = zero_fraction[group] >= _MOSTLY_ZERO
        if not chosen.all() and empty.sum() > _FEWEST:
            continue
        if 2 * empty.sum() <= len(group) or len(group) < _FEWEST:  # a majority is not unusual: new biases are zero
            found[group[chosen]] = empty[chosen]
    return found


def _missing(tables: list[Floats], groups: _Groups) -> Floats:
    """Return the degree of sites that are missing at the last step, while most similar sites were recorded."""
    known: NDArray[np.bool_] = np.any([~np.isnan(table) for table in tables], axis=0)
    found = np.zeros(len(known))
    for group, chosen in groups.like():
        if 2 * known[group, -1].sum() > len(group):
            gone = ~known[group, -1] & known[group].any(axis=1)
            found[group[chosen]] = np.where(gone[chosen], _MISSING, 0.0)
    return found


def known_median(values: NDArray[AnyFloat]) -> NDArray[AnyFloat]:
    """Return the median of the known values along the first axis, or NaN. It is faster than ``nanmedian``."""
    ordered = np.sort(values, axis=0)  # NaN last
    count = len(values)
    if not np.isnan(ordered[-1]).any():
        return np.asarray((ordered[(count - 1) // 2] + ordered[count // 2]) / 2)
    known = count - np.isnan(values).sum(axis=0, keepdims=True)
    low, high = (np.maximum(part, 0) for part in ((known - 1) // 2, np.minimum(known // 2, known - 1)))
    ends: list[NDArray[AnyFloat]] = [np.take_along_axis(ordered, part, 0) for part in (low, high)]
    return np.asarray(np.squeeze((ends[0] + ends[1]) / 2, axis=0))
