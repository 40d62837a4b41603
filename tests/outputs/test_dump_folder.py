"""Tests of the files, size limits and uploads of dumps."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import torch
from typing_extensions import override

from lightning_recorder import MemorySink, RecorderWarning, Sink, read_dump, read_manifest
from lightning_recorder.outputs import DumpFolder
from lightning_recorder.outputs.dump_folder import DumpContent
from lightning_recorder.sinks import MultiSink, for_any_thread


def content(step: int = 0, floats: int = 4) -> DumpContent:
    return DumpContent(step, 2, {"m/out": torch.full((floats,), float(step))})


def folder(path: Path | None, **options: object) -> DumpFolder:
    return DumpFolder("tensors", group="tensors", directory=path, **options)  # type: ignore[arg-type]  # whatever a test gives


def write_all(dumps: DumpFolder, steps: Iterable[int]) -> None:
    for step in steps:
        dumps.write(content(step), "step")


def files(path: Path) -> list[str]:
    return sorted(each.name for each in path.rglob("*") if each.is_file() and each.suffix == ".safetensors")


def test_a_line_says_what_lies_there(tmp_path: Path) -> None:
    """The manifest has step, epoch, stage, rank, reason, group, bytes and tensors of a dump, and so has the file."""
    path = folder(tmp_path / "dumps").write(content(7), "step")
    assert path == tmp_path / "dumps" / "tensors-step=7.safetensors"
    (line,) = read_manifest(tmp_path / "dumps")
    assert line == {
        "file": "tensors-step=7.safetensors",
        "kind": "tensors",
        "bytes": path.stat().st_size,
        "step": 7,
        "epoch": 2,
        "stage": "train",
        "rank": 0,
        "group": "tensors",
        "reason": "step",
        "tensors": {"m/out": {"dtype": "float32", "shape": [4]}},
    }
    assert read_dump(path).about == {
        "step": "7",
        "epoch": "2",
        "stage": "train",
        "rank": "0",
        "group": "tensors",
        "reason": "step",
    }


@pytest.mark.parametrize(
    ("checkpoint", "name"),
    [
        ("last.ckpt", "last.tensors.safetensors"),
        ("epoch=1-step=2.ckpt", "epoch=1-step=2.tensors.safetensors"),
        ("noend", "noend.tensors.safetensors"),
        ("val=0.5", "val=0.5.tensors.safetensors"),
        ("a.ckpt.ckpt", "a.ckpt.tensors.safetensors"),
    ],
)
def test_a_dump_beside_a_checkpoint_is_named_after_it(checkpoint: str, name: str, tmp_path: Path) -> None:
    """A dump next to a checkpoint names it in the manifest and is removed with it."""
    dumps = folder(None)
    dumps.write_beside(content(3), tmp_path / checkpoint)
    assert files(tmp_path) == [name]
    (line,) = read_manifest(tmp_path)
    assert (line["checkpoint"], line["reason"]) == (checkpoint, "checkpoint")
    dumps.remove_beside(tmp_path / checkpoint)
    dumps.remove_beside(tmp_path / checkpoint)
    assert files(tmp_path) == []
    assert read_manifest(tmp_path) == []


def test_ranks_have_files_and_manifests_of_their_own(tmp_path: Path) -> None:
    """The file names of all ranks but the first contain the rank, and a reader finds all of them in rank order."""
    for rank in (10, 2, 0):
        each = folder(tmp_path, rank=rank)
        each.write(content(5), "step")
        each.write_beside(content(5), tmp_path / "a.ckpt")
    assert [(line["rank"], line["file"]) for line in read_manifest(tmp_path)] == [
        (0, "tensors-step=5.safetensors"),
        (0, "a.tensors.safetensors"),
        (2, "tensors-rank2-step=5.safetensors"),
        (2, "a.tensors-rank2.safetensors"),
        (10, "tensors-rank10-step=5.safetensors"),
        (10, "a.tensors-rank10.safetensors"),
    ]


def test_without_a_folder_there_are_dumps_beside_checkpoints_alone(tmp_path: Path) -> None:
    """Without a folder, one warning says that only dumps next to checkpoints are written."""
    dumps = folder(None, name="the dumper")
    with pytest.warns(RecorderWarning) as warned:
        assert [dumps.write(content(step), "step") for step in range(3)] == [None] * 3
    assert [str(each.message) for each in warned] == [
        "the dumper writes only dumps beside checkpoints, because the run has no folder"
    ]
    dumps.write_beside(content(), tmp_path / "a.ckpt")
    assert files(tmp_path) == ["a.tensors.safetensors"]


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_the_folder_takes_no_more_than_its_limit(steps: int, tmp_path: Path) -> None:
    """The folder holds exactly the dumps that fit, and one warning names the first step without a dump."""
    probe = folder(tmp_path / "probe").write(content(1), "step")
    assert probe is not None
    size = probe.stat().st_size
    limit = size * steps + size // 2
    dumps = folder(tmp_path / "dumps", max_total_bytes=limit, name="the dumper")
    with pytest.warns(RecorderWarning) as warned:
        write_all(dumps, range(1, 7))
    assert [str(each.message) for each in warned] == [
        f"the dumper writes no more dumps from step {steps + 1} on: the size would exceed max_total_bytes={limit}"
    ]
    assert len(files(tmp_path / "dumps")) == steps
    dumps.write_beside(content(9), tmp_path / "kept" / "a.ckpt")
    assert files(tmp_path / "kept") == ["a.tensors.safetensors"]


def test_the_limit_counts_whole_files(tmp_path: Path) -> None:
    """Names and shapes count as well: many small tensors do not exceed ``max_total_bytes``."""
    tensors = {f"{'layer' * 20}{index}/mean": torch.tensor(1.0) for index in range(50)}
    dumps = folder(tmp_path, max_total_bytes=1000)
    with pytest.warns(RecorderWarning, match="max_total_bytes=1000"):
        dumps.write(DumpContent(0, 0, tensors), "step")
    assert sum(path.stat().st_size for path in tmp_path.glob("*.safetensors")) <= 1000


def test_a_file_that_is_replaced_counts_once(tmp_path: Path) -> None:
    """A step that is dumped again, such as at the end of its epoch, has one file and counts once."""
    probe = folder(tmp_path / "probe").write(content(1), "step")
    assert probe is not None
    dumps = folder(tmp_path / "dumps", max_total_bytes=2 * probe.stat().st_size)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [
            dumps.write(content(step), why) is not None for step, why in [(1, "step"), (1, "epoch"), (2, "step")]
        ] == [
            True,
            True,
            True,
        ]
    assert [(line["step"], line["reason"]) for line in read_manifest(tmp_path / "dumps")] == [(1, "epoch"), (2, "step")]


@pytest.mark.parametrize("widths", [(4, 4), (4, 10)])
def test_the_manifest_does_not_lie_about_shapes(widths: tuple[int, int], tmp_path: Path) -> None:
    """If the length of a statistic differs between sites, such as the number of channels, no shape is given."""
    tensors = {f"{site}/channel_mean": torch.zeros(width) for site, width in zip("ab", widths, strict=True)}
    folder(tmp_path).write(DumpContent(0, 0, tensors, {"a": 1, "b": 1}), "record")
    (line,) = read_manifest(tmp_path)
    logged = line["statistics"]["channel_mean"]
    for name, tensor in read_dump(tmp_path / line["file"]).tensors.items():
        found = logged.get("shape", logged.get(name.partition("/")[0]))
        found = found.get("shape") if isinstance(found, Mapping) else found
        assert found is None or found == list(tensor.shape)


# Uploads

HEAD = "| step | file | why | tensors | bytes | uploaded |\n|---:|---|---|---:|---:|---|"


class Board(Sink):
    """A sink that shows text and supports no files, like TensorBoard."""

    any_thread = True

    def __init__(self) -> None:
        self.texts: list[tuple[int, dict[str, str]]] = []

    @override
    def write_text(self, step: int, texts: Mapping[str, str]) -> bool:
        self.texts.append((step, dict(texts)))
        return True


def test_files_and_a_table_are_handed_over(tmp_path: Path) -> None:
    """A sink that supports files receives each dump, and a sink that supports text a table of the dumps so far."""
    sink = MemorySink()
    dumps = folder(tmp_path, upload=sink, max_upload_bytes=10**6)
    first = dumps.write(content(1), "step")
    second = dumps.write_beside(content(2), tmp_path / "a.ckpt")
    assert first is not None
    assert second is not None
    assert sink.files == {f"dumps/{first.name}": {1: first}, f"dumps/{second.name}": {2: second}}
    rows = [
        f"| 1 | `{first.name}` | step | 1 | {first.stat().st_size:,} | yes |",
        f"| 2 | `{second.name}` | checkpoint | 1 | {second.stat().st_size:,} | yes |",
    ]
    assert sink.texts == {"recorder/tensors/dumps": {1: f"{HEAD}\n{rows[0]}", 2: "\n".join([HEAD, *rows])}}


def test_no_more_than_so_many_bytes_are_uploaded(tmp_path: Path) -> None:
    """From the first dump that does not fit on, nothing is uploaded; one warning says so, and the table shows it."""
    sink = MemorySink()
    probe = folder(tmp_path / "probe").write(content(1), "step")
    assert probe is not None
    limit = 2 * probe.stat().st_size
    dumps = folder(tmp_path / "dumps", upload=sink, max_upload_bytes=limit, name="the dumper")
    with pytest.warns(RecorderWarning) as warned:
        write_all(dumps, range(1, 6))
    assert [str(each.message) for each in warned] == [
        f"the dumper uploads no more dumps from step 3 on: the size would exceed max_upload_bytes={limit}"
    ]
    assert list(sink.files) == [f"dumps/tensors-step={step}.safetensors" for step in (1, 2)]
    table = sink.texts["recorder/tensors/dumps"][5].splitlines()[2:]
    assert [row.split(" | ")[-1] for row in table] == ["yes |", "yes |", "- |", "- |", "- |"]
    assert len(files(tmp_path / "dumps")) == 5


def test_nothing_is_uploaded_behind_the_first_that_has_no_room(tmp_path: Path) -> None:
    """A smaller file after the first that does not fit is not uploaded either."""
    sink = MemorySink()
    dumps = folder(tmp_path, upload=sink, max_upload_bytes=1000)
    with pytest.warns(RecorderWarning, match="from step 0 on"):
        dumps.write(content(0, floats=1000), "step")
    dumps.write(content(1), "step")
    assert sink.files == {}


def test_the_table_has_the_latest_twenty(tmp_path: Path) -> None:
    """The table has at most 20 rows."""
    sink = MemorySink()
    dumps = folder(tmp_path, upload=sink, max_upload_bytes=10**6)
    for step in range(25):
        dumps.write(content(step), "step")
    rows = sink.texts["recorder/tensors/dumps"][24].splitlines()[2:]
    assert [int(row.split("|")[1]) for row in rows] == list(range(5, 25))


@pytest.mark.parametrize("any_thread", [True, False])
def test_the_table_says_uploaded_only_of_what_somebody_keeps(any_thread: bool, tmp_path: Path) -> None:
    """If no sink supports files, no row says that a dump was uploaded, whichever thread writes the table."""
    board = Board()
    board.any_thread = any_thread
    sink = MultiSink([for_any_thread(board)])
    folder(tmp_path, upload=sink, max_upload_bytes=10**6).write(content(1), "step")
    sink.replay()
    ((step, texts),) = board.texts
    assert step == 1
    assert texts["recorder/tensors/dumps"].endswith("| - |")


def test_without_a_sink_for_files_there_is_no_warning_of_a_limit(tmp_path: Path) -> None:
    """If no sink supports files, ``max_upload_bytes`` causes no warning."""
    sink = MultiSink([Board()])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        folder(tmp_path, upload=sink, max_upload_bytes=1).write(content(1), "step")
    assert [str(each.message) for each in warned] == []


@pytest.mark.parametrize("any_thread", [True, False])
def test_dumps_of_two_folders_do_not_take_each_others_place(any_thread: bool, tmp_path: Path) -> None:
    """Dumps of checkpoints with the same name in two folders have different upload names."""
    sink = MemorySink()
    sink.any_thread = any_thread
    deferred = MultiSink([for_any_thread(sink)])
    dumps = folder(None, upload=deferred, max_upload_bytes=10**6)
    for place in ("best", "latest"):
        dumps.write_beside(content(1), tmp_path / place / "a.ckpt")
    deferred.replay()
    given = [path for by_step in sink.files.values() for path in by_step.values()]
    assert sorted(path.parent.name for path in given) == ["best", "latest"]


def test_a_dump_that_was_pruned_before_its_turn_costs_no_sink(tmp_path: Path) -> None:
    """A dump that is removed before its upload is skipped; later ones are uploaded."""

    class Keeper(MemorySink):
        any_thread = False

        @override
        def write_files(self, step: int, files: Mapping[str, Path]) -> bool:
            for path in files.values():
                path.read_bytes()
            return super().write_files(step, files)

    sink = Keeper()
    deferred = MultiSink([for_any_thread(sink)])
    dumps = folder(tmp_path, upload=deferred, max_upload_bytes=10**6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dumps.write_beside(content(1), tmp_path / "a.ckpt")
        dumps.remove_beside(tmp_path / "a.ckpt")
        deferred.replay()
        dumps.write_beside(content(2), tmp_path / "b.ckpt")
        deferred.replay()
    assert [path.name for by_step in sink.files.values() for path in by_step.values()] == ["b.tensors.safetensors"]
