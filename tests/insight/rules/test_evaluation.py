"""Tests of the rule about a dropout function that also drops values in validation."""

from __future__ import annotations

import pytest

from lightning_recorder.insight import RunFacts
from tests.insight.records import Examination, brief, record


@pytest.mark.parametrize(
    ("name", "zeros", "types", "expected"),
    [
        ("net.dropout", 0.5, {}, [("warning", "dropout-in-evaluation", "net.dropout")]),
        ("net.dropout#2", 0.5, {}, [("warning", "dropout-in-evaluation", "net.dropout#2")]),
        ("net.dropout", 0.0, {}, []),  # it dropped nothing
        ("net.dropout", 0.5, {"net.dropout": "Dropout"}, []),  # a module after a ReLU
        ("net.relu", 0.5, {}, []),
    ],
)
def test_a_dropout_function_in_validation(
    name: str, zeros: float, types: dict[str, str], expected: list[tuple[str, str, str]]
) -> None:
    """A dropout function with zeros in validation is named; modules and other functions are not."""
    examination = Examination()
    examination.facts = RunFacts(types=types)
    for step in range(3):
        examination.add(record("activations", step, {("fc", "out"): {}}))
        examination.add(record("activations", step, {(name, "out"): {"zero_fraction": zeros}}, stage="validate"))
    assert brief(examination.findings()) == expected
