"""The receipt of a run: the recorded and the missing modules, the changes during the run, and the costs."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from lightning_recorder.disk import attempt
from lightning_recorder.taps import Site
from lightning_recorder.temporary import write_whole

__all__ = ["RECEIPT", "Change", "CoverageReport", "listed", "paths_by_module", "write_receipt"]

RECEIPT = "receipt.json"

_LOCK = threading.Lock()
_FEW = 3  # names in a summary


@dataclass(frozen=True)
class Change:
    """A change in the set of recorded modules or parameters, reported once.

    Args:
        step: The recorded step at which the change was noticed.
        kind: ``"stopped"`` or ``"started"``.
        names: The modules or parameters.
        why: The reason.
        text: The change as a sentence.
    """

    step: int
    kind: str
    names: tuple[str, ...]
    why: str
    text: str


@dataclass(frozen=True)
class CoverageReport:
    """A summary of the recorded modules of a run so far, and of the costs of recording.

    Args:
        step: The first recorded step.
        sites: The recorded paths by module name.
        missing: The reasons for missing records by module name, the most important reasons first.
        state_bytes: The size of the states on the devices of one rank, in bytes.
        every_n_train_steps: The recording interval, in steps.
        records_per_1000_steps: The number of records in 1000 steps at this interval.
        recording_ms: The time that the training thread spent in the hooks of the first step, in milliseconds.
        flush_ms: The time that it spent on copying, merging and handing over the results, in milliseconds.
        event_bytes_per_1000_steps: The bytes by which the files of this package grow: the TensorBoard event file, the
            records, the CSV file and the images, but not the dumps. The estimate is based on the size of the first
            record; in the file, it is updated with the mean size after ten records and at the end. ``None`` before the
            first record, and if no sink counts its bytes.
        merged_ranks: The number of processes merged in the record.
        last_step: The last recorded step.
        steps: The first and the last recorded step by module name.
        without_gradient: The parameters that had no gradient in any recorded step.
        changes: The changes since the first recorded step.
        ran_eagerly: The names of the compiled functions that ran eagerly in recorded steps.
    """

    step: int
    sites: Mapping[str, list[str]]
    missing: Mapping[str, str]
    state_bytes: int
    every_n_train_steps: int
    records_per_1000_steps: int
    recording_ms: float = 0.0
    flush_ms: float = 0.0
    event_bytes_per_1000_steps: int | None = None
    merged_ranks: int = 1
    last_step: int = 0
    steps: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    without_gradient: Sequence[str] = ()
    changes: Sequence[Change] = ()
    ran_eagerly: Collection[str] = ()

    @property
    def summary(self) -> str:
        """The receipt as one line."""
        total = len(self.sites) + len(self.missing)
        size = self.event_bytes_per_1000_steps
        files = "" if size is None else f", {_bytes(size)} of files per 1,000 steps"
        ranks = f" by {self.merged_ranks} ranks" if self.merged_ranks > 1 else ""
        costs = f"{_bytes(self.state_bytes)} of state, {self.recording_ms + self.flush_ms:.1f} ms in step {self.step}"
        return f"{len(self.sites)} of {total} modules recorded{ranks}{self._missing()}; {costs}{files}"

    def _missing(self) -> str:
        gradients = f", without a gradient: {_first(self.without_gradient)}" if self.without_gradient else ""
        if not self.missing:
            return gradients
        return f"{gradients}, not " + _first(
            [f"{name or '(root)'} ({why.partition(':')[0]})" for name, why in self.missing.items()]
        )

    @property
    def markdown(self) -> str:
        """The receipt as Markdown with all modules, as loggers show text."""
        rows = [
            f"| {_cell(name)} | {', '.join(map(_cell, paths))} | {self._span(name)} |"
            for name, paths in self.sites.items()
        ]
        rows += [f"| {_cell(name)} | {why} | |" for name, why in self.missing.items()]
        changes = [line for change in self.changes for line in ("", f"Step {change.step}: {change.text}.")]
        if len(self.without_gradient) > _FEW:
            changes += ["", f"Without a gradient: {', '.join(map(_cell, self.without_gradient))}."]
        if self.ran_eagerly:
            changes += ["", f"Ran eagerly instead of compiled: {', '.join(map(_cell, self.ran_eagerly))}."]
        text = "\n".join([f"{self.summary}.", *changes, "", "| module | recorded | steps |", "|---|---|---|", *rows])
        return text.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate cannot be encoded

    def _span(self, name: str) -> str:
        first, last = self.steps.get(name, (self.step, self.step))
        return f"{first}" if first == last else f"{first} to {last}"

    def to_json(self) -> dict[str, Any]:
        """Return plain data in which each module has a ``fired`` flag and its first and last recorded step."""
        data = asdict(self)
        steps = data.pop("steps")
        data["modules"] = {
            **{
                name: {
                    "fired": True,
                    "sites": paths,
                    **dict(zip(("first_step", "last_step"), steps.get(name, ()), strict=False)),
                }
                for name, paths in data.pop("sites").items()
            },
            **{name: {"fired": False, "why": why} for name, why in data.pop("missing").items()},
        }
        return data

    def write(self, directory: Path, label: str) -> None:
        """Write the receipt under its label to the folder's ``receipt.json``. Entries of other labels stay.

        Raises:
            OSError: If the folder cannot be written.
        """
        write_receipt(directory, label, self.to_json())


def write_receipt(directory: Path, label: str, entry: Mapping[str, Any]) -> None:
    """Write an entry under its label to the folder's ``receipt.json``. Entries of other labels stay.

    Raises:
        OSError: If the folder cannot be written.
    """
    with _LOCK:
        path = directory / RECEIPT
        try:
            others = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            others = {}
        text = json.dumps({**others, label: entry}, indent=1) + "\n"
        attempt(path, len(text), partial(_write, path, text))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda file: file.write(text.encode()))


def paths_by_module(sites: Iterable[Site]) -> dict[str, list[str]]:
    """Return the paths of the sites by module name."""
    found: dict[str, list[str]] = {}
    for name, path in sites:
        found.setdefault(name, []).append(path)
    return found


def listed(names: Sequence[str], noun: str) -> str:
    """List a few modules or parameters by name, or the number of many that share a parent module.

    Example:
        >>> listed(["decoder.0", "decoder.1"], "modules")
        'decoder.0 and decoder.1'
        >>> listed([f"decoder.{number}.fc" for number in range(12)], "modules")
        '12 modules of decoder.*'
        >>> listed(["a.0", "a.1", "b.0", "b.1"], "modules")
        'a.0, a.1, b.0 and 1 more'
    """
    if len(names) > _FEW:
        parts = [name.split(".") for name in names]
        common = ".".join(each[0] for each in takewhile(lambda each: len(set(each)) == 1, zip(*parts, strict=False)))
        if common:
            return f"{len(names)} {noun} of {common}.*"
        return _first(names)
    named = [name or "(root)" for name in names]
    return " and ".join(filter(None, [", ".join(named[:-1]), named[-1]]))


def _first(texts: Sequence[str]) -> str:
    more = len(texts) - _FEW
    return ", ".join(texts[:_FEW]) + (f" and {more} more" if more > 0 else "")


def _cell(text: str) -> str:
    """Return a module name as the text of a table cell."""
    return "`" + (text or "(root)").replace("`", "'").replace("|", "¦").replace("\n", " ") + "`"


def _bytes(number: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} bytes"
