"""The order in which module calls begin and end, from the recorded graph of a run."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from lightning_recorder.functions import function_of, function_sites
from lightning_recorder.graph.model import Graph
from lightning_recorder.names import Site

__all__ = ["RANDOM_CLASSES", "CallOrder", "in_execution_order"]

RANDOM_CLASSES = ("Dropout", "RReLU", "StochasticDepth", "DropPath")
"""Parts of the class names of modules that draw random numbers."""


class CallOrder:
    """The positions in time at which the calls of each module begin and end.

    Args:
        graph: The graph of the first run. With ``None``, each module is assumed to be called once.
        changed: The names of modules that differ between the runs. These modules, and random modules such as dropout,
            may return different outputs for equal inputs.
    """

    def __init__(self, graph: Graph | None = None, changed: Iterable[str] = ()) -> None:
        self._suspects = set(changed)
        self._first_calls: set[Site] = set()  # the sites of first calls, if later calls have separate sites
        self._begins: dict[str, list[int]] = {}
        self._ends: dict[str, list[int]] = {}
        if graph is None:
            return
        time = 0
        opened: list[tuple[int, str]] = []
        inside: dict[int | None, int] = {}  # the nesting depth of each module call
        functions = function_sites(graph)
        for node in graph.nodes:
            if node.id in functions:
                while len(opened) > inside.get(node.parent, -1) + 1:
                    time += 1
                    self._ends.setdefault(opened.pop()[1], []).append(time)
                time += 1
                self._note_function(functions[node.id], time)
            if node.kind != "module":
                continue
            if any(name in node.type_name for name in RANDOM_CLASSES):
                self._suspects.add(node.name)
            level = inside[node.id] = inside.get(node.parent, -1) + 1
            while len(opened) > level:
                time += 1
                self._ends.setdefault(opened.pop()[1], []).append(time)
            time += 1
            self._begins.setdefault(node.name, []).append(time)
            opened.append((node.id, node.name))
        while opened:
            time += 1
            self._ends.setdefault(opened.pop()[1], []).append(time)

    def _note_function(self, name: str, time: int) -> None:
        self._begins.setdefault(name, []).append(time)
        self._ends.setdefault(name, []).append(time)
        function = function_of(name)
        if function is not None and any(each in function.type_name for each in RANDOM_CLASSES):
            self._suspects.add(name)

    def __contains__(self, site: Site) -> bool:
        return site.name in self._begins

    def times(self, site: Site, *, is_backward: bool = False) -> Sequence[int]:
        """Return the times at which a tensor is computed, ascending. Times in the backward pass are negative.

        A path that ends with ``#2`` belongs to the second call, if the recorder records calls separately.
        """
        times = (self._begins if site.path.startswith("in") else self._ends).get(site.name, [])
        number = _call_number(site)
        if number > 1 or site in self._first_calls:
            times = times[number - 1 : number] or times[-1:]
        return [-time for time in reversed(times)] if is_backward else times

    def sort(self, sites: Iterable[Site], *, is_backward: bool = False) -> list[Site]:
        """Sort sites by the time of their last call, since a record merges all calls of a module."""
        found = in_execution_order(sites, is_backward=is_backward)
        further = {Site(site.name, site.path.rpartition("#")[0]) for site in found if _call_number(site) > 1}
        self._first_calls.update(further)
        if not all(site in self for site in found):
            return found
        return sorted(found, key=lambda site: self.times(site, is_backward=is_backward)[-1])

    def first(self, apart: Sequence[Site], same: Collection[Site], *, is_backward: bool = False) -> Site:
        """Return the site that differs first.

        A module with several calls differs if any of its calls differs. So its difference usually follows from the
        first differing site with a single call. The module comes before that site only if it may itself be the cause,
        and if it is called after the last equal site.

        ``apart`` has the differing sites in the order of :meth:`sort`.
        """
        if not all(site in self for site in apart):
            return apart[0]
        times = {site: self.times(site, is_backward=is_backward) for site in apart}
        until = min((each[0] for each in times.values() if len(each) == 1), default=math.inf)
        others = (self.times(site, is_backward=is_backward) for site in same)
        since = max((each[0] for each in others if len(each) == 1 and each[0] < until), default=-math.inf)

        def first_call(site: Site) -> float:
            calls = times[site]
            after = since if site.name in self._suspects else until if math.isfinite(until) else since
            return calls[0] if len(calls) == 1 else next((time for time in calls if after < time), math.inf)

        return min(apart, key=first_call)


def _call_number(site: Site) -> int:
    """Return the call number at the end of a path; 1 if there is none."""
    _, mark, number = site.path.rpartition("#")
    return int(number) if mark and number.isdecimal() else 1


def in_execution_order(sites: Iterable[Site], *, is_backward: bool = False) -> list[Site]:
    """Sort sites, given in the order of their modules, into the order in which their tensors are computed.

    A parent module receives its input before its children run, and returns its output after them.
    """
    sites = list(sites)
    last: dict[str, int] = {}
    for place, site in enumerate(sites):
        parts = site.name.split(".") if site.name else []
        last.update({".".join(parts[:depth]): place for depth in range(len(parts) + 1)})

    def order(place: int) -> tuple[int, int, int]:
        name, path = sites[place]
        if path.startswith("in"):
            return place, 0, place
        return last[name], -name.count(".") - bool(name), place

    found = [sites[place] for place in sorted(range(len(sites)), key=order)]
    return found[::-1] if is_backward else found
