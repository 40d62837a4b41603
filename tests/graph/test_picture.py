"""A picture of a graph, reduced until it can be laid out and read."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_recorder import RenderError
from lightning_recorder.graph import Graph, GraphPicture, GraphvizRenderer, Layout, capture_graph, fit_view
from tests.graph.nets import X
from tests.graph.svg import read_svg


class _Block(nn.Module):
    """A block that differs from all others, so that it is not folded."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(torch.relu(self.up(x)))
        return x + down


@pytest.fixture(scope="module")
def large() -> Graph:
    """Return a graph of more than 5,000 operations that cannot be folded."""
    graph = capture_graph(nn.Sequential(*(_Block(1 + index) for index in range(1300))), X)
    assert sum(node.kind == "op" for node in graph.nodes) == 5200
    return graph


@pytest.fixture(scope="module")
def chain() -> Graph:
    """Return a graph with more operations than a picture has nodes."""
    return capture_graph(nn.Sequential(*(_Block(1 + index) for index in range(150))), X)


@pytest.mark.slow
def test_a_large_graph_has_a_picture_that_can_be_read(large: Graph, tmp_path: Path) -> None:
    """The default picture of 5,200 operations has 150 nodes, and its text is complete and at least 9 pixels high."""
    picture = GraphPicture(large, tmp_path / "graph.dot", ("svg", "png"))
    svg, png = picture.finish()
    assert picture.note == ""
    assert (svg.name, png.name) == ("graph.svg", "graph.png")
    drawn = read_svg(svg)
    assert sum(item.name.startswith("n") for item in drawn.nodes()) == 150  # the others lead to other sheets
    texts = [text for item in drawn.items for text in item.texts]
    assert min(text.size for text in texts) * 96 / 72 >= 9  # points to CSS pixels
    assert all(text.left >= 0 and text.right <= drawn.width for text in texts)


@pytest.mark.slow
def test_a_bitmap_that_would_be_shrunk_is_refused(chain: Graph, tmp_path: Path) -> None:
    """A PNG with unreadable text is an error of the layout; a picture avoids it by its sheets."""
    picture = GraphPicture(chain, tmp_path / "graph.dot", ("png",), max_nodes=700)
    (path,) = picture.finish()
    assert path.is_file()
    assert picture.note == ""
    column = GraphvizRenderer(fit_view(chain, 700), wrap=False).render()
    (tmp_path / "large.dot").write_text(column.source, encoding="utf-8")
    with pytest.raises(RenderError, match=r"would be shrunk to \d+%, its text too small to read: draw a smaller view"):
        Layout(tmp_path / "large.dot", ("png",)).finish()
    assert not (tmp_path / "large.png").exists()


def _fake_dot(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    fake = folder / "bin" / "dot"
    fake.parent.mkdir()
    fake.write_text(f"#!{sys.executable}\n{script}\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(fake.parent))


def test_every_attempt_is_smaller(chain: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each failure a smaller view is tried, three in all, and the last document remains."""
    log = tmp_path / "log"
    document = str(tmp_path / "graph.dot")
    count = f"str(len(open({document!r}).readlines()))"
    script = f"import sys; open({str(log)!r}, 'a').write({count} + chr(10)); sys.exit(3)"
    _fake_dot(tmp_path, monkeypatch, script)
    picture = GraphPicture(chain, tmp_path / "graph.dot", ("svg",))
    with pytest.raises(RenderError, match="Graphviz produced no picture, it failed"):
        picture.finish()
    sizes = [int(line) for line in log.read_text().split()]
    assert len(sizes) == 3
    assert sizes[0] > 2 * sizes[1] > 4 * sizes[2]
    assert (tmp_path / "graph.dot").is_file()


def test_done_continues_by_itself(chain: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calling ``done`` starts the next attempt, so that nothing has to wait for the failed one."""
    _fake_dot(tmp_path, monkeypatch, "import sys; sys.exit(3)")
    picture = GraphPicture(chain, tmp_path / "graph.dot", ("svg",), timeout_s=600)
    while not picture.done():
        pass
    with pytest.raises(RenderError, match="it failed"):
        picture.finish(0)


@pytest.mark.parametrize("unused", [False, True])
def test_unused_modules_on_request(unused: bool, tmp_path: Path) -> None:
    """The modules that were never called are drawn if they are asked for."""
    net = _Block(3)
    net.spare = nn.Linear(2, 2)
    GraphPicture(capture_graph(net, X), tmp_path / "graph.dot", (), unused=unused)
    assert ("never called" in (tmp_path / "graph.dot").read_text(encoding="utf-8")) == unused


def test_without_formats_there_is_only_the_document(chain: Graph, tmp_path: Path) -> None:
    """Without formats no renderer is started."""
    picture = GraphPicture(chain, tmp_path / "graph.dot", ())
    assert picture.done()
    assert picture.finish() == []
    assert [path.name for path in tmp_path.iterdir()] == ["graph.dot"]
