"""The examples work when run as a user runs them."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_recorder import open_recording, read_dump
from lightning_recorder.commands import main as command_line
from tests import forks

ROOT = Path(__file__).parents[1]
Run = Callable[..., str]


def run(example: str, folder: Path) -> str:
    path = ROOT / "examples" / example
    (code,), logged = forks.run(path, "two words", folder=folder, timeout_s=600.0, variables={"PWD": str(folder)})
    assert code == 0, logged[-3000:]
    assert "RecorderWarning" not in logged
    assert "\r" not in logged  # a progress bar that rewrites its line does not belong in a log
    check_commands(logged, folder)
    return logged


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


@pytest.mark.slow
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


@pytest.fixture
def logged_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run an example for a few steps in this process; return its output."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.chdir(tmp_path)

    def run(example: str, steps: int, *more: str) -> str:
        importlib.import_module(Path(example).stem).main(Path("runs"), steps, *more)
        return capsys.readouterr().out

    return run


@pytest.fixture
def quick_run(logged_run: Run, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run an example for a few steps in this process; return what its first command prints."""

    def run(example: str, steps: int, *more: str) -> str:
        first, page = commands_in(logged_run(example, steps, *more))
        assert page == ["view", *first[1:]]
        command_line(first)
        return capsys.readouterr().out

    return run


def commands_in(logged: str) -> list[list[str]]:
    """Return the commands of this package that an example has printed."""
    return [shlex.split(each) for each in re.findall(r"^  \S+ -m lightning_recorder (.+)$", logged, re.MULTILINE)]


@pytest.mark.slow
def test_transformer_learns_and_shows_its_blocks(logged_run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """GPT-2 learns part of the README, its four equal blocks are drawn once, and the last command shows one."""
    logged = logged_run("transformer.py", 40)
    loss = re.search(r"training loss +([\d.]+) nats", logged)
    assert loss is not None
    assert float(loss[1]) < 4
    (picture,) = re.findall(r"picture of the graph (.+)", logged)
    assert "×4" in Path(picture).read_text()
    command_line(commands_in(logged)[-1])
    assert "gpt2.transformer.h.0" in capsys.readouterr().out


@pytest.mark.slow
def test_vit_names_the_planted_layer(quick_run: Run) -> None:
    """The finding of the vision transformer names the layer with the planted bias, and no other."""
    findings = quick_run("vit.py", 60)
    assert "blocks.2.relu returns only zeros" in findings
    assert "1 finding in " in findings


@pytest.mark.slow
def test_gan_records_both_networks(quick_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator and the critic have activations and gradients."""
    monkeypatch.setenv("LINES", "200")  # so that all sites have a line
    shown = quick_run("gan.py", 20)
    activations, gradients = shown.split("gradients, train")
    assert all(name in part for name in ("generator.0 out", "critic.0 out") for part in (activations, gradients))


@pytest.mark.slow
def test_lora_shows_the_adapters(quick_run: Run) -> None:
    """The adapters have updates, and the frozen weights are not listed among the parameters."""
    _, parameters = quick_run("lora.py", 20).split("parameters, train")
    assert "net.1.up weight" in parameters
    assert "layer weight" not in parameters


@pytest.mark.slow
def test_compiled_layers_are_recorded(quick_run: Run) -> None:
    """The layers inside the compiled network are recorded."""
    assert "net.1 out" in quick_run("compiled.py", 12, "aot_eager")


@pytest.mark.slow
def test_two_runs_part_at_the_first_update(quick_run: Run) -> None:
    """Two runs that differ in the learning rate are equal until the first update, and the rate is named."""
    difference = quick_run("two_runs.py", 12)
    assert "same until step 0" in difference
    assert "lr 0.1 → 0.2" in difference


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
    found = {kind: {name for name, _ in recording[kind].sites} for kind in ("activations", "gradients")}
    assert found == {"activations": {"", "layer", "mse_loss"}, "gradients": {"layer"}}
    assert (Path(str(trainer.log_dir)) / "recorder" / "graph.svg").exists()
