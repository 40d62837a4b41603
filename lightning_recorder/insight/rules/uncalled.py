"""Rules about modules that are never called or no longer called."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.insight.evidence import Evidence
from lightning_recorder.insight.finding import Finding
from lightning_recorder.insight.rule import rule
from lightning_recorder.insight.rules.gradients import as_part_of_package, left_by_package, trains, without_gradient


def _uncalled(evidence: Evidence, records: int) -> Iterator[tuple[str, str]]:
    """Yield each module that was never called, with the uncalled list member around it, such as ``experts.1``.

    The member is an empty string unless other list members of the same class were called. Modules whose parameters have
    a gradient are left out: a function may use the parameters without a call of the module.
    """
    called = {site.name for site in evidence.activations.places}
    if not called or not trains(evidence):
        return
    places: dict[tuple[str, str], set[str]] = {}
    for name in called:
        for before, _, after in _numbered(name):
            places.setdefault((before, after), set()).add(evidence.type_of(name))
    reached = {name[:end] for name in called for end in (*(dot.start() for dot in re.finditer(r"\.", name)), len(name))}
    for name, zero in without_gradient(evidence, records).items():
        if name and name not in reached and not zero:
            # Only the innermost uncalled member counts, since a layer with an uncalled expert is itself called. The
            # class of an uncalled module may be unknown; then any class matches.
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
    """Return, for each number in a name, the text before it, the number, and the text after it."""
    found = re.finditer(r"(?<=\.)[0-9]+(?=\.|$)", name)
    return [(name[: each.start()], each.group(), name[each.end() :]) for each in found]


@rule(
    "unused-parameter",
    statistic="gradients of a module's parameters",
    usual="every parameter of the optimizer has a gradient",
    why="The module is not used in forward, or a condition never chooses it.",
    next="Call the module in forward, or remove it; DDP would stop with an error.",
    false_alarms="Branches that are chosen rarely, if no recorded step chooses them. A part of a model of an installed "
    "package is a note.",
    needs=("parameters",),
    records=2,
    explains={"unused-parameter": ("any",), "does-not-move": ("same",)},
)
def unused_parameter(evidence: Evidence, *, records: int = 2) -> Iterator[Finding]:
    """Yield the parameters that never get a gradient."""
    groups: dict[str, list[str]] = {}
    for name, member in _uncalled(evidence, records):
        if not member:
            groups.setdefault(name.rpartition(".")[0], []).append(name)
    for around, group in groups.items():
        verdict = f"{group[0]} is never called, so its parameters are not trained"
        found = evidence.view(evidence.parameters, group[0]).found(verdict, others=tuple(group[1:]))
        yield as_part_of_package(found) if left_by_package(evidence, around) else found


def _calls(evidence: Evidence) -> dict[str, dict[str, NDArray[np.bool_]]]:
    """Return the records in which each list member was called, by the name of the list and the member's number."""
    table = evidence.activations
    known = ~np.isnan(table.get("count"))  # an empty output has no record
    lists: dict[str, dict[str, NDArray[np.bool_]]] = {}
    for site, place in table.places.items():
        for before, number, _ in _numbered(site.name):
            members = lists.setdefault(before, {})
            members[number] = members.get(number, False) | known[:, place]
    return lists


@rule(
    "never-chosen",
    statistic="modules of a list without an output and without a gradient, in all or the last half of the records",
    usual="each expert gets some of the tokens",
    why="A router that always chooses the same experts, a drop rate of 1, or a loop that ends too early.",
    next="Look at the outputs of the router; balance the load, or add noise to its logits.",
    false_alarms="Layers that are left out on purpose. The pause must be too long for chance, at the rate of the other "
    "members. A module that was called must be in a list whose members do not feed each other, of which one is "
    "called in 90 % of the records.",
    needs=("activations", "parameters"),
    records=2,
    explains={"barely-moves": ("any",)},
)
def never_chosen(
    evidence: Evidence,
    *,
    records: int = 2,
    pause: int = 6,
    share: float = 0.5,
    steady: float = 0.9,
    chance: float = 0.001,
) -> Iterator[Finding]:
    """Yield the list members that are never called or no longer called, while other equal members are."""
    groups: dict[str, list[str]] = {}
    calls = _calls(evidence)
    for member in dict.fromkeys(member for _, member in _uncalled(evidence, records) if member):
        groups.setdefault(member.rpartition(".")[0], []).append(member)
    for around, group in groups.items():
        called = calls.get(f"{around}.", {})
        rarest = min((float(rows.mean()) for rows in called.values()), default=1.0)
        if _chance(rarest, len(evidence.activations), len(called) + len(group)) >= chance:
            continue  # such as heads of several tasks, with one task per batch
        many = f"and {len(group) - 1} more are" if len(group) > 1 else "is"
        verdict = f"{group[0]} {many} never called, but equal modules beside it are"
        yield evidence.view(evidence.parameters, group[0]).found(verdict, others=tuple(group[1:]))
    table, wiring = evidence.activations, evidence.wiring
    for before, members in calls.items():
        kinds = {wiring.types[name] for number in members if (name := before + number) in wiring.types}
        quiet = _quiet(members, pause, share) if len(kinds) < 2 and wiring.is_parallel(before) else {}
        names = [before + number for number, row in quiet.items() if _is_idle(evidence, before + number, row)]
        if names and _is_fault(members, quiet, steady, chance):
            row = max(quiet.values())
            many = f"and {len(names) - 1} more get" if len(names) > 1 else "gets"
            verdict = (
                f"{names[0]} {many} no input after step {table.steps[row - 1]}, in {len(table) - row} records, but "
                "equal modules beside it do"
            )
            yield evidence.view(table, names[0]).found(verdict, since=table.steps[row], others=tuple(names[1:]))


def _chance(share: float, records: int, members: int) -> float:
    """Return an upper bound of the probability that any of several members with this share of calls is never called."""
    return float((1 - share) ** records * members)


def _quiet(members: Mapping[str, NDArray[np.bool_]], pause: int, share: float) -> dict[str, int]:
    """Return the members that are no longer called in the last records, each with the first row without a call."""
    after = {number: len(called) - int(called[::-1].argmax()) for number, called in members.items()}
    rows = max(after.values())
    return {number: row for number, row in after.items() if rows - row >= max(pause, share * rows)}


def _is_fault(members: Mapping[str, NDArray[np.bool_]], quiet: Mapping[str, int], steady: float, chance: float) -> bool:
    """Return True if some member is called nearly always and chance cannot explain the pauses of the quiet members."""
    rows = max(len(called) - int(called[::-1].argmax()) for called in members.values())
    shares = [float(called.mean()) for number, called in members.items() if number not in quiet]
    chances = [_chance(min(shares), rows - row, len(members)) for row in quiet.values()]
    return max(shares) >= steady and max(chances) < chance


def _is_idle(evidence: Evidence, name: str, row: int) -> bool:
    """Return True if a module has parameters without a gradient from a row on, so that no function uses them either."""
    step = evidence.activations.steps[row]
    own = [each for each in evidence.tensors if f"{each.module}.".startswith(f"{name}.")]
    columns = [each.gradient.column("rms") for each in own if each.gradient]
    return bool(columns) and not any(values[steps >= step].any() for values, steps in columns)
