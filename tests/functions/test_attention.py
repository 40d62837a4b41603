"""The scores inside of attention agree with those of the eager computation, for each form of a mask."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_recorder.functions import FUNCTIONS, SCORE_KINDS, SCORES, ChosenFunctions, FunctionOutputTap
from lightning_recorder.functions.attention import MOST_QUERIES, MOST_SAMPLES
from lightning_recorder.reductions.scores import HEAD_SLOTS, HeadScores
from lightning_recorder.taps import Site

SAMPLES, HEADS, LENGTH, WIDTH = 6, 4, 20, 8


def recorded(net: nn.Module, run: Callable[[], object]) -> dict[str, dict[str, list[float]]]:
    """Return the statistics of the heads by site."""
    found: dict[str, HeadScores] = {}

    def receive(site: Site, largest: Tensor | None, block: Tensor) -> None:
        assert site.path == SCORES
        assert largest is not None
        assert not largest.requires_grad
        assert largest.isfinite().all()
        if len(block) == len(HEAD_SLOTS):
            found.setdefault(site.name, HeadScores()).update(block)

    tap = FunctionOutputTap(ChosenFunctions(net, {*FUNCTIONS, *SCORE_KINDS}), lambda site, tensor: None, strict=True)
    tap.receive_scores = receive
    with tap:
        run()
    return {name: {key: each.tolist() for key, each in scores.compute().items()} for name, scores in found.items()}


class Attention(nn.Module):
    """Calls a function with queries, keys and values."""

    num_heads: int

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.function(*args, **kwargs)


def eager(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights: Tensor = torch.softmax(scores, -1)
    return weights @ value


def expected(scores: Tensor, hidden: Tensor) -> dict[str, list[float]]:
    """Return the statistics of whole scores, ``[samples, heads, queries, keys]``, computed one query at a time."""
    samples = range(0, len(scores), math.ceil(len(scores) / MOST_SAMPLES))
    every = math.ceil(scores.shape[2] / MOST_QUERIES)
    queries = [row for row in range(scores.shape[2]) if (scores.shape[2] - 1 - row) % every == 0]
    is_own = scores.shape[2] == scores.shape[3]
    found: dict[str, list[float]] = {}
    for head in range(scores.shape[1]):
        rows: dict[str, list[float]] = {}
        most = -math.inf
        for sample in samples:
            rows.setdefault("blind", []).append(bool(hidden[sample, head, queries].all()))
            for query in queries:
                seen = (~hidden[sample, head, query]).nonzero().flatten()
                rows.setdefault("keys", []).append(len(seen))
                row = scores[sample, head, query, seen].double()
                most = max([most, *row.tolist()])
                if len(seen) < 2:
                    continue
                weights = torch.zeros(scores.shape[3], dtype=torch.float64)
                weights[seen] = row.softmax(0)
                entropy = float(-(weights[seen] * weights[seen].log()).nan_to_num().sum())
                values = {
                    "entropy": entropy,
                    "entropy_ratio": entropy / math.log(len(seen)),
                    "first_key": float(weights[0]),
                    "top_key": float(weights.max()),
                    "variance": float(row.var(correction=0)),
                    "distance": float((weights * (torch.arange(len(weights)) - query).abs()).sum()),
                    "future": float(weights[query + 1 :].sum()),
                    "own": query in seen.tolist(),
                }
                for name, value in values.items():
                    rows.setdefault(name, []).append(value)
        mean = {name: sum(each) / len(each) for name, each in rows.items()}
        ratios = rows["entropy_ratio"]
        of_head = {
            "max_logit": most,
            "logit_std": math.sqrt(mean["variance"]),
            "least_ratio": min(ratios),
            "most_ratio": max(ratios),
            "visible": mean["keys"] / scores.shape[3],
            **{name: mean[name] for name in ("entropy", "entropy_ratio", "first_key", "top_key", "keys", "blind")},
            **({name: mean[name] for name in ("distance", "future", "own")} if is_own else {}),
        }
        for name, value in of_head.items():
            found.setdefault(f"attention_{name}", []).append(value)
    return found


def check(found: dict[str, list[float]], scores: Tensor, hidden: Tensor) -> None:
    """Compare with the slow computation: scores to 1e-3, entropies to 1 %, all else to 1e-3."""
    wanted = expected(scores.detach(), hidden.expand_as(scores))
    for name, values in wanted.items():
        relative, absolute = (0.01, 1e-4) if "entropy" in name else (0.0, 1e-3)
        assert found[name] == pytest.approx(values, rel=relative, abs=absolute), name


def sides(*, keys: int = LENGTH, key_heads: int = HEADS, grad: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    shapes = (HEADS, LENGTH), (key_heads, keys), (key_heads, keys)
    made = [torch.randn(SAMPLES, *shape, WIDTH, requires_grad=grad) for shape in shapes]
    return made[0], made[1], made[2]


def alibi() -> Tensor:
    slopes = 2.0 ** -torch.arange(1, HEADS + 1).float()
    places = torch.arange(LENGTH)
    return -slopes[:, None, None] * (places[:, None] - places).abs()


def masks() -> Iterator[tuple[str, Tensor | None]]:
    torch.manual_seed(5)
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    padding = torch.arange(LENGTH) < torch.tensor([20, 9, 3, 1, 12, 0])[:, None]
    yield "none", None
    yield "causal", causal
    yield "random", torch.rand(SAMPLES, 1, LENGTH, LENGTH) > 0.4
    yield "of each head", torch.rand(SAMPLES, HEADS, LENGTH, LENGTH) > 0.4
    yield "padding", padding[:, None, None]
    yield "padding and causal", padding[:, None, None] & causal
    yield "added", torch.where(causal, 0.0, -10000.0)
    yield "least number", torch.where(causal, 0.0, torch.finfo(torch.float32).min)
    yield "infinite", torch.where(causal, 0.0, -torch.inf)
    yield "position bias", alibi()
    yield "position bias and causal", alibi().masked_fill(~causal, -torch.inf)


def hidden_by(mask: Tensor | None) -> Tensor:
    if mask is None:
        return torch.zeros((), dtype=torch.bool)
    return ~mask if mask.dtype == torch.bool else mask <= -5000


@pytest.mark.parametrize("mask", [pytest.param(mask, id=name) for name, mask in masks()])
@pytest.mark.parametrize("is_fused", [True, False])
def test_masks(mask: Tensor | None, is_fused: bool) -> None:
    """Hidden keys get no attention, whatever hides them; an added bias changes the scores."""
    query, key, value = sides()
    scores = query @ key.mT / WIDTH**0.5
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask
    if is_fused:
        net = Attention(F.scaled_dot_product_attention)
        found = recorded(nn.Sequential(net), lambda: net(query, key, value, mask))
        check(found["0.scaled_dot_product_attention"], scores, hidden_by(mask))
        assert found["0.scaled_dot_product_attention"]["attention_masked"] == [float(mask is not None)] * HEADS
    else:
        net = Attention(eager)
        found = recorded(nn.Sequential(net), lambda: net(query, key, value, mask=mask))
        check(found["0.softmax"], scores, hidden_by(mask))


@pytest.mark.parametrize("options", [{"is_causal": True}, {"scale": 0.7}, {"is_causal": True, "scale": 1.0}])
def test_arguments(options: dict[str, Any]) -> None:
    """The causal mask and the scale of the call are honored."""
    query, key, value = sides()
    net = Attention(F.scaled_dot_product_attention)
    found = recorded(nn.Sequential(net), lambda: net(query, key, value, **options))
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1) if "is_causal" in options else hidden_by(None)
    check(found["0.scaled_dot_product_attention"], query @ key.mT * options.get("scale", WIDTH**-0.5), hidden)


@pytest.mark.parametrize("kind", ["soft cap", "window", "sinks"])
def test_changed_scores(kind: str) -> None:
    """Scores are read as the softmax gets them: capped, in a sliding window, or beside a sink for each head."""
    query, key, value = sides()
    near = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() & torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(-3)
    sinks = torch.randn(HEADS, 1, 1).expand(SAMPLES, HEADS, LENGTH, 1)

    def changed() -> Tensor:
        scores: Tensor = query @ key.mT / WIDTH**0.5
        if kind == "soft cap":
            return (scores / 2).tanh() * 2
        return scores.masked_fill(~near, -torch.inf) if kind == "window" else torch.cat([scores, sinks], -1)

    net = Attention(lambda *_: changed().softmax(-1)[..., :LENGTH] @ value)
    found = recorded(nn.Sequential(net), lambda: net(query, key, value))
    check(found["0.softmax"], changed(), ~near if kind == "window" else hidden_by(None))


def test_grouped_heads() -> None:
    """A key head serves the query heads of its group."""
    query, key, value = sides(key_heads=2)
    net = Attention(F.scaled_dot_product_attention)
    found = recorded(nn.Sequential(net), lambda: net(query, key, value, enable_gqa=True))
    scores = query @ key.repeat_interleave(2, 1).mT / WIDTH**0.5
    check(found["0.scaled_dot_product_attention"], scores, hidden_by(None))
    some = value[::2, :, :: math.ceil(LENGTH / 64)].square().mean((0, 2, 3)).sqrt().repeat_interleave(2)
    assert found["0.scaled_dot_product_attention"]["attention_value_rms"] == pytest.approx(some.tolist())


class Padded(nn.Module):
    """Embeds tokens with padding and attends them with one of the functions."""

    num_heads = HEADS

    def __init__(self, function: str, *, masked: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, HEADS * WIDTH, padding_idx=0)
        self.attention = nn.MultiheadAttention(HEADS * WIDTH, HEADS, batch_first=True)
        self.function, self.masked = function, masked

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        padding = tokens == 0 if self.masked else torch.zeros_like(tokens, dtype=torch.bool)
        if self.function == "module":
            found: Tensor = self.attention(x, x, x, key_padding_mask=padding)[0]
            return found
        heads = x.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
        if self.function == "fused":
            return F.scaled_dot_product_attention(heads, heads, heads, ~padding[:, None, None])
        return eager(heads, heads, heads, mask=~padding[:, None, None])


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("function", ["module", "fused", "eager"])
def test_padding(function: str, masked: bool) -> None:
    """The share of padding is that of the queries that are no padding, in the samples that are read and have some."""
    tokens = torch.randint(1, 9, (SAMPLES, LENGTH))
    lengths = [12, 20, 9, 5, 16, 3]
    for row, length in enumerate(lengths):
        tokens[row, length:] = 0
    tokens[0, 4] = 0  # no padding, as tokens follow
    net = Padded(function, masked=masked)
    heads = net.embedding(tokens).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
    scores = heads @ heads.mT / WIDTH**0.5
    if function == "module":
        query, key, _ = F.linear(net.embedding(tokens), *net.attention.parameters(recurse=False)).chunk(3, -1)
        split = [each.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for each in (query, key)]
        scores = split[0] @ split[1].mT / WIDTH**0.5
    if masked:
        scores = scores.masked_fill((tokens == 0)[:, None, None], -torch.inf)
    weights = scores.softmax(-1)
    rows = [row for row in range(LENGTH) if (LENGTH - 1 - row) % math.ceil(LENGTH / MOST_QUERIES) == 0]
    shares = [
        weights[sample, :, row, length:].sum(-1)
        for sample, length in list(enumerate(lengths))[:: math.ceil(SAMPLES / MOST_SAMPLES)]
        for row in rows
        if row < length < LENGTH
    ]
    found = recorded(nn.Sequential(net), lambda: net(tokens))
    (name,) = (each for each in found if "embedding" not in each)
    expected = torch.stack(shares).mean(0).tolist()
    assert found[name]["attention_padding"] == pytest.approx(expected, abs=1e-6)
    assert (max(expected) == 0.0) is masked


@pytest.mark.parametrize("starts", [1, 2])
def test_the_token_that_starts_each_sequence_is_no_padding(starts: int) -> None:
    """A decoder may start each sequence with the token of the padding. Two of them are padding."""
    tokens = torch.randint(1, 9, (SAMPLES, LENGTH))
    tokens[:, :starts] = 0
    net = Padded("fused", masked=False)
    found = recorded(nn.Sequential(net), lambda: net(tokens))
    (name,) = (each for each in found if "embedding" not in each)
    shares = found[name]["attention_padding"]
    assert all(math.isnan(each) for each in shares) if starts == 1 else min(shares) > 0


def test_a_token_that_is_inside_of_sequences_is_no_padding() -> None:
    """Where the token of the padding is a usual token, some sequences begin or end with it, but most have it inside."""
    tokens = torch.arange(SAMPLES * LENGTH).reshape(SAMPLES, LENGTH) % 7
    assert (tokens[:, -1] == 0).any()
    net = Padded("fused", masked=False)
    found = recorded(nn.Sequential(net), lambda: net(tokens))
    (name,) = (each for each in found if "embedding" not in each)
    assert not any(each > 0 for each in found[name]["attention_padding"])


def test_another_sequence() -> None:
    """Attention to another sequence has no distance."""
    query, key, value = sides(keys=33)
    net = Attention(F.scaled_dot_product_attention)
    found = recorded(nn.Sequential(net), lambda: net(query, key, value))["0.scaled_dot_product_attention"]
    check(found, query @ key.mT / WIDTH**0.5, hidden_by(None))
    assert all(math.isnan(each) for each in (*found["attention_distance"], *found["attention_alike"]))


def test_equal_projections() -> None:
    """Queries and keys that are equal at each position have a cosine of 1; others have not."""
    query, key, value = sides()
    key = torch.cat([query[:, :1], key[:, 1:]], 1)
    net = Attention(F.scaled_dot_product_attention)
    found = recorded(nn.Sequential(net), lambda: net(query, key, value))["0.scaled_dot_product_attention"]
    assert found["attention_alike"][0] == pytest.approx(1.0)
    assert max(found["attention_alike"][1:]) < 0.9


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("masked", ["", "causal", "padding", "both", "of each head", "added"])
def test_module_of_torch(need_weights: bool, batch_first: bool, masked: str) -> None:
    """``nn.MultiheadAttention`` is read from its arguments, with its own meaning of masks."""
    torch.manual_seed(0)
    net = nn.MultiheadAttention(16, HEADS, batch_first=batch_first)
    x = torch.randn(SAMPLES, LENGTH, 16) * 3
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    padding = torch.arange(LENGTH) >= torch.tensor([20, 9, 3, 1, 12, 5])[:, None]
    each = torch.rand(SAMPLES * HEADS, LENGTH, LENGTH) > 0.6
    masks = {"causal": causal, "both": causal, "of each head": each, "added": torch.where(causal, -torch.inf, 0.5)}
    options: dict[str, Any] = {"attn_mask": masks[masked]} if masked in masks else {}
    options |= {"key_padding_mask": padding} if masked in ("padding", "both") else {}
    given = x if batch_first else x.transpose(0, 1)
    found = recorded(nn.Sequential(net), lambda: net(given, given, given, need_weights=need_weights, **options))
    projected = F.linear(x, net.in_proj_weight, net.in_proj_bias).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    scores = projected[0] @ projected[1].mT / 2
    hidden = torch.zeros((), dtype=torch.bool)
    if masked == "of each head":
        hidden = each.unflatten(0, (SAMPLES, HEADS))
    elif masked in masks:
        hidden = causal
    if masked == "added":
        scores = scores + 0.5
    if "key_padding_mask" in options:
        hidden = hidden | padding[:, None, None]
    (name,) = found
    assert name == "0.multi_head_attention_forward"
    check(found[name], scores, hidden)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(("learned", "zeros"), [(True, False), (False, True), (True, True)])
def test_further_keys_of_the_module_of_torch(learned: bool, zeros: bool, masked: bool) -> None:
    """``add_bias_kv`` and ``add_zero_attn`` add keys that no mask hides; keys may have a size of their own."""
    torch.manual_seed(0)
    net = nn.MultiheadAttention(16, HEADS, batch_first=True, add_bias_kv=learned, add_zero_attn=zeros, kdim=12, vdim=10)
    query, key, value = (torch.randn(SAMPLES, size, width) for size, width in ((LENGTH, 16), (9, 12), (9, 10)))
    hidden = torch.rand(LENGTH, 9) > 0.6 if masked else torch.zeros(LENGTH, 9, dtype=torch.bool)
    padding = torch.arange(9) >= torch.tensor([9, 9, 3, 1, 9, 5])[:, None]
    masks = {"attn_mask": hidden, "key_padding_mask": padding} if masked else {}
    (found,) = recorded(nn.Sequential(net), lambda: net(query, key, value, **masks)).values()
    weights: list[Any] = [net.q_proj_weight, net.k_proj_weight]
    made = [F.linear(*each) for each in zip((query, key), weights, net.in_proj_bias.chunk(3), strict=False)]
    if net.bias_k is not None:
        made[1] = torch.cat([made[1], net.bias_k.expand(SAMPLES, 1, 16)], 1)
    made[1] = F.pad(made[1], (0, 0, 0, int(zeros)))
    queries, keys = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in made)
    hidden = hidden | padding[:, None, None] if masked else hidden
    check(found, queries @ keys.mT / 2, F.pad(hidden, (0, keys.shape[2] - 9)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    """Scores are computed in float32 from the queries and keys that the function gets."""
    query, key, value = (each.to(dtype) for each in sides(grad=False))
    net = Attention(F.scaled_dot_product_attention)
    with torch.autocast("cpu", torch.bfloat16) if dtype is torch.bfloat16 else nullcontext():
        found = recorded(nn.Sequential(net), lambda: net(query, key, value))
    check(found["0.scaled_dot_product_attention"], query.float() @ key.float().mT / WIDTH**0.5, hidden_by(None))


def test_samples_and_heads_in_one_dimension() -> None:
    """Three dimensions are divided by the number of heads of the module; without one, there is one head."""
    query, key, value = sides()
    flat = [each.flatten(0, 1) for each in (query, key, value)]
    net = Attention(F.scaled_dot_product_attention)
    run = lambda: net(*flat)  # noqa: E731 - called twice
    one = recorded(nn.Sequential(net), run)["0.scaled_dot_product_attention"]
    assert len(one["attention_entropy"]) == 1
    net.num_heads = HEADS
    check(
        recorded(nn.Sequential(net), run)["0.scaled_dot_product_attention"],
        query @ key.mT / WIDTH**0.5,
        hidden_by(None),
    )


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_count_once(reentrant: bool) -> None:
    """Calls that a checkpoint repeats in the backward pass are not counted again."""
    query, key, value = sides()
    net = nn.Sequential(Attention(F.scaled_dot_product_attention))
    blocks: list[Tensor] = []
    tap = FunctionOutputTap(ChosenFunctions(net, {*FUNCTIONS, *SCORE_KINDS}), lambda site, tensor: None, strict=True)
    tap.receive_scores = lambda site, largest, block: blocks.append(block)
    with tap:
        found: Tensor = checkpoint(net[0], query, key, value, use_reentrant=reentrant)
        found.sum().backward()
    assert len(blocks) == 1


def test_other_functions_are_no_attention() -> None:
    """A softmax over classes, over another dimension, or over a product with a weight is no attention."""
    query, key, value = sides()
    weight = torch.randn(WIDTH, 7, requires_grad=True)

    def other(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        classes = torch.softmax(query @ weight, -1).sum()
        slots = torch.softmax(query @ key.mT, 2).sum()
        features = torch.softmax(value, -1).sum()
        return classes + slots + features

    net = Attention(other)
    assert recorded(nn.Sequential(net), lambda: net(query, key, value)) == {}


def test_nothing_changes() -> None:
    """The result, the gradients and the random numbers are the same to the bit."""

    def step(*, taps: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.TransformerEncoderLayer(16, 4, 32, dropout=0.3, batch_first=True))
        x = torch.randn(5, 9, 16, requires_grad=True)

        def run() -> None:
            torch.autograd.backward(net(x).square().sum())

        if taps:
            assert recorded(net, run)
        else:
            run()
        return [x.grad, *(each.grad for each in net.parameters()), torch.rand(3)]  # type: ignore[list-item]  # not None

    assert all(map(torch.equal, step(taps=False), step(taps=True)))
