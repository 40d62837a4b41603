"""Grids of small images: feature maps, attention maps, and the kernels of a first layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_recorder.errors import ArgumentError, check_integer
from lightning_recorder.plots.axes import Floats, Scale, scale_of, to_floats
from lightning_recorder.plots.canvas import DETAIL_PX, Image, shortened
from lightning_recorder.plots.frame import (
    BAR_ROOM,
    MARGIN,
    RIGHT,
    TOP,
    WIDTH,
    blank,
    bottom_room,
    color_bar,
    cover,
    evenly,
    marks_of,
    new_canvas,
    notes_below,
    paint,
    table_for,
)

__all__ = ["attention_maps", "feature_maps", "kernels"]

_WEIGHT_SHAPE = "[out, in, height, width] of a convolution or [out, in] of a linear layer"
_GAP = 5
_CAPTION_PX = 14
_HEIGHTS_PX = (430, 900, 1350)  # total heights of the grid, in the order in which they are tried
_NARROWEST_PX, _WIDEST_PX = 48, 280  # width of one panel
_LONGEST = 8.0  # the maximum aspect ratio of a panel; the shorter side of a longer panel is stretched
_MOST_VALUES = 40_000  # the maximum number of values in all panels together, which limits the size of the file


def feature_maps(
    tensor: Any, *, title: str, max_maps: int = 64, shared: bool = True, label: str = "activation"
) -> Image:
    """Draw the channels of a sample side by side.

    Args:
        tensor: The feature maps, ``[channels, height, width]`` or ``[batch, channels, height, width]``. Only the first
            sample of a batch is drawn.
        title: The title of the image.
        max_maps: The maximum number of channels, up to 256. If there are more, evenly spaced channels are drawn.
        shared: If True, use one color scale for all channels. Otherwise each channel has its own scale, so that weak
            channels stay visible.
        label: The label of the color scale.

    Returns:
        The image, ``[height, 350, 3]``, at most 1,600 pixels high.

    Raises:
        ArgumentError: If the tensor has another shape.
    """
    values = to_floats("tensor", tensor, "[channels, height, width] or [batch, channels, height, width]", 3, 4)
    notes = []
    if values.ndim == 4:
        notes = [f"the first of {len(values):,} samples"] if len(values) > 1 else []
        values = values[0] if len(values) else values.reshape(0, 1, 1)
    rows, omitted = _chosen(len(values), max_maps, "max_maps", "channels")
    scale = "one scale of colors for all channels" if shared else "each channel has its own scale of colors"
    captions = [str(row) for row in rows] if len(rows) > 1 else [""]
    scales = [scale] if len(rows) > 1 else []
    return _grid(values[rows], captions, title=title, label=label, shared=shared, notes=[*notes, *omitted, *scales])


def attention_maps(tensor: Any, *, title: str, max_maps: int = 16, shared: bool = False) -> Image:
    """Draw the attention of each query to each key, with the heads side by side.

    Args:
        tensor: The attention weights, ``[heads, queries, keys]`` or ``[batch, heads, queries, keys]``. Only the first
            sample of a batch is drawn.
        title: The title of the image.
        max_maps: The maximum number of heads, up to 256. If there are more, evenly spaced heads are drawn.
        shared: If True, use one color scale for all heads. By default each head has its own scale, because a head that
            attends to a single key would darken all others.

    Returns:
        The image, ``[height, 350, 3]``, at most 1,600 pixels high.

    Raises:
        ArgumentError: If the tensor has another shape.
    """
    values = to_floats("tensor", tensor, "[heads, queries, keys] or [batch, heads, queries, keys]", 3, 4)
    notes = ["in each panel queries from top to bottom, keys from left to right"]
    if values.ndim == 4:
        notes += [f"the first of {len(values):,} samples"] if len(values) > 1 else []
        values = values[0] if len(values) else values.reshape(0, 1, 1)
    rows, omitted = _chosen(len(values), max_maps, "max_maps", "heads")
    scale = "one scale of colors for all heads" if shared else "each head has its own scale of colors"
    captions = [f"head {row}" for row in rows]
    return _grid(values[rows], captions, title=title, label="weight", shared=shared, notes=[*notes, *omitted, scale])


def kernels(
    weight: Any, *, title: str, max_kernels: int = 64, shape: tuple[int, ...] | None = None, shared: bool = True
) -> Image:
    """Draw the kernels of all outputs side by side.

    A kernel with three inputs is drawn in color, scaled from its smallest to its largest weight. Otherwise the weights
    for the first input are drawn, on a scale centered on 0.

    Args:
        weight: The weight of a convolution, ``[out, in, height, width]``, or of a linear layer, ``[out, in]``. The
            inputs of a linear layer must be the pixels of a square image with one or three channels, or of an image
            with the given ``shape``.
        title: The title of the image.
        max_kernels: The maximum number of kernels, up to 256. If there are more, evenly spaced kernels are drawn.
        shape: The shape of the inputs of a linear layer: ``(height, width)`` or ``(channels, height, width)``.
        shared: If True, use one color scale for all kernels. Kernels in color always have their own scale.

    Returns:
        The image, ``[height, 350, 3]``, at most 1,600 pixels high.

    Raises:
        ArgumentError: If the weight has another shape, or if the inputs of a linear layer do not form an image.
    """
    values = to_floats("weight", weight, _WEIGHT_SHAPE, 2, 4)
    if values.ndim == 2:
        values = values.reshape(len(values), *_picture_shape(values.shape[1], shape))
    elif shape is not None:
        raise ArgumentError("shape is that of the inputs of a linear layer; a convolution has its own")
    rows, notes = _chosen(len(values), max_kernels, "max_kernels", "kernels")
    values = values[rows]
    captions = [str(row) for row in rows]
    if values.shape[1] == 3 and values.size:
        notes.append("inputs as red, green and blue, each kernel from its smallest weight to its largest")
        return _grid(_rgb(values), captions, title=title, label="", notes=notes)
    if values.shape[1] > 1:
        notes.append(f"the weights of the first of {values.shape[1]:,} inputs")
    notes.append("one scale of colors for all kernels" if shared else "each kernel has its own scale of colors")
    first = values[:, 0] if values.shape[1] else values.reshape(0, 1, 1)
    return _grid(first, captions, title=title, label="weight", shared=shared, notes=notes)


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
        f"weight has the shape [out, {inputs}], which is not a square picture; give its shape=(height, width)"
    )


def _rgb(values: Floats) -> Floats:
    """Return kernels as colors from 0 to 1, ``[n, height, width, 3]``; NaN and infinities are unchanged."""
    inside = np.isfinite(values)
    axes = (1, 2, 3)
    low = np.where(inside, values, np.inf).min(axis=axes, keepdims=True)
    high = np.where(inside, values, -np.inf).max(axis=axes, keepdims=True)
    low, high = np.where(np.isfinite(low), low, 0.0), np.where(np.isfinite(high), high, 1.0)
    # Compute with halved values, because the difference of two float64 may overflow. A constant kernel is grey.
    span = high / 2 - low / 2
    with np.errstate(invalid="ignore"):
        placed = np.where(span > 0, (values / 2 - low / 2) / np.where(span > 0, span, 1.0), 0.5)
    return np.moveaxis(np.where(inside, placed, values), 1, -1)


def _chosen(count: int, most: int, option: str, what: str) -> tuple[list[int], list[str]]:
    """Return the indices of the panels to draw, and notes about panels that are left out."""
    check_integer(option, most, 1)
    rows = evenly(count, min(most, 256))
    return rows, [] if len(rows) == count else [
        f"{len(rows)} of {count:,} {what}, evenly spread; the number above each"
    ]


def _grid(
    panels: Floats, captions: Sequence[str], *, title: str, label: str, shared: bool = True, notes: Sequence[str] = ()
) -> Image:
    """Draw panels in rows from left to right, each with a caption.

    Values are drawn on one linear scale, centered on 0 if any value is negative. If ``shared`` is False, the values of
    each panel are first divided by their largest magnitude, so that weak panels stay visible. Panels larger than the
    available space are averaged over blocks.

    The panels are values, ``[n, height, width]``, or colors from 0 to 1, ``[n, height, width, 3]``.

    Returns:
        The image, ``[height, 350, 3]``, at most 1,600 pixels high.
    """
    if not panels.size:
        return blank(title, "the array is empty")
    plane = panels.ndim == 3
    if plane and not shared:
        panels, label = _normed(panels), f"{label} / largest |{label}| of the panel"
    across, box = _layout(len(panels), panels.shape[1], panels.shape[2], WIDTH - 2 * MARGIN)
    panels, block = _pooled(panels, box, max(_MOST_VALUES // (len(panels) * (1 if plane else 2)), 1))
    notes = [*notes, *([f"each pixel is the mean of {block[0]} × {block[1]} values"] if max(block) > 1 else [])]
    height, width = _size(panels.shape[1:3], box)
    values = panels[:, np.arange(height) * panels.shape[1] // height][:, :, np.arange(width) * panels.shape[2] // width]
    scale = scale_of(values, log=False) if plane else Scale("linear", 0.0, 1.0)
    marks = marks_of(values if plane else values.mean(axis=-1), scale)
    pixels = paint(values, scale, table_for(scale)) if plane else _to_bytes(values)
    row = pixels.shape[1] + _CAPTION_PX + _GAP
    top, below = TOP + BAR_ROOM * plane, math.ceil(len(pixels) / across) * row
    canvas = new_canvas(top + below + bottom_room(notes, marks, axis=False), title)
    for index, panel in enumerate(pixels):
        x, y = MARGIN + index % across * (box[1] + _GAP), top + index // across * row
        cover(panel, {mark: where[index] for mark, where in marks.items()})
        canvas.text(x, y + 6, shortened(captions[index], box[1]), px=DETAIL_PX)
        canvas.image(x, y + _CAPTION_PX, panel)
        canvas.frame(x, y + _CAPTION_PX, panel.shape[1], panel.shape[0], "#cfcfcf")
    if plane:
        color_bar(canvas, (RIGHT, top, WIDTH - 2 * RIGHT, below), scale, table_for(scale), label)
    notes_below(canvas, (MARGIN, top, WIDTH - 2 * MARGIN, below), notes, marks, axis=False)
    return canvas.pixels()


def _normed(panels: Floats) -> Floats:
    """Divide each panel by its largest finite magnitude."""
    size = np.where(np.isfinite(panels), np.abs(panels), 0.0).max(axis=(1, 2), keepdims=True)
    return panels / np.where(size > 0, size, 1.0)


def _to_bytes(values: Floats) -> Image:
    return (np.nan_to_num(values, nan=0.0, posinf=1.0, neginf=0.0).clip(0, 1) * 255).round().astype(np.uint8)


def _layout(count: int, rows: int, columns: int, width: int) -> tuple[int, tuple[int, int]]:
    """Return the number of panels per row, and the maximum height and width of a panel that fills the space."""
    aspect = float(np.clip(rows / columns, 1 / _LONGEST, _LONGEST))
    best = (1, (1, 1))
    for limit in _HEIGHTS_PX:
        for across in range(1, count + 1):
            wide = min((width - _GAP * (across - 1)) // across, _WIDEST_PX, int(_HEIGHTS_PX[0] / aspect))
            best = (across, (max(int(wide * aspect), 8), max(wide, 8)))
            if wide < _NARROWEST_PX and limit < _HEIGHTS_PX[-1]:
                break
            if math.ceil(count / across) * (best[1][0] + _CAPTION_PX + _GAP) <= limit:
                return best
    return best


def _pooled(panels: Floats, box: tuple[int, int], most: int) -> tuple[Floats, tuple[int, int]]:
    """Average panels, ``[n, height, width, …]``, over blocks.

    The blocks are large enough that a panel fits into a box and has at most ``most`` pixels.

    Returns:
        The panels, and the height and width of a block in values. Blocks at the lower and right edges may be smaller.
    """
    height, width = panels.shape[1:3]
    down, across = -(-height // box[0]), -(-width // box[1])
    if not _is_long(height, width):
        down = across = max(down, across)
    while -(-height // down) * -(-width // across) > most:
        down, across = down + (down < height), across + (across < width)
    with np.errstate(invalid="ignore", over="ignore"):
        for axis, block in ((1, down), (2, across)):
            if block > 1:
                starts = np.arange(0, panels.shape[axis], block)
                sizes = np.diff(np.append(starts, panels.shape[axis]))
                shape = [-1 if each == axis else 1 for each in range(panels.ndim)]
                # Divide before summing, because a sum of large values may overflow float64.
                panels = np.add.reduceat(panels / block, starts, axis=axis) * (block / sizes).reshape(shape)
    return panels, (down, across)


def _is_long(height: int, width: int) -> bool:
    return not 1 / _LONGEST <= height / width <= _LONGEST


def _size(shape: tuple[int, ...], box: tuple[int, int]) -> tuple[int, int]:
    """Return the height and width of a panel in pixels. The scaling factor is an integer if it is 4 or more."""
    down, across = (max(room / size, 1.0) for room, size in zip(box, shape, strict=True))
    if not _is_long(*shape):
        down = across = min(down, across)
    height, width = (
        int(size * (int(each) if each >= 4 else each) + 1e-9) for size, each in zip(shape, (down, across), strict=True)
    )
    return height, width
