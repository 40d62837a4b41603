"""A graph as the JSON of Google's Model Explorer.

The package ``ai-edge-model-explorer`` defines the format, in ``model_explorer.graph_builder`` and
``model_explorer.node_data_builder``: https://github.com/google-ai-edge/model-explorer/wiki
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_recorder.graph.model import Edge, Graph, Node
from lightning_recorder.graph.renderers.labels import own_name, short_name, size
from lightning_recorder.graph.views.fit import drawn_nodes

__all__ = ["to_model_explorer", "to_node_data"]


def to_model_explorer(graph: Graph) -> dict[str, Any]:
    """Convert a graph to the JSON values of a Model Explorer graph collection.

    Write them to a ``.json`` file and open it in Model Explorer. A module call is a layer that a click opens. A node
    shows its full name, class, autograd types and source line as attributes, and the shape and dtype of each output.

    Args:
        graph: A recorded graph or a view. A view is not necessary.

    Example:
        >>> import torch
        >>> from lightning_recorder.graph import capture_graph
        >>> graph = capture_graph(torch.nn.Sequential(torch.nn.ReLU()), torch.ones(2))
        >>> [(node["label"], node["namespace"]) for node in to_model_explorer(graph)["graphs"][0]["nodes"]]
        [('input', ''), ('relu', '0 (ReLU)'), ('output', '')]
    """
    namespaces = _namespaces(graph)
    nodes = [_node(node, graph, namespaces) for node in drawn_nodes(graph)]
    groups = {
        namespaces[call.id]: _texts({"name": call.name, "class": call.type_name, "size": size(call)})
        for call in graph.module_calls()
        if graph.children(call)
    }
    about = _texts({"scope": graph.scope, "size": size(graph.root)})
    groups = {"": about, **groups}
    return {
        "label": graph.title,
        "graphs": [{"id": graph_id(graph), "nodes": nodes, "groupNodeAttributes": groups}],
        "graphSorting": "node_count_desc",
    }


def to_node_data(graph: Graph, values: Mapping[str, float], name: str = "") -> dict[str, Any]:
    """Convert a value for each module to the JSON values of Model Explorer's node data, which color the nodes.

    Args:
        graph: The graph that was passed to :func:`to_model_explorer`.
        values: The values by fully-qualified module name. The functions inside a module get its value.
        name: The name that Model Explorer shows for the values.

    Example:
        >>> import torch
        >>> from lightning_recorder.graph import capture_graph
        >>> graph = capture_graph(torch.nn.Sequential(torch.nn.ReLU()), torch.ones(2))
        >>> to_node_data(graph, {"0": 0.5}, "rms")["Sequential.forward"]["results"]
        {'3': {'value': 0.5}}
    """
    results = {}
    for node in drawn_nodes(graph):
        calls = (each.name for each in (node, *graph.ancestors(node)) if each.kind == "module")
        module = next((each for each in calls if each in values), None)
        if module is not None and node.kind in ("module", "op"):
            results[str(node.id)] = {"value": float(values[module])}
    gradient = [{"stop": 0, "bgColor": "#ffffff"}, {"stop": 1, "bgColor": "#0072b2"}]
    return {graph_id(graph): {"name": name, "results": results, "gradient": gradient}}


def graph_id(graph: Graph) -> str:
    """Return the id of a graph, which is the same in the graph collection and the node data."""
    return f"{graph.title}.{graph.scope}"


def _namespaces(graph: Graph) -> dict[int, str]:
    """Return a unique path for each call, because Model Explorer merges layers with equal paths."""
    paths: dict[int, str] = {graph.root.id: ""}
    taken = {""}
    for call in graph.module_calls():
        name = short_name(call, graph) or f"×{call.repeats}"
        label = f"{name} ({call.type_name})" if call.type_name else name
        path = wanted = "/".join(
            part for part in (paths[call.parent or graph.root.id], label.replace("/", "_")) if part
        )
        number = 1
        while path in taken:
            number += 1
            path = f"{wanted} #{number}"
        taken.add(path)
        paths[call.id] = path
    return paths


def _node(node: Node, graph: Graph, namespaces: Mapping[int, str]) -> dict[str, Any]:
    edges = graph.into(node)
    about = {
        "kind": node.kind,
        "name": node.name,
        "class": node.type_name,
        "size": size(node),
        "tied to": ", ".join(node.tied),
        "autograd": ", ".join(node.autograd),
        "scope": node.scope,
        "source": node.source,
        "repeats": str(node.repeats) if node.repeats > 1 else "",
        "failed": "yes" if node.failed else "",
    }
    return {
        "id": str(node.id),
        "label": own_name(node, graph) or node.kind,
        "namespace": namespaces[node.parent or graph.root.id],
        "attrs": _pairs(about),
        "incomingEdges": [_edge(edge, number, graph) for number, edge in enumerate(edges)],
        "outputsMetadata": [
            {"id": str(number), "attrs": _pairs({"shape": str(meta), "dtype": meta.dtype, "device": meta.device})}
            for number, meta in enumerate(node.outputs)
        ],
    }


def _edge(edge: Edge, number: int, graph: Graph) -> dict[str, str]:
    return {
        "sourceNodeId": str(edge.source),
        "sourceNodeOutputId": str(edge.outputs[0] if edge.outputs else 0),
        "targetNodeInputId": str(number),
    }


def _texts(values: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in values.items() if value}


def _pairs(values: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in values.items() if value]
