"""The loss and the gradient norm of each step reach the files soon, and survive a checkpoint."""

from __future__ import annotations

import time
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_recorder import StepWatch, open_recording
from lightning_recorder.recordings import records_path
from lightning_recorder.watch import StepSeries
from tests.callbacks.small import BATCHES, EPOCHS, go


def read_until(folder: Path, count: int) -> list[int]:
    """Return the recorded steps when there are as many of them."""
    path = records_path(folder / "recorder", "watch")
    for _ in range(2000):
        if path.exists() and path.read_bytes().count(b"\n") > count:  # and a header
            break
        time.sleep(0.01)
    steps: list[int] = open_recording(folder)["watch"].steps
    return steps


def test_a_step_is_written_without_another_one(tmp_path: Path) -> None:
    """A few steps reach the file while no further step follows, the first one as well as later ones."""
    series = StepSeries(tmp_path / "recorder", None, label="watch", is_logged=bool)
    for count in (1, 2, 3):
        series.add(count - 1, 0, 1.0, 0.5)
        assert read_until(tmp_path, count) == list(range(count))
    series.end()


def test_steps_in_quick_succession_are_all_written(tmp_path: Path) -> None:
    """However many steps come in while others are being written, each is written once, in order."""
    series = StepSeries(tmp_path / "recorder", None, label="watch", is_logged=bool)
    for step in range(5000):
        series.add(step, 0, float(step), 0.5)
    series.wait()
    watch = open_recording(tmp_path)["watch"]
    assert watch.steps == list(range(5000))
    assert watch["loss", "out"].statistic("value").tolist() == list(map(float, range(5000)))
    series.end()


class Reading(Callback):
    """Reads the record file when a checkpoint is complete."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps: list[list[int]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        trainer.save_checkpoint(self.folder / "saved.ckpt")
        self.steps.append(open_recording(self.folder)["watch"].steps)


def test_a_checkpoint_comes_after_the_steps_before_it(tmp_path: Path) -> None:
    """When a checkpoint is complete, all steps that it includes are in the file, and the series is that of any run."""
    reading = Reading(tmp_path)
    go(tmp_path, [StepWatch(), reading])
    assert reading.steps == [list(range(step + 1)) for step in range(EPOCHS * BATCHES)]
    go(tmp_path / "bare", [StepWatch()])
    found, expected = (open_recording(each)["watch"].values("value") for each in (tmp_path, tmp_path / "bare"))
    assert found.tolist() == expected.tolist()
