"""A view in which functions that compute a constant are joined into one node."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from lightning_recorder.graph.model import IN_PLACE, RECOMPUTED, VMAPPED, Graph, Node
from lightning_recorder.graph.views.rebuild import rebuilt

__all__ = ["CONSTANT", "UPDATE", "UPDATED", "drop_numbers", "join_constants", "join_updates"]

CONSTANT, UPDATE, UPDATED = "functions, no input", "functions that change parameters", "updated tensors"
"""The ends of the notes of nodes that replace several functions."""

_LEAST = 4  # minimum number of functions to join


def join_constants(graph: Graph) -> Graph:
    """Join four or more functions that compute a constant, such as a table of positions, into one node.

    The functions compute one tensor and take no tensors from elsewhere, except for buffers of one number, such as a
    stride. The name of the node has the names of the first and last function. The note of the node has the number of
    functions. Functions in different calls and functions that draw random numbers are not joined.

    Args:
        graph: A view that is not folded.
    """
    users: dict[int, set[int]] = {}
    constant: set[int] = set()
    for node in graph.nodes:
        sources = {edge.source for edge in graph.into(node)}
        for source in sources:
            users.setdefault(source, set()).add(node.id)
        is_setting = node.kind == "buffer" and not any(meta.shape for meta in node.outputs)
        if is_setting or (_is_plain(node) and sources <= constant):
            constant.add(node.id)
    target = {node.id: node.id for node in graph.nodes}
    names: dict[int, list[str]] = {}
    for last in reversed(graph.nodes):
        is_free = last.kind == "op" and last.id in constant and target[last.id] == last.id
        # The functions of an outer call are joined on their own, also if a call inside it computes further from them.
        onward = {each for each in users.get(last.id, ()) if graph[each].parent == last.parent}
        if is_free and (onward != users.get(last.id, set()) or not onward <= constant):
            inside = _only_for(last, graph, users, constant)
            functions = [node.name for node in inside if node.kind == "op"]
            if len(functions) >= _LEAST:
                target |= dict.fromkeys((node.id for node in inside), last.id)
                names[last.id] = functions
    if not names:
        return graph
    nodes = [
        replace(node, name=f"{names[node.id][0]} … {node.name}", note=f"{len(names[node.id])} {CONSTANT}", arguments=())
        if node.id in names
        else node
        for node in graph.nodes
        if target[node.id] == node.id
    ]
    return rebuilt(graph, nodes, target)


def drop_numbers(graph: Graph) -> Graph:
    """Remove functions that compute a number from numbers only, such as a padding, and buffers of one integer.

    Other models have such a number as a Python literal, which is not a node. A number stays if a module takes it or if
    it is a result. It also stays if a tensor is added to it, since it may be the start of a sum. A buffer of one
    floating-point number, such as a temperature, stays as well.

    Args:
        graph: A view that is not folded.
    """
    numbers: set[int] = set()
    for node in graph.nodes:
        one = bool(node.outputs) and not any(meta.shape for meta in node.outputs)
        is_whole = node.kind == "buffer" and all(meta.dtype.startswith(("int", "uint")) for meta in node.outputs)
        if one and (is_whole or (_is_plain(node) and {edge.source for edge in graph.into(node)} <= numbers)):
            numbers.add(node.id)
    sums = (node for node in graph.nodes if node.kind != "op" or (node.name == "add" and node.id not in numbers))
    shown = {edge.source for node in sums for edge in graph.into(node)}
    # Show the inputs of shown functions too. Otherwise the rest of a chain would seem to have no source.
    for node in reversed(graph.nodes):
        if node.id in numbers & shown:
            shown.update(edge.source for edge in graph.into(node))
    numbers -= shown
    kept = [node for node in graph.nodes if node.id not in numbers]
    return rebuilt(graph, kept, {node.id: node.id for node in kept}) if numbers else graph


def join_updates(graph: Graph) -> Graph:
    """Join four or more functions that update tensors into one node. The node lists the tensors that only it uses.

    The functions are consecutive and in one call. There are two kinds of updates. One changes parameters, such as a
    moving average. It takes only parameters, buffers and the results of its functions. The other is a step along
    gradients, such as an inner step of MAML. It also takes the gradients and the tensors that they belong to, and
    computes one new value for each of these tensors.

    Args:
        graph: A view that is not folded.
    """
    users: dict[int, set[int]] = {}
    for edge in graph.edges:
        users.setdefault(edge.source, set()).add(edge.target)
    target = {node.id: node.id for node in graph.nodes}
    joined: dict[int, Node] = {}
    for run, number in chain(((run, 0) for run in _updates(graph)), _steps(graph)):
        inside = {node.id for node in run}
        taken = dict.fromkeys(edge.source for node in run for edge in graph.into(node))
        tensors = [graph[each] for each in taken if graph[each].kind in _OF_MODEL]
        # A tensor that another function reads stays a node, unless the reader is the layer that owns the tensor.
        tensors = [each for each in tensors if all(one in inside or _owns(graph[one], each) for one in users[each.id])]
        for each in tensors:
            target.pop(each.id, None)
        target |= dict.fromkeys(inside, run[-1].id)
        names = dict.fromkeys([*(each.name for each in tensors), *(name for node in run for name in node.tied)])
        # Functions may also change a tensor that they made themselves, such as a table.
        changes = any(graph[each].kind == "parameter" for each in taken) or any(node.tied for node in run)
        note = f"{len(run)} {UPDATE if changes else CONSTANT}"
        if number and not (changes and any(map(_writes, run))):
            note = f"{len(run)} functions, {number} {UPDATED}"
        name = f"{run[0].name} … {run[-1].name}"
        joined[run[-1].id] = replace(run[-1], name=name, note=note, arguments=(), outputs=(), tied=tuple(names))
    if not joined:
        return graph
    nodes = [joined.get(node.id, node) for node in graph.nodes if target.get(node.id) == node.id]
    return rebuilt(graph, nodes, target)


_OF_MODEL = ("parameter", "buffer")
_NO_GRADIENT = "stops the gradient"  # prefix of a function's note


def _writes(node: Node) -> bool:
    """Return True for a function that changes a tensor."""
    return node.name == "set_data" or node.note == IN_PLACE


def _owns(node: Node, tensor: Node) -> bool:
    return node.kind == "module" and bool(node.name) and tensor.name.startswith(f"{node.name}.")


def _updates(graph: Graph) -> Iterator[list[Node]]:
    """Yield runs of consecutive functions that take only tensors of the model and change some of them."""
    for call in (graph.root, *graph.module_calls()):
        run: list[Node] = []
        known: set[int] = set()
        for node in [*graph.children(call), None]:
            if node is not None and node.kind in _OF_MODEL:
                continue
            if node is not None and _may_join(node):
                sources = {edge.source for edge in graph.into(node)}
                is_free = all(each in known or graph[each].kind in _OF_MODEL for each in sources)
                if is_free and (not run or node.scope == run[0].scope):
                    run.append(node)
                    known.add(node.id)
                    continue
            if len(run) >= _LEAST and any(_writes(each) or each.note.startswith(_NO_GRADIENT) for each in run):
                yield run
            run, known = [], set()


def _steps(graph: Graph) -> Iterator[tuple[list[Node], int]]:
    """Yield the functions of each step along gradients, and the number of tensors that the step updates."""
    for call in (graph.root, *graph.module_calls()):
        children = graph.children(call)
        for at, gradient in enumerate(children):
            if gradient.kind != "backward" or len(gradient.outputs) < 2:
                continue
            tensors = {edge.source for edge in graph.into(gradient)[1:]}  # the first source is the loss
            known = {gradient.id, *tensors}
            run: list[Node] = []
            updated = set[int]()
            """The functions that depend on one of the tensors."""
            inner = set[int]()
            for node in children[at + 1 :]:
                if node.kind in _OF_MODEL:
                    continue
                sources = {edge.source for edge in graph.into(node)}
                is_free = all(each in known or graph[each].kind in _OF_MODEL for each in sources)
                if not (_may_join(node) and is_free and (sources or node.tied) and node.scope == gradient.scope):
                    break
                run.append(node)
                known.add(node.id)
                inner |= sources
                if node.tied or not sources.isdisjoint(tensors | updated):
                    updated.add(node.id)
            results = [node for node in run if node.id not in inner]
            shapes = [sorted(str(meta) for node in nodes for meta in node.outputs) for nodes in ([gradient], results)]
            # A function that stops the gradient inside a step stays visible, except before a parameter is changed.
            is_plain = any(map(_writes, run)) or not any(node.note.startswith(_NO_GRADIENT) for node in run)
            is_step = shapes[0] == shapes[1] and all(node.id in updated for node in results)
            if len(run) >= _LEAST and is_plain and is_step:
                yield run, len(results)


def _may_join(node: Node) -> bool:
    is_apart = node.failed or node.parameters or _is_random(node) or node.note.startswith((RECOMPUTED, VMAPPED))
    return node.kind == "op" and not is_apart


def _only_for(last: Node, graph: Graph, users: dict[int, set[int]], constant: set[int]) -> list[Node]:
    """Return a function and the constant siblings that are only used to compute its result, in execution order."""
    inside = {last.id}
    beside = graph.children(graph[last.parent]) if last.parent is not None else []
    for node in reversed(beside):
        used = users.get(node.id, set())
        if node.id in constant and node.scope == last.scope and used and used <= inside:
            inside.add(node.id)
    return [node for node in beside if node.id in inside]


def _is_plain(node: Node) -> bool:
    return node.kind == "op" and not (node.remark or node.failed or node.parameters or _is_random(node))


def _is_random(node: Node) -> bool:
    return any(word in node.name for word in ("rand", "normal", "bernoulli", "uniform", "dropout", "exponential"))
