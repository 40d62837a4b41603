"""Tests of packing and merging site states, without processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from lightning_recorder.reductions import (
    BatchSum,
    Change,
    ChannelMoments,
    Collected,
    Norms,
    Reduction,
    RunningMoments,
    Statistics,
    Values,
)
from lightning_recorder.statistics.packing import Contribution, Decoder, Encoder, Key
from lightning_recorder.statistics.snapshot import Snapshot
from lightning_recorder.taps import Site

A, B, C = (Site(name, "out") for name in "abc")

Rank = Mapping[Key, tuple[Reduction, Tensor]]


class Merged(NamedTuple):
    """The merged states of some ranks, as the first rank uses them."""

    groups: dict[int, list[Collected[Site]]]
    rank_means: Mapping[Site, tuple[float, float]]
    diverged: frozenset[Site]
    refused: Mapping[Key, str]


def state_of(reduction: Reduction, *tensors: Tensor) -> tuple[Reduction, Tensor]:
    """Return a reduction and its state after the tensors."""
    for tensor in tensors:
        reduction.update(tensor)
    return reduction, reduction.state.clone()


def rank_of(**tensors: Tensor) -> dict[Key, tuple[Reduction, Tensor]]:
    """Return the states of a rank for sites of the default statistics."""
    return {(0, Site(name, "out")): state_of(Statistics(), tensor) for name, tensor in tensors.items()}


def contribution(own: Rank, rank: int, copies: Collection[Site] = ()) -> Contribution:
    """Return the contribution of a rank."""
    groups: list[list[Collected[Site]]] = [[] for _ in range(1 + max((bank for bank, _ in own), default=-1))]
    for (bank, site), (reduction, state) in own.items():
        alike = next((each for each in groups[bank] if each.reduction.described == reduction.described), None)
        if alike is not None:
            groups[bank].remove(alike)
        keys, states = ([], state[None][:0]) if alike is None else (alike.keys, alike.states)
        groups[bank].append(Collected(reduction, [*keys, site], torch.cat([states, state[None]])))
    return Contribution.of(Snapshot((), groups, [frozenset()] * len(groups)), rank, copies=copies)


def sent(each: Contribution, own: Contribution) -> Contribution:
    """Return a contribution after it was sent to another rank."""
    return Decoder().decode("scope", Encoder().encode("scope", each), own)


def merge(ranks: Sequence[Rank], copies: Sequence[Collection[Site]] = ()) -> Merged:
    """Return the states that the first rank has after it has received those of the others in order."""
    its = copies or [()] * len(ranks)
    first, *others = (contribution(own, rank, each) for rank, (own, each) in enumerate(zip(ranks, its, strict=True)))
    for other in others:
        first.merge(sent(other, first))
    snapshot = first.snapshot(None, first.refused) or Snapshot((), [], [])
    groups = {bank: found for bank, found in enumerate(snapshot.groups) if found}
    return Merged(groups, snapshot.rank_means, snapshot.diverged, first.refused)


def by_site(merged: Merged, bank: int = 0) -> dict[Site, Tensor]:
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
    """A site of a single rank keeps its exact state."""
    first, second = rank_of(a=random(0)), rank_of(b=random(1), c=random(2))
    found = by_site(merge([first, second]))
    assert set(found) == {A, B, C}
    for site, rank in (A, first), (B, second), (C, second):
        assert torch.equal(found[site], rank[0, site][1])


def test_ranks_without_anything_merge_to_nothing() -> None:
    """Ranks without states merge to nothing."""
    assert merge([{}, {}]) == ({}, {}, frozenset(), {})


def test_the_order_in_which_a_rank_has_seen_its_sites_does_not_matter() -> None:
    """The order in which a rank has seen its sites does not affect the merged states."""
    tensors = {"a": random(0), "b": random(1)}
    same = merge([rank_of(**tensors), rank_of(**tensors)])
    other = merge([rank_of(**tensors), rank_of(**dict(reversed(tensors.items())))])
    assert all(torch.equal(by_site(same)[site], by_site(other)[site]) for site in (A, B))


@pytest.mark.parametrize("ranks", [4, 5, 8])
def test_a_tree_gives_what_a_row_of_merges_gives(ranks: int) -> None:
    """Merging pairs of ranks first gives equal counts, extrema and bins, and equal moments up to rounding."""
    own = [rank_of(a=random(rank, 10 + rank), **({"b": random(rank)} if rank % 3 else {})) for rank in range(ranks)]
    row = merge(own)
    found = [contribution(each, rank) for rank, each in enumerate(own)]
    step = 1
    while step < ranks:
        for rank in range(0, ranks - step, 2 * step):
            found[rank].merge(sent(found[rank + step], found[rank]))
        step *= 2
    tree = found[0].snapshot(None)
    assert tree is not None
    for group in tree.groups[0]:
        for site, state in zip(group.keys, group.states, strict=True):
            torch.testing.assert_close(state, by_site(row)[site], rtol=1e-12, atol=1e-12)
    assert tree.rank_means == row.rank_means


def test_a_message_is_short_if_most_bins_are_empty() -> None:
    """A second message of the same sites has neither their names nor their empty bins, and gives the same states."""
    encoder, decoder = Encoder(), Decoder()
    sites = {f"layers.{number}": torch.ones(5) for number in range(50)}
    first, second = (contribution(rank_of(**sites), rank) for rank in (0, 1))
    long, short = (encoder.encode("scope", second) for _ in range(2))
    assert len(short) < len(long)
    assert len(short) < 50 * 200  # 2 bins of 2048, and 8 other numbers
    for message in long, short:
        (kind,) = decoder.decode("scope", message, first).kinds.values()
        (expected,) = second.kinds.values()
        assert kind.sites == expected.sites
        assert torch.equal(kind.states, expected.states)


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


@pytest.mark.parametrize("copies", [(), (B,)])
def test_tensors_of_two_ranks_are_not_consecutive(copies: Collection[Site]) -> None:
    """A reduction that compares consecutive tensors has the pairs of each rank, and none between two of them."""
    ones = torch.ones(3)
    ranks: list[Rank] = [
        {(0, site): state_of(Change(), *(factor**power * ones for power in range(steps))) for site in (A, B)}
        for factor, steps in ((2.0, 2), (4.0, 3))
    ]
    (group,) = merge(ranks, [(), copies]).groups[0]
    found = dict(zip(group.keys, group.reduction.summarize(group.states)["ratio_to_previous"].tolist(), strict=True))
    assert found == {A: (2 + 4 + 4) / 3, B: 2.0 if copies else (2 + 4 + 4) / 3}


def test_states_of_another_size_on_each_rank_are_refused() -> None:
    """States of different sizes are left out, with the reason."""
    ranks: list[Rank] = [
        {(0, A): state_of(BatchSum(), torch.ones(2, size)), (0, B): state_of(BatchSum(), torch.ones(2, 4))}
        for size in (3, 5)
    ]
    merged = merge(ranks)
    assert list(by_site(merged)) == [B]
    assert merged.refused == {(0, A): "BatchSum: the tensor has another shape on each rank"}


def test_a_sent_reduction_has_no_state() -> None:
    """A reduction that is sent has its settings but no state, and the original keeps its state."""
    reduction, state = state_of(RunningMoments(correction=1), torch.ones(3))
    (kind,) = sent(contribution({(0, A): (reduction, state)}, 1), Contribution()).kinds.values()
    assert repr(kind.reduction) == repr(reduction)
    assert kind.reduction is not None
    assert not kind.reduction.state.any()
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


def test_a_reduction_that_cannot_be_sent_is_that_of_the_receiver() -> None:
    """A reduction that cannot be pickled is merged if the receiver has it; otherwise its site is left out."""

    class Local(Sum):
        """A reduction of a class that cannot be pickled."""

    own = {(0, A): state_of(Local(1), torch.ones(2))}
    assert by_site(merge([own, own]))[A].tolist() == [4.0]
    assert by_site(merge([{}, own])) == {}


def test_a_reduction_whose_merge_fails_is_refused() -> None:
    """An error in ``merge_states`` leaves out the sites of the reduction, with the error as the reason."""

    class Failing(Sum):
        """A sum that cannot be merged."""

        def merge_states(self, state: Tensor, other: Tensor) -> None:
            raise ValueError("these do not merge")

    ranks = [{**rank_of(a=torch.ones(2)), (1, A): state_of(Failing(1), torch.ones(2))} for _ in range(2)]
    merged = merge(ranks)
    assert (list(by_site(merged)), list(by_site(merged, 1))) == ([A], [])
    assert "these do not merge" in merged.refused[1, A]


def test_settings_without_a_text_of_their_own_are_the_same_on_all_ranks() -> None:
    """A setting whose text contains a memory address does not make ranks differ."""
    scales = [object(), object()]
    merged = merge([{(0, A): state_of(Sum(scale), torch.ones(2))} for scale in scales])
    assert by_site(merged)[A].tolist() == [4.0]
