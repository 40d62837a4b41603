"""Tests of the values that are counted for a tensor of any kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_recorder.errors import ArgumentError
from lightning_recorder.reductions import BatchMean, Extrema, RunningMoments, Statistics, Values
from lightning_recorder.reductions.values import as_plain, sample_places
from tests.reductions.laws import computed
from tests.reductions.reference import assert_statistics, values_of

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


# Plain


DENSE = torch.tensor([[0.0, 1.5, 0.0], [-2.0, 0.0, float("nan")]])
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# All are torch warnings at the first tensor of such a kind about an interface that may change.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CS[RC] tensor support is in beta state:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
]


def assert_reduced_as(tensor: Tensor, plain: Tensor) -> None:
    """Compare the default statistics of a tensor with the reference for its plain values."""
    statistics = Statistics()
    statistics.update(tensor)
    assert_statistics(statistics.compute(), [plain])


# Dense ones


@pytest.mark.parametrize("tensor", [DENSE, DENSE.T, DENSE[:, 1:], torch.tensor(1.0), torch.zeros(0, 2)])
def test_a_plain_tensor_is_itself(tensor: Tensor) -> None:
    """A dense tensor is returned unchanged."""
    assert as_plain(tensor) is tensor


def test_a_parameter_is_itself() -> None:
    """A parameter is dense and is not copied."""
    parameter = torch.nn.Parameter(torch.ones(2))
    assert as_plain(parameter).data_ptr() == parameter.data_ptr()


# Sparse ones


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sparse_tensor_counts_with_its_zeros(layout: torch.layout, dtype: torch.dtype) -> None:
    """A sparse tensor has the statistics of the dense one, including the implicit zeros."""
    sparse = DENSE.to(dtype).to_sparse(layout=layout)
    plain = as_plain(sparse)
    assert (plain.layout, plain.shape) == (torch.strided, (2, 3))
    assert_reduced_as(sparse, DENSE.to(dtype))


def test_places_that_a_sparse_tensor_has_twice_are_summed() -> None:
    """Duplicate entries of an uncoalesced sparse tensor, such as an embedding gradient, are summed."""
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 0, 2]]), torch.tensor([1.0, 2.0, 5.0]), (4,))
    assert_reduced_as(sparse, torch.tensor([3.0, 0.0, 5.0, 0.0]))


def test_a_sparse_gradient_of_an_embedding_counts() -> None:
    """The sparse gradient of an embedding has zeros for the rows that were not looked up."""
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1, 1])).sum().backward()
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.is_sparse
    assert_reduced_as(embedding.weight.grad, torch.tensor([[0.0, 0.0], [2.0, 2.0], [0.0, 0.0], [0.0, 0.0]]))


def test_a_sparse_tensor_without_values_is_zero() -> None:
    """A sparse tensor without entries is all zeros."""
    assert_reduced_as(torch.zeros(2, 3).to_sparse(), torch.zeros(2, 3))


def test_a_sparse_tensor_has_the_shape_of_the_dense_one() -> None:
    """Elementwise statistics of a sparse tensor have the shape of the dense one."""
    assert computed(BatchMean, torch.eye(2).to_sparse()) == {"batch_mean": [0.5, 0.5]}


@pytest.mark.parametrize("shape", [(1 << 28, 2), ((1 << 28) + 1,)])
def test_a_huge_sparse_tensor_is_refused(shape: tuple[int, ...]) -> None:
    """A sparse tensor whose dense copy would take a gibibyte or more is rejected with an error that names its shape."""
    sparse = torch.sparse_coo_tensor(torch.zeros(len(shape), 1, dtype=torch.int64), torch.ones(1), shape)
    named = rf"^a sparse tensor of {'×'.join(map(str, shape))} would become dense; exclude it$"
    for statistics in (Statistics(), Extrema()):
        before = statistics.state.tolist()
        with pytest.raises(ArgumentError, match=named):
            statistics.update(sparse)
        assert statistics.state.tolist() == before


# Quantized ones


@pytest.mark.parametrize("dtype", [torch.quint8, torch.qint8, torch.qint32], ids=str)
def test_a_quantized_tensor_counts_with_the_numbers_it_stands_for(dtype: torch.dtype) -> None:
    """A quantized tensor has the statistics of the dequantized values, not of the stored integers."""
    quantized = torch.quantize_per_tensor(torch.tensor([0.0, 0.5, 1.26, 2.0]), 0.25, 3, dtype)
    assert as_plain(quantized).tolist() == [0.0, 0.5, 1.25, 2.0]
    assert_reduced_as(quantized, torch.tensor([0.0, 0.5, 1.25, 2.0]))


# Nested ones


def nested(layout: torch.layout, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a nested tensor of a matrix with two rows and one with a single row."""
    parts = [torch.tensor([[1.0, 2.0], [3.0, 0.0]], dtype=dtype), torch.tensor([[-5.0, float("inf")]], dtype=dtype)]
    return torch.nested.nested_tensor(parts, layout=layout)


ROWS = torch.tensor([[1.0, 2.0], [3.0, 0.0], [-5.0, float("inf")]])


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_nested_tensor_counts_with_all_its_parts(layout: torch.layout, dtype: torch.dtype) -> None:
    """A nested tensor has the statistics of the values of all its parts, without padding."""
    tensor = nested(layout, dtype)
    assert sorted(values_of([as_plain(tensor)])) == sorted(values_of([ROWS]))
    assert_reduced_as(tensor, ROWS.to(dtype))


def test_the_parts_of_a_jagged_tensor_come_in_a_row() -> None:
    """The parts of a jagged tensor are concatenated along the ragged dimension."""
    assert as_plain(nested(torch.jagged)).tolist() == ROWS.tolist()


def test_a_jagged_tensor_with_a_gradient_counts() -> None:
    """A jagged activation in an autograd graph is counted without changing the graph."""
    weight = torch.ones(2, requires_grad=True)
    output = nested(torch.jagged) * weight
    assert_reduced_as(output, ROWS)
    assert output.requires_grad


def test_what_a_jagged_tensor_leaves_out_does_not_count() -> None:
    """The padding in a jagged view of a padded tensor is not counted."""
    padded = torch.tensor([[1.0, 2.0, 100.0, 100.0], [100.0, 3.0, 4.0, 100.0], [5.0, 100.0, 100.0, 100.0]])
    starts, lengths = torch.tensor([0, 1, 0]), torch.tensor([2, 2, 1])
    view = torch.nested.narrow(padded, 1, starts, lengths, layout=torch.jagged)
    assert [part.tolist() for part in view.unbind()] == [[1.0, 2.0], [3.0, 4.0], [5.0]]
    assert_reduced_as(view, torch.arange(1.0, 6.0))


# Distributed ones


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """Set up a process group of this process alone, through a file, so that no port is used."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("sharded", [True, False])
def test_of_a_distributed_tensor_the_local_part_counts(sharded: bool) -> None:
    """Only the local part of a DTensor is counted, which is everything in a group of one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (1,))
    tensor = DTensor.from_local(DENSE, mesh, [Shard(0) if sharded else Replicate()])
    plain = as_plain(tensor)
    assert type(plain) is Tensor
    assert plain.data_ptr() == DENSE.data_ptr()
    assert_reduced_as(tensor, DENSE)


@pytest.mark.usefixtures("alone")
def test_a_distributed_parameter_with_a_gradient_counts() -> None:
    """A DTensor that requires a gradient is read without adding it to a graph."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (1,))
    tensor = DTensor.from_local(torch.ones(2, 3, requires_grad=True), mesh, [Shard(0)])
    moments = RunningMoments()
    moments.update(tensor)
    assert not moments.state.requires_grad
    assert moments.state.tolist() == [6.0, 1.0, 0.0]
