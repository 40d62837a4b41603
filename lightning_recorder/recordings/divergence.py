"""The divergence of two series of the same recorder."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.functions import SCORES
from lightning_recorder.names import RUNNING_STATISTICS, Site
from lightning_recorder.recordings.call_order import CallOrder
from lightning_recorder.recordings.name_map import NameMap
from lightning_recorder.recordings.reader import Part, PartKey
from lightning_recorder.recordings.series import Series
from lightning_recorder.records.counts import unpacked
from lightning_recorder.records.table import Floats

__all__ = ["SETTINGS", "Divergence", "SeriesPair", "SiteDivergence", "Tolerance"]

SETTINGS = ("learning_rate", "weight_decay", "eval_mode")
"""Settings at a site, which are compared as causes of differences rather than as statistics."""

_OF_VALUES = ("mean", "std", "rms", "min", "max", "abs_max", "rank_mean_min", "rank_mean_max")
_HISTOGRAM = "histogram"
_MADE = ("grad", "update")  # path suffixes of the tensors that a step computes for a parameter
_FOLLOWING = ("sum", "variance")  # not compared: derived from other statistics, and on a different scale
_VALUES_AT_ONCE = 1 << 17  # the most values of each run that are compared at once


@dataclass(frozen=True)
class Tolerance:
    """The largest difference between two numbers that still count as equal.

    Args:
        rtol: The relative tolerance. The reference for ``mean``, ``min`` and similar statistics is the larger ``rms``
            of the site, so that a mean near zero does not count as a difference. The reference for fractions is 1, and
            for all other statistics the larger of the two values. Counts must be equal.
        atol: The absolute tolerance. If the ``rms`` of a site is at most ``atol`` in both runs, only
            its counts are compared.
        exact: If True, require equality to the bit and ignore ``rtol`` and ``atol``.
        histograms: If True, also compare histograms when ``exact`` is True. This reads every line of the record files
            again.
    """

    rtol: float = 1e-3
    atol: float = 1e-7
    exact: bool = False
    histograms: bool = True


@dataclass(frozen=True)
class Divergence:
    """A difference of one site between two runs at one step.

    Args:
        step: The step.
        recorder: The label of the recorder.
        stage: The stage.
        loader: The dataloader.
        site: The site.
        statistic: The statistic.
        one: The value in the first run. For ``histogram``, the number of counted values.
        other: The value in the second run.
        distance: The relative difference; see :class:`Tolerance` for the reference. For ``histogram``, the fraction of
            counts that lie in different bins.
    """

    step: int
    recorder: str
    stage: str
    loader: int | None
    site: Site
    statistic: str
    one: float
    other: float
    distance: float


@dataclass(frozen=True)
class SiteDivergence:
    """The divergence of one site over all steps.

    Args:
        first: The difference at the first step that differs. It names ``rms`` if ``rms`` differs, and otherwise the
            statistic that exceeds the tolerance most.
        furthest: The step and the statistic with the largest distance.
        steps: The number of steps at which the site differs.
    """

    first: Divergence
    furthest: Divergence
    steps: int


class SeriesPair:
    """The common steps and sites of two series.

    Args:
        recorder: The label of both series.
        group: The group of the recorder: ``"activations"``, ``"gradients"`` or ``"parameters"``.
        one: The series of the first run.
        other: The series of the second run.
        without: Statistics to leave out.
        order: The order of the calls.
        names: The map from module names of the first run to names of the second run. Results use names of the first
            run.
        bands: For each statistic, the spread of repeated runs relative to the reference of the tolerance, ``[steps,
            sites]``. Values that differ by less count as equal.
    """

    def __init__(
        self,
        recorder: str,
        one: Series,
        other: Series,
        *,
        group: str = "activations",
        without: Iterable[str] = (),
        order: CallOrder | None = None,
        names: NameMap | None = None,
        bands: Mapping[str, Floats] | None = None,
    ) -> None:
        self.recorder, self.group = recorder, group
        self.one, self.other = one, other
        self.bands: Mapping[str, Floats] = bands or {}
        self._parts = [each.parts.get(PartKey(each.stage, each.loader), Part()) for each in (one, other)]
        theirs = set(other.steps)
        self.steps = [step for step in one.steps if step in theirs]
        self.names = names or NameMap()
        """The map of names."""
        self.counterparts = self.names.sites(one.sites, other.sites)
        """The site of the second run for each common site."""
        self.is_backward = group == "gradients"  # gradients reach the modules in reverse order
        self.order = order or CallOrder()
        """The order of the calls."""
        # Parameters exist before any module runs, so they keep the order of their modules.
        shared = list(self.counterparts)
        self.sites = shared if group == "parameters" else self.order.sort(shared, is_backward=self.is_backward)
        """The common sites in the order of execution, with the names of the first run."""
        of_both = self.sites, [self.counterparts[site] for site in self.sites]
        self._places = [
            np.array([part.sites[site] for site in sites], dtype=np.int64)
            for part, sites in zip(self._parts, of_both, strict=True)
        ]
        # rms comes first because users read it first, and because the first of equal differences is reported.
        left_out = {*_FOLLOWING, *SETTINGS, *without}
        common = [name for name in one.statistics if name in other.statistics and name not in left_out]
        self.statistics = sorted(common, key=lambda name: name != "rms")
        """The compared statistics, which both series have."""

    @cached_property
    def held(self) -> frozenset[Site]:
        """The sites of parameter values, which exist before the step; empty for other groups.

        Running statistics are left out, because the forward pass updates them before they are recorded.
        """
        if self.group != "parameters":
            return frozenset()
        known = set(self.sites)
        parts = {site: site.path.rpartition(".") for site in known}
        of_others = {site for site, (of, _, last) in parts.items() if last in _MADE or Site(site.name, of) in known}
        of_others |= {site for site in known if site.path in RUNNING_STATISTICS}
        return frozenset(known - of_others)

    @cached_property
    def both(self) -> NDArray[np.bool_]:
        """A mask that is True if both runs have recorded a site at a step, ``[steps, sites]``."""
        seen = [part.seen(self.steps)[:, places] for part, places in zip(self._parts, self._places, strict=True)]
        return seen[0] & seen[1]

    def values(self, name: str) -> tuple[Floats, Floats]:
        """Return both runs' values of a statistic, ``[steps, sites]`` each; NaN for missing values."""
        one, other = self._values([name], self.steps)
        return one[0], other[0]

    def values_at(self, name: str, step: int) -> tuple[Floats, Floats]:
        """Return both runs' values of a statistic at a step, ``[sites]`` each."""
        one, other = self._values([name], [step])
        return one[0, 0], other[0, 0]

    def _values(self, names: list[str], steps: list[int]) -> tuple[Floats, Floats]:
        """Return both runs' values, ``[statistics, steps, sites]`` each."""
        one, other = (
            part.some_values(names, steps)[..., places] for part, places in zip(self._parts, self._places, strict=True)
        )
        return one, other

    @property
    def compared(self) -> int:
        """The number of records of single sites that both runs have."""
        return int(self.both.sum())

    def divergences(self, tolerance: Tolerance, without: Collection[Site] = ()) -> list[SiteDivergence]:
        """Return the sites that diverge beyond the tolerance, in execution order."""
        found: dict[int, _Extremes] = {}
        for steps, excess, distance in self._differences(tolerance):
            parted = excess.max(0) > 0
            for place in np.flatnonzero(parted.any(0)).tolist():
                if self.sites[place] not in without:
                    found.setdefault(place, _Extremes()).add(
                        steps.start, excess[..., place], distance[..., place], parted[:, place]
                    )
        return [self._site(place, found[place]) for place in sorted(found)]

    def _differences(self, tolerance: Tolerance) -> Iterator[tuple[slice, Floats, Floats]]:
        """Yield slices of steps, with the excess and the distance of each statistic.

        The excess is the difference as a multiple of the tolerance, or 0 within the tolerance. The distance is the
        relative difference, or -1 within the tolerance. Both are ``[statistics, steps, sites]``. Histograms, if
        compared, are the last statistic.
        """
        with_histograms = tolerance.exact and tolerance.histograms
        rows = len(self.statistics) + with_histograms
        if not rows or not self.sites:
            return
        # Slices limit the memory, since the arrays for all steps of a long run would be large.
        at_once = max(1, _VALUES_AT_ONCE // (rows * len(self.sites)))
        for begin in range(0, len(self.steps), at_once):
            steps = slice(begin, begin + at_once)
            one, other = self._values(self.statistics, self.steps[steps])
            both = self.both[steps]
            excess, distance = np.zeros((2, rows, *both.shape))
            # Operations with NaN and infinities are intended here.
            with np.errstate(all="ignore"):
                size = self._size(one, other, both.shape)
                for index, name in enumerate(self.statistics):
                    pair = _Values(name, one[index], other[index], size)
                    excess[index], distance[index] = self._difference(pair, tolerance, steps)
            excess[: len(self.statistics)][~(both & (excess[: len(self.statistics)] > 1))] = 0.0
            if with_histograms:
                self._compare_histograms(steps, excess[-1], distance[-1])
            if "rms" in self.statistics:
                excess[0][excess[0] > 0] = np.inf
            distance[~(excess > 0)] = -1.0
            yield steps, excess, distance

    def _size(self, one: Floats, other: Floats, shape: tuple[int, ...]) -> Floats:
        """Return the larger rms of the two runs, ``[steps, sites]``; infinite if it is unknown."""
        if "rms" not in self.statistics:
            return np.full(shape, np.inf)
        place = self.statistics.index("rms")
        return _larger_rms(one[place], other[place])

    def first(self, found: Iterable[SiteDivergence]) -> Divergence:
        """Return the first divergence: the site that is called first in the earliest step."""
        found = list(found)
        # Attention scores are from a few queries only, which depend on the order of the samples.
        found = [each for each in found if not each.first.site.path.startswith(SCORES)] or found
        step = min(each.first.step for each in found)
        firsts = {each.first.site: each.first for each in found if each.first.step == step}
        if self.group == "parameters":
            made_first = (each for site, each in firsts.items() if site.path in RUNNING_STATISTICS)
            return next(made_first, next(iter(firsts.values())))
        known: list[bool] = self.both[self.steps.index(step)].tolist()
        same = [site for site, is_known in zip(self.sites, known, strict=True) if is_known and site not in firsts]
        return firsts[self.order.first(list(firsts), same, is_backward=self.is_backward)]

    def _site(self, place: int, found: _Extremes) -> SiteDivergence:
        first, furthest = (self._at(*each, place) for each in (found.first, found.furthest))
        return SiteDivergence(first, furthest, found.steps)

    def _at(self, index: int, step: int, distance: float, place: int) -> Divergence:
        site = self.sites[place]
        number = self.steps[step]
        sites = site, self.counterparts[site]
        if index < len(self.statistics):
            name = self.statistics[index]
            one, other = (part.value(name, number, each) for part, each in zip(self._parts, sites, strict=True))
        else:
            name = _HISTOGRAM
            series = self.one, self.other
            one, other = (float(run[each].counts(number).sum()) for run, each in zip(series, sites, strict=True))
        return Divergence(number, self.recorder, self.one.stage, self.one.loader, site, name, one, other, distance)

    def _difference(self, pair: _Values, tolerance: Tolerance, steps: slice) -> tuple[Floats, Floats]:
        """Return the difference as a multiple of the tolerance and the relative difference, ``[steps, sites]`` each."""
        one, other = pair.one, pair.other
        same = (one == other) | (np.isnan(one) & np.isnan(other))
        scale = pair.scale
        difference = np.abs(one - other)
        distance = np.where(same, 0.0, _ratio(difference, scale))
        if tolerance.exact:
            same &= np.isnan(one) | (one.view(np.int64) == other.view(np.int64))  # 0.0 and -0.0 differ by a bit
            return np.where(same, 0.0, np.inf), distance
        band = self.bands[pair.name][steps] if pair.name in self.bands else None
        is_count = pair.name == "count" or pair.name.endswith("_count")
        if is_count and band is None:
            return np.where(same, 0.0, np.inf), distance
        bound = np.zeros_like(scale) if is_count else tolerance.rtol * scale
        bound = bound + tolerance.atol if _is_of_values(pair.name) else bound
        if band is not None:
            bound = np.fmax(bound, np.nan_to_num(band * scale, nan=np.inf, posinf=np.inf))
        excess = np.where(same, 0.0, _ratio(difference, bound))
        return np.where(pair.size <= tolerance.atol, 0.0, excess), distance

    def scale(self, name: str) -> Floats:
        """Return the reference of a statistic, ``[steps, sites]``; see :class:`Tolerance`."""
        one, other = self.values(name)
        size = _larger_rms(*self.values("rms")) if "rms" in self.statistics else np.full(one.shape, np.inf)
        return _Values(name, one, other, size).scale

    def _compare_histograms(self, steps: slice, excess: Floats, distance: Floats) -> None:
        """Write the differences between histograms of some steps into ``excess`` and ``distance``."""
        for index, step in enumerate(self.steps[steps]):
            ones, others = self.one.packed_counts(step), self.other.packed_counts(step)
            for place in np.flatnonzero(self.both[steps.start + index]).tolist():
                site = self.sites[place]
                one, other = ones[site], others[self.counterparts[site]]
                # Another release of zlib may compress equal counts to different bytes, so different bytes are decoded.
                if one == other or one is None or other is None:
                    continue
                counts = unpacked(one), unpacked(other)
                if not np.array_equal(*counts):
                    total = int(counts[0].sum() + counts[1].sum())
                    excess[index, place] = np.inf
                    distance[index, place] = int(np.abs(counts[0] - counts[1]).sum()) / max(total, 1)


@dataclass(frozen=True)
class _Values:
    """Both runs' values of a statistic at some steps, and the larger rms of the two runs, ``[steps, sites]`` each."""

    name: str
    one: Floats
    other: Floats
    size: Floats

    @property
    def scale(self) -> Floats:
        """The reference of the statistic; see :class:`Tolerance`."""
        if self.name.endswith("_fraction"):
            return np.ones_like(self.one)
        larger = np.fmax(np.abs(self.one), np.abs(self.other))
        if _is_of_values(self.name):
            larger = np.fmax(larger, np.where(np.isinf(self.size), 0.0, self.size))
        return larger


class _Extremes:
    """The first and the largest difference of a site, each with statistic, step and distance."""

    def __init__(self) -> None:
        self.first = self.furthest = (0, 0, -np.inf)
        self.steps = 0

    def add(self, begin: int, excess: Floats, distance: Floats, parted: NDArray[np.bool_]) -> None:
        """Add some steps, at least one of which differs. ``begin`` is the index of the first one.

        ``excess`` and ``distance`` are ``[statistics, steps]``. ``parted`` is a mask of the steps that differ,
        ``[steps]``.
        """
        if not self.steps:
            step = int(parted.argmax())
            cited = int(excess[:, step].argmax())
            self.first = cited, begin + step, float(distance[cited, step])
        step = int(distance.max(0).argmax())
        statistic = int(distance[:, step].argmax())
        # Of equal distances, the first one counts.
        if distance[statistic, step] > self.furthest[2]:
            self.furthest = statistic, begin + step, float(distance[statistic, step])
        self.steps += int(parted.sum())


def _larger_rms(one: Floats, other: Floats) -> Floats:
    return np.where(np.isnan(one) | np.isnan(other), np.inf, np.fmax(one, other))


def _ratio(number: Floats, by: Floats) -> Floats:
    """Return the quotient; infinite if either operand is NaN or the divisor is 0."""
    return np.nan_to_num(number / by, nan=np.inf, posinf=np.inf)


def _is_of_values(name: str) -> bool:
    """Return True if the reference of a statistic is the magnitude of the values."""
    return name in _OF_VALUES or name.startswith("quantile_")
