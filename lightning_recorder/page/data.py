"""The data of the page, as described by ``schema.json``, from the recordings of runs."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.errors import ArgumentError
from lightning_recorder.functions import function_sites
from lightning_recorder.graph.model import Graph, Node
from lightning_recorder.graph.renderers.details import source_link
from lightning_recorder.graph.unused import joined_names
from lightning_recorder.graph.views.fit import view_at_depth
from lightning_recorder.graph.views.forms import forms
from lightning_recorder.graph.views.wiring import MutableGraph
from lightning_recorder.insight import RULES, Diagnosis
from lightning_recorder.insight.unusual import are_of_losses
from lightning_recorder.page.histograms import histograms_by_octave, packed_numbers
from lightning_recorder.recordings import WATCH, compare
from lightning_recorder.recordings.explanation import explain
from lightning_recorder.recordings.series import SiteSeries
from lightning_recorder.records.file import LOGGED
from lightning_recorder.untrusted import is_finite

if TYPE_CHECKING:
    from lightning_recorder.recordings import Run, Series

__all__ = ["PAGE_FORMAT", "curves", "group_of", "logged_curves", "page_data", "site_data"]

PAGE_FORMAT = "lightning_recorder.page/1"
"""The format of the page's data. The page refuses data in another format."""

_HISTOGRAMS = 12_000  # the most histograms of all sites together; reading them takes about one second
_NEEDS = {each.name: each.needs for each in RULES}
_CURVES = {"grad_norm": "gradient norm"}
_MOST_POINTS = 2_000  # the most points of a curve; more cannot be distinguished on a screen
_LEAST_STEPS = 32  # the records that a recorder keeps at least, however many sites it has
_VECTOR_STEPS = 64
_VECTOR_BYTES = 1_000_000  # the most bytes of one recorder's vectors
_ITEM = 4  # the bytes of a float32
_COSTS = "costs"  # the group of the recorder of time and memory
_OF_CALLS = ("activations", "gradients")  # the groups of recorders that record calls
_OF_ANSWER = ("question", "asks", "verdict", "text", "expected", "module", "line")
_PLAIN_FIELDS = ("note", "source", "scope", "type_name", "duration_ms", "flops", "saved_bytes")


def page_data(
    runs: Mapping[str, Run],
    *,
    limit: int = 10_000_000,
    known: Mapping[str, Diagnosis] | None = None,
    table: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return the data of the page as JSON values.

    Args:
        runs: The runs by name; two runs are compared with each other.
        table: The rows of :func:`~lightning_recorder.page.runs.runs_table`, if there are more than two runs.
        known: Known diagnoses by run name. The records of these runs are not examined again.
        limit: The number of bytes for all statistics. Beyond the limit, neighboring records are joined: each site keeps
            the value that is farthest from its usual value, so that no outlier is lost.

    Raises:
        DumpError: If a file of a run is damaged.
    """
    known = known or {}
    found = [
        _run(name, run, limit // max(1, len(runs)), known.get(name) or run.diagnosis) for name, run in runs.items()
    ]
    return {"format": PAGE_FORMAT, "runs": found, "comparison": _comparison(runs), "table": list(table)}


def _comparison(runs: Mapping[str, Run]) -> dict[str, Any] | None:
    """Return the differences between the two runs; None if there are not two."""
    if len(runs) != 2:
        return None
    one, other = runs.values()
    try:
        compared = compare(one, other)
    except ArgumentError:  # the runs have no recorder in common
        return None
    first = compared.first
    return {
        "same": compared.same,
        "sentence": explain(compared),
        "step": None if first is None else first.step,
        "module": "" if first is None else first.site.name,
    }


def _run(name: str, run: Run, limit: int, diagnosis: Diagnosis) -> dict[str, Any]:
    found = diagnosis.to_json()
    labels = [label for label in run if label != WATCH]
    shown = [(label, run[label].of(*key)) for label in labels for key in _stages(run[label])]
    total = sum(len(series.steps) * len(series) * len(series.statistics) * _ITEM for _, series in shown)
    graph = run.graph
    histograms = _HISTOGRAMS // max(1, sum(len(series) for _, series in shown))
    called = {site.name for label in labels if group_of(label, run[label]) in _OF_CALLS for site in run[label]}
    return {
        "name": name,
        "folder": str(run.log_dir),
        "healthy": found["healthy"],
        "verdict": diagnosis.verdict,
        "findings": [
            {**plain, "measured": each.measured, "needs": [*_NEEDS.get(each.rule, ())]}
            for each, plain in zip(diagnosis.findings, found["findings"], strict=True)
        ],
        "notExamined": [each.line for each in diagnosis.open],
        "curves": [
            {"name": title, "steps": steps, "values": packed_numbers(values), "logged": is_logged}
            for is_logged, found in ((False, curves(run)), (True, logged_curves(run)))
            for title, steps, values in found
        ],
        "recorders": [_recorder(label, series, limit / max(limit, total), histograms) for label, series in shown],
        "graph": None if graph is None else _graph(graph, called),
        "check": _check(run.check),
    }


def _check(found: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the answers of a check with only the fields that the page shows."""
    if found is None:
        return None
    answers = []
    for each in found["answers"]:
        texts = {name: str(each.get(name, "")) for name in _OF_ANSWER}
        numbers = each.get("numbers")
        numbers = {
            str(name): value if is_finite(value) else str(value)  # JSON has no NaN
            for name, value in (numbers.items() if isinstance(numbers, dict) else ())
        }
        answers.append({**texts, "numbers": numbers})
    steps, seconds = (found.get(name) for name in ("steps", "seconds"))
    return {
        "steps": steps if is_finite(steps) else 0,
        "seconds": seconds if is_finite(seconds) else 0,
        "answers": answers,
    }


def group_of(label: str, series: Series) -> str:
    """Return the group of a recorder, such as ``activations``."""
    known = (str(each.about["group"]) for each in series.sessions if each.about.get("group"))
    return next(known, label.partition("-")[0])


def _stages(series: Series) -> Iterator[tuple[str, int | None]]:
    for key in series.keys:
        yield key.stage, key.loader


def curves(run: Run) -> Iterator[tuple[str, list[int], NDArray[np.float64]]]:
    """Yield name, steps and values of each curve of the whole model: from the step watch, or else the gradient norm."""
    if WATCH in run:
        yield from _columns(run, "train")
        return
    for label in run:
        series = run[label]
        gradients = [place for place, site in enumerate(series.sites) if site.path.endswith(".grad")]
        if group_of(label, series) == "parameters" and gradients and {"rms", "count"} <= {*series.statistics}:
            norms = series.numbers("rms") * np.sqrt(series.numbers("count"))
            total = np.sqrt(np.nansum(norms[:, gradients] ** 2, axis=1))
            rows = _thinned(np.arange(len(total)), total)
            yield "gradient norm", [series.steps[row] for row in rows], total[rows]


def logged_curves(run: Run) -> Iterator[tuple[str, list[int], NDArray[np.float64]]]:
    """Yield the name, steps and values of each curve that the user logged, and of the learning rates."""
    if WATCH in run:
        yield from _columns(run, LOGGED)


def _columns(run: Run, stage: str) -> Iterator[tuple[str, list[int], NDArray[np.float64]]]:
    if stage not in run[WATCH].stages:
        return
    series = run[WATCH].of(stage)
    if "value" not in series.statistics:  # no step has ended
        return
    values, all_seen, steps = series.numbers("value"), series.mask(), np.array(series.steps)
    for place, site in enumerate(series.sites):
        seen = ~np.isnan(values[:, place]) | all_seen[:, place]
        part = _thinned(np.flatnonzero(seen), values[:, place])
        yield _CURVES.get(site.name, site.name), steps[part].tolist(), values[part, place]


def _thinned(rows: NDArray[np.intp], values: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return at most 2,000 rows: from each section, the rows of the smallest, largest and non-finite values."""
    if len(rows) <= _MOST_POINTS:
        return rows
    kept = []
    for part in np.array_split(rows, _MOST_POINTS // 2):
        finite = part[np.isfinite(values[part])]
        ends = [finite[np.argmin(values[finite])], finite[np.argmax(values[finite])]] if finite.size else []
        kept += [*ends, *part[~np.isfinite(values[part])][:1]]
    return np.unique(np.array(kept, dtype=np.intp))


def _recorder(label: str, series: Series, share: float, histograms: int) -> dict[str, Any]:
    steps = series.steps
    kept = max(_LEAST_STEPS, int(len(steps) * share))
    parts = _parts(len(steps), kept) if kept < len(steps) else None
    last = steps if parts is None else [steps[part[-1]] for part in parts]
    return {
        "label": label,
        "group": group_of(label, series),
        "stage": series.stage,
        "loader": series.loader,
        "steps": last,
        "records": len(steps),
        "joined": 1 if parts is None else max(map(len, parts)),
        **(_costs(series, parts) if group_of(label, series) == _COSTS else _statistics(series, parts, histograms)),
    }


def _statistics(series: Series, parts: list[NDArray[np.intp]] | None, histograms: int) -> dict[str, Any]:
    return {
        "sites": _sites(series),
        # Read one table at a time, because all tables together may not fit into memory.
        "statistics": {name: _packed(series.numbers(name), parts) for name in series.statistics},
        "histograms": histograms_by_octave(series, histograms),
        "vectors": _vectors(series),
    }


def _costs(series: Series, parts: list[NDArray[np.intp]] | None) -> dict[str, Any]:
    """Return one site per module. Its costs have different units, so each cost becomes a separate statistic."""
    means = series.numbers("mean") if "mean" in series.statistics else np.zeros((0, len(series)))
    modules = {name: place for place, name in enumerate(dict.fromkeys(site.name for site in series.sites))}
    tables: dict[str, NDArray[np.float64]] = {}
    for column, site in enumerate(series.sites):
        table = tables.setdefault(site.path, np.full((len(means), len(modules)), np.nan))
        table[:, modules[site.name]] = means[:, column]
    return {
        "sites": [{"module": name, "path": "", "shape": [], "dtype": ""} for name in modules],
        "statistics": {cost: _packed(table, parts) for cost, table in tables.items()},
        "histograms": {"steps": [], "sites": []},
    }


def _parts(records: int, number: int) -> list[NDArray[np.intp]]:
    """Divide the rows of a table into parts of about equal size. The first part is the first record alone."""
    begins = 1 + np.arange(number - 1) * (records - 1) // (number - 1)
    return np.split(np.arange(records), begins)


def _sites(series: Series) -> list[dict[str, Any]]:
    sites = [SiteSeries(series, site) for site in series.sites]
    return [
        {"module": site.name, "path": site.path, "shape": list(site.shape or ()), "dtype": site.dtype or ""}
        | ({"ofLoss": True} if is_of_loss else {})
        for site, is_of_loss in zip(sites, are_of_losses(tuple(series.sites)).tolist(), strict=True)
    ]


def site_data(site: SiteSeries) -> dict[str, Any]:
    """Return all records of one site as JSON values."""
    statistics = {name: packed_numbers(site.numbers(name)) for name in site.statistics}
    return {"format": PAGE_FORMAT, "steps": site.steps, "statistics": statistics}


def _packed(values: NDArray[np.float64], parts: list[NDArray[np.intp]] | None) -> str:
    return packed_numbers(values if parts is None else _joined(values, parts))


def _joined(table: NDArray[np.float64], parts: Iterable[NDArray[np.intp]]) -> NDArray[np.float64]:
    """Return the value farthest from the site's median in each part of the records, ``[parts, sites]``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a site without finite values
        usual = np.nan_to_num(np.nanmedian(np.where(np.isfinite(table), table, np.nan), axis=0))
    far = np.where(np.isfinite(table), np.abs(table - usual), np.inf)
    rows = [part[np.argmax(far[part], axis=0)] for part in parts]
    return np.stack([table[row, np.arange(table.shape[1])] for row in rows])


def _vectors(series: Series) -> dict[str, Any]:
    """Return the vector statistics (a value per channel, head or expert) by site index, which is a string."""
    steps = series.steps
    last = series.all_vectors(steps[-1]) if steps else {}
    size = _ITEM * sum(vector.size for vectors in last.values() for vector in vectors.values())
    if not size:
        return {"steps": [], "sites": {}}
    count = min(len(steps), max(1, min(_VECTOR_STEPS, _VECTOR_BYTES // size)))
    # If there is room for only one record, the last one is chosen.
    chosen = [steps[place] for place in np.unique(np.linspace(len(steps) - 1, 0, count).astype(int))]
    records = [series.all_vectors(step) for step in chosen]
    places = {site: place for place, site in enumerate(series.sites)}
    sites = {}
    for site, vectors in last.items():
        tables = {name: [record.get(site, {}).get(name) for record in records] for name in vectors}
        sites[str(places[site])] = {
            name: packed_numbers(np.stack([_filled(row, vectors[name].size) for row in table]))
            for name, table in tables.items()
        }
    return {"steps": chosen, "sites": sites}


def _filled(vector: NDArray[np.float64] | None, size: int) -> NDArray[np.float64]:
    """Return the values of a vector; NaN if a record lacks the vector or has another number of values."""
    return np.full(size, np.nan) if vector is None or vector.size != size else vector


def _graph(graph: Graph, called: Collection[str]) -> dict[str, Any]:
    """Return a graph as JSON values. Modules with records, and their parents, are not listed as never called."""
    view = view_at_depth(graph, None, fold=False)
    numbers = forms(view, MutableGraph(view))
    around = {".".join(parts[: end + 1]) for parts in (name.split(".") for name in called) for end in range(len(parts))}
    unused = [name for name in graph.unused.modules if name not in around]
    return {
        "title": graph.title,
        "parameters": graph.parameters,
        "unused": unused,
        "neverCalled": joined_names(unused),
        "nodes": [{**_node(node), "form": numbers.get(node.id, -1)} for node in view.nodes],
        "edges": [
            [edge.source, edge.target, edge.multiplicity, "" if edge.tensor is None else str(edge.tensor)]
            for edge in view.edges
        ],
        "sites": _places(graph, {node.id for node in view.nodes}),
    }


def _places(graph: Graph, shown: Collection[int]) -> dict[str, int]:
    """Return the shown node of each function by its name in the records: the function, or a module that hides it."""
    found: dict[str, int] = {}
    for number, name in function_sites(graph).items():
        node = graph[number]
        while node.id not in shown and node.parent is not None:
            node = graph[node.parent]
        found.setdefault(name, node.id)
    return found


def _node(node: Node) -> dict[str, Any]:
    """Return a node as JSON values, without empty fields."""
    about: dict[str, Any] = {"id": node.id, "kind": node.kind, "name": node.name, "parent": node.parent}
    about |= {name: value for name in _PLAIN_FIELDS if (value := getattr(node, name))}
    further = {
        "call": node.call if node.call > 1 else 0,
        "parameters": node.total_parameters or node.parameters,
        "inputs": [f"{meta} {meta.dtype}" for meta in node.inputs],
        "outputs": [f"{meta} {meta.dtype}" for meta in node.outputs],
        "arguments": [[name, value] for name, value in node.arguments],
        "bytes": node.output_bytes,
        "tied": list(node.tied),
        "failed": node.failed,
        "link": source_link(node.source) if node.kind == "module" else "",
    }
    return about | {name: value for name, value in further.items() if value}
