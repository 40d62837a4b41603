"""The bins of all histograms, defined by the float32 format, without importing any library."""

from __future__ import annotations

__all__ = ["BINS", "BINS_PER_OCTAVE", "BIN_SHIFT", "CLASSES", "FINITE_BINS", "FIRST_CLASS_BIN", "NO_CLASS_BIN"]

BIN_SHIFT = 21
"""The right shift that keeps only sign, exponent and the first two mantissa bits of a float32."""

BINS = 1 << (32 - BIN_SHIFT)
"""The number of bins, 2048. The first half is for positive values, the second half for negative values."""

BINS_PER_OCTAVE = 1 << (23 - BIN_SHIFT)
"""The number of bins between two consecutive powers of two, 4."""

FINITE_BINS = BINS // 2 - BINS_PER_OCTAVE
"""The number of bins of one sign that hold finite values, 1020. The last octave holds infinities and NaN."""

CLASSES = 1000
"""The maximum number of classes to count. Each class has its own bin among the bins of positive values."""

FIRST_CLASS_BIN = BINS_PER_OCTAVE
"""The bin of class 0. Lower bins are not used for classes, because displays merge them into the bin around zero."""

NO_CLASS_BIN = BINS // 2 + BINS_PER_OCTAVE
"""The bin of ignored targets, and of targets that are not class indices."""
