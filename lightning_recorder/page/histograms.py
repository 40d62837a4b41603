"""The histograms of the page: counts by powers of two for some records of each site."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.bins import BINS, BINS_PER_OCTAVE
from lightning_recorder.errors import DumpError
from lightning_recorder.records.classes import CLASS_COUNTS
from lightning_recorder.records.counts import pairs_of

if TYPE_CHECKING:
    from lightning_recorder.recordings import Series

__all__ = ["histograms_by_octave", "packed_numbers", "unpack_all"]

_STEPS = 24  # the most histograms of one site; more cannot be distinguished in its panel
_OCTAVES = BINS // 2 // BINS_PER_OCTAVE  # the number of octaves of one sign
_ZERO = _OCTAVES - 2  # the index of the bin of zero, between the negative and the positive octaves
_SHOWN_OCTAVES = 16
_LONGEST_NUMBER = 9  # the most bytes of an encoded number, which has up to 63 bits


def histograms_by_octave(series: Series, each: int) -> dict[str, Any]:
    """Return counts by powers of two for some records of each site, from the most negative to the largest values.

    Args:
        series: The records.
        each: The approximate number of records for each site; at most 24.

    Raises:
        DumpError: If a histogram is damaged.
    """
    steps = series.steps
    count = min(len(steps), _STEPS, max(2, each))
    chosen = [steps[place] for place in np.unique(np.linspace(0, len(steps) - 1, count).astype(int))] if steps else []
    places = {site: place for place, site in enumerate(series.sites)}
    tables = np.zeros((len(places), len(chosen), 2 * _ZERO + 1))
    for at, step in enumerate(chosen):
        # Classes are no numbers on an axis, so their sites get no histogram.
        packed = {
            site: each for site, each in series.packed_counts(step).items() if not site.path.endswith(CLASS_COUNTS)
        }
        tables[[places[site] for site in packed], at] = _by_octave(list(packed.values()))
    return {"steps": chosen, "sites": [_trimmed(table) if chosen else None for table in tables]}


def _by_octave(packed: Sequence[object]) -> NDArray[np.float64]:
    """Return counts by octave, from the most negative values over zero to the largest, without infinities and NaN."""
    index, bins, counts = unpack_all(packed)
    places = index * (2 * _OCTAVES) + bins // BINS_PER_OCTAVE
    octaves = np.bincount(places, counts, minlength=len(packed) * 2 * _OCTAVES).reshape(-1, 2, _OCTAVES)[:, :, :-1]
    # The first octave contains zero and the subnormal values.
    zero = octaves[:, :, :1].sum(1)
    return np.concatenate([octaves[:, 1, :0:-1], zero, octaves[:, 0, 1:]], axis=1)


def unpack_all(packed: Sequence[object]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Decode the non-empty bins of many histograms at once, in order.

    Args:
        packed: The encoded histograms, as for :func:`~lightning_recorder.records.counts.unpack_counts`; ``None`` is an
            empty one.

    Returns:
        The index of the histogram, the bin, and its count, ``[n]`` int64 each.

    Raises:
        DumpError: If an item is not an encoded histogram.

    Example:
        >>> [each.tolist() for each in unpack_all([None, bytes([7, 1, 164, 2, 244, 3])])]
        [[1, 1], [7, 300], [1, 500]]
    """
    try:
        parts = [b"" if each is None else pairs_of(each) for each in packed]
        lengths, numbers = _numbers(np.frombuffer(b"".join(parts), dtype=np.uint8))
        # No number may extend into the next histogram, and each gap needs a count.
        ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        stops = np.concatenate([[0], np.cumsum(lengths)])
        pairs = np.searchsorted(stops, ends)
        if (stops[pairs] != ends).any() or (pairs % 2).any():
            raise ValueError("its last number is incomplete")
        each = np.diff(pairs, prepend=0) // 2
        index = np.repeat(np.arange(len(parts)), each)
        places = np.cumsum(numbers[::2] + 1)
        bins = places - 1 - np.repeat(np.concatenate([[0], places])[pairs // 2 - each], each)
        if bins.size and (bins.max() >= BINS or numbers.max() >= 2**53 or numbers.min() < 0):
            raise ValueError("it has a bin or a count that is too large")
    except ValueError as error:
        raise DumpError(f"this is not a histogram written by lightning_recorder: {error}") from error
    return index, bins, numbers[1::2]


def _numbers(data: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Decode LEB128 numbers; return the length in bytes and the value of each."""
    ends = np.flatnonzero(data < 128)
    if data.size and (not ends.size or ends[-1] != data.size - 1):
        raise ValueError("its last number is incomplete")
    lengths = np.diff(ends, prepend=-1)
    if ends.size and lengths.max() > _LONGEST_NUMBER:
        raise ValueError("a count has more than 63 bits")
    first = ends - lengths + 1
    shifts = 7 * (np.arange(data.size) - np.repeat(first, lengths))
    parts = (data & 127).astype(np.int64) << shifts
    return lengths, np.add.reduceat(parts, first) if ends.size else parts


def _trimmed(table: NDArray[np.float64]) -> dict[str, Any] | None:
    """Return the nonempty octaves. Magnitudes far below the largest count as zero, to save room."""
    used = np.flatnonzero(table.any(0)) - _ZERO
    if not used.size:
        return None
    least = max(1, int(np.abs(used).max()) - _SHOWN_OCTAVES)
    near = slice(_ZERO - least + 1, _ZERO + least)
    table[:, _ZERO] = table[:, near].sum(1)
    table = np.concatenate([table[:, : near.start], table[:, [_ZERO]], table[:, near.stop :]], axis=1)
    used, zero = np.flatnonzero(table.any(0)), near.start
    first, end = int(used[0]), int(used[-1]) + 1
    counts = packed_numbers(table[:, first:end])
    return {"first": first - zero, "rows": end - first, "least": least, "counts": counts}


def packed_numbers(values: NDArray[Any]) -> str:
    """Return numbers as base64 of little-endian float32."""
    with np.errstate(over="ignore"):
        return base64.b64encode(np.ascontiguousarray(values, dtype="<f4").tobytes()).decode()
