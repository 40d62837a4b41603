"""Train a small convolutional network on real images of digits and record it.

The 1,797 images are the digits data set that is included in scikit-learn. Takes about half a minute on two CPU cores::

    python examples/digits.py [folder for the results, by default lightning_logs]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from _terminal import print_verdict, progress_bar
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

from lightning_recorder import ActivationRecorder, GradientRecorder, GraphRecorder, Outputs


class ResidualBlock(nn.Module):
    """Two convolutions with a skip connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Transform feature maps and keep their shape."""
        inner = self.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(inner)))


class Encoder(nn.Module):
    """Encodes 8×8 images as vectors of 32 features."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.blocks = nn.Sequential(*[ResidualBlock(16) for _ in range(3)])
        self.pool = nn.MaxPool2d(2)
        self.widen = nn.Conv2d(16, 32, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Encode images ``[batch, 1, 8, 8]`` as features ``[batch, 32]``."""
        x = self.pool(self.blocks(self.stem(x)))
        return F.relu(self.widen(x)).mean(dim=(2, 3))


class Digits(LightningModule):
    """Classifies images of the ten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits ``[batch, 10]`` for images ``[batch, 1, 8, 8]``."""
        logits: Tensor = self.head(self.dropout(self.encoder(images)))
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the cross-entropy loss of a batch of images and digits."""
        images, digits = batch
        loss = F.cross_entropy(self(images), digits)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the fraction of correctly classified digits."""
        images, digits = batch
        accuracy = (self(images).argmax(dim=1) == digits).float().mean()
        self.log("val_accuracy", accuracy, prog_bar=True, batch_size=len(digits))

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Return Adam with a one-cycle learning rate, so that the last epochs are stable."""
        optimizer = torch.optim.Adam(self.parameters())
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main(folder: Path) -> float:
    """Train, print the verdict, and return the accuracy on the 360 held-out images."""
    print("Training a small convolutional network on 1,437 images of digits for 12 epochs, with its execution graph,")
    print("activations and gradients recorded. This takes about half a minute on two CPU cores.", flush=True)
    seed_everything(7, verbose=False)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    train, held_out = random_split(TensorDataset(images, torch.tensor(digits.target)), [1437, 360])

    trainer = Trainer(
        max_epochs=12,
        accelerator="cpu",
        log_every_n_steps=10,
        logger=TensorBoardLogger(folder, name="digits"),
        callbacks=[
            GraphRecorder(),
            ActivationRecorder(outputs=Outputs(report=True)),
            GradientRecorder("encoder.**"),
            progress_bar(),
        ],
        enable_model_summary=False,
    )
    trainer.fit(Digits(), DataLoader(train, batch_size=64, shuffle=True), DataLoader(held_out, batch_size=360))

    accuracy = float(trainer.callback_metrics["val_accuracy"])
    log_dir = Path(str(trainer.log_dir))
    print(f"\nvalidation accuracy  {accuracy:.1%}")
    print(f"picture of the graph {log_dir / 'recorder' / 'graph.svg'}")
    for dump in sorted(log_dir.glob("checkpoints/*.safetensors")):
        print(f"dump                 {dump}")
    print_verdict("The page shows the graph and the history of every layer.", log_dir)
    return accuracy


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("lightning_logs"))
