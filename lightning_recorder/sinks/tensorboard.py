"""A sink that writes TensorBoard event files, with the layout of the Custom Scalars page."""

from __future__ import annotations

import itertools
import math
import mmap
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from typing_extensions import override

from lightning_recorder.disk import append, attempt
from lightning_recorder.graph.renderers.graphdef import to_graph_def
from lightning_recorder.insight.unusual import choose, standing_out, unusualness
from lightning_recorder.records.table import Floats
from lightning_recorder.records.tags import make_tag, parse_tag
from lightning_recorder.reductions import CoarseHistogram, Histogram, Sums, TaggedHistograms
from lightning_recorder.sinks.base import Image, Sink
from lightning_recorder.sinks.files import SharedFiles, to_png

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event
    from torch.utils.tensorboard import SummaryWriter

    from lightning_recorder.graph.model import Graph

__all__ = [
    "EVENT_FILES",
    "PREFIX",
    "Dashboard",
    "EventFile",
    "RankedScalars",
    "TensorBoardSink",
    "dashboard_of",
    "frame_record",
    "patch_crc32c",
]

_LAYOUT_TAG = b"custom_scalars__config__"  # TensorBoard looks for a layout under this tag
# TensorBoard draws all lines of a run in one color and distinguishes them by only six symbols.
_MOST_LINES = 6


_EARLIER = 0.5  # the weight of the largest degree in earlier records
_BY_FAR = 1.25  # the titles name another module if its degree is larger by this factor than that of the named module
_MOST_TITLES = 20  # the maximum number of layouts that are written only to change the titles


class RankedScalars(dict[str, float]):
    """Scalars of some sites of a record, by tag, with a ranking of all sites of the record.

    Args:
        scalars: The scalars by tag.
        degrees: How unusual each site is, keyed by one tag of the site. Only sites that stand out and have scalars are
            included. ``None`` if all sites have scalars; the scalars can then be compared instead.
        named: A tag of each site whose module is named by a finding. If ``scalars`` is empty, only ``named`` has
            changed since the previous record.
    """

    def __init__(
        self, scalars: Iterable[tuple[str, float]], degrees: Mapping[str, float] | None, named: Iterable[str] = ()
    ) -> None:
        super().__init__(scalars)
        self.degrees, self.named = degrees, tuple(named)


class _Line(NamedTuple):
    """A tag in a chart."""

    tag: str
    """The tag without the index of the data loader."""
    module: str
    """The name of the module; for a parameter, the names of the module and the parameter."""
    path: str


class _Chart:
    """The lines of one statistic in a group of tags."""

    def __init__(self, statistic: str) -> None:
        self.statistic = statistic
        self.lines: list[_Line] = []

    @property
    def sites(self) -> tuple[tuple[str, str], ...]:
        """The ``module`` and the ``path`` of each line."""
        return tuple((line.module, line.path) for line in self.lines)


class _Comparison(NamedTuple):
    """Charts of a group that show the same sites and have more lines than TensorBoard can distinguish."""

    group: str
    sites: tuple[tuple[str, str], ...]
    tags: Mapping[str, list[str]]
    """The tags of each statistic, in the order of the sites."""

    @classmethod
    def of(cls, group: str, charts: Iterable[_Chart]) -> list[_Comparison]:
        """Return the comparisons of a group."""
        found: dict[tuple[tuple[str, str], ...], dict[str, list[str]]] = {}
        for chart in charts:
            if len(chart.lines) > _MOST_LINES:
                found.setdefault(chart.sites, {})[chart.statistic] = [line.tag for line in chart.lines]
        return [cls(group, sites, tags) for sites, tags in found.items()]

    def degrees(self, values: Mapping[str, float]) -> Floats:
        """Return how unusual the values of each site are, ``[sites]``."""
        tables, bad = {}, np.zeros((len(self.sites), 1))
        for statistic, tags in self.tags.items():
            found = np.array([values.get(tag, math.nan) for tag in tags], dtype=np.float64)[:, None]
            tables[statistic] = found
            if statistic != "update_ratio":  # an infinite ratio is no fault: the parameter may have been zero
                bad += np.isinf(found)
        return unusualness(self.sites, {**tables, "inf_count": bad})


class Dashboard:
    """The charts of a writer: one for each statistic in each group of tags.

    A chart has at most six lines, because TensorBoard gives all lines of a run the same color and has six symbols. The
    lines show the most unusual modules and an even selection of the others. The layout is written again when a new
    statistic or module appears, or when a module that is not shown becomes unusual.

    Args:
        directory: The folder of the event files if the writer is shared with other code. If the folder already has a
            layout, this layout is kept, and no other layout is written.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        self._directory = None if directory is None else Path(directory)
        self._charts: dict[str, dict[str, _Chart]] = {}
        self._comparisons: list[_Comparison] = []
        # By group and module that stands out: the degree in the latest record, and the largest degree so far.
        self._degrees: dict[str, dict[str, tuple[float, float]]] = {}
        self._titled: dict[str, str] = {}  # by group: the most unusual module when the layout was written
        self._retitled = 0  # the number of layouts that were written only to change the titles
        self._seen: set[str] = set()
        self._may_write: bool | None = None
        self._is_changed = False
        self._lock = threading.Lock()  # recorders write in their own threads, and the last layout wins

    def update(self, scalars: Mapping[str, float], write: Callable[[dict[str, dict[str, list[str]]]], bool]) -> None:
        """Write the layout if it has changed.

        Args:
            scalars: The scalars that were written, by tag. If they are not :class:`RankedScalars` with degrees, the
                sites are compared with each other.
            write: A callback that writes a layout and returns False if it failed. The layout maps each group to chart
                titles, and each title to tags without the index of the data loader.
        """
        with self._lock:
            if not self._seen.issuperset(scalars):  # False in nearly every call
                self._is_changed |= self._add_lines(tag for tag in scalars if tag not in self._seen)
                self._seen.update(scalars)
                self._comparisons = [
                    each for group, charts in self._charts.items() for each in _Comparison.of(group, charts.values())
                ]
            self._is_changed |= self._note_unusual(scalars)
            if self._is_changed and self._may_write:
                self._is_changed = not write(self._layout())

    def _add_lines(self, tags: Iterable[str]) -> bool:
        """Add the lines of the given tags. Return True if a line is new."""
        is_new = False
        for tag in tags:
            group, title, line = _parsed(tag)
            if line is not None:
                chart = self._charts.setdefault(group, {}).setdefault(title, _Chart(title.rpartition(" ")[2]))
                is_new |= line not in chart.lines
                chart.lines += [line] if line not in chart.lines else []
        if is_new and self._may_write is None:
            self._may_write = self._directory is None or not _has_layout(self._directory)
        return is_new

    def _note_unusual(self, scalars: Mapping[str, float]) -> bool:
        """Update the degrees of the modules. Return True if a new module stands out, or if a title must change."""
        now: dict[str, dict[str, float]] = {}  # the degrees of this record, by group and module
        if isinstance(scalars, RankedScalars) and scalars.degrees is not None:
            for tag, degree in {**dict.fromkeys(islice(scalars, 1), 0.0), **scalars.degrees}.items():
                group, _, line = _parsed(tag)
                if line is not None:
                    _raise(now.setdefault(group, {}), line.module, degree)
        else:
            for compared in self._comparisons:
                if any(tag in scalars for tags in compared.tags.values() for tag in tags):
                    degrees, modules = compared.degrees(scalars), now.setdefault(compared.group, {})
                    for place in standing_out(degrees):
                        _raise(modules, compared.sites[place][0], float(degrees[place]))
        for tag in scalars.named if isinstance(scalars, RankedScalars) else ():
            group, _, line = _parsed(tag)
            if line is not None:
                _raise(now.setdefault(group, {}), line.module, math.inf)
        is_new = False
        for group, modules in now.items():
            is_new |= self._add_degrees(group, modules, of_record=bool(scalars))
        return is_new

    def _add_degrees(self, group: str, degrees: Mapping[str, float], *, of_record: bool) -> bool:
        known = self._degrees.setdefault(group, {})
        is_new = any(degree and module not in known for module, degree in degrees.items())
        for module, (_, most) in known.items() if of_record else ():
            known[module] = degrees.get(module, 0.0), most
        for module, degree in degrees.items():
            if degree:
                known[module] = degree, max(degree, known.get(module, (0.0, 0.0))[1])
        titled = self._titled.get(group)
        if known and titled is not None and self._retitled < _MOST_TITLES and not is_new:
            first = max(known, key=lambda module: _combined(*known[module]))
            if _combined(*known[first]) > _BY_FAR * _combined(*known.get(titled, (0.0, 0.0))):
                self._retitled += 1
                return True
        return is_new

    def _layout(self) -> dict[str, dict[str, list[str]]]:
        """Return the tags of each chart, by group and title."""
        found: dict[str, dict[str, list[str]]] = {}
        for group, charts in sorted(self._charts.items()):
            found[group], known = {}, self._degrees.get(group, {})
            if known:
                self._titled[group] = max(known, key=lambda module: _combined(*known[module]))
            for title, chart in charts.items():
                degrees = np.array([_combined(*known.get(line.module, (0.0, 0.0))) for line in chart.lines])
                places = choose(degrees, _MOST_LINES)
                # The list of lines below a chart is collapsed at first, so the title names the most unusual module.
                first = "".join(f": {chart.lines[place].module}" for place in standing_out(degrees)[:1])
                part = f" ({len(places)} of {len(chart.lines)})" if len(places) < len(chart.lines) else ""
                found[group][title + first + part] = [chart.lines[place].tag for place in places]
        return found


def _raise(degrees: dict[str, float], module: str, degree: float) -> None:
    degrees[module] = max(degree, degrees.get(module, 0.0))


def _combined(latest: float, most: float) -> float:
    """Return the degree of a module for the charts. A module that has recovered ranks behind a module that has not."""
    return max(latest, _EARLIER * most)


def _parsed(tag: str) -> tuple[str, str, _Line | None]:
    """Return the group, the chart title and the line of a tag. The line is None for a tag without a module."""
    found = parse_tag(tag)
    if found is None:
        return "", "", None
    whole, module, path = make_tag(*found._replace(loader=None)), found.module, found.inner
    if not found.group.startswith("parameters"):
        return found.group, found.statistic, _Line(whole, module, path)
    # A parameter such as weight has related tags: weight.grad, weight.update and the optimizer states.
    of, _, part = path.rpartition(".")
    of, part = (of, part) if of else (path, "")
    return found.group, f"{part} {found.statistic}".strip(), _Line(whole, f"{module} {of}", path)


def _has_layout(directory: Path) -> bool:
    """Return True if an event file in the folder already has a layout."""
    try:
        return any(_holds_layout(path) for path in directory.glob("events.out.tfevents.*"))
    except OSError:
        return False


def _holds_layout(path: Path) -> bool:
    if not path.stat().st_size:
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(_LAYOUT_TAG) >= 0


PREFIX = "z_recorder/"
"""The prefix of all tags of the recorders in TensorBoard. So these tags are sorted after ``train``, ``val`` and most
other tags."""

_DASHBOARDS: WeakKeyDictionary[SummaryWriter, Dashboard] = WeakKeyDictionary()
_LOCK = threading.Lock()


def dashboard_of(writer: SummaryWriter) -> Dashboard:
    """Return the dashboard of a writer. All sinks that use the writer share it."""
    with _LOCK:
        if writer not in _DASHBOARDS:
            _DASHBOARDS[writer] = Dashboard(writer.get_logdir())
        return _DASHBOARDS[writer]


_ROTATION = 15  # bits; a constant of the masked checksum in the TFRecord format
_ADDEND = 0xA282EAD8

_VERSION = b"brain.Event:2"
_COUNT = itertools.count()


class EventFile:
    """Append complete events to an event file in a folder.

    An event is written completely or not at all. If the disk is full, events are skipped with one warning. By contrast,
    in torch's ``SummaryWriter`` the first disk error ends the writer thread and leaves a partial event. TensorBoard
    stops reading at a partial event.

    Args:
        folder: A local folder. The first event creates the folder and the file. TensorBoard follows only the newest
            file of a folder, so a folder should have one writer; :data:`EVENT_FILES` ensures that.

    Note:
        Any thread may write. An event is readable as soon as it is written. The file is not kept open.
    """

    def __init__(self, folder: str | Path) -> None:
        # File names must sort in the order of creation.
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_COUNT):06d}"
        self.path = Path(folder) / name
        self.dashboard = Dashboard()
        """The layout of the Custom Scalars page of the folder."""
        self._has_begun = False
        self._lock = threading.Lock()
        self._held = threading.local()

    def add(self, data: bytes) -> int:
        """Append a serialized event. Return its size in bytes, or 0 if it was skipped."""
        record = frame_record(data)
        held = getattr(self._held, "records", None)
        if held is not None:
            held.append(record)
            return len(record)
        return len(record) if self._append(record) else 0

    @contextmanager
    def joined(self, lose: Callable[[int], object] = lambda nbytes: None) -> Iterator[None]:
        """Hold back the events of this thread and append them together at the end of the context.

        ``lose`` is called with the total size of the skipped events in bytes, if the disk is full.
        """
        held: list[bytes] = []
        self._held.records = held
        try:
            yield
        finally:
            self._held.records = None
            # Append all events together. If that fails, append them one by one until the disk is full.
            if held and not self._append(b"".join(held)):
                written = list(takewhile(self._append, held)) if len(held) > 1 else []
                lose(sum(map(len, held)) - sum(map(len, written)))

    def _append(self, records: bytes) -> bool:
        with self._lock:
            data = records if self._has_begun else frame_record(_version(time.time())) + records
            is_written = attempt(self.path, len(data), lambda: append(self.path, data))
            self._has_begun |= is_written
            return is_written

    def flush(self) -> None:
        """Do nothing: each event is readable as soon as it is written."""

    def close(self) -> None:
        """Do nothing: the file is not kept open."""


def _version(now: float) -> bytes:
    """Return the first event of a file. It has two fields: the time and the version of the format."""
    return b"\x09" + struct.pack("<d", now) + b"\x1a" + bytes([len(_VERSION)]) + _VERSION


EVENT_FILES: SharedFiles[EventFile] = SharedFiles(EventFile)
"""The event files by folder."""


def frame_record(data: bytes) -> bytes:
    """Return data as a TFRecord: the length, its checksum, the data, and their checksum."""
    from google_crc32c import value as checksum

    header = struct.pack("<Q", len(data))
    return header + _masked(checksum(header)) + data + _masked(checksum(data))


def patch_crc32c(writer: SummaryWriter) -> bool:
    """Compute the checksums of a writer with ``google_crc32c``. Return True on success.

    TensorBoard computes the checksums byte by byte in Python, in another thread. Because of the GIL, this still blocks
    the training thread for 0.1 ms per histogram. With ``google_crc32c``, the file is identical. This function is a
    no-op if the library is not installed or if the writer has an unknown structure.
    """
    try:
        frame_record(b"")
        records: Any = writer._get_file_writer().event_writer._async_writer._writer
        file = records._writer
    except (AttributeError, ImportError):
        return False
    records.write = lambda data: file.write(frame_record(data))
    return True


def _masked(checksum: int) -> bytes:
    rotated = (checksum >> _ROTATION | checksum << (32 - _ROTATION)) + _ADDEND
    return struct.pack("<I", rotated & 0xFFFFFFFF)


# TensorBoard draws a histogram in 30 bins. More than 64 bins would enlarge the event file without changing the plot.
_MAX_BINS = 64

# The overhead of an event in the file: a length and two checksums.
_RECORD_BYTES = 16

# Events are encoded without the protobuf library, many tags at once, in the wire format of protocol buffers. The fields
# are defined by Event, Summary and HistogramProto in tensorboard/compat/proto. The library would take several times as
# long, because each value is an object.

# The field keys and values of min, max, num, sum and sum_squares.
_NUMBERS = struct.Struct("<" + 5 * "Bd")


@lru_cache(maxsize=1 << 14)
def _varint(number: int) -> bytes:
    packed = bytearray()
    while number > 127:
        packed.append(number & 127 | 128)
        number >>= 7
    packed.append(number)
    return bytes(packed)


def encoded_event(wall_time: float, step: int, summary: bytes) -> bytes:
    """Return an encoded ``Event``. ``summary`` is an encoded ``Summary``."""
    number = b"\x10" + _varint(step & (1 << 64) - 1) if step else b""
    return b"\x09" + struct.pack("<d", wall_time) + number + b"\x2a" + _varint(len(summary)) + summary


def _prefixed(prefix: str, tag: str) -> str:
    """Return a tag with the prefix. With a prefix, the start ``recorder/`` of a tag is removed, as it is redundant."""
    return prefix + tag.removeprefix("recorder/") if prefix else tag


@lru_cache(maxsize=1 << 13)
def _tag(tag: str, prefix: str = "") -> bytes:
    """Return the encoded field for the tag of a value."""
    text = _prefixed(prefix, tag).encode()
    return b"\x0a" + _varint(len(text)) + text


class ScalarTags:
    """Encodes scalars for a fixed list of tags."""

    def __init__(self, tags: Iterable[str], prefix: str = "") -> None:
        packed = bytearray()
        places = []
        for tag in (_tag(each, prefix) for each in tags):
            packed += b"\x0a" + _varint(len(tag) + 5) + tag + b"\x15"
            places.append(len(packed))
            packed += bytes(4)
        self._packed = np.frombuffer(bytes(packed), dtype=np.uint8)
        self._places = np.array(places, dtype=np.int64)[:, None] + np.arange(4)

    def summary(self, scalars: Iterable[float]) -> bytes:
        """Return an encoded ``Summary`` with a float32 for each tag."""
        packed = self._packed.copy()
        with np.errstate(over="ignore"):  # a large value becomes infinite, as in the protobuf library
            values = np.fromiter(scalars, dtype=np.float64, count=len(self._places)).astype("<f4")
        packed[self._places] = values.view(np.uint8).reshape(-1, 4)
        return packed.tobytes()


def histogram_summary(histograms: Mapping[str, Histogram], most: int, prefix: str = "") -> bytes:
    """Return an encoded ``Summary`` with the histograms that have a finite value, in at most ``most`` bins each."""
    pieces = []
    parts: Iterable[tuple[str, Sums, CoarseHistogram]]
    if isinstance(histograms, TaggedHistograms):
        parts = zip(histograms.tags, histograms.sums, histograms.coarsened(most), strict=True)
    else:
        parts = _one_by_one(histograms, most)
    for tag, sums, (count, limits, counts) in parts:
        if count:
            numbers = _NUMBERS.pack(9, sums[0], 17, sums[1], 25, count, 33, sums[2], 41, sums[3])
            size = _varint(len(limits))
            histogram = b"".join((numbers, b"\x32", size, limits, b"\x3a", size, counts))
            value = b"".join((_tag(tag, prefix), b"\x2a", _varint(len(histogram)), histogram))
            pieces += [b"\x0a", _varint(len(value)), value]
    return b"".join(pieces)


def _one_by_one(histograms: Mapping[str, Histogram], most: int) -> Iterator[tuple[str, Sums, CoarseHistogram]]:
    for tag, each in histograms.items():
        drawn = each.coarsened(most)
        limits, counts = drawn.edges[1:].astype("<f8"), drawn.counts.astype("<f8")
        sums = Sums(each.min, each.max, each.sum, each.sum_squares)
        yield tag, sums, CoarseHistogram(float(each.count), limits.tobytes(), counts.tobytes())


# The tags of a recorder rarely change.
_scalar_tags = lru_cache(maxsize=16)(ScalarTags)


class TensorBoardSink(Sink):
    """Write scalars, histograms, images, texts and graphs as events.

    The Custom Scalars page has one chart per statistic and group, with the most unusual modules and some others, unless
    the run already has a layout.

    The bins of a histogram are merged to at most 64 (about 1.1 KB). Its ``min``, ``max``, ``sum`` and ``sum_squares``
    are exact. So is ``num``, unless the histogram is based on a sample. A histogram without a finite value is skipped,
    since TensorBoard cannot draw it. TensorBoard shows one graph per run, under Graphs: the last graph that was
    written, regardless of its tag. Files are not supported.

    Args:
        writer: A ``SummaryWriter``, such as ``TensorBoardLogger.experiment``, or a folder. The sink does not close a
            ``SummaryWriter``. In a folder, the sink creates its own event file. All sinks of a local folder share one
            file. If its disk is full, results are skipped with one warning.
        prefix: The start of all tags in the file. The sink of a ``TensorBoardLogger`` has the prefix ``z_recorder/``.
            TensorBoard sorts tags by name, so the recorders' tags are one group after your own metrics.
    """

    any_thread = True

    def __init__(self, writer: SummaryWriter | str | Path, *, prefix: str = "") -> None:
        self._prefix = prefix
        self._owned = isinstance(writer, (str, Path))
        self._writer = _open_writer(writer) if isinstance(writer, (str, Path)) else writer
        self.written_bytes: int = 0
        if isinstance(self._writer, EventFile):
            self._dashboard = self._writer.dashboard
        else:
            self._dashboard = dashboard_of(self._writer)
            patch_crc32c(self._writer)

    @override
    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> bool:
        if scalars:
            self._add(step, _scalar_tags(tuple(scalars), self._prefix).summary(scalars.values()))
        self._dashboard.update(scalars, self._write_layout)
        return True

    def _write_layout(self, layout: Mapping[str, Mapping[str, list[str]]]) -> bool:
        from tensorboard.compat.proto.event_pb2 import Event
        from torch.utils.tensorboard.summary import custom_scalars

        charts_by_group = {
            group: {title: ["Multiline", [self._pattern(tag) for tag in tags]] for title, tags in charts.items()}
            for group, charts in layout.items()
        }
        return self._add_event(Event(summary=custom_scalars(charts_by_group))) > 0

    def _pattern(self, tag: str) -> str:
        """Return a regular expression that matches a tag for any data loader."""
        return rf"^{re.escape(_prefixed(self._prefix, tag))}(/dataloader_idx_\d+)?$"

    @override
    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> bool:
        summary = histogram_summary(histograms, _MAX_BINS, self._prefix)
        if summary:
            self._add(step, summary)
        return True

    @override
    def joined(self) -> AbstractContextManager[object]:
        return self._writer.joined(self._lose) if isinstance(self._writer, EventFile) else super().joined()

    def _lose(self, nbytes: int) -> None:
        self.written_bytes -= nbytes

    def _add(self, step: int, summary: bytes) -> None:
        # Write one event for all values. A SummaryWriter waits for the disk after every ten events, and a model has
        # hundreds of values.
        if isinstance(self._writer, EventFile):
            self.written_bytes += self._writer.add(encoded_event(time.time(), step, summary))
            return
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        self.written_bytes += self._add_event(Event(summary=Summary.FromString(summary)), step)

    def _add_event(self, proto: Event, step: int = 0) -> int:
        """Write an event. Return its approximate size in bytes, or 0 if it was skipped."""
        if isinstance(self._writer, EventFile):
            proto.wall_time, proto.step = time.time(), step
            return self._writer.add(proto.SerializeToString())
        # Use a private method, because the public methods of torch's writer write single values or trace a model.
        self._writer._get_file_writer().add_event(proto, step)
        return int(proto.ByteSize()) + _RECORD_BYTES

    @override
    def write_images(self, step: int, images: Mapping[str, Image]) -> bool:
        from tensorboard.compat.proto.summary_pb2 import Summary

        for tag, pixels in images.items():
            height, width, _ = pixels.shape
            proto = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=to_png(pixels))
            value = Summary.Value(tag=_prefixed(self._prefix, tag), image=proto)
            self._add(step, Summary(value=[value]).SerializeToString())
        return True

    @override
    def write_text(self, step: int, texts: Mapping[str, str]) -> bool:
        from tensorboard.compat.proto.event_pb2 import Event
        from torch.utils.tensorboard.summary import text as as_summary

        for tag, text in texts.items():
            self._add_event(Event(summary=as_summary(_prefixed(self._prefix, tag), text)), step)
        return True

    @override
    def write_graph(self, step: int, graphs: Mapping[str, Graph]) -> bool:
        from tensorboard.compat.proto.event_pb2 import Event

        for graph in graphs.values():
            # Do not use the writer's add_graph, which would also write an empty profile.
            self._add_event(Event(graph_def=to_graph_def(graph).SerializeToString()), step)
        return True

    @override
    def flush(self) -> None:
        self._writer.flush()

    @override
    def close(self) -> None:
        if self._owned:
            self._writer.close()
        else:
            self.flush()


def _open_writer(folder: str | Path) -> EventFile | SummaryWriter:
    """Return a writer for a folder, which may be on a remote file system."""
    if "://" not in str(folder):
        return EVENT_FILES[folder]
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder))
