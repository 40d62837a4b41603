"""The view with closed module calls: exact results for small models, laws for any model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_recorder import ArgumentError
from lightning_recorder.graph import (
    Graph,
    Node,
    capture_graph,
    collapse,
    fit_view,
    fold_repeats,
)
from tests.graph.nets import Net, X, bare, block, linear, stack
from tests.graph.outline import outline, text
from tests.graph.queries import only, sources_of
from tests.graph.random_nets import graphs


def test_collapse_at_each_depth() -> None:
    """The depth is the number of visible levels of calls; deeper nodes are inside closed calls."""
    graph = bare(nn.Sequential(block(), nn.Tanh()), X)
    assert outline(collapse(graph, 1)) == text(
        """
        input
        0: Net <- input
        1: Tanh <- 0
        """
    )
    assert outline(collapse(graph, 2)) == text(
        """
        input
        0: Net
          0.inner: Sequential <- input
          add <- input, 0.inner
        1: Tanh <- add
        """
    )
    assert outline(collapse(graph, 3)) == text(
        """
        input
        0: Net
          0.inner: Sequential
            0.inner.0: Linear <- input
            0.inner.1: ReLU <- 0.inner.0
          add <- input, 0.inner.1
        1: Tanh <- add
        """
    )
    assert collapse(graph) == collapse(graph, 3) == collapse(graph, 99)


def test_a_layer_with_a_weight_norm_is_a_layer() -> None:
    """The parametrization of a weight is inside its layer, and its parameters are counted there."""
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(linear()), nn.Tanh())
    view = fit_view(capture_graph(net, X))
    assert outline(view) == text(
        """
        input
        0: ParametrizedLinear <- input
        1: Tanh <- 0
        """
    )
    assert view.module_calls()[0].parameters == 24
    assert "0.parametrizations.weight.0" in outline(fit_view(capture_graph(net, X), leaves=False))


def test_closed_calls_add_up_their_parameters() -> None:
    """A closed call has the parameters of all of its contents."""
    graph = capture_graph(stack(2), X)
    assert [node.parameters for node in collapse(graph, 1).module_calls()] == [20, 20]
    assert only(collapse(graph, 2), "0.inner").parameters == 20


def test_a_closed_call_takes_a_tensor_once() -> None:
    """A tensor that a call reads three times inside is one tensor on the edge into the closed call."""
    graph = capture_graph(Net(lambda net, x: net.attention(x, x, x)[0], attention=nn.MultiheadAttention(4, 2)), X[None])
    assert outline(graph).endswith("multi_head_attention_forward <- input ×3")
    assert outline(collapse(graph)).endswith("attention: MultiheadAttention <- input")


@pytest.mark.parametrize("size", [2, 3])
def test_a_closed_call_takes_one_of_several_tensors(size: int) -> None:
    """One of two results that a call reads twice is one tensor, whether or not the two have equal shapes."""
    inner = Net(lambda _, x: x.exp() * x)
    net = Net(lambda net, x: (net.inner((parts := x.split([size, 4 - size], 1))[0]), parts[1]), inner=inner)
    assert outline(collapse(capture_graph(net, X))).endswith("inner: Net <- split")


def test_a_closed_call_takes_both_of_two_tensors() -> None:
    """Both results of a function are two tensors, as arguments or as an attribute, however often they are read."""
    both = Net(lambda _, one, other: one.exp() * one + other)
    graph = capture_graph(Net(lambda net, x: net.both(*x.chunk(2, 1)), both=both), X)
    assert outline(collapse(graph)).endswith("both: Net <- chunk ×2")

    def kept(net: Any, x: Tensor) -> Any:
        net.held.parts = x.chunk(2, 1)
        return net.held()

    held: Any = Net(lambda net: net.parts[0].exp() * net.parts[0] + net.parts[1])
    assert outline(collapse(capture_graph(Net(kept, held=held), X))).endswith("held: Net <- chunk ×2")


def test_a_closed_call_gives_several_tensors() -> None:
    """Two tensors from inside a closed call to one function are two tensors on the edge."""
    pair = Net(lambda _, x: (x.exp(), x.cos()))
    graph = capture_graph(Net(lambda net, x: torch.add(*net.pair(x)), pair=pair), X)
    assert outline(collapse(graph)) == "input\npair: Net <- input\nadd <- pair ×2"


@pytest.mark.parametrize("depth", [-1, 1.5, True, "2"])
def test_depth_must_be_an_integer_of_at_least_zero(depth: Any) -> None:
    """A depth that is negative or not an integer is rejected."""
    graph = capture_graph(stack(1), X)
    with pytest.raises(ArgumentError, match="depth"):
        collapse(graph, depth)
    with pytest.raises(ArgumentError, match="depth"):
        fit_view(graph, depth=depth)


def _closed(graph: Graph, depth: int | None) -> dict[int, int]:
    """Map each node to the outermost closed call around it, or to itself, by definition."""

    def is_closed(node: Node) -> bool:
        innermost = not any(child.kind == "module" for child in graph.children(node))
        return node.kind == "module" and node.parent is not None and (innermost or (depth or 99) <= node.depth)

    return {
        node.id: next((around.id for around in reversed([node, *graph.ancestors(node)]) if is_closed(around)), node.id)
        for node in graph.nodes
    }


@settings(max_examples=60)
@given(graph=graphs, depth=st.none() | st.integers(1, 4))
def test_collapse_is_what_it_says(graph: Graph, depth: int | None) -> None:
    """The nodes are those outside of closed calls, and the edges are exactly those between different ones of them."""
    view = collapse(graph, depth)
    target = _closed(graph, depth)
    assert [node.id for node in view.nodes] == [node.id for node in graph.nodes if target[node.id] == node.id]
    assert {(edge.source, edge.target) for edge in view.edges} == {
        (target[edge.source], target[edge.target]) for edge in graph.edges if target[edge.source] != target[edge.target]
    }
    assert sum(node.parameters for node in view.nodes) == sum(node.parameters for node in graph.nodes)


@settings(max_examples=40)
@given(graph=graphs, depth=st.integers(1, 4))
def test_collapse_keeps_what_depends_on_what(graph: Graph, depth: int) -> None:
    """A path between two nodes becomes a path between the calls that they are merged into."""
    view, target = collapse(graph, depth), _closed(graph, depth)
    for node in graph.nodes:
        assert {target[source] for source in sources_of(graph, node.id)} <= sources_of(view, target[node.id])


@settings(max_examples=40)
@given(graph=graphs)
def test_deepest_depth_is_the_innermost_closing(graph: Graph) -> None:
    """From the deepest call on, the depth makes no difference, and collapsing twice is equal to collapsing once."""
    deepest = max((node.depth for node in graph.module_calls()), default=1)
    assert collapse(graph, deepest) == collapse(graph, deepest + 3) == collapse(graph)
    assert collapse(collapse(graph)) == collapse(graph)


def test_joined_loops_with_a_closed_end() -> None:
    """A closed call takes the tensors of all repetitions of a loop that was joined with one inside of it."""

    def inner(net: Any, x: Tensor, states: list[Tensor]) -> Tensor:
        for state in states:
            x = (x + state).tanh()
        return x

    net = Net(lambda net, x: net.inner(x, [x.exp().sin() for _ in range(4)]), inner=Net(inner))
    view = fold_repeats(bare(net, X))
    assert outline(view) == text(
        """
        input
        (module) [4 times]
          exp <- input ×4
          sin <- exp ×4
        inner: Net
          (module) [4 times]
            add <- input first, tanh ×3 next, sin ×4 each each
            tanh <- add ×4
        """
    )
    assert outline(collapse(view, 1)).splitlines()[-1] == "inner: Net <- input, (module) ×4 all"
