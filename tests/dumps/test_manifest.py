"""Tests of the list of dumps in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_recorder import read_manifest
from lightning_recorder.dumps import MANIFEST, remove_dump, write_dump


def dump(folder: Path, name: str, **about: Any) -> None:
    tensors = {
        "conv.1/mean": torch.tensor(0.5, dtype=torch.float64),
        "conv.1/histogram": torch.zeros(8, dtype=torch.int64),
        "a/b/mean": torch.tensor(0.25, dtype=torch.float64),
    }
    write_dump(folder / name, tensors, {"conv.1": 640, "a/b": 32}, **about)


def test_a_line_says_what_is_in_a_dump(tmp_path: Path) -> None:
    """A line has the file, the writer's arguments, dtype and shape of each statistic, and the samples of each site."""
    dump(tmp_path, "a.safetensors", step=3, epoch=0, stage="train", rank=0, checkpoint="last.ckpt", group="activations")
    assert read_manifest(tmp_path) == [
        {
            "file": "a.safetensors",
            "kind": "statistics",
            "bytes": (tmp_path / "a.safetensors").stat().st_size,
            "step": 3,
            "epoch": 0,
            "stage": "train",
            "rank": 0,
            "checkpoint": "last.ckpt",
            "group": "activations",
            "statistics": {
                "mean": {"dtype": "float64", "shape": []},
                "histogram": {"dtype": "int64", "shape": [8]},
            },
            "sites": {"conv.1": 640, "a/b": 32},
        }
    ]


def test_a_line_of_plain_tensors(tmp_path: Path) -> None:
    """Each tensor that is not a statistic has its own dtype and shape."""
    tensors = {"conv.1/out": torch.zeros(2, 3, dtype=torch.bfloat16), "fc/in[0]": torch.zeros(4)}
    size = write_dump(tmp_path / "a.safetensors", tensors, step=7, group="tensors")
    (line,) = read_manifest(tmp_path)
    assert (line["kind"], line["bytes"], line["step"]) == ("tensors", size, 7)
    assert line["tensors"] == {
        "conv.1/out": {"dtype": "bfloat16", "shape": [2, 3]},
        "fc/in[0]": {"dtype": "float32", "shape": [4]},
    }


def test_each_rank_has_lines_of_its_own(tmp_path: Path) -> None:
    """The dumps of all ranks are listed, starting with the first rank, and no two ranks write to one file."""
    for rank in (10, 0, 2):
        dump(tmp_path, f"of-{rank}.safetensors", rank=rank)
    assert [line["rank"] for line in read_manifest(tmp_path)] == [0, 2, 10]
    assert len(list(tmp_path.glob("recorder-manifest*.jsonl"))) == 3


def test_dumps_are_listed_in_the_order_of_writing(tmp_path: Path) -> None:
    """Dumps are listed in the order of the first write, not by name."""
    for step, name in enumerate(("c", "a", "b")):
        dump(tmp_path, f"{name}.safetensors", step=step)
    assert [line["file"][0] for line in read_manifest(str(tmp_path))] == ["c", "a", "b"]


def test_a_folder_without_dumps(tmp_path: Path) -> None:
    """The list is empty if nothing was written."""
    assert read_manifest(tmp_path) == []


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    """The error names the first missing part of the path, and similar names."""
    (tmp_path / "lightning_logs").mkdir()
    message = rf"there is no 'lightning_log' in '{tmp_path}': did you mean '{tmp_path}/lightning_logs'\?$"
    with pytest.raises(FileNotFoundError, match=message):
        read_manifest(tmp_path / "lightning_log" / "version_0")
    with pytest.raises(FileNotFoundError, match=r"there is no 'nowhere' in '"):
        read_manifest(tmp_path / "nowhere")


def test_a_run_has_the_dumps_of_its_checkpoints_and_its_own(tmp_path: Path) -> None:
    """The log_dir of a run lists the dumps of all its manifests; each folder or manifest can also be read alone."""
    checkpoints, recorder = tmp_path / "checkpoints", tmp_path / "recorder"
    for folder, name in ((checkpoints, "a.safetensors"), (recorder / "dumps", "b.safetensors")):
        dump(folder, name, step=1)
    expected = ["checkpoints/a.safetensors", "recorder/dumps/b.safetensors"]
    assert [line["file"] for line in read_manifest(tmp_path)] == expected
    assert all((tmp_path / line["file"]).is_file() for line in read_manifest(tmp_path))
    for path in (checkpoints, checkpoints / MANIFEST):
        assert [line["file"] for line in read_manifest(path)] == ["a.safetensors"]
    assert [line["file"] for line in read_manifest(recorder)] == ["dumps/b.safetensors"]
    assert [line["file"] for line in read_manifest(recorder / "dumps")] == ["b.safetensors"]


def test_a_folder_above_a_run_names_it(tmp_path: Path) -> None:
    """For a folder above a run with dumps, the error shows the call that reads that run."""
    dump(tmp_path / "version_0" / "checkpoints", "a.safetensors", step=1)
    with pytest.raises(FileNotFoundError, match=r"but there is one in '.*version_0/checkpoints': read_manifest\('"):
        read_manifest(tmp_path)


def test_a_removed_dump_is_not_listed(tmp_path: Path) -> None:
    """A dump that was removed with its checkpoint is not listed; written again, it is listed in its old place."""
    for step, name in enumerate(("a", "b")):
        dump(tmp_path, f"{name}.safetensors", step=step)
    remove_dump(tmp_path / "a.safetensors")
    assert [line["step"] for line in read_manifest(tmp_path)] == [1]
    dump(tmp_path, "a.safetensors", step=2)
    assert [(line["file"][0], line["step"]) for line in read_manifest(tmp_path)] == [("a", 2), ("b", 1)]


def test_a_dump_that_was_written_again_is_listed_once(tmp_path: Path) -> None:
    """If several lines refer to one file, such as one next to ``last.ckpt``, the newest is used."""
    for step in (1, 2, 3):
        dump(tmp_path, "last.safetensors", step=step)
    assert [line["step"] for line in read_manifest(tmp_path)] == [3]
    assert len((tmp_path / MANIFEST).read_text().splitlines()) == 3


@pytest.mark.parametrize("cut", [1, 2, 30, 150])
def test_a_torn_last_line(cut: int, tmp_path: Path) -> None:
    """An incomplete line from a killed run is ignored, and the others are listed."""
    dump(tmp_path, "a.safetensors", step=1)
    dump(tmp_path, "b.safetensors", step=2)
    manifest = tmp_path / MANIFEST
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[:-cut])
    expected = ["a.safetensors", "b.safetensors"] if cut == 1 else ["a.safetensors"]  # the last byte ends the line
    assert [line["file"] for line in read_manifest(tmp_path)] == expected


@pytest.mark.parametrize("cut", [1, 30])
def test_writing_after_a_torn_line(cut: int, tmp_path: Path) -> None:
    """A run that continues in the folder of a killed run has all its dumps listed."""
    dump(tmp_path, "a.safetensors", step=1)
    manifest = tmp_path / MANIFEST
    manifest.write_bytes(manifest.read_bytes()[:-cut])
    dump(tmp_path, "b.safetensors", step=2)
    dump(tmp_path, "c.safetensors", step=3)
    assert [line["step"] for line in read_manifest(tmp_path)][-2:] == [2, 3]


@pytest.mark.parametrize(
    "garbage",
    [
        "",
        "   ",
        "no JSON",
        "null",
        "3",
        '"a.safetensors"',
        "[1, 2]",
        "{}",
        '{"file": null}',
        '{"file": 3}',
        '{"file": ["a.safetensors"]}',
        '{"file": "nothing.safetensors"}',
        '{"file": ""}',
        '{"file": "."}',
        '{"file": "nul\\u0000"}',
        "\udcff\udcfe",
        "[" * 100_000,
    ],
    ids=lambda garbage: ascii(garbage)[:30],
)
def test_garbage_is_skipped(garbage: str, tmp_path: Path) -> None:
    """A line that is not JSON, or does not refer to an existing dump, does not hide other lines."""
    dump(tmp_path, "a.safetensors", step=1)
    with (tmp_path / MANIFEST).open("ab") as file:
        file.write(garbage.encode("utf-8", "surrogateescape") + b"\n")
    dump(tmp_path, "b.safetensors", step=2)
    assert [line["step"] for line in read_manifest(tmp_path)] == [1, 2]


@pytest.mark.parametrize("name", ["../outside.safetensors", "sub/inside.safetensors", "./a.safetensors", "{}"])
def test_a_name_is_no_path(name: str, tmp_path: Path) -> None:
    """A line with a file in another folder is ignored, even if the file exists."""
    folder = tmp_path / "run"
    dump(folder, "a.safetensors", step=1)
    dump(folder / "sub", "inside.safetensors", step=2)
    dump(tmp_path, "outside.safetensors", step=3)
    with (folder / MANIFEST).open("a") as file:
        absolute = str(tmp_path / "outside.safetensors")
        file.write(json.dumps({"file": absolute if name == "{}" else name, "step": 4}) + "\n")
    assert [line["step"] for line in read_manifest(folder)] == [1]


def test_a_folder_is_no_dump(tmp_path: Path) -> None:
    """A line that names a folder is ignored."""
    dump(tmp_path, "a.safetensors", step=1)
    (tmp_path / "sub").mkdir()
    with (tmp_path / MANIFEST).open("a") as file:
        file.write('{"file": "sub", "step": 2}\n')
    assert [line["step"] for line in read_manifest(tmp_path)] == [1]
