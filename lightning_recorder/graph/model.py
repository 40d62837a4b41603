"""The execution graph as plain data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib import import_module
from typing import Any, Literal

from lightning_recorder.errors import ArgumentError

__all__ = ["Edge", "Graph", "Kind", "Node", "TensorMeta"]

Kind = Literal["module", "op", "input", "output", "parameter", "buffer", "tensor", "backward", "optimizer"]
"""The kind of a node:

``module``
    one call of a module;
``op``
    one call of a torch function, or of a custom ``autograd.Function``;
``input``, ``output``
    an input or output tensor of the model, named by its path;
``parameter``, ``buffer``
    a tensor of the model, inside the call of the module that owns it;
``tensor``
    a tensor that existed before the recording and belongs to neither the batch nor the model;
``backward``
    a backward pass, named ``backward`` or, for ``torch.autograd.grad``, ``grad``; its inputs are the losses;
``optimizer``
    one step of an optimizer, named by its class; its inputs are the backward passes whose gradients it uses.
"""

_VERSION = 2


@dataclass(frozen=True)
class TensorMeta:
    """Shape, dtype and device of a tensor; ``dtype`` without ``torch.``, ``device`` as ``cpu`` or ``cuda:0``."""

    shape: tuple[int, ...]
    dtype: str
    device: str = "cpu"

    def __str__(self) -> str:
        if len(self.shape) == 1:
            # A number without brackets would look like a value.
            return f"[{self.shape[0]}]"
        return "×".join(map(str, self.shape)) if self.shape else "scalar"


@dataclass(frozen=True)
class Node:
    """An event of the recording, such as a call, or a tensor that existed before.

    Args:
        id: Unique in the graph; ascending in time.
        kind: See :data:`Kind`.
        name: The dotted name of a module (``""`` for the root), the function of an op, such as ``relu``, or the path or
            dotted name of a tensor.
        parent: The ``id`` of the enclosing module call; ``None`` for the root only.
        depth: The number of enclosing module calls; 0 for the root.
        type_name: The class of a module; empty for other kinds.
        call: The number of this call of the module, starting at 1.
        outputs: The output tensors; for a parameter, buffer, input or output, the tensor itself.
        parameters: The number of parameter elements that the module of a call owns itself. Those of its submodules are
            included only if their calls are not observed, as in a fused layer.
        total_parameters: The number of parameter elements of the module of a call and of all its submodules, each
            parameter once, called or not; ignored in comparisons.
        used_parameters: The number of these elements that anything in the recording used; ``None`` if it is not known,
            because the recording failed or a computation was not observed; ignored in comparisons.
        tied: For a parameter or buffer, its other names in the model. For a closed call or an op of a view, the names
            of the tensors that it uses and that another closed call contains.
        autograd: The types of the nodes that an op created in torch's backward graph, such as ``AddmmBackward0``, the
            last one first.
        scope: The part of a training step: the name of the method, or ``loss`` for nodes between the last layer and the
            backward pass. After the first backward pass a number is added, as in ``training_step 2``. Empty outside of
            training steps.
        failed: True if an exception ended the call.
        source: The line of user code that made the call, such as ``models/net.py:42``; ignored in comparisons.
        duration_ms: The wall time of a module call, if it was measured; ignored in comparisons.
        repeats: The number of equal recorded nodes that this node represents after folding.
        parallel: True if the repeated nodes have no edges between them.
    """

    id: int
    kind: Kind
    name: str
    parent: int | None
    depth: int
    type_name: str = ""
    call: int = 1
    outputs: tuple[TensorMeta, ...] = ()
    parameters: int = 0
    total_parameters: int = field(default=0, compare=False)
    used_parameters: int | None = field(default=None, compare=False)
    tied: tuple[str, ...] = ()
    autograd: tuple[str, ...] = ()
    scope: str = ""
    failed: bool = False
    source: str = field(default="", compare=False)
    duration_ms: float | None = field(default=None, compare=False)
    repeats: int = 1
    parallel: bool = False


@dataclass(frozen=True, order=True)
class Edge:
    """A tensor that is an output of one node and an input of another.

    Args:
        source: The ``id`` of the node that returned the tensor.
        target: The ``id`` of the node that takes the tensor.
        multiplicity: The number of recorded tensors between the two nodes.
        tensor: Shape, dtype and device of the first of these tensors.
    """

    source: int
    target: int
    multiplicity: int = field(default=1, compare=False)
    tensor: TensorMeta | None = field(default=None, compare=False)


@dataclass(frozen=True, repr=False)
class Graph:
    """Nodes in the order of time, starting with the root, and the edges between them in the order of their first use.

    Edges connect ops, inputs, parameters and other tensors; a module call is the ``parent`` of the nodes inside it. In
    a view a module call may have edges itself, if it represents all of its contents.

    Args:
        nodes: The nodes in the order of time.
        edges: The edges in the order of their first use.
        scope: The recorded method of the model: ``forward`` or ``training_step``.
        parameters: The number of parameter elements of the model; a shared parameter counts once.
        name: The title of a picture; by default the class of the model.

    Example:
        >>> from lightning_recorder.graph import capture_graph
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
        >>> graph = capture_graph(net, torch.ones(1, 2))
        >>> [node.kind for node in graph.nodes]
        ['module', 'input', 'module', 'parameter', 'parameter', 'op', 'module', 'op', 'output']
        >>> [node.name for node in graph.nodes]
        ['', 'input', '0', '0.weight', '0.bias', 'linear', '1', 'relu', 'output']
        >>> [(graph[edge.source].name, graph[edge.target].name) for edge in graph.edges]
        [('input', 'linear'), ('0.weight', 'linear'), ('0.bias', 'linear'), ('linear', 'relu'), ('relu', 'output')]
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    scope: str = "forward"
    parameters: int = 0
    name: str = ""

    def __repr__(self) -> str:
        return f"<graph of {self.title}: {len(self.nodes)} nodes, {len(self.edges)} edges>"

    @property
    def title(self) -> str:
        """The title of a picture."""
        return self.name or (self.nodes[0].type_name if self.nodes else "")

    @cached_property
    def _by_id(self) -> dict[int, Node]:
        return {node.id: node for node in self.nodes}

    @cached_property
    def _children(self) -> dict[int | None, list[Node]]:
        children: dict[int | None, list[Node]] = {}
        for node in self.nodes:
            children.setdefault(node.parent, []).append(node)
        return children

    @cached_property
    def _into(self) -> dict[int, list[Edge]]:
        into: dict[int, list[Edge]] = {}
        for edge in self.edges:
            into.setdefault(edge.target, []).append(edge)
        return into

    def __getitem__(self, node_id: int) -> Node:
        return self._by_id[node_id]

    @property
    def root(self) -> Node:
        """The node of the whole model."""
        return self.nodes[0]

    def children(self, node: Node) -> list[Node]:
        """Return the nodes directly inside a module call, in the order of time."""
        return self._children.get(node.id, [])

    def into(self, node: Node) -> list[Edge]:
        """Return the edges into a node, in the order of their first use."""
        return self._into.get(node.id, [])

    def ancestors(self, node: Node) -> Iterator[Node]:
        """Yield the module calls around a node, starting with the innermost."""
        while node.parent is not None:
            node = self[node.parent]
            yield node

    def module_calls(self) -> list[Node]:
        """Return all module calls except the root, in the order of time."""
        return [node for node in self.nodes if node.kind == "module" and node.parent is not None]

    def structural_hash(self) -> str:
        """Return a hash of the structure, as 64 hexadecimal digits (SHA-256).

        The hash covers the nodes with their names, classes, shapes, dtypes and autograd types, and the edges. It does
        not cover devices, source lines, times, the name of the graph, or arguments that are not tensors, which are not
        part of a graph. It is the same in every process and on every machine.

        Example:
            >>> one, other = (Graph((Node(0, "module", "", None, 0, type_name=name),), ()) for name in ("Net", "Other"))
            >>> one.structural_hash() == other.structural_hash()
            False
        """
        place = {node.id: number for number, node in enumerate(self.nodes)}
        nodes = [
            (
                (node.kind, node.name, node.parent if node.parent is None else place[node.parent], node.type_name),
                (node.call, node.parameters, node.autograd, node.scope, node.failed, node.repeats, node.parallel),
                [(meta.shape, meta.dtype) for meta in node.outputs],
            )
            for node in self.nodes
        ]
        # Edges are hashed in the order of their use, since the order of arguments matters, as in a subtraction.
        edges = [(place[edge.source], place[edge.target], edge.multiplicity) for edge in self.edges]
        return hashlib.sha256(json.dumps([self.scope, nodes, edges]).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Return the graph as JSON values.

        The keys are ``version``, ``scope``, ``parameters``, ``name``, ``nodes`` and ``edges``, the last two with the
        fields of :class:`Node` and :class:`Edge`.

        Example:
            >>> graph = Graph((Node(0, "module", "", None, 0),), ())
            >>> Graph.from_json(graph.to_json()) == graph
            True
        """
        nodes, edges = ([asdict(each) for each in part] for part in (self.nodes, self.edges))
        about = {"version": _VERSION, "scope": self.scope, "parameters": self.parameters, "name": self.name}
        return {**about, "nodes": nodes, "edges": edges}

    def to_model_explorer(self) -> dict[str, Any]:
        """Return the JSON values that Google's Model Explorer opens.

        See :func:`lightning_recorder.graph.to_model_explorer`.
        """
        # By name, since the renderers import this file.
        renderer = import_module("lightning_recorder.graph.renderers.model_explorer")
        collection: dict[str, Any] = renderer.to_model_explorer(self)
        return collection

    @classmethod
    def from_json(cls, data: Any) -> Graph:
        """Return the graph for the output of :meth:`to_json`.

        Raises:
            ArgumentError: If the data has another version, or is not a graph.
        """
        version = data.get("version") if isinstance(data, Mapping) else None
        if version != _VERSION:
            raise ArgumentError(f"expected a graph of version {_VERSION}, got {version!r}")
        try:
            nodes = tuple(map(_node, data["nodes"]))
            edges = tuple(
                Edge(**{**each, "tensor": each["tensor"] and _meta(each["tensor"])}) for each in data["edges"]
            )
            graph = cls(nodes, edges, data["scope"], data["parameters"], data.get("name", ""))
        except (KeyError, TypeError) as error:
            raise ArgumentError(f"this is not a graph written by lightning_recorder: {error}") from error
        there = {node.id for node in nodes}
        ends = {end for edge in edges for end in (edge.source, edge.target)} | {node.parent for node in nodes[1:]}
        if not nodes or nodes[0].parent is not None or not ends <= there:
            raise ArgumentError(
                "this is not a graph written by lightning_recorder: it has no root, or refers to nodes that do not "
                "exist"
            )
        return graph


def _node(data: Mapping[str, Any]) -> Node:
    outputs, autograd = tuple(map(_meta, data["outputs"])), tuple(data.get("autograd", ()))
    return Node(**{**data, "outputs": outputs, "autograd": autograd, "tied": tuple(data.get("tied", ()))})


def _meta(data: Mapping[str, Any]) -> TensorMeta:
    return TensorMeta(**{**data, "shape": tuple(data["shape"])})
