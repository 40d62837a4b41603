"""Rules about losses: what they get, and whether anything holds apart what they pull together."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np

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
_CLAMPS = ("clamp", "clip", "clamp_", "clip_")
_NO_PROBABILITY = re.compile(r"(relu|relu6|softplus|tanh|hardtanh)_?|linear|conv\dd")
_NO_PROBABILITIES = re.compile(rf"sigmoid_?|{_NO_PROBABILITY.pattern}")  # of several classes
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
    """Yield the losses whose prediction and target have shapes that broadcast, and weights of samples behind a mean."""
    step = step_of(evidence)
    for node in step.operations:
        if (shape := _weights_of_mean(step, node)) is not None:
            verdict = (
                f"{node.name} in {step.place(node)} returns one number for the batch, which is then multiplied with "
                f"{listed(shape)} weights: each sample counts the same"
            )
            found = found_in(evidence, step.owner(node), verdict)
            yield replace(found, why=_WHY_WEIGHTS, next=_NEXT_WEIGHTS)
            return
        if (shape := _norms_of_entries(step, node)) is not None:
            verdict = (
                f"the penalty in {step.place(node)} compares {listed(shape)} norms of a gradient with 1: there are "
                f"{shape[0]} samples, so that each norm is that of a part of one"
            )
            yield replace(found_in(evidence, step.owner(node), verdict), why=_WHY_PARTS, next=_NEXT_PARTS)
            return
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


_WHY_WEIGHTS = "The mean over the samples is taken before their weights, so that the weights only scale the loss."
_NEXT_WEIGHTS = 'Pass reduction="none" to the loss, multiply with the weights, and take the mean afterwards.'


def _weights_of_mean(step: RecordedStep, loss: Node) -> Shape | None:
    """Return the shape of the weights, one for each target, that the mean of a loss is multiplied with."""
    targets = shape_of(loss, 1)
    if loss.name not in LOSSES or not targets or not loss.outputs or loss.outputs[0].shape:
        return None
    for user in step.users(loss):
        sources = step.sources(user)
        if user.name.strip("_") not in ("mul", "rmul", "imul") or len(sources) != 2:
            continue
        weights = sources[0] if sources[1] is loss else sources[1]
        shape = weights.outputs[0].shape if weights.outputs else ()
        # Weights of the batch; what the model returns may be an uncertainty that scales a loss.
        if shape in (targets, targets[:1]) and shape[0] > 1 and step.roots[weights.id] == {"input"}:
            return shape
    return None


_WHY_PARTS = "The norm runs over one dimension, so that the whole gradient of a sample gets far larger than 1."
_NEXT_PARTS = "Flatten the gradient first: grad.flatten(1).norm(2, dim=1)."


def _norms_of_entries(step: RecordedStep, node: Node) -> Shape | None:
    """Return the shape of the norms of a gradient that a term of the loss compares with 1, if they are of parts."""
    shape = node.outputs[0].shape if node.outputs else ()
    gradient = step.behind(node) if "norm" in node.name else None
    if gradient is None or gradient.kind != "backward" or sum(size > 1 for size in shape) < 2:
        return None
    # A field has one value for each point, and the gradient of each of them has its own norm.
    value = next(iter(step.sources(gradient)), gradient)
    value = (step.behind(value) or value) if value.name == "sum" else value
    if not value.outputs or math.prod(value.outputs[0].shape) == math.prod(shape):
        return None
    ones = [each for each in step.users(node) if each.name in _DIFFERENCES and setting(each, "other") in ("1", "1.0")]
    squares = [user for each in ones for user in step.users(each) if user.name in _POWERS]
    return shape if any(step.signs.get(each.id) for each in squares) else None


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
    statistic="function that makes the logits of cross_entropy or binary_cross_entropy_with_logits, or the "
    "probabilities of binary_cross_entropy or of a cross-entropy that is written out",
    usual="a linear layer, whose outputs have both signs; a sigmoid or softmax for probabilities",
    why="The loss expects logits of any sign and size. An activation before it limits them, and has no gradient, or "
    "hardly one, where it does.",
    next="Give the output of the last linear layer to the loss.",
    false_alarms="Logits that are limited and then scaled, as in models that bound their logits, are left out.",
    needs=(GRAPH,),
    explains=dict.fromkeys(
        ("dead-output", "gradient-stops", "does-not-move", "barely-moves", "vanishing-gradient"), _ANY
    ),
    is_lasting=True,
)
def cut_off_logits(evidence: Evidence) -> Iterator[Finding]:
    """Yield the activations that limit what a loss expects to be without limits."""
    step = step_of(evidence)
    yield from _cut_off_scores(evidence, step)
    for node in step.operations:
        source = step.behind(node)
        if node.name == "binary_cross_entropy" or node.id in step.probabilities:
            source = step.probabilities.get(node.id, source)
            while source is not None and source.name in (*_CLAMPS, "getitem", "select"):
                source = step.behind(source)
            is_unfit = _NO_PROBABILITY if node.name == "binary_cross_entropy" else _NO_PROBABILITIES
            if source is not None and source.kind == "op" and is_unfit.fullmatch(source.name):
                loss = node.name if node.name == "binary_cross_entropy" else "the cross-entropy"
                verdict = f"{loss} in {step.place(node)} gets the output of the {source.name} in {step.place(source)}"
                found = found_in(evidence, step.owner(source), f"{verdict} as probabilities")
                yield replace(found, why=_WHY_UNFIT, next=_NEXT_UNFIT)
                return
        if node.name in ("softmax", "log_softmax"):
            is_last = any(user.name == "nll_loss" for user in step.readers(node)) or node in step.probabilities.values()
            if source is None or not is_last or not _CUTS_OFF.fullmatch(source.name):
                continue
            verdict = (
                f"the {node.name} of the loss gets the output of the {source.name} in {step.place(source)} as logits"
            )
            yield found_in(evidence, step.owner(source), verdict)
            return
        if node.name not in ("cross_entropy", "binary_cross_entropy_with_logits"):
            continue
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


def _cut_off_scores(evidence: Evidence, step: RecordedStep) -> Iterator[Finding]:
    """Yield the activation of a critic: its mean scores of some samples are made larger, of others smaller."""
    scores: dict[str, list[tuple[Node, int]]] = {}
    for node in step.operations:
        source, signs = step.behind(node), step.signs.get(node.id, set())
        is_score = node.name == "mean" and len(signs) == 1 and node.outputs and not node.outputs[0].shape
        if is_score and source is not None and source.kind == "op" and _CUTS_OFF.fullmatch(source.name):
            scores.setdefault(step.owner(source), []).append((source, next(iter(signs))))
    for name, found in scores.items():
        source, _ = found[0]
        if {sign for _, sign in found} == {-1, 1} and name and math.prod((shape_of(source) or (2, 2))[1:]) == 1:
            verdict = (
                f"the loss is a difference of mean scores from the {source.name} in {step.place(source)}, which limits "
                "the scores of the critic"
            )
            yield replace(found_in(evidence, name, verdict), why=_WHY_SCORES, next=_NEXT_SCORES)
            return


_WHY_SCORES = "The scores of a critic have no ends. An activation has hardly a gradient where the critic is sure."
_NEXT_SCORES = "Give the output of the last linear layer as the score, or use a loss for probabilities."
_WHY_UNFIT = (
    "These numbers are no probabilities: a clamp has no gradient where it cuts off, and the sigmoids of several "
    "classes do not add up to 1."
)
_NEXT_UNFIT = "Use a softmax for one of several classes and a sigmoid for one of two, or a loss that takes logits."
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
    entropy = _lowered_entropy(step)
    if entropy is not None:
        verdict = f"the loss of the policy has its entropy, computed in {step.place(entropy)}, with a positive sign"
        found_entropy = found_in(evidence, step.owner(entropy), f"{verdict}: training makes it smaller")
        yield replace(found_entropy, why=_WHY_ENTROPY, next=_NEXT_ENTROPY)
    if (rewarded := _punished_actions(step)) is not None:
        node, name = rewarded
        verdict = f"training makes the log-probability of actions × {name} in {step.place(node)} smaller"
        found_actions = found_in(evidence, step.owner(node), f"{verdict}: the loss has the wrong sign")
        yield replace(found_actions, why=_WHY_PUNISHED, next=_NEXT_PUNISHED)
    if found and all(is_wrong for _, is_wrong in found):
        (node, _), *_ = found
        what = "log-probability of the targets" if node.name == "gather" else f"{node.name} of predictions and targets"
        verdict = f"training makes the {what} in {step.place(node)} {'smaller' if node.name == 'gather' else 'larger'}"
        yield found_in(evidence, step.owner(node), f"{verdict}: the loss has the wrong sign")


_WHY_PUNISHED = "What is rewarded most becomes least likely."
_NEXT_PUNISHED = "Return -(log_prob × rewards).mean()."
_REWARDS = re.compile(r"(discounted_)?(rewards?|returns?|advantages?|advs?)")
_SIGN_KEPT = ("mean", "std", "var", "div", "add", "sqrt", "sub")  # of rewards that are standardized


def _punished_actions(step: RecordedStep) -> tuple[Node, str] | None:
    """Return the product of log-probabilities of actions and rewards of the batch that a loss makes smaller."""
    for node in step.operations:
        sources = step.sources(node) if node.name == "mul" and step.signs.get(node.id) == {1} else []
        for one, other in _both(sources) if len(sources) == 2 else ():
            if not _chosen(step, one) or step.roots[other.id] != {"input"}:
                continue
            before = [other, *(step.graph[each] for each in step.ancestors(other))]
            names = {_own_name(each) for each in before if each.kind == "input"}
            flips = [each for each in before if each.kind == "op" and not _keeps_sign(step, each)]
            if len(names) == 1 and _REWARDS.fullmatch(name := names.pop()) and not flips:
                return node, name
    return None


def _own_name(node: Node) -> str:
    """Return the name of a tensor of the batch in it, such as ``rewards`` of ``batch.rewards``."""
    return re.split(r"[.\[]", node.name)[-1].strip("]'\"").lower()


def _keeps_sign(step: RecordedStep, node: Node) -> bool:
    """Return True for an operation that leaves the order of rewards as it is."""
    if node.name == "sub":  # of their mean from the rewards, and not of the rewards from it
        return len(sources := step.sources(node)) < 2 or sources[0].name != "mean"
    return node.name in _SIGN_KEPT or keeps_values(node) or (factor_of(node) or 0.0) > 0


_WHY_ENTROPY = "The entropy is a bonus that keeps the policy exploring. Made smaller, it leads to one action early."
_NEXT_ENTROPY = "Subtract the entropy: policy_loss - coefficient × entropy."


def _lowered_entropy(step: RecordedStep) -> Node | None:
    """Return the product of probabilities and their logarithms that a loss of a policy makes larger."""
    products = [each for each in step.operations if each.name == "mul" and step.signs.get(each.id) == {-1}]
    pairs = [(each, *sources) for each in products if len(sources := step.sources(each)) == 2]
    # The policy's gradient: log-probabilities of the actions times numbers without a gradient.
    chosen = [
        _logits(step, gathered)
        for _, *two in pairs
        for one, other in _both(two)
        if (gathered := _chosen(step, one)) and other.id not in step.trained
    ]
    for node, *two in pairs:
        for one, other in _both(two):
            while one.name in _CLAMPS and step.sources(one):
                one = step.sources(one)[0]
            if step.made_by(other).name != "softmax" or not _is_log_probability(step, one):
                continue
            # The probabilities of a teacher, and the outputs for other samples, make no entropy of the policy.
            own = _logits(step, one)
            if _is_same(step, own, _logits(step, other)) and any(_is_same(step, own, each) for each in chosen):
                return node
    return None


def _logits(step: RecordedStep, node: Node) -> Node:
    """Return what the probabilities of a node, or their logarithms, are computed from."""
    node = step.made_by(node)
    while node.name in ("gather", "log", "add", *_CLAMPS) and (inner := step.behind(node)):
        node = inner
    while (node.name == "softmax" or _is_log_probability(step, node)) and (inner := step.behind(node)):
        node = inner
    return node


def _both(two: list[Node]) -> list[tuple[Node, Node]]:
    return [(two[0], two[1]), (two[1], two[0])]


def _chosen(step: RecordedStep, node: Node) -> Node | None:
    """Return the selection of the log-probabilities of actions that a node is; None if it is something else."""
    node = step.made_by(node)
    while node.name == "getitem" or keeps_values(node):
        node = next(iter(step.sources(node)), node)
        if node.kind != "op":
            return None
    sources = step.sources(node) if node.name == "gather" else []
    return node if sources and _is_log_probability(step, step.made_by(sources[0])) else None


def _is_log_probability(step: RecordedStep, node: Node) -> bool:
    """Return True for log_softmax, the logarithm of a softmax, and logits minus their logsumexp."""
    if node.name == "log":
        inner = step.behind(node)
        while inner is not None and inner.name in ("add", *_CLAMPS):
            inner = step.behind(inner)
        return inner is not None and inner.name == "softmax"
    return node.name == "log_softmax" or (
        node.name == "sub" and [each.name for each in step.sources(node)][1:] == ["logsumexp"]
    )


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
    false_alarms="Any operation between the product and the loss but a constant factor counts as a scale, and two or "
    "three classes are few.",
    needs=(GRAPH,),
    is_lasting=True,
)
def cosine_logits(evidence: Evidence, *, share: float = 0.3) -> Iterator[Finding]:
    """Yield the losses that get cosines as logits, with the least loss that these can have."""
    step = step_of(evidence)
    for node in step.operations:
        shape, source = shape_of(node), step.behind(node) if node.name == "cross_entropy" else None
        scale = 1.0
        while source is not None and (factor := factor_of(source) or 0.0) > 0:
            scale, source = scale * factor, step.behind(source)
        if source is None or source.kind != "op" or not shape or len(shape) < 2:
            continue
        if _is_product_with_itself(step, source):
            verdict = (
                f"{node.name} in {step.place(node)} gets the products of all pairs of the same {shape[0]} vectors as "
                "logits, and those of each vector with itself are among them"
            )
            yield replace(found_in(evidence, step.owner(source), verdict), why=_WHY_PAIRS, next=_NEXT_PAIRS)
            return
        factors = [step.made_by(each).name for each in step.sources(source)]
        is_cosine = source.name in ("matmul", "mm", "linear", "einsum", "__matmul__") and factors == ["normalize"] * 2
        least, guess = math.log(1 + (shape[1] - 1) * math.exp(-2 * scale)), math.log(shape[1])
        if (is_cosine or source.name == "cosine_similarity") and least > share * guess:
            cosines = "cosines" if scale == 1 else f"cosines × {scale:.3g}"
            verdict = (
                f"{node.name} in {step.place(node)} gets {cosines} as logits of {shape[1]} classes: it cannot fall "
                f"below {least:.3g}, and is {guess:.3g} for a guess"
            )
            yield found_in(evidence, step.owner(source), verdict, least=least, guess=guess)
            return


_WHY_PAIRS = "No vector is as similar to another one as to itself, so that the largest logit is always a wrong one."
_NEXT_PAIRS = "Leave out the diagonal: logits.fill_diagonal_(-inf), or masked_fill with torch.eye(n)."


def _is_product_with_itself(step: RecordedStep, node: Node) -> bool:
    """Return True for the product of a matrix with itself transposed."""
    sources = [step.made_by(each) for each in step.sources(node)]
    is_product = node.name in ("matmul", "mm", "linear", "__matmul__")
    # The two parts of chunk, split and unbind are different vectors.
    is_one = len(sources) == 2 and sources[0] is sources[1] and len(sources[0].outputs) == 1
    return is_product and is_one and sources[0].kind == "op"


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
    "focal-weight",
    statistic="what the weight of a focal loss, a power of a probability, is computed from and multiplied with",
    usual="(1 - p)^gamma for each sample, multiplied with log p",
    why="The weight must be small where the prediction is right, sample by sample. Otherwise the loss attends to what "
    "the model already knows, or weights nothing.",
    next='Compute the loss with reduction="none", p = exp(-loss), and the mean of (1 - p)^gamma × loss.',
    false_alarms="Only weights that are multiplied with the logarithm of the same probability, or with the mean loss "
    "that they were computed from, count.",
    needs=(GRAPH,),
    is_lasting=True,
)
def focal_weight(evidence: Evidence) -> Iterator[Finding]:
    """Yield the weights of a focal loss that grow with the probability, and those of the mean of a batch."""
    step = step_of(evidence)
    for node in step.operations:
        sources = step.sources(node) if node.name in ("mul", "__mul__", "__rmul__") else []
        if len(sources) != 2 or node.id not in step.trained:
            continue
        for weight, term in _both(sources):
            what = _weight_of_mean(step, weight, term)
            if _is_power_of_same(step, weight, term):
                what = "a power of the probability whose logarithm it multiplies: what is predicted well weighs most"
            if what:
                verdict = f"the weight of the loss in {step.place(node)} is {what}"
                yield found_in(evidence, step.owner(node), verdict)
                return


def _is_power_of_same(step: RecordedStep, weight: Node, term: Node) -> bool:
    """Return True for a power of a probability and the logarithm of the same."""
    power, logarithm = step.made_by(weight), step.made_by(term)
    one, other = step.behind(power), step.behind(logarithm)
    if power.name not in ("pow", "__pow__", "square") or logarithm.name != "log" or one is None or other is None:
        return False
    names = {step.graph[each].name for each in step.ancestors(other)} | {other.name}
    return bool(names & {"sigmoid", "softmax"}) and _is_same(step, one, other)


def _weight_of_mean(step: RecordedStep, weight: Node, term: Node) -> str:
    """Describe a weight, computed with p = exp(-loss), if that loss is the mean of several samples; empty otherwise."""
    loss = step.made_by(term)
    is_mean = loss.name in LOSSES and loss.outputs and not loss.outputs[0].shape and shape_of(loss)
    if not is_mean or math.prod(shape_of(loss, 1) or (2,)) <= 1 or weight.id not in step.trained:
        return ""
    before = [step.graph[each] for each in step.ancestors(weight)]
    exponents = [source.name for each in before if each.name == "exp" for source in step.sources(each)]
    is_of_mean = loss in before and "neg" in exponents
    return f"computed from the mean {loss.name} of the batch: all samples have the same" if is_of_mean else ""


@rule(
    "no-log-softmax",
    statistic="function that makes the input of nll_loss, ctc_loss or kl_div, and the target of kl_div",
    usual="log_softmax; softmax for the target of kl_div",
    why="The loss expects logarithms of probabilities. Other numbers make it fall without bound.",
    next="Apply log_softmax before the loss; for classes, use cross_entropy in place of nll_loss.",
    false_alarms="None known.",
    needs=(GRAPH,),
    explains=dict.fromkeys(("exploding-gradient", "weight-drift", "sudden-change"), _ANY),
    is_lasting=True,
)
def no_log_softmax(evidence: Evidence) -> Iterator[Finding]:
    """Yield the losses whose prediction is no logarithm of probabilities, or whose target has no probabilities."""
    step = step_of(evidence)
    for node in step.operations:
        if node.name not in ("nll_loss", "ctc_loss", "kl_div"):
            continue
        for place, side in enumerate(step.sources(node)[: 2 if node.name == "kl_div" else 1]):
            source = step.made_by(side)
            while source.name in ("mul", "div") and len(inner := step.sources(source)) == 1:  # a temperature
                source = step.made_by(inner[0])
            if source.kind == "op" and source.name in ("linear", "conv1d", "conv2d", "conv3d"):
                what = f"{node.name} in {step.place(node)} gets the output of the {source.name} in {step.place(source)}"
                found = found_in(evidence, step.owner(source), f"{what} as its target" if place else what)
                yield replace(found, why=_WHY_TARGET, next=_NEXT_TARGET) if place else found
                return


_WHY_TARGET = "The target of kl_div is a probability, or its logarithm with log_target=True."
_NEXT_TARGET = "Apply softmax to the target, or log_softmax and pass log_target=True."


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
    """Yield a finding if a loss only pulls outputs of the same layers together, and they become alike.

    So does a loss whose target follows from the outputs of the same layers, as that of a value of the next state, and
    that of a policy whose advantage has the gradient of the value.
    """
    step = step_of(evidence)
    yield from _own_target(evidence, step)
    yield from _own_baseline(evidence, step)
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


def _own_target(evidence: Evidence, step: RecordedStep) -> Iterator[Finding]:
    """Yield the squared errors whose target is a number of the batch plus the best output of the same layer."""
    for node in step.operations:
        sources = step.sources(node)
        if node.name not in ELEMENTWISE or len(sources) < 2 or sources[1].id not in step.trained:
            continue
        total = step.made_by(sources[1])
        terms = [each for each in step.sources(total) if "parameter" in step.roots[each.id]]
        given = [each for each in step.sources(total) if step.roots[each.id] == {"input"}]
        if total.name.strip("_") not in ("add", "radd") or len(terms) != 1 or not given:
            continue
        best = terms[0]
        while best.name in ("mul", "__mul__", "__rmul__", "getitem") or keeps_values(best):
            best = next((each for each in step.sources(best) if "parameter" in step.roots[each.id]), best)
        predicted = step.behind(node)
        while predicted is not None and predicted.name in ("gather", "getitem", "sum", "select"):
            predicted = step.behind(predicted)
        layer = step.behind(best) if best.name in ("max", "amax", "min", "amin") else None
        if layer is not None and predicted is not None and step.owner(layer) == step.owner(predicted) != "":
            verdict = (
                f"the target of {node.name} in {step.place(node)} follows from the {best.name} of the outputs of "
                f"{step.owner(layer)}, which also predicts, and is not detached: the loss also moves the target"
            )
            yield replace(found_in(evidence, step.owner(layer), verdict), why=_WHY_OWN, next=_NEXT_OWN)
            return


def _own_baseline(evidence: Evidence, step: RecordedStep) -> Iterator[Finding]:
    """Yield the products of log-probabilities of actions and a difference that trains its own estimate."""
    estimates = {step.made_by(step.sources(each)[0]): each for each in step.operations if each.name in ELEMENTWISE}
    for node in step.operations:
        sources = step.sources(node) if node.name == "mul" and step.signs.get(node.id) == {-1} else []
        for one, other in _both(sources) if len(sources) == 2 else ():
            terms = step.sources(step.made_by(other)) if step.made_by(other).name in _DIFFERENCES else []
            estimate = next((step.made_by(each) for each in terms if each.id in step.trained), None)
            is_baseline = len(terms) == 2 and sum(each.id in step.trained for each in terms) == 1
            if not is_baseline or estimate not in estimates or not _chosen(step, one):
                continue
            # The gradients of the estimate may be set to zero before its own optimizer makes a step.
            passes = _optimizers(step, node), _optimizers(step, estimates[estimate])
            if all(passes) and passes[0].isdisjoint(passes[1]):
                continue
            while (estimate.name == "getitem" or keeps_values(estimate)) and step.sources(estimate):
                estimate = step.sources(estimate)[0]
            name = step.owner(estimate)
            verdict = (
                f"the loss of the policy in {step.place(node)} also trains {name}, whose estimate it subtracts: the "
                "advantage is not detached"
            )
            yield replace(found_in(evidence, name, verdict), why=_WHY_BASELINE, next=_NEXT_BASELINE)
            return


def _optimizers(step: RecordedStep, term: Node) -> set[int]:
    """Return the ids of the optimizers that use the gradients of a term of a loss."""
    known = [each for each in step.graph.nodes if each.kind == "optimizer"]
    return {each.id for each in known if any(term.id in step.ancestors(source) for source in step.sources(each))}


@rule(
    "end-ignored",
    statistic="tensor of the batch that marks the ends of episodes, where a target is a reward plus the value of the "
    "next state",
    usual="the value of the next state is multiplied with 1 - done",
    why="The value that a network gives to the state after the end of an episode counts, although nothing follows.",
    next="Multiply the value of the next state with 1 - done: reward + gamma × (1 - done) × value.",
    false_alarms="Only a tensor that no operation uses counts, with a name such as done or terminated, or the only one "
    "of truth values or of numbers 0 and 1 in a batch without names. One that is zero in all records marks no end. A "
    "value that is multiplied with another tensor of the batch, such as a discount, and that of the predicted state "
    "are left out.",
    needs=(GRAPH,),
    is_lasting=True,
)
def end_ignored(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if the target of a value does not depend on whether the episode has ended."""
    step = step_of(evidence)
    inputs = [node for node in evidence.graph.nodes if node.kind == "input" and node.outputs]
    ends = [node for node in inputs if _ENDS.fullmatch(_own_name(node))]
    # Without names, it is the only one of truth values, or of numbers 0 and 1 that nothing uses.
    unnamed = [node for node in inputs if _own_name(node).isdigit() and _marks(evidence, node)]
    unnamed = [node for node in unnamed if node.outputs[0].dtype == "bool" or not step.users(node)]
    ends = ends or unnamed[: len(unnamed) == 1]
    if not ends or any(step.users(node) for node in ends):
        return
    marks, _ = evidence.view(evidence.losses, "", ends[0].name).column("max")
    if len(marks) and not marks.any():
        return  # no episode has ended, as in tasks that go on for ever
    for node in step.operations:
        sources = step.sources(node)
        if node.name not in ELEMENTWISE or len(sources) < 2 or sources[1].id in step.trained:
            continue
        total = step.made_by(sources[1])
        terms = step.sources(total) if total.name.strip("_") in ("add", "radd", "iadd") else []
        values = [each for each in terms if "parameter" in step.roots[each.id]]
        if len(terms) == 2 and len(values) == 1 and any(step.roots[each.id] == {"input"} for each in terms):
            # Another tensor, such as the opposite of done, may mark the ends.
            is_marked = any(_marks(evidence, step.graph[each]) for each in step.ancestors(values[0]))
            if is_marked or _is_weighted(step, values[0]) or _has_no_other_state(step, values[0], sources[0]):
                continue
            verdict = (
                f"nothing uses {ends[0].name}, and the target of {node.name} in {step.place(node)} has the value of "
                "the next state also after the end of an episode"
            )
            yield found_in(evidence, step.owner(node), verdict)
            return


def _is_weighted(step: RecordedStep, value: Node) -> bool:
    """Return True if a value is multiplied with a tensor of the batch, such as a discount that is 0 at an end."""
    todo = [value]
    for node in todo:
        sources = step.sources(node) if node.name in _WEIGHTS or keeps_values(node) else []
        if any(step.roots[each.id] == {"input"} for each in sources):
            return True
        todo += sources
    return False


def _has_no_other_state(step: RecordedStep, value: Node, predicted: Node) -> bool:
    """Return True if a value is that of the predicted state: an advantage plus it is a return."""
    inputs = {node.id for node in step.graph.nodes if node.kind == "input"}
    return inputs & step.ancestors(value) <= step.ancestors(predicted)


_WEIGHTS = ("mul", "__mul__", "__rmul__", "mul_", "where", "masked_fill", "masked_fill_")


def _marks(evidence: Evidence, node: Node) -> bool:
    """Return True for a tensor of the batch with truth values, or with one number per sample that is 0 or 1."""
    if node.kind != "input" or not node.outputs:
        return False
    names = ("min", "max", "mean", "rms")
    (least, most, mean, size), _ = evidence.view(evidence.losses, "", node.name).columns(*names)
    is_column = math.prod(node.outputs[0].shape[1:]) == 1 and len(least) > 0
    # Numbers that are 0 or 1 are equal to their squares.
    is_binary = is_column and least.min() == 0 and most.max() == 1 and np.allclose(mean, size**2, atol=1e-6)
    return node.outputs[0].dtype == "bool" or bool(is_binary)


_ENDS = re.compile(r"((is|next|episode)_?)?(dones?|terminals?|terminated|terminations?)")

_WHY_BASELINE = "The estimate moves to where the loss of the policy is small, rather than to the return."
_NEXT_BASELINE = "Detach it in the loss of the policy: advantage = returns - values.detach()."
_WHY_OWN = "A target is meant to be a constant of the step. With a gradient, training also moves it to the prediction."
_NEXT_OWN = "Compute the target under torch.no_grad(), with a copy of the network that follows it slowly."


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
        source = step.probabilities.get(node.id)
        if source is not None and source.name in ("sigmoid", "sigmoid_") and shape and shape[-1] == 1:
            verdict = (
                f"the cross-entropy in {step.place(node)} is that of several classes, and gets the single output of "
                f"the {source.name} in {step.place(source)}"
            )
            yield found_in(evidence, step.owner(source), verdict)
            return
        if node.name not in ("softmax", "log_softmax") or not shape:
            continue
        dimension = softmax_dimension(node)
        # Attention to a single position, and a mixture of one component, are intended.
        if dimension is None or shape[dimension] != 1 or not any(map(step.is_loss, step.readers(node))):
            continue
        value = "0" if node.name == "log_softmax" else "1"
        verdict = (
            f"the {node.name} in {step.place(node)} runs over dimension {dimension} of {listed(shape)}, which has one "
            f"entry: its output is always {value}, and no gradient passes it"
        )
        yield found_in(evidence, step.owner(node), verdict)
        return


@rule(
    "compared-with-itself",
    statistic="operations behind both sides of a difference, a quotient or a loss",
    usual="they differ",
    why="The result is a constant, so that neither it nor its gradient depends on the model.",
    next="Use the stored values for one side, such as the log-probabilities of the policy that acted, another view, or "
    "the output of the student beside that of the teacher.",
    false_alarms="Sides of which one has a gradient, sides without one that do not follow from a single output, and "
    "those with random operations, such as dropout, are left out.",
    needs=(GRAPH,),
    is_lasting=True,
)
def compared_with_itself(evidence: Evidence) -> Iterator[Finding]:
    """Yield the comparisons of two equal expressions, both of which have a gradient."""
    step = step_of(evidence)
    for node in step.operations:
        sources = step.sources(node) if node.name in _COMPARES or node.name in LOSSES else []
        if (origin := _common_origin(step, node, sources)) is not None:
            verdict = (
                f"both sides of the {node.name} in {step.place(node)}, a term of the loss, follow from the same output "
                f"of {step.owner(origin)} alone, and have no gradient"
            )
            yield found_in(evidence, step.owner(origin), verdict)
            return
        if len(sources) != 2 or not all(each.id in step.trained for each in sources) or sources[0] is sources[1]:
            continue
        if _is_same(step, sources[0], sources[1]):
            verdict = f"both sides of the {node.name} in {step.place(node)} are the same function of the same tensors"
            yield found_in(evidence, step.owner(node), verdict)
            return


def _common_origin(step: RecordedStep, node: Node, sources: list[Node]) -> Node | None:
    """Return the layer whose output both sides of a term of the loss follow from, if no gradient passes it."""
    if len(sources) != 2 or not step.signs.get(node.id) or any(each.id in step.trained for each in sources):
        return None
    origins = set()
    for each in sources:
        while each.kind == "op" and len(inner := step.sources(each)) == 1:
            (each,) = inner
        origins.add(each)
    (origin,) = origins if len(origins) == 1 else (node,)
    # A cross-entropy of a teacher with itself turns that of the student with the teacher into a divergence.
    targets = {
        each
        for other in step.operations
        if other.name in LOSSES and other.id in step.trained
        for each in step.sources(other)[1:2]
    }
    if sources[1] in targets:
        return None
    return origin if origin is not node and "parameter" in step.roots[origin.id] and step.owner(origin) else None


_COMPARES = ("sub", "__sub__", "div", "__truediv__", "cosine_similarity")
_FRESH = re.compile(
    r".*dropout.*|rand.*|.*normal.*|bernoulli.*|multinomial|rrelu|.*noise.*|poisson|exponential_|rnn.*|lstm|gru"
)


def _is_same(step: RecordedStep, one: Node, other: Node) -> bool:
    """Return True if two nodes are the same tensor, or the same function of such tensors."""
    todo = [(one, other)]
    seen = set()
    while todo:
        pair = todo.pop()
        left, right = pair
        if left is right or (left.id, right.id) in seen:
            continue
        seen.add((left.id, right.id))
        is_alike = left.kind == right.kind == "op" and (left.name, left.arguments) == (right.name, right.arguments)
        sources = step.sources(left), step.sources(right)
        if not is_alike or _FRESH.fullmatch(left.name) or left.note != right.note or len(sources[0]) != len(sources[1]):
            return False
        # The places of a result with several tensors are not known, and a constant tensor may be another one.
        if not sources[0] or len(left.outputs) != 1 or left.outputs != right.outputs:
            return False
        todo += zip(*sources, strict=True)
    return True


@rule(
    "derivative-without-graph",
    statistic="use of torch.autograd.grad without create_graph in a term of the loss",
    usual="create_graph=True, so that the term has a gradient",
    why="The derivative is a constant for the backward pass, so that this term moves no parameter.",
    next="Pass create_graph=True to torch.autograd.grad, or detach the derivative if it is meant to be constant.",
    false_alarms="Derivatives that a layer gets, as in adversarial training, that change a parameter or that weight a "
    "term are left out.",
    needs=(GRAPH,),
    is_lasting=True,
)
def derivative_without_graph(evidence: Evidence) -> Iterator[Finding]:
    """Yield the derivatives that a loss gets without their own gradient."""
    step = step_of(evidence)
    for node in evidence.graph.nodes:
        if node.kind != "backward" or "create_graph" not in node.note:
            continue
        todo, seen = step.users(node), set[int]()
        while todo:
            user = todo.pop()
            is_layer = any(each.kind == "parameter" for each in step.sources(user))
            # The weight of a term may follow from derivatives, and is a constant then.
            is_weight = user.name in ("mul", "div") and any(each.id in step.trained for each in step.sources(user))
            if user.id in seen or is_layer or is_weight or user.name.startswith("detach"):
                continue
            if step.signs.get(user.id):
                verdict = (
                    f"a term of the loss in {step.place(user)} has a derivative that was computed without create_graph"
                )
                yield found_in(evidence, "", verdict)
                return
            seen.add(user.id)
            todo += step.users(user)
