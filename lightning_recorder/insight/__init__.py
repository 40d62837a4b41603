"""Findings: what is wrong in a run, derived from its records."""

from lightning_recorder.insight.evidence import STATISTICS
from lightning_recorder.insight.examine import RunFacts, RunHistory, check_rules, examine
from lightning_recorder.insight.finding import (
    ACTED,
    NON_FINITE,
    ORIGIN_VALUES,
    ROSE,
    SPIKE,
    UNBOUNDED,
    Finding,
    Trace,
    findings_from_json,
    findings_to_json,
    with_watched,
)
from lightning_recorder.insight.gaps import Diagnosis, Gap
from lightning_recorder.insight.rule import Rule
from lightning_recorder.insight.rules import RULES

__all__ = [
    "ACTED",
    "NON_FINITE",
    "ORIGIN_VALUES",
    "ROSE",
    "RULES",
    "SPIKE",
    "STATISTICS",
    "UNBOUNDED",
    "Diagnosis",
    "Finding",
    "Gap",
    "Rule",
    "RunFacts",
    "RunHistory",
    "Trace",
    "check_rules",
    "examine",
    "findings_from_json",
    "findings_to_json",
    "with_watched",
]
