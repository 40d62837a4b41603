"""The modules of a model in the order of their calls, with the modules that feed them."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AnySet
from functools import cached_property, lru_cache, partial

from lightning_recorder.functions import function_of, function_sites, is_of_loss
from lightning_recorder.graph.model import Graph

__all__ = ["INPUT", "Wiring", "families", "is_position"]

INPUT = "(input)"
"""The producer of tensors that come from outside of the model."""

_REMEMBERED = 16  # modules whose neighbors are cached, since one cause may explain findings about many modules


class Wiring:
    """The recorded modules and the edges between their calls.

    Edges pass through functional operations that are not recorded: after ``h = x + self.branch(x)``, both ``branch``
    and the producer of ``x`` feed the next module. Without a graph, each module feeds the next one.

    The names are in the order of execution. ``types`` has class names of modules, in addition to those in the graph.
    """

    def __init__(
        self, names: Iterable[str], graph: Graph | None = None, types: Mapping[str, str] | None = None
    ) -> None:
        self.names = list(dict.fromkeys(names))
        self.types: dict[str, str] = dict(types or {})
        """The class names of the modules, where known."""
        self.calls: list[str] = []
        """The module of each call, in the order of execution."""
        self.producers: list[frozenset[int]] = []
        """The calls that feed each call; -1 means an input of the model."""
        self.of_loss: frozenset[str] = frozenset()
        """The recorded functions after the last layer. ``calls`` lacks them, since rules ask which layer follows."""
        self.graph = graph
        self.has_graph = graph is not None
        if graph is None:
            self.of_loss = frozenset(name for name in self.names if self._may_be_of_loss(name))
            self.names = [name for name in self.names if name not in self.of_loss]
            self.calls = self.names
            self.producers = [frozenset([place - 1]) for place in range(len(self.names))]
        else:
            self._read(graph, set(self.names))

    def _read(self, graph: Graph, names: Collection[str]) -> None:
        self.types |= {node.name: node.type_name for node in graph.nodes if node.kind == "module"}
        functions = {number: name for number, name in function_sites(graph).items() if name in names}
        # A function after the last layer belongs to the loss or a metric, or makes a final output.
        last = max((node.id for node in graph.nodes if node.kind == "parameter" or node.parameters), default=-1)
        losses = {number for number in functions if number > last or is_of_loss(graph[number])}
        layers = {functions[number] for number in functions.keys() - losses}
        others = {name for name in self.names if name not in functions.values() and self._may_be_of_loss(name)}
        self.of_loss = frozenset(others.union(functions[number] for number in losses) - layers)
        owner = _innermost_calls(graph, names)
        for number in functions.keys() - losses:
            owner.setdefault(number, number)
        place: dict[int, int] = {}
        sources: dict[int, frozenset[int]] = {}  # the producers of each node that is outside of all recorded calls
        fed: list[set[int]] = []
        for node in graph.nodes:
            if node.kind in ("backward", "optimizer"):
                break
            call = owner.get(node.id)
            if call is not None and call not in place:
                place[call] = len(self.calls)
                self.calls.append(functions.get(call) or graph[call].name)
                fed.append(set())
            into: set[int] = {-1} if node.kind == "input" else set()
            for edge in graph.into(node):
                source = owner.get(edge.source)
                if source is None:
                    into |= sources.get(edge.source, frozenset())
                elif source != call and source in place:  # a damaged graph may have an edge into the past
                    into.add(place[source])
            if call is None:
                sources[node.id] = frozenset(into)
            else:
                fed[place[call]] |= into
        self.producers = [frozenset(each) for each in fed]

    def _may_be_of_loss(self, name: str) -> bool:
        """Return True for a function that may compute the loss: a loss function, or one that the root module calls."""
        function = None if name in self.types else function_of(name)
        return function is not None and (function.kind == "losses" or "." not in name)

    @cached_property
    def inputs(self) -> dict[str, list[str]]:
        """The modules that feed each module, in the order of execution; :data:`INPUT` for an input of the model."""
        found: dict[str, set[int]] = defaultdict(set)
        for call, producers in enumerate(self.producers):
            found[self.calls[call]] |= producers
        return {
            name: list(
                dict.fromkeys(
                    INPUT if each < 0 else self.calls[each] for each in sorted(calls) if self._is_other(each, name)
                )
            )
            for name, calls in found.items()
        }

    @cached_property
    def operations(self) -> dict[str, tuple[tuple[str, object], ...]]:
        """The functions that each module calls directly, with their arguments, in the order of execution."""
        found: dict[str, list[tuple[str, object]]] = defaultdict(list)
        for node in () if self.graph is None else self.graph.nodes:
            if node.kind == "op" and node.parent is not None and self.graph is not None:
                found[self.graph[node.parent].name].append((node.name, node.arguments))
        return {name: tuple(each) for name, each in found.items()}

    def _is_other(self, call: int, name: str) -> bool:
        return call < 0 or self.calls[call] != name

    @cached_property
    def outputs(self) -> dict[str, list[str]]:
        """The modules that each module feeds."""
        found: dict[str, list[str]] = defaultdict(list)
        for name, producers in self.inputs.items():
            for each in producers:
                found[each].append(name)
        return found

    @cached_property
    def calls_of(self) -> dict[str, list[int]]:
        """The calls of each module, in the order of execution."""
        found: dict[str, list[int]] = defaultdict(list)
        for call, name in enumerate(self.calls):
            found[name].append(call)
        return dict(found)

    @cached_property
    def downstream(self) -> Callable[[str], AnySet[str]]:
        """A function that returns a module and all modules that it feeds, directly or through others."""
        return lru_cache(_REMEMBERED)(partial(_reach, edges=self.outputs))

    @cached_property
    def upstream(self) -> Callable[[str], AnySet[str]]:
        """A function that returns a module and all modules that feed it, directly or through others."""
        return lru_cache(_REMEMBERED)(partial(_reach, edges=self.inputs))

    def is_plain(self, blocks: Sequence[str]) -> bool:
        """Return True if all inner blocks of a chain have the same neighbors outside of the chain.

        In a U-Net, each block has a skip connection to or from another module.
        """
        known = set(blocks)

        def block_of(name: str) -> str | None:
            return next((each for each in _parents(name) if each in known), None)

        def outside(edges: Mapping[str, Sequence[str]]) -> dict[str, set[str]]:
            found: dict[str, set[str]] = {block: set() for block in blocks}
            for name, others in edges.items():
                block = block_of(name)
                if block is not None:
                    found[block].update(each for each in others if block_of(each) is None)
            return found

        feeds, users = outside(self.inputs), outside(self.outputs)
        return all(
            each[block] == each[some[0]] for each, some in ((feeds, blocks[1:]), (users, blocks[:-1])) for block in some
        )

    def is_parallel(self, before: str) -> bool:
        """Return True if two or more members of a list such as ``"experts."`` were called and feed no other member."""

        def member(name: str) -> str:
            return name[len(before) :].partition(".")[0]

        inside = {name: sources for name, sources in self.inputs.items() if name.startswith(before)}
        feeds = ((name, each) for name, sources in inside.items() for each in sources if each.startswith(before))
        is_called_apart = len({member(name) for name in inside}) > 1
        return self.has_graph and is_called_apart and all(member(name) == member(each) for name, each in feeds)

    def leads(self, name: str, to: str) -> bool:
        """Return True if a module feeds another one, directly or through others, or if both are the same."""
        # A residual stream feeds all later modules, so the modules after ``to`` are searched only if necessary.
        last = self.order.get(to, -1)
        return self._leads(name, to, last) or self._leads(name, to, len(self.order))

    def _leads(self, name: str, to: str, last: int) -> bool:
        """Return True if a module feeds another one through modules up to a position in the order of execution."""
        found, todo = {name}, deque([name])
        while todo and to not in found:
            for each in self.outputs.get(todo.popleft(), ()):
                if self.order[each] > last:
                    break  # outputs are in the order of execution
                if each not in found:
                    found.add(each)
                    todo.append(each)
        return to in found

    def after(self, call: int) -> set[int]:
        """Return the calls that depend on a call, and the call itself."""
        found = {call}
        for each in range(call + 1, len(self.calls)):
            if self.producers[each] & found:
                found.add(each)
        return found

    @cached_property
    def order(self) -> dict[str, int]:
        """The position of each module: of its first call, or of its record if no call is known."""
        first: dict[str, int] = {}
        for place, name in enumerate([*self.calls, *self.names]):
            first.setdefault(name, place)
        return first


def _innermost_calls(graph: Graph, names: Collection[str]) -> dict[int, int]:
    """Map each node to the recorded call around it, by id. Calls that contain recorded calls do not count."""
    recorded = [node for node in graph.nodes if node.kind == "module" and node.name in names]
    outer = {around.id for node in recorded for around in graph.ancestors(node)}
    leaves = {node.id for node in recorded} - outer
    owner: dict[int, int] = {}
    for node in graph.nodes:
        call = node.id if node.id in leaves else owner.get(-1 if node.parent is None else node.parent)
        if call is not None:
            owner[node.id] = call
    return owner


def _reach(name: str, edges: Mapping[str, Sequence[str]]) -> AnySet[str]:
    found, todo = {name}, [name]
    while todo:
        for each in edges.get(todo.pop(), ()):
            if each not in found and each != INPUT:
                found.add(each)
                todo.append(each)
    return found


def is_position(name: str) -> bool:
    """Return True if a name contains "pos": position encodings are often fixed sines."""
    return "pos" in name.rpartition(".")[2].lower()


def families(keys: Mapping[str, object], fewest: int) -> list[list[str]]:
    """Return groups of corresponding modules in repeated blocks, such as ``layers.0.fc`` and ``layers.1.fc``.

    Args:
        keys: A value for each module name; modules of equal structure have equal values.
        fewest: The smallest size of a group.

    Example:
        >>> families({"layers.0.fc": 1, "layers.1.fc": 1, "layers.2.fc": 2, "layers.3.fc": 1, "head": 1}, 3)
        [['layers.0.fc', 'layers.1.fc', 'layers.3.fc']]
    """
    groups: dict[tuple[str, str, object], list[str]] = defaultdict(list)
    for name, key in keys.items():
        for digits in re.finditer(r"[0-9]+", name):
            groups[name[: digits.start()], name[digits.end() :], key].append(name)
    found: list[list[str]] = []
    taken: set[str] = set()
    for group in sorted(groups.values(), key=len, reverse=True):
        if len(group) >= fewest and not taken.intersection(group):
            found.append(group)
            taken.update(group)
    return found


def _parents(name: str) -> Iterator[str]:
    """Yield the names of the modules around a module, the nearest first."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name
