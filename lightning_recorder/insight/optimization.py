"""Rules about parameters and their updates."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.graph.model import Node
from lightning_recorder.insight.finding import Finding
from lightning_recorder.insight.rule import Evidence, Parameter, Rule, spread
from lightning_recorder.insight.wiring import is_position
from lightning_recorder.records.table import Floats
from lightning_recorder.taps import Site

__all__ = ["RULES"]


def _drift(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    for each in evidence.weights:
        values, steps = evidence.parameters.column(each.site, "rms")
        shape = evidence.shape(each)
        inputs = 1 if "Embedding" in evidence.type_of(each.site.name) else np.prod(shape[1:])
        few = np.prod(shape) < rule.thresholds["numel"]
        if len(values) < rule.persistence or few or values[0] * np.sqrt(inputs) < 0.05:
            continue  # a layer that begins at zero has to grow, and the rms of a few values varies
        ratio = values[-1] / values[0]
        grows = ratio > rule.thresholds["grow"] and values[-1] * np.sqrt(inputs) > rule.thresholds["gain"]
        if grows or (ratio < rule.thresholds["shrink"] and _is_decay(rule, evidence, each)):
            way = "grows" if grows else "shrinks"
            decay = evidence.setting(each, "weight_decay")
            because = f", with weight decay {decay.max():.3g}" if not grows and len(decay) and decay.max() > 0 else ""
            span = f"from rms {values[0]:.3g} to {values[-1]:.3g} in {steps[-1] - steps[0]} steps"
            verdict = f"{each.name} {way} {span}{because}"
            found = rule.found(
                evidence, evidence.parameters, each.site, verdict, statistic="rms", first=values[0], last=values[-1]
            )
            yield _as_jump(rule, found, each.name, values, steps)


def _as_jump(rule: Rule, found: Finding, name: str, values: Floats, steps: NDArray[np.int64]) -> Finding:
    """Return a finding about a weight that says so if nearly all of its change is between two records."""
    with np.errstate(all="ignore"):
        changes = np.abs(np.diff(np.log(values)))
        at = int(np.argmax(changes))
        if not changes[at] > rule.thresholds["jump"] * abs(np.log(values[-1] / values[0])):
            return found
    span = f"from rms {values[at]:.3g} to {values[at + 1]:.3g} between steps {steps[at]} and {steps[at + 1]}"
    why = "The weight was set or loaded anew, or a single step was far too large."
    look = "Look at the code that writes to the weight, and at the batches and the updates between these steps."
    return replace(found, first_step=int(steps[at + 1]), verdict=f"{name} jumps {span}", why=why, next=look)


def _is_decay(rule: Rule, evidence: Evidence, each: Parameter) -> bool:
    """Return True if most of the updates point towards zero while the weight loses half of its size.

    In long trainings, weights before a normalization shrink slowly, by updates in all directions.
    """
    values, steps = evidence.parameters.column(each.site, "rms")
    updates = evidence.column(each.update, "rms")
    if len(updates) != len(values):
        return True  # updates are not recorded
    end = int(np.argmax(values < 0.5 * values[0]))
    path = np.sum(np.diff(steps[: end + 1]) * np.maximum(updates[:end], updates[1 : end + 1]))
    return bool((values[0] - values[end]) > rule.thresholds["alignment"] * path)


def _rate_outlier(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    adaptive = any("exp_avg_sq" in site.path for site in evidence.parameters.places)
    compared = _step_sizes(rule, evidence, adaptive)
    if len(compared) < rule.thresholds["fewest"]:
        return
    rates = {each: rates.max() for each in compared if len(rates := evidence.setting(each, "learning_rate"))}
    what = "its updates are" if adaptive else "the ratio of its updates to its gradients is"
    for each, others, usual_rate in _far_above(rule, evidence, compared, rates):
        factor = float(compared[each] / np.median(others))
        is_outlier = factor > rule.thresholds["factor"] * max(spread(others), 1.0) ** 0.5
        sizes = evidence.column(each.site, "update_ratio")
        is_fast = rates.get(each, np.nan) > rule.thresholds["rate"] * usual_rate > 0
        if is_outlier and (is_fast or _is_large(rule, sizes)):
            is_known = rates.get(each, np.nan) > usual_rate
            rate = f", and its learning rate {rates[each]:.3g} instead of {usual_rate:.3g}" if is_known else ""
            most = sizes[np.isfinite(sizes)].max(initial=0.0)  # infinite if it begins at zero
            verdict = (
                f"a step changes {each.name} by up to {most:.1%} of its size: {what} {factor:.3g} × the median "
                f"of the other layers{rate}"
            )
            yield rule.found(
                evidence,
                evidence.parameters,
                each.site,
                verdict,
                statistic="update_ratio",
                factor=factor,
                update_ratio=float(np.median(sizes[1:])) if len(sizes) > 1 else 0.0,
            )


def _far_above(
    rule: Rule, evidence: Evidence, compared: Mapping[Parameter, float], rates: Mapping[Parameter, float]
) -> Iterator[tuple[Parameter, Floats, float]]:
    """Yield the parameters far above the largest other one, with the others and the median of their learning rates.

    The others are made for these few parameters only: for each one, the time would grow with the square of the number.
    """
    fast = set(_in_fast_groups(rule, evidence))  # not what a fast weight is compared with, such as its own bias
    slow_first = sorted((each for each, rate in rates.items() if rate > 0), key=lambda each: rates[each])
    scaled = [rule.thresholds["factor"] * rates[each] for each in slow_first]

    @cache
    def known(count: int) -> tuple[list[Parameter], set[Parameter], Floats]:
        # If only a few layers are slower, they are the odd ones.
        usual = slow_first[:count] if 2 * count >= len(compared) else list(compared)
        sizes = {each: compared[each] for each in usual if each not in fast}
        return usual, set(sizes), np.sort(np.array([0.0, *sizes.values()]))[-2:]

    for each, value in compared.items():
        # Those of other groups, whose rates are far below that of this one.
        slower = bisect_left(scaled, rates.get(each, 0.0))
        usual, counted, largest = known(slower if 2 * slower >= len(compared) else 0)
        is_largest = each in counted and value == largest[-1]
        if len(counted) > (each in counted) and value > rule.thresholds["largest"] * largest[-1 - is_largest]:
            usual = [key for key in usual if key is not each]
            others = np.array([compared[key] for key in usual if key in counted])
            yield each, others, float(np.median([rates[key] for key in usual if key in rates] or [np.nan]))


def _step_sizes(rule: Rule, evidence: Evidence, adaptive: bool) -> dict[Parameter, float]:
    """Return what an optimizer keeps equal: for Adam the updates, for SGD the ratio of updates and gradients."""
    found: dict[Parameter, float] = {}
    for each in (*evidence.weights, *_in_fast_groups(rule, evidence)):
        update, gradient = (evidence.column(site, "rms") for site in (each.update, each.gradient))
        if min(len(update), len(gradient)) >= rule.persistence and np.median(gradient) > 0 and np.median(update) > 0:
            size, slope = float(np.median(update[1:])), float(np.median(gradient[1:]))
            if min(size, slope) > 0:
                found[each] = size if adaptive else size / slope
    return found


def _in_fast_groups(rule: Rule, evidence: Evidence) -> list[Parameter]:
    """Return the biases, scales and scalars whose learning rate is far above that of the weights.

    The relative updates of small parameters are large in healthy runs, so that those of usual groups are not compared.
    """
    rates = {each: rates.max() for each in evidence.tensors if len(rates := evidence.setting(each, "learning_rate"))}
    usual = [rates[each] for each in evidence.weights if each in rates]
    if not usual:
        return []
    limit = rule.thresholds["factor"] * float(np.median(usual))
    return [each for each, rate in rates.items() if rate > limit and len(evidence.shape(each)) < 2]


def _is_large(rule: Rule, sizes: Floats) -> bool:
    """Return True if the relative updates are large, at the beginning or over the run."""
    if len(sizes) < rule.persistence:
        return False
    return bool(np.median(sizes[1:]) > rule.thresholds["update_ratio"] or sizes[:3].max() > rule.thresholds["first"])


def _constant(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    for each in evidence.weights:
        (values, spreads), _ = evidence.parameters.columns(each.site, "rms", "std")
        # A token may not be used, as one for masks. A weight without a gradient of its own stays as it was initialized,
        # like the zeros of a LoRA whose gradient is lost: that is another finding.
        is_used = bool(evidence.column(each.gradient, "rms").any())
        if len(values) < rule.persistence or np.prod(evidence.shape(each)) < 4 or not is_used:
            continue
        flat = spreads <= 1e-4 * values
        if flat[-rule.persistence :].all():
            what = "zero" if values[-1] == 0 else f"equal to {values[-1]:.3g}"
            verdict = f"all values of {each.name} are {what}, so its outputs cannot differ"
            yield rule.found(evidence, evidence.parameters, each.site, verdict, statistic="std", std=spreads[-1])


def _not_in_optimizer(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    trained = {site.name for site in evidence.gradients.places}
    updated = {each.site.name for each in evidence.tensors if each.update is not None}
    for name, why in evidence.missing("parameters"):  # as known after the first record
        if why.startswith("no step") and name not in updated and (name in trained or not trained):
            verdict = f"{name} gets gradients, but no optimizer that stepped has its parameters"
            yield rule.found(evidence, evidence.parameters, Site(name, ""), verdict)
    left_out = [each for each in _left_out(evidence) if each.note != "frozen"]
    if left_out:
        yield _about_left_out(rule, evidence, left_out, "is used, but no optimizer that stepped has it")


def _in_two_optimizers(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """Yield a note about parameters that two optimizers step in the same training steps.

    Both steps count in the record of a parameter, and the groups of all optimizers have it twice.
    """
    table, tensors = evidence.parameters, evidence.tensors
    sizes = np.array([max(1, int(np.prod(evidence.shape(each)))) for each in tensors], dtype=np.float64)
    counts = table.get("count")[:, [table.places[each.site] for each in tensors]] / sizes
    counts = counts[(counts > 0).all(axis=1)]  # the records that have all of them
    if len(counts) < rule.persistence or not tensors:
        return
    steps = counts / counts.min(axis=1, keepdims=True)
    are_twice = (steps == 2).all(axis=0)
    shared = [each for each, is_twice in zip(tensors, are_twice, strict=True) if is_twice]
    more = sum(int(group.get("parameters", 0)) for group in table.about.get("groups") or ()) - len(tensors)
    # A discriminator may take two steps for each one of the generator.
    if shared and len(shared) == more and (are_twice | (steps == 1).all(axis=0)).all():
        names = [each.name for each in shared]
        what = f"{names[0]} and {more - 1} other parameters" if more > 2 else " and ".join(names)
        verdict = f"two optimizers step {what} in the same training steps"
        found = rule.found(evidence, table, shared[0].site, verdict, parameters=more)
        modules = dict.fromkeys(each.site.name for each in shared if each.site.name != shared[0].site.name)
        yield replace(found, others=tuple(modules))


def _left_out(evidence: Evidence) -> list[Node]:
    """Return the used weights without a record, of modules that have other parameters with one."""
    graph, recorded = evidence.wiring.graph, {each.name for each in evidence.tensors}
    trained = {each.site.name for each in evidence.tensors if each.gradient is not None}
    nodes = [node for node in (() if graph is None else graph.nodes) if node.kind == "parameter"]
    nodes = [node for node in nodes if node.outputs and len(node.outputs[0].shape) >= 2]
    nodes = [node for node in nodes if recorded.isdisjoint((node.name, *node.tied))]
    return list({node.name: node for node in nodes if node.name.rpartition(".")[0] in trained}.values())


def _about_left_out(rule: Rule, evidence: Evidence, nodes: list[Node], what: str) -> Finding:
    modules = list(dict.fromkeys(node.name.rpartition(".")[0] for node in nodes))
    verdict = f"{nodes[0].name} {what}, while other parameters of {modules[0]} are trained"
    found = rule.found(evidence, evidence.parameters, Site(modules[0], ""), verdict, parameters=len(nodes))
    return replace(found, others=tuple(modules[1:]))


def _frozen(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    # Positions are often fixed sines.
    parts = [each for each in _left_out(evidence) if each.note == "frozen" and not is_position(each.name)]
    if parts:
        found = _about_left_out(rule, evidence, parts, "is frozen")
        # Some methods of fine-tuning train the biases alone.
        is_few = len(parts) < rule.thresholds["share"] * (len(parts) + len(evidence.tensors))
        yield found if is_few else replace(found, severity="note", why="Fine-tuning of a part of the parameters.")
    frozen = [name for name, why in evidence.missing("parameters") if why.startswith("frozen")]
    trained = {each.site.name for each in evidence.tensors}
    if not frozen or not trained:
        return
    order = evidence.wiring.order
    frozen.sort(key=lambda name: order.get(name, -1))
    first = min((order[name] for name in trained if name in order), default=0)
    last = max((order[name] for name in trained if name in order), default=0)
    # Fine-tuning freezes the first layers, or most of them.
    inside = [name for name in frozen if first < order.get(name, -1) < last and name in order]
    inside = [name for name in inside if trained & evidence.wiring.downstream(name) and not is_position(name)]
    share = len(frozen) / (len(frozen) + len(trained))
    if inside and share < rule.thresholds["share"]:
        verdict = f"{inside[0]} is frozen, but layers before and after it are trained"
        found = rule.found(evidence, evidence.parameters, Site(inside[0], ""), verdict, frozen=len(frozen))
        yield replace(found, others=tuple(frozen[1:]))
    else:
        verdict = f"{len(frozen)} of {len(frozen) + len(trained)} modules with parameters are frozen"
        found = rule.found(evidence, evidence.parameters, Site(frozen[0], ""), verdict, frozen=len(frozen))
        yield replace(found, severity="note", others=tuple(frozen[1:]), why="Fine-tuning of a part of the model.")


RULES = (
    Rule(
        name="not-in-optimizer",
        severity="warning",
        statistic="parameters that require gradients and take part in no optimizer step",
        thresholds={},
        persistence=0,
        usual="each module that gets gradients is in an optimizer",
        why="The list of parameters that the optimizer was given lacks this module.",
        next="Look at configure_optimizers; pass self.parameters(), or a group for this module.",
        false_alarms="A module that another library updates.",
        examine=_not_in_optimizer,
        explains={"not-in-optimizer": ("any",)},
        is_lasting=True,
    ),
    Rule(
        name="two-optimizers",
        severity="note",
        statistic="number of steps of each parameter in a record, and the number of parameters in all groups",
        thresholds={},
        persistence=2,
        usual="each parameter is in one optimizer",
        why="The generator's optimizer also got the discriminator, or the list of one optimizer is all of the model.",
        next="Look at configure_optimizers: each optimizer should have the parameters that its loss is to change.",
        false_alarms="An encoder that two losses train on purpose, as in an adversarial autoencoder. So it is a note.",
        examine=_in_two_optimizers,
    ),
    Rule(
        name="frozen",
        severity="warning",
        statistic="modules none of whose parameters requires a gradient",
        thresholds={"share": 0.34},
        persistence=0,
        usual="no module is frozen, or the first layers in fine-tuning (a note)",
        why="requires_grad_(False) on the wrong module, or a freeze that was not undone.",
        next="Look for requires_grad; call requires_grad_(True) before configure_optimizers.",
        false_alarms="Fine-tuning freezes the first layers or most layers, which is a note.",
        examine=_frozen,
        explains={"unlike-siblings": ("same",)},
        is_lasting=True,
    ),
    Rule(
        name="constant-weight",
        severity="warning",
        statistic="std of a weight with two or more dimensions",
        thresholds={"std": 1e-4},
        persistence=2,
        usual="std and rms of a weight are about equal",
        why="A constant initialization: all units of the layer stay equal.",
        next="Initialize with random values.",
        false_alarms="Layers that begin at zero and leave it with the first step.",
        examine=_constant,
        explains={
            "constant-weight": ("any",),
            "unlike-siblings": ("any",),
            "gradient-stops": ("upstream", "same"),
            "dead-output": ("same", "downstream"),
            "norm-ineffective": ("downstream",),
        },
    ),
    Rule(
        name="learning-rate-outlier",
        severity="warning",
        statistic="rms(update) for Adam, rms(update) / rms(gradient) for SGD, against the other layers",
        thresholds={"factor": 8.0, "largest": 3.0, "update_ratio": 0.02, "first": 0.2, "fewest": 3, "rate": 20.0},
        persistence=3,
        usual="0.3 to 3",
        why="The parameter group has a learning rate that is far too high.",
        next="Look at the groups in configure_optimizers; lower the learning rate of this layer.",
        false_alarms="A new head with up to twenty times the rate, if its relative updates stay below 2 %.",
        examine=_rate_outlier,
        explains=dict.fromkeys(
            (
                "learning-rate-outlier",
                "weight-drift",
                "unlike-siblings",
                "scale-jump",
                "saturation",
                "sudden-change",
                "dead-output",
                "train-differs",
                "vanishing-gradient",
                "gradient-step",
                "exploding-gradient",
            ),
            ("any",),
        ),
    ),
    Rule(
        name="weight-drift",
        severity="warning",
        statistic=(
            "rms of a weight, last against first record; for shrinking also the share of the updates that point to "
            "zero, for growing also rms √inputs"
        ),
        thresholds={"jump": 0.8, "shrink": 0.25, "grow": 8.0, "gain": 8.0, "alignment": 0.1, "numel": 64},
        persistence=3,
        usual="0.8 to 3.5",
        why="A weight decay that is too strong (shrinks), or a learning rate that is too high (grows).",
        next="Look at the weight decay and the learning rate of the group.",
        false_alarms="Slow shrinking before a normalization, layers that begin near zero, weights below 64 values.",
        examine=_drift,
        explains=dict.fromkeys(
            (
                "weight-drift",
                "unlike-siblings",
                "vanishing-gradient",
                "gradient-step",
                "exploding-gradient",
                "sudden-change",
                "scale-jump",
                "barely-moves",
                "train-differs",
                "running-statistics",
                "norm-ineffective",
            ),
            ("any",),
        ),
    ),
)
