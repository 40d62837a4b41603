"""Tests of the findings about the samples of a fit: each fault with its repaired twin, and healthy samplers."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler
from typing_extensions import override

from lightning_recorder import DumpError, Outputs, ParameterRecorder, StepWatch, open_recording
from lightning_recorder.callbacks import watched_samples as samples_module
from lightning_recorder.insight import RULES
from lightning_recorder.insight.rule import DATA
from tests import forks

QUIET = Outputs(plots=False, dumps=False)
CLASSES = 4


class Net(LightningModule):
    """A classifier of eight numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, CLASSES)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Do nothing: the samples are seen before it."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


def dataset(samples: int = 640, seed: int = 0) -> TensorDataset:
    random_numbers = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 8, generator=random_numbers)
    return TensorDataset(x, torch.randint(0, CLASSES, (samples,), generator=random_numbers))


def sorted_by_class(form: Callable[[Tensor], Tensor] = lambda classes: classes) -> TensorDataset:
    x, classes = dataset().tensors
    order = classes.argsort()
    return TensorDataset(x[order], form(classes[order]))


def one_hot(classes: Tensor) -> Tensor:
    return F.one_hot(classes, CLASSES).float()


def binary(classes: Tensor) -> Tensor:
    return one_hot(classes // 2)[:, 1:2]


def series(*, first: int = 8) -> TensorDataset:
    """Return windows of eight values, and the value at a place from the start of each."""
    values = torch.randn(648, generator=torch.Generator().manual_seed(3))
    return TensorDataset(values.unfold(0, 8, 1)[:640].clone(), values[first : first + 640, None])


def noisy(x: Tensor, target: Tensor) -> TensorDataset:
    return TensorDataset(x + 1e-3, target)


def rare() -> TensorDataset:
    """Return inputs of which one is always 0, and a target that is 1 for few samples."""
    x, _ = dataset().tensors
    return TensorDataset(x * torch.arange(8).clamp(max=1), (torch.arange(640) % 40 == 0).float()[:, None])


def sizes(classes: Tensor) -> Tensor:
    return classes[:, None] / 4


class Binary(Net):
    """A regression of the first output."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self.head(batch[0])[:, :1], batch[1])


class Two(Net):
    """Sums the losses of two loaders."""

    def training_step(self, batch: list[Any], batch_idx: int) -> Tensor:
        return super().training_step(batch[0], batch_idx) + super().training_step(batch[1], batch_idx)


class Stream(IterableDataset[Any]):
    """Samples in a fixed order.

    Args:
        shares: Give each worker a part.
        repeats: Begin again at the end.
        samples: The number of samples.
    """

    def __init__(self, *, shares: bool = True, repeats: bool = False, samples: int = 320) -> None:
        self.samples, self.shares, self.repeats = dataset(samples), shares, repeats

    @override
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None and self.shares else (0, 1)
        while True:
            for index in range(first, len(self.samples), step):
                yield self.samples[index]
            if not self.repeats:
                return


class Drawn(Sampler[Any]):
    """Yields what a function draws in each epoch."""

    def __init__(self, draw: Callable[[int], Any], length: int = 640) -> None:
        self.draw, self.length, self.epoch = draw, length, 0

    @override
    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        yield from self.draw(self.epoch)

    def __len__(self) -> int:
        return self.length


def buckets(epoch: int) -> list[list[int]]:
    found = [list(range(first, first + 32)) for first in range(0, 640, 32)]
    random.shuffle(found)
    return found


def episodes(epoch: int) -> Iterator[list[int]]:
    labels = dataset().tensors[1].tolist()
    for _ in range(20):
        chosen = random.sample(range(CLASSES), 2)
        yield [index for each in chosen for index in random.sample([i for i, c in enumerate(labels) if c == each], 8)]


def endless(epoch: int) -> Iterator[int]:
    while True:
        yield from torch.randperm(640).tolist()


class Reused(Dataset[Any]):
    """Fills one array for each sample.

    Args:
        copies: Return a copy of it.
    """

    def __init__(self, *, copies: bool) -> None:
        self.samples, self.copies, self.array = dataset(), copies, np.zeros(8, np.float32)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        x, y = self.samples[index]
        self.array[:] = x
        return torch.from_numpy(self.array.copy() if self.copies else self.array), y


class Batches(IterableDataset[Any]):
    """A stream of batches, each in the same tensors, which Lightning reads ahead.

    Args:
        copies: Return a copy of them.
    """

    def __init__(self, *, copies: bool) -> None:
        self.samples, self.copies = dataset(320), copies

    @override
    def __iter__(self) -> Iterator[Any]:
        x, y = self.samples.tensors
        own = x[:16].clone(), y[:16].clone()
        for first in range(0, len(x), 16):
            own[0].copy_(x[first : first + 16])
            own[1].copy_(y[first : first + 16])
            yield tuple(each.clone() for each in own) if self.copies else own


class Repeating(Dataset[Any]):
    """Has more indices than samples, as data sets that compute an index may.

    Args:
        samples: The number of samples.
    """

    def __init__(self, samples: int) -> None:
        self.samples = dataset(samples)

    def __len__(self) -> int:
        return 640

    def __getitem__(self, index: int) -> Any:
        return self.samples[index % len(self.samples)]


class Buffered(IterableDataset[Any]):
    """Shuffles with a buffer.

    Args:
        takes: Replace a sample that was given, and not another one.
    """

    def __init__(self, *, takes: bool) -> None:
        self.samples, self.takes = dataset(2560), takes

    @override
    def __iter__(self) -> Iterator[Any]:
        rng, buffer = random.Random(3), [self.samples[index] for index in range(16)]
        for index in range(16, len(self.samples)):
            place = rng.randrange(16)
            yield buffer[place]
            buffer[place if self.takes else rng.randrange(16)] = self.samples[index]
        yield from rng.sample(buffer, 16)


class Loader:
    """A loader of the user's own that joins the streams of two readers.

    Args:
        shares: Give each reader a part.
    """

    def __init__(self, *, shares: bool) -> None:
        self.samples, self.shares = dataset(320), shares

    def __iter__(self) -> Iterator[Any]:
        x, y = self.samples.tensors
        parts = [range(0, 320, 2), range(1, 320, 2)] if self.shares else [range(320), range(0, -320, -1)]
        rows = [row for pair in zip(*parts, strict=True) for row in pair]
        for first in range(0, len(rows), 16):
            yield x[rows[first : first + 16]], y[rows[first : first + 16]]


def overlapping(epoch: int) -> list[list[int]]:
    order = random.sample(range(640), 640)
    return [order[first : first + 32] for first in range(0, 640, 30)]


def permuted(seed: int) -> list[int]:
    return random.Random(seed).sample(range(640), 640)


def full_only(epoch: int) -> list[list[int]]:
    """Return a full batch of each bucket of 37 samples, without the rest."""
    found = [list(range(first, first + 32)) for first in range(0, 629, 37)]
    return random.sample(found, len(found))


def repeated(epoch: int) -> list[int]:
    return [row for row in random.sample(range(640), 213) for _ in range(3)]


def oversampled(epoch: int) -> list[int]:
    rare = [row for row, label in enumerate(dataset().tensors[1].tolist()) if label == 0]
    return random.sample([*range(640), *rare * 4], 640 + 4 * len(rare))


def too_long_left_out(epoch: int) -> list[int]:
    return random.sample([row for row in range(640) if row % 40], 624)


class Noise(Dataset[Any]):
    """Adds noise of torch to the samples."""

    def __init__(self) -> None:
        self.samples = dataset()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        x, y = self.samples[index]
        return x + torch.randn(8), y


def augmented(first: int) -> dict[str, Any]:
    """Return loaders of parts of one data set; the part of validation begins at a row."""
    data = Noise()
    training = DataLoader(Subset(data, range(480)), 32, shuffle=True)
    return {"train": training, "validation": DataLoader(Subset(data, range(first, 640)), 32)}


def with_grid() -> TensorDataset:
    """Return samples that all have the same grid as a second input."""
    x, classes = dataset().tensors
    return TensorDataset(x, classes, torch.linspace(0, 1, 16).expand(640, 16))


class Keyed(Dataset[Any]):
    """Has keys in place of indices."""

    def __len__(self) -> int:
        return 640

    def __getitem__(self, key: str) -> Any:
        return dataset()[int(key.removeprefix("row"))]


class OwnBatch:
    """A batch of a class of its own."""

    def __init__(self, samples: list[Any]) -> None:
        self.x, self.y = default_collate(samples)


class OfAttributes(Net):
    """Reads such a batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([batch.x, batch.y], batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Do nothing: the samples are seen before it."""


class Wrapped:
    """A loader around another one, which mixes the batches of its workers.

    Args:
        loader: The other one.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        yield from random.Random(3).sample(batches := list(self.loader), len(batches))


class Cached:
    """Collates a new batch at each 40th call only."""

    def __init__(self) -> None:
        self.calls, self.batch = 0, None

    def __call__(self, samples: list[Any]) -> Any:
        self.batch = default_collate(samples) if self.calls % 40 == 0 else self.batch
        self.calls += 1
        return self.batch


def fit(
    folder: Path,
    train: Any,
    validation: Any = None,
    *,
    model: Callable[[], LightningModule] = Net,
    watched: bool = True,
    **options: Any,
) -> Any:
    """Train, and return the run, or the model if it is another one."""
    seed_everything(1, verbose=False)
    recorder = ParameterRecorder(every_n_train_steps=10, outputs=QUIET, strict=True)
    trainer = Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        callbacks=[StepWatch(strict=True), recorder] if watched else [],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **{"logger": False, "max_epochs": 2, **options},
    )
    trained = model()
    trainer.fit(trained, train, validation)
    return (
        open_recording(folder).run if model in (Net, Two, Binary, OfAttributes) and trainer.is_global_zero else trained
    )


def findings(run: Any) -> list[tuple[str, str, str]]:
    """Return the findings about samples, which the records give as the run did."""
    names = {rule.name for rule in RULES if DATA in rule.needs}
    found = [(each.rule, each.severity, each.verdict) for each in run.findings if each.rule in names]
    written = json.loads((run.directory / "findings.json").read_text())["findings"]
    assert [(each["rule"], each["severity"], each["verdict"]) for each in written if each["rule"] in names] == found
    return found


HEALTHY: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffled": lambda: {"train": DataLoader(dataset(), 32, shuffle=True), "accumulate_grad_batches": 4},
    "weighted": lambda: {
        "train": DataLoader(dataset(), 32, sampler=WeightedRandomSampler((torch.rand(640) ** 4).tolist(), 640))
    },
    "distributed": lambda: {"train": DataLoader(dataset(), 32, sampler=DistributedSampler(dataset(), 7, 3))},
    "buckets": lambda: {"train": DataLoader(dataset(), batch_sampler=Drawn(buckets, 20))},
    "infinite": lambda: {"train": DataLoader(dataset(), 32, sampler=Drawn(endless)), "limit_train_batches": 50},
    "curriculum": lambda: {
        "train": DataLoader(dataset(), 32, sampler=Drawn(lambda epoch: random.choices(range(64 * epoch), k=640))),
        "max_epochs": 3,
    },
    "few-shot": lambda: {"train": DataLoader(dataset(), batch_sampler=Drawn(episodes, 20))},
    "endless stream": lambda: {"train": DataLoader(Stream(repeats=True), 16), "limit_train_batches": 50},
    "sorted sizes": lambda: {"train": DataLoader(sorted_by_class(sizes), 32), "model": Binary},
    "one-hot": lambda: {"train": DataLoader(sorted_by_class(one_hot), 32, shuffle=True)},
    "overfit": lambda: {"train": DataLoader(dataset(), 32), "overfit_batches": 1, "max_epochs": 20},
    "one batch": lambda: {"train": DataLoader(dataset(32), 32), "max_epochs": 20},
    "copies": lambda: {"train": DataLoader(Reused(copies=True), 32, shuffle=True)},
    "copies of batches": lambda: {"train": DataLoader(Batches(copies=True), None)},
    "an array that is no stream": lambda: {"train": DataLoader(Repeating(640), 32, shuffle=True)},
    "shuffle buffer": lambda: {"train": DataLoader(Buffered(takes=True), 16), "max_epochs": 1},
    "readers with parts": lambda: {"train": Loader(shares=True)},
    "other validation, augmented": lambda: augmented(480),
    "another order in each epoch": lambda: {
        "train": DataLoader(dataset(), 32, sampler=Drawn(permuted)),
        "max_epochs": 3,
    },
    "repeated augmentation": lambda: {"train": DataLoader(dataset(), 30, sampler=Drawn(repeated, 639))},
    "oversampling": lambda: {"train": DataLoader(dataset(), 64, sampler=Drawn(oversampled, len(oversampled(0))))},
    "few are left out": lambda: {"train": DataLoader(dataset(), 32, sampler=Drawn(too_long_left_out, 624))},
    "a part is chosen": lambda: {
        "train": DataLoader(dataset(), 32, sampler=SubsetRandomSampler(range(500))),
        "validation": DataLoader(dataset(), 32, sampler=SubsetRandomSampler(range(500, 640))),
    },
    "a grid": lambda: {"train": DataLoader(with_grid(), 32, shuffle=True)},
    "passes in an epoch": lambda: {
        "train": DataLoader(Stream(samples=160, repeats=True), 16),
        "limit_train_batches": 30,
    },
    "two loaders": lambda: {
        "train": [DataLoader(dataset(), 32, shuffle=True), DataLoader(dataset(320, 1), 32)],
        "validation": DataLoader(dataset(160, 2), 32),
        "model": Two,
    },
    "keys": lambda: {"train": DataLoader(Keyed(), 32, sampler=[f"row{row}" for row in permuted(0)])},
    "batches of an own class": lambda: {
        "train": DataLoader(dataset(), 32, shuffle=True, collate_fn=OwnBatch),
        "validation": DataLoader(dataset(160, 2), 32, collate_fn=OwnBatch),
        "model": OfAttributes,
    },
    "a part of each epoch": lambda: {
        "train": DataLoader(dataset(), 32, shuffle=True),
        "limit_train_batches": 0.3,
        "max_epochs": 4,
    },
    "windows before their target": lambda: {"train": DataLoader(series(), 32, shuffle=True), "model": Binary},
    "a rare target and a constant": lambda: {"train": DataLoader(rare(), 32, shuffle=True), "model": Binary},
    "one target for all": lambda: {
        "train": DataLoader(TensorDataset(torch.ones(640, 8), torch.ones(640, 1)), 32),
        "model": Binary,
    },
    "noisy copies of the target": lambda: {
        "train": DataLoader(noisy(*series(first=7).tensors), 32, shuffle=True),
        "model": Binary,
    },
    "other validation": lambda: {
        "train": DataLoader(Subset(dataset(), range(500)), 32, shuffle=True),
        "validation": DataLoader(Subset(dataset(), range(500, 640)), 32),
    },
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_samplers_are_silent(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeats that are meant are no finding."""
    monkeypatch.setattr(samples_module.WatchedSamples, "_is_cheap", lambda self: True)
    assert findings(fit(tmp_path, **HEALTHY[name]())) == []


FAULTS: dict[str, tuple[Callable[[], dict[str, Any]], str, str]] = {
    "the same samples for ever": (
        lambda: {
            "train": DataLoader(dataset(1600), 32, sampler=Drawn(lambda _: [*range(64)] * 10, 640)),
            "max_epochs": 1,
        },
        "batch-repeats",
        "epoch 0 has the same 2 batches again and again: 64 of the 1600 samples in 20 batches",
    ),
    "the same samples in another order": (
        lambda: {
            "train": DataLoader(dataset(1600), 32, sampler=Drawn(lambda _: random.choices(range(64), k=960), 960))
        },
        "few-samples",
        "epoch 1 has 64 of the 1600 samples, each about 15 times",
    ),
    "weights of classes for the samples": (
        lambda: {"train": DataLoader(dataset(), 32, sampler=WeightedRandomSampler([0.2, 0.8], 640))},
        "few-samples",
        "the WeightedRandomSampler has 2 weights for 640 samples: it only draws the first 2",
    ),
    "a stream that does not advance": (
        lambda: {"train": DataLoader(Stream(samples=16, repeats=True), 16), "limit_train_batches": 20},
        "batch-repeats",
        "20 of 20 batches of epoch 0 have the same samples",
    ),
    "a batch that is cached": (
        lambda: {"train": DataLoader(dataset(), 16, shuffle=True, collate_fn=Cached())},
        "batch-repeats",
        "39 of 40 batches of epoch 0 have the values of an earlier batch, although their indices differ",
    ),
    "parts that overlap": (
        lambda: {
            "train": DataLoader(Subset(dataset(), range(500)), 32, shuffle=True),
            "validation": DataLoader(Subset(dataset(), range(400, 640)), 32),
        },
        "validation-in-training",
        "42% of the samples of validation are also samples of training",
    ),
    "windows that end with their target": (
        lambda: {"train": DataLoader(series(first=7), 32, shuffle=True), "model": Binary},
        "target-in-inputs",
        "value 7 of the inputs is the target in each of 256 compared samples",
    ),
    "sorted one-hot classes": (
        lambda: {"train": DataLoader(sorted_by_class(one_hot), 32)},
        "sorted-by-class",
        (
            "the samples are sorted by class: in epoch 0, the class changes 3 times in 640 samples of 4 classes; the "
            "sampler is SequentialSampler"
        ),
    ),
    "sorted numbers 0.0 and 1.0": (
        lambda: {"train": DataLoader(sorted_by_class(binary), 32), "model": Binary},
        "sorted-by-class",
        (
            "the samples are sorted by class: in epoch 0, the class changes 1 times in 640 samples of 2 classes; the "
            "sampler is SequentialSampler"
        ),
    ),
    "sorted": (
        lambda: {"train": DataLoader(sorted_by_class(), 32)},
        "sorted-by-class",
        (
            "the samples are sorted by class: in epoch 0, the class changes 3 times in 640 samples of 4 classes; the "
            "sampler is SequentialSampler"
        ),
    ),
}


FAULTS |= {
    "an array for all samples": (
        lambda: {"train": DataLoader(Reused(copies=False), 32, shuffle=True)},
        "reused-buffer",
        "all samples of a batch have the same inputs, in 20 of 20 batches of epoch 0, although their indices differ",
    ),
    "a tensor for all batches": (
        lambda: {"train": DataLoader(Batches(copies=False), None)},
        "reused-buffer",
        "18 of 20 batches of epoch 0 got other values after they had left the loader, which torch has not written",
    ),
    "parts that overlap, augmented": (
        lambda: augmented(400),
        "validation-in-training",
        "80 of the 240 samples of validation are rows of the data set that are also samples of training",
    ),
}
FAULTS |= {
    "a second validation that leaks": (
        lambda: {
            "train": DataLoader(Subset(dataset(), range(500)), 32, shuffle=True),
            "validation": [
                DataLoader(Subset(dataset(), range(500, 640)), 32),
                DataLoader(Subset(dataset(), range(400, 640)), 32),
            ],
        },
        "validation-in-training",
        "42% of the samples of loader 2 of validation are also samples of training",
    ),
    "a second loader that leaks": (
        lambda: {
            "train": [DataLoader(dataset(), 32, shuffle=True), DataLoader(dataset(320, 1), 32)],
            "validation": DataLoader(Subset(dataset(320, 1), range(160)), 32),
            "model": Two,
        },
        "validation-in-training",
        "loader 2: 100% of the samples of validation are also samples of training",
    ),
    "few keys": (
        lambda: {"train": DataLoader(Keyed(), 32, sampler=[f"row{row % 64}" for row in range(640)])},
        "batch-repeats",
        "epoch 0 has the same 2 batches again and again: 64 of the 640 samples in 20 batches",
    ),
    "a leak in batches of an own class": (
        lambda: {
            "train": DataLoader(dataset(), 32, shuffle=True, collate_fn=OwnBatch),
            "validation": DataLoader(Subset(dataset(), range(160)), 32, collate_fn=OwnBatch),
            "model": OfAttributes,
        },
        "validation-in-training",
        "100% of the samples of validation are also samples of training",
    ),
}
NOTES: dict[str, tuple[Callable[[], dict[str, Any]], str, str]] = {
    "indices with the same samples": (
        lambda: {"train": DataLoader(Repeating(10), 32, shuffle=True)},
        "few-samples",
        "640 indices of the data set gave 10 different samples in epoch 0",
    ),
    "two indices with the same sample": (
        lambda: {"train": DataLoader(Repeating(320), 32, shuffle=True)},
        "few-samples",
        "640 indices of the data set gave 320 different samples in epoch 0",
    ),
    "a buffer that keeps its samples": (
        lambda: {"train": DataLoader(Buffered(takes=False), 16), "max_epochs": 1},
        "repeated-samples",
        "were in one of the four batches before; it has",
    ),
    "readers without parts": (
        lambda: {"train": Loader(shares=False)},
        "repeated-samples",
        "each of the 320 samples comes exactly 2 times in epoch 0",
    ),
    "batches that overlap": (
        lambda: {"train": DataLoader(dataset(), batch_sampler=Drawn(overlapping, 22))},
        "repeated-samples",
        "% of the samples of epoch 0 come twice, and the others once",
    ),
    "batches that are left out": (
        lambda: {"train": DataLoader(dataset(), batch_sampler=Drawn(full_only, 17))},
        "unused-samples",
        "of the 640 samples came in none of 2 epochs",
    ),
    "the same order in each epoch": (
        lambda: {"train": DataLoader(dataset(), 32, sampler=Drawn(lambda _: permuted(0)))},
        "same-order",
        "epoch 1 has its 640 samples in the same shuffled order as the epoch before",
    ),
}


@pytest.mark.parametrize("name", NOTES)
def test_faults_that_may_be_meant_are_notes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that some programs have on purpose is a note, and the repaired twin has no finding."""
    monkeypatch.setattr(samples_module.WatchedSamples, "_is_cheap", lambda self: True)
    make, rule, verdict = NOTES[name]
    ((found, severity, what),) = findings(fit(tmp_path, **make()))
    assert (found, severity) == (rule, "note")
    assert verdict in what


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_the_data_are_found(name: str, tmp_path: Path) -> None:
    """Each fault is a warning with its numbers; its repaired twin is among the healthy samplers."""
    make, rule, verdict = FAULTS[name]
    assert findings(fit(tmp_path, **make())) == [(rule, "warning", verdict)]


class Noisy(Dataset[Any]):
    """Adds noise to the samples.

    Args:
        noise: A function that draws the noise of a sample.
    """

    def __init__(self, noise: Callable[[Noisy], float]) -> None:
        self.samples, self.noise, self.rng = dataset(), noise, np.random.default_rng(0)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        x, y = self.samples[index]
        return x + self.noise(self), y


def drawn_by_numpy(data: Noisy) -> float:
    return float(np.random.random())  # noqa: NPY002 - as most augmentations do


def drawn_by_own(data: Noisy) -> float:
    return float(data.rng.random())


_SHARED = np.random.default_rng(0)


def drawn_by_global(data: Noisy) -> float:
    return sum(float(_SHARED.random()) for _ in range(2))


def other_global(worker: int) -> None:
    global _SHARED  # noqa: PLW0603 - as programs do
    _SHARED = np.random.default_rng(torch.initial_seed())


def drawn_by_torch(data: Noisy) -> float:
    return float(torch.rand(()))


def drawn_by_nothing(data: Noisy) -> float:
    return 0.0


def same_seed(worker: int) -> None:
    np.random.seed(0)  # noqa: NPY002 - the fault


def other_seed(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.rng = np.random.default_rng(torch.initial_seed())


AUGMENTATIONS: dict[str, tuple[Callable[[Noisy], float], dict[str, Any], str]] = {
    "a copy for each worker": (drawn_by_own, {}, "in all 2 workers and in 2 epochs in a row, from dataset.rng"),
    "one worker": (drawn_by_own, {"num_workers": 1}, "in 2 epochs in a row, from dataset.rng"),
    "the same seed": (
        drawn_by_numpy,
        {"worker_init_fn": same_seed},
        "in all 2 workers and in 2 epochs in a row, from numpy.random",
    ),
    "a global variable": (
        drawn_by_global,
        {},
        f"in all 2 workers and in 2 epochs in a row, from {__name__}._SHARED",
    ),
    "a seeded global variable": (drawn_by_global, {"worker_init_fn": other_global}, ""),
    "torch": (drawn_by_torch, {}, ""),
    "numpy": (drawn_by_numpy, {}, ""),
    "seeded": (drawn_by_own, {"worker_init_fn": other_seed}, ""),
    "not used": (drawn_by_nothing, {}, ""),
    "in the main process": (drawn_by_own, {"num_workers": 0}, ""),
    "persistent": (drawn_by_own, {"num_workers": 1, "persistent_workers": True}, ""),
}


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_equal_augmentations_are_found(name: str, tmp_path: Path) -> None:
    """Workers or epochs that draw the same random numbers are a warning; seven ways to draw others are silent."""
    noise, options, where = AUGMENTATIONS[name]
    loader = DataLoader(Noisy(noise), 32, shuffle=True, **{"num_workers": 2, **options})
    found = findings(fit(tmp_path, loader))
    verdict = f"the samples draw the same random numbers {where}"
    assert found == ([("same-augmentation", "warning", verdict)] if where else [])
    assert type(loader) is DataLoader
    assert loader.collate_fn is default_collate


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("wrap", [lambda loader: loader, Wrapped])
def test_workers_that_yield_all_samples(shares: bool, wrap: Callable[[Any], Any], tmp_path: Path) -> None:
    """Two workers that both yield all samples are a warning, also behind a wrapper; with a part for each, none."""
    found = findings(fit(tmp_path, wrap(DataLoader(Stream(shares=shares), 16, num_workers=2)), max_epochs=1))
    verdict = "each of the 2 workers yields all samples: 100% of the samples came exactly 2 times in epoch 0"
    assert found == ([] if shares else [("same-samples-by-workers", "warning", verdict)])


def test_the_rows_of_each_of_several_loaders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are those of the batch, also when one loader ends first, begins again, or is read once more."""
    found: dict[int, list[bool]] = {}
    examine = samples_module.WatchedSamples._examine

    def noted(self: Any, batch: Any, batch_idx: int, step: int, rows: Any, *more: Any) -> None:
        found.setdefault(self._number, []).append(rows == batch[0][:, 0].long().tolist())
        examine(self, batch, batch_idx, step, rows, *more)

    monkeypatch.setattr(samples_module.WatchedSamples, "_examine", noted)

    def loader(rows: int) -> DataLoader[Any]:
        x = torch.arange(float(rows)).unsqueeze(1).expand(-1, 8)
        return DataLoader(TensorDataset(x, torch.zeros(rows, dtype=torch.long)), 8, shuffle=True)

    for mode in ("min_size", "max_size_cycle"):
        fit(tmp_path / mode, CombinedLoader([loader(96), loader(40)], mode), model=Two)
    assert found == {0: [True] * (2 * 5 + 2 * 12), 1: [True] * (2 * 5 + 2 * 12)}


def test_the_same_data_for_validation_are_a_note(tmp_path: Path) -> None:
    """The same data in both loaders are meant, as in a first try of a program."""
    found = findings(fit(tmp_path, DataLoader(dataset(), 32, shuffle=True), DataLoader(dataset(), 32)))
    assert [each[:2] for each in found] == [("validation-in-training", "note")]


@pytest.mark.parametrize("order", [1, -1])
def test_samples_of_training_beside_those_of_validation_are_a_note(order: int, tmp_path: Path) -> None:
    """A loader of some samples of training is meant if another one has none; it shows how well these are learned."""
    data = dataset()
    loaders = [DataLoader(Subset(data, range(first, last)), 32) for first, last in ((500, 640), (0, 200))][::order]
    found = findings(fit(tmp_path, DataLoader(Subset(data, range(500)), 32, shuffle=True), loaders))
    assert [each[:2] for each in found] == [("validation-in-training", "note")]


def test_few_possible_values_are_no_repeats(tmp_path: Path) -> None:
    """Samples of three bits are equal by chance, in training and in validation."""
    bits = TensorDataset(
        torch.randint(0, 2, (640, 8)).float() * torch.tensor([1.0] * 3 + [0.0] * 5), torch.zeros(640).long()
    )
    parts = [Subset(bits, range(500)), Subset(bits, range(500, 640))]
    assert findings(fit(tmp_path, DataLoader(parts[0], 32, shuffle=True), DataLoader(parts[1], 32))) == []


def test_samples_are_counted_while_it_takes_little_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first batches, the count ends when it takes more than a thousandth of the time."""
    monkeypatch.setattr(samples_module, "_FIRST_BATCHES", 30)
    monkeypatch.setattr(samples_module.WatchedSamples, "_is_cheap", lambda self: False)
    run = fit(tmp_path, DataLoader(dataset(), 32, shuffle=True))
    assert [(each.epoch, each.batches, each.is_whole) for each in run.data.epochs] == [(0, 20, True), (1, 10, False)]


def test_a_leak_stays_known_after_the_count_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation is compared with the last epoch that was counted as a whole, not with a part of the next one."""
    monkeypatch.setattr(samples_module, "_FIRST_BATCHES", 22)
    monkeypatch.setattr(samples_module.WatchedSamples, "_is_cheap", lambda self: False)
    run = fit(tmp_path, DataLoader(Stream(samples=640), 32), DataLoader(Subset(dataset(), range(320, 640)), 32))
    verdict = "100% of the samples of validation are also samples of training"
    assert findings(run) == [("validation-in-training", "warning", verdict)]


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    """A file of facts that was changed by hand gives an error with its path."""
    run = fit(tmp_path, DataLoader(dataset(), 32, shuffle=True))
    assert run.data.loader.has_rows
    path = run.directory / "data.json"
    path.write_text(path.read_text().replace('"batches": 20', '"batches": "20"'))
    with pytest.raises(DumpError, match=r"data\.json was not written by lightning_recorder"):
        _ = run.findings


class ByRank(Stream):
    """Gives each rank a part, as a user would divide a stream."""

    @override
    def __iter__(self) -> Iterator[Any]:
        for index in range(int(os.environ["LOCAL_RANK"]), len(self.samples), 2):
            yield self.samples[index]


class NoisyByRank(Dataset[Any]):
    """Gives each rank other noise on the same samples."""

    def __init__(self, samples: TensorDataset) -> None:
        self.samples, self.numbers = samples, torch.Generator().manual_seed(int(os.environ["LOCAL_RANK"]))

    def __len__(self) -> int:
        return len(self.samples)

    @override
    def __getitem__(self, index: int) -> Any:
        x, of_class = self.samples[index]
        return x + 0.1 * torch.randn(x.shape, generator=self.numbers), of_class


class Recording(Net):
    """Keeps the losses of the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(float(loss.detach()))
        return loss


def poisoned() -> TensorDataset:
    """Return samples of which the one that rank 1 gets as the fourth of its 33rd batch has a NaN."""
    x, classes = dataset(1280).tensors
    x[2 * (32 * 16 + 3) + 1] = torch.nan
    return TensorDataset(x, classes)


def on_two_ranks() -> dict[str, dict[str, Any]]:
    """Return the loaders by name; the first four are healthy."""
    rank, one = int(os.environ["LOCAL_RANK"]), {"use_distributed_sampler": False}
    shares: Any = DistributedSampler(poisoned(), 2, rank, shuffle=False)
    x, classes = dataset(512).tensors
    own = TensorDataset(x[rank::2], classes[rank::2])  # the seed of all ranks shuffles its indices alike
    return {
        "own data": {"train": DataLoader(own, 16, shuffle=True), **one},
        "sampler": {"train": DataLoader(dataset(), 16, shuffle=True)},
        "divided": {"train": DataLoader(ByRank(), 16)},
        "overfit": {"train": DataLoader(dataset(), 16), "overfit_batches": 2, "max_epochs": 8},
        "stream": {"train": DataLoader(Stream(), 16)},
        "no sampler": {"train": DataLoader(dataset(), 16, shuffle=True), **one},
        "augmented": {"train": DataLoader(NoisyByRank(dataset()), 16, shuffle=True), **one},
        "row": {"train": DataLoader(poisoned(), 16, sampler=shares), "model": Recording},
        "bare": {"train": DataLoader(poisoned(), 16, sampler=shares), "model": Recording, "watched": False},
    }


SCRIPT = """
import sys
from pathlib import Path

import torch

from tests.callbacks.test_watched_samples import fit, on_two_ranks

folder = Path(sys.argv[1])
for name, options in on_two_ranks().items():
    model = fit(folder / name, strategy="ddp", devices=2, **options)
    if "model" in options:
        left = {"losses": model.losses, "state": model.state_dict()}
        torch.save(left, folder / f"{name}-{torch.distributed.get_rank()}.pt")
"""


@pytest.mark.slow
def test_samples_of_two_ranks(tmp_path: Path) -> None:
    """Ranks that get the same samples are found; a rank names its poisoned row, and both train as without the watch."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    codes, log = forks.run(script, tmp_path, folder=tmp_path, ranks=2)
    assert codes == [0, 0], log[-3000:]
    assert "RecorderWarning" not in log
    for name in ("own data", "sampler", "divided", "overfit"):
        assert findings(open_recording(tmp_path / name).run) == []
    for name, steps in (("stream", 8), ("no sampler", 16), ("augmented", 16)):
        verdict = f"all 2 ranks get the same samples in each of {steps} compared steps"
        assert findings(open_recording(tmp_path / name).run) == [("same-samples-on-ranks", "warning", verdict)]
    (found,) = [each for each in open_recording(tmp_path / "row").run.findings if each.rule == "non-finite"]
    assert "rank 1): 8 NaN values in batch[0]; row 1,031 of the training set makes it" in found.verdict
    for rank in range(2):
        one, other = (torch.load(tmp_path / f"{name}-{rank}.pt") for name in ("row", "bare"))
        assert all(
            torch.equal(one["state"][key].nan_to_num(), value.nan_to_num()) for key, value in other["state"].items()
        )
        assert str(one["losses"]) == str(other["losses"])
