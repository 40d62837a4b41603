"""A recorder never fills the disk, and a full disk never ends a run that continues without recorders."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_recorder import open_recording, read_manifest
from tests.callbacks.full_disk import LOWERED_BYTES, SCENARIOS
from tests.sinks.events import read_events

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SLACK_BYTES = 16 * 4096  # files occupy whole pages, and the loggers of the run write as well
WITH_RECORDERS = [name for name in SCENARIOS if "bare" not in name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all scenarios in a child process that can mount small disks, and return the folder of the results."""
    folder = tmp_path_factory.mktemp("disks")
    unshare = shutil.which("unshare")
    may_mount = [unshare or "unshare", "-rm"]
    trial = [*may_mount, "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if unshare is None or subprocess.run(trial, capture_output=True, check=False).returncode:
        pytest.skip("no small disk can be mounted: `unshare -rm mount -t tmpfs` is not there or not allowed")
    command = [*may_mount, sys.executable, "-m", "tests.callbacks.full_disk", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> Any:
    """Return the result of each run."""
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def of_run(folder: Path) -> Path:
    """Return the recordings folder of a run."""
    return next((path / "recorder" for path in folder.glob("lightning_logs/*")), folder / "recorder")


@pytest.mark.parametrize("scenario", WITH_RECORDERS)
def test_the_run_goes_as_far_as_without(scenario: str, results: dict[str, Any]) -> None:
    """Steps, errors and parameters equal those without recorders on the same disk, and there is one warning."""
    logger, kind = scenario.split("-")
    bare = results[f"{logger}-barefull"] if kind == "full" else results["csv-bare"]
    found = results[scenario]
    assert (found["steps"], found["error"]) == (bare["steps"], bare["error"])
    assert found["weights"] == bare["weights"]
    assert found["recorded"] == (found["steps"] if kind != "neighbor" else 0)
    (message,) = found["warned"]
    assert message.startswith("lightning_recorder ")
    if kind == "readonly":
        assert "[Errno 30] Read-only file system" in message
    elif kind not in ("enospc", "late"):
        assert message.startswith("lightning_recorder skips writes to the disk of ")
        assert "set LIGHTNING_RECORDER_DISK_RESERVE to a smaller number of bytes" in message


@pytest.mark.parametrize("logger", ["tensorboard", "csv"])
def test_below_the_reserve_nothing_is_written(logger: str, folder: Path, results: dict[str, Any]) -> None:
    """On a disk smaller than the reserve, recorders write no file and the logger's own file is complete."""
    assert not of_run(folder / f"{logger}-default").exists()
    assert results[f"{logger}-default"]["free"] == results[f"{logger}-bare"]["free"]
    assert losses(logger, folder / f"{logger}-default") == losses(logger, folder / f"{logger}-bare")


def losses(logger: str, folder: Path) -> list[float]:
    """Return the losses that ``self.log`` has written."""
    (version,) = folder.glob("lightning_logs/*")
    if logger == "tensorboard":
        return [event.value for event in read_events(version).Scalars("loss")]
    with (version / "metrics.csv").open(newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


@pytest.mark.parametrize("logger", ["tensorboard", "csv"])
def test_writing_stops_at_the_reserve(logger: str, folder: Path, results: dict[str, Any]) -> None:
    """Records are written until the reserve is reached and remain readable."""
    assert LOWERED_BYTES - SLACK_BYTES <= results[f"{logger}-lowered"]["free"] <= LOWERED_BYTES + SLACK_BYTES
    steps = open_recording(of_run(folder / f"{logger}-lowered"))["gradients"].steps
    assert steps[:10] == list(range(10))
    assert losses(logger, folder / f"{logger}-lowered") == losses(logger, folder / f"{logger}-bare")


@pytest.mark.parametrize("scenario", ["tensorboard-neighbor", "tensorboard-enospc", "none-enospc", "none-readonly"])
def test_writing_continues_when_there_is_space_again(scenario: str, folder: Path) -> None:
    """If the disk is full or read-only from step 20 to step 40, only records in between are missing."""
    series = open_recording(of_run(folder / scenario))["activations"]
    assert series.skipped == 0
    assert {*range(20), 40, 41} <= set(series.steps)
    assert len([step for step in series.steps if 20 <= step < 40]) < 10
    if scenario.startswith("tensorboard"):
        events = read_events(of_run(folder / scenario)).Scalars("z_recorder/activations/net.0/rms")
        assert {*range(20), 40, 41} <= {event.step for event in events}


def test_the_graph_is_written_when_there_is_space(folder: Path) -> None:
    """The graph of a first step at which the disk was full is in its file when the disk has been freed."""
    recording = open_recording(of_run(folder / "none-late"))
    assert recording["activations"].steps[-20:] == list(range(40, 60))
    assert recording.run.graph is not None
    assert {node.name for node in recording.run.graph.nodes} >= {"net.0", "net.2"}


def test_the_dumps_beside_checkpoints_are_left_out(folder: Path) -> None:
    """Below the reserve, checkpoints are saved without dumps, and the manifest is not torn."""
    kept = folder / "none-checkpoints" / "kept"
    assert len(list(kept.iterdir())) == 3
    assert read_manifest(kept) == []
