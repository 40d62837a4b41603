"""Compact text encoding of histogram counts."""

from __future__ import annotations

import binascii
import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_recorder.bins import BINS
from lightning_recorder.errors import ArgumentError, DumpError

__all__ = ["pack_counts", "unpack_counts"]

_MOST_BYTES = BINS * (2 + 9)  # a gap below 2**11 takes at most two bytes, a count below 2**63 nine
_LONGEST = 2 * _MOST_BYTES  # characters; incompressible data grows by a third in base64
_LARGEST = 2**63 - 1


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
    # Level 1 is the fastest; level 9 saves only one byte in a hundred.
    return binascii.b2a_base64(zlib.compress(bytes(packed), 1), newline=False).decode()


def unpack_counts(text: object) -> Tensor:
    """Decode counts that :func:`pack_counts` has encoded, as ``[2048]`` int64.

    Raises:
        DumpError: If the text is not an encoded histogram. Decompression stops at the size of the largest possible
            histogram, so a malicious text cannot exhaust memory.
    """
    try:
        if not isinstance(text, str) or len(text) > _LONGEST:
            raise ValueError("it is no text of its length")
        inflater = zlib.decompressobj()
        packed = inflater.decompress(binascii.a2b_base64(text, strict_mode=True), _MOST_BYTES)
        if not inflater.eof or inflater.unused_data:
            raise ValueError("it does not end where it should")
        bins = [0] * BINS
        place = -1
        numbers = _numbers(packed)
        for gap, count in zip(numbers, numbers, strict=True):
            place += gap + 1
            bins[place] = count
        return torch.tensor(bins, dtype=torch.int64)
    except (ValueError, IndexError, zlib.error, RuntimeError) as error:
        raise DumpError(f"this is no histogram of ours: {error}") from error


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
        raise ValueError("the last number is cut off")
