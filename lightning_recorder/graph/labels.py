"""The words in which renderers speak of a graph."""

from __future__ import annotations

from lightning_recorder.graph.model import Edge, Graph, Node

__all__ = [
    "class_and_size",
    "full_name",
    "own_name",
    "printable",
    "short_count",
    "short_name",
    "shown_shapes",
    "shown_times",
    "times",
    "title",
]

_LONGEST_NAME = 60  # characters
_MOST_SHAPES = 2


def title(graph: Graph) -> str:
    """The model's class, the method that was recorded, and the size of the model."""
    size = f" · {short_count(graph.parameters)} parameters" if graph.parameters else ""
    failed = " · it raised" if graph.root.failed else ""
    return f"{graph.title}.{graph.scope}{size}{failed}".removeprefix(".")


def short_name(node: Node, graph: Graph) -> str:
    """A name without that of the call around it, with the number of the call; empty where several repeat together.

    Of one with more than 60 characters both ends are kept, since names differ in their beginnings or their ends.
    """
    return _with_call(own_name(node, graph), node)


def full_name(node: Node) -> str:
    """The dotted name, shortened like the other, with the number of the call."""
    return _with_call(node.name, node)


def _with_call(name: str, node: Node) -> str:
    if len(name) > _LONGEST_NAME:
        name = f"{name[: _LONGEST_NAME // 2]}…{name[-_LONGEST_NAME // 2 :]}"
    return name + (f" (call {node.call})" if node.call > 1 else "")


def own_name(node: Node, graph: Graph) -> str:
    """A name without that of the call around it; a module call without one is the frame of several that repeat."""
    name = node.name or ("" if node.kind == "module" else node.kind)
    if node.kind in ("module", "parameter", "buffer"):
        around = next((call.name for call in graph.ancestors(node) if call.name), "")
        return name.removeprefix(f"{around}.") if around else name
    return name


def class_and_size(node: Node) -> str:
    """A module's class with the number of parameters that it owns itself."""
    return node.type_name + (f" · {short_count(node.parameters)} parameters" if node.parameters else "")


def shown_shapes(node: Node) -> str:
    """The shapes of the first two tensors that a node gave."""
    more = ", …" if len(node.outputs) > _MOST_SHAPES else ""
    return ", ".join(map(str, node.outputs[:_MOST_SHAPES])) + more


def shown_times(node: Node) -> str:
    """How often a folded node occurs, as ``×12``; empty for one that occurs once."""
    return f"×{node.repeats}" + (" side by side" if node.parallel else "") if node.repeats > 1 else ""


def times(edge: Edge, graph: Graph) -> int:
    """How many tensors an edge stands for in the picture.

    Inside a call that is shown once for twelve, an edge that was recorded twelve times is one.
    """
    expected = max(_occurrences(graph[edge.source], graph), _occurrences(graph[edge.target], graph))
    return max(edge.multiplicity // expected, 1)


def _occurrences(node: Node, graph: Graph) -> int:
    """How many recorded nodes a shown one stands for, the folding around it included."""
    total = node.repeats
    for call in graph.ancestors(node):
        total *= call.repeats
    return total


def short_count(number: int) -> str:
    """A number with at most four digits, as ``1.23 M``."""
    for unit, size, least in (("G", 10**9, 0), ("M", 10**6, 0), ("k", 10**3, 10**4)):
        shown = f"{number / size:.3g}"
        # As it is shown: what is less by a trifle is rounded up to the unit.
        if float(shown) >= 1 and number >= least:
            return f"{shown} {unit}"
    return str(number)


def printable(text: str) -> str:
    """A text without what moves the cursor, colours a terminal or turns the direction of writing; each is a ``�``."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
