"""Find the sample that makes a step bad, by running the step again without single samples or parts of the batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_recorder.callbacks.lightning import LightningModule, Trainer
from lightning_recorder.callbacks.replay import computed
from lightning_recorder.callbacks.row_shares import RowShares
from lightning_recorder.check.answer import NoAnswerError
from lightning_recorder.check.batches import rows_of, take_rows
from lightning_recorder.internals.module_tree import parameters_of
from lightning_recorder.structure import ignore_unknown, iter_tensors
from lightning_recorder.watch import KeptBatch

__all__ = ["FoundRow", "describe_row", "find_row", "search"]

_MOST_DESCRIBED = 3  # the maximum number of tensors that describe a sample


@dataclass(frozen=True)
class FoundRow:
    """The sample that makes a step bad. Without it, the step has usual values."""

    place: int  # the index of the sample in the batch
    value: float  # the loss or the gradient norm with the sample
    without: float  # the loss or the gradient norm without the sample; NaN without other samples
    others: int  # the number of other samples in both measurements
    is_only: bool  # True if both measurements have all other samples of the batch
    replays: int  # the number of times that the step was run again


def find_row(
    trainer: Trainer,
    pl_module: LightningModule,
    kept: KeptBatch,
    is_bad: Callable[[float], bool],
    *,
    of_gradient: bool,
    must_be_only: bool = False,
) -> FoundRow | None:
    """Run a step again until the sample that makes it bad is known.

    The first replay measures the share of each sample. If a sample stands out, the second replay runs without it. If no
    sample stands out, or the step stays bad, the step is run without parts of its batch; see :func:`search`. All state
    is restored afterwards.

    If the shares of the other samples depend on the removed sample, or are not known, another sample may be the cause.
    The removed sample is then only returned if its values are far larger than the values of all other samples, or if it
    makes each half of the other samples bad, since no other sample is in both halves.

    If the step draws random numbers, the last replay replaces the removed sample by another one, so that each remaining
    sample gets the same random numbers.

    ``is_bad`` receives the loss of some samples, or with ``of_gradient`` their gradient norm, and returns True if the
    value is bad. With ``must_be_only``, the search ends when several samples are bad.

    Returns:
        The sample; None if no sample makes the step bad, or if the samples cannot be distinguished.

    Raises:
        Exception: If the step raises an error that it did not raise before.
    """
    try:
        samples = rows_of(kept.batch)
    except NoAnswerError:
        return None
    if samples < 2 or kept.is_changed:
        return None
    every = list(range(samples))
    parameters = list(parameters_of(pl_module))
    runs: dict[tuple[int, ...], tuple[float, RowShares]] = {}

    def run(rows: Sequence[int]) -> tuple[float, RowShares]:
        key = tuple(rows)
        if key not in runs:
            batch = take_rows(kept.batch, list(key))
            shares = RowShares(batch, len(key), parameters, of_gradient=of_gradient)
            found = computed(trainer, pl_module, kept, batch, parameters, of_gradient=of_gradient, shares=shares)
            runs[key] = math.nan if found is None else found, shares
        return runs[key]

    def looks_bad(rows: Sequence[int]) -> bool:
        return is_bad(run(rows)[0])

    whole, shares = run(every)
    if not is_bad(whole):
        return None  # the step is as usual when it is run again

    def confirmed(place: int, usual: list[int]) -> FoundRow | None:
        """Return the sample at ``place`` if the other samples are bad with it, but not without it."""
        rows = sorted([*usual, place])
        others, kept_places = usual, [index for index, each in enumerate(rows) if each != place]
        if shares.draws:
            others = [min(usual, key=lambda each: abs(each - place)) if each == place else each for each in rows]
        if looks_bad(others) or not looks_bad(rows):
            return None
        (value, having), (without, lacking) = run(rows), run(others)
        same_places = kept_places if shares.draws else range(len(others))
        is_alone = having.agree(lacking, kept_places, same_places) or place == shares.standing_out
        halves = (sorted([*part, place]) for part in (usual[::2], usual[1::2]))
        if not is_alone and not all(map(looks_bad, halves)):
            return None
        return FoundRow(place, value, without, len(usual), len(rows) == samples, len(runs))

    for suspects in shares.suspects(is_bad, whole):
        if len(suspects) == 1 or not must_be_only:
            found = confirmed(suspects[0], [each for each in every if each not in suspects])
            if found is not None:
                return found
    candidate = search(samples, looks_bad, must_be_only=must_be_only)
    if candidate is None:
        return None
    place, usual = candidate
    found = confirmed(place, [each for each in every if each != place])
    if found is not None or must_be_only:
        return found
    if usual:
        return confirmed(place, usual)
    return FoundRow(place, run([place])[0], math.nan, 0, False, len(runs))


def search(
    samples: int, is_bad: Callable[[Sequence[int]], bool], *, must_be_only: bool = False
) -> tuple[int, list[int]] | None:
    """Find the bad sample of a batch by bisection. The whole batch must be bad.

    ``is_bad`` is called at most ``ceil(log2(samples)) + 1`` times: the bisection, and one more call to check whether
    both halves are bad. If both are bad, one further call is made.

    Returns:
        The bad sample, and other samples that are bad with it but not without it; None if no single sample is bad.

    Example:
        >>> search(8, lambda rows: 5 in rows)
        (5, [0, 1, 2, 3, 4])
        >>> search(8, lambda rows: 5 in rows or 2 in rows)
        (2, [0, 1])
    """
    first, last = list(range(samples // 2)), list(range(samples // 2, samples))
    # Usual samples, and suspects that make them bad. Each further call tests suspects together with the usual samples,
    # so that the batch statistics of normalizations change little.
    usual, suspects = last, first
    if is_bad(last):
        usual, suspects = first, last
        if is_bad(first):
            if must_be_only:
                return None
            usual, suspects = [], first
    are_several, rest = not usual, []
    while len(suspects) > 1:
        half, rest = suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]
        if is_bad(sorted([*usual, *half])):
            suspects = half
        else:
            usual, suspects = sorted([*usual, *half]), rest
    if are_several and not usual and not (rest and not is_bad(rest)):
        return None  # the step may be bad with any samples
    return suspects[0], usual


def describe_row(batch: Any, place: int) -> str:
    """Return the value ranges of a sample and of the rest of its batch as text; empty if there are no numbers."""
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
