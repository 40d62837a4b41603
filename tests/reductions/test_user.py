"""Functions and metrics of the user as reductions."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor
from torchmetrics import MaxMetric, MetricCollection, MinMetric

from lightning_recorder import ArgumentError
from lightning_recorder.reductions import Norms
from lightning_recorder.reductions.user import UserReduction, as_reductions

BATCHES = torch.tensor([[1.0, 5.0], [3.0, 2.0], [-4.0, 0.5]])


def decayed(total: Tensor, new: Tensor) -> Tensor:
    """Return a moving average."""
    return 0.9 * total + 0.1 * new


def names(given: Any) -> list[str]:
    return [each.name if isinstance(each, UserReduction) else type(each).__name__ for each in as_reductions(given)]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (torch.maximum, ["maximum"]),
        ("torch.maximum", ["maximum"]),
        (lambda total, new: new, ["reduced"]),
        ([Norms, torchmetrics.MeanMetric], ["Norms", "mean_metric"]),
        ({"peak": torch.maximum, "low": "torch.minimum"}, ["peak", "low"]),
        ({"class_path": "torchmetrics.MeanMetric", "init_args": {"nan_strategy": "ignore"}}, ["mean_metric"]),
        (MetricCollection([MaxMetric(), MinMetric()]), ["max_metric", "min_metric"]),
        ((), []),
    ],
)
def test_reductions_are_named(given: Any, expected: list[str]) -> None:
    """The name is the key of a mapping, else that of the function, or of the class in snake case."""
    assert sorted(names(given)) == sorted(expected)


@pytest.mark.parametrize(
    ("given", "warned"),
    [
        (
            [torch.maximum, torch.maximum],
            "two reductions have the statistics 'maximum': .* name functions and metrics",
        ),
        (3, "extra takes a Reduction, a torchmetrics.Metric, a function of two arguments"),
        ("no.such", "cannot be imported"),
        (torch.nn.Linear, r"Linear\(\) raised"),
        (lambda total: total, r"extra takes a function \(before, new\)"),
    ],
)
def test_other_objects_are_refused(given: Any, warned: str) -> None:
    """The error names the argument and what is allowed."""
    with pytest.raises(ArgumentError, match=warned):
        as_reductions(given)


def test_the_name_of_a_statistic_that_is_always_computed_is_refused() -> None:
    """The error says so, with an example of another name."""
    with pytest.raises(ArgumentError, match=r"'mean' is always computed: .* extra={'my_mean': …}"):
        as_reductions({"mean": torchmetrics.MeanMetric()}, taken=("mean", "std"))


@pytest.mark.parametrize(
    ("given", "is_mergeable"),
    [
        (torch.maximum, True),
        (torch.add, True),
        (torch.sub, False),
        (decayed, False),
        (torchmetrics.MeanMetric(), True),
        (torchmetrics.CatMetric(), True),
        (torchmetrics.MinMaxMetric(torchmetrics.MeanMetric()), False),
    ],
)
def test_only_associative_functions_and_plain_metrics_are_mergeable(given: Any, is_mergeable: bool) -> None:
    """Functions of torch that are associative, and metrics without metrics inside, can be merged."""
    assert UserReduction(given).is_mergeable == is_mergeable


@pytest.mark.parametrize(
    "given",
    [
        torch.maximum,
        torch.add,
        torchmetrics.MeanMetric(),
        MaxMetric(),
        torchmetrics.SumMetric(),
        torchmetrics.CatMetric(),
    ],
)
@pytest.mark.parametrize("split", [1, 2])
def test_merging_equals_one_stream(given: Any, split: int) -> None:
    """The result of the merged states of two processes is that of one process with all tensors."""
    reduction = UserReduction(given)
    whole, first, second = (reduction.new() for _ in range(3))
    for place, batch in enumerate(BATCHES):
        whole.update(batch)
        (first if place < split else second).update(batch)
    merged = reduction.results(reduction.new().merged([first.payload, second.payload]))
    assert str(merged) == str(reduction.results(whole))


def test_results_are_numbers_and_tensors_by_name() -> None:
    """Numbers are scalars, and mappings and sequences have one result for each part."""

    def several(total: Any, new: Tensor) -> Any:
        return {"rows": 3, "both": [new.sum(), new], "image": torch.ones(2, 2, dtype=torch.bool)}

    reduction = UserReduction(several)
    state = reduction.new()
    for batch in BATCHES:
        state.update(batch)
    scalars, tensors = reduction.results(state)
    assert scalars == {"several_rows": 3.0, "several_both_0": -3.5}
    assert {name: (each.dtype, each.tolist()) for name, each in tensors.items()} == {
        "several_both_1": (torch.float64, [-4.0, 0.5]),
        "several_image": (torch.float64, [[1.0, 1.0], [1.0, 1.0]]),
    }


def test_a_result_that_is_no_number_is_refused() -> None:
    """The error names the reduction and the class."""
    reduction = UserReduction(lambda total, new: "text", "words")
    state = reduction.new()
    for batch in BATCHES:
        state.update(batch)
    with pytest.raises(ArgumentError, match="the result of words is a str"):
        reduction.results(state)


def test_a_copy_is_independent_of_the_state() -> None:
    """A function that changes its result in place does not change a copy."""
    reduction = UserReduction(lambda total, new: total.add_(new))
    state = reduction.new()
    state.update(BATCHES[0])
    before = state.copy("cpu")
    state.update(BATCHES[1])
    assert before.value.tolist() == BATCHES[0].tolist()
    assert state.value.tolist() == (BATCHES[0] + BATCHES[1]).tolist()


def test_a_reduction_can_be_copied_and_pickled() -> None:
    """A pickle contains an importable function, and never fails because of one that cannot be pickled."""
    assert pickle.loads(pickle.dumps(UserReduction(decayed))).given is decayed
    lost = pickle.loads(pickle.dumps(UserReduction(lambda total, new: new, "latest")))
    assert lost.name == "latest"
    assert copy.deepcopy(UserReduction(torch.maximum)).given is torch.maximum
