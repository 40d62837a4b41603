"""Rules about settings: learning rate, weight decay, clipping, dropout, the mode of layers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from lightning_recorder.graph.unused import joined_names
from lightning_recorder.insight.finding import Finding
from lightning_recorder.insight.rule import Evidence, Parameter, Rule
from lightning_recorder.insight.small_updates import are_new, largest_ratio
from lightning_recorder.records.table import Floats
from lightning_recorder.taps import Site

__all__ = ["RULES"]

# Adam with an L2 penalty, and others that add the decay to a gradient that they divide by its size.
_COUPLED = ("Adam", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop")
_MANY = 10  # records
_MODAL = ("BatchNorm", "Dropout", "DropPath", "InstanceNorm")  # parts of the names of classes that depend on the mode


def _eval_mode(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    table = evidence.activations
    if len(table) < rule.persistence:
        return
    trained = {each.site.name for each in evidence.tensors if each.gradient is not None}
    frozen = {name for name, why in evidence.missing("parameters") if why.startswith("frozen")}
    last = table.get("eval_mode")[-rule.persistence :] == 1.0
    found = [
        site.name
        for site, place in table.places.items()
        if last[:, place].all() and any(part in evidence.type_of(site.name) for part in _MODAL)
    ]
    found = [name for name in dict.fromkeys(found) if _is_trained(evidence, name, trained, frozen)]
    if found:
        first = next(site for site in table.places if site.name == found[0])
        many = f" and {len(found) - 1} other modules are" if len(found) > 1 else " is"
        verdict = f"{found[0]}{many} in eval mode in training steps"
        since = int(table.column(first, "eval_mode")[1][0])
        finding = rule.found(evidence, table, first, verdict, since=since, modules=len(found))
        yield replace(finding, others=tuple(found[1:]))


def _is_trained(evidence: Evidence, name: str, trained: set[str], frozen: set[str]) -> bool:
    """Return True if the module, or the last module with parameters before it, is trained.

    A frozen backbone belongs into eval mode.
    """
    seen, todo = {name}, [name]
    while todo:
        each = todo.pop()
        if each in trained:
            return True
        if each not in frozen:
            new = [other for other in evidence.wiring.inputs.get(each, ()) if other not in seen]
            seen.update(new)
            todo += new
    return False


def _strong_dropout(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    graph, found = evidence.wiring.graph, {}
    for node in () if graph is None else graph.nodes:
        if graph is not None and node.kind == "op" and re.fullmatch(r"(\w+_)?dropout(\dd)?", node.name):
            arguments = dict(node.arguments)
            share = float(arguments.get("p", "0"))
            if rule.thresholds["share"] <= share < 1 and arguments.get("training") == "True":
                found[graph[node.parent or 0].name] = share
    if found:
        name, share = next(iter(found.items()))
        dropped, left = f"{100 * share:.3g}%", f"{100 * (1 - share):.3g}%"
        verdict = f"{name or 'the model'} drops {dropped} of its inputs in training, so that {left} are left"
        site = Site(name, "out") if Site(name, "out") in evidence.activations.places else Site(name, "")
        finding = rule.found(evidence, evidence.activations, site, verdict, statistic="zero_fraction", share=share)
        yield replace(finding, others=tuple(other for other in found if other != name))


def _not_registered(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if gradients reach parameters of modules that the model does not register."""
    graph = evidence.wiring.graph
    names = () if graph is None else graph.unused.unregistered
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    if modules:
        listed = joined_names(modules)
        more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
        verdict = (
            f"the model does not register {', '.join(listed[:3])}{more}: gradients reach their parameters, but no "
            "optimizer of the recorded step and no checkpoint has them"
        )
        table = evidence.parameters if len(evidence.parameters) else evidence.activations
        found = rule.found(evidence, table, Site(modules[0], ""), verdict, parameters=len(names))
        yield replace(found, others=tuple(modules[1:]))


def _rate_vanishes(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if a scheduler has made the learning rate tiny for a large part of the run."""
    table = evidence.parameters
    known = [table.places[each.site] for each in evidence.weights]
    # Batches without an optimizer step have none.
    by_record = np.nan_to_num(table.get("learning_rate")[:, known], nan=-1.0).max(axis=1, initial=-1.0)
    rates, steps = by_record[by_record >= 0], np.array(table.steps)[by_record >= 0]
    if not len(rates):
        return
    peak = int(np.argmax(rates))
    tiny = rates[peak:] < rule.thresholds["factor"] * rates[peak]
    if len(rates) >= rule.persistence and tiny.sum() >= rule.thresholds["share"] * len(rates):
        since = int(steps[peak + int(np.argmax(tiny))])
        verdict = (
            f"the learning rate falls from {rates[peak]:.3g} to {rates[-1]:.3g}: from step {since} on, it is below "
            f"{rule.thresholds['factor']:.3g} of its largest value, and hardly anything is learned"
        )
        site = evidence.weights[0].site
        found = rule.found(evidence, table, site, verdict, statistic="learning_rate", since=since, peak=rates[peak])
        yield replace(found, module="", path="")


def _nothing_moves(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if no parameter ever had a gradient or moved, although its learning rate is not zero."""
    table = evidence.parameters
    updates = [each.update for each in evidence.tensors if each.update is not None]
    if not updates or any(each.gradient is not None for each in evidence.tensors):
        return
    changes = [evidence.column(update, "rms") for update in updates]
    records = max(map(len, changes))
    rates = table.get("learning_rate")
    if records >= rule.persistence and not any(each.any() for each in changes) and not (rates == 0).any():
        verdict = f"none of {len(updates)} parameters moves in {records} records: all updates are zero"
        found = rule.found(evidence, table, updates[0], verdict, statistic="rms")
        yield replace(found, module="", path="")


def _rate_too_large(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if most weights are replaced by the first step, or by a few steps over most of the run."""
    sizes = {
        each.site: found
        for each in evidence.weights
        if len(found := evidence.column(each.site, "update_ratio")) >= rule.persistence
        and not _shrinks(evidence.column(each.site, "rms"))
    }
    rates = [rate for each in evidence.weights for rate in evidence.setting(each, "learning_rate")]
    if not sizes or not rates:
        return
    later = {site: float(np.median(found[1:])) for site, found in sizes.items()}
    first = {site: float(found[0]) for site, found in sizes.items() if np.isfinite(found[0])}
    for when, values, limit in (
        ("a step changes", later, rule.thresholds["update_ratio"]),
        ("the first step changes", first, rule.thresholds["first"]),
    ):
        middle = float(np.median(list(values.values()) or [0.0]))
        if middle > limit:
            largest = max(values, key=lambda site: values[site])
            numbers = {"update_ratio": middle, "learning_rate": max(rates)}
            verdict = f"{when} the weights by {middle:.1%} of their size (learning rate {max(rates):.3g})"
            yield rule.found(evidence, evidence.parameters, largest, verdict, statistic="update_ratio", **numbers)
            return


def _shrinks(values: Floats) -> bool:
    """Return True if a weight loses half of its size. The cause is weight decay, not the learning rate."""
    return bool((values[-1:] < 0.5 * values[:1]).any())


def _decayed_norm(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """Yield a note if weight decay has pulled the weights of normalization layers towards zero."""
    found: dict[Parameter, float] = {}
    for each in evidence.tensors:
        values, steps = evidence.parameters.column(each.site, "mean")
        (decay, rates), _ = evidence.parameters.columns(each.site, "weight_decay", "learning_rate")
        is_norm = "Norm" in evidence.type_of(each.site.name) and each.site.path == "weight"
        if not is_norm or min(len(values), len(decay), len(rates)) < rule.persistence or not decay.max() > 0:
            continue
        expected = float(np.exp(-np.mean(rates * decay) * (steps[-1] - steps[0])))
        if values[0] > 0 and values[-1] / values[0] < rule.thresholds["shrink"] and expected < 0.9:
            found[each] = values[-1] / values[0]
    if found:
        worst = min(found, key=lambda each: found[each])
        decay = evidence.setting(worst, "weight_decay")[-1]
        verdict = f"weight decay {decay:.3g} has shrunk {worst.name} to {found[worst]:.0%} of its initial mean"
        note = rule.found(evidence, evidence.parameters, worst.site, verdict, statistic="mean", weight_decay=decay)
        yield replace(note, others=tuple(each.site.name for each in found if each is not worst))


def _decay_too_strong(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if weight decay removes a large share of the weights in every step."""
    groups = evidence.parameters.about.get("groups") or ()
    shares: dict[Parameter, float] = {}
    for each in evidence.weights:
        rates, decays = (evidence.setting(each, name) for name in ("learning_rate", "weight_decay"))
        if len(rates) == len(decays) >= rule.persistence:
            shares[each] = float(np.median(rates * decays))
    strong = [each for each, share in shares.items() if share > rule.thresholds["share"]]
    if not strong or any(group.get("optimizer") in _COUPLED for group in groups):
        return
    worst = max(strong, key=lambda each: shares[each])
    decay, rate = (float(np.median(evidence.setting(worst, name))) for name in ("weight_decay", "learning_rate"))
    verdict = (
        f"weight decay {decay:.3g} removes {shares[worst]:.1%} of {worst.name} in every step (learning rate {rate:.3g})"
    )
    found = rule.found(
        evidence,
        evidence.parameters,
        worst.site,
        verdict,
        statistic="rms",
        share=shares[worst],
        weight_decay=decay,
        learning_rate=rate,
    )
    yield replace(found, others=tuple(dict.fromkeys(each.site.name for each in strong if each is not worst)))


def _always_clipped(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """Yield a note if clipping shrinks the gradient of every record by a large factor; a warning for SGD."""
    table, limit = evidence.parameters, evidence.parameters.about.get("gradient_clip_val")
    places = [table.places[each.gradient] for each in evidence.tensors if each.gradient is not None]
    by_norm = table.about.get("gradient_clip_algorithm") == "norm"
    if (
        not isinstance(limit, (int, float))
        or not limit > 0
        or not by_norm
        or not places
        or len(table) < rule.persistence
    ):
        return
    norms = np.sqrt(np.nansum(table.get("rms")[:, places] ** 2 * table.get("count")[:, places], axis=1))
    factor = float(norms.min() / limit)
    if factor > rule.thresholds["factor"]:
        site = evidence.weights[0].site if evidence.weights else evidence.tensors[0].site
        verdict = f"clipping to a norm of {limit:.3g} shrinks the gradient of every step, at least {factor:.3g}-fold"
        found = replace(rule.found(evidence, table, site, verdict, factor=factor, limit=limit), module="", path="")
        # Adam divides the factor out again.
        is_sgd = [group.get("optimizer") for group in table.about.get("groups") or ()] == ["SGD"]
        is_slow = factor > rule.thresholds["slow"] and 0 < largest_ratio(evidence, _MANY) < rule.thresholds["ratio"]
        is_large = factor > rule.thresholds["sgd"] or (is_slow and are_new(evidence))
        yield replace(found, severity="warning") if is_sgd and is_large else found


def _wrong_dimension(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """Yield each softmax of attention scores whose mean is that of a softmax over another dimension than the last two.

    The mean of a softmax is 1 / size of the dimension that it adds up over.
    """
    table = evidence.activations
    for site, mean in evidence.medians(table, "mean").items():
        shape = table.shapes[table.places[site]] or ()
        if evidence.type_of(site.name) != "Softmax" or len(shape) < 3 or shape[-1] != shape[-2]:
            continue
        over = [place for place, size in enumerate(shape) if _is_close(mean * size, rule.thresholds["tolerance"])]
        if over and over[-1] < len(shape) - 2:
            what = "the batch" if over == [0] else f"dimension {over[0]}"
            verdict = (
                f"{site.name} adds up to 1 over {what}, not over the positions: its output of shape {list(shape)} has "
                f"the mean 1/{shape[over[0]]}"
            )
            yield rule.found(evidence, table, site, verdict, statistic="mean", mean=mean, size=shape[over[0]])


def _is_close(value: float, tolerance: float) -> bool:
    return abs(value - 1) < tolerance


RULES = (
    Rule(
        name="softmax-dimension",
        severity="warning",
        statistic="mean of the output of a softmax whose last two dimensions are equal, times the size of a dimension",
        thresholds={"tolerance": 0.01},
        persistence=0,
        usual="1 for one of the last two dimensions",
        why="The argument dim of the softmax is the batch or the heads, so that samples influence each other.",
        next="Pass dim=-1 to the softmax of attention scores.",
        false_alarms="Only scores with two equal last dimensions are examined, and none of those sizes may fit.",
        examine=_wrong_dimension,
        explains={
            "softmax-dimension": ("any",),
            "attention-collapse": ("same",),
            "train-differs": ("any",),
            "odd-block": ("same",),
        },
    ),
    Rule(
        name="learning-rate-too-large",
        severity="warning",
        statistic="median update_ratio of the weights, if the learning rate is known",
        thresholds={"update_ratio": 0.15, "first": 0.5},
        persistence=3,
        usual="1e-4 to 0.02",
        why="The learning rate is far too high for the size of the weights.",
        next="Lower the learning rate of all groups, or warm it up.",
        false_alarms="Weights that begin at zero, and weights that a strong weight decay shrinks, do not count.",
        examine=_rate_too_large,
        explains=dict.fromkeys(
            (
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
                "gradient-spike",
                "running-statistics",
            ),
            ("any",),
        ),
    ),
    Rule(
        name="weight-decay-too-strong",
        severity="warning",
        statistic="median of learning_rate × weight_decay of a weight",
        thresholds={"share": 0.01},
        persistence=3,
        usual="1e-6 to 1e-3",
        why="Weight decay is too high for the learning rate: without gradients, the weights halve within 70 steps.",
        next="Lower weight_decay, for AdamW to 0.01 to 0.1.",
        false_alarms="Optimizers that add the decay to a gradient that they normalize, such as Adam, are not examined.",
        examine=_decay_too_strong,
        explains=dict.fromkeys(
            (
                "weight-drift",
                "decayed-norm",
                "unlike-siblings",
                "sudden-change",
                "vanishing-gradient",
                "dead-output",
                "constant-weight",
                "learning-rate-too-large",
                "learning-rate-outlier",
            ),
            ("any",),
        ),
    ),
    Rule(
        name="decayed-norm",
        severity="note",
        statistic="mean of the weight of a normalization layer with weight decay, last against first record",
        thresholds={"shrink": 0.7},
        persistence=3,
        usual="0.9 to 1.2",
        why="The optimizer decays all parameters in one group.",
        next="Put the parameters of normalization layers and biases into a group with weight_decay=0.",
        false_alarms="Weights that training shrinks by itself: the decay alone must explain a tenth.",
        examine=_decayed_norm,
    ),
    Rule(
        name="always-clipped",
        severity="note",
        statistic="smallest norm of all recorded gradients, against gradient_clip_val",
        thresholds={"factor": 50.0, "sgd": 1000.0, "slow": 100.0, "ratio": 1e-4},
        persistence=3,
        usual="below 10",
        why="gradient_clip_val is far below the usual norm, so it acts as a factor of the learning rate.",
        next="Compare gradient_clip_val with the norm of the gradients.",
        false_alarms=(
            "Adam is not affected by a constant factor. With SGD alone, a factor above 1,000 is a warning. So is one "
            "above 100 if after 10 records most weights are still distributed as in new layers of torch."
        ),
        examine=_always_clipped,
        explains=dict.fromkeys(("does-not-move", "barely-moves"), ("any",)),
    ),
    Rule(
        name="eval-mode",
        severity="warning",
        statistic="training flag of normalization and dropout layers in recorded training steps",
        thresholds={},
        persistence=2,
        usual="all layers whose neighbors are trained are in training mode",
        why="eval() without train() after it, or a pretrained model that was loaded in eval mode: Lightning keeps it.",
        next="Call train() on the module in on_train_start, unless its dropout and statistics are meant to be off.",
        false_alarms="Frozen layers do not count; detection models keep BatchNorm in eval mode on purpose.",
        examine=_eval_mode,
        explains={
            "running-statistics": ("any",),
            "norm-ineffective": ("same",),
            "train-differs": ("any",),
            "odd-block": ("same",),
        },
    ),
    Rule(
        name="strong-dropout",
        severity="warning",
        statistic="argument p of a dropout layer or function in train mode, in the recorded graph",
        thresholds={"share": 0.8},
        persistence=0,
        usual="0 to 0.5",
        why="The share that is kept was passed instead of the share that is dropped, or the value is a typing error.",
        next="Look at the argument p of the layer: it is the share of the inputs that are set to zero.",
        false_alarms="Dropout of whole inputs or labels that a method asks for.",
        examine=_strong_dropout,
        explains={
            "train-differs": ("any",),
            "scale-jump": ("same",),
            "dead-output": ("same",),
            "odd-block": ("same",),
            "unlike-siblings": ("same", "upstream"),
        },
    ),
    Rule(
        name="nothing-moves",
        severity="critical",
        statistic="updates of all parameters, if none of them has a gradient",
        thresholds={"rms": 0.0},
        persistence=2,
        usual="every step moves the parameters",
        why="The loss does not depend on the parameters. It was made from a number or an index, detached, or computed "
        "under no_grad(), and requires_grad was set afterwards.",
        next="Return the loss as it was computed: without item(), detach(), no_grad() and argmax() on the way to it, "
        "and without requires_grad_().",
        false_alarms="None known.",
        examine=_nothing_moves,
    ),
    Rule(
        name="not-registered",
        severity="warning",
        statistic="parameters in the recorded graph that get gradients and are not among those of the model",
        thresholds={},
        persistence=0,
        usual="the model registers all modules that it trains",
        why="The modules are in a Python list, tuple or dictionary.",
        next="Use nn.ModuleList or nn.ModuleDict instead.",
        false_alarms="Frozen modules that are kept out of the model on purpose do not count.",
        examine=_not_registered,
        is_lasting=True,
    ),
    Rule(
        name="learning-rate-vanishes",
        severity="warning",
        statistic="learning rate of each record, against the largest one before it",
        thresholds={"factor": 1e-3, "share": 0.4},
        persistence=6,
        usual="the rate is tiny at most in the last tenth of a run",
        why="A scheduler that steps per batch instead of per epoch, or a gamma or T_max that does not fit the run.",
        next='Look at the arguments of the scheduler, and at "interval" in configure_optimizers.',
        false_alarms="A decay to zero at the end of a run: 40 % of the records must show it.",
        examine=_rate_vanishes,
        explains={"does-not-move": ("any",), "barely-moves": ("any",), "updates-lost": ("any",)},
    ),
)
