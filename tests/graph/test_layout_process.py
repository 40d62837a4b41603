"""The placement of titles between the edges of a layout."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pygraphviz
import pytest
import torch

from lightning_recorder.graph import capture_graph, draw, layout_process
from lightning_recorder.graph.layout_process import (
    Frame,
    calls_out_of_order,
    crossings,
    end_labels,
    line_of,
    lines_of,
    place,
    points_of,
    with_bent_detours,
    with_fans,
    with_free_labels,
    with_strong_ends,
    without_column_frames,
)
from tests.graph.architectures import ARCHITECTURES

# A frame from x=0 to x=200, with a title of 60 points between two cells of one point, at heights from 80 to 100.
FRAME = Frame(left=0, right=200, middle=35, width=62, bottom=80, top=100)
WIDTHS = {"left": 1, "right": 1}


def straight(x: float, top: float, bottom: float) -> str:
    """Return a spline that goes straight down, as Graphviz writes it."""
    third = (top - bottom) / 3
    return f"e,{x},{bottom} " + " ".join(f"{x},{top - number * third}" for number in range(4))


def test_points_of_a_line() -> None:
    """A line consists of the arrowhead and 25 points of each piece; a straight piece is divided evenly."""
    points = list(points_of(line_of(straight(10, 24, 0))))
    assert points[0] == (10.0, 0.0)
    assert [(round(x, 9), round(y, 9)) for x, y in points[1:]] == [(10.0, 24.0 - step) for step in range(25)]


def test_only_pieces_near_a_title_are_computed() -> None:
    """A piece whose control points are all above or below a title yields no points, as no part of it is there."""
    line = line_of(straight(10, 400, 300))[1:] + line_of(straight(10, 300, 0))[1:]
    assert [len(list(points_of(line, *heights))) for heights in ((310, 320), (250, 350), (500, 600))] == [25, 50, 0]


def test_an_edge_crosses_a_title_once_for_each_pass() -> None:
    """An edge that passes the height of a title twice takes two intervals, and the room between them is free."""
    line = line_of(straight(20, 120, 60)) + line_of(straight(150, 60, 120))
    assert {tuple(map(round, each)) for each in crossings(line, FRAME)} == {(18, 22), (148, 152)}


def test_a_long_edge_crosses_a_title_between_its_points() -> None:
    """The height of a title may be between two points of a long edge, of which only the passage counts."""
    line = line_of("e,2000,-3000 0,3000 0,3000 0,3000 2000,-3000")
    height = (FRAME.bottom + FRAME.top) / 2
    found = list(crossings(line, FRAME))
    assert found
    assert all(abs((left + right) / 2 - (3000 - height) / 3) < FRAME.top - FRAME.bottom for left, right in found)


def test_a_title_moves_into_a_gap() -> None:
    """A title that an edge crosses moves behind it, and one that no edge crosses stays."""
    lines = lines_of({"edges": [{"pos": straight(20, 120, 60)}, {"pos": straight(90, 120, 60), "style": "invis"}]})
    # The gap begins at 22, and the title starts 6 points after that.
    assert place(FRAME, WIDTHS, lines, 0) == {"left": 24, "right": 1}
    assert place(FRAME, WIDTHS, lines_of({"edges": [{"pos": straight(120, 120, 60)}]}), 0) == WIDTHS


def test_a_text_may_be_wider_than_graphviz_estimates() -> None:
    """A title is moved away from an edge that only touches its end."""
    # The title ends at 65, and the edge takes the 2 points on both sides of it.
    touching, beside = (lines_of({"edges": [{"pos": straight(x, 120, 60)}]}) for x in (70, 72))
    assert place(FRAME, WIDTHS, touching, 0) == {"left": 74, "right": 1}
    assert place(FRAME, WIDTHS, beside, 0) == WIDTHS


def test_a_frame_without_a_gap_gets_wider_with_each_attempt() -> None:
    """If no gap is wide enough, the frame gets room for one; more of it the more often that has failed."""
    frame = Frame(left=0, right=80, middle=35, width=62, bottom=80, top=100)
    lines = lines_of({"edges": [{"pos": straight(40, 120, 60)}]})
    # The inner width of 68 has two gaps of 32; 60 points are missing 28 in one, twice that and margins are added.
    assert place(frame, WIDTHS, lines, 0) == {"left": 1, "right": 8 + 2 * 28 + 24}
    assert place(frame, WIDTHS, lines, 2) == {"left": 1, "right": 8 + 2 * 28 + 24 + 30}


def test_a_wide_frame_with_nearly_enough_room_gets_wider() -> None:
    """A wide frame gets wider if an edge leaves room for half of the title, but not if it leaves hardly any."""
    wide = Frame(left=0, right=600, middle=35, width=62, bottom=80, top=100)
    long, longer = (line_of(f"0,90 150,90 300,90 {end},90") for end in (540, 590))
    # The inner border is at 594, and the gap begins 2 points behind the edge: 52 of the 60 points are there.
    assert place(wide, WIDTHS, [long], 0) == {"left": 1, "right": 588 - 60 + 2 * 8 + 24}
    assert place(wide, WIDTHS, [longer], 0) == WIDTHS


def test_columns_and_lines_out_of_order() -> None:
    """The columns of a call stand from left to right, with the lines between them; a flow across the page stays."""
    nodes = [{"name": f"n{x}", "pos": f"{x},10"} for x in (10, 20, 90, 100)]
    lines = [{"name": name, "pos": f"{x},10"} for name, x in (("top_41", 50), ("top_51", 50), ("top_61", 120))]
    columns = {"3_0": [2, 3], "3_1": [0, 1], "7_0": [0, 1], "7_1": [2, 3], "8_0": [0, 1], "8_1": [2, 3]}
    framed = [{"name": f"cluster_column_{name}", "nodes": each} for name, each in columns.items()]
    heads = "".join(
        f"top_{call}_0 -> top_{line} [style=invis] top_{line} -> top_{call}_1 [style=invis]"
        for call, line in ((3, 41), (7, 51), (8, 61))
    )
    objects = [*nodes, *lines, *framed, {"name": "cluster_7", "nodes": [0]}]
    assert calls_out_of_order(heads, {"objects": objects}) == ({"3"}, {"3", "8"})
    assert calls_out_of_order(heads, {"objects": objects, "rankdir": "LR"}) == (set(), set())
    source = "subgraph cluster_column_3_1 {} subgraph cluster_column_7_0 {} subgraph cluster_3 {}"
    assert without_column_frames(source, {"3"}) == source.replace("cluster_column_3", "column_3")


@pytest.mark.parametrize(("name", "is_reordered"), [("Llama", True), ("T5", False)])
def test_a_picture_without_more_room(name: str, is_reordered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns are put in order whatever room this takes; lines between them, only if the picture does not grow by much.

    Llama has a reversed column. T5 has only a line beside the wrong column.
    """
    renderer = str(Path(pygraphviz.__file__).parent.parent)  # another dot may order the columns differently
    net, batch, keywords = ARCHITECTURES[name]()
    with torch.no_grad():
        source = draw(capture_graph(net, *batch, **keywords), depth=4).visual_graph.source
    layout = json.loads(layout_process.draw(renderer, source, ["json0"])[0])
    assert any(calls_out_of_order(source, layout))
    _, ordered = layout_process.with_columns_in_order(renderer, source, layout)
    assert calls_out_of_order(source, ordered) == (set(), set())
    monkeypatch.setattr(layout_process, "_MORE_ROOM", 0.0)
    _, found = layout_process.with_columns_in_order(renderer, source, layout)
    assert (found != layout) == is_reordered
    assert calls_out_of_order(source, found)[0] == set()


def test_fans_lead_from_heads_to_nodes_of_their_columns() -> None:
    """Some nodes of each column of a call are connected with the head of the column."""
    objects = [{"name": f"n{number}"} for number in range(8)]
    columns = [{"name": "column_3_1", "nodes": [*range(8)]}, {"name": "cluster_column_7_0", "nodes": [1]}]
    fans = with_fans("digraph {\n}\n", {"objects": [*objects, *columns]}, {"3"}, 4)
    assert re.findall(r"(\w+) -> (\w+) ", fans) == [("top_3_1", f"n{number}") for number in (0, 2, 4, 6)]
    assert fans.endswith("]\n}\n")


def test_only_the_lines_around_reversed_columns_may_bend() -> None:
    """The lines that are led around the columns of a call lose their weight, and those of other calls keep it."""
    rows = ("top_3_0 -> top_41", "top_41 -> top_42", "top_42 -> top_3_1", "top_7_0 -> top_51", "top_51 -> top_7_1")
    row = " ".join(f"{each} [style=invis]" for each in rows)
    lines = [f"top_{number} -> bottom_{number} [dir=none weight=50]" for number in (41, 42, 51)]
    expected = [*(line.replace("50", "1") for line in lines[:2]), lines[2]]
    assert with_bent_detours(" ".join([row, *lines]), {"3"}) == " ".join([row, *expected])


def test_only_the_ends_of_reversed_columns_are_strong() -> None:
    """The edges at both ends of the columns of a call are repeated, but not those into or out of the call."""
    ends = ["top_3_0 -> n5", "n9 -> bottom_3_1"]
    others = ["top_7_0 -> n6", "n2 -> top_3_0", "bottom_3_1 -> n12"]
    source = "".join(f"\t{each} [style=invis weight=8]\n" for each in [*ends, *others])
    strong = with_strong_ends(source, {"3"})
    numbers = [strong.count(f"\t{each} [") for each in [*ends, *others]]
    assert numbers[0] == numbers[1] > 1
    assert numbers[2:] == [1, 1, 1]


def test_a_label_at_the_end_of_an_edge_covers_nothing() -> None:
    """It gets the first angle at which it covers neither a node nor another label."""
    node = {"name": "n1", "pos": "100,100", "width": "0.5", "height": "0.5"}
    beside = {"name": "n2", "pos": "60,40", "width": "1", "height": "0.3"}
    edge = {"tail": 1, "head": 0, "labelangle": "15", "labeldistance": "8", "headlabel": "from n2"}
    edge["pos"] = "e,100,82 100,-20 100,10 100,40 100,72"
    ((left, bottom, right, top),) = end_labels(edge, 15)
    assert top < 82
    assert (left + right) / 2 > 100  # on the right of the line
    source = "\tn2 -> n1 [headlabel=x labelangle=15]\n\tn2 -> n3 [labelangle=15]\n"
    assert with_free_labels(source, {"objects": [node, beside], "edges": [edge]}) == source
    covered = {"name": "n3", "pos": f"{(left + right) / 2},{(bottom + top) / 2}", "width": "0.3", "height": "0.3"}
    moved = with_free_labels(source, {"objects": [node, beside, covered], "edges": [edge]})
    assert moved == source.replace("x labelangle=15", "x labelangle=-15")
