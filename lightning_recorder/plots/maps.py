"""Plots of the channels or attention heads of a layer, for one sample."""

from __future__ import annotations

from typing import Any

from lightning_recorder.plots.arrays import to_floats
from lightning_recorder.plots.canvas import Image
from lightning_recorder.plots.grid import chosen, grid_of

__all__ = ["attention_maps", "feature_maps"]


def feature_maps(tensor: Any, *, title: str, max_maps: int = 64, shared: bool = True) -> Image:
    """Draw the channels of a sample side by side.

    Args:
        tensor: The feature maps, ``[channels, height, width]`` or ``[batch, channels, height, width]``. Only the first
            sample of a batch is drawn.
        title: The title of the image.
        max_maps: The maximum number of channels, up to 256. If there are more, evenly spaced ones are drawn.
        shared: If True, use one colour scale for all channels. Otherwise each channel has its own, so that weak ones
            stay visible.

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
    rows, said = chosen(len(values), max_maps, "max_maps", "channels")
    scale = "one scale of colours for all channels" if shared else "each channel has its own scale of colours"
    captions = [str(row) for row in rows]
    return grid_of(values[rows], captions, title=title, label="activation", shared=shared, notes=[*notes, *said, scale])


def attention_maps(tensor: Any, *, title: str, max_maps: int = 16, shared: bool = False) -> Image:
    """Draw the attention of each query to each key, with the heads side by side.

    Args:
        tensor: The attention weights, ``[heads, queries, keys]`` or ``[batch, heads, queries, keys]``. Only the first
            sample of a batch is drawn.
        title: The title of the image.
        max_maps: The maximum number of heads, up to 256. If there are more, evenly spaced ones are drawn.
        shared: If True, use one colour scale for all heads. By default each head has its own, because a head that
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
    rows, said = chosen(len(values), max_maps, "max_maps", "heads")
    scale = "one scale of colours for all heads" if shared else "each head has its own scale of colours"
    captions = [f"head {row}" for row in rows]
    return grid_of(values[rows], captions, title=title, label="weight", shared=shared, notes=[*notes, *said, scale])
