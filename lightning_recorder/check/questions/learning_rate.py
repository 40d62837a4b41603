"""Find a learning rate out of range.

The loss of the first batch is measured after one step with 0.01 to 100 times the learning rate, each time on a copy of
the parameters. During a warmup, the base rate of the scheduler is used. The rate is too large if one step spoils the
loss while a step with a hundredth of the rate lowers the loss. The rate is too small if even a step with a hundred
times the rate hardly changes the loss.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lightning_recorder.check.answer import Answer, NoAnswerError, Question

if TYPE_CHECKING:
    from lightning_recorder.check.bench import Bench

__all__ = ["QUESTION"]

_FACTORS = (0.01, 0.1, 1.0, 10.0, 100.0)
_SPOILED, _WORSE = 100.0, 1.5  # multiples of the loss at the start
_NOTHING = 1e-3


def answer(bench: Bench) -> Answer:
    """Compare the losses after one step with different learning rates."""
    before = bench.first.loss
    if before is None or not before.numel() == 1:
        raise NoAnswerError("the training step returns no loss")
    if not math.isfinite(float(before)):
        raise NoAnswerError("the loss is not finite")
    loss, after = float(before), {factor: bench.loss_at(factor) for factor in _FACTORS}
    numbers = {"loss": loss, **{f"at {factor:g}×": value for factor, value in after.items()}}
    size = max(abs(loss), 1e-6)
    lowers = [factor for factor in _FACTORS if after[factor] < loss]
    rise = after[1.0] / size if math.isfinite(after[1.0]) else math.inf
    best = min(_FACTORS, key=lambda factor: after[factor] if math.isfinite(after[factor]) else math.inf)
    if rise > _WORSE and loss > 0 and min(lowers, default=1.0) < 1.0:
        text = f"one step raises the loss from {loss:.4g} to {after[1.0]:.4g}, and {best:g}× the rate lowers it"
        return Answer("wrong" if rise > _SPOILED else "look", text, numbers)
    if rise > _WORSE and loss > 0 and not lowers:
        text = f"one step raises the loss from {loss:.4g} to {after[1.0]:.4g}, and even 0.01× the rate raises it"
        return Answer("look", text, numbers)
    if all(abs(value - loss) < _NOTHING * size for value in after.values()):
        text = f"one step changes the loss by less than {_NOTHING:g} of it, even with 100× the rate"
        return Answer("look", text, numbers)
    return Answer(
        "ok", f"one step changes the loss from {loss:.4g} to {after[1.0]:.4g}; {best:g}× the rate is best", numbers
    )


QUESTION = Question(
    "learning-rate",
    "Is the learning rate in range?",
    "one step does not spoil the loss, and 100 times the rate has an effect",
    answer,
    steps=2.7,
)
