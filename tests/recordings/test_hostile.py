"""Tests of corrupted files: only errors of this package, and bounded memory."""

from __future__ import annotations

import contextlib
import io
import json
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_recorder import DumpError, RecorderError, capture_graph
from lightning_recorder.commands import main
from lightning_recorder.dumps import write_dump
from lightning_recorder.recordings import Recording, Run, Tolerance, compare, open_recording
from tests.recordings.runs import make_net, record_run, write_simple

FILES = (
    "recorder/records/activations.jsonl",
    "recorder/graph.json",
    "recorder/receipt.json",
    "recorder/dumps/recorder-manifest.jsonl",
    "recorder/dumps/a.safetensors",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with every kind of readable file."""
    log_dir = tmp_path_factory.mktemp("run")
    record_run(log_dir, steps=range(3))
    graph = capture_graph(make_net(), torch.ones(1, 6))
    (log_dir / "recorder" / "graph.json").write_text(json.dumps(graph.to_json()))
    (log_dir / "recorder" / "receipt.json").write_text('{"activations": {"step": 0}}')
    write_dump(log_dir / "recorder" / "dumps" / "a.safetensors", {"fc/out": torch.ones(3)}, {"fc": 3}, step=1)
    return log_dir


def guarded(read: Callable[[], object]) -> None:
    """Call a function and suppress the errors of this package."""
    with contextlib.suppress(RecorderError):
        read()


def read_all(recording: Recording) -> None:
    """Access everything in a recording."""
    for run in recording.runs.values():
        for part in (Run.graph, Run.receipt):
            guarded(partial(part.__get__, run))
        guarded(partial(read_dumps, run))
        for label in run:
            guarded(partial(read_series, run[label]))


def read_dumps(run: Run) -> None:
    """Access everything in the dumps of a run."""
    for dump in run.dumps:
        _ = dump.step, dump.kind, dump.size_bytes, repr(dump)
        guarded(lambda: dump.tensors)  # noqa: B023 - called immediately


def read_series(series: Any) -> None:
    """Access everything in a series."""
    for key in series.keys:
        part = series.of(key.stage, key.loader)
        _ = part.steps, part.epochs, part.sites, part.sessions, part.skipped, part.replaced, repr(part), part.seen()
        for name in part.statistics:
            part.values(name)
        for site in part.sites:
            one = part[site]
            _ = one.dtype, one.shape, repr(one), [one.statistic(name) for name in one.statistics]
            for step in one.steps:
                guarded(partial(one.histogram, step))


MUTATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("flip"), st.floats(0, 1), st.integers(0, 7)),
        st.tuples(st.just("cut"), st.floats(0, 1), st.integers(1, 200)),
        st.tuples(st.just("put"), st.floats(0, 1), st.binary(min_size=1, max_size=8)),
        st.tuples(
            st.just("put"), st.floats(0, 1), st.sampled_from([b"null", b"-1", b"1e999", b'"', b"[[", b"}", b"\n"])
        ),
        st.tuples(st.just("twice"), st.floats(0, 1), st.integers(1, 400)),
    ),
    min_size=1,
    max_size=6,
)


def mutated(data: bytes, mutations: list[tuple[str, float, Any]]) -> bytes:
    """Apply mutations to data, one after the other."""
    for kind, where, what in mutations:
        place = int(where * max(len(data) - 1, 0))
        if kind == "flip" and data:
            data = data[:place] + bytes([data[place] ^ (1 << what)]) + data[place + 1 :]
        elif kind == "cut":
            data = data[:place] + data[place + what :]
        elif kind == "put":
            data = data[:place] + what + data[place:]
        elif kind == "twice":
            data = data[:place] + data[place : place + what] + data[place:]
    return data


@pytest.mark.slow
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(name=st.sampled_from((FILES[0], *FILES)), mutations=MUTATIONS)
def test_mutated_files(name: str, mutations: list[tuple[str, float, Any]], run: Path) -> None:
    """After any change to a file, only errors of this package are raised, and commands exit with 0, 1 or 2."""
    path = run / name
    whole = path.read_bytes()
    path.write_bytes(mutated(whole, mutations))
    try:
        guarded(lambda: read_all(open_recording(run)))
        guarded(lambda: compare(open_recording(run).run, open_recording(run).run, Tolerance(exact=True)))
        arguments = [["ls"], ["ls", "--json"], ["show", "**"], ["diff", str(run)], ["graph", "--format", "text"]]
        assert {_status([first, str(run), *rest]) for first, *rest in arguments} <= {0, 1, 2}
    finally:
        path.write_bytes(whole)


def _status(arguments: list[str]) -> int:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return main(arguments)


GRAPHS = {
    "no object": lambda graph: [],
    "no nodes": lambda graph: {**graph, "nodes": []},
    "nodes that are none": lambda graph: {**graph, "nodes": [3]},
    "a node inside itself": lambda graph: changed(graph, 1, parent=1),
    "a node inside a later one": lambda graph: changed(graph, 1, parent=2),
    "two roots": lambda graph: changed(graph, 1, parent=None),
    "two nodes with one number": lambda graph: changed(graph, 2, id=1),
    "a name that is none": lambda graph: changed(graph, 1, name=["x"]),
    "a depth that is none": lambda graph: changed(graph, 1, depth="deep"),
    "a number that is none": lambda graph: changed(graph, 1, id=[1]),
    "no edges": lambda graph: {**graph, "edges": 3},
    "another version": lambda graph: {**graph, "version": 99},
}


def changed(graph: dict[str, Any], place: int, **fields: Any) -> dict[str, Any]:
    """Return a graph with changed fields in one node."""
    nodes = [{**node, **fields} if index == place else node for index, node in enumerate(graph["nodes"])]
    return {**graph, "nodes": nodes}


@pytest.mark.parametrize("change", GRAPHS.values(), ids=list(GRAPHS))
def test_a_graph_that_is_none(change: Callable[[Any], Any], tmp_path: Path) -> None:
    """An invalid graph, such as one with a node inside itself, raises an error before it is drawn."""
    write_simple(tmp_path, {0: 1.0})
    graph = capture_graph(make_net(), torch.ones(1, 6)).to_json()
    (tmp_path / "recorder" / "graph.json").write_text(json.dumps(change(json.loads(json.dumps(graph)))))
    with pytest.raises(DumpError, match=r"graph\.json"):
        _ = open_recording(tmp_path).graph


@pytest.mark.parametrize("name", ["graph.json", "receipt.json"])
@pytest.mark.parametrize(
    "content", ["[" * 100_000, "no JSON", "\udcff", '["a"]', "1" * 5000], ids=lambda text: text[:5]
)
def test_damaged_json(name: str, content: str, tmp_path: Path) -> None:
    """An unreadable graph or receipt raises an error that names the file; the records remain readable."""
    write_simple(tmp_path, {0: 1.0})
    (tmp_path / "recorder" / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    recording = open_recording(tmp_path)
    with pytest.raises(DumpError, match=name.replace(".", r"\.")):
        _ = recording.graph if name == "graph.json" else recording.receipt
    assert recording["activations"].steps == [0]


def test_bombs_take_no_memory(tmp_path: Path) -> None:
    """A line of 40 MB and a line nested a million levels deep are skipped in bounded memory."""
    writer = write_simple(tmp_path, {0: 1.0})
    with writer.path.open("ab") as file:
        file.write(b"[" * 10**6 + b"\n")
        file.writelines([b"x" * 10**6] * 40)
        file.write(b"\n")
    writer.write({"step": 1}, [])
    tracemalloc.start()
    series = open_recording(tmp_path)["activations"]
    assert (series.steps, series.skipped) == ([0, 1], 2)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 80 << 20
