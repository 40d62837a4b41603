"""Real trainings of models of several widths, in standard and in maximal-update parametrization."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_recorder import ActivationRecorder, Outputs

_BASE, _FEATURES, _CLASSES, _LENGTH = 64, 16, 8, 6


class _Wide(LightningModule):
    """Base of the models: SGD or Adam with the learning rates of the parametrization.

    In maximal-update parametrization (Yang et al. 2022, table 8), the learning rate of Adam for hidden and output
    weights and the output itself are divided by the width relative to a base width.
    """

    def __init__(self, width: int, *, mup: bool, lr: float) -> None:
        super().__init__()
        self.width, self.mup, self.lr = width, mup, lr

    @property
    def ratio(self) -> float:
        return self.width / _BASE if self.mup else 1.0

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    @override
    def configure_optimizers(self) -> Any:
        groups = [
            {
                "params": [parameter],
                # Hidden and output weights have an input dimension that grows with the width.
                "lr": self.lr / self.ratio if parameter.dim() > 1 and parameter.shape[1] >= self.width else self.lr,
            }
            for parameter in self.parameters()
        ]
        return torch.optim.Adam(groups, lr=self.lr)


class Mlp(_Wide):
    """Four linear layers with ReLU."""

    def __init__(self, width: int, **options: Any) -> None:
        super().__init__(width, **options)
        self.stem, self.act = nn.Linear(_FEATURES, width), nn.ReLU()
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = _Readout(width, self.ratio)
        for layer in (self.stem, *self.hidden):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.stem(x.mean(1)))
        for layer in self.hidden:
            x = self.act(layer(x))
        output: Tensor = self.head(x)
        return output


class _Readout(nn.Module):
    """A linear layer whose output is divided by the width relative to the base width."""

    def __init__(self, width: int, ratio: float) -> None:
        super().__init__()
        self.linear, self.ratio = nn.Linear(width, _CLASSES, bias=False), ratio
        nn.init.normal_(self.linear.weight, std=(ratio / width) ** 0.5)

    @override
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x / self.ratio)
        return output


class Transformer(_Wide):
    """Two pre-norm blocks with one head of attention, whose logits are divided by the width if ``mup``."""

    def __init__(self, width: int, **options: Any) -> None:
        super().__init__(width, **options)
        self.stem = nn.Linear(_FEATURES, width)
        self.blocks = nn.ModuleList(_Block(width, self.ratio) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), _Readout(width, self.ratio)

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        output: Tensor = self.head(self.norm(x).mean(1))
        return output


class _Block(nn.Module):
    def __init__(self, width: int, ratio: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.act, self.down = nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        self.scale = 1 / (width**0.5 * ratio**0.5)  # 1 / width, up to the base width

    @override
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        mixed = nn.functional.scaled_dot_product_attention(self.q(y), self.k(y), self.v(y), scale=self.scale)
        x = x + self.out(mixed)
        output: Tensor = x + self.down(self.act(self.up(self.norm2(x))))
        return output


def train_width(
    log_dir: Path, kind: type[_Wide], width: int, *, mup: bool, lr: float, seed: int = 0, steps: int = 5
) -> Path:
    """Train a model of a width and record the activations of every step; return the folder of the run."""
    seed_everything(seed, verbose=False)
    model = kind(width, mup=mup, lr=lr)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, _LENGTH, _FEATURES, generator=generator)
    y = torch.randint(0, _CLASSES, (32,), generator=generator)
    data = DataLoader(TensorDataset(x.repeat(steps, 1, 1), y.repeat(steps)), batch_size=32)
    outputs = Outputs(plots=False, dumps=False, findings=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=steps,
            logger=CSVLogger(log_dir.parent, name="", version=log_dir.name),
            callbacks=[ActivationRecorder(every_n_train_steps=1, outputs=outputs, strict=True)],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, data)
    return log_dir
