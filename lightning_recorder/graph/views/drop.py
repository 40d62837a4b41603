"""Views that remove nodes: nodes of a kind, functions with certain names, unused results."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import get_args

from lightning_recorder.errors import ArgumentError
from lightning_recorder.graph.model import IN_PLACE, Edge, Graph, Kind, Node
from lightning_recorder.graph.views.constants import UPDATE
from lightning_recorder.graph.views.rebuild import rebuilt

__all__ = [
    "PLUMBING",
    "drop_caches",
    "drop_dead_ends",
    "drop_empty_calls",
    "drop_isolated",
    "drop_zeros",
    "hide",
    "join_sums",
    "with_differences",
    "without",
]

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
        "type",
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
        "view_as",
        "reshape_as",
        "swapaxes",
        "swapdims",
        "movedim",
        "moveaxis",
        "narrow",
        "select",
        "unbind",
        "ravel",
    )
)
"""Functions that move or rename values without computing any."""

# Names that libraries use, in the paths of inputs and outputs, for the states of earlier tokens: ``past_key_values`` or
# ``cache_params``.
_CACHE = re.compile(r"(?<![a-z])(past_key_values?|caches?)(?![a-z])")

_ZERO = (("other", "0"),)  # the arguments of an addition of 0
_LEAST_SUM = 4  # minimum number of additions to join, not counting additions of 0

_LONGEST_INDEX = 14  # the maximum number of characters of an index that is shown at an edge


def without(graph: Graph, kinds: Kind | Collection[Kind]) -> Graph:
    """Remove the nodes of some kinds, with their edges.

    Raises:
        ArgumentError: If a kind does not exist.
    """
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    if unknown := [kind for kind in kinds if kind not in get_args(Kind)]:
        raise ArgumentError(f"the kinds of nodes are {', '.join(get_args(Kind))}; got {unknown[0]!r}")
    kept = [node for node in graph.nodes if node.kind not in kinds]
    return rebuilt(graph, kept, {node.id: node.id for node in kept})


def hide(graph: Graph, names: Collection[str] = PLUMBING) -> Graph:
    """Remove the ops with certain names and connect their inputs directly to their users.

    These ops stay: an op with several input tensors, such as ``getitem`` with a computed index; an op of a folded view
    that passes a tensor from one repetition to another; and an op with a note, such as a ``detach`` that stops the
    gradient. If another op of the same name has a note, an unused op also stays and gets this note, since the unused op
    may be the last step of a loop.
    """
    names = (names,) if isinstance(names, str) else names
    # A tensor without elements has no effect. An example is the initial cache to which keys and values are appended.
    empty = {node.id for node in graph.nodes if node.kind in ("op", "tensor") and _is_empty(node)}
    entering: dict[int, list[Edge]] = {}
    for edge in graph.edges:
        if edge.source not in empty:
            entering.setdefault(edge.target, []).append(edge)
    users: dict[int, list[int]] = {}
    for edge in graph.edges:
        users.setdefault(edge.source, []).append(edge.target)
    noted = {node.name: node.note for node in graph.nodes if node.kind == "op" and node.remark}
    past: dict[int, Edge] = {}
    """By hidden node: the edge from a shown node that its values come from."""
    related = {end for edge in graph.edges if edge.across for end in (edge.source, edge.target)}
    for node in graph.nodes:
        into = entering.get(node.id, [])
        known = node.name in names or (node.name == "cat" and len(into) < len(graph.into(node)))
        known = known and (node.name not in noted or node.id in users)
        hidden = node.kind == "op" and known and not node.remark and not node.failed
        if hidden and len(into) == 1 and node.id not in related:
            past[node.id] = _led_past(into[0], past, graph)
    gone = past.keys() | {node for node in empty if all(user in past for user in users.get(node, ()))}
    # An unused last step of a loop gets the note of the other steps, so that all steps are equal.
    kept = [
        replace(node, note=noted[node.name]) if node.name in noted and node.id not in users else node
        for node in graph.nodes
        if node.id not in gone
    ]
    edges = [_led_past(edge, past, graph) for edge in graph.edges if edge.target not in gone]
    return rebuilt(graph, kept, {node.id: node.id for node in kept}, edges)


def drop_zeros(graph: Graph) -> Graph:
    """Remove additions of the number 0, such as the length of an empty cache. Connect their inputs to their users.

    An addition whose result is added to another tensor is kept. It may be the start of a sum, whose other additions it
    is folded with.

    Args:
        graph: A view, folded or not.
    """
    summed = {edge.source for edge in graph.edges if graph[edge.target].name == "add"}
    kept_ids = summed | {end for edge in graph.edges if edge.across for end in (edge.source, edge.target)}
    past: dict[int, Edge] = {}
    for node in graph.nodes:
        is_zero = node.kind == "op" and node.name == "add" and node.arguments == _ZERO
        if is_zero and not (node.remark or node.failed) and len(graph.into(node)) == 1 and node.id not in kept_ids:
            past[node.id] = _led_past(graph.into(node)[0], past, graph)
    kept = [node for node in graph.nodes if node.id not in past]
    edges = [_led_past(edge, past, graph) for edge in graph.edges if edge.target not in past]
    return rebuilt(graph, kept, {node.id: node.id for node in kept}, edges) if past else graph


def with_differences(graph: Graph) -> Graph:
    """Replace ``rsub`` by ``sub`` where a tensor is subtracted from the number 0 and the next ``sub`` takes the result.

    A loop that subtracts a term in each step starts so. Its first step is then equal to the others.

    Args:
        graph: A view that is not folded.
    """
    users: dict[int, list[Edge]] = {}
    for edge in graph.edges:
        users.setdefault(edge.source, []).append(edge)
    nodes = list(graph.nodes)
    for place, node in enumerate(nodes):
        if node.name == "rsub" and node.arguments in (_ZERO, (("other", "0.0"),)) and len(users.get(node.id, ())) == 1:
            user = graph[users[node.id][0].target]
            if user.name == "sub" and not user.arguments and graph.into(user)[0].source == node.id:
                nodes[place] = replace(node, name="sub", arguments=(("input", "0"),), autograd=user.autograd)
    return replace(graph, nodes=tuple(nodes))


def join_sums(graph: Graph) -> Graph:
    """Join four or more additions, each of which only the next one takes, into one addition of all tensors.

    The tensors are in execution order, as in the sum of the terms of a loss.

    Args:
        graph: A view, folded or not. Additions that pass a tensor from one repetition to another are kept.
    """
    related = {end for edge in graph.edges if edge.across for end in (edge.source, edge.target)}
    users: dict[int, list[Edge]] = {}
    for edge in graph.edges:
        users.setdefault(edge.source, []).append(edge)
    chains: dict[int, list[int]] = {}
    """By last addition: all additions of a sum."""
    for node in graph.nodes:
        is_plain = node.name == "add" and node.arguments in ((), _ZERO) and not (node.remark or node.failed)
        if node.kind != "op" or not is_plain or node.id in related:
            continue
        before = [
            edge.source
            for edge in graph.into(node)
            if edge.source in chains
            and len(users[edge.source]) == edge.multiplicity == 1
            and _place(graph[edge.source]) == _place(node)
        ]
        chains[node.id] = [each for one in before for each in chains.pop(one)] + [node.id]
    target = {node.id: node.id for node in graph.nodes}
    for last, chain in chains.items():
        entering = [edge for each in chain for edge in graph.into(graph[each]) if edge.source not in chain]
        if sum(edge.multiplicity for edge in entering) > _LEAST_SUM:
            target |= dict.fromkeys(chain, last)
    if all(one == other for one, other in target.items()):
        return graph
    place = {node.id: number for number, node in enumerate(graph.nodes)}
    sums = {last for each, last in target.items() if each != last}
    edges = sorted(graph.edges, key=lambda edge: place[edge.source] + 1 if target[edge.target] in sums else 0)
    kept = [
        replace(node, arguments=()) if node.id in sums else node for node in graph.nodes if target[node.id] == node.id
    ]
    return rebuilt(graph, kept, target, edges)


def _place(node: Node) -> tuple[object, ...]:
    return node.parent, node.scope, node.note, node.repeats


def drop_caches(graph: Graph) -> Graph:
    """Remove the outputs that hold keys, values or states for a later call, of which there may be one per layer.

    These outputs stay if the graph also has a cache as an input, or if it has no other output and no backward pass.
    """
    caches = {node.id for node in graph.nodes if node.kind in ("input", "output") and _CACHE.search(node.name)}
    others = any(node.kind in ("output", "backward") for node in graph.nodes if node.id not in caches)
    if not caches or not others or any(graph[each].kind == "input" for each in caches):
        return graph
    kept = [node for node in graph.nodes if node.id not in caches]
    return rebuilt(graph, kept, {node.id: node.id for node in kept})


def _is_empty(node: Node) -> bool:
    return bool(node.outputs) and all(0 in meta.shape for meta in node.outputs)


def _led_past(edge: Edge, past: Mapping[int, Edge], graph: Graph) -> Edge:
    """Return the edge with its source replaced by the shown node behind it. The tensor of the edge does not change."""
    shown = past.get(edge.source)
    if shown is None:
        return edge
    part = shown.part + _part(graph[edge.source], edge)
    return replace(edge, source=shown.source, outputs=shown.outputs, part=part)


def _part(node: Node, edge: Edge) -> str:
    """Return the part of its input that a hidden function passes on along an edge, such as ``2`` or ``[:, 4:]``."""
    if len(node.outputs) > 1:
        return ", ".join(map(str, edge.outputs or (0,)))
    arguments = dict(node.arguments)
    if node.name == "select":
        return f"[{arguments.get('index', '0')}]"
    index = arguments.get("index", "") if node.name == "getitem" else ""
    index = re.sub(r"^\.\.\., |(, :)+$|[()]|,(?=\))", "", index)
    return f"[{index}]" if re.search("[0-9]", index) and "None" not in index and len(index) <= _LONGEST_INDEX else ""


def drop_isolated(graph: Graph) -> Graph:
    """Remove all nodes without edges, except module calls and functions that change parameters."""
    joined = {edge.source for edge in graph.edges} | {edge.target for edge in graph.edges}
    updates = _updates(graph)
    kept = [node for node in graph.nodes if node.kind == "module" or node.id in joined or node.id in updates]
    return rebuilt(graph, kept, {node.id: node.id for node in kept})


def drop_dead_ends(graph: Graph) -> Graph:
    """Remove the ops with unused results: metrics, copies for logging, unused masks.

    Module calls and functions that change parameters stay, even if their results are unused. Nothing is removed from a
    graph without outputs and without a backward pass, since any result may be a result of the model.
    """
    if not any(node.kind in ("backward", "output") for node in graph.nodes):
        return graph
    # A result may be used by the next repetition of a folded call.
    todo = [node.id for node in graph.nodes if node.kind != "op"] + [*_updates(graph)]
    todo += [edge.source for edge in graph.edges if edge.relates("next")]
    used = set(todo)
    while todo:
        new = {edge.source for edge in graph.into(graph[todo.pop()])} - used
        used |= new
        todo += new
    kept = [node for node in graph.nodes if node.id in used]
    return rebuilt(graph, kept, {node.id: node.id for node in kept})


def _updates(graph: Graph) -> set[int]:
    """Return the functions that write to a parameter, such as the update of a moving average at the end of a step.

    A function writes to its first input. In a view, :attr:`Node.tied` has the names of parameters of closed calls.
    """
    found: set[int] = set()
    for node in graph.nodes:
        if node.kind == "op" and node.note.endswith((IN_PLACE, UPDATE)):
            first = next((edge.source for edge in graph.into(node)), None)
            if node.tied or (first is not None and (first in found or graph[first].kind == "parameter")):
                found.add(node.id)
    return found


def drop_empty_calls(graph: Graph) -> Graph:
    """Remove expanded calls whose contents have all been dropped."""
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
        graph = rebuilt(graph, kept, {node.id: node.id for node in kept})
