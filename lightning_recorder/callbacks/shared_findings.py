"""The findings of a trainer's run, which all its recorders share."""

from __future__ import annotations

import weakref
from functools import partial
from pathlib import Path
from typing import Any

from lightning_recorder.callbacks.graph import GraphRecorder
from lightning_recorder.callbacks.lightning import LightningModule, Trainer, rank_zero_info
from lightning_recorder.graph.model import Graph
from lightning_recorder.internals.module_tree import class_name, named_modules_of
from lightning_recorder.outputs import RunFindings
from lightning_recorder.sinks import Sink

__all__ = ["end_findings", "findings_of"]

_findings: weakref.WeakKeyDictionary[Trainer, RunFindings] = weakref.WeakKeyDictionary()


def findings_of(
    trainer: Trainer, pl_module: LightningModule, directory: Path | None, label: str, *, strict: bool
) -> RunFindings:
    """Return the findings of the trainer's fit. The first recorder of the fit creates them."""
    found = _findings.get(trainer)
    if found is None or label in found:  # the label is present if an earlier fit did not end
        found = _findings[trainer] = RunFindings(
            directory,
            log=rank_zero_info,
            types={name: class_name(type(module)) for name, module in named_modules_of(pl_module)},
            graph=partial(_graph, weakref.ref(trainer)),  # the trainer must not be kept alive by its own entry
            strict=strict,
        )
    return found


def end_findings(findings: RunFindings, label: str, sink: Sink | None, why: str = "") -> None:
    """End the records of a recorder. Drop the findings once they are complete, because the next fit has new ones."""
    if findings.end(label, sink, why):
        for trainer in [each for each, found in _findings.items() if found is findings]:
            del _findings[trainer]


def _graph(reference: weakref.ref[Trainer]) -> Graph | None:
    trainer: Any = reference()
    recorders = [each for each in getattr(trainer, "callbacks", ()) if isinstance(each, GraphRecorder)]
    return next((each.graph for each in recorders if each.name == "graph"), None)
