"""Rules about normalization layers: running statistics that lag behind, and layers that do not normalize."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.graph.model import Node
from lightning_recorder.insight.evidence import Evidence, View
from lightning_recorder.insight.finding import Finding
from lightning_recorder.insight.module_edges import INPUT
from lightning_recorder.insight.recorded_step import (
    RecordedStep,
    found_in,
    joined,
    listed,
    setting,
    shape_of,
    step_of,
)
from lightning_recorder.insight.rule import GRAPH, rule
from lightning_recorder.names import RUNNING_STATISTICS, Site
from lightning_recorder.records.history import History
from lightning_recorder.records.table import Floats

_NORMS = re.compile(r"BatchNorm\dd|GroupNorm|InstanceNorm\dd|LayerNorm|RMSNorm|SyncBatchNorm")


@rule(
    "norm-ineffective",
    statistic="rms of the output of a normalization, against that of its weight and bias: √(rms(w)² + rms(b)²)",
    usual="0.9 to 1.1",
    why="The normalization uses fixed statistics (a BatchNorm in eval mode), or its eps exceeds the variance.",
    next="Check that the module is in train mode, its eps, and the scale of its input.",
    false_alarms="A LayerNorm may weaken features with a large variance, so that only its range is compared. "
    "Weights near 0 may be offsets from 1. Rows of zeros, such as the embedding of padding, stay zero, so they do not "
    "count. A weight that begins at zero must still be zero in the latest records.",
    needs=("activations", "parameters"),
    records=2,
    explains={
        "norm-ineffective": ("any",),
        "unlike-siblings": ("any",),
        "scale-jump": ("downstream", "same"),
        "train-differs": ("downstream", "same"),
    },
)
def norm_ineffective(evidence: Evidence, *, persistence: int = 2, ratio: float = 1.5) -> Iterator[Finding]:
    """Yield the normalization layers whose output scale does not agree with their weight."""
    for view in evidence.outputs:
        weight = evidence.parameter(view.module, "weight")
        if not _NORMS.fullmatch(view.kind) or view.path != "out":
            continue
        if _is_bias_alone(view, persistence):
            verdict = f"{view.module} returns its bias alone: both have the same mean, min and max"
            is_zero = len(weight.rms) >= persistence and not weight.rms[-persistence:].any()
            verdict += "; its weight is zero" if is_zero else ""
            why = _WHY_ZERO if is_zero else _WHY_BIAS
            yield replace(view.found(verdict, "rms", rms=view.rms[-1]), why=why, next=_NEXT_ZERO)
            continue
        if not weight:
            continue
        low, high, steps = _expected_rms(view)
        values, at = view.column("rms")
        common, here, there = np.intersect1d(at, steps, return_indices=True)
        if len(common) < persistence:
            continue
        values, low, high = (each[: len(common)] for each in (values[here], low[there], high[there]))
        # A weight nearer to 0 than to 1 may be an offset from 1, as in Gemma and xLSTM: the layer multiplies by
        # 1 + weight.
        is_offset = (high < 0.5) & (values < ratio * (1 + high)) & (values * ratio > 1 - high)
        if ((values > ratio * high) | (values * ratio < low))[-persistence:].all() and not is_offset[
            -persistence:
        ].all():
            span = f"{low[-1]:.3g}" if low[-1] == high[-1] else f"{low[-1]:.3g} to {high[-1]:.3g}"
            verdict = f"{view.module} does not normalize: its output has rms {values[-1]:.3g}, normal is {span}"
            bound = high[-1] if values[-1] > high[-1] else low[-1]
            factor = values[-1] / bound if bound else np.inf
            yield view.found(verdict, "rms", factor=factor, rms=values[-1], low=low[-1], high=high[-1])


_WHY_ZERO = "The weight of the normalization is zero, so that nothing after it depends on its input."
_WHY_BIAS = "The weight of the normalization is zero, or the values that it normalizes together are all equal."
_NEXT_ZERO = "Look at the initialization of the weight, and at what sets or freezes it."


def _is_bias_alone(output: View, persistence: int) -> bool:
    """Return True if a normalization returns its bias, which is not zero, in each of the last records."""
    bias = output.evidence.parameter(output.module, "bias")
    if not bias:
        return False
    (mean, least, most), at = output.columns("mean", "min", "max")
    (of_mean, of_least, of_most), steps = bias.columns("mean", "min", "max")
    _, here, there = np.intersect1d(at, steps, return_indices=True)
    here, there = here[-persistence:], there[-persistence:]
    if len(here) < persistence or not (of_most[there] > of_least[there]).all():
        return False
    # The means are sums over different numbers of values, so they differ by rounding.
    is_mean = np.abs(mean[here] - of_mean[there]) <= 1e-3 * (of_most[there] - of_least[there])
    return bool(((least[here] == of_least[there]) & (most[here] == of_most[there]) & is_mean).all())


def _expected_rms(output: View) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """Return the smallest and the largest rms that the weight and the bias of a normalization allow, and the steps.

    A BatchNorm normalizes each channel, so the rms is known. A LayerNorm normalizes all features together, so features
    with a small weight may have nearly all of the variance.
    """
    weight, bias = (output.evidence.parameter(output.module, path) for path in ("weight", "bias"))
    is_per_sample = "LayerNorm" in output.kind or "RMSNorm" in output.kind
    ends = ("min", "max") if is_per_sample else ("rms", "rms")
    (low, high), steps = weight.columns(*ends)
    offset = bias.rms
    if len(offset) != len(low):
        offset = np.full(len(low), offset.max(initial=0.0))
    if is_per_sample:
        feeds = [output.evidence.output(each) for each in output.evidence.wiring.inputs.get(output.module, ())]
        zeros = max((float(np.median(each.zero_fraction)) for each in feeds if len(each.zero_fraction)), default=0.0)
        return (
            max(0.0, 1 - zeros) ** 0.5 * np.maximum(low, 0) - offset,
            np.maximum(np.abs(low), np.abs(high)) + offset,
            steps,
        )
    expected = np.sqrt(low**2 + offset**2)
    return expected, expected, steps


@rule(
    "running-statistics",
    statistic="root of the mean square of the inputs that the running statistics of a BatchNorm stand for",
    usual="within a factor of 1.5",
    why="A momentum that is too small, or a BatchNorm whose statistics are not updated at all.",
    next="Look at momentum and track_running_stats of the module; validation uses these statistics.",
    false_alarms="The statistics begin at 0 and 1 and follow: the distance must not shrink.",
    needs=("activations", "parameters"),
    records=3,
    explains={"train-differs": ("any",)},
)
def running_statistics(
    evidence: Evidence, *, persistence: int = 3, factor: float = 4.0, stays: float = 0.8, first_step: int = 50
) -> Iterator[Finding]:
    """Yield layers whose running statistics never change or disagree with the mean and std of their inputs."""
    unchanged = _unchanged(evidence, persistence, first_step)
    for site in evidence.parameters.places:
        if site in unchanged:
            moving = f"do not change, but those of {unchanged[site]} others do"
            verdict = f"the running statistics of {site.name} {moving}"
            yield View(evidence, evidence.parameters, site).found(verdict, "mean")
            continue
        feeds = evidence.wiring.inputs.get(site.name, []) if site.path == "running_var" else []
        calls = evidence.wiring.calls_of
        # If the feeding layer is called more often than the norm, its record also contains outputs that are no inputs
        # of the norm, so they cannot be compared.
        if len(feeds) != 1 or feeds[0] == INPUT or len(calls.get(feeds[0], ())) > max(len(calls.get(site.name, ())), 1):
            continue
        steps, distances = _distances(evidence, site.name, evidence.output(feeds[0]))
        if len(steps) < 2 * persistence or steps[-1] < first_step:
            continue
        # Running means begin at 0 and variances at 1, so in a healthy run the distance shrinks at first.
        first, last = distances[0], distances[-persistence:]
        if last.min() > np.log(factor) and last[-1] > stays * first:
            verdict = (
                f"the running statistics of {site.name} are not those of its inputs: they differ "
                f"{np.exp(last[-1]):.3g}-fold"
            )
            yield View(evidence, evidence.parameters, site).found(verdict, "mean", factor=np.exp(last[-1]))


def _unchanged(evidence: Evidence, persistence: int, first_step: int) -> dict[Site, int]:
    """Return the sites of running variances that never change in train mode, each with the number that do change."""
    table = evidence.parameters
    if len(table) < persistence or table.steps[-1] < first_step:
        return {}
    mean, variance = RUNNING_STATISTICS
    sites = [site for site in table.places if site.path == variance and Site(site.name, mean) in table.places]
    same = {site for site in sites if _is_constant(table, site.name)}
    # In eval mode, running statistics are not updated.
    away = {each.module for each in evidence.outputs if len(each.eval_mode)}
    called = {each.module for each in evidence.outputs if len(each.rms) >= persistence} - away
    return {site: len(sites) - len(same) for site in same if len(same) < len(sites) and site.name in called}


def _is_constant(table: History, name: str) -> bool:
    """Return True if the running statistics of a module are known and equal in all records."""
    columns = [table.column(Site(name, path), "mean")[0] for path in RUNNING_STATISTICS]
    return all(len(each) == len(table) and np.ptp(each) == 0 for each in columns)


def _distances(evidence: Evidence, name: str, feed: View) -> tuple[list[int], Floats]:
    """Return the steps, and the log distance between the rms from the running statistics and the rms of the inputs."""
    mean, variance = (evidence.parameter(name, path) for path in RUNNING_STATISTICS)
    columns = [mean.column("rms"), variance.column("mean"), feed.column("rms")]
    steps = sorted(set.intersection(*(set(at.tolist()) for _, at in columns)))
    mean_rms, variances, rms = (values[np.isin(at, steps)] for values, at in columns)
    known = np.sqrt(mean_rms**2 + variances)
    is_positive = bool((rms > 0).all() and (known > 0).all())
    return (steps, np.abs(np.log(known / rms))) if is_positive else ([], rms)


@rule(
    "norm-momentum",
    statistic="argument momentum of batch_norm in the recorded graph, and the running statistics of its first record",
    usual="0.01 to 0.1",
    why="The momentum of torch is the share of the new batch. Other libraries name the share that is kept: their 0.99 "
    "is 0.01 here.",
    next="Set momentum to 0.1, or to 0.01 for small batches and long runs.",
    false_alarms="A momentum of 1, which some methods ask for, statistics of a pretrained model, and layers in eval "
    "mode are left out.",
    needs=("parameters", GRAPH),
    records=3,
    explains=dict.fromkeys(("running-statistics", "train-differs"), ("any",)),
)
def norm_momentum(
    evidence: Evidence, *, new: float = 0.9, small: float = 1e-3, share: float = 0.5, first_step: int = 50
) -> Iterator[Finding]:
    """Yield the layers whose running statistics are nearly those of the last batch, or nearly the initial ones."""
    step = step_of(evidence)
    found = []
    for node in step.operations:
        text = setting(node, "momentum") if setting(node, "training") == "True" else ""
        if node.name != "batch_norm" or not text or text == "None":
            continue
        name, momentum = step.owner(node), float(text)
        mean, variance = (evidence.parameter(name, path) for path in RUNNING_STATISTICS)
        (middle, spread), steps = variance.columns("mean", "std")
        if not len(steps) or steps[-1] < first_step:
            continue
        kept = float((1 - momentum) ** (steps[-1] + 1))
        # New running means are 0 and variances 1, unlike those of a pretrained model.
        is_new = abs(middle[0] - 1) < share and spread[0] < share
        if new <= momentum < 1:
            verdict = f"the running statistics of {name} consist to {momentum:.0%} of the last batch"
            found.append(mean.found(f"{verdict}: momentum is {momentum:.3g}", "rms", momentum=momentum))
        elif momentum < small and kept > share and is_new:
            verdict = f"after {int(steps[-1]) + 1} steps, the running statistics of {name} are to {kept:.0%} still the "
            found.append(mean.found(f"{verdict}ones that it began with: momentum is {momentum:.3g}", "rms", kept=kept))
    yield from joined(found)


@rule(
    "norm-of-two",
    statistic="number of values that each channel of a batch_norm in training mode has, and each group of a group_norm "
    "or layer_norm, in the recorded graph",
    usual="at least 16",
    why="A BatchNorm over two values returns 1 and -1, whatever they are: only their order is left of the input.",
    next="Use larger batches, or replace BatchNorm by GroupNorm or LayerNorm.",
    false_alarms="Models in which some BatchNorms have more values, such as those before a pooling, are left out.",
    needs=(GRAPH,),
    explains=dict.fromkeys(
        ("train-differs", "running-statistics", "dead-output", "barely-moves", "collapsed-embedding"), ("any",)
    ),
    is_lasting=True,
)
def norm_of_two(evidence: Evidence) -> Iterator[Finding]:
    """Yield the layers that normalize over one value, or over two values if all normalization layers do."""
    step = step_of(evidence)
    single = [each for each in step.operations if _values_of(each) == 1]
    if single:
        names = list(dict.fromkeys(step.owner(each) for each in single))
        verdict = (
            f"{names[0]} normalizes each value {listed(shape_of(single[0]) or ())} by itself: its output is its bias"
        )
        found = replace(found_in(evidence, names[0], verdict), others=tuple(names[1:]))
        yield replace(found, why=_WHY_ONE, next=_NEXT_ONE)
    norms = [each for each in step.operations if each.name == "batch_norm" and setting(each, "training") == "True"]
    shapes = [shape for each in norms if (shape := shape_of(each)) and len(shape) > 1]
    if shapes and all(prod(shape) == 2 * shape[1] for shape in shapes):
        names = list(dict.fromkeys(step.owner(each) for each in norms))
        verdict = f"{names[0]} normalizes over {prod(shapes[0]) // shapes[0][1]} values of each channel"
        yield replace(
            found_in(evidence, names[0], f"{verdict}, so that normalized ones are 1 or -1"), others=tuple(names[1:])
        )


_WHY_ONE = "A value minus its own mean is zero, so that nothing of the input is left."
_NEXT_ONE = "Use fewer groups, a LayerNorm over the features, or no normalization where one pixel is left."


def _values_of(node: Node) -> int:
    """Return the number of values that a group_norm or layer_norm normalizes together; 0 if it is unknown."""
    shape = shape_of(node) or ()
    if node.name == "group_norm" and len(shape) > 1 and (groups := setting(node, "num_groups")).isdigit():
        return prod(shape[1:]) // int(groups)
    sizes = re.fullmatch(r"[(\[](\d+),?[)\]]", setting(node, "normalized_shape")) if node.name == "layer_norm" else None
    return int(sizes[1]) if sizes else 0


@rule(
    "shared-norm",
    statistic="calls of a BatchNorm in a step, one after the other, and the layers between them",
    usual="one BatchNorm for each layer",
    why="Each call normalizes with the statistics of its own input, but the running statistics, which are used in "
    "evaluation, are a mixture of all of them, and no layer fits it.",
    next="Make a BatchNorm for each layer in __init__.",
    false_alarms="Calls that do not feed each other, as in Siamese networks, and recurrences, which call the layers "
    "between them or directly before them several times, too, are left out.",
    needs=(GRAPH,),
    explains=dict.fromkeys(("train-differs", "running-statistics", "norm-momentum"), ("any",)),
    is_lasting=True,
)
def shared_norm(evidence: Evidence) -> Iterator[Finding]:
    """Yield each BatchNorm with running statistics that normalizes the outputs of several different layers in turn."""
    step = step_of(evidence)
    calls: dict[int, list[Node]] = {}
    for node in step.operations:
        means = [each.id for each in step.sources(node) if each.kind == "buffer" and each.name.endswith("running_mean")]
        if node.name == "batch_norm" and means and setting(node, "training") == "True":
            calls.setdefault(means[0], []).append(node)
    for nodes in calls.values():
        first, *later = nodes
        before = {each.id for each in step.sources(first)} | step.ancestors(first)
        between = [step.ancestors(each) - before for each in later if first.id in step.ancestors(each)]
        layers = {each for ids in between for each in ids if step.graph[each].kind == "parameter"}
        layers = layers and layers.union(*(_parameters_before(step, each) for each in nodes))
        if layers and all(len(step.users(step.graph[each])) == 1 for each in layers):
            befores = dict.fromkeys(step.owner(step.made_by(step.sources(each)[0])) for each in nodes)
            verdict = (
                f"{step.owner(first)} is called {len(nodes)} times in a step, behind {', '.join(befores)}: its running "
                "statistics are a mixture of theirs"
            )
            yield found_in(evidence, step.owner(first), verdict, calls=len(nodes))


def _parameters_before(step: RecordedStep, node: Node) -> set[int]:
    """Return the ids of the parameters of the layer whose output reaches a node first."""
    source = step.behind(node)
    while source is not None:
        if found := {each.id for each in step.sources(source) if each.kind == "parameter"}:
            return found
        source = step.behind(source)
    return set()


@rule(
    "zero-norm",
    statistic="rms of the weight and the bias of a normalization in the first record",
    usual="a weight that begins at 1",
    why="The output of a normalization is its weight times the normalized input. Zeros let nothing pass.",
    next="Initialize the weight of the normalization with ones.",
    false_alarms="Normalizations that end a residual branch: only those whose output goes into layers alone count. "
    "Weights that are offsets from 1 are left out.",
    needs=("parameters", GRAPH),
    records=1,
    explains=dict.fromkeys(
        ("dead-heads", "constant-weight", "collapsed-embedding", "gradient-stops", "dead-output", "gradient-step"),
        ("any",),
    ),
)
def zero_norm(evidence: Evidence, *, least: float = 0.05, fewest: int = 4) -> Iterator[Finding]:
    """Yield the normalization layers whose first output is nearly zero and is used only by linear or conv layers."""
    step = step_of(evidence)
    norms = {step.owner(node): node for node in step.operations if node.name.endswith("_norm")}
    found = []
    for each in evidence.tensors:
        node, bias = norms.get(each.module), evidence.parameter(each.module, "bias").rms
        if each.path != "weight" or node is None or len(each.shape) != 1 or each.numel < fewest or not len(each.rms):
            continue
        readers = [user.name for user in step.readers(node)]
        are_layers = bool(readers) and all(name == "linear" or name.startswith("conv") for name in readers)
        is_offset = any(source.kind == "op" for source in step.sources(node)[1:])  # such as 1 + weight
        if are_layers and not is_offset and each.rms[0] < least and bias[:1].max(initial=0.0) < least:
            verdict = (
                f"{each.name} begins at zero (rms {each.rms[0]:.2g} in the first record), so that the layers behind it "
                "get hardly anything"
            )
            found.append(each.found(verdict, "rms", rms=float(each.rms[0])))
    yield from joined(found)
