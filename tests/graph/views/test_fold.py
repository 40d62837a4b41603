"""The view with folded repetitions: exact results for small models, laws for any model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_recorder.graph import (
    Graph,
    GraphCapture,
    Node,
    capture_graph,
    collapse,
    drop_dead_ends,
    fold_repeats,
    hide,
    without,
)
from tests.graph.nets import Net, X, bare, linear, stack
from tests.graph.outline import outline, text
from tests.graph.random_nets import graphs


def weight_of(graph: Graph, node: Node) -> int:
    """Return the number of recorded nodes that a node of a view represents."""
    total = node.repeats
    for call in graph.ancestors(node):
        total *= call.repeats
    return total


def test_calls_that_show_different_things_stay_apart() -> None:
    """Two equal calls are not folded if a view has removed an unused result of one of them."""
    blocks = [Net(lambda net, x: net.fc(x).exp(), fc=linear()) for _ in range(2)]

    def forward(net: Any, x: Tensor) -> Tensor:
        net.first(x)  # unused
        return torch.sum(net.second(x))

    net = Net(forward, first=blocks[0], second=blocks[1])
    with GraphCapture(net, X) as recording:
        net(X).backward()
    graph = without(recording.graph(), ("parameter", "buffer"))
    assert outline(fold_repeats(drop_dead_ends(graph), contents=graph)) == text(
        """
        input
        first: Net
          first.fc: Linear
        second: Net
          second.fc: Linear
            linear <- input
          exp <- linear
        sum <- exp
        backward <- sum
        """
    )


def test_twelve_blocks_are_drawn_once() -> None:
    """Consecutive equal blocks become the first, with their number."""
    view = fold_repeats(collapse(bare(stack(12), X)))
    assert outline(view) == text(
        """
        input
        0: Net [12 times]
          0.inner: Sequential
            0.inner.0: Linear <- input
            0.inner.1: ReLU <- 0.inner.0 ×12
          add <- input, 0.inner.1 ×12
        """
    )


def test_parameters_do_not_keep_blocks_apart() -> None:
    """Blocks whose parameters are drawn are folded, although the parameters have different names."""
    graph = capture_graph(stack(12), X)
    assert [node.repeats for node in fold_repeats(graph).children(graph.root) if node.kind == "module"] == [12]


def test_inputs_of_every_block_are_counted() -> None:
    """A tensor that goes into each of five blocks is five tensors on its edge."""
    layers = {f"layer{index}": Net(lambda net, x, mask: net.fc(x) * mask, fc=linear()) for index in range(5)}

    def forward(net: Any, x: Tensor, mask: Tensor) -> Tensor:
        for name in layers:
            x = getattr(net, name)(x, mask)
        return x

    view = fold_repeats(collapse(bare(Net(forward, **layers), X, X.clone())))
    assert outline(view) == text(
        """
        input[0]
        input[1]
        layer0: Net [5 times]
          layer0.fc: Linear <- input[0]
          mul <- layer0.fc ×5, input[1] ×5
        """
    )


def test_units_of_several_siblings() -> None:
    """A repeated group of siblings, functions included, is folded into a frame without a name."""

    def forward(net: Any, x: Tensor) -> Tensor:
        for index in range(4):
            x = getattr(net, f"fc{index}")(x).relu()
        return x.exp()

    layers = {f"fc{index}": linear() for index in range(4)}
    view = fold_repeats(collapse(bare(Net(forward, **layers), X)))
    assert outline(view) == text(
        """
        input
        (module) [4 times]
          fc0: Linear <- input
          relu <- fc0 ×4
        exp <- relu
        """
    )


def test_side_by_side_is_no_repetition() -> None:
    """Equal parallel layers, such as query, key and value, keep their names; a chain is folded."""
    qkv = Net(lambda net, x: net.q(x) + net.k(x) + net.v(x), q=linear(), k=linear(), v=linear())
    names = [node.name for node in fold_repeats(collapse(bare(qkv, X))).module_calls()]
    assert names == ["q", "k", "v"]
    chain = nn.Sequential(linear(), linear(), linear())
    assert outline(fold_repeats(collapse(bare(chain, X)))) == text(
        """
        input
        0: Linear [3 times] <- input
        """
    )


def test_two_layers_are_no_repetition_but_two_blocks_are() -> None:
    """At least three equal layers are folded, or two equal calls that contain others."""
    layers = bare(nn.Sequential(linear(), linear()), X)
    assert fold_repeats(collapse(layers)) == collapse(layers)
    blocks = fold_repeats(collapse(bare(stack(2), X)))
    assert [(node.name, node.repeats) for node in blocks.children(blocks.root) if node.kind == "module"] == [("0", 2)]


def test_least_number_of_repetitions() -> None:
    """The smallest number of equal layers to fold is an argument."""
    graph = collapse(bare(nn.Sequential(*(linear() for _ in range(4))), X))
    assert fold_repeats(graph, least=5) == graph
    assert [node.repeats for node in fold_repeats(graph, least=4).module_calls()] == [4]


def test_nested_repetitions() -> None:
    """Nested repetitions are folded at each level."""
    stages = nn.Sequential(*(stack(3) for _ in range(2)))
    view = fold_repeats(collapse(bare(stages, X)))
    assert outline(view) == text(
        """
        input
        0: Sequential [2 times]
          0.0: Net [3 times]
            0.0.inner: Sequential
              0.0.inner.0: Linear <- input
              0.0.inner.1: ReLU <- 0.0.inner.0 ×6
            add <- input, 0.0.inner.1 ×6
        """
    )


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU()), "parameters"),
        (lambda: nn.Sequential(linear(), nn.Tanh()), "class inside"),
        (lambda: nn.Sequential(nn.Linear(4, 4, dtype=torch.float64), nn.ReLU()), "dtype"),
        (lambda: nn.ModuleDict({"a": linear(), "b": nn.ReLU()}), "class"),
        (lambda: nn.Sequential(linear(), nn.ReLU(), nn.Identity()), "number of parts"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_differs_is_not_folded(odd: Callable[[], nn.Module], why: str) -> None:
    """A block with another class, size, dtype or content interrupts a repetition."""

    def forward(net: Any, x: Tensor) -> Tensor:
        for part in net.children():
            for each in part.values() if isinstance(part, nn.ModuleDict) else (part,):
                x = each(x.to(next(part.parameters()).dtype))
        return x

    plain = {name: nn.Sequential(linear(), nn.ReLU()) for name in "abxyz"}
    net = Net(forward, a=plain["a"], b=plain["b"], odd=odd(), x=plain["x"], y=plain["y"], z=plain["z"])
    view = fold_repeats(hide(collapse(bare(net, X)), ("to",)))
    repeats = {node.name: node.repeats for node in view.module_calls() if node.repeats > 1}
    assert repeats == {"a": 2, "x": 3}


def test_many_side_by_side() -> None:
    """More than eight equal parallel layers are folded and marked as parallel, and so are two equal blocks."""

    def forward(net: Any, x: Tensor) -> Tensor:
        return torch.cat([each(x) for each in net.children()])

    for number, make in ((9, linear), (2, lambda: nn.Sequential(linear(), nn.ReLU()))):
        net = Net(forward, **{f"head{index}": make() for index in range(number)})
        view = fold_repeats(collapse(bare(net, X)))
        (head,) = (node for node in view.children(view.root) if node.kind == "module")
        assert (head.repeats, head.parallel) == (number, True)
        assert {edge.multiplicity for edge in view.edges if view[edge.target].kind != "output"} == {number}
    chain = fold_repeats(collapse(bare(stack(3), X)))
    assert [node.parallel for node in chain.children(chain.root) if node.kind == "module"] == [False]


@settings(max_examples=60)
@given(graph=graphs, least=st.integers(2, 4), whole=st.booleans())
def test_folding_loses_no_node(graph: Graph, least: int, whole: bool) -> None:
    """With its repetitions, a folded view has the same number of nodes and parameters."""
    before = graph if whole else without(collapse(graph), ("parameter", "buffer"))
    view = fold_repeats(before, least)
    recorded = [node for node in view.nodes if node.type_name or node.kind != "module"]  # frames have no class
    assert sum(weight_of(view, node) for node in recorded) == len(before.nodes)
    assert sum(weight_of(view, node) * node.parameters for node in view.nodes) == sum(
        node.parameters for node in before.nodes
    )
