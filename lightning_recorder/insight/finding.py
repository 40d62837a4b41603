"""Findings: what is wrong in a run, with the numbers that show it."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from lightning_recorder.errors import ArgumentError
from lightning_recorder.records.file import json_values
from lightning_recorder.untrusted import check_fields

__all__ = [
    "ACTED",
    "ALL_IGNORED",
    "FINDINGS_FORMAT",
    "LOSS_OF_A_GUESS",
    "MAXIMIZED",
    "NON_FINITE",
    "ORIGIN_VALUES",
    "PRIOR_PUSHED_AWAY",
    "RANKS_DIFFER",
    "ROSE",
    "SEVERITIES",
    "SPIKE",
    "UNBOUNDED",
    "USUAL_UNTIL",
    "Finding",
    "RankStrip",
    "Severity",
    "Trace",
    "findings_from_json",
    "findings_to_json",
    "recorded",
    "rows_of",
    "with_watched",
]

FINDINGS_FORMAT = "lightning_recorder.findings/1"
"""The format of ``findings.json``. A reader of version 1 ignores keys that it does not know."""

NON_FINITE = "non-finite"
ALL_IGNORED = "all-ignored"
"""The rules about non-finite values, found in the records and by the watch, and about losses without any target."""

SPIKE = "spike"
"""The rule of the watch about spikes of the loss and the gradient norm."""

UNBOUNDED = "unbounded-loss"
"""The rule of the watch about a loss that falls far below zero."""

ACTED = "acted"
"""The rule of the watch about steps at which it acted on a finding, as the user asked."""

RANKS_DIFFER = "ranks-differ"
"""The rule about ranks whose replicas differ. Both the records and the checksums of the watch show it."""

_GRADIENT_SPIKE = "gradient-spike"  # the rule about spikes in the records

LOSS_OF_A_GUESS, STILL_FALLS = "loss-of-a-guess", "still-falls"
"""The rules about the value of the loss. Their findings matter only if there are no others."""

ORIGIN_VALUES = "values"
"""The key in ``numbers`` for the count of bad values at the origin of the first bad value, if that is known."""

MAXIMIZED = "maximized-loss"
PRIOR_PUSHED_AWAY = "prior-pushed-away"
"""The rules about losses with a term of the wrong sign, which lets the loss fall without bound."""

ROSE = "rose"
"""The key in ``numbers`` for how far the loss or the gradient norm rose before a bad value."""

CAUSES_OF_RISE = ("input-scale", "target-scale", "learning-rate-too-large", "learning-rate-outlier")
"""The rules about causes of divergence."""

CAUSES_OF_BAD_LOSS = ("double-activation", "no-log-softmax", "output-range")
"""The rules about predictions and targets for which a loss is not defined."""

CAUSES_OF_UNBOUNDED = (MAXIMIZED, PRIOR_PUSHED_AWAY, "no-log-softmax", "output-range")
"""The rules about losses without a lower bound."""

USUAL_UNTIL = "usual_until"
"""The key in ``numbers`` for the last recorded step before a change."""

Severity = Literal["critical", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "note")
"""The severities, worst first. A note describes something that is usually intended, so the run counts as healthy."""

_RANKS: dict[str, int] = {each: place for place, each in enumerate(SEVERITIES)}
_RANK_OF_OTHERS = SEVERITIES.index("warning")  # the rank of an unknown severity, from a later version

_BOUND = re.compile(r"(at most |below |at least |above |within a factor of )?-?\d")

_NAMES = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True)
class Trace:
    """The statistic of a finding over the steps.

    Args:
        recorder: The label of the recorder.
        statistic: The name of the statistic.
        steps: The recorded steps, at most 60 of them.
        values: The value at each step.
        module: The name of the module with the tensor.
    """

    recorder: str
    statistic: str
    steps: tuple[int, ...]
    values: tuple[float, ...]
    module: str = ""


@dataclass(frozen=True)
class RankStrip:
    """The distance of each rank from the other ranks for each compared tensor, shown by a finding about ranks."""

    ranks: tuple[int, ...]  # the ranks, the rows
    names: tuple[str, ...]  # the names of the tensors, the columns
    kinds: tuple[str, ...]  # the kind of each tensor: ``"parameter"``, ``"gradient"``, ``"buffer"`` or ``"state"``
    # The number of the shard of each tensor on each rank, ``[tensors][ranks]``; -1 if a rank lacks the tensor. Only
    # ranks with the same shard are compared.
    parts: tuple[tuple[int, ...], ...]
    # The number of the group of ranks with equal values, among the ranks with the same shard, ``[tensors][ranks]``. The
    # largest group has the number 0.
    groups: tuple[tuple[int, ...], ...]
    # the rms of the difference from group 0, divided by the rms of the values, ``[tensors][ranks]``; estimated from a
    # few sums
    distances: tuple[tuple[float, ...], ...]
    compared: int  # the number of all compared tensors, also of those without a column
    step: int = 0  # the number of steps before the comparison


@dataclass(frozen=True)
class Finding:
    """One fault of a run, and its likely cause.

    Args:
        rule: The name of the rule, such as ``"dead-output"``.
        severity: ``"critical"``, ``"warning"`` or ``"note"``.
        module: The name of the module at fault; ``""`` for the whole model.
        path: The path of the tensor in the module, as in a :class:`~lightning_recorder.taps.Site`; may be empty.
        first_step: The first step at which the fault was recorded.
        last_step: The last step at which the fault was recorded.
        records: The number of records that show the fault.
        verdict: What is wrong, in one sentence.
        why: The usual cause.
        next: What to look at and what to try.
        usual: The values of the same statistic in healthy runs.
        numbers: The values that the rule compared, by name.
        others: Further modules with the same finding, or whose own findings follow from it.
        consequences: The names of the rules that found consequences of this fault.
        trace: The statistic over time, if the finding is about one.
        strip: The distances between ranks, if the finding is about ranks that differ.
        parts: The numbers of the attention heads or experts at fault; empty if the whole layer is at fault.
    """

    rule: str
    severity: Severity
    module: str
    path: str
    first_step: int
    last_step: int
    records: int
    verdict: str
    why: str
    next: str
    usual: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    consequences: tuple[str, ...] = ()
    trace: Trace | None = None
    strip: RankStrip | None = None
    parts: tuple[int, ...] = ()

    @property
    def is_note(self) -> bool:
        """True for a note: a run that has only notes is healthy."""
        return self.severity == "note"

    @property
    def layer(self) -> str:
        """The module to mark: ``module``, or the module of the trace if that is inside of ``module``."""
        inner = "" if self.trace is None else self.trace.module
        return inner if self.module and inner.startswith(f"{self.module}.") else self.module

    @property
    def measured(self) -> str:
        """The first number with its name, which is compared with the usual values.

        Empty if ``usual`` has no number: the verdict then explains the numbers.
        """
        if not self.numbers or not _BOUND.match(self.usual):
            return ""
        name, value = next(iter(self.numbers.items()))
        return f"{name.replace('_', ' ')} {value:.4g}"

    @property
    def line(self) -> str:
        """The finding in one line."""
        more = f" ({len(self.others)} more modules are affected)" if len(self.others) > 1 else ""
        return f"{self.severity}: {self.verdict}{more}"


def findings_to_json(findings: list[Finding]) -> dict[str, Any]:
    """Return findings as JSON values, the contents of ``findings.json``.

    The keys are ``format``, ``healthy`` (True if all findings are notes), and ``findings``, a ranked list with the
    fields of :class:`Finding`. NaN and infinities are the strings ``"nan"``, ``"inf"`` and ``"-inf"``, as in record
    files.

    Example:
        >>> findings_to_json([])
        {'format': 'lightning_recorder.findings/1', 'healthy': True, 'findings': []}
    """
    plain = [json_values(asdict(each)) for each in findings]
    return {"format": FINDINGS_FORMAT, "healthy": all(each.is_note for each in findings), "findings": plain}


def findings_from_json(data: Any) -> list[Finding]:
    """Return the findings from the output of :func:`findings_to_json`.

    Rules and severities that this version does not know are kept.

    Raises:
        ArgumentError: If the data has another format.
    """
    if not isinstance(data, Mapping) or data.get("format") != FINDINGS_FORMAT:
        raise ArgumentError(f"expected findings of the format {FINDINGS_FORMAT!r}")
    try:
        return [_finding(each) for each in data["findings"]]
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ArgumentError(f"these are no findings written by lightning_recorder: {error!r}") from error


def recorded(names: Set[str], modules: Iterable[str]) -> dict[str, str]:
    """Map names to recorded modules: each to itself, or else to the first recorded module inside, if there is one.

    Example:
        >>> recorded({"blocks.1", "head"}, ["blocks.0.fc", "blocks.1.norm", "blocks.1.fc", "head"])
        {'head': 'head', 'blocks.1': 'blocks.1.norm'}
    """
    known = dict.fromkeys(modules)
    found = {name: name for name in sorted(names & known.keys())}
    for name in sorted(names - known.keys() - {""}):
        inside = next((each for each in known if each.startswith(f"{name}.")), None)
        if inside is not None:
            found[name] = inside
    return found


def rows_of(findings: Iterable[Finding], sites: Sequence[Hashable]) -> list[tuple[Finding, int | None]]:
    """Return each finding with the row of its tensor, or else the row of the first tensor in its module.

    Findings about modules without a row are left out. Findings about the whole model have None.
    """
    rows = {site: place for place, site in enumerate(sites)}
    first: dict[str, int] = {}
    for place, site in enumerate(sites):
        if isinstance(site, tuple):
            first.setdefault(site[0], place)
    findings = list(findings)
    names = recorded({each.layer for each in findings}, first)
    found = []
    for each in findings:
        row = rows.get((each.layer, each.path))
        if row is None and each.layer in names and each.module:
            row = first[names[each.layer]]
        found.append((each, row))
    return [(each, row) for each, row in found if row is not None or not each.module]


def with_watched(findings: Sequence[Finding], watched: Sequence[Finding]) -> list[Finding]:
    """Return the findings from records and the findings of the watch on every step, ranked together.

    - Non-finite values: the finding of the records is left out if the watch has one. The watch sees the first bad
      value, while the records see only its consequences at a later step. There is one exception: a finding of the watch
      without a known origin is left out if the records of the same step or an earlier step name a module and the loss
      did not rise before. After a rise, that module is only where the divergence ended.
    - Non-finite values in a loss without any target: the finding of the watch is left out, since the records have the
      cause.
    - A spike of the loss or the gradients is ranked after the findings of the records if one of these began before the
      spike, since it is probably the cause. It also counts as earlier if it may have begun between two records.
    - Divergence and a non-finite loss are ranked after the findings of the records if these show an earlier cause.
    - A gradient spike in the records is merged into a finding of the watch if it lies between the first and the last
      spike of that finding. The watch knows the loss of each step.
    - A loss that falls without bound is left out if the finding about the first bad value mentions it, or if the
      records show a wrong sign.

    Args:
        findings: The ranked findings from records.
        watched: The findings of the watch, in the order in which they were found.
    """
    named = [each.first_step for each in findings if each.rule == NON_FINITE and each.module]
    watched = [
        each
        for each in watched
        if each.rule != NON_FINITE
        or each.module
        or ORIGIN_VALUES in each.numbers  # the origin is the code of the model itself, or the batch
        or ROSE in each.numbers
        or min(named, default=math.inf) > each.first_step
    ]
    without_target = min((each.first_step for each in findings if each.rule == ALL_IGNORED), default=math.inf)
    watched = [each for each in watched if each.rule != NON_FINITE or each.first_step < without_target]
    # If the cause of a loss without a lower bound is known, the finding about the loss is left out.
    unlimited = [each for each in findings if each.rule in CAUSES_OF_UNBOUNDED and not each.is_note]
    if unlimited or any(each.rule == NON_FINITE and UNBOUNDED in each.consequences for each in watched):
        watched = [each for each in watched if each.rule != UNBOUNDED]
    for gradients in [each for each in findings if each.rule == _GRADIENT_SPIKE]:
        for place, each in enumerate(watched):
            if each.rule == SPIKE and each.first_step <= gradients.first_step <= each.last_step:
                watched[place] = _joined(each, gradients)
                findings = [other for other in findings if other is not gradients]
                break
    for place, each in enumerate(watched):
        recorded_one = next((other for other in findings if other.rule == each.rule == RANKS_DIFFER), None)
        if recorded_one is not None:
            findings = [other for other in findings if other is not recorded_one]
            if recorded_one.is_note <= each.is_note:  # records have gradients, the watch has distances
                watched[place] = _with_distance(recorded_one, each)
    diverged = next((each for each in watched if ROSE in each.numbers), None)
    reasons = [each for each in findings if each.rule in CAUSES_OF_RISE and not each.is_note]
    of_loss = [each for each in findings if each.rule in CAUSES_OF_BAD_LOSS and not each.is_note]
    if diverged is None and of_loss:  # a bad value that first appears after all modules
        diverged = next((each for each in watched if each.rule == NON_FINITE and not each.module), None)
        reasons = of_loss
    reasons = [each for each in reasons if diverged is not None and each.first_step <= diverged.first_step]
    if diverged is not None and reasons:
        # The first cause gets the severity of the divergence or the non-finite loss that it explains.
        findings = [replace(each, severity=diverged.severity) if each is reasons[0] else each for each in findings]
    known = {(each.rule, each.module, each.path) for each in watched}
    seen = {each.rule for each in watched}
    others = [
        each
        for each in findings
        if (each.rule, each.module, each.path) not in known and not (each.rule == NON_FINITE and each.rule in seen)
    ]
    warnings = (each for each in others if not each.is_note)
    begun = min((each.numbers.get(USUAL_UNTIL, each.first_step) for each in warnings), default=math.inf)
    effects = [each for each in watched if each.rule == SPIKE and begun < each.first_step]
    effects += [diverged] if diverged is not None and reasons else []
    causes = [each for each in watched if each not in effects]
    return sorted([*causes, *others, *effects], key=lambda each: _RANKS.get(each.severity, _RANK_OF_OTHERS))


def _with_distance(finding: Finding, other: Finding) -> Finding:
    """Complete a finding of the records about differing ranks with the finding from the parameter checksums."""
    if finding.is_note != other.is_note:
        return finding
    knows_cause = not other.numbers.keys().isdisjoint(("settings", "idle", "step_counts", "no_sync", "not_averaged"))
    # A loop may clear the gradients before the checksums are computed, so the checksums may lack them.
    knows_gradients = not finding.numbers.get("unreduced") and "compared_gradients" in other.numbers
    if knows_cause or knows_gradients or finding.numbers.keys().isdisjoint(("reduced", "unreduced")):
        finding = replace(finding, why=other.why, next=other.next)
    return replace(
        finding,
        verdict=f"{finding.verdict}; {other.verdict.partition('; ')[2]}",
        first_step=min(finding.first_step, other.first_step),
        numbers={**other.numbers, **finding.numbers},
        strip=other.strip,
    )


def _joined(spike: Finding, gradients: Finding) -> Finding:
    """Merge the finding of the watch about a spike with the finding of the records about the same step."""
    known = "the gradient norm to" in spike.verdict
    most = f"most of the gradient at step {gradients.first_step} is in {gradients.module or '(root)'}"
    return replace(
        spike,
        verdict=f"{spike.verdict}; {most if known else gradients.verdict}",
        # The numbers of the spike come first, since they are shown with the usual values of a spike.
        numbers={**spike.numbers, **gradients.numbers, **spike.numbers},
        others=tuple(dict.fromkeys([*spike.others, gradients.module, *gradients.others])),
        consequences=(*spike.consequences, gradients.rule, *gradients.consequences),
    )


def _finding(data: Mapping[str, Any]) -> Finding:
    known = {key: value for key, value in data.items() if key in Finding.__dataclass_fields__}
    known["numbers"] = {name: _number(value) for name, value in data["numbers"].items()}
    known["others"], known["consequences"] = tuple(data["others"]), tuple(data["consequences"])
    known["parts"] = tuple(data.get("parts", ()))  # files of earlier versions lack this key
    trace = data["trace"]
    if trace is not None:
        steps, values = tuple(trace["steps"]), tuple(map(_number, trace["values"]))
        known["trace"] = Trace(trace["recorder"], trace["statistic"], steps, values, trace.get("module", ""))
        check_fields(replace(known["trace"], values=()))
        if len(steps) != len(values):
            raise ValueError("a trace has not one value for each step")
    if known.get("strip") is not None:
        known["strip"] = _strip(known["strip"])
    found = Finding(**known)
    if not isinstance(found.severity, str):
        raise TypeError("the severity is not a string")
    check_fields(replace(found, severity="note", numbers={}, trace=None, strip=None))
    return found


def _strip(data: Mapping[str, Any]) -> RankStrip:
    known = {name: data[name] for name in RankStrip.__dataclass_fields__}
    known |= {name: tuple(data[name]) for name in ("ranks", "names", "kinds")}
    known |= {name: tuple(map(tuple, data[name])) for name in ("parts", "groups")}
    known["distances"] = tuple(tuple(map(_number, row)) for row in data["distances"])
    found = RankStrip(**known)
    check_fields(replace(found, distances=()))
    shape = [len(found.ranks)] * len(found.names)
    if len(found.kinds) != len(shape) or any(
        [*map(len, rows)] != shape for rows in (found.parts, found.groups, found.distances)
    ):
        raise ValueError("a strip has not one value for each tensor and rank")
    return found


def _number(value: Any) -> float:
    return _NAMES[value] if isinstance(value, str) else float(value)
