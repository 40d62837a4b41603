"""The differences between two graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from lightning_recorder import ForwardError
from lightning_recorder.graph import Graph, capture_graph, collapse, diff, fold_repeats, record, without
from lightning_recorder.graph.diff import GraphDiff, NodeChange
from tests.graph.nets import Net, X, linear
from tests.graph.outline import text
from tests.graph.random_nets import graphs


def of(function: Callable[..., Any], **parts: nn.Module) -> Graph:
    """Return the graph of a model with the given forward pass."""
    return capture_graph(Net(function, **parts), X)


def _loop(net: Any, x: Tensor, rounds: int) -> Tensor:
    for _ in range(rounds):
        x = net.cell(x)
    return x


def _rounds(number: int) -> Graph:
    return capture_graph(Net(_loop, cell=linear()), X, number)


def _in_mode(training: bool) -> Graph:
    return capture_graph(nn.Sequential(linear(), nn.Dropout()).train(training), X)


def _ending(width: int) -> Graph:
    """Return the graph of a model whose last layer expects ``width`` features, of which there are four."""
    try:
        with torch.no_grad():
            return record(nn.Sequential(linear(), nn.Linear(width, 1)), input_data=X)
    except ForwardError as error:
        graph: Graph = error.graph
        return graph


def _folded(number: int) -> Graph:
    graph = capture_graph(nn.Sequential(*(linear() for _ in range(number))), X)
    return fold_repeats(collapse(without(graph, ["parameter"])))


def _difference(x: Tensor, step: int) -> Tensor:
    return torch.sub(*(x.exp(), x.cos())[::step])


def _block() -> nn.Module:
    """Return a model that takes its last function as an argument."""
    return Net(lambda _, x, last=torch.Tensor.cos: last(x.exp()))


PAIRS: dict[str, tuple[Callable[[], Graph], Callable[[], Graph], str]] = {
    "inserted layer": (
        lambda: of(lambda net, x: net.b(net.a(x)), a=linear(), b=linear()),
        lambda: of(lambda net, x: net.b(net.act(net.a(x))), a=linear(), act=nn.ReLU(), b=linear()),
        """
        + act
        + act/relu
        ~ b/linear: takes: a/linear, b.weight, b.bias -> act/relu, b.weight, b.bias
        """,
    ),
    "removed layer": (
        lambda: of(lambda net, x: net.b(net.a(x)), a=nn.Tanh(), b=nn.ReLU()),
        lambda: of(lambda net, x: net.a(x), a=nn.Tanh()),
        """
        - b
        - b/relu
        ~ output: takes: b/relu -> a/tanh
        """,
    ),
    "removed function": (
        lambda: of(lambda _, x: x.exp().cos().exp()),
        lambda: of(lambda _, x: x.exp().exp()),
        """
        - cos
        ~ exp#2: takes: cos -> exp
        """,
    ),
    "renamed module": (
        lambda: of(lambda net, x: net.a(x), a=linear()),
        lambda: of(lambda net, x: net.b(x), b=linear()),
        """
        + b
        + b.weight
        + b.bias
        + b/linear
        - a
        - a.weight
        - a.bias
        - a/linear
        ~ output: takes: a/linear -> b/linear
        """,
    ),
    "another width": (
        lambda: capture_graph(nn.Sequential(nn.Linear(4, 3)), X),
        lambda: capture_graph(nn.Sequential(nn.Linear(4, 5)), X),
        """
        ~ 0: outputs: 2×3 -> 2×5; parameters: 15 -> 25; out_features: 3 -> 5
        ~ 0.weight: outputs: 3×4 -> 5×4
        ~ 0.bias: outputs: [3] -> [5]
        ~ 0/linear: outputs: 2×3 -> 2×5
        ~ output: outputs: 2×3 -> 2×5
        """,
    ),
    "another class": (
        lambda: capture_graph(nn.Sequential(nn.ReLU()), X),
        lambda: capture_graph(nn.Sequential(nn.Tanh()), X),
        """
        + 0/tanh
        - 0/relu
        ~ 0: class: ReLU -> Tanh
        ~ output: takes: 0/relu -> 0/tanh
        """,
    ),
    "swapped functions": (
        lambda: of(lambda _, x: x.exp().cos()),
        lambda: of(lambda _, x: x.cos().exp()),
        """
        + exp
        - exp
        ~ cos: takes: exp -> input
        ~ output: takes: cos -> exp
        """,
    ),
    "swapped modules": (
        lambda: of(lambda net, x: net.b(net.a(x)), a=nn.Tanh(), b=nn.ReLU()),
        lambda: of(lambda net, x: net.a(net.b(x)), a=nn.Tanh(), b=nn.ReLU()),
        """
        ~ a/tanh: takes: input -> b/relu
        ~ b/relu: takes: a/tanh -> input
        ~ output: takes: b/relu -> a/tanh
        """,
    ),
    "moved into a block": (
        lambda: of(lambda net, x: net.act(net.block(x)), block=_block(), act=nn.Tanh()),
        lambda: of(lambda net, x: net.block(x, net.act), block=_block(), act=nn.Tanh()),
        """
        - block/cos
        ~ act: inside: the model -> block
        ~ act/tanh: takes: block/cos -> block/exp
        """,
    ),
    "extra call": (
        lambda: of(lambda net, x: net.a(net.a(x)), a=nn.Tanh()),
        lambda: of(lambda net, x: net.a(net.a(net.a(x))), a=nn.Tanh()),
        """
        + a (call 3)
        + a (call 3)/tanh
        ~ output: takes: a (call 2)/tanh -> a (call 3)/tanh
        """,
    ),
    "skip connection": (
        lambda: of(lambda net, x: net.a(x), a=nn.Tanh()),
        lambda: of(lambda net, x: x + net.a(x), a=nn.Tanh()),
        """
        + add
        ~ output: takes: a/tanh -> add
        """,
    ),
    "arguments swapped": (
        lambda: of(lambda _, x: _difference(x, 1)),
        lambda: of(lambda _, x: _difference(x, -1)),
        "~ sub: takes: exp, cos -> cos, exp",
    ),
    "another dtype": (
        lambda: capture_graph(nn.ReLU(), X),
        lambda: capture_graph(nn.ReLU(), X.double()),
        """
        ~ input: dtypes: float32 -> float64
        ~ relu: dtypes: float32 -> float64
        ~ output: dtypes: float32 -> float64
        """,
    ),
    "train and eval": (
        lambda: _in_mode(True),
        lambda: _in_mode(False),
        """
        + 1/identity
        - 1/dropout
        ~ output: takes: 1/dropout -> 1/identity
        """,
    ),
    "another step of a dynamic model": (
        lambda: _rounds(3),
        lambda: _rounds(1),
        """
        - cell (call 2)
        - cell (call 2)/linear
        - cell (call 3)
        - cell (call 3)/linear
        ~ output: takes: cell (call 3)/linear -> cell/linear
        """,
    ),
    "without autograd": (
        lambda: capture_graph(nn.ReLU(), X.clone().requires_grad_()),
        lambda: capture_graph(nn.ReLU(), X),
        "~ relu: autograd: ReluBackward0 -> none",
    ),
    "tensors on an edge": (
        lambda: of(lambda _, x: torch.add(*x.chunk(2))),
        lambda: of(lambda _, x: torch.add(x.chunk(2)[0], x[0])),
        """
        + getitem
        ~ add: takes: chunk[0, 1] -> chunk, getitem
        """,
    ),
    "failure": (
        lambda: _ending(5),
        lambda: _ending(4),
        """
        + output
        ~ the model: failed: True -> False
        ~ 1: outputs: none -> 2×1; dtypes: none -> float32; parameters: 6 -> 5; failed: True -> False; in_features: 5 -> 4
        ~ 1.weight: outputs: 1×5 -> 1×4
        ~ 1/linear: outputs: none -> 2×1; dtypes: none -> float32; failed: True -> False
        """,  # noqa: E501 - one line of the difference
    ),
    "more repetitions": (
        lambda: _folded(3),
        lambda: _folded(5),
        "~ 0: repeats: 3 -> 5; takes: input, 0 ×2 -> input, 0 ×4",
    ),
}


@pytest.mark.parametrize(("one", "other", "expected"), PAIRS.values(), ids=PAIRS)
def test_what_differs(one: Callable[[], Graph], other: Callable[[], Graph], expected: str) -> None:
    """Added, removed and changed nodes are named by their place, and changes show the old and the new value."""
    assert str(diff(one(), other())) == text(expected)


def test_equal_graphs() -> None:
    """The difference of two equal recordings is falsy, and its text says so."""
    nothing = diff(_rounds(2), _rounds(2))
    assert nothing == GraphDiff((), (), ())
    assert not nothing
    assert str(nothing) == "no difference"


def test_where_and_when_makes_no_difference() -> None:
    """Devices, source lines, times and the order of independent calls make no difference."""
    here, there = (capture_graph(nn.ReLU(), X.to(device)) for device in ("cpu", "meta"))
    assert here.nodes[1].outputs[0].device != there.nodes[1].outputs[0].device
    assert not diff(here, there)
    timed = replace(here, nodes=tuple(replace(node, duration_ms=1.0, source="net.py:1") for node in here.nodes))
    assert not diff(here, timed)
    parts = {"a": nn.Tanh(), "b": nn.ReLU()}
    assert not diff(
        of(lambda net, x: torch.add(*[net.a(x), net.b(x)]), **parts),
        of(lambda net, x: torch.add(*[net.b(x), net.a(x)][::-1]), **parts),
    )


def test_a_difference_as_data() -> None:
    """The differences are also available as names and aspects."""
    one, other, _ = PAIRS["swapped functions"]
    changes = (NodeChange("cos", ("takes: exp -> input",)), NodeChange("output", ("takes: cos -> exp",)))
    assert diff(one(), other()) == GraphDiff(("exp",), ("exp",), changes)


def _aspects(changes: tuple[NodeChange, ...]) -> list[list[str]]:
    return sorted([each.partition(":")[0] for each in change.aspects] for change in changes)


@settings(max_examples=60)
@given(one=graphs, other=graphs)
def test_the_other_way_round(one: Graph, other: Graph) -> None:
    """Swapping the graphs swaps the added and removed nodes; the same nodes have changed."""
    there, back = diff(one, other), diff(other, one)
    assert (there.added, there.removed) == (back.removed, back.added)
    assert _aspects(there.changed) == _aspects(back.changed)


@settings(max_examples=60)
@given(one=graphs, other=graphs)
def test_nothing_is_lost(one: Graph, other: Graph) -> None:
    """Added and removed nodes account for the numbers of nodes; graphs with different nodes have a difference."""
    found = diff(one, other)
    assert len(one.nodes) - len(found.removed) == len(other.nodes) - len(found.added)
    held = [Counter(replace(node, id=0, parent=0) for node in graph.nodes) for graph in (one, other)]
    assert found or held[0] == held[1]
    assert not diff(one, one)
    assert not diff(other, other)
