"""Random graphs with repetitions, built without running a model."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from lightning_recorder.graph import Edge, Graph, Node, TensorMeta

__all__ = ["wirings"]

_META = (TensorMeta((2, 4), "float32"),)

# An operation named "c" has two outputs. A source is an earlier value, counted from the last one or from the first
# one, a parameter of its own, or the result of the same step of an earlier loop.
_KINDS = ("back", "back", "back", "from start", "own", "joined")
_SOURCES = st.lists(st.tuples(st.sampled_from(_KINDS), st.integers(0, 4)), min_size=1, max_size=3)
_OP = st.tuples(st.just("op"), st.sampled_from("abc"), _SOURCES)
_GATHER = st.tuples(st.just("gather"), st.integers(1, 3), st.integers(1, 5))


def _loop(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    body = st.lists(inner, min_size=1, max_size=4)
    loop = st.tuples(st.just("loop"), st.integers(1, 5), body)
    joined = st.tuples(st.just("joined"), st.integers(2, 4), st.integers(1, 4), body, body)
    return loop | joined | st.tuples(st.just("call"), st.sampled_from("AB"), body)


_STATEMENT = st.recursive(_OP | _OP | _GATHER, _loop, max_leaves=10)


class _Builder:
    """Builds a graph from statements."""

    def __init__(self) -> None:
        self.nodes = [Node(0, "module", "", None, 0, type_name="Net")]
        self.edges: dict[tuple[int, int], Edge] = {}
        self.values: list[int] = []
        self.same_step: list[int] = []
        for name in ("x", "y"):
            self.values.append(self.add("input", name, 0, []))

    def add(self, kind: Any, name: str, parent: int, sources: list[tuple[int, int]], **about: Any) -> int:
        number = len(self.nodes)
        depth = self.nodes[parent].depth + 1
        outputs = _META * 2 if name == "c" else _META
        self.nodes.append(Node(number, kind, name, parent, depth, outputs=outputs, **about))
        places: dict[int, list[int]] = {}
        for source, place in sources:
            places.setdefault(source, []).append(place % len(self.nodes[source].outputs))
        for source, found in places.items():
            taken = tuple(found) if any(found) else ()
            self.edges[source, number] = Edge(source, number, len(found), _META[0], outputs=taken)
        return number

    def run(self, statements: list[Any], parent: int) -> None:
        for statement in statements:
            if statement[0] == "op":
                sources = [(self.source(kind, number, parent), number) for kind, number in statement[2]]
                self.values.append(self.add("op", statement[1], parent, sources))
            elif statement[0] == "gather":
                # Each of the last few values, or every second one of them, as when a loop collects its results.
                gathered = [(value, 0) for value in self.values[:: statement[1]][-statement[2] :]]
                self.values.append(self.add("op", "stack", parent, gathered))
            elif statement[0] == "joined":
                # As in a model with a cache, which is called several times.
                _, steps, calls, first, later = statement
                cache: list[int] = []
                for call in range(calls + 1):
                    before, cache = cache, []
                    around = self.add("module", f"m{len(self.nodes)}", parent, [], type_name="C")
                    for step in range(steps):
                        self.same_step.append(before[step] if before else self.values[-1])
                        self.run(later if call else first, around)
                        self.same_step.pop()
                        cache.append(self.values[-1])
            elif statement[0] == "loop":
                for _ in range(statement[1]):
                    self.run(statement[2], parent)
            else:
                call = self.add("module", f"m{len(self.nodes)}", parent, [], type_name=statement[1])
                self.run(statement[2], call)

    def source(self, kind: str, number: int, parent: int) -> int:
        if kind == "own":
            return self.add("parameter", f"w{number}", parent, [])
        if kind == "joined" and self.same_step:
            return self.same_step[-1]
        return self.values[-1 - number % len(self.values)] if kind == "back" else self.values[number % len(self.values)]


def _built(statements: list[Any]) -> Graph:
    builder = _Builder()
    builder.run(statements, 0)
    builder.add("output", "output", 0, [(builder.values[-1], 0)])
    return Graph(tuple(builder.nodes), tuple(builder.edges.values()))


wirings: st.SearchStrategy[Graph] = st.lists(_STATEMENT, min_size=1, max_size=4).map(_built)
"""Graphs of nested loops and calls whose statements take tensors from anywhere before."""
