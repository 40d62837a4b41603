"""A record consumer that draws the plots of a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lightning_recorder.insight import Finding
from lightning_recorder.insight.unusual import are_of_losses, choose, compared, standing_out, unusualness
from lightning_recorder.outputs.pipeline import RecordConsumer
from lightning_recorder.outputs.tensor_pictures import TensorPictures
from lightning_recorder.plots import DrawingProcess, PlotHistory
from lightning_recorder.plots.canvas import Image
from lightning_recorder.plots.overview import pictures
from lightning_recorder.records.table import Schema, Table
from lightning_recorder.statistics.snapshot import SETTINGS, SHOWN_STATISTICS
from lightning_recorder.taps import Site

__all__ = ["DrawingTime", "Plotter"]

_FIRST = 10  # plots are drawn after 10, 20, 40, … records, to limit the size of event files

_MOST_SITES = 1000
_SHOWN_BYTES = 2**22  # images are collected and written together once their pixels take this many bytes
_PICTURE_BYTES = 20_000  # an initial estimate; a plot of 6 layers takes 5 to 10 KB, a plot of 100 layers up to 75 KB

_HEAT_MAPS = {
    "activations": ("rms", "mean", "zero_fraction"),
    "gradients": ("rms", "zero_fraction"),
    "parameters": ("rms", "update_ratio"),
    "parameters_grad": ("rms",),
}
# The statistics for the choice of sites and for the flow plot.
_COMPARED = ("rms", "min", "max", "zero_fraction", "nan_count", "inf_count")


_SHARE = 0.02
_FIRST_COST_S = 4.0  # an initial estimate, most of which is the import of torch in the new process


class DrawingTime:
    """A limit on the processor time for the pictures of a run: at most 2 % of the time since the run began.

    All recorders of a trainer share the limit. The expected time of a drawing is the time of the previous drawing. A
    drawing is allowed if all previous drawings and the new one are expected to stay within the limit.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._lock = threading.Lock()
        self._expected_s = _FIRST_COST_S
        self.spent_s = 0.0
        """The processor time of all drawings so far. Unfinished drawings count with their expected time."""

    def reserve(self) -> float | None:
        """Reserve and return the expected time of another drawing, or return None if the limit does not allow it."""
        with self._lock:
            cost_s = self._expected_s
            if self.spent_s + cost_s > _SHARE * (self._clock() - self._began):
                return None
            self.spent_s += cost_s
            return cost_s

    def settle(self, reserved_s: float, cost_s: float) -> None:
        """Replace the expected time of a drawing by the measured one."""
        with self._lock:
            self.spent_s += cost_s - reserved_s
            self._expected_s = cost_s


class _Started(NamedTuple):
    """A drawing in progress in another process."""

    process: DrawingProcess
    reserved_s: float
    step: int
    records: int


class _Rows(NamedTuple):
    """The sites of a plot and their rows in the tables of a schema."""

    sites: tuple[Site, ...]
    rows: NDArray[np.int64]


class Plotter(RecordConsumer):
    """Draws plots of the recorded history.

    The plots are drawn at the end of the run and, in a long run, after 10, 20, 40, … records, as far as
    :class:`DrawingTime` allows. During a run, another process draws the plots. Starting that process takes a few
    seconds of processor time, so runs of less than two or three minutes have plots only at the end.

    Args:
        group: The kind of tensors: ``"activations"``, ``"gradients"`` or ``"parameters"``.
        tags: The first part of the tags, by default the group.
        every: Draw after every ``every``-th record instead of after 10, 20, 40, … records. The calling thread then
            draws, without a time limit.
        max_images: The maximum number of plots of single sites over time. It also limits the pictures of statistics
            that are tensors.
        statistics: The statistics to draw as heat maps, in addition to the statistics of extra reductions. By default,
            a small selection.
        show: A callback that receives the step and the images by tag. It returns the number of bytes written, or None
            if they are not counted.
        limit: The time limit for drawings. Other recorders may share it.
        findings: A function that returns the findings so far. The plots mark them.

    Note:
        The history holds the scalars of at most 256 evenly spaced records. For heat maps, it also keeps the values of
        the other records that are furthest from 0; see :class:`~lightning_recorder.plots.PlotHistory`. A plot has at
        most 1,000 rows. With more sites, 1,000 are kept: the sites that stand out in the first record, and an even
        selection of the others. Sites that stand out when plots are drawn are kept from then on.
    """

    def __init__(
        self,
        group: str,
        tags: str = "",
        *,
        every: int | None = None,
        max_images: int = 8,
        statistics: Sequence[str] = (),
        show: Callable[[int, Mapping[str, Image]], int | None],
        limit: DrawingTime | None = None,
        findings: Callable[[], Sequence[Finding]] = tuple,
    ) -> None:
        self._group = group
        self._tags = tags or group
        self._every = every
        self._max_images = max_images
        self._show = show
        self._limit = DrawingTime() if limit is None else limit
        self._statistics, self._findings = tuple(statistics), findings
        self._histories: dict[str, PlotHistory] = {}
        self._heat_maps: dict[str, tuple[str, ...]] = {}
        self._tensors = TensorPictures(max_images)
        self._left_out: set[Site] = set()
        self._schema: Schema | None = None
        self._places: dict[str, _Rows] = {}
        self._records = self._drawn = 0
        self._due = _FIRST
        self._step = 0
        self._drawings = 0
        self._bytes: int | None = None
        self._started: _Started | None = None
        self._can_start = True

    def __str__(self) -> str:
        return "plots"

    @override
    def on_record(self, found: Table) -> None:
        if self._started is not None and self._started.process.done():
            self._show_started()
        if found.stage != "train" or found.about["overflowed"] or not found:
            return
        is_due = self._is_due
        if found.schema is not self._schema:
            self._schema = found.schema
            self._places = {}
        if not self._places or (is_due and self._left_out):
            self._places = dict(self._places_in(found.schema, found))
        for part, (sites, rows) in self._places.items():
            history = self._histories[part]
            values, counts = found.part(rows, history.statistics), found.counts
            history.add_values(found.step, sites, values, None if counts is None else counts.take(rows))
        if found.tensors:
            order = found.schema.order_of(self._group)
            self._tensors.add(found.step, [found.sites[row] for row in order.tolist()], found)
        self._records += 1
        self._step = found.step
        if is_due and self._every is not None:
            self._draw()
        elif is_due and self._can_start and self._started is None:
            self._start()

    @property
    def _is_due(self) -> bool:
        """True if plots are due after the next record."""
        records = self._records + 1
        return records >= self._due if self._every is None else records % self._every == 0

    def _places_in(self, schema: Schema, found: Table) -> Iterator[tuple[str, _Rows]]:
        """Yield each plot with the rows of its sites. Create the histories of new plots."""
        ordered = [schema.sites[row] for row in schema.order_of(self._group).tolist()]
        layers = [ordered[place] for place in np.flatnonzero(~are_of_losses(tuple(ordered)))]
        for part, sites in self._by_part(layers).items():
            is_new = part not in self._histories
            if is_new:
                self._heat_maps[part] = self._statistics_of(part, found.columns)
                self._histories[part] = PlotHistory(
                    statistics=tuple(dict.fromkeys((*self._heat_maps[part], *_COMPARED))),
                    conspicuous=self._heat_maps[part],
                    max_histograms=0 if part.endswith("_grad") else self._max_images,  # gradients have no histograms
                )
            if len(sites) > _MOST_SITES:
                self._leave_out(sites, found, is_new=is_new)
            kept = tuple(site for site in sites if site not in self._left_out)
            yield part, _Rows(kept, np.array([schema.rows[site] for site in kept], dtype=np.int64))

    def _statistics_of(self, part: str, columns: Sequence[str]) -> tuple[str, ...]:
        """Return the statistics to draw as heat maps: the requested statistics and all of extra reductions."""
        asked = self._statistics or _HEAT_MAPS[part]
        further = (name for name in columns if name not in (*SHOWN_STATISTICS, *SETTINGS))
        return tuple(dict.fromkeys((*asked, *further)))

    def _leave_out(self, sites: list[Site], found: Table, *, is_new: bool) -> None:
        """Choose the sites to keep at the first record. In later records, also keep sites that stand out."""
        rows = [found.rows[site] for site in sites]
        degrees = unusualness(sites, {name: found.column(name)[rows, None] for name in compared(_COMPARED)})
        if is_new:
            kept = {sites[place] for place in choose(degrees, _MOST_SITES)}
            self._left_out |= set(sites) - kept
        self._left_out -= {sites[place] for place in standing_out(degrees)}

    def _by_part(self, sites: list[Site]) -> dict[str, list[Site]]:
        """Group the sites by plot: the values and the gradients of parameters are drawn separately."""
        if self._group != "parameters":
            return {self._group: sites}
        known = set(sites)
        parts: dict[str, list[Site]] = {}
        for site in sites:
            of, _, last = site.path.rpartition(".")
            if last == "grad":
                parts.setdefault("parameters_grad", []).append(site)
            elif last != "update" and Site(site.name, of) not in known:
                parts.setdefault("parameters", []).append(site)
        return parts

    @override
    def logged_bytes(self, records: int) -> int:
        if self._every is not None:
            times = -(-records // self._every)
        else:
            times = 1 + max(0, (max(records - 1, 1) // _FIRST).bit_length())
        if self._drawings:
            return times * (self._bytes or 0) // self._drawings
        groups = [group for group in _HEAT_MAPS if group.startswith(self._group)]
        pictures = sum(len(self._statistics or _HEAT_MAPS[group]) + 1 + self._max_images for group in groups)
        return times * pictures * _PICTURE_BYTES

    def _work(self) -> list[tuple[PlotHistory, dict[str, Any]]]:
        """Return the arguments of :func:`overview` for each plot."""
        found, findings = [], self._findings()
        for part, history in self._histories.items():
            group = part.replace(self._group, self._tags, 1)
            options = {
                "group": group,
                "statistics": self._heat_maps[part],
                "max_images": self._max_images,
                "findings": findings,
            }
            found.append((history, options))
        return found

    def _start(self) -> None:
        """Start to draw in another process, if the time limit allows it."""
        reserved_s = self._limit.reserve()
        if reserved_s is None:
            return
        try:
            process = DrawingProcess(_draw, self._work())
        except Exception:  # noqa: BLE001 - without another process, everything is drawn at the end
            self._can_start = False
            self._limit.settle(reserved_s, 0.0)
            return
        self._started = _Started(process, reserved_s, self._step, self._records)
        self._due = 2 * self._records

    def wait(self) -> None:
        """Wait for the drawing in the other process. The images are shown with the next record."""
        if self._started is not None:
            self._started.process.wait()

    def _show_started(self) -> None:
        started, self._started = self._started, None
        if started is None:
            return
        cost_s = started.reserved_s
        try:
            images, cost_s = started.process.finish()
        except OSError:
            self._can_start = False
        else:
            self._show_images(started.step, images.items())
            self._drawn = started.records
        finally:
            self._limit.settle(started.reserved_s, cost_s)

    def _draw(self) -> None:
        self._drawn = self._records
        self._show_images(self._step, _drawn(self._work()))

    def _show_images(self, step: int, images: Iterable[tuple[str, Image]]) -> None:
        self._drawings += 1
        some: dict[str, Image] = {}
        for tag, image in chain(images, self._tensors.draw(self._group, self._tags).items()):
            some[tag] = image
            if sum(each.nbytes for each in some.values()) >= _SHOWN_BYTES:
                self._show_some(step, some)
                some = {}
        self._show_some(step, some)

    def _show_some(self, step: int, images: Mapping[str, Image]) -> None:
        written = self._show(step, images) if images else None
        if written is not None:
            self._bytes = (self._bytes or 0) + written

    @override
    def finish(self) -> None:
        started, self._started = self._started, None
        if started is not None:  # discard the drawing in progress, because the final drawing shows more records
            with suppress(OSError):
                started.process.finish()
        if self._drawn < self._records:
            self._draw()


def _draw(work: list[tuple[PlotHistory, dict[str, Any]]]) -> dict[str, Image]:
    """Draw and return all images. Also called in the other process."""
    return dict(_drawn(work))


def _drawn(work: list[tuple[PlotHistory, dict[str, Any]]]) -> Iterator[tuple[str, Image]]:
    for history, options in work:
        yield from pictures(history, **options)
