"""Tests of the rules about routers, with the layer that makes their scores."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_recorder.graph import capture_graph
from tests.insight.records import brief, parts, record


class Routed(nn.Module):
    """A step with four experts, whose scores a layer makes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.head = nn.Linear(5, 8), nn.Linear(8, 4), nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        weights, chosen = self.gate(hidden).softmax(-1).topk(2)
        outputs = torch.stack([expert(hidden) for expert in self.experts], 1)
        mixed = (outputs.gather(1, chosen[..., None].expand(-1, -1, 8)) * weights[..., None]).sum(1)
        return F.cross_entropy(self.head(hidden + mixed), target)


graph = capture_graph(Routed(), torch.randn(16, 5), torch.arange(16) % 3)


@pytest.mark.parametrize(
    ("loads", "rules"),
    [
        ((0.5, 0.5, 0.0, 0.0), ["router-collapse"]),
        ((0.4, 0.3, 0.3, 0.0), ["starved-expert"]),
        ((0.25, 0.25, 0.25, 0.25), ["scale-jump"]),
    ],
)
def test_scores_that_prefer_some_experts(loads: tuple[float, ...], rules: list[str]) -> None:
    """The large scores of a router that prefers some experts are no second finding; those of an even router are one."""
    examination = parts({"topk": [{"load": load} for load in loads]}, kind="router", graph=graph)
    for row in range(8):
        sizes = {("first", "out"): {"rms": 1.0}, ("gate", "out"): {"rms": 15.0}, ("head", "out"): {"rms": 1.0}}
        examination.add(record("activations", row * 10, sizes, recorder="layers"))
    found = examination.findings()
    assert [rule for _, rule, _ in brief(found)] == rules
    assert all("gate" in (each.module, *each.others) for each in found)


def test_another_layer_with_large_outputs() -> None:
    """The large output of a layer that makes no scores stays a finding of its own."""
    examination = parts({"topk": [{"load": load} for load in (0.5, 0.5, 0.0, 0.0)]}, kind="router", graph=graph)
    for row in range(8):
        sizes = {("first", "out"): {"rms": 1.0}, ("experts.0", "out"): {"rms": 15.0}, ("head", "out"): {"rms": 1.0}}
        examination.add(record("activations", row * 10, sizes, recorder="layers"))
    rules = [(each.rule, each.module) for each in examination.findings()]
    assert rules == [("router-collapse", "topk"), ("scale-jump", "experts.0")]
