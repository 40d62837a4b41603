"""Act on bad steps, if the user asks for it: skip the step, roll back, or lower the learning rate."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_recorder.callbacks.lightning import LightningModule, Trainer, rank_zero_info
from lightning_recorder.callbacks.repeated_batches import RepeatedBatches
from lightning_recorder.callbacks.trainer import device_of, logged_step
from lightning_recorder.errors import describe_call, warn
from lightning_recorder.insight import Finding
from lightning_recorder.internals.module_tree import modules_of, named_buffers_of, put_entry
from lightning_recorder.internals.norms import local_values
from lightning_recorder.internals.pause_recording import pause_recording
from lightning_recorder.watch import KeptBatch, Reading
from lightning_recorder.watch.kept import Counters, Slot
from lightning_recorder.watch.verdict import finding_of_action

__all__ = ["ACTIONS", "StepActions"]

ACTIONS = ("lower_lr", "skip", "rollback")
"""The actions on a bad step."""

_LOWER_AND_SKIP = "lower_lr+skip"
_SEEN = "seen"  # a finding without an action: the state is not kept
# In increasing strength. All ranks apply the strongest action that any rank wants.
_BY_STRENGTH = ("", _SEEN, "lower_lr", _LOWER_AND_SKIP, "skip", "rollback")
_MOST_REPEATS = 2  # the same batches are repeated at most twice in a row: two bad batches may follow each other
_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
_BASE_RATES = ("base_lrs", "max_lrs")
# The settings of a parameter group that a scheduler changes. If no batches are repeated, these settings are not
# restored, because the scheduler goes on.
_SCHEDULED = (*_RATES, "momentum", "betas", "base_momentum", "max_momentum")


class StepActions:
    """Acts on the bad steps of one fit.

    The action is chosen before the optimizer steps. In each step, all ranks agree on the same action.
    """

    def __init__(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        *,
        act: str | Callable[[Finding], object],
        limit: int,
        why_not: str = "",
        rollback_steps: int,
        lr_factor: float,
        has_ranks: bool,
        report: Callable[[Finding], object],
        strict: bool = False,
    ) -> None:
        self._trainer, self._pl_module, self._act, self._strict = trainer, pl_module, act, strict
        self._limit, self._why_not = limit, why_not
        self._keeps = rollback_steps > 0 and not why_not and (callable(act) or act == "rollback")
        self._every = max(1, rollback_steps // 2)
        self._lr_factor, self._has_ranks, self._report = lr_factor, has_ranks, report
        self._answers: dict[tuple[str, str, str], tuple[int, str]] = {}
        self._has_failed = self._has_decided = False
        self._good: list[_Good] = []  # the latest two states, in order
        self._of_epoch: _Good | None = None  # the state at the start of the epoch, unless both states are of this epoch
        self._is_due = False
        self._batches = RepeatedBatches(trainer, device_of(pl_module)) if self._keeps else None
        self._counters = Counters(modules_of(pl_module))
        self._lowered = 1.0  # the product of all factors of the learning rates
        self._in_step = 0  # the number of batches of the current step so far
        self._plan: tuple[_Good, str] | None = None  # the state to restore, and why no batches are repeated
        self._repeats = -1, 0  # the first step after the repeated steps, and the number of repetitions in a row
        self._acted: dict[str, Finding] = {}
        self._count = 0
        self._current = ""  # the action on the step in progress, one of _BY_STRENGTH
        self._untouched: _Saved | None = None
        self._scaler_state: dict[str, Any] | None = None

    def end(self) -> None:
        """End the fit: restore the original loader."""
        if self._batches is not None:
            self._batches.detach()

    def add_to_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the batches that are still to be repeated to the counts in a checkpoint."""
        if self._batches is not None:
            self._batches.add_to_checkpoint(checkpoint)

    def ask(self, finding: Finding, step: int) -> str:
        """Return the action for a finding, or an empty string for no action.

        If ``act`` is a function, it is called once for each finding. If it returns an action, it is called again at
        each later step with the same finding.
        """
        if not callable(self._act):
            return "" if finding.is_note else self._act
        key = finding.rule, finding.module, finding.path
        known = self._answers.get(key)
        if known is not None and (not known[1] or known[0] == step):
            return known[1]
        self._answers[key] = step, self._answer(self._act, finding)
        return self._answers[key][1]

    def _answer(self, function: Callable[[Finding], object], finding: Finding) -> str:
        if self._has_failed:
            return ""
        try:
            answer = function(finding)
        except Exception as error:
            self._has_failed = True
            if self._strict:
                raise
            warn(f"on_finding is not called again: it {describe_call(function, error)}")
            return ""
        if answer in ACTIONS:
            if answer == "rollback" and not self._why_not and not self._keeps:
                self._why_not = "pass rollback_steps, so that earlier states are kept"
            if self._why_not and not self._has_failed:
                self._has_failed = True
                warn(f"on_finding returned {answer!r}, but StepWatch does not act: {self._why_not}")
            return "" if self._why_not else str(answer)
        if isinstance(answer, str):
            warn(f"on_finding returned {answer!r}, which is no action: it may return {', '.join(map(repr, ACTIONS))}")
        return ""

    # The course of a step.

    def begin_epoch(self) -> None:
        """Begin a fit or an epoch. Only batches of the current epoch can be repeated."""
        self._of_epoch = None
        for each in self._good:
            each.number = None
        if self._batches is not None:
            self._batches.begin_epoch()

    @property
    def is_repeated(self) -> bool:
        """True if the current batch has trained the model before."""
        return self._batches is not None and self._batches.is_repeated

    def rows_of(self, start: Callable[[], list[int] | None] | None) -> list[int] | None:
        """Return the sample indices of the current batch. They come from ``start``, unless the batch is repeated."""
        if self.is_repeated:
            return self._batches.rows  # type: ignore[union-attr]  # as is_repeated says
        rows = None if start is None else start()
        if self._batches is not None:
            self._batches.note_rows(rows)
        return rows

    def begin_batch(self) -> None:
        """Begin a batch. Must be called equally often on every rank."""
        self._has_decided = False
        self._in_step += 1
        if self._keeps and self._in_step == 1:
            is_first = self._batches is not None and self._batches.number == 0
            if not self._good or self._is_due or is_first:
                self._keep(is_regular=not self._good or self._is_due)

    def before_step(
        self,
        optimizer: Any,
        finding: Finding | None = None,
        reading: Reading | None = None,
        *,
        has_cause: bool = False,
    ) -> None:
        """Choose and prepare the action before an optimizer steps. Must be called equally often on every rank.

        ``has_cause`` is True if the finding names the origin of the bad value or the sample that caused it. It is False
        for a gradient that may come from another rank.
        """
        if not self._has_decided:  # decide once: an optimizer may compute the gradients of a step several times
            self._has_decided = True
            wanted = ""
            try:
                if finding is not None and reading is not None and self._count < self._limit:
                    wanted = self.ask(finding, reading.step)
                    # A value that is not finite would spoil the parameters at any learning rate, so also skip the step.
                    wanted = _LOWER_AND_SKIP if wanted == "lower_lr" and reading.is_bad else wanted
                if finding is not None:
                    wanted = wanted or _SEEN
            finally:  # otherwise the other ranks would wait for this one
                self._current, rank, is_named = self._agreed(wanted, has_cause=has_cause)
            if self._current not in ("", _SEEN):
                is_shown = finding is not None and (has_cause or not is_named)
                because = finding.verdict if finding is not None and is_shown else f"a finding on rank {rank}"
                self._begin_action(optimizer, because, reading)
        if self._is_left_out:
            self._drop_gradients(optimizer)

    @property
    def _is_left_out(self) -> bool:
        return self._current in (_LOWER_AND_SKIP, "skip", "rollback")

    def _agreed(self, wanted: str, *, has_cause: bool) -> tuple[str, int, bool]:
        """Return the agreed action, a rank that wants it, and True if that rank names a cause. A collective."""
        if not self._has_ranks:
            return wanted, 0, has_cause
        number, ranks = 2 * _BY_STRENGTH.index(wanted) + (has_cause and wanted != ""), self._trainer.world_size
        number, rank = divmod(self._largest(number * ranks + self._trainer.global_rank), ranks)
        return _BY_STRENGTH[number // 2], rank, number % 2 == 1

    def _largest(self, number: int) -> int:
        """Return the largest number of all ranks. A collective."""
        strategy = self._trainer.strategy
        return int(strategy.reduce(torch.tensor(float(number), device=strategy.root_device), reduce_op="max"))

    def _begin_action(self, optimizer: Any, because: str, reading: Reading | None) -> None:
        if self._is_left_out and self._batches is not None:
            self._batches.leave_out(self._in_step)
        if self._current == "rollback":
            with pause_recording():
                self._plan = self._planned()
        if self._current in ("lower_lr", _LOWER_AND_SKIP):
            _lower_rates(self._trainer, self._lr_factor)
            self._lowered *= self._lr_factor
        with pause_recording():
            if self._is_left_out:
                self._scaler_state = _scaler_state(self._trainer)
                if not _leaves_alone(optimizer):
                    self._untouched = _Saved([optimizer])
                if reading is not None and reading.batches:
                    _set_back(reading.batches[0])
        self._count += 1
        self._note(because, math.nan if reading is None else reading.values[0])

    def _drop_gradients(self, optimizer: Any) -> None:
        """Remove the gradients. Torch optimizers skip parameters without a gradient, so nothing changes."""
        scaler: Any = getattr(self._trainer.precision_plugin, "scaler", None)
        parameters = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
        if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            # Without gradients, the scaler would raise an error. With an infinite gradient, it skips the step.
            for each in parameters:
                each.grad.fill_(math.inf)
            return
        for each in parameters:
            each.grad = None

    def _planned(self) -> tuple[_Good, str]:
        """Return the state to restore, and the reason why the batches since then are not repeated. A collective."""
        states, step = self._states(), logged_step(self._trainer)
        good = next((each for each in states if each.number is not None), None)
        before, repeats = self._repeats
        repeats = repeats + 1 if step <= before else 1
        if good is None or good.number is None or self._batches is None:
            why = "training_step reads the loader itself"
        elif repeats > _MOST_REPEATS:
            why = "they have led to a bad step again"
        elif not self._is_finite():
            why = "they have made a parameter that is not finite"
        else:
            why = self._batches.why_not(good.number)
        if self._has_ranks and self._largest(bool(why)):
            why = why or "those of another rank cannot come again"
        if why or good is None:
            self._repeats = -1, 0
            return states[0], why
        self._repeats = step + step - good.step + 1, repeats
        return good, ""

    def _is_finite(self) -> bool:
        groups = (group for each in self._trainer.optimizers for group in each.param_groups)
        return all(bool(local_values(each.detach()).isfinite().all()) for group in groups for each in group["params"])

    def end_batch(self, *, has_stepped: bool) -> bool:
        """End a batch: complete the action. If there is none, schedule the next copy of the state.

        Returns:
            True if the step was left out.
        """
        if self._batches is not None:
            self._batches.end_batch()
        if not has_stepped:
            return False
        is_left_out, action, self._current = self._is_left_out, self._current, ""
        self._in_step = 0
        untouched, self._untouched = self._untouched, None
        if untouched is not None:
            untouched.restore()
        if self._scaler_state is not None:
            self._set_scaler(self._scaler_state)
            self._scaler_state = None
        if is_left_out:
            for optimizer in self._trainer.optimizers:
                optimizer.zero_grad(set_to_none=True)
        plan, self._plan = self._plan, None
        if plan is not None:
            self._go_back(*plan)
        elif self._good and not action:
            self._is_due = logged_step(self._trainer) + 1 - self._good[-1].step >= self._every
        return is_left_out

    def _go_back(self, good: _Good, why_not: str) -> None:
        """Restore a state, and repeat the batches since then unless ``why_not`` gives a reason against it."""
        batches, number = self._batches, good.number
        self._good, self._of_epoch, self._is_due = [], None, False  # the next batch begins with a state to keep
        if why_not or batches is None or number is None:
            good.saved.restore(but=_SCHEDULED)  # the schedules go on with the batches
            return
        is_repeated = batches.has_since(number)
        if is_repeated or not self._trainer.is_last_batch:
            good.saved.restore()
            for each, state in zip(self._trainer.lr_scheduler_configs, good.schedules, strict=True):
                each.scheduler.load_state_dict(_copied(state))
            if good.lowered != self._lowered:
                _lower_rates(self._trainer, self._lowered / good.lowered)
        else:
            # After the last batch of an epoch, schedulers that step once per epoch have already changed these settings.
            good.saved.restore(but=_SCHEDULED)
        if good.scaler is not None:
            self._set_scaler(good.scaler)
        _set_floats(good.counters)
        if is_repeated:
            batches.go_back(number)

    def _set_scaler(self, state: dict[str, Any]) -> None:
        scaler: Any = self._trainer.precision_plugin.scaler  # type: ignore[attr-defined]  # it has a state
        scaler.load_state_dict(state)

    def _keep(self, *, is_regular: bool) -> None:
        """Keep the state before this batch, and the previous state.

        A rollback restores the previous state, because the cause may be some steps back.

        Args:
            is_regular: False for an additional state at the start of an epoch.
        """
        with pause_recording():
            buffers = [each for _, each in named_buffers_of(self._pl_module)]
            good = _Good(
                logged_step(self._trainer),
                None if self._batches is None else self._batches.number,
                _Saved(self._trainer.optimizers, buffers),
                [_copied(each.scheduler.state_dict()) for each in self._trainer.lr_scheduler_configs],
                _scaler_state(self._trainer),
                self._counters.keep(),
                self._lowered,
            )
        if is_regular:
            self._good, self._is_due = [*self._good[-1:], good], False
            self._of_epoch = None if self._good[0].number is not None else self._of_epoch
        else:
            self._of_epoch = good
        numbers = [each.number for each in self._states() if each.number is not None]
        if self._batches is not None and numbers:
            self._batches.forget(min(numbers))

    def _states(self) -> list[_Good]:
        """Return the states that are kept, in order."""
        states = self._good if self._of_epoch is None else [*self._good, self._of_epoch]
        return sorted(states, key=lambda each: each.step)

    def _note(self, because: str, loss: float) -> None:
        """Report an action. After the last allowed action, also log that no more will follow."""
        step, action = logged_step(self._trainer), self._current.partition("+")[0]
        note = finding_of_action(
            action,
            step,
            loss,
            because,
            back=0 if self._plan is None else step - self._plan[0].step,
            why_not="" if self._plan is None else self._plan[1],
            factor=self._lr_factor,
            is_left_out=self._is_left_out,
            earlier=self._acted.get(action),
        )
        self._acted[action] = note
        rank_zero_info(f"{note.verdict[:1].upper()}{note.verdict[1:]}")
        if self._count == self._limit:
            rank_zero_info(f"StepWatch has acted {self._limit} times and acts no more, because of max_actions")
        self._report(note)


@dataclass
class _Good:
    """The state before a batch."""

    step: int  # counted as self.log does
    number: int | None  # the number of the batch in the current epoch; None if it is of an earlier epoch
    saved: _Saved
    schedules: list[Any]  # the states of the schedulers
    scaler: dict[str, Any] | None
    counters: list[tuple[Slot, Any]]
    lowered: float  # the product of the factors of the learning rates so far


class _Saved:
    """A copy of optimizer states, of the parameters of these optimizers, and of buffers."""

    def __init__(self, optimizers: Iterable[Any], buffers: Iterable[Tensor] = ()) -> None:
        self._optimizers = [
            (each, _copied(each.state), [_settings(group) for group in each.param_groups]) for each in optimizers
        ]
        changed = [
            each for optimizer, _, _ in self._optimizers for group in optimizer.param_groups for each in group["params"]
        ]
        self._values = [(each, each.detach().clone()) for each in [*changed, *buffers]]

    def restore(self, but: tuple[str, ...] = ()) -> None:
        """Restore everything except the settings of parameter groups that are named in ``but``."""
        with torch.no_grad():
            for tensor, values in self._values:
                tensor.data.copy_(values)
            for optimizer, state, groups in self._optimizers:
                _refill(optimizer.state, state)
                for group, settings in zip(optimizer.param_groups, groups, strict=False):
                    _refill_settings(group, settings, but)


def _copied(value: Any) -> Any:
    """Return a deep copy of a state. Dictionary keys, such as parameters, are not copied."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(map(_copied, value))
    return value if isinstance(value, (nn.Module, torch.Generator)) else copy.deepcopy(value)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: _copied(each) for key, each in group.items() if key != "params"}


def _refill_settings(group: dict[str, Any], settings: dict[str, Any], but: tuple[str, ...]) -> None:
    for key, value in settings.items():
        if key not in but:
            group[key] = _put_back(group.get(key), value)


def _refill(table: Any, values: dict[Any, Any]) -> None:
    """Restore a dictionary in place. Later changes to the dictionary do not change the saved ``values``."""
    for key in [key for key in table if key not in values]:
        del table[key]
    for key, value in values.items():
        table[key] = _put_back(table.get(key), value)


def _put_back(now: Any, value: Any) -> Any:
    """Return an earlier value. A tensor of the same shape and dtype, or a dictionary, is restored in place."""
    if isinstance(value, Tensor) and isinstance(now, Tensor) and now.shape == value.shape and now.dtype == value.dtype:
        # Write to the same tensor, because code that a program has compiled or captured may refer to it.
        return now.copy_(value)
    if isinstance(value, dict) and isinstance(now, dict):
        _refill(now, value)
        return now
    return _copied(value)


def _leaves_alone(optimizer: Any) -> bool:
    """Return True if an optimizer changes nothing at all without gradients."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim.") and not isinstance(optimizer, torch.optim.LBFGS)


def _set_back(kept: KeptBatch) -> None:
    """Restore buffers, random number generators and float counters of the model to their values before a batch.

    Integers, such as counts of steps, keep their current values.
    """
    for table, name, values in kept.buffers:
        buffer = dict.get(table, name)
        if buffer is not None and buffer.shape == values.shape:
            buffer.data.copy_(values)
        else:
            put_entry(table, name, values.clone())
    kept.random.restore()
    _set_floats(kept.counters)


def _set_floats(counters: list[tuple[Slot, Any]]) -> None:
    for slot, value in counters:
        if isinstance(value, float):
            slot.write(value)


def _scaler_state(trainer: Trainer) -> dict[str, Any] | None:
    scaler: Any = getattr(trainer.precision_plugin, "scaler", None)
    return None if scaler is None else scaler.state_dict() or None


def _lower_rates(trainer: Trainer, factor: float) -> None:
    """Multiply all learning rates by a factor, including the base rates of the schedulers."""
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            for name in _RATES:
                if isinstance(group.get(name), Tensor):
                    group[name].mul_(factor)
                elif isinstance(group.get(name), (int, float)):
                    group[name] *= factor
    waiting: list[Any] = [each.scheduler for each in trainer.lr_scheduler_configs]
    while waiting:
        scheduler = waiting.pop()
        waiting += getattr(scheduler, "_schedulers", ())
        for name in _BASE_RATES:
            if isinstance(getattr(scheduler, name, None), list):
                setattr(scheduler, name, [each * factor for each in getattr(scheduler, name)])
