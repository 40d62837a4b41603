"""Laws that every reduction satisfies, as assertions about a factory of fresh reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from lightning_recorder.reductions import Reduction
from tests.reductions.strategies import DTYPES, INTEGERS
from tests.reductions.test_base import NoReading

Make = Callable[[], Reduction]

SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.1, float("nan"), float("inf"), -float("inf"), 65504.0, 2.0**-24)


@st.composite
def filled(draw: st.DrawFn, shape: Sequence[int], dtypes: Sequence[torch.dtype] = DTYPES) -> Tensor:
    """Return a tensor of the given shape and one of the types, with special or half-precision values."""
    dtype = draw(st.sampled_from(dtypes))
    numel = torch.Size(shape).numel() * (2 if dtype.is_complex else 1)
    if dtype in INTEGERS or dtype == torch.bool:
        elements: list[float] = draw(st.lists(st.integers(0, 100), min_size=numel, max_size=numel))
    else:
        one = st.one_of(st.sampled_from(SPECIAL), st.floats(-100, 100, width=16))
        elements = draw(st.lists(one, min_size=numel, max_size=numel))
    real = torch.tensor(elements, dtype=torch.float64)
    return (torch.view_as_complex(real.reshape(-1, 2)) if dtype.is_complex else real).to(dtype).reshape(tuple(shape))


def reduced(make: Make, *tensors: Tensor) -> Reduction:
    """Return a fresh reduction that was updated with the tensors."""
    reduction = make()
    for tensor in tensors:
        reduction.update(tensor)
    return reduction


def merged(make: Make, *parts: Reduction) -> Reduction:
    """Return a fresh reduction into which the parts were merged from the left."""
    reduction = make()
    for part in parts:
        reduction.merge(part)
    return reduction


def computed(make: Make, *tensors: Tensor) -> dict[str, list[float]]:
    """Return the statistics of a stream as flat lists of numbers."""
    return {name: value.flatten().tolist() for name, value in reduced(make, *tensors).compute().items()}


def one_number(reduction: Reduction) -> float:
    """Return the only statistic as a single number."""
    (value,) = reduction.compute().values()
    return float(value)


def bits(state: Tensor) -> list[int]:
    """Return the words of a state as integers with the same bits."""
    found: list[int] = state.contiguous().view(torch.int64).flatten().tolist()
    return found


def assert_equal(one: Tensor, other: Tensor) -> None:
    """Assert that two tensors have the same numbers; NaN equals NaN."""
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def assert_neutral(make: Make, *tensors: Tensor) -> None:
    """Assert that an empty state is neutral: merging with it from either side changes no bit of the state."""
    whole = reduced(make, *tensors)
    assert whole.width > 0
    for left in (True, False):
        state, empty = whole.state.clone(), whole.initial()
        one, other = (empty, state) if left else (state, empty)
        whole.merge_states(one, other)
        assert bits(one) == bits(whole.state)
    assert bits(merged(make, make(), whole, make()).state) == bits(whole.state)


def assert_rows_agree(make: Make, streams: Sequence[Sequence[Tensor]]) -> None:
    """Assert that merging and summarizing a block of states is bitwise equal to doing so row by row."""
    rows = [reduced(make, *stream) for stream in streams]
    reduction = rows[0]
    block = torch.stack([row.state for row in rows])
    both, others = block.clone(), block.flip(0).clone()
    reduction.merge_states(both, others)
    for index, merged_row in enumerate(both):
        one = block[index].clone()
        reduction.merge_states(one, others[index])
        assert bits(merged_row) == bits(one)
    # Use two leading dimensions, one of them of size 1.
    summary = reduction.summarize(both[:, None])
    assert tuple(summary) == reduction.statistics
    for index, row in enumerate(both):
        for name, value in reduction.summarize(row).items():
            assert value.dtype == torch.float64
            assert summary[name].shape == (len(rows), 1, *value.shape)
            assert_equal(summary[name][index, 0], value)


def live(make: Make, device: str, *tensors: Tensor) -> Reduction:
    """Run all operations that a state undergoes while a model trains."""
    state, other = make(), make()
    for tensor in tensors:
        state.update(tensor.to(device))
        other.update(tensor.to(device))
    state.merge(other)
    state.merge_ranks(state.state, other.state)
    state.compute()
    state.restart(state.state)
    state.compute()
    other.reset()
    return state


def assert_nothing_waits(make: Make, *tensors: Tensor) -> None:
    """Assert that a whole life cycle runs on meta tensors, which have no data, and reads no number elsewhere."""
    state = live(make, "meta", *tensors).state
    assert (state.dtype, state.device.type) == (torch.float64, "meta")
    with NoReading():  # type: ignore[no-untyped-call]  # the constructor of torch is untyped
        live(make, "cpu", *tensors)
