"""The cost of everything a user pays: whole fits of a Trainer, with all that is written, as ratios to a bare fit."""

from __future__ import annotations

import gc
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter

from lightning_recorder import ActivationRecorder, GradientRecorder, Outputs, default_recorders
from tests.benchmarks.models import Case, gpt2, mlp, resnet
from tests.benchmarks.styles import add_histogram, composer_numbers, hand_written, wandb_watch

STEPS: dict[Callable[[], Case], int] = {mlp: 120, resnet: 40, gpt2: 12}
"""The steps of a fit of each model."""
LONG = {mlp: 1000}
"""The steps of a fit in which each 50th step is recorded."""

HEADER = [
    "| model | style | steps | s per fit | median of ratios to bare | their range | of the processor time |",
    "|---|---|---|---|---|---|---|",
]


class Model(LightningModule):
    """A model that is trained on the same batch in each step."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.net = case.module
        self.loss = case.loss

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Style(Callback):
    """Records in the style of another package, in each step.

    Args:
        style: A context manager of ``styles.py``, which takes the module.
    """

    def __init__(self, style: Callable[[nn.Module], Any]) -> None:
        self._style = style
        self._stack = ExitStack()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = self._stack.enter_context(self._style(pl_module.net))  # type: ignore[arg-type]  # a module

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._step(batch_idx, lambda: None)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stack.close()


def composer(writer: SummaryWriter, tag: str, number: int, tensor: Tensor) -> None:
    """Write the statistics of Composer's ActivationMonitor, with one call for each number, as it does."""
    for name, value in composer_numbers(tensor).items():
        writer.add_scalar(f"{tag}/{name}", value, number)


def recorders(every: int, outputs: Outputs = Outputs()) -> Callable[[], list[Callback]]:
    """This package's callbacks with their defaults otherwise."""
    return lambda: [kind(every_n_train_steps=every, outputs=outputs) for kind in (ActivationRecorder, GradientRecorder)]


STYLES: dict[str, Callable[[], list[Callback]]] = {
    "bare": list,
    "lightning_recorder, every step": recorders(1),
    "lightning_recorder without pictures, every step": recorders(1, Outputs(plots=False)),
    "lightning_recorder without findings, every step": recorders(1, Outputs(findings=False)),
    "lightning_recorder, every 50th step": recorders(50),
    "lightning_recorder without findings, every 50th step": recorders(50, Outputs(findings=False)),
    "lightning_recorder with parameters and graph, every 50th step": lambda: [*default_recorders()],
    "wandb.watch, all, every step": lambda: [Style(wandb_watch)],
    "Composer's numbers, every step": lambda: [Style(hand_written(composer))],
    "TensorBoard add_histogram, every step": lambda: [Style(hand_written(add_histogram))],
}


@dataclass(frozen=True)
class Fit:
    """The time of a fit, from its first batch until everything is written."""

    wall_s: float
    processor_s: float


class Timer(Callback):
    """Notes the time of the first batch."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        wait_for_device()
        self.wall_s, self.processor_s = time.perf_counter(), time.process_time()


def run_fit(make: Callable[[], Case], style: str, steps: int) -> Fit:
    """Train a new model, and write to a new folder."""
    torch.manual_seed(0)
    gc.collect()
    timer = Timer()
    with tempfile.TemporaryDirectory() as folder, quiet():
        trainer = Trainer(
            max_epochs=1,
            accelerator=torch.get_default_device().type,
            devices=1,
            callbacks=[timer, *STYLES[style]()],
            logger=TensorBoardLogger(Path(folder)),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Model(make()), DataLoader(range(steps)))  # type: ignore[arg-type]  # a sequence is a dataset
        wait_for_device()
        return Fit(time.perf_counter() - timer.wall_s, time.process_time() - timer.processor_s)


def wait_for_device() -> None:
    """Wait until a GPU has done all its work."""
    if torch.get_default_device().type == "cuda":
        torch.cuda.synchronize()


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the messages of Lightning and of the recorders."""
    log = logging.getLogger("lightning.pytorch")
    level = log.level
    log.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    log.setLevel(level)


def fits_table(models: list[str], styles: list[str], repeats: int) -> Iterator[str]:
    """Yield the rows of the table. The styles take turns, so that a slow machine is slow for all of them."""
    for make, steps in [*STEPS.items(), *LONG.items()]:
        if models and make.__name__ not in models:
            continue
        is_long = steps == LONG.get(make)
        chosen = [style for style in STYLES if style == "bare" or ("50th" in style) == is_long]
        chosen = [style for style in chosen if style == "bare" or any(part in style for part in styles)]
        yield from _rows(make, chosen, steps, repeats)


def _failure(make: Callable[[], Case], style: str) -> str | None:
    """Run a short fit, which also does what comes only once, and return the name of its error."""
    try:
        run_fit(make, style, 3)
    except Exception as error:  # noqa: BLE001 - other packages raise what they like
        return type(error).__name__
    return None


def _rows(make: Callable[[], Case], styles: list[str], steps: int, repeats: int) -> Iterator[str]:
    name = make().name
    for style in list(styles):
        error = _failure(make, style)
        if error is not None:
            styles.remove(style)
            yield f"| {name} | {style} | {steps} | raises {error} | | | |"
    fits: dict[str, list[Fit]] = {style: [] for style in styles}
    for _ in range(repeats):
        for style in styles:
            fits[style].append(run_fit(make, style, steps))
    for style in styles:
        pairs = list(zip(fits[style], fits["bare"], strict=True))
        walls = [mine.wall_s / bare.wall_s for mine, bare in pairs]
        processor = statistics.median(mine.processor_s / bare.processor_s for mine, bare in pairs)
        wall_s = statistics.median(each.wall_s for each in fits[style])
        yield (
            f"| {name} | {style} | {steps} | {wall_s:.2f} | {statistics.median(walls):.2f} "
            f"| {min(walls):.2f} to {max(walls):.2f} | {processor:.2f} |"
        )
