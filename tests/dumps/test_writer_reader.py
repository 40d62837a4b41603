"""Dumps written and read back, and what is left when writing fails."""

from __future__ import annotations

import os
import pickle
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightning_recorder import DumpError, read_dump, read_manifest
from lightning_recorder.dumps import remove_dump, write_dump, write_tensors

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """Everything that makes a tensor what it is."""
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_come_back_to_the_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    """Dtype, shape and every bit are those that were written, for scalars and for tensors without elements too."""
    values = torch.tensor([0.0, -0.0, 1.5, -3.0, 1e-3, 77.0]).to(dtype)
    tensors = {"fc/mean": values[3].clone(), "fc/histogram": values.reshape(2, 3), "fc/empty": values[:0].clone()}
    write_dump(tmp_path / "a.safetensors", tensors, {"fc": 6})
    read = read_dump(tmp_path / "a.safetensors")
    assert {name: bits(tensor) for name, tensor in read.tensors.items()} == {
        name: bits(tensor) for name, tensor in tensors.items()
    }


def test_special_numbers_come_back(tmp_path: Path) -> None:
    """NaN with its payload, infinities, subnormals and the sign of zero survive."""
    patterns = [0x7FF8000000000001, 0x7FF0000000000000, -0x0010000000000000, 1, -0x8000000000000000]
    special = torch.tensor(patterns, dtype=torch.int64).view(torch.float64)
    write_dump(tmp_path / "a.safetensors", {"fc/x": special}, {})
    assert read_dump(tmp_path / "a.safetensors").tensors["fc/x"].view(torch.int64).tolist() == patterns


def test_a_view_is_written_as_it_looks(tmp_path: Path) -> None:
    """A transposed, strided or expanded tensor, or one that takes part in autograd, is written as plain values."""
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "transposed": base.t(),
        "strided": base[:, ::2].clone()[:, :1],
        "expanded": torch.tensor([3.0]).expand(4),
        "learned": torch.nn.Parameter(torch.ones(2)),
    }
    write_dump(tmp_path / "a.safetensors", tensors, {})
    read = read_dump(tmp_path / "a.safetensors").tensors
    assert {name: tensor.tolist() for name, tensor in read.items()} == {
        name: tensor.tolist() for name, tensor in tensors.items()
    }
    assert not any(tensor.requires_grad for tensor in read.values())


def test_tensors_that_share_memory(tmp_path: Path) -> None:
    """Tensors that are the same, or parts of one another, are each written under their name."""
    state = torch.arange(6.0)
    tensors = {"a/state": state, "b/state": state, "a/head": state[:4], "b/tail": state[2:]}
    write_dump(tmp_path / "a.safetensors", tensors, {})
    read = read_dump(tmp_path / "a.safetensors").tensors
    assert {name: tensor.tolist() for name, tensor in read.items()} == {
        name: tensor.tolist() for name, tensor in tensors.items()
    }


HOSTILE = [
    "../../etc/passwd/mean",
    "/absolute/mean",
    "C:\\windows/mean",
    "quote\"s'/mean",
    "new\nline/mean",
    "nul\0/mean",
    "{}[]:,/mean",
    "名前🔥/mean",
    " /mean",
    "a/b/c/mean",
    "x" * 3000 + "/mean",
]


def test_hostile_names_are_data(tmp_path: Path) -> None:
    """Whatever a site is called is a name in the file and never a path."""
    folder = tmp_path / "inside"
    tensors = {name: torch.tensor(float(index)) for index, name in enumerate(HOSTILE)}
    samples = {name.rpartition("/")[0]: index for index, name in enumerate(HOSTILE)}
    write_dump(folder / "a.safetensors", tensors, samples, step=3)
    assert names(tmp_path) == ["inside"]
    assert names(folder) == ["a.safetensors", "recorder-manifest.jsonl"]
    assert {name: tensor.item() for name, tensor in read_dump(folder / "a.safetensors").tensors.items()} == {
        name: tensor.item() for name, tensor in tensors.items()
    }
    (line,) = read_manifest(folder)
    assert line["sites"] == samples


@settings(max_examples=50)
@given(
    tensors=st.dictionaries(
        # safetensors keeps its own entry under that name, and JSON in a file has no lone surrogates.
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda name: name != "__metadata__"),
        st.lists(st.floats(width=32), max_size=5).map(lambda values: torch.tensor(values, dtype=torch.float32)),
        max_size=5,
    )
)
def test_any_names_and_values(tensors: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Writing and reading is the identity."""
    path = tmp_path_factory.mktemp("dump") / "a.safetensors"
    write_dump(path, tensors, {})
    assert {name: bits(each) for name, each in read_dump(path).tensors.items()} == {
        name: bits(each) for name, each in tensors.items()
    }


def test_what_is_said_about_a_dump_comes_back(tmp_path: Path) -> None:
    """Step, epoch, checkpoint and the like are in the file too, as strings, so that it can stand alone."""
    write_dump(
        tmp_path / "a.safetensors", {}, {}, step=3, epoch=0, stage="train", rank=1, checkpoint="epoch=0.ckpt", group="é"
    )
    assert read_dump(tmp_path / "a.safetensors").about == {
        "step": "3",
        "epoch": "0",
        "stage": "train",
        "rank": "1",
        "checkpoint": "epoch=0.ckpt",
        "group": "é",
    }


def test_other_tools_read_it(tmp_path: Path) -> None:
    """The file is a plain safetensors file."""
    write_dump(tmp_path / "a.safetensors", {"fc/mean": torch.tensor(0.5)}, {})
    assert load_file(tmp_path / "a.safetensors") == {"fc/mean": torch.tensor(0.5)}


def test_the_folder_is_made(tmp_path: Path) -> None:
    """A dump may be the first file of its folder."""
    write_dump(str(tmp_path / "deep" / "inside" / "a.safetensors"), {}, {})
    assert names(tmp_path / "deep" / "inside") == ["a.safetensors", "recorder-manifest.jsonl"]


# One file or none.


def test_nothing_temporary_is_left(tmp_path: Path) -> None:
    """After writing, and writing again, there is the dump and the manifest."""
    for value in (1.0, 2.0):
        write_dump(tmp_path / "a.safetensors", {"fc/mean": torch.tensor(value)}, {})
    assert names(tmp_path) == ["a.safetensors", "recorder-manifest.jsonl"]
    assert read_dump(tmp_path / "a.safetensors").tensors["fc/mean"].item() == 2.0


@contextmanager
def full_disk(free_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond a size, which ends a write as a full disk does: with an error of I/O."""
    resource = pytest.importorskip("resource", reason="limits of a process are a matter of Unix")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk(tmp_path: Path) -> None:
    """When the disk fills up an OSError is raised, the dump from before stays whole, and no half file is left."""
    path = tmp_path / "a.safetensors"
    write_dump(path, {"fc/mean": torch.tensor(1.0)}, {}, step=1)
    before = path.read_bytes(), read_manifest(tmp_path)
    large = {"fc/mean": torch.zeros(100_000)}
    with pytest.raises(OSError, match="too large"), full_disk(10_000):
        write_dump(path, large, {}, step=2)
    assert (path.read_bytes(), read_manifest(tmp_path)) == before
    assert names(tmp_path) == ["a.safetensors", "recorder-manifest.jsonl"]


def test_a_name_that_is_taken_by_a_folder(tmp_path: Path) -> None:
    """When the dump cannot be put under its name nothing is left of it and the manifest does not speak of it."""
    (tmp_path / "a.safetensors").mkdir()
    with pytest.raises(IsADirectoryError):
        write_dump(tmp_path / "a.safetensors", {"fc/mean": torch.tensor(1.0)}, {})
    assert names(tmp_path) == ["a.safetensors"]


def test_a_tensor_that_cannot_be_written(tmp_path: Path) -> None:
    """When a tensor has no values to write the dump from before stays."""
    path = tmp_path / "a.safetensors"
    write_dump(path, {"fc/mean": torch.tensor(1.0)}, {})
    with pytest.raises(NotImplementedError):  # torch's own, of a copy from the meta device
        write_dump(path, {"fc/mean": torch.zeros(2, device="meta")}, {})
    assert read_dump(path).tensors["fc/mean"].item() == 1.0
    assert names(tmp_path) == ["a.safetensors", "recorder-manifest.jsonl"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such modes")
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600), (0o002, 0o664)])
def test_who_may_read_it_is_the_umask_s_choice(umask: int, mode: int, tmp_path: Path) -> None:
    """A dump is as readable as any file that the run writes, and the run's umask stays as it was."""
    before = os.umask(umask)
    try:
        write_dump(tmp_path / "a.safetensors", {"fc/mean": torch.tensor(1.0)}, {})
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.safetensors").stat().st_mode) == mode


def test_removing(tmp_path: Path) -> None:
    """A dump that is removed is gone, and removing it again is no error."""
    path = tmp_path / "a.safetensors"
    write_dump(path, {}, {})
    remove_dump(path)
    remove_dump(str(path))
    assert names(tmp_path) == ["recorder-manifest.jsonl"]


# Files that are no dumps.


def _damage(whole: bytes) -> dict[str, bytes]:
    return {
        "empty": b"",
        "zeros": bytes(500),
        "text": b"no dump at all, but some other text",
        "cut in the header": whole[:40],
        "cut in the values": whole[:-10],
        "something after the end": whole + b"more",
        "header of no length": bytes(8) + whole[8:],
        "header of another length": (10**9).to_bytes(8, "little") + whole[8:],
        "pickle": pickle.dumps({"fc/mean": 1.0}),
        "checkpoint": b"PK\3\4" + whole,
    }


@pytest.mark.parametrize("kind", _damage(b""))
def test_a_damaged_file(kind: str, tmp_path: Path) -> None:
    """A file that is damaged or of another kind is a DumpError that names it, and nothing of it is executed."""
    path = tmp_path / "a.safetensors"
    write_dump(path, {"fc/mean": torch.arange(100.0)}, {})
    path.write_bytes(_damage(path.read_bytes())[kind])
    with pytest.raises(DumpError, match=r"a\.safetensors is no readable safetensors file"):
        read_dump(path)


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}, {"format": "lightning_recorder.dump/2"}])
def test_a_safetensors_file_of_another_program(metadata: dict[str, str] | None, tmp_path: Path) -> None:
    """A sound file that is not a dump, or one of a later format, is a DumpError that says which format is read."""
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(2)}, path, metadata=metadata)
    with pytest.raises(DumpError, match=r"model\.safetensors.*lightning_recorder\.dump/1"):
        read_dump(path)


def test_a_missing_file(tmp_path: Path) -> None:
    """A dump that is not there is a FileNotFoundError."""
    with pytest.raises(FileNotFoundError):
        read_dump(tmp_path / "a.safetensors")


def test_a_dtype_that_the_format_does_not_have_is_named(tmp_path: Path) -> None:
    """A tensor that safetensors cannot hold is an OSError which names the file and the dtype, and leaves nothing."""
    with pytest.raises(OSError, match=r"x\.safetensors could not be written: .*complex128"):
        write_tensors(tmp_path / "x.safetensors", {"a": torch.zeros(1, dtype=torch.complex128)}, {})
    assert list(tmp_path.iterdir()) == []
