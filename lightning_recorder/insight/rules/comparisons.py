"""Rules that compare equal modules, a module with its own past, and training with validation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.insight.evidence import Evidence, View
from lightning_recorder.insight.finding import USUAL_UNTIL, Finding
from lightning_recorder.insight.module_edges import INPUT
from lightning_recorder.insight.odd_blocks import LIMITS as ODD_LIMITS
from lightning_recorder.insight.odd_blocks import OddLimits, odd_blocks
from lightning_recorder.insight.recorded_step import step_of
from lightning_recorder.insight.rule import ANY_GROUP, GRAPH, VALIDATION, rule
from lightning_recorder.insight.siblings import (
    FORWARD,
    INITIAL,
    LIMITS,
    WEIGHT_GRADIENT,
    SiblingLimits,
    all_outliers,
    blocks_of,
    families_of,
    initial_steps,
    sibling_values,
)
from lightning_recorder.names import Site, site_title
from lightning_recorder.records.table import Floats

__all__ = ["ODD_BLOCK", "UNLIKE"]

ODD_BLOCK = "odd-block"  # the rule about a block that differs from many equal blocks
UNLIKE = "unlike-siblings"
"""The rule about a module whose values differ from those of the corresponding modules in other blocks."""


@rule(
    ODD_BLOCK,
    statistic="calls, settings and connections of at least eight blocks in a row, or of three with attention, in the "
    "recorded graph",
    usual="the blocks between the first and the last one are equal, differ in sizes only, or are of several kinds",
    why="A condition, a setting or a changed line of code that concerns this block only.",
    next="Compare the code and the settings of this block with those of the others.",
    false_alarms="Designs with several kinds of blocks: they differ in classes, in sizes, in more than three "
    "calls, or as the first or last block does. A block with other layers, or one that only calls more, is a note. "
    "So is one of fewer than eight blocks, which may alternate, unless it has another setting of the same calls.",
    needs=(GRAPH,),
    explains={
        **dict.fromkeys(("gradient-step", "block-trend"), ("any",)),
        **dict.fromkeys(("unlike-siblings", "scale-jump", "saturation"), ("same",)),
        **dict.fromkeys(("norm-ineffective", "attention-collapse", "running-statistics", "no-activation"), ("same",)),
    },
)
def odd_block(
    evidence: Evidence,
    *,
    fewest: int = ODD_LIMITS.fewest,
    kinds: int = ODD_LIMITS.kinds,
    period: int = ODD_LIMITS.period,
    periods: int = ODD_LIMITS.periods,
    alike: int = ODD_LIMITS.alike,
    most_others: float = ODD_LIMITS.others,
) -> Iterator[Finding]:
    """Yield the blocks that differ from all other blocks of their list."""
    for each in odd_blocks(evidence.graph, OddLimits(fewest, kinds, period, periods, alike, most_others)):
        source = f" ({each.source})" if each.source else ""
        others = f"the other {each.others} blocks" if each.is_one_kind else f"{each.others} similar blocks"
        verdict = f"{each.block} computes something else than {others}: {each.what}{source}"
        found = evidence.view(evidence.activations, each.module).found(verdict)
        yield replace(found, severity="note") if each.may_be_design or each.is_doubtful else found


@rule(
    "sudden-change",
    statistic="rms of the output, against the four records before",
    usual="within a factor of 4 of the records before it",
    why="The data changed, a part of the model was replaced or reloaded, or a step was far too large.",
    next="Look at the batches and at the updates of the parameters before this step.",
    false_alarms="The first four records, when a model leaves its initialization; modules that nothing follows. "
    "Growth of the records before is subtracted.",
    needs=("activations",),
    records=6,
    explains=dict.fromkeys(
        ("sudden-change", "scale-jump", "saturation", "unlike-siblings", "train-differs"),
        ("downstream", "same", "upstream"),
    ),
)
def sudden_change(
    evidence: Evidence, *, persistence: int = 2, factor: float = 8.0, records: int = 4, beyond: float = 4.0
) -> Iterator[Finding]:
    """Yield a layer whose outputs change in size within a few records, more than before and more than other layers."""
    values = evidence.activations.get("rms")
    is_complete = np.isnan(values).sum(axis=0) == 0
    first = np.full(len(is_complete), -1)
    first[is_complete] = _first_changes(values[:, is_complete], persistence, factor, records)
    for place, view in enumerate(evidence.outputs):
        if view.is_last or (is_complete[place] and first[place] < 0):
            continue  # logits also change when a model leaves a plateau
        own, steps = view.column("rms")
        is_known = is_complete[place]
        at = int(first[place] if is_known else _first_changes(own[:, None], persistence, factor, records)[0])
        if at >= 0 and _is_sudden(own[at - records : at + 1], beyond):
            ratio = np.median(own[at:]) / np.median(own[at - records : at])
            before, after = int(steps[at - 1]), int(steps[at])
            when = f"at step {after}" if after == before + 1 else f"between steps {before} and {after}"
            verdict = f"the rms of {site_title(*view.site)} changes {ratio:.3g}-fold {when}, and stays so"
            found = view.found(verdict, "rms", since=after)
            yield replace(found, numbers={"ratio": float(ratio), USUAL_UNTIL: float(before)})


def _is_sudden(values: Floats, beyond: float) -> bool:
    """Return True if the last change is larger than the changes before it."""
    steps = np.diff(np.log(values))
    if not np.isfinite(steps).all():  # one of the values is zero
        return True
    return bool(abs(steps[-1]) > np.abs(steps[:-1]).max() + np.log(beyond))


def _first_changes(values: Floats, persistence: int, factor: float, earlier: int) -> NDArray[np.int64]:
    """Return the first row of each column from which on all values are far from the earlier records; -1 for none."""
    rows = len(values) - persistence + 1 - earlier
    if rows < 1:
        return np.full(values.shape[1], -1)
    low, high = (each.reduce([values[at : at + rows] for at in range(earlier)]) for each in (np.minimum, np.maximum))
    least, most = (each.accumulate(values[::-1])[::-1][earlier:][:rows] for each in (np.minimum, np.maximum))
    changes = ((least > factor * high) & (high > 0)) | ((low > 0) & (most * factor < low))
    found: NDArray[np.int64] = np.where(changes.any(axis=0), changes.argmax(axis=0) + earlier, -1)
    return found


@rule(
    "stops-moving",
    statistic="update_ratio of weights at the same place of repeated blocks",
    usual="all equal weights move in every record",
    why="This weight was frozen, lost its gradient or its learning rate in the middle of the training.",
    next="Look at what changes at this step: callbacks, schedulers of its parameter group, conditions in the code.",
    false_alarms="Layers that are frozen one by one on purpose.",
    needs=("parameters",),
    records=7,
    explains={"unlike-siblings": ("same",)},
)
def stops_moving(
    evidence: Evidence, *, persistence: int = 4, before: int = 3, fewest: int = LIMITS.fewest
) -> Iterator[Finding]:
    """Yield one finding about weights that no longer change, while all corresponding weights still do."""
    table = evidence.parameters
    moves = np.nan_to_num(table.get("update_ratio")) > 0  # a frozen weight has no further records
    found: dict[Site, int] = {}
    for group in families_of(evidence, table, {each.site: 1.0 for each in evidence.weights}, fewest):
        members = moves[:, [table.places[site] for site in group]]
        for place, site in enumerate(group):
            own, equal_ones = members[:, place], np.delete(members, place, axis=1)
            number = int(own.sum())
            if before <= number <= len(own) - persistence and own[:number].all() and equal_ones[number:].all():
                found[site] = number
    if found:
        site = min(found, key=lambda each: (found[each], evidence.wiring.order.get(each.name, -1)))
        since = table.steps[found[site]]
        weight = View(evidence, table, site)
        verdict = f"{weight.name} does not move from step {since} on, but equal weights do{_why_stopped(weight)}"
        others = tuple(dict.fromkeys(each.name for each in found if each.name != site.name))
        yield weight.found(verdict, "update_ratio", since=since, others=others)


def _why_stopped(weight: View) -> str:
    rates, steps = weight.column("learning_rate")
    if not len(steps) or steps[-1] < weight.table.steps[-1]:
        return " (it is frozen since)"
    if rates[-1] == 0:
        return " (learning rate 0)"
    _, seen = weight.gradient.column("rms")
    return " (it has no gradient since)" if not len(seen) or seen[-1] < steps[-1] else ""


@rule(
    "block-trend",
    statistic="a statistic that grows or shrinks from each block to the next",
    usual="within a factor of 10 over all blocks",
    why="A wrong factor in a residual connection, or an initialization that does not keep the variance.",
    next="Look at the residual connections and at the scale of each branch.",
    false_alarms="Pre-norm transformers grow slowly, by less than 1.6 from each block to the next.",
    needs=(ANY_GROUP,),
    records=1,
    explains=dict.fromkeys(("unlike-siblings", "scale-jump", "exploding-gradient", "attention-collapse"), ("any",)),
)
def block_trend(
    evidence: Evidence, *, fewest: int = 4, total: float = 30.0, each: float = 1.6, jump: float = 0.5
) -> Iterator[Finding]:
    """Yield a list of blocks whose outputs, gradients or updates grow or shrink from each block to the next."""
    of_outputs, _, _, of_gradients, *_ = sibling_values(evidence)
    for table, statistic, words, values in (of_outputs, of_gradients):
        found: list[tuple[float, list[Site]]] = []
        for group in families_of(evidence, table, values, fewest):
            logs = np.log([values[site] if values[site] > 0 else np.nan for site in group])
            steps, change = np.diff(logs), abs(float(logs[-1] - logs[0]))
            is_jump = np.abs(steps).max() > jump * change  # most of the change is in one block
            is_steady = (steps > np.log(each)).all() or (steps < -np.log(each)).all()
            if not is_steady or is_jump or change <= np.log(total):
                continue
            # For gradients, the blocks must be a plain chain: in a U-Net, most of the gradient flows through the skip
            # connections.
            if table is evidence.activations or evidence.wiring.is_plain(blocks_of([site.name for site in group])):
                found.append((change, group))
        if found:
            _, group = max(found, key=lambda one: one[0])
            first, last = values[group[0]], values[group[-1]]
            verdict = (
                f"the {words} changes from block to block, from {first:.3g} in {group[0].name} to {last:.3g} in "
                f"{group[-1].name}"
            )
            *others, block = blocks_of([site.name for site in group])
            view = View(evidence, table, group[-1])
            trend = view.found(verdict, statistic, factor=last / first, first=first, last=last)
            trend = replace(trend, module=block, others=tuple(others))
            flat = _flat_function(evidence, group) if table is evidence.gradients and first < last else ""
            verdict = f"{verdict}, with a {flat} between all of them"
            yield replace(trend, verdict=verdict, why=_WHY_FLAT, next=_NEXT_FLAT) if flat else trend
            return


_WHY_FLAT = (
    "The derivative of a sigmoid is at most 1/4, and that of tanh at most 1, so that each of them makes the gradient "
    "smaller: the first layers hardly learn."
)
_NEXT_FLAT = "Use ReLU or GELU between the layers, or add normalizations or residual connections."


def _flat_function(evidence: Evidence, group: Sequence[Site]) -> str:
    """Return the saturating function between all modules of a chain; empty if there is none, or if it is a gate."""
    step = step_of(evidence)
    places = {node.name: node.id for node in evidence.graph.nodes if node.kind == "module"}
    begin, end = (places.get(site.name, -1) for site in (group[0], group[-1]))
    for name in ("sigmoid", "tanh"):
        found = [node for node in step.operations if begin < node.id and node.name == name]
        # A gate is multiplied with another tensor.
        found = [node for node in found if not any("mul" in user.name for user in step.readers(node))]
        if begin >= 0 and sum(node.id < end for node in found) >= len(group) - 1:
            return name
    return ""


@rule(
    UNLIKE,
    statistic="a statistic of one of several modules at the same place of repeated blocks, against the others; the "
    "parameters of the first record",
    usual="within a factor of 4 of the others",
    why="This block is initialized, loaded, wired or trained in another way than the others.",
    next="Compare the code and the state of this block with those of the others.",
    false_alarms="The first and the last block need three times as much, and biases and other vectors four times.",
    needs=(ANY_GROUP,),
    records=1,
    explains=dict.fromkeys(("unlike-siblings", "never-chosen"), ("any",)),
)
def unlike_siblings(
    evidence: Evidence,
    *,
    fewest: int = LIMITS.fewest,
    factor: float = LIMITS.factor,
    margin: float = LIMITS.margin,
    at_the_end: float = LIMITS.at_the_end,
    vector: float = LIMITS.vector,
    zero: float = LIMITS.zero,
) -> Iterator[Finding]:
    """Yield the layers whose statistics differ from those of the corresponding layers in other blocks."""
    limits = SiblingLimits(fewest, factor, margin, at_the_end, vector, zero)
    forward: dict[Site, list[Finding]] = {}
    backward: dict[Site, list[Finding]] = {}
    of_weights: dict[Site, list[Finding]] = {}
    for kind, table, statistic, words, site, value, others in all_outliers(evidence, limits):
        ratio, span = float(value / np.median(others)), f"{others.min():.3g} to {others.max():.3g}"
        name = f"{site.name}.{site.path}" if words.endswith("vector") else site.name
        at = ""
        if words in INITIAL:
            shown = initial_steps(evidence, table, site, limits)
            at = f" at step {shown[0]}"
        verdict = f"the {words} of {name} is {value:.3g}{at}, "
        if 0 < ratio < np.inf:
            verdict += f"{ratio:.3g} × the median of {len(others)} equal modules ({span})"
        else:
            verdict += f"and {span if ratio == 0 else 0} in {len(others)} equal modules"
        found = View(evidence, table, site).found(verdict, statistic, factor=ratio, value=value)
        if words in INITIAL:
            found = replace(found, first_step=shown[0], last_step=shown[-1], records=len(shown))
        other = of_weights if words == WEIGHT_GRADIENT else backward
        (forward if kind < FORWARD else other).setdefault(site, []).append(found)
    # Weight gradients follow from output gradients, so weight gradients count only if nothing else differs.
    backward = backward or ({} if forward else of_weights)
    order = evidence.wiring.order
    # Findings nearest to the cause come first. In the backward pass, this is the last module.
    first_last = sorted(forward.items(), key=lambda each: order.get(each[0].name, -1))
    last_first = sorted(backward.items(), key=lambda each: -order.get(each[0].name, -1))
    for _, several in (*first_last, *((site, found) for site, found in last_first if site not in forward)):
        yield max(several, key=lambda each: abs(np.log(each.numbers["factor"])))


@rule(
    "train-differs",
    statistic="rms of the output in training, against validation, at the first module where they part",
    usual="0.9 to 1.1 without dropout",
    why="BatchNorm whose running statistics do not follow, or validation data that are processed in another way.",
    next="Look at momentum and running statistics of the module, and at the transforms of both data sets.",
    false_alarms="Dropout, embeddings and losses; outputs that still grow; no record near the validation. It must be "
    "in two validations in a row, unless the validation loss is 1.5 times that of the training, or a layer that takes "
    "the input differs in the only one.",
    needs=("activations", VALIDATION),
    records=2,
)
def train_differs(
    evidence: Evidence,
    *,
    batchnorm: float = 1.3,
    factor: float = 2.0,
    steps: int = 40,
    gap: float = 0.25,
    worse: float = 1.5,
    before: float = 0.5,
) -> Iterator[Finding]:
    """Yield the first module whose outputs in validation differ in size from those in training."""
    train, validation = evidence.activations, evidence.validation
    if not len(train) or not len(validation) or validation.steps[-1] < steps:
        return
    limits = (batchnorm, factor, gap, before)
    found = _first_apart(evidence, validation.steps[-1], *limits)
    if found is None:
        return
    view, here, there = found
    # Running statistics lag early in a training, so the same output must differ in two validations.
    earlier = _first_apart(evidence, validation.steps[-2], *limits) if len(validation) > 1 else None
    # The input of the first layer does not depend on the training, so one validation is enough.
    is_input = len(validation) == 1 and evidence.wiring.inputs.get(view.module) == [INPUT]
    if (earlier is None or earlier[0] != view) and not is_input and not _is_worse(evidence, worse):
        return
    verdict = (
        f"the output of {view.module} has rms {here:.3g} in training and {there:.3g} in validation at step "
        f"{validation.steps[-1]}"
    )
    factor = here / there if there else np.inf
    # If a first layer works alike in training and evaluation mode, its inputs must differ.
    if evidence.wiring.inputs.get(view.module) == [INPUT] and view.kind.startswith(_WITHOUT_MODE):
        differs = view.found(f"{verdict}: its inputs differ", "rms", factor=factor, train=here, validation=there)
        yield replace(differs, why=_WHY_DATA, next=_NEXT_DATA)
    else:
        yield view.found(verdict, "rms", factor=factor, train=here, validation=there)


_WITHOUT_MODE = ("Linear", "Conv")
_WHY_DATA = (
    "The data of validation are processed in another way, such as without the normalization of those of training."
)
_NEXT_DATA = "Compare the transforms of both data sets, and the mean and the standard deviation of a batch of each."


def _first_apart(
    evidence: Evidence, step: int, batchnorm: float, factor: float, gap: float, before: float
) -> tuple[View, float, float] | None:
    """Return the first output whose size differs in a validation, with its rms in training and in validation."""
    pairs = {}
    for site in evidence.validation.places:
        view = View(evidence, evidence.activations, site)
        pair = _pair(view, step, gap) if view.path == "out" and not view.is_scalar else None  # a scalar is a loss
        if pair is not None:
            pairs[view.module] = view, *pair
    for view, here, there, apart in pairs.values():
        limit = np.log(batchnorm if "BatchNorm" in view.kind else factor)
        at_inputs = max((pairs[each.module][3] for each in view.inputs if each.module in pairs), default=0.0)
        is_first = at_inputs < min(np.log(batchnorm), before * apart)
        if apart > limit and is_first and "Dropout" not in view.kind and "Embedding" not in view.kind:
            return view, here, there
    return None


def _is_worse(evidence: Evidence, worse: float) -> bool:
    """Return True if the output of a loss module is larger in the last validation than in training."""
    train, validation = evidence.activations, evidence.validation
    for site in validation.places:
        if site in train.places and train.shapes[train.places[site]] == ():
            here, there = (table.column(site, "mean")[0][-1:] for table in (train, validation))
            if len(here) and len(there) and there[0] > worse * abs(here[0]) > 0:
                return True
    return False


def _pair(view: View, last: int, gap: float) -> tuple[float, float, float] | None:
    """Return the rms in training, the rms in validation, and the distance of their logarithms.

    The change between the two nearest records of training, extrapolated to the step of the validation, is subtracted
    from the distance. None if the training was not recorded near that step.
    """
    values, steps = view.column("rms")
    others, at = view.evidence.validation.column(view.site, "rms")
    near = np.argsort(np.abs(steps - last))[:2]
    others = others[at == last]
    if len(near) < 2 or not len(others) or not min(others[-1], *values[near]) > 0:
        return None
    distance = abs(int(steps[near[0]]) - last)
    if distance > gap * last:
        return None
    change = abs(float(np.log(values[near[0]] / values[near[1]])))
    drift = change * max(distance / abs(int(steps[near[0]] - steps[near[1]])), 1.0)
    here, there = float(values[near[0]]), float(others[-1])
    return here, there, abs(float(np.log(here / there))) - drift
