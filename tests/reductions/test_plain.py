"""Tests of tensors that are more than a plain array."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_recorder.errors import ArgumentError
from lightning_recorder.reductions import BatchMean, Extrema, RunningMoments, Statistics
from lightning_recorder.reductions.plain import as_plain
from tests.reductions.laws import computed
from tests.reductions.reference import Moments, assert_bins, extrema_of, tallies_of, values_of

DENSE = torch.tensor([[0.0, 1.5, 0.0], [-2.0, 0.0, float("nan")]])
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# All are torch warnings at the first tensor of such a kind about an interface that may change.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
]


def assert_statistics(tensor: Tensor, plain: Tensor) -> None:
    """Compare the default statistics of a tensor with the reference for its plain values."""
    statistics = Statistics()
    statistics.update(tensor)
    found, values = statistics.compute(), values_of([plain])
    Moments.of(values).assert_near(found)
    numbers = [float(found[name]) for name in ("min", "max", "zero_fraction", "nan_count", "inf_count")]
    assert numbers == pytest.approx([*extrema_of(values), *tallies_of(values)], abs=0, nan_ok=True)
    assert_bins(found["histogram"], values)


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
    assert_statistics(sparse, DENSE.to(dtype))


def test_places_that_a_sparse_tensor_has_twice_are_summed() -> None:
    """Duplicate entries of an uncoalesced sparse tensor, such as an embedding gradient, are summed."""
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 0, 2]]), torch.tensor([1.0, 2.0, 5.0]), (4,))
    assert_statistics(sparse, torch.tensor([3.0, 0.0, 5.0, 0.0]))


def test_a_sparse_gradient_of_an_embedding_counts() -> None:
    """The sparse gradient of an embedding has zeros for the rows that were not looked up."""
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1, 1])).sum().backward()
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.is_sparse
    assert_statistics(embedding.weight.grad, torch.tensor([[0.0, 0.0], [2.0, 2.0], [0.0, 0.0], [0.0, 0.0]]))


def test_a_sparse_tensor_without_values_is_zero() -> None:
    """A sparse tensor without entries is all zeros."""
    assert_statistics(torch.zeros(2, 3).to_sparse(), torch.zeros(2, 3))


def test_a_sparse_tensor_has_the_shape_of_the_dense_one() -> None:
    """Elementwise statistics of a sparse tensor have the shape of the dense one."""
    assert computed(BatchMean, torch.eye(2).to_sparse()) == {"batch_mean": [0.5, 0.5]}


@pytest.mark.parametrize("shape", [(1 << 28, 2), ((1 << 28) + 1,)])
def test_a_huge_sparse_tensor_is_refused(shape: tuple[int, ...]) -> None:
    """A sparse tensor whose dense copy would take a gibibyte or more is rejected with an error that names its shape."""
    sparse = torch.sparse_coo_tensor(torch.zeros(len(shape), 1, dtype=torch.int64), torch.ones(1), shape)
    named = rf"^a sparse tensor of {'×'.join(map(str, shape))} would be made dense to be reduced; leave it out$"
    for statistics in (Statistics(), Extrema()):
        before = statistics.state.tolist()
        with pytest.raises(ArgumentError, match=named):
            statistics.update(sparse)
        assert statistics.state.tolist() == before


# Quantised ones


@pytest.mark.parametrize("dtype", [torch.quint8, torch.qint8, torch.qint32], ids=str)
def test_a_quantised_tensor_counts_with_the_numbers_it_stands_for(dtype: torch.dtype) -> None:
    """A quantised tensor has the statistics of the dequantised values, not of the stored integers."""
    quantised = torch.quantize_per_tensor(torch.tensor([0.0, 0.5, 1.26, 2.0]), 0.25, 3, dtype)
    assert as_plain(quantised).tolist() == [0.0, 0.5, 1.25, 2.0]
    assert_statistics(quantised, torch.tensor([0.0, 0.5, 1.25, 2.0]))


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
    assert_statistics(tensor, ROWS.to(dtype))


def test_the_parts_of_a_jagged_tensor_come_in_a_row() -> None:
    """The parts of a jagged tensor are concatenated along the ragged dimension."""
    assert as_plain(nested(torch.jagged)).tolist() == ROWS.tolist()


def test_a_jagged_tensor_with_a_gradient_counts() -> None:
    """A jagged activation in an autograd graph is counted without changing the graph."""
    weight = torch.ones(2, requires_grad=True)
    output = nested(torch.jagged) * weight
    assert_statistics(output, ROWS)
    assert output.requires_grad


def test_what_a_jagged_tensor_leaves_out_does_not_count() -> None:
    """The padding in a jagged view of a padded tensor is not counted."""
    padded = torch.tensor([[1.0, 2.0, 100.0, 100.0], [100.0, 3.0, 4.0, 100.0], [5.0, 100.0, 100.0, 100.0]])
    starts, lengths = torch.tensor([0, 1, 0]), torch.tensor([2, 2, 1])
    view = torch.nested.narrow(padded, 1, starts, lengths, layout=torch.jagged)
    assert [part.tolist() for part in view.unbind()] == [[1.0, 2.0], [3.0, 4.0], [5.0]]
    assert_statistics(view, torch.arange(1.0, 6.0))


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
    assert_statistics(tensor, DENSE)


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
