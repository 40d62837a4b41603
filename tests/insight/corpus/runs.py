"""Trains the tasks with the recorders and writes their recordings.

``python -m tests.insight.corpus.runs FOLDER [PATTERN]`` writes one folder per task.
"""

from __future__ import annotations

import fnmatch
import hashlib
import sys
import time
import warnings
from pathlib import Path

from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger

from lightning_recorder import ActivationRecorder, GradientRecorder, GraphRecorder, Outputs, ParameterRecorder, Schedule
from tests.insight.corpus.faults import FAULTS
from tests.insight.corpus.task import HEALTHY, Task

__all__ = ["halves", "train"]


def halves(names: list[str]) -> tuple[list[str], list[str]]:
    """Split names into the half that thresholds are chosen on, and the half that they are tested on.

    The names are sorted by their SHA-256. The rule was fixed before any threshold was chosen.
    """
    names = sorted(names, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    return names[: len(names) // 2], names[len(names) // 2 :]


def train(task: Task, folder: Path) -> list[float]:
    """Train and record a task; return its losses."""
    outputs = Outputs(plots=False, dumps=False)
    recorders: list[Callback] = [
        ActivationRecorder(every_n_train_steps=10, schedule=Schedule(stages=("train", "validate")), outputs=outputs),
        GradientRecorder(every_n_train_steps=10, outputs=outputs),
        ParameterRecorder(every_n_train_steps=10, outputs=outputs),
        GraphRecorder(formats=()),  # no finding is about the picture, which takes longer than some trainings
    ]
    trainer = Trainer(
        logger=CSVLogger(folder, name="", version=""),
        accelerator="cpu",
        callbacks=recorders,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
        val_check_interval=0.5,
        max_epochs=1,
        **task.options,
    )
    trainer.fit(task)
    return task.losses


def main(folder: str, pattern: str = "*") -> None:
    warnings.simplefilter("ignore")
    tasks = {**HEALTHY, **{f"fault_{name}": fault.make for name, fault in FAULTS.items()}}
    for name in fnmatch.filter(tasks, pattern):
        if (Path(folder) / name / "recorder").exists():
            continue
        seed_everything(3, verbose=False)
        began = time.monotonic()
        try:
            losses = train(tasks[name](), Path(folder) / name)
        except Exception as error:  # noqa: BLE001 - the other tasks still run
            print(f"{name}: {type(error).__name__}: {error}", flush=True)  # noqa: T201 - a script
            continue
        tenth = max(len(losses) // 10, 1)
        first, last = (sum(part) / tenth for part in (losses[:tenth], losses[-tenth:]))
        print(f"{name}: {time.monotonic() - began:.1f} s, loss {first:.4g} to {last:.4g}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
