"""``export``: write all statistics to one file."""

from __future__ import annotations

import csv
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import torch

from lightning_recorder.commands.terminal import printable
from lightning_recorder.errors import ArgumentError
from lightning_recorder.recordings import Recording, Series, open_recording
from lightning_recorder.recordings.reader import PLACES, columns_of, rows_of, write_parquet

__all__ = ["run"]

_FORMAT = "lightning_recorder.export/1"
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # prefixes that make a spreadsheet evaluate a cell as a formula


def run(arguments: Namespace, out: TextIO) -> int:
    """Export the recording and print the path of the file."""
    path = Path(arguments.out)
    write = {".csv": _write_csv, ".parquet": _write_parquet, ".pt": _write_tensors}.get(path.suffix.lower())
    if write is None:
        raise ArgumentError(f"OUT must end in .csv, .parquet or .pt, got {path.name!r}")
    recording = open_recording(arguments.path)
    if not any(each.has_records for each in recording.runs.values()):
        raise ArgumentError(f"{arguments.path!r} has no records to export")
    write(recording, path)
    out.write(f"{printable(str(path), None)}\n")
    return 0


def _series(recording: Recording) -> Iterator[tuple[str, str, Series]]:
    for name, each in recording.runs.items():
        for label in each:
            yield name, label, each[label]


def _write_csv(recording: Recording, path: Path) -> None:
    columns = columns_of(series.parts for _, _, series in _series(recording))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(map(_cell, ["run", "recorder", *PLACES, *columns]))
        for name, label, series in _series(recording):
            writer.writerows(map(_cell, [name, label, *row]) for row in rows_of(series.parts, columns))


def _cell(value: Any) -> Any:
    """Neutralize formulas and escape invisible characters in a string. Numbers keep their full precision."""
    if not isinstance(value, str):
        return value
    text = value if value.isprintable() else "".join(map(printable, value))
    return f"'{text}" if value.startswith(_FORMULA) else text


def _write_parquet(recording: Recording, path: Path) -> None:
    columns = columns_of(series.parts for _, _, series in _series(recording))
    rows = (
        [_encodable(each) for each in [name, label, *row]]
        for name, label, series in _series(recording)
        for row in rows_of(series.parts, columns)
    )
    write_parquet(rows, ["run", "recorder", *PLACES, *map(_encodable, columns)], path)


def _encodable(value: Any) -> Any:
    """Escape lone surrogates, which no text encoding can represent."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _write_tensors(recording: Recording, path: Path) -> None:
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name, label, series in _series(recording):
        parts = [_part(series.of(key.stage, key.loader)) for key in series.keys]
        runs.setdefault(name, {})[label] = parts
    with path.open("wb") as file:  # raises OSError; given a path, torch.save would raise other errors
        torch.save({"format": _FORMAT, "runs": runs}, file)


def _part(series: Series) -> dict[str, Any]:
    values = [series.values(name) for name in series.statistics]
    shape = len(series.steps), len(series), 0
    return {
        "stage": series.stage,
        "loader": series.loader,
        "steps": torch.tensor(series.steps, dtype=torch.int64, device="cpu"),
        "epochs": torch.tensor(series.epochs, dtype=torch.int64, device="cpu"),
        "sites": [list(site) for site in series.sites],
        "dtypes": [series[site].dtype for site in series.sites],
        "statistics": series.statistics,
        "values": torch.stack(values, dim=-1) if values else torch.zeros(shape, dtype=torch.float64, device="cpu"),
    }
