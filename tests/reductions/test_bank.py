"""Tests of the packed storage for the states of many sites."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from lightning_recorder.errors import ArgumentError
from lightning_recorder.reductions import (
    BatchMean,
    BatchSum,
    Change,
    Combined,
    Extrema,
    RunningMoments,
    StateBank,
    Statistics,
    Tallies,
    Values,
)

Key = TypeVar("Key")

CPU = torch.device("cpu")
# Differs from the CPU only by its index: to the bank it is a second device, and every machine has it.
OTHER = torch.device("cpu", 0)


class Elsewhere(Values):
    """Values that claim to be on the other device."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor.as_subclass(OnOther))


class OnOther(Tensor):
    """A tensor that claims to be on the other device."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # an attribute in torch
        return OTHER


def collected(bank: StateBank[Key]) -> dict[Key, list[float]]:
    """Return the states of a bank by key."""
    return {
        key: state.tolist() for group in bank.collect() for key, state in zip(group.keys, group.states, strict=True)
    }


def values(*numbers: float) -> Values:
    return Values(torch.tensor(numbers))


def test_each_key_has_a_state_of_its_own() -> None:
    """Each key keeps its own state, even when the bank grows beyond its first block of 64 rows."""
    bank: StateBank[int] = StateBank(Extrema())
    for number in range(3):
        for key in range(200):
            bank.add(key, values(key * number))
    assert collected(bank) == {key: [0, 2 * key] for key in range(200)}


def test_a_bank_without_keys_collects_nothing() -> None:
    """An empty bank has no states and uses no memory."""
    bank: StateBank[str] = StateBank(Extrema())
    assert bank.collect() == []
    assert bank.nbytes == 0


def test_the_size_is_that_of_the_blocks() -> None:
    """The bank uses 8 bytes per word of its blocks of 64 rows, and a new block starts when the last one is full."""
    bank: StateBank[int] = StateBank(RunningMoments())
    sizes = [bank.nbytes]
    for key in range(65):
        bank.add(key, values(1))
        sizes.append(bank.nbytes)
    block = 64 * 3 * 8
    assert sizes == [0] + [block] * 64 + [2 * block]


def test_long_rows_come_one_by_one() -> None:
    """A reduction that needs a mebiword per key gets no memory for unused rows."""
    bank: StateBank[int] = StateBank(BatchSum())
    bank.add(0, Values(torch.ones(1, 2**20 - 1)))
    assert bank.nbytes == 8 * 2**20


def test_a_large_state_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The size of states above 20 KB per site is logged once; the default statistics log nothing."""
    caplog.set_level("INFO", "lightning_recorder")
    for reduction, size in ((Statistics(), 1), (BatchSum(), 2559), (BatchSum(), 2560)):
        bank: StateBank[int] = StateBank(reduction)
        for key in (1, 2):
            bank.add(key, Values(torch.ones(2, size)))
    warned = "20,488 bytes are kept for each site: BatchSum(shape=(2560,), dim=0) (20,488 bytes)"
    assert [record.message for record in caplog.records] == [warned]


def test_the_states_of_a_device_travel_together() -> None:
    """All states of one kind are collected as one tensor, so that they need only one transfer."""
    bank: StateBank[int] = StateBank(Extrema())
    for key in range(65):
        bank.add(key, values(key))
    assert [(len(group.keys), tuple(group.states.shape)) for group in bank.collect()] == [(65, (65, 2))]


def test_the_devices_of_a_key_are_merged() -> None:
    """A key on two devices is collected as one merged state, while its rows stay separate."""
    bank: StateBank[str] = StateBank(RunningMoments())
    bank.add("both", values(1, 2))
    bank.add("both", Elsewhere(torch.tensor([3.0, 6.0])))
    bank.add("one", Elsewhere(torch.tensor([5.0])))
    for _ in range(2):  # collecting again must not merge twice
        assert collected(bank) == {"both": [4.0, 3.0, 14.0], "one": [1.0, 5.0, 0.0]}
    bank.add("both", values(3, 3, 3, 3))
    assert collected(bank)["both"] == [8.0, 3.0, 14.0]


def test_what_was_collected_is_a_snapshot() -> None:
    """Collected states are a snapshot: later updates do not change them, and changing them changes no row."""
    bank: StateBank[str] = StateBank(Extrema())
    bank.add("a", values(1))
    (group,) = bank.collect()
    bank.add("a", values(9))
    assert group.states.tolist() == [[1.0, 1.0]]
    group.states.zero_()
    assert collected(bank) == {"a": [1.0, 9.0]}


def test_reset_makes_every_row_initial() -> None:
    """A reset clears the rows of all blocks and devices, including deferred merges; the keys remain."""
    bank: StateBank[int] = StateBank(Extrema())
    for key in range(70):
        bank.add(key, values(key))
        bank.add(key, Elsewhere(torch.ones(1)))
    bank.reset()
    assert collected(bank) == {key: [float("inf"), -float("inf")] for key in range(70)}
    bank.add(3, values(5))
    assert collected(bank)[3] == [5.0, 5.0]


def test_reset_carries_over_what_a_reduction_carries() -> None:
    """A reduction that compares consecutive tensors compares the first one after a reset with the one before it."""
    bank: StateBank[str] = StateBank(Combined([Extrema(), Change()]))
    bank.add("a", values(3, 4))
    bank.reset()
    bank.add("a", values(6, 8))
    (group,) = bank.collect()
    summary = group.reduction.summarize(group.states)
    assert {name: value.item() for name, value in summary.items()} == {
        "min": 6.0,
        "max": 8.0,
        "cosine_to_previous": 1.0,
        "ratio_to_previous": 2.0,
    }


@pytest.mark.parametrize("counts", [[1], [2, 1], [3, 0, 5], [64, 1], [65, 130, 7]])
def test_what_is_merged_later_is_as_if_merged_at_once(counts: list[int]) -> None:
    """For any number of updates per key between two results, the state equals that of a single reduction."""
    torch.manual_seed(0)
    bank: StateBank[int] = StateBank(Combined([RunningMoments(), Extrema(), Tallies()]))
    expected = [Combined([RunningMoments(), Extrema(), Tallies()]) for _ in counts]
    for number in range(max(counts)):
        for key, count in enumerate(counts):
            if number < count:
                tensor = torch.randn(7)
                bank.add(key, Values(tensor))
                expected[key].update(tensor)
    for key, state in collected(bank).items():
        torch.testing.assert_close(
            torch.tensor(state, dtype=torch.float64), expected[key].state, rtol=1e-12, atol=1e-12
        )
        assert state[3:] == expected[key].state[3:].tolist()


def test_sites_of_several_shapes() -> None:
    """A reduction that depends on the shape uses the shape of each key separately."""
    bank: StateBank[str] = StateBank(Combined([Extrema(), BatchMean()]))
    bank.add("two", Values(torch.tensor([[1.0, 2.0], [3.0, 4.0]])))
    bank.add("three", Values(torch.tensor([[1.0, 2.0, 6.0]])))
    bank.add("two", Values(torch.tensor([[8.0, 9.0]])))
    found = {
        key: summary["batch_mean"][row].tolist()
        for group in bank.collect()
        for summary in [group.reduction.summarize(group.states)]
        for row, key in enumerate(group.keys)
    }
    assert found == {"two": [4.0, 5.0], "three": [1.0, 2.0, 6.0]}
    with pytest.raises(ArgumentError, match=r"BatchMean has numbers of shape \(2,\), but the new shape is \(3,\)"):
        bank.add("two", Values(torch.ones(1, 3)))


def test_a_row_from_inference_mode_can_be_updated_outside() -> None:
    """A row that was created in inference mode accepts updates outside it, even after a reset inside it."""
    bank: StateBank[str] = StateBank(Extrema())
    with torch.inference_mode():
        bank.add("a", values(1))
    bank.add("a", values(0))
    assert collected(bank) == {"a": [0.0, 1.0]}
    with torch.inference_mode():
        bank.reset()
    bank.add("a", values(1))
    assert collected(bank) == {"a": [1.0, 1.0]}


@pytest.fixture
def hasty() -> Iterator[None]:
    """Make threads switch as often as possible, to provoke race conditions."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("hasty")
def test_threads_get_rows_of_their_own() -> None:
    """Rows that several threads request at the same time, such as hooks on a GPU, are distinct."""
    for _ in range(10):
        bank: StateBank[int] = StateBank(Extrema())
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key, bank=bank: bank.add(key, values(key)), range(500)))
        assert collected(bank) == {key: [key, key] for key in range(500)}
