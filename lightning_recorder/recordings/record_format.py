"""Paths and format of record files: JSON lines, a header per fit and a line per record."""

from __future__ import annotations

import binascii
import hashlib
import json
import math
import re
import stat
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_recorder.bins import BINS
from lightning_recorder.errors import ArgumentError, DumpError
from lightning_recorder.taps import Site

__all__ = [
    "FORMAT",
    "RECORDER",
    "RECORDS",
    "WATCH",
    "RecordSchema",
    "Row",
    "SiteRecord",
    "header_line",
    "is_inside",
    "pack_counts",
    "parse",
    "read_row",
    "record_line",
    "records_path",
    "unpack_counts",
]

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


FORMAT = "lightning_recorder.records/1"

_NAMES = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

_MOST_BYTES = BINS * (2 + 9)  # a gap below 2**11 takes at most two bytes, a count below 2**63 nine
_LONGEST = 2 * _MOST_BYTES  # characters; incompressible data grows by a third in base64
_LARGEST = 2**63 - 1


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


def record_line(about: Mapping[str, Any], sites: Iterable[SiteRecord]) -> bytes:
    """Return the line of a record.

    The statistics of the first site are the columns. A site that lacks a column has ``null`` there. Statistics that are
    not columns follow at the end of the site's entry.
    """
    sites = list(sites)
    columns = list(sites[0].scalars) if sites else []
    about = {key: _plain(value) if isinstance(value, float) else value for key, value in about.items()}
    return _line({**about, "columns": columns, "sites": [_entry(site, columns) for site in sites]})


def _entry(site: SiteRecord, columns: list[str]) -> list[Any]:
    values = [_plain(site.scalars[name]) if name in site.scalars else None for name in columns]
    packed = None if site.bins is None else pack_counts(site.bins)
    entry = [site.name, site.path, site.dtype, None if site.shape is None else list(site.shape), values, packed]
    further = {name: _plain(value) for name, value in site.scalars.items() if name not in columns}
    return [*entry, further] if further else entry


def _line(record: Mapping[str, Any]) -> bytes:
    # ASCII escapes preserve lone surrogates in names, too.
    return (json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n").encode("ascii")


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


def read_row(found: dict[str, Any], known: dict[RecordSchema, RecordSchema]) -> Row:
    """Convert a parsed line to a record.

    Args:
        found: The JSON object of the line; this function modifies it.
        known: The schemas seen so far, so that equal schemas share one object.

    Raises:
        ValueError: If the line is not a valid record.
    """
    try:
        columns = tuple(_text(name) for name in found.pop("columns"))
        entries = found.pop("sites")
        sites = tuple(Site(_text(entry[0]), _text(entry[1])) for entry in entries)
        dtypes = tuple(None if entry[2] is None else _text(entry[2]) for entry in entries)
        shapes = tuple(None if entry[3] is None else tuple(map(_whole, entry[3])) for entry in entries)
        values, further = _values(entries, len(columns))
        _check_about(found)
    except (KeyError, IndexError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"this is not a record written by lightning_recorder: {error!r}") from error
    layout = RecordSchema(sites, dtypes, shapes, columns)
    if len(set(sites)) < len(sites) or len(set(columns)) < len(columns):
        raise ValueError("a site or a column appears twice")
    return Row(found, known.setdefault(layout, layout), values, further)


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


def pack_counts(bins: Tensor) -> str:
    """Encode histogram counts as text: base64 of zlib of (gap, count) pairs.

    Each pair holds the number of empty bins before a non-empty bin, and the count of that bin. Numbers are stored as
    LEB128: seven bits per byte, lowest first, with the eighth bit set if more bytes follow. A histogram of one layer
    takes 100 to 600 characters, because most gaps are zero and most counts are small. Fixed-width indices and counts
    take twice as many characters, a JSON list of numbers four times as many.

    Args:
        bins: The counts, ``[2048]`` int64, non-negative, on any device.

    Raises:
        ArgumentError: If ``bins`` has another shape or dtype, is sparse, or contains a negative count.

    Example:
        >>> counts = torch.zeros(2048, dtype=torch.int64)
        >>> counts[[7, 8, 300]] = torch.tensor([1, 2, 3])
        >>> torch.equal(unpack_counts(pack_counts(counts)), counts)
        True
    """
    if bins.shape != (BINS,) or bins.dtype != torch.int64 or bins.is_sparse:
        raise ArgumentError(f"bins must be [{BINS}] int64, got {list(bins.shape)} {bins.dtype}")
    places = bins.nonzero().flatten()
    counts: list[int] = bins[places].tolist()
    if counts and min(counts) < 0:
        raise ArgumentError(f"no count of bins may be negative, got {min(counts)}")
    packed = bytearray()
    before = -1
    for place, count in zip(places.tolist(), counts, strict=True):
        gap, before = place - before - 1, place
        while gap > 127:
            packed.append(gap & 127 | 128)
            gap >>= 7
        packed.append(gap)
        while count > 127:
            packed.append(count & 127 | 128)
            count >>= 7
        packed.append(count)
    # Level 1 is the fastest; level 9 saves only one byte in a hundred.
    return binascii.b2a_base64(zlib.compress(bytes(packed), 1), newline=False).decode()


def unpack_counts(text: object) -> Tensor:
    """Decode counts that :func:`pack_counts` has encoded, as ``[2048]`` int64.

    Raises:
        DumpError: If the text is not an encoded histogram. Decompression stops at the size of the largest possible
            histogram, so a malicious text cannot exhaust memory.
    """
    try:
        if not isinstance(text, str) or len(text) > _LONGEST:
            raise ValueError("its length is wrong")
        inflater = zlib.decompressobj()
        packed = inflater.decompress(binascii.a2b_base64(text, strict_mode=True), _MOST_BYTES)
        if not inflater.eof or inflater.unused_data:
            raise ValueError("it has surplus data")
        bins = [0] * BINS
        place = -1
        numbers = _numbers(packed)
        for gap, count in zip(numbers, numbers, strict=True):
            place += gap + 1
            bins[place] = count
        return torch.tensor(bins, dtype=torch.int64)
    except (ValueError, IndexError, zlib.error, RuntimeError) as error:
        raise DumpError(f"this is not a histogram written by lightning_recorder: {error}") from error


def _numbers(packed: bytes) -> Iterator[int]:
    value = shift = 0
    for byte in packed:
        value |= (byte & 127) << shift
        shift += 7
        if byte > 127:
            continue
        if value > _LARGEST:
            raise ValueError("a count has more than 63 bits")
        yield value
        value = shift = 0
    if shift:
        raise ValueError("the last number is incomplete")
