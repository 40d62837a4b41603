"""The bins of every histogram, which the float32 format defines; imports no other library."""

from __future__ import annotations

__all__ = ["BINS", "BINS_PER_OCTAVE", "BIN_SHIFT", "CLASSES", "FINITE_BINS", "FIRST_CLASS_BIN", "NO_CLASS_BIN"]

BIN_SHIFT = 21
"""The shift that drops all bits of a float32 except sign, exponent and the first two bits of the mantissa."""

BINS = 1 << (32 - BIN_SHIFT)
"""The number of bins, 2048. The first half is for positive values, the second for negative ones."""

BINS_PER_OCTAVE = 1 << (23 - BIN_SHIFT)
"""The number of bins between two powers of two, 4."""

FINITE_BINS = BINS // 2 - BINS_PER_OCTAVE
"""The number of bins of one sign that hold finite values, 1020. The last octave holds infinities and NaN."""

CLASSES = 1000
"""The number of classes that are counted. Each one has a bin of positive values of its own."""

FIRST_CLASS_BIN = BINS_PER_OCTAVE
"""The bin of class 0. The bins before it are joined with those around zero when a histogram is shown."""

NO_CLASS_BIN = BINS // 2 + BINS_PER_OCTAVE
"""The bin of the targets that are ignored, and of other numbers than those of classes."""
