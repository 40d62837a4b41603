"""Tests of a process that is killed while it writes dumps, which must leave no wrong manifest line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the writers are forked, since torch starts slowly")

# The values of each dump identify its step. Forks are killed, so that 80 of them do not need 80 imports.
WRITER = """
import os, random, signal, sys, time
from pathlib import Path

import torch

from lightning_recorder import read_dump, read_manifest
from lightning_recorder.outputs import DumpFolder, TensorDumps
from lightning_recorder.tensors.capture import Captured

FOLDER = Path(sys.argv[1])
SHAPES = {"a/out": (7,), "b/out[0]": (50, 100), "b/out[1]": (0, 3), "c/in.mask": ()}


def tensors(step):
    return {name: torch.full(shape, float(step + index)) for index, (name, shape) in enumerate(SHAPES.items())}


def dump(first, steps):
    dumps = TensorDumps(
        DumpFolder("tensors", group="tensors", directory=FOLDER), ("steps", "checkpoints"), strict=True
    )
    for step in range(first, first + steps):
        dumps.add(step, 0, Captured(tensors(step)))
        dumps.write_beside(FOLDER / "last.ckpt")
        dumps.write_beside(FOLDER / f"{step}.ckpt")
        dumps.remove_beside(FOLDER / f"{step - 2}.ckpt")
    dumps.wait()


def check(first=0):
    lines = [line for line in read_manifest(FOLDER) if line["step"] >= first or line["file"].startswith("last")]
    for line in lines:
        read = read_dump(FOLDER / line["file"])
        entry = (line["step"], line["bytes"], line["reason"], set(line["tensors"]))
        size = (FOLDER / line["file"]).stat().st_size
        found = (int(read.about["step"]), size, read.about["reason"], set(read.tensors))
        assert entry == found, f"{line['file']}: the manifest says {entry}, the file is {found}"
        for name, tensor in tensors(line["step"]).items():
            assert torch.equal(read.tensors[name], tensor), (line, name)
            assert line["tensors"][name] == {"dtype": "float32", "shape": list(tensor.shape)}
    return len(lines)


def forked(job):
    pid = os.fork()
    if pid:
        return pid
    try:
        job()
        os._exit(0)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)
"""

AT_RANDOM = """
draw = random.Random(20)
killed = 0
for number in range(80):
    pid = forked(lambda: dump(number * 100_000, 100_000))
    time.sleep(draw.uniform(0.0, 0.05))
    os.kill(pid, signal.SIGKILL)
    killed += os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    check(number * 100_000)
print(killed)
"""

AT_EACH = """
EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.truncate")


def killed_at(place):
    left = place

    def see(event, passed):
        nonlocal left
        if event in EVENTS and str(FOLDER) in str(passed[0]):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(see)
    dump(100, 4)


dump(0, 3)
place = 0
while True:
    pid = forked(lambda: killed_at(place))
    if not os.WIFSIGNALED(os.waitpid(pid, 0)[1]):
        break
    check()
    place += 1
print(place)
"""


def run(body: str, folder: Path) -> int:
    """Return the number that a script of writers prints."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", WRITER + body, str(folder)]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return int(done.stdout)


def check_folder(folder: Path) -> None:
    """Assert that every file is complete, listed or not, and that there are no other files except hidden ones."""
    from lightning_recorder import read_dump

    for path in folder.iterdir():
        if path.name.startswith("."):
            assert path.name.endswith(".tmp")
        elif path.suffix == ".safetensors":
            assert len(read_dump(path).tensors) == 4
        else:
            assert path.name == "recorder-manifest.jsonl"


@pytest.mark.slow
def test_killed_at_80_random_moments_no_line_lies(tmp_path: Path) -> None:
    """After kills at 80 random moments each line refers to a dump of its step, and no file is incomplete."""
    assert run(AT_RANDOM, tmp_path) == 80
    check_folder(tmp_path)


@pytest.fixture(scope="module")
def killed_at_each(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """Return the number of writers that were killed, each before another change, and their folder."""
    folder = tmp_path_factory.mktemp("each")
    return run(AT_EACH, folder), folder


@pytest.mark.slow
def test_killed_before_each_change_of_the_folder_no_line_lies(killed_at_each: tuple[int, Path]) -> None:
    """A writer killed between any two changes of the folder leaves no line that describes a different file."""
    killed, folder = killed_at_each
    # Four steps. Each of the three dumps opens and renames at least one file and writes one line; one dump is removed.
    assert killed >= 4 * (3 * 3 + 1)
    check_folder(folder)


@pytest.mark.slow
def test_what_a_killed_writer_left_half_does_not_pile_up(killed_at_each: tuple[int, Path]) -> None:
    """The next writer into the folder removes the temporary files of earlier writers."""
    _, folder = killed_at_each  # the last writer was not killed
    assert [path.name for path in folder.iterdir() if path.name.endswith(".tmp")] == []
