"""When to record: a schedule is a function from a step to whether that step is recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_recorder.errors import check_integer

__all__ = ["EveryNSteps", "Schedule"]

Schedule = Callable[[int], bool]
"""A function of the 0-based optimiser step."""


@dataclass(frozen=True)
class EveryNSteps:
    """The first step, and from then on every step on which ``self.log`` would log with the same cadence.

    Lightning logs step ``k`` when ``(k + 1) % n == 0``. Step 0 is added because a run that ends before step ``n``
    should leave a record, and because the first step shows which sites never fire while there is still somebody
    watching.

    Args:
        n: The cadence in optimiser steps; 0 records nothing, as ``Trainer(log_every_n_steps=0)`` logs nothing.

    Raises:
        ArgumentError: If ``n`` is negative or no integer.

    Example:
        >>> [step for step in range(10) if EveryNSteps(4)(step)]
        [0, 3, 7]
        >>> any(map(EveryNSteps(0), range(10)))
        False
    """

    n: int

    def __post_init__(self) -> None:
        check_integer("every_n_train_steps", self.n, 0)

    def __call__(self, step: int) -> bool:
        """Whether the 0-based optimiser step is recorded."""
        return self.n > 0 and (step == 0 or (step + 1) % self.n == 0)
