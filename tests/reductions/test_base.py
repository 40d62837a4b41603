"""Tests of the contract that every reduction satisfies."""

from __future__ import annotations

import gc
import io
import math
import weakref
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_recorder.errors import ArgumentError
from lightning_recorder.reductions import (
    BatchMax,
    BatchMean,
    BatchMin,
    BatchSum,
    Change,
    ChannelMoments,
    Combined,
    DeadChannels,
    ExponentHistogram,
    Extrema,
    HigherMoments,
    LastValue,
    NearZero,
    Norms,
    Reduction,
    Reservoir,
    RunningMoments,
    Saturation,
    Statistics,
    Tallies,
    Values,
    statistics,
)
from tests.reductions.reference import Moments, values_of
from tests.reductions.strategies import DTYPES, streams

Make = Callable[[], Reduction]

# For these reductions the order, the shapes and the splitting of the tensors do not matter.
OF_VALUES: dict[str, Make] = {
    "RunningMoments": RunningMoments,
    "RunningMoments, corrected": lambda: RunningMoments(correction=1),
    "Extrema": Extrema,
    "Tallies": Tallies,
    "ExponentHistogram": ExponentHistogram,
    "ExponentHistogram, quantiles": lambda: ExponentHistogram(quantiles=[0.1, 0.5]),
    "Norms": Norms,
    "NearZero": NearZero,
    "Saturation": lambda: Saturation(0.9),
    "Statistics": Statistics,
    "Combined": lambda: Combined([Tallies(), ExponentHistogram(), Extrema()]),
}
OTHERS: dict[str, Make] = {
    "HigherMoments": HigherMoments,
    "sampled": lambda: ExponentHistogram(sample=2),
    "Statistics, sampled": lambda: Statistics(sample=2, quantiles=[0.5]),
    "ChannelMoments": lambda: ChannelMoments(dim=-1),
    "DeadChannels": lambda: DeadChannels(dim=-1),
    "BatchSum": BatchSum,
    "BatchMean": BatchMean,
    "BatchMin": BatchMin,
    "BatchMax": BatchMax,
    "LastValue": LastValue,
    "Change": Change,
    "Reservoir": lambda: Reservoir(4),
    "Combined with shapes": lambda: Combined([BatchMean(), Statistics(), Change(), Norms()]),
}
ALL = OF_VALUES | OTHERS
each_of_values = pytest.mark.parametrize("make", OF_VALUES.values(), ids=OF_VALUES)
each_reduction = pytest.mark.parametrize("make", ALL.values(), ids=ALL)
thorough = settings(max_examples=40)


def reduced(make: Make, *tensors: Tensor) -> Reduction:
    """Return a reduction that was updated with the tensors."""
    result = make()
    for tensor in tensors:
        result.update(tensor)
    return result


def merged(*parts: Reduction) -> Reduction:
    """Return the merge of copies of the parts, from the left."""
    result = parts[0].on(parts[0].state.clone())
    for part in parts[1:]:
        result.merge(part)
    return result


def as_doubles(tensor: Tensor) -> Tensor:
    """Return the real numbers of a tensor with the bits of each NaN, which Python floats would lose."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.flatten().double()


def nan_joined(state: Tensor) -> Tensor:
    """Return a state that ends with a histogram, with the NaN bins of each sign merged into one.

    There are three such bins, which depend on the mantissa of the NaN. Depending on the processor, torch gives a
    half-precision NaN different mantissa bits if it widens one value or many at a time.
    """
    joined = state.clone()
    for first in (1021, 2045):
        bins = joined[len(state) - 2048 + first :][:3]
        bins.copy_(torch.tensor([float(bins.sum()), 0, 0]))
    return joined


def assert_same_stream(one: Reduction, other: Reduction, tensors: list[Tensor]) -> None:
    """Assert that two states of one stream are bitwise equal, except for rounding of mean and squared deviations."""
    last = one.parts[-1] if type(one) is Combined else one
    if isinstance(last, ExponentHistogram) and last.sample is None:
        assert torch.equal(nan_joined(one.state), nan_joined(other.state))
    elif isinstance(one, (RunningMoments, Statistics)):
        for each in (one, other):
            Moments.of(values_of(tensors)).assert_near(each.compute(), getattr(one, "correction", 0))
        exact = [0, *range(3, one.width)]
        states = [nan_joined(each.state) if isinstance(each, Statistics) else each.state for each in (one, other)]
        assert torch.equal(states[0][exact], states[1][exact])
    elif isinstance(one, Norms):
        assert torch.equal(one.state[0], other.state[0])
        torch.testing.assert_close(one.state, other.state, rtol=1e-12, atol=0)
    else:
        assert torch.equal(one.state, other.state)


MATRIX = torch.arange(12.0).reshape(3, 4)


def assert_bits(one: Tensor, other: Tensor) -> None:
    """Assert that two tensors are equal; NaN equals NaN."""
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def examples(dtype: torch.dtype) -> list[Tensor]:
    """Return a matrix, a 0-d tensor and an empty tensor of a type."""
    return [torch.arange(12).reshape(3, 4).to(dtype), torch.tensor(1).to(dtype), torch.zeros(0, 2).to(dtype)]


# Laws


# A test of all reductions draws its streams once, which takes longer than to reduce them.


@thorough
@example(stream=[torch.tensor(math.nan, dtype=torch.float16)])
@given(stream=streams)
def test_splitting_a_stream_changes_nothing(stream: list[Tensor]) -> None:
    """Separate updates, a merge of one state per part and a single update with everything agree."""
    whole = torch.cat([torch.zeros(0).double(), *map(as_doubles, stream)])
    for make in OF_VALUES.values():
        together = reduced(make, whole)
        assert_same_stream(reduced(make, *stream), together, stream)
        assert_same_stream(merged(make(), *(reduced(make, part) for part in stream)), together, stream)


@thorough
@given(first=streams, second=streams, third=streams)
def test_merging_is_associative_and_commutative(first: list[Tensor], second: list[Tensor], third: list[Tensor]) -> None:
    """The order and the grouping of merges do not matter."""
    everything = [*first, *second, *third]
    for make in OF_VALUES.values():
        a, b, c = (reduced(make, *stream) for stream in (first, second, third))
        left = merged(merged(a, b), c)
        assert_same_stream(left, merged(a, merged(b, c)), everything)
        assert_same_stream(left, merged(c, b, a), everything)


@thorough
@given(stream=streams)
def test_the_initial_state_is_neutral(stream: list[Tensor]) -> None:
    """Merging with an empty state from either side changes no bit."""
    for make in OF_VALUES.values():
        state = reduced(make, *stream)
        assert torch.equal(merged(state, make()).state, state.state)
        assert torch.equal(merged(make(), state).state, state.state)


@each_of_values
def test_an_empty_tensor_changes_nothing(make: Make) -> None:
    """Updating with an empty tensor does not change the state."""
    empty = torch.zeros(0, 3)
    assert torch.equal(reduced(make, empty).state, make().initial())
    ones = torch.ones(3)
    assert torch.equal(reduced(make, ones, empty).state, reduced(make, ones).state)


@each_reduction
def test_an_empty_stream_is_neutral(make: Make) -> None:
    """Merging with a reduction without data from either side changes no bit."""
    state = reduced(make, MATRIX, MATRIX + 1)
    right = reduced(make, MATRIX, MATRIX + 1)
    right.merge(make())
    left = make()
    left.merge(state)
    assert torch.equal(right.state, state.state)
    assert torch.equal(left.state.nan_to_num(nan=7.5), state.state.nan_to_num(nan=7.5))


# The choice of a reservoir depends on the number of earlier values; it has tests of its own.
DETERMINATE = {name: make for name, make in ALL.items() if name != "Reservoir"}


@pytest.mark.parametrize("make", DETERMINATE.values(), ids=DETERMINATE)
def test_merging_in_order_is_one_stream(make: Make) -> None:
    """Merging two parts of a stream in order gives the statistics of the whole stream within 1e-12."""
    tensors = [MATRIX, MATRIX * 2 - 3, -MATRIX]
    whole = reduced(make, *tensors).compute()
    for cut in (1, 2):
        parts = reduced(make, *tensors[:cut]), reduced(make, *tensors[cut:])
        parts[0].merge(parts[1])
        for name, value in parts[0].compute().items():
            torch.testing.assert_close(value, whole[name], rtol=1e-12, atol=1e-12)


def test_other_settings_are_not_merged() -> None:
    """Reductions of different kinds or settings are not merged, and the error shows both."""
    with pytest.raises(ArgumentError, match=r"NearZero\(threshold=1e-06\) cannot be merged with NearZero\(threshold=1"):
        NearZero().merge(NearZero(1))
    with pytest.raises(ArgumentError, match=r"Extrema\(\) cannot be merged with Tallies\(\): both must have the same"):
        Extrema().merge(Tallies())  # type: ignore[arg-type]
    first, second = Combined([Extrema(), NearZero()]), Combined([Extrema(), NearZero(1)])
    with pytest.raises(ArgumentError, match="cannot be merged"):
        first.merge(second)
    first.merge(Combined([Extrema(), NearZero()]))


@each_reduction
def test_merging_leaves_the_other_as_it_is(make: Make) -> None:
    """A merge does not change the other state."""
    other = reduced(make, MATRIX)
    before = other.state.clone()
    reduced(make, MATRIX + 1).merge(other)
    assert_bits(other.state, before)


# Life cycle


@each_reduction
def test_a_state_dict_continues_the_stream(make: Make) -> None:
    """A state that is saved to a file and loaded with weights_only continues bitwise identically."""
    first, second = MATRIX, torch.where(MATRIX > 3, MATRIX, float("nan"))
    file = io.BytesIO()
    torch.save(reduced(make, first).state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    used = reduced(make, torch.full_like(MATRIX, 3.0))
    expected = reduced(make, first, second)
    for restored in (make(), used):
        restored.load_state_dict(saved)
        restored.update(second)
        assert_bits(restored.state, expected.state)
        assert restored.settings == expected.settings


@each_reduction
def test_an_empty_state_dict_is_an_empty_stream(make: Make) -> None:
    """The state of an empty stream can be saved, and loading it discards earlier data."""
    for restored in (make(), reduced(make, MATRIX)):
        restored.load_state_dict(make().state_dict())
        restored.update(MATRIX)
        assert_bits(restored.state, reduced(make, MATRIX).state)


@each_reduction
def test_a_state_dict_is_a_snapshot(make: Make) -> None:
    """A state dict is a snapshot that later updates do not change."""
    state = reduced(make, MATRIX)
    snapshot = state.state_dict()
    before = {name: value.clone() for name, value in snapshot.items()}
    state.update(MATRIX * 3)
    assert snapshot.keys() == before.keys()
    for name, value in snapshot.items():
        assert_bits(value, before[name])


@each_reduction
def test_reset_forgets(make: Make) -> None:
    """A reset restores the initial state in the same memory."""
    state = reduced(make, MATRIX)
    memory = state.state.data_ptr()
    state.reset()
    assert_bits(state.state, state.initial())
    assert state.state.data_ptr() == memory


@each_reduction
def test_computing_changes_nothing(make: Make) -> None:
    """Computing does not change the state, so it can be repeated."""
    state = reduced(make, MATRIX)
    before = state.state.clone()
    first, second = state.compute(), state.compute()
    assert list(first) == list(second) == list(state.statistics)
    for name, value in first.items():
        assert_bits(value, second[name])
    assert_bits(state.state, before)


@each_reduction
def test_a_given_row_is_worked_on_in_place(make: Make) -> None:
    """A row of a larger block is updated in place, and its neighbors are not changed."""
    sized = make().sized_for(Values(MATRIX))
    block = sized.initial().repeat(3, 1)
    sized.on(block[1]).update(MATRIX)
    assert_bits(block[1], reduced(make, MATRIX).state)
    assert_bits(block[0], sized.initial())
    assert_bits(block[2], sized.initial())


@each_reduction
def test_rows_are_summarized_and_merged_together_as_one_by_one(make: Make) -> None:
    """Merging and summarizing a block of states gives the same results as row by row."""
    sized = make().sized_for(Values(MATRIX))
    rows = [[MATRIX], [], [torch.where(MATRIX > 3, MATRIX, float("nan"))], [torch.zeros_like(MATRIX), MATRIX + 1]]
    block = torch.stack([reduced(lambda: sized.on(sized.initial()), *row).state for row in rows])
    others = block.flip(0).clone()
    both = block.clone()
    sized.merge_states(both, others)
    summary = sized.summarize(both)
    for row in range(len(rows)):
        one = sized.on(block[row].clone())
        one.merge(sized.on(others[row].clone()))
        assert_bits(both[row], one.state)
        for name, value in one.compute().items():
            assert_bits(summary[name][row], value)


@each_reduction
def test_what_is_left_to_be_merged_is_merged_right(make: Make) -> None:
    """Merging the deferred part of an update into the first words gives the state of a full update."""
    sized = make().sized_for(Values(MATRIX))
    state = sized.initial()
    for tensor in (MATRIX, MATRIX - 5):
        rest = sized.update_deferred(state, Values(tensor))
        assert (rest is None) == (sized.partial is None or isinstance(sized, Statistics))
        if rest is not None and sized.partial is not None:
            assert rest.shape == (sized.partial.width,)
            sized.partial.merge_states(state[: sized.partial.width], rest)
    assert_bits(state, reduced(make, MATRIX, MATRIX - 5).state)


@each_reduction
def test_beginning_anew_in_several_rows(make: Make) -> None:
    """Rows that start a new stream are empty, except for what a reduction carries over for comparison."""
    sized = make().sized_for(Values(MATRIX))
    rows = torch.stack([reduced(make, MATRIX).state, sized.initial()])
    sized.restart(rows)
    assert_bits(rows[1], sized.initial())
    assert all(
        value.isnan().all() or not value.any()
        for name, value in sized.summarize(rows[0]).items()
        if name != "histogram_fraction"
    )


@each_reduction
def test_it_prints_its_settings(make: Make) -> None:
    """The repr shows the class and the settings, and the size in bytes if the state depends on the shape."""
    text = repr(reduced(make, MATRIX))
    assert text.startswith(type(make()).__name__ + "(")
    assert ("bytes" in text) == (not make().width)


# Rejected arguments


@each_reduction
@pytest.mark.parametrize("change", ["longer", "stacked", "float32"])
def test_a_state_of_another_shape_or_type_is_refused(make: Make, change: str) -> None:
    """A row of a wrong shape or dtype is rejected with an error that names the required shape."""
    sized = make().sized_for(Values(MATRIX))
    state = sized.initial()
    wrong = {"longer": torch.cat((state, state)), "stacked": state[None], "float32": state.float()}[change]
    needed = rf"^{type(sized).__name__} needs a float64 state of shape \({sized.width},\), got torch.float"
    with pytest.raises(ArgumentError, match=needed):
        sized.on(wrong)


def test_a_state_dict_of_another_reduction_is_refused() -> None:
    """A saved state of another width is rejected, and the state does not change."""
    state = reduced(Extrema, torch.arange(3.0))
    with pytest.raises(ArgumentError, match=r"^Extrema needs \(2,\), the saved state has shape \(3,\)$"):
        state.load_state_dict(RunningMoments().state_dict())
    assert state.state.tolist() == [0.0, 2.0]


# Training is not affected


@each_reduction
def test_the_tensor_stays_as_it_is(make: Make) -> None:
    """An update does not modify the tensor."""
    for tensor in chain.from_iterable(map(examples, DTYPES)):
        before = tensor.clone()
        if tensor.dim() or make().width:
            reduced(make, tensor)
        assert torch.equal(tensor, before), tensor.dtype


@each_reduction
def test_the_state_takes_no_part_in_autograd(make: Make) -> None:
    """A tensor that requires a gradient leads to a state without one, even with gradients enabled."""
    x = torch.ones(3, 4, requires_grad=True)
    state = reduced(make, x * 2)
    assert not state.state.requires_grad
    assert [value.requires_grad for value in state.compute().values()] == [False] * len(state.compute())


def test_nothing_is_kept_of_the_tensor() -> None:
    """An update keeps no reference to the tensor."""
    states, tensors = {}, {}
    for name, make in ALL.items():
        tensor = torch.ones(3, 4)
        tensors[name] = weakref.ref(tensor)
        states[name] = reduced(make, tensor)
        del tensor
    gc.collect()
    assert [name for name, tensor in tensors.items() if tensor() is not None] == []
    for state in states.values():
        assert state.state.untyped_storage().nbytes() == state.nbytes == 8 * state.width


@each_reduction
def test_a_tensor_of_inference_mode_is_recorded(make: Make) -> None:
    """A state works with tensors inside and outside inference mode, wherever it was created."""
    state = make()
    with torch.inference_mode():
        tensor = MATRIX.clone()
        state.update(tensor)
    state.update(tensor)
    state.reset()
    assert_bits(state.state, state.initial())


# No synchronization


class NoReading(TorchDispatchMode):
    """A mode that fails on every operation that reads a number from the device or has a data-dependent shape."""

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
    """The mode fails when a single number is read."""
    with pytest.raises(AssertionError, match="_local_scalar_dense makes a device wait"), NoReading():  # type: ignore[no-untyped-call]  # the constructor of torch is untyped
        torch.ones(1).sum().item()


def live(make: Make, device: str, dtype: torch.dtype) -> Reduction:
    """Run all operations that a state undergoes while a model trains."""
    state, other = make(), make()
    examined = examples(dtype) if make().width else examples(dtype)[:1] * 2
    for tensor in examined:
        state.update(tensor.to(device))
        other.update(tensor.to(device).clone())
    state.merge(other)
    state.compute()
    other.restart(other.state)
    state.state_dict()
    return state


@each_reduction
def test_no_operation_depends_on_data(make: Make) -> None:
    """Updates, merges and summaries run on meta tensors, which have no data to read."""
    # Each kind of type, since without data the steps of an operation take as long as with many values.
    for dtype in (torch.float16, torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64):
        state = live(make, "meta", dtype)
        assert (state.state.shape, state.state.dtype) == ((state.width,), torch.float64), dtype
        assert state.state.device.type == "meta", dtype


@each_reduction
def test_no_number_is_read(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates, merges and summaries read no number on the code path of a GPU."""
    monkeypatch.setattr(statistics, "_QUICK", ())
    with NoReading():  # type: ignore[no-untyped-call]  # the constructor of torch is untyped
        for dtype in DTYPES:
            live(make, "cpu", dtype)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Make nondeterministic operations raise."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@each_reduction
@pytest.mark.usefixtures("deterministic")
def test_two_runs_are_equal(make: Make) -> None:
    """With deterministic algorithms nothing raises, and two runs are bitwise equal."""
    for dtype in DTYPES:
        assert torch.equal(live(make, "cpu", dtype).state, live(make, "cpu", dtype).state), dtype


# A user-defined reduction


class AbsoluteSum(Reduction):
    """Sum of magnitudes: a minimal subclass that satisfies the contract."""

    width = 1
    statistics = ("absolute_sum",)

    @override
    def update_state(self, state: Tensor, values: Values) -> None:
        state += values.doubles.abs().sum()

    @override
    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        return {"absolute_sum": state[..., 0]}


def test_two_methods_make_a_reduction() -> None:
    """A subclass with a width, a name and two methods supports the whole life cycle of a reduction."""
    state = reduced(AbsoluteSum, torch.tensor([-1.0, 2.0, float("inf")]))
    state.merge(reduced(AbsoluteSum, torch.tensor([4])))
    assert float(state.compute()["absolute_sum"]) == 7.0
    assert state.additive_slots().tolist() == [True]
    other = AbsoluteSum()
    other.load_state_dict(state.state_dict())
    assert other.state.tolist() == [7.0]


@pytest.mark.parametrize("make", [Reduction, type("Half", (Reduction,), {"width": 1})])
def test_a_reduction_without_its_methods_cannot_be_made(make: Callable[[], object]) -> None:
    """A class without one of the two methods cannot be instantiated."""
    with pytest.raises(TypeError, match="abstract"):
        make()


def test_a_state_moves_to_the_device_of_the_tensors() -> None:
    """A state moves to the device of the tensors and continues there."""
    state = reduced(Statistics, torch.ones(3))
    state.update(torch.ones(2, device="meta"))
    assert state.state.device.type == "meta"
