"""Train twice with different learning rates and say where the runs part.

Run it with::

    python examples/two_runs.py [folder for the results, by default lightning_logs] [steps]
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

from lightning_recorder import ActivationRecorder, GradientRecorder


def digits() -> DataLoader[tuple[Tensor, ...]]:
    """Return batches of images ``[64, 1, 8, 8]`` between 0 and 1 and their digits ``[64]``."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    return DataLoader(TensorDataset(images, torch.tensor(data.target)), batch_size=64, shuffle=True)


class Net(LightningModule):
    """Classifies digits with three layers."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        layers = [nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)]
        self.net = nn.Sequential(nn.Flatten(), *layers)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the cross-entropy loss of a batch of images and digits."""
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain gradient descent."""
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])


def train(folder: Path, lr: float, steps: int) -> Path:
    """Train from the same seed and return the folder of the run."""
    seed_everything(7, verbose=False)
    trainer = Trainer(
        max_steps=steps,
        accelerator="cpu",
        log_every_n_steps=10,
        logger=TensorBoardLogger(folder, name="two_runs"),
        callbacks=[ActivationRecorder(), GradientRecorder(), progress_bar()],
        enable_model_summary=False,
    )
    trainer.fit(Net(lr), digits())
    return Path(str(trainer.log_dir))


def main(folder: Path, steps: int = 100) -> tuple[Path, Path]:
    """Train twice, print the verdict, and return the folders of both runs."""
    runs = train(folder, 0.1, steps), train(folder, 0.2, steps)
    print_verdict("The page has both runs over each other, with two lines in each chart.", *runs)
    return runs


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "lightning_logs"), *map(int, sys.argv[2:]))
