"""The dilation of convolutions, which may be another one in each of several equal blocks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from lightning_recorder.graph.model import Graph

__all__ = ["DILATION", "dilations_in", "joined_dilations", "undilated", "with_dilations"]

DILATION = "dilation"
_APART = " | "  # between the dilations of several blocks

Arguments = Sequence[tuple[str, str]]


def undilated(arguments: Arguments) -> tuple[tuple[str, str], ...]:
    """Return the arguments in which blocks agree that differ in their dilation only.

    The padding of a convolution grows with its dilation. A function that pads before it has only zeros in common with
    that of another block.
    """
    dilation = dict(arguments).get(DILATION, "1")
    kept = []
    for name, value in arguments:
        if name == "padding":
            kept.append((name, _per_dilation(value, dilation)))
        elif name == "pad":
            kept.append((name, re.sub("[1-9][0-9]*", "#", value)))
        elif name != DILATION:
            kept.append((name, value))
    return tuple(kept)


def _per_dilation(padding: str, dilation: str) -> str:
    """Return the padding in steps of the dilation, of each dimension."""
    sizes, steps = (list(map(int, re.findall("[0-9]+", text))) for text in (padding, dilation))
    if not sizes or 0 in steps or len(sizes) % len(steps):
        return padding
    return ", ".join(str(Fraction(size, step)) for size, step in zip(sizes, steps * len(sizes), strict=False))


def with_dilations(graph: Graph) -> Graph:
    """Return a graph in which each call has the dilations of what is inside it as an argument, except dilations of 1.

    A closed block then says what a block that is folded with it has in another way.
    """
    inside: dict[int, dict[str, None]] = {}
    for node in graph.nodes:
        value = _short(dict(node.arguments).get(DILATION, "1"))
        for around in graph.ancestors(node) if value != "1" else ():
            inside.setdefault(around.id, {})[value] = None
    inside.pop(graph.root.id, None)
    if not inside:
        return graph
    nodes = [
        replace(node, arguments=(*node.arguments, (DILATION, ", ".join(inside[node.id]))))
        if node.id in inside and DILATION not in dict(node.arguments)
        else node
        for node in graph.nodes
    ]
    return replace(graph, nodes=tuple(nodes))


def joined_dilations(several: Sequence[Arguments]) -> str:
    """Return the dilations of equal blocks, in their order, as one text; empty if all are the same."""
    values = [_short(dict(arguments).get(DILATION, "1")) for arguments in several]
    return _APART.join(values) if len(set(values)) > 1 else ""


def dilations_in(arguments: Arguments) -> list[str]:
    """Return the dilations that :func:`joined_dilations` has joined; empty if there are none."""
    value = dict(arguments).get(DILATION, "")
    return value.split(_APART) if _APART in value else []


def _short(value: str) -> str:
    """Return ``2`` for ``(2, 2)``; other texts as they are."""
    numbers = re.findall("[0-9]+", value)
    return numbers[0] if numbers and len(set(numbers)) == 1 and _APART not in value else value
