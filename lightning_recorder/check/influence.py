"""Find dependencies: change a part of a batch, and compare the predictions and the losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_recorder.check.answer import NoAnswerError
from lightning_recorder.check.batches import changed, named_tensors, rows_of
from lightning_recorder.check.passes import LossCall, Pass

if TYPE_CHECKING:
    from lightning_recorder.check.bench import Bench

__all__ = ["Influence", "Influences", "by_row", "change_of", "find_influences", "is_changed", "tolerance"]

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_COARSE = 0.05  # the tolerance for half precision
_NEGLIGIBLE = 1e-7
_HUGE = 1e30
_MOST_TENSORS = 8
_FEWEST = 4  # the minimum number of elements from which an order can be recognized


def tolerance(tensor: Tensor) -> float:
    """Return the largest relative change of values that rounding in the dtype of a tensor can explain."""
    return _TOLERANCE.get(tensor.dtype, _COARSE)


def change_of(before: Tensor, after: Tensor) -> float:
    """Return the rms of the change divided by the rms of the values, or infinity if the shapes differ."""
    if before.shape != after.shape:
        return float("inf")
    # Masked scores are infinite in both tensors and count as unchanged.
    one, other = (torch.nan_to_num(each.double(), posinf=_HUGE, neginf=-_HUGE) for each in (before, after))
    same = one == other
    one, other = one.masked_fill(same & (one.abs() >= _HUGE), 0), other.masked_fill(same & (other.abs() >= _HUGE), 0)
    size = float(one.square().mean().sqrt()) if one.numel() else 0.0
    change = float((one - other).square().mean().sqrt()) if one.numel() else 0.0
    return change / size if size else change


def is_changed(before: list[Tensor], after: list[Tensor]) -> bool:
    """Return True if any of the tensors has changed, by however little."""
    return len(before) != len(after) or any(
        change_of(one, other) > _NEGLIGIBLE for one, other in zip(before, after, strict=True)
    )


@dataclass(frozen=True)
class Influence:
    """The influence of the values of a batch tensor."""

    on_prediction: bool  # True if the prediction depends on the values
    on_target: bool  # True if the target of a loss function depends on the values
    on_loss: bool  # True if the loss depends on the values


@dataclass(frozen=True)
class Influences:
    """The influences of the tensors of a batch, measured in evaluation mode."""

    base: Pass  # the pass with the unchanged batch
    tensors: Mapping[str, Influence]  # the influence of each tensor that differs among the samples, by path
    batch: Any  # the batch of all passes

    @property
    def inputs(self) -> list[str]:
        """The tensors on which the prediction depends."""
        return [name for name, each in self.tensors.items() if each.on_prediction]

    @property
    def targets(self) -> list[str]:
        """The tensors on which only the loss depends."""
        return [name for name, each in self.tensors.items() if each.on_loss and not each.on_prediction]

    @property
    def unused(self) -> list[str]:
        """The tensors on which neither the prediction nor the loss depends."""
        return [name for name, each in self.tensors.items() if not each.on_loss and not each.on_prediction]


def find_influences(bench: Bench) -> Influences:
    """Permute each tensor of the batch among the samples, and compare predictions and losses."""
    batch = bench.few
    rows = rows_of(batch)
    if rows < 2:
        raise NoAnswerError("the batch has a single sample")
    base = bench.observe(batch, training=False)
    if base.loss is None:
        raise NoAnswerError("the training step returns no loss")
    found: dict[str, Influence] = {}
    varied = {path: each for path, each in named_tensors(batch).items() if each.dim() and _varies(each)}
    for path in list(varied)[:_MOST_TENSORS]:
        other = bench.observe(changed(batch, _rolled(path)), training=False)
        # A target may change a large loss by less than the precision of the loss, so targets are compared as well.
        on_target = is_changed([each.target for each in base.losses], [each.target for each in other.losses])
        on_loss = on_target or other.loss is None or is_changed([base.loss], [other.loss])
        found[path] = Influence(is_changed(base.predictions, other.predictions), on_target, on_loss)
    return Influences(base, found, batch)


def _varies(tensor: Tensor) -> bool:
    return bool((tensor != tensor.roll(1, 0)).any())


def _rolled(path: str) -> Callable[[str, Tensor], Tensor]:
    return lambda name, tensor: tensor.roll(1, 0) if name == path else tensor.clone()


def by_row(prediction: Tensor, call: LossCall, rows: int, batch: Any) -> Tensor | None:
    """Return a prediction with the samples as its first dimension, or None if the samples cannot be separated.

    If a further dimension has the size of the batch, the samples are compared with each other, and None is returned.

    The prediction may come from a pass with any batch. ``call`` is the same loss call in the pass with ``batch``. Its
    target shows the order of the samples.
    """
    if prediction.dim() and prediction.shape[0] == rows:
        return None if rows in prediction.shape[1:] else prediction
    if not prediction.dim() or prediction.shape[0] % rows or not _is_flat(call, rows, batch):
        return None
    return prediction.reshape(rows, prediction.shape[0] // rows, *prediction.shape[1:])


def _is_flat(call: LossCall, rows: int, batch: Any) -> bool:
    """Return True if over 90 % of the target equals a batch tensor, flattened to ``[samples * positions]``."""
    if call.target.dim() != 1 or call.target.numel() % rows:
        return False
    target = call.target.reshape(rows, -1)
    return any(
        max(agreement(target, each, shift, call.ignored) for shift in (0, 1)) > 0.9
        for each in named_tensors(batch).values()
        if each.dim() == 2 and each.shape[0] == rows
    )


def agreement(target: Tensor, tensor: Tensor, shift: int, ignored: int = -100) -> float:
    """Return the share of targets ``[:, t]`` that equal ``tensor[:, t + shift]``.

    Only targets that can distinguish this shift from others are counted.
    """
    if target.dim() < 2 or tensor.dim() < 2 or target.shape[2:] != tensor.shape[2:]:
        return 0.0
    length = min(target.shape[1], tensor.shape[1] - shift)
    if length < 2 or abs(target.shape[1] - tensor.shape[1]) > max(1, shift):
        return 0.0
    one, other = target[:, :length], tensor[:, shift : shift + length]
    # If neighboring elements are equal, a shifted target cannot be distinguished from an unshifted one.
    beside = tensor.roll(1, 1)[:, shift : shift + length] if shift else tensor.roll(-1, 1)[:, :length]
    counted = (one != ignored) & (other != beside)
    if int(counted.sum()) < _FEWEST:
        return 0.0
    return float((one == other)[counted].double().mean())
