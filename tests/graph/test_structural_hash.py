"""The structural hash: differences between graphs that change it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_recorder.graph import Edge, Graph, GraphCapture, Node, TensorMeta, capture_graph
from tests.graph.constructs import CONSTRUCTS, fresh
from tests.graph.nets import Net, X, linear
from tests.graph.random_nets import graphs

# Recordings.


def captured(forward: Callable[..., Any], *inputs: Tensor) -> str:
    """Return the hash of a function of one layer and its inputs."""
    return capture_graph(Net(lambda net, *given: forward(net.fc, *given), fc=linear()), *inputs).structural_hash()


def test_two_nets_of_one_kind() -> None:
    """Nets that differ only in their values have the same hash, and so has a second recording of one of them."""
    nets = [nn.Sequential(linear(), nn.Dropout(), nn.BatchNorm1d(4)) for _ in range(2)]
    assert len({capture_graph(net, X).structural_hash() for net in (*nets, *nets)}) == 1


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # scripted models are still in use
def test_runs_of_a_scripted_net() -> None:
    """A scripted net has the same hash before and after TorchScript has optimized it."""
    net: Any = torch.jit.script(nn.Sequential(linear(), nn.Sigmoid()))
    assert len({capture_graph(net, X).structural_hash() for _ in range(4)}) == 1


def test_writing_in_place() -> None:
    """In-place operations do not change the hash."""
    inside = captured(lambda fc, x: torch.relu_(fc(x).mul_(2)), X)
    assert inside == captured(lambda fc, x: torch.relu(fc(x).mul(2)), X)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda: captured(lambda fc, x: fc(x).relu() + x, torch.zeros(3, 4)), id="another batch"),
        pytest.param(lambda: captured(lambda fc, x: fc(x.float()).relu() + x, X.double()), id="another dtype"),
        pytest.param(lambda: captured(lambda fc, x: fc(x).tanh() + x, X), id="another function"),
        pytest.param(lambda: captured(lambda fc, x: (y := fc(x)).relu() + y, X), id="an edge from elsewhere"),
        pytest.param(lambda: captured(lambda fc, x: (y := fc(x).relu()) + y, X), id="an edge twice"),
        pytest.param(lambda: captured(lambda fc, x: fc(x).relu().detach() + x, X), id="one function more"),
        pytest.param(lambda: captured(lambda fc, x: fc(fc(x)).relu() + x, X), id="one call more"),
    ],
)
def test_another_computation(other: Callable[[], str]) -> None:
    """A net with another computation, or with other shapes, has another hash."""
    assert other() != captured(lambda fc, x: fc(x).relu() + x, X)


def test_without_gradients() -> None:
    """A recording without autograd nodes has another hash."""
    with_gradients = captured(lambda fc, x: fc(x), X)
    with torch.no_grad():
        assert captured(lambda fc, x: fc(x), X) != with_gradients


def test_times_and_lines_do_not_count() -> None:
    """A recording with times, made from another line, has the same hash."""
    net = nn.Sequential(linear())
    with GraphCapture(net, X) as plain:
        net(X)
    with GraphCapture(net, X, times=True) as timed:
        net(X)
    assert timed.graph().module_calls()[0].duration_ms is not None
    assert timed.graph().nodes[-1].source != plain.graph().nodes[-1].source
    assert timed.graph().structural_hash() == plain.graph().structural_hash()


PROGRAM = """
import json, warnings
warnings.simplefilter("ignore")
from tests.graph.constructs import CONSTRUCTS, fresh
print(json.dumps({name: fresh(make).record()[0].structural_hash() for name, make in CONSTRUCTS.items()}))
"""


# torch warns about scripted functions and nested tensors.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:The PyTorch API of nested:UserWarning")
def test_other_processes() -> None:
    """Each construct of the catalogue has the same hash in a process with another string hash seed."""
    root = Path(__file__).parents[2]
    other = os.environ.get("PYTHONHASHSEED") == "1"
    environment = {**os.environ, "PYTHONHASHSEED": "2" if other else "1"}
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True) as process:
        ours = {name: fresh(make).record()[0].structural_hash() for name, make in CONSTRUCTS.items()}
        printed, _ = process.communicate()
    assert process.returncode == 0
    assert json.loads(printed.splitlines()[-1]) == ours
    assert len(set(ours.values())) > len(CONSTRUCTS) // 2


# Graphs built by hand.

NODE = Node(4, "op", "relu", 0, 1, outputs=(TensorMeta((2, 4), "float32"),), autograd=("ReluBackward0",))
GRAPH = Graph(
    (Node(0, "module", "", None, 0, type_name="Net"), Node(2, "input", "input", 0, 1), NODE), (Edge(2, 4),), "forward"
)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "module"},
        {"name": "tanh"},
        {"parent": 2},
        {"type_name": "ReLU"},
        {"call": 2},
        {"outputs": (TensorMeta((3, 4), "float32"),)},
        {"outputs": (TensorMeta((2, 4), "float16"),)},
        {"outputs": ()},
        {"parameters": 3},
        {"autograd": ()},
        {"scope": "loss"},
        {"failed": True},
        {"repeats": 2},
        {"parallel": True},
    ],
    ids="-".join,
)
def test_what_counts(change: dict[str, Any]) -> None:
    """A change of any one of these fields of a node changes the hash."""
    other = replace(GRAPH, nodes=(*GRAPH.nodes[:2], replace(NODE, **change)))
    assert other.structural_hash() != GRAPH.structural_hash()


@pytest.mark.parametrize(
    "change",
    [
        {"source": "net.py:7"},
        {"duration_ms": 3.0},
        {"outputs": (TensorMeta((2, 4), "float32", "cuda:0"),)},
    ],
    ids=["source", "duration", "device"],
)
def test_what_does_not_count(change: dict[str, Any]) -> None:
    """Source lines, times and devices do not change the hash."""
    other = replace(GRAPH, nodes=(*GRAPH.nodes[:2], replace(NODE, **change)))
    assert other.structural_hash() == GRAPH.structural_hash()


def test_edges_and_scope_count() -> None:
    """Removing an edge, adding a tensor to an edge, or changing the scope changes the hash."""
    others = [replace(GRAPH, edges=()), replace(GRAPH, edges=(Edge(2, 4, 2),)), replace(GRAPH, scope="training_step")]
    assert len({graph.structural_hash() for graph in (GRAPH, *others)}) == 4


def test_ids_do_not_count() -> None:
    """The order of the nodes determines the hash; their ids do not."""
    root, given_, node = GRAPH.nodes
    other = replace(GRAPH, nodes=(root, replace(given_, id=10), replace(node, id=20)), edges=(Edge(10, 20),))
    assert other.structural_hash() == GRAPH.structural_hash()


@given(graphs, st.data())
def test_any_edge_counts(graph: Graph, data: st.DataObject) -> None:
    """A graph without any one of its edges has another hash; a round trip through JSON keeps the hash."""
    assert Graph.from_json(json.loads(json.dumps(graph.to_json()))).structural_hash() == graph.structural_hash()
    if graph.edges:
        left_out = data.draw(st.integers(0, len(graph.edges) - 1))
        fewer = replace(graph, edges=graph.edges[:left_out] + graph.edges[left_out + 1 :])
        assert fewer.structural_hash() != graph.structural_hash()


def test_the_order_of_the_inputs_counts() -> None:
    """Swapping the terms of a subtraction changes the hash."""
    assert captured(lambda _, x, y: x - y, X, X.clone()) != captured(lambda _, x, y: y - x, X, X.clone())
