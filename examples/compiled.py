"""Record a model whose network is compiled with torch.compile.

Run it with::

    python examples/compiled.py [folder for the results, by default lightning_logs] [steps]
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


class Compiled(LightningModule):
    """Classifies digits with a compiled network."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.net = torch.compile(net, backend=backend)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the cross-entropy loss of a batch of images and digits."""
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam with a constant learning rate."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main(folder: Path, steps: int = 200, backend: str = "inductor") -> Path:
    """Train, print the verdict, and return the folder of the run."""
    seed_everything(7, verbose=False)
    trainer = Trainer(
        max_steps=steps,
        accelerator="cpu",
        log_every_n_steps=10,
        logger=TensorBoardLogger(folder, name="compiled"),
        # Recorded steps run a second compiled graph, which contains the recording.
        callbacks=[ActivationRecorder(), GradientRecorder(), progress_bar()],
        enable_model_summary=False,
    )
    trainer.fit(Compiled(backend), digits())
    log_dir = Path(str(trainer.log_dir))
    print_verdict("The page shows the layers inside the compiled network like any others.", log_dir)
    return log_dir


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "lightning_logs"), int(sys.argv[2]) if len(sys.argv) > 2 else 200)
