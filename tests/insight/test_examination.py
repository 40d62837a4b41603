"""Tests of the engine: online and offline, bounded memory, invariance."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_recorder.errors import ArgumentError
from lightning_recorder.insight import (
    ROSE,
    STATISTICS,
    Finding,
    RunFacts,
    findings_from_json,
    findings_to_json,
    with_watched,
)
from lightning_recorder.insight.data_facts import DataFacts, LoaderFacts
from lightning_recorder.insight.evidence import Evidence
from lightning_recorder.insight.finding import rows_of
from lightning_recorder.recordings import open_recording
from lightning_recorder.records.history import History
from lightning_recorder.records.table import Schema, Table
from lightning_recorder.reductions import Histogram
from lightning_recorder.taps import Site
from tests.insight.records import Examination, Values, brief, chain, examined, record, run, trained
from tests.recordings.runs import record_run

NAMES = ("a", "act", "b", "head")


def kill(net: nn.Module) -> None:
    """Make the ReLU of the net return zeros."""
    nn.init.constant_(net.get_submodule("encoder.fc").bias, -100.0)  # type: ignore[arg-type]  # a parameter


def test_online_and_offline_agree(tmp_path: Path) -> None:
    """Feeding records while they are written gives the same findings as reading the files afterwards."""
    written = record_run(tmp_path, steps=range(8), change=kill, at=3)
    online = Examination()
    for step in range(8):
        for label, records in written.items():
            about = {"group": label, "recorder": label, "step": step}
            online.add(Table.of(records[step], about))
    assert online.findings() == open_recording(tmp_path).findings
    assert [(each.rule, each.module) for each in online.findings()] == [("dead-output", "encoder.act")]
    assert online.findings()[0].first_step == 3


def test_findings_can_be_asked_at_any_time() -> None:
    """Findings in between do not change later ones."""
    one, other = Examination(), Examination()
    for step in range(6):
        each = record("activations", step, {("fc", "out"): {"zero_fraction": float(step > 2)}})
        one.add(each)
        one.findings()
        other.add(each)
    assert one.findings() == other.findings() != []


def test_rules_run_again_only_if_what_they_read_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """New records, another graph, receipt, choice of rules or data are examined; the same evidence is not, twice."""
    seen: list[Evidence] = []

    def counted(evidence: Evidence, ignored: Collection[str]) -> list[Finding]:
        seen.append(evidence)
        return find(evidence, ignored)

    engine = sys.modules["lightning_recorder.insight.examine"]  # the package has a function of this name
    find: Callable[[Evidence, Collection[str]], list[Finding]] = engine._findings
    monkeypatch.setattr(engine, "_findings", counted)
    dead = {"act": {"rms": 1.0, "zero_fraction": 1.0}}
    one = examined(dead, graph=chain("fc", "act", act="ReLU"))
    frozen = {"parameters": {"modules": {"fc": {"fired": False, "why": "frozen", "type": "Linear"}}}}
    found: list[list[str]] = []
    changes: tuple[Callable[[], object], ...] = (
        lambda: None,
        lambda: one.add(record("activations", 99, {("act", "out"): {"zero_fraction": 0.0}})),
        lambda: setattr(one, "graph", chain("fc", "act", act="ReLU")),  # it is equal, but may have other lines of code
        lambda: setattr(one, "facts", replace(one.facts, coverage=frozen)),
        lambda: one.set_data(DataFacts(loader=LoaderFacts(workers=1))),
        lambda: setattr(one, "facts", replace(one.facts, ignored={"dead-output"})),
    )
    for change in changes:
        change()
        first = one.findings()
        found.append([each.rule for each in first])
        assert len(seen) == len(found)
        timing = {label: {**receipt, "recording_ms": 1.0} for label, receipt in one.facts.coverage.items()}
        one.facts = replace(one.facts, coverage=timing)
        assert one.findings() == first
        assert len(seen) == len(found)
    assert found[0] == ["dead-output"]
    assert found[1] == []


def test_a_repeated_step_is_replaced() -> None:
    """A run that resumes from an earlier step replaces its records."""
    table = History(STATISTICS)
    for step, rms in ((0, 1.0), (10, 2.0), (20, 3.0), (10, 4.0)):
        table.add(record("activations", step, {("fc", "out"): {"rms": rms}}))
    values, steps = table.column(Site("fc", "out"), "rms")
    assert (values.tolist(), steps.tolist()) == ([1.0, 4.0, 3.0], [0, 10, 20])


def test_two_recorders_of_a_group() -> None:
    """Records of two recorders of one group share the rows of their steps."""
    table = History(STATISTICS)
    for step in (0, 10):
        table.add(record("activations", step, {("fc", "out"): {"rms": 1.0}}))
    for step in (10, 20):
        table.add(record("activations", step, {("act", "out"): {"rms": 2.0}}, recorder="activations-slow"))
    assert table.steps == [0, 10, 20]
    np.testing.assert_equal(table.get("rms"), [[1, np.nan], [1, 2], [np.nan, 2]])
    assert table.recorders == ["activations", "activations-slow"]


@pytest.mark.parametrize(("sites", "most"), [(1, 512), (1_000, 161), (2_000, 128)])
def test_memory_is_bounded(sites: int, most: int) -> None:
    """The first of many records, the last, those around the first NaN, and an even selection of the others stay."""
    table = History(STATISTICS)
    values = {(f"fc.{place}", "out"): {"nan_count": 0.0} for place in range(sites)}
    plain, bad = (record("activations", 0, values | {("fc.0", "out"): {"nan_count": count}}) for count in (0.0, 1.0))
    for step in range(5_000):
        each = bad if step == 1_001 else plain
        table.add(each.having(about={**each.about, "step": step}))
        assert len(table) <= most
    assert {0, 1_000, 1_001, *range(4_936, 5_000)} <= set(table.steps)
    older = np.diff([step for step in table.steps if step < 4_936 and step not in (1_000, 1_001)])
    assert older.max() == np.median(older) > 1
    assert len(older) >= most // 8
    assert table.get("nan_count").shape == (len(table), sites)


def dead(loss: float = 1.0, names: tuple[str, ...] = NAMES) -> list[tuple[str, str]]:
    """Return the findings of a run with a dead ReLU, with another scale of the loss or another order of the sites."""
    layers: dict[str, Values] = {name: {"rms": 1.0, "zero_fraction": float(name == "act")} for name in names}
    gradients: dict[str, Values] = {name: {"rms": loss * (1e-3 if name in ("b", "head") else 0.0)} for name in names}
    still = trained("a", grad=0.0, update=0.0, ratio=0.0)
    parts = {**still, **trained("b", grad=1e-3 * loss), **trained("head", grad=1e-3 * loss)}
    return [(each.rule, each.module) for each in run(layers, gradients, parts, graph=chain(*NAMES, act="ReLU"))]


@settings(deadline=None, max_examples=30)
@given(st.floats(-6, 6), st.permutations(NAMES))
def test_the_scale_of_the_loss_and_the_order_of_sites_do_not_matter(exponent: float, names: list[str]) -> None:
    """Gradients in other units, or sites in another order in the file, give the same findings."""
    assert dead(loss=10**exponent, names=tuple(names)) == [("dead-output", "act")]


@settings(deadline=None, max_examples=30)
@given(st.floats(-3, 3), st.lists(st.floats(-1, 1), min_size=6, max_size=6))
def test_siblings_are_compared_in_any_unit(exponent: float, logs: list[float]) -> None:
    """A block is unlike its siblings in any unit."""
    names = [f"blocks.{number}.fc" for number in range(6)]

    def found(unit: float) -> list[str]:
        gradients: dict[str, Values] = {
            name: {"rms": unit * 10 ** (2 * log)} for name, log in zip(names, logs, strict=True)
        }
        return [each.module for each in run(None, gradients, graph=chain(*names)) if each.rule == "unlike-siblings"]

    assert found(10**exponent) == found(1.0)


@pytest.mark.parametrize(
    ("usual", "shown"),
    [
        ("at most 5", "largest rms 8"),
        ("0.1 to 5", "largest rms 8"),
        ("within a factor of 2", "largest rms 8"),
        ("equal on all ranks", ""),
    ],
)
def test_the_number_beside_the_usual_ones(usual: str, shown: str) -> None:
    """The first number is shown, and none beside usual values that are no numbers."""
    numbers = {"largest_rms": 8.0, "usual_until": 30.0}
    finding = Finding("odd", "warning", "a", "", 0, 0, 1, "verdict", "why", "next", usual, numbers=numbers)
    assert finding.measured == shown


def test_findings_as_json() -> None:
    """Findings survive a round trip through JSON, infinities included; other formats are refused."""
    layers: dict[str, Values] = {"a": {}, "act": {"zero_fraction": 1.0}}
    findings = run(layers, graph=chain("a", "act", act="ReLU"))
    findings = [replace(each, numbers={"ratio": float("inf")}, parts=(3, 1)) for each in findings]
    data = json.loads(json.dumps(findings_to_json(findings), allow_nan=False))
    assert (data["format"], data["healthy"]) == ("lightning_recorder.findings/1", False)
    assert findings_from_json(data) == findings
    later = {**data, "findings": [{**each, "later": 1} for each in data["findings"]]}
    assert findings_from_json(later) == findings
    earlier = [{key: value for key, value in each.items() if key != "parts"} for each in data["findings"]]
    assert findings_from_json({**data, "findings": earlier}) == [replace(each, parts=()) for each in findings]
    with pytest.raises(ArgumentError, match="format"):
        findings_from_json({**data, "format": "lightning_recorder.findings/2"})
    with pytest.raises(ArgumentError, match="no findings"):
        findings_from_json({**data, "findings": [{}]})


_NUMBERS = st.one_of(st.sampled_from([0.0, 1.0, np.nan, np.inf]), st.floats(-1e30, 1e30), st.floats(0, 1))
_LAYERS = ("blocks.0.fc", "blocks.1.fc", "blocks.2.fc", "blocks.3.fc", "norm", "act", "head")


_PATHS = {
    "activations": ("out",),
    "gradients": ("out",),
    "parameters": ("weight", "weight.grad", "weight.update", "bias", "bias.grad", "running_mean", "running_var"),
}
_BAD = [STATISTICS.index(name) for name in ("nan_count", "inf_count")]


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(st.data(), st.sampled_from([None, "Tanh", "ReLU", "Softmax"]), st.integers(1, 8), st.booleans())
def test_any_numbers_can_be_examined(data: st.DataObject, kind: str | None, records: int, is_finite: bool) -> None:
    """Whatever the numbers are, and whichever statistics are missing, no rule fails or warns.

    After the first record with NaN or infinities, only the rule about them examines the records.
    """
    norm = data.draw(st.sampled_from(["BatchNorm1d", "LayerNorm"]))
    graph = chain(*_LAYERS, norm=norm, act=kind) if kind else None
    examination = Examination(graph, {"parameters": {"modules": {"norm": {"fired": False, "why": "frozen"}}}})
    histogram = Histogram(np.array([-1, -0.95, 0, 1e-5, 0.95, 1]), np.array([4, 1, 1, 1, 4]), -1.0, 1.0, 0.0, 8.0)
    for group, stage in (*((group, "train") for group in _PATHS), ("activations", "validate")):
        sites = tuple(Site(name, path) for name in _LAYERS for path in _PATHS[group])
        kinds = data.draw(st.lists(_NUMBERS, min_size=6, max_size=6))
        never = data.draw(st.lists(st.sampled_from(sites), max_size=3))
        lacked = data.draw(st.lists(st.sampled_from(STATISTICS), max_size=3))
        about = tuple("float16" for _ in sites), tuple((8, 8) if "weight" in site.path else (8,) for site in sites)
        for step in range(records):
            chosen = np.random.default_rng(step).integers(0, 6, (len(sites), len(STATISTICS)))
            values = np.array(kinds)[chosen]
            values[[sites.index(site) for site in never]] = np.nan
            values[:, [STATISTICS.index(name) for name in lacked]] = np.nan
            if is_finite:
                values[:, _BAD] = 0.0
            facts = {"group": group, "recorder": group, "stage": stage, "step": 10 * step}
            schema = Schema(sites, STATISTICS, *about)
            examination.add(Table(schema, values, about=facts, histogram=lambda _: histogram))
    assert findings_from_json(json.loads(json.dumps(findings_to_json(examination.findings())))) is not None


_FAST: Values = {"rms": 0.25, "update_ratio": 0.8, "learning_rate": 1.0}


@pytest.mark.parametrize(("step", "first"), [(73, "dead-output"), (20, "spike"), (30, "spike")])
def test_a_spike_after_another_finding_is_its_effect(step: int, first: str) -> None:
    """A spike is named first only if no other finding began before it."""
    dead: Values = {"rms": [1.0] * 3 + [0.0] * 5, "zero_fraction": [0.5] * 3 + [1.0] * 5}
    found = run({"a": {"rms": 1.0}, "act": dead}, graph=chain("a", "act", act="ReLU"))
    spike = replace(found[0], rule="spike", module="", first_step=step)
    assert found[0].first_step == 30
    assert next(each.rule for each in with_watched(found, [spike])) == first


@pytest.mark.parametrize(
    ("first", "last", "rules"),
    [
        (60, 60, ["spike"]),
        (50, 60, ["spike"]),
        (50, 70, ["spike"]),
        (59, 59, ["spike", "gradient-spike"]),
        (61, 70, ["spike", "gradient-spike"]),
    ],
)
@pytest.mark.parametrize(
    ("watched", "more"),
    [
        (
            "the loss to 30",
            "the norm of all gradients at step 60 is 354 × its median in the 5 records before, most of it in head",
        ),
        ("the loss to 30 and the gradient norm to 40", "most of the gradient at step 60 is in head"),
    ],
)
def test_a_spike_that_is_recorded_is_one_finding(
    first: int, last: int, rules: list[str], watched: str, more: str
) -> None:
    """A spike that the watch and the records see is one finding, with the loss and the gradient norm.

    That of the records may be at any step from the first spike to the last one.
    """
    gradients: dict[str, Values] = {**trained("fc"), **trained("head", grad=[*[1e-3] * 6, 0.5, 1e-3])}
    (recorded,) = run(None, None, gradients, graph=chain("fc", "head"))
    numbers = {"ratio": 30.0}
    spike = replace(recorded, rule="spike", module="", path="loss", verdict=watched, numbers=numbers)
    spike = replace(spike, first_step=first, last_step=last)
    found = sorted(with_watched([recorded], [spike]), key=lambda each: each.rule, reverse=True)
    assert [each.rule for each in found] == rules
    if len(found) == 1:
        assert found[0].verdict == f"{watched}; {more}"
        assert (found[0].module, found[0].path, found[0].others) == ("", "loss", ("head",))
        assert found[0].numbers == {**recorded.numbers, **numbers}
        assert found[0].consequences == ("gradient-spike",)


@pytest.mark.parametrize(("step", "first"), [(43, "sudden-change"), (41, "sudden-change"), (40, "spike")])
def test_a_spike_after_the_last_usual_record_is_the_effect_of_a_change(step: int, first: str) -> None:
    """A change is recorded after the spike that it causes, since it begins between two records."""
    found = run({"a": {"rms": [1.0] * 5 + [90.0] * 3}, "b": {"rms": 1.0}}, graph=chain("a", "b"))
    assert (found[0].rule, found[0].first_step) == ("sudden-change", 50)
    assert "changes 90-fold between steps 40 and 50, and stays so" in found[0].verdict
    spike = replace(found[0], rule="spike", module="", first_step=step, numbers={})
    assert next(each.rule for each in with_watched(found, [spike])) == first


def test_what_made_a_training_diverge_is_named_before_it() -> None:
    """A learning rate that is far too large is as severe as the first bad value after a rise, and comes before that."""
    (large,) = run(None, None, trained("fc", update=0.5, ratio=0.8) | {"fc/weight": _FAST}, records=4)
    assert (large.rule, large.severity) == ("learning-rate-too-large", "warning")
    bad = replace(large, rule="non-finite", severity="critical", module="head", first_step=5)
    rose = replace(bad, numbers={ROSE: 1e6})
    for module in ("head", ""):
        found = with_watched([large], [replace(bad, module=module)])
        assert [each.rule for each in found] == ["non-finite", "learning-rate-too-large"]
    late = replace(large, first_step=rose.first_step + 1)
    assert with_watched([late], [rose])[0].rule == "non-finite"
    found = with_watched([large], [rose])
    assert [(each.rule, each.severity) for each in found] == [
        ("learning-rate-too-large", "critical"),
        ("non-finite", "critical"),
    ]


@pytest.mark.parametrize("rises", [True, False])
def test_a_rise_is_kept_where_the_records_name_a_module(rises: bool) -> None:
    """A module in which a divergence ends does not replace the finding that the training diverged."""
    (large,) = run(None, None, trained("fc", update=0.5, ratio=0.8) | {"fc/weight": _FAST}, records=4)
    recorded = replace(large, rule="non-finite", severity="critical", module="head", first_step=5)
    watched = replace(recorded, module="", numbers={ROSE: 1e6} if rises else {})
    assert with_watched([recorded], [watched]) == [watched if rises else recorded]


@pytest.mark.parametrize(("module", "first"), [("", "double-activation"), ("fc", "non-finite")])
def test_what_a_loss_is_not_defined_for_is_named_before_its_nan(module: str, first: str) -> None:
    """A loss that gets the wrong kind of numbers is named before the NaN that arises in it, but not in a module."""
    (large,) = run(None, None, trained("fc", update=0.5, ratio=0.8) | {"fc/weight": _FAST}, records=4)
    twice, bad = replace(large, rule="double-activation"), replace(large, rule="non-finite", severity="critical")
    assert with_watched([twice], [replace(bad, module=module)])[0].rule == first


@pytest.mark.parametrize("cause", ["maximized-loss", "no-log-softmax", "output-range"])
def test_why_a_loss_falls_without_bound(cause: str) -> None:
    """The finding about the sign or about what the loss gets replaces the one of the watch."""
    (large,) = run(None, None, trained("fc", update=0.5, ratio=0.8) | {"fc/weight": _FAST}, records=4)
    fall = replace(large, rule="unbounded-loss", module="")
    assert [each.rule for each in with_watched([large], [fall])] == ["unbounded-loss", "learning-rate-too-large"]
    known = replace(large, rule=cause, module="")
    assert [each.rule for each in with_watched([known], [fall])] == [cause]


def test_findings_are_not_shown_at_a_parameter_of_the_model_itself() -> None:
    """A finding about a module without a row has none, and so has one about the whole model."""
    sites = [Site("", "pos"), Site("blocks.0.fc", "weight"), Site("blocks.0.fc", "weight.grad")]
    (dead,) = run({"blocks.0.act": {"rms": 0.0, "zero_fraction": 1.0}}, graph=chain("blocks.0.act", act="ReLU"))
    found = [dead, replace(dead, module=""), replace(dead, module="blocks.0.fc")]
    assert [(each.module, row) for each, row in rows_of(found, sites)] == [("", None), ("blocks.0.fc", 1)]


def test_a_finding_about_a_block_is_shown_at_the_layer_that_it_names() -> None:
    """The last layer of a trend is marked, not the first one of its block, also in findings that were written."""
    names = [f"blocks.{number}.{part}" for number in range(6) for part in ("norm", "fc")]
    sizes = [1.0 if name.endswith("norm") else 2.0 ** int(name.split(".")[1]) for name in names]
    found = run({name: {"rms": size} for name, size in zip(names, sizes, strict=True)}, graph=chain(*names))
    assert [(each.rule, each.module, each.layer) for each in found] == [("block-trend", "blocks.5", "blocks.5.fc")]
    for findings in (found, findings_from_json(findings_to_json(found))):
        assert rows_of(findings, [Site(name, "out") for name in names]) == [(findings[0], 11)]


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
