"""Schedules, which determine the steps of a run to record."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from typing_extensions import Self

from lightning_recorder.errors import (
    ArgumentError,
    RecordingError,
    check_callable,
    check_integer,
    check_some,
    describe_call,
    did_you_mean,
    imported,
)
from lightning_recorder.portable import Portable, unwrap
from lightning_recorder.signatures import repr_of_changed, with_checked_arguments

__all__ = ["STAGE_SYNONYMS", "Reduce", "Sampling", "Schedule", "check_overhead", "check_reduce", "ends_window"]

_STAGES = ("train", "validate", "test", "predict")

STAGE_SYNONYMS = {
    "fit": "train", "training": "train", "val": "validate", "valid": "validate", "validation": "validate",
    "eval": "validate", "testing": "test", "prediction": "predict", "inference": "predict", "example_input": "example",
}  # fmt: skip
"""Synonyms of the stages, including the names that Lightning uses."""

Reduce = int | Literal["step", "epoch"]
"""The span of one record: one recorded step, a window of the given number of steps, or an epoch."""


@with_checked_arguments
@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Conditions on the steps that a callback records, in addition to its ``every_n_train_steps``.

    A step is due if it is one of the first ``first_n_steps``, or if it is selected by ``every_n_train_steps``. With a
    window or a predicate, and without ``every_n_train_steps``, every step is due. A due step is recorded if it also
    meets all other conditions.

    Args:
        every_n_epochs: Record in the first epoch and then in every n-th epoch.
        first_n_steps: The number of steps to record at the beginning of the run, in addition to every n-th step.
        step_window: ``(start, stop)``: Record only steps from ``start`` up to, but not including, ``stop``.
        when: A function, or its import path, that takes the step and returns True to record it. It is called after all
            other conditions, may be called more than once per step, and must return the same value on all ranks.
        max_overhead: The maximum fraction of training time that recording may take, such as 0.02. If it takes more, the
            recording interval is increased, and the change is logged.
        stages: The stages to record: any of ``"train"``, ``"validate"``, ``"test"`` and ``"predict"``. Each evaluation
            is one record over all of its batches, under ``activations_validate/…`` and so on. The sanity check is not
            recorded. Without ``"validate"``, at most 1 % of the validation batches after step 100 are recorded, the
            first ones of each validation, for the findings and the record file. Only
            :class:`~lightning_recorder.ActivationRecorder` uses this argument.

    Raises:
        ArgumentError: If an argument has an invalid value. The message names the argument.

    Example::

        ActivationRecorder(every_n_train_steps=100, schedule=Schedule(first_n_steps=10, max_overhead=0.02))
    """

    every_n_epochs: int = 1
    first_n_steps: int = 0
    step_window: Sequence[int] | None = None
    when: Callable[[int], object] | str | None = None
    max_overhead: float | None = None
    stages: str | Sequence[Literal["train", "validate", "test", "predict"]] = ("train",)

    def __post_init__(self) -> None:
        check_integer("every_n_epochs", self.every_n_epochs, 1)
        check_integer("first_n_steps", self.first_n_steps, 0)
        if self.step_window is not None:
            object.__setattr__(self, "step_window", _checked_window(self.step_window))
        object.__setattr__(self, "when", imported("when", self.when))
        if self.when is not None:
            check_callable("when", self.when, "step", " that returns whether to record the step")
        if self.max_overhead is not None:
            check_overhead(self.max_overhead)
        chosen = check_some("stages", self.stages, _STAGES, STAGE_SYNONYMS)
        object.__setattr__(self, "stages", tuple(stage for stage in _STAGES if stage in chosen))

    def __repr__(self) -> str:
        return repr_of_changed(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "when": None if self.when is None else Portable(self.when, "when")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, when=None if state["when"] is None else unwrap(state["when"]))


@dataclass(frozen=True)
class Sampling(Schedule):
    """Selection of the optimizer steps of a run to record: an interval, and the conditions of a :class:`Schedule`.

    Lightning logs step ``k`` when ``(k + 1) % n == 0``. Step 0 is added so that a run that ends before step ``n``
    leaves a record, and so that sites that never fire show up early.

    Raises:
        ArgumentError: If an argument has an invalid value. The message names the argument.

    Note:
        The result depends only on the step and the epoch, so that all ranks record the same steps. The result of
        ``when`` must not depend on anything else.

    Example:
        >>> [step for step in range(10) if Sampling(4)(step)]
        [0, 3, 7]
        >>> sampling = Sampling(4, first_n_steps=2, step_window=(1, 8))
        >>> [step for step in range(12) if sampling(step)]
        [1, 3, 7]
    """

    # The interval in optimizer steps; 0 selects none, as ``Trainer(log_every_n_steps=0)`` logs nothing. If ``None``,
    # the caller chooses the interval with :meth:`with_default`; with a window or a predicate it is then every step.
    every_n_train_steps: int | None = None
    delay: int = 0  # the number of steps by which all steps of the interval are shifted

    def __post_init__(self) -> None:
        if self.every_n_train_steps is True:
            raise ArgumentError("every_n_train_steps must be an integer, got True: write 1 to record every step")
        if self.every_n_train_steps is not None:
            check_integer("every_n_train_steps", self.every_n_train_steps, 0)
        super().__post_init__()

    def with_default(self, every_n_train_steps: int) -> Self:
        """Return a copy with an interval. If none is set, use 1 with a window or predicate, else the given interval."""
        if self.every_n_train_steps is not None:
            return self
        chosen = self.step_window is not None or self.when is not None
        return replace(self, every_n_train_steps=1 if chosen else every_n_train_steps)

    def widened(self, every_n_train_steps: int) -> Self:
        """Return a copy with another interval."""
        return replace(self, every_n_train_steps=every_n_train_steps)

    def in_epoch(self, epoch: int) -> bool:
        """Return True if the 0-based epoch has recorded steps."""
        return _is_nth(epoch, self.every_n_epochs)

    def __call__(self, step: int, epoch: int = 0) -> bool:
        """Return True if the 0-based optimizer step in the given epoch is recorded."""
        first, stop = self.step_window or (0, math.inf)
        n = self.every_n_train_steps or 0
        # _is_nth inlined, because this runs for every batch.
        at = step - self.delay
        due = step < self.first_n_steps or (n > 0 and (at == 0 or (at > 0 and (at + 1) % n == 0)))
        return due and first <= step < stop and self.in_epoch(epoch) and self._is_wanted(step)

    def why_none(self, steps: range, epochs: range) -> str:
        """Return the reason why none of the steps is recorded, or an empty string if a step should have been recorded.

        Example:
            >>> Sampling(0).why_none(range(10), range(1))
            'every_n_train_steps=0 records no step'
            >>> Sampling(100).why_none(range(1, 10), range(1))
            'none of steps 1 to 9 was due with every_n_train_steps=100'
            >>> Sampling(1, step_window=(20, 30)).why_none(range(10), range(1))
            'steps 0 to 9 lie outside of step_window=(20, 30)'
        """
        interval = self.every_n_train_steps or 0
        if not interval and not self.first_n_steps:
            return "every_n_train_steps=0 records no step"
        span = f"steps {steps.start} to {steps.stop - 1}" if len(steps) > 1 else f"step {steps.start}"
        first, stop = self.step_window or (0, steps.stop)
        inside = range(max(first, steps.start), min(stop, steps.stop))
        if not inside:
            return f"{span} lie{'' if len(steps) > 1 else 's'} outside of step_window={self.step_window}"
        if not any(map(self.in_epoch, epochs)):
            return f"no epoch was due with every_n_epochs={self.every_n_epochs}"
        delayed = (step for step in inside if step >= self.delay)
        if inside[0] >= self.first_n_steps and not any(_is_nth(step - self.delay, interval) for step in delayed):
            return f"none of {span} was due with every_n_train_steps={interval}"
        return "" if self.when is None else "when= was not true for any step that was due"

    def _is_wanted(self, step: int) -> bool:
        if not callable(self.when):
            return True
        try:
            return bool(self.when(step))
        except Exception as error:
            raise RecordingError(f"when {describe_call(self.when, error)}, for step {step}") from error

    def count_records(self, reduce: Reduce, steps: int) -> int:
        """Return the approximate number of records for a number of steps, ignoring window, predicate and epochs."""
        interval = self.every_n_train_steps or 0
        if reduce == "step":
            return steps // interval if interval else 0
        return max(1, steps // max(reduce, interval)) if isinstance(reduce, int) and interval else 1


def _is_nth(number: int, n: int) -> bool:
    """Return True for the first and every n-th step or epoch, given its 0-based number. False for ``n = 0``."""
    return n > 0 and (number == 0 or (number + 1) % n == 0)


def _checked_window(window: object) -> tuple[int, int]:
    """Return the window of steps as a tuple, or raise if it is invalid."""
    bounds = tuple(window) if isinstance(window, Sequence) else ()
    hint = ""
    if len(bounds) == 2:
        first, stop = bounds
        if isinstance(first, int) and isinstance(stop, int) and 0 <= first < stop:
            return first, stop
        if isinstance(first, int) and isinstance(stop, int) and 0 <= stop < first:
            hint = f": write ({stop}, {first})"
    raise ArgumentError(f"step_window must be (start, stop), two integers with 0 <= start < stop, got {window!r}{hint}")


def check_overhead(value: object) -> None:
    """Check a fraction of the training time. Raise ArgumentError unless the value is above 0 and at most 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ArgumentError(
            f"max_overhead must be a fraction of the training time, above 0 and at most 1, got {value!r}"
        )


def check_reduce(reduce: object) -> None:
    """Raise ArgumentError if the value is not a valid ``reduce`` argument."""
    is_count = isinstance(reduce, int) and not isinstance(reduce, bool) and reduce >= 1
    if not is_count and reduce not in ("step", "epoch"):
        hint = did_you_mean(reduce, ("step", "epoch"))
        raise ArgumentError(f"reduce must be 'step', 'epoch' or a number of steps of at least 1, got {reduce!r}{hint}")


def ends_window(reduce: Reduce, step: int) -> bool:
    """Return True if a record is complete after the 0-based step. Always False with ``reduce="epoch"``.

    Example:
        >>> [step for step in range(8) if ends_window(4, step)]
        [3, 7]
    """
    return reduce == "step" or (isinstance(reduce, int) and (step + 1) % reduce == 0)
