"""A rule: a function that yields findings, with its limits as keyword arguments, and the texts of the findings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_recorder.insight.evidence import Evidence
from lightning_recorder.insight.finding import SEVERITIES, Finding, Severity

__all__ = ["ANY_GROUP", "DATA", "GRAPH", "VALIDATION", "Rule", "rule"]

ANY_GROUP, DATA, GRAPH, VALIDATION = "any", "data", "graph", "validation"
"""The values of ``needs`` in addition to the groups of records.

In this order: any one of the groups, the samples of the batches, the recorded graph, and the validation.
"""

Examine = Callable[..., Iterable[Finding]]
"""A function of the evidence. Its keyword arguments are the limits of the rule, with their defaults."""


@dataclass(frozen=True)
class Rule:
    """A rule: a function with its limits, and the texts of its findings.

    Args:
        name: The name of the rule.
        severity: The severity of findings that set none themselves.
        statistic: The examined statistic, in words.
        usual: The values in healthy runs.
        why: The usual cause.
        next: What to look at and what to try.
        false_alarms: Healthy cases that can look like the fault, and how the rule avoids them.
        function: A function that yields the findings. Its keyword arguments are the limits.
        needs: The inputs of the rule: groups of records, ``"any"`` for any one group, ``"data"``, ``"graph"`` or
            ``"validation"``; empty if the rule can always run.
        records: The least number of records in each group.
        explains: The rules whose findings are consequences of this rule's findings, each with the position of their
            modules relative to the module at fault: ``"same"``, ``"upstream"``, ``"downstream"`` or ``"any"``.
        is_lasting: True if the fault does not disappear during training. Its finding is then logged when first found.
    """

    name: str
    severity: Severity
    statistic: str
    usual: str
    why: str
    next: str
    false_alarms: str
    function: Examine
    needs: tuple[str, ...]
    records: int
    explains: Mapping[str, Collection[str]]
    is_lasting: bool

    @cached_property
    def thresholds(self) -> dict[str, float]:
        """The default limits by name, read from the signature of the function."""
        arguments = inspect.signature(self.function).parameters.values()
        return {each.name: each.default for each in arguments if each.kind is each.KEYWORD_ONLY}

    def examine(self, evidence: Evidence, **limits: float) -> list[Finding]:
        """Return the findings of the rule.

        Args:
            evidence: The evidence.
            limits: Values that replace the default limits.
        """
        return [
            replace(
                each,
                rule=self.name,
                severity=each.severity if each.severity in SEVERITIES else self.severity,
                why=each.why or self.why,
                next=each.next or self.next,
                usual=self.usual,
            )
            for each in self.function(evidence, **limits)
        ]


def rule(
    name: str,
    severity: Severity = "warning",
    *,
    statistic: str,
    usual: str,
    why: str,
    next: str,  # noqa: A002 - the name that findings.json has
    false_alarms: str,
    needs: tuple[str, ...] = (),
    records: int = 0,
    explains: Mapping[str, Collection[str]] | None = None,
    is_lasting: bool = False,
) -> Callable[[Examine], Rule]:
    """Turn a function into a rule; :class:`Rule` describes the arguments."""

    def decorate(function: Examine) -> Rule:
        return Rule(
            name=name,
            severity=severity,
            statistic=statistic,
            usual=usual,
            why=why,
            next=next,
            false_alarms=false_alarms,
            function=function,
            needs=needs,
            records=records,
            explains=explains or {},
            is_lasting=is_lasting,
        )

    return decorate
