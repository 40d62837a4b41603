"""Whether the processes of a run record together."""

from __future__ import annotations

from lightning.pytorch import Trainer

from lightning_recorder.errors import tell
from lightning_recorder.recorders import Exchange

__all__ = ["agree", "decline"]


def agree(trainer: Trainer, *, takes_part: bool, about: str, name: str) -> Exchange | None:
    """Find out, together with the other ranks, whether they can be merged; ``None`` where there are no others.

    Args:
        trainer: The trainer.
        takes_part: Whether this rank has something to record.
        about: What all ranks have to have the same.
        name: What warnings call the recorder.
    """
    if trainer.world_size == 1:
        return None
    if not Exchange.is_needed():
        if trainer.is_global_zero:
            kind = type(trainer.strategy).__name__
            tell(f"{name}: {kind} has no processes of torch.distributed, rank 0 records alone")
        return None
    exchange = Exchange(trainer.strategy.root_device)
    reason = exchange.agree(takes_part, about)
    if reason and trainer.is_global_zero and takes_part:
        tell(f"{name}: statistics are those of rank 0 alone, since {reason}")
    return exchange


def decline(trainer: Trainer) -> None:
    """Say to the other ranks that this one, in which recording is switched off, takes no part."""
    if trainer.world_size > 1 and Exchange.is_needed():
        Exchange(trainer.strategy.root_device).agree(False, "")
