"""The callbacks on several processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.callbacks.models import LEAVES

SCRIPT = """
import sys
from pathlib import Path
import torch
from lightning_recorder import ActivationRecorder, GradientRecorder, GraphRecorder
from tests.callbacks.models import Classifier, fit

class Lopsided(Classifier):
    def training_step(self, batch, batch_idx):
        # A module that runs on one rank alone must not hang the other.
        if self.global_rank == 0:
            with torch.no_grad():
                self.extra(torch.ones(2, 3))
        return super().training_step(batch, batch_idx)

if __name__ == "__main__":
    torch.manual_seed(0)
    model = Lopsided()
    model.extra = torch.nn.Linear(3, 3).requires_grad_(False)
    callbacks = [GraphRecorder(strict=True), ActivationRecorder(strict=True), GradientRecorder(strict=True)]
    recorded = [] if sys.argv[2] == "bare" else callbacks
    trainer = fit(model, Path(sys.argv[1]), recorded, strategy=sys.argv[3], devices=2, enable_checkpointing=True)
    if trainer.is_global_zero:
        torch.save(dict(model.state_dict()), Path(sys.argv[1]) / "final.pt")
"""


def train(script: Path, folder: Path, how: str, strategy: str) -> None:
    folder.mkdir()
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(script), str(folder), how, strategy]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "RecorderWarning" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_two_processes_train_as_without_and_rank_zero_writes(strategy: str, tmp_path: Path) -> None:
    """Under DDP the parameters are bitwise those of a bare run, and there is one set of results, complete."""
    import torch

    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    for how in ("bare", "recorded"):
        train(script, tmp_path / how, how, strategy)
    if strategy == "ddp":
        # A spawned run leaves its parameters in the processes.
        bare, recorded = (torch.load(tmp_path / how / "final.pt", weights_only=True) for how in ("bare", "recorded"))
        assert all(torch.equal(recorded[name], value) for name, value in bare.items())
    (version,) = (tmp_path / "recorded" / "lightning_logs").iterdir()
    assert (version / "recorder" / "graph.png").is_file()
    names = {node["name"] for node in json.loads((version / "recorder" / "graph.json").read_text())["nodes"]}
    assert {*LEAVES, "extra"} <= names
    assert len(list(version.glob("events.out.tfevents.*"))) == 1
    dumps = {path.name.split(".")[-2] for path in (version / "checkpoints").glob("*.safetensors")}
    assert dumps == {"activations", "gradients"}
