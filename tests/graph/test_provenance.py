"""Which node gave a tensor its present values."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from lightning_recorder.graph.provenance import Provenance


def test_what_was_not_seen() -> None:
    """A tensor that was not bound, and shares no memory with one that was, has no node."""
    provenance = Provenance()
    provenance.bind(torch.ones(2), 7)
    assert provenance.of(torch.ones(2)) is None


def test_the_last_node_counts() -> None:
    """A tensor that was bound twice is known by the second node."""
    provenance, tensor = Provenance(), torch.ones(2)
    provenance.bind(tensor, 1)
    provenance.bind(tensor, 2)
    assert provenance.of(tensor) == 2


def test_shared_memory() -> None:
    """An unseen view is known by its base; a bound view by itself, without a say for its base."""
    provenance, base = Provenance(), torch.ones(4)
    provenance.bind(base, 1)
    view, unseen = base.view(2, 2), base[1:]
    provenance.bind(view, 2)
    assert [provenance.of(tensor) for tensor in (base, view, unseen)] == [1, 2, 1]


def test_a_write_is_seen_by_all_who_share_the_memory() -> None:
    """After a write through one of them, all tensors of the memory have their values from it, until they are bound."""
    provenance, base = Provenance(), torch.ones(4)
    view, other = base.view(2, 2), base[1:]
    for node, tensor in enumerate((base, view, other), 1):
        provenance.bind(tensor, node)
    provenance.bind(view, 9, wrote=True)
    assert [provenance.of(tensor) for tensor in (base, view, other)] == [9, 9, 9]
    provenance.bind(other, 10)
    assert [provenance.of(tensor) for tensor in (base, view, other)] == [9, 9, 10]


def test_a_tensor_of_ones_own() -> None:
    """Asked for the tensor alone, what is known of its memory does not count until it is bound itself."""
    provenance, base = Provenance(), torch.ones(4)
    provenance.bind(base, 1)
    parameter = torch.nn.Parameter(base)
    assert (provenance.of(parameter), provenance.of(parameter, own=True)) == (1, None)
    provenance.bind(parameter, 2)
    assert provenance.of(parameter, own=True) == 2


def test_nothing_is_kept() -> None:
    """Neither a tensor nor its memory lives longer for being known."""
    provenance, array = Provenance(), torch.ones(3).numpy()
    tensor = torch.from_numpy(array)
    provenance.bind(tensor, 1, wrote=True)
    dead = weakref.ref(tensor), weakref.ref(array)
    del tensor, array
    gc.collect()
    assert [reference() for reference in dead] == [None, None]


@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, torch.Tensor.to_mkldnn], ids=["sparse", "mkldnn"])
def test_memory_that_cannot_be_known(make: object) -> None:
    """A tensor without a storage is known as an object."""
    assert callable(make)
    provenance, tensor = Provenance(), make(torch.ones(2, 2))
    assert provenance.of(tensor) is None
    provenance.bind(tensor, 3)
    assert provenance.of(tensor) == 3


def test_clear() -> None:
    """After clearing no tensor is known, by itself or by its memory."""
    provenance, tensor = Provenance(), torch.ones(2)
    provenance.bind(tensor, 1, wrote=True)
    provenance.clear()
    assert provenance.of(tensor) is None


def test_what_is_gone_is_let_go() -> None:
    """Of a thousand tensors of which three live no more than a few are still known."""
    provenance = Provenance()
    kept = []
    for number in range(1000):
        tensor = torch.ones(4)
        provenance.bind(tensor, number)
        if number % 400 == 0:
            kept.append(tensor)
    del tensor
    assert [provenance.of(each) for each in kept] == [0, 400, 800]
    assert 3 <= len(provenance) <= 20
