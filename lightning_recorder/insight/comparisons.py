"""Rules that compare modules of equal structure with each other, with their own past, and training with validation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.insight.finding import USUAL_UNTIL, Finding
from lightning_recorder.insight.rule import Evidence, Rule
from lightning_recorder.insight.siblings import (
    FORWARD,
    INITIAL,
    LIMITS,
    WEIGHT_GRADIENT,
    all_outliers,
    blocks_of,
    families_of,
    initial_steps,
    sibling_values,
)
from lightning_recorder.names import site_title
from lightning_recorder.records.table import Floats
from lightning_recorder.taps import Site

__all__ = ["ODD_BLOCK", "RULES", "UNLIKE"]

ODD_BLOCK = "odd-block"  # the rule about one of many equal blocks that computes something else
UNLIKE = "unlike-siblings"
"""The rule about one of several modules at the same place of repeated blocks."""


def _unlike(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    forward: dict[Site, list[Finding]] = {}
    backward: dict[Site, list[Finding]] = {}
    of_weights: dict[Site, list[Finding]] = {}
    for kind, table, statistic, words, site, value, others in all_outliers(evidence):
        factor, span = float(value / np.median(others)), f"{others.min():.3g} to {others.max():.3g}"
        name = f"{site.name}.{site.path}" if words.endswith("vector") else site.name
        at = ""
        if words in INITIAL:
            shown = initial_steps(evidence, table, site)
            at = f" at step {shown[0]}"
        verdict = f"the {words} of {name} is {value:.3g}{at}, "
        if 0 < factor < np.inf:
            verdict += f"{factor:.3g} × the median of {len(others)} equal modules ({span})"
        else:
            verdict += f"and {span if factor == 0 else 0} in {len(others)} equal modules"
        found = rule.found(evidence, table, site, verdict, statistic=statistic, value=value, factor=factor)
        if words in INITIAL:
            found = replace(found, first_step=shown[0], last_step=shown[-1], records=len(shown))
        other = of_weights if words == WEIGHT_GRADIENT else backward
        (forward if kind < FORWARD else other).setdefault(site, []).append(found)
    # The gradients of weights follow those of outputs, unless something changes them alone.
    backward = backward or ({} if forward else of_weights)
    order = evidence.wiring.order
    # A gradient comes from the modules behind, so the last module is the nearest to the cause.
    first_last = sorted(forward.items(), key=lambda each: order.get(each[0].name, -1))
    last_first = sorted(backward.items(), key=lambda each: -order.get(each[0].name, -1))
    for _, several in (*first_last, *((site, found) for site, found in last_first if site not in forward)):
        yield max(several, key=lambda each: abs(np.log(each.numbers["factor"])))


def _trend(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    of_outputs, _, _, of_gradients, *_ = sibling_values(evidence)
    for table, statistic, words, values in (of_outputs, of_gradients):
        best: tuple[float, list[Site]] | None = None
        for group in families_of(evidence, table, values, int(rule.thresholds["fewest"])):
            logs = np.log([values[site] if values[site] > 0 else np.nan for site in group])
            steps = np.diff(logs)
            if not np.isfinite(logs).all():
                continue
            each = np.log(rule.thresholds["each"])
            total = abs(float(logs[-1] - logs[0]))
            is_jump = np.abs(steps).max() > rule.thresholds["jump"] * total  # in one block
            is_trend = bool((steps > each).all() or (steps < -each).all()) and not is_jump
            if not is_trend or total <= np.log(rule.thresholds["total"]) or (best is not None and total <= best[0]):
                continue
            # In a U-Net, most of the gradient takes the skip connections.
            if table is evidence.activations or evidence.wiring.is_plain(blocks_of([one.name for one in group])):
                best = (total, group)
        if best is not None:
            group = best[1]
            first, last = values[group[0]], values[group[-1]]
            verdict = (
                f"the {words} changes from block to block, from {first:.3g} in {group[0].name} to {last:.3g} in "
                f"{group[-1].name}"
            )
            found = rule.found(evidence, table, group[-1], verdict, statistic=statistic, first=first, last=last)
            blocks = blocks_of([site.name for site in group])
            yield replace(found, module=blocks[-1], others=tuple(blocks[:-1]))
            return


def _stopped(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """Yield the weights that moved at first and no longer do, while all equal ones still move, as one finding."""
    table = evidence.parameters
    moves = np.nan_to_num(table.get("update_ratio")) > 0  # a weight that is frozen has no further records
    before, after = int(rule.thresholds["before"]), rule.persistence
    found: dict[Site, int] = {}
    for group in families_of(evidence, table, {each.site: 1.0 for each in evidence.weights}, int(LIMITS["fewest"])):
        members = moves[:, [table.places[site] for site in group]]
        for place, site in enumerate(group):
            own, others = members[:, place], np.delete(members, place, axis=1)
            number = int(own.sum())
            if before <= number <= len(own) - after and own[:number].all() and others[number:].all():
                found[site] = number
    if found:
        site = min(found, key=lambda each: (found[each], evidence.wiring.order.get(each.name, -1)))
        since = table.steps[found[site]]
        verdict = f"{site.name}.{site.path} does not move from step {since} on, but equal weights do"
        verdict += _why_stopped(evidence, site)
        more = tuple(dict.fromkeys(each.name for each in found if each.name != site.name))
        yield replace(rule.found(evidence, table, site, verdict, statistic="update_ratio", since=since), others=more)


def _why_stopped(evidence: Evidence, site: Site) -> str:
    table = evidence.parameters
    rates, steps = table.column(site, "learning_rate")
    if not len(steps) or steps[-1] < table.steps[-1]:
        return " (it is frozen since)"
    gradient = Site(site.name, f"{site.path}.grad")
    seen = table.column(gradient, "rms")[1] if gradient in table.places else steps[:0]
    if rates[-1] == 0:
        return " (learning rate 0)"
    return " (it has no gradient since)" if not len(seen) or seen[-1] < steps[-1] else ""


def _train_differs(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    train, validation = evidence.activations, evidence.validation
    if not len(train) or not len(validation) or validation.steps[-1] < rule.thresholds["steps"]:
        return
    found = _first_apart(rule, evidence, validation.steps[-1])
    if found is None:
        return
    site, here, there = found
    # Running statistics lag early in a training. What stays so is in the next validation, too.
    earlier = _first_apart(rule, evidence, validation.steps[-2]) if len(validation) > 1 else None
    if (earlier is None or earlier[0] != site) and not _is_worse(rule, evidence):
        return
    verdict = (
        f"the output of {site.name} has rms {here:.3g} in training and {there:.3g} in validation at step "
        f"{validation.steps[-1]}"
    )
    yield rule.found(evidence, train, site, verdict, statistic="rms", train=here, validation=there)


def _first_apart(rule: Rule, evidence: Evidence, step: int) -> tuple[Site, float, float] | None:
    """Return the first output whose size differs in a validation, with its rms in training and there."""
    train, validation = evidence.activations, evidence.validation
    pairs = {
        site.name: (site, pair)
        for site in validation.places
        if site in train.places
        and site.path == "out"
        and train.shapes[train.places[site]] != ()  # a loss
        and (pair := _pair(rule, evidence, site, step)) is not None
    }
    for name, (site, (here, there, apart)) in pairs.items():
        kind = evidence.type_of(name)
        limit = rule.thresholds["batchnorm" if "BatchNorm" in kind else "factor"]
        before = max((pairs[each][1][2] for each in evidence.wiring.inputs.get(name, ()) if each in pairs), default=0.0)
        is_first = before < min(np.log(rule.thresholds["batchnorm"]), apart / 2)
        if apart > np.log(limit) and is_first and "Dropout" not in kind and "Embedding" not in kind:
            return site, here, there
    return None


def _is_worse(rule: Rule, evidence: Evidence) -> bool:
    """Return True if a loss that is a module is larger in the last validation than in training."""
    train, validation = evidence.activations, evidence.validation
    for site in validation.places:
        if site in train.places and train.shapes[train.places[site]] == ():
            here, there = (table.column(site, "mean")[0][-1:] for table in (train, validation))
            if len(here) and len(there) and there[0] > rule.thresholds["worse"] * abs(here[0]) > 0:
                return True
    return False


def _pair(rule: Rule, evidence: Evidence, site: Site, last: int) -> tuple[float, float, float] | None:
    """Return the rms in training, that in validation, and the distance of their logarithms.

    The change between the two nearest records of training, extrapolated to the step of the validation, is subtracted
    from the distance. None if the training was not recorded near that step.
    """
    values, steps = evidence.activations.column(site, "rms")
    others, at = evidence.validation.column(site, "rms")
    near = np.argsort(np.abs(steps - last))[:2]
    others = others[at == last]
    if len(near) < 2 or not len(others) or not min(others[-1], *values[near]) > 0:
        return None
    gap = abs(int(steps[near[0]]) - last)
    if gap > rule.thresholds["gap"] * last:
        return None
    change = abs(float(np.log(values[near[0]] / values[near[1]])))
    drift = change * max(gap / abs(int(steps[near[0]] - steps[near[1]])), 1.0)
    here, there = float(values[near[0]]), float(others[-1])
    return here, there, abs(float(np.log(here / there))) - drift


def _sudden(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    table = evidence.activations
    values = table.get("rms")
    is_complete = np.isnan(values).sum(axis=0) == 0
    first = np.full(len(is_complete), -1)
    first[is_complete] = _first_changes(rule, values[:, is_complete])
    for site, place in table.places.items():
        if evidence.wiring.has_graph and not evidence.wiring.outputs.get(site.name):
            continue  # logits change when a model leaves a plateau
        if is_complete[place] and first[place] < 0:
            continue
        own, steps = table.column(site, "rms")
        at = int(first[place] if is_complete[place] else _first_changes(rule, own[:, None])[0])
        if at >= 0 and _is_sudden(rule, own[at - int(rule.thresholds["records"]) : at + 1]):
            ratio = np.median(own[at:]) / np.median(own[at - int(rule.thresholds["records"]) : at])
            before, after = int(steps[at - 1]), int(steps[at])
            when = f"at step {after}" if after == before + 1 else f"between steps {before} and {after}"
            verdict = f"the rms of {site_title(*site)} changes {ratio:.3g}-fold {when}, and stays so"
            numbers = {"ratio": ratio, USUAL_UNTIL: before}
            yield rule.found(evidence, table, site, verdict, statistic="rms", since=after, **numbers)


def _is_sudden(rule: Rule, values: Floats) -> bool:
    """Return True if the last value differs from the one before it by more than the records before have changed."""
    steps = np.diff(np.log(values))
    if not np.isfinite(steps).all():  # from zero or to zero
        return True
    return bool(abs(steps[-1]) > np.abs(steps[:-1]).max() + np.log(rule.thresholds["beyond"]))


def _first_changes(rule: Rule, values: Floats) -> NDArray[np.int64]:
    """Return the first row of each column from which on all values differ from the records before it; -1 for none."""
    earlier, factor = int(rule.thresholds["records"]), rule.thresholds["factor"]
    rows = len(values) - rule.persistence + 1 - earlier
    if rows < 1:
        return np.full(values.shape[1], -1)
    low, high = (each.reduce([values[at : at + rows] for at in range(earlier)]) for each in (np.minimum, np.maximum))
    least, most = (each.accumulate(values[::-1])[::-1][earlier:][:rows] for each in (np.minimum, np.maximum))
    changes = ((least > factor * high) & (high > 0)) | ((low > 0) & (most * factor < low))
    found: NDArray[np.int64] = np.where(changes.any(axis=0), changes.argmax(axis=0) + earlier, -1)
    return found


def _odd(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    for each in evidence.odd_blocks:
        source = f" ({each.source})" if each.source else ""
        others = f"the other {each.others} blocks" if each.is_one_kind else f"{each.others} similar blocks"
        verdict = f"{each.block} computes something else than {others}: {each.what}{source}"
        found = rule.found(evidence, evidence.activations, Site(each.module, ""), verdict)
        severity = "note" if each.may_be_design else rule.severity
        yield replace(found, severity=severity)


RULES = (
    Rule(
        name=ODD_BLOCK,
        severity="warning",
        statistic="calls, settings and connections of at least eight blocks in a row, in the recorded graph",
        thresholds={},
        persistence=0,
        usual="the blocks between the first and the last one are equal, differ in sizes only, or are of several kinds",
        why="A condition, a setting or a changed line of code that concerns this block only.",
        next="Compare the code and the settings of this block with those of the others.",
        false_alarms="Designs with several kinds of blocks: they differ in classes, in sizes, in more than three "
        "calls, or as the first or last block does. A block with other layers, or one that only calls more, is a note.",
        examine=_odd,
        explains={
            **dict.fromkeys(("gradient-step", "block-trend"), ("any",)),
            **dict.fromkeys(("unlike-siblings", "scale-jump", "saturation"), ("same",)),
            **dict.fromkeys(
                ("norm-ineffective", "attention-collapse", "running-statistics", "no-activation"), ("same",)
            ),
        },
    ),
    Rule(
        name="sudden-change",
        severity="warning",
        statistic="rms of the output, against the four records before",
        thresholds={"factor": 8.0, "records": 4, "beyond": 4.0},
        persistence=2,
        usual="the rms of a record is within a factor of 4 of the records before it",
        why="The data changed, a part of the model was replaced or reloaded, or a step was far too large.",
        next="Look at the batches and at the updates of the parameters before this step.",
        false_alarms="The first four records, when a model leaves its initialization; modules that nothing follows. "
        "Growth of the records before is subtracted.",
        examine=_sudden,
        explains=dict.fromkeys(
            ("sudden-change", "scale-jump", "saturation", "unlike-siblings", "train-differs"),
            ("downstream", "same", "upstream"),
        ),
    ),
    Rule(
        name="stops-moving",
        severity="warning",
        statistic="update_ratio of weights at the same place of repeated blocks",
        thresholds={"before": 3},
        persistence=4,
        usual="all equal weights move in every record",
        why="This weight was frozen, lost its gradient or its learning rate in the middle of the training.",
        next="Look at what changes at this step: callbacks, schedulers of its parameter group, conditions in the code.",
        false_alarms="Layers that are frozen one by one on purpose.",
        examine=_stopped,
        explains={"unlike-siblings": ("same",)},
    ),
    Rule(
        name="block-trend",
        severity="warning",
        statistic="a statistic that grows or shrinks from each block to the next",
        thresholds={"fewest": 4, "total": 30.0, "each": 1.6, "jump": 0.5},
        persistence=0,
        usual="within a factor of 10 over all blocks",
        why="A wrong factor in a residual connection, or an initialization that does not keep the variance.",
        next="Look at the residual connections and at the scale of each branch.",
        false_alarms="Pre-norm transformers grow slowly, by less than 1.6 from each block to the next.",
        examine=_trend,
        explains=dict.fromkeys(("unlike-siblings", "scale-jump", "exploding-gradient", "attention-collapse"), ("any",)),
    ),
    Rule(
        name=UNLIKE,
        severity="warning",
        statistic="a statistic of one of several modules at the same place of repeated blocks, against the others; the "
        "parameters of the first record",
        thresholds=LIMITS,
        persistence=0,
        usual="within a factor of 4 of the others",
        why="This block is initialized, loaded, wired or trained in another way than the others.",
        next="Compare the code and the state of this block with those of the others.",
        false_alarms="The first and the last block need three times as much, and biases and other vectors four times.",
        examine=_unlike,
        explains=dict.fromkeys(("unlike-siblings", "never-chosen"), ("any",)),
    ),
    Rule(
        name="train-differs",
        severity="warning",
        statistic="rms of the output in training, against validation, at the first module where they part",
        thresholds={"batchnorm": 1.3, "factor": 2.0, "steps": 40, "gap": 0.25, "worse": 1.5},
        persistence=0,
        usual="0.9 to 1.1 without dropout",
        why="BatchNorm whose running statistics do not follow, or validation data that are processed in another way.",
        next="Look at momentum and running statistics of the module, and at the transforms of both data sets.",
        false_alarms=(
            "Dropout, embeddings and losses; outputs that still grow; no record near the validation. It must be in two "
            "validations in a row, unless the validation loss is 1.5 times that of the training."
        ),
        examine=_train_differs,
    ),
)
