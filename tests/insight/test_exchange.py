"""Tests of SARIF and JUnit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import jsonschema  # type: ignore[import-untyped]  # it has no types
import pytest

from lightning_recorder.graph.model import Graph, Node
from lightning_recorder.insight import RULES, Diagnosis, Finding, Gap
from lightning_recorder.insight.exchange import ExaminedRun, to_junit, to_sarif

DEAD = Finding(
    "dead-output", "warning", "net.act", "out", 0, 27, 8, "net.act returns only zeros", "The bias.", "Look.", "0.5"
)

TEXT = {"type": "object", "required": ["text"], "properties": {"text": {"type": "string", "minLength": 1}}}
RULE = {
    "type": "object",
    "required": ["id", "shortDescription", "fullDescription", "help", "defaultConfiguration"],
    "properties": {
        "id": {"type": "string", "minLength": 1},
        **dict.fromkeys(("shortDescription", "fullDescription", "help"), TEXT),
        "defaultConfiguration": {"required": ["level"], "properties": {"level": {"$ref": "#/$defs/level"}}},
    },
}
LOCATION = {
    "type": "object",
    "required": ["physicalLocation"],
    "properties": {
        "physicalLocation": {
            "required": ["artifactLocation"],
            "properties": {
                "artifactLocation": {
                    "required": ["uri"],
                    "properties": {"uri": {"type": "string", "pattern": "^[^/:\\\\ ]+(/[^/:\\\\ ]+)*$"}},
                },
                "region": {
                    "required": ["startLine"],
                    "properties": {"startLine": {"type": "integer", "minimum": 1}},
                },
            },
        },
    },
}
RESULT = {
    "type": "object",
    "required": ["ruleId", "ruleIndex", "level", "message", "locations", "partialFingerprints"],
    "properties": {
        "ruleId": {"type": "string"},
        "ruleIndex": {"type": "integer", "minimum": 0},
        "level": {"$ref": "#/$defs/level"},
        "message": TEXT,
        "locations": {"type": "array", "minItems": 1, "items": LOCATION},
        "partialFingerprints": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}
NOTIFICATION = {"type": "object", "required": ["message", "level"], "properties": {"message": TEXT}}
SARIF: dict[str, Any] = {
    "$defs": {"level": {"enum": ["none", "note", "warning", "error"]}},
    "type": "object",
    "required": ["$schema", "version", "runs"],
    "properties": {
        "version": {"const": "2.1.0"},
        "runs": {
            "type": "array",
            "minItems": 1,
            "maxItems": 1,
            "items": {
                "required": ["tool", "invocations", "results"],
                "properties": {
                    "tool": {
                        "required": ["driver"],
                        "properties": {
                            "driver": {
                                "required": ["name", "semanticVersion", "rules"],
                                "properties": {"rules": {"type": "array", "uniqueItems": True, "items": RULE}},
                            }
                        },
                    },
                    "invocations": {
                        "items": {
                            "required": ["executionSuccessful"],
                            "properties": {"toolExecutionNotifications": {"items": NOTIFICATION}},
                        }
                    },
                    "results": {"type": "array", "items": RESULT},
                },
            },
        },
    },
}
"""What the schema of SARIF 2.1.0 requires of the objects that are written, and what GitHub requires in addition.

The latter are the texts of the rules, one run, and in each result one location with a relative address.
"""


def examined(*findings: Finding, gaps: tuple[Gap, ...] = (), graph: Graph | None = None, **about: Any) -> ExaminedRun:
    """Return a run with these findings."""
    folder = about.pop("directory", Path("logs/version_0/recorder"))
    return ExaminedRun("version_0", folder, Diagnosis([*findings], gaps), graph, **about)


def sarif_of(*runs: ExaminedRun) -> dict[str, Any]:
    """Return the run of the SARIF log, which is valid and JSON."""
    log = to_sarif(runs)
    assert json.loads(json.dumps(log, allow_nan=False)) == log
    jsonschema.Draft202012Validator(SARIF).validate(log)
    found: dict[str, Any] = log["runs"][0]
    return found


def place_of(run: ExaminedRun) -> tuple[str, int | None]:
    """Return the file and the line of the only result."""
    (result,) = sarif_of(run)["results"]
    physical = result["locations"][0]["physicalLocation"]
    return physical["artifactLocation"]["uri"], physical.get("region", {}).get("startLine")


def cases_of(*runs: ExaminedRun) -> dict[str, ET.Element]:
    """Return the test cases of a JUnit report by name."""
    tree = ET.fromstring(to_junit(runs))
    return {f"{each.get('classname')}: {each.get('name')}": each for each in tree.iter("testcase")}


def kinds_of(cases: dict[str, ET.Element]) -> dict[str, str]:
    """Return the kind of each test case that does not simply pass."""
    return {name: case[0].tag for name, case in cases.items() if len(case)}


def graph(source: str, name: str = "net.act") -> Graph:
    """Return a graph in which a line calls a module."""
    root = Node(0, "module", "", None, 0)
    return Graph((root, Node(1, "module", name, 0, 1, source=source)), ())


def test_a_healthy_run_has_rules_and_no_results() -> None:
    """All rules are described, with cause and advice in the help, and there is no result."""
    found = sarif_of(examined())
    rules = found["tool"]["driver"]["rules"]
    assert [each["id"] for each in rules] == [each.name for each in RULES]
    assert all(rule.why in each["help"]["text"] for rule, each in zip(RULES, rules, strict=True))
    assert all(rule.next in each["help"]["markdown"] for rule, each in zip(RULES, rules, strict=True))
    assert found["results"] == found["invocations"][0]["toolExecutionNotifications"] == []


@pytest.mark.parametrize(
    ("severity", "level"), [("critical", "error"), ("warning", "warning"), ("note", "note"), ("later", "warning")]
)
def test_the_severity_is_the_level(severity: Any, level: str) -> None:
    """A severity of a later version is a warning."""
    (result,) = sarif_of(examined(replace(DEAD, severity=severity)))["results"]
    assert result["level"] == level


def test_a_result_names_its_rule_and_module() -> None:
    """The index leads to the rule, the module is a logical location, and the text has cause and advice."""
    found = sarif_of(examined(replace(DEAD, others=("net.fc",))))
    (result,) = found["results"]
    assert found["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"] == "dead-output"
    assert result["locations"][0]["logicalLocations"] == [{"fullyQualifiedName": "net.act", "kind": "module"}]
    lines = result["message"]["text"].splitlines()
    assert lines == ["net.act returns only zeros", "Also: net.fc", "Healthy: 0.5", "Why: The bias.", "Next: Look."]


def test_a_finding_of_the_watch_has_a_rule() -> None:
    """A finding whose rule is not in the list, such as one of the watch, adds its rule once."""
    spike = replace(DEAD, rule="spike", module="", path="")
    found = sarif_of(examined(spike, replace(spike, first_step=5)))
    rules = [each["id"] for each in found["tool"]["driver"]["rules"]]
    assert rules[len(RULES) :] == ["spike"]
    assert [each["ruleIndex"] for each in found["results"]] == [len(RULES)] * 2


def test_all_runs_are_in_one_run_of_the_log() -> None:
    """Several runs share the rules, and each result and notification names its run."""
    other = replace(examined(DEAD), name="version_1")
    found = sarif_of(examined(DEAD), other)
    assert [each["properties"]["run"] for each in found["results"]] == ["version_0", "version_1"]


def test_the_line_of_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the line in the sentence, or else the one that calls the module; never an absolute path."""
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    for file in ("models/net.py", "train.py"):
        Path(file).touch()
    named = replace(DEAD, verdict="softmax in net (models/net.py:42) runs along the batch")
    assert place_of(examined(named, graph=graph("models/net.py:7"))) == ("models/net.py", 42)
    assert place_of(examined(DEAD, graph=graph("models/net.py:7"))) == ("models/net.py", 7)
    assert place_of(examined(DEAD, graph=graph(f"{tmp_path}/train.py:7"))) == ("train.py", 7)
    # The watch gives the last two parts of a path.
    short = replace(DEAD, module="", verdict=f"log at {tmp_path.name}/train.py:14; its inputs are finite")
    assert place_of(examined(short)) == ("train.py", 14)
    deep = replace(DEAD, module="", verdict="log at nets/gan.py:3")
    assert place_of(examined(deep, graph=graph("source/nets/gan.py:9"))) == ("source/nets/gan.py", 3)


def test_a_finding_without_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is the one with the finding, without the folders outside of the current one."""
    monkeypatch.chdir(tmp_path)
    inside, outside = tmp_path / "logs/version 0/recorder", tmp_path.parent / "elsewhere/recorder"
    whole = replace(DEAD, module="")
    for finding in (whole, replace(whole, verdict="log at /usr/lib/other.py:3"), replace(whole, verdict="a/b.py:3")):
        assert place_of(examined(finding, directory=inside)) == ("logs/version%200/recorder/findings.json", None)
        assert place_of(examined(finding, directory=outside)) == ("recorder/findings.json", None)


def test_what_could_not_be_examined() -> None:
    """A gap is a notification and skips its rules; an expected one is no more than a note."""
    gaps = (
        Gap("the validation", "none was recorded", ("train-differs",), is_expected=True),
        Gap("the rest of the gradients", "out of memory", (), is_expected=False),
    )
    run = examined(gaps=gaps)
    notes = sarif_of(run)["invocations"][0]["toolExecutionNotifications"]
    assert [each["level"] for each in notes] == ["note", "warning"]
    cases = cases_of(run)
    assert kinds_of(cases) == dict.fromkeys(
        ("version_0: train-differs", "version_0: the rest of the gradients"), "skipped"
    )
    assert cases["version_0: train-differs"][0].get("message") == gaps[0].line


def test_a_run_in_which_nothing_was_recorded() -> None:
    """It has one skipped test case and one notification."""
    run = ExaminedRun("version_0", Path("recorder"), None)
    assert kinds_of(cases_of(run)) == {"version_0: the run": "skipped"}
    (note,) = sarif_of(run)["invocations"][0]["toolExecutionNotifications"]
    assert (note["level"], note["message"]["text"]) == (
        "warning",
        "not examined: the run, because nothing was recorded",
    )


def test_each_rule_is_a_test_case() -> None:
    """A rule with findings fails once, one with notes passes with their text, and all others pass."""
    note = replace(DEAD, rule="frozen", severity="note", verdict="net.fc is frozen")
    cases = cases_of(examined(DEAD, replace(DEAD, module="head"), note, ignored=["saturation"]))
    assert len(cases) == len(RULES) - 1 + ("frozen" not in {each.name for each in RULES})
    assert "version_0: saturation" not in cases
    assert kinds_of(cases) == {"version_0: dead-output": "failure", "version_0: frozen": "system-out"}
    failure = cases["version_0: dead-output"][0]
    assert failure.get("message") == "net.act returns only zeros (and 1 more)"
    assert failure.get("type") == "warning"
    assert str(failure.text).count("Why: The bias.") == 2


def test_the_counts_of_a_report() -> None:
    """Each suite and the top have the numbers of their test cases."""
    gap = Gap("the validation", "none was recorded", ("train-differs",), is_expected=True)
    runs = [examined(DEAD, gaps=(gap,)), replace(examined(), name="version_1")]
    top = ET.fromstring(to_junit(runs))
    counts = [[each.get(name) for name in ("tests", "failures", "skipped", "errors")] for each in (top, *top)]
    many = len(RULES)
    assert counts == [[str(2 * many), "1", "1", "0"], [str(many), "1", "1", "0"], [str(many), "0", "0", "0"]]


def test_hostile_names() -> None:
    """Names and texts with control characters, markup and lone surrogates are valid XML and JSON."""
    evil = "a<b>&\"'\x1b\x00\ud800]]>"
    run = replace(examined(replace(DEAD, module=evil, verdict=evil, rule="<x>")), name=evil)
    json.dumps(sarif_of(run)).encode()
    (case,) = (each for each in cases_of(run).values() if each.get("name") == "<x>")
    assert case.get("classname") == "a<b>&\"'\\x1b\\x00\\ud800]]>"
    to_junit([run]).encode()


@pytest.mark.parametrize(
    "name", ["a" * 5000 + ".py:3", "\ud800.py:3", "net.py:" + "9" * 5000, "../net.py:3", "\0.py:1"]
)
def test_hostile_lines(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot exist, as in a damaged recording, neither ends the command nor leads out of the folder."""
    monkeypatch.chdir(tmp_path)
    run = examined(replace(DEAD, verdict=f"log at {name}"), graph=graph(name), directory=tmp_path / "recorder")
    uri, line = place_of(run)
    assert ".." not in uri
    assert line in (None, 1, 3)
    to_junit([run]).encode()


@pytest.mark.parametrize("numbers", [{"place": 1.0, "row": 17.0}, {"place": 1.0}])
def test_texts_have_no_samples_and_folders(tmp_path: Path, numbers: dict[str, float]) -> None:
    """The values of a sample, folders and addresses are left out, as in a file of ``submit``."""
    sample = replace(
        DEAD,
        verdict=f"open of {tmp_path}/secret/list.csv failed at https://host/a",
        next="Row 17 has values from -3.25 to 9.75.",
        numbers=numbers,
    )
    text = json.dumps(to_sarif([examined(sample, directory=tmp_path / "recorder")]))
    for each in (text, to_junit([examined(sample, directory=tmp_path / "recorder")])):
        assert "list.csv" in each
        assert not [word for word in ("9.75", "secret", "https://host", tmp_path.name) if word in each]
