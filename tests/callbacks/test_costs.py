"""The time and the memory of each module are in the records of a fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_recorder import ArgumentError, CostRecorder, default_recorders, open_recording
from lightning_recorder.callbacks import Outputs
from lightning_recorder.taps import Site
from tests.callbacks.models import Classifier


def fit(folder: Path, *, every: int, steps: int = 8) -> None:
    recorders = default_recorders(every_n_train_steps=every, costs=True, outputs=Outputs(plots=False), strict=True)
    images, classes = torch.randn(16 * steps, 1, 8, 8), torch.randint(0, 10, (16 * steps,))
    Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[*recorders],
    ).fit(Classifier(), DataLoader(TensorDataset(images, classes), batch_size=16))


def test_costs_are_recorded_after_the_steps_of_others(tmp_path: Path) -> None:
    """Each module that is called has its time and its memory, in the steps after those that others record."""
    fit(tmp_path, every=3)
    run = open_recording(tmp_path)
    assert run["activations"].steps == [0, 2, 5]
    costs = run["costs"]
    assert costs.steps == [1, 3, 6]
    names = [name for name, _ in Classifier().named_modules() if name]
    for path in ("forward_ms", "backward_ms", "saved_bytes"):
        assert {site.name for site in costs if site.path == path} == set(names)
    image = 16 * 8 * 8 * 4
    saved = {name: costs[Site(name, "saved_bytes")].statistic("mean").tolist() for name in names}
    assert saved["encoder.conv1"] == [image] * 3  # its input
    assert saved["encoder.norm"] == [4 * image + 2 * 4 * 4] * 3  # its input, with mean and deviation of each channel
    assert saved["encoder.conv2"] == [0] * 3  # its input is the output that the activation before it keeps


def test_costs_of_each_step(tmp_path: Path) -> None:
    """With an interval of one step, each step but the first one is measured."""
    fit(tmp_path, every=1, steps=4)
    assert open_recording(tmp_path)["costs"].steps == [1, 2, 3]


def test_costs_are_off_by_default() -> None:
    """The default set has no recorder of costs; an argument that is no truth value raises."""
    assert not any(isinstance(each, CostRecorder) for each in default_recorders())
    with pytest.raises(ArgumentError, match="costs"):
        default_recorders(costs="yes")  # type: ignore[arg-type]  # on purpose
