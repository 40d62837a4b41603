"""Placeholder image for missing data."""

from __future__ import annotations

from lightning_recorder.plots.canvas import GREY, Image
from lightning_recorder.plots.frame import WIDTH, new_canvas

__all__ = ["blank"]


def blank(title: str, why: str) -> Image:
    """Return a small image that explains why there is no plot, ``[100, 350, 3]``."""
    canvas = new_canvas(100, title)
    canvas.text(WIDTH / 2, 60, why, anchor="mm", colour=GREY)
    return canvas.pixels()
