"""The files and the picture of a recorded graph, without a trainer."""

from __future__ import annotations

import errno
import json
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_recorder import MemorySink, RecorderWarning, RenderError
from lightning_recorder.disk import begin_run
from lightning_recorder.graph import Graph, capture_graph
from lightning_recorder.outputs import GraphOutput
from lightning_recorder.sinks import MultiSink


@pytest.fixture
def graph() -> Graph:
    return capture_graph(nn.Linear(2, 1), torch.ones(1, 2))


def test_a_graph_has_files_and_a_picture_in_the_sink(graph: Graph, tmp_path: Path) -> None:
    """The graph is written as JSON, DOT and PNG, and the sink receives the graph and the picture, once."""
    sink = MemorySink()
    output = GraphOutput("net", tmp_path, MultiSink([sink]), formats=("png",))
    output.write(3, graph)
    output.show(None)
    output.show(None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.dot", "net.json", "net.png"]
    assert Graph.from_json(json.loads((tmp_path / "net.json").read_text(encoding="utf-8"))) == graph
    assert sink.graphs["net"] == {3: graph}
    assert list(sink.images["net"]) == [3]


def test_without_a_folder_the_sink_has_the_graph(graph: Graph) -> None:
    """Without a folder, nothing is drawn."""
    sink = MemorySink()
    output = GraphOutput("net", None, MultiSink([sink]), formats=("png",))
    output.write(0, graph)
    assert output.picture is None
    assert sink.graphs["net"] == {0: graph}


def test_a_folder_that_refuses_the_picture(graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error while the finished picture is copied is a warning about the folder, whenever it is noticed."""

    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(target))

    begin_run()
    monkeypatch.setattr("lightning_recorder.graph.layout.copy_whole", refuse)
    output = GraphOutput("net", tmp_path, None, formats=("png",))
    output.write(0, graph)
    assert output.picture is not None
    while not output.picture.done():
        time.sleep(0.01)
    with pytest.warns(RecorderWarning, match="could not write to") as found:
        output.show(0.0)
    assert len(found) == 1


@pytest.mark.parametrize("strict", [False, True])
def test_a_picture_that_takes_too_long_is_left_out(graph: Graph, strict: bool, tmp_path: Path) -> None:
    """The other files are written, and the fault is a warning or, with ``strict``, an error."""
    output = GraphOutput("net", tmp_path, None, formats=("png",), strict=strict)
    output.write(0, graph)
    picture = output.picture
    assert picture is not None
    picture.finish(None)

    def late(wait_s: float | None = None) -> list[Path]:
        raise RenderError("too late")

    picture.finish = late  # type: ignore[method-assign]  # stands for a slow renderer
    if strict:
        with pytest.raises(RenderError, match="too late"):
            output.show(0.0)
    else:
        with pytest.warns(RecorderWarning, match=r"net\.dot and net\.json, without a picture: too late"):
            output.show(0.0)
