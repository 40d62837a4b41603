"""A graph as a few lines of text that are easy to check."""

from __future__ import annotations

from collections import Counter
from inspect import cleandoc

from lightning_recorder.graph import Graph, Node

__all__ = ["outline", "scoped", "text"]

_MODEL_TENSORS = ("parameter", "buffer")


def outline(graph: Graph, *, model_tensors: bool = False, outputs: bool = False) -> str:
    """Return one line per node in the order of time, indented by the module calls around it.

    ``linear#2 <- relu, input ×2`` is the second node called ``linear``; it takes one tensor from ``relu`` and two from
    ``input``. ``add ×4 next`` stands for the results of ``add`` in four preceding repetitions; see :data:`Repetition`.
    ``fc: Linear (call 2)`` is a call of a module. ``!`` marks a node that failed. Parameters and buffers are omitted
    unless ``model_tensors`` is set, and outputs are omitted unless ``outputs`` is set.
    """
    names = _names(graph)
    unasked = (*(() if model_tensors else _MODEL_TENSORS), *(() if outputs else ("output",)))
    left_out = {node.id for node in graph.nodes if node.kind in unasked}
    lines = []
    for node in graph.nodes:
        if node.parent is None or node.id in left_out:
            continue
        sources = [
            names[edge.source]
            + (f" ×{edge.multiplicity}" if edge.multiplicity > 1 else "")
            + "".join(f" {word}" for _, word in edge.across)
            for edge in graph.edges
            if edge.target == node.id and edge.source not in left_out
        ]
        type_name = f": {node.type_name}" if node.type_name else ""
        call = f" (call {node.call})" if node.call > 1 else ""
        repeats = f" [{node.repeats} times]" if node.repeats > 1 else ""
        arrow = f" <- {', '.join(sources)}" if sources else ""
        around = len(list(graph.ancestors(node))) - 1
        failed = "!" if node.failed else ""
        lines.append("  " * around + names[node.id] + failed + type_name + call + repeats + arrow)
    return "\n".join(lines)


def scoped(graph: Graph) -> str:
    """Return the outline with a heading for each run of nodes in one scope, without parameters, buffers and layers."""
    named = [node for node in graph.nodes if node.parent is not None]
    kept = [node for node in named if node.kind not in ("parameter", "buffer", "output")]
    lines: list[str] = []
    before = None
    for node, line in zip(kept, outline(graph).splitlines(), strict=True):
        if node.scope != before:
            lines.append(f"{node.scope}:")
        lines.append(f"  {line}")
        before = node.scope
    return "\n".join(lines)


def _names(graph: Graph) -> dict[int, str]:
    seen: Counter[str] = Counter()
    return {node.id: _numbered(node, seen) for node in graph.nodes}


def _numbered(node: Node, seen: Counter[str]) -> str:
    name = node.name or f"({node.kind})"
    if node.kind == "module":
        return name
    seen[name] += 1
    return name if seen[name] == 1 else f"{name}#{seen[name]}"


def text(lines: str) -> str:
    """Return an expected outline without the indentation of the code around it."""
    return cleandoc(lines)
