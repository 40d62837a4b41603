"""Routers are found by themselves, whichever way they compute and choose, and nothing else is taken for one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_recorder.functions import FUNCTIONS, SCORE_KINDS, ChosenFunctions, FunctionOutputTap
from lightning_recorder.reductions.scores import EXPERT_SLOTS, ExpertScores
from lightning_recorder.taps import Site

TOKENS, WIDTH, EXPERTS = 50, 6, 8


class Layer(nn.Module):
    """Computes the scores of experts and chooses some of them."""

    def __init__(self, choose: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH))
        self.choose = choose

    def forward(self, x: Tensor) -> Tensor:
        self.scores = F.linear(x, self.weight)
        return self.choose(self.scores)


def recorded(
    choose: Callable[[Tensor], Tensor], *, name: str = "mixer"
) -> tuple[dict[str, dict[str, list[float]]], Tensor]:
    """Return the statistics of the experts by site, and the scores."""
    torch.manual_seed(0)
    net = nn.ModuleDict({name: Layer(choose)})
    found: dict[str, ExpertScores] = {}

    def receive(site: Site, best: Tensor | None, block: Tensor) -> None:
        assert len(block) == len(EXPERT_SLOTS)
        assert (best is None) is (site.name in found)
        assert best is None or best.shape == (TOKENS,)
        found.setdefault(site.name, ExpertScores()).update(block)

    tap = FunctionOutputTap(ChosenFunctions(net, {*FUNCTIONS, *SCORE_KINDS}), lambda site, tensor: None, strict=True)
    tap.receive_scores = receive
    x = torch.randn(TOKENS, WIDTH)
    with tap:
        net[name](x)
    statistics = {key: {each: value.tolist() for each, value in made.compute().items()} for key, made in found.items()}
    return statistics, F.linear(x, net[name].weight).detach()  # type: ignore[arg-type]  # a parameter


def check(found: dict[str, list[float]], scores: Tensor, chosen: Tensor, shares: Tensor, margins: Tensor) -> None:
    load = torch.bincount(chosen.flatten(), minlength=EXPERTS).double()
    assert found["router_load"] == pytest.approx((load / load.sum()).tolist())
    assert found["router_probability"] == pytest.approx(shares.mean(0).tolist(), rel=1e-5)
    entropy = float(-(shares * shares.log()).sum(-1).mean())
    assert found["router_entropy"] == pytest.approx([entropy] * EXPERTS, rel=1e-5)
    assert found["router_margin"] == pytest.approx([float(margins.mean())] * EXPERTS, rel=1e-4)
    assert found["router_chosen"] == [float(chosen.numel() / TOKENS)] * EXPERTS
    assert found["router_tokens"] == [float(TOKENS)] * EXPERTS


def margins_of(scores: Tensor, chosen: int) -> Tensor:
    best = scores.sort(descending=True).values
    return best[:, chosen - 1] - best[:, chosen]


def softmax_then_topk(scores: Tensor) -> Tensor:
    values, _ = torch.topk(scores.softmax(-1), 2, dim=-1)
    return values / values.sum(-1, keepdim=True)


def topk_then_softmax(scores: Tensor) -> Tensor:
    values, _ = scores.topk(2, dim=-1)
    return F.softmax(values, dim=-1)


def topk_then_scatter(scores: Tensor) -> Tensor:
    values, chosen = scores.topk(2, dim=-1)
    return torch.full_like(scores, -torch.inf).scatter_(1, chosen, values).sigmoid()


def topk_then_mask(scores: Tensor) -> Tensor:
    least = scores.topk(2, dim=-1).values[:, -1:]
    return F.softmax(scores.masked_fill(scores < least, -torch.inf).float(), dim=-1)


def sigmoid_with_bias(scores: Tensor) -> Tensor:
    probabilities = scores.sigmoid()
    with torch.no_grad():
        chosen = (probabilities + torch.linspace(0, 1, EXPERTS)).topk(3, sorted=False).indices
    return probabilities.gather(1, chosen)


def limited_groups(scores: Tensor) -> Tensor:
    probabilities = scores.sigmoid()
    groups = probabilities.view(-1, 2, EXPERTS // 2).topk(2, dim=-1)[0].sum(-1)
    best = groups.topk(1, dim=-1, sorted=False).indices
    mask = torch.zeros_like(groups).scatter_(1, best, 1.0).repeat_interleave(EXPERTS // 2, 1)
    return probabilities.masked_fill(mask == 0, 0.0).topk(2, dim=-1).values


def one_group(scores: Tensor) -> Tensor:
    probabilities = scores.sigmoid()
    best = probabilities.view(-1, 1, EXPERTS).topk(2, dim=-1)[0].sum(-1)
    return probabilities.masked_fill(best == 0, 0.0).topk(2, dim=-1).values


def test_softmax_then_topk() -> None:
    """The choice among the probabilities of a softmax, as in Mixtral and Qwen."""
    found, scores = recorded(softmax_then_topk)
    shares = scores.softmax(-1)
    check(found["mixer.topk"], scores, shares.topk(2).indices, shares, margins_of(shares, 2))


@pytest.mark.parametrize("choose", [topk_then_softmax, topk_then_scatter, topk_then_mask])
def test_topk_then_softmax(choose: Callable[[Tensor], Tensor]) -> None:
    """A choice among scores counts if the probabilities come afterwards, as in GPT-OSS, Llama 4 and noisy gates."""
    found, scores = recorded(choose)
    assert list(found) == ["mixer.topk"]
    check(found["mixer.topk"], scores, scores.topk(2).indices, scores.softmax(-1), margins_of(scores, 2))


def test_sigmoid_with_bias() -> None:
    """The choice among sigmoids with a bias that has no gradient; the probabilities are without it."""
    found, scores = recorded(sigmoid_with_bias)
    biased = scores.sigmoid() + torch.linspace(0, 1, EXPERTS)
    shares = scores.sigmoid() / scores.sigmoid().sum(-1, keepdim=True)
    check(found["mixer.topk"], scores, biased.topk(3).indices, shares, margins_of(biased, 3))


@pytest.mark.parametrize(("choose", "site"), [(limited_groups, "mixer.topk#3"), (one_group, "mixer.topk#2")])
def test_limited_groups(choose: Callable[[Tensor], Tensor], site: str) -> None:
    """The choice of groups is not taken for that of experts, as in DeepSeek-V3, nor is that in a group of all."""
    found, _ = recorded(choose)
    assert list(found) == [site]
    assert sum(found[site]["router_load"]) == pytest.approx(1.0)


class Balanced(nn.Module):
    """Two routers whose choices are repeated by the loss that balances them, or a third router behind them."""

    def __init__(self, *, joined: bool, own: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(lambda made: softmax_then_topk(made.bfloat16())) for _ in range(2))
        self.joined, self.own = joined, own

    def forward(self, x: Tensor) -> Tensor:
        scores: list[Tensor] = []
        for layer in cast("list[Layer]", self.layers):
            layer(x)
            scores.append(layer.scores)
        if self.own:
            scores = [F.linear(x, cast("Layer", self.layers[0]).weight)]
        for each in [torch.cat(scores)] if self.joined else scores:
            each.softmax(-1).topk(2, dim=-1)
        return x


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("own", [True, False])
def test_a_loss_that_balances_the_load_is_no_router(joined: bool, own: bool) -> None:
    """A choice among the scores of other modules is none of its own, unlike one among own scores."""
    net = nn.ModuleDict({"net": Balanced(joined=joined, own=own)})
    found: list[str] = []
    tap = FunctionOutputTap(ChosenFunctions(net, {*FUNCTIONS, *SCORE_KINDS}), lambda site, tensor: None, strict=True)
    tap.receive_scores = lambda site, best, block: found.append(site.name)
    with tap:
        net["net"](torch.randn(TOKENS, WIDTH))
    assert found == ["net.layers.0.topk", "net.layers.1.topk", *["net.topk"] * own]


@pytest.mark.parametrize(("name", "is_router"), [("router", True), ("gate", True), ("mixer", False)])
def test_argmax(name: str, is_router: bool) -> None:
    """The best of a softmax is a choice of a router in a module of such a name, and otherwise a prediction."""

    def switch(scores: Tensor) -> Tensor:
        return scores.softmax(-1).argmax(-1)

    found, scores = recorded(switch, name=name)
    assert list(found) == ([f"{name}.argmax"] if is_router else [])
    if is_router:
        shares = scores.softmax(-1)
        check(found[f"{name}.argmax"], scores, scores.argmax(-1), shares, margins_of(shares, 1))


@pytest.mark.parametrize(
    "choose",
    [
        lambda scores: scores.topk(2, dim=-1).values,
        lambda scores: scores.detach().softmax(-1).topk(2, dim=-1).values,
        lambda scores: scores.softmax(-1).topk(2, dim=0).values,
        lambda scores: scores.softmax(-1).topk(EXPERTS, dim=-1).values,
        lambda scores: scores.softmax(-1).topk(2, dim=-1, largest=False).values,
    ],
)
def test_other_choices(choose: Callable[[Tensor], Tensor]) -> None:
    """The best of scores without probabilities, without a gradient, over tokens, of all, or the worst are no router."""
    assert recorded(choose)[0] == {}


class Drawn:
    """Draws one expert after the other, each among the scores that are left, and reads its probability."""

    def __init__(self) -> None:
        self.chosen: list[Tensor] = []
        self.shares: list[Tensor] = []

    def __call__(self, scores: Tensor) -> Tensor:
        found, left = [], scores
        for _ in range(2):
            near = left.masked_fill(left < left.detach().amax(-1, keepdim=True) - 3, -torch.inf)
            noise = torch.empty_like(near).exponential_().log()
            chosen = (near - noise).max(dim=-1)[1].unsqueeze(-1)
            probabilities = torch.softmax(near, dim=-1)
            found.append(probabilities.gather(dim=-1, index=chosen))
            left = torch.scatter(left, -1, chosen, -torch.inf)
            self.chosen.append(chosen)
            self.shares.append(probabilities.detach())
        return torch.cat(found, dim=-1)


def test_experts_that_are_drawn_in_turn() -> None:
    """Experts that are drawn one after the other, as in Phi-MoE, are one choice with the probabilities of the first."""
    choose = Drawn()
    found, scores = recorded(choose, name="router")
    assert list(found) == ["router.gather"]
    shares = choose.shares[0]
    check(
        found["router.gather"],
        scores,
        torch.cat(choose.chosen, dim=-1),
        shares.clamp(min=torch.finfo(shares.dtype).tiny),
        margins_of(choose.shares[1], 1),
    )
    assert recorded(Drawn())[0] == {}  # no name of a router


def best_two(scores: Tensor) -> Tensor:
    probabilities = scores.softmax(-1)
    first = F.one_hot(probabilities.argmax(-1), EXPERTS)
    second = F.one_hot(scores.masked_fill(first.bool(), -torch.inf).argmax(-1), EXPERTS)
    assert torch.equal(probabilities.argmax(-1), first.argmax(-1))  # a choice that is repeated does not count
    return probabilities * (first + second)


def test_two_in_turn() -> None:
    """A second expert among the scores without the first, as in NLLB-MoE, is part of the same choice."""
    found, scores = recorded(best_two, name="router")
    assert list(found) == ["router.argmax"]
    check(found["router.argmax"], scores, scores.topk(2).indices, scores.softmax(-1), margins_of(scores, 2))


def topk_then_gather(scores: Tensor) -> Tensor:
    probabilities = scores.masked_fill(scores < 0, -20.0).softmax(-1)
    return probabilities.gather(-1, (probabilities + 0.01).topk(2, dim=-1).indices)


def test_reading_the_probabilities_of_a_choice_is_no_other_one() -> None:
    """A router that reads the probabilities of its choice with ``gather`` has chosen once."""
    found, _ = recorded(topk_then_gather, name="router")
    assert {name: each["router_chosen"][0] for name, each in found.items()} == {"router.topk": 2.0}


def test_many_tokens() -> None:
    """The load is that of all tokens; entropy and margin are those of every n-th token."""
    torch.manual_seed(0)
    net = nn.ModuleDict({"gate": Layer(softmax_then_topk)})
    blocks: list[Tensor] = []
    tap = FunctionOutputTap(ChosenFunctions(net, {*FUNCTIONS, *SCORE_KINDS}), lambda site, tensor: None, strict=True)
    tap.receive_scores = lambda site, best, block: blocks.append(block)
    x = torch.randn(10_000, WIDTH)
    with tap:
        net["gate"](x)
    slots = dict(zip(EXPERT_SLOTS, blocks[0], strict=True))
    assert slots["load"].sum() == 20_000
    assert set(slots["tokens"].tolist()) == {10_000.0}
    assert set(slots["sampled"].tolist()) == {float(len(range(0, 10_000, math.ceil(10_000 / 4096))))}
