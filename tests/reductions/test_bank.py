"""Where the states of many sites lie."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lightning_recorder.reductions import Extrema, RunningMoments, StateBank, Values

CPU = torch.device("cpu")
# Told apart from CPU by its index: a second device as far as the bank goes, which every machine has.
OTHER = torch.device("cpu", 0)


def test_the_same_key_has_the_same_row() -> None:
    """A key's row is handed out once and then found again, also while the bank grows past its first block."""
    bank: StateBank[int] = StateBank(Extrema)
    rows = [bank.row(key, CPU) for key in range(200)]
    assert [bank.row(key, CPU).data_ptr() for key in range(200)] == [row.data_ptr() for row in rows]
    assert len({row.data_ptr() for row in rows}) == 200


def test_rows_survive_growth() -> None:
    """A row that was handed out before the bank grew past 64 rows is the one that is collected."""
    bank: StateBank[int] = StateBank(Extrema)
    rows = [bank.row(key, CPU) for key in range(200)]
    for key, row in enumerate(rows):
        Extrema.update_state(row, Values(torch.tensor([-key, key])))
    assert {key: state.tolist() for key, state in bank.collect().items()} == {key: [-key, key] for key in range(200)}


def test_a_new_row_is_initial() -> None:
    """A row begins as an empty stream, float64, and a bank without rows collects nothing."""
    bank: StateBank[str] = StateBank(Extrema)
    assert bank.collect() == {}
    row = bank.row("a", CPU)
    assert (row.tolist(), row.dtype) == ([float("inf"), -float("inf")], torch.float64)


def test_the_size_is_that_of_the_blocks() -> None:
    """The bank takes 8 bytes for each word of blocks of 64 rows, and a block is begun when the last one is full."""
    bank: StateBank[int] = StateBank(RunningMoments)
    sizes = [bank.nbytes]
    for key in range(65):
        bank.row(key, CPU)
        sizes.append(bank.nbytes)
    block = 64 * 3 * 8
    assert sizes == [0] + [block] * 64 + [2 * block]


def test_the_rows_of_a_device_travel_together() -> None:
    """The rows of a block lie side by side, so that one transfer brings them all."""
    bank: StateBank[int] = StateBank(Extrema)
    rows = [bank.row(key, CPU) for key in range(64)]
    assert {row.untyped_storage().data_ptr() for row in rows} == {rows[0].untyped_storage().data_ptr()}


def test_the_devices_of_a_key_are_merged() -> None:
    """A key that was seen on two devices is collected as one merged state, its rows staying apart."""
    bank: StateBank[str] = StateBank(RunningMoments)
    RunningMoments.update_state(bank.row("both", CPU), Values(torch.tensor([1.0, 2.0])))
    RunningMoments.update_state(bank.row("both", OTHER), Values(torch.tensor([3.0, 6.0])))
    RunningMoments.update_state(bank.row("one", OTHER), Values(torch.tensor([5.0])))
    for _ in range(2):  # collecting again merges nothing twice
        states = {key: state.tolist() for key, state in bank.collect().items()}
        assert states == {"both": [4.0, 3.0, 14.0], "one": [1.0, 5.0, 0.0]}
    assert bank.row("both", CPU).tolist() == [2.0, 1.5, 0.5]


def test_what_was_collected_is_a_snapshot() -> None:
    """Collected states stay as they are when the rows are updated or reset, and changing them changes no row."""
    bank: StateBank[str] = StateBank(Extrema)
    row = bank.row("a", CPU)
    Extrema.update_state(row, Values(torch.tensor([1.0])))
    collected = bank.collect()["a"]
    Extrema.update_state(row, Values(torch.tensor([9.0])))
    assert collected.tolist() == [1.0, 1.0]
    collected.zero_()
    assert row.tolist() == [1.0, 9.0]


def test_reset_makes_every_row_initial() -> None:
    """A reset empties the rows of all blocks and devices and leaves them where they are."""
    bank: StateBank[int] = StateBank(Extrema)
    rows = [bank.row(key, device) for key in range(70) for device in (CPU, OTHER)]
    for row in rows:
        Extrema.update_state(row, Values(torch.ones(1)))
    bank.reset()
    assert all(row.tolist() == [float("inf"), -float("inf")] for row in rows)
    assert sorted(bank.collect()) == list(range(70))


def test_a_row_from_inference_mode_can_be_updated_outside() -> None:
    """A row that validation made inside inference mode takes updates outside it, also after a reset inside it."""
    bank: StateBank[str] = StateBank(Extrema)
    with torch.inference_mode():
        row = bank.row("a", CPU)
        Extrema.update_state(row, Values(torch.ones(1)))
    Extrema.update_state(row, Values(torch.zeros(1)))
    assert bank.collect()["a"].tolist() == [0.0, 1.0]
    with torch.inference_mode():
        bank.reset()
    Extrema.update_state(row, Values(torch.ones(1)))
    assert bank.collect()["a"].tolist() == [1.0, 1.0]


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns as often as they can, so that what may go wrong between them does."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("hasty")
def test_threads_get_rows_of_their_own() -> None:
    """Rows that several threads ask for at once, as forward and backward hooks do on a GPU, are all different."""
    for _ in range(10):
        bank: StateBank[int] = StateBank(Extrema)
        with ThreadPoolExecutor(8) as pool:
            rows = list(pool.map(lambda key, bank=bank: bank.row(key, CPU), range(500)))
        assert len({row.data_ptr() for row in rows}) == 500
        assert sorted(bank.collect()) == list(range(500))
