"""Acts on bad steps, if the user asks for it: leaves them out, goes back, or lowers the learning rate."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_recorder.callbacks.lightning import LightningModule, Trainer, rank_zero_info
from lightning_recorder.callbacks.trainer import logged_step
from lightning_recorder.errors import describe_call, warn
from lightning_recorder.insight import Finding
from lightning_recorder.internals.module_tree import named_buffers_of, put_entry
from lightning_recorder.internals.pause_recording import pause_recording
from lightning_recorder.watch import KeptBatch, Reading
from lightning_recorder.watch.verdict import finding_of_action

__all__ = ["ACTIONS", "StepActions"]

ACTIONS = ("lower_lr", "skip", "rollback")
"""The actions on a bad step."""

_LOWER_AND_SKIP = "lower_lr+skip"
_BY_STRENGTH = ("", "lower_lr", _LOWER_AND_SKIP, "skip", "rollback")  # all ranks take the strongest that one wants
_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
_BASE_RATES = ("base_lrs", "max_lrs")
# The settings of a group that a scheduler changes. A scheduler is not set back.
_SCHEDULED = (*_RATES, "momentum", "betas", "base_momentum", "max_momentum")


class StepActions:
    """Acts on the bad steps of one fit.

    An action is decided before the optimizer steps. With several ranks, they agree on it in each step, so that all of
    them act, or none.
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
        self._good: list[tuple[int, _Saved]] = []
        self._acted: dict[str, Finding] = {}
        self._count = 0
        self._current = ""  # of _BY_STRENGTH, for the step in progress
        self._untouched: _Saved | None = None
        self._scaler_state: dict[str, Any] | None = None

    def ask(self, finding: Finding, step: int) -> str:
        """Return the action for a finding, an empty string for none.

        A function is called once for each finding. If it returns an action, it is called again at later steps with
        such a finding.
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

    def begin_batch(self) -> None:
        """Begin a batch. Every rank must call it equally often."""
        self._has_decided = False
        if not self._good and self._keeps:
            self._keep(logged_step(self._trainer))

    def before_step(
        self,
        optimizer: Any,
        finding: Finding | None = None,
        reading: Reading | None = None,
        *,
        has_cause: bool = False,
    ) -> None:
        """Decide on the action before an optimizer steps, and prepare it. Every rank must call it equally often.

        ``has_cause`` is True if the finding names the origin or the row of its value, and is not about a gradient that
        may come from another rank.
        """
        if not self._has_decided:  # an optimizer may compute the gradients of a step several times
            self._has_decided = True
            wanted = ""
            try:
                if finding is not None and reading is not None and self._count < self._limit:
                    wanted = self.ask(finding, reading.step)
                    # A value that is not finite would spoil the parameters at any learning rate.
                    wanted = _LOWER_AND_SKIP if wanted == "lower_lr" and reading.is_bad else wanted
            finally:  # otherwise the other ranks would wait for this one
                self._current, rank, is_named = self._agreed(wanted, has_cause=has_cause)
            if self._current:
                is_shown = finding is not None and (has_cause or not is_named)
                because = finding.verdict if finding is not None and is_shown else f"a finding on rank {rank}"
                self._begin_action(optimizer, because, reading)
        if self._is_left_out:
            self._drop_gradients(optimizer)

    @property
    def _is_left_out(self) -> bool:
        return self._current in (_LOWER_AND_SKIP, "skip", "rollback")

    def _agreed(self, wanted: str, *, has_cause: bool) -> tuple[str, int, bool]:
        """Return the action that all ranks take, a rank that wants it, and True if it names a cause. A collective."""
        trainer = self._trainer
        if not self._has_ranks:
            return wanted, 0, has_cause
        number = 2 * _BY_STRENGTH.index(wanted) + (has_cause and wanted != "")
        flag = torch.tensor(
            float(number * trainer.world_size + trainer.global_rank), device=trainer.strategy.root_device
        )
        number, rank = divmod(int(trainer.strategy.reduce(flag, reduce_op="max")), trainer.world_size)
        return _BY_STRENGTH[number // 2], rank, number % 2 == 1

    def _begin_action(self, optimizer: Any, because: str, reading: Reading | None) -> None:
        if self._current in ("lower_lr", _LOWER_AND_SKIP):
            _lower_rates(self._trainer, self._lr_factor)
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
        """Let an optimizer change nothing: torch's skip parameters that have no gradient."""
        scaler: Any = getattr(self._trainer.precision_plugin, "scaler", None)
        parameters = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
        if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            # Without a gradient, the scaler would raise. It skips a step with an infinite one.
            for each in parameters:
                each.grad.fill_(math.inf)
            return
        for each in parameters:
            each.grad = None

    def end_batch(self, *, has_stepped: bool, is_good: bool) -> bool:
        """End a batch: complete the action, or keep the state after a step without a bad value.

        Returns:
            True if the step was left out.
        """
        if not has_stepped:
            return False
        is_left_out, action, self._current = self._is_left_out, self._current, ""
        untouched, self._untouched = self._untouched, None
        if untouched is not None:
            untouched.restore()
        if self._scaler_state is not None:
            scaler: Any = self._trainer.precision_plugin.scaler  # type: ignore[attr-defined]  # it has a state
            scaler.load_state_dict(self._scaler_state)
            self._scaler_state = None
        if is_left_out:
            for optimizer in self._trainer.optimizers:
                optimizer.zero_grad(set_to_none=True)
        steps = logged_step(self._trainer) + 1
        if action == "rollback":
            good = self._good[0][1]
            good.restore(but=_SCHEDULED)
            self._good = [(steps, good)]
        elif self._keeps and is_good and not action and steps - self._good[-1][0] >= self._every:
            self._keep(steps)
        return is_left_out

    def _keep(self, steps: int) -> None:
        """Keep the state after some steps, and the one before, which is used: the cause may be some steps back."""
        with pause_recording():
            buffers = [each for _, each in named_buffers_of(self._pl_module)]
            saved = _Saved(self._trainer.optimizers, buffers)
        self._good = [*self._good[-1:], (steps, saved)]

    def _note(self, because: str, loss: float) -> None:
        """Report an action, and that there will be no more."""
        step, action = logged_step(self._trainer), self._current.partition("+")[0]
        note = finding_of_action(
            action,
            step,
            loss,
            because,
            back=step - self._good[0][0] if action == "rollback" else 0,
            factor=self._lr_factor,
            is_left_out=self._is_left_out,
            earlier=self._acted.get(action),
        )
        self._acted[action] = note
        rank_zero_info(f"{note.verdict[:1].upper()}{note.verdict[1:]}")
        if self._count == self._limit:
            rank_zero_info(f"StepWatch has acted {self._limit} times and acts no more, because of max_actions")
        self._report(note)


class _Saved:
    """A copy of the states of optimizers, of the parameters that they change, and of buffers."""

    def __init__(self, optimizers: Iterable[Any], buffers: Iterable[Tensor] = ()) -> None:
        self._optimizers = [
            (each, _copied(each.state), [_settings(group) for group in each.param_groups]) for each in optimizers
        ]
        changed = [
            each for optimizer, _, _ in self._optimizers for group in optimizer.param_groups for each in group["params"]
        ]
        self._values = [(each, each.detach().clone()) for each in [*changed, *buffers]]

    def restore(self, but: tuple[str, ...] = ()) -> None:
        """Set everything back, except for some settings of groups of parameters."""
        with torch.no_grad():
            for tensor, values in self._values:
                tensor.data.copy_(values)
            for optimizer, state, groups in self._optimizers:
                _refill(optimizer.state, state)
                for group, settings in zip(optimizer.param_groups, groups, strict=False):
                    _refill_settings(group, settings, but)


def _copied(value: Any) -> Any:
    """Return a copy of a state; the parameters that are its keys stay the same."""
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
    """Give a dictionary the values of its copy, which stays a copy."""
    for key in [key for key in table if key not in values]:
        del table[key]
    for key, value in values.items():
        table[key] = _put_back(table.get(key), value)


def _put_back(now: Any, value: Any) -> Any:
    """Return an earlier value, in the current object if that is a tensor or a dictionary like it."""
    if isinstance(value, Tensor) and isinstance(now, Tensor) and now.shape == value.shape and now.dtype == value.dtype:
        # Code that a program has compiled or captured may refer to the tensor.
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
    """Set buffers, random numbers and the floats that a model counts with back to their values before a batch.

    Whole numbers, such as counts of steps, go on.
    """
    for table, name, values in kept.buffers:
        buffer = dict.get(table, name)
        if buffer is not None and buffer.shape == values.shape:
            buffer.data.copy_(values)
        else:
            put_entry(table, name, values.clone())
    kept.random.restore()
    for slot, value in kept.counters:
        if isinstance(value, float):
            slot.write(value)


def _scaler_state(trainer: Trainer) -> dict[str, Any] | None:
    scaler: Any = getattr(trainer.precision_plugin, "scaler", None)
    return None if scaler is None else scaler.state_dict() or None


def _lower_rates(trainer: Trainer, factor: float) -> None:
    """Multiply all learning rates by a factor, with those that the schedulers start from."""
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
