"""TensorBoard events with scalars and histograms, encoded for many tags at once.

The wire format is that of protocol buffers. The fields are those of ``Event``, ``Summary`` and ``HistogramProto`` in
``tensorboard/compat/proto``. Messages of protobuf cost several times as much, because each value is an object.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.reductions import Histogram, TaggedHistograms

__all__ = ["ScalarTags", "event", "histogram_summary"]

_DOUBLE = 8  # bytes
_SUMS = np.dtype([(f"{kind}{number}", form) for number in range(5) for kind, form in (("key", "u1"), ("value", "<f8"))])
# The keys of min, max, num, sum and sum_squares.
_SUM_KEYS = (0x09, 0x11, 0x19, 0x21, 0x29)


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
    parts = _all_parts(histograms, most) if isinstance(histograms, TaggedHistograms) else _parts(histograms, most)
    for tag, sums, limits, counts in parts:
        size = _varint(len(limits))
        histogram = b"".join((sums, b"\x32", size, limits, b"\x3a", size, counts))
        value = b"".join((tag, b"\x2a", _varint(len(histogram)), histogram))
        pieces += [b"\x0a", _varint(len(value)), value]
    return b"".join(pieces)


_Part = tuple[bytes, bytes, bytes, bytes]  # the tag, the five sums, the upper edges and the counts


def _all_parts(histograms: TaggedHistograms, most: int) -> Iterator[_Part]:
    limits, counts, starts = histograms.coarsened(most)
    below = np.concatenate(([0.0], np.cumsum(counts)))
    sums = np.insert(histograms.sums, 2, below[starts[1:]] - below[starts[:-1]], axis=1)
    packed, edges, numbers = _packed_sums(sums), limits.astype("<f8").tobytes(), counts.astype("<f8").tobytes()
    ends = (starts * _DOUBLE).tolist()
    for place, tag in enumerate(histograms.tags):
        first, last = ends[place], ends[place + 1]
        if last > first:
            of_tag = packed[place * _SUMS.itemsize : (place + 1) * _SUMS.itemsize]
            yield _tag(tag), of_tag, edges[first:last], numbers[first:last]


def _parts(histograms: Mapping[str, Histogram], most: int) -> Iterator[_Part]:
    for tag, histogram in histograms.items():
        if histogram.count:
            drawn = histogram.coarsened(most)
            sums = (histogram.min, histogram.max, histogram.count, histogram.sum, histogram.sum_squares)
            limits, counts = drawn.edges[1:].astype("<f8"), drawn.counts.astype("<f8")
            yield _tag(tag), _packed_sums(np.array([sums])), limits.tobytes(), counts.tobytes()


def _packed_sums(sums: NDArray[np.float64]) -> bytes:
    """Return the fields of min, max, num, sum and sum_squares, 45 bytes for each row of ``[tags, 5]``."""
    packed = np.empty(len(sums), dtype=_SUMS)
    for number, key in enumerate(_SUM_KEYS):
        packed[f"key{number}"], packed[f"value{number}"] = key, sums[:, number]
    return packed.tobytes()
