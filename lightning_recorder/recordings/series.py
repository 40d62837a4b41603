"""What one recorder of a run has recorded, as tensors over steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_recorder.errors import ArgumentError
from lightning_recorder.names import closest_names
from lightning_recorder.recordings.history import Entry, History, Part, PartKey, Session
from lightning_recorder.recordings.siteseries import SiteSeries, listed, nearest_steps
from lightning_recorder.taps import Site

__all__ = ["Series"]

_WHOLE_OUTPUT = "out"


class Series:
    """The records of one recorder: those of the training, or of another stage that was asked for by :meth:`of`.

    Args:
        history: What its file holds; read when it is first needed.
        stage: The stage; by default the training, and where that was not recorded the first other one.
        loader: The number of the loader; by default the first.

    Raises:
        DumpError: From whatever reads the file, if that cannot be read or is none of ours.
    """

    def __init__(self, history: History, stage: str | None = None, loader: int | None = None) -> None:
        self._history = history
        self._stage, self._loader = stage, loader

    def _read(self) -> History:
        if not self._history.is_read:
            self._history.refresh()
        return self._history

    def refresh(self) -> int:
        """Read what was written since the last time, so that a run can be followed while it goes on.

        Returns:
            How many records have come, those of other stages included.
        """
        return self._history.refresh()

    @property
    def path(self) -> Path:
        """The file."""
        return self._history.path

    @property
    def keys(self) -> list[PartKey]:
        """What this series is of: one stage and loader, or all of the recorder, the training first."""
        return sorted((key for key in self._read().parts if not key.overflowed and self._is_of(key)), key=_order)

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
        """The stage whose steps and values these are."""
        return self._key.stage

    @property
    def loader(self) -> int | None:
        """The loader whose steps and values these are; ``None`` where there is only one."""
        return self._key.loader

    @property
    def stages(self) -> list[str]:
        """The stages that the recorder has recorded, the training first."""
        keys = sorted((key for key in self._read().parts if not key.overflowed), key=_order)
        return list(dict.fromkeys(key.stage for key in keys))

    def of(self, stage: str, loader: int | None = None) -> Series:
        """The records of another stage, or of one of its loaders.

        Raises:
            ArgumentError: If there are none; names those that there are.
        """
        found = Series(self._history, stage, loader)
        self._read()
        if not found.keys:
            which = repr(stage) + ("" if loader is None else f" of loader {loader}")
            raise ArgumentError(f"nothing was recorded in {which}; the stages are {listed(self.stages)}")
        return found

    @property
    def loaders(self) -> list[int | None]:
        """The loaders of the stage; ``[None]`` where there is only one."""
        return [key.loader for key in self.keys if key.stage == self.stage]

    @property
    def sessions(self) -> list[Session]:
        """The fits that have written the file, in their order: more than one if the run was resumed."""
        return self._read().sessions

    @property
    def skipped(self) -> int:
        """How many damaged lines were passed over."""
        return self._read().skipped

    @property
    def replaced(self) -> int:
        """How many records were written again, as by a run that was resumed from an earlier step; the later counts."""
        return self._part.replaced

    @property
    def steps(self) -> list[int]:
        """The recorded steps, ascending."""
        return self._part.steps

    @property
    def epochs(self) -> list[int]:
        """The epoch of each step."""
        return [self.about(step)["epoch"] for step in self.steps]

    @property
    def overflow_steps(self) -> list[int]:
        """The steps whose gradients overflowed, which are not among the others."""
        return self._read().parts.get(self._key._replace(overflowed=True), Part()).steps

    @property
    def sites(self) -> list[Site]:
        """The recorded sites, in the order in which they were first executed."""
        return list(self._part.sites)

    @property
    def statistics(self) -> list[str]:
        """The names of the statistics."""
        return list(self._part.statistics)

    def about(self, step: int) -> Mapping[str, Any]:
        """What a record says beside its numbers, as ``epoch``, ``ranks``, ``recording_ms`` and ``time``.

        Raises:
            ArgumentError: If the step was not recorded.
        """
        return self._entry(step).row.about

    def session(self, step: int) -> int:
        """The number of the session in which a step was recorded.

        Raises:
            ArgumentError: If the step was not recorded.
        """
        return self._entry(step).session

    def _entry(self, step: int) -> Entry:
        found = self._part.entries.get(step)
        if found is None:
            raise ArgumentError(f"step {step!r} was not recorded; {nearest_steps(step, self.steps)}")
        return found

    def values(self, statistic: str) -> Tensor:
        """One statistic of all sites at all steps.

        Returns:
            ``[steps, sites]`` float64, in the order of :attr:`steps` and :attr:`sites`; NaN where a site has not the
            statistic, or was not recorded at a step.

        Raises:
            ArgumentError: If there is no such statistic.
        """
        self.check_statistic(statistic)
        return self._part.values(statistic)

    def seen(self) -> Tensor:
        """Which sites were recorded at which steps, ``[steps, sites]`` bool."""
        return self._part.seen()

    def packed_counts(self, step: int) -> dict[Site, object]:
        """The histogram of each site of a record as it stands in the file; ``None`` where there is none.

        Raises:
            ArgumentError: If the step was not recorded.
            DumpError: If the file has changed since it was read.
        """
        entry = self._entry(step)
        return dict(zip(entry.row.layout.sites, self._history.packed_counts(entry), strict=True))

    def check_statistic(self, statistic: str) -> None:
        """Refuse a statistic that there is none of.

        Raises:
            ArgumentError: Naming those that there are.
        """
        if statistic not in self._part.statistics:
            raise ArgumentError(f"there is no statistic {statistic!r}; there are {listed(self.statistics)}")

    def __contains__(self, key: object) -> bool:
        return bool(self._matching(key))

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self._part.sites)

    def __getitem__(self, key: str | tuple[str, str]) -> SiteSeries:
        """One site, by its module's name, which means the whole output where there are several, or by name and path.

        Raises:
            ArgumentError: If there is none, with the closest names, or if it is not clear which is meant.
        """
        found = self._matching(key)
        if not found:
            names = dict.fromkeys(site.name for site in self.sites)
            name = key if isinstance(key, str) else str(key[0])
            raise ArgumentError(f"there is no site {key!r}; {closest_names(name, names)}")
        if len(found) > 1:
            whole = [site for site in found if site.path == _WHOLE_OUTPUT]
            if not whole:
                paths = listed([site.path for site in found])
                raise ArgumentError(f"{key!r} has several sites; give one of the paths {paths} as well")
            found = whole
        return SiteSeries(self, found[0])

    def _matching(self, key: object) -> list[Site]:
        if isinstance(key, str):
            return [site for site in self._part.sites if site.name == key]
        return [site for site in self._part.sites if site == key]

    def frame(self) -> Any:
        """A ``pandas.DataFrame`` in long form: one line for each step and site of all that the series is of.

        The columns are ``step``, ``epoch``, ``stage``, ``loader``, ``module``, ``path``, ``dtype`` and the statistics.

        Raises:
            RecorderError: If pandas is not installed.
        """
        from lightning_recorder.recordings.frames import series_frame

        return series_frame(self)

    def __repr__(self) -> str:
        steps = self.steps
        span = f", steps {steps[0]} to {steps[-1]}" if steps else ""
        return f"<{self.path.stem}, {self.stage}: {len(steps)} records of {len(self)} sites{span}>"


def _order(key: PartKey) -> tuple[bool, str, int, bool]:
    return key.order
