"""The forms of nodes: two nodes have the same form if they and their contents look the same."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from lightning_recorder.graph.model import Graph, Node, TensorMeta
from lightning_recorder.graph.views.dilations import undilated
from lightning_recorder.graph.views.wiring import Key, MutableGraph

__all__ = [
    "GEOMETRY",
    "SIZE",
    "TENSORS",
    "VARIED",
    "forms",
    "is_setting",
    "operands",
    "parameter_counts",
    "span",
    "without_numbers",
]

TENSORS = ("parameter", "buffer", "tensor")
# The weights of these layers determine the size of dimension 1 of their outputs. The weights of other layers determine
# the size of the last dimension.
_CHANNELS_FIRST = ("Conv1d", "Conv2d", "Conv3d", "ConvTranspose", "BatchNorm", "GroupNorm", "InstanceNorm")

SIZE = "number of parameters"
"""The argument of a folded call with the smallest and the largest number of its parameters, such as ``160…760``."""

VARIED = ("p", "drop_prob", "drop_rate", SIZE)
"""Settings of modules that may differ between equal blocks. For example, drop path rates often grow with the depth."""

# Names of function arguments in which equal nodes may differ. All other arguments are settings, such as a slope.
_PLACES = ("index", "start")  # the value may be the number of the current step of a loop
_SIZES = frozenset(("size", "sizes", "shape", "length", "split_size", "split_size_or_sections"))
_NUMBERS = frozenset(("input", "other", "value", "fill_value", "weight", "end", "low", "high", "mean", "std", "steps"))
_EXECUTION = frozenset(
    ("dtype", "device", "layout", "memory_format", "pin_memory", "requires_grad", "non_blocking", "copy", "generator")
)
_OF_TRAINING = frozenset(("training", "train", "dropout", "dropout_p"))
_VARIED_OF_FUNCTIONS = _SIZES | _NUMBERS | _EXECUTION | _OF_TRAINING | frozenset(_PLACES)
_RESHAPES = ("reshape", "view", "unflatten")
# Lookups in a table. Equal tables may have different numbers of rows, such as the categories of different features.
_LOOKUPS = ("Embedding", "EmbeddingBag")

GEOMETRY = frozenset(
    (
        *("", "in_features", "out_features", "num_features", "num_groups", "normalized_shape", "output_size"),
        *("stride", "padding", "kernel_size", "dilation", "groups", "scale_factor"),
    )
)
"""Settings that determine the sizes of tensors, such as a stride that halves the resolution."""


def forms(graph: Graph, parts: MutableGraph, *, with_training: bool = True, with_sizes: bool = True) -> dict[int, int]:
    """Return a number for each node. Two numbers are equal exactly if the nodes and their contents look the same.

    Contents look the same only if the edges inside them are equal, too.

    Args:
        graph: The graph.
        parts: The same graph in the form that is being folded.
        with_training: Also compare which parameters are frozen or got no gradient, and where a gradient stops. A
            missing gradient is not compared in calls that lead to no loss and no output: the edges show the reason.
        with_sizes: Also compare the sizes of tensors and the settings in :data:`GEOMETRY`.
    """
    tree = parts.subtree(graph.root.id)
    place = {node: number for number, node in enumerate(tree)}
    inner = _inner_edges(graph, place)
    untrained = _untrained(graph) if with_training else {}
    reshaped = _reshaped([parts.nodes[each] for each in tree], graph)
    numbers: dict[object, int] = {}
    known: dict[int, int] = {}
    # Children come after their parent, so they are visited first in reverse order.
    for node_id in reversed(tree):
        node = parts.nodes[node_id]
        # The contents of a lookup are its table.
        inside = () if _is_lookup(node) else tuple(known[child] for child in parts.children.get(node_id, ()))
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
    """Return, by module, its frozen parameters and its parameters without a gradient; "" means the whole module."""
    found: dict[str, list[tuple[str, str]]] = {}
    leading = _leading(graph) if graph.unused.parameters else set()
    for status, names in (("frozen", graph.unused.frozen), ("no gradient", graph.unused.parameters)):
        for name in names:
            around, _, last = name.rpartition(".")
            if leading and status == "no gradient" and leading.isdisjoint((name, around)):
                continue
            found.setdefault(name, []).append(("", status))  # if the name is a module
            found.setdefault(around, []).append((last, status))  # if the name is a parameter
    return {name: tuple(each) for name, each in found.items()}


def _leading(graph: Graph) -> set[str]:
    """Return the names of the modules with a call that leads to a backward pass or to an output."""
    todo = [node.id for node in graph.nodes if node.kind in ("backward", "output")]
    found = set(todo)
    while todo:
        node = graph[todo.pop()]
        # The results of a call are those of its contents.
        new = {edge.source for edge in graph.into(node)} | ({node.parent} if node.parent is not None else set())
        todo += new - found
        found |= new
    return {node.name for node in graph.module_calls() if node.id in found}


def _reshaped(nodes: Iterable[Node], graph: Graph) -> dict[int, Key]:
    """Return the output shapes of the reshaping functions whose input shape another function reshapes differently.

    Functions with different output shapes for the same input shape are not equal. Output sizes of other functions may
    depend on the data and are not compared.
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
    """Return the edges between the children of each call, in a form to compare.

    The form of an edge has the offsets of its two ends from the call, the number of earlier edges from inside the call
    into the same target, the multiplicity, and the output indices. Edges between repetitions are left out, since
    :class:`Siblings` compares them.
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
    """Return the properties that equal nodes have in common."""
    # Equal modules have different names. The names of equal parameters are the same only after the last dot.
    name = "" if node.kind == "module" else node.name.rpartition(".")[2] if node.kind != "op" else node.name
    sizes = tuple(_fixed_sizes(node, meta) for meta in node.outputs)
    tied = tuple(map(without_numbers, node.tied))  # the names of equal blocks differ only in numbers
    parameters = 0 if _is_lookup(node) else node.parameters
    about = parameters, node.failed, node.repeats, node.parallel, node.shared, tied
    return node.kind, name, node.type_name, sizes, _settings(node), *about


def without_numbers(name: str) -> str:
    """Return the name of a module or tensor with its numbers masked, so that equal blocks have equal names."""
    # The first unregistered module of a class has no number in its name, later modules do: Block, Block#2.
    return re.sub("[0-9]+", "#", re.sub("#[0-9]+", "", name))


def _label_without_sizes(node: Node) -> Key:
    """Return the properties that nodes have in common if they differ only in sizes."""
    kind, name, type_name, outputs, settings, _, *about = _label(node)
    kept = tuple(pair for pair in settings if pair[0] not in GEOMETRY)
    return kind, name, type_name, tuple(dtype for *_, dtype in outputs), kept, *about


def _settings(node: Node) -> Key:
    """Return the arguments that equal nodes have in common, such as a stride."""
    if node.kind == "module":
        # The first setting of a lookup is its number of rows.
        given = node.arguments[1:] if _is_lookup(node) else node.arguments
        return undilated([pair for pair in given if pair[0] not in VARIED])
    return undilated([pair for pair in node.arguments if is_setting(node, pair[0])])


def span(names: Sequence[str]) -> str:
    """Join several names into one name with the first and the last number, such as ``encoder.0…3.weight``."""
    names = [name.removeprefix("=") for name in names]
    first, last = (re.split("([0-9]+)", names[place]) for place in (0, -1))
    if first[::2] != last[::2]:
        return f"{names[0]} … {names[-1]}"
    parts = (one if one == other else f"{one}…{other}" for one, other in zip(first, last, strict=True))
    return "".join(parts)


def parameter_counts(node: Node) -> list[int]:
    """Return the number of parameters of a call; for a folded call, the smallest and the largest number if they differ.

    The list has one number if all calls that the node represents have the same number of parameters.
    """
    known = dict(node.arguments).get(SIZE, "") if node.kind == "module" else ""
    return list(map(int, known.split("…"))) if known else [node.total_parameters or node.parameters]


def _is_lookup(node: Node) -> bool:
    return node.kind == "module" and node.type_name in _LOOKUPS


def is_setting(node: Node, name: str) -> bool:
    """Return True if an argument is a setting of a function, not an operand, a size or an execution option."""
    # In a dropout, ``p`` is the drop rate. In other functions, ``p`` is the order of a norm.
    if name == "p":
        return "dropout" not in node.name and node.name != "bernoulli"
    return name not in _VARIED_OF_FUNCTIONS


def operands(node: Node, *, only_places: bool = False) -> Key:
    """Return the arguments of a function that are neither settings nor sizes, such as an index or a number to add.

    Args:
        node: A node.
        only_places: Only return the arguments that select a part of a tensor, such as an index.
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
        # The class name may only contain the layer's name: a user's subclass, or a class of torch for a weight norm.
        is_first = any(kind in node.type_name for kind in _CHANNELS_FIRST) and len(meta.shape) > 1
        fixed = 1 if is_first else len(meta.shape) - 1
        sizes = [size if place == fixed else None for place, size in enumerate(meta.shape)]
    return tuple(sizes), meta.dtype
