"""A training task of the corpus: a net, its batches, its loss and its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

__all__ = ["HEALTHY", "Task", "adam", "classify", "digits", "healthy", "images", "random", "sgd", "warm"]

_DIGITS = load_digits()
IMAGES = torch.tensor(_DIGITS.images / 16, dtype=torch.float32).sub(0.3).div(0.38)  # [1797, 8, 8], mean 0, std 1
LABELS = torch.tensor(_DIGITS.target, dtype=torch.int64)


def random(step: int) -> torch.Generator:
    """Return the random generator of a step."""
    return torch.Generator().manual_seed(1_000 + step)


def digits(step: int, size: int = 32) -> tuple[Tensor, Tensor]:
    """Return flat images, ``[size, 64]``, and their classes."""
    chosen = torch.randint(0, len(LABELS), (size,), generator=random(step))
    return IMAGES[chosen].flatten(1), LABELS[chosen]


def images(step: int, size: int = 32) -> tuple[Tensor, Tensor]:
    """Return images, ``[size, 1, 8, 8]``, and their classes."""
    flat, labels = digits(step, size)
    return flat.view(-1, 1, 8, 8), labels


class _Batches(Dataset[Any]):
    def __init__(self, batch: Callable[[int], Any], first: int, count: int) -> None:
        self._batch, self._first, self._count = batch, first, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self._batch(self._first + index)


def classify(net: nn.Module, batch: Any) -> Tensor:
    """Return the cross entropy of the net's logits."""
    inputs, labels = batch
    return nn.functional.cross_entropy(net(inputs).float(), labels)


def adam(rate: float = 1e-3, **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    """Return a function that makes Adam, or AdamW if a weight decay is given."""
    kind = torch.optim.AdamW if "weight_decay" in options else torch.optim.Adam
    return lambda parameters: kind(parameters, lr=rate, **options)


def sgd(rate: float = 0.05, momentum: float = 0.9, **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    """Return a function that makes SGD."""
    return lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=momentum, **options)


def warm(optimizer: torch.optim.Optimizer) -> Any:
    """Raise the learning rate from zero in the first 30 steps."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 30, 1.0))


class Task(LightningModule):
    """A task with a net under the name ``net``.

    Args:
        net: The net.
        batch: A function from the step to a batch.
        loss: A function from the net and a batch to the loss.
        optimizer: A function from parameters or groups to the optimizer; by default Adam.
        schedule: A function from the optimizer to a scheduler that advances with each step.
        trainer: Further arguments of the trainer.
        steps: The number of optimizer steps.
    """

    def __init__(
        self,
        net: nn.Module,
        batch: Callable[[int], Any] = digits,
        loss: Callable[[Any, Any], Tensor] = classify,
        *,
        optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
        schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
        trainer: dict[str, Any] | None = None,
        steps: int = 120,
    ) -> None:
        super().__init__()
        self.net = net
        self.batch, self.loss, self.optimizer, self.schedule = batch, loss, optimizer or adam(), schedule
        self.options = trainer or {}
        self.steps = steps
        self.events: dict[int, Callable[[], object]] = {}
        """Functions that run before a step."""
        self.groups: Callable[[], Any] = lambda: [each for each in self.net.parameters() if each.requires_grad]
        """The parameters of the optimizer, or its groups."""
        self.losses: list[float] = []

    @override
    def training_step(self, batch: Any, index: int) -> Tensor:
        if index in self.events:
            self.events[index]()
        loss = self.loss(self.net, batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.loss(self.net, batch)

    @override
    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.groups())
        if self.schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.schedule(optimizer), "interval": "step"}}

    @override
    def train_dataloader(self) -> Any:
        count = self.steps * self.options.get("accumulate_grad_batches", 1)
        return DataLoader(_Batches(self.batch, 0, count), batch_size=None)

    @override
    def val_dataloader(self) -> Any:
        return DataLoader(_Batches(self.batch, 100_000, 4), batch_size=None)


HEALTHY: dict[str, Callable[[], Task]] = {}
"""A function that makes the task, by name."""


def healthy(make: Callable[[], Task]) -> Callable[[], Task]:
    """Register a healthy task."""
    HEALTHY[make.__name__] = make
    return make
