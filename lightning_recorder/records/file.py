"""Paths and format of record files: JSON lines, a header per fit and a line per record.

The line of a record is an object with the facts of the record, such as ``step``, and these fields:

- ``columns``: the names of the statistics;
- ``layout``: the name, path, dtype and shape of each site, in the order of execution; a list, or, if that is shorter,
  base64 of zlib of its JSON;
- ``values``: base64 of ``[sites, columns]`` float64, little-endian; NaN where a site lacks a statistic;
- ``packed``, instead of ``values`` if it is shorter: base64 of zlib of the same bytes;
- ``sizes``: the number of bytes of each site's histogram, or null without one;
- ``bins``: base64 of zlib of all histograms, each as pairs of gap and count in LEB128; see ``counts.py``;
- ``vectors``: the vector statistics, if there are any; see :func:`pack_vectors`;
- ``further``, in some files of older versions: the statistics that are not columns, by the index of the site.

Lines of the second version always have ``values``. Lines of the first version have ``sites`` instead, a list of
``[name, path, dtype, shape, values, histogram]``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import stat
import sys
import time
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.disk import append, attempt
from lightning_recorder.names import Site
from lightning_recorder.records.counts import from_base64, inflated, to_base64
from lightning_recorder.records.table import Schema, SiteStatistics, Table
from lightning_recorder.untrusted import is_finite, is_whole
from lightning_recorder.version import __version__

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "CHECK",
    "FINDINGS",
    "FORMAT",
    "FORMATS",
    "FURTHER_RUN",
    "LOGGED",
    "RECORDER",
    "RECORDS",
    "STATES",
    "WATCH",
    "RecordWriter",
    "SchemaCache",
    "calls_of",
    "header_line",
    "is_inside",
    "json_values",
    "lines_of_numbers",
    "pack_vectors",
    "parse",
    "read_table",
    "record_line",
    "records_path",
    "unpack_vectors",
]

CHECK = "check.json"
"""The name of the file, inside :data:`RECORDER`, with the answers of a check."""

FINDINGS = "findings.json"
"""The name of the file, inside :data:`RECORDER`, with the diagnosis that the run wrote."""

FURTHER_RUN = "run-"
"""The prefix of the folder, inside a ``log_dir``, for a second run that uses the same ``log_dir`` simultaneously."""

LOGGED = "logged"
"""The stage of :data:`WATCH` with the values that the user logs and the learning rates."""

RECORDER = "recorder"
"""The name of the folder, inside ``log_dir``, with all recorded files of a run."""

RECORDS = "records"
"""The name of the folder, inside :data:`RECORDER`, with the record files."""

STATES = ("parameters.safetensors", "checkpoint.ckpt")
"""The possible names of the file, in the folder of an incident, with the parameters from before the step."""

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


FORMAT = "lightning_recorder.records/3"
"""The format in which lines are written."""

FORMATS = ("lightning_recorder.records/1", "lightning_recorder.records/2", FORMAT)
"""The formats that can be read. A file may begin in an older format and continue in a newer one."""

Floats = NDArray[np.float64]

_NAMES = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def header_line(about: Mapping[str, Any]) -> bytes:
    """Return the header line that precedes the records of a fit."""
    return _line({"format": FORMAT, **about})


def record_line(about: Mapping[str, Any], table: Table) -> bytes:
    """Return the line of a record."""
    about = {key: json_values(value) if isinstance(value, float) else value for key, value in about.items()}
    packed = [None] * len(table.sites) if table.counts is None else table.counts.packed()
    counts = b"".join(filter(None, packed))
    if table.tensors and (vectors := pack_vectors([table.tensors.get(site, {}) for site in table.sites])):
        about["vectors"] = vectors
    fields: dict[str, Any] = {
        "columns": table.columns,
        **_numbers_field(np.ascontiguousarray(table.numbers, dtype="<f8").tobytes()),
        "sizes": [None if each is None else len(each) for each in packed],
        "bins": to_base64(_compressed(counts)) if counts else _NO_BINS,
    }
    return b"".join((_line({**about, **fields})[:-2], b',"layout":', _layout(table.schema), b"}\n"))


def _numbers_field(values: bytes) -> dict[str, str]:
    """Return the field with the values of a line. Compression saves half of the bytes, since many values repeat."""
    if len(values) >= _FEWEST_BYTES and len(packed := zlib.compress(values, 1)) < len(values):
        return {"packed": to_base64(packed)}
    return {"values": to_base64(values)}


@lru_cache(maxsize=64)
def _layout(schema: Schema) -> bytes:
    """Return the ``layout`` of a line as JSON. Nearly all records of a run have the same layout.

    Each line has its layout, so that a damaged line costs one record. Names repeat, so compression saves nine tenths.
    """
    entries = zip(schema.sites, schema.dtypes, schema.shapes, strict=True)
    plain = _line([[*site, dtype, shape] for site, dtype, shape in entries])[:-1]
    return min(plain, _line(to_base64(zlib.compress(plain, 9)))[:-1], key=len)


def lines_of_numbers(about: Mapping[str, Any], schema: Schema, rows: Iterable[tuple[int, int, bytes]]) -> list[bytes]:
    """Return the lines of several records without histograms. The records differ only in step, epoch and values.

    ``about`` has the fields that all records share. Each row has the step, the epoch, and the values, ``[sites,
    columns]`` little-endian float64.
    """
    start, end = record_line(about, Table(schema, np.empty(0))).split(b'"values":""', 1)
    start = start.removeprefix(b"{")
    return [
        b'{"step":%d,"epoch":%d,%b"values":"%b"%b' % (step, epoch, start, to_base64(values).encode("ascii"), end)
        for step, epoch, values in rows
    ]


def _compressed(counts: bytes) -> bytes:
    # Byte sequences hardly repeat in counts, so Huffman codes alone compress them as well as a search for repeated
    # sequences, in a quarter of the time of the fastest search. A window of 4 KiB keeps the memory of the compressor so
    # small that it is not requested from the system for each record.
    compressor = zlib.compressobj(1, zlib.DEFLATED, 12, 8, zlib.Z_HUFFMAN_ONLY)
    return compressor.compress(counts) + compressor.flush()


_NO_BINS = to_base64(_compressed(b""))
_LONGEST_LAYOUT = 1 << 25  # bytes; that of 100,000 sites is shorter
_FEWEST_BYTES = 256  # shorter values are not compressed, since that would not be worth the time


# ASCII escapes preserve lone surrogates in names, too.
_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


def _line(record: Any) -> bytes:
    return f"{_encode(record)}\n".encode("ascii")


def json_values(value: Any) -> Any:
    """Convert a value to JSON values, with NaN and infinities as strings."""
    if isinstance(value, Mapping):
        return {key: json_values(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_values(each) for each in value]
    return repr(float(value)) if isinstance(value, float) and not math.isfinite(value) else value


def parse(line: bytes) -> dict[str, Any]:
    """Parse the JSON object in a line. Raise ValueError if the line does not contain a JSON object."""
    found = _loaded(line)
    if not isinstance(found, dict):
        raise ValueError("the line is not a JSON object")
    return found


def _loaded(text: bytes) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("the line is nested too deeply") from error


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_REPEATED = ("calls", "order", "stage")  # facts that are equal in nearly all records


class SchemaCache:
    """A cache of schemas and repeated facts: equal ones share one object across all records."""

    def __init__(self) -> None:
        self._facts: dict[str, Any] = {}
        self._known: dict[tuple[Any, ...], Schema] = {}
        self._last: tuple[list[Any], tuple[str, ...], Schema] | None = None
        self._layout: tuple[str, list[Any]] = "", []

    def entries_of(self, found: Mapping[str, Any]) -> list[Any]:
        """Return the entries of the sites in a parsed line; the same object for equal packed layouts.

        Raises:
            ValueError, LookupError: If there are no valid entries.
        """
        layout = found["sites" if "sites" in found else "layout"]
        if isinstance(layout, str):
            if self._layout[0] != layout:
                self._layout = layout, _loaded(inflated(from_base64(layout), _LONGEST_LAYOUT))
            layout = self._layout[1]
        if not isinstance(layout, list):
            raise ValueError("the sites are not a list")
        return layout

    def fact_of(self, name: str, value: Any) -> Any:
        """Return a fact of a record. If the last fact of the same name is equal, return that object instead."""
        if name in _REPEATED:
            if self._facts.get(name) == value:
                return self._facts[name]
            self._facts[name] = value
        return value

    def schema_of(self, entries: list[Any], columns: tuple[str, ...]) -> Schema:
        """Return the schema for the sites in a parsed line; the same object for equal sites and columns.

        Raises:
            ValueError, LookupError, TypeError: If the sites are not valid.
        """
        # Nearly all lines of a file have the same sites, and comparing the sites is much faster than checking them.
        if self._last is not None and self._last[0] == entries and self._last[1] == columns:
            return self._last[2]
        sites = tuple(Site(_text(entry[0]), _text(entry[1])) for entry in entries)
        dtypes = tuple(None if entry[2] is None else _text(entry[2]) for entry in entries)
        shapes = tuple(None if entry[3] is None else tuple(map(_whole, entry[3])) for entry in entries)
        if len(set(sites)) < len(sites) or len(set(columns)) < len(columns):
            raise ValueError("a site or a column appears twice")
        key = (sites, columns, dtypes, shapes)
        schema = self._known.get(key) or self._known.setdefault(key, Schema(*key))
        self._last = entries, columns, schema
        return schema


def read_table(found: dict[str, Any], known: SchemaCache) -> Table:
    """Convert a parsed line to a table, and modify the line. Histograms and vectors stay in the file.

    Raises:
        ValueError: If the line is not a valid record.
    """
    try:
        columns = tuple(_text(name) for name in found.pop("columns"))
        is_old, entries = "sites" in found, known.entries_of(found)
        found.pop("sites" if is_old else "layout")
        size = len(entries), len(columns)
        numbers, further = _values(entries, len(columns)) if is_old else _numbers(found, *size)
        more = tuple(dict.fromkeys(name for scalars in further.values() for name in scalars))
        schema = known.schema_of(entries, (*columns, *more))
        lacking = None
        if more:
            numbers, lacking = _with_further(numbers, more, further)
        found.pop("vectors", None)
        _check_about(found)
    except (KeyError, IndexError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"this is not a record written by lightning_recorder: {error!r}") from error
    # Share strings and lists: new ones for each line would take more memory than the values of a few sites.
    about = {sys.intern(name): known.fact_of(name, value) for name, value in found.items()}
    return Table(schema, numbers, about=about, lacking=lacking)


def _numbers(found: dict[str, Any], sites: int, columns: int) -> tuple[Floats, dict[int, dict[str, float]]]:
    """Remove the values and the histograms from a line, and return the values."""
    packed = found.pop("packed", None)
    data = from_base64(found.pop("values")) if packed is None else inflated(from_base64(packed), 8 * sites * columns)
    if len(data) != 8 * sites * columns or len(found.pop("sizes")) != sites:
        raise ValueError("a site has not one value for each column")
    # Made without a view object, which would take more memory than the values of a few sites.
    values = np.ndarray((sites, columns), "<f8", data).astype(np.float64, copy=False)
    found.pop("bins")
    further = {
        int(place): {_text(name): _number(value) for name, value in scalars.items()}
        for place, scalars in found.pop("further", {}).items()
    }
    if not further.keys() <= set(range(sites)):
        raise ValueError("there are statistics of a site that does not exist")
    return values, further


def _with_further(
    numbers: Floats, names: tuple[str, ...], further: Mapping[int, Mapping[str, float]]
) -> tuple[Floats, NDArray[np.bool_]]:
    """Append columns for statistics that only some sites have. Return a mask, too: True where a site lacks one."""
    more = np.full((len(numbers), len(names)), np.nan)
    lacks = np.ones(more.shape, dtype=bool)
    for row, scalars in further.items():
        for name, value in scalars.items():
            more[row, names.index(name)], lacks[row, names.index(name)] = value, False
    return np.hstack((numbers, more)), np.hstack((np.zeros(numbers.shape, dtype=bool), lacks))


def _values(entries: list[Any], columns: int) -> tuple[Floats, dict[int, dict[str, float]]]:
    values = array("d")
    further: dict[int, dict[str, float]] = {}
    for place, entry in enumerate(entries):
        row = entry[4]
        if not isinstance(row, list) or len(row) != columns:
            raise ValueError("a site has not one value for each column")
        try:
            values.extend(array("d", row))
        except TypeError:  # some values are no numbers: NaN and infinities are strings, missing values are null
            values.extend(array("d", map(_number, row)))
        if len(entry) > 6:
            further[place] = {_text(name): _number(value) for name, value in entry[6].items()}
    return np.array(values, dtype=np.float64).reshape(len(entries), columns), further


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
    if "held" in about:
        _check_held(about["held"])


def _check_held(held: Any) -> None:
    """Check the facts about parameters that no optimizer has."""
    layers = [name for key in ("as_made", "learned") for name in held.get(key, ())]
    for copy in held.get("copies", ()):
        layers += [copy["copy"], copy["of"]]
        counts = [copy[name] for name in ("records", "equal", "followed", "factors")]
        counts += [step for since, until in copy.get("moves", ()) for step in (since, until)]
        numbers = [copy["moved"], *(copy[name] for name in ("factor", "lag") if copy[name] is not None)]
        if not (all(map(is_whole, counts)) and all(map(is_finite, numbers)) and copy.keys() >= _FLAGS_OF_COPY):
            raise TypeError("a copy is not described")
    if not all(isinstance(name, str) for name in layers):
        raise TypeError("a layer has no name")


_FLAGS_OF_COPY = {"begins_equal", "buffers_followed", "buffers_moved", "evaluates", "is_as_made"}


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


_MOST_VALUES = 1 << 16  # the most values of a vector in a record; longer vectors are only in the dumps
_DTYPES = {"f": "<f4", "d": "<f8"}


def pack_vectors(sites: Sequence[Mapping[str, Tensor]]) -> list[list[Any]]:
    """Return the vectors of all sites as JSON values: site index, statistic, number type, and base64.

    :func:`unpack_vectors` restores every number to the bit. Values that fit into float32 without loss take half of the
    space. Statistics with two or more dimensions are ignored.

    Example:
        >>> import torch
        >>> packed = pack_vectors([{}, {"channel_mean": torch.tensor([0.5, 2.0], dtype=torch.float64)}])
        >>> packed[0][:3], unpack_vectors(packed)
        ([1, 'channel_mean', 'f'], {1: {'channel_mean': array([0.5, 2. ])}})
    """
    return [
        [place, name, *_packed(tensor)]
        for place, tensors in enumerate(sites)
        for name, tensor in tensors.items()
        if tensor.dim() == 1 and tensor.numel() <= _MOST_VALUES
    ]


def _packed(tensor: Tensor) -> tuple[str, str]:
    import torch

    values = tensor.double()
    narrow = values.float()
    is_exact = torch.equal(narrow.double()[~values.isnan()], values[~values.isnan()])
    kind = "f" if is_exact else "d"
    return kind, to_base64(np.array(values.tolist(), dtype=_DTYPES[kind]).tobytes())


def unpack_vectors(packed: Any) -> dict[int, dict[str, Floats]]:
    """Return the vectors of each site by statistic, ``[n]`` float64, without torch. Sites without vectors are left out.

    Raises:
        LookupError, TypeError, ValueError: If the data is not from :func:`pack_vectors`.
    """
    found: dict[int, dict[str, Floats]] = {}
    for site, name, kind, text in packed:
        values = np.frombuffer(from_base64(text), dtype=_DTYPES["f" if kind == "f" else "d"])
        found.setdefault(int(site), {})[str(name)] = values.astype(np.float64)
    return found


def calls_of(table: Table) -> dict[Site, int]:
    """Return the number of tensors of each site in a record, in the order of the sites; empty if it is unknown."""
    calls, sites = table.about.get("calls"), table.sites
    if isinstance(calls, Mapping):  # as in a table in memory
        if tuple(calls) == sites:  # the usual case
            return {**calls}
        called = dict.fromkeys((*(site for site in calls if site in table), *sites)) if calls else ()
        return {site: calls.get(site, 0) for site in called}
    if not isinstance(calls, list) or len(calls) != len(sites):
        return {}
    order = table.about.get("order", range(len(sites)))
    first = [place for place in order if isinstance(place, int) and 0 <= place < len(sites)]
    return {sites[place]: calls[place] for place in dict.fromkeys([*first, *range(len(sites))])}


_HEADER_START = b'{"format"'
_CHUNK = 1 << 20  # bytes per read
_LONGEST_HEADER = 1 << 16  # the most bytes of a header


class RecordWriter:
    """Appends the records of one recorder to a file, one line per record.

    Every number is restored to the bit, including NaN and infinities. Each line is written with a single append, so a
    killed run leaves at most an incomplete last line, which the next write terminates. Written lines survive the end of
    the process. They are not synced to disk, so a power failure may lose the last lines. If the disk is full, or
    refuses the write for another reason, the record is skipped, and a warning is issued once.

    Args:
        path: The file, as returned by :func:`records_path`. The first line creates the file and its folder.
        strict: Raise the ``OSError`` if a record cannot be written, unless the disk is full.

    Note:
        The writer keeps no file open, so it can be copied and pickled. It can be used from any thread, but only from
        one at a time. A record of 100 sites with histograms takes 5 ms and 60 KB.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "records", "activations.jsonl")
        >>> writer = RecordWriter(path)
        >>> writer.begin(label="activations", group="activations")
        1
        >>> writer.write({"step": 0}, {Site("head", "out"): SiteStatistics({"rms": 0.5})})
        >>> len(path.read_bytes()) == writer.written_bytes
        True
    """

    def __init__(self, path: str | Path, *, strict: bool = False) -> None:
        self.path, self._strict = Path(path), strict
        self.written_bytes = 0
        """The number of bytes that this writer has written."""
        self._header = b""  # a header that did not fit on the disk and must precede the next record

    def begin(self, *, label: str, group: str, name: str = "", ranks: int = 1, **more: Any) -> int:
        """Write a header line that marks the start of a fit or its continuation.

        Args:
            label: The label that identifies the recorder within the run, for example ``activations`` or
                ``gradients-slow``.
            group: ``activations``, ``gradients`` or ``parameters``.
            name: The name of the recorder, if the user has set one.
            ranks: The number of processes whose statistics the records combine.
            more: Further JSON-serializable metadata. ``versions`` is merged with the versions of torch, Python and this
                package.

        Returns:
            The number of the session in the file, starting at 1.
        """
        import torch

        versions = {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "lightning_recorder": __version__,
            **more.pop("versions", {}),
        }
        session = 1 + _headers_in(self.path)
        about = {"label": label, "group": group, "name": name, "session": session, "ranks": ranks}
        header = header_line({**about, "time": time.time(), "versions": versions, **more})
        self._header = b"" if self._append(header) else header
        return session

    def write(
        self, about: Mapping[str, Any], sites: Mapping[Site, SiteStatistics] | Iterable[tuple[Site, SiteStatistics]]
    ) -> None:
        """Write a record.

        Args:
            about: ``step`` and optionally ``epoch``, ``stage``, ``loader`` and further JSON-serializable metadata. The
                time is added.
            sites: The statistics of the sites in execution order; a reader lists them in this order.

        Raises:
            ArgumentError: If the bins of a site are not valid counts.
        """
        self.write_all([(about, Table.of(sites))])

    def write_all(self, records: Iterable[tuple[Mapping[str, Any], Table]]) -> None:
        """Write several records with a single append. If they do not fit on the disk, write the first ones that fit.

        Args:
            records: The metadata of each record, as for :meth:`write`, and its table, in execution order.
        """
        now = time.time()
        self._append_all([record_line({"time": now, **about}, table) for about, table in records])

    def write_numbers(self, schema: Schema, rows: Iterable[tuple[int, int, bytes]]) -> None:
        """Write training records without histograms, with a single append; if the disk is full, the first that fit.

        Args:
            schema: The sites and columns of all these records.
            rows: The step, the epoch, and the values, ``[sites, columns]`` little-endian float64, of each record.
        """
        self._append_all(lines_of_numbers({"time": time.time(), "stage": "train", "loader": None}, schema, rows))

    def _append_all(self, lines: list[bytes]) -> None:
        # Append all lines together; if this fails, one by one until there is no more room.
        if lines and not self._append_with_header(b"".join(lines)) and len(lines) > 1:
            all(map(self._append_with_header, lines))

    def _append_with_header(self, lines: bytes) -> bool:
        is_written = self._append(self._header + lines)
        if is_written:
            self._header = b""
        return is_written

    def _append(self, lines: bytes) -> bool:
        def write() -> None:
            self.written_bytes += append(self.path, lines, is_line=True)

        return attempt(self.path, len(lines), write, strict=self._strict)


def _headers_in(path: Path) -> int:
    """Return the number of complete header lines in a file; 0 if the file does not exist or cannot be read."""
    start = b"\n" + _HEADER_START
    count, end = 0, b"\n"  # the last bytes that were read, in which a header line may begin
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                text = end + chunk
                count += text.count(start)
                end = text[-len(start) + 1 :]
            file.seek(-min(file.tell(), _LONGEST_HEADER), os.SEEK_END)
            last = file.read().rpartition(b"\n")[2]
    except OSError:
        return 0
    return count - last.startswith(_HEADER_START)  # do not count a last line that a killed run left incomplete
