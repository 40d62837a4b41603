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


@pytest.mark.parametrize(
    ("name", "types", "expected"),
    [
        ("net.relu", {}, [("warning", "dead-output", "net.relu")]),
        ("relu", {}, []),  # perhaps the hinge of a loss
        ("relu", {"relu": "ReLU"}, [("warning", "dead-output", "relu")]),
        ("net.mse_loss", {}, []),
    ],
)
def test_functions_of_the_loss_are_no_layers(
    name: str, types: dict[str, str], expected: list[tuple[str, str, str]]
) -> None:
    """Without a graph, functions of the model itself may belong to its loss; a target may have NaN."""
    examination = Examination()
    examination.facts = RunFacts(types=types)
    target = {("cross_entropy", "in.target"): {"nan_count": 3.0}, ("cross_entropy", "out"): {"nan_count": 1.0}}
    for step in range(3):
        examination.add(
            record("activations", step, {("fc", "out"): {}, (name, "out"): {"zero_fraction": 1.0}, **target})
        )
    assert brief(examination.findings()) == expected
    assert [*map(tuple, examination.evidence().losses.places)] == [("cross_entropy", "in.target")]
