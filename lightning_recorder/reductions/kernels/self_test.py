"""The comparison of a kernel with torch, which rejects kernels with wrong results."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_recorder.bins import BINS, FINITE_BINS
from lightning_recorder.reductions.combined import Combined
from lightning_recorder.reductions.row import HISTOGRAM, LAYOUT, SAMPLED_NUMEL, Part, row_reductions
from lightning_recorder.reductions.values import Values

__all__ = ["SPECIAL_VALUES", "empty_row", "missing_parts"]

SPECIAL_VALUES = (0.0, -0.0, 1.5, -2.0, 4e-39, float("nan"), float("inf"), float("-inf"), 3.0)
"""Values that change every slot of a row. One of them, 4e-39, is subnormal."""


def empty_row(sample: int | None = None) -> Tensor:
    """Return the row of an empty stream, on the CPU."""
    with torch.device("cpu"):
        return Combined(row_reductions(sample=sample)).initial()


def missing_parts(row: Tensor, values: Values, sample: int | None = None) -> tuple[Part, ...] | None:
    """Return the parts of a row that a kernel did not compute, or ``None`` if its results are wrong."""
    empty, expected = empty_row(sample), empty_row(sample)
    Combined(row_reductions(sample=sample)).add(expected, values)
    finite = torch.arange(BINS, device="cpu") % (BINS // 2) < FINITE_BINS  # a NaN may be in any bin of NaN
    bins, expected_bins = (each[HISTOGRAM:SAMPLED_NUMEL] for each in (row, expected))
    missing = tuple(part for part in LAYOUT if torch.equal(row[part.slots], empty[part.slots]))
    computed = [part.slots for part in LAYOUT if part not in missing]
    is_right = (
        bool(computed)
        and all(torch.allclose(row[slots], expected[slots], rtol=1e-9, atol=0) for slots in computed)
        and torch.equal(bins[finite], expected_bins[finite])
        and torch.equal(bins.sum(), expected_bins.sum())
        and torch.equal(row[SAMPLED_NUMEL:], expected[SAMPLED_NUMEL:])
    )
    return missing if is_right else None
