"""Helpers that read values from images."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pictures

from lightning_recorder.plots.canvas import Image
from lightning_recorder.plots.frame import Table

__all__ = ["MAX_PNG_BYTES", "data_in", "hex_of", "names_of", "place_of", "png_bytes"]

MAX_PNG_BYTES = 300_000


def png_bytes(image: Image) -> int:
    """Return the size of an image as a PNG file, encoded like in the sinks."""
    file = io.BytesIO()
    Pictures.fromarray(image).save(file, "png")
    return file.tell()


def data_in(image: Image, color: int = 0x8C) -> Image:
    """Return the pixels inside the first frame that is taller than a color bar."""
    grey = (image == color).all(axis=-1)
    runs = [_longest_run(row) for row in grey]
    for top, (left, length) in enumerate(runs):
        if length > 50:
            below = grey[top + 1 :, left : left + length].all(axis=-1)
            height = int(below.argmax()) if below.any() else 0
            # The color bar has no vertical lines between it and the data.
            if height > 12 and grey[top : top + height, [left, left + length - 1]].all():
                return image[top + 1 : top + 1 + height, left + 1 : left + length - 1]
    raise AssertionError("the picture has no frame")


def _longest_run(row: NDArray[np.bool_]) -> tuple[int, int]:
    """Return the start and the length of the longest run of True values."""
    ends = np.flatnonzero(np.diff(np.concatenate(([0], row.astype(int), [0]))))
    if not len(ends):
        return 0, 0
    starts, lengths = ends[::2], ends[1::2] - ends[::2]
    return int(starts[lengths.argmax()]), int(lengths.max())


def place_of(color: NDArray[np.uint8], table: Table) -> float:
    """Return the position of a color in its table, from 0 to 1; raise ValueError if the table does not contain it."""
    (found,) = np.unique(np.flatnonzero((table == color).all(axis=-1)))[:1]
    return float(found) / 255


def hex_of(color: NDArray[np.uint8]) -> str:
    """Return a color as a string like ``#21918c``."""
    red, green, blue = color.tolist()
    return f"#{red:02x}{green:02x}{blue:02x}"


def names_of(count: int) -> list[str]:
    """Return long, distinct names."""
    return [f"network.backbone.transformer.encoder.layers.{i}.self_attention.query" for i in range(count)]
