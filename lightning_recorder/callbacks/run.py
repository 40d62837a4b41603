"""What the callbacks ask of a trainer's run."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger

__all__ = ["gradient_factor", "logged_step", "recorder_directory", "stepped"]


def logged_step(trainer: Trainer) -> int:
    """The step at which ``self.log`` would log now: the number of batches so far that ended in an optimiser step.

    ``global_step`` counts twice where two optimisers step in a batch, so it is not the axis of the user's own curves.
    The attribute is private, though Lightning's own monitors use it; without it the answer is ``global_step``.
    """
    return int(getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", trainer.global_step))


def recorder_directory(trainer: Trainer) -> Path | None:
    """The folder of the run's recordings.

    It lies in ``trainer.log_dir``, or where the logger has no folder in ``default_root_dir``. Where the first logger
    has one folder for all of its runs, as that of W&B, it lies in ``<name>/<version>`` there, beside the checkpoints.
    The answer is ``None`` in a ``fast_dev_run`` or a bare-bones run, which leave nothing behind, and where the folder
    is no local one.

    Note:
        Every rank must ask: Lightning broadcasts the folder.
    """
    directory = trainer.log_dir or trainer.default_root_dir
    bare = trainer.fast_dev_run or trainer.barebones  # type: ignore[attr-defined]  # set in Trainer.__init__
    if bare or "://" in directory:
        return None
    if trainer.loggers and not _has_folder_of_run(trainer.loggers[0]):
        directory = trainer.strategy.broadcast(str(Path(directory, *_run_of(trainer.loggers[0]))))
    return Path(directory) / "recorder"


def _has_folder_of_run(logger: Logger) -> bool:
    """Whether ``trainer.log_dir`` is that of one run."""
    return any(each.__name__ in ("CSVLogger", "TensorBoardLogger") for each in type(logger).__mro__)


def _run_of(logger: Logger) -> list[str]:
    """What a logger calls the run, in the way in which Lightning names the folder of its checkpoints."""
    try:
        name, version = logger.name, logger.version
    except Exception:  # noqa: BLE001 - the other ranks wait for the answer, whatever a logger of the user's raises
        return []
    named = version if isinstance(version, str) or version is None else f"version_{version}"
    return [str(part) for part in (name, named) if part]


def stepped(trainer: Trainer, batch_idx: int) -> bool:
    """Whether ``self.log`` counts a step behind the batch that ends; the same on all ranks.

    So of accumulated batches the last one, and in manual optimisation, in which batches are not accumulated by the
    trainer, every batch.
    """
    is_last = trainer.is_last_batch or batch_idx + 1 == trainer.num_training_batches
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or is_last


def gradient_factor(trainer: Trainer, pl_module: LightningModule, scale: float) -> float:
    """What turns the gradient that a backward pass computes into that of the loss which ``training_step`` returned.

    Lightning divides that loss by the number of accumulated batches, and a ``GradScaler`` multiplies it by its scale;
    both are taken out again. In manual optimisation the user accumulates, so there only the scale is.
    """
    return (trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1) / scale
