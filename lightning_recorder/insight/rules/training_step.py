"""Rules about the training step: its batches, its losses and its gradients."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from lightning_recorder.graph.model import Graph, Node
from lightning_recorder.insight.evidence import Evidence, View, gradient_norms
from lightning_recorder.insight.finding import Finding
from lightning_recorder.insight.module_edges import INPUT
from lightning_recorder.insight.recorded_step import found_in, listed, shape_of, step_of
from lightning_recorder.insight.rule import GRAPH, rule
from lightning_recorder.insight.rules.gradients import pairs_of_heads
from lightning_recorder.records.table import Floats

# The activations that must not come before a loss, and the reason.
_EXPECTED = {
    "cross_entropy": (("softmax",), "applies a softmax itself, so it is applied twice"),
    "binary_cross_entropy_with_logits": (("sigmoid",), "applies a sigmoid itself, so it is applied twice"),
    "nll_loss": (("softmax",), "expects logarithms, as log_softmax returns them"),
    "kl_div": (("softmax",), "expects logarithms, as log_softmax returns them"),
    "poisson_nll_loss": (("exp", "softplus"), "expects logarithms unless log_input=False, and applies exp itself"),
    "log_softmax": (("softmax",), "applies a softmax itself, so it is applied twice"),
    "softmax": (("softmax",), "applies a softmax again"),
}
# Functions that change only the shape or the dtype.
_SAME_VALUES = re.compile(
    "view|reshape|(un)?flatten|transpose|permute|movedim|(un)?squeeze|getitem|contiguous|clone|float|double|half|to|"
    "type|m?t|chunk|split|unbind|index_select",
    re.IGNORECASE,
)
_ADDS_BIAS = ("Linear", "Conv", "Norm")  # parts of the class names of modules that add a bias last


@rule(
    "double-activation",
    statistic="the op that made the input of a loss or of the logits of a distribution, in the recorded graph",
    usual="the loss gets logits, or nll_loss gets the output of log_softmax",
    why="The model ends with an activation that the loss function contains.",
    next="Remove the softmax or sigmoid from the model, and apply it outside of training.",
    false_alarms="None known.",
    needs=(GRAPH,),
    explains={
        "attention-collapse": ("same",),
        "saturation": ("same",),
        "vanishing-gradient": ("any",),
        "barely-moves": ("any",),
        "gradient-spike": ("any",),
    },
)
def double_activation(evidence: Evidence) -> Iterator[Finding]:
    """Yield the activations before a loss that applies the same activation."""
    graph = evidence.graph
    seen: set[tuple[str, str]] = set()
    for node in graph.nodes:
        name = "log_softmax" if _is_log_softmax(graph, node) else node.name
        if node.kind != "op" or name not in _EXPECTED:
            continue
        activations, text = _EXPECTED[name]
        source = _input_values(graph, node)
        if source is None or source.name not in activations or dict(node.arguments).get("log_input") == "False":
            continue
        owner = "" if source.parent is None else graph[source.parent].name
        # An activation module may have several calls, each with its own code line, but gets one finding.
        is_module = evidence.type_of(owner).lower() == source.name
        if (key := (owner, "" if is_module else source.source)) in seen:
            continue
        seen.add(key)
        place = f"{owner or 'training_step'} (line {source.source})" if source.source else owner or "training_step"
        what = node.name if name == node.name else "x - logsumexp(x), as in Categorical(logits=x),"
        verdict = f"{what} gets the output of the {source.name} in {place}: it {text}"
        yield evidence.view(evidence.activations, owner).found(verdict)


def _is_log_softmax(graph: Graph, node: Node) -> bool:
    """Return True for a tensor minus its logsumexp."""
    edges = graph.into(node) if node.name in ("sub", "__sub__") else ()
    if len(edges) != 2:
        return False
    whole = graph[edges[1].source]
    return whole.name == "logsumexp" and [each.source for each in graph.into(whole)] == [edges[0].source]


def _input_values(graph: Graph, node: Node) -> Node | None:
    """Return the op that computed the values of a node's first input, skipping changes of shape and dtype."""
    source: Node | None = node
    while source is not None:
        edges = graph.into(source)
        source = graph[edges[0].source] if edges else None
        if source is None or source.kind != "op" or _SAME_VALUES.fullmatch(source.name) is None:
            return source
    return None


@rule(
    "constant-input",
    statistic="gradient of the weight of each first layer, against that of its bias; rows of an embedding in use",
    usual="the ratio differs from record to record by more than 1 %",
    why="The dataset returns the same sample again and again, or a transform or a mask replaces its values.",
    next="Look at some batches: print their mean and standard deviation over the samples.",
    false_alarms="Models of a learned constant, such as a fixed noise vector. One varying input is enough.",
    needs=("parameters", GRAPH),
    records=4,
    explains=dict.fromkeys(
        (
            "norm-ineffective",
            "exploding-gradient",
            "vanishing-gradient",
            "gradient-step",
            "gradient-stops",
            "does-not-move",
            "unlike-siblings",
            "saturation",
            "scale-jump",
            "train-differs",
            "running-statistics",
        ),
        ("any",),
    ),
)
def constant_input(
    evidence: Evidence, *, records: int = 4, tolerance: float = 1e-3, rows: int = 8
) -> Iterator[Finding]:
    """Yield a finding if the inputs of all first layers never change."""
    found = []
    for each in evidence.weights:
        name = each.module
        if each.path == "weight" and evidence.wiring.inputs.get(name) == [INPUT]:
            what = _what_is_constant(each, tolerance, rows) if len(each.gradient.rms) >= records else None
            if what == "":
                return
            if what is not None:
                found.append((name, what))
    found.sort(key=lambda each: evidence.wiring.order[each[0]])
    if found:
        name, what = found[0]
        verdict = f"the input of {name} {what}"
        others = tuple(other for other, _ in found[1:])
        yield evidence.view(evidence.parameters, name).found(verdict, others=others)


def _what_is_constant(weight: View, tolerance: float, least_rows: int) -> str | None:
    """Describe the constant input of a layer; empty if the input varies, and None if it is unknown."""
    norms, shape = weight.gradient.rms, weight.shape
    if "Embedding" in weight.kind:
        rows = np.round((1 - weight.gradient.zero_fraction) * shape[0]) if norms.all() else np.zeros(1)
        if shape[0] < least_rows or not rows.all():
            return None
        return "gives a gradient to one row of its weight only, in each recorded step" if (rows <= 1).all() else ""
    offsets = weight.evidence.parameter(weight.module, "bias").gradient.rms
    if len(offsets) != len(norms) or not offsets.all():
        return None
    if not norms.any():
        return "consists of zeros: the gradient of its weight is zero, that of its bias is not"
    if weight.kind != "Linear":
        return ""
    # With a constant input x, the gradient of the weight is the gradient of the bias times x.
    ratios = norms / offsets
    is_constant = np.ptp(ratios) < tolerance * float(np.median(ratios))
    return "is the same for all samples of all recorded steps" if is_constant else ""


@rule(
    "gradients-accumulate",
    statistic="L2 norm of the gradient of a bias / (√rows × L2 norm of the gradient of the output)",
    usual="at most 1, because the gradient of a bias is the sum over the rows",
    why="zero_grad() is not called between the steps, so that each step repeats all earlier ones.",
    next="Call optimizer.zero_grad() before manual_backward; look at an overridden optimizer_zero_grad.",
    false_alarms="A loop that steps once in several batches adds up their gradients on purpose, and is left out.",
    needs=("gradients", "parameters"),
    records=2,
    explains=dict.fromkeys(
        (
            "learning-rate-outlier",
            "learning-rate-too-large",
            "weight-drift",
            "exploding-gradient",
            "gradient-spike",
            "always-clipped",
            "unlike-siblings",
            "sudden-change",
        ),
        ("any",),
    ),
)
def gradients_accumulate(
    evidence: Evidence,
    *,
    factor: float = 1.5,
    records: int = 2,
    share: float = 0.25,
    layers: int = 2,
    steps: float = 0.75,
) -> Iterator[Finding]:
    """Yield a finding if bias gradients are larger than the output gradients allow, as after a missing ``zero_grad``.

    The gradient of a bias is the sum of the gradients of the n output rows, so its L2 norm is at most √n times the L2
    norm of the output gradient.
    """
    # If the first step has no optimizer step, the loop accumulates the gradients of several batches.
    kinds = {node.kind for node in evidence.graph.nodes}
    if "backward" in kinds and "optimizer" not in kinds:
        return
    excess = {}
    for each in evidence.tensors:
        if each.path == "bias" and any(part in each.kind for part in _ADDS_BIAS):
            values = _excess(each, evidence.output(each.module).gradient, steps)
            if len(values):
                excess[each.module] = values
    wrong = {name: values for name, values in excess.items() if np.sum(values > factor) >= records}
    if len(wrong) < max(layers, share * len(excess)):
        return
    worst = max(wrong, key=lambda name: float(wrong[name].max()))
    largest = float(wrong[worst].max())
    verdict = (
        f"gradients of earlier batches are in the parameters: the gradient of {worst}.bias is {largest:.3g} × as large "
        "as the last batch alone can make it. Is zero_grad() missing?"
    )
    view = evidence.view(evidence.parameters, "")
    yield view.found(verdict, others=tuple(wrong), factor=largest, layers=len(wrong))


def _excess(bias: View, output: View, share: float) -> Floats:
    """Return the norm of a bias gradient in each record, divided by the largest norm that a single step allows.

    The result is empty unless the optimizer steps in at least ``share`` of the recorded batches.
    """
    (rms, size), steps = bias.gradient.columns("rms", "count")
    (inner, count), at = output.columns("rms", "count")
    # The count covers all optimizer steps of a record, so it can be a multiple of the number of elements.
    size = np.minimum(size, bias.numel)
    _, here, there = np.intersect1d(steps, at, return_indices=True)
    if len(there) < share * len(at):
        return np.zeros(0)
    # ‖bias‖ = rms √size, and √n ‖output‖ = √(count / size) rms √count.
    with np.errstate(all="ignore"):
        found: Floats = rms[here] * size[here] / (inner[there] * count[there])
    return found[np.isfinite(found)]


@rule(
    "mean-before-weights",
    statistic="mean over the samples that is multiplied with one number for each sample, in the loss",
    usual="the mean of the products",
    why="The mean is taken before the product, so that the numbers of the samples, such as returns or weights, only "
    "scale the loss by their mean.",
    next="Multiply first: (log_probs * returns).mean().",
    false_alarms="Numbers that the model itself gives, such as uncertainties, are left out.",
    needs=(GRAPH,),
    is_lasting=True,
)
def mean_before_weights(evidence: Evidence) -> Iterator[Finding]:
    """Yield products of a mean over samples and per-sample weights. The weights should be applied before the mean."""
    step = step_of(evidence)
    for node in step.operations:
        sources = step.sources(node) if node.name.strip("_") in ("mul", "rmul", "imul") else []
        if len(sources) != 2 or not step.signs.get(node.id):
            continue
        for one, weights in (sources, sources[::-1]):
            mean = one
            while mean.name in ("neg", "__neg__") and step.sources(mean):
                mean = step.sources(mean)[0]
            shape = shape_of(mean) if mean.name == "mean" and mean.id in step.trained else None
            is_whole = bool(shape) and bool(mean.outputs) and not mean.outputs[0].shape
            given = weights.outputs[0].shape if weights.outputs else None
            if is_whole and given == shape and step.roots[weights.id] == {"input"}:
                verdict = (
                    f"the product in {step.place(node)} has the mean of {listed(shape or ())} outputs and "
                    f"{listed(shape or ())} numbers of the samples: each sample counts the same"
                )
                yield found_in(evidence, step.owner(node), verdict)
                return


@rule(
    "loss-imbalance",
    statistic="L2 norm of the gradients of the outputs of two heads after common layers, first record and median",
    usual="0.1 to 10",
    why="The losses of several tasks are added without weights that make up for their units.",
    next="Weight the losses, or scale the targets to a standard deviation of 1.",
    false_alarms="A task that is solved: the gradients must differ in the first record, too.",
    needs=("gradients", GRAPH),
    records=3,
    explains=dict.fromkeys(("unlike-siblings", "exploding-gradient", "gradient-spike", "always-clipped"), ("any",)),
)
def loss_imbalance(evidence: Evidence, *, persistence: int = 3, factor: float = 300.0) -> Iterator[Finding]:
    """Yield the head whose gradient is far larger than that of another head."""
    table = evidence.gradients
    norms = gradient_norms(table)
    pairs = pairs_of_heads(evidence, norms)
    if not pairs or len(table) < persistence:
        return
    large, small = max(pairs, key=lambda pair: norms[pair[0]] / norms[pair[1]])
    outweighs = norms[large] / norms[small]
    # A solved task also has small gradients, but only at the end of the run, so the first record must differ, too.
    first = table.column(large, "rms")[0][0] / max(table.column(small, "rms")[0][0], 1e-300)
    if min(outweighs, first) > factor:
        verdict = (
            f"the loss of {large.name} outweighs that of {small.name}: the gradient of its output is {outweighs:.3g} × "
            "as large, so that the layers before both hardly learn the other task"
        )
        yield View(evidence, table, large).found(verdict, "rms", others=(small.name,), factor=outweighs)
