"""A view in which a tensor that is used more than once enters a frame once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from lightning_recorder.graph.model import Edge, Graph, Node, Repetition

__all__ = ["CHAIN", "with_ports"]

CHAIN = "chain"
"""The name of a port at which each repetition takes a result of the repetition before it."""

Across = tuple[tuple[int, Repetition], ...]
Tensor = tuple[int, Across, tuple[int, ...]]
"""The source of an edge, its relations to repetitions, and the indices of its tensors among the source's outputs."""
Chain = tuple[tuple[Tensor, ...], Tensor]
"""The tensors that the first repetition takes, and the tensor that each later repetition takes instead."""


def with_ports(graph: Graph) -> Graph:
    """Lead the tensors that are used more than once inside a call through ports: nodes of the kind ``port``.

    A port is at the beginning of a call. It has an edge from the source outside, and edges to the users inside.

    A folded call gets a port named ``chain`` for a tensor that is passed on: the first repetition takes it from
    outside, and each later repetition takes it from the repetition before. If no other tensor leaves the call, there is
    no edge to the next repetition. Otherwise this edge leads to the port. A closed call gets no port. Its edges to the
    next repetition are removed under the same condition.

    Args:
        graph: A view.

    Example:
        >>> import torch
        >>> from lightning_recorder.graph import capture_graph, fit_view
        >>> class Block(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x + x.tanh()
        >>> blocks = torch.nn.Sequential(Block(), Block())
        >>> view = with_ports(fit_view(capture_graph(blocks, torch.ones(2)), leaves=False))
        >>> [(view[edge.source].name, view[edge.target].name) for edge in view.edges]
        [('input', 'chain'), ('chain', 'tanh'), ('chain', 'add'), ('tanh', 'add'), ('add', 'output')]
    """
    ports = _Ports(graph)
    parents = {node.parent for node in graph.nodes}
    level = {graph.root.id: 0}
    for node in graph.nodes[1:]:
        level[node.id] = level[node.parent or graph.root.id] + 1
    # From the inside out, so that an outer call leads its tensors to the ports of inner calls.
    nodes = sorted(graph.nodes[1:], key=lambda each: -level[each.id])
    for node in nodes:
        if node.repeats > 1:
            ports.join_chains(node, framed=node.id in parents)
    for node in nodes:
        if node.kind == "module" and node.id in parents:
            ports.join_inputs(node)
    return ports.result()


class _Ports:
    """The ports and edges of a graph while ports are added."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._instead: dict[Edge, list[Edge]] = {}
        """The edges that replace each removed edge."""
        self._times: dict[Edge, int] = {}
        """The number of tensors that each new edge represents in one repetition."""
        self._ports: dict[int, list[Node]] = {}
        self._free = max(node.id for node in graph.nodes) + 1
        self._several = {node.id for node in graph.nodes if len(node.outputs) > 1}
        self._inside: dict[int, set[int]] = {}
        for node in graph.nodes:
            for around in graph.ancestors(node):
                self._inside.setdefault(around.id, set()).add(node.id)
        self._entering: dict[int, dict[Edge, None]] = {}
        """By call: the edges into the call from outside."""
        self._related: dict[int, dict[Edge, None]] = {}
        """By repeated node: the edges with the relation ``first`` or ``next`` to this node."""
        for edge in graph.edges:
            self._register(edge, graph[edge.target])

    def _register(self, edge: Edge, target: Node) -> None:
        for around in self._graph.ancestors(target):
            if edge.source in self._inside[around.id]:
                break
            self._entering.setdefault(around.id, {})[edge] = None
        for group, word in edge.across:
            if word in ("first", "next"):
                self._related.setdefault(group, {})[edge] = None

    def _edges(self) -> Iterator[Edge]:
        """Yield the edges, in the order of their first use."""
        for edge in self._graph.edges:
            todo = [edge]
            while todo:
                each = todo.pop()
                if each in self._instead:
                    todo += reversed(self._instead[each])
                else:
                    yield each

    def result(self) -> Graph:
        """Return the graph with the ports."""
        nodes = [each for node in self._graph.nodes for each in (node, *self._ports.get(node.id, ()))]
        graph = replace(self._graph, nodes=tuple(nodes))
        edges = (
            replace(edge, multiplicity=self._times[edge] * graph.occurrences(edge)) if edge in self._times else edge
            for edge in self._edges()
        )
        return replace(graph, edges=tuple(edges))

    def join_inputs(self, call: Node) -> None:
        """Add a port for each tensor from outside that several nodes inside a call take."""
        inside = self._inside[call.id]
        groups: dict[tuple[Tensor, tuple[str, str]], list[Edge]] = {}
        for edge in self._entering.get(call.id, ()):
            # Leave out edges with a relation to repetitions inside the call: it would not hold at a port of the call.
            if edge not in self._instead and inside.isdisjoint(each for each, _ in edge.across):
                # The output indices of a closed call are not known, but a tensor has one name and one dtype.
                one = edge.part, edge.tensor.dtype if edge.tensor else ""
                one = one if edge.source in self._several else ("", "")
                groups.setdefault(((edge.source, edge.across, edge.outputs), one), []).append(edge)
        for (tensor, _), edges in groups.items():
            if len(edges) > 1:
                self._add_port(call, "", [tensor], edges)

    def join_chains(self, call: Node, *, framed: bool) -> None:
        """Join the edges of the tensors that each repetition of a node passes on to the next repetition.

        Args:
            call: The repeated node.
            framed: True if the contents of the node are drawn.
        """
        inside = self._inside.get(call.id, set()) | {call.id}
        related: dict[int, list[Edge]] = {}
        for edge in self._related.get(call.id, ()):
            if edge not in self._instead and edge.target in inside:
                related.setdefault(edge.target, []).append(edge)
        chains: dict[Chain, list[Edge]] = {}
        for edges in related.values():
            chain = _chain(edges, call)
            if chain is not None:
                chains.setdefault(chain, []).extend(edges)
        known = sum(map(len, chains.values())) == sum(map(len, related.values()))
        for (firsts, onward), edges in chains.items():
            alone = known and len(chains) == 1 and self._leaving(call, inside) == {(onward[0], onward[2])}
            if framed:
                self._add_port(call, CHAIN, [*firsts, *([] if alone else [onward])], edges)
            elif alone and all(edge in edges for edge in self._edges() if edge.target == call.id):
                # With other edges into the node, the chain would not be distinguishable from these edges.
                first = [edge for edge in edges if "first" in _words(edge, call)]
                plain = [replace(edge, across=_without(edge, call)) for edge in first]
                self._replace(edges, plain, [self._shown(edge) for edge in first])
                for edge in plain:
                    self._register(edge, call)

    def _leaving(self, call: Node, inside: Collection[int]) -> set[tuple[int, tuple[int, ...]]]:
        """Return the nodes inside a call whose outputs leave its last repetition, with the indices of these outputs."""
        found = set()
        for edge in self._edges():
            outer = any(word == "next" and group not in inside for group, word in edge.across)
            if edge.source in inside and (edge.target not in inside or outer) and "all" not in _words(edge, call):
                found.add((edge.source, edge.outputs))
        return found

    def _add_port(self, call: Node, name: str, tensors: Sequence[Tensor], edges: Sequence[Edge]) -> None:
        """Lead edges through a new port inside a call."""
        port = Node(self._free, "port", name, call.id, call.depth + 1, scope=call.scope, source=call.source)
        self._free += 1
        self._ports.setdefault(call.id, []).append(port)
        for around in (call, *self._graph.ancestors(call)):
            self._inside[around.id].add(port.id)
        whole = _common(edge.part for edge in edges)
        outer = [Edge(one, port.id, 1, edges[0].tensor, across, outputs, whole) for one, across, outputs in tensors]
        shown: dict[int, int] = {}
        parts: dict[int, list[str]] = {}
        for edge in edges:
            shown[edge.target] = max(self._shown(edge), shown.get(edge.target, 0))
            parts.setdefault(edge.target, []).append("" if whole else edge.part)
        inner = [Edge(port.id, target, 1, edges[0].tensor, part=_common(parts[target])) for target in shown]
        for edge in outer:
            self._register(edge, port)
        self._replace(edges, [*outer, *inner], [*(max(1, len(each.outputs)) for each in outer), *shown.values()])

    def _shown(self, edge: Edge) -> int:
        """Return the number of tensors that an edge represents in one repetition."""
        return self._times.get(edge) or max(1, edge.multiplicity // self._graph.occurrences(edge))

    def _replace(self, old: Sequence[Edge], new: Sequence[Edge], times: Sequence[int]) -> None:
        """Replace edges. A new edge has the position of an old edge with the same target, or of the first old edge.

        ``times`` has the number of tensors of each new edge.
        """
        first = {edge.target: edge for edge in reversed(old)}
        for edge in old:
            self._instead[edge] = []
        for edge, number in zip(new, times, strict=True):
            self._instead[first.get(edge.target, old[0])].append(edge)
            self._times[edge] = number


def _common(words: Iterable[str]) -> str:
    """Return the word if all words are equal, else an empty string."""
    different = set(words)
    return different.pop() if len(different) == 1 else ""


def _words(edge: Edge, call: Node) -> list[Repetition]:
    """Return the relations of an edge to the repetitions of a node."""
    return [word for group, word in edge.across if group == call.id]


def _without(edge: Edge, call: Node) -> Across:
    return tuple(pair for pair in edge.across if pair[0] != call.id)


def _chain(edges: Sequence[Edge], call: Node) -> Chain | None:
    """Return the chain of a node inside a repeated node, or None if its edges have another pattern.

    Args:
        edges: The edges into the node that have a relation to the repetitions.
        call: The repeated node.
    """
    later = [edge for edge in edges if "next" in _words(edge, call)]
    firsts = [edge for edge in edges if _words(edge, call) == ["first"]]
    if len(later) != 1 or later[0].across != ((call.id, "next"),) or not firsts or len(firsts) + 1 != len(edges):
        return None
    taken = ((edge.source, _without(edge, call), edge.outputs) for edge in firsts)
    return tuple(sorted(taken)), (later[0].source, later[0].across, later[0].outputs)
