"""What the channels and the heads of a layer gave for one sample."""

from __future__ import annotations

from typing import Any

from lightning_recorder.plots.arrays import to_floats
from lightning_recorder.plots.canvas import Image
from lightning_recorder.plots.grid import chosen, grid_of

__all__ = ["attention_maps", "feature_maps"]


def feature_maps(tensor: Any, *, title: str, max_maps: int = 64, shared: bool = True) -> Image:
    """The channels of a sample side by side.

    Args:
        tensor: ``[channels, height, width]``, or ``[batch, channels, height, width]``, of which the first sample is
            shown.
        title: Of the picture.
        max_maps: The most channels, up to 256; of more so many are drawn, evenly spread.
        shared: Whether one scale of colours holds for all channels; otherwise each has its own, and weak ones are seen.

    Returns:
        ``[height, 350, 3]``, at most 1,600 pixels high.

    Raises:
        ArgumentError: If the shape is another.
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
    """How much each query attends to each key, the heads side by side.

    Args:
        tensor: ``[heads, queries, keys]``, or ``[batch, heads, queries, keys]``, of which the first sample is shown.
        title: Of the picture.
        max_maps: The most heads, up to 256; of more so many are drawn, evenly spread.
        shared: Whether one scale of colours holds for all heads; by default each has its own, since one that attends to
            a single key would darken all others.

    Returns:
        ``[height, 350, 3]``, at most 1,600 pixels high.

    Raises:
        ArgumentError: If the shape is another.
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
