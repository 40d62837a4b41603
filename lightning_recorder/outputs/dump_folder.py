"""The folder to which a recorder writes its dumps: files, size limits and uploads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_recorder.disk import attempt
from lightning_recorder.dumps import file_bytes, remove_dump, write_dump
from lightning_recorder.errors import warn
from lightning_recorder.sinks import Sink

__all__ = ["DumpContent", "DumpFolder"]

_ROWS = 20  # the maximum number of rows in the Markdown table of dumps
_ABOUT_BYTES = 400  # the estimated size of the entries of a tensor in a dump and in the manifest


@dataclass(frozen=True)
class DumpContent:
    """The tensors of one dump, and the data for its line in the manifest."""

    step: int
    epoch: int
    tensors: Mapping[str, Tensor]  # the tensors by name, on any device
    # for dumps of statistics, the number of values of each site; otherwise ``None``
    samples: Mapping[str, int] | None = None
    entries: Mapping[str, Any] = field(default_factory=dict)  # further entries of the manifest


class DumpFolder:
    """Writes the dumps of a recorder to a folder of the run or next to checkpoints.

    Args:
        label: The first part of the file names ``<label>-step=<step>.safetensors``, and the middle part of
            ``<checkpoint>.<label>.safetensors``.
        group: The kind of recorded tensors, for the manifest.
        directory: The folder of the run. Without a folder, dumps are only written next to checkpoints.
        rank: The rank of this process. File names contain the rank, except on the first rank.
        max_total_bytes: The maximum size of the dumps in the folder, in bytes. One warning is given when it is reached.
            Dumps next to checkpoints do not count, because they are removed together with the checkpoints.
        upload: A sink that receives each dump if it supports files, and a table of the dumps if it supports text.
        max_upload_bytes: The maximum number of bytes to upload.
        name: The name of the recorder in warnings.
        quiet: True to omit the warning about a missing folder.
        strict: Raise the error of a dump that cannot be written, unless the disk is full.
    """

    def __init__(
        self,
        label: str,
        *,
        group: str,
        directory: Path | None = None,
        rank: int = 0,
        max_total_bytes: int | None = None,
        upload: Sink | None = None,
        max_upload_bytes: int | None = None,
        name: str = "the recorder",
        quiet: bool = False,
        strict: bool = False,
    ) -> None:
        self.label, self.group, self.directory, self.rank = label, group, directory, rank
        self.quiet, self._strict = quiet, strict
        self.written = 0
        """The number of dumps written."""
        self._name = name
        self._file_label = f"{label}-rank{rank}" if rank else label
        self._upload = upload
        self._max_total_bytes, self._max_upload_bytes = max_total_bytes, max_upload_bytes
        self._total_bytes = self._uploaded_bytes = 0
        self._uploaded: dict[str, Path] = {}
        self._warned: set[str] = set()
        self._rows: list[str] = []

    def write(self, content: DumpContent, reason: str) -> Path | None:
        """Write a dump to the folder. The reason is ``"step"``, ``"record"``, ``"epoch"`` or ``"event"``.

        Returns:
            The path of the file, or ``None`` if there is no folder, ``max_total_bytes`` is reached, or the file cannot
            be written.

        Raises:
            OSError: If the file cannot be written; only with ``strict``.
        """
        if self.directory is None:
            if not self.quiet:
                self._warn_once("folder", "writes only dumps beside checkpoints, because the run has no folder")
            return None
        if "total" in self._warned:
            return None
        path = self.directory / f"{self._file_label}-step={content.step}.safetensors"
        replaced = path.stat().st_size if path.is_file() else 0
        size = file_bytes(content.tensors, self._manifest_entries(content, reason=reason)) - replaced
        if self._max_total_bytes is not None and self._total_bytes + size > self._max_total_bytes:
            limit = f"max_total_bytes={self._max_total_bytes}"
            self._warn_once("total", f"writes no more dumps from step {content.step} on: the size would exceed {limit}")
            return None
        written = self._write(path, content, reason=reason)
        if written is None:
            return None
        self._total_bytes += written - replaced
        return path

    def write_beside(self, content: DumpContent, checkpoint: Path) -> Path | None:
        """Write a dump next to a checkpoint.

        Returns:
            The path of the file, or ``None`` if it cannot be written.

        Raises:
            OSError: If the file cannot be written; only with ``strict``.
        """
        path = self._beside(checkpoint)
        written = self._write(path, content, reason="checkpoint", checkpoint=checkpoint.name)
        return None if written is None else path

    def remove_beside(self, checkpoint: Path) -> None:
        """Remove the dump next to a deleted checkpoint."""
        remove_dump(self._beside(checkpoint))

    def _beside(self, checkpoint: Path) -> Path:
        return checkpoint.with_name(f"{checkpoint.name.removesuffix('.ckpt')}.{self._file_label}.safetensors")

    def _write(self, path: Path, content: DumpContent, **why: Any) -> int | None:
        """Write a dump if the disk has room. Return its size in bytes, or None if it was skipped."""
        entries = self._manifest_entries(content, **why)
        write = partial(write_dump, path, content.tensors, content.samples, **entries)
        # A replaced file exists until the new one is complete, so the whole new size is needed.
        nbytes = sum(each.numel() * each.dtype.itemsize + _ABOUT_BYTES for each in content.tensors.values())
        if not attempt(path, nbytes + _ABOUT_BYTES, write, strict=self._strict):
            self._warned.add("disk")
            return None
        size = path.stat().st_size
        self.written += 1
        if self._upload is not None:
            self._upload_dump(self._upload, path, size, content, why["reason"])
        return size

    def _manifest_entries(self, content: DumpContent, **why: Any) -> dict[str, Any]:
        entries = {
            "step": content.step,
            "epoch": content.epoch,
            "stage": "train",
            "rank": self.rank,
            "group": self.group,
        }
        return {**entries, **why, **content.entries}

    @property
    def is_full(self) -> bool:
        """True if a dump was skipped because of a size limit or a full disk. A warning was then given."""
        return bool({"total", "disk"} & self._warned)

    def _upload_dump(self, sink: Sink, path: Path, size: int, content: DumpContent, reason: str) -> None:
        """Upload a dump to the loggers that support files, and write the table of dumps as text."""
        uploaded = "-"
        most = self._max_upload_bytes
        if sink.supports("write_files") and "upload" not in self._warned:
            if most is not None and self._uploaded_bytes + size > most:
                limit = f"max_upload_bytes={most}"
                self._warn_once(
                    "upload", f"uploads no more dumps from step {content.step} on: the size would exceed {limit}"
                )
            elif sink.write_files(content.step, {self._upload_name(path): path}):
                self._uploaded_bytes += size
                uploaded = "yes"
        row = f"| {content.step} | `{path.name}` | {reason} | {len(content.tensors)} | {size:,} | {uploaded} |"
        self._rows = [*self._rows, row][-_ROWS:]
        head = "| step | file | why | tensors | bytes | uploaded |\n|---:|---|---|---:|---:|---|"
        sink.write_text(content.step, {f"recorder/{self.label}/dumps": "\n".join([head, *self._rows])})

    def _upload_name(self, path: Path) -> str:
        """Return the upload name of a file. Files of the same name in two folders get different upload names."""
        name, number = f"dumps/{path.name}", 1
        while self._uploaded.setdefault(name, path) != path:
            number += 1
            name = f"dumps/{number}/{path.name}"
        return name

    def _warn_once(self, what: str, message: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            warn(f"{self._name} {message}")
