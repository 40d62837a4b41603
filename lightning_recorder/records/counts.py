"""The histograms of many sites: arrays of nonempty bins, and their encoding in record files."""

from __future__ import annotations

import binascii
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lightning_recorder.bins import BINS, BINS_PER_OCTAVE, FINITE_BINS
from lightning_recorder.errors import ArgumentError, DumpError
from lightning_recorder.records.histogram import EDGES, Histogram, between_edges

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "SUMMED",
    "CoarseHistogram",
    "SparseCounts",
    "Sums",
    "TaggedHistograms",
    "counts_of",
    "from_base64",
    "inflated",
    "pairs_of",
    "sums_of",
    "to_base64",
    "to_histogram",
    "unpack_counts",
    "unpacked",
]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_HALF = BINS // 2
_SHIFT = BINS.bit_length() - 1
_MOST_ENTRIES = 1 << 15  # the most bins that are encoded at a time, so that temporary arrays fit into the caches
_FEW_ROWS = 16  # a subset that leaves out at most this many histograms uses the results for all histograms
_CENTER = FINITE_BINS - BINS_PER_OCTAVE  # the bin of zero and the subnormal values


def _places_between_edges() -> Integers:
    """Return the position of each bin in ascending order of values, ``[2048]``; -1 for NaN and infinities."""
    places = np.full(BINS, -1, dtype=np.int64)
    further = np.arange(FINITE_BINS - BINS_PER_OCTAVE)
    places[:BINS_PER_OCTAVE] = places[_HALF : _HALF + BINS_PER_OCTAVE] = _CENTER
    places[BINS_PER_OCTAVE:FINITE_BINS] = _CENTER + 1 + further
    places[_HALF + BINS_PER_OCTAVE : _HALF + FINITE_BINS] = _CENTER - 1 - further
    return places


_PLACES = _places_between_edges()


class CoarseHistogram(NamedTuple):
    """The bins of the finite values of one histogram."""

    total: float
    """The number of values."""
    limits: bytes
    """The upper edge of each bin, ``[bins]`` float64, little-endian."""
    counts: bytes
    """The number of values in each bin, ``[bins]`` float64, little-endian."""


class SparseCounts:
    """Several histograms, as arrays of nonempty bins. Subsets share these arrays and the results computed from them.

    A typical histogram has about 100 nonempty bins, so it takes 1.6 KB instead of 16 KB.

    Args:
        counts: The counts of all bins, ``[histograms, 2048]`` of any dtype; see :class:`ExponentHistogram`.
    """

    def __init__(self, counts: NDArray[Any]) -> None:
        self._entries = _Entries.of(counts)
        self._rows = np.arange(len(counts))
        self._left_out = 0  # the number of the record's histograms that are not in this subset
        self._missing: frozenset[int] = frozenset()  # the rows without a histogram

    @classmethod
    def of_tensors(cls, bins: Sequence[Tensor]) -> SparseCounts:
        """Return the histograms with these counts, ``[2048]`` int64 each. A tensor of shape ``[0]`` means no histogram.

        Raises:
            ArgumentError: If a tensor has another shape or dtype, is sparse, or contains a negative count.
        """
        dense = [_checked(each) if each.shape != (0,) else np.zeros(BINS, dtype=np.int64) for each in bins]
        found = cls(np.array(dense, dtype=np.int64).reshape(-1, BINS))
        found._missing = frozenset(row for row, each in enumerate(bins) if each.shape == (0,))
        return found

    @classmethod
    def of_entries(cls, sizes: Integers, bins: NDArray[Any], counts: NDArray[Any]) -> SparseCounts:
        """Return histograms from their nonempty bins.

        Args:
            sizes: The number of nonempty bins of each histogram, ``[histograms]``.
            bins: The nonempty bins of each histogram in ascending order, one histogram after the other.
            counts: The count of each nonempty bin, in the same order.
        """
        found = object.__new__(cls)
        starts = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(sizes, dtype=np.int64)))
        found._entries = _Entries(starts, bins.astype(np.int64), counts.astype(np.int64))
        found._rows, found._left_out, found._missing = np.arange(len(sizes)), 0, frozenset()
        return found

    def take(self, rows: Integers) -> SparseCounts:
        """Return the histograms of some rows, in this order."""
        found = object.__new__(SparseCounts)
        found._entries, found._rows, found._left_out = self._entries, self._rows[rows], len(self) - len(rows)
        found._missing = self._missing
        return found

    def __len__(self) -> int:
        return len(self._rows)

    def entries(self, row: int) -> tuple[Integers, Integers]:
        """Return the nonempty bins of one histogram in ascending order, and their counts."""
        starts, place = self._entries.starts, self._rows[row]
        where = slice(starts[place], starts[place + 1])
        return self._entries.bins[where], self._entries.counts[where]

    def dense(self, row: int) -> Tensor:
        """Return the counts of all bins of one histogram, ``[2048]`` int64."""
        import torch

        return torch.from_numpy(self._dense(row))

    def _dense(self, row: int) -> Integers:
        found = np.zeros(BINS, dtype=np.int64)
        bins, counts = self.entries(row)
        found[bins] = counts
        return found

    def packed(self) -> list[bytes | None]:
        """Return each histogram in the uncompressed encoding of record files; ``None`` for a row without a histogram.

        Each nonempty bin is encoded as two numbers: the number of empty bins before it, and its count. Numbers are
        LEB128: seven bits per byte, lowest first, with the eighth bit set if more bytes follow. Most gaps are zero and
        most counts are small, so numbers of fixed width would take twice as many bytes, and a JSON list four times as
        many.
        """
        packed, ends = self._entries.packed
        missing = self._missing
        return [None if row in missing else packed[ends[row] : ends[row + 1]] for row in self._rows.tolist()]

    def coarsened(self, most: int) -> list[CoarseHistogram]:
        """Return the finite values of the histograms in at most ``most`` bins.

        Each result equals that of :meth:`Histogram.coarsened`, except that a histogram without finite values has no
        bins.
        """
        if self._left_out > _FEW_ROWS:
            return self._entries.take(self._rows).coarsened(most)
        found = self._entries.coarsened(most)
        return [found[row] for row in self._rows.tolist()]


@dataclass(frozen=True, eq=False)
class _Entries:
    """The nonempty bins of several histograms, one after the other."""

    starts: Integers  # the first entry of each histogram, and the number of all entries, ``[histograms + 1]``
    bins: Integers  # the bin of each entry, ascending within a histogram
    counts: Integers  # the count of each entry

    @classmethod
    def of(cls, counts: NDArray[Any]) -> _Entries:
        """Return the nonempty bins of dense counts."""
        flat = np.flatnonzero(counts)
        rows, bins = flat >> _SHIFT, flat & (BINS - 1)
        starts = np.searchsorted(flat, np.arange(len(counts) + 1) << _SHIFT)
        return cls(starts, bins, counts[rows, bins].astype(np.int64))

    def take(self, rows: Integers) -> _Entries:
        """Return the histograms of some rows, in this order."""
        first, sizes = self.starts[rows], np.diff(self.starts)[rows]
        starts = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(sizes)))
        places = np.repeat(first - starts[:-1], sizes) + np.arange(starts[-1])
        return _Entries(starts, self.bins[places], self.counts[places])

    def _pieces(self) -> Iterator[_Entries]:
        """Yield the histograms in pieces of limited size."""
        number, first = len(self.starts) - 1, 0
        while first < number:
            last = int(np.searchsorted(self.starts, self.starts[first] + _MOST_ENTRIES, side="right")) - 1
            last = min(max(last, first + 1), number)
            where = slice(self.starts[first], self.starts[last])
            yield _Entries(self.starts[first : last + 1] - self.starts[first], self.bins[where], self.counts[where])
            first = last

    @cached_property
    def packed(self) -> tuple[bytes, list[int]]:
        """All histograms as LEB128 pairs of gap and count, and the byte offsets of the histograms, with the end."""
        parts, starts, size = [], [0], 0
        for piece in self._pieces():
            packed, ends = piece._packed()
            parts.append(packed)
            starts += [size + end for end in ends[1:]]
            size += len(packed)
        return b"".join(parts), starts

    def _packed(self) -> tuple[bytes, list[int]]:
        gaps = np.diff(self.bins, prepend=-1) - 1
        first = self.starts[:-1][np.diff(self.starts) > 0]
        gaps[first] = self.bins[first]
        numbers = np.empty(2 * len(gaps), dtype=np.int64)
        numbers[::2], numbers[1::2] = gaps, self.counts
        lengths = np.ones(len(numbers), dtype=np.int64)
        longer = np.flatnonzero(numbers >> 7)
        groups = []
        while len(longer):
            groups.append(longer)
            lengths[longer] += 1
            longer = longer[numbers[longer] >> (7 * (len(groups) + 1)) > 0]
        ends = np.concatenate(([0], np.cumsum(lengths)))
        packed = np.empty(ends[-1], dtype=np.uint8)
        packed[ends[:-1]] = numbers & 127
        for place, some in enumerate(groups):
            packed[ends[some] + place] |= 128
            packed[ends[some] + place + 1] = (numbers[some] >> (7 * (place + 1))) & 127
        return packed.tobytes(), ends[2 * self.starts].tolist()

    def coarsened(self, most: int) -> list[CoarseHistogram]:
        """Return all histograms in at most ``most`` bins."""
        found = self._coarse.get(most)
        if found is None:
            found = self._coarse[most] = [each for piece in self._pieces() for each in piece._coarsened(most)]
        return found

    @cached_property
    def _coarse(self) -> dict[int, list[CoarseHistogram]]:
        return {}

    def _coarsened(self, most: int) -> list[CoarseHistogram]:
        rows, counts, upper, lower = self._between_edges()
        number = len(self.starts) - 1
        sizes = np.bincount(rows, minlength=number)
        if sizes.max(initial=0) > most:
            is_first = np.diff(rows, prepend=-1) > 0
            begins = np.flatnonzero(_kept_edges(rows, counts, upper, lower, is_first, most))
            counts = np.add.reduceat(counts, begins)
            upper = upper[np.append(begins[1:], len(rows)) - 1]
            sizes = np.bincount(rows[begins], minlength=number)
        starts = np.concatenate(([0], np.cumsum(sizes)))
        below = np.concatenate(([0.0], np.cumsum(counts)))  # exact for integers
        numbers = (below[starts[1:]] - below[starts[:-1]]).tolist()
        limits, packed, ends = upper.astype("<f8").tobytes(), counts.astype("<f8").tobytes(), (8 * starts).tolist()
        return [
            CoarseHistogram(count, limits[first:last], packed[first:last])
            for count, first, last in zip(numbers, ends, ends[1:], strict=False)
        ]

    def _between_edges(self) -> tuple[Integers, Floats, Floats, Floats]:
        """Return the row, the count and both edges of each bin, in ascending order. One empty bin fills each gap."""
        rows = np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))
        is_negative = self.bins >= _HALF
        negatives = np.bincount(rows, weights=is_negative, minlength=len(self.starts) - 1).astype(np.int64)
        # Bins of negative values come after the others, sorted by magnitude.
        entries = np.arange(len(rows))
        target = np.where(is_negative, (self.starts[:-1] + self.starts[1:] - 1)[rows] - entries, entries)
        target[~is_negative] += negatives[rows[~is_negative]]
        places, counts = np.empty_like(entries), np.empty(len(rows))
        places[target], counts[target] = _PLACES[self.bins], self.counts
        finite = places >= 0
        if not finite.all():
            rows, places, counts = rows[finite], places[finite], counts[finite]
        if not len(rows):
            return rows, counts, counts, counts
        # The bins of zero and the subnormal values become one bin.
        first = np.flatnonzero(np.diff(rows << _SHIFT | places, prepend=-1))
        rows, places, counts = rows[first], places[first], np.add.reduceat(counts, first)
        has_gap = np.append((rows[1:] == rows[:-1]) & (places[1:] > places[:-1] + 1), False)
        repeats = 1 + has_gap
        at = np.cumsum(repeats) - repeats
        gaps = np.flatnonzero(has_gap)
        upper, lower = (np.repeat(EDGES[places + side], repeats) for side in (1, 0))
        upper[at[gaps] + 1], lower[at[gaps] + 1] = EDGES[places[gaps + 1]], EDGES[places[gaps] + 1]
        spread = np.zeros(len(upper))
        spread[at] = counts
        return np.repeat(rows, repeats), spread, upper, lower


def _kept_edges(
    rows: Integers, counts: Floats, upper: Floats, lower: Floats, is_first: NDArray[np.bool_], most: int
) -> NDArray[np.bool_]:
    """Return True for each bin whose lower edge is kept: the first bin of a row, and edges with the largest losses.

    :meth:`Histogram.coarsened` defines the loss of an edge.
    """
    losses = np.empty(len(rows))
    losses[1:] = (counts[:-1] + counts[1:]) * (upper[1:] - lower[:-1])
    inner = np.flatnonzero(~is_first)
    sizes = np.bincount(rows[inner])
    places = np.arange(len(inner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    # One row for each histogram, padded with -inf, which is below every loss.
    table = np.full((len(sizes), max(int(sizes.max()), most)), -np.inf)
    table[rows[inner], places] = losses[inner]
    kth = table.shape[1] - (most - 1)
    least = np.partition(table, kth, axis=1)[:, kth, None] if most > 1 else np.full((len(sizes), 1), np.inf)
    kept = table > least
    ties = table == least
    room = (most - 1) - kept.sum(axis=1, keepdims=True)
    # Of equal losses, the later ones are kept, as after a stable sort.
    kept |= ties & (ties[:, ::-1].cumsum(axis=1)[:, ::-1] <= room)
    begins = is_first.copy()
    begins[inner] = kept[rows[inner], places]
    return begins


class Sums(NamedTuple):
    """The summary numbers of a histogram; see :class:`Histogram`."""

    min: float
    max: float
    sum: float
    sum_squares: float
    fraction: float = 1.0


def to_histogram(statistics: Mapping[str, float], bins: Tensor | Integers) -> Histogram:
    """Return the histogram of one site, on the CPU, in the form that sinks accept.

    Args:
        statistics: The statistics of the site from :meth:`Statistics.compute`: ``count``, ``mean``, ``rms``, ``min``,
            ``max`` and, if present, ``histogram_fraction``.
        bins: The ``histogram`` of the site, ``[2048]``.
    """
    values = np.array([[float(statistics.get(name, math.nan)) for name in SUMMED]])
    return Histogram(*between_edges(np.asarray(bins)), *sums_of(values)[0])


SUMMED = ("min", "max", "count", "mean", "rms", "histogram_fraction")
"""The statistics from which :func:`sums_of` computes the summary numbers of histograms."""


def sums_of(values: NDArray[np.float64]) -> list[Sums]:
    """Return the summary numbers of several histograms.

    Args:
        values: The statistics :data:`SUMMED` of each site, ``[sites, 6]``; NaN for a missing ``histogram_fraction``.
    """
    low, high, count, mean, rms, fraction = values.T
    empty = np.isnan(mean)
    with np.errstate(invalid="ignore", over="ignore"):  # infinite results without a warning, as with floats of Python
        sums, squares = np.where(empty, 0.0, mean * count), np.where(empty, 0.0, rms * rms * count)
    columns = (low, high, sums, squares, np.where(np.isnan(fraction), 1.0, fraction))
    return [Sums(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


class TaggedHistograms(Mapping[str, Histogram]):
    """Histograms by tag, for :meth:`Sink.write_histograms`. Each histogram is created on access.

    Args:
        tags: The tags.
        counts: The histogram of each tag.
        sums: The summary numbers of each tag's histogram.
    """

    def __init__(self, tags: Sequence[str], counts: SparseCounts, sums: Sequence[Sums]) -> None:
        self.tags, self.sums = tags, sums
        self._counts = counts

    @cached_property
    def _places(self) -> dict[str, int]:
        return {tag: place for place, tag in enumerate(self.tags)}

    @override
    def __getitem__(self, tag: str) -> Histogram:
        place = self._places[tag]
        return Histogram(*between_edges(self._counts._dense(place)), *self.sums[place])

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self.tags)

    @override
    def __len__(self) -> int:
        return len(self.tags)

    def coarsened(self, most: int) -> list[CoarseHistogram]:
        """Return the histograms in at most ``most`` bins; see :meth:`SparseCounts.coarsened`."""
        return self._counts.coarsened(most)


_MOST_BYTES = BINS * (2 + 9)  # a gap below 2**11 takes at most two bytes, a count below 2**63 nine
_LONGEST = 2 * _MOST_BYTES  # characters; incompressible data grows by a third in base64
_LARGEST = 2**63 - 1


def to_base64(data: bytes) -> str:
    """Return bytes as base64."""
    return binascii.b2a_base64(data, newline=False).decode()


def from_base64(text: str) -> bytes:
    """Decode base64. Raise TypeError or ValueError if the text is not base64."""
    return binascii.a2b_base64(text, strict_mode=True)


def _checked(bins: Tensor) -> NDArray[np.int64]:
    import torch

    if bins.shape != (BINS,) or bins.dtype != torch.int64 or bins.is_sparse:
        raise ArgumentError(f"bins must be [{BINS}] int64, got {list(bins.shape)} {bins.dtype}")
    counts: NDArray[np.int64] = bins.cpu().numpy()
    if counts.min() < 0:
        raise ArgumentError(f"no count of bins may be negative, got {counts.min()}")
    return counts


def unpack_counts(text: object) -> Tensor:
    """Decode a histogram from :func:`counts_of`, ``[2048]`` int64. Format 1 has base64 of zlib of the encoded pairs.

    Raises:
        DumpError: As for :func:`unpacked`.
    """
    import torch

    return torch.from_numpy(unpacked(text))


def unpacked(text: object) -> Integers:
    """Return the result of :func:`unpack_counts` as an array, without importing torch.

    Raises:
        DumpError: If the text is not an encoded histogram. Decompression stops at the size of the largest possible
            histogram, so a malicious text cannot exhaust memory.
    """
    try:
        bins = [0] * BINS
        place = -1
        numbers = _numbers(pairs_of(text))
        for gap, count in zip(numbers, numbers, strict=True):
            place += gap + 1
            bins[place] = count
        return np.array(bins, dtype=np.int64)
    except (ValueError, IndexError, OverflowError) as error:
        raise DumpError(f"this is not a histogram written by lightning_recorder: {error}") from error


def pairs_of(text: object) -> bytes:
    """Return the encoded pairs of gap and count from a result of :func:`counts_of`.

    Raises:
        ValueError: If the text is not an encoded histogram.
    """
    if isinstance(text, str) and len(text) <= _LONGEST:
        text = inflated(from_base64(text), _MOST_BYTES)
    if not isinstance(text, bytes):
        raise ValueError("its length is wrong")
    return text


def counts_of(found: Mapping[str, Any]) -> list[object]:
    """Return each site's encoded histogram in a parsed line, for :func:`unpack_counts`; None without a histogram.

    Raises:
        LookupError, TypeError, ValueError: If the line is damaged.
    """
    if "sites" in found:
        return [entry[5] for entry in found["sites"]]
    sizes = found["sizes"]
    if any(type(size) is not int or size < 0 for size in sizes if size is not None):
        raise ValueError("a size is not a number of bytes")
    total = sum(filter(None, sizes))
    if total > _MOST_BYTES * len(sizes):
        raise ValueError("the sizes are larger than any histograms")
    packed = inflated(from_base64(found["bins"]), total)
    if len(packed) != total:
        raise ValueError("the histograms have another size")
    counts: list[object] = []
    first = 0
    for size in sizes:
        counts.append(None if size is None else packed[first : first + size])
        first += size or 0
    return counts


def inflated(data: bytes, most: int) -> bytes:
    """Decompress data to at most ``most`` bytes. Raise ValueError if the data are damaged or larger."""
    inflater = zlib.decompressobj()
    try:
        packed = inflater.decompress(data, most + 1)
    except zlib.error as error:
        raise ValueError(f"the data cannot be decompressed: {error}") from error
    if len(packed) > most or not inflater.eof or inflater.unused_data:
        raise ValueError("it has surplus data")
    return packed


def _numbers(packed: bytes) -> Iterator[int]:
    value = shift = 0
    for byte in packed:
        value |= (byte & 127) << shift
        shift += 7
        if byte > 127:
            continue
        if value > _LARGEST:
            raise ValueError("a count has more than 63 bits")
        yield value
        value = shift = 0
    if shift:
        raise ValueError("the last number is incomplete")
