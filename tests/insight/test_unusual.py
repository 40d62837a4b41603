"""Tests of the ranking of sites by how unusual they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_recorder.insight.unusual import choose, known_median, standing_out, unusualness

PARTS = ("norm", "attn.qkv", "attn.proj", "mlp.fc1", "mlp.act", "mlp.fc2")


def blocks(depth: int = 24, steps: int = 6, seed: int = 0) -> tuple[list[tuple[str, str]], Any]:
    """Return the sites of a healthy transformer and their rms, which differ by part, block and step."""
    generator = np.random.default_rng(seed)
    sites = [
        ("embed", "out"),
        *((f"blocks.{i}.{part}", "out") for i in range(depth) for part in PARTS),
        ("head", "out"),
    ]
    part = np.array([1.0, *([1.0, 0.6, 0.2, 0.7, 0.3, 0.05] * depth), 2.0])
    deeper = np.array([1.0, *np.repeat(1.05 ** np.arange(depth), len(PARTS)), 1.0])  # a trend over the blocks
    later = 0.9 ** np.arange(steps)  # a change that all share
    noise = np.exp(0.1 * generator.standard_normal((len(sites), steps)))
    return sites, (part * deeper)[:, None] * later * noise


def test_a_healthy_transformer_has_nothing_that_stands_out() -> None:
    """Differences between the parts of a block, a trend over depth and a common change are not unusual."""
    for seed in range(20):
        sites, rms = blocks(seed=seed)
        assert standing_out(unusualness(sites, {"rms": rms})) == []


SICK = {"exploded": 30.0, "tiny": 1 / 30, "zero": 0.0, "NaN": float("nan")}


@given(st.integers(0, 145), st.sampled_from(sorted(SICK)), st.integers(0, 100), st.booleans())
def test_a_sick_site_ranks_first_wherever_it_is(place: int, kind: str, seed: int, from_the_start: bool) -> None:
    """A layer that is 30 times larger or smaller than its neighbors, 0 or NaN, ranks first at any place."""
    sites, rms = blocks(seed=seed)
    begin = 0 if from_the_start and 0 < place < 145 else 4  # embed and head have no siblings, but a past
    rms[place, begin:] *= SICK[kind]
    bad = np.isnan(rms).astype(float)
    degrees = unusualness(sites, {"rms": rms, "nan_count": bad, "inf_count": 0 * bad})
    assert standing_out(degrees)[0] == place
    assert place in choose(degrees, 4)


@pytest.mark.parametrize("place", [1, 61, 145])
def test_a_site_that_a_finding_names_has_its_neighbors(place: int) -> None:
    """After a NaN all sites stand out; the one with an infinite degree is chosen, with the same layer beside it."""
    sites, rms = blocks()
    degrees = unusualness(sites, {"rms": rms, "nan_count": np.ones_like(rms)})
    assert len(set(degrees)) == 1
    degrees[place] = np.inf
    layer = sites[place][0].rpartition(".")[2]
    for most in (4, 10):
        chosen = [sites[each] for each in choose(degrees, most, sites)]
        assert sites[place] in chosen
        assert len(chosen) == most
        alike = [name for name, _ in chosen if "." in name and name.endswith(f".{layer}")]
        assert place == 145 or len(alike) == 3 or (most == 10 and len(alike) > 3)


@pytest.mark.parametrize("unknown", [[], [1], [0, 3], [0, 1, 2, 3]])
def test_the_median_of_known_values(unknown: list[int]) -> None:
    """Unknown values do not count, in a column with some of them as in one without; without any, it is NaN."""
    values = np.array([[4.0, 1.0], [3.0, 7.0], [9.0, 2.0], [1.0, 3.0]])
    values[unknown, 0] = np.nan
    expected = {0: 3.5, 1: 4.0, 2: 6.0, 4: np.nan}[len(unknown)]
    np.testing.assert_equal(known_median(values), [expected, 2.5])


@pytest.mark.parametrize("is_latest", [False, True])
def test_steps_are_compared_in_pieces(monkeypatch: pytest.MonkeyPatch, is_latest: bool) -> None:
    """Many sites and steps are compared piece by piece, with the same result."""
    sites, rms = blocks(steps=40)
    rms[5, 20] *= 1000
    whole = unusualness(sites, {"rms": rms}, is_latest=is_latest)
    assert whole.any()
    monkeypatch.setattr("lightning_recorder.insight.unusual._MOST_VALUES", 4000)
    assert unusualness(sites, {"rms": rms}, is_latest=is_latest).tolist() == whole.tolist()


def test_a_layer_that_has_recovered_ranks_behind_one_that_is_sick_now() -> None:
    """A spike in the past still stands out, but less than the same deviation at the last step."""
    sites, rms = blocks()
    rms[20, 2] *= 1e3
    rms[60, -1] *= 1e3
    assert standing_out(unusualness(sites, {"rms": rms})) == [60, 20]


def test_a_dead_relu_is_found_by_its_zeros() -> None:
    """A layer of zeros stands out among equal layers that are half zeros, and one that is 90 % zeros anywhere."""
    sites = [(f"layers.{i}.act", "out") for i in range(12)]
    zeros = np.full(12, 0.5)
    zeros[7] = 1.0
    assert standing_out(unusualness(sites, {"zero_fraction": zeros[:, None]})) == [7]
    others = [(name, "out") for name in "abcdef"]
    assert standing_out(unusualness(others, {"zero_fraction": np.array([[0.1]] * 5 + [[0.9]])})) == [5]


def test_zeros_that_most_sites_have_are_not_unusual() -> None:
    """If most new biases are zero, neither they nor the others stand out."""
    sites = [(f"layers.{i}.fc", "bias") for i in range(12)]
    rms = np.zeros((12, 1))
    rms[[3, 8]] = 0.1
    assert standing_out(unusualness(sites, {"rms": rms, "zero_fraction": 1.0 * (rms == 0)})) == []


def test_paths_are_compared_with_their_like() -> None:
    """Gradients that are all a million times smaller than the weights are not unusual; a large one among them is."""
    sites = [(f"layers.{i}.fc", path) for i in range(8) for path in ("weight", "weight.grad")]
    rms = np.array([[1.0], [1e-6]] * 8)
    assert standing_out(unusualness(sites, {"rms": rms})) == []
    rms[9] = 1.0
    assert standing_out(unusualness(sites, {"rms": rms})) == [9]


FAMILIES = ("q", "k", "v", "proj", "fc1", "fc2", "norm1", "norm2")


def biases(seed: int = 0) -> tuple[list[tuple[str, str]], Any]:
    """Return the biases of 24 layers and their rms: those of the keys are tiny, and those of the norms are zero."""
    generator = np.random.default_rng(seed)
    sites = [(f"layers.{i}.{part}", "bias") for i in range(24) for part in FAMILIES]
    size = np.tile([0.1, 1e-7, 0.1, 0.1, 0.1, 0.1, 0.0, 0.0], 24)
    return sites, (size * np.exp(0.5 * generator.standard_normal(len(sites))))[:, None]


def test_a_family_that_differs_from_all_others_does_not_stand_out() -> None:
    """The gradients of key biases are rounding noise, and the biases of new norms are zero, in every layer."""
    sites, rms = biases()
    zeros = {"zero_fraction": 1.0 * (rms == 0)}
    assert standing_out(unusualness(sites, {"rms": rms, **zeros})) == []


@given(st.integers(0, 23), st.sampled_from(FAMILIES[:6]), st.integers(0, 20))
def test_the_sick_member_of_any_family_ranks_first(layer: int, part: str, seed: int) -> None:
    """Only the one that differs from its own family stands out, whatever the others are like."""
    sites, rms = biases(seed)
    place = sites.index((f"layers.{layer}.{part}", "bias"))
    rms[place] *= 1e3
    assert standing_out(unusualness(sites, {"rms": rms, "zero_fraction": 1.0 * (rms == 0)}))[0] == place


def test_means_of_squares_are_compared_as_sizes() -> None:
    """A gradient that is ten times larger is as unusual as the mean of its squares, which is a hundred times larger."""
    sites = [(f"layers.{i}.fc", path) for i in range(8) for path in ("weight.exp_avg", "weight.exp_avg_sq")]
    rms = np.array([[1.0], [1.0]] * 8)
    rms[[6, 7], 0] = 10.0, 100.0
    degrees = unusualness(sites, {"rms": rms})
    assert degrees[6] == degrees[7] > 1


def test_the_largest_magnitude_is_compared() -> None:
    """One extreme value stands out even if the rms is like that of the others."""
    sites = [(f"layers.{i}", "out") for i in range(8)]
    low, high = np.full((8, 1), -2.0), np.full((8, 1), 2.0)
    low[5] = -500.0
    assert standing_out(unusualness(sites, {"rms": np.ones((8, 1)), "min": low, "max": high})) == [5]


def test_a_site_that_is_not_recorded_any_more_stands_out() -> None:
    """A layer that gets no gradient any more stands out, unless most layers are missing in that record."""
    sites, rms = blocks()
    rms[80, -1] = np.nan
    assert standing_out(unusualness(sites, {"rms": rms})) == [80]
    rms[:90, -1] = np.nan
    assert standing_out(unusualness(sites, {"rms": rms})) == []


def test_sites_that_were_not_recorded_do_not_disturb() -> None:
    """Unknown values of some sites and steps are ignored, and nothing at all gives no degrees."""
    sites, rms = blocks()
    rms[::7, :-1:2] = np.nan
    rms[80, -1] = 1e4
    assert standing_out(unusualness(sites, {"rms": rms})) == [80]
    assert unusualness([], {}).tolist() == []
    assert unusualness(["a"], {"rms": np.full((1, 3), np.nan)}).tolist() == [0.0]


@given(st.lists(st.floats(0, 3), max_size=60), st.integers(1, 30))
def test_the_choice_has_the_most_unusual(degrees: list[float], most: int) -> None:
    """The choice is ascending and complete, and no site that stands out is left out for one that does not."""
    found = choose(np.array(degrees), most)
    assert found == sorted(set(found))
    assert len(found) == min(most, len(degrees))
    left = [degree for place, degree in enumerate(degrees) if place not in found]
    assert not left or max(left) < 1 or max(left) <= min(degrees[place] for place in found)


@pytest.mark.parametrize("most", [1, 3, 10])
def test_ordinary_sites_are_evenly_spread(most: int) -> None:
    """Without anything unusual the choice is evenly spread from the first to the last."""
    places = choose(np.zeros(100), most)
    assert places == np.linspace(0, 99, most).round().astype(int).tolist()
