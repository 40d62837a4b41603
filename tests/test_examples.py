"""The examples work when run as a user runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_recorder import open_recording, read_dump

ROOT = Path(__file__).parents[1]


def run(example: str, folder: Path) -> str:
    command = [sys.executable, str(ROOT / "examples" / example), "two words"]
    # On a busy machine, threads that spin while waiting take CPU time from the ones that work.
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "PWD": str(folder)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "RecorderWarning" not in done.stderr
    assert "\r" not in done.stdout  # a progress bar that rewrites its line does not belong in a log
    check_commands(done.stdout, folder)
    return done.stdout


def check_commands(logged: str, folder: Path) -> None:
    """Run the commands printed by an example, in an environment whose PATH lacks ours."""
    page, server, *commands = re.findall(r"^  (\S.* -m .*)$", logged, re.MULTILINE)
    environment = {**os.environ, "PATH": os.defpath}
    outputs = [
        subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=True)
        for command in commands
    ]
    listed, shown = (done.stdout for done in outputs)
    assert "activations" in listed
    assert "rms" in shown
    assert " -m tensorboard.main --logdir " in server
    # With "exec" the server itself is the process that is killed.
    viewer = f"exec {page} --no-browser"
    with subprocess.Popen(viewer, shell=True, cwd=folder, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"http://127.0.0.1:")
        process.kill()
    with subprocess.Popen(f"exec {server}", shell=True, cwd=folder, env=environment, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert any(b" at http://" in line for line in process.stderr)
        process.kill()


def test_digits_learns_and_leaves_picture_and_dumps(tmp_path: Path) -> None:
    """More than 95 % of the digits are recognized, every printed file exists, and every command works."""
    logged = run("digits.py", tmp_path)
    accuracy = re.search(r"validation accuracy +([\d.]+)%", logged)
    assert accuracy is not None
    assert float(accuracy[1]) > 95
    (picture,) = re.findall(r"picture of the graph (.+)", logged)
    assert (tmp_path / picture).read_text().lstrip().startswith("<?xml")
    assert re.findall(r"^epoch (\d+)  val_accuracy", logged, re.MULTILINE) == [str(epoch) for epoch in range(1, 13)]
    dumps = [read_dump(tmp_path / path) for path in re.findall(r"dump +(.+)", logged)]
    assert [dump.about["group"] for dump in dumps] == ["activations", "gradients"]
    assert all("encoder.stem/histogram" in dump.tensors for dump in dumps)


def test_transformer_learns_and_shows_its_blocks(tmp_path: Path) -> None:
    """GPT-2 learns part of the README, and its four equal blocks are drawn once."""
    logged = run("transformer.py", tmp_path)
    loss = re.search(r"training loss +([\d.]+) nats", logged)
    assert loss is not None
    assert float(loss[1]) < 4
    (picture,) = re.findall(r"picture of the graph (.+)", logged)
    assert "×4" in (tmp_path / picture).read_text()


@pytest.mark.parametrize("example", sorted(path.name for path in (ROOT / "examples").glob("[!_]*.py")))
def test_each_example_has_a_test(example: str) -> None:
    """Every example has a test that runs it."""
    assert f'run("{example}"' in Path(__file__).read_text()


def test_the_first_snippet_of_the_readme_records_any_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first trainer in the README draws and records an arbitrary model."""
    monkeypatch.chdir(tmp_path)
    (snippet, *_) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    model = BoringModel()
    names: dict[str, Any] = {"model": model, "loader": model.train_dataloader()}
    exec(compile(snippet, "README.md", "exec"), names)
    trainer = names["trainer"]
    assert isinstance(trainer, Trainer)
    recording = open_recording(str(trainer.log_dir))
    assert [name for kind in ("activations", "gradients") for name, _ in recording[kind].sites] == ["layer", "layer"]
    assert (Path(str(trainer.log_dir)) / "recorder" / "graph.svg").exists()
