"""Tests of the values that are counted for a tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_recorder.reductions import Statistics, Values
from lightning_recorder.reductions.values import sample_places
from tests.reductions.reference import assert_statistics

SIX = torch.tensor([[0.0, -0.0, 3.0], [float("nan"), float("inf"), -float("inf")]])


def test_counts_by_hand() -> None:
    """Two zeros, a three, a NaN and two infinities are counted correctly."""
    values = Values(SIX)
    assert [values.numel, int(values.zero_count), int(values.nan_count), int(values.nonfinite_count)] == [6, 2, 1, 3]
    assert int(values.finite_count) == 3
    assert values.doubles.tolist() == values.finite.tolist() == [0.0, 0.0, 3.0, 0.0, 0.0, 0.0]
    assert values.doubles.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_shared_passes_do_not_disturb_each_other(dtype: torch.dtype) -> None:
    """Each intermediate result is the same for any order of computation."""
    names = ("finite", "nonfinite_count", "finite_count", "doubles", "zero_count", "nan_count")
    alone = [getattr(Values(SIX.to(dtype)), name).tolist() for name in names]
    for order in (names, names[::-1]):
        values = Values(SIX.to(dtype))
        for name in order:
            getattr(values, name)
        assert [getattr(values, name).tolist() for name in names] == alone


def test_counts_are_exact_where_float32_is_not() -> None:
    """2**24 + 3 zeros are all counted, although float32 cannot represent that number."""
    values = Values(torch.zeros(1).expand(2**24 + 3))
    assert int(values.zero_count) == 2**24 + 3


@pytest.mark.parametrize("numel", [0, 1, 2**18, 2**18 + 1, 2**19 + 5])
def test_large_tensors_come_in_pieces(numel: int) -> None:
    """The pieces of a CPU tensor have at most 2**18 values and cover it in order, with the factor applied."""
    pieces = list(Values(torch.arange(numel, dtype=torch.float32), 0.5).pieces())
    assert all(piece.numel <= 2**18 for piece in pieces)
    assert torch.equal(torch.cat([piece.flat for piece in pieces]), torch.arange(numel, dtype=torch.float32) * 0.5)


def test_a_sample_has_a_value_of_each_part() -> None:
    """A sample has one value from each of equally many parts, or all values, widened and multiplied."""
    values = Values(torch.arange(10), 2.0)
    assert values.sampled(10).tolist() == values.sampled(99).tolist() == values.flat.tolist()
    pairs = [int(value) // 2 for value in values.sampled(5).tolist()]
    assert [place // 2 for place in pairs] == [0, 1, 2, 3, 4]
    assert Values(torch.zeros(0)).sampled(3).tolist() == []


def test_values_at_places() -> None:
    """The values at given places are those of the flat tensor, widened and multiplied."""
    values = Values(torch.tensor([[1, 2], [3, 4]], dtype=torch.int8), 0.5)
    assert values.at(torch.tensor([3, 0])).tolist() == [2.0, 0.5]


@pytest.mark.parametrize(
    ("dtype", "widened"),
    [
        (torch.float8_e4m3fn, torch.float32),
        (torch.float8_e5m2, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.bool, torch.float64),
        (torch.uint8, torch.float64),
        (torch.uint16, torch.float64),
        (torch.uint32, torch.float64),
        (torch.uint64, torch.float64),
        (torch.int64, torch.float64),
        (torch.complex64, torch.float32),
        (torch.complex128, torch.float64),
    ],
    ids=str,
)
def test_types_are_widened(dtype: torch.dtype, widened: torch.dtype) -> None:
    """Half precision becomes float32, integers become float64, and wide types do not change."""
    assert Values(torch.ones(2).to(dtype)).flat.dtype == widened


def test_a_large_integer_is_exact() -> None:
    """An integer of 53 bits is exact, which float32 with its 24 bits would not be."""
    assert Values(torch.tensor([2**53 - 1])).flat.tolist() == [2**53 - 1]


def test_a_complex_number_is_two_real_ones() -> None:
    """A complex tensor is treated as its real and imaginary parts."""
    assert Values(torch.tensor([1 + 2j, 3 - 4j])).flat.tolist() == [1.0, 2.0, 3.0, -4.0]


LAZY = torch.tensor([1 + 2j, 3 - 4j, 0j])


@pytest.mark.parametrize(
    ("tensor", "flat"),
    [
        (LAZY.conj(), [1.0, -2.0, 3.0, 4.0, 0.0, -0.0]),
        (LAZY.conj().imag, [-2.0, 4.0, -0.0]),
        (LAZY.conj().imag[:1], [-2.0]),
        (LAZY.to(torch.complex128).conj().imag[:1], [-2.0]),
        (LAZY[:1].conj().imag.conj(), [-2.0]),
    ],
)
def test_lazy_conjugates_and_negatives_are_resolved(tensor: Tensor, flat: list[float]) -> None:
    """Lazy conjugates and their imaginary parts, which torch negates only when read, have their true signs."""
    values = Values(tensor)
    assert values.flat.tolist() == flat
    statistics = Statistics()
    statistics.update(tensor)
    assert_statistics(statistics.compute(), [torch.tensor(flat)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int32, torch.complex64], ids=str)
def test_a_factor_multiplies_every_value(dtype: torch.dtype) -> None:
    """With a factor the statistics are those of the products, computed after widening."""
    tensor = torch.arange(-3, 5).to(dtype)
    statistics = Statistics()
    statistics.add(statistics.state, Values(tensor, 2.0**-10))
    wide = torch.view_as_real(tensor) if dtype.is_complex else tensor
    assert_statistics(statistics.compute(), [wide.double() * 2.0**-10])


def test_a_factor_comes_after_widening() -> None:
    """The inverse of a loss scale brings a half-precision gradient below the half-precision range without loss."""
    assert Values(torch.tensor([2.0**-24], dtype=torch.float16), 2.0**-16).flat.tolist() == [2.0**-40]


def test_the_tensor_is_flattened_in_its_order() -> None:
    """The values are in the order of the indices, even for a transposed tensor."""
    assert Values(torch.arange(6).reshape(2, 3).T).flat.tolist() == [0, 3, 1, 4, 2, 5]


def test_few_places_are_kept() -> None:
    """The places of a small sample are cached for each size; those of a large sample are not."""
    assert sample_places(10**6, 4096) is sample_places(10**6, 4096)
    assert sample_places(10**6, 2**14 + 1) is not sample_places(10**6, 2**14 + 1)
