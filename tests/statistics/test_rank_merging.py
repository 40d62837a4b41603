"""Tests of the merge of states between real processes over gloo."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch.multiprocessing.spawn import spawn

from lightning_recorder import RecorderWarning
from lightning_recorder.reductions import BatchSum, Norms, Reduction, Statistics
from lightning_recorder.statistics.rank_merging import Exchange, Merged
from lightning_recorder.statistics.sites import SiteStates, Snapshot
from lightning_recorder.taps import Site

pytestmark = pytest.mark.slow

A, B, C = (Site(name, "out") for name in "abc")
WAIT_S = 60.0


def tensor_of(rank: int) -> Tensor:
    """Return the tensors of a rank, with a different length, mean and spread on each."""
    generator = torch.Generator().manual_seed(rank)
    return (rank + 1) * torch.randn(30 + 10 * rank, generator=generator) + 3 * rank


def snapshot_of(extra: Collection[Reduction] = (), **tensors: Tensor) -> Snapshot:
    states = SiteStates(extra=extra)
    for name, tensor in tensors.items():
        states.add(Site(name, "out"), tensor)
    return states.snapshot(tensors)


def seen(merged: Merged) -> Any:
    """Return the result of an exchange as plain data."""
    found = None
    if merged.snapshot is not None:
        found = {site: (dict(each.scalars), each.bins) for site, each in merged.snapshot.statistics().items()}
    return {"found": found, "numbers": merged.numbers, "absent": merged.absent}


# The work of the processes. Each function runs on every rank and returns the data to check.


def merged_twice(rank: int, calls: Counter[str]) -> Any:
    exchange = Exchange(torch.device("cpu"))
    results = []
    for number in 1, 2:
        calls.clear()
        merged = exchange.merge(snapshot_of(a=tensor_of(rank)), numbers=(float(number), float(rank)))
        results.append({**seen(merged), "calls": dict(calls)})
    return results


def seen_later(rank: int, calls: Counter[str]) -> Any:
    """The last rank sees an additional site in the second of three merges only."""
    exchange = Exchange(torch.device("cpu"))
    tensors = {"a": tensor_of(rank)}
    results = []
    for number in range(3):
        calls.clear()
        last = rank == exchange.ranks - 1
        own = {**tensors, **({"b": torch.ones(4)} if last and number == 1 else {})}
        results.append({**seen(exchange.merge(snapshot_of(**own))), "calls": dict(calls)})
    return results


def one_failed(rank: int, calls: Counter[str]) -> Any:
    """Merge with a failed recorder on each rank in turn."""
    exchange = Exchange(torch.device("cpu"))
    ranks = range(exchange.ranks)
    return [
        seen(exchange.merge(None if rank == failed else snapshot_of(a=tensor_of(rank)), numbers=(1.0,)))
        for failed in ranks
    ]


def all_failed(rank: int, calls: Counter[str]) -> Any:
    result = seen(Exchange(torch.device("cpu")).merge(None))
    return {**result, "calls": dict(calls)}


def nothing_seen(rank: int, calls: Counter[str]) -> Any:
    result = seen(Exchange(torch.device("cpu")).merge(snapshot_of()))
    return {**result, "calls": dict(calls)}


def copied(rank: int, calls: Counter[str]) -> Any:
    """All ranks but the first have copies of a site, and each a part of another one."""
    snapshot = snapshot_of(a=torch.full((5,), 2.0), b=torch.full((5,), 2.0))
    return seen(Exchange(torch.device("cpu")).merge(snapshot, copies={A} if rank else ()))


def in_inference_mode(rank: int, calls: Counter[str]) -> Any:
    with torch.inference_mode():
        return seen(Exchange(torch.device("cpu")).merge(snapshot_of([Norms()], a=tensor_of(rank))))


def of_other_shapes(rank: int, calls: Counter[str]) -> Any:
    exchange = Exchange(torch.device("cpu"))
    warned, places = [], []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            snapshot = snapshot_of([BatchSum()], a=torch.ones(2, 3 + rank), b=torch.ones(2, 3))
            merged = exchange.merge(snapshot)
        warned.append([str(each.message) for each in caught if issubclass(each.category, RecorderWarning)])
        if merged.snapshot is not None:
            places.append({site: sorted(each.tensors) for site, each in merged.snapshot.statistics().items()})
    return {"warned": warned, "places": places}


def agreed(rank: int, calls: Counter[str]) -> Any:
    """Agree with equal ranks, with the last one not ready, and with different settings on each."""
    exchange = Exchange(torch.device("cpu"))
    last = exchange.ranks - 1
    questions = [(True, "same"), (rank != last, "same"), (True, f"{rank}"), (True, "same")]
    return [(exchange.agree(ready, about), exchange.is_open) for ready, about in questions]


def lost(rank: int, calls: Counter[str]) -> Any:
    """A transfer fails on all ranks."""
    exchange = Exchange(torch.device("cpu"))
    plain, found = dist.all_gather, ""

    def failing(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("connection lost")

    dist.all_gather = failing
    try:
        exchange.merge(snapshot_of(a=tensor_of(rank)))
    except RuntimeError as error:
        found = str(error)
    finally:
        dist.all_gather = plain
    return found, exchange.is_open


Act = Callable[[int, Counter[str]], Any]
ACTS: tuple[Act, ...] = (
    merged_twice, seen_later, one_failed, all_failed, nothing_seen, copied, in_inference_mode, of_other_shapes, agreed,
    lost,
)  # fmt: skip


def work(rank: int, ranks: int, folder: Path) -> None:
    """Run all cases as one of several processes."""
    calls: Counter[str] = Counter()
    for name in "all_gather", "reduce", "all_gather_object", "all_reduce", "broadcast", "barrier", "gather":
        setattr(dist, name, _counting(name, getattr(dist, name), calls))
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=ranks)
    found = {}
    for act in ACTS:
        calls.clear()
        found[act.__name__] = act(rank, calls)
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


def _counting(name: str, function: Callable[..., Any], calls: Counter[str]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return function(*args, **kwargs)

    return wrapper


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of each process."""
    folder = tmp_path_factory.mktemp("exchange")
    context: Any = spawn(work, (request.param, folder), nprocs=request.param, join=False)
    end = time.monotonic() + WAIT_S
    try:
        while not context.join(timeout=1.0):
            assert time.monotonic() < end, "the processes wait for each other"
    finally:
        for process in context.processes:
            process.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(request.param)]


def check_statistics(found: tuple[dict[str, float], Tensor], tensors: Sequence[Tensor]) -> None:
    """Check that counts, extrema and bins equal those of one reduction exactly, and moments approximately."""
    scalars, bins = found
    values = torch.cat(list(tensors)).double()
    once = Statistics()
    once.update(torch.cat(list(tensors)))
    expected = once.compute()
    assert torch.equal(bins, expected["histogram"].long())
    for name in "count", "min", "max", "zero_fraction", "nan_count", "inf_count":
        assert scalars[name] == float(expected[name])
    rms, mean = float(values.square().mean().sqrt()), float(values.mean())
    variance = float(values.var(correction=0))
    assert scalars["mean"] == pytest.approx(mean, rel=0, abs=1e-12 * rms)
    assert scalars["std"] ** 2 == pytest.approx(variance, rel=0, abs=1e-12 * (variance + 2e-4 * mean**2))
    means = [float(each.double().mean()) for each in tensors]
    extremes = [scalars["rank_mean_min"], scalars["rank_mean_max"]]
    assert extremes == pytest.approx([min(means), max(means)], rel=1e-12)


def test_rank_zero_has_what_one_reduction_gives(ranks: list[dict[str, Any]]) -> None:
    """Rank zero has the merged states of all ranks, the others have none, and every rank has the numbers of all."""
    tensors = [tensor_of(rank) for rank in range(len(ranks))]
    for number, result in enumerate(ranks[0]["merged_twice"], start=1):
        check_statistics(result["found"][A], tensors)
        for rank in ranks:
            other = rank["merged_twice"][number - 1]
            assert other["numbers"] == [[float(number), float(each)] for each in range(len(ranks))]
            assert other["absent"] == ()
    assert [result["found"] for rank in ranks[1:] for result in rank["merged_twice"]] == [None] * 2 * (len(ranks) - 1)


def test_two_transfers_merge_what_is_known(ranks: list[dict[str, Any]]) -> None:
    """A merge takes one gather and one sum on any number of ranks; announcing sites takes two more transfers."""
    known, new = {"all_gather": 1, "reduce": 1}, {"all_gather": 2, "all_gather_object": 1, "reduce": 1}
    for rank in ranks:
        assert [result["calls"] for result in rank["merged_twice"]] == [new, known]
        assert [result["calls"] for result in rank["seen_later"]] == [new, new, known]


def test_a_site_that_one_rank_sees_later_hangs_nobody(ranks: list[dict[str, Any]]) -> None:
    """A site that one rank sees later is in the result of that merge only, and causes no deadlock."""
    before, then, after = (result["found"] for result in ranks[0]["seen_later"])
    assert [set(before), set(then), set(after)] == [{A}, {A, B}, {A}]
    scalars = then[B][0]
    assert [scalars[name] for name in ("count", "mean", "rank_mean_min", "rank_mean_max")] == [4, 1, 1, 1]


def test_a_rank_that_has_failed_costs_its_share(ranks: list[dict[str, Any]]) -> None:
    """If a rank has failed, even rank zero, the result has the other ranks, and all ranks know which failed."""
    for failed in range(len(ranks)):
        others = [tensor_of(rank) for rank in range(len(ranks)) if rank != failed]
        check_statistics(ranks[0]["one_failed"][failed]["found"][A], others)
        for rank in ranks:
            result = rank["one_failed"][failed]
            assert (result["absent"], result["numbers"]) == ((failed,), [[1.0]] * len(ranks))


@pytest.mark.parametrize("act", ["all_failed", "nothing_seen"])
def test_nothing_takes_one_transfer(ranks: list[dict[str, Any]], act: str) -> None:
    """If no rank has a state, the result is empty, and there is no sum."""
    for place, rank in enumerate(ranks):
        # The first rank has states of its own, which are empty.
        assert rank[act]["found"] == ({} if act == "nothing_seen" and place == 0 else None)
        assert rank[act]["calls"] == {"all_gather": 1}
        assert rank[act]["absent"] == (tuple(range(len(ranks))) if act == "all_failed" else ())


def test_copies_count_once(ranks: list[dict[str, Any]]) -> None:
    """A site that every rank has a copy of counts once; parts all count."""
    found = ranks[0]["copied"]["found"]
    assert (found[A][0]["count"], found[B][0]["count"]) == (5, 5 * len(ranks))
    assert (found[A][0]["mean"], int(found[A][1].sum()), int(found[B][1].sum())) == (2, 5, 5 * len(ranks))


def test_states_are_merged_inside_inference_mode(ranks: list[dict[str, Any]]) -> None:
    """States are merged in inference mode, such as after a validation, including those of extra reductions."""
    tensors = [tensor_of(rank) for rank in range(len(ranks))]
    found = ranks[0]["in_inference_mode"]["found"][A]
    check_statistics(found, tensors)
    assert found[0]["l1_norm"] == pytest.approx(float(torch.cat(tensors).double().abs().sum()), rel=1e-12)


def test_states_of_another_shape_on_each_rank_give_one_warning(ranks: list[dict[str, Any]]) -> None:
    """If shapes differ between ranks, that reduction is skipped at that site with one warning from rank zero."""
    result = ranks[0]["of_other_shapes"]
    assert result["places"] == [{A: [], B: ["batch_sum"]}] * 2
    assert [len(each) for each in result["warned"]] == [1, 0]
    assert "is not recorded at 'out' of module 'a'" in result["warned"][0][0]
    assert [rank["of_other_shapes"]["warned"] for rank in ranks[1:]] == [[[], []]] * (len(ranks) - 1)


def test_all_ranks_come_to_the_same_agreement(ranks: list[dict[str, Any]]) -> None:
    """The ranks merge if all are ready and record the same; otherwise all know the reason."""
    last = len(ranks) - 1
    expected = [
        ("", True),
        (f"rank {last} does not record", False),
        ("the ranks record different modules, or with different settings", False),
        ("", True),
    ]
    assert [rank["agreed"] for rank in ranks] == [expected] * len(ranks)


def test_after_a_transfer_that_failed_nothing_more_is_sent(ranks: list[dict[str, Any]]) -> None:
    """A failed transfer raises its error and closes the exchange."""
    assert [rank["lost"] for rank in ranks] == [("connection lost", False)] * len(ranks)


def test_without_processes_there_is_nothing_to_merge() -> None:
    """A process without initialized ``torch.distributed`` needs no exchange."""
    assert not Exchange.is_needed()
