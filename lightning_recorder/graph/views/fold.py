"""A view that draws equal consecutive parts of a model once."""

from __future__ import annotations

from dataclasses import replace

from lightning_recorder.graph.model import Graph, Node
from lightning_recorder.graph.views.rebuild import rebuilt

__all__ = ["fold_repeats"]

_LONGEST_UNIT = 8  # siblings that may repeat together, such as convolution, norm, activation, pool


def fold_repeats(graph: Graph, least: int = 3, *, contents: Graph | None = None) -> Graph:
    """Draw equal consecutive siblings once, with their number.

    A unit of one to eight siblings that contains a module and occurs at least ``least`` times in a row is kept once,
    with the number of occurrences in ``repeats``. A unit of several siblings gets a frame: a module call without a
    name. Two occurrences suffice for a single call that contains others. Units are equal if their classes, functions,
    shapes, parameters and contents are equal; the names of the modules may differ. Units without edges between them are
    marked as ``parallel``. Up to eight parallel units whose modules contain no others are not folded, since their names
    are informative, such as those of query, key and value. An edge from one occurrence to the next is removed. An edge
    from outside into each occurrence gets the number of occurrences as its multiplicity.

    Args:
        graph: The graph to fold.
        least: The smallest number of occurrences of a unit.
        contents: The graph of which ``graph`` is a view. If given, closed calls are equal only if their contents in it
            are equal. By default the contents of closed calls are not compared.
    """
    # Two calls with equal contents may still look different, in a view that omits unused nodes.
    shown, held = _forms(graph), _forms(contents or graph)
    forms = {node.id: (shown[node.id], held[node.id]) for node in graph.nodes}
    target = {node.id: node.id for node in graph.nodes}
    folded: dict[int, Node] = {}
    frames: dict[int, Node] = {}
    joined = {(edge.source, edge.target) for edge in graph.edges}
    free = max(target) + 1
    for parent in graph.nodes:
        siblings = [node for node in graph.children(parent) if node.kind in ("module", "op")]
        weights = [_weight(graph, node) for node in siblings]
        for start, length, times in _runs([forms[node.id] for node in siblings], weights, least):
            units = [siblings[start + length * index : start + length * (index + 1)] for index in range(times)]
            parallel = not _feeds(graph, joined, units[0], units[1])
            if parallel and max(weights[start : start + length]) == 1 and times <= _LONGEST_UNIT:
                continue
            for unit in units[1:]:
                for first, other in zip(units[0], unit, strict=True):
                    target.update(_paired(graph, first, other))
            first = units[0][0]
            if length == 1:
                folded[first.id] = replace(first, repeats=first.repeats * times, parallel=parallel)
                continue
            frames[first.id] = Node(free, "module", "", parent.id, first.depth, repeats=times, parallel=parallel)
            folded.update({node.id: replace(node, parent=free) for node in units[0]})
            free += 1
    # A node inside a folded call may be folded itself, so a target may have a target.
    for node_id, counterpart in target.items():
        while target[counterpart] != counterpart:
            counterpart = target[counterpart]
        target[node_id] = counterpart
    kept: list[Node] = []
    for node in graph.nodes:
        if target[node.id] == node.id:
            kept.extend([frames[node.id]] if node.id in frames else [])
            kept.append(folded.get(node.id, node))
    place = {node.id: number for number, node in enumerate(graph.nodes)}
    forward = [edge for edge in graph.edges if place[target[edge.source]] < place[target[edge.target]]]
    return rebuilt(graph, kept, target, forward)


def _feeds(graph: Graph, joined: set[tuple[int, int]], unit: list[Node], following: list[Node]) -> bool:
    """Return True if there is an edge from one unit to the next."""
    one, other = ([each for node in nodes for each in _subtree(graph, node)] for nodes in (unit, following))
    return any((source, goal) in joined for source in one for goal in other)


def _subtree(graph: Graph, node: Node) -> list[int]:
    """Return the ids of a node and of all nodes inside it."""
    return [node.id, *(each for child in graph.children(node) for each in _subtree(graph, child))]


def _forms(graph: Graph) -> dict[int, int]:
    """Return a number for each node; two numbers are equal exactly if the nodes and their contents look the same."""
    numbers: dict[object, int] = {}
    forms: dict[int, int] = {}
    # Children come after their parent in the order of time, so in reverse order they are known first.
    for node in reversed(graph.nodes):
        inside = tuple(forms[child.id] for child in graph.children(node))
        # A module differs from its siblings by its name, and a parameter by its name before the last dot.
        name = "" if node.kind == "module" else node.name.rpartition(".")[2] if node.kind != "op" else node.name
        form = (node.kind, name, node.type_name, node.outputs, node.parameters, node.repeats, inside)
        forms[node.id] = numbers.setdefault(form, len(numbers))
    return forms


def _weight(graph: Graph, node: Node) -> int:
    """Return 2 for a call that contains others, 1 for any other call, 0 for an op."""
    return 0 if node.kind != "module" else 2 if graph.children(node) else 1


def _runs(forms: list[tuple[int, int]], weights: list[int], least: int) -> list[tuple[int, int, int]]:
    """Return the start, unit length and number of repetitions of each run, without overlaps."""
    runs = []
    start = 0
    while start < len(forms):
        best = (0, 0)
        for length in range(1, min(_LONGEST_UNIT, (len(forms) - start) // 2) + 1):
            unit = forms[start : start + length]
            weight = max(weights[start : start + length])
            if not weight:
                # Functions alone are not a unit. This also avoids a full search at each position of a long row of them.
                continue
            enough = 2 if length == 1 and weight == 2 else least
            times = 1
            while forms[start + times * length : start + (times + 1) * length] == unit:
                times += 1
            if times >= enough and times * length > best[0] * best[1]:
                best = (length, times)
        if best[0]:
            runs.append((start, *best))
        start += max(1, best[0] * best[1])
    return runs


def _paired(graph: Graph, first: Node, other: Node) -> dict[int, int]:
    """Map each node of one call to its counterpart in an equal call."""
    pairs: dict[int, int] = {}
    todo = [(first, other)]
    while todo:
        kept, gone = todo.pop()
        pairs[gone.id] = kept.id
        todo.extend(zip(graph.children(kept), graph.children(gone), strict=True))
    return pairs
