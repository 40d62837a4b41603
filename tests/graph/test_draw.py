"""The options of ``draw`` and the resulting picture."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from lightning_recorder import ArgumentError, ForwardError, GraphRecorder, RenderError
from lightning_recorder.errors import InputError
from lightning_recorder.graph import (
    Direction,
    Drawing,
    Graph,
    GraphvizStyler,
    draw,
    fit_view,
    make_dot,
    record,
    to_mermaid,
)
from lightning_recorder.graph.views.fit import drawn_nodes
from lightning_recorder.graph.views.ports import with_ports
from tests.graph.nets import Net, X, linear
from tests.graph.outline import outline, text
from tests.graph.svg import Picture, read_svg
from tests.graph.test_drawing import residual, small


def lines_of(drawing: Drawing, folder: Path) -> dict[str, list[str]]:
    """Return the texts of each node of the picture, by its name in the document."""
    return {item.name: item.lines for item in read_svg(drawing.save(folder / "graph.svg")).nodes()}


def twice(parts: int = 1) -> nn.Module:
    """Calls each of several equal layers twice in a row."""

    def forward(net: Any, x: Tensor) -> Tensor:
        for part in net.children():
            x = part(part(x))
        return x

    return Net(forward, **{f"fc{index}": linear() for index in range(parts)})


# The shown part of the graph.


@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        (
            1,
            """
            input
            stem: Linear <- input
            body: Net <- stem
            exp <- body
            output <- exp
            """,
        ),
        (
            2,
            """
            input
            stem: Linear <- input
            body: Net
              body.inner: Sequential <- stem
              mul <- stem
              add <- body.inner, mul
            exp <- add
            output <- exp
            """,
        ),
        (
            None,
            """
            input
            stem: Linear <- input
            body: Net
              body.inner: Sequential
                body.inner.0: Linear <- stem
                body.inner.1: ReLU <- body.inner.0
              mul <- stem
              add <- body.inner.1, mul
            exp <- add
            output <- exp
            """,
        ),
    ],
    ids=str,
)
def test_depth(depth: int | None, expected: str) -> None:
    """Calls are opened down to the depth, or all of them; a call that contains no other is one node at any depth."""
    assert outline(draw(residual(), X, depth=depth).view, outputs=True) == text(expected)


def test_what_is_recorded_and_what_is_drawn() -> None:
    """A drawing has the whole graph and the drawn view, which by default is that of GraphRecorder."""
    deep = nn.Sequential(nn.Sequential(nn.Sequential(nn.Sequential(linear()))))
    drawing = draw(deep, X)
    assert drawing.graph == record(deep, input_data=X)
    assert drawing.view == fit_view(drawing.graph)
    assert [node.name for node in draw(deep, X, depth=3).view.module_calls()] == ["0", "0.0", "0.0.0"]


def test_functions_of_modules() -> None:
    """With ``hide_module_functions=False`` the functions inside of layers are shown, down to the depth."""
    net = nn.Sequential(linear(), Net(lambda net, x: net.act(x), act=nn.ReLU()))
    assert outline(draw(net, X, hide_module_functions=False).view) == text(
        """
        input
        0: Linear
          linear <- input
        1: Net
          1.act: ReLU
            relu <- linear
        """
    )
    assert outline(draw(net, X, hide_module_functions=False, depth=1).view) == text(
        """
        input
        0: Linear <- input
        1: Net <- 0
        """
    )


def test_inner_tensors() -> None:
    """With ``hide_inner_tensors=False`` there is a tensor node between a computation and its user."""
    view = draw(small(), X, hide_inner_tensors=False).view
    assert [(node.kind, node.name) for node in view.nodes[1:]] == [
        ("input", "input"),
        ("module", "0"),
        ("tensor", "0"),
        ("module", "1"),
        ("output", "output"),
    ]


def test_parameters() -> None:
    """The parameters and buffers used by open calls are drawn, but those of layers only on request."""
    net = residual()
    assert draw(net, X, parameters=True, depth=2).view == draw(net, X, depth=2).view
    assert "scale" not in outline(draw(net, X, parameters=False, depth=2).view, model_tensors=True)
    assert outline(draw(net, X, depth=2).view, model_tensors=True) == text(
        """
        input
        stem: Linear <- input
        body: Net
          body.inner: Sequential <- stem
          body.scale
          mul <- stem, body.scale
          add <- body.inner, mul
        exp <- add
        """
    )
    norm = draw(nn.BatchNorm1d(4), X, parameters=True).view
    assert {node.name for node in norm.nodes if node.kind in ("parameter", "buffer")} == {
        "weight",
        "bias",
        "running_mean",
        "running_var",
        "num_batches_tracked",
    }


def test_what_is_isolated_is_left_out() -> None:
    """Unused inputs and tensors are not drawn."""

    def forward(_: Net, x: Tensor, unused: Tensor) -> Tensor:
        torch.zeros(3)
        return x.exp()

    assert outline(draw(Net(forward), (X, X.clone())).view) == "input[0]\nexp <- input[0]"


def test_roll() -> None:
    """With ``roll`` a module that is called several times is drawn once, with the number of calls."""
    assert [node.name for node in draw(twice(), X).view.module_calls()] == ["fc0", "fc0"]
    assert outline(draw(twice(), X, roll=True).view) == "input\nfc0: Linear [2 times] <- input, fc0 next"


def test_fold() -> None:
    """With ``fold`` equal consecutive siblings are drawn once, with their number."""
    net = nn.Sequential(*(nn.Sequential(linear(), nn.ReLU()) for _ in range(5)))
    assert outline(draw(net, X, fold=True).view) == text(
        """
        input
        0: Sequential [5 times]
          0.0: Linear <- input first, 0.1 ×4 next
          0.1: ReLU <- 0.0 ×5
        """
    )
    assert draw(net, X).view == draw(net, X, fold=True).view
    assert len(draw(net, X, fold=False).view.module_calls()) == 15


def test_a_limit_of_nodes() -> None:
    """With ``max_nodes`` the view is that of ``fit_view``, starting from the depth."""
    net = nn.Sequential(*(nn.Sequential(nn.Linear(w, w + 1), nn.ReLU()) for w in range(4, 12)))
    drawing = draw(net, X, max_nodes=10)
    assert drawing.view == fit_view(drawing.graph, 10)
    assert len(drawn_nodes(drawing.view)) == 10
    assert draw(net, X, max_nodes=100, depth=1).view == fit_view(drawing.graph, 100, 1)


# The run of the model.


def test_the_mode() -> None:
    """The model runs in the requested mode, or by default in its own."""
    net = nn.Sequential(nn.Dropout())
    shown = {}
    for mode in (None, "train", "eval"):
        view = draw(net, X, mode=mode, hide_module_functions=False).view
        shown[mode] = [node.name for node in view.nodes if node.kind == "op"]
    assert shown == {None: ["dropout"], "train": ["dropout"], "eval": ["identity"]}
    assert net.training


def test_shapes_alone() -> None:
    """On the meta device the drawing is the same, and a model of any size can be drawn."""
    assert draw(residual(), X, device="meta").view == draw(residual(), X).view
    huge = nn.Sequential(nn.Linear(10**6, 10**6, device="meta"), nn.ReLU())
    drawing = draw(huge, input_size=(10**4, 10**6), device="meta")
    assert outline(drawing.view) == "input\n0: Linear <- input\n1: ReLU <- 0"
    assert drawing.graph.parameters == 10**12 + 10**6


def test_inputs() -> None:
    """Inputs are data, or sizes with dtypes, or keyword arguments, alone or with either."""
    net = Net(lambda net, x, scale: net.table(x) * scale, table=nn.Embedding(5, 4))
    kwargs = {"scale": torch.ones(4)}
    sizes = draw(net, input_size=(2, 3), dtypes=torch.int64, input_kwargs=kwargs).view
    data = draw(net, torch.zeros(2, 3, dtype=torch.int64), input_kwargs=kwargs).view
    keywords = draw(net, input_kwargs={"x": torch.zeros(2, 3, dtype=torch.int64), **kwargs}).view
    assert (
        outline(sizes)
        == outline(data)
        == "input[0]\ninput.scale\ntable: Embedding <- input[0]\nmul <- table, input.scale"
    )
    assert outline(keywords) == "input.x\ninput.scale\ntable: Embedding <- input.x\nmul <- table, input.scale"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "give either input_size or input_data, got neither"),
        ({"input_size": (2, 4), "input_data": X}, "give either input_size or input_data, got both"),
        ({"input_size": (2, -4)}, r"^input_size takes a shape, .*, none negative; got \(2, -4\)"),
        ({"input_size": 4}, "^input_size takes a shape"),
        ({"input_size": (2, 4), "dtypes": "float"}, "dtypes takes a torch.dtype"),
        ({"input_data": 4}, "input_data takes a tensor"),
        ({"input_data": X, "max_nodes": 0}, "max_nodes must be an integer of at least 1, got 0"),
        ({"input_data": X, "graph_dir": "up"}, "graph_dir must be one of TB, LR, BT, RL, got 'up'"),
        ({"input_data": X, "device": 0.5}, "device takes a device such as 'cpu'"),
        (
            {"input_data": X, "save_graph": True},
            r"no argument save_graph: write draw\(…\)\.save\('directory/filename\.png'",
        ),
        ({"input_data": X, "collect_attributes": True}, r"write drawing\.graph\.module\(node\), which"),
        ({"input_data": X, "mask": X}, r"write input_kwargs=\{'mask': …\} for an argument of the model$"),
        ({"input_data": X, "max_node": 3}, r"^draw has no argument max_node: did you mean max_nodes\? Or write i"),
        ({"input_data": X, "inputs": X}, r"did you mean input_size\? Or write input_kwargs=\{'inputs': …\} for an"),
        ({"input_data": X, "mode": "fast"}, "mode must be 'train', 'eval' or None"),
    ],
)
def test_arguments_that_can_never_work(given: dict[str, Any], message: str) -> None:
    """Invalid arguments are rejected before the model runs, under their names in ``draw``."""
    calls: list[Any] = []
    with pytest.raises(ArgumentError, match=message):
        draw(Net(lambda _, x: calls.append(x)), **given)
    assert calls == []


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), torch.device("meta"), "meta"])
def test_the_device(device: Any) -> None:
    """The device of the model is accepted in both forms, and ``meta`` computes the same shapes."""
    assert draw(linear(), X, device=device).graph == draw(linear(), X).graph
    assert draw(linear(), input_size=(2, 4), device=device).graph == draw(linear(), X).graph


def test_a_model_is_not_moved() -> None:
    """A device other than the model's is an error that says how to move the model."""
    with pytest.raises(InputError, match=r"^the model is on meta, and is not moved: call model\.to\('cpu'\) first"):
        draw(linear().to("meta"), X, device="cpu")


def test_errors_have_the_types_of_torchview() -> None:
    """``draw`` raises a RuntimeError, ValueError or TypeError for the same arguments as torchview."""
    net = linear()
    cases: list[tuple[type[Exception], dict[str, Any]]] = [
        (RuntimeError, {}),
        (RuntimeError, {"input_data": X, "input_size": (2, 4)}),
        (RuntimeError, {"input_size": (2, 3)}),
        (RuntimeError, {"input_data": X, "mode": "fast"}),
        (ValueError, {"input_data": X, "depth": -1}),
        (ValueError, {"input_size": (2, -4)}),
        (TypeError, {"input_size": "hello"}),
        (TypeError, {"input_size": {0: 1}}),
        (TypeError, {"input_data": X, "strict": False}),
    ]
    for kind, arguments in cases:
        with pytest.raises(kind):
            draw(net, **arguments)


@pytest.mark.parametrize("scale", [0.5, 2])
def test_resizing(scale: float, tmp_path: Path) -> None:
    """The written picture and the one in a notebook have the scaled size."""
    drawing = draw(linear(), X)
    before = width(drawing._repr_svg_())
    drawing.resize_graph(scale)
    assert width(drawing._repr_svg_()) == pytest.approx(scale * before, abs=2)
    drawing.resize_graph()
    assert width(drawing.save(tmp_path / "net.svg").read_text(encoding="utf-8")) == pytest.approx(before, abs=2)
    for wrong in (0, -1, "2", True, float("inf")):
        with pytest.raises(ArgumentError, match="scale must be a "):
            drawing.resize_graph(wrong)  # type: ignore[arg-type]  # the point of the test


def width(svg: str) -> float:
    """Return the width of an SVG in points."""
    found = re.search(r'<svg width="([\d.]+)pt"', svg)
    assert found is not None
    return float(found[1])


def test_a_model_that_raises() -> None:
    """The error names the module, and its graph can be drawn."""
    with pytest.raises(ForwardError, match=r"^module '1' \(Linear\) raised RuntimeError: ") as caught:
        draw(nn.Sequential(nn.ReLU(), linear(3)), X)
    assert outline(caught.value.graph) == "input\n0: ReLU\n  relu <- input\n1!: Linear\n  linear! <- relu"


# The picture.


def _picture(drawing: Drawing, folder: Path) -> Picture:
    return read_svg(drawing.save(folder / "graph.svg"))


def test_the_picture_is_the_view(tmp_path: Path) -> None:
    """The picture has the name of the graph, a node for each drawn node and a frame for each open call."""
    drawing = draw(residual(), X, graph_name="mine")
    picture = _picture(drawing, tmp_path)
    drawn = drawn_nodes(with_ports(drawing.view))
    assert {item.name for item in picture.nodes()} == {f"n{node.id}" for node in drawn}
    frames = [item.lines[0].strip() for item in picture.items if item.kind == "cluster"]
    assert sorted(frames) == ["body", "inner"]
    assert picture.texts[0].content == "mine"
    assert _picture(draw(residual(), X), tmp_path).texts[0].content == "Net"


def test_without_frames(tmp_path: Path) -> None:
    """Without ``expand_nested`` the same nodes are drawn without frames."""
    framed, bare = (draw(residual(), X, expand_nested=expand) for expand in (True, False))
    assert framed.view == bare.view
    assert [item for item in _picture(bare, tmp_path).items if item.kind == "cluster"] == []
    assert len(_picture(bare, tmp_path).nodes()) == len(drawn_nodes(framed.view))


@pytest.mark.parametrize("direction", get_args(Direction))
def test_direction(direction: Direction, tmp_path: Path) -> None:
    """The data flows in the requested direction."""
    drawing = draw(small(), X, graph_dir=direction)
    picture = _picture(drawing, tmp_path)
    first, last = (picture.named(f"n{drawing.view.nodes[place].id}") for place in (1, -1))
    gone = {
        "TB": last.top - first.bottom,
        "BT": first.top - last.bottom,
        "LR": last.left - first.right,
        "RL": first.left - last.right,
    }
    assert {name for name, distance in gone.items() if distance > 0} == {direction}


def test_shapes_and_stylers(tmp_path: Path) -> None:
    """Shapes are in the nodes unless they are turned off; a custom styler decides itself."""
    given: dict[str, dict[str, Any]] = {
        "on": {},
        "off": {"show_shapes": False},
        "on the edges": {"styler": GraphvizStyler(shapes="edges", fillcolor="#abcdef")},
    }
    shown = {name: draw(small(), X, **each) for name, each in given.items()}
    counts = {name: str(lines_of(each, tmp_path)).count("2×4") for name, each in shown.items()}
    assert counts == {"on": 4, "off": 0, "on the edges": 0}
    assert shown["on the edges"].visual_graph.source.count("#abcdef") == 4


def test_legend(tmp_path: Path) -> None:
    """The picture has a legend on request."""
    names = [item for each in (False, True) for item in lines_of(draw(small(), X, legend=each), tmp_path)]
    assert [name for name in names if name.startswith("legend")] == ["legend_module", "legend_input", "legend_output"]


@pytest.mark.parametrize(
    ("name", "magic"),
    [("a.svg", b"<?xml"), ("a.png", b"\x89PNG"), ("a.pdf", b"%PDF-"), ("A.SVG", b"<?xml"), ("a.b.png", b"\x89PNG")],
)
def test_saving(name: str, magic: bytes, tmp_path: Path) -> None:
    """The suffix selects the format in either case; directories are created, and the path is returned."""
    path = tmp_path / "new" / name
    assert draw(small(), X).save(str(path)) == path
    assert path.read_bytes().startswith(magic)
    assert list(path.parent.iterdir()) == [path]


def test_saving_the_graph_and_mermaid(tmp_path: Path) -> None:
    """A ``.json`` file has the whole graph, and a ``.mmd`` file the view as Mermaid."""
    drawing = draw(nn.Sequential(small(), small()), X, depth=1)
    path = drawing.save(tmp_path / "new" / "graph.json")
    assert Graph.from_json(path) == drawing.graph
    assert drawing.save(tmp_path / "graph.mmd").read_text(encoding="utf-8") == to_mermaid(drawing.view) + "\n"


def test_colors_need_measured_costs(tmp_path: Path) -> None:
    """Colors by a cost that was not measured are an error that says how to measure it."""
    for detail in ("duration_ms", "flops", "saved_bytes"):
        styler = GraphvizStyler(color_by=detail)
        for make in (
            lambda styler=styler: draw(small(), X, styler=styler),
            lambda detail=detail: make_dot(record(small(), input_data=X), color_by=detail),
            lambda styler=styler: GraphRecorder(styler=styler),
        ):
            with pytest.raises(ArgumentError, match=rf"color_by='{detail}' .* not measured: record with costs=True"):
                make()
        draw(record(small(), input_data=X, costs=True), styler=styler)
        GraphRecorder(styler=styler, costs=True)


@pytest.mark.parametrize("name", ["graph", ".svg", "graph."])
def test_saving_without_a_format(name: str, tmp_path: Path) -> None:
    """A name without a suffix is rejected, an unknown format is an error of one line, and nothing is written."""
    with pytest.raises(ArgumentError, match=r"the name of a picture must end with its format, such as graph\.svg; got"):
        draw(small(), X).save(tmp_path / name)
    with pytest.raises(RenderError, match=r"^Graphviz has no format txt: choose svg, png, pdf, or json for the graph$"):
        draw(small(), X).save(tmp_path / "graph.txt")
    assert list(tmp_path.iterdir()) == []


def test_a_drawing_shows_itself(tmp_path: Path) -> None:
    """A notebook displays a drawing as SVG."""
    drawing = draw(small(), X)
    shown = drawing._repr_svg_()
    assert shown == drawing.save(tmp_path / "graph.svg").read_text(encoding="utf-8")
    assert re.search(r"<svg [^>]*viewBox=", shown)


def test_a_drawing_in_a_notebook_is_a_frame() -> None:
    """The frame holds the SVG, runs no script, and is not higher than needed."""
    drawing = draw(small(), input_size=(1, 4))
    shown = drawing._repr_html_()
    inside = html.unescape(shown.partition('srcdoc="')[2].rpartition('"')[0])
    svg = drawing._repr_svg_()
    assert inside.endswith(svg[svg.index("<svg") :])
    assert "allow-scripts" not in shown
    (height,) = map(int, re.findall(r"height:(\d+)px", shown))
    assert 100 < height <= 520
