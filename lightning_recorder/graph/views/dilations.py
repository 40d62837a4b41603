"""The dilation of convolutions, in which equal blocks may differ."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from lightning_recorder.graph.model import Graph

__all__ = ["DILATION", "dilations_in", "joined_dilations", "undilated", "with_dilations"]

DILATION = "dilation"
_APART = " | "  # separator between the dilations of several blocks

Arguments = Sequence[tuple[str, str]]


def undilated(arguments: Arguments) -> tuple[tuple[str, str], ...]:
    """Return a node's arguments in a form that is equal for blocks that differ only in their dilation.

    The padding of a convolution is divided by its dilation, since padding grows with dilation. In the ``pad`` argument
    of a padding function, all numbers except 0 are masked.
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
    """Return the padding divided by the dilation, in each dimension."""
    sizes, steps = (list(map(int, re.findall("[0-9]+", text))) for text in (padding, dilation))
    if not sizes or 0 in steps or len(sizes) % len(steps):
        return padding
    return ", ".join(str(Fraction(size, step)) for size, step in zip(sizes, steps * len(sizes), strict=False))


def with_dilations(graph: Graph) -> Graph:
    """Return a graph in which each call lists the dilations inside it as an argument, except dilations of 1.

    So a closed block still shows its dilations when it is folded with blocks that have other dilations.
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
    """Return the dilations of equal blocks as one text, in the order of the blocks; empty if all are the same."""
    values = [_short(dict(arguments).get(DILATION, "1")) for arguments in several]
    return _APART.join(values) if len(set(values)) > 1 else ""


def dilations_in(arguments: Arguments) -> list[str]:
    """Return the separate dilations of an argument that :func:`joined_dilations` made; empty if there is none."""
    value = dict(arguments).get(DILATION, "")
    return value.split(_APART) if _APART in value else []


def _short(value: str) -> str:
    """Shorten a tuple of equal numbers to one number, such as ``(2, 2)`` to ``2``. Return other texts unchanged."""
    numbers = re.findall("[0-9]+", value)
    return numbers[0] if numbers and len(set(numbers)) == 1 and _APART not in value else value
