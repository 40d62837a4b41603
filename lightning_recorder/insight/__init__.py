"""Findings: what is wrong in a run, derived from its records."""

from lightning_recorder.insight.examination import RULES, Examination, check_rules
from lightning_recorder.insight.finding import (
    FINDINGS_FORMAT,
    NON_FINITE,
    ORIGIN_VALUES,
    SPIKE,
    UNBOUNDED,
    Finding,
    Trace,
    findings_from_json,
    findings_to_json,
    with_watched,
)
from lightning_recorder.insight.gaps import Diagnosis, Gap
from lightning_recorder.insight.rule import STATISTICS, Rule

__all__ = [
    "FINDINGS_FORMAT",
    "NON_FINITE",
    "ORIGIN_VALUES",
    "RULES",
    "SPIKE",
    "STATISTICS",
    "UNBOUNDED",
    "Diagnosis",
    "Examination",
    "Finding",
    "Gap",
    "Rule",
    "Trace",
    "check_rules",
    "findings_from_json",
    "findings_to_json",
    "with_watched",
]
