"""Console output of the examples: progress and commands to copy."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, TQDMProgressBar


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


def print_commands(folder: Path, log_dir: Path, look_at: str, site: str) -> None:
    """Print the commands that show a run, using the Python environment of this program.

    Args:
        folder: The folder of all runs.
        log_dir: The folder of this run.
        look_at: A description of the content in TensorBoard.
        site: The module whose statistics the last command shows.
    """
    python = _shortest(Path(sys.executable))
    # `python -m` works everywhere. The scripts are in the environment of nox, which may not be on the user's PATH.
    print("\nTo see findings, graph and the history of every layer on one page:")
    print(f"  {_command(python, '-m', 'lightning_recorder', 'view', _shortest(log_dir))}")
    print("\nTo look inside with TensorBoard, run it and open the page that it names:")
    print(f"  {_command(python, '-m', 'tensorboard.main', '--logdir', _shortest(folder))}")
    print(look_at)
    print("\nTo list what was recorded, and to see one layer's statistics in the terminal:")
    print(f"  {_command(python, '-m', 'lightning_recorder', 'ls', _shortest(folder))}")
    print(f"  {_command(python, '-m', 'lightning_recorder', 'show', _shortest(log_dir), site)}")


def print_look_at(what: str, command: str, *runs: Path) -> None:
    """Print what there is to see in runs, with the commands that show it in the terminal and on the page."""
    python = _shortest(Path(sys.executable))
    print(f"\n{what} To see it in the terminal, and on a page with every layer:")
    for name in (command, "view"):
        print(f"  {_command(python, '-m', 'lightning_recorder', name, *map(_shortest, runs))}")


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
