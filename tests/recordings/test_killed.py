"""Test of a process that is killed while it writes."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest
import torch

from lightning_recorder.recordings import open_recording
from tests import forks

# The values of step k are a function of k, so that a reader can verify every line.
SCRIPT = """
import sys
import torch
from lightning_recorder.recordings import RecordWriter, open_recording, records_path
from tests.recordings.runs import site_of

directory, sites = sys.argv[1], 40
writer = RecordWriter(records_path(directory, "activations"))
writer.begin(label="activations", group="activations")
first = int(sys.argv[2])
print("begun", flush=True)
for step in range(first, 10**6):
    bins = torch.zeros(2048, dtype=torch.int64)
    bins[step % 2048] = step
    writer.write({"step": step}, [site_of(f"m{i}", "out", {"rms": step / 3 + i / 7}, bins) for i in range(sites)])
"""


@pytest.mark.slow
def test_a_writer_that_is_killed(tmp_path: Path) -> None:
    """A run killed 12 times while writing, and resumed each time, keeps every complete line exact."""
    moments = random.Random(0)
    path = tmp_path / "recorder" / "records" / "activations.jsonl"
    first, torn = 0, 0
    for session in range(1, 13):
        with forks.started("-c", SCRIPT, tmp_path / "recorder", first, folder=tmp_path) as (process,):
            while (tmp_path / "log.txt").read_text() != "begun\n" * session:
                assert process.is_alive()
                time.sleep(0.001)
            time.sleep(moments.uniform(0.0, 0.05))
        assert process.exitcode == -signal.SIGKILL
        series = open_recording(tmp_path)["activations"]
        torn += not path.read_bytes().endswith(b"\n")
        assert [each.number for each in series.sessions] == list(range(1, session + 1))
        assert series.skipped <= torn
        assert series.steps == list(range(len(series.steps)))
        first = len(series.steps)
    assert first > 12
    expected = torch.arange(first, dtype=torch.float64)[:, None] / 3 + torch.arange(40, dtype=torch.float64) / 7
    assert torch.equal(series.values("rms"), expected)
    for step in range(0, first, 5):
        bins = series["m39"].bins(step)
        assert (bins[step % 2048].item(), bins.sum().item()) == (step, step)
