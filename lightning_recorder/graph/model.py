"""The execution graph as plain data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

from lightning_recorder.errors import ArgumentError

__all__ = ["Edge", "Graph", "Kind", "Node", "TensorMeta"]

Kind = Literal["module", "op", "input", "output", "parameter", "buffer", "tensor", "backward", "optimizer"]
"""What a node is:

``module``
    one call of a module;
``op``
    one call of a torch function, or of an ``autograd.Function`` of the user's;
``input``, ``output``
    a tensor that goes into the model, or comes out of it, by its path;
``parameter``, ``buffer``
    a tensor of the model, in the call of the module that owns it;
``tensor``
    a tensor that existed before and belongs to neither the batch nor the model;
``backward``
    a backward pass, named ``backward`` or, for ``torch.autograd.grad``, ``grad``; what enters it is the loss;
``optimizer``
    one step of an optimiser, named by its class; what enters it are the backward passes whose gradients it uses.
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
            # A number alone would be taken for a value.
            return f"[{self.shape[0]}]"
        return "×".join(map(str, self.shape)) if self.shape else "scalar"


@dataclass(frozen=True)
class Node:
    """One thing that happened, or one tensor that was there.

    Args:
        id: Unique in the graph, ascending in time.
        kind: See :data:`Kind`.
        name: A module's dotted name, the root's being ``""``; an op's function, as ``relu``; a tensor's path or dotted
            name.
        parent: The ``id`` of the module call in which it happened; ``None`` for the root alone.
        depth: Number of module calls around it; the root has 0.
        type_name: A module's class; empty otherwise.
        call: Which call of that module it is, from 1.
        outputs: What it gave; for a parameter, buffer, input or output the tensor itself.
        parameters: Number of parameter elements that a module call owns itself; its submodules' are not included,
            unless nobody sees them being called, as in a fused layer.
        autograd: The types of the nodes that an op made in torch's backward graph, as ``AddmmBackward0``, the last
            first.
        scope: In a training step the part of it: the name of the method; ``loss`` for what lies between the last layer
            and the backward pass; from the second backward pass on with a number, as ``training_step 2``. Empty
            elsewhere.
        failed: Whether it was left by an exception.
        source: Where the user's code called it, as ``models/net.py:42``; of no account when graphs are compared.
        duration_ms: Wall time of a module's call, if that was asked for; of no account either.
        repeats: How many equal nodes of the recording it stands for, after folding.
        parallel: Whether these lie side by side, none feeding the next.
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
    autograd: tuple[str, ...] = ()
    scope: str = ""
    failed: bool = False
    source: str = field(default="", compare=False)
    duration_ms: float | None = field(default=None, compare=False)
    repeats: int = 1
    parallel: bool = False


@dataclass(frozen=True, order=True)
class Edge:
    """A tensor that goes from one node into another.

    Args:
        source: ``id`` of the node that gave it.
        target: ``id`` of the node that took it.
        multiplicity: How many tensors of the recording go this way.
        tensor: Shape and dtype of the first of them.
    """

    source: int
    target: int
    multiplicity: int = field(default=1, compare=False)
    tensor: TensorMeta | None = field(default=None, compare=False)


@dataclass(frozen=True, repr=False)
class Graph:
    """Nodes in the order of time, the root first, and the edges between them, in the order in which they were used.

    Edges join ops, inputs, parameters and the like; a module is the ``parent`` of what happened in it. In a view a
    module may have edges itself: it then stands for all that it holds.

    Args:
        nodes: In the order of time.
        edges: In the order of their first use.
        scope: Which method of the model was recorded: ``forward``, ``training_step``.
        parameters: Number of elements of the model's parameters, a shared one counted once.
        name: What a picture calls it; by default the class of the model.

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
        """What a picture calls it."""
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
        """What happened directly in a module call, in the order of time."""
        return self._children.get(node.id, [])

    def into(self, node: Node) -> list[Edge]:
        """The edges that lead into a node, in the order in which they were used."""
        return self._into.get(node.id, [])

    def ancestors(self, node: Node) -> Iterator[Node]:
        """The module calls around a node, the innermost first."""
        while node.parent is not None:
            node = self[node.parent]
            yield node

    def module_calls(self) -> list[Node]:
        """All calls of modules but the root, in the order of time."""
        return [node for node in self.nodes if node.kind == "module" and node.parent is not None]

    def structural_hash(self) -> str:
        """A number that two graphs share when they have the same structure, as 64 hexadecimal digits.

        Nodes with their names, classes, shapes, dtypes and autograd types count, and the edges between them; devices,
        lines of code, times and the graph's name do not, nor do arguments that are no tensors, which no graph has. It
        is the same in every process and on every machine.

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
        # In the order of their use, since a difference is another one with its terms exchanged.
        edges = [(place[edge.source], place[edge.target], edge.multiplicity) for edge in self.edges]
        return hashlib.sha256(json.dumps([self.scope, nodes, edges]).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """The graph as JSON values.

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

    @classmethod
    def from_json(cls, data: Any) -> Graph:
        """The graph of :meth:`to_json`.

        Raises:
            ArgumentError: If the data is of another version, or no graph.
        """
        version = data.get("version") if isinstance(data, Mapping) else None
        if version != _VERSION:
            raise ArgumentError(f"a graph of version {_VERSION} is expected, got {version!r}")
        try:
            nodes = tuple(map(_node, data["nodes"]))
            edges = tuple(
                Edge(**{**each, "tensor": each["tensor"] and _meta(each["tensor"])}) for each in data["edges"]
            )
            graph = cls(nodes, edges, data["scope"], data["parameters"], data.get("name", ""))
        except (KeyError, TypeError) as error:
            raise ArgumentError(f"this is no graph of ours: {error}") from error
        there = {node.id for node in nodes}
        ends = {end for edge in edges for end in (edge.source, edge.target)} | {node.parent for node in nodes[1:]}
        if not nodes or nodes[0].parent is not None or not ends <= there:
            raise ArgumentError("this is no graph of ours: it has no root, or leads to nodes that are not there")
        return graph


def _node(data: Mapping[str, Any]) -> Node:
    outputs, autograd = tuple(map(_meta, data["outputs"])), tuple(data.get("autograd", ()))
    return Node(**{**data, "outputs": outputs, "autograd": autograd})


def _meta(data: Mapping[str, Any]) -> TensorMeta:
    return TensorMeta(**{**data, "shape": tuple(data["shape"])})
