"""Tests of the selection of modules with too many tags."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from lightning_recorder import RecorderWarning
from lightning_recorder.outputs import TagBudget
from lightning_recorder.statistics import SiteStatistics
from lightning_recorder.taps import Site

BINS = torch.zeros(2048, dtype=torch.int64)


def seen(**scalars: float) -> SiteStatistics:
    usual = {"rms": 1.0, "min": -2.0, "max": 2.0, "zero_fraction": 0.0, "nan_count": 0.0, "inf_count": 0.0}
    return SiteStatistics({"count": 1.0, **usual, **scalars}, BINS)


def found(
    *names: str, paths: tuple[str, ...] = ("out",), odd: Mapping[str, SiteStatistics] | None = None
) -> dict[Site, SiteStatistics]:
    """Return the sites of modules, some with the given statistics."""
    return {Site(name, path): (odd or {}).get(name, seen()) for name in names for path in paths}


def each_has(tags: int) -> Callable[[Site], int]:
    return lambda _: tags


def names(sites: Any) -> list[str]:
    return list(dict.fromkeys(site.name for site in sites))


def quiet(budget: TagBudget, *args: Any) -> list[str]:
    """Return the names of the shown modules, and fail on any warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return names(budget.select(*args))


def test_all_modules_fit() -> None:
    """If all modules fit, all are shown without a warning."""
    assert quiet(TagBudget(6), found("a", "b", "c"), each_has(2)) == ["a", "b", "c"]


def test_of_too_many_those_evenly_spread() -> None:
    """Three of eight modules with four tags each fit into sixteen tags minus a reserve of a quarter."""
    budget = TagBudget(16, "ActivationRecorder")
    with pytest.warns(RecorderWarning, match=r"ActivationRecorder shows 3 of 8 modules in the loggers.*max_tags=16"):
        shown = budget.select(found(*"abcdefgh"), each_has(4))
    assert names(shown) == ["a", "c", "f"]


def test_a_module_is_shown_with_all_its_sites_or_none() -> None:
    """All three sites of a module are shown or none, even if there is room for some of them."""
    budget, paths = TagBudget(40), ("weight", "weight.grad", "bias.grad")
    with pytest.warns(RecorderWarning):
        shown = budget.select(found(*"abcdefgh", paths=paths), each_has(4))
    assert names(shown) == ["a", "e"]
    assert [site.path for site in shown] == [*paths, *paths]


def test_a_choice_stays() -> None:
    """Later records show the modules of the first record, in whatever order they come."""
    budget = TagBudget(8)
    with pytest.warns(RecorderWarning):
        first = names(budget.select(found(*"abcdef"), each_has(2)))
    assert first == ["a", "c", "e"]
    assert quiet(budget, found(*"fedcba"), each_has(2)) == ["e", "c", "a"]
    assert quiet(budget, found(*"fed"), each_has(2)) == ["e"]


def test_new_modules_get_what_room_there_is() -> None:
    """A module that first runs in a later record is shown if it fits without the reserve."""
    budget = TagBudget(8)
    assert quiet(budget, found("a", "b"), each_has(2)) == ["a", "b"]
    with pytest.warns(RecorderWarning, match="3 of 5 modules"):
        assert names(budget.select(found("a", "b", "x", "y", "z"), each_has(2))) == ["a", "b", "x"]


UNUSUAL = {
    "a NaN": seen(nan_count=1.0),
    "an infinity": seen(inf_count=1.0),
    "mostly zeros": seen(zero_fraction=0.9),
    "a large rms": seen(rms=1e3),
    "a small rms": seen(rms=1e-3),
    "a large extremum": seen(max=1e4),
    "a large ratio": seen(update_ratio=1.0),
}


@pytest.mark.parametrize("odd", UNUSUAL.values(), ids=UNUSUAL)
def test_an_unusual_module_comes_first(odd: SiteStatistics) -> None:
    """A module with extreme statistics is shown wherever it is in the model."""
    usual = {name: seen(update_ratio=1e-3) for name in "abcdefgh"}
    for name in "abcdefgh":
        with pytest.warns(RecorderWarning):
            shown = TagBudget(8).select(found(*"abcdefgh", odd={**usual, name: odd}), each_has(2))
        assert name in names(shown)
        assert len(shown) == 3


@pytest.mark.parametrize("odd", UNUSUAL.values(), ids=UNUSUAL)
def test_a_module_that_becomes_unusual_later_is_shown_from_then_on(odd: SiteStatistics) -> None:
    """The reserve is used for a module that becomes unusual later, which stays shown after it has recovered."""
    budget, usual = TagBudget(8), {name: seen(update_ratio=1e-3) for name in "abcdefgh"}
    with pytest.warns(RecorderWarning):
        assert names(budget.select(found(*"abcdefgh", odd=usual), each_has(2))) == ["a", "c", "f"]
    assert quiet(budget, found(*"abcdefgh", odd={**usual, "d": odd}), each_has(2)) == ["a", "c", "d", "f"]
    assert quiet(budget, found(*"abcdefgh", odd=usual), each_has(2)) == ["a", "c", "d", "f"]
    assert quiet(budget, found(*"abcdefgh", odd={**usual, "b": seen(nan_count=1.0)}), each_has(2)) == [
        "a",
        "c",
        "d",
        "f",
    ]


def test_the_most_unusual_come_first() -> None:
    """With room for one module, NaN ranks before a large value, and that before mostly zeros."""
    odd = {"b": seen(zero_fraction=0.95), "d": seen(rms=1e9), "g": seen(nan_count=1.0)}
    for expected in "gdb":
        with pytest.warns(RecorderWarning):
            assert names(TagBudget(3).select(found(*"abcdefgh", odd=odd), each_has(2))) == [expected]
        del odd[expected]


def test_what_most_modules_show_is_not_unusual() -> None:
    """Zero biases in all modules and a healthy spread of sizes are not unusual."""
    zeros = {name: seen(zero_fraction=1.0, rms=0.0) for name in "abcdef"}
    with pytest.warns(RecorderWarning):
        assert names(TagBudget(8).select(found(*"abcdefgh", odd=zeros), each_has(2))) == ["a", "c", "f"]
    sizes = {name: seen(rms=10.0**-place) for place, name in enumerate("abcdefgh")}
    with pytest.warns(RecorderWarning):
        assert names(TagBudget(8).select(found(*"abcdefgh", odd=sizes), each_has(2))) == ["a", "c", "f"]


def test_parameters_are_compared_with_their_like() -> None:
    """Gradients that are all much smaller than the values are not unusual, but a large one among them is."""

    def record(odd: float) -> dict[Site, SiteStatistics]:
        grads = {Site(name, "weight.grad"): seen(rms=1e-6, min=-1e-6, max=1e-6) for name in "abcdef"}
        values = {Site(name, "weight"): seen() for name in "abcdefgh"}
        grads |= {Site(name, "weight.grad"): seen(rms=odd, min=-odd, max=odd) for name in "gh"}
        return {**values, **grads}

    with pytest.warns(RecorderWarning):
        assert names(TagBudget(16).select(record(1e-6), each_has(2))) == ["a", "c", "f"]
    with pytest.warns(RecorderWarning):
        assert names(TagBudget(16).select(record(1.0), each_has(2))) == ["a", "g", "h"]


def test_a_module_that_shows_a_further_tensor_shows_it_if_there_is_room() -> None:
    """Sites that appear later, such as optimizer states, are shown with their module as long as the tags last."""
    budget = TagBudget(10)
    with pytest.warns(RecorderWarning):
        budget.select(found(*"abcdefgh"), each_has(2))
    shown = budget.select(found(*"abcdefgh", paths=("out", "more")), each_has(2))
    expected = [("a", "out"), ("a", "more"), ("c", "out"), ("e", "out"), ("g", "out")]
    assert [(site.name, site.path) for site in shown] == expected


def test_each_stage_has_tags_of_its_own() -> None:
    """With two stages, half as many modules are shown."""
    with pytest.warns(RecorderWarning):
        assert names(TagBudget(16, stages=2).select(found(*"abcdefgh"), each_has(2))) == ["a", "c", "f"]


def test_another_run_begins_anew() -> None:
    """The choice of one run takes no room in the next one."""
    budget = TagBudget(4)
    budget.select(found("a", "b"), each_has(2))
    budget.clear()
    assert quiet(budget, found("x", "y"), each_has(2)) == ["x", "y"]


def test_a_choice_is_restored_from_a_checkpoint() -> None:
    """A restored budget shows the same modules, even if its first record would lead to another choice."""
    budget = TagBudget(8)
    with pytest.warns(RecorderWarning):
        budget.select(found(*"abcdefgh"), each_has(2))
    budget.select(found(*"abcdefgh", odd={"d": seen(nan_count=1.0)}), each_has(2))
    other = TagBudget(8)
    other.load_state_dict(budget.state_dict())
    assert quiet(other, found(*"abcdefgh", odd={"b": seen(rms=math.inf)}), each_has(2)) == ["a", "c", "d", "f"]


def test_a_budget_for_less_than_one_module() -> None:
    """A module that exceeds the limit on its own is not shown in parts."""
    with pytest.warns(RecorderWarning, match="shows no module in the loggers, because each"):
        assert names(TagBudget(3).select(found("a"), each_has(4))) == []


def test_a_slight_deviation_does_not_take_all_of_the_reserve() -> None:
    """Many slightly unusual layers use half of the reserve, so that one that explodes later is still shown."""
    budget = TagBudget(None, log=lambda _: None)
    usual = {Site(f"blocks.{block}.fc", "out"): seen() for block in range(200)}
    budget.shorten(usual, each_has(3))
    first = names(budget.select(usual, each_has(3)))
    left = [site for site in usual if site.name not in first]
    slight = usual | {site: seen(rms=5.0, min=-10.0, max=10.0) for site in left[20:120:9]}
    second = names(budget.select(slight, each_has(3)))
    assert 3 * (len(second) - len(first)) in range(7, 11)
    sick = next(site for site in left if site.name not in second)
    assert sick.name in names(budget.select(slight | {sick: seen(rms=1e6)}, each_has(3)))
