"""A view with the modules and parameters that a step did not use."""

from __future__ import annotations

from dataclasses import replace

from lightning_recorder.graph.model import Graph, Node
from lightning_recorder.internals.module_tree import class_name

__all__ = ["NEVER_CALLED", "show_unused"]

NEVER_CALLED = "never called"
"""The note of a module that was not called."""


def show_unused(graph: Graph) -> Graph:
    """Add a node for each module that was never called and each parameter that got no gradient.

    The new nodes have no edges. Their ``note`` is ``never called`` or ``no gradient``. Frozen modules in the graph get
    the note ``frozen``. Apply this view last, since other views remove nodes without edges. A styler with
    ``color_by="note"`` colors these nodes, frozen modules, and functions that stop a gradient.

    Args:
        graph: A recorded graph, or a view of one.

    Example:
        >>> import torch
        >>> from lightning_recorder.graph import capture_graph
        >>> net = torch.nn.Sequential(torch.nn.ReLU())
        >>> net.head = torch.nn.Linear(2, 2)
        >>> net.forward = lambda x: net[0](x)
        >>> view = show_unused(capture_graph(net, torch.ones(1, 2)))
        >>> [(node.name, node.note) for node in view.nodes if node.note]
        [('head', 'never called')]
    """
    unused = graph.unused
    there = {node.name for node in graph.nodes if node.kind in ("module", "parameter")}
    notes = {**dict.fromkeys(unused.frozen, "frozen"), **dict.fromkeys(unused.parameters, "no gradient")}
    left_out = tuple(f"{name}." for name in unused.modules)
    missing = [("module", name, NEVER_CALLED) for name in unused.modules if name not in there]
    # A module that was never called represents its parameters, too.
    drawn = [node for node in graph.nodes if node.kind == "parameter"]
    if drawn:
        missing += [
            ("parameter", name, note)
            for name, note in notes.items()
            if name not in there and not name.startswith(left_out) and name in unused.parameters
        ]
    calls = {node.name: node for node in reversed(graph.nodes) if node.kind == "module"}
    free = max(node.id for node in graph.nodes) + 1
    added: dict[int, list[Node]] = {}
    for number, (kind, name, note) in enumerate(missing):
        around = graph.root
        parts = name.split(".")[:-1]
        while parts and around is graph.root:
            call = calls.get(".".join(parts))
            # No node can be added inside a closed call.
            around = call if call is not None and graph.children(call) else graph.root
            parts.pop()
        # The class is unknown if the module was freed.
        reference = graph.modules.get(name) if kind == "module" else None
        module = None if reference is None else reference()
        type_name = "" if module is None else class_name(type(module))
        node = Node(free + number, kind, name, around.id, around.depth + 1, type_name, note=note)  # type: ignore[arg-type]
        added.setdefault(around.id, []).append(node)
    modules = {name for name in unused.frozen if name in calls}
    nodes: list[Node] = []
    for node in graph.nodes:
        frozen = node.kind == "module" and any(
            node.name == name or node.name.startswith(f"{name}.") for name in modules
        )
        nodes.append(replace(node, note="frozen") if frozen and not node.remark else node)
    return replace(graph, nodes=(*nodes, *(node for each in added.values() for node in each)))
