"""Small programs of many kinds, healthy and with planted mistakes, that tests check before their training."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

ROWS = 12


@dataclass
class Program:
    """A model, its loaders and the arguments of its trainer."""

    model: LightningModule
    loader: Any
    validation: Any = None
    options: dict[str, Any] = field(default_factory=dict)


class Lit(LightningModule):
    """A net, a loss and an optimizer."""

    def __init__(self, net: nn.Module, loss: Callable[[Any, Any], Tensor], optimizer: Any = None) -> None:
        super().__init__()
        self.net, self._loss, self._optimizer = net, loss, optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._loss(self.net, batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self._loss(self.net, batch))

    def configure_optimizers(self) -> Any:
        return self._optimizer(self.net) if self._optimizer else torch.optim.Adam(self.net.parameters(), 1e-3)


def sgd(rate: float, **options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda net: torch.optim.SGD(net.parameters(), rate, **options)


def loader(*tensors: Tensor, rows: int = ROWS, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*tensors), batch_size=rows, **options)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def integers(high: int, *shape: int, seed: int = 1) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


class Function(nn.Module):
    """A module with children and any function as its forward."""

    def __init__(self, function: Callable[..., Any], **children: Any) -> None:
        super().__init__()
        self._function = function
        for name, each in children.items():
            setattr(self, name, each)

    def forward(self, *args: Any) -> Any:
        return self._function(self, *args)


# Classification.

COUNT = 24


def xent(net: Any, batch: Any) -> Any:
    return F.cross_entropy(net(batch[0]), batch[1])


def mlp(
    loss: Callable[..., Tensor] = xent, *, net: nn.Module | None = None, optimizer: Any = None, x: Any = None
) -> Program:
    net = net or nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return Program(Lit(net, loss, optimizer), loader(normal(COUNT, 8) if x is None else x, integers(4, COUNT)))


def cnn(
    last: nn.Module | None = None,
    *,
    batch_norm: Callable[[], nn.Module] = lambda: nn.BatchNorm2d(6),
    scale: float = 1.0,
) -> Program:
    body = [nn.Conv2d(3, 6, 3, padding=1), batch_norm(), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.2), nn.Flatten()]
    net = nn.Sequential(*body, nn.Linear(6 * 16, 4), last or nn.Identity())
    x = normal(COUNT, 3, 8, 8)
    return Program(Lit(net, xent), loader(x * scale, integers(4, COUNT)), loader(x, integers(4, COUNT)))


# Regression.


def mse(net: Any, batch: Any) -> Any:
    return F.mse_loss(net(batch[0]).squeeze(-1), batch[1])


def regression(
    loss: Callable[..., Tensor] = mse, *, optimizer: Any = None, scale: float = 1.0, net: Any = None
) -> Program:
    x = normal(COUNT, 5)
    y = (x[:, 0] - 2 * x[:, 1]).tanh() * scale
    net = net or nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
    return Program(Lit(net, loss, optimizer), loader(x, y))


# Language model.


class Causal(nn.Module):
    """A small transformer decoder."""

    def __init__(self, *, mask: int | None = 1, along: int = 1, softmax: int = -1, detach: bool = False) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(20, 16), nn.Parameter(normal(16, 16) * 0.02)
        self.qkv, self.out, self.head = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 20)
        self.norm = nn.LayerNorm(16)
        self.mask, self.along, self.softmax, self.detach = mask, along, softmax, detach

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        size = x.shape[self.along]
        place = self.place[:size]
        x = x + (place if self.along == 1 else place[:, None])
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / 4
        if self.mask is not None:
            above = torch.ones(ids.shape[1], ids.shape[1], device=ids.device).triu(self.mask).bool()
            scores = scores.masked_fill(above, -math.inf)
        x = x + self.out(scores.softmax(self.softmax) @ v)
        out: Tensor = self.head(x.detach() if self.detach else x)
        return out


def next_token(net: Any, batch: Any) -> Any:
    ids = batch[0]
    return F.cross_entropy(net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def language(loss: Callable[..., Tensor] = next_token, **options: Any) -> Program:
    return Program(Lit(Causal(**options), loss), loader(integers(20, COUNT, 9)))


# Sequences.


class Tagger(nn.Module):
    """A recurrent net with a class per sequence."""

    def __init__(
        self, kind: Any = nn.LSTM, *, batch_first: bool = True, reshape: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.rnn, self.head = kind(6, 12, batch_first=batch_first), nn.Linear(12, 3)
        self.reshape = reshape

    def forward(self, x: Tensor) -> Tensor:
        if self.reshape is not None:
            x = self.reshape(x)
        out: Tensor = self.head(self.rnn(x)[0][:, -1])
        return out


def sequences(**options: Any) -> Program:
    return Program(Lit(Tagger(**options), xent), loader(normal(COUNT, 10, 6), integers(3, COUNT)))


# Seq2seq.


class Seq2Seq(nn.Module):
    """A small encoder and decoder of torch."""

    def __init__(self, *, causal: bool = True, memory: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.body = nn.Transformer(16, 2, 1, 1, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 20)
        self.causal, self.memory = causal, memory

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1]) if self.causal else None
        src = self.embed(source) if self.memory else torch.zeros_like(self.embed(source))
        out: Tensor = self.head(self.body(src, self.embed(target), tgt_mask=mask))
        return out


def translate(net: Any, batch: Any) -> Any:
    source, target = batch
    return F.cross_entropy(net(source, target[:, :-1]).transpose(1, 2), target[:, 1:])


def seq2seq(loss: Callable[..., Tensor] = translate, **options: Any) -> Program:
    data = loader(integers(20, COUNT, 7), integers(20, COUNT, 8, seed=2))
    return Program(Lit(Seq2Seq(**options), loss), data)


# Several losses.


def detect(net: Any, batch: Any) -> Any:
    x, classes, boxes = batch
    features = net.body(x)
    return F.cross_entropy(net.classes(features), classes) + F.smooth_l1_loss(net.boxes(features), boxes)


def detection(loss: Callable[..., Tensor] = detect, *, optimizer: Any = None) -> Program:
    body = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten())
    net = Function(lambda self, x: x, body=body, classes=nn.Linear(128, 5), boxes=nn.Linear(128, 4))
    data = loader(normal(COUNT, 3, 8, 8), integers(5, COUNT), normal(COUNT, 4).sigmoid())
    return Program(Lit(net, loss, optimizer), data)


# VAE.


def elbo(net: Any, batch: Any) -> Any:
    x = batch[0]
    mean, log_var = net.encoder(x).chunk(2, -1)
    z = mean + torch.randn_like(mean) * (log_var / 2).exp()
    kl = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(1).mean()
    return F.mse_loss(net.decoder(z), x, reduction="sum") / len(x) + kl


def vae(loss: Callable[..., Tensor] = elbo, *, optimizer: Any = None, x: Any = None, decoder: Any = None) -> Program:
    encoder = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 6))
    decoder = decoder or nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 10))
    net = Function(lambda self, x: x, encoder=encoder, decoder=decoder)
    return Program(Lit(net, loss, optimizer), loader(normal(COUNT, 10) if x is None else x))


# GAN.


class Gan(LightningModule):
    """A generator and a discriminator with manual optimization."""

    def __init__(self, *, detached: bool = False, constant: bool = False, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6))
        self.critic = nn.Sequential(nn.Linear(6, 16), norm or nn.Identity(), nn.LeakyReLU(0.2), nn.Linear(16, 1))
        self.detached, self.constant = detached, constant

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        first, second = optimizers
        real = torch.zeros_like(batch[0]) if self.constant else batch[0]
        fake = self.generator(torch.randn(len(real), 4, device=self.device))
        scores = self.critic(fake.detach() if self.detached else fake)
        self.step(first, F.binary_cross_entropy_with_logits(scores, torch.ones_like(scores)))
        real_scores, fake_scores = self.critic(real), self.critic(fake.detach())
        loss = F.binary_cross_entropy_with_logits(real_scores, torch.ones_like(real_scores))
        self.step(second, loss + F.binary_cross_entropy_with_logits(fake_scores, torch.zeros_like(fake_scores)))

    def step(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(each.parameters(), 2e-4) for each in (self.generator, self.critic)]


def gan(**options: Any) -> Program:
    return Program(Gan(**options), loader(normal(COUNT, 6)))


# Contrastive.


def info_nce(net: Any, batch: Any) -> Any:
    x = batch[0]
    one, other = (F.normalize(net(x + 0.1 * torch.randn_like(x)), dim=-1) for _ in range(2))
    return F.cross_entropy(one @ other.T / 0.5, torch.arange(len(x), device=x.device))


def nt_xent(net: Any, batch: Any) -> Any:
    x = batch[0]
    both = F.normalize(net(torch.cat([x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)])), dim=-1)
    scores = (both @ both.T / 0.5).fill_diagonal_(-math.inf)
    return F.cross_entropy(scores, torch.arange(2 * len(x), device=x.device).roll(len(x)))


def contrastive(loss: Callable[..., Tensor] = info_nce, *, net: nn.Module | None = None) -> Program:
    net = net or nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
    return Program(Lit(net, loss), loader(normal(COUNT, 8), integers(3, COUNT)))


# Graphs.


class Gcn(nn.Module):
    """Two graph convolutions over dense adjacency matrices, ``[samples, nodes, nodes]``."""

    def __init__(self, *, along: int = 1, uses_graph: bool = True) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, 16), nn.Linear(16, 3)
        self.along, self.uses_graph = along, uses_graph

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        if not self.uses_graph:
            return self.two(self.one(x).relu()).mean(1)  # type: ignore[no-any-return]  # a tensor
        hidden = self.one(adjacency @ x).relu()
        weights = hidden.mean(-1, keepdim=True).softmax(self.along)
        return self.two(adjacency @ (weights * hidden)).mean(1)  # type: ignore[no-any-return]  # a tensor


def graph(loss: Callable[..., Tensor] | None = None, **options: Any) -> Program:
    edges = (normal(COUNT, 7, 7) > 0).float()
    data = loader(normal(COUNT, 7, 5), edges / edges.sum(-1, keepdim=True).clamp(min=1), integers(3, COUNT))
    loss = loss or (lambda net, batch: F.cross_entropy(net(batch[0], batch[1]), batch[2]))
    return Program(Lit(Gcn(**options), loss), data)


# Diffusion.


def denoise(net: Any, batch: Any) -> Any:
    x = batch[0]
    noise, time = torch.randn_like(x), torch.rand(len(x), 1, device=x.device)
    noisy = (1 - time).sqrt() * x + time.sqrt() * noise
    return F.mse_loss(net(torch.cat([noisy, time], 1)), noise)


def diffusion(loss: Callable[..., Tensor] = denoise, *, net: nn.Module | None = None, optimizer: Any = None) -> Program:
    net = net or nn.Sequential(nn.Linear(7, 32), nn.SiLU(), nn.Linear(32, 6))
    return Program(Lit(net, loss, optimizer), loader(normal(COUNT, 6)))


# Tabular.


class Tabular(nn.Module):
    """Embeddings of categories beside numbers."""

    def __init__(
        self, *, numbers: slice = slice(None), uses_categories: bool = True, norm: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(9, 4), norm or nn.BatchNorm1d(6)
        width = len(range(6)[numbers])
        self.body = nn.Sequential(nn.Linear(width + 4 * uses_categories, 16), nn.ReLU(), nn.Linear(16, 1))
        self.numbers, self.uses_categories = numbers, uses_categories

    def forward(self, numbers: Tensor, category: Tensor) -> Tensor:
        parts = [self.norm(numbers)[:, self.numbers]]
        if self.uses_categories:
            parts.append(self.embed(category))
        out: Tensor = self.body(torch.cat(parts, 1)).squeeze(1)
        return out


def binary(net: Any, batch: Any) -> Any:
    return F.binary_cross_entropy_with_logits(net(batch[0], batch[1]), batch[2])


def tabular(
    loss: Callable[..., Tensor] = binary, *, optimizer: Any = None, scale: float = 1.0, **options: Any
) -> Program:
    x, y = normal(COUNT, 6), (integers(2, COUNT, seed=4)).float()
    data = loader(x, integers(9, COUNT, seed=3), y)
    validation = loader(x * scale, integers(9, COUNT, seed=3), y)
    return Program(Lit(Tabular(**options), loss, optimizer), data, validation)


# Reinforcement.


def q_learning(net: Any, batch: Any) -> Any:
    state, action, reward, following = batch
    value = net.online(state).gather(1, action[:, None]).squeeze(1)
    with torch.no_grad():
        target = reward + 0.9 * net.target(following).max(1).values
    return F.smooth_l1_loss(value, target)


def policy_gradient(net: Any, batch: Any) -> Any:
    state, action, reward, _ = batch
    chosen = net.online(state).log_softmax(-1).gather(1, action[:, None]).squeeze(1)
    return -(chosen * (reward - reward.mean())).mean()


def reinforcement(loss: Callable[..., Tensor] = q_learning, *, optimizer: Any = None) -> Program:
    nets = [nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    net = Function(lambda self, x: x, online=nets[0], target=nets[1].requires_grad_(False))
    data = loader(normal(COUNT, 4), integers(3, COUNT), normal(COUNT, seed=5), normal(COUNT, 4, seed=6))
    return Program(Lit(net, loss, optimizer or (lambda net: torch.optim.Adam(net.online.parameters(), 1e-3))), data)
