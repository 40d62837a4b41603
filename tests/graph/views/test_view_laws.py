"""Laws for every view of every model."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_recorder.graph import (
    Graph,
    GraphvizRenderer,
    collapse,
    drop_dead_ends,
    drop_isolated,
    fit_view,
    focus,
    fold_repeats,
    hide,
    roll,
    show_tensors,
    truncate,
    without,
)
from lightning_recorder.graph.views.ports import with_ports
from tests.graph.queries import assert_sound, sources_of
from tests.graph.random_nets import graphs


def ends(graph: Graph) -> list[tuple[int, int]]:
    return [(edge.source, edge.target) for edge in graph.edges]


def _focused(graph: Graph) -> Graph:
    calls = graph.module_calls()
    return focus(graph, calls[-1].name, calls[-1].call) if calls else graph


VIEWS: dict[str, Callable[[Graph], Graph]] = {
    "collapse": lambda graph: collapse(graph, 2),
    "without": lambda graph: without(graph, ("parameter", "tensor")),
    "hide": hide,
    "drop_isolated": drop_isolated,
    "drop_dead_ends": drop_dead_ends,
    "fold_repeats": fold_repeats,
    "truncate": lambda graph: truncate(graph, 4),
    "fit": lambda graph: fit_view(graph, 5),
    "roll": roll,
    "focus": _focused,
    "show_tensors": show_tensors,
    "rolled and folded": lambda graph: roll(fold_repeats(collapse(graph))),
    "rolled tensors": lambda graph: show_tensors(roll(graph)),
    "focus of a rolled view": lambda graph: _focused(roll(graph)),
    "focus of a folded view": lambda graph: _focused(fold_repeats(graph)),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@settings(max_examples=25)
@given(graph=graphs)
def test_every_view_is_a_graph(view: Callable[[Graph], Graph], graph: Graph) -> None:
    """A view is equal after a round trip through JSON, and each edge of its document joins two drawn nodes."""
    shown = view(graph)
    assert Graph.from_json(json.loads(json.dumps(shown.to_json()))) == shown
    assert len({node.id for node in shown.nodes}) == len(shown.nodes)
    assert len({(edge.source, edge.target, edge.across) for edge in shown.edges}) == len(shown.edges)
    place = {node.id: number for number, node in enumerate(shown.nodes)}
    assert [node for node in shown.nodes[1:] if place[node.parent or 0] >= place[node.id]] == []
    body = GraphvizRenderer(shown, wrap=False).render().body
    lines = [line.strip().split(" [")[0] for line in body if "style=invis" not in line]
    drawn = {line for line in lines if line[1:].isdigit()}
    edges = {tuple(line.split(" -> ")) for line in lines if " -> " in line}
    assert edges == {(f"n{source}", f"n{target}") for source, target in ends(with_ports(shown))}
    assert {end for edge in edges for end in edge} <= drawn


IN_ORDER: dict[str, Callable[[Graph], Graph]] = {
    "collapse": lambda graph: collapse(graph, 2),
    "collapse to the innermost": collapse,
    "without": lambda graph: without(graph, ("parameter", "tensor")),
    "hide": hide,
    "drop_isolated": drop_isolated,
    "drop_dead_ends": drop_dead_ends,
    "fold_repeats": lambda graph: fold_repeats(collapse(without(graph, ("parameter", "buffer")))),
    "truncate": lambda graph: truncate(graph, 4),
    "fit": lambda graph: fit_view(graph, 5),
}
"""Views whose nodes and edges keep the order of time."""


@pytest.mark.parametrize("view", IN_ORDER.values(), ids=IN_ORDER)
@settings(max_examples=40)
@given(graph=graphs)
def test_every_view_is_a_sound_graph(view: Callable[[Graph], Graph], graph: Graph) -> None:
    """Edges join existing nodes and go forward in time, parents exist, and the recording is unchanged."""
    before = graph.to_json()
    assert_sound(view(graph))
    assert graph.to_json() == before
    assert view(graph).scope == graph.scope


# collapse


@settings(max_examples=40)
@given(graph=graphs)
def test_without_leaves_and_limit_nothing_is_closed(graph: Graph) -> None:
    """Without a depth limit and with open leaves, a view is equal to the recording."""
    assert collapse(graph, None, leaves=False) == graph


@settings(max_examples=40)
@given(graph=graphs, depth=st.integers(1, 4), leaves=st.booleans())
def test_collapse_is_monotone(graph: Graph, depth: int, leaves: bool) -> None:
    """A greater depth shows all nodes of a smaller one; collapsing in two steps is equal to collapsing once."""
    less, more = (collapse(graph, each, leaves=leaves) for each in (depth, depth + 1))
    assert {node.id for node in less.nodes} <= {node.id for node in more.nodes}
    again = collapse(more, depth, leaves=leaves)
    assert again == less
    assert max(node.depth for node in less.nodes) <= depth


@settings(max_examples=40)
@given(graph=graphs, depth=st.integers(1, 4))
def test_lifting_keeps_what_depends_on_what(graph: Graph, depth: int) -> None:
    """Paths between the remaining nodes are kept, including those to functions of open leaves."""
    view = collapse(graph, depth, leaves=False)
    staying = {node.id for node in view.nodes}
    for node in view.nodes:
        assert sources_of(graph, node.id) & staying <= sources_of(view, node.id)
