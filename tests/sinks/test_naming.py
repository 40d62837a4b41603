"""Tags and names as file names and keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_recorder import ArgumentError
from lightning_recorder.sinks.naming import file_of_tag, harmless, keep_file, path_below, shortened
from tests.sinks.samples import ODD_TAGS, OUTSIDE


@pytest.mark.parametrize("name", OUTSIDE, ids=ascii)
def test_a_name_that_leads_out(name: str, tmp_path: Path) -> None:
    """A name that is not inside the folder on every operating system is an error that shows it."""
    with pytest.raises(ArgumentError, match="inside the folder"):
        path_below(tmp_path, name)


def test_a_name_inside(tmp_path: Path) -> None:
    """A name may have folders, which are those of the file."""
    assert path_below(tmp_path, "a/./b.svg") == tmp_path / "a" / "b.svg"


def test_the_files_of_tags(tmp_path: Path) -> None:
    """Each tag has a file of its own below the folder, also at another step or with another suffix."""
    paths = [
        file_of_tag(tmp_path, tag, step, suffix) for tag in ODD_TAGS for step in (3, 4) for suffix in (".md", ".json")
    ]
    assert len(set(paths)) == 4 * len(ODD_TAGS)
    for path in paths:
        assert path.resolve().is_relative_to(tmp_path.resolve())
        path.write_text("can be written")


@pytest.mark.parametrize("longest", [50, 100, 250])
def test_shortened(longest: int) -> None:
    """A tag that is short enough stays, any other is as long as allowed, with its beginning and its end."""
    short = [shortened(tag, longest) for tag in ODD_TAGS]
    assert len(set(short)) == len(ODD_TAGS)
    for tag, each in zip(ODD_TAGS, short, strict=True):
        if len(tag) <= longest:
            assert each == tag
        else:
            assert len(each) == longest
            assert (each[:15], each[-15:]) == (tag[:15], tag[-15:])


def test_harmless_counts_bytes() -> None:
    """What is kept of a long segment has at most so many bytes, and no part of a character."""
    assert harmless("層" * 300).rpartition("-")[0] == "層" * 26
    assert harmless("x" * 80) == "x" * 80
    assert harmless("x" * 81).rpartition("-")[0] == "x" * 80


def test_keeping_a_file_where_it_lies(tmp_path: Path) -> None:
    """A file that is kept where it lies stays as it is, by whichever path it is named."""
    (tmp_path / "folder").mkdir()
    path = tmp_path / "a.txt"
    path.write_text("text")
    keep_file(tmp_path / "folder" / ".." / "a.txt", path)
    assert path.read_text() == "text"
