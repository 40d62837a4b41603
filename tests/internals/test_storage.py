"""Tensor storage, including uninitialized tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_recorder.internals.autograd import address_of
from lightning_recorder.internals.storage import is_uninitialized, storage_of


def test_what_has_no_shape_yet() -> None:
    """Parameters and buffers of a lazy module are uninitialized until its first call; other tensors never are."""
    lazy = nn.LazyBatchNorm1d()
    assert [is_uninitialized(each) for each in (lazy.weight, lazy.running_mean)] == [True, True]
    lazy(torch.ones(2, 3))
    assert not any(map(is_uninitialized, (lazy.weight, lazy.running_mean, torch.ones(1), None, "weight")))


def test_views_share_their_memory() -> None:
    """A view shares the storage of its base; a copy has its own."""
    base = torch.ones(4)
    storages = [storage_of(each) for each in (base, base[1:], base.clone())]
    one, view, copy = (address_of(each) for each in storages if each is not None)
    assert one == view != copy


@pytest.mark.parametrize(
    "make", [lambda: torch.eye(2).to_sparse(), lambda: nn.LazyLinear(2).weight], ids=["sparse", "lazy"]
)
def test_tensors_without_memory_of_their_own(make: object) -> None:
    """Sparse and uninitialized tensors have no storage."""
    assert callable(make)
    assert storage_of(make()) is None
