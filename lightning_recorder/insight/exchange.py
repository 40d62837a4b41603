"""Findings in the formats of other tools: SARIF for code scanning, and JUnit for test reports."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree as ET

from lightning_recorder.graph.model import Graph
from lightning_recorder.insight.finding import Finding
from lightning_recorder.insight.gaps import Diagnosis, Gap
from lightning_recorder.insight.rules import RULES
from lightning_recorder.privacy import LEFT_OUT, hide_places
from lightning_recorder.version import __version__

__all__ = ["ExaminedRun", "next_without_samples", "to_junit", "to_sarif", "verdict_without_samples"]

_TOOL = "lightning-recorder"
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS = {"critical": "error", "warning": "warning", "note": "note"}
_RULES = {rule.name: rule for rule in RULES}
_LINE = re.compile(r"([^\s()'\",;]+\.(?:py|ipynb)):(\d{1,9})(?!\d)")
_LONGEST = 10_000  # the most searched characters of a text; only damaged files have longer texts
_OF_SAMPLE = {"place", "row"}  # keys of ``numbers`` that identify a sample; the row is missing if indices are unknown
_RANGES = re.compile(r"(?<=its inputs are finite) \([^()]*\)")  # value ranges of inputs, which may be from the batch
_NOTHING = Gap("the run", "nothing was recorded", (), is_expected=False)


@dataclass(frozen=True)
class ExaminedRun:
    """A run and its diagnosis."""

    name: str  # the name of the run
    directory: Path  # the folder of its recordings
    diagnosis: Diagnosis | None  # the diagnosis; ``None`` if nothing was recorded
    graph: Graph | None = None  # the recorded graph, for the lines of code
    ignored: Sequence[str] = ()  # the names of the rules that were left out

    @property
    def findings(self) -> list[Finding]:
        """The findings; empty if nothing was recorded."""
        return [] if self.diagnosis is None else self.diagnosis.findings

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """The parts of the run that could not be examined."""
        return (_NOTHING,) if self.diagnosis is None else self.diagnosis.gaps


def next_without_samples(rule: str, following: str, numbers: Mapping[str, Any]) -> str:
    """Return the advice of a finding. If the finding identifies a sample, return the general advice of its rule."""
    if not _OF_SAMPLE & numbers.keys():
        return following
    return _RULES[rule].next if rule in _RULES else LEFT_OUT


def verdict_without_samples(verdict: str) -> str:
    """Return a verdict without the value ranges of tensors."""
    return _RANGES.sub("", verdict)


def to_sarif(runs: Iterable[ExaminedRun]) -> dict[str, Any]:
    """Return the findings as a SARIF 2.1.0 log, as JSON values.

    All runs share one ``run`` of the log, since GitHub accepts only one per tool. Each result has a location, because
    GitHub refuses a log without one: the line of code of the finding, relative to the current folder, or else the file
    with the finding. A gap becomes a notification. Texts contain no folders, addresses or values of samples.

    See Also:
        https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html
    """
    runs = list(runs)
    findings = [(run, each) for run in runs for each in run.findings]
    texts = {each.name: (each.statistic, each.why, each.next, each.severity) for each in RULES}
    for _, each in findings:  # findings of the watch have no rule
        texts.setdefault(each.rule, (each.rule, each.why, _next(each), each.severity))
    places = {name: place for place, name in enumerate(texts)}
    driver = {"name": _TOOL, "semanticVersion": __version__, "rules": [_rule(name, *texts[name]) for name in texts]}
    notes = [_notification(run, gap) for run in runs for gap in run.gaps]
    about = {
        "tool": {"driver": driver},
        "invocations": [{"executionSuccessful": True, "toolExecutionNotifications": notes}],
        "columnKind": "unicodeCodePoints",
        "results": [_result(run, each, places[each.rule]) for run, each in findings],
    }
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [about]}


def to_junit(runs: Iterable[ExaminedRun]) -> str:
    """Return the findings as an XML report of tests in the format of JUnit.

    Each run is a test suite, and each rule a test case. A rule with findings fails. A rule with notes only or without
    findings passes. A rule that could not run is skipped, with the reason. The texts are the same as in
    :func:`to_sarif`.
    """
    suites = ET.Element("testsuites", name=f"{_TOOL} doctor")
    for run in runs:
        suite = ET.SubElement(suites, "testsuite", name=_xml(run.name))
        _add_cases(suite, run)
        _count(suite, suite)
    _count(suites, suites)
    ET.indent(suites, " ")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(suites, encoding="unicode")}\n'


def _rule(name: str, statistic: str, why: str, following: str, severity: str) -> dict[str, Any]:
    help_text = f"Why: {why}\nNext: {following}"
    return {
        "id": name,
        "shortDescription": {"text": statistic},
        "fullDescription": {"text": why},
        "help": {"text": help_text, "markdown": f"**Why:** {why}\n\n**Next:** {following}"},
        "defaultConfiguration": {"level": _LEVELS.get(severity, "warning")},
    }


def _result(run: ExaminedRun, finding: Finding, rule: int) -> dict[str, Any]:
    uri, line = _place(run, finding)
    physical: dict[str, Any] = {"artifactLocation": {"uri": quote(uri, errors="replace")}}
    if line:
        physical["region"] = {"startLine": line}
    location: dict[str, Any] = {"physicalLocation": physical}
    if finding.module:
        location["logicalLocations"] = [{"fullyQualifiedName": finding.module, "kind": "module"}]
    return {
        "ruleId": finding.rule,
        "ruleIndex": rule,
        "level": _LEVELS.get(finding.severity, "warning"),
        "message": {"text": _text(finding)},
        "locations": [location],
        # With this fingerprint, GitHub shows the same finding in a later run as the same alert.
        "partialFingerprints": {"finding/v1": f"{finding.rule}/{finding.module}/{finding.path}"},
        "properties": {"run": run.name, "firstStep": finding.first_step, "lastStep": finding.last_step},
    }


def _notification(run: ExaminedRun, gap: Gap) -> dict[str, Any]:
    return {
        "level": "note" if gap.is_expected else "warning",
        "message": {"text": hide_places(gap.line)},
        "properties": {"run": run.name, "rules": list(gap.rules)},
    }


def _add_cases(suite: ET.Element, run: ExaminedRun) -> None:
    by_rule = {rule: list(each) for rule, each in groupby(sorted(run.findings, key=_rule_of), key=_rule_of)}
    skipped = {rule: gap for gap in run.gaps for rule in gap.rules}
    known = [] if run.diagnosis is None else [name for name in _RULES if name not in run.ignored]
    for rule in dict.fromkeys([*known, *by_rule]):
        found = by_rule.get(rule, [])
        bad = [each for each in found if not each.is_note]
        case = ET.SubElement(suite, "testcase", classname=_xml(run.name), name=_xml(rule), time="0")
        texts = "\n\n".join(_text(each) for each in bad or found)
        if bad:
            uri, line = _place(run, bad[0])
            case.attrib.update({"file": _xml(uri), **({"line": str(line)} if line else {})})
            more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
            message = f"{hide_places(verdict_without_samples(bad[0].verdict))}{more}"
            failure = ET.SubElement(case, "failure", message=_xml(message), type=_xml(bad[0].severity))
            failure.text = _xml(texts)
        elif found:
            ET.SubElement(case, "system-out").text = _xml(texts)
        elif rule in skipped:
            ET.SubElement(case, "skipped", message=_xml(hide_places(skipped[rule].line)))
    for gap in run.gaps:
        if not gap.rules:
            case = ET.SubElement(suite, "testcase", classname=_xml(run.name), name=_xml(gap.what), time="0")
            ET.SubElement(case, "skipped", message=_xml(hide_places(gap.line)))


def _count(element: ET.Element, inside: ET.Element) -> None:
    """Set the counts of test cases, which readers expect in each suite and at the root."""
    for name, tag in (("tests", "testcase"), ("failures", "failure"), ("skipped", "skipped"), ("errors", "error")):
        element.set(name, str(len(list(inside.iter(tag)))))
    element.set("time", "0")


def _rule_of(finding: Finding) -> str:
    return finding.rule


def _text(finding: Finding) -> str:
    """Return a finding as text without private data, so that it may leave the machine."""
    more = f"\nAlso: {', '.join(finding.others)}" if finding.others else ""
    verdict = verdict_without_samples(finding.verdict)
    text = f"{verdict}{more}\nHealthy: {finding.usual}\nWhy: {finding.why}\nNext: {_next(finding)}"
    return hide_places(text)


def _next(finding: Finding) -> str:
    return next_without_samples(finding.rule, finding.next, finding.numbers)


def _place(run: ExaminedRun, finding: Finding) -> tuple[str, int]:
    """Return the file of a finding, relative to the current folder, and its line; 0 if no line of code is known.

    The line is the one that the finding names, or else the line that calls its module. If both are unknown, the file is
    the one that contains the finding.
    """
    nodes = [] if run.graph is None else [node for node in run.graph.nodes if node.source]
    files = {node.source.rpartition(":")[0] for node in nodes}
    called = [node.source for node in nodes if node.kind == "module" and finding.layer and node.name == finding.layer]
    for file, line in _LINE.findall(" ".join([finding.verdict[:_LONGEST], *called])[: 2 * _LONGEST]):
        uri = _relative(file, files)
        if uri:
            return uri, int(line)
    written = Path(run.directory, "findings.json")
    inside = _inside(written.absolute())
    return inside or f"{run.directory.name}/{written.name}", 0


def _relative(file: str, known: Iterable[str]) -> str:
    """Return the path of a code file relative to the current folder; an empty string if it is unknown.

    Args:
        file: The path in a finding: absolute, relative to the folder in which the program ran, or its last two parts.
        known: The paths in the recorded graph.
    """
    if Path(file).is_absolute():
        return _inside(Path(file))
    if ".." in Path(file).parts:
        return ""
    if _is_file(file):
        return file
    longer = {each for each in known if each == file or each.endswith(f"/{file}")}
    if len(longer) == 1:
        (only,) = longer
        return only if not Path(only).is_absolute() else _inside(Path(only))
    folder, _, name = file.rpartition("/")
    return name if folder == Path.cwd().name and _is_file(name) else ""


def _is_file(path: str) -> bool:
    try:
        return Path(path).is_file()
    except (OSError, ValueError):  # a name that no file can have, from a damaged file
        return False


def _inside(path: Path) -> str:
    here = Path.cwd()
    return path.relative_to(here).as_posix() if path.is_relative_to(here) else ""


def _xml(text: str) -> str:
    """Return a text without the characters that XML cannot contain."""
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape", "surrogatepass").decode()
        for char in text
    )
