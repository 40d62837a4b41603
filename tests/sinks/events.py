"""Helpers that read event files with TensorBoard's own reader."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import text_format  # type: ignore[import-untyped]  # its stubs are in a separate package
from numpy.typing import NDArray
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.compat.proto.graph_pb2 import GraphDef

__all__ = ["parse_graph_def", "pixels_of", "read_events", "summaries"]


def read_events(folder: Path) -> EventAccumulator:
    """Return all events of a folder, without sampling."""
    keep_all = {"scalars": 0, "histograms": 0, "images": 0, "tensors": 0}
    accumulator = EventAccumulator(str(folder), size_guidance=keep_all)
    accumulator.Reload()
    return accumulator


def pixels_of(event: Any) -> NDArray[np.uint8]:
    """Return the pixels of an image event."""
    with Image.open(io.BytesIO(event.encoded_image_string)) as picture:
        return np.asarray(picture.convert("RGB"))


def parse_graph_def(text: str) -> Any:
    """Parse the graph from the text that the server sends to the page."""
    return text_format.Parse(text, GraphDef())


def summaries(folder: Path) -> dict[str, Any]:
    """Return the last summary of each tag as it is in the file."""
    values = {}
    for path in sorted(folder.glob("events.out.*")):
        for event in LegacyEventFileLoader(str(path)).Load():
            values.update({value.tag: value for value in event.summary.value})
    return values
