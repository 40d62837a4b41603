"""Count how often each sample of a run occurs, in memory that does not grow with the run."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.insight.data_facts import EpochFacts, EpochOfRanks, RankFacts, ValidationFacts
from lightning_recorder.statistics.fingerprint import odd_numbers

__all__ = [
    "AT_ONCE",
    "BatchSamples",
    "EpochSamples",
    "RankEpoch",
    "RankSamples",
    "Sketch",
    "StepSamples",
    "compare_epochs",
    "compare_ranks",
    "compare_validation",
]

_SAMPLES = 4096
_BATCHES = 1024
_ALL = 1 << 64
_MOST_CLASSES = 1024
_MIX = np.int64(0x1E3779B97F4A7C15)
AT_ONCE = 16  # the number of batches that are counted together; fewer if they have about _MOST_WAITING samples
_MOST_WAITING = 4096
_FEWEST_CONTENTS = 4  # with at least this many different samples, two batches are hardly equal by chance
_ABOUT = 0.8  # ranks with at least this fraction of the largest share of common samples are reported together
_NEAR = 4  # the number of recent batches that are searched for repeated samples
_COMPARED_SAMPLES = 16  # the number of samples of a step that are compared between ranks
_MOST_SENT = 1024  # the maximum number of samples of an epoch that are compared between ranks

Keys = NDArray[np.int64]
_Value: TypeAlias = tuple[int | None, int]  # the fingerprint of a sample, if it is known, and its class, or -1


class Sketch:
    """Counts how often each key was added, exactly for up to ``2 * size`` different keys.

    With more keys, only the smallest ``size`` to ``2 * size`` keys are kept, as a random sample. The keys must
    therefore be spread evenly over 64 bits. With a size of 4096, the standard error of a share is at most 0.8 %, and
    the standard error of the number of different keys is 1.6 %.
    """

    def __init__(self, size: int = _SAMPLES) -> None:
        self._size = size
        self.limit = _ALL
        """Only keys below this limit are counted."""
        self.counts: Counter[int] = Counter()
        self.workers: dict[int, int] = {}
        """The workers that yielded each key, as a bit mask."""

    def add(self, keys: Keys, worker: int | None = None) -> None:
        """Add keys."""
        unsigned = keys.view(np.uint64)
        if self.limit < _ALL:
            unsigned = unsigned[unsigned < np.uint64(self.limit)]
        counts, workers, found = self.counts, self.workers, unsigned.tolist()
        counts.update(found)
        if worker is not None:
            for key in found:
                workers[key] = workers.get(key, 0) | 1 << worker
        if len(counts) > 2 * self._size:
            self.limit = sorted(counts)[self._size]
            self.counts = Counter({key: count for key, count in counts.items() if key < self.limit})
            self.workers = {key: bits for key, bits in workers.items() if key < self.limit}

    @property
    def distinct(self) -> float:
        """The number of different keys, estimated if there are many."""
        return len(self.counts) * (_ALL / self.limit)

    @property
    def once(self) -> float:
        """The share of keys that were counted once."""
        return sum(count == 1 for count in self.counts.values()) / max(1, len(self.counts))

    def share_of_each_worker(self, workers: int) -> float:
        """Return the share of keys that came from each worker exactly once."""
        every = (1 << workers) - 1
        found = sum(count == workers and self.workers.get(key) == every for key, count in self.counts.items())
        return found / max(1, len(self.counts))

    def common(self, other: Sketch) -> tuple[int, int]:
        """Return the number of keys below the limits of both sketches, and how many of them the other sketch has."""
        limit = min(self.limit, other.limit)
        own = [key for key in self.counts if key < limit]
        return len(own), sum(key in other.counts for key in own)

    def is_same_set(self, other: Sketch) -> bool:
        """Return True if both sketches have the same keys below the smaller of their limits."""
        limit = min(self.limit, other.limit)
        return {key for key in self.counts if key < limit} == {key for key in other.counts if key < limit}


@dataclass(frozen=True)
class BatchSamples:
    """The samples of one batch."""

    contents: Keys  # the fingerprints of the samples, ``[samples]``; none if they are not known
    rows: Keys | None = None  # the indices of the samples in the data set, ``[samples]``; None if they are not known
    hashes: Keys | None = None  # hashes of the indices if these are not integers
    worker: int | None = None  # the worker that made the batch; None if it is not known
    classes: Keys | None = None  # the class of each sample, ``[samples]``; None if there is none
    inputs: Keys | None = None  # the fingerprints of the inputs alone, ``[samples]``; None if they are not known

    @property
    def has_indices(self) -> bool:
        """True if the identities of the samples do not depend on their values."""
        return self.rows is not None or self.hashes is not None

    @property
    def keys(self) -> Keys:
        """The identities of the samples, from their indices or else from their values."""
        if self.rows is not None:
            return _spread(self.rows)
        return self.contents if self.hashes is None else self.hashes


def _spread(rows: Keys) -> Keys:
    """Return a number for each index, spread evenly over 64 bits."""
    found = (rows + 1) * _MIX  # arrays of integers overflow without a warning
    found = (found ^ (found >> 29)) * np.int64(-0x40A7B892E31B1A47)
    return found ^ (found >> 32)


class EpochSamples:
    """Collects the samples of one epoch, which may come from several workers."""

    def __init__(self, epoch: int, workers: int = 0) -> None:
        self.epoch, self._workers = epoch, workers
        self.batches = self.samples = self.first_step = self.last_step = 0
        self.keys = Sketch()
        self.contents = self.keys
        """The fingerprints of the sample values. The same object as ``keys`` if the indices are not known."""
        self.is_whole = self._is_repeat = False
        self.overwritten = self.checked = 0
        """The number of batches that were overwritten during their use, and the number of checked batches."""
        self.order = 0
        """A hash of the samples that depends on their order."""
        self._is_ascending = True
        self._last_row = self._last_class = -1
        self._first_repeat = 0  # the number of samples until the first repeated one; 0 if there is none
        self._recent: deque[Keys] = deque(maxlen=_NEAR)
        self._near = self._equal = self._consecutive = self._cached = self._changes = 0
        self._equal_input: int | None = None
        self._sets = Sketch(_BATCHES)
        self._before: int | None = None
        self._waiting: list[BatchSamples] = []
        self._seen: dict[int, int] = {}  # from the values of a batch to the set of its indices, both as hashes
        self._classes: NDArray[np.int64] | None = np.zeros(_MOST_CLASSES, dtype=np.int64)

    def add(self, batch: BatchSamples, step: int) -> None:
        """Add a batch. Most attributes include the batch only after :meth:`count` or :meth:`facts`."""
        self.first_step = self.first_step if self.batches else step
        self.last_step = step
        self.batches += 1
        # A step evicts this code and its data from the processor cache, so counting several batches at once is faster.
        self._waiting.append(batch)
        if len(self._waiting) == AT_ONCE or len(self._waiting) * len(batch.contents) >= _MOST_WAITING:
            self.count()

    def count(self) -> None:
        """Count the waiting batches."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            self._count_batch(each)

    def _count_batch(self, batch: BatchSamples) -> None:
        keys = batch.keys
        self.samples += len(keys)
        self.keys.add(keys, batch.worker)
        if not self._first_repeat and self.keys.limit == _ALL and len(self.keys.counts) < self.samples:
            self._first_repeat = self.samples
        which = keys.sum()
        self.order = (self.order * 31 + _ordered(keys)) % _ALL
        self._look_for_equal_inputs(batch)
        self._sets.add(_spread(which.reshape(1)))
        self._is_repeat = self._before == int(which)
        self._consecutive += self._is_repeat
        self._before = int(which)
        if batch.has_indices:
            if self.contents is self.keys:
                self.contents = Sketch()
            self.contents.add(batch.contents)
            self._look_for_cache(batch.contents, int(which))
            rows = batch.rows
            if rows is not None and self._is_ascending and len(rows):
                self._is_ascending = bool(rows[0] > self._last_row and (rows[1:] > rows[:-1]).all())
                self._last_row = int(rows[-1])
        else:
            self._look_for_near_repeats(keys)
        self._add_classes(batch.classes)

    def _look_for_equal_inputs(self, batch: BatchSamples) -> None:
        """Count batches whose samples all have the same inputs, unless the previous batch had these inputs as well."""
        inputs, before = batch.inputs, self._equal_input
        self._equal_input = None
        if inputs is None or len(inputs) < 2 or not (inputs == inputs[0]).all():
            return
        if not batch.has_indices or len(np.unique(batch.keys)) == len(batch.keys):
            self._equal_input = int(inputs[0])
            self._equal += before != self._equal_input

    def _look_for_near_repeats(self, keys: Keys) -> None:
        if self._recent:
            self._near += int(np.isin(keys, np.concatenate(self._recent)).sum())
        self._recent.append(keys)

    def _look_for_cache(self, contents: Keys, which: int) -> None:
        ordered = _ordered(contents)
        if ordered in self._seen:
            is_other = self._seen[ordered] != which
            self._cached += is_other and len(np.unique(contents)) >= _FEWEST_CONTENTS
        elif len(self._seen) < _BATCHES:
            self._seen[ordered] = which

    def _add_classes(self, classes: Keys | None) -> None:
        if self._classes is None:
            return
        if classes is None or not len(classes) or classes.min() < 0 or classes.max() >= _MOST_CLASSES:
            self._classes = None
            return
        self._classes += np.bincount(classes, minlength=_MOST_CLASSES)
        is_other = self._last_class >= 0 and self._last_class != int(classes[0])
        self._changes += int(np.count_nonzero(classes[1:] != classes[:-1])) + is_other
        self._last_class = int(classes[-1])

    @property
    def has_changed(self) -> bool:
        """True if the latest batch has other samples than the batch before it."""
        self.count()
        return self.batches > 1 and not self._is_repeat

    def facts(self, before: EpochSamples | None = None) -> EpochFacts:
        """Return what is known about the epoch so far."""
        self.count()
        counts = np.zeros(0) if self._classes is None else self._classes[self._classes > 0]
        shares = counts / max(1, counts.sum())
        are_whole = before is not None and before.is_whole and self.is_whole
        is_same = before is not None and are_whole and self.keys.is_same_set(before.keys)
        counts_of_keys = set(self.keys.counts.values())
        every = min(counts_of_keys, default=0)
        window = _NEAR * self.samples / max(1, self.batches)
        return EpochFacts(
            epoch=self.epoch,
            first_step=self.first_step,
            last_step=self.last_step,
            batches=self.batches,
            samples=self.samples,
            distinct=self.keys.distinct,
            distinct_batches=self._sets.distinct,
            consecutive=int(self._consecutive),
            cached=int(self._cached),
            by_workers=self.keys.share_of_each_worker(self._workers) if self._workers > 1 else 0.0,
            is_whole=self.is_whole,
            is_same_set=is_same,
            classes=len(counts),
            changes=self._changes,
            random_changes=float(counts.sum() * (1 - (shares**2).sum())),
            contents=self.contents.distinct,
            contents_once=self.contents.once,
            equal=self._equal,
            overwritten=self.overwritten,
            checked=self.checked,
            once=self.keys.once,
            every=every if len(counts_of_keys) == 1 else 0,
            most=max(counts_of_keys, default=0),
            first_repeat=self._first_repeat,
            near=self._near / max(1, self.samples),
            random_near=min(1.0, window / max(1.0, self.keys.distinct)),
            is_same_order=before is not None and are_whole and self.order == before.order,
            is_ascending=self._is_ascending,
        )


def _ordered(keys: Keys) -> int:
    """Return a hash of keys that depends on their order."""
    return int(keys @ odd_numbers(len(keys)))


def compare_validation(validation: Sketch, samples: int, training: Sketch, step: int) -> ValidationFacts:
    """Compare the samples of a validation loader with those of a training epoch."""
    compared, common = validation.common(training)
    return ValidationFacts(samples, validation.distinct, compared, common, step)


class StepSamples(NamedTuple):
    """The samples of a batch that have the smallest keys."""

    keys: frozenset[int]
    values: Mapping[int, _Value] | None
    """The fingerprint and the class of each sample, as in :class:`RankSamples`; None if the keys are fingerprints."""

    @classmethod
    def of(cls, batch: BatchSamples, keys: Keys) -> StepSamples:
        """Return the samples of a batch with the smallest of the given keys."""
        unsigned = keys.view(np.uint64)
        places = np.argsort(unsigned)[:_COMPARED_SAMPLES]
        found = unsigned[places].tolist()
        if not batch.has_indices:
            return cls(frozenset(found), None)
        contents = batch.contents[places].tolist() if len(batch.contents) else [None] * len(found)
        classes = [-1] * len(found) if batch.classes is None else batch.classes[places].tolist()
        return cls(frozenset(found), dict(zip(found, zip(contents, classes, strict=True), strict=True)))


@dataclass(frozen=True)
class RankSamples:
    """Some samples of the latest steps of one rank."""

    rank: int  # the index of the rank among the ranks that should have different samples
    steps: tuple[int, ...]
    keys: tuple[frozenset[int], ...]  # the smallest sample keys of each step
    # by key, the fingerprint of the sample, if known, and its class, or -1; empty if the keys are the fingerprints
    values: tuple[Mapping[int, _Value], ...] = ()

    @classmethod
    def of(cls, rank: int, steps: Mapping[int, StepSamples]) -> RankSamples:
        """Return the samples of steps in the form that is sent to the first rank."""
        found = steps.values()
        has_values = all(each.values is not None for each in found)
        values = tuple(each.values for each in found if each.values is not None) if has_values else ()
        return cls(rank, tuple(steps), tuple(each.keys for each in found), values)

    def at(self, step: int) -> frozenset[int]:
        """Return the sample keys of a step."""
        return self.keys[self.steps.index(step)]


def compare_ranks(ranks: Sequence[RankSamples]) -> RankFacts | None:
    """Compare the samples of ranks in the same steps. Return None if there is nothing to compare."""
    parts = {each.rank: each for each in ranks}  # one rank per tensor-parallel group, whose ranks have the same samples
    steps = sorted(set.intersection(*(set(each.steps) for each in parts.values()))) if parts else []
    if len(parts) < 2 or not steps:
        return None
    first: dict[int, list[int]] = {}
    for rank, each in parts.items():
        first.setdefault(min(each.at(steps[0]), default=-1), []).append(rank)
    shares, equal = {}, 0.0
    for rank, each in parts.items():
        # Ranks with the same samples have the same smallest key. Comparing all pairs takes too long for many ranks.
        partners = [other for other in first[min(each.at(steps[0]), default=-1)][:2] if other != rank]
        shares[rank] = max((_shared(each, parts[other], steps) for other in partners), default=0.0)
        equal = max([equal, *(_equal(each, parts[other], steps) for other in partners)])
    most = max(shares.values())
    every = {key for each in parts.values() for keys in each.keys for key in keys}
    same = tuple(rank for rank, share in sorted(shares.items()) if share >= _ABOUT * most) if most else ()
    return RankFacts(len(parts), len(steps), steps[0], len(every), most, same, equal)


def _shared(one: RankSamples, other: RankSamples, steps: Sequence[int]) -> float:
    """Return the share of the samples of a rank that another rank has in the same steps.

    Equal indices with different classes are not counted, because they belong to different data sets.
    """
    common = sum(len(one.at(step) & other.at(step)) for step in steps)
    common -= sum(first[1] != second[1] for first, second in _pairs(one, other, steps))
    return common / max(1, sum(len(one.at(step)) for step in steps))


def _equal(one: RankSamples, other: RankSamples, steps: Sequence[int]) -> float:
    """Return the share of common indices whose samples have equal values; 1 if all have equal classes.

    Classes are compared because an augmentation changes the values of a sample, but not its class.
    """
    if not one.values or not other.values:
        return 1.0
    pairs = _pairs(one, other, steps)
    classes = {first[1] for first, _ in pairs}
    if len(classes) > 1 and -1 not in classes and all(first[1] == second[1] for first, second in pairs):
        return 1.0
    return sum(first[0] == second[0] is not None for first, second in pairs) / max(1, len(pairs))


def _pairs(one: RankSamples, other: RankSamples, steps: Sequence[int]) -> list[tuple[_Value, _Value]]:
    """Return the fingerprints and classes of two ranks at their common indices."""
    found = []
    if one.values and other.values:
        for step in steps:
            own, others = one.values[one.steps.index(step)], other.values[other.steps.index(step)]
            found += [(own[key], others[key]) for key in own.keys() & others.keys()]
    return found


@dataclass(frozen=True)
class RankEpoch:
    """Some samples of an epoch of one rank."""

    rank: int  # the index of the rank among the ranks that should have different samples
    epoch: int
    samples: int  # the number of samples in the epoch
    distinct: float  # the number of different samples
    limit: int  # the limit below which the keys are complete
    keys: frozenset[int]  # the keys of the different samples below the limit
    # the limit and the keys from the values of the samples, if ``keys`` come from indices
    limit_of_values: int = 0
    values: frozenset[int] | None = None

    @classmethod
    def of(cls, rank: int, epoch: EpochSamples) -> RankEpoch:
        """Return the samples of an epoch in the form that is sent to the first rank."""
        epoch.count()
        found = cls(rank, epoch.epoch, epoch.samples, epoch.keys.distinct, *_sent(epoch.keys))
        if epoch.contents is epoch.keys:
            return found
        limit, values = _sent(epoch.contents)
        return replace(found, limit_of_values=limit, values=values)


def _sent(sketch: Sketch) -> tuple[int, frozenset[int]]:
    limit, found = sketch.limit, sorted(sketch.counts)
    if len(found) > _MOST_SENT:
        limit, found = found[_MOST_SENT], found[:_MOST_SENT]
    return limit, frozenset(found)


def compare_epochs(ranks: Sequence[RankEpoch]) -> EpochOfRanks | None:
    """Compare the samples of ranks in an epoch. Return None if there is nothing to compare."""
    parts = {each.rank: each for each in ranks}  # one rank per tensor-parallel group, whose ranks have the same samples
    if len(parts) < 2 or len({each.epoch for each in parts.values()}) > 1:
        return None
    compared, shared = _common([(each.limit, each.keys) for each in parts.values()])
    values = [(each.limit_of_values, each.values) for each in parts.values() if each.values is not None]
    return EpochOfRanks(
        ranks=len(parts),
        epoch=next(iter(parts.values())).epoch,
        samples=min(each.samples for each in parts.values()),
        compared=compared,
        shared=shared,
        distinct=min(each.distinct / max(1, each.samples) for each in parts.values()),
        equal=_common(values)[1] if len(values) == len(parts) else shared,
    )


def _common(ranks: Sequence[tuple[int, frozenset[int]]]) -> tuple[int, float]:
    """Return the number of different keys below the smallest limit, and the share of them that several ranks have."""
    limit = min(limit for limit, _ in ranks)
    counts = Counter(key for _, keys in ranks for key in keys if key < limit)
    return len(counts), sum(count > 1 for count in counts.values()) / max(1, len(counts))
