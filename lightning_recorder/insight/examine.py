"""Derive the ranked findings of a run from its records and its graph, during or after the training."""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lightning_recorder.errors import check_some
from lightning_recorder.graph.model import Graph
from lightning_recorder.insight.data_facts import DataFacts
from lightning_recorder.insight.evidence import STATISTICS, Evidence
from lightning_recorder.insight.finding import (
    ACTED,
    ALL_IGNORED,
    LOSS_OF_A_GUESS,
    NON_FINITE,
    SEVERITIES,
    SPIKE,
    STILL_FALLS,
    UNBOUNDED,
    USUAL_UNTIL,
    Finding,
    with_watched,
)
from lightning_recorder.insight.gaps import HEADS, Diagnosis, gaps_of, group_records
from lightning_recorder.insight.module_edges import Wiring
from lightning_recorder.insight.parts import add_parts, new_parts
from lightning_recorder.insight.rule import DATA, GRAPH, Rule
from lightning_recorder.insight.rules import RULES
from lightning_recorder.insight.rules.comparisons import ODD_BLOCK, UNLIKE
from lightning_recorder.insight.rules.gradient_steps import GRADIENT_STEP
from lightning_recorder.insight.rules.held_parts import after_a_copy
from lightning_recorder.insight.rules.non_finite import first_bad_step
from lightning_recorder.records.history import History
from lightning_recorder.records.parts import EXPERT_STATISTICS, HEAD_STATISTICS
from lightning_recorder.records.table import Table

__all__ = ["RunFacts", "RunHistory", "causes_first", "check_rules", "evidence_of", "examine"]


def causes_first(rules: Sequence[Rule]) -> dict[str, int]:
    """Return the rank of each rule: after all rules that explain it, otherwise in the given order.

    Raises:
        ValueError: If rules explain each other in a cycle, so that there is no such order.
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
    """Check the names of rules, including rules of the watch, and return them. An empty list is allowed.

    Raises:
        ArgumentError: If a rule does not exist. The message names the argument and the closest rule.
    """
    return check_some(name, rules, (*(each.name for each in RULES), SPIKE, UNBOUNDED, ACTED)) if rules else ()


_SAME_FACTOR = 0.8  # the first record has the same step if its factor is at least the run's factor to this power


class RunHistory:
    """The records of a run, one history for each group and stage.

    Note:
        Memory is bounded: at most 512 records of each kind of tensor are kept, and at most 128 if they take more than
        16 MB. A record takes 112 bytes per site.
    """

    def __init__(self) -> None:
        self._tables: dict[tuple[str, str], History] = {}
        self.losses = History(STATISTICS)
        """The predictions and targets of losses in training."""
        self.heads, self.experts = new_parts(HEAD_STATISTICS), new_parts(EXPERT_STATISTICS)
        """The heads of attention and the experts of routers in training."""
        self._found: tuple[Graph | None, tuple[object, ...], list[Finding]] | None = None

    def add(self, record: Table) -> None:
        """Add a record. Each recorder adds records in the order of their steps; a repeated step replaces its record."""
        self._found = None
        # Targets may have any values, so the rules about layers do not apply to them.
        group, stage = record.group, record.stage
        record, sides = record.without_losses()
        if sides is not None and stage == "train":
            self.losses.add(sides)
            for table in (self.heads, self.experts) if sides.tensors else ():
                add_parts(table, sides)
        outputs, inputs = record.split()
        if outputs.sites or inputs is None:
            self._tables.setdefault((group, stage), History(STATISTICS)).add(outputs)
        if inputs is not None:
            self._tables.setdefault((f"{group} of inputs", stage), History(STATISTICS)).add(inputs)

    def table(self, group: str, stage: str = "train") -> History:
        """Return the history of a group, maybe empty. The group of module inputs is ``"activations of inputs"``."""
        return self._tables.get((group, stage), History(STATISTICS))

    def counts(self, of_loss: Container[str] = ()) -> dict[str, int]:
        """Return the number of records with at least one layer, for each group and for the validation.

        Args:
            of_loss: The functions of the loss, which do not count as layers.
        """
        return group_records({key: table.without(of_loss) for key, table in self._tables.items()})

    def findings(self, evidence: Evidence, ignored: Collection[str]) -> list[Finding]:
        """Return the findings of evidence from these records; the last findings if nothing has changed."""
        graph = evidence.wiring.graph
        read = evidence.data, evidence.wiring.types, evidence.missing, frozenset(ignored)
        # Compare graphs by identity: equal graphs may differ in what rules show, such as lines of code.
        if self._found is None or self._found[0] is not graph or self._found[1] != read:
            self._found = graph, read, _findings(evidence, ignored)
            self.free()
        return self._found[2]

    def free(self) -> None:
        """Free the arrays that were cached for the rules."""
        for table in (*self._tables.values(), self.losses, self.heads, self.experts):
            table.free()


@dataclass(frozen=True)
class RunFacts:
    """Everything that is known about a run in addition to its records and its graph.

    Args:
        coverage: The contents of ``receipt.json``.
        types: Class names of modules, in addition to those in the coverage and in the graph.
        ignored: The names of the rules to leave out. Consequences of their findings become separate findings.
        watched: The findings of the watch on every step, in the order of their steps.
        data: Facts about the samples of the batches; None if the batches were not watched.
    """

    coverage: Mapping[str, Any] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)
    ignored: Collection[str] = ()
    watched: Sequence[Finding] = ()
    data: DataFacts | None = None


def examine(history: RunHistory, graph: Graph | None = None, facts: RunFacts | None = None) -> Diagnosis:
    """Return the findings of a run so far, causes first, and the rules that could not run.

    A running fit, ``doctor``, the page, TensorBoard and notebooks all call this function, so that equal records give
    equal findings.

    Args:
        history: The records.
        graph: The recorded graph, for the classes of the modules and their edges.
        facts: Everything else that is known.
    """
    facts = facts or RunFacts()
    evidence = evidence_of(history, graph, facts)
    found = history.findings(evidence, facts.ignored)
    watched = [each for each in facts.watched if each.rule not in facts.ignored]
    rules = [rule for rule in RULES if rule.name not in facts.ignored]
    known = {GRAPH: graph is not None, DATA: facts.data is not None, HEADS: bool(evidence.heads.places)}
    gaps = gaps_of(history.counts(evidence.wiring.of_loss), facts.coverage, rules, known=known)
    findings = with_watched(*([after_a_copy(each, evidence) for each in some] for some in (found, watched)))
    if any(not each.is_note for each in findings):
        findings = [each for each in findings if each.rule not in (LOSS_OF_A_GUESS, STILL_FALLS)]
    return Diagnosis(findings, gaps)


def evidence_of(history: RunHistory, graph: Graph | None, facts: RunFacts) -> Evidence:
    """Return everything that the rules may examine: the layers, without the functions after the last layer."""
    tables = [history.table(group) for group in ("activations", "gradients", "parameters", "activations of inputs")]
    activations, gradients, parameters, inputs = tables
    names = [site.name for table in tables for site in table.places]
    return Evidence(
        activations=activations,
        gradients=gradients,
        parameters=parameters,
        validation=history.table("activations", "validate"),
        inputs=inputs,
        losses=history.losses,
        heads=history.heads,
        experts=history.experts,
        wiring=Wiring(names, graph, {**_types(facts.coverage), **facts.types}),
        missing=tuple(_missing(facts.coverage)),
        data=facts.data or DataFacts(),
    ).of_model()


def _findings(evidence: Evidence, ignored: Collection[str]) -> list[Finding]:
    """Return the findings from records: causes first, consequences merged into them."""
    bad = first_bad_step(evidence)
    # After a NaN, all other statistics are consequences of the NaN.
    healthy = evidence if bad is None else evidence.before(bad)
    found: list[Finding] = []
    # Infinite and zero statistics may give NaN, and comparisons with NaN are False.
    with np.errstate(all="ignore"):
        for rule in RULES:
            if rule.name not in ignored:
                one = evidence if rule.name in (NON_FINITE, ALL_IGNORED) else healthy
                found += rule.examine(one)
                found += _of_other_loaders(rule, one)
    return _merged(sorted(found, key=lambda each: _rank(each, healthy)), healthy)


def _of_other_loaders(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """Yield the findings of a rule about the second and further training loaders."""
    for number, data in enumerate(evidence.data.others if DATA in rule.needs else (), 2):
        for each in rule.examine(replace(evidence, data=data)):
            yield replace(each, verdict=f"loader {number}: {each.verdict}", path=f"loader {number}")


def _types(coverage: Mapping[str, Any]) -> dict[str, str]:
    """Return the class names of the modules in the coverage receipts."""
    receipts = (receipt.get("modules") for receipt in coverage.values() if isinstance(receipt, Mapping))
    modules = (each.items() for each in receipts if isinstance(each, Mapping))
    return {
        str(name): str(about["type"])
        for items in modules
        for name, about in items
        if isinstance(about, Mapping) and "type" in about
    }


def _missing(coverage: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the modules whose parameters were not recorded, each with the reason."""
    for label, receipt in coverage.items():
        modules = receipt.get("modules") if isinstance(receipt, Mapping) else None
        if label.partition("-")[0] == "parameters" and isinstance(modules, Mapping):
            for name, about in modules.items():
                if isinstance(about, Mapping) and not about.get("fired", True):
                    yield str(name), str(about.get("why", ""))


def _rank(finding: Finding, evidence: Evidence) -> tuple[int, int, int]:
    # The findings of the rule UNLIKE keep the order in which the rule yields them.
    order = 0 if finding.rule == UNLIKE else evidence.wiring.order.get(finding.module, -1)
    return SEVERITIES.index(finding.severity), _PLACES[finding.rule], order


def _merged(found: list[Finding], evidence: Evidence) -> list[Finding]:
    """Merge each finding into the first finding that explains it, or into the cause of that finding."""
    explains = {rule.name: rule.explains for rule in RULES}
    kept: list[Finding] = []
    effects: list[tuple[int, Finding]] = []  # each with the index of its cause in ``kept``
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
    """Return True if a step of the gradient along the blocks existed in the first record, before a saturation began.

    The saturation must begin after at least two records. Steps of findings cannot be compared instead, since most
    findings are dated to the first record.
    """
    if (step.rule, other.rule) != (GRADIENT_STEP, "saturation"):
        return False
    begun = other.numbers.get(USUAL_UNTIL, other.first_step)
    is_there = step.numbers.get("first", 0.0) >= step.numbers.get("factor", np.inf) ** _SAME_FACTOR
    return is_there and sum(step <= begun for step in evidence.gradients.steps) > 2


def _explains(cause: Finding, effect: Finding, explains: Mapping[str, Mapping[str, Any]], evidence: Evidence) -> bool:
    where = explains.get(cause.rule, {}).get(effect.rule, ())
    if not where or (cause.is_note and not effect.is_note):
        return False
    if "any" in where or not cause.module:
        return True
    # The output of a layer is the output of the last function that it calls.
    if cause.rule == effect.rule and effect.module.rpartition(".")[0] == cause.module:
        return True
    wiring = evidence.wiring
    # In a product, a factor of zero stops the gradients of the other factors, so their modules count as upstream.
    partners = {name for consumer in wiring.outputs.get(cause.module, ()) for name in wiring.inputs[consumer]}
    is_same = effect.module in (cause.module, *cause.others)
    if ODD_BLOCK in (cause.rule, effect.rule):  # the rule may name the block, or a module inside of it
        is_same |= f"{cause.module}.".startswith(_block(effect)) or f"{effect.module}.".startswith(_block(cause))
    return (
        ("same" in where and is_same)
        or ("upstream" in where and effect.module in wiring.upstream(cause.module) | partners)
        or ("downstream" in where and effect.module in wiring.downstream(cause.module))
    )


def _block(finding: Finding) -> str:
    """Return the innermost numbered module around the module of a finding, or else that module, with a final dot."""
    found = re.match(r"(.*\.)?[0-9]+\.", f"{finding.module}.")
    return found[0] if found else f"{finding.module}."


def _with(cause: Finding, effect: Finding) -> Finding:
    others = dict.fromkeys([*cause.others, effect.module, *effect.others])
    others.pop(cause.module, None)
    others.pop("", None)
    rules = dict.fromkeys([*cause.consequences, *([effect.rule] if effect.rule != cause.rule else [])])
    return replace(cause, others=tuple(others), consequences=tuple(rules))
