"""The dataset indices that a data loader reads, recorded without changing their order."""

from __future__ import annotations

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
    "current_batch",
    "forget_indices",
    "index_numbers",
    "inner_loader",
    "is_at_end",
    "keep_indices",
    "kept_batch",
    "kept_of",
    "rows_of_base",
]

_MOST_KEPT = 256  # maximum number of batches whose indices are kept, because they are prefetched or unused
_SIMPLE = (int, float, bool, str, bytes, type(None), np.int64)
WATCHED = "_lightning_recorder_collate"
"""The attribute of a loader with the latest :class:`WatchedCollate`."""
_ITERATOR: Any = getattr(torch_loaders, "_BaseDataLoaderIter", ())  # also the base class in torchdata


def keep_indices(loader: object) -> bool:
    """Let a data loader keep the indices of the batches that it reads. Return False if the loader has no indices.

    The class of the loader is replaced by a subclass, whose sampler iterators also keep the indices that they yield.
    Samplers, random numbers and the loader's attributes are unchanged.
    """
    # A loader without automatic batching has one index per batch, not one per sample.
    if (
        not isinstance(loader, DataLoader)
        or loader.batch_sampler is None
        or isinstance(loader.dataset, IterableDataset)
    ):
        return False
    if not getattr(loader, "in_order", True) and loader.num_workers > 0:
        return False  # batches arrive in another order than their indices
    kind: Any = type(loader)
    if not issubclass(kind, _KeepsIndices):
        body = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        try:
            loader.__class__ = type(kind.__name__, (_KeepsIndices, kind), body)
        except TypeError:  # a class with an incompatible memory layout
            return False
    return True


def forget_indices(loader: object) -> None:
    """Undo :func:`keep_indices`."""
    kind = type(loader)
    vars(loader).pop(WATCHED, None)
    if issubclass(kind, _KeepsIndices):
        loader.__class__ = kind.__mro__[2]


def kept_of(iterator: object) -> object:
    """Return the sampler iterator of a data loader iterator, which keeps the indices; without one, the argument."""
    return getattr(iterator, "_sampler_iter", iterator)


def is_at_end(kept: object, number: int) -> bool:
    """Return True if an iterator has yielded at most ``number`` batches; False if that is unknown."""
    return isinstance(kept, _KeptIterator) and number >= kept.count


def kept_batch(kept: object, number: int) -> Any:
    """Return the kept indices of a batch by its number; None if unknown. ``kept`` is from :func:`kept_of`."""
    if not isinstance(kept, _KeptIterator):
        return None
    place = number - (kept.count - len(kept.kept))
    return kept.kept[place] if 0 <= place < len(kept.kept) else None


def current_batch(iterator: object, ahead: int) -> tuple[int | None, Any]:
    """Return the number of a batch in an iterator over a data loader, and the indices of its samples.

    Each of the two is None if unknown.

    Args:
        iterator: The iterator.
        ahead: The number of batches that were read after this batch.
    """
    if not isinstance(iterator, _ITERATOR):
        return None, None
    kept: Any = getattr(iterator, "_sampler_iter", None)
    if isinstance(kept, _KeptIterator):  # torchdata also counts the batches before a resumption
        pending = getattr(iterator, "_send_idx", 0) - getattr(iterator, "_rcvd_idx", 0)
        place = len(kept.kept) - pending - ahead - 1  # kept_batch inlined, because this runs in each step
        return kept.count - pending - ahead - 1, kept.kept[place] if place >= 0 else None
    number = getattr(iterator, "_num_yielded", None)
    return number - ahead - 1 if isinstance(number, int) else None, None


def index_numbers(found: object) -> NDArray[np.int64] | None:
    """Return a hash of each index of a batch whose indices are not integers, such as keys or pairs of row and size.

    The hashes are the same in each process. None if the indices are unknown or have other types.
    """
    if not isinstance(found, (list, tuple)):
        return None
    # Hashing other types would run user code.
    if not all(type(part) in _SIMPLE for each in found for part in (each if type(each) is tuple else (each,))):
        return None
    hashes = b"".join(blake2b(repr(each).encode(), digest_size=8).digest() for each in found)
    return np.frombuffer(hashes, dtype=np.int64)


def inner_loader(loader: object) -> DataLoader[Any] | None:
    """Return the only ``DataLoader`` in the attributes of a loader, or in lists in its attributes; None otherwise."""
    found: list[DataLoader[Any]] = []
    for each in getattr(loader, "__dict__", {}).values():
        found += [part for part in (each if type(each) in (list, tuple) else [each]) if isinstance(part, DataLoader)]
    return found[0] if len(found) == 1 else None


def rows_of_base(dataset: object, rows: list[int]) -> list[int] | None:
    """Convert rows of nested ``Subset`` data sets to rows of the innermost data set; None if there is no ``Subset``."""
    found: list[int] | None = None
    try:
        while type(dataset) is Subset:
            rows = found = [int(dataset.indices[row]) for row in rows]
            dataset = dataset.dataset
    except (IndexError, TypeError, ValueError):
        return None
    return found


def base_rows(loader: object) -> tuple[object, list[int]] | None:
    """Return the data set of a loader without ``Subset`` wrappers, and the rows of it that the loader reads.

    Returns:
        The data set and its rows; None if unknown, as for loaders, data sets and samplers that are not from torch.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    sampler, dataset = loader.sampler, loader.dataset
    if isinstance(sampler, SubsetRandomSampler):
        rows = list(map(int, sampler.indices))
    elif isinstance(sampler, (SequentialSampler, RandomSampler, DistributedSampler)):
        rows = list(range(len(dataset)))  # type: ignore[arg-type]  # these samplers need the length, too
    else:
        return None
    below = rows_of_base(dataset, rows)
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset, rows if below is None else below


class _KeepsIndices(DataLoader[Any]):
    """The base class that :func:`keep_indices` puts before the class of a loader."""

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
                # The iterator passes this function to the workers, and the user's own function is restored afterwards.
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
        # A copy or a pickle has the original class.
        kind, plain = type(self), type(self).__mro__[2]
        made: Any = super().__reduce_ex__(protocol)
        is_plain = isinstance(made, tuple) and made[1] == (kind,)
        return (object.__new__, (plain,), *made[2:]) if is_plain else made


class _Kept:
    """A proxy with the attributes of another object.

    Args:
        inner: The object.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # a copy whose attributes are not set yet
            raise AttributeError(name)
        return getattr(self._inner, name)


class _KeptSampler(_Kept):
    """A sampler whose iterators keep the indices that they yield."""

    def __iter__(self) -> Iterator[Any]:
        # Create the iterator now, because some samplers draw random numbers in ``__iter__``, others at the first item.
        inner = iter(self._inner)
        return (_StatefulIterator if _is_stateful(inner) else _KeptIterator)(inner)

    def __len__(self) -> int:
        return len(self._inner)


class _KeptIterator(_Kept, Iterator[Any]):
    """Wraps an iterator, and keeps the latest items."""

    def __init__(self, inner: Iterator[Any]) -> None:
        super().__init__(inner)
        self.kept: deque[Any] = deque(maxlen=_MOST_KEPT)
        """The latest batches, in order."""
        self.count = 0
        """The number of batches that were yielded."""

    @override
    def __next__(self) -> Any:
        found = next(self._inner)
        self.kept.append(found)
        self.count += 1
        return found


def _is_stateful(inner: object) -> bool:
    return hasattr(inner, "state_dict") and hasattr(inner, "load_state_dict")


class _Stateful(_Kept):
    """A proxy with state methods, because torchdata ignores ``__getattr__`` when it looks for them (Python 3.12)."""

    def state_dict(self) -> Any:
        """Return the state of the inner object."""
        return self._inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Load a state into the inner object."""
        self._inner.load_state_dict(state)


class _StatefulSampler(_Stateful, _KeptSampler):
    """A sampler with a state."""


class _StatefulIterator(_Stateful, _KeptIterator):
    """An iterator with a state."""
