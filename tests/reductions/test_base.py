"""The contract that every reduction keeps."""

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_recorder.errors import ArgumentError
from lightning_recorder.reductions import (
    ExponentHistogram,
    Extrema,
    Reduction,
    RunningMoments,
    Statistics,
    Tallies,
)
from lightning_recorder.reductions.values import finite_or_zero
from tests.reductions.reference import Moments, values_of
from tests.reductions.strategies import DTYPES, streams

REDUCTIONS = (RunningMoments, Extrema, Tallies, ExponentHistogram, Statistics)
each_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
thorough = settings(max_examples=40)


def reduced(reduction: type[Reduction], *tensors: Tensor) -> Reduction:
    """A reduction that has seen the tensors."""
    result = reduction()
    for tensor in tensors:
        result.update(tensor)
    return result


def merged(*parts: Reduction) -> Reduction:
    """The merge of copies of the parts, from the left."""
    result = type(parts[0])(parts[0].state.clone())
    for part in parts[1:]:
        result.merge(part)
    return result


def assert_same_stream(one: Reduction, other: Reduction, tensors: list[Tensor]) -> None:
    """Hold two states of one stream to equality, to the bit in all words but the mean and the squared deviations."""
    if isinstance(one, (RunningMoments, Statistics)):
        for each in (one, other):
            Moments.of(values_of(tensors)).assert_near(each.compute())
        exact = [0, *range(3, one.width)]
        assert torch.equal(one.state[exact], other.state[exact])
    else:
        assert torch.equal(one.state, other.state)


def examples(dtype: torch.dtype) -> list[Tensor]:
    """A matrix, a 0-d and an empty tensor of a type."""
    return [torch.arange(12).reshape(3, 4).to(dtype), torch.tensor(1).to(dtype), torch.zeros(0, 2).to(dtype)]


# Laws


@each_reduction
@thorough
@given(stream=streams)
def test_splitting_a_stream_changes_nothing(reduction: type[Reduction], stream: list[Tensor]) -> None:
    """Updates with the parts, a merge of states that saw one part each and one update with everything agree."""
    whole = torch.tensor(values_of(stream), dtype=torch.float64)
    together = reduced(reduction, whole)
    assert_same_stream(reduced(reduction, *stream), together, stream)
    assert_same_stream(merged(reduction(), *(reduced(reduction, part) for part in stream)), together, stream)


@each_reduction
@thorough
@given(first=streams, second=streams, third=streams)
def test_merging_is_associative_and_commutative(
    reduction: type[Reduction], first: list[Tensor], second: list[Tensor], third: list[Tensor]
) -> None:
    """The order and the grouping in which states are merged do not matter."""
    a, b, c = (reduced(reduction, *stream) for stream in (first, second, third))
    everything = [*first, *second, *third]
    left = merged(merged(a, b), c)
    assert_same_stream(left, merged(a, merged(b, c)), everything)
    assert_same_stream(left, merged(c, b, a), everything)


@each_reduction
@thorough
@given(stream=streams)
def test_the_initial_state_is_neutral(reduction: type[Reduction], stream: list[Tensor]) -> None:
    """Merging with an empty state changes no bit, from the left and from the right."""
    state = reduced(reduction, *stream)
    assert torch.equal(merged(state, reduction()).state, state.state)
    assert torch.equal(merged(reduction(), state).state, state.state)


@each_reduction
def test_an_empty_tensor_changes_nothing(reduction: type[Reduction]) -> None:
    """Updating with a tensor without values leaves the state as it is, at the beginning and later."""
    empty = torch.zeros(0, 3)
    assert torch.equal(reduced(reduction, empty).state, reduction.initial())
    ones = torch.ones(3)
    assert torch.equal(reduced(reduction, ones, empty).state, reduced(reduction, ones).state)


@each_reduction
def test_merging_leaves_the_other_as_it_is(reduction: type[Reduction]) -> None:
    """A merge takes the other state in and does not change it."""
    other = reduced(reduction, torch.arange(4.0))
    before = other.state.clone()
    reduced(reduction, torch.ones(2)).merge(other)
    assert torch.equal(other.state, before)


# Life


@each_reduction
def test_a_state_dict_continues_the_stream(reduction: type[Reduction]) -> None:
    """A state that went through a file, loaded with weights_only, continues to the very bit."""
    first, second = torch.arange(5.0), torch.tensor([7.0, -2.0, float("nan")])
    file = io.BytesIO()
    torch.save(reduced(reduction, first).state_dict(), file)
    file.seek(0)
    restored = reduction()
    restored.update(torch.full((9,), 3.0))
    restored.load_state_dict(torch.load(file, weights_only=True))
    restored.update(second)
    assert torch.equal(restored.state, reduced(reduction, first, second).state)


@each_reduction
def test_a_state_dict_is_a_snapshot(reduction: type[Reduction]) -> None:
    """A state dict stays as it is when the stream goes on."""
    state = reduced(reduction, torch.arange(5.0))
    snapshot = state.state_dict()
    before = {name: value.clone() for name, value in snapshot.items()}
    state.update(torch.arange(9.0))
    assert {name: value.tolist() for name, value in snapshot.items()} == {
        name: value.tolist() for name, value in before.items()
    }


@each_reduction
def test_reset_forgets(reduction: type[Reduction]) -> None:
    """After a reset the state is that of an empty stream, in the same memory."""
    state = reduced(reduction, torch.arange(5.0))
    memory = state.state.data_ptr()
    state.reset()
    assert torch.equal(state.state, reduction.initial())
    assert state.state.data_ptr() == memory


@each_reduction
def test_computing_changes_nothing(reduction: type[Reduction]) -> None:
    """Computing leaves the state as it is, so that it can be repeated."""
    state = reduced(reduction, torch.arange(5.0))
    before = state.state.clone()
    first = {name: value.tolist() for name, value in state.compute().items()}
    assert {name: value.tolist() for name, value in state.compute().items()} == first
    assert torch.equal(state.state, before)


@each_reduction
def test_a_given_row_is_worked_on_in_place(reduction: type[Reduction]) -> None:
    """A row of a larger block is updated where it lies, and its neighbours are left alone."""
    block = reduction.initial().repeat(3, 1)
    reduction(block[1]).update(torch.arange(5.0))
    assert torch.equal(block[1], reduced(reduction, torch.arange(5.0)).state)
    assert torch.equal(block[0], reduction.initial())
    assert torch.equal(block[2], reduction.initial())


@each_reduction
def test_rows_are_summarized_and_merged_together_as_one_by_one(reduction: type[Reduction]) -> None:
    """A block of states is merged and summarised to what its rows give one by one."""
    rows = [[torch.arange(5.0)], [], [torch.tensor([float("nan"), 1.0])], [torch.zeros(2), torch.ones(3)]]
    block = torch.stack([reduced(reduction, *row).state for row in rows])
    others = block.flip(0).clone()
    both = block.clone()
    reduction.merge_states(both, others)
    for row in range(len(rows)):
        one = reduction(block[row].clone())
        one.merge(reduction(others[row].clone()))
        assert torch.equal(both[row], one.state)
        for name, values in reduction.summarize(both).items():
            torch.testing.assert_close(values[row], one.compute()[name], rtol=0, atol=0, equal_nan=True)


# Refusals


@each_reduction
@pytest.mark.parametrize("change", ["longer", "stacked", "float32"])
def test_a_state_of_another_shape_or_type_is_refused(reduction: type[Reduction], change: str) -> None:
    """A row of a wrong shape or type is refused with the shape that is needed."""
    state = reduction.initial()
    wrong = {"longer": torch.cat((state, state)), "stacked": state[None], "float32": state.float()}[change]
    needed = rf"^{reduction.__name__} needs a float64 state of shape \({reduction.width},\), got torch.float"
    with pytest.raises(ArgumentError, match=needed):
        reduction(wrong)


def test_a_state_dict_of_another_reduction_is_refused() -> None:
    """A saved state of another width is refused, and the state stays as it was."""
    state = reduced(Extrema, torch.arange(3.0))
    with pytest.raises(ArgumentError, match=r"^Extrema needs \(2,\), the saved state has shape \(3,\)$"):
        state.load_state_dict(RunningMoments().state_dict())
    assert state.state.tolist() == [0.0, 2.0]


# Training is not changed


@each_reduction
@each_dtype
def test_the_tensor_stays_as_it_is(reduction: type[Reduction], dtype: torch.dtype) -> None:
    """An update reads the tensor and writes no bit of it."""
    for tensor in examples(dtype):
        before = tensor.clone()
        reduced(reduction, tensor)
        assert torch.equal(tensor, before)


@each_reduction
def test_the_state_takes_no_part_in_autograd(reduction: type[Reduction]) -> None:
    """A tensor with a gradient gives a state without one, also where gradients are on."""
    x = torch.ones(3, requires_grad=True)
    state = reduced(reduction, x * 2)
    assert not state.state.requires_grad
    assert [value.requires_grad for value in state.compute().values()] == [False] * len(state.compute())


@each_reduction
def test_nothing_is_kept_of_the_tensor(reduction: type[Reduction]) -> None:
    """A tensor that was taken in is freed with its last other reference."""
    tensor = torch.ones(3)
    reference = weakref.ref(tensor)
    state = reduced(reduction, tensor)
    del tensor
    gc.collect()
    assert reference() is None
    assert state.state.untyped_storage().nbytes() == 8 * reduction.width


@each_reduction
def test_a_tensor_of_inference_mode_is_taken(reduction: type[Reduction]) -> None:
    """A state that was made outside inference mode takes tensors inside it, and inference tensors outside it."""
    state = reduction()
    with torch.inference_mode():
        tensor = torch.arange(3.0)
        state.update(tensor)
    state.update(tensor)
    state.reset()
    assert torch.equal(state.state, reduction.initial())


# Nothing waits


class NoReading(TorchDispatchMode):
    """Fails on every operation by which a number leaves the device or a shape depends on one."""

    forbidden = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "unique", "is_nonzero", "equal")

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name().partition("::")[2].partition(".")[0]
        if name in self.forbidden:
            raise AssertionError(f"{name} makes a device wait")
        return func(*args, **(kwargs or {}))


def test_the_guard_against_waiting_works() -> None:
    """The mode below fails on a read of one number."""
    with pytest.raises(AssertionError, match="_local_scalar_dense makes a device wait"), NoReading():  # type: ignore[no-untyped-call]  # torch's own constructor
        torch.ones(1).sum().item()


def live(reduction: type[Reduction], device: str, dtype: torch.dtype) -> Reduction:
    """Everything that happens to a state while a model trains."""
    state, other = reduction(device=device), reduction(device=device)
    for tensor in examples(dtype):
        state.update(tensor.to(device))
        other.update(tensor.to(device).reshape(-1))
    state.merge(other)
    state.compute()
    other.reset()
    return state


@each_reduction
@each_dtype
def test_no_operation_depends_on_data(reduction: type[Reduction], dtype: torch.dtype) -> None:
    """Updates, merges and summaries run on meta tensors, which have no data that could be read."""
    state = live(reduction, "meta", dtype).state
    assert (state.shape, state.dtype, state.device.type) == ((reduction.width,), torch.float64, "meta")


@each_reduction
@each_dtype
def test_no_number_is_read(reduction: type[Reduction], dtype: torch.dtype) -> None:
    """Updates, merges and summaries never read a number from the device."""
    with NoReading():  # type: ignore[no-untyped-call]  # torch's own constructor
        live(reduction, "cpu", dtype)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Operations that may vary from run to run raise."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@each_reduction
@each_dtype
@pytest.mark.usefixtures("deterministic")
def test_two_runs_are_equal(reduction: type[Reduction], dtype: torch.dtype) -> None:
    """Under deterministic algorithms nothing raises, and two runs agree to the bit."""
    assert torch.equal(live(reduction, "cpu", dtype).state, live(reduction, "cpu", dtype).state)


# A reduction of one's own


class AbsoluteSum(Reduction):
    """Sum of magnitudes: what the contract asks of a subclass and no more."""

    width = 1

    @classmethod
    @override
    def initial(cls) -> Tensor:
        return torch.zeros(1, dtype=torch.float64)

    @classmethod
    @override
    def update_state(cls, state: Tensor, values: Any) -> None:
        state += finite_or_zero(values.doubles).abs().sum()

    @classmethod
    @override
    def merge_states(cls, state: Tensor, other: Tensor) -> None:
        state += other

    @classmethod
    @override
    def summarize(cls, state: Tensor) -> dict[str, Tensor]:
        return {"absolute_sum": state[..., 0]}


def test_four_methods_make_a_reduction() -> None:
    """A subclass with a width and the four methods has the whole life of a reduction."""
    state = reduced(AbsoluteSum, torch.tensor([-1.0, 2.0, float("inf")]))
    state.merge(reduced(AbsoluteSum, torch.tensor([4])))
    assert float(state.compute()["absolute_sum"]) == 7.0


@pytest.mark.parametrize("make", [Reduction, type("Half", (Reduction,), {"width": 1})])
def test_a_reduction_without_its_methods_cannot_be_made(make: Callable[[], object]) -> None:
    """A class that lacks one of the four methods cannot be instantiated."""
    with pytest.raises(TypeError, match="abstract"):
        make()
