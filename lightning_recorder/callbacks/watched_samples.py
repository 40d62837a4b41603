"""Watch the samples of a fit: how often each one occurs in an epoch, on several ranks and in validation."""

from __future__ import annotations

import json
import operator
import pickle
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, WeightedRandomSampler, default_collate

from lightning_recorder.callbacks.lightning import LightningModule, Trainer, is_overridden
from lightning_recorder.disk import attempt
from lightning_recorder.errors import describe_error, warn
from lightning_recorder.insight.data_facts import (
    DataFacts,
    DrawFacts,
    EpochFacts,
    EpochOfRanks,
    LoaderFacts,
    RankFacts,
    ValidationFacts,
)
from lightning_recorder.internals.autograd import versions_of, without_functions
from lightning_recorder.internals.loaders import (
    WATCHED,
    base_rows,
    current_batch,
    forget_indices,
    index_numbers,
    inner_loader,
    is_at_end,
    keep_indices,
    kept_batch,
    kept_of,
    rows_of_base,
)
from lightning_recorder.internals.pause_recording import pause_recording
from lightning_recorder.internals.worker_draws import draws_of
from lightning_recorder.statistics import Exchange, PendingMerge
from lightning_recorder.statistics.fingerprint import (
    different_values,
    sample_fingerprints,
    sample_numbers,
    values_of_each,
)
from lightning_recorder.statistics.snapshot import NOTHING
from lightning_recorder.structure import ignore_unknown, iter_tensors
from lightning_recorder.temporary import write_bytes
from lightning_recorder.watch.epoch_samples import (
    BatchSamples,
    EpochSamples,
    RankEpoch,
    RankSamples,
    Sketch,
    StepSamples,
    compare_epochs,
    compare_ranks,
    compare_validation,
)

__all__ = ["DATA_FILE", "WatchedSamples"]

DATA_FILE = "data.json"
_FIRST_BATCHES = 64  # these are always examined, in about 20 ms; later batches only within _SHARE of the time
_SHARE = 0.001
_MOST_EPOCHS = 8  # the facts have at most this many first epochs, and this many last epochs
_MOST_VALIDATION = 8192  # the maximum number of samples of each validation loader
_MOST_LOADERS = 8  # the maximum number of validation loaders
_FIRST_LOOK, _GROWTH = 16, 4  # the facts are published after 16, 64, 256, … batches
_FIRST_COMPARED, _GROWTH_OF_RANKS = 8, 8
_COMPARED_STEPS = 16
_CHECKED = 64  # the number of batches that are checked for changes after their step
_WIDE = 4  # a tensor with at least this many values per sample is an input
_COMPARED, _MOST_COMPARED = 8, 4096  # the numbers of batches, and of values per sample, compared with the target
_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_NAMES_OF_CLASSES = ("label", "labels", "y", "target", "targets")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@dataclass
class _Arriving:
    """The fingerprints of a batch during their copy from the device."""

    host: Tensor
    event: Any
    add: Callable[[np.ndarray[Any, Any]], object]


@dataclass
class _Validation:
    """The samples of one validation loader."""

    sketch: Sketch = field(default_factory=Sketch)
    samples: int = 0
    rows: tuple[int, int] | None = None  # the number of rows shared with training, and the number of all rows

    def add(self, numbers: np.ndarray[Any, Any]) -> None:
        contents = np.ascontiguousarray(numbers[0])
        self.sketch.add(contents)
        self.samples += len(contents)


class WatchedSamples:
    """Watches the samples of one fit.

    Args:
        trainer: The trainer.
        directory: The folder of ``data.json``; None to write none.
        publish: A function that receives the facts.
        exchange: Sends facts to the first rank; None with a single rank.
        strict: Raise errors instead of warning about them.
        number: The index of the loader if Lightning combines several. The object of the first loader creates the
            others.
    """

    def __init__(
        self,
        trainer: Trainer,
        directory: Path | None,
        publish: Callable[[DataFacts], object],
        exchange: Exchange | None,
        *,
        strict: bool = False,
        number: int = 0,
    ) -> None:
        self._trainer, self._directory, self._publish, self._exchange = trainer, directory, publish, exchange
        self._strict, self._number = strict, number
        self._others: list[WatchedSamples] = []  # the objects for the other loaders
        self._is_alone: bool | None = None  # True if the epoch has one loader
        self._next: tuple[object, int] | None = None  # the object with the kept indices, and the number of the batch
        self._loaders: list[object] = []
        self._epoch: EpochSamples | None = None
        self._before: EpochSamples | None = None
        self._epochs: list[EpochFacts] = []
        self._loader: LoaderFacts | None = None
        self._values = 0  # the number of values per sample in a fingerprint
        self._copies: np.ndarray[Any, Any] | None = None  # 1 for each input value that has always equaled the target
        self._compared = 0  # the number of compared samples
        self._batches = self._ended = 0
        self.has_end = True
        """False if there is nothing to do at the end of the current batch."""
        self._has_failed = self._is_over = False
        self._spent_s, self._began_s = 0.0, time.perf_counter()
        self._next_look = _FIRST_LOOK
        self._arriving: deque[_Arriving] = deque()
        self._validation: dict[int, _Validation] = {}  # by the index of the loader
        self._is_validated = False
        self._recent: deque[tuple[int, StepSamples]] = deque(maxlen=_COMPARED_STEPS)
        self._next_compared = _FIRST_COMPARED
        self._pending: PendingMerge | None = None
        self._ranks: RankFacts | None = None
        self._pending_epoch: PendingMerge | None = None
        self._rank_epoch: EpochOfRanks | None = None
        self._ended_epochs = 0
        self._seen, self._passed = Sketch(), 0  # of all epochs: the samples and the number; -1 if one is incomplete
        self._checked = 0
        self._before_step: tuple[np.ndarray[Any, Any], int] | None = None
        self._draws: DrawFacts | None = None
        self._drawn: dict[str, tuple[int, ...]] = {}  # by source, the random states of the workers in the last epoch
        self._noted: object = None  # the object that recorded the random states of the latest epoch
        self._written = b""
        if not number:
            self._wrap(trainer.strategy)
            publish(DataFacts())

    # The loaders.

    def _wrap(self, strategy: Any) -> None:
        """Make the loaders of the fit keep the indices of their batches, once Lightning passes them to the strategy."""
        process = strategy.process_dataloader

        def processed(loader: object) -> object:
            found: object = process(loader)
            with suppress(Exception):  # a user's loader may raise anything; it then stays unchanged
                if keep_indices(found):
                    self._loaders.append(found)
            return found

        self._had_own = "process_dataloader" in vars(strategy)
        self._process, self._processed = process, processed
        strategy.process_dataloader = processed

    def _unwrap(self) -> None:
        strategy: Any = self._trainer.strategy
        if vars(strategy).get("process_dataloader") is self._processed:
            if self._had_own:
                strategy.process_dataloader = self._process
            else:
                del strategy.process_dataloader
        loaders, self._loaders = self._loaders, []
        for each in loaders:
            forget_indices(each)

    @property
    def _combined(self) -> Any:
        """The combined loader of Lightning; None if there is only one loader."""
        fetcher: Any = getattr(getattr(self._trainer, "fit_loop", None), "_data_fetcher", None)
        combined = getattr(fetcher, "_combined_loader", None)
        return combined if len(getattr(combined, "flattened", ())) > 1 else None

    @property
    def _train_loader(self) -> Any:
        combined = self._combined
        return self._trainer.train_dataloader if combined is None else combined.flattened[self._number]

    def _current(self, batch_idx: int) -> tuple[int | None, Any]:
        """Return the number of the current batch in its loader, and its sample indices; None for unknown values."""
        own = getattr(self._trainer, "loader_iterator", None)  # the iterator of a plain loop
        if own is not None:
            return current_batch(own, 0)
        try:
            fetcher: Any = self._trainer.fit_loop._data_fetcher
            iterators = fetcher.combined_loader._iterator.iterators
            iterator = iterators[self._number]
        except (AttributeError, IndexError, TypeError):  # another version of Lightning
            return None, None
        if len(iterators) == 1:
            return current_batch(iterator, len(getattr(fetcher, "batches", ())))
        # Batches are counted here, because a shorter loader may start again, or the other loaders are read once more.
        if batch_idx == 0:
            self._next = kept_of(iterator), 0
        if self._next is None:  # the fit was resumed within an epoch
            return None, None
        kept, number = self._next
        if is_at_end(kept, number):
            kept, number = kept_of(iterator), 0
        self._next = kept, number + 1
        return number, kept_batch(kept, number)

    def _loader_facts(self) -> LoaderFacts:
        loader = self._train_loader
        is_overfit = bool(self._trainer.overfit_batches)  # type: ignore[attr-defined]  # set by a connector
        if not isinstance(loader, DataLoader):
            inner = inner_loader(loader)
            workers = 0 if inner is None else inner.num_workers
            is_stream = inner is not None and isinstance(inner.dataset, IterableDataset)
            name = "" if loader is None else type(loader).__name__  # no loader: a loop that calls monitor.step
            return LoaderFacts(name, is_iterable=is_stream, workers=workers, is_overfit=is_overfit)
        batches: Any = loader.batch_sampler
        is_iterable = isinstance(loader.dataset, IterableDataset)
        sampler = loader.sampler if batches is None or type(batches) is BatchSampler else batches
        samples = None
        if not is_iterable:
            with suppress(TypeError, NotImplementedError):  # with a custom sampler, the data set may have no length
                samples = len(loader.dataset)  # type: ignore[arg-type]  # raises TypeError, which is caught
        return LoaderFacts(
            sampler="" if is_iterable else type(sampler).__name__,
            dataset=type(loader.dataset).__name__,
            is_loader=True,
            is_iterable=is_iterable,
            workers=loader.num_workers,
            samples=samples,
            is_overfit=is_overfit,
            weights=len(loader.sampler.weights) if type(loader.sampler) is WeightedRandomSampler else None,
            is_divided=hasattr(loader.sampler, "num_replicas") or hasattr(batches, "num_replicas"),
            is_limited=getattr(self._trainer, "limit_train_batches", 1.0) != 1.0
            or self._trainer.world_size > 1
            or self._combined is not None,
        )

    def name_row(self, pl_module: LightningModule, rows: list[int] | None, place: int) -> str:
        """Return the name of the sample at ``place`` in a batch: its row in the training set, if this is known."""
        if rows is None or place >= len(rows):
            return f"sample {place} of the batch"
        loader: Any = self._trainer.train_dataloader
        below = rows_of_base(loader.dataset, [rows[place]])
        name = f"row {rows[place]:,} of the training set"
        name += f" (row {below[0]:,} of the data set below its Subset)" if below else ""
        # The user's code may reorder the samples of a batch. The row is then only probable.
        is_usual = loader.collate_fn is default_collate and not any(
            hasattr(type(pl_module), each) and is_overridden(each, pl_module) for each in _TRANSFERS
        )
        return name if is_usual else f"sample {place} of the batch ({name} unless the batch is made in another order)"

    # Batches.

    def _start_parts(self, batch: Any, batch_idx: int, step: int) -> None:
        """Examine the parts of a batch from several loaders, each part with the object for its loader."""
        combined = self._combined
        parts: list[Any] = []
        with suppress(Exception):  # the user's code may have changed the structure
            parts = combined._spec.flatten_up_to(batch)
        while len(self._others) + 1 < len(parts):
            number = len(self._others) + 1
            other = WatchedSamples(
                self._trainer, None, lambda facts: None, self._exchange, strict=self._strict, number=number
            )
            self._others.append(other)
        for watched, part in zip((self, *self._others), parts, strict=False):
            if part is not None:  # None comes from a loader that has ended
                watched._values = self._values or watched._values  # otherwise validation could not be compared
                watched._checked = _CHECKED
                watched.start_batch(part, batch_idx, step, is_part=True)

    def start_batch(self, batch: Any, batch_idx: int, step: int, *, is_part: bool = False) -> list[int] | None:
        """Examine a training batch. With ``is_part``, the batch is the part that one of several loaders yielded.

        Returns:
            The sample indices of the batch, if they are known and there is only one loader.
        """
        # This runs for every batch, so the usual case makes few further calls.
        if not is_part:
            if batch_idx == 0 or self._is_alone is None:
                self._is_alone = self._combined is None
            if not self._is_alone:
                self._start_parts(batch, batch_idx, step)
                self.has_end = True
                return None
        began_s = time.perf_counter()
        rows: list[int] | None = None
        try:
            number, found = self._current(batch_idx)
            try:
                rows = None if found is None else list(map(operator.index, found))
            except TypeError:
                rows = None
            self._before_step = None
            is_known = self._epoch is not None and self._epoch.epoch == self._trainer.current_epoch
            if not self._has_failed and not (self._is_over and is_known):
                with without_functions():  # a function mode would be called for each property of a tensor
                    hashes = index_numbers(found) if rows is None else None
                    self._examine(batch, batch_idx, step, rows, hashes, number)
        except Exception as error:  # noqa: BLE001 - a batch may be anything
            self._fail(error)
        self.has_end = self._exchange is not None or self._before_step is not None
        self._spent_s += time.perf_counter() - began_s
        return rows

    def _fail(self, error: Exception) -> None:
        self._has_failed = True
        self._arriving.clear()
        if self._strict:
            raise error
        warn(f"StepWatch no longer counts the samples of batches: {describe_error(error)}")

    def _examine(
        self, batch: Any, batch_idx: int, step: int, rows: list[int] | None, hashes: Any, number: int | None
    ) -> None:
        epoch = self._epoch
        if epoch is None or epoch.epoch != self._trainer.current_epoch:
            epoch = self._begin_epoch(is_whole=batch_idx == 0)
        if self._is_over:
            return
        self._batches += 1
        if self._batches > _FIRST_BATCHES and not self._is_cheap():
            self._is_over, epoch.is_whole = True, False
            self._arriving.clear()
            return
        known = hashes if rows is None else np.array(rows, dtype=np.int64)
        if known is None and self._loader is not None and self._loader.has_rows:
            epoch.is_whole = False  # identities from indices and identities from values cannot be compared
            return
        if known is not None and self._loader is not None and not self._loader.has_rows:
            self._loader = replace(self._loader, has_rows=True)
        workers = 0 if self._loader is None or not self._loader.is_iterable else self._loader.workers
        worker = number % workers if workers > 1 and number is not None else None
        if self._batches == 1:
            self._transfer(different_values(batch), self._add_values)
        if self._batches <= _COMPARED:
            self._transfer(_copies_of_target(batch), self._add_copies)
        numbers = self._numbers(batch)
        add = partial(self._add, epoch, step, known, rows is None, worker)
        if numbers is None and known is not None:  # only the indices are known
            add(np.zeros((2, 0), dtype=np.int64))
        self._transfer(numbers, add)
        if numbers is not None and numbers.is_cpu and self._checked < _CHECKED:
            self._look_ahead(epoch, batch, numbers.numpy())
        if self._batches >= self._next_look:
            self._next_look = self._batches * _GROWTH
            self._show()

    def _is_cheap(self) -> bool:
        return self._spent_s <= _SHARE * (time.perf_counter() - self._began_s)

    def _begin_epoch(self, *, is_whole: bool) -> EpochSamples:
        if self._loader is None:
            self._loader = self._loader_facts()
        if self._epoch is not None:
            self._close_epoch(ended=False)
        self._is_over = self._batches >= _FIRST_BATCHES and not self._is_cheap()
        workers = self._loader.workers if self._loader.is_iterable else 0
        self._epoch = EpochSamples(self._trainer.current_epoch, workers)
        self._epoch.is_whole = is_whole and not self._is_over
        return self._epoch

    def _look_ahead(self, epoch: EpochSamples, batch: Any, numbers: np.ndarray[Any, Any]) -> None:
        """Keep the contents of a batch before its step, and check whether the next batch has already overwritten it."""
        epoch.checked += 1
        self._checked += 1
        versions = _versions(batch)
        if versions is not None:
            self._before_step = numbers[0], versions
        fetcher = getattr(getattr(self._trainer, "fit_loop", None), "_data_fetcher", None)
        ahead = getattr(fetcher, "batches", ()) if versions is not None else ()
        if ahead and epoch.has_changed and _places(batch) and _places(batch) == _places(ahead[0]):
            epoch.overwritten += 1
            self._before_step = None

    def _look_again(self, batch: Any) -> None:
        """Check whether a batch changed during its step without an in-place write by torch, which counts versions."""
        before, self._before_step = self._before_step, None
        epoch = self._epoch
        if before is None or epoch is None or self._has_failed:
            return
        found = sample_fingerprints(batch, self._values)
        is_changed = found is not None and not np.array_equal(found.cpu().numpy(), before[0])
        epoch.overwritten += is_changed and _versions(batch) == before[1]

    def _transfer(self, numbers: Tensor | None, add: Callable[[np.ndarray[Any, Any]], object]) -> None:
        """Pass numbers of a batch to ``add`` once they have arrived on the host, in the order of the batches."""
        with pause_recording():
            if numbers is None:
                return
            if numbers.device.type not in ("cuda", "xpu"):
                add(numbers.numpy() if numbers.is_cpu else numbers.cpu().numpy())
                return
            host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True, device="cpu")
            host.copy_(numbers, non_blocking=True)
            event: Any = torch.get_device_module(numbers.device).Event()
            event.record()
            self._arriving.append(_Arriving(host, event, add))
        self._arrive()

    def _arrive(self, *, wait: bool = False) -> None:
        while self._arriving:
            first = self._arriving[0]
            if wait:
                first.event.synchronize()
            elif not first.event.query():
                return
            self._arriving.popleft()
            first.add(first.host.numpy())

    def _numbers(self, batch: Any) -> Tensor | None:
        """Return the fingerprints of the samples and of their inputs, and the classes if any, ``[2 or 3, samples]``."""
        if not self._values:
            first = sample_fingerprints(batch)
            self._values = 0 if first is None else values_of_each(len(first))
        found = sample_numbers(batch, self._values) if self._values else None
        if found is None:
            return None
        classes = _numbers_of(_classes(batch), found.shape[1])
        return found if classes is None else torch.cat([found, classes.to(found.device).unsqueeze(0)])

    def _add_values(self, numbers: np.ndarray[Any, Any]) -> None:
        if self._loader is not None and len(numbers):
            self._loader = replace(self._loader, values=int(numbers.min()))

    def _add_copies(self, copies: np.ndarray[Any, Any]) -> None:
        """Add a result of :func:`_copies_of_target`."""
        number, found = int(copies[0]), copies[1:]
        if self._loader is None or not number:
            return
        before = found if self._copies is None else self._copies
        # Sequences of different lengths have no common positions, so no value counts as a copy.
        self._copies = found * before if len(found) == len(before) else np.zeros_like(found)
        self._compared += number
        place = int(self._copies.argmax()) if self._copies.any() else -1
        self._loader = replace(self._loader, target_place=place, compared=self._compared)

    def _add(
        self,
        epoch: EpochSamples,
        step: int,
        known: Any,
        are_hashes: bool,
        worker: int | None,
        numbers: np.ndarray[Any, Any],
    ) -> None:
        contents = np.ascontiguousarray(numbers[0])
        known = known if known is not None and len(contents) in (0, len(known)) else None
        rows, hashes = (None, known) if are_hashes else (known, None)
        found = BatchSamples(contents, rows, hashes, worker, numbers[2] if len(numbers) > 2 else None, numbers[1])
        epoch.add(found, step)
        if self._exchange is not None:
            self._recent.append((step, StepSamples.of(found, found.keys)))

    def add_validation(self, batch: Any, batch_idx: int, loader: int) -> bool:
        """Examine a validation batch. Return False if no more batches are needed."""
        if self._is_validated or self._has_failed:
            return False
        if batch_idx == 0 and loader < _MOST_LOADERS:
            known = self._validation.get(loader)
            self._validation[loader] = _Validation(rows=None if known is None else known.rows)
        validation = self._validation.get(loader)
        if validation is None or validation.samples >= _MOST_VALIDATION:
            return True
        try:
            self._transfer(self._numbers(batch), validation.add)
        except Exception as error:  # noqa: BLE001 - a batch may be anything
            self._fail(error)
        return True

    def end_validation(self) -> None:
        """End a validation. Not called for a sanity check."""
        self._is_validated = any(each.samples for each in self._validation.values())

    # Ranks.

    def end_batch(self, batch: Any) -> None:
        """End a training batch, and sometimes compare the samples of the ranks. Called equally often on every rank."""
        if self._before_step is not None:
            try:
                with without_functions():
                    self._look_again(batch)
            except Exception as error:  # noqa: BLE001 - a batch may be anything
                self._fail(error)
        for other in self._others:
            other.end_batch(batch)
        self._ended += 1
        if self._exchange is None or self._ended < self._next_compared:
            return
        self._next_compared *= _GROWTH_OF_RANKS
        steps = dict(self._recent)  # with gradient accumulation, the last batch of each step
        own = RankSamples.of(self._rank(), steps)
        self._take_ranks()
        self._pending = self._exchange.submit(NOTHING, scope=f"samples {self._number}", value=own)

    def _rank(self) -> int:
        """Return the index of this rank among the ranks that should have different samples."""
        return int(self._trainer.distributed_sampler_kwargs["rank"]) if self._trainer.distributed_sampler_kwargs else 0

    def _compare_epoch(self, epoch: EpochSamples | None) -> None:
        """Compare the samples of an epoch across ranks, after epochs 0, 1, 2, 4, 8, …. Must be called on every rank."""
        number, self._ended_epochs = self._ended_epochs, self._ended_epochs + 1
        if self._exchange is None or number & (number - 1):
            return
        own = None if epoch is None or self._has_failed or not epoch.is_whole else RankEpoch.of(self._rank(), epoch)
        self._take_epoch(wait=True)
        self._pending_epoch = self._exchange.submit(NOTHING, scope=f"samples of an epoch {self._number}", value=own)

    def _take_epoch(self, *, wait: bool = False) -> None:
        pending = self._pending_epoch
        if pending is None or not (wait or pending.is_done):
            return
        self._pending_epoch = None
        values = [pickle.loads(each) for each in pending.result().values]
        found = compare_epochs([each for each in values if each is not None]) if None not in values else None
        if found is not None and (self._rank_epoch is None or found.shared > self._rank_epoch.shared):
            self._rank_epoch = found

    def _take_ranks(self, *, wait: bool = False) -> None:
        self._take_epoch(wait=wait)
        pending = self._pending
        if pending is not None and (wait or pending.is_done):
            self._pending = None
            found = compare_ranks([pickle.loads(each) for each in pending.result().values])
            self._ranks = found or self._ranks

    # Facts.

    def end_epoch(self) -> None:
        """End an epoch. Must be called equally often on every rank."""
        for watched in (*self._others, self):
            epoch = watched._epoch
            watched._close_epoch(ended=True)
            watched._compare_epoch(epoch)

    def _close_epoch(self, *, ended: bool) -> None:
        epoch, self._epoch = self._epoch, None
        if epoch is None or self._has_failed:
            return
        self._arrive(wait=True)
        epoch.is_whole &= ended and not self._trainer.should_stop
        self._look_for_draws(epoch)
        if epoch.batches:
            facts = epoch.facts(self._before)
            self._epochs.append(replace(facts, **self._union(epoch)))
            if self._before is None or not self._is_over:  # an incomplete epoch shares fewer samples with validation
                self._before = epoch
        if len(self._epochs) > 2 * _MOST_EPOCHS:
            del self._epochs[_MOST_EPOCHS]
        if epoch.epoch < _MOST_EPOCHS or not epoch.epoch & (epoch.epoch - 1):
            self._show()

    def _union(self, epoch: EpochSamples) -> dict[str, Any]:
        """Return the number of different samples in all epochs and the number of epochs; empty if one is incomplete."""
        is_next = self._passed >= 0 and epoch.is_whole
        self._passed = self._passed + 1 if is_next and self._loader is not None and self._loader.has_rows else -1
        if self._passed < 0:
            return {}
        limit, keys = epoch.keys.limit, np.array(list(epoch.keys.counts), dtype=np.uint64)
        self._seen.limit = min(self._seen.limit, limit)
        self._seen.add(keys.view(np.int64))
        for key in [key for key in self._seen.counts if key >= self._seen.limit]:
            del self._seen.counts[key]
        return {"seen": self._seen.distinct, "passed": self._passed}

    def _look_for_draws(self, epoch: EpochSamples) -> None:
        """Compare the random numbers of the workers with each other and with the previous epoch."""
        watched = vars(self._train_loader).get(WATCHED) if self._loader_has_workers() else None
        if watched is None or watched is self._noted:  # persistent workers continue their random sequence
            return
        self._noted, before = watched, self._drawn
        found = draws_of(watched)
        self._drawn = {each.source: each.first for each in found}
        for each in found:
            epochs = 2 if before.get(each.source) == each.first else 1
            if self._draws is None and (each.workers > 1 or epochs > 1):
                self._draws = DrawFacts(each.source, each.workers, epochs, epoch.last_step)
            elif self._draws is not None and self._draws.source == each.source and epochs > 1:
                self._draws = replace(self._draws, epochs=self._draws.epochs + 1, step=epoch.last_step)

    def _loader_has_workers(self) -> bool:
        return self._loader is not None and self._loader.is_loader and self._loader.workers > 0

    def end(self) -> None:
        """End the fit: publish the facts, and restore the original loaders."""
        self._unwrap()
        for other in self._others:
            other._close_epoch(ended=False)
        if not self._has_failed:
            self._close_epoch(ended=False)
            self._show(wait=True)

    def _show(self, *, wait: bool = False) -> None:
        for each in (self, *self._others):
            each._take_ranks(wait=wait)
        facts = self._facts()
        self._publish(facts)
        data = (json.dumps(asdict(facts), indent=1) + "\n").encode()
        if self._directory is not None and facts.epochs and data != self._written:
            path = self._directory / DATA_FILE
            attempt(path, len(data), partial(write_bytes, path, data))
            self._written = data

    def _facts(self) -> DataFacts:
        if not getattr(self._trainer, "knows_epochs", True):  # a plain loop, where a repeat may be the next epoch
            return DataFacts()
        epochs = list(self._epochs)
        if self._epoch is not None and self._epoch.batches:
            epochs.append(self._epoch.facts(self._before))
        loader = self._loader or LoaderFacts()
        validation = self._validation_facts()
        others = tuple(other._facts_beside(self) for other in self._others)
        return DataFacts(loader, tuple(epochs), validation, self._ranks, self._draws, self._rank_epoch, others)

    def _facts_beside(self, first: WatchedSamples) -> DataFacts:
        # Each loader has its own training samples, and therefore shares other rows with validation.
        self._validation = {number: replace(each, rows=None) for number, each in first._validation.items()}
        self._is_validated = first._is_validated
        return self._facts()

    def _validation_facts(self) -> ValidationFacts | None:
        """Return the facts about the validation loader that shares the most samples with training."""
        epochs = [each for each in (self._before, self._epoch) if each is not None and each.batches]
        if not self._is_validated or not epochs:
            return None
        loaders: Any = self._trainer.val_dataloaders
        loaders = list(loaders.values()) if isinstance(loaders, dict) else loaders
        loaders = loaders if isinstance(loaders, (list, tuple)) else [loaders]
        found = []
        for number, each in self._validation.items():
            if each.samples:
                facts = self._facts_of_validation(each, epochs, loaders[number] if number < len(loaders) else None)
                found.append(replace(facts, loader=number + 1 if len(loaders) > 1 else None))
        if not found:
            return None
        # If there is another validation loader, a loader with only training samples is intended: it measures the fit to
        # them.
        if any(each.overlap == 0 for each in found):
            found = [replace(each, is_same_data=each.is_same_data or each.overlap == 1) for each in found]
        return max(found, key=lambda each: (not each.is_same_data and each.overlap > 0, each.overlap))

    def _facts_of_validation(
        self, validation: _Validation, epochs: list[EpochSamples], loader: object
    ) -> ValidationFacts:
        sketch = validation.sketch
        found = [compare_validation(sketch, validation.samples, each.contents, each.last_step) for each in epochs]
        most = max(found, key=lambda each: each.common)
        is_same = any(sketch.is_same_set(each.contents) for each in epochs)
        own = getattr(self._train_loader, "dataset", None)
        is_same |= own is not None and getattr(loader, "dataset", None) is own
        if validation.rows is None:
            validation.rows = _common_rows(self._train_loader, loader)
        return replace(most, is_same_data=is_same, common_rows=validation.rows[0], rows=validation.rows[1])


def _common_rows(training: object, validation: object) -> tuple[int, int]:
    """Return the number of rows of one data set that two loaders share, and the number of validation rows.

    Both are 0 if the loaders do not use the same data set.
    """
    one, other = base_rows(training), base_rows(validation)
    if one is None or other is None or one[0] is not other[0]:
        return 0, 0
    rows = set(other[1])
    return len(rows.intersection(one[1])), len(rows)


def _classes(batch: Any) -> Any:
    """Return the second item of a pair, or else the entry with one of the usual names for classes."""
    if isinstance(batch, (list, tuple)):
        return batch[1] if len(batch) == 2 else None
    found = dict(iter_tensors(batch, "", unknown=ignore_unknown))
    return next((found[f".{name}"] for name in _NAMES_OF_CLASSES if f".{name}" in found), None)


@torch.no_grad()
def _copies_of_target(batch: Any) -> Tensor | None:
    """Return a tensor with the number of samples, and a flag for each input value: 1 if it always equals the target.

    The target has one number for each sample. The inputs are the first floating-point tensor with several values for
    each sample. The number of samples is 0 if all samples have the same target. None if the batch has no such tensors.
    """
    with pause_recording(), without_functions():
        target = _classes(batch)
        if type(target) is not Tensor or not target.dim() or target.numel() != len(target) or target.is_complex():
            return None
        column = target.detach().reshape(-1, 1)
        for _, each in iter_tensors(batch, unknown=ignore_unknown):
            if type(each) is not Tensor or each.dim() < 2 or not each.is_floating_point() or each is target:
                continue
            if len(each) == len(target) < each.numel() and each.device == target.device:
                rows = each.detach().flatten(1)[:, :_MOST_COMPARED]
                found = (rows == column.to(rows.dtype)).all(0)
                number = (column != column[0]).any() * len(target)
                return torch.cat([number.reshape(1), found]).to(torch.int64)
        return None


def _numbers_of(classes: Any, samples: int) -> Tensor | None:
    """Return the class index of each sample. Classes may be integers, 0.0 and 1.0, or one-hot; others become -1."""
    if type(classes) is not Tensor or classes.shape[:1] != (samples,):
        return None
    classes = classes.detach()
    if classes.dtype in _INTEGERS:
        return classes.to(torch.int64) if classes.dim() == 1 else None
    if not classes.is_floating_point() or classes.dim() > 2 or not classes.numel():
        return None
    rows = classes.reshape(samples, -1)
    ones = rows == 1
    are_classes = (ones | (rows == 0)).all(1)
    if rows.shape[1] == 1:
        numbers = ones[:, 0].to(torch.int64)
    else:
        are_classes &= ones.sum(1) == 1
        numbers = ones.to(torch.uint8).argmax(1)
    return torch.where(are_classes, numbers, -1)


def _versions(batch: Any) -> int | None:
    """Return the number of in-place writes of torch to the tensors of a batch; None if torch does not count them."""
    found = versions_of([each for _, each in iter_tensors(batch, unknown=ignore_unknown)])
    known = [each for each in found if each is not None]
    return sum(known) if len(known) == len(found) else None


def _places(batch: Any) -> tuple[int, ...]:
    """Return the addresses of the inputs in a batch."""
    tensors = [each for _, each in iter_tensors(batch, unknown=ignore_unknown) if type(each) is Tensor and each.dim()]
    return tuple(each.data_ptr() for each in tensors if each.is_cpu and each.numel() >= _WIDE * max(1, len(each)))
