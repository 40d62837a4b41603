"""Records of one site as tensors over steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_recorder.errors import ArgumentError
from lightning_recorder.recordings.counts import unpack_counts
from lightning_recorder.recordings.history import Entry
from lightning_recorder.recordings.lines import RecordSchema
from lightning_recorder.taps import Site

if TYPE_CHECKING:
    from lightning_recorder.recordings.series import Series
    from lightning_recorder.reductions.histogram import Histogram

__all__ = ["SiteSeries", "listed", "nearest_steps"]


class SiteSeries:
    """The records of one site, over the steps at which it was recorded.

    Args:
        series: The series that contains the site.
        site: The site.
    """

    def __init__(self, series: Series, site: Site) -> None:
        self.series = series
        self.site = site

    @property
    def name(self) -> str:
        """The name of the module."""
        return self.site.name

    @property
    def path(self) -> str:
        """The path of the tensor at the module."""
        return self.site.path

    def _entries(self) -> list[Entry]:
        part = self.series._part
        entries = (part.entries[step] for step in part.steps)
        return [entry for entry in entries if self.site in entry.row.layout.places]

    @property
    def steps(self) -> list[int]:
        """The steps at which the site was recorded, in ascending order."""
        return [entry.row.about["step"] for entry in self._entries()]

    @property
    def statistics(self) -> list[str]:
        """The names of the statistics of this site."""
        return list(dict.fromkeys(name for entry in self._entries() for name in entry.row.scalars(self.site)))

    @property
    def dtype(self) -> str | None:
        """The dtype of the tensor in the last record, for example ``"float32"``; ``None`` if it is unknown."""
        layout = self._last_layout()
        return None if layout is None else layout.dtypes[layout.places[self.site]]

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of the tensor in the last record; ``None`` if it is unknown."""
        layout = self._last_layout()
        return None if layout is None else layout.shapes[layout.places[self.site]]

    def _last_layout(self) -> RecordSchema | None:
        entries = self._entries()
        return entries[-1].row.layout if entries else None

    def statistic(self, name: str) -> Tensor:
        """Return one statistic over :attr:`steps`, ``[steps]`` float64; NaN if a record lacks it.

        Raises:
            ArgumentError: If there is no such statistic.
        """
        self.series.check_statistic(name)
        values = [entry.row.scalars(self.site).get(name, torch.nan) for entry in self._entries()]
        return torch.tensor(values, dtype=torch.float64)

    def scalars(self, step: int) -> dict[str, float]:
        """Return all statistics at one step.

        Raises:
            ArgumentError: If the site was not recorded at that step.
        """
        return self._entry(step).row.scalars(self.site)

    def _entry(self, step: int) -> Entry:
        found = self.series._part.entries.get(step)
        if found is None or self.site not in found.row.layout.places:
            raise ArgumentError(f"{self.name!r} was not recorded at step {step!r}; {nearest_steps(step, self.steps)}")
        return found

    def bins(self, step: int) -> Tensor:
        """Return the counts of the histogram at one step, ``[2048]`` int64; see ``ExponentHistogram``.

        Raises:
            ArgumentError: If the site was not recorded at that step, or was recorded without a histogram.
            DumpError: If the histogram is damaged.
        """
        packed = self.series.packed_counts(self._entry(step).row.about["step"])[self.site]
        if packed is None:
            raise ArgumentError(f"{self.name!r} was recorded at step {step} without a histogram")
        return unpack_counts(packed)

    def histogram(self, step: int) -> Histogram:
        """Return the histogram at one step, with edges, quantiles and the fraction that a narrower dtype would lose.

        Requires NumPy.

        Raises:
            ArgumentError: As for :meth:`bins`, or if ``count``, ``mean``, ``rms``, ``min`` or ``max`` was not recorded.
            DumpError: If the histogram is damaged.
        """
        from lightning_recorder.reductions import to_histogram

        scalars = self.scalars(step)
        missing = [name for name in ("count", "mean", "rms", "min", "max") if name not in scalars]
        if missing:
            raise ArgumentError(f"a histogram of {self.name!r} needs {listed(missing)}, which were not recorded")
        return to_histogram(scalars, self.bins(step))

    def __repr__(self) -> str:
        return f"<{self.name or '(root)'} {self.path}: {len(self.steps)} records>"


def nearest_steps(step: object, steps: list[int]) -> str:
    """Return the end of an error message about a step that was not recorded."""
    if not steps:
        return "there is no record yet"
    if not isinstance(step, int):
        return f"steps are whole numbers from {steps[0]} to {steps[-1]}"
    near = sorted(sorted(steps, key=lambda each: abs(each - step))[:3])
    return f"the nearest steps are {', '.join(map(str, near))}"


def listed(names: Iterable[str]) -> str:
    """Format names for an error message."""
    return ", ".join(map(repr, names)) or "none"
