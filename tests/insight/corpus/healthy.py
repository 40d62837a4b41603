"""Healthy tasks on vectors and images; each one learns."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.insight.corpus.nets import (
    Critic,
    Denoiser,
    GraphNet,
    LoRA,
    Mixer,
    MixtureOfExperts,
    ResNet,
    Siren,
    Two,
    UNet,
    Variational,
    VisionTransformer,
)
from tests.insight.corpus.task import Task, adam, classify, digits, healthy, images, random, sgd, warm


def stack(*sizes: int, act: type[nn.Module] = nn.ReLU, norm: bool = False, dropout: float = 0.0) -> nn.Sequential:
    """Return linear layers ``fc1``, ``act1``, …, and a ``head`` without an activation."""
    parts: list[tuple[str, nn.Module]] = []
    for number, (one, other) in enumerate(pairwise(sizes[:-1]), 1):
        parts.append((f"fc{number}", nn.Linear(one, other)))
        if norm:
            parts.append((f"bn{number}", nn.BatchNorm1d(other)))
        parts.append((f"act{number}", act()))
        if dropout:
            parts.append((f"drop{number}", nn.Dropout(dropout)))
    return nn.Sequential(OrderedDict([*parts, ("head", nn.Linear(sizes[-2], sizes[-1]))]))


def kaiming(net: nn.Module) -> nn.Module:
    for each in net.modules():
        if isinstance(each, (nn.Linear, nn.Conv2d)):
            nn.init.kaiming_normal_(each.weight)
            if each.bias is not None:
                nn.init.zeros_(each.bias)
    return net


@healthy
def mlp_adam() -> Task:
    return Task(stack(64, 64, 64, 10))


@healthy
def mlp_deep_sgd() -> Task:
    return Task(kaiming(stack(64, *[48] * 8, 10)), optimizer=sgd(0.01))


@healthy
def mlp_tanh() -> Task:
    net = stack(64, *[48] * 5, 10, act=nn.Tanh)
    for each in net.modules():
        if isinstance(each, nn.Linear):
            nn.init.xavier_normal_(each.weight, 5 / 3)
    return Task(net, optimizer=adam(1e-3))


@healthy
def mlp_dropout_onecycle() -> Task:
    net = stack(64, 96, 96, 96, 10, act=nn.GELU, dropout=0.3)
    schedule = lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=130)  # noqa: E731
    return Task(net, optimizer=adam(weight_decay=0.05), schedule=schedule)


@healthy
def mlp_batchnorm_sgd() -> Task:
    return Task(stack(64, 64, 64, 64, 10, norm=True), optimizer=sgd(0.05, weight_decay=5e-4))


@healthy
def mlp_gates() -> Task:
    """A hidden layer with sigmoids."""
    return Task(stack(64, 64, 64, 10, act=nn.Sigmoid), optimizer=adam(3e-3))


@healthy
def regression() -> Task:
    teacher = torch.randn(12, 3, generator=random(0))

    def batch(step: int) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(64, 12, generator=random(step))
        return inputs, torch.sin(inputs @ teacher * 0.5)

    return Task(stack(12, 64, 64, 3, act=nn.SiLU), batch, mse, optimizer=sgd(0.1))


def mse(net: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(net(batch[0]).float(), batch[1])


@healthy
def regression_units() -> Task:
    """Targets in the hundreds, as of prices."""
    base = regression()

    def batch(step: int) -> tuple[Tensor, Tensor]:
        inputs, target = base.batch(step)
        return inputs, 200 * target

    return Task(base.net, batch, lambda net, got: F.l1_loss(net(got[0]), got[1]), optimizer=adam(1e-2))


@healthy
def siren() -> Task:
    def batch(step: int) -> tuple[Tensor, Tensor]:
        at = torch.rand(128, 2, generator=random(step)) * 2 - 1
        return at, torch.sin(6 * at[:, :1]) * torch.cos(4 * at[:, 1:])

    return Task(Siren(), batch, mse, optimizer=adam(3e-4))


@healthy
def cnn_cosine() -> Task:
    net = nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 16, 3, padding=1),
            bn1=nn.BatchNorm2d(16),
            act1=nn.ReLU(),
            conv2=nn.Conv2d(16, 32, 3, padding=1),
            bn2=nn.BatchNorm2d(32),
            act2=nn.ReLU(),
            pool=nn.MaxPool2d(2),
            conv3=nn.Conv2d(32, 32, 3, padding=1),
            act3=nn.ReLU(),
            flat=nn.Flatten(),
            head=nn.Linear(512, 10),
        )
    )
    schedule = lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 120)  # noqa: E731
    return Task(net, images, optimizer=sgd(0.03, weight_decay=1e-4), schedule=schedule)


@healthy
def cnn_accumulated() -> Task:
    task = cnn_cosine()
    return Task(task.net, images, optimizer=adam(2e-3), trainer={"accumulate_grad_batches": 2}, steps=80)


@healthy
def resnet_sgd() -> Task:
    return Task(ResNet(), images, optimizer=sgd(0.05))


@healthy
def resnet_groupnorm_bf16() -> Task:
    return Task(
        ResNet(norm=lambda width: nn.GroupNorm(4, width)),
        images,
        optimizer=adam(1e-3, weight_decay=0.01),
        trainer={"precision": "bf16-mixed"},
    )


@healthy
def unet() -> Task:
    def batch(step: int) -> tuple[Tensor, Tensor]:
        clean, _ = images(step, 16)
        return clean + 0.5 * torch.randn(clean.shape, generator=random(step)), clean

    return Task(UNet(), batch, mse, optimizer=adam(2e-3))


@healthy
def autoencoder() -> Task:
    net = stack(64, 48, 8, 48, 64)
    return Task(net, digits, lambda net, got: F.mse_loss(net(got[0]), got[0]), optimizer=adam(2e-3))


@healthy
def variational() -> Task:
    def loss(net: nn.Module, got: Any) -> Tensor:
        output, mean, log_variance = net(got[0])
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
        total: Tensor = F.mse_loss(output, got[0], reduction="none").sum(1).mean() + 0.5 * divergence
        return total

    return Task(Variational(), digits, loss, optimizer=adam(2e-3))


class Adversarial(Task):
    """A GAN with two optimizers, optimized by hand."""

    def __init__(self) -> None:
        generator = stack(16, 64, 64, 64)
        net = nn.ModuleDict({"generator": generator, "critic": Critic()})
        super().__init__(net, digits)
        self.automatic_optimization = False
        self.detached = False  # a planted fault
        self.ours: Any = net

    def training_step(self, batch: Any, index: int) -> None:  # type: ignore[override]  # optimized by hand
        if index in self.events:
            self.events[index]()
        real, _ = batch
        both: Any = self.optimizers()
        first, second = both
        noise = torch.randn(len(real), 16, generator=random(index))
        fake = self.ours["generator"](noise)
        critic = F.softplus(-self.ours["critic"](real)).mean() + F.softplus(self.ours["critic"](fake.detach())).mean()
        second.zero_grad()
        self.manual_backward(critic)
        second.step()
        fooled = F.softplus(-self.ours["critic"](fake.detach() if self.detached else fake)).mean()
        first.zero_grad()
        self.manual_backward(fooled)
        first.step()
        self.losses.append(critic.item())

    def validation_step(self, batch: Any, index: int) -> None:
        self.ours["critic"](batch[0])

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.ours[name].parameters(), 1e-3, (0.5, 0.99)) for name in ("generator", "critic")]


@healthy
def adversarial() -> Task:
    return Adversarial()


@healthy
def mixture_of_experts() -> Task:
    return Task(MixtureOfExperts(), digits, optimizer=adam(2e-3))


@healthy
def message_passing() -> Task:
    def batch(step: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        nodes = torch.randn(24, 8, generator=random(step))
        near = (torch.rand(24, 24, generator=random(step + 9)) < 0.2).float() + torch.eye(24)
        near = near / near.sum(1, keepdim=True)
        return (nodes, near), (near @ nodes).sum(1).gt(0).long()

    loss = lambda net, got: F.cross_entropy(net(*got[0]), got[1])  # noqa: E731
    return Task(GraphNet(), batch, loss, optimizer=adam(5e-3))


@healthy
def diffusion() -> Task:
    def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
        clean, _ = digits(step, 64)
        time = torch.rand(64, 1, generator=random(step))
        noise = torch.randn(clean.shape, generator=random(step + 3))
        return (1 - time).sqrt() * clean + time.sqrt() * noise, time, noise

    loss = lambda net, got: F.mse_loss(net(got[0], got[1]), got[2])  # noqa: E731
    return Task(Denoiser(), batch, loss, optimizer=adam(2e-3))


@healthy
def lora() -> Task:
    net = stack(64, 64, 64, 64, 10)
    task = Task(net, optimizer=sgd(0.05))
    optimizer = torch.optim.Adam(net.parameters(), 2e-3)
    for step in range(60):  # the "pretraining"
        optimizer.zero_grad()
        classify(net, digits(step)).backward()
        optimizer.step()
    net.requires_grad_(False)
    for name in ("fc1", "fc2", "fc3"):
        setattr(net, name, LoRA(getattr(net, name)))
    task.optimizer = adam(1e-3)
    return task


@healthy
def siamese() -> Task:
    def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
        one, first = digits(step)
        other, second = digits(step + 5_000)
        return one, other, (first == second).float()

    def loss(net: Any, got: Any) -> Tensor:
        distance = (net(got[0]) - net(got[1])).norm(dim=1)
        mean: Tensor = (got[2] * distance**2 + (1 - got[2]) * F.relu(1 - distance) ** 2).mean()
        return mean

    return Task(stack(64, 64, 64, 16), batch, loss, optimizer=adam(1e-3))


@healthy
def mixer() -> Task:
    return Task(Mixer(), images, optimizer=adam(2e-3))


@healthy
def vision_transformer() -> Task:
    return Task(VisionTransformer(), images, optimizer=adam(1e-3, weight_decay=0.05), schedule=warm)


@healthy
def q_learning() -> Task:
    """A net with a slowly following copy, which gets no gradients."""

    class QTask(Task):
        def on_train_batch_end(self, *_: Any) -> None:
            with torch.no_grad():
                for one, other in zip(net.slow.parameters(), net.fast.parameters(), strict=True):
                    one.lerp_(other, 0.05)

    def batch(step: int) -> Any:
        state = torch.randn(64, 6, generator=random(step))
        return state, torch.randint(0, 4, (64,), generator=random(step)), state.roll(1, 1)

    def loss(net: Any, got: Any) -> Tensor:
        state, action, after = got
        with torch.no_grad():
            target = state[:, 0] + 0.9 * net.slow(after).max(1).values
        return F.smooth_l1_loss(net.fast(state).gather(1, action[:, None])[:, 0], target)

    net: Any = Two(stack(6, 64, 64, 4), stack(6, 64, 64, 4))
    task = QTask(net, batch, loss, optimizer=adam(1e-3))
    task.groups = lambda: list(net.fast.parameters())
    return task


@healthy
def factorization() -> Task:
    """Embeddings of users and items, of which a batch uses few rows."""

    class Factors(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.users, self.items = nn.Embedding(500, 16), nn.Embedding(300, 16)
            self.out = nn.Linear(16, 1)

        def forward(self, pair: Tensor) -> Tensor:
            out: Tensor = self.out(self.users(pair[:, 0]) * self.items(pair[:, 1]))
            return out

    def batch(step: int) -> tuple[Tensor, Tensor]:
        pair = torch.randint(0, 300, (32, 2), generator=random(step))
        return pair, ((pair.sum(1) % 7).float()[:, None] - 3) / 2

    return Task(Factors(), batch, mse, optimizer=adam(5e-3))
