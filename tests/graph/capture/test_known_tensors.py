"""The node that gave each tensor its present values."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from lightning_recorder.graph.capture.known_tensors import KnownTensors


def test_what_was_not_seen() -> None:
    """A tensor that was not bound, and shares no memory with a bound one, has no node."""
    known = KnownTensors()
    known.bind(torch.ones(2), 7)
    assert known.of(torch.ones(2)) is None


def test_the_last_node_counts() -> None:
    """The node of a tensor that was bound twice is the second."""
    known, tensor = KnownTensors(), torch.ones(2)
    known.bind(tensor, 1)
    known.bind(tensor, 2)
    assert known.of(tensor) == 2


def test_shared_memory() -> None:
    """An unbound view has the node of its base; a bound view has its own, which does not affect the base."""
    known, base = KnownTensors(), torch.ones(4)
    known.bind(base, 1)
    view, unseen = base.view(2, 2), base[1:]
    known.bind(view, 2)
    assert [known.of(tensor) for tensor in (base, view, unseen)] == [1, 2, 1]


def test_a_write_is_seen_by_all_who_share_the_memory() -> None:
    """After a write through one tensor, all tensors that share the memory have its node until they are bound again."""
    known, base = KnownTensors(), torch.ones(4)
    view, other = base.view(2, 2), base[1:]
    for node, tensor in enumerate((base, view, other), 1):
        known.bind(tensor, node)
    known.bind(view, 9, wrote=True)
    assert [known.of(tensor) for tensor in (base, view, other)] == [9, 9, 9]
    known.bind(other, 10)
    assert [known.of(tensor) for tensor in (base, view, other)] == [9, 9, 10]


def test_a_tensor_of_ones_own() -> None:
    """With ``own``, the memory of a tensor is ignored until the tensor itself is bound."""
    known, base = KnownTensors(), torch.ones(4)
    known.bind(base, 1)
    parameter = torch.nn.Parameter(base)
    assert (known.of(parameter), known.of(parameter, own=True)) == (1, None)
    known.bind(parameter, 2)
    assert known.of(parameter, own=True) == 2


def test_nothing_is_kept() -> None:
    """Neither a tensor nor its memory is kept alive."""
    known, array = KnownTensors(), torch.ones(3).numpy()
    tensor = torch.from_numpy(array)
    known.bind(tensor, 1, wrote=True)
    dead = weakref.ref(tensor), weakref.ref(array)
    del tensor, array
    gc.collect()
    assert [reference() for reference in dead] == [None, None]


@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, torch.Tensor.to_mkldnn], ids=["sparse", "mkldnn"])
def test_memory_that_cannot_be_known(make: object) -> None:
    """A tensor without a storage is identified by its object."""
    assert callable(make)
    known, tensor = KnownTensors(), make(torch.ones(2, 2))
    assert known.of(tensor) is None
    known.bind(tensor, 3)
    assert known.of(tensor) == 3


def test_clear() -> None:
    """After ``clear`` no tensor is known, by itself or by its memory."""
    known, tensor = KnownTensors(), torch.ones(2)
    known.bind(tensor, 1, wrote=True)
    known.clear()
    assert known.of(tensor) is None


def test_what_is_gone_is_let_go() -> None:
    """Out of a thousand tensors, three of them alive, only a few are kept."""
    known = KnownTensors()
    kept = []
    for number in range(1000):
        tensor = torch.ones(4)
        known.bind(tensor, number)
        if number % 400 == 0:
            kept.append(tensor)
    del tensor
    assert [known.of(each) for each in kept] == [0, 400, 800]
    assert 3 <= len(known) <= 20
