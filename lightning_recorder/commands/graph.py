"""``graph``: draw the recorded graph again."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from pathlib import Path
from typing import Any, TextIO

import torch

from lightning_recorder.commands.doctor import bad_findings
from lightning_recorder.commands.terminal import printable
from lightning_recorder.errors import ArgumentError, DumpError
from lightning_recorder.graph import Drawing, draw, to_mermaid, to_text
from lightning_recorder.plots import color_graph
from lightning_recorder.recordings import Run, open_recording

__all__ = ["run"]

_MOST_NODES = 150  # the default of GraphRecorder
_WHOLE = ("out", "weight")  # the tensors that represent their modules
_PICTURES = ("svg", "png", "pdf", "jpg", "jpeg", "gif", "webp", "ps", "eps")
_TEXTS = {"text": "text", "txt": "text", "mermaid": "mermaid", "mmd": "mermaid", "dot": "dot", "json": "json"}
_WITHOUT_COLORS = ("text", "mermaid", "json")


def run(arguments: Namespace, out: TextIO) -> int:
    """Draw the graph; print it or write it to a file."""
    recorded = open_recording(arguments.path).run
    graph = recorded.graph
    if graph is None:
        raise DumpError(
            f"{str(recorded.directory)!r} has no graph.json: GraphRecorder writes it, but not in a run that is resumed"
        )
    suffix = Path(arguments.output).suffix[1:] if arguments.output else ""
    form = (arguments.format or suffix or "svg").lower()
    if form not in _TEXTS and form not in _PICTURES:
        known = ", ".join([*_PICTURES, *dict.fromkeys(_TEXTS.values())])
        raise ArgumentError(f"{form!r} is not a known format; the formats are {known}")
    if arguments.format and suffix and form not in _TEXTS and form != suffix.lower():
        raise ArgumentError(f"the format {form!r} and the file {arguments.output!r} contradict each other")
    if arguments.color and _TEXTS.get(form) in _WITHOUT_COLORS:
        raise ArgumentError(f"the format {form!r} has no colors: leave --color out, or choose a picture such as svg")
    if form == "json" and arguments.depth is None and arguments.max_nodes is None:
        return _write(json.dumps(graph.to_json()) + "\n", arguments.output, out)  # JSON has the whole graph
    most = _MOST_NODES if arguments.max_nodes is None and arguments.depth is None else arguments.max_nodes
    options: dict[str, Any] = {"depth": arguments.depth, "max_nodes": most, "graph_dir": arguments.direction}
    values, caption = dict[str, float](), ""
    if arguments.color:
        values, statistic, caption = _values(recorded, arguments.color, arguments.step)
        named = {each.module for each in bad_findings(recorded)}
        drawing = color_graph(graph, values, statistic=statistic, caption=caption, framed=named, **options)
    else:
        drawing = draw(graph, **options)
    if form in _TEXTS:
        return _write(_text(drawing, _TEXTS[form]).rstrip("\n") + "\n", arguments.output, out)
    path = Path(arguments.output or f"graph.{form}")
    path = drawing.save(path if path.suffix else path.with_name(f"{path.name}.{form}"))
    out.write(f"{printable(str(path), None)}\n")
    if arguments.color:
        drawn, opened = drawing.view.module_calls(), {node.parent for node in drawing.view.nodes}
        # A collapsed module without a value shows the value of a module inside of it.
        inside = {name[:end] for name in values for end in range(len(name)) if name[end] == "."}
        closed = {node.name for node in drawn if node.id not in opened}
        names = {node.name for node in drawn}
        colored = (names & values.keys()) | (closed & inside)
        out.write(f"{len(colored)} of the {len(names)} modules that are drawn are colored by {printable(caption)}\n")
    return 0


def _values(run: Run, asked: str, step: int | None) -> tuple[dict[str, float], str, str]:
    """Return a statistic of each module's output or weight at a step, and the statistic's short and full name."""
    recorder, _, statistic = asked.partition("/")
    series, statistic = run[recorder], statistic or "rms"
    table = series.values(statistic)  # raises an error that lists the recorded statistics
    step = series.steps[-1] if step is None and series.steps else step
    series.about(step or 0)  # raises an error if the step was not recorded
    place = series.steps.index(step or 0)
    counts = [series.values(name)[place] for name in ("nan_count", "inf_count") if name in series.statistics]
    are_bad = torch.stack([torch.zeros_like(table[place]), *counts]).nan_to_num().sum(0) > 0
    whole: dict[str, tuple[float, bool]] = {}
    rows = zip(series.sites, table[place].tolist(), are_bad.tolist(), strict=True)
    for site, value, is_bad in sorted(rows, key=lambda each: each[0].path not in _WHOLE):
        whole.setdefault(site.name, (value, is_bad))  # a module with several tensors shows the first one
    known = {name: value for name, (value, is_bad) in whole.items() if is_bad or not math.isnan(value)}
    return known, statistic, f"{recorder} {statistic} at step {step}"


def _text(drawing: Drawing, form: str) -> str:
    if form == "dot":
        source: str = drawing.visual_graph.source
        return source
    if form == "json":
        return json.dumps(drawing.view.to_json())
    return to_text(drawing.view) if form == "text" else to_mermaid(drawing.view)


def _write(text: str, output: str | None, out: TextIO) -> int:
    if output is None:
        out.write(text)
    else:
        Path(output).write_text(text, encoding="utf-8")
        out.write(f"{printable(output, None)}\n")
    return 0
