"""Tests of the copies of states without empty bins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_recorder.reductions import CompactStates, StateBank, Statistics, Values, compacted, prepare
from lightning_recorder.reductions.kernels import fused

SPECIAL = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 4e-39, -7.5])


@pytest.fixture(autouse=True)
def compiled() -> None:
    """Skip these tests without a C compiler."""
    if not prepare(wait=True):
        pytest.skip("there is no C compiler")


def bank_of(tensors: dict[str, Tensor], sample: int | None = None) -> StateBank[str]:
    """Return a bank with the default statistics of each tensor."""
    bank: StateBank[str] = StateBank(Statistics(sample=sample))
    for key, tensor in tensors.items():
        bank.add(key, Values(tensor, 1.0))
    return bank


def bits(states: Tensor) -> Tensor:
    """Return the bits of states, which can be compared although some are NaN."""
    return states.view(torch.int64)


@pytest.mark.parametrize("sample", [None, 50])
@pytest.mark.parametrize("keys", [1, 5, 64, 65, 200])
def test_a_compact_copy_holds_the_bits_of_the_whole_states(keys: int, sample: int | None) -> None:
    """The states of a compact copy equal those of a whole one to the bit, over several blocks and for empty rows."""
    generator = torch.Generator().manual_seed(keys)
    tensors = {f"{place}": 10.0 ** (place % 30 - 15) * torch.randn(300, generator=generator) for place in range(keys)}
    tensors["0"] = SPECIAL
    if keys > 1:
        tensors["none"] = torch.empty(0)
    bank = bank_of(tensors, sample)
    (whole,) = bank.collect()
    compact = compacted(bank)
    assert compact is not None
    assert compact.keys == whole.keys == list(tensors)
    assert torch.equal(bits(compact.states), bits(whole.states))


def test_a_compact_copy_does_not_change_with_the_bank() -> None:
    """A compact copy keeps its values when the bank goes on, is reset, or is copied again."""
    bank = bank_of({"a": torch.randn(100), "b": SPECIAL})
    first, (expected,) = compacted(bank), bank.collect()
    bank.reset()
    bank.add("a", Values(torch.ones(7), 1.0))
    second, (later,) = compacted(bank), bank.collect()
    assert first is not None
    assert second is not None
    assert torch.equal(bits(first.states), bits(expected.states))
    assert torch.equal(bits(second.states), bits(later.states))


def test_a_new_key_is_in_the_next_copy() -> None:
    """A key that is first seen after a copy is in the next one."""
    bank = bank_of({"a": torch.ones(3)})
    assert compacted(bank) is not None
    bank.add("b", Values(torch.ones(2), 1.0))
    copy = compacted(bank)
    assert isinstance(copy, CompactStates)
    assert copy.keys == ["a", "b"]
    assert copy.states[1, 0] == 2


def test_a_compact_copy_is_small() -> None:
    """The states of values between 1 and 2 take less than a hundredth of the memory of a whole copy."""
    bank = bank_of({str(place): torch.rand(100) + 1 for place in range(20)})
    copy = compacted(bank)
    assert copy is not None
    assert copy.nbytes < bank.collect()[0].nbytes / 100


def test_there_is_no_compact_copy_without_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the compiled function, there is no compact copy, and none of an empty bank."""
    assert compacted(bank_of({})) is None
    bank = bank_of({"a": torch.ones(3)})
    assert compacted(bank) is not None
    monkeypatch.setattr(fused._Loaded, "compactor", None)
    assert compacted(bank) is None
