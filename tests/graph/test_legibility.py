"""The geometry of pictures: titles of frames against edges, and the ratio of the sides."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from lightning_recorder.graph import Direction, Graph, GraphPicture, capture_graph, draw, fit_view
from lightning_recorder.graph.layout_process import line_of, points_of
from lightning_recorder.graph.views.fit import drawn_nodes
from tests.graph.architectures import ARCHITECTURES, Case
from tests.graph.nets import Net, X, linear
from tests.graph.svg import Picture, Text, read_svg

_SVG = "{http://www.w3.org/2000/svg}"
# Ordered by what they have of: long chains, broad rows, nested frames, skips around frames, several inputs, skips
# between columns of several calls.
PICTURES = [
    "MLP",
    "chain of 30",
    "40 heads",
    "U-Net",
    "encoder",
    "transformer",
    "tied pair",
    "lists of parameters",
    "LSTM",
    "GPT-2",
    "BERT",
    "ALBERT",
    "Llama",
    "Mixtral",
    "T5",
    "BART",
    "Whisper",
    "Mamba",
    "ViT",
    "CLIP",
    "ResNet",
    "ConvNeXt",
    "Swin",
    "DPT",
]


def edges_over_titles(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the edges of which a point lies in the text of a frame's title, with that text."""
    titles = [text for item in read_svg(path).items if item.kind == "cluster" for text in item.texts]
    drawing = ET.parse(path).getroot().find(f"{_SVG}g")
    assert drawing is not None
    move = re.search(r"translate\((\S+) (\S+)\)", drawing.attrib["transform"])
    assert move is not None
    for group in drawing.iter(f"{_SVG}g"):
        if group.get("class") == "edge":
            for line in group.iter(f"{_SVG}path"):
                numbers = [float(each) for each in re.findall(r"-?\d+(?:\.\d+)?", line.attrib["d"])]
                spline = " ".join(f"{x},{y}" for x, y in zip(numbers[::2], numbers[1::2], strict=True))
                for piece in line_of(spline):
                    points = [(x + float(move[1]), y + float(move[2])) for x, y in points_of([piece])]
                    for section in pairwise(points):
                        for text in titles:
                            if passes(section, text):
                                yield group.findtext(f"{_SVG}title") or "", text.content


def passes(section: tuple[tuple[float, float], tuple[float, float]], text: Text) -> bool:
    """Return True if a straight section passes through a text."""
    (x, y), (to_x, to_y) = section
    top, bottom = text.baseline - 0.75 * text.size, text.baseline
    if max(y, to_y) < top or min(y, to_y) > bottom:
        return False
    shares = [min(max((height - y) / (to_y - y), 0.0), 1.0) if to_y != y else 0.5 for height in (top, bottom)]
    across = [x + share * (to_x - x) for share in shares]
    return max(across) >= text.left and min(across) <= text.right


def covered_labels(picture: Picture) -> Iterator[tuple[str, str]]:
    """Yield the label of each edge that lies over another text by more than a quarter of its height, and this text."""
    labels = [text for item in picture.items if item.kind == "edge" for text in item.texts]
    for place, label in enumerate(labels):
        above = [text for item in picture.items if item.kind != "edge" for text in item.texts]
        for other in (*above, *labels[:place]):
            across = min(label.right, other.right) - max(label.left, other.left)
            tops = label.baseline - 0.75 * label.size, other.baseline - 0.75 * other.size
            if across > 1 and min(label.baseline, other.baseline) - max(tops) > label.size / 4:
                yield label.content, other.content


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "direction"),
    [*((name, "TB") for name in PICTURES), *((name, "LR") for name in ("U-Net", "ALBERT", "T5", "DPT"))],
)
def test_pictures_can_be_read(name: str, direction: Direction, tmp_path: Path) -> None:
    """No edge crosses the title of a frame, no label covers a text, and no text is too small.

    No side of the picture is longer than four times the other.
    """
    torch.manual_seed(0)
    net, batch, keywords = ARCHITECTURES[name]()
    with torch.no_grad():
        drawing = draw(capture_graph(net, *batch, **keywords), graph_dir=direction)
    path = drawing.save(tmp_path / "graph.svg")
    picture = read_svg(path)
    assert set(edges_over_titles(path)) == set()
    assert set(covered_labels(picture)) == set()
    assert 1 / 4 <= picture.width / picture.height <= 4
    assert min(text.size for text in picture.texts) * picture.px_per_unit >= 9
    assert_every_edge(picture, {(f"n{edge.source}", f"n{edge.target}") for edge in drawing.view.edges})


def assert_every_edge(picture: Picture, expected: set[tuple[str, str]]) -> None:
    """Check that the lines of a picture are the edges, some of which are led around in pieces."""
    lines = {tuple(item.name.split("->", 1)) for item in picture.items if item.kind == "edge"}
    direct = {(one, other) for one, other in lines if one.startswith("n") and other.startswith("n")}
    from_top = {(one, other) for one, other in lines if one.startswith("top_") and other.startswith("n")}
    # A line into a divided call goes through the head of its first column, which only one line reaches.
    heads = {top: source for source, top in lines if top.startswith("top_")}
    assert len(heads) == sum(top.startswith("top_") for _, top in lines)
    around = {(heads.get(one, f"n{one.removeprefix('top_')}"), other) for one, other in from_top}
    assert direct | around == expected
    for one, _ in from_top:
        if one not in heads:
            number = one.removeprefix("top_")
            assert {(f"n{number}", f"bottom_{number}"), (one, f"bottom_{number}")} <= lines


@pytest.mark.parametrize("direction", ["TB", "BT", "LR", "RL"])
def test_two_loops_of_a_node_are_drawn_apart(direction: Direction, tmp_path: Path) -> None:
    """A node that passes a tensor to the next one in two nested repetitions has two lines with labels."""

    def forward(net: Any, x: Tensor) -> Tensor:
        for block in net.children():
            for _ in range(3):
                x = block(x) + x
        return x

    blocks = {name: nn.Sequential(linear(), nn.ReLU()) for name in ("block0", "block1")}
    drawing = draw(capture_graph(Net(forward, **blocks), X), graph_dir=direction)
    assert sum(edge.source == edge.target for edge in drawing.view.edges) == 2
    picture = read_svg(drawing.save(tmp_path / "graph.svg"))
    assert {"next of ×2", "next of ×3"} <= {text.content.strip() for text in picture.texts}
    assert set(covered_labels(picture)) == set()


@pytest.mark.parametrize("columns", [2, 3])
def test_a_long_chain_has_columns(columns: int, tmp_path: Path) -> None:
    """The columns of a chain stand side by side from left to right, and the chain continues at the top of the next."""
    net = nn.Sequential(*(nn.Linear(4 + width, 5 + width) for width in range({2: 24, 3: 60}[columns])))
    drawing = draw(net, X)
    picture = read_svg(drawing.save(tmp_path / "graph.svg"))
    nodes = [picture.named(f"n{node.id}") for node in drawn_nodes(drawing.view)]
    middles = [round((node.left + node.right) / 2) for node in nodes]
    tops = [node.top for node in nodes]
    starts = [0, *(at for at in range(1, len(nodes)) if tops[at] < tops[at - 1])]
    assert len(starts) == columns
    assert [middles[at] for at in starts] == sorted(middles[at] for at in starts)


def test_columns_inside_a_call_stand_from_left_to_right(tmp_path: Path) -> None:
    """The columns of a call are in the order of time, although its skips and its input would be shorter otherwise."""

    def chain(net: Any, x: Tensor) -> Tensor:
        for number, part in enumerate(net.children()):
            x = part(x) + x if number % 2 else part(x)
        return x

    parts = {f"part{number}": nn.Sequential(linear(), nn.ReLU(), nn.Tanh(), linear()) for number in range(9)}
    net = Net(lambda net, x: net.chain(net.one(x)), one=linear(), chain=Net(chain, **parts))
    drawing = draw(net, X, fold=False)
    picture = read_svg(drawing.save(tmp_path / "graph.svg"))
    nodes = [picture.named(f"n{node.id}") for node in drawn_nodes(drawing.view) if "chain." in node.name]
    starts = [after for before, after in pairwise(nodes) if after.top < before.top]
    assert [each.left for each in (nodes[0], *starts)] == sorted(each.left for each in (nodes[0], *starts))
    assert len(starts) == 2


@pytest.mark.parametrize("scaled", [False, True])
def test_a_skip_from_outside_stays_beside_its_column(scaled: bool, tmp_path: Path) -> None:
    """An edge from outside into the middle of the first column of a call is not led around the other columns.

    This also holds if the first node is a parameter.
    """

    def chain(net: Any, x: Tensor) -> Tensor:
        first = x * net.scale if scaled else x
        for number, part in enumerate(net.children()):
            x = part(x) if number else part(first) + x
        return x

    parts = {f"part{number}": nn.Sequential(linear(), nn.ReLU(), nn.Tanh(), linear()) for number in range(9)}
    inner = Net(chain, **parts)
    inner.scale = nn.Parameter(torch.ones(4))
    net = Net(lambda net, x: net.chain(net.one(x)), one=linear(), chain=inner)
    drawing = draw(net, X, fold=False)
    picture = read_svg(drawing.save(tmp_path / "graph.svg"))
    nodes = [picture.named(f"n{node.id}") for node in drawn_nodes(drawing.view) if "chain.part" in node.name]
    second = next(after for before, after in pairwise(nodes) if after.top < before.top)
    (total,) = (node for node in drawing.view.nodes if node.name == "add")
    lines = [each for each in picture.items if each.kind == "edge" and each.name.endswith(f"->n{total.id}")]
    assert len(lines) == 2
    assert all(line.right < second.left for line in lines)


def test_columns_of_nested_calls(tmp_path: Path) -> None:
    """If a call inside a column is divided as well, the columns of both stand from left to right, with equal tops.

    An edge from outside into a later column enters it from above, and is not led around all columns.
    """

    def block(length: int) -> nn.Module:
        return nn.Sequential(*(kind() for _ in range(length) for kind in (linear, nn.ReLU)))

    def attention(inner: nn.Module, length: int) -> nn.Module:
        def forward(net: Any, x: Tensor) -> Tensor:
            up = net.up(net.inner(x))
            merged: Tensor = net.merge(net.gate(up) + net.skip(x) + up)
            return merged

        parts = {"up": block(length), "gate": block(2), "skip": block(2), "merge": block(length)}
        return Net(forward, inner=inner, **parts)

    inside = attention(block(6), 3)
    net = nn.Sequential(block(4), attention(nn.Sequential(block(5), inside), 3), linear())
    drawing = draw(net, X, fold=False)
    picture = read_svg(drawing.save(tmp_path / "graph.svg"))
    places = {node.name: picture.named(f"n{node.id}") for node in drawn_nodes(drawing.view)}
    inner, outer = ("1.inner.1.inner.0", "1.inner.1.gate.0"), ("1.inner.0.0", "1.up.0")
    for first, second in (inner, outer):
        assert places[first].right < places[second].left
        assert places[first].top == pytest.approx(places[second].top, abs=30)
    source = next(node.id for node in drawing.view.nodes if node.name == "0.7")
    lines = [each for each in picture.items if each.name.startswith(f"n{source}->")]
    assert len(lines) == 2
    assert max(line.bottom for line in lines) < places["1.up.0"].top


def test_the_longest_part_is_divided_first(tmp_path: Path) -> None:
    """A further column of a call that would have a single node is no substitute for columns in its longest child."""

    def chain(length: int) -> nn.Module:
        return nn.Sequential(*(kind() for _ in range(length) for kind in (linear, nn.ReLU)))

    drawing = draw(nn.Sequential(chain(24), linear(), chain(26)), X, fold=False)
    picture = read_svg(drawing.save(tmp_path / "graph.svg"))
    *_, last, output = (picture.named(f"n{node.id}") for node in drawn_nodes(drawing.view))
    assert output.top > last.bottom


def test_the_columns_of_a_decoder_layer_stand_from_left_to_right(tmp_path: Path) -> None:
    """The attention of a layer is to the left of its MLP, although the residual path would be shorter otherwise."""
    config: Any = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 37, "head_dim": 8}
    model = Qwen3ForCausalLM(Qwen3Config(**config, num_attention_heads=4, num_key_value_heads=2))
    drawing = draw(model, input_kwargs={"input_ids": torch.ones(1, 8, dtype=torch.long)})
    picture = read_svg(drawing.save(tmp_path / "graph.svg"))
    places = {node.name.partition("layers.0.")[2]: picture.named(f"n{node.id}") for node in drawn_nodes(drawing.view)}
    attention = [each for name, each in places.items() if name.startswith("self_attn")]
    mlp = [each for name, each in places.items() if name.startswith("mlp")]
    assert len(attention) == 6
    assert max(each.right for each in attention) < min(each.left for each in mlp)


def test_functions_of_parameters_do_not_make_a_chain_broad(tmp_path: Path) -> None:
    """A long chain is divided although each step uses a value computed from a parameter, which is drawn beside it."""

    def forward(net: Any, x: Tensor) -> Tensor:
        for book in net.books:
            x = (x - book.pow(2).sum()).tanh()
        return x

    net: Any = Net(forward)
    net.books = nn.ParameterList(torch.ones(4) for _ in range(20))
    picture = read_svg(draw(net, X, fold=False).save(tmp_path / "graph.svg"))
    assert 1 / 4 <= picture.width / picture.height <= 4


def test_a_small_picture_has_no_columns(tmp_path: Path) -> None:
    """A short chain stays a chain; its page has wider margins instead."""
    drawing = draw(nn.Sequential(linear(), nn.ReLU()), X, graph_dir="LR")
    picture = read_svg(drawing.save(tmp_path / "graph.svg"))
    assert len({round(node.top + node.bottom) for node in picture.nodes()}) == 1
    assert picture.width / picture.height <= 4


@pytest.mark.parametrize("name", ["U-Net", "ViT"])
def test_draw_and_the_recorder_agree(name: str, tmp_path: Path) -> None:
    """By default, ``draw`` and GraphRecorder write the same document."""
    case: Callable[[], Case] = ARCHITECTURES[name]
    net, batch, keywords = case()
    graph = capture_graph(net, *batch, **keywords)
    GraphPicture(graph, tmp_path / "graph.dot", ())
    assert (tmp_path / "graph.dot").read_text(encoding="utf-8") == draw(graph).visual_graph.source


def test_lines_around_columns_are_drawn_once() -> None:
    """If a call and another one inside it are divided, each has the lines that are led around its own columns."""

    def chain(start: int, length: int) -> nn.Module:
        return nn.Sequential(*(nn.Linear(4 + at, 5 + at) for at in range(start, start + length)))

    drawing = draw(nn.Sequential(chain(0, 24), nn.Sequential(chain(24, 30))), X)
    led = re.findall(r"top_(\d+) -> bottom_\d+ ", drawing.visual_graph.source)
    last = {drawing.view[int(each)].name for each in led}
    assert len(led) == len(last) == 3
    assert {name.rpartition(".")[0] for name in last} == {"0", "1.0"}


def _dense(blocks: int, layers: int) -> Graph:
    """Return the graph of a network in which each block takes the results of all blocks before it."""

    def forward(net: Any, x: Tensor) -> Tensor:
        kept = [x]
        for part in net.children():
            kept.append(part(torch.cat(kept, 1)))
        return torch.cat(kept, 1)

    def block(at: int) -> nn.Module:
        kinds = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.ELU, nn.SiLU)
        return nn.Sequential(linear(4 * at + 4), *(kind() for kind in kinds[:layers]))

    return capture_graph(Net(forward, **{f"block{at}": block(at) for at in range(blocks)}), X)


def test_a_dense_network_is_drawn_without_lines_across_columns() -> None:
    """Many edges across columns are avoided by closing the blocks, but not if a depth is given."""
    graph = _dense(7, 2)
    assert {node.type_name for node in draw(graph).view.module_calls()} == {"Sequential"}
    assert "Linear" in {node.type_name for node in draw(graph, depth=2).view.module_calls()}
    assert not re.search("headlabel", draw(graph).visual_graph.source)


def test_a_view_that_would_lose_most_nodes_keeps_them() -> None:
    """Blocks are not closed if less than a third of the nodes would remain."""
    graph = _dense(7, 6)
    assert draw(graph).view == fit_view(graph)
    assert re.search("headlabel", draw(graph).visual_graph.source)


def test_skips_between_columns_are_named_at_both_ends() -> None:
    """An edge that crosses columns has the color of its source, and a label at each end that names the other end."""

    def forward(net: Any, x: Tensor) -> Tensor:
        kept = []
        for part in net.down.children():
            x = part(x)
            kept.append(x)
        for part in net.up.children():
            x = part(x + kept.pop())
        return x

    def blocks() -> dict[str, nn.Module]:
        inner = (linear, nn.ReLU, linear, nn.Tanh)
        return {
            f"{at}": Net(lambda net, x: net.chain(x), chain=nn.Sequential(*(each() for each in inner)))
            for at in range(5)
        }

    drawing = draw(Net(forward, down=nn.ModuleDict(blocks()), up=nn.ModuleDict(blocks())), X, fold=False)
    marks = re.findall(r'color="(\S+)" .*headlabel="(.*?)".*taillabel="(.*?)"', drawing.visual_graph.source)
    assert [mark[1:] for mark in marks] == [("from down.1", "to add"), ("from down.0", "to add")]
    assert len({color for color, *_ in marks}) == 2
