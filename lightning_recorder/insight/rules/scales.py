"""Rules about weights and inputs that are too large."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from lightning_recorder.insight.evidence import Evidence, View
from lightning_recorder.insight.finding import Finding
from lightning_recorder.insight.module_edges import INPUT
from lightning_recorder.insight.recorded_step import setting, step_of
from lightning_recorder.insight.rule import rule
from lightning_recorder.names import is_batch
from lightning_recorder.records.table import Floats

_EVERYTHING_AFTER = ("downstream", "same")
_LAYERS = ("linear", "conv1d", "conv2d", "conv3d")
_WHY_TINY = "The inputs are scaled twice, such as pixels that are divided by 255 again, or are in a large unit."
_NEXT_TINY = "Normalize the inputs to mean 0 and standard deviation 1, once."
_WHY_LIMITED = "max_norm scales down each row of the embedding whose norm is larger, at each call."
_NEXT_LIMITED = "Leave out max_norm, or pass a norm of about the square root of the features."
_WHY_MADE = "The step makes this input from integers and does not normalize it, such as time steps from 0 to 999."
_NEXT_MADE = "Divide it by its largest value, or pass its sines and cosines or an embedding of it."


_DEVIATION = re.compile(r"rho|sigma|std|var|log")


def _weight_gain(weight: View) -> float | None:
    """Return the factor by which a layer scales independent inputs: rms(weight) √inputs in the first record.

    An embedding counts as one input of 1. The factor is None if the module has no weight with a known shape.
    """
    values = weight.rms
    return float(values[0]) * _root_of_inputs(weight) if len(weight.shape) >= 2 and len(values) else None


def _root_of_inputs(weight: View) -> float:
    kind, shape = weight.kind, weight.shape
    if "Embedding" in kind:
        return 1.0
    if weight.path.endswith("kernel"):  # a kernel of Keras has the outputs last
        return float(np.sqrt(np.prod(shape[:-1])))
    # Conv1D of transformers and transposed convolutions have the inputs first.
    first = kind == "Conv1D" or "Transpose" in kind
    return float(np.sqrt(shape[0] if first else np.prod(shape[1:])))


@rule(
    "weights-too-large",
    statistic="rms(weight) × √(number of inputs) in the first record",
    usual="0.3 to 3",
    why="A wrong initialization: the variance of the weights does not match the number of inputs.",
    next="Compare with torch.nn.init.kaiming_normal_ or xavier_normal_; look for a factor or a custom init.",
    false_alarms="First layers that encode coordinates with many frequencies; they have few inputs. Logits, the "
    "outputs of modules that nothing follows, may be larger. The first record must be that of the first step.",
    needs=("parameters",),
    records=1,
    explains={
        "weights-too-large": ("any",),
        "first-loss": ("any",),
        "scale-jump": _EVERYTHING_AFTER,
        "saturation": _EVERYTHING_AFTER,
        "attention-collapse": _EVERYTHING_AFTER,
        "vanishing-gradient": ("any",),
        "gradient-step": ("any",),
        "exploding-gradient": ("any",),
        "block-trend": ("any",),
        "unlike-siblings": ("any",),
        "norm-ineffective": _EVERYTHING_AFTER,
        "dead-output": _EVERYTHING_AFTER,
        "weight-drift": ("any",),
        "barely-moves": ("any",),
        "learning-rate-outlier": ("any",),
    },
)
def weights_too_large(evidence: Evidence, *, most: float = 8.0, most_of_last: float = 16.0) -> Iterator[Finding]:
    """Yield the weights of new layers that are far larger than with usual initializations."""
    # If a loop steps only once in several batches, the first record of a weight may come after many steps, when the
    # weight is no longer new. Steps that a GradScaler skipped change no weight, so then every first record counts.
    begun = next(iter(evidence.activations.steps), math.inf)
    begun = math.inf if evidence.parameters.about.get("overflow_steps") else begun
    for each in evidence.weights:
        # Others may not be factors of a product, such as the deviations of random weights.
        is_multiplied = ("weight" in each.path or each.path.endswith("kernel")) and not _DEVIATION.search(each.path)
        gain = _weight_gain(each) if is_multiplied else None
        is_first = bool((each.column("rms")[1][:1] <= begun).all())
        if gain is not None and is_first and gain > (most_of_last if each.is_last else most):
            verdict = f"{each.name} is too large for its number of inputs: it scales its input about {gain:.3g}-fold"
            yield each.found(verdict, "rms", gain=gain)


@rule(
    "norm-growth",
    "note",
    statistic="rms of outputs, such as logits and the residual stream, and rms(weight) × √(number of inputs), in "
    "thirds of the run",
    usual="grows at first, then slower",
    why="Nothing limits the scale: a direction that the loss does not see, blocks that add to a stream without a "
    "normalization, or weights before a normalization without weight decay.",
    next="Low precision rounds large values, and weights that grow learn slower. Look for a missing normalization, and "
    "consider weight decay, or a z-loss for logits.",
    false_alarms="Predictions that approach large targets. Runs of less than 1,000 steps do not count, nor does growth "
    "that slows down.",
    needs=("activations",),
    records=9,
)
def norm_growth(
    evidence: Evidence,
    *,
    records: int = 9,
    span: int = 1000,
    growth: float = 1.5,
    whole: float = 2.5,
    steady: float = 0.85,
    large: float = 10.0,
    gain: float = 4.0,
) -> Iterator[Finding]:
    """Yield the outputs and weights that become large and still grow at the end of the run."""
    outputs = [(each, 1.0 / large) for each in evidence.outputs if each.path.startswith("out")]
    if not outputs:
        return  # without outputs, the report lists this rule as not run
    weights = [(each, _root_of_inputs(each) / gain) for each in evidence.weights if len(each.shape) >= 2]
    for views in (outputs, weights):
        found = []
        for view, scale in views:
            values, steps = view.column("rms")
            if len(values) < records or steps[-1] - steps[0] < span:
                continue
            third = len(values) // 3
            first, before, last = (float(np.median(each)) for each in np.split(values, (third, len(values) - third)))
            is_large = last * scale >= 1 and last >= max(growth * before, whole * first)
            if is_large and last - before >= steady * (before - first) and values[-1] >= last:
                rate = 1000 * (last - before) / float(np.median(steps[-third:]) - np.median(steps[third:-third]))
                found.append((last / max(first, np.finfo(float).tiny), rate, last, view))
        if found:
            _, rate, last, view = max(found, key=lambda each: each[0])
            name = view.name if views is weights else f"the output of {view.module}"
            others = tuple(dict.fromkeys(each[-1].module for each in found if each[-1].module != view.module))
            verdict = (
                f"{name} grows by {rate:.3g} in 1,000 steps and does not slow down: its rms in the last third of the "
                f"run is {last:.3g}"
            )
            yield view.found(verdict, "rms", others=others, rate=rate, rms=last)


@rule(
    "input-scale",
    statistic="√(rms(output)² - rms(bias)²) / (rms(weight) √inputs) of a first layer, about the rms of its input",
    usual="0.2 to 3, as of normalized data",
    why="The inputs are not normalized, for example images from 0 to 255.",
    next="Normalize the inputs to mean 0 and standard deviation 1, and check the scale of each feature.",
    false_alarms="Embeddings are left out, but for those that max_norm keeps tiny without a normalization after "
    "them. Inputs that the step makes from integers must be large in the first "
    "record, too.",
    needs=("activations",),
    records=1,
    explains=dict.fromkeys(
        (
            "input-scale",
            "first-loss",
            "scale-jump",
            "saturation",
            "unlike-siblings",
            "exploding-gradient",
            "vanishing-gradient",
            "gradient-spike",
            "gradient-step",
            "dead-output",
            "sudden-change",
            "barely-moves",
            "norm-ineffective",
            "weight-drift",
            "one-class-predicted",
            "collapsed-embedding",
            "train-differs",
        ),
        ("any",),
    ),
)
def input_scale(
    evidence: Evidence, *, most: float = 20.0, least: float = 0.01, records: int = 4, sparse: float = 0.9
) -> Iterator[Finding]:
    """Yield the model inputs with an unusual scale."""
    table, wiring = evidence.activations, evidence.wiring
    yield from _tiny_inputs(evidence, least, records, sparse)
    yield from _tiny_images(evidence, least, records, sparse)
    yield from _tiny_embeddings(evidence, least, records)
    middle = evidence.medians(table, "rms")
    for site, rms in middle.items():
        feeds = wiring.inputs.get(site.name)
        is_made = feeds == [] and _is_index(evidence, site.name)
        if feeds != [INPUT] and not is_made and not (not wiring.has_graph and table.places[site] == 0):
            continue
        recorded = [each for each in evidence.inputs_of(site.name) if "float" in each.dtype]
        found = list(_large_inputs(evidence, recorded, most))
        scales = (
            None if recorded or "Embedding" in evidence.type_of(site.name) else _input_rms(View(evidence, table, site))
        )
        # A layer may learn to enlarge a constant, such as learned queries. So for an input that is made in the model,
        # the first estimate must be too large as well.
        scale = 0.0 if scales is None else min(np.median(scales), scales[0] if is_made else np.inf)
        if scale > most:
            verdict = f"the input of {site.name} has rms {scale:.3g}, estimated from its output and weights"
            found.append(View(evidence, table, site).found(verdict, "rms", input_rms=scale, rms=rms))
        for each in found:
            yield replace(each, why=_WHY_MADE, next=_NEXT_MADE) if is_made else each
    yield from _large_batches(evidence, most)


def _large_batches(evidence: Evidence, most: float) -> Iterator[Finding]:
    """Yield large batch tensors that feed a layer, if the layer's input cannot be estimated from its output."""
    step = step_of(evidence)
    for node in step.operations:
        sources = [step.made_by(each) for each in step.sources(node)[:1]] if node.name in _LAYERS else []
        owner = step.owner(node)
        is_estimated = evidence.output(owner) and _weight_gain(evidence.parameter(owner, "weight")) is not None
        if not sources or sources[0].kind != "input" or is_estimated:
            continue
        batch = evidence.view(evidence.losses, "", sources[0].name)
        if "float" in batch.dtype and len(batch.rms) and np.median(batch.rms) > most:
            scale = float(np.median(batch.rms))
            verdict = f"{sources[0].name}, the input of {owner}, has rms {scale:.3g}"
            yield batch.found(verdict, "rms", input_rms=scale)
            return


def _is_index(evidence: Evidence, name: str) -> bool:
    """Return True if integers that are not in the batch, such as time steps, are the input of a layer with a weight."""
    graph = evidence.wiring.graph
    if graph is None or _weight_gain(evidence.parameter(name, "weight")) is None:
        return False
    calls = {node.id for node in graph.nodes if node.kind == "module" and node.name == name}
    todo = [node for node in graph.nodes if node.id in calls or node.parent in calls]
    seen = {node.id for node in todo}
    for node in todo:
        before = [graph[edge.source] for edge in graph.into(node) if edge.source not in seen]
        if any("int" in meta.dtype for each in before for meta in each.outputs):
            return True
        seen |= {each.id for each in before}
        todo += before
    return False


def _tiny_inputs(evidence: Evidence, least: float, records: int, sparse: float) -> Iterator[Finding]:
    """Yield the first layers if the inputs of all of them, and the tensors of the batch, are tiny.

    The weight gradient is a sum of gradients times inputs, and the bias gradient is the sum of the same gradients.
    Their ratio gives the scale of the inputs.
    """
    batch = [View(evidence, evidence.losses, site) for site in evidence.losses.places if is_batch(*site)]
    # Tensors without a usable record, as after a non-finite first step, are left out.
    given = [each for each in batch if "float" in each.dtype and len(each.rms)]
    # Sparse inputs are left out: bags of words have a small rms because most of their values are zero.
    if any(each.rms.max(initial=0) >= least or np.median(each.zero_fraction) > sparse for each in given):
        return
    found = []
    for weight in evidence.weights:
        bias = evidence.parameter(weight.module, "bias")
        if weight.path != "weight" or evidence.wiring.inputs.get(weight.module) != [INPUT] or not bias.gradient:
            continue
        gradient, of_bias = weight.gradient, bias.gradient.rms
        if len(gradient.rms) != len(of_bias) or len(of_bias) < records or not of_bias.all():
            return
        ratio = gradient.rms / of_bias
        # Sparse rows of zeros and ones have a small rms, too, so sparse gradients are left out.
        if not 0 < ratio.max() < least or np.median(gradient.zero_fraction) > sparse:
            return
        size = float(np.median(ratio))
        verdict = (
            f"the input of {weight.module} is tiny, about {size:.2g}: the gradient of its weight is {size:.2g} × that "
            "of its bias"
        )
        tiny = gradient.found(verdict, "rms", input_rms=size)
        found.append(replace(tiny, path="", why=_WHY_TINY, next=_NEXT_TINY))
    yield from found[:1]


def _tiny_images(evidence: Evidence, least: float, records: int, sparse: float) -> Iterator[Finding]:
    """Yield the tiny batch images that feed a convolution, if no normalization enlarges its output.

    The ratio of weight and bias gradient does not give the scale of the input here: both gradients are sums over all
    positions, in which terms cancel to different degrees.
    """
    step = step_of(evidence)
    for node in step.operations:
        source = step.behind(node) if node.name == "conv2d" else None
        if source is None or source.kind != "input" or any("norm" in each.name for each in step.readers(node)):
            continue
        batch = evidence.view(evidence.losses, "", source.name)
        is_tiny = len(batch.rms) >= records and 0 < batch.rms.max() < least
        if "float" in batch.dtype and is_tiny and np.median(batch.zero_fraction) <= sparse:
            size = float(np.median(batch.rms))
            verdict = f"{source.name}, the input of {step.owner(node)}, has rms {size:.2g}"
            yield replace(batch.found(verdict, "rms", input_rms=size), why=_WHY_TINY, next=_NEXT_TINY)
            return


def _tiny_embeddings(evidence: Evidence, least: float, records: int) -> Iterator[Finding]:
    """Yield the embeddings that are kept tiny by ``max_norm``, if no normalization enlarges them."""
    step = step_of(evidence)
    for node in step.operations:
        limit = setting(node, "max_norm") if node.name == "embedding" else ""
        if limit in ("", "None") or any(each.name.endswith("_norm") for each in step.readers(node)):
            continue
        view = evidence.output(step.owner(node))
        if len(view.rms) >= records and view.rms[-records:].max() < least:
            verdict = f"the output of {view.module} has rms {view.rms[-1]:.2g}: its max_norm is {limit}"
            found = view.found(verdict, "rms", rms=view.rms[-1])
            yield replace(found, path="", why=_WHY_LIMITED, next=_NEXT_LIMITED)


def _large_inputs(evidence: Evidence, inputs: list[View], most: float) -> Iterator[Finding]:
    """Yield the recorded module inputs that are too large."""
    rms = evidence.medians(evidence.inputs, "rms") if inputs else {}
    for each in inputs:
        if (size := rms[each.site]) > most:
            verdict = f"the input {each.path} of {each.module or '(root)'} has rms {size:.3g}"
            yield each.found(verdict, "rms", input_rms=size)


def _input_rms(output: View) -> Floats | None:
    """Estimate the rms of the input of a layer in each record: √(rms(output)² - rms(bias)²) / (rms(weight) √inputs)."""
    weight, bias = (output.evidence.parameter(output.module, path) for path in ("weight", "bias"))
    gain = _weight_gain(weight)
    if not gain:
        return None
    sizes, steps = weight.column("rms")
    offsets, at = bias.column("rms") if bias else (np.zeros(len(steps)), steps)
    outputs, seen = output.column("rms")
    common = np.intersect1d(np.intersect1d(steps, at), seen)
    sizes, offsets, outputs = (
        values[np.isin(where, common)] for values, where in ((sizes, steps), (offsets, at), (outputs, seen))
    )
    if not len(common) or not (sizes > 0).all():
        return None
    inputs: Floats = np.sqrt(np.maximum(outputs**2 - offsets**2, 0)) / (sizes * gain / sizes[0])
    return inputs
