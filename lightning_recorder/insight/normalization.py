"""Rules about normalization layers: running statistics that lag behind, and layers that do not normalize."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.insight.finding import Finding
from lightning_recorder.insight.rule import Evidence, Rule
from lightning_recorder.insight.wiring import INPUT
from lightning_recorder.names import RUNNING_STATISTICS
from lightning_recorder.records.history import History
from lightning_recorder.records.table import Floats
from lightning_recorder.taps import Site

__all__ = ["RULES"]

_NORMS = re.compile(r"BatchNorm\dd|GroupNorm|InstanceNorm\dd|LayerNorm|RMSNorm|SyncBatchNorm")


def _running_statistics(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """Find running statistics that do not change, and compare others with the mean and the std of what feeds them."""
    unchanged = _unchanged(rule, evidence)
    for site in evidence.parameters.places:
        if site in unchanged:
            moving = f"do not change, but those of {unchanged[site]} others do"
            verdict = f"the running statistics of {site.name} {moving}"
            yield rule.found(evidence, evidence.parameters, site, verdict, statistic="mean")
            continue
        feeds = evidence.wiring.inputs.get(site.name, []) if site.path == "running_var" else []
        if len(feeds) != 1 or feeds[0] == INPUT:
            continue
        distances = _distances(rule, evidence, site.name, Site(feeds[0], "out"))
        if distances is None:
            continue
        # In the beginning the running statistics follow from 0 and 1, so the distance shrinks.
        first, last = distances[0], distances[-rule.persistence :]
        if last.min() > np.log(rule.thresholds["factor"]) and last[-1] > 0.8 * first:
            verdict = (
                f"the running statistics of {site.name} are not those of its inputs: they differ "
                f"{np.exp(last[-1]):.3g}-fold"
            )
            yield rule.found(evidence, evidence.parameters, site, verdict, statistic="mean", factor=np.exp(last[-1]))


def _unchanged(rule: Rule, evidence: Evidence) -> dict[Site, int]:
    """Return the running variances that stay equal, in train mode, each with the number of those that change."""
    table, modes = evidence.parameters, evidence.activations
    if len(table) < rule.persistence or table.steps[-1] < rule.thresholds["steps"]:
        return {}
    mean, variance = RUNNING_STATISTICS
    sites = [site for site in table.places if site.path == variance and Site(site.name, mean) in table.places]
    same = {site for site in sites if _is_constant(table, site.name)}
    # In eval mode they stay as they are.
    away = {site.name for site in modes.places if len(modes.column(site, "eval_mode")[0])}
    called = {site.name for site in modes.places if len(modes.column(site, "rms")[0]) >= rule.persistence} - away
    return {site: len(sites) - len(same) for site in same if len(same) < len(sites) and site.name in called}


def _is_constant(table: History, name: str) -> bool:
    """Return True if the running statistics of a module are known and equal in all records."""
    columns = [table.column(Site(name, path), "mean")[0] for path in RUNNING_STATISTICS]
    return all(len(each) == len(table) and np.ptp(each) == 0 for each in columns)


def _distances(
    rule: Rule, evidence: Evidence, name: str, feed: Site
) -> np.ndarray[tuple[int], np.dtype[np.float64]] | None:
    """Return the distance of the logarithms of the rms that the running statistics and the inputs have."""
    table, inputs = evidence.parameters, evidence.activations
    mean, variance = (Site(name, path) for path in RUNNING_STATISTICS)
    if mean not in table.places or feed not in inputs.places:
        return None
    columns = [table.column(mean, "rms"), table.column(variance, "mean"), inputs.column(feed, "rms")]
    steps = sorted(set.intersection(*(set(at.tolist()) for _, at in columns)))
    if len(steps) < 2 * rule.persistence or steps[-1] < rule.thresholds["steps"]:
        return None
    mean_rms, variances, rms = (values[np.isin(at, steps)] for values, at in columns)
    known = np.sqrt(mean_rms**2 + variances)
    return np.abs(np.log(known / rms)) if (rms > 0).all() and (known > 0).all() else None


def _ineffective(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    table, parameters = evidence.activations, evidence.parameters
    for site in table.places:
        weight = Site(site.name, "weight")
        if not _NORMS.fullmatch(evidence.type_of(site.name)) or weight not in parameters.places or site.path != "out":
            continue
        low, high, steps = _expected_rms(evidence, site.name)
        values, at = table.column(site, "rms")
        common, here, there = np.intersect1d(at, steps, return_indices=True)
        if len(common) < rule.persistence:
            continue
        values, low, high = (each[: len(common)] for each in (values[here], low[there], high[there]))
        limit = rule.thresholds["ratio"]
        if ((values > limit * high) | (values * limit < low))[-rule.persistence :].all():
            span = f"{low[-1]:.3g}" if low[-1] == high[-1] else f"{low[-1]:.3g} to {high[-1]:.3g}"
            verdict = f"{site.name} does not normalize: its output has rms {values[-1]:.3g}, normal is {span}"
            yield rule.found(
                evidence, table, site, verdict, statistic="rms", rms=values[-1], low=low[-1], high=high[-1]
            )


def _expected_rms(evidence: Evidence, name: str) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """Return the smallest and the largest rms that the weight and the bias of a normalization allow, and the steps.

    A BatchNorm normalizes each channel, so that the rms is known. A LayerNorm normalizes all features together, so that
    features with a small weight may have all of the variance.
    """
    parameters, bias = evidence.parameters, Site(name, "bias")
    is_per_sample = "LayerNorm" in evidence.type_of(name) or "RMSNorm" in evidence.type_of(name)
    ends = ("min", "max") if is_per_sample else ("rms", "rms")
    (low, high), steps = parameters.columns(Site(name, "weight"), *ends)
    offset = parameters.column(bias, "rms")[0] if bias in parameters.places else np.zeros(len(low))
    if len(offset) != len(low):
        offset = np.full(len(low), offset.max(initial=0.0))
    if is_per_sample:
        return np.maximum(low, 0) - offset, np.maximum(np.abs(low), np.abs(high)) + offset, steps
    expected = np.sqrt(low**2 + offset**2)
    return expected, expected, steps


RULES = (
    Rule(
        name="norm-ineffective",
        severity="warning",
        statistic="rms of the output of a normalization, against that of its weight and bias: √(rms(w)² + rms(b)²)",
        thresholds={"ratio": 1.5},
        persistence=2,
        usual="0.9 to 1.1",
        why="The normalization uses fixed statistics (a BatchNorm in eval mode), or its eps exceeds the variance.",
        next="Check that the module is in train mode, its eps, and the scale of its input.",
        false_alarms="A LayerNorm may weaken features with a large variance, so that only its range is compared.",
        examine=_ineffective,
        explains={
            "norm-ineffective": ("any",),
            "unlike-siblings": ("any",),
            "scale-jump": ("downstream", "same"),
            "train-differs": ("downstream", "same"),
        },
    ),
    Rule(
        name="running-statistics",
        severity="warning",
        statistic="root of the mean square of the inputs that the running statistics of a BatchNorm stand for",
        thresholds={"factor": 4.0, "steps": 50},
        persistence=3,
        usual="within a factor of 1.5",
        why="A momentum that is too small, or a BatchNorm whose statistics are not updated at all.",
        next="Look at momentum and track_running_stats of the module; validation uses these statistics.",
        false_alarms="The statistics begin at 0 and 1 and follow: the distance must not shrink.",
        examine=_running_statistics,
        explains={"train-differs": ("any",)},
    ),
)
