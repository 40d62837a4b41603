"""Keep the latest batches of an epoch as the loader made them, so that a rollback can repeat them."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_recorder.callbacks.lightning import Trainer
from lightning_recorder.errors import describe_error
from lightning_recorder.internals.autograd import without_functions
from lightning_recorder.internals.pause_recording import pause_recording
from lightning_recorder.internals.preserve_state import own_copies
from lightning_recorder.internals.random_states import RandomStates
from lightning_recorder.statistics.fingerprint import sample_fingerprints
from lightning_recorder.watch.kept import are_written, batch_versions

__all__ = ["RepeatedBatches"]

# Lightning creates new containers for batches of these types before a step, even without a change of device. These
# batches need no copy.
_REBUILT = (list, tuple, dict, Tensor)


@dataclass
class _Batch:
    """A batch that a fetcher has yielded."""

    item: Any  # the batch, with its number and the number of its loader
    random: RandomStates  # the states of the random number generators before the batch
    counts: list[int]  # the counts of Lightning's loops before the batch
    why_not: str = ""
    versions: list[tuple[Tensor, int | None]] = field(default_factory=list)
    samples: Tensor | None = None  # the fingerprints of the samples
    made: list[int] = field(default_factory=list)  # by how much the batch increased the counts
    rows: list[int] | None = None
    is_left_out: bool = False

    def reason(self) -> str:
        """Return the reason why the batch cannot be repeated, or an empty string if it can."""
        if self.why_not:
            return self.why_not
        now, samples = batch_versions(self.item[0]), sample_fingerprints(self.item[0])
        are_same = len(now) == len(self.versions) and all(
            one is other for (one, _), (other, _) in zip(now, self.versions, strict=True)
        )
        if are_same and (self.samples is not None and samples is not None):
            are_same = torch.equal(self.samples, samples)
        return "" if are_same and not are_written(self.versions) else "a batch has changed since"


class RepeatedBatches:
    """Keeps the latest batches of an epoch, and makes the loader yield some of them again.

    Each batch is kept by reference, as the loader made it, before it is moved to a device. Once a step has written to
    its batch, all later batches are copied.

    A repeated batch has the same number in the epoch as before, because the counts of batches and optimizer steps in
    Lightning's loops are set back. After the last repeated batch, the skipped batches are added to the counts.
    Everything that depends on the counts then happens as if no batch had been repeated. The step count on the x-axis of
    logged values is not set back, so that each step is logged once.

    The random number generators are restored before each repeated batch. After the last repeated batch, they are set to
    their states before the skipped batches.
    """

    def __init__(self, trainer: Trainer, device: torch.device) -> None:
        self._trainer = trainer
        self._devices = [device] if device.type != "cpu" else []
        self._fetcher: Any = None
        self._must_copy = False
        self._begin()

    def _begin(self) -> None:
        self._batches: list[_Batch] = []
        self._first = 0  # the number in the epoch of the first kept batch
        self._waiting: deque[_Batch] = deque()  # the batches to repeat
        self._left_out: list[int] | None = None  # the counts to add after the last repeated batch; None if none repeats
        self._after: RandomStates | None = None
        self._was_done = False
        self.is_repeated = False
        """True if the current batch is a repeated one."""

    @property
    def number(self) -> int | None:
        """The number of the current batch in this epoch; None if unknown."""
        return None if self._fetcher is None else self._first + len(self._batches) - 1

    @property
    def rows(self) -> list[int] | None:
        """The sample indices of the current batch, as passed to :meth:`note_rows`."""
        return self._batches[-1].rows

    def note_rows(self, rows: list[int] | None) -> None:
        """Keep the sample indices of the current batch."""
        if self._batches:
            self._batches[-1].rows = rows

    # The loader.

    def begin_epoch(self) -> None:
        """Begin a fit or an epoch, which may use a new data fetcher."""
        self._begin()
        fetcher = self._trainer.fit_loop._data_fetcher
        if fetcher is self._fetcher:
            return
        self.detach()
        kind: Any = type(fetcher)
        # With this fetcher, training_step(dataloader_iter) reads the loader itself, so no batch can be kept.
        if all(each.__name__ != "_DataLoaderIterDataFetcher" for each in kind.__mro__):
            body = {
                "__module__": kind.__module__,
                "__next__": lambda fetcher: self._next(partial(kind.__next__, fetcher)),
            }
            fetcher.__class__ = type(kind.__name__, (kind,), body)  # next() looks up __next__ in the class
            self._fetcher = fetcher

    def detach(self) -> None:
        """Restore the original class of the fetcher. Idempotent."""
        fetcher, self._fetcher = self._fetcher, None
        if fetcher is not None:
            fetcher.__class__ = type(fetcher).__mro__[1]

    def _next(self, read: Callable[[], Any]) -> Any:
        """Return the next batch to repeat, or else the next batch of the loader."""
        if self._waiting:
            batch = self._waiting.popleft()
            batch.random.restore()
            batch.counts = self._counts()
            self._fetcher.done = self._was_done and not self._waiting
            self._batches.append(batch)
            self.is_repeated = True
            first, *numbers = batch.item
            return (self._copy(first), *numbers)
        item = read()
        self.is_repeated = False
        try:
            self._batches.append(self._keep(item))
        except Exception as error:  # noqa: BLE001 - a batch may be anything
            why = f"a batch could not be kept: {describe_error(error)}"
            self._batches.append(_Batch(None, RandomStates(self._devices), self._counts(), why))
        return item

    def _keep(self, item: Any) -> _Batch:
        # Read the random states before the copy, because the user's code may draw random numbers while the batch is
        # copied.
        random, counts = RandomStates(self._devices), self._counts()
        batch, *numbers = item
        batch = self._copy(batch)
        with pause_recording(), without_functions():
            return _Batch((batch, *numbers), random, counts, "", batch_versions(batch), sample_fingerprints(batch))

    def _copy(self, batch: Any) -> Any:
        """Return a copy of a batch, as deep as needed: a step must not change the kept batch."""
        if not self._must_copy:
            return batch if isinstance(batch, _REBUILT) else copy.copy(batch)  # a step may replace its attributes
        with pause_recording():
            return own_copies({"batch": batch})["batch"]

    def forget(self, number: int) -> None:
        """Drop the batches before this number in the epoch."""
        del self._batches[: number - self._first]
        self._first = max(self._first, number)

    # The counts of Lightning.

    def _counters(self) -> list[dict[str, int]]:
        loop: Any = self._trainer.fit_loop.epoch_loop
        optimizer = loop.automatic_optimization.optim_progress.optimizer
        progresses = loop.batch_progress, optimizer.step, optimizer.zero_grad
        return [vars(each) for progress in progresses for each in (progress.total, progress.current)]

    def _counts(self) -> list[int]:
        return [count for each in self._counters() for count in each.values()]

    def _counts_after(self) -> list[int]:
        """Return the counts after the current batch. Lightning completes them after the hook ``on_train_batch_end``."""
        return [
            count + (place < 2 and name == "completed")
            for place, each in enumerate(self._counters())
            for name, count in each.items()
        ]

    def _add_counts(self, added: list[int]) -> None:
        counts = iter(added)
        for each in self._counters():
            for name in each:
                each[name] += next(counts)

    # The course of an epoch.

    def end_batch(self) -> None:
        """Keep how much a batch increased the counts. After the last repeated batch, count the skipped batches."""
        if not self._batches:
            return
        batch = self._batches[-1]
        batch.made = _difference(self._counts_after(), batch.counts)
        if not self._must_copy and not batch.why_not:
            with without_functions():
                self._must_copy = are_written(batch.versions)
        if self._left_out is not None and not self._waiting:
            self._add_counts(self._left_out)
            self._left_out = None
            if self._after is not None:
                self._after.restore()

    def leave_out(self, count: int) -> None:
        """Exclude the latest batches, including the current one, from repetition."""
        for each in self._batches[-count:]:
            each.is_left_out = True

    def _since(self, number: int) -> list[_Batch]:
        return [each for each in self._batches[number - self._first :] if not each.is_left_out]

    def has_since(self, number: int) -> bool:
        """Return True if the batch with this number, or a later one, can be repeated."""
        return bool(self._since(number))

    def why_not(self, number: int) -> str:
        """Return the reason why the batches from this number on cannot be repeated, or an empty string if they can."""
        if self._trainer.should_stop:
            return "the fit is about to end"
        try:
            with pause_recording(), without_functions():
                return next(filter(None, (each.reason() for each in self._since(number))), "")
        except Exception as error:  # noqa: BLE001 - a batch may be anything
            return f"a batch could not be read: {describe_error(error)}"

    def go_back(self, number: int) -> None:
        """Repeat the batches from this number on, after the end of the current batch."""
        again = self._since(number)
        before = self._batches[number - self._first].counts
        reached = _sum([self._counts_after(), self._left_out or [], *(each.made for each in self._waiting)])
        loop: Any = self._trainer.fit_loop.epoch_loop
        if self._left_out is None:
            self._was_done, self._after = self._fetcher.done, RandomStates(self._devices)
        self._waiting.extendleft(reversed(again))
        self._left_out = _difference(reached, _sum([before, *(each.made for each in self._waiting)]))
        self._add_counts(_difference(before, self._counts_after()))
        self._fetcher.done = loop.batch_progress.is_last_batch = False
        loop._skip_next_val = True  # a validation that is due at these counts has already run
        if loop._should_accumulate():  # the skipped step still counts on the x-axis
            loop._batches_that_stepped += 1
        del self._batches[number - self._first :]

    def add_to_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Count the batches that are still to be repeated as done in a checkpoint, because it does not contain them.

        A loader that saves its state has already yielded them, so a resumed fit continues after them.
        """
        if self._left_out is None:
            return
        state = checkpoint["loops"]["fit_loop"]
        batches = state["epoch_loop.batch_progress"]
        steps = state["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
        counts = iter(_sum([self._left_out, *(each.made for each in self._waiting)]))
        names = [list(each) for each in self._counters()]
        saved = [each[part] for each in (batches, steps["step"], steps["zero_grad"]) for part in ("total", "current")]
        before = saved[2]["completed"]
        for table, keys in zip(saved, names, strict=True):
            for key in keys:
                table[key] += next(counts)
        batches["is_last_batch"] = self._was_done
        checkpoint["global_step"] += saved[2]["completed"] - before


def _sum(counts: list[list[int]]) -> list[int]:
    return [sum(each) for each in zip(*filter(None, counts), strict=True)]


def _difference(one: list[int], other: list[int]) -> list[int]:
    return [first - second for first, second in zip(one, other, strict=True)]
