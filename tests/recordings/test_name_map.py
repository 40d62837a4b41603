"""Tests of the map of module names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_recorder import ArgumentError
from lightning_recorder.graph import capture_graph
from lightning_recorder.recordings.name_map import NameMap, suggest_rules
from lightning_recorder.taps import Site


def test_a_rule_applies_to_a_whole_name() -> None:
    """The first rule that matches a whole name applies, dots in a rule are literal, and other names stay."""
    names = NameMap(["layers.*.fc=blocks.*.linear", "layers.*=blocks.*"])
    assert [names(name) for name in ("layers.0.fc", "layers.0.act", "my.layers.0", "layersx0")] == [
        "blocks.0.linear",
        "blocks.0.act",
        "my.layers.0",
        "layersx0",
    ]


def test_two_sites_with_one_counterpart_are_an_error() -> None:
    """A map that gives two sites the same name is refused."""
    names = NameMap(["a=c", "b=c"])
    assert names.unused(["a", "other"]) == ["b=c"]
    with pytest.raises(ArgumentError, match="--map gives 'a' and 'b' the same name 'c'"):
        names.sites([Site("a", "out"), Site("b", "out")], [Site("c", "out")])
    assert names.sites([Site("a", "out")], [Site("c", "out")]) == {Site("a", "out"): Site("c", "out")}


class Blocks(nn.Module):
    """Two blocks with an attribute name of the list, of the block's layer, and of the first layer."""

    def __init__(self, blocks: str, layer: str, stem: str) -> None:
        super().__init__()
        self.names = blocks, stem
        setattr(self, stem, nn.Linear(4, 4))
        parts = [nn.ModuleDict({layer: nn.Linear(4, 4), "act": nn.ReLU()}) for _ in range(2)]
        setattr(self, blocks, nn.ModuleList(parts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        blocks, stem = self.names
        x = self.get_submodule(stem)(x)
        for block in self.get_submodule(blocks).children():
            for layer in block.children():
                x = layer(x)
        return x


def test_rules_are_found_from_the_structure() -> None:
    """The rules map every module of one graph to the module at the same place of the other."""
    one, other = (
        capture_graph(Blocks(*names), torch.ones(1, 4)) for names in (("h", "fc", "wte"), ("blocks", "up", "stem"))
    )
    rules = suggest_rules(one, other)
    names = NameMap(rules)
    mine, theirs = ([node.name for node in graph.module_calls()] for graph in (one, other))
    assert [names(name) for name in mine] == theirs
    assert rules == ["h.*.fc=blocks.*.up", "h.*=blocks.*", "wte=stem"]
    assert suggest_rules(one, one) == []
