"""The disk reserve and all-or-nothing writes."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from lightning_recorder import RecorderWarning
from lightning_recorder.disk import RESERVE_BYTES, append, attempt, begin_run, fits, has_room, readable_size
from tests.callbacks.small import warnings_by
from tests.disks import files_up_to

VARIABLE = "LIGHTNING_RECORDER_DISK_RESERVE"


def test_the_reserve_stays_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write fits if the reserve remains free afterwards; the environment variable changes the size of the reserve."""
    free = shutil.disk_usage(tmp_path).free
    assert fits(tmp_path / "no" / "such" / "file", 1)
    assert not fits(tmp_path, free - RESERVE_BYTES + 2**28)
    monkeypatch.setenv(VARIABLE, str(2**60))
    assert not fits(tmp_path, 1)
    monkeypatch.setenv(VARIABLE, "0")
    assert fits(tmp_path, free // 2)


def test_one_warning_for_each_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first write without room warns with the disk, its free space, the reserve and the remedy."""
    monkeypatch.setenv(VARIABLE, str(2**60))
    with pytest.warns(RecorderWarning) as warned:
        assert not has_room(tmp_path / "a")
    (message,) = [str(each.message) for each in warned]
    assert message.startswith(f"lightning_recorder skips writes to the disk of {tmp_path}: ")
    assert "the write may need 1.0 MiB, and 1099511627776.0 MiB are reserved for the rest of the run" in message
    assert message.endswith(f"Free some space, or set {VARIABLE} to a smaller number of bytes")
    assert not attempt(tmp_path / "a", 1, lambda: pytest.fail("there is no room"))
    begin_run()
    with pytest.warns(RecorderWarning, match="skips writes"):
        assert not has_room(tmp_path / "a")


@pytest.mark.parametrize("value", ["256MB", "-1", "1e9", "²"])
def test_a_reserve_that_is_no_number(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An invalid reserve causes a single warning that shows a valid value, and the default applies."""
    monkeypatch.setenv(VARIABLE, value)
    (message,) = warnings_by(lambda: [fits(tmp_path, 1) for _ in range(3)])
    assert message == (
        f"{VARIABLE}={value!r} is not a number of bytes, so lightning_recorder leaves 256.0 MiB of each disk free: set "
        f"it to a whole number, such as {VARIABLE}=268435456"
    )


def test_a_disk_that_cannot_be_read_counts_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the free space cannot be determined, writes are allowed."""

    def refuse(path: object) -> object:
        raise OSError(errno.ENOSYS, "not supported")

    monkeypatch.setattr(shutil, "disk_usage", refuse)
    assert fits(tmp_path, 2**60)


def test_an_append_that_fails_changes_nothing(tmp_path: Path) -> None:
    """An append that meets a full disk leaves the file unchanged."""
    path = tmp_path / "folder" / "a"
    assert append(path, b"12345\n") == 6
    with files_up_to(8):
        (message,) = warnings_by(lambda: attempt(path, 6, lambda: append(path, b"67890\n")))
    assert message == (
        f"lightning_recorder could not write to {path}: [Errno 27] File too large. Training continues. Records "
        "are lost until writing works again. Free some space, or raise the quota or the limit of file sizes"
    )
    assert path.read_bytes() == b"12345\n"


def refuse(number: int | None) -> None:
    """Fail as the operating system does."""
    raise OSError(number, os.strerror(number)) if number else OSError("not of the system")


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.EIO, ""),
        (errno.ESTALE, ""),
        (errno.EROFS, ". Make the folder writable, or choose another one"),
        (errno.EACCES, ". Make the folder writable, or choose another one"),
    ],
)
def test_a_write_that_is_refused(number: int, fix: str, tmp_path: Path) -> None:
    """A refused write is skipped, all of a run give one warning, and a later write succeeds."""
    done: list[int] = []
    (message,) = warnings_by(lambda: [attempt(tmp_path / "a", 1, lambda: refuse(number)) for _ in range(3)])
    assert message == (
        f"lightning_recorder could not write to {tmp_path / 'a'}: [Errno {number}] {os.strerror(number)}. Training "
        f"continues. Records are lost until writing works again{fix}"
    )
    assert attempt(tmp_path / "a", 1, lambda: done.append(1))
    assert done == [1]


def test_errors_that_are_raised(tmp_path: Path) -> None:
    """With ``strict``, all errors but that of a full disk are raised; an error of another origin always is."""
    with pytest.raises(OSError, match="Input/output error"):
        attempt(tmp_path, 1, lambda: refuse(errno.EIO), strict=True)
    with pytest.raises(OSError, match="not of the system"):
        attempt(tmp_path, 1, lambda: refuse(None))
    with pytest.warns(RecorderWarning, match="No space left"):
        assert not attempt(tmp_path, 1, lambda: refuse(errno.ENOSPC), strict=True)


def test_a_line_ends_one_that_was_left_unfinished(tmp_path: Path) -> None:
    """A line starts on a new line even if a killed run left an unfinished one."""
    path = tmp_path / "a"
    path.write_bytes(b"half")
    assert append(path, b"whole\n", is_line=True) == 7
    assert append(path, b"whole\n", is_line=True) == 6
    assert path.read_bytes() == b"half\nwhole\nwhole\n"


def test_sizes() -> None:
    """Sizes are printed in a suitable unit."""
    assert [readable_size(each) for each in (999, 1000, 2_500_000, 10**9)] == [
        "999 bytes",
        "1.0 KB",
        "2.5 MB",
        "1.0 GB",
    ]
