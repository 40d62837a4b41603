"""A small model, interruptible fits of it, and the output that they show."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_recorder import (
    MemorySink,
    RecorderWarning,
)
from tests.callbacks.models import Classifier, digits

BATCHES = 4
EPOCHS = 2
WEIGHTS_ONLY: dict[str, Any] = (
    {"weights_only": True} if "weights_only" in inspect.signature(Trainer.fit).parameters else {}
)


class Small(Classifier):
    """Two linear layers, without randomness."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU())  # type: ignore[assignment]  # a different encoder
        self.dropout = nn.Identity()  # type: ignore[assignment]  # a different module
        self.head = nn.Linear(8, 10)


def small() -> Small:
    """Return the model, always with the same parameters."""
    seed_everything(1, verbose=False)
    return Small()


class Resumable(DataLoader[tuple[Tensor, ...]]):
    """The batches of :func:`digits`, which resume after those that were used before a checkpoint."""

    def __init__(self) -> None:
        dataset: Any = digits(BATCHES).dataset
        super().__init__(dataset, batch_size=8)
        self.given = self.passed_over = 0

    def __iter__(self) -> Any:
        first, self.passed_over = self.passed_over, 0
        self.given = first
        return self._from(first)

    def _from(self, first: int) -> Iterator[Any]:
        for index, batch in enumerate(super().__iter__()):
            if index >= first:
                self.given = index + 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.passed_over = state_dict["given"] % BATCHES


def go(
    folder: Path,
    callbacks: list[Callback],
    *,
    model: Small | None = None,
    ckpt: Path | None = None,
    validation: bool = False,
    **options: Any,
) -> Trainer:
    """Train the small model, or resume from a checkpoint."""
    trainer = Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        **{"max_epochs": EPOCHS, "enable_checkpointing": False, "logger": False, **options},
    )
    trainer.fit(model or small(), Resumable(), digits(2) if validation else None, ckpt_path=ckpt, **WEIGHTS_ONLY)
    return trainer


def shown(sink: MemorySink, start: int = 0) -> dict[tuple[str, int], Any]:
    """Return all scalars and histograms from a step on, by tag and step, in a form that compares bitwise."""
    scalars = {(tag, step): repr(value) for tag, by_step in sink.scalars.items() for step, value in by_step.items()}
    histograms = {
        (tag, step): (*(each.tolist() for each in (seen.edges, seen.counts)), seen.min, seen.max, seen.sum)
        for tag, by_step in sink.histograms.items()
        for step, seen in by_step.items()
    }
    return {key: value for key, value in {**scalars, **histograms}.items() if key[1] >= start}


def warnings_by(run: Callable[[], object]) -> list[str]:
    """Return the warnings of this package from a run."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(each.message) for each in caught if each.category is RecorderWarning]
