"""The parts of a model that a recorded step did not use or train."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set

from torch import nn

from lightning_recorder.graph.capture.builder import Draft, GraphBuilder
from lightning_recorder.graph.capture.gradients import Gradients
from lightning_recorder.graph.model import FROZEN_HERE, Kind, TensorMeta
from lightning_recorder.graph.unused import Unused
from lightning_recorder.internals.module_tree import children_of, class_attribute
from lightning_recorder.module_names import is_metric, named_submodules

__all__ = ["find_unused"]

_DETACHING = ("detach", "data")
_FLOATING = ("float", "bfloat", "complex")
# Endings of the names of functions that use only the shape, dtype or device of their first or second argument.
_LIKE = ("_like", "_as", "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor", "new_empty_strided")


def find_unused(
    root: nn.Module,
    registered: Set[str],
    parameters: Mapping[str, bool],
    builder: GraphBuilder,
    opaque: Iterable[int],
    gradients: Gradients,
) -> Unused:
    """Return the modules and parameters that were not used or not trained, and set the notes of their nodes.

    ``parameters`` maps each name to True if the parameter requires a gradient. The inside of ``opaque`` calls was not
    observed. ``gradients`` has the parameters that got a gradient or were updated during the recording.
    """
    nodes, given = builder.nodes, gradients.given
    reached = _reached(builder)
    numbers = builder.of_kind("parameter")
    if reached is None:
        used = {nodes[number].name for number in numbers}
    else:
        used = {nodes[number].name for number in numbers if number in reached}.union(given)
        used |= _written(builder, reached)
    frozen = [name for name, trained in parameters.items() if not trained]
    missing = dict.fromkeys([name for name, trained in parameters.items() if trained and name not in used])
    if frozen or missing:
        for node in map(nodes.__getitem__, numbers):
            if parameters.get(node.name) is False:
                node.note = "frozen"
            elif node.name in missing:
                node.note = "no gradient"
    unregistered: dict[str, None] = {}
    if reached is not None and builder.of_kind("optimizer"):
        # Report only modules in Python containers, such as ``blocks[0]``. Other modules may be copies made in the step.
        others = {number: name for number in numbers if "[" in (name := nodes[number].name) and name not in parameters}
        for number, name in others.items():
            if number in reached and name not in gradients.updated:
                nodes[number].note = "not registered"
                unregistered[name] = None
    found = Unused(
        tuple(_never_called(root, registered, builder, {nodes[number].name for number in opaque}, given)),
        tuple(missing),
        tuple(_joined(frozen, parameters)),
        tuple(_stops(builder, reached)),
        tuple(unregistered),
    )
    for number in builder.partly_frozen():
        nodes[number].note = nodes[number].note or FROZEN_HERE
    return found


def _written(builder: GraphBuilder, reached: set[int]) -> set[str]:
    """Return the parameters that a function wrote to and that get a gradient from a later function."""
    return {name for name, users in builder.written.items() if not reached.isdisjoint(users)}


def _reached(builder: GraphBuilder) -> set[int] | None:
    """Return the nodes that gradients reach from the backward passes, or from the model's results if there are none.

    Returns ``None`` if no recorded function is differentiable, as in a validation step.
    """
    nodes = builder.nodes
    starts = builder.backward_passes()
    if all(nodes[number].name == "grad" for number in starts):  # the model may update its parameters itself
        starts = [*starts, *builder.of_kind("output")]
    if not any(node.autograd for node in nodes):
        return None
    if not starts:
        sources = builder.used()
        starts = [number for number, node in enumerate(nodes) if node.kind == "op" and number not in sources]
    return builder.reached_by_gradient(starts)


def _never_called(
    root: nn.Module, registered: Set[str], builder: GraphBuilder, opaque: set[str], given: Collection[str]
) -> Iterable[str]:
    """Yield the outermost registered modules without any recorded call, tensor or gradient."""
    kinds: tuple[Kind, ...] = ("module", "parameter", "buffer")
    recorded = {builder.nodes[number].name for kind in kinds for number in builder.of_kind(kind)}.union(given)
    if registered <= recorded:
        return  # the usual case
    modules = named_submodules(root)
    used = {""}
    for name in recorded:
        while name and name not in used:
            used.add(name)
            name = name.rpartition(".")[0]
    unused: set[str] = set()
    for name, module in modules.items():
        if name in used or any(name.startswith(f"{each}." if each else "") for each in opaque):
            continue
        unused.add(name)
        # Leave out empty containers, which cannot be called, and metrics, which may be updated in other steps.
        empty = class_attribute(type(module), "forward") is nn.Module.forward and not any(children_of(module))
        if name.rpartition(".")[0] not in unused and not empty and not is_metric(module):
            yield name


def _joined(names: list[str], parameters: Mapping[str, bool]) -> Iterable[str]:
    """Shorten a list of parameters: if all parameters of a module are in it, replace them by the module's name."""
    if not names:
        return ()
    others = {""} if len(names) < len(parameters) else set[str]()
    for name in parameters.keys() - set(names):
        while name:
            others.add(name)
            name = name.rpartition(".")[0]
    found: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        outer = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
        found[next((each for each in outer if each not in others), name)] = None
    return found


def _stops(builder: GraphBuilder, reached: set[int] | None) -> Iterable[str]:
    """Yield the functions that stop a gradient: an input requires a gradient, and the result is used later."""
    if reached is None:
        return
    nodes = builder.nodes
    # Writing to a parameter without autograd, as in a projection of weights, stops no gradient.
    written = _written(builder, reached)
    writing = {user for name in written for user in builder.written[name]}
    if written:
        writing.update(target for source, target in builder.ends if nodes[source].name in written)
    taking = [each for each in builder.taking_gradients() - reached - writing if _may_stop(nodes[each])]
    if not taking:
        return  # the usual case
    leading = builder.leading()
    ends = builder.without_gradient(leading)
    for number in sorted(leading.intersection(taking)):
        node = nodes[number]
        if node.autograd and number not in ends:
            continue  # a later function stops the gradient
        reason = node.note or _reason(node, ends.get(number))
        node.note = f"stops the gradient: {reason}"
        place = "/".join(filter(None, (nodes[node.parent or 0].name, node.name)))
        yield f"{place} ({reason})" + (f" at {node.source}" if node.source else "")


def _may_stop(node: Draft) -> bool:
    is_function = node.kind == "op" or node.name == "grad"
    return is_function and node.name != "identity" and not node.name.endswith(_LIKE)


def _reason(node: Draft, used: TensorMeta | None) -> str:
    """Return the reason why a function stops the gradient. ``used`` is the first of its outputs that is used."""
    if node.name in _DETACHING:
        return "detach"
    if node.kind == "backward":
        return "without create_graph"
    used = next(iter(node.outputs), None) if used is None else used
    if used is not None and not used.dtype.startswith(_FLOATING):
        return f"{used.dtype} result"
    return "not differentiable"
