"""The formatter that turns a record into tagged sink values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_recorder.outputs.tag_budget import TagBudget
from lightning_recorder.sinks import Sink
from lightning_recorder.statistics.sites import SHOWN_STATISTICS, Record, SiteStatistics
from lightning_recorder.tags import make_tag
from lightning_recorder.taps import Site

__all__ = ["SinkFormatter"]

_BAD = ("nan_count", "inf_count")


class SinkFormatter:
    """Write records to a sink.

    The tags are ``<group>/<module>/<statistic>``. The group of an evaluation ends with its stage, as in
    ``activations_validate``. With several data loaders, the tag ends with ``/dataloader_idx_<n>``, as in ``self.log``.
    The counts of NaN and infinities are written from the first record on in which a site has any.

    Args:
        group: ``"activations"``, ``"gradients"`` or ``"parameters"``.
        statistics: The scalars to show. Scalars of extra reductions are always shown.
        histograms: True to write histograms.
        budget: A limit on the number of tags, which chooses the sites to write.
    """

    def __init__(
        self, group: str, statistics: Sequence[str], *, histograms: bool = True, budget: TagBudget | None = None
    ) -> None:
        self.group = group
        self._label = group
        self._budget = budget
        self.statistics = tuple(statistics)
        self.histograms = histograms
        self.nonfinite: set[Site] = set()
        """The sites that have had NaN or infinities."""

    def begin(self, label: str) -> None:
        """Begin a run.

        Args:
            label: The first part of the tags that contain no module.
        """
        self._label = label
        if self._budget is not None:
            self._budget.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the modules that are shown, for a checkpoint."""
        return {} if self._budget is None else self._budget.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the modules that are shown from a checkpoint."""
        if self._budget is not None:
            self._budget.load_state_dict(state)

    def write(self, sink: Sink, record: Record, found: Mapping[Site, SiteStatistics]) -> None:
        """Write a record."""
        if record.overflowed:
            self._write_overflow(sink, record, found)
            return
        found = self._select(found)
        scalars: dict[str, float] = {}
        for site, seen in found.items():
            if any(seen.scalars[name] for name in _BAD):
                self.nonfinite.add(site)
            further = [name for name in seen.scalars if name not in SHOWN_STATISTICS]
            shown = [*self.statistics, *(_BAD if site in self.nonfinite else ()), *further]
            scalars.update(self._scalars(record, self.group, site, seen, shown))
        if record.overflow_steps:
            scalars[f"{self._label}/overflow_steps"] = float(record.overflow_steps)
        if scalars:
            sink.write_scalars(record.step, scalars)
        if self.histograms and found:
            # A histogram has the tag of its site, so that the page shows it next to the site's scalars.
            histograms = {
                self._tag(record, self.group, site, "histogram"): seen.histogram for site, seen in found.items()
            }
            sink.write_histograms(record.step, histograms)

    def _select(self, found: Mapping[Site, SiteStatistics]) -> Mapping[Site, SiteStatistics]:
        if self._budget is None or not found:
            return found
        return self._budget.select(found, self._count_tags)

    def _count_tags(self, seen: SiteStatistics) -> int:
        """Return the number of tags of a site whose values are finite."""
        further = [name for name in seen.scalars if name not in SHOWN_STATISTICS]
        return len({*(name for name in self.statistics if name in seen.scalars), *further}) + self.histograms

    def _write_overflow(self, sink: Sink, record: Record, found: Mapping[Site, SiteStatistics]) -> None:
        """Write the overflow locations of a step that the optimizer skipped. Its other statistics are meaningless."""
        scalars = {f"{self._label}/overflow_steps": float(record.overflow_steps)}
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
            if name in seen.scalars  # the statistics across ranks need several ranks
        }

    @staticmethod
    def _tag(record: Record, group: str, site: Site, statistic: str) -> str:
        stage = "" if record.stage == "train" else f"_{record.stage}"
        loader = "" if record.loader is None else f"/dataloader_idx_{record.loader}"
        return make_tag(group + stage, *site, statistic) + loader
