"""The placement of titles between the edges of a layout."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_recorder.graph.layout_process import (
    Frame,
    Orders,
    children_of,
    crossed,
    crossings,
    keep_inside,
    leave_out_unseen,
    line_of,
    lines_of,
    mirror,
    place,
    points_of,
    reordered,
    worked_s,
)

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


def test_a_line_inside_a_frame_stays_there() -> None:
    """A line between two nodes of a frame that bends out of it is moved into it; others keep their places.

    Its label is moved to the border.
    """
    leaving = "e,50,20 50,80 150,80 150,20 50,20"
    boxes = [
        {"name": "cluster_1", "bb": "0,0,120,100", "nodes": [2, 3]},
        {"name": "n3"},
        {"name": "n4"},
        {"name": "n5"},
    ]
    edges: list[dict[str, Any]] = [
        {"tail": 2, "head": 3, "pos": leaving, "lp": "170,50", "label": "<<font>next</font>>"},
        {"tail": 2, "head": 4, "pos": leaving, "lp": "170,50", "label": "next"},
        {"tail": 2, "head": 3},
    ]
    keep_inside({"objects": boxes, "edges": edges})
    inside = "e,50.00,20.00 50.00,80.00 117.00,80.00 117.00,20.00 50.00,20.00"
    assert [each.get("pos") for each in edges] == [inside, leaving, None]
    assert [each.get("lp") for each in edges] == ["129.00,50.0", "170,50", None]


def test_lines_that_cross() -> None:
    """Two lines cross once; lines with a common end, lines beside each other and invisible ones do not cross."""

    def crossing(*ends: tuple[int, int], style: str = "") -> int:
        falling, rising = "0,100 30,70 60,40 90,10", "0,20 30,45 60,70 90,95"
        edges = [
            {"tail": tail, "head": head, "pos": pos} for (tail, head), pos in zip(ends, (falling, rising), strict=True)
        ]
        return crossed({"edges": [edges[0], {**edges[1], "style": style}]})

    assert crossing((1, 2), (3, 4)) == 1
    assert crossing((1, 2), (1, 4)) == 0
    assert crossing((1, 2), (3, 4), style="invis") == 0
    beside = [{"tail": at, "head": at + 1, "pos": straight(at, 100, 0)} for at in (10, 20)]
    assert crossed({"edges": beside}) == 0


def test_statements_in_another_order() -> None:
    """Nodes and frames change places with each other; everything else stays, and each statement is there once."""
    statements = [
        "n1 [label=<<b>a</b>>]",
        'subgraph "cluster_2" {',
        "\tlabel=two",
        "\tn3 [label=<<b>c</b>>]",
        "\tn4 [label=d]",
        "\tn5 [label=<<b>e</b>>]",
        "}",
        "n1 -> n3",
    ]
    assert children_of(statements) == {"": ["n1", "cluster_2"], "cluster_2": ["n3", "n4", "n5"]}
    assert children_of(statements, only_named=True) == {"": ["n1", "cluster_2"], "cluster_2": ["n3", "n5"]}
    found = reordered(statements, {"": ["cluster_2", "n1"], "cluster_2": ["n5", "n3"]})
    places = [1, 2, 5, 4, 3, 6, 0, 7]
    assert found == [statements[place] for place in places]


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(("size", "crossing", "best"), [(90, False, "21"), (100, False, "12"), (90, True, "12")])
def test_the_narrower_of_two_good_layouts(
    flat: bool, size: int, crossing: bool, best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among layouts with equal faults, the smallest one across the flow is chosen, otherwise the first one.

    In a U-Net, the first one is chosen.
    """
    statements = {name: f"n{name} [label=<<b>a</b>>]" for name in "12"}
    first, second = [[statements[name] for name in order] for order in ("12", "21")]
    edges = [
        {"tail": 1, "head": 2, "pos": "e,100,0 0,100 30,70 60,40 100,0"},
        {"tail": 3, "head": 4, "pos": "e,0,0 100,100 70,70 40,30 0,0"},
    ]

    def layout(_: Orders, part: list[str]) -> Any:
        across = 100 if part == first else size
        wide, high = (500, across) if flat else (across, 500)
        return {"bb": f"0,0,{wide},{high}", "edges": edges if crossing and part == second else []}

    monkeypatch.setattr(Orders, "_layout", layout)
    for narrow in (True, False):
        found = Orders("", [], first, [], flat=flat, narrow=narrow).best(worked_s())
        assert found == ([statements[name] for name in best] if narrow else first)


def test_a_mirrored_layout() -> None:
    """Nodes and lines change sides, and a title stays at the left border, or behind an edge that would cross it."""
    cells = '<td port="left" width="{}"></td><td>title</td><td port="right" width="{}"></td>'
    for edge, left in ((170, 30), (120, 1)):
        frame: dict[str, Any] = {
            "name": "cluster_1",
            "bb": "0,0,200,110",
            "lp": "58,90",
            "lwidth": "1.39",
            "lheight": "0.28",
        }
        lines: list[dict[str, Any]] = [{"tail": 0, "head": 1, "pos": straight(edge, 120, 60)}]
        layout: dict[str, Any] = {
            "bb": "0,0,300,110",
            "objects": [frame, {"name": "n2", "pos": "50,20"}],
            "edges": lines,
        }
        source = mirror(f"subgraph cluster_1 {{ {cells.format(20, 20)}", layout)
        assert frame["bb"] == "100.00,0.0,300.00,110.0"
        assert layout["objects"][1] == {"name": "n2", "pos": "250.00,20"}
        assert lines[0]["pos"].startswith(f"e,{300 - edge}")
        assert cells.format(left, 40 - left) in source
        assert frame["lp"] == "158.00,90"


def test_invisible_edges_take_no_space() -> None:
    """A layout ends at its nodes, frames, visible edges and labels, and has no invisible edges."""
    layout: dict[str, Any] = {
        "bb": "0,0,900,300",
        "objects": [
            {"name": "n1", "pos": "100,50", "width": "1", "height": "0.5"},
            {"name": "cluster_2", "bb": "50,20,150,80"},
        ],
        "edges": [
            {"pos": straight(800, 300, 0), "style": "invis"},
            {"pos": straight(40, 90, 10), "lp": "160,40", "label": "<<b>abcd</b>>"},
        ],
    }
    leave_out_unseen(layout)
    assert [float(each) for each in layout["bb"].split(",")] == [40, 10, 172, 90]
    assert [each.get("label") for each in layout["edges"]] == ["<<b>abcd</b>>"]


def test_a_mirrored_title_without_a_gap() -> None:
    """A title that fits into no gap behind the edges is mirrored to where it was before, between two edges."""
    cells = '<td port="left" width="18"></td><td>title</td><td port="right" width="22"></td>'
    frame: dict[str, Any] = {"name": "cluster_1", "bb": "0,0,200,110", "lp": "58,90", "lwidth": "1.39"}
    frame["lheight"] = "0.28"
    edges = [{"tail": 0, "head": 1, "pos": straight(edge, 120, 60)} for edge in (22, 97, 150)]
    source = mirror(f"subgraph cluster_1 {{ {cells}", {"bb": "0,0,300,110", "objects": [frame], "edges": edges})
    assert frame["lp"] == "242.00,90"
    assert '<td port="left" width="22"></td>' in source
