"""Run the training step of a fit repeatedly, and restore all state after each run."""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_recorder.check.answer import NoAnswerError
from lightning_recorder.check.batches import few_rows, rows_of, take_rows
from lightning_recorder.check.influence import Influences, find_influences
from lightning_recorder.check.passes import Observation, Pass
from lightning_recorder.internals.module_tree import named_parameters_of
from lightning_recorder.internals.preserve_state import own_copies, same_random_numbers

__all__ = ["Bench", "StepFunctions", "Training"]

FORWARD, BACKWARD = 1 / 3, 2 / 3
"""The cost of a forward and of a backward pass, in training steps."""
_ROUNDING = 1e-3
"""The largest relative difference of losses that rounding on a GPU can cause."""
_STEPS = 12
"""The number of steps of the short training on one batch."""


@dataclass(frozen=True)
class StepFunctions:
    """The functions of a fit that a check calls."""

    # runs the training step on a batch without a backward pass; returns the loss, or None
    train: Callable[[Any], Tensor | None]
    evaluate: Callable[[Any], Any] | None  # runs the validation step on a batch; None if there is no validation step
    # returns a context that restores the model, its gradients, the random numbers and the trainer
    unchanged: Callable[[], AbstractContextManager[None]]
    optimizers: list[Optimizer]
    clip: Callable[[list[nn.Parameter]], None] = lambda _: None  # clips the gradients of parameters as the fit does
    loss_scale: float = 1.0  # the scale of the loss in the backward pass
    is_automatic: bool = True  # False with manual optimization
    # returns a context in which the steps run in full precision, if the fit uses autocast
    without_autocast: Callable[[], AbstractContextManager[None]] | None = None


@dataclass(frozen=True)
class Training:
    """A short training on one batch.

    Args:
        losses: The loss before each step.
        moved: The names of the parameters that changed.
        with_gradient: The names of the parameters that had a nonzero gradient in any step.
        reached: The names of the parameters that had a gradient in any step, even if it was zero.
    """

    losses: list[float]
    moved: set[str]
    with_gradient: set[str]
    reached: set[str]


class Bench:
    """A training step with its model, its batch and its optimizers.

    Every pass begins with the same random numbers, buffers and parameters, and restores them.

    Args:
        net: The model.
        batch: The first batch, on the device of the model. It is never changed.
        functions: The functions of the fit.
        validation_batch: A validation batch, if one is known.
        batch_size: The number of samples in a batch according to the loader, if it is known.
        seconds: The time limit. After it, no further question is asked.
        loader: The loader of the training batches, if there is one.
    """

    def __init__(
        self,
        net: nn.Module,
        batch: Any,
        functions: StepFunctions,
        *,
        validation_batch: Any = None,
        batch_size: int | None = None,
        seconds: float = 20.0,
        loader: Any = None,
    ) -> None:
        self.net, self.batch, self.functions = net, batch, functions
        self.validation_batch, self.batch_size, self.loader = validation_batch, batch_size, loader
        self.spent = 0.0
        """The cost so far, in training steps."""
        self._end = time.monotonic() + seconds
        self._seed = 0

    @property
    def seconds_left(self) -> float:
        """The remaining time in seconds."""
        return self._end - time.monotonic()

    @cached_property
    def rows(self) -> int:
        """The number of samples in the batch.

        Raises:
            NoAnswerError: If the number of samples is not known.
        """
        return rows_of(self.batch)

    @cached_property
    def few(self) -> Any:
        """A few samples of the batch, or the whole batch if the step does not run with few samples.

        Raises:
            NoAnswerError: If the batch has no samples to compare.
        """
        number = few_rows(self.batch)
        if number == self.rows:
            return self.batch
        fewer = take_rows(self.batch, list(range(number)))
        try:
            self.observe(fewer, training=False)
        except NoAnswerError:
            raise
        except Exception:  # noqa: BLE001 - a step that depends on the size of its batch may raise anything
            return self.batch
        return fewer

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that require a gradient, by name."""
        found = {name: each for name, each in named_parameters_of(self.net) if each.requires_grad}
        if not found:
            raise NoAnswerError("no parameter requires a gradient")
        return found

    @property
    def _devices(self) -> set[torch.device]:
        return {each.device for each in self.parameters.values()}

    @cached_property
    def optimizer(self) -> Optimizer:
        """The optimizer.

        Raises:
            NoAnswerError: If there is no optimizer, or if it is not known when the optimizer steps.
        """
        if not self.functions.is_automatic:
            raise NoAnswerError("manual optimization decides itself when which optimizer steps")
        if len(self.functions.optimizers) != 1:
            raise NoAnswerError("there is no optimizer")
        return self.functions.optimizers[0]

    # Passes.

    @contextmanager
    def restored(self, *, training: bool = True) -> Iterator[None]:
        """Restore everything that passes inside this context change.

        Args:
            training: Leave the modules in their modes. If False, put all modules into evaluation mode.

        Raises:
            NoAnswerError: If no time is left.
        """
        if self.seconds_left < 0:
            raise NoAnswerError("the time is up")
        with self.functions.unchanged():
            if not training:
                self.net.eval()
            yield

    def observe(
        self,
        batch: Any = None,
        *,
        training: bool = True,
        keep: Callable[[Tensor], Tensor | None] | None = None,
        gradients: bool = False,
        other_numbers: bool = False,
    ) -> Pass:
        """Run a forward pass of the training step and return the observations.

        Args:
            batch: The batch; by default the first one.
            training: Leave the modules in their modes. If False, put all modules into evaluation mode.
            keep: A function that returns the part of a module's input or output to keep, or None.
            gradients: Keep the autograd graph. Otherwise all tensors are detached.
            other_numbers: Use random numbers that no other pass uses.
        """
        with self.restored(training=training):
            if other_numbers:
                self._draw_other_numbers()
            return self.forward(self.batch if batch is None else batch, keep=keep, gradients=gradients)

    def forward(
        self,
        batch: Any,
        *,
        keep: Callable[[Tensor], Tensor | None] | None = None,
        gradients: bool = True,
        is_own: bool = False,
    ) -> Pass:
        """Run a forward pass without restoring anything. Must be called inside :meth:`restored`.

        Args:
            batch: The batch.
            keep: A function that returns the part of a module's input or output to keep, or None.
            gradients: Keep the autograd graph. Otherwise all tensors are detached.
            is_own: Pass the batch itself to the step instead of a copy.
        """
        with Observation(self.net, keep) as observation:
            loss = self.functions.train(batch if is_own else own(batch))
        self.spent += FORWARD * self._share(batch)
        seen = observation.seen
        seen.loss = loss
        return seen if gradients else detached(seen)

    def evaluate(self, batch: Any) -> Pass:
        """Run the validation step on a batch in evaluation mode, each time with other random numbers."""
        evaluate = self.functions.evaluate
        if evaluate is None:
            raise NoAnswerError("there is no validation step")
        with self.restored(training=False), torch.no_grad():
            self._draw_other_numbers()
            with Observation(self.net) as observation:
                evaluate(own(batch))
        self.spent += FORWARD
        return detached(observation.seen)

    def _draw_other_numbers(self) -> None:
        """Seed the generators so that no other pass has the same numbers. Must be called inside :meth:`restored`."""
        self._seed += 1
        torch.manual_seed(self._seed)

    def gradients(self, loss: Tensor | None, batch: Any = None) -> dict[str, Tensor | None]:
        """Return the unscaled gradient of each parameter. Hooks of parameters do not run.

        Raises:
            NoAnswerError: If there is no loss, or if it does not depend on a parameter.
        """
        if loss is None:
            raise NoAnswerError("the training step returns no loss")
        if not loss.requires_grad:
            raise NoAnswerError("the loss depends on no parameter")
        try:
            # The annotations of torch do not say that a gradient may be None.
            found: tuple[Tensor | None, ...] = torch.autograd.grad(
                loss * self.functions.loss_scale, list(self.parameters.values()), allow_unused=True
            )
        except RuntimeError as error:
            if "checkpoint" in str(error).lower():
                raise NoAnswerError("reentrant checkpointing computes no gradients of single tensors") from error
            raise
        self.spent += BACKWARD * self._share(batch)
        scaled = [None if each is None else each / self.functions.loss_scale for each in found]
        return dict(zip(self.parameters, scaled, strict=True))

    def _share(self, batch: Any) -> float:
        """Return the cost of a pass with this batch relative to a pass with the first batch."""
        try:
            return max(0.25, rows_of(batch) / self.rows) if batch is not None else 1.0
        except NoAnswerError:
            return 1.0

    # Trainings on copies.

    def train(self, steps: int, factor: float = 1.0) -> Training:
        """Train on the first batch for some steps with a copy of the optimizer state, then restore everything.

        Every step has the same random numbers, so that all steps minimize the same function.

        Args:
            steps: The number of steps.
            factor: A factor of the learning rate. During a warmup, the base rate of the scheduler is multiplied instead
                of the current rate.
        """
        with self.restored():
            before = {name: each.detach().clone() for name, each in self.parameters.items()}
            twin = _twin(self.optimizer, factor)
            losses: list[float] = []
            with_gradient: set[str] = set()
            reached: set[str] = set()
            for _ in range(steps):
                with same_random_numbers(self._devices):
                    seen = self.forward(self.batch)
                found = self.gradients(seen.loss)
                losses.append(float(seen.loss.detach()) if seen.loss is not None else float("nan"))
                reached |= {name for name, each in found.items() if each is not None}
                with_gradient |= {name for name, each in found.items() if each is not None and bool(each.any())}
                self._step(twin, found)
            losses.append(self._loss())
            moved = {name for name, each in self.parameters.items() if not torch.equal(each.detach(), before[name])}
        return Training(losses, moved, with_gradient, reached)

    def _step(self, twin: Optimizer, gradients: dict[str, Tensor | None]) -> None:
        for name, each in self.parameters.items():
            each.grad = gradients[name]
        self.functions.clip(list(self.parameters.values()))
        try:
            twin.step()
        except TypeError as error:  # LBFGS and other optimizers that require a closure
            raise NoAnswerError("the optimizer needs a closure") from error

    def _loss(self) -> float:
        loss = self.forward(self.batch, gradients=False).loss  # autograd stays enabled: gradient penalties need it
        return float("nan") if loss is None else float(loss)

    @cached_property
    def trained(self) -> Training:
        """A short training on the first batch."""
        return self.train(_STEPS)

    def loss_at(self, factor: float) -> float:
        """Return the loss after a single step with a multiple of the learning rate."""
        with self.restored():
            twin = _twin(self.optimizer, factor)
            with same_random_numbers(self._devices):
                found = self.first_gradients
            self._step(twin, found)
            return self._loss()

    @cached_property
    def first_gradients(self) -> dict[str, Tensor | None]:
        """The gradients of the first batch."""
        with self.restored():
            return self.gradients(self.forward(self.batch).loss)

    @cached_property
    def influences(self) -> Influences:
        """The influence of each tensor of the batch on the prediction and the loss."""
        return find_influences(self)

    @cached_property
    def repeated(self) -> tuple[Pass, Pass]:
        """The observations of two identical passes with the first batch. They have two numbers per module output."""
        return self.observe(keep=_digest), self.observe(keep=_digest)

    @cached_property
    def is_repeatable(self) -> bool:
        """True if a repeated step has the same loss, except for rounding on the device."""
        first, second = self.repeated
        if first.loss is None or second.loss is None:
            return first.loss is second.loss
        return torch.allclose(first.loss, second.loss, rtol=_ROUNDING, atol=0.0, equal_nan=True)

    @cached_property
    def first(self) -> Pass:
        """The observations of a training pass with the first batch, without the autograd graph."""
        return self.repeated[0]


def _digest(tensor: Tensor) -> Tensor | None:
    """Return two numbers that change if the tensor changes."""
    if not tensor.is_floating_point() or not tensor.numel():
        return None
    values = torch.nan_to_num(tensor.double(), posinf=0.0, neginf=0.0)
    return torch.stack([values.sum(), values.square().sum()])


def own(batch: Any) -> Any:
    """Return a copy of a batch. The step may write to the copy."""
    return own_copies({"batch": batch})["batch"]


def detached(seen: Pass) -> Pass:
    """Return observations without the autograd graph, and with copies of the predictions."""
    losses = [replace(each, prediction=each.prediction.detach().clone()) for each in seen.losses]
    loss = seen.loss if seen.loss is None else seen.loss.detach().clone()
    return replace(seen, loss=loss, losses=losses, outputs=[each.detach().clone() for each in seen.outputs])


def _twin(optimizer: Optimizer, factor: float) -> Optimizer:
    """Return a copy of an optimizer for the same parameters, with a copied state and without the user's hooks."""
    kind = type(optimizer)
    twin: Optimizer = object.__new__(kind)
    vars(twin).update({name: each for name, each in vars(optimizer).items() if name != "step"})
    for name, each in vars(optimizer).items():
        if name.endswith("_hooks") and isinstance(each, OrderedDict):
            vars(twin)[name] = OrderedDict()
    twin.state = defaultdict(dict, {key: deepcopy(each) for key, each in optimizer.state.items()})
    twin.param_groups = [dict(group) for group in optimizer.param_groups]
    for group in twin.param_groups:
        rate = max(float(group["lr"]), float(group.get("initial_lr", 0.0)), float(group.get("max_lr", 0.0)))
        group["lr"] = torch.as_tensor(rate * factor) if isinstance(group["lr"], Tensor) else rate * factor
    return twin
