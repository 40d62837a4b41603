"""A record consumer that draws the plots of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from typing_extensions import override

from lightning_recorder.outputs.pipeline import RecordConsumer
from lightning_recorder.outputs.tensor_pictures import TensorPictures
from lightning_recorder.plots import History, overview
from lightning_recorder.plots.canvas import Image
from lightning_recorder.statistics.sites import Record, SiteStatistics
from lightning_recorder.taps import Site

__all__ = ["Plotter"]

_FIRST = 10  # records; then at twice as many, and so on, to limit the drawing time of long runs

_MOST_SITES = 1000
_PICTURE_BYTES = 20_000  # an initial estimate; a plot of 6 layers takes 5 to 10 KB, one of 100 layers up to 75 KB

_HEAT_MAPS = {
    "activations": ("rms", "mean", "zero_fraction"),
    "gradients": ("rms", "zero_fraction"),
    "parameters": ("rms", "update_ratio"),
    "parameters_grad": ("rms",),
}
_FLOW = ("rms", "min", "max")


class Plotter(RecordConsumer):
    """Draw plots of the recorded history.

    The plots are drawn after 10, 20, 40, … records, and once more at the end of the run.

    Args:
        group: The kind of tensors: ``"activations"``, ``"gradients"`` or ``"parameters"``.
        tags: The first part of the tags, by default the group.
        every: Draw after every ``every``-th record instead.
        max_images: The maximum number of plots of single sites over time, and of pictures of statistics of more than
            one number.
        show: A callback that receives the step and the images by tag. It returns the number of bytes written, or None
            if they are not counted.

    Note:
        The history holds scalars for at most 256 records, evenly spaced; see
        :class:`~lightning_recorder.plots.History`. If there are more than 1,000 sites, more than a plot has rows for,
        every second, third, … site is kept. Drawing takes about 0.1 s per plot in the writer thread.
    """

    def __init__(
        self,
        group: str,
        tags: str = "",
        *,
        every: int | None = None,
        max_images: int = 8,
        show: Callable[[int, Mapping[str, Image]], int | None],
    ) -> None:
        self._group = group
        self._tags = tags or group
        self._every = every
        self._max_images = max_images
        self._show = show
        self._histories: dict[str, History] = {}
        self._tensors = TensorPictures(max_images)
        self._left_out: set[Site] = set()
        self._records = self._drawn = 0
        self._step = 0
        self._drawings = 0
        self._bytes: int | None = None

    def __str__(self) -> str:
        return "plots"

    @override
    def on_record(self, record: Record, found: Mapping[Site, SiteStatistics]) -> None:
        if record.stage != "train" or record.overflowed or not found:
            return
        sites = record.in_order_of_execution(found, backward=self._group == "gradients")
        for part, of_part in self._by_part(sites).items():
            if part not in self._histories:
                self._histories[part] = History(
                    statistics=tuple(dict.fromkeys((*_HEAT_MAPS[part], *_FLOW))),
                    max_histograms=0 if part.endswith("_grad") else self._max_images,  # their histograms are not drawn
                )
                every = -(-len(of_part) // _MOST_SITES)
                self._left_out |= set(of_part) - set(of_part[::every])
            kept = [site for site in of_part if site not in self._left_out]
            self._histories[part].add(record.step, {site: (found[site].scalars, found[site].bins) for site in kept})
        self._tensors.add(record.step, sites, found)
        self._records += 1
        self._step = record.step
        if self._is_due(self._records):
            self._draw()

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

    def _is_due(self, records: int) -> bool:
        if self._every is not None:
            return records % self._every == 0
        times, rest = divmod(records, _FIRST)
        return rest == 0 and times & (times - 1) == 0

    @override
    def logged_bytes(self, records: int) -> int:
        times = sum(map(self._is_due, range(1, records))) + 1
        if self._drawings:
            return times * (self._bytes or 0) // self._drawings
        groups = [group for group in _HEAT_MAPS if group.startswith(self._group)]
        pictures = sum(len(_HEAT_MAPS[group]) + 1 + self._max_images for group in groups)
        return times * pictures * _PICTURE_BYTES

    def _draw(self) -> None:
        self._drawn = self._records
        images: dict[str, Image] = {}
        for part, history in self._histories.items():
            group = part.replace(self._group, self._tags, 1)
            images |= overview(history, group=group, statistics=_HEAT_MAPS[part], max_images=self._max_images)
        images |= self._tensors.draw(self._group, self._tags)
        written = self._show(self._step, images)
        self._drawings += 1
        if written is not None:
            self._bytes = (self._bytes or 0) + written

    @override
    def finish(self) -> None:
        if self._drawn < self._records:
            self._draw()
