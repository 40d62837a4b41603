"""Tests of the comparison of a kernel with torch."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from lightning_recorder.reductions import Combined, Values
from lightning_recorder.reductions.kernels import fused
from lightning_recorder.reductions.kernels.host import _Head
from lightning_recorder.reductions.kernels.self_test import SPECIAL_VALUES, empty_row, missing_parts
from lightning_recorder.reductions.row import HISTOGRAM, LAYOUT, SAMPLED_NUMEL, SLOTS, row_reductions
from tests.reductions.kernels.test_fused import needs_compiler

VALUES = Values(torch.tensor(SPECIAL_VALUES))


def right_row(sample: int | None) -> Tensor:
    """Return the row of the values as torch computes it."""
    row = empty_row(sample)
    Combined(row_reductions(sample=sample)).add(row, VALUES)
    return row


@pytest.mark.parametrize("sample", [None, 5])
def test_a_right_row_misses_nothing(sample: int | None) -> None:
    """A kernel that computes every slot as torch does leaves no part to torch."""
    assert missing_parts(right_row(sample), VALUES, sample) == ()


@pytest.mark.parametrize("part", LAYOUT, ids=lambda part: type(part.reduction).__name__)
def test_a_part_without_change_is_missing(part: tuple[object, slice]) -> None:
    """A part whose slots the kernel leaves as they were is left to torch."""
    row = right_row(None)
    row[part[1]] = empty_row()[part[1]]
    assert missing_parts(row, VALUES) == (part,)


@pytest.mark.parametrize("slot", [*range(HISTOGRAM), HISTOGRAM, HISTOGRAM + 508, HISTOGRAM + 1021, SAMPLED_NUMEL])
def test_a_wrong_slot_is_found(slot: int) -> None:
    """A kernel with one wrong slot is not used, whether that is a statistic, a bin or the number of values."""
    row = right_row(5)
    row[slot] += 1
    assert missing_parts(row, VALUES, 5) is None


def test_a_kernel_that_does_nothing_is_wrong() -> None:
    """A kernel that changes no slot is not used."""
    assert missing_parts(empty_row(), VALUES) is None


def test_the_host_computes_the_first_slots() -> None:
    """The names and the order of the numbers on the host are those of the row."""
    names = tuple(field.name for field in fields(_Head))
    assert names == SLOTS[: len(names)]


@needs_compiler
def test_torch_adds_the_parts_that_the_function_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch updates only the missing parts, and the update without torch is refused without a change."""
    assert fused._Loaded.missing == ()
    monkeypatch.setattr(fused._Loaded, "missing", LAYOUT[2:])
    row = empty_row()
    assert not fused.add_tensor(row, VALUES.raw, 1.0, None)
    assert torch.equal(row, empty_row())
    assert fused.add_statistics(row, VALUES, None)
    twice = right_row(None)
    twice[LAYOUT[2].slots] *= 2  # the function computes them, too
    torch.testing.assert_close(row[:HISTOGRAM], twice[:HISTOGRAM], rtol=1e-12, atol=0)
