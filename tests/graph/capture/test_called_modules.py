"""The notes about calls that run more than once, or for several samples at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_recorder.graph import GraphCapture, capture_graph, draw, fit_view
from tests.graph.nets import Net, X, linear


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_call_is_marked(reentrant: bool) -> None:
    """Calls that a checkpoint repeats have a note, and are not folded with those that it does not repeat."""

    def forward(net: Any, x: Tensor) -> Tensor:
        for place, block in enumerate(net.blocks):
            x = checkpoint(block, x, use_reentrant=reentrant) if place > 1 else block(x)
        return x

    blocks = nn.ModuleList(nn.Sequential(linear(), nn.ReLU()) for _ in range(4))
    net = Net(forward, blocks=blocks)
    with GraphCapture(net, X) as recording:
        net(X).sum().backward()
        recording.graph()  # a graph that is asked for before the end does not change the last one
    graph = recording.graph()
    notes = {node.name: node.note for node in graph.module_calls() if node.type_name == "Sequential"}
    assert notes == {"blocks.0": "", "blocks.1": "", "blocks.2": "recomputed", "blocks.3": "recomputed"}
    view = fit_view(graph)
    assert [node.note for node in view.module_calls() if node.repeats == 2] == ["", "recomputed"]
    assert draw(graph).visual_graph.source.count(">recomputed<") == 1  # at the frame, not at what is inside


@pytest.mark.parametrize("batched", ["inputs", "parameters"])
def test_a_vmapped_call_is_marked(batched: str) -> None:
    """A call inside ``vmap`` has the number of samples, whether its inputs or its parameters are batched."""

    def forward(net: Any, x: Tensor) -> Any:
        x = net.first(x)
        if batched == "inputs":
            return torch.func.vmap(net.inner)(x)
        stacked = {name: each.expand(3, *each.shape) for name, each in net.inner.named_parameters()}
        call = torch.func.functional_call
        return torch.func.vmap(lambda values: call(net.inner, values, (x,)))(stacked)

    net = Net(forward, first=linear(), inner=nn.Sequential(linear(), nn.ReLU()))
    graph = capture_graph(net, torch.ones(3, X.shape[-1]))
    notes = {node.name: node.note for node in graph.module_calls()}
    assert notes["first"] == ""
    assert notes["inner"] == "vmapped ×3"
    assert draw(graph).visual_graph.source.count(">vmapped ×3<") == 1
