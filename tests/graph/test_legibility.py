"""The geometry of pictures: titles of frames against edges, and the ratio of the sides."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from lightning_recorder import ArgumentError
from lightning_recorder.graph import (
    Direction,
    Graph,
    GraphCapture,
    GraphPicture,
    GraphvizRenderer,
    Node,
    capture_graph,
    draw,
    fit_view,
)
from lightning_recorder.graph.layout_process import line_of, points_of
from lightning_recorder.graph.renderers.labels import is_needless
from lightning_recorder.graph.views.fit import drawn_nodes
from lightning_recorder.graph.views.ports import with_ports
from lightning_recorder.graph.views.sides import sides
from tests.graph.architectures import ARCHITECTURES, Case
from tests.graph.nets import Net, X, linear
from tests.graph.svg import Item, Picture, Text, read_svg

_SVG = "{http://www.w3.org/2000/svg}"
# Ordered by what they have of: long chains, broad rows, nested frames, skips around frames, several inputs.
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


def backward_edges(picture: Picture, direction: Direction = "TB", upwards: Collection[str] = ()) -> list[str]:
    """Return the lines of which the target begins before the end of the source, in the direction of the flow.

    Args:
        picture: The picture.
        direction: The direction of the flow.
        upwards: The nodes of the second side of a U-Net, at which lines end that go upwards or across.
    """
    found = []
    for item in picture.items:
        if item.kind == "edge":
            one, other = (picture.named(end) for end in item.name.split("->"))
            back = other.top < one.bottom if direction == "TB" else other.left < one.right
            if other.name in upwards:
                back = one.top < other.bottom if one.name in upwards else other.left < one.right
            found += [item.name] if back and one is not other else []
    return found


def out_of_order(picture: Picture, view: Graph, direction: Direction = "TB") -> list[tuple[str, str]]:
    """Return pairs of modules in one frame, on one sheet, of which the later one begins before the earlier one."""
    sheet = sheets_in(picture, view, direction)
    is_facing = bool(GraphvizRenderer(view, direction=direction)._between)
    found = []
    for call in view.nodes:
        calls = [each for each in view.children(call) if each.kind == "module" and not is_needless(each, view)]
        placed = [(child, _item(picture, child)) for child in calls]
        for (one, first), (other, second) in pairwise(placed):
            # Where both begin at one height, the titles of frames differ.
            ahead = first.top - second.top if direction == "TB" else first.left - second.left
            ahead = second.bottom - first.bottom if is_facing and sheet[one.id] else ahead
            if ahead > 60 and sheet[one.id] == sheet[other.id]:
                found.append((one.name, other.name))
    return found


def _item(picture: Picture, node: Node) -> Item:
    """Return the first box or frame of a node."""
    return next(item for item in picture.items if item.name in (f"n{node.id}", f"cluster_{node.id}"))


def sheets_in(picture: Picture, view: Graph, direction: Direction = "TB") -> dict[int, int]:
    """Return the sheet of each node of a view, or of the first node inside it."""
    renderer = GraphvizRenderer(view, direction=direction)
    ids = {number: min(on) for number, on in renderer._sheets_of.items()}
    between = max(ids.values()) == 0 or renderer._between
    assert between or any(item.name.startswith("in_") for item in picture.items)
    return ids


# Modules that are side by side, of which the later one begins higher: what the layout cannot keep in order.
OUT_OF_ORDER = {
    ("CLIP", "TB"): [("visual_projection", "text_model")],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "direction"),
    [*((name, "TB") for name in PICTURES), *((name, "LR") for name in ("U-Net", "ALBERT", "T5", "DPT"))],
)
def test_pictures_can_be_read(name: str, direction: Direction, tmp_path: Path) -> None:
    """No line runs back, no module is drawn before one that ran earlier, and nothing covers a text.

    No text is too small, and no side of the picture is longer than three times the other.
    """
    torch.manual_seed(0)
    net, batch, keywords = ARCHITECTURES[name]()
    with torch.no_grad():
        drawing = draw(capture_graph(net, *batch, **keywords), graph_dir=direction)
    path = drawing.save(tmp_path / "graph.svg")
    picture = read_svg(path)
    onward = {f"n{e.source}->n{e.target}" for e in with_ports(drawing.view).edges if not e.relates("next")}
    renderer = GraphvizRenderer(drawing.view, direction=direction)
    upwards = {f"n{number}" for number, side in renderer._sheet.items() if renderer._between and side}
    assert [line for line in backward_edges(picture, direction, upwards) if line in onward] == []
    assert out_of_order(picture, drawing.view, direction) == OUT_OF_ORDER.get((name, direction), [])
    assert set(edges_over_titles(path)) == set()
    assert set(covered_labels(picture)) == set()
    # A long picture gets no margins, which would make a bitmap huge.
    most = 3.6 if (name, direction) == ("T5", "LR") else 3.05
    assert 1 / most <= picture.width / picture.height <= most
    assert min(text.size for text in picture.texts) * picture.px_per_unit >= 9
    assert_every_edge(picture, with_ports(drawing.view))


def assert_every_edge(picture: Picture, graph: Graph) -> None:
    """Check that the lines of a picture are the edges; one to another sheet is a numbered line on both."""
    lines = {tuple(item.name.split("->", 1)) for item in picture.items if item.kind == "edge"}
    sources = {other.removeprefix("out_"): one for one, other in lines if other.startswith("out_")}
    drawn = {
        (sources[one.split("_")[1]] if one.startswith("in_") else one, other)
        for one, other in lines
        if not other.startswith("out_")
    }
    expected = {(f"n{edge.source}", f"n{edge.target}") for edge in graph.edges}
    ports = {f"n{node.id}": node for node in graph.nodes if node.kind == "port"}

    def origin(end: str) -> str:
        into = [f"n{edge.source}" for edge in graph.edges if f"n{edge.target}" == end and end in ports]
        return origin(into[0]) if len(into) == 1 else end

    # A line that enters a later sheet begins at the node before the ports of an earlier one.
    assert drawn <= expected | {(origin(one), other) for one, other in expected}
    assert {other for _, other in drawn} == {other for _, other in expected}
    assert len(drawn) == len(expected)


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


@pytest.mark.parametrize("direction", ["TB", "LR"])
def test_a_long_chain_has_sheets(direction: Direction, tmp_path: Path) -> None:
    """The sheets of a long chain stand in the order of time: from left to right, or downwards if it flows across."""
    net = nn.Sequential(*(nn.Linear(4 + width, 5 + width) for width in range(30)))
    drawing = draw(net, X, graph_dir=direction)
    picture = read_svg(drawing.save(tmp_path / "graph.svg"))
    nodes = [picture.named(f"n{node.id}") for node in drawn_nodes(drawing.view)]
    down = direction == "TB"
    starts = [nodes[0]]
    for before, after in pairwise(nodes):
        starts += [after] if (after.top < before.top if down else after.left < before.left) else []
    places = [each.left if down else each.top for each in starts]
    assert len(starts) >= 2
    assert places == sorted(set(places))
    assert backward_edges(picture, direction) == []


def test_a_constant_is_on_the_sheet_of_its_users() -> None:
    """Learned queries and the functions of them are beside the decoder that takes them, not at the end of the encoder.

    Only the result of the encoder continues on another sheet.
    """

    def layer(net: Any, x: Tensor, queries: Tensor) -> Tensor:
        return net.rest(net.one(x + queries) - queries)  # type: ignore[no-any-return]  # the attributes are not declared

    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.encoder(x)
        queries = torch.stack([(net.queries * 2).exp() for _ in range(net.times)]).sum(0)
        for part in net.decoder:
            x = part(x, queries)
        return x

    def block() -> Net:
        return Net(
            layer, one=linear(), rest=nn.Sequential(*(each() for each in 2 * (linear, nn.ReLU, linear, nn.Tanh)))
        )

    encoder = nn.Sequential(*(nn.Linear(4 + at, 5 + at) for at in range(16)), nn.Linear(20, 4))
    net: Any = Net(forward, encoder=encoder, decoder=nn.ModuleList(block() for _ in range(3)))
    net.queries = nn.Parameter(torch.ones(4))
    # Nine equal parts are drawn once, in a frame that stays where it is.
    for times, moved in ((1, {"queries", "mul", "exp", "stack", "sum"}), (9, {"stack", "sum"})):
        net.times = times
        renderer = GraphvizRenderer(draw(net, X).view)
        sheet = {renderer.graph[number].name: at for number, at in renderer._sheet.items()}
        assert sheet["encoder.16"] < sheet["decoder.0.one"]
        assert {sheet[name] for name in moved} == {sheet["decoder.0.one"]}
        leaving = {renderer.graph[source].name for source, _ in renderer._numbers}
        assert "encoder.16" in leaving
        assert leaving.isdisjoint(moved)


def test_a_tensor_that_changes_its_sheet_is_named_at_both_ends(tmp_path: Path) -> None:
    """Both ends of a skip between sheets have the same number and color, and the name of the other end.

    No two tensors have the same number or color.
    """

    def forward(net: Any, x: Tensor) -> Tensor:
        kept = []
        for part in net.down.children():
            x = part(x)
            kept.append(x)
        for part in net.up.children():
            x = part(x + kept.pop(0))
        return x

    def blocks() -> dict[str, nn.Module]:
        kinds = (linear, nn.ReLU, linear, nn.Tanh)
        return {f"{at}": nn.Sequential(*(each() for each in kinds)) for at in range(6)}

    net = Net(forward, down=nn.ModuleDict(blocks()), up=nn.ModuleDict(blocks()))
    drawing = draw(net, X, fold=False)
    pattern = r'(in|out)_(\d+)\S* \[label=<.*?<b>\d+</b> (?:to|from) (.*?)</font>> color="(\S+)"'
    ends = re.findall(pattern, drawing.visual_graph.source)
    outs = {number: (color, name) for kind, number, name, color in ends if kind == "out"}
    ins = {number: (color, name) for kind, number, name, color in ends if kind == "in"}
    assert outs.keys() == ins.keys()
    assert len(outs) > 2
    assert [outs[each][0] for each in outs] == [ins[each][0] for each in outs]
    assert len({color for color, _ in outs.values()}) == len(outs)
    blocks_of = {part: {f"{part}.{at}" for at in range(6)} for part in ("down", "up")}
    sums = {f"add before {name}" for name in blocks_of["up"]}
    assert {name for _, name in ins.values()} <= blocks_of["down"] | blocks_of["up"] | sums
    assert {each for _, name in outs.values() for each in name.split(", ") if each.startswith("add")} <= sums
    assert_every_edge(read_svg(drawing.save(tmp_path / "graph.svg")), with_ports(drawing.view))


def test_a_repeated_block_is_read_from_top_to_bottom(tmp_path: Path) -> None:
    """A block that is drawn once for several is on one sheet, and its attention is above its MLP."""
    config: Any = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 37, "head_dim": 8}
    model = Qwen3ForCausalLM(Qwen3Config(**config, num_attention_heads=4, num_key_value_heads=2))
    drawing = draw(model, input_kwargs={"input_ids": torch.ones(1, 8, dtype=torch.long)})
    picture = read_svg(drawing.save(tmp_path / "graph.svg"))
    places = {node.name.partition("layers.0.")[2]: picture.named(f"n{node.id}") for node in drawn_nodes(drawing.view)}
    attention = [each for name, each in places.items() if name.startswith("self_attn")]
    mlp = [each for name, each in places.items() if name.startswith("mlp")]
    assert len(attention) == 6
    assert max(each.bottom for each in attention) < min(each.top for each in mlp)
    assert backward_edges(picture) == []


def test_an_open_block_is_below_those_before_it(tmp_path: Path) -> None:
    """A block that differs from the ones before it is drawn below them, although it also takes the first input."""

    class Mixed(nn.Module):
        def __init__(self, act: nn.Module) -> None:
            super().__init__()
            self.one, self.act, self.two = linear(), act, linear()

        def forward(self, x: Tensor, first: Tensor) -> Tensor:
            total: Tensor = self.two(self.act(self.one(x))) + first
            return total

    def forward(net: Any, x: Tensor) -> Tensor:
        first = net.first(x)
        x = first
        for part in net.parts:
            x = part(x, first)
        return x

    parts = nn.ModuleList([*(Mixed(nn.ReLU()) for _ in range(3)), Mixed(nn.Tanh())])
    drawing = draw(Net(forward, first=linear(), parts=parts), X)
    picture = read_svg(drawing.save(tmp_path / "graph.svg"))
    frames = [picture.named(f"cluster_{node.id}") for node in drawing.view.module_calls() if node.type_name == "Mixed"]
    assert len(frames) == 2
    assert frames[0].bottom < frames[1].top
    assert backward_edges(picture) == []


def test_a_call_is_below_one_before_it_that_takes_a_constant_first(tmp_path: Path) -> None:
    """An adapter of an early layer stands beside the body that ran before it, not beside the table of the body."""

    def table(net: Any) -> Tensor:
        return net.two(net.one(torch.arange(8.0).view(2, 4)).tanh()).exp()  # type: ignore[no-any-return]  # the attributes are not declared

    def body(net: Any, x: Tensor, positions: Tensor) -> Tensor:
        return net.two(net.one(x + positions) * positions) - positions  # type: ignore[no-any-return]  # as above

    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.stem(x)
        y = net.deep(x)
        return net.body(y, net.table()) + net.adapter(x)  # type: ignore[no-any-return]  # as above

    parts = {
        "table": Net(table, one=linear(), two=linear()),
        "body": Net(body, one=linear(), two=linear()),
    }
    chains = {name: nn.Sequential(linear(), nn.ReLU(), nn.Linear(4, 4)) for name in ("deep", "adapter")}
    drawing = draw(Net(forward, stem=linear(), **parts, **chains), X)
    picture = read_svg(drawing.save(tmp_path / "graph.svg"))
    frames = {
        call.name: _item(picture, call) for call in drawing.view.module_calls() if call.name in ("table", "adapter")
    }
    assert frames["table"].bottom < frames["adapter"].top


def test_towers_stand_beside_each_other(tmp_path: Path) -> None:
    """A second tower stands beside the first one, although the head of the first one runs before it."""

    def forward(net: Any, image: Tensor, text: Tensor) -> Tensor:
        one = net.project(net.vision(image))
        return one @ net.words(text).T  # type: ignore[no-any-return]  # the attributes are not declared

    towers = {name: nn.Sequential(linear(), nn.ReLU(), linear(), nn.Tanh()) for name in ("vision", "words")}
    drawing = draw(Net(forward, **towers, project=linear()), input_data=[X, X + 1])
    picture = read_svg(drawing.save(tmp_path / "graph.svg"))
    calls = {node.name: node.id for node in drawing.view.module_calls()}
    one, other = (picture.named(f"cluster_{calls[name]}") for name in towers)
    assert other.top < (one.top + one.bottom) / 2
    assert other.bottom > picture.named(f"n{calls['project']}").bottom


def test_small_and_short_pictures_are_one_sheet(tmp_path: Path) -> None:
    """A net of three layers is never divided, in any direction."""
    net = nn.Sequential(linear(), nn.ReLU(), linear())
    for direction in ("TB", "LR", "BT", "RL"):
        drawing = draw(net, X, graph_dir=direction)
        assert " in_1" not in drawing.visual_graph.source
        picture = read_svg(drawing.save(tmp_path / "graph.svg"))
        middles = {
            round(item.top + item.bottom if direction in ("LR", "RL") else item.left + item.right)
            for item in picture.nodes()
        }
        assert max(middles) - min(middles) <= 1
        assert 1 / 3.3 <= picture.width / picture.height <= 3.3


def test_a_picture_in_black_and_white() -> None:
    """On paper, nothing but black, white and grey is used."""
    net = nn.Sequential(*(nn.Sequential(linear(), nn.ReLU()) for _ in range(3)), nn.Sequential(nn.Tanh(), linear()))
    source = draw(net, X, style="paper").visual_graph.source
    colors = {match.lower() for match in re.findall(r"#[0-9a-fA-F]{6}", source)}
    assert all(len({each[1:3], each[3:5], each[5:7]}) == 1 for each in colors)
    with pytest.raises(ArgumentError, match="'screen' or 'paper'"):
        draw(net, X, style="print")  # type: ignore[arg-type]  # this is tested


class Mixed(nn.Module):
    """A block that uses the result of the block before it, and another tensor, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        mixed: Tensor = x * self.one(x) + other * self.two(other)
        return mixed


class Mixer(nn.Module):
    """Three equal blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Mixed() for _ in range(3)])

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, other)
        return x


def test_the_way_from_block_to_block_is_seen_without_color() -> None:
    """On paper, the dot at which a block takes the result of the block before it is hollow."""
    source = draw(Mixer(), (torch.ones(2, 4), torch.ones(2, 4)), style="paper").visual_graph.source
    dots = [each for each in source.splitlines() if 'label=""' in each and "shape=circle" in each]
    assert sorted(re.findall(r'fillcolor="(#\w+)"', "".join(dots))) == ["#000000", "#ffffff"]


def test_sums_and_products_are_signs(tmp_path: Path) -> None:
    """The sum and the product of two tensors are signs in circles; those with a number keep their name and shape."""
    drawing = draw(Net(lambda net, x: (net.fc(x) + (x + 1)) * (x * 2), fc=linear()), X)
    picture = read_svg(drawing.save(tmp_path / "graph.svg"))
    shown = [item.lines for item in picture.nodes() if {"add", "+", "mul", "×"}.intersection(item.lines)]
    assert sorted(shown) == [["+"], ["add", "2×4"], ["mul", "2×4"], ["×"]]


def test_blocks_of_branches_stand_below_each_other(tmp_path: Path) -> None:
    """Blocks with branches of other lengths make no staircase: the longest path is straight, also between frames."""

    def forward(net: Any, x: Tensor) -> Tensor:
        short, long = net.one(x), net.four(net.three(net.two(x)))
        return torch.cat([short, long, net.five(torch.relu(x))])

    def inception(width: int) -> nn.Module:
        names = ("one", "two", "three", "four", "five")
        sizes = zip(names, ((4, 4), (4, width), (width, width), (width, 4), (4, 4)), strict=True)
        return Net(forward, **{name: nn.Linear(*size) for name, size in sizes})

    drawing = draw(nn.Sequential(*(inception(width) for width in range(5, 9))), X)
    picture = read_svg(drawing.save(tmp_path / "graph.svg"))
    joined = [picture.named(f"n{node.id}") for node in drawing.view.nodes if node.name == "cat"]
    middles = [(item.left + item.right) / 2 for item in joined]
    assert len(middles) == 4
    assert max(middles) - min(middles) <= 1


def test_tables_side_by_side_are_in_order(tmp_path: Path) -> None:
    """Embeddings in several rows begin with the first one, from left to right and downwards."""
    tables = {f"t{number}": nn.Embedding(10, 4 + number) for number in range(26)}

    def forward(net: Any, *ids: Tensor) -> Tensor:
        return torch.cat([table(each) for table, each in zip(net.children(), ids, strict=True)], 1)

    drawing = draw(Net(forward, **tables), [torch.zeros(2, dtype=torch.long)] * 26)
    picture = read_svg(drawing.save(tmp_path / "graph.svg"))
    boxes = [picture.named(f"n{node.id}") for node in drawing.view.nodes if node.type_name == "Embedding"]
    assert len({round(box.top) for box in boxes}) > 1
    assert all(one.left < other.left or one.bottom < other.top for one, other in pairwise(boxes))
    assert 1 / 3.05 <= picture.width / picture.height <= 3.05


def test_a_long_repeated_block_has_sheets(tmp_path: Path) -> None:
    """A block that is repeated and longer than a page is divided, and one of a page is not.

    A skip connection from the start of the block does not seem to come from the node before the first repetition.
    """

    def drawn(layers: int) -> Picture:
        def one() -> nn.Module:
            inner = nn.Sequential(*(nn.Linear(4 + at, 5 + at) for at in range(layers)), nn.Linear(4 + layers, 4))
            return Net(lambda net, x: x + net.inner(x), inner=inner)

        path = draw(nn.Sequential(*(one() for _ in range(3))), X).save(tmp_path / f"{layers}.svg")
        return read_svg(path)

    long, short = drawn(40), drawn(20)
    frames = [item.lines for item in long.items if item.kind == "cluster" and "×3" in item.lines[0]]
    continued = [any("(continued)" in line for line in lines) for lines in frames]
    assert len(frames) > 1
    assert continued == [False] + [True] * (len(frames) - 1)
    assert 1 / 3.05 <= long.width / long.height <= 3.05
    assert backward_edges(long) == []
    words = {text.content.strip() for item in long.items for text in item.texts}
    assert {"to add", "from start of 0"} <= words
    assert not any("(continued)" in line for item in short.items for line in item.lines)


def test_a_repeated_block_of_a_page_is_alone_on_it() -> None:
    """A block that fits on a sheet is not divided, although the picture is hardly longer than a page and a half."""

    def block() -> nn.Module:
        inner = nn.Sequential(*(nn.Linear(4 + at, 5 + at) for at in range(20)), nn.Linear(24, 4))
        return Net(lambda net, x: x + net.inner(x), inner=inner)

    before = (nn.Linear(4 + at, 5 + at) for at in range(4))
    after = (nn.Linear(4 + at, 5 + at) for at in range(4))
    net = nn.Sequential(*before, nn.Linear(8, 4), nn.Sequential(*(block() for _ in range(6))), *after)
    renderer = GraphvizRenderer(draw(net, X).view)
    (call,) = (node for node in renderer.graph.module_calls() if node.repeats == 6)
    assert len(renderer._sheets_of[call.id]) == 1
    assert len(renderer._sheets_of[renderer.graph.root.id]) == 3


def test_an_input_is_on_the_sheet_of_its_users() -> None:
    """The input of a decoder and the functions of it are not beside the encoder, which ran before."""

    def forward(net: Any, x: Tensor, y: Tensor) -> Tensor:
        x = net.encoder(x)
        y = (y + y.roll(1, 0)).tanh()
        return net.decoder(net.first(y) + x)  # type: ignore[no-any-return]  # the attributes are not declared

    chains = {name: nn.Sequential(*(nn.Linear(4 + at, 5 + at) for at in range(20))) for name in ("encoder", "decoder")}
    net = Net(forward, **chains, first=nn.Linear(4, 24))
    chains["decoder"][0] = nn.Linear(24, 5)
    renderer = GraphvizRenderer(fit_view(capture_graph(net, X, X + 1)))
    sheet = {renderer.graph[number].name: at for number, at in renderer._sheet.items()}
    assert sheet["input[0]"] == sheet["encoder.0"] < sheet["first"]
    assert {sheet[name] for name in ("input[1]", "roll", "tanh")} == {sheet["first"]}


def test_an_input_is_not_alone_on_a_sheet() -> None:
    """A long repeated block is on the sheet with the input before it."""

    def coupling(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        one, other = x.chunk(2, 1)
        one, other = (other, one) if net.swapped else (one, other)
        scale, shift = net.net(one).chunk(2, 1)
        other = other * scale.tanh().exp() + shift
        return torch.cat([other, one] if net.swapped else [one, other], 1), scale.sum(1)

    def forward(net: Any, x: Tensor) -> Tensor:
        total = torch.zeros(2)
        for layer in net.children():
            x, more = layer(x)
            total = total + more
        return -(torch.distributions.Normal(0, 1).log_prob(x).sum(1) + total).mean()  # type: ignore[no-any-return]  # as above

    layers = [Net(coupling, net=nn.Sequential(linear(2, 8), nn.ReLU(), linear(8, 4))) for _ in range(6)]
    for number, layer in enumerate(layers):
        layer.swapped = number % 2 == 1  # type: ignore[assignment]  # the attributes are not declared
    view = fit_view(capture_graph(Net(forward, **{f"l{number}": layer for number, layer in enumerate(layers)}), X))
    sheet = GraphvizRenderer(view)._sheet
    first = next(node for node in view.nodes if node.kind == "input")
    assert sum(number == sheet[first.id] for number in sheet.values()) > 10


def test_a_part_of_a_frame_is_not_torn_off() -> None:
    """The last layer of an encoder is on the sheet with the others, although a decoder that is as long follows."""
    net = nn.Transformer(16, 2, 2, 2, 32, batch_first=True)
    drawing = draw(net, input_size=[(2, 3, 16), (2, 3, 16)])
    assert "cluster_sheet_1" in drawing.visual_graph.source
    assert "(continued)" not in drawing.visual_graph.source


def test_functions_of_parameters_do_not_make_a_chain_broad(tmp_path: Path) -> None:
    """A long chain is divided although each step uses a value computed from a parameter, which is drawn beside it."""

    def forward(net: Any, x: Tensor) -> Tensor:
        for book in net.books:
            x = (x - book.pow(2).sum()).tanh()
        return x

    net: Any = Net(forward)
    net.books = nn.ParameterList(torch.ones(4) for _ in range(20))
    picture = read_svg(draw(net, X, fold=False).save(tmp_path / "graph.svg"))
    assert 1 / 3.3 <= picture.width / picture.height <= 3.3


@pytest.mark.parametrize("name", ["U-Net", "ViT"])
def test_draw_and_the_recorder_agree(name: str, tmp_path: Path) -> None:
    """By default, ``draw`` and GraphRecorder write the same document."""
    case: Callable[[], Case] = ARCHITECTURES[name]
    net, batch, keywords = case()
    graph = capture_graph(net, *batch, **keywords)
    GraphPicture(graph, tmp_path / "graph.dot", ())
    assert (tmp_path / "graph.dot").read_text(encoding="utf-8") == draw(graph).visual_graph.source


def test_a_sheet_has_no_gaps_from_another_one(tmp_path: Path) -> None:
    """The layers of a chain have equal distances, although the frames beside them on other sheets have titles."""
    framed = (nn.Sequential(nn.Linear(4, 5 + at), nn.Linear(5 + at, 4)) for at in range(12))
    drawing = draw(nn.Sequential(*(linear() for _ in range(24)), *framed), X, fold=False)
    picture = read_svg(drawing.save(tmp_path / "graph.svg"))
    names = {f"{at}" for at in range(24)}
    layers = [picture.named(f"n{node.id}") for node in drawing.view.nodes if node.name in names]
    gaps = [after.top - before.bottom for before, after in pairwise(layers) if after.top > before.top]
    assert "cluster_sheet_2" in drawing.visual_graph.source
    assert max(gaps) - min(gaps) <= 1


def test_the_sides_of_a_unet_face_each_other(tmp_path: Path) -> None:
    """The second side is drawn upwards beside the first one, and each skip connection is a straight line across."""
    net, batch, keywords = ARCHITECTURES["U-Net"]()
    with torch.no_grad():
        drawing = draw(capture_graph(net, *batch, **keywords))
    renderer = GraphvizRenderer(drawing.view)
    *skips, last = renderer._between
    assert [drawing.view[edge.target].name for edge in skips] == ["cat", "cat"]
    picture = read_svg(drawing.save(tmp_path / "graph.svg"))
    middles = {item.name: (item.top + item.bottom) / 2 for item in picture.nodes()}
    assert all(abs(middles[f"n{edge.source}"] - middles[f"n{edge.target}"]) < 1 for edge in skips)
    assert all(picture.named(f"n{e.source}").right < picture.named(f"n{e.target}").left for e in (*skips, last))
    outputs = [node.id for node in drawing.view.nodes if node.kind == "output"]
    assert all(middles[f"n{outputs[0]}"] < middles[f"n{edge.target}"] for edge in (*skips, last))


def test_the_first_side_of_a_unet_ends_with_its_last_skip_connection() -> None:
    """A result that is concatenated above the middle of a U-Net, and passed to it, is on the first side."""

    def forward(net: Any, x: Tensor) -> Tensor:
        one = net.one(net.first(x))
        two = net.two(one)
        three = net.three(two)
        up = net.up_three(torch.cat([three, net.middle(three)], 1))
        return net.up_one(torch.cat([one, net.up_two(torch.cat([two, up], 1))], 1))  # type: ignore[no-any-return]  # the attributes are not declared

    sizes = {"first": (4, 4), "one": (4, 6), "two": (6, 5), "three": (5, 3), "middle": (3, 3)}
    sizes |= {"up_three": (6, 5), "up_two": (10, 6), "up_one": (12, 4)}
    net = Net(forward, **{name: linear(*size) for name, size in sizes.items()})
    view = fit_view(capture_graph(net, X))
    side, edges = sides(view) or ({}, [])
    assert [node.name for node in view.nodes if side.get(node.id) == 0] == ["input", "first", "one", "two", "three"]
    pairs = [(view[edge.source].name, view[edge.target].name) for edge in edges]
    assert pairs == [("one", "cat"), ("two", "cat"), ("three", "cat"), ("three", "middle")]


def test_other_graphs_have_no_sides() -> None:
    """Nested residual connections of one shape, and those used in the order of their making, are no U-Net.

    The same holds for a tensor that two concatenations take, for tensors that do not depend on each other, for a
    residual connection in one of several equal blocks, and for a buffer that is subtracted first and added last.
    """

    def nested(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        return x + net.d(y + net.c(net.b(y)))  # type: ignore[no-any-return]  # the attributes are not declared

    def in_order(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        z = net.b(y)
        return net.d(net.c(z) + x) + y + z  # type: ignore[no-any-return]  # the attributes are not declared

    def dense(net: Any, x: Tensor) -> Tensor:
        y = net.a(x)
        z = net.b(y)
        up = net.c(torch.cat([z, net.d(z)]))
        return torch.cat([y, torch.cat([y, up])])

    def apart(net: Any, x: Tensor) -> Tensor:
        y, z = net.a(x), net.b(x[:1])
        return net.d(net.c(z) + z) + y  # type: ignore[no-any-return]  # the attributes are not declared

    def centered(net: Any, x: Tensor) -> Tensor:
        y = net.b(net.a(x - net.mean))
        return net.mean + net.f(net.e(y + net.d(net.c(y))))  # type: ignore[no-any-return]  # as above

    for forward in (nested, in_order, dense, apart, centered):
        net = Net(forward, **{name: linear() for name in "abcdef"})
        net.register_buffer("mean", torch.ones(4))
        assert sides(fit_view(capture_graph(net, X))) is None


def test_calls_beside_each_other_are_in_the_order_of_time(tmp_path: Path) -> None:
    """The calls of a GAN's discriminator, of which none needs another one, are read from left to right.

    The titles of their frames are at the left, and no line passes through them.
    """
    generator = nn.Sequential(linear(), nn.ReLU(), linear(), nn.Tanh())
    discriminator = nn.Sequential(linear(), nn.LeakyReLU(), nn.Dropout(), nn.Linear(4, 1))
    net = nn.ModuleDict({"generator": generator, "discriminator": discriminator})
    with GraphCapture(net, X, scope="training_step") as capture:
        made = generator(torch.randn(2, 4))
        one, zero = torch.ones(2, 1), torch.zeros(2, 1)
        score = F.binary_cross_entropy_with_logits
        loss = score(discriminator(X), one) + score(discriminator(made.detach()), zero)
        loss.backward()
        score(discriminator(made), one).backward()
    drawing = draw(capture.graph())
    path = drawing.save(tmp_path / "graph.svg")
    picture = read_svg(path)
    frames = [_item(picture, call) for call in drawing.view.module_calls() if call.name == "discriminator"]
    assert [frame.lines[0].strip() for frame in frames] == [
        "discriminator",
        "discriminator (call 2)",
        "discriminator (call 3)",
    ]
    assert all(one.right < other.left for one, other in pairwise(frames))
    assert all(frame.texts[0].left < (frame.left + frame.right) / 2 for frame in frames)
    assert set(edges_over_titles(path)) == set()


def test_a_line_inside_a_frame_does_not_leave_it(tmp_path: Path) -> None:
    """The line around a block inside of a repeated part stays inside the frame of the part, also on one sheet."""

    def forward(net: Any, x: Tensor) -> Tensor:
        for block in net.blocks:
            x = x + block(x)
        return x

    net = Net(forward, blocks=nn.ModuleList(nn.Sequential(linear(), nn.ReLU(), linear()) for _ in range(3)))
    picture = read_svg(draw(net, X).save(tmp_path / "graph.svg"))
    frame = next(item for item in picture.items if item.kind == "cluster" and "×3" in item.lines[0])
    inside = {item.name for item in picture.nodes() if frame.top < item.top and item.bottom < frame.bottom}
    lines = [item for item in picture.items if item.kind == "edge" and set(item.name.split("->")) <= inside]
    assert len(lines) == 5
    assert all(frame.left <= line.left and line.right <= frame.right for line in lines)


def test_the_input_is_above_the_frame_that_takes_it(tmp_path: Path) -> None:
    """A frame that begins with a constant does not begin beside the input of the model."""

    def inner(net: Any, x: Tensor) -> Tensor:
        return net.fc(x) * (1 + net.scale)  # type: ignore[no-any-return]  # the attributes are not declared

    part = Net(inner, fc=linear(), act=nn.ReLU())
    part.scale = nn.Parameter(torch.ones(4))
    net = Net(lambda net, x: net.part(x), part=part)
    drawing = draw(net, X)
    picture = read_svg(drawing.save(tmp_path / "graph.svg"))
    start = next(node for node in drawing.view.nodes if node.kind == "input")
    frame = next(item for item in picture.items if item.kind == "cluster")
    assert picture.named(f"n{start.id}").bottom <= frame.top


def test_an_input_that_a_frame_takes_late_is_inside(tmp_path: Path) -> None:
    """The labels of a model that computes its loss are in its frame, above the loss. The first input is outside.

    A mask that each repetition takes is not inside the repeated frame.
    """

    def inner(net: Any, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        for block in net.blocks:
            x = block(x, mask)
        return torch.nn.functional.mse_loss(net.head(x), labels)

    def block(net: Any, x: Tensor, mask: Tensor) -> Tensor:
        return net.fc(x) * mask  # type: ignore[no-any-return]  # the attributes are not declared

    blocks = nn.ModuleList(Net(block, fc=linear()) for _ in range(3))
    net = Net(lambda net, *inputs: net.part(*inputs), part=Net(inner, blocks=blocks, head=linear()))
    drawing = draw(net, [X, X + 1, X + 2])
    picture = read_svg(drawing.save(tmp_path / "graph.svg"))
    boxes = [picture.named(f"n{node.id}") for node in drawing.view.nodes if node.kind == "input"]
    outer, repeated = (item for item in picture.items if item.kind == "cluster")
    inside = [
        [frame.left < box.left and box.right < frame.right and frame.top < box.top for box in boxes]
        for frame in (outer, repeated)
    ]
    assert inside == [[False, True, True], [False, False, False]]
    loss = next(node for node in drawing.view.nodes if node.name == "mse_loss")
    assert boxes[2].bottom < picture.named(f"n{loss.id}").top


def test_the_input_is_above_a_frame_whose_first_layer_takes_a_constant(tmp_path: Path) -> None:
    """An input is above the frame even if each node that takes it also takes a constant of the frame."""

    def inner(net: Any, x: Tensor) -> Tensor:
        return net.act(net.fc(x * torch.ones(4).cumsum(0)))  # type: ignore[no-any-return]  # as above

    drawing = draw(Net(lambda net, x: net.part(x), part=Net(inner, fc=linear(), act=nn.ReLU())), X)
    picture = read_svg(drawing.save(tmp_path / "graph.svg"))
    start = next(node for node in drawing.view.nodes if node.kind == "input")
    frame = next(item for item in picture.items if item.kind == "cluster")
    assert picture.named(f"n{start.id}").bottom <= frame.top
