"""The rules that could not run, and the reasons."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from lightning_recorder.insight import RULES
from lightning_recorder.insight.data_facts import DataFacts
from tests.insight.records import Examination, chain, parts, record

GROUPS = ("activations", "gradients", "parameters")
SITES: Mapping[str, Any] = {
    "activations": {("fc", "out"): {"rms": 1.0}},
    "gradients": {("fc", "out"): {"rms": 1.0}},
    "parameters": {("fc", "weight"): {"rms": 1.0}, ("fc", "weight.grad"): {"rms": 1.0}},
}


def examined(
    *groups: str, records: int = 12, graph: bool = True, data: bool = True, coverage: Mapping[str, Any] | None = None
) -> Any:
    """Return the examination of a healthy layer with some groups of records."""
    examination = Examination(chain("fc") if graph else None, coverage)
    examination.set_data(DataFacts() if data else None)
    for step in range(records):
        for group in groups:
            examination.add(record(group, step, SITES[group]))
            if group == "activations":
                examination.add(record(group, step, SITES[group], stage="validate"))
    return examination


def test_records_without_a_tensor_do_not_count() -> None:
    """A group whose records have no tensor has no records for the rules."""
    examination = examined("gradients", records=3)
    for step in range(3):
        examination.add(record("activations", step, {}))
    assert examination.history.counts() == {"activations": 0, "gradients": 3, "parameters": 0, "validation": 0}


def test_each_rule_has_its_needs() -> None:
    """The table names each rule, except the one that the watch examines as well."""
    assert [rule.name for rule in RULES if not rule.needs] == ["non-finite"]


def test_a_run_without_a_watch_has_no_samples() -> None:
    """Without a watch, the rules about samples cannot run, which is expected."""
    (gap,) = examined(*GROUPS, data=False).gaps()
    assert (gap.what, gap.is_expected) == ("the samples of the batches", True)
    assert "batch-repeats" in gap.rules


def test_nothing_is_left_with_all_records() -> None:
    """With all groups, a graph and enough records, every rule can run."""
    assert examined(*GROUPS).gaps() == ()


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_without_recorder_is_expected(group: str) -> None:
    """The rules of a group that the user does not record are listed, and the run may be healthy."""
    examination = examined(*(each for each in GROUPS if each != group))
    gaps = examination.gaps()
    assert [(gap.what, gap.is_expected) for gap in gaps if gap.what != "the validation"] == [(group, True)]
    assert examination.diagnosis().is_healthy is True
    assert set(gaps[0].rules) == {rule.name for rule in RULES if group in rule.needs}


@pytest.mark.parametrize("records", [1, 2, 3])
def test_short_runs(records: int) -> None:
    """With one or two records a run is not called healthy; the rules that need more are named."""
    examination = examined(*GROUPS, records=records)
    (gap,) = examination.gaps()
    assert gap.rules == tuple(rule.name for rule in RULES if rule.records > records)
    assert examination.diagnosis().verdict == ("no findings" if records < 3 else "healthy")


def test_heads_of_flex_attention() -> None:
    """A model whose only attention is ``flex_attention`` has no heads, which is said, and may be healthy."""
    examination = examined(*GROUPS, coverage={"activations": {"unseen_functions": "flex_attention, as in net.attn"}})
    (gap,) = examination.gaps()
    assert gap.line == (
        "not examined: the heads of attention, because nothing has the scores of flex_attention, as in net.attn"
    )
    assert examination.diagnosis().is_healthy is True
    with_heads = parts({"net.attn": [{}, {}]})
    with_heads.facts = examination.facts
    assert "the heads of attention" not in [each.what for each in with_heads.gaps()]


def test_reasons_are_grouped() -> None:
    """Modules with one reason are listed together, and at most three of them."""
    missing = {f"blocks.{place}": {"fired": False, "why": "bypassed: its parameters"} for place in range(5)}
    missing["head"] = {"fired": False, "why": "never called: no recorded step called it"}
    gap = examined("gradients", "parameters", coverage={"activations-a": {"modules": missing}}).gaps()[0]
    why = "0 of 6 modules were recorded: blocks.0, blocks.1, blocks.2 and 2 more (bypassed: its parameters); "
    assert (gap.what, gap.why, gap.is_expected) == ("activations", f"{why}head (never called)", False)


@pytest.mark.parametrize(
    "damaged", [{"activations": {"modules": [1], "ended": 3}}, {"activations": {"modules": {"a": 1}}}]
)
def test_a_damaged_receipt(damaged: Mapping[str, Any]) -> None:
    """A receipt with values of other types gives a reason and no error."""
    gap = examined("gradients", coverage=damaged).gaps()[0]
    assert (gap.what, gap.is_expected) == ("activations", False)
