"""Histograms as the text that record files of the first format have."""

from __future__ import annotations

import zlib

from torch import Tensor

from lightning_recorder.records.counts import SparseCounts, to_base64

__all__ = ["pack_counts"]


def pack_counts(bins: Tensor) -> str:
    """Return the text of one histogram, ``[2048]`` int64."""
    return to_base64(zlib.compress(SparseCounts.of_tensors([bins]).packed()[0] or b"", 1))
