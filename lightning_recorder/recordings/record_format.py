"""Paths and format of record files: JSON lines, a header per fit and a line per record.

The line of a record is an object with the fields of the record, such as ``step``, and with

- ``columns``: the names of the statistics;
- ``layout``: the name, path, dtype and shape of each site, in the order of execution;
- ``values``: base64 of ``[sites, columns]`` float64, little-endian; NaN where a site lacks a statistic;
- ``sizes``: the number of bytes of the histogram of each site, or null;
- ``bins``: base64 of zlib of all histograms, each as pairs of gap and count in LEB128; see ``packed_counts.py``;
- ``further``: the statistics that are not columns, by the index of the site, if there are any.

Lines of the first version have ``sites`` instead, a list of ``[name, path, dtype, shape, values, histogram]``.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import stat
import sys
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_recorder.recordings.packed_counts import from_base64, packed_counts, to_base64
from lightning_recorder.taps import Site
from lightning_recorder.untrusted import is_finite, is_whole

__all__ = [
    "FORMAT",
    "FORMATS",
    "FURTHER_RUN",
    "RECORDER",
    "RECORDS",
    "WATCH",
    "RecordSchema",
    "Row",
    "SchemaCache",
    "SiteRecord",
    "SiteTable",
    "header_line",
    "is_inside",
    "lines_of_numbers",
    "parse",
    "read_row",
    "record_line",
    "records_path",
]

FURTHER_RUN = "run-"
"""The start of the name of the folder, inside a ``log_dir``, of a run at the same time as another one there."""

RECORDER = "recorder"
"""The name of the folder, inside ``log_dir``, that holds everything recorded for a run."""

RECORDS = "records"
"""The name of the folder, inside :data:`RECORDER`, that holds the record files."""

WATCH = "watch"
"""The label of the loss and the gradient norm of every step."""

_LONGEST_NAME = 80  # characters; file systems allow 255 bytes, and a character can take four


def records_path(directory: str | Path, label: str) -> Path:
    """Return the path of the record file of a recorder.

    Args:
        directory: The recording folder of the run, ``<log_dir>/recorder``.
        label: The label of the recorder. It is untrusted data: whatever it contains, the file lies inside the folder,
            and different labels have different files.

    Example:
        >>> records_path("recorder", "gradients-slow").as_posix()
        'recorder/records/gradients-slow.jsonl'
    """
    harmless = re.sub(r"[^A-Za-z0-9_.\-]", "_", label).strip(".")
    # Upper-case letters get a digest too, because a file system may be case-insensitive.
    if harmless != label or not 0 < len(label) <= _LONGEST_NAME or label != label.lower():
        digest = hashlib.sha256(label.encode("utf-8", "surrogatepass")).hexdigest()[:12]
        harmless = f"{harmless[:_LONGEST_NAME]}-{digest}"
    return Path(directory) / RECORDS / f"{harmless}.jsonl"


def is_inside(path: Path, folder: Path) -> bool:
    """Return True if a path, with links resolved, is a regular file below a folder.

    This check keeps a symbolic link from leading a reader out of a run. It also avoids opening a FIFO, which would
    block until another process writes to it.
    """
    try:
        real = path.resolve(strict=True)
        return real.is_relative_to(folder.resolve(strict=True)) and stat.S_ISREG(real.stat().st_mode)
    except (OSError, ValueError, RuntimeError):  # missing or unreadable; a null byte; a symlink loop before Python 3.13
        return False


FORMAT = "lightning_recorder.records/2"
"""The format of the lines that are written."""

FORMATS = ("lightning_recorder.records/1", FORMAT)
"""The formats that can be read. A file of the first one may continue in the second one."""

_NAMES = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True)
class SiteRecord:
    """The values written for one site in one record.

    Args:
        name: The name of the module.
        path: The path of the tensor at the module, for example ``out``.
        scalars: A mapping from statistic to value.
        bins: The counts of the histogram, ``[2048]`` int64; ``None`` if there is no histogram.
        dtype: The dtype of the tensor, for example ``"float32"``; ``None`` if it is unknown.
        shape: The shape of the tensor; ``None`` if it is unknown.
    """

    name: str
    path: str
    scalars: Mapping[str, float]
    bins: Tensor | None = None
    dtype: str | None = None
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class RecordSchema:
    """The schema of a record; the records of a run share a few schemas.

    Args:
        sites: The sites in recording order.
        dtypes: The dtype of each site; ``None`` if it is unknown.
        shapes: The shape of each site; ``None`` if it is unknown.
        columns: The statistics that are stored as columns for all sites.
    """

    sites: tuple[Site, ...]
    dtypes: tuple[str | None, ...]
    shapes: tuple[tuple[int, ...] | None, ...]
    columns: tuple[str, ...]

    @cached_property
    def places(self) -> dict[Site, int]:
        """The index of each site."""
        return {site: place for place, site in enumerate(self.sites)}

    @cached_property
    def line(self) -> bytes:
        """The ``layout`` of a line, which is the same in nearly all records of a run, as JSON."""
        entries = zip(self.sites, self.dtypes, self.shapes, strict=True)
        return _line([[*site, dtype, shape] for site, dtype, shape in entries])[:-1]


@dataclass(frozen=True)
class Row:
    """The values of one record.

    Args:
        about: ``step``, ``epoch``, ``stage``, ``loader`` and all other fields of the record.
        layout: The schema of the record.
        values: The values of the columns, ``[sites, columns]`` float64, contiguous and row-major.
        further: The statistics of a site that are not in the columns, keyed by the index of the site.
    """

    about: Mapping[str, Any]
    layout: RecordSchema
    values: array[float]
    further: Mapping[int, Mapping[str, float]] = field(default_factory=dict)

    def scalars(self, site: Site) -> dict[str, float]:
        """Return the statistics of one site; NaN for a column that the site lacks."""
        place, width = self.layout.places[site], len(self.layout.columns)
        values = self.values[place * width : (place + 1) * width]
        return {**dict(zip(self.layout.columns, values, strict=True)), **self.further.get(place, {})}


def header_line(about: Mapping[str, Any]) -> bytes:
    """Return the header line that precedes the records of a fit."""
    return _line({"format": FORMAT, **about})


@dataclass(frozen=True)
class SiteTable:
    """The values of all sites of one record.

    Args:
        layout: The names, paths, dtypes and shapes of the sites, and the columns.
        values: The values of the columns, ``[sites, columns]`` float64, little-endian; NaN if a site lacks one.
        counts: The histogram of each site as :meth:`SparseCounts.packed` returns it; None for a site without one.
        further: The statistics of a site that are not columns, by the index of the site.
    """

    layout: RecordSchema
    values: bytes
    counts: Sequence[bytes | None]
    further: Mapping[int, Mapping[str, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, sites: Sequence[SiteRecord]) -> SiteTable:
        """Return the table of some sites. The statistics of the first site are the columns."""
        columns = tuple(sites[0].scalars) if sites else ()
        values = array("d", [float(site.scalars.get(name, math.nan)) for site in sites for name in columns])
        layout = RecordSchema(
            tuple(Site(site.name, site.path) for site in sites),
            tuple(site.dtype for site in sites),
            tuple(None if site.shape is None else tuple(site.shape) for site in sites),
            columns,
        )
        others = ({name: each for name, each in site.scalars.items() if name not in columns} for site in sites)
        return cls(
            layout,
            _little_endian(values).tobytes(),
            [None if site.bins is None else packed_counts(site.bins) for site in sites],
            {place: further for place, further in enumerate(others) if further},
        )


def record_line(about: Mapping[str, Any], sites: SiteTable) -> bytes:
    """Return the line of a record."""
    about = {key: _plain(value) if isinstance(value, float) else value for key, value in about.items()}
    counts = b"".join(filter(None, sites.counts))
    fields: dict[str, Any] = {
        "columns": sites.layout.columns,
        "values": to_base64(sites.values),
        "sizes": [None if each is None else len(each) for each in sites.counts],
        "bins": to_base64(_compressed(counts)) if counts else _NO_BINS,
    }
    if sites.further:
        fields["further"] = {
            place: {name: _plain(value) for name, value in scalars.items()} for place, scalars in sites.further.items()
        }
    return b"".join((_line({**about, **fields})[:-2], b',"layout":', sites.layout.line, b"}\n"))


def lines_of_numbers(
    about: Mapping[str, Any], layout: RecordSchema, rows: Iterable[tuple[int, int, bytes]]
) -> list[bytes]:
    """Return the lines of records without histograms that differ only in step, epoch and values.

    Args:
        about: The other fields of all these records.
        layout: Their schema.
        rows: The step, the epoch, and the values as in :class:`SiteTable` of each record.
    """
    start, end = record_line(about, SiteTable(layout, b"", [None] * len(layout.sites))).split(b'"values":""', 1)
    start = start.removeprefix(b"{")
    return [
        b'{"step":%d,"epoch":%d,%b"values":"%b"%b' % (step, epoch, start, to_base64(values).encode("ascii"), end)
        for step, epoch, values in rows
    ]


def _compressed(counts: bytes) -> bytes:
    # Counts hardly repeat. Huffman codes alone take a quarter of the time of the fastest search for repeated bytes, and
    # make the bins as small. With a window of 4 KiB, the compressor takes so little memory that the system does not
    # have to provide it for each record.
    compressor = zlib.compressobj(1, zlib.DEFLATED, 12, 8, zlib.Z_HUFFMAN_ONLY)
    return compressor.compress(counts) + compressor.flush()


_NO_BINS = to_base64(_compressed(b""))


def _little_endian(values: array[float]) -> array[float]:
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values


# ASCII escapes preserve lone surrogates in names, too.
_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


def _line(record: Any) -> bytes:
    return f"{_encode(record)}\n".encode("ascii")


def _plain(value: float) -> float | str:
    value = float(value)
    return value if math.isfinite(value) else repr(value)


def parse(line: bytes) -> dict[str, Any]:
    """Parse the JSON object in a line.

    Raises:
        ValueError: If the line does not contain a JSON object.
    """
    try:
        found = json.loads(line, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("the line is nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError("the line is not a JSON object")
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


class SchemaCache:
    """The schemas of the records read so far, so that equal schemas share one object."""

    def __init__(self) -> None:
        self._known: dict[RecordSchema, RecordSchema] = {}
        self._last: tuple[list[Any], tuple[str, ...], RecordSchema] | None = None

    def schema_of(self, entries: list[Any], columns: tuple[str, ...]) -> RecordSchema:
        """Return the schema for the sites in a parsed line.

        Raises:
            ValueError, LookupError, TypeError: If they are not valid.
        """
        # Nearly all lines of a file have the same sites, and comparing them is much faster than checking them.
        if self._last is not None and self._last[0] == entries and self._last[1] == columns:
            return self._last[2]
        sites = tuple(Site(_text(entry[0]), _text(entry[1])) for entry in entries)
        dtypes = tuple(None if entry[2] is None else _text(entry[2]) for entry in entries)
        shapes = tuple(None if entry[3] is None else tuple(map(_whole, entry[3])) for entry in entries)
        if len(set(sites)) < len(sites) or len(set(columns)) < len(columns):
            raise ValueError("a site or a column appears twice")
        layout = RecordSchema(sites, dtypes, shapes, columns)
        layout = self._known.setdefault(layout, layout)
        self._last = entries, columns, layout
        return layout


def read_row(found: dict[str, Any], known: SchemaCache) -> Row:
    """Convert a parsed line to a record.

    Args:
        found: The JSON object of the line; this function modifies it.
        known: The schemas seen so far.

    Raises:
        ValueError: If the line is not a valid record.
    """
    try:
        columns = tuple(_text(name) for name in found.pop("columns"))
        is_old = "sites" in found
        entries = found.pop("sites" if is_old else "layout")
        layout = known.schema_of(entries, columns)
        read = _values(entries, len(columns)) if is_old else _table(found, len(entries), len(columns))
        _check_about(found)
    except (KeyError, IndexError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"this is not a record written by lightning_recorder: {error!r}") from error
    # Parsing makes new strings for each line, which take more memory than the values of a few sites.
    return Row({sys.intern(name): value for name, value in found.items()}, layout, *read)


def _table(found: dict[str, Any], sites: int, columns: int) -> tuple[array[float], dict[int, dict[str, float]]]:
    """Remove the values from a line, and return them. The histograms are removed as well."""
    values = array("d")
    values.frombytes(from_base64(found.pop("values")))
    if len(values) != sites * columns or len(found.pop("sizes")) != sites:
        raise ValueError("a site has not one value for each column")
    found.pop("bins")
    further = {
        int(place): {_text(name): _number(value) for name, value in scalars.items()}
        for place, scalars in found.pop("further", {}).items()
    }
    if not further.keys() <= set(range(sites)):
        raise ValueError("there are statistics of a site that does not exist")
    return _little_endian(values), further


def _values(entries: list[Any], columns: int) -> tuple[array[float], dict[int, dict[str, float]]]:
    values = array("d")
    further: dict[int, dict[str, float]] = {}
    for place, entry in enumerate(entries):
        row = entry[4]
        if not isinstance(row, list) or len(row) != columns:
            raise ValueError("a site has not one value for each column")
        try:
            values.extend(array("d", row))
        except TypeError:  # not all values are numbers: NaN and infinities are strings, a missing value is null
            values.extend(array("d", map(_number, row)))
        if len(entry) > 6:
            further[place] = {_text(name): _number(value) for name, value in entry[6].items()}
    return values, further


def _check_about(about: dict[str, Any]) -> None:
    _whole(about["step"])
    _whole(about.setdefault("epoch", 0))
    _text(about.setdefault("stage", "train"))
    if about.setdefault("loader", None) is not None:
        _whole(about["loader"])
    _whole(about.get("ranks", 1))
    if not all(isinstance(group, dict) and is_whole(group.get("parameters", 0)) for group in about.get("groups") or ()):
        raise TypeError("a parameter group is not described")
    limit = about.get("gradient_clip_val")
    if limit is not None and not isinstance(limit, str) and not is_finite(limit):
        raise TypeError("a limit is not a number")
    for name in ("calls", "order"):
        if not all(map(is_whole, about.get(name) or ())):
            raise TypeError("a call is not a number")
    if not all(
        isinstance(each, list) and all(isinstance(text, str) for text in each) for each in about.get("diverged") or ()
    ):
        raise TypeError("a site has no name")


def _number(value: object) -> float:
    if value is None:
        return math.nan
    if isinstance(value, str):
        if value not in _NAMES:
            raise ValueError(f"{value[:20]!r} is not a number")
        return _NAMES[value]
    if not isinstance(value, (int, float)):
        raise TypeError("a value is not a number")
    return float(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("a name is not a string")
    return value


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise TypeError("a number is not whole")
    return value
