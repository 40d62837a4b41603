"""Tests of the record pipeline: consumers, threads and failures."""

from __future__ import annotations

import signal
import sys
import threading
import tracemalloc
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typing_extensions import override

from lightning_recorder import MemorySink, RecorderWarning, StatisticsRecorder, disk, open_recording
from lightning_recorder.outputs import (
    DrawingTime,
    Plotter,
    RecordConsumer,
    RecordFile,
    RecordPipeline,
    SinkFormatter,
    pipeline,
)
from lightning_recorder.records import file as record_file
from lightning_recorder.records.counts import SparseCounts
from lightning_recorder.records.table import Schema, Table
from lightning_recorder.reductions import Norms
from lightning_recorder.sinks import BackgroundQueue, MultiSink, Sink, TensorBoardSink, for_any_thread, tensorboard
from lightning_recorder.statistics import Record
from lightning_recorder.statistics.snapshot import statistics_of
from lightning_recorder.taps import Site
from tests import forks
from tests.sinks.events import read_events


def record(step: int, value: float = 1.0, names: tuple[str, ...] = ("m",), **about: Any) -> Record:
    """Return a record of modules that are called in reverse order."""
    modules = {name: nn.Identity() for name in names}
    recorder = StatisticsRecorder(modules)
    with recorder:
        for place, module in enumerate(reversed(modules.values())):
            module(torch.tensor([value, value + place]))
    return Record(step, 0, recorder.snapshot(), **about)


class Noting(RecordConsumer):
    """A consumer that keeps its calls and their threads."""

    def __init__(self, fails_at: int = -1) -> None:
        self.seen: list[object] = []
        self.threads: set[int] = set()
        self.fails_at = fails_at

    @override
    def on_record(self, found: Table) -> None:
        self.threads.add(threading.get_ident())
        self.seen.append(found.step)
        if found.step == self.fails_at:
            raise OSError("disk full")

    @override
    def end_epoch(self) -> None:
        self.seen.append("epoch")

    @override
    def finish(self) -> None:
        self.seen.append("end")


class OfOneThread(MemorySink):
    """A sink that may only be written to by one thread."""

    any_thread = False

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()

    @override
    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> bool:
        self.threads.add(threading.get_ident())
        return super().write_scalars(step, scalars)


def results(sink: Sink, *consumers: RecordConsumer, **options: Any) -> RecordPipeline:
    made = RecordPipeline(SinkFormatter("activations", ("mean",)), name="it", **options)
    made.begin(MultiSink([for_any_thread(sink)]), None, "activations")
    made.consumers = list(consumers)
    return made


@pytest.mark.parametrize("kind", [MemorySink, OfOneThread])
def test_consumers_receive_every_record_off_the_training_thread(kind: type[MemorySink]) -> None:
    """Consumers run in a background thread, whichever thread the sink needs, and receive all events in order."""
    sink, noting = kind(), Noting()
    made = results(sink, noting)
    made.add(record(0))
    made.end_epoch()
    made.add(record(1))
    made.end()
    assert noting.seen == [0, "epoch", 1, "end"]
    assert threading.get_ident() not in noting.threads
    assert list(sink.scalars["activations/m/mean"]) == [0, 1]
    if isinstance(sink, OfOneThread):
        assert sink.threads == {threading.get_ident()}


def test_a_failing_consumer_costs_nothing_but_itself() -> None:
    """A failing consumer causes one warning with its name; the sink and the other consumers receive all records."""
    sink, bad, good = MemorySink(), Noting(fails_at=1), Noting()
    made = results(sink, bad, good)

    def go() -> None:
        for step in range(3):
            made.add(record(step))
            made.wait()
        made.end()

    with pytest.warns(RecorderWarning, match="^it writes no more Noting: OSError: disk full$") as seen:
        go()
    assert len(seen) == 1
    assert (bad.seen, good.seen) == ([0, 1], [0, 1, 2, "end"])
    assert list(sink.scalars["activations/m/mean"]) == [0, 1, 2]


def test_a_failing_consumer_is_raised_if_strict() -> None:
    """With ``strict``, the error of a consumer is raised when the next record is added or at the end."""
    made = results(MemorySink(), Noting(fails_at=0), strict=True)
    made.add(record(0))
    with pytest.raises(OSError, match="disk full"):
        made.end()


@pytest.mark.parametrize("kind", [MemorySink, OfOneThread])
def test_pictures_reach_the_sink(kind: type[MemorySink]) -> None:
    """Images that a consumer writes in the background are in the sink at the end, whichever thread it needs."""
    sink = kind()
    made = results(sink)

    class Showing(Noting):
        @override
        def on_record(self, found: Table) -> None:
            made.show(found.step, {"picture": np.zeros((2, 2, 3), dtype=np.uint8)})

    made.consumers = [Showing()]
    made.add(record(4))
    made.end()
    assert list(sink.images["picture"]) == [4]


def test_the_file_of_records_is_read_back(tmp_path: Path) -> None:
    """The sites are listed in execution order, with dtype, shape, statistics and bins bit-exactly."""
    file = RecordFile(tmp_path, "activations", group="activations", ranks=2)
    given = record(3, 0.1, ("last", "first"))
    found = given.table()
    file.on_record(found)
    assert not list(tmp_path.iterdir())
    file.flush()
    series = open_recording(tmp_path)["activations"]
    assert series.sites == [("first", "out"), ("last", "out")]
    assert series.steps == [3]
    for site, seen in found.items():
        assert series[site.name].scalars(3) == dict(seen.scalars)
        assert torch.equal(series[site.name].bins(3), seen.bins)
        assert (series[site.name].dtype, series[site.name].shape) == ("float32", (2,))
    header, _ = series.path.read_bytes().split(b"\n", 1)
    assert file.written_bytes == series.path.stat().st_size - len(header) - 1
    assert series.about(3)["ranks"] == given.ranks


def test_gradients_are_listed_in_the_order_of_the_forward_pass(tmp_path: Path) -> None:
    """Gradients are listed in the order of the forward pass, although the backward pass is reversed."""
    given = record(0, names=("first", "last"))
    file = RecordFile(tmp_path, "gradients", group="gradients")
    file.on_record(given.table("gradients"))
    file.flush()
    assert [site.name for site in open_recording(tmp_path)["gradients"].sites] == ["first", "last"]


def plotted(records: int, **options: Any) -> list[tuple[int, list[str]]]:
    """Return the step and the tags of each drawing of a run."""
    shown: list[tuple[int, list[str]]] = []

    def show(step: int, images: Mapping[str, Any]) -> int:
        shown.append((step, sorted(images)))
        return 100 * len(images)

    plotter = Plotter("activations", **options, show=show)
    for step in range(records):
        given = record(step, names=("a", "b", "c"))
        plotter.on_record(given.table())
    plotter.finish()
    return shown


@pytest.mark.parametrize(
    ("records", "options", "steps"), [(3, {}, [2]), (45, {}, [44]), (7, {"every": 3}, [2, 5, 6]), (0, {}, [])]
)
def test_when_pictures_are_drawn(records: int, options: dict[str, Any], steps: list[int]) -> None:
    """Plots of a short run are drawn at its end if there are new records, or after every n-th on request."""
    assert [step for step, _ in plotted(records, max_images=0, **options)] == steps


def test_pictures_take_two_percent_of_the_time() -> None:
    """A drawing is allowed when its expected time and that of the previous ones are 2 % of the time that has passed."""
    now = 1000.0
    limit = DrawingTime(lambda: now)
    now += 199.0
    assert limit.reserve() is None
    now += 1.0
    assert limit.reserve() == 4.0
    assert limit.reserve() is None
    limit.settle(4.0, 2.5)
    assert limit.spent_s == 2.5
    now += 49.0  # 2 % of 249 s are 4.98 s
    assert limit.reserve() is None
    now += 1.0
    assert limit.reserve() == 2.5


@pytest.mark.slow
def test_pictures_of_a_long_run_are_drawn_by_another_process() -> None:
    """After 10, 20, 40, … records another process draws, if the time allows, and the next record shows the pictures."""
    shown: list[tuple[int, dict[str, Any]]] = []
    now = 0.0
    limit = DrawingTime(lambda: now)
    plotter = Plotter(
        "activations", max_images=1, limit=limit, show=lambda step, images: shown.append((step, dict(images)))
    )
    processes = []
    for step in range(15):
        now += 1000.0
        given = record(step, names=("a", "b", "c"))
        plotter.on_record(given.table())
        if plotter._started is not None:
            processes.append(plotter._started.process._process)
            plotter.wait()
    spent_s = limit.spent_s
    plotter.finish()
    assert [step for step, _ in shown] == [9, 14]
    assert all(process.returncode == 0 for process in processes)
    assert 0 < spent_s < 0.02 * now
    # The same pictures as this process draws: step 9 is that of the first drawing.
    again: list[dict[str, Any]] = []
    other = Plotter("activations", max_images=1, every=10, show=lambda step, images: again.append(dict(images)))
    for step in range(10):
        given = record(step, names=("a", "b", "c"))
        other.on_record(given.table())
    assert {tag: pixels.tolist() for tag, pixels in again[0].items()} == {
        tag: pixels.tolist() for tag, pixels in shown[0][1].items()
    }


def test_a_run_that_ends_while_another_process_draws() -> None:
    """The process is ended with the run, and the pictures of the whole run are drawn."""
    shown: list[int] = []
    now = 0.0
    plotter = Plotter("activations", limit=DrawingTime(lambda: now), show=lambda step, images: shown.append(step))
    for step in range(10):
        now += 1000.0
        given = record(step)
        plotter.on_record(given.table())
    assert plotter._started is not None
    process = plotter._started.process._process
    plotter.finish()
    assert process.returncode is not None
    assert shown == [9]


def test_without_another_process_pictures_are_drawn_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no process can be started, the pictures are drawn when the run ends."""
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    shown: list[int] = []
    now = 0.0
    plotter = Plotter("activations", limit=DrawingTime(lambda: now), show=lambda step, images: shown.append(step))
    for step in range(25):
        now += 1000.0
        given = record(step)
        plotter.on_record(given.table())
    plotter.finish()
    assert shown == [24]


def test_which_pictures_are_drawn() -> None:
    """The plots are heat maps of some statistics, the latest histograms, and the requested number of layers."""
    ((_, tags),) = plotted(2, max_images=2)
    assert tags == [
        "activations_plots/heat_map/mean",
        "activations_plots/heat_map/rms",
        "activations_plots/heat_map/zero_fraction",
        "activations_plots/over_time/a",
        "activations_plots/over_time/c",
        "activations_plots/ridge",
    ]


def test_of_very_many_sites_some_are_kept() -> None:
    """1,000 of 2,500 sites are kept, evenly spread with the unusual ones; one that becomes unusual later joins them."""
    plotter = Plotter("activations", every=2, show=lambda step, images: None)
    names = ("rms", "mean", "zero_fraction", "min", "max", "nan_count", "inf_count")
    sites = tuple(Site(f"m{number}", "out") for number in range(2500))
    schema = Schema(sites, names, ("float32",) * 2500, ((1,),) * 2500)
    numbers = np.tile([1.0, 0.0, 0.0, -1.0, 1.0, 0.0, 0.0], (2500, 1))
    found = Table(schema, numbers, SparseCounts(np.zeros((2500, 2048))))
    numbers[1001, 0] = 1e6
    plotter.on_record(found.having(about=record(0).facts("activations")))
    (history,) = plotter._histories.values()
    kept = [int(site.name[1:]) for site in history.sites]  # type: ignore[attr-defined]  # a Site
    assert len(kept) == 1000
    assert 1001 in kept
    assert max(after - before for before, after in pairwise(kept)) <= 4
    late = next(number for number in range(1500, 2500) if number not in kept)
    numbers[late, names.index("nan_count")] = 1.0
    plotter.on_record(found.having(about=record(1).facts("activations")))
    assert history.sites == [*(Site(f"m{number}", "out") for number in kept), Site(f"m{late}", "out")]


def test_a_loss_has_no_row_among_the_layers() -> None:
    """Losses and what enters them are left out of the plots, unless there is nothing else."""
    names = ("rms", "mean", "zero_fraction", "min", "max", "nan_count", "inf_count")
    layer, *losses = (Site("a", "out"), Site("cross_entropy", "out"), Site("criterion", "in.target"))
    for sites, drawn in (((losses[0], layer, losses[1]), [layer]), (tuple(losses), losses)):
        plotter = Plotter("activations", every=2, show=lambda step, images: None)
        schema = Schema(sites, names, ("float32",) * len(sites), ((1,),) * len(sites))
        found = Table(schema, np.ones((len(sites), len(names))), SparseCounts(np.zeros((len(sites), 2048))))
        plotter.on_record(found.having(about=record(0).facts("activations")))
        (history,) = plotter._histories.values()
        assert history.sites == drawn


def test_a_heat_map_for_each_statistic_that_was_asked_for() -> None:
    """Statistics of the user, quantiles and those of extra reductions have heat maps; others have none."""
    images: dict[str, Any] = {}
    plotter = Plotter("activations", statistics=["std"], max_images=0, show=lambda step, found: images.update(found))
    module = nn.Identity()
    with StatisticsRecorder({"a": module}, extra=[Norms()], quantiles=[0.9]) as recorder:
        module(torch.ones(3))
    plotter.on_record(Record(0, 0, recorder.snapshot()).table())
    plotter.finish()
    names = [tag.rpartition("/")[2] for tag in images if "heat_map" in tag]
    assert names == ["std", "quantile_0.9", "abs_max", "l1_norm", "l2_norm"]


@pytest.mark.parametrize("about", [{"stage": "validate"}, {"overflowed": True}])
def test_of_what_no_pictures_are_drawn(about: dict[str, Any]) -> None:
    """Evaluations and overflowed steps are not plotted."""
    shown: list[int] = []
    plotter = Plotter("activations", show=lambda step, images: shown.append(step))
    given = record(0, **about)
    plotter.on_record(given.table())
    plotter.finish()
    assert shown == []


def test_large_pictures_are_written_before_the_next_ones_are_drawn() -> None:
    """At most a few megabytes of pixels are in memory; small pictures are written together."""

    def shown(names: tuple[str, ...]) -> list[dict[str, int]]:
        found: list[dict[str, int]] = []
        plotter = Plotter(
            "activations", show=lambda step, images: found.append({tag: each.nbytes for tag, each in images.items()})
        )
        given = record(0, names=names)
        plotter.on_record(given.table())
        plotter.finish()
        return found

    few, many = shown(("a", "b")), shown(tuple(f"layer{place}" for place in range(250)))
    assert len(few) == 1
    assert len(many) > 1
    assert all(sum(list(images.values())[:-1]) < 2**22 for images in many)
    tags = [tag for images in many for tag in images]
    assert len(tags) == len(set(tags)) > 10


@pytest.mark.parametrize(("options", "drawings"), [({}, 4), ({"every": 10}, 5), ({"every": 7}, 8)])
def test_what_pictures_will_take(options: dict[str, Any], drawings: int) -> None:
    """The forecast for 50 records uses the size of earlier drawings, or an estimate before the first one."""
    plotter = Plotter("activations", **options, max_images=1, show=lambda step, images: 700)
    assert plotter.logged_bytes(50) == drawings * 5 * 20_000
    given = record(0)
    plotter.on_record(given.table())
    plotter.finish()
    assert plotter.logged_bytes(50) == drawings * 700


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Join all records until something else is to be done."""
    monkeypatch.setattr(pipeline, "_JOIN_S", 1e6)


def test_dense_records_are_written_together(joined: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records that follow a written one soon are joined: one write to each file, with every record in order."""
    written: list[str] = []
    write = disk.append

    def watched(path: Path, data: bytes, **options: Any) -> int:
        written.append(path.name)
        return write(path, data, **options)

    for module in (tensorboard, record_file):
        monkeypatch.setattr(module, "append", watched)
    made = results(TensorBoardSink(tmp_path / "events"))
    made.consumers = [RecordFile(tmp_path, "activations", group="activations")]
    made.add(record(0))
    made.wait()
    first = len(written)
    for step in range(1, 20):
        made.add(record(step, float(step)))
    assert len(written) == first
    made.wait()
    assert sorted(name.partition(".")[0] for name in written[first:]) == ["activations", "events"]
    made.end()
    series = open_recording(tmp_path)["activations"]
    assert series.steps == list(range(20))
    assert series.values("max")[:, 0].tolist() == [1.0, *map(float, range(1, 20))]
    events = read_events(tmp_path / "events")
    assert [event.step for event in events.Scalars("activations/m/mean")] == list(range(20))


def test_joined_records_keep_their_place_among_other_jobs(joined: None) -> None:
    """The end of an epoch comes after the records before it and before the records after it."""
    made, consumer = results(MemorySink()), Noting()
    made.consumers = [consumer]
    for step in range(6):
        made.add(record(step))
        if step == 3:
            made.end_epoch()
    made.end()
    assert consumer.seen == [0, 1, 2, 3, "epoch", 4, 5, "end"]


def test_much_memory_does_not_wait(joined: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records are joined up to a limit of bytes; the states of a larger record are reduced before it waits."""
    monkeypatch.setattr(pipeline, "_MOST_JOINED_BYTES", 3 * 2057 * 8)
    made, consumer = results(MemorySink()), Noting()
    made.consumers = [consumer]
    names = ("a", "b", "c", "d")
    made.add(record(0))
    made.wait()
    large = record(1, names=names)
    made.add(large)
    assert large.snapshot.nbytes == 0
    for step in range(2, 9):
        made.add(record(step))
    made.end()
    assert consumer.seen == [*range(9), "end"]
    assert len(made.latest_of("train")) == 1


class Arriving:
    """An event of a GPU, as far as it is used: it has happened when somebody has waited for it."""

    def __init__(self) -> None:
        self.waited_in: set[int] = set()

    def query(self) -> bool:
        return bool(self.waited_in)

    def synchronize(self) -> None:
        self.waited_in.add(threading.get_ident())


def test_the_training_thread_does_not_wait_for_states_that_arrive(
    joined: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States on their way from a GPU are awaited by the writer, unless they are very large."""
    monkeypatch.setattr(pipeline, "_MOST_JOINED_BYTES", 3 * 2057 * 8)
    for most, by_training in ((2**26, False), (0, True)):
        monkeypatch.setattr(pipeline, "_MOST_ARRIVING_BYTES", most)
        made, event = results(MemorySink()), Arriving()
        large = record(0, names=("a", "b", "c", "d"))
        groups = large.snapshot.groups[0]
        groups[:] = [replace(each, arrival=event) for each in groups]
        made.add(large)
        assert (threading.get_ident() in event.waited_in) == by_training
        made.end()
        assert event.waited_in
        assert len(made.latest_of("train")) == 4


def test_an_error_in_joined_records_loses_no_earlier_one(joined: None, tmp_path: Path) -> None:
    """With ``strict``, the records before the failed one are in the file."""
    made = RecordPipeline(SinkFormatter("activations", ["mean"]), log=lambda line: None, strict=True)
    made.begin(None, None, "activations")
    made.consumers = [RecordFile(tmp_path, "activations", group="activations"), Noting(fails_at=2)]
    for step in range(4):
        made.add(record(step))
        if step == 2:
            with pytest.raises(OSError, match="disk full"):
                made.end()
            break
    assert open_recording(tmp_path)["activations"].steps == [0, 1, 2]


KILLED = """
import os, signal, sys
from pathlib import Path
from lightning_recorder.outputs import RecordFile
from lightning_recorder import MemorySink
from tests.outputs.test_pipeline import record, results

made = results(MemorySink())
made.consumers = [RecordFile(Path(sys.argv[1]), "activations", group="activations")]
for step in range(40):
    made.add(record(step))
    if step == 30:
        made.wait()  # as a checkpoint does
        print("saved", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_killed_run_has_the_records_before_its_checkpoint(tmp_path: Path) -> None:
    """After SIGKILL, all records before the last checkpoint are in the file, and every line is complete."""
    assert forks.run("-c", KILLED, tmp_path, folder=tmp_path) == ([-signal.SIGKILL], "saved\n")
    series = open_recording(tmp_path)["activations"]
    assert series.steps[:31] == list(range(31))
    assert series.skipped == 0


@pytest.mark.skipif(sys.platform != "linux", reason="lists the threads in /proc")
def test_joined_records_start_no_threads_of_torch() -> None:
    """The statistics of records of many sites, computed in the writer thread, start no pool of threads there."""
    names = tuple(f"m{place}" for place in range(100))
    snapshots = [record(step, names=names).snapshot for step in range(3)]
    started: set[Path] = set()
    tables: list[Table] = []

    def work() -> None:
        before = set(Path("/proc/self/task").iterdir())
        tables.extend(statistics_of(snapshots))
        started.update(set(Path("/proc/self/task").iterdir()) - before)

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        queue = BackgroundQueue()
        queue.submit(work)
        queue.drain()
    finally:
        torch.set_num_threads(threads)
    assert len(tables) == 3
    assert not started


STEPS = [{"a": 1, "b": 1}, {"c": 1, "b": 1}, {"a": 3}, {"b": 2}, {}, {"a": 1, "b": 1, "c": 1}, {"c": 2}, {"c": 1}]
"""The modules that are called in each step, with the number of their calls."""


@pytest.mark.parametrize("steps", [STEPS, STEPS[::-1]], ids=["forward", "reversed"])
def test_joined_records_of_other_sites_keep_their_rows(steps: list[dict[str, int]]) -> None:
    """Records computed together have their own sites, calls and values, though a step calls other modules."""
    modules = {name: nn.Identity() for name in "abc"}
    recorder = StatisticsRecorder(modules)
    snapshots = []
    with recorder:
        for step, calls in enumerate(steps):
            for name, times in calls.items():
                for call in range(times):
                    modules[name](torch.tensor([float(ord(name)), 1000.0 * step + call]))
            snapshots.append(recorder.snapshot())
            recorder.reset()
    for step, (calls, table) in enumerate(zip(steps, statistics_of(snapshots), strict=True)):
        found = {site.name: (each.count, each.min, each.max, int(each.bins.sum())) for site, each in table.items()}
        numbers = {
            name: [float(ord(name)), *(1000.0 * step + call for call in range(times))] for name, times in calls.items()
        }
        assert list(found) == sorted(calls)
        assert found == {
            name: (2 * calls[name], min(some), max(some), 2 * calls[name]) for name, some in numbers.items()
        }


def test_histograms_for_findings_are_not_kept() -> None:
    """The rules read the histograms of many sites; a record keeps none of them, each of which takes 16 KB."""
    names = tuple(f"m{place}" for place in range(200))
    (table,) = statistics_of([record(0, names=names).snapshot])
    tracemalloc.start()
    try:
        for site in table:
            histogram = table.histogram(site)
            assert histogram is not None
            assert histogram.count == table.column("count")[table.rows[site]]
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 200 * 1024
    one, other = table.histogram(table.sites[0]), table[table.sites[0]].histogram
    assert one is not None
    assert one.counts.tolist() == other.counts.tolist()
    assert one.edges.tolist() == other.edges.tolist()


def test_an_error_in_the_last_charts_loses_no_picture() -> None:
    """With ``strict``, the consumers have finished before a sink refuses what findings name at the end."""

    class Refusing(MemorySink):
        refuses = False

        @override
        def write_scalars(self, step: int, scalars: Mapping[str, float]) -> bool:
            if self.refuses:
                raise OSError("no room")
            return super().write_scalars(step, scalars)

    sink, consumer = Refusing(), Noting()
    made = RecordPipeline(SinkFormatter("activations", ("mean",)), strict=True)
    made.begin(MultiSink([sink], strict=True), None, "activations")
    made.consumers = [consumer]
    made.add(record(0))
    made.wait()
    sink.refuses = True
    made.formatter.named = lambda: {"m"}
    with pytest.raises(OSError, match="no room"):
        made.end()
    assert consumer.seen == [0, "end"]
