"""The graphs of all constructs in the catalogue, and laws that these graphs keep."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable

import pytest
import torch

from lightning_recorder.graph import Graph, GraphCapture
from tests.graph.constructs import CONSTRUCTS, Construct, fresh
from tests.graph.nets import Net, X
from tests.graph.outline import outline, text

pytestmark = [
    # Warnings that torch raises about its own features.
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]

each_construct = pytest.mark.parametrize("make", CONSTRUCTS.values(), ids=CONSTRUCTS)


@functools.cache
def recorded(make: Callable[[], Construct]) -> tuple[Construct, Graph, list[torch.Tensor]]:
    """Return a net with its graph and its outputs, recorded once."""
    net = fresh(make)
    return net, *net.record()


@each_construct
def test_graph(make: Callable[[], Construct]) -> None:
    """A net with the construct has the expected graph."""
    net, graph, _ = recorded(make)
    assert outline(graph, outputs=net.outputs, model_tensors=net.model_tensors) == text(net.expected)


@each_construct
def test_values_stay(make: Callable[[], Construct]) -> None:
    """The outputs of the net are bitwise equal with and without a capture."""
    expected = fresh(make).values()
    _, _, seen = recorded(make)
    assert expected
    assert [torch.equal(one, other) for one, other in zip(seen, expected, strict=True)] == [True] * len(expected)


@each_construct
def test_json_gives_the_graph_back(make: Callable[[], Construct]) -> None:
    """A graph is equal after a round trip through JSON text."""
    _, graph, _ = recorded(make)
    assert Graph.from_json(json.loads(json.dumps(graph.to_json()))) == graph


@each_construct
def test_structural_hash_of_a_second_recording(make: Callable[[], Construct]) -> None:
    """A second recording of the net has the same structure, shapes and autograd types."""
    (_, one, _), (other, _) = recorded(make), fresh(make).record()
    assert one == other
    assert one.structural_hash() == other.structural_hash()


@each_construct
def test_what_gives_a_tensor_says_which(make: Callable[[], Construct]) -> None:
    """Each node with an outgoing edge has the shape and dtype of its output, and so has the edge."""
    _, graph, _ = recorded(make)
    assert [graph[edge.source].name for edge in graph.edges if not graph[edge.source].outputs] == []
    backward = {node.id for node in graph.nodes if node.kind == "backward"}
    assert [edge for edge in graph.edges if edge.tensor is None and edge.source not in backward] == []


@each_construct
def test_time_goes_forward(make: Callable[[], Construct]) -> None:
    """Ids count from 0 in the order of time, and no edge goes backwards."""
    _, graph, _ = recorded(make)
    assert [node.id for node in graph.nodes] == list(range(len(graph.nodes)))
    assert [edge for edge in graph.edges if edge.source >= edge.target] == []


def test_iterator_given_back() -> None:
    """An iterator returned by the model is not consumed; its items are not outputs of the graph."""
    net = Net(lambda _, x: iter([x.exp(), x.cos()]))
    with GraphCapture(net, X) as recording:
        out = net(X)
        recording.add_outputs(out)
    assert outline(recording.graph(), outputs=True) == "input\nexp <- input\ncos <- input"
    assert [torch.equal(one, other) for one, other in zip(out, (X.exp(), X.cos()), strict=True)] == [True, True]
