"""The table of runs: for each run the verdict, differing settings, last metrics, and a small heat map of its layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.errors import ArgumentError, DumpError
from lightning_recorder.page.data import curves, group_of, logged_curves
from lightning_recorder.page.histograms import packed_numbers
from lightning_recorder.recordings import WATCH
from lightning_recorder.recordings.recording import Run
from lightning_recorder.recordings.run_changes import settings_of

if TYPE_CHECKING:
    from lightning_recorder.insight import Diagnosis
    from lightning_recorder.recordings import Series

__all__ = ["FEWEST_RUNS", "runs_table", "table_row"]

FEWEST_RUNS = 3
"""The least number of runs for a table. Two runs are overlaid instead."""

_MOST_RECORDS = 32  # the most records of a recorder that are read
_MOST_LOGGED = 400  # the most records of logged values that are read
_ROWS, _COLUMNS = 24, 16  # the most layers and steps of a run's heat map
_MOST_COLUMNS = 12  # the most columns of settings
_REPEATED = "hparams."


def runs_table(rows: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the table, each with only the settings that differ between the runs."""
    names = dict.fromkeys(name for row in rows.values() for name in row["settings"])
    values = {name: tuple(row["settings"].get(name, "") for row in rows.values()) for name in names}
    kept: dict[tuple[str, ...], str] = {}
    for name, found in values.items():
        # Hyperparameters often repeat settings of the optimizer, so of names with equal values only one is kept.
        if len(set(found)) > 1 and (found not in kept or kept[found].startswith(_REPEATED)):
            kept[found] = name
    chosen = [*kept.values()][:_MOST_COLUMNS]
    return [
        {
            **row,
            "name": name,
            "settings": {each.removeprefix(_REPEATED): row["settings"].get(each, "") for each in chosen},
        }
        for name, row in rows.items()
    ]


def table_row(run: Run, known: Diagnosis | None = None) -> dict[str, Any]:
    """Return the table row of a run. Only a part of the records is read, so that many runs open fast.

    Args:
        run: The run.
        known: The diagnosis of a run whose records are all read. By default, the diagnosis is the one that the run
            wrote. If the run wrote none, it is examined.
    """
    part, logged = (
        (run, run)
        if known is not None
        else (Run(run.name, run.directory, _MOST_RECORDS), Run(run.name, run.directory, _MOST_LOGGED))
    )
    try:
        diagnosis = known or run.written_diagnosis or run.diagnosis
        return {
            "folder": str(run.log_dir),
            "healthy": diagnosis.is_healthy,
            "verdict": diagnosis.verdict,
            "finding": next((each.verdict for each in diagnosis.bad), ""),
            "settings": settings_of(part),
            "metrics": _last_values(logged),
            "strip": _strip(part),
        }
    except (DumpError, ArgumentError, OSError) as error:  # the other runs are still shown
        row = {"folder": str(run.log_dir), "healthy": None, "verdict": "damaged", "finding": str(error)}
        return {**row, "settings": {}, "metrics": {}, "strip": None}


def _last_values(run: Run) -> dict[str, str]:
    """Return the last value of each curve, with six digits."""
    found = [*curves(run), *logged_curves(run)] if WATCH in run else []
    return {name: f"{values[-1]:.6g}" for name, _, values in found if len(values)}


def _strip(run: Run) -> dict[str, Any] | None:
    """Return the rms of layer outputs over steps as a heat map. Layers that share a row show the most unusual value."""
    series = next((run[label] for label in run if group_of(label, run[label]) == "activations"), None)
    if series is None or "rms" not in series.statistics or not series.steps:
        return None
    values = _not_finite_as_nan(series)
    steps = np.unique(np.linspace(0, len(values) - 1, min(_COLUMNS, len(values))).round().astype(int))
    with np.errstate(all="ignore"):
        sizes = np.log(values[steps])
    rows = np.array_split(sizes, min(_ROWS, sizes.shape[1]), axis=1)
    table = np.stack([_farthest(part) for part in rows])
    return {
        "steps": [series.steps[step] for step in steps],
        "values": packed_numbers(np.exp(table)),
        "statistic": f"{series.path.stem} rms",
    }


def _not_finite_as_nan(series: Series) -> NDArray[np.float64]:
    values = series.numbers("rms").copy()
    for name in {"nan_count", "inf_count"} & {*series.statistics}:
        values[series.numbers(name) > 0] = np.nan
    return values


def _farthest(part: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the value farthest from the overall median in each row of ``[steps, layers]``; NaN if a row has a NaN."""
    finite = np.where(np.isfinite(part), part, np.nan)
    middle = np.nanmedian(finite) if np.isfinite(part).any() else 0.0
    far = np.where(np.isnan(part), np.inf, np.abs(part - middle))
    found: NDArray[np.float64] = part[np.arange(len(part)), far.argmax(1)]
    return found
