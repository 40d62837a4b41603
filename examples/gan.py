"""Record both networks of a GAN, which is trained with manual optimization.

Run it with::

    python examples/gan.py [folder for the results, by default lightning_logs] [steps]
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


class GAN(LightningModule):
    """Makes images of digits ``[batch, 64]`` from noise ``[batch, 16]``."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid())
        self.critic = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Train the critic on real and made images, then the generator."""
        generator_optimizer, critic_optimizer = self.optimizers()  # type: ignore[attr-defined]  # a list of two
        real = batch[0].flatten(1)
        fake = self.generator(torch.randn(len(real), 16))
        critic_loss = F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(fake.detach())).mean()
        critic_optimizer.zero_grad()
        self.manual_backward(critic_loss)
        critic_optimizer.step()

        generator_loss = F.softplus(-self.critic(fake)).mean()
        generator_optimizer.zero_grad()
        self.manual_backward(generator_loss)
        generator_optimizer.step()
        self.log_dict({"critic_loss": critic_loss, "generator_loss": generator_loss}, prog_bar=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return one Adam for each network."""
        return [torch.optim.Adam(net.parameters(), lr=1e-3) for net in (self.generator, self.critic)]


def main(folder: Path, steps: int = 200) -> Path:
    """Train, print the verdict, and return the folder of the run."""
    seed_everything(7, verbose=False)
    trainer = Trainer(
        max_steps=2 * steps,  # Lightning counts the steps of both optimizers
        accelerator="cpu",
        log_every_n_steps=10,
        logger=TensorBoardLogger(folder, name="gan"),
        callbacks=[ActivationRecorder(per_call=True), GradientRecorder(), progress_bar()],
        enable_model_summary=False,
    )
    trainer.fit(GAN(), digits())
    log_dir = Path(str(trainer.log_dir))
    print_verdict("The critic is called three times in a step, and each call has a row on the page.", log_dir)
    return log_dir


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "lightning_logs"), *map(int, sys.argv[2:]))
