"""Finds the sample that makes a step bad: the step is run again without parts of its batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_recorder.callbacks.lightning import LightningModule, Trainer
from lightning_recorder.callbacks.replay import ReplayError, computed
from lightning_recorder.check.answer import NoAnswerError
from lightning_recorder.check.batches import rows_of, take_rows
from lightning_recorder.internals.module_tree import parameters_of
from lightning_recorder.structure import ignore_unknown, iter_tensors
from lightning_recorder.watch import KeptBatch

__all__ = ["FoundRow", "describe_row", "find_row", "search"]

_MOST_DESCRIBED = 3  # tensors


@dataclass(frozen=True)
class FoundRow:
    """The sample without which a step is as usual."""

    place: int  # its place in the batch
    value: float  # the loss or the gradient norm with it
    # The same without it; None if other samples of the batch are bad as well. ``value`` is then that of the sample
    # alone.
    without: float | None
    replays: int  # the number of times that the step was run again


def find_row(
    trainer: Trainer,
    pl_module: LightningModule,
    kept: KeptBatch,
    is_bad: Callable[[float, float], bool],
    *,
    of_gradient: bool,
) -> FoundRow | None:
    """Run a step again without parts of its batch until the sample that makes it bad is known.

    At most about twice the logarithm of the number of samples are run. Everything is the same afterwards.

    ``is_bad`` tells from the loss of some samples, or with ``of_gradient`` from the gradient norm, whether they are
    bad. It also gets that of the whole batch.

    Returns:
        None if no sample makes the step bad, or if the samples cannot be told apart.

    Raises:
        ReplayError: If the step cannot be run again.
        Exception: If the step raises an error that it did not raise before.
    """
    try:
        samples = rows_of(kept.batch)
    except NoAnswerError:
        return None
    if samples < 2 or kept.is_changed:
        return None
    parameters = list(parameters_of(pl_module))
    values: dict[tuple[int, ...], float] = {}

    def value(rows: Sequence[int]) -> float:
        key = tuple(rows)
        if key not in values:
            batch = take_rows(kept.batch, list(rows))
            found = computed(trainer, pl_module, kept, batch, parameters, of_gradient=of_gradient)
            values[key] = math.nan if found is None else found
        return values[key]

    every = range(samples)
    whole = value(every)
    if not is_bad(whole, whole):
        raise ReplayError("the step is as usual when it is run again")
    found = search(samples, lambda rows: is_bad(value(rows), whole))
    if found is None:
        return None
    place, is_only = found
    if is_only:
        return FoundRow(place, whole, value([each for each in every if each != place]), len(values))
    return FoundRow(place, value([place]), None, len(values))


def search(samples: int, is_bad: Callable[[Sequence[int]], bool]) -> tuple[int, bool] | None:
    """Return the bad one of some samples, and True if it is the only one; None if there is none.

    Example:
        >>> search(8, lambda rows: 5 in rows)
        (5, True)
        >>> search(8, lambda rows: 5 in rows or 2 in rows)
        (2, False)
    """
    every = range(samples)
    left = list(every)
    # Most samples stay, so that the statistics of a normalization do.
    while len(left) > 1:
        half = left[: len(left) // 2]
        left = left[len(half) :] if is_bad(_without(every, half)) else half
    if not is_bad(_without(every, left)):
        return left[0], True
    left, usual = list(every), False
    while len(left) > 1:
        half, rest = left[: len(left) // 2], left[len(left) // 2 :]
        is_first = is_bad(half)
        usual |= not is_first
        left = half if is_first else rest
    # Otherwise nothing may depend on the samples.
    usual = usual or not is_bad(rest)
    return (left[0], False) if usual else None


def _without(rows: Sequence[int], some: Sequence[int]) -> list[int]:
    return [each for each in rows if each not in some]


def describe_row(batch: Any, place: int) -> str:
    """Return the values of a sample beside those of the others in its batch; empty if there are no numbers."""
    parts: list[str] = []
    for path, tensor in iter_tensors(batch, "batch", unknown=ignore_unknown):
        if len(parts) == _MOST_DESCRIBED:
            break
        if type(tensor) is Tensor and tensor.dim() and len(tensor) > 1 and not tensor.is_complex():
            values = tensor.detach().double()
            others = torch.cat([values[:place], values[place + 1 :]])
            if values.numel():
                parts.append(f"{path}: {_range(values[place])}, in the other samples {_range(others)}")
    return "; ".join(parts)


def _range(values: Tensor) -> str:
    finite = values[values.isfinite()]
    if not finite.numel():
        return "no finite value"
    low, high = float(finite.min()), float(finite.max())
    bad = f" and {values.numel() - finite.numel()} not finite" if finite.numel() < values.numel() else ""
    return (f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}") + bad
