"""The contents of one record file, read incrementally, and their conversion to data frames."""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.errors import ArgumentError, DumpError
from lightning_recorder.names import Site
from lightning_recorder.records.counts import counts_of
from lightning_recorder.records.file import FORMAT, FORMATS, SchemaCache, parse, read_table, unpack_vectors
from lightning_recorder.records.table import Floats, Schema, Table

__all__ = [
    "PLACES",
    "Entry",
    "Part",
    "PartKey",
    "RecordReader",
    "Session",
    "Tail",
    "columns_of",
    "frame_of",
    "rows_of",
    "write_parquet",
]

Read = TypeVar("Read")

_LONGEST_LINE = 1 << 25  # bytes; a record of 30,000 sites with histograms is shorter
_PIECE = 1 << 20  # bytes per read of an overlong line
_AT_ONCE = 256  # the most records that are read into one array
_FAMILY = FORMAT.partition("/")[0] + "/"


class PartKey(NamedTuple):
    """The key of a :class:`Part`: stage, dataloader, and overflow flag."""

    stage: str
    loader: int | None
    overflowed: bool = False

    @property
    def order(self) -> tuple[bool, str, int, bool]:
        """The sort key of parts; training comes first."""
        return self.stage != "train", self.stage, -1 if self.loader is None else self.loader, self.overflowed


@dataclass(frozen=True)
class Session:
    """The start or the continuation of a fit, marked by a header line.

    Args:
        number: The position among the sessions of the file, counted from 1.
        about: The contents of the header line: ``label``, ``group``, ``name``, ``time``, ``ranks``, ``versions``, …
    """

    number: int
    about: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Entry:
    """A record and its location in the file."""

    table: Table  # the values of the record
    offset: int  # the byte offset of its line
    session: int  # the number of its session; 0 if the header line of the session is damaged


@dataclass
class Part:
    """The records of one stage and dataloader."""

    entries: dict[int, Entry] = field(default_factory=dict)
    """Records by step. A later line replaces an earlier line of the same step."""
    sites: dict[Site, int] = field(default_factory=dict)
    """Sites in the order of first appearance, with their index in that order."""
    statistics: dict[str, None] = field(default_factory=dict)
    """Statistics in the order of first appearance; the dict serves as an ordered set."""
    replaced: int = 0
    """The number of records that a later line has replaced."""

    def __post_init__(self) -> None:
        self._places: dict[Schema, NDArray[np.int64]] = {}
        self._session = 0
        self._earlier: list[int] = []  # the steps of the records of earlier sessions, in ascending order
        self._every: int | None = None  # the interval in the previous record

    def add(self, entry: Entry) -> None:
        """Add a record; replace an earlier record of the same step.

        A record that covers several steps also replaces records of earlier sessions at these steps. If a run was
        interrupted within an epoch, its last record covers a part of the epoch that the next session repeats.
        """
        table = entry.table
        step = table.step
        if entry.session != self._session:
            self._session, self._earlier = entry.session, self.steps
        covered = self._covered(table)
        if self._earlier and table.stage == "train":
            begin = bisect_right(self._earlier, step - covered)
            end = bisect_left(self._earlier, step)
            for each in self._earlier[begin:end]:
                self.replaced += self.entries.pop(each, None) is not None
            del self._earlier[begin:end]
        self.replaced += step in self.entries
        self.entries[step] = entry
        if table.schema not in self._places:
            for site in table.sites:
                self.sites.setdefault(site, len(self.sites))
            self.statistics.update(dict.fromkeys(table.columns))
            self._places[table.schema] = np.array([self.sites[site] for site in table.sites], dtype=np.int64)

    def _covered(self, table: Table) -> int:
        """Return the number of steps that a record covers, or fewer if the interval has just changed."""
        steps, every, before = table.about.get("steps"), table.about.get("every_n_train_steps"), self._every
        if not (isinstance(steps, int) and isinstance(every, int) and steps > 0 and every > 0):
            return 1
        self._every = every
        return (steps - 1) * min(every, before or every) + 1

    @property
    def steps(self) -> list[int]:
        """The recorded steps in ascending order."""
        return sorted(self.entries)

    def values(self, statistic: str) -> Floats:
        """Return one statistic of all sites at all steps, ``[steps, sites]`` float64; NaN for missing values."""
        found: Floats = self.some_values([statistic], self.steps)[0]
        return found

    def some_values(self, statistics: Sequence[str], steps: Sequence[int]) -> Floats:
        """Return statistics of all sites at some steps, ``[statistics, steps, sites]`` float64; NaN if missing."""
        found = np.full((len(statistics), len(steps), len(self.sites)), np.nan)
        tables = [self.entries[step].table for step in steps]
        for schema, begin, end in _runs_of_schemas(tables):
            if not schema.sites:
                continue
            # Join many records in one array, because a NumPy call takes longer than copying the values of a record.
            joined = np.frombuffer(b"".join(table.numbers.data for table in tables[begin:end]), dtype=np.float64)
            values = joined.reshape(end - begin, len(schema.sites), len(schema.columns))
            for row, statistic in zip(found, statistics, strict=True):
                if statistic in schema.columns_set:
                    row[begin:end, self._places[schema]] = values[..., schema.columns.index(statistic)]
        return found

    def value(self, statistic: str, step: int, site: Site) -> float:
        """Return one number; NaN if it is missing."""
        table = self.entries[step].table
        if site not in table.rows or statistic not in table.columns:
            return math.nan
        return float(table.numbers[table.rows[site], table.columns.index(statistic)])

    def seen(self, steps: Sequence[int]) -> NDArray[np.bool_]:
        """Return a mask that is True if a site was recorded at a step, ``[steps, sites]``."""
        found = np.zeros((len(steps), len(self.sites)), dtype=bool)
        for schema, begin, end in _runs_of_schemas([self.entries[step].table for step in steps]):
            found[begin:end, self._places[schema]] = True
        return found


def _runs_of_schemas(tables: Sequence[Table]) -> Iterator[tuple[Schema, int, int]]:
    """Yield each schema with the start and the end of a run of at most 256 records that share it."""
    begin = 0
    for end, table in enumerate(tables[1:], 1):
        if table.schema is not tables[begin].schema or end - begin == _AT_ONCE:
            yield tables[begin].schema, begin, end
            begin = end
    if tables:
        yield tables[begin].schema, begin, len(tables)


class RecordReader:
    """Reads a record file line by line; later calls read only the appended lines.

    Damaged lines are skipped and counted. Histograms stay in the file until they are requested.

    Args:
        path: The file.
        most: Read only the headers and about this number of records of each stage: the last records, and an even
            selection of the earlier ones. The file is then read only once. By default, all records are read.
    """

    def __init__(self, path: Path, most: int | None = None) -> None:
        self.path, self._most = path, most
        self._begin()

    def _begin(self) -> None:
        self.parts: dict[PartKey, Part] = {}
        self.sessions: list[Session] = []
        self.skipped = 0
        self.is_read = False
        self._tail = Tail(self.path)
        self._schemas = SchemaCache()

    def refresh(self) -> int:
        """Read the lines appended since the last call; read the whole file again if it was replaced.

        Returns:
            The number of new records.

        Raises:
            DumpError: If the file cannot be read, was not written by this package, or has an unsupported format
                version.
        """
        try:
            if self._tail.is_replaced:
                self._begin()
            lines = self._tail.lines() if self._most is None else _sampled(self._tail.lines(), self._most)
            come = sum(self._take(offset, line) for offset, line in lines)
        except OSError as error:
            raise DumpError(f"{self.path} cannot be read: {error}") from error
        if self.skipped and not self.sessions and not self.parts:
            raise DumpError(f"{self.path} has no line of the format {FORMAT!r}")
        self.is_read = True
        return come

    def _take(self, offset: int, line: bytes) -> bool:
        """Parse and store a line. Return True if the line is a record."""
        if not line.strip():
            self.skipped += not line  # Tail yields an empty line for an overlong one
            return False
        try:
            found = parse(line)
            if "format" in found:
                self._take_session(found)
                return False
            table = read_table(found, self._schemas)
        except DumpError:
            self._begin()  # start again, so that the next call raises again instead of returning a partly read file
            raise
        except ValueError:
            self.skipped += 1
            return False
        key = PartKey(table.stage, table.about["loader"], table.about.get("overflowed") is True)
        self.parts.setdefault(key, Part()).add(Entry(table, offset, len(self.sessions)))
        return True

    def _take_session(self, found: dict[str, Any]) -> None:
        written = found["format"]
        if written in FORMATS:
            self.sessions.append(Session(len(self.sessions) + 1, found))
        elif isinstance(written, str) and written.startswith(_FAMILY):
            known = " and ".join(map(repr, FORMATS))
            raise DumpError(f"{self.path} has the format {written[:80]!r}; the supported formats are {known}")
        else:
            raise ValueError("the line has another format")

    def packed_counts(self, entry: Entry) -> list[object]:
        """Read the encoded histograms of all sites of a record from the file; ``None`` for a site without a histogram.

        Raises:
            DumpError: If the line has changed since it was first read.
        """
        return self._again(entry, counts_of)

    def all_vectors(self, entry: Entry) -> dict[Site, dict[str, Floats]]:
        """Read the vectors of all sites in a record from the file; a site without any is left out.

        Raises:
            DumpError: If the line has changed since it was first read.
        """
        sites = entry.table.sites

        def read(found: dict[str, Any]) -> dict[Site, dict[str, Floats]]:
            vectors = unpack_vectors(found.get("vectors", ()))
            return {site: vectors[place] for place, site in enumerate(sites) if place in vectors}

        return self._again(entry, read)

    def _again(self, entry: Entry, read: Callable[[dict[str, Any]], Read]) -> Read:
        try:
            found = parse(self._tail.line_at(entry.offset))
            sites = [(entry[0], entry[1]) for entry in self._schemas.entries_of(found)]
            if found["step"] != entry.table.step or sites != list(entry.table.sites):
                raise ValueError("its place holds another record")
            return read(found)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise DumpError(f"{self.path} has changed since it was read: {error}") from error


_STAGE = re.compile(rb'"stage":"([^"]*)"')
_ABOUT = 4096  # bytes at the start of a line, which contain its stage


def _sampled(lines: Iterator[tuple[int, bytes]], most: int) -> list[tuple[int, bytes]]:
    """Return the headers, the last lines of each stage, and an evenly spaced sample of its earlier lines."""
    stages: dict[bytes, list[tuple[int, bytes]]] = {}
    for offset, line in lines:
        found = _STAGE.search(line, 0, _ABOUT)
        stages.setdefault(b"" if found is None else found[1], []).append((offset, line))
    kept = stages.pop(b"", [])
    for found_lines in stages.values():
        last, rest = found_lines[-(most // 2) :], found_lines[: -(most // 2)]
        kept += [*rest[:: -(-len(rest) // (most - most // 2)) or 1], *last]
    return sorted(kept)


class Tail:
    """Reads a file from the point where the last read stopped.

    A last line without a newline is not returned, because it is incomplete or still being written. A line longer than
    32 MiB is never held in memory, and an empty line is returned instead.

    A missing file has no lines.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        """The byte offset of the first line that has not been returned yet."""

    @property
    def is_replaced(self) -> bool:
        """True if the file is missing or shorter than the part already read, so that it must have been replaced."""
        return self.offset > 0 and (not self.path.exists() or self.path.stat().st_size < self.offset)

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the byte offset and the contents, without newline, of each line completed since the last call.

        Raises:
            OSError: If the file exists but cannot be read.
        """
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self.offset)
            while line := file.readline(_LONGEST_LINE):
                is_long = len(line) == _LONGEST_LINE and not line.endswith(b"\n")
                if is_long:
                    line = _end_of_line(file)
                if not line.endswith(b"\n"):
                    return
                begin, self.offset = self.offset, file.tell()
                yield begin, b"" if is_long else line[:-1]

    def line_at(self, offset: int) -> bytes:
        """Read one line again. Raise OSError if the file can no longer be read."""
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.readline(_LONGEST_LINE)


def _end_of_line(file: BinaryIO) -> bytes:
    """Skip to the end of a line of any length, and return the last piece of the line."""
    piece = b""
    while more := file.readline(_PIECE):
        piece = more
        if piece.endswith(b"\n"):
            break
    return piece


_Parts = Mapping[PartKey, Part]

PLACES = ("step", "epoch", "stage", "loader", "module", "path", "dtype")
"""The columns that identify a row."""


def columns_of(series: Iterable[_Parts]) -> list[str]:
    """Return the names of the statistics that any of the series contains, in the order of first appearance."""
    return list(dict.fromkeys(name for parts in series for part in parts.values() for name in part.statistics))


def rows_of(parts: _Parts, columns: Iterable[str]) -> Iterator[list[Any]]:
    """Yield the rows of a series: the values of :data:`PLACES`, then those of ``columns``, ``None`` if missing."""
    columns = list(columns)
    for key, part in parts.items():
        for step in part.steps:
            table = part.entries[step].table
            about = [step, table.about["epoch"], key.stage, key.loader]
            for site, dtype in zip(table.sites, table.schema.dtypes, strict=True):
                scalars = table.scalars(site)
                yield [*about, site.name, site.path, dtype, *(scalars.get(name) for name in columns)]


def frame_of(parts: _Parts) -> Any:
    """Convert a series to a ``pandas.DataFrame`` in long form.

    Raises:
        ArgumentError: If pandas is not installed, or if a statistic has the same name as one of :data:`PLACES`.
    """
    columns = columns_of([parts])
    return _frame(rows_of(parts, columns), [*PLACES, *columns])


def _frame(rows: Iterable[list[Any]], columns: list[str]) -> Any:
    """Convert rows to a ``pandas.DataFrame``.

    Raises:
        ArgumentError: If pandas is not installed, or if two columns have the same name.
    """
    pandas = _library("pandas", "a frame")
    if len(set(columns)) < len(columns):
        raise ArgumentError(f"two columns of a frame have one name: {', '.join(map(repr, columns))}")
    found = pandas.DataFrame(list(rows), columns=columns)
    numbers = columns[columns.index(PLACES[-1]) + 1 :]
    types = dict.fromkeys(numbers, "float64") | {"step": "int64", "epoch": "int64", "loader": "Int64"}
    return found.astype(types)


def write_parquet(rows: Iterable[list[Any]], columns: list[str], path: Path) -> None:
    """Write rows to a Parquet file.

    Raises:
        ArgumentError: If pandas or pyarrow is not installed, or if two columns have the same name.
        OSError: If the file cannot be written.
    """
    _library("pyarrow", "a Parquet file")
    _frame(rows, columns).to_parquet(path, engine="pyarrow", index=False)


def _library(name: str, what: str) -> Any:
    # Not an import statement: mypy finds the type stubs in only some environments, so no ignore comment would fit all.
    try:
        return import_module(name)
    except ImportError as error:
        raise ArgumentError(f"{what} needs {name}: pip install {name}") from error
