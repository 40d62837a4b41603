"""Division of a U-Net into its two sides, the encoder and the decoder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from lightning_recorder.graph.model import Edge, Graph, Node
from lightning_recorder.graph.views.forms import TENSORS

__all__ = ["longest", "sides"]

_CONTAINERS = ("", "Sequential")
_FEWEST = 2  # minimum number of skip connections between the sides; one more if some have the same shape


def sides(graph: Graph) -> tuple[dict[int, int], list[Edge]] | None:
    """Return the side of each drawn node, 0 or 1, and the edges between the sides; None if the graph is no U-Net.

    The edges are the skip connections, followed by the edge from the end of the first side to the beginning of the
    second side. The tensor of each skip connection is computed from the tensor of the previous skip connection. The
    tensors are used in the opposite order, by functions or modules of one kind. A tensor that several nodes of the
    second side use, such as the embedding of a time step, is not a skip connection. If one of these nodes is of the
    kind that uses the skip connections, as in a U-Net++, the graph has no sides. A parameter or buffer that both sides
    use is not a skip connection either. A repeated block, or a block whose class has several calls, is not divided
    between the sides.

    Args:
        graph: A view.
    """
    nodes = [node for node in graph.nodes[1:] if not graph.children(node)]
    place = {node.id: number for number, node in enumerate(nodes)}
    onward = [e for e in graph.edges if not e.relates("next") and place[e.source] < place[e.target]]
    around = [{each.id: each.repeats for each in graph.ancestors(node)} for node in nodes]
    called = [0, *accumulate(node.kind == "module" for node in nodes)]
    starts: list[list[Edge]] = [[] for _ in nodes]
    ends: list[list[Edge]] = [[] for _ in nodes]
    for edge in onward:
        starts[place[edge.source]].append(edge)
        ends[place[edge.target]].append(edge)
    alike = _alike(graph)
    behind = _reachable(nodes, starts, place)
    found: dict[tuple[int, int, int], tuple[int, list[Edge]]] = {}
    across: dict[int, list[Edge]] = {}
    for cut in range(1, len(nodes)):
        # Only the edges of the node between two consecutive cuts change.
        for edge in ends[cut - 1]:
            across[edge.source].remove(edge)
            if not across[edge.source]:
                del across[edge.source]
        if starts[cut - 1]:
            across[nodes[cut - 1].id] = list(starts[cut - 1])
        ordered = sorted(across.items(), key=lambda each: place[each[0]])
        several = [users for _, users in ordered if len(users) > 1]
        single = [users[0] for source, users in ordered if len(users) == 1 and graph[source].kind not in TENSORS]
        deepest = [users for source, users in ordered if graph[source].kind not in TENSORS][-1:]
        bottom = sorted((edge for users in deepest for edge in users), key=lambda each: -place[each.target])
        if len(bottom) == 2 and single and _kind(bottom[0], graph) == _kind(single[-1], graph):
            # The last skip connection begins where the first side ends, at a level without a smaller one below it.
            single, several = [*single, *bottom], [users for users in several if users is not deepest[0]]
        kinds = [_kind(edge, graph) for edge in single]
        # Edges into nodes of other kinds are no skip connections. One may lead to the loss, for example.
        common = max(kinds[:-1], key=kinds.count, default="")
        edges = [edge for edge, kind in zip(single, kinds, strict=True) if kind == common or edge is single[-1]]
        both = around[cut - 1].keys() & around[cut].keys()
        calls = min(called[cut], called[-1] - called[cut])
        nested = calls >= len(edges) and _nested(edges, place) and _in_turn(edges, behind, place)
        plain = all(_kind(each, graph) != common for users in several for each in users)
        if nested and plain and alike.isdisjoint(both) and all(around[cut][each] == 1 for each in both):
            found[-len(edges), len(both), abs(len(nodes) - 2 * cut)] = cut, edges
    if not found:
        return None
    cut, edges = found[min(found)]
    return {number: int(at >= cut) for number, at in place.items()}, edges


def _kind(edge: Edge, graph: Graph) -> str:
    """Return the name of the function, or the class of the module, that uses the tensor of an edge."""
    user = graph[edge.target]
    user = graph[user.parent or graph.root.id] if user.kind == "port" else user
    return user.name if user.kind == "op" else user.type_name


def _nested(edges: Sequence[Edge], place: Mapping[int, int]) -> bool:
    """Return True if the edges, sorted by source, are nested and numerous enough for the sides of a U-Net."""
    skips = edges[:-1]
    shapes = {edge.tensor and edge.tensor.shape for edge in skips}
    ordered = all(place[one.target] > place[other.target] for one, other in pairwise(edges))
    return ordered and len(skips) >= _FEWEST + (len(shapes) < len(skips))


def _alike(graph: Graph) -> set[int]:
    """Return the calls for which another call of the same class exists, neither around nor inside them."""
    calls = Counter(call.type_name for call in graph.module_calls())
    line: Counter[int] = Counter()
    for call in graph.module_calls():
        for around in graph.ancestors(call):
            if around.type_name == call.type_name:
                line.update((call.id, around.id))
    blocks = (call for call in graph.module_calls() if call.type_name not in _CONTAINERS)
    return {call.id for call in blocks if calls[call.type_name] > line[call.id] + 1}


def _reachable(nodes: Sequence[Node], starts: Sequence[Sequence[Edge]], place: Mapping[int, int]) -> list[int]:
    """Return for each node a bit mask of the positions of the nodes that depend on it."""
    behind = [0] * len(nodes)
    for number in reversed(range(len(nodes))):
        behind[number] = 1 << number
        for edge in starts[number]:
            behind[number] |= behind[place[edge.target]]
    return behind


def _in_turn(edges: Sequence[Edge], behind: Sequence[int], place: Mapping[int, int]) -> bool:
    """Return True if each source depends on the source of the edge before, and each target on that of the next edge."""
    return all(
        behind[place[one.source]] >> place[other.source] & behind[place[other.target]] >> place[one.target] & 1
        for one, other in pairwise(edges)
    )


def longest(graph: Graph, side: Mapping[int, int]) -> int:
    """Return the number of nodes on the longest path that stays inside one side."""
    length = dict.fromkeys(side, 1)
    for node in graph.nodes:
        for edge in graph.into(node):
            if side[edge.source] == side[edge.target] and edge.source != edge.target and not edge.relates("next"):
                length[edge.target] = max(length[edge.target], length[edge.source] + 1)
    return max(length.values())
