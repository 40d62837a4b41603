"""The samples of a fit: their indices, and how often they come in an epoch, on several ranks and in validation."""

from __future__ import annotations

import json
import pickle
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, default_collate

from lightning_recorder.callbacks.lightning import LightningModule, Trainer, is_overridden
from lightning_recorder.disk import attempt
from lightning_recorder.errors import describe_error, warn
from lightning_recorder.insight.data_facts import (
    DataFacts,
    DrawFacts,
    EpochFacts,
    LoaderFacts,
    RankFacts,
    ValidationFacts,
)
from lightning_recorder.internals.loaders import (
    WATCHED,
    batch_number,
    forget_indices,
    indices_of,
    keep_indices,
    rows_of_base,
)
from lightning_recorder.internals.pause_recording import pause_recording
from lightning_recorder.internals.worker_draws import draws_of
from lightning_recorder.statistics import Exchange, PendingMerge
from lightning_recorder.statistics.fingerprint import sample_fingerprints, values_of_each
from lightning_recorder.statistics.snapshot import NOTHING
from lightning_recorder.temporary import write_whole
from lightning_recorder.watch.epoch_samples import (
    BatchSamples,
    EpochSamples,
    RankSamples,
    Sketch,
    compare_ranks,
    compare_validation,
)

__all__ = ["DATA_FILE", "WatchedSamples"]

DATA_FILE = "data.json"
_FIRST_BATCHES = 64  # are examined in any case, about 20 ms; later ones if it takes less than this share of the time
_SHARE = 0.001
_MOST_EPOCHS = 8  # at the start and at the end, in the facts
_MOST_VALIDATION = 8192  # samples
_FIRST_LOOK, _GROWTH = 16, 4  # batches between two looks at an epoch
_FIRST_COMPARED, _GROWTH_OF_RANKS = 8, 8
_COMPARED_STEPS = 16
_COMPARED_SAMPLES = 16  # of a step
_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@dataclass
class _Arriving:
    """The numbers of a batch on their way from the device."""

    host: Tensor
    event: Any
    add: Callable[[np.ndarray[Any, Any]], object]


class WatchedSamples:
    """Watches the samples of one fit.

    Args:
        trainer: The trainer, before its data loaders are made.
        directory: The folder for ``data.json``, if there is one.
        publish: A function that receives the facts.
        exchange: The exchange with the other ranks, if there are several.
        strict: Raise errors.
        clock: A function that returns a time in seconds.
    """

    def __init__(
        self,
        trainer: Trainer,
        directory: Path | None,
        publish: Callable[[DataFacts], object],
        exchange: Exchange | None,
        *,
        strict: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._trainer, self._directory, self._publish, self._exchange = trainer, directory, publish, exchange
        self._strict, self._clock = strict, clock
        self._loaders: list[object] = []
        self._epoch: EpochSamples | None = None
        self._before: EpochSamples | None = None
        self._epochs: list[EpochFacts] = []
        self._loader: LoaderFacts | None = None
        self._values = 0  # of a sample
        self._batches = self._ended = 0
        self._has_failed = self._is_over = False
        self._spent_s, self._began_s = 0.0, clock()
        self._next_look = _FIRST_LOOK
        self._arriving: deque[_Arriving] = deque()
        self._validation, self._validation_samples, self._is_validated = Sketch(), 0, False
        self._recent: deque[tuple[int, frozenset[int]]] = deque(maxlen=_COMPARED_STEPS)
        self._next_compared = _FIRST_COMPARED
        self._pending: PendingMerge | None = None
        self._ranks: RankFacts | None = None
        self._draws: DrawFacts | None = None
        self._drawn: dict[str, tuple[int, ...]] = {}  # the states of the epoch before, by the source
        self._noted: object = None  # what has noted the states of the latest epoch
        self._written = b""
        self._wrap(trainer.strategy)
        publish(DataFacts())

    # The loaders.

    def _wrap(self, strategy: Any) -> None:
        """Let the loaders of the fit keep their indices when Lightning passes them to the strategy."""
        process = strategy.process_dataloader

        def processed(loader: object) -> object:
            found: object = process(loader)
            with suppress(Exception):  # a loader of the user's own class may raise anything; it is then as it was
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

    def _iterator(self) -> tuple[Any, int]:
        """Return the iterator over the only loader, and the number of batches that are fetched ahead."""
        own = getattr(self._trainer, "loader_iterator", None)  # of a plain loop
        if own is not None:
            return own, 0
        try:
            fetcher: Any = self._trainer.fit_loop._data_fetcher
            (iterator,) = fetcher.combined_loader._iterator.iterators
            return iterator, len(getattr(fetcher, "batches", ()))
        except (AttributeError, TypeError, ValueError):  # another version of Lightning, or several loaders
            return None, 0

    def _loader_facts(self) -> LoaderFacts:
        loader: Any = self._trainer.train_dataloader
        is_overfit = bool(self._trainer.overfit_batches)  # type: ignore[attr-defined]  # set by a connector
        if not isinstance(loader, DataLoader):
            return LoaderFacts(type(loader).__name__, is_overfit=is_overfit)
        batches: Any = loader.batch_sampler
        is_iterable = isinstance(loader.dataset, IterableDataset)
        sampler = loader.sampler if batches is None or type(batches) is BatchSampler else batches
        samples = None
        if not is_iterable:
            with suppress(TypeError, NotImplementedError):  # a data set without a length, with a sampler of its own
                samples = len(loader.dataset)  # type: ignore[arg-type]  # raises TypeError, which is caught
        return LoaderFacts(
            sampler="" if is_iterable else type(sampler).__name__,
            dataset=type(loader.dataset).__name__,
            is_loader=True,
            is_iterable=is_iterable,
            workers=loader.num_workers,
            samples=samples,
            is_overfit=is_overfit,
        )

    def name_row(self, pl_module: LightningModule, rows: list[int] | None, place: int) -> str:
        """Return the name of a sample by the indices of its batch and its place there, as far as they are known."""
        if rows is None or place >= len(rows):
            return f"sample {place} of the batch"
        loader: Any = self._trainer.train_dataloader
        below = rows_of_base(loader.dataset, [rows[place]])
        name = f"row {rows[place]:,} of the training set"
        name += f" (row {below[0]:,} of the data set below its Subset)" if below else ""
        # Code of the user's own may sort the samples of a batch.
        is_usual = loader.collate_fn is default_collate and not any(
            hasattr(type(pl_module), each) and is_overridden(each, pl_module) for each in _TRANSFERS
        )
        return name if is_usual else f"sample {place} of the batch ({name} unless the batch is made in another order)"

    # Batches.

    def start_batch(self, batch: Any, batch_idx: int, step: int) -> list[int] | None:
        """Examine a batch of training, and return the indices of its samples, if they are known."""
        began_s = self._clock()
        rows: list[int] | None = None
        try:
            iterator, ahead = self._iterator()
            rows = None if iterator is None else indices_of(iterator, ahead)
            if not self._has_failed:
                self._examine(batch, batch_idx, step, rows, batch_number(iterator, ahead))
        except Exception as error:  # noqa: BLE001 - a batch may be anything
            self._fail(error)
        self._spent_s += self._clock() - began_s
        return rows

    def _fail(self, error: Exception) -> None:
        self._has_failed = True
        self._arriving.clear()
        if self._strict:
            raise error
        warn(f"StepWatch no longer counts the samples of batches: {describe_error(error)}")

    def _examine(self, batch: Any, batch_idx: int, step: int, rows: list[int] | None, number: int | None) -> None:
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
        if rows is not None and self._loader is not None and not self._loader.has_rows:
            self._loader = replace(self._loader, has_rows=True)
        workers = 0 if self._loader is None or not self._loader.is_iterable else self._loader.workers
        worker = number % workers if workers > 1 and number is not None else None
        known = None if rows is None else np.array(rows, dtype=np.int64)
        self._transfer(batch, partial(self._add, epoch, step, known, worker))
        if self._batches >= self._next_look:
            self._next_look = self._batches * _GROWTH
            self._show()

    def _is_cheap(self) -> bool:
        return self._spent_s <= _SHARE * (self._clock() - self._began_s)

    def _begin_epoch(self, *, is_whole: bool) -> EpochSamples:
        if self._loader is None:
            self._loader = self._loader_facts()
        if self._epoch is not None:
            self.end_epoch(ended=False)
        self._is_over = self._batches >= _FIRST_BATCHES and not self._is_cheap()
        workers = self._loader.workers if self._loader.is_iterable else 0
        self._epoch = EpochSamples(self._trainer.current_epoch, workers)
        self._epoch.is_whole = is_whole and not self._is_over
        return self._epoch

    def _transfer(self, batch: Any, add: Callable[[np.ndarray[Any, Any]], object]) -> None:
        """Compute the numbers of a batch, and add them when they have arrived, in the order of the batches."""
        with pause_recording():
            numbers = self._numbers(batch)
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
        """Return the fingerprints of the samples, and their classes if there are any, ``[1 or 2, samples]``."""
        if not self._values:
            first = sample_fingerprints(batch)
            self._values = 0 if first is None else values_of_each(len(first))
        keys = sample_fingerprints(batch, self._values) if self._values else None
        if keys is None:
            return None
        classes = batch[1] if isinstance(batch, (list, tuple)) and len(batch) == 2 else None
        is_one_each = type(classes) is Tensor and classes.dtype in _INTEGERS and classes.shape == keys.shape
        if not is_one_each:
            return keys.unsqueeze(0)
        return torch.stack([keys, classes.detach().to(keys.device, torch.int64)])  # type: ignore[union-attr]  # as checked

    def _add(
        self, epoch: EpochSamples, step: int, rows: Any, worker: int | None, numbers: np.ndarray[Any, Any]
    ) -> None:
        contents = np.ascontiguousarray(numbers[0])
        rows = rows if rows is not None and len(rows) == len(contents) else None
        found = BatchSamples(contents, rows, worker, numbers[1] if len(numbers) > 1 else None)
        epoch.add(found, step)
        if self._exchange is not None:
            self._recent.append((step, frozenset(np.sort(found.keys.view(np.uint64))[:_COMPARED_SAMPLES].tolist())))

    def add_validation(self, batch: Any, batch_idx: int, loader: int) -> bool:
        """Examine a batch of validation; return False if no more are needed."""
        if self._is_validated or self._has_failed:
            return False
        if loader or self._validation_samples >= _MOST_VALIDATION:
            return True
        if batch_idx == 0:
            self._validation, self._validation_samples = Sketch(), 0
        try:
            self._transfer(batch, self._add_validation)
        except Exception as error:  # noqa: BLE001 - a batch may be anything
            self._fail(error)
        return True

    def end_validation(self) -> None:
        """End a validation that was no sanity check."""
        self._is_validated = self._validation_samples > 0

    def _add_validation(self, numbers: np.ndarray[Any, Any]) -> None:
        contents = np.ascontiguousarray(numbers[0])
        self._validation.add(contents)
        self._validation_samples += len(contents)

    # Ranks.

    def end_batch(self) -> None:
        """End a batch of training. Every rank calls this equally often, and compares its samples now and then."""
        self._ended += 1
        if self._exchange is None or self._ended < self._next_compared:
            return
        self._next_compared *= _GROWTH_OF_RANKS
        rank = int(self._trainer.distributed_sampler_kwargs["rank"]) if self._trainer.distributed_sampler_kwargs else 0
        steps = dict(self._recent)  # with accumulated gradients, the last batch of each step
        own = RankSamples(rank, tuple(steps), tuple(steps.values()))
        self._take_ranks()
        self._pending = self._exchange.submit(NOTHING, scope="samples", value=own)

    def _take_ranks(self, *, wait: bool = False) -> None:
        pending = self._pending
        if pending is not None and (wait or pending.is_done):
            self._pending = None
            found = compare_ranks([pickle.loads(each) for each in pending.result().values])
            self._ranks = found or self._ranks

    # Facts.

    def end_epoch(self, *, ended: bool = True) -> None:
        """End an epoch."""
        epoch, self._epoch = self._epoch, None
        if epoch is None or self._has_failed:
            return
        self._arrive(wait=True)
        epoch.is_whole &= ended and not self._trainer.should_stop
        self._look_for_draws(epoch)
        if epoch.batches:
            self._epochs.append(epoch.facts(self._before))
            self._before = epoch
        if len(self._epochs) > 2 * _MOST_EPOCHS:
            del self._epochs[_MOST_EPOCHS]
        if epoch.epoch < _MOST_EPOCHS or not epoch.epoch & (epoch.epoch - 1):
            self._show()

    def _look_for_draws(self, epoch: EpochSamples) -> None:
        """Compare the random numbers of the workers with each other and with those of the epoch before."""
        watched = vars(self._trainer.train_dataloader).get(WATCHED) if self._loader_has_workers() else None
        if watched is None or watched is self._noted:  # workers that persist go on drawing
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
        """End the fit: publish what is known, and give the loaders back as they were."""
        self._unwrap()
        if not self._has_failed:
            self.end_epoch(ended=False)
            self._show(wait=True)

    def _show(self, *, wait: bool = False) -> None:
        self._take_ranks(wait=wait)
        facts = self._facts()
        self._publish(facts)
        data = (json.dumps(asdict(facts), indent=1) + "\n").encode()
        if self._directory is not None and facts.epochs and data != self._written:
            path = self._directory / DATA_FILE
            attempt(path, len(data), partial(write_whole, path, lambda file: file.write(data)))
            self._written = data

    def _facts(self) -> DataFacts:
        if not getattr(self._trainer, "knows_epochs", True):  # a plain loop: a sample may come again in the next epoch
            return DataFacts()
        epochs = list(self._epochs)
        if self._epoch is not None and self._epoch.batches:
            epochs.append(self._epoch.facts(self._before))
        loader = self._loader or LoaderFacts()
        return DataFacts(loader, tuple(epochs), self._validation_facts(), self._ranks, self._draws)

    def _validation_facts(self) -> ValidationFacts | None:
        epochs = [each for each in (self._before, self._epoch) if each is not None and each.batches]
        if not self._is_validated or not epochs:
            return None
        validation, samples = self._validation, self._validation_samples
        found = [compare_validation(validation, samples, each.contents, each.last_step) for each in epochs]
        most = max(found, key=lambda each: each.common)
        is_same = any(validation.is_same_set(each.contents) for each in epochs)
        return replace(most, is_same_data=is_same or self._has_same_dataset())

    def _has_same_dataset(self) -> bool:
        loaders: Any = self._trainer.val_dataloaders
        first = loaders[0] if isinstance(loaders, (list, tuple)) and loaders else loaders
        own = getattr(self._trainer.train_dataloader, "dataset", None)
        return own is not None and getattr(first, "dataset", None) is own
