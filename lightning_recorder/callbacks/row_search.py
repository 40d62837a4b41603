"""Finds the sample that makes a step bad: the step is run again without parts of its batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_recorder.callbacks.lightning import LightningModule, Trainer
from lightning_recorder.callbacks.replay import computed
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
    without: float  # the same without it; NaN if there are no others
    others: int  # the number of the other samples that both are about
    is_only: bool  # True if these are all others of the batch
    replays: int  # the number of times that the step was run again


def find_row(
    trainer: Trainer,
    pl_module: LightningModule,
    kept: KeptBatch,
    is_bad: Callable[[float], bool],
    whole: float,
    *,
    of_gradient: bool,
    must_be_only: bool = False,
) -> FoundRow | None:
    """Run a step again without parts of its batch until the sample that makes it bad is known.

    At most the logarithm of the number of samples to the base 2, rounded up, and two are run. Everything is the same
    afterwards.

    ``is_bad`` tells from the loss of some samples, or with ``of_gradient`` from the gradient norm, whether they are
    bad. ``whole`` is the value that all had together. With ``must_be_only``, the search ends when several are bad.

    Returns:
        None if no sample makes the step bad, or if the samples cannot be told apart.

    Raises:
        Exception: If the step raises an error that it did not raise before.
    """
    try:
        samples = rows_of(kept.batch)
    except NoAnswerError:
        return None
    if samples < 2 or kept.is_changed:
        return None
    parameters = list(parameters_of(pl_module))
    values: dict[tuple[int, ...], float] = {(): math.nan}

    def value(rows: Iterable[int]) -> float:
        key = tuple(rows)
        if key not in values:
            batch = take_rows(kept.batch, list(key))
            found = computed(trainer, pl_module, kept, batch, parameters, of_gradient=of_gradient)
            values[key] = math.nan if found is None else found
        return values[key]

    found = search(samples, lambda rows: is_bad(value(rows)), must_be_only=must_be_only)
    if found is None:
        return None
    place, usual, is_only = found
    replays = len(values) - 1
    having = whole if is_only else value(sorted([*usual, place]))
    return FoundRow(place, having, value(usual), len(usual), is_only, replays)


def search(
    samples: int, is_bad: Callable[[Sequence[int]], bool], *, must_be_only: bool = False
) -> tuple[int, list[int], bool] | None:
    """Return the bad one of some samples; None if there is none.

    All samples together are known to be bad. At most ``ceil(log2(samples)) + 2`` parts are looked at: as many as tell
    the samples apart, one more for the answer that it is none of them, and the one without the bad sample, which
    tells whether there are others.

    Returns:
        The bad sample, other samples that are not bad without it and bad with it, and True if these are all others.

    Example:
        >>> search(8, lambda rows: 5 in rows)
        (5, [0, 1, 2, 3, 4, 6, 7], True)
        >>> search(8, lambda rows: 5 in rows or 2 in rows)
        (2, [0, 1], False)
    """
    every = list(range(samples))
    first, last = every[: samples // 2], every[samples // 2 :]
    # Some samples that are as usual, and some that make these bad. The usual ones stay in each further part, so that
    # the statistics of a normalization do.
    usual, suspects = last, first
    has_bad = is_bad(last)
    if has_bad:
        usual, suspects = first, last
        if is_bad(first):
            if must_be_only:
                return None
            usual, suspects = [], first
    are_several, rest = not usual, []
    while len(suspects) > 1:
        half, rest = suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]
        if is_bad(sorted([*usual, *half])):
            suspects, has_bad = half, True
        else:
            usual, suspects = sorted([*usual, *half]), rest
    place = suspects[0]
    if are_several:
        # Otherwise nothing may depend on the samples.
        return (place, usual, False) if usual or (rest and not is_bad(rest)) else None
    if not has_bad and not is_bad(every):
        return None  # the step is as usual when it is run again
    others = [each for each in every if each != place]
    is_only = not is_bad(others)
    return place, others if is_only else usual, is_only


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
