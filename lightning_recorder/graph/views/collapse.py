"""A view in which module calls are closed: drawn without their contents."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace

from lightning_recorder.errors import checked_depth
from lightning_recorder.graph.model import Edge, Graph, Node, Repetition, TensorMeta
from lightning_recorder.graph.views.rebuild import joined_outputs, rebuilt

__all__ = ["close_calls", "closed_calls", "collapse"]

_COMPUTED_WEIGHT = "ParametrizationList"
_FARTHEST_NAME = 4  # maximum number of edges between a result and the function that it is named after


def collapse(graph: Graph, depth: float | None = None, *, leaves: bool = True, opened: Set[int] = frozenset()) -> Graph:
    """Close the module calls at a depth. At any depth, also close the calls that contain no other call.

    A closed call is a single node in place of its contents. Edges that cross its border lead to or from this node;
    edges inside it are removed. Its parameter count includes all submodules, called or not, and each parameter once.

    Args:
        graph: Any graph.
        depth: The greatest depth that is shown. The root has depth 0. So 1 shows the closed children of the root, and 0
            shows the whole model as one node between its inputs and outputs. ``None`` and ``float("inf")`` set no
            limit.
        leaves: Also close the calls that contain no other call; otherwise the functions inside them are shown. The
            parametrization of a weight, such as a weight norm, does not count as another call.
        opened: The ids of calls that stay open at any depth.

    Raises:
        ArgumentError: If the depth is negative.
    """
    limit = checked_depth("depth", depth)
    if limit == 0:
        return collapse(_in_a_box(graph), 1)
    return close_calls(graph, closed_calls(graph, limit, leaves=leaves, opened=opened))


def close_calls(graph: Graph, closed: Set[int]) -> Graph:
    """Replace calls by single nodes, like :func:`collapse`.

    If a call has several results, :attr:`Edge.part` of an edge from it names the function that computed the tensor.
    """
    target: dict[int, int] = {}
    parameters: dict[int, int] = {}
    counted: set[tuple[int, str]] = set()
    for node in graph.nodes:
        inside = target.get(node.parent) if node.parent is not None else None
        if inside is not None and inside in closed:
            target[node.id] = inside
            # Count the parameters of a module only once if it is called several times.
            if node.parameters and (inside, node.name) not in counted:
                counted.add((inside, node.name))
                parameters[inside] = parameters.get(inside, 0) + node.parameters
        else:
            target[node.id] = node.id
    # A graph built by hand or written by an earlier release may have no total_parameters.
    kept = [
        replace(node, parameters=node.total_parameters or node.parameters + parameters.get(node.id, 0))
        if node.id in closed
        else node
        for node in graph.nodes
        if target[node.id] == node.id
    ]
    # The multiplicity of an edge into a closed call is the number of tensors that enter the call, not the number of
    # times that its contents read them.
    entering: dict[tuple[object, ...], Edge] = {}
    reads: dict[tuple[object, ...], dict[TensorMeta | None, int]] = {}
    names = _names_of_results(graph, closed, target)
    for edge in graph.edges:
        goal = target[edge.target]
        if edge.source in names and target[edge.source] != goal:
            edge = replace(edge, part=names[edge.source])
        across = _visible(edge, target)
        if edge.across and not across and target[edge.source] == goal:
            continue
        edge = replace(edge, across=across) if across != edge.across else edge
        if goal in closed and target[edge.source] != goal:
            key = edge.source, goal, across
            # An edge with several tensors has the shape of only one of them.
            meta = edge.tensor if edge.multiplicity == 1 else None
            counts = reads.setdefault(key, {})
            counts[meta] = counts.get(meta, 0) + edge.multiplicity
            times = _most(graph[edge.source], graph[goal], counts, graph.occurrences(replace(edge, target=goal)))
            before = entering.get(key, edge)
            places = joined_outputs(before, edge) if key in entering else edge.outputs
            entering[key] = replace(before, target=goal, multiplicity=times, outputs=places)
        else:
            entering.setdefault((edge.source, edge.target, across), edge)
    return rebuilt(graph, kept, target, entering.values())


def _names_of_results(graph: Graph, closed: Set[int], target: Mapping[int, int]) -> dict[int, str]:
    """Name the results of closed calls with several results, such as ``cos`` and ``sin``, after the computing nodes.

    A result is named after the node that computes it, or after the module around this node. If two results get the same
    name, the nodes that compute the inputs of these nodes are tried.
    """
    results: dict[int, dict[int, None]] = {}
    for edge in graph.edges:
        call = target[edge.source]
        if call in closed and call != target[edge.target] and len(graph[call].outputs) > 1:
            results.setdefault(call, {})[edge.source] = None
    names: dict[int, str] = {}
    for call, sources in results.items():
        nodes = [graph[source] for source in sources]
        for _ in range(_FARTHEST_NAME if len(nodes) > 1 else 0):
            found = [_name_inside(node, call, graph) for node in nodes]
            if len(set(found)) == len(found):
                names |= dict(zip(sources, found, strict=True))
                break
            nodes = [_before(node, call, graph, target) for node in nodes]
    return names


def _name_inside(node: Node, call: int, graph: Graph) -> str:
    """Return the last part of the name of a node, or of the outermost module around the node and inside ``call``."""
    around = [each for each in graph.ancestors(node) if any(outer.id == call for outer in graph.ancestors(each))]
    return (around[-1] if around else node).name.rpartition(".")[2]


def _before(node: Node, call: int, graph: Graph, target: Mapping[int, int]) -> Node:
    """Return the first function inside a call that a node takes a tensor from; the node itself if there is none."""
    inside = (edge.source for edge in graph.into(node) if target[edge.source] == call)
    return next((graph[each] for each in inside if graph[each].kind == "op"), node)


def _most(source: Node, call: Node, reads: Mapping[TensorMeta | None, int], occurrences: int) -> int:
    """Return an upper bound of the number of tensors from a source that enter a call.

    ``reads`` counts how often the contents of the call read tensors, by their description. A tensor that is read twice
    enters once. So for each description, the number is at most the number of such outputs of the source and the number
    of such arguments of the call. If the call has no such argument, the tensors enter as an attribute or in an object.
    """
    every = max(1, len(source.outputs))
    number = 0
    for meta, times in reads.items():
        least = [each for each in (source.outputs.count(meta), call.inputs.count(meta)) if each] if meta else []
        number += min(times, min(least, default=every) * occurrences)
    return min(number, every * occurrences)


def _visible(edge: Edge, target: Mapping[int, int]) -> tuple[tuple[int, Repetition], ...]:
    """Return the relations of an edge to repetitions, without repetitions inside closed calls."""
    paired = [group for group, word in edge.across if word == "each"]
    alone = {}
    for one, other in zip(paired[::2], paired[1::2], strict=True):
        # If only the target is in a closed call, the call takes the tensors of all repetitions of the source.
        alone[one], alone[other] = target[other] != other, target[one] != one
    return tuple(
        (group, "all" if word == "each" and alone[group] else word)
        for group, word in edge.across
        if target[group] == group and not (word == "each" and alone[group] and group in paired[1::2])
    )


def closed_calls(graph: Graph, depth: int | None, *, leaves: bool = True, opened: Set[int] = frozenset()) -> set[int]:
    """Return the calls that :func:`collapse` closes, and the calls inside them."""
    open_calls = {child.parent for child in graph.module_calls() if child.type_name != _COMPUTED_WEIGHT}
    open_calls.add(graph.root.id)
    return {
        node.id
        for node in graph.module_calls()
        if (leaves and node.id not in open_calls)
        or (depth is not None and node.depth >= depth and node.id not in opened)
    }


_OUTER = -1  # no recorded node has this id


def _in_a_box(graph: Graph) -> Graph:
    """Return a graph with a new root that contains the inputs, the model as one call, and the outputs."""
    root = graph.root
    ends: dict[str, list[Node]] = {"input": [], "output": []}
    inside = []
    for node in graph.nodes[1:]:
        if node.kind in ends and node.parent == root.id:
            ends[node.kind].append(replace(node, parent=_OUTER))
        else:
            inside.append(replace(node, depth=node.depth + 1))
    outputs = root.outputs or tuple(meta for node in ends["output"] for meta in node.outputs)
    box = replace(root, parent=_OUTER, depth=1, outputs=outputs)
    outer = replace(root, id=_OUTER, outputs=())
    around = {node.id for nodes in ends.values() for node in nodes}
    edges: list[Edge] = []
    for edge in graph.edges:
        # If the model returns its input, the edge from the input to the output is led through the call.
        direct = {edge.source, edge.target} <= around
        edges += (replace(edge, target=box.id), replace(edge, source=box.id)) if direct else (edge,)
    return replace(graph, nodes=(outer, *ends["input"], box, *inside, *ends["output"]), edges=tuple(edges))
