"""The records of one recorder, or of one of its sites, as tensors over steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.errors import ArgumentError
from lightning_recorder.names import Site, closest_names, is_batch
from lightning_recorder.recordings.reader import Entry, Part, PartKey, RecordReader, Session, frame_of
from lightning_recorder.records.counts import to_histogram, unpacked
from lightning_recorder.records.file import calls_of
from lightning_recorder.records.table import Floats, Schema

if TYPE_CHECKING:
    from torch import Tensor

    from lightning_recorder.records.histogram import Histogram

__all__ = ["Series", "SiteSeries"]

_WHOLE_OUTPUT = "out"


class Series:
    """The records of one recorder in training, or in another stage selected with :meth:`of`.

    Args:
        reader: The contents of the record file, read on first access.
        stage: The stage; by default training, or the first other stage if training was not recorded.
        loader: The index of the dataloader; by default the first.

    Raises:
        DumpError: By any member that reads the file, if the file cannot be read or was not written by this package.
    """

    def __init__(self, reader: RecordReader, stage: str | None = None, loader: int | None = None) -> None:
        self._reader = reader
        self._stage, self._loader = stage, loader

    def _read(self) -> RecordReader:
        if not self._reader.is_read:
            self._reader.refresh()
        return self._reader

    def refresh(self) -> int:
        """Read the records appended since the last call, so that a run can be followed while it is in progress.

        Returns:
            The number of new records, including those of other stages.
        """
        return self._reader.refresh()

    @property
    def path(self) -> Path:
        """The path of the record file."""
        return self._reader.path

    @property
    def keys(self) -> list[PartKey]:
        """The stages and dataloaders of this series, training first. :meth:`of` limits them to its selection."""
        return list(self.parts)

    @property
    def parts(self) -> dict[PartKey, Part]:
        """The records of each of :attr:`keys`."""
        keys = sorted(
            (key for key in self._read().parts if not key.overflowed and self._is_of(key)), key=lambda key: key.order
        )
        return {key: self._reader.parts[key] for key in keys}

    def _is_of(self, key: PartKey) -> bool:
        return self._stage is None or (key.stage == self._stage and self._loader in (None, key.loader))

    @property
    def _key(self) -> PartKey:
        return next(iter(self.keys), PartKey(self._stage or "train", self._loader))

    @property
    def _part(self) -> Part:
        return self._read().parts.get(self._key, Part())

    @property
    def stage(self) -> str:
        """The stage of :attr:`steps` and :meth:`values`."""
        return self._key.stage

    @property
    def loader(self) -> int | None:
        """The index of the dataloader of :attr:`steps` and :meth:`values`; ``None`` if the stage has only one."""
        return self._key.loader

    @property
    def stages(self) -> list[str]:
        """The recorded stages, training first."""
        keys = sorted((key for key in self._read().parts if not key.overflowed), key=lambda key: key.order)
        return list(dict.fromkeys(key.stage for key in keys))

    def of(self, stage: str, loader: int | None = None) -> Series:
        """Return the series of another stage, or of one of its dataloaders.

        Raises:
            ArgumentError: If nothing was recorded there; the message lists the recorded stages.
        """
        found = Series(self._reader, stage, loader)
        self._read()
        if not found.keys:
            which = repr(stage) + ("" if loader is None else f" of loader {loader}")
            raise ArgumentError(f"nothing was recorded in {which}; the stages are {_listed(self.stages)}")
        return found

    @property
    def loaders(self) -> list[int | None]:
        """The dataloaders of the stage; ``[None]`` if there is only one."""
        return [key.loader for key in self.keys if key.stage == self.stage]

    @property
    def sessions(self) -> list[Session]:
        """The fits that have written to the file, in order; more than one if the run was resumed."""
        return self._read().sessions

    @property
    def skipped(self) -> int:
        """The number of damaged lines that were skipped."""
        return self._read().skipped

    @property
    def replaced(self) -> int:
        """The number of records that a later record replaced, for example in a run resumed from an earlier step."""
        return self._part.replaced

    @property
    def steps(self) -> list[int]:
        """The recorded steps in ascending order."""
        return self._part.steps

    @property
    def epochs(self) -> list[int]:
        """The epoch of each step."""
        return [self.about(step)["epoch"] for step in self.steps]

    @property
    def overflow_steps(self) -> list[int]:
        """The steps with overflowed gradients, which are not part of :attr:`steps`."""
        return self._read().parts.get(self._key._replace(overflowed=True), Part()).steps

    @property
    def sites(self) -> list[Site]:
        """The recorded sites in the order of first execution."""
        return list(self._part.sites)

    @property
    def statistics(self) -> list[str]:
        """The names of the statistics."""
        return list(self._part.statistics)

    def about(self, step: int) -> Mapping[str, Any]:
        """Return the metadata of a record, for example ``epoch``, ``ranks``, ``recording_ms`` and ``time``.

        Raises:
            ArgumentError: If the step was not recorded.
        """
        return self._entry(step).table.about

    def calls(self, step: int) -> dict[Site, int]:
        """Return the number of recorded tensors of each site of a record, in the order of first execution in it.

        Each call of a module counts once, or more often if it returns several tensors. The result is empty for
        parameters and for files of older versions.

        Raises:
            ArgumentError: If the step was not recorded.
        """
        return calls_of(self._entry(step).table)

    def session(self, step: int) -> int:
        """Return the number of the session in which a step was recorded.

        Raises:
            ArgumentError: If the step was not recorded.
        """
        return self._entry(step).session

    def _entry(self, step: int) -> Entry:
        found = self._part.entries.get(step)
        if found is None:
            raise ArgumentError(f"step {step!r} was not recorded; {_nearest_steps(step, self.steps)}")
        return found

    def values(self, statistic: str) -> Tensor:
        """Return one statistic of all sites at all steps.

        Returns:
            The values, ``[steps, sites]`` float64, in the order of :attr:`steps` and :attr:`sites`. NaN if a site lacks
            the statistic or was not recorded at a step.

        Raises:
            ArgumentError: If there is no such statistic.
        """
        import torch

        return torch.from_numpy(self.numbers(statistic))

    def numbers(self, statistic: str) -> Floats:
        """Return the numbers of :meth:`values` as an array, without importing torch."""
        self.check_statistic(statistic)
        return self._part.values(statistic)

    def seen(self) -> Tensor:
        """Return a mask that is True if a site was recorded at a step, ``[steps, sites]`` bool."""
        import torch

        return torch.from_numpy(self.mask())

    def mask(self) -> NDArray[np.bool_]:
        """Return the mask of :meth:`seen` as an array, without importing torch."""
        return self._part.seen(self.steps)

    def packed_counts(self, step: int) -> dict[Site, object]:
        """Return the encoded histogram of each site of a record, as stored in the file; ``None`` if there is none.

        Raises:
            ArgumentError: If the step was not recorded.
            DumpError: If the file has changed since it was read.
        """
        entry = self._entry(step)
        return dict(zip(entry.table.sites, self._reader.packed_counts(entry), strict=True))

    def all_vectors(self, step: int) -> dict[Site, dict[str, Floats]]:
        """Return the vector statistics of a record by site, ``[n]`` float64. Sites without vectors are left out.

        Raises:
            ArgumentError: If the step was not recorded.
            DumpError: If the file has changed since it was read.
        """
        return self._reader.all_vectors(self._entry(step))

    def check_statistic(self, statistic: str) -> None:
        """Raise an error if a statistic was not recorded.

        Raises:
            ArgumentError: If there is no such statistic; the message lists the recorded statistics.
        """
        if statistic not in self._part.statistics:
            raise ArgumentError(f"there is no statistic {statistic!r}; there are {_listed(self.statistics)}")

    def __contains__(self, key: object) -> bool:
        return bool(self._matching(key))

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self._part.sites)

    def __getitem__(self, key: str | tuple[str, str]) -> SiteSeries:
        """Return the series of one site, selected by module name or by the pair of module name and path.

        If a module has several sites, its name alone selects the whole output.

        Raises:
            ArgumentError: If there is no such site (the message lists the closest names), or if the name is ambiguous.
        """
        found = self._matching(key)
        if not found:
            names = dict.fromkeys(site.name for site in self.sites)
            name = key if isinstance(key, str) else str(key[0])
            raise ArgumentError(f"there is no site {key!r}; {closest_names(name, names)}")
        if len(found) > 1:
            whole = [site for site in found if site.path == _WHOLE_OUTPUT]
            if not whole:
                paths = _listed([site.path for site in found])
                raise ArgumentError(f"{key!r} has several sites; give one of the paths {paths} as well")
            found = whole
        return SiteSeries(self, found[0])

    def _matching(self, key: object) -> list[Site]:
        if isinstance(key, str):
            return [site for site in self._part.sites if key == (site.path if is_batch(*site) else site.name)]
        # Look the site up directly: a model may have tens of thousands of sites, and `show` and `diff` ask for each.
        is_site = isinstance(key, tuple) and all(isinstance(each, str) for each in key)
        return [Site(*key)] if is_site and key in self._part.sites else []

    def frame(self) -> Any:
        """Convert the series to a ``pandas.DataFrame`` in long form, with one row per step and site.

        All stages and dataloaders in :attr:`keys` are included. The columns are ``step``, ``epoch``, ``stage``,
        ``loader``, ``module``, ``path``, ``dtype`` and the statistics.

        Raises:
            RecorderError: If pandas is not installed.
        """
        return frame_of(self.parts)

    def __repr__(self) -> str:
        steps = self.steps
        span = f", steps {steps[0]} to {steps[-1]}" if steps else ""
        return f"<{self.path.stem}, {self.stage}: {len(steps)} records of {len(self)} sites{span}>"


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
        return [entry for entry in entries if self.site in entry.table.rows]

    @property
    def steps(self) -> list[int]:
        """The steps at which the site was recorded, in ascending order."""
        return [entry.table.about["step"] for entry in self._entries()]

    @property
    def statistics(self) -> list[str]:
        """The names of the statistics of this site."""
        return list(dict.fromkeys(name for entry in self._entries() for name in entry.table.scalars(self.site)))

    @property
    def dtype(self) -> str | None:
        """The dtype of the tensor in the last record, for example ``"float32"``; ``None`` if it is unknown."""
        schema = self._last_schema()
        return None if schema is None else schema.dtypes[schema.rows[self.site]]

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of the tensor in the last record; ``None`` if it is unknown."""
        schema = self._last_schema()
        return None if schema is None else schema.shapes[schema.rows[self.site]]

    def _last_schema(self) -> Schema | None:
        part = self.series._part
        schemas = (part.entries[step].table.schema for step in reversed(part.steps))
        return next((schema for schema in schemas if self.site in schema.rows), None)

    def statistic(self, name: str) -> Tensor:
        """Return one statistic over :attr:`steps`, ``[steps]`` float64; NaN if a record lacks it.

        Raises:
            ArgumentError: If there is no such statistic.
        """
        import torch

        return torch.from_numpy(self.numbers(name))

    def numbers(self, name: str) -> Floats:
        """Return the numbers of :meth:`statistic` as an array, without importing torch."""
        self.series.check_statistic(name)
        values = [entry.table.scalars(self.site).get(name, math.nan) for entry in self._entries()]
        return np.array(values, dtype=np.float64)

    def scalars(self, step: int) -> dict[str, float]:
        """Return all statistics at one step.

        Raises:
            ArgumentError: If the site was not recorded at that step.
        """
        return self._entry(step).table.scalars(self.site)

    def _entry(self, step: int) -> Entry:
        found = self.series._part.entries.get(step)
        if found is None or self.site not in found.table.rows:
            raise ArgumentError(f"{self.name!r} was not recorded at step {step!r}; {_nearest_steps(step, self.steps)}")
        return found

    def vectors(self, step: int) -> dict[str, Tensor]:
        """Return the vector statistics at one step, such as the mean of each channel, ``[channels]`` float64.

        Raises:
            ArgumentError: If the site was not recorded at that step.
            DumpError: If the file has changed since it was read.
        """
        import torch

        found = self.series._reader.all_vectors(self._entry(step)).get(self.site, {})
        return {name: torch.from_numpy(values) for name, values in found.items()}

    @property
    def calls(self) -> list[int | None]:
        """The number of recorded tensors of the site at each of :attr:`steps`, usually one per call of the module.

        With several ranks, this is the number on the first rank. ``None`` if the file does not contain it.
        """
        return [calls_of(entry.table).get(self.site) for entry in self._entries()]

    def bins(self, step: int) -> Tensor:
        """Return the counts of the histogram at one step, ``[2048]`` int64; see ``ExponentHistogram``.

        Raises:
            ArgumentError: If the site was not recorded at that step, or was recorded without a histogram.
            DumpError: If the histogram is damaged.
        """
        import torch

        return torch.from_numpy(self.counts(step))

    def counts(self, step: int) -> NDArray[np.int64]:
        """Return the counts of :meth:`bins` as an array, without importing torch.

        Raises:
            ArgumentError, DumpError: As for :meth:`bins`.
        """
        packed = self.series.packed_counts(self._entry(step).table.about["step"])[self.site]
        if packed is None:
            raise ArgumentError(f"{self.name!r} was recorded at step {step} without a histogram")
        return unpacked(packed)

    def classes(self, step: int) -> dict[int, int]:
        """Return the count of each class at one step, for a site whose path ends with ``.classes``.

        Raises:
            ArgumentError: As for :meth:`bins`.
            DumpError: If the counts are damaged.
        """
        from lightning_recorder.records.classes import class_counts

        counts = class_counts(self.counts(step))
        return {each: int(number) for each, number in enumerate(counts) if number}

    def histogram(self, step: int) -> Histogram:
        """Return the histogram at one step. It has edges, quantiles, and the fraction that a narrower dtype would lose.

        Raises:
            ArgumentError: As for :meth:`bins`, or if ``count``, ``mean``, ``rms``, ``min`` or ``max`` was not recorded.
            DumpError: If the histogram is damaged.
        """
        scalars = self.scalars(step)
        missing = [name for name in ("count", "mean", "rms", "min", "max") if name not in scalars]
        if missing:
            raise ArgumentError(f"a histogram of {self.name!r} needs {_listed(missing)}, which were not recorded")
        return to_histogram(scalars, self.counts(step))

    def __repr__(self) -> str:
        return f"<{self.name or '(root)'} {self.path}: {len(self.steps)} records>"


def _nearest_steps(step: object, steps: list[int]) -> str:
    """Return the end of an error message about a step that was not recorded."""
    if not steps:
        return "there are no records yet"
    if not isinstance(step, int):
        return f"steps are whole numbers from {steps[0]} to {steps[-1]}"
    near = sorted(sorted(steps, key=lambda each: abs(each - step))[:3])
    return f"the nearest steps are {', '.join(map(str, near))}"


def _listed(names: Iterable[str]) -> str:
    """Format names for an error message."""
    return ", ".join(map(repr, names)) or "none"
