"""The models whose training step is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel


@dataclass
class Case:
    """A model with a function that gives its loss."""

    name: str
    module: nn.Module
    loss: Callable[[], Tensor]


class Block(nn.Module):
    """ResNet's basic block."""

    def __init__(self, taken: int, given: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(taken, given, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(given)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(given, given, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(given)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or taken != given:
            self.shortcut = nn.Sequential(nn.Conv2d(taken, given, 1, stride, bias=False), nn.BatchNorm2d(given))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        given: Tensor = self.relu(inner + self.shortcut(x))
        return given


def mlp() -> Case:
    """784-512-512-10 with a batch of 128."""
    net = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    images, classes = torch.randn(128, 784), torch.randint(0, 10, (128,))
    return Case("MLP", net, lambda: F.cross_entropy(net(images), classes))


def resnet() -> Case:
    """A ResNet-18 on 16 images of 3×64×64."""
    widths = [
        (64, 64, 1),
        (64, 64, 1),
        (64, 128, 2),
        (128, 128, 1),
        (128, 256, 2),
        (256, 256, 1),
        (256, 512, 2),
        (512, 512, 1),
    ]
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    net = nn.Sequential(
        *stem, *[Block(*each) for each in widths], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)
    )
    images, classes = torch.randn(16, 3, 64, 64), torch.randint(0, 10, (16,))
    return Case("ResNet-18", net, lambda: F.cross_entropy(net(images), classes))


def gpt2() -> Case:
    """GPT-2 with 6 layers of width 384 on 4 texts of 256 tokens."""
    config = GPT2Config(
        vocab_size=1000, n_positions=256, n_embd=384, n_layer=6, n_head=6, bos_token_id=0, eos_token_id=0
    )
    net = GPT2LMHeadModel(config)
    tokens = torch.randint(0, 1000, (4, 256))

    def loss() -> Tensor:
        value: Tensor = net(input_ids=tokens, labels=tokens).loss
        return value

    return Case("GPT-2", net, loss)


CASES = (mlp, resnet, gpt2)
