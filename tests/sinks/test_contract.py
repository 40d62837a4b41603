"""Tests of the interface in ``sinks/base.py`` for every sink with its real back end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger
from torch.utils.tensorboard import SummaryWriter

from lightning_recorder import ArgumentError, MemorySink, Sink, sinks
from lightning_recorder.sinks import (
    CometSink,
    CsvSink,
    DeferredSink,
    FilesSink,
    LitLoggerSink,
    MetricsSink,
    MlflowSink,
    MultiSink,
    TensorBoardSink,
    WandbSink,
)
from tests.sinks.back_ends import comet_experiment, mlflow_run, wandb_run
from tests.sinks.lit_logger import lit_logger
from tests.sinks.samples import ODD_TAGS, OUTSIDE, VERBS, empty_histogram, graph, histogram, picture, write

Make = Callable[[Path, str], AbstractContextManager[Sink]]

ALL = set(VERBS)
NUMBERS = {"write_scalars"}


@contextmanager
def plain(sink: Sink) -> Iterator[Sink]:
    yield sink


@contextmanager
def on_wandb(folder: Path, mode: str) -> Iterator[Sink]:
    with wandb_run(folder, mode=mode) as run:
        yield WandbSink(run)


@contextmanager
def on_mlflow(folder: Path, database: str) -> Iterator[Sink]:
    with mlflow_run(database, folder) as (client, run_id):
        yield MlflowSink(client, run_id)


@contextmanager
def on_comet(folder: Path) -> Iterator[Sink]:
    with comet_experiment(folder) as experiment:
        yield CometSink(experiment)


def csv_logger(folder: Path) -> Any:
    return CSVLogger(folder)


SINKS: dict[str, tuple[Make, set[str]]] = {
    "base": (lambda folder, _: plain(Sink()), set()),
    "memory": (lambda folder, _: plain(MemorySink()), ALL),
    "files": (lambda folder, _: plain(FilesSink(folder)), ALL),
    "TensorBoard": (lambda folder, _: plain(TensorBoardSink(folder)), ALL - {"write_files"}),
    "TensorBoard, writer": (
        lambda folder, _: plain(TensorBoardSink(SummaryWriter(str(folder)))),
        ALL - {"write_files"},
    ),
    "metrics": (lambda folder, _: plain(MetricsSink(csv_logger(folder))), NUMBERS),
    "CSV": (lambda folder, _: plain(CsvSink(csv_logger(folder))), NUMBERS),
    "W&B": (lambda folder, _: on_wandb(folder, "offline"), ALL),
    "W&B, disabled": (lambda folder, _: on_wandb(folder, "disabled"), set()),
    "MLflow": (on_mlflow, ALL),
    "Comet": (lambda folder, _: on_comet(folder), ALL),
    "LitLogger": (lambda folder, _: plain(LitLoggerSink(lit_logger(folder))), NUMBERS | {"write_files"}),
    "multi, none": (lambda folder, _: plain(MultiSink([])), set()),
    "multi": (lambda folder, _: plain(MultiSink([Sink(), CsvSink(csv_logger(folder))])), NUMBERS),
    "multi, fallback": (lambda folder, _: plain(MultiSink([Sink()], fallback=FilesSink(folder))), ALL),
    "multi, strict": (lambda folder, _: plain(MultiSink([MemorySink(), FilesSink(folder)], strict=True)), ALL),
}
ANY_THREAD = (MemorySink, FilesSink, TensorBoardSink, WandbSink, MlflowSink)
every_sink = pytest.mark.parametrize(("make", "shown"), SINKS.values(), ids=SINKS)


def test_every_sink_is_tested(tmp_path: Path, database: str) -> None:
    """Each public sink is among the sinks of the contract; a deferred sink wraps one of them."""
    public = {each for each in vars(sinks).values() if isinstance(each, type) and issubclass(each, Sink)}
    made = set()
    for name, (make, _) in SINKS.items():
        with make(tmp_path / name, database) as sink:
            made.add(type(sink))
    assert public - made == {DeferredSink}


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@every_sink
def test_the_answer_says_whether_it_is_shown(make: Make, shown: set[str], tmp_path: Path, database: str) -> None:
    """A verb returns True only if the sink supports the kind; an unsupported kind is ignored without an error."""
    folder = tmp_path / "sink"
    with make(folder, database) as sink:
        sink.flush()
        for verb in VERBS:
            before = contents(folder)
            assert write(sink, verb, 3, "group/name/part", tmp_path) is (verb in shown)
            sink.flush()
            if verb not in shown:
                assert contents(folder) == before


@every_sink
def test_writing_nothing(make: Make, shown: set[str], tmp_path: Path, database: str) -> None:
    """An empty mapping returns the same value as a nonempty one."""
    with make(tmp_path / "sink", database) as sink:
        assert {verb for verb in VERBS if getattr(sink, verb)(3, {})} == shown


@every_sink
def test_writing_a_tag_again(make: Make, shown: set[str], tmp_path: Path, database: str) -> None:
    """A tag may be written again at the same step, at an earlier or at a later one."""
    with make(tmp_path / "sink", database) as sink:
        for step in (3, 3, 1, 4):
            assert {verb for verb in VERBS if write(sink, verb, step, "group/name", tmp_path)} == shown


@every_sink
def test_numbers_that_are_not_finite(make: Make, shown: set[str], tmp_path: Path, database: str) -> None:
    """NaN and infinities are written like other numbers, and a histogram may be empty."""
    with make(tmp_path / "sink", database) as sink:
        values = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 5e-324, "e": 1e308}
        assert sink.write_scalars(3, values) is ("write_scalars" in shown)
        assert sink.write_histograms(3, {"h": empty_histogram()}) is ("write_histograms" in shown)
        sink.flush()


@every_sink
def test_odd_tags(make: Make, shown: set[str], tmp_path: Path, database: str) -> None:
    """Any tag is written completely, and nothing is written outside the folder of the run."""
    folder, aside = tmp_path / "sink", tmp_path / "aside"
    aside.mkdir()
    before = {*tmp_path.iterdir(), folder}
    with make(folder, database) as sink:
        assert sink.write_scalars(3, dict.fromkeys(ODD_TAGS, 0.5)) is ("write_scalars" in shown)
        assert sink.write_histograms(3, dict.fromkeys(ODD_TAGS, histogram())) is ("write_histograms" in shown)
        assert sink.write_images(3, dict.fromkeys(ODD_TAGS, picture())) is ("write_images" in shown)
        assert sink.write_text(3, dict.fromkeys(ODD_TAGS, "text")) is ("write_text" in shown)
        assert sink.write_graph(3, dict.fromkeys(ODD_TAGS, graph())) is ("write_graph" in shown)
        sink.flush()
    assert {*tmp_path.iterdir(), folder} == before


@every_sink
def test_files_stay_in_the_run(make: Make, shown: set[str], tmp_path: Path, database: str) -> None:
    """A file name that points outside the run raises an error and writes nothing."""
    source = tmp_path / "source"
    source.write_text("text")
    with make(tmp_path / "sink", database) as sink:
        if "write_files" not in shown or isinstance(sink, MemorySink):
            return
        sinks = sink.sinks if isinstance(sink, MultiSink) else [sink]
        assert sink.write_files(3, {"a/b.txt": source})
        before = contents(tmp_path)
        for name in OUTSIDE:
            for each in sinks:
                if not isinstance(each, MemorySink) and type(each) is not Sink:
                    with pytest.raises(ArgumentError):
                        each.write_files(3, {name: source})
        assert set(contents(tmp_path)) == set(before)


@pytest.mark.parametrize("name", ["files", "W&B", "MLflow", "Comet", "LitLogger"])
def test_a_file_that_is_missing(name: str, tmp_path: Path, database: str) -> None:
    """A missing file raises the error of the operating system, even if the back end would ignore it."""
    make, _ = SINKS[name]
    with make(tmp_path / "sink", database) as sink, pytest.raises(FileNotFoundError):
        sink.write_files(3, {"a.txt": tmp_path / "nothing"})


@every_sink
def test_closing_twice(make: Make, shown: set[str], tmp_path: Path, database: str) -> None:
    """Closing is idempotent, with or without earlier writes and flushes."""
    for folder, verbs in (("sink", ()), ("again", VERBS)):
        with make(tmp_path / folder, database) as sink:
            for verb in verbs:
                write(sink, verb, 3, "group/name", tmp_path)
            sink.flush()
            sink.close()
            sink.close()


@every_sink
def test_where_a_sink_may_be_written_from(make: Make, shown: set[str], tmp_path: Path, database: str) -> None:
    """The sinks with ``any_thread`` are the expected ones, and a composite of them has it, too."""
    with make(tmp_path / "sink", database) as sink:
        each_may = [isinstance(each, ANY_THREAD) for each in (sink.sinks if isinstance(sink, MultiSink) else [sink])]
        assert sink.any_thread is all(each_may)
