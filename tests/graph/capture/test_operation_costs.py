"""The costs of each function, and what measuring them leaves unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_recorder.graph import Graph, GraphCapture, record
from tests.graph.nets import Net, X, linear
from tests.graph.queries import only


def test_flops_of_layers() -> None:
    """A product of matrices counts two operations for each multiplication, and a call adds up its contents."""
    graph = record(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 5)), input_data=X, costs=True)
    assert [(node.name, node.flops) for node in graph.nodes if node.kind in ("module", "op")] == [
        ("", 2 * 2 * 4 * 3 + 2 * 2 * 3 * 5),
        ("0", 2 * 2 * 4 * 3),
        ("linear", 2 * 2 * 4 * 3),
        ("1", 0),
        ("relu", 0),
        ("2", 2 * 2 * 3 * 5),
        ("linear", 2 * 2 * 3 * 5),
    ]


NETS: dict[str, tuple[nn.Module, Tensor]] = {
    "convolutions": (
        nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 3, 3)),
        torch.ones(2, 3, 9, 9),
    ),
    "attention": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.ones(2, 5, 8)),
    "einsum": (
        Net(lambda net, x: F.scaled_dot_product_attention(x, x, x).mean() + torch.einsum("bij,bjk->bik", x, x).sum()),
        torch.ones(2, 3, 3),
    ),
}


@pytest.mark.parametrize("name", NETS)
def test_flops_equal_those_of_torch(name: str) -> None:
    """The total is the number that torch's own counter finds in a run of the whole model."""
    net, x = NETS[name]
    with FlopCounterMode(display=False) as counter:
        net(x)
    assert record(net, input_data=x, costs=True).root.flops == counter.get_total_flops()


def test_flops_under_vmap() -> None:
    """A function under ``vmap`` counts once for each slice of its tensors, and once if they have no slices."""

    def forward(net: Any, x: Tensor) -> Tensor:
        own = net.layer(x[0, 0])
        return torch.vmap(torch.vmap(lambda row: net.layer(row) + net.layer(own)))(x)  # type: ignore[no-any-return]

    graph = record(Net(forward, layer=linear()), input_data=torch.ones(3, 2, 4), costs=True)
    counts = [node.flops for node in graph.nodes if node.name == "linear"]
    assert counts == [2 * 4 * 4, 3 * 2 * 2 * 4 * 4, 2 * 4 * 4]


def test_flops_of_an_lstm() -> None:
    """The products inside a fused function count: four gates of 6 units, 4 inputs, 6 states, 5 steps and 2 rows."""
    net = Net(lambda net, x: net.cell(x)[0], cell=nn.LSTM(4, 6))
    assert record(net, input_data=torch.ones(5, 2, 4), costs=True).root.flops == 2 * (4 * 6) * (4 + 6) * 5 * 2


def test_flops_without_memory() -> None:
    """The operations of a model without values are counted as well."""
    net = nn.Linear(4, 3)
    assert record(net, input_shapes=(2, 4), device="meta", costs=True).root.flops == 48


def test_saved_bytes() -> None:
    """Memory that is kept for the backward pass counts once, for the first function that saves it."""
    net = Net(lambda net, x: net.fc(x).exp().tanh().detach(), fc=linear())
    graph = record(net, input_data=X, costs=True)
    # linear keeps its input, exp and tanh keep their results; the weights are not counted.
    assert [(node.name, node.saved_bytes) for node in graph.nodes if node.kind == "op"] == [
        ("linear", 32), ("exp", 32), ("tanh", 32), ("detach", 0),
    ]  # fmt: skip
    assert graph.root.saved_bytes == 96
    assert only(graph, "exp").output_bytes == 32


def test_hooks_of_saved_tensors_do_not_run() -> None:
    """Tensors that a hook packs are not unpacked, since that may recompute them."""
    unpacked: list[Tensor] = []
    net = Net(lambda net, x: net.fc(x).exp(), fc=linear())

    def unpack(tensor: Tensor) -> Tensor:
        unpacked.append(tensor)
        return tensor

    with GraphCapture(net, X, costs=True) as recording, torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
        net(X)
    assert only(recording.graph(), "exp").saved_bytes == 0
    assert unpacked == []


def test_times() -> None:
    """Each function and each call has a time, and a call takes at least the time of its functions."""
    graph = record(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), input_data=X, costs=True)
    assert all(node.duration_ms is not None for node in graph.nodes if node.kind in ("module", "op") and node.id)
    without: Graph = record(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), input_data=X)
    assert all((node.duration_ms, node.flops, node.saved_bytes) == (None, None, None) for node in without.nodes)
    assert without == graph


def _step(net: nn.Module, *, costs: bool | None) -> list[Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.Adam(net.parameters())

    def train() -> None:
        loss: Any = net(X.requires_grad_(False)).square().mean()
        loss.backward()
        optimizer.step()

    for _ in range(2):
        if costs is None:
            train()
        else:
            with GraphCapture(net, X, costs=costs) as recording:
                train()
            recording.graph()
    return [*net.parameters(), *net.buffers(), torch.rand(3)]


def _net() -> nn.Module:
    torch.manual_seed(0)
    body = nn.Sequential(linear(), nn.BatchNorm1d(4), nn.Dropout(), nn.ReLU(inplace=True))
    return Net(lambda net, x: net.head(checkpoint(net.body, x, use_reentrant=False)), body=body, head=linear())


@pytest.mark.parametrize("costs", [False, True])
def test_training_is_the_same_to_the_bit(costs: bool) -> None:
    """Measuring changes neither parameters nor buffers nor random numbers, even with a checkpoint and dropout."""
    plain, recorded = _step(_net(), costs=None), _step(_net(), costs=costs)
    assert all(torch.equal(one, other) for one, other in zip(plain, recorded, strict=True))
