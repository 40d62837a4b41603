"""The coordinate check: how the values of each site grow with the width of the model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from lightning_recorder.bins import BIN_SHIFT, BINS, FINITE_BINS
from lightning_recorder.errors import ArgumentError, check_number
from lightning_recorder.names import Site
from lightning_recorder.recordings.call_order import CallOrder
from lightning_recorder.recordings.explanation import site_name
from lightning_recorder.recordings.recording import Run
from lightning_recorder.recordings.series import Series
from lightning_recorder.records.counts import unpack_counts

__all__ = ["Scaling", "SiteScaling", "check_scaling"]

_MOST_STEPS = 10
_ERRORS = 3.0  # an exponent is off only if it is more than this number of standard errors away


@dataclass(frozen=True)
class SiteScaling:
    """The growth of one site with the width."""

    site: Site
    exponents: tuple[float, ...]  # the exponent at each step
    errors: tuple[float, ...]  # the standard error of each exponent; NaN with two widths
    step: int  # the step at which :attr:`exponent` was fitted
    exponent: float  # the exponent that is furthest outside of the expected range
    values: tuple[float, ...]  # the mean absolute value at ``step`` for each width
    is_readout: bool  # True if no dimension of the site grows with the width, such as the output of the model
    is_off: bool  # True if the exponent is outside of the expected range


@dataclass(frozen=True)
class Scaling:
    """The result of a coordinate check."""

    widths: tuple[float, ...]  # the width of each run, ascending
    steps: tuple[int, ...]  # the steps that all runs have recorded
    sites: tuple[SiteScaling, ...]  # the common sites, in the order of execution
    statistic: str  # the measured statistic: ``"mean absolute value"``, or ``"rms"`` without histograms
    tolerance: float  # the largest exponent that counts as 0

    @property
    def off(self) -> list[SiteScaling]:
        """The sites whose exponent is off, in the order of execution."""
        return [each for each in self.sites if each.is_off]

    @property
    def _worst(self) -> SiteScaling:
        return max(self.off, key=lambda each: abs(each.exponent))

    @property
    def sentence(self) -> str:
        """The result in one sentence."""
        span = f"widths {self.widths[0]:g} to {self.widths[-1]:g}"
        if not self.off:
            return f"the sizes of all {len(self.sites)} sites are independent of the width, for {span}"
        worst, first = self._worst, self.off[0]
        verb = "grows" if worst.exponent > 0 else "shrinks"
        text = (
            f"{len(self.off)} of {len(self.sites)} sites depend on the width: {site_name(worst.site)} {verb} as "
            f"width^{worst.exponent:.2f} at step {worst.step}, for {span}"
        )
        return text + ("" if first is worst else f"; the first in the model is {site_name(first.site)}")

    @property
    def advice(self) -> str:
        """The usual cause, and a remedy; empty if nothing is off."""
        if not self.off:
            return ""
        if any(each.step == self.steps[0] and self.steps[0] == 0 for each in self.off):
            return (
                "It is off before the first update, so look at the initialization: the variance of a weight is 1 / "
                "fan_in, and that of the output weight is smaller."
            )
        # Once the training of a wide model diverges, other sites may change in the opposite direction. So the advice
        # follows from the worst site.
        if self._worst.exponent > 0:
            return (
                "The updates are too large for wide models. In maximal-update parametrization, Adam's learning rate of "
                "hidden and output weights is divided by the width, and so are the output and the attention logits."
            )
        return "The updates are too small for wide models. Look for a learning rate that is divided by the width twice."


def check_scaling(
    runs: Sequence[Run],
    widths: Sequence[float] = (),
    *,
    recorder: str = "activations",
    tolerance: float = 0.15,
) -> Scaling:
    """Fit the growth of each site's mean absolute value with the width of the model.

    In maximal-update parametrization, the size of the entries of every activation does not depend on the width, at any
    step. A power law is fitted at each of the first ten common steps. An exponent is off if it differs from 0 by more
    than the tolerance and by more than three standard errors. The output of the model, and other sites without a
    growing dimension, may shrink with the square root of the width, since their initial values average out.

    Source: Yang et al. 2022, Tensor Programs V: Tuning Large Neural Networks via Zero-Shot Hyperparameter Transfer,
    arXiv:2203.03466; the check is described in the documentation of https://github.com/microsoft/mup.

    Args:
        runs: Runs that differ in the width. Several runs of one width, with different seeds, make it more precise.
        widths: The width of each run; by default the most frequent size among the dimensions that differ between the
            runs.
        recorder: The label of the recorder.
        tolerance: The largest exponent that counts as 0.

    Raises:
        ArgumentError: If there are fewer than two widths, or if the runs have no recorder, step or site in common.
        DumpError: If a file cannot be read.
    """
    check_number("tolerance", tolerance, 0)
    if widths and len(widths) != len(runs):
        raise ArgumentError(f"there are {len(runs)} runs and {len(widths)} widths")
    series = [run[recorder].of("train") for run in runs]
    sites = [site for site in series[0].sites if all(site in each for each in series)]
    steps = [step for step in series[0].steps if all(step in each.steps for each in series)][:_MOST_STEPS]
    if not sites or not steps:
        raise ArgumentError("the runs have no site and step in common")
    growing = {site: _growing(site, series) for site in sites}
    sizes = [float(each) for each in widths] or _widths(growing.values(), series)
    if len(set(sizes)) < 2:
        raise ArgumentError("all runs have the same width; give their widths if no shape shows it")
    tables, statistic = _tables(series, sites, steps)
    order = sorted(range(len(runs)), key=lambda place: sizes[place])
    logs = torch.tensor([math.log(sizes[place]) for place in order], dtype=torch.float64, device="cpu")
    values = torch.stack([tables[place] for place in order])
    exponents, errors = _fit(logs, values.log())
    found = {}
    for place, site in enumerate(sites):
        found[site] = _site(
            site,
            steps,
            exponents[:, place],
            errors[:, place],
            values[..., place],
            is_readout=not growing[site],
            tolerance=tolerance,
        )
    ordered = CallOrder(runs[0].graph).sort(sites)
    return Scaling(
        tuple(sizes[place] for place in order),
        tuple(steps),
        tuple(found[site] for site in ordered if site in found),
        statistic,
        tolerance,
    )


def _growing(site: Site, series: Sequence[Series]) -> list[tuple[int, ...]]:
    """Return the dimensions of a site whose size differs between the runs, each as a tuple of one size per run."""
    shapes = [each[site].shape for each in series]
    if any(shape is None or len(shape) != len(shapes[0] or ()) for shape in shapes):
        return []
    return [sizes for sizes in zip(*(shape or () for shape in shapes), strict=True) if len(set(sizes)) > 1]


def _widths(growing: Iterable[list[tuple[int, ...]]], series: Sequence[Series]) -> list[float]:
    """Return the widths of the runs: the tuple of sizes that is most frequent among the growing dimensions."""
    counts = Counter(sizes for found in growing for sizes in found)
    if not counts:
        return [1.0] * len(series)
    return [float(size) for size in counts.most_common(1)[0][0]]


def _tables(series: Sequence[Series], sites: Sequence[Site], steps: Sequence[int]) -> tuple[list[Tensor], str]:
    """Return the values of each run, ``[steps, sites]`` float64, and the name of the statistic."""
    if all(each.packed_counts(step)[site] is not None for each in series for step in steps[:1] for site in sites):
        return [_mean_absolute(each, sites, steps) for each in series], "mean absolute value"
    return [_rms(each, sites, steps) for each in series], "rms"


def _rms(series: Series, sites: Sequence[Site], steps: Sequence[int]) -> Tensor:
    rows = [series.steps.index(step) for step in steps]
    columns = [series.sites.index(site) for site in sites]
    return series.values("rms")[rows][:, columns]


def _mean_absolute(series: Series, sites: Sequence[Site], steps: Sequence[int]) -> Tensor:
    found = torch.full((len(steps), len(sites)), torch.nan, dtype=torch.float64, device="cpu")
    for row, step in enumerate(steps):
        packed = series.packed_counts(step)
        for column, site in enumerate(sites):
            if packed.get(site) is not None:
                counts = unpack_counts(packed[site]).double()
                found[row, column] = (counts * _middles()).sum() / counts.sum()
    return found


@lru_cache(maxsize=1)
def _middles() -> Tensor:
    """Return the middle of each bin as a magnitude, ``[2048]`` float64; 0 for the bins of non-finite values."""
    half = BINS // 2
    edges = (torch.arange(half + 1, dtype=torch.int64, device="cpu") << BIN_SHIFT)[: FINITE_BINS + 1].to(torch.int32)
    edges = edges.view(torch.float32).double()
    edges[-1] = torch.finfo(torch.float32).max
    middles = torch.zeros(half, dtype=torch.float64, device="cpu")
    middles[:FINITE_BINS] = (edges[:-1] + edges[1:]) / 2
    middles[0] = 0.0  # nearly all values in this bin are zeros
    return torch.cat([middles, middles])


def _fit(logs: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Fit a line through the values ``[runs, steps, sites]``; return slopes and standard errors, ``[steps, sites]``."""
    x = (logs - logs.mean())[:, None, None]
    centered = values - values.mean(0)
    squares = x.square().sum()
    slopes = (x * centered).sum(0) / squares
    freedom = len(logs) - 2
    residuals = (centered - slopes * x).square().sum(0)
    errors = (residuals / (freedom * squares)).sqrt() if freedom else torch.full_like(slopes, torch.nan)
    return slopes, errors


def _site(
    site: Site,
    steps: Sequence[int],
    exponents: Tensor,
    errors: Tensor,
    values: Tensor,
    *,
    is_readout: bool,
    tolerance: float,
) -> SiteScaling:
    least = -0.5 if is_readout else 0.0
    outside = torch.where(exponents > 0, exponents, (least - exponents).clamp(min=0.0)).nan_to_num(nan=0.0)
    row = int(outside.argmax())
    margin = max(tolerance, _ERRORS * errors[row].nan_to_num(nan=0.0).item())
    return SiteScaling(
        site,
        tuple(exponents.tolist()),
        tuple(errors.tolist()),
        steps[row],
        exponents[row].item(),
        tuple(values[:, row].tolist()),
        is_readout,
        bool(outside[row] > margin),
    )
