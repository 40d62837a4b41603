"""One process at a time records into a folder."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from lightning_recorder import ActivationRecorder, open_recording
from lightning_recorder.folder_lock import lock_folder
from tests import forks
from tests.callbacks.small import go, warnings_by
from tests.callbacks.test_resume import QUIET

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows has no such locks")

TRY = """
import sys
from pathlib import Path
from lightning_recorder.folder_lock import lock_folder
print(lock_folder(Path(sys.argv[1])) is not None)
"""


def test_a_lock_is_for_one_process(tmp_path: Path) -> None:
    """All of this process share a lock, others do not get it before it is gone, and nothing of it is left."""
    folder = tmp_path / "recorder"
    lock, same = lock_folder(folder), lock_folder(folder)
    assert lock is not None
    assert same is lock
    assert forks.output_of("-c", TRY, folder, folder=tmp_path) == "False\n"
    del lock
    assert forks.output_of("-c", TRY, folder, folder=tmp_path) == "False\nFalse\n"
    del same
    assert not folder.exists()
    assert forks.output_of("-c", TRY, folder, folder=tmp_path).endswith("True\n")


KILLED = """
import os, signal, sys, time
from pathlib import Path
from lightning_recorder.folder_lock import lock_folder
lock = lock_folder(Path(sys.argv[1]))
if os.fork():
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(300)
"""


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    """The lock of a killed process is free, even while a fork of it, such as a worker of a loader, is still there."""
    folder = tmp_path / "recorder"
    with forks.started("-c", KILLED, folder, folder=tmp_path) as (process,):
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert [each.name for each in folder.iterdir()] == [".lock"]
        lock = lock_folder(folder)
        assert lock is not None
    del lock
    assert not folder.exists()


FIT = """
import sys, time
from pathlib import Path
from lightning.pytorch import Callback
from lightning_recorder import ActivationRecorder
from tests.callbacks.small import go
from tests.callbacks.test_resume import QUIET

class Meeting(Callback):
    def on_train_start(self, trainer, pl_module):
        place = Path(sys.argv[1], "places")
        place.mkdir(exist_ok=True)
        (place / sys.argv[2]).touch()
        while len(list(place.iterdir())) < 4:
            time.sleep(0.01)

go(Path(sys.argv[1], "run"), [ActivationRecorder(every_n_train_steps=1, outputs=QUIET), Meeting()])
"""


@pytest.mark.slow
def test_four_processes_in_one_folder(tmp_path: Path) -> None:
    """Each of them has a whole recording, and all but the first say in one line where it is."""
    with ExitStack() as stack:
        started = [
            stack.enter_context(forks.started("-c", FIT, tmp_path, number, folder=tmp_path))[0] for number in range(4)
        ]
        for process in started:
            process.join(200)
        log = (tmp_path / "log.txt").read_text()
        assert [process.exitcode for process in started] == [0] * 4, log
    recording = open_recording(tmp_path / "run")
    assert list(recording.runs) == ["run", "run/run-2", "run/run-3", "run/run-4"]
    for run in recording.runs.values():
        assert run["activations"].steps == run["watch"].steps == list(range(8))
        assert torch.equal(run["activations"].values("rms"), recording["run"]["activations"].values("rms"))
    for number in (2, 3, 4):
        assert log.count(f"so this run records into {tmp_path}/run/run-{number}/recorder.") == 1
    assert log.count("another process records into") == 3
    assert list(open_recording(tmp_path).runs) == list(recording.runs)


def test_runs_of_one_process_share_a_folder(tmp_path: Path) -> None:
    """A trainer after another one continues in its folder, without a word and without a lock file afterwards."""
    for _ in range(2):
        recorder = ActivationRecorder(every_n_train_steps=1, outputs=QUIET)
        assert warnings_by(lambda: go(tmp_path, [recorder], max_epochs=1)) == []  # noqa: B023 - called in the loop
    assert len(open_recording(tmp_path)["activations"].sessions) == 2
    assert not (tmp_path / "recorder" / ".lock").exists()
