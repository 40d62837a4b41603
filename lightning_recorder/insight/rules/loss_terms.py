"""Rules about the terms that add up to a loss: their signs, weights and derivatives."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace

from lightning_recorder.graph.model import Node
from lightning_recorder.insight.evidence import Evidence
from lightning_recorder.insight.finding import MAXIMIZED, Finding
from lightning_recorder.insight.recorded_step import (
    LOSSES,
    RecordedStep,
    factor_of,
    found_in,
    keeps_values,
    shape_of,
    step_of,
)
from lightning_recorder.insight.rule import GRAPH, rule
from lightning_recorder.insight.rules.losses import CLAMPS

_ANY = ("any",)


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
_SIGN_KEPT = ("mean", "std", "var", "div", "add", "sqrt", "sub")  # functions that standardize rewards


def _punished_actions(step: RecordedStep) -> tuple[Node, str] | None:
    """Return a product of action log-probabilities and rewards, if the loss minimizes the product; otherwise None."""
    for node in step.operations:
        sources = step.sources(node) if node.name == "mul" and step.signs.get(node.id) == {1} else []
        for one, other in both_ways(sources) if len(sources) == 2 else ():
            if not chosen_action(step, one) or step.roots[other.id] != {"input"}:
                continue
            before = [other, *(step.graph[each] for each in step.ancestors(other))]
            names = {own_name(each) for each in before if each.kind == "input"}
            flips = [each for each in before if each.kind == "op" and not _keeps_sign(step, each)]
            if len(names) == 1 and _REWARDS.fullmatch(name := names.pop()) and not flips:
                return node, name
    return None


def own_name(node: Node) -> str:
    """Return the last part of a batch tensor's name, such as ``rewards`` for ``batch.rewards``."""
    return re.split(r"[.\[]", node.name)[-1].strip("]'\"").lower()


def _keeps_sign(step: RecordedStep, node: Node) -> bool:
    """Return True for an operation that keeps the order of rewards."""
    if node.name == "sub":  # True for rewards minus their mean, not for the mean minus rewards
        return len(sources := step.sources(node)) < 2 or sources[0].name != "mean"
    return node.name in _SIGN_KEPT or keeps_values(node) or (factor_of(node) or 0.0) > 0


_WHY_ENTROPY = "The entropy is a bonus that keeps the policy exploring. Made smaller, it leads to one action early."
_NEXT_ENTROPY = "Subtract the entropy: policy_loss - coefficient × entropy."


def _lowered_entropy(step: RecordedStep) -> Node | None:
    """Return a product of probabilities and their logarithms that a policy loss maximizes."""
    products = [each for each in step.operations if each.name == "mul" and step.signs.get(each.id) == {-1}]
    pairs = [(each, *sources) for each in products if len(sources := step.sources(each)) == 2]
    # The policy gradient: log-probabilities of actions times numbers without a gradient.
    chosen = [
        _logits(step, gathered)
        for _, *two in pairs
        for one, other in both_ways(two)
        if (gathered := chosen_action(step, one)) and other.id not in step.trained
    ]
    for node, *two in pairs:
        for one, other in both_ways(two):
            while one.name in CLAMPS and step.sources(one):
                one = step.sources(one)[0]
            if step.made_by(other).name != "softmax" or not _is_log_probability(step, one):
                continue
            # Products with a teacher's probabilities, or across samples, are not the entropy of the policy.
            own = _logits(step, one)
            if _is_same(step, own, _logits(step, other)) and any(_is_same(step, own, each) for each in chosen):
                return node
    return None


def _logits(step: RecordedStep, node: Node) -> Node:
    """Return the node with the logits from which probabilities, or their logarithms, are computed."""
    node = step.made_by(node)
    while node.name in ("gather", "log", "add", *CLAMPS) and (inner := step.behind(node)):
        node = inner
    while (node.name == "softmax" or _is_log_probability(step, node)) and (inner := step.behind(node)):
        node = inner
    return node


def both_ways(two: list[Node]) -> list[tuple[Node, Node]]:
    """Return two nodes in both orders, for a commutative product."""
    return [(two[0], two[1]), (two[1], two[0])]


def chosen_action(step: RecordedStep, node: Node) -> Node | None:
    """Return the node that selects the log-probabilities of actions, if ``node`` has its values; otherwise None."""
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
        while inner is not None and inner.name in ("add", *CLAMPS):
            inner = step.behind(inner)
        return inner is not None and inner.name == "softmax"
    return node.name == "log_softmax" or (
        node.name == "sub" and [each.name for each in step.sources(node)][1:] == ["logsumexp"]
    )


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
    """Yield focal-loss weights that grow with the probability, and weights computed from the mean loss of a batch."""
    step = step_of(evidence)
    for node in step.operations:
        sources = step.sources(node) if node.name in ("mul", "__mul__", "__rmul__") else []
        if len(sources) != 2 or node.id not in step.trained:
            continue
        for weight, term in both_ways(sources):
            what = _weight_of_mean(step, weight, term)
            if _is_power_of_same(step, weight, term):
                what = "a power of the probability whose logarithm it multiplies: what is predicted well weighs most"
            if what:
                verdict = f"the weight of the loss in {step.place(node)} is {what}"
                yield found_in(evidence, step.owner(node), verdict)
                return


def _is_power_of_same(step: RecordedStep, weight: Node, term: Node) -> bool:
    """Return True if one node is a power and the other the logarithm of the same probability."""
    power, logarithm = step.made_by(weight), step.made_by(term)
    one, other = step.behind(power), step.behind(logarithm)
    if power.name not in ("pow", "__pow__", "square") or logarithm.name != "log" or one is None or other is None:
        return False
    names = {step.graph[each].name for each in step.ancestors(other)} | {other.name}
    return bool(names & {"sigmoid", "softmax"}) and _is_same(step, one, other)


def _weight_of_mean(step: RecordedStep, weight: Node, term: Node) -> str:
    """Describe a focal weight computed from p = exp(-loss) with the mean loss of several samples; otherwise empty."""
    loss = step.made_by(term)
    is_mean = loss.name in LOSSES and loss.outputs and not loss.outputs[0].shape and shape_of(loss)
    if not is_mean or math.prod(shape_of(loss, 1) or (2,)) <= 1 or weight.id not in step.trained:
        return ""
    before = [step.graph[each] for each in step.ancestors(weight)]
    exponents = [source.name for each in before if each.name == "exp" for source in step.sources(each)]
    is_of_mean = loss in before and "neg" in exponents
    return f"computed from the mean {loss.name} of the batch: all samples have the same" if is_of_mean else ""


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
    """Yield the comparisons of two equal expressions that both have a gradient."""
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
    """Return the layer from which both inputs of a loss term are computed, if no gradient passes the term."""
    if len(sources) != 2 or not step.signs.get(node.id) or any(each.id in step.trained for each in sources):
        return None
    origins = set()
    for each in sources:
        while each.kind == "op" and len(inner := step.sources(each)) == 1:
            (each,) = inner
        origins.add(each)
    (origin,) = origins if len(origins) == 1 else (node,)
    # The entropy of a teacher's output is intended: subtracting it turns the cross-entropy of student and teacher into
    # a divergence.
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
    """Return True if two nodes are the same tensor, or the same function of the same tensors."""
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
        # Nodes with several outputs do not count, since the graph does not show which output is used. Nodes without
        # sources are constants, which may differ.
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
    "term are left out, and so are those of a function without parameters, such as a schedule.",
    needs=(GRAPH,),
    is_lasting=True,
)
def derivative_without_graph(evidence: Evidence) -> Iterator[Finding]:
    """Yield the derivatives in a loss that were computed without ``create_graph=True``."""
    step = step_of(evidence)
    for node in evidence.graph.nodes:
        if node.kind != "backward" or "create_graph" not in node.note or "parameter" not in step.roots[node.id]:
            continue
        todo, seen = step.users(node), set[int]()
        while todo:
            user = todo.pop()
            is_layer = any(each.kind == "parameter" for each in step.sources(user))
            # A weight of a term may be computed from derivatives. It is a constant, so it needs no graph.
            is_weight = user.name in ("mul", "div", "multiply", "divide") and any(
                each.id in step.trained for each in step.sources(user)
            )
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
