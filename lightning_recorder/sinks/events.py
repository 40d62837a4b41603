"""TensorBoard events with scalars and histograms, encoded for many tags at once.

The wire format is that of protocol buffers. The fields are those of ``Event``, ``Summary`` and ``HistogramProto`` in
``tensorboard/compat/proto``. Messages of protobuf cost several times as much, because each value is an object.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

import numpy as np

from lightning_recorder.reductions import CoarseHistogram, Histogram, Sums, TaggedHistograms

__all__ = ["ScalarTags", "event", "histogram_summary"]

# The key and the value of min, max, num, sum and sum_squares.
_NUMBERS = struct.Struct("<" + 5 * "Bd")


@lru_cache(maxsize=1 << 14)
def _varint(number: int) -> bytes:
    packed = bytearray()
    while number > 127:
        packed.append(number & 127 | 128)
        number >>= 7
    packed.append(number)
    return bytes(packed)


def event(wall_time: float, step: int, summary: bytes) -> bytes:
    """Return an ``Event``.

    Args:
        wall_time: The time in seconds since 1970.
        step: The step.
        summary: The encoded ``Summary``.
    """
    number = b"\x10" + _varint(step & (1 << 64) - 1) if step else b""
    return b"\x09" + struct.pack("<d", wall_time) + number + b"\x2a" + _varint(len(summary)) + summary


@lru_cache(maxsize=1 << 13)
def _tag(tag: str) -> bytes:
    """Return the field with the tag of a value."""
    text = tag.encode()
    return b"\x0a" + _varint(len(text)) + text


class ScalarTags:
    """Encode the scalars of a fixed list of tags.

    Args:
        tags: The tags.
    """

    def __init__(self, tags: Iterable[str]) -> None:
        packed = bytearray()
        places = []
        for tag in map(_tag, tags):
            packed += b"\x0a" + _varint(len(tag) + 5) + tag + b"\x15"
            places.append(len(packed))
            packed += bytes(4)
        self._packed = np.frombuffer(bytes(packed), dtype=np.uint8)
        self._places = np.array(places, dtype=np.int64)[:, None] + np.arange(4)

    def summary(self, scalars: Iterable[float]) -> bytes:
        """Return a ``Summary`` with a float32 for each tag."""
        packed = self._packed.copy()
        with np.errstate(over="ignore"):  # becomes infinite, as in a message
            values = np.fromiter(scalars, dtype=np.float64, count=len(self._places)).astype("<f4")
        packed[self._places] = values.view(np.uint8).reshape(-1, 4)
        return packed.tobytes()


def histogram_summary(histograms: Mapping[str, Histogram], most: int) -> bytes:
    """Return a ``Summary`` with the histograms that have a finite value.

    Args:
        histograms: The histograms by tag.
        most: The maximum number of bins; see :meth:`Histogram.coarsened`.
    """
    pieces = []
    parts: Iterable[tuple[str, Sums, CoarseHistogram]]
    if isinstance(histograms, TaggedHistograms):
        parts = zip(histograms.tags, histograms.sums, histograms.coarsened(most), strict=True)
    else:
        parts = _one_by_one(histograms, most)
    for tag, sums, (count, limits, counts) in parts:
        if count:
            numbers = _NUMBERS.pack(9, sums[0], 17, sums[1], 25, count, 33, sums[2], 41, sums[3])
            size = _varint(len(limits))
            histogram = b"".join((numbers, b"\x32", size, limits, b"\x3a", size, counts))
            value = b"".join((_tag(tag), b"\x2a", _varint(len(histogram)), histogram))
            pieces += [b"\x0a", _varint(len(value)), value]
    return b"".join(pieces)


def _one_by_one(histograms: Mapping[str, Histogram], most: int) -> Iterator[tuple[str, Sums, CoarseHistogram]]:
    for tag, each in histograms.items():
        drawn = each.coarsened(most)
        limits, counts = drawn.edges[1:].astype("<f8"), drawn.counts.astype("<f8")
        sums = Sums(each.min, each.max, each.sum, each.sum_squares)
        yield tag, sums, CoarseHistogram(float(each.count), limits.tobytes(), counts.tobytes())
