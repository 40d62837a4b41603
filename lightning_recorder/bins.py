"""The bins of every histogram, which the float32 format defines; imports no other library."""

from __future__ import annotations

__all__ = ["BINS", "BIN_SHIFT"]

BIN_SHIFT = 21
"""The shift that drops all bits of a float32 except sign, exponent and the first two bits of the mantissa."""

BINS = 1 << (32 - BIN_SHIFT)
"""The number of bins, 2048."""
