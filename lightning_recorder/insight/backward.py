"""Rules about gradients: where they stop, underflow or spike."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import replace
from itertools import combinations

import numpy as np

from lightning_recorder.insight.finding import Finding
from lightning_recorder.insight.rule import Evidence, Rule, medians
from lightning_recorder.insight.wiring import Wiring
from lightning_recorder.records.history import History
from lightning_recorder.taps import Site

__all__ = [
    "GRADIENT_CONSEQUENCES",
    "RULES",
    "gradient_norms",
    "last_behind",
    "pairs_of_heads",
    "trains",
    "without_gradient",
]

GRADIENT_CONSEQUENCES = {
    "does-not-move": ("any",),
    "barely-moves": ("any",),
    "unlike-siblings": ("any",),
}
"""The consequences of gradients that are lost or too small: rules, with the places of their modules."""

_NO_GRAD = "(no_grad)"  # as the graph notes it
_WHY_NO_GRAD = "A torch.no_grad(), or a checkpoint with use_reentrant=True whose inputs require no gradient."
_WHY_ZERO_LOSS = "The loss is multiplied with zero, or does not change with this output, as where it is clamped."
_NEXT_ZERO_LOSS = "Look at the factors of the loss, and at what comes between this output and the loss."
_SMALLEST_NORMAL = {"float16": 6.1e-5, "bfloat16": 1.2e-38, "float32": 1.2e-38}


def without_gradient(evidence: Evidence) -> dict[str, bool]:
    """Return the modules none of whose parameters ever had a gradient, with True if it was recorded as zero."""
    table = evidence.parameters
    found: dict[str, list[float]] = {}
    for each in evidence.tensors:
        largest = 0.0 if each.gradient is None else float(table.column(each.gradient, "rms")[0].max(initial=0.0))
        records = len(table.column(each.site, "rms")[0])
        found.setdefault(each.site.name, []).append(np.inf if records < 2 else largest)
    recorded = {each.site.name for each in evidence.tensors if each.gradient is not None}
    return {name: name in recorded for name, largest in found.items() if max(largest) == 0.0}


def trains(evidence: Evidence) -> bool:
    """Return True if some parameter has a gradient."""
    return any(each.gradient is not None for each in evidence.tensors)


def _forgotten(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding about parameters without a gradient in modules of which another part is trained."""
    trained = [each.name for each in evidence.tensors if each.gradient is not None]
    stopped = _stopped(evidence)
    found = [
        each
        for each in evidence.tensors
        if each.gradient is None
        and each.site.name not in stopped
        and len(evidence.column(each.site, "rms")) >= rule.thresholds["records"]
        and any(name.startswith(f"{each.site.name}." if each.site.name else "") for name in trained)
    ]
    if found:
        verdict = f"the parameter {found[0].name} of the model is not used by the loss, so it is not trained"
        if len(found) > 1:
            names = ", ".join(each.name for each in found[:3]) + (", …" if len(found) > 3 else "")
            verdict = f"{len(found)} parameters are not used by the loss, so they are not trained: {names}"
        others = dict.fromkeys(each.site.name for each in found if each.site.name not in ("", found[0].site.name))
        yield replace(rule.found(evidence, evidence.parameters, found[0].site, verdict), others=tuple(others))


def _stopped(evidence: Evidence) -> dict[str, bool]:
    """Return the called modules among those :func:`without_gradient`; all of them if no outputs are recorded."""
    called = {site.name for site in evidence.activations.places}
    found = without_gradient(evidence)
    return {name: zero for name, zero in found.items() if name and (not called or name in called)}


def _stops(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding for each place at which the gradient stops."""
    called = {site.name for site in evidence.activations.places}
    lost = _stopped(evidence)
    if not lost or not trains(evidence):
        return
    wiring = evidence.wiring
    frontiers: dict[str, list[str]] = {}
    reached = {site.name for site, rms in evidence.medians(evidence.gradients, "rms").items() if rms > 0}
    lasts = last_behind(wiring, lost, reached) if len(evidence.gradients) else {name: name for name in lost}
    for name, last in lasts.items():
        frontiers.setdefault(last, []).append(name)
    for alike in _alike(_without_containers(frontiers)):
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
        if is_zero_from_the_loss:
            where = f"the gradient of the loss for the output of {frontier} is zero already"
        verdict = f"{count}: {where}"
        site = next((each for each in evidence.activations.places if each.name == frontier), Site(frontier, ""))
        found = rule.found(evidence, evidence.parameters, Site(site.name, ""), verdict, modules=len(names))
        recorded = _recorded_stops(evidence, {frontier, *names, *after})
        if is_zero_from_the_loss:
            found = replace(found, why=_WHY_ZERO_LOSS, next=_NEXT_ZERO_LOSS)
        elif recorded and all(_NO_GRAD in each for each in recorded):
            found = replace(found, why=_WHY_NO_GRAD)
        if recorded:
            found = replace(
                found, next=f"Look at {' and '.join(recorded)}: the recorded step has no gradient before it."
            )
        yield replace(found, others=tuple(each for each in names if each != frontier))


def _recorded_stops(evidence: Evidence, near: Set[str]) -> list[str]:
    """Return at most two places where the gradient stops in the recorded graph, in a module around some modules."""
    graph = evidence.wiring.graph
    found = []
    for each in () if graph is None else graph.unused.stops:
        module = each.partition(" ")[0].rpartition("/")[0]  # as in "encoder/detach (detach) at net.py:42"
        if module and any(f"{name}.".startswith(f"{module}.") for name in near):
            found.append(each)
    return found[:2]


def _alike(frontiers: dict[str, list[str]]) -> list[list[tuple[str, list[str]]]]:
    """Return the places at which the gradient stops, those in equal blocks together if there are several of them."""
    blocks = {frontier: re.sub("[0-9]+", "#", frontier.rpartition(".")[0]) for frontier in frontiers}
    counts = Counter(blocks.values())
    found: dict[str, list[tuple[str, list[str]]]] = {}
    for frontier, names in frontiers.items():
        block = blocks[frontier]
        key = block if "#" in block and counts[block] > 3 else frontier
        found.setdefault(key, []).append((frontier, names))
    return list(found.values())


def _without_containers(frontiers: dict[str, list[str]]) -> dict[str, list[str]]:
    """Join a module's own parameters with the modules inside of it that lack a gradient, too."""
    found = {frontier: list(names) for frontier, names in frontiers.items()}
    for frontier in frontiers:
        inside = [each for each in found if each != frontier and (not frontier or each.startswith(f"{frontier}."))]
        if inside and found[frontier] == [frontier]:
            found[inside[0]] += found.pop(frontier)
    return found


def last_behind(wiring: Wiring, names: Collection[str], reached: Collection[str]) -> dict[str, str]:
    """Return for each module the last one behind it, along the edges, whose output gets no gradient either.

    Args:
        wiring: The edges.
        names: The modules.
        reached: The modules whose outputs get a gradient. The others connect a module with those behind it, such as a
            pooling between two layers.
    """
    found: dict[str, str] = {}
    # From the last module on, each one gives its name to all that lead to it and have none yet.
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
    """Return the pairs of modules that nothing follows, behind common layers, that with the larger gradient first."""
    wiring = evidence.wiring
    heads = [site for site in norms if site.name in wiring.order and not wiring.outputs.get(site.name)]
    return [
        (max(pair, key=lambda site: norms[site]), min(pair, key=lambda site: norms[site]))
        for pair in combinations(heads if wiring.has_graph else (), 2)
        if wiring.upstream(pair[0].name) & wiring.upstream(pair[1].name)
    ]


def gradient_norms(table: History) -> dict[Site, float]:
    """Return the median L2 norm of each gradient.

    The norm does not depend on the resolution of a feature map, while the rms does.
    """
    norms = table.get("rms") * np.sqrt(table.get("count"))
    middle = medians(np.where(norms > 0, norms, np.nan)).tolist()
    return {site: norm for site, norm in zip(table.places, middle, strict=True) if norm > 0 and site.path == "out"}


def _underflow(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    table = evidence.gradients
    for site in table.places:
        dtype = table.dtypes[table.places[site]] or ""
        if dtype != "float16":
            continue
        shares = []
        for histogram in table.histograms(site):
            middles = (histogram.edges[1:] + histogram.edges[:-1]) / 2
            below = histogram.counts[np.abs(middles) < _SMALLEST_NORMAL[dtype]].sum()
            shares.append(float(below) / max(histogram.count, 1))
        zeros = table.column(site, "zero_fraction")[0][-1:].sum()
        high = max(np.abs(table.column(site, name)[0][-1:]).max(initial=0.0) for name in ("min", "max"))
        if (
            len(shares) >= rule.persistence
            and min(shares) > rule.thresholds["share"]
            and high < rule.thresholds["largest"]
        ):
            verdict = (
                f"{shares[-1]:.0%} of the gradient of {site.name} is below the smallest normal {dtype}, "
                f"{zeros:.0%} is zero"
            )
            yield rule.found(evidence, table, site, verdict, statistic="zero_fraction", share=shares[-1], largest=high)


def _spike(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    table = evidence.parameters
    sites = [each.gradient for each in evidence.tensors if each.gradient is not None]
    if not sites:
        return
    places = [table.places[site] for site in sites]
    squares = table.get("rms")[:, places] ** 2 * table.get("count")[:, places]
    norms = np.sqrt(np.nansum(squares, axis=1))
    earlier = int(rule.thresholds["records"])
    for row in range(earlier, len(norms)):
        past = norms[row - earlier : row]
        factor = rule.thresholds["factor"]
        if norms[row] > factor * np.median(past) > 0 and norms[row] > 0.5 * factor * past.max():
            largest = sites[int(np.nanargmax(squares[row]))]
            verdict = (
                f"the norm of all gradients at step {table.steps[row]} is {norms[row] / np.median(past):.3g} × its "
                f"median in the {earlier} records before, most of it in {largest.name or '(root)'}"
            )
            found = rule.found(
                evidence, table, largest, verdict, statistic="rms", since=table.steps[row], norm=norms[row]
            )
            yield replace(found, last_step=table.steps[row], records=1)
            return


RULES = (
    Rule(
        name="forgotten-parameter",
        severity="warning",
        statistic="gradients of the parameters of a module of which another part is trained",
        thresholds={"records": 2},
        persistence=2,
        usual="every parameter of the optimizer has a gradient",
        why="The code does not use the parameter, or its effect on the loss is cut off by a detach().",
        next="Use the parameter in the code of its module, or remove it; DDP would stop with an error.",
        false_alarms="Parameters that are used in a part of training only, such as a mask token.",
        examine=_forgotten,
    ),
    Rule(
        name="gradient-stops",
        severity="warning",
        statistic="gradients of parameters: none, or zero in every record",
        thresholds={"records": 2},
        persistence=2,
        usual="every called module with parameters in the optimizer has a gradient",
        why="A detach(), a torch.no_grad(), a conversion to numbers, or a factor of zero after the module.",
        next="Look at the code between this module and the one after it.",
        false_alarms="Parts that are trained later on purpose. Frozen parameters do not count.",
        examine=_stops,
        explains={
            **GRADIENT_CONSEQUENCES,
            "updates-lost": ("upstream", "same"),
            "saturation": ("downstream",),
            "weight-drift": ("upstream", "same"),
            "odd-block": ("same",),
        },
        is_lasting=True,
    ),
    Rule(
        name="low-precision",
        severity="warning",
        statistic="share of a float16 gradient below the smallest normal number",
        thresholds={"share": 0.5, "largest": 1e-3},
        persistence=2,
        usual="0 to 0.2",
        why="The loss is too small for float16, or its scaling is switched off.",
        next="Use precision='16-mixed', which scales the loss, or 'bf16-mixed'.",
        false_alarms="Sparse gradients with some large values.",
        examine=_underflow,
        explains={
            **GRADIENT_CONSEQUENCES,
            "updates-lost": ("upstream", "same"),
            "low-precision": ("any",),
            "gradient-stops": ("any",),
        },
    ),
    Rule(
        name="gradient-spike",
        severity="warning",
        statistic="norm of all recorded gradients, against the median of the five records before",
        thresholds={"factor": 20.0, "records": 5},
        persistence=0,
        usual="at most 6",
        why="An unusual batch, or a learning rate at the edge of stability.",
        next="Look at the batch of this step; clip gradients.",
        false_alarms="The first five records do not count.",
        examine=_spike,
        explains={},
    ),
)
