"""Tests of a rollback: the batches since the last good state train the model again, without those of the bad step."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_recorder import StepWatch, open_recording
from lightning_recorder.insight import ACTED, Finding
from tests import forks

ROWS, WIDTH, STEPS, BAD = 4, 6, 40, 30
AGAIN = [*range(BAD + 1), *range(24, BAD), *range(BAD + 1, STEPS)]
"""The batches of an epoch with a bad one, of which six come again."""

Rollback = partial(StepWatch, on_finding="rollback", rollback_steps=12, strict=True)


class Net(LightningModule):
    """A net with running statistics that notes the batches it trains with.

    Args:
        optimizer: A function that makes the optimizer.
        schedule: A function that makes the settings of its scheduler.
        dropout: The probability of dropout.
    """

    def __init__(
        self,
        optimizer: Callable[[Any], Any] = torch.optim.Adam,
        schedule: Callable[[Any], dict[str, Any]] | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Dropout(dropout), nn.Linear(8, 1))
        self.optimizer, self.schedule = optimizer, schedule
        self.usual = 1.0  # a number that follows the loss
        self.batches: list[int] = []
        self.indices: list[int] = []
        self.validated: list[int] = []
        """The number of batches before each validation."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, number = batch["a"] if isinstance(batch, dict) else batch
        self.batches.append(int(number[0]) // ROWS)
        self.indices.append(batch_idx)
        loss: Tensor = (self.net(x) - y).square().mean()
        self.usual = 0.9 * self.usual + 0.1 * float(loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(len(self.batches))

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters())
        return (
            optimizer if self.schedule is None else {"optimizer": optimizer, "lr_scheduler": self.schedule(optimizer)}
        )


class Stream(IterableDataset[Any]):
    """Rows one after the other, of an unknown number."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def loader(
    bad: tuple[int, ...] = (),
    *,
    without: tuple[int, ...] = (),
    steps: int = STEPS,
    stream: bool = False,
    workers: int = 0,
) -> Any:
    """Return a loader of batches that have a NaN if they are bad, without some of them."""
    numbers = torch.Generator().manual_seed(1)
    x, y = torch.randn(steps * ROWS, WIDTH, generator=numbers), torch.randn(steps * ROWS, 1, generator=numbers)
    for each in bad:
        x[each * ROWS + 1] = math.nan
    kept = torch.tensor([row for row in range(steps * ROWS) if row // ROWS not in without])
    rows = TensorDataset(x[kept], y[kept], kept)
    return DataLoader(
        Stream([rows[place] for place in range(len(rows))]) if stream else rows, batch_size=ROWS, num_workers=workers
    )


def fit(model: LightningModule, folder: Path, batches: Any, *callbacks: Callback, **options: Any) -> Trainer:
    seed_everything(5, verbose=False)
    options = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, "accelerator": "cpu", **options}
    validation, path = options.pop("validation", None), options.pop("ckpt_path", None)
    trainer = Trainer(
        default_root_dir=folder,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model, batches, validation, ckpt_path=path)
    return trainer


def acted(folder: Path) -> list[Finding]:
    return [each for each in open_recording(folder).findings if each.rule == ACTED]


def assert_same(one: Any, other: Any) -> None:
    """Assert that two models or states of optimizers are equal to the bit."""
    if isinstance(one, nn.Module):
        one, other = one.state_dict(), other.state_dict()
    assert one.keys() == other.keys()
    for key, value in one.items():
        if isinstance(value, dict):
            assert_same(value, other[key])
        else:
            assert torch.equal(value, other[key]) if isinstance(value, Tensor) else value == other[key], key


def one_cycle(optimizer: Any) -> dict[str, Any]:
    """A schedule that raises an error after its last step."""
    return {"scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=STEPS), "interval": "step"}


def halved(optimizer: Any) -> dict[str, Any]:
    return {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), "interval": "epoch"}


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adam": torch.optim.Adam,
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
}


@pytest.mark.parametrize("bad", [(BAD,), (0,), (3,), (STEPS - 1,), (BAD, BAD + 1), (5, BAD, BAD + 2, STEPS - 1)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_rollback_trains_as_if_the_bad_batches_had_never_come(
    optimizer: str, bad: tuple[int, ...], tmp_path: Path
) -> None:
    """Parameters, optimizer and rates are those of a fit without them, to the bit; each bad one has come once."""
    model, twin = Net(OPTIMIZERS[optimizer], one_cycle), Net(OPTIMIZERS[optimizer], one_cycle)
    trainer = fit(model, tmp_path / "back", loader(bad), Rollback())
    other = fit(twin, tmp_path / "without", loader(without=bad))
    assert_same(model, twin)
    assert_same(trainer.optimizers[0].state_dict()["state"], other.optimizers[0].state_dict()["state"])
    assert trainer.optimizers[0].param_groups[0]["lr"] == other.optimizers[0].param_groups[0]["lr"]
    assert [model.batches.count(each) for each in bad] == [1] * len(bad)
    assert trainer.global_step == STEPS


def test_the_batches_come_again_in_their_order_and_with_their_numbers(tmp_path: Path) -> None:
    """All batches until the bad one, those since the good state, and the rest; the x-axis has each step once."""
    model = Net()
    trainer = fit(model, tmp_path, loader((BAD,)), Rollback())
    assert model.batches == model.indices == AGAIN
    assert trainer.fit_loop.epoch_loop.batch_progress.total.completed == STEPS
    (note,) = acted(tmp_path)
    assert note.verdict.startswith(
        "step 30 was left out, the state of 6 steps before was restored, and the batches since then come again, because"
    )
    assert list(open_recording(tmp_path).run["watch"].steps) == list(range(len(AGAIN)))
    (epoch,) = json.loads((tmp_path / "recorder" / "data.json").read_text())["epochs"]
    assert (epoch["batches"], epoch["most"], epoch["is_whole"]) == (STEPS, 1, True)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], int]] = {
    # The arguments of the loader and of the trainer, what differs in the fit without the bad batches, and the steps.
    "epochs": ({}, {"max_epochs": 3}, {}, 3 * STEPS),
    "last of an epoch": ({"bad": (STEPS - 1,)}, {"max_epochs": 3}, {}, 3 * STEPS),
    "stream": ({"stream": True}, {}, {}, STEPS),
    "last of a stream": ({"bad": (STEPS - 1,), "stream": True}, {"max_epochs": 2}, {}, 2 * STEPS),
    "workers": ({"workers": 2}, {}, {}, STEPS),
    "accumulated": ({}, {"accumulate_grad_batches": 2}, {"without": (BAD, BAD + 1)}, STEPS // 2),
    "accumulated to the end": ({"bad": (40,), "steps": 41}, {"accumulate_grad_batches": 2}, {}, 21),
    "max_steps": ({}, {"max_steps": 35}, {"max_steps": 34}, 35),
    "max_steps at the bad one": ({}, {"max_steps": BAD + 1}, {"max_steps": BAD}, BAD + 1),
    "max_steps over epochs": ({}, {"max_steps": 75, "max_epochs": -1}, {"max_steps": 73}, 75),
    "limit": ({"stream": True}, {"limit_train_batches": 35}, {"limit_train_batches": 34}, 35),
}


@pytest.mark.parametrize("case", CASES)
def test_a_rollback_ends_an_epoch_and_a_fit_where_they_end_otherwise(case: str, tmp_path: Path) -> None:
    """In other loaders and ways to train, the model is that of a fit without the batches, and no batch is lost."""
    arguments, options, others, steps = CASES[case]
    arguments, others = {"bad": (BAD,), **arguments}, {**options, **others}
    without = others.pop("without", arguments["bad"])
    model, twin = Net(schedule=halved), Net(schedule=halved)
    trainer = fit(model, tmp_path / "back", loader(**arguments), Rollback(), **options)
    fit(twin, tmp_path / "without", loader(**{**arguments, "bad": (), "without": without}), **others)
    assert_same(model, twin)
    assert set(model.batches) == {*twin.batches, *without}
    assert trainer.global_step == steps


def test_several_loaders_come_again_together(tmp_path: Path) -> None:
    """The parts of a batch from each of two loaders, of which one is cycled, stay together."""

    class Pairs(Net):
        def __init__(self) -> None:
            super().__init__()
            self.pairs: list[list[int]] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.pairs.append([int(batch["a"][2][0]) // ROWS, int(batch["b"][0])])
            return super().training_step(batch, batch_idx)

    second: Any = DataLoader(torch.arange(7), batch_size=1)  # type: ignore[arg-type]  # a tensor is a data set, too
    model = Pairs()
    fit(model, tmp_path, CombinedLoader({"a": loader((BAD,)), "b": second}, "max_size_cycle"), Rollback())
    assert model.pairs == [[each, each % 7] for each in AGAIN]


@pytest.mark.parametrize("how", ["dropout", "scaled"])
def test_a_rollback_is_equal_to_a_skip_if_all_is_repeated(how: str, tmp_path: Path) -> None:
    """Random numbers, the loss scale and the model's own numbers are set back, so that the steps are the same."""

    def run(action: str) -> tuple[Net, Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=7)
        plugins = [MixedPrecision("16-mixed", "cpu", scaler)] if how == "scaled" else []
        watch = StepWatch(on_finding=action, rollback_steps=12, strict=True)  # type: ignore[arg-type]  # a parameter
        model = Net(dropout=0.3)
        fit(model, tmp_path / action, loader((BAD,)), watch, plugins=plugins, max_epochs=2)
        return model, (scaler.state_dict(), torch.get_rng_state().tolist(), model.usual)

    (back, state), (skipped, other) = run("rollback"), run("skip")
    assert len(back.batches) > len(skipped.batches)
    assert_same(back, skipped)
    assert state == other


@pytest.mark.parametrize(
    ("bad", "options", "validated"),
    [
        (BAD, {"val_check_interval": 10}, [10, 20, 30, 46]),
        (29, {"val_check_interval": 10}, [10, 20, 32, 41, 51]),  # those of batch 20 come again
        (2, {"val_check_interval": 10}, [12, 22, 32, 42]),
        (STEPS - 1, {}, [49]),
    ],
)
def test_validations_come_after_the_same_batches(
    bad: int, options: dict[str, Any], validated: list[int], tmp_path: Path
) -> None:
    """None runs where the counts are set back, and the one that was due at the bad batch follows the last repeated."""
    model = Net()
    fit(model, tmp_path, loader((bad,)), Rollback(), validation=loader(steps=1), num_sanity_val_steps=0, **options)
    assert model.validated == validated


class InPlace(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch[0].mul_(2)
        return super().training_step(batch, batch_idx)


def test_a_step_may_write_to_its_batch(tmp_path: Path) -> None:
    """After the first such step, the batches are copied, also for a second repetition."""
    model, twin = InPlace(), InPlace()
    fit(model, tmp_path / "back", loader((BAD, 35)), Rollback())
    fit(twin, tmp_path / "without", loader(without=(BAD, 35)))
    assert_same(model, twin)
    assert model.batches.count(BAD - 1) == 3


class Overwrites(IterableDataset[Any]):
    """Writes each batch into the same memory, which torch cannot see."""

    def __iter__(self) -> Iterator[Any]:
        memory = None
        for batch in loader((BAD,)):
            memory = memory or batch
            for own, each in zip(memory, batch, strict=True):
                own.numpy()[:] = each.numpy()
            yield memory


class Spoiled(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == BAD - 1:
            next(self.net.parameters()).data[0, 0] = math.nan


@pytest.mark.parametrize(
    ("model", "batches", "reason"),
    [
        (InPlace, lambda: loader((2,)), "a batch has changed since"),
        (Net, lambda: DataLoader(Overwrites(), batch_size=None), "a batch has changed since"),
        (Spoiled, loader, "they have made a parameter that is not finite"),
        (Net, lambda: loader((BAD, BAD + 1, BAD + 2)), "they have led to a bad step again"),
    ],
)
def test_batches_that_cannot_come_again_are_left_out(
    model: Callable[[], Net], batches: Callable[[], Any], reason: str, tmp_path: Path
) -> None:
    """The good state is restored in any case, and the note has the reason."""
    trained = model()
    trainer = fit(trained, tmp_path, batches(), Rollback())
    assert all(bool(each.isfinite().all()) for each in trained.state_dict().values())
    assert trainer.global_step == STEPS
    assert f"and the batches since then do not come again ({reason})" in acted(tmp_path)[0].verdict


def test_a_lowered_rate_stays_lowered(tmp_path: Path) -> None:
    """A rollback behind a step at which the rate was lowered restores the state, and the schedule with this factor."""
    answers = iter(["lower_lr", "rollback"])
    watch = StepWatch(on_finding=lambda finding: next(answers), rollback_steps=12, strict=True)
    model = Net(schedule=one_cycle)
    trainer = fit(model, tmp_path, loader((28, BAD)), watch, max_steps=35)
    usual = fit(Net(schedule=one_cycle), tmp_path / "usual", loader(), max_steps=33)  # the steps that were left out
    rates = [each.optimizers[0].param_groups[0]["lr"] for each in (trainer, usual)]
    assert model.batches[BAD : BAD + 7] == [BAD, 24, 25, 26, 27, 29, 31]
    assert rates[0] == pytest.approx(0.5 * rates[1], rel=1e-3)


class Saved(Callback):
    """Saves a checkpoint after a number of batches."""

    def __init__(self, path: Path, batches: int) -> None:
        self.path, self.batches = path, batches

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if len(pl_module.batches) == self.batches:
            trainer.save_checkpoint(self.path)


class Resumable:
    """A loader that saves how many batches it has yielded."""

    def __init__(self, batches: Any) -> None:
        self.batches, self.place, self.start = list(batches), 0, 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        self.place, self.start = self.start, 0
        while self.place < len(self.batches):
            self.place += 1
            yield self.batches[self.place - 1]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["place"]


@pytest.mark.parametrize(("saved_after", "resumed_at"), [(31, 31), (34, 31), (37, 31), (38, 32)])
def test_a_checkpoint_goes_on_behind_the_batches_to_come_again(
    saved_after: int, resumed_at: int, tmp_path: Path
) -> None:
    """A fit that resumes at, during or after a repetition ends its epoch with the last batch and a validation."""
    path = tmp_path / "saved.ckpt"
    fit(Net(), tmp_path / "one", Resumable(loader((BAD,))), Rollback(), Saved(path, saved_after))
    assert torch.load(path, weights_only=False)["global_step"] == resumed_at
    model = Net()
    options = {"ckpt_path": path, "validation": loader(steps=1), "num_sanity_val_steps": 0}
    trainer = fit(model, tmp_path / "two", Resumable(loader((BAD,))), Rollback(), **options)
    assert model.batches == model.indices == list(range(resumed_at, STEPS))
    assert model.validated == [STEPS - resumed_at]
    assert trainer.global_step == STEPS


class Fetchers(Callback):
    """Notes the class of the fetcher, and how many batches are kept."""

    def __init__(self) -> None:
        self.kinds: set[type] = set()
        self.most = 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.kinds.add(type(trainer.fit_loop._data_fetcher))
        actions: Any = trainer.callbacks[0]._actions  # type: ignore[attr-defined]  # a list
        kept = None if actions is None else actions._batches
        self.most = max(self.most, 0 if kept is None else len(kept._batches))


@pytest.mark.parametrize(("action", "most"), [("warn", 0), ("skip", 0), ("rollback", 12)])
def test_batches_are_kept_for_a_rollback_only(action: Any, most: int, tmp_path: Path) -> None:
    """Otherwise, the fetcher is that of Lightning; and not more batches are kept than a rollback can need."""
    noted = Fetchers()
    fit(Net(), tmp_path, loader(), StepWatch(on_finding=action, rollback_steps=12), noted, max_epochs=2)
    assert [each.__module__ for each in noted.kinds] == ["lightning.pytorch.loops.fetchers"]
    assert len(vars(noted.kinds.pop()).get("__next__").__closure__ or ()) == (2 if most else 1)  # type: ignore[union-attr]
    assert noted.most == most


BAD_OF_RANKS = 11  # where the sampler of the ranks puts the row

SCRIPT = """
import sys
from pathlib import Path
import torch
from lightning_recorder import StepWatch
from tests.callbacks.test_repeated_batches import BAD, STEPS, Net, fit, loader

how, folder, is_written = sys.argv[1], Path(sys.argv[2]), len(sys.argv) > 3

class OfRanks(Net):
    def training_step(self, batch, batch_idx):
        if is_written and self.global_rank == 1 and batch_idx == 3:
            batch[0].mul_(1)
        return super().training_step(batch, batch_idx)

if __name__ == "__main__":
    watch = StepWatch(on_finding=how, rollback_steps=12, strict=True)
    model = OfRanks()
    trainer = fit(model, folder, loader((2 * BAD + 1,), steps=2 * STEPS), watch, strategy="ddp", devices=2)
    torch.save((model.state_dict(), model.batches, trainer.global_step), folder / f"{trainer.global_rank}.pt")
"""


def in_two_processes(folder: Path, how: str, *arguments: str) -> list[Any]:
    place = folder / "-".join([how, *arguments])
    place.mkdir()
    script = folder / "train.py"
    script.write_text(SCRIPT)
    codes, log = forks.run(script, how, place, *arguments, folder=folder, ranks=2, timeout_s=120)
    assert codes == [0, 0], log[-3000:]
    return [torch.load(place / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.slow
def test_the_batches_come_again_on_all_ranks_or_none(tmp_path: Path) -> None:
    """The batches of both ranks come again together; if one of them cannot, no rank repeats any."""
    skipped, back = in_two_processes(tmp_path, "skip"), in_two_processes(tmp_path, "rollback")
    for (state, once, _), (found, batches, steps) in zip(skipped, back, strict=True):
        assert_same(found, state)
        assert batches == once[: BAD_OF_RANKS + 1] + once[:BAD_OF_RANKS] + once[BAD_OF_RANKS + 1 :]
        assert steps == STEPS
    (note,) = acted(tmp_path / "rollback")
    assert "and the batches since then come again" in note.verdict
    written = in_two_processes(tmp_path, "rollback", "written")
    assert [batches for _, batches, _ in written] == [once for _, once, _ in skipped]
    (note,) = acted(tmp_path / "rollback-written")
    assert "do not come again (those of another rank cannot come again)" in note.verdict
