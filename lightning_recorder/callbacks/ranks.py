"""Agreement among the ranks of a run on whether their records are merged."""

from __future__ import annotations

from collections.abc import Mapping

from lightning.pytorch import LightningModule, Trainer

from lightning_recorder.errors import warn
from lightning_recorder.statistics import EvaluationRecorder, Exchange, RunRecorder

__all__ = ["agree", "decline", "merge_ranks"]

# Lightning allows a rank to have no batches if this attribute of the model is true.
_MAY_BE_EMPTY = "allow_zero_length_dataloader_with_multiple_devices"


def merge_ranks(
    trainer: Trainer,
    pl_module: LightningModule,
    run: RunRecorder | None,
    evaluations: Mapping[str, EvaluationRecorder],
    *,
    takes_part: bool,
    about: str,
    name: str,
) -> None:
    """Let the recorders of a callback merge their records across ranks, if the ranks agree on it.

    Args:
        trainer: The trainer.
        pl_module: The model.
        run: The recorder of the training run, if there is one.
        evaluations: The recorders of evaluations.
        takes_part: See :func:`agree`, as for the others.
        about: See ``takes_part``.
        name: See ``takes_part``.
    """
    exchange = agree(trainer, takes_part=takes_part, about=about, name=name)
    if run is not None:
        run.exchange = exchange
    # A rank without batches runs no evaluation and would never respond.
    is_alone = exchange is not None and bool(evaluations) and bool(getattr(pl_module, _MAY_BE_EMPTY, False))
    if is_alone and trainer.is_global_zero:
        warn(f"{name}: evaluations are those of rank 0 only, because {_MAY_BE_EMPTY} is set")
    for evaluation in evaluations.values():
        evaluation.exchange = None if is_alone else exchange


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
            warn(f"{name}: {kind} does not use torch.distributed, so only rank 0 records")
        return None
    exchange = Exchange(trainer.strategy.root_device)
    reason = exchange.agree(takes_part, about)
    if reason and trainer.is_global_zero and takes_part:
        warn(f"{name}: statistics are those of rank 0 only, because {reason}")
    return exchange


def decline(trainer: Trainer) -> None:
    """Tell the other ranks that recording is switched off on this one."""
    if trainer.world_size > 1 and Exchange.is_needed():
        Exchange(trainer.strategy.root_device).agree(False, "")
