"""Tests of the composite sink."""

from __future__ import annotations

import json
import logging
import threading
import time
import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest
from typing_extensions import override

from lightning_recorder import MemorySink, RecorderWarning, Sink
from lightning_recorder.sinks import Destination, FilesSink, MultiSink
from tests.sinks.samples import VERBS, write


class Numbers(Sink):
    """A sink that supports only scalars."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    @override
    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> bool:
        self.seen.append(step)
        return True


class Broken(Sink):
    """A sink that raises from chosen methods and counts its calls."""

    def __init__(self, *methods: str, error: type[BaseException] = ConnectionError) -> None:
        self.methods = methods
        self.error = error
        self.calls: list[str] = []

    def _call(self, method: str) -> bool:
        self.calls.append(method)
        if method in self.methods:
            raise self.error(f"no {method}")
        return True

    @override
    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> bool:
        return self._call("write_scalars")

    @override
    def write_text(self, step: int, texts: Mapping[str, str]) -> bool:
        return self._call("write_text")

    @override
    def flush(self) -> None:
        self._call("flush")

    @override
    def close(self) -> None:
        self._call("close")


@pytest.mark.parametrize("verb", VERBS)
def test_all_sinks_get_all_kinds(verb: str, tmp_path: Path) -> None:
    """Each sink receives each kind once."""
    sinks = [MemorySink(), MemorySink()]
    assert write(MultiSink(sinks), verb, 3, "tag", tmp_path)
    kept = [
        {kind: {tag: list(steps) for tag, steps in values.items()} for kind, values in vars(sink).items()}
        for sink in sinks
    ]
    assert kept[0] == kept[1]
    assert [values for values in kept[0].values() if values] == [{"tag": [3]}]


def test_the_answer_is_that_of_any() -> None:
    """A verb returns True if any of the sinks supports the kind."""
    for sinks in ([Sink(), Numbers()], [Numbers(), Sink()]):
        assert MultiSink(sinks).write_scalars(3, {"a": 1.0}) is True
        assert MultiSink(sinks).write_text(3, {"a": "text"}) is False


def test_a_sink_that_fails_gives_one_warning_and_is_skipped() -> None:
    """A failing sink causes one warning with its name and error, and is skipped; the others continue."""
    broken, memory = Broken("write_scalars"), MemorySink()
    multi = MultiSink([broken, memory])

    def write_all(step: int) -> bool:
        multi.write_text(step, {"t": "text"})
        multi.flush()
        return multi.write_scalars(step, {"a": float(step)})

    with pytest.warns(RecorderWarning) as warned_texts:
        assert [write_all(step) for step in (1, 2, 3)] == [True, True, True]
    (warning,) = warned_texts
    assert str(warning.message) == (
        "Broken.write_scalars failed, and nothing more is written to it: ConnectionError: no write_scalars"
    )
    assert broken.calls == ["write_text", "flush", "write_scalars"]
    assert memory.scalars == {"a": {1: 1.0, 2: 2.0, 3: 3.0}}
    assert list(memory.texts["t"]) == [1, 2, 3]


def test_one_sink_does_not_speak_for_its_class() -> None:
    """Only the failed one of two sinks of the same class is skipped."""
    broken, sound = Broken("write_scalars"), Broken()
    multi = MultiSink([broken, sound])
    with pytest.warns(RecorderWarning):
        multi.write_scalars(1, {"a": 1.0})
    multi.write_scalars(2, {"a": 1.0})
    assert (broken.calls, sound.calls) == (["write_scalars"], ["write_scalars"] * 2)


def test_a_failing_flush_gives_a_warning_too() -> None:
    """A sink that fails to flush is skipped like one that fails to write."""
    broken, memory = Broken("flush"), MemorySink()
    multi = MultiSink([broken, memory])
    with pytest.warns(RecorderWarning, match=r"Broken.flush failed"):
        multi.flush()
    assert multi.write_scalars(1, {"a": 1.0})
    assert broken.calls == ["flush"]


def test_close_closes_all() -> None:
    """Every sink is closed, including those that failed before, and each failure causes one warning."""
    sinks = [Broken("write_scalars", "close"), Broken("close"), Broken()]
    fallback = Broken("close")
    multi = MultiSink(sinks, fallback=fallback)
    with pytest.warns(RecorderWarning, match=r"Broken.write_scalars failed"):
        multi.write_scalars(1, {"a": 1.0})
    with pytest.warns(RecorderWarning, match=r"Broken.close failed") as warned_texts:
        multi.close()
    assert len(warned_texts) == 2
    assert [sink.calls.count("close") for sink in (*sinks, fallback)] == [1, 1, 1, 1]


def test_close_continues_under_strict() -> None:
    """With ``strict``, every sink is closed before the first error is raised."""
    sinks = [Broken("close", error=ValueError), Broken("close", error=KeyError), Broken()]
    multi = MultiSink(sinks, strict=True)
    with pytest.raises(ValueError, match="no close"):
        multi.close()
    assert [sink.calls for sink in sinks] == [["close"]] * 3


def test_strict_raises_when_all_have_had_their_turn() -> None:
    """With ``strict``, the first error is raised without a warning after the other sinks have written."""
    first, second, memory = Broken("write_scalars", error=ValueError), Broken("write_scalars"), MemorySink()
    multi = MultiSink([first, second, memory], strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="no write_scalars"):
            multi.write_scalars(1, {"a": 1.0})
    assert memory.scalars == {"a": {1: 1.0}}
    assert second.calls == ["write_scalars"]


def test_an_interrupt_is_no_fault_of_a_sink() -> None:
    """A KeyboardInterrupt during a write passes through, and the sink is not skipped."""
    broken = Broken("write_scalars", error=KeyboardInterrupt)
    multi = MultiSink([broken])
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            multi.write_scalars(1, {"a": 1.0})
    assert len(broken.calls) == 2


def test_the_fallback_gets_what_nobody_shows(caplog: pytest.LogCaptureFixture) -> None:
    """The fallback receives only the kinds that no sink supports, and its first use for each is logged."""
    numbers, fallback = Numbers(), MemorySink()
    multi = MultiSink([numbers, Sink()], fallback=fallback)
    with caplog.at_level(logging.INFO, "lightning_recorder"):
        for step in (1, 2):
            assert multi.write_scalars(step, {"a": 1.0})
            assert multi.write_text(step, {"t": "text"})
            assert multi.write_files(step, {"f": Path("x")})
    assert numbers.seen == [1, 2]
    assert (fallback.scalars, list(fallback.texts["t"]), list(fallback.files["f"])) == ({}, [1, 2], [1, 2])
    assert [record.getMessage() for record in caplog.records] == [
        "no logger takes text: look in MemorySink",
        "no logger takes files: look in MemorySink",
    ]


def test_the_fallback_takes_over_from_a_sink_that_failed(tmp_path: Path) -> None:
    """If the only sink for a kind fails, the fallback receives that result and all later ones."""
    fallback = MemorySink()
    multi = MultiSink([Broken("write_scalars")], fallback=fallback)
    with pytest.warns(RecorderWarning):
        assert multi.write_scalars(1, {"a": 1.0})
    assert multi.write_scalars(2, {"a": 2.0})
    assert fallback.scalars == {"a": {1: 1.0, 2: 2.0}}


def test_a_fallback_that_fails() -> None:
    """A failing fallback causes one warning, and the verb returns False."""
    fallback = Broken("write_text")
    multi = MultiSink([], fallback=fallback)
    with pytest.warns(RecorderWarning, match=r"Broken.write_text failed") as warned_texts:
        assert [multi.write_text(step, {"t": "text"}) for step in (1, 2)] == [False, False]
    assert len(warned_texts) == 1
    assert fallback.calls == ["write_text"]


def test_a_folder_that_cannot_be_made_costs_the_files_alone(tmp_path: Path) -> None:
    """A files sink that cannot write does not affect the others, and writes when it can."""
    (tmp_path / "taken").write_text("a file")
    memory = MemorySink()
    multi = MultiSink([FilesSink(tmp_path / "taken"), memory])
    with pytest.warns(RecorderWarning, match=r"lightning_recorder could not write to .*taken"):
        multi.write_scalars(1, {"a": 1.0})
    multi.write_scalars(2, {"a": 2.0})
    (tmp_path / "taken").unlink()
    multi.write_scalars(3, {"a": 3.0})
    assert memory.scalars == {"a": {1: 1.0, 2: 2.0, 3: 3.0}}
    assert json.loads((tmp_path / "taken" / "scalars.jsonl").read_text()) == {"step": 3, "scalars": {"a": 3.0}}


def test_a_sink_is_written_to_by_one_thread_at_a_time() -> None:
    """Two threads with the same sink do not write to it at the same time."""
    inside: list[int] = []
    most: list[int] = []

    class Counting(MemorySink):
        def write_scalars(self, step: int, scalars: Mapping[str, float]) -> bool:
            inside.append(step)
            time.sleep(0.001)
            most.append(len(inside))
            inside.pop()
            return True

    sink = Counting()

    def write() -> None:
        for step in range(20):
            MultiSink([sink]).write_scalars(step, {"a": 1.0})

    threads = [threading.Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 60


def test_additional_sinks_do_not_replace_the_fallback() -> None:
    """An additional sink receives everything, and the fallback still receives the kinds that no other sink supports."""
    numbers, fallback, own = Numbers(), MemorySink(), MemorySink()
    multi = MultiSink([numbers], fallback=fallback, additional=[own])
    assert multi.write_scalars(1, {"a": 1.0})
    assert multi.write_text(1, {"t": "text"})
    assert (numbers.seen, own.scalars, fallback.scalars) == ([1], {"a": {1: 1.0}}, {})
    assert list(own.texts["t"]) == list(fallback.texts["t"]) == [1]
    assert multi.sinks == [numbers, fallback, own]


def test_a_view_without_the_fallback_shares_the_failures() -> None:
    """A sink that fails in one of the two causes one warning and is skipped in both."""
    broken, fallback, own = Broken("write_text"), MemorySink(), MemorySink()
    multi = MultiSink([broken], fallback=fallback, additional=[own])
    files_only = multi.without_fallback()
    assert files_only.sinks == [broken, own]
    with pytest.warns(RecorderWarning, match=r"Broken.write_text failed") as warned:
        files_only.write_text(1, {"t": "text"})
    assert multi.write_text(2, {"t": "text"})
    assert len(warned) == 1
    assert broken.calls == ["write_text"]
    assert (list(fallback.texts["t"]), list(own.texts["t"])) == ([2], [1, 2])


def test_a_sink_is_skipped_while_its_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A destination on a full disk is skipped with one warning; the fallback is not used, and the others continue."""
    broken, fallback, own = Broken(), MemorySink(), MemorySink()
    multi = MultiSink([Destination(broken, tmp_path)], fallback=fallback, additional=[own])
    monkeypatch.setenv("LIGHTNING_RECORDER_DISK_RESERVE", str(2**62))
    with pytest.warns(RecorderWarning, match="skips writes to the disk") as warned:
        assert [multi.write_scalars(step, {"a": 1.0}) for step in (1, 2)] == [True, True]
    assert len(warned) == 1
    monkeypatch.setenv("LIGHTNING_RECORDER_DISK_RESERVE", "0")
    assert multi.write_scalars(3, {"a": 1.0})
    assert broken.calls == ["write_scalars"]
    assert (list(own.scalars["a"]), fallback.scalars) == ([1, 2, 3], {})
