"""Tests of the garbage collector during a recording."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_recorder import ActivationRecorder, GradientRecorder
from lightning_recorder.graph import GraphCapture
from lightning_recorder.internals.garbage_collection import RareCollections


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize("before", [(700, 10, 10), (0, 10, 10), (100_000, 5, 5)])
def test_a_capture_lets_the_collector_run_rarely(before: tuple[int, int, int]) -> None:
    """During a capture, collections are rarer but not off; nested captures and errors restore the setting."""
    gc.set_threshold(*before)
    expected = (50_000, 10, 10) if before[0] == 700 else before
    net = nn.Linear(1, 1)

    def fail() -> None:
        with GraphCapture(net, torch.ones(1)):
            assert gc.get_threshold() == expected
            with GraphCapture(net, torch.ones(1)):
                net(torch.ones(1))
            assert gc.get_threshold() == expected
            net(torch.ones(2))

    with pytest.raises(RuntimeError):
        fail()
    assert gc.get_threshold() == before


def test_a_setting_of_the_user_is_kept() -> None:
    """A threshold that the program sets during a recording stays."""
    collector = RareCollections()
    collector.hold()
    gc.set_threshold(1234)
    collector.release()
    assert gc.get_threshold()[0] == 1234


def test_holding_twice_keeps_the_first_setting() -> None:
    """A step that begins again before it ended does not lose the thresholds of the program."""
    gc.set_threshold(700, 10, 10)
    collector = RareCollections()
    collector.hold()
    collector.hold()
    collector.release()
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("fails", [False, True])
def test_recorded_steps_let_the_collector_run_rarely(fails: bool, tmp_path: Path) -> None:
    """Collections are rarer in recorded steps alone, with several recorders, and after an error in the step."""
    gc.set_threshold(700, 10, 10)
    seen: dict[int, int] = {}

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(1, 1)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            seen[self.global_step] = gc.get_threshold()[0]
            if fails and self.global_step == 3:
                raise ValueError("an error of the user")
            loss: Tensor = self.fc(batch.reshape(1, 1).float()).sum()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    callbacks: list[Callback] = [kind(every_n_train_steps=2) for kind in (ActivationRecorder, GradientRecorder)]
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        default_root_dir=tmp_path,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=2,
    )
    with pytest.raises(ValueError, match="an error of the user") if fails else nullcontext():
        trainer.fit(Model(), DataLoader(range(8)))  # type: ignore[arg-type]  # a sequence is a dataset
    assert seen == {0: 50_000, 1: 50_000, 2: 700, 3: 50_000}
    assert gc.get_threshold() == (700, 10, 10)
