"""Models and fits that the callback tests share."""

from __future__ import annotations

import atexit
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Encoder(nn.Module):
    """A convolution, a normalization and an in-place activation, then a second convolution with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.conv1(x)))
        return torch.flatten(F.relu(x + self.conv2(x)), 1)


class Classifier(LightningModule):
    """A small image classifier that stores the loss of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(4 * 8 * 8, 10)
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.dropout(self.encoder(x)))
        return logits

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.losses.append(loss.detach().clone())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class LeaveGroup(Callback):
    """Leaves the process group when the process ends: gloo's threads may otherwise abort it (pytorch#190489)."""

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        atexit.register(leave_group)


def leave_group() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


LEAVES = ["encoder.conv1", "encoder.norm", "encoder.relu", "encoder.conv2", "dropout", "head"]
"""The leaf modules of :class:`Classifier`, in order."""


def digits(batches: int = 6, batch_size: int = 8) -> DataLoader[tuple[Tensor, ...]]:
    """Return fixed batches of 8×8 images with one class each."""
    generator = torch.Generator().manual_seed(3)
    images = torch.rand(batches * batch_size, 1, 8, 8, generator=generator)
    classes = torch.randint(0, 10, (batches * batch_size,), generator=generator)
    return DataLoader(TensorDataset(images, classes), batch_size=batch_size)


def fit(model: LightningModule, folder: Path, callbacks: Sequence[Callback] = (), **options: Any) -> Trainer:
    """Train on :func:`digits`, seeded, on the CPU and without console output."""
    seed_everything(5, verbose=False)
    loader, validation = options.pop("loader", None), options.pop("validation", None)
    options = {"max_epochs": 1, "log_every_n_steps": 2, "enable_checkpointing": False, **options}
    trainer = Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model, loader or digits(), validation)
    return trainer


def events(trainer: Trainer, folder: str = "recorder") -> EventAccumulator:
    """Return the content of the recorders' event file; with ``"."``, that of the file ``self.log`` writes."""
    with warnings.catch_warnings():
        # size_guidance 0 keeps all events; by default, TensorBoard keeps a sample.
        accumulator = EventAccumulator(
            str(Path(str(trainer.log_dir), folder)), size_guidance={"scalars": 0, "histograms": 0, "images": 0}
        )
        accumulator.Reload()
    return accumulator


def hooks_left(model: nn.Module) -> list[str]:
    """Return the names of the modules and parameters that still have a hook."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    left = [name for name, module in model.named_modules() if any(getattr(module, kind) for kind in kinds)]
    return left + [name for name, parameter in model.named_parameters() if parameter._backward_hooks]
