"""Tests of all rules: their descriptions, healthy runs, and values that are not finite."""

from __future__ import annotations

import pkgutil
from dataclasses import replace

import pytest

from lightning_recorder.insight import RULES, rules
from lightning_recorder.insight.examine import causes_first
from tests.insight.records import Examination, Values, brief, chain, network, record, run


def test_every_rule_is_complete() -> None:
    """Every rule states statistic, threshold, usual values, cause, advice and false alarms; it explains known rules."""
    for rule in RULES:
        assert all((rule.statistic, rule.usual, rule.why, rule.next, rule.false_alarms)), rule.name
        assert rule.explains.keys() <= {each.name for each in RULES}, rule.name


def test_every_file_has_rules() -> None:
    """Each file of the folder has rules, which are among those that run."""
    files = {f"{rules.__name__}.{each.name}" for each in pkgutil.iter_modules(rules.__path__)}
    assert {rule.function.__module__ for rule in RULES} == files


def test_causes_come_before_their_effects() -> None:
    """A rule comes after all rules that explain it, and otherwise in the order of declaration."""
    places = causes_first(RULES)
    assert sorted(places.values()) == list(range(len(RULES)))
    late = [(rule.name, name) for rule in RULES for name in rule.explains if places[name] < places[rule.name]]
    assert late == []
    one, other, third = (replace(RULES[0], name=name, explains={}) for name in "abc")
    assert list(causes_first([one, other, third])) == ["a", "b", "c"]
    assert list(causes_first([one, other, replace(third, explains={"a": ("any",)})])) == ["c", "a", "b"]


def test_rules_that_explain_each_other_are_an_error() -> None:
    """Neither of two rules can be the cause of the other one, directly or through a third rule."""
    one, other, third = (
        replace(RULES[0], name=name, explains={effect: ("any",)}) for name, effect in ("ab", "bc", "ca")
    )
    with pytest.raises(ValueError, match="a is explained by c is explained by b is explained by a"):
        causes_first([one, other, third])


def test_a_jump_in_scale_explains_gradients_that_grow() -> None:
    """A layer that multiplies its input 60-fold is named, and not the first layer, where the gradients are largest."""
    names = [f"layer_{letter}" for letter in "abcdefghij"]
    layers: dict[str, Values] = {name: {"rms": 60.0 if place > 5 else 1.0} for place, name in enumerate(names)}
    gradients: dict[str, Values] = {
        name: {"rms": (1e-3 if place > 5 else 2.0) * 0.9**place} for place, name in enumerate(names)
    }
    found = run(layers, gradients, graph=chain(*names))
    assert brief(found) == [("warning", "scale-jump", "layer_g")]
    assert found[0].consequences == ("exploding-gradient",)


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
