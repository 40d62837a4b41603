"""The dumps of a finished or running run, read back: tensors are loaded on demand."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_recorder.dumps import MANIFEST, dumps_in, manifests
from lightning_recorder.errors import ArgumentError, DumpError
from lightning_recorder.names import closest_names
from lightning_recorder.records.file import is_inside

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DumpEntry", "find_dumps"]

_Found = TypeVar("_Found")


@dataclass(frozen=True)
class DumpEntry:
    """A dump on disk. The file is read only when its contents are accessed.

    Args:
        path: The file.
        about: The manifest entry of the dump: ``step``, ``epoch``, ``group``, ``kind``, …
    """

    path: Path
    about: Mapping[str, Any]

    @property
    def step(self) -> int | None:
        """The step, or ``None`` if the manifest does not contain it."""
        step = self.about.get("step")
        return step if isinstance(step, int) else None

    @property
    def kind(self) -> str:
        """``"statistics"``, or ``"tensors"`` if the dump contains the raw tensors."""
        return str(self.about.get("kind", "statistics"))

    @property
    def size_bytes(self) -> int:
        """The size of the file in bytes; 0 if the file no longer exists."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    @property
    def names(self) -> list[str]:
        """The names of the tensors, read from the header of the file.

        Raises:
            DumpError: If the file is missing or damaged, or was not written by this package.
        """
        return self._open(lambda file: list(file.keys()))

    def load(self, name: str) -> Tensor:
        """Load one tensor onto the CPU without reading the others.

        Raises:
            ArgumentError: If the dump has no tensor of that name.
            DumpError: If the file is missing or damaged, or was not written by this package.
        """
        names = self.names
        if name not in names:
            raise ArgumentError(f"{self.path.name} has no tensor {name!r}; {closest_names(name, names)}")
        return self._open(lambda file: _tensor(file, name))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, on the CPU; the file is read again on each access.

        Raises:
            DumpError: If the file is missing or damaged, or was not written by this package.
        """
        return self._open(lambda file: {name: _tensor(file, name) for name in list(file.keys())})

    def _open(self, read: Callable[[Any], _Found]) -> _Found:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(self.path), framework="pt") as file:
                written = (file.metadata() or {}).get("format", "")
                if not written.startswith("lightning_recorder."):
                    raise DumpError(f"{self.path} was not written by lightning_recorder")
                return read(file)
        except (SafetensorError, OSError) as error:
            raise DumpError(f"{self.path} is not a readable safetensors file: {error}") from error

    def __repr__(self) -> str:
        return f"<dump {self.path.name}: {self.kind}, step {self.step}>"


def _tensor(file: Any, name: str) -> Tensor:
    found: Tensor = file.get_tensor(name)
    return found


def find_dumps(log_dir: Path) -> list[DumpEntry]:
    """Return the dumps listed in all manifests below the folder of a run, sorted by step.

    Symbolic links to folders are not followed. A dump that is a link to a file outside the folder is ignored.

    Raises:
        DumpError: If a manifest cannot be read.
    """
    found: list[DumpEntry] = []
    for folder, folders, files in os.walk(log_dir):
        folders.sort()
        names = [path.name for path in manifests(Path(folder))]
        if names and all(name in files and is_inside(Path(folder, name), log_dir) for name in names):
            found += _listed(Path(folder), log_dir)
    return sorted(found, key=lambda dump: (dump.step is None, dump.step or 0))


def _listed(folder: Path, log_dir: Path) -> list[DumpEntry]:
    try:
        lines = dumps_in(folder)
    except OSError as error:
        raise DumpError(f"{folder / MANIFEST} cannot be read: {error}") from error
    return [DumpEntry(folder / line["file"], line) for line in lines if is_inside(folder / line["file"], log_dir)]
