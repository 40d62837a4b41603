"""Drawing a model in one call."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typing_extensions import override

from lightning_recorder import ArgumentError, ForwardError, RenderError
from lightning_recorder.graph import (
    Edge,
    Graph,
    GraphvizRenderer,
    GraphvizStyler,
    Node,
    collapse,
    draw,
    make_dot,
    record,
    render_network,
    to_text,
)
from tests.graph.nets import Net, X, linear
from tests.graph.outline import text
from tests.graph.svg import read_svg


def residual() -> nn.Module:
    """Return a model: stem -> body(inner(fc, act), + scaled input) -> exp."""
    body = Net(
        lambda net, x: net.inner(x) + x * net.scale,
        inner=nn.Sequential(linear(), nn.ReLU()),
    )
    body.scale = nn.Parameter(torch.ones(4))
    return Net(lambda net, x: net.body(net.stem(x)).exp(), stem=linear(), body=body)


def small() -> nn.Module:
    return nn.Sequential(linear(), nn.ReLU())


def sketch(source: str, graph: Graph) -> str:
    """Return the contents of a DOT document: nodes indented by their frames, then edges, with names from a graph.

    An edge through ports is an edge from the node before them.
    """
    lines, edges, depth = [], [], 0
    ports = set(re.findall(r"^\s*n(\d+) \[.*width=0\.08", source, re.MULTILINE))
    before = {target: one for one, target in re.findall(r"n(\d+) -> n(\d+)", source) if target in ports}
    for line in source.splitlines():
        if re.match(rf"\s*n({'|'.join(ports) or '-'}) \[|.* -> n({'|'.join(ports) or '-'}) |.*style=invis", line):
            continue
        node, edge, frame = (
            re.match(pattern, line.strip())
            for pattern in (r"n(\d+) \[", r"n(\d+) -> n(\d+)", r"subgraph cluster_(\d+)")
        )
        if edge:
            one, other = edge.groups()
            while one in ports:
                one = before[one]
            edges.append(f"{graph[int(one)].name} -> {graph[int(other)].name}")
        elif node or frame:
            assert (node or frame) is not None
            number = int((node or frame)[1])  # type: ignore[index]  # one of the two
            lines.append("  " * depth + graph[number].name + (" {" if frame else ""))
        depth += frame is not None
        depth -= line.strip() == "}"
    return "\n".join([*lines, *edges])


# make_dot


def test_depth_of_a_document() -> None:
    """Nodes down to the depth are drawn, parameters included; deeper nodes are merged into calls at that depth."""
    graph = record(residual(), input_data=X)
    assert sketch(make_dot(graph, 1).source, graph) == text(
        """
        input
        stem
        body
        exp
        output
        input -> stem
        stem -> body
        body -> exp
        exp -> output
        """
    )
    assert sketch(make_dot(graph, 2).source, graph) == text(
        """
        input
        stem {
          stem.weight
          stem.bias
          linear
        body {
          body.inner
          body.scale
          mul
          add
        exp
        output
        input -> linear
        stem.weight -> linear
        stem.bias -> linear
        linear -> body.inner
        linear -> mul
        body.scale -> mul
        body.inner -> add
        mul -> add
        add -> exp
        exp -> output
        """
    )


def test_all_depths_of_a_document() -> None:
    """Without a depth the whole recording is drawn, with a frame for each call."""
    graph = record(residual(), input_data=X)
    drawn = sketch(make_dot(graph).source, graph).splitlines()
    shown = [line.strip().removesuffix(" {") for line in drawn if "->" not in line]
    assert shown == [node.name for node in graph.nodes[1:]]
    assert [line for line in drawn if "->" in line] == [
        f"{graph[edge.source].name} -> {graph[edge.target].name}" for edge in graph.edges
    ]
    frames = {line.strip().removesuffix(" {") for line in drawn if line.endswith("{")}
    assert frames == {"stem", "body", "body.inner", "body.inner.0", "body.inner.1"}
    assert make_dot(graph, 4).source == make_dot(graph).source


def test_a_model_as_one_box() -> None:
    """At depth 0 the model is one box between its inputs and outputs, with all its parameters."""
    graph = record(residual(), input_data=X)
    view = collapse(graph, 0)
    root = view.children(view.root)[1]
    assert sketch(make_dot(graph, 0).source, view).splitlines()[0] == "input"
    assert [(node.kind, node.depth) for node in view.children(view.root)] == [
        ("input", 1),
        ("module", 1),
        ("output", 1),
    ]
    assert (root.type_name, root.parameters, [str(meta) for meta in root.outputs]) == (
        graph.root.type_name,
        graph.parameters,
        ["2×4"],
    )
    assert [(edge.source, edge.target) for edge in view.edges] == [(1, root.id), (root.id, graph.nodes[-1].id)]
    assert draw(graph, depth=0, max_nodes=5).visual_graph.source == draw(graph, depth=0).visual_graph.source
    assert f"{graph.root.type_name} · " in make_dot(graph, 0).source
    assert to_text(view).splitlines()[2] == f"├─ module  Net · {graph.parameters} parameters  2×4"


def test_a_model_as_one_box_that_returns_its_input() -> None:
    """An input that the model returns enters and leaves the box."""
    view = collapse(record(nn.Identity(), input_data=X), 0)
    assert [view[end].kind for edge in view.edges for end in (edge.source, edge.target)] == [
        "input",
        "module",
        "module",
        "output",
    ]


def test_infinite_depth_is_no_limit() -> None:
    """``float("inf")`` draws the same as no depth at all."""
    graph = record(residual(), input_data=X)
    assert make_dot(graph, math.inf).source == make_dot(graph).source
    assert draw(graph, depth=math.inf).view == draw(graph, depth=None).view


def test_a_styler_is_a_class() -> None:
    with pytest.raises(ArgumentError, match="styler_cls must be a subclass of GraphvizStyler, got 'dark'"):
        make_dot(record(small(), input_data=X), 1, "dark")  # type: ignore[arg-type]


@pytest.mark.parametrize("depth", [-1, 1.5, True, "2"])
def test_depth_of_a_document_is_an_integer_of_at_least_zero(depth: Any, tmp_path: Path) -> None:
    """A negative depth is rejected before the model runs."""
    calls: list[Any] = []
    net = Net(lambda _, x: calls.append(x))
    for make in (lambda: make_dot(record(small(), input_data=X), depth), lambda: draw(net, X, depth=depth)):
        with pytest.raises(ArgumentError, match="depth must be an integer of at least 0"):
            make()
    with pytest.raises(ArgumentError, match="render_depth must be an integer of at least 0"):
        render_network(net, "net", (2, 4), tmp_path, render_depth=depth)
    assert calls == []


class Louder(GraphvizStyler):
    """A custom styler with an argument of its own."""

    def __init__(self, *, mark: str, **attributes: Any) -> None:
        super().__init__(shapes="none", **attributes)
        self.mark = mark

    @override
    def style_node(self, node: Node, graph: Graph) -> dict[str, str]:
        return {**super().style_node(node, graph), "label": f"{node.kind}{self.mark}"}

    @override
    def style_edge(self, edge: Edge, graph: Graph) -> dict[str, str]:
        return {"label": self.mark}


def test_stylers(tmp_path: Path) -> None:
    """Attributes apply to all nodes, and a custom styler gets its arguments, also through ``render_network``."""
    graph = record(small(), input_data=X)
    nodes = [line for line in make_dot(graph, 1, fillcolor="white").body if re.match(r"\s*n\d+ \[", line)]
    assert [line.count("fillcolor=white") for line in nodes] == [1, 1, 1, 1]
    body = make_dot(graph, 1, Louder, mark="!", color="red").body
    labels = [found[1] for line in body if (found := re.match(r"\s*n\d+ \[label=\"?([^\" ]+)", line))]
    assert labels == ["input!", "module!", "module!", "output!"]
    assert sum("color=red" in line for line in body) == 4
    assert sum(bool(re.match(r'\s*n\d+ -> n\d+ \[label="!"', line)) for line in body) == 3
    path = render_network(small(), "net", (2, 4), tmp_path, styler_cls=Louder, mark="!")
    assert path.read_text(encoding="utf-8").count("module!") == 2


class OldStyler(GraphvizStyler):
    """A styler written for torchrecorder."""

    @override
    def style_node(self, node: Node) -> dict[str, str]:  # type: ignore[override]  # the point of the test
        style = super().style_node(node)  # type: ignore[call-arg]  # the point of the test
        assert self.graph is not None
        if isinstance(self.graph.module(node), nn.Linear):
            style["label"] = f"{node.name} of {self.graph.module(node).in_features}"
        return style


def test_stylers_of_torchrecorder() -> None:
    """A ``style_node`` without the graph is accepted, also where it calls the inherited one."""
    net = nn.Sequential(linear(), nn.ReLU())
    source = make_dot(record(net, input_data=X), 1, OldStyler, fillcolor="white").source
    assert 'label="0 of 4"' in source
    assert source.count("fillcolor=white") == 4


def test_stylers_of_torchrecorder_that_need_a_change() -> None:
    """The attribute ``fn`` and ``style_edge(fnode, tnode)`` are errors with the code to write instead."""

    class Reading(OldStyler):
        @override
        def style_node(self, node: Any) -> dict[str, str]:  # type: ignore[override]  # the point of the test
            return {"label": str(node.fn)}

    class OfModules(Reading):
        @override
        def style_node(self, node: Any) -> dict[str, str]:  # type: ignore[override]  # the point of the test
            return super().style_node(node) if node.kind == "module" else {}

    class Joining(GraphvizStyler):
        @override
        def style_edge(self, fnode: Any, tnode: Any) -> dict[str, str]:
            return {}

    class Naming(GraphvizStyler):
        @override
        def style_edge(self, f: Any, t: Any) -> dict[str, str]:
            return {"label": f.name + t.name}

    graph = record(small(), input_data=X)
    with pytest.raises(ArgumentError, match=r"^a node has no fn: write node\.outputs\[0\]\.shape"):
        make_dot(graph, 1, Reading)
    with pytest.raises(ArgumentError, match=r"^a node has no fn: write self\.graph\.module\(node\), which is its m"):
        make_dot(graph, 1, OfModules)
    for styler in (Joining, Naming):
        with pytest.raises(ArgumentError, match=r"write style_edge\(self, edge, graph\), where graph\[edge\.source\] "):
            make_dot(graph, 1, styler)


def test_arguments_of_torchrecorder_and_torchview() -> None:
    """The names and values of the originals are accepted, or are errors with the code to write instead."""
    graph = record(small(), "my/net", input_data=X)
    assert make_dot(rec=graph, render_depth=1).source == make_dot(graph, 1).source
    assert make_dot(graph).filename == "my_net.gv"
    with pytest.raises(ArgumentError, match=r"^make_dot takes a graph, such as the result of record"):
        make_dot()
    assert draw(graph, graph_dir=None).visual_graph.source == draw(graph).visual_graph.source
    with pytest.raises(ArgumentError, match=r"^Drawing\.resize_graph has no argument size_per_element: write resize_g"):
        draw(graph).resize_graph(scale=1.0, size_per_element=0.3)  # type: ignore[call-arg]  # the point of the test
    assert collapse(graph, float("inf")) == collapse(graph)
    with pytest.raises(ArgumentError, match=r"^GraphvizRenderer has no argument rec: write GraphvizRenderer\(collapse"):
        GraphvizRenderer(rec=graph)  # type: ignore[call-arg]  # the point of the test


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((2,), {}, r"got 2: write GraphvizRenderer\(collapse\(graph, 2, leaves=False\)\) for a depth$"),
        ((Louder,), {}, r"got the class: write Louder\(\)$"),
        ((), {"render_depth": 2}, r"write GraphvizRenderer\(collapse\(graph, render_depth, leaves=False\)\)$"),
        ((), {"styler_cls": Louder}, r"write GraphvizRenderer\(graph, styler_cls\(\)\)$"),
        (
            (),
            {"fontname": "Lato"},
            "GraphvizRenderer has no argument fontname: its arguments are graph, styler, d",
        ),
    ],
)
def test_arguments_of_torchrecorders_renderer(args: tuple[Any, ...], kwargs: dict[str, Any], message: str) -> None:
    """The arguments of torchrecorder's renderer are errors with the code to write instead."""
    with pytest.raises(ArgumentError, match=message):
        GraphvizRenderer(record(small(), input_data=X), *args, **kwargs)


# render_network


MAGIC = {"svg": b"<?xml", "png": b"\x89PNG\r\n", "pdf": b"%PDF-"}


@pytest.mark.parametrize("fmt", MAGIC)
def test_pictures_are_written_where_they_are_requested(fmt: str, tmp_path: Path) -> None:
    """The directory is created, the file has the given name and format, and its path is returned."""
    folder = tmp_path / "some" / "where"
    path = render_network(small(), "net", (2, 4), folder, "picture", fmt)
    assert path == folder / f"picture.{fmt}"
    assert path.read_bytes().startswith(MAGIC[fmt])
    assert list(folder.iterdir()) == [path]


def test_default_names_of_files(tmp_path: Path) -> None:
    """The file is named after the graph, by default the class of the model, and the depth; a file is replaced."""
    assert render_network(small(), "my net.v2", (2, 4), tmp_path).name == "my net.v2-1.svg"
    assert render_network(small(), "", (2, 4), tmp_path).name == "Sequential-1.svg"
    assert render_network(small(), "", (2, 4), tmp_path, render_depth=0).name == "Sequential-0.svg"
    first = (tmp_path / "Sequential-1.svg").read_bytes()
    path = render_network(small(), "", None, tmp_path, input_data=torch.ones(7, 4))
    assert path.read_bytes() != first
    assert len(list(tmp_path.iterdir())) == 3


def test_the_picture_of_a_network(tmp_path: Path) -> None:
    """The title of the picture is the name; by default it has one node for each layer, input and output."""
    picture = read_svg(render_network(residual(), "my net", (2, 4), str(tmp_path)))
    assert picture.texts[0].content == "my net"
    assert [item.lines[0] for item in picture.nodes()] == ["input", "stem", "body", "exp", "output"]


@pytest.mark.parametrize("filename", ["../x", "/x", "a/b", "..\\x", "a\\b", "C:x", "a\0b", "x/", "../"])
@pytest.mark.parametrize("by_name", [True, False], ids=["name", "filename"])
def test_no_name_leads_out_of_the_directory(filename: str, by_name: bool, tmp_path: Path) -> None:
    """A name that is a path on any system is rejected before the model runs, and nothing is written."""
    calls: list[Any] = []
    net, folder = Net(lambda _, x: calls.append(x)), tmp_path / "here"
    with pytest.raises(ArgumentError, match="filename must be a file name without a folder; got"):
        render_network(net, filename if by_name else "net", (2, 4), folder, None if by_name else filename)
    assert (calls, list(tmp_path.iterdir())) == ([], [])


@pytest.mark.parametrize("name", ["..", ".", "-o", "<b>&\"'", "a\nb", " ", "…", "%s", "n1 -> n2"])
def test_odd_names_are_names(name: str, tmp_path: Path) -> None:
    """A file may have any other name, and the picture shows its printable characters."""
    path = render_network(small(), name, (2, 4), tmp_path)
    assert path == tmp_path / f"{name}-1.svg"
    shown = "".join(each.content for each in read_svg(path).texts)
    assert name.strip().replace("\n", "�") in shown


@pytest.mark.parametrize("fmt", ["", ".svg", "svg/../../x", "svg:cairo", "s v g"])
def test_formats_are_one_word(fmt: str, tmp_path: Path) -> None:
    """A format that is not a suffix is rejected, one unknown to Graphviz is its error, and nothing is written."""
    with pytest.raises(ArgumentError, match="fmt must be a format of Graphviz, such as svg, png or pdf; got"):
        render_network(small(), "net", (2, 4), tmp_path, fmt=fmt)
    with pytest.raises(RenderError, match="exe"):
        render_network(small(), "net", (2, 4), tmp_path, fmt="exe")
    assert list(tmp_path.iterdir()) == []


def test_errors_of_a_network(tmp_path: Path) -> None:
    """Neither or both of shapes and data are rejected, a failing model is a ForwardError; no file is written."""
    for shapes, data, given in (((2, 4), X, "both"), (None, None, "neither")):
        with pytest.raises(ArgumentError, match=f"give either input_shapes or input_data, got {given}"):
            render_network(small(), "net", shapes, tmp_path, input_data=data)
    with pytest.raises(ForwardError, match=r"^module '0' \(Linear\) raised RuntimeError"):
        render_network(small(), "net", (2, 3), tmp_path)
    assert list(tmp_path.iterdir()) == []
