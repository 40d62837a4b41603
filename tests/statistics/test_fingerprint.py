"""Tests of the checksum of a batch."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_recorder.reductions.kernels.fused import prepare
from lightning_recorder.statistics import batch_fingerprint, fingerprint
from lightning_recorder.statistics.fingerprint import (
    _as_array,
    _of_array,
    _of_tensor,
    sample_fingerprints,
    sample_numbers,
)


def values(batch: Any) -> list[int]:
    found = batch_fingerprint(batch)
    assert found is not None
    numbers: list[int] = found.tolist()
    return numbers


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.complex64,
    ],
)
def test_the_order_of_samples_changes_only_the_first_number(dtype: torch.dtype) -> None:
    """For every dtype, exchanged samples keep the second number and change the first; equal batches keep both."""
    torch.manual_seed(0)
    batch = torch.rand(6, 3, 5).mul(8).sub(3).to(dtype) if dtype != torch.bool else torch.rand(6, 3, 5) < 0.5
    one, other = values(batch), values(batch[[1, 0, 2, 3, 4, 5]])
    assert one == values(batch.clone())
    assert one[0] != other[0]
    assert one[1] == other[1]


def test_any_change_of_a_read_value_changes_both_numbers() -> None:
    """A changed bit, an exchange of values within a sample, and exchanged tensors give other numbers."""
    batch = torch.arange(12.0).reshape(3, 4)
    known = values(batch)
    for place in range(12):
        changed = batch.clone()
        changed.view(-1)[place] = torch.nextafter(changed.view(-1)[place], torch.tensor(99.0))
        assert not set(values(changed)) & set(known)
    assert not set(values(batch.flip(1))) & set(known)
    assert values((batch, batch + 1)) != values((batch + 1, batch))


def test_the_memory_layout_does_not_matter() -> None:
    """A batch in channels-last memory has the numbers of the same batch in the usual layout."""
    batch = torch.rand(4, 3, 16, 16)
    assert values(batch) == values(batch.to(memory_format=torch.channels_last))


def test_batches_without_tensors_have_none() -> None:
    """Strings, numbers, empty and sparse tensors have no checksum."""
    assert batch_fingerprint(["text", 1, torch.ones(0), torch.eye(2).to_sparse()]) is None
    assert values({"x": torch.tensor(3.0), "text": "a"}) == values({"x": torch.tensor(3.0), "text": "b"})


class _NoWaiting(TorchDispatchMode):
    """Fails if a value is copied to the host."""

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "_local_scalar_dense" not in str(func), func
        assert not str(func).startswith(("aten.nonzero", "aten.equal")), func
        return func(*args, **(kwargs or {}))


class Labeled(Tensor):
    """A tensor whose methods need an attribute that new tensors do not have."""

    labels: list[str]

    @override
    def to(self, *args: Any, **kwargs: Any) -> Any:
        found: Any = super().to(*args, **kwargs)
        found.labels = self.labels
        return found


class Hostile(Tensor):
    """A tensor that refuses everything."""

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors is in prototype stage:UserWarning")
def test_tensors_of_other_classes() -> None:
    """A subclass is read without its own methods, and one that wraps another tensor is left out, without a warning."""
    plain = torch.arange(6.0).reshape(3, 2)
    labeled: Any = plain.as_subclass(Labeled)
    labeled.labels = ["x", "y"]
    for each in (labeled, plain.as_subclass(Hostile)):
        assert values({"x": each}) == values({"x": plain})
        assert type(batch_fingerprint(each)) is Tensor
    masked = torch.masked.masked_tensor(plain, plain > 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert batch_fingerprint(masked) is None


def test_nothing_waits_for_the_device_and_the_batch_is_unchanged() -> None:
    """No value is read on the host, and neither the batch nor the random numbers change."""
    batch = torch.rand(2000, 3, 32, 32)
    before, state = batch.clone(), torch.get_rng_state()
    with _NoWaiting():  # type: ignore[no-untyped-call]  # torch does not annotate it
        found = batch_fingerprint((batch, torch.arange(2000)))
    assert isinstance(found, Tensor)
    assert torch.equal(batch, before)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("shape", [(), (1,), (3000,), (128, 784), (64, 3, 32, 32), (4, 1, 1, 1, 9)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int16, torch.bool])
def test_numpy_and_torch_compute_the_same_checksums(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """A CPU tensor, which numpy reads, has the checksums that torch computes on other devices."""
    tensor = (50 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)
    transposed = tensor.transpose(0, -1) if tensor.dim() > 1 else tensor
    for each in (tensor, transposed):
        array = _as_array(each)
        assert array is not None
        assert _of_array(array).tolist() == _of_tensor(each).tolist()


# Samples.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_each_sample_has_a_fingerprint(dtype: torch.dtype) -> None:
    """All 65,536 samples of 16 bits differ, in each dtype, wherever they stand, and numpy computes what torch does."""
    bits = (torch.arange(1 << 16).unsqueeze(1) >> torch.arange(16)) & 1
    batch = bits.to(dtype)
    found = sample_fingerprints(batch)
    assert found is not None
    assert len(found.unique()) == 1 << 16
    parts = sample_fingerprints((batch[7:9], torch.tensor([3, 4])))
    assert parts is not None
    assert parts[0] != found[7]
    order = torch.randperm(1 << 16)
    assert torch.equal(sample_fingerprints(batch[order]), found[order])  # type: ignore[arg-type]  # not None
    assert torch.equal(fingerprint._scrambled(fingerprint._rows_of_tensor(batch, 64)), found)


def test_samples_that_are_not_known() -> None:
    """Tensors with different numbers of rows have no samples, and neither has a batch without tensors."""
    assert sample_fingerprints((torch.zeros(5, 2), torch.zeros(3))) is None
    assert sample_fingerprints({"text": ["a", "b"]}) is None


def test_samples_are_read_at_a_few_places() -> None:
    """At most as many values of a large sample are read as asked for, at regular distances."""
    batch = torch.zeros(2, 8, 100)
    known = sample_fingerprints(batch, 16)
    read = 0
    for place in range(800):
        batch.view(2, 800)[1, place] = 1
        changed = sample_fingerprints(batch, 16)
        assert known is not None
        assert changed is not None
        assert changed[0] == known[0]
        read += bool(changed[1] != known[1])
        batch.view(2, 800)[1, place] = 0
    assert read == 16


@pytest.mark.parametrize("shape", [(5,), (1, 4), (6, 5, 4), (3, 2, 3, 4), (33, 200), (1100, 9), (2, 1, 1, 1, 3)])
def test_the_compiled_function_computes_the_same_numbers(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each dtype and layout, alone and beside other tensors, the compiled numbers are those of NumPy and torch."""
    if not prepare(wait=True):
        pytest.skip("there is no compiled function")
    generator = torch.Generator().manual_seed(4)
    batches = []
    for dtype in fingerprint._KINDS:
        plain = (torch.randn(shape, generator=generator) * 50).to(dtype)
        rows = torch.arange(len(plain))
        for x in (plain, torch.stack([plain, plain], -1)[..., 1], plain.flip(0).transpose(0, -1)):
            batches += [[x], [x, torch.arange(len(x)) % 3], [torch.arange(len(x)), x, x]]
        batches += [[rows, plain]]
    compiled = [sample_numbers(each, values) for each in batches for values in (64, 8)]
    monkeypatch.setattr(fingerprint, "join_rows", lambda: None)
    usual = [sample_numbers(each, values) for each in batches for values in (64, 8)]
    assert all(one is not None and other is not None for one, other in zip(compiled, usual, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(compiled, usual, strict=True))  # type: ignore[arg-type]


def test_graphs_have_the_same_fingerprint_in_each_batch() -> None:
    """The nodes that PyTorch Geometric joins belong to their graphs, whatever else the batch has."""

    def joined(*graphs: int) -> dict[str, Tensor]:
        sizes = [2 + each % 3 for each in graphs]
        nodes = [
            torch.randn(size, 8, generator=torch.Generator().manual_seed(each))
            for each, size in zip(graphs, sizes, strict=True)
        ]
        return {
            "x": torch.cat(nodes),
            "edge_index": torch.zeros(2, 7, dtype=torch.long),
            "y": torch.tensor(graphs),
            "batch": torch.arange(len(graphs)).repeat_interleave(torch.tensor(sizes)),
            "ptr": torch.tensor([0, *sizes]).cumsum(0),
        }

    first, second = sample_numbers(joined(3, 4, 5)), sample_numbers(joined(5, 6, 3))
    assert first is not None
    assert second is not None
    assert first.shape == (2, 3)
    assert torch.equal(first[:, [0, 2]], second[:, [2, 0]])
    assert not torch.isin(first[:, 1], second).any()
    assert sample_numbers({"x": torch.ones(3, 8), "y": torch.ones(2)}) is None
