"""The forms of nodes: two nodes have the same form if they and their contents look the same."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from lightning_recorder.graph.model import Graph, Node, TensorMeta
from lightning_recorder.graph.views.dilations import undilated
from lightning_recorder.graph.views.wiring import Key, MutableGraph

__all__ = ["GEOMETRY", "TENSORS", "VARIED", "forms", "is_setting", "operands", "without_numbers"]

TENSORS = ("parameter", "buffer", "tensor")
# Dimension 1 of the outputs of these layers is fixed by their weights; it is the last dimension for others.
_CHANNELS_FIRST = ("Conv1d", "Conv2d", "Conv3d", "ConvTranspose", "BatchNorm", "GroupNorm", "InstanceNorm")

VARIED = ("p", "drop_prob", "drop_rate")
"""Settings of modules that may differ between equal blocks: the drop rate of a path often grows with the depth."""

# Arguments of functions in which equal nodes may differ. All others are settings, such as a slope.
_PLACES = ("index", "start")  # may be the number of a step
_SIZES = frozenset(("size", "sizes", "shape", "length", "split_size", "split_size_or_sections"))
_NUMBERS = frozenset(("input", "other", "value", "fill_value", "weight", "end", "low", "high", "mean", "std", "steps"))
_EXECUTION = frozenset(
    ("dtype", "device", "layout", "memory_format", "pin_memory", "requires_grad", "non_blocking", "copy", "generator")
)
_OF_TRAINING = frozenset(("training", "train", "dropout", "dropout_p"))
_VARIED_OF_FUNCTIONS = _SIZES | _NUMBERS | _EXECUTION | _OF_TRAINING | frozenset(_PLACES)
_RESHAPES = ("reshape", "view", "unflatten")

GEOMETRY = frozenset(
    (
        *("", "in_features", "out_features", "num_features", "num_groups", "normalized_shape", "output_size"),
        *("stride", "padding", "kernel_size", "dilation", "groups", "scale_factor"),
    )
)
"""Settings that decide sizes, as in a block that halves the resolution."""


def forms(graph: Graph, parts: MutableGraph, *, with_training: bool = True, with_sizes: bool = True) -> dict[int, int]:
    """Return a number for each node; two numbers are equal exactly if the nodes and their contents look the same.

    Contents look the same if they are also connected equally.

    Args:
        graph: The graph.
        parts: Its parts.
        with_training: Also compare what is frozen, what got no gradient and where a gradient stops.
        with_sizes: Also compare the sizes of tensors and the settings in :data:`GEOMETRY`.
    """
    tree = parts.subtree(graph.root.id)
    place = {node: number for number, node in enumerate(tree)}
    inner = _inner_edges(graph, place)
    untrained = _untrained(graph) if with_training else {}
    reshaped = _reshaped([parts.nodes[each] for each in tree], graph)
    numbers: dict[object, int] = {}
    known: dict[int, int] = {}
    # Children come after their parent, so in reverse order they are known first.
    for node_id in reversed(tree):
        inside = tuple(known[child] for child in parts.children.get(node_id, ()))
        node = parts.nodes[node_id]
        status = untrained.get(node.name, ()) if node.kind == "module" else (), node.remark if with_training else ""
        form = (
            _label(node) if with_sizes else _label_without_sizes(node),
            status,
            reshaped.get(node_id, ()),
            inside,
            tuple(inner.get(node_id, ())),
        )
        known[node_id] = numbers.setdefault(form, len(numbers))
    return known


def _untrained(graph: Graph) -> dict[str, Key]:
    """Return what is frozen or got no gradient of each module: its own parameters by name, or all of it."""
    found: dict[str, list[tuple[str, str]]] = {}
    for status, names in (("frozen", graph.unused.frozen), ("no gradient", graph.unused.parameters)):
        for name in names:
            around, _, last = name.rpartition(".")
            found.setdefault(name, []).append(("", status))  # of a module as a whole
            found.setdefault(around, []).append((last, status))  # of a parameter
    return {name: tuple(each) for name, each in found.items()}


def _reshaped(nodes: Iterable[Node], graph: Graph) -> dict[int, Key]:
    """Return the output shapes of functions that reshape inputs of one shape to several shapes.

    Other sizes may depend on the data. The same data with other sizes is another function.
    """
    found: dict[Key, dict[int, Key]] = {}
    for node in nodes:
        if node.kind == "op" and node.name in _RESHAPES:
            around = "" if node.parent is None else graph[node.parent].type_name
            key = around, node.name, tuple(meta.shape for meta in node.inputs)
            found.setdefault(key, {})[node.id] = tuple(meta.shape for meta in node.outputs)
    several = (shapes for shapes in found.values() if len(set(shapes.values())) > 1)
    return {node: shape for shapes in several for node, shape in shapes.items()}


def _inner_edges(graph: Graph, place: Mapping[int, int]) -> dict[int, list[Key]]:
    """Return the edges directly inside each call: between its contents, but not inside one of them.

    An edge consists of the places of its ends, the number of edges into its target from inside the call before it, its
    multiplicity, and its outputs of the source. Edges between repetitions are compared by :class:`Siblings`.
    """
    inner: dict[int, list[Key]] = {}
    above: dict[int, list[int]] = {}
    for node in graph.nodes:  # calls precede their contents
        above[node.id] = [node.id] if node.parent is None else [node.id, *above[node.parent]]
    for target in place:
        depths: list[int] = []
        for edge in graph.into(graph[target]):
            if edge.across:
                continue
            around = set(above[edge.source])
            call = next(each for each in above[target] if each in around)
            depth = len(above[call])
            rank = sum(each >= depth for each in depths)
            depths.append(depth)
            spot = place[target] - place[call], place[edge.source] - place[call]
            inner.setdefault(call, []).append((*spot, rank, edge.multiplicity, edge.outputs))
    return inner


def _label(node: Node) -> Key:
    """Return the properties in which equal nodes agree."""
    # A module differs from its siblings by its name, and a parameter by its name before the last dot.
    name = "" if node.kind == "module" else node.name.rpartition(".")[2] if node.kind != "op" else node.name
    sizes = tuple(_fixed_sizes(node, meta) for meta in node.outputs)
    tied = tuple(map(without_numbers, node.tied))  # the names of blocks differ in their numbers
    about = node.parameters, node.failed, node.repeats, node.parallel, node.shared, tied
    return node.kind, name, node.type_name, sizes, _settings(node), *about


def without_numbers(name: str) -> str:
    """Return a name of a module or tensor in which the names of equal blocks agree."""
    # Of several modules that are not registered, all but the first have a number: Block, Block#2.
    return re.sub("[0-9]+", "#", re.sub("#[0-9]+", "", name))


def _label_without_sizes(node: Node) -> Key:
    """Return the properties in which nodes agree that only differ in sizes."""
    kind, name, type_name, outputs, settings, _, *about = _label(node)
    kept = tuple(pair for pair in settings if pair[0] not in GEOMETRY)
    return kind, name, type_name, tuple(dtype for *_, dtype in outputs), kept, *about


def _settings(node: Node) -> Key:
    """Return the arguments in which equal nodes agree, such as a stride."""
    if node.kind == "module":
        return undilated([pair for pair in node.arguments if pair[0] not in VARIED])
    return undilated([pair for pair in node.arguments if is_setting(node, pair[0])])


def is_setting(node: Node, name: str) -> bool:
    """Return True if an argument of a function decides what it computes, and is neither an operand nor a size."""
    # The p of a dropout is a drop rate, and that of others the kind of a norm.
    if name == "p":
        return "dropout" not in node.name and node.name != "bernoulli"
    return name not in _VARIED_OF_FUNCTIONS


def operands(node: Node, *, only_places: bool = False) -> Key:
    """Return the arguments of a function that are neither settings nor sizes, such as an index or a number to add.

    Args:
        node: A node.
        only_places: Only return the arguments that say which part of a tensor is taken.
    """
    pairs = node.arguments if node.kind == "op" else ()
    if only_places:
        return tuple(pair for pair in pairs if pair[0] in _PLACES)
    left_out = _SIZES | {"p", "dtype"}
    return tuple(pair for pair in pairs if pair[0] not in left_out and not is_setting(node, pair[0]))


def _fixed_sizes(node: Node, meta: TensorMeta) -> Key:
    """Return the properties of an output that do not depend on the data."""
    if node.kind in TENSORS:
        return meta.shape, meta.dtype
    sizes: Iterable[int | None] = [None] * len(meta.shape)
    if node.parameters and meta.shape:
        # A class of the user, or one that torch makes for a weight norm, ends with the name of the layer.
        is_first = any(kind in node.type_name for kind in _CHANNELS_FIRST) and len(meta.shape) > 1
        fixed = 1 if is_first else len(meta.shape) - 1
        sizes = [size if place == fixed else None for place, size in enumerate(meta.shape)]
    return tuple(sizes), meta.dtype
