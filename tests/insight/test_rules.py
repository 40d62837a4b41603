"""Tests of all rules: their descriptions, healthy runs, and values that are not finite."""

from __future__ import annotations

from lightning_recorder.insight import RULES, Examination
from lightning_recorder.insight.examination import _ORDER
from tests.insight.records import Values, chain, network, record, run


def test_every_rule_is_complete() -> None:
    """Every rule states its statistic, threshold, usual values, cause, advice and false alarms, and has a rank."""
    for rule in RULES:
        assert all((rule.statistic, rule.usual, rule.why, rule.next, rule.false_alarms)), rule.name
        assert set(rule.explains) <= set(_ORDER), rule.name
    assert sorted(rule.name for rule in RULES) == sorted(_ORDER)


def test_a_healthy_run_has_no_findings() -> None:
    """Ordinary numbers give no finding."""
    names = ("a", "b", "c", "head")
    layers: dict[str, Values] = {name: {"rms": 1.0} for name in names}
    assert run(layers, {name: {"rms": 1e-3} for name in names}, network(*names), graph=chain(*names)) == []


def test_nan_in_an_input_is_named() -> None:
    """NaN in a recorded input is reported as that of the input, and outputs alone as that of the output."""
    bad = {"nan_count": [0, 0, 0, 0, 2, 2, 2, 2]}
    (found,) = run({"a": bad, "b": bad}, inputs={"a": bad, "b": bad}, graph=chain("a", "b"))
    assert (found.module, found.path, found.first_step) == ("a", "in[0]", 40)
    assert found.verdict.startswith("the input in[0] of a has 2 NaN at step 40")
    (found,) = run({"a": bad, "b": bad}, inputs={"a": {}, "b": bad}, graph=chain("a", "b"))
    assert found.verdict == "the output of a has 2 values that are not finite at step 40; its inputs (in[0]) are finite"
    (found,) = run(inputs={"a": {}, "b": bad})
    assert (found.module, found.path) == ("b", "in[0]")


def test_the_first_site_with_nan_is_that_of_its_own_record() -> None:
    """If modules run in another order in the record with NaN, the first one in that record is named."""
    examination = Examination()
    for step, names in ((0, ("a", "b")), (10, ("b", "a"))):
        nan = {"nan_count": float(step > 0)}
        examination.add(record("activations", step, {(name, "out"): nan for name in names}))
    assert examination.findings()[0].module == "b"
