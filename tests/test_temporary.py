"""Temporary files and folders of live and killed processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_recorder import temporary
from lightning_recorder.temporary import TemporaryFolder, remove_leftovers, write_whole

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no locks that end with a process")

FOLDER = """
import sys
from pathlib import Path
from lightning_recorder.temporary import TemporaryFolder
folder = TemporaryFolder(Path(sys.argv[1]))
(folder.path / "inner").mkdir()
(folder.path / "inner" / "file").write_text("text")
print("ready", flush=True)
sys.stdin.read()
"""
FILE = """
import sys
from pathlib import Path
from lightning_recorder.temporary import write_whole

def write(file):
    file.write(b"half")
    file.flush()
    print("ready", flush=True)
    sys.stdin.read()
    file.write(b" and half")

write_whole(Path(sys.argv[1], "whole.txt"), write)
"""

Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a script that holds something temporary in the folder until its input ends."""
    processes = []

    def started(script: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", script, str(tmp_path)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield started
    for process in processes:
        with process:
            process.kill()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("script", [FOLDER, FILE], ids=["folder", "file"])
def test_leftovers_of_a_killed_process_are_removed(script: str, start: Start, tmp_path: Path) -> None:
    """Temporary files of a killed process are removed; those of a live process are not."""
    killed = start(script)
    (left,) = names(tmp_path)
    living = start(script)
    (held,) = set(names(tmp_path)) - {left}
    remove_leftovers(tmp_path)
    assert names(tmp_path) == sorted([left, held])
    killed.kill()
    killed.wait()
    remove_leftovers(tmp_path)
    assert names(tmp_path) == [held]
    living.communicate(timeout=60)
    assert living.returncode == 0
    assert names(tmp_path) == ([] if script == FOLDER else ["whole.txt"])


@pytest.mark.parametrize("script", [FOLDER, FILE], ids=["folder", "file"])
def test_the_next_process_in_the_folder_removes_leftovers(script: str, start: Start, tmp_path: Path) -> None:
    """Leftovers of a killed process are removed automatically when the next temporary name is created."""
    killed = start(script)
    killed.kill()
    killed.wait()
    (left,) = names(tmp_path)
    next_one = start(script)
    assert left not in names(tmp_path)
    assert len(names(tmp_path)) == 1
    next_one.communicate(timeout=60)


def test_a_locked_name_outlives_its_process_id(start: Start, tmp_path: Path) -> None:
    """A forked process that still has the lock keeps the folder, although the process that created it is dead."""
    script = FOLDER.replace("print(", "import os\nif os.fork(): print(")
    parent = start(script)
    (held,) = names(tmp_path)
    parent.kill()
    parent.wait()
    remove_leftovers(tmp_path)
    assert names(tmp_path) == [held]
    assert parent.stdin is not None
    parent.stdin.close()
    assert parent.stdout is not None
    assert parent.stdout.read() == ""  # ends when the fork has ended
    # Nor did the fork remove the folder on exit: it does not own it.
    assert names(tmp_path) == [held]
    remove_leftovers(tmp_path)
    assert names(tmp_path) == []


def test_interrupted_folders_are_removed_by_their_process(start: Start, tmp_path: Path) -> None:
    """A process that is stopped with Ctrl-C removes its own folders."""
    # A process that a shell started in the background ignores SIGINT, and so do its children.
    process = start(f"import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n{FOLDER}")
    process.send_signal(signal.SIGINT)
    process.wait(timeout=60)
    assert names(tmp_path) == []


def test_leftovers_of_another_machine_stay_for_a_day(start: Start, tmp_path: Path) -> None:
    """A name from another machine is removed once it is unlocked and a day old, since its lock may be invisible."""
    process = start(FOLDER)
    process.kill()
    process.wait()
    (left,) = tmp_path.iterdir()
    start_of_name, host, rest = left.name.rsplit("-", 2)
    foreign = left.rename(left.with_name(f"{start_of_name}-{host[::-1]}-{rest}"))
    assert foreign.name != left.name
    remove_leftovers(tmp_path)
    assert names(tmp_path) == [foreign.name]
    os.utime(foreign, (0, 0))
    remove_leftovers(tmp_path)
    assert names(tmp_path) == []


def test_only_own_names_are_removed(tmp_path: Path) -> None:
    """Other files, links with such a name, and non-empty folders without a lock are kept."""
    with TemporaryFolder(tmp_path) as folder:
        name = folder.path.name
    target = tmp_path / "target"
    target.mkdir()
    (target / "precious").write_text("text")
    (tmp_path / name).symlink_to(target)
    (tmp_path / name.replace(".tmp", "0.tmp")).mkdir()
    (tmp_path / name.replace(".tmp", "0.tmp") / "unknown").write_text("text")
    (tmp_path / name.replace(".tmp", "1.tmp")).mkdir()
    (tmp_path / "graph.tmp").write_text("text")
    before = set(names(tmp_path))
    remove_leftovers(tmp_path)
    assert before - set(names(tmp_path)) == {name.replace(".tmp", "1.tmp")}
    assert (target / "precious").exists()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")
def test_leftovers_of_other_users_stay(start: Start, tmp_path: Path) -> None:
    """Files of other users are not removed."""
    process = start(FILE)
    process.kill()
    process.wait()
    (left,) = tmp_path.iterdir()
    os.chown(left, 12345, -1)
    remove_leftovers(tmp_path)
    assert names(tmp_path) == [left.name]


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If files cannot be locked, temporary names are used that no process removes."""
    import fcntl

    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    with monkeypatch.context() as refusing:
        refusing.setattr(fcntl, "flock", refuse)
        folder = TemporaryFolder(tmp_path)
        write_whole(tmp_path / "whole.txt", lambda file: file.write(b"text"))
    remove_leftovers(tmp_path)
    assert names(tmp_path) == sorted([folder.path.name, "whole.txt"])
    folder.remove()
    assert names(tmp_path) == ["whole.txt"]


def test_a_half_removed_folder_is_removed(start: Start, tmp_path: Path) -> None:
    """An empty folder, whose process was killed before it created the lock, is removed."""
    process = start(FOLDER)
    process.kill()
    process.wait()
    (left,) = tmp_path.iterdir()
    shutil.rmtree(left / "inner")
    (left / "lock").unlink()
    remove_leftovers(tmp_path)
    assert names(tmp_path) == []


def test_a_file_that_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    """An error during writing is raised, the previous file is kept, and no temporary file is left."""
    path = tmp_path / "whole.txt"
    write_whole(path, lambda file: file.write(b"before"))
    with pytest.raises(ZeroDivisionError):
        write_whole(path, lambda file: file.write(b"half") / 0)
    assert path.read_text() == "before"
    assert names(tmp_path) == ["whole.txt"]
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "nowhere" / "whole.txt", lambda file: file.write(b"text"))


def test_a_whole_file_has_the_usual_permissions(tmp_path: Path) -> None:
    """A file has the permissions of any new file, not the owner-only ones of a temporary file."""
    (tmp_path / "plain.txt").touch()
    write_whole(tmp_path / "whole.txt", lambda file: file.write(b"text"))
    assert (tmp_path / "whole.txt").stat().st_mode == (tmp_path / "plain.txt").stat().st_mode


def test_many_folders_take_no_more_memory(tmp_path: Path) -> None:
    """A process that writes to ever more folders, such as those of 200 fits, does not remember all of them."""
    for number in range(600):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_whole(folder / "file", lambda file: file.write(b"1"))
    assert 0 < len(temporary._cleaned) <= 256
