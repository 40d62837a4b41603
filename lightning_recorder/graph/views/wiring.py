"""Comparison of the edges of consecutive parts of a graph."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from lightning_recorder.graph.model import Edge, Graph, Node

__all__ = ["FARTHEST", "MutableGraph", "Port", "Siblings", "merge_deep_ports", "merge_ports"]

FARTHEST = 4  # the maximum distance, in repetitions, between the computation of a tensor and its use

Key = tuple[Any, ...]
Port = list[tuple[Key, int]]
"""The sources of a node in order, as places relative to the node's unit, with the number of tensors from each."""


class MutableGraph:
    """The nodes, calls and edges of a graph while it is folded.

    Args:
        graph: The graph to start from.
    """

    def __init__(self, graph: Graph) -> None:
        self.nodes = {node.id: node for node in graph.nodes}
        self.children: dict[int, list[int]] = {}
        self.into: dict[int, list[Edge]] = {}
        self.users: dict[int, dict[Key, Edge]] = {}
        self.members: dict[tuple[int, int], tuple[str, ...]] = {}
        """The names that a folded node represents, in execution order, if they differ; see :meth:`names`."""
        self._ranks: dict[str, tuple[int, int]] = {}
        for node in graph.nodes[1:]:
            if node.parent is not None:
                self.children.setdefault(node.parent, []).append(node.id)
        for edge in graph.edges:
            self.into.setdefault(edge.target, []).append(edge)
            self.users.setdefault(edge.source, {})[edge.target, edge.across] = edge

    def subtree(self, node_id: int) -> list[int]:
        """Return a node and all nodes inside it. Calls precede their contents."""
        found, todo = [], [node_id]
        while todo:
            found.append(todo.pop())
            todo.extend(reversed(self.children.get(found[-1], ())))
        return found

    def names(self, node_id: int) -> list[tuple[str, ...]]:
        """Return the names of the modules that a node represents, followed by the names of its tied tensors.

        Each entry has several names if the node is folded. The names of tensors begin with ``=``.
        """
        node = self.nodes[node_id]
        known = [node.name] if node.kind == "module" and node.name else []
        known += [f"={name}" for name in node.tied] if node.tied and node.kind in ("module", "op") else ()
        return [self.members.get((node_id, place), (name,)) for place, name in enumerate(known)]

    def rank(self, name: str) -> tuple[int, int]:
        """Return the first node that represents a name, and the number of earlier names of the same kind.

        Names are of the same kind if they differ only in numbers.
        """
        if not self._ranks:
            counts: Counter[str] = Counter()
            for node_id in sorted(self.nodes):
                for each in (each for names in self.names(node_id) for each in names):
                    if each not in self._ranks:
                        kind = re.sub("[0-9]+", "#", each)
                        self._ranks[each] = node_id, counts[kind]
                        counts[kind] += 1
        return self._ranks[name]

    def connect(self, target: int, edges: list[Edge]) -> None:
        """Replace all incoming edges of a node."""
        for edge in self.into.pop(target, ()):
            self.users[edge.source].pop((target, edge.across), None)
        if edges:
            self.into[target] = edges
        for edge in edges:
            self.users.setdefault(edge.source, {})[target, edge.across] = edge

    def remove(self, node_id: int) -> None:
        """Remove a node and its incoming edges."""
        self.connect(node_id, [])
        del self.nodes[node_id]
        self.children.pop(node_id, None)


class Siblings:
    """The parts of one call in execution order, and the edges between them and to the rest of the graph.

    The parts are the module calls and functions directly inside the call. A unit is one or more consecutive parts. The
    place of a node is a pair: the position of its part, and its offset inside the part. Corresponding nodes of equal
    parts have equal offsets. A parameter or other tensor has the place of its first use.

    Args:
        graph: The graph.
        parts: The ids of the parts.
        tensors: The ids of parameters, buffers and other tensors directly inside the same call.
    """

    def __init__(self, graph: MutableGraph, parts: list[int], tensors: list[int]) -> None:
        self.graph = graph
        self.parts = parts
        self.subtrees = [graph.subtree(part) for part in parts]
        self.place: dict[int, tuple[int, Any]] = {
            node: (position, offset) for position, tree in enumerate(self.subtrees) for offset, node in enumerate(tree)
        }
        # For each part: the offsets of nodes with edges from other parts, and of nodes with edges to other parts.
        self.targets = [self._offsets(tree, self._takes) for tree in self.subtrees]
        self.sources = [self._offsets(tree, self._gives) for tree in self.subtrees]
        self.spans: dict[int, tuple[int, int]] = {}
        self.initial: set[int] = set()
        """The tensors that only the first of the compared units uses, such as the initial state of a loop."""
        for tensor in tensors:
            self._place_tensor(tensor)
        # These two are set while joined loops are compared: the loop of these siblings, and a map from each node of the
        # joined loops to its loop, step and place.
        self.loop: Any = None
        self.joined: Mapping[int, tuple[Any, int, Key]] = {}

    def _offsets(self, tree: list[int], condition: Any) -> list[int]:
        return [offset for offset, node in enumerate(tree) if condition(node, self.place[tree[0]][0])]

    def _takes(self, node: int, position: int) -> bool:
        return any(edge.across or self._position(edge.source) != position for edge in self.graph.into.get(node, ()))

    def _gives(self, node: int, position: int) -> bool:
        users = self.graph.users.get(node, {}).values()
        return any(edge.across or self._position(edge.target) != position for edge in users)

    def _position(self, node: int) -> int | None:
        place = self.place.get(node)
        return place and place[0]

    def _place_tensor(self, tensor: int) -> None:
        users = self.graph.users.get(tensor, {}).values()
        places = sorted(self.place[edge.target] for edge in users if edge.target in self.place)
        if not places or len(places) < len(users):
            return  # the tensor is used elsewhere as well
        position, offset = places[0]
        sources = [edge.source for edge in self.graph.into[self.subtrees[position][offset]]]
        self.place[tensor] = position, (offset, sources.index(tensor))
        self.spans[tensor] = position, places[-1][0]

    def find_initial(self, start: int, length: int) -> None:
        """Treat the tensors of the first unit that have no counterparts in the second unit as tensors from outside."""
        self.initial = set()
        first, second = (self.private(unit, length) for unit in (start, start + length))
        found = {(place, tensor_label(self.graph.nodes[tensor])) for tensor, place in second.items()}
        self.initial = {
            tensor for tensor, place in first.items() if (place, tensor_label(self.graph.nodes[tensor])) not in found
        }

    def private(self, start: int, length: int) -> dict[int, Any]:
        """Return the tensors that only the unit at ``start`` uses, with their places relative to the unit."""
        return {
            tensor: (self.place[tensor][0] - start, self.place[tensor][1])
            for tensor in self.spans
            if self._within(tensor, start, length)
        }

    def _within(self, node: int, start: int, length: int) -> bool:
        """Return True if a node is in the unit at ``start``. For a tensor, all of its uses must be in the unit."""
        if node in self.initial:
            return False
        first, last = self.spans.get(node) or (self.place[node][0],) * 2
        return start <= first and last < start + length

    def ports(self, unit: int, first: int, length: int) -> dict[Key, Port]:
        """Return the sources of the nodes in a unit, by place. Nodes without sources outside their part are left out.

        Args:
            unit: The position of the unit.
            first: The position of the first unit.
            length: The length of a unit.
        """
        found: dict[Key, Port] = {}
        for relative in range(length):
            tree = self.subtrees[unit + relative]
            for offset in self.targets[unit + relative]:
                found[relative, offset] = self.port(tree[offset], unit, first, length)
        return found

    def port(self, node: int, unit: int, first: int, length: int) -> Port:
        """Return the sources of one node; see :meth:`ports`."""
        found: Port = []
        for edge in self.graph.into.get(node, ()):
            spot = self._spot(edge, unit, first, length)
            # Ignore the output indices of a source outside: each unit may take a different output of a split list.
            relation = self.across(edge, unit, length) if spot[0] == "out" else self.relation(edge, unit, length)
            found.append(((spot, relation), edge.multiplicity))
        return found

    def _spot(self, edge: Edge, unit: int, first: int, length: int) -> Key:
        """Return the place of an edge's source in this or an earlier unit, or the node if the source is outside."""
        source = edge.source
        if self.joined and (joined := self.in_step(source, (unit - first) // length, earlier=True)):
            return joined
        if source not in self.place:
            return "out", source
        position, offset = self.place[source]
        if self._within(source, unit, length):
            label = tensor_label(self.graph.nodes[source]) if source in self.spans else None
            return "unit", position - unit, offset, label
        # An edge with ``next`` comes from an earlier outer repetition, so its source is not in an earlier unit.
        if source in self.spans or not first <= position < unit or edge.relates("next"):
            return "out", source
        back = (unit - position + length - 1) // length
        return ("before", position - unit + back * length, offset, back) if back <= FARTHEST else ("earlier", source)

    def in_step(self, node: int, step: int, *, earlier: bool = False) -> Key | None:
        """Return the place of a node in a step of a loop that is joined with the compared loop; see :class:`Loop`.

        Args:
            node: The node.
            step: The number of the step.
            earlier: Search the loops before the compared loop; otherwise the loops after it.
        """
        loop, number, place = self.joined.get(node, (None, 0, ()))
        if loop is None or loop is self.loop or number != step or loop.times != self.loop.times:
            return None
        return ("each", loop, place) if (loop.first < self.loop.first) == earlier else None

    def across(self, edge: Edge, unit: int, length: int) -> Key:
        """Return the relations of an edge to folded nodes. Nodes inside the unit are given by relative places."""
        return tuple([(self._group(group, unit, length), word) for group, word in edge.across]) if edge.across else ()

    def relation(self, edge: Edge, unit: int, length: int) -> Key:
        """Return the relations of an edge to folded nodes, and its output indices."""
        across = self.across(edge, unit, length)
        return (*across, ("outputs", edge.outputs)) if edge.outputs else across

    def _group(self, group: int, unit: int, length: int) -> Key:
        position, offset = self.place.get(group, (-1, None))
        return ("unit", position - unit, offset) if unit <= position < unit + length else ("out", group)

    def leaving(self, unit: int, first: int, length: int, end: int) -> dict[Key, int]:
        """Return the edges from a unit to nodes outside of all units, with their multiplicities.

        Edges to the next repetition of an outer call count as well, even if they lead to nodes in other units.
        """
        found: dict[Key, int] = {}
        for relative in range(length):
            tree = self.subtrees[unit + relative]
            for offset in self.sources[unit + relative]:
                for edge in self.graph.users.get(tree[offset], {}).values():
                    if not self._stays(edge, unit, first, length, end):
                        target = self.in_step(edge.target, (unit - first) // length) or edge.target
                        key = relative, offset, target, self.relation(edge, unit, length)
                        found[key] = edge.multiplicity
        return found

    def joined_users(self, first: int, length: int, times: int) -> Iterator[int]:
        """Yield the nodes in joined loops that take tensors from the unit with the number of their step."""
        for position in range(first, first + length * times) if self.joined else ():
            for offset in self.sources[position]:
                for edge in self.graph.users.get(self.subtrees[position][offset], {}).values():
                    if self.in_step(edge.target, (position - first) // length):
                        yield edge.target

    def _stays(self, edge: Edge, unit: int, first: int, length: int, end: int) -> bool:
        position = self._position(edge.target)
        if position is None:
            return False
        return unit <= position < unit + length or (first <= position < end and not edge.relates("next"))

    def in_turn(self, target: int, keys: list[Key], first: int, length: int, times: int) -> bool:
        """Return True if the inputs of a node are the tensors of all units in order, without other tensors between."""
        wanted = [(relative, offset, relation) for relative, offset, goal, relation in keys if goal == target]
        places: list[int] = []
        seen: list[list[Key]] = [[] for _ in range(times)]
        for index, edge in enumerate(self.graph.into[target]):
            position, offset = self.place.get(edge.source, (-1, None))
            if not first <= position < first + length * times or edge.source in self.spans:
                continue
            number, relative = divmod(position - first, length)
            key = relative, offset, self.relation(edge, first + number * length, length)
            if key in wanted:
                if any(seen[number + 1 :]):
                    return False
                seen[number].append(key)
                places.append(index)
        return places[-1] - places[0] + 1 == len(places) and all(each == seen[0] for each in seen)

    def names(self, unit: int, length: int) -> list[tuple[str, ...]]:
        """Return the names of the modules and tied tensors in a unit. Equal units have corresponding names in order."""
        inside = (node for tree in self.subtrees[unit : unit + length] for node in tree)
        return [names for node in inside for names in self.graph.names(node)]


def tensor_label(node: Node) -> Key:
    """Return the properties of a parameter or other tensor that must be equal in equal units."""
    name = "#" if node.name.rpartition(".")[2].isdigit() else node.name.rpartition(".")[2]
    return node.kind, name, node.outputs


Words = tuple[Literal["first", "next"], ...]
Merged = list[tuple[Words, Key, int]]
"""The incoming edges of a node: the relation to the repetition, the source and the number of tensors."""


def merge_ports(first: Port, later: Port, *, exact: bool, from_zero: bool = False) -> Merged | None:
    """Combine the sources of a node in the first repetition with its sources in later repetitions.

    Args:
        first: The sources in the first repetition.
        later: The sources in each later repetition.
        exact: Require the same number of tensors in all repetitions.
        from_zero: Where later repetitions take a tensor of the repetition before, allow the first repetition to take no
            tensor. For example, it adds the number 0 instead.

    Returns:
        The edges. Edges without relation and edges of the first repetition are in the order of ``first``. Edges from
        the repetition before are in the order of ``later``. The result is ``None`` if the common sources are in a
        different order, or if another source of later repetitions is not in the repetition before.
    """
    at_first, at_later = dict(first), dict(later)
    common = {key: min(number, at_later[key]) for key, number in first if key in at_later}
    if [key for key, _ in first if key in common] != [key for key, _ in later if key in common]:
        return None
    start = [(key, number - common.get(key, 0)) for key, number in first if number > common.get(key, 0)]
    onward = [(key, number - common.get(key, 0)) for key, number in later if number > common.get(key, 0)]
    if any(key[0][0] != "out" for key, _ in start) or any(key[0][0] != "before" or key[0][3] > 1 for key, _ in onward):
        return None
    numbers = [sum(number for _, number in part) for part in (start, onward)]
    if from_zero and numbers == [0, 1]:
        return [((), key, common[key]) if key in common else (("next",), key, number) for key, number in later]
    if bool(numbers[0]) != bool(numbers[1]) or (exact and numbers[0] != numbers[1]):
        return None
    # The tensors that differ must be at the same positions among the arguments, since a subtraction is not equal to its
    # reverse. The positions of additional tensors from a common source are unknown.
    gaps = zip(_between(first, common), _between(later, common), strict=True)
    extra = any(at_first[key] > number for key, number in common.items())
    if not all(one <= other if extra else one == other if exact else bool(one) == bool(other) for one, other in gaps):
        return None
    merged: Merged = []
    waiting = [key for key, _ in first]
    for key, number in later:
        while waiting and (waiting[0] not in common or key in common):
            earlier = waiting.pop(0)
            if at_first[earlier] > common.get(earlier, 0):
                merged.append((("first",), earlier, at_first[earlier] - common.get(earlier, 0)))
            if earlier == key:
                break
        merged.append(((), key, common[key]) if key in common else (("next",), key, number))
    merged.extend((("first",), key, at_first[key]) for key in waiting)
    return merged


def merge_deep_ports(ports: list[Port]) -> Merged | None:
    """Combine the sources of a node that uses tensors of several earlier repetitions, as a second-order scan does.

    Args:
        ports: The sources in each of the first repetitions. The last entry also holds for all later repetitions.

    Returns:
        The edges, or ``None`` if the sources at the same position do not correspond. The relation ``first, next`` means
        the second repetition, and ``next, next`` skips a repetition.
    """
    slots = [[key for key, number in port for _ in range(number)] for port in ports]
    if len({len(each) for each in slots}) > 1:
        return None
    merged: Counter[tuple[Words, Key]] = Counter()
    for keys in zip(*slots, strict=True):
        steady = keys[-1]
        if all(key == steady for key in keys):
            merged[(), steady] += 1
            continue
        back = steady[0][3] if steady[0][0] == "before" else 0
        if not back or any(key != steady for key in keys[back:]) or any(key[0][0] != "out" for key in keys[:back]):
            return None
        for step, key in enumerate(keys[:back]):
            merged[("first", *_onward(step)), key] += 1
        merged[_onward(back), steady] += 1
    found = [(words, key, number) for (words, key), number in merged.items()]
    # Edges with equal ends become one edge with one position among the arguments. Check that the order is still right.
    return found if all(_at(found, step) == port for step, port in enumerate(ports)) else None


def _onward(steps: int) -> Words:
    return tuple(["next" for _ in range(steps)])


def _at(merged: Merged, step: int) -> Port:
    """Return the sources of the node in one repetition."""
    return [
        (key, number)
        for words, key, number in merged
        if (words.count("next") == step if "first" in words else words.count("next") <= step)
    ]


def _between(port: Port, common: dict[Key, int]) -> list[int]:
    """Return the number of other tensors before the first common source, between the common sources, and after them."""
    numbers = [0]
    for key, number in port:
        if key in common:
            numbers.append(0)
        else:
            numbers[-1] += number
    return numbers
