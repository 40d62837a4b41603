"""Accumulators for the tensors of one site."""

from __future__ import annotations

import collections
import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torchmetrics
from torch import Tensor

from lightning_recorder import ArgumentError, RecorderWarning
from lightning_recorder.reductions import Extrema, Reduction, RunningMoments, Statistics
from lightning_recorder.reductions.accumulators import Accumulator, ByteBudget, make_accumulator

PLENTY = 2**20
BATCHES = [torch.tensor([[1.0, -2.0]]), torch.tensor([[4.0, 8.0], [0.5, 3.0]]), torch.tensor([[7.0, 7.0]])]


def keep(reduction: Any, tensors: list[Tensor], max_bytes: int = PLENTY) -> Accumulator:
    """Return a store updated with the tensors."""
    store = make_accumulator(reduction, ByteBudget(max_bytes))
    for tensor in tensors:
        store.update(tensor)
    return store


def equal(one: Any, other: Any) -> bool:
    """Return True if two values are bitwise equal, including tensors in containers."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


# Values.


def test_without_a_reduction_every_tensor_is_kept() -> None:
    """The value is the list of all tensors, in order."""
    assert equal(keep(None, BATCHES).value, BATCHES)


@pytest.mark.parametrize(
    "function",
    [
        torch.maximum,
        lambda total, new: total + new.sum(),
        lambda last, new: new,
        lambda rows, new: torch.cat([rows, new])[-1:],
        lambda total, new: total.add_(new),
    ],
    ids=["maximum", "sum", "last", "last row", "in place"],
)
def test_a_function_reduces_as_functools_does(function: Callable[[Any, Tensor], Any]) -> None:
    """The value equals the result of functools.reduce over copies of the tensors."""
    batches = [BATCHES[0], BATCHES[2], BATCHES[0]]
    assert equal(keep(function, batches).value, functools.reduce(function, [each.clone() for each in batches]))


def test_a_function_may_give_anything() -> None:
    """The value may be a number, a string or a container."""
    assert keep(lambda seen, new: f"{len(seen)} {tuple(new.shape)}", BATCHES).value == "8 (1, 2)"
    counted = keep(lambda seen, new: {"rows": len(new), "both": [seen, new]}, BATCHES[:2]).value
    assert equal(counted, {"rows": 2, "both": BATCHES[:2]})


@pytest.mark.parametrize("reduction", [RunningMoments, RunningMoments(), Extrema, Statistics])
def test_a_reduction_gives_its_statistics(reduction: Any) -> None:
    """The value equals the result of the Reduction over the same tensors, given as a class or as an instance."""
    kind = reduction if isinstance(reduction, type) else type(reduction)
    reference: Reduction = kind()
    for batch in BATCHES:
        reference.update(batch)
    assert equal(keep(reduction, BATCHES).value, reference.compute())


@pytest.mark.parametrize("metric", [torchmetrics.MeanMetric, torchmetrics.MaxMetric(), torchmetrics.CatMetric])
def test_a_metric_gives_its_result(metric: Any) -> None:
    """The value equals the result of the torchmetrics.Metric over the same tensors."""
    reference = metric() if isinstance(metric, type) else torchmetrics.MaxMetric()
    for batch in BATCHES:
        reference.update(batch)
    assert equal(keep(metric, BATCHES).value, reference.compute())


@pytest.mark.parametrize("template", [RunningMoments(), torchmetrics.SumMetric()])
def test_what_is_given_is_a_template(template: Any) -> None:
    """Two stores made from one object are independent, start empty, and do not change the object."""
    template.update(torch.full((3,), 100.0))
    before = {name: value.clone() for name, value in template.state_dict().items()}
    one, other = keep(template, BATCHES[:1]), keep(template, BATCHES[1:])
    assert equal(one.value, keep(type(template), BATCHES[:1]).value)
    assert equal(other.value, keep(type(template), BATCHES[1:]).value)
    assert equal(dict(template.state_dict()), before)


@pytest.mark.parametrize("wrong", [3, "mean", [torch.add], object(), dict])
def test_another_reduction_is_refused(wrong: Any) -> None:
    """A value that is not a function, a reduction or a metric is rejected with the allowed kinds."""
    with pytest.raises(ArgumentError, match=r"^reduction takes a function of two arguments, a Reduction, a torchm"):
        make_accumulator(wrong, ByteBudget(PLENTY))


# Independence from the step.

ALIASING: dict[str, Any] = {
    "list": None,
    "the first": lambda first, new: first,
    "the last": lambda last, new: new,
    "a row": lambda last, new: new[0],
    "a row of the longer": lambda rows, new: torch.cat([torch.atleast_2d(rows), new])[-1],
    "nested": lambda last, new: {"now": [new[:1]]},
}


def tensors_in(value: Any) -> list[Tensor]:
    """Yield the tensors in a nested value."""
    if isinstance(value, Tensor):
        return [value]
    return [each for part in (value.values() if isinstance(value, dict) else value) for each in tensors_in(part)]


@pytest.mark.parametrize("reduction", ALIASING.values(), ids=ALIASING)
def test_nothing_shares_memory_with_the_model_or_holds_more_than_it_shows(reduction: Any) -> None:
    """Stored tensors own exactly the memory that they need: a row does not keep its batch alive."""
    batches = [torch.randn(1000, 3) for _ in range(3)]
    for tensor in tensors_in(keep(reduction, batches).value):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert tensor.untyped_storage().data_ptr() not in {each.untyped_storage().data_ptr() for each in batches}


def test_a_later_change_in_place_does_not_matter() -> None:
    """Stored values are unaffected if the model overwrites its tensor."""
    batch = BATCHES[0].clone()
    stores = [keep(None, [batch]), keep(torch.add, [batch]), keep(lambda last, new: new, [batch, batch])]
    batch.fill_(99)
    assert equal([stores[0].value[0], stores[1].value, stores[2].value], [BATCHES[0]] * 3)


class Rows(NamedTuple):
    """A named tuple that a function may return."""

    rows: Tensor


@pytest.mark.parametrize(
    "reduction",
    [lambda last, new: Rows(new), lambda last, new: collections.deque([new]), torchmetrics.CatMetric],
    ids=["named tuple", "deque", "metric"],
)
def test_what_is_kept_inside_something_else_is_a_copy_too(reduction: Any) -> None:
    """A function or a metric may store its argument, which is never overwritten."""
    batch = BATCHES[0].clone()
    value = keep(reduction, [batch, batch]).value
    before = copy.deepcopy(value)
    batch.fill_(99)
    assert equal(list(value), list(before))


def test_a_function_may_write_to_what_it_is_given() -> None:
    """A function that writes to its second argument does not change the model's tensor."""
    batch = BATCHES[0].clone()
    assert keep(lambda total, new: new.add_(total), [batch, batch]).value.tolist() == [[2.0, -4.0]]
    assert equal(batch, BATCHES[0])


def test_what_is_loaded_counts() -> None:
    """A loaded list counts towards the byte limit."""
    budget = ByteBudget(100)
    store = make_accumulator(None, budget)
    store.load_state_dict(keep(None, [torch.zeros(20)]).state_dict())
    with pytest.warns(RecorderWarning, match="has kept 80 bytes"):
        assert not store.update(torch.zeros(10))


# The byte limit.


def test_a_list_ends_at_its_limit() -> None:
    """The list accepts tensors that fit, returns False for the rest, and warns once with the remedy."""
    budget = ByteBudget(100)
    store = make_accumulator(None, budget)
    with pytest.warns(RecorderWarning, match="max_bytes=100.*Give it a reduction") as told:
        taken = [store.update(torch.zeros(10)) for _ in range(5)]  # 40 bytes each
    assert (taken, len(store.value), len(told)) == ([True, True, False, False, False], 2, 1)


def test_the_limit_is_that_of_all_lists_together() -> None:
    """Two lists share the limit, and bytes that one returns are available to the other."""
    budget = ByteBudget(100)
    one, other = make_accumulator(None, budget), make_accumulator(None, budget)
    assert [one.update(torch.zeros(10)), one.update(torch.zeros(10))] == [True, True]
    with pytest.warns(RecorderWarning):
        assert not other.update(torch.zeros(10))
    one.release()
    assert other.update(torch.zeros(10))


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, None])
def test_the_limit_is_a_positive_integer(wrong: Any) -> None:
    """A limit that is not a positive integer is rejected."""
    with pytest.raises(ArgumentError, match="max_bytes must be an integer of at least 1"):
        ByteBudget(wrong)


# State.


def _rows(seen: Any) -> Tensor:
    """Return the tensor in a result of the function below, or the initial tensor itself."""
    return seen["seen"] if isinstance(seen, dict) else seen  # type: ignore[no-any-return]


REDUCTIONS: dict[str, Any] = {
    "list": None,
    "function": torch.maximum,
    "reduction": Statistics,
    "function to a dictionary": lambda seen, new: {"max": new.max(), "seen": torch.maximum(_rows(seen), new)},
    "metric": torchmetrics.MeanMetric,
    "metric with a list": torchmetrics.CatMetric,
}


@pytest.mark.parametrize("reduction", REDUCTIONS.values(), ids=REDUCTIONS)
@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_state_resumes_where_it_was_saved(reduction: Any, before: int) -> None:
    """A store that loads a state and receives the remaining tensors equals one that received all."""
    batches = [BATCHES[0], BATCHES[2], BATCHES[0] * 3]
    saved = keep(reduction, batches[:before]).state_dict()
    assert all(isinstance(each, Tensor) for each in saved.values())
    store = keep(reduction, [torch.zeros(1, 2)])
    store.load_state_dict(saved)
    for batch in batches[before:]:
        store.update(batch)
    assert equal(store.value, keep(reduction, batches).value)


def test_a_state_is_independent_of_what_follows() -> None:
    """Updates after loading do not change the saved state, even with an in-place function."""
    saved = keep(torch.add, BATCHES[:1]).state_dict()
    store = make_accumulator(lambda total, new: total.add_(new), ByteBudget(PLENTY))
    store.load_state_dict(saved)
    store.update(torch.ones(1, 2))
    assert equal(saved, {"": BATCHES[0]})


def test_what_cannot_be_named_is_refused() -> None:
    """A value with something other than tensors and numbers has no state; the message names what is supported."""
    with pytest.raises(ArgumentError, match=r"^a str cannot be saved by name; .*apply\(\)"):
        keep(lambda seen, new: "text", BATCHES).state_dict()
    assert equal(keep(lambda seen, new: 2.5, BATCHES).state_dict(), {"": torch.tensor(2.5)})


# Replacing.


@pytest.mark.parametrize("reduction", REDUCTIONS.values(), ids=REDUCTIONS)
def test_a_value_can_be_replaced(reduction: Any) -> None:
    """A replaced value becomes the value and the state."""
    store = keep(reduction, BATCHES[:1])
    store.replace(torch.tensor(5.0))
    assert store.value == 5.0
    assert equal(store.state_dict(), {"": torch.tensor(5.0)})
    again = keep(reduction, [])
    again.load_state_dict(store.state_dict())
    assert again.value == 5.0


@pytest.mark.parametrize("reduction", [RunningMoments, torchmetrics.MeanMetric])
def test_a_result_that_was_replaced_takes_nothing_more(reduction: Any) -> None:
    """After the result of a Reduction or a Metric was replaced, another tensor raises an error with the remedy."""
    store = keep(reduction, BATCHES)
    store.replace(1)
    with pytest.raises(ArgumentError, match=r"replaced, by apply\(\) or an assignment: reset\(\) starts again"):
        store.update(BATCHES[0])
