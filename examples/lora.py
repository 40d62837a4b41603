"""Fine-tune a frozen network with LoRA, and see which layers the adapters change.

Run it with::

    python examples/lora.py [folder for the results, by default lightning_logs] [steps]
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

from lightning_recorder import ActivationRecorder, ParameterRecorder


def digits() -> DataLoader[tuple[Tensor, ...]]:
    """Return batches of images ``[64, 1, 8, 8]`` between 0 and 1 and their digits ``[64]``."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    return DataLoader(TensorDataset(images, torch.tensor(data.target)), batch_size=64, shuffle=True)


class LoRA(nn.Module):
    """A frozen linear layer plus a trained product of two narrow matrices."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``[batch, in_features]`` to ``[batch, out_features]``."""
        out: Tensor = self.layer(x) + self.up(self.down(x))
        return out


class FineTuned(LightningModule):
    """Classifies digits with frozen layers and trained adapters."""

    def __init__(self) -> None:
        super().__init__()
        layers = [LoRA(nn.Linear(64, 64)), nn.ReLU(), LoRA(nn.Linear(64, 64)), nn.ReLU(), LoRA(nn.Linear(64, 10))]
        self.net = nn.Sequential(nn.Flatten(), *layers)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the cross-entropy loss of a batch of images and digits."""
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam over the adapters."""
        return torch.optim.Adam((p for p in self.parameters() if p.requires_grad), lr=1e-2)


def main(folder: Path, steps: int = 200) -> Path:
    """Train, print the verdict, and return the folder of the run."""
    seed_everything(7, verbose=False)
    trainer = Trainer(
        max_steps=steps,
        accelerator="cpu",
        log_every_n_steps=10,
        logger=TensorBoardLogger(folder, name="lora"),
        callbacks=[ActivationRecorder(), ParameterRecorder(["**.up", "**.down"]), progress_bar()],
        enable_model_summary=False,
    )
    trainer.fit(FineTuned(), digits())
    log_dir = Path(str(trainer.log_dir))
    print_verdict("The page shows the updates of net.1.up, net.3.up and net.5.up: which adapter learns most.", log_dir)
    return log_dir


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "lightning_logs"), *map(int, sys.argv[2:]))
