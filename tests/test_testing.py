"""Tests of the assertions for tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_recorder import ArgumentError, open_recording
from lightning_recorder.testing import assert_same
from tests.recordings.runs import record_run, write_simple


def test_equal_runs_pass(tmp_path: Path) -> None:
    """A run equal to its reference passes, given as a path, a recording or a run."""
    record_run(tmp_path / "a")
    record_run(tmp_path / "b")
    opened = open_recording(tmp_path / "b")
    for reference in (tmp_path / "b", str(tmp_path / "b"), opened, opened.run):
        assert assert_same(tmp_path / "a", reference, exact=True).steps == 4


def test_a_difference_is_explained(tmp_path: Path) -> None:
    """The error names the cause, the first difference, and the sites that differ most."""
    write_simple(tmp_path / "reference", {0: 1.0, 1: 2.0})
    write_simple(tmp_path / "run", {0: 1.0, 1: 2.5})
    with pytest.raises(AssertionError) as caught:
        assert_same(tmp_path / "run", tmp_path / "reference")
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(
        "the run differs from the reference (A: reference, B: run): same until step 0, then fc is"
    )
    assert lines[1:] == [
        "first difference: step 1, fc (activations, rms 2 vs 2.5)",
        "1 step differs: fc (activations, rms 2 vs 2.5)",
    ]
    assert_same(tmp_path / "run", tmp_path / "reference", rtol=0.3)


def test_names_and_nothing_to_compare(tmp_path: Path) -> None:
    """Runs without a common site fail, unless rules map the names; a wrong argument is an ArgumentError."""
    write_simple(tmp_path / "reference", {0: 1.0}, site="old.fc")
    write_simple(tmp_path / "run", {0: 1.0}, site="new.fc")
    with pytest.raises(AssertionError, match="nothing to compare: no site has the same name"):
        assert_same(tmp_path / "run", tmp_path / "reference")
    assert assert_same(tmp_path / "run", tmp_path / "reference", names=["old.*=new.*"]).compared == 1
    with pytest.raises(ArgumentError, match="neither run has the recorder 'x'"):
        assert_same(tmp_path / "run", tmp_path / "reference", recorder="x")
