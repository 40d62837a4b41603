"""Programs with one planted mistake each, and the question that must find it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.check.programs import (
    COUNT,
    Function,
    Lit,
    Program,
    Tagger,
    cnn,
    contrastive,
    detection,
    diffusion,
    elbo,
    gan,
    graph,
    integers,
    language,
    loader,
    mlp,
    normal,
    regression,
    reinforcement,
    seq2seq,
    sequences,
    sgd,
    tabular,
    vae,
    xent,
)


class WrongSquare(torch.autograd.Function):
    """A square whose gradient lacks the factor 2."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x  # type: ignore[no-any-return]  # a tensor


def layers(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), *more)


def copied_optimizer(net: nn.Module) -> torch.optim.Optimizer:
    import copy

    return torch.optim.Adam(copy.deepcopy(net).parameters(), 1e-3)


def frozen_body(net: Any, batch: Any) -> Any:
    with torch.no_grad():
        features = net.body(batch[0])
    return F.cross_entropy(net.classes(features), batch[1]) + F.smooth_l1_loss(net.boxes(features), batch[2])


def one_loss(net: Any, batch: Any) -> Any:
    return F.cross_entropy(net.classes(net.body(batch[0])), batch[1])


def unshifted(net: Any, batch: Any) -> Any:
    return F.cross_entropy(net(batch[0]).flatten(0, 1), batch[0].flatten())


def transposed_targets(net: Any, batch: Any) -> Any:
    return F.cross_entropy(net(batch[0][:, :-1]).flatten(0, 1), batch[0][:, 1:].T.flatten())


def shifted_twice(net: Any, batch: Any) -> Any:
    return F.cross_entropy(net(batch[0][:, :-2]).flatten(0, 1), batch[0][:, 2:].flatten())


def unshifted_decoder(net: Any, batch: Any) -> Any:
    return F.cross_entropy(net(*batch).transpose(1, 2), batch[1])


def whole_tensor(net: Any, batch: Any) -> Any:
    return ((net(batch[0]) - batch[1]) ** 2).mean()


def leaking(net: Any, batch: Any) -> Any:
    return F.cross_entropy(net(torch.cat([batch[0], F.one_hot(batch[1], 4).float()], 1)), batch[1])


def bad_time(net: Any, batch: Any) -> Any:
    x = batch[0]
    noise, time = torch.randn_like(x), torch.rand(len(x), 1)
    noisy = (1 - time).sqrt() * x + time.sqrt() * noise
    return F.mse_loss(net(torch.cat([torch.zeros_like(noisy), time], 1)), noise)


def softmax_of_batch(net: Any, batch: Any) -> Any:
    return F.cross_entropy(net(batch[0], batch[1]), batch[2])


def td_with_wrong_shape(net: Any, batch: Any) -> Any:
    state, action, reward, following = batch
    with torch.no_grad():
        target = reward + 0.9 * net.target(following).max(1).values
    return F.smooth_l1_loss(net.online(state).gather(1, action[:, None]), target)


def raw_policy(net: Any, batch: Any) -> Any:
    return F.nll_loss(net.online(batch[0]), batch[1])


def asleep() -> Program:
    program = cnn()
    model: Any = program.model
    model.net.eval()
    return program


class BatchSoftmax(nn.Module):
    """Attention weights over the samples instead of the features."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.softmax(0)


class Viewed(nn.Module):
    """Exchanges dimensions by ``view`` instead of ``permute``."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[1], x.shape[0], *x.shape[2:]).transpose(0, 1)


def contrastive_of_constant(net: Any, batch: Any) -> Any:
    out = net(torch.ones_like(batch[0]))
    return F.cross_entropy(out @ out.T, torch.arange(len(out)))


def ignored(net: Any, batch: Any) -> Any:
    return F.cross_entropy(net(batch[0]), batch[1].clamp(max=0), ignore_index=0)


def zero_targets(net: Any, batch: Any) -> Any:
    return F.cross_entropy(net(batch[0]), torch.zeros_like(batch[1]))


def shared_noise() -> Program:
    calls = iter(range(10**9))
    return mlp(lambda net, batch: F.cross_entropy(net(batch[0]) + 0.01 * next(calls), batch[1]) * (1 + next(calls)))


def functional_dropout() -> Program:
    net = Function(
        lambda self, x: self.two(F.dropout(self.one(x).relu(), 0.5)), one=nn.Linear(8, 16), two=nn.Linear(16, 4)
    )
    return mlp(net=net)


def forgotten_layers() -> Program:
    blocks = [nn.Linear(16, 16) for _ in range(2)]
    net = Function(
        lambda self, x: self.two(blocks[1](blocks[0](self.one(x).relu()))), one=nn.Linear(8, 16), two=nn.Linear(16, 4)
    )
    net.register_module("unused", nn.Linear(16, 16))
    return mlp(net=net)


def custom_function() -> Program:
    kind: Any = WrongSquare
    net = Function(lambda self, x: self.two(kind.apply(self.one(x))), one=nn.Linear(8, 16), two=nn.Linear(16, 4))
    return mlp(net=net)


def two_channels() -> Program:
    net = nn.Sequential(nn.Flatten(), nn.Linear(2 * 64, 4))
    whole = Function(lambda self, x: self.body(x[:, :2]), body=net)
    return Program(Lit(whole, xent), loader(normal(COUNT, 3, 8, 8), integers(4, COUNT)))


def first_steps() -> Program:
    net = Function(lambda self, x: self.body(x[:, :4]), body=Tagger())
    return Program(Lit(net, xent), loader(normal(COUNT, 12, 6), integers(3, COUNT)))


def first_columns() -> Program:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))
    whole = Function(lambda self, x: self.body(x[..., : x.shape[-1] // 2]), body=net)
    return Program(Lit(whole, xent), loader(normal(COUNT, 3, 8, 8), integers(4, COUNT)))


def one_category() -> Program:
    net = Function(
        lambda self, x: self.out(self.of(x[:, [0, 0]]).flatten(1)), of=nn.Embedding(5, 4), out=nn.Linear(8, 4)
    )
    return Program(Lit(net, xent), loader(integers(5, COUNT, 2), integers(4, COUNT)))


def standardized_by_batch(net: Any, batch: Any) -> Any:
    x = batch[0]
    return F.cross_entropy(net((x - x.mean(0)) / x.std(0)), batch[1])


def flipped(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), 0.1, maximize=True)


PLANTED: dict[str, tuple[Callable[[], Program], str]] = {
    # Classification.
    "softmax before cross entropy": (lambda: mlp(net=layers(nn.Softmax(-1))), "loss-at-start"),
    "relu before cross entropy": (lambda: mlp(net=layers(nn.ReLU())), "loss-at-start"),
    "logits into nll": (lambda: mlp(lambda net, b: F.nll_loss(net(b[0]), b[1])), "loss-at-start"),
    "log softmax of the batch": (
        lambda: mlp(lambda net, b: F.nll_loss(net(b[0]), b[1]), net=layers(nn.LogSoftmax(0))),
        "samples-mix",
    ),
    "view for permute": (lambda: mlp(net=nn.Sequential(nn.Linear(8, 16), Viewed(), nn.Linear(16, 4))), "samples-mix"),
    "attention over the batch": (
        lambda: mlp(net=nn.Sequential(nn.Linear(8, 16), BatchSoftmax(), nn.Linear(16, 4))),
        "samples-mix",
    ),
    "norm without running statistics": (
        lambda: cnn(batch_norm=lambda: nn.BatchNorm2d(6, track_running_stats=False)),
        "samples-mix",
    ),
    "divided twice": (lambda: cnn(scale=1 / 255), "same-data"),
    "loaded for inference": (asleep, "evaluation"),
    "functional dropout": (functional_dropout, "evaluation"),
    "two of three channels": (two_channels, "input-is-used"),
    "half of an image": (first_columns, "input-is-used"),
    "one of two categories": (one_category, "input-is-used"),
    "standardized by the batch": (lambda: mlp(standardized_by_batch), "samples-mix"),
    "optimizer of a copy": (lambda: mlp(optimizer=copied_optimizer), "parameters-learn"),
    "blocks that are not used": (forgotten_layers, "parameters-learn"),
    "rate too large": (lambda: mlp(optimizer=sgd(300.0)), "learning-rate"),
    "rate too small": (lambda: mlp(optimizer=sgd(1e-8)), "learning-rate"),
    "loss is maximized": (lambda: mlp(optimizer=flipped), "overfits-one-batch"),
    "labels in the input": (
        lambda: mlp(leaking, net=nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))),
        "target-is-used",
    ),
    "all targets ignored": (lambda: mlp(ignored), "target-is-used"),
    "targets of zeros": (lambda: mlp(zero_targets), "target-is-used"),
    "wrong custom gradient": (custom_function, "custom-gradients"),
    "a counter in the loss": (shared_noise, "deterministic"),
    # Regression.
    "broadcast of the target": (lambda: regression(lambda net, b: F.mse_loss(net(b[0]), b[1])), "target-is-used"),
    "broadcast in own loss": (lambda: regression(whole_tensor), "target-is-used"),
    "targets of another scale": (lambda: regression(scale=1e5), "loss-at-start"),
    "target is the prediction": (
        lambda: regression(lambda net, b: F.mse_loss(net(b[0]), net(b[0]).detach())),
        "target-is-used",
    ),
    "softmax of one unit": (
        lambda: regression(net=nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 1), nn.Softmax(-1))),
        "input-is-used",
    ),
    "a rate of zero": (lambda: regression(optimizer=sgd(0.0)), "overfits-one-batch"),
    # Language models.
    "no mask": (lambda: language(mask=None), "past-sees-future"),
    "mask shifted by one": (lambda: language(mask=2), "past-sees-future"),
    "target not shifted": (lambda: language(unshifted), "past-sees-future"),
    "target shifted twice": (lambda: language(shifted_twice), "past-sees-future"),
    "positions along the batch": (lambda: language(along=0), "samples-mix"),
    "targets in another order": (lambda: language(transposed_targets), "samples-mix"),
    "detached body": (lambda: language(detach=True), "parameters-learn"),
    # Sequences.
    "not batch first": (lambda: sequences(batch_first=False), "samples-mix"),
    "reshaped sequences": (
        lambda: sequences(reshape=lambda x: x.reshape(x.shape[1], x.shape[0], -1).transpose(0, 1)),
        "samples-mix",
    ),
    "cut sequences": (first_steps, "input-is-used"),
    # Seq2seq.
    "decoder without mask": (lambda: seq2seq(causal=False), "past-sees-future"),
    "decoder sees its target": (lambda: seq2seq(unshifted_decoder), "past-sees-future"),
    "encoder is ignored": (lambda: seq2seq(memory=False), "input-is-used"),
    # Several losses.
    "body without gradient": (lambda: detection(frozen_body), "parameters-learn"),
    "one loss is forgotten": (lambda: detection(one_loss), "parameters-learn"),
    "optimizer of one head": (
        lambda: detection(optimizer=lambda net: torch.optim.Adam(net.classes.parameters())),
        "parameters-learn",
    ),
    # VAE.
    "mixing decoder": (
        lambda: vae(decoder=nn.Sequential(nn.Linear(3, 16), BatchSoftmax(), nn.Linear(16, 10))),
        "samples-mix",
    ),
    "data not normalized": (lambda: vae(elbo, x=normal(COUNT, 10) * 1e4), "loss-at-start"),
    # GAN.
    "generator gets no gradient": (lambda: gan(detached=True), "parameters-learn"),
    "mixing critic": (lambda: gan(norm=nn.BatchNorm1d(16, track_running_stats=False)), "samples-mix"),
    # Contrastive.
    "views of nothing": (lambda: contrastive(contrastive_of_constant), "input-is-used"),
    "head without gradient": (
        lambda: contrastive(
            net=nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8).requires_grad_(True), nn.Hardtanh(9, 10))
        ),
        "parameters-learn",
    ),
    # Graphs.
    "attention over graphs": (lambda: graph(along=0), "samples-mix"),
    "edges are not used": (lambda: graph(uses_graph=False), "input-is-used"),
    # Diffusion.
    "noisy input is lost": (lambda: diffusion(bad_time), "input-is-used"),
    "a rate of a thousand": (lambda: diffusion(optimizer=sgd(1e3)), "learning-rate"),
    # Tabular.
    "validation not scaled": (lambda: tabular(scale=255.0), "same-data"),
    "numbers are cut": (lambda: tabular(numbers=slice(3)), "input-is-used"),
    "sigmoid before logits": (
        lambda: tabular(lambda net, b: F.binary_cross_entropy_with_logits(net(b[0], b[1]).sigmoid(), b[2])),
        "loss-at-start",
    ),
    # Reinforcement.
    "values and targets broadcast": (lambda: reinforcement(td_with_wrong_shape), "target-is-used"),
    "policy of raw scores": (lambda: reinforcement(raw_policy), "loss-at-start"),
}
