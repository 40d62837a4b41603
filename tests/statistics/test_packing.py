"""Tests of packing and merging site states, without processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import pytest
import torch
from torch import Tensor

from lightning_recorder.reductions import BatchSum, ChannelMoments, Norms, Reduction, RunningMoments, Statistics, Values
from lightning_recorder.statistics.packing import Key, MergedStates, StatePacking
from lightning_recorder.taps import Site

CPU = torch.device("cpu")
A, B, C = (Site(name, "out") for name in "abc")

Rank = Mapping[Key, tuple[Reduction, Tensor]]


def state_of(reduction: Reduction, *tensors: Tensor) -> tuple[Reduction, Tensor]:
    """Return a reduction and its state after the tensors."""
    for tensor in tensors:
        reduction.update(tensor)
    return reduction, reduction.state.clone()


def rank_of(**tensors: Tensor) -> dict[Key, tuple[Reduction, Tensor]]:
    """Return the states of a rank for sites of the default statistics."""
    return {(0, Site(name, "out")): state_of(Statistics(), tensor) for name, tensor in tensors.items()}


def layouts(ranks: Sequence[Rank]) -> list[StatePacking]:
    """Return the layout of each rank after all have announced their sites."""
    found = [StatePacking() for _ in ranks]
    warned = [layout.unknown(own) for layout, own in zip(found, ranks, strict=True)]
    for layout in found:
        layout.extend(warned)
    return found


def merge(ranks: Sequence[Rank], copies: Sequence[Collection[Site]] = ()) -> MergedStates:
    """Return the states that the first rank merges after each rank has packed its own."""
    found = layouts(ranks)
    owned = zip(found, ranks, copies or [()] * len(ranks), strict=True)
    packed = [layout.pack(own, CPU, copies=its) for layout, own, its in owned]
    return found[0].merge([each.gathered for each in packed], torch.stack([each.added for each in packed]).sum(0))


def by_site(merged: MergedStates, bank: int = 0) -> dict[Site, Tensor]:
    groups = merged.groups.get(bank, [])
    return {site: state for each in groups for site, state in zip(each.keys, each.states, strict=True)}


def random(seed: int, size: int = 50) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_merged_states_are_those_of_one_stream() -> None:
    """Three ranks merge to the state of one stream: additive slots exactly, moments approximately."""
    tensors = [random(seed, 20 * (seed + 1)) for seed in range(3)]
    found = by_site(merge([rank_of(a=each) for each in tensors]))[A]
    _, expected = state_of(Statistics(), torch.cat(tensors))
    is_exact = torch.ones(len(found), dtype=torch.bool)
    is_exact[1:3] = False  # the mean and the sum of squared deviations
    assert torch.equal(found[is_exact], expected[is_exact])
    assert found[1:3].tolist() == pytest.approx(expected[1:3].tolist(), rel=1e-12, abs=1e-12)


def test_a_site_of_one_rank_is_there_as_it_was() -> None:
    """A site of a single rank keeps its exact state, and a site that no rank has seen is absent."""
    first, second = rank_of(a=random(0)), rank_of(b=random(1), c=random(2))
    found = by_site(merge([first, second]))
    assert set(found) == {A, B, C}
    for site, rank in (A, first), (B, second), (C, second):
        assert torch.equal(found[site], rank[0, site][1])
    layout = layouts([first, second])[0]
    nothing = layout.pack({}, CPU)
    assert by_site(layout.merge([nothing.gathered] * 2, nothing.added)) == {}


def test_ranks_without_anything_merge_to_nothing() -> None:
    """An empty layout packs to empty tensors and merges to nothing."""
    merged = merge([{}, {}])
    assert (merged.groups, merged.rank_means, merged.diverged) == ({}, {}, frozenset())


def test_the_order_in_which_a_rank_has_seen_its_sites_does_not_matter() -> None:
    """The order in which a rank has seen its sites does not affect the packing."""
    tensors = {"a": random(0), "b": random(1)}
    ranks = [rank_of(**tensors), rank_of(**dict(reversed(tensors.items())))]
    packed = [layout.pack(own, CPU) for layout, own in zip(layouts(ranks), ranks, strict=True)]
    assert all(torch.equal(one, other) for one, other in zip(*packed, strict=True))


def test_a_copy_counts_once() -> None:
    """If the second rank has a copy of a site, the result is the state of the first."""
    tensor = random(3)
    merged = merge([rank_of(a=tensor, b=tensor)] * 2, [(), (A,)])
    found = by_site(merged)
    _, once = state_of(Statistics(), tensor)
    assert torch.equal(found[A], once)
    assert float(found[B][0]) == 2 * 50
    assert merged.diverged == frozenset()


@pytest.mark.parametrize("spoil", [lambda x: x + 1e-6, lambda x: -x, lambda x: x[:-1], lambda x: x * torch.nan])
def test_copies_that_differ_are_named(spoil: Callable[[Tensor], Tensor]) -> None:
    """A replicated site with different copies is reported, even if one has nothing but NaN."""
    tensor = random(3)
    ranks = [rank_of(a=tensor, b=tensor), rank_of(a=spoil(tensor), b=spoil(tensor))]
    assert merge(ranks, [(), (A,)]).diverged == {A}


def test_copies_that_were_added_up_in_another_order_are_the_same() -> None:
    """Rounding differences from another order of summation do not count as different copies."""
    values = random(5, 1000)
    whole, pieces = state_of(Statistics(), values), state_of(Statistics(), *values.split(77))
    assert not torch.equal(whole[1][:3], pieces[1][:3])
    assert merge([{(0, A): whole}, {(0, A): pieces}], [(), (A,)]).diverged == frozenset()


def test_the_means_of_the_ranks_are_separate() -> None:
    """The smallest and the largest mean are those of the ranks that have seen a site, including copies."""
    ranks = [rank_of(a=torch.full((2,), value)) for value in (3.0, -1.0, 2.0)]
    ranks[1] |= rank_of(b=torch.full((4,), 5.0))
    merged = merge(ranks, [(), (A,), (A,)])
    assert merged.rank_means == {A: (-1.0, 3.0), B: (5.0, 5.0)}


def test_a_rank_that_has_seen_only_nan_has_no_mean() -> None:
    """A rank with nothing but NaN does not count for the extreme means; if all ranks are like that, they are NaN."""
    nan = torch.full((2,), math.nan)
    means = merge([rank_of(a=torch.ones(2), b=nan), rank_of(a=nan, b=nan)]).rank_means
    assert means[A] == (1.0, 1.0)
    assert all(map(math.isnan, means[B]))


def test_further_reductions_have_banks_of_their_own() -> None:
    """States of several reductions are returned by reduction index, even if shapes differ between sites."""
    narrow, wide = torch.ones(2, 3), torch.ones(2, 5)

    def rank(factor: float) -> dict[Key, tuple[Reduction, Tensor]]:
        return {
            **rank_of(a=factor * narrow, b=factor * wide),
            (1, A): state_of(ChannelMoments(), factor * narrow),
            (1, B): state_of(ChannelMoments(), factor * wide),
            (2, A): state_of(Norms(), factor * narrow),
        }

    merged = merge([rank(1.0), rank(3.0)])
    assert {bank: sorted(by_site(merged, bank)) for bank in merged.groups} == {0: [A, B], 1: [A, B], 2: [A]}
    sizes = {}
    for group in merged.groups[1]:
        means = group.reduction.summarize(group.states)["channel_mean"]
        assert means.tolist() == [[2.0] * means.shape[1]] * len(group.keys)
        sizes.update(dict.fromkeys(group.keys, means.shape[1]))
    assert sizes == {A: 3, B: 5}
    norms = merged.groups[2][0]
    assert norms.reduction.summarize(norms.states)["l1_norm"].tolist() == [6 + 18]


def test_states_of_another_size_on_each_rank_are_refused() -> None:
    """States of different sizes are rejected on all ranks, reported once, and not requested again."""
    ranks: list[Rank] = [
        {(0, A): state_of(BatchSum(), torch.ones(2, size)), (0, B): state_of(BatchSum(), torch.ones(2, 4))}
        for size in (3, 5)
    ]
    found = [StatePacking() for _ in ranks]
    warned = [layout.unknown(own) for layout, own in zip(found, ranks, strict=True)]
    refused = [[key for key, _ in layout.extend(warned)] for layout in found]
    assert refused == [[(0, A)]] * 2
    assert [layout.unknown(own) for layout, own in zip(found, ranks, strict=True)] == [[], []]
    packed = [layout.pack(own, CPU) for layout, own in zip(found, ranks, strict=True)]
    merged = found[0].merge([each.gathered for each in packed], packed[0].added + packed[1].added)
    assert list(by_site(merged)) == [B]


def test_the_metadata_of_a_site_has_no_state() -> None:
    """An announced reduction has its settings but no state, and the original keeps its state."""
    reduction, state = state_of(RunningMoments(correction=1), torch.ones(3))
    ((key, warned),) = StatePacking().unknown({(0, A): (reduction, state)})
    assert (key, repr(warned.reduction)) == ((0, A), repr(reduction))
    assert warned.reduction is not None
    assert not warned.reduction.state.any()
    assert torch.equal(reduction.state, state)


class Sum(Reduction):
    """A sum of values times a setting that has no text of its own."""

    width = 1
    statistics = ("sum",)

    def __init__(self, scale: object) -> None:
        self.scale = scale

    def update_state(self, state: Tensor, values: Values) -> None:
        state[0] += values.flat.sum()

    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        return {"sum": state[..., 0]}


def test_a_reduction_that_cannot_be_sent_is_that_of_the_first_rank() -> None:
    """A reduction that cannot be pickled is merged if the first rank has it; otherwise its site is skipped on all."""

    class Local(Sum):
        """A reduction of a class that cannot be pickled."""

    own = {(0, A): state_of(Local(1), torch.ones(2))}
    assert by_site(merge([own, own]))[A].tolist() == [4.0]
    found = [StatePacking(), StatePacking()]
    warned = [[], found[1].unknown(own)]
    assert [[key for key, _ in layout.extend(warned)] for layout in found] == [[(0, A)]] * 2


def test_settings_without_a_text_of_their_own_are_the_same_on_all_ranks() -> None:
    """A setting whose text contains a memory address does not make ranks differ."""
    scales = [object(), object()]
    merged = merge([{(0, A): state_of(Sum(scale), torch.ones(2))} for scale in scales])
    assert by_site(merged)[A].tolist() == [4.0]
