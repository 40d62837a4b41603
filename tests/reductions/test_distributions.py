"""Tests of the reductions that are off by default: heads, experts, precision, ranks and extrema of channels."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from lightning_recorder.errors import ArgumentError
from lightning_recorder.reductions import (
    ChannelExtrema,
    ChannelMoments,
    ExpertLoad,
    FeatureRank,
    FormatErrors,
    HeadEntropy,
    MassiveValues,
    PrecisionShares,
    Reduction,
    SpectralNorm,
)
from lightning_recorder.reductions.number_formats import MeasuredTensor, measure_formats
from tests.reductions.laws import assert_neutral, assert_nothing_waits, computed, merged, reduced

NAN, INF = math.nan, math.inf


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


CASES: list[tuple[Callable[[], Reduction], tuple[int, ...]]] = [
    (partial(HeadEntropy, logits=True), (2, 3, 4, 5)),
    (partial(ExpertLoad, top_k=2), (6, 4)),
    (partial(PrecisionShares, "float8_e5m2"), (7, 3)),
    (FeatureRank, (6, 3)),
    (partial(FeatureRank, sketch=2), (6, 5)),
    (ChannelExtrema, (4, 6)),
    (partial(ChannelMoments, -1, 2), (4, 6)),
    (partial(FormatErrors, weights=True), (6, 40)),
    (MassiveValues, (2, 4, 6)),
]
each_case = pytest.mark.parametrize(("make", "shape"), CASES)


@each_case
def test_two_updates_are_a_merge_of_two_streams(make: Callable[[], Reduction], shape: tuple[int, ...]) -> None:
    """Updating with two tensors equals merging the states of two streams, and the order of the merge is irrelevant."""
    one, other = random(1, *shape), 3 * random(2, *shape)
    whole, first, second = reduced(make, one, other), reduced(make, one), reduced(make, other)
    for found in merged(make, first, second), merged(make, second, first):
        torch.testing.assert_close(found.state, whole.state, rtol=1e-12, atol=1e-12)


@each_case
def test_an_empty_state_is_neutral(make: Callable[[], Reduction], shape: tuple[int, ...]) -> None:
    """Merging with an empty state changes no bit."""
    assert_neutral(make, random(3, *shape))


@each_case
def test_nothing_waits_for_the_device(make: Callable[[], Reduction], shape: tuple[int, ...]) -> None:
    """An update reads no number back from the device."""
    assert_nothing_waits(make, random(4, *shape))


@each_case
def test_a_state_is_saved_and_loaded(make: Callable[[], Reduction], shape: tuple[int, ...]) -> None:
    """A loaded state gives the same statistics."""
    saved, loaded = reduced(make, random(5, *shape)), make()
    loaded.load_state_dict(saved.state_dict())
    assert torch.equal(loaded.state, saved.state)


# Heads


def test_entropies_of_heads_by_hand() -> None:
    """One head attends to one key, the other to two of four; a masked row with NaN does not count."""
    weights = torch.tensor([[[[1.0, 0, 0, 0]], [[0.5, 0.5, 0, 0]]], [[[0, 0, 1.0, 0]], [[NAN, NAN, NAN, NAN]]]])
    assert computed(HeadEntropy, weights) == {"head_entropy": [0.0, pytest.approx(math.log(2))], "head_max": [1.0, 0.5]}


def test_weights_after_dropout_are_a_distribution() -> None:
    """The weights that dropout leaves are divided by their sum, and a row without any does not count."""
    weights = torch.tensor([[[[2.0, 0, 0, 0]], [[0.5, 0.5, 0, 0]], [[0, 0, 0, 0]]]])
    found = computed(HeadEntropy, weights)
    assert found["head_entropy"][:2] == [0.0, pytest.approx(math.log(2))]
    assert found["head_max"][:2] == [1.0, 0.5]
    assert all(math.isnan(each[2]) for each in found.values())


def test_other_tensors_have_no_entropy() -> None:
    """Rows with negative numbers are no attention weights."""
    found = computed(HeadEntropy, random(7, 2, 3, 4, 50))
    assert all(math.isnan(each) for values in found.values() for each in values)


def test_entropies_of_logits_are_those_of_the_softmax() -> None:
    """Entropies are those of ``torch.distributions``, and the largest logit is that of each head, without masks."""
    logits = 3 * random(6, 2, 3, 4, 5)
    logits[:, :, 0, 3:] = -INF
    found = reduced(partial(HeadEntropy, logits=True), logits[:1], logits[1:]).compute()
    expected = torch.distributions.Categorical(logits=logits).entropy().mean((0, 2))
    torch.testing.assert_close(found["head_entropy"], expected, rtol=1e-12, atol=0)
    assert torch.equal(found["head_max"], logits.amax((0, 2, 3)))


def test_the_keys_are_no_heads() -> None:
    """The last dimension cannot be that of the heads."""
    with pytest.raises(ArgumentError, match="choose another dim"):
        HeadEntropy(dim=-1).update(torch.ones(2, 3))


# Experts


def test_a_balanced_router_has_an_imbalance_of_one() -> None:
    """Equal choices and equal probabilities give 1; one expert for all gives the number of experts."""
    balanced = torch.tensor([[0.5, 0.5], [0.5, 0.5]]) + torch.tensor([[0.1, -0.1], [-0.1, 0.1]])
    found = reduced(partial(ExpertLoad, logits=False), balanced).compute()
    assert found["expert_load"].tolist() == [0.5, 0.5]
    assert found["expert_probability"].tolist() == pytest.approx([0.5, 0.5])
    assert float(found["load_imbalance"]) == pytest.approx(1.0)
    assert float(found["router_entropy"]) == pytest.approx(-0.6 * math.log(0.6) - 0.4 * math.log(0.4))
    collapsed = reduced(partial(ExpertLoad, logits=False), torch.tensor([[1.0, 0.0, 0.0]] * 4)).compute()
    assert (float(collapsed["load_imbalance"]), float(collapsed["router_entropy"])) == (3.0, 0.0)


def test_loads_are_those_of_the_largest_logits() -> None:
    """With two choices for each token, loads are the shares of ``topk``; tokens with NaN do not count."""
    logits = random(7, 2, 30, 5)
    spoilt = logits.clone()
    spoilt[0, :3, 1] = NAN
    known = torch.cat([logits[0, 3:], logits[1]])
    found = reduced(partial(ExpertLoad, top_k=2), spoilt).compute()
    counts = torch.bincount(known.topk(2).indices.flatten(), minlength=5)
    assert torch.equal(found["expert_load"], counts.double() / (2 * len(known)))
    torch.testing.assert_close(found["expert_probability"], known.softmax(-1).mean(0))
    assert float(found["router_entropy"]) == pytest.approx(
        float(torch.distributions.Categorical(logits=known).entropy().mean())
    )


@pytest.mark.parametrize("top_k", [0, 1.5])
def test_a_number_of_choices_is_a_positive_integer(top_k: float) -> None:
    """Another number raises, and so does a router with fewer experts."""
    with pytest.raises(ArgumentError, match="top_k"):
        ExpertLoad(top_k=top_k)  # type: ignore[arg-type]  # the point of the test
    with pytest.raises(ArgumentError, match="cannot choose 3 of 2"):
        ExpertLoad(top_k=3).update(torch.ones(4, 2))


# Precision


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"])
def test_shares_are_those_of_a_conversion(dtype: str) -> None:
    """Values that underflow become zero in torch, subnormal ones lie between, and overflow exceeds the largest."""
    format_ = getattr(torch, dtype)
    limits = torch.finfo(format_)
    low, high = math.log2(limits.smallest_normal), math.log2(limits.max)
    generator = torch.Generator().manual_seed(8)
    exponents = (low - 14) + (high - low + 18) * torch.rand(4000, generator=generator, dtype=torch.float64)
    exponents = exponents.clamp(-1000, 1000)
    values = torch.cat([2**exponents, torch.tensor([0.0, NAN, INF], dtype=torch.float64)])
    found = {name: float(value) for name, value in reduced(partial(PrecisionShares, dtype), values).compute().items()}
    sizes = values[:-3]
    inside = sizes[(sizes <= limits.max) & (sizes < 3e38) & (sizes > 1e-44)]
    zero = int((inside.float().to(format_).float() == 0).sum()) + int((sizes <= 1e-44).sum())
    subnormal = int((sizes < limits.smallest_normal).sum()) - zero
    over = int((sizes > limits.max).sum())
    expected = {"underflow": zero, "subnormal": subnormal, "overflow": over}
    assert found == {f"{dtype}_{name}": count / len(sizes) for name, count in expected.items()}


def test_a_scale_moves_values_into_the_range() -> None:
    """With a loss scale of 2**16, a gradient of 2**-26 is a normal float16."""
    values = torch.tensor([2.0**-26])
    assert computed(PrecisionShares, values)["float16_underflow"] == [1.0]
    scaled = computed(partial(PrecisionShares, scale=2.0**16), values)
    assert scaled == {"float16_underflow": [0.0], "float16_subnormal": [0.0], "float16_overflow": [0.0]}


@pytest.mark.parametrize("arguments", [{"dtype": "float4"}, {"scale": 0}, {"scale": "big"}])
def test_wrong_formats_raise(arguments: dict[str, object]) -> None:
    """An unknown format and a scale that is no positive number raise."""
    with pytest.raises(ArgumentError, match=next(iter(arguments))):
        PrecisionShares(**arguments)  # type: ignore[arg-type]  # the point of the test


# Ranks


def test_ranks_of_a_diagonal_matrix() -> None:
    """Singular values 3 and 1 give a stable rank of 10 / 9, and the entropy of the shares 3/4 and 1/4."""
    matrix = torch.diag(torch.tensor([3.0, 1.0]))
    found = reduced(FeatureRank, matrix[:1], matrix[1:]).compute()
    assert float(found["stable_rank"]) == pytest.approx(10 / 9)
    assert float(found["effective_rank"]) == pytest.approx(math.exp(-0.75 * math.log(0.75) - 0.25 * math.log(0.25)))


def test_ranks_are_those_of_the_singular_values() -> None:
    """The ranks of an image's channels are those of an SVD of all pixels of all batches."""
    batches = [random(seed, 2, 5, 3, 3) @ torch.diag(torch.tensor([1.0, 2.0, 3.0]).double()) for seed in (9, 10)]
    found = reduced(partial(FeatureRank, dim=1), *batches).compute()
    rows = torch.cat([batch.movedim(1, -1).reshape(-1, 5) for batch in batches])
    sizes = torch.linalg.svdvals(rows)
    shares = sizes / sizes.sum()
    assert float(found["stable_rank"]) == pytest.approx(float(sizes.square().sum() / sizes[0] ** 2), rel=1e-9)
    assert float(found["effective_rank"]) == pytest.approx(float((-shares * shares.log()).sum().exp()), rel=1e-9)


def test_a_sketch_tells_few_directions_from_many() -> None:
    """A stream of rank 2 with 512 features has ranks of at most 2, and random vectors fill most of the sketch."""
    make = partial(FeatureRank, sketch=32)
    narrow = reduced(make, random(11, 200, 2) @ random(12, 2, 512)).compute()
    wide = reduced(make, random(13, 2000, 512)).compute()
    assert float(narrow["effective_rank"]) < 2 + 1e-6
    assert float(wide["effective_rank"]) > 24


# Channels


def test_extrema_of_channels_by_hand() -> None:
    """Values that are not finite are ignored; a channel without a finite value has NaN."""
    found = computed(ChannelExtrema, torch.tensor([[1.0, -5.0, NAN], [3.0, INF, NAN]]), torch.tensor([[2.0, 4.0, INF]]))
    assert found["channel_min"][:2] == [1.0, -5.0]
    assert found["channel_max"][:2] == [3.0, 4.0]
    assert found["channel_abs_max"][:2] == [3.0, 5.0]
    assert all(math.isnan(values[2]) for values in found.values())


@pytest.mark.parametrize("kind", [ChannelMoments, ChannelExtrema])
def test_groups_are_the_heads_of_a_projection(kind: Callable[..., Reduction]) -> None:
    """Groups of neighboring channels give what a tensor with a dimension of heads gives."""
    x = random(14, 4, 7, 6)
    grouped = reduced(partial(kind, -1, 3), x).compute()
    heads = reduced(partial(kind, -2), x.unflatten(-1, (3, 2))).compute()
    for name, value in grouped.items():
        torch.testing.assert_close(value, heads[name], rtol=1e-12, atol=0)


def test_groups_divide_the_channels() -> None:
    """A number of groups that does not divide the channels raises."""
    with pytest.raises(ArgumentError, match="6 channels cannot be divided into 4"):
        ChannelMoments(-1, 4).update(torch.ones(2, 6))
    with pytest.raises(ArgumentError, match="groups"):
        ChannelExtrema(1, 0)


def matrix_with(sizes: list[float], rows: int = 12) -> Tensor:
    """Return a matrix with these singular values."""
    left, right = (torch.linalg.qr(random(seed, rows if seed else len(sizes), len(sizes)))[0] for seed in (1, 0))
    matrix: Tensor = left @ torch.tensor(sizes, dtype=torch.float64).diag() @ right.T
    return matrix


def test_the_spectral_norm_grows_to_the_true_one() -> None:
    """The iteration goes on from record to record until the norm is exact, although all singular values are near."""
    sizes = [1.0, *(0.995 - 0.005 * place for place in range(95))]
    norm, weight = SpectralNorm(), matrix_with(sizes, rows=96)
    found = []
    for _ in range(12):
        norm.update(weight)
        found.append(norm.compute())
        norm.restart(norm.state)
    norms = [float(each["spectral_norm"]) for each in found]
    assert norms[0] < 0.995 < norms[1] < 0.99995 < norms[-1]
    assert norms[-1] == pytest.approx(1.0, abs=1e-5)
    assert float(found[-1]["orthogonality"]) == pytest.approx(sum(each**2 for each in sizes) / 96, abs=1e-4)
    assert norm.compute()["spectral_norm"].isnan()


@pytest.mark.parametrize("scale", [1.0, 1e-25])
def test_the_norm_of_a_matrix_that_has_just_changed(scale: float) -> None:
    """A gradient that has nothing in common with the one before is right within 3 %, also if it is tiny."""
    norm = SpectralNorm()
    for seed in range(6):
        gradient = scale * random(seed, 64, 4) @ random(seed + 10, 4, 192) + 0.1 * scale * random(seed + 20, 64, 192)
        norm.update(gradient)
        exact = float(torch.linalg.matrix_norm(gradient, ord=2))
        assert 0.97 * exact < float(norm.compute()["spectral_norm"]) < (1 + 1e-6) * exact
        norm.restart(norm.state)


def test_a_matrix_of_zeros_has_no_spectral_norm() -> None:
    """Its norm is zero and its orthogonality is unknown, and the next matrix is right."""
    norm = SpectralNorm()
    norm.update(torch.zeros(8, 6))
    assert float(norm.compute()["spectral_norm"]) == 0
    assert norm.compute()["orthogonality"].isnan()
    norm.restart(norm.state)
    norm.update(matrix_with([3.0, 1.0, 0.0, 0.0, 0.0, 0.0], rows=8))
    assert float(norm.compute()["spectral_norm"]) == pytest.approx(3.0, rel=1e-5)


@pytest.mark.parametrize(("sizes", "orthogonality"), [([2.0] * 4, 1.0), ([3.0, 0.0, 0.0, 0.0], 0.25)])
def test_orthogonality(sizes: list[float], orthogonality: float) -> None:
    """Equal singular values have an orthogonality of 1, and a matrix of rank one has 1 / min(rows, columns)."""
    found = reduced(SpectralNorm, matrix_with(sizes)).compute()
    assert float(found["spectral_norm"]) == pytest.approx(sizes[0], rel=1e-5)
    assert float(found["orthogonality"]) == pytest.approx(orthogonality, rel=1e-5)


def test_the_last_matrix_counts() -> None:
    """The last of several matrices counts, also after a merge, and the first of several ranks."""
    one, other = matrix_with([2.0, 1.0]), matrix_with([5.0, 1.0])
    first, second = reduced(SpectralNorm, one), reduced(SpectralNorm, other)
    assert float(reduced(SpectralNorm, one, other).compute()["spectral_norm"]) == pytest.approx(5.0, rel=1e-3)
    assert float(merged(SpectralNorm, first, second).compute()["spectral_norm"]) == pytest.approx(5.0, rel=1e-2)
    state = first.state.clone()
    first.merge_ranks(state, second.state)
    assert torch.equal(state, first.state)


def test_format_errors_are_those_of_the_command() -> None:
    """The errors of a record are those that the command measures for the same weight, and for the same activation."""
    for shape, is_weight in (((24, 96), True), ((2, 12, 96), False), ((2, 6, 4, 4), False)):
        tensor = random(3, *shape).float() ** 3
        found = reduced(partial(FormatErrors, weights=is_weight), tensor).compute()
        direct = measure_formats(tensor, is_weight=is_weight)
        assert isinstance(direct, MeasuredTensor)
        for name, error in direct.errors.items():
            own = [float(found[f"{name}_{what}"]) for what in ("snr", "clipped", "flushed")]
            assert own == pytest.approx([error.snr, error.clipped, error.flushed], rel=1e-9)


def test_format_errors_of_a_sample_are_close_to_those_of_all_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample of a large tensor gives ratios within 1 dB and shares within 0.03, also with few massive values."""
    rows, columns = 600, 512
    normal = random(3, rows, columns).float()
    massive = normal * normal[:1].exp()
    massive[3, 100], massive[400, 5] = 3000.0, -2500.0
    cases = {
        "normal": (normal, False),
        "massive": (massive, False),
        "channels": (normal * normal[:, :1].exp(), True),
        "mostly zero": (normal * (normal[:, :1] > 1.5), True),
        "odd width": (normal[:, :141].contiguous() ** 3, True),
        "narrow": (normal.reshape(-1, 10), False),
    }
    for name, (tensor, is_weight) in cases.items():
        kind = partial(FormatErrors, weights=is_weight)
        found, again = (reduced(kind, tensor).compute() for _ in range(2))
        with monkeypatch.context() as patch:
            patch.setattr("lightning_recorder.reductions.number_formats._SAMPLED", tensor.numel())
            whole = reduced(kind, tensor).compute()
        for statistic, value in found.items():
            assert float(value) == float(again[statistic])
            tolerance = 1.0 if statistic.endswith("_snr") else 0.03
            assert float(value) == pytest.approx(float(whole[statistic]), abs=tolerance), (name, statistic)


def test_vectors_have_no_format_errors_and_no_massive_values() -> None:
    """A vector is left out, and NaN and infinity count as zero."""
    for make in (FormatErrors, MassiveValues):
        assert all(each.isnan() for each in reduced(make, random(0, 7)).compute().values())
    tensor = torch.ones(1, 3, 4)
    tensor[0, 1, 2], tensor[0, 0, 0] = 9.0, INF
    assert [float(each) for each in reduced(MassiveValues, tensor).compute().values()] == [9.0, 9.0, 2.0, 1.0]


def test_the_place_of_a_massive_value_in_an_image() -> None:
    """The token of an image is its position in row order, and its channel the second dimension."""
    image = torch.ones(2, 3, 4, 5)
    image[1, 2, 3, 1] = -30.0
    assert [float(each) for each in reduced(MassiveValues, image).compute().values()] == [30.0, 30.0, 2.0, 16.0]
