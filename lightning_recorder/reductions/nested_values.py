"""Copies, sizes and conversion of values that may contain tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from lightning_recorder.errors import ArgumentError
from lightning_recorder.internals.storage import storage_of

__all__ = ["as_tensor", "check_savable", "copied", "nbytes_of", "tensors_in", "trimmed"]


def trimmed(value: Any) -> Any:
    """Return the value. Copy tensors that keep a larger storage alive, such as one row of a batch."""
    if isinstance(value, Tensor):
        value = value.detach()
        return value.clone() if _is_part(value) else value
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(map(trimmed, value))
    if isinstance(value, dict):
        return {key: trimmed(part) for key, part in value.items()}
    return value


def copied(value: Any, device: torch.device | str | None) -> Any:
    """Return the value with copies of its tensors."""
    if isinstance(value, Tensor):
        return value.clone() if device is None else value.detach().to(device, copy=True)
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(copied(part, device) for part in value)
    if isinstance(value, dict):
        return {key: copied(part, device) for key, part in value.items()}
    return copy.deepcopy(value)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))


def nbytes_of(tensor: Tensor) -> int:
    """Return the size of a tensor in bytes. A sparse tensor, whose size is unknown, counts like a dense tensor."""
    try:
        return tensor.nbytes
    except RuntimeError:
        return tensor.numel() * tensor.element_size()


def _is_part(value: Tensor) -> bool:
    storage = storage_of(value)
    return storage is not None and storage.nbytes() > value.nbytes


def as_tensor(value: Any) -> Tensor:
    """Return a tensor or number as a tensor outside the autograd graph.

    Raises:
        ArgumentError: If the value is neither a tensor nor a number.
    """
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, (Number, bool)):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None, device="cpu")
    raise ArgumentError(
        f"a {type(value).__name__} cannot be saved by name; only tensors and numbers can. apply() can convert it"
    )


def check_savable(value: Any) -> None:
    """Check that a value consists of tensors, numbers and texts, in lists, tuples and dictionaries.

    Raises:
        ArgumentError: If the value contains anything else.
    """
    if isinstance(value, dict):
        parts: list[Any] = [*value, *value.values()]
    elif isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        parts = list(value)
    elif value is None or isinstance(value, (Tensor, Number, str)):
        return
    else:
        raise ArgumentError(
            f"a {type(value).__name__} cannot be saved; only tensors and numbers can, in lists, tuples and dictionaries"
        )
    for part in parts:
        check_savable(part)
