"""The examples work when run as a user runs them."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_recorder import open_recording, read_dump
from lightning_recorder.recordings import Recording
from tests import forks

ROOT = Path(__file__).parents[1]
Run = Callable[..., Any]


def run(example: str, folder: Path) -> str:
    path = ROOT / "examples" / example
    (code,), logged = forks.run(path, "two words", folder=folder, timeout_s=600.0, variables={"PWD": str(folder)})
    assert code == 0, logged[-3000:]
    assert "RecorderWarning" not in logged
    assert "\r" not in logged  # a progress bar that rewrites its line does not belong in a log
    check_commands(logged, folder)
    return logged


def check_commands(logged: str, folder: Path) -> None:
    """Run the one command printed by an example, its last line, in an environment whose PATH lacks ours."""
    (page,) = re.findall(r"^  (\S.* -m .*)$", logged, re.MULTILINE)
    assert logged.rstrip().endswith(page)
    environment = {**os.environ, "PATH": os.defpath}
    # With "exec" the server itself is the process that is killed.
    viewer = f"exec {page} --no-browser"
    with subprocess.Popen(viewer, shell=True, cwd=folder, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"http://127.0.0.1:")
        process.kill()


@pytest.mark.slow
def test_digits_learns_and_leaves_picture_and_dumps(tmp_path: Path) -> None:
    """More than 95 % of the digits are recognized, every printed file exists, and the output ends with the verdict."""
    logged = run("digits.py", tmp_path)
    accuracy = re.search(r"validation accuracy +([\d.]+)%", logged)
    assert accuracy is not None
    assert float(accuracy[1]) > 95
    assert "\nThe verdict:\nhealthy: no findings in " in logged
    (picture,) = re.findall(r"picture of the graph (.+)", logged)
    assert (tmp_path / picture).read_text().lstrip().startswith("<?xml")
    assert re.findall(r"^epoch (\d+)  val_accuracy", logged, re.MULTILINE) == [str(epoch) for epoch in range(1, 13)]
    dumps = [read_dump(tmp_path / path) for path in re.findall(r"dump +(.+)", logged)]
    assert [dump.about["group"] for dump in dumps] == ["activations", "gradients"]
    assert all("encoder.stem/histogram" in dump.tensors for dump in dumps)


class Quick(NamedTuple):
    """The output of an example, its verdict and the recordings that its last command shows."""

    logged: str
    verdict: str
    runs: list[Recording]


@pytest.fixture
def quick_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run an example for a few steps in this process."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.chdir(tmp_path)

    def run(example: str, steps: int, *more: str) -> Quick:
        importlib.import_module(Path(example).stem).main(Path("runs"), steps, *more)
        logged = capsys.readouterr().out
        _, command, *paths = shlex.split(logged.splitlines()[-1].partition(" -m ")[2])
        assert command == "view"
        verdict = logged.partition("The verdict:\n")[2].partition("\n\nThe page ")[0]
        return Quick(logged, verdict, [open_recording(path) for path in paths])

    return run


@pytest.mark.slow
def test_transformer_learns_and_shows_its_blocks(quick_run: Run) -> None:
    """GPT-2 learns part of the help texts, its four equal blocks are drawn once, and it is healthy."""
    found = quick_run("transformer.py", 120)  # as many as a user trains
    loss = re.search(r"training loss +([\d.]+) nats", found.logged)
    assert loss is not None
    assert float(loss[1]) < 4
    (picture,) = re.findall(r"picture of the graph (.+)", found.logged)
    assert "×4" in Path(picture).read_text()
    assert found.verdict.startswith("healthy: no findings in ")
    (run,) = found.runs
    assert "gpt2.transformer.h.0" in {name for name, _ in run["activations"].sites}


@pytest.mark.slow
def test_vit_names_the_planted_layer(quick_run: Run) -> None:
    """The verdict of the vision transformer names the layer with the planted bias, and no other."""
    verdict = quick_run("vit.py", 60).verdict
    assert verdict.startswith("warning: blocks.2.relu returns only zeros")
    assert "\n1 finding in " in verdict


@pytest.mark.slow
def test_gan_records_both_networks(quick_run: Run) -> None:
    """The generator and the critic have activations and gradients, and the run is healthy."""
    found = quick_run("gan.py", 20)
    assert found.verdict.startswith("healthy: ")
    (run,) = found.runs
    names = [{name.partition(" ")[0] for name, _ in run[each].sites} for each in ("activations", "gradients")]
    assert all({"generator.0", "critic.0"} <= each for each in names)


@pytest.mark.slow
def test_lora_shows_the_adapters(quick_run: Run) -> None:
    """The adapters have updates, the frozen weights are not recorded, and the run is healthy."""
    found = quick_run("lora.py", 20)
    assert found.verdict.startswith("healthy: ")
    (run,) = found.runs
    sites = {".".join(site) for site in run["parameters"].sites}
    assert "net.1.up.weight.update" in sites
    assert "net.1.layer.weight" not in sites


@pytest.mark.slow
def test_compiled_layers_are_recorded(quick_run: Run) -> None:
    """The layers inside the compiled network are recorded, and the run is healthy."""
    found = quick_run("compiled.py", 40, "aot_eager")
    assert found.verdict.startswith("healthy: ")
    (run,) = found.runs
    assert "net.1" in {name for name, _ in run["activations"].sites}


@pytest.mark.slow
def test_two_runs_part_at_the_first_update(quick_run: Run) -> None:
    """The verdict about two runs says that they are equal until the first update, and names the learning rate."""
    verdict = quick_run("two_runs.py", 12).verdict
    assert "same until step 0" in verdict
    assert "lr 0.1 → 0.2" in verdict


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
