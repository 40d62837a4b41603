"""A view of one module call with its inputs and outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from lightning_recorder import ArgumentError
from lightning_recorder.graph import (
    Graph,
    Node,
    capture_graph,
    collapse,
    focus,
)
from tests.graph.nets import Net, X, linear
from tests.graph.outline import outline, text
from tests.graph.random_nets import graphs


def residual() -> nn.Module:
    """Return a model: input -> stem -> body(fc, act, + stem) -> head, with the input added again at the end."""
    body = Net(lambda net, x, scale: x * scale + net.act(net.fc(x)), fc=linear(), act=nn.ReLU())

    def forward(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = net.stem(x).exp()
        y = net.body(hidden, net.scale)
        return net.head(y) + x, y

    net = Net(forward, stem=linear(), body=body, head=linear())
    net.scale = nn.Parameter(torch.ones(4))
    return net


def test_focus_on_a_block() -> None:
    """A focused block has inputs and outputs, named by their sources and targets."""
    view = focus(capture_graph(residual(), X), "body")
    assert outline(view, model_tensors=True, outputs=True) == text(
        """
        exp
        scale
        mul <- exp, scale
        body.fc: Linear
          body.fc.weight
          body.fc.bias
          linear <- exp, body.fc.weight, body.fc.bias
        body.act: ReLU
          relu <- linear
        add <- mul, relu
        head <- add
        output[1] <- add
        """
    )
    assert [node.kind for node in view.nodes if node.depth == 1 and node.name in ("exp", "scale", "head")] == [
        "input",
        "input",
        "output",
    ]


def test_focus_names_what_lies_inside_of_others() -> None:
    """A neighbor inside another call is named by that call; inputs, outputs and parameters by their own names."""
    graph = capture_graph(residual(), X)
    assert outline(focus(graph, "body.act"), outputs=True) == "body.fc\nrelu <- body.fc\nadd <- relu"
    assert outline(focus(graph, "stem"), outputs=True) == "input\nlinear <- input\nexp <- linear"
    head = focus(graph, "head")
    assert [(node.kind, node.name) for node in head.nodes] == [
        ("module", "head"),
        ("input", "body"),
        ("parameter", "head.weight"),
        ("parameter", "head.bias"),
        ("op", "linear"),
        ("output", "add"),
    ]


def test_focus_has_the_size_of_the_part() -> None:
    """The number of parameters is that of the part, with each module counted once; depths start at 0."""
    net = nn.Sequential(nn.Linear(4, 4), Net(lambda net, x: net.fc(net.fc(x)), fc=nn.Linear(4, 4, bias=False)))
    graph = capture_graph(net, X)
    view = focus(graph, "1")
    assert (graph.parameters, view.parameters) == (36, 16)
    assert (view.root.name, view.root.parent, view.root.depth) == ("1", None, 0)
    assert [node.depth for node in view.nodes if node.name == "linear"] == [2, 2]
    assert focus(collapse(graph, 1), "0").parameters == 20


def test_focus_on_a_later_call() -> None:
    """Each call of a module is a part of its own; the parameters of the first call are inputs of the second."""
    graph = capture_graph(Net(lambda net, x: net.act(net.fc(net.act(net.fc(x)))), fc=linear(), act=nn.ReLU()), X)
    view = focus(graph, "fc", 2)
    assert (view.root.name, view.root.call) == ("fc", 2)
    assert outline(view, outputs=True) == text(
        """
        act
        fc.weight
        fc.bias
        linear <- act, fc.weight, fc.bias
        act#2 <- linear
        """
    )


@pytest.mark.parametrize(
    ("name", "call", "message"),
    [
        ("bdoy", 1, r"no call 1 of a module 'bdoy'; the closest name is 'body'"),
        ("body.relu", 1, r"no call 1 of a module 'body.relu'; the closest names are 'body.fc', 'body', 'body.act'"),
        ("head", 2, r"no call 2 of a module 'head'; the last one is call 1"),
        ("", 1, r"no call 1 of a module ''; no name is similar; the names are 'stem', 'body', 'body.fc'"),
    ],
)
def test_focus_on_what_is_not_there(name: str, call: int, message: str) -> None:
    """The error names the closest modules, or the number of calls of the module."""
    with pytest.raises(ArgumentError, match=message):
        focus(capture_graph(residual(), X), name, call)


def test_focus_on_a_module_that_was_never_called() -> None:
    """A module that is never called is not in the graph."""
    net = Net(lambda net, x: net.used(x), used=linear(), unused=linear())
    with pytest.raises(ArgumentError, match="the closest name is 'used'"):
        focus(capture_graph(net, X), "unused")
    with pytest.raises(ArgumentError, match="the model has no submodules"):
        focus(capture_graph(nn.ReLU(), X), "0")


def _inside(graph: Graph, call: Node) -> set[int]:
    return {call.id, *(node.id for node in graph.nodes if call in graph.ancestors(node))}


@settings(max_examples=40)
@given(graph=graphs)
def test_focus_keeps_all_inside_and_all_borders(graph: Graph) -> None:
    """A focused call has every node and edge inside, one input for each source and one output for each target."""
    for call in graph.module_calls():
        view, inside = focus(graph, call.name, call.call), _inside(graph, call)
        assert [node.id for node in view.nodes if node.id in inside] == sorted(inside)
        assert all(node.depth == len(list(view.ancestors(node))) for node in view.nodes)
        within = [edge for edge in graph.edges if {edge.source, edge.target} <= inside]
        assert [edge for edge in view.edges if {edge.source, edge.target} <= inside] == within
        for borders, outer, inner in (
            ("input", "source", "target"),
            ("output", "target", "source"),
        ):
            crossing = [e for e in graph.edges if getattr(e, inner) in inside and getattr(e, outer) not in inside]
            shown = [e for e in view.edges if getattr(e, outer) not in inside]
            assert [(getattr(e, inner), e.multiplicity, e.tensor) for e in shown] == [
                (getattr(e, inner), e.multiplicity, e.tensor) for e in crossing
            ]
            # One border for each outer node, and no other.
            outside = {getattr(e, outer): getattr(s, outer) for e, s in zip(crossing, shown, strict=True)}
            assert [outside[getattr(e, outer)] for e in crossing] == [getattr(e, outer) for e in shown]
            assert {n.id for n in view.nodes if n.kind == borders and n.id not in inside} == set(outside.values())
