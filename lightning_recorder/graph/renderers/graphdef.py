"""A graph as a ``GraphDef`` for the Graphs tab of TensorBoard."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_recorder.errors import check_integer
from lightning_recorder.graph.model import Edge, Graph, Node
from lightning_recorder.graph.renderers.base import BaseRenderer
from lightning_recorder.graph.renderers.escape import ascii_text
from lightning_recorder.graph.renderers.labels import own_name, times
from lightning_recorder.graph.views.collapse import collapse
from lightning_recorder.graph.views.fit import drawn_nodes, truncate

if TYPE_CHECKING:
    from tensorboard.compat.proto.graph_pb2 import GraphDef

__all__ = ["to_graph_def"]

_MAX_NODES = 20_000
# The tab lays out a scope recursively. A scope of 1,000 nodes in a row takes 3 s in Chromium. A scope of 2,000 nodes
# overflows the stack, and the tab shows nothing.
_MAX_SIBLINGS = 500


def to_graph_def(graph: Graph, max_nodes: int = _MAX_NODES) -> GraphDef:
    """Convert a graph to a ``GraphDef`` of TensorBoard, in which each module call is a scope that a double click opens.

    The name of a node contains the module calls around it, as in ``encoder/layers/0/linear1/linear``. A second node of
    that name ends in ``linear(2)``. The ``op`` of a node is the function, or the class of a closed module call.
    Parameters and buffers are constants, which the tab draws as dots beside their users. An edge to the next repetition
    of a folded call is a control dependency, which the tab draws with a dashed line. Attributes hold shapes, dtype,
    autograd types, source line and number of parameters.

    Args:
        graph: Any graph. A recorded graph needs no view, since users open and close calls in the tab.
        max_nodes: The maximum number of nodes. If the graph has more, its innermost calls are closed.

    Raises:
        ArgumentError: If ``max_nodes`` is below 1.

    Example:
        >>> import torch
        >>> from lightning_recorder.graph import capture_graph
        >>> definition = to_graph_def(capture_graph(torch.nn.Sequential(torch.nn.Linear(4, 3)), torch.ones(2, 4)))
        >>> for node in definition.node:
        ...     print(node.name, node.op, list(node.input))
        input input []
        0/weight Const(parameter) []
        0/bias Const(parameter) []
        0/linear linear ['input', '0/weight', '0/bias']
        output output ['0/linear']
    """
    check_integer("max_nodes", max_nodes, 1)
    return _GraphDefRenderer(_small_enough(graph, max_nodes)).render()


def _small_enough(graph: Graph, max_nodes: int) -> Graph:
    """Return the graph, or its deepest view with at most ``max_nodes`` nodes."""
    view = graph
    depth = max((node.depth for node in graph.module_calls()), default=0)
    while depth and len(drawn_nodes(view)) > max_nodes:
        view = collapse(graph, depth)
        depth -= 1
    return truncate(view, max_nodes)


class _GraphDefRenderer(BaseRenderer["GraphDef"]):
    """Renders a graph as nodes whose names are nested like the module calls."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self._names = _nested_names(graph)
        self._defs: dict[int, Any] = {}

    @override
    def make_canvas(self) -> GraphDef:
        from tensorboard.compat.proto.graph_pb2 import GraphDef

        return GraphDef()

    @override
    def render_node(self, canvas: GraphDef, node: Node) -> None:
        device = node.outputs[0].device if node.outputs else ""
        drawn = canvas.node.add(name=self._names[node.id], op=_op(node), device=ascii_text(device))
        self._defs[node.id] = drawn
        for meta in node.outputs:
            shape = drawn.attr["_output_shapes"].list.shape.add()
            for size, largest in zip(meta.shape, meta.largest or meta.shape, strict=True):
                shape.dim.add(size=size if size == largest else -1)  # the tab shows -1 as ?
        for name, value in _attributes(node, self.graph).items():
            attribute = drawn.attr[name]
            if isinstance(value, str):
                attribute.s = ascii_text(value).encode()
            elif isinstance(value, float):
                attribute.f = value
            elif value is True:
                attribute.b = value
            else:
                attribute.i = value

    @override
    def render_recursive_node(self, canvas: GraphDef, node: Node) -> None:
        """Render only the contents. Their names contain the scope of the call."""
        self.render_contents(canvas, node)

    @override
    def render_edge(self, canvas: GraphDef, edge: Edge) -> None:
        if edge.source not in self._defs or edge.target not in self._defs:
            return  # the source or target is an open call; no view of this package makes such an edge
        target = self._defs[edge.target]
        if edge.relates("next"):
            # The tab draws a control dependency with a dashed line. It must follow the other inputs.
            target.input.append(f"^{self._names[edge.source]}")
            return
        place = sum(not name.startswith("^") for name in target.input)
        target.input.insert(place, self._names[edge.source])
        number = times(edge, self.graph)
        if number > 1 or "multiplicity" in target.attr:
            # The number of tensors on each input, in the order of the inputs.
            numbers = target.attr["multiplicity"].list.i
            numbers.extend([1] * (place - len(numbers)))
            numbers.append(number)


def _attributes(node: Node, graph: Graph) -> dict[str, str | int | float]:
    """Return the non-empty attributes that the tab shows for a selected node."""
    call = node if node.kind == "module" or node.parent is None else graph[node.parent]
    # The tab shows shapes on edges, but draws a parameter as a dot without an edge.
    shape = str(node.outputs[0]).replace("×", "x") if node.kind in ("parameter", "buffer") and node.outputs else ""
    found: dict[str, str | int | float] = {
        "shape": shape,
        "dtype": ", ".join(dict.fromkeys(meta.dtype for meta in node.outputs)),
        "autograd": ", ".join(node.autograd),
        "source": node.source,
        "scope": node.scope,
        "module": f"{call.name} ({call.type_name})".strip() if call.type_name else call.name,
        "parameters": node.total_parameters or node.parameters,
        "repeats": node.repeats if node.repeats > 1 else 0,
        "parallel": node.parallel,
        "shared": node.shared,
        "failed": node.failed,
        "duration_ms": float(node.duration_ms or 0),
    }
    return {name: value for name, value in found.items() if value}


# Names that the tab reserves. Its JavaScript keeps nodes and ops in plain objects, so the names of the built-in
# properties of objects are reserved. The other two names are those of the tab's own root and library.
_TAKEN = frozenset(
    (
        "__defineGetter__",
        "__defineSetter__",
        "__function_library__",
        "__lookupGetter__",
        "__lookupSetter__",
        "__proto__",
        "__root__",
        "constructor",
        "hasOwnProperty",
        "isPrototypeOf",
        "propertyIsEnumerable",
        "toLocaleString",
        "toString",
        "valueOf",
    )
)


def _op(node: Node) -> str:
    if node.kind in ("parameter", "buffer"):
        return f"Const({node.kind})"
    op = _part({"module": node.type_name, "op": node.name}.get(node.kind, node.kind)) or node.kind
    # The tab draws an op that contains "Const" or ends in "Summary" as a dot beside its users.
    op = op.replace("Const", "const").replace("Summary", "summary")
    return f".{op}" if op in _TAKEN else op


def _nested_names(graph: Graph) -> dict[int, str]:
    """Return a unique name for each node, prefixed by the calls around it and separated by ``/``."""
    names = {graph.root.id: ""}
    given: dict[str, int] = {}
    for call in graph.nodes:
        children = graph.children(call)
        for place, node in enumerate(children):
            name = "/".join([*_scopes(names[call.id], place, len(children)), *_parts(node, graph)])
            if name.partition("/")[0] in _TAKEN:
                name = f".{name}"
            names[node.id] = _numbered(name, node.call, given)
    return names


def _scopes(call: str, place: int, number: int) -> list[str]:
    """Return the scopes around a child of a call; if there are too many children, extra scopes group them."""
    first = place - place % _MAX_SIBLINGS
    further = [f"{first + 1}-{min(first + _MAX_SIBLINGS, number)}"] if number > _MAX_SIBLINGS else []
    return [*([call] if call else []), *further]


def _parts(node: Node, graph: Graph) -> list[str]:
    """Return the path of a node inside its call. For a module in a list, it consists of the list and the index."""
    own = own_name(node, graph)
    dotted = own.split(".") if node.kind in ("module", "parameter", "buffer") else [own]
    *around, last = map(_part, dotted)
    # A scope has no attributes in the tab, so its name contains the repetitions.
    again = f"(x{node.repeats}{'_same_weights' * node.shared})" if node.repeats > 1 else ""
    return [part or "unnamed" for part in (*around, last + again)]


def _numbered(name: str, call: int, given: dict[str, int]) -> str:
    """Return the name with the number of the call, or with the next free number if that number is taken.

    The number is in parentheses, which no other name contains. The tab would group five or more names such as ``add_2``
    into one node, even if other nodes are between them.
    """
    number = given[name] = max(call, given.get(name, 0) + 1)
    return f"{name}({number})" if number > 1 else name


def _part(name: str) -> str:
    """Replace characters of a name that are reserved in paths: ``/`` opens a scope, ``:`` numbers outputs."""
    kept = re.sub(r"[^A-Za-z0-9_.-]+", "_", name)
    return kept if kept == name else kept.strip("_")
