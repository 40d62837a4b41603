"""Queries about a trainer's run: its step, its folder, and the reasons for an empty recording."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger

__all__ = [
    "Silence",
    "gradient_factor",
    "logged_step",
    "recorder_directory",
    "stepped",
    "why_no_files",
    "why_no_training",
    "why_no_validation",
]


class Silence(NamedTuple):
    """The reason why a run recorded nothing."""

    why: str
    fix: str = ""
    """A sentence with the fix; empty if the user asked for this or if there is nothing to fix."""
    what: str = "recorded nothing"


def logged_step(trainer: Trainer) -> int:
    """Return the step at which ``self.log`` would log now: the number of batches that ended in an optimiser step.

    ``global_step`` is not used, because it counts a batch twice if two optimisers step in it and so does not match the
    x-axis of the user's own metrics. The attribute is private, but Lightning's own monitors use it. If it does not
    exist, ``global_step`` is returned.
    """
    try:
        return int(trainer.fit_loop.epoch_loop._batches_that_stepped)
    except AttributeError:
        return int(trainer.global_step)


def recorder_directory(trainer: Trainer) -> Path | None:
    """Return the folder of the run's recordings.

    The folder is in ``trainer.log_dir``, or in ``default_root_dir`` if the logger has no folder. If the first logger
    uses one folder for all runs, as the W&B logger does, it is in the subfolder ``<name>/<version>``, beside the
    checkpoints. Return ``None`` for a ``fast_dev_run`` or a barebones run, which write no files, and if the folder is
    not local.

    Note:
        Must be called on every rank, because Lightning broadcasts the folder.
    """
    directory = trainer.log_dir or trainer.default_root_dir
    is_short = trainer.fast_dev_run or trainer.barebones  # type: ignore[attr-defined]  # set in Trainer.__init__
    if is_short or "://" in directory:
        return None
    if trainer.loggers and not _has_folder_of_run(trainer.loggers[0]):
        directory = trainer.strategy.broadcast(str(Path(directory, *_run_of(trainer.loggers[0]))))
    return Path(directory) / "recorder"


def why_no_files(trainer: Trainer, directory: Path | None) -> str:
    """Return the reason why a run has no folder for recordings, or an empty string if it has one.

    Args:
        trainer: The trainer.
        directory: The folder that :func:`recorder_directory` returned. It is not asked again, because that is a
            collective call.
    """
    if directory is not None:
        return ""
    if trainer.fast_dev_run:  # type: ignore[attr-defined]  # set in Trainer.__init__
        return "fast_dev_run writes no files"
    return "a barebones run writes no files" if trainer.barebones else "its log folder is no local folder"


def why_no_training(trainer: Trainer) -> Silence:
    """Return the reason why a fit has trained on no batch."""
    if trainer.limit_train_batches == 0:
        return Silence("Trainer(limit_train_batches=0) trains on no batch", "Raise limit_train_batches.")
    if trainer.max_steps == 0 or trainer.max_epochs == 0:
        limit = "max_steps" if trainer.max_steps == 0 else "max_epochs"
        return Silence(f"Trainer({limit}=0) trains on no batch", f"Raise {limit}.")
    if trainer.global_step:
        return Silence("the run had ended before, so this fit trained on no batch")
    return Silence("the fit trained on no batch", "Check that the training loader has batches.")


def why_no_validation(trainer: Trainer) -> Silence:
    """Return the reason why a fit has run no validation."""
    if trainer.limit_val_batches == 0:
        return Silence("Trainer(limit_val_batches=0) validates nothing", "Raise limit_val_batches.")
    if not trainer.enable_validation:
        return Silence("the fit had no validation", "Give it a validation loader and a validation_step.")
    every = (
        f"check_val_every_n_epoch={trainer.check_val_every_n_epoch}, val_check_interval={trainer.val_check_interval}"
    )
    return Silence(
        f"the fit ran no validation but the sanity check ({every})", "Validate more often, or train for longer."
    )


def _has_folder_of_run(logger: Logger) -> bool:
    """Return True if the logger gives each run its own ``log_dir``."""
    return any(each.__name__ in ("CSVLogger", "TensorBoardLogger") for each in type(logger).__mro__)


def _run_of(logger: Logger) -> list[str]:
    """Return the logger's name and version of the run, as Lightning uses them in the path of checkpoints."""
    try:
        name, version = logger.name, logger.version
    except Exception:  # noqa: BLE001 - a user's logger may raise anything, and the other ranks wait for the broadcast
        return []
    named = version if isinstance(version, str) or version is None else f"version_{version}"
    return [str(part) for part in (name, named) if part]


def stepped(trainer: Trainer, batch_idx: int) -> bool:
    """Return True if ``self.log`` counts a step after the batch that ends. Equal on all ranks.

    With gradient accumulation, this is the last of the accumulated batches. In manual optimisation, the trainer does
    not accumulate batches, so it is every batch.
    """
    is_last = trainer.is_last_batch or batch_idx + 1 == trainer.num_training_batches
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or is_last


def gradient_factor(trainer: Trainer, pl_module: LightningModule, scale: float) -> float:
    """Return the factor that converts a gradient of the backward pass to the gradient of the ``training_step`` loss.

    Lightning divides the loss by the number of accumulated batches, and a ``GradScaler`` multiplies it by ``scale``.
    The factor undoes both. In manual optimisation the user accumulates, so the factor only undoes the scale.
    """
    return (trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1) / scale
