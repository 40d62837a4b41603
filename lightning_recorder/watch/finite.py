"""Checks of tensors for values that are not finite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_recorder.internals.autograd import is_transformed

__all__ = ["adds", "bad_count", "floating", "has_infinity", "is_checkable"]


def bad_count(tensor: Tensor) -> tuple[int, bool]:
    """Return the number of values that are not finite, and True if there is a NaN."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor.to_dense()
    finite = torch.isfinite(tensor)
    if not tensor.numel() or bool(finite.all()):
        return 0, False
    return int(finite.numel() - int(finite.sum())), bool(torch.isnan(tensor).any())


def adds(result: Tensor, args: Any) -> bool:
    """Return True if an element of the result is bad and no element of the inputs at its place is."""
    new = ~torch.isfinite(result.detach())
    for tensor in floating(args):
        new = new & torch.isfinite(tensor.detach()).broadcast_to(new.shape)
    return bool(new.any())


def floating(values: Any) -> Iterator[Tensor]:
    """Yield the tensors with floating-point numbers in the arguments or the result of an operation."""
    todo = list(values)
    while todo:
        value = todo.pop(0)
        if isinstance(value, Tensor):
            if is_checkable(value):
                yield value
        elif isinstance(value, (list, tuple)):
            todo += value
        elif isinstance(value, dict):
            todo += value.values()


def is_checkable(tensor: Tensor) -> bool:
    """Return True if a tensor has floating-point or complex numbers that can be read."""
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return is_number and not is_transformed(tensor) and tensor.device.type != "meta"


def has_infinity(values: Any) -> bool:
    """Return True if a number among the arguments is infinite, or a tensor without dimensions is."""
    todo = list(values)
    while todo:
        value = todo.pop()
        if isinstance(value, float) and value in (float("inf"), float("-inf")):
            return True
        if isinstance(value, (list, tuple)):
            todo += value
        elif isinstance(value, dict):
            todo += value.values()
    return False
