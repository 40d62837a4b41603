"""The encoding of histogram counts in record files: pairs of gap and count in LEB128, compressed, as base64."""

from __future__ import annotations

import binascii
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_recorder.bins import BINS
from lightning_recorder.errors import ArgumentError, DumpError

__all__ = ["counts_of", "from_base64", "pack_counts", "packed_counts", "pairs_of", "to_base64", "unpack_counts"]

_MOST_BYTES = BINS * (2 + 9)  # a gap below 2**11 takes at most two bytes, a count below 2**63 nine
_LONGEST = 2 * _MOST_BYTES  # characters; incompressible data grows by a third in base64
_LARGEST = 2**63 - 1


def to_base64(data: bytes) -> str:
    """Return bytes as base64."""
    return binascii.b2a_base64(data, newline=False).decode()


def from_base64(text: str) -> bytes:
    """Return the bytes of base64.

    Raises:
        TypeError, ValueError: If the text is not base64.
    """
    return binascii.a2b_base64(text, strict_mode=True)


def packed_counts(bins: Tensor) -> bytes:
    """Return the pairs of gap and count of one histogram, as :func:`pack_counts` compresses them.

    Raises:
        ArgumentError: If ``bins`` has another shape or dtype, is sparse, or contains a negative count.
    """
    if bins.shape != (BINS,) or bins.dtype != torch.int64 or bins.is_sparse:
        raise ArgumentError(f"bins must be [{BINS}] int64, got {list(bins.shape)} {bins.dtype}")
    places = bins.nonzero().flatten()
    counts: list[int] = bins[places].tolist()
    if counts and min(counts) < 0:
        raise ArgumentError(f"no count of bins may be negative, got {min(counts)}")
    packed = bytearray()
    before = -1
    for place, count in zip(places.tolist(), counts, strict=True):
        gap, before = place - before - 1, place
        while gap > 127:
            packed.append(gap & 127 | 128)
            gap >>= 7
        packed.append(gap)
        while count > 127:
            packed.append(count & 127 | 128)
            count >>= 7
        packed.append(count)
    return bytes(packed)


def pack_counts(bins: Tensor) -> str:
    """Encode histogram counts as text: base64 of zlib of (gap, count) pairs.

    Each pair holds the number of empty bins before a non-empty bin, and the count of that bin. Numbers are stored as
    LEB128: seven bits per byte, lowest first, with the eighth bit set if more bytes follow. A histogram of one layer
    takes 100 to 600 characters, because most gaps are zero and most counts are small. Fixed-width indices and counts
    take twice as many characters, a JSON list of numbers four times as many.

    Args:
        bins: The counts, ``[2048]`` int64, non-negative, on any device.

    Raises:
        ArgumentError: If ``bins`` has another shape or dtype, is sparse, or contains a negative count.

    Example:
        >>> counts = torch.zeros(2048, dtype=torch.int64)
        >>> counts[[7, 8, 300]] = torch.tensor([1, 2, 3])
        >>> torch.equal(unpack_counts(pack_counts(counts)), counts)
        True
    """
    return to_base64(zlib.compress(packed_counts(bins), 1))


def unpack_counts(text: object) -> Tensor:
    """Decode counts that :func:`pack_counts` has encoded, or one of :func:`counts_of`, as ``[2048]`` int64.

    Raises:
        DumpError: If this is not an encoded histogram. Decompression stops at the size of the largest possible
            histogram, so a malicious text cannot exhaust memory.
    """
    try:
        bins = [0] * BINS
        place = -1
        numbers = _numbers(pairs_of(text))
        for gap, count in zip(numbers, numbers, strict=True):
            place += gap + 1
            bins[place] = count
        return torch.tensor(bins, dtype=torch.int64, device="cpu")
    except (ValueError, IndexError, RuntimeError) as error:
        raise DumpError(f"this is not a histogram written by lightning_recorder: {error}") from error


def pairs_of(text: object) -> bytes:
    """Return the pairs of gap and count that :func:`pack_counts` has compressed, or those of :func:`counts_of`.

    Raises:
        ValueError: If this is not an encoded histogram.
    """
    if isinstance(text, str) and len(text) <= _LONGEST:
        text = _inflated(from_base64(text), _MOST_BYTES)
    if not isinstance(text, bytes):
        raise ValueError("its length is wrong")
    return text


def counts_of(found: Mapping[str, Any]) -> list[object]:
    """Return the packed counts of the sites in a parsed line, for :func:`unpack_counts`; None if a site has none.

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
    packed = _inflated(from_base64(found["bins"]), total)
    if len(packed) != total:
        raise ValueError("the histograms have another size")
    counts: list[object] = []
    first = 0
    for size in sizes:
        counts.append(None if size is None else packed[first : first + size])
        first += size or 0
    return counts


def _inflated(data: bytes, most: int) -> bytes:
    """Decompress data to at most this many bytes."""
    inflater = zlib.decompressobj()
    try:
        packed = inflater.decompress(data, most + 1)
    except zlib.error as error:
        raise ValueError(f"the histograms cannot be decompressed: {error}") from error
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
