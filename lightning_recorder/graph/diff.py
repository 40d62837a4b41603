"""Differences between the graphs of two runs, two steps or two versions of a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher

from lightning_recorder.graph.model import Edge, Graph, Node

__all__ = ["GraphDiff", "NodeChange", "diff"]


@dataclass(frozen=True)
class NodeChange:
    """A node that occurs in both graphs with differences.

    Args:
        name: The name of the node; see :class:`GraphDiff`.
        aspects: The differences, such as ``outputs: 2×4 -> 2×8``.
    """

    name: str
    aspects: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}: {'; '.join(self.aspects)}"


@dataclass(frozen=True)
class GraphDiff:
    """The nodes that were added, removed or changed between two graphs; falsy if there are none.

    The name of a module call is the dotted name of the module; a later call is ``encoder (call 2)``. The name of a
    function includes its enclosing call, as in ``encoder/relu``; the second function of that name is
    ``encoder/relu#2``. The name of a tensor is its path or dotted name.

    Args:
        added: The nodes that occur only in the second graph, in execution order.
        removed: The nodes that occur only in the first graph, in execution order.
        changed: The nodes of both graphs that differ in class, shapes, dtypes, arguments, number of parameters,
            autograd types, repetitions, failure, enclosing call, or sources.
    """

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[NodeChange, ...]

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)

    def __str__(self) -> str:
        lines = [f"+ {name}" for name in self.added] + [f"- {name}" for name in self.removed]
        return "\n".join([*lines, *(f"~ {change}" for change in self.changed)]) or "no difference"


def diff(one: Graph, other: Graph) -> GraphDiff:
    """Compare two graphs call by call, and function by function within each call.

    Calls with the same name and call number are matched, wherever and whenever they occur. Functions are matched so
    that as many as possible keep their order.

    Example:
        >>> import torch
        >>> from lightning_recorder.graph import capture_graph
        >>> nets = [torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.ReLU()) for width in (3, 4)]
        >>> nets[1].append(torch.nn.Tanh())
        Sequential(
          (0): Linear(in_features=2, out_features=4, bias=True)
          (1): ReLU()
          (2): Tanh()
        )
        >>> print(diff(*(capture_graph(net, torch.ones(1, 2)) for net in nets)))
        + 2
        + 2/tanh
        ~ 0: outputs: 1×3 -> 1×4; parameters: 9 -> 12; out_features: 3 -> 4
        ~ 0.weight: outputs: 3×2 -> 4×2
        ~ 0.bias: outputs: [3] -> [4]
        ~ 0/linear: outputs: 1×3 -> 1×4
        ~ 1: outputs: 1×3 -> 1×4
        ~ 1/relu: outputs: 1×3 -> 1×4
        ~ output: outputs: 1×3 -> 1×4; takes: 1/relu -> 2/tanh
    """
    names, others = _named(one), _named(other)
    pairs = _pairs(one, other)
    met = set(pairs.values())
    # Show matched functions under their names in the first graph, so that a changed number alone is no difference.
    called = {**others, **{mine: names[own] for own, mine in pairs.items()}}
    changed = []
    for node in one.nodes:
        if node.id in pairs:
            counterpart = other[pairs[node.id]]
            aspects = [*_aspects(node, counterpart)]
            if node.parent is not None and pairs.get(node.parent) != counterpart.parent:
                places = names[node.parent], called[counterpart.parent or 0]
                aspects.append(f"inside: {places[0] or 'the model'} -> {places[1] or 'the model'}")
            mine, theirs = one.into(node), other.into(counterpart)
            if [(pairs.get(edge.source), edge.multiplicity, edge.outputs) for edge in mine] != [
                (edge.source, edge.multiplicity, edge.outputs) for edge in theirs
            ]:
                aspects.append(f"takes: {_shown(mine, names)} -> {_shown(theirs, called)}")
            if aspects:
                changed.append(NodeChange(names[node.id] or "the model", tuple(aspects)))
    return GraphDiff(
        tuple(others[node.id] for node in other.nodes if node.id not in met),
        tuple(names[node.id] for node in one.nodes if node.id not in pairs),
        tuple(changed),
    )


def _named(graph: Graph) -> dict[int, str]:
    names: dict[int, str] = {}
    seen: dict[str, int] = {}
    for node in graph.nodes:
        if node.kind == "module":
            name = node.name + (f" (call {node.call})" if node.call > 1 else "")
        elif node.kind in ("op", "backward", "optimizer") and node.parent is not None and names[node.parent]:
            name = f"{names[node.parent]}/{node.name}"
        else:
            name = node.name or node.kind
        seen[name] = seen.get(name, 0) + 1
        names[node.id] = name if seen[name] == 1 else f"{name}#{seen[name]}"
    return names


def _pairs(one: Graph, other: Graph) -> dict[int, int]:
    """Map the id of each node of the first graph to the id of its counterpart in the second graph."""
    pairs = dict(_paired(one, other, one.root, other.root))
    met = set(pairs.values())
    # Modules and named tensors match, wherever and whenever they occur.
    left = {_key(node): node for node in other.nodes if node.id not in met and _is_named(node)}
    for node in one.nodes:
        counterpart = left.get(_key(node))
        if node.id not in pairs and counterpart is not None and counterpart.id not in met:
            more = dict(_paired(one, other, node, counterpart))
            pairs |= more
            met.update(more.values())
    return pairs


def _paired(one: Graph, other: Graph, first: Node, second: Node) -> Iterator[tuple[int, int]]:
    """Yield the ids of two matching nodes and of the matching nodes inside them."""
    todo = [(first, second)]
    while todo:
        left, right = todo.pop()
        yield left.id, right.id
        todo += _in_order(one.children(left), other.children(right))


def _in_order(nodes: list[Node], others: list[Node]) -> Iterator[tuple[Node, Node]]:
    """Yield as many pairs of equal nodes of two lists as possible without changing the order."""
    keys, other_keys = list(map(_key, nodes)), list(map(_key, others))
    # If there are several solutions, the matcher's choice depends on which list comes first.
    if keys > other_keys:
        yield from ((one, other) for other, one in _in_order(others, nodes))
        return
    for start, begin, size in SequenceMatcher(None, keys, other_keys, autojunk=False).get_matching_blocks():
        yield from zip(nodes[start : start + size], others[begin : begin + size], strict=True)


def _key(node: Node) -> tuple[str, str, int]:
    return node.kind, node.name, node.call


def _is_named(node: Node) -> bool:
    """Return True if kind, name and call identify the node within a recording."""
    return bool(node.name) and node.kind not in ("op", "backward", "optimizer")


def _aspects(node: Node, other: Node) -> Iterator[str]:
    """Yield the differences between two nodes, without their edges and position."""
    shown = {
        "class": (node.type_name, other.type_name),
        "outputs": (_shapes(node), _shapes(other)),
        "dtypes": (_dtypes(node), _dtypes(other)),
        "parameters": (str(node.parameters), str(other.parameters)),
        "tied": (", ".join(node.tied), ", ".join(other.tied)),
        "autograd": (", ".join(node.autograd), ", ".join(other.autograd)),
        "failed": (str(node.failed), str(other.failed)),
        "repeats": (str(node.repeats), str(other.repeats)),
        "parallel": (str(node.parallel), str(other.parallel)),
        "shared": (str(node.shared), str(other.shared)),
    }
    named, others = _arguments(node), _arguments(other)
    # Keep arguments apart from aspects, since an argument may have the name of an aspect, such as ``repeats``.
    given = [(name, (named.get(name, ""), others.get(name, ""))) for name in {**named, **others}]
    return (
        f"{aspect}: {mine or 'none'} -> {theirs or 'none'}"
        for aspect, (mine, theirs) in (*shown.items(), *given)
        if mine != theirs
    )


def _arguments(node: Node) -> dict[str, str]:
    """Return the arguments by name. An argument without a name is named by its position."""
    return {name or f"argument {place}": value for place, (name, value) in enumerate(node.arguments, 1)}


def _shown(edges: list[Edge], names: dict[int, str]) -> str:
    """Return the sources of edges as text."""
    sources = (
        names[each.source]
        + (f"[{', '.join(map(str, each.outputs))}]" if each.outputs else "")
        + (f" ×{each.multiplicity}" if each.multiplicity > 1 and not each.outputs else "")
        for each in edges
    )
    return ", ".join(sources) or "nothing"


def _shapes(node: Node) -> str:
    return ", ".join(map(str, node.outputs))


def _dtypes(node: Node) -> str:
    return ", ".join(meta.dtype for meta in node.outputs)
