"""Runs a training step again to find the origin of its bad value, without changing the training."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_recorder.callbacks.lightning import DummyLogger, LightningModule, Trainer
from lightning_recorder.callbacks.row_shares import RowShares
from lightning_recorder.callbacks.trainer import device_of, is_automatic
from lightning_recorder.errors import RecorderError
from lightning_recorder.internals.autograd import has_accumulate_hooks
from lightning_recorder.internals.module_tree import modules_of, named_buffers_of, named_parameters_of, parameters_of
from lightning_recorder.internals.norms import norms_of
from lightning_recorder.internals.pause_recording import pause_recording
from lightning_recorder.internals.preserve_state import ModuleState, own_copies, same_gradients, same_random_numbers
from lightning_recorder.internals.random_states import RandomStates
from lightning_recorder.module_names import named_submodules
from lightning_recorder.structure import ignore_unknown, iter_tensors
from lightning_recorder.watch import KeptBatch, Origin, OriginTrace

__all__ = [
    "NO_FUNCTION",
    "Replay",
    "ReplayError",
    "computed",
    "is_unknown",
    "loss_of",
    "other_values",
    "replay",
    "run_manual",
    "runs_alone",
    "training_step",
    "unchanged",
]

NO_FUNCTION = "the body of a loop is no function: give Monitor(step_function=…) one that returns the loss"
"""The reason why a step cannot be run again if :func:`is_unknown` returns True."""

_RELATIVE = 1e-3  # the tolerated relative difference between the losses of two runs of the same step on a GPU


class ReplayError(RecorderError, RuntimeError):
    """A step cannot be run again exactly."""


class _NeedsBackward(BaseException):
    """Ends a replay whose gradients cannot be computed by ``torch.autograd.grad``."""


class _StepEnds(BaseException):
    """Ends a replay at the optimizer step before which the bad value was found."""


@dataclass(frozen=True)
class Replay:
    """The result of a replay."""

    origin: Origin | None
    batch: KeptBatch | None


@contextmanager
def other_values(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> Iterator[None]:
    """Set parameters to other values inside the context, and restore their own values at the end."""
    before = [each.detach().clone() for each in parameters]
    # Write through ``.data``: a higher version would make autograd reject saved graphs.
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data.copy_(value)
    try:
        yield
    finally:
        for parameter, value in zip(parameters, before, strict=True):
            parameter.data.copy_(value)


def replay(
    trainer: Trainer, pl_module: LightningModule, batches: Sequence[KeptBatch], *, steps: int = 0, is_exact: bool = True
) -> Replay:
    """Run the batches of a step again, and find the origin of the first bad value in them.

    Parameters, buffers and attributes of the model, gradients, random numbers and the trainer are the same afterwards.
    Nothing is logged, and no optimizer steps.

    Args:
        trainer: The trainer.
        pl_module: The model, with the parameters that the step used.
        batches: The batches of the step, in order, each with the losses of its first run.
        steps: In manual optimization, the number of optimizer steps of the last batch to run before the replay ends.
        is_exact: False if the parameters are those of an earlier step. Then losses may differ, but a loss that was
            finite must still be finite.

    Raises:
        ReplayError: If the step cannot be run again, or has other losses than before.
        CommunicationError: If the step communicates with other processes.
        Exception: If the step raises an error that it did not raise before.
    """
    if is_unknown(trainer, pl_module):
        raise ReplayError(NO_FUNCTION)
    if any(each.is_changed for each in batches):
        raise ReplayError("the step changed its batch in place")
    parameters = list(parameters_of(pl_module))
    device = device_of(pl_module)
    for index, kept in enumerate(batches):
        is_last = index == len(batches) - 1
        run = partial(_run, trainer, pl_module, kept, parameters, steps if is_last else None, is_exact=is_exact)
        try:
            with unchanged(trainer, pl_module, parameters, device), kept.restored(parameters):
                origin = run(by_backward=False)
        except _NeedsBackward:
            with unchanged(trainer, pl_module, parameters, device), kept.restored(parameters):
                origin = run(by_backward=True)
        if origin is not None:
            return Replay(origin, kept)
    return Replay(None, None)


def computed(
    trainer: Trainer,
    pl_module: LightningModule,
    kept: KeptBatch,
    batch: Any,
    parameters: list[nn.Parameter],
    *,
    of_gradient: bool,
    shares: RowShares | None = None,
) -> float | None:
    """Run a step again with another batch, and return the loss or the gradient norm; None if there is no loss.

    All state is restored afterwards, as in :func:`replay`. The step must not communicate.

    Raises:
        ReplayError: If the gradients cannot be computed.
    """
    device = device_of(pl_module)
    with unchanged(trainer, pl_module, parameters, device), kept.restored(parameters):
        with shares or nullcontext():
            loss = loss_of(trainer, pl_module, batch, kept.batch_idx)
        if loss is None:
            return None
        if shares is not None:
            shares.read_loss(loss)
            shares.draws = not RandomStates([device]).equal(kept.random)
        if not of_gradient:
            return float(loss.detach())
        gradients = _Gradients(trainer, parameters, by_backward=False)
        try:
            gradients.add(_scaled(trainer, loss / trainer.accumulate_grad_batches))
        except _NeedsBackward as error:
            raise ReplayError("reentrant checkpointing computes no gradients of parts of a batch") from error
        found = [each.grad for each in parameters if each.grad is not None]
        if not found:
            return None
        norm = torch.linalg.vector_norm(torch.stack(norms_of(found)))
        return float(norm / _scaled(trainer, torch.ones((), device=norm.device)))


@contextmanager
def unchanged(
    trainer: Trainer, pl_module: LightningModule, parameters: list[nn.Parameter], device: torch.device
) -> Iterator[None]:
    """Restore everything that running a step may change."""
    copies = [(each, each.detach().clone()) for each in parameters]
    state = ModuleState(modules_of(pl_module))
    loggers = trainer.loggers
    with ExitStack() as stack:
        # Recorders of this step must not see the replay. The replay needs gradients.
        stack.enter_context(pause_recording())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(same_random_numbers([device]))
        stack.enter_context(same_gradients(parameters))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        try:
            trainer.loggers = [DummyLogger() for _ in loggers]
            for name in ("log", "log_dict", "print"):
                setattr(pl_module, name, _ignore)
            yield
        finally:
            trainer.loggers = loggers
            state.restore()
            for parameter, values in copies:
                # Write through ``.data``: a higher version would make autograd reject saved graphs.
                if not _same_bits(parameter, values):
                    parameter.data.copy_(values)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Do nothing. Replaces functions that have effects outside of the model."""


def _run(
    trainer: Trainer,
    pl_module: LightningModule,
    kept: KeptBatch,
    parameters: list[nn.Parameter],
    steps: int | None,
    *,
    by_backward: bool,
    is_exact: bool,
) -> Origin | None:
    known: dict[str, Tensor] = {f"parameter {name}": each for name, each in named_parameters_of(pl_module)}
    known |= {f"buffer {name}": each for name, each in named_buffers_of(pl_module)}
    batch = own_copies({"batch": kept.batch})["batch"]
    known |= dict(iter_tensors(batch, "batch", unknown=ignore_unknown))
    modules = dict(named_submodules(pl_module))
    gradients = _Gradients(trainer, parameters, by_backward=by_backward)
    with OriginTrace(modules, known) as trace:
        if runs_alone(trainer, pl_module):
            _run_automatic(trainer, pl_module, batch, kept, gradients)
        else:
            run_manual(trainer, pl_module, batch, kept.batch_idx, gradients, steps)
    _check_losses(kept.losses[gradients.begin :], gradients.losses[gradients.begin :], is_exact=is_exact)
    return trace.origin(gradients.symptoms)


def _check_losses(before: list[Tensor], now: list[Tensor], *, is_exact: bool) -> None:
    """Raise ReplayError if a loss differs from the loss of the first run of the step."""
    had, have = ([float(each) for each in losses] for losses in (before, now))
    same = len(had) <= len(have) and all(map(_is_close if is_exact else _is_no_worse, had, have))
    if not same:
        raise ReplayError("the loss was not the same as before: the step depends on more than its batch and torch")


def _is_no_worse(one: float, other: float) -> bool:
    return math.isfinite(other) or not math.isfinite(one)


def _is_close(one: float, other: float) -> bool:
    if not math.isfinite(one):
        return not math.isfinite(other)
    return math.isclose(one, other, rel_tol=_RELATIVE, abs_tol=1e-12)


class Losses(Protocol):
    """Receives the losses of a step with manual optimization."""

    def add(self, loss: Tensor) -> None:
        """Receive a loss on which the step calls ``manual_backward``."""

    def end_step(self) -> None:
        """End a step of an optimizer."""


class _Gradients:
    """Computes the gradients of losses without running hooks that communicate or step an optimizer.

    With ``by_backward``, a backward pass accumulates into the parameters, because reentrant checkpointing needs this.
    """

    def __init__(self, trainer: Trainer, parameters: list[nn.Parameter], *, by_backward: bool) -> None:
        if by_backward and (trainer.world_size > 1 or any(map(has_accumulate_hooks, parameters))):
            raise ReplayError("reentrant checkpointing would run the hooks of the parameters")
        self._parameters, self._by_backward = parameters, by_backward
        self.losses: list[Tensor] = []
        self.begin = 0
        """The number of losses before the latest optimizer step, whose update the parameters already have."""
        self.symptoms: list[Tensor | None] = []

    def end_step(self) -> None:
        """End an optimizer step, and drop the values before it. They were finite, because training took this step."""
        self.begin = len(self.losses)
        self.symptoms.clear()

    def add(self, loss: Tensor, **options: Any) -> None:
        """Compute the gradients of a loss, and add them to the gradients of the parameters."""
        self.losses.append(loss.detach())
        self.symptoms.append(loss.detach())
        wanted = [each for each in self._parameters if each.requires_grad]
        if not loss.requires_grad or not wanted:
            return
        if self._by_backward:
            loss.backward(**options)
            self.symptoms += [each.grad for each in wanted]
            return
        try:
            found = torch.autograd.grad(loss, wanted, allow_unused=True, **options)
        except RuntimeError as error:
            if "checkpoint" in str(error).lower():
                raise _NeedsBackward from error
            raise
        self.symptoms += found
        for parameter, gradient in zip(wanted, found, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def _run_automatic(
    trainer: Trainer, pl_module: LightningModule, batch: Any, kept: KeptBatch, gradients: _Gradients
) -> None:
    loss = loss_of(trainer, pl_module, batch, kept.batch_idx)
    if loss is not None:
        gradients.add(_scaled(trainer, loss / trainer.accumulate_grad_batches))


def loss_of(trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> Tensor | None:
    """Return the loss that the training step, or the function of a loop, computes for a batch; None if it has none."""
    step_function = getattr(trainer, "step_function", None)
    with trainer.precision_plugin.train_step_context():
        output = step_function(batch) if step_function else training_step(pl_module, batch, batch_idx)
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return loss if isinstance(loss, Tensor) else None


def runs_alone(trainer: Trainer, pl_module: LightningModule) -> bool:
    """Return True if a function only computes the loss of a batch, without a backward pass or an optimizer step."""
    return is_automatic(pl_module) or getattr(trainer, "step_function", None) is not None


def is_unknown(trainer: Trainer, pl_module: LightningModule) -> bool:
    """Return True if the steps belong to a loop that provides no function to compute them."""
    return not hasattr(type(pl_module), "training_step") and not runs_alone(trainer, pl_module)


def training_step(pl_module: LightningModule, batch: Any, batch_idx: int) -> Any:
    """Call the training step of a model with the arguments in its signature.

    Raises:
        ReplayError: If the step reads its batches itself.
    """
    arguments = inspect.signature(pl_module.training_step).parameters
    if "dataloader_iter" in arguments:
        raise ReplayError("training_step reads its batches itself")
    return pl_module.training_step(*[batch, batch_idx][: max(1, min(2, len(arguments)))])


def _scaled(trainer: Trainer, loss: Tensor) -> Tensor:
    scaler: Any = getattr(trainer.precision_plugin, "scaler", None)
    scaled: Tensor = loss if scaler is None else scaler.scale(loss)
    return scaled


def run_manual(
    trainer: Trainer,
    pl_module: LightningModule,
    batch: Any,
    batch_idx: int,
    gradients: Losses,
    steps: int | None = None,
) -> None:
    """Run a step with manual optimization, without steps of optimizers and schedulers.

    ``gradients`` receives each loss and each step of an optimizer. The run ends at the optimizer step that follows the
    first ``steps`` optimizer steps. With None, the whole training step runs.

    Raises:
        ReplayError: If the step may communicate with other processes.
    """
    if trainer.world_size > 1:
        raise ReplayError("manual optimization may communicate with other processes")
    done = 0

    def step(*args: Any, closure: Any = None, **kwargs: Any) -> None:
        nonlocal done
        for each in (closure, *args):
            if callable(each):
                each()
        if steps is not None and done >= steps:
            raise _StepEnds
        done += 1
        gradients.end_step()

    def backward(loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        gradients.add(_scaled(trainer, loss))
        return loss

    found: Any = pl_module.optimizers()
    optimizers = found if isinstance(found, (list, tuple)) else [found]
    inner = [getattr(each, "optimizer", each) for each in optimizers]
    with ExitStack() as stack:
        for each in (*optimizers, *inner):
            stack.enter_context(replaced(each, "step", step))
        # Replace the strategy's backward, because the model may override manual_backward, which calls it.
        stack.enter_context(replaced(trainer.strategy, "backward", backward))
        pl_module.lr_schedulers = partial(_idle_schedulers, pl_module.lr_schedulers())  # type: ignore[method-assign]
        try:
            with trainer.precision_plugin.train_step_context():
                training_step(pl_module, batch, batch_idx)
        except _StepEnds:
            pass


class _Idle:
    """A learning rate scheduler that does not step."""

    step = staticmethod(_ignore)


def _idle_schedulers(schedulers: Any) -> Any:
    if isinstance(schedulers, (list, tuple)):
        return [_Idle() for _ in schedulers]
    return None if schedulers is None else _Idle()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of an instance inside the context. The attribute may come from its class."""
    table = vars(owner)
    had, before = name in table, table.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
