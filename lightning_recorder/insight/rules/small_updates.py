"""Rules about updates that are zero, lost, or too small."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from lightning_recorder.insight.evidence import Evidence, View
from lightning_recorder.insight.finding import Finding
from lightning_recorder.insight.rule import GRAPH, rule
from lightning_recorder.insight.rules.gradients import without_gradient
from lightning_recorder.records.table import Floats

__all__ = ["FEWEST_VALUES", "TOLERANCE", "are_new", "largest_ratio", "total_norms"]

FEWEST_VALUES, TOLERANCE = 256, 0.05
"""The limits of :func:`are_new`, shared by two rules."""


@rule(
    "updates-lost",
    statistic="share of zeros in the update, against that in the gradient",
    usual="0 in float32",
    why="The updates are smaller than the precision of the weights, which are kept in 16 bits.",
    next="Keep the weights in float32 (precision='bf16-mixed' instead of 'bf16-true'), or raise the learning rate.",
    false_alarms="Embeddings of which a batch uses few rows: their gradient has as many zeros.",
    needs=("parameters",),
    records=2,
    explains={
        "updates-lost": ("any",),
        "does-not-move": ("any",),
        "barely-moves": ("any",),
        "unlike-siblings": ("any",),
    },
)
def updates_lost(
    evidence: Evidence, *, persistence: int = 2, zero_fraction: float = 0.5, of_lost: float = 0.8
) -> Iterator[Finding]:
    """Yield the weights whose updates are lost to rounding in their number format."""
    for each in evidence.weights:
        update, gradient = each.update.zero_fraction, each.gradient.zero_fraction
        if min(len(update), len(gradient)) < persistence or each.dtype not in ("bfloat16", "float16"):
            continue
        lost, zero = float(np.median(update)), float(np.median(gradient))
        if zero_fraction < lost and zero < of_lost * lost:
            kept = f"{lost:.0%} of the values of {each.name} do not move, but only {zero:.0%} have no gradient"
            yield each.update.found(f"{kept} ({each.dtype})", "zero_fraction", lost=lost, gradient=zero)


@rule(
    "does-not-move",
    statistic="update_ratio of a parameter with a gradient",
    usual="1e-4 to 1e-2",
    why="A learning rate of zero, or updates below the precision of the weights.",
    next="Look at the learning rate of the group, at the scheduler, and at the dtype of the weights.",
    false_alarms="A step that a warm-up begins with a rate of zero is one record only.",
    needs=("parameters",),
    records=2,
    explains={"barely-moves": ("any",), "unlike-siblings": ("any",)},
)
def does_not_move(evidence: Evidence, *, persistence: int = 2) -> Iterator[Finding]:
    """Yield the weights that have a gradient but do not change."""
    lost = without_gradient(evidence, persistence)
    moving = [each for each in evidence.tensors if each.module not in lost and (each.gradient.rms > 0).any()]
    stuck = [each for each in moving if len(each.update_ratio) >= persistence and (each.update_ratio == 0).all()]
    names = list(dict.fromkeys(each.module for each in stuck))
    whole = len(stuck) == len(moving)
    stuck = [each for each in stuck if whole or len(each.shape) >= 2]
    if not stuck:
        return
    first = stuck[0]
    of = "no parameter" if whole else f"{first.name} does not"
    moves = f"{of} moves, although gradients are not zero" if whole else f"{of} move, although its gradient is not zero"
    verdict = f"{moves} ({', '.join([*_settings(first), f'dtype {first.dtype or None}'])})"
    others = tuple(each for each in names if each != first.module)
    found = first.found(verdict, "update_ratio", others=others, update_ratio=0.0)
    is_precise = first.dtype == "float32" and len(first.learning_rate) > 0 and bool((first.learning_rate > 0).all())
    yield replace(found, why=_WHY_NO_STEP, next=_NEXT_NO_STEP) if whole and is_precise else found


_WHY_NO_STEP = (
    "The learning rate is not zero, and float32 is precise: the gradients are cleared before the optimizer steps, the "
    "step is left out, or the parameters are set back."
)
_NEXT_NO_STEP = "Look for zero_grad() between backward() and step(), and at an overridden optimizer_step."


def _is_constant(values: Floats, persistence: int) -> bool:
    return len(values) >= persistence and bool(np.ptp(values) == 0)


@rule(
    "set-back",
    statistic="statistics of a weight in all records, against its updates",
    usual="a weight that gets updates has other values in each record",
    why="Something writes the old values into the weight after each step, such as a copy that is loaded in a hook.",
    next="Look for load_state_dict, copy_, .data and deepcopy in the hooks of the step.",
    false_alarms="None known: mean, rms, least and largest value must all be equal to the bit.",
    needs=("parameters",),
    records=4,
    explains=dict.fromkeys(("unlike-siblings", "barely-moves", "learning-rate-outlier"), ("any",)),
)
def set_back(evidence: Evidence, *, persistence: int = 4) -> Iterator[Finding]:
    """Yield the weights that are changed by each step, but have the same values in all records."""
    found = list(evidence.weights)
    # Read one statistic of all weights at a time, since a history caches the arrays of only a few statistics.
    for name in ("mean", "rms", "min", "max"):
        found = [each for each in found if _is_constant(each.column(name)[0], persistence)]
    found = [each for each in found if len(each.update.rms) >= persistence and (each.update.rms > 0).all()]
    # Weights with a mean of exactly zero, such as a weight of zeros, may be constant on purpose, so they are left out.
    found = [each for each in found if each.column("mean")[0].all()]
    if found:
        first = found[0]
        verdict = (
            f"{first.name} has the same values in each of {len(first.rms)} records, although each step changes it by "
            f"{np.median(first.update_ratio):.2g} of its size: something sets it back"
        )
        others = tuple(dict.fromkeys(each.module for each in found[1:]))
        yield first.found(verdict, "rms", others=others)


@rule(
    "barely-moves",
    statistic="median update_ratio of the layer that moves most; differences of the norm of all gradients",
    usual="1e-4 to 1e-2",
    why="A learning rate that is far too low, or clipping to a norm that is far too small.",
    next="Raise the learning rate; look at gradient_clip_val and the scheduler.",
    false_alarms="The end of a schedule that goes to zero: the median over the run counts. From 1e-6 to 3e-5, the "
    "rate must be constant and most weights still be distributed as in new layers of torch, or be few and keep their "
    "size, so that it is no fine-tuning.",
    needs=("parameters",),
    records=3,
)
def barely_moves(
    evidence: Evidence,
    *,
    persistence: int = 3,
    update_ratio: float = 1e-6,
    new: float = 3e-5,
    warm_up: float = 1.2,
    numel: int = FEWEST_VALUES,
    tolerance: float = TOLERANCE,
    equal: float = 1e-3,
) -> Iterator[Finding]:
    """Yield the weights whose updates are too small to matter."""
    largest = largest_ratio(evidence, persistence)
    # The higher limit is only for new weights without a warm-up: fine-tuning makes small steps on purpose, and a
    # warm-up begins with small steps.
    of_new = new if are_new(evidence, numel, tolerance) and not _warms_up(evidence, warm_up) else 0.0
    if 0 < largest < max(update_ratio, of_new):
        first = evidence.weights[0]
        settings = _settings(first)
        verdict = f"the weights hardly move: at most {largest:.2g} of their size per step"
        verdict += f" ({', '.join(settings)})" if settings else ""
        norms, is_known = total_norms(evidence), evidence.parameters.about.get("gradient_clip_val") is not None
        if not is_known and len(norms) > persistence and np.ptp(norms) < equal * norms.min():
            verdict += f"; the norm of all gradients is {norms[-1]:.3g} in each record, as after clipping to it"
            found = first.found(verdict, "update_ratio", update_ratio=largest, norm=norms[-1])
            yield replace(found, why=_WHY_CLIPPED, next=_NEXT_CLIPPED)
            return
        yield first.found(verdict, "update_ratio", update_ratio=largest)


_WHY_CLIPPED = (
    "The gradients are clipped to a norm that is far too small, or while the scale of a GradScaler is in them."
)
_NEXT_CLIPPED = (
    "Compare the limit with the norm of the gradients; call scaler.unscale_(optimizer) before clip_grad_norm_."
)


def total_norms(evidence: Evidence) -> Floats:
    """Return the L2 norm of all gradients in each record that has gradients, ``[n]``."""
    table = evidence.parameters
    places = [table.places[each.gradient.site] for each in evidence.tensors if each.gradient]
    squares = table.get("rms")[:, places] ** 2 * table.get("count")[:, places]
    norms: Floats = np.sqrt(np.nansum(squares[np.isfinite(squares).any(axis=1)], axis=1))
    return norms


def largest_ratio(evidence: Evidence, records: int) -> float:
    """Return the largest median ``update_ratio`` of all weights with at least ``records`` records; 0 without any."""
    ratios = (each.update_ratio for each in evidence.weights)
    return max((float(np.median(each)) for each in ratios if len(each) >= records), default=0.0)


def are_new(evidence: Evidence, numel: int, tolerance: float, *, inside: str = "", record: int = -1) -> bool:
    """Return True if most weights have the uniform distribution of new torch layers, by default in the last record.

    Weights with fewer than ``numel`` values show no distribution. A model of such weights counts as new if their rms
    has hardly changed, since nobody trains such a model in advance.

    The largest value of a uniform distribution is √3 × the rms. Training makes a few values larger.

    Args:
        evidence: The evidence.
        numel: The least number of values of a compared weight.
        tolerance: The largest relative difference from √3 × the rms.
        inside: The module around the weights; empty for the whole model.
        record: The place of the record.
    """
    last = []
    for each in evidence.weights:
        found, _ = each.columns("min", "max", "rms")
        if len(found[0]) and each.numel >= numel and f"{each.module}.".startswith(f"{inside}." if inside else ""):
            last.append([float(values[record]) for values in found])
    uniform = [abs(max(-low, high) / rms / np.sqrt(3) - 1) < tolerance for low, high, rms in last if rms > 0]
    if last or inside:
        return bool(sum(uniform) > len(last) / 2)
    sizes = [each.rms for each in evidence.weights if len(each.rms)]
    return bool(sizes) and all(abs(float(each[-1] / each[0]) - 1) < tolerance for each in sizes)


def _warms_up(evidence: Evidence, factor: float) -> bool:
    """Return True if the learning rate rises, or if it is unknown and the updates become larger."""
    rates = [values for each in evidence.weights if len(values := each.learning_rate)]
    if rates:
        return any(bool(values.max() > factor * np.median(values)) for values in rates)
    thirds = [np.array_split(each.update_ratio, 3) for each in evidence.weights if len(each.update_ratio) >= 3]
    return any(bool(np.median(last) > factor * np.median(first)) for first, _, last in thirds)


@rule(
    "slow-last-layer",
    statistic="learning rate and update_ratio of the last layers, against those of the layers before them",
    usual="0.1 to 20",
    why="The learning rates of two parameter groups are swapped, or one of them has a typing error.",
    next="Look at the groups in configure_optimizers: a last layer has the rate of the others, or a higher one.",
    false_alarms="Fine-tuning with small rates for the first layers: nothing may follow the slow layers.",
    needs=("parameters", GRAPH),
    records=1,
    explains={"unlike-siblings": ("same",)},
)
def slow_last_layer(
    evidence: Evidence, *, factor: float = 50.0, slowness: float = 25.0, fewest: int = 2
) -> Iterator[Finding]:
    """Yield a finding if only the last layers have a far smaller learning rate than the others."""
    rates = {each: values.max() for each in evidence.weights if len(values := each.learning_rate)}
    ratios = {each: float(np.median(values)) for each in rates if len(values := each.update_ratio)}
    usual = float(np.median([*rates.values()] or [0.0]))
    slow = [each for each, rate in rates.items() if 0 < factor * rate <= usual]
    before = [each for each in rates if rates[each] >= usual and each in ratios]
    for each in slow:
        feeds = evidence.wiring.upstream(each.module)
        of_others = [ratios[other] for other in before if other.module in feeds]
        is_slow = len(of_others) >= fewest and slowness * ratios.get(each, np.inf) < np.median(of_others)
        if not (each.is_last and is_slow):
            return
    if slow:
        first, rate = slow[0], rates[slow[0]]
        verdict = (
            f"{first.module} learns {usual / rate:.3g} × slower than the layers before it: its learning rate is "
            f"{rate:.3g}, that of the others {usual:.3g}"
        )
        others = tuple(dict.fromkeys(each.module for each in slow[1:]))
        found = first.found(
            verdict, "update_ratio", others=others, factor=rate / usual, learning_rate=rate, usual=usual
        )
        yield found


def _settings(parameter: View) -> list[str]:
    """Describe the known settings that may keep a parameter from moving."""
    rates, limit = parameter.learning_rate, parameter.table.about.get("gradient_clip_val")
    found = [f"learning rate {np.median(rates):.3g}"] if len(rates) else []
    is_clipped = isinstance(limit, (int, float)) and limit > 0
    return [*found, f"gradients clipped to {limit:.3g}"] if is_clipped else found
