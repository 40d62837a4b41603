"""Tests of the search for the sample that makes a step bad, with samples that are poisoned."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

from lightning_recorder import StepWatch
from lightning_recorder.callbacks.row_search import FoundRow, find_row, search
from lightning_recorder.callbacks.watched_run import WatchedRun
from lightning_recorder.insight import Finding

WIDTH = 8
ROWS = 32  # of a batch


class Net(LightningModule):
    """A regression.

    Args:
        middle: A function that makes the layer in the middle.
    """

    def __init__(self, middle: Callable[[], nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), middle(), nn.ReLU(), nn.Linear(16, 1))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


class ReadLater(WatchedRun):
    """Reads the values after the optimizer has stepped, as on a GPU."""

    @staticmethod
    def _is_host(device: torch.device) -> bool:
        return False

    def start_batch(self, *args: Any) -> None:
        self._arrive(self._queue.take(wait=True))
        super().start_batch(*args)


def dataset(rows: int, poison: Callable[[Tensor, Tensor], object] = lambda x, y: None) -> TensorDataset:
    """Return a regression problem, changed by a function of its inputs and targets."""
    x = torch.randn(rows, WIDTH)
    y = x.sum(1, keepdim=True) + 0.1 * torch.randn(rows, 1)
    poison(x, y)
    return TensorDataset(x, y)


def fit(folder: Path, model: Net, data: Any, *callbacks: Any, **options: Any) -> Net:
    loader = data if isinstance(data, DataLoader) else DataLoader(data, ROWS)
    trainer = Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 1, **options},
    )
    trainer.fit(model, loader)
    return model


def found(folder: Path, data: Any, middle: Callable[[], nn.Module] = nn.Identity, **options: Any) -> Finding:
    """Train, and return the first finding."""
    watch = StepWatch(strict=True)
    fit(folder, Net(middle), data, watch, **options)
    return watch.found[0]


def scaled(row: int, factor: float) -> Callable[[Tensor, Tensor], object]:
    return lambda x, y: y[row].mul_(factor)


def spoiled(row: int, value: float) -> Callable[[Tensor, Tensor], object]:
    return lambda x, y: x[row, 3].fill_(value)


def test_a_spike_names_the_row(tmp_path: Path) -> None:
    """A wrong target is named with its row, how much it makes the loss larger, and its values beside the others."""
    seed_everything(1, verbose=False)
    one = found(tmp_path, dataset(1024, scaled(700, 300)))
    assert "; row 700 of the training set makes the loss " in one.verdict
    assert one.verdict.endswith(" × larger")
    assert (one.numbers["row"], one.numbers["place"]) == (700, 700 % ROWS)
    assert one.numbers["row_ratio"] == pytest.approx(one.numbers["ratio"], rel=0.7)
    assert one.next.startswith("Look at row 700 of the training set. Its values are batch[0]: ")


def test_a_nan_names_the_row(tmp_path: Path) -> None:
    """A sample with a NaN is named; without it, the loss is finite. The incident has the rows of the batch."""
    seed_everything(1, verbose=False)
    one = found(tmp_path, dataset(256, spoiled(100, math.nan)))
    assert "; row 100 of the training set makes it: without it, the loss is " in one.verdict
    about = json.loads((tmp_path / "recorder/incidents/step-3/incident.json").read_text())
    assert about["rows"] == [*range(96, 128)]


@pytest.mark.parametrize("middle", [lambda: nn.BatchNorm1d(16), lambda: nn.Dropout(0.3)])
def test_layers_that_depend_on_the_batch(middle: Callable[[], nn.Module], tmp_path: Path) -> None:
    """A normalization over the batch spreads a NaN to all samples; a dropout draws other numbers for a part."""
    seed_everything(1, verbose=False)
    assert found(tmp_path, dataset(256, spoiled(100, math.inf)), middle).numbers["row"] == 100


def test_several_bad_rows(tmp_path: Path) -> None:
    """With three bad samples, one is named, and that there are others."""
    seed_everything(1, verbose=False)

    def poison(x: Tensor, y: Tensor) -> None:
        x[[98, 105, 127], 2] = math.nan

    one = found(tmp_path, dataset(256, poison))
    assert one.numbers["row"] in (98, 105, 127)
    assert one.verdict.endswith(", and so do others of the batch")


def test_a_row_among_the_first_steps(tmp_path: Path) -> None:
    """A wrong target of the third step is a spike at once, and the divergence that follows names its row."""
    seed_everything(1, verbose=False)
    watch = StepWatch(strict=True)
    fit(tmp_path, Net(), dataset(512, lambda x, y: y[70].fill_(1e6)), watch)
    spike, diverged = watch.found
    assert (spike.rule, spike.first_step, spike.numbers["row"]) == ("spike", 2, 70)
    assert (diverged.rule, diverged.numbers["row"], diverged.numbers["row_step"]) == ("non-finite", 70, 2)
    assert "; before that, row 70 of the training set made the loss " in diverged.verdict
    assert diverged.next.startswith("Look at row 70 of the training set. Its values are batch[0]: ")


def test_a_learning_rate_that_is_too_high(tmp_path: Path) -> None:
    """A training that diverges in its first steps by itself accuses no row."""

    class Fast(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1.0)

    for seed in range(5):
        seed_everything(seed, verbose=False)
        watch = StepWatch(strict=True)
        fit(tmp_path, Fast(), dataset(512), watch)
        assert [(each.rule, "row" in each.numbers) for each in watch.found] == [("non-finite", False)]


def test_rows_of_a_shuffled_subset(tmp_path: Path) -> None:
    """The row is that of the data set of the loader, with the one below its Subset, also with workers."""
    seed_everything(1, verbose=False)
    data = dataset(512, spoiled(300, math.nan))
    part = Subset(data, range(256, 512))
    one = found(tmp_path, DataLoader(part, ROWS, shuffle=True, num_workers=2))
    assert "; row 44 of the training set (row 300 of the data set below its Subset) makes it" in one.verdict


def test_a_batch_in_another_order(tmp_path: Path) -> None:
    """If code of the user makes the batch, the row is named with the condition that it keeps the order."""
    seed_everything(1, verbose=False)
    data = dataset(256, spoiled(100, math.nan))
    one = found(tmp_path, DataLoader(data, ROWS, collate_fn=partial(default_collate)))
    what = "; sample 4 of the batch (row 100 of the training set unless the batch is made in another order) makes it"
    assert what in one.verdict


def test_accumulated_batches(tmp_path: Path) -> None:
    """With accumulated gradients, the batch of the sample is found first."""
    seed_everything(1, verbose=False)
    one = found(tmp_path, dataset(256, spoiled(100, math.nan)), accumulate_grad_batches=4)
    assert one.numbers["row"] == 100
    one = found(tmp_path, dataset(4096, scaled(3900, 3000)), accumulate_grad_batches=2)
    assert one.numbers["row"] == 3900


@pytest.mark.parametrize("keeps", [True, False])
def test_values_that_arrive_later(keeps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device, a row is searched with the parameters of its step, or else with those of a step later."""
    monkeypatch.setattr("lightning_recorder.callbacks.watch.WatchedRun", ReadLater)
    seed_everything(1, verbose=False)
    watch = StepWatch(strict=True, keep_parameters=keeps)
    fit(tmp_path, Net(), dataset(1024, scaled(700, 100)), watch)
    assert watch.found[0].numbers.get("row") == 700


def test_a_bad_value_that_no_row_makes(tmp_path: Path) -> None:
    """If the step is bad without any sample, none is named; the rows of the batch are."""

    class Spoiled(Net):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * math.nan if batch_idx == 3 else loss

    seed_everything(1, verbose=False)
    watch = StepWatch(strict=True)
    fit(tmp_path, Spoiled(), dataset(256), watch)
    assert "row" not in watch.found[0].numbers
    assert watch.found[0].next.endswith(
        "The batch has rows 96, 97, 98, 99, 100, 101, 102, 103 and 24 more of the training set."
    )


def of_two_losses(outputs: Tensor, y: Tensor, factor: Tensor) -> Tensor:
    # The one with the larger values hardly counts.
    return 1e-12 * F.mse_loss(outputs, 1e4 * y.repeat(1, 4)) + F.smooth_l1_loss(outputs[:, :1], factor)


def of_classes(outputs: Tensor, y: Tensor, factor: Tensor) -> Tensor:
    return F.cross_entropy(outputs * factor, (y > 0).long()[:, 0], torch.tensor([1.0, 2.0, 1.0, 1.0]))


def of_tokens(outputs: Tensor, y: Tensor, factor: Tensor) -> Tensor:
    scores = F.dropout((outputs * factor).unsqueeze(1).repeat(1, 3, 1), 0.3).log_softmax(2)
    return F.nll_loss(scores.reshape(-1, 4), (y > 0).long().repeat(1, 3).reshape(-1))


def of_root(outputs: Tensor, y: Tensor, factor: Tensor) -> Tensor:
    # Its gradient is not finite where the argument is zero.
    return (outputs * factor).pow(2).sum(1).sqrt().mean()


def in_a_loop(outputs: Tensor, y: Tensor, factor: Tensor) -> Tensor:
    found: Tensor = torch.stack([each.square().sum() for each in (outputs[:, :1] * factor - y).split(1)]).norm()
    return found


def contrasting(outputs: Tensor, y: Tensor, factor: Tensor) -> Tensor:
    return F.cross_entropy(outputs @ (outputs * factor).T, torch.arange(len(outputs)))


def normalized(outputs: Tensor, y: Tensor, factor: Tensor) -> Tensor:
    return F.l1_loss(F.batch_norm(outputs, None, None, training=True)[:, :1], y * factor)


@pytest.mark.parametrize(
    ("step", "factor", "replays"),
    [
        (of_two_losses, 1000, 2),
        (of_classes, -10000, 2),
        (of_tokens, -10000, 2),
        (of_tokens, math.nan, 2),
        (of_root, 0, 2),
        (in_a_loop, 1000, 9),
        (contrasting, 1000, 12),
        (normalized, 1000, 4),
        (normalized, math.inf, 4),
    ],
)
def test_few_replays(
    step: Callable[[Tensor, Tensor, Tensor], Tensor],
    factor: float,
    replays: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the loss shows the share of each of 32 samples, two replays suffice; otherwise log2(n) and four."""
    seed_everything(2, verbose=False)
    row = 25 * ROWS + 8
    results: list[FoundRow | None] = []

    class Planted(Net):
        def __init__(self) -> None:
            super().__init__()
            self.outputs = nn.Linear(WIDTH, 4)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            factors = torch.where(batch[2] == row, factor, 1.0).unsqueeze(1)  # no value of the batch stands out
            return step(self.outputs(batch[0]), batch[1], factors)

    def spied(*args: Any, **options: Any) -> FoundRow | None:
        results.append(find_row(*args, **options))
        return results[-1]

    monkeypatch.setattr("lightning_recorder.callbacks.watched_run.find_row", spied)
    watch = StepWatch(strict=True, incidents=False)
    fit(tmp_path, Planted(), TensorDataset(*dataset(1024).tensors, torch.arange(1024)), watch)
    assert [(each.numbers.get("row"), each.first_step) for each in watch.found[:1]] == [(row, 25)]
    first = next(each for each in results if each is not None)
    assert (first.place, first.is_only, first.replays) == (8, True, replays)


def counted(samples: int, *bad: int) -> tuple[int | None, int]:
    """Return the result of a search for bad samples, and the number of parts that it looked at."""
    parts: set[tuple[int, ...]] = set()

    def is_bad(rows: Sequence[int]) -> bool:
        parts.add(tuple(rows))
        return not set(bad).isdisjoint(rows)

    found = search(samples, is_bad)
    assert found is None or set(bad).isdisjoint(found[1])
    return None if found is None else found[0], len(parts)


@pytest.mark.parametrize("samples", [2, 3, 7, 32, 48, 64, 1000])
def test_the_search_takes_few_replays(samples: int) -> None:
    """A bad sample of n, or several, take log2(n) parts, one for "several", and one more if both halves are bad."""
    most = math.ceil(math.log2(samples)) + 1
    for bad in (0, samples // 2 - 1, samples // 2, samples - 1):
        found, calls = counted(samples, bad)
        assert found == bad
        assert calls <= most
    for pair in ((0, samples - 1), (0, samples // 2), (samples // 2, samples - 1), (0, samples // 2 - 1)):
        if samples > 3 and len(set(pair)) == 2:
            found, calls = counted(samples, *pair)
            assert found in pair
            assert calls <= most + 1
    assert counted(samples, *range(samples))[0] is None


@pytest.mark.parametrize(("row", "step"), [(5, 16), (100, 52)])
def test_the_training_is_the_same(row: int, step: int, tmp_path: Path) -> None:
    """With the watch, two epochs of shuffled batches with a spike and workers that persist are equal to the bit.

    The spike is among the first steps, or a late one.
    """

    def trained(*callbacks: Any) -> tuple[list[float], Any]:
        seed_everything(3, verbose=False)
        data = dataset(1024, scaled(row, 300))
        loader = DataLoader(data, ROWS, shuffle=True, num_workers=2, persistent_workers=True)
        model = fit(tmp_path, Net(lambda: nn.Dropout(0.2)), loader, *callbacks, max_epochs=2)
        return model.losses, [*model.state_dict().values(), torch.get_rng_state()]

    watch = StepWatch(strict=True)
    (losses, state), (usual, before) = trained(watch), trained()
    assert (watch.found[0].numbers["row"], watch.found[0].first_step) == (row, step)
    assert losses == usual
    assert all(torch.equal(one, other) for one, other in zip(state, before, strict=True))


class Compared(Callback):
    """Compares the rows that the watch knows with those in the batch."""

    def __init__(self, watch: StepWatch) -> None:
        self.watch, self.seen = watch, 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        assert self.watch._run is not None
        assert self.watch._run._step.batches[-1].indices == batch[0][:, 0].tolist()
        self.seen += 1


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")  # meant here
@pytest.mark.parametrize("workers", [0, 2])
def test_rows_are_known_after_a_resumption(workers: int, tmp_path: Path) -> None:
    """In the middle of an epoch, the rows are those that the loader gives then, also in the epochs that follow."""
    x = torch.arange(160.0).unsqueeze(1).repeat(1, WIDTH)
    data = TensorDataset(x, torch.zeros(160, 1))

    def resumed(max_steps: int, checkpoint: Path | None = None) -> Compared:
        seed_everything(3, verbose=False)
        loader = DataLoader(data, ROWS, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
        watch = StepWatch(strict=True, spikes=0)
        compared = Compared(watch)
        trainer = Trainer(
            default_root_dir=tmp_path,
            accelerator="cpu",
            callbacks=[watch, compared],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            max_epochs=3,
            max_steps=max_steps,
        )
        model = Net()
        model.net.requires_grad_(False)[0].weight.requires_grad_(True)
        trainer.fit(model, loader, ckpt_path=checkpoint, weights_only=True)
        trainer.save_checkpoint(tmp_path / "middle.ckpt")
        return compared

    assert resumed(3).seen == 3
    assert resumed(15, tmp_path / "middle.ckpt").seen == 7  # the rest of the epoch, and one more


KINDS: Sequence[Callable[[int, random.Random], Callable[[Tensor, Tensor], object]]] = (
    lambda row, rng: spoiled(row, math.nan),
    lambda row, rng: spoiled(row, math.inf),
    lambda row, rng: spoiled(row, rng.choice([1e20, -1e25])),
    lambda row, rng: lambda x, y: y[row].fill_(rng.choice([300.0, -1000.0, 1e5])),
)
MIDDLES: Sequence[Callable[[], nn.Module]] = (
    nn.Identity,
    lambda: nn.BatchNorm1d(16),
    lambda: nn.Dropout(0.3),
    lambda: nn.LayerNorm(16),
)


@pytest.mark.slow
def test_poisoned_rows(tmp_path: Path) -> None:
    """In 50 runs with a poisoned sample of many kinds, at least 45 name its row, and none names another one."""
    named: list[list[bool]] = []
    for seed in range(50):
        rng = random.Random(seed)
        row, rows = rng.randrange(32 * ROWS, 39 * ROWS), rng.choice([16, 32, 50])
        seed_everything(seed, verbose=False)
        data = dataset(40 * ROWS, rng.choice(KINDS)(row, rng))
        watch = StepWatch(strict=True, incidents=False)
        loader = DataLoader(data, rows, drop_last=True)
        fit(tmp_path, Net(rng.choice(MIDDLES)), loader, watch)
        named.append([each.numbers["row"] == row for each in watch.found if "row" in each.numbers])
    assert all(map(all, named))
    assert sum(map(any, named)) >= 45, named
