"""The execution graph as plain data."""

from __future__ import annotations

import hashlib
import json
import math
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from lightning_recorder.errors import ArgumentError
from lightning_recorder.graph.unused import Unused
from lightning_recorder.untrusted import check_fields

__all__ = [
    "FROZEN_HERE",
    "IN_PLACE",
    "OTHER_PARAMETERS",
    "RECOMPUTED",
    "VMAPPED",
    "Edge",
    "Graph",
    "Kind",
    "Node",
    "Repetition",
    "TensorMeta",
]

Kind = Literal["module", "op", "input", "output", "parameter", "buffer", "tensor", "backward", "optimizer", "port"]
"""The kind of a node:

``module``
    one call of a module;
``op``
    one call of a torch function, or of a custom ``autograd.Function``. Functions that return no tensor are left out,
    except for functions that read the values of an input, such as ``item``;
``input``, ``output``
    an input or output tensor of the model, or an output object with tensors inside, named by its path;
``parameter``, ``buffer``
    a parameter or buffer of the model, inside the call of the module that owns it;
``tensor``
    a tensor that existed before the recording and belongs to neither the batch nor the model;
``backward``
    a backward pass, named ``backward`` or, for ``torch.autograd.grad``, ``grad``; its inputs are the losses;
``optimizer``
    one step of an optimizer, named by its class; its inputs are the backward passes whose gradients it uses;
``port``
    only in a picture: the point where a tensor that is used more than once enters a frame.
"""

Repetition = Literal["first", "next", "all", "same", "each"]
"""The relation of an edge to the repetitions of a folded node:

``first``
    only the first repetition takes the tensor;
``next``
    each repetition takes the tensor that the repetition before it returned;
``all``
    the target, outside of the folded node, takes the tensors of all repetitions in their order;
``same``
    together with ``next`` for an outer folded node: the tensor goes to the same repetition of this inner node;
``each``
    for two folded nodes, first one around the source, then one around the target: each repetition of the second node
    takes the tensor of the repetition of the first node with the same number.

Each further ``next`` for a node adds one repetition: ``first`` with ``next`` means the second repetition, and ``next``
twice means the tensor of two repetitions before.

Without any of these words, every repetition takes the tensor of a source outside of the folded node. A target outside
takes the tensor of the last repetition.
"""

RECOMPUTED, VMAPPED, IN_PLACE, OTHER_PARAMETERS = "recomputed", "vmapped", "in place", "other parameters"
FROZEN_HERE = "frozen here"
"""The notes of calls that a checkpoint repeats in the backward pass, of calls inside ``torch.vmap``, of functions that
write to one of their inputs, of optimizers that have no parameter of the model, and of functions that take a parameter
that is frozen for them only."""

_OPERANDS = ("other", "exponent", "value", "fill_value")  # arguments of functions that may be numbers to compute with

_SCRIPTED = ("RecursiveScriptModule", "ScriptModule", "TopLevelTracedModule", "TracedModule")  # classes of torch.jit

_VERSION = 3
_READABLE = (2, 3)  # version 2 has fewer fields

# The number of bytes of one element of each dtype. torch is not used, since graphs can be read without torch.
_ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8", "quint8", "qint8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32", "qint32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}


@dataclass(frozen=True)
class TensorMeta:
    """Shape, dtype and device of a tensor. ``dtype`` has no ``torch.`` prefix, and ``device`` is like ``cuda:0``.

    In a folded view, the sizes may differ between the repetitions. Then ``shape`` has the smallest size of each
    dimension and ``largest`` the largest, shown as ``5…12×16``. A ragged size of a nested tensor is -1, shown as ``?``.
    """

    shape: tuple[int, ...]
    dtype: str
    device: str = "cpu"
    largest: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """The number of bytes of the elements; 0 if the shape or the size of the dtype is unknown."""
        return 0 if -1 in self.shape else math.prod(self.shape) * _ITEM_BYTES.get(self.dtype, 0)

    def __str__(self) -> str:
        sizes = [
            "?" if least < 0 else str(least) if least == most else f"{least}…{most}"
            for least, most in zip(self.shape, self.largest or self.shape, strict=True)
        ]
        if len(sizes) == 1:
            # A single size without brackets would look like a value.
            return f"[{sizes[0]}]"
        return "×".join(sizes) if sizes else "scalar"


@dataclass(frozen=True)
class Node:
    """An event of the recording, such as a call, or a tensor that existed before the recording.

    Args:
        id: Unique in the graph; ascending in execution order.
        kind: See :data:`Kind`.
        name: The dotted name of a module (``""`` for the root), the function of an op, such as ``relu``, or the path or
            dotted name of a tensor.
        parent: The ``id`` of the enclosing module call; ``None`` for the root only.
        depth: The number of enclosing module calls; 0 for the root.
        type_name: The class of a module, or of an output that is an object with tensors inside; empty for other kinds.
        call: The number of this call of the module, starting at 1.
        outputs: The output tensors. For a parameter, buffer, input or output, the tensor itself, or the tensors inside
            the object.
        parameters: The number of parameter elements of the module of a call, without its submodules. Submodules are
            included if their calls are not observed, as in a fused layer. For an op of a view that represents a layer,
            the number of parameter elements of the layer.
        total_parameters: The number of parameter elements of the module of a call and of all its submodules, called or
            not. Each parameter counts once. Ignored in comparisons.
        used_parameters: The number of elements of ``total_parameters`` that the recording used. ``None`` if the number
            is not known, because the recording failed or a computation was not observed. Ignored in comparisons.
        tied: For a parameter or buffer, its other names in the model. For a closed call or an op of a view, the names
            of the tensors that it uses and that another closed call contains.
        autograd: The types of the nodes that an op created in torch's backward graph, such as ``AddmmBackward0``, the
            last node first.
        scope: The phase of a training step: the name of the method, or ``loss`` for nodes between the last layer and
            the backward pass. After the first backward pass a number is added, as in ``training_step 2``. Empty outside
            of training steps.
        failed: True if an exception ended the call.
        source: The line of user code that made the call, such as ``models/net.py:42``; ignored in comparisons.
        duration_ms: The wall time of a module call, if it was measured; ignored in comparisons.
        repeats: The number of equal recorded nodes that this node represents after folding.
        parallel: True if the repeated nodes have no edges between them.
        shared: Only in a folded view: True if the repetitions of the node, or of a folded node around it, have the same
            parameters, because they call the same modules. False if these modules have no parameters.
        members: Only in a folded view: the names of the modules that a call represents, if there are several. Ignored
            in comparisons.
        inputs: The input tensors of a call. A tensor that is passed several times is repeated: attention with one
            tensor as query, key and value has three inputs.
        arguments: Names and values of the non-tensor arguments as text, such as ``("dim", "-1")``, in the form that
            torch's schema declares. Arguments that equal their default are left out. For a module, the settings in its
            ``extra_repr``. A positional entry of ``extra_repr`` has an empty name.
        flops: The estimated number of floating-point operations of the forward pass of a call, if it was measured.
            Ignored in comparisons.
        saved_bytes: The bytes that autograd keeps for the backward pass of a call, if they were measured. Memory that
            several calls save counts for the first call. Parameters and buffers do not count. Ignored in comparisons.
        note: A remark about the node. For a parameter: ``frozen``, ``no gradient`` or ``not registered``. For a
            function: ``stops the gradient:`` with the reason, such as ``detach``. For a call that a checkpoint repeats
            in the backward pass: ``recomputed``. For a call that ``torch.vmap`` runs for three samples at once:
            ``vmapped ×3``. For a function that writes to one of its inputs, and for a call that only contains such a
            function: ``in place``. For a function that takes a parameter while it is frozen, although another function
            trains it: ``frozen here``. For a module that :func:`show_unused` adds: ``never called``. For an optimizer
            that has no parameter of the model: ``other parameters``. Ignored in comparisons.
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
    shared: bool = False
    members: tuple[str, ...] = field(default=(), compare=False)
    inputs: tuple[TensorMeta, ...] = ()
    arguments: tuple[tuple[str, str], ...] = ()
    flops: int | None = field(default=None, compare=False)
    saved_bytes: int | None = field(default=None, compare=False)
    note: str = field(default="", compare=False)

    @property
    def remark(self) -> str:
        """The note, or "" if it is ``in place`` or ``frozen here``. Views treat such a node like one without a note."""
        return "" if self.note in (IN_PLACE, FROZEN_HERE) else self.note

    @property
    def output_bytes(self) -> int:
        """The size of the outputs in bytes. Outputs that share memory, such as views, are counted in full."""
        return sum(meta.nbytes for meta in self.outputs)


@dataclass(frozen=True, order=True)
class Edge:
    """A tensor that is an output of one node and an input of another node.

    Args:
        source: The ``id`` of the node that returned the tensor.
        target: The ``id`` of the node that takes the tensor.
        multiplicity: The number of recorded tensors between the two nodes.
        tensor: Shape, dtype and device of the first of these tensors.
        across: Only in a folded view: the ids of repeated nodes around the source or the target, each with the relation
            of the edge to the repetitions of the node; see :data:`Repetition`.
        outputs: The index of each of these tensors among the outputs of the source; empty if all indices are 0. In a
            view, equal indices may be listed once, and ``outputs`` is empty if repetitions take different outputs.
        part: Only in a view: the part of the output that is used, such as ``2`` of ``chunk`` or ``[4:]``. For a closed
            call with several results, the name of a result, such as ``cos``. Ignored in comparisons.
    """

    source: int
    target: int
    multiplicity: int = field(default=1, compare=False)
    tensor: TensorMeta | None = field(default=None, compare=False)
    across: tuple[tuple[int, Repetition], ...] = ()
    outputs: tuple[int, ...] = ()
    part: str = field(default="", compare=False)

    def relates(self, word: Repetition) -> bool:
        """Return True if the edge has this relation to the repetitions of any node."""
        return any(each == word for _, each in self.across)


@dataclass(frozen=True, repr=False)
class Graph:
    """The nodes and edges of a recording. The first node is the root.

    Edges connect ops, inputs, parameters and other tensors. A module call is the ``parent`` of the nodes inside it. In
    a view, a closed module call has edges itself.

    Args:
        nodes: The nodes in execution order.
        edges: The edges in the order of their first use.
        scope: The recorded method of the model: ``forward`` or ``training_step``.
        parameters: The number of parameter elements of the model; a shared parameter counts once.
        name: The title of a picture; by default the class of the model.
        modules: Weak references to the modules of the recorded model by name, for :meth:`module`. They are ignored in
            comparisons and are not included in copies, pickles and the JSON form.
        unused: The modules and parameters that were not used or not trained.
        packages: The first folders of those code lines of nodes that are in installed packages, such as ``timm``.
        left_out: Only in a view: the numbers of removed nodes, as text for the caption. Ignored in comparisons.

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
    edges: tuple[Edge, ...] = ()
    scope: str = "forward"
    parameters: int = 0
    name: str = ""
    modules: Mapping[str, weakref.ref[Any]] = field(default_factory=dict, compare=False)
    unused: Unused = field(default_factory=Unused)
    packages: tuple[str, ...] = ()
    left_out: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        given: object = self.nodes
        if isinstance(given, (str, Path)):
            raise ArgumentError(f"a graph has nodes, got a path: write Graph.from_json({str(given)!r}) to read it")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "modules": {}}

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

    @cached_property
    def _out_of(self) -> dict[int, list[Edge]]:
        out_of: dict[int, list[Edge]] = {}
        for edge in self.edges:
            out_of.setdefault(edge.source, []).append(edge)
        return out_of

    @cached_property
    def _largest(self) -> dict[str, float]:
        return {}

    def largest(self, field_name: str) -> float:
        """Return the largest value of a numeric field among the nodes without contents."""
        if field_name not in self._largest:
            values = (getattr(node, field_name) or 0 for node in self.nodes if node.id not in self._children)
            self._largest[field_name] = max(values, default=0)
        return self._largest[field_name]

    def __getitem__(self, node_id: int) -> Node:
        return self._by_id[node_id]

    @property
    def root(self) -> Node:
        """The node of the whole model."""
        return self.nodes[0]

    def children(self, node: Node) -> list[Node]:
        """Return the nodes directly inside a module call, in execution order."""
        return self._children.get(node.id, [])

    def into(self, node: Node) -> list[Edge]:
        """Return the edges into a node, in the order of their first use."""
        return self._into.get(node.id, [])

    def out_of(self, node: Node) -> list[Edge]:
        """Return the edges out of a node, in the order of their first use."""
        return self._out_of.get(node.id, [])

    def ancestors(self, node: Node) -> Iterator[Node]:
        """Yield the module calls around a node, starting with the innermost."""
        while node.parent is not None:
            node = self[node.parent]
            yield node

    def module(self, node: Node) -> Any:
        """Return the ``nn.Module`` that a node is a call of. For other nodes, return the module of the enclosing call.

        Return ``None`` if the module no longer exists, or if the graph was loaded from a file or copied.

        Example:
            >>> from lightning_recorder.graph import capture_graph
            >>> import torch
            >>> net = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3, stride=2))
            >>> graph = capture_graph(net, torch.ones(1, 1, 8, 8))
            >>> [graph.module(node).stride for node in graph.module_calls()]
            [(2, 2)]
        """
        call = node if node.kind == "module" or node.parent is None else self[node.parent]
        reference = self.modules.get(call.name)
        return None if reference is None else reference()

    def module_calls(self) -> list[Node]:
        """Return all module calls except the root, in execution order."""
        return [node for node in self.nodes if node.kind == "module" and node.parent is not None]

    def occurrences(self, edge: Edge) -> int:
        """Return the number of edges of the original graph that an edge of a folded view represents."""
        words: dict[int, list[Repetition]] = {}
        for group, word in edge.across:
            words.setdefault(group, []).append(word)
        sources, targets = (
            {node.id: node.repeats for node in (self[end], *self.ancestors(self[end])) if node.repeats > 1}
            for end in (edge.source, edge.target)
        )
        targets |= {group: repeats for group, repeats in sources.items() if "all" in words.get(group, ())}
        return math.prod(
            1 if "first" in words.get(group, ()) else repeats - words.get(group, []).count("next")
            for group, repeats in targets.items()
        )

    def structural_hash(self) -> str:
        """Return a hash of the structure, as 64 hexadecimal digits (SHA-256).

        The hash covers the nodes with their names, classes, shapes, dtypes, arguments and autograd types, and the
        edges. It does not cover devices, source lines, costs, numbers that are operands as in ``x * 2``, the autograd
        types inside a scripted module, or the name of the graph. It is the same in every process and on every machine.

        Example:
            >>> one, other = (Graph((Node(0, "module", "", None, 0, type_name=name),), ()) for name in ("Net", "Other"))
            >>> one.structural_hash() == other.structural_hash()
            False
        """
        place = {node.id: number for number, node in enumerate(self.nodes)}
        # The autograd types of a scripted module change when TorchScript optimizes the class, once in each process.
        scripted = {node.id for node in self.nodes if node.type_name in _SCRIPTED}
        autograd = {node.id: () if {node.id, node.parent} & scripted else node.autograd for node in self.nodes}
        nodes = [
            (
                (node.kind, node.name, node.parent if node.parent is None else place[node.parent], node.type_name),
                (node.call, node.parameters, autograd[node.id], node.scope, node.failed, node.repeats, node.parallel),
                [(meta.shape, meta.dtype) for meta in node.outputs],
                [(meta.shape, meta.dtype) for meta in node.inputs],
                # Leave out operands, since a number that is added or multiplied may be computed from the data.
                [pair for pair in node.arguments if pair[0] not in _OPERANDS],
                *(("shared",) if node.shared else ()),
            )
            for node in self.nodes
        ]
        # Hash edges in the order of their use, since the order of arguments matters, as in a subtraction.
        edges = [
            (
                *(place[edge.source], place[edge.target], edge.multiplicity, *edge.outputs),
                *((place.get(end), word) for end, word in edge.across),
            )
            for edge in self.edges
        ]
        return hashlib.sha256(json.dumps([self.scope, nodes, edges]).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Return the graph as JSON values.

        The keys are ``version``, ``scope``, ``parameters``, ``name``, ``packages``, ``unused``, ``nodes`` and
        ``edges``. The values of the last three have the fields of :class:`Unused`, :class:`Node` and :class:`Edge`. A
        node also has ``output_bytes``. An empty ``part`` of an edge is left out.

        Example:
            >>> graph = Graph((Node(0, "module", "", None, 0),), ())
            >>> Graph.from_json(graph.to_json()) == graph
            True
        """
        # dataclasses.asdict copies each value deeply, which takes seconds for a large model.
        nodes = [
            _plain(node)
            | {key: tuple(map(_plain, getattr(node, key))) for key in ("outputs", "inputs")}
            | {"output_bytes": node.output_bytes}
            for node in self.nodes
        ]
        edges = [
            {key: value for key, value in _plain(edge).items() if value or key != "part"}
            | {"tensor": edge.tensor and _plain(edge.tensor)}
            for edge in self.edges
        ]
        about = {"version": _VERSION, "scope": self.scope, "parameters": self.parameters, "name": self.name}
        return {**about, "packages": self.packages, "unused": _plain(self.unused), "nodes": nodes, "edges": edges}

    @classmethod
    def from_json(cls, data: Any) -> Graph:
        """Return the graph from the output of :meth:`to_json`, or from a file with this output, like ``graph.json``.

        Raises:
            ArgumentError: If the data has another version or is not a graph, or if the file cannot be read.
        """
        if isinstance(data, (str, Path)):
            try:
                data = json.loads(Path(data).read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise ArgumentError(f"{data} is not a graph written by lightning_recorder: {error}") from error
        version = data.get("version") if isinstance(data, Mapping) else None
        if version not in _READABLE:
            raise ArgumentError(f"expected a graph of version {_VERSION}, got {version!r}")
        try:
            nodes, edges = tuple(map(_node, data["nodes"])), tuple(map(_edge, data["edges"]))
            unused = Unused(**{key: tuple(names) for key, names in data.get("unused", {}).items()})
            about = data["scope"], data["parameters"], data.get("name", "")
            graph = cls(nodes, edges, *about, unused=unused, packages=tuple(data.get("packages", ())))
            for each in (*nodes, *edges, graph):
                check_fields(each)
        except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
            raise ArgumentError(f"this is not a graph written by lightning_recorder: {error}") from error
        ends = {end for edge in edges for end in (edge.source, edge.target)} | {node.parent for node in nodes[1:]}
        if not nodes or nodes[0].parent is not None or not ends <= {node.id for node in nodes}:
            raise ArgumentError("this is not a graph written by lightning_recorder: nodes are missing")
        return graph


_FIELDS = {kind: tuple(each.name for each in fields(kind)) for kind in (TensorMeta, Node, Edge, Unused)}


def _plain(one: TensorMeta | Node | Edge | Unused) -> dict[str, Any]:
    return {name: getattr(one, name) for name in _FIELDS[type(one)]}


def _node(data: Mapping[str, Any]) -> Node:
    given = {key: value for key, value in data.items() if key not in ("arguments", "output_bytes")}
    tensors = {key: tuple(map(_meta, data.get(key, ()))) for key in ("inputs", "outputs")}
    words = {key: tuple(data.get(key, ())) for key in ("autograd", "tied", "members")}
    arguments = tuple((name, value) for name, value in data.get("arguments", ()))
    return Node(**{**given, **tensors, **words, "arguments": arguments})


def _edge(data: Mapping[str, Any]) -> Edge:
    tensor, across = data["tensor"] and _meta(data["tensor"]), tuple(map(tuple, data.get("across", ())))
    return Edge(**{**data, "tensor": tensor, "across": across, "outputs": tuple(data.get("outputs", ()))})


def _meta(data: Mapping[str, Any]) -> TensorMeta:
    return TensorMeta(**{**data, "shape": tuple(data["shape"]), "largest": tuple(data.get("largest", ()))})
