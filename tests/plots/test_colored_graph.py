"""Tests of the graph colored by a statistic."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_recorder import ArgumentError
from lightning_recorder.graph import Graph, capture_graph, draw, make_dot
from lightning_recorder.plots import StatisticStyler, axes, color_graph
from lightning_recorder.plots.colored_graph import legible_on

LOW, MIDDLE, HIGH = "#440154", "#21918c", "#fde725"


@pytest.fixture
def graph() -> Graph:
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)), nn.Tanh())
    return capture_graph(net, torch.ones(1, 2))


def test_modules_have_the_colors_of_their_values(graph: Graph) -> None:
    """Small values are dark with white text, large values are light with dark text, and each box shows its value."""
    source = color_graph(graph, {"0": 1e-4, "1.0": 1e-2, "1.1": 1.0}, statistic="rms").visual_graph.source
    for name, fill, text, number in (
        ("0", LOW, "#ffffff", "1e-4"),
        ("0", MIDDLE, "#000000", "0.01"),
        ("1", HIGH, "#000000", "1"),
    ):
        (line,) = (each for each in source.splitlines() if f'fillcolor="{fill}"' in each)
        assert f"<b>{name}</b>" in line
        assert f'fontcolor="{text}"' in line
        assert f'<font color="{text}">rms {number}</font>' in line
        assert set(re.findall(r'color="(#\w+)">', line.partition("label=")[2].partition("tooltip")[0])) == {text}


def test_modules_without_a_value_are_grey(graph: Graph) -> None:
    """Modules without a value keep their label, and the legend explains the grey."""
    source = color_graph(graph, {"0": 1.0, "1.0": 2.0}, statistic="rms").visual_graph.source
    grey = [line for line in source.splitlines() if 'fillcolor="#f0f0f0"' in line]
    assert len(grey) == 2
    assert all("rms" not in line for line in grey)
    assert 'bgcolor="#f0f0f0"><font color="#000000">not recorded</font>' in source


def test_the_legend_has_five_steps(graph: Graph) -> None:
    """The legend shows five values with their colors and the name of the statistic, without unused entries."""
    source = color_graph(graph, {"0": 1e-4, "1.0": 1.0}, statistic="gradient rms").visual_graph.source
    (legend,) = (line for line in source.splitlines() if "gradient rms, log scale" in line)
    cells = re.findall(r'<td bgcolor="(#\w+)"><font color="#\w+">([^<]+)</font>', legend)
    assert [text for _, text in cells] == ["1e-4", "0.001", "0.01", "0.1", "1", "not recorded"]
    assert [cells[0][0], cells[2][0], cells[4][0]] == [LOW, MIDDLE, HIGH]


def test_values_that_are_not_finite_are_black(graph: Graph) -> None:
    """Boxes of values that are not finite are black with the value, and the legend explains the black."""
    source = color_graph(graph, {"0": float("nan"), "1.0": 1.0}, statistic="rms").visual_graph.source
    (line,) = (each for each in source.splitlines() if 'fillcolor="#000000"' in each)
    assert '<font color="#ffffff">rms NaN</font>' in line
    assert 'bgcolor="#000000"><font color="#ffffff">NaN or infinite</font>' in source


def test_signed_values_are_orange_and_purple(graph: Graph) -> None:
    """Signed values use the purple-orange table, symmetric around 0."""
    styler = StatisticStyler({"0": -2.0, "1.0": 1.0}, statistic="mean")
    assert [styler.color(value) for value in (-2.0, 0.0, 2.0)] == ["#2d004b", "#f7f7f6", "#7f3b08"]


def test_a_frame_says_its_value(graph: Graph) -> None:
    """A module drawn as a frame shows its value in the title and has no color."""
    source = color_graph(graph, {"1": 3.0}, statistic="rms").visual_graph.source
    (line,) = (each for each in source.splitlines() if "rms 3</td>" in each)
    assert 'bgcolor="#f6f6f6"' in line or 'bgcolor="#ededed"' in line


def blocks(depth: int) -> Graph:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(depth)))
    return capture_graph(net, torch.ones(1, 2))


def test_a_folded_box_has_the_range_of_its_values() -> None:
    """A box that represents six equal blocks shows the smallest and the largest value, and has the median's color."""
    values = {f"{i}.0": 1.0 + i / 50 for i in range(6)}
    drawing = color_graph(blocks(6), values, statistic="rms", fold=True)
    source = drawing.visual_graph.source
    assert "rms 1 to 1.1 (×6)" in source
    assert f'fillcolor="{StatisticStyler(values, statistic="rms").color(1.05)}"' in source
    assert all(node.arguments == drawing.graph[node.id].arguments for node in drawing.view.nodes if node.name)


def test_a_folded_box_in_a_stage_has_the_values_of_this_stage() -> None:
    """Blocks of other stages do not count, nor do layers of other classes in the same list."""
    stages = []
    for width in (2, 3, 4):
        blocks = (layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU()))
        stages.append(nn.Sequential(nn.Linear(width - 1, width), *blocks))
    graph = capture_graph(nn.Sequential(*stages), torch.ones(1, 1))
    values = {f"{stage}.{place}": 1 + stage / 2 + place / 50 for stage in range(3) for place in range(7)}
    source = color_graph(graph, values, statistic="rms").visual_graph.source
    found = {name: text for text, name in re.findall(r'>rms ([^<]*)<.*?tooltip="([\d.]+) ', source)}
    assert found == {
        name: text
        for stage, start in enumerate((1, 1.5, 2))
        for name, text in (
            (f"{stage}.0", f"{start:g}"),
            (f"{stage}.1", f"{start + 0.02:g} to {start + 0.1:g} (×3)"),
            (f"{stage}.2", f"{start + 0.04:g} to {start + 0.12:g} (×3)"),
        )
    }


def test_a_closed_box_of_several_blocks_shows_the_unusual_one() -> None:
    """A closed box that represents several blocks names the most unusual module of all of them."""
    values = {f"{i}.{j}": 1.0 for i in range(6) for j in (0, 1)} | {"4.1": 1e4}
    view = draw(blocks(6), depth=1, styler=StatisticStyler(values, statistic="rms"))
    assert [node.repeats for node in view.view.module_calls()] == [6]
    assert f"rms {axes.number(1e4)} (4.1)" in view.visual_graph.source


@pytest.mark.parametrize(
    ("odd", "expected"),
    [({}, "rms 1 (1)"), ({"2.1": 1e4}, f"rms {axes.number(1e4)} (1)"), ({"2.1": math.nan}, "rms NaN (1)")],
)
def test_a_closed_box_has_a_value_of_what_is_in_it(odd: dict[str, float], expected: str) -> None:
    """A closed box without a value of its own has that of its most unusual module, and names it."""
    values = {f"{i}.{j}": 1.0 for i in range(6) for j in (0, 1)} | odd
    drawing = color_graph(blocks(6), values, statistic="rms", depth=1, fold=False)
    source = drawing.visual_graph.source
    assert {node.name for node in drawing.view.module_calls()} == {f"{i}" for i in range(6)}
    assert source.count(f">{expected}</font>") == (1 if odd else 6)
    assert 'fillcolor="#f0f0f0"' not in source


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 23), st.sampled_from([1e4, 1e-4, 0.0, 8.0, float("nan")]))
def test_a_sick_block_is_drawn_apart(place: int, factor: float) -> None:
    """The one of 24 equal blocks that has another color is drawn with its own value, and the others are folded."""
    values = {
        f"{i}.{j}": (1.0 + i / 100) * (factor if (i, j) == (place, 0) else 1.0) for i in range(24) for j in (0, 1)
    }
    drawing = color_graph(BLOCKS, values, statistic="rms")
    leaves = [node.name for node in drawing.view.module_calls() if node.name in values]
    assert f"{place}.0" in leaves
    assert len(leaves) <= 6
    shown = f"rms {'NaN' if math.isnan(factor) else axes.number(values[f'{place}.0'])}"
    assert f">{shown}</font>" in drawing.visual_graph.source


BLOCKS = blocks(24)


@pytest.mark.parametrize("place", [0, 13, 23])
def test_a_block_without_a_value_is_drawn_apart(place: int) -> None:
    """The one of 24 equal blocks that was not recorded is drawn in grey, and not as one of the others."""
    values = {f"{i}.{j}": 1.0 for i in range(24) for j in (0, 1) if i != place}
    drawing = color_graph(BLOCKS, values, statistic="rms")
    leaves = {node.name for node in drawing.view.module_calls()}
    assert {f"{place}.0", f"{place}.1"} <= leaves
    assert len(leaves) <= 11
    assert drawing.visual_graph.source.count('fillcolor="#f0f0f0"') == 2


def test_a_trend_over_the_blocks_is_drawn_in_few_parts() -> None:
    """Blocks whose values grow over three decades are folded into parts of similar colors."""
    values = {f"{i}.0": 10 ** (i / 8) for i in range(24)}
    drawing = color_graph(BLOCKS, values, statistic="rms")
    assert 4 <= len([node for node in drawing.view.module_calls() if node.name in values]) <= 10


def test_blocks_that_differ_as_neighbors_do_are_folded() -> None:
    """Values that change from block to block without a trend do not divide the picture; the box shows their range."""
    noise = torch.rand(24, generator=torch.Generator().manual_seed(0)).tolist()
    values = {f"{i}.0": 0.2 + 0.3 * each for i, each in enumerate(noise)} | {f"{i}.1": 1.0 for i in range(24)}
    drawing = color_graph(BLOCKS, values | {"12.1": 0.0}, statistic="rms")
    assert [node.name for node in drawing.view.module_calls() if node.name in values] == [
        *("0.0", "0.1", "12.0", "12.1", "13.0", "13.1")
    ]


def test_it_is_a_styler_like_others(graph: Graph) -> None:
    """The styler works with ``draw`` and ``make_dot``, and attributes for all nodes override its colors."""
    styler = StatisticStyler({"0": 1.0, "2": 2.0}, statistic="rms")
    assert f'fillcolor="{HIGH}"' in draw(graph, styler=styler).visual_graph.source
    made = make_dot(graph, 2, StatisticStyler, values={"0": 1.0, "2": 2.0}, statistic="rms", fillcolor="white")
    assert sum("fillcolor=white" in line for line in made.body) == sum(
        bool(re.match(r"\s*n\d+ \[", line)) for line in made.body
    )


def test_names_of_other_modules_are_refused(graph: Graph) -> None:
    """Unknown modules raise an error with the closest names, and values that are not numbers raise an error."""
    with pytest.raises(ArgumentError, match=r"no module 'net\.1\.0'.*closest names? (is|are) '1\.0'"):
        color_graph(graph, {"net.1.0": 1.0}, statistic="rms")
    wrong: Any = {"0": "many"}
    with pytest.raises(ArgumentError, match="numbers by module name"):
        StatisticStyler(wrong, statistic="rms")


@pytest.mark.parametrize("color", ["#000000", "#440154", "#21918c", "#7f3b08", "#fde725", "#ffffff", "#777777"])
def test_letters_can_be_read_on_every_color(color: str) -> None:
    """The contrast of text on every color is at least 4.5, as WCAG 2 requires, by an independent formula."""

    def luminance(code: str) -> float:
        parts = [int(code[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        curved = [each / 12.92 if each < 0.04 else ((each + 0.055) / 1.055) ** 2.4 for each in parts]
        return sum(weight * each for weight, each in zip((0.2126, 0.7152, 0.0722), curved, strict=True))

    bright, dark = sorted((luminance(color), luminance(legible_on(color))), reverse=True)
    assert (bright + 0.05) / (dark + 0.05) >= 4.5


def test_markup_in_names_can_be_laid_out(graph: Graph, tmp_path: Path) -> None:
    """Markup in names and statistics is drawn as literal text by Graphviz."""
    drawing = color_graph(graph, {"0": 0.5}, statistic='<b>$x_1$</b> & \\N " 层')
    picture = drawing.save(tmp_path / "graph.svg").read_text(encoding="utf-8")
    assert "&lt;b&gt;$x_1$&lt;/b&gt; &amp; \\N &quot; \\u5c42" in picture
