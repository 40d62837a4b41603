"""The examples do what they say, as a user runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_recorder import read_dump

ROOT = Path(__file__).parents[1]


def run(example: str, folder: Path) -> str:
    command = [sys.executable, str(ROOT / "examples" / example), str(folder)]
    # On a machine that is busy otherwise, threads that wait by spinning take the cores from those that work.
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "RecorderWarning" not in done.stderr
    assert f"tensorboard --logdir {folder}" in done.stdout
    return done.stdout


def test_digits_learns_and_leaves_picture_and_dumps(tmp_path: Path) -> None:
    """The digits are told apart with over 95 %, and every file that the example names is there."""
    said = run("digits.py", tmp_path)
    accuracy = re.search(r"validation accuracy +([\d.]+)%", said)
    assert accuracy is not None
    assert float(accuracy[1]) > 95
    (picture,) = re.findall(r"picture of the graph (\S+)", said)
    assert Path(picture).read_text().lstrip().startswith("<?xml")
    dumps = [read_dump(path) for path in re.findall(r"dump +(\S+)", said)]
    assert [dump.about["group"] for dump in dumps] == ["activations", "gradients"]
    assert all("encoder.stem/histogram" in dump.tensors for dump in dumps)


def test_transformer_learns_and_shows_its_blocks(tmp_path: Path) -> None:
    """GPT-2 learns something of the README, and its four equal blocks are drawn once."""
    said = run("transformer.py", tmp_path)
    loss = re.search(r"training loss +([\d.]+) nats", said)
    assert loss is not None
    assert float(loss[1]) < 4
    (picture,) = re.findall(r"picture of the graph (\S+)", said)
    assert "×4" in Path(picture).read_text()


@pytest.mark.parametrize("example", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_each_example_has_a_test(example: str) -> None:
    """No example is left that nothing runs."""
    assert f'run("{example}"' in Path(__file__).read_text()
