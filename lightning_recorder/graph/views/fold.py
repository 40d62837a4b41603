"""A view that draws equal consecutive parts of a model once."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import lcm

from lightning_recorder.graph.model import Edge, Graph, Node, Repetition, TensorMeta
from lightning_recorder.graph.views.dilations import DILATION, joined_dilations
from lightning_recorder.graph.views.forms import SIZE, TENSORS, forms, operands, parameter_counts, span
from lightning_recorder.graph.views.periods import period_of, repetitions
from lightning_recorder.graph.views.runs import (
    Loop,
    Run,
    equal_units,
    joined_loops,
    longest_stretch,
    merged_ports,
    unit_offset,
)
from lightning_recorder.graph.views.wiring import Key, MutableGraph, Siblings

__all__ = ["contents_of", "fold_by_forms", "fold_repeats"]

_FEW = 8  # the maximum number of parallel layers that are drawn separately, since their names are informative
_LONG = 6  # the number of functions in a step of a loop from which two steps are folded
_PARTS = ("module", "op", "backward", "optimizer")
_Arguments = tuple[tuple[str, str], ...]


def fold_repeats(graph: Graph, least: int = 3, *, contents: Graph | None = None) -> Graph:
    """Draw equal consecutive siblings once, with their number.

    A unit is one or more consecutive siblings. A unit that occurs at least ``least`` times in a row is kept once, with
    the number of occurrences in ``repeats``. A unit of several siblings gets a frame: a module call without a name. Two
    occurrences suffice for a unit of calls that contain other nodes. They also suffice for six or more functions, or a
    unit that computes gradients, that take a result of the unit before.

    Units are equal if their classes, functions, parameters, dtypes and contents are equal, and if the edges inside them
    are equal. Each unit must also take its inputs from the same nodes outside the units, or from one of the four units
    before it. The first units, which have no units before them, may take other tensors instead. Two rows of units may
    also be folded together, if each unit of the second row takes its tensors from the unit of the first row with the
    same number.

    Equal units may differ in these respects: the numbers in the names of modules; sizes of tensors that parameters do
    not determine, see :class:`TensorMeta`; an index or a number that a function takes; the dilation and padding of a
    convolution; the number of rows of an embedding. If indices or numbers repeat every two to four units, that many
    units are folded together as one.

    The words in :attr:`Edge.across` mark four sorts of edges: from one occurrence to the next, into the first
    occurrence only, from all occurrences to a later node, and between occurrences with the same number; see
    :data:`Repetition`. With these words, the folded graph determines the original graph. A unit calls the same modules
    as the unit before it, or modules that no earlier unit calls. The same holds for tied tensors. If the modules were
    already called before the first unit, the units call them in the order of their first calls, or in the reverse
    order. The multiplicity of an edge is the number of recorded tensors that it represents.

    Units without edges between them are marked as ``parallel``. Up to eight parallel units whose modules contain no
    other modules are not folded, since their names are informative, such as query, key and value. Up to eight parallel
    functions are not folded either.

    Args:
        graph: The graph to fold.
        least: The smallest number of occurrences of a unit.
        contents: The graph that ``graph`` is a view of. If given, closed calls are equal only if their contents in this
            graph are equal. By default the contents of closed calls are not compared.
    """
    return fold_by_forms(graph, {} if contents is None else contents_of(contents), least)


def contents_of(graph: Graph) -> dict[int, int]:
    """Return a number for the contents of each node, for :func:`fold_by_forms`. Equal contents have equal numbers."""
    return forms(graph, MutableGraph(graph))


def fold_by_forms(graph: Graph, held: Mapping[int, int], least: int = 3) -> Graph:
    """Fold like :func:`fold_repeats`. Closed calls are equal only if ``held`` has the same number for both."""
    members = {(node.id, 0): node.members for node in graph.nodes if node.members}
    folded = graph
    while (result := _Fold(folded, least, held, members).result()) is not folded:
        folded = result
    return graph if folded is graph else _with_members(folded, graph, members)


def _with_members(folded: Graph, graph: Graph, members: Mapping[tuple[int, int], tuple[str, ...]]) -> Graph:
    """Set ``members`` of the folded calls: the names of the modules that each call represents, in execution order."""
    names = [name for node in graph.module_calls() for name in node.members or (node.name,)]
    order = {name: place for place, name in enumerate(dict.fromkeys(names))}
    nodes = list(folded.nodes)
    for place, node in enumerate(nodes):
        several = members.get((node.id, 0), ()) if node.kind == "module" and node.name else ()
        if len(several) > 1:
            nodes[place] = replace(node, members=tuple(sorted(several, key=order.__getitem__)))
    return replace(folded, nodes=tuple(nodes))


class _Fold:
    """Folds a graph once, from the outer calls to the inner calls."""

    def __init__(
        self, graph: Graph, least: int, held: Mapping[int, int], members: dict[tuple[int, int], tuple[str, ...]]
    ) -> None:
        self._original = graph
        self._least = least
        self._graph = MutableGraph(graph)
        self._graph.members = members
        shown = forms(graph, self._graph)
        # In a view without unused nodes, two calls with equal contents may still look different. So compare both.
        numbers: dict[tuple[int, int | None], int] = {}
        contents = {call.id: held.get(call.id) for call in graph.module_calls()}
        self._forms = {
            node: numbers.setdefault((form, contents.get(node)), len(numbers)) for node, form in shown.items()
        }
        self._widest: dict[int, tuple[TensorMeta, ...]] = {}
        self._changed = False
        self._loops: list[Loop] = []
        self._free = max(self._graph.nodes) + 1

    def result(self) -> Graph:
        """Return the folded graph, or the graph itself if it has no repetitions."""
        todo = [self._graph.children.get(self._original.root.id, [])]
        while todo:
            inside = todo.pop()
            nodes = self._graph.nodes
            parts = [node for node in inside if nodes[node].kind in _PARTS]
            tensors = [node for node in inside if nodes[node].kind in TENSORS]
            siblings = Siblings(self._graph, parts, tensors)
            framed: set[int] = set()
            for chosen in self._chosen(siblings) if len(parts) > 1 else ():
                # Compare again, because the sources of this run may have been merged in the meantime.
                run = equal_units(siblings, chosen.start, chosen.length, chosen.start + chosen.length * chosen.times)
                if self._enough(siblings, run):
                    todo.append(self._merge(siblings, run))
                    framed.update(todo[-1])
            todo.extend(self._graph.children.get(part, []) for part in parts if part not in framed)
        if not self._changed:
            for loop, run in joined_loops(self._loops, lambda loop, run: self._enough(loop.siblings, run)):
                self._merge(loop.siblings, run)
        return self._rebuilt() if self._changed else self._original

    def _chosen(self, siblings: Siblings) -> list[Run]:
        """Return runs that do not overlap. Runs with more parts are preferred."""
        runs = self._runs(siblings)
        queue = [(-run.length * run.times, run.length, run.start, run.times, run.parallel) for run in runs]
        heapq.heapify(queue)
        taken = bytearray(len(siblings.parts))
        chosen = []
        while queue:
            _, length, start, times, parallel = heapq.heappop(queue)
            run = Run(start, length, times, parallel)
            free = longest_stretch([not any(taken[unit : unit + length]) for unit in run.units()])
            if len(free) < times:
                rest = Run(start + length * free.start, length, len(free), parallel)
                if self._enough(siblings, rest):
                    heapq.heappush(queue, (-length * len(free), length, rest.start, len(free), parallel))
                continue
            taken[start : start + length * times] = b"\1" * (length * times)
            chosen.append(run)
        return chosen

    def _runs(self, siblings: Siblings) -> list[Run]:
        """Return the runs of equal units."""
        found: list[Run] = []
        for start, end, length in repetitions([self._forms[part] for part in siblings.parts]):
            known = any(
                length % run.length == 0 and run.length * run.times > end - start - run.length
                for run in found
                if start <= run.start < end
            )
            if known:
                continue  # this unit would consist of several shorter units that repeat
            length *= self._turn(siblings, start, end, length)
            if end - start < 2 * length:
                continue
            unit = start + unit_offset(siblings, start, end, length)
            self._loops.append(Loop(siblings, unit, length, (end - unit) // length))
            while unit + 2 * length <= end:
                run = equal_units(siblings, unit, length, end)
                if self._enough(siblings, run):
                    found.append(run)
                unit += run.length * run.times
        return found

    def _turn(self, siblings: Siblings, start: int, end: int, length: int) -> int:
        """Return the period of the functions' operands, in units: 2 if the units use two halves of a tensor in turn.

        An operand that never repeats may be the number of a step, so it is ignored.
        """
        values = self._operands(siblings, range(start, end - length + 1, length), length)
        return 1 if all(each == values[0] for each in values) else lcm(*map(period_of, zip(*values, strict=True)))

    def _operands(
        self, siblings: Siblings, units: Iterable[int], length: int, *, only_places: bool = False
    ) -> list[list[Key]]:
        """Return the operands of all nodes of each unit. See :func:`operands` for ``only_places``."""
        nodes = self._graph.nodes
        trees = ([node for tree in siblings.subtrees[unit : unit + length] for node in tree] for unit in units)
        return [[operands(nodes[node], only_places=only_places) for node in tree] for tree in trees]

    def _enough(self, siblings: Siblings, run: Run) -> bool:
        """Return True if a run is worth folding."""
        nodes, children = self._graph.nodes, self._graph.children
        unit = siblings.parts[run.start : run.start + run.length]
        opened = [nodes[part].kind == "module" and part in children for part in unit]
        nested = any(opened)
        is_nameless = all(nodes[part].kind == "op" and not nodes[part].parameters for part in unit)
        along_gradients = any(nodes[part].kind == "backward" and nodes[part].outputs for part in unit)
        is_step = not run.parallel and (along_gradients or (is_nameless and run.length >= _LONG))
        if run.times < (2 if all(opened) or is_step else self._least):
            return False
        if run.times == 2 and (nested or is_step):
            # Two blocks may differ in numbers, such as a drop rate, but not in indices. Inside a frame, they may not
            # differ in any operand.
            within = nodes[unit[0]].parent
            is_framed = within is not None and not nodes[within].type_name
            one, other = self._operands(siblings, run.units(), run.length, only_places=not is_framed)
            if one != other:
                return False
        # Functions have no informative names. So in a unit of functions, each function counts as an occurrence.
        number = run.times * run.length if is_nameless else run.times
        return nested or not run.parallel or number > _FEW

    def _merge(self, siblings: Siblings, run: Run) -> list[int]:
        """Keep only the first unit of a run. Return the contents of its frame, if it got one."""
        self._changed = True
        nodes, start, length = self._graph.nodes, run.start, run.length
        parts = siblings.parts[start : start + length]
        private = siblings.private(start, length)
        single = length == 1 and not private and nodes[parts[0]].repeats == 1
        group = parts[0] if single else self._free
        counterparts = self._counterparts(siblings, run)
        edges = {
            node: _repeated(siblings, node, run, group, counterparts)
            for position in range(start, start + length)
            for node in siblings.subtrees[position]
        }
        outer = self._outer(siblings, run, group, counterparts)
        shared = self._share(counterparts)
        self._widen(counterparts)
        self._join_names(counterparts)
        parent = nodes[parts[0]].parent
        gone = {node for node, kept in counterparts.items() if node != kept}
        for node in sorted(gone):
            self._graph.remove(node)
        for target, into in (edges | outer).items():
            self._graph.connect(target, into)
        order = [node for node in self._graph.children[parent or 0] if node not in gone]
        if single:
            nodes[group] = replace(nodes[group], repeats=run.times, parallel=run.parallel, shared=group in shared)
            self._graph.children[parent or 0] = order
            return []
        self._free += 1
        depth = nodes[parts[0]].depth
        trained = {node for node in parts if self._is_trained(node)}
        # An op with parameters has other parameters in each unit. A parameter that only one unit uses also differs.
        again = bool(trained) and trained <= shared and all(nodes[node].kind != "parameter" for node in private)
        nodes[group] = Node(group, "module", "", parent, depth, repeats=run.times, parallel=run.parallel, shared=again)
        for node in () if again else shared.intersection(parts):
            if nodes[node].repeats == 1:
                nodes[node] = replace(nodes[node], shared=True)
        members = {*private, *parts}
        inside = [node for node in order if node in members]
        self._graph.children[group] = inside
        self._graph.children[parent or 0] = [
            group if node == inside[0] else node for node in order if node == inside[0] or node not in members
        ]
        for node in inside:
            nodes[node] = replace(nodes[node], parent=group)
        return inside

    def _counterparts(self, siblings: Siblings, run: Run) -> dict[int, int]:
        """Map each node of all units to the corresponding node of the first unit."""
        kept: dict[Key, int] = {}
        pairs: dict[int, int] = {}
        for unit in run.units():
            for position in range(unit, unit + run.length):
                for offset, node in enumerate(siblings.subtrees[position]):
                    pairs[node] = kept.setdefault((position - unit, offset), node)
            for node, place in siblings.private(unit, run.length).items():
                pairs[node] = kept.setdefault(place, node)
        return pairs

    def _share(self, pairs: Mapping[int, int]) -> set[int]:
        """Mark as ``shared`` the kept calls inside the units that call the same module in every unit.

        Return all kept calls that call the same module in every unit: also the units themselves and calls inside a
        marked call.
        """
        nodes = self._graph.nodes
        calls = {node for node in pairs.values() if nodes[node].kind == "module"}
        others = {node for number, node in pairs.items() if self._graph.names(number) != self._graph.names(node)}
        # A frame has no name. It is the same in every unit if all calls inside it are the same.
        others |= {node for node in calls if not nodes[node].name and not others.isdisjoint(self._graph.subtree(node))}
        shared = {node for node in calls - others if self._is_trained(node)}
        outermost = {node for node in shared if nodes[node].parent not in shared and nodes[node].parent in calls}
        for node in calls & others | outermost:
            if nodes[node].repeats == 1:
                nodes[node] = replace(nodes[node], shared=node in outermost)
        return shared

    def _is_trained(self, call: int) -> bool:
        """Return True if a call has parameters; for a frame, if a call inside it has parameters."""
        node = self._graph.nodes[call]
        inside = self._graph.children.get(call, ()) if node.kind == "module" and not node.name else ()
        return bool(node.total_parameters or node.parameters) or any(map(self._is_trained, inside))

    def _join_names(self, pairs: Mapping[int, int]) -> None:
        """Collect the names of the modules and tied tensors of all units for the kept nodes."""
        found: dict[tuple[int, int], dict[tuple[str, ...], None]] = {}
        for node, kept in pairs.items():
            for place, names in enumerate(self._graph.names(node)):
                found.setdefault((kept, place), {})[names] = None
        for (kept, place), several in found.items():
            self._graph.members[kept, place] = tuple(name for names in several for name in names)
        nodes = self._graph.nodes
        for kept in {kept for kept, _ in found if nodes[kept].tied}:
            tied = self._graph.names(kept)[-len(nodes[kept].tied) :]
            nodes[kept] = replace(nodes[kept], tied=tuple(map(span, tied)))

    def _outer(self, siblings: Siblings, run: Run, group: int, pairs: Mapping[int, int]) -> dict[int, list[Edge]]:
        """Return the new incoming edges of the nodes outside of a run that use the run's results."""
        units = run.units()
        start, length, last = run.start, run.length, units[-1]
        whole = start, length, last + length
        everywhere = siblings.leaving(start, *whole)
        found: dict[int, list[Edge]] = {}
        leaving = {key[2]: None for key in (*everywhere, *siblings.leaving(last, *whole)) if isinstance(key[2], int)}
        for target in leaving | dict.fromkeys(siblings.joined_users(start, length, run.times)):
            if target in pairs:
                continue  # inside the run; an outer repetition passes these tensors on
            found[target] = []
            for edge in self._graph.into[target]:
                position, offset = siblings.place.get(edge.source, (-1, None))
                if pairs.get(edge.source) is None:
                    found[target].append(edge)
                    continue
                if siblings.in_step(target, (position - start) // length):
                    moved = _moved(edge, pairs, edge.multiplicity)
                    found[target].append(replace(moved, across=(*moved.across, (group, "each"))))
                    continue
                unit = position - (position - start) % length
                key = position - unit, offset, target, siblings.relation(edge, unit, length)
                number = everywhere.get(key, 0)
                if number and unit == start:
                    across: tuple[tuple[int, Repetition], ...] = (*edge.across, (group, "all"))
                    found[target].append(replace(edge, multiplicity=number * run.times, across=across))
                if unit == last and edge.multiplicity > number:
                    rest = edge.multiplicity - number
                    found[target].append(_moved(edge, pairs, rest))
        return found

    def _widen(self, pairs: Mapping[int, int]) -> None:
        """Extend the sizes and settings of the kept nodes to the ranges of all nodes that they replace."""
        nodes = self._graph.nodes
        given: dict[int, list[_Arguments]] = {}
        sizes: dict[int, set[int]] = {}
        for node_id, kept_id in pairs.items():
            kept, node = nodes[kept_id], nodes[node_id]
            given.setdefault(kept_id, []).append(node.arguments)
            sizes.setdefault(kept_id, set()).update(parameter_counts(node))
            if node_id == kept_id:
                continue
            if kept.outputs != node.outputs:
                self._widest.setdefault(kept_id, kept.outputs)
                nodes[kept_id] = replace(kept, outputs=tuple(map(_wider, kept.outputs, node.outputs)))
        for kept_id, several in given.items():
            if len(set(several)) > 1:
                nodes[kept_id] = replace(nodes[kept_id], arguments=_joined_arguments(several))
            if len(sizes[kept_id]) > 1:
                others = [pair for pair in nodes[kept_id].arguments if pair[0] != SIZE]
                ends = f"{min(sizes[kept_id])}…{max(sizes[kept_id])}"
                nodes[kept_id] = replace(nodes[kept_id], arguments=(*others, (SIZE, ends)))

    def _rebuilt(self) -> Graph:
        nodes = self._graph.nodes
        before: dict[int, list[Node]] = {}
        order = {node.id: place for place, node in enumerate(self._original.nodes)}
        for group in (node for number, node in nodes.items() if number not in order):
            first = min(order[node] for node in self._graph.subtree(group.id) if node in order)
            before.setdefault(self._original.nodes[first].id, []).append(group)
        kept: list[Node] = []
        for node in self._original.nodes:
            if node.id in nodes:
                # An inner frame is created after the frame around it, so it comes later in this list.
                kept += [*before.get(node.id, ()), nodes[node.id]]
        first_use = {edge.target: None for edge in self._original.edges}
        edges = (self._with_sizes(edge) for target in first_use for edge in self._graph.into.get(target, ()))
        return replace(self._original, nodes=tuple(kept), edges=tuple(edges))

    def _with_sizes(self, edge: Edge) -> Edge:
        """Return an edge whose tensor has the range of sizes that its source has."""
        before = self._widest.get(edge.source, ())
        if edge.tensor not in before:
            return edge
        return replace(edge, tensor=self._graph.nodes[edge.source].outputs[before.index(edge.tensor)])


def _repeated(siblings: Siblings, node: int, run: Run, group: int, pairs: Mapping[int, int]) -> list[Edge]:
    """Return the incoming edges of a node of the first unit, for all repetitions."""
    start, length = run.start, run.length
    position, offset = siblings.place[node]
    known: list[dict[Key, Edge]] = []
    for step in range(run.back + 1):
        each = siblings.subtrees[position + step * length][offset]
        port = siblings.port(each, start + step * length, start, length)
        into = siblings.graph.into.get(each, ())
        known.append({key: edge for (key, _), edge in zip(port, into, strict=True)})
    found = []
    for words, key, number in merged_ports(siblings, node, start, length, run.back, exact=False) or []:
        later = words.count("next")
        # Tensors from earlier repetitions are in the last port.
        place = later if "first" in words or not words else run.back
        edge = _moved(known[place][key], pairs, number, target=node)
        if number != edge.multiplicity or (not words and _differ(siblings, node, run, key[0])):
            edge = replace(edge, outputs=())
        if edge.part and _differ(siblings, node, run, key[0], parts=True):
            edge = replace(edge, part="")
        across: tuple[tuple[int, Repetition], ...] = tuple((group, word) for word in words)
        if not words and key[0][0] == "unit" and edge.relates("next"):
            across = ((group, "same"),)
        if sum(word == "each" for _, word in edge.across) % 2:
            across = (*across, (group, "each"))  # the source is the same step of a joined loop that is already folded
        number *= 1 if "first" in words else run.times - later
        found.append(replace(edge, multiplicity=number, across=(*edge.across, *across)))
    return found


def _differ(siblings: Siblings, node: int, run: Run, spot: Key, *, parts: bool = False) -> bool:
    """Return True if the counterparts of a node in all units take different outputs of a source outside of the run.

    With ``parts``, compare the parts of the edges instead of the outputs.
    """
    if spot[0] != "out" or (len(siblings.graph.nodes[spot[1]].outputs) < 2 and not parts):
        return False
    position, offset = siblings.place[node]
    same = (siblings.subtrees[position + unit - run.start][offset] for unit in run.units())
    into = (edge for each in same for edge in siblings.graph.into.get(each, ()))
    return len({edge.part if parts else edge.outputs for edge in into if edge.source == spot[1]}) > 1


def _moved(edge: Edge, pairs: Mapping[int, int], number: int, *, target: int | None = None) -> Edge:
    """Return an edge whose ends are replaced by the kept nodes."""
    across = tuple((pairs.get(group, group), word) for group, word in edge.across)
    goal = edge.target if target is None else target
    return replace(edge, source=pairs.get(edge.source, edge.source), target=goal, multiplicity=number, across=across)


def _joined_arguments(given: list[_Arguments]) -> _Arguments:
    """Join the arguments of several nodes. Arguments that a node lacks are left out.

    Values that differ become a range, such as ``0.0…0.3``. Dilations that differ are listed, including dilations of 1,
    which ``extra_repr`` of a convolution leaves out.
    """
    dilations = joined_dilations(given)
    joined = [(DILATION, dilations)] if dilations else []
    for name, first in given[0]:
        if name == DILATION and dilations:
            continue
        values = [value for arguments in given for other, value in arguments if other == name]
        if len(set(values)) == 1 or len(values) != len(given):
            joined += [(name, first)] if len(values) == len(given) else []
        else:
            joined.append((name, _range(values)))
    return tuple(joined)


def _range(values: list[str]) -> str:
    try:
        return f"{min(values, key=float)}…{max(values, key=float)}"
    except ValueError:  # no numbers
        return f"{values[0]} … {values[-1]}"


def _wider(one: TensorMeta, other: TensorMeta) -> TensorMeta:
    least = tuple(map(min, one.shape, other.shape))
    most = tuple(map(max, one.largest or one.shape, other.largest or other.shape))
    return replace(one, shape=least, largest=most if most != least else ())
