"""Tests of the indices that a data loader reads."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, Subset, TensorDataset
from typing_extensions import override

from lightning_recorder.internals.loaders import (
    current_batch,
    forget_indices,
    index_numbers,
    inner_loader,
    keep_indices,
    kept_batch,
    kept_of,
    rows_of_base,
)

ROWS = TensorDataset(torch.arange(20))


class Eager(Sampler[int]):
    """Draws its random numbers when its iterator is made, as a ``DistributedSampler`` does."""

    @override
    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(20).tolist())

    def __len__(self) -> int:
        return 20


def loader(kind: str) -> DataLoader[Any]:
    if kind == "batches":
        return DataLoader(ROWS, batch_sampler=BatchSampler(RandomSampler(ROWS), 3, True))
    sampler = Eager() if kind == "eager" else None
    workers = 2 if kind in ("workers", "persistent") else 0
    shuffle, persists = sampler is None, kind == "persistent"
    return DataLoader(ROWS, 3, shuffle=shuffle, sampler=sampler, num_workers=workers, persistent_workers=persists)


def known_indices(iterator: object, ahead: int) -> Any:
    number, found = current_batch(iterator, ahead)
    kept = kept_batch(kept_of(iterator), -1 if number is None else number)
    assert kept == found
    return found


def epochs(loader: DataLoader[Any]) -> tuple[list[list[int]], Any]:
    """Return the rows of two epochs, and the state of the random numbers afterwards."""
    torch.manual_seed(3)
    found = [batch[0].tolist() for _ in range(2) for batch in loader]
    return found, torch.get_rng_state().tolist()


@pytest.mark.parametrize("kind", ["plain", "eager", "batches", "workers", "persistent"])
def test_the_indices_of_each_batch_are_known(kind: str) -> None:
    """The order, the random numbers and the class are those of the loader alone, and each batch has its indices."""
    usual = epochs(loader(kind))
    kept = loader(kind)
    assert keep_indices(kept)
    assert (type(kept).__name__, len(kept)) == ("DataLoader", len(loader(kind)))
    assert epochs(kept) == usual
    iterator = iter(kept)
    for batch in iterator:
        assert known_indices(iterator, 0) == batch[0].tolist()
    assert known_indices(iterator, 1) != known_indices(iterator, 0)
    forget_indices(kept)
    assert type(kept) is DataLoader


def test_copies_are_plain_loaders() -> None:
    """A copy or a pickle of a loader that keeps indices has the class that the user knows."""
    kept = loader("plain")
    keep_indices(kept)
    assert type(copy.copy(kept)) is type(copy.deepcopy(kept)) is type(pickle.loads(pickle.dumps(kept))) is DataLoader


def test_unknown_indices() -> None:
    """A loader without automatic batches, an iterator of another library, and indices that are no numbers."""
    assert not keep_indices(DataLoader(ROWS, batch_size=None))
    assert not keep_indices([1, 2])
    assert known_indices(iter([1, 2]), 0) is None
    named = DataLoader(TensorDataset(torch.arange(3)), batch_sampler=[["a"], ["b"]], collate_fn=str)
    named.dataset.__class__ = type("Named", (TensorDataset,), {"__getitem__": lambda _self, name: name})
    assert keep_indices(named)
    iterator = iter(named)
    assert next(iterator) == "['a']"
    assert known_indices(iterator, 0) == ["a"]


class Keyed(TensorDataset):
    """Returns its index."""

    def __getitem__(self, index: Any) -> Any:
        return index


@pytest.mark.parametrize("batch", [["a", "b", "a"], [(1, 32), (2, 32), (1, 32)]])
def test_indices_that_are_no_numbers_have_hashes(batch: list[Any]) -> None:
    """Equal keys or pairs have equal numbers, which are the same in each process."""
    kept = DataLoader(Keyed(torch.arange(3)), batch_sampler=[batch], collate_fn=str)
    assert keep_indices(kept)
    iterator = iter(kept)
    next(iterator)
    found = index_numbers(known_indices(iterator, 0))
    assert found is not None
    first, second, third = found.tolist()
    assert first == third != second
    assert first == {"a": -1586550463278054497, (1, 32): 1066948985902811569}[batch[0]]


def test_indices_of_other_types_are_not_read() -> None:
    """Their code is the user's."""
    kept = DataLoader(Keyed(torch.arange(3)), batch_sampler=[[object()]], collate_fn=str)
    keep_indices(kept)
    iterator = iter(kept)
    next(iterator)
    assert index_numbers(known_indices(iterator, 0)) is None


class Stateful(Eager):
    """A sampler with a state, as those of torchdata."""

    def state_dict(self) -> dict[str, int]:
        return {"seen": 3}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def test_samplers_keep_their_state() -> None:
    """The class has the methods of a stateful sampler if the sampler has them, since torchdata looks there."""
    sampler = Stateful()
    for inner, has_state in ((sampler, True), (Eager(), False)):
        kept = DataLoader(ROWS, batch_sampler=inner)  # type: ignore[arg-type]  # not read
        assert keep_indices(kept)
        index_sampler: Any = kept._index_sampler
        methods = [hasattr(type(index_sampler), name) for name in ("state_dict", "load_state_dict")]
        assert methods == [has_state] * 2
        if has_state:
            index_sampler.load_state_dict(index_sampler.state_dict())
    assert sampler.seen == 3


class Wrapper:
    """A loader around another one."""

    def __init__(self, *parts: Any) -> None:
        self.parts = [str, *parts]


def test_the_loader_in_another_one() -> None:
    """A loader that wraps one DataLoader is known by it, and one of two is not."""
    one, other = DataLoader(ROWS), DataLoader(ROWS)
    assert inner_loader(Wrapper(one)) is one
    assert inner_loader(Wrapper(one, other)) is None
    assert inner_loader(3) is None


def test_rows_below_subsets() -> None:
    """The rows of a subset of a subset are those of the data set below both."""
    assert rows_of_base(Subset(Subset(ROWS, [5, 6, 7, 8]), [1, 3]), [1, 0]) == [8, 6]
    assert rows_of_base(ROWS, [1]) is None
