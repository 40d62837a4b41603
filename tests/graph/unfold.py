"""The graph that a folded view stands for."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from lightning_recorder.graph import Edge, Graph, Node

__all__ = ["same_graph", "unfold"]

_TENSORS = ("parameter", "buffer", "tensor")
_Indices = dict[int, int]
"""The number of the repetition of each folded node around a node, or of the node itself."""


def unfold(view: Graph) -> Graph:
    """Return the graph of all repetitions, by the definition of :data:`Repetition`.

    Nodes have the names of the first repetition and new ids.
    """
    nodes = [view.root]
    copies: dict[tuple[int, frozenset[tuple[int, int]]], int] = {}
    found: list[tuple[Node, _Indices, int]] = []

    def add(node: Node, parent: int, indices: _Indices) -> None:
        for index in range(node.repeats):
            here = {**indices, node.id: index} if node.repeats > 1 else indices
            inside = parent
            if node.type_name or node.kind != "module":  # a frame has no class
                inside = max(number.id for number in view.nodes) + len(nodes)
                nodes.append(replace(node, id=inside, parent=parent, repeats=1, parallel=False))
                copies[node.id, frozenset(here.items())] = inside
                found.append((node, here, inside))
            for child in view.children(node):
                add(child, inside, here)

    for child in view.children(view.root):
        add(child, view.root.id, {})
    edges = []
    for node, indices, copy in found:
        for source, number, edge in _sources(view, node, indices):
            edges.append(Edge(copies[source], copy, number, edge.tensor, outputs=edge.outputs))
    return replace(view, nodes=tuple(nodes), edges=tuple(_joined(edges)))


def _joined(edges: list[Edge]) -> list[Edge]:
    joined: dict[tuple[int, int], Edge] = {}
    for edge in edges:
        before = joined.get((edge.source, edge.target))
        if before:
            places = _outputs(before) + _outputs(edge)
            edge = replace(before, multiplicity=before.multiplicity + edge.multiplicity, outputs=places)
        joined[edge.source, edge.target] = edge
    return list(joined.values())


def _outputs(edge: Edge) -> tuple[int, ...]:
    return edge.outputs or (0,) * edge.multiplicity


def _sources(view: Graph, node: Node, indices: _Indices) -> Iterator[tuple[Any, int, Edge]]:
    """Yield the copies of nodes that a copy of a node takes tensors from, in the order of the arguments."""

    def outermost(edge: Edge) -> object:
        return next((group for group, word in edge.across if word == "all"), id(edge))

    # Edges from all repetitions of a node are taken one repetition after the other.
    for _, block in itertools.groupby(view.into(node), outermost):
        taken = [
            (order, place, source, edge)
            for place, edge in enumerate(block)
            for order, source in _copies(view, edge, indices)
        ]
        for _, _, source, edge in sorted(taken, key=lambda each: (each[0], each[1])):
            number, rest = divmod(edge.multiplicity, view.occurrences(edge))
            assert not rest, edge
            yield source, number, edge


def _copies(view: Graph, edge: Edge, indices: _Indices) -> Iterator[tuple[tuple[int, ...], Any]]:
    words = dict(reversed(edge.across))  # "first" or the only word
    later = Counter(group for group, word in edge.across if word == "next")
    if any(indices[group] != later[group] for group, word in words.items() if word == "first"):
        return
    source = view[edge.source]
    around = [each for each in (source, *view.ancestors(source)) if each.repeats > 1][::-1]
    paired = [group for group, word in edge.across if word == "each"]
    partner = dict(zip(paired[::2], paired[1::2], strict=True))
    common = True  # the same repetition of the calls around both nodes
    choices: list[range] = []
    for group in around:
        word = words.get(group.id, "")
        common = common and group.id in indices
        if word == "next":
            index = indices[group.id] - later[group.id]
            common = False
            choices.append(range(index, index + 1) if index >= 0 else range(0))
        elif word == "all":
            choices.append(range(group.repeats))
        elif group.id in partner:
            choices.append(range(indices[partner[group.id]], indices[partner[group.id]] + 1))
        elif common or word == "same":
            choices.append(range(indices[group.id], indices[group.id] + 1))
        else:
            choices.append(range(group.repeats - 1, group.repeats))
    for choice in itertools.product(*choices):
        here = frozenset(zip((group.id for group in around), choice, strict=True))
        order = tuple(index for index, group in zip(choice, around, strict=True) if words.get(group.id) == "all")
        yield order, (source.id, here)


def same_graph(one: Graph, other: Graph) -> bool:
    """Return True if two graphs are equal except for ids, the names of modules, sizes, and the place of tensors."""
    return bool(_canonical(one) == _canonical(other))


def _canonical(graph: Graph) -> Any:
    order: list[Node] = []

    def walk(node: Node) -> None:
        order.append(node)
        for child in graph.children(node):
            walk(child)

    walk(graph.root)
    number = {node.id: place for place, node in enumerate(node for node in order if node.kind not in _TENSORS)}
    users: dict[int, list[Any]] = {}
    for edge in graph.edges:
        place = graph.into(graph[edge.target]).index(edge)
        users.setdefault(edge.source, []).append((number[edge.target], place))

    def key(node: Node) -> Any:
        if node.id in number:
            return number[node.id]
        return _label(node), number[node.parent or 0], tuple(sorted(users.get(node.id, [])))

    nodes = [
        (
            _label(node),
            None if node.parent is None else number[node.parent],
            [(key(graph[edge.source]), edge.multiplicity, sorted(_outputs(edge))) for edge in graph.into(node)],
        )
        for node in order
        if node.id in number
    ]
    return nodes, sorted(str(key(node)) for node in order if node.kind in _TENSORS)


def _label(node: Node) -> Any:
    name = "" if node.kind == "module" else node.name if node.kind == "op" else node.name.rpartition(".")[2]
    name = "#" if name.isdigit() else name
    return node.kind, name, node.type_name, node.parameters, [(len(meta.shape), meta.dtype) for meta in node.outputs]
