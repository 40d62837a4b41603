"""Messages about a run: the reasons why it recorded nothing, compiled code that ran eagerly, and others."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from lightning_recorder.callbacks.lightning import LightningModule, Trainer, rank_zero_info
from lightning_recorder.callbacks.trainer import logged_step
from lightning_recorder.errors import warn
from lightning_recorder.internals.compiled import compiled_modules, flex_attention_users
from lightning_recorder.outputs import write_receipt
from lightning_recorder.recordings import records_path
from lightning_recorder.reductions.user import UserReduction
from lightning_recorder.schedule import Sampling

__all__ = [
    "Silence",
    "say_compiled",
    "say_mixed",
    "say_ran_eagerly",
    "warn_of_eager_memory",
    "warn_of_unmerged",
    "why_no_due_validation",
    "why_no_files",
    "why_no_step",
    "why_no_training",
    "why_no_validation",
    "write_ran_eagerly",
]


class Silence(NamedTuple):
    """The reason why a run recorded nothing."""

    why: str
    fix: str = ""
    """A sentence with the fix; empty if the user asked for this or if there is nothing to fix."""
    what: str = "recorded nothing"


def why_no_files(trainer: Trainer, directory: Path | None) -> str:
    """Return the reason why a run has no folder for recordings, or an empty string if it has one.

    ``directory`` is the result of :func:`recorder_directory`, which is not called here because it is a collective.
    """
    if directory is not None:
        return ""
    if trainer.fast_dev_run:  # type: ignore[attr-defined]  # set in Trainer.__init__
        return "fast_dev_run writes no files"
    return "a barebones run writes no files" if trainer.barebones else "its log folder is not local"


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
        return Silence("the fit had no validation", "Add a validation loader and a validation_step.")
    every = (
        f"check_val_every_n_epoch={trainer.check_val_every_n_epoch}, val_check_interval={trainer.val_check_interval}"
    )
    return Silence(
        f"the fit ran no validation except the sanity check ({every})", "Validate more often, or train for longer."
    )


def why_no_due_validation(trainer: Trainer, sampling: Sampling, began: tuple[int, int] | None) -> Silence:
    """Return the reason why no validation of a fit was recorded."""
    if began is None:
        return why_no_training(trainer)
    epochs = range(began[1], max(began[1] + 1, trainer.current_epoch))
    if trainer.enable_validation and not any(map(sampling.in_epoch, epochs)):
        return Silence(f"no epoch was due with every_n_epochs={sampling.every_n_epochs}", "Lower it.")
    return why_no_validation(trainer)


def why_no_step(trainer: Trainer, sampling: Sampling, began: tuple[int, int] | None, *, is_enabled: bool) -> Silence:
    """Return the reason why no step of a fit was recorded."""
    first, epoch = began or (0, 0)
    steps = range(first, logged_step(trainer))
    if began is None or not steps:
        loop = getattr(trainer, "fit_loop", None)  # a loop without a Trainer begins at its first batch
        has_trained = began is not None and (loop is None or loop.epoch_loop.batch_progress.total.ready > 0)
        return Silence("no optimizer stepped") if has_trained else why_no_training(trainer)
    if not is_enabled:
        return Silence("it is disabled", "")
    log_every_n_steps = int(trainer.log_every_n_steps)  # type: ignore[attr-defined]  # set in Trainer.__init__
    resolved = sampling.with_default(log_every_n_steps)
    if not resolved.every_n_train_steps and sampling.every_n_train_steps is None and not sampling.first_n_steps:
        why = "Trainer(log_every_n_steps=0) sets the interval, and every_n_train_steps is not given"
        return Silence(why, "Give every_n_train_steps.")
    why = resolved.why_none(steps, range(epoch, max(epoch + 1, trainer.current_epoch)))
    if why:
        is_off = not resolved.every_n_train_steps and not resolved.first_n_steps
        fix = "Pass a number of at least 1." if is_off else "Change the schedule, or train for longer."
        return Silence(why, fix)
    return Silence("it was disabled at every due step")


_MOST_NAMED = 5

# By trainer, the names of compiled code that were already logged as running eagerly.
_logged_eager: weakref.WeakKeyDictionary[Trainer, set[str]] = weakref.WeakKeyDictionary()


def say_ran_eagerly(trainer: Trainer, names: Collection[str]) -> None:
    """Log the names of compiled code that ran eagerly, each name once per trainer."""
    logged = _logged_eager.setdefault(trainer, set())
    new = [name for name in names if name not in logged]
    if new:
        logged.update(new)
        more = f" and {len(new) - _MOST_NAMED} more" if len(new) > _MOST_NAMED else ""
        rank_zero_info(
            f"Recorded steps run compiled code eagerly: {', '.join(new[:_MOST_NAMED])}{more}. The last bits of "
            "their results can differ from those of compiled steps. compiled='skip' keeps compiled code in use and "
            "records only what is outside of it."
        )


# The trainers for which it was already logged that their folder has records of another run.
_logged_mixed: weakref.WeakSet[Trainer] = weakref.WeakSet()


def say_mixed(trainer: Trainer, directory: Path | None, label: str) -> None:
    """Log once per trainer that a new run writes into a folder with the records of another run."""
    if directory is None or trainer in _logged_mixed or trainer.ckpt_path is not None or trainer.global_step:
        return
    if trainer.state.fn == "fit" and records_path(directory, label).exists():
        _logged_mixed.add(trainer)
        rank_zero_info(
            f"{directory} has the records of another run. A step of this run replaces the step of that run with the "
            "same number. To keep the runs apart, give each a log_dir of its own: a new logger, version or "
            "default_root_dir."
        )


# By trainer, the total compilation time that was already logged.
_logged_compile_s: weakref.WeakKeyDictionary[Trainer, float] = weakref.WeakKeyDictionary()


def say_compiled(trainer: Trainer, before_s: float, after_s: float) -> None:
    """Log the time of the compilations in a recorded step, once for all recorders of a trainer."""
    seconds = after_s - max(before_s, _logged_compile_s.get(trainer, 0.0))
    if seconds > 0:
        _logged_compile_s[trainer] = after_s
        rank_zero_info(f"compiling the recorded step: {seconds:.1f} s")


def write_ran_eagerly(directory: Path | None, label: str, step: int, names: Collection[str]) -> None:
    """Write the names of compiled code that ran eagerly to ``receipt.json``, for a recorder without a receipt."""
    if names and directory is not None:
        write_receipt(directory, label, {"step": step, "ran_eagerly": list(names)})


def warn_of_unmerged(name: str, extra: Iterable[object]) -> None:
    """Warn about extra reductions whose results cannot be merged across ranks."""
    alone = [each for each in extra if isinstance(each, UserReduction) and not each.is_mergeable]
    if alone:
        warn(
            f"{name} records the results of {', '.join(map(repr, alone))} for rank 0 only, because they cannot be "
            "merged across ranks. Results of a Reduction, of a torchmetrics.Metric without inner metrics, and of "
            "torch.add, torch.mul, torch.maximum or torch.minimum are merged."
        )


def warn_of_eager_memory(pl_module: LightningModule, name: str) -> None:
    """Warn if running compiled modules eagerly needs much more memory."""
    users = flex_attention_users(pl_module) if compiled_modules(pl_module) else []
    if users:
        warn(
            f"{name} runs recorded steps eagerly, where flex_attention of {users[0]!r} needs "
            "memory for all scores: compiled='skip' avoids this"
        )
