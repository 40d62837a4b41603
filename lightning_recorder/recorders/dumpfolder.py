"""Where the dumps of a recorder lie, how many bytes they may take, and who else gets them."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_recorder.dumps import file_bytes, remove_dump, temporary_name, write_dump
from lightning_recorder.errors import tell
from lightning_recorder.sinks import Sink

__all__ = ["DumpContent", "DumpFolder"]

_ROWS = 20  # of the table of dumps


@dataclass(frozen=True)
class DumpContent:
    """What a dump holds.

    Args:
        step: Of which step it is.
        epoch: Of which epoch.
        tensors: By name, on any device.
        samples: Of statistics, for each site the number of values that they are of; else ``None``.
        about: What else the manifest says.
    """

    step: int
    epoch: int
    tensors: Mapping[str, Tensor]
    samples: Mapping[str, int] | None = None
    about: Mapping[str, Any] = field(default_factory=dict)


class DumpFolder:
    """Writes the dumps of a recorder, into a folder of the run or beside checkpoints.

    Args:
        label: What the files are called: ``<label>-step=<step>.safetensors``, and ``<checkpoint>.<label>.safetensors``.
        group: What is recorded, as the manifest says it.
        directory: The folder of the run; without one, dumps lie beside checkpoints only.
        rank: The number of this process; the files of all but the first have it in their names.
        max_total_bytes: So much goes into the folder; then one warning says that no more does. Those beside checkpoints
            do not count, since they go with them.
        upload: Loggers that keep files get each dump, and those that show text a table of them.
        max_upload_bytes: So much is given to them.
        name: What warnings call the recorder.
        quiet: Whether to say nothing where there is no folder.
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
    ) -> None:
        self.label, self.group, self.directory, self.rank = label, group, directory, rank
        self.quiet = quiet
        self._name = name
        self._place = f"{label}-rank{rank}" if rank else label
        self._upload = upload
        self._max_total_bytes, self._max_upload_bytes = max_total_bytes, max_upload_bytes
        self._total_bytes = self._uploaded_bytes = 0
        self._uploaded: dict[str, Path] = {}
        self._told: set[str] = set()
        self._cleaned: set[Path] = set()
        self._rows: list[str] = []

    def write(self, content: DumpContent, reason: str) -> Path | None:
        """Write a dump into the folder; the answer is the file, ``None`` if there is no folder or no room.

        Args:
            content: What it holds.
            reason: Why it is written, as the manifest says it: ``"step"``, ``"epoch"`` or ``"event"``.

        Raises:
            OSError: If the file cannot be written.
        """
        if self.directory is None:
            if not self.quiet:
                self._tell("folder", "writes no dumps but those beside checkpoints, since the run has no folder")
            return None
        if "total" in self._told:
            return None
        path = self.directory / f"{self._place}-step={content.step}.safetensors"
        replaced = path.stat().st_size if path.is_file() else 0
        size = file_bytes(content.tensors, self._about(content, reason=reason)) - replaced
        if self._max_total_bytes is not None and self._total_bytes + size > self._max_total_bytes:
            limit = f"max_total_bytes={self._max_total_bytes}"
            self._tell("total", f"writes no more dumps from step {content.step} on, which would be more than {limit}")
            return None
        self._total_bytes += self._write(path, content, reason=reason) - replaced
        return path

    def write_beside(self, content: DumpContent, checkpoint: Path) -> Path:
        """Write a dump beside a checkpoint.

        Raises:
            OSError: If the file cannot be written.
        """
        path = self._beside(checkpoint)
        self._write(path, content, reason="checkpoint", checkpoint=checkpoint.name)
        return path

    def remove_beside(self, checkpoint: Path) -> None:
        """Remove the dump beside a checkpoint that is gone."""
        remove_dump(self._beside(checkpoint))

    def _beside(self, checkpoint: Path) -> Path:
        return checkpoint.with_name(f"{checkpoint.name.removesuffix('.ckpt')}.{self._place}.safetensors")

    def _write(self, path: Path, content: DumpContent, **why: Any) -> int:
        self._clean(path.parent)
        size = write_dump(path, content.tensors, content.samples, **self._about(content, **why))
        if self._upload is not None:
            self._give(self._upload, path, size, content, why["reason"])
        return size

    def _about(self, content: DumpContent, **why: Any) -> dict[str, Any]:
        about = {"step": content.step, "epoch": content.epoch, "stage": "train", "rank": self.rank, "group": self.group}
        return {**about, **why, **content.about}

    def _clean(self, folder: Path) -> None:
        """Remove what a run that was killed has left half written."""
        if folder in self._cleaned or not folder.is_dir():
            return
        self._cleaned.add(folder)
        place = glob.escape(self._place)
        for pattern in (f"{place}-step=*.safetensors", f"*.{place}.safetensors"):
            for path in folder.glob(temporary_name(pattern)):
                path.unlink(missing_ok=True)

    def _give(self, sink: Sink, path: Path, size: int, content: DumpContent, reason: str) -> None:
        """Hand a dump to those who keep files, and a table to those who do not."""
        kept = "-"
        most = self._max_upload_bytes
        if sink.supports("write_files") and "upload" not in self._told:
            if most is not None and self._uploaded_bytes + size > most:
                limit = f"max_upload_bytes={most}"
                self._tell("upload", f"uploads no dumps from step {content.step} on, which would be more than {limit}")
            elif sink.write_files(content.step, {self._upload_name(path): path}):
                self._uploaded_bytes += size
                kept = "yes"
        row = f"| {content.step} | `{path.name}` | {reason} | {len(content.tensors)} | {size:,} | {kept} |"
        self._rows = [*self._rows, row][-_ROWS:]
        head = "| step | file | why | tensors | bytes | uploaded |\n|---:|---|---|---:|---:|---|"
        sink.write_text(content.step, {f"recorder/{self.label}/dumps": "\n".join([head, *self._rows])})

    def _upload_name(self, path: Path) -> str:
        """What a file is uploaded as; files of one name in two folders have two."""
        name, number = f"dumps/{path.name}", 1
        while self._uploaded.setdefault(name, path) != path:
            number += 1
            name = f"dumps/{number}/{path.name}"
        return name

    def _tell(self, what: str, message: str) -> None:
        if what not in self._told:
            self._told.add(what)
            tell(f"{self._name} {message}")
