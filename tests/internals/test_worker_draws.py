"""Tests of the noted states of random number generators in the workers of a data loader."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, default_collate
from typing_extensions import override

from lightning_recorder.internals.worker_draws import WatchedCollate, draws_of


class Hostile(dict[Any, Any]):
    """A container that raises in the worker processes."""

    @property  # type: ignore[misc]  # isinstance asks for it
    def __class__(self) -> Any:
        if torch.utils.data.get_worker_info() is not None:
            raise RuntimeError("not here")
        return dict


class Noisy(Dataset[Any]):
    """A data set with a generator of its own, and further attributes."""

    def __init__(self, **attributes: object) -> None:
        self.rng = np.random.default_rng(0)
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return 16

    @override
    def __getitem__(self, index: int) -> float:
        return float(self.rng.random())


OF_METHOD, OF_FUNCTION, OF_PART, UNUSED = (np.random.default_rng(seed) for seed in range(4))
OF_MODULE = np.random.default_rng(4)
itself = sys.modules[__name__]


def add(value: float) -> float:
    """Draw for a sample, as a function that a data set calls."""
    return float(value + OF_FUNCTION.random() + itself.OF_MODULE.random())


class Part:
    """A transform with a static method."""

    @staticmethod
    def draw() -> list[float]:
        return [OF_PART.random() for _ in range(2)]


class Global(Noisy):
    """A data set whose generators are global variables."""

    @override
    def __getitem__(self, index: int) -> float:
        return add(float(OF_METHOD.random()))


def batches(dataset: Noisy) -> tuple[WatchedCollate, list[Any]]:
    collate = WatchedCollate(default_collate, dataset, 2)
    return collate, [each.tolist() for each in DataLoader(dataset, 2, num_workers=2, collate_fn=collate)]


def test_a_data_set_that_raises_costs_no_batch() -> None:
    """An error while a data set is searched in a worker leaves the batches as they are."""
    plain = [each.tolist() for each in DataLoader(Noisy(), 2, num_workers=2)]
    collate, found = batches(Noisy(other=Hostile()))
    assert found == plain
    assert draws_of(collate) == []
    (draws,) = draws_of(batches(Noisy())[0])
    assert draws.source == "dataset.rng"
    assert len({0, *draws.first}) == 4  # the states after the first three batches; 0 would be one that was not noted


def test_large_data_sets_are_searched_in_part() -> None:
    """A nested data set takes a bounded time: at most 2,000 of its objects are looked at."""
    looked: list[int] = []

    class Entries(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            raise AssertionError("not iterated as a whole")

        def __getitem__(self, index: Any) -> Any:
            looked.append(1)
            return [Entries() for _ in range(64)]

    WatchedCollate(default_collate, Noisy(samples=Entries()), 2)
    assert 0 < len(looked) <= 2000


@pytest.mark.parametrize("key", [object(), ("a", 1)])
def test_the_names_of_entries_run_no_code_of_the_user(key: object) -> None:
    """A key of a class of its own is named by its class."""
    collate = WatchedCollate(default_collate, Noisy(table={key: np.random.default_rng(1)}), 2)
    assert f"dataset.table[{type(key).__name__}]" in collate.names


def test_global_variables_that_a_data_set_uses_are_its_generators() -> None:
    """Those of its methods, of functions that they call, of its transforms, and of modules; no others."""
    del (data := Global(part=partial(Part.draw), parts=[Part()])).rng
    names = WatchedCollate(default_collate, data, 2).names
    assert names[:3] == ["numpy.random", "random", "torch"]
    assert sorted(names[3:]) == sorted(
        f"{__name__}.{each}" for each in ("OF_METHOD", "OF_FUNCTION", "OF_PART", "OF_MODULE")
    )
