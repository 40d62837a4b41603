"""The Mermaid flowchart, parsed by strict rules."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest
import torch
import transformers as hf
from hypothesis import given
from torch import nn

from lightning_recorder import ArgumentError
from lightning_recorder.graph import (
    Direction,
    Edge,
    Graph,
    GraphvizStyler,
    MermaidRenderer,
    Node,
    capture_graph,
    fit_view,
    to_mermaid,
)
from lightning_recorder.graph.model import Kind
from lightning_recorder.graph.views.fit import drawn_nodes
from tests.graph.flowchart import Flowchart, read_flowchart
from tests.graph.nets import X, linear
from tests.graph.outline import text
from tests.graph.random_nets import graphs
from tests.graph.sketch import HOSTILE, UNPRINTABLE, Sketch


def read(graph: Graph, direction: Direction = "TB") -> Flowchart:
    return read_flowchart(to_mermaid(graph, direction))


def block() -> Sketch:
    """A repeated block between an input and a sum."""
    sketch = Sketch(parameters=20)
    x = sketch.add("input", "x")
    call = sketch.call("blocks.0", "Block", repeats=3)
    fc = sketch.call("blocks.0.fc", "Linear", x, inside=call, parameters=20)
    relu = sketch.add("op", "relu", fc, inside=call)
    sketch.add("op", "add", relu, x)
    return sketch


def test_document() -> None:
    """Nodes and frames are in the order of time, followed by the edges and the styles in use."""
    assert to_mermaid(block().graph()) == (
        text(
            r"""
            ---
            title: "Net.forward \u00b7 20 parameters"
            config: {flowchart: {wrappingWidth: 600}}
            ---
            flowchart TB
              n1(["x<br/>2×4"]):::input
              subgraph n2["blocks.0 ×3 Block"]
                n3("fc<br/>Linear · 20 parameters<br/>2×4"):::module
                n4["relu<br/>2×4"]:::op
              end
              class n2 frame1
              class n2 repeated
              n5["add<br/>2×4"]:::op
              n1 --> n3
              n3 --> n4
              n4 --> n5
              n1 --> n5
              classDef module fill:#dbe9f6,stroke:#0072b2,color:#1f1f1f
              classDef op fill:#ffffff,stroke:#8c8c8c,color:#1f1f1f
              classDef input fill:#d9f0e6,stroke:#009e73,color:#1f1f1f
              classDef frame0 fill:#f6f6f6,stroke:#bdbdbd,color:#1f1f1f
              classDef frame1 fill:#ededed,stroke:#bdbdbd,color:#1f1f1f
              classDef repeated stroke:#0072b2,stroke-width:2px
              classDef failed stroke:#d4002a,stroke-width:3px
              linkStyle default stroke:#7f7f7f
            """
        )
        + "\n"
    )


@pytest.mark.parametrize("direction", ["TB", "LR", "BT", "RL"])
def test_direction(direction: Direction) -> None:
    """The document states the direction of the data flow."""
    assert read(block().graph(), direction).direction == direction


@pytest.mark.parametrize("direction", ["", "TD", "tb", "TB\n  click n1 callback", None])
def test_other_directions(direction: Any) -> None:
    """An unknown direction is rejected with a list of the four."""
    with pytest.raises(ArgumentError, match="TB, LR, BT, RL"):
        MermaidRenderer(block().graph(), direction=direction)


@given(graphs)
def test_everything_is_drawn_once(graph: Graph) -> None:
    """For any model, each node occurs once inside the frames of its calls, and each edge once."""
    for view in (graph, fit_view(graph)):
        chart = read(view)
        drawn = {node.id for node in drawn_nodes(view)}
        assert set(chart.nodes) == drawn
        assert set(chart.frames) == {node.id for node in view.nodes[1:]} - drawn
        for number, item in {**chart.nodes, **chart.frames}.items():
            assert item.around == (view[number].parent or None)
        assert [(source, target) for source, target, _ in chart.edges] == [(e.source, e.target) for e in view.edges]


def test_edges_with_several_tensors_say_so() -> None:
    """Two tensors on one edge are shown as a number, also if their source is the last of several repetitions."""
    sketch = block()
    sketch.add("op", "mul", (5, 2), (4, 3))
    assert [label for *_, label in read(sketch.graph()).edges] == ["", "", "", "", "×2", "×3"]


def test_calls_and_repeats() -> None:
    """A second call and a parallel repetition are labeled."""
    sketch = Sketch()
    sketch.call("act", "ReLU", call=2)
    sketch.call("heads.0", "Head", repeats=3, parallel=True)
    assert [item.lines[0] for item in read(sketch.graph()).nodes.values()] == [
        "act (call 2)",
        "heads.0 ×3 side by side",
    ]


def test_failed_nodes_are_marked() -> None:
    """A node that failed has a cross before its name and a border of its own."""
    sketch = Sketch()
    call = sketch.call("fc", "Linear", failed=True, shapes=[])
    sketch.add("op", "linear", inside=call, failed=True, shapes=[])
    chart = read(sketch.graph())
    assert (chart.frames[1].lines, chart.frames[1].classes) == (["✗ fc Linear"], ["frame1", "failed"])
    assert (chart.nodes[2].lines, chart.nodes[2].classes) == (["✗ linear"], ["op", "failed"])
    assert chart.looks["failed"] == {"stroke": "#d4002a", "stroke-width": "3px"}


def test_every_kind_has_its_own_look() -> None:
    """Kinds differ in color or border, as in the Graphviz picture; tensors differ from computations in shape."""
    sketch = Sketch()
    for kind in get_args(Kind):
        sketch.add(kind, "x")
    graph = sketch.graph()
    chart = read(graph)
    looks = [tuple(chart.looks[node.kind].items()) for node in graph.nodes[1:]]
    assert len(set(looks)) == len(looks)
    for node in graph.nodes[1:]:
        style = GraphvizStyler().style_node(node, graph)
        assert chart.looks[node.kind]["fill"] == style["fillcolor"]
        assert chart.looks[node.kind]["stroke"] == style["color"]
        assert (chart.nodes[node.id].shape in ("([])", "[()]")) is (style["shape"] == "ellipse")


def test_text_is_dark_on_every_fill() -> None:
    """Every fill has a text color, so that the text is readable on a dark page."""
    looks = read(block().graph()).looks
    assert {name for name, style in looks.items() if "fill" in style} == {"module", "op", "input", "frame0", "frame1"}
    assert {style["color"] for style in looks.values() if "fill" in style} == {"#1f1f1f"}


def test_a_graph_of_nothing() -> None:
    """A model without calls is a flowchart without nodes."""
    chart = read(Graph((Node(0, "module", "", None, 0),), ()))
    assert (chart.title, chart.nodes, chart.edges, chart.line_style) == ("forward", {}, [], "")


def test_nothing_to_say() -> None:
    """A node without name, class and shapes has a blank label, since Mermaid requires one."""
    sketch = Sketch()
    sketch.call("", "", shapes=[])
    assert read(sketch.graph()).nodes[1].decoded == "\ufeff"


def test_a_view_of_gpt2_is_small_enough() -> None:
    """A view of GPT-2 is far below Mermaid's limits of 500 edges and 50,000 characters."""
    net = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=20, n_positions=8, n_embd=12, n_layer=12, n_head=2))
    document = to_mermaid(fit_view(capture_graph(net, torch.tensor([[1, 2]]))))
    chart = read_flowchart(document)
    assert len(chart.edges) < 100
    assert len(document) < 10_000
    assert [item.lines for item in chart.frames.values() if "×12" in item.lines[0]] == [
        ["h.0 ×12 GPT2Block · 1884 parameters"]
    ]


def test_a_captured_model() -> None:
    """The flowchart of a captured model has names, classes with sizes, and shapes."""
    chart = read(fit_view(capture_graph(nn.Sequential(linear(), nn.ReLU()), X)))
    assert [item.lines for item in chart.nodes.values()] == [
        ["input", "2×4"],
        ["0", "Linear · 20 parameters", "2×4"],
        ["1", "ReLU", "2×4"],
        ["output", "2×4"],
    ]


# Unusual names.


@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: ascii(name)[:30])
def test_hostile_names_are_shown_as_they_are(name: str) -> None:
    """Any name of a model, module, class, function or tensor is shown literally and has no other effect."""
    sketch = Sketch(name, scope="forward")
    kind = f"of {name}"
    call = sketch.call(name, kind, repeats=2)
    x = sketch.add("input", name, inside=call)
    one = sketch.add("op", name, x, inside=call)
    sketch.call(f"{name}.{name}", kind, one, inside=call)
    chart = read(sketch.graph())
    assert chart.title == f"{name}.forward".removeprefix(".")
    assert chart.frames[1].lines == [f"{name} ×2 {kind}"]
    assert [item.lines for item in chart.nodes.values()] == [[name, "2×4"], [name, "2×4"], [name, kind, "2×4"]]
    assert [item.classes for item in chart.nodes.values()] == [["input"], ["op"], ["module"]]
    assert chart.edges == [(2, 3, ""), (3, 4, "")]


@pytest.mark.parametrize("name", UNPRINTABLE, ids=ascii)
def test_what_cannot_be_printed_is_replaced(name: str) -> None:
    """The printable part of an unprintable name is shown, and the document is valid."""
    sketch = Sketch(name)
    sketch.call(name, f"of {name}")
    chart = read(sketch.graph())
    shown = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in name)
    assert chart.nodes[1].lines == [shown, f"of {shown}", "2×4"]
    assert chart.title == f"{shown}.forward"


@pytest.mark.parametrize("name", [*HOSTILE, *UNPRINTABLE], ids=lambda name: ascii(name)[:30])
def test_signs_do_not_meet(name: str) -> None:
    """The decoded label has no two active characters side by side and none at the start, so none forms markup."""
    sketch = Sketch()
    sketch.add("op", name)
    (item,) = read(sketch.graph()).nodes.values()
    label = item.decoded.replace("<br/>", "\n").replace("×", "x")
    for active in re.finditer(r"[^\w\ufeff\n]|[_ﬂß]", label):
        before, after = label[: active.start()][-1:], label[active.end() :][:1]
        between_letters = active[0] in " ._-" and before.isalnum() and after.isalnum()
        assert between_letters or (before and after in ("\ufeff", "")), (label, active)


def test_a_name_cannot_end_the_block() -> None:
    """No name can end the code block of the flowchart in a Markdown file."""
    sketch = Sketch("```")
    sketch.add("op", "```\n```")
    assert [line for line in to_mermaid(sketch.graph()).splitlines() if line.strip().startswith("```")] == []


def test_the_next_repetition_has_a_dashed_arrow() -> None:
    """An edge to the next repetition is dashed, and its label and those of the first state and all results say so."""
    sketch = Sketch()
    start = sketch.add("op", "zeros")
    cell = sketch.call("cell", "GRUCell", repeats=5)
    end = sketch.add("op", "stack")
    sketch.edges += [Edge(start, cell, 1, across=((cell, "first"),)), Edge(cell, cell, 4, across=((cell, "next"),))]
    sketch.edges += [Edge(cell, end, 5, across=((cell, "all"),))]
    lines = [line.strip() for line in to_mermaid(sketch.graph()).splitlines() if "->" in line]
    assert lines == ['n1 -->|"first"| n2', 'n2 -.->|"next"| n2', 'n2 -->|"all"| n3']
