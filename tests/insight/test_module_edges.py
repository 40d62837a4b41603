"""Tests of the modules that feed each other."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from typing_extensions import override

from lightning_recorder import capture_graph
from lightning_recorder.graph import GraphCapture
from lightning_recorder.insight.module_edges import INPUT, Wiring, families
from lightning_recorder.insight.rules.gradients import last_behind
from tests.effort import lines_run


class Residual(nn.Module):
    """A residual connection, a concatenation and a functional activation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.branch = nn.Linear(2, 4), nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.head = nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.stem(inputs)
        hidden = hidden + self.branch(self.norm(hidden))
        out: Tensor = self.head(torch.cat([torch.tanh(hidden), hidden], 1))
        return out


NAMES = ["stem", "norm", "branch.0", "branch.1", "head"]


def test_functions_are_looked_through() -> None:
    """A sum or a concatenation is fed by the modules behind it."""
    wiring = Wiring(NAMES, capture_graph(Residual(), torch.ones(1, 2)))
    assert wiring.inputs == {
        "stem": [INPUT],
        "norm": ["stem"],
        "branch.0": ["norm"],
        "branch.1": ["branch.0"],
        "head": ["stem", "branch.1"],
    }
    assert wiring.outputs["stem"] == ["norm", "head"]
    assert wiring.upstream("branch.0") == {"stem", "norm", "branch.0"}
    assert wiring.downstream("norm") == {"norm", "branch.0", "branch.1", "head"}
    assert wiring.types["norm"] == "LayerNorm"


class Stream(nn.Module):
    """Blocks that add to a residual stream, which feeds all later ones."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def test_a_search_for_the_next_block_does_not_visit_all_later_ones() -> None:
    efforts = []
    for blocks in (20, 80):
        names = [f"blocks.{block}.{place}" for block in range(blocks) for place in range(2)]
        wiring = Wiring(names, capture_graph(Stream(blocks), torch.ones(1, 2)))
        assert not wiring.leads(names[1], names[0])
        pairs = list(pairwise(names[1::2]))
        efforts.append(sum(lines_run(partial(wiring.leads, *pair)) for pair in pairs))
        assert all(wiring.leads(*pair) for pair in pairs)
    assert efforts[1] < 4.5 * efforts[0]


def test_modules_that_are_not_recorded_are_looked_through() -> None:
    """A module without records is passed like a function."""
    wiring = Wiring(["stem", "branch.1", "head"], capture_graph(Residual(), torch.ones(1, 2)))
    assert wiring.inputs["branch.1"] == ["stem"]


def test_without_a_graph() -> None:
    """Without a graph each module is fed by the one before it."""
    wiring = Wiring(["a", "b", "c"], types={"b": "ReLU"})
    assert wiring.inputs == {"a": [INPUT], "b": ["a"], "c": ["b"]}
    assert (wiring.types, wiring.has_graph) == ({"b": "ReLU"}, False)


def test_calls_of_a_shared_module() -> None:
    """Each call of a shared module has its own inputs; the module is fed by all of them."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other, self.act = nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU()

        def forward(self, inputs: Tensor) -> Tensor:
            out: Tensor = self.act(self.other(self.act(self.one(inputs))))
            return out

    wiring = Wiring(["one", "act", "other"], capture_graph(Shared(), torch.ones(1, 2)))
    assert wiring.calls == ["one", "act", "other", "act"]
    assert wiring.producers == [frozenset({-1}), frozenset({0}), frozenset({1}), frozenset({2})]
    assert wiring.inputs["act"] == ["one", "other"]
    assert wiring.after(2) == {2, 3}


def test_families_have_the_same_place_and_structure() -> None:
    """Modules at the same place of repeated blocks are a family, if their structure is equal."""
    keys: dict[str, object] = {f"layers.{number}.mlp.{part}": part for number in range(4) for part in (0, 2)}
    assert families(keys, 4) == [
        [f"layers.{number}.mlp.0" for number in range(4)],
        [f"layers.{number}.mlp.2" for number in range(4)],
    ]
    assert families({f"fc{number}": (8, 8) for number in range(3)}, 4) == []
    assert families({f"fc{number}": (8, 8) for number in range(4)}, 4) == [[f"fc{number}" for number in range(4)]]


LETTERS = "abcdef"


@st.composite
def wirings(draw: st.DrawFn) -> Wiring:
    """Calls of some modules in any order, each fed by any calls before it."""
    wiring = Wiring(list(LETTERS))
    wiring.calls = draw(st.lists(st.sampled_from(LETTERS), max_size=10))
    wiring.producers = [
        frozenset(draw(st.sets(st.integers(-1, call - 1), max_size=3))) for call in range(len(wiring.calls))
    ]
    return wiring


@given(wiring=wirings(), reached=st.sets(st.sampled_from(LETTERS)))
def test_the_last_module_behind_another_one(wiring: Wiring, reached: set[str]) -> None:
    """It is the last one that edges lead to, through nothing but modules without a gradient."""
    expected = {}
    for name in LETTERS:
        behind, before = {name}, set[str]()
        while behind != before:
            before = set(behind)
            behind |= {each for here in before for each in wiring.outputs.get(here, ()) if each not in reached}
        expected[name] = max(behind, key=lambda each: wiring.order[each])
    assert last_behind(wiring, LETTERS, reached) == expected


@given(wiring=wirings())
def test_a_module_leads_to_those_downstream(wiring: Wiring) -> None:
    """One module leads to another one if that is downstream of it."""
    for name in LETTERS:
        assert {to for to in LETTERS if wiring.leads(name, to)} == wiring.downstream(name)


def test_functions_are_calls_between_layers() -> None:
    """A function between layers is a call like that of a module; what follows the last layer is none."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(torch.relu(self.first(x)))
            chance = logits.detach().softmax(-1)
            return (logits.tanh() - chance).square().mean()

    net = Net()
    with GraphCapture(net, torch.ones(3, 2)) as capture:
        net(torch.ones(3, 2)).backward()
    wiring = Wiring(["first", "head", "relu", "softmax", "tanh"], capture.graph())
    assert wiring.calls == ["first", "relu", "head"]
    assert wiring.inputs["head"] == ["relu"]
    assert wiring.outputs["first"] == ["relu"]
    assert wiring.outputs.get("head") is None
    assert wiring.of_loss == {"softmax", "tanh"}


class Visited(dict[str, list[str]]):
    """Edges that count the times that all of them are visited."""

    visits = 0

    @override
    def __iter__(self) -> Iterator[str]:
        Visited.visits += 1
        return super().__iter__()

    @override
    def items(self) -> Any:
        Visited.visits += 1
        return super().items()


def test_the_neighbors_of_all_blocks_are_found_in_one_pass() -> None:
    """All edges are visited once for the blocks of a chain, however many there are; a skip connection is found."""
    names = ["stem", *(f"blocks.{block}.{layer}" for block in range(40) for layer in ("norm", "fc")), "head"]
    blocks = [f"blocks.{block}" for block in range(40)]
    chain = {name: [before] for before, name in pairwise(names)}
    for edges, is_plain in ((chain, True), ({**chain, "blocks.7.fc": ["blocks.7.norm", "stem"]}, False)):
        wiring = Wiring(names, None)
        vars(wiring).update(inputs=Visited(edges), outputs=Visited({one: [two] for one, two in pairwise(names)}))
        Visited.visits = 0
        assert wiring.is_plain(blocks) == is_plain
        assert Visited.visits == 2
