"""The Graphviz document, and its appearance after layout."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args
from xml.etree import ElementTree as ET

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from typing_extensions import override

from lightning_recorder import ArgumentError, ForwardError
from lightning_recorder.graph import (
    Direction,
    Edge,
    Graph,
    GraphCapture,
    GraphvizRenderer,
    GraphvizStyler,
    Layout,
    Node,
    TensorMeta,
    capture_graph,
    collapse,
    fit_view,
    fold_repeats,
    to_mermaid,
    without,
)
from lightning_recorder.graph.model import Kind
from lightning_recorder.graph.renderers.graphviz_styler import Shapes
from lightning_recorder.graph.views.fit import drawn_nodes
from lightning_recorder.graph.views.ports import with_ports
from tests.graph.nets import Net, X, linear
from tests.graph.queries import only
from tests.graph.sketch import Sketch
from tests.graph.svg import Picture, read_svg


def block() -> nn.Module:
    return Net(lambda net, x: x + net.inner(x), inner=nn.Sequential(linear(), nn.ReLU()))


def draw(graph: Graph, folder: Path, styler: GraphvizStyler | None = None, direction: Direction = "TB") -> Picture:
    """Lay out a graph and parse the SVG."""
    document = folder / "graph.dot"
    document.write_text(
        GraphvizRenderer(graph, styler, direction=direction, wrap=False).render().source, encoding="utf-8"
    )
    (path,) = Layout(document, ("svg",)).finish()
    return read_svg(path)


def _step() -> Graph:
    """Return a training step with every kind of node, frames, calls, several tensors on an edge, and repetitions."""

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2)
            self.norm = nn.BatchNorm1d(4)
            self.blocks = nn.Sequential(*(block() for _ in range(5)))
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> Any:
            x = self.attention(x, x, x)[0][0] * self.scale + OUTSIDE
            x = self.blocks(self.norm(x))
            left, right = x.chunk(2)
            return torch.cat((left, right)).sum()

    net = Step()
    with GraphCapture(net, X[None], name="batch", scope="training_step") as recording:
        net(X[None]).backward()
    return recording.graph()


def _gpt2() -> Graph:
    net = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=20, n_positions=8, n_embd=12, n_layer=12, n_head=2))
    with GraphCapture(net, {"input_ids": torch.tensor([[1, 2]])}, name="batch", scope="training_step") as recording:
        net(input_ids=torch.tensor([[1, 2]]), labels=torch.tensor([[1, 2]])).loss.backward()
    return fit_view(recording.graph())


OUTSIDE = torch.ones(4)
PICTURES = {
    "fitted step": lambda: fit_view(_step()),
    "whole step": _step,
    "folded step": lambda: fold_repeats(collapse(_step())),
    "GPT-2": _gpt2,
    "small": lambda: fit_view(capture_graph(nn.Sequential(nn.ReLU()), X)),
}


# The document.


def test_document_of_a_small_model() -> None:
    """A node is named by its id; its label has name, class with size, and shape, each escaped in one place."""
    graph = fit_view(capture_graph(nn.Sequential(nn.Linear(4, 3)), X))
    body = GraphvizRenderer(graph).render().body
    nodes = [line.strip() for line in body if re.match(r"\s*n\d", line)]
    assert [line.split(" [")[0] for line in nodes] == ["n1", "n2", "n6", "n1 -> n2", "n2 -> n6"]
    assert "<b>input</b>" in nodes[0]
    assert ">2×4</font>" in nodes[0]
    assert "shape=ellipse" in nodes[0]
    assert "<b>0</b>" in nodes[1]
    assert ">Linear · 15 parameters</font>" in nodes[1]
    assert ">2×3</font>" in nodes[1]
    assert "shape=box" in nodes[1]


@pytest.mark.parametrize("direction", ["TB", "LR", "BT", "RL"])
def test_direction(direction: Direction, tmp_path: Path) -> None:
    """The data flows in the requested direction."""
    picture = draw(fit_view(capture_graph(nn.Sequential(linear(), nn.ReLU()), X)), tmp_path, direction=direction)
    first, last = picture.named("n1"), picture.named("n6")
    gone = {
        "TB": last.top - first.bottom,
        "BT": first.top - last.bottom,
        "LR": last.left - first.right,
        "RL": first.left - last.right,
    }
    assert {name for name, distance in gone.items() if distance > 0} == {direction}


@pytest.mark.parametrize("direction", ["", "down", "tb", None])
def test_other_directions(direction: Any) -> None:
    """A direction that Graphviz does not support is rejected with a list of those it does."""
    with pytest.raises(ArgumentError, match="TB, LR, BT, RL"):
        GraphvizRenderer(capture_graph(nn.ReLU(), X), direction=direction)


# The appearance.


@pytest.mark.parametrize("make", PICTURES.values(), ids=PICTURES)
def test_everything_is_drawn_once(make: Any, tmp_path: Path) -> None:
    """Each drawn node is one node, each open call and the loss is a frame, and each edge is one line of the picture."""
    graph = make()
    picture = draw(graph, tmp_path)
    graph = with_ports(graph)
    seen = Counter((item.kind, item.name) for item in picture.items)
    drawn = drawn_nodes(graph)
    frames = [node.id for node in graph.module_calls() if node not in drawn]
    losses = ["loss"] * any(node.scope == "loss" for node in drawn)
    assert seen == Counter(
        [
            *(("node", f"n{node.id}") for node in drawn),
            *(("cluster", f"cluster_{frame}") for frame in [*frames, *losses]),
            *(("edge", f"n{edge.source}->n{edge.target}") for edge in graph.edges),
        ]
    )


@pytest.mark.parametrize("direction", ["TB", "LR"])
@pytest.mark.parametrize("make", PICTURES.values(), ids=PICTURES)
def test_every_text_has_its_place(make: Any, direction: Direction, tmp_path: Path) -> None:
    """Every text is inside its box and the canvas, and has at least 9 pixels at the nominal size of the SVG."""
    picture = draw(make(), tmp_path, direction=direction)
    assert len(picture.texts) >= 2 * len(picture.nodes())
    for item in picture.items:
        if item.kind != "edge":
            for text in item.texts:
                assert item.left <= text.left <= text.right <= item.right, text.content
                assert item.top <= text.baseline - text.size * 0.7 <= text.baseline <= item.bottom, text.content
    for text in picture.texts:
        assert 0 <= text.left <= text.right <= picture.width, text.content
        assert 0 <= text.baseline - text.size * 0.7 <= text.baseline <= picture.height, text.content
        assert text.size * picture.px_per_unit >= 9


@pytest.mark.parametrize("make", PICTURES.values(), ids=PICTURES)
def test_nodes_do_not_cover_each_other(make: Any, tmp_path: Path) -> None:
    """No two nodes overlap."""
    nodes = draw(make(), tmp_path).nodes()
    for index, one in enumerate(nodes):
        for other in nodes[index + 1 :]:
            apart = (one.right <= other.left, other.right <= one.left, one.bottom <= other.top, other.bottom <= one.top)
            assert any(apart), (one.lines, other.lines)


def test_labels_say_what_there_is(tmp_path: Path) -> None:
    """A node shows name, class, size and shape; a frame the rest of its name; a repetition its number."""
    graph = fit_view(_step())
    picture = draw(graph, tmp_path)
    lines = {item.name: item.lines for item in picture.items}
    assert lines[f"n{only(graph, 'batch').id}"] == ["batch", "1×2×4"]
    assert lines[f"n{only(graph, 'norm').id}"] == ["norm", "BatchNorm1d · 8 parameters", "2×4"]
    assert lines[f"n{only(graph, 'cat').id}"] == ["cat", "2×4"]
    assert lines[f"n{only(graph, 'backward').id}"] == ["loss → backward"]
    assert lines[f"cluster_{only(graph, 'blocks.0').id}"] == ["0 ×5", "Net", "20 parameters"]
    assert lines[f"n{only(graph, 'blocks.0.inner.1').id}"] == ["1", "ReLU", "2×4"]


def test_the_title_is_the_model(tmp_path: Path) -> None:
    """The title shows the model's class, the recorded method, and all of the model's parameters."""
    picture = draw(fit_view(_step()), tmp_path)
    # Attention 3 * (16 + 4) + 16 + 4, norm 8, blocks 5 * 20, scale 4.
    assert [text.content for text in picture.texts[:2]] == ["Step", ".training_step · 192 parameters"]


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (1, "1"),
        (9_999, "9999"),
        (10_000, "10 k"),
        (124_439, "124 k"),
        (1_234_567, "1.23 M"),
        (124_439_808, "124 M"),
        (7_000_000_000, "7 G"),
    ],
)
def test_large_numbers_are_short(number: int, shown: str) -> None:
    """A number of parameters has at most four digits."""
    root = Node(0, "module", "", None, 0, type_name="Net")
    graph = Graph((root, Node(1, "module", "fc", 0, 1, type_name="Linear", parameters=number)), ())
    assert f"Linear · {shown} parameter{'s' * (number > 1)}<" in GraphvizRenderer(graph).render().source


def test_second_call_is_numbered(tmp_path: Path) -> None:
    """The second call of a module shows its number."""
    graph = fit_view(capture_graph(Net(lambda net, x: net.fc(net.act(net.fc(x))), fc=linear(), act=nn.ReLU()), X))
    assert [item.lines[0] for item in draw(graph, tmp_path).nodes()] == [
        "input",
        "fc",
        "act",
        "fc (call 2)",
        "output",
    ]


def test_edges_with_several_tensors_say_so(tmp_path: Path) -> None:
    """Two tensors on one edge are shown as a number, unless they are one tensor in each of several repetitions."""
    twice = Net(lambda _, x: torch.add(*x.exp().chunk(2, dim=1)))
    (edge,) = (
        item for item in draw(fit_view(capture_graph(twice, X)), tmp_path).items if item.kind == "edge" and item.texts
    )
    assert [line.strip() for line in edge.lines] == ["×2"]
    repeated = nn.Sequential(*(block() for _ in range(5)))
    picture = draw(fit_view(capture_graph(repeated, X)), tmp_path)
    words = [line.strip() for item in picture.items if item.kind == "edge" for line in item.lines]
    assert [word for word in words if word] == []
    assert [item.lines for item in picture.items if "×5" in "".join(item.lines)] != []


@pytest.mark.parametrize(
    ("places", "words", "about"),
    [
        ((0, 1), "×2", ", output 0, 1"),
        ((1, 0), "×2 outputs 1, 0", ", output 1, 0"),
        ((1,), "", ", output 1"),
        ((0, 0), "×2", ""),
    ],
)
def test_edges_tell_another_order_of_outputs(places: tuple[int, ...], words: str, about: str) -> None:
    """A label tells the order in which the outputs of a function are used, unless it is their own; a tooltip always."""

    def forward(_: Net, x: Tensor) -> Tensor:
        parts = x.exp().chunk(2, dim=1)
        return torch.cat([parts[place] for place in places], dim=1)

    graph = capture_graph(Net(forward), X)
    (edge,) = (edge for edge in graph.edges if graph[edge.target].name == "cat")
    style = GraphvizStyler().style_edge(edge, graph)
    assert re.sub("<[^>]*>", "", style.get("label", "")).strip("<> ") == words
    assert style["tooltip"].endswith(f"2×2{about}")


LINEAR = "in_features=4, out_features=4, bias=True"


def test_pointer_shows_the_rest(tmp_path: Path) -> None:
    """The tooltip has the full name, class, dtypes with shapes, autograd types, source line, arguments and inputs."""
    net = nn.Sequential(nn.Sequential(linear(), nn.ReLU()))
    line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]  # CPython has frames
    graph = capture_graph(net, X)
    here = f"tests/graph/renderers/test_graphviz.py:{line}"
    assert [item.tooltip for item in draw(fit_view(graph), tmp_path).nodes()] == [
        "input · float32 2×4",
        f"0.0 · Linear · float32 2×4 · {here} · {LINEAR} · takes 2×4 · returns 32 B",
        f"0.1 · ReLU · float32 2×4 · {here} · takes 2×4 · returns 32 B",
        "output · float32 2×4",
    ]
    inside = draw(without(graph, ("parameter", "buffer")), tmp_path)
    assert [item.tooltip for item in inside.nodes()][1:3] == [
        f"linear · float32 2×4 · AddmmBackward0, TBackward0 · {here} · takes 2×4, 4×4, [4] · returns 32 B",
        f"relu · float32 2×4 · ReluBackward0 · {here} · takes 2×4 · returns 32 B",
    ]


def test_svg_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    """The SVG loads and runs nothing and, without links to the code, links nothing, so it can be shown anywhere."""
    draw(fit_view(_step()), tmp_path, GraphvizStyler(link=None))
    source = (tmp_path / "graph.svg").read_text(encoding="utf-8")
    root = ET.fromstring(source)
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert tags <= {"svg", "g", "title", "polygon", "path", "ellipse", "polyline", "text", "a"}
    attributes = {name.rpartition("}")[2] for element in root.iter() for name in element.attrib}
    assert not {name for name in attributes if name in ("href", "src", "style") or name.startswith("on")}
    assert "url(" not in source
    assert "@import" not in source


# Options.


def test_shapes_on_the_edges(tmp_path: Path) -> None:
    """Shapes may be on the edges or nowhere instead of in the nodes."""
    graph = fit_view(capture_graph(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), X))
    shown = {}
    for shapes in get_args(Shapes):
        picture = draw(graph, tmp_path, GraphvizStyler(shapes=shapes))
        shown[shapes] = [[line.strip() for line in each.lines if "×" in line] for each in picture.items]
    in_nodes, on_edges, nowhere = ([line for lines in each for line in lines] for each in shown.values())
    assert (in_nodes, on_edges, nowhere) == (["2×4", "2×3", "2×3", "2×3"], ["2×4", "2×3", "2×3"], [])
    with pytest.raises(ArgumentError, match="shapes must be one of nodes, edges, none, got 'all'"):
        GraphvizStyler(shapes="all")  # type: ignore[arg-type]  # deliberately invalid


def test_legend_names_the_kinds_that_are_there(tmp_path: Path) -> None:
    """On request, a legend has one example of each kind of node in the picture."""
    with GraphCapture(nn.Sequential(linear()), X) as recording:
        recording.module(X).sum().backward()
    graph = fit_view(recording.graph())
    source = GraphvizRenderer(graph, legend=True).render().source
    (tmp_path / "graph.dot").write_text(source, encoding="utf-8")
    Layout(tmp_path / "graph.dot", ["svg"]).finish()
    picture = read_svg(tmp_path / "graph.svg")
    names = {item.name: item.lines for item in picture.items if item.name.startswith("legend_")}
    assert names == {
        "legend_module": ["module"],
        "legend_op": ["function"],
        "legend_input": ["input"],
        "legend_backward": ["backward pass"],
    }
    assert "legend" not in GraphvizRenderer(graph).render().source


def test_without_frames(tmp_path: Path) -> None:
    """Without frames the same nodes and edges are drawn."""
    graph = fit_view(capture_graph(nn.Sequential(nn.Sequential(linear(), nn.ReLU()), nn.Tanh()), X))
    framed, bare = (GraphvizRenderer(graph, frames=frames).render().source for frames in (True, False))
    assert ("cluster_" in framed, "cluster_" in bare) == (True, False)
    lines = [{line.strip() for line in source.splitlines() if re.match(r"\s*n\d", line)} for source in (framed, bare)]
    assert lines[0] == lines[1]


def test_the_loss_has_a_frame(tmp_path: Path) -> None:
    """The nodes between the last layer and a backward pass are in a frame, one for each pass."""
    net = nn.Sequential(linear(4, 1))
    with GraphCapture(net, X, scope="training_step") as recording:
        for _round in range(2):
            (net(X).square().sum() / 2).backward()
    picture = draw(fit_view(recording.graph()), tmp_path)
    frames = [item for item in picture.items if item.kind == "cluster"]
    assert [(item.name, item.lines) for item in frames] == [("cluster_loss", ["loss"]), ("cluster_loss_2", ["loss 2"])]
    for frame in frames:
        names = [node.lines[0] for node in picture.nodes() if frame.contains(node)]
        assert names == ["square", "sum", "div"]


def test_a_target_without_a_gradient_is_outside_of_the_loss(tmp_path: Path) -> None:
    """Functions that compute a target from the result of a network, without a gradient, are not in the frame."""
    net = linear()
    with GraphCapture(net, X, scope="training_step") as recording:
        with torch.no_grad():
            target = net(X).tanh().exp()
        nn.functional.mse_loss(net(X).sin(), target).backward()
    picture = draw(fit_view(recording.graph()), tmp_path)
    (frame,) = (item for item in picture.items if item.kind == "cluster")
    assert {node.lines[0] for node in picture.nodes() if frame.contains(node)} == {"sin", "mse_loss"}


def test_the_main_path_is_kept_straight() -> None:
    """The edges of the longer branch of a residual block weigh more, so that the shorter one is drawn around it."""
    net = Net(lambda net, x: x + net.fc(x).exp(), fc=linear())
    graph = fit_view(capture_graph(net, X))
    body = GraphvizRenderer(graph).render().body
    heavy = {line.split(" [")[0].strip() for line in body if "weight=500" in line}
    ids = {node.name: f"n{node.id}" for node in graph.nodes}
    names = [("input", "fc"), ("fc", "exp"), ("exp", "add"), ("add", "output")]
    assert heavy == {f"{ids[one]} -> {ids[other]}" for one, other in names}


def test_what_failed_is_marked(tmp_path: Path) -> None:
    """The function that raised, and the calls around it, have a red border, and the function has a remark."""
    net = nn.Sequential(linear(), nn.Sequential(linear(3)))
    with pytest.raises(ForwardError) as caught:
        capture_graph(net, X)
    graph = without(caught.value.graph, ("parameter", "buffer"))
    picture = draw(graph, tmp_path)
    source = (tmp_path / "graph.svg").read_text(encoding="utf-8")
    assert [item.name for item in picture.items if "failed here" in item.lines] == [f"n{graph.nodes[-1].id}"]
    assert source.count("#d4002a") == 3  # two frames and the function


# Unusual names.


def without_sources(graph: Graph) -> Graph:
    """Return the graph without source lines, which depend on the test rather than on the name."""
    return replace(graph, nodes=tuple(replace(node, source="") for node in graph.nodes))


HOSTILE = [
    '<b>"x"</b>',
    "]]>",
    "-->",
    "</svg><script>alert(1)</script>",
    "back\\slash",
    "end\\",
    "\\N",
    "\\G\\E\\T\\H\\L",
    "\\n\\l\\r",
    "\\\\N",
    "quo'te\"s",
    '\\"',
    "%",
    "%s %(x)s {x} {0}",
    "&amp; &lt; &#92;N",
    "n1 -> n2; }",
    "<br/>",
    "{a|b}",
    "héllo wörld",
    "名前",
    "🔥",
]


@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: ascii(name)[:30])
def test_hostile_names_are_shown_as_they_are(name: str, tmp_path: Path) -> None:
    """Any name of a module or a key of the batch is shown literally and has no other effect."""
    part = nn.Sequential(linear(), nn.ReLU())
    part.add_module(name, nn.Tanh())
    net = nn.Sequential()
    net.add_module(name, part)
    with GraphCapture(net, {name: X}, name="batch") as recording:
        net(X)
    picture = draw(without_sources(fit_view(recording.graph())), tmp_path)
    assert [item.name for item in picture.items if item.kind != "edge"] == ["cluster_2", "n1", "n3", "n7", "n9"]
    assert picture.named("n9").lines == [name, "Tanh", "2×4"]
    assert picture.named("cluster_2").lines == [name, "Sequential", "20 parameters"]
    assert picture.named("n1").lines == [_key(name), "2×4"]
    assert {item.name: item.tooltip for item in picture.items if item.kind != "edge"} == {
        "n1": f"{_key(name)} · float32 2×4",
        "cluster_2": f"{name} · Sequential · float32 2×4 · takes 2×4 · returns 32 B",
        "n3": f"{name}.0 · Linear · float32 2×4 · {LINEAR} · takes 2×4 · returns 32 B",
        "n7": f"{name}.1 · ReLU · float32 2×4 · takes 2×4 · returns 32 B",
        "n9": f"{name}.{name} · Tanh · float32 2×4 · takes 2×4 · returns 32 B",
    }


def test_a_long_name_is_shortened(tmp_path: Path) -> None:
    """A name of more than 60 characters is cut in the middle; the tooltip shows all of it."""
    name = f"{'a' * 200}{'b' * 200}"
    net = nn.Sequential()
    net.add_module(name, nn.Sequential(nn.Tanh(), nn.ReLU()))
    picture = draw(fit_view(capture_graph(net, X)), tmp_path)
    assert picture.named("cluster_2").lines[0] == f"{'a' * 30}…{'b' * 30}"
    assert picture.named("cluster_2").tooltip.startswith(f"{name} · Sequential")
    assert picture.width < 1200


def _key(name: str) -> str:
    return f"batch.{name}" if name.isidentifier() else f"batch[{name!r}]"


@pytest.mark.parametrize(
    "name", ["new\nline", "tab\tbed", "nul\0", "bell\a", "\x1b[31m", "\u202egpj", "\ud800"], ids=ascii
)
def test_what_cannot_be_printed_is_replaced(name: str, tmp_path: Path) -> None:
    """The printable part of an unprintable name is shown, and the picture is valid."""
    net = nn.Sequential()
    net.add_module(name, nn.Tanh())
    shown = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in name)
    node = draw(without_sources(fit_view(capture_graph(net, X))), tmp_path).named("n2")
    assert (node.lines[0], node.tooltip) == (shown, f"{shown} · Tanh · float32 2×4 · takes 2×4 · returns 32 B")


def test_hostile_class_names(tmp_path: Path) -> None:
    """Class names of the model and its modules are also escaped."""
    part = type("Part<\\N>", (nn.Tanh,), {})()
    model = type('Mod"&el', (nn.Sequential,), {})(part)
    picture = draw(fit_view(capture_graph(model, X)), tmp_path)
    assert picture.texts[0].content == 'Mod"&el'
    assert picture.named("n2").lines == ["0", "Part<\\N>", "2×4"]


# Styles.


class _ByClass(GraphvizStyler):
    """Normalization in yellow, and edges with their shapes."""

    @override
    def style_node(self, node: Node, graph: Graph) -> dict[str, str]:
        style = super().style_node(node, graph)
        return {**style, "fillcolor": "#ffff00"} if "Norm" in node.type_name else style

    @override
    def style_edge(self, edge: Edge, graph: Graph) -> dict[str, str]:
        return {"label": str(edge.tensor)}

    @override
    def style_frame(self, node: Node, graph: Graph) -> dict[str, str]:
        return {**super().style_frame(node, graph), "bgcolor": "#00ff00"}

    @override
    def style_title(self, graph: Graph) -> dict[str, str]:
        return {"label": f"{len(graph.nodes)} nodes"}


def test_a_styler_of_ones_own(tmp_path: Path) -> None:
    """A subclass of the styler decides how nodes, edges, frames and the title look."""
    graph = fit_view(capture_graph(nn.Sequential(nn.Sequential(nn.LayerNorm(4), nn.ReLU())), X))
    picture = draw(graph, tmp_path, _ByClass())
    source = (tmp_path / "graph.svg").read_text(encoding="utf-8")
    assert (source.count("#ffff00"), source.count("#00ff00")) == (1, 1)
    # Plain labels are centered, and read_svg measures left-aligned ones.
    assert re.findall(r">(2×4|\d+ nodes)</text>", source).count("2×4") == len(picture.nodes()) + 3
    assert f"{len(graph.nodes)} nodes</text>" in source


def test_attributes_for_all_nodes(tmp_path: Path) -> None:
    """The attributes of a styler apply to every node and override those of its kind."""
    graph = fit_view(capture_graph(nn.Sequential(linear(), nn.ReLU()), X))
    draw(graph, tmp_path, GraphvizStyler(fillcolor="#123456", shape="octagon"))
    source = (tmp_path / "graph.svg").read_text(encoding="utf-8")
    assert source.count("#123456") == len(drawn_nodes(graph))
    assert "#dbe9f6" not in source


def test_every_kind_has_its_own_look() -> None:
    """Two kinds of nodes differ in color; tensors differ from computations in shape."""
    kinds = get_args(Kind)
    root = Node(0, "module", "", None, 0)
    nodes = [Node(index, kind, "x", 0, 1, outputs=(TensorMeta((), "float32"),)) for index, kind in enumerate(kinds, 1)]
    styles = [GraphvizStyler().style_node(node, Graph((root, *nodes), ())) for node in nodes]
    assert len({(style["fillcolor"], style["color"], style["shape"]) for style in styles}) == len(kinds)
    assert [style["shape"] for style in styles] == ["box", "box", *["ellipse"] * 5, "box", "box", "circle"]


def test_the_next_repetition_has_a_dashed_line(tmp_path: Path) -> None:
    """An edge to the next repetition is dashed and labeled, unlike the flow inside one repetition."""
    sketch = Sketch()
    cell = sketch.call("cell", "GRUCell", sketch.add("input", "x"), repeats=5)
    sketch.edges.append(Edge(cell, cell, 4, across=((cell, "next"),)))
    edges = [line for line in GraphvizRenderer(sketch.graph()).render().body if "->" in line]
    assert ["style=dashed" in line for line in edges] == [False, True]
    assert [item.lines for item in draw(sketch.graph(), tmp_path).items if item.kind == "edge" and item.texts] == [
        [" next "]
    ]


def test_a_single_function_has_no_frame_of_its_own() -> None:
    """States that are made before two pairs of layers use them are one node, without a frame for the pairs."""

    def mix(net: Any, x: Tensor, state: Tensor) -> Tensor:
        return net.two(net.one(x) * state)  # type: ignore[no-any-return]  # the attributes are not declared

    def attend(net: Any, x: Tensor) -> Tensor:
        return net.one(x).tanh() + x  # type: ignore[no-any-return]  # as above

    def forward(net: Any, x: Tensor) -> Tensor:
        states = [torch.zeros(2, 4) for _ in range(4)]
        for layer in net.layers:
            x = layer(x) if hasattr(layer, "last") else layer(x, states.pop(0))
        return x

    def last() -> nn.Module:
        layer = Net(attend, one=linear())
        layer.last = True  # type: ignore[assignment]  # as above
        return layer

    pairs = [Net(mix, one=linear(), two=linear()) for _ in range(4)]
    layers = nn.ModuleList([*pairs[:2], last(), *pairs[2:], last()])
    view = fit_view(capture_graph(Net(forward, layers=layers), X))
    zeros = only(view, "zeros")
    assert (zeros.repeats, view[zeros.parent or 0].repeats) == (2, 2)
    source = GraphvizRenderer(view).render().source
    assert "zeros ×4 side by side" in source
    assert f"cluster_{zeros.parent} " not in source
    text = to_mermaid(view)
    assert "zeros ×4 side by side" in text
    assert text.count("subgraph") == source.count("subgraph")
