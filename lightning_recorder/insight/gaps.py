"""The rules that could not run, and the reasons. A run is called healthy only if enough was examined."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning_recorder.insight.finding import Finding, findings_from_json, findings_to_json
from lightning_recorder.insight.rule import ANY_GROUP, DATA, GRAPH, VALIDATION, Rule

__all__ = ["HEADS", "Diagnosis", "Gap", "gaps_of", "group_records"]

_Reason = tuple[str, str, bool, Callable[[tuple[str, ...], int], bool]]
"""A subject that was not examined, the reason, True if this is expected, and a function that selects the rules."""

HEADS = "heads"

FEWEST_RECORDS = 3
"""The number of records that most rules need. A run with fewer records is not called healthy."""

_GROUPS = {"activations": "ActivationRecorder", "gradients": "GradientRecorder", "parameters": "ParameterRecorder"}
_FEW = 3  # the largest number of modules that a reason names
_MOST_REASONS = 3


@dataclass(frozen=True)
class Gap:
    """Rules that could not run for one reason.

    Args:
        what: The part that could not be examined, such as ``"activations"``.
        why: The reason, in words.
        rules: The names of the rules.
        is_expected: True if the user left the subject out, or if only rules that need a longer run could not run. Then
            the run may still be called healthy.
    """

    what: str
    why: str
    rules: tuple[str, ...]
    is_expected: bool

    @property
    def line(self) -> str:
        """The gap in one line, without the names of the rules."""
        count = f" ({len(self.rules)} rule{'s' * (len(self.rules) != 1)} could not run)" if self.rules else ""
        return f"not examined: {self.what}, because {self.why}{count}"


@dataclass(frozen=True)
class Diagnosis:
    """The findings of a run, and the rules that could not run.

    Args:
        findings: The findings, causes first.
        gaps: The rules that could not run, with the reasons.
    """

    findings: list[Finding]
    gaps: tuple[Gap, ...] = ()

    @property
    def bad(self) -> list[Finding]:
        """The findings without the notes."""
        return [each for each in self.findings if not each.is_note]

    @property
    def open(self) -> tuple[Gap, ...]:
        """The unexpected gaps. With any of them, a run without findings is not called healthy."""
        return tuple(each for each in self.gaps if not each.is_expected)

    @property
    def is_healthy(self) -> bool | None:
        """True if there are no findings except notes; None if too little was examined."""
        return False if self.bad else None if self.open else True

    @property
    def verdict(self) -> str:
        """``"healthy"``, the number of findings, or ``"no findings"`` if too little was examined for ``"healthy"``."""
        if self.bad:
            return f"{len(self.bad)} finding" + "s" * (len(self.bad) != 1)
        return "no findings" if self.open else "healthy"

    @staticmethod
    def from_json(data: Any) -> Diagnosis:
        """Return the diagnosis from the contents of ``findings.json``.

        Raises:
            ArgumentError: If the findings were not written by this package.
            LookupError, TypeError: If the list ``not_examined`` is damaged.
        """
        gaps = [
            Gap(str(each["what"]), str(each["why"]), tuple(map(str, each["rules"])), each["is_expected"] is True)
            for each in data.get("not_examined", ())
        ]
        return Diagnosis(findings_from_json(data), tuple(gaps))

    def to_json(self) -> dict[str, Any]:
        """Return the diagnosis as JSON values, the contents of ``findings.json``.

        The keys are those of :func:`findings_to_json` and ``not_examined``, a list with the fields of :class:`Gap`.
        ``healthy`` is None if there are no findings and too little was examined.
        """
        gaps = [{**asdict(each), "rules": list(each.rules)} for each in self.gaps]
        return {**findings_to_json(self.findings), "healthy": self.is_healthy, "not_examined": gaps}


def group_records(tables: Mapping[tuple[str, str], Any]) -> dict[str, int]:
    """Return the number of records with at least one tensor, for each group and for the validation."""
    found = dict.fromkeys((*_GROUPS, VALIDATION), 0)
    for (group, stage), table in tables.items():
        name = group.removesuffix(" of inputs") if stage == "train" else VALIDATION
        if name in found and table.places:
            found[name] = max(found[name], len(table))
    return found


def gaps_of(
    records: Mapping[str, int], coverage: Mapping[str, Any], rules: Iterable[Rule], *, known: Mapping[str, bool]
) -> tuple[Gap, ...]:
    """Return the rules that could not run, each with the first reason that applies.

    ``known`` maps :data:`GRAPH`, :data:`DATA` and :data:`HEADS` to True if a graph was recorded, batches were watched,
    and attention heads were recorded.
    """
    left = [rule for rule in rules if rule.needs]
    found = []
    for what, why, is_expected, is_concerned in _reasons(records, coverage, known):
        concerned = tuple(rule.name for rule in left if is_concerned(rule.needs, rule.records))
        left = [rule for rule in left if rule.name not in concerned]
        if concerned or not is_expected or is_concerned is _nothing:
            found.append(Gap(what, why, concerned, is_expected))
    return tuple(found)


def _reasons(records: Mapping[str, int], coverage: Mapping[str, Any], known: Mapping[str, bool]) -> Iterator[_Reason]:
    """Yield the subjects that were not examined and the reasons, unexpected reasons first."""
    receipts = {group: _receipts(coverage, group) for group in _GROUPS}
    recorded = [group for group in _GROUPS if records[group]]
    most = max(records[group] for group in _GROUPS)
    if not recorded and not any(receipts.values()):
        words = "activations, gradients and parameters"
        yield words, "no record of training has any", False, lambda needs, _: needs not in ((GRAPH,), (DATA,))
    for group in _GROUPS:
        if group not in recorded and receipts[group]:
            yield group, _why_empty(receipts[group]), False, _reads(group, *([] if recorded else [ANY_GROUP]))
        if group in recorded and (why := _why_no_module(receipts[group])):
            yield f"the modules of the {group}", why, False, _nothing  # torch functions alone were recorded
        for each in receipts[group] if group in recorded else ():
            if each.get("ended"):
                yield f"the rest of the {group}", str(each["ended"]), False, _nothing

    for each in receipts["activations"] if "activations" in recorded and not known[HEADS] else ():
        unseen = each.get("unseen_functions")
        if isinstance(unseen, str) and unseen.startswith("flex_attention"):
            yield "the heads of attention", f"nothing has the scores of {unseen}", True, _nothing

    def is_short(needs: Collection[str], least: int) -> bool:
        return least > min((records[each] for each in needs if each in recorded), default=float("inf"))

    there = f"there {'is only 1 record' if most == 1 else f'are only {most} records'}"
    if 0 < most < FEWEST_RECORDS:
        yield "the course of the run", f"{there}: record more often, or train for longer", False, is_short
    for group, name in _GROUPS.items():
        if group not in recorded and not receipts[group]:
            yield group, f"there was no {name}", True, _reads(group)
    if not known[GRAPH]:
        yield "the graph", "none was recorded", True, _reads(GRAPH)
    if not known[DATA]:
        yield "the samples of the batches", "no StepWatch saw them", True, _reads(DATA)
    if not records[VALIDATION]:
        yield "the validation", "none was recorded", True, _reads(VALIDATION)
    yield "a longer course", there, True, is_short


def _nothing(_needs: Collection[str], _least: int) -> bool:
    """Return False: no rule as a whole is affected."""
    return False


def _reads(*names: str) -> Callable[[Collection[str], int], bool]:
    return lambda needs, _: any(each in needs for each in names)


def _receipts(coverage: Mapping[str, Any], group: str) -> list[Mapping[str, Any]]:
    return [each for label, each in coverage.items() if label.partition("-")[0] == group and isinstance(each, Mapping)]


def _why_empty(receipts: list[Mapping[str, Any]]) -> str:
    """Return the reason why the recorders of a group have no training records."""
    for each in receipts:
        if each.get("ended"):
            return str(each["ended"])
    return _why_no_module(receipts) or "no step of training was recorded"


def _why_no_module(receipts: list[Mapping[str, Any]]) -> str:
    """Return the reason why recorders recorded no module; empty if they recorded one, or if they have no modules."""
    about: dict[str, Mapping[str, Any]] = {}
    for each in receipts:
        modules, functions = each.get("modules"), each.get("functions")
        functions = functions if isinstance(functions, list) else []
        for name, one in modules.items() if isinstance(modules, Mapping) else ():
            if isinstance(one, Mapping) and name not in functions:
                about[str(name)] = one
    missing = {name: str(one.get("why", "")) for name, one in about.items() if not one.get("fired", True)}
    if not missing or len(missing) < len(about):
        return ""
    none = "the only module was not" if len(about) == 1 else f"0 of {len(about)} modules were"
    return f"{none} recorded: {_grouped(missing)}"


def _grouped(missing: Mapping[str, str]) -> str:
    """Return the reasons in words, each with the first modules that it applies to."""
    names: dict[str, list[str]] = {}
    for name, why in missing.items():
        # "never called: no recorded step called it" says the same twice.
        names.setdefault(why.partition(": ")[0] if why.startswith("never called") else why, []).append(name or "(root)")
    parts = []
    for why, several in list(names.items())[:_MOST_REASONS]:
        more = f" and {len(several) - _FEW} more" if len(several) > _FEW else ""
        parts.append(f"{', '.join(several[:_FEW])}{more} ({why})")
    return "; ".join(parts) + (" …" if len(names) > _MOST_REASONS else "")
