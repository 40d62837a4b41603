"""Tests of dumps that are read one tensor at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lightning_recorder import ArgumentError, DumpError
from lightning_recorder.dumps import MANIFEST, write_dump
from lightning_recorder.recordings import open_recording
from tests.recordings.runs import write_simple

TENSORS = {"fc/out": torch.arange(6.0).reshape(2, 3), "head/out": torch.ones(2, dtype=torch.int64)}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a dump next to a checkpoint, and with a dump of raw tensors."""
    write_simple(tmp_path / "run", {0: 1.0})
    write_dump(tmp_path / "run" / "checkpoints" / "b.safetensors", TENSORS, {"fc": 6}, step=20)
    write_dump(tmp_path / "run" / "recorder" / "dumps" / "a.safetensors", TENSORS, {}, step=10, kind="tensors")
    return tmp_path / "run"


def test_dumps_are_found_below_the_run(run: Path) -> None:
    """All dumps of a run are listed by step with their manifest entries, including those next to checkpoints."""
    dumps = open_recording(run).dumps
    assert [(dump.path.name, dump.step, dump.kind) for dump in dumps] == [
        ("a.safetensors", 10, "tensors"),
        ("b.safetensors", 20, "statistics"),
    ]
    assert dumps[1].about["sites"] == {"fc": 6}
    assert dumps[1].size_bytes == (run / "checkpoints" / "b.safetensors").stat().st_size


def test_one_tensor_is_loaded(run: Path) -> None:
    """Names and tensors equal those that were written; an unknown name raises an error with the closest one."""
    dump = open_recording(run).dumps[0]
    assert sorted(dump.names) == ["fc/out", "head/out"]
    assert torch.equal(dump.load("fc/out"), TENSORS["fc/out"])
    assert {name: each.tolist() for name, each in dump.tensors.items()} == {
        name: each.tolist() for name, each in TENSORS.items()
    }
    with pytest.raises(ArgumentError, match="no tensor 'fc/o'; the closest name is 'fc/out'"):
        dump.load("fc/o")


def test_a_dump_that_is_cut_off(run: Path) -> None:
    """A truncated file raises an error for every tensor."""
    path = run / "recorder" / "dumps" / "a.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DumpError, match="not a readable safetensors file"):
        open_recording(run).dumps[0].load("fc/out")


def test_missing_keys(run: Path) -> None:
    """A manifest line with only a file name is a statistics dump without a step, listed last."""
    (run / "recorder" / "dumps" / MANIFEST).write_text('{"file": "a.safetensors", "step": "x", "more": {"a": [1]}}\n')
    dump = open_recording(run).dumps[-1]
    assert (dump.path.name, dump.step, dump.kind) == ("a.safetensors", None, "statistics")


def test_files_of_others(run: Path) -> None:
    """A safetensors file of another program is not a dump and is not listed."""
    dump = next(each for each in open_recording(run).dumps if each.path.name == "a.safetensors")
    save_file(TENSORS, run / "recorder" / "dumps" / "a.safetensors", metadata={"format": "pt"})
    with pytest.raises(DumpError, match="was not written by lightning_recorder"):
        _ = dump.names
    assert "a.safetensors" not in [each.path.name for each in open_recording(run).dumps]


def test_a_dump_that_is_gone(run: Path) -> None:
    """A dump that was deleted after it was listed raises DumpError."""
    dump = open_recording(run).dumps[0]
    dump.path.unlink()
    assert dump.size_bytes == 0
    with pytest.raises(DumpError, match=r"a\.safetensors"):
        dump.load("fc/out")


@pytest.mark.parametrize("name", ["../outside.safetensors", "sub/../../outside.safetensors", "link.safetensors", "{}"])
def test_no_way_leads_out_of_a_run(name: str, run: Path) -> None:
    """A manifest cannot refer to a file outside the run, neither by path nor by symbolic link."""
    outside = run.parent / "outside.safetensors"
    write_dump(outside, TENSORS, {})
    folder = run / "recorder" / "dumps"
    (folder / "link.safetensors").symlink_to(outside)
    (folder / MANIFEST).write_text(json.dumps({"file": str(outside) if name == "{}" else name, "step": 1}) + "\n")
    assert [dump.path.name for dump in open_recording(run).dumps] == ["b.safetensors"]


def test_links_to_folders_and_records(run: Path) -> None:
    """Linked folders are not searched, and linked record files outside the run are not read."""
    write_simple(run.parent / "other", {0: 2.0}, "gradients")
    (run / "linked").symlink_to(run.parent / "other", target_is_directory=True)
    other = run.parent / "other" / "recorder" / "records" / "gradients.jsonl"
    (run / "recorder" / "records" / "gradients.jsonl").symlink_to(other)
    (run / "recorder" / "records" / "loop.jsonl").symlink_to("loop.jsonl")
    assert open_recording(run).recorders == ["activations"]
    assert len(open_recording(run).dumps) == 2


def test_a_pipe_is_no_file(run: Path) -> None:
    """A named pipe, which would block the reader, is not opened."""
    import os

    os.mkfifo(run / "recorder" / "records" / "pipe.jsonl")
    os.mkfifo(run / "recorder" / "graph.json")
    recording = open_recording(run)
    assert (recording.recorders, recording.graph) == (["activations"], None)
