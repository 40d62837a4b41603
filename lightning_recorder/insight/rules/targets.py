"""Rules about the values of predictions and targets."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from math import prod

import numpy as np

from lightning_recorder.graph.model import Node
from lightning_recorder.insight.evidence import Evidence, View
from lightning_recorder.insight.finding import Finding
from lightning_recorder.insight.recorded_step import (
    BINARY,
    LOSSES,
    RecordedStep,
    setting,
    shape_of,
    sides_of,
    step_of,
)
from lightning_recorder.insight.rule import GRAPH, rule
from lightning_recorder.names import Site
from lightning_recorder.records.histogram import Histogram
from lightning_recorder.records.table import Floats

_ANY = ("any",)

_RANGES = {  # the output ranges of functions
    **dict.fromkeys(("sigmoid", "softmax", "hardsigmoid"), (0.0, 1.0)),
    **dict.fromkeys(("relu", "relu_", "softplus"), (0.0, np.inf)),
    "relu6": (0.0, 6.0),
    **dict.fromkeys(("tanh", "hardtanh", "softsign"), (-1.0, 1.0)),
}


@rule(
    "target-scale",
    statistic="rms of the targets of a regression, and its mean error from the gradient of its last bias, against the "
    "rms of the predictions",
    usual="below 1 after the first records",
    why="The targets are far larger than what the last layer returns, so that training spends its steps on their mean.",
    next="Standardize the targets, or set the bias of the last layer to their mean.",
    false_alarms="Predictions on the way to their mean: the first records do not count, nor do runs of fewer than 8. "
    "Predictions close to 0 whose mean error changes its sign are left out, and so are targets with an rms below 50.",
    needs=("activations", GRAPH),
    records=8,
    explains=dict.fromkeys(
        ("exploding-gradient", "weight-drift", "sudden-change", "learning-rate-outlier", "scale-jump"), _ANY
    ),
)
def target_scale(
    evidence: Evidence, *, persistence: int = 4, ratio: float = 10.0, records: int = 8, large: float = 50.0
) -> Iterator[Finding]:
    """Yield a finding if the targets or the mean error of a regression stay far larger than the predictions.

    For a mean squared error over K outputs, the gradient of the last bias is 2/K times the mean error of each output.
    """
    step = step_of(evidence)
    for node in step.operations:
        prediction, target = sides_of(evidence, step, node) if node.name in _SQUARED else (None, None)
        if prediction and target and min(len(prediction.rms), len(target.rms)) >= records:
            given, predicted = target.rms[-persistence:], prediction.rms[-persistence:]
            # The targets must also be large: a last layer that begins at zero needs time to reach even small targets.
            if (given >= np.maximum(large, ratio * predicted)).all():
                verdict = (
                    f"the targets of {node.name} in {step.place(node)} have rms {given[-1]:.3g} in the latest record, "
                    f"and the predictions {predicted[-1]:.3g}"
                )
                size, rms = float(given[-1]), float(predicted[-1])
                yield target.found(verdict, "rms", factor=size / rms if rms else np.inf, target=size, rms=rms)
                return
        layer = step.behind(node) if node.name == "mse_loss" and setting(node, "reduction") in ("", "'mean'") else None
        users = step.users(node) if layer is not None else [node]
        shape = shape_of(node)
        # The bias gradient shows the mean error only if the loss has no factor and no other term, and if the layer has
        # no other user.
        if layer is None or layer.name != "linear" or users or not shape or len(list(step.readers(layer))) != 1:
            continue
        name = step.owner(layer)
        gradient = evidence.parameter(name, "bias").gradient
        gradients, steps = gradient.column("rms")
        sizes = evidence.output(name).rms
        if min(len(gradients), len(sizes)) < persistence or len(gradients) < records:
            continue
        errors = gradients[-persistence:] * (layer.outputs[0].shape[-1] if layer.outputs else 1) / 2
        signs = np.sign(gradient.column("mean")[0][-records:]) if gradient.numel == 1 else np.ones(1)
        # For predictions near 0, the mean error of a few samples is noise. Its sign then changes between records.
        if (errors / sizes[-persistence:] > ratio).all() and len(set(signs)) <= 1:
            error, size = float(errors[-1]), float(sizes[-1])
            verdict = (
                f"the mean error of the predictions from {name} is {error:.3g} at step {int(steps[-1])}, "
                f"{error / size:.3g} × their rms ({size:.3g})"
            )
            yield gradient.found(verdict, "rms", factor=error / size, error=error, rms=size)
            return


_SQUARED = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
_SEVERAL = 3  # the least number of classes whose entries of a softmax differ in their binary loss
_SIGNED = ("cosine_embedding_loss", "margin_ranking_loss", "hinge_embedding_loss", "soft_margin_loss")


@rule(
    "output-range",
    statistic="smallest and largest target of a loss, or value of the data that a discriminator gets, against the "
    "range of the function that makes the predictions; for a softmax the sum of the targets of a sample",
    usual="the targets are in the range; those of a softmax add up to 1",
    why="The activation after the last layer cannot return these targets, so that the loss stays high whatever is "
    "learned.",
    next="Remove the activation after the last layer, or scale the targets to its range.",
    false_alarms="Targets beyond the range by less than a tenth of it, or of their size, do not count, nor do data of "
    "a discriminator beyond it by less than three times its size.",
    needs=("activations", GRAPH),
    records=4,
    explains=dict.fromkeys(
        ("target-scale", "saturation", "dead-output", "gradient-stops", "vanishing-gradient", "barely-moves"), _ANY
    ),
)
def output_range(
    evidence: Evidence, *, persistence: int = 4, margin: float = 0.1, beside: float = 3.0
) -> Iterator[Finding]:
    """Yield the losses whose targets are outside of the range of the predictions, and generators of another range."""
    step = step_of(evidence)
    yield from _range_of_generator(evidence, step, persistence, beside)
    for site in evidence.losses.places:
        labels = View(evidence, evidence.losses, site)
        if (
            site.path == "in.target.blank"
            and len(labels.mean) >= persistence
            and (labels.mean[-persistence:] > 0).all()
        ):
            verdict = f"{np.median(labels.mean):.0%} of the labels that {site.name} gets are the blank"
            found = labels.found(verdict, "mean", share=float(np.median(labels.mean)))
            yield replace(found, path="", why=_WHY_BLANK, next=_NEXT_BLANK)
            return
    for node in step.operations:
        source = _values_behind(step, node)
        if node.name in _SIGNED:
            _, target = sides_of(evidence, step, node)
            (least, most), steps = target.columns("min", "max")
            if len(steps) >= persistence and (least == 0).any() and least.min() == 0 and most.max() == 1:
                verdict = f"{node.name} in {step.place(node)} gets targets of 0 and 1, and expects -1 and 1"
                why = "A target of 0 has no meaning for this loss: those samples have no gradient, or a wrong one."
                found = replace(target.found(verdict, "min"), module=step.owner(node), path="")
                yield replace(found, why=why, next="Use -1 instead of 0, such as 2 × target - 1.")
                return
        if node.name in BINARY:
            low, high = 0.0, 1.0
        elif node.name in _SQUARED and source is not None and source.kind == "op" and source.name in _RANGES:
            low, high = _RANGES[source.name]
        else:
            continue
        _, target = sides_of(evidence, step, node)
        (least, most, size, mean), steps = target.columns("min", "max", "rms", "mean")
        if len(steps) < persistence:
            continue
        # If the range has no upper end, the excess is divided by the rms of the targets.
        beyond = np.maximum(low - least, most - high) / np.where(np.isfinite(high), high - low, np.maximum(size, 1e-30))
        if not (beyond[-persistence:] > margin).all():
            sums = mean[-persistence:] * (shape_of(node, 1) or (1,))[-1]
            if source is not None and source.name == "softmax" and (sums > 1 + margin).all():
                verdict = (
                    f"{node.name} in {step.place(node)} gets targets that add up to {sums[-1]:.3g} in a sample, but "
                    f"the softmax in {step.place(source)} returns numbers that add up to 1"
                )
                found = target.found(verdict, "mean", sum=sums[-1])
                following = (
                    "Use a sigmoid if several classes of a sample may be true, or scale the targets to a sum of 1."
                )
                yield replace(found, module=step.owner(source), path="", next=following)
                return
            continue
        targets = f"targets from {least.min():.3g} to {most.max():.3g}"
        if node.name in BINARY:
            verdict = f"{node.name} in {step.place(node)} gets {targets}, and expects 0 to 1"
            why = "The target of this loss is a probability. It has no least value for other targets."
            following = "Scale the labels to 0 and 1, or use a loss for regression."
            yield replace(target.found(verdict, "max"), module=step.owner(node), path="", why=why, next=following)
        else:
            assert source is not None
            ends = f"{low:.3g} to {high:.3g}" if np.isfinite(high) else f"at least {low:.3g}"
            verdict = (
                f"{node.name} in {step.place(node)} gets {targets}, but the {source.name} in {step.place(source)} "
                f"returns {ends}"
            )
            yield replace(target.found(verdict, "max"), module=step.owner(source), path="")
        return


def _range_of_generator(evidence: Evidence, step: RecordedStep, persistence: int, margin: float) -> Iterator[Finding]:
    """Yield a layer that gets both data and the output of an activation with a far smaller range, as in a GAN."""
    calls: dict[int, list[tuple[Node, Node]]] = {}
    for node in step.operations:
        sources = step.sources(node)
        if len(sources) > 1 and sources[1].kind == "parameter" and (source := step.behind(node)) is not None:
            while source.name == "detach" and step.behind(source) is not None:
                source = step.behind(source) or source
            calls.setdefault(sources[1].id, []).append((source, node))
    for pairs in calls.values():
        data = next((each for each, _ in pairs if each.kind == "input"), None)
        made = next((each for each, _ in pairs if each.kind == "op" and each.name in _RANGES), None)
        if data is None or made is None or made.id not in step.trained:
            continue
        if step.ancestors(made) & {node.id for _, node in pairs}:
            continue  # a recurrence, which gets its own output
        (low, high), real = _RANGES[made.name], View(evidence, evidence.losses, Site("", data.name))
        (least, most), _ = real.columns("min", "max")
        beyond = np.maximum(low - least, most - high) / (high - low) if np.isfinite(high) else np.zeros(0)
        if len(beyond) >= persistence and (beyond[-persistence:] > margin).all():
            verdict = (
                f"the same layer gets {data.name}, from {least.min():.3g} to {most.max():.3g}, and the output of the "
                f"{made.name} in {step.place(made)}, which returns {low:.3g} to {high:.3g}"
            )
            found = replace(real.found(verdict, "max"), module=step.owner(made), path="")
            yield replace(found, why=_WHY_GENERATOR, next=_NEXT_GENERATOR)
            return


_WHY_GENERATOR = (
    "The generator cannot make values like those of the data, and the discriminator tells them apart by their size."
)
_NEXT_GENERATOR = "Scale the data to the range of the last activation of the generator: x / 127.5 - 1 for tanh."
_WHY_BLANK = "The blank stands for no label, so that no output can mean these labels, and the loss may be negative."
_NEXT_BLANK = "Number the labels from 1 on and give the model one more output, or pass another number as blank."


def _values_behind(step: RecordedStep, node: Node) -> Node | None:
    """Return the node that computed the values of the first input, skipping changes of shape and selections."""
    source = step.behind(node)
    while source is not None and source.name in ("getitem", "select", "narrow"):
        source = step.behind(source)
    return source


@rule(
    "classes-by-error",
    statistic="targets of a squared or absolute error, or of a binary loss, whose predictions are probabilities of "
    "classes",
    usual="cross_entropy for classes",
    why="A squared error of probabilities has hardly a gradient where a prediction is sure and wrong.",
    next="Use cross_entropy or binary_cross_entropy_with_logits, and give it the output of the last linear layer.",
    false_alarms="Probabilities of another model as targets, and predictions of several sigmoids, such as the pixels "
    "of an image, are left out. If hardly an error is left in the latest records, it is a note.",
    needs=("activations", GRAPH),
    records=4,
)
def classes_by_error(
    evidence: Evidence, *, persistence: int = 4, tolerance: float = 1e-6, solved: float = 0.05
) -> Iterator[Finding]:
    """Yield regression losses whose predictions are probabilities and whose targets are classes."""
    step = step_of(evidence)
    for node in step.operations:
        source, shape = step.behind(node), shape_of(node)
        is_binary = node.name == "binary_cross_entropy"
        if not (node.name in _SQUARED or is_binary) or source is None or not shape:
            continue
        if source.name not in ("softmax", "sigmoid") or (source.name == "sigmoid" and prod(shape[1:]) != 1):
            continue
        # With two classes, both entries of a softmax have the same binary loss, so a softmax is fine there.
        if is_binary and (source.name == "sigmoid" or shape[-1] < _SEVERAL):
            continue
        _, target = sides_of(evidence, step, node)
        (least, most, mean, size), steps = target.columns("min", "max", "mean", "rms")
        last = slice(-persistence, None)
        # If all numbers are 0 or 1, they equal their squares, so the mean equals the mean square.
        are_binary = (least == 0) & (most == 1) & (np.abs(mean - size**2) < tolerance)
        if len(steps) >= persistence and are_binary[last].all():
            compares = (
                f"{node.name} in {step.place(node)} compares the output of the {source.name} in {step.place(source)} "
            )
            verdict = f"{compares}with targets of 0 and 1, which are classes"
            why = ""
            if is_binary:
                verdict = f"{compares}with targets of 0 and 1, entry by entry: a softmax is for one of several classes"
                why = "The binary loss takes the classes for independent, but the entries of a softmax add up to 1."
            found = replace(target.found(verdict), module=step.owner(source), path="", why=why)
            left = _share_of_errors(evidence, step, source)[last] if node.name == "mse_loss" else np.zeros(0)
            is_solved = len(left) == persistence and bool((left < solved).all())
            yield replace(found, severity="note") if is_solved else found
            return


def _share_of_errors(evidence: Evidence, step: RecordedStep, prediction: Node) -> Floats:
    """Return the mean squared error in each record, as a share of that in the first one; empty if it is unknown.

    The gradient of the prediction is proportional to its difference to the target, whatever the loss averages.
    """
    names = (step.function_names.get(prediction.id, ""), step.owner(prediction))
    gradients = (evidence.view(evidence.gradients, name, "out").rms for name in names)
    rms = next((each for each in gradients if len(each) and each[0] > 0), np.zeros(0))
    shares: Floats = (rms / rms[0]) ** 2 if len(rms) else rms
    return shares


@rule(
    "classes-as-numbers",
    "note",
    statistic="number of different values, if all targets of a squared or absolute error are whole numbers from 0 on, "
    "and there is one prediction for each sample",
    usual="targets with fractions",
    why="If they are the numbers of classes, the loss takes class 2 for the mean of the classes 1 and 3.",
    next="For classes, return one output for each class and use cross_entropy. For counts, ratings and other numbers "
    "with an order, this loss is right.",
    false_alarms="Counts, ratings and grades that begin at 0, which is why it is a note. Two values, more than twenty, "
    "and targets whose smallest or largest value is in less than half of the records are left out.",
    needs=("activations", GRAPH),
    records=4,
)
def classes_as_numbers(
    evidence: Evidence, *, records: int = 4, fewest: int = 3, most: int = 20, share: float = 0.5
) -> Iterator[Finding]:
    """Yield a note about regression losses whose targets may be class numbers."""
    step = step_of(evidence)
    for node in step.operations:
        prediction, given = step.comparisons.get(node.id, (*step.sources(node), node, node)[:2])
        shape = prediction.outputs[0].shape if prediction.outputs else ()
        is_error = node.name in _SQUARED or (node.id in step.comparisons and "sub" in node.name)
        if not is_error or not shape or shape[0] < _FEWEST_ROWS or prod(shape[1:]) != 1:
            continue
        _, target = sides_of(evidence, step, node)
        (least, last), steps = target.columns("min", "max")
        number = int(last.max(initial=0)) + 1
        if len(steps) < records or not fewest <= number <= most or step.roots[given.id] != {"input"}:
            continue
        # Most batches contain the first and the last class, so the minimum and maximum of the targets are the same in
        # most records. The minimum and maximum of counts vary.
        ends = min(np.mean(least == 0), np.mean(last == number - 1))
        source = step.made_by(given)
        is_whole = source.kind == "input" and bool(source.outputs) and "int" in source.outputs[0].dtype
        shown = target.histograms()
        if ends < share or not (is_whole or (shown and all(map(_are_whole, shown)))):
            continue
        verdict = (
            f"the targets of {node.name} in {step.place(node)} are {number} whole numbers, 0 to {number - 1}, and the "
            "prediction of each sample is one number"
        )
        yield replace(target.found(verdict, "max", values=number), module=step.owner(node), path="")
        return


_FEWEST_ROWS = 2
_EXACT = 10  # below 10, each integer has a histogram bin that begins with it; only 9 is in the bin of 8


def _are_whole(histogram: Histogram) -> bool:
    """Return True if all values of a histogram are integers from 0 to 9: the lower bin edges reproduce its sums."""
    if not histogram.count or histogram.fraction < 1:
        return False
    edges = np.maximum(histogram.edges[:-1], 0)[histogram.counts > 0]
    counts = histogram.counts[histogram.counts > 0]
    nines = histogram.sum - counts @ edges  # each 9 adds 1 to the sum, and 81 - 64 to the sum of squares
    is_exact = nines == np.round(nines) >= 0 and (nines == 0 or histogram.max == _EXACT - 1)
    are_squares = math.isclose(histogram.sum_squares, counts @ edges**2 + 17 * nines)
    return bool(histogram.min >= 0 and histogram.max < _EXACT and is_exact and are_squares and (edges % 1 == 0).all())


@rule(
    "constant-target",
    statistic="std of the targets of a loss",
    usual="the targets differ between samples",
    why="The labels are lost on the way: a wrong column, a division of whole numbers, or a cast.",
    next="Print the targets of some batches, and compare them with the data set.",
    false_alarms="Targets that the step makes without the batch, such as those of a discriminator, of contrastive "
    "learning against a queue or of a penalty, and fewer than 64 targets, are left out.",
    needs=("activations", GRAPH),
    records=8,
    explains=dict.fromkeys(
        ("vanishing-gradient", "gradient-stops", "barely-moves", "saturation", "does-not-move"), _ANY
    ),
)
def constant_target(evidence: Evidence, *, persistence: int = 8, targets: int = 64) -> Iterator[Finding]:
    """Yield the losses whose targets all have the same value, in all records."""
    step = step_of(evidence)
    for node in step.operations:
        sources = step.sources(node)
        if node.name not in LOSSES or len(sources) < 2 or "parameter" in step.roots[sources[1].id]:
            continue
        if "input" not in step.roots[sources[1].id] and not _compares_pairs(step, node):
            continue
        _, target = sides_of(evidence, step, node)
        (least, most), steps = target.columns("min", "max")
        if len(steps) < persistence or target.count.sum() < targets:
            continue
        if least.min() == most.max() and np.isfinite(least[0]) and least[0] != -100:
            verdict = (
                f"all targets of {node.name} in {step.place(node)} are {least[0]:.3g} in each of {len(steps)} records"
            )
            yield replace(target.found(verdict, "max"), module=step.owner(node), path="")
            return


def _compares_pairs(step: RecordedStep, loss: Node) -> bool:
    """Return True for a contrastive loss: the logits are products of all pairs of outputs, the classes are indices."""
    shape, source = shape_of(loss), step.behind(loss) if loss.name == "cross_entropy" else None
    while source is not None and source.name in ("mul", "div"):  # the temperature
        source = step.behind(source)
    if source is None or source.name not in ("matmul", "mm", "__matmul__") or not shape or len(shape) != 2:
        return False
    are_outputs = [{"input", "parameter"} <= step.roots[each.id] for each in step.sources(source)]
    return shape[0] == shape[1] and are_outputs == [True, True]
