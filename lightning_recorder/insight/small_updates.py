"""Rules about updates that are zero, lost, or too small."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from lightning_recorder.insight.backward import without_gradient
from lightning_recorder.insight.finding import Finding
from lightning_recorder.insight.rule import Evidence, Parameter, Rule

__all__ = ["RULES", "are_new", "largest_ratio"]

_FEWEST_VALUES = 256  # of a weight whose distribution is known
_TOLERANCE = 0.05


def _moving(evidence: Evidence) -> list[Parameter]:
    """Return the parameters that have a gradient other than zero."""
    lost = without_gradient(evidence)
    return [
        each
        for each in evidence.tensors
        if each.site.name not in lost and (evidence.column(each.gradient, "rms") > 0).any()
    ]


def _does_not_move(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    stuck = []
    moving = _moving(evidence)
    for each in moving:
        ratio = evidence.column(each.site, "update_ratio")
        if len(ratio) >= rule.persistence and (ratio == 0).all():
            stuck.append(each)
    names = list(dict.fromkeys(each.site.name for each in stuck))
    whole = len(stuck) == len(moving)
    stuck = [each for each in stuck if whole or len(evidence.shape(each)) >= 2]
    if not stuck:
        return
    first = stuck[0]
    dtype = evidence.parameters.dtypes[evidence.parameters.places[first.site]]
    of = "no parameter" if whole else f"{first.name} does not"
    moves = f"{of} moves, although gradients are not zero" if whole else f"{of} move, although its gradient is not zero"
    verdict = f"{moves} ({', '.join([*_settings(evidence, first), f'dtype {dtype}'])})"
    found = rule.found(evidence, evidence.parameters, first.site, verdict, statistic="update_ratio", update_ratio=0.0)
    yield replace(found, others=tuple(each for each in names if each != first.site.name))


def _barely_moves(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    largest = largest_ratio(evidence, rule.persistence)
    # Fine-tuning makes small steps on purpose, and a warm-up begins with them.
    of_new = rule.thresholds["new"] if are_new(evidence) and not _warms_up(evidence) else 0.0
    if 0 < largest < max(rule.thresholds["update_ratio"], of_new):
        site = evidence.weights[0].site
        settings = _settings(evidence, evidence.weights[0])
        verdict = f"the weights hardly move: at most {largest:.2g} of their size per step"
        verdict += f" ({', '.join(settings)})" if settings else ""
        yield rule.found(evidence, evidence.parameters, site, verdict, statistic="update_ratio", update_ratio=largest)


def largest_ratio(evidence: Evidence, records: int) -> float:
    """Return the median ``update_ratio`` of the weight that moves most; 0 if there are fewer records of it."""
    ratios = (evidence.column(each.site, "update_ratio") for each in evidence.weights)
    return max((float(np.median(each)) for each in ratios if len(each) >= records), default=0.0)


def are_new(evidence: Evidence) -> bool:
    """Return True if most weights are in the last record still distributed as in new layers of torch: uniformly.

    The largest value is then √3 × the rms. Training makes a few values larger.
    """
    last = []
    for each in evidence.weights:
        found, _ = evidence.parameters.columns(each.site, "min", "max", "rms")
        if len(found[0]) and np.prod(evidence.shape(each)) >= _FEWEST_VALUES:
            last.append([float(values[-1]) for values in found])
    uniform = [abs(max(-low, high) / rms / np.sqrt(3) - 1) < _TOLERANCE for low, high, rms in last if rms > 0]
    return bool(sum(uniform) > len(last) / 2)


def _warms_up(evidence: Evidence) -> bool:
    """Return True if the learning rate rises, or is unknown."""
    rates = [values for each in evidence.weights if len(values := evidence.setting(each, "learning_rate"))]
    return not rates or any(bool(values.max() > 1.2 * np.median(values)) for values in rates)


def _slow_end(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if the last layers, and no others, are in a group with a far smaller learning rate."""
    wiring, factor = evidence.wiring, rule.thresholds["factor"]
    rates = {each: values.max() for each in evidence.weights if len(values := evidence.setting(each, "learning_rate"))}
    ratios = {
        each: float(np.median(values)) for each in rates if len(values := evidence.column(each.site, "update_ratio"))
    }
    usual = float(np.median([*rates.values()] or [0.0]))
    slow = [each for each, rate in rates.items() if 0 < factor * rate <= usual]
    before = [each for each in rates if rates[each] >= usual and each in ratios]
    for each in slow:
        feeds = wiring.upstream(each.site.name)
        others = [ratios[other] for other in before if other.site.name in feeds]
        is_last = wiring.has_graph and not wiring.outputs.get(each.site.name)
        is_slow = len(others) >= rule.thresholds["fewest"] and factor / 2 * ratios.get(each, np.inf) < np.median(others)
        if not (is_last and is_slow):
            return
    if slow:
        first, rate = slow[0], rates[slow[0]]
        verdict = (
            f"{first.site.name} learns {usual / rate:.3g} × slower than the layers before it: its learning rate is "
            f"{rate:.3g}, that of the others {usual:.3g}"
        )
        found = rule.found(
            evidence,
            evidence.parameters,
            first.site,
            verdict,
            statistic="update_ratio",
            learning_rate=rate,
            usual=usual,
        )
        yield replace(found, others=tuple(dict.fromkeys(each.site.name for each in slow[1:])))


def _settings(evidence: Evidence, parameter: Parameter) -> list[str]:
    """Describe the settings that may keep a parameter from moving, where known."""
    rates, limit = evidence.setting(parameter, "learning_rate"), evidence.parameters.about.get("gradient_clip_val")
    found = [f"learning rate {np.median(rates):.3g}"] if len(rates) else []
    is_clipped = isinstance(limit, (int, float)) and limit > 0
    return [*found, f"gradients clipped to {limit:.3g}"] if is_clipped else found


def _updates_lost(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    for each in evidence.weights:
        update = evidence.column(each.update, "zero_fraction")
        gradient = evidence.column(each.gradient, "zero_fraction")
        if min(len(update), len(gradient)) < rule.persistence:
            continue
        lost, zero = float(np.median(update)), float(np.median(gradient))
        if rule.thresholds["zero_fraction"] < lost and zero < 0.8 * lost:
            dtype = evidence.parameters.dtypes[evidence.parameters.places[each.site]]
            if dtype not in ("bfloat16", "float16"):
                continue
            verdict = (
                f"{lost:.0%} of the values of {each.name} do not move, but only {zero:.0%} have no gradient ({dtype})"
            )
            yield rule.found(
                evidence,
                evidence.parameters,
                each.update or each.site,
                verdict,
                statistic="zero_fraction",
                lost=lost,
                gradient=zero,
            )


RULES = (
    Rule(
        name="updates-lost",
        severity="warning",
        statistic="share of zeros in the update, against that in the gradient",
        thresholds={"zero_fraction": 0.5},
        persistence=2,
        usual="0 in float32",
        why="The updates are smaller than the precision of the weights, which are kept in 16 bits.",
        next="Keep the weights in float32 (precision='bf16-mixed' instead of 'bf16-true'), or raise the learning rate.",
        false_alarms="Embeddings of which a batch uses few rows: their gradient has as many zeros.",
        examine=_updates_lost,
        explains={
            "updates-lost": ("any",),
            "does-not-move": ("any",),
            "barely-moves": ("any",),
            "unlike-siblings": ("any",),
        },
    ),
    Rule(
        name="does-not-move",
        severity="warning",
        statistic="update_ratio of a parameter with a gradient",
        thresholds={"update_ratio": 0.0},
        persistence=2,
        usual="1e-4 to 1e-2",
        why="A learning rate of zero, or updates below the precision of the weights.",
        next="Look at the learning rate of the group, at the scheduler, and at the dtype of the weights.",
        false_alarms="A step that a warm-up begins with a rate of zero is one record only.",
        examine=_does_not_move,
        explains={"barely-moves": ("any",), "unlike-siblings": ("any",)},
    ),
    Rule(
        name="barely-moves",
        severity="warning",
        statistic="median update_ratio of the layer that moves most",
        thresholds={"update_ratio": 1e-6, "new": 1e-5},
        persistence=3,
        usual="1e-4 to 1e-2",
        why="A learning rate that is far too low, or clipping to a norm that is far too small.",
        next="Raise the learning rate; look at gradient_clip_val and the scheduler.",
        false_alarms=(
            "The end of a schedule that goes to zero: the median over the run counts. From 1e-6 to 1e-5, the rate must "
            "be constant and most weights still be distributed as in new layers of torch, so that it is no fine-tuning."
        ),
        examine=_barely_moves,
        explains={},
    ),
    Rule(
        name="slow-last-layer",
        severity="warning",
        statistic="learning rate and update_ratio of the last layers, against those of the layers before them",
        thresholds={"factor": 50.0, "fewest": 2},
        persistence=0,
        usual="0.1 to 20",
        why="The learning rates of two parameter groups are swapped, or one of them has a typing error.",
        next="Look at the groups in configure_optimizers: a last layer has the rate of the others, or a higher one.",
        false_alarms="Fine-tuning with small rates for the first layers: nothing may follow the slow layers.",
        examine=_slow_end,
        explains={"unlike-siblings": ("same",)},
    ),
)
