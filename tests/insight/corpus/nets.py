"""The nets of the corpus."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Residual(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, width: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = norm(width)
        self.act = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = norm(width)
        self.keep = 1.0

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.act(self.keep * inputs + self.norm2(self.conv2(self.act(self.norm1(self.conv1(inputs))))))
        return out


class ResNet(nn.Module):
    """Three residual blocks whose ReLU is called twice."""

    def __init__(self, width: int = 16, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.Sequential(*(Residual(width, norm) for _ in range(3)))
        self.head = nn.Linear(width, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(self.stem(inputs)).mean((2, 3)))
        return out


class UNet(nn.Module):
    """Two levels with skip connections."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.middle = nn.Conv2d(32, 32, 3, padding=1)
        self.up2, self.up1 = nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(32, 16, 2, 2)
        self.merge2, self.out = nn.Conv2d(48, 32, 3, padding=1), nn.Conv2d(32, 1, 3, padding=1)
        self.pool, self.act = nn.MaxPool2d(2), nn.SiLU()

    def forward(self, inputs: Tensor) -> Tensor:
        one = self.act(self.down1(inputs))
        two = self.act(self.down2(self.pool(one)))
        low = self.act(self.middle(self.pool(two)))
        two = self.act(self.merge2(torch.cat([self.up2(low), two], 1)))
        out: Tensor = self.out(torch.cat([self.up1(two), one], 1))
        return out


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(64, 8), nn.Linear(64, 8)
        self.decoder = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encoder(inputs)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        sample = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(sample), mean, log_variance


class Critic(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))


class Recurrent(nn.Module):
    """A recurrent net and a classifier of its last output."""

    def __init__(self, kind: Any, bidirectional: bool = False, layers: int = 1) -> None:
        super().__init__()
        self.rnn = kind(4, 32, layers, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(64 if bidirectional else 32, 4)

    def forward(self, series: Tensor) -> Tensor:
        out: Tensor = self.head(self.rnn(series)[0].mean(1))
        return out


class Seq2Seq(nn.Module):
    """Two GRUs with attention between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 32)
        self.encoder, self.decoder = nn.GRU(32, 32, batch_first=True), nn.GRU(32, 32, batch_first=True)
        self.weights = nn.Softmax(-1)
        self.head = nn.Linear(64, 30)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, state = self.encoder(self.embed(source))
        output, _ = self.decoder(self.embed(target.roll(1, 1)), state)
        weights = self.weights(output @ memory.transpose(1, 2) / math.sqrt(32))
        out: Tensor = self.head(torch.cat([output, weights @ memory], -1))
        return out


class Attention(nn.Module):
    """Self-attention with a softmax module."""

    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.softmax = nn.Softmax(-1)
        self.out = nn.Linear(width, width)
        self.heads, self.causal = heads, causal

    def forward(self, inputs: Tensor) -> Tensor:
        size, length, width = inputs.shape
        query, key, value = (
            each(inputs).view(size, length, self.heads, -1).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(2, 3) / math.sqrt(width // self.heads)
        if self.causal:
            scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
        out: Tensor = self.out((self.softmax(scores) @ value).transpose(1, 2).reshape(size, length, width))
        return out


class Block(nn.Module):
    """A transformer block with normalization before each branch."""

    def __init__(self, width: int, heads: int = 4, dropout: float = 0.1, causal: bool = True) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads, causal)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)
        self.keep = 1.0
        self.branch = 1.0

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.keep * inputs + self.branch * self.dropout(self.attention(self.norm1(inputs)))
        out: Tensor = hidden + self.branch * self.dropout(self.mlp(self.norm2(hidden)))
        return out


class VisionTransformer(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, 32, 2, 2)
        self.position = nn.Parameter(0.02 * torch.randn(16, 32))
        self.blocks = nn.Sequential(*(Block(32, causal=False) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.patch(inputs).flatten(2).transpose(1, 2) + self.position
        out: Tensor = self.head(self.norm(self.blocks(hidden)).mean(1))
        return out


class MixerBlock(nn.Module):
    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across = nn.Sequential(nn.Linear(patches, 32), nn.GELU(), nn.Linear(32, patches))
        self.within = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs + self.across(self.norm1(inputs).transpose(1, 2)).transpose(1, 2)
        out: Tensor = hidden + self.within(self.norm2(hidden))
        return out


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, 32, 2, 2)
        self.blocks = nn.Sequential(*(MixerBlock(16, 32) for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.blocks(self.patch(inputs).flatten(2).transpose(1, 2))
        out: Tensor = self.head(self.norm(hidden).mean(1))
        return out


class MixtureOfExperts(nn.Module):
    """Four experts of which each sample uses the best two."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.act = nn.Linear(64, 32), nn.ReLU()
        self.router = nn.Linear(32, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32)) for _ in range(4))
        self.head = nn.Linear(32, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.act(self.stem(inputs))
        best, chosen = self.router(hidden).topk(2, 1)
        best = best.softmax(1)
        mixed = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            place, slot = (chosen == number).nonzero(as_tuple=True)
            if len(place):
                mixed = mixed.index_add(0, place, best[place, slot, None] * expert(hidden[place]))
        out: Tensor = self.head(hidden + mixed)
        return out


class GraphNet(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.layers = nn.ModuleList(nn.Linear(64, 32) for _ in range(layers))
        self.act = nn.ReLU()
        self.head = nn.Linear(32, 2)

    def forward(self, nodes: Tensor, near: Tensor) -> Tensor:
        hidden = self.embed(nodes)
        for layer in self.layers:
            hidden = hidden + self.act(layer(torch.cat([hidden, near @ hidden], 1)))
        out: Tensor = self.head(hidden)
        return out


class Denoiser(nn.Module):
    """Predicts the noise in an image from the image and the time."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 128))
        self.stem = nn.Linear(64, 128)
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(128) for _ in range(3))
        self.out = nn.Linear(128, 64)
        nn.init.zeros_(self.out.weight)

    def forward(self, inputs: Tensor, time: Tensor) -> Tensor:
        waves = time * torch.exp(torch.arange(8) * 0.7)
        hidden = self.stem(inputs) + self.time(torch.cat([waves.sin(), waves.cos()], 1))
        for layer, norm in zip(self.layers, self.norms, strict=True):
            hidden = hidden + F.silu(layer(norm(hidden)))
        out: Tensor = self.out(hidden)
        return out


class LoRA(nn.Module):
    """A frozen linear layer with a trainable product of two small ones, the second of which begins at zero."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.base(inputs) + 2 * self.up(self.down(inputs))
        return out


class Two(nn.Module):
    """Two nets of which the second follows the first."""

    def __init__(self, fast: nn.Module, slow: nn.Module) -> None:
        super().__init__()
        self.fast, self.slow = fast, slow


class Sine(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return torch.sin(inputs)


class Siren(nn.Sequential):
    """Linear layers with sines; the first one covers many periods."""

    def __init__(self) -> None:
        first = nn.Linear(2, 64)
        nn.init.uniform_(first.weight, -7.5, 7.5)
        layers: list[nn.Module] = [first, Sine()]
        for _ in range(2):
            layer = nn.Linear(64, 64)
            nn.init.uniform_(layer.weight, -math.sqrt(6 / 64), math.sqrt(6 / 64))
            layers += [layer, Sine()]
        super().__init__(*layers, nn.Linear(64, 1))
