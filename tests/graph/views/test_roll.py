"""A view that draws all calls of a module as one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from lightning_recorder import ForwardError
from lightning_recorder.graph import (
    Graph,
    capture_graph,
    collapse,
    drop_dead_ends,
    roll,
    without,
)
from tests.graph.nets import Net, X, linear
from tests.graph.outline import outline, text
from tests.graph.random_nets import graphs


def bare(net: nn.Module, *inputs: Any) -> Graph:
    """Return a recording without the tensors of the model."""
    return without(capture_graph(net, *inputs), ("parameter", "buffer"))


def loop(rounds: int, **parts: nn.Module) -> nn.Module:
    """Calls its parts in turn, several times."""

    def forward(net: Any, x: Tensor) -> Tensor:
        for _ in range(rounds):
            for part in net.children():
                x = part(x)
        return x

    return Net(forward, **parts)


def test_roll_of_a_loop() -> None:
    """A loop over two modules becomes each of them once, with the number of calls and an edge backwards."""
    view = roll(collapse(bare(loop(3, a=linear(), b=nn.ReLU()), X)))
    assert outline(view, outputs=True) == text(
        """
        input
        a: Linear [3 times] <- input, b ×2 next
        b: ReLU [3 times] <- a ×3
        output <- b
        """
    )


def test_roll_of_a_cell_that_feeds_itself() -> None:
    """A cell whose state is an input of its next call has an edge to itself, with the number of these tensors."""
    net = Net(lambda net, x: net.cell(net.cell(net.cell(x))), cell=nn.Sequential(linear(), nn.Tanh()))
    assert outline(roll(collapse(bare(net, X), 1))) == "input\ncell: Sequential [3 times] <- input, cell ×2 next"
    assert outline(roll(bare(net, X))) == text(
        """
        input
        cell: Sequential [3 times]
          cell.0: Linear
            linear <- input, tanh ×2 next
          cell.1: Tanh
            tanh <- linear ×3
        """
    )


def test_roll_of_parameters() -> None:
    """Each call takes the parameters themselves, so that their edges do not go from one call to the next."""
    view = roll(capture_graph(Net(lambda net, x: net.cell(net.cell(x)), cell=linear()), X))
    edges = [(view[edge.source].name, edge.multiplicity, edge.relates("next")) for edge in view.edges]
    assert edges[:4] == [("input", 1, False), ("cell.weight", 2, False), ("cell.bias", 2, False), ("linear", 1, True)]


def test_roll_inside_and_outside() -> None:
    """If a module is called twice in each of three calls, each level has its own number."""
    inner = Net(lambda net, x: net.act(net.act(x)), act=nn.Tanh())
    view = roll(collapse(bare(loop(3, inner=inner), X)))
    assert [(node.name, node.repeats) for node in view.module_calls()] == [("inner", 3), ("inner.act", 2)]


def test_roll_moves_what_a_later_call_takes_before_it() -> None:
    """A tensor that a later call takes and no earlier call made enters the merged call from before it."""
    net = Net(lambda net, x: net.fc(x) + net.fc(x.exp().log()), fc=linear())
    view = roll(collapse(bare(net, X)))
    assert outline(view) == text(
        """
        input
        exp <- input
        log <- exp
        fc: Linear [2 times] <- input, log
        add <- fc ×2
        """
    )
    assert [node.name for node in drop_dead_ends(view).nodes] == [node.name for node in view.nodes]


def test_roll_of_calls_that_depend_on_each_other_and_on_others() -> None:
    """Only the inputs of a merged call that depend on an earlier call go to the next one."""
    net = Net(lambda net, x: net.fc(x) + net.fc(x.exp()) + net.fc(net.fc(x).sin() * x.cos()), fc=linear())
    assert outline(roll(collapse(bare(net, X)))) == text(
        """
        input
        exp <- input
        fc: Linear [4 times] <- input ×2, exp, mul next
        add <- fc ×2
        sin <- fc
        cos <- input
        mul <- sin, cos
        add#2 <- add, fc
        """
    )


def test_roll_keeps_apart_what_lies_in_different_calls() -> None:
    """A module that two others share is drawn in each of them."""
    shared = nn.Tanh()
    net = nn.Sequential(nn.Sequential(shared), nn.Sequential(nn.ReLU(), shared))
    assert outline(roll(collapse(bare(net, X)))) == outline(collapse(bare(net, X)))


def test_roll_of_calls_that_do_different_things() -> None:
    """A node of only one of the calls is drawn in the merged call, without a number of its own."""
    part = Net(lambda net, x, twice: net.act(net.act(x)).exp() if twice else net.act(x), act=nn.Tanh())
    net = Net(lambda net, x: net.part(net.part(x, twice=False), twice=True), part=part)
    assert outline(roll(bare(net, X))) == text(
        """
        input
        part: Net [2 times]
          part.act: Tanh
            tanh <- input, tanh ×2 next
          exp <- tanh
        """
    )


def test_roll_keeps_a_failure() -> None:
    """A failed call marks the merged one as failed."""

    def forward(net: Any, x: Tensor) -> Tensor:
        return torch.cat([net.fc(x), net.fc(x[:, :3])])

    with pytest.raises(ForwardError) as caught:
        capture_graph(Net(forward, fc=linear()), X)
    view = roll(collapse(caught.value.graph))
    assert [(node.name, node.repeats, node.failed) for node in view.module_calls()] == [("fc", 2, True)]


@settings(max_examples=60)
@given(graph=graphs)
def test_roll_loses_nothing(graph: Graph) -> None:
    """A rolled view represents all tensors, calls and parameters, and rolling it again changes nothing."""
    view = roll(graph)
    assert sum(edge.multiplicity for edge in view.edges) == sum(edge.multiplicity for edge in graph.edges)
    counted: Counter[str] = Counter()
    for node in view.module_calls():
        times = node.repeats
        for around in view.ancestors(node):
            times *= around.repeats
        counted[node.name] += times
    assert counted == Counter(node.name for node in graph.module_calls())
    sizes = [{(node.name, node.parameters) for node in each.nodes if node.kind == "module"} for each in (view, graph)]
    assert sizes[0] == sizes[1]
    assert view.parameters == graph.parameters
    assert roll(view) == view


@settings(max_examples=60)
@given(graph=graphs)
def test_roll_without_repeated_calls(graph: Graph) -> None:
    """A view without repeated calls is unchanged."""
    assert (roll(graph) == graph) == all(node.call == 1 for node in graph.nodes)
