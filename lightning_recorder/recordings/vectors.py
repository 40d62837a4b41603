"""Vectors and numbers of calls in the metadata of a record."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_recorder.recordings.record_format import Row
from lightning_recorder.taps import Site

__all__ = ["calls_of", "pack_vectors", "unpack_vectors"]

_MOST_VALUES = 1 << 16  # of a vector in a record; longer ones are in the dumps only


def pack_vectors(sites: Sequence[Mapping[str, Tensor]]) -> list[list[Any]]:
    """Return the vectors of all sites as JSON values: index of the site, statistic, type of the numbers, and base64.

    Every number is restored to the bit. Values that float32 can hold take half of the space.

    Args:
        sites: The nonscalar statistics of each site; those of more dimensions are ignored.

    Example:
        >>> packed = pack_vectors([{}, {"channel_mean": torch.tensor([0.5, 2.0], dtype=torch.float64)}])
        >>> packed[0][:3], unpack_vectors(packed, 1)
        ([1, 'channel_mean', 'f'], {'channel_mean': tensor([0.5000, 2.0000], dtype=torch.float64)})
    """
    return [
        [place, name, *_packed(tensor)]
        for place, tensors in enumerate(sites)
        for name, tensor in tensors.items()
        if tensor.dim() == 1 and tensor.numel() <= _MOST_VALUES
    ]


def _packed(tensor: Tensor) -> tuple[str, str]:
    values = tensor.double()
    narrow = values.float()
    is_exact = torch.equal(narrow.double()[~values.isnan()], values[~values.isnan()])
    kind = "f" if is_exact else "d"
    numbers = _little_endian(array(kind, values.tolist()))
    return kind, base64.b64encode(numbers.tobytes()).decode()


def _little_endian(values: array[float]) -> array[float]:
    if sys.byteorder == "big":
        values.byteswap()
    return values


def unpack_vectors(packed: Any, place: int) -> dict[str, Tensor]:
    """Return the vectors of one site by statistic, ``[n]`` float64.

    Raises:
        LookupError, TypeError, ValueError: If the data is not from :func:`pack_vectors`.
    """
    found = {}
    for site, name, kind, text in packed:
        if site == place:
            values: array[float] = array("f" if kind == "f" else "d")
            values.frombytes(base64.b64decode(text, validate=True))
            found[str(name)] = torch.tensor(_little_endian(values).tolist(), dtype=torch.float64, device="cpu")
    return found


def calls_of(row: Row) -> dict[Site, int]:
    """Return the number of tensors of each site of a record, in their order; empty if the record lacks them."""
    calls, sites = row.about.get("calls"), row.layout.sites
    if not isinstance(calls, list) or len(calls) != len(sites):
        return {}
    order = row.about.get("order", range(len(sites)))
    first = [place for place in order if isinstance(place, int) and 0 <= place < len(sites)]
    return {sites[place]: calls[place] for place in dict.fromkeys([*first, *range(len(sites))])}
