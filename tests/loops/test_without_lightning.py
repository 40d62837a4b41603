"""Tests of the package in a program that has no Lightning."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from lightning_recorder import open_recording

PROGRAM = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
import lightning_recorder
assert "torch" not in sys.modules and "numpy" not in sys.modules, "the package imports torch at once"
import torch
from lightning_recorder import Monitor
from lightning_recorder.callbacks.reproduce import reproduce

net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
with Monitor(net, optimizer, log_dir="run", every_n_steps=1) as monitor:
    for _ in range(3):
        with monitor.step():
            loss = net(torch.ones(8, 4)).square().mean()
            loss.backward()
            optimizer.step()
            monitor.log(loss=loss)
try:
    reproduce("run", net)
except lightning_recorder.RecorderError as error:
    print(error)
assert "lightning" not in sys.modules
"""


def test_a_monitor_works_and_an_error_names_the_fix(tmp_path: Path) -> None:
    """A loop is recorded, what needs a Trainer raises, and torch is imported only when it is needed."""
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "pip install lightning" in done.stdout
    assert "3 of 3 modules recorded" in done.stderr
    assert "RecorderWarning" not in done.stderr
    assert set(open_recording(tmp_path / "run").run) == {"activations", "gradients", "parameters", "watch"}
