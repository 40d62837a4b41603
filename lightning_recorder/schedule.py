"""When to record: a schedule is a function from a step to whether that step is recorded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from typing_extensions import Self

from lightning_recorder.errors import ArgumentError, check_callable, check_integer, imported

__all__ = ["EveryNSteps", "Reduce", "Sampling", "Schedule", "check_reduce", "ends_window"]

Schedule = Callable[[int], bool]
"""A function of the 0-based optimiser step."""

Reduce = int | Literal["step", "epoch"]
"""What becomes one record: each recorded step, those of a window of so many steps, or those of an epoch."""


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
        return _is_nth(step, self.n)


@dataclass(frozen=True)
class Sampling:
    """Which optimiser steps of a run are recorded; what is given must hold together.

    Args:
        every_n_train_steps: The first step and then each n-th, as :class:`EveryNSteps`. If it is ``None``, whoever
            asks decides by :meth:`with_default`; with a window or a predicate it is then every step.
        every_n_epochs: The first epoch and then each n-th.
        first_n_steps: So many steps at the beginning of the run are recorded as well, whatever the cadence.
        step_window: ``(start, stop)``: nothing before step ``start`` and nothing from step ``stop`` on.
        when: A function of the step, or its import path; asked last of all.

    Raises:
        ArgumentError: If an argument can never work; names it.

    Note:
        A function of the step and the epoch alone, so that all ranks record the same steps; ``when`` has to be one,
        too.

    Example:
        >>> sampling = Sampling(4, first_n_steps=2, step_window=(1, 8))
        >>> [step for step in range(12) if sampling(step)]
        [1, 3, 7]
    """

    every_n_train_steps: int | None = None
    every_n_epochs: int = 1
    first_n_steps: int = 0
    step_window: Sequence[int] | None = None
    when: Callable[[int], object] | str | None = None

    def __post_init__(self) -> None:
        if self.every_n_train_steps is not None:
            check_integer("every_n_train_steps", self.every_n_train_steps, 0)
        check_integer("every_n_epochs", self.every_n_epochs, 1)
        check_integer("first_n_steps", self.first_n_steps, 0)
        if self.step_window is not None:
            object.__setattr__(self, "step_window", _checked_window(self.step_window))
        object.__setattr__(self, "when", imported("when", self.when))
        if self.when is not None:
            check_callable("when", self.when, "(step) that says whether the step is recorded")

    def with_default(self, every_n_train_steps: int) -> Self:
        """The same with a cadence, if it has none yet: every step where a window or a predicate is given."""
        if self.every_n_train_steps is not None:
            return self
        chosen = self.step_window is not None or self.when is not None
        return replace(self, every_n_train_steps=1 if chosen else every_n_train_steps)

    def widened(self, every_n_train_steps: int) -> Self:
        """The same with another cadence."""
        return replace(self, every_n_train_steps=every_n_train_steps)

    def in_epoch(self, epoch: int) -> bool:
        """Whether anything of the 0-based epoch is recorded."""
        return _is_nth(epoch, self.every_n_epochs)

    def __call__(self, step: int, epoch: int = 0) -> bool:
        """Whether the 0-based optimiser step of that epoch is recorded."""
        first, stop = self.step_window or (0, math.inf)
        due = step < self.first_n_steps or _is_nth(step, self.every_n_train_steps or 0)
        return due and first <= step < stop and self.in_epoch(epoch) and self._is_wanted(step)

    def _is_wanted(self, step: int) -> bool:
        return not callable(self.when) or bool(self.when(step))

    def count_records(self, reduce: Reduce, steps: int) -> int:
        """How many records so many steps give in the long run, as if there were no window, predicate and epochs."""
        cadence = self.every_n_train_steps or 0
        if reduce == "step":
            return steps // cadence if cadence else 0
        return max(1, steps // max(reduce, cadence)) if isinstance(reduce, int) and cadence else 1


def _is_nth(number: int, n: int) -> bool:
    """Whether a 0-based number is the first or an n-th one; with ``n`` zero none is."""
    return n > 0 and (number == 0 or (number + 1) % n == 0)


def _checked_window(window: object) -> tuple[int, int]:
    """A window of steps, if it is one."""
    bounds = tuple(window) if isinstance(window, Sequence) else ()
    if len(bounds) == 2:
        first, stop = bounds
        if isinstance(first, int) and isinstance(stop, int) and 0 <= first < stop:
            return first, stop
    raise ArgumentError(f"step_window must be (start, stop), two integers with 0 <= start < stop, got {window!r}")


def check_reduce(reduce: object) -> None:
    """Refuse what says not what becomes one record.

    Raises:
        ArgumentError: Naming what is allowed.
    """
    is_count = isinstance(reduce, int) and not isinstance(reduce, bool) and reduce >= 1
    if not is_count and reduce not in ("step", "epoch"):
        raise ArgumentError(f"reduce must be 'step', 'epoch' or a number of steps of at least 1, got {reduce!r}")


def ends_window(reduce: Reduce, step: int) -> bool:
    """Whether what was recorded up to the 0-based step becomes a record behind it; an epoch's is not ended by a step.

    Example:
        >>> [step for step in range(8) if ends_window(4, step)]
        [3, 7]
    """
    return reduce == "step" or (isinstance(reduce, int) and (step + 1) % reduce == 0)
