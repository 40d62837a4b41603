"""Recordings: the runs found in a folder, each with its series, graph, receipt and dumps."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_recorder.errors import ArgumentError, DumpError, describe_error, describe_missing
from lightning_recorder.recordings.dump_entries import DumpEntry, find_dumps
from lightning_recorder.recordings.reader import RecordReader
from lightning_recorder.recordings.series import Series
from lightning_recorder.records.file import CHECK, FINDINGS, FORMATS, FURTHER_RUN, RECORDER, RECORDS, is_inside, parse
from lightning_recorder.untrusted import read_json

if TYPE_CHECKING:
    from lightning_recorder.graph.model import Graph
    from lightning_recorder.insight import Diagnosis, Finding
    from lightning_recorder.insight.data_facts import DataFacts

__all__ = ["Recording", "Run", "open_recording"]

Made = TypeVar("Made")

_GROUPS = ("activations", "gradients", "parameters")
_LONGEST_HEADER = 1 << 16  # the most bytes of a header
_DEEPEST_NODE = 200  # the deepest nesting of modules, since the views of a graph recurse once per level
_DEEPEST = 8  # the most folder levels between the given folder and the folder of a run


class Recording:
    """The runs below a folder. If there is a single run, its contents are also attributes of the recording.

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
        """Return the run with a name. If there is only one run, return the series of a recorder label."""
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

    @property
    def findings(self) -> list[Finding]:
        """The findings of the only run; see :attr:`Run.findings`."""
        return self.run.findings

    @property
    def diagnosis(self) -> Diagnosis:
        """The diagnosis of the only run; see :attr:`Run.diagnosis`."""
        return self.run.diagnosis

    def refresh(self) -> int:
        """Read the records that the runs have written since the last call; return the number of new records."""
        return sum(run.refresh() for run in self.runs.values())

    def page(self, path: str | os.PathLike[str] | None = None, *, limit: int = 10_000_000) -> str:
        """Return the page of the runs: findings, graph and the history of every layer, as one HTML file.

        A notebook shows the returned document, which needs no network and no server. Two runs are compared.

        Args:
            path: The file to write, if any.
            limit: The number of bytes for all statistics. Beyond the limit, neighboring records are joined.

        Raises:
            DumpError: If a file of a run is damaged.
            OSError: If the file cannot be written.
        """
        document: str = _page().page_document(self.runs, path, limit=limit)
        return document

    def _repr_html_(self) -> str:
        return str(_page().summary_html(self.runs, ".page()"))

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
        >>> from lightning_recorder.recordings import RecordWriter, SiteStatistics, records_path
        >>> from lightning_recorder.taps import Site
        >>> logs = Path(tempfile.mkdtemp())
        >>> writer = RecordWriter(records_path(logs / "version_0" / "recorder", "activations"))
        >>> writer.begin(label="activations", group="activations")
        1
        >>> for step in (0, 49):
        ...     writer.write({"step": step}, {Site("head", "out"): SiteStatistics({"rms": 0.5 + step})})
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
    # Make the path absolute because "." has no name. Messages and run names still use relative paths only.
    here = folder.resolve()
    runs = dict(_runs_at(here, here.parent.name if here.name == RECORDER else here.name))
    if runs:
        return Recording(runs)
    found = dict(_runs_below(here))
    if not found:
        raise DumpError(
            f"nothing was recorded in {str(folder)!r}: looked there and {_DEEPEST} folders deep for a folder "
            f"{RECORDER!r} with 'records/*.jsonl', 'graph.json', 'receipt.json' or 'dumps/recorder-manifest.jsonl'"
        )
    return Recording({name: found[name] for name in sorted(found, key=_by_number)})


def _page() -> ModuleType:
    # The page reads recordings, so it cannot be imported at the top.
    return import_module("lightning_recorder.page")


def _runs_below(folder: Path) -> Iterator[tuple[str, Run]]:
    for place, folders, _ in os.walk(folder):
        here = Path(place)
        name = here.relative_to(folder).as_posix()
        if RECORDER in folders:
            runs = list(_runs_at(here, name))
            if runs:
                yield from runs
                folders.clear()
        if name.count("/") >= _DEEPEST - 1:
            folders.clear()
        folders[:] = [each for each in folders if not each.startswith(".")]


def _by_number(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key that orders ``version_10`` after ``version_9``."""
    parts = re.split(r"([0-9]+)", name)
    return [(0, int(part), "") if part.isascii() and part.isdigit() else (1, 0, part) for part in parts]


class Run:
    """The recording of one run. Each file is read on first access.

    Args:
        name: The name of the run within its :class:`Recording`.
        directory: The recording folder, ``<log_dir>/recorder``.
        most_records: Read only about this number of records of each stage of a recorder; by default all records.
    """

    def __init__(self, name: str, directory: Path, most_records: int | None = None) -> None:
        self.name = name
        self.directory = directory
        self._most_records = most_records
        self._series: dict[str, Series] | None = None
        self._graph: tuple[tuple[int, int] | None, Graph] | None = None  # the graph with the version of its file

    @property
    def log_dir(self) -> Path:
        """The folder of the run."""
        return self.directory.parent

    @property
    def recorders(self) -> list[str]:
        """The labels of the recorders that have records: activations first, then gradients, then parameters."""
        return list(self._all)

    @property
    def has_records(self) -> bool:
        """True if there is a record of at least one tensor. A run that crashes in its first step has none."""
        return any(part.sites for label in self for part in self[label].parts.values())

    @property
    def _all(self) -> dict[str, Series]:
        if self._series is None:
            self._series = {}
            self.refresh()
        return self._series

    def refresh(self) -> int:
        """Look for new recorders, and read the records that known recorders have written since the last call.

        Returns:
            The number of new records of the known recorders.

        Raises:
            DumpError: If a record file cannot be read.
        """
        old = self._series or {}
        come = sum(series.refresh() for series in old.values())
        known = {series.path: series for series in old.values()}
        found: dict[str, tuple[tuple[int, str], Series]] = {}
        for path in sorted((self.directory / RECORDS).glob("*.jsonl")):
            if is_inside(path, self.log_dir):
                group, label = _group_and_label(path)
                # If two files have the same label, the second file is listed under its file name.
                label = path.stem if not label or label in found else label
                found[label] = (_order(group, label), known.get(path) or Series(RecordReader(path, self._most_records)))
        self._series = {label: found[label][1] for label in sorted(found, key=lambda label: found[label][0])}
        return come

    def __getitem__(self, label: str) -> Series:
        """Return the records of one recorder.

        Raises:
            ArgumentError: If there is no recorder with that label; the message lists the labels that exist.
        """
        found = self._all.get(label)
        if found is None:
            there = ", ".join(map(repr, self._all)) or "none"
            raise ArgumentError(f"there is no recorder {label!r} in {self.name!r}; there are {there}")
        return found

    def __contains__(self, label: object) -> bool:
        return label in self._all

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def graph(self) -> Graph | None:
        """The recorded graph; ``None`` if no graph was recorded.

        Raises:
            DumpError: If the file is damaged.
        """
        version = self._state_of_graph()
        # Cached: reading a large graph takes a second, and both examining and showing a run need the graph.
        if version is None or self._graph is None or self._graph[0] != version:
            graph = self._read_graph()
            self._graph = None if graph is None or version is None else (version, graph)
        return None if self._graph is None else self._graph[1]

    def set_graph(self, graph: Graph) -> None:
        """Set the graph that this process has written. Its file is then read only if it changes."""
        self._graph = self._state_of_graph(), graph

    def _state_of_graph(self) -> tuple[int, int] | None:
        path = self.directory / "graph.json"
        about = path.stat() if path.exists() else None
        return None if about is None else (about.st_mtime_ns, about.st_size)

    def _read_graph(self) -> Graph | None:
        data = self._json("graph.json")
        if data is None:
            return None
        from lightning_recorder.graph.model import Graph

        try:
            graph = Graph.from_json(data)
            _check_graph(graph)
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
            path = self.directory / "graph.json"
            raise DumpError(f"{path} is not a graph written by lightning_recorder: {describe_error(error)}") from error
        return graph

    @property
    def receipt(self) -> Mapping[str, Any] | None:
        """The coverage and the overhead of each recorder: recorded sites, skipped sites with the reason, and cost.

        ``None`` if no receipt was written.

        Raises:
            DumpError: If the file is damaged.
        """
        data = self._json("receipt.json")
        if data is not None and not isinstance(data, dict):
            raise DumpError(f"{self.directory / 'receipt.json'} is not a receipt written by lightning_recorder")
        return data

    @property
    def data(self) -> DataFacts | None:
        """Facts about the samples of the run, for the rules; ``None`` if they are unknown.

        Raises:
            DumpError: If the file is damaged.
        """
        from lightning_recorder.insight.data_facts import DataFacts

        return self._made_of("data.json", DataFacts.from_json)

    @property
    def findings(self) -> list[Finding]:
        """The findings of the run, causes first. They are computed at each access.

        The list is empty or has only notes if the run is healthy or too little was examined; :attr:`diagnosis`
        distinguishes these cases.

        Raises:
            DumpError: If a file of the run is damaged.
        """
        return self.diagnosis.findings

    @property
    def diagnosis(self) -> Diagnosis:
        """The findings and the rules that could not run. ``is_healthy`` is None if too little was examined.

        The diagnosis is computed at each access.

        Raises:
            DumpError: If a file of the run is damaged.
        """
        from lightning_recorder.recordings.diagnose import diagnose

        return diagnose(self)

    @property
    def written_diagnosis(self) -> Diagnosis | None:
        """The latest diagnosis that the run has written; ``None`` if it has written none.

        Raises:
            DumpError: If the file is damaged.
        """
        from lightning_recorder.insight import Diagnosis

        return self._made_of(FINDINGS, Diagnosis.from_json)

    @property
    def check(self) -> Mapping[str, Any] | None:
        """The answers of :class:`~lightning_recorder.Check`, as in its file; ``None`` if the run was not checked.

        Raises:
            DumpError: If the file is damaged.
        """
        data = self._json(CHECK)
        if data is None:
            return None
        answers = data.get("answers") if isinstance(data, dict) else None
        if not isinstance(answers, list) or not all(isinstance(each, dict) for each in answers):
            raise DumpError(f"{self.directory / CHECK} was not written by lightning_recorder")
        found: Mapping[str, Any] = data
        return found

    def _made_of(self, name: str, make: Callable[[Any], Made]) -> Made | None:
        """Return an object made from the contents of a file of the run; ``None`` if there is no such file."""
        data = self._json(name)
        try:
            return None if data is None else make(data)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            path = self.directory / name
            raise DumpError(f"{path} was not written by lightning_recorder: {describe_error(error)}") from error

    def _json(self, name: str) -> Any:
        path = self.directory / name
        return read_json(path) if is_inside(path, self.log_dir) else None

    @property
    def dumps(self) -> list[DumpEntry]:
        """All dumps below :attr:`log_dir`, including those next to checkpoints, sorted by step.

        Raises:
            DumpError: If a manifest cannot be read.
        """
        return find_dumps(self.log_dir)

    @property
    def size_bytes(self) -> int:
        """The total size in bytes of all files in the recording folder."""
        files = (path for path in self.directory.rglob("*") if is_inside(path, self.directory))
        return sum(path.stat().st_size for path in files)

    def page(self, path: str | os.PathLike[str] | None = None, *, limit: int = 10_000_000) -> str:
        """Return the page of the run, as :meth:`Recording.page`."""
        return Recording({self.name: self}).page(path, limit=limit)

    def _repr_html_(self) -> str:
        return Recording({self.name: self})._repr_html_()

    def __repr__(self) -> str:
        return f"<run {self.name}: {', '.join(self.recorders) or 'no records'}>"


def _is_recorder(directory: Path) -> bool:
    """Return True if a folder contains a recording of a run."""
    return any((directory / name).is_file() for name in ("graph.json", "receipt.json", CHECK)) or any(
        next((directory / folder).glob(pattern), None) is not None
        for folder, pattern in ((RECORDS, "*.jsonl"), ("dumps", "*.jsonl"))
    )


def _runs_at(path: Path, name: str) -> Iterator[tuple[str, Run]]:
    """Yield the run at a path, and the runs that other processes recorded there at the same time."""
    run = _run_at(path, name)
    if run is not None:
        yield name, run
        for further in sorted(path.glob(f"{FURTHER_RUN}*"), key=lambda each: _by_number(each.name)):
            other = _run_at(further, f"{name}/{further.name}")
            if other is not None:
                yield other.name, other


def _run_at(path: Path, name: str) -> Run | None:
    """Return the run at a path, which may be its ``log_dir`` or its recording folder; ``None`` if there is none."""
    for directory in (path / RECORDER, path):
        if directory.is_dir() and _is_recorder(directory):
            return Run(name, directory)
    return None


def _group_and_label(path: Path) -> tuple[str, str]:
    """Return the group and the label from the first line of a file; empty strings if they are missing."""
    try:
        with path.open("rb") as file:
            found = parse(file.readline(_LONGEST_HEADER))
    except (OSError, ValueError):
        return "", ""
    group, label = found.get("group"), found.get("label")
    if found.get("format") not in FORMATS or not isinstance(group, str) or not isinstance(label, str):
        return "", ""
    return group, label


def _order(group: str, label: str) -> tuple[int, str]:
    return _GROUPS.index(group) if group in _GROUPS else len(_GROUPS), label


def _check_graph(graph: Graph) -> None:
    """Raise an error for a graph that is too deep, or has a node before its parent; this includes every cycle."""
    depths: dict[int | None, int] = {None: -1}
    for place, node in enumerate(graph.nodes):
        if node.parent not in depths or (place and node.parent is None):
            raise ValueError("a node comes before its parent")
        depths[node.id] = depths[node.parent] + 1
        if depths[node.id] != node.depth or node.depth > _DEEPEST_NODE:
            raise ValueError(f"a node is at depth {node.depth}")
    if len(depths) <= len(graph.nodes):
        raise ValueError("two nodes have the same number")
