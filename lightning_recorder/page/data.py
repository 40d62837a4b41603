"""The contents of the page: what ``schema.json`` describes, made from the recordings of runs."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.bins import BINS, BINS_PER_OCTAVE
from lightning_recorder.errors import ArgumentError
from lightning_recorder.graph.model import Graph, Node
from lightning_recorder.graph.views.fit import view_at_depth
from lightning_recorder.graph.views.forms import forms
from lightning_recorder.graph.views.wiring import MutableGraph
from lightning_recorder.insight import findings_to_json
from lightning_recorder.recordings import WATCH, compare
from lightning_recorder.recordings.explanation import explain
from lightning_recorder.recordings.packed_counts import unpack_counts

if TYPE_CHECKING:
    from lightning_recorder.recordings import Run, Series

__all__ = ["PAGE_FORMAT", "page_data"]

PAGE_FORMAT = "lightning_recorder.page/1"
"""The format of the page's data. The page refuses data of another one."""

_HISTOGRAM_STEPS = 24  # histograms of one site; more cannot be told apart in its panel
_HISTOGRAMS = 12_000  # of all sites, about one second of reading
_CURVES = {"grad_norm": "gradient norm"}
_MOST_POINTS = 2_000  # of a curve; more cannot be told apart on a screen
_LEAST_STEPS = 32  # records that a recorder keeps however many sites it has
_OCTAVES = BINS // 2 // BINS_PER_OCTAVE  # of one sign
_ZERO = _OCTAVES - 2  # the place of zero between the negative and the positive octaves
_SHOWN_OCTAVES = 16
_ITEM = 4  # bytes of a float32
_PLAIN_FIELDS = ("note", "source", "scope", "type_name", "duration_ms", "flops", "saved_bytes")


def page_data(runs: Mapping[str, Run], *, limit: int = 10_000_000) -> dict[str, Any]:
    """Return the data of the page as JSON values.

    Args:
        runs: The runs by name; two runs are compared with each other.
        limit: The number of bytes for all statistics. Beyond it, neighboring records are joined; each site keeps the
            record in which it is farthest from its usual value, so that no outlier is lost.

    Raises:
        DumpError: If a file of a run is damaged.
    """
    found = [_run(name, run, limit // max(1, len(runs))) for name, run in runs.items()]
    return {"format": PAGE_FORMAT, "runs": found, "comparison": _comparison(runs)}


def _comparison(runs: Mapping[str, Run]) -> dict[str, Any] | None:
    """Return how the second of two runs differs from the first."""
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


def _run(name: str, run: Run, limit: int) -> dict[str, Any]:
    found = findings_to_json(run.findings)
    labels = [label for label in run if label != WATCH]
    shown = [(label, run[label].of(*key)) for label in labels for key in _stages(run[label])]
    total = sum(len(series.steps) * len(series) * len(series.statistics) * _ITEM for _, series in shown)
    graph = run.graph
    histograms = _HISTOGRAMS // max(1, sum(len(series) for _, series in shown))
    return {
        "name": name,
        "folder": str(run.log_dir),
        "healthy": found["healthy"],
        "findings": found["findings"],
        "curves": list(_curves(run)),
        "recorders": [_recorder(label, series, limit / max(limit, total), histograms) for label, series in shown],
        "graph": None if graph is None else _graph(graph),
    }


def _stages(series: Series) -> Iterator[tuple[str, int | None]]:
    for key in series.keys:
        yield key.stage, key.loader


def _curves(run: Run) -> Iterator[dict[str, Any]]:
    """Yield the series of the whole model: those of the step watch, or else the norm of all gradients."""
    if WATCH in run:
        series = run[WATCH]
        values = series.values("value").numpy()
        for place, site in enumerate(series.sites):
            seen = ~np.isnan(values[:, place]) | series.seen()[:, place].numpy()
            part = _thinned(np.flatnonzero(seen), values[:, place])
            steps = [series.steps[row] for row in part]
            yield {"name": _CURVES.get(site.name, site.name), "steps": steps, "values": _packed(values[part, place])}
        return
    for label in run:
        series = run[label]
        group = next((str(each.about.get("group", "")) for each in series.sessions), "")
        gradients = [place for place, site in enumerate(series.sites) if site.path.endswith(".grad")]
        if group == "parameters" and gradients and {"rms", "count"} <= {*series.statistics}:
            norms = series.values("rms") * series.values("count").sqrt()
            total = norms[:, gradients].square().nansum(1).sqrt()
            yield {"name": "gradient norm", "steps": series.steps, "values": _packed(total.numpy())}


def _thinned(rows: NDArray[np.intp], values: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return at most 2,000 rows: of each part of the series the smallest, the largest and those that are not finite."""
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
    parts = np.array_split(np.arange(len(steps)), kept) if kept < len(steps) else None
    values = {name: series.values(name).numpy() for name in series.statistics}
    last = steps if parts is None else [steps[part[-1]] for part in parts]
    group = next((str(each.about.get("group", "")) for each in series.sessions), "")
    return {
        "label": label,
        "group": group or label.partition("-")[0],
        "stage": series.stage,
        "loader": series.loader,
        "steps": last,
        "joined": 1 if parts is None else -(-len(steps) // len(parts)),
        "sites": [_site(series, name, path) for name, path in series.sites],
        "statistics": {
            name: _packed(table if parts is None else _joined(table, parts)) for name, table in values.items()
        },
        "histograms": _histograms(series, histograms),
    }


def _site(series: Series, name: str, path: str) -> dict[str, Any]:
    site = series[name, path]
    return {"module": name, "path": path, "shape": list(site.shape or ()), "dtype": site.dtype or ""}


def _joined(table: NDArray[np.float64], parts: Iterable[NDArray[np.intp]]) -> NDArray[np.float64]:
    """Return for each part of the records, ``[parts, sites]``, the value farthest from the site's median."""
    usual = np.nan_to_num(np.nanmedian(np.where(np.isfinite(table), table, np.nan), axis=0))
    far = np.where(np.isfinite(table), np.abs(table - usual), np.inf)
    rows = [part[np.argmax(far[part], axis=0)] for part in parts]
    return np.stack([table[row, np.arange(table.shape[1])] for row in rows])


def _histograms(series: Series, each: int) -> dict[str, Any]:
    """Return counts by powers of two for some records of each site, from the most negative to the largest values."""
    steps = series.steps
    count = min(len(steps), _HISTOGRAM_STEPS, max(2, each))
    chosen = [steps[place] for place in np.unique(np.linspace(0, len(steps) - 1, count).astype(int))] if steps else []
    tables: dict[Any, list[NDArray[np.float64]]] = {site: [] for site in series.sites}
    for step in chosen:
        packed = series.packed_counts(step)
        for site, table in tables.items():
            text = packed.get(site)
            counts = np.zeros(BINS) if text is None else unpack_counts(text).numpy()
            table.append(_by_octave(counts))
    sites = [_trimmed(np.stack(table)) if table else None for table in tables.values()]
    return {"steps": chosen, "sites": sites}


def _by_octave(counts: NDArray[Any]) -> NDArray[np.float64]:
    """Return counts from the most negative octave over zero to the largest one, without infinities and NaN."""
    octaves = counts.reshape(2, _OCTAVES, BINS_PER_OCTAVE).sum(2)[:, :-1]
    # The first octave holds zero and the values too small for normal numbers.
    zero = octaves[:, :1].sum(keepdims=True)[0]
    return np.concatenate([octaves[1, :0:-1], zero, octaves[0, 1:]]).astype(np.float64)


def _trimmed(table: NDArray[np.float64]) -> dict[str, Any] | None:
    """Return the octaves that hold values; those far below the largest count as zero, so that the others have room."""
    used = np.flatnonzero(table.any(0)) - _ZERO
    if not used.size:
        return None
    least = max(1, int(np.abs(used).max()) - _SHOWN_OCTAVES)
    near = slice(_ZERO - least + 1, _ZERO + least)
    table[:, _ZERO] = table[:, near].sum(1)
    table = np.concatenate([table[:, : near.start], table[:, [_ZERO]], table[:, near.stop :]], axis=1)
    used, zero = np.flatnonzero(table.any(0)), near.start
    first, end = int(used[0]), int(used[-1]) + 1
    counts = _packed(table[:, first:end])
    return {"first": first - zero, "rows": end - first, "least": least, "counts": counts}


def _packed(values: NDArray[Any]) -> str:
    """Return numbers as base64 of little-endian float32."""
    with np.errstate(over="ignore"):
        return base64.b64encode(np.ascontiguousarray(values, dtype="<f4").tobytes()).decode()


def _graph(graph: Graph) -> dict[str, Any]:
    view = view_at_depth(graph, None, fold=False)
    numbers = forms(view, MutableGraph(view))
    return {
        "title": graph.title,
        "parameters": graph.parameters,
        "unused": list(graph.unused.modules),
        "nodes": [{**_node(node), "form": numbers.get(node.id, -1)} for node in view.nodes],
        "edges": [
            [edge.source, edge.target, edge.multiplicity, "" if edge.tensor is None else str(edge.tensor)]
            for edge in view.edges
        ],
    }


def _node(node: Node) -> dict[str, Any]:
    """Return a node without the fields that have no value."""
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
    }
    return about | {name: value for name, value in further.items() if value}
