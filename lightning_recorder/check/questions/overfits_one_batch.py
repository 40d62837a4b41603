"""Overfit one batch.

A copy of the parameters is trained for a few steps, all with the same batch and the same random numbers. If the loss
does not fall at all, the gradients, the optimizer or the learning rate usually do not work.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lightning_recorder.check.answer import Answer, Question

if TYPE_CHECKING:
    from lightning_recorder.check.bench import Bench

__all__ = ["QUESTION"]

_LITTLE = 1e-4  # the smallest fall of the loss that counts, as a share of the loss at the start
_FLOOR = 1e-6


def answer(bench: Bench) -> Answer:
    """Train a copy for a few steps on the same batch."""
    trained = bench.trained
    losses = trained.losses
    steps, first, last = len(losses) - 1, losses[0], losses[-1]
    numbers = {"first loss": first, "last loss": last, "lowest loss": min(losses), "steps": float(steps)}
    maximizes = any(group.get("maximize") for group in bench.optimizer.param_groups)
    if not trained.moved:
        return Answer("wrong", f"no parameter changes in {steps} steps", numbers)
    if maximizes and last > first and min(losses) >= first:
        return Answer("wrong", f"the optimizer maximizes the loss: {first:.4g} becomes {last:.4g}", numbers)
    if not math.isfinite(last):
        return Answer("look", f"the loss is {last} after {steps} steps on one batch", numbers)
    if first - min(losses) < _LITTLE * abs(first) and abs(first) > _FLOOR:
        text = f"the loss stays at {first:.4g} in {steps} steps on one batch"
        still = [name for name in bench.parameters if name not in trained.moved]
        who = "1 parameter does" if len(still) == 1 else f"{len(still)} parameters do"
        return Answer("look", text + (f"; {who} not move" if still else ""), numbers)
    return Answer("ok", f"the loss falls from {first:.4g} to {min(losses):.4g} in {steps} steps", numbers)


QUESTION = Question(
    "overfits-one-batch",
    "Can it overfit one batch?",
    "the loss of one batch falls within a dozen steps",
    answer,
    steps=12.5,
)
