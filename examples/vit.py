"""Find the dead layer of a small vision transformer, in which one bias has a wrong first value.

Run it with::

    python examples/vit.py [folder for the results, by default lightning_logs] [steps]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from _terminal import print_verdict, progress_bar
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_recorder import ActivationRecorder, GradientRecorder, GraphRecorder


def digits() -> DataLoader[tuple[Tensor, ...]]:
    """Return batches of images ``[64, 1, 8, 8]`` between 0 and 1 and their digits ``[64]``."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    return DataLoader(TensorDataset(images, torch.tensor(data.target)), batch_size=64, shuffle=True)


class Block(nn.Module):
    """Attention and an MLP, each with a skip connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, num_heads=4, batch_first=True)
        self.norm2 = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.relu = nn.ReLU()
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Transform tokens ``[batch, tokens, width]`` and keep their shape."""
        inner = self.norm1(x)
        x = x + self.attention(inner, inner, inner, need_weights=False)[0]
        out: Tensor = x + self.narrow(self.relu(self.widen(self.norm2(x))))
        return out


class ViT(LightningModule):
    """Classifies images of digits as 16 patches."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, kernel_size=2, stride=2)
        self.positions = nn.Parameter(torch.randn(16, width) / 50)
        blocks = [Block(width) for _ in range(4)]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(width, 10)
        # The fault: no unit of this layer is ever positive, so the ReLU after it passes neither values nor gradients.
        nn.init.constant_(blocks[2].widen.bias, -20)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the cross-entropy loss of a batch of images and digits."""
        images, labels = batch
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        loss = F.cross_entropy(self.head(self.blocks(tokens).mean(dim=1)), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam with a constant learning rate."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main(folder: Path, steps: int = 200) -> Path:
    """Train, print the verdict, and return the folder of the run."""
    seed_everything(7, verbose=False)
    trainer = Trainer(
        max_steps=steps,
        accelerator="cpu",
        log_every_n_steps=10,
        logger=TensorBoardLogger(folder, name="vit"),
        callbacks=[GraphRecorder(), ActivationRecorder(), GradientRecorder(), progress_bar()],
        enable_model_summary=False,
    )
    trainer.fit(ViT(), digits())
    log_dir = Path(str(trainer.log_dir))
    print_verdict("The page shows blocks.2.relu, which is zero, beside the other three blocks.", log_dir)
    return log_dir


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "lightning_logs"), *map(int, sys.argv[2:]))
