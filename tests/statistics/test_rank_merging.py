"""Tests of the merge of states between real processes over gloo."""

from __future__ import annotations

import os
import pickle
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.multiprocessing.spawn import start_processes

from lightning_recorder import RecorderWarning, StatisticsRecorder
from lightning_recorder.reductions import BatchSum, Norms, Reduction, Statistics
from lightning_recorder.schedule import Sampling
from lightning_recorder.statistics import EvaluationRecorder, Record, RunRecorder
from lightning_recorder.statistics.rank_channel import RankChannel
from lightning_recorder.statistics.rank_merging import Exchange, Merged
from lightning_recorder.statistics.sites import SiteStates
from lightning_recorder.statistics.snapshot import Snapshot
from lightning_recorder.taps import Site
from tests import forks

pytestmark = pytest.mark.slow

A, B, C = (Site(name, "out") for name in "abc")
WAIT_S = 120.0


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
    """Return the result of a merge as plain data."""
    found = None
    if merged.snapshot is not None:
        found = {site: (dict(each.scalars), each.bins) for site, each in merged.snapshot.statistics().items()}
    values = [pickle.loads(value) for value in merged.values]
    return {"found": found, "absent": merged.absent, "ranks": merged.ranks, "values": values}


def opened() -> Exchange:
    exchange = Exchange(torch.device("cpu"))
    assert exchange.agree(True, "same") == ""
    return exchange


# The work of the processes. Each function runs on every rank and returns the data to check.


def merged_twice(rank: int, calls: Counter[str]) -> Any:
    exchange = opened()
    calls.clear()
    pending = [exchange.submit(snapshot_of(a=tensor_of(rank)), value=(number, rank)) for number in (1, 2)]
    results = [{**seen(each.result()), "calls": dict(calls)} for each in pending]
    exchange.close()
    return results


def seen_later(rank: int, calls: Counter[str]) -> Any:
    """The last rank sees an additional site in the second of three merges only."""
    exchange = opened()
    tensors = {"a": tensor_of(rank)}
    pending = []
    for number in range(3):
        last = rank == exchange.ranks - 1
        own = {**tensors, **({"b": torch.ones(4)} if last and number == 1 else {})}
        pending.append(exchange.submit(snapshot_of(**own)))
    results = [seen(each.result()) for each in pending]
    exchange.close()
    return results


def one_failed(rank: int, calls: Counter[str]) -> Any:
    """Merge with a failed recorder on each rank in turn."""
    exchange = opened()
    results = [
        seen(exchange.submit(None if rank == failed else snapshot_of(a=tensor_of(rank))).result())
        for failed in range(exchange.ranks)
    ]
    exchange.close()
    return results


def all_failed(rank: int, calls: Counter[str]) -> Any:
    exchange = opened()
    result = seen(exchange.submit(None).result())
    exchange.close()
    return result


def nothing_seen(rank: int, calls: Counter[str]) -> Any:
    exchange = opened()
    result = seen(exchange.submit(snapshot_of()).result())
    exchange.close()
    return result


def copied(rank: int, calls: Counter[str]) -> Any:
    """All ranks but the first have copies of a site, and each a part of another one."""
    exchange = opened()
    snapshot = snapshot_of(a=torch.full((5,), 2.0), b=torch.full((5,), 2.0))
    result = seen(exchange.submit(snapshot, copies={A} if rank else ()).result())
    exchange.close()
    return result


def disabled(rank: int, calls: Counter[str]) -> Any:
    """Recording is disabled on no rank, on the first, on all, and again on none, in training and in evaluations."""
    module, records = nn.Identity(), list[Record]()
    options: dict[str, Any] = {"rank": rank, "exchange": opened()}
    run = RunRecorder(StatisticsRecorder({"a": module}), Sampling(1), records.append, **options)
    evaluation = EvaluationRecorder(StatisticsRecorder({"a": module}), "test", records.append, **options)
    for step, enabled in enumerate([True, rank > 0, False, True]):
        run.enabled = evaluation.enabled = enabled
        run.start_batch(step, 0)
        module(torch.ones(2))
        run.end_batch(stepped=True)
        run.interrupt()
        evaluation.start_batch()
        module(torch.ones(3))
        evaluation.end_batch()
        evaluation.finish(step, 0)
    completed = [each.complete() for each in records]
    results = [
        (each.step, each.stage, each.snapshot.statistics()[A].scalars["count"])
        for each in completed
        if each is not None
    ]
    options["exchange"].close()
    return results


def in_inference_mode(rank: int, calls: Counter[str]) -> Any:
    with torch.inference_mode():
        exchange = opened()
        result = seen(exchange.submit(snapshot_of([Norms()], a=tensor_of(rank))).result())
        exchange.close()
    return result


def of_other_shapes(rank: int, calls: Counter[str]) -> Any:
    exchange = opened()
    warned, places = [], []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            snapshot = snapshot_of([BatchSum()], a=torch.ones(2, 3 + rank), b=torch.ones(2, 3))
            merged = exchange.submit(snapshot).result()
        warned.append([str(each.message) for each in caught if issubclass(each.category, RecorderWarning)])
        if merged.snapshot is not None:
            places.append({site: sorted(each.tensors) for site, each in merged.snapshot.statistics().items()})
    exchange.close()
    return {"warned": warned, "places": places}


def agreed(rank: int, calls: Counter[str]) -> Any:
    """Agree with equal ranks, with the last one not ready, and with different settings on each."""
    exchange = Exchange(torch.device("cpu"))
    last = exchange.ranks - 1
    questions = [(True, "same"), (rank != last, "same"), (True, f"{rank}"), (True, "same")]
    answers = [(exchange.agree(ready, about), exchange.is_open) for ready, about in questions]
    exchange.close()
    return answers


def shared(rank: int, calls: Counter[str]) -> Any:
    """Two exchanges merge in turn, and one is closed before the other."""
    one, other = opened(), opened()
    pending = [each.submit(snapshot_of(a=tensor_of(rank)), scope=scope) for each, scope in ((one, "1"), (other, "2"))]
    one.close()
    pending.append(other.submit(snapshot_of(b=tensor_of(rank)), scope="2"))
    results = [seen(each.result())["found"] for each in pending]
    other.close()
    return [None if found is None else list(found) for found in results], RankChannel.current is None


def other_order(rank: int, calls: Counter[str]) -> Any:
    """The last rank submits two merges in another order than the others."""
    exchange = opened()
    scopes = ("1", "2") if rank < exchange.ranks - 1 else ("2", "1")
    pending = [exchange.submit(snapshot_of(a=tensor_of(rank)), scope=scope) for scope in (*scopes, "3")]
    results = [seen(each.result())["absent"] for each in pending]
    exchange.close()
    return results


def interrupted(rank: int, calls: Counter[str]) -> Any:
    """Only the first rank has submitted a merge when it is interrupted, and the others live on for a while."""
    exchange = opened()
    if rank:
        time.sleep(4.0)  # longer than the first rank waits for them
    pending = exchange.submit(snapshot_of(a=tensor_of(rank))) if rank == 0 else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exchange.close(interrupted=True)
        result = None if pending is None else seen(pending.result())
    return result, [str(each.message) for each in caught]


def dies(rank: int, calls: Counter[str]) -> Any:
    """The last rank ends between two merges."""
    exchange = opened()
    results = [seen(exchange.submit(snapshot_of(a=tensor_of(rank))).result())]
    if rank == exchange.ranks - 1:
        os._exit(0)
    results += [seen(exchange.submit(snapshot_of(a=tensor_of(rank))).result()) for _ in range(2)]
    exchange.close()
    return results


Act = Callable[[int, Counter[str]], Any]
ACTS: tuple[Act, ...] = (
    merged_twice, seen_later, one_failed, all_failed, nothing_seen, copied, disabled, in_inference_mode,
    of_other_shapes, agreed, shared, other_order, interrupted, dies,
)  # fmt: skip


def work(rank: int, ranks: int, folder: Path) -> None:
    """Run all cases as one of several processes."""
    calls: Counter[str] = Counter()
    for name in "all_gather", "reduce", "all_gather_object", "all_reduce", "broadcast", "barrier", "send", "recv":
        setattr(dist, name, _counting(name, getattr(dist, name), calls))
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=ranks)
    found: dict[str, Any] = {}
    for act in ACTS:
        calls.clear()
        torch.save(found, folder / f"{rank}.pt")
        found[act.__name__] = act(rank, calls)
    torch.save(found, folder / f"{rank}.pt")
    os._exit(0)  # the rank that has ended cannot destroy its process group


def _counting(name: str, function: Callable[..., Any], calls: Counter[str]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            calls[name] += 1
        return function(*args, **kwargs)

    return wrapper


@pytest.fixture(scope="module", params=[2, 3, 8])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of each process."""
    folder = tmp_path_factory.mktemp("exchange")
    forks.context()  # the processes are forks of one that has imported torch
    args = (request.param, folder)
    context: Any = start_processes(work, args, nprocs=request.param, join=False, start_method="forkserver")
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
    if len(tensors) == 1:
        return
    extremes = [scalars["rank_mean_min"], scalars["rank_mean_max"]]
    assert extremes == pytest.approx([min(means), max(means)], rel=1e-12)


def test_rank_zero_has_what_one_reduction_gives(ranks: list[dict[str, Any]]) -> None:
    """Rank zero has the merged states and the objects of all ranks, the others have none."""
    tensors = [tensor_of(rank) for rank in range(len(ranks))]
    for number, result in enumerate(ranks[0]["merged_twice"], start=1):
        check_statistics(result["found"][A], tensors)
        assert result["values"] == [(number, rank) for rank in range(len(ranks))]
        assert (result["absent"], result["ranks"]) == ((), len(ranks))
    assert [result["found"] for rank in ranks[1:] for result in rank["merged_twice"]] == [None] * 2 * (len(ranks) - 1)


def test_two_ranks_give_the_bits_of_a_merge_in_one_process(ranks: list[dict[str, Any]]) -> None:
    """The merged states of two ranks are bitwise those of merging the two states."""
    if len(ranks) > 2:
        pytest.skip("the order of the merges is that of the tree")
    one, other = Statistics(), Statistics()
    one.update(tensor_of(0))
    other.update(tensor_of(1))
    one.merge(other)
    expected = one.compute()
    scalars, bins = ranks[0]["merged_twice"][0]["found"][A]
    assert {name: scalars[name] for name in ("mean", "std", "rms")} == {
        name: float(expected[name]) for name in ("mean", "std", "rms")
    }
    assert torch.equal(bins, expected["histogram"].long())


def test_the_training_thread_waits_for_no_transfer(ranks: list[dict[str, Any]]) -> None:
    """Merges take no transfer in the thread that submits them."""
    assert [result["calls"] for rank in ranks for result in rank["merged_twice"]] == [{}] * 2 * len(ranks)


def test_a_site_that_one_rank_sees_later_hangs_nobody(ranks: list[dict[str, Any]]) -> None:
    """A site that one rank sees later is in the result of that merge only, and causes no deadlock."""
    before, then, after = (result["found"] for result in ranks[0]["seen_later"])
    assert [set(before), set(then), set(after)] == [{A}, {A, B}, {A}]
    scalars = then[B][0]
    assert [scalars[name] for name in ("count", "mean", "rank_mean_min", "rank_mean_max")] == [4, 1, 1, 1]


def test_a_rank_that_has_failed_costs_its_share(ranks: list[dict[str, Any]]) -> None:
    """If a rank has failed, even rank zero, the result has the other ranks, and rank zero knows which failed."""
    for failed in range(len(ranks)):
        others = [tensor_of(rank) for rank in range(len(ranks)) if rank != failed]
        check_statistics(ranks[0]["one_failed"][failed]["found"][A], others)
        result = ranks[0]["one_failed"][failed]
        assert (result["absent"], result["ranks"]) == ((failed,), len(ranks) - 1)


@pytest.mark.parametrize("act", ["all_failed", "nothing_seen"])
def test_nothing_merges_to_nothing(ranks: list[dict[str, Any]], act: str) -> None:
    """If no rank has a state, the result is empty."""
    # The first rank has states of its own, which are empty.
    assert ranks[0][act]["found"] == ({} if act == "nothing_seen" else None)
    assert [rank[act]["found"] for rank in ranks[1:]] == [None] * (len(ranks) - 1)
    assert ranks[0][act]["absent"] == (tuple(range(len(ranks))) if act == "all_failed" else ())


def test_a_step_is_recorded_unless_recording_is_disabled_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    """If recording is disabled on rank zero alone, the record has the other ranks; if on all, there is none."""
    others, every = len(ranks) - 1, len(ranks)
    expected = [(0, every), (1, others), (3, every)]
    assert sorted(ranks[0]["disabled"]) == sorted(
        (step, stage, numel * number) for step, number in expected for stage, numel in (("train", 2), ("test", 3))
    )
    assert all(rank["disabled"] == [] for rank in ranks[1:])


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


def test_exchanges_share_a_channel(ranks: list[dict[str, Any]]) -> None:
    """Several exchanges use one process group until the last one is closed."""
    expected = [[[A], [A], [B]], True]
    assert list(ranks[0]["shared"]) == expected
    assert [rank["shared"] for rank in ranks[1:]] == [([None] * 3, True)] * (len(ranks) - 1)


def test_a_rank_with_other_records_hangs_nobody(ranks: list[dict[str, Any]]) -> None:
    """A rank that merges its records in another order is absent from these, and in the next one again."""
    last = len(ranks) - 1
    assert ranks[0]["other_order"] == [(last,), (last,), ()]


def test_an_interrupted_run_waits_for_nobody(ranks: list[dict[str, Any]]) -> None:
    """If other ranks do not reach a merge, the first rank has its own states, and warns."""
    result, warned = ranks[0]["interrupted"]
    check_statistics(result["found"][A], [tensor_of(0)])
    assert result["ranks"] == 1
    assert [message.partition(":")[0] for message in warned] == ["the last records are those of rank 0 only"]


def test_the_others_merge_without_a_rank_that_has_died(ranks: list[dict[str, Any]]) -> None:
    """After the sudden end of a process, the records have the other ranks."""
    last = len(ranks) - 1
    before, *after = ranks[0]["dies"]
    assert (before["absent"], before["ranks"]) == ((), last + 1)
    for result in after:
        assert (result["absent"], result["ranks"]) == ((last,), last)
        check_statistics(result["found"][A], [tensor_of(rank) for rank in range(last)])


def test_without_processes_there_is_nothing_to_merge() -> None:
    """A process without initialized ``torch.distributed`` needs no exchange."""
    assert not Exchange.is_needed()
