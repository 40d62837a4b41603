"""Divergence of two series of the same recorder."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_recorder.functions import SCORES
from lightning_recorder.names import RUNNING_STATISTICS
from lightning_recorder.recordings.call_order import CallOrder
from lightning_recorder.recordings.name_map import NameMap
from lightning_recorder.recordings.series import Series
from lightning_recorder.records.counts import unpack_counts
from lightning_recorder.taps import Site

__all__ = ["SETTINGS", "Divergence", "SeriesPair", "SiteDivergence", "Tolerance"]

SETTINGS = ("learning_rate", "weight_decay", "eval_mode")
"""Scalars of a site that are causes of differences, and are compared as such."""

_OF_VALUES = ("mean", "std", "rms", "min", "max", "abs_max", "rank_mean_min", "rank_mean_max")
_HISTOGRAM = "histogram"
_MADE = ("grad", "update")  # path suffixes of the tensors that a step computes for a parameter
_FOLLOWING = ("sum", "variance")  # derived from other statistics, and on a different scale


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
        histograms: If True, compare histograms when ``exact`` is True. Every line must be read again for this.
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
        first: The difference at the first step that differs. It cites ``rms`` if that differs, and otherwise the
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
        names: The map from names of the first run to those of the second. Results have names of the first run.
        bands: For each statistic, the spread of repeated runs relative to the reference of the tolerance,
            ``[steps, sites]``. A difference within it counts as equal.
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
        bands: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.recorder, self.group = recorder, group
        self.one, self.other = one, other
        self.bands: Mapping[str, Tensor] = bands or {}
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
        others = [self.counterparts[site] for site in self.sites]
        self._picks = [_picks(one, self.steps, self.sites), _picks(other, self.steps, others)]
        # rms comes first because it is the statistic users read first, and the first of equals is reported.
        left_out = {*_FOLLOWING, *SETTINGS, *without}
        common = [name for name in one.statistics if name in other.statistics and name not in left_out]
        self.statistics = sorted(common, key=lambda name: name != "rms")
        """The compared statistics, which both series have."""

    @cached_property
    def held(self) -> frozenset[Site]:
        """The sites of parameter values, which exist before the step; empty for other groups.

        Running statistics are not among them, because the forward pass has updated them before they are recorded.
        """
        if self.group != "parameters":
            return frozenset()
        known = set(self.sites)
        parts = {site: site.path.rpartition(".") for site in known}
        of_others = {site for site, (of, _, last) in parts.items() if last in _MADE or Site(site.name, of) in known}
        of_others |= {site for site in known if site.path in RUNNING_STATISTICS}
        return frozenset(known - of_others)

    @cached_property
    def both(self) -> Tensor:
        """A mask that is True if both runs have recorded a site at a step, ``[steps, sites]`` bool."""
        return _pick(self.one.seen(), *self._picks[0]) & _pick(self.other.seen(), *self._picks[1])

    @cached_property
    def values(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Both runs' values of each statistic, ``[steps, sites]`` float64 each."""
        first, second = self._picks
        return {
            name: (_pick(self.one.values(name), *first), _pick(self.other.values(name), *second))
            for name in self.statistics
        }

    @cached_property
    def _size(self) -> Tensor:
        """The larger rms of the two runs, ``[steps, sites]``; infinite if it is unknown."""
        unknown = torch.full((len(self.steps), len(self.sites)), torch.inf, dtype=torch.float64, device="cpu")
        one, other = self.values.get("rms", (unknown, unknown))
        return torch.where(one.isnan() | other.isnan(), torch.inf, torch.fmax(one, other))

    @property
    def compared(self) -> int:
        """The number of records of single sites that both runs have."""
        return int(self.both.sum())

    def divergences(self, tolerance: Tolerance, without: Collection[Site] = ()) -> list[SiteDivergence]:
        """Return the sites that diverge beyond the tolerance, in execution order.

        Args:
            tolerance: The tolerance.
            without: Sites to leave out.
        """
        with_histograms = tolerance.exact and tolerance.histograms
        shape = len(self.statistics) + with_histograms, len(self.steps), len(self.sites)
        excess, distance = (torch.zeros(shape, dtype=torch.float64, device="cpu") for _ in range(2))
        # In place, since these are the largest arrays of a comparison.
        for index, name in enumerate(self.statistics):
            excess[index], distance[index] = self._difference(name, tolerance)
            excess[index].masked_fill_(~(self.both & (excess[index] > 1)), 0.0)
        if with_histograms:
            self._compare_histograms(excess, distance)
        if not excess.numel():
            return []
        if "rms" in self.statistics:
            excess[0].masked_fill_(excess[0] > 0, torch.inf)
        distance.masked_fill_(~(excess > 0), -1.0)
        parted = excess.amax(0) > 0
        places = [place for place in _places(parted.any(0)) if self.sites[place] not in without]
        return [self._site(place, excess, distance, parted[:, place]) for place in places]

    def first(self, found: Iterable[SiteDivergence]) -> Divergence:
        """Return the first of some divergences: at the earliest step, at the site that is called first in it."""
        found = list(found)
        # Scores are those of a few queries, which depend on the order of the samples.
        found = [each for each in found if not each.first.site.path.startswith(SCORES)] or found
        step = min(each.first.step for each in found)
        firsts = {each.first.site: each.first for each in found if each.first.step == step}
        if self.group == "parameters":
            made_first = (each for site, each in firsts.items() if site.path in RUNNING_STATISTICS)
            return next(made_first, next(iter(firsts.values())))
        known = self.both[self.steps.index(step)].tolist()
        same = [site for site, is_known in zip(self.sites, known, strict=True) if is_known and site not in firsts]
        return firsts[self.order.first(list(firsts), same, is_backward=self.is_backward)]

    def _site(self, place: int, excess: Tensor, distance: Tensor, parted: Tensor) -> SiteDivergence:
        first = _places(parted)[0]
        furthest, statistic = int(distance[..., place].amax(0).argmax()), 0
        statistic = int(distance[:, furthest, place].argmax())
        cited = int(excess[:, first, place].argmax())
        parts = [
            self._at(name, step, place, distance[name, step, place].item())
            for name, step in ((cited, first), (statistic, furthest))
        ]
        return SiteDivergence(parts[0], parts[1], int(parted.sum()))

    def _at(self, index: int, step: int, place: int, distance: float) -> Divergence:
        site = self.sites[place]
        where = self.steps[step], self.recorder, self.one.stage, self.one.loader, site
        if index < len(self.statistics):
            name = self.statistics[index]
            one, other = (values[step, place].item() for values in self.values[name])
        else:
            name = _HISTOGRAM
            sites = (self.one, site), (self.other, self.counterparts[site])
            one, other = (float(series[each].bins(self.steps[step]).sum()) for series, each in sites)
        return Divergence(*where, name, one, other, distance)

    def _difference(self, name: str, tolerance: Tolerance) -> tuple[Tensor, Tensor]:
        """Return the difference as a multiple of the tolerance and the relative one, ``[steps, sites]`` each."""
        one, other = self.values[name]
        same = (one == other) | (one.isnan() & other.isnan())
        scale = self.scale(name)
        difference = (one - other).abs()
        distance = torch.where(same, 0.0, _ratio(difference, scale))
        if tolerance.exact:
            same &= one.isnan() | (one.view(torch.int64) == other.view(torch.int64))  # 0.0 and -0.0 differ by a bit
            return torch.where(same, 0.0, torch.inf), distance
        band = self.bands.get(name)
        is_count = name == "count" or name.endswith("_count")
        if is_count and band is None:
            return torch.where(same, 0.0, torch.inf), distance
        bound = torch.zeros_like(scale) if is_count else tolerance.rtol * scale
        bound = bound + tolerance.atol if _is_of_values(name) else bound
        bound = bound if band is None else torch.fmax(bound, (band * scale).nan_to_num(nan=torch.inf))
        excess = torch.where(same, 0.0, _ratio(difference, bound))
        return torch.where(self._size <= tolerance.atol, 0.0, excess), distance

    def scale(self, name: str) -> Tensor:
        """Return the reference of a statistic, ``[steps, sites]``; see :class:`Tolerance`."""
        one, other = self.values[name]
        if name.endswith("_fraction"):
            return torch.ones_like(one)
        larger = torch.fmax(one.abs(), other.abs())
        if _is_of_values(name):
            larger = torch.fmax(larger, torch.where(self._size.isinf(), 0.0, self._size))
        return larger

    def _compare_histograms(self, excess: Tensor, distance: Tensor) -> None:
        """Write the differences between histograms into the last row of ``excess`` and ``distance``."""
        for index, step in enumerate(self.steps):
            ones, others = self.one.packed_counts(step), self.other.packed_counts(step)
            for place in _places(self.both[index]):
                site = self.sites[place]
                one, other = ones[site], others[self.counterparts[site]]
                # Another release of zlib may compress equal counts to different bytes.
                if one == other or one is None or other is None:
                    continue
                counts = unpack_counts(one), unpack_counts(other)
                if not torch.equal(*counts):
                    total = int(counts[0].sum() + counts[1].sum())
                    excess[-1, index, place] = torch.inf
                    distance[-1, index, place] = int((counts[0] - counts[1]).abs().sum()) / max(total, 1)


def _ratio(number: Tensor, by: Tensor) -> Tensor:
    """Return the quotient; infinite if either operand is NaN or the divisor is 0."""
    return (number / by).nan_to_num(nan=torch.inf, posinf=torch.inf)


def _is_of_values(name: str) -> bool:
    """Return True if the reference of a statistic is the magnitude of the values."""
    return name in _OF_VALUES or name.startswith("quantile_")


def _picks(series: Series, steps: list[int], sites: list[Site]) -> tuple[Tensor, Tensor]:
    step_places = {step: place for place, step in enumerate(series.steps)}
    site_places = {site: place for place, site in enumerate(series.sites)}
    return (
        torch.tensor([step_places[step] for step in steps], dtype=torch.int64, device="cpu"),
        torch.tensor([site_places[site] for site in sites], dtype=torch.int64, device="cpu"),
    )


def _pick(table: Tensor, steps: Tensor, sites: Tensor) -> Tensor:
    return table[steps][:, sites]


def _places(mask: Tensor) -> list[int]:
    """Return the indices at which a mask ``[n]`` is True."""
    found: list[int] = mask.nonzero().flatten().tolist()
    return found
