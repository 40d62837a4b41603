"""Rules about targets that the model computes: outputs for other views, values of next states, and baselines."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from lightning_recorder.graph.model import Node
from lightning_recorder.insight.evidence import Evidence, View
from lightning_recorder.insight.finding import Finding
from lightning_recorder.insight.recorded_step import (
    ELEMENTWISE,
    RecordedStep,
    found_in,
    keeps_values,
    setting,
    step_of,
)
from lightning_recorder.insight.rule import GRAPH, rule
from lightning_recorder.insight.rules.loss_terms import both_ways, chosen_action, own_name
from lightning_recorder.insight.rules.losses import DIFFERENCES
from lightning_recorder.names import Site

_ANY = ("any",)

# The functions of a loss that pulls two views together. Others, such as a variance, may push samples apart.
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
    """Yield a finding if a loss only pulls outputs of the same layers together, and the outputs become alike.

    Also yield losses whose target is computed with a gradient by the same layers, such as the value of the next state,
    and policy losses whose advantage passes a gradient to the value.
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
    # Each layer must have two or more outputs in the loss. All must have a gradient, and there must be no other terms.
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
    """Yield the losses whose target is a tensor of the batch plus the largest output of the same layer."""
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
    """Yield products of action log-probabilities and an advantage whose value estimate gets a gradient from them."""
    estimates = {step.made_by(step.sources(each)[0]): each for each in step.operations if each.name in ELEMENTWISE}
    for node in step.operations:
        sources = step.sources(node) if node.name == "mul" and step.signs.get(node.id) == {-1} else []
        for one, other in both_ways(sources) if len(sources) == 2 else ():
            terms = step.sources(step.made_by(other)) if step.made_by(other).name in DIFFERENCES else []
            estimate = next((step.made_by(each) for each in terms if each.id in step.trained), None)
            is_baseline = len(terms) == 2 and sum(each.id in step.trained for each in terms) == 1
            if not is_baseline or estimate not in estimates or not chosen_action(step, one):
                continue
            # With separate optimizers, the gradients of the estimate may be set to zero before its optimizer steps.
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
    "equal-views",
    "note",
    statistic="mean, std, smallest and largest value of two inputs that the same layer gets in a step",
    usual="different ones",
    why="Both views are the same tensor, so that the loss compares each sample with itself; or one has the values of "
    "the other in another order, such as a reversed sequence or exchanged samples.",
    next="Draw an augmentation for each view: transform(x), transform(x).",
    false_alarms="The statistics do not show the order of the values, so it is a note. Inputs that are also the target "
    "of a loss, and steps with dropout, which makes the two outputs of the same input differ, are left out.",
    needs=("activations", GRAPH),
    records=4,
    is_lasting=True,
)
def equal_views(evidence: Evidence) -> Iterator[Finding]:
    """Yield two inputs of the batch that have equal statistics in all records and pass the same layers."""
    step = step_of(evidence)
    if any("dropout" in node.name and setting(node, "p") not in ("0", "0.0") for node in step.operations):
        return
    sides = [side for node in step.operations if step.is_loss(node) for side in step.sources(node)]
    targets = {each for side in sides if step.roots[side.id] == {"input"} for each in (side.id, *step.ancestors(side))}
    readers: dict[int, list[Node]] = {}
    for node in step.operations:
        sources, first = step.sources(node), step.behind(node)
        weight = next((each for each in sources if each.kind == "parameter"), None)
        if weight is not None and first is not None and first.kind == "input":
            readers.setdefault(weight.id, []).append(first)
        elif node.name in ("cat", "stack") and node.id < step.last_layer:
            readers[node.id] = [each for each in map(step.made_by, sources) if each.kind == "input"]
    for inputs in filter(None, readers.values()):
        one, other = (View(evidence, evidence.losses, Site("", each.name)) for each in (inputs[0], inputs[-1]))
        columns, steps = one.columns("mean", "std", "min", "max")
        others, _ = other.columns("mean", "std", "min", "max")
        if (
            targets & {each.id for each in inputs}  # an autoencoder, or a sequence that is copied
            or one.site == other.site
            or len(steps) < equal_views.records
            or not columns[1].all()
            or one.shape != other.shape
        ):
            continue
        if all(np.array_equal(*pair) for pair in zip(columns, others, strict=True)):
            verdict = f"{one.path} and {other.path} have the same mean, std and ends in all {len(steps)} records"
            yield replace(one.found(verdict, "std"), module="", path="")
            return


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
    """Yield a finding if the target of a value ignores that an episode has ended."""
    step = step_of(evidence)
    inputs = [node for node in evidence.graph.nodes if node.kind == "input" and node.outputs]
    ends = [node for node in inputs if _ENDS.fullmatch(own_name(node))]
    # Without names, the end marks are the only tensor that is boolean, or unused with values 0 and 1.
    unnamed = [node for node in inputs if own_name(node).isdigit() and _marks(evidence, node)]
    unnamed = [node for node in unnamed if node.outputs[0].dtype == "bool" or not step.users(node)]
    ends = ends or unnamed[: len(unnamed) == 1]
    if not ends or any(step.users(node) for node in ends):
        return
    marks, _ = evidence.view(evidence.losses, "", ends[0].name).column("max")
    if len(marks) and not marks.any():
        return  # no episode has ended in the records, as in tasks without an end
    for node in step.operations:
        sources = step.sources(node)
        if node.name not in ELEMENTWISE or len(sources) < 2 or sources[1].id in step.trained:
            continue
        total = step.made_by(sources[1])
        terms = step.sources(total) if total.name.strip("_") in ("add", "radd", "iadd") else []
        values = [each for each in terms if "parameter" in step.roots[each.id]]
        if len(terms) == 2 and len(values) == 1 and any(step.roots[each.id] == {"input"} for each in terms):
            # Another tensor may mark the ends, such as the negation of done.
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
    """Return True if a value is multiplied by a tensor of the batch, such as a discount that is 0 at the end."""
    todo = [value]
    for node in todo:
        sources = step.sources(node) if node.name in _WEIGHTS or keeps_values(node) else []
        if any(step.roots[each.id] == {"input"} for each in sources):
            return True
        todo += sources
    return False


def _has_no_other_state(step: RecordedStep, value: Node, predicted: Node) -> bool:
    """Return True if a value is of the predicted state itself: added to an advantage, such a value gives a return."""
    inputs = {node.id for node in step.graph.nodes if node.kind == "input"}
    return inputs & step.ancestors(value) <= step.ancestors(predicted)


_WEIGHTS = ("mul", "__mul__", "__rmul__", "mul_", "where", "masked_fill", "masked_fill_")


def _marks(evidence: Evidence, node: Node) -> bool:
    """Return True for a tensor of the batch that is boolean, or has one number per sample that is 0 or 1."""
    if node.kind != "input" or not node.outputs:
        return False
    names = ("min", "max", "mean", "rms")
    (least, most, mean, size), _ = evidence.view(evidence.losses, "", node.name).columns(*names)
    is_column = math.prod(node.outputs[0].shape[1:]) == 1 and len(least) > 0
    # If all numbers are 0 or 1, they equal their squares, so the mean equals the mean square.
    is_binary = is_column and least.min() == 0 and most.max() == 1 and np.allclose(mean, size**2, atol=1e-6)
    return node.outputs[0].dtype == "bool" or bool(is_binary)


_ENDS = re.compile(r"((is|next|episode)_?)?(dones?|terminals?|terminated|terminations?)")
_WHY_BASELINE = "The estimate moves to where the loss of the policy is small, rather than to the return."
_NEXT_BASELINE = "Detach it in the loss of the policy: advantage = returns - values.detach()."
_WHY_OWN = "A target is meant to be a constant of the step. With a gradient, training also moves it to the prediction."
_NEXT_OWN = "Compute the target under torch.no_grad(), with a copy of the network that follows it slowly."
