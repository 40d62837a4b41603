"""Tests of reading lines from a growing file."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_recorder.recordings import history
from lightning_recorder.recordings.history import Tail


def test_lines_come_once(tmp_path: Path) -> None:
    """Each complete line is returned once with its offset; a torn line is returned when it is complete."""
    path = tmp_path / "a"
    reader = Tail(path)
    assert list(reader.lines()) == []
    path.write_bytes(b"one\ntw")
    assert list(reader.lines()) == [(0, b"one")]
    assert list(reader.lines()) == []
    with path.open("ab") as file:
        file.write(b"o\n\nthree\n")
    assert list(reader.lines()) == [(4, b"two"), (8, b""), (9, b"three")]
    assert reader.line_at(4) == b"two\n"


def test_a_file_that_was_written_anew(tmp_path: Path) -> None:
    """A file that is gone, or shorter than the part already read, counts as replaced."""
    path = tmp_path / "a"
    path.write_bytes(b"one\ntwo\n")
    reader = Tail(path)
    found = [reader.is_replaced]
    list(reader.lines())
    found.append(reader.is_replaced)
    path.write_bytes(b"x\n")
    found.append(reader.is_replaced)
    path.unlink()
    found.append(reader.is_replaced)
    assert found == [False, False, True, True]


@pytest.mark.parametrize("length", [15, 16, 17, 100])
def test_a_line_that_is_too_long(length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An overlong line is returned as an empty line, and the lines after it are read."""
    monkeypatch.setattr(history, "_LONGEST_LINE", 16)
    monkeypatch.setattr(history, "_PIECE", 7)
    path = tmp_path / "a"
    path.write_bytes(b"x" * length + b"\nnext\n" + b"y" * length)
    expected = b"x" * length if length < 16 else b""
    assert list(Tail(path).lines()) == [(0, expected), (length + 1, b"next")]
