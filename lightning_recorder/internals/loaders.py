"""The indices that a data loader reads of its data set, noted without a change of their order."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
)
from torch.utils.data import dataloader as torch_loaders
from typing_extensions import override

from lightning_recorder.internals.worker_draws import WatchedCollate

__all__ = [
    "WATCHED",
    "base_rows",
    "batch_number",
    "forget_indices",
    "index_numbers",
    "indices_of",
    "inner_loader",
    "is_at_end",
    "keep_indices",
    "kept_of",
    "rows_of_base",
]

_MOST_KEPT = 256  # batches whose indices are read ahead of the training, or are not asked for
_SIMPLE = (int, float, bool, str, bytes, type(None), np.int64)
WATCHED = "_lightning_recorder_collate"
"""The attribute of a loader with the latest :class:`WatchedCollate`."""
_ITERATOR: Any = getattr(torch_loaders, "_BaseDataLoaderIter", ())  # also of the loaders of torchdata


def keep_indices(loader: object) -> bool:
    """Let a data loader keep the indices of the batches that it reads; return False if it has none.

    The loader gets a subclass of its class that differs in the iterators over its sampler alone: they pass on what the
    sampler yields, and keep it. Samplers, random numbers and the loader's attributes stay as they are.
    """
    # A loader without automatic batches has one index for each batch, not one for each sample.
    if (
        not isinstance(loader, DataLoader)
        or loader.batch_sampler is None
        or isinstance(loader.dataset, IterableDataset)
    ):
        return False
    if not getattr(loader, "in_order", True) and loader.num_workers > 0:
        return False  # the batches come in another order than the indices
    kind: Any = type(loader)
    if not issubclass(kind, _KeepsIndices):
        body = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        try:
            loader.__class__ = type(kind.__name__, (_KeepsIndices, kind), body)
        except TypeError:  # a class with a layout of its own
            return False
    return True


def forget_indices(loader: object) -> None:
    """Undo :func:`keep_indices`."""
    kind = type(loader)
    vars(loader).pop(WATCHED, None)
    if issubclass(kind, _KeepsIndices):
        loader.__class__ = kind.__mro__[2]


def indices_of(iterator: object, number: int | None) -> list[int] | None:
    """Return the indices of the samples in the batch with this :func:`batch_number` of an iterator, in order.

    None if they are not known, or are no whole numbers.
    """
    found = _kept(iterator, number)
    try:
        return None if found is None else list(map(operator.index, found))
    except TypeError:
        return None


def kept_of(iterator: object) -> object:
    """Return the sampler of an iterator over a data loader, which keeps the indices, or the argument itself."""
    return getattr(iterator, "_sampler_iter", iterator)


def is_at_end(kept: object, number: int) -> bool:
    """Return True if an iterator has yielded no batch of this number or later; False if that is not known."""
    return isinstance(kept, _KeptIterator) and number >= kept.count


def _kept(iterator: object, number: int | None) -> Any:
    kept = getattr(iterator, "_sampler_iter", iterator)  # as kept_of, with one call less in each step
    return kept.get(number) if isinstance(kept, _KeptIterator) and number is not None else None


def index_numbers(iterator: object, number: int | None) -> NDArray[np.int64] | None:
    """Return a hash of each index of a batch that is no whole number, such as a key or a pair of a row and a size.

    The hashes are the same in each process. None if the indices are not known, or are of other types. See
    :func:`indices_of`.
    """
    found = _kept(iterator, number)
    if not isinstance(found, (list, tuple)):
        return None
    # The code of other types is the user's.
    if not all(type(part) in _SIMPLE for each in found for part in (each if type(each) is tuple else (each,))):
        return None
    hashes = b"".join(blake2b(repr(each).encode(), digest_size=8).digest() for each in found)
    return np.frombuffer(hashes, dtype=np.int64)


def batch_number(iterator: object, ahead: int) -> int | None:
    """Return the place of a batch among those that an iterator over a data loader gives; None if it is not known."""
    if not isinstance(iterator, _ITERATOR):
        return None
    kept: Any = getattr(iterator, "_sampler_iter", None)
    if isinstance(kept, _KeptIterator):  # those of torchdata count the batches before a resumption, too
        pending = getattr(iterator, "_send_idx", 0) - getattr(iterator, "_rcvd_idx", 0)
        return kept.count - pending - ahead - 1
    number = getattr(iterator, "_num_yielded", None)
    return number - ahead - 1 if isinstance(number, int) else None


def inner_loader(loader: object) -> DataLoader[Any] | None:
    """Return the only ``DataLoader`` in the attributes of a loader, or in a list there; None otherwise."""
    found: list[DataLoader[Any]] = []
    for each in getattr(loader, "__dict__", {}).values():
        found += [part for part in (each if type(each) in (list, tuple) else [each]) if isinstance(part, DataLoader)]
    return found[0] if len(found) == 1 else None


def rows_of_base(dataset: object, rows: list[int]) -> list[int] | None:
    """Return the rows of the data set below a ``Subset``, at any depth; None if the data set is none."""
    found: list[int] | None = None
    try:
        while type(dataset) is Subset:
            rows = found = [int(dataset.indices[row]) for row in rows]
            dataset = dataset.dataset
    except (IndexError, TypeError, ValueError):
        return None
    return found


def base_rows(loader: object) -> tuple[object, list[int]] | None:
    """Return the data set below each ``Subset`` of a loader, and the rows of it that the loader reads.

    Returns:
        None if they are not known: for other loaders, data sets and samplers than those of torch.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    sampler, dataset = loader.sampler, loader.dataset
    if isinstance(sampler, SubsetRandomSampler):
        rows = list(map(int, sampler.indices))
    elif isinstance(sampler, (SequentialSampler, RandomSampler, DistributedSampler)):
        rows = list(range(len(dataset)))  # type: ignore[arg-type]  # these samplers need its length, too
    else:
        return None
    below = rows_of_base(dataset, rows)
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset, rows if below is None else below


class _KeepsIndices(DataLoader[Any]):
    """The first class of a loader that keeps indices."""

    @property
    @override
    def _index_sampler(self) -> Any:
        inner = super()._index_sampler
        return (_StatefulSampler if _is_stateful(inner) else _KeptSampler)(inner)

    @override
    def _get_iterator(self) -> Any:
        if not self.num_workers:
            return super()._get_iterator()
        table = vars(self)
        before = table.get("collate_fn")
        try:
            if callable(before):
                # The iterator passes it to the workers, and the user keeps seeing his own.
                table["collate_fn"] = table[WATCHED] = WatchedCollate(before, self.dataset, self.num_workers)
        except Exception:  # noqa: BLE001 - a data set may raise anything, and shared memory may be missing
            table[WATCHED] = None
        try:
            return super()._get_iterator()
        finally:
            if callable(before):
                table["collate_fn"] = before

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy or a pickle has the class that the user knows.
        kind, plain = type(self), type(self).__mro__[2]
        made: Any = super().__reduce_ex__(protocol)
        is_plain = isinstance(made, tuple) and made[1] == (kind,)
        return (object.__new__, (plain,), *made[2:]) if is_plain else made


class _Kept:
    """Has the attributes of another object.

    Args:
        inner: The object.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # of a copy without attributes
            raise AttributeError(name)
        return getattr(self._inner, name)


class _KeptSampler(_Kept):
    """A sampler whose iterators keep what they yield."""

    def __iter__(self) -> Iterator[Any]:
        # At once, because some samplers draw random numbers here and others at the first item.
        inner = iter(self._inner)
        return (_StatefulIterator if _is_stateful(inner) else _KeptIterator)(inner)

    def __len__(self) -> int:
        return len(self._inner)


class _KeptIterator(_Kept, Iterator[Any]):
    """Passes on what an iterator yields, and keeps the latest."""

    def __init__(self, inner: Iterator[Any]) -> None:
        super().__init__(inner)
        self._kept: deque[Any] = deque(maxlen=_MOST_KEPT)
        self.count = 0
        """The number of batches that were yielded."""

    @override
    def __next__(self) -> Any:
        found = next(self._inner)
        self._kept.append(found)
        self.count += 1
        return found

    def get(self, number: int) -> Any:
        """Return what was yielded at this place; None if it is no longer kept."""
        place = number - (self.count - len(self._kept))
        return self._kept[place] if 0 <= place < len(self._kept) else None


def _is_stateful(inner: object) -> bool:
    return hasattr(inner, "state_dict") and hasattr(inner, "load_state_dict")


class _Stateful(_Kept):
    """Has the methods that torchdata looks for in the class, from Python 3.12 on without ``__getattr__``."""

    def state_dict(self) -> Any:
        """Return the state of the inner object."""
        return self._inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Give the inner object a state."""
        self._inner.load_state_dict(state)


class _StatefulSampler(_Stateful, _KeptSampler):
    """A sampler with a state."""


class _StatefulIterator(_Stateful, _KeptIterator):
    """An iterator with a state."""
