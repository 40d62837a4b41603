"""Tests of the norms of many tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_recorder.internals.norms import local_values, norms_of


@pytest.mark.parametrize(
    ("indices", "shape"),
    [([[3, 1, 3, 3, 0]], (5, 2)), ([[1, 0, 1, 1, 1], [2, 2, 2, 0, 2]], (2, 3)), ([[]], (4, 2))],
    ids=["repeated rows", "two sparse dimensions", "empty"],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_norm_of_a_sparse_tensor(indices: list[list[int]], shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Values at equal indices are added before they are squared, as in the same tensor in dense form."""
    torch.manual_seed(0)
    where = torch.tensor(indices, dtype=torch.int64)
    # The sums of these numbers are exact in half precision, too.
    values = torch.randint(-4, 5, (where.shape[1], *shape[len(where) :])).to(dtype)
    sparse = torch.sparse_coo_tensor(where, values, shape, check_invariants=True)
    for each in (sparse, sparse.coalesce()):
        (norm,) = norms_of([each])
        assert norm.item() == pytest.approx(each.to_dense().double().norm().item(), rel=1e-6)


def test_local_values_of_a_dense_tensor() -> None:
    """A dense tensor is returned as it is, without its gradient."""
    dense = torch.ones(3, requires_grad=True)
    found: Tensor = local_values(dense)
    assert (found.data_ptr(), found.requires_grad) == (dense.data_ptr(), False)
