"""``submit``: write a run as a small file for a bug report, without data, weights or secrets."""

from __future__ import annotations

import json
import zipfile
from argparse import Namespace
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from lightning_recorder.commands.terminal import printable
from lightning_recorder.disk import readable_size
from lightning_recorder.errors import ArgumentError
from lightning_recorder.insight.exchange import next_without_samples, verdict_without_samples
from lightning_recorder.privacy import LEFT_OUT, hide_places, hide_secrets
from lightning_recorder.recordings import Run, open_recording
from lightning_recorder.records.file import RECORDER, RECORDS, is_inside
from lightning_recorder.temporary import write_whole
from lightning_recorder.untrusted import read_json
from lightning_recorder.version import __version__

__all__ = ["run"]

_PACKED = ("values", "packed", "bins", "vectors", "sites")  # the fields of a record that contain its numbers
_FILES = ("graph.json", "receipt.json", "findings.json", "data.json", "incidents/*/finding.json")
_CONTENTS = f"""\
A run, reduced by lightning_recorder {__version__}. `lightning-recorder doctor FOLDER` and `view FOLDER` read it after
unpacking.

It contains statistics and histograms of the tensors, names and classes of modules, names of logged metrics, shapes,
arguments of functions, names of code files with line numbers, and settings that are numbers. The statistics of a tensor
with a single value are this value. It contains no tensors, weights or samples, no texts from hyperparameters, no
messages of errors, no folders and addresses, and no checksums of batches.
"""


def run(arguments: Namespace, out: TextIO) -> int:
    """Write the file and print its path and contents."""
    runs = {name: each for name, each in open_recording(arguments.path).runs.items() if each.has_records}
    if len(runs) != 1:
        found = f"has {len(runs)} runs: {', '.join(map(printable, runs))}" if runs else "has no records"
        raise ArgumentError(f"{arguments.path!r} {found}. Name the log_dir of one run")
    (each,) = runs.values()
    path = Path(arguments.output or f"{each.log_dir.absolute().name}.zip")
    if path.suffix.lower() != ".zip":
        raise ArgumentError(f"OUTPUT must end in .zip, got {path.name!r}")
    if path.exists():
        raise ArgumentError(f"{str(path)!r} exists. Name another file with --output")
    texts = {"README.txt": _CONTENTS, **{f"{RECORDER}/{name}": text for name, text in _texts(each)}}
    write_whole(path, partial(_write, texts))
    out.write(f"{printable(str(path), None)}: {readable_size(path.stat().st_size)}\n")
    out.write("".join(f"  {printable(name)}\n" for name in texts))
    return 0


def _write(texts: Mapping[str, str], file: BinaryIO) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in texts.items():
            archive.writestr(name, text)


def _texts(each: Run) -> Iterator[tuple[str, str]]:
    """Yield the names and the texts of the submitted files of a run."""
    for pattern in (f"{RECORDS}/*.jsonl", *_FILES):
        for path in sorted(each.directory.glob(pattern)):
            if is_inside(path, each.log_dir):
                is_records = path.suffix == ".jsonl"
                text = "".join(_lines(path)) if is_records else json.dumps(_reduced(read_json(path)), indent=1) + "\n"
                yield path.relative_to(each.directory).as_posix(), text


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a record file. Invalid JSON, such as the last line of a killed run, is left out.

    The checksums of batches are replaced by numbers. Equal checksums get equal numbers, so that repeated batches can
    still be recognized.
    """
    numbers = count()
    known: dict[str, int] = {}
    with path.open("rb") as file:
        for line in file:
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if not isinstance(found, dict):
                continue
            if found.get("batch") is not None:
                key = json.dumps(found["batch"])
                number = known.get(key)
                if number is None:
                    number = known[key] = next(numbers)
                found["batch"] = [number, number]
            yield json.dumps(_reduced(found), separators=(",", ":")) + "\n"


def _reduced(value: Any, name: str = "") -> Any:
    """Remove secrets, folders, addresses, messages, samples, and hyperparameters that are strings, from data."""
    if isinstance(value, dict):
        if "rule" in value and "next" in value and isinstance(value.get("numbers"), dict):
            value = {**value, "next": next_without_samples(value["rule"], value["next"], value["numbers"])}
            if isinstance(value.get("verdict"), str):
                value["verdict"] = verdict_without_samples(value["verdict"])
        return {
            hide_places(key): each if key in _PACKED else _reduced(each, f"{name}.{key}") for key, each in value.items()
        }
    if isinstance(value, list):
        return [_reduced(each, name) for each in value]
    if isinstance(value, str):
        return LEFT_OUT if ".hparams" in name else hide_places(hide_secrets(value, name))
    return hide_secrets(value, name)
