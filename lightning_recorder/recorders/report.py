"""What a sink is given of a record, and under which tags."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lightning_recorder.recorders.record import Record
from lightning_recorder.recorders.sites import SHOWN_STATISTICS, SiteStatistics
from lightning_recorder.recorders.tagbudget import TagBudget
from lightning_recorder.sinks import Sink
from lightning_recorder.tags import make_tag
from lightning_recorder.taps import Site

__all__ = ["Report"]

_BAD = ("nan_count", "inf_count")


class Report:
    """Writes records to a sink.

    The tags are ``<group>/<module>/<statistic>``. The group of an evaluation has its stage behind it, as
    ``activations_validate``, and where there are several loaders the tag ends with ``/dataloader_idx_<n>``, as those of
    ``self.log`` do. NaN and infinities are counted where there are any, and from then on.

    Args:
        group: ``"activations"``, ``"gradients"`` or ``"parameters"``.
        statistics: The scalars that are shown; those of further reductions are in any case.
        histograms: Whether to write histograms.
        budget: Chooses the sites that are written, where there are too many.
    """

    def __init__(
        self, group: str, statistics: Sequence[str], *, histograms: bool = True, budget: TagBudget | None = None
    ) -> None:
        self.group = group
        self._budget = budget
        self.statistics = tuple(statistics)
        self.histograms = histograms
        self.nonfinite: set[Site] = set()
        """The sites that have had NaN or infinities."""

    def begin(self) -> None:
        """Begin with a run."""
        if self._budget is not None:
            self._budget.clear()

    def write(self, sink: Sink, record: Record, found: Mapping[Site, SiteStatistics]) -> None:
        """Write a record."""
        if record.overflowed:
            self._write_overflow(sink, record, found)
            return
        found = self._within_budget(found)
        scalars: dict[str, float] = {}
        for site, seen in found.items():
            if any(seen.scalars[name] for name in _BAD):
                self.nonfinite.add(site)
            further = [name for name in seen.scalars if name not in SHOWN_STATISTICS]
            shown = [*self.statistics, *(_BAD if site in self.nonfinite else ()), *further]
            scalars.update(self._scalars(record, self.group, site, seen, shown))
        if record.overflow_steps:
            scalars[f"{self.group}/overflow_steps"] = float(record.overflow_steps)
        if scalars:
            sink.write_scalars(record.step, scalars)
        if self.histograms and found:
            # The tag of a histogram is the site's own, so that the page shows it beside the scalars of the site.
            histograms = {
                self._tag(record, self.group, site, "histogram"): seen.histogram for site, seen in found.items()
            }
            sink.write_histograms(record.step, histograms)

    def _within_budget(self, found: Mapping[Site, SiteStatistics]) -> Mapping[Site, SiteStatistics]:
        if self._budget is None or not found:
            return found
        further = {name for seen in found.values() for name in seen.scalars if name not in SHOWN_STATISTICS}
        return self._budget.within(found, len({*self.statistics, *further}) + self.histograms)

    def _write_overflow(self, sink: Sink, record: Record, found: Mapping[Site, SiteStatistics]) -> None:
        """Of a step that the optimiser passed over, where it overflowed: its other numbers say nothing."""
        scalars = {f"{self.group}/overflow_steps": float(record.overflow_steps)}
        for site, seen in found.items():
            if any(seen.scalars[name] for name in _BAD):
                scalars.update(self._scalars(record, f"{self.group}_overflow", site, seen, _BAD))
        sink.write_scalars(record.step, scalars)

    def _scalars(
        self, record: Record, group: str, site: Site, seen: SiteStatistics, names: Iterable[str]
    ) -> dict[str, float]:
        return {
            self._tag(record, group, site, name): seen.scalars[name]
            for name in dict.fromkeys(names)
            if name in seen.scalars  # those of ranks are not, where there is one
        }

    @staticmethod
    def _tag(record: Record, group: str, site: Site, statistic: str) -> str:
        stage = "" if record.stage == "train" else f"_{record.stage}"
        loader = "" if record.loader is None else f"/dataloader_idx_{record.loader}"
        return make_tag(group + stage, *site, statistic) + loader
