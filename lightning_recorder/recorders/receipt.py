"""Which of the selected modules were recorded, why the others were not, and what it costs."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from lightning_recorder.names import named_submodules
from lightning_recorder.taps import Site
from lightning_recorder.taps.parameter import own_parameters

__all__ = ["RECEIPT", "Receipt", "Watched", "with_gradients"]

RECEIPT = "receipt.json"

_LOCK = threading.Lock()
_FEW = 3


@dataclass(frozen=True)
class Watched:
    """What is known of the selected modules after a recorded step.

    Args:
        root: The model.
        modules: The selected modules by name.
        fired: The names of those of which something was recorded.
        called: The names of those that were called, as far as hooks tell.
        failed: The names of those whose recording failed.
        skipped: The names of those that were left out since they are compiled.
        without_gradient: The names of those whose outputs need no gradient.
        trained: The names of those whose own parameters have a gradient.
        of: What is recorded: ``"activations"``, ``"gradients"`` or ``"parameters"``.
        state_bytes: Bytes of state on the devices.
    """

    root: nn.Module
    modules: Mapping[str, nn.Module]
    fired: Collection[str]
    called: Collection[str] = ()
    failed: Collection[str] = ()
    skipped: Collection[str] = ()
    without_gradient: Collection[str] = ()
    trained: Collection[str] = ()
    of: str = "activations"
    state_bytes: int = 0

    def having(self, **known: Any) -> Watched:
        """The same with what else is known."""
        return replace(self, **known)

    def why_not(self) -> dict[str, str]:
        """By name why nothing was recorded of a module, of those of which nothing was."""
        parents = _parents(self.root)
        missing = [name for name in (*self.modules, *self.skipped) if name not in self.fired]
        return {name: self._why(name, parents.get(name)) for name in missing}

    def _why(self, name: str, parent: nn.Module | None) -> str:
        if name in self.skipped:
            return "compiled: skipped, as compiled='skip' says"
        if name in self.failed:
            return "failed: a warning says how"
        if self.of == "parameters":
            return self._why_no_parameter(name)
        if name in self.called:
            if self.of == "activations":
                return "unsupported output: no tensor was found in what it returned"
            if name in self.without_gradient:
                return "no gradient: what it returned needs none"
            return "no gradient: what it returned took no part in the loss, or is no tensor"
        if isinstance(parent, nn.MultiheadAttention):
            return "bypassed: nn.MultiheadAttention uses its parameters without calling it"
        if isinstance(parent, (nn.TransformerEncoder, nn.TransformerEncoderLayer)) and not parent.training:
            return f"bypassed: nn.{type(parent).__name__} took its fused path"
        if name in self.trained:
            return "bypassed: its parameters have a gradient, so .forward() or a function used them without a call"
        return "never called: no call of it in the recorded step"

    def _why_no_parameter(self, name: str) -> str:
        parameters = [parameter for _, parameter in own_parameters(self.modules[name])]
        if not parameters:
            return "no parameters of its own"
        if not any(parameter.requires_grad for parameter in parameters):
            return "frozen: no parameter of its own requires a gradient"
        return (
            "no step: no optimiser that stepped has its parameters, or another module that shares them has the record"
        )


@dataclass(frozen=True)
class Receipt:
    """What recording has brought and costs, as of the first recorded step.

    Args:
        step: That step.
        sites: By module name the paths that were recorded.
        missing: By module name why nothing was recorded.
        state_bytes: Bytes of state on the devices, of one rank.
        every_n_train_steps: The cadence.
        records_per_1000_steps: How many records there are in a thousand steps at this cadence.
        recording_ms: Milliseconds that the training thread has spent in hooks of the step.
        flush_ms: Milliseconds that it has spent in copying, merging and handing over the results.
        event_bytes_per_1000_steps: Bytes that they take in the event files of TensorBoard, or the files of this
            package, pictures included: by the size of the first record, and in the file later by the mean size of ten
            and of all; ``None`` before there is one, and where nothing is written that can be counted.
        merged_ranks: Of how many processes the record is.
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

    @property
    def summary(self) -> str:
        """One line."""
        total = len(self.sites) + len(self.missing)
        size = self.event_bytes_per_1000_steps
        files = "" if size is None else f", {_bytes(size)} of files per 1,000 steps"
        ranks = f" by {self.merged_ranks} ranks" if self.merged_ranks > 1 else ""
        costs = f"{_bytes(self.state_bytes)} of state, {self.recording_ms + self.flush_ms:.1f} ms in step {self.step}"
        return f"{len(self.sites)} of {total} modules recorded{ranks}{self._missing()}; {costs}{files}"

    def _missing(self) -> str:
        if not self.missing:
            return ""
        few = [f"{name or '(root)'} ({why.partition(':')[0]})" for name, why in list(self.missing.items())[:_FEW]]
        more = len(self.missing) - len(few)
        return f", not {', '.join(few)}" + (f" and {more} more" if more else "")

    @property
    def markdown(self) -> str:
        """The same with all modules, as loggers show text."""
        rows = [f"| {_cell(name)} | {', '.join(map(_cell, paths))} |" for name, paths in self.sites.items()]
        rows += [f"| {_cell(name)} | {why} |" for name, why in self.missing.items()]
        text = "\n".join([f"{self.summary}.", "", "| module | recorded |", "|---|---|", *rows])
        return text.encode("utf-8", "replace").decode("utf-8")  # half of a surrogate pair is no text

    def to_json(self) -> dict[str, Any]:
        """As plain data, each module with whether it fired."""
        about = asdict(self)
        about["modules"] = {
            **{name: {"fired": True, "sites": paths} for name, paths in about.pop("sites").items()},
            **{name: {"fired": False, "why": why} for name, why in about.pop("missing").items()},
        }
        return about

    def write(self, directory: Path, label: str) -> None:
        """Put it into the folder's ``receipt.json``, under a label of its own, beside those of others.

        Raises:
            OSError: If the folder cannot be written.
        """
        with _LOCK:
            path = directory / RECEIPT
            try:
                others = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                others = {}
            directory.mkdir(parents=True, exist_ok=True)
            written = path.with_suffix(".tmp")
            written.write_text(json.dumps({**others, label: self.to_json()}, indent=1) + "\n", encoding="utf-8")
            written.replace(path)


def with_gradients(modules: Mapping[str, nn.Module]) -> set[str]:
    """The names of the modules of whose own parameters one has a gradient."""
    return {
        name
        for name, module in modules.items()
        if any(parameter.grad is not None for _, parameter in own_parameters(module))
    }


def paths_by_module(sites: Iterable[Site]) -> dict[str, list[str]]:
    """The paths of each module's sites."""
    found: dict[str, list[str]] = {}
    for name, path in sites:
        found.setdefault(name, []).append(path)
    return found


def _parents(root: nn.Module) -> dict[str, nn.Module]:
    """By its name the module that each module is registered in."""
    named = named_submodules(root)
    return {name: named[name.rpartition(".")[0]] for name in named if name and name.rpartition(".")[0] in named}


def _cell(text: str) -> str:
    """A name from the model as the text of a table's cell."""
    return "`" + (text or "(root)").replace("`", "'").replace("|", "¦").replace("\n", " ") + "`"


def _bytes(number: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} bytes"
