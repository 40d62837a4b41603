"""Tests of the comparison of ranks, with the checksums of several copies of a model in one process."""

from __future__ import annotations

import json
import pickle
import zlib
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from lightning_recorder.insight.finding import findings_from_json, findings_to_json
from lightning_recorder.statistics.fingerprint import exact_checksum, signed_sums
from lightning_recorder.watch.replicas import (
    Differences,
    Replicas,
    ReplicaValues,
    compare_replicas,
    finding_of_differences,
)


def ranks(
    change: Callable[[nn.Module, torch.optim.Optimizer], object], changed: tuple[int, ...] = (1,), count: int = 3
) -> Differences:
    """Return the differences between copies of a model of which some are changed after a step."""
    found, replicas = [], None
    for rank in range(count):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
        if rank in changed:
            with torch.no_grad():
                change(model, optimizer)
        replicas = Replicas(model, [optimizer], rank)
        found.append(pickle.loads(pickle.dumps(replicas.values())))
    assert replicas is not None
    return compare_replicas(replicas.about.names, replicas.about.kinds, found)


def test_equal_ranks_have_no_differences() -> None:
    """Copies that are equal to the bit differ in nothing."""
    assert not ranks(lambda model, optimizer: None)


def test_one_changed_bit_is_found_and_the_ranks_are_grouped() -> None:
    """A single value that differs in its last bit is found; the finding names it, the steps and the groups."""

    def change(model: nn.Module, optimizer: object) -> None:
        weight = model[2].weight  # type: ignore[index]  # a Sequential
        weight[1, 3] = torch.nextafter(weight[1, 3], torch.tensor(torch.inf))

    found = ranks(change, changed=(1, 2))
    assert {kind: names for kind, names in found.names.items() if names} == {"parameter": ("2.weight",)}
    assert found.groups == ((0,), (1, 2))
    finding = finding_of_differences(found, 10, 1)
    assert (finding.severity, finding.module) == ("critical", "2")
    assert finding.verdict.startswith(
        "2.weight differs between the 3 ranks after step 10, and all were equal after step 1; "
    )
    assert finding.verdict.endswith("; rank 0 differs from ranks 1, 2")
    assert "gradients are equal on all ranks" in finding.why


@pytest.mark.parametrize("change", ["one value", "all values alike", "noise", "scale"])
@pytest.mark.parametrize("count", [9, 1000, 1 << 22])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_a_distance_is_that_of_all_values(change: str, count: int, dtype: torch.dtype) -> None:
    """Eight sums give the root mean square of a difference within three standard errors, wherever the difference is."""
    numbers = torch.Generator().manual_seed(count)
    one = torch.randn(count, generator=numbers)
    other = {
        "one value": lambda: one.index_fill(0, torch.tensor(count // 3), 40.0),
        "all values alike": lambda: one + 0.5,
        "noise": lambda: one + torch.randn(count, generator=numbers) / 4,
        "scale": lambda: one * 1.5,
    }[change]()
    one, other = one.to(dtype), other.to(dtype)
    found = (signed_sums(one, 8) - signed_sums(other, 8)).norm() / signed_sums(one, 8).norm()
    wanted = (one - other).norm() / one.norm()
    assert 0.4 < float(found / wanted) < 2.5


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        (((0, 2), (1,)), "; rank 1 differs from ranks 0, 2"),
        (((0, 1), (2, 3)), "; ranks 0, 1 differ from ranks 2, 3"),
        (((0, 1), (2,), (3,)), "; the values of these are equal: rank 2; rank 3; ranks 0, 1"),
        ((tuple(range(1, 20)), (0,)), "; rank 0 differs from ranks 1, 2, 3, 4, 5, 6, 7, 8 and 11 more"),
    ],
)
def test_the_ranks_with_equal_values_are_named(groups: tuple[tuple[int, ...], ...], text: str) -> None:
    """A few ranks are named as those that differ, and many are not all listed."""
    count = sum(map(len, groups))
    number = {rank: place for place, group in enumerate(groups) for rank in group}
    values = [
        ReplicaValues(
            rank,
            np.array([zlib.crc32(b"w")], np.uint32),
            np.zeros(1, np.int32),
            np.array([number[rank]]),
            np.full((1, 8), number[rank], np.float32),
        )
        for rank in range(count)
    ]
    assert finding_of_differences(compare_replicas(["w"], ["parameter"], values), 1, None).verdict.endswith(text)


def test_all_parameters_mean_that_nothing_is_reduced() -> None:
    """If all parameters and gradients differ, the finding says how far, and that gradients are not averaged."""

    def change(model: nn.Module, optimizer: object) -> None:
        for each in model.parameters():
            each.mul_(1.5)
            each.grad.add_(1)  # type: ignore[union-attr]  # after a backward pass

    finding = finding_of_differences(ranks(change), 1, None)
    assert finding.verdict.startswith("all 6 parameters differ between the 3 ranks after step 1; the largest distance ")
    assert 0.3 < finding.numbers["distance"] < 3
    assert "not averaged" in finding.why


def test_a_cause_is_named_only_if_it_was_measured() -> None:
    """Other learning rates, an optimizer that has not stepped, and equal gradients give three other causes."""

    def rate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model[0].weight.mul_(2)  # type: ignore[index]  # a Sequential
        optimizer.param_groups[0]["lr"] = 0.5

    def idle(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model[0].weight.mul_(2)  # type: ignore[index]  # a Sequential
        optimizer.state.clear()

    def written(model: nn.Module, optimizer: object) -> None:
        for each in model.parameters():
            each.mul_(2)

    def sharded(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model[0].weight.mul_(2)  # type: ignore[index]  # a Sequential
        optimizer.state.clear()
        optimizer.state[model[0].weight] = {"own": torch.ones(3)}  # type: ignore[index]  # a Sequential

    def clipped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model[0].weight.mul_(2)  # type: ignore[index]  # a Sequential
        model[0].weight.grad.mul_(0.5)  # type: ignore[index]  # a Sequential

    def frozen(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model[0].weight.mul_(2)  # type: ignore[index]  # a Sequential
        del optimizer.state[model[0].weight]  # type: ignore[index]  # a Sequential

    changes = (rate, idle, written, sharded, clipped, frozen)
    settings, state, other, last, local, part = (finding_of_differences(ranks(each), 1, None).why for each in changes)
    assert settings == "The optimizers have other settings: lr of group 0: 0.001 (ranks 0, 2), 0.5 (rank 1)."
    assert state == "The optimizer has no state of them on rank 1, so it has not stepped them there."
    assert part == state
    assert other.startswith("The latest gradients are equal on all ranks, so something else changes the values")
    assert last == other  # its states are those of another shard
    assert local.startswith("Their gradients differ, too. Either they are not averaged")


def test_the_strip_has_the_distance_of_each_rank_from_the_largest_group() -> None:
    """Each tensor has the groups and distances of all ranks, and survives being written and read."""
    found = finding_of_differences(
        ranks(lambda model, optimizer: model[2].weight.mul_(3), changed=(0,)),  # type: ignore[index]  # a Sequential
        7,
        None,
    )
    strip = found.strip
    assert strip is not None
    place = strip.names.index("2.weight")
    assert (strip.ranks, strip.step, strip.groups[place]) == ((0, 1, 2), 7, (1, 0, 0))
    assert strip.distances[place][0] > 0.5
    assert strip.distances[place][1:] == (0, 0)
    others = [each for at, each in enumerate(strip.groups) if at != place]
    assert len(others) > 20
    assert set(others) == {(0, 0, 0)}
    (read,) = findings_from_json(json.loads(json.dumps(findings_to_json([found]))))
    assert read.strip == strip


def test_states_of_the_optimizer_are_compared() -> None:
    """States that differ while the parameters do not are critical, too."""

    def change(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.state[model[0].weight]["exp_avg"].add_(1)  # type: ignore[index]  # a Sequential

    finding = finding_of_differences(ranks(change), 1, None)
    assert (finding.severity, finding.module) == ("critical", "0")
    assert finding.verdict.startswith("the optimizer state 0.weight.exp_avg differs")


def test_buffers_alone_are_a_note() -> None:
    """Running statistics that differ are expected without SyncBatchNorm."""

    def change(model: nn.Module, optimizer: object) -> None:
        model[1].running_mean.add_(1)  # type: ignore[index]  # a Sequential

    assert finding_of_differences(ranks(change), 1, None).severity == "note"


def test_only_equal_shards_are_compared() -> None:
    """Ranks with different shards of a tensor are no replicas of each other."""
    found = ranks(lambda model, optimizer: model[0].weight.mul_(2), changed=(1, 3), count=4)  # type: ignore[index]
    assert found.groups == ((0, 2), (1, 3))
    found = _with_parts([0, 1, 0, 1])
    assert not found
    assert _with_parts([0, 0, 1, 1]).groups == ((0,), (1,))


def _with_parts(parts: list[int]) -> Differences:
    values = [
        ReplicaValues(
            rank,
            np.array([zlib.crc32(b"w")], np.uint32),
            np.array([part], np.int32),
            np.array([rank % 2]),
            np.ones((1, 8), np.float32),
        )
        for rank, part in enumerate(parts)
    ]
    return compare_replicas(["w"], ["parameter"], values)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64]
)
def test_a_checksum_depends_on_each_value_and_its_place(dtype: torch.dtype) -> None:
    """Exchanged values and a changed value give another checksum, for each kind of number."""
    one = torch.tensor([0, 1, 1, 0, 0]).to(dtype)
    others = [torch.tensor(each).to(dtype) for each in ([1, 0, 1, 0, 0], [0, 1, 1, 0, 1], [0, 1, 1, 0])]
    assert all(int(exact_checksum(one)) != int(exact_checksum(each)) for each in others)
    assert int(exact_checksum(one)) == int(exact_checksum(one.clone()))
