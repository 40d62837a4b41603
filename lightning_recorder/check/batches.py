"""Make copies of batches with other samples or other values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_recorder.check.answer import NoAnswerError
from lightning_recorder.internals.preserve_state import own_copies
from lightning_recorder.structure import ignore_unknown, iter_tensors

__all__ = ["changed", "few_rows", "named_tensors", "rows_of", "take_rows"]

_FEW = (5, 7, 4, 6, 3, 2)
"""The numbers of samples to choose from. The first numbers rarely equal another dimension of a tensor."""


def named_tensors(batch: Any) -> dict[str, Tensor]:
    """Return the tensors of a batch by path, such as ``batch[0]``."""
    return dict(iter_tensors(batch, "batch", unknown=ignore_unknown))


def changed(batch: Any, change: Callable[[str, Tensor], Tensor]) -> Any:
    """Return a copy of a batch in which each tensor is replaced.

    Args:
        batch: The batch, of any type.
        change: A function that takes the path and the detached tensor, and returns the replacement.
    """
    paths = iter([path for path, _ in iter_tensors({"batch": batch}, "", unknown=ignore_unknown)])
    return own_copies({"batch": batch}, lambda tensor: change(next(paths).removeprefix("."), tensor))["batch"]


def rows_of(batch: Any) -> int:
    """Return the number of samples in a batch.

    Raises:
        NoAnswerError: If the batch has no tensors, or if its tensors have different first dimensions.
    """
    sizes = {each.shape[0] for each in named_tensors(batch).values() if each.dim()}
    if not sizes:
        raise NoAnswerError("the batch has no tensors")
    if len(sizes) > 1:
        raise NoAnswerError("the tensors of the batch have different first dimensions, so its samples are not known")
    return sizes.pop()


def take_rows(batch: Any, indices: Tensor | list[int]) -> Any:
    """Return a copy of a batch with only the samples at these indices."""

    def taken(_: str, tensor: Tensor) -> Tensor:
        return tensor[torch.as_tensor(indices, device=tensor.device)] if tensor.dim() else tensor.clone()

    return changed(batch, taken)


def few_rows(batch: Any) -> int:
    """Return a small number of samples that differs from all other dimensions of the batch.

    The batch dimension can then be recognized by its size.

    Raises:
        NoAnswerError: If the batch has a single sample.
    """
    rows = rows_of(batch)
    others = {size for each in named_tensors(batch).values() for size in each.shape[1:]}
    fitting = [number for number in _FEW if number <= rows]
    if not fitting:
        raise NoAnswerError("the batch has a single sample")
    return next((number for number in fitting if number not in others), fitting[0])
