"""Tests of the CPU passes that depend on earlier results, against the passes that run on every device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from lightning_recorder.reductions import Statistics, Values
from lightning_recorder.reductions.kernels.host import add_statistics_on_host
from tests.pairs import pairwise
from tests.reductions.kernels.test_fused import (
    SHAPES,
    SPECIAL,
    assert_equal,
    assert_small_variances_are_kept,
    numbers,
    plain,
)
from tests.reductions.strategies import streams

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
PIECE = 1 << 16


def looking(tensor: Tensor, factor: float = 1.0, sample: int | None = None) -> Tensor:
    """Return the state from the passes on the host, which must accept the tensor."""
    state = Statistics(sample=sample).state
    assert add_statistics_on_host(state, Values(tensor, factor), sample)
    return state


SIZES = [0, 1, 2, PIECE - 1, PIECE, PIECE + 1, 5 * PIECE + 7]
# Float32 values without a factor are read in place.
READ_IN_PLACE = list(product(SIZES, [1.0], [False, True], [torch.float32]))


@pytest.mark.parametrize(
    ("count", "factor", "special", "dtype"),
    dict.fromkeys(READ_IN_PLACE + pairwise(SIZES, [1.0, 1 / 3], [False, True], DTYPES)),
)
def test_host_kernel_equals_the_general_passes(count: int, factor: float, special: bool, dtype: torch.dtype) -> None:
    """For each dtype, factor and size, the host kernel and the general passes give the same state."""
    tensor = numbers(count, dtype, special)
    assert_equal(looking(tensor, factor), plain(tensor, factor))


@settings(max_examples=200)
@given(streams)
def test_any_stream(stream: list[Tensor]) -> None:
    """Any stream of tensors of any types leads to the same state as the general passes."""
    ours, theirs = Statistics().state, Statistics().state
    for tensor in stream:
        assert add_statistics_on_host(ours, Values(tensor), None)
        plain(tensor, state=theirs)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("special", SPECIAL, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_but_one_special_value(dtype: torch.dtype, special: float) -> None:
    """Tensors with only NaN or infinities, zeros or subnormals have correct counts and extrema."""
    tensor = torch.full((1000,), special, dtype=torch.float64).to(dtype)
    assert_equal(looking(tensor), plain(tensor))


SAMPLED = [0, 1, 4096, 4097, PIECE + 1], [1, 100, 4096, 10**6]


@pytest.mark.parametrize(
    ("count", "sample", "dtype"), dict.fromkeys([*product(*SAMPLED, [torch.float32]), *pairwise(*SAMPLED, DTYPES)])
)
def test_a_sample_is_the_same(count: int, sample: int, dtype: torch.dtype) -> None:
    """With a sample both ways count the same values."""
    tensor = numbers(count, dtype, special=True)
    for factor in (1.0, 0.5):
        assert_equal(looking(tensor, factor, sample), plain(tensor, factor, sample=sample))


@pytest.mark.parametrize("sample", [None, 50])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_layout_does_not_matter(shape: Callable[[Tensor], Tensor], sample: int | None) -> None:
    """Transposed, strided, expanded, sliced and empty tensors are read correctly; samples follow the index order."""
    tensor = shape(numbers(10_000, torch.float32, special=True))
    assert_equal(looking(tensor, sample=sample), plain(tensor.clone().contiguous(), sample=sample))


KINDS: dict[str, Callable[[], Tensor]] = {
    "int": lambda: torch.tensor([0, -3, 5]),
    "bool": lambda: torch.tensor([True, False, True]),
    "complex": lambda: torch.tensor([1 + 2j, -3j]),
    "conjugated": lambda: torch.tensor([1 + 2j, -3j]).conj(),
    "negated": lambda: torch.tensor([1 + 2j, -3j]).conj().imag,
    "sparse": lambda: torch.tensor([0.0, 2.0, float("nan")]).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.tensor([0.0, 2.0, -1.0]), 0.5, 10, torch.quint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged),
    "of a graph": lambda: torch.tensor([1.0, float("nan")], requires_grad=True),
}


# Deprecated kinds, which models still use.
@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions", "ignore:.*nested tensors is in prototype")
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_tensors_of_every_kind(make: Callable[[], Tensor]) -> None:
    """Integer, complex, sparse, quantized and nested tensors, and tensors in an autograd graph, are accepted."""
    tensor = make()
    with torch.no_grad():
        assert_equal(looking(tensor), plain(tensor))


def test_a_small_variance_beside_a_large_mean_is_kept() -> None:
    """The variance of 1e4 ± 1e-3 is accurate, whatever value comes first."""
    assert_small_variances_are_kept(looking)


def test_many_equal_squares_beside_a_huge_one_are_kept() -> None:
    """The precision that BLAS loses by adding small numbers to a large one is bounded by the size of a piece."""
    tensor = torch.full((10 * PIECE,), 1e-8, dtype=torch.float64)
    tensor[0] = 1.0
    exact = (1 - tensor.mean()) ** 2 + (len(tensor) - 1) * (1e-8 - tensor.mean()) ** 2
    assert abs(looking(tensor)[2] - exact) <= 1e-12 * exact


@pytest.mark.parametrize(
    "tensor", [torch.ones(3, device="meta"), torch.ones(3).as_subclass(type("Own", (Tensor,), {}))], ids=["meta", "own"]
)
def test_what_has_no_memory_here_is_refused(tensor: Tensor) -> None:
    """A tensor on another device or of an unknown subclass is rejected, and the state does not change."""
    state = Statistics().state
    assert not add_statistics_on_host(state, Values(tensor), None)
    assert torch.equal(state, Statistics().initial())


def test_a_transformed_tensor_is_refused() -> None:
    """A tensor inside a torch.func transform, which has no values to read, is rejected."""
    answers: list[bool] = []

    def see(x: Tensor) -> Tensor:
        answers.append(add_statistics_on_host(Statistics().state, Values(x), None))
        return x

    torch.vmap(see)(torch.ones(2, 3))
    assert answers == [False]


def test_threads_do_not_disturb_each_other() -> None:
    """Two concurrent threads each get the statistics of their own values."""
    tensors = [numbers(3 * PIECE, torch.float32), numbers(3 * PIECE + 5, torch.float32, special=True)]
    found: dict[int, list[Tensor]] = {0: [], 1: []}

    def work(place: int) -> None:
        found[place] += [looking(tensors[place]) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(place,)) for place in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for place, states in found.items():
        assert len(states) == 20
        assert all(torch.equal(state, states[0]) for state in states)
        assert_equal(states[0], plain(tensors[place]))


def test_memory_of_inference_mode_is_not_kept() -> None:
    """A first call in inference mode does not break later recording of the training."""
    seen: list[Tensor] = []

    def work() -> None:  # in a thread without scratch memory
        with torch.inference_mode():
            seen.append(looking(torch.ones(10)))
        seen.append(looking(torch.ones(10)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert torch.equal(*seen)
    assert seen[0][0] == 10
