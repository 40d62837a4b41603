"""Queries about a trainer's run: its step, its folder, its loss scale and its ranks."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch

from lightning_recorder.callbacks.lightning import LightningModule, Logger, Trainer
from lightning_recorder.disk import attempt, fits
from lightning_recorder.errors import warn
from lightning_recorder.folder_lock import FolderLock, lock_folder
from lightning_recorder.internals.module_tree import parameters_of
from lightning_recorder.records.file import FURTHER_RUN
from lightning_recorder.statistics import EvaluationRecorder, Exchange, RunRecorder

__all__ = [
    "LossScale",
    "averaged_ranks",
    "calls_closure_once",
    "claimed_directory",
    "decline",
    "device_of",
    "exclusive_directory",
    "gradient_factor",
    "is_automatic",
    "largest_rate",
    "logged_step",
    "make_directory",
    "merge_ranks",
    "recorder_directory",
    "release_directory",
    "running_function",
    "runs_no_model_after_loss",
    "stepped",
]

_FOLDER_BYTES = 4096  # the size of an empty folder
_MOST_RUNS = 10_000  # the maximum number of simultaneous runs in one folder

# For each trainer, the results of :func:`recorder_directory` and :func:`exclusive_directory`.
_exclusive: weakref.WeakKeyDictionary[Trainer, tuple[Path, Path]] = weakref.WeakKeyDictionary()


def logged_step(trainer: Trainer) -> int:
    """Return the step at which ``self.log`` would log now: the number of batches that ended in an optimizer step.

    ``global_step`` counts a batch twice if two optimizers step in it, so it does not match the x-axis of the user's own
    metrics. This function therefore reads a private attribute, which Lightning's own monitors use as well. Without this
    attribute, ``global_step`` is returned.
    """
    try:
        return int(trainer.fit_loop.epoch_loop._batches_that_stepped)
    except AttributeError:
        return int(trainer.global_step)


def largest_rate(trainer: Trainer) -> float | None:
    """Return the largest learning rate of all optimizers, or None if it is not known."""
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    return max((float(group["lr"]) for group in groups if "lr" in group), default=None)


def recorder_directory(trainer: Trainer) -> Path | None:
    """Return the folder of the run's recordings.

    The folder is in ``trainer.log_dir``, or in ``default_root_dir`` if the logger has no folder. If the first logger
    uses one folder for all runs, as the W&B logger does, the folder is in the subfolder ``<name>/<version>`` of that
    folder, beside the checkpoints. Return ``None`` if the folder is not local, and for a ``fast_dev_run`` or a
    barebones run, which write no files.

    Note:
        Must be called on every rank, because Lightning broadcasts the folder.
    """
    directory = trainer.log_dir or trainer.default_root_dir
    is_short = trainer.fast_dev_run or trainer.barebones  # type: ignore[attr-defined]  # set in Trainer.__init__
    if is_short or "://" in directory:
        return None
    if trainer.loggers and not _has_folder_of_run(trainer.loggers[0]):
        directory = trainer.strategy.broadcast(str(Path(directory, *_run_of(trainer.loggers[0]))))
    return Path(directory, "recorder").absolute()  # the program may change its current folder


def exclusive_directory(trainer: Trainer) -> Path | None:
    """Return a folder for the run's recordings to which no other trainer writes, in this or another process.

    This is the result of :func:`recorder_directory` if that folder is new, if the run resumes, or if other recorders of
    the trainer use it. Otherwise the folder is in a new version folder: ``version_0-2`` beside ``version_0``. Without a
    logger, it is in ``<default_root_dir>/recordings/version_<number>``. All runs of a trainer use the same folder.

    Note:
        Must be called on every rank. Rank 0 creates the folder, so that no other process can choose the same one.
    """
    directory = recorder_directory(trainer)
    if directory is None:
        return None
    known = _exclusive.get(trainer)
    if known is None or known[0] != directory:
        chosen = _reserved(trainer, directory) if trainer.is_global_zero else directory
        known = _exclusive[trainer] = directory, Path(trainer.strategy.broadcast(str(chosen)))
    return known[1]


def _reserved(trainer: Trainer, directory: Path) -> Path:
    """Create a folder that did not exist, and return it. Return the default folder if that is impossible."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set in Trainer.__init__
    if any(getattr(each, "_is_from_environment", None) is False for each in callbacks):
        return directory
    run = directory.parent
    if not trainer.loggers:
        parent = run / "recordings"
        names: Iterable[str] = (f"version_{number}" for number in count())
    elif trainer.ckpt_path is not None:
        return directory
    else:
        parent, names = run.parent, chain([run.name], (f"{run.name}-{number}" for number in count(2)))
    for name in names:
        try:
            (parent / name / directory.name).mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError:
            break  # the recorders report the error
        return parent / name / directory.name
    return directory


@dataclass
class _Claim:
    """The folder that a trainer writes to."""

    default: Path  # the folder to write to if no other process uses it
    directory: Path  # the folder that the trainer writes to
    lock: FolderLock | None = None  # the lock of this folder, on rank 0 during a run
    users: set[int] = field(default_factory=set)  # the ids of the recorders in the run


_claims: weakref.WeakKeyDictionary[Trainer, _Claim] = weakref.WeakKeyDictionary()


def claimed_directory(trainer: Trainer, directory: Path | None, user: object) -> Path | None:
    """Return a folder for the recordings of a run that no other process uses at the same time.

    This is the given folder, unless another process has locked it. In that case, it is a new folder ``run-<number>``
    beside the given one, and a warning is given. All recorders of a trainer get the same folder, in all its runs.

    The recorder calls :func:`release_directory` when its run ends.

    Note:
        Must be called on every rank. Rank 0 locks the folder.
    """
    if directory is None:
        return None
    claim = _claims.get(trainer)
    if claim is None or claim.default != directory:
        claim = _claims[trainer] = _Claim(directory, directory)
    if not claim.users:
        chosen = claim.directory
        if trainer.is_global_zero:
            chosen, claim.lock = _locked_directory(claim)
        claim.directory = Path(trainer.strategy.broadcast(str(chosen)))
    claim.users.add(id(user))
    return claim.directory


def release_directory(trainer: Trainer, user: object) -> None:
    """Unlock the folder of a trainer when its last recorder has ended. Idempotent."""
    claim = _claims.get(trainer)
    if claim is not None:
        claim.users.discard(id(user))
        if not claim.users:
            claim.lock = None


def _locked_directory(claim: _Claim) -> tuple[Path, FolderLock | None]:
    """Return the folder of the last run of the trainer, or a new one beside it, and its lock."""
    try:
        if not fits(claim.directory, _FOLDER_BYTES):
            return claim.directory, None
        lock = lock_folder(claim.directory)
        if lock is not None:
            return claim.directory, lock
        for number in range(2, _MOST_RUNS):
            other = claim.default.parent / f"{FURTHER_RUN}{number}" / claim.default.name
            with suppress(FileExistsError):
                other.mkdir(parents=True)
                warn(
                    f"another process records into {claim.directory}, so this run records into {other}. Give each "
                    "process its own log_dir, such as another version of the logger"
                )
                return other, lock_folder(other)
    except OSError:
        pass  # the recorders report the error
    return claim.directory, None


def make_directory(directory: Path | None, *, strict: bool) -> None:
    """Create a folder, if the run has one. A failure gives one warning, and each write tries again.

    Raises:
        OSError: If ``strict``, unless the disk is full.
    """
    if directory is not None:
        attempt(directory, _FOLDER_BYTES, partial(directory.mkdir, parents=True, exist_ok=True), strict=strict)


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
    """Return True if ``self.log`` counts a step after the batch that ends. The result is the same on all ranks.

    With gradient accumulation, a step ends after the last of the accumulated batches. In manual optimization, the
    trainer does not accumulate batches, so every batch ends a step. A plain loop decides this itself.
    """
    has_stepped: bool | None = getattr(trainer, "has_stepped", None)
    if has_stepped is not None:
        return has_stepped
    is_last = trainer.is_last_batch or batch_idx + 1 == trainer.num_training_batches
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or is_last


def gradient_factor(trainer: Trainer, scale: float) -> float:
    """Return the factor that converts a gradient of the backward pass to the gradient of the ``training_step`` loss.

    Lightning divides the loss by the number of accumulated batches, and a ``GradScaler`` multiplies it by ``scale``.
    The factor undoes the division and the multiplication. In manual optimization, the number of accumulated batches is
    always 1.
    """
    return trainer.accumulate_grad_batches / scale


def calls_closure_once(pl_module: LightningModule, optimizer: object) -> bool:
    """Return True if the optimizer is known to call its closure, the training step, once, at the start of a step."""
    kind = type(optimizer)
    is_known = kind.__module__.startswith("torch.optim.") and kind.__name__ != "LBFGS"
    return is_known and type(pl_module).optimizer_step is LightningModule.optimizer_step


def runs_no_model_after_loss(pl_module: LightningModule, optimizer: object) -> bool:
    """Return True if no method of the model that may call its functions follows the training step in a step."""
    methods = ("backward", "on_before_zero_grad", "on_before_backward", "optimizer_zero_grad")
    are_original = all(getattr(type(pl_module), name) is getattr(LightningModule, name) for name in methods)
    return are_original and is_automatic(pl_module) and calls_closure_once(pl_module, optimizer)


def is_automatic(pl_module: LightningModule) -> bool:
    """Return True if the trainer runs the backward pass and the optimizer, and divides the loss; False in a loop."""
    return _is_lightning(pl_module) and pl_module.automatic_optimization


def _is_lightning(model: object) -> bool:
    """Return True for a LightningModule of either package name, without running code of other models."""
    return hasattr(type(model), "automatic_optimization")


def device_of(pl_module: LightningModule) -> torch.device:
    """Return the device of the model, or of its first parameter if the model has no attribute ``device``."""
    if _is_lightning(pl_module):
        return pl_module.device
    return next((each.device for each in parameters_of(pl_module)), torch.device("cpu"))


def averaged_ranks(trainer: Trainer) -> int:
    """Return the number of ranks over whose losses the strategy averages: the ranks with their own batches.

    With tensor parallelism, several ranks share a batch, so the number is smaller than the number of processes.
    """
    try:
        return int(trainer.strategy.distributed_sampler_kwargs["num_replicas"])  # type: ignore[attr-defined]  # of ParallelStrategy
    except (AttributeError, KeyError, TypeError):
        return 1


def running_function(trainer: Any) -> str:
    """Return the function that a trainer runs: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``."""
    return str(getattr(trainer.state.fn, "value", trainer.state.fn) or "")


class LossScale:
    """Tracks the scale of a ``GradScaler`` across the steps of a batch. The scale is 1 without a ``GradScaler``.

    If the gradients of a step are not finite, the optimizer skips the step and the scale shrinks. The scale shrinks
    only then, so a smaller scale means a skipped step.

    Note:
        On a GPU, reading the scale synchronizes with the device.
    """

    def __init__(self) -> None:
        self.value = 1.0
        """The current loss scale."""
        self.overflowed = False
        """True if a step of this batch was skipped."""

    def begin_batch(self, trainer: Trainer) -> None:
        """Read the scale before a batch."""
        self.value, self.overflowed = _loss_scale(trainer), False

    def end_step(self, trainer: Trainer) -> bool:
        """Check whether the previous step was skipped; return True if the scale has changed."""
        before, self.value = self.value, _loss_scale(trainer)
        self.overflowed |= self.value < before
        return self.value != before


def _loss_scale(trainer: Trainer) -> float:
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return float(scaler.get_scale()) if scaler is not None else 1.0


# Lightning allows a rank to have no batches if this attribute of the model is true.
_MAY_BE_EMPTY = "allow_zero_length_dataloader_with_multiple_devices"


def are_ranks_even(trainer: Trainer) -> bool:
    """Return True if there are several processes that can communicate and have equally many batches."""
    return trainer.world_size > 1 and Exchange.is_needed() and not getattr(trainer, "is_uneven", False)


def ends_step(trainer: Trainer, batch_idx: int) -> bool:
    """Return True if a step ends after this batch. The result is the same on all ranks, even if only one rank steps.

    For a trainer, these are the batches after which it steps. In a plain loop, this is every n-th batch, where n is
    ``accumulate_grad_batches``, by default 1.
    """
    if getattr(trainer, "has_stepped", None) is None:
        return stepped(trainer, batch_idx)
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0


def merge_ranks(
    trainer: Trainer,
    pl_module: LightningModule,
    run: RunRecorder | None,
    evaluations: Mapping[str, EvaluationRecorder],
    *,
    takes_part: bool,
    about: str,
    name: str,
) -> Exchange | None:
    """Set up merging across ranks for the recorders of a callback, if all ranks have the same settings.

    Warns on rank 0 if the ranks do not agree. Must be called on every rank. Returns the exchange, which must be closed.
    """
    exchange, why = None, ""
    if are_ranks_even(trainer):
        exchange = Exchange(trainer.strategy.root_device)
        reason = exchange.agree(takes_part, about)
        if reason and takes_part:
            why = f"statistics are those of rank 0 only, because {reason}"
    elif trainer.world_size > 1 and not Exchange.is_needed():
        why = f"{type(trainer.strategy).__name__} does not use torch.distributed, so only rank 0 records"
    if why and trainer.is_global_zero:
        warn(f"{name}: {why}")
    if run is not None:
        run.exchange = exchange
    # A rank without batches runs no evaluation and would never respond.
    is_alone = exchange is not None and bool(evaluations) and bool(getattr(pl_module, _MAY_BE_EMPTY, False))
    if is_alone and trainer.is_global_zero:
        warn(f"{name}: evaluations are those of rank 0 only, because {_MAY_BE_EMPTY} is set")
    for evaluation in evaluations.values():
        evaluation.exchange = None if is_alone else exchange
    return exchange


def decline(trainer: Trainer) -> None:
    """Tell the other ranks that recording is switched off on this rank."""
    if are_ranks_even(trainer):
        Exchange(trainer.strategy.root_device).agree(False, "")
