"""Real trainings of a small transformer that differ from a reference in one thing, shared by the tests of ``diff``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_recorder import ActivationRecorder, GradientRecorder, GraphRecorder, Outputs, ParameterRecorder

_TOKENS, _LENGTH, _WIDTH, _CLASSES = 32, 8, 16, 4


@dataclass(frozen=True)
class Twin:
    """The settings of a training; the defaults are the reference."""

    seed: int = 0
    dropout_seed: int = 5
    lr: float = 1e-3
    weight_decay: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.999)
    optimizer: str = "AdamW"
    activation: Callable[[], nn.Module] = nn.GELU
    dropout: float = 0.1
    depth: int = 2
    blocks: str = "blocks"
    stem: str = "stem"
    eps: float = 1e-5
    initialize: Callable[[nn.Module], object] = lambda net: None
    precision: Any = "32-true"
    batch_size: int = 8
    shuffle: bool = False
    order: tuple[int, ...] = ()
    scale: float = 1.0
    accumulate: int = 1
    clip: float | None = None
    loss_factor: float = 1.0
    skips: bool = True
    shared_act: bool = False
    frozen: str = ""
    noise_from: int | None = None
    steps: int = 5
    schedule: bool = False
    no_decay: bool = False

    def but(self, **changes: Any) -> Twin:
        """Return the same settings with some changes."""
        return replace(self, **changes)


class _Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    @override
    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))
        output: Tensor = self.out(mixed)
        return output


class _Block(nn.Module):
    def __init__(self, twin: Twin, act: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(_WIDTH, eps=twin.eps) for _ in range(2))
        self.attention = _Attention(_WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH)
        self.act = act
        self.drop = nn.Dropout(twin.dropout)
        self.skips = twin.skips

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        y: Tensor = self.drop(self.down(self.act(self.up(self.norm2(x)))))
        return x + y if self.skips else y


class _Data(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, twin: Twin, size: int) -> None:
        generator = torch.Generator().manual_seed(11)
        self.x = twin.scale * torch.randn(size, _LENGTH, _TOKENS, generator=generator)
        self.y = torch.randint(0, _CLASSES, (size,), generator=generator)
        if twin.order:
            places = torch.arange(size)
            places[: len(twin.order)] = torch.tensor(twin.order)
            self.x, self.y = self.x[places], self.y[places]
        if twin.noise_from is not None:
            self.x[twin.noise_from :] += 0.01

    def __len__(self) -> int:
        return len(self.x)

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class Transformer(LightningModule):
    """A classifier of sequences with separate query, key and value projections."""

    def __init__(self, twin: Twin) -> None:
        super().__init__()
        self.twin = twin
        setattr(self, twin.stem, nn.Linear(_TOKENS, _WIDTH))
        act = twin.activation()
        acts = (act if twin.shared_act else twin.activation() for _ in range(twin.depth))
        setattr(self, twin.blocks, nn.ModuleList(_Block(twin, each) for each in acts))
        self.norm, self.head = nn.LayerNorm(_WIDTH, eps=twin.eps), nn.Linear(_WIDTH, _CLASSES)
        twin.initialize(self)
        if twin.frozen:
            self.get_submodule(twin.frozen).requires_grad_(False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = self.get_submodule(self.twin.stem)(x)
        for block in self.get_submodule(self.twin.blocks).children():
            x = block(x)
        output: Tensor = self.head(self.norm(x).mean(1))
        return output

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return self.twin.loss_factor * nn.functional.cross_entropy(self(x), y)

    @override
    def configure_optimizers(self) -> Any:
        twin = self.twin
        adam = {} if twin.optimizer == "SGD" else {"betas": twin.betas}
        kind = getattr(torch.optim, twin.optimizer)
        parameters: Any = self.parameters()
        if twin.no_decay:
            groups = [
                [each for each in self.parameters() if (each.dim() > 1) == is_decayed] for is_decayed in (True, False)
            ]
            parameters = [{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}]
        optimizer = kind(parameters, lr=twin.lr, weight_decay=twin.weight_decay, **adam)
        if twin.schedule:
            decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 2 else 0.5)
            return [optimizer], [{"scheduler": decay, "interval": "step"}]
        return optimizer


def quiet_recorders() -> list[Callback]:
    """Return the default recorders on every step, without pictures and dumps."""
    outputs = Outputs(plots=False, dumps=False, findings=False)
    kinds = ActivationRecorder, GradientRecorder, ParameterRecorder
    recorders = [kind(every_n_train_steps=1, outputs=outputs, strict=True) for kind in kinds]
    return [GraphRecorder(formats=(), strict=True), *recorders]


def train(log_dir: Path, twin: Twin = Twin()) -> Path:
    """Train with the settings and record every step; return the folder of the run."""
    seed_everything(twin.seed, verbose=False)
    model = Transformer(twin)
    torch.manual_seed(twin.dropout_seed)  # the same dropout and order, whatever the model has drawn
    steps = twin.steps * twin.accumulate
    data = DataLoader(_Data(twin, twin.batch_size * steps), batch_size=twin.batch_size, shuffle=twin.shuffle)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=twin.steps,
            max_epochs=1,
            precision=twin.precision,
            accumulate_grad_batches=twin.accumulate,
            gradient_clip_val=twin.clip,
            logger=CSVLogger(log_dir.parent, name="", version=log_dir.name),
            callbacks=quiet_recorders(),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, data)
    return log_dir
