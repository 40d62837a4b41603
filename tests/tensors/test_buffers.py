"""Pool of reusable memory for copies."""

from __future__ import annotations

import torch

from lightning_recorder.tensors import BufferPool

CPU = torch.device("cpu")


def test_what_was_given_back_is_given_again() -> None:
    """A returned tensor is reused for the same shape and dtype; for others a new one is created."""
    pool = BufferPool()
    first = pool.take((2, 3), torch.float32, CPU)
    assert pool.take((2, 3), torch.float32, CPU) is not first
    pool.give_back([first])
    assert pool.take((3, 2), torch.float32, CPU) is not first
    assert pool.take((2, 3), torch.float64, CPU) is not first
    assert pool.take((2, 3), torch.float32, CPU) is first
    assert pool.take((2, 3), torch.float32, CPU) is not first


def test_what_nobody_wants_is_let_go_of() -> None:
    """If shapes differ at each step, memory of at most four steps is kept."""
    pool = BufferPool()
    given = [pool.take((length,), torch.float32, CPU) for length in range(1, 7)]
    for tensor in given:
        pool.give_back([tensor])
    again = [pool.take((length,), torch.float32, CPU) for length in range(1, 7)]
    assert [a is b for a, b in zip(given, again, strict=True)] == [False, False, True, True, True, True]
