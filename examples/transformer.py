"""Train a small GPT-2 on this repository's README and look inside while it trains.

The model is built from a configuration, so nothing is downloaded, and reads the text byte by byte. Its output is a
``ModelOutput`` that carries a cache object beside the logits. Runs in under a minute on two CPU cores::

    python examples/transformer.py [folder for the results, by default lightning_logs]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_recorder import ActivationRecorder, GradientRecorder, GraphRecorder, ParameterRecorder

TOKENS = 64


class ByteGPT(LightningModule):
    """Predicts the next byte of a text."""

    def __init__(self) -> None:
        super().__init__()
        config = GPT2Config(
            vocab_size=256, n_positions=TOKENS, n_embd=96, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0
        )
        self.gpt2 = GPT2LMHeadModel(config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The mean loss of predicting each byte of ``[batch, tokens]`` from those before it, in nats."""
        output = self.gpt2(input_ids=batch, labels=batch)
        loss: Tensor = output.loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW with a plain learning rate."""
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def windows(text: bytes) -> list[Tensor]:
    """Stretches of the text of equal length, half overlapping, ``[tokens]`` int64 each."""
    data = torch.tensor(list(text))
    return [data[start : start + TOKENS] for start in range(0, len(data) - TOKENS, TOKENS // 2)]


def main(folder: Path) -> float:
    """Train, say where the results lie, and give the loss of the last step in nats per byte."""
    seed_everything(7, verbose=False)
    text = (Path(__file__).parent.parent / "README.md").read_bytes()
    trainer = Trainer(
        max_steps=120,
        accelerator="cpu",
        log_every_n_steps=20,
        logger=TensorBoardLogger(folder, name="transformer"),
        # The output of every block beside those of its leaves, the gradients of the attention's parts, and how fast the
        # weights of the blocks change.
        callbacks=[
            GraphRecorder(),
            ActivationRecorder(["**.ln_*", "**.h.*"]),
            GradientRecorder("**.attn.*"),
            ParameterRecorder("**.h.**", types="Conv1D", parts=["values", "updates"]),
        ],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(ByteGPT(), DataLoader(windows(text), batch_size=16, shuffle=True, drop_last=True))  # type: ignore[arg-type]  # a list is a dataset

    loss = float(trainer.callback_metrics["train_loss"])
    log_dir = Path(str(trainer.log_dir))
    print(f"\ntraining loss        {loss:.2f} nats per byte (5.55 without having learned anything)")
    print(f"picture of the graph {log_dir / 'recorder' / 'graph.svg'}")
    print(f"\nlook at it with      tensorboard --logdir {folder}")
    return loss


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("lightning_logs"))
