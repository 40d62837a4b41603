"""``graph``: the recorded graph drawn again."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TextIO

from lightning_recorder.commands.text import printable
from lightning_recorder.errors import ArgumentError, DumpError
from lightning_recorder.graph import Drawing, draw, to_mermaid, to_text
from lightning_recorder.recordings import open_recording

__all__ = ["run"]

_MOST_NODES = 150  # as GraphRecorder draws without further arguments
_TEXTS = {"text": "text", "txt": "text", "mermaid": "mermaid", "mmd": "mermaid", "dot": "dot"}


def run(arguments: Namespace, out: TextIO) -> int:
    """Draw the graph."""
    recorded = open_recording(arguments.path).run
    graph = recorded.graph
    if graph is None:
        raise DumpError(f"{str(recorded.directory)!r} has no graph.json")
    suffix = Path(arguments.output).suffix[1:] if arguments.output else ""
    form = (arguments.format or suffix or "svg").lower()
    if arguments.format and suffix and form not in _TEXTS and form != suffix.lower():
        raise ArgumentError(f"the format {form!r} and the file {arguments.output!r} say two different things")
    most = _MOST_NODES if arguments.max_nodes is None and arguments.depth is None else arguments.max_nodes
    drawing = draw(graph, depth=arguments.depth, max_nodes=most, graph_dir=arguments.direction)
    if form in _TEXTS:
        return _write(_text(drawing, _TEXTS[form]).rstrip("\n") + "\n", arguments.output, out)
    path = Path(arguments.output or f"graph.{form}")
    path = drawing.save(path if path.suffix else path.with_name(f"{path.name}.{form}"))
    out.write(f"{printable(str(path))}\n")
    return 0


def _text(drawing: Drawing, form: str) -> str:
    if form == "dot":
        source: str = drawing.visual_graph.source
        return source
    return to_text(drawing.view) if form == "text" else to_mermaid(drawing.view)


def _write(text: str, output: str | None, out: TextIO) -> int:
    if output is None:
        out.write(text)
    else:
        Path(output).write_text(text, encoding="utf-8")
        out.write(f"{printable(output)}\n")
    return 0
