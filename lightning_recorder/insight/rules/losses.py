"""Rules about the inputs of loss functions: shapes, logits and probabilities."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from lightning_recorder.graph.model import Node
from lightning_recorder.insight.evidence import Evidence
from lightning_recorder.insight.finding import Finding
from lightning_recorder.insight.recorded_step import (
    BINARY,
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

_CUTS_OFF = re.compile(r"(relu|hardtanh|relu6|softplus|sigmoid|hardsigmoid|tanh)_?")  # activations with a limited range
CLAMPS = ("clamp", "clip", "clamp_", "clip_")
_NO_PROBABILITY = re.compile(r"(relu|relu6|softplus|tanh|hardtanh)_?|linear|conv\dd")
_NO_PROBABILITIES = re.compile(rf"sigmoid_?|{_NO_PROBABILITY.pattern}")  # no distribution over several classes
_POWERS = ("pow", "square", "abs", "__pow__")  # the functions of a difference in a loss written as a formula
DIFFERENCES = ("sub", "__sub__", "__rsub__", "rsub")


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
    """Yield losses whose prediction and target are broadcast against each other, and sample weights times a mean."""
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
    """Return the shape of per-target weights that are multiplied with the mean of a loss; None if there are none."""
    targets = shape_of(loss, 1)
    if loss.name not in LOSSES or not targets or not loss.outputs or loss.outputs[0].shape:
        return None
    for user in step.users(loss):
        sources = step.sources(user)
        if user.name.strip("_") not in ("mul", "rmul", "imul") or len(sources) != 2:
            continue
        weights = sources[0] if sources[1] is loss else sources[1]
        shape = weights.outputs[0].shape if weights.outputs else ()
        # Only weights of the batch count. An output of the model may be an uncertainty that scales a loss.
        if shape in (targets, targets[:1]) and shape[0] > 1 and step.roots[weights.id] == {"input"}:
            return shape
    return None


_WHY_PARTS = "The norm runs over one dimension, so that the whole gradient of a sample gets far larger than 1."
_NEXT_PARTS = "Flatten the gradient first: grad.flatten(1).norm(2, dim=1)."


def _norms_of_entries(step: RecordedStep, node: Node) -> Shape | None:
    """Return the shape of the gradient norms in a gradient penalty, if there is more than one norm per sample."""
    shape = node.outputs[0].shape if node.outputs else ()
    gradient = step.behind(node) if "norm" in node.name else None
    if gradient is None or gradient.kind != "backward" or sum(size > 1 for size in shape) < 2:
        return None
    # A field has one value for each point, and one gradient norm for each value, which is intended.
    value = next(iter(step.sources(gradient)), gradient)
    value = (step.behind(value) or value) if value.name == "sum" else value
    if not value.outputs or math.prod(value.outputs[0].shape) == math.prod(shape):
        return None
    ones = [each for each in step.users(node) if each.name in DIFFERENCES and setting(each, "other") in ("1", "1.0")]
    squares = [user for each in ones for user in step.users(each) if user.name in _POWERS]
    return shape if any(step.signs.get(each.id) for each in squares) else None


def _is_error(step: RecordedStep, node: Node) -> bool:
    """Return True for a difference of prediction and target that broadcasts by mistake, in a hand-written loss."""
    sources = step.sources(node)
    one, other = (shape_of(node), shape_of(node, 1)) if len(node.inputs) == 2 else (None, None)
    if node.name not in DIFFERENCES or len(sources) != 2 or not one or not other:
        return False
    # Only a column and a vector with the same samples count; other missing dimensions may be intended.
    if not 1 < one[0] == other[0] or {one, other} != {(one[0],), (one[0], 1)}:
        return False
    # Differences of all pairs of predictions, as in a ranking loss, are intended.
    predicts = ["parameter" in step.roots[each.id] for each in sources]
    is_given = any("input" in step.roots[each.id] for each, one in zip(sources, predicts, strict=True) if not one)
    if sorted(predicts) != [False, True] or not is_given:
        return False
    powers = [each for each in step.users(node) if each.name in _POWERS]
    sums = [user for each in powers for user in step.users(each)]
    return any(each.name in ("mean", "sum") and each.outputs and not each.outputs[0].shape for each in sums)


def _broadcast(one: Shape, other: Shape) -> Shape:
    """Return the shape to which torch broadcasts two shapes."""
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
    """Yield the activations that limit the range of logits or scores."""
    step = step_of(evidence)
    yield from _cut_off_scores(evidence, step)
    for node in step.operations:
        source = step.behind(node)
        if node.name == "binary_cross_entropy" or node.id in step.probabilities:
            source = step.probabilities.get(node.id, source)
            while source is not None and source.name in (*CLAMPS, "getitem", "select"):
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
    """Yield the activation after a critic, whose mean scores are raised for some samples and lowered for others."""
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
    """Return an active dropout between the last layer and a loss, skipping changes of shape."""
    node = next(iter(step.sources(loss)), None)
    while node is not None and keeps_values(node):
        is_off = "False" in (setting(node, "training"), setting(node, "train")) or setting(node, "p") in ("0", "0.0")
        if "dropout" in node.name and not is_off:
            return node
        node = next(iter(step.sources(node)), None)
    return None


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
    """Yield the losses whose logits are multiplied by the same number twice."""
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
    """Yield the losses that get cosines as logits, with the smallest loss that cosines allow."""
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
    """Return True for the product of a matrix and its own transpose."""
    sources = [step.made_by(each) for each in step.sources(node)]
    is_product = node.name in ("matmul", "mm", "linear", "__matmul__")
    # A node with several outputs, such as chunk, split or unbind, does not count, since the factors may be different
    # outputs.
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
    """Yield the overlap losses, such as Dice, that get negative numbers instead of probabilities."""
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
    """Return the nodes of an expression in a loss, up to layers and inputs."""
    found, todo = [], [node]
    while todo:
        found.append(todo.pop())
        if found[-1].name in ("sum", "add", "sub", "mul", "pow", "clamp", *_POWERS) or keeps_values(found[-1]):
            todo += [each for each in step.sources(found[-1]) if each not in found]
    return found


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
    """Yield losses whose prediction is not a log-probability, or whose target is not a probability."""
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


_ONE_SIDED = (*BINARY, "cross_entropy", "kl_div", "nll_loss", "poisson_nll_loss")
_PROBABILITIES = ("softmax", "sigmoid", "sigmoid_", "exp")


@rule(
    "exchanged-sides",
    statistic="what the first and the second argument of a loss that is not symmetric depend on",
    usual="the first on the parameters, the second on the batch alone",
    why="The first argument of these losses is the prediction, and the second one the target. Exchanged, the loss has "
    "another least value, or none.",
    next="Exchange the arguments: criterion(prediction, target).",
    false_alarms="Losses that compare two outputs of a model are left out, and outputs that are valid targets, such as "
    "the probabilities of a student that are compared with the logits of a teacher in the batch.",
    needs=(GRAPH,),
    explains=dict.fromkeys(
        ("output-range", "weight-drift", "sudden-change", "exploding-gradient", "norm-growth", "constant-target"), _ANY
    ),
    is_lasting=True,
)
def exchanged_sides(evidence: Evidence) -> Iterator[Finding]:
    """Yield losses whose target is an output of the model, while their prediction is a tensor of the batch."""
    step = step_of(evidence)
    for node in step.operations:
        sides = step.sources(node)[:2]
        is_given = node.name in _ONE_SIDED and len(sides) == 2 and step.roots[sides[0].id] == {"input"}
        is_wrong = is_given and sides[1].id in step.trained and not _is_target(step, node, sides[1])
        if is_wrong and step.signs.get(node.id):
            verdict = (
                f"{node.name} in {step.place(node)} gets a tensor of the batch as its prediction, and the output of "
                "the model as its target: the arguments are exchanged"
            )
            yield found_in(evidence, step.owner(node), verdict)
            return


def _is_target(step: RecordedStep, node: Node, output: Node) -> bool:
    """Return True if a loss can take an output of the model as its target, as in the reverse of a divergence."""
    made = step.made_by(output).name
    if node.name == "kl_div":
        return made in _PROBABILITIES or (made == "log_softmax" and setting(node, "log_target") == "True")
    return node.name in ("cross_entropy", "binary_cross_entropy_with_logits") and made in _PROBABILITIES


@rule(
    "one-class",
    statistic="size of the dimension of a softmax whose output a loss gets, and number of classes of cross_entropy",
    usual="at least two entries",
    why="Probabilities of a single class add up to 1, whatever the input is.",
    next="Use binary_cross_entropy_with_logits for one output, or one output for each class.",
    false_alarms="Attention to one position, whose output no loss gets directly.",
    needs=(GRAPH,),
    explains=dict.fromkeys(("gradient-stops", "does-not-move", "double-activation", "constant-input"), _ANY),
    is_lasting=True,
)
def one_class(evidence: Evidence) -> Iterator[Finding]:
    """Yield each softmax over a single entry, and each cross-entropy of a single class."""
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
        if node.name == "cross_entropy" and shape and shape[1 if len(shape) > 1 else 0] == 1:
            verdict = (
                f"cross_entropy in {step.place(node)} gets logits {listed(shape)} of a single class, whose probability "
                "is always 1: the loss is 0, and no gradient passes it"
            )
            yield found_in(evidence, step.owner(node), verdict)
            return
        if node.name not in ("softmax", "log_softmax") or not shape:
            continue
        dimension = softmax_dimension(node)
        # Only a softmax before a loss counts: attention to a single position and a mixture of one component are fine.
        if dimension is None or shape[dimension] != 1 or not any(map(step.is_loss, step.readers(node))):
            continue
        value = "0" if node.name == "log_softmax" else "1"
        verdict = (
            f"the {node.name} in {step.place(node)} runs over dimension {dimension} of {listed(shape)}, which has one "
            f"entry: its output is always {value}, and no gradient passes it"
        )
        yield found_in(evidence, step.owner(node), verdict)
        return
