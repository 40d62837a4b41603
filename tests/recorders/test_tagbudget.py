"""Which sites the loggers get where there are too many."""

from __future__ import annotations

import warnings

import pytest
import torch

from lightning_recorder import RecorderWarning, Site, SiteStatistics
from lightning_recorder.recorders import TagBudget


def found(*names: str) -> dict[Site, SiteStatistics]:
    seen = SiteStatistics({"count": 1.0}, torch.zeros(2048, dtype=torch.int64))
    return {Site(name, "out"): seen for name in names}


def names(sites: object) -> list[str]:
    return [site.name for site in sites]  # type: ignore[attr-defined]  # a mapping of sites


def test_all_sites_fit() -> None:
    """Where there is room for all, all are shown, and nothing is said."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert names(TagBudget(6).within(found("a", "b", "c"), 2)) == ["a", "b", "c"]


def test_of_too_many_those_evenly_spread() -> None:
    """Eight sites with four tags each in sixteen tags: every second one, of which one warning tells."""
    budget = TagBudget(16, "ActivationRecorder")
    with pytest.warns(RecorderWarning, match="ActivationRecorder shows 4 of 8 sites in the loggers.*max_tags=16"):
        shown = budget.within(found(*"abcdefgh"), 4)
    assert names(shown) == ["a", "c", "e", "g"]


def test_a_choice_stays() -> None:
    """The sites of later records are those of the first, and new ones get what room there is."""
    budget = TagBudget(6)
    assert names(budget.within(found("a", "b"), 2)) == ["a", "b"]
    with pytest.warns(RecorderWarning, match="3 of 4 sites"):
        assert names(budget.within(found("a", "b", "x", "y"), 2)) == ["a", "b", "x"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert names(budget.within(found("y", "b", "z", "x"), 2)) == ["b", "x"]


def test_another_run_begins_anew() -> None:
    """What was chosen of one model takes no room of the next one's."""
    budget = TagBudget(4)
    budget.within(found("a", "b"), 2)
    budget.clear()
    assert names(budget.within(found("x", "y"), 2)) == ["x", "y"]


def test_a_budget_for_less_than_one_site() -> None:
    """No site is shown in parts."""
    with pytest.warns(RecorderWarning, match="0 of 1 sites"):
        assert names(TagBudget(3).within(found("a"), 4)) == []
