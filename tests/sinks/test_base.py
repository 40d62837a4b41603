"""Tests of the sink interface."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger
from torch.utils.tensorboard import SummaryWriter

from lightning_recorder import MemorySink, Sink
from lightning_recorder.sinks import FilesSink, MetricsSink, MultiSink, TensorBoardSink
from tests.sinks.samples import VERBS, write

SCALARS = {"write_scalars"}
EVENTS = {"write_scalars", "write_histograms", "write_images", "write_text", "write_graph"}


def _csv(folder: Path) -> Any:
    return CSVLogger(folder)


SINKS: dict[str, tuple[Callable[[Path], Sink], set[str]]] = {
    "base": (lambda folder: Sink(), set()),
    "memory": (lambda folder: MemorySink(), set(VERBS)),
    "files": (FilesSink, set(VERBS)),
    "TensorBoard, folder": (TensorBoardSink, EVENTS),
    "TensorBoard, writer": (lambda folder: TensorBoardSink(SummaryWriter(str(folder))), EVENTS),
    "metrics": (lambda folder: MetricsSink(_csv(folder)), SCALARS),
    "multi, none": (lambda folder: MultiSink([]), set()),
    "multi": (lambda folder: MultiSink([Sink(), MetricsSink(_csv(folder))]), SCALARS),
    "multi, fallback": (lambda folder: MultiSink([Sink()], fallback=FilesSink(folder)), set(VERBS)),
}
every_sink = pytest.mark.parametrize(("make", "shown"), SINKS.values(), ids=SINKS)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@every_sink
@pytest.mark.parametrize("verb", VERBS)
def test_the_answer_says_whether_it_is_shown(
    make: Callable[[Path], Sink], shown: set[str], verb: str, tmp_path: Path
) -> None:
    """A verb returns True only if the sink supports the kind; an unsupported kind is ignored without an error."""
    folder = tmp_path / "sink"
    with make(folder) as sink:
        sink.flush()
        before = contents(folder)
        answer = write(sink, verb, 3, "group/name/part", tmp_path)
        assert answer is (verb in shown)
        sink.flush()
        if not answer:
            assert contents(folder) == before


@every_sink
@pytest.mark.parametrize("verb", VERBS)
def test_an_empty_mapping_is_no_error(make: Callable[[Path], Sink], shown: set[str], verb: str, tmp_path: Path) -> None:
    """An empty mapping returns the same value as a nonempty one."""
    with make(tmp_path) as sink:
        assert getattr(sink, verb)(3, {}) is (verb in shown)


@every_sink
def test_writing_a_tag_again(make: Callable[[Path], Sink], shown: set[str], tmp_path: Path) -> None:
    """A tag may be written again at the same step, at an earlier one, or with many others."""
    with make(tmp_path / "sink") as sink:
        for step in (3, 3, 1, 4):
            for verb in VERBS:
                assert write(sink, verb, step, "group/name", tmp_path) is (verb in shown)


@every_sink
def test_not_a_number_is_a_value(make: Callable[[Path], Sink], shown: set[str], tmp_path: Path) -> None:
    """NaN and infinities are written like other numbers."""
    with make(tmp_path) as sink:
        values = {"a": float("nan"), "b": float("inf"), "c": float("-inf")}
        assert sink.write_scalars(3, values) is ("write_scalars" in shown)


@every_sink
def test_closing_twice(make: Callable[[Path], Sink], shown: set[str], tmp_path: Path) -> None:
    """Closing is idempotent, with or without earlier writes and flushes."""
    sink = make(tmp_path / "sink")
    sink.close()
    sink.close()
    again = make(tmp_path / "again")
    write(again, "write_scalars", 3, "group/name", tmp_path)
    again.flush()
    again.close()
    again.close()


def test_leaving_the_context_closes() -> None:
    """Leaving the context of a sink closes it, even after an error."""

    class Counting(Sink):
        closed = 0

        def close(self) -> None:
            self.closed += 1

    with Counting() as sink:
        assert sink.closed == 0
    assert sink.closed == 1
    with pytest.raises(ArithmeticError), sink:
        raise ArithmeticError
    assert sink.closed == 2


def test_closing_flushes() -> None:
    """A sink that only overrides flush is flushed when it is closed."""

    class Flushing(Sink):
        flushed = 0

        def flush(self) -> None:
            self.flushed += 1

    sink = Flushing()
    sink.close()
    assert sink.flushed == 1
