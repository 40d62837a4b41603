"""The graphs of models that are wrapped for training on several devices."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_recorder.graph import Graph, GraphCapture, capture_graph
from tests.graph.nets import Net, X, linear
from tests.graph.outline import outline, text


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process only, which needs no network."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _layers() -> nn.Module:
    return nn.Sequential(linear(), nn.ReLU())


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_distributed_model(options: dict[str, Any]) -> None:
    """A training step of a distributed model is that of the wrapped model, without the work of the wrapper."""
    net = DistributedDataParallel(_layers(), **options)
    optimizer = torch.optim.SGD(net.parameters())
    with GraphCapture(net, X, scope="training_step") as recording:
        net(X).sum().backward()
        optimizer.step()
    graph = recording.graph()
    assert outline(graph) == text(
        """
        input
        0: Linear
          linear <- input
        1: ReLU
          relu <- linear
        sum <- relu
        backward <- sum
        SGD <- backward
        """
    )
    assert (graph.root.type_name, graph.parameters) == ("Sequential", 20)
    assert Graph.from_json(json.loads(json.dumps(graph.to_json()))) == graph


@pytest.mark.usefixtures("group")
def test_distributed_part() -> None:
    """A submodule with its own wrapper is inside the call of the wrapper and connected to the rest."""
    net = Net(lambda net, x: net.part(x.exp()).tanh(), part=DistributedDataParallel(_layers()))
    assert outline(capture_graph(net, X)) == text(
        """
        input
        exp <- input
        part: DistributedDataParallel
          part.module: Sequential
            part.module.0: Linear
              linear <- exp
            part.module.1: ReLU
              relu <- linear
        tanh <- relu
        """
    )


@pytest.mark.usefixtures("group")
def test_distributed_model_has_the_graph_of_the_model() -> None:
    """A wrapped model has the same graph and structural hash as the model itself."""
    layers = _layers()
    expected = capture_graph(layers, X)
    wrapped = capture_graph(DistributedDataParallel(layers), X)
    assert wrapped == expected
    assert wrapped.structural_hash() == expected.structural_hash()
