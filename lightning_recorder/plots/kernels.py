"""Plot of the weights of a first layer, one small image per output."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from lightning_recorder.errors import ArgumentError
from lightning_recorder.plots.arrays import Floats, to_floats
from lightning_recorder.plots.canvas import Image
from lightning_recorder.plots.grid import chosen, grid_of

__all__ = ["kernels"]

_EXPECTED = "[out, in, height, width] of a convolution or [out, in] of a linear layer"


def kernels(
    weight: Any, *, title: str, max_kernels: int = 64, shape: tuple[int, ...] | None = None, shared: bool = True
) -> Image:
    """Draw the kernels of all outputs side by side.

    A kernel with three inputs is drawn in colour, scaled from its smallest to its largest weight. Otherwise the weights
    for the first input are drawn, on a scale centred on 0.

    Args:
        weight: The weight of a convolution, ``[out, in, height, width]``, or of a linear layer, ``[out, in]``. The
            inputs of a linear layer must be the pixels of a square image with one or three channels, or of an image
            with the given ``shape``.
        title: The title of the image.
        max_kernels: The maximum number of kernels, up to 256. If there are more, evenly spaced ones are drawn.
        shape: The shape of the inputs of a linear layer: ``(height, width)`` or ``(channels, height, width)``.
        shared: If True, use one colour scale for all kernels. Kernels in colour always have their own scale.

    Returns:
        The image, ``[height, 350, 3]``, at most 1,600 pixels high.

    Raises:
        ArgumentError: If the weight has another shape, or if the inputs of a linear layer do not form an image.
    """
    values = to_floats("weight", weight, _EXPECTED, 2, 4)
    if values.ndim == 2:
        values = values.reshape(len(values), *_picture_shape(values.shape[1], shape))
    elif shape is not None:
        raise ArgumentError("shape is that of the inputs of a linear layer; a convolution has its own")
    rows, notes = chosen(len(values), max_kernels, "max_kernels", "kernels")
    values = values[rows]
    captions = [str(row) for row in rows]
    if values.shape[1] == 3 and values.size:
        notes.append("inputs as red, green and blue, each kernel from its smallest weight to its largest")
        return grid_of(_colours(values), captions, title=title, label="", notes=notes)
    if values.shape[1] > 1:
        notes.append(f"the weights of the first of {values.shape[1]:,} inputs")
    notes.append("one scale of colours for all kernels" if shared else "each kernel has its own scale of colours")
    first = values[:, 0] if values.shape[1] else values.reshape(0, 1, 1)
    return grid_of(first, captions, title=title, label="weight", shared=shared, notes=notes)


def _picture_shape(inputs: int, shape: tuple[int, ...] | None) -> tuple[int, ...]:
    if shape is not None:
        if len(shape) not in (2, 3) or math.prod(shape) != inputs:
            raise ArgumentError(f"shape must be (height, width) or (channels, height, width) of {inputs} inputs")
        return (1, *shape)[-3:]
    for channels in (1, 3):
        side = math.isqrt(inputs // channels)
        if channels * side * side == inputs:
            return channels, side, side
    raise ArgumentError(
        f"weight has the shape [out, {inputs}], which is no square picture; give its shape=(height, width)"
    )


def _colours(values: Floats) -> Floats:
    """Return kernels as colours from 0 to 1, ``[n, height, width, 3]``; NaN and infinities are unchanged."""
    inside = np.isfinite(values)
    axes = (1, 2, 3)
    low = np.where(inside, values, np.inf).min(axis=axes, keepdims=True)
    high = np.where(inside, values, -np.inf).max(axis=axes, keepdims=True)
    low, high = np.where(np.isfinite(low), low, 0.0), np.where(np.isfinite(high), high, 1.0)
    # Computed in halves, because the difference of two float64 may overflow. A constant kernel is grey.
    span = high / 2 - low / 2
    with np.errstate(invalid="ignore"):
        placed = np.where(span > 0, (values / 2 - low / 2) / np.where(span > 0, span, 1.0), 0.5)
    return np.moveaxis(np.where(inside, placed, values), 1, -1)
