"""The records have the metrics that the user logs, and the learning rates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_recorder import StepWatch, open_recording
from lightning_recorder.recordings import WATCH, Series, compare
from lightning_recorder.records.file import LOGGED


class Logging(LightningModule):
    """A model that logs the index of the batch in several ways."""

    def __init__(self, rate: float = 0.1) -> None:
        super().__init__()
        self.net, self.rate = nn.Linear(2, 1), rate

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net(batch[0]).square().mean()
        self.log("index", float(batch_idx))
        self.log("mean_index", float(batch_idx), on_step=False, on_epoch=True)
        self.log("hidden", 1.0, logger=False)
        return loss  # type: ignore[no-any-return]  # nn.Linear is untyped

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.net(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.rate)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def logged(folder: Path, batches: int = 6, epochs: int = 2, rate: float = 0.1, **options: Any) -> Series:
    """Train, and return the records of what was logged."""
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.ones(batches, 2)))
    trainer = Trainer(
        default_root_dir=folder,
        max_epochs=epochs,
        accelerator="cpu",
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[StepWatch()],
        **{"logger": False, "log_every_n_steps": 2, **options},
    )
    trainer.fit(Logging(rate), loader, DataLoader(TensorDataset(torch.ones(2, 2))))
    return open_recording(folder).run[WATCH].of(LOGGED)


def curve(series: Series, name: str) -> dict[int, float]:
    """Return the recorded values of a name by step."""
    place = [site.name for site in series.sites].index(name)
    seen = series.seen()[:, place].tolist()
    values = series.values("value")[:, place].tolist()
    return {step: value for step, value, is_seen in zip(series.steps, values, seen, strict=True) if is_seen}


def test_metrics_and_rates_have_the_steps_of_the_loggers(tmp_path: Path) -> None:
    """Step, epoch and validation metrics have the steps at which Lightning logs them; the rate is that of the step."""
    found = logged(tmp_path)
    assert curve(found, "index") == {step: float(step % 6) for step in range(12)}
    assert curve(found, "mean_index") == {6: 2.5, 12: 2.5}
    assert sorted(curve(found, "val/loss")) == [5, 11]
    rates = curve(found, "learning rate")
    assert [rates[step] for step in range(12)] == [pytest.approx(0.1 * 0.5**step) for step in range(12)]
    assert "hidden" not in {site.name for site in found.sites}


def test_a_long_run_has_the_steps_that_are_logged(tmp_path: Path) -> None:
    """After 16 steps, a record is made only of the steps that Lightning logs."""
    found = logged(tmp_path, batches=100, epochs=1, log_every_n_steps=20)
    assert list(curve(found, "index")) == [*range(16), 19, 39, 59, 79, 99]


def test_runs_are_equal_if_only_logged_values_differ(tmp_path: Path) -> None:
    """A comparison leaves out what is logged, which may be a time; it can be asked for."""
    for name, batches in (("a", 6), ("b", 5)):
        logged(tmp_path / name, batches, rate=0.0, max_steps=5)
    one, other = (open_recording(tmp_path / name).run for name in "ab")
    assert compare(one, other).same
    assert not compare(one, other, stage=LOGGED).same
