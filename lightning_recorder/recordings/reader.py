"""Recordings: the runs found in a folder."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_recorder.errors import ArgumentError, DumpError, describe_missing
from lightning_recorder.recordings.dumped import DumpEntry
from lightning_recorder.recordings.files import RECORDER
from lightning_recorder.recordings.run import Run, run_at

if TYPE_CHECKING:
    from lightning_recorder.graph.model import Graph

__all__ = ["Recording", "open_recording"]

_DEEPEST = 8  # folder levels between the given folder and that of a run


class Recording:
    """The runs below a folder. With a single run, its contents are available here directly.

    Args:
        runs: The runs by name. The name is the path of the run's folder relative to the opened folder.
    """

    def __init__(self, runs: Mapping[str, Run]) -> None:
        self.runs = dict(runs)
        """The runs by name."""

    @property
    def run(self) -> Run:
        """The only run.

        Raises:
            ArgumentError: If there are several runs; the message lists their names.
        """
        if len(self.runs) > 1:
            names = list(self.runs)
            shown = ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise ArgumentError(f"there are {len(names)} runs; choose one of {shown}")
        return next(iter(self.runs.values()))

    def __getitem__(self, name: str) -> Any:
        """Return the run of that name; if there is only one run, also accept the label of one of its recorders."""
        if name in self.runs:
            return self.runs[name]
        run = self.run
        if name not in run:
            there, only = ", ".join(map(repr, run)) or "none", next(iter(self.runs))
            raise ArgumentError(f"there is no run nor recorder {name!r}; the only run is {only!r} with {there}")
        return run[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.runs)

    def __len__(self) -> int:
        return len(self.runs)

    def __contains__(self, name: object) -> bool:
        return name in self.runs or (len(self.runs) == 1 and name in self.run)

    @property
    def recorders(self) -> list[str]:
        """The recorders of the only run."""
        return self.run.recorders

    @property
    def graph(self) -> Graph | None:
        """The graph of the only run."""
        return self.run.graph

    @property
    def receipt(self) -> Mapping[str, Any] | None:
        """The receipt of the only run."""
        return self.run.receipt

    @property
    def dumps(self) -> list[DumpEntry]:
        """The dumps of the only run."""
        return self.run.dumps

    def refresh(self) -> int:
        """Read the records that the runs have written since the last call; return the number of new records."""
        return sum(run.refresh() for run in self.runs.values())

    def __repr__(self) -> str:
        return f"<recording of {len(self.runs)} runs: {', '.join(self.runs)}>"


def open_recording(path: str | os.PathLike[str]) -> Recording:
    """Open the recording of one run or of several runs.

    No code from the files is executed: only JSON and safetensors are read. The function works while a run is in
    progress, after a run was killed, and on another machine, because the folder contains everything that is needed.

    Args:
        path: The ``log_dir`` of a run, its ``recorder`` folder, or a parent folder of several runs such as
            ``lightning_logs``. A parent folder is searched to a depth of eight folders; symbolic links are not
            followed.

    Raises:
        DumpError: If nothing was recorded there.

    Example:
        >>> import tempfile
        >>> from lightning_recorder.recordings import RecordWriter, SiteRecord, records_path
        >>> logs = Path(tempfile.mkdtemp())
        >>> writer = RecordWriter(records_path(logs / "version_0" / "recorder", "activations"))
        >>> writer.begin(label="activations", group="activations")
        1
        >>> for step in (0, 49):
        ...     writer.write({"step": step}, [SiteRecord("head", "out", {"rms": 0.5 + step})])
        >>> recording = open_recording(logs)
        >>> recording.runs
        {'version_0': <run version_0: activations>}
        >>> series = recording["version_0"]["activations"]
        >>> series.steps, series.values("rms").tolist(), series["head"].statistic("rms")[-1].item()
        ([0, 49], [[0.5], [49.5]], 49.5)
    """
    folder = Path(path)
    if not folder.is_dir():
        if folder.exists():
            raise DumpError(f"{str(folder)!r} is a file: give the log_dir of its run")
        raise DumpError(f"nothing can be opened at {str(folder)!r}: {describe_missing(folder)}")
    # Made absolute because "." has no name. Messages and run names use relative paths only.
    here = folder.resolve()
    only = run_at(here, here.parent.name if here.name == RECORDER else here.name)
    if only is not None:
        return Recording({only.name: only})
    found = dict(_runs_below(here))
    if not found:
        raise DumpError(
            f"nothing was recorded in {str(folder)!r}: looked there and {_DEEPEST} folders deep for a folder "
            f"{RECORDER!r} with 'records/*.jsonl', 'graph.json', 'receipt.json' or 'dumps/recorder-manifest.jsonl'"
        )
    return Recording({name: found[name] for name in sorted(found, key=_by_number)})


def _runs_below(folder: Path) -> Iterator[tuple[str, Run]]:
    for place, folders, _ in os.walk(folder):
        here = Path(place)
        name = here.relative_to(folder).as_posix()
        if RECORDER in folders:
            run = run_at(here, name)
            if run is not None:
                yield name, run
                folders.clear()
        if name.count("/") >= _DEEPEST - 1:
            folders.clear()
        folders[:] = [each for each in folders if not each.startswith(".")]


def _by_number(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key that orders ``version_10`` after ``version_9``."""
    parts = re.split(r"([0-9]+)", name)
    return [(0, int(part), "") if part.isascii() and part.isdigit() else (1, 0, part) for part in parts]
