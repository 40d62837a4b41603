"""The gradient noise scale, from the gradients of the single batches that a step averages."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from lightning_recorder.insight.evidence import Evidence
from lightning_recorder.insight.finding import Finding, Trace
from lightning_recorder.insight.rule import rule
from lightning_recorder.names import Site
from lightning_recorder.records.table import Floats

__all__ = ["NOISE_SCALE", "NoiseScale", "noise_scale"]

NOISE_SCALE = "gradient-noise"
_BATCH = ".batch_grad"
_GRAD = ".grad"


class NoiseScale(NamedTuple):
    """A noise scale with an interval that contains it with a probability of 95 %.

    Args:
        value: The estimate; infinity if the gradient cannot be distinguished from zero.
        low: The lower end of the interval.
        high: The upper end of the interval; infinity if it is unknown.
    """

    value: float
    low: float
    high: float


def noise_scale(whole: Floats, single: Floats, batches: int) -> NoiseScale:
    """Return the simple noise scale ``tr Σ / |G|²``, in batches.

    ``Σ`` is the covariance of the gradients of single batches and ``G`` their mean; see appendix A.1 of McCandlish et
    al., `An Empirical Model of Large-Batch Training <https://arxiv.org/abs/1812.06162>`_. Both are estimated without
    bias from each record, and the scale is the ratio of their means. The interval is that of Fieller's theorem with
    Student's t.

    Args:
        whole: The squared gradient norm of each step, ``[records]``.
        single: The mean over the batches of a step of the squared gradient norms, ``[records]``.
        batches: The number of batches in a step; at least 2.

    Example:
        >>> noise_scale(np.full(8, 2.0), np.full(8, 5.0), 4)  # |G|² = 1 and tr Σ = 4
        NoiseScale(value=4.0, low=4.0, high=4.0)
    """
    noise = (single - whole) * batches / (batches - 1)
    signal = (batches * whole - single) / (batches - 1)
    records = len(whole)
    t = _student(records - 1)
    (of_noise, both), (_, of_signal) = np.cov(noise, signal) * t * t / records
    mean_noise, mean_signal = float(noise.mean()), float(signal.mean())
    # The interval contains the ratios r for which mean(noise - r * signal) may be zero: a r² - 2 b r + c <= 0.
    a, b, c = mean_signal**2 - of_signal, mean_noise * mean_signal - both, mean_noise**2 - of_noise
    root = math.sqrt(max(0.0, b * b - a * c))
    value = mean_noise / mean_signal if mean_signal > 0 else math.inf
    if a > 0 and mean_signal > 0:
        return NoiseScale(value, max(0.0, float((b - root) / a)), float((b + root) / a))
    return NoiseScale(value, float((b - root) / a) if a < 0 < c else 0.0, math.inf)


def _student(freedom: int) -> float:
    """Return the quantile of Student's t for a 95 % interval. The error is below 1 % from 4 degrees of freedom on."""
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


class _Norms(NamedTuple):
    """The squared gradient norms of each parameter, ``[records, parameters]``, and the steps of the records."""

    whole: Floats
    single: Floats
    names: list[str]
    steps: list[int]


@rule(
    NOISE_SCALE,
    "note",
    statistic="trace of the covariance of the gradients of samples, divided by the squared norm of their mean",
    usual="grows while the loss falls",
    why="The gradients of samples differ. Below this number of samples a step, twice as many need about half the "
    "steps; far above it, a larger batch hardly saves steps.",
    next="Compare it with the samples of a step, which the learning rate has to fit.",
    false_alarms="It is a note, and only with noise_scale=True. It is that of the second half of the records. A "
    "sweep over batch sizes up to the same loss finds the average over the run.",
    needs=("parameters",),
    records=8,
)
def gradient_noise(evidence: Evidence, *, fewest: int = 8, wide: float = 10.0) -> Iterator[Finding]:
    """Yield a note with the noise scales of the model and its blocks, if the gradients of single batches are known."""
    about = evidence.parameters.about
    batches, size = (int(about.get(name) or 0) for name in ("batches", "batch_size"))
    norms = _norms(evidence, batches) if batches > 1 else None
    if norms is None or len(norms.steps) < fewest:
        return
    half = slice(min(len(norms.steps) // 2, len(norms.steps) - fewest), None)
    found = _scale(norms, half, range(len(norms.names)), batches)
    if found.value <= 0 or found.low <= 0:
        return
    samples, unit = (size, "samples") if size else (1, "batches")
    value, low, high = (each * samples for each in found)
    groups: dict[str, list[int]] = {}
    for place, name in enumerate(norms.names):
        groups.setdefault(_block_of(name), []).append(place)
    of_groups = {name: _scale(norms, half, places, batches) for name, places in groups.items()}
    known = {
        name: NoiseScale(*(number * samples for number in each))
        for name, each in of_groups.items()
        if each.low > 0 and each.high < math.inf
    }
    is_known = high <= wide * low
    scale = (
        f"{value:.3g} {unit} (between {low:.3g} and {high:.3g} with 95 %)" if is_known else f"at least {low:.3g} {unit}"
    )
    trace = _trace(evidence, norms, batches, samples, fewest)
    over_run = [each for each in trace.values if 0 < each < math.inf]
    is_curve = len(over_run) == len(trace.values) > 1
    mean = f", and {np.mean(over_run):.3g} on average over the run" if is_curve else ""
    verdict = f"the gradient noise scale is {scale}{mean}; a step has {batches * samples:,}"
    if len(known) > 1:
        least, most = (
            f"{name} ({each.value:.3g}, between {each.low:.3g} and {each.high:.3g})"
            for name, each in (choose(known.items(), key=itemgetter(1)) for choose in (min, max))
        )
        verdict += f". It is least in {least} and greatest in {most}"
    view = evidence.view(evidence.parameters, "")
    ends = {f"{name}, {end}": getattr(each, end) for name, each in known.items() for end in ("low", "high")}
    numbers = {unit: value if is_known else math.inf, "low": low, "high": high, "step": float(batches * samples)}
    if is_curve:
        numbers["mean over the run"] = float(np.mean(over_run))
    yield replace(
        view.found(verdict, since=norms.steps[half][0]),
        numbers=numbers | {name: each.value for name, each in known.items()} | ends,
        trace=trace,
    )


def _norms(evidence: Evidence, batches: int) -> _Norms | None:
    """Return the norms in the records with a complete step, in which each rank ran all batches of the step."""
    table = evidence.parameters
    sites = [each for each in table.places if each.path.endswith(_BATCH)]
    pairs = [(each, Site(each.name, each.path.removesuffix(_BATCH) + _GRAD)) for each in sites]
    pairs = [(single, whole) for single, whole in pairs if whole in table.places]
    if not pairs:
        return None
    count, rms = table.get("count"), table.get("rms")
    singles, wholes = ([table.places[pair[side]] for pair in pairs] for side in (0, 1))
    # If a batch does not use a parameter, its missing gradient counts as zero.
    with np.errstate(invalid="ignore", divide="ignore"):
        passes = count[:, singles] / count[:, wholes]
    most = np.nan_to_num(np.nanmax(np.where(np.isfinite(passes), passes, 0.0), axis=1))
    whole, single = (rms[:, places] ** 2 * count[:, places] for places in (wholes, singles))
    steps = count[:, wholes] / count[:, wholes].min(axis=0, initial=np.inf, where=count[:, wholes] > 0)
    finite = np.isfinite(np.where(np.isnan(rms[:, wholes]), 0.0, rms[:, wholes])).all(axis=1)
    rows = np.flatnonzero((most == batches) & finite)
    steps = np.nan_to_num(steps[rows], nan=1.0)
    return _Norms(
        np.nan_to_num(whole[rows]) / steps,
        np.nan_to_num(single[rows]) / (batches * steps),
        [each.name for each, _ in pairs],
        [table.steps[row] for row in rows],
    )


def _scale(norms: _Norms, rows: slice, places: range | list[int], batches: int) -> NoiseScale:
    whole, single = (each[rows][:, list(places)].sum(axis=1) for each in (norms.whole, norms.single))
    return noise_scale(whole, single, batches)


def _block_of(name: str) -> str:
    """Return the outermost block of a list that contains the module, or else the name of the module.

    Example:
        >>> _block_of("model.h.3.attn.c_attn"), _block_of("model.wte")
        ('model.h.3', 'model.wte')
    """
    found = re.match(r"(?:.*?\.)??\d+(?=\.|$)", name)
    return name if found is None else found[0]


def _trace(evidence: Evidence, norms: _Norms, batches: int, samples: int, fewest: int) -> Trace:
    """Return the noise scale in windows of records, as the curve of the note."""
    windows = max(1, min(20, len(norms.steps) // fewest))
    rows = [part.tolist() for part in np.array_split(np.arange(len(norms.steps)), windows)]
    every = range(len(norms.names))
    values = [_scale(norms, slice(part[0], part[-1] + 1), every, batches).value * samples for part in rows]
    recorder = next(iter(evidence.parameters.recorders), "")
    return Trace(recorder, "noise scale", tuple(norms.steps[part[-1]] for part in rows), tuple(values), "")
