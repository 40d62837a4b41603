"""Smaller graphs made from a recorded one: what to show of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import get_args

from lightning_recorder.errors import ArgumentError, check_integer
from lightning_recorder.graph.containers import gather
from lightning_recorder.graph.model import Edge, Graph, Kind, Node

__all__ = [
    "collapse",
    "drawn_nodes",
    "drop_dead_ends",
    "drop_isolated",
    "fit",
    "fold_repeats",
    "hide",
    "truncate",
    "without",
]

_LONGEST_UNIT = 8  # siblings that may repeat together, such as convolution, norm, activation, pool
_COMFORTABLE = (
    60  # nodes up to which a picture is read without effort, and has room for functions that only move values
)

PLUMBING = frozenset(
    (
        "view",
        "reshape",
        "transpose",
        "permute",
        "contiguous",
        "getitem",
        "unsqueeze",
        "squeeze",
        "expand",
        "expand_as",
        "flatten",
        "unflatten",
        "T",
        "mT",
        "chunk",
        "split",
        "to",
        "type_as",
        "float",
        "detach",
        "clone",
        "data",
        "requires_grad",
        "t",
        "long",
        "int",
        "half",
        "double",
        "bfloat16",
    )
)
"""Functions that move or name values without computing any."""


def collapse(graph: Graph, depth: int | None = None, *, leaves: bool = True) -> Graph:
    """Close the module calls at a depth, and those without a call inside at any depth.

    A closed call is a node in place of all that it holds; the edges of what it holds become its own, those within it
    go.

    Args:
        graph: Any graph.
        depth: The greatest depth that is shown; the root has 0, so 1 shows its children closed. ``None`` sets no limit.
        leaves: Close the calls that hold no other call, too; otherwise the functions inside them are shown.

    Raises:
        ArgumentError: If the depth is below 1.
    """
    if depth is not None:
        check_integer("depth", depth, 1)
    open_calls = {child.parent for child in graph.module_calls()} | {graph.root.id}
    closed = {
        node.id
        for node in graph.module_calls()
        if (leaves and node.id not in open_calls) or (depth is not None and node.depth >= depth)
    }
    target: dict[int, int] = {}
    parameters: dict[int, int] = {}
    counted: set[tuple[int, str]] = set()
    for node in graph.nodes:
        inside = target.get(node.parent) if node.parent is not None else None
        if inside in closed:
            target[node.id] = inside
            # A module that is called many times has its parameters once.
            if node.parameters and (inside, node.name) not in counted:
                counted.add((inside, node.name))
                parameters[inside] = parameters.get(inside, 0) + node.parameters
        else:
            target[node.id] = node.id
    kept = [
        replace(node, parameters=node.parameters + parameters.get(node.id, 0)) if node.id in closed else node
        for node in graph.nodes
        if target[node.id] == node.id
    ]
    # What a closed call takes is the number of tensors that come in, and not how often it reads each of them inside: of
    # one source no more than that gave.
    entering: dict[tuple[int, int], Edge] = {}
    for edge in graph.edges:
        goal = target[edge.target]
        if goal in closed and target[edge.source] != goal:
            most = max(1, len(graph[edge.source].outputs))
            before = entering.get((edge.source, goal))
            times = min(most, edge.multiplicity + (before.multiplicity if before else 0))
            entering[edge.source, goal] = replace(before or edge, target=goal, multiplicity=times)
        else:
            entering.setdefault((edge.source, edge.target), edge)
    return _rebuilt(graph, kept, target, entering.values())


def without(graph: Graph, kinds: Kind | Collection[Kind]) -> Graph:
    """Leave out the nodes of some kinds, with their edges.

    Raises:
        ArgumentError: If there is no such kind.
    """
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    if unknown := [kind for kind in kinds if kind not in get_args(Kind)]:
        raise ArgumentError(f"there are nodes of the kinds {', '.join(get_args(Kind))}; got {unknown[0]!r}")
    kept = [node for node in graph.nodes if node.kind not in kinds]
    return _rebuilt(graph, kept, {node.id: node.id for node in kept})


def hide(graph: Graph, names: Collection[str] = PLUMBING) -> Graph:
    """Leave out the ops with certain names and draw an edge past each: from what enters it to what uses it.

    An op that takes several tensors stays, as ``getitem`` with a computed index does: each of them tells something.
    """
    names = (names,) if isinstance(names, str) else names
    sources: dict[int, list[int]] = {}
    for edge in graph.edges:
        sources.setdefault(edge.target, []).append(edge.source)
    # In the order of time a node's source comes before it, so it is resolved already.
    past: dict[int, int] = {}
    for node in graph.nodes:
        entering = sources.get(node.id, [])
        if node.kind == "op" and node.name in names and len(entering) == 1:
            past[node.id] = past.get(entering[0], entering[0])
    kept = [node for node in graph.nodes if node.id not in past]
    edges = [
        replace(edge, source=past.get(edge.source, edge.source)) for edge in graph.edges if edge.target not in past
    ]
    return _rebuilt(graph, kept, {node.id: node.id for node in kept}, edges)


def drop_isolated(graph: Graph) -> Graph:
    """Leave out tensors that nothing uses, and ops that use nothing and are used by nothing."""
    joined = {edge.source for edge in graph.edges} | {edge.target for edge in graph.edges}
    kept = [node for node in graph.nodes if node.kind == "module" or node.id in joined]
    return _rebuilt(graph, kept, {node.id: node.id for node in kept})


def drop_dead_ends(graph: Graph) -> Graph:
    """Leave out the ops whose results end nowhere: metrics, copies that are logged, masks that are not used.

    What is followed are ops alone; a module call stays, used or not. In a graph without a backward pass every result
    may be the model's, so nothing is left out.
    """
    if not any(node.kind == "backward" for node in graph.nodes):
        return graph
    used: set[int] = set()
    targets: dict[int, list[int]] = {}
    for edge in graph.edges:
        targets.setdefault(edge.source, []).append(edge.target)
    # Users come after what they use in the order of time, so going backwards each is decided before it is needed.
    for node in reversed(graph.nodes):
        if node.kind != "op" or any(target in used for target in targets.get(node.id, [])):
            used.add(node.id)
    kept = [node for node in graph.nodes if node.id in used]
    return _rebuilt(graph, kept, {node.id: node.id for node in kept})


def fold_repeats(graph: Graph, least: int = 3, *, contents: Graph | None = None) -> Graph:
    """Draw equal siblings that follow each other once, with their number.

    A unit of one to eight siblings which contains a module and occurs at least ``least`` times in a row is kept once,
    with the number in ``repeats``. A unit of several siblings gets a frame for it: a module call with no name. For a
    single call that holds others two times are enough. Units are equal when classes, functions, shapes, parameters and
    what is inside are equal; the names of the modules may differ. Units of which none feeds the next are kept with
    ``parallel``; up to eight of them that hold only modules without others are left as they are, since each is worth
    its name, as those of query, key and value. An edge from one occurrence to the next is left out, one from outside
    into each of them gets their number as multiplicity.

    Args:
        graph: What to fold.
        least: How often a unit must occur.
        contents: The graph of which this is a view, if it has closed calls: then these are equal only if what they hold
            there is. By default what is closed is not looked into.
    """
    # Two calls that hold the same may still show different things, where a view leaves out what is not used.
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
    # An occurrence inside a folded call was folded there too, so a target may have a target.
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
    return _rebuilt(graph, kept, target, forward)


def _feeds(graph: Graph, joined: set[tuple[int, int]], unit: list[Node], following: list[Node]) -> bool:
    """Whether anything in one unit goes into anything in the next."""
    one, other = ([each for node in nodes for each in _subtree(graph, node)] for nodes in (unit, following))
    return any((source, goal) in joined for source in one for goal in other)


def _subtree(graph: Graph, node: Node) -> list[int]:
    """The ids of a node and all that it holds."""
    return [node.id, *(each for child in graph.children(node) for each in _subtree(graph, child))]


def truncate(graph: Graph, max_nodes: int) -> Graph:
    """Draw at most ``max_nodes`` nodes; what exceeds them becomes one node that says how many it stands for."""
    check_integer("max_nodes", max_nodes, 1)
    drawn = drawn_nodes(graph)
    if len(drawn) <= max_nodes:
        return graph
    # Two thirds from the start, a third from the end: both ends of the computation stay to be seen.
    head = (max_nodes - 1) * 2 // 3
    tail = max_nodes - 1 - head
    surplus = drawn[head : len(drawn) - tail]
    more = replace(
        surplus[0],
        kind="op",
        name=f"… {len(surplus)} more",
        parent=graph.root.id,
        depth=1,
        outputs=(),
        parameters=0,
        repeats=1,
        call=1,
    )
    gone = {node.id for node in surplus}
    target = {node.id: more.id if node.id in gone else node.id for node in graph.nodes}
    kept = [more if node.id == more.id else node for node in graph.nodes if target[node.id] == node.id]
    return _without_empty_calls(_rebuilt(graph, kept, target))


def drawn_nodes(graph: Graph) -> list[Node]:
    """The nodes of a view that are drawn as nodes and not as a frame around others."""
    parents = {node.parent for node in graph.nodes}
    return [
        node for node in graph.nodes if node.parent is not None and (node.kind != "module" or node.id not in parents)
    ]


def fit(graph: Graph, max_nodes: int = 150, depth: int | None = None) -> Graph:
    """The most telling view with a limited number of nodes.

    Parameters, buffers and isolated tensors are left out and repeated blocks folded. Then the greatest depth is taken
    at which the view fits. In a view of more than 60 nodes the functions that compute nothing (:data:`PLUMBING`) are
    hidden, and those whose results end nowhere left out.

    Args:
        graph: A recorded graph.
        max_nodes: The most nodes that the view may have.
        depth: A depth to start from; ``None`` takes the greatest that fits.

    Raises:
        ArgumentError: If ``max_nodes`` or ``depth`` is below 1.
    """
    check_integer("max_nodes", max_nodes, 1)
    if depth is not None:
        check_integer("depth", depth, 1)
    bare = gather(without(graph, ("parameter", "buffer")))
    deepest = max((node.depth for node in graph.module_calls()), default=1)
    view = bare
    for level in range(depth or deepest, 0, -1):
        closed = collapse(bare, level)
        for simpler, limit in ((closed, min(_COMFORTABLE, max_nodes)), (drop_dead_ends(hide(closed)), max_nodes)):
            view = _without_empty_calls(drop_isolated(fold_repeats(simpler, contents=bare)))
            if len(drawn_nodes(view)) <= limit:
                return view
    return truncate(view, max_nodes)


def _without_empty_calls(graph: Graph) -> Graph:
    """Leave out calls that were open and have lost all that they held."""
    joined = {edge.source for edge in graph.edges} | {edge.target for edge in graph.edges}
    while True:
        parents = {node.parent for node in graph.nodes}
        kept = [
            node
            for node in graph.nodes
            if node.kind != "module" or node.id in parents or node.id in joined or node.parent is None
        ]
        if len(kept) == len(graph.nodes):
            return graph
        graph = _rebuilt(graph, kept, {node.id: node.id for node in kept})


def _rebuilt(graph: Graph, nodes: list[Node], target: Mapping[int, int], edges: Iterable[Edge] | None = None) -> Graph:
    """The graph of some nodes, its edges led to their targets; equal ones are joined, loops and loose ends dropped."""
    there = {node.id for node in nodes}
    joined: dict[tuple[int, int], Edge] = {}
    for edge in graph.edges if edges is None else edges:
        ends = (target.get(edge.source, -1), target.get(edge.target, -1))
        if ends[0] == ends[1] or not there.issuperset(ends):
            continue
        old = joined.get(ends)
        joined[ends] = (
            replace(old, multiplicity=old.multiplicity + edge.multiplicity)
            if old
            else replace(edge, source=ends[0], target=ends[1])
        )
    return replace(graph, nodes=tuple(nodes), edges=tuple(joined.values()))


def _forms(graph: Graph) -> dict[int, int]:
    """A number for each node that two nodes share exactly when they and all that they hold look the same."""
    numbers: dict[object, int] = {}
    forms: dict[int, int] = {}
    # Children come after their parent in the order of time, so going backwards each is known before it is needed.
    for node in reversed(graph.nodes):
        inside = tuple(forms[child.id] for child in graph.children(node))
        # A module's name, and that of its parameters before the last dot, tells it from its siblings.
        name = "" if node.kind == "module" else node.name.rpartition(".")[2] if node.kind != "op" else node.name
        form = (node.kind, name, node.type_name, node.outputs, node.parameters, node.repeats, inside)
        forms[node.id] = numbers.setdefault(form, len(numbers))
    return forms


def _weight(graph: Graph, node: Node) -> int:
    """2 for a call that holds others, 1 for another call, 0 for an op."""
    return 0 if node.kind != "module" else 2 if graph.children(node) else 1


def _runs(forms: list[tuple[int, int]], weights: list[int], least: int) -> list[tuple[int, int, int]]:
    """Start, length of the unit and number of repetitions of each run, without overlaps."""
    runs = []
    start = 0
    while start < len(forms):
        best = (0, 0)
        for length in range(1, min(_LONGEST_UNIT, (len(forms) - start) // 2) + 1):
            unit = forms[start : start + length]
            weight = max(weights[start : start + length])
            if not weight:
                # Functions alone are no unit; in a long row of them this saves looking at all of it from each place.
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
    """Each node of one call led to its counterpart in an equal call."""
    pairs: dict[int, int] = {}
    todo = [(first, other)]
    while todo:
        kept, gone = todo.pop()
        pairs[gone.id] = kept.id
        todo.extend(zip(graph.children(kept), graph.children(gone), strict=True))
    return pairs
