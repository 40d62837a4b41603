"""Recording of one run: its series, graph, receipt and dumps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_recorder.errors import ArgumentError, DumpError, describe_error
from lightning_recorder.recordings.dumped import DumpEntry, find_dumps
from lightning_recorder.recordings.files import RECORDER, RECORDS, is_inside
from lightning_recorder.recordings.history import History
from lightning_recorder.recordings.lines import FORMAT, parse
from lightning_recorder.recordings.series import Series

if TYPE_CHECKING:
    from lightning_recorder.graph.model import Graph

__all__ = ["Run"]

_GROUPS = ("activations", "gradients", "parameters")
_LONGEST_HEADER = 1 << 16  # bytes
_LONGEST_JSON = 1 << 28  # bytes of a graph or a receipt


class Run:
    """The recording of one run; each part is read on first access.

    Args:
        name: The name of the run within its :class:`Recording`.
        directory: The recording folder, ``<log_dir>/recorder``.
    """

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.directory = directory
        self._series: dict[str, Series] | None = None

    @property
    def log_dir(self) -> Path:
        """The folder of the run."""
        return self.directory.parent

    @property
    def recorders(self) -> list[str]:
        """The labels of the recorders that have records: activations first, then gradients, then parameters."""
        return list(self._all)

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
                group, label = _header(path)
                # If two files claim the same label, the second one is listed under its file name.
                label = path.stem if not label or label in found else label
                found[label] = (_order(group, label), known.get(path) or Series(History(path)))
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
        data = self._json("graph.json")
        if data is None:
            return None
        from lightning_recorder.graph.model import Graph

        path = self.directory / "graph.json"
        try:
            graph = Graph.from_json(data)
            _check_graph(graph)
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
            raise DumpError(f"{path} is no graph of ours: {describe_error(error)}") from error
        return graph

    @property
    def receipt(self) -> Mapping[str, Any] | None:
        """The coverage and overhead of each recorder: sites recorded, sites skipped and the reason, and cost.

        ``None`` if no receipt was written.

        Raises:
            DumpError: If the file is damaged.
        """
        data = self._json("receipt.json")
        if data is not None and not isinstance(data, dict):
            raise DumpError(f"{self.directory / 'receipt.json'} is no receipt of ours")
        return data

    def _json(self, name: str) -> Any:
        path = self.directory / name
        if not is_inside(path, self.log_dir):
            return None
        try:
            if path.stat().st_size > _LONGEST_JSON:
                raise DumpError(f"{path} is larger than any that this package writes")
            return json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise DumpError(f"{path} cannot be read: {describe_error(error)}") from error

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

    def __repr__(self) -> str:
        return f"<run {self.name}: {', '.join(self.recorders) or 'no records'}>"


def is_recorder(directory: Path) -> bool:
    """Return True if a folder contains a recording of a run."""
    return any((directory / name).is_file() for name in ("graph.json", "receipt.json")) or any(
        next((directory / folder).glob(pattern), None) is not None
        for folder, pattern in ((RECORDS, "*.jsonl"), ("dumps", "*.jsonl"))
    )


def run_at(path: Path, name: str) -> Run | None:
    """Return the run at a path, which is its ``log_dir`` or its recording folder; ``None`` if there is none."""
    for directory in (path / RECORDER, path):
        if directory.is_dir() and is_recorder(directory):
            return Run(name, directory)
    return None


def _header(path: Path) -> tuple[str, str]:
    """Return the group and the label from the first line of a file; empty strings if they are missing."""
    try:
        with path.open("rb") as file:
            found = parse(file.readline(_LONGEST_HEADER))
    except (OSError, ValueError):
        return "", ""
    group, label = found.get("group"), found.get("label")
    if found.get("format") != FORMAT or not isinstance(group, str) or not isinstance(label, str):
        return "", ""
    return group, label


def _order(group: str, label: str) -> tuple[int, str]:
    return _GROUPS.index(group) if group in _GROUPS else len(_GROUPS), label


def _check_graph(graph: Graph) -> None:
    """Raise an error for a graph with a node before its parent, which includes every cycle, or with mistyped fields."""
    seen: set[int | None] = {None}
    for place, node in enumerate(graph.nodes):
        if node.parent not in seen or (place and node.parent is None) or not isinstance(node.id, int):
            raise ValueError("a node comes before the one that it lies in")
        if not all(isinstance(text, str) for text in (node.kind, node.name, node.type_name, node.scope, node.source)):
            raise TypeError("a name is no text")
        if not all(isinstance(number, int) for number in (node.depth, node.call, node.parameters, node.repeats)):
            raise TypeError("a number is none")
        seen.add(node.id)
    if len(seen) <= len(graph.nodes):
        raise ValueError("two nodes have one number")
