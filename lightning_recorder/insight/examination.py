"""The engine: it is fed one record at a time and gives the ranked findings."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lightning_recorder.errors import check_some
from lightning_recorder.graph.model import Graph
from lightning_recorder.insight import (
    backward,
    comparisons,
    evaluation,
    finiteness,
    forward,
    gradient_depth,
    gradient_steps,
    latent,
    normalization,
    operations,
    optimization,
    ranks,
    scales,
    settings,
    small_updates,
    steps,
    uncalled,
)
from lightning_recorder.insight.comparisons import ODD_BLOCK, UNLIKE
from lightning_recorder.insight.finding import (
    NON_FINITE,
    SEVERITIES,
    SPIKE,
    UNBOUNDED,
    USUAL_UNTIL,
    Finding,
    with_watched,
)
from lightning_recorder.insight.gaps import Diagnosis, Gap, gaps_of, group_records
from lightning_recorder.insight.gradient_steps import GRADIENT_STEP
from lightning_recorder.insight.odd_blocks import OddBlock, odd_blocks
from lightning_recorder.insight.rule import Evidence, Rule
from lightning_recorder.insight.table import SiteRecords, Table
from lightning_recorder.insight.wiring import Wiring

__all__ = ["RULES", "Examination", "causes_first", "check_rules"]

# From settings over single layers to comparisons: of two findings that do not explain each other, the one whose cause
# is easier to see is named first.
_PARTS = (
    finiteness,
    ranks,
    operations,
    settings,
    steps,
    evaluation,
    scales,
    optimization,
    small_updates,
    uncalled,
    backward,
    latent,
    normalization,
    forward,
    comparisons,
    gradient_steps,
    gradient_depth,
)

RULES: tuple[Rule, ...] = tuple(rule for part in _PARTS for rule in part.RULES)
"""All rules."""


def causes_first(rules: Sequence[Rule]) -> dict[str, int]:
    """Return the place of each rule behind all rules that explain it, and otherwise in the order of the rules.

    Raises:
        ValueError: If rules explain each other in a circle, so that no order is right.
    """
    causes: dict[str, list[str]] = {rule.name: [] for rule in rules}
    for rule in rules:
        for effect in rule.explains.keys() - {rule.name}:
            causes[effect].append(rule.name)
    places: dict[str, int] = {}

    def place(name: str, effects: tuple[str, ...]) -> None:
        if name in effects:
            raise ValueError(f"rules explain each other: {' is explained by '.join((*effects, name))}")
        if name not in places:
            for cause in causes[name]:
                place(cause, (*effects, name))
            places[name] = len(places)

    for rule in rules:
        place(rule.name, ())
    return places


_PLACES = causes_first(RULES)


def check_rules(name: str, rules: object) -> tuple[str, ...]:
    """Return the names of some rules, which may be those of the watch; none are fine.

    Raises:
        ArgumentError: If there is no such rule; names the argument and the closest rule.
    """
    return check_some(name, rules, (*(each.name for each in RULES), SPIKE, UNBOUNDED)) if rules else ()


_SAME_FACTOR = 0.8  # the exponent from which on a factor of the first record is that of the run


class Examination:
    """Collects the records of a run and derives the findings.

    During a run, records are added as they are written; afterwards, they are read from the files. Both give the same
    findings, because the rules only see what was added.

    Args:
        graph: The recorded graph, for the classes of the modules and their edges.
        coverage: The contents of ``receipt.json``.
        types: The class names of the modules, in addition to those in the coverage and in the graph.
        ignored: The names of the rules to leave out. What they would explain becomes findings of their own.

    Note:
        Memory is bounded: at most 512 records of each kind of tensor are kept, and at most 128 if they take more than
        16 MB. A record takes 104 bytes per site.
    """

    def __init__(
        self,
        graph: Graph | None = None,
        coverage: Mapping[str, Any] | None = None,
        *,
        types: Mapping[str, str] | None = None,
        ignored: Collection[str] = (),
    ) -> None:
        self.graph = graph
        self.coverage = coverage or {}
        self.types = types or {}
        self.ignored = set(ignored)
        self._tables: dict[tuple[str, str], Table] = {}
        self._losses = Table()
        self._odd: tuple[Graph | None, tuple[OddBlock, ...]] = (None, ())

    def add(self, record: SiteRecords) -> None:
        """Add a record. Records of one recorder come in the order of their steps; a repeated step is replaced."""
        record, sides = record.without_losses()
        if sides is not None and record.stage == "train":
            self._losses.add(sides)
        outputs, inputs = record.split()
        if outputs.sites or inputs is None:
            self._tables.setdefault((record.group, record.stage), Table()).add(outputs)
        if inputs is not None:
            self._tables.setdefault((f"{record.group} of inputs", record.stage), Table()).add(inputs)

    def evidence(self) -> Evidence:
        """Return the evidence so far."""
        activations, gradients, parameters = (
            self._tables.get((group, "train"), Table()) for group in ("activations", "gradients", "parameters")
        )
        inputs = self._tables.get(("activations of inputs", "train"), Table())
        names = [site.name for table in (activations, gradients, parameters, inputs) for site in table.places]
        if self._odd[0] is not self.graph:
            self._odd = self.graph, () if self.graph is None else odd_blocks(self.graph)
        return Evidence(
            activations=activations,
            gradients=gradients,
            parameters=parameters,
            validation=self._tables.get(("activations", "validate"), Table()),
            inputs=inputs,
            losses=self._losses,
            wiring=Wiring(names, self.graph, {**_types(self.coverage), **self.types}),
            coverage=self.coverage,
            odd_blocks=self._odd[1],
        )

    def gaps(self) -> tuple[Gap, ...]:
        """Return the rules that cannot run on the records so far, with the reasons."""
        rules = [rule.name for rule in RULES if rule.name not in self.ignored]
        return gaps_of(group_records(self._tables), self.coverage, rules, has_graph=self.graph is not None)

    def diagnosis(self, watched: list[Finding]) -> Diagnosis:
        """Return the findings so far with those of the watch, and the rules that cannot run."""
        return Diagnosis(with_watched(self.findings(), watched), self.gaps())

    def findings(self) -> list[Finding]:
        """Return the findings so far: causes first, consequences merged into them."""
        evidence = self.evidence().of_model()
        bad = finiteness.first_bad_step(evidence)
        found: list[Finding] = []
        whole = evidence
        if bad is not None:
            # After a NaN every other statistic is a consequence of it.
            evidence = evidence.before(bad)
        # Infinite and zero statistics occur; comparisons with the resulting NaN are false.
        with np.errstate(all="ignore"):
            for rule in RULES:
                if rule.name not in self.ignored:
                    found += rule.examine(rule, whole if rule.name == NON_FINITE else evidence)
        for table in self._tables.values():
            table.free()
        return _merged(sorted(found, key=lambda each: _rank(each, evidence)), evidence)


def _types(coverage: Mapping[str, Any]) -> dict[str, str]:
    """Return the class names of the modules in the receipts."""
    receipts = (receipt.get("modules") for receipt in coverage.values() if isinstance(receipt, Mapping))
    modules = (each.items() for each in receipts if isinstance(each, Mapping))
    return {
        str(name): str(about["type"])
        for items in modules
        for name, about in items
        if isinstance(about, Mapping) and "type" in about
    }


def _rank(finding: Finding, evidence: Evidence) -> tuple[int, int, int]:
    # This rule has an order of its own.
    order = 0 if finding.rule == UNLIKE else evidence.wiring.order.get(finding.module, -1)
    return SEVERITIES.index(finding.severity), _PLACES[finding.rule], order


def _merged(found: list[Finding], evidence: Evidence) -> list[Finding]:
    """Merge each finding into the first one that explains it, or else into the cause of one that explains it."""
    explains = {rule.name: rule.explains for rule in RULES}
    kept: list[Finding] = []
    effects: list[tuple[int, Finding]] = []  # with the place of their cause
    for each in found:
        causes = (place for place, one in (*enumerate(kept), *effects) if _explains(one, each, explains, evidence))
        place = next(causes, len(kept))
        if place == len(kept):
            kept.append(each)
        elif _precedes(each, kept[place], evidence):
            kept[place] = _with(each, kept[place])
        else:
            effects.append((place, each))
            kept[place] = _with(kept[place], each)
    return kept


def _precedes(step: Finding, other: Finding, evidence: Evidence) -> bool:
    """Return True if a step of the gradient was there before a saturation began, at least two records later.

    Most findings are dated to the first record, which says nothing. The factor of a step is known in each record.
    """
    begun = other.numbers.get(USUAL_UNTIL, other.first_step)
    is_there = step.numbers.get("first", 0.0) >= step.numbers.get("factor", np.inf) ** _SAME_FACTOR
    is_one = (step.rule, other.rule) == (GRADIENT_STEP, "saturation")
    return is_one and is_there and sum(step <= begun for step in evidence.gradients.steps) > 2


def _explains(cause: Finding, effect: Finding, explains: Mapping[str, Mapping[str, Any]], evidence: Evidence) -> bool:
    where = explains.get(cause.rule, {}).get(effect.rule, ())
    if not where or (cause.is_note and not effect.is_note):
        return False
    if "any" in where or not cause.module:
        return True
    wiring = evidence.wiring
    # A zero stops the gradients of the factors that it is multiplied with.
    partners = {name for consumer in wiring.outputs.get(cause.module, ()) for name in wiring.inputs[consumer]}
    is_same = effect.module in (cause.module, *cause.others)
    if ODD_BLOCK in (cause.rule, effect.rule):  # which may name a module in the same block, or the block
        is_same |= f"{cause.module}.".startswith(_block(effect)) or f"{effect.module}.".startswith(_block(cause))
    return (
        ("same" in where and is_same)
        or ("upstream" in where and effect.module in wiring.upstream(cause.module) | partners)
        or ("downstream" in where and effect.module in wiring.downstream(cause.module))
    )


def _block(finding: Finding) -> str:
    """Return the innermost numbered module around the module of a finding, or else the module, with a dot."""
    found = re.match(r"(.*\.)?[0-9]+\.", f"{finding.module}.")
    return found[0] if found else f"{finding.module}."


def _with(cause: Finding, effect: Finding) -> Finding:
    others = dict.fromkeys([*cause.others, effect.module, *effect.others])
    others.pop(cause.module, None)
    others.pop("", None)
    rules = dict.fromkeys([*cause.consequences, *([effect.rule] if effect.rule != cause.rule else [])])
    return replace(cause, others=tuple(others), consequences=tuple(rules))
