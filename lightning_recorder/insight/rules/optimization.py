"""Rules about parameters and their updates."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache

import numpy as np

from lightning_recorder.graph.model import OTHER_PARAMETERS, Node
from lightning_recorder.insight.evidence import Evidence, View, spread
from lightning_recorder.insight.finding import Finding
from lightning_recorder.insight.module_edges import is_position
from lightning_recorder.insight.recorded_step import LOSSES, RecordedStep, keeps_values, setting, step_of
from lightning_recorder.insight.rule import GRAPH, rule
from lightning_recorder.insight.rules.gradients import left_by_package
from lightning_recorder.insight.rules.held_parts import held_parts
from lightning_recorder.records.table import Floats

_NORMS_OF_WEIGHTS = ("weight_g", "parametrizations.weight.original0")


@rule(
    "not-in-optimizer",
    statistic="parameters that require gradients and take part in no optimizer step",
    usual="each module that gets gradients is in an optimizer",
    why="The list of parameters that the optimizer was given lacks this module.",
    next="Give the optimizer the parameters of the whole model, or a group for this module: see configure_optimizers.",
    false_alarms="A module that another library updates.",
    needs=("parameters",),
    explains={"not-in-optimizer": ("any",), "never-trained": ("any",)},
    is_lasting=True,
)
def not_in_optimizer(evidence: Evidence) -> Iterator[Finding]:
    """Yield the parameters that have a gradient but are in no optimizer."""
    trained = {site.name for site in evidence.gradients.places}
    updated = {each.module for each in evidence.tensors if each.update}
    steps = [node for node in evidence.graph.nodes if node.kind == "optimizer" and node.note != OTHER_PARAMETERS]
    for name, why in evidence.missing:  # known after the first record
        if why.startswith("no step") and name not in updated and (name in trained or not trained):
            view = evidence.view(evidence.parameters, name)
            if steps and not updated:
                verdict = f"the {steps[0].name} that steps is none of the optimizers that the training was set up with"
                yield replace(view.found(verdict), why=_WHY_OWN, next=_NEXT_OWN)
            else:
                yield view.found(f"{name} gets gradients, but no optimizer that stepped has its parameters")
    # Biases may be left out of the records. The parameter groups show whether the optimizer has more parameters.
    known = sum(int(group.get("parameters", 0)) for group in evidence.parameters.about.get("groups") or ())
    dimensions = 1 if 0 < known <= len(evidence.tensors) else 2
    left_out = [each for each in _left_out(evidence, dimensions) if each.note != "frozen"]
    if left_out:
        yield _about_left_out(evidence, left_out, "is used, but no optimizer that stepped has it")


_WHY_OWN = (
    "An optimizer is made in the training step or beside configure_optimizers. One that each step makes anew loses its "
    "momentum, and no schedule and no checkpoint has it."
)
_NEXT_OWN = "Return the optimizer from configure_optimizers, and use self.optimizers() in the training step."


@rule(
    "two-optimizers",
    "note",
    statistic="number of steps of each parameter in a record, and the number of parameters in all groups",
    usual="each parameter is in one optimizer",
    why="The generator's optimizer also got the discriminator, or the list of one optimizer is all of the model.",
    next="Look at configure_optimizers: each optimizer should have the parameters that its loss is to change.",
    false_alarms="An encoder that two losses train on purpose, as in an adversarial autoencoder. So it is a note.",
    needs=("parameters",),
    records=2,
)
def two_optimizers(evidence: Evidence, *, persistence: int = 2) -> Iterator[Finding]:
    """Yield a note about parameters that two optimizers update in the same training steps.

    Such a parameter has twice its number of values in each record, and the optimizer groups list it twice.
    """
    table, tensors = evidence.parameters, evidence.tensors
    sizes = np.array([max(1, each.numel) for each in tensors], dtype=np.float64)
    counts = table.get("count")[:, [table.places[each.site] for each in tensors]] / sizes
    counts = counts[(counts > 0).all(axis=1)]  # the records with all parameters
    if len(counts) < persistence or not tensors:
        return
    steps = counts / counts.min(axis=1, keepdims=True)
    are_twice = (steps == 2).all(axis=0)
    shared = [each for each, is_twice in zip(tensors, are_twice, strict=True) if is_twice]
    more = sum(int(group.get("parameters", 0)) for group in table.about.get("groups") or ()) - len(tensors)
    # A discriminator may take two steps for each step of the generator.
    if shared and len(shared) == more and (are_twice | (steps == 1).all(axis=0)).all():
        names = [each.name for each in shared]
        what = f"{names[0]} and {more - 1} other parameters" if more > 2 else " and ".join(names)
        verdict = f"two optimizers step {what} in the same training steps"
        modules = dict.fromkeys(each.module for each in shared if each.module != shared[0].module)
        yield shared[0].found(verdict, others=tuple(modules), parameters=more)


def _left_out(evidence: Evidence, dimensions: int = 2) -> list[Node]:
    """Return the used parameters that were not recorded, in modules with other parameters that have a gradient.

    Only parameters with at least ``dimensions`` dimensions count; weights have two or more.
    """
    recorded = {each.name for each in evidence.tensors}
    trained = {each.module for each in evidence.tensors if each.gradient}
    nodes = [node for node in evidence.graph.nodes if node.kind == "parameter"]
    nodes = [node for node in nodes if node.outputs and len(node.outputs[0].shape) >= dimensions]
    nodes = [node for node in nodes if recorded.isdisjoint((node.name, *node.tied))]
    return list({node.name: node for node in nodes if node.name.rpartition(".")[0] in trained}.values())


def _about_left_out(evidence: Evidence, nodes: list[Node], what: str) -> Finding:
    modules = list(dict.fromkeys(node.name.rpartition(".")[0] for node in nodes))
    verdict = f"{nodes[0].name} {what}, while other parameters of {modules[0]} are trained"
    view = evidence.view(evidence.parameters, modules[0])
    return view.found(verdict, others=tuple(modules[1:]), parameters=len(nodes))


_TRAINED = ("weight", "bias")  # the usual names of trained parameters


@rule(
    "frozen",
    statistic="modules none of whose parameters requires a gradient",
    usual="no module is frozen, or the first layers in fine-tuning (a note)",
    why="requires_grad_(False) on the wrong module, or a freeze that was not undone.",
    next="Look for requires_grad; call requires_grad_(True) before configure_optimizers.",
    false_alarms="Fine-tuning freezes the first layers or most layers, which is a note, as is a parameter that a class "
    "of an installed package fixes.",
    needs=("parameters",),
    explains={"unlike-siblings": ("same",)},
    is_lasting=True,
)
def frozen(evidence: Evidence, *, share: float = 0.34) -> Iterator[Finding]:
    """Yield the parameters without ``requires_grad`` in a model with trained parameters."""
    # Position encodings are often fixed sines, and the norm of a normalized weight may be fixed on purpose.
    parts = [each for each in _left_out(evidence) if each.note == "frozen" and not is_position(each.name)]
    parts = [each for each in parts if not each.name.endswith(_NORMS_OF_WEIGHTS)]
    if parts:
        found = _about_left_out(evidence, parts, "is frozen")
        # Some fine-tuning methods train only the biases.
        is_few = len(parts) < share * (len(parts) + len(evidence.weights))
        why = "Fine-tuning of a part of the parameters."
        # A class of a package may fix a parameter, such as a permutation. Weights and biases are usually trained.
        split = [each.name.rpartition(".") for each in parts]
        if all(left_by_package(evidence, owner) and name not in _TRAINED for owner, _, name in split):
            is_few, why = False, "A class of an installed package has it, and fixes it."
        yield found if is_few else replace(found, severity="note", why=why)
    names = [name for name, why in evidence.missing if why.startswith("frozen")]
    in_optimizer = {each.module for each in evidence.tensors}
    trained = {each.module for each in evidence.tensors if each.gradient}
    if not names or not in_optimizer:
        return
    order = evidence.wiring.order
    names.sort(key=lambda name: order.get(name, -1))
    first = min((order[name] for name in trained if name in order), default=0)
    last = max((order[name] for name in trained if name in order), default=0)
    # Fine-tuning freezes the first layers or most layers.
    inside = [name for name in names if first < order.get(name, -1) < last and name in order]
    inside = [name for name in inside if trained & evidence.wiring.downstream(name) and not is_position(name)]
    count, others = len(names) + len(in_optimizer), tuple(names[1:])
    if inside and len(names) < share * count:
        verdict = f"{inside[0]} is frozen, but layers before and after it are trained"
        yield evidence.view(evidence.parameters, inside[0]).found(verdict, others=others, frozen=len(names))
    else:
        step = step_of(evidence)
        ends = [step.behind(node) for node in step.operations if node.name in LOSSES]
        heads = [step.owner(each) for each in ends if each is not None and each.id in step.trained]
        head = next((each for each in heads if each in names), "")
        held = held_parts(evidence)
        # All other layers of the path are trained or loaded. A model that is random as a whole may be so on purpose.
        if head and list(held.get("as_made", ())) == [head] and (in_optimizer or held.get("learned")):
            verdict = f"{head}, from which the loss gets its prediction, is frozen with the values of an initialization"
            yield evidence.view(evidence.parameters, head).found(verdict, others=(), frozen=len(names))
            return
        verdict = f"{len(names)} of {count} modules with parameters are frozen"
        norms = [evidence.output(name) for name in names if "BatchNorm" in evidence.type_of(name)]
        moving = [each.module for each in norms if len(each.rms) and not len(each.eval_mode)]
        verdict += (
            f", also {head}, from which the loss gets its prediction: if it is new, it stays random" if head else ""
        )
        if moving:
            many = f" and {len(moving) - 1} others are" if len(moving) > 1 else " is"
            verdict += f"; {moving[0]}{many} in training mode, so that the running statistics move"
        found = evidence.view(evidence.parameters, names[0]).found(verdict, others=others, frozen=len(names))
        moving = [step.owner(node) for node in step.operations if _moves_statistics(step, node)]
        if moving:
            verdict += f", and {moving[0]} normalizes with the statistics of the batch and changes its running ones"
            found = replace(found, verdict=verdict, next=_NEXT_MOVING)
        yield replace(found, severity="note", why=_WHY_MOVING if moving else "Fine-tuning of a part of the model.")


_WHY_MOVING = "A BatchNorm whose parameters are frozen is still in training mode, so that the frozen part changes."
_NEXT_MOVING = "Call eval() on the frozen part in on_train_epoch_start, after Lightning has called train()."


def _moves_statistics(step: RecordedStep, node: Node) -> bool:
    """Return True for a BatchNorm with frozen parameters that is in training mode."""
    sources = step.sources(node) if node.name == "batch_norm" and setting(node, "training") == "True" else []
    weights = [each for each in sources if each.kind == "parameter"]
    return (
        bool(weights)
        and all("frozen" in each.note for each in weights)
        and any(each.kind == "buffer" for each in sources)
    )


@rule(
    "copy-does-not-follow",
    statistic="factors of a frozen parameter and of a trained one in the average of both that the step computes",
    usual="two numbers between 0 and 1 that add up to 1, such as 0.99 and 0.01",
    why="The momentum of the average is 1, or one sign is wrong, so that the copy stays or moves away.",
    next="Look at the factors: copy = momentum × copy + (1 - momentum) × weight, with a momentum below 1.",
    false_alarms="Copies that are meant to stay, as of a reference model, are in no average.",
    needs=(GRAPH,),
    explains={"copy-stays": ("any",)},
    is_lasting=True,
)
def copy_does_not_follow(evidence: Evidence, *, rounding: float = 1e-6) -> Iterator[Finding]:
    """Yield a finding if a weighted average does not move a frozen copy towards its trained parameter."""
    step = step_of(evidence)
    known: dict[int, dict[int, float]] = {
        node.id: {node.id: 1.0} for node in evidence.graph.nodes if node.kind in ("parameter", "buffer")
    }
    found: dict[str, tuple[Node, float, float]] = {}
    for node in step.operations:
        factors = known[node.id] = _factors(node, [known.get(each.id, {}) for each in step.sources(node)])
        of_copy, of_weight = (
            [each for each in factors if _is_copy(evidence.graph[each]) is it] for it in (True, False)
        )
        if len(of_copy) != 1 or len(of_weight) != 1 or node.id in step.trained:
            continue
        copy, own, other = evidence.graph[of_copy[0]], factors[of_copy[0]], factors[of_weight[0]]
        found.pop(copy.name, None)
        if abs(own + other - 1) < rounding and own > 1 - rounding:
            found[copy.name] = node, own, other
    for name, (node, own, other) in list(found.items())[:1]:
        sign, what = ("-", "moves away from it") if other < 0 else ("+", "does not follow it")
        verdict = (
            f"{step.place(node)} computes {own:.4g} × {name} {sign} {abs(other):.4g} × the trained parameter: the copy "
            f"{what}"
        )
        modules = list(dict.fromkeys(each.rpartition(".")[0] for each in found))
        view = evidence.view(evidence.parameters, modules[0])
        yield view.found(verdict, others=tuple(modules[1:]), own=own, other=other, parameters=len(found))


def _is_copy(node: Node) -> bool:
    return node.kind == "buffer" or node.note == "frozen"


def _factors(node: Node, given: list[dict[int, float]]) -> dict[int, float]:
    """Return the factor of each parameter in a result; empty if the result is not a weighted sum of parameters."""
    weight, alpha, operand = (_number(setting(node, name)) for name in ("weight", "alpha", "other"))
    alpha = 1.0 if alpha is None else alpha
    one, other = (*given, {}, {})[:2]
    kind = node.name.strip("_")
    if not one or len(given) > 2:
        return {}
    if len(given) == 2 and other:
        if kind == "copy":
            return other
        scale = {"add": alpha, "sub": -alpha, "lerp": weight}.get(kind)
        if scale is None:
            return {}
        rest = 1.0 - scale if kind == "lerp" else 1.0
        return {each: rest * one.get(each, 0.0) + scale * other.get(each, 0.0) for each in {**one, **other}}
    if kind in ("mul", "rmul", "div", "truediv") and operand is not None:
        scale = operand if "mul" in kind else 1 / operand if operand else np.inf
        return {each: scale * value for each, value in one.items()}
    return one if keeps_values(node) or kind in ("detach", "data") else {}


def _number(text: str) -> float | None:
    with suppress(ValueError):
        return float(text)
    return None


@rule(
    "no-longer-tied",
    statistic="mean, rms, least and largest value of the weights of an embedding and of a last linear layer, in the "
    "first record",
    usual="they differ, or both layers have one tensor",
    why="The weight was copied where it should be shared, or was replaced after it was shared, so that both are "
    "trained apart.",
    next="Assign the parameter itself: head.weight = embedding.weight, after the last line that replaces one of them.",
    false_alarms="Layers of the same class, such as deep copies and moving averages. All four numbers must be equal to "
    "the bit, and both weights must have a gradient.",
    needs=("parameters", GRAPH),
    records=1,
    is_lasting=True,
)
def no_longer_tied(evidence: Evidence, *, numel: int = 64) -> Iterator[Finding]:
    """Yield the last layers whose weight begins with the values of an embedding, but is another tensor."""
    begun: dict[tuple[float, ...], View] = {}
    weights = [
        each for each in evidence.weights if each.kind == "Embedding" or (each.kind == "Linear" and each.is_last)
    ]
    trained = [each for each in weights if each.numel >= numel and each.gradient.rms.any()]
    # Read one statistic of all weights at a time, since a history caches the arrays of only a few statistics.
    columns = [[each.column(name)[0] for each in trained] for name in ("mean", "rms", "min", "max")]
    for each, *values in zip(trained, *columns, strict=True):
        if not all(map(len, values)) or values[2][0] == values[3][0]:  # both may be constant, such as zero
            continue
        first = begun.setdefault((*each.shape, *(float(column[0]) for column in values)), each)
        if first.kind != each.kind:
            layer, embedding = (each, first) if each.is_last else (first, each)
            verdict = f"{layer.name} begins with the values of {embedding.name}, and is another tensor"
            yield layer.found(verdict, "rms", others=(embedding.module,))


@rule(
    "constant-weight",
    statistic="std of a weight with two or more dimensions",
    usual="std and rms of a weight are about equal",
    why="A constant initialization: all units of the layer stay equal.",
    next="Initialize with random values.",
    false_alarms="Layers that begin at zero and leave it with the first step.",
    needs=("parameters",),
    records=2,
    explains={
        "constant-weight": ("any",),
        "unlike-siblings": ("any",),
        "gradient-stops": ("upstream", "same"),
        "dead-output": ("same", "downstream"),
        "norm-ineffective": ("downstream",),
    },
)
def constant_weight(
    evidence: Evidence, *, persistence: int = 2, std: float = 1e-4, fewest: int = 4, share: float = 0.5
) -> Iterator[Finding]:
    """Yield the weights whose values are all equal."""
    zeros = [each for each in evidence.weights if each.numel >= fewest and _stays_zero(each, persistence)]
    if len(zeros) > max(1.0, share * len(evidence.weights)):
        verdict = f"{zeros[0].name} and {len(zeros) - 1} of {len(evidence.weights) - 1} other weights are zero, and no "
        verdict += "gradient passes them"
        yield zeros[0].found(verdict, "rms", others=tuple(each.module for each in zeros[1:]), zeros=len(zeros))
    for each in evidence.weights:
        (values, spreads), _ = each.columns("rms", "std")
        # A weight without a gradient is left out. It may be an unused token, such as one for masks, or it keeps its
        # initial values, such as the zeros of a LoRA, which is another finding.
        biases = [evidence.parameter(each.module, path).gradient for path in ("bias", "in_proj_bias")]
        is_used = any(gradient.rms.any() for gradient in (each.gradient, *biases))
        if len(values) < persistence or each.numel < fewest or not is_used:
            continue
        flat = spreads <= std * values
        if flat[-persistence:].all():
            what = "zero" if values[-1] == 0 else f"equal to {values[-1]:.3g}"
            verdict = f"all values of {each.name} are {what}, so its outputs cannot differ"
            yield each.found(verdict, "std", std=spreads[-1])


def _stays_zero(weight: View, persistence: int) -> bool:
    """Return True for a weight of zeros whose recorded gradient is zero, too."""
    values, gradient = weight.rms, weight.gradient.rms
    return min(len(values), len(gradient)) >= persistence and not values.any() and not gradient.any()


@rule(
    "learning-rate-outlier",
    statistic="rms(update) for Adam, rms(update) / rms(gradient) for SGD, against the other layers",
    usual="0.3 to 3",
    why="The parameter group has a learning rate that is far too high.",
    next="Look at the groups in configure_optimizers; lower the learning rate of this layer.",
    false_alarms="A new head with up to twenty times the rate, if its relative updates stay below 2 %.",
    needs=("parameters",),
    records=3,
    explains=dict.fromkeys(
        (
            "learning-rate-outlier",
            "weight-drift",
            "unlike-siblings",
            "scale-jump",
            "saturation",
            "sudden-change",
            "dead-output",
            "train-differs",
            "vanishing-gradient",
            "gradient-step",
            "exploding-gradient",
        ),
        ("any",),
    ),
)
def learning_rate_outlier(
    evidence: Evidence,
    *,
    persistence: int = 3,
    factor: float = 8.0,
    largest: float = 3.0,
    update_ratio: float = 0.02,
    first: float = 0.2,
    first_records: int = 3,
    fewest: int = 3,
    rate: float = 20.0,
) -> Iterator[Finding]:
    """Yield the parameters whose learning rate or updates differ from those of all others."""
    adaptive = any("exp_avg_sq" in site.path for site in evidence.parameters.places)
    fast = _in_fast_groups(evidence, factor)
    compared = _step_sizes((*evidence.weights, *fast), adaptive, persistence)
    if len(compared) < fewest:
        return
    rates = {each: rates.max() for each in compared if len(rates := each.learning_rate)}
    what = "its updates are" if adaptive else "the ratio of its updates to its gradients is"
    for each, others, usual_rate in _far_above(compared, rates, set(fast), factor, largest):
        above = float(compared[each] / np.median(others))
        is_outlier = above > factor * max(spread(others), 1.0) ** 0.5
        sizes = each.update_ratio
        is_fast = rates.get(each, np.nan) > rate * usual_rate > 0
        is_large = len(sizes) >= persistence and (
            np.median(sizes[1:]) > update_ratio or sizes[:first_records].max() > first
        )
        if is_outlier and (is_fast or is_large):
            is_known = rates.get(each, np.nan) > usual_rate
            instead = f", and its learning rate {rates[each]:.3g} instead of {usual_rate:.3g}" if is_known else ""
            most = sizes[np.isfinite(sizes)].max(initial=0.0)  # infinite for a weight that begins at zero
            verdict = (
                f"a step changes {each.name} by up to {most:.1%} of its size: {what} {above:.3g} × the median "
                f"of the other layers{instead}"
            )
            yield each.found(
                verdict,
                "update_ratio",
                factor=above,
                update_ratio=float(np.median(sizes[1:])) if len(sizes) > 1 else 0.0,
            )


def _far_above(
    compared: Mapping[View, float],
    rates: Mapping[View, float],
    fast: Collection[View],  # a fast weight is not compared with these, such as its own bias
    factor: float,
    most: float,
) -> Iterator[tuple[View, Floats, float]]:
    """Yield the parameters with values far above all others, each with the others' values and median learning rate.

    The values of the other parameters are collected only for these few, since the time would otherwise be quadratic.
    """
    slow_first = sorted((each for each, rate in rates.items() if rate > 0), key=lambda each: rates[each])
    scaled = [factor * rates[each] for each in slow_first]

    @cache
    def known(count: int) -> tuple[list[View], set[View], Floats]:
        # If only a few layers are slower, these layers are the outliers, so the reference is all layers.
        usual = slow_first[:count] if 2 * count >= len(compared) else list(compared)
        sizes = {each: compared[each] for each in usual if each not in fast}
        return usual, set(sizes), np.sort(np.array([0.0, *sizes.values()]))[-2:]

    for each, value in compared.items():
        # The number of parameters with a far lower learning rate, which are in other parameter groups.
        slower = bisect_left(scaled, rates.get(each, 0.0))
        usual, counted, largest = known(slower if 2 * slower >= len(compared) else 0)
        is_largest = each in counted and value == largest[-1]
        if len(counted) > (each in counted) and value > most * largest[-1 - is_largest]:
            usual = [key for key in usual if key is not each]
            others = np.array([compared[key] for key in usual if key in counted])
            yield each, others, float(np.median([rates[key] for key in usual if key in rates] or [np.nan]))


def _step_sizes(parameters: Iterable[View], adaptive: bool, persistence: int) -> dict[View, float]:
    """Return the quantity that an optimizer keeps similar for all parameters.

    For Adam this is the size of the updates, for SGD the ratio of updates and gradients.
    """
    found: dict[View, float] = {}
    for each in parameters:
        update, gradient = each.update.rms, each.gradient.rms
        if min(len(update), len(gradient)) >= persistence and np.median(gradient) > 0 and np.median(update) > 0:
            size, slope = float(np.median(update[1:])), float(np.median(gradient[1:]))
            if min(size, slope) > 0:
                found[each] = size if adaptive else size / slope
    return found


def _in_fast_groups(evidence: Evidence, factor: float) -> list[View]:
    """Return the biases, scales and scalars whose learning rate is far above that of the weights.

    The relative updates of small parameters are large in healthy runs, so small parameters with usual rates are left
    out.
    """
    rates = {each: rates.max() for each in evidence.tensors if len(rates := each.learning_rate)}
    usual = [rates[each] for each in evidence.weights if each in rates]
    if not usual:
        return []
    limit = factor * float(np.median(usual))
    return [each for each, rate in rates.items() if rate > limit and len(each.shape) < 2]


@rule(
    "weight-drift",
    statistic="rms of a weight, last against first record; for shrinking also the share of the updates that point to "
    "zero, for growing also rms √inputs",
    usual="0.8 to 3.5",
    why="A weight decay or a penalty that is too strong (shrinks), or a learning rate that is too high (grows).",
    next="Look at the weight decay and the learning rate of the group, and at the loss.",
    false_alarms="Slow shrinking before a normalization, shrinking of the last layer without weight decay, layers that "
    "begin near zero, weights below 64 values. A last layer may grow while its gradient shrinks: the loss falls.",
    needs=("parameters",),
    records=3,
    explains=dict.fromkeys(
        (
            "weight-drift",
            "unlike-siblings",
            "vanishing-gradient",
            "gradient-step",
            "exploding-gradient",
            "sudden-change",
            "scale-jump",
            "barely-moves",
            "train-differs",
            "running-statistics",
            "norm-ineffective",
            "norm-growth",
        ),
        ("any",),
    ),
)
def weight_drift(
    evidence: Evidence,
    *,
    persistence: int = 3,
    jump: float = 0.8,
    shrink: float = 0.25,
    grow: float = 8.0,
    gain: float = 8.0,
    alignment: float = 0.1,
    numel: int = 64,
    begin: float = 0.05,
    half: float = 0.5,
    settled: float = 0.5,
) -> Iterator[Finding]:
    """Yield the weights that keep growing or shrinking."""
    for each in evidence.weights:
        values, steps = each.column("rms")
        inputs = 1 if "Embedding" in each.kind else np.prod(each.shape[1:])
        if len(values) < persistence or each.numel < numel or values[0] * np.sqrt(inputs) < begin:
            continue  # a layer that begins at zero has to grow, and the rms of few values varies
        ratio = values[-1] / values[0]
        grows = ratio > grow and values[-1] * np.sqrt(inputs) > gain and not _has_settled(each, persistence, settled)
        decay = each.weight_decay
        # Without weight decay, a last layer may shrink because the targets do not depend on its input.
        is_learned = each.is_last and len(decay) > 0 and decay.max() == 0
        if grows or (ratio < shrink and not is_learned and _is_decay(each, alignment, half)):
            way = "grows" if grows else "shrinks"
            because = f", with weight decay {decay.max():.3g}" if not grows and len(decay) and decay.max() > 0 else ""
            span = f"from rms {values[0]:.3g} to {values[-1]:.3g} in {steps[-1] - steps[0]} steps"
            verdict = f"{each.name} {way} {span}{because}"
            found = each.found(verdict, "rms", factor=ratio, first=values[0], last=values[-1])
            why, look = _WHY_GROWS if grows else _WHY_SHRINKS
            yield _as_jump(replace(found, why=why, next=look), each, jump)


_WHY_GROWS = (
    "A learning rate that is too high, or a loss that falls without an end as the weight grows.",
    "Look at the learning rate of the group, and at the loss.",
)
_WHY_SHRINKS = (
    "A weight decay or a penalty of the loss that is too strong.",
    "Look at the weight decay of the group, and at the terms of the loss that contain weights.",
)


def _as_jump(found: Finding, weight: View, jump: float) -> Finding:
    """Add to a finding about a weight if nearly all of the change happened between two records."""
    values, steps = weight.column("rms")
    with np.errstate(all="ignore"):
        changes = np.abs(np.diff(np.log(values)))
        at = int(np.argmax(changes))
        if not changes[at] > jump * abs(np.log(values[-1] / values[0])):
            return found
    span = f"from rms {values[at]:.3g} to {values[at + 1]:.3g} between steps {steps[at]} and {steps[at + 1]}"
    why = "The weight was set or loaded anew, or a single step was far too large."
    look = "Look at the code that writes to the weight, and at the batches and the updates between these steps."
    return replace(found, first_step=int(steps[at + 1]), verdict=f"{weight.name} jumps {span}", why=why, next=look)


def _has_settled(each: View, persistence: int, settled: float) -> bool:
    """Return True for a last layer whose gradient became small while the layer grew.

    A new head on frozen layers has to grow far beyond its initial size if the features hardly differ.
    """
    gradient = each.gradient.rms
    is_known = each.is_last and len(gradient) > persistence
    return is_known and bool(np.median(gradient[-persistence:]) < settled * gradient[0])


def _is_decay(each: View, alignment: float, half: float) -> bool:
    """Return True if the updates mostly point towards zero while the weight shrinks to half of its size.

    Other shrinking does not count: in long trainings, weights before a normalization shrink slowly through updates in
    all directions.
    """
    values, steps = each.column("rms")
    updates = each.update.rms
    if len(updates) != len(values):
        return True  # updates are not recorded
    end = int(np.argmax(values < half * values[0]))
    path = np.sum(np.diff(steps[: end + 1]) * np.maximum(updates[:end], updates[1 : end + 1]))
    return bool((values[0] - values[end]) > alignment * path)
