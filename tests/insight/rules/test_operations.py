"""Tests of the rules about the operations of the recorded step: each fault, its repaired twin, and healthy designs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_recorder.graph import GraphCapture, capture_graph
from lightning_recorder.insight import RULES, Finding
from tests.insight.records import Examination, Values, brief, examined, run

FILES = ("losses", "loss_terms", "own_targets", "operations")
NAMES = {rule.name for rule in RULES if rule.function.__module__.rpartition(".")[2] in FILES}
TORCH_WARNS = pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")
Loss = Callable[[Tensor, Tensor], Tensor]
Function = Callable[[Tensor], Tensor]

rows, classes = torch.randn(8, 5), torch.arange(8) % 3
series = torch.randn(8, 6, 5)
tokens = torch.arange(48).view(8, 6) % 11


class Step(nn.Module):
    """A step of training: a network and its loss."""

    def __init__(self, net: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.net(x), target)


class Shaped(nn.Module):
    """A module that applies a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def examine(net: nn.Module, loss: Loss, x: Tensor, target: Tensor) -> list[Finding]:
    """Return the findings about the operations of one step."""
    found = Examination(capture_graph(Step(net, loss), x, target)).findings()
    return [each for each in found if each.rule in NAMES]


def trained_step(model: nn.Module, *inputs: Tensor) -> list[Finding]:
    """Return the findings about the operations of a model that returns its loss, with the backward pass."""
    with GraphCapture(model, inputs) as capture:
        model(*inputs).backward()
    names = NAMES | {"unknown-noise", "largest-value", "seen-targets", "mean-before-weights"}
    return [each for each in Examination(capture.graph()).findings() if each.rule in names]


def mlp(out: int, *last: nn.Module) -> nn.Sequential:
    """Return a network with one hidden layer."""
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, out), *last)


def test_layers_without_an_activation() -> None:
    """Three linear layers in a row are a finding, with dropout between them, too."""
    net = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 7), nn.Dropout(0.1), nn.Linear(7, 3))
    (found,) = examine(net, F.cross_entropy, rows, classes)
    assert brief([found]) == [("warning", "no-activation", "net.1")]
    assert "net.1 directly follows net.0 (weights [7, 5] and [7, 7]); 2 pairs" in found.verdict


class Residual(nn.Module):
    """Two linear layers, of which the inner one has another reader."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        output: Tensor = h + self.outer(h)
        return output


class Mixer(nn.Module):
    """Two linear layers along different dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.channels, self.places = nn.Linear(5, 5), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.places(self.channels(x).mT).mT.mean(1)
        return output


def frozen(layer: nn.Module) -> nn.Module:
    """Return the layer without gradients."""
    return layer.requires_grad_(False)


@pytest.mark.parametrize(
    ("net", "x"),
    [
        (mlp(3), rows),
        (nn.Sequential(nn.Linear(5, 2), nn.Linear(2, 5)), rows),  # a low rank
        (nn.Sequential(frozen(nn.Linear(5, 9)), nn.Linear(9, 3)), rows),  # a fixed transform
        (nn.Sequential(*[nn.Linear(5, 5)] * 3), rows),  # a recurrence
        (Residual(), rows),
        (Mixer(), series),
    ],
)
def test_layers_that_follow_each_other_for_a_reason(net: nn.Module, x: Tensor) -> None:
    """Low ranks, fixed and repeated layers, residual connections and exchanged dimensions are fine."""
    assert examine(net, F.cross_entropy, x, classes) == []


def test_one_pair_in_a_network_with_activations_is_a_note() -> None:
    """A single pair of layers without an activation between them does little harm."""
    net = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 7), nn.ReLU(), nn.Linear(7, 7), nn.Linear(7, 3))
    assert brief(examine(net, F.cross_entropy, rows, classes)) == [("note", "no-activation", "net.5")]


class Rows(nn.Module):
    """A recurrent layer and the last state of each sequence."""

    def __init__(self, kind: Callable[..., nn.Module], batch_first: bool) -> None:
        super().__init__()
        self.rnn, self.head = kind(5, 4, batch_first=batch_first), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.rnn(x)[0][:, -1])
        return output


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrence_over_the_batch(kind: Callable[..., nn.Module]) -> None:
    """A recurrence over the samples is a finding if the step has one target for each sample."""
    (found,) = examine(Rows(kind, False), F.cross_entropy, series, classes)
    assert brief([found]) == [("warning", "along-batch", "net.rnn")]
    assert "runs over dimension 0 of [8, 6, 5], which has the 8 samples" in found.verdict
    assert examine(Rows(kind, True), F.cross_entropy, series, classes) == []


class Encoded(nn.Module):
    """A layer of attention and the mean over the positions."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.mix, self.head = nn.TransformerEncoderLayer(4, 2, 8, batch_first=batch_first), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.mix(x).mean(1))
        return output


@pytest.mark.parametrize("positions", [6, 1, 8, 16])
def test_attention_over_the_batch(positions: int) -> None:
    """Attention between samples is a finding if the step has one target for each sample.

    A single sequence of samples, sequences as long as the batch and parts of samples are left out.
    """
    found = examine(Encoded(False), F.cross_entropy, torch.randn(8, positions, 4), classes)
    assert brief(found) == [("warning", "along-batch", "net.mix.self_attn")] * (positions == 6)
    assert all("runs over dimension 0 of [8, 6, 4], which has the 8 samples" in each.verdict for each in found)
    assert examine(Encoded(True), F.cross_entropy, torch.randn(8, positions, 4), classes) == []


class TimeFirst(nn.Module):
    """A language model of sequences that begin with the time, as in the tutorials of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.rnn, self.head = nn.Embedding(11, 4), nn.LSTM(4, 4), nn.Linear(4, 11)
        self.register_buffer("places", torch.randn(32, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.rnn(self.embedding(x) + self.get_buffer("places")[: len(x)])[0]).flatten(0, 1)
        return output


def test_sequences_that_begin_with_the_time() -> None:
    """Recurrence and positions along the first dimension are right if each step in time has a target."""
    assert examine(TimeFirst(), F.cross_entropy, tokens, tokens.flatten()) == []
    assert examine(TimeFirst(), lambda y, target: F.cross_entropy(y, target.flatten()), tokens, tokens) == []


@pytest.mark.parametrize(("dim", "findings"), [(0, 1), (1, 0), (-1, 0), (-2, 1)])
def test_a_softmax_over_the_samples(dim: int, findings: int) -> None:
    """A softmax of predictions over the samples is a finding."""
    found = examine(mlp(3, nn.LogSoftmax(dim)), F.nll_loss, rows, classes)
    assert brief(found) == [("warning", "along-batch", "net.3")] * findings


def test_similarities_of_pairs_are_compared_along_both_dimensions() -> None:
    """The square logits of a contrastive loss may be normalized over the samples."""

    def contrast(y: Tensor, _: Tensor) -> Tensor:
        logits, target = y @ y.mT, torch.arange(8)
        return F.nll_loss(logits.log_softmax(0), target) + F.nll_loss(logits.log_softmax(1), target)

    assert examine(mlp(3), contrast, rows, classes) == []


class Places(nn.Module):
    """Tokens with positions that are added along a dimension."""

    def __init__(self, along_batch: bool) -> None:
        super().__init__()
        self.along_batch = along_batch
        self.embedding, self.head = nn.Embedding(11, 4), nn.Linear(4, 3)
        self.places = nn.Parameter(torch.randn(32, 4))

    def forward(self, x: Tensor) -> Tensor:
        places = self.places[: len(x), None] if self.along_batch else self.places[None, : x.shape[1]]
        output: Tensor = self.head((self.embedding(x) + places).mean(1))
        return output


def test_positions_along_the_batch() -> None:
    """Positions that differ between samples and not between tokens are a finding."""
    (found,) = examine(Places(True), F.cross_entropy, tokens, classes)
    assert brief([found]) == [("warning", "along-batch", "net")]
    assert "adds [8, 1, 4] of the model to [8, 6, 4]" in found.verdict
    assert examine(Places(False), F.cross_entropy, tokens, classes) == []


def test_positions_of_a_sequence_as_long_as_the_batch() -> None:
    """If there are as many positions as samples, the first dimension may have the positions."""
    assert examine(Places(True), F.cross_entropy, torch.arange(64).view(8, 8) % 11, classes) == []


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


@pytest.mark.parametrize(
    ("function", "is_wrong"),
    [
        (lambda x: x.mean(0)[:1].expand(8, 5), True),
        (lambda x: x.mean(1), False),
        (lambda x: (x - x.mean(0)).mean(1), False),  # a normalization along the batch
    ],
)
def test_a_mean_over_the_samples(function: Callable[[Tensor], Tensor], is_wrong: bool) -> None:
    """A mean over the samples that takes the place of each sample is a finding."""
    net = nn.Sequential(Shaped(function), nn.Linear(5, 3))
    found = examine(net, F.cross_entropy, series, classes)
    assert [each.rule for each in found] == ["along-batch"] * is_wrong


def whole(x: Tensor) -> Tensor:
    return (x - x.mean()) / (x.std() + 1e-5)


def of_each(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / x.var(-1, keepdim=True).sqrt()


@pytest.mark.parametrize("normalize", [whole, lambda x: F.normalize(x, dim=0)])
def test_a_normalization_before_the_model_runs_again(normalize: Function) -> None:
    """Advantages are normalized over the batch between two calls of the model, as in PPO, and no layer takes them."""
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            advantages = normalize(self.net(x)[:, :1])
            return self.net(x), advantages

    def loss(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        y, advantages = outputs
        return (F.cross_entropy(y, target, reduction="none") * advantages.detach()[:, 0]).mean()

    assert examine(Repeated(), loss, rows, classes) == []  # type: ignore[arg-type]  # a step with two outputs


@pytest.mark.parametrize(("first", "second", "is_wrong"), [(None, whole, True), (whole, of_each, False)])
def test_a_normalization_over_the_samples(first: Function | None, second: Function, is_wrong: bool) -> None:
    """A normalization of all values between two layers is a finding; one of the batch, or of each sample, is not."""
    net = nn.Sequential(Shaped(first or nn.Identity()), nn.Linear(5, 7), Shaped(second), nn.Linear(7, 3))
    found = examine(net, lambda y, target: F.cross_entropy(whole(y) if first else y, target), rows, classes)
    assert [each.rule for each in found] == ["along-batch"] * is_wrong


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


@pytest.mark.parametrize(
    ("function", "is_wrong"),
    [
        (lambda x: x.view(6, 8, 5), True),
        (lambda x: x.reshape(8, 5, 6), True),
        (lambda x: x.transpose(0, 1), False),
        (lambda x: x.view(8, 6, 1, 5), False),
        (lambda x: x.view(8, 30), False),
        (lambda x: x.view(8, 5, 6)[:, 1:], True),
        (lambda x: x[:, :-2].reshape(8, 5, 4), True),
        # Scores of relative positions are shifted by a column that is added, or by a row that is cut off.
        (lambda x: F.pad(x, (0, 0, 0, 1)).view(8, 5, 7)[..., :-1], False),
        (lambda x: F.pad(x, (2, 0)).view(8, 7, 6)[:, 1:].reshape(8, 6, 6), False),
        (lambda x: x.reshape(8, 5, 6)[:, 1:].reshape(8, 6, 4), False),
    ],
)
def test_a_view_that_exchanges_dimensions(function: Callable[[Tensor], Tensor], is_wrong: bool) -> None:
    """A view to the same sizes in another order mixes them; a transpose and a view that joins sizes do not."""
    found = examine(Shaped(function), lambda y, target: (y.mean() - target.mean()).square(), series, rows)
    assert [each.rule for each in found] == ["exchanged-by-view"] * is_wrong


@pytest.mark.parametrize(
    ("channels", "rows_of", "is_wrong"),
    [
        (3, lambda y: y.view(-1, 3), True),
        (3, lambda y: y.permute(0, 2, 3, 1).reshape(-1, 3), False),
        (6, lambda y: y.view(-1, 6), False),  # the last dimension may have the classes, too
    ],
)
def test_a_view_that_makes_rows_of_images(channels: int, rows_of: Function, is_wrong: bool) -> None:
    """The classes of an image are in dimension 1, so that a view does not make one row for each place."""
    net, images = nn.Sequential(nn.Conv2d(1, channels, 1), Shaped(rows_of)), torch.randn(8, 1, 5, 6)
    found = examine(net, lambda y, target: F.cross_entropy(y, target.flatten()), images, torch.zeros(8, 5, 6).long())
    assert brief(found) == [("warning", "exchanged-by-view", "net.1")] * is_wrong
    assert all("makes [240, 3] of [8, 3, 5, 6], whose dimension 1 has the classes" in each.verdict for each in found)


@pytest.mark.parametrize(
    ("function", "is_wrong"),
    [
        (lambda x: x.view(8, 3, 6, 2), True),
        (lambda x: x.view(8, 6, 3, 2), False),
        (lambda x: x.view(8, 6, 3, 2).transpose(1, 2).contiguous().view(8, 6, 6), True),
        (lambda x: x.view(8, 6, 3, 2).transpose(1, 2).transpose(1, 2).reshape(8, 6, 6), False),
        (lambda x: x.view(8, 6, 6, 1), False),
        (lambda x: x.view(8, 36), False),
    ],
)
def test_a_view_instead_of_an_exchange_of_heads_and_positions(function: Function, is_wrong: bool) -> None:
    """Heads that are split or joined without the exchange are a finding, although the number of dimensions changes."""
    net = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), Shaped(lambda x: function(x).flatten(1)), nn.Linear(36, 3))
    found = examine(net, F.cross_entropy, series, classes)
    assert [each.rule for each in found] == ["exchanged-by-view"] * is_wrong


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


class Chosen(nn.Module):
    """Compares tokens with rows that are drawn at random, or adds a drawn row to all tokens of a sample."""

    def __init__(self, *, is_of_sample: bool) -> None:
        super().__init__()
        self.tokens, self.rows, self.is_of_sample = nn.Embedding(11, 11), nn.Embedding(11, 11), is_of_sample

    def forward(self, x: Tensor) -> Tensor:
        tokens: Tensor = self.tokens(x)
        if self.is_of_sample:
            return tokens + self.rows(torch.randperm(8))[:, None]
        return tokens * self.rows(torch.randperm(6))


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


@pytest.mark.parametrize(
    ("function", "is_wrong"),
    [
        (lambda h: h.view(8, -1), True),
        (lambda h: h.transpose(0, 1).reshape(8, -1), False),
        (lambda h: h.repeat(4, 1, 1).view(8, 8, 4), False),
    ],
)
def test_a_view_that_joins_samples(function: Function, is_wrong: bool) -> None:
    """A view of the states of a recurrence to one row for each sample is a finding; behind a transpose it is not."""
    lstm = nn.LSTM(5, 4, bidirectional=True, batch_first=True)
    net = nn.Sequential(lstm, Shaped(lambda x: function(x[1][0]).flatten(1)), nn.LazyLinear(3))
    net(series)
    found = examine(net, F.cross_entropy, series, classes)
    assert [each.rule for each in found] == ["exchanged-by-view"] * is_wrong


def test_a_softmax_along_the_batch_before_a_logarithm() -> None:
    """A softmax over the samples is found behind a logarithm and a small number, too."""
    found = [
        examine(mlp(3), lambda y, target, dim=dim: F.nll_loss((y.softmax(dim) + 1e-8).log(), target), rows, classes)  # type: ignore[misc]  # mypy infers no lambda with defaults
        for dim in (0, 1)
    ]
    assert [[each.rule for each in one] for one in found] == [["along-batch"], []]


@pytest.mark.parametrize(("dim", "is_wrong"), [(0, True), (2, True), (1, False)])
def test_a_softmax_over_another_dimension_than_the_classes(dim: int, is_wrong: bool) -> None:
    """nll_loss takes dimension 1 for the classes, whatever the batch is."""
    x, target = torch.randn(4, 5, 6, 6), torch.zeros(4, 6, 6, dtype=torch.long)
    found = examine(nn.Conv2d(5, 3, 1), lambda y, target: F.nll_loss(y.log_softmax(dim), target), x, target)
    assert [each.rule for each in found] == ["along-batch"] * is_wrong
    assert all(f"over dimension {dim} of [4, 3, 6, 6]" in each.verdict for each in found)


class MadeAnew(nn.Module):
    """A network whose second layer is made in ``__init__``, or in each call."""

    def __init__(self, is_faulty: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), None if is_faulty else nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        layer = self.second or nn.Linear(5, 3)
        output: Tensor = layer(self.first(x).relu())
        return output


def test_a_layer_that_is_made_in_forward() -> None:
    """A layer with new weights in each step is a finding; a layer of the model, and a random projection, are not."""
    (found,) = examine(MadeAnew(True), F.cross_entropy, rows, classes)
    assert found.rule == "made-in-forward"
    assert found.verdict.startswith("the weight of the linear in ")
    assert "test_operations.py:" in found.verdict
    assert examine(MadeAnew(False), F.cross_entropy, rows, classes) == []
    projected = nn.Sequential(nn.Linear(5, 5), Shaped(lambda x: x @ torch.randn(5, 3)))
    assert examine(projected, F.cross_entropy, rows, classes) == []


class Codes(nn.Module):
    """Samples are replaced by the nearest row of a code book."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(40, 5)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.codes(torch.cdist(x, self.codes.weight).argmin(1))
        return output


@pytest.mark.parametrize(("used", "samples", "findings"), [(2, 64, 1), (3, 64, 0), (1, 16, 0)])
def test_a_code_book_of_which_few_rows_are_used(used: int, samples: int, findings: int) -> None:
    """A batch that could use 40 rows and uses 2 in each record is a finding; a small batch cannot use many."""
    x = torch.randn(samples, 5)
    graph = capture_graph(Step(Codes(), F.mse_loss), x, x)
    values = {"net.codes/weight": {"rms": 1.0}, "net.codes/weight.grad": {"zero_fraction": 1 - used / 40}}
    found = run(None, None, values, graph=graph, shapes={("net.codes", "weight"): (40, 5)})
    assert [each.module for each in found if each.rule == "unused-codes"] == ["net.codes"] * findings


def own_entropy(x: Tensor, y: Tensor, dim: int = 1) -> Tensor:
    """Return the cross entropy without a function of torch."""
    return -(F.one_hot(y, 3) * x.log_softmax(dim)).sum(1).mean()


def test_a_softmax_before_a_loss_of_the_step_itself() -> None:
    """A softmax along the batch, or over one entry, is found before a product with targets, too."""
    (found,) = examine(mlp(3), lambda x, y: own_entropy(x, y, 0), rows, classes)
    assert brief([found]) == [("warning", "along-batch", "")]
    assert examine(mlp(3), own_entropy, rows, classes) == []
    single = examine(mlp(1), lambda x, y: -(y[:, None] * x.log_softmax(1)).sum(), rows, classes)
    assert [each.rule for each in single] == ["one-class"]


@pytest.mark.parametrize(
    ("dim", "is_wrong"),
    [(0, True), (1, False)],
)
def test_a_normalization_along_the_batch(dim: int, is_wrong: bool) -> None:
    """Features that are divided by their norm over the samples are a finding; samples divided by theirs are not."""
    net = nn.Sequential(nn.Linear(5, 7), Shaped(lambda x: F.normalize(x, dim=dim)), nn.Linear(7, 3))
    found = examine(net, F.cross_entropy, rows, classes)
    assert brief(found) == [("warning", "along-batch", "net.1")] * is_wrong


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


@pytest.mark.parametrize(
    ("dimension", "is_turned", "is_wrong"), [(0, False, True), (1, False, False), (0, True, False)]
)
def test_embeddings_normalized_over_the_samples(dimension: int, is_turned: bool, is_wrong: bool) -> None:
    """Products of samples need a norm of each sample; correlations of features have one of each feature."""

    def loss(y: Tensor, other: Tensor) -> Tensor:
        one, two = (F.normalize(each, dim=dimension) for each in (y, y + other))
        products = one.T @ two if is_turned else one @ two.T
        return F.cross_entropy(products / 0.1, torch.arange(len(products)))

    found = [each.rule for each in examine(mlp(7), loss, rows, torch.randn(8, 1))]
    assert found.count("along-batch") == is_wrong


class Squeezed(nn.Module):
    """A network of which one layer has a single output, with other ways around it if there are any."""

    def __init__(self, between: Callable[[Tensor, Tensor], Tensor], *, inputs: int = 1, outputs: int = 3) -> None:
        super().__init__()
        self.narrow, self.wide, self.head = nn.Linear(5, 1), nn.Linear(inputs, 6), nn.Linear(6, outputs)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.wide(self.between(self.narrow(x), x)).relu())
        return output


class LastState(nn.Module):
    """A recurrence with one unit, whose last state gives all outputs."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.mix, self.head = nn.GRU(5, units, batch_first=True), nn.Linear(units, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.mix(x)[0][:, -1])
        return output


def test_a_hidden_layer_of_a_single_unit() -> None:
    """One number between two layers from which several outputs follow is a finding; two numbers are none."""
    (found,) = examine(Squeezed(lambda one, _: one.relu()), F.cross_entropy, rows, classes)
    assert brief([found]) == [("warning", "single-unit", "net.narrow")]
    assert found.verdict == "net.narrow returns one number for each sample, from which the 3 outputs follow"
    wider = nn.Sequential(nn.Linear(5, 2), nn.ReLU(), nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 3))
    assert examine(wider, F.cross_entropy, rows, classes) == []


@pytest.mark.parametrize(("units", "rules"), [(1, ["single-unit"]), (2, [])])
def test_a_recurrence_of_a_single_unit(units: int, rules: list[str]) -> None:
    """The last state of a recurrence with one unit is one number, too."""
    assert [each.rule for each in examine(LastState(units), F.cross_entropy, series, classes)] == rules


@pytest.mark.parametrize(
    ("net", "loss", "target"),
    [
        (Squeezed(lambda one, x: torch.cat([one, x], 1), inputs=6), F.cross_entropy, classes),  # beside others
        (Squeezed(lambda one, x: one.sigmoid() * x, inputs=5), F.cross_entropy, classes),  # a gate
        (Squeezed(lambda one, x: one + x[:, :1]), F.cross_entropy, classes),  # another way from the input
        (Squeezed(lambda one, _: one.relu(), outputs=1), F.mse_loss, torch.randn(8, 1)),  # one output
        (Squeezed(lambda one, _: one.relu(), outputs=2), F.cross_entropy, classes % 2),  # two classes
        (Squeezed(lambda _, x: x[:, :1]), F.cross_entropy, classes),  # one feature of the input
        (Squeezed(lambda one, _: one.relu(), outputs=5), F.mse_loss, rows),  # the latent of an autoencoder
        (Shaped(nn.Conv1d(6, 1, 1)), lambda y, _: y.square().mean(), classes),  # one channel of several places
    ],
)
def test_single_units_that_are_meant(net: nn.Module, loss: Loss, target: Tensor) -> None:
    """Gates, numbers beside others, one output, one feature and the latent of an autoencoder are fine."""
    x = series if isinstance(net, Shaped) else rows
    found = examine(net, loss, x, x if target is rows else target)
    assert [each.rule for each in found if each.rule == "single-unit"] == []


class Quantized(nn.Module):
    """A step of an autoencoder whose decoder gets the nearest rows of a code book."""

    def __init__(self, passed: Callable[[Tensor, Tensor], Tensor], *, is_frozen: bool = False) -> None:
        super().__init__()
        self.encoder, self.codes, self.decoder = mlp(5).requires_grad_(not is_frozen), nn.Embedding(16, 5), mlp(5)
        self.passed = passed

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        code = self.codes(torch.cdist(z, self.codes.weight).argmin(1))
        of_codes = F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())
        return F.mse_loss(self.decoder(self.passed(z, code)), x) + of_codes


@pytest.mark.parametrize(
    ("passed", "is_frozen", "is_wrong"),
    [
        (lambda z, code: code, False, True),
        (lambda z, code: z.detach() + (code - z.detach()), False, True),
        (lambda z, code: z + (code - z).detach(), False, False),
        (lambda z, code: code + z - z.detach(), False, False),
        (lambda z, code: code, True, False),
    ],
)
def test_codes_that_cut_off_the_encoder(
    passed: Callable[[Tensor, Tensor], Tensor], is_frozen: bool, is_wrong: bool
) -> None:
    """The gradient must pass the choice of the code, unless the encoder is frozen; the loss of the codes is no way."""
    found = trained_step(Quantized(passed, is_frozen=is_frozen), rows)
    assert brief(found) == [("warning", "encoder-cut-off", "codes")] * is_wrong
    assert all("depends on the encoder through the argmin" in each.verdict for each in found)


class Exchanged(nn.Module):
    """A step whose model may get the samples in another order."""

    def __init__(self, given: Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.net, self.given = mlp(3), given

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(*self.given(self.net, x, y))


order = torch.rand(8)


def back(net: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    places = x[:, 0].sort()[1]
    return net(x[places])[places.argsort()], y


def of_both(net: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    places = torch.randperm(8)
    return net(x[places]), y[places]


def mixed(net: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return net(0.7 * x + 0.3 * x[torch.randperm(8)]), y


@pytest.mark.parametrize(
    ("given", "is_wrong"),
    [
        (lambda net, x, y: (net(x[x[:, 0].sort(descending=True)[1]]), y), True),
        (lambda net, x, y: (net(x[torch.randperm(8)]), y), True),
        (lambda net, x, y: (net(x.index_select(0, x[:, 0].argsort())), y), True),
        (back, False),
        (of_both, False),
        (mixed, False),
        (lambda net, x, y: (net(x[:, torch.randperm(5)]), y), False),  # the features
        (lambda net, x, y: (net(x), y), False),
    ],
)
def test_samples_that_are_exchanged_before_the_model(
    given: Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]], is_wrong: bool
) -> None:
    """Outputs of exchanged samples must go back to their places, or the targets be exchanged, too."""
    found = trained_step(Exchanged(given), rows, classes)
    assert brief(found) == [("warning", "exchanged-samples", "")] * is_wrong


class Pooled(nn.Module):
    """A step of a graph network that joins the nodes of each sample, or those of all samples."""

    def __init__(self, graphs: int) -> None:
        super().__init__()
        self.net, self.head, self.graphs = nn.Linear(5, 7), nn.Linear(7, 3), graphs

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        nodes = F.relu(self.net(x)).reshape(48, 7)
        places = torch.arange(8).repeat_interleave(6) * (self.graphs > 1)
        pooled = torch.zeros(self.graphs, 7).index_add(0, places, nodes)
        return F.cross_entropy(self.head(pooled).expand(8, 3), y)


@pytest.mark.parametrize(("graphs", "is_wrong"), [(1, True), (8, False)])
def test_nodes_of_all_graphs_that_are_joined(graphs: int, is_wrong: bool) -> None:
    """The nodes of several graphs must not become one row that stands for all samples."""
    found = trained_step(Pooled(graphs), series, classes)
    assert brief(found) == [("warning", "along-batch", "")] * is_wrong
    assert all("index_add" in each.verdict and "[48, 7]" in each.verdict for each in found)
