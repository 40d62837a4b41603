"""Observations of a forward pass: the calls of loss functions, and a part of each module's inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import Self, override

from lightning_recorder.functions import FUNCTIONS, KNOWN, sides_of_loss
from lightning_recorder.module_names import named_submodules
from lightning_recorder.structure import ignore_unknown, iter_tensors
from lightning_recorder.watch.origin import line_of_user

__all__ = ["CLASSIFICATION", "REGRESSION", "LossCall", "ModuleCall", "Observation", "Pass"]

REGRESSION = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
CLASSIFICATION = ("cross_entropy", "nll_loss")
_BINARY = ("binary_cross_entropy", "binary_cross_entropy_with_logits")
_LOSSES = (*REGRESSION, *CLASSIFICATION, *_BINARY)
_SUBTRACTIONS = {torch.sub, Tensor.sub, Tensor.__sub__, Tensor.__rsub__}


@dataclass(frozen=True)
class LossCall:
    """A call of a loss function of torch."""

    name: str  # the name of the function, such as ``"cross_entropy"``
    prediction: Tensor  # the first argument
    target: Tensor  # the second argument
    line: str  # the line of code of the call
    ignored: int = -100  # the value of targets that the loss ignores

    @property
    def has_classes(self) -> bool:
        """True if the targets are class indices."""
        return self.name in CLASSIFICATION and not self.target.is_floating_point()


@dataclass(frozen=True)
class ModuleCall:
    """A call of a module."""

    name: str  # the name of the module
    kind: str  # the name of the module's class
    is_training: bool  # the flag ``training`` of the module
    inputs: tuple[Tensor, ...]  # the kept part of each input
    outputs: tuple[Tensor, ...]  # the kept part of each output


@dataclass
class Pass:
    """The observations of one forward pass.

    Args:
        loss: The loss, if the step returned one.
        losses: The calls of loss functions, in order.
        modules: The calls of modules, in the order in which they ended.
        outputs: The floating-point outputs of the last module that no other module called. Scalars are left out.
        dropouts: The lines of code that called an active dropout function.
        broadcasts: Each line of code that subtracted a row and a column from each other, with the two shapes.
    """

    loss: Tensor | None = None
    losses: list[LossCall] = field(default_factory=list)
    modules: list[ModuleCall] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    dropouts: list[str] = field(default_factory=list)
    broadcasts: list[tuple[str, str]] = field(default_factory=list)

    @property
    def predictions(self) -> list[Tensor]:
        """The predictions passed to torch loss functions. Without such a loss, the outputs of the last module."""
        return [each.prediction for each in self.losses] or self.outputs


class Observation(TorchFunctionMode):
    """Observe a forward pass. ``keep``, if given, returns the part of each module input and output to keep."""

    def __init__(self, net: nn.Module, keep: Callable[[Tensor], Tensor | None] | None = None) -> None:
        super().__init__()
        self.seen = Pass()
        self._net, self._keep = net, keep
        self._stack = ExitStack()
        self._inputs: list[tuple[Tensor, ...]] = []

    @override
    def __enter__(self) -> Self:
        for name, module in named_submodules(self._net).items():
            if name and not isinstance(module, torch.jit.ScriptModule):
                before = module.register_forward_pre_hook(self._enter_module, with_kwargs=True)
                after = module.register_forward_hook(partial(self._leave_module, name))
                self._stack.callback(before.remove)
                self._stack.callback(after.remove)
        super().__enter__()  # type: ignore[no-untyped-call]  # of torch
        return self

    @override
    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # of torch
        self._stack.close()

    def _enter_module(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inputs.append(self._kept((args, kwargs)))

    def _leave_module(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        inputs = self._inputs.pop() if self._inputs else ()
        kind, outputs = type(module).__name__, self._kept(output)
        self.seen.modules.append(ModuleCall(name, kind, module.training, inputs, outputs))
        if not self._inputs:
            found = [each for _, each in iter_tensors(output, unknown=ignore_unknown)]
            self.seen.outputs = [each for each in found if each.dim() and each.is_floating_point()] or self.seen.outputs

    def _kept(self, value: Any) -> tuple[Tensor, ...]:
        if self._keep is None:
            return ()
        with torch.no_grad():
            found = [self._keep(each.detach()) for _, each in iter_tensors(value, unknown=ignore_unknown)]
        return tuple(each.clone() for each in found if each is not None)

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = KNOWN.get(func, "")
        if name in _LOSSES:
            self._see_loss(name, args, kwargs)
        elif name and FUNCTIONS[name].kind == "dropout":
            self._see_dropout(args, kwargs)
        elif func in _SUBTRACTIONS:
            self._see_subtraction(args)
        return func(*args, **kwargs)

    def _see_loss(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        sides = sides_of_loss(name, args, kwargs)
        if "in.prediction" in sides:  # losses of pairs have no prediction
            target, ignored = sides["in.target"].detach().clone(), kwargs.get("ignore_index", -100)
            self.seen.losses.append(LossCall(name, sides["in.prediction"], target, line_of_user(), ignored))

    def _see_dropout(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        rate = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        if kwargs.get("training", args[2] if len(args) > 2 else True) and rate:
            self.seen.dropouts.append(line_of_user())

    def _see_subtraction(self, args: Sequence[Any]) -> None:
        if len(args) < 2 or not all(isinstance(each, Tensor) and each.dim() for each in args[:2]):
            return
        one, other = args[:2]
        is_column = one.dim() != other.dim() and one.numel() == other.numel() == max(one.shape[0], other.shape[0]) > 1
        if is_column and one.requires_grad != other.requires_grad:
            self.seen.broadcasts.append((line_of_user(), f"{list(one.shape)} and {list(other.shape)}"))
