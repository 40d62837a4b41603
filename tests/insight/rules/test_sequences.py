"""Tests of the rules about sequences: each fault, its repaired twin, and healthy designs."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_recorder.graph import capture_graph
from tests.insight.records import Examination, Values, brief, examined, parts, record
from tests.insight.rules.test_blocks import PRE, Model
from tests.insight.rules.test_operations import Function, Step, classes, examine, series, tokens


class Attention(nn.Module):
    """A language model with one layer of attention."""

    def __init__(self, attend: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding, self.head, self.attend = nn.Embedding(11, 4), nn.Linear(4, 11), attend

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.attend(self.embedding(x)))
        return output


def plain(x: Tensor) -> Tensor:
    return (x @ x.mT / 2).softmax(-1) @ x


def masked(x: Tensor) -> Tensor:
    hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    return (x @ x.mT / 2).masked_fill(hidden, -torch.inf).softmax(-1) @ x


def added(x: Tensor) -> Tensor:
    return (x @ x.mT / 2 + torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)).softmax(-1) @ x


def fused(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)


def causal(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


class Shifted(nn.Module):
    """A step that predicts the next token."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


@pytest.mark.parametrize(("attend", "findings"), [(plain, 1), (fused, 1), (masked, 0), (added, 0), (causal, 0)])
def test_attention_to_the_target(attend: Callable[[Tensor], Tensor], findings: int) -> None:
    """Attention without a mask is a finding if the targets are the inputs shifted by one position."""
    found = Examination(capture_graph(Shifted(Attention(attend)), tokens)).findings()
    assert [each.rule for each in found] == ["sees-the-target"] * findings
    assert examine(Attention(attend), lambda y, t: F.cross_entropy(y[:, 0], t), tokens, classes) == []


class Padded(nn.Module):
    """A layer of torch's attention with a padding mask."""

    def __init__(self, is_inverted: bool) -> None:
        super().__init__()
        self.is_inverted = is_inverted
        self.embedding, self.head = nn.Embedding(11, 4, padding_idx=0), nn.Linear(4, 3)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = x != 0 if self.is_inverted else x == 0
        output: Tensor = self.head(self.layer(self.embedding(x), src_key_padding_mask=mask)[:, 0])
        return output


def test_an_inverted_mask() -> None:
    """A mask that hides all tokens but the padding is a finding."""
    (found,) = examine(Padded(True), F.cross_entropy, tokens, classes)
    assert (found.rule, found.severity) == ("inverted-mask", "warning")
    assert examine(Padded(False), F.cross_entropy, tokens, classes) == []


def test_a_mask_of_numbers_that_are_no_tokens() -> None:
    """A mask that is added to scores is not 0 where it hides something, and 0 is no token of it."""

    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(11, 4, padding_idx=0), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            added = (x == 0).float() * -10000.0
            scores = self.embedding(x).sum(-1).masked_fill(added != 0, -torch.inf)
            output: Tensor = self.head((scores.softmax(-1)[..., None] * self.embedding(x)).sum(1))
            return output

    assert examine(Windows(), F.cross_entropy, tokens, classes) == []


class Causal(nn.Module):
    """Attention whose causal mask is given by a function of a matrix of ones."""

    def __init__(self, mask: Callable[[Tensor], Tensor], shift: bool = True) -> None:
        super().__init__()
        self.embedding, self.head, self.mask, self.shift = nn.Embedding(11, 8), nn.Linear(8, 11), mask, shift

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids[:, :-1] if self.shift else ids)
        scores = (x @ x.transpose(1, 2) / 8**0.5).masked_fill(self.mask(torch.ones(x.shape[1], x.shape[1]) > 0), -1e9)
        output: Tensor = self.head(scores.softmax(-1) @ x).transpose(1, 2)
        return output


@pytest.mark.parametrize(
    ("mask", "is_wrong"),
    [
        (lambda ones: ones.tril(-1), True),
        (lambda ones: ~ones.triu(), True),
        (lambda ones: ones.triu(1), False),
        (lambda ones: ~ones.tril(), False),
        (lambda ones: ones.tril() == 0, False),
    ],
)
def test_a_causal_mask_that_is_inverted(mask: Callable[[Tensor], Tensor], is_wrong: bool) -> None:
    """A mask that leaves out the earlier positions is a finding, and one that leaves out the later ones is not."""
    found = examine(Causal(mask), lambda y, ids: F.cross_entropy(y, ids[:, 1:]), tokens, tokens)
    assert [each.rule for each in found] == ["inverted-mask"] * is_wrong
    assert all("each position sees the tokens after it" in each.verdict for each in found)


class Tokens(nn.Module):
    """Two layers of attention between tokens and one output for each."""

    def __init__(self, positions: str = "", mask: str = "", scores: Function | None = None) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 5), nn.Linear(5, 11)
        self.positions, self.rows = nn.Embedding(6, 5), nn.Parameter(torch.randn(6, 5))
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(5, 5) for _ in range(3)) for _ in range(2))
        self.kind, self.mask, self.scores = positions, mask, scores or (lambda x: x.softmax(-1))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.embedding(x)
        if self.kind == "embedding":
            h = h + self.positions(torch.arange(6))
        if self.kind == "of the sample":
            h = h + self.positions(torch.arange(len(x)) % 6)[:, None]
        if self.kind == "parameter":
            h = h + self.rows
        if self.kind == "convolution":
            h = h + F.conv1d(h.mT, torch.ones(5, 1, 3), padding=1, groups=5).mT
        for layer in self.layers:
            q, k, v = (each(h) for each in layer)  # type: ignore[attr-defined]  # a ModuleList
            scores = q @ k.mT / 5**0.5
            if self.kind == "bias":
                scores = scores - (torch.arange(6.0)[:, None] - torch.arange(6)).abs()
            if self.mask == "causal":
                scores = scores.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -1e9)
            if self.mask == "padding":
                scores = scores.masked_fill((x == 0)[:, None], -1e9)
            h = h + self.scores(scores) @ v
        out: Tensor = self.head(h)
        return out


def loss_of_tokens(y: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(y.flatten(0, 1), target.flatten())


@pytest.mark.parametrize(
    ("positions", "mask", "severities"),
    [
        ("", "", ["warning"]),
        ("", "padding", ["warning"]),
        ("", "causal", ["note"]),
        ("of the sample", "", ["warning"]),
        *((kind, "", []) for kind in ("embedding", "parameter", "convolution", "bias")),
    ],
)
def test_no_positions(positions: str, mask: str, severities: list[str]) -> None:
    """Attention between tokens whose order nothing tells is named; a causal mask tells it, and is a note."""
    found = [
        each for each in examine(Tokens(positions, mask), loss_of_tokens, tokens, tokens) if each.rule == "no-positions"
    ]
    assert [each.severity for each in found] == severities
    assert all(each.module == "net.embedding" for each in found)


class Numbered(nn.Module):
    """Adds an embedding of positions to that of tokens, or multiplies it with a rotation."""

    def __init__(self, positions: Function, *, is_rotary: bool = False) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(11, 5), nn.Linear(5, 11)
        self.rows = None if is_rotary else nn.Embedding(11, 5)
        self.positions = positions

    def forward(self, x: Tensor) -> Tensor:
        numbers, h = self.positions(x), self.tokens(x)
        if self.rows is None:
            h = h * (numbers.float()[..., None] * torch.arange(1.0, 6)).cos()
        else:
            rows = self.rows(numbers)
            h = h + (rows.mean(-2) if rows.dim() > 2 and len(rows) != len(x) else rows)
        out: Tensor = self.head(h)
        return out


def counted(x: Tensor) -> Tensor:
    """Return the positions of tokens."""
    return torch.arange(x.shape[-1])


CUT = "encodes positions of at most 3, where a sequence has 6: all from 3 on are encoded alike"
AT_RANDOM = "encodes 6 positions in an order that is drawn at random in each step"


@pytest.mark.parametrize("is_rotary", [False, True])
@pytest.mark.parametrize(
    ("positions", "verdict"),
    [
        (lambda x: counted(x).clamp(max=3), CUT),
        (lambda x: torch.clip(counted(x).expand(x.shape), 0, 3), CUT),
        (lambda x: torch.randperm(6), AT_RANDOM),
        (lambda x: torch.randperm(6)[None].expand(x.shape), AT_RANDOM),
        (counted, ""),
        (lambda x: counted(x).clamp(max=5), ""),
        (lambda x: (counted(x) // 2).clamp(max=1), ""),
        (lambda x: x.clamp(max=3), ""),
        (lambda x: torch.randperm(11).sort().values[:6], ""),
    ],
)
def test_positions_that_are_cut_off_or_in_random_order(positions: Function, verdict: str, is_rotary: bool) -> None:
    """Positions that the step counts and cuts off are named, and those that it draws; parts and tokens are not."""
    found = examine(Numbered(positions, is_rotary=is_rotary), loss_of_tokens, tokens, tokens)
    named = "net" if is_rotary else "net.rows"
    assert [each.verdict for each in found if each.rule == "wrong-positions"] == [f"{named} {verdict}"] * bool(verdict)


def test_distances_may_be_cut_off() -> None:
    """An embedding of distances, which are differences, has one row for all large ones."""
    net = Numbered(lambda x: (counted(x)[:, None] - counted(x)).clamp(-3, 3) + 3)
    assert "wrong-positions" not in [each.rule for each in examine(net, loss_of_tokens, tokens, tokens)]


def test_tokens_may_be_permuted_with_their_positions() -> None:
    """A permutation that also chooses the tokens leaves each token its position."""

    class Permuted(Numbered):
        def forward(self, x: Tensor) -> Tensor:
            order = torch.randperm(6)
            self.positions = lambda x: order
            return super().forward(x[:, order])

    found = examine(Permuted(counted), loss_of_tokens, tokens, tokens)
    assert "wrong-positions" not in [each.rule for each in found]


class Times(nn.Embedding):
    """An embedding whose rows are multiplied with a number."""

    def __init__(self, factor: float) -> None:
        super().__init__(11, 5)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


class Scaled(Numbered):
    """Multiplies an embedding of tokens, and perhaps that of positions, inside or outside of the embedding."""

    def __init__(self, factor: float, of_positions: float = 1.0, *, is_inside: bool = False) -> None:
        super().__init__(counted)
        self.tokens = Times(factor if is_inside else 1.0)
        self.factors = (1.0 if is_inside else factor), of_positions

    def forward(self, x: Tensor) -> Tensor:
        h = self.factors[0] * self.tokens(x) + self.factors[1] * self.get_submodule("rows")(counted(x))
        out: Tensor = self.head(h)
        return out


def with_factor(net: Scaled, size: float = 1.0) -> Examination:
    """Return a run in whose records the rows of tokens are ``size`` times as large as those of positions."""
    graph = capture_graph(Step(net, loss_of_tokens), tokens, tokens)
    rows: dict[str, Values] = {"net.tokens": {"rms": size * cast("Times", net.tokens).factor}, "net.rows": {"rms": 1.0}}
    return examined(rows, graph=graph)


@pytest.mark.parametrize(
    ("net", "size", "times"),
    [
        (Scaled(50), 1.0, 50.0),
        (Scaled(50, is_inside=True), 1.0, 50.0),
        (Scaled(50), 0.1, None),
        (Scaled(50, 50), 1.0, None),
        (Scaled(5**0.5), 20.0, None),
    ],
)
def test_an_embedding_that_drowns_the_positions(net: Scaled, size: float, times: float | None) -> None:
    """A large factor of the tokens alone is named if the records have it, too; the root of the features is usual."""
    found = [each for each in with_factor(net, size).findings() if each.rule == "embedding-scale"]
    assert [(each.module, each.numbers) for each in found] == (
        [] if times is None else [("net.tokens", {"factor": 50.0, "times": times})]
    )


class Chosen(nn.Module):
    """Compares tokens with rows that are drawn at random, or adds a drawn row to all tokens of a sample."""

    def __init__(self, *, is_of_sample: bool) -> None:
        super().__init__()
        self.tokens, self.rows, self.is_of_sample = nn.Embedding(11, 11), nn.Embedding(11, 11), is_of_sample

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.tokens(x)
        rows: Tensor = self.rows(torch.randperm(8 if self.is_of_sample else 6))
        return h + rows[:, None] if self.is_of_sample else h * rows


@pytest.mark.parametrize("is_of_sample", [False, True])
def test_rows_that_are_drawn_are_no_positions(is_of_sample: bool) -> None:
    """Negative samples and the steps of a diffusion may be a permutation."""
    found = examine(Chosen(is_of_sample=is_of_sample), loss_of_tokens, tokens, tokens)
    assert "wrong-positions" not in [each.rule for each in found]


def test_a_set_of_tokens_needs_no_positions() -> None:
    """One target for each sample may not depend on the order."""
    found = examine(Tokens(), lambda y, target: F.cross_entropy(y.mean(1), target), tokens, tokens[:, 0])
    assert "no-positions" not in [each.rule for each in found]


@pytest.mark.parametrize(
    ("scores", "mask", "is_wrong"),
    [
        (lambda x: x, "", True),
        (lambda x: x.clamp(-10, 10), "", True),
        (lambda x: x, "causal", True),
        (lambda x: x.masked_fill(x < -1e8, 0), "causal", True),
        (lambda x: x.softmax(-1), "causal", False),
        (lambda x: x.relu() ** 2, "", False),
        (lambda x: x / 6, "", False),
        (lambda x: x * torch.full((6, 6), 0.9).tril(), "", False),
    ],
)
def test_attention_without_a_softmax(scores: Function, mask: str, is_wrong: bool) -> None:
    """Scores that go to the values as they are, but for scale and mask, are named; other functions of them are not."""
    found = examine(Tokens("embedding", mask, scores), loss_of_tokens, tokens, tokens)
    assert [each.rule for each in found] == ["no-softmax"] * is_wrong


class Reader(nn.Module):
    """A recurrent network that reads the state after the last token.

    Args:
        take: A function from the outputs and the states to what the last layer gets.
    """

    def __init__(self, take: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.take = take
        self.tokens = nn.Embedding(11, 4, padding_idx=0)
        self.recurrence, self.head = nn.GRU(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.take(*self.recurrence(self.tokens(x))))
        return output


def padded(take: Callable[[Tensor, Tensor], Tensor], *, zeros: float = 0.6, spread: float = 0.01) -> Examination:
    """Return the examination of a run on padded sequences."""
    graph = capture_graph(Step(Reader(take), F.cross_entropy), tokens, classes)
    layers: dict[str, Values] = {
        "net.tokens": {"zero_fraction": zeros},
        "net.recurrence": {},
        "net.head": {"batch_spread": spread},
    }
    return examined(layers, graph=graph)


@pytest.mark.parametrize(
    "take", [lambda out, last: out[:, -1], lambda out, last: out[:, -1, :], lambda out, last: last[-1]]
)
def test_a_state_after_the_padding(take: Callable[[Tensor, Tensor], Tensor]) -> None:
    """The last state of a padded sequence is a finding if it is the same for all samples."""
    (found,) = padded(take).findings()
    assert brief([found]) == [("warning", "padding-is-read", "net.head")]
    assert "60% of the tokens that net.recurrence reads are padding" in found.verdict


def test_states_of_padded_sequences_that_are_fine() -> None:
    """States that differ between samples, chosen positions and little padding are fine."""

    def last(out: Tensor, states: Tensor) -> Tensor:
        return out[:, -1]

    assert padded(last, spread=0.5).findings() == []
    assert padded(last, zeros=0.1).findings() == []
    assert padded(lambda out, states: out[torch.arange(8), 2]).findings() == []
    assert padded(lambda out, states: out.mean(1)).findings() == []


order = torch.rand(8)


class Stepwise(nn.Module):
    """A recurrent module that is called for each step of a sequence."""

    def __init__(self, kind: Callable[..., nn.Module], carries: bool, *, feeds: bool = False) -> None:
        super().__init__()
        self.rnn, self.head, self.carries, self.feeds = kind(5, 5), nn.Linear(5, 3), carries, feeds
        self.is_cell = "Cell" in type(self.rnn).__name__

    def forward(self, x: Tensor) -> Tensor:
        state = out = None
        for place in range(x.shape[1]):
            given = x[:, place] if self.is_cell else x[:, place : place + 1].transpose(0, 1)
            if self.feeds and out is not None:
                given = given + out
            result = self.rnn(given, state) if self.carries else self.rnn(given)
            out, state = (result[0], result[1]) if isinstance(result, tuple) and not self.is_cell else (result, result)
            out = out[0] if isinstance(out, tuple) else out
        output: Tensor = self.head(out if self.is_cell else out[0])  # type: ignore[index]  # set by the loop
        return output


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell])
def test_a_state_that_is_not_passed_on(kind: Callable[..., nn.Module]) -> None:
    """Calls for one step of a sequence that all begin with zeros are a finding, unless they depend on each other."""
    rule = "state-not-carried"
    found = [each for each in examine(Stepwise(kind, False), F.cross_entropy, series, classes) if each.rule == rule]
    assert brief(found) == [("warning", rule, "net.rnn")]
    assert "is called 6 times in a step" in found[0].verdict
    for net in (Stepwise(kind, True), Stepwise(kind, False, feeds=True)):
        assert rule not in {each.rule for each in examine(net, F.cross_entropy, series, classes)}


class Apart(nn.Module):
    """A recurrent module that is called for each part of a tensor, with a state of zeros."""

    def __init__(self, rnn: nn.Module, call: Callable[[nn.Module, Tensor], list[Tensor]], *last: nn.Module) -> None:
        super().__init__()
        self.rnn, self.call, self.last, self.head = rnn, call, nn.ModuleList(last), nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        found = self.call(self.rnn, x)
        for layer in self.last:  # of a tree, or a second recurrence
            if isinstance(layer, nn.GRU):
                found = [layer(torch.stack(found, 1))[1][0]]
            else:
                pairs = zip(found[::2], found[1::2], strict=True)
                found = [torch.tanh(layer(torch.cat(pair, 1))) for pair in pairs]
        output: Tensor = self.head(torch.cat(found) if len(found) == len(x) else torch.cat(found, 1))
        return output


def by_cell(rnn: nn.Module, x: Tensor) -> list[Tensor]:
    return [rnn(x[:, place]) for place in range(4)]


@pytest.mark.parametrize(
    ("net", "is_wrong"),
    [
        (Apart(nn.GRU(5, 5, batch_first=True), lambda rnn, x: [rnn(x[i : i + 1])[1][0] for i in range(len(x))]), False),
        (Apart(nn.GRU(5, 5), lambda rnn, x: [rnn(each[:, None])[1][0] for each in x]), False),
        (Apart(nn.GRUCell(5, 5), by_cell), True),
        (Apart(nn.GRUCell(5, 5), by_cell, nn.Linear(10, 5)), False),
        (Apart(nn.GRUCell(5, 5), by_cell, nn.GRU(5, 5, batch_first=True)), False),
    ],
)
def test_calls_that_begin_with_zeros_for_a_reason(net: nn.Module, is_wrong: bool) -> None:
    """Whole sequences one after the other, the leaves of a tree, and steps that a second recurrence reads are fine."""
    net(series)
    found = [each for each in examine(net, F.cross_entropy, series, classes) if each.rule == "state-not-carried"]
    assert brief(found) == [("warning", "state-not-carried", "net.rnn")] * is_wrong


def by_norm(x: Tensor) -> Tensor:
    return x.div(x.norm(dim=-1, keepdim=True))


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize(
    ("change", "is_wrong"), [(lambda x: x, True), (lambda x: F.normalize(x, dim=-1), False), (by_norm, False)]
)
def test_a_scale_of_cosines(change: Callable[[Tensor], Tensor], is_wrong: bool, is_fused: bool) -> None:
    """Cosines of queries and keys, which are at most 1, have a larger scale than 1/√features."""

    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            query, key = change(x), change(x + 1)
            if is_fused:
                return F.scaled_dot_product_attention(query, key, x, scale=10.0)
            return (query @ key.transpose(-2, -1) * 10).softmax(-1) @ x

    graph = capture_graph(nn.Sequential(Attention()), torch.randn(2, 2, 5, 16))
    name = "0.scaled_dot_product_attention" if is_fused else "0.softmax"
    examination = parts({name: [{"logit_std": 4.0}]}, graph=graph)
    for row in range(8):
        examination.add(record("activations", row * 10, {("0", "out"): {}}, recorder="layers"))
    assert [each.rule for each in examination.findings()].count("attention-scale") == is_wrong


class Classifier(Model):
    """A stack of causal attention whose output is read by a function."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__(blocks=2, **PRE)
        self.read = read

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.read(x)), tokens[:, 0])


def read_by(
    read: Callable[[Tensor], Tensor], *, future: float | list[float] = 0.0, length: int = 6, records: int = 8
) -> Examination:
    """Return the examination of a classifier; ``future`` is the share of later keys in its attention."""
    tokens = torch.arange(8 * length).reshape(8, length) % 11
    graph = capture_graph(Classifier(read), tokens)
    names = [f"blocks.{place}.attn.scaled_dot_product_attention" for place in range(2)]
    found = parts({name: [{"future": future}] for name in names}, graph=graph, records=records)
    for row in range(records):
        found.add(record("activations", row * 10, {("head", "out"): {}}, recorder="layers"))
    return found


def first_token(x: Tensor) -> Tensor:
    return x[:, 0]


@pytest.mark.parametrize(
    ("read", "future", "is_wrong"),
    [
        (first_token, 0.0, True),
        (first_token, 0.4, False),
        (lambda x: x[:, -1], 0.0, False),
        (lambda x: x.mean(1), 0.0, False),
        (lambda x: x.flip(1)[:, 0], 0.0, False),
        (lambda x: x[:, 0] + x[:, -1], 0.0, False),
    ],
)
def test_the_first_token_behind_causal_attention(
    read: Callable[[Tensor], Tensor], future: float, is_wrong: bool
) -> None:
    """The output at the first position depends on one token, unless the attention has no causal mask."""
    found = [each for each in read_by(read, future=future).findings() if each.rule == "first-token-is-read"]
    assert len(found) == is_wrong
    if found:
        assert "reads the output at the first of 6 positions alone" in found[0].verdict


class Copies(nn.Module):
    """A decoder with attention to the states of an encoder, or to its own."""

    def __init__(self, *, is_apart: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 4), nn.Linear(8, 11)
        self.decoder = nn.LSTM(4, 4, batch_first=True)
        self.encoder = nn.LSTM(4, 4, batch_first=True) if is_apart else self.decoder

    def forward(self, x: Tensor) -> Tensor:
        states, last = self.encoder(self.embedding(x))
        own = self.decoder(self.embedding(F.pad(x[:, :-1], (1, 0))), last)[0]
        seen = (own @ states.mT).softmax(-1) @ states
        return F.cross_entropy(self.head(torch.cat([own, seen], -1)).flatten(0, 1), x.flatten())


@pytest.mark.parametrize("is_apart", [False, True])
def test_a_decoder_may_attend_all_states_of_an_encoder(is_apart: bool) -> None:
    """If a sequence is copied, the next tokens are the target, and the encoder has seen them."""
    graph = capture_graph(Copies(is_apart=is_apart), tokens)
    examination = parts({"softmax": [{"future": 0.5}]}, records=8, graph=graph)
    for row in range(8):
        sites = {("cross_entropy", "in.target.next"): {"mean": 1.0}}
        examination.add(record("activations", row * 10, sites, recorder="losses"))
        examination.add(record("activations", row * 10, {("head", "out"): {}}, recorder="layers"))
    found = [each.rule for each in examination.findings() if each.rule == "attends-the-target"]
    assert found == ([] if is_apart else ["attends-the-target"])
