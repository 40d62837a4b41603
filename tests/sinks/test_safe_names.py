"""Tests of tags and names as file names and keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_recorder import ArgumentError
from lightning_recorder.sinks.safe_names import copy_file, path_below, path_of_tag, safe_segment, shortened
from tests.sinks.samples import ODD_TAGS, OUTSIDE


@pytest.mark.parametrize("name", OUTSIDE, ids=ascii)
def test_a_name_that_leads_out(name: str, tmp_path: Path) -> None:
    """A name that is outside the folder on some operating system raises an error that quotes it."""
    with pytest.raises(ArgumentError, match="inside the folder"):
        path_below(tmp_path, name)


def test_a_name_inside(tmp_path: Path) -> None:
    """A name may contain folders."""
    assert path_below(tmp_path, "a/./b.svg") == tmp_path / "a" / "b.svg"


def test_the_files_of_tags(tmp_path: Path) -> None:
    """Each combination of tag, step and suffix has its own file below the folder."""
    paths = [
        path_of_tag(tmp_path, tag, step, suffix) for tag in ODD_TAGS for step in (3, 4) for suffix in (".md", ".json")
    ]
    assert len(set(paths)) == 4 * len(ODD_TAGS)
    for path in paths:
        assert path.resolve().is_relative_to(tmp_path.resolve())
        path.write_text("can be written")


@pytest.mark.parametrize("longest", [50, 100, 250])
def test_shortened(longest: int) -> None:
    """A short tag is unchanged; a long one keeps its beginning and its end at the maximum length."""
    short = [shortened(tag, longest) for tag in ODD_TAGS]
    assert len(set(short)) == len(ODD_TAGS)
    for tag, each in zip(ODD_TAGS, short, strict=True):
        if len(tag) <= longest:
            assert each == tag
        else:
            assert len(each) == longest
            assert (each[:15], each[-15:]) == (tag[:15], tag[-15:])


def test_a_safe_segment_counts_bytes() -> None:
    """A long segment is truncated to the maximum number of bytes, without splitting a character."""
    assert safe_segment("層" * 300).rpartition("-")[0] == "層" * 26
    assert safe_segment("x" * 80) == "x" * 80
    assert safe_segment("x" * 81).rpartition("-")[0] == "x" * 80


def test_copying_a_file_onto_itself(tmp_path: Path) -> None:
    """A file that is already at its target stays unchanged, whichever path refers to it."""
    (tmp_path / "folder").mkdir()
    path = tmp_path / "a.txt"
    path.write_text("text")
    copy_file(tmp_path / "folder" / ".." / "a.txt", path)
    assert path.read_text() == "text"
