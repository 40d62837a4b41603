"""Runs on small disks: ``unshare -rm python -m tests.callbacks.full_disk <folder>`` prints the results as JSON."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_recorder import (
    ActivationRecorder,
    GradientRecorder,
    GraphRecorder,
    MemorySink,
    Outputs,
    ParameterRecorder,
    TensorDumper,
)
from tests.callbacks.small import warnings_by

DISK_BYTES = 356 * 1024
LOWERED_BYTES = 100_000
STEPS = 60
LOGGERS: dict[str, Callable[[Path], Any]] = {
    "tensorboard": TensorBoardLogger,
    "csv": CSVLogger,
    "none": lambda folder: False,
}


class Net(LightningModule):
    """A model of three layers."""

    def __init__(self) -> None:
        super().__init__()
        seed_everything(1, verbose=False)
        self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


class Mounted(Callback):
    """The disk is read-only from one step on, until a later one."""

    def __init__(self, disk: Path, recorder: ActivationRecorder) -> None:
        self.disk, self.recorder = disk, recorder

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        mount = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs"]  # over the disk: files of it are open for writing
        command = {20: mount, 40: ["umount"]}.get(trainer.global_step)
        if command is not None:
            _ = self.recorder.latest  # waits for pending writes
            subprocess.run([*command, str(self.disk)], check=True)


class Neighbor(Callback):
    """Another program, which fills the disk at one step except for some bytes, and frees it at a later step."""

    def __init__(self, path: Path, recorder: ActivationRecorder, fills_at: int, frees_at: int, leaves: int) -> None:
        self.path, self.recorder, self.leaves = path, recorder, leaves
        self.fills_at, self.frees_at = fills_at, frees_at

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step in (self.fills_at, self.frees_at):
            _ = self.recorder.latest  # waits for pending writes
        if trainer.global_step == self.fills_at:
            fill(self.path, self.leaves)
        elif trainer.global_step == self.frees_at:
            self.path.unlink()


def fill(path: Path, leaves: int) -> None:
    """Fill the disk of a path except for some bytes."""
    free = shutil.disk_usage(path.parent).free - leaves
    path.write_bytes(bytes(max(0, free)))


def run(disk: Path, scenario: str) -> dict[str, Any]:
    """Run a scenario, with recorders if it has them, and return its result."""
    logger, kind = scenario.split("-")
    recorder = ActivationRecorder(every_n_train_steps=1, outputs=Outputs(plots=kind == "lowered"))
    sink = MemorySink()
    gradients = GradientRecorder(every_n_train_steps=1, sinks=[sink], outputs=Outputs(plots=False))
    callbacks: list[Callback] = [recorder, gradients, GraphRecorder(formats=())]
    if kind in ("bare", "barefull"):
        callbacks = []
    elif kind == "checkpoints":
        recorder = ActivationRecorder(every_n_train_steps=1, outputs=Outputs(dumps=["checkpoints"]))
        checkpoints = ModelCheckpoint(disk / "kept", every_n_train_steps=20, save_top_k=-1)
        callbacks = [recorder, gradients, checkpoints]
    elif kind == "neighbor":
        callbacks = [recorder, Neighbor(disk / "filler", recorder, 20, 40, LOWERED_BYTES)]
    elif kind == "late":
        callbacks.append(Neighbor(disk / "filler", recorder, 0, 40, 0))
    elif kind == "readonly":
        parameters = ParameterRecorder(every_n_train_steps=1, outputs=Outputs(report=True))
        callbacks += [Mounted(disk, recorder), TensorDumper("net.0", every_n_train_steps=1), parameters]
    elif kind == "enospc":
        callbacks.append(Neighbor(disk / "filler", recorder, 20, 40, 6_000))
    if kind in ("lowered", "neighbor"):
        os.environ["LIGHTNING_RECORDER_DISK_RESERVE"] = str(LOWERED_BYTES)
    if kind in ("enospc", "late", "readonly"):
        os.environ["LIGHTNING_RECORDER_DISK_RESERVE"] = "0"
    if kind in ("full", "barefull"):
        fill(disk / "filler", 0)
    model, error = Net(), ""
    trainer = Trainer(
        logger=LOGGERS[logger](disk),
        default_root_dir=disk,
        callbacks=callbacks,
        accelerator="cpu",
        max_epochs=1,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=kind == "checkpoints",
    )

    def fit() -> None:
        nonlocal error
        try:
            trainer.fit(model, DataLoader(TensorDataset(torch.ones(8 * STEPS, 8)), 8))
        except OSError as caught:
            error = f"{type(caught).__name__} {caught.errno}"

    warned = warnings_by(fit)
    os.environ.pop("LIGHTNING_RECORDER_DISK_RESERVE", None)
    return {
        "steps": trainer.global_step,
        "error": error,
        "warned": warned,
        "free": shutil.disk_usage(disk).free,
        "weights": [each.tolist() for each in model.parameters()],
        "recorded": len(sink.scalars.get("gradients/net.0/rms", {})),
    }


SCENARIOS = [
    *(f"{logger}-{kind}" for logger in ("tensorboard", "csv") for kind in ("bare", "default", "lowered")),
    *(f"{logger}-{kind}" for logger in ("csv", "none") for kind in ("barefull", "full")),
    *(f"tensorboard-{kind}" for kind in ("neighbor", "enospc")),
    "none-enospc",
    "none-late",
    "none-readonly",
    "none-checkpoints",
]


def main(folder: Path) -> None:
    """Run each scenario on its own disk, and copy the files that it leaves."""
    results = {}
    for scenario in SCENARIOS:
        disk = folder / "disk"
        disk.mkdir(exist_ok=True)
        size = DISK_BYTES * (10 if scenario.endswith("readonly") else 1)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)], check=True)
        try:
            results[scenario] = run(disk, scenario)
            shutil.copytree(disk, folder / scenario, ignore=shutil.ignore_patterns("filler"))
        finally:
            subprocess.run(["umount", str(disk)], check=True)
    (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
