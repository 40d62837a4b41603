"""Messages about compiled code that runs eagerly on recorded steps."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_recorder.errors import describe_error, warn
from lightning_recorder.internals.compiled import compiled_modules, flex_attention_users
from lightning_recorder.outputs import write_receipt

__all__ = ["say_ran_eagerly", "warn_of_eager_memory", "write_ran_eagerly"]

_MOST_NAMED = 5

# The names of compiled code for which the log already says that it runs eagerly, by trainer.
_said_eager: weakref.WeakKeyDictionary[Trainer, set[str]] = weakref.WeakKeyDictionary()


def say_ran_eagerly(trainer: Trainer, names: Collection[str]) -> None:
    """Log the names of compiled code that ran eagerly, each name once per trainer."""
    said = _said_eager.setdefault(trainer, set())
    new = [name for name in names if name not in said]
    if new:
        said.update(new)
        more = f" and {len(new) - _MOST_NAMED} more" if len(new) > _MOST_NAMED else ""
        rank_zero_info(
            f"Recorded steps run compiled code eagerly: {', '.join(new[:_MOST_NAMED])}{more}. The last bits of "
            "their results can differ from those of compiled steps. compiled='skip' keeps compiled code in use and "
            "records only what is outside of it."
        )


def write_ran_eagerly(directory: Path | None, label: str, step: int, names: Collection[str], *, name: str) -> None:
    """Write the names of compiled code that ran eagerly to ``receipt.json``, for a recorder without a receipt.

    Args:
        directory: The folder of the run's recordings; ``None`` writes nothing.
        label: The label of the recorder in the file.
        step: The recorded step.
        names: The names; nothing is written if there are none.
        name: The name of the recorder in warnings.
    """
    if names and directory is not None:
        try:
            write_receipt(directory, label, {"step": step, "ran_eagerly": list(names)})
        except OSError as error:
            warn(f"{name} could not write its receipt: {describe_error(error)}")


def warn_of_eager_memory(pl_module: LightningModule, name: str) -> None:
    """Warn if running compiled modules eagerly needs much more memory.

    Args:
        pl_module: The model.
        name: The name of the recorder.
    """
    users = flex_attention_users(pl_module) if compiled_modules(pl_module) else []
    if users:
        warn(
            f"{name} runs recorded steps eagerly, where flex_attention of {users[0]!r} needs "
            "memory for all scores: compiled='skip' avoids this"
        )
