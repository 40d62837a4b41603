"""``ls``: list all runs and their contents."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any, TextIO

from lightning_recorder.commands.terminal import counted, printable, table
from lightning_recorder.disk import readable_size
from lightning_recorder.errors import DumpError
from lightning_recorder.recordings import Run, Series, open_recording

__all__ = ["run"]


def run(arguments: Namespace, out: TextIO) -> int:
    """List the runs."""
    found = [_about(each) for each in open_recording(arguments.path).runs.values()]
    if arguments.json:
        out.write(json.dumps({"runs": found}, indent=1) + "\n")
        return 0
    for place, about in enumerate(found):
        out.write("\n" * bool(place) + "\n".join(_lines(about)) + "\n")
    return 0


def _about(run: Run) -> dict[str, Any]:
    dumps = run.dumps
    return {
        "name": run.name,
        "recorders": [_recorder(label, run[label]) for label in run],
        "dumps": {"count": len(dumps), "bytes": sum(dump.size_bytes for dump in dumps)},
        "graph": _nodes(run),
        "bytes": run.size_bytes,
    }


def _recorder(label: str, series: Series) -> dict[str, Any]:
    """Describe a recorder. If it cannot be read, describe the error, so that the other recorders are still listed."""
    try:
        stages = [_stage(series.of(key.stage, key.loader)) for key in series.keys]
        return {
            "label": label,
            "stages": stages,
            "sessions": len(series.sessions),
            "skipped": series.skipped,
            "bytes": series.path.stat().st_size,
        }
    except (DumpError, OSError) as error:
        return {"label": label, "error": str(error)}


def _stage(series: Series) -> dict[str, Any]:
    steps = series.steps
    about = {"stage": series.stage, "loader": series.loader, "sites": len(series), "records": len(steps)}
    return {**about, "first": steps[0], "last": steps[-1]}


def _nodes(run: Run) -> dict[str, Any] | None:
    try:
        graph = run.graph
    except DumpError as error:
        return {"error": str(error)}
    return None if graph is None else {"title": graph.title, "nodes": len(graph.nodes), "edges": len(graph.edges)}


def _lines(about: dict[str, Any]) -> list[str]:
    """Format a run as text."""
    rows = [["recorder", "stage", "sites", "records", "steps", "size"]]
    failed = []
    for recorder in about["recorders"]:
        if "error" in recorder:
            failed.append(f"  {printable(recorder['label'])}: {printable(recorder['error'])}")
            continue
        for place, stage in enumerate(recorder["stages"] or [None]):
            label = printable(recorder["label"]) if not place else ""
            room = readable_size(recorder["bytes"]) if not place else ""
            rows.append([label, *_cells(stage), room])
    dumps, graph = about["dumps"], about["graph"]
    lines = [f"{printable(about['name'], None)}  {readable_size(about['bytes'])}"]
    if len(rows) > 1:
        lines += [f"  {line}" for line in table(rows, right=(2, 3, 5))]
    lines += failed
    for recorder in about["recorders"]:
        if recorder.get("skipped"):
            verb = "was" if recorder["skipped"] == 1 else "were"
            skipped = counted(recorder["skipped"], "damaged line")
            lines.append(f"  {printable(recorder['label'])}: {skipped} {verb} skipped")
    if dumps["count"]:
        lines.append(f"  dumps: {dumps['count']}, {readable_size(dumps['bytes'])}")
    if graph is not None:
        shown = printable(graph["error"]) if "error" in graph else _graph_size(graph)
        lines.append(f"  graph: {shown}")
    return lines


def _cells(stage: dict[str, Any] | None) -> list[str]:
    if stage is None:
        return ["", "0", "0", ""]
    name = printable(stage["stage"]) + ("" if stage["loader"] is None else f"/{stage['loader']}")
    return [name, str(stage["sites"]), str(stage["records"]), f"{stage['first']}-{stage['last']}"]


def _graph_size(graph: dict[str, Any]) -> str:
    return f"{printable(graph['title'])}, {graph['nodes']} nodes, {graph['edges']} edges"
