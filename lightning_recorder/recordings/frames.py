"""Records in long form: one line for each step and site."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_recorder.errors import ArgumentError

if TYPE_CHECKING:
    from lightning_recorder.recordings.series import Series

__all__ = ["PLACES", "columns_of", "frame", "rows_of", "series_frame", "write_parquet"]

PLACES = ("step", "epoch", "stage", "loader", "module", "path", "dtype")
"""The columns that say where the numbers of a line are from."""


def columns_of(series: Iterable[Series]) -> list[str]:
    """The statistics that are in any of the series, in the order in which they were first seen."""
    return list(dict.fromkeys(name for each in series for part in _parts(each) for name in part.statistics))


def rows_of(series: Series, columns: Iterable[str]) -> Iterator[list[Any]]:
    """The lines of a series: the values of :data:`PLACES` and those of the columns, ``None`` where there is none."""
    columns = list(columns)
    for part in _parts(series):
        for step in part.steps:
            row = part._part.entries[step].row
            about = [step, row.about["epoch"], part.stage, part.loader]
            for site, dtype in zip(row.layout.sites, row.layout.dtypes, strict=True):
                scalars = row.scalars(site)
                yield [*about, site.name, site.path, dtype, *(scalars.get(name) for name in columns)]


def _parts(series: Series) -> list[Series]:
    return [series.of(key.stage, key.loader) for key in series.keys]


def series_frame(series: Series) -> Any:
    """The lines of a series as a ``pandas.DataFrame``.

    Raises:
        ArgumentError: If pandas is not installed, or a statistic is called like one of the other columns.
    """
    columns = columns_of([series])
    return frame(rows_of(series, columns), [*PLACES, *columns])


def frame(rows: Iterable[list[Any]], columns: list[str]) -> Any:
    """Lines as a ``pandas.DataFrame``.

    Raises:
        ArgumentError: If pandas is not installed, or two columns have one name.
    """
    pandas = _library("pandas", "a frame")
    if len(set(columns)) < len(columns):
        raise ArgumentError(f"two columns of a frame have one name: {', '.join(map(repr, columns))}")
    found = pandas.DataFrame(list(rows), columns=columns)
    numbers = columns[columns.index(PLACES[-1]) + 1 :]
    types = dict.fromkeys(numbers, "float64") | {"step": "int64", "epoch": "int64", "loader": "Int64"}
    return found.astype(types)


def write_parquet(rows: Iterable[list[Any]], columns: list[str], path: Path) -> None:
    """Write lines as a Parquet file.

    Raises:
        ArgumentError: If pandas or pyarrow is not installed, or two columns have one name.
        OSError: If the file cannot be written.
    """
    _library("pyarrow", "a Parquet file")
    frame(rows, columns).to_parquet(path, engine="pyarrow", index=False)


def _library(name: str, what: str) -> Any:
    # Not by a statement, since whether its types are found differs from one environment to the next.
    try:
        return import_module(name)
    except ImportError as error:
        raise ArgumentError(f"{what} needs {name}: pip install {name}") from error
