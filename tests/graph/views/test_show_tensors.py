"""A view that draws the tensors between functions as nodes."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_recorder.graph import (
    Graph,
    capture_graph,
    collapse,
    show_tensors,
    without,
)
from tests.graph.nets import Net, X, linear
from tests.graph.queries import joined, sources_of
from tests.graph.random_nets import graphs


def bare(net: nn.Module, *inputs: Any) -> Graph:
    """Return a recording without the tensors of the model."""
    return without(capture_graph(net, *inputs), ("parameter", "buffer"))


def test_tensors_of_functions_and_closed_calls() -> None:
    """A tensor node is between a computation and its user, named by the computation; inputs and outputs have none."""
    net = Net(lambda net, x: net.body(x).exp() + x, body=nn.Sequential(linear(), nn.ReLU()))
    view = show_tensors(collapse(bare(net, X), 1))
    assert [(node.kind, node.name, str(node.outputs[0])) for node in view.nodes[1:]] == [
        ("input", "input", "2×4"),
        ("module", "body", "2×4"),
        ("tensor", "body", "2×4"),
        ("op", "exp", "2×4"),
        ("tensor", "exp", "2×4"),
        ("op", "add", "2×4"),
        ("output", "output", "2×4"),
    ]
    kinds = [(view[edge.source].kind, view[edge.target].kind) for edge in view.edges]
    assert sorted(kinds) == [
        ("input", "module"),
        ("input", "op"),
        ("module", "tensor"),
        ("op", "output"),
        ("op", "tensor"),
        ("tensor", "op"),
        ("tensor", "op"),
    ]


def test_tensors_of_the_same_shape_share_a_node() -> None:
    """Two of the three outputs have the same shape and share a node; a tensor that is used twice is one node."""

    def forward(_: Any, x: Tensor) -> Tensor:
        one, other = x.split(2, dim=1)
        rest = x.sum(1)
        return torch.add(torch.add(one, other) * one, rest[:, None])

    view = show_tensors(capture_graph(Net(forward), X))
    shown = [(node.name, str(node.outputs[0])) for node in view.nodes if node.kind == "tensor"]
    assert shown == [("split", "2×2"), ("sum", "[2]"), ("add", "2×2"), ("mul", "2×2"), ("getitem", "2×1")]
    assert ("split", "add") in joined(view)
    (both,) = (edge for edge in view.edges if view[edge.target].name == "add" and view[edge.source].name == "split")
    assert both.multiplicity == 2


@settings(max_examples=60)
@given(graph=graphs, depth=st.none() | st.integers(1, 3))
def test_tensors_change_nothing_else(graph: Graph, depth: int | None) -> None:
    """Dependencies, the number of tensors into each node, and all other nodes are unchanged."""
    before = collapse(graph, depth)
    view = show_tensors(before)
    old = {node.id for node in before.nodes}
    assert [node for node in view.nodes if node.id in old] == list(before.nodes)
    assert {node.kind for node in view.nodes if node.id not in old} <= {"tensor"}
    for node in before.nodes:
        assert sources_of(view, node.id) & old == sources_of(before, node.id)
        into = [sum(edge.multiplicity for edge in each.into(node)) for each in (view, before)]
        assert into[0] == into[1]
    direct = [(view[edge.source].kind, view[edge.target].kind) for edge in view.edges]
    assert {target for source, target in direct if source in ("module", "op", "backward")} <= {"tensor", "output"}
    assert show_tensors(without(graph, ("op", "module"))) == without(graph, ("op", "module"))
