"""Records as long-form tables with one row per step and site."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_recorder.errors import ArgumentError
from lightning_recorder.recordings.history import Part, PartKey

__all__ = ["PLACES", "columns_of", "frame_of", "rows_of", "write_parquet"]

_Parts = Mapping[PartKey, Part]

PLACES = ("step", "epoch", "stage", "loader", "module", "path", "dtype")
"""The columns that identify a row."""


def columns_of(series: Iterable[_Parts]) -> list[str]:
    """Return the names of the statistics that any of the series contains, in the order of first appearance."""
    return list(dict.fromkeys(name for parts in series for part in parts.values() for name in part.statistics))


def rows_of(parts: _Parts, columns: Iterable[str]) -> Iterator[list[Any]]:
    """Yield the rows of a series: the values of :data:`PLACES`, then those of ``columns``, ``None`` if missing."""
    columns = list(columns)
    for key, part in parts.items():
        for step in part.steps:
            row = part.entries[step].row
            about = [step, row.about["epoch"], key.stage, key.loader]
            for site, dtype in zip(row.layout.sites, row.layout.dtypes, strict=True):
                scalars = row.scalars(site)
                yield [*about, site.name, site.path, dtype, *(scalars.get(name) for name in columns)]


def frame_of(parts: _Parts) -> Any:
    """Convert a series to a ``pandas.DataFrame`` in long form.

    Raises:
        ArgumentError: If pandas is not installed, or if a statistic has the same name as one of :data:`PLACES`.
    """
    columns = columns_of([parts])
    return _frame(rows_of(parts, columns), [*PLACES, *columns])


def _frame(rows: Iterable[list[Any]], columns: list[str]) -> Any:
    """Convert rows to a ``pandas.DataFrame``.

    Raises:
        ArgumentError: If pandas is not installed, or if two columns have the same name.
    """
    pandas = _library("pandas", "a frame")
    if len(set(columns)) < len(columns):
        raise ArgumentError(f"two columns of a frame have one name: {', '.join(map(repr, columns))}")
    found = pandas.DataFrame(list(rows), columns=columns)
    numbers = columns[columns.index(PLACES[-1]) + 1 :]
    types = dict.fromkeys(numbers, "float64") | {"step": "int64", "epoch": "int64", "loader": "Int64"}
    return found.astype(types)


def write_parquet(rows: Iterable[list[Any]], columns: list[str], path: Path) -> None:
    """Write rows to a Parquet file.

    Raises:
        ArgumentError: If pandas or pyarrow is not installed, or if two columns have the same name.
        OSError: If the file cannot be written.
    """
    _library("pyarrow", "a Parquet file")
    _frame(rows, columns).to_parquet(path, engine="pyarrow", index=False)


def _library(name: str, what: str) -> Any:
    # Not an import statement: mypy finds the type stubs in some environments only, so no ignore comment fits all.
    try:
        return import_module(name)
    except ImportError as error:
        raise ArgumentError(f"{what} needs {name}: pip install {name}") from error
