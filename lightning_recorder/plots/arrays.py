"""Arrays of either library as numpy has them, with the shape that a plot expects."""

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
    """Numbers as float64; a copy only where they were something else.

    Args:
        name: What the message calls the argument.
        values: A tensor, an array or a nested sequence of numbers.
        expected: The shapes that are allowed, in words, as ``[layers, steps]``.
        dimensions: How many dimensions there may be.

    Raises:
        ArgumentError: If they are no numbers or have another number of dimensions; names the expected shape.

    Note:
        A tensor on a device is copied to the host, which waits for the device.
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
    """Steps as float64, ``[steps]``.

    Raises:
        ArgumentError: If they are not finite or do not ascend.
    """
    found = to_floats("steps", steps, "[steps]", 1)
    if not np.isfinite(found).all() or (np.diff(found) <= 0).any():
        raise ArgumentError("steps must be finite and ascend, each greater than the one before")
    return found


def checked_names(names: Sequence[str], count: int, what: str) -> list[str]:
    """Names as texts, as many as there are rows.

    Raises:
        ArgumentError: If there are more or fewer.
    """
    if isinstance(names, str) or len(names) != count:
        raise ArgumentError(f"names must be one for each of the {count} {what}, got {names!r:.80}")
    return [str(name) or "(root)" for name in names]
