"""Tests of corrupted files: only errors of this package, and bounded memory."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import math
import random
import shutil
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule

from lightning_recorder import DumpError, RecorderError, capture_graph
from lightning_recorder.callbacks.reproduce import reproduce
from lightning_recorder.commands import main
from lightning_recorder.dumps import write_dump
from lightning_recorder.functions import SCORES
from lightning_recorder.insight import Finding, Trace
from lightning_recorder.internals.random_states import RandomStates
from lightning_recorder.names import Site
from lightning_recorder.outputs import write_receipt
from lightning_recorder.page.live import LivePage
from lightning_recorder.recordings import Recording, Run, SiteStatistics, open_recording
from lightning_recorder.records.parts import HEAD_STATISTICS
from lightning_recorder.watch import KeptBatch
from lightning_recorder.watch.incident import read_incident, write_finding, write_incident
from tests.commands.console import run as command
from tests.recordings.runs import make_net, record_run, write_simple

FINDING = "recorder/incidents/step-1/finding.json"
INCIDENT = "recorder/incidents/step-1/incident.json"
FILES = (
    "recorder/records/activations.jsonl",
    "recorder/graph.json",
    "recorder/receipt.json",
    "recorder/dumps/recorder-manifest.jsonl",
    "recorder/dumps/a.safetensors",
    FINDING,
    INCIDENT,
    "recorder/incidents/step-1/random.safetensors",
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
    trace = Trace("activations", "rms", (0, 1), (1.0, math.nan), "encoder.fc")
    words: dict[str, Any] = {"verdict": "bad", "why": "so", "next": "try", "usual": "1"}
    numbers = {"values": 3.0, "largest": math.inf}
    finding = Finding("non-finite", "critical", "encoder.fc", "out", 1, 1, 1, numbers=numbers, trace=trace, **words)
    write_finding((log_dir / FINDING).parent, finding)
    kept = KeptBatch([torch.ones(2, 6), {"name": "a"}], 1, 1, 0, RandomStates(), [], [])
    write_incident(
        (log_dir / INCIDENT).parent,
        ABOUT,
        kept,
        state={},
        records={},
        graph="",
        max_bytes=2**20,
        save_batch=True,
        has_script=True,
    )
    return log_dir


ABOUT = {
    "step": 1,
    "epoch": 0,
    "batch_idx": 1,
    "global_step": 1,
    "accumulate_grad_batches": 1,
    "rank": 0,
    "model": {"module": "torch.nn", "name": "Identity", "file": None, "hparams": {}},
    "precision": "32-true",
    "accelerator": "cpu",
    "eval": [],
    "losses": ["nan"],
    "counters": {"": {"calls": 3}},
}


def guarded(read: Callable[[], object]) -> None:
    """Call a function and suppress the errors of this package."""
    with contextlib.suppress(RecorderError):
        read()


def read_all(recording: Recording) -> None:
    """Access everything in a recording."""
    for run in recording.runs.values():
        for part in (Run.graph, Run.receipt, Run.findings):
            guarded(partial(part.__get__, run))
        guarded(partial(read_dumps, run))
        guarded(partial(read_incident, (run.log_dir / INCIDENT).parent))
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


WRONG = [
    *(None, True, -1, 0, 2**63, 10**30, 1e308, -0.5, "", "x", "critical", "nan", "\ud800", [], {}, [[]], {"a": 1}),
    *("x" * 3000, [1, 2, 3], json.loads("[" * 300 + "]" * 300)),
]


def places(data: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the keys that lead to each value inside of JSON values."""
    keys: Iterable[Any] = data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    for key in keys:
        yield (*place, key)
        yield from places(data[key], (*place, key))


def with_wrong_values(data: Any, rng: random.Random) -> Any:
    """Return JSON values in which some are missing, of another type, or at another place."""
    for _ in range(rng.choice([1, 1, 2, 3])):
        found = list(places(data))
        if not found:
            break
        *way, last = rng.choice(found)
        at = data
        for key in way:
            at = at[key]
        if rng.random() < 0.2:
            del at[last]
        else:
            at[last] = copy.deepcopy(rng.choice(WRONG))
    return data


def damaged(content: bytes, name: str, rng: random.Random) -> bytes:
    """Return the content of a file with wrong values in its JSON, or with changed bytes."""
    if name.endswith(".safetensors") or rng.random() < 0.4:
        kinds = {"flip": rng.randrange(8), "cut": rng.randrange(1, 200), "put": rng.choice(TEXTS), "twice": 50}
        return mutated(content, [(kind, rng.random(), kinds[kind]) for kind in rng.choices(list(kinds), k=2)])
    lines = content.splitlines() if name.endswith(".jsonl") else [content]
    place = rng.randrange(len(lines))
    lines[place] = json.dumps(with_wrong_values(json.loads(lines[place]), rng)).encode()
    return b"\n".join([*lines, b""])


TEXTS = [b"null", b"-1", b"1e999", b'"', b"[[", b"}", b"\n", b"[" * 5000, b"9" * 5000, b"\xff\xfe", b"NaN"]
COMMANDS = [
    ("ls",),
    ("ls", "--json"),
    ("show", "**"),
    ("show", "**", "--details"),
    ("doctor",),
    ("doctor", "--json", "--all"),
    ("graph", "--format", "text"),
    ("graph", "--json"),
    ("show", "**", "--json"),
    ("doctor", "--format", "sarif"),
    ("doctor", "--format", "junit"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_damaged_files(name: str, run: Path, tmp_path: Path) -> None:
    """After each of 150 changes to a file, only errors of this package are raised, and commands exit with 0, 1 or 2."""
    path = run / name
    whole = path.read_bytes()
    commands = [(first, str(run), *rest) for first, *rest in COMMANDS]
    commands += [("diff", str(run), str(run), "--exact"), ("diff", "--ranks", str(run))]
    commands += [
        ("export", str(run), str(tmp_path / "a.csv")),
        ("view", str(run), "--output", str(tmp_path / "a.html")),
    ]
    page = LivePage([run])
    (shown,), site = page.data()["runs"], open_recording(run).run["activations"].sites[0]
    asked = {"run": [shown["name"]], "recorder": ["activations"], "stage": ["train"], "module": [site.name]}
    asked["path"] = [site.path]
    assert page.site(asked)
    readers: list[Callable[[], object]] = [
        lambda: read_all(open_recording(run)),
        lambda: LivePage([run]).html().encode(),
        lambda: page.site(asked),  # of a server that has read the file before
    ]
    try:
        for number in range(150):
            path.write_bytes(damaged(whole, name, random.Random(f"{name} {number}")))
            # Most of what a command reads is what the others read, so each change meets one reader and one command.
            guarded(readers[number % len(readers)])
            assert _status(list(commands[number % len(commands)])) in (0, 1, 2), number
    finally:
        path.write_bytes(whole)


class Constant(LightningModule):
    """A model whose loss does not depend on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.calls = torch.nn.Parameter(torch.ones(2)), 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.weight.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", [INCIDENT, "recorder/incidents/step-1/random.safetensors", "last.ckpt"])
def test_damaged_files_of_an_incident(name: str, copied: Path) -> None:
    """A step that is run again from damaged files either runs or raises an error of this package."""
    checkpoint, path = copied / "last.ckpt", copied / name
    torch.save({"state_dict": Constant().state_dict()}, checkpoint)
    whole = path.read_bytes()
    for number in range(60):
        rng = random.Random(f"{name} {number}")
        path.write_bytes(damaged(whole, name if name != "last.ckpt" else "x.safetensors", rng) if number else whole)
        runs: Callable[[], object] = lambda: reproduce((copied / INCIDENT).parent, Constant(), checkpoint=checkpoint)  # noqa: E731
        guarded(runs) if number else runs()


FINDINGS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a severity that is no string": lambda finding: finding | {"severity": ["critical"]},
    "a step that is a string": lambda finding: finding | {"first_step": "1"},
    "a huge step": lambda finding: finding | {"first_step": 10**30},
    "a huge number": lambda finding: finding | {"numbers": {"values": 10**400}},
    "a verdict that is none": lambda finding: finding | {"verdict": None},
    "others that are no strings": lambda finding: finding | {"others": [1]},
    "a trace of another length": lambda finding: finding | {"trace": {**finding["trace"], "steps": [0]}},
    "deep nesting": lambda finding: finding | {"why": json.loads("[" * 300 + "]" * 300)},
    "no finding": lambda finding: 3,
}


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    """A copy of the run."""
    return shutil.copytree(run, tmp_path / "copy")


@pytest.mark.parametrize("change", FINDINGS.values(), ids=list(FINDINGS))
def test_a_finding_that_is_none(change: Callable[[Any], Any], copied: Path) -> None:
    """A finding with a wrong value is an error that names the file, for each command that examines the run."""
    data = json.loads((copied / FINDING).read_text())
    data["findings"] = [change(data["findings"][0])]
    (copied / FINDING).write_text(json.dumps(data))
    with pytest.raises(DumpError, match=r"finding\.json cannot be read"):
        _ = open_recording(copied).findings
    assert _status(["doctor", str(copied)]) == 2
    assert _status(["view", str(copied), "--output", str(copied / "a.html")]) == 2


def test_a_finding_of_a_later_version(copied: Path) -> None:
    """A finding with an unknown rule and severity is shown with both names, after the warnings."""
    data = json.loads((copied / FINDING).read_text())
    (known,) = data["findings"]
    data["findings"] = [known | {"rule": "new-rule", "severity": "grave", "module": "head", "later": 3}, known]
    (copied / FINDING).write_text(json.dumps(data))
    said = command("doctor", copied)
    lines = [line for line in said.out.splitlines() if line.startswith(("critical:", "grave:"))]
    assert (said.status, lines) == (1, ["critical: bad", "grave: bad"])
    assert "grave" in open_recording(copied)._repr_html_()
    shown = LivePage([copied]).data()["runs"][0]["findings"][-1]
    assert (shown["rule"], shown["severity"]) == ("new-rule", "grave")


@pytest.mark.parametrize("fields", [{"step": "1"}, {"step": 10**30}, {"model": None}, {"random": {}}, {"batch": []}])
def test_an_incident_that_is_none(fields: dict[str, Any], copied: Path) -> None:
    """An incident with a wrong value is an error that names the file."""
    about = json.loads((copied / INCIDENT).read_text()) | fields
    (copied / INCIDENT).write_text(json.dumps(about))
    with pytest.raises(DumpError, match=r"incident\.json is damaged"):
        read_incident((copied / INCIDENT).parent)


@pytest.mark.parametrize("content", ["[]", "[" * 100_000, "3", "\x00"], ids=lambda text: text[:3])
def test_a_damaged_receipt_is_replaced(content: str, tmp_path: Path) -> None:
    """A recorder that finds a damaged receipt writes its own."""
    (tmp_path / "receipt.json").write_text(content)
    write_receipt(tmp_path, "activations", {"step": 0})
    assert json.loads((tmp_path / "receipt.json").read_text()) == {"activations": {"step": 0}}


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


@pytest.mark.parametrize("names", [HEAD_STATISTICS[:1], HEAD_STATISTICS[1:], HEAD_STATISTICS])
def test_scores_that_are_incomplete_are_left_out(names: tuple[str, ...], tmp_path: Path) -> None:
    """A site of scores of which a statistic is missing, or has another length, is not examined."""
    vectors = {name: torch.ones(2 + (name == names[-1] and len(names) > 1)) for name in names}
    writer = write_simple(tmp_path, {})
    writer.write({"step": 0}, [(Site("attention", SCORES), SiteStatistics({"count": 8.0}, tensors=vectors))])
    assert open_recording(tmp_path).findings == []


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
