"""Records made by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from lightning_recorder.graph.model import Edge, Graph, Node
from lightning_recorder.insight import STATISTICS, Diagnosis, Finding, Gap, RunFacts, RunHistory, examine
from lightning_recorder.insight.data_facts import DataFacts
from lightning_recorder.insight.evidence import Evidence
from lightning_recorder.insight.examine import evidence_of
from lightning_recorder.records.table import Schema, Table
from lightning_recorder.reductions import Histogram
from lightning_recorder.taps import Site

Values = Mapping[str, float | Sequence[float]]
"""Statistics, each with one value for all records or one for each."""


class Examination:
    """A history with the graph and the coverage of its run."""

    def __init__(self, graph: Graph | None = None, coverage: Mapping[str, Any] | None = None) -> None:
        self.history, self.graph, self.facts = RunHistory(), graph, RunFacts(coverage or {})
        self.add = self.history.add

    def set_data(self, data: DataFacts | None) -> None:
        self.facts = replace(self.facts, data=data)

    def diagnosis(self) -> Diagnosis:
        return examine(self.history, self.graph, self.facts)

    def findings(self) -> list[Finding]:
        return self.diagnosis().findings

    def gaps(self) -> tuple[Gap, ...]:
        return self.diagnosis().gaps

    def evidence(self) -> Evidence:
        return evidence_of(self.history, self.graph, self.facts)


_DEFAULTS = {"count": 256.0, "mean": 0.0, "zero_fraction": 0.0, "nan_count": 0.0, "inf_count": 0.0}


def chain(*names: str, **types: str) -> Graph:
    """Return the graph of modules that follow each other; ``fc=Linear`` is the class of a module."""
    nodes = [Node(0, "module", "", None, 0, "Net"), Node(1, "input", "input", 0, 1)]
    edges = []
    for number, name in enumerate(names, 1):
        kind = types.get(name.rpartition(".")[2], "Linear")
        nodes += [Node(2 * number, "module", name, 0, 1, kind), Node(2 * number + 1, "op", "f", 2 * number, 2)]
        edges.append(Edge(2 * number - 1, 2 * number + 1))
    return Graph(tuple(nodes), tuple(edges))


def record(
    group: str,
    step: int,
    sites: Mapping[tuple[str, str], Mapping[str, float]],
    *,
    stage: str = "train",
    shapes: Mapping[tuple[str, str], tuple[int, ...]] | None = None,
    dtype: str = "float32",
    histograms: Mapping[tuple[str, str], Histogram] | None = None,
    recorder: str | None = None,
    about: Mapping[str, object] | None = None,
) -> Table:
    """Return one record; a rms without other statistics stands for values around zero."""
    rows = []
    for given in sites.values():
        rms = given.get("rms", 1.0)
        found = {**_DEFAULTS, "rms": rms, "std": rms, "min": -2 * rms, "max": 2 * rms, **given}
        rows.append([found.get(name, math.nan) for name in STATISTICS])
    places = tuple((shapes or {}).get(site, (16, 16)) for site in sites)
    schema = Schema(tuple(Site(*site) for site in sites), STATISTICS, (dtype,) * len(sites), places)
    return Table(
        schema,
        np.array(rows, dtype=np.float64).reshape(len(sites), len(STATISTICS)),
        histogram=lambda site: (histograms or {}).get((site.name, site.path)),
        about={"group": group, "recorder": recorder or group, "stage": stage, "step": step, **(about or {})},
    )


def examined(
    activations: Mapping[str, Values] | None = None,
    gradients: Mapping[str, Values] | None = None,
    parameters: Mapping[str, Values] | None = None,
    *,
    validation: Mapping[str, Values] | None = None,
    inputs: Mapping[str, Values] | None = None,
    targets: Mapping[str, Values] | None = None,
    predictions: Mapping[str, Values] | None = None,
    records: int = 8,
    every: int = 10,
    graph: Graph | None = None,
    coverage: Mapping[str, object] | None = None,
    shapes: Mapping[tuple[str, str], tuple[int, ...]] | None = None,
    dtype: str = "float32",
    histograms: Mapping[tuple[str, str], Histogram] | None = None,
    about: Mapping[str, object] | None = None,
) -> Examination:
    """Return the examination of a run given by the statistics of each module; a parameter is ``"fc/weight"``.

    ``inputs`` are the first inputs of the modules, and ``targets`` and ``predictions`` those of losses.
    """
    examination = Examination(graph, coverage)
    outputs = {(name, "out"): each for name, each in (activations or {}).items()}
    outputs |= {(name, "in.target"): each for name, each in (targets or {}).items()}
    outputs |= {(name, "in.prediction"): each for name, each in (predictions or {}).items()}
    groups = (
        ("activations", "train", {(name, "in[0]"): each for name, each in (inputs or {}).items()} | outputs),
        ("gradients", "train", {(name, "out"): each for name, each in (gradients or {}).items()}),
        ("parameters", "train", {_parameter(name): each for name, each in (parameters or {}).items()}),
        ("activations", "validate", {(name, "out"): each for name, each in (validation or {}).items()}),
    )
    for group, stage, sites in groups:
        for row in range(records if sites else 0):
            values = {site: {name: _at(value, row) for name, value in each.items()} for site, each in sites.items()}
            options = {"shapes": shapes, "dtype": dtype, "histograms": histograms, "about": about}
            examination.add(record(group, row * every, values, stage=stage, **options))  # type: ignore[arg-type]  # mixed
    return examination


_OF_HEAD = {
    "max_logit": 3.0,
    "logit_std": 1.0,
    "entropy": 2.0,
    "entropy_ratio": 0.8,
    "least_ratio": 0.6,
    "most_ratio": 0.95,
    "first_key": 0.1,
    "top_key": 0.2,
    "distance": 4.0,
    "future": 0.0,
    "keys": 16.0,
    "visible": 0.5,
    "masked": 1.0,
    "blind": 0.0,
    "value_rms": 1.0,
    "alike": 0.5,
    "padding": float("nan"),
    "own": 1.0,
}
_OF_EXPERT = {"load": 0.25, "probability": 0.25, "entropy": 1.3, "margin": 0.02, "chosen": 2.0, "tokens": 400.0}


def parts(
    layers: Mapping[str, Sequence[Values]],
    *,
    kind: str = "attention",
    records: int = 8,
    every: int = 10,
    graph: Graph | None = None,
) -> Examination:
    """Return the examination of a run given by the statistics of the heads, or of the experts, of each layer.

    Args:
        layers: The statistics of each head by the name of its layer; healthy where they are not given.
        kind: ``"attention"`` or ``"router"``.
        records: The number of records.
        every: The number of steps between two records.
        graph: The graph.
    """
    examination = Examination(graph)
    usual = _OF_HEAD if kind == "attention" else _OF_EXPERT
    for row in range(records):
        table = record("activations", row * every, {(name, "in.scores"): {} for name in layers})
        tensors = {
            Site(name, "in.scores"): {
                f"{kind}_{statistic}": torch.tensor(
                    [_at(each.get(statistic, value), row) for each in given], dtype=torch.float64
                )
                for statistic, value in usual.items()
            }
            for name, given in layers.items()
        }
        examination.add(table.having(tensors=tensors))
    return examination


def run(*args: Any, **kwargs: Any) -> list[Finding]:
    """Return the findings of a run; see :func:`examined` for the arguments."""
    return examined(*args, **kwargs).findings()


def _parameter(name: str) -> tuple[str, str]:
    module, _, path = name.partition("/")
    return module, path


def _at(value: float | Sequence[float], row: int) -> float:
    return float(value) if isinstance(value, (int, float)) else float(value[row])


def trained(name: str, **values: float | Sequence[float]) -> dict[str, Values]:
    """Return the sites of a weight that is trained normally; ``rms``, ``grad``, ``update`` and ``ratio`` are given."""
    rms, update = values.get("rms", 0.25), values.get("update", 2.5e-4)
    ratio = values.get("ratio", 1e-3)
    return {
        f"{name}/weight": {"rms": rms, "update_ratio": ratio},
        f"{name}/weight.grad": {"rms": values.get("grad", 1e-3)},
        f"{name}/weight.update": {"rms": update},
    }


def brief(findings: list[Finding]) -> list[tuple[str, str, str]]:
    """Return severity, rule and module of each finding."""
    return [(each.severity, each.rule, each.module) for each in findings]


def network(*names: str, **changed: dict[str, Values]) -> dict[str, Values]:
    """Return the parameters of healthy layers, some of them replaced."""
    return {key: value for name in names for key, value in changed.get(name, trained(name)).items()}
