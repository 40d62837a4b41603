"""Conversion of tensors and arrays to NumPy arrays with a checked shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_recorder.errors import ArgumentError

__all__ = ["Floats", "checked_names", "checked_steps", "to_floats"]

Floats = NDArray[np.float64]


def to_floats(name: str, values: Any, expected: str, *dimensions: int) -> Floats:
    """Convert numbers to float64; copy only if the dtype or the device differs.

    Args:
        name: The name of the argument, for the error message.
        values: A tensor, an array or a nested sequence of numbers.
        expected: A description of the allowed shapes, for example ``[layers, steps]``.
        dimensions: The allowed numbers of dimensions.

    Raises:
        ArgumentError: If the values are not numbers or have a wrong number of dimensions; the message gives the
            expected shape.

    Note:
        A tensor on a device is copied to the host, which synchronizes the device.
    """
    if isinstance(values, torch.Tensor):
        if values.device.type == "meta" or values.is_complex() or values.layout != torch.strided:
            raise ArgumentError(f"{name} must be numbers {expected}, got a tensor that has no such values")
        values = values.detach().to("cpu", torch.float64).numpy()
    try:
        found = np.asarray(values)
        if found.dtype.kind not in "fiub":
            raise TypeError(f"an array of {found.dtype}")
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{name} must be numbers {expected}, got {error}") from error
    if found.ndim not in dimensions:
        raise ArgumentError(f"{name} must have the shape {expected}, got {list(found.shape)}")
    return found.astype(np.float64, copy=False)


def checked_steps(steps: Any) -> Floats:
    """Convert steps to float64, ``[steps]``.

    Raises:
        ArgumentError: If the steps are not finite or not strictly ascending.
    """
    found = to_floats("steps", steps, "[steps]", 1)
    if not np.isfinite(found).all() or (np.diff(found) <= 0).any():
        raise ArgumentError("steps must be finite and ascend, each greater than the one before")
    return found


def checked_names(names: Sequence[str], count: int, what: str) -> list[str]:
    """Convert names to strings and check that there is one per row.

    Raises:
        ArgumentError: If the number of names differs from ``count``.
    """
    if isinstance(names, str) or len(names) != count:
        raise ArgumentError(f"names must be one for each of the {count} {what}, got {names!r:.80}")
    return [str(name) or "(root)" for name in names]
