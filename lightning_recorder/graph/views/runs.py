"""Runs of equal consecutive units, and loops whose steps feed each other."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from lightning_recorder.graph.model import Node
from lightning_recorder.graph.views.forms import without_numbers
from lightning_recorder.graph.views.wiring import (
    FARTHEST,
    Key,
    Merged,
    MutableGraph,
    Siblings,
    merge_deep_ports,
    merge_ports,
)

__all__ = ["Loop", "Run", "equal_units", "joined_loops", "longest_stretch", "merged_ports", "unit_offset"]


@dataclass(frozen=True)
class Run:
    """A run of equal units, one after the other, among the parts of a call."""

    start: int
    length: int
    times: int
    parallel: bool
    back: int = 1
    """The maximum distance, in units, between the unit that computes a tensor and the unit that uses the tensor."""

    def units(self) -> range:
        """Return the positions of the units."""
        return range(self.start, self.start + self.length * self.times, self.length)


def equal_units(siblings: Siblings, start: int, length: int, end: int) -> Run:
    """Return the longest run of equally connected units that starts at a position."""
    most = (end - start) // length
    siblings.find_initial(start, length)
    run = _equally_fed(siblings, start, length, most, 1)
    if run.times == most or most < 3:
        return run
    probe = siblings.ports(start + min(FARTHEST, most - 1) * length, start, length).values()
    back = max((key[0][3] for port in probe for key, _ in port if key[0][0] == "before"), default=1)
    return max(run, _equally_fed(siblings, start, length, most, back), key=lambda each: each.times) if back > 1 else run


def _equally_fed(siblings: Siblings, start: int, length: int, most: int, back: int) -> Run:
    """Return the longest run of units with corresponding inputs. The inputs come from at most ``back`` units before."""
    if back >= most:
        return Run(start, length, 1, True)
    ports = [siblings.ports(start + step * length, start, length) for step in range(back + 1)]
    unit = (siblings.graph.nodes[node] for tree in siblings.subtrees[start : start + length] for node in tree)
    parallel = all(node.kind != "optimizer" for node in unit)  # an optimizer step affects everything after it
    for relative, offset in {key: None for port in ports for key in port}:
        merged = merged_ports(siblings, siblings.subtrees[start + relative][offset], start, length, back)
        if merged is None:
            return Run(start, length, 1, True)
        parallel &= all("next" not in words for words, _, _ in merged)
    times = back + 1
    while times < most and siblings.ports(start + times * length, start, length) == ports[-1]:
        times += 1
    times = _equally_named(siblings, start, length, times)
    used = _equally_used(siblings, start, length, times)
    while back < used < times:
        # Check again after shortening the run: the units that were left out are now outside, and may use its results.
        times, used = used, _equally_used(siblings, start, length, used)
    return Run(start, length, used, parallel, back) if used > back else Run(start, length, 1, True)


def merged_ports(
    siblings: Siblings, node: int, start: int, length: int, back: int, *, exact: bool | None = None
) -> Merged | None:
    """Merge the sources of a node of the first unit and of the corresponding nodes; see :func:`merge_ports`."""
    position, offset = siblings.place[node]
    ports = [
        siblings.port(siblings.subtrees[position + step * length][offset], start + step * length, start, length)
        for step in range(back + 1)
    ]
    if back > 1:
        return merge_deep_ports(ports)
    first = siblings.graph.nodes[node]
    exact = first.kind == "op" if exact is None else exact
    return merge_ports(ports[0], ports[1], exact=exact, from_zero=_is_from_zero(first))


def _is_from_zero(node: Node) -> bool:
    """Return True for a function that adds a tensor to 0, as Python's ``sum`` does first, or subtracts it from 0."""
    known = {"add": ("input", "other"), "sub": ("input",)}.get(node.name, ())
    return node.kind == "op" and any(name in known and value in ("0", "0.0") for name, value in node.arguments)


def _equally_named(siblings: Siblings, start: int, length: int, times: int) -> int:
    """Return the number of units that call corresponding modules: at each place, the same or a not yet called module.

    A place is a position inside a unit. The names of the modules at a place may differ only in numbers. The same holds
    for the names of tied tensors. For each place, all units agree on two more properties: whether
    the module was called before the first unit, and whether another place of the unit calls the same module. Modules
    that were called before are called again in the order of their first calls, or in the reverse order.
    """
    units = [siblings.names(start + unit * length, length) for unit in range(times)]
    first = units[0]
    begin = min(siblings.subtrees[start])  # a frame has a larger id than its contents
    graph = siblings.graph
    before = [graph.rank(names[0])[0] < begin for names in first]
    places = [first.index(names) for names in first]
    kinds = [_without_numbers(names) for names in first]
    seen = {name for names in first for name in names}
    shared = steps = None
    for unit in range(1, times):
        found = units[unit]
        again = [names == known for names, known in zip(found, first, strict=True)]
        if [_without_numbers(names) for names in found] != kinds:
            return unit
        new = {name for names, is_known in zip(found, again, strict=True) if not is_known for name in names}
        if shared not in (None, again) or not seen.isdisjoint(new):
            return unit
        if [graph.rank(names[0])[0] < begin for names in found] != before:
            return unit
        if [found.index(names) for names in found] != places:
            return unit
        moves = [
            None if is_known else _move(graph, old[0], names[0], is_late)
            for old, names, is_known, is_late in zip(units[unit - 1], found, again, before, strict=True)
        ]
        if steps not in (None, moves) or 0 in moves:
            return unit
        shared, steps = again, moves
        seen |= new
    return times


def _without_numbers(names: Iterable[str]) -> set[str]:
    return set(map(without_numbers, names))


def _move(graph: MutableGraph, name: str, after: str, is_late: bool) -> int | None:
    """Return the step from one module or tensor to another: 1, -1, or 0 for any other step.

    Both are at the same place of two consecutive units. Return None for modules that were not called before, for which
    any step is allowed.
    """
    if name.startswith("="):
        numbers = [list(map(int, re.findall("[0-9]+", each))) for each in (name, after)]
        moves = [there - here for here, there in zip(*numbers, strict=False) if there != here]
        return moves[0] if len(moves) == 1 and abs(moves[0]) == 1 else 0
    if not is_late:
        return None
    move = graph.rank(after)[1] - graph.rank(name)[1]
    return move if abs(move) == 1 else 0


def _equally_used(siblings: Siblings, start: int, length: int, times: int) -> int:
    """Return the number of units, from the first on, whose results are used in the same way outside of the run.

    The results of the last of these units may have additional uses.
    """
    end = start + length * times
    uses = siblings.leaving(start, start, length, end)
    for unit in range(1, times):
        others = siblings.leaving(start + unit * length, start, length, end)
        if any(others.get(key, 0) < number for key, number in uses.items()):
            times = unit
            break
        if others != uses:
            times = unit + 1
            break
    targets = {key[2] for key in uses if isinstance(key[2], int)}  # other keys are places in joined loops
    inside = any(start <= siblings.place.get(target, (-1,))[0] < end for target in targets)
    if inside or not all(siblings.in_turn(target, list(uses), start, length, times) for target in targets):
        return 1
    return times


def unit_offset(siblings: Siblings, start: int, end: int, length: int) -> int:
    """Return the offset at which to divide a stretch into units, so that the fewest tensors pass between units.

    Only offsets that keep the number of units are considered.
    """
    spare = (end - start) % length
    if not spare:
        return 0
    alive = [0] * (end - start + 1)
    for position in range(start, end):
        for offset in siblings.sources[position]:
            users = siblings.graph.users.get(siblings.subtrees[position][offset], {}).values()
            places = (siblings.place.get(edge.target, (-1,))[0] for edge in users)
            last = max((place for place in places if place < end), default=-1)
            if last > position:
                alive[position + 1 - start] += 1
                alive[last + 1 - start] -= 1
    for place in range(1, len(alive)):
        alive[place] += alive[place - 1]
    # Leave out the start of the first unit: the first unit takes tensors from outside instead.
    cuts = [alive[offset + length : end - start : length] for offset in range(spare + 1)]
    means = [round(sum(each) / len(each), 6) if each else 0.0 for each in cuts]
    return means.index(min(means))


def longest_stretch(free: list[bool]) -> range:
    """Return the positions of the longest stretch of True."""
    best = range(0)
    start = 0
    for place in range(len(free) + 1):
        if place == len(free) or not free[place]:
            best = max(best, range(start, place), key=len)
            start = place + 1
    return best


@dataclass(eq=False)
class Loop:
    """A stretch of equal units of a call that may not be foldable on its own.

    The units of a loop are called its steps. Two loops with equal numbers of steps are joined if each step of one takes
    tensors from the step of the other with the same number. For example, in a second call of a model, each layer takes
    its cache from the first call of the same layer. Joined loops can only be folded together.
    """

    siblings: Siblings
    start: int
    length: int
    times: int

    @property
    def end(self) -> int:
        """The position after the last step."""
        return self.start + self.length * self.times

    @property
    def first(self) -> int:
        """The first node of the loop."""
        return self.siblings.parts[self.start]

    def nodes(self, *steps: int) -> Iterator[tuple[int, int, Key]]:
        """Yield each node of the given steps, or of all steps, with its step and its place inside the step."""
        for step in steps or range(self.times):
            for relative in range(self.length):
                tree = self.siblings.subtrees[self.start + step * self.length + relative]
                yield from ((node, step, (relative, offset)) for offset, node in enumerate(tree))

    def check(self) -> Run:
        """Return the run of equal units at the start of the loop."""
        self.siblings.loop = self
        return equal_units(self.siblings, self.start, self.length, self.end)


def joined_loops(loops: Iterable[Loop], worth: Callable[[Loop, Run], bool]) -> Iterator[tuple[Loop, Run]]:
    """Yield the loops to fold together, in execution order, with their runs.

    Fold each loop before taking the next one, since its run is computed after the earlier loops were folded.

    Args:
        loops: All loops of a graph.
        worth: Returns True if a loop is worth folding. All loops that are joined with such a loop are yielded, too.
    """
    links = _links(loops)
    alive = _disjoint({loop: None for pair in links for loop in pair})
    while True:
        joined = {node: (loop, step, place) for loop in alive for node, step, place in loop.nodes()}
        for loop in alive:
            loop.siblings.joined = joined
        runs = {loop: run for loop in alive if (run := loop.check()).times == loop.times}
        links = [pair for pair in links if runs.keys() >= set(pair)]
        before, alive = alive, [loop for loop in runs if any(loop in pair for pair in links)]
        if alive == before:
            break
    wanted = {loop for loop in alive if worth(loop, runs[loop])}
    for _ in alive:
        wanted |= {loop for pair in links if wanted & set(pair) for loop in pair}
    for loop in sorted(wanted, key=lambda each: each.first):
        yield loop, loop.check()
        for node, _, _ in loop.nodes():
            del joined[node]


def _links(loops: Iterable[Loop]) -> list[tuple[Loop, Loop]]:
    """Return the pairs of loops in which both of the first two steps of the second loop take tensors from the first."""
    places: dict[int, list[tuple[Loop, int]]] = {}
    for loop in loops:
        for node, step, _ in loop.nodes(0, 1):
            places.setdefault(node, []).append((loop, step))
    found: dict[tuple[Loop, Loop], set[int]] = {}
    for loop in loops:
        users = loop.siblings.graph.users
        for node, step, _ in loop.nodes(0, 1):
            for edge in users.get(node, {}).values():
                for other, same in places.get(edge.target, ()):
                    if other.first > loop.first and same == step and other.times == loop.times:
                        found.setdefault((loop, other), set()).add(step)
    return [pair for pair, steps in found.items() if len(steps) > 1]


def _disjoint(loops: Iterable[Loop]) -> list[Loop]:
    """Return loops that have no common nodes. Outer loops, then loops with more parts, are preferred."""

    def order(loop: Loop) -> tuple[int, int, int]:
        first = loop.siblings.graph.nodes[loop.first]
        return first.depth, -loop.length * loop.times, loop.length

    covered: set[int] = set()
    chosen = []
    for loop in sorted(loops, key=order):
        nodes = {node for node, _, _ in loop.nodes()}
        if covered.isdisjoint(nodes):
            covered |= nodes
            chosen.append(loop)
    return chosen
