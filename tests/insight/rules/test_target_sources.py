"""Tests of the rules about where a target comes from: each fault, its repaired twin, and healthy designs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_recorder import Outputs, default_recorders, open_recording
from lightning_recorder.graph import GraphCapture, capture_graph
from lightning_recorder.graph.model import Edge, Graph
from tests.insight.records import Examination, Values, brief, parts, record, run
from tests.insight.rules.test_operations import Loss, Shaped, Step, classes, mlp, rows, tokens, trained_step
from tests.insight.rules.test_sequences import Causal
from tests.insight.rules.test_targets import NAMES


class Unshifted(nn.Module):
    """A step of a language model whose targets are its tokens."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.net(ids), ids)


def test_targets_that_are_not_shifted() -> None:
    """A causal model whose targets are its inputs is a finding; an autoencoder is not, also if it masks its padding."""
    graph = capture_graph(Unshifted(Causal(lambda ones: ones.triu(1), False)), tokens)
    for future, rules in ((0.0, ["copies-the-input"]), (0.3, [])):
        examination = parts({"net.softmax": [{"future": future}] * 2}, graph=graph)
        examination.add(record("activations", 0, {("net", "out"): {}}, recorder="layers"))
        assert [each.rule for each in examination.findings() if each.rule in NAMES] == rules
    assert [each.rule for each in Examination(graph).findings() if each.rule in NAMES] == []  # nothing is measured


class Tagger(nn.Module):
    """An embedding, a recurrence, and logits of each state, or of the last state for all positions."""

    def __init__(self, *, is_repeated: bool = False, length: int = 6) -> None:
        super().__init__()
        self.embedding, self.mix, self.head = nn.Embedding(16, 4), nn.GRU(4, 4, batch_first=True), nn.Linear(4, 16)
        self.is_repeated, self.length = is_repeated, length

    def forward(self, ids: Tensor) -> Tensor:
        states, last = self.mix(self.embedding(ids))
        states = last[0, :, None].expand(-1, self.length, -1) if self.is_repeated else states
        logits: Tensor = self.head(states.relu())
        return logits


class Repeats(nn.Module):
    """A step of a model of the tokens, which also makes the tokens that it should read."""

    def __init__(self, net: nn.Module, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.read = net, read

    def forward(self, ids: Tensor) -> Tensor:
        shifted = torch.cat([torch.zeros_like(ids[:, :1]), ids[:, :-1]], 1)
        del shifted
        return F.cross_entropy(self.net(self.read(ids)).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize(
    ("net", "read", "is_wrong"),
    [
        (Tagger(), lambda ids: ids, 1),
        (Tagger(is_repeated=True), lambda ids: ids, 0),  # an autoencoder
        (Tagger(), lambda ids: torch.cat([torch.zeros_like(ids[:, :1]), ids[:, :-1]], 1), 0),
        (Tagger(), lambda ids: ids.masked_fill(ids == 3, 0), 0),  # hidden tokens are to be found
    ],
)
def test_a_recurrence_that_reads_its_targets(net: nn.Module, read: Callable[[Tensor], Tensor], is_wrong: int) -> None:
    """A recurrence whose targets are the tokens that it reads learns to copy them."""
    examination = Examination(capture_graph(Repeats(net, read), torch.arange(48).view(8, 6) % 16))
    examination.add(record("activations", 0, {("net", "out"): {}}, recorder="layers"))
    assert [each.rule for each in examination.findings()].count("copies-the-input") == is_wrong


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize(
    ("ignored", "zeros", "reduction", "is_wrong"),
    [(-100, 0.6, "mean", True), (0, 0.6, "mean", False), (-100, 0.1, "mean", False), (-100, 0.6, "none", False)],
)
def test_padding_as_target(ignored: int, zeros: float, reduction: str, is_wrong: bool, is_padded: bool) -> None:
    """Targets most of which are the padding are a finding, unless they are ignored, or a mask may multiply the losses.

    Models of transformers add an ignored target instead of leaving out the last position.
    """
    net = nn.Sequential(nn.Embedding(11, 8, padding_idx=0), nn.GRU(8, 8, batch_first=True), Shaped(lambda x: x[0]))
    net.append(nn.Linear(8, 11))

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, ids: Tensor) -> Tensor:
            logits = self.net(ids if is_padded else ids[:, :-1]).flatten(0, 1)
            targets = F.pad(ids, (0, 1), value=ignored)[:, 1:] if is_padded else ids[:, 1:]
            return F.cross_entropy(logits, targets.flatten(), ignore_index=ignored, reduction=reduction).mean()

    graph = capture_graph(Language(), tokens)
    found = run(
        {"net.1": {}}, targets={"cross_entropy": {"zero_fraction": zeros, "min": 0.0, "max": 10.0}}, graph=graph
    )
    assert [each.rule for each in found if each.rule in NAMES] == ["padding-as-target"] * is_wrong


class Adversaries(nn.Module):
    """A step of a discriminator and one of its generator, whose loss may be flat where the discriminator is sure."""

    def __init__(self, *last: nn.Module) -> None:
        super().__init__()
        self.g, self.d = nn.Linear(3, 5), mlp(1, *last)
        self.loss = F.binary_cross_entropy if last else F.binary_cross_entropy_with_logits

    def forward(self, x: Tensor) -> Tensor:
        fake, ones, zeros = self.g(torch.randn(8, 3)), torch.ones(8, 1), torch.zeros(8, 1)
        of_d = self.loss(self.d(x), ones) + self.loss(self.d(fake.detach()), zeros)
        loss: Tensor = of_d - self.loss(self.d(fake), zeros)
        return loss


def of_adversaries(
    *last: nn.Module, real: float, fake: float, fall: float, records: int = 8, recent: int = 8
) -> Examination:
    """Return the examination of a discriminator with the given mean predictions in the last records."""
    graph = capture_graph(Adversaries(*last), rows)
    name = "binary_cross_entropy" if last else "binary_cross_entropy_with_logits"
    since = records - recent
    sides: list[tuple[tuple[str, str], dict[str, list[float]]]] = []
    for place, (mean, target) in enumerate(((real, 1.0), (fake, 0.0), (fake, 0.0)), 1):
        site = name if place == 1 else f"{name}#{place}"
        targets = dict.fromkeys(("min", "max"), [target] * records)
        sides.append(((site, "in.prediction"), {"mean": [0.5] * since + [mean] * recent}))
        sides.append(((site, "in.target"), targets))
    examination = Examination(graph)
    gradients = [1.0] * max(since, 1) + [1 / fall] * (records - max(since, 1))
    for row in range(records):
        losses = {site: {key: value[row] for key, value in values.items()} for site, values in sides}
        examination.add(record("activations", row * 10, {("d.2", "out"): {}, **losses}))
        weights: dict[tuple[str, str], dict[str, float]] = {("g", "weight"): {}}
        examination.add(record("parameters", row * 10, weights | {("g", "weight.grad"): {"rms": gradients[row]}}))
    return examination


@pytest.mark.parametrize(
    ("last", "real", "fake", "fall", "is_wrong"),
    [
        ([nn.Sigmoid()], 0.999, 0.001, 100.0, True),
        ([], 6.0, -6.0, 100.0, True),
        ([nn.Sigmoid()], 0.999, 0.001, 2.0, False),
        ([nn.Sigmoid()], 0.6, 0.4, 100.0, False),
    ],
)
def test_a_discriminator_that_has_won(
    last: list[nn.Module], real: float, fake: float, fall: float, is_wrong: bool
) -> None:
    """A sure discriminator is a finding if the gradients of the generator have become small."""
    found = of_adversaries(*last, real=real, fake=fake, fall=fall).findings()
    assert [(each.rule, each.others) for each in found] == [("discriminator-wins", ("g",))] * is_wrong


def of_tokens(**shares: float) -> Examination:
    """Return the examination of a language model with these shares of targets that are later tokens."""
    examination = Examination()
    for row in range(2):
        sites: dict[tuple[str, str], dict[str, float]] = {("net", "out"): {}}
        sites |= {("loss", f"in.target.{name}"): {"mean": share} for name, share in shares.items()}
        examination.add(record("activations", row * 10, sites))
    return examination


@pytest.mark.parametrize(
    ("following", "after", "rules"), [(0.1, 1.0, ["shifted-twice"]), (1.0, 0.1, []), (1.0, 1.0, []), (0.1, 0.5, [])]
)
def test_tokens_that_are_shifted_twice(following: float, after: float, rules: list[str]) -> None:
    """Targets that are the token after the next one are a finding, unless others are the next one."""
    found = of_tokens(next=following, after_next=after).findings()
    assert [each.rule for each in found] == rules


@pytest.mark.parametrize(("label", "sign", "is_wrong"), [(0.0, 1, True), (1.0, 1, False), (0.0, -1, False)])
def test_a_generator_that_helps_the_discriminator(label: float, sign: int, is_wrong: bool) -> None:
    """The loss of the generator must have the label of real samples, or be that of the discriminator with a minus."""

    class Step(Adversaries):
        def forward(self, x: Tensor) -> Tensor:
            fake, ones, zeros = self.g(torch.randn(8, 3)), torch.ones(8, 1), torch.zeros(8, 1)
            (self.loss(self.d(x), ones) + self.loss(self.d(fake.detach()), zeros)).backward()
            loss: Tensor = self.loss(self.d(fake), zeros + label) * sign
            loss.backward()
            return loss

    graph = capture_graph(Step(), rows)
    name = "binary_cross_entropy_with_logits"
    targets: dict[str, Values] = {
        site: {"min": value, "max": value} for site, value in ((name, 1.0), (f"{name}#2", 0.0), (f"{name}#3", label))
    }
    found = [each for each in run({"d.2": {}}, targets=targets, graph=graph) if each.rule in NAMES]
    assert [(each.rule, each.module, each.others) for each in found] == [("generator-helps", "d.2", ("g",))] * is_wrong


@pytest.mark.parametrize(
    ("sign", "gradient", "is_wrong"), [(1, None, True), (-1, None, False), (1, torch.tensor(-1.0), False)]
)
def test_a_generator_that_helps_the_critic(sign: int, gradient: Tensor | None, is_wrong: bool) -> None:
    """The generator must make those scores larger that the critic makes smaller, also by a given gradient."""

    class Step(Adversaries):
        def forward(self, x: Tensor) -> Tensor:
            fake = self.g(torch.randn(8, 3))
            (self.d(fake.detach()).mean() - self.d(x).mean()).backward()
            loss: Tensor = sign * self.d(fake).mean()
            loss.backward(gradient)
            return loss

    found = [each for each in run({"d.2": {}}, graph=capture_graph(Step(), rows)) if each.rule in NAMES]
    assert [(each.rule, each.module, each.others) for each in found] == [("generator-helps", "d.2", ("g",))] * is_wrong


def of_ends(ends: float | list[float], *, after: float = 1.0, records: int = 8) -> Examination:
    """Return a run of a language model with the share of ends that are targets, and that of next tokens."""
    examination = Examination()
    for row in range(records):
        sites = {
            ("cross_entropy", "in.target.next"): {"mean": after},
            ("cross_entropy", "in.target.ends"): {"mean": ends if isinstance(ends, float) else ends[row]},
            ("head", "out"): {},
        }
        examination.add(record("activations", row * 10, sites))
    return examination


@pytest.mark.parametrize(
    ("ends", "after", "rules"),
    [
        (0.0, 1.0, ["no-end-as-target"]),
        (1.0, 1.0, []),
        ([0.0] * 7 + [0.02], 1.0, []),
        ([0.0] * 7 + [-1.0], 1.0, []),  # a text that does not end, so that the end token may be padding alone
        (-1.0, 1.0, []),
        (0.0, 0.5, []),  # other targets than the next tokens
    ],
)
def test_ends_that_are_ignored_like_padding(ends: float | list[float], after: float, rules: list[str]) -> None:
    """An end token that each text has, and that is never a target of a language model, is a finding."""
    assert [each.rule for each in of_ends(ends, after=after).findings()] == rules


@pytest.mark.parametrize(("kept", "rules"), [(0, ["no-end-as-target"]), (1, [])])
def test_ends_of_a_model_of_transformers(kept: int, rules: list[str], tmp_path: Path) -> None:
    """The end token is read from the configuration of a model, and its labels from its loss."""
    transformers = pytest.importorskip("transformers")
    lengths = torch.arange(64) % 5 + 2
    places = torch.arange(8).expand(64, 8)
    tokens = torch.where(places < lengths[:, None], torch.randint(2, 12, (64, 8)), 1)
    labels = torch.where(places < lengths[:, None] + kept, tokens, -100)
    config = transformers.GPT2Config(vocab_size=12, n_positions=8, n_embd=8, n_layer=1, n_head=2, eos_token_id=1)

    class Language(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = transformers.GPT2LMHeadModel(config)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss: Tensor = self.net(batch[0], attention_mask=(batch[1] != -100).long(), labels=batch[1]).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01)

    Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        max_epochs=2,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*default_recorders(outputs=Outputs(plots=False, dumps=False))],
    ).fit(Language(), DataLoader(TensorDataset(tokens, labels), 16))
    found = open_recording(tmp_path).run.findings
    assert [each.rule for each in found if each.rule == "no-end-as-target"] == rules


def squares(prediction: Tensor, target: Tensor) -> Tensor:
    """Return a squared error without a function of torch."""
    return (prediction - target).pow(2).mean()


def amounts(prediction: Tensor, target: Tensor) -> Tensor:
    """Return an absolute error without a function of torch."""
    return (target - prediction).abs().mean()


class Diffusion(nn.Module):
    """A step of a diffusion model; ``target`` chooses from the data, the noise and their sum."""

    def __init__(self, target: Callable[[Tensor, Tensor, Tensor], Tensor], loss: Loss, share: float | None) -> None:
        super().__init__()
        self.net, self.time, self.target, self.share = nn.Linear(10, 5), nn.Embedding(10, 5), target, share
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        time, noise = torch.randint(0, 10, (8,)), torch.randn_like(x)
        share = (time[:, None] + 1) / 11 if self.share is None else self.share
        noisy = (1 - share) * x + share * noise
        return self.loss(self.net(torch.cat([noisy, self.time(time)], 1)), self.target(x, noise, noisy))


@pytest.mark.parametrize(
    ("target", "share", "words"),
    [
        (lambda x, noise, noisy: noise, None, ""),
        (lambda x, noise, noisy: x, None, ""),
        (lambda x, noise, noisy: noise - x, None, ""),
        (lambda x, noise, noisy: noisy, None, "it learns to return its input"),
        (lambda x, noise, noisy: torch.randn_like(x), None, "nothing else uses"),
        (lambda x, noise, noisy: torch.randn(8, 5), None, "nothing else uses"),
        (lambda x, noise, noisy: noisy, 0.1, ""),  # an augmentation
        (lambda x, noise, noisy: x + 0.1 * torch.randn_like(x), None, ""),
    ],
)
@pytest.mark.parametrize("loss", [F.mse_loss, squares, amounts])
def test_noise_as_target(
    target: Callable[[Tensor, Tensor, Tensor], Tensor], share: float | None, words: str, loss: Loss
) -> None:
    """The target is the noise that was added, or the data; neither other noise nor the sum."""
    found = trained_step(Diffusion(target, loss, share), rows)
    assert brief(found) == [("warning", "unknown-noise", "")] * bool(words)
    assert all(words in each.verdict for each in found)


class QLearning(nn.Module):
    """A step of Q learning."""

    def __init__(self, predicted: Callable[[Tensor, Tensor], Tensor], loss: Loss, *, has_next: bool = True) -> None:
        super().__init__()
        self.loss = loss
        self.net, self.late, self.predicted, self.has_next = mlp(3), mlp(3), predicted, has_next

    def forward(self, x: Tensor, actions: Tensor, rewards: Tensor, following: Tensor) -> Tensor:
        with torch.no_grad():
            target = rewards + 0.9 * self.late(following).max(1).values if self.has_next else rewards
        return self.loss(self.predicted(self.net(x), actions), target)


@pytest.mark.parametrize(
    ("predicted", "has_next", "is_wrong"),
    [
        (lambda values, actions: values.max(1).values, True, True),
        (lambda values, actions: values.amax(1), True, True),
        (lambda values, actions: values.gather(1, actions[:, None])[:, 0], True, False),
        (lambda values, actions: values.max(1).values, False, False),  # a pooling
    ],
)
@pytest.mark.parametrize("loss", [F.smooth_l1_loss, squares])
def test_the_largest_value_is_fitted(
    predicted: Callable[[Tensor, Tensor], Tensor], has_next: bool, is_wrong: bool, loss: Loss
) -> None:
    """The reward belongs to the action that was taken, not to the one with the largest value."""
    found = trained_step(
        QLearning(predicted, loss, has_next=has_next), rows, classes, torch.randn(8), torch.randn(8, 5)
    )
    assert brief(found) == [("warning", "largest-value", "")] * is_wrong


class Masked(nn.Module):
    """A step of a masked language model."""

    def __init__(self, targets: Callable[[Tensor, Tensor], Tensor], *, is_random: bool = True) -> None:
        super().__init__()
        self.embedding, self.head, self.targets, self.is_random = nn.Embedding(11, 5), mlp(11), targets, is_random

    def forward(self, ids: Tensor) -> Tensor:
        hidden = torch.rand(ids.shape) < 0.15 if self.is_random else ids == 3
        logits = self.head(self.embedding(ids.masked_fill(hidden, 0)))
        return F.cross_entropy(logits.transpose(1, 2), self.targets(ids, hidden))


@pytest.mark.parametrize(
    ("targets", "is_random", "is_wrong"),
    [
        (lambda ids, hidden: ids, True, True),
        (lambda ids, hidden: ids.masked_fill(~hidden, -100), True, False),
        (lambda ids, hidden: torch.where(hidden, ids, -100), True, False),
        (lambda ids, hidden: ids, False, False),  # another number for the padding
    ],
)
def test_targets_that_the_model_sees(
    targets: Callable[[Tensor, Tensor], Tensor], is_random: bool, is_wrong: bool
) -> None:
    """The loss of a masked language model counts the tokens that are hidden; that of all tokens has a note."""
    found = trained_step(Masked(targets, is_random=is_random), tokens)
    assert brief(found) == [("note", "seen-targets", "")] * is_wrong


class Actor(nn.Module):
    """A step of an actor and its critic, whose losses one optimizer or two take."""

    def __init__(self, value: Callable[[nn.Module, Tensor], Tensor], loss: Loss) -> None:
        super().__init__()
        self.loss = loss
        self.actor, self.critic, self.value = mlp(2), nn.Linear(7, 1), value

    def forward(self, x: Tensor, actions: Tensor, rewards: Tensor) -> Tensor:
        error = self.loss(self.critic(torch.cat([x, actions], 1))[:, 0], rewards)
        return error - self.value(self.critic, torch.cat([x, self.actor(x)], 1)).mean()


def detached(critic: nn.Module, x: Tensor) -> Tensor:
    parameters = {name: each.detach() for name, each in critic.named_parameters()}
    found: Tensor = torch.func.functional_call(critic, parameters, (x,))
    return found


def frozen(critic: nn.Module, x: Tensor) -> Tensor:
    critic.requires_grad_(False)
    found: Tensor = critic(x)
    critic.requires_grad_(True)
    return found


@pytest.mark.parametrize(
    ("value", "optimizers", "is_wrong"),
    [
        (lambda critic, x: critic(x), 1, True),
        (lambda critic, x: -critic(x), 1, False),
        (lambda critic, x: critic(x.detach()), 1, False),  # no actor
        (lambda critic, x: critic(x), 2, False),
        (detached, 1, False),
        (frozen, 1, False),
    ],
)
@pytest.mark.parametrize("loss", [F.mse_loss, squares])
def test_values_that_the_actor_raises(
    value: Callable[[nn.Module, Tensor], Tensor], optimizers: int, is_wrong: bool, loss: Loss
) -> None:
    """If one optimizer takes both losses, the critic gives larger values instead of the actor better actions."""
    model, inputs = Actor(value, loss), (rows, torch.randn(8, 2), torch.randn(8))
    with GraphCapture(model, inputs) as capture:
        model(*inputs).backward()
    graph = capture.graph()
    backward = next(node for node in graph.nodes if node.kind == "backward")
    steps = [
        replace(backward, id=len(graph.nodes) + place, kind="optimizer", name="Adam") for place in range(optimizers)
    ]
    whole = Graph((*graph.nodes, *steps), (*graph.edges, *(Edge(backward.id, each.id) for each in steps)))
    found = [each for each in Examination(whole).findings() if each.rule == "raised-values"]
    assert brief(found) == [("warning", "raised-values", "critic")] * is_wrong


levels = torch.tensor([0.1, 0.5, 0.9])


def of_quantiles(error: Tensor, *, opposite: bool = False) -> Tensor:
    """Return the loss of quantiles of an error, or of the opposite of one."""
    if opposite:
        return torch.max((1 - levels) * error, -levels * error).mean()
    return torch.max(levels * error, (levels - 1) * error).mean()


@pytest.mark.parametrize(
    ("loss", "is_wrong"),
    [
        (lambda y, target: of_quantiles(y - target), True),
        (lambda y, target: of_quantiles(-(target - y)), True),
        (lambda y, target: of_quantiles(target - y), False),
        (lambda y, target: of_quantiles(-(y - target)), False),
        (lambda y, target: of_quantiles(y - target, opposite=True), False),
        (lambda y, target: torch.max(0.9 * (y - target), -0.1 * (y - target)).mean(), False),  # the quantile 0.1
    ],
)
def test_quantiles_that_are_exchanged(loss: Loss, is_wrong: bool) -> None:
    """The error in the loss of quantiles is the target minus the prediction."""
    found = Examination(capture_graph(Step(mlp(3), loss), rows, torch.randn(8, 1))).findings()
    assert (
        brief([each for each in found if each.rule == "exchanged-quantiles"])
        == [("warning", "exchanged-quantiles", "")] * is_wrong
    )
