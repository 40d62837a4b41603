"""Train a small GPT-2 on the help texts of Python and record it.

The texts are those of ``help()`` in the standard library. The model is built from a configuration, so nothing is
downloaded. It reads the texts byte by byte, and its output is a ``ModelOutput`` that contains a cache object and the
logits. Runs in under a minute on two CPU cores::

    python examples/transformer.py [folder for the results, by default lightning_logs]
"""

from __future__ import annotations

import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
from _terminal import print_verdict, progress_bar
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_recorder import ActivationRecorder, GradientRecorder, GraphRecorder, ParameterRecorder

TOKENS = 64
BYTES = 60_000  # of about half a million


class ByteGPT(LightningModule):
    """Predicts the next byte of a text."""

    def __init__(self) -> None:
        super().__init__()
        config = GPT2Config(
            vocab_size=256, n_positions=TOKENS, n_embd=96, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0
        )
        self.gpt2 = GPT2LMHeadModel(config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the mean loss, in nats, of predicting each byte of ``[batch, tokens]`` from the previous bytes."""
        output = self.gpt2(input_ids=batch, labels=batch)
        loss: Tensor = output.loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW with a constant learning rate."""
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def windows(text: bytes) -> list[Tensor]:
    """Split the text into windows of equal length that overlap by half, each ``[tokens]`` int64."""
    data = torch.tensor(list(text))
    return [data[start : start + TOKENS] for start in range(0, len(data) - TOKENS, TOKENS // 2)]


def main(folder: Path, steps: int = 120) -> float:
    """Train, print the verdict, and return the loss of the last step in nats per byte."""
    print(f"Training a GPT-2 of four blocks for {steps} steps, with its blocks recorded.")
    print("This takes about half a minute on two CPU cores.", flush=True)
    seed_everything(7, verbose=False)
    text = "\n".join(topics.values()).encode()[:BYTES]
    trainer = Trainer(
        max_steps=steps,
        accelerator="cpu",
        log_every_n_steps=20,
        gradient_clip_val=1.0,  # some windows, such as lines of dashes, have a gradient that is many times as large
        logger=TensorBoardLogger(folder, name="transformer"),
        # Record the outputs of every block and of its leaves, the gradients of the parts of the attention, and the
        # update-to-weight ratios of the blocks.
        callbacks=[
            GraphRecorder(),
            ActivationRecorder(["**.ln_*", "**.h.*"]),
            GradientRecorder("**.attn.*"),
            ParameterRecorder("**.h.**", types="Conv1D", parts=["values", "updates"]),
            progress_bar(),
        ],
        enable_model_summary=False,
    )
    trainer.fit(ByteGPT(), DataLoader(windows(text), batch_size=16, shuffle=True, drop_last=True))  # type: ignore[arg-type]  # a list works as a dataset

    loss = float(trainer.callback_metrics["train_loss"])
    log_dir = Path(str(trainer.log_dir))
    print(f"\ntraining loss        {loss:.2f} nats per byte (5.55 without having learned anything)")
    print(f"picture of the graph {log_dir / 'recorder' / 'graph.svg'}")
    print_verdict("The page shows the graph, in which four equal blocks are drawn once.", log_dir)
    return loss


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "lightning_logs"), *map(int, sys.argv[2:]))
