"""Class counts, stored as the histogram of a site with one bin per class.

Class counts are therefore merged exactly over batches and ranks and written to files, like every histogram.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.bins import BIN_SHIFT, CLASSES, FIRST_CLASS_BIN
from lightning_recorder.records.histogram import Histogram

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CLASS_COUNTS", "class_counts", "class_scalars", "classes_in"]

CLASS_COUNTS = ".classes"
"""The path suffix of sites that count classes."""

_BINS = slice(FIRST_CLASS_BIN, FIRST_CLASS_BIN + CLASSES)


def class_counts(bins: Tensor | NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the count of each class, ``[1000]``, from the bins of a site that counts classes, ``[2048]``."""
    return np.asarray(bins)[_BINS].astype(np.int64)


def classes_in(histogram: Histogram) -> dict[int, int]:
    """Return the count of each class that occurs, from the histogram of a site that counts classes."""
    # The upper bits of a lower edge are the bin index, and its other bits are zero.
    bins = histogram.edges[:-1].astype(np.float32).view(np.uint32) >> BIN_SHIFT
    is_class = (histogram.edges[:-1] > 0) & (histogram.counts > 0)
    classes = bins[is_class].astype(np.int64) - FIRST_CLASS_BIN
    return dict(zip(classes.tolist(), histogram.counts[is_class].tolist(), strict=True))


def class_scalars(bins: Tensor, names: Iterable[str]) -> list[float]:
    """Return statistics of the class numbers, from bins that count classes, ``[2048]``; NaN for other statistics."""
    counts = class_counts(bins)
    classes, number = np.flatnonzero(counts), int(counts.sum())
    found: dict[str, float] = {"count": number, "nan_count": 0.0, "inf_count": 0.0, "histogram_fraction": 1.0}
    if number:
        weights = counts[classes]
        mean, square = (float((weights * classes**power).sum() / number) for power in (1, 2))
        spread = float((weights * (classes - mean) ** 2).sum() / number)
        found |= {"mean": mean, "std": spread**0.5, "rms": square**0.5, "min": classes[0], "max": classes[-1]}
        found["zero_fraction"] = float(counts[0] / number)
    return [float(found.get(name, np.nan)) for name in names]
