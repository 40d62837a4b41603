"""Rules about modules that are never called, or no longer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.insight.backward import trains, without_gradient
from lightning_recorder.insight.finding import Finding
from lightning_recorder.insight.rule import Evidence, Rule
from lightning_recorder.taps import Site

__all__ = ["RULES"]


def _uncalled(evidence: Evidence) -> Iterator[tuple[str, str]]:
    """Yield the modules that were never called, with the uncalled member of a list, such as ``experts.1``, they are in.

    Other members of the list, of the same class, were called. A module whose parameters a function uses without a call
    has a gradient, so it is not among them.
    """
    called = {site.name for site in evidence.activations.places}
    if not called or not trains(evidence):
        return
    places: dict[tuple[str, str], set[str]] = {}
    for name in called:
        for before, _, after in _numbered(name):
            places.setdefault((before, after), set()).add(evidence.type_of(name))
    reached = {name[:end] for name in called for end in (*(dot.start() for dot in re.finditer(r"\.", name)), len(name))}
    for name, zero in without_gradient(evidence).items():
        if name and name not in reached and not zero:
            # A layer with an uncalled expert is called itself. The class of an uncalled module may be unknown.
            kind = evidence.type_of(name)
            members = (
                before + number
                for before, number, after in _numbered(name)
                if (kinds := places.get((before, after))) is not None
                and (not kind or kinds & {kind, ""})
                and before + number not in reached
            )
            yield name, next(members, "")


def _numbered(name: str) -> list[tuple[str, str, str]]:
    """Return what is before each number in a name, the number, and what is after it."""
    found = re.finditer(r"(?<=\.)[0-9]+(?=\.|$)", name)
    return [(name[: each.start()], each.group(), name[each.end() :]) for each in found]


def _unused(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    groups: dict[str, list[str]] = {}
    for name, member in _uncalled(evidence):
        if not member:
            groups.setdefault(name.rpartition(".")[0], []).append(name)
    for group in groups.values():
        site = Site(group[0], "")
        verdict = f"{group[0]} is never called, so its parameters are not trained"
        found = rule.found(evidence, evidence.parameters, site, verdict)
        yield replace(found, others=tuple(group[1:]))


def _calls(evidence: Evidence) -> dict[str, dict[str, NDArray[np.bool_]]]:
    """Return the records in which each member of a list was called, by the name before its number and by the number."""
    table = evidence.activations
    known = ~np.isnan(table.get("count"))  # an empty output is not recorded
    lists: dict[str, dict[str, NDArray[np.bool_]]] = {}
    for site, place in table.places.items():
        for before, number, _ in _numbered(site.name):
            members = lists.setdefault(before, {})
            members[number] = members.get(number, False) | known[:, place]
    return lists


def _never_chosen(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    groups: dict[str, list[str]] = {}
    calls = _calls(evidence)
    for member in dict.fromkeys(member for _, member in _uncalled(evidence) if member):
        groups.setdefault(member.rpartition(".")[0], []).append(member)
    for around, group in groups.items():
        called = calls.get(f"{around}.", {})
        rarest = min((float(rows.mean()) for rows in called.values()), default=1.0)
        if _chance(rarest, len(evidence.activations), len(called) + len(group)) >= rule.thresholds["chance"]:
            continue  # such as heads of tasks of which each batch has one
        many = f"and {len(group) - 1} more are" if len(group) > 1 else "is"
        verdict = f"{group[0]} {many} never called, but equal modules beside it are"
        found = rule.found(evidence, evidence.parameters, Site(group[0], ""), verdict)
        yield replace(found, others=tuple(group[1:]))
    yield from _no_longer_chosen(rule, evidence, calls)


def _chance(share: float, records: int, members: int) -> float:
    """Return a bound of the probability that one of several members that have this share of calls gets none."""
    return float((1 - share) ** records * members)


def _no_longer_chosen(
    rule: Rule, evidence: Evidence, calls: Mapping[str, dict[str, NDArray[np.bool_]]]
) -> Iterator[Finding]:
    """Yield the members of parallel lists that got an input at first, and none in the last half of the records."""
    table, wiring = evidence.activations, evidence.wiring
    for before, members in calls.items():
        kinds = {wiring.types[name] for number in members if (name := before + number) in wiring.types}
        if len(kinds) < 2 and wiring.is_parallel(before):
            quiet = _quiet(rule, members)
            names = [before + number for number, row in quiet.items() if _is_idle(evidence, before + number, row)]
            if names:
                row = max(quiet.values())
                many = f"and {len(names) - 1} more get" if len(names) > 1 else "gets"
                verdict = (
                    f"{names[0]} {many} no input after step {table.steps[row - 1]}, in {len(table) - row} records, but "
                    "equal modules beside it do"
                )
                found = rule.found(evidence, table, Site(names[0], ""), verdict, since=table.steps[row])
                yield replace(found, others=tuple(names[1:]))


def _quiet(rule: Rule, members: Mapping[str, NDArray[np.bool_]]) -> dict[str, int]:
    """Return the members that were called at first and are no longer, with the first row without a call.

    Another one must be called nearly always, and all others so often that the pause is not by chance.
    """
    after = {number: len(called) - int(called[::-1].argmax()) for number, called in members.items()}
    rows = max(after.values())
    fewest = max(rule.thresholds["records"], rule.thresholds["share"] * rows)
    quiet = {number: row for number, row in after.items() if rows - row >= fewest}
    shares = [float(called.mean()) for number, called in members.items() if number not in quiet]
    chances = [_chance(min(shares), rows - row, len(members)) for row in quiet.values()]
    is_fault = max(shares) >= rule.thresholds["steady"] and max(chances, default=0.0) < rule.thresholds["chance"]
    return quiet if is_fault else {}


def _is_idle(evidence: Evidence, name: str, row: int) -> bool:
    """Return True if a module has parameters, and no gradient from a row on: a function may use them without a call."""
    table, step = evidence.parameters, evidence.activations.steps[row]
    own = [each for each in evidence.tensors if f"{each.site.name}.".startswith(f"{name}.")]
    columns = [table.column(each.gradient, "rms") for each in own if each.gradient is not None]
    return bool(columns) and not any(values[steps >= step].any() for values, steps in columns)


RULES = (
    Rule(
        name="unused-parameter",
        severity="warning",
        statistic="gradients of a module's parameters",
        thresholds={"records": 2},
        persistence=2,
        usual="every parameter of the optimizer has a gradient",
        why="The module is not used in forward, or a condition never chooses it.",
        next="Call the module in forward, or remove it; DDP would stop with an error.",
        false_alarms="Branches that are chosen rarely, if no recorded step chooses them.",
        examine=_unused,
        explains={"unused-parameter": ("any",), "does-not-move": ("same",)},
    ),
    Rule(
        name="never-chosen",
        severity="warning",
        statistic="modules of a list without an output and without a gradient, in all or the last half of the records",
        thresholds={"records": 6, "share": 0.5, "steady": 0.9, "chance": 0.001},
        persistence=0,
        usual="each expert gets some of the tokens",
        why="A router that always chooses the same experts, a drop rate of 1, or a loop that ends too early.",
        next="Look at the outputs of the router; balance the load, or add noise to its logits.",
        false_alarms=(
            "Layers that are left out on purpose. The pause must be too long for chance, at the rate of the other "
            "members. A module that was called must be in a list whose members do not feed each other, of which one is "
            "called in 90 % of the records."
        ),
        examine=_never_chosen,
        explains={"barely-moves": ("any",)},
    ),
)
