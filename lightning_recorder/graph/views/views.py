"""Views: smaller graphs made from a recorded one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import get_args

from lightning_recorder.errors import ArgumentError, check_integer
from lightning_recorder.graph.model import Edge, Graph, Kind, Node
from lightning_recorder.graph.views.gather import gather

__all__ = [
    "collapse",
    "drawn_nodes",
    "drop_dead_ends",
    "drop_isolated",
    "fit_view",
    "fold_repeats",
    "hide",
    "truncate",
    "without",
]

_LONGEST_UNIT = 8  # siblings that may repeat together, such as convolution, norm, activation, pool
# The number of nodes up to which a picture is easy to read and has room for functions that only move values.
_COMFORTABLE = 60

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
"""Functions that move or rename values without computing any."""


def collapse(graph: Graph, depth: int | None = None, *, leaves: bool = True) -> Graph:
    """Close the module calls at a depth, and the calls that contain no other call at any depth.

    A closed call is a single node in place of its contents. It takes over the edges of its contents; edges inside it
    are removed.

    Args:
        graph: Any graph.
        depth: The greatest depth that is shown. The root has depth 0, so 1 shows its children closed. ``None`` sets no
            limit.
        leaves: Also close the calls that contain no other call; otherwise the functions inside them are shown.

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
            # The parameters of a module that is called several times count once.
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
    # The multiplicity of an edge into a closed call is the number of tensors that enter it, not the number of reads
    # inside. It is at most the number of outputs of the source.
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
    """Remove the nodes of some kinds, with their edges.

    Raises:
        ArgumentError: If a kind does not exist.
    """
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    if unknown := [kind for kind in kinds if kind not in get_args(Kind)]:
        raise ArgumentError(f"there are nodes of the kinds {', '.join(get_args(Kind))}; got {unknown[0]!r}")
    kept = [node for node in graph.nodes if node.kind not in kinds]
    return _rebuilt(graph, kept, {node.id: node.id for node in kept})


def hide(graph: Graph, names: Collection[str] = PLUMBING) -> Graph:
    """Remove the ops with certain names and connect their input directly to their users.

    An op that takes several tensors stays, such as ``getitem`` with a computed index, since each of its inputs matters.
    """
    names = (names,) if isinstance(names, str) else names
    sources: dict[int, list[int]] = {}
    for edge in graph.edges:
        sources.setdefault(edge.target, []).append(edge.source)
    # Nodes are in the order of time, so the source of a node is resolved before the node.
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
    """Remove tensors that nothing uses, and ops without any edges."""
    joined = {edge.source for edge in graph.edges} | {edge.target for edge in graph.edges}
    kept = [node for node in graph.nodes if node.kind == "module" or node.id in joined]
    return _rebuilt(graph, kept, {node.id: node.id for node in kept})


def drop_dead_ends(graph: Graph) -> Graph:
    """Remove the ops with unused results: metrics, copies for logging, unused masks.

    Only ops are removed; a module call stays, used or not. In a graph without a backward pass nothing is removed, since
    every result may be a result of the model.
    """
    if not any(node.kind == "backward" for node in graph.nodes):
        return graph
    used: set[int] = set()
    targets: dict[int, list[int]] = {}
    for edge in graph.edges:
        targets.setdefault(edge.source, []).append(edge.target)
    # Users come after their sources in the order of time, so in reverse order they are decided first.
    for node in reversed(graph.nodes):
        if node.kind != "op" or any(target in used for target in targets.get(node.id, [])):
            used.add(node.id)
    kept = [node for node in graph.nodes if node.id in used]
    return _rebuilt(graph, kept, {node.id: node.id for node in kept})


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
    return _rebuilt(graph, kept, target, forward)


def _feeds(graph: Graph, joined: set[tuple[int, int]], unit: list[Node], following: list[Node]) -> bool:
    """Return True if there is an edge from one unit to the next."""
    one, other = ([each for node in nodes for each in _subtree(graph, node)] for nodes in (unit, following))
    return any((source, goal) in joined for source in one for goal in other)


def _subtree(graph: Graph, node: Node) -> list[int]:
    """Return the ids of a node and of all nodes inside it."""
    return [node.id, *(each for child in graph.children(node) for each in _subtree(graph, child))]


def truncate(graph: Graph, max_nodes: int) -> Graph:
    """Draw at most ``max_nodes`` nodes; the excess is replaced by one node that shows the number of nodes removed."""
    check_integer("max_nodes", max_nodes, 1)
    drawn = drawn_nodes(graph)
    if len(drawn) <= max_nodes:
        return graph
    # Keep two thirds at the start and one third at the end, so that both ends of the computation are visible.
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
    """Return the nodes of a view that are drawn as nodes, not as frames around others."""
    parents = {node.parent for node in graph.nodes}
    return [
        node for node in graph.nodes if node.parent is not None and (node.kind != "module" or node.id not in parents)
    ]


def fit_view(graph: Graph, max_nodes: int = 150, depth: int | None = None) -> Graph:
    """Return the most detailed view with a limited number of nodes.

    Parameters, buffers and isolated tensors are removed and repeated blocks are folded. Then the greatest depth at
    which the view fits is used. If a view has more than 60 nodes, functions that compute nothing (:data:`PLUMBING`) are
    hidden and ops with unused results are removed.

    Args:
        graph: A recorded graph.
        max_nodes: The largest number of nodes in the view.
        depth: The depth to start from; ``None`` uses the greatest depth that fits.

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
    """Remove calls that were open and have lost all of their contents."""
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
    """Return a graph of some nodes and redirected edges; equal edges are merged, loops and dangling edges removed."""
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
