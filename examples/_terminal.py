"""Console output of the examples: progress, the verdict, and the command that opens the page."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, TQDMProgressBar

from lightning_recorder.commands import main as lightning_recorder


class EpochLines(ProgressBar):
    """Prints one line per epoch, for log files, in which a progress bar would add a line for each update."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the epoch and the metrics of the progress bar."""
        metrics = {name: value for name, value in self.get_metrics(trainer, pl_module).items() if name != "v_num"}
        shown = [f"epoch {trainer.current_epoch + 1}", *(f"{name} {_short(value)}" for name, value in metrics.items())]
        print("  ".join(shown), flush=True)


def _short(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def progress_bar() -> ProgressBar:
    """Return Lightning's progress bar, or :class:`EpochLines` if the output is not a terminal."""
    return TQDMProgressBar() if sys.stdout.isatty() else EpochLines()


def print_verdict(look_at: str, *runs: Path) -> None:
    """Print what ``doctor`` says of a run, or ``diff`` of two, and the command that opens the page.

    Args:
        look_at: A sentence about what the page shows.
        runs: The folders of the runs.
    """
    paths = [_shortest(run) for run in runs]
    print("\nThe verdict:", flush=True)
    lightning_recorder(["diff" if len(runs) > 1 else "doctor", *paths])
    # `python -m` works everywhere. The scripts are in the environment of nox, which may not be on the user's PATH.
    command = _command(_shortest(Path(sys.executable)), "-m", "lightning_recorder", "view", *paths)
    print(f"\n{look_at} To open the page:\n  {command}")


def _shortest(path: Path) -> str:
    """Return a path relative to the working folder of the user's shell if that is shorter, otherwise the full path."""
    # Links are not resolved: the python of an environment is a link to a python outside of that environment.
    whole = Path.cwd() / path
    if not Path(os.environ.get("PWD", ".")).samefile("."):  # `nox -f` runs this in a different folder from the shell's
        return str(whole)
    try:
        relative = os.path.relpath(whole)
    except ValueError:  # another drive
        return str(whole)
    if whole.is_file() and os.sep not in relative:  # a program without a folder would be looked up on PATH
        relative = os.path.join(os.curdir, relative)  # noqa: PTH118 - Path would drop the leading dot
    return min(relative, str(whole), key=len)


def _command(*words: str) -> str:
    return subprocess.list2cmdline(words) if sys.platform == "win32" else shlex.join(words)
