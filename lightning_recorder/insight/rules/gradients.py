"""Rules about gradients: where they stop, underflow or spike."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import replace
from itertools import combinations, takewhile

import numpy as np

from lightning_recorder.insight.evidence import Evidence, View
from lightning_recorder.insight.finding import Finding
from lightning_recorder.insight.module_edges import Wiring
from lightning_recorder.insight.recorded_step import step_of
from lightning_recorder.insight.rule import GRAPH, rule
from lightning_recorder.names import Site

__all__ = [
    "GRADIENT_CONSEQUENCES",
    "as_part_of_package",
    "last_behind",
    "left_by_package",
    "pairs_of_heads",
    "trains",
    "without_gradient",
]

GRADIENT_CONSEQUENCES = {
    "does-not-move": ("any",),
    "barely-moves": ("any",),
    "unlike-siblings": ("any",),
}
"""The rules about consequences of lost or small gradients, each with where their modules are relative to the cause."""

_NO_GRAD = "(no_grad)"  # the note in the graph
_WHY_LAST_BLOCK = "The block before has the same branch. A further block may use this one, and there is none."
_NEXT_LAST_BLOCK = "Leave it out of the last block, or let it be: DDP then needs find_unused_parameters."
_WHY_NO_GRAD = "A torch.no_grad(), or a checkpoint with use_reentrant=True whose inputs require no gradient."
_WHY_ZERO_LOSS = "The loss is multiplied with zero, or does not change with this output, as where it is clamped."
_NEXT_ZERO_LOSS = "Look at the factors of the loss, and at what comes between this output and the loss."
_FLAT = re.compile(r"(round|sign|floor|ceil|trunc|heaviside)_?")
_WHY_FLAT = "A function with steps does not change where its input changes a little, so that nothing before it learns."
_NEXT_FLAT = "Compute the loss without it, as a soft Dice loss of probabilities; round for metrics alone."
_SMALLEST_NORMAL = 6.1e-5  # of float16 numbers


def without_gradient(evidence: Evidence, records: int) -> dict[str, bool]:
    """Return the modules whose parameters never had a gradient, each with True if it was recorded as zero.

    Args:
        evidence: The evidence.
        records: The least number of records of each parameter.
    """
    found: dict[str, list[float]] = {}
    for each in evidence.tensors:
        largest = float(each.gradient.rms.max(initial=0.0))
        found.setdefault(each.module, []).append(np.inf if len(each.rms) < records else largest)
    recorded = {each.module for each in evidence.tensors if each.gradient}
    return {name: name in recorded for name, largest in found.items() if max(largest) == 0.0}


def left_by_package(evidence: Evidence, around: str) -> bool:
    """Return True if a module, ``around``, is in a model of an installed package, and another part of it is trained."""
    packaged = step_of(evidence).packaged
    modules = [each for each in (around, *_around(around)) if each in packaged]  # without lists of modules
    whole = list(takewhile(packaged.__getitem__, modules))[-1:]
    inside = "".join(f"{each}." for each in whole if each)
    return bool(whole) and any(each.gradient and each.name.startswith(inside) for each in evidence.tensors)


def as_part_of_package(found: Finding) -> Finding:
    """Return a finding as a note: a user can hardly have forgotten a part of a package's model."""
    return replace(found, severity="note", why=_WHY_PACKAGE, next=_NEXT_PACKAGE)


_WHY_PACKAGE = "The code of an installed package has it, and this training does not need it."
_NEXT_PACKAGE = "Let it be, unless its output was meant to be used; DDP then needs find_unused_parameters."


def trains(evidence: Evidence) -> bool:
    """Return True if some parameter has a gradient."""
    return any(each.gradient for each in evidence.tensors)


@rule(
    "forgotten-parameter",
    statistic="gradients of the parameters of a module of which another part is trained",
    usual="every parameter of the optimizer has a gradient",
    why="The code does not use the parameter, or its effect on the loss is cut off by a detach().",
    next="Use the parameter in the code of its module, or remove it; DDP would stop with an error.",
    false_alarms="Parameters that are used in a part of training only, such as a mask token; those of a model of an "
    "installed package are a note. Gradients of zero count in recurrent modules alone: those of one layer of several, "
    "or of the backward direction's recurrent weight.",
    needs=("parameters",),
    records=2,
)
def forgotten_parameter(evidence: Evidence, *, records: int = 2) -> Iterator[Finding]:
    """Yield a finding about parameters without a gradient in modules that are otherwise trained."""
    trained = {module for each in evidence.tensors if each.gradient for module in _around(each.name)}
    stopped = _stopped(evidence, records)
    found = [
        each
        for each in evidence.tensors
        if not each.gradient and each.module not in stopped and len(each.rms) >= records and each.module in trained
    ]
    if found:
        verdict = f"the parameter {found[0].name} of the model is not used by the loss, so it is not trained"
        if len(found) > 1:
            names = ", ".join(each.name for each in found[:3]) + (", …" if len(found) > 3 else "")
            verdict = f"{len(found)} parameters are not used by the loss, so they are not trained: {names}"
        others = dict.fromkeys(each.module for each in found if each.module not in ("", found[0].module))
        finding = found[0].found(verdict, others=tuple(others))
        are_packaged = all(left_by_package(evidence, each.module) for each in found)
        yield as_part_of_package(finding) if are_packaged else finding
    yield from _unread_states(evidence, records)


_OF_RECURRENCE = re.compile(r"(weight|bias)_(ih|hh)_l(\d+)(_reverse)?")


def _unread_states(evidence: Evidence, records: int) -> Iterator[Finding]:
    """Yield the layers and directions of recurrent modules whose states do not affect the loss."""
    modules: dict[str, dict[tuple[str, ...], View]] = {}
    for each in evidence.tensors:
        part = _OF_RECURRENCE.fullmatch(each.path)
        if part is not None and len(each.gradient.rms) >= records:
            modules.setdefault(each.module, {})[part.groups("")] = each
    for parts in modules.values():
        zeros = {part for part, each in parts.items() if not each.gradient.rms.any()}
        layers = {layer for *_, layer, _ in parts}
        unread = [one for one in sorted(layers, key=int) if all(part in zeros for part in parts if part[2] == one)]
        if unread and len(unread) < len(layers):
            view = parts["weight", "ih", unread[0], ""]
            verdict = (
                f"the gradients of layer {unread[0]} of {view.module} are zero in each record: the loss reads the "
                "states of another layer"
            )
            yield replace(view.found(verdict), why=_WHY_LAYER, next=_NEXT_LAYER)
            return
        for layer in sorted(layers, key=int):
            forward, backward = (("weight", "hh", layer, way) for way in ("", "_reverse"))
            is_read = ("weight", "ih", layer, "_reverse") in parts.keys() - zeros
            if backward in zeros and forward in parts.keys() - zeros and is_read:
                view = parts[backward]
                verdict = (
                    f"the gradient of {view.name} is zero in each record: the loss reads the backward direction "
                    "where it has seen one step only"
                )
                yield replace(view.found(verdict), why=_WHY_BACKWARD, next=_NEXT_BACKWARD)
                return


_WHY_LAYER = "h_n has the last states of all layers, and h_n[0] is that of the first one."
_NEXT_LAYER = "Take h_n[-1], or the output at the last step."
_WHY_BACKWARD = "The backward direction begins at the last step, so that output[:, -1] is its first state."
_NEXT_BACKWARD = "Join the last states of both directions: torch.cat([h_n[-2], h_n[-1]], dim=1)."


def _around(name: str) -> Iterator[str]:
    """Yield the names of the modules around a module or a parameter, from the innermost to the model."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _stopped(evidence: Evidence, records: int) -> dict[str, bool]:
    """Return the modules of :func:`without_gradient` that were called; all of them if no outputs are recorded.

    A module is left out if all its inner modules have gradients. In this case, only a parameter of the module itself is
    unused.
    """
    called = {site.name for site in evidence.activations.places}
    found = without_gradient(evidence, records)
    inner = {module for each in evidence.tensors for module in _around(each.module)}
    passed = inner - {module for each in evidence.tensors if each.module in found for module in _around(each.module)}
    return {
        name: zero for name, zero in found.items() if name and name not in passed and (not called or name in called)
    }


@rule(
    "gradient-stops",
    statistic="gradients of parameters: none, or zero in every record",
    usual="every called module with parameters in the optimizer has a gradient",
    why="A detach(), a torch.no_grad(), a conversion to numbers, or a factor of zero after the module.",
    next="Look at the code between this module and the one after it.",
    false_alarms="Parts that are trained later on purpose. Frozen parameters do not count. A branch of the last block "
    "that no loss depends on is a note if the same branch of the block before it is trained, and so is a part of a "
    "model of an installed package that its code leaves without a gradient.",
    needs=("parameters",),
    records=2,
    explains={
        **GRADIENT_CONSEQUENCES,
        "updates-lost": ("upstream", "same"),
        "saturation": ("downstream",),
        "weight-drift": ("upstream", "same"),
        "odd-block": ("same",),
    },
    is_lasting=True,
)
def gradient_stops(evidence: Evidence, *, records: int = 2, blocks: int = 4) -> Iterator[Finding]:
    """Yield one finding for each module at which the gradient stops."""
    called = {site.name for site in evidence.activations.places}
    lost = _stopped(evidence, records)
    if not lost or not trains(evidence):
        return
    wiring = evidence.wiring
    frontiers: dict[str, list[str]] = {}
    reached = {site.name for site, rms in evidence.medians(evidence.gradients, "rms").items() if rms > 0}
    lasts = last_behind(wiring, lost, reached) if len(evidence.gradients) else {name: name for name in lost}
    for name, last in lasts.items():
        frontiers.setdefault(last, []).append(name)
    for alike in _alike(_without_containers(frontiers), blocks):
        frontier, names = alike[0][0], [name for _, names in alike for name in names]
        after = wiring.outputs.get(frontier, ())
        towards = f" from {after[0]}" if after else ""
        what = "a gradient of zero" if lost[names[0]] else "no gradient"
        count = f"{len(names)} modules with parameters get {what}" if len(names) > 1 else f"{names[0]} gets {what}"
        more = f" and at {len(alike) - 1} modules like it" if len(alike) > 1 else ""
        where = f"the gradient{towards} stops at {frontier}{more}"
        if not (called or wiring.has_graph or len(evidence.gradients)):  # only parameters are recorded
            where = "not called, or without effect on the loss"
        is_zero_from_the_loss = not reached and bool(len(evidence.gradients)) and lost[names[0]]
        is_single = len(alike) == 1 and not is_zero_from_the_loss
        earlier = _trained_before_last(evidence, frontier, lost) if is_single else ""
        is_unread, around = _is_unread(evidence, frontier), frontier.rpartition(".")[0]
        flat = _flat_after(evidence, frontier) if is_zero_from_the_loss else ""
        if flat:
            where = f"the {flat} behind {frontier} has a gradient of zero everywhere"
        elif is_zero_from_the_loss:
            where = f"the gradient of the loss for the output of {frontier} is zero already"
        elif earlier:
            where = f"the loss does not depend on it; {earlier} of an earlier block is trained"
        elif is_unread:
            where = f"nothing uses the output of {frontier}{more}"
        verdict = f"{count}: {where}"
        others = tuple(each for each in names if each != frontier)
        found = evidence.view(evidence.parameters, frontier).found(verdict, others=others, modules=len(names))
        recorded = _recorded_stops(evidence, {frontier, *names, *after})
        if flat:
            found = replace(found, why=_WHY_FLAT, next=_NEXT_FLAT)
        elif is_zero_from_the_loss:
            found = replace(found, why=_WHY_ZERO_LOSS, next=_NEXT_ZERO_LOSS)
        elif earlier:
            found = replace(found, severity="note", why=_WHY_LAST_BLOCK, next=_NEXT_LAST_BLOCK)
        elif (is_unread or _stops_in_package(evidence, recorded, lost[names[0]])) and left_by_package(evidence, around):
            found = as_part_of_package(found)
        elif recorded and all(_NO_GRAD in each for each in recorded):
            found = replace(found, why=_WHY_NO_GRAD)
        if recorded:
            following = f"Look at {' and '.join(recorded)}: the recorded step has no gradient before it."
            found = replace(found, next=following)
        yield found


def _flat_after(evidence: Evidence, name: str) -> str:
    """Return the step function, such as round, between a module and the loss, with its code line."""
    step = step_of(evidence)
    made = {node.id for node in step.operations if step.owner(node) == name}
    for node in step.operations:
        if _FLAT.fullmatch(node.name) and node.id in step.gives_gradients and made & step.ancestors(node):
            return f"{node.name} at {node.source}" if node.source else node.name
    return ""


def _trained_before_last(evidence: Evidence, name: str, lost: Collection[str]) -> str:
    """Return the corresponding layer of the previous block, if it is trained and the loss ignores layer ``name``."""
    step = step_of(evidence)
    losses = [node for node in step.graph.nodes if node.kind == "backward"]
    used = set[int]().union(*(step.ancestors(node) for node in losses))
    if not losses or any(node.id in used for node in step.operations if f"{step.owner(node)}.".startswith(f"{name}.")):
        return ""
    trained = {each.module for each in evidence.tensors if each.gradient and each.module not in lost}
    for number in reversed(list(re.finditer(r"\d+", name))):
        head, tail = name[: number.start()], name[number.end() :]
        blocks = [each[len(head) : len(each) - len(tail)] for each in trained if each.startswith(head)]
        numbers = [int(each) for each in blocks if each.isdecimal() and f"{head}{each}{tail}" in trained]
        if numbers and max(numbers) == int(number.group()) - 1:
            return f"{head}{max(numbers)}{tail}"
    return ""


def _is_unread(evidence: Evidence, name: str) -> bool:
    """Return True if the recorded step computes the output of a module, but no operation uses it."""
    step = step_of(evidence)
    made = [node for node in step.operations if step.owner(node) == name and node.outputs]
    inside = {node.id for node in made}
    return bool(made) and not any(user.id not in inside for node in made for user in step.users(node))


def _recorded_stops(evidence: Evidence, near: Set[str]) -> list[str]:
    """Return at most two operations that stop the gradient in the graph, in modules that contain ``near`` modules."""
    found = []
    for each in evidence.graph.unused.stops:
        module = each.partition(" ")[0].rpartition("/")[0]  # as in "encoder/detach (detach) at net.py:42"
        if module and any(f"{name}.".startswith(f"{module}.") for name in near):
            found.append(each)
    return found[:2]


def _stops_in_package(evidence: Evidence, recorded: list[str], is_zero: bool) -> bool:
    """Return True if the code of installed packages stops a gradient, or makes it zero, as behind a selected token."""
    step = step_of(evidence)
    lines = [each.rpartition(" at ")[2] for each in recorded if _NO_GRAD not in each]
    return (is_zero or bool(recorded)) and len(lines) == len(recorded) and all(map(step.is_packaged, lines))


def _alike(frontiers: dict[str, list[str]], fewest: int) -> list[list[tuple[str, list[str]]]]:
    """Group the modules at which the gradient stops: ``fewest`` or more modules in equal blocks form one group."""
    blocks = {frontier: re.sub("[0-9]+", "#", frontier.rpartition(".")[0]) for frontier in frontiers}
    counts = Counter(blocks.values())
    found: dict[str, list[tuple[str, list[str]]]] = {}
    for frontier, names in frontiers.items():
        block = blocks[frontier]
        key = block if "#" in block and counts[block] >= fewest else frontier
        found.setdefault(key, []).append((frontier, names))
    return list(found.values())


def _without_containers(frontiers: dict[str, list[str]]) -> dict[str, list[str]]:
    """Merge each entry that lists only its own module into the first entry inside of that module, if there is one."""
    found = {frontier: list(names) for frontier, names in frontiers.items()}
    for frontier in frontiers:
        inside = [each for each in found if each != frontier and (not frontier or each.startswith(f"{frontier}."))]
        if inside and found[frontier] == [frontier]:
            found[inside[0]] += found.pop(frontier)
    return found


def last_behind(wiring: Wiring, names: Collection[str], reached: Collection[str]) -> dict[str, str]:
    """Map each module to the last module downstream of it whose output gets no gradient either.

    Args:
        wiring: The edges.
        names: The modules.
        reached: The modules whose outputs get a gradient. Paths downstream pass only through modules that are not
            reached, such as a pooling between two layers.
    """
    found: dict[str, str] = {}
    # From the last module backward, each module is assigned to all upstream modules without an entry.
    for last in sorted({*wiring.inputs, *names}, key=lambda each: wiring.order.get(each, -1), reverse=True):
        if last in found:
            continue
        found[last], todo = last, [last]
        while todo:
            here = todo.pop()
            for before in () if here in reached else wiring.inputs.get(here, ()):
                if before not in found:
                    found[before] = last
                    todo.append(before)
    return {name: found[name] for name in names}


def pairs_of_heads(evidence: Evidence, norms: Mapping[Site, float]) -> list[tuple[Site, Site]]:
    """Return the pairs of heads on common layers, each with the larger gradient first.

    A head is a module that feeds no other module.
    """
    wiring, step = evidence.wiring, step_of(evidence)
    heads = [site for site in norms if site.name in wiring.order and not wiring.outputs.get(site.name)]
    # A module without a later module may still be no head: the result of a block's last update may not reach a loss.
    lead = {step.owner(node) for node in step.operations if node.id in step.gives_gradients}
    heads = [site for site in heads if not lead or any(f"{name}.".startswith(f"{site.name}.") for name in lead)]
    return [
        (max(pair, key=lambda site: norms[site]), min(pair, key=lambda site: norms[site]))
        for pair in combinations(heads if wiring.has_graph else (), 2)
        if wiring.upstream(pair[0].name) & wiring.upstream(pair[1].name)
    ]


@rule(
    "low-precision",
    statistic="share of a float16 gradient below the smallest normal number",
    usual="0 to 0.2",
    why="The loss is too small for float16, or its scaling is switched off.",
    next="Use precision='16-mixed', which scales the loss, or 'bf16-mixed'.",
    false_alarms="Sparse gradients with some large values.",
    needs=("gradients",),
    records=2,
    explains={
        **GRADIENT_CONSEQUENCES,
        "updates-lost": ("upstream", "same"),
        "low-precision": ("any",),
        "gradient-stops": ("any",),
    },
)
def low_precision(
    evidence: Evidence, *, persistence: int = 2, share: float = 0.5, largest: float = 1e-3
) -> Iterator[Finding]:
    """Yield the float16 gradients with many values below the smallest normal number."""
    table = evidence.gradients
    for view in (View(evidence, table, site) for site in table.places):
        if view.dtype != "float16":
            continue
        shares = []
        for histogram in view.histograms():
            middles = (histogram.edges[1:] + histogram.edges[:-1]) / 2
            below = histogram.counts[np.abs(middles) < _SMALLEST_NORMAL].sum()
            shares.append(float(below) / max(histogram.count, 1))
        zeros = view.zero_fraction[-1:].sum()
        high = max(np.abs(each[-1:]).max(initial=0.0) for each in (view.min, view.max))
        if len(shares) >= persistence and min(shares) > share and high < largest:
            verdict = (
                f"{shares[-1]:.0%} of the gradient of {view.module} is below the smallest normal float16, "
                f"{zeros:.0%} is zero"
            )
            yield view.found(verdict, "zero_fraction", share=shares[-1], largest=high)


@rule(
    "gradient-spike",
    statistic="norm of all recorded gradients, against the median of the five records before",
    usual="at most 6",
    why="An unusual batch, or a learning rate at the edge of stability.",
    next="Look at the batch of this step; clip gradients.",
    false_alarms="The first five records do not count, and no record before may have larger gradients: those of a low "
    "loss are small, and grow many times with one wrong sample. A loss below a quarter of the first makes it a note.",
    needs=("parameters",),
    records=6,
)
def gradient_spike(
    evidence: Evidence,
    *,
    factor: float = 20.0,
    of_largest: float = 10.0,
    of_earlier: float = 1.0,
    records: int = 5,
    low: float = 0.25,
) -> Iterator[Finding]:
    """Yield a step whose gradients are far larger than in the other records; a note if the loss is low in this step."""
    table = evidence.parameters
    gradients = [each.gradient for each in evidence.tensors if each.gradient]
    if not gradients:
        return
    places = [table.places[each.site] for each in gradients]
    squares = table.get("rms")[:, places] ** 2 * table.get("count")[:, places]
    norms = np.sqrt(np.nansum(squares, axis=1))
    for row in range(records, len(norms)):
        past, step = norms[row - records : row], table.steps[row]
        least = max(of_largest * past.max(), of_earlier * norms[:row].max())
        if norms[row] > factor * np.median(past) > 0 and norms[row] > least:
            largest = gradients[int(np.nanargmax(squares[row]))]
            ended = (each.epoch for each in evidence.data.epochs if each.is_whole and each.last_step == step)
            last = next((f", the last of epoch {epoch}," for epoch in ended), "")
            times = norms[row] / np.median(past)
            verdict = (
                f"the norm of all gradients at step {step}{last} is {times:.3g} × its median in "
                f"the {records} records before, most of it in {largest.module or largest.name.removesuffix('.grad')}"
            )
            found = largest.found(verdict, "rms", since=step, factor=times, norm=norms[row])
            found = replace(found, last_step=step, records=1)
            yield replace(found, severity="note", why=_WHY_LOW) if _is_low(evidence, step, low) else found
            return


_WHY_LOW = (
    "The loss of this step is low beside the first one. Then a single wrong sample can make most of the gradient."
)


def _is_low(evidence: Evidence, step: int, low: float) -> bool:
    """Return True if each recorded loss is known at a step, and far below its first value."""
    names = {site.name for site in evidence.losses.places if site.name and site.path == "in.target"}
    columns = [View(evidence, evidence.results, Site(name, "out")).column("mean") for name in names]
    below = [values[steps == step] < low * abs(values[:1]) for values, steps in columns]
    return bool(below) and all(each.any() for each in below)


@rule(
    "first-step-only",
    statistic="gradient of the weight between the steps of a recurrence, in sequences of several steps",
    usual="above 0",
    why="This is so if the loss depends on the output of the first step only, which has not seen the others.",
    next="Look at which output the loss gets. That of the last step is output[:, -1] with batch_first=True, or the "
    "last state.",
    false_alarms="Sequences of a single step, and recurrences of which nothing has a gradient, are left out.",
    needs=("parameters", GRAPH),
    records=2,
    is_lasting=True,
)
def first_step_only(evidence: Evidence) -> Iterator[Finding]:
    """Yield recurrent layers whose hidden weight never gets a gradient, while their input weight does."""
    for node in evidence.graph.nodes:
        shape = node.inputs[0].shape if node.inputs and node.name in _RECURRENCES else ()
        if len(shape) != 3 or min(shape[:2]) < 2 or node.parent is None:
            continue
        name = evidence.graph[node.parent].name
        inner, outer = (evidence.parameter(name, f"weight_{kind}_l0").gradient.rms for kind in ("hh", "ih"))
        if len(inner) and len(outer) and not inner.any() and outer.all():
            verdict = f"the gradient of {name}.weight_hh_l0 is zero in each record, and that of weight_ih_l0 is not"
            yield evidence.parameter(name, "weight_hh_l0").found(verdict, "rms")
            return


_RECURRENCES = ("lstm", "gru", "rnn_tanh", "rnn_relu")
