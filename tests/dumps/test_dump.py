"""Tests of writing and reading dumps, and of failures while writing."""

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
    """Return everything that defines a tensor: dtype, shape and bits."""
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_come_back_to_the_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    """Dtype, shape and every bit survive a round trip, even for scalars and empty tensors."""
    values = torch.tensor([0.0, -0.0, 1.5, -3.0, 1e-3, 77.0]).to(dtype)
    tensors = {"fc/mean": values[3].clone(), "fc/histogram": values.reshape(2, 3), "fc/empty": values[:0].clone()}
    write_dump(tmp_path / "a.safetensors", tensors, {"fc": 6})
    read = read_dump(tmp_path / "a.safetensors")
    assert {name: bits(tensor) for name, tensor in read.tensors.items()} == {
        name: bits(tensor) for name, tensor in tensors.items()
    }


def test_special_numbers_come_back(tmp_path: Path) -> None:
    """NaN with its payload, infinities, subnormals and the sign of zero survive a round trip."""
    patterns = [0x7FF8000000000001, 0x7FF0000000000000, -0x0010000000000000, 1, -0x8000000000000000]
    special = torch.tensor(patterns, dtype=torch.int64).view(torch.float64)
    write_dump(tmp_path / "a.safetensors", {"fc/x": special}, {})
    assert read_dump(tmp_path / "a.safetensors").tensors["fc/x"].view(torch.int64).tolist() == patterns


def test_a_view_is_written_as_it_looks(tmp_path: Path) -> None:
    """A transposed, strided or expanded tensor, or one in an autograd graph, is written as plain values."""
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
    """Tensors that share memory are each written under their own name."""
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
    """Any site name is only a name in the file, never a path."""
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
        # safetensors reserves that name, and JSON in a file cannot have lone surrogates.
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda name: name != "__metadata__"),
        st.lists(st.floats(width=32), max_size=5).map(lambda values: torch.tensor(values, dtype=torch.float32)),
        max_size=5,
    )
)
def test_any_names_and_values(tensors: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> None:
    """A round trip preserves any names and values."""
    path = tmp_path_factory.mktemp("dump") / "a.safetensors"
    write_dump(path, tensors, {})
    assert {name: bits(each) for name, each in read_dump(path).tensors.items()} == {
        name: bits(each) for name, each in tensors.items()
    }


def test_the_metadata_of_a_dump_comes_back(tmp_path: Path) -> None:
    """Step, epoch, checkpoint and other metadata are also in the file, as strings."""
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
    """The folder of the first dump is created."""
    write_dump(str(tmp_path / "deep" / "inside" / "a.safetensors"), {}, {})
    assert names(tmp_path / "deep" / "inside") == ["a.safetensors", "recorder-manifest.jsonl"]


# Existing file or not.


def test_nothing_temporary_is_left(tmp_path: Path) -> None:
    """After writing once or twice, only the dump and the manifest exist."""
    for value in (1.0, 2.0):
        write_dump(tmp_path / "a.safetensors", {"fc/mean": torch.tensor(value)}, {})
    assert names(tmp_path) == ["a.safetensors", "recorder-manifest.jsonl"]
    assert read_dump(tmp_path / "a.safetensors").tensors["fc/mean"].item() == 2.0


@contextmanager
def full_disk(free_bytes: int) -> Iterator[None]:
    """Limit the file size of this process, so that a write fails with an I/O error, as on a full disk."""
    resource = pytest.importorskip("resource", reason="limits of a process are a matter of Unix")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk(tmp_path: Path) -> None:
    """A full disk raises an OSError, leaves the previous dump intact, and leaves no incomplete file."""
    path = tmp_path / "a.safetensors"
    write_dump(path, {"fc/mean": torch.tensor(1.0)}, {}, step=1)
    before = path.read_bytes(), read_manifest(tmp_path)
    large = {"fc/mean": torch.zeros(100_000)}
    with pytest.raises(OSError, match="too large"), full_disk(10_000):
        write_dump(path, large, {}, step=2)
    assert (path.read_bytes(), read_manifest(tmp_path)) == before
    assert names(tmp_path) == ["a.safetensors", "recorder-manifest.jsonl"]


def test_a_name_that_is_taken_by_a_folder(tmp_path: Path) -> None:
    """If the name of the dump is taken by a folder, no file is left and the manifest does not list the dump."""
    (tmp_path / "a.safetensors").mkdir()
    with pytest.raises(IsADirectoryError):
        write_dump(tmp_path / "a.safetensors", {"fc/mean": torch.tensor(1.0)}, {})
    assert names(tmp_path) == ["a.safetensors"]


def test_a_tensor_that_cannot_be_written(tmp_path: Path) -> None:
    """If a tensor has no values to write, the previous dump is left intact."""
    path = tmp_path / "a.safetensors"
    write_dump(path, {"fc/mean": torch.tensor(1.0)}, {})
    with pytest.raises(NotImplementedError):  # the error of torch for a copy from the meta device
        write_dump(path, {"fc/mean": torch.zeros(2, device="meta")}, {})
    assert read_dump(path).tensors["fc/mean"].item() == 1.0
    assert names(tmp_path) == ["a.safetensors", "recorder-manifest.jsonl"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such modes")
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600), (0o002, 0o664)])
def test_who_may_read_it_is_the_umask_s_choice(umask: int, mode: int, tmp_path: Path) -> None:
    """The permissions of a dump follow the umask of the run, which does not change."""
    before = os.umask(umask)
    try:
        write_dump(tmp_path / "a.safetensors", {"fc/mean": torch.tensor(1.0)}, {})
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.safetensors").stat().st_mode) == mode


def test_removing(tmp_path: Path) -> None:
    """A removed dump does not exist, and removing it again is a no-op."""
    path = tmp_path / "a.safetensors"
    write_dump(path, {}, {})
    remove_dump(path)
    remove_dump(str(path))
    assert names(tmp_path) == ["recorder-manifest.jsonl"]


# Files that are not dumps.


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
    """A damaged file or one of another kind raises a DumpError that names it, and nothing in it is executed."""
    path = tmp_path / "a.safetensors"
    write_dump(path, {"fc/mean": torch.arange(100.0)}, {})
    path.write_bytes(_damage(path.read_bytes())[kind])
    with pytest.raises(DumpError, match=r"a\.safetensors is not a readable safetensors file"):
        read_dump(path)


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}, {"format": "lightning_recorder.dump/2"}])
def test_a_safetensors_file_of_another_program(metadata: dict[str, str] | None, tmp_path: Path) -> None:
    """A valid file that is not a dump, or has a later format, raises a DumpError that names the supported format."""
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(2)}, path, metadata=metadata)
    with pytest.raises(DumpError, match=r"model\.safetensors.*lightning_recorder\.dump/1"):
        read_dump(path)


def test_a_missing_file(tmp_path: Path) -> None:
    """A missing dump raises a FileNotFoundError that names it; for a folder the error names the right function."""
    with pytest.raises(FileNotFoundError, match=r"there is no 'a\.safetensors' in '"):
        read_dump(tmp_path / "a.safetensors")
    with pytest.raises(FileNotFoundError, match=r"is a folder, not a dump: read_manifest\('.*'\) lists its dumps"):
        read_dump(tmp_path)


def test_a_dtype_that_the_format_does_not_have_is_named(tmp_path: Path) -> None:
    """A tensor with an unsupported dtype raises an OSError that names the file and the dtype, and leaves no file."""
    with pytest.raises(OSError, match=r"x\.safetensors could not be written: .*complex128"):
        write_tensors(tmp_path / "x.safetensors", {"a": torch.zeros(1, dtype=torch.complex128)}, {})
    assert list(tmp_path.iterdir()) == []
