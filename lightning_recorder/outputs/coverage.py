"""The receipt of a run: the recorded modules, the reasons for missing ones, and the costs."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.loss import _Loss

from lightning_recorder.disk import attempt
from lightning_recorder.names import named_submodules, own_parameters
from lightning_recorder.taps import Site
from lightning_recorder.temporary import write_whole

__all__ = ["RECEIPT", "Change", "Coverage", "CoverageReport", "listed", "with_gradients", "write_receipt"]

RECEIPT = "receipt.json"

_LOCK = threading.Lock()
_FEW = 3

# The reasons for a missing record, the most important ones first.
_REASONS = (
    "failed",
    "bypassed",
    "no gradient",
    "changed in place",
    "unsupported output",
    "compiled",
    "frozen",
    "no step",
    "shared",
    "never called",
)


@dataclass(frozen=True)
class Coverage:
    """The facts about the selected modules after a recorded step.

    Args:
        root: The model.
        modules: The selected modules by name.
        fired: The names of the modules that were recorded.
        called: The names of the modules that were called, as observed by hooks.
        failed: The names of the modules whose recording failed.
        skipped: The names of the modules that were skipped because they are compiled.
        without_gradient: The names of the modules whose outputs require no gradient.
        changed_in_place: The names of the modules with an unknown output gradient because the output was changed in
            place.
        trained: The names of the modules that own a parameter with a gradient.
        of: The kind of tensors: ``"activations"``, ``"gradients"`` or ``"parameters"``.
        parts: The recorded parts of parameters, such as ``"gradients"``.
        is_default: True if the modules were selected by default. Loss modules that are never called are then not listed
            as missing.
        state_bytes: The size of the states on the devices, in bytes.
        ran_eagerly: The names of the compiled functions that ran eagerly because they were recorded.
        compiled_calls: The names of the compiled functions that ran while the hooks were registered.
    """

    root: nn.Module
    modules: Mapping[str, nn.Module]
    fired: Collection[str]
    called: Collection[str] = ()
    failed: Collection[str] = ()
    skipped: Collection[str] = ()
    without_gradient: Collection[str] = ()
    changed_in_place: Collection[str] = ()
    trained: Collection[str] = ()
    of: str = "activations"
    parts: Collection[str] = ()
    is_default: bool = False
    state_bytes: int = 0
    ran_eagerly: Collection[str] = ()
    compiled_calls: Collection[str] = ()

    def having(self, **known: Any) -> Coverage:
        """Return a copy with additional facts."""
        return replace(self, **known)

    def why_not(self) -> dict[str, str]:
        """Return the reason for each module without a record, the most important reasons first."""
        parents = _parents(self.root)
        missing = [name for name in (*self.modules, *self.skipped) if name not in self.fired]
        if self.of == "parameters":
            missing = [name for name in missing if name in self.skipped or any(own_parameters(self.modules[name]))]
        why = {name: self._why(name, parents.get(name)) for name in missing if not self._is_idle_loss(name)}
        return dict(sorted(why.items(), key=lambda item: self._importance(*item)))

    def _importance(self, name: str, why: str) -> tuple[int, bool]:
        """Return a sort key: by reason, with modules without parameters, such as ``Identity``, last."""
        reason = why.partition(":")[0]
        owns = any(True for _ in own_parameters(self.modules[name])) if name in self.modules else True
        return _REASONS.index(reason) if reason in _REASONS else 0, not owns

    def _is_idle_loss(self, name: str) -> bool:
        """Return True if the module is a loss that was selected by default and is never called."""
        module = self.modules.get(name)
        attribute = name.rpartition(".")[2].lower()
        named_loss = type(module).__name__.endswith("Loss") or attribute.startswith(("loss", "criterion"))
        is_loss = isinstance(module, _Loss) or named_loss or attribute.endswith("_loss")
        return self.is_default and name not in self.called and is_loss and not list(own_parameters(self.modules[name]))

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
            if name in self.changed_in_place:
                return "changed in place: its output is a view that was changed after the module returned it"
            return "no gradient: what it returned took no part in the loss, or is no tensor"
        if isinstance(parent, nn.MultiheadAttention):
            return "bypassed: nn.MultiheadAttention uses its parameters without calling it"
        if isinstance(parent, (nn.TransformerEncoder, nn.TransformerEncoderLayer)) and not parent.training:
            return f"bypassed: nn.{type(parent).__name__} took its fused path"
        if self.compiled_calls:
            names = ", ".join(sorted(self.compiled_calls)[:_FEW])
            return f"compiled: no call of it outside of compiled code ({names}), which compiled='skip' keeps in use"
        if name in self.trained:
            sharing = self._sharing(name)
            if sharing:
                return f"shared: never called, its parameters are those of {sharing}"
            return "bypassed: its parameters have a gradient, so .forward() or a function used them without a call"
        if name in self.modules and type(self.modules[name]).__call__ is not nn.Module.__call__:
            return f"bypassed: {type(self.modules[name]).__name__} overrides __call__, so its hooks are not called"
        return "never called: no recorded step called it"

    def _sharing(self, name: str) -> str:
        """Return the first other module that shares parameters with this one, if others explain all gradients."""
        own = {id(each) for _, each in own_parameters(self.modules[name]) if each.requires_grad}
        found = ""
        # A selected module that was not called explains no gradients. Nothing is known about modules that are not
        # selected.
        idle = self.modules.keys() - {*self.called, *self.fired}
        for other, module in named_submodules(self.root).items():
            if module is self.modules[name] or other in idle:
                continue
            shared = own.intersection(id(each) for _, each in own_parameters(module))
            own -= shared
            found = found or (other if shared else "")
        return "" if own else found

    def why_stopped(self, name: str) -> str:
        """Return the reason why a previously recorded module was missing from the latest records."""
        if name not in self.called:
            return "not called any more"
        if self.of == "activations":
            return "no tensor is found any more in what it returns"
        if name not in self.without_gradient:
            return "what it returns takes no part in the loss any more"
        own = [each for _, each in own_parameters(self.modules[name])]
        frozen = own and not any(each.requires_grad for each in own)
        return "what it returns needs no gradient any more" + (", its parameters are frozen" if frozen else "")

    def why_no_gradient(self, name: str, path: str) -> str:
        """Return the reason why a parameter that had a gradient before has none now."""
        parameter = dict(own_parameters(self.modules[name])).get(path)
        if parameter is None:
            return "it is no parameter of the module any more"
        return "no backward pass reaches it any more" if parameter.requires_grad else "frozen, requires_grad is False"

    def without_gradients(self, sites: Collection[Site]) -> list[str]:
        """Return the names of the recorded parameters that had no gradient in any recorded step."""
        if "gradients" not in self.parts:
            return []
        return [
            f"{name}.{path}" if name else path
            for name, module in self.modules.items()
            for path, parameter in own_parameters(module)
            if parameter.requires_grad
            and Site(name, f"{path}.grad") not in sites
            and {Site(name, path), Site(name, f"{path}.update")}.intersection(sites)
        ]

    def _why_no_parameter(self, name: str) -> str:
        parameters = [parameter for _, parameter in own_parameters(self.modules[name])]
        if not any(parameter.requires_grad for parameter in parameters):
            return "frozen: no parameter of its own requires a gradient"
        theirs = {id(parameter) for parameter in parameters}
        for other in self.fired:
            if other in self.modules and theirs <= {id(each) for _, each in own_parameters(self.modules[other])}:
                return f"shared: its parameters are recorded as those of {other or '(root)'}"
        if not {"values", "updates"}.intersection(self.parts) and name not in self.trained:
            return "no gradient: none of its parameters had one"
        return (
            "no step: no optimiser that stepped has its parameters, or another module that shares them has the record"
        )


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
        about = asdict(self)
        steps = about.pop("steps")
        about["modules"] = {
            **{
                name: {
                    "fired": True,
                    "sites": paths,
                    **dict(zip(("first_step", "last_step"), steps.get(name, ()), strict=False)),
                }
                for name, paths in about.pop("sites").items()
            },
            **{name: {"fired": False, "why": why} for name, why in about.pop("missing").items()},
        }
        return about

    def write(self, directory: Path, label: str) -> None:
        """Write the receipt under its label to the folder's ``receipt.json``. Entries of other labels stay.

        Raises:
            OSError: If the folder cannot be written.
        """
        write_receipt(directory, label, self.to_json())


def write_receipt(directory: Path, label: str, about: Mapping[str, Any]) -> None:
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
        text = json.dumps({**others, label: about}, indent=1) + "\n"
        attempt(path, len(text), partial(_write, path, text))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda file: file.write(text.encode()))


def with_gradients(modules: Mapping[str, nn.Module]) -> set[str]:
    """Return the names of the modules that own a parameter with a gradient."""
    return {
        name
        for name, module in modules.items()
        if any(parameter.grad is not None for _, parameter in own_parameters(module))
    }


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


def _parents(root: nn.Module) -> dict[str, nn.Module]:
    """Return the parent module of each module by name."""
    named = named_submodules(root)
    return {name: named[name.rpartition(".")[0]] for name in named if name and name.rpartition(".")[0] in named}


def _cell(text: str) -> str:
    """Return a module name as the text of a table cell."""
    return "`" + (text or "(root)").replace("`", "'").replace("|", "¦").replace("\n", " ") + "`"


def _bytes(number: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} bytes"
