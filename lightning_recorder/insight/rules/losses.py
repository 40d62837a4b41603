"""Rules about losses: what they get, and whether anything holds apart what they pull together."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from lightning_recorder.graph.model import Node
from lightning_recorder.insight.evidence import Evidence
from lightning_recorder.insight.finding import MAXIMIZED, Finding
from lightning_recorder.insight.recorded_step import (
    ELEMENTWISE,
    LOSSES,
    RecordedStep,
    Shape,
    factor_of,
    found_in,
    keeps_values,
    listed,
    setting,
    shape_of,
    softmax_dimension,
    step_of,
)
from lightning_recorder.insight.rule import GRAPH, rule

_ANY = ("any",)

_CUTS_OFF = re.compile(r"(relu|hardtanh|relu6|softplus|sigmoid|hardsigmoid|tanh)_?")  # not all numbers are outputs
_POWERS = ("pow", "square", "abs", "__pow__")  # of a difference, in a loss that is written by hand
_DIFFERENCES = ("sub", "__sub__", "__rsub__", "rsub")


@rule(
    "loss-shapes",
    statistic="shapes of prediction and target of losses that compare element by element",
    usual="the same shape",
    why="Each prediction is compared with the targets of all samples, so the model learns their mean.",
    next="Give both the same shape, such as prediction.squeeze(-1) or target.unsqueeze(-1).",
    false_alarms="A target without dimensions, and dimensions of size 1 at the same place, are left out.",
    needs=(GRAPH,),
    is_lasting=True,
)
def loss_shapes(evidence: Evidence) -> Iterator[Finding]:
    """Yield the losses whose prediction and target have shapes that broadcast."""
    step = step_of(evidence)
    for node in step.operations:
        is_own = _is_error(step, node)
        if node.name not in ELEMENTWISE and not is_own:
            continue
        one, other = shape_of(node), shape_of(node, 1)
        # A scalar target, such as the label of a discriminator, and an explicit dimension of size 1 are intended.
        if one and other and len(one) != len(other):
            if is_own and "parameter" not in step.roots[step.sources(node)[0].id]:
                one, other = other, one
            verdict = (
                f"{'the difference' if is_own else node.name} in {step.place(node)} compares a prediction "
                f"{listed(one)} with a target "
                f"{listed(other)}: torch expands both to {listed(_broadcast(one, other))}"
            )
            yield found_in(evidence, step.owner(node), verdict)
            return


def _is_error(step: RecordedStep, node: Node) -> bool:
    """Return True for the difference of a prediction and a target, in a loss that is written by hand."""
    sources = step.sources(node)
    one, other = (shape_of(node), shape_of(node, 1)) if len(node.inputs) == 2 else (None, None)
    if node.name not in _DIFFERENCES or len(sources) != 2 or not one or not other:
        return False
    # A column and a vector with the same samples; fewer dimensions alone may be meant.
    if not 1 < one[0] == other[0] or {one, other} != {(one[0],), (one[0], 1)}:
        return False
    # Pairs of predictions, as in a ranking loss, are meant.
    predicts = ["parameter" in step.roots[each.id] for each in sources]
    is_given = any("input" in step.roots[each.id] for each, one in zip(sources, predicts, strict=True) if not one)
    if sorted(predicts) != [False, True] or not is_given:
        return False
    powers = [each for each in step.users(node) if each.name in _POWERS]
    sums = [user for each in powers for user in step.users(each)]
    return any(each.name in ("mean", "sum") and each.outputs and not each.outputs[0].shape for each in sums)


def _broadcast(one: Shape, other: Shape) -> Shape:
    """Return the shape to which torch expands two shapes."""
    most = max(len(one), len(other))
    filled = [(1,) * (most - len(shape)) + shape for shape in (one, other)]
    return tuple(max(sizes) for sizes in zip(*filled, strict=True))


@rule(
    "cut-off-logits",
    statistic="function that makes the logits of cross_entropy or binary_cross_entropy_with_logits",
    usual="a linear layer, whose outputs have both signs",
    why="The loss expects logits of any sign and size. An activation before it limits them, and has no gradient, or "
    "hardly one, where it does.",
    next="Give the output of the last linear layer to the loss.",
    false_alarms="Logits that are limited and then scaled, as in models that bound their logits, are left out.",
    needs=(GRAPH,),
    explains=dict.fromkeys(("dead-output", "gradient-stops", "does-not-move"), _ANY),
    is_lasting=True,
)
def cut_off_logits(evidence: Evidence) -> Iterator[Finding]:
    """Yield the activations that limit what a loss expects to be without limits."""
    step = step_of(evidence)
    for node in step.operations:
        if node.name not in ("cross_entropy", "binary_cross_entropy_with_logits"):
            continue
        source = step.behind(node)
        dropped = _dropout_before(step, node)
        if dropped is not None:
            verdict = f"the dropout in {step.place(dropped)} sets logits of {node.name} to zero"
            yield replace(found_in(evidence, step.owner(dropped), verdict), why=_WHY_DROPPED, next=_NEXT_DROPPED)
            return
        is_double = source is not None and node.name != "cross_entropy" and source.name == "sigmoid"
        if source is not None and source.kind == "op" and _CUTS_OFF.fullmatch(source.name) and not is_double:
            owner = step.owner(source)
            verdict = f"{node.name} gets the output of the {source.name} in {step.place(source)} as logits"
            yield found_in(evidence, owner, verdict)
            return


_WHY_DROPPED = "A logit of zero is a prediction like any other, so the loss changes with the logits that are drawn."
_NEXT_DROPPED = "Put the dropout before the last linear layer."


def _dropout_before(step: RecordedStep, loss: Node) -> Node | None:
    """Return the active dropout between the last layer and a loss, through changes of the shape."""
    node = next(iter(step.sources(loss)), None)
    while node is not None and keeps_values(node):
        is_off = "False" in (setting(node, "training"), setting(node, "train")) or setting(node, "p") in ("0", "0.0")
        if "dropout" in node.name and not is_off:
            return node
        node = next(iter(step.sources(node)), None)
    return None


@rule(
    MAXIMIZED,
    statistic="sign that the comparisons with targets of the batch have in the loss",
    usual="positive; negative for logarithms of the probabilities of the targets",
    why="The loss has the wrong sign, so that training makes the predictions worse.",
    next="Return the loss without the minus sign, or -log_prob.mean() for logarithms of probabilities.",
    false_alarms="A loss that also has a comparison of the right sign, as in adversarial training, is left out, and so "
    "are targets that the step makes itself.",
    needs=(GRAPH,),
    explains=dict.fromkeys(
        (
            *("exploding-gradient", "weight-drift", "sudden-change", "gradient-spike", "scale-jump", "saturation"),
            *("unlike-siblings", "learning-rate-too-large", "learning-rate-outlier", "one-class-predicted"),
            *("dead-output", "gradient-step", "train-differs"),
        ),
        _ANY,
    ),
    is_lasting=True,
)
def maximized_loss(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if the step maximizes the distance between all predictions and their targets."""
    step = step_of(evidence)
    found: list[tuple[Node, bool]] = []
    for node in step.operations:
        sources = step.sources(node)
        if len(sources) < 2 or step.roots[sources[1].id] != {"input"} or "parameter" not in step.roots[sources[0].id]:
            continue
        is_likelihood = node.name == "gather" and step.made_by(sources[0]).name == "log_softmax"
        if (node.name in LOSSES or is_likelihood) and (signs := step.signs.get(node.id)):
            found.append((node, signs == {1 if is_likelihood else -1}))
    if found and all(is_wrong for _, is_wrong in found):
        (node, _), *_ = found
        what = "log-probability of the targets" if node.name == "gather" else f"{node.name} of predictions and targets"
        verdict = f"training makes the {what} in {step.place(node)} {'smaller' if node.name == 'gather' else 'larger'}"
        yield found_in(evidence, step.owner(node), f"{verdict}: the loss has the wrong sign")


@rule(
    "scaled-twice",
    statistic="constant factors between the last layer and cross_entropy",
    usual="at most one, such as a temperature",
    why="The logits are scaled in two places, such as the model and the training step. A factor below 1, as that of a "
    "temperature, then leaves the probabilities too close to each other, and one above 1 too far apart.",
    next="Scale the logits once: in the model or before the loss.",
    false_alarms="Two different factors, and factors between 0.5 and 2, are left out.",
    needs=(GRAPH,),
    is_lasting=True,
)
def scaled_twice(evidence: Evidence, *, factor: float = 2.0) -> Iterator[Finding]:
    """Yield the losses whose logits are multiplied with the same number twice."""
    step = step_of(evidence)
    for node in step.operations:
        if node.name not in ("cross_entropy", "log_softmax"):
            continue
        scaled: list[tuple[Node, float]] = []
        source = step.behind(node)
        while source is not None and (scale := factor_of(source) or 0.0) > 0:
            scaled.append((source, scale))
            source = step.behind(source)
        for (second, one), (first, other) in pairwise(scaled):
            if math.isclose(one, other, rel_tol=1e-6) and max(one, 1 / one) > factor:
                verdict = (
                    f"the logits of {node.name} are multiplied with {one:.3g} in {step.place(first)} and again in "
                    f"{step.place(second)}"
                )
                yield found_in(evidence, step.owner(first), verdict, factor=one)
                return


@rule(
    "cosine-logits",
    statistic="least loss of cross_entropy for logits between -1 and 1, relative to the loss of a guess",
    usual="cosines that are divided by a temperature, such as 0.1",
    why="Cosines reach from -1 to 1, so that no class can get a probability close to 1, however right they are.",
    next="Divide the cosines by a temperature of 0.05 to 0.2, or multiply them with a learned scale.",
    false_alarms="Any operation between the product and the loss counts as a scale, and two or three classes are few.",
    needs=(GRAPH,),
    is_lasting=True,
)
def cosine_logits(evidence: Evidence, *, share: float = 0.3) -> Iterator[Finding]:
    """Yield the losses that get cosines as logits, with the least loss that these can have."""
    step = step_of(evidence)
    for node in step.operations:
        shape, source = shape_of(node), step.behind(node) if node.name == "cross_entropy" else None
        if source is not None and source.name in ("mul", "div") and setting(source, "other") in ("1", "1.0"):
            source = step.behind(source)  # a temperature of 1
        if source is None or source.kind != "op" or not shape or len(shape) < 2:
            continue
        factors = [step.made_by(each).name for each in step.sources(source)]
        is_cosine = source.name in ("matmul", "mm", "linear", "einsum", "__matmul__") and factors == ["normalize"] * 2
        least, guess = math.log(1 + (shape[1] - 1) * math.exp(-2)), math.log(shape[1])
        if (is_cosine or source.name == "cosine_similarity") and least > share * guess:
            verdict = (
                f"{node.name} in {step.place(node)} gets cosines as logits of {shape[1]} classes: it cannot fall below "
                f"{least:.3g}, and is {guess:.3g} for a guess"
            )
            yield found_in(evidence, step.owner(source), verdict, least=least, guess=guess)
            return


@rule(
    "overlap-of-logits",
    statistic="smallest prediction in a quotient of sums, such as a dice loss, whose predictions a layer returns",
    usual="predictions between 0 and 1, as of a sigmoid or softmax",
    why="An overlap, 2 Σpt / (Σp + Σt), is defined for probabilities. With negative numbers the sum below may be zero, "
    "so that the loss has no least value.",
    next="Apply a sigmoid or softmax to the output of the last layer before the loss.",
    false_alarms="Predictions that are never negative are left out.",
    needs=("activations", GRAPH),
    records=4,
    explains=dict.fromkeys(
        ("gradient-spike", "sudden-change", "exploding-gradient", "weight-drift", "learning-rate-too-large"), _ANY
    ),
)
def overlap_of_logits(evidence: Evidence, *, persistence: int = 4, negative: float = 0.1) -> Iterator[Finding]:
    """Yield the losses by overlap that get negative numbers for probabilities."""
    step = step_of(evidence)
    for node in step.operations:
        if node.name != "div" or len(sources := step.sources(node)) != 2 or node.id < step.last_layer:
            continue
        above, below = (_terms(step, each) for each in sources)
        for prediction, _ in [step.comparisons[each.id] for each in above if each.id in step.comparisons]:
            layer = step.made_by(prediction)
            if layer not in below or not re.fullmatch(r"linear|conv(_transpose)?\dd", layer.name):
                continue
            low = evidence.output(step.owner(layer)).min
            if len(low) >= persistence and (low[-persistence:] < -negative).all():
                verdict = (
                    f"the quotient in {step.place(node)} gets the output of {step.owner(layer)} as probabilities, and "
                    f"it is as small as {low[-1]:.3g}"
                )
                yield found_in(evidence, step.owner(layer), verdict, least=low[-1])
                return


def _terms(step: RecordedStep, node: Node) -> list[Node]:
    """Return what the sums of a part of a loss consist of, and the nodes on the way, up to layers and inputs."""
    found, todo = [], [node]
    while todo:
        found.append(todo.pop())
        if found[-1].name in ("sum", "add", "sub", "mul", "pow", "clamp", *_POWERS) or keeps_values(found[-1]):
            todo += [each for each in step.sources(found[-1]) if each not in found]
    return found


@rule(
    "no-log-softmax",
    statistic="function that makes the input of nll_loss",
    usual="log_softmax",
    why="nll_loss expects logarithms of probabilities. Other numbers make it fall without bound.",
    next="Use cross_entropy, or apply log_softmax before nll_loss.",
    false_alarms="None are known.",
    needs=(GRAPH,),
    explains=dict.fromkeys(("exploding-gradient", "weight-drift", "sudden-change"), _ANY),
    is_lasting=True,
)
def no_log_softmax(evidence: Evidence) -> Iterator[Finding]:
    """Yield the calls of ``nll_loss`` whose prediction is no logarithm of probabilities."""
    step = step_of(evidence)
    for node in step.operations:
        source = step.behind(node) if node.name == "nll_loss" else None
        if source is not None and source.kind == "op" and source.name in ("linear", "conv2d"):
            verdict = f"nll_loss in {step.place(node)} gets the output of the {source.name} in {step.place(source)}"
            yield found_in(evidence, step.owner(source), verdict)
            return


# What a loss of two views consists of. Other functions, such as a product of all pairs or a variance, may push apart.
_PULLS = re.compile(
    r"(cosine_similarity|normalize|mse_loss|(smooth_)?l1_loss|huber_loss|mean|sum|(__)?r?(sub|add|mul|(true)?div)(__)?|"
    r"neg|__neg__|pow|square|abs|norm|vector_norm|getitem|chunk|split|unbind)_?"
)


@rule(
    "no-stop-gradient",
    statistic="operations of a loss that compares two outputs of the same layers, and parts of it without a gradient",
    usual="a detach() of one side, negative pairs or a term for the variance",
    why="The loss is smallest if all outputs are equal, and the gradient of both sides leads there.",
    next="Detach the target: z.detach() in a cosine similarity of p and z; or add negative pairs or a variance term.",
    false_alarms="Losses with a target, another function, or a part without a gradient are left out, and outputs that "
    "differ between samples as much as in the first record.",
    needs=("activations", GRAPH),
    records=8,
    explains=dict.fromkeys(
        ("collapsed-embedding", "dead-output", "vanishing-gradient", "sudden-change", "barely-moves"), _ANY
    ),
)
def no_stop_gradient(evidence: Evidence, *, persistence: int = 8, share: float = 0.75) -> Iterator[Finding]:
    """Yield a finding if a loss only pulls outputs of the same layers together, and they become alike."""
    step = step_of(evidence)
    losses = [node for node in evidence.graph.nodes if node.kind == "backward"]
    sides, todo = [], [each for node in losses[:1] for each in step.sources(node)]
    for node in todo:
        if node.kind == "op" and (_PULLS.fullmatch(node.name) or keeps_values(node)) and step.sources(node):
            todo += [each for each in step.sources(node) if each not in todo]
        else:
            sides.append(node)
    owners = Counter(step.owner(node) for node in sides)
    # Each layer gives at least two sides, and none is another term of the loss, a target or without a gradient.
    if len(losses) != 1 or min(owners.values(), default=0) < 2 or "" in owners:
        return
    if any(node.id not in step.trained for node in sides):
        return
    for name in owners:
        spreads = evidence.output(name).batch_spread
        if len(spreads) >= persistence and (spreads[-persistence:] < share * spreads[0]).all():
            verdict = (
                f"the loss pulls the outputs of {name} for two views together, nothing holds them apart, and no side "
                f"is detached: {spreads[-1]:.2g} of their rms differs between samples, {spreads[0]:.2g} at first"
            )
            found = evidence.output(name).found(verdict, "batch_spread", spread=spreads[-1], first=spreads[0])
            yield replace(found, others=tuple(each for each in owners if each != name))
            return


@rule(
    "one-class",
    statistic="size of the dimension of a softmax whose output a loss gets",
    usual="at least two entries",
    why="Probabilities of a single class add up to 1, whatever the input is.",
    next="Use a sigmoid for one output, or one output for each class.",
    false_alarms="Attention to one position, whose output no loss gets directly.",
    needs=(GRAPH,),
    explains=dict.fromkeys(("gradient-stops", "does-not-move", "double-activation", "constant-input"), _ANY),
    is_lasting=True,
)
def one_class(evidence: Evidence) -> Iterator[Finding]:
    """Yield the softmax functions over a single entry."""
    step = step_of(evidence)
    for node in step.operations:
        shape = shape_of(node)
        if node.name not in ("softmax", "log_softmax") or not shape:
            continue
        dimension = softmax_dimension(node)
        # Attention to a single position, and a mixture of one component, are intended.
        if dimension is None or shape[dimension] != 1 or not any(map(step.is_loss, step.readers(node))):
            continue
        value = "1" if node.name == "softmax" else "0"
        verdict = (
            f"the {node.name} in {step.place(node)} runs over dimension {dimension} of {listed(shape)}, which has one "
            f"entry: its output is always {value}, and no gradient passes it"
        )
        yield found_in(evidence, step.owner(node), verdict)
        return
