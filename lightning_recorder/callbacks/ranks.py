"""Agreement among the ranks of a run on whether their records are merged."""

from __future__ import annotations

from lightning.pytorch import Trainer

from lightning_recorder.errors import warn
from lightning_recorder.statistics import Exchange

__all__ = ["agree", "decline"]


def agree(trainer: Trainer, *, takes_part: bool, about: str, name: str) -> Exchange | None:
    """Agree with the other ranks whether records can be merged.

    Warns on rank 0 if they cannot. Must be called on every rank.

    Args:
        trainer: The trainer.
        takes_part: True if this rank has something to record.
        about: A description of the recording, which must be equal on all ranks.
        name: The name of the recorder in warnings.

    Returns:
        The exchange between the ranks, or ``None`` if there is only one rank or ``torch.distributed`` is not in use.
    """
    if trainer.world_size == 1:
        return None
    if not Exchange.is_needed():
        if trainer.is_global_zero:
            kind = type(trainer.strategy).__name__
            warn(f"{name}: {kind} has no processes of torch.distributed, rank 0 records alone")
        return None
    exchange = Exchange(trainer.strategy.root_device)
    reason = exchange.agree(takes_part, about)
    if reason and trainer.is_global_zero and takes_part:
        warn(f"{name}: statistics are those of rank 0 alone, since {reason}")
    return exchange


def decline(trainer: Trainer) -> None:
    """Tell the other ranks that recording is switched off on this one."""
    if trainer.world_size > 1 and Exchange.is_needed():
        Exchange(trainer.strategy.root_device).agree(False, "")
