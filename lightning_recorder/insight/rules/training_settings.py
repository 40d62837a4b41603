"""Rules about settings: learning rate, weight decay, clipping, dropout, the mode of layers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.functions import function_of
from lightning_recorder.graph.model import Node
from lightning_recorder.graph.unused import joined_names
from lightning_recorder.insight.evidence import Evidence, View
from lightning_recorder.insight.finding import Finding
from lightning_recorder.insight.recorded_step import LOSSES, found_in, joined, listed, setting, step_of
from lightning_recorder.insight.rule import GRAPH, VALIDATION, rule
from lightning_recorder.insight.rules.small_updates import FEWEST_VALUES, TOLERANCE, are_new, largest_ratio, total_norms
from lightning_recorder.records.table import Floats

# Optimizers that add weight decay to the gradient and then divide the sum by the gradient's size, such as Adam.
_COUPLED = ("Adam", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop")
_MODAL = ("BatchNorm", "Dropout", "DropPath", "InstanceNorm")  # parts of class names that depend on the mode


@rule(
    "softmax-dimension",
    statistic="mean of the output of a softmax whose last two dimensions are equal, times the size of a dimension",
    usual="1 for one of the last two dimensions",
    why="The argument dim of the softmax is the batch or the heads, so that samples influence each other.",
    next="Pass dim=-1 to the softmax of attention scores.",
    false_alarms="Only scores with two equal last dimensions are examined, and none of those sizes may fit.",
    needs=("activations",),
    records=1,
    explains={
        "softmax-dimension": ("any",),
        "attention-collapse": ("same",),
        "train-differs": ("any",),
        "odd-block": ("same",),
    },
)
def softmax_dimension(evidence: Evidence, *, tolerance: float = 0.01) -> Iterator[Finding]:
    """Yield each softmax of attention scores that runs over another dimension than the last two.

    The mean of the output shows the dimension: it is 1 / the size of the dimension that the softmax runs over.
    """
    means = evidence.medians(evidence.activations, "mean")
    for view in evidence.outputs:
        shape, mean = view.shape, means[view.site]
        if view.kind != "Softmax" or len(shape) < 3 or shape[-1] != shape[-2]:
            continue
        over = [place for place, size in enumerate(shape) if abs(mean * size - 1) < tolerance]
        if over and over[-1] < len(shape) - 2:
            what = "the batch" if over == [0] else f"dimension {over[0]}"
            verdict = (
                f"{view.module} adds up to 1 over {what}, not over the positions: its output of shape {list(shape)} "
                f"has the mean 1/{shape[over[0]]}"
            )
            yield view.found(verdict, "mean", mean=mean, size=shape[over[0]])


@rule(
    "learning-rate-too-large",
    statistic="median update_ratio of the weights",
    usual="1e-4 to 0.02",
    why="The learning rate is far too high for the size of the weights.",
    next="Lower the learning rate of all groups, or warm it up.",
    false_alarms="Weights that begin at zero, weights that a strong weight decay shrinks, and models of a single layer "
    "do not count, nor does the first step of weights that begin far smaller than usual.",
    needs=("parameters",),
    records=3,
    explains=dict.fromkeys(
        (
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
            "gradient-spike",
            "running-statistics",
        ),
        ("any",),
    ),
)
def learning_rate_too_large(
    evidence: Evidence,
    *,
    persistence: int = 3,
    update_ratio: float = 0.15,
    first: float = 0.5,
    shrinks: float = 0.5,
    tiny: float = 0.03,
) -> Iterator[Finding]:
    """Yield a finding if the first step, or every few steps over most of the run, replace most weights."""
    sizes = {
        each: found
        for each in evidence.weights
        if len(found := each.update_ratio) >= persistence
        and not (each.rms[-1:] < shrinks * each.rms[:1]).any()  # such a weight is shrunk by weight decay
    }
    rates = [rate for each in evidence.weights for rate in each.learning_rate]
    # A model with a single linear layer may take large steps, since no later layer depends on its output. Other rules
    # find such a model if the steps are so large that it diverges.
    is_linear = len(evidence.weights) == 1 and evidence.weights[0].is_last
    if not sizes or is_linear:
        return
    known = {"learning_rate": max(rates)} if rates else {}
    later = {each: float(np.median(found[1:])) for each, found in sizes.items()}
    at_first = {
        each: float(found[0])
        for each, found in sizes.items()
        if np.isfinite(found[0]) and not _gain(each) < tiny  # tiny weights need a large first step
    }
    for when, values, limit in (
        ("a step changes", later, update_ratio),
        ("the first step changes", at_first, first),
    ):
        middle = float(np.median(list(values.values()) or [0.0]))
        if middle > limit:
            largest = max(values, key=lambda each: values[each])
            rate = f" (learning rate {max(rates):.3g})" if rates else ""
            verdict = f"{when} the weights by {middle:.1%} of their size{rate}"
            finding = largest.found(verdict, "update_ratio", update_ratio=middle, **known)
            yield finding if rates else replace(finding, why="The steps are far too large for the size of the weights.")
            return


def _gain(weight: View) -> float:
    """Return the factor by which a weight scales independent inputs in the first record; NaN if it is unknown."""
    values = weight.rms
    return float(values[0] * np.sqrt(weight.numel / weight.shape[0])) if len(values) and weight.shape else np.nan


@rule(
    "weight-decay-too-strong",
    statistic="median of learning_rate × weight_decay of a weight",
    usual="1e-6 to 1e-3",
    why="Weight decay is too high for the learning rate: without gradients, the weights halve within 70 steps.",
    next="Lower weight_decay, for AdamW to 0.01 to 0.1.",
    false_alarms="Optimizers that add the decay to a gradient that they normalize, such as Adam, are not examined.",
    needs=("parameters",),
    records=3,
    explains=dict.fromkeys(
        (
            "weight-drift",
            "decayed-norm",
            "unlike-siblings",
            "sudden-change",
            "vanishing-gradient",
            "dead-output",
            "constant-weight",
            "learning-rate-too-large",
            "learning-rate-outlier",
        ),
        ("any",),
    ),
)
def weight_decay_too_strong(evidence: Evidence, *, persistence: int = 3, share: float = 0.01) -> Iterator[Finding]:
    """Yield a finding if weight decay removes a large share of each weight in every step."""
    groups = evidence.parameters.about.get("groups") or ()
    shares: dict[View, float] = {}
    for each in evidence.weights:
        rates, decays = each.learning_rate, each.weight_decay
        if len(rates) == len(decays) >= persistence:
            shares[each] = float(np.median(rates * decays))
    strong = [each for each, removed in shares.items() if removed > share]
    if not strong or any(group.get("optimizer") in _COUPLED for group in groups):
        return
    worst = max(strong, key=lambda each: shares[each])
    decay, rate = (float(np.median(values)) for values in (worst.weight_decay, worst.learning_rate))
    verdict = (
        f"weight decay {decay:.3g} removes {shares[worst]:.1%} of {worst.name} in every step (learning rate {rate:.3g})"
    )
    others = tuple(dict.fromkeys(each.module for each in strong if each is not worst))
    yield worst.found(verdict, "rms", others=others, share=shares[worst], weight_decay=decay, learning_rate=rate)


@rule(
    "decayed-norm",
    "note",
    statistic="mean of the weight of a normalization layer with weight decay, last against first record",
    usual="0.9 to 1.2",
    why="The optimizer decays all parameters in one group.",
    next="Put the parameters of normalization layers and biases into a group with weight_decay=0.",
    false_alarms="Weights that training shrinks by itself: the decay alone must explain a tenth.",
    needs=("parameters",),
    records=3,
)
def decayed_norm(
    evidence: Evidence, *, persistence: int = 3, shrink: float = 0.7, by_decay: float = 0.9
) -> Iterator[Finding]:
    """Yield a note if weight decay has pulled the weights of normalization layers towards zero."""
    found: dict[View, float] = {}
    for each in evidence.tensors:
        values, steps = each.column("mean")
        (decay, rates), _ = each.columns("weight_decay", "learning_rate")
        is_norm = "Norm" in each.kind and each.path == "weight"
        if not is_norm or min(len(values), len(decay), len(rates)) < persistence or not decay.max() > 0:
            continue
        expected = float(np.exp(-np.mean(rates * decay) * (steps[-1] - steps[0])))
        if values[0] > 0 and values[-1] / values[0] < shrink and expected < by_decay:
            found[each] = values[-1] / values[0]
    if found:
        worst = min(found, key=lambda each: found[each])
        decay = worst.weight_decay[-1]
        verdict = f"weight decay {decay:.3g} has shrunk {worst.name} to {found[worst]:.0%} of its initial mean"
        others = tuple(each.module for each in found if each is not worst)
        yield worst.found(verdict, "mean", others=others, factor=found[worst], weight_decay=decay)


@rule(
    "always-clipped",
    "note",
    statistic="smallest norm of all recorded gradients, against gradient_clip_val",
    usual="below 10",
    why="gradient_clip_val is far below the usual norm, so it acts as a factor of the learning rate.",
    next="Compare gradient_clip_val with the norm of the gradients.",
    false_alarms="Adam is not affected by a constant factor. With SGD alone, a factor above 1,000 is a warning. So is "
    "one above 100 if after 10 records most weights are still distributed as in new layers of torch.",
    needs=("parameters",),
    records=3,
    explains=dict.fromkeys(("does-not-move", "barely-moves"), ("any",)),
)
def always_clipped(
    evidence: Evidence,
    *,
    persistence: int = 3,
    factor: float = 50.0,
    sgd: float = 1000.0,
    slow: float = 100.0,
    ratio: float = 1e-4,
    many: int = 10,
    numel: int = FEWEST_VALUES,
    tolerance: float = TOLERANCE,
) -> Iterator[Finding]:
    """Yield a note, or a warning for SGD, if clipping greatly shrinks the gradient in every record."""
    table, limit = evidence.parameters, evidence.parameters.about.get("gradient_clip_val")
    norms = total_norms(evidence)
    by_norm = table.about.get("gradient_clip_algorithm") == "norm"
    if not isinstance(limit, (int, float)) or not limit > 0 or not by_norm or len(norms) < persistence:
        return
    least = float(norms.min() / limit)
    if least > factor:
        verdict = f"clipping to a norm of {limit:.3g} shrinks the gradient of every step, at least {least:.3g}-fold"
        found = evidence.view(table, "").found(verdict, factor=least, limit=limit)
        # Adam is invariant to the scale of the gradient.
        is_sgd = [group.get("optimizer") for group in table.about.get("groups") or ()] == ["SGD"]
        is_slow = least > slow and 0 < largest_ratio(evidence, many) < ratio
        is_large = least > sgd or (is_slow and are_new(evidence, numel, tolerance))
        yield replace(found, severity="warning") if is_sgd and is_large else found


@rule(
    "eval-mode",
    statistic="training flag of normalization and dropout layers in recorded training steps",
    usual="all layers whose neighbors are trained are in training mode",
    why="eval() without train() after it, or a pretrained model that was loaded in eval mode: Lightning keeps it.",
    next="Call train() on the module in on_train_start, unless its dropout and statistics are meant to be off.",
    false_alarms="Frozen layers do not count; detection models keep BatchNorm in eval mode on purpose.",
    needs=("activations", "parameters"),
    records=2,
    explains={
        "running-statistics": ("any",),
        "norm-ineffective": ("same",),
        "train-differs": ("any",),
        "odd-block": ("same",),
    },
)
def eval_mode(evidence: Evidence, *, persistence: int = 2) -> Iterator[Finding]:
    """Yield the layers that are in eval mode in training steps."""
    table = evidence.activations
    if len(table) < persistence:
        return
    trained = {each.module for each in evidence.tensors if each.gradient}
    frozen = {name for name, why in evidence.missing if why.startswith("frozen")}
    last = table.get("eval_mode")[-persistence:] == 1.0
    found = [
        site.name
        for site, place in table.places.items()
        if last[:, place].all() and any(part in evidence.type_of(site.name) for part in _MODAL)
    ]
    found = [name for name in dict.fromkeys(found) if _is_trained(evidence, name, trained, frozen)]
    if found:
        first = next(view for view in evidence.outputs if view.module == found[0])
        more = len(found) - 1
        many = f" and {more} other module{'s' * (more > 1)} are" if more else " is"
        verdict = f"{found[0]}{many} in eval mode in training steps"
        since = int(first.column("eval_mode")[1][0])
        yield first.found(verdict, since=since, others=tuple(found[1:]), modules=len(found))


def _is_trained(evidence: Evidence, name: str, trained: set[str], frozen: set[str]) -> bool:
    """Return True if a module, or the nearest module with parameters before it, is trained.

    A frozen backbone should be in eval mode.
    """
    seen, todo = {name}, [name]
    while todo:
        each = todo.pop()
        if each in trained:
            return True
        if each not in frozen:
            new = [other for other in evidence.wiring.inputs.get(each, ()) if other not in seen]
            seen.update(new)
            todo += new
    return False


@rule(
    "strong-dropout",
    statistic="argument p of a dropout layer or function in train mode, in the recorded graph",
    usual="0 to 0.5",
    why="The share that is kept was passed instead of the share that is dropped, or the value is a typing error.",
    next="Look at the argument p of the layer: it is the share of the inputs that are set to zero.",
    false_alarms="Dropout of whole inputs or labels that a method asks for.",
    needs=(GRAPH,),
    explains={
        "train-differs": ("any",),
        "scale-jump": ("same",),
        "dead-output": ("same",),
        "odd-block": ("same",),
        "unlike-siblings": ("same", "upstream"),
    },
)
def strong_dropout(evidence: Evidence, *, share: float = 0.8) -> Iterator[Finding]:
    """Yield the dropout calls that drop nearly all values."""
    found = {}
    for node in evidence.graph.nodes:
        if node.kind == "op" and re.fullmatch(r"(\w+_)?dropout(\dd)?", node.name):
            arguments = dict(node.arguments)
            # Arguments that equal the defaults of torch are not recorded, so the defaults are filled in here.
            dropped = float(arguments.get("p", "0.5"))
            training = arguments.get("training", arguments.get("train", str("alpha" not in node.name)))
            if share <= dropped < 1 and training == "True":
                found[evidence.graph[node.parent or 0].name] = dropped
    if found:
        name, dropped = next(iter(found.items()))
        kept = f"{100 * dropped:.3g}% of its inputs in training, so that {100 * (1 - dropped):.3g}% are left"
        view = evidence.output(name) or evidence.view(evidence.activations, name)
        others = tuple(other for other in found if other != name)
        yield view.found(f"{name or 'the model'} drops {kept}", "zero_fraction", others=others, share=dropped)


@rule(
    "label-smoothing",
    statistic="argument label_smoothing of cross_entropy, in the recorded graph",
    usual="0 to 0.2",
    why="The share of the true class was passed instead of the share that all classes get, or the value is a typing "
    "error.",
    next="Pass 0.1 or less: a smoothing of 1 gives all classes the same target.",
    false_alarms="None known.",
    needs=(GRAPH,),
    is_lasting=True,
)
def label_smoothing(evidence: Evidence, *, share: float = 0.6) -> Iterator[Finding]:
    """Yield the losses whose label smoothing makes all targets nearly equal."""
    for node in evidence.graph.nodes:
        smoothing = float(dict(node.arguments).get("label_smoothing", 0.0)) if node.name == "cross_entropy" else 0.0
        if smoothing >= share:
            owner = evidence.graph[node.parent or 0].name
            place = f"{owner or 'training_step'} ({node.source})" if node.source else owner or "training_step"
            verdict = f"cross_entropy in {place} spreads {smoothing:.0%} of each target evenly over all classes"
            yield evidence.view(evidence.activations, owner).found(verdict, smoothing=smoothing)
            return


_WHY_TRAINS = "Something called train() after Lightning had called eval(), or kept eval() from the module."
_NEXT_TRAINS = "Look for train() in validation_step and in the hooks of the validation."


@rule(
    "dropout-in-evaluation",
    statistic="zero_fraction of a dropout function in validation; that of an nn.Dropout, against its input",
    usual="a dropout in eval mode returns its input",
    why="The argument training of the call is True, which is its default, or the module that calls it is in training "
    "mode.",
    next="Write F.dropout(x, p, training=self.training), or use nn.Dropout.",
    false_alarms="Models that drop values in evaluations on purpose, to estimate how sure they are.",
    needs=("activations", VALIDATION),
    records=1,
    explains={"train-differs": ("any",)},
    is_lasting=True,
)
def dropout_in_evaluation(evidence: Evidence, *, share: float = 0.02) -> Iterator[Finding]:
    """Yield the dropout functions and modules that drop values in validation."""
    # A dropout function that drops nothing returns its input and is not recorded.
    modules = []
    for site in evidence.validation.places:
        view = View(evidence, evidence.validation, site)
        function = None if site.name in evidence.wiring.types else function_of(site.name)
        zeros = view.zero_fraction
        if function is not None and function.kind == "dropout" and len(zeros) and (zeros > 0).all():
            yield view.found(f"{site.name} drops values in validation, too", "zero_fraction", zero_fraction=zeros[-1])
        elif _drops(view, share):
            verdict = f"{site.name} drops values in validation, too: it is in training mode there"
            found = view.found(verdict, "zero_fraction", zero_fraction=zeros[-1])
            modules.append(replace(found, why=_WHY_TRAINS, next=_NEXT_TRAINS))
    yield from joined(modules)


def _drops(output: View, share: float) -> bool:
    """Return True if the output of an nn.Dropout has more zeros than its input in each validation."""
    feeds = output.evidence.wiring.inputs.get(output.module, []) if output.kind == "Dropout" else []
    if len(feeds) != 1 or output.path != "out":
        return False
    before, at = output.evidence.view(output.table, feeds[0], "out").column("zero_fraction")
    after, steps = output.column("zero_fraction")
    return bool(len(steps)) and np.array_equal(steps, at) and bool((after > before + share).all())


_WHY_CLEARED = (
    "Gradients reach the outputs of modules, but no parameter has one when the optimizer steps. Something clears them "
    "before that, or the parameters do not require gradients."
)
_NEXT_CLEARED = "Call zero_grad() before backward() or after step(), not between them. Look for requires_grad=False."


@rule(
    "teacher-drops",
    statistic="dropout in a frozen network whose outputs are the targets of a loss",
    usual="none: the teacher is in evaluation mode",
    why="eval() was not called for the teacher, so that its dropout makes other targets for the same sample.",
    next="Call teacher.eval() before training. Lightning keeps the mode that each module has before fit.",
    false_alarms="A teacher with the layers of the student, which may be a moving average with dropout on purpose, is "
    "left out.",
    needs=(GRAPH,),
    is_lasting=True,
)
def teacher_drops(evidence: Evidence) -> Iterator[Finding]:
    """Yield the losses whose targets come from a frozen network with active dropout."""
    step = step_of(evidence)
    for node in step.operations:
        sources = step.sources(node)
        if node.name not in LOSSES or len(sources) < 2 or sources[1].id in step.trained:
            continue
        ours, theirs = ([step.graph[each] for each in step.ancestors(side)] for side in sources[:2])
        dropped = [each for each in theirs if _DROPS.fullmatch(each.name) and setting(each, "p") not in ("0", "0.0")]
        weights = [each for each in theirs if each.kind == "parameter"]
        if not dropped or not weights or not all(each.note == "frozen" for each in weights):
            continue
        if sorted(_sizes(theirs)) == sorted(_sizes(ours)):
            continue
        names = [step.owner(each) for each in sorted(dropped, key=lambda each: each.id)]
        verdict = (
            f"the targets of {node.name} in {step.place(node)} pass the dropout of {names[0]}: the frozen network that "
            "makes them is in training mode"
        )
        yield replace(found_in(evidence, names[0], verdict), others=tuple(dict.fromkeys(names[1:])))
        return


_DROPS = re.compile(r"(\w+_)?dropout\d?d?")


def _sizes(nodes: list[Node]) -> list[tuple[int, ...]]:
    """Return the shapes of the parameters among some nodes."""
    return [each.outputs[0].shape for each in nodes if each.kind == "parameter" and each.outputs]


@rule(
    "nothing-moves",
    "critical",
    statistic="updates of all parameters, if none of them has a gradient, or if all have gradients of zero although "
    "those of the outputs of their modules are not",
    usual="every step moves the parameters",
    why="The loss does not depend on the parameters. It was made from a number or an index, detached, or computed "
    "under no_grad(), and requires_grad was set afterwards.",
    next="Return the loss as it was computed: without item(), detach(), no_grad() and argmax() on the way to it, "
    "and without requires_grad_().",
    false_alarms="Weights that are all zero, which another rule names.",
    needs=("parameters",),
    records=2,
    explains={"gradient-stops": ("any",)},
)
def nothing_moves(evidence: Evidence, *, persistence: int = 2) -> Iterator[Finding]:
    """Yield a finding if no parameter ever had a gradient or moved, although the learning rate is not zero."""
    table = evidence.parameters
    updates = [each.update for each in evidence.tensors if each.update]
    gradients = [each.gradient.rms for each in evidence.tensors if each.gradient]
    # Only output gradients of modules with parameters count: gradients may become zero at an activation after all
    # parameters, such as a softmax over one entry.
    owners = {each.module for each in evidence.tensors}
    places = [place for site, place in evidence.gradients.places.items() if site.name in owners]
    arrive = bool((np.nan_to_num(evidence.gradients.get("rms")[:, places]) > 0).any())
    # Weights of zero stop the gradient of each other, such as both factors of a LoRA: "constant-weight" names them.
    are_zero = bool(evidence.weights) and not any(each.rms.any() for each in evidence.weights)
    if are_zero:
        return
    if arrive and gradients and len(gradients[0]) >= persistence and not any(each.any() for each in gradients):
        verdict = (
            f"the gradients of all {len(gradients)} parameters are zero when the optimizer steps, in "
            f"{len(gradients[0])} records, and those of the outputs of their modules are not"
        )
        found = evidence.tensors[0].gradient.found(verdict, "rms")
        yield replace(found, module="", path="", why=_WHY_CLEARED, next=_NEXT_CLEARED)
        return
    if not updates or gradients:
        return
    changes = [update.rms for update in updates]
    records = max(map(len, changes))
    rates = table.get("learning_rate")
    if records >= persistence and not any(each.any() for each in changes) and not (rates == 0).any():
        verdict = f"none of {len(updates)} parameters moves in {records} records: all updates are zero"
        found = replace(updates[0].found(verdict, "rms"), module="", path="")
        yield replace(found, why=_WHY_CLEARED, next=_NEXT_CLEARED) if arrive else found


@rule(
    "not-registered",
    statistic="parameters in the recorded graph that get gradients and are not among those of the model, and tensors "
    "made of them before the step",
    usual="the model registers all modules that it trains",
    why="The modules are in a Python list, tuple or dictionary.",
    next="Use nn.ModuleList or nn.ModuleDict instead.",
    false_alarms="Frozen modules that are kept out of the model on purpose do not count.",
    needs=(GRAPH,),
    is_lasting=True,
)
def not_registered(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if gradients reach parameters of modules that are not registered in the model."""
    names = evidence.graph.unused.unregistered
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    if modules:
        together = joined_names(modules)
        more = f" and {len(together) - 3} more" if len(together) > 3 else ""
        verdict = (
            f"the model does not register {', '.join(together[:3])}{more}: gradients reach their parameters, but no "
            "optimizer of the recorded step and no checkpoint has them"
        )
        table = evidence.parameters if len(evidence.parameters) else evidence.activations
        view = evidence.view(table, modules[0])
        yield view.found(verdict, others=tuple(modules[1:]), parameters=len(names))
    step, kinds = step_of(evidence), {node.kind for node in evidence.graph.nodes}
    for node in evidence.graph.nodes if {"backward", "optimizer"} <= kinds else ():
        users = step.users(node) if node.kind == "tensor" and node.note.startswith("made of a parameter") else []
        if users and node.outputs and any(each.id in step.gives_gradients for each in users):
            verdict = (
                f"{users[0].name} in {step.place(users[0])} uses a tensor {listed(node.outputs[0].shape)} that was "
                "made of a parameter and is none: no optimizer has it, and the model does not register it"
            )
            yield replace(found_in(evidence, step.owner(users[0]), verdict), why=_WHY_MADE, next=_NEXT_MADE)
            return


_WHY_MADE = "A parameter that is multiplied, cast or moved to a device is another tensor, which is not trained."
_NEXT_MADE = "Change the tensor first, and make the result a parameter: nn.Parameter(torch.randn(...) * 0.1)."


@rule(
    "learning-rate-vanishes",
    statistic="learning rate of each record, against the largest one before it",
    usual="the rate is tiny at most in the last tenth of a run",
    why="A scheduler that steps per batch instead of per epoch, or a gamma or T_max that does not fit the run.",
    next='Look at the arguments of the scheduler, and at "interval" in configure_optimizers.',
    false_alarms="A decay to zero at the end of a run: 40 % of the records must show it.",
    needs=("parameters",),
    records=6,
    explains={"does-not-move": ("any",), "barely-moves": ("any",), "updates-lost": ("any",)},
)
def learning_rate_vanishes(
    evidence: Evidence, *, persistence: int = 6, factor: float = 1e-3, share: float = 0.4
) -> Iterator[Finding]:
    """Yield a finding if the learning rate falls to a tiny fraction of its peak for a large part of the run."""
    rates, steps = _rates(evidence)
    if not rates.any():
        return
    peak = int(np.argmax(rates))
    # Three decays by a factor of 0.1 give the limit of 0.001 except for rounding.
    tiny = rates[peak:] <= factor * rates[peak] * (1 + _ROUNDING)
    if len(rates) >= persistence and tiny.sum() >= share * len(rates):
        since = int(steps[peak + int(np.argmax(tiny))])
        verdict = (
            f"the learning rate falls from {rates[peak]:.3g} to {rates[-1]:.3g}: from step {since} on, it is at most "
            f"{factor:.3g} of its largest value, and hardly anything is learned"
        )
        found = evidence.weights[0].found(verdict, "learning_rate", since=since, peak=rates[peak])
        yield replace(found, module="", path="")


_ROUNDING = 1e-6


def _rates(evidence: Evidence) -> tuple[Floats, NDArray[np.int64]]:
    """Return the largest learning rate of the weights in each record, and the step of each record.

    Records without an optimizer step are left out.
    """
    table = evidence.parameters
    known = [table.places[each.site] for each in evidence.weights]
    # Records without an optimizer step, as with gradient accumulation, have no learning rate: -1 marks them.
    by_record = np.nan_to_num(table.get("learning_rate")[:, known], nan=-1.0).max(axis=1, initial=-1.0)
    return by_record[by_record >= 0], np.array(table.steps)[by_record >= 0]


@rule(
    "warmup-too-long",
    statistic="learning rate of each record, against initial_lr, the one that the optimizer was given",
    usual="the rate reaches it within the first tenth of a run",
    why="The warm-up has more steps than the run, or counts epochs as steps.",
    next="Compare the number of steps of the warm-up with that of the run.",
    false_alarms="Rates above a tenth of initial_lr, or a fiftieth if they do not rise, and a run that has not come to "
    "its end. An initial_lr of 0.5 or more may be the factor of a formula, as in the schedule of the first "
    "transformer, and is left out. So are records that begin late, as after a training has been resumed.",
    needs=("parameters",),
    records=6,
    explains={"does-not-move": ("any",), "barely-moves": ("any",), "updates-lost": ("any",)},
)
def warmup_too_long(
    evidence: Evidence,
    *,
    persistence: int = 6,
    share: float = 0.1,
    end: float = 0.9,
    formula: float = 0.5,
    low: float = 0.02,
    epochs: int = 2,
) -> Iterator[Finding]:
    """Yield a finding if the learning rate stays far below its configured value until the end of the run."""
    about = evidence.parameters.about
    planned = about.get("planned_steps") or np.inf
    given = max((float(group.get("initial_lr") or 0.0) for group in about.get("groups") or ()), default=0.0)
    rates, steps = _rates(evidence)
    # With manual optimization, the number of steps is not known. A rate that several epochs have not changed is enough.
    is_stuck = "planned_steps" not in about and int(about.get("epoch") or 0) >= epochs and not np.diff(rates).any()
    is_at_end = steps[-1:].sum() >= end * planned or is_stuck
    # A training that was resumed in its second half may be at the end of its schedule.
    begins = 2 * steps[:1].sum() <= steps[-1:].sum()
    if len(rates) < persistence or not is_at_end or not begins or not 0 < given < formula or not rates.any():
        return
    highest, part = rates.max(), f"{rates.max() / given:.3g} × the {given:.3g} that the optimizer was given"
    if (np.diff(rates) >= 0).all() and rates[0] < highest < share * given:
        verdict, why, following = (
            f"the learning rate only rises, to {highest:.3g} at step {steps[-1]} of {planned}",
            "",
            "",
        )
    elif (np.diff(rates) == 0).all() and highest < low * given:
        verdict = f"the learning rate is {highest:.3g} in all {len(rates)} records"
        why, following = _WHY_NO_STEP, _NEXT_NO_STEP
    elif (np.diff(rates) <= 0).all() and highest < low * given:
        verdict = f"the learning rate is at most {highest:.3g} in all {len(rates)} records"
        why, following = _WHY_FACTOR, _NEXT_FACTOR
    else:
        return
    found = evidence.weights[0].found(f"{verdict}: that is {part}", "learning_rate", highest=highest, given=given)
    yield replace(found, module="", path="", why=why, next=following)


_WHY_NO_STEP = (
    "The schedule has begun and never steps. With manual optimization, Lightning does not step it. Or its factor is "
    "constant, as one that is a learning rate itself."
)
_NEXT_NO_STEP = (
    "With manual optimization, call self.lr_schedulers().step(). The function of LambdaLR returns a factor, not a rate."
)
_WHY_FACTOR = "The schedule multiplies the rate of the optimizer with a tiny factor, as one that is a rate itself."
_NEXT_FACTOR = "The function of LambdaLR returns a factor such as 1.0 or 0.95 ** epoch, not a learning rate."


@rule(
    "schedule-length",
    statistic="length of a learning-rate schedule (total_steps, T_max or total_iters), and how often the fit steps it",
    usual="about the same",
    why='Lightning steps a schedule once in each epoch unless "interval" is "step", and its length has the other unit.',
    next='Return {"scheduler": scheduler, "interval": "step"} from configure_optimizers, or give the length in epochs.',
    false_alarms="Lengths that are not within a tenth of the number of steps, or of epochs, of the fit, and those that "
    "are at most three times too long or too short, are left out.",
    needs=("parameters",),
    explains={"learning-rate-vanishes": ("any",), "barely-moves": ("any",), "learning-rate-too-large": ("any",)},
    is_lasting=True,
)
def schedule_length(evidence: Evidence, *, factor: float = 3.0, tolerance: float = 0.1) -> Iterator[Finding]:
    """Yield schedules with a length in steps that are stepped once per epoch, and the reverse."""
    for each in evidence.parameters.about.get("schedules") or ():
        name, length, times, unit = (each.get(key) for key in ("class", "length", "times", "unit"))
        if not length or not times or not unit or abs(length - unit) > tolerance * unit or not evidence.weights:
            continue
        is_long = each.get("interval") == "epoch" and length > factor * times
        # Only CosineAnnealingLR is checked for being too short: a short linear schedule is a warm-up, and other short
        # schedules end with an error or at zero.
        is_short = each.get("interval") == "step" and name == "CosineAnnealingLR" and times > factor * length
        if is_long or is_short:
            what = (
                f"comes to {times / length:.1%} of its way"
                if is_long
                else f"falls and rises in turn, {times / length:.3g} times"
            )
            verdict = (
                f"{name} has a length of {length}, and the fit steps it {times} times, once in each "
                f"{each['interval']}: the learning rate {what}"
            )
            found = evidence.weights[0].found(verdict, "learning_rate", length=length, times=times)
            yield replace(found, module="", path="")
            return
