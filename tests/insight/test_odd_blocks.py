"""The one of many blocks that computes something else is found in the recorded graph."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_recorder.graph import capture_graph
from lightning_recorder.insight.odd_blocks import odd_blocks
from tests.effort import lines_run
from tests.insight.records import Examination

BLOCKS = 10


class Block(nn.Module):
    """A transformer block that may have a mistake."""

    def __init__(self, mistake: str) -> None:
        super().__init__()
        self.mistake = mistake
        self.norm1 = nn.Identity() if mistake == "identity" else nn.LayerNorm(8)
        self.norm2 = nn.LayerNorm(8, eps=1.0 if mistake == "eps" else 1e-5)
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)
        width = 24 if mistake == "width" else 16
        self.fc1, self.fc2 = nn.Linear(8, width), nn.Linear(width, 8)
        self.act = nn.Identity() if mistake == "act" else nn.GELU()
        self.drop = nn.Dropout(0.9 if mistake == "drop" else 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.once(self.once(x)) if self.mistake == "twice" else self.once(x)

    def once(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, -1))
        scores = q @ k.mT
        if self.mistake != "no scale":
            scores = scores * (1.0 if self.mistake == "scale" else 0.5)
        values = scores.softmax(-2 if self.mistake == "dim" else -1) @ v
        a = self.proj(values.transpose(1, 2).reshape(x.shape))
        if self.mistake == "detach":
            a = a.detach()
        if self.mistake == "factor":
            a = 10 * a
        x = a if self.mistake == "no residual" else x + a
        h = x if self.mistake == "no norm" else self.norm2(x)
        y: Tensor = (a if self.mistake == "other source" else x) + self.drop(self.fc2(self.act(self.fc1(h))))
        return y


class Net(nn.Module):
    """A chain of blocks, some of which may have a mistake; ``around`` is one in the code between the blocks."""

    def __init__(self, mistakes: dict[int, str], around: str = "", blocks: int = BLOCKS) -> None:
        super().__init__()
        self.around = around
        self.blocks = nn.ModuleList(Block(mistakes.get(place, "")) for place in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        begin = x
        for place, block in enumerate(self.blocks):
            here = self.around if place == 4 else ""
            y = block(begin if here == "begin" else x)
            x = x if here == "lost" else block(y) if here == "twice" else y.clamp(-9, 9) if here == "pool" else y
            if self.around.startswith("residual") and not here.endswith("but one"):
                x = x + begin
        return x


def found(net: nn.Module, *inputs: Tensor) -> list[tuple[str, str]]:
    """Return the modules that are named, with the difference."""
    return [(each.module, each.what) for each in odd_blocks(capture_graph(net, *inputs))]


X = torch.randn(2, 3, 8)


@pytest.mark.parametrize("place", [1, 4, BLOCKS - 2])
@pytest.mark.parametrize(
    ("mistake", "inside", "what"),
    [
        ("eps", ".norm2", "its norm2 (LayerNorm) has eps = 1.0 and not 1e-05"),
        ("drop", ".drop", "its drop (Dropout) has p = 0.9 and not 0.1"),
        ("act", ".act", "its act is Identity and not GELU"),
        ("no scale", "", "it does not call mul"),
        ("scale", "", "its mul has other = 1.0 and not 0.5"),
        ("dim", "", "its softmax has dim = -2 and not -1"),
        ("detach", "", "it calls detach"),
        ("factor", "", "it calls mul"),
        ("no residual", "", "it does not call add"),
        ("no norm", ".norm2", "it does not call norm2 (LayerNorm)"),
        ("identity", ".norm1", "its norm1 is Identity and not LayerNorm"),
        ("twice", "", "it calls everything twice"),
        ("other source", "", "it connects the same operations in another way"),
    ],
)
def test_a_mistake_in_one_block(mistake: str, inside: str, what: str, place: int) -> None:
    assert found(Net({place: mistake}), X) == [(f"blocks.{place}{inside}", what)]


@pytest.mark.parametrize(
    ("around", "named", "what"),
    [
        ("begin", "blocks.3", "its result is not used by another block"),
        ("lost", "blocks.4", "its result is not used by another block"),
        ("twice", "blocks.4", "it is called 2 times, and the others 1"),
        ("residual but one", "blocks.4", "its result is not used by add but used by another block"),
    ],
)
def test_a_mistake_between_the_blocks(around: str, named: str, what: str) -> None:
    assert found(Net({}, around), X) == [(named, what)]


@pytest.mark.parametrize(
    "net",
    [
        Net({}),
        Net({}, "residual"),
        Net({0: "no norm"}),
        Net({BLOCKS - 1: "no residual"}),
        Net({2: "detach", 6: "detach"}),
        Net(dict.fromkeys(range(0, BLOCKS, 2), "dim")),
        Net({4: "no norm", 0: "no norm"}),  # every fourth block, and the last one of the kind is missing
        Net({1: "dim"}, blocks=2),
        Net({4: "width"}),
        Net({}, "pool"),
    ],
)
def test_designs_with_several_kinds_of_blocks(net: nn.Module) -> None:
    """Only a block that differs from all others, and is neither the first nor the last one, is named."""
    assert found(net, X) == []


class Stage(nn.Module):
    """A block of a convolutional network in stages, which may have a mistake."""

    def __init__(self, inside: int, width: int, mistake: str) -> None:
        super().__init__()
        self.mistake = mistake
        self.conv = nn.Conv1d(inside, width, 3, padding=1, stride=1 if inside == width else 2)
        self.norm = nn.BatchNorm1d(width)
        self.act = nn.Identity() if mistake == "act" else nn.ReLU()
        self.short = nn.Identity() if inside == width else nn.Conv1d(inside, width, 1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(self.norm(self.conv(x)))
        short = self.short(x)
        return y if self.mistake == "no residual" else short + (10 * y if self.mistake == "factor" else y)


def in_stages(mistakes: dict[int, str], *, is_nested: bool) -> nn.Module:
    """Return twelve blocks in three stages, in one list or in a list for each stage."""
    widths = [4, *[4] * 4, *[8] * 4, *[16] * 4]
    blocks = [Stage(*pair, mistakes.get(place, "")) for place, pair in enumerate(pairwise(widths))]
    stages = [nn.Sequential(*blocks[place : place + 4]) for place in (0, 4, 8)]
    return nn.Sequential(*(stages if is_nested else blocks))


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize(
    ("mistakes", "what"),
    [
        ({6: "act"}, [".act its act is Identity and not ReLU"]),
        ({5: "no residual"}, [" it does not call add"]),
        ({7: "factor"}, [" it calls mul"]),
        ({3: "factor"}, [" it calls mul"]),
        ({}, []),
        ({4: "act"}, []),  # a block that halves the resolution
        ({11: "act"}, []),
        ({5: "act", 6: "act"}, []),
        ({5: "act", 6: "factor"}, []),
    ],
)
def test_a_mistake_in_one_block_of_stages(mistakes: dict[int, str], what: list[str], is_nested: bool) -> None:
    place = next(iter(mistakes), 0)
    name = f"{place // 4}.{place % 4}" if is_nested else f"{place}"
    odd = odd_blocks(capture_graph(in_stages(mistakes, is_nested=is_nested), torch.randn(2, 4, 32)))
    assert [f"{each.module} {each.what}" for each in odd] == [f"{name}{each}" for each in what]
    assert [each.others for each in odd] == [7] * len(odd)  # without the ends and those that halve the resolution


class InTurn(nn.Module):
    """Blocks of two kinds in turn, one of which may have a mistake."""

    def __init__(self, place: int, mistake: str) -> None:
        super().__init__()
        self.is_flipped, self.mistake = place % 2 == 1, mistake
        self.fc1, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 4)
        self.act = nn.Identity() if mistake == "act" else nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        if self.is_flipped:
            a, b = b, a
        change = self.fc2(self.act(self.fc1(a)))
        b = change if self.mistake == "no residual" else b + change
        return torch.cat([b, a] if self.is_flipped else [a, b], -1)


@pytest.mark.parametrize("place", [1, 4, 5, BLOCKS - 2])
@pytest.mark.parametrize(
    ("mistake", "inside", "what"), [("act", ".act", "its act is Identity and not ReLU"), ("no residual", "", "add")]
)
def test_a_mistake_in_one_of_blocks_of_two_kinds(place: int, mistake: str, inside: str, what: str) -> None:
    """A block is compared with those of its kind."""
    net = nn.Sequential(*(InTurn(each, mistake if each == place else "") for each in range(BLOCKS)))
    (odd,) = odd_blocks(capture_graph(net, torch.randn(2, 8)))
    assert odd.module == f"{place}{inside}"
    assert odd.what.endswith(what)
    assert not odd.is_one_kind
    assert odd.others == sum(each % 2 == place % 2 for each in range(1, BLOCKS - 1)) - 1
    (finding,) = Examination(capture_graph(net, torch.randn(2, 8))).findings()
    assert finding.verdict.startswith(f"{place} computes something else than {odd.others} similar blocks: ")


@pytest.mark.parametrize("wrong", [4, 9])
def test_blocks_that_alternate_with_a_gap_are_a_design(wrong: int) -> None:
    """Two blocks of one kind in a row are not alone in their form."""
    net = nn.Sequential(*(InTurn(each + (each >= wrong), "") for each in range(BLOCKS)))
    assert found(net, torch.randn(2, 8)) == []


class Experts(nn.Module):
    """A loop over the experts that were chosen, as often as there are tokens for them."""

    def __init__(self, chosen: int) -> None:
        super().__init__()
        self.chosen = chosen
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for expert in list(self.experts)[: self.chosen]:
            result = result + torch.relu(expert(x)) * 0.5
        return x + result


def test_a_loop_over_chosen_experts_may_differ() -> None:
    assert found(nn.Sequential(*(Experts(2 + (place == 4)) for place in range(BLOCKS))), X) == []


class Heads(nn.Module):
    """Heads beside each other, one of which has another loss."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(8, 8) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        results = [head(x) for head in self.heads]
        losses = [each.abs().mean() if place == 4 else each.square().mean() for place, each in enumerate(results)]
        return torch.stack(losses).sum()


def test_modules_beside_each_other_are_no_blocks() -> None:
    assert found(Heads(), X) == []


class Other(nn.Sequential):
    """A block of another class."""


def test_lists_of_several_classes() -> None:
    """The last block before those of another class is followed by a block, as the others are."""
    blocks = [Other(nn.Linear(8, 8)) if place in (7, 8) else Block("") for place in range(BLOCKS + 1)]
    assert found(nn.Sequential(*blocks), X) == []


class Kinds(nn.Module):
    """A block that may be of another kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.conv = nn.Conv1d(8, 8, 3, padding=1, stride=2 if kind == "stride" else 1)
        self.mix = None if kind == "none" else nn.Linear(16, 16) if kind == "mixer" else nn.Conv1d(8, 8, 1)
        self.extra = nn.Parameter(torch.ones(16)) if kind == "embedding" else None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        y = y if self.mix is None or self.kind == "stride" else self.mix(y)
        y = y if self.extra is None else y + self.extra
        if self.kind == "global":
            y = y + torch.cumsum(y, -1).tril()
        return y if self.kind == "stride" else x + y


@pytest.mark.parametrize(
    ("kind", "severities"),
    [("stride", []), ("global", ["note"]), ("mixer", ["note"]), ("none", ["note"]), ("embedding", ["note"])],
)
def test_a_block_of_another_kind(kind: str, severities: list[str]) -> None:
    """A block that changes the size is part of the design. One that computes more or has other layers is a note."""
    net = nn.Sequential(*(Kinds(kind if place == 5 else "") for place in range(BLOCKS)))
    graph = capture_graph(net, torch.randn(2, 8, 16))
    assert [each.severity for each in Examination(graph).findings()] == severities


def test_the_line_of_code_is_named() -> None:
    """The line is that of the call which the others lack, not that of an equal call before it."""
    (odd,) = odd_blocks(capture_graph(Net({4: "factor"}), X))
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    assert lines[int(odd.source.rpartition(":")[2]) - 1].strip() == "a = 10 * a"


def test_the_finding() -> None:
    graph: Any = capture_graph(Net({4: "factor"}), X)
    (finding,) = Examination(graph).findings()
    assert (finding.rule, finding.severity, finding.module) == ("odd-block", "warning", "blocks.4")
    assert "blocks.4 computes something else than the other 9 blocks: it calls mul (" in finding.verdict


def test_a_rule_about_what_is_missing_comes_first() -> None:
    """A residual connection that a block lacks is named alone, and the first block adds the input of the model."""
    graph: Any = capture_graph(Net({4: "no residual"}), X)
    (finding,) = Examination(graph).findings()
    assert (finding.rule, finding.module, finding.others) == ("no-residual", "blocks.4", ())


class Skips(nn.Module):
    """A chain of blocks whose results are also used at the end, all at once or one after the other as in a U-Net."""

    def __init__(self, blocks: int, *, all_at_once: bool) -> None:
        super().__init__()
        self.all_at_once = all_at_once
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(blocks))
        self.back = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.blocks:
            x = block(x)
            kept.append(x)
        if self.all_at_once:
            x = torch.stack(kept).sum(0)
        for block in self.back:
            x = block(x) if self.all_at_once else block(x + kept.pop())
        return x


@pytest.mark.parametrize("all_at_once", [True, False])
def test_the_search_visits_each_part_of_the_graph_a_few_times(all_at_once: bool) -> None:
    """Four times as many blocks take four times as long, although later modules use the results of all blocks."""
    efforts = []
    for blocks in (20, 80):
        graph = capture_graph(Skips(blocks, all_at_once=all_at_once), torch.randn(2, 4))
        efforts.append(lines_run(partial(odd_blocks, graph)))
    assert efforts[1] < 4.5 * efforts[0]
